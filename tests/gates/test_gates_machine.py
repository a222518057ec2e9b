"""Random gates, conditions and strengths, in calls, chunks, padded batches, `generate` and batches.

The oracle is a plain copy of the model with hooks by hand, which runs each sequence alone, token by
token in plain Python.
"""

from __future__ import annotations

import copy
import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import ferrohook as fh
from support.amounts import amount
from support.language_models import random_llama
from support.threads import in_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

transformers = pytest.importorskip("transformers")

WIDTH = 8
VOCABULARY = 32
PLACES = [
    "model.embed_tokens",
    "model.layers.0.mlp",
    "model.layers.0",
    "model.layers.1.mlp",
    "model.layers.1",
    "model.norm",
    "lm_head",
]
"""In the order in which they run."""
SUMS = [[0, 2], [1, 2, 4], [0, 3]]
"""Places whose sum a gate reads."""
ATS: dict[str, tuple[Any, Callable[[int, int], bool]]] = {
    "all": (None, lambda _p, _n: True),
    "prompt": ("prompt", lambda p, n: p < n),
    "generated": ("generated", lambda p, n: p >= n),
    "not the first": (slice(1, None), lambda p, _n: p >= 1),
    "before the end": (slice(-2, None), lambda p, n: p >= max(n - 2, 0)),
    "function": (lambda p: p % 3 != 1, lambda p, _n: p % 3 != 1),
}
"""Positions as a plan has them, and as a function of a position and the length of the prompt."""
MARGIN = 1e-4
"""Distance of values from thresholds: rows that share a forward differ in rounding."""


@functools.cache
def model_of(*, hooked: bool) -> Any:
    del hooked  # apart in the cache
    return random_llama(WIDTH, seed=1).double()


@dataclass(frozen=True)
class Gate:
    """A drawn gate."""

    name: str
    places: list[int]
    """In the order in which they run: their sum is read."""
    reading: Any
    at: str
    over: Any
    by: str
    lag: int

    @property
    def place(self) -> int:
        return self.places[-1]


@dataclass(frozen=True)
class Change:
    """A drawn entry that depends on gates."""

    place: int
    hook: Any
    at: str
    when: Any
    strength: Any


@dataclass(frozen=True)
class Scene:
    """Drawn gates and changes, in the order of the plan."""

    entries: list[Gate | Change]

    def plan(self) -> fh.Plan:
        made: list[Any] = []
        for entry in self.entries:
            at = ATS[entry.at][0]
            if isinstance(entry, Change):
                options = {"when": entry.when, "strength": entry.strength}
                made.append(fh.on(PLACES[entry.place], entry.hook, at=at, **options))
                continue
            options = {"over": entry.over, "by": entry.by, "lag": entry.lag}
            places = [PLACES[each] for each in entry.places]
            what: Any = places[0] if len(places) == 1 else places
            made.append(fh.gate(entry.name, what, entry.reading, at=at, **options))
            made.append(fh.keep(f"@gate.{entry.name}"))
        return fh.Plan(*made)


vectors = st.integers(0, 9).map(
    lambda seed: torch.randn(WIDTH, generator=torch.Generator().manual_seed(seed)).double()
)
numbers = st.sampled_from([-1.5, -0.4, -0.1, 0.0, 0.1, 0.3, 0.7, 2.0])


@st.composite
def readings(draw: Any, place: int) -> Any:
    if place == len(PLACES) - 1:
        return draw(
            st.sampled_from(
                [fh.MaxProbability(), fh.Entropy(), fh.TokenProbability([3, 5, 7])],
            )
        )
    vector = draw(vectors)
    return draw(
        st.sampled_from(
            [
                fh.Dot(vector, 0.2),
                fh.Cosine(vector),
                fh.Cosine(vector, projected=True),
                fh.Norm(),
                fh.Probe(vector, 0.1, mean=vector / 3, scale=vector.abs() + 0.5),
                fh.Probe(torch.stack([vector, vector.flip(0)]), index=1),
            ]
        )
    )


@st.composite
def gates(draw: Any, number: int) -> Gate:
    places = draw(st.sampled_from([[it] for it in range(len(PLACES))] + SUMS))
    over = draw(
        st.sampled_from(["token", "prompt", "so_far", fh.window(2), fh.window(3), fh.ema(0.6)])
    )
    return Gate(
        f"gate {number}",
        places,
        draw(readings(places[-1])),
        draw(st.sampled_from([*ATS])),
        over,
        draw(st.sampled_from(["max", "min", "mean", "last"])),
        0 if over == "prompt" else draw(st.sampled_from([0, 0, 1])),
    )


def conditions(names: list[str]) -> Any:
    name = st.sampled_from(names)
    simple = st.one_of(
        st.builds(fh.above, name, st.one_of(numbers, name)),
        st.builds(fh.below, name, st.one_of(numbers, name)),
        st.builds(
            lambda gate, a, b: fh.between(gate, min(a, b), max(a, b)), name, numbers, numbers
        ),
    )
    return st.recursive(
        simple,
        lambda inner: st.one_of(
            inner.map(lambda it: ~it),
            st.tuples(inner, inner).map(lambda it: it[0] & it[1]),
            st.tuples(inner, inner).map(lambda it: it[0] | it[1]),
        ),
        max_leaves=3,
    )


@st.composite
def scenes(draw: Any) -> Scene:
    own = [draw(gates(number)) for number in range(draw(st.integers(1, 3)))]
    entries: list[Gate | Change] = [*own]
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, len(PLACES) - 2))
        # A gate without a lag has to read first: entries at one place act in the plan's order.
        usable = [gate.name for gate in own if gate.lag or gate.place <= place]
        when = strength = None
        if usable and draw(st.booleans()):
            when = draw(conditions(usable))
        if usable and (when is None or draw(st.booleans())):
            start, end = draw(st.tuples(numbers, numbers).filter(lambda it: it[0] != it[1]))
            strength = fh.ramp(draw(st.sampled_from(usable)), start, end)
        elif draw(st.booleans()):
            strength = draw(numbers)
        vector = draw(vectors)
        hook = draw(st.sampled_from([fh.Add(vector), fh.Ablate(vector), fh.Scale(0.5), fh.Zero()]))
        entries.append(Change(place, hook, draw(st.sampled_from([*ATS])), when, strength))
    return Scene(entries)


class ByHand:
    """A plain copy of the model that runs one sequence, with the scene's hooks by hand."""

    def __init__(self, scene: Scene, prompt: int) -> None:
        self.model = copy.deepcopy(model_of(hooked=False))
        self.scene, self.prompt = scene, prompt
        self.gates = {it.name: it for it in scene.entries if isinstance(it, Gate)}
        self.read: dict[str, dict[int, Tensor]] = {name: {} for name in self.gates}
        self.kept: dict[str, dict[int, float]] = {name: {} for name in self.gates}
        self.start = 0
        self.parts: dict[str, Tensor] = {}
        for entry in scene.entries:
            if isinstance(entry, Change):
                self._hook(entry.place, functools.partial(self._change, entry))
                continue
            for place in entry.places[:-1]:
                self._hook(place, functools.partial(self._part, entry))
            self._hook(entry.place, functools.partial(self._read, entry))

    def _hook(self, place: int, hook: Any) -> None:
        self.model.get_submodule(PLACES[place]).register_forward_hook(hook)

    def _part(self, gate: Gate, _module: Any, _args: Any, output: Tensor) -> None:
        self.parts[gate.name] = self.parts.get(gate.name, 0) + output[0]

    def __call__(self, ids: Tensor, cache: Any) -> Any:
        output = self.model(ids[None], past_key_values=cache, use_cache=True)
        self.start += len(ids)
        return output

    def _counts(self, entry: Gate | Change, position: int) -> bool:
        return ATS[entry.at][1](position, self.prompt)

    def _read(self, gate: Gate, _module: Any, _args: Any, output: Tensor) -> None:
        for place, vector in enumerate(output[0] + self.parts.pop(gate.name, 0)):
            position = self.start + place
            if self._counts(gate, position):
                self.read[gate.name][position] = gate.reading(vector[None])[0]
        for place in range(len(output[0])):
            position = self.start + place
            if self._counts(gate, position):
                value = self.value(gate, position)
                self.kept[gate.name][position] = math.nan if value is None else float(value)

    def value(self, gate: Gate, position: int) -> Tensor | None:
        """Value of a gate at a position; None if it is unknown."""
        last = self.prompt - 1 if gate.over == "prompt" else position - gate.lag
        if position < last or (gate.lag and position < self.prompt):
            return None
        if gate.over == "token":
            return self.read[gate.name].get(last)
        read = [value for at, value in sorted(self.read[gate.name].items()) if at <= last]
        return self._aggregated(gate, read) if read else None

    @staticmethod
    def _aggregated(gate: Gate, read: list[Tensor]) -> Tensor | None:
        if isinstance(gate.over, type(fh.ema(0.5))):
            average = read[0]
            for each in read[1:]:
                average = gate.over.decay * average + (1 - gate.over.decay) * each
            return average
        if isinstance(gate.over, type(fh.window(1))):
            if len(read) < gate.over.size:
                return None
            read = read[-gate.over.size :]
        if gate.by == "last":
            return read[-1]
        together = torch.stack(read)
        return {"max": together.max, "min": together.min, "mean": together.mean}[gate.by]()

    def bound(self, bound: Any, position: int) -> Any:
        return self.value(self.gates[bound], position) if isinstance(bound, str) else bound

    def truth(self, condition: Any, position: int) -> bool | None:
        kind = type(condition).__name__
        if kind == "Not":
            one = self.truth(condition.one, position)
            return None if one is None else not one
        if kind == "Combined":
            sides = [self.truth(it, position) for it in condition.conditions]
            settles = not condition.needs_all
            if settles in sides:
                return settles
            return None if None in sides else not settles
        return self._compared(condition, position)

    def _compared(self, condition: Any, position: int) -> bool | None:
        value = self.value(self.gates[condition.gate], position)
        low, high = (self.bound(it, position) for it in (condition.low, condition.high))
        bounds = [(condition.low, low), (condition.high, high)]
        if value is None or any(given is not None and it is None for given, it in bounds):
            return None
        for bound in (low, high):
            assume(bound is None or abs(float(value) - float(bound)) > MARGIN or value is bound)
        if condition.closed:
            return bool(low <= value <= high)
        return bool(value > low) if high is None else bool(value < high)

    def _change(self, change: Change, _module: Any, _args: Any, output: Tensor) -> Tensor:
        changed = change.hook.apply(output)
        result = output.clone()
        for place in range(len(output[0])):
            position = self.start + place
            if not self._counts(change, position):
                continue
            if change.when is not None and not self.truth(change.when, position):
                continue
            strength = change.strength
            if strength is None:
                result[0, place] = changed[0, place]
                continue
            if not isinstance(strength, float):
                value = self.value(self.gates[strength.gate], position)
                if value is None:
                    continue
                share = (float(value) - strength.start) / (strength.end - strength.start)
                strength = min(max(share, 0.0), 1.0)
            x = output[0, place]
            result[0, place] = x + strength * (changed[0, place] - x)
        return result


class Alone:
    """Result of a sequence by itself."""

    def __init__(self, scene: Scene, text: list[int], prompt: int, new: int) -> None:
        """Runs `text`, whose first tokens are the prompt; then `new` tokens greedily."""
        by_hand, cache = ByHand(scene, prompt), transformers.DynamicCache()
        self.logits, self.text = [], [*text]
        pending = [torch.tensor(text[:prompt]), *torch.tensor(text[prompt:])[:, None]]
        for ids in pending:
            self.logits.append(by_hand(ids, cache).logits[0])
        for number in range(new):
            self.text.append(int(self.logits[-1][-1].argmax()))
            if number < new - 1:
                self.logits.append(by_hand(torch.tensor(self.text[-1:]), cache).logits[0])
        self.kept = by_hand.kept

    def check(self, logits: Tensor) -> None:
        # Strengths are computed in float32, whose rounding these weights of 0.5 amplify.
        right = torch.cat(self.logits)[-len(logits) :]
        torch.testing.assert_close(logits, right, rtol=1e-3, atol=1e-3)

    def check_kept(self, acts: Any, before: Sequence[Alone] = ()) -> None:
        """Checks the captured values of a row; `before`: the rows ahead of it."""
        for name, expected in self.kept.items():
            if not expected:
                continue
            start = sum(len(each.kept[name]) for each in before)
            own = slice(start, start + len(expected))
            assert acts.positions(f"@gate.{name}")[own] == sorted(expected)
            right = torch.tensor([value for _, value in sorted(expected.items())])
            values = acts[f"@gate.{name}"][own]
            torch.testing.assert_close(values, right, equal_nan=True, rtol=1e-4, atol=1e-5)


texts = st.lists(st.integers(1, VOCABULARY - 1), min_size=1, max_size=6)
run_settings = settings(
    max_examples=amount(25, whole=2500),
    deadline=None,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
    database=None,
)
pytestmark = [
    pytest.mark.filterwarnings("ignore::ferrohook.errors.NeverFiredWarning"),
    # Names of arguments that older versions have.
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def opened(scene: Scene, model: Any) -> Any:
    plan = scene.plan()
    if not any(entry.at == "function" for entry in scene.entries):
        assert fh.Plan.from_json(plan.to_json()) == plan
        plan = fh.Plan.from_json(plan.to_json())
    return plan.open(model)


@torch.no_grad()
@given(scene=scenes(), text=texts, later=st.lists(st.integers(1, 31), max_size=4), data=st.data())
@run_settings
def test_calls_with_a_cache(scene: Scene, text: list[int], later: list[int], data: Any) -> None:
    """A prompt, then token by token; or the prompt in chunks, with its length given."""
    model, alone = model_of(hooked=True), Alone(scene, text + later, len(text), 0)
    cache, chunks, logits = transformers.DynamicCache(), [text], []
    lagging = any(isinstance(it, Gate) and it.lag for it in scene.entries)
    cut = data.draw(st.integers(0, len(text) - 1))
    if cut and not lagging:
        chunks = [text[:cut], text[cut:]]
    prepared = scene.plan().prepare(model)
    with prepared.open(prompt=len(text)) as request:
        for ids in [*chunks, *([each] for each in later)]:
            output = model(torch.tensor([ids]), past_key_values=cache)
            logits.append(output.logits[0])
    alone.check(torch.cat(logits))
    alone.check_kept(request.acts)


@torch.no_grad()
@given(scene=scenes(), rows=st.lists(texts, min_size=1, max_size=3), new=st.integers(1, 4))
@run_settings
def test_generate_with_padding(scene: Scene, rows: list[list[int]], new: int) -> None:
    """Prompts of several lengths, padded on the left, that go on greedily."""
    # `generate` computes logits for the last token of a prompt only.
    assume(all(PLACES[entry.place] != "lm_head" for entry in scene.entries))
    model = model_of(hooked=True)
    alone = [Alone(scene, text, len(text), new) for text in rows]
    columns = max(map(len, rows))
    ids = torch.tensor([[0] * (columns - len(text)) + text for text in rows])
    mask = torch.tensor([[0] * (columns - len(text)) + [1] * len(text) for text in rows])
    with opened(scene, model) as request:
        done = model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False)
    for number, each in enumerate(alone):
        assert done[number, columns:].tolist() == each.text[-new:]
        each.check_kept(request.acts, alone[:number])


@torch.no_grad()
@given(data=st.data(), texts=st.lists(texts, min_size=2, max_size=4))
@run_settings
def test_members_of_a_batch(data: Any, texts: list[list[int]]) -> None:
    """Requests with different plans that share forwards: the prompts, then tokens together."""
    model = model_of(hooked=True)
    drawn = [data.draw(scenes()) for _ in texts]
    new = data.draw(st.integers(0, 3))
    later = [data.draw(st.lists(st.integers(1, 31), min_size=new, max_size=new)) for _ in texts]
    alone = [
        Alone(scene, text + more, len(text), 0)
        for scene, text, more in zip(drawn, texts, later, strict=True)
    ]
    columns = max(map(len, texts))
    ids = torch.tensor([[0] * (columns - len(it)) + it for it in texts])
    mask = torch.tensor([[0] * (columns - len(it)) + [1] * len(it) for it in texts])
    positions = torch.where(mask > 0, mask.cumsum(1) - 1, -1)
    requests = [scene.plan().prepare(model).open() for scene in drawn]
    plain = data.draw(st.booleans())  # one that has no plan
    cache, logits = transformers.DynamicCache(), []
    rows = {request: [number] for number, request in enumerate(requests)}
    size = len(texts) + plain
    if plain:
        ids, mask, positions = (torch.cat((it, it[:1])) for it in (ids, mask, positions))
    lengths = {request: len(text) for request, text in zip(requests, texts, strict=True)}
    for step in range(new + 1):
        given_ids = ids if not step else torch.tensor([it[step - 1 : step] for it in later])
        if step:
            given_ids = torch.cat((given_ids, given_ids[:1])) if plain else given_ids
            mask = torch.cat((mask, mask.new_ones(size, 1)), 1)
            positions = positions[:, -1:] + 1
        with fh.batch(rows, positions=positions, lengths=lengths, dim=0):
            output = model(
                given_ids,
                attention_mask=mask,
                position_ids=positions.clamp(min=0),
                past_key_values=cache,
            )
        logits.append(output.logits)
    together = torch.cat(logits, 1)
    for number, (each, request) in enumerate(zip(alone, requests, strict=True)):
        assert request.error is None
        each.check(together[number, columns - len(texts[number]) :])
        each.check_kept(request.acts)


def test_threads_share_a_model() -> None:
    """Each thread has its requests with gates."""
    model = model_of(hooked=True)
    alone = []
    for seed in range(4):
        direction, vector = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(seed))
        gate = Gate("g", [2], fh.Dot(direction), "all", "so_far", "mean", 0)
        scene = Scene([gate, Change(4, fh.Add(vector.double()), "all", fh.above("g", 0.0), None)])
        alone.append((scene, Alone(scene, [3, 5, 9, seed + 1], 4, 3)))

    @torch.no_grad()
    def work(number: int) -> None:
        scene, expected = alone[number]
        for _ in range(amount(5, whole=100)):
            with scene.plan().open(model) as request:
                ids = torch.tensor([[3, 5, 9, number + 1]])
                done = model.generate(ids, max_new_tokens=3, do_sample=False)
            assert done[0].tolist() == expected.text
            expected.check_kept(request.acts)

    in_threads(len(alone), work)

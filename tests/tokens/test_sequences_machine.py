"""Random sequences in one scope: chunks, drafts, cached prefixes, turns, steps by hand, padding.

They run one after the other, or each on a thread. The oracle is a plain copy of the model, hooked
by hand. These hooks know the prompt of each call, as the program that makes it does, and count
columns.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import ferrohook as fh
from support.amounts import amount
from support.capture import tensors_of
from support.language_models import encoder_decoder_model, random_llama
from support.threads import run_together

if TYPE_CHECKING:
    from collections.abc import Iterator

transformers = pytest.importorskip("transformers")

WIDTH = 8
LAYER = "model.layers.0"
FACTOR = -0.7
NEW = 5
pytestmark = [
    pytest.mark.filterwarnings("ignore::ferrohook.errors.NeverFiredWarning"),
    # Names of arguments that older versions have.
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@functools.cache
def model_of(seed: int, *, hooked: bool = False) -> Any:
    """A model of these weights; `hooked`: the one that plans are prepared for."""
    del hooked  # apart in the cache
    return random_llama(WIDTH, seed).double()


ATS: dict[str, tuple[Any, Any]] = {
    # Positions as a plan has them, and as a function of (position, length of the prompt).
    "prompt": ("prompt", lambda p, n: p < n),
    "last_prompt": ("last_prompt", lambda p, n: p == n - 1),
    "generated": ("generated", lambda p, n: p >= n),
    "int": (4, lambda p, n: p == 4),
    "before the end": (-2, lambda p, n: p == n - 2),
    "slice": (slice(1, 5, 2), lambda p, n: (p >= 1) & (p < 5) & (p % 2 == 1)),
    "around the end": (slice(-2, None), lambda p, n: p >= (n - 2).clamp(min=0)),
    "function": (lambda p: p % 3 == 1, lambda p, n: p % 3 == 1),
}
NEEDS_PROMPT = {"prompt", "last_prompt", "generated", "before the end", "around the end"}


class ByHand:
    """Plain copy of a model whose hook knows the prompts of the running call."""

    def __init__(self, model: Any, chosen: Any) -> None:
        self.model = copy.deepcopy(model)
        self.chosen = chosen
        self.lengths = self.padding = torch.zeros(1, dtype=torch.long)
        self.past = 0
        self.kept: list[Tensor] = []
        inner = self.model.model
        inner.register_forward_pre_hook(self.count, with_kwargs=True)
        inner.layers[0].register_forward_hook(self.change)

    def tell(self, lengths: Any, padding: Any = 0) -> None:
        """Says how long the prompts of the calls from now on are, and their padding on the left."""
        self.lengths = torch.as_tensor(lengths).reshape(-1, 1)
        self.padding = torch.as_tensor(padding).reshape(-1, 1)

    def count(self, _module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        self.past = 0 if cache is None else int(cache.get_seq_length())

    def change(self, _module: Any, _args: Any, output: Tensor) -> Tensor:
        columns = torch.arange(self.past, self.past + output.shape[1])
        positions = (columns - self.padding).expand(output.shape[:2])
        mask = (positions >= 0) & self.chosen(positions, self.lengths)
        self.kept += [*output[mask].clone()]
        return torch.where(mask[..., None], output * FACTOR, output)


class Ours:
    """The model that a request's plan is for; it gets no hints."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def tell(self, lengths: Any, padding: Any = 0) -> None:
        pass


def ids_of(seed: int, *shape: int) -> Tensor:
    return torch.randint(3, 32, shape, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Step:
    """Calls of a model, each on a new sequence; `run` returns its output."""

    seed: int
    lengths: tuple[int, ...]

    def inputs(self) -> tuple[Tensor, Tensor, list[int]]:
        """Token ids padded on the left, their mask, and the padding of each row."""
        longest = max(self.lengths)
        ids = ids_of(self.seed, len(self.lengths), longest)
        padding = [longest - length for length in self.lengths]
        mask = torch.arange(longest) >= torch.tensor(padding)[:, None]
        return ids * mask, mask.long(), padding


@dataclass(frozen=True)
class Forward(Step):
    """One forward, whose tokens are the prompt."""

    def run(self, it: Any, needs: bool) -> Any:
        ids, mask, padding = self.inputs()
        it.tell(self.lengths, padding)
        return it.model(ids, attention_mask=mask, use_cache=False).logits


@dataclass(frozen=True)
class Generate(Step):
    """Generation, whole, in chunks, without a cache, with a static one, or with drafts."""

    options: dict[str, Any] = field(default_factory=dict)
    ends: int | None = None
    """Number of the new token of the first row, as generated plainly, that ends a text."""

    def run(self, it: Any, needs: bool) -> Any:
        ids, mask, padding = self.inputs()
        options = dict(self.options)
        if options.pop("assistant", False):
            options["assistant_model"] = model_of(9)
        given = {"attention_mask": mask, "max_new_tokens": NEW, "do_sample": False}
        if self.ends is not None:
            text = model_of(0).generate(ids, **given)
            options["eos_token_id"] = int(text[0, self.ends - NEW])
        it.tell(self.lengths, padding)
        return it.model.generate(ids, **given, **options)


@dataclass(frozen=True)
class Turns(Step):
    """A chat that goes on with its cache."""

    whole: bool = True

    def run(self, it: Any, needs: bool) -> Any:
        ids, mask, padding = self.inputs()
        cache = transformers.DynamicCache(config=it.model.config)
        options = {"max_new_tokens": 3, "do_sample": False, "past_key_values": cache}
        it.tell(self.lengths, padding)
        text = it.model.generate(ids, attention_mask=mask, **options)
        more = ids_of(self.seed + 1, len(ids), 1 + self.seed % 3)
        text = torch.cat([text, more], 1)
        mask = torch.cat([mask, mask.new_ones(len(ids), 3 + more.shape[1])], 1)
        new = text if self.whole else text[:, cache.get_seq_length() :]
        it.tell(mask.sum(1), padding)
        return it.model.generate(new, attention_mask=mask, **options)


@dataclass(frozen=True)
class Prefix(Step):
    """Questions after copies of a cached prefix, which the request may have seen being filled."""

    chunk: int | None = None

    def run(self, it: Any, needs: bool) -> Any:
        prefix = ids_of(self.seed, 1, 3)
        cache = transformers.DynamicCache(config=it.model.config)
        it.tell(3)
        it.model(prefix, past_key_values=cache)
        texts = []
        for length in self.lengths:
            ids = torch.cat([prefix, ids_of(self.seed + length, 1, length)], 1)
            it.tell(3 + length)
            options = {"max_new_tokens": 3, "do_sample": False, "prefill_chunk_size": self.chunk}
            texts.append(it.model.generate(ids, past_key_values=copy.deepcopy(cache), **options))
        return texts


@dataclass(frozen=True)
class Steps(Step):
    """Calls by hand with a cache, which is passed or comes from the first one."""

    passed: bool = True

    def run(self, it: Any, needs: bool) -> Any:
        cache = transformers.DynamicCache(config=it.model.config) if self.passed else None
        it.tell(self.lengths[0])
        results = []
        for number, length in enumerate(self.lengths):
            output = it.model(ids_of(self.seed + number, 1, length), past_key_values=cache)
            cache = output.past_key_values
            results.append(output.logits)
        return results


@dataclass(frozen=True)
class Unseen(Step):
    """A call after the copy of a cache: no source says where the prompt ends."""

    def run(self, it: Any, needs: bool) -> Any:
        cache = transformers.DynamicCache(config=it.model.config)
        it.tell(self.lengths[0])
        first = it.model(ids_of(self.seed, 1, self.lengths[0]), past_key_values=cache)
        if needs:
            if isinstance(it, Ours):
                with pytest.raises(fh.HookError, match=r"open\(prompt="):
                    it.model(ids_of(1, 1, 2), past_key_values=copy.deepcopy(cache))
            return first.logits
        return it.model(ids_of(1, 1, 2), past_key_values=copy.deepcopy(cache)).logits


seeds = st.integers(0, 20)
many = st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple)
one = st.integers(2, 7).map(lambda length: (length,))
ends = st.one_of(st.none(), st.integers(0, NEW - 1))
generations = st.one_of(
    st.builds(
        Generate,
        seeds,
        many,
        st.sampled_from(
            (
                {},
                {"prefill_chunk_size": 2},
                {"prefill_chunk_size": 3},
                {"use_cache": False},
                {"cache_implementation": "static"},
                {"cache_implementation": "static", "prefill_chunk_size": 2},
            )
        ),
        ends,
    ),
    st.builds(
        Generate,
        seeds,
        one,
        st.sampled_from(({"prompt_lookup_num_tokens": 2}, {"assistant": True})),
        ends,
    ),
)
steps = st.one_of(
    st.builds(Forward, seeds, many),
    generations,
    st.builds(Turns, seeds, many, st.booleans()),
    st.builds(Prefix, seeds, many, st.sampled_from((None, 2))),
    st.builds(Steps, seeds, many, st.booleans()),
    st.builds(Unseen, seeds, one),
)


def assert_same_rows(ours: list[Tensor], theirs: list[Tensor]) -> None:
    """Asserts that rows are the same, in any order: threads come in any."""
    assert len(ours) == len(theirs)
    left = torch.stack(theirs) if theirs else torch.empty(0, WIDTH)
    for row in ours:
        distances = (left - row).abs().amax(-1)
        nearest = int(distances.argmin())
        assert distances[nearest] < 1e-9
        left = torch.cat([left[:nearest], left[nearest + 1 :]])


@contextlib.contextmanager
def acting(way: str, model: Any, at: Any) -> Iterator[tuple[Any, Any, float]]:
    """Scales and captures at positions; the scope, the activations, and the factor of these."""
    if way == "plan":
        plan = fh.Plan(
            fh.keep(LAYER, at=at, calls="all", copy="clone"),
            fh.on(LAYER, fh.Scale(FACTOR), at=at),
        )
        with plan.prepare(model) as prepared, prepared.open() as request:
            yield request, request.acts, 1.0
        return
    capture = fh.capture(model, LAYER, at=at, calls="all", copy="clone")
    with capture as acts:
        # In the scope of the capture, or for all contexts.
        scope: Any = "innermost" if way == "scope" else "global"
        with fh.register(model, LAYER, fh.Scale(FACTOR), at=at, scope=scope):
            yield capture, acts, FACTOR


@settings(max_examples=amount(40, whole=250), deadline=None, suppress_health_check=[*HealthCheck])
@given(
    at=st.sampled_from([*ATS]),
    program=st.lists(steps, min_size=1, max_size=4),
    threads=st.booleans(),
    way=st.sampled_from(("plan", "scope", "global")),
)
def test_sequences_of_one_scope(at: str, program: list[Any], threads: bool, way: str) -> None:
    model = model_of(0, hooked=True)
    named, chosen = ATS[at]
    expected, rows = [], []
    for step in program:
        hand = ByHand(model, chosen)
        expected.append([*tensors_of(step.run(hand, at in NEEDS_PROMPT))])
        rows += hand.kept
    got: list[Any] = [None] * len(program)

    def run(number: int) -> None:
        with torch.no_grad():
            got[number] = [*tensors_of(program[number].run(Ours(model), at in NEEDS_PROMPT))]

    with acting(way, model, named) as (scope, acts, factor):
        if threads:
            calls = [functools.partial(scope.wrap(run), each) for each in range(len(program))]
            run_together(*calls)
        else:
            for number in range(len(program)):
                run(number)
        kept = [*acts[LAYER]] if LAYER in acts else []
    rows = [row * factor for row in rows]
    for ours, theirs in zip(got, expected, strict=True):
        for one_value, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one_value, other, rtol=1e-9, atol=1e-9)
    assert_same_rows([row for call in kept for row in call.reshape(-1, WIDTH)], rows)


@settings(max_examples=amount(12, whole=80), deadline=None, suppress_health_check=[*HealthCheck])
@given(step=generations, ats=st.lists(st.sampled_from([*ATS]), min_size=3, max_size=3))
def test_each_prompt_of_a_generation(step: Generate, ats: list[str]) -> None:
    model = model_of(0, hooked=True)
    requests = []
    for _, at in zip(step.lengths, ats, strict=False):
        plan = fh.Plan(fh.keep(LAYER, label="all"), fh.keep(LAYER, at=ATS[at][0]))
        requests.append(plan.prepare(model).open())
    with fh.rows.generating(requests):
        text = step.run(Ours(model), needs=True)
    for request, row, length, at in zip(requests, text, step.lengths, ats, strict=False):
        own = row[max(step.lengths) - length :]
        states = model.model(own[None], output_hidden_states=True).hidden_states[1][0]
        ran = torch.arange(len(own) - 1)  # the last token is computed and does not run
        assert request.error is None
        assert request.acts.positions(f"all:{LAYER}") == ran.tolist()
        close = functools.partial(torch.testing.assert_close, rtol=1e-9, atol=1e-9)
        close(request.acts[f"all:{LAYER}"], states[:-1])
        right = ran[ATS[at][1](ran, torch.tensor(length))]
        if len(right):
            assert request.acts.positions(LAYER) == right.tolist()
            close(request.acts[LAYER], states[right])
        else:
            assert LAYER not in request.acts
        request.close()


@functools.cache
def encoder_decoder() -> Any:
    torch.manual_seed(2)
    model = encoder_decoder_model(WIDTH, layers=1, heads=2, vocab=32).requires_grad_(False)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model.double()


STACKS = {"encoder": "model.encoder.layers.0", "decoder": "model.decoder.layers.0"}


class Layers:
    """Keeps the outputs of the layers of an encoder-decoder model, call by call."""

    def __init__(self, model: Any) -> None:
        self.calls: dict[str, list[Tensor]] = {name: [] for name in STACKS}
        self.pasts: list[int] = []
        for name, path in STACKS.items():
            layer = model.get_submodule(path)
            layer.register_forward_hook(functools.partial(self.keep, name))
        decoder = model.get_submodule("model.decoder")
        decoder.register_forward_pre_hook(self.count, with_kwargs=True)

    def keep(self, name: str, _module: Any, _args: Any, output: Any) -> None:
        self.calls[name].append(output if isinstance(output, Tensor) else output[0])

    def count(self, _module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        self.pasts.append(0 if cache is None else int(cache.get_seq_length()))


@settings(max_examples=amount(25, whole=120), deadline=None, suppress_health_check=[*HealthCheck])
@given(
    texts=st.tuples(seeds, many, st.integers(1, 5)),
    left=st.booleans(),
    call=st.sampled_from(("forward", "generate", "without a cache", "drafts")),
    at=st.sampled_from([*ATS]),
)
def test_an_encoder_and_a_decoder(
    texts: tuple[int, tuple[int, ...], int], left: bool, call: str, at: str
) -> None:
    model, (named, chosen) = encoder_decoder(), ATS[at]
    seed, sources, target = texts
    sources = sources[:1] if call == "drafts" else sources
    longest = max(sources)
    starts = torch.tensor([longest - each if left else 0 for each in sources])[:, None]
    counted = torch.arange(longest) - starts
    lengths = torch.tensor(sources)[:, None]
    real = (counted >= 0) & (counted < lengths)
    ids = torch.where(real, ids_of(seed, len(sources), longest), 1)
    targets = ids_of(seed + 1, len(sources), target)
    targets[:, 0] = 2

    def run(it: Any) -> None:
        inputs = {"attention_mask": real.long(), "decoder_input_ids": targets}
        if call == "forward":
            it(input_ids=ids, **inputs)
            return
        options: dict[str, Any] = {"use_cache": call != "without a cache"}
        if call == "drafts":
            options = {"prompt_lookup_num_tokens": 2}
        it.generate(ids, **inputs, max_new_tokens=4, do_sample=False, **options)

    plain = copy.deepcopy(model)
    by_hand = Layers(plain)
    run(plain)
    expected: dict[str, list[Tensor]] = {name: [] for name in STACKS}
    for states in by_hand.calls["encoder"]:
        expected["encoder"] += [*states[real & chosen(counted, lengths)]]
    for states, past in zip(by_hand.calls["decoder"], by_hand.pasts, strict=True):
        places = torch.arange(past, past + states.shape[1]).expand(states.shape[:2])
        expected["decoder"] += [*states[chosen(places, torch.tensor([[target]]))]]
    plan = fh.Plan(fh.keep([*STACKS.values()], at=named, calls="all", copy="clone"))
    with plan.prepare(model) as prepared, prepared.open() as request:
        run(model)
    for name, path in STACKS.items():
        kept = [*request.acts[path]] if path in request.acts else []
        assert_same_rows([row for each in kept for row in each.reshape(-1, WIDTH)], expected[name])

"""`stop`: ends of answers against an oracle that cuts the answers without it, and refusals."""

from __future__ import annotations

import copy
import functools
import math
import operator
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import ferrohook as fh
from support.amounts import amount
from support.language_models import language_model

transformers = pytest.importorskip("transformers")

WIDTH, END, PADDING, NEW = 8, 3, 0, 9
MARGIN = 1e-3
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # names of older versions


@functools.cache
def model() -> Any:
    """A model whose plain answers have no end."""
    made = language_model("llama", WIDTH)
    torch.manual_seed(1)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    made.generation_config.suppress_tokens = [END]
    made.generation_config.eos_token_id = END
    return made.requires_grad_(requires_grad=False)


@pytest.fixture(autouse=True)
def no_gradients() -> Any:
    with torch.no_grad():
        yield


def generated(inputs: dict[str, Tensor], **options: Any) -> Tensor:
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": PADDING} | options
    found: Tensor = model().generate(**inputs, **options)
    return found


def padded(prompts: list[list[int]]) -> dict[str, Tensor]:
    longest = max(map(len, prompts))
    missing = [longest - len(prompt) for prompt in prompts]
    ids = [[PADDING] * gap + prompt for gap, prompt in zip(missing, prompts, strict=True)]
    mask = [[0] * gap + [1] * (longest - gap) for gap in missing]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


class Monitor(NamedTuple):
    """A gate, and how it is compared."""

    over: Any
    by: Any
    at: Any
    share: float
    """Of its known values, those up to the limit."""
    rising: bool


monitors: Any = st.builds(
    Monitor,
    over=st.sampled_from(["token", "prompt", "so_far", fh.window(2), fh.ema(0.5)]),
    by=st.sampled_from(["max", "min", "mean", "last"]),
    at=st.sampled_from([None, "generated"]),
    share=st.floats(0.05, 0.95),
    rising=st.booleans(),
)


def limit_of(values: list[dict[int, float]], share: float) -> float | None:
    """A limit between two values, as rows that share a forward differ in rounding."""
    known = sorted(it for each in values for it in each.values() if not math.isnan(it))
    if not known:
        return None
    limit = known[int(share * (len(known) - 1))] - MARGIN
    return None if any(abs(each - limit) < MARGIN / 2 for each in known) else limit


def end_of(truths: list[dict[int, bool]], prompt: int, needs_all: bool) -> int | None:
    """The first position from the last one of the prompt on at which a condition is true."""
    decide = all if needs_all else any
    for at in sorted({at for each in truths for at in each}):
        if at >= prompt - 1 and decide(each.get(at, False) for each in truths):
            return at
    return None


@settings(max_examples=amount(16, whole=300), deadline=None, suppress_health_check=[*HealthCheck])
@given(
    prompts=st.lists(st.lists(st.integers(4, 31), min_size=2, max_size=6), min_size=1, max_size=3),
    drawn=st.lists(monitors, min_size=1, max_size=3),
    needs_all=st.booleans(),
    together=st.booleans(),
)
def test_answers_end_with_the_token_that_was_read(
    prompts: list[list[int]], drawn: list[Monitor], needs_all: bool, together: bool
) -> None:
    inputs, longest = padded(prompts), max(map(len, prompts))
    generator = torch.Generator().manual_seed(len(prompts))
    entries = []
    for number, (over, by, at, _, _) in enumerate(drawn):
        # The later in the plan, the earlier in the model.
        where = ("model.layers.1", "model.layers.0", "model.embed_tokens")[number]
        reading = fh.Dot(torch.randn(WIDTH, generator=generator))
        counted = None if over == "prompt" else at
        entries.append(fh.gate(f"g{number}", where, reading, at=counted, over=over, by=by))
        entries.append(fh.keep(f"@gate.g{number}"))
    prepared = fh.Plan(*entries).prepare(model())
    requests = [prepared.open() for _ in prompts]
    with fh.rows.generating(requests):
        plain = generated(inputs)
    conditions, truths = [], [[] for _ in prompts]  # type: ignore[var-annotated]
    for number, monitor in enumerate(drawn):
        name = f"@gate.g{number}"
        values: list[dict[int, float]] = []
        for request in requests:
            acts: Any = request.acts
            known = name in acts
            positions = acts.positions(name) if known else []
            values.append(dict(zip(positions, acts[name].tolist() if known else [], strict=True)))
        if (limit := limit_of(values, monitor.share)) is None:
            return
        compared = fh.above if monitor.rising else fh.below
        conditions.append(compared(f"g{number}", limit))
        for of_row, of_gate in zip(truths, values, strict=True):
            # NaN, which is unknown, is neither.
            found = {at: it > limit if monitor.rising else it < limit for at, it in of_gate.items()}
            of_row.append(found)
    when = functools.reduce(operator.and_ if needs_all else operator.or_, conditions)
    ends = [
        end_of(each, len(prompt), needs_all) for each, prompt in zip(truths, prompts, strict=True)
    ]
    plan = fh.Plan(*entries, fh.stop(when=when))
    if together:
        with warnings.catch_warnings(), plan.open(model()) as request:
            # A gate at generated tokens, if the prompt ends the request.
            warnings.simplefilter("ignore", fh.errors.NeverFiredWarning)
            text = generated(inputs)
        stopped = {each.row: each.position for each in request.stopped}
    else:
        prepared = plan.prepare(model())
        opened = [prepared.open() for _ in prompts]
        with fh.rows.generating(opened):
            text = generated(inputs)
        stopped = {
            row: each.position for row, request in enumerate(opened) for each in request.stopped
        }
    for row, (prompt, end) in enumerate(zip(prompts, ends, strict=True)):
        full = plain[row, longest:].tolist()
        # The last token that is drawn does not run.
        if end is None or end >= len(prompt) + NEW - 1:
            assert row not in stopped
            expected = full
        else:
            assert stopped[row] == end
            expected = [*full[: end + 1 - len(prompt)], END]
        answer = text[row, longest:].tolist()
        assert answer == expected + [PADDING] * (len(answer) - len(expected))


GATE = fh.gate("g", "model.layers.0", fh.Norm())
ALWAYS = fh.stop(when=fh.above("g", -1.0))
PROMPT = {"input_ids": torch.tensor([[5, 6, 7]])}


def test_a_prompt_may_end_its_request() -> None:
    with fh.Plan(GATE, ALWAYS).open(model()) as request:
        assert generated(PROMPT).tolist() == [[5, 6, 7, END]]
    (stopped,) = request.stopped
    assert stopped == ("g", 2, 0)


@pytest.mark.parametrize(
    "options",
    [{"do_sample": True}, {"min_new_tokens": 4}, {"use_cache": False}, {"temperature": 0.1}],
)
def test_the_end_is_drawn_whatever_the_settings_are(options: dict[str, Any]) -> None:
    late = fh.gate("g", "model.layers.0", fh.Norm(), at="generated", over=fh.window(2))
    with fh.Plan(late, ALWAYS).open(model()):
        answer = generated(PROMPT, **options)[0, 3:].tolist()
    assert len(answer) == 3
    assert answer[-1] == END


def test_without_a_token_for_the_end_the_padding_follows() -> None:
    with fh.Plan(GATE, ALWAYS).open(model()):
        answer = generated(PROMPT, eos_token_id=None)
    assert answer.tolist() == [[5, 6, 7, PADDING]]


def test_a_further_generation_of_a_request_goes_on() -> None:
    """Its texts are others."""
    late = fh.gate("g", "model.layers.0", fh.Norm(), at="generated", over=fh.window(2))
    with fh.Plan(late, ALWAYS).open(model()) as request:
        assert generated(PROMPT).shape[1] == 6
        assert generated({"input_ids": torch.tensor([[5, 6, 7, 8]])}).shape[1] == 7
    assert {each.position for each in request.stopped} == {4, 5}


@pytest.mark.parametrize("batched", [False, True])
def test_a_stop_of_an_earlier_turn_ends_no_answer(batched: bool) -> None:
    """The turns share a KV cache, so their tokens are of one sequence."""
    late = fh.gate("g", "model.layers.0", fh.Norm(), at="generated", over=fh.window(2))
    cache, prepared = transformers.DynamicCache(), fh.Plan(late, ALWAYS).prepare(model())
    request = prepared.open()
    with fh.rows.generating([request]) if batched else request:
        answer = generated(PROMPT, past_key_values=cache)
        assert answer.shape[1] == 6
        text = torch.cat([answer, torch.tensor([[8, 9]])], 1)
        inputs = {"input_ids": text, "attention_mask": torch.ones_like(text)}
        assert generated(inputs, past_key_values=cache).shape[1] == text.shape[1] + 3
    assert request.stopped == [("g", 9, 0)]


def test_one_of_several_texts_cannot_end_without_a_token_for_it() -> None:
    none: Any = {"eos_token_id": None, "pad_token_id": None}
    with (
        pytest.raises(fh.HookError, match="pass eos_token_id or pad_token_id to generate"),
        fh.Plan(GATE, ALWAYS).open(model()),
    ):
        generated(padded([[5, 6, 7], [8, 9, 10]]), **none)
    with fh.Plan(GATE, ALWAYS).open(model()):
        assert generated(PROMPT, **none).shape[1] == 4


@pytest.mark.parametrize("options", [{"num_beams": 2}, {"prompt_lookup_num_tokens": 2}])
def test_beams_and_drafts_are_refused(options: dict[str, Any]) -> None:
    with (
        pytest.raises(fh.HookError, match=r"stop\(\) needs generate without drafts and beams"),
        fh.Plan(GATE, ALWAYS).open(model()),
    ):
        generated(PROMPT, **options)


def test_calls_tell_where_their_rows_ended() -> None:
    """Prompts that run in chunks end as those in one piece."""
    plan = fh.Plan(GATE, fh.stop(when=fh.below("g", 1e6) & ~fh.above("g", 1e6)))
    ids = torch.tensor([[5, 6, 7, 8], [9, 8, 7, 6]])
    with plan.open(model(), prompt=3) as request:
        model()(ids)
    assert request.stopped == [("g", 2, 0), ("g", 2, 1)]
    cache = transformers.DynamicCache()
    with plan.open(model(), prompt=3) as request:
        model()(ids[:, :2], past_key_values=cache)
        assert request.stopped == []
        model()(ids[:, 2:], past_key_values=cache)
    assert request.stopped == [("g", 2, 0), ("g", 2, 1)]


@pytest.mark.parametrize("seed", range(12))
def test_a_second_text_ends_no_answer(seed: int) -> None:
    """`guidance_scale` runs one without the prompt, whose tokens the gates read too."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, 32, (1, 4), generator=generator)
    direction, options = torch.randn(WIDTH, generator=generator), {"guidance_scale": 1.5}
    plain = generated({"input_ids": ids}, **options)
    with fh.capture(model(), "model.layers.1") as acts:
        model()(plain[:, :-1])
    values = acts["model.layers.1"][0] @ direction
    limit = float(values[3:].median()) + MARGIN
    end = next(at for at in range(3, len(values)) if values[at] > limit or at == len(values) - 1)
    plan = fh.Plan(
        fh.gate("g", "model.layers.1", fh.Dot(direction)), fh.stop(when=fh.above("g", limit))
    )
    with plan.open(model()):
        found = generated({"input_ids": ids}, **options)
    expected = plain[0].tolist()
    if values[end] > limit:
        expected = [*expected[: end + 1], END]
    assert found[0].tolist() == expected


@pytest.mark.timeout(60)
def test_a_stop_in_one_thread_ends_no_text_of_another() -> None:
    vector = model().get_input_embeddings().weight[7]
    plan = fh.Plan(
        fh.gate("seven", "model.embed_tokens", fh.Cosine(vector)),
        fh.stop(when=fh.above("seven", 0.99)),
    )
    other_ran, went_on = threading.Event(), threading.Event()

    def in_turn(ids: Tensor, scores: Tensor) -> Tensor:
        """Lets the second text run its first token ahead of the first text, and end after it."""
        if ids[0, 0] == 4:
            other_ran.wait()
        else:
            other_ran.set()
            went_on.wait()
        return scores.index_fill(1, torch.tensor([7]), -torch.inf)

    def generate(prompt: list[int]) -> list[int]:
        inputs = {"input_ids": torch.tensor([prompt])}
        with torch.no_grad():
            text = generated(inputs, logits_processor=[in_turn])[0].tolist()
        went_on.set()
        return text

    with plan.open(model()) as request, ThreadPoolExecutor(2) as pool:
        texts = [*pool.map(request.wrap(generate), [[4, 5, 6], [5, 6, 7]])]
    assert END not in texts[0]
    assert texts[1] == [5, 6, 7, END]


class Guided(transformers.LlamaForCausalLM):
    """Runs a second text, with a cache of its own, in each call."""

    other: Any = None
    length = 3
    """Tokens of its prompt."""

    @functools.wraps(transformers.LlamaForCausalLM.forward)
    def forward(self, input_ids: Any = None, **options: Any) -> Any:
        output = super().forward(input_ids, **options)
        if self.other is not None:
            length = self.length if self.other.get_seq_length() == 0 else 1
            ids = torch.full((len(input_ids), length), 5)
            cache = {name: self.other for name in options if "cache" in name and name[0] != "u"}
            self.model(ids, use_cache=True, **cache)
        return output


@pytest.mark.parametrize("length", [2, 3, 6])
def test_a_second_text_of_a_forward_takes_no_stop_of_the_first(length: int) -> None:
    guided = copy.deepcopy(model())
    guided.__class__ = Guided
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": PADDING}
    plain = guided.generate(**PROMPT, **options)[0].tolist()
    assert plain[4] != 5
    vector = guided.get_input_embeddings().weight[plain[4]]
    plan = fh.Plan(
        fh.gate("g", "model.embed_tokens", fh.Cosine(vector), at="generated"),
        fh.stop(when=fh.above("g", 0.99)),
    )
    guided.other, guided.length = transformers.DynamicCache(), length
    with plan.open(guided) as request:
        found = guided.generate(**PROMPT, **options)[0].tolist()
    end = plain.index(plain[4], 3)
    assert found == [*plain[: end + 1], END]
    assert request.stopped == [("g", end, 0)]
    # At the end of the prompt, the last token of the text that runs first.
    vector = guided.get_input_embeddings().weight[PROMPT["input_ids"][0, -1]]
    plan = fh.Plan(
        fh.gate("g", "model.embed_tokens", fh.Cosine(vector)), fh.stop(when=fh.above("g", 0.99))
    )
    guided.other = transformers.DynamicCache()
    with plan.open(guided) as request:
        found = guided.generate(**PROMPT, **options)[0].tolist()
    assert found == [*plain[:3], END]


def test_gates_of_a_stop_are_read_first_wherever_they_read() -> None:
    """The last gate of a forward decides, with the values that all of them have by then."""
    plan = fh.Plan(
        fh.gate("late", "model.layers.1", fh.Norm()),
        fh.gate("early", "model.embed_tokens", fh.Norm(), at="generated"),
        fh.stop(when=fh.above("early", -1.0) & fh.above("late", -1.0)),
    )
    with plan.open(model()) as request:
        assert generated(PROMPT).shape[1] == 5
    assert request.stopped == [("early, late", 3, 0)]


def test_rejected_tokens_end_nothing() -> None:
    request: Any = fh.Plan(GATE, ALWAYS).prepare(model()).open()
    positions = torch.arange(3)[None]
    with fh.batch({request: 0}, positions=positions, lengths={request: 1}):
        model()(torch.tensor([[5, 6, 7]]))
    assert request.stopped
    request.accept(0, 0)
    assert request.stopped == []


def test_a_plan_with_a_stop_is_json() -> None:
    plan = fh.Plan(GATE, fh.stop(when=fh.above("g", 0.5) & ~fh.below("g", 0.1)))
    assert fh.Plan.from_json(plan.to_json()) == plan
    assert "stop" in repr(plan)
    with pytest.raises(ValueError, match=r"entries\[0\].* 'when'"):
        fh.Plan.from_json('{"version": 1, "entries": [{"type": "stop"}]}')
    with pytest.raises(ValueError, match=r"entries\[0\]\.when: expected an object"):
        fh.Plan.from_json('{"version": 1, "entries": [{"type": "stop", "when": null}]}')


def test_what_is_no_condition_is_refused() -> None:
    with pytest.raises(fh.HookTypeError, match="when must be a condition on gates"):
        fh.stop(when=0.3)  # type: ignore[arg-type]
    with pytest.raises(fh.HookError, match="the plan has no gate 'g'"):
        fh.Plan(ALWAYS).prepare(model())

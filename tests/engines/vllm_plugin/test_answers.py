"""vLLM in this process: several answers to a prompt (`n`), each with separate captures."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: run `make vllm`")

import ferrohook as fh
import support.engines
from ferrohook.engines import vllm
from ferrohook.engines.admission import Admission
from ferrohook.engines.gate_events import AnswerGates
from ferrohook.engines.vllm import plugin, prefix_cache
from ferrohook.engines.vllm.requests import streams
from ferrohook.engines.wire import GATES, Captured
from ferrohook.errors import HookError
from ferrohook.gates.streaming import numbers_of
from support.engines import Change, Job
from support.prefix_jobs import BLOCK, border_jobs
from support.serving import Arrivals, save_model
from support.vllm_engine import EOS, WIDTH, Answer, sampling, start, state, stop

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

NEW = 12
PROMPT = [*range(10, 10 + 3 * BLOCK + 4)]
VECTOR = torch.linspace(-2, 2, WIDTH)
LAYER = "model.layers.1"
_runs = itertools.count()


@pytest.fixture(autouse=True)
def _eos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support.engines, "EOS", EOS)


class Rewound(torch.Generator):
    """CPU generator with the offset of a GPU's, which V1 takes back after a part of a prompt."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__()
        self._before = self.get_state()

    def mark(self) -> None:
        """Notes the state before a token is sampled."""
        self._before = self.get_state()

    def get_offset(self) -> int:
        """Returns the offset after a token was sampled."""
        return 4

    def set_offset(self, offset: int) -> None:
        """Takes the sampled token back."""
        assert offset == 0
        self.set_state(self._before)


def with_seeds(llm: Any, patch: pytest.MonkeyPatch) -> None:
    """Makes a CPU's V1 runner take requests with seeds whose prompts come in chunks."""
    core = llm.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.model_runner
    if not hasattr(runner, "_sample"):
        return
    sample = runner._sample

    def sampling_step(*call: Any, **named: Any) -> Any:
        for each in runner.input_batch.generators.values():
            each.mark()
        return sample(*call, **named)

    patch.setattr(runner, "_sample", sampling_step)
    patch.setattr(torch, "Generator", Rewound)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    """An engine with blocks for a few requests, and its model."""
    folder = tmp_path_factory.mktemp("llama")
    model = save_model("llama", folder)
    llm = start(folder, num_gpu_blocks_override=19, max_num_batched_tokens=48)
    with pytest.MonkeyPatch.context() as patch:
        with_seeds(llm, patch)
        yield llm, model
    stop(llm)


@dataclasses.dataclass(frozen=True)
class Asked:
    """A request for several answers, sampled."""

    job: Job
    n: int
    seed: int

    def params(self, index: int | None = None) -> Any:
        """Parameters of the request, or of one that asks for one of the answers only."""
        from vllm.sampling_params import RequestOutputKind  # noqa: PLC0415

        return sampling(
            self.job.plan,
            NEW,
            temperature=1.0,
            n=self.n if index is None else 1,
            seed=self.seed + (index or 0),
            output_kind=RequestOutputKind.FINAL_ONLY,  # all answers at once
        )


def drawn(number: int, seed: int) -> list[Asked]:
    rng = random.Random(seed)  # noqa: S311 (tests)
    return [
        Asked(job, rng.randint(1, 4), rng.randrange(1000)) for job in border_jobs(number, seed=seed)
    ]


@dataclasses.dataclass
class Watch:
    """Counts an engine's rows and preemptions."""

    rows: int = 0
    preempted: int = 0

    def attach(self, llm: Any, patch: pytest.MonkeyPatch) -> Watch:
        """Starts to count."""
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        schedule, preempt = scheduler.schedule, scheduler._preempt_request

        def scheduling(*call: Any) -> Any:
            output = schedule(*call)
            self.rows += output.total_num_scheduled_tokens
            return output

        def preempting(*call: Any, **named: Any) -> Any:
            self.preempted += 1
            return preempt(*call, **named)

        patch.setattr(scheduler, "schedule", scheduling)
        patch.setattr(scheduler, "_preempt_request", preempting)
        return self


def captured(llm: Any, output: Any, index: int) -> tuple[Captured, str | None]:
    """Returns the captures of an answer, or why there are none."""
    try:
        return vllm.activations(llm, output, index), None
    except HookError as error:
        return Captured({}, {}), str(error)


def serve(llm: Any, asked: Sequence[Asked], seed: int) -> dict[int, list[Answer]]:
    """Sends requests between steps at random; returns the answers to each by its number."""
    llm.reset_prefix_cache()
    read = {str(number): AnswerGates() for number, each in enumerate(asked) if each.job.gated}
    streams.update(read)
    engine = llm.llm_engine
    arrivals, run = Arrivals([each.job for each in asked], seed), f"{next(_runs)}-"
    answers: dict[int, list[Answer]] = {}
    while arrivals.waiting or engine.has_unfinished_requests():
        for name in arrivals.step()[0]:
            number = arrivals.running[name]
            params = asked[number].params()
            if asked[number].job.plan is not None:
                params.extra_args[GATES] = str(number)
            engine.add_request(run + name, {"prompt_token_ids": asked[number].job.prompt}, params)
        for output in engine.step():
            if output.finished:
                number = arrivals.running.pop(output.request_id.removeprefix(run))
                answers[number] = taken(llm, output, asked[number].job, read.get(str(number)))
    return answers


def taken(llm: Any, output: Any, job: Job, gates: AnswerGates | None) -> list[Answer]:
    """Returns the answers in an output; one fails if a stream had other values of its gate."""
    answers = []
    for text in output.outputs:
        found, error = Captured({}, {}), None
        if job.captures:
            found, error = captured(llm, output, text.index)
        if text.finish_reason == "error":
            error = text.stop_reason
        if gates is not None and error is None:
            values = gates.take(text.index).get("g", {"positions": [], "values": []})
            read, kept = torch.tensor(numbers_of(values)), found.acts["@gate.g"]
            if values["positions"] != found.positions["@gate.g"].tolist() or not torch.equal(
                read.nan_to_num(), kept.nan_to_num()
            ):
                error = f"a stream has {values}, but captured was {kept}"
        answers.append(Answer([*text.token_ids], found.acts, error))
    return answers


def wrong_captures(model: Any, asked: Sequence[Asked], answers: dict[int, list[Answer]]) -> int:
    """Returns how many answers have other captures than transformers has for the request alone."""
    wrong = 0
    for number, given in answers.items():
        assert len(given) == asked[number].n
        for each in given:
            try:
                assert each.error is None, each.error
                asked[number].job.check_acts(model, each)
            except AssertionError as error:
                print(number, given.index(each), asked[number].n, error)
                wrong += 1
    return wrong


@pytest.mark.v2
def test_answers_are_those_of_requests_for_one_answer(
    small: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, model = small
    asked = drawn(request.config.getoption("requests") or 48, seed=11)
    with monkeypatch.context() as patch:
        watch = Watch().attach(llm, patch)
        answers = serve(llm, asked, seed=3)
    assert len(answers) == len(asked)
    assert wrong_captures(model, asked, answers) == 0
    assert watch.preempted
    for number, given in answers.items():
        each = asked[number]
        prompt = {"prompt_token_ids": each.job.prompt}
        for index, answer in enumerate(given):
            (alone,) = llm.generate(prompt, each.params(index), use_tqdm=False)
            assert [*alone.outputs[0].token_ids] == answer.generated_tokens
            if each.job.captures:
                vllm.activations(llm, alone)
    count = sum(map(len, answers.values()))
    captures = sum(each.n for each in asked if each.job.captures)
    print(f"{count} answers, {captures} with captures, {watch.preempted} preemptions, ", end="")
    print(f"{watch.rows} rows")
    llm.generate({"prompt_token_ids": [5, 6, 7]}, sampling(None, 1), use_tqdm=False)
    assert state(llm)["requests"] == 0


def test_with_one_name_for_all_answers_captures_are_wrong(
    small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: the test before finds answers that share their captures."""
    llm, model = small
    asked = drawn(48, seed=11)
    monkeypatch.setattr(plugin, "of_answer", lambda params, *_: params)
    assert wrong_captures(model, asked, serve(llm, asked, seed=3)) > 10


@pytest.mark.v2
@pytest.mark.parametrize(
    ("kept_at", "expected"),
    [
        (None, 100 + 3 * 4),
        (slice(40, None), 68 + 3 * 4),
        ("generated", 4 * 4),
    ],
)
def test_the_rows_of_the_prompt_run_once(
    small: Any, monkeypatch: pytest.MonkeyPatch, kept_at: Any, expected: int
) -> None:
    """The first answer runs the rows that it captures, the others only rows past the last block."""
    llm, model = small
    job = Job(PROMPT, (Change(0, fh.Add(VECTOR), "generated"),), (LAYER,), kept_at=kept_at)
    asked = Asked(job, 4, 0)

    def rows() -> int:
        llm.reset_prefix_cache()
        llm.generate({"prompt_token_ids": PROMPT}, sampling(None, 1), use_tqdm=False)
        with monkeypatch.context() as patch:
            watch = Watch().attach(llm, patch)
            (output,) = llm.generate({"prompt_token_ids": PROMPT}, asked.params(), use_tqdm=False)
        answers = taken(llm, output, job, None)
        assert wrong_captures(model, [asked], {0: answers}) == 0
        return watch.rows - sum(len(each.generated_tokens) - 1 for each in answers)

    assert rows() == expected
    monkeypatch.setattr(prefix_cache, "_captured", lambda *_: 0)
    assert rows() == 4 * (expected - 3 * 4)


@pytest.mark.v2
def test_answers_that_start_after_the_end_of_the_first_one_run_the_prompt(
    small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, model = small
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    monkeypatch.setattr(scheduler, "max_num_active_reqs", 2)
    asked = [Asked(Job(PROMPT, kept=(LAYER,)), 4, seed) for seed in range(2)]
    assert wrong_captures(model, asked, serve(llm, asked, seed=3)) == 0
    monkeypatch.setattr(prefix_cache, "_captured", lambda *_: 10**6)
    assert wrong_captures(model, asked, serve(llm, asked, seed=3))


def test_a_gate_reads_all_rows_itself(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of gates would be wrong without it, as the test of random requests would find."""
    llm, model = small
    asked = [each for each in drawn(96, seed=11) if each.job.gated]
    found = Admission.prefix
    monkeypatch.setattr(Admission, "prefix", lambda *call: found(*call)._replace(gated=None))
    assert wrong_captures(model, asked, serve(llm, asked, seed=3))


def gated(*entries: Any) -> fh.Plan:
    """A plan with a gate that reads the answer's tokens."""
    gate = fh.gate("g", LAYER, fh.Dot(VECTOR), at="generated", over="token")
    return fh.Plan(gate, *entries, fh.keep(LAYER))


@pytest.mark.v2
@pytest.mark.parametrize("ends", ["stop", "error"])
def test_each_answer_ends_by_itself(small: Any, ends: str) -> None:
    llm, model = small
    asked = Asked(Job(PROMPT, kept=(LAYER,)), 8, 5)
    prompt = {"prompt_token_ids": PROMPT}
    (plain,) = llm.generate(prompt, asked.params(), use_tqdm=False)
    read = [captured(llm, plain, it)[0].acts[LAYER][len(PROMPT) :] @ VECTOR for it in range(8)]
    above = fh.above("g", float(torch.stack([each.max() for each in read]).median()))
    if ends == "stop":
        plan = gated(fh.stop(when=above))
    else:
        plan = gated(fh.on("model.layers.2", fh.Scale(3e38), when=above))

    def params(index: int | None = None) -> Any:
        made = asked.params(index)
        made.extra_args = vllm.extra_args(plan)
        return made

    (output,) = llm.generate(prompt, params(), use_tqdm=False)
    reasons = []
    for index, text in enumerate(output.outputs):
        found, error = captured(llm, output, index)
        (alone,) = llm.generate(prompt, params(index), use_tqdm=False)
        assert [*text.token_ids] == [*alone.outputs[0].token_ids]
        assert text.finish_reason == alone.outputs[0].finish_reason
        assert text.stop_reason == alone.outputs[0].stop_reason
        reasons.append(text.finish_reason)
        assert (error is None) == (text.finish_reason != "error")
        expected, _ = captured(llm, alone, 0)
        assert found.acts.keys() == expected.acts.keys()
        for name, right in expected.acts.items():
            torch.testing.assert_close(found.acts[name], right, rtol=1e-3, atol=1e-3)
        if text.finish_reason == "length":
            asked.job.check_acts(model, Answer([*text.token_ids], found.acts))
    assert len({*reasons}) > 1

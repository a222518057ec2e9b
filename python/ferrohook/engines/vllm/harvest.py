"""Client side of `collect` with an engine of vLLM."""

from __future__ import annotations

import contextlib
import copy
import importlib
import json
import threading
from concurrent.futures import InvalidStateError
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self, cast

from ferrohook.data.engine_jobs import collectors
from ferrohook.engines.harvest import AHEAD, HarvestJob, TextEnd, error_in, noted
from ferrohook.engines.vllm.calls import call, found
from ferrohook.engines.vllm.plugin import connect
from ferrohook.engines.wire import NAME
from ferrohook.errors import HookError
from ferrohook.util.arguments import expect

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ferrohook.data.engine_jobs import EngineJob
    from ferrohook.util.progress import Advance

_REFUSED: Final = {
    "n": "pass a prompt several times, as each has its own seed",
    "logprobs": "collect stores none: leave it out",
    "prompt_logprobs": "collect stores none: leave it out",
    "extra_args": "pass the plan as plan=",
    "seed": "texts without a seed cannot be reproduced: give a seed, or temperature=0",
    "temperature": "drawn texts cannot be reproduced with speculative decoding: give "
    "temperature=0, or start the engine without drafts",
}
"""Sampling parameters that are refused, and what to do."""
_OF_OUTPUTS: Final = {"detokenize", "output_kind", "skip_clone", "stream_interval"}
"""Sampling parameters that change no token."""
_PATIENCE: Final = 1.0
"""Seconds between looks at an engine in another process."""


def collect_prompts(job: EngineJob) -> tuple[int, int]:
    """Runs the prompts of a job that are not stored yet, see `collect`.

    Returns:
        The numbers of prompts that it ran, and that were stored before.

    Raises:
        HookError: plans are refused in this engine, it runs other requests, or a prompt failed.
        HookTypeError, ValueError: an argument that cannot be served.
        ResumeError: the run was made of something else.
        StoreError: the worker could not write.
    """
    harvest, sampling = HarvestJob(job), _Sampling.of(job)
    engine = job.engine.llm_engine
    harvest.check_idle(engine.has_unfinished_requests())
    if engine.vllm_config.parallel_config.data_parallel_size > 1:
        msg = (
            "collect does not work with data parallelism: start an engine for each rank, and "
            "collect a part of the prompts with each, into stores of their own"
        )
        raise HookError(msg)
    return _LlmRun(harvest, engine, sampling).collect()


class _Sampling(NamedTuple):
    """Sampling parameters of a run."""

    params: Any
    """`SamplingParams` of the first prompt."""
    recorded: str | None
    """Changes from the defaults of vLLM; None if no text follows the prompts."""

    @classmethod
    def of(cls, job: EngineJob) -> Self:
        """Validates the sampling parameters of a job.

        Raises:
            HookError: a text would be another in another call, or a parameter would be ignored.
            HookTypeError: they are no `SamplingParams`.
        """
        make = importlib.import_module("vllm").SamplingParams
        if job.sampling is None:
            return cls(make(max_tokens=1, temperature=0, detokenize=False), None)
        expect(job.sampling, make, "collect: sampling must be a SamplingParams or None")
        given, defaults = job.sampling, make()
        drawn = given.temperature > 0
        drafts = job.engine.llm_engine.vllm_config.speculative_config is not None
        used = {
            "n": given.n > 1,
            "logprobs": given.num_logprobs is not None,
            "prompt_logprobs": given.prompt_logprobs is not None,
            "extra_args": NAME in (given.extra_args or {}),
            "seed": drawn and given.seed is None,
            "temperature": drawn and drafts,
        }
        for name in (name for name, is_used in used.items() if is_used):
            msg = f"collect: sampling has {name}={getattr(given, name)!r}: {_REFUSED[name]}"
            raise HookError(msg)
        own = {name: getattr(given, name) for name in given.__struct_fields__}
        changes = {
            name: value
            for name, value in own.items()
            if not name.startswith("_")
            and name not in _OF_OUTPUTS
            and value != getattr(defaults, name)
        }
        return cls(given, repr(changes))

    def of_prompt(self, number: int, plan: Any) -> Any:
        """Returns the parameters of a prompt with a plan."""
        params = copy.deepcopy(self.params)
        if params.seed is not None:
            params.seed += number
        params.extra_args = {**(params.extra_args or {}), NAME: plan}
        params.output_kind = importlib.import_module("vllm.sampling_params").RequestOutputKind(2)
        return params


class _LlmRun:
    """A run of prompts through an engine.

    Args:
        job: the job.
        engine: `LLMEngine`.
        sampling: parameters of the texts.
    """

    def __init__(self, job: HarvestJob, engine: Any, sampling: _Sampling) -> None:
        self._job = job
        self._engine = engine
        self._sampling = sampling
        self._front_end = connect(engine)
        self._read = self._front_end._read(job.plan.to_json())
        self._running: dict[str, int] = {}
        """Numbers of the prompts that run or wait, by request."""

    def collect(self) -> tuple[int, int]:
        """Runs the prompts that are not stored."""
        captures = self._front_end.modules.captures(self._read.plan)
        names = [value.name for each in captures for value in each.values]
        options = {"engine": "vllm", "plan": self._read.digest, "value": self._job.value}
        if (sampled := self._sampling.recorded) is not None:
            options["sampling"] = sampled
        made_of = json.loads(found(call(self._engine, "manifest", names, options)))
        with (
            self._job.settings(names, made_of, generates=sampled is not None) as settings,
            _noticing_death(self._engine.engine_core),
        ):
            self._call("begin_harvest", settings.to_json())
            try:
                self._run()
            except BaseException as error:
                reason = None
                with contextlib.suppress(Exception):  # a dead engine answers no more
                    self._engine.abort_request([*self._running])
                    answers = call(self._engine, "end_harvest")
                    reason = error_in(json.loads(found(answers)))
                if isinstance(error, HookError) and reason is not None:
                    raise reason from error
                raise
            taken = self._call("end_harvest")["taken"]
        return self._job.counts(taken)

    def _call(self, name: str, *args: str) -> dict[str, Any]:
        """Calls the worker that stores; returns its answer.

        Raises:
            HookError: the error that it answers.
        """
        answer: dict[str, Any] = json.loads(found(call(self._engine, name, *args)))
        if (error := error_in(answer)) is not None:
            raise error
        return answer

    def _run(self) -> None:
        most = AHEAD * self._engine.vllm_config.scheduler_config.max_num_seqs
        with self._job.progress() as advance:
            for number, ids in self._job.missing(self._encode, advance):
                with noted(number):
                    self._add(number, ids)
                while len(self._running) >= most:
                    self._step(advance)
            while self._running:
                self._step(advance)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._engine.get_tokenizer().encode(text)
        return ids

    def _add(self, number: int, ids: list[int]) -> None:
        params = self._sampling.of_prompt(number, self._read)
        name = self._job.request_id(number)
        self._engine.add_request(name, {"prompt_token_ids": ids}, params)
        self._running[name] = number

    def _step(self, advance: Advance) -> None:
        """Runs a step of the engine.

        Raises:
            HookError: a prompt failed.
        """
        ends = []
        for output in self._engine.step():
            if not output.finished or output.request_id not in self._running:
                continue
            number = self._running.pop(output.request_id)
            with noted(number):
                ticket = self._front_end.find(output.request_id)
                self._front_end.forget(ticket)
                reason = self._front_end.failure(output.request_id)
                if reason is None and output.outputs[0].finish_reason in {"error", "abort"}:
                    reason = f"vLLM ended the text: {output.outputs[0].finish_reason}"
                if reason is not None:
                    raise HookError(reason)
            ids = [*output.outputs[0].token_ids]
            ends.append(TextEnd(number, ids, cast("int", ticket.tokens)))
            self._job.ran += 1
            advance(ends[-1].tokens - 1)
        if ends and self._sampling.recorded is not None:
            call(self._engine, "end_texts", ends)


@contextlib.contextmanager
def _noticing_death(client: Any) -> Iterator[None]:
    """Makes waiting calls raise if the engine's process is killed: vLLM would wait for ever.

    Args:
        client: vLLM's client of the engine core, in this process or another.
    """
    if not hasattr(client, "outputs_queue"):  # in this process
        yield
        return
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(_PATIENCE):
            if client.resources.engine_dead:
                died = RuntimeError("the engine died")
                client.outputs_queue.put(died)  # for `step`
                for waiting in [*client.utility_results.values()]:  # for `call`
                    with contextlib.suppress(InvalidStateError):
                        waiting.set_exception(died)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        ended.set()


collectors["vllm.entrypoints.llm.LLM"] = collect_prompts

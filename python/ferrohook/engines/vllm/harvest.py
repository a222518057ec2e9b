"""Client side of `collect` with an engine of vLLM; `ferrohook.engines.harvest` is the other."""

from __future__ import annotations

import contextlib
import copy
import importlib
import json
import secrets
import threading
from collections.abc import Sequence, Sized
from concurrent.futures import InvalidStateError
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self, cast

from torch import Tensor

from ferrohook import errors
from ferrohook.data.engine_jobs import collectors
from ferrohook.data.manifests import check_same
from ferrohook.data.stores.local import LocalStore, lent
from ferrohook.engines.harvest import HarvestSettings, TextEnd, digest_of, digests_in
from ferrohook.engines.vllm.calls import call, found
from ferrohook.engines.vllm.plugin import connect
from ferrohook.engines.wire import NAME
from ferrohook.errors import HookError, HookTypeError, ResumeError
from ferrohook.plans import Plan
from ferrohook.plans.entries import KeepEntry, keep
from ferrohook.util.arguments import describe, expect
from ferrohook.util.progress import progress_bar

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ferrohook.data.engine_jobs import EngineJob
    from ferrohook.engines.vllm.requests import FrontEnd
    from ferrohook.util.progress import Advance

_AHEAD: Final = 2
"""Requests that run or wait, in multiples of `max_num_seqs`."""
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
    expect(job.store, LocalStore, "collect: the store of an engine must be a LocalStore")
    store = cast("LocalStore", job.store)
    sampling = _Sampling.of(job)
    engine = job.engine.llm_engine
    if engine.has_unfinished_requests():
        msg = "the engine runs other requests: wait until they are finished"
        raise HookError(msg)
    if engine.vllm_config.parallel_config.data_parallel_size > 1:
        msg = (
            "collect does not work with data parallelism: start an engine for each rank, and "
            "collect a part of the prompts with each, into stores of their own"
        )
        raise HookError(msg)
    run = _Run.of(job, connect(engine), sampling)
    settings = run.settings(job)
    made_of = settings.made_of
    check_same(job.run, store.manifest(job.run), made_of)
    stored: dict[int, str] = {}
    if job.run in store.runs():
        if store.manifest(job.run) is None:
            msg = f"run {job.run!r} was not collected with an engine: pass another run"
            raise ResumeError(msg)
        store.repair(job.run, progress=job.progress)
        fingerprints = store.fingerprints(job.run)
        for batch in store.completed(job.run):
            stored |= digests_in(fingerprints[batch])
    with lent(store) as folder:
        return run.collect(job, settings._replace(folder=folder), stored)


class _Sampling(NamedTuple):
    """Sampling parameters of a run."""

    params: Any
    """`SamplingParams`, those of the first prompt."""
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


class _Run:
    """A run of prompts through an engine.

    Args:
        job: arguments of `collect`.
        front_end: of the engine.
        entries: captures of the run.
        sampling: parameters of the texts.
    """

    def __init__(
        self,
        job: EngineJob,
        front_end: FrontEnd,
        entries: list[KeepEntry],
        sampling: _Sampling,
    ) -> None:
        self._sampling = sampling
        self._engine = job.engine.llm_engine
        self._front_end = front_end
        changes = () if job.plan is None else job.plan.entries
        self._read = front_end._read(Plan(*changes, *entries).to_json())
        inputs = {bool(each.options.get("inputs")) for each in entries}
        if len(inputs) > 1:
            msg = "inputs and outputs cannot be stored in one run: collect them in separate runs"
            raise HookError(msg)
        self._value = "input" if inputs == {True} else "output"
        self._prefix = f"{NAME}-collect-{secrets.token_hex(8)}-"
        self._running: dict[str, int] = {}
        """Numbers of the prompts that run or wait, by request."""
        self._ran = 0

    @classmethod
    def of(cls, job: EngineJob, front_end: FrontEnd, sampling: _Sampling) -> _Run:
        """Validates the arguments.

        Raises:
            HookError, HookTypeError, ValueError: one is wrong.
        """
        if isinstance(job.prompts, str | Tensor):
            msg = f"collect: pass a list of prompts, got {describe(job.prompts)}"
            raise HookTypeError(msg)
        expect(job.plan, Plan | None, "collect: the plan of an engine must be a Plan")
        if job.plan is not None and any(isinstance(it, KeepEntry) for it in job.plan.entries):
            msg = "the plan keeps activations: pass what it keeps as the third argument"
            raise HookError(msg)
        listed = [*job.what] if isinstance(job.what, list | tuple) else [job.what]
        entries = [each for each in listed if isinstance(each, KeepEntry)]
        if not entries:
            return cls(job, front_end, [keep(job.what, **job.options)], sampling)
        if len(entries) < len(listed):
            msg = "either select modules, or pass keep() for all of them"
            raise HookTypeError(msg)
        if job.options:
            msg = f"{min(job.options)}= only works with selected modules: pass it to keep()"
            raise HookError(msg)
        return cls(job, front_end, entries, sampling)

    def settings(self, job: EngineJob) -> HarvestSettings:
        """Returns the settings for the worker, but for the folder."""
        captures = self._front_end.modules.captures(self._read.plan)
        names = [value.name for each in captures for value in each.values]
        options = {"engine": "vllm", "plan": self._read.digest, "value": self._value}
        generates = self._sampling.recorded is not None
        if generates:
            options["sampling"] = str(self._sampling.recorded)
        made_of = json.loads(found(call(self._engine, "manifest", names, options)))
        nowhere: Any = ()
        return HarvestSettings(
            self._prefix, job.run, names, self._value, made_of, generates, nowhere
        )

    def collect(
        self, job: EngineJob, settings: HarvestSettings, stored: dict[int, str]
    ) -> tuple[int, int]:
        """Runs the prompts that are not stored."""
        with _noticing_death(self._engine.engine_core):
            _check(call(self._engine, "begin_harvest", settings.to_json()))
            try:
                skipped = self._run(job, stored)
            except BaseException as error:
                answers: list[bytes] = []
                with contextlib.suppress(Exception):  # a dead engine answers no more
                    self._engine.abort_request([*self._running])
                    answers = call(self._engine, "end_harvest")
                if isinstance(error, HookError) and answers:
                    _check(answers)  # raises the reason, if that is the worker's
                raise
            taken = _check(call(self._engine, "end_harvest"))["taken"]
        if taken != self._ran:
            msg = f"{self._ran} prompts ran, but the worker has the rows of {taken}"
            raise HookError(msg)
        return self._ran, skipped

    def _run(self, job: EngineJob, stored: dict[int, str]) -> int:
        """Runs the prompts that are not stored, and returns the number of those that are."""
        skipped = 0
        most = _AHEAD * self._engine.vllm_config.scheduler_config.max_num_seqs
        length = len(job.prompts) if isinstance(job.prompts, Sized) else None
        bar = progress_bar(job.run, length, "prompt", counted="token", shown=job.progress)
        with bar as advance:
            for number, prompt in enumerate(job.prompts):
                with _noted(number):
                    ids = self._ids(prompt)
                    if number in stored:
                        self._compare(ids, stored[number])
                        skipped += 1
                        advance()
                        continue
                    self._add(number, ids)
                while len(self._running) >= most:
                    self._step(advance)
            while self._running:
                self._step(advance)
        return skipped

    def _ids(self, prompt: Any) -> list[int]:
        """Returns the token ids of a prompt."""
        if isinstance(prompt, str):
            ids: list[int] = self._engine.get_tokenizer().encode(prompt)
            return ids
        listed = prompt.tolist() if isinstance(prompt, Tensor) else prompt
        if not isinstance(listed, Sequence) or not all(type(each) is int for each in listed):
            msg = f"a prompt must be a text or a list of token ids, got {describe(prompt)}"
            raise HookTypeError(msg)
        return [*listed]

    def _compare(self, ids: list[int], digest: str) -> None:
        if digest_of(ids) != digest:
            msg = (
                "the stored prompt is another (other data, or another order): pass the same "
                "prompts, or another run"
            )
            raise ResumeError(msg)

    def _add(self, number: int, ids: list[int]) -> None:
        params = self._sampling.of_prompt(number, self._read)
        name = f"{self._prefix}{number}"
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
            with _noted(number):
                ticket = self._front_end.find(output.request_id)
                self._front_end.forget(ticket)
                if (reason := self._front_end.failure(output.request_id)) is not None:
                    raise HookError(reason)
            ids = [*output.outputs[0].token_ids]
            ends.append(TextEnd(number, ids, cast("int", ticket.tokens)))
            self._ran += 1
            advance(ends[-1].tokens - 1)
        if ends and self._sampling.recorded is not None:
            call(self._engine, "end_texts", ends)


def _check(answers: list[bytes]) -> dict[str, Any]:
    """Returns the answer of the worker that stores.

    Raises:
        HookError: the error that it answers.
    """
    answer: dict[str, Any] = json.loads(found(answers))
    if "error" in answer:
        kind = getattr(errors, answer["kind"], HookError)
        raise kind(answer["error"])
    return answer


@contextlib.contextmanager
def _noticing_death(client: Any) -> Iterator[None]:
    """Has waiting calls raise if the engine's process is killed: vLLM would wait for ever.

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


@contextlib.contextmanager
def _noted(number: int) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(f"ferrohook: at prompt {number}")
        raise


collectors["vllm.entrypoints.llm.LLM"] = collect_prompts

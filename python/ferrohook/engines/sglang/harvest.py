"""Client side of `collect` with an engine of SGLang."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING, Any, Final

from ferrohook.data.engine_jobs import collectors
from ferrohook.engines.harvest import AHEAD, HarvestJob, noted
from ferrohook.engines.sglang.front_end import ask, prepared, uploads_of
from ferrohook.engines.wire import NAME
from ferrohook.errors import HookError
from ferrohook.util.arguments import expect

if TYPE_CHECKING:
    from ferrohook.data.engine_jobs import EngineJob
    from ferrohook.util.progress import Advance

_PROMPT_ONLY: Final = {"max_new_tokens": 1, "temperature": 0}
"""Sampling parameters of a run without texts."""


def collect_prompts(job: EngineJob) -> tuple[int, int]:
    """Runs the prompts of a job that are not stored yet, see `collect`.

    Returns:
        The numbers of prompts that it ran, and that were stored before.

    Raises:
        HookError: plans are refused in this engine, it runs other requests, or a prompt failed.
        HookTypeError, ValueError: an argument that cannot be served.
        ResumeError: the run was made of something else.
        StoreError: the scheduler could not write.
    """
    harvest = HarvestJob(job)
    _check_sampling(job.sampling)
    harvest.check_idle(job.engine.tokenizer_manager.rid_to_state)
    counts: tuple[int, int] = job.engine.loop.run_until_complete(
        _SchedulerRun(harvest, job.engine, job.sampling).collect()
    )
    return counts


def _check_sampling(sampling: Any) -> None:
    """Validates sampling parameters.

    Raises:
        HookError: a text would be another in another call, or a parameter would be ignored.
        HookTypeError: they are no dict.
    """
    expect(sampling, dict | None, "collect: sampling must be a dict or None")
    if sampling is None:
        return
    refused = {
        "n": ((sampling.get("n") or 1) > 1, "collect stores one text of a prompt: leave it out"),
        "custom_params": (
            NAME in (sampling.get("custom_params") or {}),
            "pass the plan as plan=",
        ),
        "temperature": (
            sampling.get("temperature") != 0,
            "texts that SGLang draws cannot be reproduced: give temperature=0",
        ),
    }
    for name, (is_used, reason) in refused.items():
        if is_used:
            msg = f"collect: sampling has {name}={sampling.get(name)!r}: {reason}"
            raise HookError(msg)


class _SchedulerRun:
    """A run of prompts through an engine.

    Args:
        job: the job.
        engine: `Engine`.
        sampling: parameters of the texts; None for none.
    """

    def __init__(self, job: HarvestJob, engine: Any, sampling: dict[str, Any] | None) -> None:
        self._job = job
        self._engine = engine
        self._manager = engine.tokenizer_manager
        self._sampling = sampling
        self._running: dict[asyncio.Task[None], str] = {}
        """Ids of the requests that run or wait."""

    async def collect(self) -> tuple[int, int]:
        """Runs the prompts that are not stored."""
        params: dict[str, Any] = {**(self._sampling or _PROMPT_ONLY)}
        custom = {**(params.get("custom_params") or {}), NAME: self._job.plan.to_json()}
        params = await prepared({**params, "custom_params": custom}, uploads_of(self._manager))
        options = {"engine": "sglang", "value": self._job.value}
        if self._sampling is not None:
            options["sampling"] = repr(dict(sorted(self._sampling.items())))
        question = {"custom": params["custom_params"], "options": options}
        described = await ask(self._manager, "describe_harvest", json.dumps(question))
        names, made_of = described["names"], described["made_of"]
        generates = self._sampling is not None
        with self._job.settings(names, made_of, generates=generates) as settings:
            await ask(self._manager, "begin_harvest", settings.to_json())
            try:
                await self._run(params, AHEAD * described["most_running"])
            except BaseException as error:
                await self._abort()
                try:
                    await ask(self._manager, "end_harvest")
                except HookError as reason:
                    if isinstance(error, HookError):
                        raise reason from error
                raise
            taken = (await ask(self._manager, "end_harvest"))["taken"]
        return self._job.counts(taken)

    async def _run(self, params: dict[str, Any], most: int) -> None:
        with self._job.progress() as advance:
            for number, ids in self._job.missing(self._encode, advance):
                asked = self._ask_for(number, ids, params, advance)
                self._running[asyncio.ensure_future(asked)] = self._job.request_id(number)
                if len(self._running) >= most:
                    await self._wait(asyncio.FIRST_COMPLETED)
            while self._running:
                await self._wait(asyncio.FIRST_EXCEPTION)

    async def _wait(self, until: str) -> None:
        """Waits for requests, and raises the error of one that failed."""
        done, _ = await asyncio.wait(self._running, return_when=until)
        for each in done:
            del self._running[each]
        for each in done:
            each.result()

    async def _ask_for(
        self, number: int, ids: list[int], params: dict[str, Any], advance: Advance
    ) -> None:
        with noted(number):
            name = self._job.request_id(number)
            try:
                answer = await self._engine.async_generate(
                    input_ids=ids, sampling_params=params, rid=name
                )
            except Exception as error:
                if (detail := getattr(error, "detail", None)) is not None:  # of FastAPI's
                    raise HookError(str(detail)) from error
                raise
            info = answer["meta_info"]
            if info["finish_reason"]["type"] == "abort":
                raise HookError(str(info["finish_reason"].get("message")))
        self._job.ran += 1
        advance(info["prompt_tokens"] + info["completion_tokens"] - 1)

    async def _abort(self) -> None:
        """Ends the requests that run or wait, and waits for their ends."""
        for each, name in self._running.items():
            if not each.done():
                with contextlib.suppress(Exception):
                    self._manager.abort_request(name)
        await asyncio.gather(*self._running, return_exceptions=True)

    def _encode(self, text: str) -> list[int]:
        if self._manager.tokenizer is None:
            msg = "the engine has no tokenizer: pass lists of token ids"
            raise HookError(msg)
        ids: list[int] = self._manager.tokenizer.encode(text)
        return ids


collectors["sglang.srt.entrypoints.engine.Engine"] = collect_prompts

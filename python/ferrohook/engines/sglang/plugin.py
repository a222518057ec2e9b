"""Entry point `sglang.srt.plugins`: what SGLang calls in each of its processes.

Few names of SGLang are used, all through its own registry of hooks, the same in all releases that
were tried. In the scheduler's process: `Scheduler.__init__`, `Scheduler._add_request_to_queue`,
`Req._compute_max_prefix_len`, `ForwardBatch.init_new`, `ModelRunner.forward` and
`SchedulerOutputStreamer.stream_output`.
"""

from __future__ import annotations

import importlib
import logging
import os
import weakref
from typing import Any, Final

from ferrohook.engines.sglang.supported import CAPABILITIES
from ferrohook.engines.sglang.worker import Worker
from ferrohook.errors import HookError

_LOG: Final = logging.getLogger("ferrohook")
UNTRIED: Final = "FERROHOOK_UNTRIED_SGLANG"
"""Environment variable that lets an untried release of SGLang be used."""
_workers: weakref.WeakKeyDictionary[Any, Worker] = weakref.WeakKeyDictionary()
"""Workers by `Scheduler` and by `ModelRunner`."""


def register() -> None:
    """Registers the hooks of this process; SGLang applies them."""
    registry = importlib.import_module("sglang.srt.plugins.hook_registry")
    kinds = registry.HookType
    for target, hook, kind in (
        ("managers.scheduler.Scheduler.__init__", _made, kinds.AFTER),
        ("managers.scheduler.Scheduler._add_request_to_queue", _queueing, kinds.AROUND),
        ("managers.schedule_batch.Req._compute_max_prefix_len", _limiting, kinds.AFTER),
        ("model_executor.forward_batch_info.ForwardBatch.init_new", _batched, kinds.AFTER),
        ("model_executor.model_runner.ModelRunner.forward", _forwarding, kinds.AROUND),
        (
            "managers.scheduler_components.output_streamer.SchedulerOutputStreamer.stream_output",
            _answering,
            kinds.BEFORE,
        ),
    ):
        registry.HookRegistry.register(f"sglang.srt.{target}", hook, kind)


def _made(_none: None, scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
    worker = Worker(scheduler)
    _workers[scheduler] = _workers[scheduler.tp_worker.model_runner] = worker
    try:
        CAPABILITIES.check_version(untried=bool(os.environ.get(UNTRIED)))
        worker.load()
    except HookError as error:
        worker.refuse(str(error))


def _queueing(original: Any, scheduler: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        _workers[scheduler].take_request(req)
    except ValueError as error:
        _workers[scheduler].reject(req, str(error))
        return None
    return original(scheduler, req, *args, **kwargs)


def _limiting(limit: int, req: Any, *_args: Any) -> int:
    return 0 if getattr(req, "ferrohook_rereads", False) else limit


def _batched(forward_batch: Any, _class: type, batch: Any, *_args: Any, **_kwargs: Any) -> None:
    forward_batch.ferrohook_reqs = batch.reqs and [*batch.reqs]


def _forwarding(original: Any, runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
    worker = _workers.get(runner)
    if worker is None or not worker.busy:
        return original(runner, forward_batch, *args, **kwargs)
    with worker.forward(forward_batch):
        return original(runner, forward_batch, *args, **kwargs)


def _answering(_streamer: Any, reqs: Any, *_args: Any, **_kwargs: Any) -> None:
    for worker in {*_workers.values()}:
        if worker.busy:
            worker.answer(reqs)

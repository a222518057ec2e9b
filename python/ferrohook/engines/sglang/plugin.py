"""Entry point `sglang.srt.plugins`: what SGLang calls in each of its processes.

Few names of SGLang are used, all through its own registry of hooks, the same in all releases that
were tried. In the scheduler's process: `Scheduler.__init__`, `_add_request_to_queue`,
`abort_request`, `process_batch_result` and `get_internal_state`, `Req._compute_max_prefix_len`,
`_req_radix_key`, `UnifiedRadixCache.checkpoint_into_tree`, `ForwardBatch.init_new`,
`ModelRunner.forward` and `SchedulerOutputStreamer.stream_output`. In the front end:
`TokenizerManager.__init__`, `generate_request` and `update_request_meta_info`, and of the OpenAI
routes the methods that build an answer or a stream.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import weakref
from array import array
from typing import TYPE_CHECKING, Any, Final

from ferrohook.engines.sglang import prefix_cache
from ferrohook.engines.sglang.front_end import answered, generating, reporting, streaming
from ferrohook.engines.sglang.supported import CAPABILITIES
from ferrohook.engines.sglang.worker import SchedulerWorker
from ferrohook.engines.wire import NAME

if TYPE_CHECKING:
    from ferrohook.engines.sglang.prefix_cache import NumberedPlan

_LOG: Final = logging.getLogger("ferrohook")
UNTRIED: Final = "FERROHOOK_UNTRIED_SGLANG"
"""Environment variable that lets an untried release of SGLang be used."""
_workers: weakref.WeakKeyDictionary[Any, SchedulerWorker] = weakref.WeakKeyDictionary()
"""Workers by `Scheduler` and by `ModelRunner`."""


def register() -> None:
    """Registers the hooks of this process; SGLang applies them."""
    _register(
        ("managers.scheduler.Scheduler.__init__", _made, "AFTER"),
        ("managers.scheduler.Scheduler._add_request_to_queue", _queueing, "AROUND"),
        ("managers.scheduler.Scheduler.abort_request", _aborting, "AROUND"),
        ("managers.scheduler.Scheduler.process_batch_result", _processing, "BEFORE"),
        ("managers.scheduler.Scheduler.get_internal_state", _describing, "AFTER"),
        ("managers.schedule_batch.Req._compute_max_prefix_len", _limiting, "AFTER"),
        ("mem_cache.common._req_radix_key", _keying, "AROUND"),
        (
            "mem_cache.unified_radix_cache.UnifiedRadixCache.checkpoint_into_tree",
            _sharing,
            "AROUND",
        ),
        ("model_executor.forward_batch_info.ForwardBatch.init_new", _batched, "AFTER"),
        ("model_executor.model_runner.ModelRunner.forward", _forwarding, "AROUND"),
        (
            "managers.scheduler_components.output_streamer.SchedulerOutputStreamer.stream_output",
            _answering,
            "BEFORE",
        ),
        ("managers.tokenizer_manager.TokenizerManager.__init__", _serving, "AFTER"),
        ("managers.tokenizer_manager.TokenizerManager.generate_request", generating, "AROUND"),
        (
            "managers.tokenizer_manager.TokenizerManager.update_request_meta_info",
            reporting,
            "AROUND",
        ),
    )


def _register(*hooks: tuple[str, Any, str]) -> Any:
    registry = importlib.import_module("sglang.srt.plugins.hook_registry")
    for target, hook, kind in hooks:
        registry.HookRegistry.register(f"sglang.srt.{target}", hook, registry.HookType[kind])
    return registry.HookRegistry


def _made(_none: None, scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
    worker = _workers[scheduler] = SchedulerWorker(scheduler)
    with worker.starting():
        CAPABILITIES.check_version(
            untried=bool(os.environ.get(UNTRIED)), option=f"{UNTRIED}=1 in the environment"
        )
        _workers[scheduler.tp_worker.model_runner] = worker
        worker.load()


def _queueing(original: Any, scheduler: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    worker = _workers[scheduler]
    try:
        worker.take_request(req)
    except Exception as error:  # noqa: BLE001 (the scheduler would end, and all requests with it)
        worker.reject(req, error)
        return None
    return original(scheduler, req, *args, **kwargs)


def _aborting(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    worker = _workers[scheduler]
    before: set[str] = set()
    with worker.failing():
        before = worker.names(scheduler.waiting_queue)
    result = original(scheduler, *args, **kwargs)
    # Not left to their finalizers: the traceback of a fault that failed them may keep them alive.
    with worker.failing():
        for name in before - worker.names(scheduler.waiting_queue):
            worker.retire(name)
    return result


def _processing(scheduler: Any, batch: Any, *_args: Any, **_kwargs: Any) -> None:
    worker = _workers[scheduler]
    if worker.requests:
        worker.end_early(batch.reqs)


def _describing(state: Any, scheduler: Any, question: Any) -> None:
    """Answers a question of the front end, see `front_end.ask`."""
    rid = question.rid
    if isinstance(rid, str) and rid.startswith(f"{NAME}:"):
        try:
            answer = _workers[scheduler].answer_call(*rid.split(":", 2)[1:])
        except Exception as error:  # noqa: BLE001 (the answer: the scheduler goes on)
            answer = {"error": f"{type(error).__name__}: {error}"}
        state.internal_state[NAME] = answer


def _numbered_plan(req: Any) -> NumberedPlan | None:
    found: NumberedPlan | None = getattr(req, "ferrohook_numbered", None)
    return found


def _keys_of(plan: NumberedPlan, ids: Any) -> Any:
    """Returns ids as keys have them; None after a fault, which would end the scheduler."""
    try:
        return prefix_cache.keys_of(plan, ids)
    except Exception:  # noqa: BLE001 (the request shares less)
        _LOG.exception("ferrohook failed while the cache was used")
        return None


def _limiting(limit: int, req: Any, *_args: Any) -> int:
    """Makes a request read no cached positions that its plan has to see."""
    plan = _numbered_plan(req)
    return limit if plan is None or plan.read is None else min(limit, plan.read)


def _keying(original: Any, cache: Any, req: Any, ids: Any, *args: Any, **kwargs: Any) -> Any:
    """Makes a request look up the keys of its plan."""
    if (plan := _numbered_plan(req)) is not None:
        ids = _keys_of(plan, ids) or array("q")  # which finds nothing
    return original(cache, req, ids, *args, **kwargs)


def _sharing(original: Any, cache: Any, req: Any, **kwargs: Any) -> None:
    """Makes the tree take the tokens of a request with the keys of its plan."""
    if (plan := _numbered_plan(req)) is None:
        original(cache, req, **kwargs)
        return
    own = req.full_untruncated_fill_ids, req.origin_input_ids
    keys = [_keys_of(plan, ids) for ids in own]
    if None in keys:
        return  # as if it had skip_radix_cache_insert
    req.full_untruncated_fill_ids, req.origin_input_ids = keys
    try:
        original(cache, req, **kwargs)
    finally:
        req.full_untruncated_fill_ids, req.origin_input_ids = own


def _batched(forward_batch: Any, _class: type, batch: Any, *_args: Any, **_kwargs: Any) -> None:
    forward_batch.ferrohook_reqs = batch.reqs and [*batch.reqs]


def _forwarding(original: Any, runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
    worker = _workers.get(runner)
    if worker is None or not worker.requests:
        return original(runner, forward_batch, *args, **kwargs)
    with worker.forward(forward_batch):
        return original(runner, forward_batch, *args, **kwargs)


def _answering(_streamer: Any, reqs: Any, *_args: Any, **_kwargs: Any) -> None:
    for worker in {*_workers.values()}:
        if worker.requests:
            worker.answer(reqs)


def _serving(_none: None, manager: Any, *_args: Any, **_kwargs: Any) -> None:
    """Adds routes, and registers the hooks of the OpenAI routes, where there is a server."""
    server = sys.modules.get("sglang.srt.entrypoints.http_server")
    if server is not None:
        importlib.import_module("ferrohook.engines.sglang.http").attach(server.app, manager)
    routes = "entrypoints.openai.serving"
    if f"sglang.srt.{routes}_completions" in sys.modules:
        completion = f"{routes}_completions.OpenAIServingCompletion"
        chat = f"{routes}_chat.OpenAIServingChat"
        _register(
            (f"{completion}._build_completion_response", answered, "AFTER"),
            (f"{completion}._generate_completion_stream", streaming, "AROUND"),
            (f"{chat}._build_chat_response", answered, "AFTER"),
            (f"{chat}._generate_chat_stream", streaming, "AROUND"),
        ).apply_hooks()

"""Entry point `vllm.general_plugins`: what vLLM calls in each of its processes.

Few names of vLLM are used, each bound as late as can be. Front end: `process_inputs` of
`InputProcessor`; `get_child_info` of `ParentRequest`; `add_request`, `process_outputs`,
`_finish_request` and `abort_requests` of `OutputProcessor`; `add_request` of both engines;
`GenerateBaseServing._raise_if_error`, `create_completion` and `create_chat_completion` of the
OpenAI server; and what `calls` and `harvest` call.
Engine: `Scheduler.update_from_output`, `EngineCore.__init__`, `EngineCoreProc.run_busy_loop`,
`_gen_prompt_embeds_extra_hash_keys`, `KVCacheManager.get_computed_blocks`,
`KVCacheCoordinator.cache_blocks` and what `self_test` and `prefix_cache` call. Worker:
`WorkerWrapperBase.init_device`, then the methods in `runners`. `_AROUND` lists them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import json
import logging
import pkgutil
import re
import secrets
import weakref
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

from fastapi import FastAPI

from ferrohook.engines.admission import check_salt
from ferrohook.engines.gate_events import AnswerGates
from ferrohook.engines.model.cache_reach import CacheReach
from ferrohook.engines.model.modules import ModuleTable
from ferrohook.engines.routes import PlanGate
from ferrohook.engines.vllm import prefix_cache, self_test, steps
from ferrohook.engines.vllm.calls import call, call_async
from ferrohook.engines.vllm.prefix_cache import has_plan
from ferrohook.engines.vllm.requests import (
    PLANS,
    FrontEnd,
    VllmOptions,
    of_answer,
    streams,
)
from ferrohook.engines.vllm.runners import NO_REPORT, around, attach
from ferrohook.engines.vllm.supported import CAPABILITIES, BadPlanError, is_newer, refuse
from ferrohook.engines.wire import FIELD, GATES, HEADER, NAME
from ferrohook.errors import HookError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ferrohook.engines.vllm.runners import StepReport

_LOG: Final = logging.getLogger("ferrohook")
_SHORTEST: Final = 24
_MARK: Final = "_ferrohook"
_front_ends: weakref.WeakKeyDictionary[Any, FrontEnd] = weakref.WeakKeyDictionary()
"""Front ends by `InputProcessor` and by `OutputProcessor`."""
_PROCESSOR: Final = "v1.engine.input_processor.InputProcessor.process_inputs"
_WORKER: Final = "v1.worker.worker_base.WorkerWrapperBase.init_device"
_OUTPUTS: Final = "v1.engine.output_processor.OutputProcessor"
_ENDS: Final = re.compile(r'"finish_reason": ?"|"error":|^data: \[DONE\]')
"""Event of a stream after which captures may be fetched; text has its quotes escaped."""
_OPENAI: Final = "entrypoints.openai"
_SERVED: Final = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
"""Routes whose plans come to the engine."""
_AROUND: Final[dict[str, Callable[..., Any]]] = {}
"""Functions around methods of vLLM, by the paths of these."""
F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


def _around(*paths: str) -> Callable[[F], F]:
    """Wraps methods of vLLM in a function, which gets the method as its first argument."""

    def note(function: F) -> F:
        _AROUND.update(dict.fromkeys(paths, function))
        return function

    return note


def register() -> None:
    """Attaches to this process of vLLM; idempotent.

    Plans are refused, and nothing else changes, with a release that is older than the tried ones,
    or that lacks a name that is attached to. A newer release has to pass the self-test.
    """
    reason = refusal()
    try:
        if reason is None:
            for path, function in _AROUND.items():
                _wrap(path, function)
            _method(_WORKER)[0].ferrohook_call = _called
        else:
            _LOG.warning("ferrohook: %s", reason)
            _wrap(_PROCESSOR, functools.partial(_refusing, reason))
    except Exception:  # noqa: BLE001 (vLLM would not start)
        _LOG.exception("ferrohook is disabled in vLLM %s", CAPABILITIES.version)


def refusal() -> str | None:
    """Returns why no plan is served with this release of vLLM; None if plans may be."""
    tried = ", ".join(CAPABILITIES.tried)
    if not CAPABILITIES.works and not is_newer():
        return f"vllm {CAPABILITIES.version} is older than the tested releases: {tried}"
    for path in (*_AROUND, "v1.engine.core_client.AsyncMPClient.call_utility_all_async"):
        try:
            _method(path)
        except Exception as error:  # noqa: BLE001 (whatever the import of an unknown release raises)
            return (
                f"vllm {CAPABILITIES.version} does not have {path} as in the tested releases "
                f"{tried}: {error!r}"
            )
    return None


def check_release() -> None:
    """Refuses a release of vLLM with which no plan is served.

    Raises:
        HookError: it is one, with the reason.
    """
    if (reason := refusal()) is not None:
        raise HookError(reason)


def connect(engine: Any) -> FrontEnd:
    """Returns the front end of an `LLM` or `LLMEngine`, made at first use.

    Raises:
        HookError: plans are refused in this engine, with the reason.
    """
    engine = getattr(engine, "llm_engine", engine)
    if (found := _front_ends.get(engine.input_processor)) is not None:
        return found
    check_release()
    return _connected(engine, call(engine, "describe"), serves=False)


async def connect_async(engine: Any) -> FrontEnd:
    """Returns the front end of an `AsyncLLM`, made at first use.

    Raises:
        HookError: plans are refused in this engine, with the reason.
    """
    if (found := _front_ends.get(engine.input_processor)) is not None:
        return found
    check_release()
    return _connected(engine, await call_async(engine, "describe"), serves=True)


async def sync(engine: Any, front_end: FrontEnd) -> None:
    """Takes over what other API servers of an `AsyncLLM` uploaded."""
    if front_end.servers > 1:
        # The first rank resolves a name; the others have the uploads too.
        data, *_ = await call_async(engine, "uploaded", front_end.uploads.digests())
        for digest in front_end.uploads.sync(data):
            await call_async(engine, "drop", digest)


def _connected(engine: Any, answers: list[bytes], *, serves: bool) -> FrontEnd:
    described, *others = map(json.loads, answers)
    for each in (described, *others):
        if "refused" in each:
            raise HookError(each["refused"])
    servers = getattr(engine.vllm_config.parallel_config, "_api_process_count", 1)
    options = VllmOptions.of(engine.vllm_config)
    modules = ModuleTable.from_json(described["modules"])
    secret = bytes.fromhex(described["secret"])  # the first rank's, as all API servers take it
    reach = CacheReach.from_json(described["reach"])
    made = FrontEnd(modules, options, secret, reach, max(servers, 1), serves=serves)
    if (speculative := engine.vllm_config.speculative_config) is not None:
        made.surplus = drafts = int(speculative.num_speculative_tokens)
        if engine.vllm_config.scheduler_config.async_scheduling:
            made.surplus += 1 + drafts  # one more step
    found = _front_ends.setdefault(engine.input_processor, made)
    _front_ends[engine.output_processor] = found
    return found


@functools.cache
def _named(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"vllm.{module}"), name)


def _method(path: str) -> tuple[Any, Any]:
    """Returns the class of a method or the module of a function, and the attribute there."""
    owner, _, name = path.rpartition(".")
    is_fastapi = owner.rpartition(".")[2] == FastAPI.__name__
    found = FastAPI if is_fastapi else pkgutil.resolve_name(f"vllm.{owner}")
    return found, vars(found)[name]


def _wrap(path: str, function: Callable[..., Any]) -> None:
    """Wraps a method in a function, once."""
    owner, original = _method(path)
    if not hasattr(original, _MARK):
        name = path.rpartition(".")[2]
        around(owner, name, function)
        setattr(vars(owner)[name], _MARK, True)


# --- front end -----------------------------------------------------------------------------------


def _tell(processor: Any, method: Callable[..., None], *args: Any) -> None:
    """Calls a method of a front end, whose faults never end the engine's client."""
    if (front_end := _front_ends.get(processor)) is not None:
        try:
            method(front_end, *args)
        except Exception:  # noqa: BLE001 (the answers of all requests go on)
            _LOG.exception("ferrohook failed while the engine was answering")


def _refusing(  # noqa: PLR0913, PLR0917 (vLLM's arguments)
    reason: str,
    original: Any,
    self: Any,
    request_id: str,
    prompt: Any,
    params: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if has_plan(params):
        raise BadPlanError(reason)
    return original(self, request_id, prompt, params, *args, **kwargs)


@_around(_PROCESSOR)
def _processing(
    original: Any, self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
) -> Any:
    if NAME in (getattr(params, "extra_kwargs", None) or ()):
        refuse("pooling models")
    request = original(self, request_id, prompt, params, *args, **kwargs)
    try:
        check_salt(request.cache_salt)
        if has_plan(params):
            front_end = _front_ends.get(self)
            if front_end is None:
                msg = (
                    "the plan was sent through an interface that gives ferrohook no access to the "
                    "engine"
                )
                raise BadPlanError(msg)
            front_end.prepare(request)
            PLANS.inc()
    except ValueError as error:
        raise BadPlanError(str(error)) from error
    return request


@_around("v1.engine.llm_engine.LLMEngine.add_request")
def _adding(
    original: Any, self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
) -> Any:
    if not has_plan(params):
        return original(self, request_id, prompt, params, *args, **kwargs)
    try:
        front_end = connect(self)
        if keys := front_end.take_cancelled():
            call(self, "discard", keys)
    except HookError as error:
        raise BadPlanError(str(error)) from error
    with front_end.issuing():
        return original(self, request_id, prompt, params, *args, **kwargs)


@_around("v1.engine.async_llm.AsyncLLM.add_request")
async def _adding_async(
    original: Any, self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
) -> Any:
    if not has_plan(params):
        return await original(self, request_id, prompt, params, *args, **kwargs)
    try:
        front_end = await connect_async(self)
        if keys := front_end.take_cancelled():
            await call_async(self, "discard", keys)
        if front_end.names_uploads(params):
            await sync(self, front_end)
        params = await front_end.read_large(params)
    except (HookError, ValueError) as error:
        raise BadPlanError(str(error)) from error
    with front_end.issuing():
        return await original(self, request_id, prompt, params, *args, **kwargs)


@_around("v1.engine.parallel_sampling.ParentRequest.get_child_info")
def _sampling(original: Any, self: Any, index: int) -> tuple[str, Any]:
    """Gives each of several answers its own captures."""
    request_id, params = original(self, index)
    if index and has_plan(params):
        params = of_answer(params, index, f"0_{self.request_id}")
    return request_id, params


@_around(f"{_OUTPUTS}.add_request")
def _joining(original: Any, self: Any, request: Any, *args: Any, **kwargs: Any) -> None:
    original(self, request, *args, **kwargs)
    if has_plan(request.sampling_params):
        _tell(self, FrontEnd.joined, request)


@_around(f"{_OUTPUTS}.process_outputs")
def _outputting(original: Any, self: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
    reasons = _named("v1.engine", "FinishReason")
    for each in outputs:
        if (params := each.kv_transfer_params) and GATES in params:  # ours, see `_updating`
            _tell(self, FrontEnd.read, each.request_id, params.pop(GATES))
            each.kv_transfer_params = params or None
        if not isinstance(each.stop_reason, str):
            continue
        if each.finish_reason == reasons.STOP:  # by a plan: the engine's own stops are token ids
            _tell(self, FrontEnd.stopped, each.request_id)
        elif each.finish_reason == reasons.ERROR:
            if (state := self.request_states.get(each.request_id)) is None:
                continue
            answers = each.request_id if state.parent_req is None else state.parent_req.request_id
            names = each.request_id, answers, state.external_req_id
            _tell(self, FrontEnd.failed, *names, each.stop_reason)
    return original(self, outputs, *args, **kwargs)


@_around("entrypoints.generate.base.serving.GenerateBaseServing._raise_if_error")
def _raising(original: Any, self: Any, finish_reason: str | None, request_id: str) -> None:
    if finish_reason == "error":
        front_end = _front_ends.get(self.input_processor)
        if front_end is not None and (reason := front_end.failure(request_id)) is not None:
            raise _named("exceptions", "GenerationError")(reason)
    original(self, finish_reason, request_id)


@_around(
    f"{_OPENAI}.completion.serving.OpenAIServingCompletion.create_completion",
    f"{_OPENAI}.chat_completion.serving.OpenAIServingChat.create_chat_completion",
)
async def _answering(
    original: Any, self: Any, request: Any, raw_request: Any = None, *args: Any
) -> Any:
    """Gives the response to a request with a plan the token of its captures."""
    xargs = request.vllm_xargs or {}
    if NAME not in xargs or raw_request is None:
        return await original(self, request, raw_request, *args)
    if request.use_beam_search:
        refuse("beam search")
    token = raw_request.headers.get(HEADER) or secrets.token_urlsafe(_SHORTEST)
    if len(token) < _SHORTEST:
        msg = f"a token of captures must have at least {_SHORTEST} characters, got {len(token)}"
        raise BadPlanError(msg)
    gates, stream = AnswerGates(), secrets.token_urlsafe(_SHORTEST)
    request.vllm_xargs = {**xargs, FIELD: token, GATES: stream}
    if request.stream:
        streams[stream] = gates
    raw_request.scope.setdefault("state", {})[FIELD] = token  # for the header
    try:
        answer = await original(self, request, raw_request, *args)
    finally:
        await _share(self.engine_client, token)
    if isinstance(answer, AsyncGenerator):
        return _announced(gates.join(answer), token, self.engine_client)
    setattr(answer, FIELD, token)
    return answer


async def _share(engine: Any, token: str) -> None:
    """Makes other API servers find the captures of an answer's finished requests."""
    front_end = _front_ends.get(engine.input_processor)
    if front_end is not None and front_end.servers > 1 and (ended := front_end.ended(token)):
        await call_async(engine, "note", ended)


async def _announced(
    events: AsyncGenerator[str, None], token: str, engine: Any
) -> AsyncIterator[str]:
    """Yields the events of an answer, the first one with the token."""
    announced = False
    async with contextlib.aclosing(events):
        async for event in events:
            if not announced and event.startswith("data: {"):
                announced = True
                data, end, rest = event.removeprefix("data: ").partition("\n")
                event = f"data: {json.dumps(json.loads(data) | {FIELD: token})}{end}{rest}"  # noqa: PLW2901 (the same, with a field)
            if _ENDS.search(event):
                await _share(engine, token)
            yield event


@_around(f"{_OUTPUTS}._finish_request")
def _finishing(original: Any, self: Any, state: Any) -> Any:
    if state.detokenizer is not None:
        tokens = state.prompt_len + state.detokenizer.num_output_tokens()
        _tell(self, FrontEnd.finished, state.request_id, tokens)
    return original(self, state)


@_around(f"{_OUTPUTS}.abort_requests")
def _aborting(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    aborted = original(self, *args, **kwargs)
    for request_id in aborted:
        _tell(self, FrontEnd.cancelled, request_id)
    return aborted


@_around("fastapi.applications.FastAPI.build_middleware_stack")
def _stacking(original: Any, app: Any) -> Any:
    """Makes the server of an engine refuse plans on routes that would ignore them."""
    if hasattr(app.state, "args"):  # one of vLLM's
        PlanGate.add(app, _SERVED)
    return original(app)


# --- engine --------------------------------------------------------------------------------------


@_around("v1.engine.core.EngineCore.__init__")
def _starting(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    self_test.run(self)


@_around("v1.engine.core.EngineCoreProc.run_busy_loop")
def _looping(original: Any, self: Any) -> Any:
    """Tests an engine whose process has learned of the plug-in as it was made."""
    self_test.run(self)
    return original(self)


def _safely(default: T, function: Callable[..., T], *args: Any) -> T:
    """Calls code of ours in the scheduler; if it fails, the engine goes on with a safe value."""
    try:
        return function(*args)
    except Exception:  # noqa: BLE001 (the engine goes on)
        _LOG.exception(
            "ferrohook failed in the scheduler: a request shares less, or its stream lacks values"
        )
        return default


@_around("v1.core.kv_cache_utils._gen_prompt_embeds_extra_hash_keys")
def _keying(original: Any, request: Any, start: int, end: int) -> Any:
    """Gives blocks that a plan may have changed a key of the plan."""
    keys = original(request, start, end)
    if not has_plan(request.sampling_params):
        return keys
    own = _safely(None, prefix_cache.keys_of, request, end)
    return [*keys, *([prefix_cache.private_key()] if own is None else own)]


@_around("v1.core.kv_cache_manager.KVCacheManager.get_computed_blocks")
def _looking_up(original: Any, self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    """Makes a request read no cached positions that its plan has to see."""
    if not has_plan(request.sampling_params):
        return original(self, request, *args, **kwargs)
    coordinator = self.coordinator
    find = coordinator.find_longest_cache_hit

    def finding(hashes: Any, most: int) -> Any:
        return find(hashes, _safely(0, prefix_cache.readable, coordinator, request, most))

    # Cutting the result would be wrong for sliding windows.
    coordinator.find_longest_cache_hit = finding
    try:
        return original(self, request, *args, **kwargs)
    finally:
        del coordinator.find_longest_cache_hit


@_around("v1.core.kv_cache_coordinator.KVCacheCoordinator.cache_blocks")
def _sharing(original: Any, self: Any, request: Any, tokens: int) -> None:
    """Shares blocks of a step that a plan changes once the step has been checked."""
    if has_plan(request.sampling_params):
        tokens = _safely(0, prefix_cache.shareable, self, request, tokens)
    original(self, request, tokens)


@_around("v1.core.sched.scheduler.Scheduler.update_from_output")
def _updating(original: Any, self: Any, scheduler_output: Any, output: Any) -> Any:
    report: StepReport = getattr(output, "ferrohook_report", NO_REPORT)
    if report.failed:
        _safely(None, prefix_cache.evict, self, report.failed.keys())
    unchecked = report.failed.keys() | report.retried
    _safely(None, prefix_cache.share, self, scheduler_output, unchecked)
    _safely(None, steps.note_gates, self, report.gates)
    steps.retry(self, report.retried)
    # Ended before the step's tokens are read: no text under a plan that failed, and none after the
    # token that a plan ends with.
    status, make = _named("v1.request", "RequestStatus"), _named("v1.engine", "EngineCoreOutput")
    at_once, later = steps.cut(self, output, report.stopped)
    ended = steps.end(self, report.failed, status.FINISHED_ERROR, make)
    ended += steps.end(self, at_once, status.FINISHED_STOPPED, make)
    made = original(self, scheduler_output, output)
    ended += steps.end(self, later, status.FINISHED_STOPPED, make)
    for client, answer in ended:
        made.setdefault(client, _named("v1.engine", "EngineCoreOutputs")())
        made[client].outputs.append(answer)
    answers = itertools.chain.from_iterable(each.outputs for each in made.values())
    _safely(None, steps.add_gates, self, answers, {answer.request_id for _, answer in ended})
    return made


# --- worker --------------------------------------------------------------------------------------


@_around(_WORKER)
def _initializing(original: Any, self: Any) -> Any:
    result = original(self)
    self.ferrohook = attach(getattr(self.worker, "model_runner", None), self.vllm_config)
    return result


def _called(self: Any, name: str, *args: Any) -> bytes:
    """Answers `calls`, in the process of a worker."""
    answer: bytes = getattr(self.ferrohook, name)(*args)
    return answer

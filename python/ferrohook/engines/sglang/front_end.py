"""Front end of SGLang: uploads that plans name, and captures in the answers to their requests.

Uploaded vectors stay here; a plan that names some takes them along. The scheduler has the
dictionaries too; a plan takes their digests along. Captures come with the last output of a request,
values of gates with each one of a stream, in SGLang's own additional fields, so that only its
client gets them: from `/generate`, `Engine` and the OpenAI routes.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import importlib
import json
import secrets
import weakref
from typing import TYPE_CHECKING, Any, Final

from ferrohook.engines.gate_events import AnswerGates
from ferrohook.engines.harvest import error_in
from ferrohook.engines.sglang.options import SglangOptions
from ferrohook.engines.sglang.supported import CAPABILITIES
from ferrohook.engines.uploads import Uploads, UploadsOfPlan, may_name_uploads
from ferrohook.engines.wire import ANSWERS, DIGESTS, FIELD, GATES, NAME, VECTORS, packed_uploads
from ferrohook.errors import HookTypeError
from ferrohook.gates.streaming import extend

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping

    from ferrohook.engines.wire import Upload
    from ferrohook.gates.streaming import GateValues

_END: Final = "data: [DONE]"
_LARGE: Final = 2**16
"""Characters of a plan from which it is read in a thread: about a millisecond."""
_uploads: weakref.WeakKeyDictionary[Any, Uploads] = weakref.WeakKeyDictionary()
"""Uploaded vectors and dictionaries, by `TokenizerManager`."""


def uploads_of(manager: Any) -> Uploads:
    """Returns the uploads of a `TokenizerManager`.

    Raises:
        ValueError: the options of the engine are bad.
    """
    if manager not in _uploads:
        _uploads[manager] = Uploads(SglangOptions.of_environment().vectors_bytes)
    return _uploads[manager]


async def ask(manager: Any, call: str = "describe", argument: str = "") -> dict[str, Any]:
    """Asks the scheduler of a `TokenizerManager`: it calls one of `SchedulerWorker.CALLS`.

    Raises:
        HookError: the call failed.
    """
    manager.auto_create_handle_loop()
    question = importlib.import_module("sglang.srt.managers.io_struct").GetInternalStateReq
    # Clients send no such question, so none of them makes such a call.
    sent = question(rid=f"{NAME}:{call}:{argument}")
    answers = await manager.get_internal_state_communicator(sent)
    answer: dict[str, Any] = answers[0].internal_state[NAME]
    if (error := error_in(answer)) is not None:
        raise error
    return answer


async def send_dictionaries(manager: Any, data: bytes) -> None:
    """Sends dictionaries, as safetensors by their digests, to the scheduler.

    Raises:
        HookError: it did not take them.
    """
    encoded = await asyncio.to_thread(base64.b64encode, data)
    await ask(manager, "put", encoded.decode())


async def put(manager: Any, uploads: Mapping[str, Upload]) -> None:
    """Uploads dictionaries.

    Raises:
        HookError, HookTypeError, ValueError: see `Uploads.packed`.
    """
    uploaded = uploads_of(manager)
    data, digests = uploaded.packed(uploads)
    await send_dictionaries(manager, data)
    for digest in uploaded.put(uploads, digests):
        await ask(manager, "drop", digest)


def generating(original: Any, manager: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
    """Around `TokenizerManager.generate_request`."""
    params = getattr(obj, "sampling_params", None)
    if any(NAME in _custom(each) for each in (params if isinstance(params, list) else [params])):
        return _serving(original, manager, obj, *args, **kwargs)
    return original(manager, obj, *args, **kwargs)


def _custom(params: Any) -> dict[str, Any]:
    """Returns the `custom_params` of the sampling parameters of one request, empty without."""
    custom = params.get("custom_params") if isinstance(params, dict) else None
    return custom if isinstance(custom, dict) else {}


async def _serving(
    original: Any, manager: Any, obj: Any, *args: Any, **kwargs: Any
) -> AsyncIterator[Any]:
    """Yields the outputs of a request, captures and gates not as a list of one for each token.

    Raises:
        ValueError: its plan names a vector or a dictionary that was not uploaded.
    """
    uploads, params = uploads_of(manager), obj.sampling_params
    obj.sampling_params = (
        [await prepared(each, uploads) for each in params]
        if isinstance(params, list)
        else await prepared(params, uploads)
    )
    obj.ferrohook_captures = {}
    gates: AnswerGates | None = getattr(obj, GATES, None)
    seen: dict[int, int] = {}
    outputs = original(manager, obj, *args, **kwargs)
    async with contextlib.aclosing(outputs):
        async for output in outputs:
            for number, each in enumerate(output if isinstance(output, list) else [output]):
                info, index = each.get("meta_info") or {}, each.get("index", number)
                if GATES in info:
                    parts = info.pop(GATES)
                    if not manager.incremental_streaming_output:  # the list has those so far
                        parts = parts[seen.get(index, 0) :]
                        seen[index] = seen.get(index, 0) + len(parts)
                    if values := _joined(parts):
                        info[GATES] = values
                        if gates is not None:
                            gates.add(index, values)
                if parts := [part for part in info.get(FIELD) or () if part]:
                    info[FIELD] = parts[-1]
                    obj.ferrohook_captures[index] = parts[-1]
                else:
                    info.pop(FIELD, None)
            yield output


def _joined(parts: Iterable[GateValues | None]) -> GateValues:
    """Returns the values of gates that came with some tokens as one."""
    joined: GateValues = {}
    for part in parts:
        extend(joined, part or {})
    return joined


def reporting(  # noqa: PLR0913, PLR0917 (SGLang's arguments)
    original: Any, manager: Any, meta: Any, state: Any, info: dict[str, Any], index: int, *args: Any
) -> None:
    """Around `TokenizerManager.update_request_meta_info`: fields for an answer and for logs.

    SGLang gives all requests of a step the fields of each; ours go to those with a plan only.
    """
    if info.keys() & {FIELD, GATES}:
        if NAME in _custom(getattr(state.obj, "sampling_params", None)):
            encode(info, index)
            for key in info.keys() & {FIELD, GATES}:
                # Incremental streams cut these lists by tokens, and ours begin with later ones.
                values = state.customized_info_accumulated.setdefault(key, [])
                values += [None] * (len(state.output_ids) - len(values))
        else:
            info = {key: parts for key, parts in info.items() if key not in {FIELD, GATES}}
    original(manager, meta, state, info, index, *args)


def encode(info: dict[str, Any], index: int) -> None:
    """Encodes a request's captures in base64.

    Not in the scheduler's process, whose next step would wait for it.
    """
    if FIELD in info:
        parts = info[FIELD][index]
        info[FIELD][index] = parts and [part and base64.b64encode(part).decode() for part in parts]


def answered(response: Any, _serving: Any, request: Any, ret: Any, *_args: Any) -> Any:
    """Runs after methods that build responses of the OpenAI routes: adds a field to each choice.

    Without captures the field is empty: it confirms that the plan was served.
    """
    if NAME not in (request.custom_params or ()) or not hasattr(response, "choices"):
        return None
    found = [each["meta_info"].get(FIELD, "") for each in ret]
    content = response.model_dump(mode="json")
    for choice, captured in zip(content["choices"], found, strict=True):
        choice[FIELD] = captured
    return importlib.import_module("fastapi.responses").JSONResponse(content)


async def streaming(
    original: Any, serving: Any, adapted: Any, *args: Any, **kwargs: Any
) -> AsyncIterator[str]:
    """Around the generators of the OpenAI routes' streams: gates, and captures before the end."""
    gates = adapted.ferrohook_gates = AnswerGates()
    events = gates.join(original(serving, adapted, *args, **kwargs))
    async with contextlib.aclosing(events):
        async for event in events:
            found = getattr(adapted, FIELD, None)
            if event.startswith(_END) and found is not None:
                choices = [{"index": index, FIELD: it} for index, it in sorted(found.items())]
                yield f"data: {json.dumps({'object': FIELD, 'choices': [], FIELD: choices})}\n\n"
            yield event


async def prepared(params: Any, uploads: Uploads) -> Any:
    """Returns the parameters of a request as the scheduler takes them.

    The parameters of a request with a plan include the uploads that the plan names: its vectors,
    and the digests of its dictionaries. Several answers share a name.

    Raises:
        ValueError: its plan names a vector or a dictionary that was not uploaded, or it asks for
            beams, or for several answers without a token.
    """
    custom = {key: each for key, each in _custom(params).items() if key != ANSWERS}
    if NAME not in custom:
        return params
    if _is_several(params.get("beam_width")):
        reason = CAPABILITIES.refused["beam search"]
        msg = f"beam search is not supported with sglang: {reason}"
        raise ValueError(msg)
    if _is_several(params.get("n")):
        if params.get("max_new_tokens") == 0:
            msg = (
                "with a plan, n > 1 needs new tokens, got max_new_tokens=0: its answers would be "
                "the same"
            )
            raise ValueError(msg)
        custom[ANSWERS] = secrets.token_hex(16)
    if data := await _uploads_for(custom[NAME], uploads):
        custom[VECTORS] = data
    return {**params, "custom_params": custom}


def _is_several(number: Any) -> bool:
    """True for a number that a client sent, which may be anything, and is not 1."""
    return number is not None and number != 1


async def _uploads_for(text: Any, uploads: Uploads) -> str:
    """Returns the uploads that a plan names; nothing if it names none."""
    if not isinstance(text, str) or not may_name_uploads(text):
        return ""

    options = SglangOptions.of_environment()
    options.check_plan(len(text))

    def read() -> str:
        named = UploadsOfPlan(uploads.find)
        try:
            named.plan(text)
        except HookTypeError as error:
            raise ValueError(str(error)) from error
        options.check_plan(len(text) + sum(each.nbytes for each in named.vectors.values()))
        digests = {name: named.used[name] for name in named.dictionaries}
        data = packed_uploads(dict(named.vectors), **{DIGESTS: json.dumps(digests)})
        return base64.b64encode(data).decode()

    return await asyncio.to_thread(read) if len(text) > _LARGE else read()

"""Front end of SGLang: vectors that plans name, and captures in the answers to their requests.

Uploaded vectors stay here; a plan that names some takes them along. Captures come with the last
output of a request, in SGLang's own additional fields, so that only its client gets them: from
`/generate`, `Engine` and the OpenAI routes.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import importlib
import json
import weakref
from typing import TYPE_CHECKING, Any, Final

import safetensors.torch

from ferrohook.engines.sglang.options import SglangOptions
from ferrohook.engines.uploads import Vectors, VectorsOfPlan
from ferrohook.engines.wire import FIELD, NAME, VECTORS
from ferrohook.errors import HookTypeError
from ferrohook.plans import Plan

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

_END: Final = "data: [DONE]"
_LARGE: Final = 2**16
"""Characters of a plan from which it is read in a thread: about a millisecond."""
_vectors: weakref.WeakKeyDictionary[Any, Vectors] = weakref.WeakKeyDictionary()
"""Uploaded vectors, by `TokenizerManager`."""


def vectors_of(manager: Any) -> Vectors:
    """Returns the vectors that were uploaded to a `TokenizerManager`.

    Raises:
        ValueError: the options of the engine are bad.
    """
    if manager not in _vectors:
        _vectors[manager] = Vectors(SglangOptions.of_environment().vectors_bytes)
    return _vectors[manager]


async def ask_description(manager: Any) -> dict[str, Any]:
    """Asks the scheduler of a `TokenizerManager` what plans may do."""
    manager.auto_create_handle_loop()
    question = importlib.import_module("sglang.srt.managers.io_struct").GetInternalStateReq
    answers = await manager.get_internal_state_communicator(question(rid=NAME))
    described: dict[str, Any] = answers[0].internal_state[NAME]
    return described


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
    """Yields the outputs of a request, its captures in place of a list of one for each token.

    Raises:
        ValueError: its plan names a vector that was not uploaded.
    """
    if vectors := _vectors.get(manager):
        params = obj.sampling_params
        obj.sampling_params = (
            [await _with_vectors(each, vectors) for each in params]
            if isinstance(params, list)
            else await _with_vectors(params, vectors)
        )
    obj.ferrohook_captures = {}
    outputs = original(manager, obj, *args, **kwargs)
    async with contextlib.aclosing(outputs):
        async for output in outputs:
            for number, each in enumerate(output if isinstance(output, list) else [output]):
                info = each.get("meta_info") or {}
                if parts := [part for part in info.get(FIELD) or () if part]:
                    info[FIELD] = parts[-1]
                    obj.ferrohook_captures[each.get("index", number)] = parts[-1]
                else:
                    info.pop(FIELD, None)
            yield output


def encode(
    _manager: Any, _meta: Any, _state: Any, info: dict[str, Any], index: int, *_args: Any
) -> None:
    """Encodes a request's captures in base64, before its fields go to its answer and to logs.

    Not in the scheduler's process, whose next step would wait for it.
    """
    if FIELD in info:
        parts = info[FIELD][index]
        info[FIELD][index] = parts and [part and base64.b64encode(part).decode() for part in parts]


def answered(response: Any, _serving: Any, request: Any, ret: Any, *_args: Any) -> Any:
    """Behind the methods that build a response of the OpenAI routes: a field of each choice.

    Without captures it is empty: it tells that the plan was served.
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
    """Around the generators of the OpenAI routes' streams: an event in front of the last one."""
    events = original(serving, adapted, *args, **kwargs)
    async with contextlib.aclosing(events):
        async for event in events:
            found = getattr(adapted, FIELD, None)
            if event.startswith(_END) and found is not None:
                choices = [{"index": index, FIELD: it} for index, it in sorted(found.items())]
                yield f"data: {json.dumps({'object': FIELD, 'choices': [], FIELD: choices})}\n\n"
            yield event


async def _with_vectors(params: Any, vectors: Vectors) -> Any:
    """Returns the parameters of a request with the vectors that its plan names."""
    custom = _custom(params)
    text = custom.get(NAME)
    if not isinstance(text, str) or '"tensor"' not in text:
        return params

    options = SglangOptions.of_environment()
    options.check_plan(len(text))

    def read() -> str:
        named = VectorsOfPlan.uploaded(vectors)
        try:
            Plan.from_json(text, named)
        except HookTypeError as error:
            raise ValueError(str(error)) from error
        found = {name: vectors[name] for name in named.used}
        options.check_plan(len(text) + sum(each.nbytes for each in found.values()))
        return base64.b64encode(safetensors.torch.save(found)).decode()

    data = await asyncio.to_thread(read) if len(text) > _LARGE else read()
    return {**params, "custom_params": {**custom, VECTORS: data}}

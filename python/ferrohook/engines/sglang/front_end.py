"""Front end of SGLang: captures in the answers of `/generate`, `Engine` and the OpenAI routes.

They come with the last output of a request, on SGLang's own way of additional fields, so that
nobody but its client gets them.
"""

from __future__ import annotations

import contextlib
import importlib
import json
from typing import TYPE_CHECKING, Any, Final

from ferrohook.engines.wire import FIELD, NAME

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

_END: Final = "data: [DONE]"


def generating(original: Any, manager: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
    """Around `TokenizerManager.generate_request`."""
    if _has_plan(getattr(obj, "sampling_params", None)):
        return _noting(original(manager, obj, *args, **kwargs), obj)
    return original(manager, obj, *args, **kwargs)


async def _noting(outputs: Any, obj: Any) -> AsyncIterator[Any]:
    """Yields the outputs of a request, its captures in place of a list of one for each token."""
    obj.ferrohook_captures = {}
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


def _has_plan(params: Any) -> bool:
    """True if the sampling parameters of a request, or of one of several, have a plan."""
    for each in params if isinstance(params, list) else [params]:
        custom = each.get("custom_params") if isinstance(each, dict) else None
        if isinstance(custom, dict) and NAME in custom:
            return True
    return False

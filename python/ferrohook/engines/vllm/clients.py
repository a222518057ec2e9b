"""Calls of clients in the process of an engine's front end."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ferrohook.dictionaries.dictionary import Dictionary
from ferrohook.dictionaries.packing import by_name
from ferrohook.engines.vllm.calls import call, taken
from ferrohook.engines.vllm.plugin import connect
from ferrohook.engines.wire import NAME, unpacked
from ferrohook.errors import HookError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ferrohook.engines.wire import Captured, Upload
    from ferrohook.plans import Plan


def extra_args(plan: Plan) -> dict[str, Any]:
    """Returns the `extra_args` of `SamplingParams` that give a request a plan.

    Raises:
        HookTypeError: a Python function, typed hook or class in the plan.
        HookError: `VLLM_PLUGINS` leaves ferrohook out, so vLLM would ignore the plan.
    """
    listed = os.environ.get("VLLM_PLUGINS")
    if listed is not None and NAME not in listed.split(","):
        msg = f"vLLM would ignore the plan: add {NAME} to VLLM_PLUGINS, which is {listed!r}"
        raise HookError(msg)
    return {NAME: plan.to_json()}


def activations(llm: Any, output: Any, index: int = 0) -> Captured:
    """Returns the captures of a finished request, once.

    Args:
        llm: `LLM` or `LLMEngine` that served it.
        output: its `RequestOutput`, or its id.
        index: of the answer, `output.outputs[index]`, where the request asked for several (`n`).

    Raises:
        HookError: the plan of the request failed, or its captures are missing or were dropped.
        KeyError: the request captures nothing, or its captures were fetched.
        ValueError: several requests have the id.
    """
    front_end = connect(llm)
    ticket = front_end.find(getattr(output, "request_id", output), index)
    if ticket.tokens is None:
        msg = f"the request {ticket.request_id!r} is not finished, or was cancelled"
        raise HookError(msg)
    data = taken(call(llm, "take", ticket.key, ticket.tokens))
    front_end.forget(ticket)
    if ticket.error is not None:
        raise HookError(ticket.error)
    return unpacked(data)


def put_vectors(llm: Any, vectors: Mapping[str, Tensor]) -> None:
    """Uploads vectors that plans name, as in `{"tensor": "joy"}`.

    If a name was used before, later requests with it use the new vector.

    Raises:
        HookError: plans are refused in this engine, with the reason; or a dictionary has the name.
        HookTypeError: a vector is no tensor.
        ValueError: there would be too many, too many bytes of them (`vectors_bytes`), or a name is
            too long.
    """
    _put(llm, vectors)


def drop_vectors(llm: Any, names: Iterable[str]) -> None:
    """Drops uploaded vectors.

    Raises:
        KeyError: no vector has the name.
    """
    _drop(llm, names, Tensor)


def put_dictionaries(llm: Any, dictionaries: Iterable[Dictionary]) -> None:
    """Uploads dictionaries, which plans name as they do in JSON, by `Dictionary.name`.

    If a name was used before, later requests with it use the new dictionary.

    Raises:
        HookError: plans are refused in this engine, with the reason; or a vector has the name.
        HookTypeError: one is no `Dictionary`.
        ValueError: one has no name, or see `put_vectors`.

    Examples:
        >>> sae = fh.Dictionary.load("sae/blocks.8.hook_resid_post", name="sae")
        >>> put_dictionaries(llm, [sae])
        >>> plan = fh.Plan(fh.on(sae.reads, fh.Feature(sae, 3, set=5.0)))
    """
    _put(llm, by_name(dictionaries))


def drop_dictionaries(llm: Any, names: Iterable[str]) -> None:
    """Drops uploaded dictionaries.

    Raises:
        KeyError: no dictionary has the name.
    """
    _drop(llm, names, Dictionary)


def _put(llm: Any, uploads: Mapping[str, Upload]) -> None:
    front_end = connect(llm)
    data, digests = front_end.uploads.packed(uploads)
    call(llm, "put", data, digests)
    for digest in front_end.uploads.put(uploads, digests):
        call(llm, "drop", digest)


def _drop(llm: Any, names: Iterable[str], kind: type[Upload]) -> None:
    front_end = connect(llm)
    for name in names:
        call(llm, "drop", front_end.uploads.drop(name, kind), name)

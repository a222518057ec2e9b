"""Calls of clients: plans on their way to SGLang, and captures in its answers."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

from ferrohook.engines.sglang.front_end import vectors_of
from ferrohook.engines.wire import FIELD, NAME, unpacked

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor

    from ferrohook.engines.wire import Captured
    from ferrohook.plans import Plan


def custom_params(plan: Plan) -> dict[str, Any]:
    """Returns the `custom_params` of a request's sampling parameters that give it a plan.

    Raises:
        HookTypeError: a Python function, typed hook or class in the plan.
    """
    return {NAME: plan.to_json()}


def activations(answer: Any) -> Captured:
    """Returns the captures of a finished request.

    Args:
        answer: of `Engine.generate` or of `/generate`, of a stream its last one; or a choice of an
            answer of the OpenAI routes, of a stream one in the list `ferrohook_captures`.

    Raises:
        HookError: the plan of the request failed, or its captures are missing.
        KeyError: the request captures nothing, or is not finished.
    """
    found = answer.get("meta_info", answer).get(FIELD)
    if found is None:
        msg = "the answer has no captures: its request has no keep, or is not finished"
        raise KeyError(msg)
    return unpacked(base64.b64decode(found))


def put_vectors(engine: Any, vectors: Mapping[str, Tensor]) -> None:
    """Uploads vectors that plans name, as in `{"tensor": "joy"}`.

    A name that was used before means the new vector in the requests to come.

    Args:
        engine: an `Engine`.
        vectors: by name.

    Raises:
        HookTypeError: a vector is no tensor.
        ValueError: there would be too many, too many bytes of them (`vectors_bytes`), or a name is
            too long.
    """
    uploaded = vectors_of(engine.tokenizer_manager)
    _, digests = uploaded.packed(vectors)
    uploaded.put(vectors, digests)


def drop_vectors(engine: Any, names: Iterable[str]) -> None:
    """Drops uploaded vectors.

    Raises:
        KeyError: no vector has the name.
    """
    for name in names:
        vectors_of(engine.tokenizer_manager).drop(name)

"""Calls of clients: plans on their way to SGLang, and captures in its answers."""

from __future__ import annotations

import base64
import os
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ferrohook.dictionaries.dictionary import Dictionary
from ferrohook.dictionaries.packing import by_name
from ferrohook.engines.sglang.front_end import ask, put, uploads_of
from ferrohook.engines.wire import FIELD, NAME, unpacked
from ferrohook.errors import HookError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ferrohook.engines.wire import Captured
    from ferrohook.plans import Plan


def custom_params(plan: Plan) -> dict[str, Any]:
    """Returns the `custom_params` of a request's sampling parameters that give it a plan.

    Raises:
        HookTypeError: a Python function, typed hook or class in the plan.
        HookError: `SGLANG_PLUGINS` leaves ferrohook out, so SGLang would ignore the plan.
    """
    listed = os.environ.get("SGLANG_PLUGINS", "")
    if listed and NAME not in map(str.strip, listed.split(",")):
        msg = f"SGLang would ignore the plan: add {NAME} to SGLANG_PLUGINS, which is {listed!r}"
        raise HookError(msg)
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

    If a name was used before, later requests with it use the new vector.

    Args:
        engine: an `Engine`.
        vectors: by name.

    Raises:
        HookError: a dictionary has the name of one.
        HookTypeError: a vector is no tensor.
        ValueError: there would be too many, too many bytes of them (`vectors_bytes`), or a name is
            too long.
    """
    uploaded = uploads_of(engine.tokenizer_manager)
    _, digests = uploaded.packed(vectors)
    uploaded.put(vectors, digests)


def drop_vectors(engine: Any, names: Iterable[str]) -> None:
    """Drops uploaded vectors.

    Raises:
        KeyError: no vector has the name.
    """
    for name in names:
        uploads_of(engine.tokenizer_manager).drop(name, Tensor)


def put_dictionaries(engine: Any, dictionaries: Iterable[Dictionary]) -> None:
    """Uploads dictionaries, which plans name as they do in JSON, by `Dictionary.name`.

    If a name was used before, later requests with it use the new dictionary.

    Args:
        engine: an `Engine`.
        dictionaries: each with a name.

    Raises:
        HookError: a vector has the name of one.
        HookTypeError: one is no `Dictionary`.
        ValueError: one has no name, or see `put_vectors`.

    Examples:
        >>> sae = fh.Dictionary.load("sae/blocks.8.hook_resid_post", name="sae")
        >>> put_dictionaries(engine, [sae])
        >>> plan = fh.Plan(fh.on(sae.reads, fh.Feature(sae, 3, set=5.0)))
    """
    named = by_name(dictionaries)
    engine.loop.run_until_complete(put(engine.tokenizer_manager, named))


def drop_dictionaries(engine: Any, names: Iterable[str]) -> None:
    """Drops uploaded dictionaries.

    Raises:
        KeyError: no dictionary has the name.
    """
    manager = engine.tokenizer_manager
    for name in names:
        digest = uploads_of(manager).drop(name, Dictionary)
        engine.loop.run_until_complete(ask(manager, "drop", digest))

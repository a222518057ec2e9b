"""Calls of clients: plans on their way to SGLang, and captures in its answers."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

from ferrohook.engines.wire import FIELD, NAME, unpacked

if TYPE_CHECKING:
    from ferrohook.engines.wire import Captured
    from ferrohook.plans import Plan


def custom_params(plan: Plan) -> dict[str, Any]:
    """Returns the `custom_params` of a request's sampling parameters that give it a plan.

    Raises:
        HookTypeError: a Python function, typed hook or class in the plan.
    """
    return {NAME: plan.to_json()}


def activations(answer: Any) -> Captured:
    """Returns what a finished request captured.

    Args:
        answer: of `Engine.generate` or of `/generate`, of a stream its last one; or a choice of an
            answer of the OpenAI routes, of a stream one in the list `ferrohook_captures`.

    Raises:
        HookError: the plan of the request failed, or its captures are missing.
        KeyError: the request captures nothing, or is not finished.
    """
    found = answer.get("meta_info", answer).get(FIELD)
    if found is None:
        msg = "the answer has no captures: its request keeps nothing, or is not finished"
        raise KeyError(msg)
    return unpacked(base64.b64decode(found))

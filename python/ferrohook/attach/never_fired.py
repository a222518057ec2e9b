"""Text of `NeverFiredWarning`, with the reason if it is known."""

from __future__ import annotations

import dis
import inspect
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ferrohook.attach.classes import plain_class
from ferrohook.util.texts import MOST_LISTED, shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import nn

    from ferrohook._core import HookHandle

CAPTURE_IN_THREADS = "c = capture(...); with c as acts: pool.map(c.wrap(model), inputs)"
SCOPE_IN_THREADS = "with scope() as s: pool.map(s.wrap(model), inputs)"


def never_fired(handles: Iterable[tuple[str, HookHandle]]) -> list[str]:
    """Returns the names whose hooks could fire and never did."""
    # A disabled or removed hook has not counted its module's calls, nor has a compiled one.
    return [
        name
        for name, handle in handles
        if not (handle.calls or handle.traced) and handle.enabled and not handle.removed
    ]


def explain(model: nn.Module, names: Sequence[str], *, in_threads: str = "") -> str:
    """Returns the warning that these modules of a model never ran, with reasons.

    Args:
        model: the model.
        names: names of the modules.
        in_threads: code that makes calls of worker threads count, to be shown if these may be the
            reason.
    """
    reasons = [_bypass_reason(model, name) for name in names[:MOST_LISTED]]
    listed = [f"{shown(name)}{reason}" for name, reason in zip(names, reasons, strict=False)]
    if len(names) > MOST_LISTED:
        listed.append(f"and {len(names) - MOST_LISTED} more")
    verb = "was" if len(names) == 1 else "were"
    text = f"{', '.join(listed)} {verb} selected and never ran in this context"
    if in_threads and not all(reasons):
        text += f"; for calls in worker threads, use wrap: {in_threads}"
    return text


def _bypass_reason(model: nn.Module, name: str) -> str:
    parent_name, _, attribute = name.rpartition(".")
    try:
        parent = model.get_submodule(parent_name)
        forward: Any = vars(parent).get("forward", plain_class(type(parent)).forward)
        code = inspect.unwrap(forward).__code__
    except (AttributeError, ValueError):
        return ""
    accessed = [
        instruction.argval
        for instruction in dis.get_instructions(code)
        if instruction.opname in {"LOAD_ATTR", "LOAD_METHOD"}
    ]
    if (attribute, "forward") in pairwise(accessed):
        caller = f"{type(parent).__name__}.forward"
        return f" ({caller} calls its forward directly, which runs no hooks)"
    return ""

"""Refusal of our options where a function with `**kwargs` would swallow them."""

from __future__ import annotations

import inspect
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from torch import nn

from ferrohook.errors import HookTypeError
from ferrohook.util.texts import name_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_OPTIONS: Final = {
    "fh.register(..., {}=...)": ("scope",),
    "prepared.open({}=...)": ("deadline", "prompt"),
    "fh.run(..., {}=...)": ("hooks", "capture", "plan"),
    "plan=fh.Plan(fh.on(..., {}=...))": (
        *("phase", "prepend", "with_kwargs", "always_call", "priority", "on_error"),
        *("when", "strength"),
    ),
    "plan=fh.Plan(fh.on(..., {}=...)), or the same with fh.keep": ("at",),
    "plan=fh.Plan(fh.keep(..., {}=...))": (
        *("label", "inputs", "output_index", "detach", "device", "dtype", "slice", "copy"),
        *("calls", "grads", "max_bytes", "stop"),
    ),
}
"""The options of hooks and captures, by the code that takes each."""
_WAYS: Final = {name: code.format(name) for code, names in _OPTIONS.items() for name in names}


def refuse_swallowed(
    taker: str,
    receiver: nn.Module | Callable[..., Any],
    kwargs: Mapping[str, Any],
    meant: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Refuses keywords for a function that are our options, unless it names them itself.

    A function with `**kwargs`, as the forwards of transformers, swallows any: the call would go on
    without the option.

    Args:
        taker: function that the keywords were passed to.
        receiver: function that they would go to, or a module that is called with them.
        kwargs: the keywords.
        meant: further names that are refused, and what `taker` takes instead of each.

    Raises:
        HookTypeError: a keyword is an option of hooks or captures; the message says what takes it.
    """
    suspects = {name for name in kwargs if name in _WAYS or name in meant}
    if not suspects:
        return
    if isinstance(receiver, nn.Module):
        # A compiled model's own forward takes anything.
        receiver = getattr(receiver, "_orig_mod", receiver).forward
    try:
        parameters = [*inspect.signature(receiver).parameters.values()]
    except (TypeError, ValueError):  # as for a function in C
        parameters = []
    suspects -= {it.name for it in parameters if it.kind is not inspect.Parameter.VAR_KEYWORD}
    for name in sorted(suspects):
        msg = f"{name_of(receiver)} does not declare {name}= and may ignore it"
        if name in meant:
            msg = f"{taker} takes {meant[name]}=, not {name}=: {msg}"
        else:
            msg = f"{taker} does not accept {name}=: {msg}. Use {_WAYS[name]}"
        raise HookTypeError(msg)

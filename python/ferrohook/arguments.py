"""Checks of arguments, and how an error names a value of the wrong type."""

from __future__ import annotations

import sys

from torch import nn

from ferrohook.errors import HookTypeError

COPIES = ("checked", "clone", "ref")
"""How a capture keeps tensors."""


def describe(value: object) -> str:
    """Names the type of a value, or the class that the value is."""
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def expect(value: object, types: type | tuple[type, ...], expected: str) -> None:
    """Refuses a value of another type.

    Args:
        value: the argument.
        types: those that are accepted; `()` refuses any value.
        expected: the beginning of the message, such as "index is a whole number".

    Raises:
        HookTypeError: the value is of none of the types.
    """
    if not isinstance(value, types):
        msg = f"{expected}, got {type(value).__name__}"
        raise HookTypeError(msg)


def expect_module(model: object, taker: str) -> None:
    """Refuses a model that is no `nn.Module`.

    Args:
        model: the argument.
        taker: the beginning of the message, such as "Layers takes".

    Raises:
        HookTypeError: it is none.
    """
    if not isinstance(model, nn.Module):
        msg = f"{taker} an instance of nn.Module, got {describe(model)}"
        raise HookTypeError(msg)


def at_least_one(name: str, value: object, expected: str = "a whole number") -> int:
    """A whole number above 0, cut to what the native half can hold.

    Raises:
        HookTypeError: the value is no int.
        ValueError: it is below 1.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        msg = f"{name} is {expected}, got {type(value).__name__}"
        raise HookTypeError(msg)
    if value < 1:
        msg = f"{name} is at least 1, got {value}"
        raise ValueError(msg)
    return min(value, sys.maxsize)


def check_copy(copy: object) -> None:
    """Refuses an unknown way to keep tensors.

    Raises:
        ValueError: `copy` is none of `COPIES`.
    """
    if copy not in COPIES:
        msg = f"copy is checked, clone or ref, got {copy!r}"
        raise ValueError(msg)

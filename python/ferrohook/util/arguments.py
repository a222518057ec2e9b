"""Validation of arguments, and the name that an error gives a value of the wrong type."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, TypeAlias, cast, get_args

import torch
from torch import Tensor, nn

from ferrohook.errors import HookTypeError

if TYPE_CHECKING:
    from types import UnionType

OutputIndex: TypeAlias = "int | str | tuple[int | str, ...] | None"
"""Part of a module's value: an index, key, attribute or `"sum"`; a tuple of these is the path of a
nested part. None: the whole.
"""
COPIES = ("checked", "clone", "ref")
"""Values of the option `copy` of a capture."""
_SHORTEST = 1e-18
"""Least length of a direction."""


def describe(value: object) -> str:
    """Returns the name of a value's type; for a class, the name of the class itself."""
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def expect(value: object, types: type | UnionType | tuple[()], expected: str) -> None:
    """Validates the type of a value. A bool is an int only where `types` names `bool`.

    Args:
        value: the argument.
        types: accepted types; `()` accepts no value.
        expected: start of the message, such as "index must be an int".

    Raises:
        HookTypeError: the value has none of the types.
    """
    unwanted = isinstance(value, bool) and bool not in {types, *get_args(types)}
    if unwanted or not isinstance(value, types):
        msg = f"{expected}, got {describe(value)}"
        raise HookTypeError(msg)


def expect_callable(value: object, expected: str) -> None:
    """Validates a callable; `expected` is the start of the message.

    Raises:
        HookTypeError: it cannot be called.
    """
    if not callable(value):
        expect(value, (), expected)


def check_output_index(value: object, name: str, types: type | UnionType = int | str) -> object:
    """Validates and returns an `output_index`: None, a step, or a path, a tuple of steps.

    Args:
        value: the argument.
        name: start of the message, such as "output_index of Add".
        types: of a step.

    Raises:
        HookTypeError: a step has none of the types, or the path is empty.
    """
    steps = value if isinstance(value, tuple) else () if value is None else (value,)
    wrong = [step for step in steps if isinstance(step, bool) or not isinstance(step, types)]
    if wrong or value == ():
        expected = f"{name} must be an int, a key, the name of an attribute or a tuple of these"
        expect(wrong[0] if wrong else value, (), expected)
    return value


def expect_module(model: object, taker: str) -> None:
    """Validates that a model is an `nn.Module`.

    Args:
        model: the argument.
        taker: start of the message, such as "Layers needs".

    Raises:
        HookTypeError: it is not an `nn.Module`.
    """
    if not isinstance(model, nn.Module):
        msg = f"{taker} an instance of nn.Module, got {describe(model)}"
        raise HookTypeError(msg)


def at_least(least: int, name: str, value: int, expected: str = "an int") -> int:
    """Validates an int with a lower bound, and caps it at `sys.maxsize`, the core's limit.

    Raises:
        HookTypeError: the value is not an int.
        ValueError: it is below `least`.
    """
    expect(value, int, f"{name} must be {expected}")
    if value < least:
        msg = f"{name} must be at least {least}, got {value}"
        raise ValueError(msg)
    return min(value, sys.maxsize)


def check_copy(copy: object) -> None:
    """Validates the option `copy` of a capture.

    Raises:
        ValueError: `copy` is not one of `COPIES`.
    """
    if copy not in COPIES:
        msg = f"copy must be 'checked', 'clone' or 'ref', got {copy!r}"
        raise ValueError(msg)


def finite(value: object, name: str) -> float:
    """Validates and returns a finite number.

    Raises:
        HookTypeError: it is no number.
        ValueError: it is not finite, or too large for a float.
    """
    expect(value, int | float, f"{name} must be a number")
    try:
        number = float(cast("float", value))
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        msg = f"{name} must be finite, got {number}"
        raise ValueError(msg)
    return number


def check_length(direction: Tensor, name: str) -> None:
    """Validates that the square of a direction's length is a number of float32, and not zero.

    Raises:
        ValueError: it is not.
    """
    length = float(direction.detach().abs().to(torch.float64).norm())
    if not _SHORTEST <= length <= 1 / _SHORTEST:  # False for NaN
        msg = f"{name} must have a length from {_SHORTEST} to {1 / _SHORTEST:.0e}, got {length:g}"
        raise ValueError(msg)


def check_encodes(text: str, name: str) -> None:
    """Refuses a text that no file, header or JSON of UTF-8 can carry.

    Raises:
        ValueError: it has a surrogate.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        msg = f"{name}: {text!r} contains a surrogate, which UTF-8 cannot encode"
        raise ValueError(msg) from error

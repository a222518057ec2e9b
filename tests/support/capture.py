"""Models of the tests of captures."""

from __future__ import annotations

import dataclasses
import io
from collections import UserDict
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

import ferrohook as fh
from support.modules import Returning

if TYPE_CHECKING:
    from collections.abc import Iterator


def captured(value: Any, **options: Any) -> Any:
    """Capture of a module that returns `value`."""
    module = Returning(lambda: value)
    with fh.capture(module, "", **options) as acts:
        assert module() is value
    return acts[""]


def assert_plain(model: nn.Module) -> None:
    """Asserts that ferrohook left nothing in the model."""
    for module in model.modules():
        assert type(module).__mro__[1].__module__.startswith("torch.nn")
        assert not [key for key in vars(module) if "ferrohook" in key]


class Named(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Data:
    first: Any
    second: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    first: Any


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Tensors of a structure, by a traversal independent of ferrohook's."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | UserDict):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_of(item)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from tensors_of(getattr(value, field.name))


def saved_and_loaded(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


class Twice(nn.Module):
    """Calls one module twice and another in between."""

    def __init__(self) -> None:
        super().__init__()
        self.once = nn.Identity()
        self.shared = nn.Identity()
        self.alias = self.shared

    def forward(self, x: Tensor) -> Tensor:
        return self.alias(self.once(self.shared(x) + 1) + 1) + 1

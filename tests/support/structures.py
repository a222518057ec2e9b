"""Structures that modules return, of every kind that ferrohook looks into."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

from transformers.utils.generic import ModelOutput

Named = namedtuple("Named", ["first", "second"])  # noqa: PYI024 (of a class made by a call)


@dataclass
class Pair:
    first: Any = None
    second: Any = None


@dataclass
class Output(ModelOutput):
    first: Any = None
    second: Any = None

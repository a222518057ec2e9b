"""Measures of tests on a GPU, real or emulated."""

from __future__ import annotations

import contextlib
import warnings
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def waits() -> Iterator[list[str]]:
    """Fills a list with the waits of the host in the block."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
            found += [
                text
                for each in caught
                if (text := str(each.message)).startswith("called a synchronizing")
            ]

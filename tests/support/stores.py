"""Helpers of the tests of stores."""

from __future__ import annotations

import os
import traceback
import warnings
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrohook.data import Store


def fill(store: Store, *batches: int, run: str = "run", size: int = 4) -> None:
    for batch in batches:
        store.put(run, batch, "layer", {"output": torch.full((size,), float(batch))})
        store.complete(run, batch)


def check(store: Store, *batches: int, run: str = "run") -> None:
    assert store.completed(run) == store.batches(run) == [*batches]
    for batch in batches:
        assert store.layers(run, batch) == ["layer"]
        assert (store.get(run, batch, "layer")["output"] == batch).all()


def forked(work: Callable[[], object]) -> int:
    """Runs `work` in a forked process, which need not import torch; returns its pid."""
    with warnings.catch_warnings(category=DeprecationWarning, action="ignore"):
        child = os.fork()  # warns about threads; the child uses none of torch's
    if not child:
        try:
            torch.set_num_threads(1)  # the parent's threads do not exist here
            work()
        except BaseException:  # noqa: BLE001 (printed, and reported by the exit code)
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return child


def wait_for(child: int) -> None:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

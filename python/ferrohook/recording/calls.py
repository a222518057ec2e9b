"""What is asked of the calls of models in progress."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from ferrohook._core import Call, calls_in_progress, frames
from ferrohook.errors import UnattributedWarning
from ferrohook.tensors import share_memory, tensors_in

if TYPE_CHECKING:
    from torch import Tensor, nn


def innermost() -> Call | None:
    """The call that records in this context, or keeps others from it."""
    for scope in frames.get():
        if type(scope) is Call:
            return scope
    return None


def running(model: nn.Module | None) -> list[Call]:
    """The calls of a model in progress, but for those that wait for one of a sub-model."""
    calls = calls_in_progress()
    around = {id(call.around) for call in calls}
    return [call for call in calls if call.model is model and id(call) not in around]


def knows(call: Call, tensors: list[Tensor]) -> bool:
    """Whether it was called with one of these, or a layer of it returned it."""
    known = [*tensors_in(call.given), *call.seen()]
    return any(share_memory(each, tensor) for tensor in tensors if tensor.numel() for each in known)


def tell_unattributed(call: Call) -> None:
    """Warns of layers that ran and may be missing."""
    msg = (
        f"{', '.join(call.unattributed)} ran on a thread whose context tells of no call, and "
        "nothing else told whose it was: it was not recorded. Run such a layer with "
        "contextvars.copy_context().run"
    )
    warnings.warn(msg, UnattributedWarning, stacklevel=6)

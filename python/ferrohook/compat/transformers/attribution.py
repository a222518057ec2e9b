"""Attribution of layers to in-flight calls where the context has none (worker threads, say)."""

from __future__ import annotations

import threading
import warnings
from typing import TYPE_CHECKING, Any

import torch

from ferrohook._core import calls_in_progress
from ferrohook.errors import UnattributedWarning
from ferrohook.util.tensors import share_memory, tensors_in

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

    from ferrohook._core import RecordedCall


def find_owner(
    model: nn.Module | None, layer: str, taken: Any, enclosing: Sequence[RecordedCall | None]
) -> RecordedCall | None:
    """Finds the in-flight call of `model` that owns a layer.

    That is the call of an enclosing layer on this thread; failing that, the call that shares memory
    with a tensor which the layer takes; failing that, the only call in flight, if this thread makes
    it or was started during it.

    Args:
        model: the model; None if it is gone.
        layer: class of the layer, for the warning.
        taken: first argument of the layer.
        enclosing: calls of the layers around it on this thread.
    """
    calls = _in_flight(model)
    if not any(call.records for call in calls):
        return None
    if torch._C._current_graph_task_id() != -1:
        return None  # a rerun in a backward: checkpointing
    tensors = [*tensors_in(taken)]
    owners = [call for call in calls if call in enclosing]
    owners = owners or [call for call in calls if _shares_memory(call, tensors)]
    if not owners and len(calls) == 1:
        here = threading.current_thread()
        owners = [call for call in calls if here not in call.other_threads]
    if len(owners) == 1:
        return owners[0]
    # The layer may belong to a call that records nothing: that one's layers are not all watched.
    if all(call.records for call in calls):
        for call in calls:
            call.unattributed.add(layer)
    return None


def _in_flight(model: nn.Module | None) -> list[RecordedCall]:
    """Lists the in-flight calls of a model, except those that enclose a call of a sub-model."""
    calls = calls_in_progress()
    around = {call.around for call in calls}
    return [call for call in calls if call.model is model and call not in around]


def _shares_memory(call: RecordedCall, tensors: list[Tensor]) -> bool:
    """True if an argument of the call or an output of its layers shares memory with a tensor."""
    known = [*tensors_in(call.known())]
    return any(share_memory(each, tensor) for tensor in tensors if tensor.numel() for each in known)


def warn_unattributed(call: RecordedCall) -> None:
    """Warns of layers that ran and may be missing."""
    msg = (
        f"{', '.join(sorted(call.unattributed))} ran on a thread whose context tells of no call, "
        "and nothing else told whose it was: it was not recorded. Run such a layer with "
        "contextvars.copy_context().run"
    )
    warnings.warn(msg, UnattributedWarning, stacklevel=7)

"""Attribution of layers to in-flight calls where the context has none (worker threads, say)."""

from __future__ import annotations

import threading
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ferrohook._core import calls_in_progress
from ferrohook.errors import UnattributedWarning
from ferrohook.tensors import share_memory, tensors_in

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ferrohook._core import Call


class AttributedLayer(NamedTuple):
    """A layer on a worker thread, and the call that it runs for; None if none was found."""

    module: nn.Module
    call: Call | None


class _Attributed(threading.local):
    """Stack of the layers that this thread runs for calls of other threads."""

    def __init__(self) -> None:
        self._layers: list[AttributedLayer] = []

    def enter(self, module: nn.Module, call: Call | None) -> None:
        self._layers.append(AttributedLayer(module, call))

    def leave(self, module: nn.Module) -> Call | None:
        """Pops the layer. Returns the call that it was entered for."""
        for place in reversed(range(len(self._layers))):
            layer = self._layers[place]
            if layer.module is module:
                del self._layers[place:]
                return layer.call
        return None

    def around(self, module: nn.Module) -> AttributedLayer | None:
        """Returns the innermost entered layer that encloses `module`."""
        layers = self._layers
        # Layers above it raised and were never left.
        while layers and (
            layers[-1].module is module
            or not any(module is each for each in layers[-1].module.modules())
        ):
            layers.pop()
        return layers[-1] if layers else None


ATTRIBUTED = _Attributed()


def find_owner(model: nn.Module, layer: nn.Module, taken: Any) -> Call | None:
    """Finds the in-flight call of `model` that owns `layer`.

    That is the call that shares memory with a tensor which the layer takes. Failing that, the only
    call in flight, if this thread makes it or was started during it.
    """
    calls = _in_flight(model)
    if not any(call.records for call in calls):
        return None
    if torch._C._current_graph_task_id() != -1:
        return None  # a rerun in a backward: checkpointing
    tensors = [*tensors_in(taken)]
    owners = [call for call in calls if _shares_memory(call, tensors)]
    here = threading.current_thread()
    if (
        not owners
        and len(calls) == 1
        and (here.ident == calls[0].thread or here not in calls[0].threads)
    ):
        owners = calls
    if len(owners) == 1:
        return owners[0]
    # The layer may belong to a call that records nothing: that one's layers are not all watched.
    if all(call.records for call in calls):
        for call in calls:
            call.leave_out(type(layer).__name__)
    return None


def _in_flight(model: nn.Module) -> list[Call]:
    """Lists the in-flight calls of a model, except those that enclose a call of a sub-model."""
    calls = calls_in_progress()
    around = {id(call.around) for call in calls}
    return [call for call in calls if call.model is model and id(call) not in around]


def _shares_memory(call: Call, tensors: list[Tensor]) -> bool:
    """True if an argument of the call or an output of its layers shares memory with a tensor."""
    own = [*tensors_in(call.arguments), *call.outputs()]
    return any(share_memory(each, tensor) for tensor in tensors if tensor.numel() for each in own)


def warn_unattributed(call: Call) -> None:
    """Warns of layers that ran and may be missing."""
    msg = (
        f"{', '.join(call.unattributed)} ran on a thread whose context tells of no call, and "
        "nothing else told whose it was: it was not recorded. Run such a layer with "
        "contextvars.copy_context().run"
    )
    warnings.warn(msg, UnattributedWarning, stacklevel=6)

"""Attribution of layers that run where the context has no call: on worker threads, say."""

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
    """A layer that runs for a call of another thread; None where no call was found."""

    module: nn.Module
    call: Call | None


class _Attributed(threading.local):
    """The layers that this thread runs for calls of other threads, the outermost first."""

    def __init__(self) -> None:
        self._layers: list[AttributedLayer] = []

    def enter(self, module: nn.Module, call: Call | None) -> None:
        self._layers.append(AttributedLayer(module, call))

    def leave(self, module: nn.Module) -> Call | None:
        """The call that the layer was entered for."""
        for place in reversed(range(len(self._layers))):
            layer = self._layers[place]
            if layer.module is module:
                del self._layers[place:]
                return layer.call
        return None

    def around(self, module: nn.Module) -> AttributedLayer | None:
        """The layer around one that begins."""
        layers = self._layers
        # Those above it raised, and were not left.
        while layers and (
            layers[-1].module is module
            or not any(module is each for each in layers[-1].module.modules())
        ):
            layers.pop()
        return layers[-1] if layers else None


ATTRIBUTED = _Attributed()


def owner_of(model: nn.Module, layer: nn.Module, taken: Any) -> Call | None:
    """Finds the in-flight call of `model` that owns `layer`.

    The one that knows the tensor which the layer takes. Failing that, the only one in progress, if
    this thread is its own or was started during it.
    """
    calls = _running(model)
    if not any(call.records for call in calls):
        return None
    if torch._C._current_graph_task_id() != -1:
        return None  # checkpointing runs it again in a backward
    tensors = [*tensors_in(taken)]
    owners = [call for call in calls if _knows(call, tensors)]
    here = threading.current_thread()
    if (
        not owners
        and len(calls) == 1
        and (here.ident == calls[0].thread or here not in calls[0].threads)
    ):
        owners = calls
    if len(owners) == 1:
        return owners[0]
    # Of those that record nothing the layers are not watched all the time: it may well be theirs.
    if all(call.records for call in calls):
        for call in calls:
            call.leave_out(type(layer).__name__)
    return None


def _running(model: nn.Module) -> list[Call]:
    """The calls of a model in progress, but for those that wait for one of a sub-model."""
    calls = calls_in_progress()
    around = {id(call.around) for call in calls}
    return [call for call in calls if call.model is model and id(call) not in around]


def _knows(call: Call, tensors: list[Tensor]) -> bool:
    """True where an argument of the call, or an output of its layers, shares one's memory."""
    known = [*tensors_in(call.arguments), *call.outputs()]
    return any(share_memory(each, tensor) for tensor in tensors if tensor.numel() for each in known)


def warn_unattributed(call: Call) -> None:
    """Warns of layers that ran and may be missing."""
    msg = (
        f"{', '.join(call.unattributed)} ran on a thread whose context tells of no call, and "
        "nothing else told whose it was: it was not recorded. Run such a layer with "
        "contextvars.copy_context().run"
    )
    warnings.warn(msg, UnattributedWarning, stacklevel=6)

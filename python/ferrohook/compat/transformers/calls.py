"""Calls of recording forwards, and the search for the call that a layer runs for."""

from __future__ import annotations

import contextvars
import threading
import warnings
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ferrohook.compat.transformers.declarations import HIDDEN
from ferrohook.errors import SelectionError, UnattributedWarning
from ferrohook.util.never_trace import never_trace
from ferrohook.util.tensors import share_memory, tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from ferrohook.compat.transformers.declarations import LayerKey


class Call:
    """Call that `torch.compile` traces: recorded tensors become outputs of the graph."""

    def __init__(
        self,
        installation: Any,
        selected: Sequence[int] | None,
        recorded: dict[str, list[Any]],
    ) -> None:
        # In a trace the number of the installation, which its successors share.
        self.installation = installation
        # Indices, some negative, where the config has no number of layers: resolved at the end.
        self._unresolved = selected if selected and min(selected) < 0 else None
        # Indices of the hidden states that are stored; None for all.
        self._selected = None if self._unresolved else selected
        self._recorded = recorded
        # Prepares hidden states for storage; None before the first, or to store them as they are.
        self._convert: Callable[[Any], Any] | None = None

    def record(
        self, keys: Sequence[LayerKey], args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Records a layer's output under each of its keys."""
        for key in keys:
            values = self._recorded.get(key.key)
            if values is None:
                continue
            if key.initial and not values:
                self._append(values, key, first_of(args, kwargs))
            value = _item_of(output, key)
            if value is not None:
                self._append(values, key, value)

    def _append(self, values: list[Any], key: LayerKey, value: Any) -> None:
        selected = None
        if key.initial is not None:
            selected, self._convert = self._selected, key.convert
        if selected is not None and len(values) not in selected:
            values.append(None)
        else:
            values.append(value if key.convert is None else key.convert(value))

    def finish(self, ties: Sequence[Any]) -> None:
        """Replaces the last state by the first of `ties`, if any; drops unselected states."""
        values = self._recorded[HIDDEN]
        if ties and values and values[-1] is not None:
            values[-1] = ties[0] if self._convert is None else self._convert(ties[0])
        if self._unresolved is not None:
            kept = resolve_indices(self._unresolved, len(values))
            values[:] = [each if place in kept else None for place, each in enumerate(values)]


def resolve_indices(indices: Sequence[int], count: int) -> list[int]:
    """Counts negative indices from the end, and drops those that are out of range."""
    return [index % count for index in indices if -count <= index < count]


def first_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the hidden states that a layer takes.

    They are its first positional argument, else the keyword `hidden_states`, else the first one.
    """
    if args:
        return args[0]
    return kwargs[HIDDEN] if HIDDEN in kwargs else next(iter(kwargs.values()), None)


def _item_of(output: Any, key: LayerKey) -> Any:
    if not isinstance(output, tuple):
        return output
    if not -len(output) <= key.item < len(output):
        msg = f'"{key.key}" has no output_index {key.item}: it is a tuple of {len(output)} items'
        raise SelectionError(msg)
    return output[key.item]


class EagerCall(Call):
    """Call that runs eagerly; layers on other threads may run for it too."""

    def __init__(  # noqa: PLR0913, PLR0917 (the state of a call)
        self,
        installation: Any,
        selected: Sequence[int] | None,
        recorded: dict[str, list[Any]],
        model: nn.Module,
        arguments: tuple[tuple[Any, ...], dict[str, Any]],
        around: Call | None,
    ) -> None:
        super().__init__(installation, selected, recorded)
        self.model = model
        self.records = bool(recorded)
        # The enclosing call, which does not record while this one is in flight.
        self.around = around
        self.live = True
        # Classes of layers that ran, were not attributed and may be this call's.
        self.unattributed: set[str] = set()
        # Threads that run no layers for it: they existed before and did not make the call.
        here = threading.current_thread()
        threads = threading.enumerate() if recorded else []
        self.other_threads = [thread for thread in threads if thread is not here]
        self._known: list[Any] = [arguments]
        # Layers that run at once make one initial state.
        self._lock = threading.RLock()
        self._backward = torch._C._current_graph_task_id()

    def record(
        self, keys: Sequence[LayerKey], args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Records a layer's output, until the call has ended."""
        if torch._C._current_graph_task_id() not in (-1, self._backward):
            return  # a rerun in a backward that the forward started: checkpointing
        with self._lock:
            if self.live:
                super().record(keys, args, kwargs, output)
        main = output[0] if isinstance(output, tuple) and output else output
        if isinstance(main, Tensor):
            self._known.append(weakref.ref(main))

    def end(self) -> None:
        """Drops its state and recorded values; the last call releases a retired installation."""
        # Others are there if an interrupt kept them from this method.
        IN_FLIGHT.difference_update([call for call in IN_FLIGHT.copy() if not call.live])
        self._known, self._recorded = [], {}
        if self.installation is not None:
            self.installation.release_if_retired()

    def shares_memory(self, tensors: list[Tensor]) -> bool:
        """True if a tensor shares memory with an argument or a layer's output."""
        known = (each() if isinstance(each, weakref.ref) else each for each in self._known)
        return any(
            share_memory(each, tensor) for each in tensors_in([*known]) for tensor in tensors
        )


# A recording forward that runs eagerly breaks the graphs of the layers in it.
never_trace(EagerCall, "record", "a forward that records runs eagerly")

IN_FLIGHT: set[EagerCall] = set()
"""Eager calls in progress, including calls without recording: a layer may belong to one."""

CALL: contextvars.ContextVar[EagerCall | None] = contextvars.ContextVar("recording", default=None)
"""The innermost eager call of a context, where another thread runs a copy of it."""


class _Here(threading.local):
    """The innermost call that this thread makes, traces, or runs between two graphs of it.

    A thread-local, since Dynamo traces assignments to one but not to a context variable.
    """

    def __init__(self) -> None:
        # Set in each thread from the start: Dynamo guards on its presence.
        self.call: Call | None = None


HERE = _Here()


def innermost() -> Call | None:
    """Returns the innermost call of this thread or, without one, of its context."""
    return CALL.get() if HERE.call is None else HERE.call


def find_owner(
    model: nn.Module | None, layer: str, taken: Any, enclosing: Sequence[EagerCall | None]
) -> EagerCall | None:
    """Finds the call of `model` that owns a layer, where neither thread nor context has one.

    That is the call of an enclosing layer on this thread; failing that, the call that shares memory
    with a tensor which the layer takes; failing that, the only call in flight, if this thread makes
    it or was started during it.

    Args:
        model: the model; None if it is gone.
        layer: class of the layer, for the warning.
        taken: first argument of the layer.
        enclosing: calls of the layers around it on this thread.
    """
    if not IN_FLIGHT:
        return None
    calls = IN_FLIGHT.copy()
    around = {call.around for call in calls}
    calls = {call for call in calls if call.live and call.model is model and call not in around}
    if not any(call.records for call in calls):
        return None
    if torch._C._current_graph_task_id() != -1:
        return None  # a rerun in a backward: checkpointing
    tensors = [tensor for tensor in tensors_in(taken) if tensor.numel()]
    owners = [call for call in calls if call in enclosing]
    owners = owners or [call for call in calls if call.shares_memory(tensors)]
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


def warn_unattributed(call: EagerCall) -> None:
    """Warns of layers that ran and may be missing."""
    msg = (
        f"{', '.join(sorted(call.unattributed))} ran on a thread whose context belongs to no call, "
        "so their call is unknown and they were not recorded. Run such layers with "
        "contextvars.copy_context().run"
    )
    warnings.warn(msg, UnattributedWarning, stacklevel=7)

"""Recording in a call that `torch.compile` traces.

Recorded values are outputs of the graph: threads that run it share nothing.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from ferrohook.errors import SelectionError
from ferrohook.recording.declarations import HIDDEN
from ferrohook.tensors import map_tensors

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from ferrohook.recording.declarations import OutputRecorder


def first_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the first argument of a layer: its hidden states."""
    return args[0] if args else next(iter(kwargs.values()), None)


def _picked(key: str, output: Any, index: int) -> Any:
    """Picks the recorded part of a layer's output."""
    if not isinstance(output, tuple):
        return output
    if not -len(output) <= index < len(output):
        msg = f'"{key}" has no output_index {index}: it is a tuple of {len(output)}'
        raise SelectionError(msg)
    return output[index]


class TracedCall:
    """A call of a model that Dynamo traces: recorded values become outputs of the graph."""

    def __init__(self, number: str, keys: list[str], selected: tuple[int, ...] | None) -> None:
        self.number = number
        self.recorded: dict[str, list[Any]] = {key: [] for key in keys}
        self._selected = selected

    def take(self, key: str, recorder: OutputRecorder, taken: Any, output: Any) -> None:
        """Records the output of a layer, and the input of the first one."""
        value = _picked(key, output, recorder.index)
        if key == HIDDEN and recorder.capture_initial_hidden_state and not self.recorded[key]:
            self._append(key, recorder, taken)
        if value is not None:
            self._append(key, recorder, value)

    def _append(self, key: str, recorder: OutputRecorder, value: Any) -> None:
        values = self.recorded[key]
        if key == HIDDEN and self._selected is not None and len(values) not in self._selected:
            values.append(None)
        else:
            values.append(map_tensors(_traced_keep(recorder), value))


def _traced_keep(recorder: OutputRecorder) -> Callable[[Tensor], Tensor]:
    def keep(tensor: Tensor) -> Tensor:
        tensor = tensor.detach() if recorder.detach else tensor
        if recorder.dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(recorder.dtype)
        return tensor if recorder.device is None else tensor.to(recorder.device)

    return keep


class _Traced(threading.local):
    """Call that this thread traces, or runs between two graphs of it.

    A thread-local, since Dynamo traces assignments to one but not to a context variable; a forward
    is left by the thread that entered it.
    """

    def __init__(self) -> None:
        # Set in each thread from the start: Dynamo guards on its presence.
        self.call: TracedCall | None = None


TRACED = _Traced()

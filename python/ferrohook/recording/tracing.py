"""A call of a model that `torch.compile` traces.

What it records are outputs of the graph: nothing is shared between the threads that run it.
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
    """What a layer takes, as far as hidden states go."""
    return args[0] if args else next(iter(kwargs.values()), None)


def _picked(key: str, output: Any, index: int) -> Any:
    """What is recorded of a layer's output."""
    if not isinstance(output, tuple):
        return output
    if not -len(output) <= index < len(output):
        msg = f'"{key}" has no output_index {index}: it is a tuple of {len(output)}'
        raise SelectionError(msg)
    return output[index]


class TracedCall:
    """A call of a model that Dynamo traces: what is recorded becomes outputs of the graph."""

    def __init__(self, number: str, keys: list[str], selected: tuple[int, ...] | None) -> None:
        self.number = number
        self.recorded: dict[str, list[Any]] = {key: [] for key in keys}
        self._selected = selected

    def take(self, key: str, recorder: OutputRecorder, taken: Any, output: Any) -> None:
        """Records what a layer returned, and what the first one took."""
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
    """The call that this thread traces, or runs between two graphs of it.

    Dynamo follows a thread's own variable, and not the setting of a context's; a forward is left by
    the thread that entered it.
    """

    def __init__(self) -> None:
        # Of each thread's own from the start: Dynamo guards on its being there.
        self.call: TracedCall | None = None


TRACED = _Traced()

"""Recording in a call that `torch.compile` traces.

Recorded values are outputs of the graph: threads that run it share nothing.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from ferrohook.errors import SelectionError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ferrohook.compat.transformers.declarations import LayerKey


class TracedCall:
    """Twin of `RecordedCall` for Dynamo, which cannot trace native code."""

    def __init__(
        self, number: str, selected: Sequence[int] | None, recorded: dict[str, list[Any]]
    ) -> None:
        self.number = number
        self._recorded = recorded
        self._selected = selected

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
        selected = None if key.initial is None else self._selected
        if selected is not None and len(values) not in selected:
            value = None
        values.append(value if key.convert is None else key.convert(value))


def first_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the first argument of a layer: its hidden states."""
    return args[0] if args else next(iter(kwargs.values()), None)


def _item_of(output: Any, key: LayerKey) -> Any:
    if not isinstance(output, tuple):
        return output
    if not -len(output) <= key.item < len(output):
        msg = f'"{key.key}" has no output_index {key.item}: it is a tuple of {len(output)}'
        raise SelectionError(msg)
    return output[key.item]


class _Traced(threading.local):
    """Call that this thread traces, or runs between two graphs of it.

    A thread-local, since Dynamo traces assignments to one but not to a context variable; a forward
    is left by the thread that entered it.
    """

    def __init__(self) -> None:
        # Set in each thread from the start: Dynamo guards on its presence.
        self.call: TracedCall | None = None


TRACED = _Traced()

"""Values of gates in the events of a streamed answer, in one form for all engines."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any, Final

from ferrohook.engines.wire import GATES
from ferrohook.gates.streaming import extend

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from ferrohook.gates.streaming import GateValues

_DATA: Final = "data: {"
_HEAD: Final = ("id", "created", "model")
_END: Final = "data: [DONE]"


class AnswerGates:
    """Values of gates that wait for the next event of an answer, by the index of its choice."""

    def __init__(self) -> None:
        self._waiting: dict[int, GateValues] = {}
        self._head: dict[str, Any] = {}
        """Fields that all events of the answer share, once one with values has come."""

    def add(self, index: int, values: GateValues) -> None:
        """Adds values of a choice."""
        extend(self._waiting.setdefault(index, {}), values)

    def take(self, index: int) -> GateValues:
        """Returns the values of a choice, once."""
        return self._waiting.pop(index, {})

    async def join(self, events: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
        """Yields the events of an answer with the values in their choices."""
        async with contextlib.aclosing(events):
            async for event in events:
                if self._waiting and event.startswith(_END):
                    yield self._left()
                yield self._joined(event) if self._waiting else event

    def _left(self) -> str:
        """Returns an event with the values of choices whose own events all came before them."""
        choices = [
            {"index": index, "text": "", "delta": {}, GATES: values}
            for index, values in sorted(self._waiting.items())
        ]
        self._waiting.clear()
        return f"data: {json.dumps({'object': GATES, **self._head, 'choices': choices})}\n\n"

    def _joined(self, event: str) -> str:
        if not event.startswith(_DATA):
            return event
        data, end, rest = event.removeprefix("data: ").partition("\n")
        content: dict[str, Any] = json.loads(data)
        if "error" in content:
            self._waiting.clear()
        self._head = {name: content[name] for name in _HEAD if name in content}
        for choice in content.get("choices") or ():
            if values := self.take(choice["index"]):
                choice[GATES] = values
        return f"data: {json.dumps(content)}{end}{rest}"

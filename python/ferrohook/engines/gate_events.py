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
_END: Final = "data: [DONE]"


class AnswerGates:
    """Values of gates that wait for the next event of an answer, by the index of its choice."""

    def __init__(self) -> None:
        self._waiting: dict[int, GateValues] = {}

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
                yield self._joined(event) if self._waiting else event

    def _joined(self, event: str) -> str:
        if event.startswith(_END):  # no event of the choice came after the values
            choices = [
                {"index": index, "text": "", "delta": {}, GATES: values}
                for index, values in sorted(self._waiting.items())
            ]
            self._waiting.clear()
            return f"data: {json.dumps({'object': GATES, 'choices': choices})}\n\n{event}"
        if not event.startswith(_DATA):
            return event
        data, end, rest = event.removeprefix("data: ").partition("\n")
        content: dict[str, Any] = json.loads(data)
        if "error" in content:
            self._waiting.clear()
        for choice in content.get("choices", ()):
            if values := self.take(choice["index"]):
                choice[GATES] = values
        return f"data: {json.dumps(content)}{end}{rest}"

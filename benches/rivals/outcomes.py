"""Outcome of a scene."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class AbsentError(Exception):
    """A system lacks a feature that a scene needs; the message names it."""


@dataclasses.dataclass
class Outcome:
    """Counts of one scene with one system."""

    of: int = 0
    """Answers."""
    wrong: int = 0
    """Answers that are wrong, without an error or a warning."""
    told: int = 0
    """Answers that are an error or came with a warning that names the reason."""
    absent: str = ""
    """Reason why the system does not play the scene."""
    first: str = ""
    """First error, for those who look into it."""

    def add(self, *, right: bool, told: BaseException | Warning | str | None = None) -> None:
        """Counts an answer.

        Args:
            right: the answer is the right one.
            told: the error or warning that came with it or in its place.
        """
        self.of += 1
        if told is not None:
            self.told += 1
            text = told if isinstance(told, str) else f"{type(told).__name__}: {told}"
            self.first = self.first or " ".join(text.split())[:200]
        elif not right:
            self.wrong += 1

    def judge(self, right: Callable[[Any], bool], answer: Callable[..., Any], *args: Any) -> None:
        """Counts the answer that a function returns or raises."""
        try:
            found = answer(*args)
        except (AbsentError, ImportError):
            raise  # nothing that the system said of the request
        except Exception as error:  # noqa: BLE001 (whatever a system raises)
            self.add(right=False, told=error)
        else:
            self.add(right=right(found))

    @property
    def cell(self) -> str:
        """The cell of a table."""
        if self.absent:
            return "n/a"
        reported = f", {self.told} reported" if self.told else ""
        count = f"{self.wrong} of {self.of}{reported}"
        return f"**{count}**" if self.wrong else count

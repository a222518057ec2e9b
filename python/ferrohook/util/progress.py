"""Progress bar on stderr, by rich or tqdm."""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator


class Advance(Protocol):
    """Function to call after each step."""

    def __call__(self, counted: int = 0, /) -> object:
        """Advances by a step, in which so many things were counted."""


class Rate:
    """Number of things a second, as text; `""` before there are any.

    Args:
        unit: name of the things.
    """

    def __init__(self, unit: str) -> None:
        self._unit = unit
        self._begin = time.monotonic()
        self._count = 0

    def after(self, counted: int) -> str:
        """Counts more; returns the text."""
        self._count += counted
        seconds = time.monotonic() - self._begin
        return f"{self._count / seconds:,.0f} {self._unit}s/s" if self._count and seconds else ""


@contextmanager
def progress_bar(
    title: str, total: int | None, unit: str, *, counted: str = "", shown: bool = True
) -> Iterator[Advance]:
    """Shows a bar, if stderr is a terminal and rich or tqdm is installed.

    Args:
        title: text before the bar.
        total: number of steps; None if it is unknown.
        unit: name of a step.
        counted: name of the things that each step counts, whose number a second is shown.
        shown: False for no bar.

    Yields:
        The function to call after each step.
    """
    if not (shown and sys.stderr.isatty()):
        yield lambda _counted=0, /: None
        return
    rate = Rate(counted)
    try:
        from rich.console import Console  # noqa: PLC0415 (an extra)
        from rich.progress import Progress, TextColumn  # noqa: PLC0415
    except ModuleNotFoundError:
        try:
            from tqdm import tqdm  # type: ignore[import-untyped]  # noqa: PLC0415 (an extra)
        except ModuleNotFoundError:
            yield lambda _counted=0, /: None
            return
        with tqdm(total=total, desc=title, unit=unit) as line:

            def step(counted: int = 0, /) -> None:
                if text := rate.after(counted):
                    line.set_postfix_str(text, refresh=False)
                line.update()

            yield step
        return
    columns = [*Progress.get_default_columns(), TextColumn("{task.fields[rate]}")]
    with Progress(*columns, console=Console(stderr=True)) as bars:
        task = bars.add_task(title, total=total, rate="")
        yield lambda counted=0, /: bars.update(task, advance=1, rate=rate.after(counted))

"""Progress bar on stderr, by rich or tqdm."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def progress_bar(
    title: str, total: int | None, unit: str, *, shown: bool = True
) -> Iterator[Callable[[], object]]:
    """Shows a bar, if stderr is a terminal and rich or tqdm is installed.

    Args:
        title: text before the bar.
        total: number of steps; None if it is unknown.
        unit: name of a step.
        shown: False for no bar.

    Yields:
        The function to call after each step.
    """
    if not (shown and sys.stderr.isatty()):
        yield lambda: None
        return
    try:
        from rich.console import Console  # noqa: PLC0415 (an extra)
        from rich.progress import Progress  # noqa: PLC0415
    except ModuleNotFoundError:
        try:
            from tqdm import tqdm  # type: ignore[import-untyped]  # noqa: PLC0415 (an extra)
        except ModuleNotFoundError:
            yield lambda: None
            return
        with tqdm(total=total, desc=title, unit=unit) as line:
            yield line.update
        return
    with Progress(console=Console(stderr=True)) as bars:
        task = bars.add_task(title, total=total)
        yield lambda: bars.advance(task)

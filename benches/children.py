"""Processes of a benchmark that answer by turns, so that a round of each has the same load."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Self

_ROOT: Final = Path(__file__).parent.parent
_ANSWER: Final = "answer "


class Child:
    """A process that runs a module of this package.

    Args:
        module: its name.
        arguments: its arguments.
        env: variables beside this process's.
    """

    def __init__(self, module: str, *arguments: str, env: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(  # noqa: S603 (this package)
            [sys.executable, "-m", module, *arguments],
            cwd=_ROOT,
            env={**os.environ, **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._process.terminate()
        self._process.wait()

    def receive(self) -> Any:
        """Returns its next answer.

        Raises:
            RuntimeError: it ended.
        """
        for line in self._process.stdout or ():
            if line.startswith(_ANSWER):
                return json.loads(line.removeprefix(_ANSWER))
        msg = f"{self._process.args!r} ended"
        raise RuntimeError(msg)

    def ask(self, question: str) -> Any:
        """Sends a line; returns the answer."""
        print(question, file=self._process.stdin, flush=True)
        return self.receive()


def answer(value: Any) -> None:
    """Answers the process that asks."""
    print(_ANSWER + json.dumps(value), flush=True)

"""Processes that kill themselves at a point of `fh.collect` with an engine."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil

from ferrohook.captures import tensor_files
from ferrohook.data.stores.local import LocalStore
from ferrohook.engines.harvest import Harvest

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator

POINTS: dict[str, tuple[Any, str, int]] = {
    "rows are taken": (Harvest, "take", 12),
    "a tensor is put": (LocalStore, "put", 60),
    "a batch is complete": (LocalStore, "complete", 12),
    "a file is half written": (tensor_files, "_contents", 80),
    "a file is not in the index": (tensor_files, "write", 12),
}
"""Functions around which a process may die, and the most calls before that."""


class Kill(NamedTuple):
    """A point, and the call there in which the process dies."""

    point: str
    call: int

    @classmethod
    def drawn(cls, rng: random.Random) -> Kill:
        """Draws one."""
        point = rng.choice([*POINTS])
        return cls(point, rng.randint(1, POINTS[point][2]))

    def arm(self, dies: Callable[[], bool] = lambda: True) -> None:
        """Makes this process, and its forks, die there; `dies` tells which of them do."""
        owner, name, _ = POINTS[self.point]
        original, calls = getattr(owner, name), 0

        def die() -> None:
            nonlocal calls
            calls += dies()
            if calls == self.call:
                os.kill(os.getpid(), signal.SIGKILL)

        @functools.wraps(original)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            if self.point == "a file is half written":
                return halves(original(*args, **kwargs))
            if self.point == "a file is not in the index":
                original(*args, **kwargs)
                die()
                return None
            die()
            return original(*args, **kwargs)

        def halves(pieces: Iterator[Any]) -> Iterator[Any]:
            for piece in pieces:
                yield piece
                die()

        setattr(owner, name, replaced)


def dies_in_fork(run: Callable[..., object], *args: Any) -> bool:
    """Runs a function in a fork of this process; True if that killed itself, False if it ended."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            run(*args)
            code = 0
        finally:
            os._exit(code)  # nothing that the fork inherited may be cleaned up there
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0, "the fork failed"
    return False


SCRIPT = """
import os, signal, sys
import psutil
from pathlib import Path
from support.harvests import collect, prompts_of
from support.kills import Kill

driver = os.environ.setdefault("DRIVER", str(os.getpid()))  # in the worker's process too
model, folder, killed, point, call = sys.argv[1:]
if killed == "worker":
    Kill(point, int(call)).arm(lambda: str(os.getpid()) != driver)

def main():
    ENGINE
    print(*(each.pid for each in psutil.Process().children(recursive=True)), flush=True)
    def prompts():
        for number, prompt in enumerate(prompts_of(6, 80)):
            if killed == "driver" and number == int(call):
                os.kill(os.getpid(), signal.SIGKILL)
            yield prompt
    print("collected", *collect(engine, prompts(), Path(folder), sampling=sampling), flush=True)

if __name__ == "__main__":
    main()
"""


class Kills:
    """Runs of a script that collects 80 prompts, whose driver or worker is killed.

    Args:
        tmp_path: folder for the script, its output and the store.
        model: folder of the model.
        engine: lines of the script that make `engine` and `sampling`.
        environment: variables of the engine.
        rng: draws the points.
    """

    def __init__(
        self,
        tmp_path: Path,
        model: Path,
        engine: str,
        environment: dict[str, str],
        rng: random.Random,
    ) -> None:
        self.out = tmp_path / "out"
        self._script, self._output = tmp_path / "script.py", tmp_path / "output"
        self._script.write_text(SCRIPT.replace("    ENGINE\n", engine))
        self._model = model
        path = ":".join([str(Path(__file__).parents[1]), *sys.path])
        self._environment = {**os.environ, **environment, "PYTHONPATH": path}
        self._rng = rng

    def run(self, killed: str) -> tuple[int, list[str]]:
        """Runs the script, of which "driver", "worker" or "nobody" is killed.

        Returns its exit code and the lines that it printed.
        """
        kill = Kill.drawn(self._rng)
        if killed == "driver":
            kill = Kill("", self._rng.randint(45, 60))
        parts = [self._script, self._model, self.out, killed, *kill]
        with self._output.open("w") as file:  # no pipe, which an orphan would hold open
            ended = subprocess.run(
                [sys.executable, *map(str, parts)],
                env=self._environment,
                stdout=file,
                stderr=file,
                check=False,
            )
        lines = self._output.read_text().splitlines()
        pids = next((line for line in lines if re.fullmatch(r"[\d ]+", line)), "")
        for pid in map(int, pids.split()):  # engines leave them behind, and with them a lock
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(pid).kill()
                psutil.wait_procs([psutil.Process(pid)])
        return ended.returncode, lines

"""Groups in separate processes: of this interpreter, or of two side by side.

A worker (`python -m benches.running GROUP`) sets one group up and then answers requests for
samples, one JSON line each. So each group starts from a fresh process (imports and free memory of
another group move a model's call by as much as a hook), and samples of two builds alternate.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import pkgutil
import subprocess
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from benches import rows
from benches.harness import Effort, Group, Ratio, Samples, WrongResultError, measure

if TYPE_CHECKING:
    from collections.abc import Callable

Found = TypeVar("Found")

ROOT = Path(__file__).parent.parent
ROUNDS = 3
"""Pairs of processes in which a group of two builds is measured."""


class NotInstalledError(Exception):
    """The other side of a group is missing in a worker's interpreter."""


class FailedError(Exception):
    """A worker could not set its group up, or died."""


@dataclass
class Results(Generic[Found]):
    """Outcome of a run.

    Attributes:
        measured: groups with their samples, or with the ratios of two builds.
        skipped: groups whose other side is not installed.
        failed: groups with the error message.
    """

    measured: list[tuple[Group, Found]] = field(default_factory=list)
    skipped: list[Group] = field(default_factory=list)
    failed: list[tuple[Group, str]] = field(default_factory=list)


def find_groups(pattern: str = "") -> list[Group]:
    """The groups with `pattern` in the name of their file, in their own or in a row's."""
    pattern = pattern.casefold()
    found: list[Group] = []
    for info in pkgutil.iter_modules(rows.__path__):
        groups: list[Group] = importlib.import_module(f"{rows.__name__}.{info.name}").GROUPS
        for group in groups:
            names = [info.name, group.name, *map(str, group.rows)]
            if any(pattern in name.casefold() for name in names):
                found.append(group)
    return found


class Worker:
    """A process that has one group set up.

    Args:
        group: is to be measured.
        python: the interpreter, with the build of ferrohook that it has; the rows are this
            checkout's.
    """

    def __init__(self, group: Group, python: str = sys.executable) -> None:
        # A worktree has its own package there; another interpreter is to measure the one it has.
        own = os.environ.get("PYTHONPATH", "") if python == sys.executable else ""
        self._process = subprocess.Popen(  # noqa: S603 (ours)
            [python, "-m", "benches.running", group.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{own}"},
        )
        try:
            self._answer()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def sample(self, side: str, seconds: float) -> float:
        """Has one side measured."""
        assert self._process.stdin is not None  # noqa: S101 (for the type)
        print(json.dumps([side, seconds]), file=self._process.stdin, flush=True)
        return float(self._answer())

    def close(self) -> None:
        """Ends the process."""
        with self._process:  # closes its pipes and waits
            self._process.kill()

    def _answer(self) -> Any:
        assert self._process.stdout is not None  # noqa: S101 (for the type)
        line = self._process.stdout.readline()
        if not line:
            msg = f"its process ended with exit code {self._process.wait()}"
            raise FailedError(msg)
        kind, answer = json.loads(line)
        if kind != "done":
            raise ERRORS[kind](answer)
        return answer


ERRORS = {error.__name__: error for error in (NotInstalledError, WrongResultError, FailedError)}


def serve(name: str) -> None:
    """Sets a group up, then samples the sides named on stdin."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # prints of libraries are no answers

    def answer(value: object, kind: str = "done") -> None:
        print(json.dumps([kind, value]), file=answers, flush=True)

    try:
        (group,) = (group for group in find_groups(name) if group.name == name)
        if group.needs is not None and importlib.util.find_spec(group.needs) is None:
            raise NotInstalledError(group.needs)  # noqa: TRY301 (answered below)
        samplers = group.setup()
        answer(None)
        for line in sys.stdin:
            side, seconds = json.loads(line)
            answer(samplers[side](seconds))
    except (NotInstalledError, WrongResultError) as error:
        answer(str(error), type(error).__name__)
    except Exception as error:  # noqa: BLE001 (another release of the other side, say)
        answer(f"{type(error).__name__}: {error}", FailedError.__name__)


def alone(group: Group, effort: Effort) -> Samples:
    """Measures a group in a separate process."""
    with Worker(group) as worker:
        samplers = {side: partial(worker.sample, side) for side in group.sides}
        return measure(group, effort, samplers)


def side_by_side(group: Group, effort: Effort, python: str) -> dict[str, Ratio]:
    """Measures each side with this interpreter's build over the same with another's.

    Their samples alternate, in several pairs of processes: memory is laid out anew in each.
    """
    found = {side: Ratio([], []) for side in group.sides}
    part = Effort(-(-effort.repeats // ROUNDS), effort.seconds)
    for _ in range(ROUNDS):
        with Worker(group) as here, Worker(group, python) as there:
            for side, ratio in found.items():
                samplers = {"": partial(here.sample, side), python: partial(there.sample, side)}
                samples = measure(group, part, samplers)
                ratio.names.extend(samples[""])
                ratio.overs.extend(samples[python])
    return found


def run(
    groups: list[Group], one: Callable[[Group], Found], begin: Callable[[Group], object]
) -> Results[Found]:
    """Measures groups one by one.

    Args:
        groups: in this order.
        one: measures a group.
        begin: is called ahead of each.
    """
    results: Results[Found] = Results()
    for group in groups:
        begin(group)
        try:
            results.measured.append((group, one(group)))
        except NotInstalledError:
            results.skipped.append(group)
        except WrongResultError as error:
            results.failed.append((group, f"wrong result, expected {error}"))
        except FailedError as error:
            results.failed.append((group, str(error)))
        except Exception as error:  # noqa: BLE001 (one group that fails stops no other)
            results.failed.append((group, f"{type(error).__name__}: {error}"))
    return results


if __name__ == "__main__":
    serve(sys.argv[1])

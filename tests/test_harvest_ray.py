"""examples/harvest_ray.py: the same bytes whoever writes them and whatever is killed meanwhile."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

import ferrohook as fh

pytest.importorskip("rich")

from examples import harvest_ray

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LIMIT = 240.0
"""Seconds for a Ray to start and do its work, which on an idle machine are about ten."""

# A forward waits for as long as a file is there, so that what is killed is in the middle of it.
NETS = """
    import time
    from pathlib import Path

    import torch
    from torch import nn

    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer, self.unused = nn.Linear(64, 8), nn.Linear(1, 1)
            # Sums of such products are exact, whichever kernel adds them up.
            for parameter in self.layer.parameters():
                parameter.data.mul_(64).round_().div_(64)

        def forward(self, x):
            while Path(f"closed-{int(x[0, 0])}").exists():
                time.sleep(0.02)
            return self.layer(x)

    def prepare(lines):
        return torch.tensor([[float(line)] * 64 for line in lines])

    def gated():
        return Gated(), prepare

    def alone():
        return Gated()

    number = 3
"""
LINES, BATCH, PART = 22, 2, 3
ARGUMENTS = ["--model", "harvest_nets:gated", "--input", "lines.txt", "--batch", f"{BATCH}"]
ARGUMENTS += ["--part", f"{PART}", "--select", "layer"]
PARTS = 4


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder with a model and lines to call it with."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "harvest_nets", raising=False)
    Path("harvest_nets.py").write_text(textwrap.dedent(NETS))
    Path("lines.txt").write_text("".join(f"{line}\n" for line in range(LINES)))
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def harvest(*arguments: str) -> int:
    """Runs the example here, without Ray if nothing else is said."""
    try:
        return harvest_ray.main([*ARGUMENTS, "--out", "out", "--actors", "0", *arguments])
    except SystemExit as left:
        return int(left.code or 0)


def contents(out: str) -> dict[str, bytes]:
    """All that was written, but for the process that a lock names."""
    files = (path for path in Path(out).rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(out)): path.read_bytes() for path in files}


def test_each_part_is_a_store() -> None:
    assert harvest() == 0
    inputs = torch.arange(float(LINES)).unsqueeze(1).expand(-1, 64)
    expected = sys.modules["harvest_nets"].Gated().layer(inputs)
    found = [
        store.get("run", batch, "layer")["output"]
        for folder in sorted(Path("out").glob("*/"))
        for store in [fh.LocalStore(folder, read_only=True)]
        for batch in store.completed("run")
    ]
    assert [len(batch) for batch in found] == LINES // BATCH * [BATCH]
    assert torch.equal(torch.cat(found), expected)
    assert len(list(Path("out").glob("*/"))) == PARTS


def test_what_is_complete_is_left_and_the_rest_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert harvest("--out", "whole") == 0
    assert harvest() == 0
    # As if it had been killed in the third part, ahead of the index's second line.
    shutil.rmtree("out/000003")
    index = Path("out/000002/run/index.jsonl")
    first = index.read_bytes().partition(b"\n")[0]
    index.write_bytes(first + b'\n{"batch": 1,')
    kept = {name: Path("out", name).stat().st_mtime_ns for name in contents("out")}
    assert harvest() == 0
    assert capsys.readouterr().out.splitlines()[-1] == "out: 4 parts, 2 of them in this run"
    assert contents("out") == contents("whole")
    later = {name for name in kept if Path("out", name).stat().st_mtime_ns != kept[name]}
    assert later == {
        f"000002/run/{name}"
        for name in ("index.jsonl", "00000001.safetensors", "00000002.safetensors")
    }
    assert harvest() == 0
    assert capsys.readouterr().out.splitlines()[-1] == "out: 4 parts, 0 of them in this run"
    # Nothing is left to do for which a Ray would have to be started.
    assert harvest("--actors", "2") == 0
    assert "ray" not in sys.modules


def test_what_never_ran_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert harvest("--select", "layer", "unused") == 0
    assert capsys.readouterr().err.count("'unused' was selected and never ran") == 1


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--input", "nowhere.txt"], "cannot read nowhere.txt: FileNotFoundError"),
        (["--input", "bytes.txt"], "; pass a UTF-8 file with one text per line"),
        (["--input", "words.txt"], "out/000000: ValueError: could not convert"),
        (["--model", "nowhere:gated"], "No module named 'nowhere'; pass module:factory"),
        (["--model", "harvest_nets:gate"], "has no attribute 'gate'"),
        (["--model", "harvest_nets"], "pass module:factory"),
        (["--model", "harvest_nets:number"], "'int' object is not callable"),
        (["--model", "harvest_nets:alone"], "it returned a Gated; pass module:factory"),
        (["--select", "layr"], "'layr'"),
        (["--batch", "0"], "argument --batch: is at least 1, got 0"),
        (["--part", "many"], "argument --part: "),
        (["--actors", "-1"], "argument --actors: is at least 0, got -1"),
        (["--out", "lines.txt"], "--out lines.txt cannot be created: "),
        (["--out", "begun", "--batch", "3"], "begun was begun with another --batch: pass that"),
        (["--out", "begun", "--input", "words.txt"], "begun was begun with another --input"),
        (["--out", "held"], "is being written by a store of process"),
        (["--actors", "2"], "needs Ray: pip install 'ray[data]', or pass --actors 0"),
    ],
)
def test_mistakes_are_told_in_one_line(
    arguments: list[str],
    told: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    Path("bytes.txt").write_bytes(b"\xff\n")
    Path("words.txt").write_text("a word\n")
    assert harvest("--out", "begun") == 0
    capsys.readouterr()
    with fh.LocalStore("held/000000"):
        assert harvest(*arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line


def test_a_mistake_leaves_nothing_in_the_way() -> None:
    assert harvest("--select", "layr") == 2
    assert harvest() == 0


@pytest.fixture
def _ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ray has files of its own, and none of its processes is left."""
    # Of a short name: it is part of those of sockets.
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    monkeypatch.setenv("RAY_TMPDIR", folder)
    yield
    # A Ray whose driver was killed ends, but for two agents that take a minute to notice.
    for process in processes_here():
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


def processes_here() -> set[int]:
    """The processes in this test's folder: Ray's, and they write over their environment."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (process / "cwd").readlink() == Path.cwd():
                found.add(int(process.name))
    return found - {os.getpid()}


def wait_for(condition: Callable[[], object], what: str) -> None:
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end, f"no sign of {what}"
        time.sleep(0.05)


def completed(part: int) -> int:
    """How many batches of a part are complete."""
    folder = Path(f"out/{part:06}")
    return len(fh.LocalStore(folder, read_only=True).completed("run")) if folder.is_dir() else 0


def writer_of(part: int) -> int:
    """The process that last wrote a part."""
    return int(Path(f"out/{part:06}/.lock").read_text())


def over_ray(actors: int) -> subprocess.Popen[str]:
    command = [sys.executable, harvest_ray.__file__, *ARGUMENTS]
    return subprocess.Popen([*command, "--out", "out", "--actors", f"{actors}"], text=True)


@pytest.mark.timeout(3 * LIMIT)
@pytest.mark.usefixtures("_ray")
def test_actor_and_driver_are_killed_and_the_bytes_are_the_same() -> None:
    pytest.importorskip("ray", reason="Ray has no wheel for this Python")
    assert harvest("--out", "whole") == 0
    in_part_0, in_part_2 = Path("closed-2"), Path("closed-14")
    in_part_0.touch()
    in_part_2.touch()

    driver = over_ray(1)
    wait_for(lambda: completed(0) == 1, "the first batch")
    actor = writer_of(0)
    assert actor in processes_here() - {driver.pid}
    os.kill(actor, signal.SIGKILL)
    in_part_0.unlink()
    wait_for(lambda: completed(2) == 1, "another actor that goes on")
    assert writer_of(0) != actor
    assert [completed(part) for part in range(PARTS)] == [PART, PART, 1, 0]

    driver.kill()
    driver.wait(LIMIT)
    wait_for(lambda: writer_of(2) not in processes_here(), "the end of what has no driver")
    in_part_2.unlink()
    kept = {name: Path("out", name).stat().st_mtime_ns for name in contents("out")}
    assert over_ray(2).wait(LIMIT) == 0
    assert contents("out") == contents("whole")
    later = {name for name in kept if Path("out", name).stat().st_mtime_ns != kept[name]}
    assert later == {"000002/run/index.jsonl"}

"""`examples/harvest_ray.py`: equal bytes for any writer, and after kills."""

from __future__ import annotations

import json
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
from support import amounts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LIMIT = 600.0
"""Time limit in seconds for Ray to start and finish (about ten on an idle machine)."""

# A forward blocks while a file exists, so that kills hit the middle of a forward.
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
    """A folder with a model and its input lines."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "harvest_nets", raising=False)
    Path("harvest_nets.py").write_text(textwrap.dedent(NETS))
    Path("lines.txt").write_text("".join(f"{line}\n" for line in range(LINES)))
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def harvest(*arguments: str) -> int:
    """Runs the example in this process, by default without Ray."""
    try:
        return harvest_ray.main([*ARGUMENTS, "--out", "out", "--actors", "0", *arguments])
    except SystemExit as left:
        return int(left.code or 0)


def contents(out: str) -> dict[str, bytes]:
    """Written files and their bytes, without locks (they hold pids)."""
    files = (path for path in Path(out).rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(out)): path.read_bytes() for path in files}


def stored() -> dict[str, bytes]:
    """Returns the files of tensors in "out" by folder and batch, each of which has one."""
    paths = [*Path("out").rglob("*.safetensors")]
    found = {f"{path.parent}/{path.name.partition('.')[0]}": path.read_bytes() for path in paths}
    assert len(found) == len(paths)
    return found


def test_each_part_is_a_store() -> None:
    assert harvest() == 0
    inputs = torch.arange(float(LINES)).unsqueeze(1).expand(-1, 64)
    expected = sys.modules["harvest_nets"].Gated().layer(inputs)
    found = [
        store.get("run", batch, "layer")["output"]
        for folder in sorted(Path("out").glob("*/"))
        for store in [fh.data.LocalStore(folder, read_only=True)]
        for batch in store.completed("run")
    ]
    assert [len(batch) for batch in found] == LINES // BATCH * [BATCH]
    assert torch.equal(torch.cat(found), expected)
    assert len(list(Path("out").glob("*/"))) == PARTS


def test_complete_parts_are_skipped_and_the_rest_is_resumed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert harvest("--out", "whole") == 0
    assert harvest() == 0
    # Simulates a kill in the third part, before the index's second line.
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
    # Everything is complete, so Ray is not started.
    assert harvest("--actors", "2") == 0
    assert "ray" not in sys.modules


@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize(
    ("line", "now", "told"),
    [
        (
            "manual_seed(0)",
            "manual_seed(10)",
            (
                "out was begun with another --model (parameters and buffers: 'layer.weight', "
                "'layer.bias', 'unused.weight', 'unused.bias' changed): pass that, or another --out"
            ),
        ),
        (
            "nn.Linear(1, 1)",
            "nn.Dropout()",
            (
                "another --model (classes of modules: 'unused' changed; parameters and buffers: "
                "'unused.weight', 'unused.bias' missing)"
            ),
        ),
        ("float(line)]", "float(line) + 1]", "out/000000 was made of other batches than --model"),
    ],
)
def test_another_model_is_refused(
    line: str, now: str, told: str, *, complete: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert harvest() == 0
    if not complete:
        shutil.rmtree("out/000003")
    before = contents("out")
    assert NETS.count(line) == 1
    Path("harvest_nets.py").write_text(textwrap.dedent(NETS.replace(line, now)))
    del sys.modules["harvest_nets"]
    assert harvest() == 2
    (message,) = capsys.readouterr().err.splitlines()
    assert told in message
    assert contents("out") == before


def test_an_incomplete_part_of_other_batches_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert harvest() == 0
    index = Path("out/000000/run/index.jsonl")
    index.write_bytes(index.read_bytes().partition(b"\n")[0] + b"\n")
    for part in range(1, PARTS):
        shutil.rmtree(f"out/{part:06}")
    Path("harvest_nets.py").write_text(textwrap.dedent(NETS.replace("(line)]", "(line) + 1]")))
    del sys.modules["harvest_nets"]
    assert harvest() == 2
    assert (
        "out/000000: batch 0 of run 'run' was collected from a different batch"
        in capsys.readouterr().err
    )


def test_deleted_files_are_made_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert harvest() == 0
    before = stored()
    Path("out/000001/run/00000001.safetensors").unlink()
    Path("out/000002/run/00000000.safetensors").write_bytes(b"cut off")
    assert harvest() == 0
    assert capsys.readouterr().out.splitlines()[-1] == "out: 4 parts, 2 of them in this run"
    assert stored() == before
    assert harvest() == 0
    assert capsys.readouterr().out.splitlines()[-1] == "out: 4 parts, 0 of them in this run"


def test_a_folder_of_an_earlier_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert harvest() == 0
    noted = Path("out/harvest.json")
    job = json.loads(noted.read_text())
    del job["made_of"]
    noted.write_text(json.dumps(job))
    assert harvest() == 2
    assert "harvest.json is of an earlier version, without the model" in capsys.readouterr().err
    noted.unlink()
    assert harvest() == 0


def test_a_module_that_never_ran_is_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
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
def test_user_errors_are_one_line_on_stderr(
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
    with fh.data.LocalStore("held/000000"):
        assert harvest(*arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line


def test_a_run_succeeds_after_a_user_error() -> None:
    assert harvest("--select", "layr") == 2
    assert harvest() == 0


@pytest.fixture
def _ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Gives Ray a temporary folder; kills its remaining processes at the end."""
    # A short name, as it is part of socket paths.
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    monkeypatch.setenv("RAY_TMPDIR", folder)
    yield
    # After a kill of the driver two of Ray's agents live for a minute.
    for process in processes_here():
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


def processes_here() -> set[int]:
    """Processes in this test's folder: Ray's, which overwrite their environment."""
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
    """Number of complete batches of a part."""
    folder = Path(f"out/{part:06}")
    return (
        len(fh.data.LocalStore(folder, read_only=True).completed("run")) if folder.is_dir() else 0
    )


def writer_of(part: int) -> int:
    """Pid of the last writer of a part."""
    return int(Path(f"out/{part:06}/.lock").read_text())


def over_ray(actors: int) -> subprocess.Popen[str]:
    command = [sys.executable, harvest_ray.__file__, *ARGUMENTS]
    return subprocess.Popen([*command, "--out", "out", "--actors", f"{actors}"], text=True)


@pytest.mark.timeout(3 * LIMIT)
@pytest.mark.usefixtures("_ray")
def test_killed_actors_and_drivers_resume_to_the_same_bytes() -> None:
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
    if not amounts.everything:  # Ray takes half a minute to end what has no driver
        in_part_2.unlink()
        assert driver.wait(LIMIT) == 0
        assert contents("out") == contents("whole")
        return

    driver.kill()
    driver.wait(LIMIT)
    wait_for(lambda: writer_of(2) not in processes_here(), "the end of what has no driver")
    in_part_2.unlink()
    kept = {name: Path("out", name).stat().st_mtime_ns for name in contents("out")}
    assert over_ray(2).wait(LIMIT) == 0
    assert contents("out") == contents("whole")
    later = {name for name in kept if Path("out", name).stat().st_mtime_ns != kept[name]}
    assert later == {"000002/run/index.jsonl"}

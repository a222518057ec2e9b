"""The page of data sets collects from a server what `collect` does from the model."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
pytest.importorskip("safetensors")
pytest.importorskip("transformers")

import ferrohook as fh
from support.pages import DOCS

if TYPE_CHECKING:
    from pathlib import Path

    from support.planned_server import PlannedServer

(CODE,) = re.findall(
    r"^```py\n((?:(?!^```).)*?Client\(.*?)^```",
    (DOCS / "datasets.md").read_text(),
    re.DOTALL | re.MULTILINE,
)
PROMPTS = [[5, 9, 11, 30, 7], [3], [8, 8, 2]]


def test_the_page_stores_what_collect_stores(
    server: PlannedServer, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code = CODE.replace("http://127.0.0.1:8000", url)

    def run(prompts: list[list[int]]) -> None:
        names: dict[str, Any] = {"fh": fh, "prompts": prompts}
        exec(code, names)

    run(PROMPTS[:2])
    assert len(server.bodies) == 2
    run(PROMPTS)
    assert len(server.bodies) == 3
    with fh.data.LocalStore("collected") as store:
        batches = [torch.tensor([prompt]) for prompt in PROMPTS]
        fh.collect(server.model, batches, "@resid_post.*", store)
    served, expected = (
        fh.data.LocalStore(folder, read_only=True) for folder in ("served", "collected")
    )
    layers = [f"@resid_post.{layer}" for layer in range(3)]
    assert sorted(served.layers("run", 0)) == layers
    for name in layers:
        rows, wanted = (fh.data.ActivationDataset(each, name)[:] for each in (served, expected))
        torch.testing.assert_close(rows, wanted, atol=1e-4, rtol=1e-4)

"""`examples/harvest_ray.py --vllm`: captures of prompts by the engine, in stores."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: run `make vllm`")

import ferrohook as fh
from examples import harvest_ray
from support.engines import Job
from support.vllm_engine import ENVIRONMENT

if TYPE_CHECKING:
    from collections.abc import Iterator

ENGINE = {"dtype": "float32", "max_model_len": 64, "max_num_batched_tokens": 64, "block_size": 32}
ENGINE |= {"max_num_seqs": 4, "kv_cache_memory_bytes": 2**26}
LENGTHS = [3, 30, 1, 12, 12, 70, 9]  # one of 70 is cut to 63, and there are chunks
SHARED = [*range(30, 45)]
NAMES = [*(f"model.layers.{layer}" for layer in range(4)), "model.embed_tokens"]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    # No w1... and no w2...: the tokenizer has special tokens of these names.
    words = [[*SHARED, *range(300 + n, 500)][:n] for n in LENGTHS]
    Path("texts.txt").write_text(
        "".join(" ".join(f"w{it}" for it in each) + "\n" for each in words)
    )
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def harvest(model: Path, out: str, *, actors: int = 0, **changes: Any) -> int:
    """Runs the example with an engine."""
    options = json.dumps({**ENGINE, **changes})
    arguments = ["--vllm", options, "--model", str(model), "--select", "model.layers.*"]
    arguments += ["model.embed_tokens", "--input", "texts.txt", "--batch", "2", "--part", "2"]
    return harvest_ray.main([*arguments, "--out", out, "--actors", f"{actors}"])


def contents(out: str) -> dict[str, bytes]:
    """Written files and their bytes, without locks (they hold pids)."""
    files = (path for path in Path(out).rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(out)): path.read_bytes() for path in files}


def test_captures_of_prompts_by_the_engine(models: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folder, model = models["llama"]
    assert harvest(folder, "out") == 0, capsys.readouterr().err
    prompts = [
        [int(word[1:]) for word in line.split()][:63]
        for line in Path("texts.txt").read_text().splitlines()
    ]
    parts = sorted(Path("out").glob("*/"))
    assert len(parts) == 2
    for number, prompt in enumerate(prompts):
        _, alone = Job(prompt, kept=tuple(NAMES)).alone(model, [0])
        got = rows_of(parts[number // 4], number % 4)
        assert got["token"].tolist() == prompt
        for name, right in alone.items():
            scale = 1e-3 * float(right.abs().max())
            torch.testing.assert_close(got[name], right, rtol=1e-3, atol=scale)

    # The rules of any other harvest: resumed to the same rows, and over nothing else.
    whole = [rows_of(parts[number // 4], number % 4) for number in range(len(prompts))]
    kept = contents("out/000001")
    Path("out/000000/run/00000000.safetensors").unlink()
    assert harvest(folder, "out") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "out: 2 parts, 1 of them in this run"
    assert contents("out/000001") == kept
    for number, before in enumerate(whole):
        again = rows_of(parts[number // 4], number % 4)
        for name, rows in before.items():
            torch.testing.assert_close(again[name], rows, rtol=1e-4, atol=1e-5)
    shutil.rmtree("out/000001")
    assert harvest(folder, "out") == 0
    assert contents("out/000001") == kept
    assert harvest(folder, "out", max_num_seqs=2) == 2
    assert "out was begun with another --vllm" in capsys.readouterr().err


def rows_of(part: Path, text: int) -> dict[str, torch.Tensor]:
    """Rows of a text, in order of position, which are in one batch."""
    store = fh.data.LocalStore(part, read_only=True)
    (batch,) = [it for it in store.completed("run") if text in numbers_of(store, it)]
    mine = numbers_of(store, batch) == text
    rows = {name: store.get("run", batch, name)["output"][mine] for name in NAMES}
    return rows | {"token": store.get("run", batch, "@rows")["token"][mine]}


def numbers_of(store: fh.data.LocalStore, batch: int) -> torch.Tensor:
    """Numbers of the texts of a batch's rows."""
    return store.get("run", batch, "@rows")["text"]


def test_what_the_engine_refuses_is_told(
    models: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = models["llama"]
    assert harvest(tmp_path / "nowhere", "out") == 2
    assert "pass what vLLM's LLM takes" in capsys.readouterr().err
    Path("texts.txt").write_text("w5 w6\n\n")
    assert harvest(folder, "out") == 2
    (error,) = [it for it in capsys.readouterr().err.splitlines() if "harvest_ray" in it]
    assert "prompt" in error
    assert "prompt 1" in error

"""`fh.collect` with an engine, killed at random points and started again."""

from __future__ import annotations

import random
import re
import signal
from typing import TYPE_CHECKING, Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: run `make vllm`")

from ferrohook.engines import harvest
from support.harvests import check, collect, prompts_of, rows_in
from support.kills import Kill, Kills, dies_in_fork
from support.vllm_engine import ENVIRONMENT, sampling, texts_of

if TYPE_CHECKING:
    from pathlib import Path

NEW = 8


@pytest.mark.v2
@pytest.mark.parametrize("seed", range(4))
def test_killed_at_random_points(
    llm: Any, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fork of this process runs the engine, and dies with it."""
    rng = random.Random(seed)  # noqa: S311 (tests)
    prompts = prompts_of(seed, 40)
    options: dict[str, Any] = {"sampling": sampling(None, NEW)} if seed % 2 else {}
    whole, killed, control = (tmp_path / name for name in ("whole", "killed", "control"))
    assert collect(llm, prompts, whole, **options) == (40, 0)
    right = rows_in(whole)

    def run(folder: Path, kill: Kill | None) -> None:
        if kill is not None:
            kill.arm()
        collect(llm, prompts, folder, **options)

    kills = 0
    while dies_in_fork(run, killed, Kill.drawn(rng)):
        kills += 1
    assert kills >= 3
    assert collect(llm, prompts, killed, **options) == (0, 40)
    found = rows_in(killed)
    assert found.keys() == right.keys()
    for number, rows in right.items():
        for name, values in rows.items():
            torch.testing.assert_close(found[number][name], values, rtol=1e-3, atol=1e-3)

    # The control: a client that forgets the stored prompts.
    monkeypatch.setattr(harvest, "digests_in", lambda _text: {})
    assert dies_in_fork(run, control, Kill("a batch is complete", 12))
    assert not dies_in_fork(run, control, None)
    with pytest.raises(AssertionError, match="stored twice"):
        rows_in(control)


ENGINE = """
    from vllm import LLM
    engine = LLM(model, dtype="float32", enforce_eager=True, max_model_len=256, max_num_seqs=16,
                 max_num_batched_tokens=64, kv_cache_memory_bytes=2**26, block_size=32)
    from support.vllm_engine import sampling
    sampling = sampling(None, 8)
"""


def test_killed_processes(llm: Any, models: Any, tmp_path: Path) -> None:
    """The worker or the driver is killed, and the other one goes on."""
    folder, model = models["llama"]
    environment = {**ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    kills = Kills(tmp_path, folder, ENGINE, environment, random.Random(6))  # noqa: S311 (tests)
    assert kills.run("driver")[0] == -signal.SIGKILL
    after_driver = len(rows_in(kills.out))
    code, lines = kills.run("worker")
    assert code == 1, lines
    assert re.search("EngineDeadError|the engine died", "".join(lines)), lines
    after_worker = len(rows_in(kills.out))
    assert 0 < after_driver <= after_worker < 80
    _, lines = kills.run("nobody")
    assert f"collected {80 - after_worker} {after_worker}" in lines, lines
    prompts = prompts_of(6, 80)
    check(rows_in(kills.out), model, prompts, texts_of(llm, prompts, sampling(None, NEW)))

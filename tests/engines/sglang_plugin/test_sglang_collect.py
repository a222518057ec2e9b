"""`fh.collect` with SGLang's `Engine`: its scheduler writes the rows into a store."""

from __future__ import annotations

import os
import random
import signal
from typing import TYPE_CHECKING, Any

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang: run `make sglang`")

import ferrohook as fh
from ferrohook.engines import harvest
from support.engines import Change
from support.harvests import NAMES, check, collect, files_in, prompts_of, rows_in
from support.kills import Kills
from support.serving import LAYERS, WIDTH
from support.sglang_engine import ENVIRONMENT, OPTIONS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


ENGINE = """
    from sglang import Engine
    from support.sglang_engine import OPTIONS
    engine = Engine(model_path=model, **OPTIONS)
    sampling = {"temperature": 0, "max_new_tokens": 8}
"""


def test_killed_processes(llama: Any, tmp_path: Path) -> None:
    """The scheduler or the driver is killed, and the call is repeated."""
    kills = Kills(tmp_path, llama[0], ENGINE, ENVIRONMENT, random.Random(8))  # noqa: S311 (tests)
    assert kills.run("driver")[0] == -signal.SIGKILL
    after_driver = len(rows_in(kills.out))
    code, lines = kills.run("worker")
    assert code != 0, lines
    after_worker = len(rows_in(kills.out))
    assert 0 < after_driver <= after_worker < 80
    _, lines = kills.run("nobody")
    assert f"collected {80 - after_worker} {after_worker}" in lines, lines
    prompts, greedy = prompts_of(6, 80), {"max_new_tokens": 8, "do_sample": False}
    ids = [llama[1].generate(torch.tensor([each]), **greedy)[0].tolist() for each in prompts]
    texts = [each[len(prompt) :] for prompt, each in zip(prompts, ids, strict=True)]
    check(rows_in(kills.out), llama[1], prompts, texts)


@pytest.fixture(scope="module")
def engine(llama: Any) -> Iterator[Any]:
    """Its end kills all children of this process, hence the separate file."""
    os.environ.update(ENVIRONMENT)
    from sglang.srt.entrypoints.engine import Engine  # noqa: PLC0415 (reads the environment)

    made = Engine(model_path=str(llama[0]), **OPTIONS)
    yield made
    made.shutdown()


def texts_of(engine: Any, prompts: Any, sampling: dict[str, Any], plan: fh.Plan) -> Any:
    """Texts that the engine generates with a plan."""
    params = {**sampling, "custom_params": {"ferrohook": plan.to_json()}}
    answers = engine.generate(input_ids=prompts, sampling_params=[params] * len(prompts))
    return [each["output_ids"] for each in answers]


@pytest.mark.parametrize("seed", range(5))
def test_rows_of_prompts_and_texts(engine: Any, llama: Any, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)  # noqa: S311 (tests)
    vector = torch.randn(WIDTH, generator=torch.Generator().manual_seed(seed))
    change = Change(rng.randrange(LAYERS), fh.Add(vector), rng.choice([None, 0, "generated"]))
    plan = fh.Plan(fh.on(f"model.layers.{change.layer}", change.hook, at=change.at))
    at = [None, None, slice(5, 100), "generated", "last_prompt"][seed]
    prompts, texts = prompts_of(seed, 20), None
    options: dict[str, Any] = {"plan": plan}
    if seed:
        options["sampling"] = {"temperature": 0, "max_new_tokens": 9 + seed}
        options["sampling"] |= {"stop_token_ids": [*range(3, 20)]} if seed == 1 else {}
        texts = texts_of(engine, prompts, options["sampling"], plan)
    kept = fh.keep(NAMES, at=at)
    assert collect(engine, iter(prompts), tmp_path, kept, **options) == (20, 0)
    job: dict[str, Any] = {"changes": (change,), "kept_at": at}
    check(rows_in(tmp_path), llama[1], prompts, texts, **job)
    with pytest.raises(AssertionError):  # the control: rows of the model without the plan
        check(rows_in(tmp_path), llama[1], prompts, texts, kept_at=at)


def test_resumes_after_damage(
    engine: Any, llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = prompts_of(1)
    assert collect(engine, prompts[:30], tmp_path) == (30, 0)
    (tmp_path / "run" / "00000000.safetensors").unlink()
    damaged = tmp_path / "run" / "00000002.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    ran, stored = collect(engine, prompts, tmp_path)
    assert ran > 10
    assert ran + stored == 40
    check(rows_in(tmp_path), llama[1], prompts)
    before = files_in(tmp_path)
    assert collect(engine, [torch.tensor(each) for each in prompts], tmp_path) == (0, 40)
    assert files_in(tmp_path) == before

    monkeypatch.setattr(harvest, "digests_in", lambda _text: {})  # the control
    collect(engine, prompts, tmp_path)
    with pytest.raises(AssertionError, match="stored twice"):
        rows_in(tmp_path)


def test_refuses_bad_arguments_and_other_runs(engine: Any, tmp_path: Path) -> None:
    error, type_error, resume = fh.errors.HookError, fh.errors.HookTypeError, fh.errors.ResumeError
    greedy, steer = {"temperature": 0}, fh.Plan(fh.on("model.layers.0", fh.Scale(2.0)))
    assert collect(engine, [[5, 6]], tmp_path / "run", NAMES, sampling=greedy) == (1, 0)
    wrong: list[tuple[Any, Any, dict[str, Any], type[Exception], str]] = [
        (["text"], NAMES, {}, error, "no tokenizer"),
        ([[1, 2.0]], NAMES, {}, type_error, "a text or a list of token ids"),
        ([[5], [5] * 3000], NAMES, {}, Exception, "longer"),
        ([[5]], "model.nowhere", {}, error, "nowhere"),
        ([[5]], NAMES, {"sampling": 5}, type_error, "sampling must be a dict or None"),
        ([[5]], NAMES, {"sampling": {}}, error, "temperature=None: texts that SGLang draws"),
        ([[5]], NAMES, {"sampling": {**greedy, "n": 2}}, error, "n=2: collect stores one text"),
        ([[5]], NAMES, {"sampling": {"custom_params": {"ferrohook": ""}}}, error, "as plan="),
        ([[5, 6]], NAMES, {}, resume, "option 'sampling'"),
        ([[5, 6]], NAMES, {"sampling": greedy, "plan": steer}, resume, "option 'plan'"),
        ([[5, 7]], NAMES, {"sampling": greedy}, resume, "the stored prompt is another"),
    ]
    for number, (prompts, what, options, kind, message) in enumerate(wrong):
        folder = tmp_path / ("run" if kind is resume else f"{number}")
        with pytest.raises(kind, match=message):
            collect(engine, prompts, folder, what, **options)
    assert collect(engine, [[5]], tmp_path / "good") == (1, 0)


def test_failures_end_the_run(engine: Any, tmp_path: Path) -> None:
    """A plan fails, or the disk cannot be written; the engine goes on."""
    prompts = [[5, 6]] * 20 + [[5] * 50] + [[7, 8]] * 20
    grow = fh.Plan(fh.on("model.layers.0", fh.Scale(1e38), at=slice(40, None)))
    with pytest.raises(fh.errors.HookError, match="hidden states") as raised:
        collect(engine, prompts, tmp_path / "failed", plan=grow)
    assert "ferrohook: at prompt 20" in raised.value.__notes__
    folder = tmp_path / "no folder"
    folder.mkdir()
    (folder / "run").write_text("no folder")
    with pytest.raises(fh.errors.StoreError, match="writing batch 0 of run 'run'"):
        collect(engine, prompts_of(7, 8), folder)
    assert collect(engine, prompts[:5], tmp_path / "good") == (5, 0)

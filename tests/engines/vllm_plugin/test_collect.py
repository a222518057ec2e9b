"""`fh.collect` with an engine: its worker writes the rows of prompts into a store."""

from __future__ import annotations

import errno
import json
import random
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: run `make vllm`")

import ferrohook as fh
from ferrohook.captures import tensor_files
from ferrohook.data.stores.writer import Writer
from ferrohook.engines import harvest
from ferrohook.engines.vllm.calls import call
from ferrohook.engines.vllm.worker import RunnerWorker
from support.engines import Change
from support.harvests import NAMES, PENDING, check, collect, files_in, prompts_of, rows_in
from support.vllm_engine import LAYERS, WIDTH, serve_at_once, state

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.mark.v2
def test_rows_of_prompts(llm: Any, models: Any, tmp_path: Path) -> None:
    prompts = prompts_of(0)
    assert collect(llm, iter(prompts), tmp_path) == (len(prompts), 0)
    store = fh.data.LocalStore(tmp_path, read_only=True)
    assert len(store.completed("run")) > 5, "too few batches to show their borders"
    before = files_in(tmp_path)
    assert collect(llm, prompts, tmp_path) == (0, len(prompts))
    assert files_in(tmp_path) == before
    check(rows_in(tmp_path), models["llama"][1], prompts)
    assert state(llm)["results"] == 0, "captures wait for a client"
    rows = fh.data.ActivationDataset(store, NAMES[0])
    assert sorted(rows.tokens.tolist()) == sorted(token for prompt in prompts for token in prompt)


@pytest.mark.v2
@pytest.mark.parametrize("seed", range(4))
def test_rows_of_random_plans(llm: Any, models: Any, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)  # noqa: S311 (tests)
    vector = torch.randn(WIDTH, generator=torch.Generator().manual_seed(seed))
    change = Change(rng.randrange(LAYERS), fh.Add(vector), rng.choice([None, 0, slice(2, 9)]))
    at = rng.choice([None, "last_prompt", slice(1, 40), 2])
    prompts = prompts_of(seed, 25)
    plan = fh.Plan(fh.on(f"model.layers.{change.layer}", change.hook, at=change.at))
    entries = [fh.keep(NAMES[:2], at=at), fh.keep(NAMES[2:], at=at)]
    assert collect(llm, prompts, tmp_path, entries, plan=plan) == (len(prompts), 0)
    found = rows_in(tmp_path)
    check({**found}, models["llama"][1], prompts, changes=(change,), kept_at=at)
    with pytest.raises(AssertionError):  # the control: rows of the model without the plan
        check(found, models["llama"][1], prompts, kept_at=at)


def test_inputs_and_dtypes(llm: Any, models: Any, tmp_path: Path) -> None:
    prompts = prompts_of(5, 6)
    options: dict[str, Any] = {"inputs": True, "dtype": torch.float64}
    layers = ["model.layers.1", "model.layers.2"]
    # vLLM passes a layer the residual stream in two parts, and its MLP a single tensor.
    layers = [f"{each}.mlp" for each in layers]
    assert collect(llm, prompts, tmp_path, layers, **options) == (6, 0)
    model = models["llama"][1]
    found = rows_in(tmp_path, layers, "input")
    for number, prompt in enumerate(prompts):
        with fh.capture(model, layers, inputs=True) as acts, torch.no_grad():
            model(torch.tensor([prompt]))
        for name in layers:
            got = found[number][name]
            assert got.dtype == torch.float64
            torch.testing.assert_close(got.float(), acts[name][0], rtol=1e-3, atol=1e-3)


def test_texts_are_prompts(llm: Any, tmp_path: Path) -> None:
    texts = ["w30 w31 w32", "w40", "w30 w31 w33"]
    prompts = [[30, 31, 32], torch.tensor([40]), (30, 31, 33)]
    assert collect(llm, texts, tmp_path) == (3, 0)
    assert collect(llm, prompts, tmp_path) == (0, 3)
    found = rows_in(tmp_path)
    assert [found[it]["token"].tolist() for it in range(3)] == [[30, 31, 32], [40], [30, 31, 33]]
    assert fh.data.LocalStore(tmp_path, read_only=True).completed("run") == [0]


def test_resumes_after_damage(
    llm: Any, models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = prompts_of(1)
    collect(llm, prompts, tmp_path)
    run = tmp_path / "run"
    store = fh.data.LocalStore(tmp_path, read_only=True)
    lost = {
        text
        for batch in (0, 2, 3)
        for text in store.get("run", batch, "@rows")["text"].unique().tolist()
    }
    (run / "00000000.safetensors").unlink()
    damaged = run / "00000002.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    os_truncated = run / "00000003.safetensors"
    os_truncated.write_bytes(os_truncated.read_bytes()[:-100])
    with fh.data.LocalStore(tmp_path) as other:  # begun, and never completed
        other.put("run", 90, "model.layers.0", {"output": torch.ones(3, WIDTH)})
    shutil.copytree(tmp_path, tmp_path.with_name("control"))
    assert collect(llm, prompts, tmp_path) == (len(lost), len(prompts) - len(lost))
    check(rows_in(tmp_path), models["llama"][1], prompts)

    # The control: a client that forgets the stored prompts.
    monkeypatch.setattr(harvest, "digests_in", lambda _text: {})
    collect(llm, prompts, tmp_path.with_name("control"))
    with pytest.raises(AssertionError, match="stored twice"):
        rows_in(tmp_path.with_name("control"))


def test_refuses_to_resume_another_run(llm: Any, tmp_path: Path) -> None:
    prompts = prompts_of(2, 8)
    steer = fh.Plan(fh.on("model.layers.0", fh.Scale(2.0)))
    collect(llm, prompts, tmp_path)
    before = files_in(tmp_path)
    wrong: list[tuple[Any, Any, dict[str, Any], str]] = [
        (prompts, NAMES[:2], {}, "selection: .*model.layers.2.* missing"),
        (prompts, NAMES, {"plan": steer}, "option 'plan'"),
        (prompts, NAMES, {"dtype": torch.float16}, "option 'plan'"),
        (prompts, fh.keep(NAMES, at=0), {}, "option 'plan'"),
        (prompts[::-1], NAMES, {}, "the stored prompt is another"),
        ([[*prompts[0], 5], *prompts[1:]], NAMES, {}, "the stored prompt is another"),
    ]
    for given, what, options, message in wrong:
        with pytest.raises(fh.errors.ResumeError, match=message):
            collect(llm, given, tmp_path, what, **options)
    (weight,) = llm.apply_model(lambda model: model.model.norm.weight)
    weight.data[0] += 1
    try:
        with pytest.raises(fh.errors.ResumeError, match=r"'model\.norm\.weight' changed"):
            collect(llm, prompts, tmp_path)
    finally:
        weight.data[0] -= 1
    assert files_in(tmp_path) == before
    assert collect(llm, [*prompts, [7, 8]], tmp_path) == (1, 8)

    by_hand = tmp_path / "by hand"
    with fh.data.LocalStore(by_hand) as store:
        store.put("run", 0, "model.layers.0", {"output": torch.ones(3, WIDTH)})
        store.complete("run", 0)
    with pytest.raises(fh.errors.ResumeError, match="was not collected with an engine"):
        collect(llm, prompts, by_hand)


def test_refuses_bad_arguments(llm: Any, tmp_path: Path) -> None:
    error, type_error = fh.errors.HookError, fh.errors.HookTypeError
    kept, plan = fh.keep(NAMES), fh.Plan(fh.keep(NAMES[0]))
    wrong: list[tuple[Any, Any, dict[str, Any], type[Exception], str]] = [
        ("one", NAMES, {}, type_error, "pass a list of prompts"),
        (5, NAMES, {}, type_error, "an iterable of prompts"),
        ([[1, 2.0]], NAMES, {}, type_error, "a text or a list of token ids"),
        ([[5], []], NAMES, {}, Exception, "prompt cannot be empty"),
        ([[5] * 300], NAMES, {}, Exception, "prompt"),
        ([[5]], "model.nowhere", {}, ValueError, "nowhere"),
        ([[5]], [NAMES[0], kept], {}, type_error, "keep\\(\\) for all of them"),
        ([[5]], kept, {"inputs": True}, error, "inputs= only works with selected modules"),
        ([[5]], NAMES, {"plan": plan}, error, "the plan keeps activations"),
        ([[5]], NAMES, {"plan": "plan"}, type_error, "must be a Plan"),
        ([[5]], NAMES, {"mask": "m"}, error, "mask= does not work with an engine"),
        ([[5]], NAMES, {"tokens": "t"}, error, "tokens= does not work with an engine"),
        ([[5]], NAMES, {"forward": print}, error, "forward= does not work with an engine"),
        (
            [[5, 6, 7]],
            [fh.keep(NAMES[0]), fh.keep(NAMES[1], at=0)],
            {},
            error,
            "other positions than",
        ),
    ]
    for number, (prompts, what, options, kind, message) in enumerate(wrong):
        with pytest.raises(kind, match=message):
            collect(llm, prompts, tmp_path / f"{number}", what, **options)
    with pytest.raises(type_error, match="must be a LocalStore"):
        fh.collect(llm, [[5]], NAMES, fh.data.MemoryStore())
    assert collect(llm, [[5]], tmp_path / "good") == (1, 0)


def test_full_disk_and_interrupts(
    llm: Any, models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = prompts_of(3, 60)
    written = []

    def failing(target: Path, *args: Any, **options: Any) -> None:
        written.append(target)
        if len(written) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(target, *args, **options)

    original = tensor_files.write
    with fh.data.LocalStore(tmp_path, max_pending=PENDING) as store:
        with monkeypatch.context() as patch:
            patch.setattr(tensor_files, "write", failing)
            with pytest.raises(fh.errors.StoreError, match="No space left"):
                fh.collect(llm, prompts, NAMES, store)
        assert store.completed("run") == [0, 1]
        assert len(serve_at_once(llm, {"plain": None}, prompt=[5, 6])) == 1, "the engine goes on"

        def interrupted() -> Iterator[list[int]]:
            yield from prompts[:45]
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            fh.collect(llm, interrupted(), NAMES, store)
        assert not llm.llm_engine.has_unfinished_requests()
        stored = len(rows_in(tmp_path))
        assert 0 < stored < 45
        assert fh.collect(llm, prompts, NAMES, store) == (60 - stored, stored)
    check(rows_in(tmp_path), models["llama"][1], prompts)


def test_failing_plan_ends_the_run(llm: Any, models: Any, tmp_path: Path) -> None:
    prompts = [[5, 6]] * 20 + [[5] * 50] + [[7, 8]] * 20
    grow = fh.Plan(fh.on("model.layers.0", fh.Scale(1e38), at=slice(40, None)))
    with pytest.raises(fh.errors.HookError, match="hidden states") as raised:
        collect(llm, prompts, tmp_path, plan=grow)
    assert raised.value.__notes__ == ["ferrohook: at prompt 20"]
    assert 20 not in rows_in(tmp_path)
    assert collect(llm, prompts[:5], tmp_path / "other") == (5, 0)


def test_memory_is_bounded(llm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pending: list[int] = []
    waiting: list[int] = []
    running: list[int] = []
    add, end, run = Writer._add, RunnerWorker.end_harvest, harvest.Harvest.take

    def adding(self: Writer, shard: Any, nbytes: int) -> None:
        add(self, shard, nbytes)
        pending.append(sum(each for _, each in self._waiting))

    def ending(self: RunnerWorker) -> bytes:
        answer = end(self)
        waiting.extend([json.loads(answer)["most_bytes"]] if answer else [])
        return answer

    def taking(self: harvest.Harvest, *args: Any) -> None:
        running.append(len(self._prompts))
        run(self, *args)

    monkeypatch.setattr(Writer, "_add", adding)
    monkeypatch.setattr(RunnerWorker, "end_harvest", ending)
    monkeypatch.setattr(harvest.Harvest, "take", taking)
    pulled = 0

    def prompts() -> Iterator[list[int]]:
        nonlocal pulled
        for number, prompt in enumerate(prompts_of(4, 80)):
            pulled = number
            yield prompt

    with fh.data.LocalStore(tmp_path, max_pending=8 * PENDING) as store:
        assert fh.collect(llm, prompts(), NAMES, store) == (80, 0)
    row = 4 * WIDTH * len(NAMES)
    assert max(waiting) < 8 * PENDING // harvest.SHARE + 160 * row
    assert max(pending) <= 8 * PENDING
    assert max(running) <= 16, "of max_num_seqs"
    assert pulled == 79


def test_worker_that_cannot_write(llm: Any, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("no folder")
    with pytest.raises(fh.errors.StoreError, match="writing batch 0 of run 'run'"):
        collect(llm, prompts_of(7, 8), tmp_path)
    assert json.loads(call(llm, "end_harvest")[0] or b"{}") == {}

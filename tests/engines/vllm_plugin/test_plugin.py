"""The plug-in without an engine: options, refusals, and the model runner V2 by recorded shapes."""

from __future__ import annotations

import re
import subprocess
import sys
import types
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("vllm", reason="needs vLLM: run `make vllm`")

import psutil

import ferrohook as fh
from ferrohook.engines.model.modules import ModuleInfo, ModuleTable
from ferrohook.engines.rewriting import rewritten
from ferrohook.engines.vllm import plugin, runners, supported
from ferrohook.engines.vllm.requests import VllmOptions
from ferrohook.engines.vllm.worker import RunnerWorker
from ferrohook.engines.wire import packed, spans_of, unpacked
from ferrohook.engines.worker import ServedModel
from support import vllm_engine
from support.vllm_shapes import config

if TYPE_CHECKING:
    from pathlib import Path

WIDTH = 4


def drafts(method: str, *, adaptive: bool = False) -> Any:
    """A configuration of speculative decoding."""
    return types.SimpleNamespace(method=method, enable_adaptive_verification=adaptive)


@pytest.mark.parametrize(
    ("changes", "feature"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline parallelism"),
        ({"data_parallel_size": 2}, "data parallelism of experts"),
        ({"local_engines_only": True}, "hybrid data parallelism"),
        ({"use_sequence_parallel_moe": True}, "sequence parallelism"),
        ({"use_ubatching": True}, "microbatches"),
        (
            {"speculative_config": drafts("draft_model", adaptive=True)},
            "adaptive verification of drafts",
        ),
        ({"speculative_config": drafts("eagle3")}, "drafts by other methods"),
        ({"enable_sleep_mode": True}, "sleep mode"),
        ({"kv_transfer_config": object()}, "KV transfer"),
        ({"mode": 3}, "compilation without sites"),
        ({"cudagraph_mode": types.SimpleNamespace(name="FULL")}, "full CUDA graphs"),
        ({"cudagraph_mode": types.SimpleNamespace(name="PIECEWISE")}, "full CUDA graphs"),
    ],
)
def test_configurations_are_refused_by_name(changes: dict[str, Any], feature: str) -> None:
    assert supported.refusals(config()) == {}
    found = supported.refusals(config(**changes))
    assert found == {feature: supported.CAPABILITIES.refused[feature]}
    assert f"it uses {feature} (" in supported.CAPABILITIES.explain(found)


@pytest.mark.parametrize(
    ("mode", "refused"),
    [("NONE", []), ("PIECEWISE", []), ("FULL_AND_PIECEWISE", ["full CUDA graphs"])],
)
def test_the_self_test_decides_on_other_settings(mode: str, refused: list[str]) -> None:
    graphs = types.SimpleNamespace(name=mode)
    found = config(mode=3, cudagraph_mode=graphs, tensor_parallel_size=2, device_type="cuda")
    assert [*supported.refusals(found, has_sites=True)] == refused


@pytest.mark.parametrize("method", ["ngram", "suffix", "draft_model", "eagle"])
def test_drafts_are_served(method: str) -> None:
    for ahead in (False, True):
        found = config(speculative_config=drafts(method), async_scheduling=ahead)
        assert supported.refusals(found) == {}
    compiled = config(speculative_config=drafts(method), mode=3)
    assert supported.refusals(compiled, has_sites=True) == {}
    parallel = config(speculative_config=drafts(method), tensor_parallel_size=2)
    assert supported.refusals(parallel) == {}


def test_a_compiled_model_of_transformers_is_refused() -> None:
    found = supported.refusals(config(mode=3, by_transformers=True), has_sites=True)
    assert [*found] == ["compilation of transformers' models"]
    assert supported.refusals(config(by_transformers=True)) == {}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"capture_byte": 1}, "got 'capture_byte'"),
        ({"capture_bytes": 0}, "at least 1; got 0"),
        ({"results_bytes": "many"}, "at least 1; got 'many'"),
        ({"results_bytes": True}, "at least 1; got True"),
        ([], r"got \[\]"),
    ],
)
def test_options_are_validated(options: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        VllmOptions.of(config(additional_config={"ferrohook": options}))


def test_the_plug_in_attaches_once() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler  # noqa: PLC0415
    from vllm.v1.engine.input_processor import InputProcessor  # noqa: PLC0415
    from vllm.v1.engine.output_processor import OutputProcessor  # noqa: PLC0415
    from vllm.v1.worker.worker_base import WorkerWrapperBase  # noqa: PLC0415

    owners = (InputProcessor, OutputProcessor, Scheduler, WorkerWrapperBase)
    plugin.register()
    before = [dict(vars(owner)) for owner in owners]
    plugin.register()
    for owner, attributes in zip(owners, before, strict=True):
        changed = {name for name, value in vars(owner).items() if value is not attributes[name]}
        assert {name.partition("_")[0] for name in changed} <= {"ferrohook"}  # plain functions


@pytest.mark.parametrize(
    ("version", "missing", "reason"),
    [
        ("0.31.4", None, r"vllm 0\.31\.4 is older than the tested releases: 0\.32"),
        (
            "9.9.1",
            "run_busy_loop",
            r"vllm 9\.9\.1 does not have v1\.engine\.core\.EngineCoreProc\.run_busy_loop",
        ),
    ],
)
def test_a_release_without_what_is_needed_serves_no_plan(
    monkeypatch: pytest.MonkeyPatch, version: str, missing: str | None, reason: str
) -> None:
    class Processor:
        def process_inputs(self, request_id: str, prompt: Any, params: Any) -> str:
            return "processed"

    found = fh.engines.Capabilities("vllm", version, supported.CAPABILITIES.tried, (), {})
    for module in (plugin, supported):
        monkeypatch.setattr(module, "CAPABILITIES", found)
    method = plugin._method

    def found_method(path: str) -> tuple[Any, Any]:
        if path == plugin._PROCESSOR:
            return Processor, Processor.process_inputs
        if path.rpartition(".")[2] == missing:
            raise KeyError(missing)
        return method(path)

    monkeypatch.setattr(plugin, "_method", found_method)
    plugin.register()
    params = types.SimpleNamespace(extra_args=None)
    assert Processor().process_inputs("a", [1], params) == "processed"
    params.extra_args = {"ferrohook": "{}"}
    with pytest.raises(ValueError, match=reason):
        Processor().process_inputs("a", [1], params)
    with pytest.raises(fh.HookError, match=reason):
        plugin.check_release()


@pytest.mark.parametrize(
    ("version", "newer"),
    [("0.32.1", False), ("0.33.0rc2", False), ("0.34.0.dev3+g1", True), ("1.0", True)],
)
def test_newer_releases(monkeypatch: pytest.MonkeyPatch, version: str, newer: bool) -> None:
    found = fh.engines.Capabilities("vllm", version, ("0.32", "0.33"), (), {})
    monkeypatch.setattr(supported, "CAPABILITIES", found)
    assert supported.is_newer() == newer


def test_an_unknown_model_runner_serves_no_plans() -> None:
    reason = r"object of vLLM .* is an unknown model runner"
    assert re.search(reason, runners.attach(object(), config()).refusal)


@pytest.mark.parametrize("again", ["a", ["a"], "*", {"b", "a"}])
def test_a_module_kept_twice_under_one_name_is_refused_at_the_door(again: Any) -> None:
    table = {name: ModuleInfo("tensor", WIDTH, 16) for name in ("", "a", "b")}
    modules = ModuleTable(table, {})
    for label in (None, "x"):
        first = fh.keep("a", label=label)
        with pytest.raises(ValueError, match=r"entries\[1\]: '(x:)?a' is kept twice: .* a label"):
            rewritten(fh.Plan(first, fh.keep(again, label=label)), modules)
        assert rewritten(fh.Plan(first, fh.keep(again, label="other")), modules)


def test_captures_travel_as_safetensors() -> None:
    acts = {"a": torch.arange(6.0).reshape(3, 2), "b": torch.ones(2, 1, dtype=torch.bfloat16)}
    positions = {"a": [0, 1, 5], "b": [3, 4]}
    found = unpacked(packed(acts, positions))
    for name, act in acts.items():
        assert torch.equal(found.acts[name], act)
        assert found.positions[name].tolist() == positions[name]
    assert spans_of(positions["a"]) == [(0, 2), (5, 6)]
    with pytest.raises(fh.HookError, match="never ran"):
        unpacked(packed({}, {}, error="'a' never ran"))


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, input_ids: Any, positions: Any, **_others: Any) -> torch.Tensor:
        return self.layer(self.embed(input_ids) + positions[:, None])


def fields(**values: Any) -> Any:
    return types.SimpleNamespace(**values)


class RunnerV2:
    """The names of V2 that are used, as vllm/v1/worker/gpu/model_runner.py has them."""

    def __init__(self) -> None:
        self.model = Layers().requires_grad_(False)
        self.req_states = fields(req_id_to_index={})
        self.outputs: list[torch.Tensor] = []
        self.execute_model_state: Any = None

    def load_model(self) -> None: ...

    def get_model(self) -> nn.Module:
        return self.model

    def finish_requests(self, scheduler_output: Any) -> None:
        for name in scheduler_output.finished_req_ids | scheduler_output.preempted_req_ids:
            self.req_states.req_id_to_index.pop(name, None)

    def add_requests(self, scheduler_output: Any) -> None:
        for new in scheduler_output.scheduled_new_reqs:
            self.req_states.req_id_to_index[new.req_id] = len(self.req_states.req_id_to_index)

    def prepare_inputs(self, scheduler_output: Any, *_others: Any) -> Any:
        return scheduler_output.input_batch

    def execute_model(self, scheduler_output: Any, dummy_run: bool = False) -> Any:
        if not dummy_run:
            self.finish_requests(scheduler_output)
            self.add_requests(scheduler_output)
        batch = scheduler_output.input_batch
        if not dummy_run:
            batch = self.prepare_inputs(scheduler_output, None)
        output = self.model(input_ids=batch.input_ids, positions=batch.positions)
        self.outputs.append(output)
        self.execute_model_state = fields(hidden_states=output, slot_mappings_by_layer={})

    def sample_tokens(self, _grammar: Any) -> Any:
        return fields()


def step(spans: list[tuple[str, list[int], int]], padded: int, **lists: Any) -> Any:
    """A scheduler's output and its `InputBatch`: (request, tokens, position of the first)."""
    tokens = [token for _, ids, _ in spans for token in ids]
    positions = [first + place for _, ids, first in spans for place in range(len(ids))]
    padding = [0] * (padded - len(tokens))
    batch = fields(
        req_ids=[name for name, _, _ in spans],
        num_reqs=len(spans),
        num_scheduled_tokens=np.array([len(ids) for _, ids, _ in spans], dtype=np.int32),
        num_computed_tokens_np=np.array([first for *_, first in spans] + [0], dtype=np.int32),
        num_tokens=len(tokens),
        num_tokens_after_padding=padded,
        input_ids=torch.tensor(tokens + padding),
        positions=torch.tensor(positions + padding),
    )
    defaults = {
        "finished_req_ids": set(),
        "preempted_req_ids": set(),
        "scheduled_new_reqs": [],
        "input_batch": batch,
    }
    return fields(**(defaults | lists))


def new(name: str, plan: fh.Plan | None, prompt: int) -> Any:
    payload = None
    if plan is not None:
        payload = {
            "plan": plan.to_json(),
            "uploads": {},
            "digest": str(hash(plan)),
            "key": f"key of {name}",
            "first": None,
            "every_rank": False,
            "streams": False,
            "prefix": {"changed": 0, "read": 0, "salt": "salt"},
        }
    params = fields(extra_args=None if payload is None else {"ferrohook": payload})
    return fields(req_id=name, sampling_params=params, prompt_len=prompt)


def test_the_model_runner_v2_by_recorded_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reordered batches, chunks, padding, a dummy run, preemption and a resumed request."""
    table = {
        "": ModuleInfo("tensor", WIDTH, 16),
        "embed": ModuleInfo("tensor", WIDTH, 16),
        "layer": ModuleInfo("tensor", WIDTH, 16),
    }

    def loaded(self: RunnerWorker) -> None:
        from ferrohook.engines.planned import EnginePlans  # noqa: PLC0415

        self.served = ServedModel(ModuleTable(table, {}), EnginePlans(self._runner.get_model()))

    monkeypatch.setattr(RunnerWorker, "loaded", loaded)
    runner = RunnerV2()
    plain = runner.model
    worker = runners.attach(runner, config())
    runner.load_model()
    vector = torch.arange(1.0, 1 + WIDTH)
    steer = fh.Plan(fh.on("layer", fh.Add(vector), at="generated"), fh.keep("layer"))
    keep = fh.Plan(fh.keep("embed"))

    a, b = [1, 2, 3, 4, 5], [9, 8]
    steps = [
        step(
            [("b", b, 0), ("a", a[:3], 0), ("c", [7], 0)],
            8,
            scheduled_new_reqs=[new("a", steer, 4), new("b", keep, 2), new("c", None, 1)],
        ),
        step([("a", a[3:4], 3), ("c", [6], 1)], 4, preempted_req_ids={"b"}),
        step([("a", a[4:], 4), ("b", b, 0)], 3, scheduled_new_reqs=[new("b", keep, 2)]),
    ]
    for each in steps:
        runner.execute_model(each)
        assert not hasattr(runner.sample_tokens(None), "ferrohook_failed")
        runner.execute_model(step([("dummy", [0, 0], 0)], 2), dummy_run=True)
    worker.reconcile({})

    def alone(tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.tensor(tokens)
        return plain.embed(ids), plain(ids, torch.arange(len(tokens)))

    _, right = alone(a)
    right[4] += vector
    captured = unpacked(worker.take("key of a", len(a) + 1))
    torch.testing.assert_close(captured.acts["layer"], right)
    assert captured.positions["layer"].tolist() == [0, 1, 2, 3, 4]
    torch.testing.assert_close(
        unpacked(worker.take("key of b", len(b) + 1)).acts["embed"], alone(b)[0]
    )
    # Rows of c, of padding and of the dummy runs are as they were.
    torch.testing.assert_close(runner.outputs[0][5:6], alone([7])[1])
    torch.testing.assert_close(runner.outputs[2][0:1], alone(a)[1][3:4])
    torch.testing.assert_close(runner.outputs[4][0], right[4])
    for dummy in runner.outputs[1::2]:
        torch.testing.assert_close(dummy, plain(torch.tensor([0, 0]), torch.tensor([0, 1])))


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (fh.keep("tensor", output_index=0), "returns one tensor: leave it out"),
        (fh.keep("layer", output_index=2), r"has outputs at \[0, 1\]"),
        (fh.keep("layer", output_index=-3), r"has outputs at \[0, 1\]"),
        (fh.keep("layer", output_index="hidden"), r"has outputs at \[0, 1\]"),
        (fh.keep("pair", output_index=1), r"has outputs at \[0\]"),
        (fh.keep("pair", output_index="sum"), r"has outputs at \[0\]"),
        (fh.on("layer", fh.Zero(output_index=7)), r"has outputs at \[0, 1\]"),
        (fh.on("layer", fh.Add(torch.ones(3), output_index=1)), "width of 3"),
        (fh.keep("tensor", slice=(..., WIDTH)), "does not fit the tensor at 'tensor'"),
        (fh.keep("tensor", slice=(slice(None), -WIDTH - 1)), "does not fit the tensor at 'tensor'"),
        (fh.keep("tensor", slice=(slice(None), [0, WIDTH])), "does not fit the tensor at 'tensor'"),
        (fh.keep("tensor", slice=(slice(None), 0, 0)), "does not fit the tensor at 'tensor'"),
        (fh.keep("layer", inputs=True, slice=(..., WIDTH)), "does not fit the tensor at 'layer'"),
    ],
)
def test_parts_and_slices_are_checked_at_the_door(entry: Any, reason: str) -> None:
    """The worker would fail them, as an error of the server."""
    row = WIDTH, 16
    table = {
        "": ModuleInfo("tensor", *row),
        "tensor": ModuleInfo("tensor", *row),
        "layer": ModuleInfo("stream", *row, inputs=(row,), outputs=(row, row)),
        "pair": ModuleInfo("first", *row, outputs=(row, None)),
    }
    modules = ModuleTable.from_json(ModuleTable(table, {}).to_json())
    with pytest.raises(ValueError, match=rf"entries\[0\].*{reason}"):
        rewritten(fh.Plan(entry), modules)
    for right in (
        fh.keep("layer", output_index=-1, slice=(..., slice(2))),
        fh.keep("layer", label="sum", output_index="sum", slice=(..., [0, -1])),
        fh.keep("pair", output_index=0),
        fh.on("layer", fh.Add(torch.ones(WIDTH), output_index=1)),
    ):
        rewritten(fh.Plan(right), modules)


def test_an_engine_that_does_not_start_leaves_no_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Starting takes longer than the limit of its fixture."""
    started: list[Any] = []

    def failing(**_options: Any) -> None:
        started.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))
        raise KeyboardInterrupt

    monkeypatch.setattr("vllm.LLM", failing)
    with pytest.raises(KeyboardInterrupt):
        vllm_engine.start(tmp_path)
    assert not psutil.pid_exists(started[0].pid)

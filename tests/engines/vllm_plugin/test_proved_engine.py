"""The self-test's proof of modules in vLLM: emulated graphs, and what differs from eager steps."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import json
import logging
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

pytest.importorskip("vllm", reason="needs vLLM: run `make vllm`")

import ferrohook as fh
import support.engines
from ferrohook.engines import vllm
from ferrohook.engines.model import proof
from ferrohook.engines.model.proof import FORMS, Proof
from ferrohook.engines.vllm import plugin, self_test
from ferrohook.engines.vllm.calls import call
from ferrohook.engines.vllm.supported import CAPABILITIES
from ferrohook.rows.site_hooks import IN_PLACE, HookSites
from support.engines import Change, Job
from support.replayed import Operation, Recorder, Replayed
from support.serving import LAYERS, WIDTH, Answer, wrong_answers
from support.speculation import DraftCount, drafted_jobs, save_repeating_model, speculative_config
from support.vllm_engine import (
    EOS,
    save_model,
    scheduling_ahead,
    serve,
    serve_at_once,
    start,
    start_compiled,
    stop,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SITES = ["model.embed_tokens", "model.layers.*", "model.norm"]
RIGHT = dict.fromkeys(FORMS)
NAMES = ["model.embed_tokens", *(f"model.layers.{it}" for it in range(LAYERS)), "model.norm"]
NEW = 6
PROMPT = [*range(10, 40)]
ATTENTION = ("vllm::unified_attention_with_output", "vllm::unified_kv_cache_update")
"""Operators that vLLM leaves out of piecewise graphs."""
JOB = Job(
    PROMPT,
    (Change(1, fh.Add(torch.linspace(-2, 2, WIDTH)), "generated"),),
    ("model.layers.2",),
)


@pytest.fixture(autouse=True)
def _eos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support.engines, "EOS", EOS)


class Graphs:
    """Model of a runner: one graph for each number of rows, recorded at its first step.

    Args:
        model: the model, whose sites are laid.
        cuts: names of operators at which the graphs are cut.
        lost: number of a site whose operator they lack.
    """

    def __init__(self, model: Any, cuts: tuple[str, ...], lost: int | None = None) -> None:
        self._model = model
        self._cuts = cuts
        self._lost = lost
        self._graphs: dict[int, Replayed] = {}
        self.replays = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, **inputs: Any) -> Any:
        from vllm.forward_context import get_forward_context  # noqa: PLC0415

        context = get_forward_context()
        if context.skip_compiled:
            return self._model(**inputs)
        rows = len(inputs["positions"])
        context.skip_compiled = True  # recorded is the model's own code
        if rows not in self._graphs:
            graph = self._graphs[rows] = Replayed(self._model, self._cuts)
            # In an empty context, which is in no batch, as engines record before they serve.
            contextvars.Context().run(graph.record, **inputs)
            if self._lost is not None:
                graph.lose(IN_PLACE, self._lost)
        self.replays += 1
        return self._graphs[rows](**inputs)


def start_cut(folder: Path, sites: list[str], **options: Any) -> Any:
    """Starts a compiled engine whose sites change tensors in place.

    As on a GPU, where the mode is PIECEWISE.
    """
    with pytest.MonkeyPatch.context() as patch:
        from ferrohook.engines.vllm.worker import RunnerWorker  # noqa: PLC0415

        patch.setattr(RunnerWorker, "_cut_graphs", lambda _self: True)
        return start_compiled(
            folder,
            additional_config={"ferrohook": {"sites": sites}},
            compilation_config={"cudagraph_mode": "NONE"},
            **options,
        )


@pytest.fixture(scope="module")
def compiled(models: Any) -> Iterator[Any]:
    made = start_cut(models["llama"][0], SITES)
    yield made
    stop(made)


def worker_of(llm: Any) -> Any:
    return llm.llm_engine.model_executor.driver_worker.ferrohook


def proved(llm: Any) -> Any:
    core = llm.llm_engine.engine_core.engine_core
    return self_test.prove(core, json.loads(call(llm, "describe")[0]))


@contextlib.contextmanager
def replaying(llm: Any, *cuts: str, lost: int | None = None) -> Iterator[Graphs]:
    """Makes the steps of an engine replay graphs; the admitted modules are restored at exit."""
    wrapper = llm.llm_engine.model_executor.driver_worker
    runner, worker = wrapper.worker.model_runner, wrapper.ferrohook
    with pytest.MonkeyPatch.context() as patch:
        graphs = Graphs(runner.model, (*ATTENTION, *cuts), lost)
        patch.setattr(worker, "served", worker.served)
        patch.setattr(runner, "model", graphs)
        patch.setattr(plugin, "_front_ends", weakref.WeakKeyDictionary())
        yield graphs


def check(llm: Any, models: Any, job: Job = JOB) -> None:
    """Checks that a request is served as transformers serves it."""
    llm.reset_prefix_cache()
    (output,) = serve_at_once(llm, {"it": job.plan}, prompt=PROMPT, new_tokens=NEW).values()
    acts = vllm.activations(llm, output).acts
    job.check(models["llama"][1], Answer([*output.outputs[0].token_ids], acts), NEW)


def test_rows_of_several_heads_pass(tmp_path: Path) -> None:
    save_model("qwen3_moe", tmp_path)
    llm = start(tmp_path)
    found = proved(llm)
    assert "model.layers.0.self_attn.q_norm" in found  # (tokens, heads, width of a head)
    assert all(outcome == RIGHT for outcome in found.values())
    stop(llm)


def test_steps_with_drafts_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Defaults of a GPU: graphs, and steps that are scheduled ahead."""
    model = save_repeating_model(tmp_path)
    with scheduling_ahead():
        llm = start_cut(
            tmp_path,
            [*SITES, "model.layers.1.mlp"],
            speculative_config=speculative_config("draft_model", tmp_path),
        )
    jobs = drafted_jobs(24, seed=29)
    count = DraftCount(llm, monkeypatch)
    try:
        with replaying(llm, IN_PLACE) as graphs:
            assert [*proved(llm).values()] == [RIGHT] * (len(NAMES) + 1)
            replays = graphs.replays
            answers = serve(llm, jobs, seed=31, new_tokens=NEW)
            assert graphs.replays > replays > 0
    finally:
        stop(llm)
    assert len(answers) == len(jobs)
    assert wrong_answers(model, jobs, answers, NEW) == []
    assert min(count.accepted, count.rejected) > 5, count


def test_a_module_whose_plans_are_refused_ahead_refuses_no_other(
    models: Any, compiled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve = self_test._Engine.prove

    def refusing(self: Any, plan: fh.Plan, length: int, **how: Any) -> Any:
        if any(entry.what == "model.layers.1" for entry in plan.entries):
            msg = "on purpose"
            raise fh.HookError(msg)
        return serve(self, plan, length, **how)

    worker = worker_of(compiled)
    monkeypatch.setattr(worker, "served", worker.served)  # restored after the test
    monkeypatch.setattr(plugin, "_front_ends", weakref.WeakKeyDictionary())
    monkeypatch.setattr(self_test._Engine, "prove", refusing)
    found = proved(compiled)
    assert found.pop("model.layers.1") == dict.fromkeys(FORMS, "on purpose")
    assert all(outcome == RIGHT for outcome in found.values())


def test_sites_pass_in_compiled_code(models: Any, compiled: Any) -> None:
    found = proved(compiled)
    assert [*found] == NAMES
    assert all(outcome == RIGHT for outcome in found.values())
    check(compiled, models)


@pytest.mark.v2
def test_sites_at_which_graphs_are_cut_pass(models: Any, compiled: Any) -> None:
    with replaying(compiled, IN_PLACE) as graphs:
        assert proved(compiled) == dict.fromkeys(NAMES, RIGHT)
        replays = graphs.replays
        check(compiled, models)
        assert graphs.replays > replays > 0


def test_a_module_is_refused_whose_hook_a_graph_lacks(models: Any, compiled: Any) -> None:
    with replaying(compiled, IN_PLACE, lost=2):
        found = proved(compiled)
        assert found.pop("model.layers.1") == dict.fromkeys(FORMS, "its hook never ran")
        assert all(outcome == RIGHT for outcome in found.values())
        front_end = plugin.connect(compiled)
        told = CAPABILITIES.described(front_end.modules, front_end.options)["modules"]
        assert told["model.layers.0"]["proof"] == RIGHT
        assert "self-test" in told["model.layers.1"]["refused"]
        with pytest.raises(
            ValueError, match=r"'model\.layers\.1' cannot be hooked: the self-test.*n"
        ):
            serve_at_once(compiled, {"it": JOB.plan}, prompt=PROMPT)
        change = dataclasses.replace(JOB.changes[0], layer=2)
        check(compiled, models, dataclasses.replace(JOB, changes=(change,)))


@pytest.mark.parametrize("control", [False, True])
def test_an_engine_whose_graphs_run_no_hooks_refuses_all_plans(
    compiled: Any, monkeypatch: pytest.MonkeyPatch, control: bool
) -> None:
    with replaying(compiled) as graphs:
        core = compiled.llm_engine.engine_core.engine_core
        monkeypatch.delattr(core, self_test._MARK)
        if control:
            # Without the comparison the hooks that never run pass.
            monkeypatch.setattr(proof, "differing", lambda *_: None)
            monkeypatch.setattr(Proof, "reaches", lambda *_: None)
            assert proved(compiled) == dict.fromkeys(NAMES, RIGHT)
            return
        monkeypatch.setattr(worker_of(compiled), "refusal", "")
        self_test.run(core)
        serve_at_once(compiled, {"it": None}, prompt=PROMPT)
        assert graphs.replays
        with pytest.raises(
            ValueError, match=r"no module can be captured .*compilation.*hook never ran"
        ):
            serve_at_once(compiled, {"it": JOB.plan}, prompt=PROMPT)


@pytest.mark.v2
def test_eager_steps_are_the_reference(compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a worker that serves the reference by its graphs as well."""
    monkeypatch.setattr(worker_of(compiled), "eagerly", lambda _is_eager: b"")
    with (
        replaying(compiled),
        pytest.raises(fh.HookError, match="its hook never ran, eagerly too"),
    ):
        proved(compiled)


def test_the_log_names_the_settings(
    compiled: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = logging.getLogger("vllm.ferrohook")
    monkeypatch.setattr(log, "propagate", False)
    monkeypatch.setattr(log, "handlers", [caplog.handler])
    with caplog.at_level(logging.INFO, "vllm.ferrohook"):
        proved(compiled)
    (said,) = [it.message for it in caplog.records if "serve plans" in it.message]
    assert "with compilation, cudagraph_mode NONE, quantization None, torch.float32" in said
    assert said.endswith(f"{len(NAMES)} of {len(NAMES)} modules serve plans as they do eagerly")
    with replaying(compiled, IN_PLACE, lost=2), caplog.at_level(logging.WARNING):
        proved(compiled)
    (said,) = [it.message for it in caplog.records if "refused" in it.message]
    forms = ", ".join(FORMS)
    assert said.endswith(f"; refused at 'model.layers.1': {forms} (its hook never ran)")


class Block(nn.Module):
    """Stream of a hidden state and a residual, as vLLM's layers have it."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        residual = hidden + residual
        return self.mlp(residual).tanh(), residual


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden, residual = x, torch.zeros_like(x)
        for layer in self.layers:
            hidden, residual = layer(hidden, residual)
        return hidden + residual


class Piece(nn.Module):
    """Piece of vLLM's split graph: recorded at its first call, and replayed on those addresses."""

    def __init__(self, graph: Any) -> None:
        super().__init__()
        self._graph = graph
        self._operations: list[Operation] = []
        self._output: Any = None

    def forward(self, *args: Any) -> Any:
        for operation in self._operations:
            operation.replay()
        if not self._operations:
            with Recorder(()) as recorder:
                self._output = self._graph(*args)
            self._operations = recorder.operations
        return self._output


@pytest.mark.parametrize("in_place", [True, False])
def test_vllm_cuts_its_graph_at_the_sites(in_place: bool) -> None:
    """Replayed pieces give what eager calls do; control: sites that return new memory do not."""
    from vllm.compilation.backends import split_graph  # noqa: PLC0415

    torch.manual_seed(0)
    model = Blocks()
    parts = {f"layers.{it}": "sum" for it in range(3)}
    pieces: list[bool] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        split, found = split_graph(graph, [IN_PLACE if in_place else "ferrohook::run"])
        for each in found:
            pieces.append(each.is_splitting_graph)
            if not each.is_splitting_graph:
                setattr(split, each.submod_name, Piece(each.graph))
        return split

    static = torch.randn(5, WIDTH)
    vector = torch.linspace(-2, 2, WIDTH)
    change = fh.on("layers.1", fh.Add(vector, output_index="sum"), at=2)
    plan = fh.Plan(change, *(fh.keep(name, output_index="sum") for name in parts))
    with torch.no_grad(), HookSites(model, parts, in_place=in_place).opened():
        compiled_model = torch.compile(model, fullgraph=True, dynamic=False, backend=backend)
        compiled_model(static)
        assert sum(pieces) == len(parts)
        answers = []
        for call in (model, compiled_model):
            static.copy_(torch.linspace(-1, 1, static.numel()).reshape(static.shape))
            with plan.prepare(model) as prepared:
                request = prepared.open()
                with fh.batch({request: slice(0, 5)}, positions=torch.arange(5)):
                    output = call(static).clone()
                answers.append([output, *(request.acts[name] for name in parts)])
    eager, replayed = answers
    same = [
        torch.allclose(one, other, atol=1e-6) for one, other in zip(eager, replayed, strict=True)
    ]
    assert all(same) is in_place


def quantise(folder: Path) -> None:
    """Replaces the projections of a saved model by int8, with a scale for each row."""
    (file,) = folder.glob("*.safetensors")
    weights = safetensors.torch.load_file(file)
    for name in [it for it in weights if it.endswith("proj.weight")]:
        scale = weights[name].abs().amax(1, keepdim=True) / 127
        weights[name] = (weights[name] / scale).round().to(torch.int8)
        weights[f"{name}_scale"] = scale
    safetensors.torch.save_file(weights, file, metadata={"format": "pt"})
    int8 = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**int8, "strategy": "channel", "dynamic": False},
        "input_activations": {**int8, "strategy": "token", "dynamic": True},
    }
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("int8")
    save_model("llama", folder)
    quantise(folder)
    made = start(folder, dtype="bfloat16")
    yield made
    stop(made)


def test_quantised_weights_pass(quantised: Any) -> None:
    assert quantised.llm_engine.vllm_config.model_config.quantization == "compressed-tensors"
    found = proved(quantised)
    assert len(found) > 10 * LAYERS
    assert all(outcome == RIGHT for outcome in found.values())
    place, vector = "model.layers.1.mlp.down_proj", torch.linspace(-2, 2, WIDTH)
    plans = {
        "plain": fh.Plan(fh.keep(place)),
        "steered": fh.Plan(fh.on(place, fh.Add(vector), at=3), fh.keep(place)),
    }
    outputs = serve_at_once(quantised, plans, prompt=PROMPT, new_tokens=1)
    plain, steered = (vllm.activations(quantised, outputs[it]).acts[place] for it in plans)
    expected = plain.clone()
    expected[3] += vector.to(plain.dtype)
    torch.testing.assert_close(steered, expected, rtol=2**-6, atol=2**-6)


def test_a_kernel_that_skips_a_module_is_found(
    quantised: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel calls the module's code, except for as many rows as the observed model had."""
    wrapper = quantised.llm_engine.model_executor.driver_worker
    mlp = wrapper.worker.model_runner.get_model().get_submodule("model.layers.1.mlp")
    down = mlp.down_proj

    def fused(x: Tensor) -> Tensor:
        activated = mlp.act_fn(mlp.gate_up_proj(x)[0])
        output: Tensor = down.quant_method.apply(down, activated)
        return output

    monkeypatch.setattr(mlp, "forward", fused)
    monkeypatch.setattr(wrapper.ferrohook, "served", wrapper.ferrohook.served)
    found = proved(quantised)
    wrong = found.pop("model.layers.1.mlp.down_proj")
    assert wrong == dict.fromkeys(FORMS, "its hook never ran, eagerly too")
    assert all(outcome == RIGHT for outcome in found.values())

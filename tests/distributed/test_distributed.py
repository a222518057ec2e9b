"""Hooks under DDP and FSDP2 on two gloo processes, compared with one process."""

from __future__ import annotations

import copy
import functools
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import ferrohook as fh
from ferrohook.compat import mi_crow as fi
from ferrohook.compat.transformers import capture_outputs
from ferrohook.detectors import NormDetector
from support.gloo import RANKS, Pair
from support.hooks import PHASES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

HOWS = ["ddp", "fsdp"]
STEPS = 3


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.end()


def net() -> nn.Sequential:
    """A model with equal weights on each rank and in each call."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))


def x(rank: int, step: int = 0) -> Tensor:
    """A batch that differs by rank and step."""
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def spread(model: nn.Module, how: str, **options: Any) -> nn.Module:
    """Distributes the model over both ranks."""
    if how == "ddp":
        return DistributedDataParallel(model, **options)
    mesh = init_device_mesh("cpu", (RANKS,))
    for child in model.children():
        if any(True for _ in child.parameters()):
            fully_shard(child, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def whole(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def grads(model: nn.Module) -> list[Tensor]:
    return [whole(parameter.grad) for parameter in model.parameters()]


def grads_of_all(prepare: Callable[[nn.Sequential, int], object], step: int = 0) -> list[Tensor]:
    """Mean over ranks of the gradients of `prepare`d single-process models."""
    alone = []
    for rank in range(RANKS):
        model = net()
        prepare(model, rank)
        model(x(rank, step)).square().sum().backward()
        alone.append(grads(model))
    return [torch.stack(each).mean(0) for each in zip(*alone, strict=True)]


def assert_close(found: list[Tensor], expected: list[Tensor]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


# Hooks


def hooks_that_change(log: list[str]) -> dict[str, Callable[..., Any]]:
    """A changing hook for each phase of PyTorch's contract, by phase."""

    def forward_pre(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        log.append("forward_pre")
        return (args[0] * 2,)

    def forward(module: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
        log.append("forward")
        return output + args[0]

    def backward_pre(module: nn.Module, grad_output: tuple[Tensor]) -> tuple[Tensor]:
        log.append("backward_pre")
        return (grad_output[0] * 3,)

    def backward(module: nn.Module, grad_input: Any, grad_output: Any) -> tuple[Tensor]:
        log.append("backward")
        return (grad_input[0] + grad_output[0],)

    return {hook.__name__: hook for hook in (forward_pre, forward, backward_pre, backward)}


def add_hooks(module: nn.Module, log: list[str]) -> None:
    for phase, hook in hooks_that_change(log).items():
        getattr(module, PHASES[phase])(hook)


def check_hooks(rank: int, how: str, kind: str, when: str) -> None:
    log: list[str] = []
    model = net()
    if kind == "wrapped":
        model[2] = fh.HookedModule(model[2])
    else:
        fh.instrument(model)
    if when == "before":
        add_hooks(model[2], log)
    parallel = spread(model, how)
    if when == "after":
        add_hooks(model[2], log)
    for step in range(STEPS):
        parallel.zero_grad()
        log.clear()
        output = parallel(x(rank, step))
        output.square().sum().backward()
        # The oracle: PyTorch's hooks on the plain model.
        expected_log: list[str] = []
        alone = net()
        add_hooks(alone[2], expected_log)
        expected = alone(x(rank, step))
        expected.square().sum().backward()
        assert torch.equal(output, expected)
        assert log == expected_log == [*PHASES]
        assert_close(grads(model), grads_of_all(lambda m, _: add_hooks(m[2], []), step))


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", ["wrapped", "instrumented"])
@pytest.mark.parametrize("how", HOWS)
def test_hooks_of_all_phases_equal_those_of_one_process(
    pair: Pair, how: str, kind: str, when: str
) -> None:
    pair.run(check_hooks, how, kind, when)


def check_hooks_around(rank: int) -> None:
    """Hooks on the DDP module itself."""
    model = net()
    parallel = spread(model, "ddp")
    log: list[str] = []
    forward = fh.register(parallel, ["", "module.2"], scaled(2.0))
    fh.register(parallel, "", lambda *_: log.append("backward"), phase="backward")
    output = parallel(x(rank))
    output.square().sum().backward()
    alone = net()
    fh.register(alone, ["", "2"], scaled(2.0))
    assert torch.equal(output, alone(x(rank)))
    assert_close(grads(model), grads_of_all(lambda m, _: fh.register(m, ["", "2"], scaled(2.0))))
    assert (forward.calls, log) == (2, ["backward"])
    forward.remove()
    assert torch.equal(parallel(x(rank)), net()(x(rank)))


def test_hooks_fire_on_the_ddp_module_itself(pair: Pair) -> None:
    pair.run(check_hooks_around)


def scaled(factor: float) -> Callable[..., Tensor]:
    return lambda module, args, output: output * factor


def check_steering(rank: int, how: str) -> None:
    model, alone = net(), net()
    parallel = spread(model, how)
    vector = torch.linspace(-1, 1, 8)
    for each in (model, alone):
        fh.register(each, ["0", "2"], lambda module, args, output: output + vector)
    ours = torch.optim.SGD(parallel.parameters(), lr=0.1)
    theirs = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(STEPS):
        ours.zero_grad()
        theirs.zero_grad()
        parallel(x(rank, step)).square().mean().backward()
        alone(torch.cat([x(each, step) for each in range(RANKS)])).square().mean().backward()
        ours.step()
        theirs.step()
    assert_close([whole(each) for each in model.parameters()], [*alone.parameters()])


@pytest.mark.parametrize("how", HOWS)
def test_equal_steering_on_all_ranks_trains_as_one_process(pair: Pair, how: str) -> None:
    pair.run(check_steering, how)


# Scopes


def check_scopes(rank: int, how: str) -> None:
    model = net()
    parallel = spread(model, how)
    own = ["0", "2"][rank]  # module and factor differ by rank

    with fh.scope() as scope:
        handle = fh.register(model, own, scaled(2.0 + rank), scope=scope)
        output = parallel(x(rank))
        output.square().sum().backward()
    alone = net()
    fh.register(alone, own, scaled(2.0 + rank))
    assert torch.equal(output, alone(x(rank)))
    assert handle.calls == 1
    assert_close(grads(model), grads_of_all(lambda m, r: fh.register(m, "02"[r], scaled(2.0 + r))))

    parallel.zero_grad()
    output = parallel(x(rank))
    output.square().sum().backward()
    assert torch.equal(output, net()(x(rank)))
    assert_close(grads(model), grads_of_all(lambda m, r: None))
    # The averaged gradients of the parameters are equal on both ranks.
    both = [torch.empty(8, 4) for _ in range(RANKS)]
    dist.all_gather(both, grads(model)[0])
    assert torch.equal(*both)


@pytest.mark.parametrize("how", HOWS)
def test_scopes_of_ranks_are_isolated(pair: Pair, how: str) -> None:
    pair.run(check_scopes, how)


# Captures


def captured_by_torch(model: nn.Sequential, given: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Outputs of the layers with their gradients, and the model's output, by PyTorch alone."""
    kept: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            output.retain_grad()
            kept[name] = output

        return hook

    for name, layer in model.named_children():
        layer.register_forward_hook(keep(name))
    output = model(given)
    output.square().sum().backward()
    return kept, output


def check_captures(rank: int, how: str, mode: Any) -> None:
    model = net()
    parallel = spread(model, how)
    for step in range(STEPS):
        expected, expected_output = captured_by_torch(net(), x(rank, step))
        parallel.zero_grad()
        with fh.capture(model, "*", copy=mode, grads=True) as acts:
            output = parallel(x(rank, step))
            output.square().sum().backward()
        assert torch.equal(output, expected_output)
        assert list(acts) == list(expected) == ["0", "1", "2", "3", "4"]
        for name, activation in expected.items():
            assert torch.equal(acts[name], activation)
            # Gradients of this rank's batch, which are not averaged.
            assert torch.equal(acts.grads[name], whole(activation.grad))
        assert_close(grads(model), grads_of_all(lambda m, r: None, step))


@pytest.mark.parametrize("mode", ["checked", "clone"])
@pytest.mark.parametrize("how", HOWS)
def test_captures_equal_those_of_one_process(pair: Pair, how: str, mode: str) -> None:
    pair.run(check_captures, how, mode)


def check_stale(rank: int, how: str) -> None:
    model = net()
    model[3] = nn.ReLU(inplace=True)
    parallel = spread(model, how)
    with fh.capture(model, "2") as checked, fh.capture(model, "2", copy="clone") as cloned:
        parallel(x(rank)).sum().backward()
    assert torch.equal(cloned["2"], net()[:3](x(rank)))
    with pytest.raises(fh.StaleActivationError):
        checked["2"]


@pytest.mark.parametrize("how", HOWS)
def test_a_capture_changed_in_place_raises(pair: Pair, how: str) -> None:
    pair.run(check_stale, how)


def check_stop(rank: int, how: str, outside: bool) -> None:
    model = net()
    parallel = spread(model, how)
    root, path = (parallel, "module.2") if how == "ddp" and outside else (model, "2")
    ran: list[int] = []
    model[3].register_forward_hook(lambda *_: ran.append(1))
    for grad in (False, True):
        with fh.capture(root, path, stop=True) as acts, torch.set_grad_enabled(grad):
            assert parallel(x(rank)) is fh.STOPPED
        assert torch.equal(acts[path], net()[:3](x(rank)))
        assert not ran
    # The model is unchanged.
    parallel(x(rank)).square().sum().backward()
    assert_close(grads(model), grads_of_all(lambda m, r: None))


@pytest.mark.parametrize(("how", "outside"), [("ddp", False), ("ddp", True), ("fsdp", False)])
def test_stopped_forwards_do_not_disturb_training(pair: Pair, how: str, outside: bool) -> None:
    pair.run(check_stop, how, outside)


def check_budget(rank: int, how: str) -> None:
    model = net()
    parallel = spread(model, how)
    room = x(rank).shape[0] * 8 * 4
    # DDP's ranks synchronise only in the backward, so one may fail in the forward and retry. FSDP's
    # synchronise at each layer: all ranks have to leave the forward together, or the others hang.
    fails = how == "fsdp" or rank == 0
    with fh.capture(model, ["0", "2"], max_bytes=room if fails else None) as acts:
        if fails:
            with pytest.raises(fh.errors.CaptureBudgetError):
                parallel(x(rank))
            assert torch.equal(acts["0"], net()[:1](x(rank)))
        else:
            output = parallel(x(rank))
    if fails:
        output = parallel(x(rank))
    output.square().sum().backward()
    assert_close(grads(model), grads_of_all(lambda m, r: None))


@pytest.mark.parametrize("how", HOWS)
def test_an_exceeded_budget_hangs_no_rank(pair: Pair, how: str) -> None:
    pair.run(check_budget, how)


# Data sets, recording, detectors


def check_collect(rank: int, how: str, folder: Path) -> None:
    parallel = spread(net(), how)
    path = "module.2" if how == "ddp" else "2"

    # FSDP2 creates buffers in the first forward; those made in inference mode prevent training.
    def outside(batch: Tensor) -> None:
        with torch.inference_mode(mode=False), torch.no_grad():
            parallel(batch)

    forward = None if how == "ddp" else outside
    with fh.data.LocalStore(folder / f"{rank}") as store:
        batches = [x(rank, step) for step in range(STEPS)]
        assert fh.collect(parallel, batches, path, store, forward=forward) == (STEPS, 0)
        # FSDP2 leaves the parameters of the root whole.
        assert fh.collect(parallel, batches, path, store, forward=forward) == (0, STEPS)
    dist.barrier()
    for other in range(RANKS):
        store = fh.data.LocalStore(folder / f"{other}", read_only=True)
        for step in store.completed("run"):
            with torch.inference_mode():
                expected = net()[:3](x(other, step))
            assert torch.equal(store.get("run", step, path)["output"], expected)
    # Training still works afterwards.
    parallel(x(rank)).square().sum().backward()
    assert_close(grads(parallel), grads_of_all(lambda m, r: None))


@pytest.mark.parametrize("how", HOWS)
def test_each_rank_collects_into_its_own_store(pair: Pair, how: str, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    pair.run(check_collect, how, tmp_path)


class Recorded(nn.Module):
    """A model that records the outputs of its layers on request."""

    _can_record_outputs = {"hidden_states": nn.Linear}  # noqa: RUF012 (as the models declare it)

    def __init__(self) -> None:
        super().__init__()
        self.layers = net()

    @capture_outputs
    def forward(self, given: Tensor, **kwargs: Any) -> dict[str, Any]:
        return {"output": self.layers(given)}


def check_recording(rank: int) -> None:
    model = Recorded()
    parallel = spread(model, "ddp")
    for step in range(STEPS):
        parallel.zero_grad()
        outputs = parallel(x(rank, step), output_hidden_states=True)
        expected, _ = captured_by_torch(net(), x(rank, step))
        states = [x(rank, step), *(expected[name] for name in "024")]
        for found, state in zip(outputs["hidden_states"], states, strict=True):
            assert torch.equal(found, state)
        # Recorded tensors have a graph, and DDP finds them in the output.
        loss = outputs["output"].square().sum() + sum(h.sum() for h in outputs["hidden_states"])
        loss.backward()
        assert "hidden_states" not in parallel(x(rank, step))
    both = [torch.empty(8, 4) for _ in range(RANKS)]
    dist.all_gather(both, grads(model)[0])
    assert torch.equal(*both)


def test_outputs_are_recorded_under_ddp(pair: Pair) -> None:
    pair.run(check_recording)


def check_detectors(rank: int, how: str) -> None:
    model = net()
    parallel = spread(model, how)
    norms, kept = NormDetector(), fi.LayerActivationDetector("0")
    fh.register(model, "2", norms)
    fi.Layers(model).register_hook("0", kept)
    for step in range(STEPS):
        parallel(x(rank, step)).sum().backward()
    captured = kept.get_captured()
    assert captured is not None
    assert torch.equal(captured, net()[:1](x(rank, STEPS - 1)))
    # Detectors pickle, and merge into the statistics of one process.
    gathered: list[Any] = [None] * RANKS
    dist.all_gather_object(gathered, norms)
    of_all = NormDetector()
    for each in gathered:
        of_all.merge(each)
    seen = torch.cat([net()[:3](x(each, step)) for each in range(RANKS) for step in range(STEPS)])
    found = of_all.snapshot()
    assert found["count"] == seen.numel()
    assert found["mean"] == pytest.approx(seen.mean().item(), abs=1e-6)
    assert found["max"] == pytest.approx(seen.max().item())


@pytest.mark.parametrize("how", HOWS)
def test_detectors_of_ranks_merge(pair: Pair, how: str) -> None:
    pair.run(check_detectors, how)


# Options of DDP and FSDP2


class Either(nn.Module):
    """Uses one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, given: Tensor, which: int) -> Tensor:
        return self.layers[which](given)


def check_unused(rank: int) -> None:
    model = Either()
    parallel = spread(model, "ddp", find_unused_parameters=True)
    log: list[Any] = []
    fh.register(model, "layers.*", scaled(2.0))
    fh.register(model, "layers.*", lambda *_: log.append("backward"), phase="backward")
    for step in range(STEPS):
        parallel.zero_grad()
        # The ranks use different layers and swap them at each step.
        which = (rank + step) % RANKS
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", fh.errors.NeverFiredWarning)
            with fh.capture(model, "layers.*") as acts:
                parallel(x(rank, step), which).square().sum().backward()
        assert list(acts) == [f"layers.{which}"]
        assert f"'layers.{1 - which}' was selected and never ran" in str(caught[-1].message)
        expected = Either()
        for each in range(RANKS):
            (2 * expected(x(each, step), (each + step) % RANKS)).square().sum().div(2).backward()
        assert_close(grads(model), grads(expected))
    assert log == STEPS * ["backward"]


def test_unused_parameters_are_found_with_hooks(pair: Pair) -> None:
    pair.run(check_unused)


def check_no_sync(rank: int) -> None:
    model = net()
    parallel: Any = spread(model, "ddp")
    log: list[str] = []
    fh.instrument(model)
    add_hooks(model[2], log)
    with parallel.no_sync():
        parallel(x(rank, 0)).square().sum().backward()
    alone = net()
    add_hooks(alone[2], [])
    alone(x(rank, 0)).square().sum().backward()
    assert_close(grads(model), grads(alone))  # not averaged yet
    parallel(x(rank, 1)).square().sum().backward()
    steps = [grads_of_all(lambda m, _: add_hooks(m[2], []), step) for step in (0, 1)]
    assert_close(grads(model), [first + second for first, second in zip(*steps, strict=True)])
    assert log == 2 * [*PHASES]


def test_gradients_accumulate_without_sync(pair: Pair) -> None:
    pair.run(check_no_sync)


def check_precision(rank: int, reshard: bool) -> None:
    model = net()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    parallel = spread(model, "fsdp", reshard_after_forward=reshard, mp_policy=policy)
    seen: list[torch.dtype] = []
    fh.register(model, "2", lambda module, args, output: seen.append(output.dtype))
    fh.register(model, "2", lambda module, grads: seen.append(grads[0].dtype), phase="backward_pre")
    alone = net().bfloat16()
    for step in range(STEPS):
        parallel.zero_grad()
        with fh.capture(model, "*", grads=True) as acts:
            output = parallel(x(rank, step))
            output.square().sum().backward()
        expected, expected_output = captured_by_torch(
            copy.deepcopy(alone), x(rank, step).bfloat16()
        )
        assert torch.equal(output, expected_output)
        for name, activation in expected.items():
            assert torch.equal(acts[name], activation)
            assert torch.equal(acts.grads[name], whole(activation.grad))
    assert seen == 2 * STEPS * [torch.bfloat16]
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("reshard", [True, False])
def test_hooks_get_tensors_of_fsdp_s_compute_dtype(pair: Pair, reshard: bool) -> None:
    pair.run(check_precision, reshard)


def check_own_pre_hooks(rank: int, kind: str) -> None:
    seen: list[list[type]] = []
    for hooked in (False, True):
        types: list[type] = []
        model = net()
        for module in model:
            note = functools.partial(note_weight, types)
            module.register_forward_pre_hook(note)
        spread(model, "fsdp")
        if hooked and kind == "instrument":
            fh.instrument(model)
        elif hooked:
            fh.register(model, "*", lambda *_: None)
        model(x(rank))
        seen.append(types)
    assert seen == [[nn.Parameter] * 3] * 2, seen


def note_weight(types: list[type], module: nn.Module, _args: Any) -> None:
    if hasattr(module, "weight"):
        types.append(type(module.weight))


@pytest.mark.parametrize("kind", ["instrument", "register"])
def test_pre_hooks_of_before_see_the_parameters_that_fsdp_gathered(pair: Pair, kind: str) -> None:
    pair.run(check_own_pre_hooks, kind)


def check_tensor_parallel(rank: int, when: str) -> None:
    model = net()
    plan: dict[str, Any] = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    mesh = init_device_mesh("cpu", (RANKS,))
    if when == "before":
        fh.register(model, "2", scaled(2.0))
    parallelize_module(model, mesh, plan)
    if when == "after":
        fh.register(model, "2", scaled(2.0))
    alone = net()
    fh.register(alone, "2", scaled(2.0))
    given = x(0)  # equal on both ranks
    with fh.capture(model, "*", grads=True) as acts, fh.capture(alone, "*", grads=True) as expected:
        output, expected_output = model(given), alone(given)
        output.square().sum().backward()
        expected_output.square().sum().backward()
    # Between the two layers a rank has half of the columns; the second returns all of them.
    for layer in "01":
        torch.testing.assert_close(acts[layer], expected[layer].chunk(RANKS, dim=1)[rank])
        half = expected.grads[layer].chunk(RANKS, dim=1)[rank]
        torch.testing.assert_close(acts.grads[layer], half)
    for layer in "234":
        torch.testing.assert_close(acts[layer], expected[layer])
        torch.testing.assert_close(acts.grads[layer], expected.grads[layer])
    torch.testing.assert_close(output, expected_output)
    assert_close(grads(model), grads(alone))


@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_get_a_rank_s_shard_in_tensor_parallel_layers(pair: Pair, when: str) -> None:
    pair.run(check_tensor_parallel, when)


def test_a_check_that_fails_on_one_rank_fails_the_test(pair: Pair) -> None:
    with pytest.raises(AssertionError, match="rank 1: Traceback"):
        pair.run(check_that_fails_on_one)


def check_that_fails_on_one(rank: int) -> None:
    assert rank == 0
    dist.barrier()  # rank 1 never reaches it

"""Times on a GPU: `make cuda`, or `python -m benches.cuda`.

Unlike in `benches.rows`, wall time: from a synchronised GPU to a synchronised GPU, over several
calls. `--device cpu` runs the same code without a GPU, which tells nothing but that it runs.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from itertools import repeat
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import ferrohook as fh
from benches import report, running
from benches.harness import FULL, QUICK, Group, Row, Sampler, expect, measure, no_garbage_collection
from benches.rows.calls import observe
from benches.rows.models import llama

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LAYERS = 48
SIZES = {"cpu": (16, 16)}
"""Rows and their width; elsewhere 256 of 512."""
REQUESTS = 4


def synchronize(device: str) -> None:
    """Waits for the GPU."""
    if device != "cpu":
        torch.cuda.synchronize()


def timed(call: Callable[[], object], device: str) -> Sampler:
    """Samples the nanoseconds of a call, including its kernels."""

    def spent(count: int) -> float:
        synchronize(device)
        start = perf_counter()
        for _ in repeat(None, count):
            call()
        synchronize(device)
        return perf_counter() - start

    def sample(seconds: float) -> float:
        with no_garbage_collection(), torch.no_grad():
            count = max(1, round(seconds / spent(3) * 3))
            return spent(count) / count * 1e9

    return sample


def stack(device: str) -> tuple[nn.Sequential, torch.Tensor]:
    """Linear layers, and rows for them."""
    torch.manual_seed(0)
    rows, width = SIZES.get(device, (256, 512))
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))
    return model.to(device), torch.randn(rows, width, device=device)


def decode(device: str) -> dict[str, Sampler]:
    """A launch-bound model without hooks, and with an empty hook on every module."""
    models = [llama() for _ in range(3)]
    (plain, _), (torchs, _), (ours, _) = models
    ids = models[0][1].to(device)
    for module in torchs.modules():
        module.register_forward_hook(observe)
    fh.register(ours, None, observe)
    for model, _ in models:
        model.to(device)
    with torch.no_grad():
        for hooked in (torchs, ours):
            expect(torch.equal(hooked(ids)[0], plain(ids)[0]), "the plain model's output")
    return {
        "decode": timed(lambda: plain(ids), device),
        "decode, PyTorch's hooks on every module": timed(lambda: torchs(ids), device),
        "decode, our hooks on every module": timed(lambda: ours(ids), device),
    }


def captures(device: str) -> dict[str, Sampler]:
    """All outputs of a stack, copied to pinned memory, by a capture and by PyTorch's hooks."""
    plain, x = stack(device)
    (torchs, _), (ours, _), (streamed, _) = (stack(device) for _ in range(3))
    found: list[torch.Tensor] = []
    for layer in torchs:
        layer.register_forward_hook(lambda _module, _args, output: found.append(output.cpu()))
    stream = None if device == "cpu" else torch.cuda.Stream()

    def append() -> list[torch.Tensor]:
        found.clear()
        torchs(x)
        return found

    def capture(model: nn.Module) -> list[torch.Tensor]:
        with fh.capture(model, "*", device="cpu") as acts:
            model(x)
        return [*acts.values()]  # waits for the copies

    def capture_on_a_stream() -> list[torch.Tensor]:
        with torch.cuda.stream(stream):
            return capture(streamed)

    with torch.no_grad():
        for other in (capture(ours), capture_on_a_stream()):
            expect(all(map(torch.equal, other, append())), "the activations of PyTorch's hooks")
    return {
        "48 layers": timed(lambda: plain(x), device),
        "48 layers, copied to the CPU by PyTorch's hooks": timed(append, device),
        "48 layers, captured to the CPU": timed(lambda: capture(ours), device),
        "48 layers, captured to the CPU on a stream": timed(capture_on_a_stream, device),
    }


def graphs(device: str) -> dict[str, Sampler]:
    """A replayed graph of a stack: plain, with sites, and with requests that steer all layers."""
    (plain, x), (sited, same) = stack(device), stack(device)
    fh.rows.sites(
        sited, "*", max_requests=REQUESTS, max_rows=len(x), width=x.shape[1]
    )  # never closed
    vector = torch.ones_like(x[0])
    plan = fh.Plan(fh.on("*", fh.Add(vector))).prepare(sited)
    each = len(x) // REQUESTS
    with torch.no_grad():
        replay, plain_out = recorded(plain, x, device)
        replay_sited, out = recorded(sited, same, device)

        def steered(_model: nn.Module = sited) -> None:  # a plan does not keep its model alive
            rows = {plan.open(): slice(at * each, (at + 1) * each) for at in range(REQUESTS)}
            with fh.batch(rows, size=len(x)):
                replay_sited()

        replay()
        replay_sited()
        expect(torch.allclose(out(), plain_out()), "the plain model's output")
        steered()
        wanted = x
        for layer in plain:
            wanted = layer(wanted) + vector
        expect(torch.allclose(out(), wanted, rtol=1e-3, atol=1e-3), "steered rows")
    return {
        "graph of 48 layers": timed(replay, device),
        "graph of 48 layers, sites without requests": timed(replay_sited, device),
        "graph of 48 layers, 4 requests steer all": timed(steered, device),
    }


def recorded(
    model: nn.Module, x: torch.Tensor, device: str
) -> tuple[Callable[[], object], Callable[[], torch.Tensor]]:
    """Records a call as a CUDA graph; returns its replay and its output. Calls on a CPU."""
    if device == "cpu":
        outputs: list[torch.Tensor] = []

        def call() -> None:
            outputs[:] = [model(x)]

        return call, lambda: outputs[0]
    for _ in range(3):
        model(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out: torch.Tensor = model(x)
    return graph.replay, lambda: out


def groups(device: str) -> list[Group]:
    """The groups, for a device."""
    ours = "decode, our hooks on every module"
    captured = "48 layers, captured to the CPU"
    graph = "graph of 48 layers"
    return [
        Group(
            name="launch-bound decode",
            setup=partial(decode, device),
            rows=[
                Row(name=ours, over="decode", bar=1.0),
                Row(name=ours, over="decode, PyTorch's hooks on every module", bar=0.9),
            ],
            needs="transformers",
        ),
        Group(
            name="captures in pinned memory",
            setup=partial(captures, device),
            rows=[
                Row(name=captured, over="48 layers, copied to the CPU by PyTorch's hooks", bar=1.0),
                Row(name=f"{captured} on a stream", over=captured, bar=1.1),
                Row(name=captured, over="48 layers", bar=2.0),
            ],
        ),
        Group(
            name="CUDA graphs",
            setup=partial(graphs, device),
            rows=[
                Row(name=f"{graph}, sites without requests", over=graph, bar=1.5),
                Row(name=f"{graph}, 4 requests steer all", over=graph, bar=2.0),
            ],
        ),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table, as markdown; returns 1 if a group failed."""
    parser = argparse.ArgumentParser(prog="benches.cuda", description=__doc__)
    parser.add_argument("--device", default="cuda", help="cuda by default")
    parser.add_argument("--quick", action="store_true", help="few and short repeats")
    options = parser.parse_args(arguments)
    effort = QUICK if options.quick else FULL
    results: running.Results[Any] = running.run(
        groups(options.device),
        lambda group: measure(group, effort, group.setup()),
        lambda group: print(f"measures: {group.name}", file=sys.stderr),
    )
    on = options.device if options.device == "cpu" else torch.cuda.get_device_name()
    print(report.of_sides(results).markdown(), f"{on}; {report.Machine.here()}", sep="\n\n")
    for group, error in results.failed:
        print(f"FAILED: {group.name}: {error}", file=sys.stderr)
    return 1 if results.failed else 0


if __name__ == "__main__":
    sys.exit(main())

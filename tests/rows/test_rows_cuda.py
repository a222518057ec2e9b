"""Batches on a GPU: rows, positions, and streams other than the one that went before."""

from __future__ import annotations

import copy
import gc
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import ferrohook as fh

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH = 8
LAYERS = 3
ROWS = 6

pytestmark = pytest.mark.cuda


class Models(NamedTuple):
    """One model twice, and its input."""

    gpu: nn.Sequential
    cpu: nn.Sequential
    x: Tensor
    """On the GPU."""
    x_cpu: Tensor

    def by_hand(self, *changes: tuple[Any, Callable[[Tensor], Tensor]]) -> list[Tensor]:
        """Outputs of the layers, with changes of rows after each, on the CPU."""
        h, outputs = self.x_cpu, []
        for layer in self.cpu:
            h = layer(h).clone()
            for rows, change in changes:
                h[rows] = change(h[rows])
            outputs.append(h)
        return outputs


@pytest.fixture
def models() -> Models:
    cpu = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    cpu.requires_grad_(requires_grad=False)
    gpu, x_cpu = copy.deepcopy(cpu).cuda(), torch.randn(ROWS, WIDTH)
    made = Models(gpu, cpu, x_cpu.cuda(), x_cpu)
    torch.cuda.synchronize()
    return made


def close(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one.cpu(), other.cpu(), 1e-4, 1e-4)


def vector(seed: int) -> Tensor:
    return torch.randn(WIDTH, generator=torch.Generator().manual_seed(seed))


def ablated(direction: Tensor) -> Callable[[Tensor], Tensor]:
    unit = direction / direction.norm()
    return lambda h: h - (h @ unit)[..., None] * unit


def halve(_module: object, _args: object, output: Tensor) -> Tensor:
    return output / 2


# --- Rows and positions --------------------------------------------------------------------------


def test_members_of_a_batch_change_and_keep_their_rows(models: Models) -> None:
    plans = [
        fh.Plan(fh.on("*", fh.Add(vector(1)))),
        fh.Plan(fh.on("*", fh.Ablate(vector(2).cuda())), fh.keep("*")),
        fh.Plan(fh.on("*", fh.Scale(3.0)), fh.keep("1", device="cpu")),
        fh.Plan(fh.on("*", halve), fh.keep("*", dtype=torch.bfloat16)),
    ]
    prepared = [plan.prepare(models.gpu) for plan in plans]
    changes = [lambda h: h + vector(1), ablated(vector(2)), lambda h: h * 3, lambda h: h / 2]
    for shift in range(4):
        requests = [each.open() for each in prepared]
        places = [[0], [1, 2], [5, 3], [4]]
        own = [places[(number + shift) % 4] for number in range(4)]
        rows = dict(zip(requests, own, strict=True))
        rows[requests[2]] = torch.tensor(own[2], device="cuda")
        with fh.batch(rows):
            out = models.gpu(models.x)
        expected = models.by_hand(*zip(own, changes, strict=True))
        assert close(out, expected[-1])
        for at, kept in enumerate(expected):
            assert close(requests[1].acts[str(at)], kept[own[1]])
            assert torch.allclose(requests[3].acts[str(at)].cpu().float(), kept[own[3]], 0.02, 0.02)
        assert close(requests[2].acts["1"], expected[1][own[2]])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("at", "chosen"),
    [
        (2, [2]),
        (slice(1, 3), [1, 2]),
        ("prompt", [0, 1, 2]),
        ("last_prompt", [2]),
        ("generated", [3]),
    ],
)
def test_plans_at_positions(models: Models, at: Any, chosen: list[int], device: str) -> None:
    positions = [0, 1, 2, 3, 1, 2]
    plans = [
        fh.Plan(fh.on("*", fh.Add(vector(1)), at=at), fh.keep("1", at=at)),
        fh.Plan(fh.on("*", halve, at=at)),
    ]
    first, second = (plan.prepare(models.gpu).open() for plan in plans)
    with fh.batch(
        {first: slice(0, 4), second: slice(4, 6)},
        positions=torch.tensor(positions, device=device),
        lengths={first: 3, second: 3},
    ):
        out = models.gpu(models.x)
    own = [[row for row in rows if positions[row] in chosen] for rows in (range(4), range(4, 6))]
    expected = models.by_hand((own[0], lambda h: h + vector(1)), (own[1], lambda h: h / 2))
    assert close(out, expected[-1])
    assert close(first.acts["1"], expected[1][own[0]])


def test_padded_rows_have_positions_on_the_gpu(models: Models) -> None:
    x = models.x.view(2, 3, WIDTH)
    positions = torch.tensor([[-1, 0, 1], [0, 1, 2]], device="cuda")
    plan = fh.Plan(fh.on("*", fh.Add(vector(1)), at="last_prompt")).prepare(models.gpu)
    first, second = plan.open(), plan.open()
    with fh.batch({first: 0, second: 1}, positions=positions, lengths={first: 2, second: 3}):
        out = models.gpu(x)
    expected = models.by_hand(([2, 5], lambda h: h + vector(1)))
    assert close(out.flatten(0, 1), expected[-1])


class Text(nn.Module):
    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, inputs_embeds: Tensor) -> Tensor:
        return self.layers(inputs_embeds)


def test_a_request_alone_changes_and_keeps_positions(models: Models) -> None:
    plan = fh.Plan(
        fh.on("layers.*", fh.Add(vector(1)), at=slice(2, 4)),
        fh.keep("layers.*", at="last_prompt"),
    )
    text = Text(models.gpu)
    with plan.prepare(text).open() as request:
        out = text(models.x.view(1, ROWS, WIDTH))
    expected = models.by_hand(([2, 3], lambda h: h + vector(1)))
    assert close(out[0], expected[-1])
    assert close(request.acts["layers.2"].view(-1, WIDTH), expected[2][-1:])


# --- Streams -------------------------------------------------------------------------------------


def apart() -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Two streams of which the first is busy."""
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(first):
        torch.cuda._sleep(50_000_000)
    return first, second


@pytest.mark.parametrize(
    ("hook", "change"),
    [
        (lambda: fh.Add(vector(1)), lambda h: h + vector(1)),
        (lambda: fh.Add(vector(1).double().cuda(), 2.0), lambda h: h + 2 * vector(1)),
        (lambda: fh.Ablate(vector(1)), ablated(vector(1))),
        (lambda: fh.Ablate(vector(1).cuda()), ablated(vector(1))),
        (lambda: fh.Replace(vector(1).cuda().double()), lambda h: vector(1).expand(h.shape)),
    ],
    ids=["Add", "Add scaled", "Ablate", "Ablate on the GPU", "Replace"],
)
def test_a_cast_is_used_on_another_stream(
    models: Models, hook: Callable[[], Any], change: Callable[[Tensor], Tensor]
) -> None:
    made = hook()
    torch.cuda.synchronize()
    first, second = apart()
    with fh.register(models.gpu, "*", made):
        with torch.cuda.stream(first):
            models.gpu(models.x)
        with torch.cuda.stream(second):
            out = models.gpu(models.x).cpu()
    assert close(out, models.by_hand((slice(None), change))[-1])


def test_a_vector_is_made_on_another_stream(models: Models) -> None:
    source = vector(1).cuda()
    torch.cuda.synchronize()
    first, second = apart()
    with torch.cuda.stream(first):
        hook = fh.Add(source)
    with fh.register(models.gpu, "*", hook), torch.cuda.stream(second):
        out = models.gpu(models.x).cpu()
    assert close(out, models.by_hand((slice(None), lambda h: h + vector(1)))[-1])


@pytest.mark.parametrize("rows", [(0, 2), ([0, 4], [2, 1])])
def test_what_a_busy_stream_uses_is_not_freed(models: Models, rows: tuple[Any, Any]) -> None:
    plans = [fh.Plan(fh.on("*", fh.Ablate(vector(seed)))) for seed in (1, 2)]
    prepared = [plan.prepare(models.gpu) for plan in plans]
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    for stream in (first, second):
        a, b = (each.open() for each in prepared)
        with torch.cuda.stream(stream), fh.batch({a: rows[0], b: rows[1]}):
            torch.cuda._sleep(50_000_000)
            out = models.gpu(models.x)
    del a, b, prepared, plans
    gc.collect()
    with torch.cuda.stream(first):  # takes the memory of casts and tables, if it is free
        for _ in range(8):
            torch.full((2, WIDTH), torch.nan, device="cuda")
    first.synchronize()
    with torch.cuda.stream(second):
        out = out.cpu()
    expected = models.by_hand((rows[0], ablated(vector(1))), (rows[1], ablated(vector(2))))
    assert close(out, expected[-1])


@pytest.mark.parametrize("rows", [(0, 1), (slice(0, 2), slice(2, 6)), ([0, 4], [2, 1])])
def test_a_table_is_used_on_another_stream(models: Models, rows: tuple[Any, Any]) -> None:
    plans = [fh.Plan(fh.on("*", fh.Add(vector(seed).cuda()))) for seed in (1, 2)]
    prepared = [plan.prepare(models.gpu) for plan in plans]
    torch.cuda.synchronize()
    for stream in (streams := apart()):
        a, b = (each.open() for each in prepared)
        with torch.cuda.stream(stream), fh.batch({a: rows[0], b: rows[1]}):
            out = models.gpu(models.x)
    with torch.cuda.stream(streams[1]):
        out = out.cpu()
    expected = models.by_hand(
        (rows[0], lambda h: h + vector(1)), (rows[1], lambda h: h + vector(2))
    )
    assert close(out, expected[-1])


def test_positions_are_used_on_another_stream(models: Models) -> None:
    prepared = fh.Plan(fh.on("*", fh.Add(vector(1)), at=slice(1, 3))).prepare(models.gpu)
    request, positions = prepared.open(), torch.arange(ROWS)
    first, second = apart()
    for stream in (first, second):
        with torch.cuda.stream(stream), fh.batch({request: slice(0, 6)}, positions=positions):
            out = models.gpu(models.x)
    with torch.cuda.stream(second):
        out = out.cpu()
    assert close(out, models.by_hand(([1, 2], lambda h: h + vector(1)))[-1])


@pytest.mark.parametrize("options", [{}, {"dtype": torch.bfloat16}, {"device": "cpu"}])
def test_results_are_read_on_another_stream(models: Models, options: dict[str, Any]) -> None:
    side = torch.cuda.Stream()
    request = fh.Plan(fh.keep("0", **options)).prepare(models.gpu).open()
    expected = models.by_hand()[0].to(options.get("dtype", torch.float32))
    for first in (0, ROWS):
        positions = torch.arange(first, first + ROWS)
        with torch.cuda.stream(side), fh.batch({request: slice(0, ROWS)}, positions=positions):
            models.gpu(models.x)
    side.synchronize()
    torch.cuda._sleep(50_000_000)  # the reader's stream is busy
    got = request.acts["0"]
    del request
    gc.collect()
    with torch.cuda.stream(side):  # the engine goes on, in the memory that was freed
        for _ in range(3):
            torch.full_like(models.x, torch.nan)
    side.synchronize()
    assert torch.allclose(got.cpu(), expected.repeat(2, 1), 0.02, 0.02)


@pytest.mark.parametrize("steps", [0, 1, 2], ids=["no positions", "a step", "two steps"])
def test_a_result_is_read_on_several_streams(models: Models, steps: int) -> None:
    """A copy that the first reader makes is kept for the others."""
    prepared = fh.Plan(fh.keep("0")).prepare(models.gpu)
    request, other = prepared.open(), prepared.open()
    rows = {other: slice(0, 4), request: slice(4, ROWS)}
    for step in range(max(1, steps)):
        positions = torch.tensor([*range(4 * step, 4 * step + 4), 2 * step, 2 * step + 1])
        with fh.batch(rows, positions=positions if steps else None):
            models.gpu(models.x)
    torch.cuda.synchronize()
    for stream in (streams := apart()):
        with torch.cuda.stream(stream):
            got = request.acts["0"]
    with torch.cuda.stream(streams[1]):
        got = got.cpu()
    assert close(got, models.by_hand()[0][4:].repeat(max(1, steps), 1))
    again = request.acts["0"], request.acts["0"]
    assert again[0].data_ptr() == again[1].data_ptr()


@pytest.mark.parametrize("keep", ["kept by a plan", "captured"])
def test_copies_to_the_host_leave_a_side_stream(models: Models, keep: str) -> None:
    side = torch.cuda.Stream()
    scaled = [models.x * factor for factor in range(1, 4)]
    torch.cuda.synchronize()
    if keep == "captured":
        owner = fh.capture(models.gpu, "0", device="cpu", calls="all")
        with owner as acts, torch.cuda.stream(side):
            torch.cuda._sleep(50_000_000)
            for x in scaled:
                models.gpu(x).zero_()
        got = acts["0"]
    else:
        prepared = fh.Plan(fh.keep("0", device="cpu")).prepare(models.gpu)
        requests = [prepared.open() for _ in scaled]
        with torch.cuda.stream(side):
            torch.cuda._sleep(50_000_000)
            for request, x in zip(requests, scaled, strict=True):
                with fh.batch({request: slice(0, ROWS)}):
                    models.gpu(x).zero_()
        got = [request.acts["0"] for request in requests]
    for factor, found in enumerate(got, 1):
        assert close(found, models.cpu[0](models.x_cpu * factor))


def test_a_cast_made_in_a_captured_graph_is_not_used_by_others(models: Models) -> None:
    hook, graph = fh.Ablate(vector(1).cuda()), torch.cuda.CUDAGraph()
    models.gpu(models.x)
    with fh.register(models.gpu, "*", hook):
        with torch.cuda.graph(graph):
            captured = models.gpu(models.x)
        out = models.gpu(models.x)
        graph.replay()
    expected = models.by_hand((slice(None), ablated(vector(1))))[-1]
    assert close(out, expected)
    assert close(captured, expected)


def test_a_cast_of_before_is_used_in_a_captured_graph(models: Models) -> None:
    graph = torch.cuda.CUDAGraph()
    with fh.register(models.gpu, "*", fh.Ablate(vector(1))):
        models.gpu(models.x)
        with torch.cuda.graph(graph):
            captured = models.gpu(models.x)
        graph.replay()
    assert close(captured, models.by_hand((slice(None), ablated(vector(1))))[-1])


# --- Graphs --------------------------------------------------------------------------------------


def test_a_batch_in_a_captured_graph_is_refused(models: Models) -> None:
    request = fh.Plan(fh.on("*", fh.Add(vector(1)))).prepare(models.gpu).open()
    with fh.batch({request: slice(0, 2)}):
        models.gpu(models.x)
    torch.cuda.synchronize()
    rows = {request: slice(0, 2)}
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.ones(1, device="cuda")  # torch warns of an empty graph
        with pytest.raises(fh.HookError, match=r"fh\.rows\.sites"), fh.batch(rows):
            pass
    assert request.error is None
    with fh.batch({request: slice(0, 2)}):
        out = models.gpu(models.x)
    assert close(out, models.by_hand((slice(0, 2), lambda h: h + vector(1)))[-1])

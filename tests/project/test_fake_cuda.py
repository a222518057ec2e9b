"""The emulated GPU of the tests: it finds races, and nothing where there is none."""

from __future__ import annotations

import gc
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import ferrohook as fh
from support.fake_cuda import SCHEDULES, FakeCuda
from support.limits import LIMIT

if TYPE_CHECKING:
    from collections.abc import Iterator

N = 8


@pytest.fixture(params=SCHEDULES)
def gpu(request: pytest.FixtureRequest) -> Iterator[FakeCuda]:
    with FakeCuda(request.param) as gpu:
        yield gpu


@pytest.fixture
def lazy() -> Iterator[FakeCuda]:
    with FakeCuda("lazy") as gpu:
        yield gpu


# --- Orders --------------------------------------------------------------------------------------


def doubled_on(side: torch.cuda.Stream, x: Tensor) -> Tensor:
    with torch.cuda.stream(side):
        return x * 2


def test_another_stream_reads_too_early(lazy: FakeCuda) -> None:
    x, side = torch.ones(N, device="cuda"), torch.cuda.Stream()
    out = doubled_on(side, x)
    side.synchronize()
    with torch.cuda.stream(side):
        assert out.isnan().all()


def test_a_stream_that_waits_reads_in_time(gpu: FakeCuda) -> None:
    x, side = torch.ones(N, device="cuda"), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    out = doubled_on(side, x)
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(out.cpu(), torch.full((N,), 2.0))


def test_an_event_orders_streams(gpu: FakeCuda) -> None:
    x, side, event = torch.zeros(N, device="cuda"), torch.cuda.Stream(), torch.cuda.Event()
    torch.cuda._sleep(1)
    x.add_(1)
    event.record()
    x.add_(1)
    event.wait(side)
    with torch.cuda.stream(side):
        read = x.clone().cpu()
    assert read.min() >= 1


@pytest.mark.parametrize("recorded", [False, True])
def test_freed_memory_is_another_s(lazy: FakeCuda, recorded: bool) -> None:
    x, side = torch.ones(N, device="cuda"), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    out = doubled_on(side, x)
    if recorded:
        x.record_stream(side)
    del x
    torch.cuda.current_stream().synchronize()
    with torch.cuda.stream(side):
        assert bool(out.isnan().any()) is not recorded


def test_a_view_keeps_the_memory(gpu: FakeCuda) -> None:
    x = torch.arange(4.0, device="cuda")
    part = x[1:3]
    del x
    gc.collect()
    assert part.tolist() == [1, 2]


@pytest.mark.parametrize("waits", [False, True])
def test_a_copy_to_the_host_is_read_too_early(lazy: FakeCuda, waits: bool) -> None:
    x = torch.ones(N, device="cuda")
    host = torch.zeros(N).pin_memory()
    host.copy_(x, non_blocking=True)
    if waits:
        torch.cuda.synchronize()
    assert bool(host.all()) is waits


def test_pinned_memory_is_read_when_the_copy_runs(lazy: FakeCuda) -> None:
    host = torch.ones(N).pin_memory()
    x = host.to("cuda", non_blocking=True)
    pageable = torch.ones(N)
    y = pageable.to("cuda", non_blocking=True)
    host.zero_()
    pageable.zero_()
    assert (x.sum().item(), y.sum().item()) == (0, N)


def test_threads_have_streams_of_their_own(gpu: FakeCuda) -> None:
    seen: list[Any] = []

    def work() -> None:
        seen.append(torch.cuda.current_stream())
        seen.append((torch.ones(N, device="cuda") * 2).sum().item())

    with torch.cuda.stream(torch.cuda.Stream()):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(LIMIT)
    assert seen == [torch.cuda.default_stream(), 2 * N]


@pytest.mark.parametrize(
    ("missing", "ahead"),
    [(None, False), ("wait_stream", False), (None, True), ("record_stream", True)],
)
def test_a_missing_order_in_copies_to_the_host_is_found(
    lazy: FakeCuda, missing: str | None, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if missing is not None:
        owner = Tensor if missing == "record_stream" else torch.cuda.Stream
        monkeypatch.setattr(owner, missing, lambda *_: None)
    model = nn.Sequential(nn.Linear(N, N)).cuda().requires_grad_(requires_grad=False)
    x, weight = torch.ones(2, N, device="cuda"), model[0].weight.cpu()
    expected = torch.ones(2, N) @ weight.T + model[0].bias.cpu()
    with fh.capture(model, "0", device="cpu", calls="all") as acts:
        for _ in range(3):
            model(x).zero_()
        if ahead:  # of the copies
            torch.cuda.current_stream().synchronize()
    right = all(torch.allclose(each, expected, atol=1e-5) for each in acts["0"])
    assert right is (missing is None)


# --- Waits ---------------------------------------------------------------------------------------


def test_waits_are_listed_with_their_lines(gpu: FakeCuda) -> None:
    x = torch.ones(N).to("cuda")
    mask = x > 0
    index = torch.tensor([1])
    gpu.waits.clear()
    for wait, what in (
        (lambda: x.sum().item(), "aten::_local_scalar_dense"),
        (lambda: x[mask], "aten::index by a mask"),
        (lambda: x[index], "aten::index by an index on the host"),
        (x.cpu, "a copy from the GPU"),
        (lambda: x.copy_(torch.ones(N)), "a copy to the GPU from pageable memory"),
        (mask.nonzero, "aten::nonzero"),
        (torch.cuda.synchronize, "torch.cuda.synchronize"),
    ):
        wait()
        (found,) = gpu.waits
        assert found.what == what
        assert found.lines[0].startswith(f"{__file__}:")
        gpu.waits.clear()
    (x * 2 + x[1:3].sum()).relu_()
    torch.ones(N).pin_memory().to("cuda", non_blocking=True)
    assert not gpu.waits


def test_a_wait_raises_where_none_is_allowed(gpu: FakeCuda) -> None:
    x = torch.ones(N, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    x.sum()
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="synchronizing CUDA operation: aten::_local_scalar"):
        x.sum().item()
    torch.cuda.set_sync_debug_mode("default")
    x.sum().item()


def test_a_sleep_lasts_until_the_host_waits(gpu: FakeCuda) -> None:
    torch.cuda._sleep(1)
    event = torch.cuda.Event()
    event.record()
    assert not event.query()
    event.synchronize()
    assert event.query()
    assert torch.cuda.current_stream().query()


# --- Graphs --------------------------------------------------------------------------------------


def test_a_replay_reads_the_tensors_of_the_capture(gpu: FakeCuda) -> None:
    x, graph = torch.zeros(N, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = x * 2
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            out.add_(1)
        torch.cuda.current_stream().wait_stream(side)
    assert out.isnan().all()  # captured, not run
    for value in (1.0, 5.0):
        x.fill_(value)
        graph.replay()
        assert torch.equal(out.cpu(), torch.full((N,), 2 * value + 1))


def test_memory_of_before_that_was_freed_is_nan_in_a_replay(gpu: FakeCuda) -> None:
    x, graph = torch.ones(N, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = x + 1
    del x
    graph.replay()
    assert out.isnan().all()


def test_what_a_capture_forbids_ends_it(gpu: FakeCuda) -> None:
    x, event = torch.ones(N, device="cuda"), torch.cuda.Event()
    for forbidden in (x.cpu, event.query, torch.cuda.synchronize):
        # The capture is invalid though the error was caught.
        with (
            pytest.raises(RuntimeError, match="a previous error"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
            pytest.raises(RuntimeError, match="not permitted when stream is capturing"),
        ):
            forbidden()


def test_streams_of_a_capture_fork_and_join(gpu: FakeCuda) -> None:
    side = torch.cuda.Stream()
    forked = torch.cuda.graph(torch.cuda.CUDAGraph())
    with pytest.raises(RuntimeError, match="unjoined work"), forked:
        side.wait_stream(torch.cuda.current_stream())
    event = side.record_event()
    isolated = torch.cuda.graph(torch.cuda.CUDAGraph())
    with pytest.raises(RuntimeError, match="uncaptured work"), isolated:
        event.wait()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        event.record()
    with pytest.raises(RuntimeError, match="last recorded in a capture"):
        event.query()


# --- The device ----------------------------------------------------------------------------------


def test_tensors_are_of_no_subclass(gpu: FakeCuda) -> None:
    model = nn.Linear(N, N).cuda()
    assert type(model.weight) is nn.Parameter
    out = model(torch.ones(2, N, device="cuda"))
    assert type(out) is Tensor
    assert (out.device, out.is_cuda, out.requires_grad) == (torch.device("cuda", 0), True, True)
    with pytest.raises(RuntimeError, match="same device"):
        model(torch.ones(2, N))
    with pytest.raises(NotImplementedError, match="shape of a tensor in place"):
        out.detach().t_()


def test_torch_is_as_before_when_it_is_closed() -> None:
    names = [
        (owner, name, vars(owner).get(name))
        for owner in (torch, torch.cuda, Tensor, nn.Parameter, threading.Thread)
        for name in dir(owner)
    ]
    with FakeCuda():
        assert torch.cuda.is_available()
        x = torch.ones(N, device="cuda")
        assert x.is_cuda
    for owner, name, value in names:
        assert vars(owner).get(name) is value, name
    with pytest.raises(ValueError, match="eager, lazy and random:SEED, got 'late'"):
        FakeCuda("late")

"""`profile`: own times of modules, on a clock of the test's own."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import ferrohook as fh
from ferrohook.show import profile as profiling
from support.compiling import compiled

if TYPE_CHECKING:
    from collections.abc import Callable


class Clock:
    """Clock that the modules of a test turn."""

    def __init__(self) -> None:
        self.now = 0

    def perf_counter_ns(self) -> int:
        return self.now

    def spend(self, milliseconds: int) -> None:
        self.now += milliseconds * 1_000_000


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(profiling, "time", made)
    return made


class Work(nn.Module):
    """Spends time, and calls its children."""

    def __init__(self, spend: Callable[[], None], *children: nn.Module) -> None:
        super().__init__()
        self.spend = spend
        for number, child in enumerate(children):
            self.add_module(f"c{number}", child)

    def forward(self, x: Tensor) -> Tensor:
        self.spend()
        for child in self.children():
            x = child(x)
        return x


@pytest.fixture
def model(clock: Clock) -> Work:
    leaf = Work(lambda: clock.spend(5))
    children = [Work(lambda: clock.spend(2), leaf), Work(lambda: clock.spend(3), leaf)]
    return Work(lambda: clock.spend(1), *children)


def seconds(times: profiling.Times) -> dict[str, tuple[int, float, float]]:
    return {
        each.name: (each.calls, round(each.own * 1e3, 6), round(each.total * 1e3, 6))
        for each in times
    }


def test_own_times_are_those_without_the_modules_inside(model: Work) -> None:
    x = torch.ones(1)
    with fh.profile(model) as times:
        model(x)
        model(x)
    model(x)
    expected = {"": (2, 2, 32), "c0": (2, 4, 14), "c0.c0": (4, 20, 20), "c1": (2, 6, 16)}
    assert seconds(times) == expected
    assert [each.name for each in times] == ["c0.c0", "c1", "c0", ""]
    assert times["c1"] == profiling.ModuleTime("c1", "Work", "cpu", 2, 0.006, 0.016)
    with pytest.raises(fh.SelectionError, match=r"no call of 'c9' was profiled; .*'c0\.c0', 'c1'"):
        times["c9"]


def test_time_of_modules_that_are_not_profiled_is_their_callers(model: Work) -> None:
    with fh.profile(model, ["", "c0.c0"]) as times:
        model(torch.ones(1))
    assert seconds(times) == {"": (1, 6, 16), "c0.c0": (2, 10, 10)}


def test_a_module_that_raises_and_one_that_calls_itself_are_timed(clock: Clock) -> None:
    def fail() -> None:
        clock.spend(4)
        raise ZeroDivisionError

    model = Work(lambda: clock.spend(1), Work(fail))
    other = Work(lambda: clock.spend(1))
    with fh.profile(model) as times:
        with pytest.raises(ZeroDivisionError):
            model(torch.ones(1))
        # Another hook raises before the call begins.
        with (
            fh.register(model, "c0", lambda *_: fail(), phase="forward_pre"),
            pytest.raises(ZeroDivisionError),
        ):
            model(torch.ones(1))
    assert seconds(times) == {"": (2, 6, 10), "c0": (1, 4, 4)}
    depth = iter([True, False])
    other.spend = lambda: (clock.spend(2), next(depth) and other(torch.ones(1)))  # type: ignore[assignment, return-value]
    with fh.profile(other) as times:
        other(torch.ones(1))
    assert seconds(times) == {"": (2, 4, 6)}


def test_threads_have_stacks_of_their_own(model: Work) -> None:
    barrier = threading.Barrier(2)
    model.c1.spend = lambda: barrier.wait(60)  # type: ignore[assignment, return-value]
    profile = fh.profile(model)
    with profile as times, ThreadPoolExecutor(2) as pool:
        # Both are inside c1 at once.
        assert len([*pool.map(profile.wrap(model), [torch.ones(1)] * 2)]) == 2
    assert {name: it[0] for name, it in seconds(times).items()} == {
        "": 2,
        "c0": 2,
        "c0.c0": 4,
        "c1": 2,
    }


def test_many_calls_are_added_up_in_between(model: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "MOST_PENDING", 7)
    with fh.profile(model) as times:
        for _ in range(10):
            model(torch.ones(1))
            assert len(times._ended) < 7 + 5
    assert seconds(times)["c0.c0"] == (20, 100, 100)


def test_times_print_with_their_unit(model: Work, clock: Clock) -> None:
    with fh.profile(model) as times:
        pass
    assert "no call was profiled" in repr(times)
    with fh.profile(model) as times:
        model(torch.ones(1))
    lines = [line.split() for line in repr(times).splitlines()]
    assert "own (ms)" in repr(times)
    assert lines[1] == ["c0.c0", "Work", "cpu", "2", "10.00", "62%", "10.00"]
    assert lines[-1] == ["(model)", "Work", "cpu", "1", "1.00", "6%", "16.00"]
    assert ">10.00<" in times._repr_html_()
    model.c1.spend = lambda: clock.spend(5000)  # type: ignore[assignment]
    with fh.profile(model) as slow:
        model(torch.ones(1))
    assert "own (s)" in repr(slow)
    frame = pytest.importorskip("pandas") and times.to_pandas()
    assert frame.own.sum() == pytest.approx(0.016)
    wide = nn.Sequential(*[nn.Identity() for _ in range(40)])
    with fh.profile(wide) as many:
        wide(torch.ones(1))
    assert repr(many).splitlines()[-1] == "and 11 more modules"


@compiled
def test_a_compiled_model_runs_without_its_graphs_meanwhile() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    x = torch.ones(1, 2)
    graphs = []

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    graphed = torch.compile(model, backend=backend)
    expected = graphed(x)
    with fh.profile(model) as times:
        assert torch.equal(graphed(x), expected)
    assert {each.name for each in times} == {"", "0", "1"}
    made = len(graphs)
    assert torch.equal(graphed(x), expected)
    assert len(graphs) == made  # its own again


def test_a_profile_is_entered_once_and_leaves_nothing(model: Work) -> None:
    classes = [id(type(module)) for module in model.modules()]
    profile = fh.profile(model)
    assert "with profile(model) as times" in repr(profile)
    with profile:
        assert [id(type(module)) for module in model.modules()] != classes
    assert [id(type(module)) for module in model.modules()] == classes
    with pytest.raises(fh.HookError, match="a profile can be entered only once"):
        profile.__enter__()
    with pytest.raises(fh.HookTypeError, match="profile needs an instance of nn"):
        fh.profile(1)  # type: ignore[arg-type]
    with pytest.raises(fh.SelectionError, match="nope"):
        fh.profile(model, "nope")


class Event:
    """Event of a device whose streams have a clock."""

    waited: list[Event]

    def __init__(self, clock: Clock, enable_timing: bool) -> None:
        assert enable_timing
        self.clock = clock

    def record(self, stream: Any) -> None:
        assert stream == "current"
        self.at = self.clock.now

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: Event) -> float:
        return (other.at - self.at) / 1e6


def test_modules_on_a_device_are_timed_by_its_events(
    model: Work, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = torch.device("cuda", 0)

    class Module:
        @staticmethod
        def current_stream(on: torch.device) -> str:
            assert on == device
            return "current"

        @staticmethod
        def Event(*, enable_timing: bool) -> Event:  # noqa: N802 (torch's name)
            return Event(clock, enable_timing)

    monkeypatch.setattr(torch, "get_device_module", lambda on: Module if on == device else None)
    # c0 is on the device, and its child without parameters with it.
    monkeypatch.setattr(profiling, "_clock", lambda module: device if module is model.c0 else None)
    with fh.profile(model) as times:
        model(torch.ones(1))
    found = {(each.name, each.device): round(each.own * 1e3, 6) for each in times}
    assert found == {
        ("", "cpu"): 8,  # waiting for c0, which another clock measures
        ("c0", "cuda:0"): 2,
        ("c0.c0", "cuda:0"): 5,
        ("c0.c0", "cpu"): 5,
        ("c1", "cpu"): 3,
    }


@pytest.mark.cuda
@pytest.mark.not_emulated("times")
def test_a_gpu_is_timed_and_not_its_launches() -> None:
    model = nn.Sequential(nn.Linear(4096, 4096), nn.ReLU()).cuda()
    x = torch.randn(4096, 4096, device="cuda")
    model(x)
    with fh.profile(model) as times:
        for _ in range(10):
            model(x)
    assert times["0"].device == "cuda:0"
    assert times["0"].own > 5 * times["1"].own

"""Firing order: priority, registration, `prepend`; and ids."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

import ferrohook as fh
from support.hooks import PHASES
from support.threads import in_threads


class Ordered:
    """A hooked module whose hooks log their invocations."""

    def __init__(self, phase: str) -> None:
        self.phase = phase
        self.hooked = fh.HookedModule(nn.Linear(2, 2))
        self.fired: list[str] = []

    def add(self, name: str, **options: Any) -> fh.typing.HookHandle:
        def hook(*_: Any) -> None:
            self.fired.append(name)

        handle = getattr(self.hooked, PHASES[self.phase])(hook, **options)
        assert isinstance(handle, fh.typing.HookHandle)
        return handle

    def call(self) -> list[str]:
        self.fired.clear()
        self.hooked(torch.ones(1, 2, requires_grad=True)).sum().backward()
        return self.fired.copy()


@pytest.fixture(params=PHASES)
def ordered(request: pytest.FixtureRequest) -> Ordered:
    return Ordered(request.param)


def test_hooks_fire_in_the_order_of_registration(ordered: Ordered) -> None:
    for name in "abcdef":
        ordered.add(name)
    assert ordered.call() == list("abcdef")


def test_prepend_puts_a_hook_ahead_of_all_registered_ones(ordered: Ordered) -> None:
    ordered.add("c")
    ordered.add("b", prepend=True)
    ordered.add("d")
    ordered.add("a", prepend=True)
    assert ordered.call() == list("abcd")


def test_a_higher_priority_fires_first(ordered: Ordered) -> None:
    ordered.add("default")
    ordered.add("low", priority=-1)
    ordered.add("high", priority=10)
    ordered.add("zero", priority=0)
    ordered.add("lowest", priority=-(2**63))
    ordered.add("highest", priority=2**63 - 1)
    assert ordered.call() == ["highest", "high", "default", "zero", "low", "lowest"]


def test_prepend_goes_ahead_of_its_own_priority_only(ordered: Ordered) -> None:
    ordered.add("high", priority=1)
    ordered.add("default")
    ordered.add("low", priority=-1)
    ordered.add("prepended", prepend=True)
    ordered.add("low, prepended", prepend=True, priority=-1)
    ordered.add("high, prepended", prepend=True, priority=1)
    assert ordered.call() == [
        "high, prepended",
        "high",
        "prepended",
        "default",
        "low, prepended",
        "low",
    ]


def test_removing_keeps_the_order_of_the_others(ordered: Ordered) -> None:
    handles = {name: ordered.add(name) for name in "abcdef"}
    for name in "bea":
        handles[name].remove()
    assert ordered.call() == list("cdf")
    ordered.add("g")
    assert ordered.call() == list("cdfg")


def test_a_removed_hook_registered_again_goes_to_the_end(ordered: Ordered) -> None:
    first = ordered.add("a")
    ordered.add("b")
    first.remove()
    ordered.add("a")
    assert ordered.call() == ["b", "a"]


def test_any_mix_keeps_one_total_order(ordered: Ordered) -> None:
    choose = random.Random(0)  # noqa: S311 (no secret)
    expected: list[tuple[int, int, str]] = []
    live: dict[str, fh.typing.HookHandle] = {}
    for number in range(300):
        name = str(number)
        priority, prepend = choose.randint(-2, 2), choose.random() < 0.5
        live[name] = ordered.add(name, priority=priority, prepend=prepend)
        expected.append((-priority, -number if prepend else number, name))
        if choose.random() < 0.4:
            gone = choose.choice(list(live))
            live.pop(gone).remove()
            expected = [each for each in expected if each[2] != gone]
    names = [name for _, _, name in sorted(expected)]
    assert ordered.call() == names
    listed = ordered.hooked.hooks(ordered.phase)
    assert [row.id for row in listed] == [live[name].id for name in names]


def test_hooks_lists_all_phases_in_firing_order() -> None:
    hooked = fh.HookedModule(nn.Linear(2, 2))
    hooks: dict[str, Any] = {phase: lambda *_: None for phase in PHASES}
    for phase in reversed(PHASES):
        getattr(hooked, PHASES[phase])(hooks[phase])
    rows = hooked.hooks()
    assert [row.phase for row in rows] == list(PHASES)
    assert all(row.hook is hooks[row.phase] for row in rows)
    for phase in PHASES:
        assert [row.phase for row in hooked.hooks(phase)] == [phase]


def test_an_unknown_phase_is_refused_with_the_valid_ones() -> None:
    hooked = fh.HookedModule(nn.Linear(2, 2))
    for ask in (hooked.hooks, hooked.clear_hooks):
        with pytest.raises(ValueError, match='"backwards": expected one of forward_pre, forward,'):
            ask("backwards")
        with pytest.raises(fh.HookTypeError, match="phase must be a str, got int"):
            ask(1)  # type: ignore[arg-type]


def test_ids_increase_and_are_unique_across_modules_and_phases() -> None:
    modules = [Ordered(phase) for phase in PHASES]
    handles: list[fh.typing.HookHandle] = []
    for number in range(50):
        handles.extend(module.add(str(number)) for module in modules)
    ids = [handle.id for handle in handles]
    assert ids == sorted(set(ids))
    assert min(ids) > 0


def test_an_id_is_never_reused() -> None:
    ordered = Ordered("forward")
    seen = set()
    for _ in range(1000):
        handle = ordered.add("x")
        assert handle.id not in seen
        seen.add(handle.id)
        handle.remove()
    before = max(seen)
    del ordered
    assert Ordered("backward").add("y").id > before


@pytest.mark.usefixtures("switch_often")
def test_hooks_registered_by_threads_are_ordered_by_id() -> None:
    ordered = Ordered("forward")

    def work(_thread: int) -> list[fh.typing.HookHandle]:
        return [ordered.add("x", prepend=False) for _ in range(100)]

    handles = [handle for each in in_threads(8, work) for handle in each]
    ids = [row.id for row in ordered.hooked.hooks()]
    assert ids == sorted(handle.id for handle in handles)
    assert len(set(ids)) == 800
    # Every thread gets the same order.
    lists = in_threads(4, lambda _thread: [row.id for row in ordered.hooked.hooks()])
    assert lists == [ids] * 4


# Changing the priority


def test_priority_can_be_changed(ordered: Ordered) -> None:
    handles = {name: ordered.add(name) for name in "abc"}
    handles["c"].priority = 1
    assert ordered.call() == list("cab")
    handles["a"].priority = -5
    assert ordered.call() == list("cba")
    assert [row.priority for row in ordered.hooked.hooks()] == [1, 0, -5]


def test_a_hook_returns_to_its_place_with_its_old_priority(ordered: Ordered) -> None:
    handles = {name: ordered.add(name) for name in "abc"}
    handles["p"] = ordered.add("p", prepend=True)
    for name in "bp":
        handles[name].priority = -1
    assert ordered.call() == list("acpb")
    for name in "pb":
        handles[name].priority = 0
    assert ordered.call() == list("pabc")


def test_a_priority_changed_during_a_phase_takes_effect_in_the_next(ordered: Ordered) -> None:
    def swap(*_: Any) -> None:
        last.priority = 5

    getattr(ordered.hooked, PHASES[ordered.phase])(swap)
    ordered.add("middle")
    last = ordered.add("last")
    assert ordered.call() == ["middle", "last"]
    assert ordered.call() == ["last", "middle"]


def test_a_refused_priority_changes_nothing(ordered: Ordered) -> None:
    ordered.add("a")
    handle = ordered.add("b", priority=3)
    for wrong in (1.5, "1", None, True):
        with pytest.raises(fh.HookTypeError, match="priority must be an int, got"):
            handle.priority = wrong  # type: ignore[assignment]
    with pytest.raises(ValueError, match="priority must be between"):
        handle.priority = 2**63
    assert handle.priority == 3
    assert ordered.call() == ["b", "a"]


def test_the_modules_own_torch_hooks_run_inside_for_any_priority() -> None:
    log: list[str] = []
    module = nn.Identity()
    module.register_forward_pre_hook(lambda *_: log.append("torch pre"))
    module.register_forward_hook(lambda *_: log.append("torch forward"))
    hooked = fh.HookedModule(module)
    hooked.register_forward_pre_hook(lambda *_: log.append("pre"), priority=-9)
    hooked.register_forward_hook(lambda *_: log.append("forward"), priority=9)
    hooked(1)
    assert log == ["pre", "torch pre", "torch forward", "forward"]

"""Lifetimes of hooks, handles and modules, and finalisers."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import ferrohook as fh
from support.limits import LIMIT
from support.memory import on_linux, resident
from support.modules import Echo, Module
from support.threads import in_threads

if TYPE_CHECKING:
    from collections.abc import Callable

MIB = 2**20


class Hook:
    """A callable that supports weak references."""

    def __call__(self, *args: Any) -> None: ...


# --- Leaks --------------------------------------------------------------------------------------


def closing_over_the_wrapper(hooked: Module) -> None:
    hooked.register_forward_hook(lambda module, args, output: hooked.inner(output))
    hooked.register_forward_pre_hook(lambda module, args: (hooked.inner, None)[1])


def method_of_the_module(hooked: Module) -> None:
    class_ = type(hooked.inner)
    hooked.register_forward_hook(class_.watch.__get__(hooked.inner))
    hooked.register_forward_hook(class_.watch.__get__(hooked))


def typed(hooked: Module) -> None:
    def observe(input: Any, output: Any) -> None:
        assert hooked.inner is not None

    hooked.register_forward_hook(fh.ForwardHook(observe))
    hooked.register_forward_pre_hook(fh.ForwardPreHook(lambda x: (hooked, x)[1]))
    hooked.register_full_backward_hook(fh.BackwardHook(lambda i, o: (hooked, None)[1]))


def backward(hooked: Module) -> None:
    hooked.register_full_backward_hook(lambda module, i, o: (hooked, None)[1])
    hooked.register_full_backward_pre_hook(lambda module, o: (hooked, None)[1])
    hooked(torch.ones(1, requires_grad=True)).backward()


def wrapper_inside_its_own_module(hooked: Module) -> None:
    hooked.inner.__dict__["wrapper"] = hooked
    hooked.register_forward_hook(lambda module, args, output: None)


def wrapper_as_its_own_hook(hooked: Module) -> None:
    hooked.register_forward_hook(hooked)
    hooked.register_forward_pre_hook(fh.ForwardPreHook(hooked))


def handle_in_the_hook(hooked: Module) -> None:
    handles: list[fh.typing.HookHandle] = []
    handles.append(hooked.register_forward_hook(lambda module, args, output: handles[0].remove()))
    hooked.inner.__dict__["handles"] = handles


class Watching(nn.Module):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value * 2

    def watch(self, module: Any, args: Any, output: Any) -> None: ...


CYCLES = [
    closing_over_the_wrapper,
    method_of_the_module,
    typed,
    backward,
    wrapper_inside_its_own_module,
    wrapper_as_its_own_hook,
    handle_in_the_hook,
]


@on_linux
@pytest.mark.usefixtures("collect_cheaply")
@pytest.mark.parametrize("tie", CYCLES)
def test_ten_thousand_modules_in_cycles_are_freed(tie: Callable[[Module], None]) -> None:
    def make(count: int) -> None:
        made: list[Module] = []
        for _ in range(count):
            made.append(fh.HookedModule(Watching()))
            tie(made[-1])
        alive = [weakref.ref(part) for module in made for part in (module, module.inner)]
        made.clear()
        gc.collect()
        assert [ref for ref in alive if ref() is not None] == []

    make(5_000)  # warms up: allocators keep memory for reuse
    before = resident()
    for _ in range(2):
        make(5_000)
    assert resident() - before < 4 * MIB  # about 400 bytes per module


@on_linux
@pytest.mark.parametrize(("at_once", "rounds"), [(1, 3), (1_000, 10), (100_000, 3)])
def test_a_million_registered_and_removed_hooks_are_freed(at_once: int, rounds: int) -> None:
    hooked: Module = fh.HookedModule(Echo())
    kept = hooked.register_forward_hook(lambda *_: None)

    def churn() -> None:
        watched: list[weakref.ref[Hook]] = []
        for _ in range(100_000 // at_once):
            hook = Hook()
            watched.append(weakref.ref(hook))
            handles = [hooked.register_forward_hook(hook) for _ in range(at_once)]
            for handle in handles:
                handle.remove()
        del hook
        gc.collect()
        assert [ref for ref in watched if ref() is not None] == []

    churn()
    before = resident()
    for _ in range(rounds):
        churn()
    assert resident() - before < rounds * 1.6 * MIB  # live hooks would take ten times that
    assert [hook.id for hook in hooked.hooks()] == [kept.id]
    assert hooked(3) == 3
    assert kept.calls == 1


def test_removed_hooks_among_many_live_ones_are_freed_eventually() -> None:
    hooked: Module = fh.HookedModule(Echo())
    live = [hooked.register_forward_hook(Hook()) for _ in range(1_000)]
    watched: list[weakref.ref[Hook]] = []
    most = 0
    for _ in range(20_000):
        hook = Hook()
        watched.append(weakref.ref(hook))
        hooked.register_forward_hook(hook).remove()
        del hook
        if len(watched) % 100 == 0:
            watched = [ref for ref in watched if ref() is not None]
            most = max(most, len(watched))
    assert most <= len(live) + 100
    assert len(hooked.hooks()) == len(live)


def test_a_scope_drops_what_it_would_release_once_that_is_released() -> None:
    model = nn.Sequential(nn.Identity())
    with fh.scope() as scope:
        attachments = []
        for _ in range(1000):
            group = fh.register(model, "0", Hook(), scope=scope)
            group.remove()
            attachments.append(group.attachment)
            del group
        references = [sys.getrefcount(each) for each in attachments]
    assert references.count(references[-1]) < 100  # the scope has the last one still


@on_linux
def test_ended_threads_leave_nothing_behind() -> None:
    hooked: Module = fh.HookedModule(Echo())
    counted = hooked.register_forward_hook(lambda *_: None)

    def work() -> None:
        with hooked.register_forward_hook(lambda *_: None):
            hooked(None)

    def start(count: int) -> None:
        for _ in range(count):
            threads = [threading.Thread(target=work) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(LIMIT)

    start(100)
    before = resident()
    start(500)
    gc.collect()
    assert resident() - before < 16 * MIB
    assert counted.calls == 4 * 600
    assert len(hooked.hooks()) == 1


# --- Lifetimes ----------------------------------------------------------------------------------


def test_dropping_the_handle_leaves_the_hook_registered() -> None:
    hooked: Module = fh.HookedModule(Echo())
    seen: list[Any] = []
    handle = hooked.register_forward_hook(lambda module, args, output: seen.append(output))
    gone = weakref.ref(handle)
    del handle
    gc.collect()
    assert gone() is None
    hooked(5)
    assert seen == [5]
    assert [hook.calls for hook in hooked.hooks()] == [1]


def test_the_registry_alone_keeps_a_hook_alive_until_it_is_removed() -> None:
    hooked: Module = fh.HookedModule(Echo())
    hooks = [Hook() for _ in range(4)]
    watched = [weakref.ref(hook) for hook in hooks]
    handles = [hooked.register_forward_hook(hook) for hook in hooks]
    hooks.clear()
    gc.collect()
    assert all(ref() is not None for ref in watched)
    hooked(None)  # the snapshot of the call does not keep hooks alive
    handles[0].remove()
    gc.collect()
    assert [ref() is None for ref in watched] == [True, False, False, False]
    hooked.clear_hooks("forward")
    gc.collect()
    assert [ref() is None for ref in watched] == [True] * 4


def test_handles_keep_neither_the_hook_nor_the_module_alive() -> None:
    inner = Echo()
    hooked: Module = fh.HookedModule(inner)
    hook = Hook()
    handles = [hooked.register_forward_hook(hook), hooked.register_forward_pre_hook(hook)]
    hooked(None)
    watched: list[weakref.ref[object]] = [weakref.ref(each) for each in (inner, hooked, hook)]
    del inner, hooked, hook
    gc.collect()
    assert [ref() for ref in watched] == [None] * 3

    for handle in handles:
        assert handle.calls == 1
        handle.disable()
        handle.enable()
        handle.priority = 3
        handle.remove()
        handle.remove(wait=True)
        assert handle.removed
        assert f"id={handle.id}" in repr(handle)


def test_into_inner_frees_the_hooks() -> None:
    hooked: Module = fh.HookedModule(Echo())
    hook = Hook()
    hooked.register_forward_hook(hook)
    gone = weakref.ref(hook)
    del hook
    inner = hooked.into_inner()
    gc.collect()
    assert gone() is None
    assert inner(3) == 3


@pytest.mark.frees_classes
def test_a_class_that_refers_to_its_wrapped_instance_is_freed_with_it() -> None:
    def make() -> list[weakref.ref[object]]:
        class Net(nn.Module):
            def forward(self, value: Any) -> Any:
                return value if hooked.training else None

        hooked = fh.HookedModule(Net())
        hooked.register_forward_hook(lambda *_: None)
        assert hooked(3) == 3
        return [weakref.ref(Net), weakref.ref(type(hooked)), weakref.ref(hooked)]

    fh.HookedModule(Echo())
    *watched, wrapper = make()
    gc.collect()
    assert wrapper() is None
    assert [ref() for ref in watched if ref() is not fh.HookedModule] == [None] * 2


def test_a_metaclass_is_freed_with_its_classes() -> None:
    class Meta(type):
        pass

    class Mine(nn.ReLU, metaclass=Meta):
        pass

    first, second = Mine(), Mine()
    with fh.instrument(first):
        fh.HookedModule(second)(torch.ones(1))
        assert type(type(first)) is type(type(fh.HookedModule(second)))
    freed = weakref.ref(Meta)
    del Meta, Mine, first, second
    gc.collect()
    assert freed() is None


def test_a_module_may_lose_its_last_reference_during_a_call() -> None:
    held: list[Module] = [fh.HookedModule(Echo())]
    gone = weakref.ref(held[0])
    seen: list[Any] = []

    def drop(module: Any, args: Any) -> None:
        held.clear()
        gc.collect()

    held[0].register_forward_pre_hook(drop)
    held[0].register_forward_hook(lambda module, args, output: seen.append(output))
    assert held.pop()(7) == 7
    assert seen == [7]
    gc.collect()
    assert gone() is None


def test_a_hook_may_lose_its_last_reference_while_it_runs() -> None:
    hooked: Module = fh.HookedModule(Echo())

    class Once:
        def __init__(self) -> None:
            self.handle = hooked.register_forward_hook(self)

        def __call__(self, module: Any, args: Any, output: Any) -> Any:
            module.clear_hooks()
            gc.collect()
            assert self.handle.removed
            return output + 1

    gone = weakref.ref(Once())
    assert gone() is not None
    assert hooked(1) == 2
    gc.collect()
    assert gone() is None
    assert hooked(1) == 1


# --- Finalisers ---------------------------------------------------------------------------------


class Cycle:
    """A cycle: only the collector frees it."""

    def __init__(self, finalise: Callable[[], object]) -> None:
        self.itself = self
        self.finalise = finalise


class FinalisedCycle(Cycle):
    def __del__(self) -> None:
        self.finalise()


def leave_garbage(how: str, finalise: Callable[[], object]) -> None:
    if how == "__del__":
        FinalisedCycle(finalise)
    else:
        weakref.finalize(Cycle(finalise), finalise)


@pytest.mark.parametrize("how", ["__del__", "weakref.finalize"])
def test_a_finaliser_registers_and_removes_during_a_collection(how: str) -> None:
    hooked: Module = fh.HookedModule(Echo())
    old = hooked.register_forward_hook(lambda module, args, output: output + 100)
    new: list[fh.typing.HookHandle] = []

    def finalise() -> None:
        old.remove()
        new.append(hooked.register_forward_hook(lambda module, args, output: output + 1))
        new.append(hooked.register_forward_hook(lambda module, args, output: output + 1))
        new[1].remove(wait=True)
        assert hooked(0) == 1

    leave_garbage(how, finalise)
    gc.collect()
    assert old.removed
    assert hooked(1) == 2
    assert [hook.id for hook in hooked.hooks()] == [new[0].id]


@pytest.mark.parametrize("phase", ["forward_pre", "forward"])
@pytest.mark.parametrize("how", ["__del__", "weakref.finalize"])
def test_a_collection_inside_a_hook_finalises_into_the_same_module(how: str, phase: str) -> None:
    hooked: Module = fh.HookedModule(Echo())
    fired: list[str] = []

    def register(name: str, body: Callable[[], object]) -> fh.typing.HookHandle:
        def hook(module: Any, args: Any, output: Any = None) -> None:
            fired.append(name)
            body()

        if phase == "forward":
            return hooked.register_forward_hook(hook)
        return hooked.register_forward_pre_hook(hook)

    def finalise() -> None:
        later.remove()
        register("new", lambda: None)

    leave_garbage(how, finalise)
    register("collects", gc.collect)
    later = register("later", lambda: None)
    hooked(None)
    assert fired == [
        "collects"
    ]  # `later` was removed before its turn, `new` was registered during the phase
    hooked(None)
    assert fired == ["collects", "collects", "new"]


@pytest.mark.usefixtures("collect_cheaply")
def test_a_collection_may_start_at_any_allocation() -> None:
    hooked: Module = fh.HookedModule(Echo())
    finalised = 0

    def finalise() -> None:
        nonlocal finalised
        finalised += 1
        with hooked.register_forward_hook(lambda *_: None, prepend=True):
            hooked.hooks()

    rounds = 500
    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for number in range(rounds):
            leave_garbage("__del__", finalise)
            handle = hooked.register_forward_hook(
                lambda module, args, kwargs, output: output + 1, with_kwargs=True
            )
            assert hooked(number) == number + 1
            assert len(hooked.hooks()) == 1
            handle.remove()
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    assert finalised == rounds
    assert hooked.hooks() == []


class Restless:
    """A hook whose finaliser removes one hook and tries to register another."""

    def __init__(self, hooked: Module, gone: list[int]) -> None:
        self.hooked = weakref.ref(hooked)
        self.gone = gone
        self.removes = hooked.register_forward_hook(lambda *_: None)

    def __call__(self, module: Any, args: Any, output: Any) -> None: ...

    def __del__(self) -> None:
        self.removes.remove()
        hooked = self.hooked()
        if hooked is not None:
            with contextlib.suppress(fh.HookError):
                hooked.register_forward_hook(Hook())
            hooked.hooks()
        self.gone.append(self.removes.id)


@pytest.mark.parametrize("end", ["remove", "clear", "into_inner", "module goes"])
def test_a_hook_whose_finaliser_uses_the_module_it_hooks(end: str) -> None:
    hooked: Module = fh.HookedModule(Echo())
    gone: list[int] = []
    handles = [hooked.register_forward_hook(Restless(hooked, gone)) for _ in range(10)]
    assert gone == []
    hooked(None)
    if end == "remove":
        for handle in handles:
            handle.remove()
        gc.collect()
        assert len(hooked.hooks()) == 10
    elif end == "clear":
        hooked.clear_hooks()
        gc.collect()
        assert len(hooked.hooks()) == 10
    elif end == "into_inner":
        hooked.into_inner()
    else:
        del hooked
    gc.collect()
    assert len(gone) == 10


def test_finalisers_in_threads_that_collect_garbage() -> None:
    hooked: Module = fh.HookedModule(Echo())
    threads, each = 4, 200
    finalised: list[None] = []

    def finalise() -> None:
        hooked.register_forward_hook(lambda *_: None).remove()
        finalised.append(None)

    def work(_thread: int) -> None:
        for number in range(each):
            leave_garbage("__del__", finalise)
            with hooked.register_forward_hook(Hook()):
                assert hooked(number) == number
            if number % 50 == 0:
                gc.collect()

    in_threads(threads, work)
    gc.collect()
    assert len(finalised) == threads * each
    assert hooked.hooks() == []

"""Cross-talk: threads and tasks that share one model, each with its own steering and captures.

Expected results come from single-threaded runs of a plain copy with PyTorch's hooks. All values are
integers, so sums are exact in any order.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import gc
import queue
import random
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from torch import nn

import ferrohook as fh
from ferrohook._core import Dispatcher
from support.amounts import amount
from support.internals import in_no_scope
from support.limits import LIMIT
from support.threads import in_threads, run_together

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

THREADS = 4
CALLS = amount(100, whole=300)
"""Calls of each thread."""
LAYERS = [f"layers.{index}" for index in range(4)]
FAILS = 2
"""Index of the layer at which failing calls raise."""


# --- Expected results ---------------------------------------------------------------------------


class Stack(nn.Module):
    """Linear layers with integer weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4).double() for _ in LAYERS)
        for parameter in self.parameters():
            parameter.requires_grad_(False).copy_(torch.randint(-2, 3, parameter.shape))

    def forward(self, x: torch.Tensor, error: BaseException | None = None) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            if index == FAILS and error is not None:
                raise error
            x = layer(x)
        return x


def make_input(thread: int, call: int) -> torch.Tensor:
    return torch.tensor([[thread + 1, call, call % 7, 1]], dtype=torch.float64)


def steered_layer(thread: int) -> str:
    # Two threads steer one layer, two another.
    return LAYERS[1 + thread % 2]


class Steering:
    """Forward hook of one thread, with a call count."""

    def __init__(self, thread: int) -> None:
        self.thread = thread
        self.calls = 0

    def __call__(self, _module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return output * (self.thread + 2) + self.thread


class Right(NamedTuple):
    output: torch.Tensor
    activations: dict[str, torch.Tensor]

    def check(self, output: torch.Tensor, acts: Any) -> bool:
        return (
            torch.equal(output, self.output)
            and list(acts) == LAYERS
            and all(torch.equal(acts[name], self.activations[name]) for name in LAYERS)
        )


@pytest.fixture(scope="module")
def stack() -> Stack:
    torch.manual_seed(0)
    return Stack()


@pytest.fixture(scope="module")
def right(stack: Stack) -> list[list[Right]]:
    """Expected results by thread and call."""
    seen: dict[str, torch.Tensor] = {}

    def run(plain: Stack, thread: int, call: int) -> Right:
        output = plain(make_input(thread, call))
        return Right(output, dict(seen))

    results: list[list[Right]] = []
    for thread in range(THREADS):
        plain = copy.deepcopy(stack)
        plain.get_submodule(steered_layer(thread)).register_forward_hook(Steering(thread))
        for name in LAYERS:
            plain.get_submodule(name).register_forward_hook(
                lambda _module, _args, output, name=name: seen.update({name: output})
            )
        results.append([run(plain, thread, call) for call in range(CALLS)])
    different = {str(each) for calls in results for each in calls}
    assert len(different) == THREADS * CALLS
    return results


KINDS = ("instrumented", "plain", "HookedModule")


@pytest.fixture(params=KINDS)
def model(stack: Stack, request: pytest.FixtureRequest) -> Iterator[Stack]:
    """The shared model; asserts that the test left nothing behind."""
    shared = copy.deepcopy(stack)
    if request.param == "instrumented":
        with fh.instrument(shared):
            yield shared
    elif request.param == "plain":
        yield shared
    else:
        hooked = [fh.HookedModule(layer) for layer in shared.layers]
        for index, layer in enumerate(hooked):
            shared.layers[index] = layer
        yield shared
        assert [layer.hooks() for layer in hooked] == [[]] * len(LAYERS)
        for index, layer in enumerate(hooked):
            shared.layers[index] = layer.into_inner()
    assert in_no_scope()
    for module in shared.modules():
        assert type(module) in {Stack, nn.ModuleList, nn.Linear}
        assert Dispatcher.KEY not in vars(module)
        assert not module._forward_hooks


# --- Threads ------------------------------------------------------------------------------------


def a_scope_for_each_call(model: Stack, thread: int, right: list[Right]) -> int:
    rights = 0
    for call in range(CALLS):
        steering = Steering(thread)
        with (
            fh.scope() as scope,
            fh.register(model, steered_layer(thread), steering, scope=scope) as group,
            fh.capture(model, "layers.*") as acts,
        ):
            output = model(make_input(thread, call))
        assert steering.calls == group.calls == 1
        rights += right[call].check(output, acts)
    return rights


def one_scope_for_all_calls(model: Stack, thread: int, right: list[Right]) -> int:
    steering = Steering(thread)
    with (
        fh.scope() as scope,
        fh.register(model, steered_layer(thread), steering, scope=scope) as group,
        fh.capture(model, "layers.*", calls="all") as acts,
    ):
        outputs = [model(make_input(thread, call)) for call in range(CALLS)]
    assert steering.calls == group.calls == CALLS
    assert [len(acts[name]) for name in acts] == [CALLS] * len(LAYERS)
    return sum(
        right[call].check(output, {name: acts[name][call] for name in acts})
        for call, output in enumerate(outputs)
    )


def scopes_that_take_their_hooks_along(model: Stack, thread: int, right: list[Right]) -> int:
    rights = 0
    for call in range(CALLS):
        with fh.scope() as scope:
            group = fh.register(model, steered_layer(thread), Steering(thread), scope=scope)
            with fh.capture(model, "layers.*") as acts:
                output = model(make_input(thread, call))
        assert group.removed
        assert group.calls == 1
        rights += right[call].check(output, acts)
    return rights


def runs(model: Stack, thread: int, right: list[Right]) -> int:
    steering = Steering(thread)
    hooks = {steered_layer(thread): steering}
    results = [
        fh.run(model, make_input(thread, call), hooks=hooks, capture="layers.*")
        for call in range(CALLS)
    ]
    assert steering.calls == CALLS
    return sum(right[call].check(*result) for call, result in enumerate(results))


WAYS = (a_scope_for_each_call, one_scope_for_all_calls, scopes_that_take_their_hooks_along, runs)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("interval", [5e-3, 1e-6], ids=["as usual", "switching often"])
def test_threads_with_their_own_steering_and_captures(
    model: Stack,
    right: list[list[Right]],
    way: Callable[..., int],
    interval: float,
    switch_often: None,
) -> None:
    sys.setswitchinterval(interval)  # the fixture restores the previous interval
    rights = in_threads(THREADS, lambda thread: way(model, thread, right[thread]))
    assert rights == [CALLS] * THREADS


@pytest.mark.usefixtures("switch_often")
def test_calls_outside_of_the_scopes_run_without_hooks(
    model: Stack, stack: Stack, right: list[list[Right]]
) -> None:
    plain = [copy.deepcopy(stack)(make_input(0, call)) for call in range(CALLS)]
    assert not any(torch.equal(output, right[0][call].output) for call, output in enumerate(plain))
    rights: list[int] = []

    def call_plainly() -> None:
        rights.append(
            sum(torch.equal(model(make_input(0, call)), plain[call]) for call in range(CALLS))
        )

    run_together(
        *(
            lambda thread=thread: a_scope_for_each_call(model, thread, right[thread])
            for thread in range(THREADS)
        ),
        call_plainly,
        call_plainly,
    )
    assert rights == [CALLS] * 2


# --- Tasks --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("switch_often")
def test_tasks_with_their_own_steering_and_captures(model: Stack, right: list[list[Right]]) -> None:
    async def task(thread: int) -> int:
        rights = 0
        steering = Steering(thread)
        layer = steered_layer(thread)
        with fh.scope() as scope, fh.register(model, layer, steering, scope=scope) as group:
            for call in range(CALLS):
                with fh.capture(model, "layers.*") as acts:
                    # On the event loop's thread and on a worker thread.
                    if call % 3 == 0:
                        await asyncio.sleep(0)
                        output = model(make_input(thread, call))
                        await asyncio.sleep(0)
                    else:
                        output = await asyncio.to_thread(model, make_input(thread, call))
                rights += right[thread][call].check(output, acts)
        assert steering.calls == group.calls == CALLS
        return rights

    async def tasks() -> list[int]:
        return await asyncio.gather(*map(task, range(THREADS)))

    assert asyncio.run(asyncio.wait_for(tasks(), LIMIT)) == [CALLS] * THREADS


# --- Failures -----------------------------------------------------------------------------------


class FailureError(Exception):
    pass


class Halt(BaseException):
    pass


@pytest.mark.usefixtures("switch_often")
def test_random_exceptions_reach_only_their_own_caller(
    model: Stack, right: list[list[Right]]
) -> None:
    always: list[None] = []
    everywhere = fh.register(model, "", lambda *_: always.append(None), always_call=True)

    def work(thread: int) -> tuple[int, int]:
        chance = random.Random(thread)  # noqa: S311
        rights = failed = 0
        for call in range(CALLS):
            where = chance.choice(["nowhere", "forward_pre", "forward", "model"])
            error = chance.choice([FailureError, Halt])(thread, call)

            def fail(*_: Any, error: BaseException = error) -> None:
                raise error

            caught: BaseException | None = None
            output = torch.empty(0)
            try:
                with fh.scope() as scope:
                    layer = steered_layer(thread)
                    steering = fh.register(model, layer, Steering(thread), scope=scope)
                    groups = [steering]
                    if where in {"forward_pre", "forward"}:
                        # Before the steering, if that is on the same layer.
                        groups.append(
                            fh.register(
                                model, LAYERS[FAILS], fail, phase=where, scope=scope, prepend=True
                            )
                        )
                    try:
                        with fh.capture(model, "layers.*", copy="clone") as acts:
                            output = model(
                                make_input(thread, call), error if where == "model" else None
                            )
                    finally:
                        for group in groups:
                            group.remove()
            except (FailureError, Halt) as raised:
                caught = raised
            own = right[thread][call]
            if where == "nowhere":
                assert caught is None
                rights += own.check(output, acts)
            else:
                assert caught is error
                # Earlier captures are kept and correct.
                assert list(acts) == LAYERS[:FAILS]
                rights += all(torch.equal(acts[name], own.activations[name]) for name in acts)
                failed += 1
        return rights, failed

    results = in_threads(THREADS, work)
    assert [rights for rights, _ in results] == [CALLS] * THREADS
    assert all(CALLS / 2 < failed < CALLS for _, failed in results)
    assert len(always) == everywhere.calls == THREADS * CALLS
    everywhere.remove()


# --- Global hooks -------------------------------------------------------------------------------


@pytest.mark.usefixtures("switch_often")
def test_concurrent_registering_and_removing_of_global_hooks(
    model: Stack, right: list[list[Right]]
) -> None:
    stayed: list[None] = []
    staying = fh.register(model, "", lambda *_: stayed.append(None))
    working = threading.Semaphore(THREADS)
    fired: list[None] = []
    called: list[int] = []

    def work(thread: int) -> int:
        try:
            return a_scope_for_each_call(model, thread, right[thread])
        finally:
            working.acquire()

    def replace(_module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
        fired.append(None)
        return output.clone()

    def come_and_go() -> None:
        chance = random.Random(0)  # noqa: S311
        while working.acquire(blocking=False):
            working.release()
            phase = chance.choice(["forward_pre", "forward"])
            hook = replace if phase == "forward" else lambda *_: fired.append(None)
            priority = chance.choice([-1, 0, 1])
            with fh.instrument(model, "layers.*"):
                group = fh.register(model, "layers.*", hook, phase=phase, priority=priority)
            before = len(fired)
            until = time.monotonic() + 0.05
            while len(fired) == before and time.monotonic() < until:
                time.sleep(1e-4)  # lets other threads start a call on a busy machine
            group.remove(wait=True, timeout=LIMIT)
            gone = len(fired)
            called.append(group.calls)
            assert gone == sum(called)

    own = (functools.partial(work, thread) for thread in range(THREADS))
    assert run_together(*own, come_and_go) == [*[CALLS] * THREADS, None]
    assert len(stayed) == staying.calls == THREADS * CALLS
    assert len(fired) == sum(called) > 0
    staying.remove()


# --- Backward -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("switch_often")
def test_backward_hooks_fire_in_the_scope_of_the_forward_on_any_thread(
    model: Stack, stack: Stack
) -> None:
    def steering(thread: int, seen: list[torch.Tensor]) -> Callable[..., tuple[torch.Tensor]]:
        def steer(_module: Any, grad_input: Any, grad_output: Any) -> tuple[torch.Tensor]:
            seen.append(grad_output[0])
            return (grad_input[0] * (thread + 2) + thread,)

        return steer

    expected: list[tuple[torch.Tensor, torch.Tensor]] = []
    for thread in range(THREADS):
        # Plain layers, whatever the layers of the shared model.
        plain = Stack()
        plain.load_state_dict(stack.state_dict())
        steered: list[torch.Tensor] = []
        layer = plain.get_submodule(steered_layer(thread))
        layer.register_full_backward_hook(steering(thread, steered))
        x = make_input(thread, 0).requires_grad_()
        plain(x).sum().backward()
        assert x.grad is not None
        expected.append((x.grad, steered[0]))
    assert len({str(each) for each in expected}) == THREADS

    inboxes: list[queue.Queue[tuple[torch.Tensor, threading.Event]]] = [
        queue.Queue() for _ in range(THREADS)
    ]

    def work(thread: int) -> int:
        rights = 0
        grad, grad_output = expected[thread]
        for call in range(CALLS):
            seen: list[torch.Tensor] = []
            steer = steering(thread, seen)
            layer = steered_layer(thread)
            with (
                fh.scope() as scope,
                fh.register(model, layer, steer, phase="backward", scope=scope) as group,
            ):
                x = make_input(thread, call).requires_grad_()
                done = threading.Event()
                inboxes[(thread + 1) % THREADS].put((model(x).sum(), done))
                # Runs another thread's backward in this thread's scope.
                loss, others_done = inboxes[thread].get(timeout=LIMIT)
                loss.backward()
                others_done.set()
                assert done.wait(LIMIT)
            assert group.calls == len(seen) == 1
            rights += torch.equal(x.grad, grad) and torch.equal(seen[0], grad_output)
        return rights

    assert in_threads(THREADS, work) == [CALLS] * THREADS


# --- Leaks --------------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "checked": {},
    "clone": {"copy": "clone"},
    "all": {"calls": "all"},
    "gradients": {"grads": True},
    "attached": {"detach": False},
    "attached gradients": {"detach": False, "grads": True},
    "converted": {"dtype": torch.float32, "slice": 0},
    "over budget": {"max_bytes": 100},
}


def tensors_alive() -> int:
    gc.collect()
    return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())


def references(acts: fh.ActivationCache) -> list[weakref.ref[Any]]:
    """Weak references to the captured tensors of all calls."""
    values = [value if isinstance(value, list) else [value] for value in acts.values()]
    return [weakref.ref(value) for calls in values for value in calls]


@pytest.mark.usefixtures("collect_cheaply")
@pytest.mark.parametrize("option", OPTIONS)
def test_captures_and_scopes_keep_no_tensor_alive(model: Stack, option: str) -> None:
    each = 50
    before = tensors_alive()

    def work(thread: int) -> list[weakref.ref[Any]]:
        left: list[weakref.ref[Any]] = []
        for call in range(each):
            x = make_input(thread, call).requires_grad_()
            error = FailureError() if call % 5 == 0 else None
            steering = Steering(thread)
            layer = steered_layer(thread)
            try:
                with (
                    fh.scope() as scope,
                    fh.register(model, layer, steering, scope=scope) as group,
                    fh.capture(model, "layers.*", **OPTIONS[option]) as acts,
                ):
                    model(x, error).sum().backward()
            except (FailureError, fh.errors.CaptureBudgetError) as caught:
                caught.__traceback__ = None
            assert group.removed
            assert len(acts) >= FAILS
            left += [weakref.ref(each) for each in (scope, acts, steering)]
            left += references(acts)
        return left

    left = [reference for thread in in_threads(THREADS, work) for reference in thread]
    assert tensors_alive() == before
    assert len(left) >= 5 * THREADS * each
    assert not any(reference() is not None for reference in left)


@pytest.mark.parametrize("option", [each for each in OPTIONS if each != "attached gradients"])
def test_captured_tensors_are_freed_with_the_cache_without_the_collector(
    model: Stack, option: str
) -> None:
    x = make_input(0, 0).requires_grad_()
    gc.disable()
    try:
        try:
            with fh.capture(model, "layers.*", **OPTIONS[option]) as acts:
                model(x).sum().backward()
        except fh.errors.CaptureBudgetError as caught:
            caught.__traceback__ = None
        left = references(acts)
        assert len(left) >= 3
        assert all(reference() is not None for reference in left)
        del acts
        assert not any(reference() is not None for reference in left)
    finally:
        gc.enable()


def test_captured_copies_are_freed_with_the_cache_while_the_output_lives(model: Stack) -> None:
    with fh.capture(model, "layers.*", copy="clone", grads=True) as acts:
        output = model(make_input(0, 0).requires_grad_())
    left = references(acts)
    assert len(left) == len(LAYERS)
    del acts
    gc.collect()
    assert output.requires_grad
    assert not any(reference() is not None for reference in left)

"""Backward hooks in many threads."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import ferrohook as fh
from support.limits import LIMIT
from support.threads import THREADS, Together, run_together, wait

pytestmark = pytest.mark.usefixtures("switch_often")


def test_backward_hooks_fire_exactly_once_for_each_backward_of_each_thread() -> None:
    each = 100
    hooked = fh.HookedModule(nn.Linear(3, 2))
    counts = [Counter[str]() for _ in range(THREADS)]
    ident: dict[int, int] = {}

    def note(kind: str) -> None:
        counts[ident[threading.get_ident()]][kind] += 1

    def backward_pre(module: Any, grad_output: Any) -> None:
        assert grad_output[0].shape == (1, 2)
        note("backward_pre")

    def backward(module: Any, grad_input: Any, grad_output: Any) -> None:
        assert (grad_input[0].shape, grad_output[0].shape) == ((1, 3), (1, 2))
        note("backward")

    def typed(grad_input: Any, grad_output: Any) -> None:
        assert (grad_input[0].shape, grad_output[0].shape) == ((1, 3), (1, 2))
        note("typed")

    handles = [
        hooked.register_full_backward_pre_hook(backward_pre),
        hooked.register_full_backward_hook(backward),
        hooked.register_full_backward_hook(fh.BackwardHook(typed)),
    ]
    weight = hooked.inner.weight.detach()
    working = threading.Semaphore(THREADS)

    def training(thread: int) -> None:
        ident[threading.get_ident()] = thread
        for _ in range(each):
            x = torch.full((1, 3), float(thread), requires_grad=True)
            (grad,) = torch.autograd.grad(hooked(x).sum(), x)
            assert torch.equal(grad, weight.sum(0, keepdim=True))
        working.acquire()

    def churning() -> None:
        while working.acquire(blocking=False):
            working.release()
            once = hooked.register_full_backward_hook(lambda *_: None, prepend=True)
            once.remove()

    run_together(*(lambda thread=thread: training(thread) for thread in range(THREADS)), churning)

    assert counts == [Counter(backward_pre=each, backward=each, typed=each)] * THREADS
    assert [handle.calls for handle in handles] == [THREADS * each] * 3
    assert len(hooked.hooks()) == 3


def test_backward_hooks_fire_on_other_threads_than_the_forward() -> None:
    each = 25
    hooked = fh.HookedModule(nn.Linear(3, 2))
    threads: Counter[int] = Counter()

    def backward(module: Any, grad_input: Any, grad_output: Any) -> None:
        threads[threading.get_ident()] += 1
        # A hook may also call the module on autograd's thread.
        with torch.no_grad():
            hooked(torch.ones(1, 3))

    handle = hooked.register_full_backward_hook(backward)
    inputs = [torch.ones(1, 3, requires_grad=True) for _ in range(THREADS * each)]
    outputs = [hooked(x).sum() for x in inputs]

    def run_backward(thread: int) -> None:
        for output in outputs[thread::THREADS]:
            output.backward()

    run_together(*(lambda thread=thread: run_backward(thread) for thread in range(THREADS)))

    assert threads[threading.get_ident()] == 0
    assert sum(threads.values()) == handle.calls == THREADS * each
    assert all(x.grad is not None for x in inputs)


def test_removing_a_backward_hook_waits_for_the_thread_in_backward() -> None:
    hooked = fh.HookedModule(nn.Linear(3, 2))
    inside, release = threading.Event(), threading.Event()
    left: list[None] = []

    def backward(module: Any, grad_input: Any, grad_output: Any) -> None:
        with pytest.raises(fh.HookError, match="from inside that hook"):
            handle.remove(wait=True)
        inside.set()
        wait(release)
        left.append(None)

    handle = hooked.register_full_backward_hook(backward)
    output = hooked(torch.ones(1, 3, requires_grad=True)).sum()
    caller = Together(output.backward)
    wait(inside)
    with pytest.raises(TimeoutError):
        handle.remove(wait=True, timeout=0.01)
    assert left == []
    release.set()
    handle.remove(wait=True, timeout=LIMIT)
    assert len(left) == 1
    caller.join()

"""Threads that open many plans on one model: each gets its own, and nothing is left behind."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import ferrohook as fh
from ferrohook._core import frames
from ferrohook.attach.hook_info import hooks_of
from support.amounts import amount
from support.hooks import ignore
from support.internals import find_registry, instrumented
from support.limits import LIMIT
from support.memory import resident
from support.modules import LAYERS, Chain
from support.threads import THREADS, in_thread, in_threads, run_together

PLANS = 50
OPENINGS = amount(2_000, whole=10_000)
"""Openings of each thread."""


def plan_of(number: int) -> fh.Plan:
    """A plan that adds its number at one layer, by an intervention or a Python function."""
    layer = f"layers.{number % LAYERS}"
    vector = torch.full((2,), float(number))
    hook: Any = fh.Add(vector) if number % 2 else lambda _module, _args, output: output + vector
    return fh.Plan(fh.on(layer, hook), fh.keep("layers.*"))


def expected_of(*numbers: int) -> list[float]:
    """Outputs of the layers, with these plans open."""
    added = [
        sum(number for number in numbers if number % LAYERS <= layer) for layer in range(LAYERS)
    ]
    return [layer + 1.0 + more for layer, more in enumerate(added)]


def kept_by(request: fh.typing.Request) -> list[float]:
    return [request.acts[f"layers.{layer}"][0].item() for layer in range(LAYERS)]


def state(model: nn.Module) -> list[Any]:
    return [(type(module), [*vars(module)]) for module in model.modules()]


@pytest.mark.usefixtures("switch_often")
def test_each_opening_gets_its_own_and_leaves_nothing() -> None:
    model = Chain()
    plain = state(model)
    prepared = [plan_of(number).prepare(model) for number in range(PLANS)]
    x = torch.zeros(2)
    alive: list[weakref.ref[Any]] = []
    sizes: list[int] = []

    def measure() -> None:
        gc.collect()
        if sys.platform == "linux":
            sizes.append(resident())

    half = threading.Barrier(THREADS, action=measure)

    def work(thread: int) -> int:
        wrong = 0
        for turn in range(OPENINGS):
            if turn == OPENINGS // 2:
                half.wait(LIMIT)
            number = (thread * 7 + turn) % PLANS
            with prepared[number].open() as request:
                out = model(x)
                if turn % 5 == 0:
                    inner = (number * 3 + 1) % PLANS
                    with prepared[inner].open() as nested:
                        model(x)
                    wrong += kept_by(nested) != expected_of(number, inner)
                    wrong += kept_by(request) != expected_of(number, inner)
                    wrong += model(x)[0].item() != expected_of(number)[-1]
            wrong += out[0].item() != expected_of(number)[-1]
            wrong += kept_by(request) != expected_of(number)
            if turn % 100 == 0:
                alive.append(weakref.ref(request))
                wrong += model(x)[0].item() != LAYERS
        half.wait(LIMIT)
        return wrong

    assert in_threads(THREADS, work) == [0] * THREADS
    gc.collect()
    assert [each for each in alive if each() is not None] == []
    if sizes:
        # An opening that leaks its request would leave 1 KiB or more.
        assert sizes[1] - sizes[0] < 2**21 + THREADS * OPENINGS // 2 * 256
    for each in prepared:
        each.close()
    assert state(model) == plain
    assert [find_registry(module) for module in model.modules()] == [None] * (LAYERS + 2)
    assert frames.get() == ()


@pytest.mark.usefixtures("switch_often")
def test_plans_prepared_and_closed_in_threads_leave_nothing() -> None:
    model = Chain()
    plain = state(model)
    x = torch.zeros(2)

    def work(thread: int) -> int:
        wrong = 0
        for turn in range(60):
            number = (thread * 7 + turn) % PLANS
            with plan_of(number).prepare(model) as prepared:
                for _ in range(3):
                    with prepared.open() as request:
                        wrong += model(x)[0].item() != expected_of(number)[-1]
                    wrong += kept_by(request) != expected_of(number)
        return wrong

    assert in_threads(THREADS, work) == [0] * THREADS
    assert state(model) == plain
    gc.collect()
    assert model(x)[0].item() == LAYERS


def test_a_closed_plan_leaves_other_hooks_and_instrumentation() -> None:
    model = Chain()
    with fh.register(model, "layers.0", ignore):
        prepared = plan_of(1).prepare(model)
        prepared.close()
        assert instrumented(model) == ["layers.0"]
        assert len(hooks_of(find_registry(model.layers[0]))) == 1
        model(torch.zeros(2))
    assert instrumented(model) == []


def test_dropping_a_prepared_plan_closes_it() -> None:
    model = Chain()
    plain = state(model)
    prepared = plan_of(1).prepare(model)
    reference = weakref.ref(prepared)
    assert state(model) != plain
    del prepared
    gc.collect()
    assert reference() is None
    assert state(model) == plain


def test_the_model_of_a_prepared_plan_is_collected() -> None:
    model = Chain()
    prepared = plan_of(1).prepare(model)
    with prepared.open() as request:
        model(torch.zeros(2))
    references = [weakref.ref(module) for module in model.modules()]
    del model
    gc.collect()
    assert [each() for each in references] == [None] * (LAYERS + 2)
    assert prepared.closed
    assert kept_by(request) == expected_of(1)
    assert "a model that is gone" in repr(prepared)
    with pytest.raises(fh.HookError, match="no longer exists"):
        prepared.open()


def test_activations_of_a_dropped_request_are_freed() -> None:
    model = Chain()
    prepared = plan_of(1).prepare(model)
    with prepared.open() as request:
        model(torch.zeros(2))
    value = weakref.ref(request.acts["layers.2"])
    gone = weakref.ref(request)
    assert value() is not None
    gc.disable()
    try:
        del request
        assert gone() is None
        assert value() is None
    finally:
        gc.enable()


def test_a_request_serves_many_threads_at_a_time() -> None:
    model = Chain()
    plan = fh.Plan(fh.on("layers.1", fh.Add(torch.tensor([5.0]))), fh.keep("layers.1", calls="all"))
    with plan.prepare(model) as prepared, prepared.open() as request:

        def work() -> float:
            with request.activate():
                return sum(float(model(torch.zeros(2))[0]) for _ in range(50))

        wrapped = request.wrap(lambda: sum(float(model(torch.zeros(2))[0]) for _ in range(50)))
        assert run_together(*[work] * 4, *[wrapped] * 4) == [9.0 * 50] * 8
        assert in_thread(lambda: float(model(torch.zeros(2))[0])) == 4.0
        assert len(request.acts["layers.1"]) == 400


def test_stop_ends_the_calls_of_its_request_alone() -> None:
    model = Chain()
    stopping = fh.Plan(fh.keep("layers.1", stop=True)).prepare(model)
    full = fh.Plan(fh.keep("layers.3")).prepare(model)
    x = torch.zeros(2)

    def work(thread: int) -> int:
        wrong = 0
        for _ in range(200):
            if thread % 2:
                with stopping.open() as request:
                    wrong += model(x) is not fh.STOPPED
                wrong += request.acts["layers.1"].tolist() != [2.0, 2.0]
            else:
                with full.open() as request:
                    wrong += model(x).tolist() != [4.0, 4.0]
                wrong += request.acts["layers.3"].tolist() != [4.0, 4.0]
        return wrong

    assert in_threads(THREADS, work) == [0] * THREADS


def test_a_byte_budget_is_each_requests_own() -> None:
    model = Chain()
    prepared = fh.Plan(fh.keep("layers.0", calls="all", max_bytes=20)).prepare(model)

    def work(thread: int) -> int:
        with prepared.open() as request:
            model(torch.zeros(2))
            model(torch.zeros(2))
            with pytest.raises(fh.errors.CaptureBudgetError, match="20"):
                model(torch.zeros(2))
        assert isinstance(request.error, fh.errors.CaptureBudgetError)
        return len(request.acts["layers.0"])

    assert in_threads(THREADS, work) == [2] * THREADS


def test_the_captures_of_a_request_share_a_budget() -> None:
    model = Chain()
    entries = (fh.keep("layers.0", calls="all"), fh.keep("layers.1", calls=1, grads=True))
    prepared = fh.Plan(*entries).prepare(model, max_bytes=40)

    def work(thread: int) -> int:
        del thread
        x = torch.zeros(2, requires_grad=True)
        with prepared.open() as request:
            for _ in range(3):  # 8 bytes of the first layer for each call, 8 of the second for all
                model(x)
            y = model(x)
            with pytest.raises(fh.errors.CaptureBudgetError, match="max_bytes=40"):
                y.sum().backward()  # 8 of the gradient
            with pytest.raises(fh.errors.CaptureBudgetError, match=r"layers\.0.*max_bytes=40"):
                model(x)
        return request.acts.nbytes

    assert in_threads(THREADS, work) == [40] * THREADS
    for wrong, error in ((0, ValueError), ("8", fh.HookTypeError)):
        with pytest.raises(error):
            fh.Plan().prepare(model, max_bytes=wrong)  # type: ignore[arg-type]

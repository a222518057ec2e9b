"""The scope of `register` without `scope=`: the one that was entered last."""

from __future__ import annotations

import asyncio
import contextvars
import importlib
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import ferrohook as fh
from ferrohook.rows import sites
from support.hooks import add
from support.limits import LIMIT

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import ThreadPoolExecutor
    from contextlib import AbstractContextManager

X = torch.ones(1, 2)


@pytest.fixture
def model() -> nn.Sequential:
    return nn.Sequential(nn.Identity())


SCOPES: list[Callable[[nn.Module], AbstractContextManager[Any]]] = [
    lambda _model: fh.scope(),
    lambda model: fh.Plan(fh.on("0", fh.Scale(1.0))).prepare(model).open(),
    lambda model: fh.batch({fh.Plan(fh.on("0", fh.Scale(1.0))).prepare(model).open(): [0]}),
]


OBSERVERS: list[Callable[[nn.Module], AbstractContextManager[Any]]] = [
    lambda model: fh.capture(model, "0"),
    fh.nan_watch,
    fh.profile,
]


@pytest.mark.parametrize("enter", SCOPES, ids=["scope", "request", "batch"])
def test_a_hook_registered_in_an_entered_scope_fires_there_alone(
    enter: Callable[[nn.Module], AbstractContextManager[Any]],
    model: nn.Sequential,
    elsewhere: ThreadPoolExecutor,
) -> None:
    with enter(model):
        group = fh.register(model, "0", add(1))
        assert torch.equal(model(X), X + 1)
        assert torch.equal(elsewhere.submit(model, X).result(LIMIT), X)
    assert torch.equal(model(X), X)
    assert (group.removed, group.calls) == (True, 1)
    assert type(model[0]) is nn.Identity


def test_the_innermost_of_nested_scopes_gets_the_hook(model: nn.Sequential) -> None:
    with fh.scope():
        fh.register(model, "0", add(1))
        with fh.scope():
            fh.register(model, "0", add(10))
            assert torch.equal(model(X), X + 11)
        assert torch.equal(model(X), X + 1)
        fh.register(model, "0", add(100))
        assert torch.equal(model(X), X + 101)
    assert torch.equal(model(X), X)


@pytest.mark.parametrize("enter", OBSERVERS, ids=["capture", "watch", "profile"])
def test_a_hook_registered_in_an_observer_belongs_to_the_scope_around_it(
    enter: Callable[[nn.Module], AbstractContextManager[Any]],
    model: nn.Sequential,
    elsewhere: ThreadPoolExecutor,
) -> None:
    with fh.scope():
        with enter(model), fh.capture(model, "0") as acts:
            group = fh.register(model, "0", add(1))
            assert torch.equal(model(X), X + 1)
            assert torch.equal(elsewhere.submit(model, X).result(LIMIT), X)
        assert torch.equal(acts["0"], X + 1)
        assert torch.equal(model(X), X + 1)
    assert group.removed
    with enter(model):
        group = fh.register(model, "0", add(1))
        model(X)
    assert torch.equal(elsewhere.submit(model, X).result(LIMIT), X + 1)
    group.remove()
    assert type(model[0]) is nn.Identity


def test_scope_global_registers_for_all_contexts(
    model: nn.Sequential, elsewhere: ThreadPoolExecutor
) -> None:
    with fh.scope():
        group = fh.register(model, "0", add(1), scope="global")
        assert torch.equal(elsewhere.submit(model, X).result(LIMIT), X + 1)
    assert torch.equal(model(X), X + 1)
    group.remove()
    assert torch.equal(model(X), X)


def test_a_scope_further_out_is_named(model: nn.Sequential) -> None:
    with fh.scope() as outer:
        with fh.scope():
            fh.register(model, "0", add(1), scope=outer)
        assert torch.equal(model(X), X + 1)
    assert torch.equal(model(X), X)


def test_tasks_and_wrapped_functions_register_in_the_scope_they_inherit(
    model: nn.Sequential, elsewhere: ThreadPoolExecutor
) -> None:
    def hooked_call() -> torch.Tensor:
        fh.register(model, "0", add(1))
        y = model(X)
        assert isinstance(y, torch.Tensor)
        return y

    async def served() -> torch.Tensor:
        with fh.scope():
            return await asyncio.to_thread(hooked_call)

    assert torch.equal(asyncio.run(served()), X + 1)
    with fh.scope() as s:
        assert torch.equal(elsewhere.submit(s.wrap(hooked_call)).result(LIMIT), X + 1)
    assert torch.equal(model(X), X)


def test_a_hook_that_registers_does_so_in_the_scope_of_the_call(model: nn.Sequential) -> None:
    def also(_module: nn.Module, _args: object, _output: object) -> None:
        fh.register(model, "0", add(1))

    with fh.scope():
        fh.register(model, "0", also)
        assert torch.equal(model(X), X)
        assert torch.equal(model(X), X + 1)
    assert torch.equal(model(X), X)


def test_a_context_that_outlives_its_scope_registers_for_nobody_by_mistake(
    model: nn.Sequential,
) -> None:
    with fh.scope():
        late = contextvars.copy_context()
    with pytest.raises(fh.HookError, match=r"left in another context.*scope='global'"):
        late.run(fh.register, model, "0", add(1))
    assert torch.equal(model(X), X)
    assert type(model[0]) is nn.Identity
    everywhere = late.run(lambda: fh.register(model, "0", add(1), scope="global"))
    assert torch.equal(model(X), X + 1)
    everywhere.remove()


def test_methods_of_modules_keep_the_meaning_of_pytorch(elsewhere: ThreadPoolExecutor) -> None:
    plain = nn.Identity()
    with fh.instrument(plain):
        for module in (plain, fh.HookedModule(nn.Identity())):
            with fh.scope():
                handle = module.register_forward_hook(add(1))
            assert torch.equal(elsewhere.submit(module, X).result(LIMIT), X + 1)
            assert torch.equal(module(X), X + 1)
            handle.remove()


def test_sites_opened_in_a_scope_stay_when_it_is_left(model: nn.Sequential) -> None:
    with fh.scope():
        opened = sites(model, "0", width=2, max_requests=1, max_rows=1)
    with opened:
        request = fh.Plan(fh.on("0", fh.Add(torch.ones(2)))).prepare(model).open()
        with fh.batch({request: [0]}, size=1):
            assert torch.equal(model(X), X + 1)


def test_metrics_made_in_a_scope_count_every_call(model: nn.Sequential) -> None:
    pytest.importorskip("fastapi")
    service = importlib.import_module("ferrohook.service")
    with fh.scope():
        metrics = service.ModelMetrics(model, "0")
    model(X)
    assert metrics.snapshot()["0"]["calls"] == 1
    metrics.close()


@pytest.mark.parametrize("scope", [1, "outermost", True, fh.scope, ..., None])
def test_other_values_of_scope_are_refused(model: nn.Sequential, scope: Any) -> None:
    with pytest.raises(
        fh.HookTypeError, match=r"scope must be 'innermost', 'global' or the result of scope\(\)"
    ):
        fh.register(model, "0", add(1), scope=scope)
    assert type(model[0]) is nn.Identity
    assert torch.equal(model(X), X)

"""Captures in contexts and threads, and the lifetimes of their tensors."""

from __future__ import annotations

import asyncio
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ferrohook as fh
from support.capture import assert_plain, tensors_of
from support.limits import LIMIT
from support.threads import in_threads

# Contexts and threads


def test_calls_of_another_context_are_not_captured(model: nn.Sequential, x: Tensor) -> None:
    with ThreadPoolExecutor(1) as executor:
        executor.submit(int).result(LIMIT)  # starts the thread before the capture
        with fh.capture(model, "0") as outer, fh.scope() as s:
            # `wrap` takes along the captures around the scope.
            executor.submit(s.wrap(model), x).result(LIMIT)
            executor.submit(model, 2 * x).result(LIMIT)
    assert torch.equal(outer["0"], model[0](x))


def test_the_warning_in_a_thread_pool_names_wrap(model: nn.Sequential, x: Tensor) -> None:
    text = (
        r"^'0', '1' were selected and never ran in this context; for calls in worker threads, use "
        r"wrap: c = capture\(\.\.\.\); with c as acts: pool\.map\(c\.wrap\(model\), inputs\)$"
    )
    with (
        pytest.warns(fh.errors.NeverFiredWarning, match=text),
        ThreadPoolExecutor(1) as pool,
        fh.capture(model, ["0", "1"]),
    ):
        [*pool.map(model, [x, x])]
    # As the warning says.
    c = fh.capture(model, ["0", "1"], calls="all")
    with c as acts, ThreadPoolExecutor(1) as pool:
        [*pool.map(c.wrap(model), [x, x])]
    assert len(acts["0"]) == len(acts["1"]) == 2


def test_the_warning_of_hooks_of_a_scope_names_wrap(model: nn.Sequential) -> None:
    def warned(**options: Any) -> str:
        with (
            pytest.warns(fh.errors.NeverFiredWarning) as caught,
            fh.register(model, "0", lambda *_: None, **options),
        ):
            pass
        (warning,) = caught
        return str(warning.message)

    with fh.scope() as s:
        assert "; for calls in worker threads, use wrap: with scope() as s: " in warned(scope=s)
    assert warned() == "'0' was selected and never ran in this context"  # fires in all threads


def test_the_warning_names_wrap_only_if_no_module_ran(model: nn.Sequential, x: Tensor) -> None:
    with pytest.warns(fh.errors.NeverFiredWarning) as caught, fh.capture(model, ["0", "1"]):
        model[0](x)
    (warning,) = caught
    assert str(warning.message) == "'1' was selected and never ran in this context"


def test_captures_of_tasks_are_isolated(model: nn.Sequential) -> None:
    async def use(number: int) -> bool:
        x = torch.full((1, 3), float(number))
        with fh.capture(model, "0") as acts:
            await asyncio.sleep(0)
            await asyncio.to_thread(model, x)
            await asyncio.sleep(0)
        return torch.equal(acts["0"], model[0](x))

    async def main() -> list[bool]:
        return await asyncio.gather(*map(use, range(10)))

    assert asyncio.run(main()) == [True] * 10
    assert_plain(model)


@pytest.mark.usefixtures("switch_often")
def test_concurrent_captures_of_a_plain_model_are_isolated_and_restore_it(
    model: nn.Sequential,
) -> None:
    xs = [torch.full((1, 3), float(number)) for number in range(4)]
    expected = [model[0](x) for x in xs]

    def work(number: int) -> list[bool]:
        right = []
        for turn in range(60):
            stop = turn % 2 == 0
            with fh.capture(model, ["0", "1"], stop=stop) as acts:
                assert (model(xs[number]) is fh.STOPPED) == stop
            right.append(torch.equal(acts["0"], expected[number]))
        return right

    assert in_threads(4, work) == [[True] * 60] * 4
    assert_plain(model)


def test_exceptions_in_the_model_leave_nothing_behind(model: nn.Sequential, x: Tensor) -> None:
    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    with (
        pytest.raises(KeyboardInterrupt),
        fh.scope() as s,
        fh.capture(model) as acts,
        fh.register(model, "1", fail, scope=s),
    ):
        model(x)
    assert list(acts) == ["0"]
    assert_plain(model)
    assert torch.equal(model(x), model(x))


# Lifetimes


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"copy": "clone", "calls": "all"},
        {"slice": 0, "dtype": torch.float64},
        {"grads": True},
        {"grads": True, "inputs": True, "dtype": torch.float64},
        {"detach": False},
        {"stop": True},
        {"max_bytes": 81},
    ],
)
def test_captures_keep_no_tensor_alive(
    model: nn.Sequential, x: Tensor, options: dict[str, Any]
) -> None:
    freed: list[weakref.ref[Tensor]] = []
    gc.collect()
    gc.disable()  # freed by reference counts alone, without the collector
    try:
        for _ in range(125):
            with fh.scope() as s, fh.capture(model, "2", **options) as acts:
                s.wrap(model)(x)
                freed += map(weakref.ref, tensors_of(acts["2"]))
            del acts, s
        alive = sum(each() is not None for each in freed)
    finally:
        gc.enable()
    assert len(freed) >= 125
    assert alive == 0
    assert_plain(model)


@pytest.mark.parametrize(
    ("what", "options", "live_input"),
    [
        ("2", {"detach": False}, False),
        ("0", {"inputs": True, "copy": "clone"}, True),
    ],
    ids=["undetached", "a live input"],
)
def test_captures_with_gradients_keep_no_tensor_alive(
    model: nn.Sequential, x: Tensor, what: str, options: dict[str, Any], live_input: bool
) -> None:
    x.requires_grad_(live_input)
    freed: list[weakref.ref[Tensor]] = []
    for _ in range(5):
        with fh.capture(model, what, grads=True, **options) as acts:
            model(x).sum().backward()
        freed += map(weakref.ref, tensors_of(acts[what]))
        del acts
    gc.collect()
    assert sum(each() is not None for each in freed) == 0


def test_a_cache_does_not_keep_the_model_alive(x: Tensor) -> None:
    model = nn.Sequential(nn.Linear(3, 4))
    freed = weakref.ref(model)
    with fh.capture(model, "0", grads=True) as acts, torch.no_grad():
        model(x)
    del model
    gc.collect()
    assert freed() is None
    assert acts["0"].shape == (5, 4)

"""Async functions are refused as hooks: nothing would await them."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest
from torch import nn

import ferrohook as fh
from ferrohook.compat.transformer_lens import HookPoint

if TYPE_CHECKING:
    from collections.abc import Callable


async def coroutine(*args: Any, hook: Any = None) -> None: ...


async def generator(*args: Any, hook: Any = None) -> Any:
    yield


class Async:
    async def __call__(self, *args: Any, hook: Any = None) -> None: ...

    async def method(self, *args: Any, hook: Any = None) -> None: ...

    @staticmethod
    async def static(*args: Any, hook: Any = None) -> None: ...

    @classmethod
    async def of_class(cls, *args: Any, hook: Any = None) -> None: ...


REFUSED: dict[str, Any] = {
    "a coroutine function": coroutine,
    "an async generator": generator,
    "an async __call__": Async(),
    "a bound method": Async().method,
    "a static method": Async.static,
    "a class method": Async.of_class,
    "a partial": functools.partial(coroutine, 1),
    "a partial of a partial": functools.partial(functools.partial(generator), 1),
    "a partial of an object": functools.partial(Async()),
    "a partial of a method": functools.partial(Async().method),
}
REGISTER: dict[str, Callable[[Any], Any]] = {
    "register": lambda hook: fh.register(nn.Identity(), "", hook),
    "a scope": lambda hook: fh.register(nn.Identity(), "", hook, scope=fh.scope()),
    "run": lambda hook: fh.run(nn.Identity(), 1, hooks={"": hook}),
    "backward": lambda hook: fh.register(nn.Identity(), "", hook, phase="backward"),
    "a wrapper": lambda hook: fh.HookedModule(nn.Identity()).register_forward_pre_hook(hook),
    "ForwardHook": fh.ForwardHook,
    "ForwardPreHook": fh.ForwardPreHook,
    "BackwardHook": fh.BackwardHook,
    "a hook point": lambda hook: HookPoint().add_hook(hook),
    "a permanent hook": lambda hook: HookPoint().add_perma_hook(hook, "bwd"),
}


@pytest.mark.parametrize("entrance", REGISTER)
@pytest.mark.parametrize("case", REFUSED)
def test_an_async_hook_is_refused(case: str, entrance: str) -> None:
    with pytest.raises(fh.HookTypeError, match=r"got the async function .* would never run$"):
        REGISTER[entrance](REFUSED[case])


def test_nothing_is_registered() -> None:
    model = nn.Identity()
    with pytest.raises(fh.HookTypeError, match=r"^a forward hook must be .* function coroutine: "):
        fh.register(model, "", coroutine)
    assert type(model) is nn.Identity


def test_other_callables_are_accepted() -> None:
    class Sync:
        def __init__(self, *args: Any) -> None: ...

        def __call__(self, *args: Any) -> None: ...

        def method(self, *args: Any) -> None: ...

    def generates(*_: Any) -> Any:
        yield

    @functools.wraps(coroutine)
    def wraps(*_: Any) -> None: ...

    model = nn.Identity()
    hooks = [
        Sync(),
        Sync().method,
        functools.partial(Sync()),
        generates,
        wraps,
        nn.Identity(),
        Sync,
    ]
    for hook in hooks:
        fh.register(model, "", hook).remove()

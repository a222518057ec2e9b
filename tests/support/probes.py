"""Hooks that check and count their own invocations."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import ferrohook as fh
from support.threads import THREADS

if TYPE_CHECKING:
    from support.modules import Module


class Call:
    """State of one call of the mix, passed as its only positional argument."""

    __slots__ = ("fired", "kwargs", "last", "thread")

    def __init__(self, thread: int, scale: int) -> None:
        self.thread = thread
        self.kwargs = {"scale": scale}
        self.fired: list[Probe] = []
        self.last = time.perf_counter_ns()


class Probe:
    """A hook that checks each of its invocations and counts them by thread.

    `call.last` is the time when the previous hook ended or the phase began: a hook removed or
    disabled before it must not be invoked.
    """

    __slots__ = ("__weakref__", "calls", "gone")

    def __init__(self) -> None:
        self.calls = [0] * THREADS
        self.gone: int | None = None

    def note(self, call: Call) -> None:
        gone = self.gone
        assert gone is None or gone >= call.last, "invoked after it was gone"
        self.calls[call.thread] += 1
        call.fired.append(self)
        call.last = time.perf_counter_ns()

    def plain_pre(self, module: Any, args: tuple[Any, ...]) -> Any:
        assert isinstance(module, fh.HookedModule)
        (call,) = args
        self.note(call)

    def kwargs_pre(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert isinstance(module, fh.HookedModule)
        (call,) = args
        assert kwargs == call.kwargs
        self.note(call)

    def typed_pre(self, call: Any) -> Any:
        self.note(call)
        return (call,)

    def plain(self, module: Any, args: tuple[Any, ...], output: Any) -> Any:
        assert isinstance(module, fh.HookedModule)
        (call,) = args
        assert type(output) is int
        self.note(call)

    def kwargs(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        assert isinstance(module, fh.HookedModule)
        (call,) = args
        assert kwargs == call.kwargs
        assert type(output) is int
        self.note(call)

    def typed(self, call: Any, output: Any) -> None:
        assert type(output) is int
        self.note(call)

    def adding(self, module: Any, args: tuple[Any, ...], output: Any) -> Any:
        self.plain(module, args, output)
        return output + 1

    def scaling(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        (call,) = args
        self.kwargs_pre(module, args, kwargs)
        # Later hooks get the new keyword.
        call.kwargs = {"scale": 2 * kwargs["scale"]}
        return args, call.kwargs

    def register(self, hooked: Module, kind: str, **options: Any) -> fh.typing.HookHandle:
        # A bound method: the registry alone keeps the probe alive.
        body = getattr(self, kind)
        if kind in {"kwargs", "kwargs_pre", "scaling"}:
            options["with_kwargs"] = True
        if kind.startswith("typed"):
            body = fh.ForwardPreHook(body) if kind == "typed_pre" else fh.ForwardHook(body)
        if kind == "scaling" or kind.endswith("_pre"):
            return hooked.register_forward_pre_hook(body, **options)
        return hooked.register_forward_hook(body, **options)

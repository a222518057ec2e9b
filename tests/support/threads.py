"""Helpers of the tests of threads."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import nn

import ferrohook as fh

if TYPE_CHECKING:
    from collections.abc import Callable


THREADS = 8
LIMIT = 60.0
"""Seconds that any wait of these tests may take."""
Module: TypeAlias = fh.HookedModule[Any]


class Together:
    """Threads that start from one barrier; `join` raises what any of them raised."""

    def __init__(self, *targets: Callable[[], object]) -> None:
        self._barrier = threading.Barrier(len(targets))
        self._raised: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._run, args=(target,), daemon=True) for target in targets
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, target: Callable[[], object]) -> None:
        try:
            self._barrier.wait(LIMIT)
            target()
        except BaseException as error:  # noqa: BLE001 (join raises it)
            self._raised.append(error)

    def join(self) -> None:
        deadline = time.monotonic() + LIMIT
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if self._raised:
            raise self._raised[0]
        stuck = [thread.name for thread in self._threads if thread.is_alive()]
        assert not stuck, f"still running after {LIMIT} s: {stuck}"


def run_together(*targets: Callable[[], object]) -> None:
    Together(*targets).join()


def wait(event: threading.Event) -> None:
    assert event.wait(LIMIT), f"nothing happened for {LIMIT} s"


class Blocking:
    """A hook that stays inside from `entered` until `release`, and then says that it left."""

    def __init__(self, threads: int = 1) -> None:
        self.entered = threading.Barrier(threads + 1)
        self.release = threading.Event()
        self.left: list[None] = []

    def __call__(self, module: Any, args: tuple[Any, ...], output: Any) -> None:
        self.entered.wait(LIMIT)
        wait(self.release)
        self.left.append(None)


class Echo(nn.Module):
    """Returns its argument without a tensor in sight: these tests are about the hooks."""

    def forward(self, value: Any = None) -> Any:
        return value


class Call:
    """One call of the mix, as its only positional argument: what its hooks saw so far."""

    __slots__ = ("fired", "kwargs", "last", "thread")

    def __init__(self, thread: int, scale: int) -> None:
        self.thread = thread
        self.kwargs = {"scale": scale}
        self.fired: list[Probe] = []
        self.last = time.perf_counter_ns()


class Probe:
    """A hook that checks each of its invocations and counts them by thread.

    `call.last` is when the hook before this one ended, or the phase began: whoever had been
    removed (or disabled) by then must not be invoked.
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
        # What the hooks behind this one are to see.
        call.kwargs = {"scale": 2 * kwargs["scale"]}
        return args, call.kwargs

    def register(self, hooked: Module, kind: str, **options: Any) -> fh.HookHandle:
        # A bound method: the registry alone keeps the probe alive.
        body = getattr(self, kind)
        if kind in {"kwargs", "kwargs_pre", "scaling"}:
            options["with_kwargs"] = True
        if kind.startswith("typed"):
            body = fh.ForwardPreHook(body) if kind == "typed_pre" else fh.ForwardHook(body)
        if kind == "scaling" or kind.endswith("_pre"):
            return hooked.register_forward_pre_hook(body, **options)
        return hooked.register_forward_hook(body, **options)

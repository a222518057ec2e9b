"""`profile`: the time that each module of a model takes by itself."""

# Hooks at the begin and the end of each call keep a stack of the calls that run, one for each
# thread. The time of a call counts for its module, and is taken from its caller's own time. On a
# device times are those between two events on its stream; they are read once many wait, or when
# they are asked for, so that the device is not waited for in between.

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import torch

from ferrohook.attach.priorities import AHEAD_OF_ALL, BEHIND_ALL
from ferrohook.errors import SelectionError
from ferrohook.names.select import select
from ferrohook.registration.register import register
from ferrohook.registration.scopes import Scope
from ferrohook.util.arguments import expect_module
from ferrohook.util.never_trace import never_trace
from ferrohook.util.tables import Printed, frame, text_table
from ferrohook.util.texts import MODEL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pandas as pd
    from torch import nn

    from ferrohook._core import Frame
    from ferrohook.names.select import Selector

MOST_PENDING = 10_000
"""Calls on devices whose times are not read yet."""
MOST_LINES = 30
"""Modules of a printed table."""
_UNITS = {"s": 1.0, "ms": 1e3, "µs": 1e6}
_CPU: Final = torch.device("cpu")


class ModuleTime(NamedTuple):
    """Times of one module."""

    name: str
    kind: str
    """Name of its class."""
    device: str
    """Device by whose events the times were measured, or "cpu"."""
    calls: int
    own: float
    """Seconds in the module and in none of the profiled modules inside."""
    total: float
    """Seconds in the module."""


class _TimedCall:
    """A call of a module that runs, or has run."""

    __slots__ = ("device", "end", "inside", "name", "start")

    def __init__(self, name: str, device: torch.device) -> None:
        self.name = name
        self.device = device
        self.inside: list[_TimedCall] = []
        """Calls of profiled modules inside, on the same device."""
        self.end: Any = None
        self.start = _now(device)

    def seconds(self) -> float:
        """Returns its time, for which a device may be waited for."""
        if self.device == _CPU:
            return float(self.end - self.start) / 1e9
        self.end.synchronize()
        return float(self.start.elapsed_time(self.end)) / 1e3


def _now(device: torch.device) -> Any:
    """Returns the time on the CPU in nanoseconds, or an event on a device's current stream."""
    if device == _CPU:
        return time.perf_counter_ns()
    module = torch.get_device_module(device)
    event = module.Event(enable_timing=True)
    event.record(module.current_stream(device))
    return event


def _clock(module: nn.Module) -> torch.device | None:
    """Returns the device to time a module's calls on; None for its caller's device."""
    for tensor in itertools.chain(module.parameters(recurse=False), module.buffers(recurse=False)):
        device = tensor.device
        has_events = device.type in {"cuda", "xpu"}  # with times, on streams
        return device if has_events else _CPU
    return None


class _Stack(threading.local):
    def __init__(self) -> None:
        self.calls: list[_TimedCall] = []


class Times(Printed):
    """Times of the modules of a model, the largest own times first.

    Iterating yields them as `ModuleTime`. `print` and notebooks show them.
    """

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        self._kinds = {name: module._get_name() for name, module in modules.items()}
        self._stack = _Stack()
        self._lock = threading.Lock()
        self._ended: deque[_TimedCall] = deque()
        self._counted: dict[tuple[str, torch.device], tuple[int, float, float]] = {}

    def _begin(self, name: str, device: torch.device | None) -> None:
        calls = self._stack.calls
        if device is None:
            device = calls[-1].device if calls else _CPU
        calls.append(_TimedCall(name, device))

    def _end(self, name: str) -> None:
        """Ends a call, and those inside it that a module which raised did not."""
        calls = self._stack.calls
        if all(call.name != name for call in calls):
            return  # another hook raised before it began
        while True:
            call = calls.pop()
            call.end = _now(call.device)
            if calls and calls[-1].device == call.device:
                calls[-1].inside.append(call)
            self._ended.append(call)
            if call.name == name:
                break
        if not calls and len(self._ended) >= MOST_PENDING:
            self._count()

    def _count(self) -> None:
        """Adds up the calls that have ended."""
        with self._lock:
            while self._ended:
                call = self._ended.popleft()
                total = call.seconds()
                own = total - sum(each.seconds() for each in call.inside)
                key = call.name, call.device
                calls, all_own, all_total = self._counted.get(key, (0, 0.0, 0.0))
                self._counted[key] = calls + 1, all_own + own, all_total + total

    def __iter__(self) -> Iterator[ModuleTime]:
        self._count()
        found = [
            ModuleTime(name, self._kinds[name], str(device), *counted)
            for (name, device), counted in list(self._counted.items())
        ]
        return iter(sorted(found, key=lambda each: -each.own))

    def __getitem__(self, name: str) -> ModuleTime:
        """Returns the times of one module.

        Raises:
            SelectionError: it was not profiled, or never ran.
        """
        for each in self:
            if each.name == name:
                return each
        ran = ", ".join(repr(each.name) for each in self) or "none"
        msg = f"no call of {name!r} was profiled; profiled modules: {ran}"
        raise SelectionError(msg)

    def to_pandas(self) -> pd.DataFrame:
        """Makes a DataFrame with a line for each module, its times in seconds.

        Raises:
            HookError: the package pandas is not installed.
        """
        return frame(list(self), ModuleTime._fields)

    def _cells(self) -> list[list[str]]:
        times = [*self]
        whole = sum(each.own for each in times) or 1.0
        largest = max((each.total for each in times), default=0.0)
        unit = next((name for name, factor in _UNITS.items() if largest * factor >= 1), "µs")
        factor = _UNITS[unit]
        lines = [
            [
                each.name or MODEL,
                each.kind,
                each.device,
                f"{each.calls}",
                f"{each.own * factor:.2f}",
                f"{each.own / whole:.0%}",
                f"{each.total * factor:.2f}",
            ]
            for each in times[:MOST_LINES]
        ]
        head = ["name", "class", "device", "calls", f"own ({unit})", "share", f"total ({unit})"]
        return [head, *lines]

    def __repr__(self) -> str:
        count = sum(1 for _ in self)
        if not count:
            return "no call was profiled: calls in other contexts are not recorded"
        text = text_table(self._cells(), right=None)
        return text if count <= MOST_LINES else f"{text}\nand {count - MOST_LINES} more modules"


class _Session:
    """Profile of some modules of a model: the tag of its frame."""

    ONCE = "a profile can be entered only once: call profile() again"

    def __init__(self, model: nn.Module, modules: dict[str, nn.Module]) -> None:
        self._model = model
        self._modules = modules

    def begin(self, frame: Frame) -> Times:
        """Times the calls in a scope, until it is left."""
        times = Times(self._modules)
        scope = cast("Scope", frame)
        for name, module in self._modules.items():
            on_begin, on_end = _hooks(times, name, _clock(module))
            # Inside all other hooks, whose time is their caller's.
            register(
                self._model,
                name,
                on_begin,
                phase="forward_pre",
                priority=BEHIND_ALL,
                scope=scope,
            )
            register(
                self._model,
                name,
                on_end,
                priority=AHEAD_OF_ALL,
                always_call=True,
                scope=scope,
            )
        return times

    def left(self, fine: bool) -> None:  # noqa: FBT001 (called from Rust)
        """Does nothing: times are read when they are asked for."""


def _hooks(
    times: Times, name: str, device: torch.device | None
) -> tuple[Callable[..., None], Callable[..., None]]:
    def begin(_module: nn.Module, _args: Any) -> None:
        times._begin(name, device)

    def end(_module: nn.Module, _args: Any, _output: Any) -> None:
        times._end(name)

    return begin, end


# Dynamo of torch 2.13 would compile the hooks' code, and knows no clock.
never_trace(Times, "_begin", "native code calls it")
never_trace(Times, "_end", "native code calls it")


class Profile(Scope):
    """A scope that profiles, see `profile`; its `with` statement gives the times."""

    _takes_hooks = False

    if TYPE_CHECKING:

        def __enter__(self) -> Times: ...  # type: ignore[override]

    def __repr__(self) -> str:
        state = "left" if self.closed else "new" if self._entered is None else "entered"
        return f"<Profile {state}: use `with profile(model) as times:` to get the times>"


def profile(model: nn.Module, what: Selector = None) -> Profile:
    """Measures the time that each module takes by itself, for the calls of this context.

    A context manager that returns the `Times`, to be printed inside the block or after it. A
    module's own time is the time of its calls without the profiled modules inside. Modules whose
    parameters are on a GPU are timed by events on its stream, others by the clock; a module without
    parameters like its caller. Profiling a call takes some microseconds, which count for its
    caller: select fewer modules if they matter. While profiled, a compiled model runs without its
    graphs.

    Args:
        model: any module.
        what: modules to profile, see `select`; None for all.

    Raises:
        SelectionError: `what` matches nothing.
        HookTypeError: `model` is not an `nn.Module`.
        HookError: when entered, if a module cannot be instrumented; or entered for the second time.

    Examples:
        >>> with fh.profile(model) as times:
        ...     model(ids)
        >>> print(times)
    """
    expect_module(model, "profile needs")
    return Profile(_Session(model, select(model, what, called=True)))

"""For services that share one model: hooks of one request alone, time limits, metrics.

Needs the packages of `ferrohook[service]`.

Examples:
    >>> metrics = ModelMetrics(model)
    >>> prometheus_client.REGISTRY.register(metrics)
    >>> @app.post("/embed")
    ... def embed(body: Body, scope: RequestScope) -> Answer:
    ...     fh.register(model, body.modules, body.steer, scope=scope)
    ...     return Answer(model(body.ids))  # steered; other requests are not
"""

from __future__ import annotations

import contextlib
import threading
from contextvars import ContextVar
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from ferrohook.detectors import CallCounter, LatencyDetector
from ferrohook.groups import register
from ferrohook.hook_info import hooks_of
from ferrohook.instrumentation import find_registry, registry_of
from ferrohook.priorities import AHEAD_OF_ALL
from ferrohook.scopes import Scope
from ferrohook.selection import select

try:
    from fastapi import Depends
    from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
    from prometheus_client.registry import Collector
except ModuleNotFoundError as error:
    package = str(error.name).partition(".")[0]
    msg = f"ferrohook.service needs the package {package}: install ferrohook[service]"
    raise ModuleNotFoundError(msg, name=package) from error

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from prometheus_client.metrics_core import Metric
    from torch import nn

    from ferrohook.activations import ActivationCache
    from ferrohook.hook_info import HookInfo
    from ferrohook.selection import Selector

__all__ = [
    "BUCKETS",
    "ModelMetrics",
    "RequestScope",
    "check_deadline",
    "deadline",
    "list_hooks",
    "request_scope",
]

BUCKETS = tuple(step * 10.0**power for power in range(-5, 1) for step in (1, 2.5, 5))
"""The bounds of the latency histograms, in seconds: what modules take is between them."""

_deadline: ContextVar[float] = ContextVar("ferrohook_deadline", default=float("inf"))


async def request_scope() -> AsyncIterator[Scope]:
    """A dependency of FastAPI: a scope that is entered while one request is answered.

    The hooks registered with it fire for the calls that the request makes, on the event loop, in
    the thread pool of `def` endpoints and in `asyncio.to_thread`, and are gone with it.
    """
    # Not a plain generator: FastAPI would enter that in a thread, in a context of its own.
    with Scope() as scope:
        yield scope


RequestScope: TypeAlias = Annotated[Scope, Depends(request_scope)]
"""The type of an endpoint's parameter that is to be the request's scope."""


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Gives the calls of this context so many seconds, see `check_deadline`.

    Inside another one, the earlier of both counts.

    Raises:
        ValueError: `seconds` is below 0, or no number.
    """
    if not seconds >= 0:
        msg = f"a deadline is some seconds from now, at least 0, got {seconds}"
        raise ValueError(msg)
    token = _deadline.set(min(_deadline.get(), monotonic() + seconds))
    try:
        yield
    finally:
        _deadline.reset(token)


def check_deadline(_module: object, _args: object) -> None:
    """A `forward_pre` hook that ends calls whose `deadline` is over.

    Registered where a forward may be given up: on every layer, say.

    Raises:
        TimeoutError: it is over.

    Examples:
        >>> fh.register(model, "layers.*", check_deadline, phase="forward_pre")
        >>> with deadline(2.0):
        ...     model(ids)
    """
    if monotonic() > _deadline.get():
        msg = "the time for this call is over"
        raise TimeoutError(msg)


def list_hooks(model: nn.Module) -> dict[str, list[HookInfo]]:
    """The modules of a model by name, each with the hooks that fire in this context, in order.

    Raises:
        HookTypeError: `model` is no `nn.Module`.
    """
    return {name: hooks_of(find_registry(module)) for name, module in select(model).items()}


class ModelMetrics(Collector):
    """What modules of a model do, for Prometheus.

    - `ferrohook_module_calls_total`: the calls that began,
    - `ferrohook_module_seconds`: a histogram of how long those took that returned,
    - `ferrohook_hook_errors_total`: how often a hook raised, whatever its `on_error`,
    - `ferrohook_captured_bytes_total`: what `add_captured` was told of,

    all but the last by `module`; the model itself goes by the name of its class. A collector, to be
    registered with a `CollectorRegistry` of prometheus_client. It observes natively, without any
    Python in the calls, until it is closed.

    Args:
        model: any module.
        what: which of its modules, see `select`; None for all.
        buckets: the upper bounds of the histogram, in seconds.
        namespace: what the metrics' names begin with, to tell several models apart.

    Raises:
        SelectionError: `what` matches nothing.
        HookError: a module cannot be instrumented.
        ValueError: `buckets` do not ascend.
    """

    def __init__(
        self,
        model: nn.Module,
        what: Selector = None,
        *,
        buckets: Sequence[float] = BUCKETS,
        namespace: str = "ferrohook",
    ) -> None:
        if list(buckets) != sorted(set(buckets)):
            msg = f"buckets ascend, got {list(buckets)}"
            raise ValueError(msg)
        self._bounds = [bound for bound in buckets if bound < float("inf")]
        self._namespace = namespace
        self._captured = 0
        self._counting = threading.Lock()
        self._modules = select(model, what)
        self._root = type(model).__name__
        self._calls = {name: CallCounter() for name in self._modules}
        self._latencies = {name: LatencyDetector() for name in self._modules}
        with contextlib.ExitStack() as stack:
            for name in self._modules:
                began = register(
                    model, name, self._calls[name], phase="forward_pre", priority=AHEAD_OF_ALL
                )
                stack.callback(began.remove)
                stack.callback(register(model, name, self._latencies[name]).remove)
            self._hooks = stack.pop_all()

    def add_captured(self, acts: ActivationCache) -> None:
        """Counts the bytes of a capture."""
        nbytes = acts.nbytes
        with self._counting:
            self._captured += nbytes

    def snapshot(self) -> dict[str, dict[str, Any]]:
        """For each module what `LatencyDetector.snapshot` has, and beside it `began` and `errors`.

        Empty after `close`.
        """
        return {
            name: {
                **self._latencies[name].snapshot(),
                "began": self._calls[name].snapshot()["calls"],
                "errors": registry_of(module).errors,
            }
            for name, module in self._modules.items()
        }

    def collect(self) -> Iterator[Metric]:
        """The metrics as they are now."""
        calls = CounterMetricFamily(
            f"{self._namespace}_module_calls", "The calls that began.", labels=["module"]
        )
        seconds = HistogramMetricFamily(
            f"{self._namespace}_module_seconds",
            "How long the calls took that returned, without the module's own hooks.",
            labels=["module"],
        )
        errors = CounterMetricFamily(
            f"{self._namespace}_hook_errors", "How often a hook raised.", labels=["module"]
        )
        for name, seen in self.snapshot().items():
            labels = [name or self._root]
            calls.add_metric(labels, seen["began"])
            seconds.add_metric(labels, self._cumulative(seen["histogram"]), seen["total"])
            errors.add_metric(labels, seen["errors"])
        yield calls
        yield seconds
        yield errors
        yield CounterMetricFamily(
            f"{self._namespace}_captured_bytes",
            "The bytes of captured activations.",
            value=self._captured,
        )

    def _cumulative(self, ranges: list[tuple[float, float, int]]) -> list[tuple[str, float]]:
        """For each bound how many calls took no longer; fine ranges that it cuts are above it."""
        found: list[tuple[str, float]] = []
        below = place = 0
        for bound in self._bounds:
            while place < len(ranges) and ranges[place][1] <= bound:
                below += ranges[place][2]
                place += 1
            found.append((str(bound), below))
        found.append(("+Inf", below + sum(calls for _, _, calls in ranges[place:])))
        return found

    def close(self) -> None:
        """Ends observing; the modules' metrics are gone, the captured bytes stay."""
        self._hooks.close()
        self._modules = {}

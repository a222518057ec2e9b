"""For services that share one model: plans and hooks of one request, time limits, metrics.

Needs the packages fastapi and prometheus-client.

Examples:
    >>> metrics, plans = ModelMetrics(model), PreparedPlans(model, max_bytes=2**23)
    >>> prometheus_client.REGISTRY.register(metrics)
    >>> class Body(pydantic.BaseModel):
    ...     ids: list[int]
    ...     plan: PlanBody
    >>> @app.post("/embed")
    ... def embed(body: Body) -> Answer:
    ...     with plans.open(body.plan) as request:
    ...         output = model(body.ids)  # steered; other requests are not
    ...     return Answer(output, request.acts)
"""

# A request's scope is an async generator dependency: FastAPI runs it in the task of the request,
# whose context the thread pool copies; it would enter a plain generator in a thread with a context
# of its own. Metrics are native detectors, read on demand. Each registry counts the hooks that
# raised (`Registry.errors`), those of scopes and ignored ones included: a scope's hooks are gone
# before anybody could ask them. A late forward is left by a hook (`check_deadline`), not by
# abandoning its thread, which would go on using a core. A prepared plan closes itself when nobody
# refers to it, so the cache of them counts no requests: each holds the one that it opened.

from __future__ import annotations

import contextlib
import json
import threading
from collections import OrderedDict
from collections.abc import Mapping
from contextvars import ContextVar
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

from ferrohook.arguments import at_least_one, describe, expect, expect_module
from ferrohook.detectors import CallCounter, LatencyDetector
from ferrohook.errors import HookError
from ferrohook.groups import register
from ferrohook.hook_info import hooks_of
from ferrohook.instrumentation import find_registry, registry_of
from ferrohook.plans import Plan
from ferrohook.priorities import AHEAD_OF_ALL
from ferrohook.scopes import Scope
from ferrohook.selection import select
from ferrohook.texts import missing_package

try:
    from fastapi import Depends
    from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
    from prometheus_client.registry import Collector
    from pydantic import PlainSerializer, PlainValidator, WithJsonSchema
except ModuleNotFoundError as error:
    package = str(error.name).partition(".")[0]
    raise ModuleNotFoundError(missing_package(__name__, package), name=package) from error

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from prometheus_client.metrics_core import Metric
    from torch import nn

    from ferrohook.activations import ActivationCache
    from ferrohook.hook_info import HookInfo
    from ferrohook.plans import Prepared, Request
    from ferrohook.selection import Selector

__all__ = [
    "BUCKETS",
    "PLAN_SCHEMA",
    "ModelMetrics",
    "PlanBody",
    "PreparedPlans",
    "RequestScope",
    "check_deadline",
    "deadline",
    "list_hooks",
    "plan_of",
    "request_scope",
]

BUCKETS = tuple(step * 10.0**power for power in range(-5, 1) for step in (1, 2.5, 5))
"""Default bounds of the latency histograms, in seconds."""

_deadline: ContextVar[float] = ContextVar("ferrohook_deadline", default=float("inf"))


async def request_scope() -> AsyncIterator[Scope]:
    """FastAPI dependency: a scope entered for one request.

    Hooks registered with it fire for the request's calls, on the event loop, in the thread pool of
    `def` endpoints and in `asyncio.to_thread`, and are removed at its end.
    """
    # An async generator: FastAPI would enter a plain one in a thread with its own context.
    with Scope() as scope:
        yield scope


RequestScope: TypeAlias = Annotated[Scope, Depends(request_scope)]
"""Type of an endpoint's parameter that receives the request's scope."""


def plan_of(body: Any, **limits: Any) -> Plan:
    """Reads a plan from a request's JSON body: the validator of `PlanBody`.

    Limit the size of bodies too: keys that come twice, and the text's length, are checked in text
    alone.

    Args:
        body: JSON text, or what a framework parsed it into.
        **limits: `tensors` and limits of `Plan.from_json`.

    Raises:
        ValueError: the body is no plan or exceeds a limit; names the entry. As a validator's error
            FastAPI answers it with status 422.

    Examples:
        >>> ShortPlan = Annotated[fh.Plan, PlainValidator(partial(plan_of, max_entries=4))]
    """
    if isinstance(body, Plan):
        return body
    if not isinstance(body, str | bytes | Mapping):
        msg = f"a plan is an object, got {describe(body)}"
        raise ValueError(msg)  # noqa: TRY004 (pydantic's way to refuse)
    return Plan.from_json(body, **limits)


PLAN_SCHEMA: Final = {
    "type": "object",
    "description": "a plan, as `ferrohook.Plan.to_json` writes it",
    "properties": {
        "version": {"const": 1},
        "entries": {"type": "array", "items": {"type": "object"}},
    },
    "required": ["version", "entries"],
}
"""JSON schema of a plan, for OpenAPI."""

PlanBody: TypeAlias = Annotated[
    Plan,
    PlainValidator(plan_of),
    PlainSerializer(lambda plan: json.loads(plan.to_json())),
    WithJsonSchema(PLAN_SCHEMA),
]
"""Type of a field of a pydantic model, or with `Body()` of an endpoint's parameter: a plan."""


class PreparedPlans:
    """Plans prepared for one model, found by content.

    A plan that comes again is opened at constant cost. A dropped one stays open for the requests
    that use it, and is closed after the last of them.

    Args:
        model: any module.
        size: number of plans that stay prepared; the least recently used is dropped.
        max_bytes: budget of one request's captures, beside those of the plan's entries; None for
            no other.

    Raises:
        HookTypeError: an argument has the wrong type.
        ValueError: `size` or `max_bytes` is below 1.
    """

    def __init__(self, model: nn.Module, *, size: int = 64, max_bytes: int | None = None) -> None:
        expect_module(model, "PreparedPlans takes")
        self._model = model
        self._size = at_least_one("size", size)
        self._max_bytes = None if max_bytes is None else at_least_one("max_bytes", max_bytes)
        self._lock = threading.Lock()
        self._prepared: OrderedDict[object, Prepared] | None = OrderedDict()

    @contextlib.contextmanager
    def open(self, plan: Plan) -> Iterator[Request]:
        """Opens a request of a plan for the calls in a block.

        Raises:
            HookError: the plan does not fit the model, see `Plan.prepare`; or `close` was called.
        """
        expect(plan, Plan, "open takes a Plan")
        prepared = self._find(plan)  # this reference keeps it open
        request = prepared.open(max_bytes=self._max_bytes)
        request.stacklevel = 4  # the block, behind two frames of `contextmanager`
        with request:
            yield request

    def _find(self, plan: Plan) -> Prepared:
        key = tuple(entry.content() for entry in plan.entries)
        with self._lock:
            former = self._open_plans().get(key)
            if former is not None and not former.outdated:
                self._open_plans().move_to_end(key)
                return former
        fresh = plan.prepare(self._model)  # outside of the lock: it runs selectors
        dropped = [former]  # closed after the lock is released
        with self._lock:
            found = self._open_plans()
            if key in found and found[key] is not former:
                return found[key]  # another thread was faster
            found[key] = fresh
            found.move_to_end(key)
            while len(found) > self._size:
                dropped.append(found.popitem(last=False)[1])
        return fresh

    def _open_plans(self) -> OrderedDict[object, Prepared]:
        if self._prepared is None:
            msg = "these prepared plans were closed"
            raise HookError(msg)
        return self._prepared

    def __len__(self) -> int:
        return len(self._prepared or ())

    def close(self) -> None:
        """Drops all plans; idempotent."""
        with self._lock:
            dropped, self._prepared = self._prepared, None
        del dropped  # closed after the lock is released


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Sets a time limit for the calls of this context, see `check_deadline`.

    Of nested deadlines the earliest applies.

    Raises:
        ValueError: `seconds` is negative or NaN.
    """
    if not seconds >= 0:
        msg = f"a deadline is at least 0 seconds from now, got {seconds}"
        raise ValueError(msg)
    token = _deadline.set(min(_deadline.get(), monotonic() + seconds))
    try:
        yield
    finally:
        _deadline.reset(token)


def check_deadline(_module: object, _args: object) -> None:
    """A `forward_pre` hook that ends calls whose `deadline` has passed.

    Register it on the modules that may end a forward: on every layer, say.

    Raises:
        TimeoutError: the deadline has passed.

    Examples:
        >>> fh.register(model, "layers.*", check_deadline, phase="forward_pre")
        >>> with deadline(2.0):
        ...     model(ids)
    """
    if monotonic() > _deadline.get():
        msg = "the time for this call is over"
        raise TimeoutError(msg)


def list_hooks(model: nn.Module) -> dict[str, list[HookInfo]]:
    """Lists the hooks that fire in this context, by module name, in firing order.

    Raises:
        HookTypeError: `model` is no `nn.Module`.
    """
    return {name: hooks_of(find_registry(module)) for name, module in select(model).items()}


class ModelMetrics(Collector):
    """Prometheus metrics of a model's modules.

    - `ferrohook_module_calls_total`: calls that began,
    - `ferrohook_module_seconds`: histogram of the duration of calls that returned,
    - `ferrohook_hook_errors_total`: exceptions of hooks, whatever their `on_error`,
    - `ferrohook_captured_bytes_total`: bytes of the captures passed to `add_captured`,

    all but the last by `module`; the model itself has the name of its class. A collector for a
    `CollectorRegistry` of prometheus_client. It observes natively, without Python in the calls,
    until it is closed.

    Args:
        model: any module.
        what: selector of modules, see `select`; None for all.
        buckets: upper bounds of the histogram, in seconds.
        namespace: prefix of the metrics' names, to distinguish models.

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
        self._modules = select(model, what, called=True)
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
        """Returns `LatencyDetector.snapshot` with `began` and `errors` for each module.

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
        """Yields the current metrics."""
        calls = CounterMetricFamily(
            f"{self._namespace}_module_calls", "Calls that began.", labels=["module"]
        )
        seconds = HistogramMetricFamily(
            f"{self._namespace}_module_seconds",
            "Duration of the calls that returned, without the module's own hooks.",
            labels=["module"],
        )
        errors = CounterMetricFamily(
            f"{self._namespace}_hook_errors", "Exceptions that hooks raised.", labels=["module"]
        )
        for name, counts in self.snapshot().items():
            labels = [name or self._root]
            calls.add_metric(labels, counts["began"])
            seconds.add_metric(labels, self._cumulative(counts["histogram"]), counts["total"])
            errors.add_metric(labels, counts["errors"])
        yield calls
        yield seconds
        yield errors
        yield CounterMetricFamily(
            f"{self._namespace}_captured_bytes",
            "Bytes of captured activations.",
            value=self._captured,
        )

    def _cumulative(self, ranges: list[tuple[float, float, int]]) -> list[tuple[str, float]]:
        """Cumulative call counts by bound; a fine range that a bound cuts counts above it."""
        cumulative: list[tuple[str, float]] = []
        below = index = 0
        for bound in self._bounds:
            while index < len(ranges) and ranges[index][1] <= bound:
                below += ranges[index][2]
                index += 1
            cumulative.append((str(bound), below))
        cumulative.append(("+Inf", below + sum(calls for _, _, calls in ranges[index:])))
        return cumulative

    def __repr__(self) -> str:
        calls = sum(counter.snapshot()["calls"] for counter in self._calls.values())
        state = "" if self._modules else ", closed"
        return f"<ModelMetrics of {len(self._calls)} modules, calls={calls}{state}>"

    def close(self) -> None:
        """Stops observing and drops the modules' metrics; the captured bytes stay."""
        self._hooks.close()
        self._modules = {}

"""Prometheus metrics of a model and of a batcher, and the list of a model's hooks."""

# Metrics are native detectors, read on demand. Each registry counts exceptions in hooks
# (`Registry.errors`), also in hooks of scopes and with ignored errors: a scope's hooks are gone
# before a reader could ask them.

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from ferrohook.attach.hook_info import find_registry, hooks_of
from ferrohook.attach.instrument import registry_of
from ferrohook.attach.priorities import AHEAD_OF_ALL
from ferrohook.detectors import CallCounter, LatencyDetector
from ferrohook.names.select import select
from ferrohook.registration.register import register
from ferrohook.util.texts import MODEL, counted

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterator, Sequence

    from prometheus_client.metrics_core import Metric
    from torch import nn

    from ferrohook._core import Registry
    from ferrohook.attach.hook_info import HookInfo
    from ferrohook.captures.cache import ActivationCache
    from ferrohook.names.select import Selector
    from ferrohook.service.batching import Batcher

BUCKETS = tuple(step * 10.0**power for power in range(-5, 1) for step in (1, 2.5, 5))
"""Default bounds of the latency histograms, in seconds."""

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Bounds of the histogram of requests in a forward."""

COUNTS = {
    "rows_seen": "Rows of requests with a plan.",
    "rows_changed": "Rows of requests whose plan has hooks.",
    "hooks_failed": "Requests with a hook that raised an exception, or with an exceeded budget.",
}


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
    - `ferrohook_hooks_disabled`: global hooks that an error has disabled, by their `on_error`,
    - `ferrohook_captured_bytes_total`: bytes of the captures passed to `add_captured`,

    all but the last by `module`; the model itself is `(model)`. A collector for a
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
            msg = f"buckets must be in ascending order, got {list(buckets)}"
            raise ValueError(msg)
        self._bounds = [bound for bound in buckets if bound < float("inf")]
        self._namespace = namespace
        self._captured = 0
        self._counting = threading.Lock()
        self._modules = select(model, what, called=True)
        self._calls = {name: CallCounter() for name in self._modules}
        self._latencies = {name: LatencyDetector() for name in self._modules}
        with contextlib.ExitStack() as stack:
            first: Any = {"phase": "forward_pre", "priority": AHEAD_OF_ALL}
            for name in self._modules:
                began = register(model, name, self._calls[name], scope="global", **first)
                stack.callback(began.remove)
                returned = register(model, name, self._latencies[name], scope="global")
                stack.callback(returned.remove)
            self._hooks = stack.pop_all()

    def add_captured(self, acts: ActivationCache) -> None:
        """Counts the bytes of a capture."""
        nbytes = acts.nbytes
        with self._counting:
            self._captured += nbytes

    def snapshot(self) -> dict[str, dict[str, Any]]:
        """Returns `LatencyDetector.snapshot` with `began`, `errors` and `disabled` for each module.

        Empty after `close`.
        """
        return {
            name: {
                **self._latencies[name].snapshot(),
                "began": self._calls[name].snapshot()["calls"],
                "errors": registry.errors,
                "disabled": sum(
                    handle.failure is not None for _, handle, _ in registry.global_hooks()
                ),
            }
            for name, registry in self._registries()
        }

    def _registries(self) -> Iterator[tuple[str, Registry]]:
        return ((name, registry_of(module)) for name, module in self._modules.items())

    def collect(self) -> Iterator[Metric]:
        """Yields the current metrics."""
        calls = CounterMetricFamily(
            f"{self._namespace}_module_calls", "Calls that started.", labels=["module"]
        )
        seconds = HistogramMetricFamily(
            f"{self._namespace}_module_seconds",
            "Duration of the calls that returned, without the hooks of the module.",
            labels=["module"],
        )
        errors = CounterMetricFamily(
            f"{self._namespace}_hook_errors", "Exceptions that hooks raised.", labels=["module"]
        )
        disabled = GaugeMetricFamily(
            f"{self._namespace}_hooks_disabled",
            "Hooks that were disabled after an error, with on_error='disable'.",
            labels=["module"],
        )
        for name, counts in self.snapshot().items():
            labels = [name or MODEL]
            calls.add_metric(labels, counts["began"])
            seconds.add_metric(labels, self._cumulative(counts["histogram"]), counts["total"])
            errors.add_metric(labels, counts["errors"])
            disabled.add_metric(labels, counts["disabled"])
        yield calls
        yield seconds
        yield errors
        yield disabled
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
        return f"<ModelMetrics of {counted(len(self._calls), 'module')}, calls={calls}{state}>"

    def close(self) -> None:
        """Stops observing and drops the modules' metrics; the captured bytes stay."""
        self._hooks.close()
        self._modules = {}


class BatcherMetrics(Collector):
    """Prometheus metrics of a batcher.

    - `ferrohook_forward_requests`: histogram of the requests in a forward,
    - `ferrohook_rows_seen_total`: rows of requests with a plan,
    - `ferrohook_rows_changed_total`: rows of requests whose plan has hooks,
    - `ferrohook_hooks_failed_total`: requests with a hook that raised, or an exceeded budget,
    - `ferrohook_requests_waiting`: requests that wait for a forward.

    Args:
        batcher: the batcher.
        namespace: prefix of the metrics' names, to distinguish batchers.
    """

    def __init__(self, batcher: Batcher[Any, Any], *, namespace: str = "ferrohook") -> None:
        self._batcher = batcher
        self._namespace = namespace

    def collect(self) -> Iterator[Metric]:
        """Yields the current metrics."""
        counts = self._batcher.snapshot()
        sizes: Counter[int] = counts["sizes"]
        cumulative = [
            (str(bound), sum(times for size, times in sizes.items() if size <= bound))
            for bound in SIZES
        ]
        cumulative.append(("+Inf", sizes.total()))
        requests = HistogramMetricFamily(
            f"{self._namespace}_forward_requests", "Requests that shared a forward."
        )
        requests.add_metric([], cumulative, sum(size * times for size, times in sizes.items()))
        yield requests
        for name, what in COUNTS.items():
            yield CounterMetricFamily(f"{self._namespace}_{name}", what, value=counts[name])
        yield GaugeMetricFamily(
            f"{self._namespace}_requests_waiting",
            "Requests waiting for a forward.",
            value=counts["waiting"],
        )

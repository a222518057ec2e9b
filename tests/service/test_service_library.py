"""`ferrohook.service`: scopes of requests, deadlines and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import pytest
import torch
from torch import nn

import ferrohook as fh

pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")
pytest.importorskip("httpx")

from fastapi import Depends, FastAPI
from fastapi.responses import StreamingResponse
from fastapi.testclient import TestClient
from prometheus_client import CollectorRegistry

from ferrohook.service import (
    ModelMetrics,
    RequestScope,
    check_deadline,
    deadline,
    list_hooks,
    request_scope,
)
from support.interpreters import assert_ends_well, run_with_torch
from support.limits import LIMIT
from support.threads import run_together

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

# The service also reports modules that never ran, as null in the response.
pytestmark = pytest.mark.filterwarnings("ignore::ferrohook.errors.NeverFiredWarning")


class Doubling(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class Odd(Doubling):
    """Cannot be instrumented."""

    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        return super()._call_impl(*args, **kwargs)


def add_one(_module: object, _args: object, output: torch.Tensor) -> torch.Tensor:
    return output + 1


@pytest.mark.parametrize("path", ["/async", "/thread", "/depends", "/to_thread"])
def test_a_request_scope_is_active_in_every_kind_of_endpoint(path: str) -> None:
    model, x = Doubling(), torch.tensor(3.0)
    app = FastAPI()

    @app.get("/async")
    async def by_loop(_scope: RequestScope) -> float:
        fh.register(model, "", add_one)
        return model(x).item()

    @app.get("/thread")
    def by_pool(_scope: RequestScope) -> float:
        fh.register(model, "", add_one)
        return model(x).item()

    @app.get("/depends")
    def by_dependency(scope: Annotated[fh.Scope, Depends(request_scope)]) -> float:
        fh.register(model, "", add_one, scope=scope)
        return model(x).item()

    @app.get("/to_thread")
    async def by_to_thread(_scope: RequestScope) -> float:
        fh.register(model, "", add_one)
        return (await asyncio.to_thread(model, x)).item()

    with TestClient(app) as client:
        for _ in range(2):  # the second request finds nothing of the first
            assert client.get(path).json() == 7
    assert model(x) == 6
    assert type(model) is Doubling


def test_a_request_scope_is_left_when_the_request_fails() -> None:
    model, scopes = Doubling(), []
    app = FastAPI()

    @app.get("/")
    def fail(scope: RequestScope) -> None:
        scopes.append(scope)
        fh.register(model, "", add_one, scope=scope)
        msg = "this request fails"
        raise RuntimeError(msg)

    with TestClient(app) as client, pytest.raises(RuntimeError, match="this request fails") as seen:
        client.get("/")
    assert not hasattr(seen.value, "__notes__")
    assert scopes[0].closed
    assert type(model) is Doubling


def test_a_request_scope_lasts_for_a_streamed_answer() -> None:
    model, x = Doubling(), torch.tensor(3.0)
    app = FastAPI()

    @app.get("/")
    async def stream(scope: RequestScope) -> StreamingResponse:
        fh.register(model, "", add_one, scope=scope)

        async def parts() -> AsyncIterator[str]:
            for _ in range(3):
                await asyncio.sleep(0)
                yield f"{model(x).item():g} "

        return StreamingResponse(parts())

    with TestClient(app) as client:
        assert client.get("/").text == "7 7 7 "
    assert model(x) == 6


def test_the_earliest_deadline_ends_a_call() -> None:
    model, x = nn.Sequential(Doubling(), Doubling()), torch.tensor(3.0)
    with fh.register(model, "*", check_deadline, phase="forward_pre"):
        with deadline(LIMIT):
            assert model(x) == 12
            with deadline(0.0), deadline(LIMIT):
                time.sleep(0.001)
                with pytest.raises(TimeoutError, match=r"deadline exceeded: this call had 0\.0 s"):
                    model(x)
            assert model(x) == 12
        assert model(x) == 12


def test_a_deadline_that_nothing_asked_for_raises_at_the_end_of_its_block() -> None:
    model, x = nn.Sequential(Doubling()), torch.tensor(3.0)
    reached = []
    late = (
        r"deadline exceeded: this call had 0.0 s, and nothing checked the deadline of 0.0 s: pass "
    )
    never = pytest.raises(TimeoutError, match=late)
    with never, deadline(0.0):
        reached.append(model(x))
    assert reached == [6]
    told = pytest.warns(fh.errors.NeverFiredWarning, match=r"nothing checked .* pass the model")
    with told as warned, deadline(LIMIT):
        assert model(x) == 6
    assert warned[0].filename == __file__
    # The block's own exception stays, and an outer limit is the inner one's end.
    with pytest.raises(KeyError), deadline(0.0):
        raise KeyError
    with pytest.raises(TimeoutError), deadline(0.0), deadline(LIMIT):
        model(x)


def test_a_deadline_with_a_model_is_checked_at_each_module() -> None:
    model, x = nn.Sequential(Doubling(), Doubling()), torch.tensor(3.0)
    with deadline(LIMIT, model):
        assert model(x) == 12
    slow = fh.register(model, "0", lambda *_: time.sleep(0.1))
    late = pytest.raises(TimeoutError, match=r"^deadline exceeded: this call had 0\.05 s")
    with slow, late as caught, deadline(0.05, model):
        model(x)
    (note,) = caught.value.__notes__
    assert "of `1` (Doubling)" in note
    assert not fh.hooks(model)


@pytest.mark.parametrize("seconds", [-1.0, float("nan")])
def test_a_deadline_in_the_past_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="at least 0 seconds from now, got"), deadline(seconds):
        pass


def test_hooks_are_listed_by_module() -> None:
    model = nn.Sequential(Doubling(), Doubling())
    with fh.register(model, "1", add_one, priority=2), fh.scope() as scope:
        fh.register(model, "1", check_deadline, phase="forward_pre", scope=scope)
        listed = list_hooks(model)
        model(torch.zeros(1))
    assert list(listed) == ["", "0", "1"]
    assert listed[""] == listed["0"] == []
    assert [info.hook for info in listed["1"]] == [check_deadline, add_one]
    assert listed["1"][1].priority == 2
    with pytest.raises(fh.HookTypeError):
        list_hooks(add_one)  # type: ignore[arg-type]


def collected(*collectors: ModelMetrics) -> dict[tuple[str, ...], float]:
    registry = CollectorRegistry()
    for each in collectors:
        registry.register(each)
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in registry.collect()
        for sample in family.samples
    }


def test_metrics_count_hooks_that_an_error_disabled() -> None:
    model = nn.Sequential(Doubling(), Doubling())
    metrics = ModelMetrics(model)

    def fail(*_: object) -> None:
        raise ValueError

    with fh.register(model, "1", fail, on_error="disable"), fh.register(model, "*", fail) as other:
        other.disable()
        model(torch.zeros(5))
        found = collected(metrics)
        disabled = [found["ferrohook_hooks_disabled", name] for name in ("(model)", "0", "1")]
    assert disabled == [0, 0, 1]


def test_model_metrics() -> None:
    model = nn.Sequential(Doubling(), Doubling())
    metrics = ModelMetrics(model, ["", "1"], buckets=(1e-9, 10.0))
    for _ in range(3):
        with fh.capture(model, "0") as acts:
            model(torch.zeros(5))
        metrics.add_captured(acts)
    found = collected(metrics)
    seconds = found.pop(("ferrohook_module_seconds_sum", "1"))
    assert 0 < seconds < found.pop(("ferrohook_module_seconds_sum", "(model)"))
    assert found == {
        ("ferrohook_captured_bytes_total",): 60,
        **{
            key: value
            for name in ("(model)", "1")
            for key, value in {
                ("ferrohook_module_calls_total", name): 3,
                ("ferrohook_module_seconds_bucket", name, "1e-09"): 0,
                ("ferrohook_module_seconds_bucket", name, "10.0"): 3,
                ("ferrohook_module_seconds_bucket", name, "+Inf"): 3,
                ("ferrohook_module_seconds_count", name): 3,
                ("ferrohook_hook_errors_total", name): 0,
                ("ferrohook_hooks_disabled", name): 0,
            }.items()
        },
    }
    assert repr(metrics) == "<ModelMetrics of 2 modules, calls=6>"
    metrics.close()
    assert repr(metrics) == "<ModelMetrics of 2 modules, calls=6, closed>"
    assert type(model[1]) is Doubling
    assert metrics.snapshot() == {}
    assert collected(metrics)["ferrohook_captured_bytes_total",] == 60


def test_buckets_count_calls_up_to_their_bound() -> None:
    class Sleeping(nn.Module):
        def forward(self, seconds: float) -> None:
            time.sleep(seconds)

    model = Sleeping()
    metrics = ModelMetrics(model, buckets=(0.005, 0.1, float("inf")))
    at_least = (0.0, 0.0, 0.02, 0.15)
    at_most = []
    for seconds in at_least:
        start = time.perf_counter()
        model(seconds)
        at_most.append(time.perf_counter() - start)
    found = collected(metrics)
    assert found["ferrohook_module_seconds_bucket", "(model)", "+Inf"] == 4
    for bound in (0.005, 0.1):
        calls = found["ferrohook_module_seconds_bucket", "(model)", str(bound)]
        # Bounds on any machine: a bucket is 1.6 % wide.
        assert sum(took < bound / 1.02 for took in at_most) <= calls
        assert calls <= sum(took < bound for took in at_least)


@pytest.mark.parametrize("on_error", ["raise", "ignore", "disable"])
def test_errors_are_counted_under_every_policy(
    on_error: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    metrics = ModelMetrics(model)

    def fail(*_args: object) -> None:
        msg = "this hook fails"
        raise ValueError(msg)

    def interrupt(*_args: object) -> None:
        raise KeyboardInterrupt

    caplog.set_level(logging.CRITICAL)
    for phase in ("forward_pre", "forward", "backward_pre", "backward"):
        with fh.scope() as scope:
            fh.register(model, "0", fail, phase=phase, on_error=on_error, scope=scope)
            expected = pytest.raises(ValueError, match="this hook fails")
            with expected if on_error == "raise" else contextlib.nullcontext():
                model(torch.ones(1, 1, requires_grad=True)).sum().backward()
    with fh.register(model, "0", interrupt), pytest.raises(KeyboardInterrupt):
        model(torch.ones(1, 1))
    errors = {name: seen["errors"] for name, seen in metrics.snapshot().items()}
    assert errors == {"": 0, "0": 4}


def test_failed_calls_are_counted_and_have_no_latency() -> None:
    model = Doubling()
    metrics = ModelMetrics(model)
    with pytest.raises(TypeError):
        model(None)
    seen = metrics.snapshot()[""]
    assert (seen["began"], seen["calls"]) == (1, 0)


def test_metrics_of_several_models_differ_by_namespace() -> None:
    one, two = ModelMetrics(Doubling()), ModelMetrics(Doubling(), namespace="other")
    names = {name for name, *_ in collected(one, two)}
    assert {"ferrohook_module_calls_total", "other_module_calls_total"} <= names


def test_metrics_refuse_wrong_modules_and_buckets() -> None:
    model = nn.Sequential(Doubling())
    with pytest.raises(fh.SelectionError):
        ModelMetrics(model, "1")
    with pytest.raises(ValueError, match="buckets must be in ascending order"):
        ModelMetrics(model, buckets=(1.0, 0.5))
    with pytest.raises(fh.HookError, match="cannot be instrumented"):
        ModelMetrics(model.append(Odd()))
    assert type(model[0]) is Doubling


def test_metrics_can_be_read_while_threads_call() -> None:
    model, x = nn.Sequential(Doubling(), Doubling()), torch.zeros(1)
    metrics = ModelMetrics(model)

    def call() -> None:
        for _ in range(500):
            model(x)
            metrics.add_captured(fh.ActivationCache({"x": x}))

    def read() -> None:
        last = 0.0
        for _ in range(20):
            calls = collected(metrics)["ferrohook_module_calls_total", "0"]
            assert calls >= last
            last = calls

    run_together(*[call] * 4, read)
    found = collected(metrics)
    assert found["ferrohook_module_calls_total", "1"] == 2000
    assert found["ferrohook_module_seconds_count", "1"] == 2000
    assert found["ferrohook_captured_bytes_total",] == 2000 * 4


@pytest.mark.parametrize("package", ["fastapi", "prometheus_client"])
def test_missing_packages_are_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(sys.modules):
        if name == "ferrohook.service" or name.startswith(f"{package}."):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    service = importlib.import_module("ferrohook.service")
    assert not hasattr(service, "__wrapped__")
    with pytest.raises(ModuleNotFoundError, match=f"{package}: pip install {package}"):
        _ = service.Batcher


def test_the_service_is_an_attribute_of_the_package() -> None:
    done = run_with_torch("print(fh.service.Batcher.__name__)")
    assert_ends_well(done, "Batcher\n")

"""Recording in threads, tasks and contexts at once."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import ferrohook as fh
from ferrohook.compat.transformers import UnattributedWarning, capture_outputs, uninstall
from support.internals import in_no_scope, registry_of
from support.limits import LIMIT
from support.recording import FLAGS, Helped, Layer, Model, X, expected, same, wrong_calls
from support.threads import in_threads, repeating, run_together


@pytest.mark.usefixtures("switch_often")
def test_threads_record_in_isolation() -> None:
    model = Model()
    assert wrong_calls(model, model) == []


@pytest.mark.usefixtures("switch_often")
def test_concurrent_first_recordings_install_once() -> None:
    def hooks(model: Model) -> list[int]:
        return [len(registry_of(layer).list()) for layer in model.layers]

    alone = Model()
    alone(X, output_hidden_states=True, output_attentions=True)
    for _ in range(20):
        model = Model()
        states, attentions = expected(model)

        def record(_: int, model: Model = model, right: Any = (states, attentions)) -> None:
            output = model(X, output_hidden_states=True, output_attentions=True)
            assert same(output["hidden_states"], right[0])
            assert same(output["attentions"], right[1])

        in_threads(4, record)
        assert hooks(model) == hooks(alone)


@pytest.mark.usefixtures("switch_often")
def test_concurrent_installing_uninstalling_and_recording() -> None:
    model = Model()
    states, _ = expected(model)

    def recording() -> list[int]:
        return [len(model(X, output_hidden_states=True)["hidden_states"]) for _ in range(50)]

    with repeating(lambda: uninstall(model)):
        assert run_together(*[recording] * 3) == [[4] * 50] * 3
    assert same(model(X, output_hidden_states=True)["hidden_states"], states)
    uninstall(model)
    assert type(model.layers[0]) is Layer


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("helped", [(1,), (0, 1, 2)])
def test_a_layer_on_a_worker_thread_is_recorded(*, pooled: bool, helped: tuple[int, ...]) -> None:
    model = Helped()
    model.helped = helped
    states, attentions = expected(model)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result(LIMIT)  # starts the thread before the call
        if pooled:
            model.pool = pool
        for _ in range(3):
            output = model(X, output_hidden_states=True, output_attentions=True)
            assert same(output["hidden_states"], states)
            assert same(output["attentions"], attentions)
            assert list(model(X)) == ["last_hidden_state"]


@pytest.mark.usefixtures("switch_often")
@pytest.mark.parametrize("pooled", [False, True])
def test_worker_threads_of_concurrent_calls(*, pooled: bool) -> None:
    model = Helped()
    # Instruments first: calls that began earlier cannot be attributed as precisely.
    model(X, output_hidden_states=True)
    with ThreadPoolExecutor(2) as pool:
        if pooled:
            model.pool = pool
        assert wrong_calls(model, model, rounds=25) == []


def test_a_layer_called_during_another_threads_recording_is_not_attributed_to_it() -> None:
    model = Model()
    model(X, output_hidden_states=True)
    in_forward, done = threading.Event(), threading.Event()

    def wait(*_args: object) -> None:
        if threading.current_thread() is not threading.main_thread():
            in_forward.set()
            assert done.wait(LIMIT)

    model.layers[0].register_forward_hook(wait)
    with ThreadPoolExecutor(1) as pool:
        recorded = pool.submit(model, X, output_hidden_states=True)
        assert in_forward.wait(LIMIT)
        model.layers[1](X * 5)
        done.set()
        with pytest.raises(UnattributedWarning, match="Layer ran on a thread"):
            recorded.result(LIMIT)  # warnings are errors in this suite


def test_recording_follows_a_copied_context() -> None:
    class Copies(Model):
        @capture_outputs
        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            with ThreadPoolExecutor(1) as pool:
                for layer in self.layers:
                    context = contextvars.copy_context()
                    x = pool.submit(context.run, layer, x * 1).result(LIMIT)
            return {"last_hidden_state": self.norm(x)}

    model = Copies()
    assert same(model(X, output_hidden_states=True)["hidden_states"], expected(model)[0])


def test_a_layer_in_a_fresh_context_on_the_same_thread_is_recorded() -> None:
    class Fresh(Model):
        @capture_outputs
        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            for layer in self.layers:
                x = contextvars.Context().run(layer, x * 1)
            return {"last_hidden_state": self.norm(x)}

    model = Fresh()
    assert same(model(X, output_hidden_states=True)["hidden_states"], expected(model)[0])


def test_tasks_record_in_isolation() -> None:
    model = Model()
    right = [expected(model, X + number) for number in range(4)]
    calls = 0

    async def task(number: int) -> None:
        nonlocal calls
        states, attentions = right[number]
        for place in range(25):
            flags = FLAGS[(place + number) % 4]
            # In the task's own thread and in a worker thread, interleaved with the other tasks.
            for output in (
                model(X + number, **flags),
                await asyncio.to_thread(model, X + number, **flags),
            ):
                assert ("hidden_states" in output) == ("output_hidden_states" in flags)
                assert ("attentions" in output) == ("output_attentions" in flags)
                assert same(output.get("hidden_states", states), states)
                assert same(output.get("attentions", attentions), attentions)
                calls += 1
            await asyncio.sleep(0)

    async def tasks() -> None:
        await asyncio.gather(*map(task, range(4)))

    asyncio.run(tasks())
    assert calls == 200
    assert in_no_scope()


def test_a_task_that_outlives_its_call_records_nothing_more() -> None:
    later: list[asyncio.Task[weakref.ref[torch.Tensor]]] = []

    class Tasks(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            async def again() -> weakref.ref[torch.Tensor]:
                await asyncio.sleep(0)
                return weakref.ref(self.attention(x)[0])

            later.append(asyncio.get_running_loop().create_task(again()))
            return super().forward(x)

    model = Model()
    model.layers = nn.ModuleList(Tasks() for _ in range(3))

    async def call() -> tuple[dict[str, Any], list[weakref.ref[torch.Tensor]]]:
        output = model(X, output_hidden_states=True, output_attentions=True)
        return output, await asyncio.gather(*later)

    output, refs = asyncio.run(call())
    assert [ref() for ref in refs] == [None] * 3
    assert len(output["hidden_states"]) == 4
    assert len(output["attentions"]) == 3


def test_scopes_and_captures_work_during_recording() -> None:
    model = Model()
    states, _ = expected(model)
    with fh.capture(model, "layers.*", calls="all") as acts:
        output = model(X, output_hidden_states=True)
        assert same(output["hidden_states"], states)
    assert torch.equal(acts["layers.0"][0], states[1])
    with fh.scope() as scope:
        fh.register(model, "layers.0", lambda _module, _args, output: output * 0, scope=scope)
        steered = model(X, output_hidden_states=True)["hidden_states"]
    assert not steered[1].any()
    assert same(model(X, output_hidden_states=True)["hidden_states"], states)

"""Ctrl-C at any place restores the model and releases a store's folder.

Python runs signal handlers when it enters a Python function and when a native one returns. An
interrupt is raised at each such place in turn.
"""

from __future__ import annotations

import contextvars
import functools
import gc
import itertools
import time
import traceback
from contextlib import suppress
from typing import TYPE_CHECKING, ClassVar

import pytest
import torch
from torch import nn

import ferrohook as fh
from ferrohook._core import frames
from ferrohook.compat import mi_crow as fi
from ferrohook.compat import transformers as recording
from ferrohook.data import LocalStore, MemoryStore
from support.interpreters import assert_ends_well, run_with_torch
from support.interrupts import interrupted, state
from support.limits import LIMIT

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


X = torch.ones(2, 3)


def observe(*_: object) -> None:
    pass


def instrument(model: nn.Module) -> None:
    with fh.instrument(model):
        model(X)


def instrument_again(model: nn.Module) -> None:
    with fh.instrument(model), fh.instrument(model, "0"):
        model(X)


def register(model: nn.Module) -> None:
    with fh.register(model, "*", observe):
        model(X)


def register_among_others(model: nn.Module) -> None:
    with fh.instrument(model), fh.register(model, "*", observe):
        model(X)


def register_in_scope(model: nn.Module) -> None:
    with fh.scope() as scope:
        fh.register(model, "0", observe, scope=scope)
        fh.register(model, "*", observe, scope=scope).remove()
        model(X)


def refused(model: nn.Module) -> None:
    with suppress(fh.HookTypeError):
        fh.register(model, "*", observe, priority="high")  # type: ignore[arg-type]


def run(model: nn.Module) -> None:
    fh.run(model, X, hooks={"0": observe, "2": observe}, capture="*")


def capture(model: nn.Module) -> None:
    with fh.capture(model, "*"):
        model(X)


def capture_and_stop(model: nn.Module) -> None:
    with fh.capture(model, "0", stop=True):
        model(X)


def collect(model: nn.Module) -> None:
    watched = [fi.LayerActivationDetector("0"), fi.LayerActivationDetector("2"), "1"]
    fh.collect(model, [X, X], watched, MemoryStore(), progress=False)


ACTS = [
    instrument,
    instrument_again,
    register,
    register_among_others,
    register_in_scope,
    refused,
    run,
    capture,
    capture_and_stop,
    collect,
]


# Python prints an interrupt inside a finaliser and continues.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("act", ACTS)
def test_an_interrupt_restores_the_model(act: Callable[[nn.Module], None]) -> None:
    act(small())  # creates objects that are cached for the process
    plain = state(small())
    left = []
    for place in itertools.count():
        model = small()
        landed, interrupt = interrupted(functools.partial(act, model), place)
        if state(model) != plain or frames.get():
            # The state has to be restored while the exception is still alive.
            stack = traceback.extract_tb(interrupt and interrupt.__traceback__)
            left.append([f"{frame.name}, line {frame.lineno}" for frame in stack])
            frames.set(())
        if not landed:
            break
    assert left == []
    assert place > 20


def test_an_interrupt_in_an_audit_hook_restores_the_model() -> None:
    # In a separate process, as audit hooks stay. CPython calls them for each change of class.
    code = """
changes = 0

def interrupt(event, arguments):
    global changes
    if event == "object.__setattr__" and arguments[1] == "__class__":
        changes -= 1
        if changes == 0:
            raise KeyboardInterrupt

def state():
    return [(id(type(module)), [*vars(module)]) for module in model.modules()]

sys.addaudithook(interrupt)
model = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
plain = state()
for place in range(1, 100):
    changes = place
    try:
        with fh.instrument(model):
            pass
    except KeyboardInterrupt:
        assert state() == plain, place
    else:
        break
print(place)
"""
    instrumented_and_restored = 2 * 3
    assert_ends_well(run_with_torch(code), f"{instrumented_and_restored + 1}\n")


def activate(scope: fh.Scope) -> None:
    with scope.activate():
        observe()


def wrap(scope: fh.Scope) -> None:
    scope.wrap(observe)()


def wrap_coroutine(scope: fh.Scope) -> None:
    async def work() -> None:
        observe()

    coroutine = scope.wrap(work)()
    with suppress(StopIteration):
        coroutine.send(None)


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.parametrize("act", [activate, wrap, wrap_coroutine])
def test_an_interrupt_deactivates_a_scope(act: Callable[[fh.Scope], None]) -> None:
    left = []
    for place in itertools.count():
        elsewhere = contextvars.copy_context()
        with fh.scope() as scope:
            landed, _ = interrupted(functools.partial(elsewhere.run, act, scope), place)
        if elsewhere.run(frames.get) != ():
            left.append(place)
        if not landed:
            break
    assert left == []
    assert place > 3


class Recorded(nn.Module):
    """A model with two recorded layers and an unrecorded one."""

    _can_record_outputs: ClassVar = {"hidden_states": nn.Linear}

    def __init__(self) -> None:
        super().__init__()
        self.layers = small()

    @recording.capture_outputs
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"last_hidden_state": self.layers(x)}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_uninstall_works_after_an_interrupt() -> None:
    plain = state(Recorded())
    for place in itertools.count():
        model = Recorded()
        landed, _ = interrupted(functools.partial(model, X, output_hidden_states=True), place)
        if not landed:
            break
        recording.uninstall(model)
        assert state(model) == plain
        assert frames.get() == ()
        assert len(model(X, output_hidden_states=True)["hidden_states"]) == 3
    assert place > 20


def store_two(folder: Path) -> None:
    with LocalStore(folder, max_pending=1) as store:
        for batch in range(2):
            store.put("run", batch, "0", {"x": X})
            store.complete("run", batch)
        store.flush()


def opened(folder: Path) -> LocalStore:
    """Opens the folder once an interrupted, unreturned store has released it."""
    until = time.monotonic() + LIMIT
    while time.monotonic() < until:
        with suppress(fh.errors.StoreError):
            return LocalStore(folder)
        time.sleep(0.01)
    return LocalStore(folder)


@pytest.mark.usefixtures("collect_cheaply")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_releases_the_folder_for_the_next_store(tmp_path: Path) -> None:
    store_two(tmp_path / "once")
    for place in itertools.count():
        folder = tmp_path / str(place)
        landed, _ = interrupted(functools.partial(store_two, folder), place)
        del _
        gc.collect()  # an unclosed store is closed by its finaliser
        with opened(folder) as store:
            done = store.completed("run")
            assert done == [*range(len(done))]
        if not landed:
            break
    assert done == [0, 1]
    assert place > 100


@pytest.mark.usefixtures("collect_cheaply")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("kind", ["memory", "local"])
def test_collect_resumes_after_an_interrupt(tmp_path: Path, kind: str) -> None:
    model, batches = small(), [X, X + 1]
    step = 1 if kind == "memory" else 3
    for place in itertools.count(step=step):
        with MemoryStore() if kind == "memory" else LocalStore(tmp_path / str(place)) as store:
            first = functools.partial(fh.collect, model, batches, "0", store, progress=False)
            landed, interrupt = interrupted(first, place)
            done = len(store.completed("run"))
            assert first() == (2 - done, done)
            assert store.verify() == []
            for number, batch in enumerate(batches):
                assert torch.equal(store.get("run", number, "0")["output"], model[0](batch))
        del interrupt
        if not landed:
            break
    assert done == 2
    assert place > 100

"""Ctrl-C wherever it may land leaves a model as it was.

Python runs the handlers of signals where it enters a function of its own and where a native one has
returned to it: in turn, an interrupt is raised at each such place.
"""

from __future__ import annotations

import functools
import itertools
import sys
import traceback
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import ferrohook as fh
from ferrohook import interventions as fi
from ferrohook._core import active_scopes
from ferrohook.stores import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable


class Interrupt(BaseException):
    """As Ctrl-C raises it."""


def interrupted(act: Callable[[], object], place: int) -> tuple[bool, Interrupt | None]:
    """Whether there is a place of this number, where an interrupt lands, and what came of it."""
    places = itertools.count()

    def land(_frame: object, event: str, _arg: object) -> None:
        if event in ("call", "c_return") and next(places) == place:
            raise Interrupt

    try:
        sys.setprofile(land)
        act()
    except Interrupt as interrupt:
        return True, interrupt
    finally:
        sys.setprofile(None)
    return next(places) > place, None


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


def state(model: nn.Module) -> list[Any]:
    return [(type(module), [*vars(module)]) for module in model.modules()]


# Where one lands in a finaliser Python prints it and goes on.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("act", ACTS)
def test_an_interrupt_leaves_a_model_as_it_was(act: Callable[[nn.Module], None]) -> None:
    act(small())  # what is made once for all
    plain = state(small())
    left = []
    for place in itertools.count():
        model = small()
        landed, interrupt = interrupted(functools.partial(act, model), place)
        if state(model) != plain or active_scopes.get():
            # The exception is not to hold on to what would put it right in the end.
            frames = traceback.extract_tb(interrupt and interrupt.__traceback__)
            left.append([f"{frame.name}, line {frame.lineno}" for frame in frames])
            active_scopes.set(())
        if not landed:
            break
    assert left == []
    assert place > 20

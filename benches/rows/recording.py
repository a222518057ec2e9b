"""Recording declared outputs, against transformers' own decorators on the same small Llama."""

from __future__ import annotations

import statistics
from contextlib import contextmanager
from time import thread_time
from typing import TYPE_CHECKING, Any

import torch

from ferrohook.benches.harness import (
    Contest,
    Row,
    Sampler,
    expect,
    no_garbage_collection,
    one_thread,
)
from ferrohook.benches.models import llama
from ferrohook.recording import capture_outputs, merge_with_config_defaults, uninstall

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

# The machine's own phases are longer than what so many take.
IN_A_ROW = 5
ALL = {"output_hidden_states": True, "output_attentions": True}


def eager_llama() -> tuple[Any, torch.Tensor]:
    """A small Llama whose attention returns its weights."""
    model, ids = llama()
    eager: Any = model
    eager.set_attn_implementation("eager")
    return eager, ids


def decorate(model: Any) -> None:
    """Puts our decorators in place of transformers'."""
    forward = type(model).forward
    while hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
    model.forward = merge_with_config_defaults(capture_outputs(forward)).__get__(model)


@contextmanager
def ours(model: Any) -> Iterator[None]:
    """Has the model decorated by us, and takes out what that installs."""
    decorate(model)
    yield
    uninstall(model)
    del model.forward


@contextmanager
def theirs(model: Any) -> Iterator[None]:
    """Takes out what transformers' own decorators install, which they leave there."""
    yield
    for module in model.modules():
        module._forward_hooks.clear()
    vars(model).pop("_output_capturing_hooks_installed", None)


def expect_equal(one: Any, other: Any) -> None:
    """Checks that both outputs have the same states and attentions."""
    for key in ("hidden_states", "attentions"):
        same = all(map(torch.equal, one[key], other[key]))
        expect(same and len(one[key]) == len(other[key]), f"transformers' {key}")


def in_a_row(call: Callable[[], object]) -> float:
    """The median seconds that a call takes, after as many that are not counted."""
    times = []
    for _ in range(2 * IN_A_ROW):
        start = thread_time()
        call()
        times.append(thread_time() - start)
    return statistics.median(times[IN_A_ROW:])


def medians(once: Callable[[], float]) -> Sampler:
    """The median nanoseconds of what takes its own seconds, alone on a thread."""

    def sample(seconds: float) -> float:
        with one_thread(), torch.no_grad(), no_garbage_collection():
            return statistics.median(once() for _ in range(round(seconds * 600) + 3)) * 1e9

    return sample


def extra(
    recording: Callable[[Any], AbstractContextManager[None]], model: Any, ids: torch.Tensor
) -> Sampler:
    """The nanoseconds that a call takes longer with all recorded than as transformers made it.

    Of one model, which records and does not by turns: where in memory another one happened to lie
    would move its time by as much as is measured.
    """

    def once() -> float:
        without = in_a_row(lambda: model(ids))
        with recording(model):
            return in_a_row(lambda: model(ids, **ALL)) - without

    return medians(once)


def extra_time() -> Contest:
    """Recording all states and attentions: what that costs more than recording nothing."""
    model, ids = eager_llama()
    with torch.no_grad():
        with ours(model):
            recorded = model(ids, **ALL)
        with theirs(model):
            expect_equal(recorded, model(ids, **ALL))
    other = extra(theirs, model, ids)
    # Ours may be less than nothing; by what it is divided may not.
    return Contest(extra(ours, model, ids), lambda seconds: max(other(seconds), 1.0))


def without_asking(model: Any, ids: torch.Tensor, *, recorded: bool) -> Sampler:
    """The nanoseconds that a call takes which asks for nothing.

    Of one model, for the same reason; it has `recorded` before, or has nothing of it.
    """

    def once() -> float:
        with ours(model):
            if recorded:
                model(ids, **ALL)
            return in_a_row(lambda: model(ids))

    return medians(once)


def not_asked_for() -> Contest:
    """A model that recorded before, and as it was when it never had."""
    model, ids = eager_llama()
    with torch.no_grad():
        with theirs(model):
            expected, plain = model(ids, **ALL), model(ids)
        with ours(model):
            expect_equal(model(ids, **ALL), expected)
            expect(torch.equal(model(ids)[0], plain[0]), "the model's output")
    recorded = without_asking(model, ids, recorded=True)
    return Contest(recorded, without_asking(model, ids, recorded=False))


ROWS = [
    Row(
        name="small Llama, all states and attentions: extra time / transformers'",
        bar=0.50,
        setup=extra_time,
        needs="transformers",
    ),
    Row(
        name="small Llama, recorded before and not asked for / never recorded",
        bar=1.02,
        setup=not_asked_for,
        turns=4,
        needs="transformers",
    ),
]

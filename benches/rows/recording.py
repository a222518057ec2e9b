"""Recording declared outputs, against transformers' own decorators on the same small Llama.

Of one model, which records and does not in alternation: the address of a second model would change
its time by as much as recording does.
"""

from __future__ import annotations

import statistics
from contextlib import contextmanager
from time import thread_time
from typing import TYPE_CHECKING, Any

import torch

from benches.harness import Group, Row, Sampler, expect, no_garbage_collection, one_thread
from benches.rows.models import llama
from ferrohook.compat.transformers import capture_outputs, merge_with_config_defaults, uninstall

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

IN_A_ROW = 5
"""Calls that are shorter, together, than the phases of a shared machine."""
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
    """Decorates the model, and uninstalls at the end."""
    decorate(model)
    yield
    uninstall(model)
    del model.forward


@contextmanager
def theirs(model: Any) -> Iterator[None]:
    """Uninstalls the hooks that transformers' own decorators leave behind."""
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
    """The median seconds of a call, after as many calls that warm up."""
    times = []
    for _ in range(2 * IN_A_ROW):
        start = thread_time()
        call()
        times.append(thread_time() - start)
    return statistics.median(times[IN_A_ROW:])


def medians(once: Callable[[], float]) -> Sampler:
    """Samples the median of `once`, which times itself, in nanoseconds."""

    def sample(seconds: float) -> float:
        with one_thread(), torch.no_grad(), no_garbage_collection():
            return statistics.median(once() for _ in range(round(seconds * 600) + 3)) * 1e9

    return sample


def extra(
    recording: Callable[[Any], AbstractContextManager[None]], model: Any, ids: torch.Tensor
) -> Sampler:
    """The nanoseconds that recording everything adds to a call; below zero by noise alone."""

    def once() -> float:
        without = in_a_row(lambda: model(ids))
        with recording(model):
            return in_a_row(lambda: model(ids, **ALL)) - without

    return medians(once)


def extra_time() -> dict[str, Sampler]:
    """Time that recording all states and attentions adds to a call."""
    model, ids = eager_llama()
    with torch.no_grad():
        with ours(model):
            recorded = model(ids, **ALL)
        with theirs(model):
            expect_equal(recorded, model(ids, **ALL))
    return {
        "recording states and attentions: extra time": extra(ours, model, ids),
        "transformers: extra time": extra(theirs, model, ids),
    }


def without_asking(model: Any, ids: torch.Tensor, *, recorded: bool) -> Sampler:
    """The nanoseconds of a call that records nothing, on a model that has `recorded` or not."""

    def once() -> float:
        with ours(model):
            if recorded:
                model(ids, **ALL)
            return in_a_row(lambda: model(ids))

    return medians(once)


def not_asked_for() -> dict[str, Sampler]:
    """A call that records nothing, on a model with recording installed and one without."""
    model, ids = eager_llama()
    with torch.no_grad():
        with theirs(model):
            expected, plain = model(ids, **ALL), model(ids)
        with ours(model):
            expect_equal(model(ids, **ALL), expected)
            expect(torch.equal(model(ids)[0], plain[0]), "the model's output")
    return {
        "small Llama that recorded before": without_asking(model, ids, recorded=True),
        "small Llama that never did": without_asking(model, ids, recorded=False),
    }


GROUPS = [
    Group(
        name="recording, beside transformers",
        setup=extra_time,
        rows=[
            Row(
                name="recording states and attentions: extra time",
                over="transformers: extra time",
                bar=0.50,
            )
        ],
        needs="transformers",
    ),
    Group(
        name="recording that is not asked for",
        setup=not_asked_for,
        rows=[
            Row(
                name="small Llama that recorded before",
                over="small Llama that never did",
                bar=1.02,
            )
        ],
        turns=4,
        needs="transformers",
    ),
]

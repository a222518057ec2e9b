"""Recording declared outputs, against transformers' own decorators on the same small Llama."""

from __future__ import annotations

import itertools
import statistics
from time import thread_time
from typing import TYPE_CHECKING, Any

import torch

from ferrohook.benches.harness import Contest, Row, Sampler, expect, no_garbage_collection
from ferrohook.benches.models import llama, model_calls
from ferrohook.recording import capture_outputs, merge_with_config_defaults

if TYPE_CHECKING:
    from collections.abc import Callable

# About as many as the samples of the other rows have.
IN_A_ROW = 10
ALL = {"output_hidden_states": True, "output_attentions": True}


def theirs() -> tuple[Any, torch.Tensor]:
    """A small Llama whose attention returns its weights."""
    model, ids = llama()
    eager: Any = model
    eager.set_attn_implementation("eager")
    return eager, ids


def ours() -> tuple[Any, torch.Tensor]:
    """The same with our decorators in place of theirs."""
    model, ids = theirs()
    forward = type(model).forward
    while hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
    recorded = merge_with_config_defaults(capture_outputs(forward))
    model.forward = recorded.__get__(model)
    return model, ids


def recorded(model: Any) -> Callable[[Any], object]:
    """Calls that record all that Llama declares."""
    return lambda ids: model(ids, **ALL)


def expect_equal(one: Any, other: Any) -> None:
    """Checks that both outputs have the same states and attentions."""
    for key in ("hidden_states", "attentions"):
        same = all(map(torch.equal, one[key], other[key]))
        expect(same and len(one[key]) == len(other[key]), f"transformers' {key}")


def extra(
    with_it: list[Callable[[Any], object]], without: list[Callable[[Any], object]], x: torch.Tensor
) -> Sampler:
    """The nanoseconds that the calls of one list take longer than those of the other.

    Each a few times in a row, as in the other rows, then the next. Two of each: where in memory a
    model happens to lie moves its time by as much as is measured.
    """

    def once(call: Callable[[Any], object]) -> float:
        start = thread_time()
        call(x)
        return thread_time() - start

    def median(times: list[list[float]]) -> float:
        return statistics.median(itertools.chain.from_iterable(times))

    def sample(seconds: float) -> float:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        with torch.no_grad(), no_garbage_collection():
            turns = [
                [[once(call) for _ in range(IN_A_ROW)] for call in (*with_it, *without)]
                for _ in range(round(seconds * 3e2) + 3)
            ]
        torch.set_num_threads(threads)
        medians = [median(list(times)) for times in zip(*turns, strict=True)]
        one, other = medians[: len(with_it)], medians[len(with_it) :]
        return max((statistics.fmean(one) - statistics.fmean(other)) * 1e9, 1.0)

    return sample


def extra_time() -> Contest:
    """Recording all states and attentions: what that costs more than models that never did."""
    _, ids = theirs()
    mine, others, plain = ([make()[0] for _ in range(2)] for make in (ours, theirs, theirs))
    with torch.no_grad():
        expect_equal(recorded(mine[0])(ids), recorded(others[0])(ids))
    return Contest(
        extra([recorded(model) for model in mine], plain, ids),
        extra([recorded(model) for model in others], plain, ids),
    )


def not_asked_for() -> Contest:
    """A model that recorded before, and one that never did."""
    (model, ids), (never, _), (other, _) = ours(), ours(), theirs()
    with torch.no_grad():
        expect_equal(recorded(model)(ids), recorded(other)(ids))
        expect(torch.equal(model(ids)[0], never(ids)[0]), "the model's output")
    return Contest(model_calls(model, ids), model_calls(never, ids))


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
        needs="transformers",
    ),
]

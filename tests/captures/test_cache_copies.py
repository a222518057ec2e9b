"""Copies and pickles of an `ActivationCache`."""

from __future__ import annotations

import copy
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import ferrohook as fh
from support.capture import Data, Frozen, Named, Twice, saved_and_loaded
from support.modules import Returning

if TYPE_CHECKING:
    from collections.abc import Callable


def through_a_queue(cache: Any) -> Any:
    queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
    queue.put(cache)
    return queue.get()


DUPLICATES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda cache: pickle.loads(pickle.dumps(cache)),
    "torch.save": saved_and_loaded,
    "deepcopy": copy.deepcopy,
    "a queue": through_a_queue,
}


@pytest.fixture(params=DUPLICATES)
def duplicate(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    return DUPLICATES[request.param]


def test_a_duplicate_answers_as_the_cache(
    model: nn.Sequential, x: Tensor, duplicate: Callable[[Any], Any]
) -> None:
    with fh.capture(model, calls="all", grads=True) as acts:
        for _ in range(2):
            model(x).sum().backward()
    copied = duplicate(acts)
    assert type(copied) is fh.ActivationCache
    assert list(copied) == list(acts)
    assert repr(copied) == repr(acts)
    assert repr(copied.grads) == repr(acts.grads)
    assert copied.nbytes == acts.nbytes
    for name, calls in acts.items():
        assert all(map(torch.equal, copied[name], calls))
        assert all(map(torch.equal, copied.grads[name], acts.grads[name]))
    before = acts["0"][0].clone()
    copied["0"][0].zero_()
    assert copied["0"][0].sum() == 0
    if duplicate is not through_a_queue:  # which shares memory
        assert torch.equal(acts["0"][0], before)


def test_a_duplicate_has_the_structures_and_errors_of_the_cache(
    x: Tensor, duplicate: Callable[[Any], Any]
) -> None:
    value = (Named(x, [Data(x, {"a": Frozen(x)})]), None, 3)
    model = Twice()
    model.once = Returning(lambda _: value)
    model.shared.forward = lambda x: x  # type: ignore[method-assign]
    model.unused = nn.Identity()
    with pytest.warns(fh.errors.NeverFiredWarning), fh.capture(model, ["once", "unused"]) as acts:
        model.once(x)
    copied = duplicate(acts)
    assert repr(copied["once"]) == repr(acts["once"])
    for name in ("unused", "shared", 0):
        with pytest.raises(fh.SelectionError) as expected:
            acts[name]  # type: ignore[index]
        with pytest.raises(fh.SelectionError) as found:
            copied[name]
        assert str(found.value) == str(expected.value)
    with pytest.raises(fh.SelectionError, match="grads=True"):
        copied.grads["once"]


def test_a_duplicate_has_leaves_in_place_of_undetached_tensors(
    model: nn.Sequential, x: Tensor, duplicate: Callable[[Any], Any]
) -> None:
    with fh.capture(model, "0", detach=False) as acts:
        model(x)
    copied = duplicate(acts)["0"]
    assert copied.is_leaf
    assert copied.requires_grad
    assert torch.equal(copied, acts["0"])
    assert acts["0"].grad_fn is not None


def test_a_stale_activation_is_not_copied(
    model: nn.Sequential, x: Tensor, duplicate: Callable[[Any], Any]
) -> None:
    with fh.capture(model, "0") as acts:
        model(x)
    acts["0"].zero_()
    with pytest.raises(fh.StaleActivationError, match="`0` was changed in place"):
        duplicate(acts)


def test_a_shallow_copy_shares_the_activations(model: nn.Sequential, x: Tensor) -> None:
    with fh.capture(model, "0") as acts:
        shared = copy.copy(acts)
        model(x)
    assert shared["0"] is acts["0"]

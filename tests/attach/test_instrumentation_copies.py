"""Copies of instrumented modules."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import ferrohook as fh
from support.instrumentation import Log, Slotted, logging, small, x
from support.internals import is_instrumented

if TYPE_CHECKING:
    from collections.abc import Callable


def test_deepcopy_copies_the_hooks_and_handles_act_on_the_original_alone() -> None:
    model = small()
    fired: Log = []
    with fh.instrument(model):
        handle = model.first.register_forward_hook(lambda module, *_: fired.append(module))
        model.first.register_forward_hook(lambda *_: fired.append("off")).disable()
        duplicate = copy.deepcopy(model)
        assert isinstance(duplicate, nn.Sequential)
        assert duplicate.first.weight is not model.first.weight
        assert torch.equal(duplicate(x()), model(x()))
        assert fired == [duplicate.first, model.first]
        assert handle.calls == 1
        handle.remove()
        duplicate(x())
        model(x())
        assert fired[2:] == [duplicate.first]
    duplicate(x())
    assert fired[3:] == [duplicate.first]


def test_a_deep_copy_is_restored_independently() -> None:
    model = small()
    with fh.instrument(model, "first"):
        duplicate = copy.deepcopy(model)
        again = copy.deepcopy(duplicate)
        duplicate.first.register_forward_hook(lambda _module, _args, output: output + 1)
        fh.restore(duplicate)
        assert type(duplicate.first) is nn.Linear
        assert list(vars(duplicate.first)) == list(vars(nn.Linear(4, 4)))
        assert torch.equal(duplicate(x()), model(x()))
        with pytest.raises(fh.HookError, match="not instrumented"):
            fh.restore(duplicate)
        assert is_instrumented(model.first)
        assert is_instrumented(again.first)
    fh.restore(again)
    assert not is_instrumented(again.first)


def test_a_deep_copy_counts_independently() -> None:
    model = small()
    fh.instrument(model)
    fh.instrument(model)
    duplicate = copy.deepcopy(model)
    fh.restore(duplicate)
    assert not is_instrumented(duplicate)
    fh.restore(model)
    assert is_instrumented(model)
    fh.restore(model)
    assert not is_instrumented(model)


def test_a_shallow_copy_shares_hooks_and_is_restored_independently() -> None:
    linear = nn.Linear(4, 4)
    with fh.instrument(linear):
        handle = linear.register_forward_hook(lambda *_: None)
        duplicate = copy.copy(linear)
        assert duplicate.weight is linear.weight
        duplicate(x())
        assert handle.calls == 1
        duplicate.register_forward_hook(logging(log := [], "shared"))
        linear(x())
        assert log == ["shared"]
        fh.restore(duplicate)
        assert type(duplicate) is nn.Linear
        assert list(vars(duplicate)) == list(vars(nn.Linear(4, 4)))
        duplicate(x())
        linear(x())
        assert len(log) == 2
        assert handle.calls == 3
    assert type(linear) is nn.Linear


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])
def test_a_copy_made_during_a_capture_is_plain(duplicate: Callable[[Any], Any]) -> None:
    model = small()
    with fh.capture(model, "first"):
        other = duplicate(model.first)
        model(x())
    assert type(other) is nn.Linear
    assert list(vars(other)) == list(vars(nn.Linear(4, 4)))
    model = small()
    with fh.register(model, "first", lambda _module, _args, output: output * 0):
        other = duplicate(model.first)
        model(x())
        assert not other(x()).any()
    fh.restore(other)
    assert type(other) is nn.Linear


def test_slots_are_copied_as_pytorch_copies_them() -> None:
    for duplicate in (copy.copy, copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))):
        plain, ours = Slotted(4, 4), Slotted(4, 4)
        with fh.instrument(ours):
            kept = [hasattr(duplicate(each), "gain") for each in (plain, ours)]
        assert kept[0] == kept[1]


def test_data_parallel_replicas_share_the_hooks() -> None:
    model = small()
    fh.instrument(model)
    handle = model.register_forward_hook(lambda _module, _args, output: output * 2)
    inner = model.first.register_forward_hook(lambda _module, _args, output: output + 1)
    # The steps of torch.nn.parallel.replicate, which itself needs a GPU.
    replica: Any = model._replicate_for_data_parallel()
    child = model.first._replicate_for_data_parallel()
    for name, parameter in model.first.named_parameters():
        setattr(child, name, parameter.detach().clone())
    replica.first = child
    assert model.first is not child
    assert torch.equal(replica(x()), model(x()))
    assert (handle.calls, inner.calls) == (2, 2)
    inner.remove()
    handle.remove()
    fh.restore(model)
    assert torch.equal(replica(x()), model(x()))


def test_a_capture_on_a_replica_leaves_the_original_to_be_restored() -> None:
    with fh.instrument(linear := nn.Linear(4, 4)):
        handle = linear.register_forward_hook(lambda *_: None)
        replica: Any = linear._replicate_for_data_parallel()
        replica.weight, replica.bias = linear.weight, linear.bias
        with fh.capture(replica) as acts:
            replica(x())
        assert [*acts] == [""]
        del replica, acts
        gc.collect()
        linear(x())
        assert handle.calls == 2
    assert type(linear) is nn.Linear


def test_a_clone_with_another_call_leaves_the_original_s_forward() -> None:
    module: Any = nn.Linear(2, 2)
    x = torch.ones(1, 2)
    with fh.instrument(module):
        clone = module.__new__(type(module))
        clone.__dict__ = vars(module).copy()
        module.forward = lambda x: x * 0
        assert not module(x).any()
        vars(clone)["_compiled_call_impl"] = lambda x: x + 50
        clone(x)
        assert not module(x).any()

"""Selections are remembered for a model, and found anew when it changes."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING

import pytest
from torch import nn

import ferrohook as fh
from ferrohook.names import select

if TYPE_CHECKING:
    from collections.abc import Callable


def model() -> nn.Sequential:
    return nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Linear(2, 2))


def replaced(m: nn.Sequential) -> None:
    m[1] = nn.Linear(2, 2)


def added(m: nn.Sequential) -> None:
    m.append(nn.Linear(2, 2))


def added_inside(m: nn.Sequential) -> None:
    inner = m[0]
    assert isinstance(inner, nn.Sequential)
    inner.append(nn.Linear(2, 2))


def added_to_a_leaf(m: nn.Sequential) -> None:
    m[1].add_module("inner", nn.ReLU())


def renamed(m: nn.Sequential) -> None:
    m._modules["2"] = m._modules.pop("1")


def removed(m: nn.Sequential) -> None:
    del m[0]


def other_dict(m: nn.Sequential) -> None:
    m._modules = {"a": nn.ReLU()}


CHANGES = [replaced, added, added_inside, added_to_a_leaf, renamed, removed, other_dict]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_changed_model_is_selected_from_anew(change: Callable[[nn.Sequential], None]) -> None:
    m = model()
    for _ in range(3):
        assert list(fh.select(m, "**")) == ["", "0", "0.0", "0.1", "1"]
    change(m)
    expected = dict(m.named_modules())
    assert fh.select(m, "**") == expected
    assert fh.select(m, "**") == expected


def test_a_change_inside_of_a_wrapper_is_seen() -> None:
    inner = nn.Sequential(nn.Linear(2, 2))
    m = nn.Sequential(fh.HookedModule(inner))
    before = list(fh.select(m, "**"))
    inner.append(nn.ReLU())
    assert len(fh.select(m, "**")) == len(before) + 1


def test_callers_may_change_what_they_get() -> None:
    m = model()
    fh.select(m, "*").clear()
    fh.select(m, "*").clear()
    assert list(fh.select(m, "*")) == ["0", "1"]


def test_remembered_selections_keep_no_model_alive() -> None:
    m = model()
    fh.select(m, "**")
    fh.select(m, ["0", "1"])
    reference = weakref.ref(m)
    del m
    gc.collect()
    assert reference() is None


def test_remembered_selections_go_with_their_models() -> None:
    for size in range(1, 100):
        m = nn.Sequential(*(nn.Linear(2, 2) for _ in range(size)))
        assert len(fh.select(m, "*")) == size  # at the address of a former model, most often
        del m
    gc.collect()
    assert len(select._SELECTIONS._entries) < 10


def test_many_selectors_take_bounded_memory() -> None:
    m = model()
    for number in range(1000):
        assert list(fh.select(m, ["0"] * (number + 1))) == ["0"]
    assert len(select._SELECTIONS[m]) <= select.MOST_SELECTIONS

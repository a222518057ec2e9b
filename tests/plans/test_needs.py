"""Needs of the entries of plans, and back ends that serve some of them."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

pytest.importorskip("fastapi", reason="batchers are in the group service")

import ferrohook as fh
from ferrohook.detectors import NormDetector
from ferrohook.engines import planned
from ferrohook.plans.needs import NEEDS, BackEnd
from ferrohook.rows import site_tables
from ferrohook.service import sharing

V = torch.ones(4)
TRANSCODER = fh.Dictionary(
    torch.ones(4, 2), torch.ones(2, 4), b_dec=V, b_enc=V[:2], transcoder=True, reads="0"
)
ENGINE, SITES, BATCHER = planned.BACK_END, site_tables.BACK_END, sharing.BACK_END
ALL = {"an engine": ENGINE, "sites": SITES, "a batcher": BATCHER}


def python(*_call: object) -> None:
    """A hook."""


def backward(_module: Any, _inputs: Any, _outputs: Any) -> None:
    """A hook of gradients."""


ENTRIES = [
    (fh.keep("0"), set(), {}),
    (fh.on("0", fh.Add(V)), {"add"}, {}),
    (fh.on("0", fh.Add(V, output_index=0), at=-1), {"add", "output_index", "at"}, {}),
    (fh.on("0", fh.Zero(), phase="forward_pre"), {"change", "inputs"}, {"sites"}),
    (fh.on("0", fh.Scale(torch.inf)), {"change", "not finite"}, {"an engine"}),
    (fh.on("0", fh.Add(torch.ones(2, 4))), {"add", "table"}, {"sites"}),
    (fh.on("0", fh.Add(V.clone().requires_grad_())), {"add", "trained"}, {"sites"}),
    (fh.on("0", fh.Add(V), priority=3), {"add", "priority"}, {"sites"}),
    (fh.on("0", python), {"python"}, {"sites", "a batcher"}),
    (fh.on("1", fh.Feature(TRANSCODER, 0, set=1.0)), {"transcoder"}, {"sites"}),
    (fh.on("0", NormDetector()), {"native detector"}, {"sites"}),
    (fh.on("0", backward, phase="backward"), {"python", "gradients"}, set(ALL)),
    (fh.keep("0", at=lambda _: [0]), {"at function"}, {}),
    (fh.keep("0", inputs=True), {"inputs"}, {"sites"}),
    (fh.keep("0", grads=True), {"gradients"}, set(ALL)),
    (fh.keep("0", stop=True), {"stop"}, set(ALL)),
    (fh.keep("0", calls="all"), {"calls"}, {"an engine"}),
    (fh.keep("0", detach=False), {"detach"}, {"sites"}),
    (fh.keep("0", slice=(slice(None), 0)), {"slice"}, {}),
    (fh.keep("0", slice=0), {"slice"}, {"an engine"}),
    (fh.keep("0", dtype=torch.float64, max_bytes=8), {"dtype", "max_bytes"}, {}),
]


@pytest.mark.parametrize(("entry", "needs", "refusing"), ENTRIES)
def test_needs_and_back_ends(entry: Any, needs: set[str], refusing: set[str]) -> None:
    assert entry.needs == needs
    assert {name for name, back_end in ALL.items() if back_end.refusal(entry)} == set(refusing)


def test_a_judge_refuses_what_it_does_not_know() -> None:
    nothing = BackEnd(frozenset(), {"python": "it is one"})
    assert nothing.refusal(fh.keep("0")) is None
    assert nothing.refusal(fh.on("0", python, priority=1)) == "it is one"
    assert BackEnd(frozenset({"add"}), {}).refusal(fh.keep("0", stop=True)) == (
        "stop is not supported, only add"
    )


def test_all_needs_are_known() -> None:
    """Tries every option of `on` and of `capture`, which `keep` has, and every intervention."""
    options = {*inspect.signature(fh.on).parameters, *inspect.signature(fh.capture).parameters}
    named = options - {"model", "what", "hook", "phase", "grads"}
    assert named <= NEEDS
    assert {
        need for hook in (fh.Add(torch.ones(2, 2)), fh.Zero()) for need in hook.needs()
    } <= NEEDS
    for back_end in ALL.values():
        assert back_end.serves <= NEEDS
        assert back_end.reasons.keys() <= NEEDS - back_end.serves

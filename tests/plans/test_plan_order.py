"""The entries of a plan act in their order: a capture sees the changes that stand before it."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import ferrohook as fh

if TYPE_CHECKING:
    from collections.abc import Callable

X = torch.ones(2, 3)


def plus_one(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    del module, args
    return output + 1


def input_plus_one(module: nn.Module, args: Any) -> Any:
    del module
    return (args[0] + 1,)


@pytest.fixture
def model() -> nn.Sequential:
    return nn.Sequential(nn.Identity(), nn.Identity())


def by_request(model: nn.Module, request: fh.typing.Request) -> None:
    with request:
        model(X)


def by_batch(model: nn.Module, request: fh.typing.Request) -> None:
    other = fh.scope()
    with fh.batch({request: 1, other: 0}, warn=False):
        model(X)
    assert request.error is None


def compiled(model: nn.Module, request: fh.typing.Request) -> None:
    with request:
        torch.compile(model, backend="eager")(X)


WAYS = [by_request, by_batch, compiled]
CHANGES: dict[str, tuple[Any, Callable[[float], float]]] = {
    "add": (fh.Add(torch.ones(3)), lambda x: x + 1),
    "scale": (fh.Scale(3.0), lambda x: x * 3),
    "python": (plus_one, lambda x: x + 1),
}


@pytest.mark.parametrize("run", WAYS)
@pytest.mark.parametrize("seed", range(12))
def test_captures_see_the_entries_before_them(
    model: nn.Sequential, run: Callable[..., None], seed: int
) -> None:
    draw = random.Random(seed)  # noqa: S311 (reproducible)
    entries: list[Any] = []
    expected: dict[str, float] = {}
    values = {"0": 1.0, "1": 1.0}  # of the module's own output, as far as changed
    drawn = [draw.choice(["0", "1", "keep", "keep all"]) for _ in range(7)]
    # What "1" gets is what "0" returns at last, so its changes are applied to that.
    plan: list[tuple[str, Any]] = []
    for number, kind in enumerate(drawn):
        if kind in {"0", "1"}:
            hook, change = CHANGES[draw.choice([*CHANGES])]
            entries.append(fh.on(kind, hook))
            plan.append((kind, change))
        else:
            what = "*" if kind == "keep all" else draw.choice("01")
            entries.append(fh.keep(what, label=str(number)))
            plan.append((f"keep {what}", str(number)))
    for kind, change in plan:
        if kind == "0":
            values["0"] = change(values["0"])
        elif kind.startswith("keep") and kind[5:] in "*0":
            expected[f"{change}:0"] = values["0"]
    values["1"] = values["0"]
    for kind, change in plan:
        if kind == "1":
            values["1"] = change(values["1"])
        elif kind.startswith("keep") and kind[5:] in "*1":
            expected[f"{change}:1"] = values["1"]
    with fh.Plan(*entries).prepare(model) as prepared:
        request = prepared.open()
        run(model, request)
        acts = request.acts
        assert {name: acts[name].flatten()[0].item() for name in acts} == expected


def test_inputs_and_outputs_have_orders_of_their_own(model: nn.Sequential) -> None:
    plan = fh.Plan(
        fh.keep("0", inputs=True, label="first"),
        fh.on("0", input_plus_one, phase="forward_pre"),
        fh.keep("0", inputs=True),
        fh.keep("0", label="output"),
        fh.on("0", fh.Scale(5.0)),
    )
    with plan.prepare(model) as prepared, prepared.open() as request:
        model(X)
    values = {name: request.acts[name].flatten()[0].item() for name in request.acts}
    assert values == {"first:0": 1.0, "0": 2.0, "output:0": 2.0}


@pytest.mark.parametrize(
    ("ahead", "behind"), [({}, {"priority": 1}), ({"priority": -1}, {}), ({}, {"prepend": True})]
)
def test_entries_that_run_in_the_other_order_are_refused(
    model: nn.Sequential, ahead: dict[str, Any], behind: dict[str, Any]
) -> None:
    plan = fh.Plan(fh.on("0", fh.Zero(), **ahead), fh.keep("0"), fh.on("0", plus_one, **behind))
    with pytest.raises(fh.HookError, match="entry 1 of the plan reads '0' between entries"):
        plan.prepare(model)


@pytest.mark.parametrize(
    ("ahead", "behind"),
    [({"priority": 2}, {"priority": 1}), ({"priority": 1}, {"prepend": True}), ({}, {})],
)
def test_priorities_that_agree_with_the_order_are_taken(
    model: nn.Sequential, ahead: dict[str, Any], behind: dict[str, Any]
) -> None:
    plan = fh.Plan(fh.on("0", plus_one, **ahead), fh.keep("0"), fh.on("0", fh.Zero(), **behind))
    with plan.prepare(model) as prepared, prepared.open() as request:
        assert not model[0](X).any()
    assert torch.equal(request.acts["0"], X + 1)

"""Quantities of small models of drawn architectures, against values that the models report.

A fixed part, 2,000 models with `--whole`, or as many as `--requests` says. A failing case names the
seed: `faults_of(SmallModel(seed))`.
"""

from __future__ import annotations

import random
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

import ferrohook as fh
from support.amounts import amount
from support.small_models import Oracle, SmallModel

if TYPE_CHECKING:
    from collections.abc import Mapping

pytest.importorskip("transformers")
PARTS = 4
WRITES = 3
"""Quantities of a model that are written to, each in a separate call."""


def tensor_of(output: Any) -> Tensor:
    """Returns the one tensor that a model returns."""
    if isinstance(output, dict):
        (output,) = output.values()
    found: Tensor = output[0] if isinstance(output, tuple) else output
    return found


def named(model: SmallModel, **writes: Any) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Runs a model whose code names its tensors; returns its output and these tensors."""
    with Oracle(writes) as oracle, torch.no_grad():
        output = tensor_of(model(**model.example))
    return output, {name: it for name, it in oracle.seen.items() if " " not in name}


def close(one: Tensor, other: Tensor, roundings: int, total: Tensor | None = None) -> bool:
    """Compares tensors of any shapes, up to roundings of the largest element, or of a sum's.

    NaN equals NaN: shares of weights that are all 0 are.
    """
    left, right = (each.double().reshape(-1) for each in (one, other))
    if not torch.equal(left.isnan(), right.isnan()):  # or of other sizes
        return False
    left, right = left.nan_to_num(), right.nan_to_num()
    size = max(float(each.abs().max()) for each in (right, total) if each is not None)
    limit = roundings and roundings * torch.finfo(other.dtype).eps * size
    return bool(((left - right).abs() <= limit).all())


def is_right(
    name: str, quantity: fh.typing.Quantity, found: Tensor, right: Mapping[str, Tensor]
) -> bool:
    """Compares a captured quantity with the model's own.

    A multiplier is solved for, up to roundings of the sum that the quantity is a term of.
    """
    if quantity.multiplier == 1:
        return close(found, right[name], 0)
    total = re.sub(r"\w+_out(?=\.\d+$)", "resid_post", name)
    return close(found, right[name], 4, right.get(total))


def change(tensor: Tensor) -> Tensor:
    """Adds noise to a tensor, which depends on its size and not on its shape; other integers."""
    if not tensor.is_floating_point():
        return (tensor + 1) % (tensor.max() + 1)
    noise = torch.randn(tensor.numel(), generator=torch.Generator().manual_seed(7))
    return tensor + noise.view_as(tensor).to(tensor) * tensor.std(correction=0)


def faults_of(model: SmallModel) -> list[str]:
    """Returns the faults of the quantities of a model."""
    output, right = named(model)
    if not bool(output.isfinite().all()):
        return []
    table = fh.quantities(model, **model.example)
    acts: Mapping[str, Tensor] = {}
    if len(table):
        with torch.no_grad(), fh.capture(model, [*table]) as acts:
            model(**model.example)
    faults = []
    for name, quantity in table.items():
        known = name[1:] in right
        if not known or not is_right(name[1:], quantity, acts[name], right):
            wrong = "is another tensor" if known else "is no quantity of the model"
            faults.append(f"{name} {wrong}: {quantity.place}, {quantity.equation}")
    chosen = random.Random(model.seed)  # noqa: S311 (quantities)
    writable = [name for name in table if table[name].writable and name[1:] in right]
    for name in chosen.sample(writable, min(WRITES, len(writable))):
        with torch.no_grad(), fh.register(model, name, lambda _module, _args, it: change(it)):
            found = tensor_of(model(**model.example))
        expected, _ = named(model, **{name[1:]: change})
        if not close(found, expected, 2**12):
            faults.append(f"{name} was written and did something else: {table[name].place}")
    return faults


@pytest.mark.parametrize("part", range(PARTS))
def test_quantities_are_what_models_compute(part: int, request: pytest.FixtureRequest) -> None:
    number = request.config.getoption("requests") or amount(8, whole=2_000)
    faults = {seed: faults_of(SmallModel(seed)) for seed in range(part, number, PARTS)}
    assert not {seed: found for seed, found in faults.items() if found}


@pytest.mark.parametrize("part", range(PARTS))
def test_nothing_of_a_plain_model_is_missing(part: int, request: pytest.FixtureRequest) -> None:
    number = request.config.getoption("requests") or amount(8, whole=400)
    for seed in range(part, number, PARTS):
        model = SmallModel(seed, plain=True)
        table = fh.quantities(model, **model.example)
        missing = {name for name in named(model)[1] if name not in table}
        if model.rows == 1:  # nothing tells positions from tokens
            missing = {name for name in missing if "embed" not in name}
        assert not missing, (seed, missing)


@pytest.mark.parametrize("seed", range(amount(4, whole=8)))
def test_one_token_shows_what_seven_show(seed: int) -> None:
    model = SmallModel(seed, plain=True)
    names = {*fh.quantities(model, **model.example)}
    model.example = {name: each[:, :1] for name, each in model.example.items()}
    assert names <= {*fh.quantities(model, **model.example)}
    assert not faults_of(model)


@pytest.mark.parametrize("seed", [39, 59, 93, 171, 177, 199])
def test_models_that_were_wrong(seed: int) -> None:
    """Wrong once: multipliers and an encoder's end (59, 93), a decoder with its own rows (177).

    And a single token (39, 171, 199): attention to it is affine, like a projection.
    """
    assert not faults_of(SmallModel(seed))

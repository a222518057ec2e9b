"""Random batches of requests that change and keep features, against formulas of matrices."""

from __future__ import annotations

import itertools
import random
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import ferrohook as fh
from support.amounts import amount
from support.dictionaries import D_IN, D_SAE, KINDS, NORMALIZATIONS, K, weights_of
from support.modules import Echo, Tokens

LENGTH = 4
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


class Known(NamedTuple):
    """A dictionary, and its weights."""

    kind: str
    normalization: str
    subtracts: bool
    weights: dict[str, Tensor]
    dictionary: fh.Dictionary

    @classmethod
    def draw(cls, rng: random.Random) -> Known:
        kind, normalization = rng.choice([*KINDS]), rng.choice(NORMALIZATIONS)
        subtracts = rng.random() < 0.5
        weights = weights_of(kind, seed=rng.randrange(1000))
        dtype = rng.choice(DTYPES)
        weights = {name: it.to(dtype) for name, it in weights.items()}
        made = fh.Dictionary(
            **weights,
            activation=kind.partition(" ")[0],
            normalize_activations=normalization,
            apply_b_dec_to_input=subtracts,
            max_activations=torch.rand(D_SAE, generator=torch.Generator().manual_seed(1)) + 0.5,
            **KINDS[kind],
        )
        return cls(kind, normalization, subtracts, weights, made)

    def read(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Values of all features, the decoder's rows, and the scale of each token."""
        w = {name: it.to(x.dtype) for name, it in self.weights.items()}
        scale = torch.ones_like(x[..., :1])
        if self.normalization == "layer_norm":
            scale = x.std(-1, keepdim=True)
            x = (x - x.mean(-1, keepdim=True)) / (scale + 1e-5)
        elif self.normalization == "constant_norm_rescale":
            scale = x.square().sum(-1, keepdim=True).sqrt() / D_IN**0.5
            x = x / scale
        x = x - w["b_dec"] if self.subtracts else x
        product = torch.einsum("...i,if->...f", x, w["W_enc"])
        if self.kind == "gated":
            magnitude = (product * w["r_mag"].exp() + w["b_mag"]).clamp(min=0)
            return magnitude.where(product + w["b_gate"] > 0, 0.0), w["W_dec"], scale
        before = product + w["b_enc"]
        lengths = w["W_dec"].norm(dim=-1, keepdim=True)
        if "rescaled" in self.kind:
            before = before * lengths[:, 0]
        rows = w["W_dec"] / lengths if "rescaled" in self.kind else w["W_dec"]
        passed = before if "abs" in self.kind or self.kind == "jump" else before.clamp(min=0)
        if "jump" in self.kind:
            passed = passed.where(before > w["threshold"], 0.0)
        elif "top" in self.kind:
            size = before.abs() if "abs" in self.kind else before
            least = size.sort(descending=True).values[..., K - 1 : K]
            passed = passed.where(size >= least, 0.0)
        elif self.kind == "groupmax":
            groups = passed.unflatten(-1, (K, -1))
            passed = groups.where(groups == groups.amax(-1, keepdim=True), 0.0).flatten(-2)
        return passed, rows, scale


class Change(NamedTuple):
    """A drawn `Feature` at some positions, with a strength."""

    known: Known
    index: list[int]
    options: dict[str, Any]
    at: slice | None
    strength: float | None

    @classmethod
    def draw(cls, rng: random.Random, known: list[Known]) -> Change:
        index = rng.sample(range(D_SAE), rng.choice([1, 1, 2, 6]))
        numbers: dict[str, list[float | None]]
        names = rng.choice(
            [["set"], ["add"], ["scale"], ["low"], ["high"], ["scale", "add", "low"]]
        )
        numbers = {name: [rng.uniform(-3, 3) for _ in index] for name in names}
        if len(index) > 1 and rng.random() < 0.5:  # one is set, the others are not
            numbers = {name: [None, *each[1:]] for name, each in numbers.items() if name != "set"}
            numbers = numbers or {"add": [None, *[1.0 for _ in index[1:]]]}
            numbers["set"] = [rng.uniform(-3, 3), *[None for _ in index[1:]]]
        options: dict[str, Any] = dict(numbers)
        options |= {"only_active": True} if rng.random() < 0.3 else {}
        options |= {"unit": "max"} if rng.random() < 0.3 else {}
        first = rng.randrange(LENGTH)
        at = None if rng.random() < 0.5 else slice(first, rng.randint(first + 1, LENGTH))
        strength = rng.choice([None, None, 0.25])
        return cls(rng.choice(known), index, options, at, strength)

    def entry(self) -> Any:
        hook = fh.Feature(self.known.dictionary, self.index, **self.options)
        return fh.on("0", hook, at=self.at, strength=self.strength)

    def made(self, x: Tensor) -> Tensor:
        """The tensor of a member, (rows, tokens, width), after the change."""
        exact = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
        values, rows, scale = self.known.read(exact)
        changed = exact.clone()
        unit = self.options.get("unit") == "max"
        for place, feature in enumerate(self.index):
            size = float(self.known.dictionary.max_activations[feature]) if unit else 1.0  # type: ignore[index]
            own = {
                name: self.options[name][place]
                for name in ("set", "add", "scale", "low", "high")
                if self.options.get(name) is not None and self.options[name][place] is not None
            }
            value = values[..., feature]
            new = value * own.get("scale", 1.0) + own.get("add", 0.0) * size
            if "low" in own:
                new = new.clamp(min=own["low"] * size)
            if "high" in own:
                new = new.clamp(max=own["high"] * size)
            if "set" in own:
                new = torch.full_like(value, own["set"] * size)
            if self.options.get("only_active"):
                new = new.where(value != 0, value)
            changed += (new - value)[..., None] * rows[feature] * scale
        result = changed.to(x.dtype)
        if self.strength is not None:
            result = (x.double() + self.strength * (result.double() - x.double())).to(x.dtype)
        if self.at is None:
            return result
        kept = x.clone()
        kept[:, self.at] = result[:, self.at]
        return kept


@pytest.mark.parametrize("seed", range(amount(60, whole=2000)))
def test_random_batches(seed: int) -> None:
    rng = random.Random(seed)  # noqa: S311 (a test)
    known = [Known.draw(rng) for _ in range(rng.choice([1, 2]))]
    dtype = rng.choice(DTYPES)
    size = rng.randint(1, 9)
    x = (torch.randn(size, LENGTH, D_IN, generator=torch.Generator().manual_seed(seed)) * 2).to(
        dtype
    )
    order = rng.sample(range(size), size)
    cuts = sorted({0, *(rng.randint(1, size) for _ in range(rng.randint(1, 5)))})
    members = [order[a:b] for a, b in itertools.pairwise(cuts)]
    model = Tokens(Echo())
    expected, kept, requests = x.clone(), [], {}
    keeps = rng.random() < 0.5  # without, hooks of several members run as one
    for rows in members:
        changes = [Change.draw(rng, known) for _ in range(rng.randint(1, 3))]
        seen = rng.choice(known)
        entries = [each.entry() for each in changes]
        if keeps:
            entries.append(fh.keep("0", features=seen.dictionary, index=[3, 5]))
        requests[fh.Plan(*entries).open(model)] = rows
        for each in changes:
            expected[rows] = each.made(expected[rows])
        exact = expected[rows].to(torch.float64 if dtype == torch.float64 else torch.float32)
        kept.append(seen.read(exact)[0][..., [3, 5]])
    positions = torch.arange(LENGTH).expand(size, LENGTH)
    with torch.no_grad(), fh.batch(requests, positions=positions):
        found = model(x)
    near = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 5e-2}[dtype]
    sizes = {"rtol": near, "atol": near * float(x.abs().max()) * 4}
    for request, values in zip(requests, kept, strict=True):
        assert request.error is None
        if keeps and dtype != torch.bfloat16:  # of rounded tensors other features may be active
            kept_values = request.acts["0"].reshape(values.shape)
            torch.testing.assert_close(kept_values, values, **sizes)
    torch.testing.assert_close(found, expected, **sizes)
    others = order[cuts[-1] :]
    assert torch.equal(found[others], x[others])

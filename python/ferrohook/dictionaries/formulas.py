"""Formulas of dictionaries: how each kind encodes and decodes."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    Weights = Mapping[str, Tensor]

LAYER_NORM: Final = "layer_norm"
CONSTANT_NORM: Final = "constant_norm_rescale"
NORMALIZATIONS: Final = ("none", LAYER_NORM, CONSTANT_NORM)
"""Normalisations of the input, by SAELens' names."""
_EPSILON: Final = 1e-5
_NOTHING: Final = nullcontext()


class Rounding(NamedTuple):
    """Order of operations in which libraries differ, in the last bit only.

    A dictionary has the one of the library that wrote its file.
    """

    linear_encoder: bool = False
    """The product adds the encoder's bias, as `nn.Linear` does."""
    linear_decoder: bool = False
    """The product adds the decoder's bias."""
    scaled_product: bool = False
    """`exp(r_mag)` multiplies the product of a gated encoder, not its weights."""
    relu_first: bool = False
    """Top-k ranks the values after the ReLU, which may choose another one of equal values."""


class Formula(NamedTuple):
    """Encoder and decoder of a dictionary, its weights aside."""

    activation: str
    """A key of `ACTIVATIONS`."""
    k: int = 0
    """Values that remain at each token, or the number of groups; 0 but for kinds in `COUNTED`."""
    subtracts_bias: bool = False
    """The encoder reads `x - b_dec`."""
    normalization: str = "none"
    """One of `NORMALIZATIONS`; undone after decoding, but not in a transcoder."""
    rescales: bool = False
    """Values are multiplied by the norms of the decoder's rows, before they are ranked."""
    transcodes: bool = False
    """True for a transcoder, which writes another tensor than it reads."""
    rounding: Rounding = Rounding()


def exact(x: Tensor) -> AbstractContextManager[object]:
    """Returns a context without autocast, which would run products in lower precision."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else _NOTHING


def encode(formula: Formula, weights: Weights, x: Tensor) -> Tensor:
    """Returns the values of features; of some, for their columns of the weights.

    Args:
        formula: of the dictionary; columns are enough if `needs_all` is False.
        weights: by name; of the dtype of `x`.
        x: (..., d_in).

    Returns:
        Values of the shape (..., features).
    """
    h, _, _ = _normalized(formula, x)
    if formula.subtracts_bias:
        h = h - weights["b_dec"]
    with exact(h):
        return ACTIVATIONS[formula.activation](formula, weights, h)


def decode(formula: Formula, weights: Weights, values: Tensor, x: Tensor | None) -> Tensor:
    """Returns the reconstruction.

    Args:
        formula: of the dictionary.
        weights: by name; of the dtype of `values`.
        values: (..., features).
        x: the encoded tensor, (..., d_in), where `needs_input` is True.

    Returns:
        The reconstruction, (..., d_out).
    """
    if formula.rescales:
        values = values * (1 / weights["norms"])
    bias, skip = weights["b_dec"], weights.get("W_skip")
    with exact(values):
        if formula.rounding.linear_decoder:
            decoded = linear(values, weights["W_dec"].T, bias)
        else:
            decoded = values @ weights["W_dec"] + bias
        skipped = None if x is None or skip is None else x @ skip.T
    if x is None:
        return decoded
    if not formula.transcodes:
        _, mean, scale = _normalized(formula, x)
        if mean is not None and scale is not None:
            decoded = decoded * scale + mean
        elif scale is not None:
            decoded = decoded / scale
    return decoded if skipped is None else decoded + skipped


def needs_all(formula: Formula) -> bool:
    """Returns True if a feature's value depends on the other features'."""
    return formula.activation in COUNTED


def needs_input(formula: Formula, weights: Weights) -> bool:
    """Returns True if the reconstruction depends on the input in another way than by the values."""
    normalizes = formula.normalization != "none" and not formula.transcodes
    return normalizes or "W_skip" in weights


def output_scale(formula: Formula, x: Tensor) -> Tensor | None:
    """Returns the factor of a decoder row in the reconstruction, (..., 1); None for 1."""
    if formula.transcodes:
        return None
    _, _, scale = _normalized(formula, x)
    return 1 / scale if formula.normalization == CONSTANT_NORM and scale is not None else scale


def _normalized(formula: Formula, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Returns the normalised input, and what undoes it: a mean and a scale, as far as there are."""
    if formula.normalization == LAYER_NORM:
        mean = x.mean(dim=-1, keepdim=True)
        centred = x - mean
        scale = centred.std(dim=-1, keepdim=True)
        return centred / (scale + _EPSILON), mean, scale
    if formula.normalization == CONSTANT_NORM:
        scale = x.shape[-1] ** 0.5 / x.norm(dim=-1, keepdim=True)
        return x * scale, None, scale
    return x, None, None


def _before(formula: Formula, weights: Weights, h: Tensor) -> Tensor:
    """Returns the values before the activation."""
    if formula.rounding.linear_encoder:
        return linear(h, weights["W_enc"].T, weights["b_enc"])
    return h @ weights["W_enc"] + weights["b_enc"]


def _relu(formula: Formula, weights: Weights, h: Tensor) -> Tensor:
    return _before(formula, weights, h).relu()


def _jump(formula: Formula, weights: Weights, h: Tensor) -> Tensor:
    before = _before(formula, weights, h)
    return before * (before > weights["threshold"])


def _jumprelu(formula: Formula, weights: Weights, h: Tensor) -> Tensor:
    before = _before(formula, weights, h)
    return before.relu() * (before > weights["threshold"])


def _gated(formula: Formula, weights: Weights, h: Tensor) -> Tensor:
    product = h @ weights["W_enc"]
    scale = weights["r_mag"].exp()
    scaled = scale * product if formula.rounding.scaled_product else h @ (weights["W_enc"] * scale)
    opened = (product + weights["b_gate"] > 0).to(h.dtype)
    return opened * (scaled + weights["b_mag"]).relu()


def _ranked(formula: Formula, weights: Weights, h: Tensor) -> Tensor:
    before = _before(formula, weights, h)
    return before * weights["norms"] if formula.rescales else before


def _topk(formula: Formula, weights: Weights, h: Tensor) -> Tensor:
    ranked = _ranked(formula, weights, h)
    if formula.rounding.relu_first:
        ranked = ranked.relu()
    values, places = ranked.topk(formula.k, dim=-1, sorted=False)
    return torch.zeros_like(ranked).scatter(-1, places, values.relu())


def _abstopk(formula: Formula, weights: Weights, h: Tensor) -> Tensor:
    ranked = _ranked(formula, weights, h)
    places = ranked.abs().topk(formula.k, dim=-1, sorted=False).indices
    return torch.zeros_like(ranked).scatter(-1, places, ranked.gather(-1, places))


def _groupmax(formula: Formula, weights: Weights, h: Tensor) -> Tensor:
    groups = _ranked(formula, weights, h).relu().unflatten(-1, (formula.k, -1))
    values, places = groups.max(dim=-1, keepdim=True)
    return torch.zeros_like(groups).scatter(-1, places, values).flatten(-2)


ACTIVATIONS: Final[Mapping[str, Callable[[Formula, Weights, Tensor], Tensor]]] = {
    "relu": _relu,
    "jumprelu": _jumprelu,
    "jump": _jump,
    "gated": _gated,
    "topk": _topk,
    "abstopk": _abstopk,
    "groupmax": _groupmax,
}
"""Kinds of dictionaries: the values of features that an encoder reads from its input."""
COUNTED: Final = frozenset({"topk", "abstopk", "groupmax"})
"""Kinds with a `k`, in which features compete."""
OWN_WEIGHTS: Final[Mapping[str, tuple[str, ...]]] = {
    "jumprelu": ("threshold",),
    "jump": ("threshold",),
    "gated": ("b_gate", "b_mag", "r_mag"),
}
"""Weights that a kind has beside the encoder, the decoder and their biases."""

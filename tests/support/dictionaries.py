"""Random dictionaries, and their formulas written out for one token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import ferrohook as fh

D_IN, D_SAE, K = 12, 40, 5
KINDS: dict[str, dict[str, Any]] = {
    "relu": {},
    "jumprelu": {},
    "jump": {},
    "gated": {},
    "topk": {"k": K},
    "topk rescaled": {"k": K, "rescale_acts_by_decoder_norm": True},
    "abstopk": {"k": K},
    "abstopk rescaled": {"k": K, "rescale_acts_by_decoder_norm": True},
    "groupmax": {"k": K},
}
"""Options of each kind of dictionary."""
NORMALIZATIONS = ("none", "layer_norm", "constant_norm_rescale")


def weights_of(kind: str, d_out: int = D_IN, seed: int = 0, width: int = D_IN) -> dict[str, Tensor]:
    """Random weights that a kind needs, under the names of `Dictionary`."""
    random = torch.Generator().manual_seed(seed)
    shapes = {"W_enc": (width, D_SAE), "W_dec": (D_SAE, d_out), "b_dec": (d_out,)}
    kind = kind.partition(" ")[0]
    own: tuple[str, ...] = ("b_gate", "b_mag", "r_mag") if kind == "gated" else ("b_enc",)
    own += ("threshold",) if kind.startswith("jump") else ()
    shapes |= dict.fromkeys(own, (D_SAE,))
    weights = {name: torch.randn(it, generator=random) / 3 for name, it in shapes.items()}
    if kind == "jumprelu":
        weights["threshold"] = weights["threshold"].abs()
    return weights


def dictionary_of(
    kind: str, seed: int = 0, width: int = D_IN, d_out: int | None = None, **more: Any
) -> fh.Dictionary:
    """A random dictionary of a kind; `d_out`: None for `width`."""
    weights: dict[str, Any] = {**weights_of(kind, d_out or width, seed=seed, width=width)}
    return fh.Dictionary(**weights, activation=kind.partition(" ")[0], **KINDS[kind], **more)


def values_by_hand(kind: str, w: dict[str, Tensor], h: Tensor) -> Tensor:
    """Values of one token, feature by feature, from the encoder's input."""
    values = torch.zeros(D_SAE)
    ranks = torch.zeros(D_SAE)
    for i in range(D_SAE):
        product = torch.stack([h[j] * w["W_enc"][j, i] for j in range(len(h))]).sum()
        if kind == "gated":
            magnitude = product * w["r_mag"][i].exp() + w["b_mag"][i]
            opened = product + w["b_gate"][i] > 0
            values[i] = magnitude if opened and magnitude > 0 else 0
            continue
        before = product + w["b_enc"][i]
        if "rescaled" in kind:
            before *= w["W_dec"][i].square().sum().sqrt()
        positive = before.clamp(min=0)
        if kind == "relu":
            values[i] = positive
        elif kind in {"jump", "jumprelu"}:
            passed = before if kind == "jump" else positive
            values[i] = passed if before > w["threshold"][i] else 0
        else:
            values[i] = before if "abs" in kind else positive
            ranks[i] = before.abs() if "abs" in kind else before
    if kind == "groupmax":
        size = D_SAE // K
        kept = {g * size + int(values[g * size : (g + 1) * size].argmax()) for g in range(K)}
    elif "top" in kind:
        kept = {*ranks.argsort(descending=True)[:K].tolist()}
    else:
        return values
    return torch.stack([value if i in kept else value * 0 for i, value in enumerate(values)])


def normalized_by_hand(normalization: str, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Encoder's input of one token, and the scale and shift that decoding applies."""
    one, zero = torch.tensor(1.0), torch.tensor(0.0)
    if normalization == "layer_norm":
        mean = x.sum() / len(x)
        std = ((x - mean).square().sum() / (len(x) - 1)).sqrt()
        return (x - mean) / (std + 1e-5), std, mean
    if normalization == "constant_norm_rescale":
        length = x.square().sum().sqrt()
        return x / length * len(x) ** 0.5, length / len(x) ** 0.5, zero
    return x, one, zero


def rows_of_values(kind: str, w: dict[str, Tensor], x: Tensor) -> Tensor:
    """Values of all tokens, of a relu or groupmax dictionary."""
    values = (x @ w["W_enc"] + w["b_enc"]).clamp(min=0)
    if kind == "groupmax":
        groups = values.unflatten(-1, (K, -1))
        values = torch.where(groups == groups.amax(-1, keepdim=True), groups, 0.0).flatten(-2)
    return values

"""Dictionaries: sparse autoencoders and transcoders."""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Self

import torch
from torch import Tensor

from ferrohook.dictionaries.formats import arguments_of
from ferrohook.dictionaries.formulas import (
    ACTIVATIONS,
    COUNTED,
    NORMALIZATIONS,
    OWN_WEIGHTS,
    Formula,
    Rounding,
    decode,
    encode,
    exact,
    needs_input,
    output_scale,
)
from ferrohook.dictionaries.weights import StoredWeights
from ferrohook.errors import HookTypeError
from ferrohook.util.arguments import at_least, check_encodes, expect

if TYPE_CHECKING:
    import os

_OWN: Final = ("b_enc", "threshold", "b_gate", "b_mag", "r_mag")
"""Weights with a number for each feature."""
_FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Dictionary:
    """A sparse autoencoder or a transcoder: features, each with an encoder and a decoder.

    Immutable. `load` reads one from a file; the constructor takes weights, under SAELens' names. It
    copies the ones that require grad; leave the others unchanged.

    Args:
        W_enc: encoder, (d_in, d_sae).
        W_dec: decoder, (d_sae, d_out), a row for each feature.
        b_dec: bias of the reconstruction, (d_out,).
        b_enc: bias of the encoder, (d_sae,); not for `"gated"`.
        activation: kind of the values, computed from `pre = x @ W_enc + b_enc`.
            `"relu"`: `relu(pre)`; `"jumprelu"`: `relu(pre)` where `pre > threshold`; `"jump"`:
            `pre` there, which differs for negative thresholds; `"gated"`: `relu(x @ (W_enc *
            exp(r_mag)) + b_mag)` where `x @ W_enc + b_gate > 0`; `"topk"`: the ReLU of the `k`
            largest `pre`; `"abstopk"`: the `k` of largest magnitude, with their signs;
            `"groupmax"`: the ReLU of the largest of each of `k` groups of neighbours.
        threshold: (d_sae,), for `"jumprelu"` and `"jump"`.
        b_gate: (d_sae,), for `"gated"`.
        b_mag: (d_sae,), for `"gated"`.
        r_mag: (d_sae,), for `"gated"`.
        W_skip: skip connection of a transcoder, (d_out, d_in).
        k: for `"topk"`, `"abstopk"` and `"groupmax"`.
        apply_b_dec_to_input: encode `x - b_dec`; not for transcoders.
        rescale_acts_by_decoder_norm: multiply `pre` by the norms of the decoder's rows, for
            `"topk"` and `"abstopk"`; decoding divides by them.
        normalize_activations: normalisation of the input, undone after decoding:
            `"none"`, `"layer_norm"` or `"constant_norm_rescale"`.
        transcoder: the dictionary writes another tensor than it reads.
        reads: place of the tensor that the dictionary reads, such as `"@resid_post.8"`.
        writes: place of the tensor that a transcoder writes.
        max_activations: largest known value of each feature, (d_sae,), for features that are set
            in multiples of it.
        name: stands for the dictionary in the JSON of plans.
        rounding: order of operations in which libraries differ in the last bit; `load` sets it.

    Raises:
        HookTypeError: an argument has the wrong type.
        ValueError: a shape or a value does not fit, a weight is missing, or a weight belongs to
            another `activation`.
    """

    def __init__(  # noqa: PLR0913 (the weights and options of seven kinds)
        self,
        W_enc: Tensor,  # noqa: N803 (the field's names)
        W_dec: Tensor,  # noqa: N803
        *,
        b_dec: Tensor,
        b_enc: Tensor | None = None,
        activation: str = "relu",
        threshold: Tensor | None = None,
        b_gate: Tensor | None = None,
        b_mag: Tensor | None = None,
        r_mag: Tensor | None = None,
        W_skip: Tensor | None = None,  # noqa: N803
        k: int | None = None,
        apply_b_dec_to_input: bool = False,
        rescale_acts_by_decoder_norm: bool = False,
        normalize_activations: str = "none",
        transcoder: bool = False,
        reads: str | None = None,
        writes: str | None = None,
        max_activations: Tensor | None = None,
        name: str | None = None,
        rounding: Rounding | None = None,
    ) -> None:
        expect(activation, str, "activation of Dictionary must be a str")
        expect(rounding, Rounding | None, "rounding of Dictionary must be a Rounding")
        given = {
            "W_enc": W_enc,
            "W_dec": W_dec,
            "b_dec": b_dec,
            "b_enc": b_enc,
            "threshold": threshold,
            "b_gate": b_gate,
            "b_mag": b_mag,
            "r_mag": r_mag,
            "W_skip": W_skip,
        }
        self._check_kind(activation, given, k)
        self._check_options(
            activation,
            normalize_activations,
            apply_b_dec_to_input=apply_b_dec_to_input,
            rescale_acts_by_decoder_norm=rescale_acts_by_decoder_norm,
            transcoder=transcoder,
        )
        if not transcoder and (W_skip is not None or writes is not None):
            option = "W_skip" if W_skip is not None else "writes"
            msg = f"{option} is for transcoders: pass transcoder=True"
            raise ValueError(msg)
        tensors = {
            name: it.detach().clone() if it.requires_grad else it.detach()
            for name, it in given.items()
            if it is not None
        }
        self._check_shapes(tensors, transcoder=transcoder)
        if k is not None:
            self._check_k(activation, k, len(W_dec))
        if rescale_acts_by_decoder_norm:
            tensors["norms"] = tensors["W_dec"].norm(dim=-1)
            if not bool((tensors["norms"] > 0).all()):
                msg = "W_dec has a row of zeros, and rescale_acts_by_decoder_norm divides by norms"
                raise ValueError(msg)
        self.formula = Formula(
            activation=activation,
            k=k or 0,
            subtracts_bias=apply_b_dec_to_input,
            normalization=normalize_activations,
            rescales=rescale_acts_by_decoder_norm,
            transcodes=transcoder,
            rounding=rounding or Rounding(),
        )
        """Encoder and decoder."""
        self.weights = StoredWeights(tensors)
        """Its tensors by name."""
        for label, place in (("reads", reads), ("writes", writes), ("name", name)):
            expect(place, str | None, f"{label} of Dictionary must be a str")
            if place is not None:
                check_encodes(place, label)
        self.reads = reads
        """Place of the tensor that it reads; None if unknown."""
        self.writes = writes if transcoder else reads
        """Place of the tensor that it writes; for an autoencoder the one that it reads."""
        self.name = name
        """Its name in the JSON of plans; None without one."""
        self.max_activations = self._checked_maxima(max_activations)
        """Largest known value of each feature, (d_sae,); None if unknown."""

    @classmethod
    def load(  # noqa: PLR0913 (all but the first by keyword)
        cls,
        path: str | os.PathLike[str],
        *,
        dtype: torch.dtype | None = None,
        reads: str | None = None,
        writes: str | None = None,
        k: int | None = None,
        max_activations: Tensor | None = None,
        name: str | None = None,
    ) -> Self:
        """Reads a dictionary from disk; the contents show the format.

        | written by | path |
        | --- | --- |
        | SAELens | folder with `cfg.json` and `sae_weights.safetensors` |
        | sparsify | folder with `cfg.json` and `sae.safetensors` |
        | dictionary_learning | folder with `config.json` and `ae.pt` |
        | Gemma Scope | folder with `params.npz`, or that file |
        | Gemma Scope 2 | folder with `config.json` and `params.safetensors` |
        | Llama Scope | folder with `hyperparams.json` and `checkpoints/final.safetensors` |
        | Qwen Scope | file `layerN.sae.pt` |
        | circuit-tracer | file `layer_N.safetensors`, beside `config.yaml` |

        Values have the bits that the library itself computes, in the file's dtype. A pickle is read
        with `weights_only=True`: no code in it runs.

        Args:
            path: folder or file.
            dtype: of the weights; None for the file's.
            reads: place of the tensor that the dictionary reads, such as `"@resid_post.8"`; needed
                where the file does not name it, or names one that is no quantity.
            writes: place of the tensor that a transcoder writes; likewise.
            k: number of values that remain, for Qwen Scope, whose files do not say it.
            max_activations: see `Dictionary`.
            name: see `Dictionary`.

        Raises:
            FileNotFoundError: there is no such file or folder.
            HookError: a package is missing that reads the format.
            ValueError: the format is unknown or unsupported, a tensor or a setting is missing,
                unknown or malformed, or a place has to be said.
        """
        found = arguments_of(path, dtype, k=k, reads=reads, writes=writes)
        try:
            return cls(**found, max_activations=max_activations, name=name)
        except ValueError as error:
            msg = f"{path}: {error}"
            raise ValueError(msg) from error

    @property
    def d_in(self) -> int:
        """Width of the tensor that it reads."""
        return self.weights.tensors["W_enc"].shape[0]

    @property
    def d_out(self) -> int:
        """Width of the tensor that it writes."""
        return self.weights.tensors["W_dec"].shape[1]

    @property
    def d_sae(self) -> int:
        """Number of features."""
        return self.weights.tensors["W_dec"].shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights, and of the values that `encode` returns."""
        return self.weights.tensors["W_enc"].dtype

    @property
    def transcoder(self) -> bool:
        """True if it writes another tensor than the one that it reads."""
        return self.formula.transcodes

    def encode(self, x: Tensor) -> Tensor:
        """Returns the values of all features.

        Args:
            x: (..., d_in), or (..., heads, head_dim) with heads side by side in `d_in`; it is cast
                to the weights' dtype.

        Returns:
            Values of the shape (..., d_sae), in the weights' dtype, on the device of `x`.

        Raises:
            HookTypeError: `x` is no tensor of floating point of that shape.
        """
        flat = flattened(self, x).to(self.dtype)
        return encode(self.formula, self.weights.on(x.device, self.dtype), flat)

    def decode(self, values: Tensor, x: Tensor | None = None) -> Tensor:
        """Returns the reconstruction.

        Args:
            values: of features, (..., d_sae).
            x: the encoded tensor, for a dictionary that normalises its input or has a skip
                connection.

        Returns:
            (..., d_out), or the shape of `x`, if given to an autoencoder.

        Raises:
            HookTypeError: a tensor has the wrong dtype or shape, or `x` is missing.
        """
        expect(values, Tensor, "values of decode must be a tensor")
        if not values.dim() or values.shape[-1] != self.d_sae or not values.is_floating_point():
            msg = (
                f"values of decode must be of floating point, of shape (..., {self.d_sae}), got "
                f"{values.dtype} of {tuple(values.shape)}"
            )
            raise HookTypeError(msg)
        weights = self.weights.on(values.device, self.dtype)
        if x is None and needs_input(self.formula, weights):
            msg = "decode needs x: the reconstruction depends on what was encoded"
            raise HookTypeError(msg)
        flat = None if x is None else flattened(self, x).to(self.dtype)
        decoded = decode(self.formula, weights, values.to(self.dtype), flat)
        return decoded if x is None or self.transcoder else decoded.reshape(x.shape)

    def skip(self, x: Tensor) -> Tensor | None:
        """Returns the skip connection's part of the reconstruction, (..., d_out).

        Args:
            x: the encoded tensor.

        Returns:
            None if it has none.
        """
        skip = self.weights.on(x.device, self.dtype).get("W_skip")
        if skip is None:
            return None
        with exact(x):
            return flattened(self, x).to(self.dtype) @ skip.T

    def written(self, index: Tensor, x: Tensor) -> Tensor:
        """Returns the vectors that features of value 1 add to a reconstruction.

        Args:
            index: numbers of features, (features,).
            x: the encoded vector, (d_in,).

        Returns:
            (features, d_out).
        """
        weights = self.weights.on(x.device, self.dtype)
        rows = weights["W_dec"][index]
        if self.formula.rescales:
            rows = rows / weights["norms"][index, None]
        scale = output_scale(self.formula, flattened(self, x).to(self.dtype))
        return rows if scale is None else rows * scale

    @property
    def _content(self) -> tuple[Any, ...]:
        return self._digest, self.formula, self.reads, self.writes, self.name

    @cached_property
    def _digest(self) -> str:
        digest = hashlib.sha256()
        tensors = dict(self.weights.tensors)
        if self.max_activations is not None:
            tensors["max_activations"] = self.max_activations
        for name, each in sorted(tensors.items()):
            digest.update(f"{name} {each.dtype} {tuple(each.shape)}".encode())
            flat = each.cpu().contiguous().reshape(-1)
            digest.update(flat.view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Dictionary) and self._content == other._content

    def __hash__(self) -> int:
        return hash(self._content)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_digest"}

    def __deepcopy__(self, _memo: dict[int, Any]) -> Self:
        return self

    def __repr__(self) -> str:
        kind = f"{self.formula.activation}{' transcoder' if self.transcoder else ''}"
        named = {"reads": self.reads, "writes": self.writes if self.transcoder else None}
        named["name"] = self.name
        shown = [f"{name}={it!r}" for name, it in named.items() if it is not None]
        return f"Dictionary({', '.join([f'{kind}, {self.d_in} -> {self.d_sae}', *shown])})"

    @staticmethod
    def _check_kind(activation: str, given: dict[str, Tensor | None], k: int | None) -> None:
        """Validates the kind, and which weights were passed."""
        if activation not in ACTIVATIONS:
            msg = f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}"
            raise ValueError(msg)
        own = OWN_WEIGHTS.get(activation, ())
        needed = {"W_enc", "W_dec", "b_dec", *own}
        if activation != "gated":
            needed.add("b_enc")
        for name, each in given.items():
            expect(each, Tensor | None, f"{name} of Dictionary must be a tensor")
            if each is None and name in needed:
                msg = f"{activation} needs {name}"
                raise ValueError(msg)
            if each is not None and name not in {*needed, "W_skip"}:
                msg = f"{activation} has no {name}: leave it out"
                raise ValueError(msg)
        if (k is not None) != (activation in COUNTED):
            msg = f"{activation} {'needs k' if k is None else 'has no k: leave it out'}"
            raise ValueError(msg)

    @staticmethod
    def _check_options(activation: str, normalization: str, **flags: bool) -> None:
        """Validates the options that need no weights."""
        for option, flag in flags.items():
            expect(flag, bool, f"{option} of Dictionary must be a bool")
        if flags["rescale_acts_by_decoder_norm"] and activation not in {"topk", "abstopk"}:
            msg = f"rescale_acts_by_decoder_norm is for topk and abstopk, not for {activation}"
            raise ValueError(msg)
        if flags["apply_b_dec_to_input"] and flags["transcoder"]:
            msg = "apply_b_dec_to_input is not for transcoders: b_dec belongs to what they write"
            raise ValueError(msg)
        if normalization not in NORMALIZATIONS:
            msg = (
                f"normalize_activations must be one of {', '.join(NORMALIZATIONS)}, got "
                f"{normalization!r}"
            )
            raise ValueError(msg)

    @staticmethod
    def _check_shapes(tensors: dict[str, Tensor], *, transcoder: bool) -> None:
        """Validates dtypes, shapes and values of the weights."""
        encoder, decoder = tensors["W_enc"], tensors["W_dec"]
        for name in ("W_enc", "W_dec"):
            if tensors[name].dim() != 2 or not tensors[name].numel():  # noqa: PLR2004 (a matrix)
                msg = f"{name} must be a matrix, got the shape {tuple(tensors[name].shape)}"
                raise ValueError(msg)
        d_in, d_sae = encoder.shape
        d_out = decoder.shape[1] if transcoder else d_in
        expected: dict[str, tuple[int, ...]] = dict.fromkeys(_OWN, (d_sae,))
        expected |= {"W_enc": (d_in, d_sae), "W_dec": (d_sae, d_out), "b_dec": (d_out,)}
        expected["W_skip"] = (d_out, d_in)
        for name, each in tensors.items():
            if each.shape != expected[name]:
                msg = f"{name} must have the shape {expected[name]}, got {tuple(each.shape)}"
                raise ValueError(msg)
            if each.dtype not in _FLOATS or each.dtype != encoder.dtype:
                names = ", ".join(str(it).removeprefix("torch.") for it in _FLOATS)
                msg = f"the weights must have one dtype of {names}, got {each.dtype} for {name}"
                raise ValueError(msg)
            if each.device != encoder.device:
                msg = f"the weights must be on one device, got {each.device} for {name}"
                raise ValueError(msg)
            # A threshold of infinity switches a feature off.
            wrong = each.isnan() if name == "threshold" else ~each.isfinite()
            if bool(wrong.any()):
                msg = f"{name} must not have NaN{'' if name == 'threshold' else ' or infinities'}"
                raise ValueError(msg)

    @staticmethod
    def _check_k(activation: str, k: int, d_sae: int) -> None:
        at_least(1, "k", k)
        if k > d_sae or (activation == "groupmax" and d_sae % k):
            msg = (
                f"k must be at most the number of features, {d_sae}"
                f"{', and divide it' if activation == 'groupmax' else ''}, got {k}"
            )
            raise ValueError(msg)

    def _checked_maxima(self, value: Tensor | None) -> Tensor | None:
        if value is None:
            return None
        expect(value, Tensor, "max_activations must be a tensor")
        if value.shape != (self.d_sae,) or not value.is_floating_point():
            msg = (
                f"max_activations must be of floating point, of shape ({self.d_sae},), got "
                f"{value.dtype} of {tuple(value.shape)}"
            )
            raise ValueError(msg)
        if not bool(value.isfinite().all()):
            msg = "max_activations must not have NaN or infinities"
            raise ValueError(msg)
        return value.detach().to("cpu", torch.float32)


def flattened(dictionary: Dictionary, x: Tensor) -> Tensor:
    """Returns a tensor that a dictionary reads as (..., d_in), with heads laid side by side.

    Raises:
        HookTypeError: it is no tensor of floating point of a shape that fits.
    """
    expect(x, Tensor, "a dictionary reads a tensor")
    width = dictionary.d_in
    if x.is_floating_point() and x.dim():
        if x.shape[-1] == width:
            return x
        if x.dim() > 1 and x.shape[-1] * x.shape[-2] == width:
            return x.flatten(-2)
    msg = (
        f"{dictionary!r} reads tensors of floating point, of shape (..., {width}) or (..., heads, "
        f"head_dim), got {x.dtype} of {tuple(x.shape)}"
    )
    raise HookTypeError(msg)

"""Formats of dictionaries on the disk: whose file it is, and what its settings mean."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor

from ferrohook.dictionaries.files import (
    chosen,
    read_json,
    read_npz,
    read_pickle,
    read_safetensors,
    read_yaml,
    setting,
)
from ferrohook.dictionaries.formulas import NORMALIZATIONS, Rounding
from ferrohook.names.spelling import SIGN, from_lens, suggested
from ferrohook.util.texts import listed

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping

_PLAIN: Final = {name: name for name in ("W_enc", "W_dec", "b_enc", "b_dec")}
_THRESHOLD: Final = {"threshold": "threshold"}
_LINEAR: Final = {
    "W_enc": "encoder.weight",
    "b_enc": "encoder.bias",
    "W_dec": "decoder.weight",
    "b_dec": "decoder.bias",
}


class _Found(NamedTuple):
    """Contents of a dictionary's file."""

    weights: dict[str, Tensor]
    """Weights by the names that `Dictionary` takes."""
    options: dict[str, Any]
    """Other arguments of `Dictionary`, without places."""
    reads: str | None = None
    """Place of the tensor that it reads, as the file names it; None if it names none."""
    writes: str | None = None


class _Request(NamedTuple):
    """The user's arguments for a file."""

    dtype: torch.dtype | None
    k: int | None
    writes: str | None


def arguments_of(
    path: str | os.PathLike[str],
    dtype: torch.dtype | None,
    *,
    k: int | None,
    reads: str | None,
    writes: str | None,
) -> dict[str, Any]:
    """Returns the arguments of `Dictionary` that a file or a folder has; see `Dictionary.load`."""
    where = Path(path)
    read, at = _format_of(where)
    if k is not None and read is not _qwen_scope:
        msg = f"{where} says what k is: leave k out"
        raise ValueError(msg)
    found = read(at, _Request(dtype, k, writes))
    transcodes = found.options.get("transcoder", False)
    if writes is not None and not transcodes:
        msg = f"{where} is an autoencoder, which writes what it reads: leave out writes"
        raise ValueError(msg)
    places = {"reads": _place(where, "reads", reads, found.reads)}
    if transcodes:
        places["writes"] = _place(where, "writes", writes, found.writes)
    return {**found.weights, **found.options, **places}


def _format_of(path: Path) -> tuple[Callable[[Path, _Request], _Found], Path]:
    """Returns the reader of a path, and the path that it takes."""
    if not path.exists():
        msg = f"there is no file or folder {path}"
        raise FileNotFoundError(msg)
    if path.is_dir():
        for name, read in _BY_FILE.items():
            if (path / name).is_file():
                return read, path
        layers = sorted(each.name for each in path.glob("*layer*.safetensors"))
        instead = f": name one of its files, such as {layers[0]}" if layers else ""
        if any(path.glob("W_enc_*.safetensors")):
            raise ValueError(_refusal(path, "a cross-layer transcoder"))
        files = listed(sorted(each.name for each in path.iterdir())) or "no files"
        expected = ", ".join(_BY_FILE)
        msg = f"{path} has {files}, and a dictionary has one of {expected}{instead}"
        raise ValueError(msg)
    if path.name in _BY_FILE:
        return _BY_FILE[path.name], path.parent
    if path.name == "final.safetensors":
        return _llama_scope, path.parent.parent
    if path.suffix in _BY_SUFFIX:
        return _BY_SUFFIX[path.suffix], path
    msg = (
        f"{path} is not a file of a dictionary: expected one of "
        f"{', '.join([*_BY_SUFFIX, *_BY_FILE])}"
    )
    raise ValueError(msg)


def _refusal(path: Path, kind: str) -> str:
    return f"{path} is {kind}, which is not supported: one token and one layer must be enough"


def _cast(tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
    # A transposed matrix keeps its strides: other strides may round otherwise.
    return {name: it if dtype is None else it.to(dtype) for name, it in tensors.items()}


# --- Places --------------------------------------------------------------------------------------

_MODULES: Final = (
    (r"layers\.(\d+)(?:\.output)?", "resid_post"),
    (r"layers\.(\d+)\.self_attn\.o_proj\.input", "z"),
    (r"layers\.(\d+)\.pre_feedforward_layernorm\.output", "mlp_in"),
    (r"layers\.(\d+)\.post_feedforward_layernorm\.output", "mlp_out"),
)
"""Inputs and outputs of transformers' modules that are a quantity in every model with them."""
_NORMALIZED: Final = {"ln1.hook_normalized": "attn_in", "ln2.hook_normalized": "mlp_in"}


def _place(path: Path, option: str, given: str | None, named: str | None) -> str:
    """Returns the place that the user says or the file names, as a selector takes it."""
    source = f"{option}={given!r}" if given is not None else f"{path} {option} {named!r}"
    name = named if given is None else given
    if name is None:
        msg = f"{path} does not name the place that it {option}: pass {option}='@resid_post.8', say"
        raise ValueError(msg)
    if not isinstance(name, str):
        msg = f"{source}: a place is a str"
        raise ValueError(msg)  # noqa: TRY004 (of a file)
    if (quantity := _quantity(name)) is not None:
        return quantity
    if "hook_" not in name and (given is not None or name.endswith(".output")):
        return name.removesuffix(".output")
    difference = _difference(name) or "its place in a model is not known"
    msg = f"{source} is not a quantity: {difference}. Pass the place as {option}="
    raise ValueError(msg)


def _quantity(name: str) -> str | None:
    if name.startswith(SIGN):
        return name
    block, _, point = name.partition(".mlp.")
    if point == "hook_in" and (found := from_lens(f"{block}.hook_mlp_out")) is not None:
        return found.replace("mlp_out", "mlp_in")
    if (found := from_lens(name)) is not None:
        return found
    for pattern, kind in _MODULES:
        if match := re.fullmatch(rf"(?:[a-z_]+\.)*{pattern}", name):
            return f"{SIGN}{kind}.{match[1]}"
    return None


def _difference(name: str) -> str | None:
    """Returns how a hook point differs from the quantity that its name resembles."""
    for point, kind in _NORMALIZED.items():
        if name.endswith(point):
            number = next((each for each in name.split(".") if each.isdigit()), "*")
            quantity = f"{SIGN}{kind}.{number}"
            return f"{quantity!r} is after the norm's weight, while {point} is before it"
    return suggested(name)


# --- SAELens -------------------------------------------------------------------------------------

_TRANSCODERS: Final = {
    "transcoder": "relu",
    "skip_transcoder": "relu",
    "jumprelu_transcoder": "jumprelu",
    "jumprelu_skip_transcoder": "jumprelu",
}
_KINDS: Final = {
    "standard": "relu",
    "jumprelu": "jumprelu",
    "gated": "gated",
    "topk": "topk",
    "abstopk": "abstopk",
    **_TRANSCODERS,
}
"""Activations by SAELens' architecture."""
_OTHER_MACHINES: Final = {
    "temporal": "a temporal dictionary, which attends to earlier tokens",
    "matching_pursuit": "a matching-pursuit dictionary, which chooses features one by one",
}
_FOLDED: Final = {"expected_average_only_in": "none", "covariance_whitening": "none", None: "none"}
"""Normalisations that saving folds into the weights."""
_DTYPES: Final = {
    name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")
}


def _saelens(folder: Path, request: _Request) -> _Found:
    path = folder / "cfg.json"
    settings = read_json(path)
    metadata = setting(path, settings, "metadata", dict, None)
    if metadata is None:
        settings = _before_6(path, settings)
        metadata = settings
    kind = setting(path, settings, "architecture", str)
    if kind in _OTHER_MACHINES:
        raise ValueError(_refusal(path, _OTHER_MACHINES[kind]))
    if kind not in _KINDS:
        msg = (
            f"{path}: unknown architecture {kind!r}, expected one of {', '.join(_KINDS)}: a "
            "training checkpoint has to be saved as an inference model"
        )
        raise ValueError(msg)
    transcodes = kind in _TRANSCODERS
    options = _saelens_options(path, settings, kind)
    weights = _saelens_weights(folder, settings, kind, request.dtype)
    hooks = []
    for name, head in (("hook_name", "hook_head_index"), ("hook_name_out", "hook_head_index_out")):
        hook = metadata.get(f"hf_{name}") or metadata.get(name)
        number = metadata.get(head)
        if number is not None and isinstance(hook, str):
            quantity = _quantity(hook)
            hook = f"{hook}, head {number}" if quantity is None else f"{quantity}.{number}"
        hooks.append(hook)
    reads, writes = hooks
    return _Found(weights, options, reads, writes if transcodes else None)


def _before_6(path: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings of SAELens before 6.0 as later ones."""
    found = dict(settings)
    for old, new in (
        ("hook_point", "hook_name"),
        ("hook_point_head_index", "hook_head_index"),
        ("activation_fn_str", "activation_fn"),
    ):
        if old in found:
            found[new] = found.pop(old)
    found.setdefault("architecture", "standard")
    found.setdefault("apply_b_dec_to_input", True)
    activation = found.get("activation_fn", "relu")
    if activation == "topk":
        arguments = setting(path, found, "activation_fn_kwargs", dict)
        found |= {"architecture": "topk", "k": setting(path, arguments, "k", int)}
    elif activation != "relu":
        msg = f"{path}: unknown activation_fn {activation!r}, expected relu or topk"
        raise ValueError(msg)
    if isinstance(normalizes := found.get("normalize_activations"), bool):
        found["normalize_activations"] = "expected_average_only_in" if normalizes else "none"
    return found


def _saelens_options(path: Path, settings: Mapping[str, Any], kind: str) -> dict[str, Any]:
    normalization = settings.get("normalize_activations", "none")
    if not isinstance(normalization, str | None):
        normalization = repr(normalization)
    normalization = _FOLDED.get(normalization, normalization)
    if normalization not in NORMALIZATIONS:
        known = ", ".join(map(str, [*NORMALIZATIONS, *_FOLDED][:-1]))
        msg = f"{path}: unknown normalize_activations {normalization!r}, expected one of {known}"
        raise ValueError(msg)
    options: dict[str, Any] = {
        "activation": _KINDS[kind],
        "transcoder": kind in _TRANSCODERS,
        "apply_b_dec_to_input": setting(path, settings, "apply_b_dec_to_input", bool, default=True),
        "normalize_activations": normalization,
    }
    if kind in {"topk", "abstopk"}:
        options["k"] = setting(path, settings, "k", int)
        rescales = setting(path, settings, "rescale_acts_by_decoder_norm", bool, default=False)
        options["rescale_acts_by_decoder_norm"] = rescales
    return options


def _saelens_weights(
    folder: Path, settings: Mapping[str, Any], kind: str, dtype: torch.dtype | None
) -> dict[str, Tensor]:
    path = folder / "sae_weights.safetensors"
    tensors = read_safetensors(path)
    scale = tensors.pop("scaling_factor", tensors.pop("finetuning_scaling_factor", None))
    if scale is not None and not torch.allclose(scale, torch.ones_like(scale)):
        msg = f"{path} has a scaling_factor other than 1, which is not supported: fold it first"
        raise ValueError(msg)
    names = dict(_PLAIN)
    if kind == "gated":
        del names["b_enc"]
        names |= {name: name for name in ("b_gate", "b_mag", "r_mag")}
    if "jumprelu" in kind:
        names |= _THRESHOLD
    if "skip" in kind:
        names["W_skip"] = "W_skip"
    weights = chosen(path, tensors, names)
    sizes = {"d_in": (weights["W_enc"], 0), "d_sae": (weights["W_enc"], 1)}
    if kind in _TRANSCODERS:
        sizes["d_out"] = (weights["W_dec"], 1)
    for name, (tensor, dim) in sizes.items():
        size = setting(folder / "cfg.json", settings, name, int)
        if tensor.dim() != 2 or tensor.shape[dim] != size:  # noqa: PLR2004 (a matrix)
            msg = f"{folder}: cfg.json has {name} {size}, but a tensor has {tuple(tensor.shape)}"
            raise ValueError(msg)
    named = setting(folder / "cfg.json", settings, "dtype", str, "float32")
    own = _DTYPES.get(named.removeprefix("torch."))
    if own is None:
        msg = f"{folder}/cfg.json: unknown dtype {named!r}, expected one of {', '.join(_DTYPES)}"
        raise ValueError(msg)
    return _cast(weights, dtype or own)


# --- sparsify ------------------------------------------------------------------------------------


def _sparsify(folder: Path, request: _Request) -> _Found:
    path = folder / "cfg.json"
    settings = read_json(path)
    activation = setting(path, settings, "activation", str, "topk")
    if activation not in {"topk", "groupmax"} or settings.get("signed"):
        got = "signed" if settings.get("signed") else repr(activation)
        msg = f"{path}: unknown activation {got}, expected topk or groupmax"
        raise ValueError(msg)
    transcodes = setting(path, settings, "transcode", bool, default=False)
    skips = setting(path, settings, "skip_connection", bool, default=False)
    if skips and not transcodes:
        msg = f"{path}: an autoencoder with a skip connection is not supported"
        raise ValueError(msg)
    names = {"W_enc": "encoder.weight", "b_enc": "encoder.bias", "W_dec": "W_dec", "b_dec": "b_dec"}
    if skips:
        names["W_skip"] = "W_skip"
    file = folder / "sae.safetensors"
    weights = _cast(chosen(file, read_safetensors(file), names), request.dtype)
    weights["W_enc"] = weights["W_enc"].T
    width = setting(path, settings, "d_in", int)
    latents = setting(path, settings, "num_latents", int, 0)
    latents = latents or width * setting(path, settings, "expansion_factor", int)
    if weights["W_enc"].shape != (width, latents):
        shape = tuple(weights["W_enc"].T.shape)
        msg = f"{file}: encoder.weight must have the shape {(latents, width)}, got {shape}"
        raise ValueError(msg)
    options = {
        "activation": activation,
        "k": setting(path, settings, "k", int),
        "transcoder": transcodes,
        "apply_b_dec_to_input": not transcodes,
        "rounding": Rounding(linear_encoder=True, relu_first=True),
    }
    return _Found(weights, options)


# --- dictionary_learning -------------------------------------------------------------------------


def _dictionary_learning(folder: Path, request: _Request) -> _Found:
    path, file = folder / "config.json", folder / "ae.pt"
    trainer = setting(path, read_json(path), "trainer", dict)
    kind = setting(path, trainer, "dict_class", str)
    if kind not in _CLASSES:
        msg = f"{path}: unknown dict_class {kind!r}, expected one of {', '.join(_CLASSES)}"
        raise ValueError(msg)
    names, transposed, options = _CLASSES[kind]
    tensors = read_pickle(file)
    extra = {name: tensors.pop(name) for name in _EXTRA.get(kind, ()) if name in tensors}
    weights = _cast(chosen(file, tensors, names), request.dtype)
    if transposed:
        weights |= {name: weights[name].T for name in ("W_enc", "W_dec")}
    options = dict(options)
    if kind == "AutoEncoder":
        weights = _with_unit_rows(weights)
    elif kind == "AutoEncoderTopK":
        options["k"] = _number(file, extra, "k", int)
    elif kind in {"BatchTopKSAE", "MatryoshkaBatchTopKSAE"}:
        threshold = _number(file, extra, "threshold", float)
        weights["threshold"] = torch.full_like(weights["b_enc"], threshold)
    submodule = trainer.get("submodule_name")
    match = re.fullmatch(r"resid_post_layer_(\d+)", submodule or "")
    return _Found(weights, options, f"{SIGN}resid_post.{match[1]}" if match else None)


def _number(path: Path, tensors: Mapping[str, Tensor], name: str, kind: type) -> Any:
    """Returns a number that stands among the tensors."""
    value = tensors.get(name)
    if value is None or value.numel() != 1:
        msg = f"{path} must have one number called {name!r}"
        raise ValueError(msg)
    number = value.item()
    if kind is int and number != int(number):
        msg = f"{path}: {name} must be an int, got {number}"
        raise ValueError(msg)
    return kind(number)


def _with_unit_rows(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the weights with decoder rows of length 1, as the library loads an AutoEncoder."""
    norms = torch.norm(weights["W_dec"].T, dim=0).to(weights["W_dec"].dtype)
    if torch.allclose(norms, torch.ones_like(norms)):
        return weights
    scaled = {
        "W_dec": (weights["W_dec"].T / norms).T,
        "W_enc": (weights["W_enc"].T * norms[:, None]).T,
        "b_enc": weights["b_enc"] * norms,
    }
    return {**weights, **scaled}


_BIASED: Final = {**_LINEAR, "b_dec": "b_dec"}
_SUBTRACTS: Final = {"apply_b_dec_to_input": True, "rounding": Rounding(linear_encoder=True)}
_CLASSES: Final[Mapping[str, tuple[Mapping[str, str], bool, Mapping[str, Any]]]] = {
    "AutoEncoder": ({**_LINEAR, "b_dec": "bias"}, True, _SUBTRACTS),
    "AutoEncoderNew": (
        _LINEAR,
        True,
        {"rounding": Rounding(linear_encoder=True, linear_decoder=True)},
    ),
    "GatedAutoEncoder": (
        {
            "W_enc": "encoder.weight",
            "W_dec": "decoder.weight",
            "b_dec": "decoder_bias",
            "b_gate": "gate_bias",
            "b_mag": "mag_bias",
            "r_mag": "r_mag",
        },
        True,
        {
            "activation": "gated",
            "apply_b_dec_to_input": True,
            "rounding": Rounding(scaled_product=True),
        },
    ),
    "JumpReluAutoEncoder": ({**_PLAIN, **_THRESHOLD}, False, {"activation": "jumprelu"}),
    "AutoEncoderTopK": (
        _BIASED,
        True,
        {
            "activation": "topk",
            "apply_b_dec_to_input": True,
            "rounding": Rounding(linear_encoder=True, relu_first=True),
        },
    ),
    "BatchTopKSAE": (_BIASED, True, {"activation": "jumprelu", **_SUBTRACTS}),
    "MatryoshkaBatchTopKSAE": (
        _PLAIN,
        False,
        {"activation": "jumprelu", "apply_b_dec_to_input": True},
    ),
}
"""Names of the weights, True if the matrices are transposed, and options, by class."""
_EXTRA: Final = {
    "AutoEncoderTopK": ("k", "threshold"),
    "BatchTopKSAE": ("k", "threshold"),
    "MatryoshkaBatchTopKSAE": ("k", "threshold", "group_sizes"),
}
"""Numbers among the tensors of a class."""


# --- Scopes --------------------------------------------------------------------------------------


def _gemma_scope(path: Path, request: _Request) -> _Found:
    file = path / "params.npz" if path.is_dir() else path
    if any("embedding" in part for part in file.parts[-4:-1]):
        raise ValueError(_refusal(file, "a dictionary of scaled embeddings"))
    weights = chosen(file, read_npz(file), {**_PLAIN, **_THRESHOLD})
    # The file of a transcoder looks the same.
    options = {"activation": "jumprelu", "transcoder": request.writes is not None}
    return _Found(_cast(weights, request.dtype), options)


def _gemma_scope_2(path: Path, request: _Request) -> _Found:
    file = path / "params.safetensors" if path.is_dir() else path
    settings_path = file.with_name("config.json")
    settings = read_json(settings_path)
    architecture = setting(settings_path, settings, "architecture", str)
    if architecture != "jump_relu":
        msg = f"{settings_path}: unknown architecture {architecture!r}, expected jump_relu"
        raise ValueError(msg)
    names = {"W_enc": "w_enc", "W_dec": "w_dec", "b_enc": "b_enc", "b_dec": "b_dec"}
    skip = {"W_skip": "affine_skip_connection"}
    weights = chosen(file, read_safetensors(file), {**names, **_THRESHOLD}, skip)
    if weights["W_dec"].dim() > 2:  # noqa: PLR2004 (a matrix)
        raise ValueError(_refusal(file, "a cross-layer transcoder"))
    if "W_skip" in weights:
        weights["W_skip"] = weights["W_skip"].T.contiguous()
    writes = settings.get("hf_hook_point_out")
    transcodes = writes is not None or "W_skip" in weights
    options = {"activation": "jumprelu", "transcoder": transcodes}
    return _Found(_cast(weights, request.dtype), options, settings.get("hf_hook_point_in"), writes)


def _llama_scope(folder: Path, request: _Request) -> _Found:
    path = folder / "hyperparams.json"
    settings = read_json(path)
    hook, out = settings.get("hook_point_in"), settings.get("hook_point_out")
    if out is not None and out != hook:
        raise ValueError(_refusal(path, "a transcoder of Llama Scope"))
    activation = settings.get("act_fn", "jumprelu")
    if activation != "jumprelu":
        msg = f"{path}: unknown act_fn {activation!r}, expected jumprelu"
        raise ValueError(msg)
    for option in ("use_glu_encoder", "apply_decoder_bias_to_pre_encoder"):
        if settings.get(option):
            msg = f"{path}: {option} is not supported"
            raise ValueError(msg)
    norms = setting(path, settings, "dataset_average_activation_norm", dict)
    norm = setting(path, norms, "in", int | float)
    if not norm > 0:
        msg = f"{path}: the average norm must be above 0, got {norm}"
        raise ValueError(msg)
    width = setting(path, settings, "d_model", int)
    scale = width**0.5 / norm
    file = folder / "checkpoints" / "final.safetensors"
    weights = _cast(chosen(file, read_safetensors(file), _LINEAR), request.dtype)
    threshold = setting(path, settings, "jump_relu_threshold", int | float) * scale
    weights = {
        "W_enc": weights["W_enc"].T * scale,
        "b_enc": weights["b_enc"],
        "W_dec": weights["W_dec"].T / scale,
        "b_dec": weights["b_dec"] / scale,
        "threshold": torch.ones_like(weights["b_enc"]) * threshold,
    }
    return _Found(weights, {"activation": "jumprelu"}, hook)


def _qwen_scope(path: Path, request: _Request) -> _Found:
    tensors = read_pickle(path)
    weights = _cast(chosen(path, tensors, _PLAIN), request.dtype)
    if request.k is None:
        msg = f"{path} does not say how many values remain: pass k, as in the repository's name"
        raise ValueError(msg)
    for name in ("W_enc", "W_dec"):
        weights[name] = weights[name].T.contiguous()
    return _Found(weights, {"activation": "topk", "k": request.k})


# --- circuit-tracer ------------------------------------------------------------------------------


def _safetensors(path: Path, request: _Request) -> _Found:
    """Reads a file of one layer of circuit-tracer, or of Gemma Scope 2."""
    tensors = read_safetensors(path)
    if "w_enc" in tensors:
        return _gemma_scope_2(path, request)
    settings_path = path.with_name("config.yaml")
    settings = read_yaml(settings_path) if settings_path.is_file() else {}
    kind = settings.get("model_kind", "transcoder_set")
    crossing = any(re.fullmatch(r"W_(enc|dec)_\d+", name) for name in tensors)
    if crossing or kind == "cross_layer_transcoder":
        raise ValueError(_refusal(path, "a cross-layer transcoder"))
    if kind != "transcoder_set":
        msg = f"{settings_path}: unknown model_kind {kind!r}, expected transcoder_set"
        raise ValueError(msg)
    more = {"threshold": "activation_function.threshold", "W_skip": "W_skip"}
    weights = _cast(chosen(path, tensors, _PLAIN, more), request.dtype)
    weights["W_enc"] = weights["W_enc"].T
    layer = re.fullmatch(r"layer_(\d+)", path.stem)
    places = [
        f"blocks.{layer[1]}.{hook}" if layer and hook else None
        for hook in map(settings.get, ("feature_input_hook", "feature_output_hook"))
    ]
    options = {
        "activation": "jump" if "threshold" in weights else "relu",
        "transcoder": True,
        "rounding": Rounding(linear_encoder=True),
    }
    return _Found(weights, options, *places)


_BY_FILE: Final[Mapping[str, Callable[[Path, _Request], _Found]]] = {
    "sae_weights.safetensors": _saelens,
    "sae.safetensors": _sparsify,
    "ae.pt": _dictionary_learning,
    "params.npz": _gemma_scope,
    "params.safetensors": _gemma_scope_2,
    "hyperparams.json": _llama_scope,
}
"""Readers by a file that the folder has."""
_BY_SUFFIX: Final[Mapping[str, Callable[[Path, _Request], _Found]]] = {
    ".npz": _gemma_scope,
    ".pt": _qwen_scope,
    ".safetensors": _safetensors,
}
"""Readers of files with any name."""

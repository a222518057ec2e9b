"""Dictionaries have the bits of the libraries that wrote their files (for `script/saelens`)."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import TYPE_CHECKING, Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["SPARSIFY_DISABLE_TRITON"] = "1"  # without a GPU

import numpy as np
import pytest
import torch

import ferrohook as fh

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn

D_IN, D_SAE, D_OUT, K = 48, 256, 32, 12
DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(65, D_IN), (3, 7, D_IN)]
both_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def randomized(module: nn.Module, *, skip: tuple[str, ...] = ()) -> Any:
    """Gives all weights random values, of sizes with which a part of the features is active."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, each in module.named_parameters():
            if name in skip:
                continue
            scale = 0.3 if each.dim() == 1 else 1 / each.shape[-1] ** 0.5
            each.copy_(torch.randn(each.shape) * scale)
            if "threshold" in name:
                each.copy_(each.abs() + 0.1)
    return module.eval().requires_grad_(False)


def inputs(dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(1)
    return [(torch.randn(shape) * 2).to(dtype) for shape in SHAPES]


def check(dictionary: fh.Dictionary, library: Any, x: Tensor, decoded: Any = None) -> None:
    """Compares bits of values and reconstructions, some values of which are and are not zero."""
    values = library.encode(x)
    assert 0.01 < (values != 0).float().mean() < 0.9
    assert torch.equal(dictionary.encode(x), values)
    reconstruction = library.decode(values) if decoded is None else decoded(values)
    assert torch.equal(dictionary.decode(values, x), reconstruction)


# --- SAELens -------------------------------------------------------------------------------------

KINDS: dict[str, dict[str, Any]] = {
    "standard": {},
    "jumprelu": {},
    "gated": {},
    "topk": {"k": K},
    "topk rescaled": {"k": K, "rescale_acts_by_decoder_norm": True},
    "abstopk": {"k": K},
    "abstopk rescaled": {"k": K, "rescale_acts_by_decoder_norm": True},
}
NORMALIZATIONS = ["none", "layer_norm", "constant_norm_rescale"]


def saelens(kind: str, **settings: Any) -> Any:
    from sae_lens.registry import get_sae_class
    from sae_lens.saes.sae import SAEMetadata

    cls, config = get_sae_class(kind.partition(" ")[0])
    metadata = SAEMetadata(hook_name="blocks.1.hook_resid_post", model_name="tiny")
    return randomized(cls(config(d_in=D_IN, d_sae=D_SAE, metadata=metadata, **settings)))


@both_dtypes
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("subtracts", [True, False], ids=["b_dec subtracted", "b_dec only added"])
@pytest.mark.parametrize("kind", KINDS)
def test_saelens(
    kind: str, subtracts: bool, normalization: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    more = {"normalize_activations": normalization, "apply_b_dec_to_input": subtracts}
    library = saelens(kind, **KINDS[kind], **more)
    library.save_model(tmp_path)
    dictionary = fh.Dictionary.load(tmp_path, dtype=dtype)
    assert dictionary.reads == "@resid_post.1"
    for x in inputs(dtype):
        check(dictionary, library.to(dtype), x)


@both_dtypes
@pytest.mark.parametrize(
    "kind",
    ["transcoder", "skip_transcoder", "jumprelu_transcoder", "jumprelu_skip_transcoder"],
)
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_saelens_transcoders(
    kind: str, normalization: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    more = {"normalize_activations": normalization, "apply_b_dec_to_input": False}
    library = saelens(kind, d_out=D_OUT, **more)
    library.cfg.metadata.hook_name = "blocks.1.ln2.hook_normalized"
    library.cfg.metadata.hook_name_out = "blocks.1.hook_mlp_out"
    library.save_model(tmp_path)
    dictionary = fh.Dictionary.load(tmp_path, dtype=dtype, reads="@mlp_in.1")
    assert dictionary.writes == "@mlp_out.1"
    library.to(dtype)
    for x in inputs(dtype):
        check(dictionary, library, x, lambda _, x=x: library(x))


@both_dtypes
def test_saelens_at_heads(dtype: torch.dtype, tmp_path: Path) -> None:
    library = saelens("standard", reshape_activations="none")
    library.cfg.reshape_activations = "hook_z"
    library.cfg.metadata.hook_name = "blocks.1.attn.hook_z"
    library.turn_on_forward_pass_hook_z_reshaping()
    library.save_model(tmp_path)
    dictionary = fh.Dictionary.load(tmp_path, dtype=dtype)
    assert dictionary.reads == "@z.1"
    for x in inputs(dtype):
        check(dictionary, library.to(dtype), x.unflatten(-1, (4, D_IN // 4)))


@pytest.mark.parametrize("kind", ["batchtopk", "matryoshka_batchtopk"])
def test_saelens_saves_these_as_jumprelu(kind: str, tmp_path: Path) -> None:
    from sae_lens.registry import get_sae_training_class
    from sae_lens.saes.sae import SAE

    cls, config = get_sae_training_class(kind)
    widths = {"matryoshka_widths": [64, D_SAE]} if "matryoshka" in kind else {}
    sizes = {"d_in": D_IN, "d_sae": D_SAE, "k": K}
    training = randomized(cls(config(**sizes, **widths)), skip=("log_threshold",))
    training.topk_threshold.fill_(0.6)
    training.save_inference_model(tmp_path)
    library = SAE.load_from_disk(tmp_path)
    dictionary = fh.Dictionary.load(tmp_path, reads="@resid_post.1")
    assert dictionary.formula.activation == "jumprelu"
    for x in inputs(torch.float32):
        check(dictionary, library, x)


@pytest.mark.parametrize("kind", ["temporal", "matching_pursuit"])
def test_saelens_other_machines_are_refused(kind: str, tmp_path: Path) -> None:
    from sae_lens.registry import get_sae_class

    cls, config = get_sae_class(kind)
    known = {each.name for each in dataclasses.fields(config)}
    sizes = {"d_in": D_IN, "d_sae": D_SAE, "n_heads": 2, "dimin": D_IN}
    cls(config(**{name: it for name, it in sizes.items() if name in known})).save_model(tmp_path)
    with pytest.raises(ValueError, match=kind.replace("_", "-")):
        fh.Dictionary.load(tmp_path)


def test_saelens_before_6(tmp_path: Path) -> None:
    from sae_lens.saes.sae import SAE
    from safetensors.torch import save_file

    library = saelens("topk", k=K)
    weights = {**library.state_dict(), "scaling_factor": torch.ones(D_SAE)}
    settings = {
        "hook_point": "blocks.1.hook_resid_pre",
        "hook_point_head_index": None,
        "d_in": D_IN,
        "d_sae": D_SAE,
        "dtype": "torch.float32",
        "activation_fn_str": "topk",
        "activation_fn_kwargs": {"k": K},
        "normalize_activations": False,
        "finetuning_scaling_factor": False,
    }
    save_file(weights, tmp_path / "sae_weights.safetensors")
    (tmp_path / "cfg.json").write_text(json.dumps(settings))
    library = SAE.load_from_disk(tmp_path)
    dictionary = fh.Dictionary.load(tmp_path)
    assert dictionary.reads == "@resid_pre.1"
    for x in inputs(torch.float32):
        check(dictionary, library, x)


# --- sparsify ------------------------------------------------------------------------------------


@both_dtypes
@pytest.mark.parametrize("activation", ["topk", "groupmax"])
@pytest.mark.parametrize("skip", [None, False, True], ids=["autoencoder", "transcoder", "skip"])
def test_sparsify(activation: str, skip: bool | None, dtype: torch.dtype, tmp_path: Path) -> None:
    from sparsify import SparseCoder, SparseCoderConfig

    k = 16 if activation == "groupmax" else K
    more = {"transcode": skip is not None, "skip_connection": bool(skip)}
    config = SparseCoderConfig(activation=activation, num_latents=D_SAE, k=k, **more)
    library = randomized(SparseCoder(D_IN, config)).to(dtype)
    library.save_to_disk(tmp_path)
    places = {"reads": "@mlp_in.1", "writes": "@mlp_out.1"}
    dictionary = fh.Dictionary.load(
        tmp_path, **(places if skip is not None else {"reads": "@resid_post.1"})
    )
    assert dictionary.dtype == dtype
    for x in inputs(dtype):
        x = x.flatten(0, -2)  # noqa: PLW2901 (the library takes two dimensions)
        top, places_of, _ = library.encode(x)
        values = torch.zeros(len(x), D_SAE, dtype=dtype).scatter(-1, places_of, top)
        assert torch.equal(dictionary.encode(x), values)
        # The library adds the rows in the order of its top-k.
        expected = library(x, torch.zeros_like(x)).sae_out
        least = 8 * torch.finfo(dtype).eps * float(expected.abs().max())
        torch.testing.assert_close(dictionary.decode(values, x), expected, rtol=0, atol=least)


# --- dictionary_learning -------------------------------------------------------------------------


def dictionary_learning(kind: str) -> Any:
    from dictionary_learning import dictionary
    from dictionary_learning.trainers.batch_top_k import BatchTopKSAE
    from dictionary_learning.trainers.matryoshka_batch_top_k import MatryoshkaBatchTopKSAE
    from dictionary_learning.trainers.top_k import AutoEncoderTopK

    classes = {
        "AutoEncoderTopK": lambda: AutoEncoderTopK(D_IN, D_SAE, K),
        "BatchTopKSAE": lambda: BatchTopKSAE(D_IN, D_SAE, K),
        "MatryoshkaBatchTopKSAE": lambda: MatryoshkaBatchTopKSAE(D_IN, D_SAE, K, [64, D_SAE - 64]),
    }
    make = classes.get(kind) or (lambda: getattr(dictionary, kind)(D_IN, D_SAE))
    library = randomized(make())
    if "Batch" in kind:
        library.threshold.fill_(0.6)
    return library


@both_dtypes
@pytest.mark.parametrize(
    "kind",
    [
        "AutoEncoder",
        "AutoEncoderNew",
        "GatedAutoEncoder",
        "JumpReluAutoEncoder",
        "AutoEncoderTopK",
        "BatchTopKSAE",
        "MatryoshkaBatchTopKSAE",
    ],
)
def test_dictionary_learning(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    from dictionary_learning.utils import load_dictionary

    torch.save(dictionary_learning(kind).to(dtype).state_dict(), tmp_path / "ae.pt")
    trainer = {"dict_class": kind, "k": K, "submodule_name": "resid_post_layer_1"}
    (tmp_path / "config.json").write_text(json.dumps({"trainer": trainer}))
    library, _ = load_dictionary(str(tmp_path), device="cpu")  # in float32
    dictionary = fh.Dictionary.load(tmp_path, dtype=torch.float32)
    if kind != "AutoEncoder":  # whose rows have been normalised in float32
        library, dictionary = library.to(dtype), fh.Dictionary.load(tmp_path)
    assert dictionary.reads == "@resid_post.1"
    assert dictionary.dtype == next(library.parameters()).dtype
    for x in inputs(dictionary.dtype):
        # The library indexes the second dimension of a Matryoshka dictionary's values.
        check(dictionary, library, x.flatten(0, -2) if "Matryoshka" in kind else x)


# --- Scopes --------------------------------------------------------------------------------------


def downloaded(
    loader: str, folder: Path, name: str, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> Any:
    """SAELens' own reading of another project's files, found in a folder instead of a download."""
    from sae_lens.loading import pretrained_sae_loaders as loaders
    from sae_lens.registry import get_sae_class
    from safetensors import safe_open

    def local(_repo: str = "", filename: str = "", subfolder: str = "", **_: Any) -> str:
        return str(folder / subfolder / filename)

    def shapes(_repo: str, filename: str) -> dict[str, Any]:
        with safe_open(folder / filename, "pt") as file:
            return {each: file.get_slice(each).get_shape() for each in file.keys()}  # noqa: SIM118

    monkeypatch.setattr(loaders, "hf_hub_download", local)
    monkeypatch.setattr(loaders, "get_safetensors_tensor_shapes", shapes)
    settings = {"dtype": str(dtype).removeprefix("torch.")}
    config, weights, _ = getattr(loaders, loader)(
        "google/tiny", name, "cpu", cfg_overrides=settings
    )
    config = loaders.handle_config_defaulting(config)
    cls, config_cls = get_sae_class(config["architecture"])
    library = cls(config_cls.from_dict(config))
    library.process_state_dict_for_loading(weights)
    library.load_state_dict(weights, assign=True)
    return library.requires_grad_(False)


@both_dtypes
@pytest.mark.parametrize("transcodes", [False, True])
def test_gemma_scope(transcodes: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    from circuit_tracer.transcoder.single_layer_transcoder import load_gemma_scope_transcoder

    library = saelens("jumprelu", apply_b_dec_to_input=False)
    weights = {name: each.numpy() for name, each in library.state_dict().items()}
    np.savez(tmp_path / "params.npz", **weights)
    places: dict[str, str] = {"reads": "@resid_post.1"}
    if transcodes:
        places = {"reads": "@mlp_in.1", "writes": "@mlp_out.1"}
    dictionary = fh.Dictionary.load(tmp_path, dtype=dtype, **places)
    assert dictionary.transcoder == transcodes
    for x in inputs(dtype):
        check(dictionary, library.to(dtype), x)
    traced = load_gemma_scope_transcoder(
        str(tmp_path / "params.npz"), 1, torch.device("cpu"), torch.float32
    )
    dictionary = fh.Dictionary.load(tmp_path, **places)
    for x in inputs(torch.float32):  # its encoder is transposed, and rounds otherwise
        torch.testing.assert_close(dictionary.encode(x), traced.encode(x))


GEMMA_HOOKS = {
    "resid_post": ("model.layers.1.output", None, "@resid_post.1"),
    "attn_out": ("model.layers.1.self_attn.o_proj.input", None, "@z.1"),
    "mlp_out": ("model.layers.1.post_feedforward_layernorm.output", None, "@mlp_out.1"),
    "transcoder": (
        "model.layers.1.pre_feedforward_layernorm.output",
        "model.layers.1.post_feedforward_layernorm.output",
        "@mlp_in.1",
    ),
    "transcoder affine": (
        "model.layers.1.pre_feedforward_layernorm.output",
        "model.layers.1.post_feedforward_layernorm.output",
        "@mlp_in.1",
    ),
}


@both_dtypes
@pytest.mark.parametrize("site", GEMMA_HOOKS)
def test_gemma_scope_2(
    site: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from circuit_tracer.transcoder.single_layer_transcoder import load_gemma_scope_2_transcoder
    from safetensors.torch import save_file

    reads, writes, place = GEMMA_HOOKS[site]
    weights = saelens("jumprelu").state_dict()
    tensors = {name.lower(): each for name, each in weights.items()}
    settings = {"architecture": "jump_relu", "model_name": "gemma-v3-1b-pt"}
    settings |= {"hf_hook_point_in": reads} | ({"hf_hook_point_out": writes} if writes else {})
    if "affine" in site:
        tensors["affine_skip_connection"] = torch.randn(D_IN, D_IN) / 8
        settings["affine_connection"] = True
    folder = tmp_path / site / "layer_1"
    folder.mkdir(parents=True)
    save_file(tensors, folder / "params.safetensors")
    (folder / "config.json").write_text(json.dumps(settings))
    name = f"{site}/layer_1"
    library = downloaded("gemma_3_sae_huggingface_loader", tmp_path, name, monkeypatch, dtype)
    dictionary = fh.Dictionary.load(folder, dtype=dtype)
    assert (dictionary.reads, dictionary.writes) == (place, "@mlp_out.1" if writes else place)
    if site == "attn_out":  # the library reads heads of z
        library.turn_off_forward_pass_hook_z_reshaping()
    for x in inputs(dtype):
        check(dictionary, library, x, (lambda _, x=x: library(x)) if writes else None)
    if writes and dtype == torch.float32:
        traced = load_gemma_scope_2_transcoder(
            str(folder / "params.safetensors"), 1, torch.device("cpu")
        )
        for x in inputs(dtype):
            values = dictionary.encode(x)
            torch.testing.assert_close(values, traced.encode(x))
            torch.testing.assert_close(dictionary.decode(values, x), traced(x))


@both_dtypes
def test_llama_scope(dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors.torch import save_file

    weights = saelens("standard").state_dict()
    tensors = {
        "encoder.weight": weights["W_enc"].T.contiguous(),
        "encoder.bias": weights["b_enc"],
        "decoder.weight": weights["W_dec"].T.contiguous(),
        "decoder.bias": weights["b_dec"],
    }
    settings = {
        "d_model": D_IN,
        "d_sae": D_SAE,
        "act_fn": "jumprelu",
        "jump_relu_threshold": 0.52734375,
        "dataset_average_activation_norm": {"in": 17.125, "out": 17.125},
        "hook_point_in": "blocks.1.hook_resid_post",
        "hook_point_out": "blocks.1.hook_resid_post",
    }
    (tmp_path / "L1R" / "checkpoints").mkdir(parents=True)
    save_file(tensors, tmp_path / "L1R" / "checkpoints" / "final.safetensors")
    (tmp_path / "L1R" / "hyperparams.json").write_text(json.dumps(settings))
    library = downloaded("llama_scope_sae_huggingface_loader", tmp_path, "L1R", monkeypatch, dtype)
    library.fold_activation_norm_scaling_factor(D_IN**0.5 / 17.125)
    dictionary = fh.Dictionary.load(tmp_path / "L1R", dtype=dtype)
    assert dictionary.reads == "@resid_post.1"
    for x in inputs(dtype):
        check(dictionary, library, x)


@both_dtypes
def test_qwen_scope(dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sae_lens.loading import pretrained_sae_loaders as loaders

    weights = saelens("topk", k=K).state_dict()
    for name in ("W_enc", "W_dec"):
        weights[name] = weights[name].T.contiguous()
    torch.save(dict(weights), tmp_path / "layer1.sae.pt")
    monkeypatch.setattr(loaders, "hf_hub_download", lambda **_: str(tmp_path / "layer1.sae.pt"))
    _, state, _ = loaders.qwen_scope_sae_huggingface_loader(
        "Qwen/SAE-Res-Qwen3-1.7B-Base-W32K-L0_50", "layer1.sae.pt"
    )
    library = saelens("topk", k=K, apply_b_dec_to_input=False)
    library.load_state_dict(state)
    dictionary = fh.Dictionary.load(
        tmp_path / "layer1.sae.pt", dtype=dtype, k=K, reads="blocks.1.hook_resid_post"
    )
    for x in inputs(dtype):
        check(dictionary, library.to(dtype), x)


# --- circuit-tracer ------------------------------------------------------------------------------


@both_dtypes
@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("jumps", [False, True])
def test_circuit_tracer(jumps: bool, skip: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    from circuit_tracer.transcoder.activation_functions import JumpReLU
    from circuit_tracer.transcoder.single_layer_transcoder import (
        SingleLayerTranscoder,
        load_relu_transcoder,
    )

    cpu = torch.device("cpu")
    activation = JumpReLU(torch.zeros(D_SAE), 0.1) if jumps else torch.nn.functional.relu
    library = randomized(
        SingleLayerTranscoder(
            D_IN, D_SAE, activation, 1, skip_connection=skip, device=cpu, dtype=torch.float32
        )
    )
    if jumps:  # below 0 its values are negative
        library.activation_function.threshold.data[::2] *= -1
    library.to(dtype).to_safetensors(str(tmp_path / "layer_1.safetensors"))
    settings = {"model_kind": "transcoder_set", "feature_input_hook": "mlp.hook_in"}
    settings["feature_output_hook"] = '"hook_mlp_out" # of the block'
    text = "".join(f"{name}: {it}\n" for name, it in settings.items())
    (tmp_path / "config.yaml").write_text(text)
    path = str(tmp_path / "layer_1.safetensors")
    library = load_relu_transcoder(path, 1, cpu, dtype, lazy_encoder=False, lazy_decoder=False)
    dictionary = fh.Dictionary.load(path)
    assert (dictionary.reads, dictionary.writes) == ("@mlp_in.1", "@mlp_out.1")
    for x in inputs(dtype):
        check(dictionary, library, x, lambda _, x=x: library(x))


# --- Interventions -------------------------------------------------------------------------------


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_feature_is_saelens_with_its_error_term(
    kind: str, normalization: str, tmp_path: Path
) -> None:
    library = saelens(kind, **KINDS[kind], normalize_activations=normalization)
    library.save_model(tmp_path)
    dictionary = fh.Dictionary.load(tmp_path)
    library.use_error_term = True

    def set_features(values: Tensor, hook: Any) -> Tensor:
        assert hook is not None
        values[..., 3], values[..., 7] = 5.0, values[..., 7] * 2
        return values

    hook = fh.Feature(dictionary, [3, 7], set=[5.0, None], scale=[None, 2.0])
    for x in inputs(torch.float32):
        expected = library.run_with_hooks(x, fwd_hooks=[("hook_sae_acts_post", set_features)])
        changed = hook.apply(x)
        assert not torch.allclose(changed, x)
        torch.testing.assert_close(changed, expected, rtol=1e-4, atol=1e-4)

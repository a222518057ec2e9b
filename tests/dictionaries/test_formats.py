"""`fh.Dictionary.load`: files of each format, written by hand; places; and files to refuse."""

from __future__ import annotations

import contextlib
import json
import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import ferrohook as fh
from ferrohook.errors import HookError
from support.dictionaries import D_IN, D_SAE, K, weights_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

torch_files = pytest.importorskip("safetensors.torch")
X = torch.randn(9, D_IN, generator=torch.Generator().manual_seed(1)) * 2


def save(folder: Path, name: str, tensors: Mapping[str, Tensor]) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    own = {key: each.clone(memory_format=torch.contiguous_format) for key, each in tensors.items()}
    if name.endswith(".npz"):
        np.savez(path, **{key: each.numpy() for key, each in own.items()})
    elif name.endswith(".pt"):
        torch.save(own, path)
    else:
        torch_files.save_file(own, path)
    return path


def settle(folder: Path, name: str, settings: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(settings))


def as_linear(weights: Mapping[str, Tensor], **names: str) -> dict[str, Tensor]:
    """Weights as modules of `nn.Linear` have them, with the other names changed."""
    found = {"encoder.weight": weights["W_enc"].T, "decoder.weight": weights["W_dec"].T}
    if "b_enc" in weights:
        found["encoder.bias"] = weights["b_enc"]
    return found | {new: weights[old] for old, new in names.items()}


def same(found: fh.Dictionary, expected: fh.Dictionary) -> None:
    values = expected.encode(X)
    assert 0 < (values != 0).sum() < values.numel()
    torch.testing.assert_close(found.encode(X), values, rtol=1e-5, atol=1e-6)
    decoded = expected.decode(values, X)
    torch.testing.assert_close(found.decode(values, X), decoded, rtol=1e-5, atol=1e-6)
    assert (found.d_in, found.d_sae) == (D_IN, D_SAE)


def saelens(folder: Path, kind: str = "standard", **changes: Any) -> Path:
    """Writes a dictionary as SAELens does."""
    activation = {"standard": "relu"}.get(kind, kind.partition("_")[0])
    weights = weights_of("relu" if "transcoder" in activation else activation)
    settings = {
        "architecture": kind,
        "d_in": D_IN,
        "d_sae": D_SAE,
        "dtype": "float32",
        "apply_b_dec_to_input": False,
        "normalize_activations": "none",
        "metadata": {"hook_name": "blocks.3.hook_resid_post", "sae_lens_version": "6.54.0"},
    }
    if "topk" in kind:
        settings["k"] = K
    save(folder, "sae_weights.safetensors", weights)
    settle(folder, "cfg.json", settings | changes)
    return folder


@pytest.mark.parametrize("kind", ["standard", "jumprelu", "gated", "topk", "abstopk"])
@pytest.mark.parametrize("subtracts", [False, True])
def test_saelens(kind: str, subtracts: bool, tmp_path: Path) -> None:
    saelens(tmp_path, kind, apply_b_dec_to_input=subtracts, normalize_activations="layer_norm")
    activation = "relu" if kind == "standard" else kind
    expected = fh.Dictionary(
        **weights_of(activation),
        activation=activation,
        k=K if "topk" in kind else None,
        apply_b_dec_to_input=subtracts,
        normalize_activations="layer_norm",
    )
    for path in (tmp_path, tmp_path / "sae_weights.safetensors", str(tmp_path)):
        found = fh.Dictionary.load(path)
        same(found, expected)
        assert (found.reads, found.writes) == ("@resid_post.3", "@resid_post.3")


def test_saelens_rescales(tmp_path: Path) -> None:
    saelens(tmp_path, "topk", rescale_acts_by_decoder_norm=True)
    rescaled = {"k": K, "rescale_acts_by_decoder_norm": True}
    same(
        fh.Dictionary.load(tmp_path),
        fh.Dictionary(**weights_of("topk"), activation="topk", **rescaled),
    )


@pytest.mark.parametrize("folded", ["expected_average_only_in", "covariance_whitening", None])
def test_saelens_folds_some_normalisations(folded: str | None, tmp_path: Path) -> None:
    found = fh.Dictionary.load(saelens(tmp_path, normalize_activations=folded))
    assert found.formula.normalization == "none"


def test_saelens_skip_transcoder(tmp_path: Path) -> None:
    weights = weights_of("jumprelu", d_out=7) | {"W_skip": torch.randn(7, D_IN)}
    metadata = {"hook_name": "blocks.3.mlp.hook_in", "hook_name_out": "blocks.3.hook_mlp_out"}
    saelens(tmp_path, "jumprelu_skip_transcoder", metadata=metadata, d_out=7)
    save(tmp_path, "sae_weights.safetensors", weights)
    found = fh.Dictionary.load(tmp_path)
    same(found, fh.Dictionary(**weights, activation="jumprelu", transcoder=True))
    assert (found.reads, found.writes, found.d_out) == ("@mlp_in.3", "@mlp_out.3", 7)


def test_saelens_before_6(tmp_path: Path) -> None:
    weights = weights_of("topk")
    save(tmp_path, "sae_weights.safetensors", {**weights, "scaling_factor": torch.ones(D_SAE)})
    old = {
        "hook_point": "blocks.2.hook_resid_pre",
        "hook_point_head_index": None,
        "d_in": D_IN,
        "d_sae": D_SAE,
        "dtype": "torch.float32",
        "activation_fn_str": "topk",
        "activation_fn_kwargs": {"k": K},
        "normalize_activations": False,
    }
    settle(tmp_path, "cfg.json", old)
    found = fh.Dictionary.load(tmp_path)
    expected = fh.Dictionary(**weights, activation="topk", k=K, apply_b_dec_to_input=True)
    same(found, expected)
    assert found.reads == "@resid_pre.2"
    settle(tmp_path, "cfg.json", old | {"activation_fn_str": "tanh-relu"})
    with pytest.raises(ValueError, match="unknown activation_fn 'tanh-relu'"):
        fh.Dictionary.load(tmp_path)


@pytest.mark.parametrize("activation", ["topk", "groupmax"])
def test_sparsify(activation: str, tmp_path: Path) -> None:
    weights = weights_of(activation)
    tensors = as_linear(weights, W_dec="W_dec", b_dec="b_dec")
    del tensors["decoder.weight"]
    save(tmp_path, "sae.safetensors", tensors)
    settings = {"activation": activation, "expansion_factor": 32, "num_latents": D_SAE}
    settings |= {"k": K, "d_in": D_IN, "normalize_decoder": True, "transcode": False}
    settle(tmp_path, "cfg.json", settings)
    expected = fh.Dictionary(**weights, activation=activation, k=K, apply_b_dec_to_input=True)
    same(fh.Dictionary.load(tmp_path, reads="@resid_post.1"), expected)
    with pytest.raises(ValueError, match="does not name the place that it reads: pass reads"):
        fh.Dictionary.load(tmp_path)
    save(tmp_path, "sae.safetensors", {**tensors, "W_skip": torch.eye(D_IN)})
    settle(tmp_path, "cfg.json", settings | {"transcode": True, "skip_connection": True})
    expected = fh.Dictionary(
        **weights, activation=activation, k=K, transcoder=True, W_skip=torch.eye(D_IN)
    )
    found = fh.Dictionary.load(tmp_path, reads="@mlp_in.1", writes="model.layers.1.mlp")
    same(found, expected)
    assert found.writes == "model.layers.1.mlp"
    save(tmp_path, "sae.safetensors", tensors)
    settle(tmp_path, "cfg.json", settings | {"num_latents": 0})
    with pytest.raises(ValueError, match=r"encoder.weight must have the shape \(384, 12\)"):
        fh.Dictionary.load(tmp_path, reads="@resid_post.1")


def test_dictionary_learning(tmp_path: Path) -> None:
    plain, gated, jump = weights_of("relu"), weights_of("gated"), weights_of("jumprelu")
    subtracts = {"apply_b_dec_to_input": True}
    k, threshold = torch.tensor(K), torch.tensor(0.4)
    numbers = {"k": k, "threshold": threshold}
    batched = plain | {"threshold": torch.full((D_SAE,), 0.4)}
    norms = plain["W_dec"].norm(dim=-1)
    unit = plain | {
        "W_dec": plain["W_dec"] / norms[:, None],
        "W_enc": plain["W_enc"] * norms,
        "b_enc": plain["b_enc"] * norms,
    }
    cases: dict[str, tuple[Mapping[str, Tensor], fh.Dictionary]] = {
        "AutoEncoder": (as_linear(plain, b_dec="bias"), fh.Dictionary(**unit, **subtracts)),
        "AutoEncoderNew": (as_linear(plain, b_dec="decoder.bias"), fh.Dictionary(**plain)),
        "GatedAutoEncoder": (
            as_linear(
                gated, b_dec="decoder_bias", r_mag="r_mag", b_gate="gate_bias", b_mag="mag_bias"
            ),
            fh.Dictionary(**gated, activation="gated", **subtracts),
        ),
        "JumpReluAutoEncoder": (jump, fh.Dictionary(**jump, activation="jumprelu")),
        "AutoEncoderTopK": (
            as_linear(plain, b_dec="b_dec") | numbers,
            fh.Dictionary(**plain, activation="topk", k=K, **subtracts),
        ),
        "BatchTopKSAE": (
            as_linear(plain, b_dec="b_dec") | numbers,
            fh.Dictionary(**batched, activation="jumprelu", **subtracts),
        ),
        "MatryoshkaBatchTopKSAE": (
            plain | numbers | {"group_sizes": torch.tensor([10, 30])},
            fh.Dictionary(**batched, activation="jumprelu", **subtracts),
        ),
    }
    for kind, (tensors, expected) in cases.items():
        folder = tmp_path / kind
        save(folder, "ae.pt", tensors)
        trainer = {"dict_class": kind, "submodule_name": "resid_post_layer_8"}
        settle(folder, "config.json", {"trainer": trainer})
        found = fh.Dictionary.load(folder)
        same(found, expected)
        assert found.reads == "@resid_post.8"
    settle(tmp_path / "AutoEncoder", "config.json", {"trainer": {"dict_class": "IdentityDict"}})
    with pytest.raises(ValueError, match="unknown dict_class 'IdentityDict', expected one of Auto"):
        fh.Dictionary.load(tmp_path / "AutoEncoder")


def test_gemma_scope(tmp_path: Path) -> None:
    weights = weights_of("jumprelu")
    path = save(tmp_path / "layer_4" / "width_16k", "params.npz", weights)
    expected = fh.Dictionary(**weights, activation="jumprelu")
    for each in (path, path.parent):
        same(fh.Dictionary.load(each, reads="@resid_post.4"), expected)
    found = fh.Dictionary.load(path, reads="@mlp_in.4", writes="@mlp_out.4")
    assert found.transcoder
    with pytest.raises(
        ValueError, match=r"'@mlp_in.4' is after the norm's weight, while ln2.hook_normalized is"
    ):
        fh.Dictionary.load(path, reads="blocks.4.ln2.hook_normalized", writes="@mlp_out.4")
    path = save(tmp_path / "embedding" / "width_16k" / "average_l0_6", "params.npz", weights)
    with pytest.raises(ValueError, match="a dictionary of scaled embeddings"):
        fh.Dictionary.load(path, reads="@embed")


def test_gemma_scope_2(tmp_path: Path) -> None:
    weights = weights_of("jumprelu")
    tensors = {name.lower(): each for name, each in weights.items()}
    skip = torch.randn(D_IN, D_IN)
    save(tmp_path, "params.safetensors", tensors | {"affine_skip_connection": skip})
    hooks = {
        "hf_hook_point_in": "model.layers.4.pre_feedforward_layernorm.output",
        "hf_hook_point_out": "model.layers.4.post_feedforward_layernorm.output",
    }
    settle(tmp_path, "config.json", {"architecture": "jump_relu", **hooks})
    found = fh.Dictionary.load(tmp_path)
    expected = fh.Dictionary(**weights, activation="jumprelu", transcoder=True, W_skip=skip.T)
    same(found, expected)
    assert (found.reads, found.writes) == ("@mlp_in.4", "@mlp_out.4")
    save(tmp_path, "params.safetensors", tensors | {"w_dec": torch.randn(D_SAE, 3, D_IN)})
    with pytest.raises(ValueError, match="a cross-layer transcoder, which is not supported"):
        fh.Dictionary.load(tmp_path)


def test_llama_scope(tmp_path: Path) -> None:
    weights = weights_of("relu")
    save(tmp_path, "checkpoints/final.safetensors", as_linear(weights, b_dec="decoder.bias"))
    settings = {
        "d_model": D_IN,
        "jump_relu_threshold": 0.5,
        "dataset_average_activation_norm": {"in": 7.0, "out": 7.0},
        "hook_point_in": "blocks.4.hook_resid_post",
        "hook_point_out": "blocks.4.hook_resid_post",
    }
    settle(tmp_path, "hyperparams.json", settings)
    scale = D_IN**0.5 / 7
    folded = weights | {
        "W_enc": weights["W_enc"] * scale,
        "W_dec": weights["W_dec"] / scale,
        "b_dec": weights["b_dec"] / scale,
        "threshold": torch.full((D_SAE,), 0.5 * scale),
    }
    found = fh.Dictionary.load(tmp_path)
    same(found, fh.Dictionary(**folded, activation="jumprelu"))
    assert found.reads == "@resid_post.4"
    for change, message in (
        ({"hook_point_out": "blocks.4.hook_mlp_out"}, "a transcoder of Llama Scope"),
        ({"act_fn": "topk"}, "unknown act_fn 'topk'"),
        ({"use_glu_encoder": True}, "use_glu_encoder is not supported"),
        ({"dataset_average_activation_norm": {"in": 0.0}}, "must be above 0"),
    ):
        settle(tmp_path, "hyperparams.json", settings | change)
        with pytest.raises(ValueError, match=message):
            fh.Dictionary.load(tmp_path)


def test_qwen_scope(tmp_path: Path) -> None:
    weights = weights_of("topk")
    turned = {name: each.T if each.dim() > 1 else each for name, each in weights.items()}
    path = save(tmp_path, "layer4.sae.pt", turned)
    found = fh.Dictionary.load(path, k=K, reads="model.layers.4")
    same(found, fh.Dictionary(**weights, activation="topk", k=K))
    assert found.reads == "@resid_post.4"
    with pytest.raises(ValueError, match="does not say how many values remain: pass k"):
        fh.Dictionary.load(path, reads="@resid_post.4")


def test_circuit_tracer(tmp_path: Path) -> None:
    weights = weights_of("jump")
    skip = torch.randn(D_IN, D_IN)
    tensors = {**weights, "W_enc": weights["W_enc"].T, "W_skip": skip}
    tensors["activation_function.threshold"] = tensors.pop("threshold")
    path = save(tmp_path, "layer_4.safetensors", tensors)
    (tmp_path / "config.yaml").write_text(
        "model_name: 'org/name'\nmodel_kind: transcoder_set  # one for each layer\n"
        'feature_input_hook: "hook_resid_mid"\nfeature_output_hook: hook_mlp_out\n'
        "transcoders:\n- hf://org/name/layer_0.safetensors\n"
    )
    found = fh.Dictionary.load(path)
    expected = fh.Dictionary(**weights, activation="jump", transcoder=True, W_skip=skip)
    same(found, expected)
    assert (found.reads, found.writes) == ("@resid_mid.4", "@mlp_out.4")
    with pytest.raises(ValueError, match=r"name one of its files, such as layer_4.safetensors"):
        fh.Dictionary.load(tmp_path)
    (tmp_path / "config.yaml").write_text("model_kind: cross_layer_transcoder\n")
    with pytest.raises(ValueError, match="a cross-layer transcoder"):
        fh.Dictionary.load(path)
    crossing = save(tmp_path / "clt", "W_enc_4.safetensors", {"W_enc_4": skip, "b_enc_4": skip[0]})
    for each in (crossing, crossing.parent):
        with pytest.raises(ValueError, match="a cross-layer transcoder"):
            fh.Dictionary.load(each)


# --- Places --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metadata", "place"),
    [
        ({"hook_name": "blocks.3.hook_mlp_out"}, "@mlp_out.3"),
        ({"hook_name": "blocks.3.attn.hook_z"}, "@z.3"),
        ({"hook_name": "blocks.3.attn.hook_z", "hook_head_index": 5}, "@z.3.5"),
        ({"hook_name": "blocks.3.ln2.hook_normalized", "hf_hook_name": "model.layers.3"}, None),
        ({"hf_hook_name": "language_model.model.layers.3.output"}, "@resid_post.3"),
        ({"hf_hook_name": "model.layers.3.self_attn.o_proj.input"}, "@z.3"),
        ({"hf_hook_name": "model.layers.3.post_feedforward_layernorm.output"}, "@mlp_out.3"),
        ({"hf_hook_name": "model.layers.3.mlp.output"}, "model.layers.3.mlp"),
    ],
)
def test_places_of_files(metadata: Any, place: str | None, tmp_path: Path) -> None:
    found = fh.Dictionary.load(saelens(tmp_path, metadata=metadata))
    assert found.reads == (place or "@resid_post.3")


@pytest.mark.parametrize(
    ("hook", "difference"),
    [
        ("blocks.3.ln2.hook_normalized", "'@mlp_in.3' is after the norm's weight, while ln2"),
        ("blocks.3.hook_mlp_in", "'@mlp_in.3' is after the norm, while hook_mlp_in is before"),
        ("blocks.3.attn.hook_q", "'@q.3' is after RoPE, while hook_q is before it"),
        ("model.layers.3.mlp.input", "its place in a model is not known"),
        ("blocks.3.hook_unknown", "its place in a model is not known"),
        (17, "a place is a str"),
    ],
)
def test_a_place_that_is_no_quantity_has_to_be_said(
    hook: Any, difference: str, tmp_path: Path
) -> None:
    saelens(tmp_path, metadata={"hook_name": hook})
    with pytest.raises(ValueError, match=difference):
        fh.Dictionary.load(tmp_path)
    for said in ("@mlp_in.3", "model.layers.3.mlp"):
        assert fh.Dictionary.load(tmp_path, reads=said).reads == said


# --- Files to refuse -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "temporal"}, "a temporal dictionary, .* is not supported"),
        ({"architecture": "matching_pursuit"}, "a matching-pursuit dictionary"),
        ({"architecture": "batchtopk"}, "unknown architecture 'batchtopk', expected one of"),
        ({"architecture": None}, "'architecture' has an unexpected value, None"),
        ({"architecture": "gated"}, "has no 'b_gate', 'b_mag', 'r_mag'"),
        ({"architecture": "jumprelu"}, "has no 'threshold': its tensors are 'W_dec'"),
        ({"architecture": "topk"}, "has no 'k'"),
        ({"architecture": "topk", "k": True}, "'k' has an unexpected value, True"),
        ({"architecture": "topk", "k": 1000}, "k must be at most the number of features"),
        ({"normalize_activations": "rms"}, "unknown normalize_activations 'rms', expected one"),
        ({"normalize_activations": ["x"]}, "unknown normalize_activations"),
        ({"apply_b_dec_to_input": 1}, "'apply_b_dec_to_input' has an unexpected value, 1"),
        ({"d_sae": 41}, r"cfg.json has d_sae 41, but a tensor has \(12, 40\)"),
        ({"dtype": "int8"}, "unknown dtype 'int8', expected one of float32"),
        ({"metadata": []}, r"'metadata' has an unexpected value, \[\]"),
    ],
)
def test_settings_of_saelens_to_refuse(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        fh.Dictionary.load(saelens(tmp_path, **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"b_dec": torch.ones(5)}, r"b_dec must have the shape \(12,\), got \(5,\)"),
        ({"W_enc": torch.ones(D_IN)}, r"a tensor has \(12,\)"),
        ({"b_enc": torch.full((D_SAE,), torch.nan)}, "b_enc must not have NaN or infinities"),
        ({"extra": torch.ones(1)}, "has unexpected tensors, 'extra': expected W_enc, W_dec"),
        ({"scaling_factor": torch.full((D_SAE,), 2.0)}, "a scaling_factor other than 1"),
    ],
)
def test_tensors_to_refuse(changes: dict[str, Tensor], message: str, tmp_path: Path) -> None:
    saelens(tmp_path)
    save(tmp_path, "sae_weights.safetensors", weights_of("relu") | changes)
    with pytest.raises(ValueError, match=message) as error:
        fh.Dictionary.load(tmp_path)
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize("text", ["{", "[]", "\x00", "[" * 100_000, '{"metadata": 1'])
def test_malformed_settings(text: str, tmp_path: Path) -> None:
    (saelens(tmp_path) / "cfg.json").write_text(text)
    with pytest.raises(ValueError, match=r"cfg\.json (is not valid JSON|must be a JSON object)"):
        fh.Dictionary.load(tmp_path)


def test_malformed_tensors(tmp_path: Path) -> None:
    for name in ("sae_weights.safetensors", "params.npz", "layer1.sae.pt"):
        folder = saelens(tmp_path / name)
        path = folder / name
        for content in (b"", b"\x00" * 64, b"PK\x03\x04garbage"):
            path.write_bytes(content)
            with pytest.raises(ValueError, match=f"{name} is not"):
                fh.Dictionary.load(path, reads="@resid_post.1")


def test_a_damaged_archive(tmp_path: Path) -> None:
    path = tmp_path / "params.npz"
    np.savez_compressed(path, **{name: it.numpy() for name, it in weights_of("jumprelu").items()})
    whole = path.read_bytes()
    for at in range(0, len(whole), 97):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        with contextlib.suppress(ValueError):
            fh.Dictionary.load(path, reads="@resid_post.1")


class Evil:
    """Runs code where a pickle of it is read."""

    def __reduce__(self) -> Any:
        return exec, ("import ferrohook; ferrohook.HACKED = True",)


def test_no_code_of_a_file_runs(tmp_path: Path) -> None:
    path = tmp_path / "layer1.sae.pt"
    for write in (torch.save, lambda it, to: to.write_bytes(pickle.dumps(it, protocol=2))):
        write({"W_enc": Evil()}, path)  # type: ignore[no-untyped-call]
        with pytest.raises(ValueError, match="loads with weights_only=True"):
            fh.Dictionary.load(path, k=1, reads="@resid_post.1")
    np.savez(tmp_path / "params.npz", W_enc=np.array([Evil()], dtype=object))
    with pytest.raises(ValueError, match=r"is not an .npz file of numbers"):
        fh.Dictionary.load(tmp_path / "params.npz", reads="@resid_post.1")
    assert not hasattr(fh, "HACKED")
    for content in ([torch.ones(1)], {"W_enc": 1.0}, {1: torch.ones(1)}):
        torch.save(content, path)
        with pytest.raises(ValueError, match=r"must contain (a dict of )?tensors"):
            fh.Dictionary.load(path, k=1, reads="@resid_post.1")


def test_paths_to_refuse(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no file or folder"):
        fh.Dictionary.load(tmp_path / "absent")
    with pytest.raises(ValueError, match="has no files, and a dictionary has one of sae_weights"):
        fh.Dictionary.load(tmp_path)
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match="is not a file of a dictionary: expected one of"):
        fh.Dictionary.load(tmp_path / "model.bin")
    (saelens(tmp_path / "sae") / "cfg.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"there is no file .*cfg\.json"):
        fh.Dictionary.load(tmp_path / "sae")


def test_options_that_would_be_ignored(tmp_path: Path) -> None:
    saelens(tmp_path)
    with pytest.raises(ValueError, match="says what k is: leave k out"):
        fh.Dictionary.load(tmp_path, k=3)
    with pytest.raises(ValueError, match="which writes what it reads: leave out writes"):
        fh.Dictionary.load(tmp_path, writes="@mlp_out.1")


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saelens(tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "safetensors", None)
    with pytest.raises(HookError, match="pip install safetensors"):
        fh.Dictionary.load(tmp_path)


def test_the_dtype_can_be_chosen(tmp_path: Path) -> None:
    saelens(tmp_path, dtype="bfloat16")
    assert fh.Dictionary.load(tmp_path).dtype == torch.bfloat16
    found = fh.Dictionary.load(tmp_path, dtype=torch.float64, name="mine")
    assert (found.dtype, found.name) == (torch.float64, "mine")

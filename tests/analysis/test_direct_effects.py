"""Direct effects of features, against a model made linear by hand with PyTorch's own hooks."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

import ferrohook as fh
from support.dictionaries import D_IN, KINDS, dictionary_of
from support.language_models import LAYERS, language_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

pytest.importorskip("transformers")

IDS = torch.tensor([[3, 5, 9, 11, 4], [7, 1, 8, 2, 6]])


def model_of(kind: str) -> Any:
    model = language_model(kind, D_IN).double()
    torch.manual_seed(1)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return model.requires_grad_(False)


def metric(output: Any) -> Tensor:
    """Difference of two logits, of each text."""
    return output.logits[:, -1, 7] - output.logits[:, -1, 9]


def transcoder(layer: int, kind: str, **options: Any) -> fh.Dictionary:
    places = {"reads": f"@mlp_in.{layer}", "writes": f"@mlp_out.{layer}"}
    made = dictionary_of(kind, seed=layer, transcoder=True, **places, **options)
    options.pop("width", None)
    return as_double(made, kind, options | {"transcoder": True, **places})


def as_double(made: fh.Dictionary, kind: str, options: Any) -> fh.Dictionary:
    weights: Any = {name: it.double() for name, it in made.weights.tensors.items()}
    weights.pop("norms", None)
    if "W_skip" in options:
        options = {**options, "W_skip": options["W_skip"].double()}
        weights.pop("W_skip")
    return fh.Dictionary(**weights, activation=kind.partition(" ")[0], **KINDS[kind], **options)


def total(effects: fh.analysis.DirectEffects) -> float:
    features = sum(it.effect for it in effects.features)
    return features + float(effects.sources.values.sum()) + effects.biases


SKIP = torch.randn(D_IN, D_IN, generator=torch.Generator().manual_seed(5))
SETS: dict[str, Callable[[], list[fh.Dictionary]]] = {
    "transcoders": lambda: [transcoder(0, "relu"), transcoder(1, "jumprelu")],
    "top-k, with a skip": lambda: [
        transcoder(0, "topk rescaled", W_skip=SKIP),
        transcoder(1, "gated", W_skip=SKIP),
    ],
    "one layer": lambda: [transcoder(1, "abstopk")],
    "an autoencoder of the stream": lambda: [
        as_double(
            dictionary_of("relu", width=D_IN),
            "relu",
            {"reads": "@resid_post.0", "normalize_activations": "layer_norm"},
        )
    ],
    "none": list,
}


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("name", SETS)
def test_the_terms_add_up_to_the_metric(kind: str, name: str) -> None:
    model = model_of(kind)
    effects = fh.analysis.direct_effects(model, IDS, metric, SETS[name]())
    assert abs(total(effects) - effects.metric) < 1e-12
    # RMS norms compute in float32.
    assert effects.metric == pytest.approx(float(metric(model(IDS)).mean()), rel=1e-5)
    assert bool(effects.features) == (name != "none")
    found = [abs(it.effect) for it in effects.features]
    assert found == sorted(found, reverse=True)
    assert not fh.hooks(model)


@contextmanager
def linear(  # noqa: C901 (two kinds of models)
    model: Any, kind: str, without: dict[int, Tensor]
) -> Iterator[None]:
    """Freezes queries, keys, scales of norms and outputs of MLPs, by PyTorch's own hooks.

    `without`: is subtracted from the outputs of MLPs, by layer.
    """
    kept: dict[Any, Any] = {}

    def keep(module: nn.Module, args: Any, output: Tensor) -> None:
        kept[module] = args[0], output

    layers = model.get_submodule(LAYERS[kind])
    norms = [it for it in model.modules() if "Norm" in type(it).__name__]
    mlps = [layer.mlp for layer in layers]
    if kind == "llama":
        frozen = [it for layer in layers for it in (layer.self_attn.q_proj, layer.self_attn.k_proj)]
    else:
        frozen = [layer.attn.c_attn for layer in layers]
    with ExitStack() as stack:
        for module in (*norms, *mlps, *frozen):
            stack.callback(module.register_forward_hook(keep).remove)
        model(IDS)

    def norm(module: Any, args: Any, _output: Tensor) -> Tensor:
        x, before = args[0], kept[module][0]
        if kind == "llama":
            scale = (before.pow(2).mean(-1, keepdim=True) + module.variance_epsilon).rsqrt()
            return module.weight * x * scale
        variance = before.var(-1, keepdim=True, unbiased=False)
        centred = x - x.mean(-1, keepdim=True)
        return module.weight * centred * (variance + module.eps).rsqrt() + module.bias

    def projection(module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        before = kept[module][1]
        if kind == "llama":
            return before
        return torch.cat((before[..., : 2 * D_IN], output[..., 2 * D_IN :]), -1)

    with ExitStack() as stack:
        for each in norms:
            stack.callback(each.register_forward_hook(norm).remove)
        for each in frozen:
            stack.callback(each.register_forward_hook(projection).remove)
        for layer, mlp in enumerate(mlps):
            own = kept[mlp][1] - without.get(layer, 0)
            stack.callback(mlp.register_forward_hook(lambda *_, own=own: own).remove)
        yield


@torch.no_grad()
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_an_effect_is_what_the_linear_model_loses_without_the_feature(kind: str) -> None:
    model = model_of(kind)
    dictionaries = [transcoder(0, "relu"), transcoder(1, "topk rescaled")]
    effects = fh.analysis.direct_effects(model, IDS, metric, dictionaries)
    with linear(model, kind, {}):
        whole = metric(model(IDS)).mean()
    tried = effects.features[:15] + effects.features[-5:]
    assert {it.place for it in tried} == {"@mlp_out.0", "@mlp_out.1"}
    for each in tried:
        layer = int(each.place.rpartition(".")[2])
        made = dictionaries[layer]
        row = made.weights.tensors["W_dec"][each.feature]
        if layer:
            row = row / row.norm()
        without = torch.zeros(*IDS.shape, D_IN, dtype=torch.float64)
        without[each.row, each.position] = each.value * row
        with linear(model, kind, {layer: without}):
            lost = whole - metric(model(IDS)).mean()
        assert each.effect == pytest.approx(float(lost), rel=1e-4, abs=1e-7)


@torch.no_grad()
def test_an_effect_of_an_embedding_is_what_the_linear_model_loses() -> None:
    model = model_of("llama")
    effects = fh.analysis.direct_effects(model, IDS[:1], metric, [transcoder(0, "relu")])
    embedding = model.model.embed_tokens
    for position in range(IDS.shape[1]):

        def drop(_module: Any, _args: Any, output: Tensor, position: int = position) -> Tensor:
            changed = output.clone()
            changed[0, position] = 0
            return changed

        with linear(model, "llama", {}):
            whole = metric(model(IDS))[0]
            with ExitStack() as stack:
                stack.callback(embedding.register_forward_hook(drop).remove)
                lost = whole - metric(model(IDS))[0]
        expected = float(effects.sources["@embed"][position])
        assert float(lost) == pytest.approx(expected, rel=1e-4, abs=1e-7)


def test_a_float32_model_adds_up_to_rounding() -> None:
    model = model_of("gpt2").float()
    made = dictionary_of("relu", transcoder=True, reads="@mlp_in.1", writes="@mlp_out.1")
    effects = fh.analysis.direct_effects(model, IDS, metric, made)
    assert total(effects) == pytest.approx(effects.metric, rel=1e-4)


def test_the_table_and_the_data_frame() -> None:
    pytest.importorskip("pandas")
    tokens = ["a", "b", "c", "d", "e"]
    effects = fh.analysis.direct_effects(
        model_of("gpt2"), IDS[:1], metric, [transcoder(1, "relu")], tokens=tokens
    )
    first = effects.features[0]
    text = str(effects)
    assert f"@mlp_out.1 feature {first.feature}" in text
    assert "@mlp_out.1 error" in text
    assert "@mlp_out.0 " in text
    assert "other features" in text
    frame = effects.to_pandas()
    assert len(frame) == len(effects.features)
    assert frame["token"][0] == tokens[first.position]
    assert frame["effect"].sum() == pytest.approx(sum(it.effect for it in effects.features))


def test_what_is_not_linear_is_refused() -> None:
    with pytest.raises(fh.HookError, match=r"the terms add up to .* not linear in the logits"):
        fh.analysis.direct_effects(
            model_of("gpt2"), IDS, lambda it: it.logits[:, -1].log_softmax(-1)[:, 7], []
        )


REFUSED: list[tuple[Any, type[Exception], str]] = [
    (
        lambda: [dictionary_of("relu")],
        fh.HookError,
        r"dictionaries\[0\] does not say what it reads",
    ),
    (
        lambda: [dictionary_of("relu", transcoder=True, reads="@mlp_in.0")],
        fh.HookError,
        "what it writes: pass writes=",
    ),
    (lambda: [transcoder(0, "relu")] * 2, fh.HookError, "two dictionaries write '@mlp_out.0'"),
    (lambda: ["@mlp_out.0"], fh.HookTypeError, r"dictionaries\[0\] must be a fh.Dictionary"),
    (lambda: [transcoder(7, "relu")], fh.SelectionError, "@mlp_"),
    (
        lambda: transcoder(0, "relu", width=5),
        fh.HookTypeError,
        "writes vectors of width 5, @mlp_out.0 has 12",
    ),
    (
        lambda: dictionary_of("relu", transcoder=True, reads="@mlp_in.0", writes="@pattern.0"),
        fh.HookError,
        "pattern",
    ),
]


@pytest.mark.parametrize(("dictionaries", "error", "words"), REFUSED)
def test_bad_dictionaries_are_refused(
    dictionaries: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        fh.analysis.direct_effects(model_of("gpt2"), IDS, metric, dictionaries())


def test_labels_are_counted() -> None:
    with pytest.raises(fh.HookTypeError, match="one label per position"):
        fh.analysis.direct_effects(model_of("gpt2"), IDS, metric, [], tokens=["a"])

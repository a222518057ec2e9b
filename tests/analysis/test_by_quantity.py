"""Analyses of quantities equal analyses of the modules that have them, in any architecture."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ferrohook as fh
from ferrohook import analysis
from support.analysis import HEADS, POSITIONS, WIDTH, WORDS, Case, cases, difference, modules

ATTENTIONS = {"llama": "**.self_attn", "gpt2": "**.attn"}
PROJECTIONS = {"llama": "**.o_proj", "gpt2": "**.attn.c_proj"}
NORMS = {"llama": "model.norm", "gpt2": "transformer.ln_f"}
EMBEDDINGS = {"llama": "model.embed_tokens", "gpt2": "transformer.wte"}


# Of forwards of other shapes, in float32.
close = functools.partial(torch.testing.assert_close, rtol=1e-3, atol=1e-4)


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def named(request: pytest.FixtureRequest) -> tuple[str, Case]:
    return str(request.param), cases(request.param)


def test_patching_goes_over_the_stream(named: tuple[str, Case]) -> None:
    _, case = named
    arguments = (case.model, case.clean, case.corrupted, case.metric)
    for analyse in (analysis.activation_patching, analysis.attribution_patching):
        found = analyse(*arguments)
        assert found.names == ["@resid_post.0", "@resid_post.1"]
        close(found.values, analyse(*arguments, case.layers).values)
        # The next block's input is the output of the one before it.
        before = analyse(*arguments, "@resid_pre.1")
        close(before.values[0], found.values[0])


def test_ablation_goes_over_what_is_added(named: tuple[str, Case]) -> None:
    kind, case = named
    found = analysis.ablation(case.model, case.clean, case.metric)
    assert found.names == ["@attn_out.0", "@attn_out.1", "@mlp_out.0", "@mlp_out.1"]
    by_module = analysis.ablation(case.model, case.clean, case.metric, [ATTENTIONS[kind], "**.mlp"])
    order = [by_module.names.index(name) for name in _paths(case, found.names)]
    close(found.values, by_module.values[order])


def _paths(case: Case, names: list[str]) -> list[str]:
    table = fh.quantities(case.model)
    return [table[name].path for name in names]


@pytest.mark.parametrize("by", ["zero", "mean"])
def test_heads_are_those_of_the_projections_inputs(named: tuple[str, Case], by: Any) -> None:
    kind, case = named
    options: dict[str, Any] = {"over": ("position", "head"), "heads": HEADS, "by": by}
    found = analysis.ablation(case.model, case.clean, case.metric, "@z.*", **options)
    other = analysis.ablation(
        case.model, case.clean, case.metric, PROJECTIONS[kind], inputs=True, **options
    )
    assert found.values.shape == (2, POSITIONS, HEADS)
    close(found.values, other.values)


def test_quantities_inside_attention_know_their_heads(named: tuple[str, Case]) -> None:
    _, case = named

    def off(what: Any, **options: Any) -> Tensor:
        return analysis.ablation(case.model, case.clean, case.metric, what, **options).values

    heads = off("@z.*", over="head")
    close(heads, off("@z.*", over="head", heads=HEADS))
    with pytest.raises(fh.HookTypeError, match=f"has {HEADS} heads, got heads=3"):
        off("@z.*", over="head", heads=3)
    # A head without a pattern returns zeros, and a head has a separate name.
    close(heads, off("@pattern.*", over="head"))
    close(heads[:, 1], off("@z.*.1"))
    assert off(["@q.0", "@pattern.0"], over=("position", "head")).shape == (2, POSITIONS, HEADS)


def test_the_lens_is_that_of_the_layers(named: tuple[str, Case]) -> None:
    _, case = named
    found = analysis.logit_lens(case.model, case.clean, top=2)
    other = analysis.logit_lens(case.model, case.clean, case.layers, top=2)
    assert torch.equal(found.ids, other.ids)
    assert found.names == ["@resid_post.0", "@resid_post.1"]
    assert [*modules(case.model, case.layers)] == other.names


def test_direct_attribution_needs_no_names(named: tuple[str, Case]) -> None:
    kind, case = named
    found = analysis.direct_logit_attribution(case.model, case.clean, case.metric)
    parts = [EMBEDDINGS[kind], ATTENTIONS[kind], "**.mlp"]
    other = analysis.direct_logit_attribution(
        case.model, case.clean, case.metric, parts, norm=NORMS[kind]
    )
    order = [other.names.index(name) for name in _paths(case, found.names)]
    close(found.values, other.values[order])
    by_head: dict[str, Any] = {"over": "head", "heads": HEADS}
    heads = analysis.direct_logit_attribution(case.model, case.clean, case.metric, **by_head)
    by_module = analysis.direct_logit_attribution(
        case.model, case.clean, case.metric, PROJECTIONS[kind], norm=NORMS[kind], **by_head
    )
    close(heads.values, by_module.values)
    with pytest.raises(fh.HookTypeError, match=r"needs .@z.* or the projections"):
        analysis.direct_logit_attribution(
            case.model, case.clean, case.metric, "@mlp_out.*", **by_head
        )


def test_parts_behind_norms_sum_up_to_the_logit() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Olmo2Config(
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        vocab_size=WORDS,
        pad_token_id=None,
    )
    model = transformers.Olmo2ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    ids = torch.randint(WORDS, (2, POSITIONS))

    def share(*parts: Any) -> Tensor:
        """Share of the metric that is left without the parts; there are no biases in it."""
        found = analysis.direct_logit_attribution(model, ids, difference, *parts)
        return torch.tensor(found.scores["rest"] / found.scores["metric"])

    torch.testing.assert_close(share(), torch.tensor(0.0), atol=1e-4, rtol=0)
    # The outputs of the attentions and MLPs are not their contributions.
    assert share(["model.embed_tokens", "**.self_attn", "**.mlp"]).abs() > 0.01
    with pytest.raises(fh.HookError, match=r"'@attn_out\.0' is not linear in its heads"):
        analysis.direct_logit_attribution(model, ids, difference, over="head", heads=HEADS)


class Mixer(nn.Conv1d):
    """Convolution over positions."""

    def forward(self, taken: Tensor) -> Tensor:
        return super().forward(taken.transpose(1, 2)).transpose(1, 2)


class ScaledBlock(nn.Module):
    """Block that multiplies the stream before each sum, or normalises it after the last."""

    def __init__(self, factors: tuple[float, float], norm: type[nn.Module]) -> None:
        super().__init__()
        self.factors, self.norm = factors, norm(WIDTH)
        self.mix = nn.Sequential(nn.LayerNorm(WIDTH), Mixer(WIDTH, WIDTH, 3, padding=1))
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, stream: Tensor) -> Tensor:
        stream = self.factors[0] * stream + self.mix(stream)
        normed: Tensor = self.norm(self.factors[1] * stream + self.mlp(stream))
        return normed


class Scaled(nn.Module):
    """Model of three such blocks, with different factors."""

    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        factors = [(0.5, 0.7), (1.5, 0.4), (0.8, 1.25)]
        self.blocks = nn.ModuleList(ScaledBlock(each, norm) for each in factors)
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        stream = self.embed(input_ids)
        for block in self.blocks:
            stream = block(stream)
        logits: Tensor = self.head(self.norm(stream))
        return logits


def scaled(norm: type[nn.Module]) -> tuple[Scaled, Tensor]:
    torch.manual_seed(0)
    model = Scaled(norm).eval()
    ids = torch.randint(WORDS, (2, POSITIONS))
    fh.quantities(model, ids)
    return model, ids


@pytest.mark.parametrize("over", [(), ("position",)])
def test_the_multipliers_that_the_stream_passes_are_in_the_attribution(over: Any) -> None:
    model, ids = scaled(nn.Identity)
    parts = ["@embed", "@mixer_out.*", "@mlp_out.*"]
    found = analysis.direct_logit_attribution(model, ids, difference, parts, over=over)
    table = fh.quantities(model)
    left = {"@embed": 1.0}
    for number, block in enumerate(model.blocks):
        for name, factor in zip(("mixer_out", "mlp_out"), block.factors, strict=True):
            left = {each: it * factor for each, it in left.items()}
            left[f"@{name}.{number}"] = 1.0
    assert {name: table[name].stream_factor for name in found.names} == pytest.approx(left)
    with torch.no_grad(), fh.capture(model, [*parts, "@resid_post.2"]) as acts:
        model(ids)
        stream = acts["@resid_post.2"]
        size = (stream.square().mean(-1, keepdim=True) + torch.finfo(stream.dtype).eps).sqrt()
        weight = model.head.weight[3] - model.head.weight[5]
        for name, factor in left.items():
            expected = (factor * acts[name] / size * model.norm.weight)[:, -1] @ weight
            own = found[name] if not over else found[name][-1]
            close(own.float(), expected.mean(), msg=name)
    assert found.scores["rest"] == pytest.approx(0.0, abs=1e-5 * float(found.values.abs().sum()))


def test_the_equation_shown_is_the_one_that_holds() -> None:
    model, ids = scaled(nn.Identity)
    names = ["resid_pre", "mixer_out", "mlp_out", "resid_mid", "resid_post"]
    for number in range(3):
        with torch.no_grad(), fh.capture(model, [f"@{name}.{number}" for name in names]) as acts:
            model(ids)
            values = {name: acts[f"@{name}.{number}"] for name in names}
        for name in names:
            left, _, right = fh.quantities(model)[f"@{name}.{number}"].equation.partition(" = ")
            close(eval(left, {}, values), values[right])  # noqa: S307 (the text under test)


def test_what_passes_a_norm_in_the_stream_is_not_attributed() -> None:
    model, ids = scaled(nn.LayerNorm)
    with pytest.raises(fh.HookTypeError, match=r"'@mixer_out\.0' is not a term of the stream"):
        analysis.direct_logit_attribution(model, ids, difference, "@mixer_out.*")
    transformers = pytest.importorskip("transformers")
    config = transformers.BloomConfig(hidden_size=WIDTH, n_layer=2, n_head=HEADS, vocab_size=WORDS)
    bloom = transformers.BloomForCausalLM(config).eval()
    found = analysis.direct_logit_attribution(bloom, ids, difference)
    # Its embedding passes a norm.
    assert found.names[0] == "@resid_pre.0"
    assert found.scores["rest"] == pytest.approx(0.0, abs=1e-5 * float(found.values.abs().sum()))
    with pytest.raises(fh.HookTypeError, match="'@embed' is not a term of the stream"):
        analysis.direct_logit_attribution(bloom, ids, difference, "@embed")


def test_what_can_only_be_read_is_not_patched(named: tuple[str, Case]) -> None:
    _, case = named
    with pytest.raises(fh.HookTypeError, match=r"@resid_mid\.0 can be read but not written"):
        analysis.activation_patching(
            case.model, case.clean, case.corrupted, case.metric, "@resid_mid.*"
        )
    with pytest.raises(fh.SelectionError, match=r"has no @resid_post\.9: its blocks are 0 to 1"):
        analysis.ablation(case.model, case.clean, case.metric, "@resid_post.9")
    with pytest.raises(fh.HookTypeError, match="'@logits' is not a term of the stream"):
        analysis.direct_logit_attribution(case.model, case.clean, case.metric, "@logits")


def test_a_place_with_one_row_for_all_texts_is_refused_but_alone() -> None:
    case = cases("gpt2")
    positions = "transformer.wpe"
    with pytest.raises(fh.HookError, match=r"'transformer\.wpe' has 1 rows, .*batch_size=1"):
        analysis.ablation(case.model, case.clean, case.metric, positions)
    found = analysis.ablation(case.model, case.clean, case.metric, positions, batch_size=1)
    assert found.values.abs() > 0


def test_a_look_at_one_text_knows_the_positions() -> None:
    case = cases("llama")
    fh.quantities(case.model, case.clean[:1])
    found = analysis.activation_patching(case.model, case.clean, case.corrupted, case.metric)
    assert found.values.shape == (2, POSITIONS)

"""Models that are no causal language models of transformers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ferrohook as fh
from support.zoo import make, token_ids, uneven

IDS = token_ids()
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}


def blocks(table: fh.Quantities, kind: str) -> int:
    return sum(name.startswith(f"@{kind}.") for name in table)


def test_vit_with_an_example() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(**SMALL, image_size=16, patch_size=8)
    model = uneven(transformers.ViTModel(config).eval())
    pixels = torch.randn(2, 3, 16, 16)
    table = fh.quantities(model, pixels)
    for kind in ("resid_post", "resid_mid", "attn_out", "mlp_out", "z", "q", "pattern", "mlp_act"):
        assert blocks(table, kind) == 3, kind
    assert "no module that ran before the first block" in table.missing["embed"]
    with torch.no_grad(), fh.capture(model, ["@resid_post.*", "@final_norm"]) as acts:
        output = model(pixels, output_hidden_states=True)
    for block in range(3):
        assert torch.equal(acts[f"@resid_post.{block}"], output.hidden_states[block + 1])
    assert torch.equal(acts["@final_norm"], output.last_hidden_state)


def test_bert_without_a_head() -> None:
    transformers = pytest.importorskip("transformers")
    model = uneven(transformers.BertModel(transformers.BertConfig(**SMALL, vocab_size=96)).eval())
    table = fh.quantities(model)
    assert blocks(table, "resid_post") == blocks(table, "pattern") == 3
    assert "logits" in table.missing
    assert table["@resid_mid.0"].equation == "norm(resid_pre + attn_out) = resid_mid"


STAGES: dict[str, dict[str, Any]] = {
    "ConvNext": {"num_channels": 3, "hidden_sizes": [8, 16, 24, 32]},
    "ConvNextV2": {"num_channels": 3, "hidden_sizes": [8, 16, 24, 32]},
    "Hiera": {"embed_dim": 8, "num_heads": [1, 2, 4, 8], "mlp_ratio": 2.0, "image_size": [64, 64]},
    "Swin": {"embed_dim": 8, "num_heads": [2, 2, 2, 2], "window_size": 2, "image_size": 64},
    "Segformer": {"hidden_sizes": [8, 16, 24, 32], "num_attention_heads": [1, 2, 2, 4]},
}


@pytest.mark.parametrize("last", [1, 2])
@pytest.mark.parametrize("kind", STAGES)
def test_the_final_norm_is_no_norm_of_a_later_stage(kind: str, last: int) -> None:
    """A last stage of one block may be no stack; then the blocks of the one before are the last."""
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{kind}Config")(
        **STAGES[kind], depths=[2, 2, 3, last], num_labels=5
    )
    model = uneven(getattr(transformers, f"{kind}ForImageClassification")(config).eval())
    table = fh.quantities(model, pixel_values=torch.randn(2, 3, 64, 64))
    last_norms = {"Swin": "swin.layernorm", "Segformer": "segformer.stages.3.layer_norm"}
    assert [table[name].path for name in table if "final_norm" in name] == [
        path for name, path in last_norms.items() if name == kind
    ]
    assert blocks(table, "resid_post") > 0


def test_t5_has_an_encoder_and_cross_attention() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        d_model=32, d_kv=8, d_ff=48, num_layers=3, num_heads=4, vocab_size=96
    )
    model = uneven(transformers.T5ForConditionalGeneration(config).eval())
    table = fh.quantities(model)
    for kind in ("resid_post", "attn_out", "cross_out", "mlp_out", "encoder.resid_post"):
        assert blocks(table, kind) == 3, kind
    assert "@encoder.attn_out.1" in table
    assert "@encoder.cross_out.1" not in table
    names = ["@encoder.resid_post.1", "@resid_post.1", "@cross_out.1", "@resid_mid.1"]
    seen: list[Tensor] = []
    cross = model.decoder.block[1].layer[1].EncDecAttention
    handle = cross.register_forward_hook(lambda _m, _a, output: seen.append(output[0]))
    with torch.no_grad(), fh.capture(model, names) as acts:
        output = model(input_ids=IDS, decoder_input_ids=IDS, output_hidden_states=True)
    handle.remove()
    assert torch.equal(acts[names[0]], output.encoder_hidden_states[2])
    assert torch.equal(acts[names[1]], output.decoder_hidden_states[2])
    assert torch.equal(acts[names[2]], seen[0])
    names = ["@decoder.resid_post.*", "@decoder.q.1.2", "@q.1.2", "@decoder.final_norm"]
    plan = fh.Plan.from_json(fh.Plan(fh.keep(names)).to_json())
    with torch.no_grad():
        _, kept = fh.run(model, IDS, decoder_input_ids=IDS, plan=plan)
    assert {name for name in kept if "resid" in name} == {
        f"@decoder.resid_post.{n}" for n in range(3)
    }
    assert torch.equal(kept["@decoder.resid_post.1"], acts["@resid_post.1"])
    assert torch.equal(kept["@decoder.q.1.2"], kept["@q.1.2"])
    assert torch.equal(kept["@decoder.final_norm"], output.decoder_hidden_states[-1])
    assert "decoder.resid_post.1" in table
    assert table["@decoder.resid_post.1"].path == table["@resid_post.1"].path
    assert not [name for name in table if name.startswith("@decoder")]
    with pytest.raises(fh.SelectionError, match=r"has no @q.7: its blocks are 0 to 2"):
        fh.capture(model, "@decoder.q.7")


def test_whisper_with_an_example() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.WhisperConfig(
        d_model=32,
        encoder_layers=2,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        vocab_size=96,
        num_mel_bins=8,
        max_source_positions=10,
        max_target_positions=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=3,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    model = uneven(transformers.WhisperForConditionalGeneration(config).eval())
    table = fh.quantities(
        model, input_features=torch.randn(2, 8, 20), decoder_input_ids=token_ids()
    )
    for kind in ("resid_post", "attn_out", "cross_out", "mlp_out", "z"):
        assert blocks(table, kind) == 3, kind
    assert blocks(table, "encoder.attn_out") == blocks(table, "encoder.resid_post") == 2
    assert table["@decoder.cross_out.2"].path == "model.decoder.layers.2.encoder_attn"


def test_a_model_without_an_encoder_has_no_decoder_beside_it() -> None:
    with pytest.raises(fh.SelectionError, match=r"@decoder.resid_post.1 is not proved"):
        fh.capture(make("opt"), "@decoder.resid_post.1")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        split = self.c_attn(x).view(*x.shape[:2], 3, 4, 8).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(*split, is_causal=True)
        projected: Tensor = self.c_proj(y.transpose(1, 2).reshape(x.shape))
        return projected


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.attn = Attention()
        self.mlp = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    """A GPT written by hand, as it is made: norms' weights of one and biases of zero."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(96, 32), nn.Embedding(16, 32)
        self.h = nn.ModuleList(Block() for _ in range(3))
        self.ln_f, self.head = nn.LayerNorm(32), nn.Linear(32, 96, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.wte(input_ids) + self.wpe(torch.arange(input_ids.shape[1]))
        for block in self.h:
            x = block(x)
        logits: Tensor = self.head(self.ln_f(x))
        return logits


def test_a_model_written_by_hand() -> None:
    model = NanoGPT()
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    table = fh.quantities(model)
    for kind in ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out", "z", "mlp_act"):
        assert blocks(table, kind) == 3, kind
    assert {"@embed", "@final_norm", "@logits"} <= {*table}
    assert table["@embed"].equation == "embed + positions = resid_pre.0"
    vector = torch.randn(32)
    with torch.no_grad():
        before = fh.run(model, IDS, capture=["@mlp_in.1", "@mlp_out.1", "@resid_post.1"])[1]
        after = fh.run(
            model,
            IDS,
            hooks={"@attn_out.1": fh.Add(vector)},
            capture=["@mlp_out.1", "@resid_post.1"],
        )[1]
    change = after["@resid_post.1"] - before["@resid_post.1"]
    moved = after["@mlp_out.1"] - before["@mlp_out.1"]
    torch.testing.assert_close(change, moved + vector, rtol=1e-4, atol=1e-5)
    assert torch.equal(before["@mlp_in.1"], model.h[1].ln_2(residual(model)))


@pytest.mark.parametrize("function", [nn.Tanh, nn.Hardtanh])
def test_a_function_that_saturates_is_no_norm(function: type[nn.Module]) -> None:
    model = uneven(NanoGPT())
    model.ln_f = function()
    table = fh.quantities(model, IDS[:1, :2])  # few elements, of which none is near zero
    assert table.missing["final_norm"] == "no norm takes the output of the last block"
    assert table["@logits"].equation == "head(ln_f(resid_post)) = logits"


def residual(model: NanoGPT) -> Tensor:
    with torch.no_grad():
        x = model.wte(IDS) + model.wpe(torch.arange(IDS.shape[1]))
        x = model.h[0](x)
        return x + model.h[1].attn(model.h[1].ln_1(x))


def test_the_encoder_of_torch() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True)
    model = uneven(nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval())
    table = fh.quantities(model, torch.randn(2, 7, 32))
    for kind in ("resid_post", "attn_out", "mlp_out"):
        assert blocks(table, kind) == 3, kind


def test_a_vit_of_timm() -> None:
    timm = pytest.importorskip("timm")
    model = timm.models.vision_transformer.VisionTransformer(
        img_size=16,
        patch_size=8,
        embed_dim=32,
        depth=3,
        num_heads=4,
        num_classes=5,
        init_values=0.1,
    )
    table = fh.quantities(uneven(model.eval()), torch.randn(2, 3, 16, 16))
    for kind in ("resid_post", "attn_out", "mlp_out"):
        assert blocks(table, kind) == 3, kind


def test_a_model_that_recorded_hidden_states_before() -> None:
    transformers = pytest.importorskip("transformers")
    vision = transformers.CLIPVisionConfig(**SMALL, image_size=8, patch_size=4)
    text = transformers.LlamaConfig(**SMALL, vocab_size=96, pad_token_id=0)
    sizes = {"image_token_index": 95, "image_seq_length": 4}
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, **sizes)
    model = uneven(transformers.LlavaForConditionalGeneration(config).eval())
    ids = torch.cat([torch.full((2, 4), 95), IDS], 1)
    example = {"input_ids": ids, "pixel_values": torch.randn(2, 3, 8, 8)}
    with torch.no_grad():
        own = model(**example, output_hidden_states=True).hidden_states
        table = fh.quantities(model, **example)
        _, acts = fh.run(model, **example, capture="@resid_post.*")
    assert blocks(table, "resid_post") == 3
    assert torch.equal(acts["@resid_post.1"], own[2])


class Bounded(nn.Module):
    """An MLP with a norm inside and a norm after it: to a large input it adds nearly nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)
        self.outer = nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.outer(x + self.down(self.up(self.inner(x)).relu()))
        return out


def test_a_sublayer_with_a_norm_behind_is_no_norm() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Bounded(), Bounded()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.second(self.first(x))
            return out

    torch.manual_seed(0)
    table = fh.quantities(nn.Sequential(Block(), Block()), torch.randn(2, 5, 32))
    assert "2 contributions" in table.missing["mlp_out.0"]


class Scaled(nn.Module):
    """Block that scales the stream before each of its parts adds to it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix, self.mlp = nn.LayerNorm(16), Mean(), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        middle = 0.5 * x + self.mix(self.norm(x))
        result: Tensor = 0.5 * middle + self.mlp(middle)
        return result


class Mean(nn.Module):
    """Attention to all tokens alike."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.value(x.mean(1, keepdim=True)).expand_as(x).contiguous()
        return out


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(96, 16)
        self.layers = nn.ModuleList(Scaled() for _ in range(2))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        result: Tensor = x
        return result


def test_the_equation_of_a_stream_that_is_scaled_twice_holds() -> None:
    torch.manual_seed(0)
    model = Tower().eval()
    equation = fh.quantities(model)["@resid_post.1"].equation
    left, right = equation.split(" = ")
    _, acts = fh.run(model, IDS, capture=["@resid_pre.1", "@resid_post.1", "@*_out.1"])
    values = {name[1:].partition(".")[0]: acts[name] for name in acts}
    torch.testing.assert_close(eval(left, values), values[right])  # noqa: S307 (our own text)


@pytest.mark.parametrize("factors", [nn.Identity, "scale"])
def test_factors_after_a_projection_are_no_projection(factors: Any) -> None:
    """LayerScale of timm, DINOv2 and DINOv3."""

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factors = nn.Parameter(torch.full((32,), 0.1))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.factors

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.scale = nn.LayerNorm(32), (Scale if factors == "scale" else factors)()
            self.mlp = nn.Sequential(nn.Linear(32, 96), nn.GELU(), nn.Linear(96, 32))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = x + self.scale(self.mlp(self.norm(x)))
            return out

    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3))).eval()
    quantity = fh.quantities(model, torch.randn(2, 5, 32))["@mlp_act.1"]
    shown = "scale(projection(mlp_act))" if factors == "scale" else "projection(mlp_act)"
    assert (quantity.place, quantity.equation) == ("1.mlp.2 input", f"{shown} = mlp_out")
    assert quantity.writable


def test_neurons_of_dinov2_are_before_its_last_projection() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Dinov2Config(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=8
    )
    table = fh.quantities(transformers.Dinov2Model(config).eval(), torch.randn(2, 3, 16, 16))
    assert table["@mlp_act.1"].place == "encoder.layer.1.mlp.fc2 input"


def test_a_compiled_model_has_the_quantities_of_its_original() -> None:
    model = make("llama")
    compiled: Any = torch.compile(model, backend="eager")
    expected = {name: f"_orig_mod.{it.path}" for name, it in fh.quantities(model).items()}
    found = {name: it.path for name, it in fh.quantities(compiled).items()}
    assert {**found, "@logits": ""} == {**expected, "@logits": ""}
    with torch.no_grad():
        _, acts = fh.run(compiled, IDS, capture=["@resid_post.1", "@z.1"])
        _, right = fh.run(model, IDS, capture=["@resid_post.1", "@z.1"])
    for name in right:
        torch.testing.assert_close(acts[name], right[name])


@pytest.mark.parametrize("kind", ["cpu_offload", "disk_offload"])
def test_an_offloaded_model_has_the_quantities_of_a_loaded_one(kind: str, tmp_path: Any) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = make("llama")
    expected = {name: it.path for name, it in fh.quantities(model).items()}
    folder = () if kind == "cpu_offload" else (tmp_path,)
    device = torch.device("cpu")
    copied = copy.deepcopy(model)  # the table of the same object is known
    offloaded = getattr(accelerate, kind)(copied, *folder, execution_device=device)
    assert {name: it.path for name, it in fh.quantities(offloaded).items()} == expected
    assert all(each.is_meta for each in offloaded.parameters())

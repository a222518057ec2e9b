"""Kinds of sublayers under any mask, and stacks that are joined by cross-attention only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import ferrohook as fh

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH, HEADS, TOKENS = 32, 4, 7


def isolated(token: int) -> Callable[[int], Tensor]:
    """Makes masks in which one token sees only itself, and is seen by no other."""

    def mask(tokens: int) -> Tensor:
        seen = torch.ones(tokens, tokens, dtype=torch.bool)
        seen[:, token] = seen[token] = False
        seen[token, token] = True
        return seen

    return mask


def left_padded(tokens: int) -> Tensor:
    """The first row has two tokens, the second one all; padding sees itself."""
    seen = torch.ones(tokens, tokens, dtype=torch.bool).tril().repeat(2, 1, 1)
    seen[0, :, : tokens - 2] = False
    return (seen | torch.eye(tokens, dtype=torch.bool))[:, None]


MASKS: dict[str, Callable[[int], Tensor]] = {
    "none": lambda n: torch.ones(n, n, dtype=torch.bool),
    "causal": lambda n: torch.ones(n, n, dtype=torch.bool).tril(),
    "anti-causal": lambda n: torch.ones(n, n, dtype=torch.bool).triu(),
    "first token apart": isolated(0),
    "last token apart": isolated(-1),
    "window of two": lambda n: torch.ones(n, n, dtype=torch.bool).tril().triu(-1),
    "every other token": lambda n: (torch.arange(n)[:, None] - torch.arange(n)) % 2 == 0,
    "left padding": left_padded,
}


class Attention(nn.Module):
    def __init__(self, mask: Callable[[int], Tensor]) -> None:
        super().__init__()
        self.qkv, self.out, self.mask = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), mask

    def forward(self, x: Tensor) -> Tensor:
        split = self.qkv(x).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        z = nn.functional.scaled_dot_product_attention(*split, attn_mask=self.mask(x.shape[1]))
        out: Tensor = self.out(z.transpose(1, 2).flatten(2))
        return out


class Convolution(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, **options)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(x.mT).mT
        return out


class Block(nn.Module):
    def __init__(self, sublayer: nn.Module) -> None:
        super().__init__()
        self.norm, self.sublayer = nn.LayerNorm(WIDTH), sublayer

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.sublayer(self.norm(x))
        return out


def found(make: Callable[[], nn.Module], example: Tensor) -> tuple[list[str], fh.Quantities]:
    """Returns the contributions of the second of three blocks."""
    torch.manual_seed(0)
    table = fh.quantities(nn.Sequential(*(Block(make()) for _ in range(3))).eval(), example)
    return [name for name in table if name.endswith("_out.1")], table


@pytest.mark.parametrize("mask", MASKS)
def test_attention_is_attention_whatever_its_mask(mask: str) -> None:
    names, _ = found(lambda: Attention(MASKS[mask]), torch.randn(2, TOKENS, WIDTH))
    assert names == ["@attn_out.1"]


@pytest.mark.parametrize("padding", ["zeros", "circular"])
@pytest.mark.parametrize("groups", [1, WIDTH])
def test_a_convolution_is_a_mixer(padding: str, groups: int) -> None:
    names, _ = found(
        lambda: Convolution(padding_mode=padding, groups=groups), torch.randn(2, TOKENS, WIDTH)
    )
    assert names == ["@mixer_out.1"]


@pytest.mark.parametrize("tokens", [2, TOKENS])
def test_a_position_wise_sublayer_is_an_mlp(tokens: int) -> None:
    names, _ = found(lambda: nn.Linear(WIDTH, WIDTH), torch.randn(2, tokens, WIDTH))
    assert names == ["@mlp_out.1"]


SUBLAYERS: dict[str, Callable[[], nn.Module]] = {
    "attn": lambda: Attention(MASKS["causal"]),
    "mlp": lambda: nn.Linear(WIDTH, WIDTH),
    "mixer": Convolution,
}


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("kind", SUBLAYERS)
def test_an_example_of_one_token_is_repeated(kind: str, rows: int) -> None:
    names, _ = found(SUBLAYERS[kind], torch.randn(rows, 1, WIDTH))
    assert names == [f"@{kind}_out.1"]


@pytest.mark.parametrize("kind", SUBLAYERS)
def test_a_model_that_takes_one_token_only_shows_no_kind(kind: str) -> None:
    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = SUBLAYERS[kind]()

        def forward(self, x: Tensor) -> Tensor:
            assert x.shape[1] == 1
            out: Tensor = self.inner(x)
            return out

    names, table = found(One, torch.randn(2, 1, WIDTH))
    assert not names
    with pytest.raises(fh.SelectionError, match="no row of the example has two tokens"):
        table["@mlp_out.1"]


def test_a_mask_that_leaves_one_token_hides_no_attention() -> None:
    """Another sublayer, which reads no mask, mixes tokens all the same."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen = torch.empty(0)
            self.blocks = nn.ModuleList(
                Block(Attention(lambda _: self.seen) if n % 2 else Convolution()) for n in range(4)
            )

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            self.seen = mask[:, None, None].bool() | torch.eye(mask.shape[1], dtype=torch.bool)
            for block in self.blocks:
                x = block(x)
            return x

    torch.manual_seed(0)
    mask = torch.tensor([[0, 0, 0, 1]])
    table = fh.quantities(Masked().eval(), torch.randn(1, 4, WIDTH), mask)
    kinds = [name for name in table if "_out" in name]
    assert kinds == ["@mixer_out.0", "@attn_out.1", "@mixer_out.2", "@attn_out.3"]


@pytest.mark.parametrize("tokens", [None, TOKENS, 1])
def test_bart_has_two_stacks(tokens: int | None) -> None:
    """No norm stands between them: the decoder takes the very tensor that the encoder returns."""
    transformers = pytest.importorskip("transformers")
    sizes = {f"{each}_attention_heads": HEADS for each in ("encoder", "decoder")}
    sizes |= {f"{each}_ffn_dim": 48 for each in ("encoder", "decoder")}
    config = transformers.BartConfig(
        **sizes,
        d_model=WIDTH,
        encoder_layers=2,
        decoder_layers=3,
        vocab_size=96,
        max_position_embeddings=32,
    )
    model = transformers.BartForConditionalGeneration(config).eval()
    example = {
        name: torch.randint(3, 90, (2, tokens or 0)) for name in ("input_ids", "decoder_input_ids")
    }
    table = fh.quantities(model, **(example if tokens else {}))
    streams = {name: it.path for name, it in table.items() if "resid_post" in name}
    assert streams == {
        **{f"@encoder.resid_post.{n}": f"model.encoder.layers.{n}" for n in range(2)},
        **{f"@resid_post.{n}": f"model.decoder.layers.{n}" for n in range(3)},
    }
    assert table["@embed"].path == "model.decoder.embed_tokens"
    assert table["@decoder.embed"].path == "model.decoder.embed_tokens"
    assert table["@encoder.embed"].path == "model.encoder.embed_tokens"


def test_the_embedding_of_t5_is_the_decoders() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        d_model=WIDTH, d_kv=8, d_ff=48, num_layers=3, num_heads=HEADS, vocab_size=96
    )
    model = transformers.T5ForConditionalGeneration(config).eval()
    assert fh.quantities(model)["@embed"].place == "decoder.embed_tokens output"


@pytest.mark.parametrize("kind", ["GraniteSWA", "GraniteMoeSWA"])
def test_attention_with_a_sink_is_attention(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{kind}Config")(
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        vocab_size=96,
        initializer_range=0.2,
    )
    table = fh.quantities(getattr(transformers, f"{kind}ForCausalLM")(config).eval())
    assert table["@attn_out.1"].path == "model.layers.1.self_attn"
    assert "pattern @ v = z fails" in table.missing["pattern.1"]

"""Models that cannot be looked at: each a clear error that tells what to do."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import ferrohook as fh
from ferrohook.cli import main

if TYPE_CHECKING:
    from pathlib import Path
from support.zoo import make, token_ids


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.mlp = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Layers(nn.Module):
    def __init__(self, noise: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.noise = noise

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x + self.noise * torch.randn(x.shape, generator=GENERATOR))
        return x


GENERATOR = torch.Generator().manual_seed(0)


def test_a_model_without_input_ids_needs_an_example() -> None:
    model = Layers()
    with pytest.raises(fh.HookError, match=r"does not take input_ids.*fh.quantities"):
        fh.capture(model, "@resid_post.0")
    assert "@resid_post.1" in fh.quantities(model, torch.randn(2, 3, 8))
    with torch.no_grad(), fh.capture(model, "@mlp_out.0") as acts:
        model(torch.randn(1, 5, 8))
    assert acts["@mlp_out.0"].shape == (1, 5, 8)


def test_a_model_that_fails_is_named_with_its_error() -> None:
    with pytest.raises(fh.HookError, match=r"Layers cannot be inspected.*RuntimeError.*example"):
        fh.quantities(Layers(), torch.randn(2, 3, 7))
    with pytest.raises(fh.HookError, match=r"cannot be inspected.*: tokenize the text first"):
        fh.quantities(Layers(), "a text")


@pytest.mark.parametrize("name", ["at", "dtype", "plan", "hooks", "prompt", "scope"])
def test_an_option_of_hooks_in_an_example_is_refused_by_name(name: str) -> None:
    model, ids = make("llama"), token_ids()
    table = fh.quantities(model)
    for call in (fh.quantities, table.verify):
        with pytest.raises(fh.HookTypeError, match=rf"not declare {name}= and may ignore it"):
            call(model, ids, **{name: None})


def test_a_model_that_is_not_deterministic_is_refused() -> None:
    with pytest.raises(fh.HookError, match=r"not deterministic: the input of 'layers.0' differs"):
        fh.quantities(Layers(noise=1.0), torch.randn(2, 3, 8))


def test_a_model_without_a_stream_has_no_quantities_and_says_so() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    table = fh.quantities(model, torch.randn(2, 3, 8))
    assert not table
    with pytest.raises(fh.SelectionError, match=r"no chain of numbered modules adds .* in 0 "):
        fh.capture(model, "@resid_post.0")


class Distorted(Block):
    """Block that adds in its own code what no module returns, and no multiple of that."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        return x + self.mlp(normed) + self.size * normed.cos()


def _distorted(size: float) -> Layers:
    torch.manual_seed(0)
    model = Layers()
    model.layers = nn.ModuleList([Block(), Distorted(size), Block()])
    return model


@pytest.mark.parametrize("size", [1.0, 1e-3])
def test_the_equation_of_the_stream_that_fails_is_told_with_its_residual(size: float) -> None:
    model = _distorted(size)
    x = torch.randn(2, 3, 8)
    table = fh.quantities(model, x)
    assert "@resid_post.0" in table
    assert "@resid_post.2" in table
    for name in ("@resid_post.1", "@mlp_out.1"):
        with pytest.raises(fh.SelectionError, match=r"resid_post fails by \d\.\de-\d\d") as error:
            fh.capture(model, name)
    assert "@mlp_out.1 is not proved in Layers (@resid_post.1): resid_pre" in str(error.value)
    residual = float(str(error.value).partition(" fails by ")[2].partition(":")[0])
    # What no multiple of a seen tensor explains is at most all that was added in its own code.
    block = model.layers[1]
    with torch.no_grad():
        taken = model.layers[0](x)
        largest = block(taken).abs().max()
        hidden = size * block.norm(taken).cos().abs().max()
    assert 0.05 * hidden / largest < residual < 1.5 * hidden / largest


class Still(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.mlp(x)
        return x


class Normed(Block):
    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = self.norm(x)
        return normed


@pytest.mark.parametrize(
    ("block", "reason"),
    [(Still, "its output is its input"), (Normed, "only a norm of its input: it adds nothing")],
)
def test_a_block_without_a_sum_has_a_reason_of_its_own(block: type[Block], reason: str) -> None:
    model = Layers()
    model.layers = nn.ModuleList([Block(), block(), Block()])
    with pytest.raises(fh.SelectionError, match=reason):
        fh.quantities(model, torch.randn(2, 3, 8))["@resid_post.1"]


def test_embedding_and_logits_that_fail_are_told_with_their_residual() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(50, 8), nn.Linear(8, 50)
            self.layers = nn.ModuleList(Block() for _ in range(2))

        def forward(self, input_ids: Tensor) -> Tensor:
            x = self.table(input_ids).sin()
            for layer in self.layers:
                x = layer(x)
            logits: Tensor = self.head(x)
            return logits.square()

    missing = fh.quantities(Odd()).missing
    assert re.search(r"embed \+ positions = resid_pre.0 fails by \d\.\de[-+]\d\d", missing["embed"])
    assert re.search(r"unembed\(final_norm\) = logits fails by \d\.\de[-+]\d\d", missing["logits"])


def test_a_table_in_json_is_checked_against_a_model() -> None:
    llama: Any = make("llama")
    table = fh.quantities(llama)
    again = fh.Quantities.from_json(table.to_json())
    assert dict(again) == dict(table)
    assert again.missing == table.missing
    again.verify(llama)
    with pytest.raises(fh.HookError, match="table"):
        again.verify(make("gpt2"))
    with pytest.raises(ValueError, match="not a table of quantities"):
        fh.Quantities.from_json("{}")


def test_the_command_line_shows_saves_and_checks_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make("llama").save_pretrained(tmp_path / "llama")
    make("gpt2").save_pretrained(tmp_path / "gpt2")
    table = str(tmp_path / "table.json")
    assert main(["quantities", str(tmp_path / "llama"), "--out", table]) == 0
    assert "@resid_post.2  model.layers.2 output" in capsys.readouterr().out
    assert main(["quantities", str(tmp_path / "llama"), "--check", table]) == 0
    assert "quantities of" in capsys.readouterr().out
    assert main(["quantities", str(tmp_path / "gpt2"), "--check", table]) == 2
    assert "in the table" in capsys.readouterr().err


def test_the_command_line_collects_quantities(tmp_path: Path) -> None:
    make("llama").save_pretrained(tmp_path / "llama")
    torch.save({"input_ids": token_ids()}, tmp_path / "ids.pt")
    store = str(tmp_path / "store")
    argv = ["collect", str(tmp_path / "llama"), "--select", "@resid_post.*"]
    assert main([*argv, "--input", str(tmp_path / "ids.pt"), "--store", store]) == 0
    with fh.data.LocalStore(store, read_only=True) as opened:
        assert opened.layers("run", 0) == [f"@resid_post.{block}" for block in range(3)]

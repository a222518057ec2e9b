"""Models that cannot be looked at: each a clear error that tells what to do."""

from __future__ import annotations

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
    with pytest.raises(fh.HookError, match=r"takes no input_ids.*fh.quantities"):
        fh.capture(model, "@resid_post.0")
    assert "@resid_post.1" in fh.quantities(model, torch.randn(2, 3, 8))
    with torch.no_grad(), fh.capture(model, "@mlp_out.0") as acts:
        model(torch.randn(1, 5, 8))
    assert acts["@mlp_out.0"].shape == (1, 5, 8)


def test_a_model_that_fails_is_named_with_its_error() -> None:
    with pytest.raises(fh.HookError, match=r"Layers cannot be looked at.*RuntimeError.*example"):
        fh.quantities(Layers(), torch.randn(2, 3, 7))


def test_a_model_that_is_not_deterministic_is_refused() -> None:
    with pytest.raises(fh.HookError, match=r"not deterministic: the input of 'layers.0' differs"):
        fh.quantities(Layers(noise=1.0), torch.randn(2, 3, 8))


def test_a_model_without_a_stream_has_no_quantities_and_says_so() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    table = fh.quantities(model, torch.randn(2, 3, 8))
    assert not table
    with pytest.raises(fh.SelectionError, match=r"block input \+ contributions fails"):
        fh.capture(model, "@resid_post.0")


def test_a_table_in_json_is_checked_against_a_model() -> None:
    llama: Any = make("llama")
    table = fh.quantities(llama)
    again = fh.Quantities.from_json(table.to_json())
    assert dict(again) == dict(table)
    assert again.missing == table.missing
    again.verify(llama)
    with pytest.raises(fh.HookError, match="table"):
        again.verify(make("gpt2"))
    with pytest.raises(ValueError, match="no table of quantities"):
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


def test_the_command_line_captures_quantities(tmp_path: Path) -> None:
    make("llama").save_pretrained(tmp_path / "llama")
    torch.save({"input_ids": token_ids()}, tmp_path / "ids.pt")
    out = str(tmp_path / "acts.safetensors")
    argv = ["capture", str(tmp_path / "llama"), "--select", "@resid_post.*"]
    assert main([*argv, "--input", str(tmp_path / "ids.pt"), "--out", out]) == 0
    assert list(fh.ActivationCache.load(out)) == [f"@resid_post.{block}" for block in range(3)]

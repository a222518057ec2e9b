"""The logit lens is the model's own norm and head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import ferrohook as fh
from ferrohook import analysis
from support.analysis import POSITIONS, TEXTS, WIDTH, WORDS, logits_of, modules, output_of
from support.language_models import language_model

if TYPE_CHECKING:
    from support.analysis import Case, Net


def head_of(model: Any) -> Any:
    if hasattr(model, "transformer"):
        return lambda hidden: model.lm_head(model.transformer.ln_f(hidden))
    if hasattr(model, "model"):
        return lambda hidden: model.lm_head(model.model.norm(hidden))
    return lambda hidden: model.head(model.norm(hidden))


@pytest.mark.parametrize("batch_size", [1, 4, 32])
def test_each_layer_is_read_by_the_norm_and_the_head(case: Case, batch_size: int) -> None:
    lens = analysis.logit_lens(case.model, case.clean, case.layers, top=3, batch_size=batch_size)
    layers = modules(case.model, case.layers)
    assert lens.names == [*layers]
    assert lens.ids.shape == (len(layers), TEXTS, POSITIONS, 3)
    with torch.no_grad():
        for number, module in enumerate(layers.values()):
            hidden = output_of(module, case.model, case.clean)
            if number == len(layers) - 1 and hasattr(case.model, "transformer"):
                assert lens.names[-1] == "transformer.h.1"
            expected = head_of(case.model)(hidden).softmax(-1)
            own = expected.gather(-1, lens.ids[number])
            torch.testing.assert_close(lens.probabilities[number], own, rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(own, expected.topk(3).values, rtol=1e-4, atol=1e-6)
        logits = logits_of(case.model(case.clean))
    assert torch.equal(lens.ids[-1, ..., 0], logits.argmax(-1))


def test_a_function_stands_in_for_the_head(case: Case) -> None:
    one = analysis.logit_lens(case.model, case.clean, case.layers)
    other = analysis.logit_lens(case.model, case.clean, case.layers, to_logits=head_of(case.model))
    assert torch.equal(one.ids, other.ids)
    torch.testing.assert_close(one.probabilities, other.probabilities)


def test_layers_before_the_last_one_are_refused_without_a_function(case: Case) -> None:
    first = next(iter(modules(case.model, case.layers)))
    with pytest.raises(fh.HookError, match=f"{first}' is not the last layer: the model mixes"):
        analysis.logit_lens(case.model, case.clean, first)
    lens = analysis.logit_lens(case.model, case.clean, first, to_logits=head_of(case.model))
    assert lens.names == [first]


def test_padding_does_not_hide_that_a_layer_is_not_the_last_one() -> None:
    pytest.importorskip("transformers")
    ids, mask = torch.randint(1, WORDS, (2, 5)), torch.ones(2, 5, dtype=torch.long)
    mask[:, :2] = 0
    model, batch = language_model("llama", WIDTH), {"input_ids": ids, "attention_mask": mask}
    with pytest.raises(fh.HookError, match="is not the last layer"):
        analysis.logit_lens(model, batch, "@resid_post.0")
    assert analysis.logit_lens(model, batch, "@resid_post.*").names


class _Capped(nn.Module):
    """Caps and scales logits, and runs its blocks in another order than they are listed in."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.last, self.first = net.blocks[1], net.blocks[0]
        self.embed, self.norm, self.head = net.embed, net.norm, net.head

    def to_logits(self, hidden: Tensor) -> Tensor:
        return 3 * (self.head(0.5 * self.norm(hidden)) / 3).tanh()

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        hidden = self.last(self.first(self.embed(ids))[0])[0]
        return {"logits": self.to_logits(hidden)}


def test_caps_and_scales_are_the_models_and_layers_stand_as_they_run(net: Net) -> None:
    model = _Capped(net)
    ids = torch.randint(WORDS, (TEXTS, POSITIONS))
    lens = analysis.logit_lens(model, {"ids": ids}, ["first", "last"])
    assert lens.names == ["first", "last"]
    with torch.no_grad():
        expected = model.to_logits(output_of(model.first, model, ids)).softmax(-1).max(-1)
    assert torch.equal(lens.ids[0, ..., 0], expected.indices)
    torch.testing.assert_close(lens.probabilities[0, ..., 0], expected.values)


def test_a_lens_prints_and_plots_itself(net: Net) -> None:
    ids = torch.randint(WORDS, (TEXTS, POSITIONS))
    words = [f"w{number}" for number in range(WORDS)]
    lens = analysis.logit_lens(
        net, ids, "blocks.*", decode=words.__getitem__, tokens=["a", "b", "<c>", "d", "e"]
    )
    best = [[words[each] for each in line] for line in lens.ids[:, 1, :, 0].tolist()]
    assert lens.texts(1) == best
    lines = [line.split() for line in repr(lens).splitlines()]
    assert lines[0] == ["name", "a", "b", "<c>", "d", "e"]
    assert lines[1] == ["blocks.0", *lens.texts()[0]]
    assert "&lt;c&gt;" in lens._repr_html_()
    mpl = pytest.importorskip("matplotlib")
    mpl.use("agg")
    ax = lens.plot(1)
    assert [text.get_text() for text in ax.texts] == [text for line in best for text in line]
    layers = [label.get_text() for label in ax.get_yticklabels()]
    assert [f"blocks.{layer}" for layer in layers] == lens.names
    assert ax.get_title() == "probability: blocks.*"
    pytest.importorskip("matplotlib.pyplot").close("all")


class Tokenizer:
    def decode(self, token_id: int) -> str:
        return f"w{token_id}"


def test_labels_of_positions_are_the_texts_given(net: Net) -> None:
    ids = torch.randint(WORDS, (TEXTS, POSITIONS))
    plain = analysis.logit_lens(net, ids, "blocks.*")
    assert repr(plain).split()[1 : 1 + POSITIONS] == [*map(str, range(POSITIONS))]
    pytest.importorskip("matplotlib").use("agg")
    for batch in (ids, (ids,)):
        lens = analysis.logit_lens(net, batch, "blocks.*", decode=Tokenizer())
        for row in range(TEXTS):
            labels = [label.get_text() for label in lens.plot(row).get_xticklabels()]
            assert labels == [f"w{each}" for each in ids[row].tolist()]
    pytest.importorskip("matplotlib.pyplot").close("all")


def test_models_without_logits_and_other_shapes_are_refused(net: Net) -> None:
    ids = torch.randint(WORDS, (TEXTS, POSITIONS))
    tuples = nn.Sequential(net.embed, net.blocks[0])
    with pytest.raises(fh.HookTypeError, match="a model that returns logits, got tuple"):
        analysis.logit_lens(tuples, ids, "1")
    wider = nn.Sequential(net.embed, net.head, nn.Linear(WORDS, WIDTH))
    with pytest.raises(fh.HookTypeError, match=rf"got \(2, 5, {WORDS}\) of '1' and \(2, 5, 16\)"):
        analysis.logit_lens(wider, ids, ["1", "2"])
    with pytest.raises(ValueError, match="top must be at least 1, got 0"):
        analysis.logit_lens(net, ids, "blocks.*", top=0)
    with pytest.raises(
        fh.HookTypeError, match="tokens must have one label per position: expected 5, got 1"
    ):
        analysis.logit_lens(net, ids, "blocks.*", tokens=["a"])

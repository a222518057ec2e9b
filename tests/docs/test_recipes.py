"""Recipes run and print the output that they show, and their claims hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import ferrohook as fh
from support.pages import DOCS, blocks, run

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Names = dict[str, Any]
TOKENS = 10
FOXES, BOAT, SLEEPS = [2, 8], 5, 9


def cache(names: Names) -> None:
    acts, first = names["acts"], names["firsts"]
    assert acts.stack().shape == (6, 1, 9, 384)
    assert acts.grads["encoder.layer.5"][0].norm(dim=-1).nonzero().tolist() == [[2]]
    assert torch.equal(first["encoder.layer.1"], acts["encoder.layer.1"][:, 0].half())
    assert len(names["pooled"]["pooler"]) == 2


def steer(names: Names) -> None:
    near, plain = names["near"], names["scales"].index(0)
    assert near["rates"][plain] == pytest.approx(1, abs=1e-5)
    assert near["cats"] != sorted(near["cats"])  # too much of it loses the way
    assert near["cats"][-1] > near["cats"][plain]
    changed = (names["steered"].stack() != names["plain"].stack()).any(-1)[:, 0]
    assert changed[:3].sum() == 0
    assert changed[3].nonzero().tolist() == [[2]]
    assert changed[4].all()
    cats, text = names["cats"], names["CATS"]
    assert torch.equal(names["embed"](text), cats)  # as it was
    assert torch.equal(names["others"][0], cats)


def steer_generation(names: Names) -> None:
    model, tokenizer, vector = (names[name] for name in ("model", "tokenizer", "vector"))
    chat = [{"role": "user", "content": names["DAY"]}]
    options = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
    ids = tokenizer.apply_chat_template(chat, **options)

    def add(_module: object, _args: object, state: torch.Tensor) -> torch.Tensor:
        generated = state.shape[1] == 1  # a step with a cache
        return state + 4.0 * vector if generated else state

    def text() -> str:
        written: str = tokenizer.decode(
            model.generate(**ids, max_new_tokens=16, do_sample=False)[0]
        )
        return written

    with model.model.layers[10].register_forward_hook(add):  # the oracle: PyTorch's own hook
        expected = text()
    assert "It's a busy day, I'm enjoying my day!" in expected
    with fh.register(model, names["LAYER"], names["happier"], at="generated"):
        assert text() == expected


def ablate_head(names: Names) -> None:
    moved, model = names["moved"], names["model"]
    assert moved.shape == (6, 12)
    assert moved.min() > -1e-5
    assert (moved.topk(3).values > 0).all()
    dense = model.encoder.layer[5].attention.output.dense
    kept = dense.weight.clone()
    with torch.no_grad():
        dense.weight[:, 320:352] = 0  # the oracle: head 10 without its columns of the weight
        expected = 1 - names["embed"]() @ names["plain"]
        dense.weight.copy_(kept)
    torch.testing.assert_close(moved[5, 10], expected, atol=1e-5, rtol=0)
    assert torch.equal(names["embed"](), names["plain"])


def patch(names: Names) -> None:
    effects, account = names["effects"], names["tokens"].index("account")
    assert effects.shape == (7, TOKENS)
    assert effects[0].argmax() == account
    torch.testing.assert_close(effects[0, account], torch.tensor(1.0), atol=0.02, rtol=0)
    assert effects[0, :account].abs().max() < 0.02
    assert effects[-1].argmax() == account
    assert effects[-1, account] < 0.5


def attribution_patching(names: Names) -> None:
    estimate, effects = names["estimate"], names["effects"]
    assert estimate.shape == effects.shape == (7, TOKENS)
    assert torch.equal(estimate.argmax(-1), effects.argmax(-1))
    # A small step along the change agrees with the gradient.
    model, clean, corrupted = names["model"], names["clean"], names["corrupted"]
    name, step = "@resid_post.5", 1e-2
    change = step * (clean[name] - corrupted[name]).detach()
    path = "encoder.layer.5"
    with torch.no_grad(), fh.register(model, path, lambda module, args, output: output + change):
        moved = names["embed"](names["CORRUPTED"]) @ names["money"] - names["low"]
    total = estimate[-1].sum() * (names["high"] - names["low"]) * step
    torch.testing.assert_close(moved, total.detach(), rtol=0.05, atol=1e-6)


def logit_lens(names: Names) -> None:
    acts, model, words = names["acts"], names["model"], names["WORDS"]
    with fh.capture(model, "layers.*") as layers:
        model(names["encode"](names["text"]))
    assert all(torch.equal(acts[f"@resid_post.{n}"], layers[f"layers.{n}"]) for n in range(4))
    best = [words[model.to_logits(layers[f"layers.{n}"])[0, -1].argmax()] for n in range(4)]
    assert best[1:] == 3 * ["blue"]


def attention(names: Names) -> None:
    model, patterns = names["model"], names["patterns"]
    model.set_attn_implementation("eager")
    returned = torch.stack(model(**names["batch"], output_attentions=True).attentions)[:, 0]
    torch.testing.assert_close(patterns, returned, rtol=1e-4, atol=1e-5)
    rows = (returned * returned.clamp(min=1e-30).log()).sum(-1).mean(-1)
    assert int(rows.argmax()) == names["block"] * patterns.shape[1] + names["head"]


def first_nan(names: Names) -> None:
    assert names["watch"].first == "1"
    assert names["output"].isfinite().all()


def watch_service(names: Names) -> None:
    assert names["calls"].snapshot() == {"calls": 4 * 6}
    assert names["finite"].first is None
    assert names["latency"].snapshot()["calls"] == 4 * 6


def sparse_autoencoder(names: Names) -> None:
    assert names["losses"][-1] < 0.2 * names["losses"][0]
    assert len(names["data"]) == len(names["words"])
    grid = names["grid"]
    # Both foxes, the boat and the sleeping are found, and nothing else is taken for them.
    assert [row.topk(1).indices.item() for row in grid[1:]] == [BOAT, SLEEPS]
    assert sorted(grid[0].topk(2).indices.tolist()) == FOXES


CHECKS: dict[str, Callable[[Names], None]] = {
    "cache": cache,
    "steer": steer,
    "steer-generation": steer_generation,
    "ablate-head": ablate_head,
    "patch": patch,
    "attribution-patching": attribution_patching,
    "attention": attention,
    "logit-lens": logit_lens,
    "first-nan": first_nan,
    "watch-service": watch_service,
    "sparse-autoencoder": sparse_autoencoder,
}
PAGES = [page for page in sorted((DOCS / "recipes").glob("*.md")) if blocks(page)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_recipe_prints_its_shown_output_and_holds(
    page: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    CHECKS[page.stem](run(page, monkeypatch, capsys, all_=True))


def test_recipes_show_outputs_and_no_asserts() -> None:
    assert {page.stem for page in PAGES} == set(CHECKS)
    for page in PAGES:
        code = [block.code for block in blocks(page)]
        assert not [each for each in code if "assert" in each]
        assert any(block.printed for block in blocks(page))


def test_the_list_has_each_recipe() -> None:
    index = (DOCS / "recipes" / "index.md").read_text()
    assert [name for name in CHECKS if f"]({name}.md)" not in index] == []

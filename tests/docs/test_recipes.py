"""Recipes run and print the output that they show, and their claims hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn.functional import cosine_similarity

import ferrohook as fh
from support.pages import DOCS, blocks, run

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

Names = dict[str, Any]
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


def steer_only_when(names: Names) -> None:
    model, tokens_of, happier = (names[name] for name in ("model", "tokens_of", "happier"))
    seen: list[float] = []

    def by_hand(_module: object, _args: object, state: Tensor) -> Tensor:
        if state.shape[1] > 1:  # the prompt
            seen.append(float(cosine_similarity(state[0, 4:], -happier, dim=-1).max()))
            new = state[:, -1:]
        else:
            new = state
        if seen[-1] > 0.05:
            new = new + 3.0 * happier
        return torch.cat((state[:, :-1], new), 1)

    for prompt in names["PROMPTS"][:5]:
        ids = tokens_of(prompt)
        with model.model.layers[10].register_forward_hook(by_hand):  # the oracle
            expected = model.generate(**ids, max_new_tokens=10, do_sample=False)
        with names["plan"].open(model):
            assert torch.equal(model.generate(**ids, max_new_tokens=10, do_sample=False), expected)
    assert [value > 0.05 for value in seen] == [True, True, True, False, False]


def stop_when(names: Names) -> None:
    model, ids = names["model"], names["tokens_of"](names["SEA"])
    settings = {"do_sample": False, "output_scores": True, "return_dict_in_generate": True}
    plain = model.generate(**ids, max_new_tokens=60, **settings)  # the oracle: the scores
    certain = [float(each.softmax(-1).max()) for each in plain.scores[1:]]
    start = next(at for at in range(len(certain)) if min(certain[at : at + 8]) > 0.7)
    prompt = ids["input_ids"].shape[1]
    kept = plain.sequences[0, : prompt + start + 8].tolist()
    with names["plan"].open(model):
        text = model.generate(**ids, max_new_tokens=60, do_sample=False)[0].tolist()
    assert text == [*kept, model.generation_config.eos_token_id]


def ablate_head(names: Names) -> None:
    drop, model, paris, ids = (names[name] for name in ("drop", "model", "paris", "ids"))
    plain = model(ids).logits[0, -1].softmax(-1)
    assert names["tokenizer"].decode(plain.argmax()) == " Paris"
    assert drop.shape == (30, 9)
    assert divmod(int(drop.argmax()), 9) == (23, 4)
    for layer, head in ((23, 4), (0, 4), (22, 5)):
        dense = model.model.layers[layer].self_attn.o_proj
        kept = dense.weight.clone()
        dense.weight[:, 64 * head : 64 * (head + 1)] = 0  # the oracle: no columns of the head
        expected = names["plain"] - paris(ids)[0]
        dense.weight.copy_(kept)
        torch.testing.assert_close(drop[layer, head], expected, atol=1e-4, rtol=0)
    assert float(paris(ids)) == names["plain"]
    weights = eager_patterns(model, ids)[23]
    torch.testing.assert_close(names["acts"]["@pattern.23"][0], weights, rtol=1e-4, atol=1e-5)


def patch(names: Names) -> None:
    effects, model, tokens = names["effects"], names["model"], names["tokens"]
    assert effects.shape == (31, 5)
    assert [tokens[at] for at in effects.argmax(-1)] == 24 * [" France"] + 7 * [" is"]
    top = effects.topk(2).values
    assert (top[:, 0] > 0.9).all()
    assert (top[:, 1] < 0.1).all()
    for layer, position in ((0, 3), (22, 3), (22, 4), (23, 3), (23, 4), (29, 2)):
        expected = patched_by_hand(names, layer, position)
        found = effects[layer + 1, position]  # the first row is before block 0
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    assert names["tokenizer"].decode(model(names["CLEAN"]).logits[0, -1].argmax()) == " Paris"
    assert names["tokenizer"].decode(model(names["CORRUPTED"]).logits[0, -1].argmax()) == " Berlin"


def patched_by_hand(names: Names, layer: int, position: int) -> Tensor:
    """Effect of a patch by PyTorch's own hooks."""
    block, states = names["model"].model.layers[layer], []

    def keep(_module: Any, _args: Any, output: Tensor) -> None:
        states.append(output.clone())

    def put(_module: Any, _args: Any, output: Tensor) -> None:
        output[:, position] = states[0][:, position]

    score = names["score"]
    with torch.no_grad():
        handle = block.register_forward_hook(keep)
        high = score(names["CLEAN"])
        handle.remove()
        low = score(names["CORRUPTED"])
        handle = block.register_forward_hook(put)
        moved = score(names["CORRUPTED"])
        handle.remove()
    return ((moved - low) / (high - low))[0]


def attribution_patching(names: Names) -> None:
    estimate, effects, model = names["estimate"], names["effects"], names["model"]
    assert estimate.shape == effects.shape == (31, 5)
    assert torch.equal(estimate.argmax(-1), effects.argmax(-1))
    for layer, position in ((10, 3), (23, 4)):
        expected = patched_by_hand(names, layer, position)
        torch.testing.assert_close(effects[layer + 1, position], expected, atol=1e-4, rtol=0)
    # A small step along the change agrees with the gradient.
    clean, corrupted, low = names["clean"], names["corrupted"], names["low"]
    name, step = "@resid_post.25", 1e-2
    change = step * (clean[name] - corrupted[name]).detach()
    block = model.model.layers[25]
    handle = block.register_forward_hook(lambda _module, _args, output: output + change)
    with torch.no_grad():
        moved = names["score"](names["CORRUPTED"]) - low
    handle.remove()
    total = estimate[26].sum() * (names["high"] - low) * step
    torch.testing.assert_close(moved, total.detach(), rtol=0.05, atol=0)


def logit_lens(names: Names) -> None:
    model, ids, decode = names["model"], names["ids"], names["tokenizer"].decode
    states: list[Tensor] = []
    handles = [
        block.register_forward_hook(lambda _module, _args, output: states.append(output))
        for block in model.model.layers[20:]
    ]
    logits = model(ids).logits
    for handle in handles:
        handle.remove()
    assert torch.equal(torch.stack(states), names["acts"].stack())
    read = torch.stack([model.lm_head(model.model.norm(state))[0] for state in states])
    assert torch.equal(read[-1], logits[0])
    words = [[decode(token) for token in line] for line in read.argmax(-1)]
    assert [line[-1] for line in words[6:]] == [" same", *3 * [" west"]]
    assert not any(line[-1].strip().isalpha() for line in words[:6])
    assert [line[names["ids"].shape[1] - 3] for line in words] == 10 * [" in"]
    drawn = [text.get_text() for text in names["ax"].texts]
    assert drawn == [word for line in words for word in line]


def attention(names: Names) -> None:
    patterns = names["patterns"]
    returned = eager_patterns(names["model"], names["ids"])
    torch.testing.assert_close(patterns, returned, rtol=1e-4, atol=1e-5)
    assert names["tokens"][:6] == names["tokens"][6:]
    for look, offset in (
        ("token before", -1),
        ("earlier copy", -6),
        ("token after earlier copy", -5),
    ):
        weights = [
            sum(float(head[query, query + offset]) for query in range(6, 12))
            for block in returned
            for head in block
        ]
        assert divmod(weights.index(max(weights)), 9) == names["found"][look]
    first = returned[:, :, 1:, 0].mean(-1)
    assert (first > 0.5).float().mean() > 0.5  # most heads rest at the first token


def eager_patterns(model: Any, ids: Tensor) -> Tensor:
    """Weights that transformers' slowest attention returns, by block and head."""
    model.set_attn_implementation("eager")
    found: list[Tensor] = []
    handles = [
        block.self_attn.register_forward_hook(lambda _module, _args, out: found.append(out[1][0]))
        for block in model.model.layers
    ]
    model(ids)
    for handle in handles:
        handle.remove()
    return torch.stack(found)


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


def features(names: Names) -> None:
    model, ids, grid = names["model"], names["ids"], names["grid"]
    block, states = model.model.layers[15], []
    handle = block.register_forward_hook(lambda _module, _args, out: states.append(out[0]))
    plain = model(**ids).logits
    handle.remove()
    # The trained weights on centred rows.
    values = (states[0] - names["mean"]) / names["scale"] @ names["encoder"].detach()
    values = values.relu().where(values == values.max(-1, keepdim=True).values, 0.0)
    torch.testing.assert_close(grid.T, values[1:, names["index"]], rtol=1e-4, atol=1e-5)
    assert [names["words"][each] for each in grid.argmax(-1)] == ["beach", "soup", "violin"]
    # The last change by hand: a row of the decoder at all tokens but the first.
    row = 0.5 * names["scale"] * names["decoder"].detach()[names["feature"]["space"]]
    column = torch.ones(len(states[0]), 1)
    column[0] = 0
    handle = block.register_forward_hook(lambda _module, _args, out: out + column * row)
    expected = model(**ids).logits
    handle.remove()
    with fh.Plan(fh.on(names["LAYER"], names["change"], at=slice(1, None))).open(model):
        torch.testing.assert_close(model(**ids).logits, expected, rtol=1e-4, atol=1e-3)
    assert (expected - plain).abs().max() > 1


def routing(names: Names) -> None:
    policy, ids, array = (names[name] for name in ("policy", "ids", "array"))
    # The loss of the policy whose experts are called by hand.
    handles = [
        policy.model.layers[block].mlp.experts.register_forward_pre_hook(
            lambda _module, args, block=block: (args[0], forced(args[1], block), *args[2:])
        )
        for block in range(3)
    ]

    def forced(own: Tensor, block: int) -> Tensor:
        return torch.cat([array[:, block].to(own.dtype), own[-1:]])

    weights = {
        block: policy.model.layers[block].mlp.gate.register_forward_hook(
            lambda _module, _args, out, block=block: reweighed(out, block)
        )
        for block in range(3)
    }

    def reweighed(out: tuple[Tensor, ...], block: int) -> tuple[Tensor, ...]:
        logits, _, own = out
        scores = logits.softmax(-1).gather(-1, forced(own, block))
        return logits, scores / scores.sum(-1, keepdim=True), own

    loss = policy(ids, labels=ids).loss
    for handle in [*handles, *weights.values()]:
        handle.remove()
    assert torch.equal(loss, names["loss"])
    with torch.no_grad():
        assert not torch.equal(policy(ids, labels=ids).loss, loss)


CHECKS: dict[str, Callable[[Names], None]] = {
    "cache": cache,
    "steer": steer,
    "steer-generation": steer_generation,
    "steer-only-when": steer_only_when,
    "stop-when": stop_when,
    "features": features,
    "routing": routing,
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

"""Captures at positions over the calls of a request, put together by sequence and position."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ferrohook as fh
from support.language_models import LAYERS, language_model

transformers = pytest.importorskip("transformers")

WIDTH = 8
NEW = 4
IDS = torch.tensor([[0, 0, 5, 6, 7], [1, 2, 3, 4, 8]])
MASK = (IDS > 0).long()
LENGTHS = MASK.sum(1).tolist()
NAME = f"{LAYERS['llama']}.0.mlp"
ATS: dict[str, tuple[Any, Any]] = {
    "generated": ("generated", lambda p, n: p >= n),
    "prompt": ("prompt", lambda p, n: p < n),
    "last_prompt": ("last_prompt", lambda p, n: p == n - 1),
    "slice": (slice(1, 6), lambda p, n: 1 <= p < 6),
    "all": (slice(0, None), lambda p, n: p >= 0),
    "function": (lambda p: p % 2 == 1, lambda p, n: p % 2 == 1),
}
ats = pytest.mark.parametrize(("at", "by_hand"), ATS.values(), ids=ATS)


@pytest.fixture(scope="module")
def model() -> Any:
    return language_model("llama", WIDTH)


def generate(model: Any, ids: Tensor, mask: Tensor, **options: Any) -> Tensor:
    return model.generate(  # type: ignore[no-any-return]
        ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, **options
    )


def alone(model: Any, text: Tensor, padding: int) -> Tensor:
    """The layer's output for all tokens of one text but the last, which never ran."""
    found: list[Tensor] = []
    handle = model.get_submodule(NAME).register_forward_hook(lambda *call: found.append(call[2]))
    with torch.no_grad():
        model(text[None, padding:-1])
    handle.remove()
    return found[0][0]


def expected(model: Any, texts: Tensor, lengths: list[int], by_hand: Any) -> tuple[Tensor, Any]:
    """Rows of the tokens of each sequence, one after the other, and their positions."""
    rows, positions = [], []
    for text, length in zip(texts, lengths, strict=True):
        padding = texts.shape[1] - NEW - length
        own = alone(model, text, padding)
        chosen = [each for each in range(len(own)) if by_hand(each, length)]
        rows.append(own[chosen])
        positions += chosen
    return torch.cat(rows), positions


def check(
    request: fh.typing.Request, model: Any, texts: Tensor, lengths: list[int], by_hand: Any
) -> None:
    right, positions = expected(model, texts, lengths, by_hand)
    assert request.acts.positions(NAME) == positions
    assert torch.allclose(request.acts[NAME], right, atol=1e-5)
    (row,) = request.acts.rows()
    assert row.shape == str(tuple(right.shape))


@ats
@pytest.mark.parametrize(
    "options",
    [{}, {"use_cache": False}, {"prefill_chunk_size": 2}, {"prompt_lookup_num_tokens": 3}],
    ids=str,
)
@pytest.mark.parametrize("prompts", [1, 2])
@pytest.mark.parametrize("read", [False, True])
def test_a_request_that_generates_has_the_tokens_of_all_steps(  # noqa: PLR0913, PLR0917 (drawn arguments)
    model: Any, at: Any, by_hand: Any, options: dict[str, Any], prompts: int, read: bool
) -> None:
    if prompts > 1 and "prompt_lookup_num_tokens" in options:
        pytest.skip("transformers drafts for one prompt")
    ids, mask = IDS[-prompts:], MASK[-prompts:]
    seen: list[int] = []

    def look(*_call: object) -> None:
        if read and NAME in request.acts:
            seen.append(len(request.acts[NAME]))

    handle = model.register_forward_hook(look)
    with fh.Plan(fh.keep(NAME, at=at)).prepare(model) as prepared:
        with prepared.open() as request:
            texts = generate(model, ids, mask, **options)
        handle.remove()
        check(request, model, texts, LENGTHS[-prompts:], by_hand)
        assert seen == sorted(seen)
        if prompts == 1:  # as in `generating`
            member = prepared.open()
            with fh.rows.generating([member]):
                generate(model, ids, mask, **options)
            assert member.acts.positions(NAME) == request.acts.positions(NAME)
            assert torch.equal(member.acts[NAME], request.acts[NAME])


def test_many_calls_are_put_together_once(model: Any) -> None:
    with fh.Plan(fh.keep(NAME, at="generated")).prepare(model) as prepared:
        with prepared.open() as request:
            generate(model, IDS, MASK)
        first = request.acts[NAME]
        assert request.acts[NAME].data_ptr() == first.data_ptr()


@pytest.mark.parametrize("read", [False, True])
def test_another_generation_takes_the_place_of_the_last_one(model: Any, read: bool) -> None:
    with fh.Plan(fh.keep(NAME, at="generated")).prepare(model) as prepared:
        with prepared.open() as request:
            generate(model, IDS, MASK)
            if read:  # puts its calls together, which are counted all the same
                assert len(request.acts[NAME]) == 2 * (NEW - 1)
            texts = generate(model, IDS[1:], MASK[1:])
            check(request, model, texts, LENGTHS[1:], ATS["generated"][1])
        assert "last 3 of 6" in str(request.acts)  # the prompts have no such tokens


def test_sequences_that_take_turns_do_not_mix(model: Any) -> None:
    named = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    caches = [transformers.DynamicCache(config=model.config) for _ in range(2)]
    texts = [torch.tensor([[1, 2, 3, 4, 5, 6]]), torch.tensor([[7, 8, 9, 10, 11, 12]])]
    right = alone(model, torch.cat([texts[1][0], torch.zeros(1, dtype=torch.long)]), 0)
    plan = fh.Plan(fh.keep(NAME, at=slice(0, None)))
    with plan.prepare(model) as prepared, prepared.open() as request, torch.no_grad():
        for start, end in ((0, 3), (3, 4), (4, 6)):
            for text, cache in zip(texts, caches, strict=True):
                model(text[:, start:end], **{named: cache})
        assert request.acts.positions(NAME) == [4, 5]
        assert torch.allclose(request.acts[NAME], right[4:], atol=1e-5)
        model(texts[0][:, 5:6], **{named: caches[1]})
        assert request.acts.positions(NAME) == [4, 5, 6]
        model(texts[0][:, 5:6], **{named: caches[0]})
        assert request.acts.positions(NAME) == [6]


def test_rows_of_beams_are_those_of_the_last_step(model: Any) -> None:
    with fh.Plan(fh.keep(NAME, at="generated")).prepare(model) as prepared:
        with prepared.open() as request:
            generate(model, IDS, MASK, num_beams=2)
        assert request.acts[NAME].shape == (4, WIDTH)
        assert "last of 3" in str(request.acts)


def test_what_a_generation_without_a_cache_keeps_is_within_its_budget(model: Any) -> None:
    tokens = IDS.shape[1] + NEW - 1
    plan = fh.Plan(fh.keep(NAME, at=slice(0, None)))
    with plan.prepare(model, max_bytes=4 * WIDTH * tokens) as prepared:
        with prepared.open() as request:
            generate(model, IDS[1:], MASK[1:], use_cache=False)
        assert len(request.acts[NAME]) == tokens
        member = prepared.open()
        with fh.rows.generating([member]):
            generate(model, IDS[1:], MASK[1:], use_cache=False)
        assert member.error is None
        assert len(member.acts[NAME]) == tokens


def test_all_calls_are_read_one_by_one(model: Any) -> None:
    plan = fh.Plan(fh.keep(NAME, at="generated", calls="all"))
    with plan.prepare(model) as prepared, prepared.open() as request:
        texts = generate(model, IDS, MASK)
    right, _ = expected(model, texts, LENGTHS, ATS["generated"][1])
    assert [tuple(each.shape) for each in request.acts[NAME]] == [(2, WIDTH)] * (NEW - 1)
    together = torch.stack([*request.acts[NAME]], 1).flatten(0, 1)
    assert torch.allclose(together, right, atol=1e-5)


class _Parts(nn.Module):
    def forward(self, x: Tensor) -> Any:
        if len(x) > 1:
            return {"a": x, "b": -x}
        return {"b": -x, "a": x} if x[0, 0] else (x,)


@pytest.mark.parametrize("last", [0.0, 1.0])
def test_calls_with_tensors_at_other_places_are_not_joined(last: float) -> None:
    model, x = nn.Sequential(_Parts()), torch.ones(4, 2)
    x[3] = last
    with fh.Plan(fh.keep("0")).prepare(model) as prepared:
        request = prepared.open()
        for part, at in ((x[:3], [0, 1, 2]), (x[3:], [3])):
            with fh.batch({request: slice(0, len(part))}, positions=torch.tensor(at)):
                model(part)
    with pytest.raises(fh.HookError, match="different places"):
        request.acts["0"]

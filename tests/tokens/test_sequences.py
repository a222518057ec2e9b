"""Ends of prompts and positions of tokens, in calls of every kind.

The oracle finds the positions of captured rows by comparing them with the hidden states that
transformers returns for the whole text, or computes them from the arguments of the call.
"""

from __future__ import annotations

import contextvars
import copy
import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

import ferrohook as fh
from support.language_models import LAYERS, encoder_decoder_model, language_model, random_llama

if TYPE_CHECKING:
    from collections.abc import Callable

transformers = pytest.importorskip("transformers")
# Names of arguments that older versions have, and what peft uses.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

WIDTH = 16
LAYER = "model.layers.0"
NEW = 5
GREEDY = {"max_new_tokens": NEW, "do_sample": False}
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
}


def llama(seed: int = 0) -> Any:
    return random_llama(WIDTH, seed)


@pytest.fixture(scope="module")
def model() -> Any:
    return llama()


def prompt(length: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 32, (1, length), generator=generator)


def rows_of(request: fh.typing.Request, name: str = LAYER) -> list[Tensor]:
    """The rows of each call."""
    return [*request.acts[name]] if name in request.acts else []


def found_in(model: Any, text: Tensor, calls: list[Tensor]) -> list[list[int]]:
    """Positions of captured rows, found by comparing them with rows of the whole text."""
    states = model.model(text, output_hidden_states=True).hidden_states[1][0]
    return [
        [int((states - row).abs().amax(-1).argmin()) for row in call.reshape(-1, call.shape[-1])]
        for call in calls
    ]


def flat(calls: list[list[int]]) -> list[int]:
    return [position for call in calls for position in call]


def kept(model: Any, at: Any, call: Callable[[], Any], **opened: Any) -> tuple[Any, list[Tensor]]:
    plan = fh.Plan(fh.keep(LAYER, at=at, calls="all", copy="clone"))
    with plan.prepare(model) as prepared, prepared.open(**opened) as request:
        result = call()
    return result, rows_of(request)


quiet = pytest.mark.filterwarnings("ignore::ferrohook.errors.NeverFiredWarning")


@quiet
@pytest.mark.parametrize("chunk", [1, 4, 11])
@pytest.mark.parametrize(
    ("at", "right"),
    [
        ("prompt", [*range(11)]),
        ("last_prompt", [10]),
        (-2, [9]),
        ("generated", [*range(11, 11 + NEW - 1)]),
        (slice(-3, None), [*range(8, 11 + NEW - 1)]),
    ],
    ids=str,
)
def test_chunks_of_a_prompt(model: Any, at: Any, right: list[int], chunk: int) -> None:
    ids = prompt(11)
    text, calls = kept(model, at, lambda: model.generate(ids, prefill_chunk_size=chunk, **GREEDY))
    assert flat(found_in(model, text, calls)) == right


DRAFTS: dict[str, Callable[[], dict[str, Any]]] = {
    "prompt lookup": lambda: {"prompt_lookup_num_tokens": 3},
    "an assistant of the same class": lambda: {"assistant_model": llama(7)},
    "the model assists itself by its first layer": lambda: {"assistant_early_exit": 1},
}


@quiet
@pytest.mark.parametrize("drafts", DRAFTS.values(), ids=DRAFTS)
def test_drafts_are_no_part_of_the_prompt(model: Any, drafts: Callable[[], Any]) -> None:
    ids = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6]])
    generate = lambda: model.generate(ids, **GREEDY, **drafts())  # noqa: E731
    text, calls = kept(model, "prompt", generate)
    assert torch.equal(text, model.generate(ids, **GREEDY))
    assert flat(found_in(model, text, calls)) == [*range(10)]
    _, last = kept(model, "last_prompt", generate)
    assert {tuple(each) for each in found_in(model, text, last)} == {(9,)}
    _, new = kept(model, "generated", generate)
    ran = {position for call in found_in(model, text, new) for position in call}
    assert ran >= {*range(10, 10 + NEW - 1)}


@quiet
@pytest.mark.parametrize(
    "drafts", [{}, {"assistant_early_exit": 1}, {"prompt_lookup_num_tokens": 3}]
)
@pytest.mark.parametrize("ends", [None, 1])
def test_rows_of_a_model_that_drafts_for_itself_are_those_of_its_text(
    model: Any, drafts: dict[str, Any], ends: int | None
) -> None:
    ids = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6]])
    eos = {} if ends is None else {"eos_token_id": int(model.generate(ids, **GREEDY)[0, 10 + ends])}
    norm = "model.norm"  # the draft model runs it after its few layers
    entries = [
        fh.keep([LAYER, norm], at=at, label=label, copy="clone")
        for label, at in (("new", "generated"), ("all", slice(None)), ("one", 10))
    ]
    entries += [fh.gate("g", norm, fh.Norm()), fh.keep("@gate.g")]
    with fh.Plan(*entries).prepare(model) as prepared, prepared.open() as request:
        options: dict[str, Any] = {**GREEDY, **eos, **(drafts or {"assistant_model": model})}
        text = model.generate(ids, **options)
    ran = text.shape[1] - 1
    states = model.model(text, output_hidden_states=True, use_cache=False).hidden_states
    for label, right in (("new", range(10, ran)), ("all", range(ran)), ("one", [10])):
        for name, expected in ((LAYER, states[1]), (norm, states[-1])):
            assert request.acts.positions(f"{label}:{name}") == [*right]
            torch.testing.assert_close(request.acts[f"{label}:{name}"], expected[0, [*right]])
    assert request.acts.positions("@gate.g") == [*range(ran)]
    torch.testing.assert_close(request.acts["@gate.g"], states[-1][0, :ran].norm(dim=-1))


def test_the_prompt_of_an_assistant_is_that_of_the_model_it_assists(model: Any) -> None:
    assistant, ids = llama(7), prompt(6)
    text, calls = kept(
        assistant, "prompt", lambda: model.generate(ids, assistant_model=assistant, **GREEDY)
    )
    # It generates several times, each time after the tokens accepted so far.
    assert {*flat(found_in(assistant, text, calls))} == {*range(6)}


@pytest.mark.parametrize("cut", [1, 3, 6])
@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.parametrize("generates", [False, True])
def test_what_was_cut_out_of_a_cache_leaves_no_row(
    model: Any, cut: int, length: int, generates: bool
) -> None:
    first, cache = prompt(8), transformers.DynamicCache(config=model.config)
    plan = fh.Plan(fh.keep(LAYER, at=slice(None)))
    with plan.prepare(model) as prepared, prepared.open() as request:
        model(first[:, :5], past_key_values=cache)
        model(first[:, 5:], past_key_values=cache)
        cache.crop(-cut)
        text = torch.cat([first[:, :-cut], prompt(length, seed=9)], 1)
        if generates:
            text = model.generate(text, past_key_values=cache, do_sample=False, max_new_tokens=2)
            text = text[:, :-1]  # the last token has not run
        else:
            model(text[:, 8 - cut :], past_key_values=cache)
    assert request.acts.positions(LAYER) == [*range(text.shape[1])]
    states = model.model(text, output_hidden_states=True, use_cache=False).hidden_states[1]
    torch.testing.assert_close(request.acts[LAYER], states[0])


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("cut", [True, False], ids=["cut back", "filled elsewhere"])
def test_a_padded_cache_of_another_length_needs_a_mask(model: Any, padded: bool, cut: bool) -> None:
    ids = torch.tensor([[0, 0, 7, 8]] if padded else [[5, 6, 7, 8]])
    mask, new = (ids > 0).long(), torch.tensor([[9]])
    cache, found = transformers.DynamicCache(), []

    def at(positions: Tensor) -> Tensor:
        found.append(positions.tolist())
        return positions >= 0

    with fh.Plan(fh.keep(LAYER, at=at)).open(model):
        model(ids, attention_mask=mask, past_key_values=cache)
        if cut:
            cache.crop(-1)
        else:
            call = functools.partial(model, new, past_key_values=cache)
            contextvars.Context().run(call)
        if padded:
            with pytest.raises(fh.HookError, match=r"positions .* not known.* attention_mask"):
                model(new, past_key_values=cache)
            columns = cache.get_seq_length() + 1
            mask = torch.cat([mask, torch.ones_like(mask)], 1)[:, :columns]
            model(new, attention_mask=mask, past_key_values=cache)
        else:
            model(new, past_key_values=cache)
    assert found[-1] == [[(3 if cut else 5) - 2 * padded]]


@pytest.mark.parametrize("at", ["plan", "capture"])
def test_a_cache_that_is_cut_back_takes_no_row_of_another(model: Any, at: str) -> None:
    one, other = (transformers.DynamicCache(config=model.config) for _ in range(2))
    ids = prompt(8)
    plan = fh.Plan(fh.keep(LAYER, at=slice(4, None)))
    opened: Any = plan.open(model) if at == "plan" else fh.capture(model, LAYER, at=slice(4, None))
    with opened as found:
        model(ids[:, :6], past_key_values=one)
        model(ids, past_key_values=other)
        one.crop(-4)
        model(ids[:, :2], past_key_values=one)  # positions 2 and 3, which are not captured
    acts = found.acts if at == "plan" else found
    assert acts.positions(LAYER) == [4, 5, 6, 7]


def test_rows_of_a_cache_that_was_cut_back_at_several_positions_are_of_the_last_call(
    model: Any,
) -> None:
    ids = torch.tensor([[0, 0, 5, 6, 7], [8, 9, 10, 11, 12]])
    mask, cache = (ids > 0).long(), transformers.DynamicCache(config=model.config)
    plan = fh.Plan(fh.keep(LAYER, at=slice(None)))
    with plan.prepare(model) as prepared, prepared.open() as request:
        model(ids, attention_mask=mask, past_key_values=cache)
        cache.crop(-1)
        model(torch.tensor([[3], [4]]), attention_mask=mask, past_key_values=cache)
    assert request.acts.positions(LAYER) == [2, 4]


CHANGES: dict[str, Callable[[Any, Tensor], Any]] = {
    "reordered": lambda cache, rows: cache.reorder_cache(rows),
    "twice": lambda cache, rows: [cache.reorder_cache(rows), cache.reorder_cache(rows)],
    "chosen": lambda cache, rows: cache.batch_select_indices(rows),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("rows", [[1, 0], [1, 1]])
def test_rows_of_a_cache_that_was_reordered_by_hand_are_other_sequences(
    model: Any, change: str, rows: list[int]
) -> None:
    """A beam search by hand does so, without a mask."""
    ids, new = torch.cat([prompt(4), prompt(4, seed=2)]), torch.tensor([[5], [6]])
    order, cache = torch.tensor(rows), transformers.DynamicCache(config=model.config)
    plan = fh.Plan(fh.keep(LAYER, at=slice(None)), fh.keep(LAYER, at="generated", label="new"))
    with plan.prepare(model) as prepared, prepared.open() as request:
        model(ids, past_key_values=cache)
        model(new, past_key_values=cache)
        CHANGES[change](cache, order)
        model(new, past_key_values=cache)
    of = order[order] if change == "twice" else order
    text = torch.cat([torch.cat([ids, new], 1)[of], new], 1)
    states = model.model(text, output_hidden_states=True, use_cache=False).hidden_states[1]
    for name in (LAYER, f"new:{LAYER}"):
        assert request.acts.positions(name) == [5, 5]
        torch.testing.assert_close(request.acts[name], states[:, 5])


def test_reordered_rows_with_other_padding_need_a_mask(model: Any) -> None:
    ids = torch.tensor([[0, 0, 5, 6, 7], [8, 9, 10, 11, 12]])
    mask, new = (ids > 0).long(), torch.tensor([[3], [4]])
    order, plan = torch.tensor([1, 0]), fh.Plan(fh.keep(LAYER, at=slice(None)))
    for given in (None, torch.cat([mask[order], mask.new_ones(2, 1)], 1)):
        cache = transformers.DynamicCache(config=model.config)
        with plan.prepare(model) as prepared, prepared.open() as request:
            model(ids, attention_mask=mask, past_key_values=cache)
            cache.reorder_cache(order)
            if given is None:
                with pytest.raises(fh.HookError, match="Pass an attention_mask"):
                    model(new, past_key_values=cache)
            else:
                model(new, attention_mask=given, past_key_values=cache)
                assert request.acts.positions(LAYER) == [5, 3]


def test_reordered_states_of_a_state_space_model_need_a_mask() -> None:
    config = transformers.MambaConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=2, state_size=4
    )
    mamba = transformers.MambaForCausalLM(config).eval()
    ids, new = torch.tensor([[0, 0, 5, 6, 7], [8, 9, 10, 11, 12]]), torch.tensor([[3], [4]])
    name = "backbone.layers.1"
    plan = fh.Plan(fh.keep(name, at="generated"))
    for reorders in (False, True):
        cache = transformers.DynamicCache(config=config)
        with torch.no_grad(), plan.prepare(mamba) as prepared, prepared.open() as request:
            mamba(ids, attention_mask=(ids > 0).long(), cache=cache)
            mamba(new, cache=cache)
            assert request.acts.positions(name) == [3, 5]
            if reorders:
                cache.reorder_cache(torch.tensor([1, 0]))
                with pytest.raises(fh.HookError, match="Pass an attention_mask"):
                    mamba(new, cache=cache)
            else:
                mamba(new, cache=cache)
                assert request.acts.positions(name) == [3, 4, 5, 6]


def test_a_cached_prefix_copied_for_several_prompts(model: Any) -> None:
    prefix, cache = prompt(4), transformers.DynamicCache(config=model.config)
    model(prefix, past_key_values=cache)
    plan = fh.Plan(fh.keep(LAYER, at="generated", calls="all"))
    with plan.prepare(model) as prepared, prepared.open() as request:
        for length in (3, 5, 1):
            before = len(rows_of(request))
            ids = torch.cat([prefix, prompt(length, seed=length)], 1)
            text = model.generate(ids, past_key_values=copy.deepcopy(cache), **GREEDY)
            got = found_in(model, text, rows_of(request)[before:])
            assert flat(got) == [*range(4 + length, 4 + length + NEW - 1)]


@pytest.mark.parametrize("whole", [True, False])
def test_a_second_turn_behind_a_cache(model: Any, whole: bool) -> None:
    cache = transformers.DynamicCache(config=model.config)
    plan = fh.Plan(fh.keep(LAYER, at="generated", calls="all"))
    with plan.prepare(model) as prepared, prepared.open() as request:
        text = model.generate(prompt(4), past_key_values=cache, **GREEDY)
        before = len(rows_of(request))
        chat = torch.cat([text, prompt(3, seed=2)], 1)
        new = chat if whole else chat[:, cache.get_seq_length() :]
        mask = torch.ones_like(chat)
        model.generate(new, attention_mask=mask, past_key_values=cache, **GREEDY)
    assert [len(each) for each in rows_of(request)[before:]] == [1] * (NEW - 1)


def test_a_padded_second_turn(model: Any) -> None:
    ids = torch.cat([torch.tensor([[0, 0]]), prompt(3)], 1)
    ids = torch.cat([ids, prompt(5, seed=3)])
    mask = (ids > 0).long()
    cache = transformers.DynamicCache(config=model.config)
    text = model.generate(ids, attention_mask=mask, past_key_values=cache, **GREEDY)
    more = torch.cat([text, prompt(3, seed=2).expand(2, 3)], 1)
    mask = torch.cat([mask, torch.ones(2, NEW + 3, dtype=torch.long)], 1)
    _, calls = kept(
        model,
        "last_prompt",
        lambda: model.generate(more, attention_mask=mask, past_key_values=cache, **GREEDY),
    )
    (last,) = calls
    for row, states in enumerate(last):
        alone = model.model(more[row][mask[row] > 0][None], output_hidden_states=True)
        torch.testing.assert_close(states, alone.hidden_states[1][0, -1], rtol=1e-4, atol=1e-4)


def test_texts_that_grow_are_prompts_each(model: Any) -> None:
    text = prompt(7)
    plan = fh.Plan(fh.keep(LAYER, at="last_prompt", calls="all"))
    with plan.prepare(model) as prepared, prepared.open() as request:
        for length in (2, 4, 7, 3):
            model(text[:, :length], use_cache=False)
    assert flat(found_in(model, text, rows_of(request))) == [1, 3, 6, 2]


@pytest.mark.parametrize("passed", [True, False], ids=["a cache passed", "a cache returned"])
def test_steps_by_hand_go_on_from_the_first_call(model: Any, passed: bool) -> None:
    ids, other = prompt(4), prompt(9, seed=5)
    plan = fh.Plan(fh.keep(LAYER, at="generated", calls="all"))
    with plan.prepare(model) as prepared, prepared.open() as request:
        cache = transformers.DynamicCache(config=model.config) if passed else None
        cache = model(ids, past_key_values=cache).past_key_values
        model(other)  # another sequence
        model(other[:, :1], past_key_values=cache)
        model(other[:, 1:3], past_key_values=cache)
    text = torch.cat([ids, other[:, :3]], 1)
    assert found_in(model, text, rows_of(request)) == [[4], [5, 6]]


REFUSED: dict[str, Callable[[Any, Any], Any]] = {
    "filled outside of the request": lambda model, cache: None,
    "copied": lambda model, cache: copy.deepcopy(cache),
    "cut back into its prompt": lambda model, cache: cache.crop(-2),
}


@quiet
@pytest.mark.parametrize("case", REFUSED)
def test_a_prompt_that_nobody_tells_is_refused_and_can_be_told(model: Any, case: str) -> None:
    plan = fh.Plan(fh.keep(LAYER, at="generated", calls="all"), fh.keep(LAYER, at=4, label="4"))
    ids, more = prompt(4), prompt(3, seed=2)
    with plan.prepare(model) as prepared:
        for told in (False, True):
            cache = transformers.DynamicCache(config=model.config)
            if case == "filled outside of the request":
                model(ids, past_key_values=cache)
            with prepared.open(prompt=5 if told else None) as request:
                if case != "filled outside of the request":
                    model(ids, past_key_values=cache)
                cache = REFUSED[case](model, cache) or cache
                start = cache.get_seq_length()
                if told:
                    model(more, past_key_values=cache)
                    text = torch.cat([ids[:, :start], more], 1)
                    got = found_in(model, text, rows_of(request))
                    assert flat(got) == [each for each in range(start, start + 3) if each >= 5]
                else:
                    with pytest.raises(fh.HookError, match=r"'generated'.*open\(prompt="):
                        model(more, past_key_values=cache)


def test_after_generate_nobody_tells(model: Any) -> None:
    cache = transformers.DynamicCache(config=model.config)
    plan = fh.Plan(fh.keep(LAYER, at="generated"))
    with plan.prepare(model) as prepared, prepared.open():
        model.generate(prompt(4), past_key_values=cache, **GREEDY)
        with pytest.raises(fh.HookError, match=r"open\(prompt="):
            model(prompt(2), past_key_values=cache)


def test_absolute_positions_need_no_prompt(model: Any) -> None:
    cache = transformers.DynamicCache(config=model.config)
    ids, more = prompt(4), prompt(3, seed=2)
    model(ids, past_key_values=cache)
    for at, right in ((5, [5]), (slice(3, 6), [4, 5]), (lambda places: places > 5, [6])):
        _, calls = kept(model, at, lambda: model(more, past_key_values=copy.deepcopy(cache)))
        assert found_in(model, torch.cat([ids, more], 1), calls) == [right]


def test_a_length_for_each_row(model: Any) -> None:
    ids = torch.cat([prompt(6), prompt(6, seed=2)])
    _, calls = kept(model, "last_prompt", lambda: model(ids), prompt=[2, 5])
    assert [found_in(model, ids[row : row + 1], [calls[0][row]]) for row in (0, 1)] == [
        [[1]],
        [[4]],
    ]
    with pytest.raises(fh.HookError, match="3 lengths for a call of 2 rows"):
        kept(model, "last_prompt", lambda: model(ids), prompt=[2, 5, 1])


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (0, ValueError, "1 to 9"),
        (2**70, ValueError, "1 to 9"),
        ([], ValueError, "1 to 9"),
        ([3, -1], ValueError, "1 to 9"),
        (True, fh.HookTypeError, "bool"),
        (2.0, fh.HookTypeError, "float"),
        ("3", fh.HookTypeError, "str"),
        ([1.5], fh.HookTypeError, "float"),
        (torch.ones(2), fh.HookTypeError, "float"),
    ],
    ids=str,
)
def test_bad_lengths_are_refused(model: Any, given: Any, error: Any, message: str) -> None:
    with fh.Plan(fh.keep(LAYER)).prepare(model) as prepared, pytest.raises(error, match=message):
        prepared.open(prompt=given)


def test_lengths_told_as_it_is_opened_hold_in_a_batch(model: Any) -> None:
    ids = prompt(5)
    plan = fh.Plan(fh.keep(LAYER, at="last_prompt"))
    with plan.prepare(model) as prepared:
        request = prepared.open(prompt=3)
        with fh.batch({request: 0}, positions=torch.arange(5)[None]):
            model(ids)
        assert request.acts.positions(LAYER) == [2]


@pytest.mark.parametrize(
    "options", [{"num_beams": 3}, {"num_return_sequences": 2, "do_sample": True}], ids=str
)
def test_rows_of_beams_have_their_prompts(model: Any, options: dict[str, Any]) -> None:
    ids = torch.tensor([[0, 0, 7, 8, 9], [5, 6, 7, 8, 9]])
    given = {**GREEDY, **options, "attention_mask": (ids > 0).long()}
    _, calls = kept(model, "prompt", lambda: model.generate(ids, **given))
    (first,) = calls
    assert len(first) == (3 + 5) * (3 if "num_beams" in options else 2)
    _, calls = kept(model, "generated", lambda: model.generate(ids, **given))
    assert len(calls) == NEW - 1


def test_embeddings_in_generate(model: Any) -> None:
    embeds = model.get_input_embeddings()(prompt(6))
    _, calls = kept(model, "generated", lambda: model.generate(inputs_embeds=embeds, **GREEDY))
    assert [len(each) for each in calls] == [1] * (NEW - 1)
    _, calls = kept(model, "prompt", lambda: model.generate(inputs_embeds=embeds, **GREEDY))
    assert [len(each) for each in calls] == [6]


def test_a_model_that_a_logits_processor_calls_is_not_what_generates(model: Any) -> None:
    ids, other = prompt(4), prompt(9, seed=4)

    class Asks(transformers.LogitsProcessor):  # type: ignore[misc, name-defined]
        def __call__(self, _ids: Tensor, scores: Tensor) -> Tensor:
            model(other, use_cache=False)
            return scores

    _, calls = kept(
        model,
        "prompt",
        lambda: model.generate(ids, logits_processor=[Asks()], **GREEDY),
    )
    assert [len(each) for each in calls] == [4] + [9] * NEW


@quiet
def test_attention_masks_that_tell_nothing_are_refused(model: Any) -> None:
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool).tril()
    with pytest.raises(fh.HookError, match="attention_mask do not show"):
        kept(model, 2, lambda: model(prompt(4), attention_mask=mask))
    places = torch.arange(4)[None]
    _, calls = kept(model, 2, lambda: model(prompt(4), attention_mask=mask, position_ids=places))
    assert found_in(model, prompt(4), calls) == [[2]]


@quiet
def test_any_number_but_0_in_a_mask_is_a_token(model: Any) -> None:
    mask = torch.tensor([[0, 0, 2, 255]])
    calls = {
        2: lambda: model(prompt(4), attention_mask=mask),
        2 + NEW - 1: lambda: model.generate(prompt(4), attention_mask=mask, **GREEDY),
    }
    plan = fh.Plan(fh.keep(LAYER, at=slice(0, None)), fh.keep(LAYER, at=-1, label="last"))
    for tokens, call in calls.items():
        with plan.open(model) as request:
            call()
        assert request.acts.positions(LAYER) == [*range(tokens)]
        assert request.acts.positions(f"last:{LAYER}") == [1]


@quiet
def test_packed_texts_have_positions_and_no_prompt(model: Any) -> None:
    places = torch.tensor([[0, 1, 2, 0, 1]])
    _, calls = kept(model, 1, lambda: model(prompt(5), position_ids=places, use_cache=False))
    assert [len(each) for each in calls] == [2]
    with pytest.raises(fh.HookError, match="'last_prompt' refer to the prompt"):
        kept(model, "last_prompt", lambda: model(prompt(5), position_ids=places))
    for at in (1, slice(None)):  # as one value of all calls
        with (
            pytest.raises(fh.HookError, match=r"two tokens at position \d of one row"),
            fh.capture(model, "model.layers.0", at=at),
        ):
            model(prompt(5), position_ids=places, use_cache=False)
    gated = fh.Plan(
        fh.gate("g", "model.layers.0", fh.Norm(), at=slice(None), over="so_far"),
        fh.on("model.layers.1", fh.Zero(), when=fh.above("g", 0.0)),
    )
    with pytest.raises(fh.HookError, match=r"gate 'g'.* got two tokens at position 0 of one"):
        fh.run(model, prompt(5), plan=gated, position_ids=places, use_cache=False)


@pytest.mark.parametrize("number", [1, 2])
def test_a_number_of_calls_is_not_joined(model: Any, number: int) -> None:
    with fh.capture(model, "model.layers.0", at="generated", calls=number) as acts:
        model.generate(prompt(4), **GREEDY)
    assert len(acts["model.layers.0"]) == number


def _returns(_module: object, _args: object, output: Tensor) -> Tensor:
    return output * 2


def _writes(_module: object, _args: object, output: Tensor) -> None:
    output[..., :] *= 2


def _writes_and_returns(_module: object, _args: object, output: Tensor) -> Tensor:
    return output.mul_(2)


def _reads(_module: object, _args: object, output: Tensor) -> None:
    output.sum()


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    "options", [{"at": 2}, {"at": "prompt", "strength": 0.5}, {"strength": 0.5}], ids=str
)
def test_hooks_write_at_their_positions_only(
    model: Any, options: dict[str, Any], mode: Any
) -> None:
    """Hooks that return a new tensor, that write to the output, and that do both."""

    def output_with(hook: Any) -> Tensor:
        with mode(), fh.Plan(fh.on("model.embed_tokens", hook, **options)).open(model):
            return model(prompt(5)).logits

    expected = output_with(_returns)
    for hook in (_writes, _writes_and_returns):
        assert torch.equal(output_with(hook), expected)
    with mode():
        assert torch.equal(output_with(_reads), model(prompt(5)).logits)


def state_space(kind: str) -> tuple[Any, str]:
    sizes = {**SMALL, "state_size": 8}
    del sizes["intermediate_size"], sizes["num_attention_heads"]
    torch.manual_seed(0)
    if kind == "mamba2":
        more = {"num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 4}
        return (
            transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**sizes, **more)),
            "backbone.layers.0",
        )
    of = "FalconMamba" if kind == "falcon_mamba" else "Mamba"
    config = getattr(transformers, f"{of}Config")(**sizes)
    return getattr(transformers, f"{of}ForCausalLM")(config), "backbone.layers.0"


def hybrid(kind: str) -> tuple[Any, str]:
    sizes = {**SMALL, "num_key_value_heads": 2}
    torch.manual_seed(0)
    if kind == "recurrent_gemma":
        config = transformers.RecurrentGemmaConfig(
            **sizes, lru_width=32, attention_window_size=8, block_types=["recurrent", "attention"]
        )
        return transformers.RecurrentGemmaForCausalLM(config), "model.layers.0"
    if kind == "lfm2":
        config = transformers.Lfm2Config(**sizes, layer_types=["conv", "full_attention"])
        return transformers.Lfm2ForCausalLM(config), "model.layers.0"
    config = transformers.MistralConfig(**sizes, sliding_window=3)
    return transformers.MistralForCausalLM(config), "model.layers.0"


KINDS = {
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba"), state_space),
    **dict.fromkeys(("recurrent_gemma", "lfm2", "sliding"), hybrid),
}


@pytest.mark.parametrize("kind", KINDS)
def test_models_with_other_caches(kind: str) -> None:
    model, name = KINDS[kind](kind)
    model.eval().requires_grad_(False)
    ids = torch.tensor([[0, 0, 7, 8, 5], [9, 10, 11, 12, 13]])
    options = {"attention_mask": (ids > 0).long(), "max_new_tokens": 4, "do_sample": False}
    counts: dict[Any, list[int]] = {
        "prompt": [3 + 5],
        "last_prompt": [2],
        "generated": [2] * 3,
        6: [1],
    }
    for at, right in counts.items():
        plan = fh.Plan(fh.keep(name, at=at, calls="all"))
        with plan.prepare(model) as prepared, prepared.open() as request:
            model.generate(ids, **options)
        assert [len(each) for each in request.acts[name]] == right
    plan = fh.Plan(fh.keep(name))
    with plan.prepare(model) as prepared:
        requests = [prepared.open(), prepared.open()]
        with fh.rows.generating(requests):
            model.generate(ids, **options)
        assert [each.acts.positions(name) for each in requests] == [[*range(6)], [*range(8)]]


@pytest.fixture(scope="module")
def rwkv() -> Any:
    sizes = {**SMALL, "attention_hidden_size": 32, "context_length": 64}
    del sizes["num_attention_heads"]
    torch.manual_seed(0)
    model = transformers.RwkvForCausalLM(transformers.RwkvConfig(**sizes))
    return model.eval().requires_grad_(False)


@quiet
@pytest.mark.parametrize(
    ("at", "right"),
    [("last_prompt", [5]), ("generated", [6, 7, 8, 9]), (slice(None), [*range(10)]), (7, [7])],
)
def test_states_that_are_written_in_place_are_a_sequence(
    rwkv: Any, at: Any, right: list[int]
) -> None:
    name = "rwkv.blocks.1.ln1"
    with fh.Plan(fh.keep(name, at=at)).prepare(rwkv) as prepared, prepared.open() as request:
        text = rwkv.generate(prompt(6), **GREEDY)
    assert request.acts.positions(name) == right
    with fh.capture(rwkv, name) as whole:
        rwkv(text, use_cache=False)
    torch.testing.assert_close(request.acts[name], whole[name][0, right])


def test_a_copy_of_states_that_no_call_returned_is_refused(rwkv: Any) -> None:
    name = "rwkv.blocks.1.ln1"
    plan = fh.Plan(fh.keep(name, at="generated"))
    with plan.prepare(rwkv) as prepared, prepared.open() as request:
        state = rwkv(prompt(5), use_cache=True).state
        rwkv(prompt(1), state=state, use_cache=True)
        assert request.acts.positions(name) == [5]
        with pytest.raises(fh.HookError, match=r"state.* do not show how many tokens came before"):
            rwkv(prompt(1), state=copy.deepcopy(state))


def encoder_decoder(kind: str) -> tuple[Any, str, str, int | None]:
    torch.manual_seed(0)
    if kind == "t5":
        config = transformers.T5Config(
            vocab_size=64,
            d_model=32,
            d_ff=48,
            d_kv=8,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
            eos_token_id=None,
            pad_token_id=1,
        )
        t5 = transformers.T5ForConditionalGeneration(config)
        return t5, "encoder.block.0", "decoder.block.0", 0
    bart = encoder_decoder_model(32, layers=2, heads=4, vocab=64)
    return bart, "model.encoder.layers.0", "model.decoder.layers.0", None


@pytest.mark.parametrize("kind", ["bart", "t5"])
def test_each_stack_has_its_own_positions(kind: str) -> None:
    model, encoder, decoder, part = encoder_decoder(kind)
    model.eval().requires_grad_(False)
    source = torch.tensor([[1, 1, 5, 6, 7]])
    mask = (source > 1).long()
    target = torch.tensor([[2, 9, 10, 11, 12]])  # as long
    options: Any = {"calls": "all", "output_index": part}
    plan = fh.Plan(
        *(
            fh.keep(name, at=at, label=str(at), **options)
            for name in (encoder, decoder, "lm_head")
            for at in ("prompt", "last_prompt", 1)
            if name != "lm_head"
        ),
        fh.keep("lm_head", at=-2, calls="all"),
    )
    with plan.prepare(model) as prepared, prepared.open() as request:
        output = model(
            input_ids=source,
            attention_mask=mask,
            decoder_input_ids=target,
            output_hidden_states=True,
        )
    for name, states, columns in (
        (encoder, output.encoder_hidden_states[1][0], [2, 3, 4]),
        (decoder, output.decoder_hidden_states[1][0], [0, 1, 2, 3, 4]),
    ):
        for at, right in (("prompt", columns), ("last_prompt", columns[-1:]), (1, columns[1:2])):
            assert torch.equal(request.acts[f"{at}:{name}"][0], states[right])
    torch.testing.assert_close(request.acts["lm_head"][0], output.logits[0, [3]])


@pytest.mark.parametrize("kind", ["bart", "t5"])
def test_each_stack_has_its_own_positions_in_generate(kind: str) -> None:
    model, encoder, decoder, part = encoder_decoder(kind)
    model.eval().requires_grad_(False)
    source = torch.tensor([[5, 6, 7, 1, 1], [5, 6, 7, 8, 9]])
    options: Any = {"attention_mask": (source > 1).long(), "max_new_tokens": 3, "do_sample": False}
    keeps: Any = {"calls": "all", "output_index": part}
    plan = fh.Plan(
        fh.keep(encoder, at="prompt", **keeps),
        fh.keep(decoder, at="generated", **keeps),
        fh.keep("lm_head", at="prompt", calls="all"),
    )
    with plan.prepare(model) as prepared, prepared.open() as request:
        model.generate(source, **options)
    rows = {name: [len(each) for each in request.acts[name]] for name in request.acts}
    assert rows == {encoder: [3 + 5], decoder: [2, 2], "lm_head": [2]}
    with fh.Plan(fh.keep([encoder, decoder], output_index=part)).prepare(model) as prepared:
        requests = [prepared.open(), prepared.open()]
        with fh.rows.generating(requests):
            model.generate(source, **options)
    assert [each.acts.positions(encoder) for each in requests] == [[0, 1, 2], [0, 1, 2, 3, 4]]
    assert [each.acts.positions(decoder) for each in requests] == [[0, 1, 2]] * 2


def clip() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes["num_attention_heads"] = 4
    config = transformers.CLIPConfig(
        text_config={"vocab_size": 64, "max_position_embeddings": 16, "eos_token_id": 63, **sizes},
        vision_config={"image_size": 8, "patch_size": 4, **sizes},
        projection_dim=16,
    )
    return transformers.CLIPModel(config).eval().requires_grad_(False)


def test_positions_belong_to_the_tower_of_tokens() -> None:
    model = clip()
    ids = torch.tensor([[5, 6, 7, 8, 63], [5, 6, 63, 0, 0]])  # as many as patches
    images = torch.randn(2, 3, 8, 8)
    name = "text_model.encoder.layers.0"
    plan = fh.Plan(fh.keep(name, at="last_prompt"))
    with plan.prepare(model) as prepared:
        for call in (
            lambda **text: model(pixel_values=images, **text),
            model.get_text_features,
        ):
            with prepared.open() as request, fh.capture(model, name) as acts:
                call(input_ids=ids, attention_mask=(ids > 0).long())
            assert torch.equal(request.acts[name], acts[name][[0, 1], [4, 2]])
    for other, named in (
        ("vision_model.encoder.layers.0", "CLIPVisionModel, which takes pixel_values"),
        ("visual_projection", "also has a CLIPVisionModel"),
    ):
        with pytest.raises(fh.HookError, match=f"entry 0 .*{other}.*{named}"):
            fh.Plan(fh.keep(other, at=0)).prepare(model)


IMAGE = 60
VISION: dict[str, dict[str, Any]] = {
    "Qwen2VL": {"embed_dim": 32, "mlp_ratio": 2},
    "Qwen2_5_VL": {"window_size": 8, "fullatt_block_indexes": [0]},
    "Qwen3VL": {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    "Glm4v": {},
}


@pytest.mark.parametrize("kind", VISION)
def test_positions_of_several_dimensions(kind: str) -> None:
    torch.manual_seed(0)
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 4, "patch_size": 2} | VISION[kind]
    vision |= {"spatial_merge_size": 2, "temporal_patch_size": 1}
    if kind != "Qwen2VL":
        vision |= {"intermediate_size": 48, "out_hidden_size": 32}
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
    text = {**SMALL, "num_key_value_heads": 2, "rope_parameters": rope}
    if kind == "Qwen3VL":
        text["head_dim"] = 8
    config = getattr(transformers, f"{kind}Config")(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=61,
        vision_start_token_id=62,
        vision_end_token_id=63,
    )
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    model.eval().requires_grad_(False)
    name = "model.language_model.layers.0"
    places = torch.arange(4).expand(4, 1, 4)
    with fh.Plan(fh.keep(name, at=-1)).prepare(model) as prepared:
        for rows in (3, 4):
            with prepared.open() as request, fh.capture(model, name) as acts:
                model(input_ids=torch.tensor([[3, 4, 5, 6]]), position_ids=places[:rows])
            assert torch.equal(request.acts[name], acts[name][:, -1])
    ids = torch.tensor([[0, 0, 5, 62, *[IMAGE] * 4, 63, 7], [3, 4, 5, 62, *[IMAGE] * 4, 63, 7]])
    inputs = {
        "attention_mask": (ids > 0).long(),
        "pixel_values": torch.randn(2 * 16, 12),
        "image_grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]]),
        "mm_token_type_ids": (ids == IMAGE).int(),
    }
    plan = fh.Plan(
        fh.keep(name, at="prompt", calls="all", label="p"),
        fh.keep(name, at="generated", calls="all", label="g"),
    )
    with plan.prepare(model) as prepared, prepared.open() as request:
        model.generate(ids, **inputs, max_new_tokens=3, do_sample=False)
    assert [len(each) for each in request.acts[f"p:{name}"]] == [8 + 10]
    assert [len(each) for each in request.acts[f"g:{name}"]] == [2, 2]
    with pytest.raises(fh.HookError, match=r"model\.visual\.blocks\.0"):
        fh.Plan(fh.keep("model.visual.blocks.0", at=0)).prepare(model)


@pytest.mark.parametrize("kind", LAYERS)
def test_a_part_of_the_model_generates(kind: str) -> None:
    model = language_model(kind, WIDTH)
    whole = torch.nn.ModuleDict({"inside": model})
    name = f"inside.{LAYERS[kind]}.0.mlp"
    with fh.Plan(fh.keep(name, at="generated", calls="all")).prepare(whole) as prepared:
        with prepared.open() as request:
            model.generate(prompt(4), **GREEDY)
        assert [len(each) for each in request.acts[name]] == [1] * (NEW - 1)
    # And a plan for a part, as the whole generates.
    part = model.get_submodule(LAYERS[kind].split(".", maxsplit=1)[0])
    inner = f"{LAYERS[kind].split('.', maxsplit=1)[1]}.0.mlp"
    with fh.Plan(fh.keep(inner, at="generated", calls="all")).prepare(part) as prepared:
        with prepared.open() as request:
            model.generate(prompt(4), prefill_chunk_size=3, **GREEDY)
        assert [len(each) for each in request.acts[inner]] == [1] * (NEW - 1)


class TestPeft:
    def adapted(self, **options: Any) -> Any:
        peft: Any = pytest.importorskip("peft")
        config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, **options)
        return peft.get_peft_model(llama(), config).eval()

    @pytest.mark.parametrize("options", [{"task_type": "CAUSAL_LM"}, {}], ids=str)
    @pytest.mark.parametrize("base", [True, False])
    def test_a_plan_for_it_works_in_generate_and_forward(
        self, options: dict[str, Any], base: bool
    ) -> None:
        model = self.adapted(**options)
        target = model.get_base_model() if base else model
        name = LAYER if base else f"base_model.model.{LAYER}"
        ids = torch.cat([prompt(7), prompt(7, seed=2)])
        with fh.Plan(fh.keep(name, at=[-1, 6][base], calls="all")).prepare(target) as prepared:
            with prepared.open() as request:
                model.generate(input_ids=ids, prefill_chunk_size=3, **GREEDY)
                assert [len(each) for each in request.acts[name]] == [2]
            if not base:
                with prepared.open() as request, fh.capture(model, name) as acts:
                    model(input_ids=ids)
                assert torch.equal(request.acts[name][0], acts[name][:, -1])

    @pytest.mark.parametrize("options", [{"task_type": "CAUSAL_LM"}, {}], ids=str)
    def test_its_quantities_are_those_of_its_model(self, options: dict[str, Any]) -> None:
        model, ids = self.adapted(**options), prompt(6)
        _, acts = fh.run(model, input_ids=ids, capture="@resid_post.0")
        states = model(input_ids=ids, output_hidden_states=True).hidden_states
        torch.testing.assert_close(acts["@resid_post.0"], states[1])
        plan = fh.Plan(fh.keep("@resid_post.0", at="generated", calls="all"))
        with plan.prepare(model) as prepared, prepared.open() as request:
            model.generate(input_ids=ids, **GREEDY)
        assert [len(each) for each in request.acts["@resid_post.0"]] == [1] * (NEW - 1)

    @pytest.mark.filterwarnings("ignore:Position ids are not supported")
    def test_tuned_prompts_are_told_or_refused(self) -> None:
        peft: Any = pytest.importorskip("peft")
        config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
        model = peft.get_peft_model(llama(), config).eval()
        name = f"base_model.{LAYER}"
        ids = prompt(4)
        mask = torch.ones_like(ids)

        def generate() -> None:
            model.generate(input_ids=ids, attention_mask=mask, **GREEDY)

        plan = fh.Plan(fh.keep(name, at="last_prompt", calls="all"))
        with plan.prepare(model) as prepared:
            with pytest.raises(fh.HookError, match=r"open\(prompt="), prepared.open():
                generate()
            with prepared.open(prompt=7) as request, fh.capture(model, name, calls="all") as acts:
                generate()
        assert torch.equal(request.acts[name][0], acts[name][0][:, 6])

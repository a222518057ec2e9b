"""`generate` on a padded batch, one request for each prompt, against each prompt alone."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import ferrohook as fh
from ferrohook._core import frames
from support.interrupts import interrupted
from support.language_models import LAYERS, language_model
from support.plans import forward_hook

transformers = pytest.importorskip("transformers")

LENGTHS = (3, 5, 2)
NEW = 6
WIDTH = 16
Prompts = list[Tensor]


def of(kind: str) -> tuple[Any, tuple[str, ...]]:
    """A model of random weights and the names of layers that return the hidden state."""
    model = language_model(kind, WIDTH, initializer_range=0.5)
    layers = LAYERS[kind]
    first = f"{layers}.0" if kind == "llama" else f"{layers}.0.mlp"
    # Exact enough that padding changes no token.
    return model.double(), (first, f"{layers}.1.mlp")


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def pair(request: pytest.FixtureRequest) -> tuple[Any, tuple[str, ...]]:
    return of(request.param)


def prompts() -> Prompts:
    return [torch.arange(1, length + 1) + 5 * row for row, length in enumerate(LENGTHS)]


def padded(some: Prompts) -> dict[str, Tensor]:
    """Token ids and attention mask, padded on the left."""
    longest = max(map(len, some))
    ids = torch.zeros(len(some), longest, dtype=torch.long)
    for row, prompt in enumerate(some):
        ids[row, longest - len(prompt) :] = prompt
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}


def generate(model: Any, some: Prompts, **options: Any) -> Tensor:
    """The new tokens of each prompt."""
    inputs = padded(some)
    given = {"max_new_tokens": NEW, "do_sample": False, **options}
    return model.generate(**inputs, **given)[:, inputs["input_ids"].shape[1] :]  # type: ignore[no-any-return]


CHANGES: tuple[tuple[Any, Any, Any], ...] = (
    # An intervention, its `at`, and a function of (position, length of the prompt).
    (fh.Scale(-2.0), None, lambda p, n: p >= 0),
    (fh.Add(torch.ones(WIDTH), 3.0), "generated", lambda p, n: p >= n),
    (fh.Ablate(torch.arange(WIDTH) - 3.0), "last_prompt", lambda p, n: p == n - 1),
)


class Alone:
    """A prompt generated alone, with hooks by hand that know its positions."""

    def __init__(
        self, model: Any, names: tuple[str, ...], prompt: Tensor, row: int, **options: Any
    ) -> None:
        self.model = copy.deepcopy(model)
        self.use_cache = options.get("use_cache", True)
        self.change, _, self.chosen = CHANGES[row]
        self.length = len(prompt)
        self.seen = 0
        self.kept: dict[str, list[Tensor]] = {name: [] for name in names}
        self.model.get_submodule(names[0]).register_forward_hook(self.hook)
        for name in names:
            self.model.get_submodule(name).register_forward_hook(
                lambda _module, _args, output, name=name: self.kept[name].append(output[0])
            )
        self.tokens = generate(self.model, [prompt], **options)[0]

    def hook(self, _module: Any, _args: Any, output: Tensor) -> Tensor:
        start = self.seen if self.use_cache else 0
        self.seen += output.shape[1]
        positions = torch.arange(start, start + output.shape[1])
        changed = forward_hook(self.change)(None, None, output)
        mask = self.chosen(positions, self.length)
        return torch.where(mask[None, :, None], changed, output)

    def acts(self, name: str) -> Tensor:
        """Activations of all positions."""
        return torch.cat(self.kept[name]) if self.use_cache else self.kept[name][-1]


def opened(model: Any, names: tuple[str, ...], row: int) -> fh.typing.Request:
    change, at, _ = CHANGES[row]
    plan = fh.Plan(fh.on(names[0], change, at=at), fh.keep([*names], copy="clone"))
    return plan.prepare(model).open()


@pytest.mark.parametrize(
    "options", [{}, {"use_cache": False}, {"cache_implementation": "static"}], ids=str
)
def test_each_prompt_gets_what_it_gets_alone(
    pair: tuple[Any, tuple[str, ...]], options: dict[str, Any]
) -> None:
    model, names = pair
    requests = [opened(model, names, row) for row in range(len(LENGTHS))]
    with fh.rows.generating(requests):
        tokens = generate(model, prompts(), **options)
    for row, (request, prompt) in enumerate(zip(requests, prompts(), strict=True)):
        alone = Alone(model, names, prompt, row, **options)
        assert request.error is None
        assert tokens[row].tolist() == alone.tokens.tolist()
        for name in names:
            expected = alone.acts(name)
            assert request.acts.positions(name) == [*range(len(expected))]
            torch.testing.assert_close(request.acts[name], expected, rtol=1e-9, atol=1e-9)
        request.close()


@pytest.mark.parametrize("ends", range(NEW))
def test_a_rejected_draft_leaves_no_row(pair: tuple[Any, tuple[str, ...]], ends: int) -> None:
    model, names = pair
    prompt = [torch.tensor([5, 6, 7, 8, 5, 6, 7, 8])]
    plain = generate(model, prompt)[0]
    eos = int(plain[ends])  # drafts after it are rejected
    for options in ({"prompt_lookup_num_tokens": 4}, {"assistant_model": model}):
        request = fh.Plan(fh.keep(names[0])).prepare(model).open()
        with fh.rows.generating([request]):
            new = generate(model, prompt, eos_token_id=eos, **options)[0]
        assert new.tolist() == plain[: plain.tolist().index(eos) + 1].tolist()
        assert request.acts.positions(names[0]) == [*range(len(prompt[0]) + len(new) - 1)]
        with torch.no_grad(), fh.capture(model, names[0]) as acts:
            model(torch.cat([*prompt, new[:-1]])[None])
        torch.testing.assert_close(request.acts[names[0]], acts[names[0]][0], rtol=1e-9, atol=1e-9)
        request.close()


def test_steering_changes_the_tokens_of_its_prompt_alone(pair: tuple[Any, tuple[str, ...]]) -> None:
    model, names = pair
    plain = generate(model, prompts())
    request = fh.Plan(fh.on(names[1], fh.Scale(-20.0))).prepare(model).open()
    with fh.rows.generating([None, request, None]):
        steered = generate(model, prompts())
    assert not torch.equal(steered[1], plain[1])
    assert torch.equal(steered[[0, 2]], plain[[0, 2]])
    assert torch.equal(generate(model, prompts()), plain)


def test_a_prompt_that_ends_early_has_its_positions(pair: tuple[Any, tuple[str, ...]]) -> None:
    model, names = pair
    plain = generate(model, prompts())
    eos = int(plain[0, 1])
    requests = [fh.Plan(fh.keep(names[0], copy="clone")).prepare(model).open() for _ in LENGTHS]
    with fh.rows.generating(requests):
        tokens = generate(model, prompts(), eos_token_id=eos)
    assert tokens[0].tolist()[-1] == 0
    for request, prompt, new in zip(requests, prompts(), tokens, strict=True):
        count = [*new.tolist()[:-1], eos].index(eos)  # the last one is not run
        hidden = request.acts[names[0]][: len(prompt) + count]
        with torch.no_grad(), fh.capture(model, names[0]) as acts:
            model(torch.cat([prompt, new[:count]])[None])
        torch.testing.assert_close(hidden, acts[names[0]][0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "options", [{"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True}], ids=str
)
def test_beams_are_refused_with_the_reason(
    pair: tuple[Any, tuple[str, ...]], options: dict[str, Any]
) -> None:
    model, names = pair
    request = opened(model, names, 0)
    with (
        pytest.raises(fh.errors.RowsError, match=r"6 rows for 3 prompts.*beams"),
        fh.rows.generating([request, None, None]),
    ):
        generate(model, prompts(), **options)
    assert not request.acts


def test_a_second_text_is_refused(pair: tuple[Any, tuple[str, ...]]) -> None:
    model, names = pair
    request = opened(model, names, 0)
    with (
        pytest.raises(fh.errors.RowsError, match="guidance_scale"),
        fh.rows.generating([request, None, None]),
    ):
        generate(model, prompts(), guidance_scale=1.5)
    with fh.rows.generating([opened(model, names, 0), None, None]):
        generate(model, prompts())
        with pytest.raises(fh.errors.RowsError, match="other texts begin in this batch"):
            generate(model, prompts())


class Twice(transformers.LlamaForCausalLM):
    """Runs a second text in each call, ahead of the first one or after it."""

    ahead: bool
    length: int

    @functools.wraps(transformers.LlamaForCausalLM.forward)
    def forward(self, input_ids: Any = None, **options: Any) -> Any:
        other = torch.full_like(input_ids, 5)[:, : self.length]
        if self.ahead:
            self.model(other, use_cache=False)
        output = super().forward(input_ids, **options)
        if not self.ahead:
            self.model(other, use_cache=False)
        return output


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("length", [2, 1000])
def test_a_second_text_of_a_forward_without_a_cache_is_refused(ahead: bool, length: int) -> None:
    model, names = of("llama")
    model.__class__ = Twice
    model.ahead, model.length = ahead, length
    with (
        pytest.raises(fh.errors.RowsError, match="other texts begin in this batch"),
        fh.rows.generating([opened(model, names, 0), None, None]),
    ):
        generate(model, prompts(), use_cache=False)


@pytest.mark.parametrize(
    ("requests", "error", "message"),
    [
        ([], fh.errors.RowsError, "at least one request"),
        ([None, None], fh.errors.RowsError, "at least one request"),
        ([3], fh.HookTypeError, "int"),
        ("ab", fh.HookTypeError, "str"),
    ],
    ids=str,
)
def test_bad_requests_are_refused(requests: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        fh.rows.generating(requests)


def test_a_request_for_two_prompts_is_refused(pair: tuple[Any, tuple[str, ...]]) -> None:
    model, names = pair
    request = opened(model, names, 0)
    with pytest.raises(fh.errors.RowsError, match="prompts 0 and 2"):
        fh.rows.generating([request, None, request])


def test_a_model_without_tokens_is_refused() -> None:
    model = torch.nn.Linear(2, 2)
    request = fh.Plan(fh.keep("")).prepare(model).open()
    with pytest.raises(fh.HookError, match=r"Linear.*input_ids"):
        fh.rows.generating([request])


# Callbacks of weak references keep it to themselves.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_at_any_place_of_entering_frees_the_requests() -> None:
    model, names = of("gpt2")
    place, reached = 0, True
    with fh.Plan(fh.keep(names[0])).prepare(model) as plan:
        requests = [plan.open(), plan.open()]

        def act() -> None:
            with fh.rows.generating(requests) as batch:
                batch.warns = False

        while reached:
            reached, _ = interrupted(act, place)
            assert frames.get() == (), place
            with fh.batch({each: row for row, each in enumerate(requests)}, size=2, warn=False):
                pass  # in no other batch
            assert fh.hooks(model) == []
            place += 1
    assert place > 50

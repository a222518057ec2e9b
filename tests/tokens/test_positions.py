"""Positions of tokens in `generate`, against hooks by hand that know them."""

from __future__ import annotations

import contextvars
import copy
import functools
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ferrohook as fh
from support.language_models import LAYERS, language_model

transformers = pytest.importorskip("transformers")

LENGTHS = (3, 5, 2)
LONGEST = max(LENGTHS)
NEW = 4
WIDTH = 8


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def pair(request: pytest.FixtureRequest) -> tuple[Any, str]:
    """A model and the name of a layer that returns the hidden state."""
    return language_model(request.param, WIDTH), f"{LAYERS[request.param]}.0.mlp"


def prompts(side: str) -> tuple[Tensor, Tensor]:
    """Token ids, and the attention mask."""
    ids = torch.zeros(len(LENGTHS), LONGEST, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(LENGTHS):
        place = slice(LONGEST - length, None) if side == "left" else slice(length)
        ids[row, place] = torch.arange(1, length + 1) + 5 * row
        mask[row, place] = 1
    return ids, mask


def positions(side: str) -> Tensor:
    """Position of each token in the columns of `generate`, -1 for padding."""
    rows = []
    for length in LENGTHS:
        padding = [-1] * (LONGEST - length)
        prompt = [*range(length)]
        start = [*padding, *prompt] if side == "left" else [*prompt, *padding]
        rows.append([*start, *range(length, length + NEW)])
    return torch.tensor(rows)


EVERY_OTHER = slice(None, None, 2)
ATS: dict[str, tuple[Any, Any]] = {
    # The positions as a plan has them, and as a function of (position, length of the prompt).
    "prompt": ("prompt", lambda p, n: p < n),
    "last_prompt": ("last_prompt", lambda p, n: p == n - 1),
    "generated": ("generated", lambda p, n: p >= n),
    "first": (0, lambda p, n: p == 0),
    "int": (4, lambda p, n: p == 4),
    "last": (-1, lambda p, n: p == n - 1),
    "last but one": (-2, lambda p, n: p == n - 2),
    "before all": (-4, lambda p, n: p == n - 4),
    "slice": (slice(1, 4), lambda p, n: (p >= 1) & (p < 4)),
    "from the end": (slice(-2, None), lambda p, n: p >= n - 2),
    "up to the end": (slice(None, -1), lambda p, n: p < n - 1),
    "steps": (EVERY_OTHER, lambda p, n: p % 2 == 0),
    "function": (lambda positions: positions % 3 == 1, lambda p, n: p % 3 == 1),
}
ats = pytest.mark.parametrize(("at", "by_hand"), ATS.values(), ids=ATS)


def generate(model: Any, side: str, *, use_cache: bool) -> Tensor:
    ids, mask = prompts(side)
    return model.generate(  # type: ignore[no-any-return]
        ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, use_cache=use_cache
    )


class ByHand:
    """A hook that knows the columns of its calls, and so their positions."""

    def __init__(self, side: str, by_hand: Any, *, use_cache: bool) -> None:
        known = positions(side)
        lengths = torch.tensor(LENGTHS)[:, None]
        self.chosen = (known >= 0) & by_hand(known, lengths)
        self.use_cache = use_cache
        self.seen = 0
        self.kept: list[Tensor] = []

    def __call__(self, _module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        length = output.shape[1]
        start = self.seen if self.use_cache else 0
        self.seen += length
        mask = self.chosen[:, start : start + length]
        if mask.any():
            self.kept.append(output[mask].clone())
        return torch.where(mask[..., None], output * -3.0, output)


@ats
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.filterwarnings("ignore::ferrohook.errors.NeverFiredWarning")
def test_positions_in_generate(
    pair: tuple[Any, str], at: Any, by_hand: Any, side: str, use_cache: bool
) -> None:
    model, name = pair
    plain = copy.deepcopy(model)
    hand = ByHand(side, by_hand, use_cache=use_cache)
    plain.get_submodule(name).register_forward_hook(hand)
    expected = generate(plain, side, use_cache=use_cache)
    plan = fh.Plan(
        fh.on(name, fh.Scale(-3.0), at=at),
        fh.keep(name, at=at, calls="all", copy="clone", inputs=False, label="after"),
    )
    with plan.prepare(model) as prepared, prepared.open() as request:
        tokens = generate(model, side, use_cache=use_cache)
        assert torch.equal(tokens, expected)
        kept = request.acts[f"after:{name}"] if request.acts else []
    assert [each.shape for each in kept] == [each.shape for each in hand.kept]
    for ours, before in zip(kept, hand.kept, strict=True):
        assert torch.equal(ours, before * -3.0)
    assert torch.equal(
        generate(model, side, use_cache=use_cache),
        generate(copy.deepcopy(model), side, use_cache=use_cache),
    )


def test_a_function_at_positions(pair: tuple[Any, str]) -> None:
    model, name = pair
    hook = ByHand("left", lambda p, n: p >= n, use_cache=True)
    plain = copy.deepcopy(model)
    plain.get_submodule(name).register_forward_hook(hook)
    plan = fh.Plan(fh.on(name, lambda _module, _args, output: output * -3.0, at="generated"))
    with plan.prepare(model) as prepared, prepared.open():
        tokens = generate(model, "left", use_cache=True)
    assert torch.equal(tokens, generate(plain, "left", use_cache=True))


def test_padding_with_a_static_cache(pair: tuple[Any, str]) -> None:
    model, name = pair
    ids, mask = prompts("left")
    options = {"max_new_tokens": NEW, "do_sample": False, "attention_mask": mask}
    plan = fh.Plan(fh.keep(name, at="prompt", calls="all", copy="clone"))
    kept = []
    with plan.prepare(model) as prepared:
        for cache in ("dynamic", "static"):
            with prepared.open() as request:
                model.generate(ids, cache_implementation=cache, **options)
            kept.append(request.acts[name])
    assert [len(each) for each in kept] == [1, 1]
    assert kept[1][0].shape == (sum(LENGTHS), WIDTH)
    assert torch.allclose(kept[0][0], kept[1][0], atol=1e-5)


def test_two_generations_in_one_request(pair: tuple[Any, str]) -> None:
    model, name = pair
    plan = fh.Plan(fh.keep(name, at="last_prompt", calls="all"))
    with plan.prepare(model) as prepared, prepared.open() as request:
        for _ in range(2):
            generate(model, "left", use_cache=True)
    first, second = request.acts[name]
    assert first.shape == (len(LENGTHS), WIDTH)
    assert torch.equal(first, second)


def test_a_model_without_tokens_has_positions_in_batches_alone() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    x = torch.randn(3, WIDTH)
    with fh.Plan(fh.keep("0", at="prompt")).prepare(model) as prepared:
        with (
            pytest.raises(fh.HookError, match=r"Sequential.*input_ids.*batch.*positions="),
            prepared.open(),
        ):
            model(x)
        request = prepared.open()
        with fh.batch({request: [1, 2]}, positions=torch.tensor([-1, 4, 5]), lengths={request: 5}):
            output = model(x)
        assert torch.equal(request.acts["0"], output[1:2])
        assert request.acts.positions("0") == [4]
    with fh.Plan(fh.keep("0")).prepare(model) as prepared, prepared.open():
        model(x)


def test_a_part_called_outside_of_the_model_is_refused(pair: tuple[Any, str]) -> None:
    model, name = pair
    ids, mask = prompts("left")
    part, x = model.get_submodule(name), torch.ones(len(LENGTHS), LONGEST, WIDTH)
    refused = pytest.raises(fh.HookError, match="positions of this call are not known")
    with fh.Plan(fh.on(name, fh.Zero(), at=0)).prepare(model) as prepared, prepared.open():
        with refused:
            part(x)
        model(ids, attention_mask=mask)
        with refused:  # not by the positions of the call before
            part(x)


def test_a_call_that_raises_leaves_no_positions(pair: tuple[Any, str]) -> None:
    model, name = pair
    ids, mask = prompts("left")
    part, x = model.get_submodule(name), torch.ones(len(LENGTHS), LONGEST, WIDTH)

    def fail(*_call: Any) -> None:
        raise KeyError(name)

    for phase in ("forward_pre", "forward"):
        with fh.Plan(fh.on(name, fh.Zero(), at=0)).prepare(model) as prepared, prepared.open():
            handle = fh.register(model, name, fail, phase=phase)
            with pytest.raises(KeyError):
                model(ids, attention_mask=mask)
            handle.remove()
            with pytest.raises(fh.HookError, match="positions of this call are not known"):
                part(x)


def test_parts_of_a_batch_go_by_its_positions_until_it_is_left(pair: tuple[Any, str]) -> None:
    model, name = pair
    ids, mask = prompts("right")
    part, x = model.get_submodule(name), torch.ones(len(LENGTHS), LONGEST, WIDTH)
    with fh.Plan(fh.keep(name, at=0, calls="all")).prepare(model) as prepared:
        for places, calls in ((positions("right")[:, :LONGEST], 2), (None, 1)):
            requests = [prepared.open() for _ in LENGTHS]
            rows = {each: row for row, each in enumerate(requests)}
            lengths = dict(zip(requests, LENGTHS, strict=True)) if places is not None else None
            with fh.batch(rows, positions=places, lengths=lengths):
                model(ids, attention_mask=mask)
                part(x)
            for request in requests:
                if calls == 1:
                    assert isinstance(request.error, fh.HookError)
                    assert "positions of this call are not known" in str(request.error)
                else:
                    assert request.error is None
                    assert len(request.acts[name]) == calls


@pytest.mark.timeout(60)
def test_calls_on_several_threads_have_positions_of_their_own(pair: tuple[Any, str]) -> None:
    model, name = pair
    ids, _mask = prompts("right")
    inside = threading.Barrier(len(LENGTHS))
    plan = fh.Plan(fh.on(name, fh.Zero(), at="last_prompt"))
    expected = []
    for row, length in enumerate(LENGTHS):
        with plan.prepare(model) as prepared, prepared.open():
            expected.append(model(ids[row, None, :length], use_cache=False).logits)

    def meet(*_call: Any) -> None:
        inside.wait()

    with plan.prepare(model) as prepared, prepared.open() as request:
        # All have found their positions before any uses them, and none ends before all have.
        fh.register(model, name, meet, phase="forward_pre", scope=request)
        fh.register(model, name, meet, scope=request, priority=-1)

        def call(row: int) -> Tensor:
            with torch.no_grad():
                logits: Tensor = model(ids[row, None, : LENGTHS[row]], use_cache=False).logits
            return logits

        with ThreadPoolExecutor(len(LENGTHS)) as pool:
            results = [*pool.map(request.wrap(call), range(len(LENGTHS)))]
    for got, right in zip(results, expected, strict=True):
        assert torch.allclose(got, right, atol=1e-6)


class Twice(nn.Module):
    """Calls itself on fewer tokens, then its layer, whose work another thread does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs_embeds: Tensor, inner: bool = True) -> tuple[Tensor, Tensor]:
        before = self(inputs_embeds[:, :2], inner=False)[1] if inner else inputs_embeds
        with ThreadPoolExecutor(1) as pool:
            run = contextvars.copy_context().run
            return before, pool.submit(run, self.layer, inputs_embeds).result()


def test_inner_calls_and_threads_of_a_call() -> None:
    model, x = Twice(), torch.randn(1, 5, WIDTH)
    plan = fh.Plan(fh.on("layer", fh.Zero(), at=slice(1, None)))
    with plan.prepare(model) as prepared, prepared.open():
        inner, outer = model(inputs_embeds=x)
        with pytest.raises(fh.HookError, match="positions of this call are not known"):
            model.layer(x)
    plain = model.layer(x)
    for got in (inner, outer):
        assert torch.equal(got[:, :1], plain[:, :1])
        assert not got[:, 1:].any()


class Siamese(nn.Module):
    """Encodes a query and a document with one encoder."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = transformers.BertConfig(
            vocab_size=64,
            hidden_size=WIDTH,
            intermediate_size=2 * WIDTH,
            num_hidden_layers=1,
            num_attention_heads=2,
        )
        self.bert = transformers.BertModel(config).eval()

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, other_ids: Tensor, other_mask: Tensor
    ) -> None:
        self.bert(input_ids, attention_mask=attention_mask)
        self.bert(other_ids, attention_mask=other_mask)


SIAMESE = "bert.encoder.layer.0"


@torch.no_grad()
def test_a_second_text_of_a_call_has_positions_of_its_own() -> None:
    model, ids, ones = Siamese(), torch.tensor([[5, 6, 7, 8]]), torch.ones(1, 4, dtype=torch.long)
    padded = torch.tensor([[1, 1, 0, 0]])
    plan = fh.Plan(fh.keep(SIAMESE, at="last_prompt", calls="all"))
    # Another text, or another mask of the same ids.
    for other in (ids + 4, ids):
        with plan.open(model) as request, fh.capture(model, SIAMESE, calls="all") as whole:
            model(ids, ones, other, padded)
        first, second = (values[0] for values in whole[SIAMESE])
        assert torch.equal(
            torch.stack([*request.acts[SIAMESE]])[:, 0], torch.stack([first[3], second[1]])
        )
    # The same text, in copies.
    with plan.open(model) as request, fh.capture(model, SIAMESE, calls="all") as whole:
        model(ids, ones, ids.clone(), ones.bool())
    assert all(
        torch.equal(found, values[:, 3])
        for found, values in zip(request.acts[SIAMESE], whole[SIAMESE], strict=True)
    )


@torch.no_grad()
def test_a_gate_reads_each_text_of_a_call() -> None:
    model, ids, ones = Siamese(), torch.tensor([[5, 6, 7, 8]]), torch.ones(1, 4, dtype=torch.long)
    others = ids + 4
    embedded = model.bert.embeddings(torch.cat([ids, others]))
    direction = embedded[0, 0] - embedded[1, 0]
    values = embedded @ direction
    limit = float((values[0, 0] + values[1, 0]) / 2)
    plan = fh.Plan(
        fh.gate("g", "bert.embeddings", fh.Dot(direction)),
        fh.on(SIAMESE, fh.Zero(), when=fh.above("g", limit)),
        fh.keep(SIAMESE, calls="all"),
    )
    with plan.open(model) as request:
        model(ids, ones, others, ones)
    for zeroed, expected in zip(request.acts[SIAMESE], values > limit, strict=True):
        assert torch.equal((zeroed[0] == 0).all(-1), expected)
    assert not torch.equal(*(values > limit))
    with (
        pytest.raises(fh.errors.RowsError, match="other texts begin in this batch"),
        fh.rows.generating([plan.prepare(model).open()]),
    ):
        model(ids, ones, others, ones)


class Edited(Siamese):
    """Replaces ids that are no tokens, and the numbers of documents in a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:  # type: ignore[override]
        hidden = self.bert(input_ids.clamp(min=0), attention_mask=attention_mask > 0)
        head: Tensor = self.head(hidden.last_hidden_state)
        return head


@torch.no_grad()
def test_a_text_that_the_model_edits_ahead_of_an_inner_call_is_one_text() -> None:
    plan = fh.Plan(
        fh.gate("g", "bert.embeddings", fh.Norm()),
        fh.on("head", fh.Zero(), when=fh.above("g", 0.0)),
    )
    with plan.open(model := Edited()):
        changed = model(torch.tensor([[5, -100, 7, 8]]), torch.tensor([[1, 1, 2, 2]]))
    assert not changed.any()


class Shifted(transformers.LlamaForCausalLM):
    """Gives other ids to its inner model, which could be those of another text."""

    @functools.wraps(transformers.LlamaForCausalLM.forward)
    def forward(self, input_ids: Any = None, **options: Any) -> Any:
        return super().forward((input_ids + 1) % 32, **options)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::ferrohook.errors.NeverFiredWarning")
def test_other_ids_without_a_cache_need_the_length_of_the_prompt() -> None:
    model, name = language_model("llama", WIDTH), f"{LAYERS['llama']}.0.mlp"
    model.__class__ = Shifted
    ids, options = torch.tensor([[1, 2, 3, 4]]), {"max_new_tokens": NEW, "do_sample": False}
    plan = fh.Plan(fh.keep(name, at="generated", calls="all"))
    with plan.open(model) as request:
        model.generate(ids, **options)
    expected = torch.cat([*request.acts[name]])
    with plan.prepare(model).open(prompt=4) as request:
        model.generate(ids, use_cache=False, **options)
    torch.testing.assert_close(request.acts[name][-1], expected)
    with plan.open(model), pytest.raises(fh.HookError, match="other ids than the call around it"):
        model.generate(ids, use_cache=False, **options)
    stop = fh.Plan(fh.gate("g", name, fh.Norm()), fh.stop(when=fh.above("g", 1e9)))
    with stop.open(model), pytest.raises(fh.HookError, match="use_cache=True"):
        model.generate(ids, use_cache=False, **options)


class Guided(transformers.LlamaForCausalLM):
    """Runs a second text, with a cache of its own, ahead of the first one or after it."""

    ahead: bool
    length: int
    other: Any = None

    @functools.wraps(transformers.LlamaForCausalLM.forward)
    def forward(self, input_ids: Any = None, **options: Any) -> Any:
        if not self.ahead:
            output = super().forward(input_ids, **options)
        length = self.length if self.other.get_seq_length() == 0 else 1
        self.model(torch.full((len(input_ids), length), 5), past_key_values=self.other)
        return super().forward(input_ids, **options) if self.ahead else output


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:.*past_key_values:FutureWarning")
@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("length", [2, 4, 7])
def test_a_second_text_with_a_cache_has_a_prompt_of_its_own(
    use_cache: bool, ahead: bool, length: int
) -> None:
    model, name = language_model("llama", WIDTH), "model.embed_tokens"
    model.__class__, model.ahead, model.length = Guided, ahead, length
    ids, options = torch.tensor([[1, 2, 3, 4]]), {"max_new_tokens": NEW, "do_sample": False}
    fives = model.get_input_embeddings().weight[5]
    for at, first, later in (("prompt", length, 0), ("last_prompt", 1, 0), ("generated", 0, 1)):
        model.other = transformers.DynamicCache()
        with fh.Plan(fh.keep(name, at=at, calls="all")).open(model) as request:
            model.generate(ids, use_cache=use_cache, **options)
        found = [len(each) for each in request.acts[name] if (each == fives).all()]
        assert found == [it for it in (first, *[later] * (NEW - 1)) if it]


class Tuned(transformers.LlamaForCausalLM):
    """Gives its inner model two tokens ahead of those that it gets."""

    @functools.wraps(transformers.LlamaForCausalLM.forward)
    def forward(self, input_ids: Any = None, **options: Any) -> Any:
        cache = {name: it for name, it in options.items() if name in {"cache", "past_key_values"}}
        embeds = self.get_input_embeddings()(input_ids)
        if not any(each is not None and each.get_seq_length() for each in cache.values()):
            embeds = torch.cat((torch.ones(len(embeds), 2, WIDTH), embeds), 1)
        hidden = self.model(inputs_embeds=embeds, use_cache=options["use_cache"], **cache)[0]
        return transformers.modeling_outputs.CausalLMOutputWithPast(logits=self.lm_head(hidden))


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::ferrohook.errors.NeverFiredWarning")
@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("at", ["prompt", "last_prompt", "generated", -1])
def test_a_prompt_that_the_model_tunes_itself_is_told_or_refused(use_cache: bool, at: Any) -> None:
    model, name = language_model("llama", WIDTH), f"{LAYERS['llama']}.0.mlp"
    model.__class__ = Tuned
    ids = torch.tensor([[1, 2, 3, 4]])
    options = {"max_new_tokens": NEW, "do_sample": False, "use_cache": use_cache}
    with fh.Plan(fh.keep(name, at=at, calls="all")).prepare(model) as prepared:
        with prepared.open(), pytest.raises(fh.HookError, match=r"open\(prompt="):
            model.generate(ids, **options)
        one = prepared.open()
        with pytest.raises(fh.HookError, match=r"open\(prompt="), fh.rows.generating([one]):
            model.generate(ids, **options)
        with prepared.open(prompt=6) as request, fh.capture(model, name, calls="all") as acts:
            model.generate(ids, **options)
    every = acts[name][-1] if not use_cache else torch.cat([*acts[name]], 1)
    part = {"prompt": slice(6), "generated": slice(6, None)}.get(at, slice(5, 6))
    kept = request.acts[name]
    found = torch.cat([*kept]) if use_cache else kept[-1]
    assert torch.equal(found, every[0, part])


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        return self.embed(input_ids)


@pytest.mark.parametrize("at", ["prompt", "last_prompt", "generated", 0, -1, slice(1, None)])
def test_a_call_of_no_tokens(at: Any) -> None:
    plan = fh.Plan(
        fh.on("embed", fh.Add(torch.ones(WIDTH)), at=at),
        fh.gate("g", "embed", fh.Norm(), over="prompt"),
        fh.on("embed", fh.Zero(), when=fh.above("g", 0.5)),
    )
    model = Embedded()
    for shape in ((2, 0), (0, 3)):
        ids = torch.zeros(shape, dtype=torch.long)
        with plan.open(model):
            assert model(ids).shape == (*shape, WIDTH)
        prepared = plan.prepare(model)
        requests = [prepared.open() for _ in range(shape[0])]
        if requests:
            with fh.rows.generating(requests):
                model(ids)
            assert [each.error for each in requests] == [None] * shape[0]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_position_ids_of_a_narrow_dtype(dtype: torch.dtype) -> None:
    ids, places = torch.tensor([[1, 2, 3, 4]]), torch.tensor([[3, 4, 5, 6]], dtype=dtype)
    with fh.Plan(fh.keep("embed", at=slice(4, sys.maxsize))).open(model := Embedded()) as request:
        model(ids, position_ids=places)
    assert request.acts.positions("embed") == [4, 5, 6]


def test_a_call_without_tokens_is_refused(pair: tuple[Any, str]) -> None:
    model, name = pair
    with fh.Plan(fh.on(name, fh.Zero(), at=0)).prepare(model) as prepared:
        assert not prepared.closed
        with pytest.raises(fh.HookError, match="neither input_ids nor"), prepared.open():
            model(attention_mask=torch.ones(1, 2))


def test_embeddings_and_position_ids(pair: tuple[Any, str]) -> None:
    model, name = pair
    ids, _ = prompts("left")
    embeds = model.get_input_embeddings()(ids)
    places = torch.arange(3, 3 + LONGEST).expand(len(LENGTHS), LONGEST)
    with fh.Plan(fh.keep(name, at=4)).prepare(model) as prepared:
        for arguments, column in (
            ({"inputs_embeds": embeds}, 4),
            ({"inputs_embeds": embeds, "position_ids": places}, 1),
        ):
            with prepared.open() as request, fh.capture(model, name) as acts:
                model(**arguments)
            assert torch.equal(request.acts[name], acts[name][:, column])


class Turned(nn.Module):
    """A layer whose value has its tokens in another order than (batch, length)."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1).contiguous() if self.what == "length first" else x[:, None]


class Turning(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.embed, self.layer = nn.Embedding(20, WIDTH), Turned(what)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.layer(self.embed(input_ids))  # type: ignore[no-any-return]


@pytest.mark.parametrize("what", ["length first", "heads"])
@pytest.mark.parametrize(
    "at", [slice(0, 2), slice(0, 3), "prompt", lambda positions: positions >= 0]
)
@pytest.mark.parametrize("way", ["keep", "on", "function"])
def test_values_without_tokens_are_refused_at_all_tokens_too(what: str, at: Any, way: str) -> None:
    model, ids = Turning(what).requires_grad_(False), torch.tensor([[1, 2, 3], [4, 5, 6]])
    hooks: dict[str, Any] = {"on": fh.Zero(), "function": lambda _m, _a, out: out * 0}
    entry = fh.keep("layer", at=at) if way == "keep" else fh.on("layer", hooks[way], at=at)
    with pytest.raises(fh.HookTypeError, match=r"positions are known for \[2, 3\] tokens"):
        fh.run(model, ids, plan=fh.Plan(entry))

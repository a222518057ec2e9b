"""`at=` of `register` and `capture`, against plans and against hooks by hand."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ferrohook as fh
from ferrohook.attach.hook_info import find_registry
from support.language_models import encoder_decoder_model, language_model
from support.threads import run_together

pytest.importorskip("transformers")

WIDTH = 8
LAYER = "model.layers.1"
LENGTH = 5


@pytest.fixture
def model() -> Any:
    return language_model("llama", WIDTH)


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(3, 20, (2, LENGTH), generator=torch.Generator().manual_seed(0))


def instrumented(model: nn.Module) -> list[str]:
    """The names of the modules that have a dispatcher."""
    return [name for name, each in model.named_modules() if find_registry(each) is not None]


def added(model: Any, at: Any, *calls: Any, what: str = LAYER) -> Any:
    """Logits with a vector added by a plan."""
    with (
        fh.Plan(fh.on(what, fh.Add(torch.ones(WIDTH)), at=at)).prepare(model) as prepared,
        prepared.open(),
    ):
        return model(*calls).logits


@pytest.mark.parametrize("at", ["prompt", "last_prompt", 2, -2, slice(1, 4, 2)])
def test_a_hook_and_a_capture_act_as_in_a_plan(model: Any, ids: Tensor, at: Any) -> None:
    expected = added(model, at, ids)
    with fh.register(model, LAYER, fh.Add(torch.ones(WIDTH)), at=at) as group:
        assert torch.equal(model(ids).logits, expected)
        assert group.calls == 1
    with fh.capture(model, LAYER) as whole, fh.capture(model, LAYER, at=at) as acts:
        model(ids)
    columns = {"prompt": slice(None), "last_prompt": [-1], 2: [2], -2: [-2]}
    chosen = whole[LAYER][:, at if isinstance(at, slice) else columns[at]]
    assert torch.equal(acts[LAYER], chosen.reshape(-1, WIDTH))


def test_positions_count_from_each_rows_own_first_token(model: Any, ids: Tensor) -> None:
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    with (
        fh.capture(model, LAYER) as whole,
        fh.capture(model, LAYER, at=0) as first,
        fh.capture(model, LAYER, at="generated") as generated,
        torch.no_grad(),
    ):
        model(ids, attention_mask=mask)
        expected = torch.stack([whole[LAYER][0, 2], whole[LAYER][1, 0]])
        assert torch.equal(first[LAYER], expected)
        model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
    assert generated[LAYER].shape == (2 * 3, WIDTH)  # the last token never runs
    assert generated.positions(LAYER) == [3, 4, 5, 5, 6, 7]
    assert first.positions(LAYER) == [0, 0]
    with pytest.raises(fh.HookError, match="capture with at="):
        whole.positions(LAYER)
    with pytest.raises(fh.SelectionError, match="is not among the captured modules"):
        first.positions("lm_head")
    with pytest.raises(fh.HookError, match="not known"):
        copy.deepcopy(first).positions(LAYER)


def test_quantities_and_heads_have_their_tokens_chosen(model: Any, ids: Tensor) -> None:
    names = ["@pattern.0", "@z.0.1", "@resid_post.0"]
    with fh.capture(model, names) as whole, fh.capture(model, names, at=1) as acts:
        model(ids)
    assert torch.equal(acts["@pattern.0"], whole["@pattern.0"][:, :, 1])
    assert torch.equal(acts["@z.0.1"], whole["@z.0.1"][:, 1])
    assert torch.equal(acts["@resid_post.0"], whole["@resid_post.0"][:, 1])
    with fh.capture(model, "@z.0") as plain:
        model(ids)
    with fh.register(model, "@z.0.1", fh.Zero(), at=1), fh.capture(model, "@z.0") as acts:
        model(ids)
    expected = plain["@z.0"].clone().unflatten(-1, (-1, plain["@z.0"].shape[-1] // 2))
    expected[:, 1, 1] = 0
    assert torch.equal(acts["@z.0"], expected.flatten(-2))


def test_an_encoder_and_a_decoder_count_their_own_tokens() -> None:
    model = encoder_decoder_model(WIDTH, layers=1, heads=2, vocab=32)
    names = ["model.encoder.layers.0", "model.decoder.layers.0"]
    given = {
        "input_ids": torch.randint(3, 20, (2, 4)),
        "decoder_input_ids": torch.randint(3, 20, (2, 3)),
    }
    with fh.capture(model, names) as whole, fh.capture(model, names, at="last_prompt") as acts:
        model(**given)
    for name in names:
        assert torch.equal(acts[name], whole[name][:, -1])


def test_a_hook_in_a_scope_fires_in_its_context_only(model: Any, ids: Tensor) -> None:
    expected, plain = added(model, 2, ids), model(ids).logits
    with fh.scope():
        fh.register(model, LAYER, fh.Add(torch.ones(WIDTH)), at=2)
        assert torch.equal(model(ids).logits, expected)
        other: list[Tensor] = []
        run_together(lambda: other.append(model(ids).logits))
        assert torch.equal(other[0], plain)
    assert torch.equal(model(ids).logits, plain)


def test_threads_share_a_hook_and_have_captures_of_their_own(model: Any) -> None:
    plain = model
    lengths = range(2, 10)
    texts = [torch.randint(3, 20, (1, length)) for length in lengths]
    expected = [plain(text).logits[:, -1] for text in texts]

    def run(number: int) -> None:
        for _ in range(20):
            with fh.capture(model, "lm_head", at="last_prompt") as acts:
                model(texts[number])
            torch.testing.assert_close(acts["lm_head"], expected[number])

    with fh.register(model, "lm_head", lambda _module, _args, output: output, at="last_prompt"):
        run_together(*[lambda number=number: run(number) for number in range(len(texts))])


def test_an_exception_leaves_no_call_behind(model: Any, ids: Tensor) -> None:
    def fails(*_call: Any) -> None:
        raise RuntimeError

    expected = added(model, 2, ids)
    with fh.register(model, LAYER, fh.Add(torch.ones(WIDTH)), at=2):
        with fh.register(model, "model.layers.0", fails), pytest.raises(RuntimeError):
            model(ids)
        assert torch.equal(model(ids).logits, expected)


def test_a_capture_stops_each_call_and_keeps_inputs(model: Any, ids: Tensor) -> None:
    with fh.capture(model, LAYER, inputs=True) as whole:
        model(ids)
    with fh.capture(model, LAYER, at=2, inputs=True, stop=True, calls="all") as acts:
        assert model(input_ids=ids) is fh.STOPPED
        assert model(input_ids=ids[:1]) is fh.STOPPED
    assert torch.equal(acts[LAYER][0], whole[LAYER][:, 2])
    torch.testing.assert_close(acts[LAYER][1], whole[LAYER][:1, 2])
    assert model(ids).logits.shape[:2] == ids.shape


def test_a_part_of_the_model_does_not_know_positions(model: Any) -> None:
    with (
        fh.register(model, f"{LAYER}.mlp", fh.Add(torch.ones(WIDTH)), at=2),
        pytest.raises(fh.HookError, match="call the model that at= was given for"),
    ):
        model.model.layers[1].mlp(torch.randn(1, 3, WIDTH))


def test_users_see_their_hook_and_no_other(model: Any, ids: Tensor) -> None:
    steer = fh.Add(torch.ones(WIDTH))
    group = fh.register(model, LAYER, steer, at=2)
    (row,) = fh.hooks(model)
    assert row.hook is steer
    assert row.file == __file__
    model(ids)
    assert row.handle.calls == 1
    fh.clear(model.model.layers[1])  # the hook was the only reason for the model's own
    assert group.removed
    assert instrumented(model) == []


def test_a_copy_of_the_model_has_the_hook_too(model: Any, ids: Tensor) -> None:
    plain, expected = model(ids).logits, added(model, 2, ids)
    group = fh.register(model, LAYER, fh.Add(torch.ones(WIDTH)), at=2)
    copied = copy.deepcopy(model)
    group.remove()
    assert torch.equal(model(ids).logits, plain)
    assert torch.equal(copied(ids).logits, expected)
    fh.clear(copied)
    assert torch.equal(copied(ids).logits, plain)


def test_a_dropped_model_is_freed(ids: Tensor) -> None:
    model = language_model("llama", WIDTH)
    gone = weakref.ref(model)
    fh.register(model, LAYER, lambda *_call: None, at="generated")
    model.generate(ids, max_new_tokens=2)
    del model
    gc.collect()
    assert gone() is None


@pytest.mark.filterwarnings("ignore::FutureWarning")  # newer names, which older releases lack
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_forward_repeats_them(model: Any, ids: Tensor, reentrant: bool) -> None:
    model.requires_grad_(True).train()
    weight = model.model.layers[0].mlp.up_proj.weight

    def gradient() -> Tensor:
        model.zero_grad()
        model(ids, use_cache=False).logits.sum().backward()
        assert weight.grad is not None
        return weight.grad.clone()

    name = f"{LAYER}.mlp"
    with (
        fh.register(model, name, fh.Add(torch.ones(WIDTH)), at=2),
        fh.register(model, name, lambda _module, _args, output: output * 2, at=-1),
        fh.capture(model, name, at=1, calls="all") as acts,
    ):
        expected = gradient()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()
        torch.testing.assert_close(gradient(), expected)
    assert [each.shape for each in acts[name]] == [(2, WIDTH)] * 2


@pytest.mark.parametrize("before", [False, True])
def test_compiled_models_act_like_eager_ones(model: Any, ids: Tensor, before: bool) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    if before:
        with torch.no_grad():
            compiled(ids)
    with (
        torch.no_grad(),
        fh.register(model, LAYER, fh.Add(torch.ones(WIDTH)), at=2),
        fh.capture(model, LAYER, at=1) as acts,
    ):
        expected = model(ids).logits
        kept = acts[LAYER]
        torch.testing.assert_close(compiled(ids).logits, expected)
        torch.testing.assert_close(acts[LAYER], kept)


def test_members_of_a_batch_that_has_no_positions(model: Any, ids: Tensor) -> None:
    with fh.capture(model, LAYER) as whole:
        plain = model(ids).logits
    first, second = (fh.capture(model, LAYER, at=at) for at in ("last_prompt", 1))
    scope = fh.scope()
    fh.register(model, "lm_head", fh.Zero(), at=0, scope=scope)
    three = torch.cat([ids, ids[:1]])
    with fh.batch({first: 0, second: 1, scope: 2}):
        logits = model(three).logits
    torch.testing.assert_close(first.acts[LAYER], whole[LAYER][:1, -1])
    torch.testing.assert_close(second.acts[LAYER], whole[LAYER][1:, 1])
    assert not logits[2, 0].any()
    torch.testing.assert_close(logits[2, 1:], plain[0, 1:])


@pytest.mark.filterwarnings("ignore::ferrohook.errors.NeverFiredWarning")
def test_a_batch_with_positions_refuses_them(model: Any, ids: Tensor) -> None:
    with fh.Plan(fh.keep(LAYER, at=0)).prepare(model) as prepared:
        requests = [prepared.open() for _ in range(2)]
        positions = torch.arange(LENGTH).expand(2, LENGTH)
        batch = fh.batch(
            dict(zip(requests, range(2), strict=True)),
            positions=positions,
            lengths=dict.fromkeys(requests, LENGTH),
        )
        with (
            fh.register(model, LAYER, fh.Zero(), at=0),
            batch,
            pytest.raises(fh.HookError, match="pass at= in the plan of each request"),
        ):
            model(ids)


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"at": "everywhere"}, ValueError, "at must be one of"),
        ({"at": True}, fh.HookTypeError, "at must be a name"),
        ({"at": slice(0, 4, 0)}, ValueError, "step"),
        (
            {"at": 0, "hook": fh.ForwardHook(print)},
            fh.HookTypeError,
            "at= only works with an intervention",
        ),
        ({"at": 0, "with_kwargs": True}, fh.HookTypeError, "at= only works with an intervention"),
        ({"at": 0, "always_call": True}, fh.HookTypeError, "at= only works with an intervention"),
        ({"at": 0, "phase": "backward"}, fh.HookTypeError, "at= only works with an intervention"),
    ],
)
def test_what_cannot_act_at_positions_is_refused(
    model: Any, given: dict[str, Any], error: type[Exception], words: str
) -> None:
    hook = given.pop("hook", print)
    with pytest.raises(error, match=words):
        fh.register(model, LAYER, hook, **given)
    assert instrumented(model) == []


def test_captures_refuse_positions_with_gradients_and_where_no_tokens_run(model: Any) -> None:
    with pytest.raises(fh.HookTypeError, match="without at="):
        fh.capture(model, LAYER, at=0, grads=True)
    with pytest.raises(ValueError, match="at must be one of"):
        fh.capture(model, LAYER, at="everywhere")  # type: ignore[call-overload]
    images = nn.Sequential(nn.Linear(2, 2))
    for open_ in (
        lambda: fh.capture(images, "0", at=0),
        lambda: fh.register(images, "0", fh.Zero(), at=0),
    ):
        with pytest.raises(fh.HookError, match="takes neither input_ids nor inputs_embeds"):
            open_()
    assert instrumented(images) == []

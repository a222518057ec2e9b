"""q, k, v and z of transformers' attention modules, read and written at points."""

from __future__ import annotations

import copy
import functools
import gc
import io
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import ferrohook as fh
from ferrohook._core import Dispatcher
from ferrohook.attach.attention import DIMENSIONS, POINTS, attended, points_of
from support.attention_models import KINDS, attention_model, attention_of, implemented, registered
from support.threads import in_threads

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ferrohook.attach.attention import AttentionPoint, AttentionPoints

modeling = pytest.importorskip("transformers.modeling_utils")
ORIGINAL = modeling.AttentionInterface.get_interface
IDS = torch.arange(1, 19).reshape(3, 6)


MODELS = functools.cache(attention_model)


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    yield
    assert modeling.AttentionInterface.get_interface is ORIGINAL


@pytest.fixture(scope="module")
def llama() -> Any:
    return MODELS("llama")


def logits(model: Any, ids: Tensor = IDS, **options: Any) -> Tensor:
    with torch.no_grad():
        return model(ids, **options)[0]


def points(model: nn.Module, layer: int = 1, kind: str = "llama") -> AttentionPoints:
    return points_of(attention_of(model, kind, layer))


def captured(model: Any, point: AttentionPoint, **options: Any) -> Tensor:
    with fh.capture(point, "", copy="clone", **options) as acts:
        logits(model)
    return acts[""]


class Recorder:
    """Attention function that stores its arguments and results."""

    def __init__(self) -> None:
        self.calls: list[tuple[Tensor, ...]] = []
        self.function = modeling.AttentionInterface._global_mapping["sdpa"]

    def __call__(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        output, weights = self.function(module, q, k, v, *args, **kwargs)
        self.calls.append((q.clone(), k.clone(), v.clone(), output.clone()))
        return output, weights


# --- Reading ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in {"gemma2", "gpt_oss"}])
def test_a_point_reads_what_the_attention_function_takes_and_returns(kind: str) -> None:
    model, recorder = MODELS(kind), Recorder()
    with registered("recording", recorder, "sdpa"), implemented(model, "recording"):
        logits(model)
        q, k, v, output = recorder.calls[1]
        expected = [q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), output]
        for name, tensor in zip(POINTS, expected, strict=False):
            found = captured(model, getattr(points(model, 1, kind), name))
            assert torch.equal(found, tensor), name
            assert len(DIMENSIONS[name]) == found.dim()


@pytest.mark.parametrize("kind", KINDS)
def test_z_is_the_input_of_the_output_projection(kind: str) -> None:
    model = MODELS(kind)
    paths = {
        "gpt_neox": "gpt_neox.layers.1.attention.dense",
        "gpt2": "transformer.h.1.attn.c_proj",
        "bert": "encoder.layer.1.attention.output.dense",
    }
    projection = paths.get(kind, "model.layers.1.self_attn.o_proj")
    with fh.capture(model, projection, inputs=True) as acts:
        z = captured(model, points(model, 1, kind).z)
    assert torch.equal(z.flatten(2), acts[projection])


@pytest.mark.parametrize("kind", KINDS)
def test_reading_leaves_the_result_bit_for_bit(kind: str) -> None:
    model = MODELS(kind)
    plain = logits(model)
    every = [point for layer in (0, 1) for point in points(model, layer, kind).all]
    captures = [fh.capture(point, "") for point in every]
    with captures[0], captures[1], captures[2], captures[3], captures[4]:
        assert torch.equal(logits(model), plain)


def test_a_scope_and_typed_hooks_work_on_a_point(llama: Any) -> None:
    seen: list[Tensor] = []
    doubled = fh.ForwardPreHook(lambda q: q * 2)
    plain = logits(llama)
    with fh.scope() as s:
        fh.register(points(llama).q, "", doubled, scope=s)
        fh.register(points(llama).q, "", fh.ForwardHook(lambda q, out: seen.append(out)), scope=s)
        changed = logits(llama)
    assert not torch.equal(changed, plain)
    assert torch.equal(logits(llama), plain)
    assert torch.equal(seen[0], 2 * captured(llama, points(llama).q))


# --- Writing ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["q", "k", "v", "z"])
def test_what_a_point_returns_is_what_attention_goes_on_with(llama: Any, name: str) -> None:
    module = attention_of(llama, "llama", 1)
    with attended() as calls:
        logits(llama)
    q, k, v, z = (tensor.clone() for tensor in calls[1][1:5])
    vector = torch.linspace(-1, 1, 8)
    tensors = {"q": q, "k": k, "v": v, "z": z}
    tensors[name] += vector
    if name != "z":
        q, k, v = (tensors[each].transpose(1, 2) for each in "qkv")
        sdpa = nn.functional.scaled_dot_product_attention
        z = sdpa(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
    expected = module.o_proj(z.flatten(2))
    capture = fh.capture(llama, "model.layers.1.self_attn", output_index=0)
    with capture as acts, fh.register(getattr(points(llama), name), "", fh.Add(vector)):
        logits(llama)
    torch.testing.assert_close(acts["model.layers.1.self_attn"], expected, rtol=1e-4, atol=1e-4)


def test_writing_in_place_writes(llama: Any) -> None:
    def clear(module: nn.Module, args: Any, output: Tensor) -> None:
        output[:, :, 2] = 0

    with fh.register(points(llama).z, "", clear):
        found = logits(llama)
    keep = torch.ones(4)
    keep[2] = 0
    with fh.register(points(llama).z, "", lambda m, a, out: out * keep[:, None]):
        assert torch.equal(found, logits(llama))


def _first(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output[:1]


def _text(*_: Any) -> str:
    return "no tensor"


@pytest.mark.parametrize("name", POINTS)
def test_another_shape_is_refused_with_the_expected_one(llama: Any, name: str) -> None:
    point = getattr(points(llama), name)
    shape = rf"{name} must keep shape \(3, .* returned \(1,"
    with pytest.raises(fh.HookTypeError, match=shape), fh.register(point, "", _first):
        logits(llama)
    kind = f"{name} must be replaced by a tensor, got str"
    with pytest.raises(fh.HookTypeError, match=kind), fh.register(point, "", _text):
        logits(llama)


def test_gradients_arrive_at_points_and_are_written(llama: Any) -> None:
    embedded = llama.model.embed_tokens(IDS).requires_grad_()
    got: dict[str, Tensor] = {}

    def read(name: str) -> Any:
        return lambda module, grad_input, grad_output: got.update({name: grad_output[0]})

    handles = [
        fh.register(each, "", read(each.name), phase="backward") for each in points(llama).all
    ]
    llama(inputs_embeds=embedded)[0].square().sum().backward()
    for handle in handles:
        handle.remove()
    # The pattern's equal eager attention's, from autograd only.
    with implemented(llama, "eager"):
        output = llama(inputs_embeds=embedded, output_attentions=True)
        (expected,) = torch.autograd.grad(output.logits.square().sum(), output.attentions[1])
    assert got.keys() == {*POINTS, "queries"}
    assert torch.equal(got["queries"].transpose(1, 2), got["pattern"])
    torch.testing.assert_close(got["pattern"], expected, rtol=1e-3, atol=1e-3)
    assert all(bool(gradient.abs().sum() > 0) for gradient in got.values())


# --- Left unchanged -----------------------------------------------------------------------------


def test_the_function_is_replaced_while_a_point_is_hooked_and_no_longer(llama: Any) -> None:
    attention = attention_of(llama, "llama", 1)
    state, names = [*llama.state_dict()], [name for name, _ in llama.named_modules()]
    attributes, implementation = {*vars(attention)}, llama.config._attn_implementation
    first = fh.register(points(llama).q, "", lambda *_: None)
    second = fh.register(points(llama, 0).z, "", lambda *_: None)
    assert modeling.AttentionInterface.get_interface is not ORIGINAL
    assert [*llama.state_dict()] == state
    assert [name for name, _ in llama.named_modules()] == names
    assert llama.config._attn_implementation == implementation
    first.remove()
    assert modeling.AttentionInterface.get_interface is not ORIGINAL
    assert {*vars(attention)} == attributes
    dispatcher = vars(points(llama, 0).z)[Dispatcher.KEY]  # a trace may keep it for a while
    second.remove()
    assert modeling.AttentionInterface.get_interface is ORIGINAL, dispatcher


def test_another_library_that_replaces_the_function_meanwhile_is_left_in_place(llama: Any) -> None:
    plain = logits(llama)
    handle = fh.register(points(llama).q, "", lambda m, a, out: out * 2)
    ours, interface = modeling.AttentionInterface.get_interface, modeling.AttentionInterface
    others = []

    def theirs(self: Any, *args: Any) -> Any:
        others.append(args)
        return ours(self, *args)

    interface.get_interface = theirs
    changed = logits(llama)
    handle.remove()
    assert interface.get_interface is theirs
    assert torch.equal(logits(llama), plain)
    with fh.register(points(llama).q, "", lambda m, a, out: out * 2):
        assert torch.equal(logits(llama), changed)  # once, not twice
    interface.get_interface = ours
    fh.register(points(llama).q, "", lambda *_: None).remove()
    assert others


def test_a_model_without_points_gets_its_function_as_it_is(llama: Any) -> None:
    other, recorder = attention_model("llama"), Recorder()
    with registered("recording", recorder, "sdpa"), implemented(other, "recording"):
        plain = logits(other)
        with fh.register(points(llama).q, "", lambda m, a, out: out * 0):
            assert torch.equal(logits(other), plain)
            logits(llama)


def test_copies_have_no_points_of_the_original() -> None:
    llama = attention_model("llama")
    plain = logits(llama)
    with fh.register(points(llama).q, "", lambda m, a, out: out * 0):
        copied = copy.deepcopy(llama)
        saved = pickle.dumps(llama)
        buffer = io.BytesIO()
        torch.save(llama.state_dict(), buffer)
        assert torch.equal(logits(copied), plain)
        assert not torch.equal(logits(llama), plain)
        assert points(copied) is not points(llama)
    loaded = pickle.loads(saved)
    assert torch.equal(logits(loaded), plain)
    names = {*vars(attention_of(llama, "llama", 1))}
    for each in (copied, loaded):
        assert {*vars(attention_of(each, "llama", 1))} == names


def test_global_hooks_of_points_are_listed_and_cleared() -> None:
    model = copy.deepcopy(MODELS("llama"))
    seen: list[str] = []
    for name in ("z", "pattern"):
        point = getattr(points(model), name)
        fh.register(point, "", lambda *_, name=name: seen.append(name))
    path = next(path for path, it in model.named_modules() if it is points(model).module)
    assert [each.module for each in fh.hooks(model)] == [f"{path}.z", f"{path}.pattern"]
    assert [each.module for each in fh.hooks(points(model).module)] == ["z", "pattern"]
    fh.clear(model)
    assert fh.hooks(model) == []
    logits(model)
    assert not seen


def test_a_point_goes_with_its_model() -> None:
    model = attention_model("llama")
    point = points(model).q
    fh.register(point, "", lambda *_: None)
    assert modeling.AttentionInterface.get_interface is not ORIGINAL
    del model
    gc.collect()
    with pytest.raises(fh.HookError, match="is gone"):
        point.points.module  # noqa: B018 (raises)


def test_a_function_that_fails_leaves_nothing_hooked(llama: Any) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    plain = logits(llama)
    with pytest.raises(ZeroDivisionError), fh.register(points(llama).v, "", fail):
        logits(llama)
    assert torch.equal(logits(llama), plain)


# --- Rows ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", POINTS)
def test_a_request_of_a_batch_has_its_own_rows(llama: Any, name: str) -> None:
    point = getattr(points(llama), name)
    write = fh.Plan(fh.on("", fh.Scale(0.5)), fh.keep(""))
    read = fh.Plan(fh.keep(""))
    plain = logits(llama)
    with fh.register(point, "", fh.Scale(0.5)):
        scaled = logits(llama)
    whole = captured(llama, point)
    with write.prepare(point) as writes, read.prepare(point) as reads:
        writer, reader = writes.open(), reads.open()
        with fh.batch({writer: 1, reader: slice(2, 3)}, size=3):
            found = logits(llama)
    assert torch.equal(found[[0, 2]], plain[[0, 2]])
    torch.testing.assert_close(found[1], scaled[1], rtol=1e-5, atol=1e-5)
    assert torch.equal(reader.acts[""], whole[2:])
    assert torch.equal(writer.acts[""], whole[1:2] / 2)


# --- Threads ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("switch_often")
def test_threads_with_scopes_of_their_own_see_and_change_nothing_of_others(llama: Any) -> None:
    expected = []
    for number in range(8):
        with fh.register(points(llama).z, "", fh.Scale(1 + number / 4)):
            expected.append(logits(llama))

    def work(number: int) -> list[bool]:
        correct = []
        for _ in range(20):
            with fh.scope() as s, fh.capture(points(llama).z, "") as acts:
                fh.register(points(llama).z, "", fh.Scale(1 + number / 4), scope=s)
                correct.append(torch.equal(logits(llama), expected[number]))
            correct.append(bool(acts[""].isfinite().all()))
        return correct

    assert all(all(each) for each in in_threads(8, work))


def test_a_pattern_of_padding_changes_nothing_in_float64() -> None:
    """No key is left to the queries of padding, and transformers computes softmax in float32."""
    model = copy.deepcopy(MODELS("llama")).double()
    ids = torch.tensor([[5, 6, 7, 8], [0, 0, 9, 4]])
    plain = logits(model, ids, attention_mask=(ids > 0).long())
    for at in (None, "last_prompt"):
        with fh.Plan(fh.keep("@pattern.1", at=at)).open(model) as request:
            output = logits(model, ids, attention_mask=(ids > 0).long())
        assert torch.equal(output, plain)
        assert plain[ids > 0].isfinite().all()
        assert request.acts["@pattern.1"].isfinite().all()

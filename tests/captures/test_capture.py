"""Captures: captured values, and the effect of later changes on them."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ferrohook as fh
from support.capture import Data, Frozen, Named, assert_plain, captured, tensors_of
from support.internals import instrumented
from support.modules import Returning


def by_torch(model: nn.Module, *args: Any) -> dict[str, Any]:
    """Outputs of one call, by PyTorch's own hooks."""
    seen: dict[str, Any] = {}
    handles = [
        module.register_forward_hook(lambda *it, name=name: seen.__setitem__(name, it[-1]))
        for name, module in model.named_modules()
    ]
    model(*args)
    for handle in handles:
        handle.remove()
    return seen


# Captured values


def test_captures_equal_what_torch_hooks_see(model: nn.Sequential, x: Tensor) -> None:
    expected = by_torch(model, x)
    with fh.capture(model) as acts:
        out = model(x)
    assert list(acts) == list(expected) == ["0", "1", "2", ""]
    for name, tensor in expected.items():
        assert torch.equal(acts[name], tensor)
        assert not acts[name].requires_grad
    assert acts[""].data_ptr() == out.data_ptr()
    assert_plain(model)


def test_a_capture_is_readable_inside_and_after_its_block(model: nn.Sequential, x: Tensor) -> None:
    with fh.capture(model, "0") as acts:
        assert (len(acts), list(acts)) == (0, [])
        model(x)
        inside = acts["0"]
        model(2 * x)
        assert not torch.equal(acts["0"], inside)
    model(3 * x)
    assert torch.equal(acts["0"], model[0](2 * x))


def test_inputs_are_the_arguments_of_the_call() -> None:
    module = Returning(lambda *_args, **_kwargs: None)
    calls: list[tuple[tuple[Any, ...], dict[str, Any], Any]] = [
        ((1,), {}, 1),
        ((1, 2), {}, (1, 2)),
        (((1, 2),), {}, (1, 2)),
        ((1,), {"a": 3}, 1),
        ((), {"a": 3, "b": 4}, {"a": 3, "b": 4}),
        ((), {}, ()),
    ]
    with fh.capture(module, "", inputs=True, calls="all") as acts:
        for args, kwargs, _ in calls:
            module(*args, **kwargs)
    assert acts[""] == [expected for *_, expected in calls]


def test_captured_keyword_inputs_are_a_dict_of_their_own() -> None:
    def change(**kwargs: Any) -> None:
        kwargs.clear()

    module = Returning(change)
    with fh.capture(module, "", inputs=True) as acts:
        module(a=1)
    assert acts[""] == {"a": 1}


def test_inputs_and_outputs_are_captured_after_all_hooks(model: nn.Sequential, x: Tensor) -> None:
    with fh.scope() as s, fh.capture(model, "0") as out, fh.capture(model, "0", inputs=True) as inp:
        # Registered after the capture, which still runs last.
        pre = fh.register(model, "0", lambda _m, _a: torch.zeros(5, 3), phase="forward_pre")
        steer = fh.register(model, "0", lambda *_: torch.ones(5, 4), scope=s, priority=-100)
        model(x)
    pre.remove()
    steer.remove()
    assert torch.equal(inp["0"], torch.zeros(5, 3))
    assert torch.equal(out["0"], torch.ones(5, 4))


def test_the_return_value_of_torchs_own_hooks_is_captured(model: nn.Sequential, x: Tensor) -> None:
    handle = model[0].register_forward_hook(lambda *_: torch.ones(5, 4))
    with fh.capture(model, "0") as acts:
        model(x)
    handle.remove()
    assert torch.equal(acts["0"], torch.ones(5, 4))


def test_structures_keep_their_classes_and_tensors_are_detached() -> None:
    t = torch.ones(2, requires_grad=True) * 1
    for value in (
        (t,),
        [t, [t]],
        {"a": t, 3: (t,)},
        OrderedDict(a=t),
        defaultdict(list, a=[t]),
        UserDict(a=t, b=(t,)),
        Named(t, "text"),
        Data(t, {"x": [t, None]}),
        Frozen(t),
        ({"deep": [Named(Data(t), Frozen((t,)))]},),
    ):
        kept = captured(value)
        assert type(kept) is type(value)
        assert kept is not value
        tensors = list(tensors_of(kept))
        assert len(tensors) == len(list(tensors_of(value)))
        for tensor in tensors:
            assert not tensor.requires_grad
            assert torch.equal(tensor, t)
        assert all(
            tensor is t for tensor in tensors_of(value)
        )  # the model's own structure is unchanged
    for same in (None, 3, "text", object()):
        assert captured(same) is same


def test_a_later_change_of_the_models_structure_does_not_reach_the_capture() -> None:
    out: list[Any] = [torch.ones(1)]
    for value in ({"a": out}, UserDict(a=out)):
        kept = captured(value)
        value.clear()
        assert [each.item() for each in kept["a"]] == [1]
    out.clear()
    assert kept["a"][0].item() == 1


def test_model_outputs_of_transformers_are_traversed() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    t = torch.ones(2, requires_grad=True) * 1
    value = outputs.BaseModelOutput(last_hidden_state=t, hidden_states=(t, t))
    kept = captured(value)
    assert type(kept) is type(value)
    assert not kept.last_hidden_state.requires_grad
    assert not kept["hidden_states"][1].requires_grad
    assert kept.attentions is None
    assert torch.equal(captured(value, output_index="last_hidden_state"), t)
    assert value.last_hidden_state is t


def test_packed_sequences_and_torchs_own_tuples_preserve_their_class() -> None:
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    assert type(captured(packed)) is type(packed)
    kept = captured(torch.max(torch.ones(2, 2), 0))
    assert type(kept) is torch.return_types.max
    assert captured(torch.Size([1, 2])) == torch.Size([1, 2])


def test_a_custom_tuple_class_does_not_break_the_model() -> None:
    class Pair(tuple[Any, ...]):
        __slots__ = ()

        def __new__(cls, first: Any, second: Any) -> Pair:  # noqa: PYI034
            return super().__new__(cls, (first, second))

    assert captured(Pair(1, 2)) == (1, 2)


def test_output_index_selects_one_element() -> None:
    t, u = torch.zeros(2), torch.ones(2)
    assert torch.equal(captured((t, u), output_index=1), u)
    assert torch.equal(captured([t, u], output_index=-1), u)
    assert torch.equal(captured({"a": t, "b": u}, output_index="b"), u)
    assert torch.equal(captured({0: t, 7: u}, output_index=7), u)
    assert torch.equal(captured(Data(t, u), output_index="second"), u)
    assert torch.equal(captured(Named(t, u), output_index="second"), u)
    assert captured((t, {"x": u}), output_index=1)["x"] is u
    assert torch.equal(captured((u, 2 * u), output_index="sum"), 3 * u)
    assert torch.equal(captured(Named(u, 2 * u), output_index="sum"), 3 * u)
    assert captured({"sum": t}, output_index="sum") is t


@pytest.mark.parametrize(
    ("value", "index"),
    [((1, 2), 2), ({"a": 1}, "b"), ((1, 2), "b"), ((1, 2, 3), "sum"), (Data(1), 0), (None, 0)],
)
def test_a_missing_output_index_raises_and_the_model_works_afterwards(
    value: Any, index: Any
) -> None:
    module = Returning(lambda: value)
    told = pytest.raises(fh.SelectionError, match=f"has no output_index {index!r}: it is of type")
    with told, fh.capture(module, "", output_index=index):
        module()
    assert module() is value
    assert_plain_class(module)


def assert_plain_class(module: nn.Module) -> None:
    assert type(module) is Returning
    assert instrumented(module) == []


# copy


@pytest.mark.parametrize("change", ["inplace", "view", "through the base", "out="])
def test_checked_raises_after_a_change_in_place(
    model: nn.Sequential, x: Tensor, change: str
) -> None:
    with torch.no_grad(), fh.capture(model, ["0", "1"]) as acts:
        model(x)
        kept = acts["0"]
        if change == "inplace":
            kept.add_(1)
        elif change == "view":
            kept[0].zero_()
        elif change == "through the base":
            kept.view(-1).detach().mul_(2)
        else:
            torch.add(kept, 1, out=kept)
    with pytest.raises(fh.StaleActivationError, match=r"0. was changed in place after it was"):
        acts["0"]
    with pytest.raises(fh.StaleActivationError):
        acts.get("0")
    with pytest.raises(fh.StaleActivationError):
        acts.to("cpu")
    # The entry is listed and has a repr; the other entries are readable.
    assert "0" in acts
    assert "(5, 4)" in repr(acts)
    assert acts.nbytes == 160
    assert torch.equal(acts["1"], acts["1"])


def test_a_change_in_place_by_the_model_itself_raises(x: Tensor) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True))
    with fh.capture(model, "0") as acts:
        model(x)
    with pytest.raises(fh.StaleActivationError):
        acts["0"]
    with fh.capture(model, "0", copy="clone") as acts:
        model(x)
    assert torch.equal(acts["0"], model[0](x))
    with fh.capture(model, "0", copy="ref") as acts:
        out = model(x)
    assert acts["0"].data_ptr() == out.data_ptr()
    assert torch.equal(acts["0"], out)


def test_a_change_of_the_base_of_a_view_raises() -> None:
    base = torch.zeros(4, 4)
    module = Returning(lambda: base[1:3])
    with fh.capture(module, "") as acts:
        module()
    base.add_(1)
    with pytest.raises(fh.StaleActivationError):
        acts[""]


@pytest.mark.parametrize("structure", [dict, UserDict])
def test_a_tensor_inside_a_structure_is_checked(structure: Any) -> None:
    t = torch.zeros(2)
    module = Returning(lambda: structure(a=[Data(t)]))
    with fh.capture(module, "", calls="all") as acts:
        module()
        t.add_(1)
        module()
    with pytest.raises(fh.StaleActivationError):
        acts[""]


@pytest.mark.parametrize("copy", ["checked", "clone", "ref"])
def test_inference_mode(model: nn.Sequential, x: Tensor, copy: Any) -> None:
    with torch.inference_mode(), fh.capture(model, copy=copy, calls="all") as acts:
        out = model(x)
        expected = out.clone()
        out.add_(1)
        model(x)
    assert torch.equal(acts[""][0], expected + (copy == "ref"))
    assert torch.equal(acts[""][1], expected)


def test_a_returned_parameter_is_captured_detached() -> None:
    weight = nn.Parameter(torch.ones(2))
    kept = captured({"w": weight})
    assert not kept["w"].requires_grad
    assert type(kept["w"]) is Tensor

"""Captures: what passes a module is what is kept, and nothing else stays."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import dataclasses
import gc
import re
import stat
import threading
import warnings
import weakref
from collections import OrderedDict, defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import ferrohook as fh

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

LIMIT = 30.0
"""Seconds that a test waits at most for another thread."""


@pytest.fixture
def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


@pytest.fixture
def x() -> Tensor:
    return torch.randn(5, 3)


class Returning(nn.Module):
    """Returns what a function makes of what it takes."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def by_torch(model: nn.Module, *args: Any) -> dict[str, Any]:
    """What PyTorch's own hooks see of one call."""
    seen: dict[str, Any] = {}
    handles = [
        module.register_forward_hook(lambda *it, name=name: seen.__setitem__(name, it[-1]))
        for name, module in model.named_modules()
    ]
    model(*args)
    for handle in handles:
        handle.remove()
    return seen


def captured(value: Any, **options: Any) -> Any:
    """What a capture keeps of a module that returns `value`."""
    module = Returning(lambda: value)
    with fh.capture(module, "", **options) as acts:
        assert module() is value
    return acts[""]


def assert_plain(model: nn.Module) -> None:
    """Fails if something of ours is left in the model."""
    for module in model.modules():
        assert type(module).__mro__[1].__module__.startswith("torch.nn")
        assert not [key for key in vars(module) if "ferrohook" in key]


# What is kept


def test_what_is_captured_is_what_torch_hooks_see(model: nn.Sequential, x: Tensor) -> None:
    expected = by_torch(model, x)
    with fh.capture(model) as acts:
        out = model(x)
    assert list(acts) == list(expected) == ["0", "1", "2", ""]
    for name, tensor in expected.items():
        assert torch.equal(acts[name], tensor)
        assert not acts[name].requires_grad
    assert acts[""].data_ptr() == out.data_ptr()
    assert_plain(model)


def test_it_can_be_read_inside_and_after(model: nn.Sequential, x: Tensor) -> None:
    with fh.capture(model, "0") as acts:
        assert (len(acts), list(acts)) == (0, [])
        model(x)
        inside = acts["0"]
        model(2 * x)
        assert not torch.equal(acts["0"], inside)
    model(3 * x)
    assert torch.equal(acts["0"], model[0](2 * x))


def test_inputs_are_those_of_the_call() -> None:
    module = Returning(lambda *_args, **_kwargs: None)
    calls: list[tuple[tuple[Any, ...], dict[str, Any], Any]] = [
        ((1,), {}, 1),
        ((1, 2), {}, (1, 2)),
        (((1, 2),), {}, (1, 2)),
        ((1,), {"a": 3}, 1),
        ((), {"a": 3, "b": 4}, {"a": 3, "b": 4}),
        ((), {}, ()),
    ]
    with fh.capture(module, "", inputs=True, keep="all") as acts:
        for args, kwargs, _ in calls:
            module(*args, **kwargs)
    assert acts[""] == [expected for *_, expected in calls]


def test_captured_keyword_inputs_are_not_the_models_dict() -> None:
    def change(**kwargs: Any) -> None:
        kwargs.clear()

    module = Returning(change)
    with fh.capture(module, "", inputs=True) as acts:
        module(a=1)
    assert acts[""] == {"a": 1}


def test_inputs_and_outputs_are_what_leaves_the_hooks(model: nn.Sequential, x: Tensor) -> None:
    with fh.scope() as s, fh.capture(model, "0") as out, fh.capture(model, "0", inputs=True) as inp:
        # Registered later, but the capture is behind all.
        pre = fh.register(model, "0", lambda _m, _a: torch.zeros(5, 3), phase="forward_pre")
        steer = fh.register(model, "0", lambda *_: torch.ones(5, 4), scope=s, priority=-100)
        model(x)
    pre.remove()
    steer.remove()
    assert torch.equal(inp["0"], torch.zeros(5, 3))
    assert torch.equal(out["0"], torch.ones(5, 4))


def test_what_torchs_own_hooks_return_is_captured(model: nn.Sequential, x: Tensor) -> None:
    handle = model[0].register_forward_hook(lambda *_: torch.ones(5, 4))
    with fh.capture(model, "0") as acts:
        model(x)
    handle.remove()
    assert torch.equal(acts["0"], torch.ones(5, 4))


class Named(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Data:
    first: Any
    second: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    first: Any


def test_structures_keep_their_classes_and_tensors_are_detached() -> None:
    t = torch.ones(2, requires_grad=True) * 1
    for value in (
        (t,),
        [t, [t]],
        {"a": t, 3: (t,)},
        OrderedDict(a=t),
        defaultdict(list, a=[t]),
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
        assert all(tensor is t for tensor in tensors_of(value))  # the model's own are as they were
    for same in (None, 3, "text", object()):
        assert captured(same) is same


def tensors_of(value: Any) -> Iterator[Tensor]:
    """An independent walk."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_of(item)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from tensors_of(getattr(value, field.name))


def test_a_later_change_of_the_models_structure_is_not_seen() -> None:
    out: list[Any] = [torch.ones(1)]
    value = {"a": out}
    kept = captured(value)
    out.clear()
    value.clear()
    assert kept["a"][0].item() == 1


def test_the_outputs_of_transformers_are_walked() -> None:
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


def test_packed_sequences_and_torchs_own_tuples_are_kept() -> None:
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    assert type(captured(packed)) is type(packed)
    kept = captured(torch.max(torch.ones(2, 2), 0))
    assert type(kept) is torch.return_types.max
    assert captured(torch.Size([1, 2])) == torch.Size([1, 2])


def test_a_tuple_of_a_class_of_its_own_does_not_break_the_model() -> None:
    class Pair(tuple[Any, ...]):
        __slots__ = ()

        def __new__(cls, first: Any, second: Any) -> Pair:  # noqa: PYI034
            return super().__new__(cls, (first, second))

    assert captured(Pair(1, 2)) == (1, 2)


def test_output_index_picks_a_part() -> None:
    t, u = torch.zeros(2), torch.ones(2)
    assert torch.equal(captured((t, u), output_index=1), u)
    assert torch.equal(captured([t, u], output_index=-1), u)
    assert torch.equal(captured({"a": t, "b": u}, output_index="b"), u)
    assert torch.equal(captured({0: t, 7: u}, output_index=7), u)
    assert torch.equal(captured(Data(t, u), output_index="second"), u)
    assert torch.equal(captured(Named(t, u), output_index="second"), u)
    assert captured((t, {"x": u}), output_index=1)["x"] is u


@pytest.mark.parametrize(
    ("value", "index"), [((1, 2), 2), ({"a": 1}, "b"), ((1, 2), "b"), (Data(1), 0), (None, 0)]
)
def test_a_missing_part_is_told_and_the_model_works_afterwards(value: Any, index: Any) -> None:
    module = Returning(lambda: value)
    told = pytest.raises(fh.SelectionError, match=f"has no output_index {index!r}: it is of type")
    with told, fh.capture(module, "", output_index=index):
        module()
    assert module() is value
    assert_plain_class(module)


def assert_plain_class(module: nn.Module) -> None:
    assert type(module) is Returning
    assert "_ferrohook_dispatcher" not in vars(module)


# copy


@pytest.mark.parametrize("change", ["inplace", "view", "through the base", "out="])
def test_checked_tells_of_a_change_in_place(model: nn.Sequential, x: Tensor, change: str) -> None:
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
    # It is there, can be described, and the others can be read.
    assert "0" in acts
    assert "(5, 4)" in repr(acts)
    assert acts.nbytes == 160
    assert torch.equal(acts["1"], acts["1"])


def test_a_change_by_the_model_itself_is_told(x: Tensor) -> None:
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


def test_a_change_of_the_base_of_a_view_is_told() -> None:
    base = torch.zeros(4, 4)
    module = Returning(lambda: base[1:3])
    with fh.capture(module, "") as acts:
        module()
    base.add_(1)
    with pytest.raises(fh.StaleActivationError):
        acts[""]


def test_a_tensor_inside_a_structure_is_checked_too() -> None:
    t = torch.zeros(2)
    module = Returning(lambda: {"a": [Data(t)]})
    with fh.capture(module, "", keep="all") as acts:
        module()
        t.add_(1)
        module()
    with pytest.raises(fh.StaleActivationError):
        acts[""]


@pytest.mark.parametrize("copy", ["checked", "clone", "ref"])
def test_inference_mode(model: nn.Sequential, x: Tensor, copy: Any) -> None:
    with torch.inference_mode(), fh.capture(model, copy=copy, keep="all") as acts:
        out = model(x)
        expected = out.clone()
        out.add_(1)
        model(x)
    assert torch.equal(acts[""][0], expected + (copy == "ref"))
    assert torch.equal(acts[""][1], expected)


def test_a_parameter_that_is_returned_is_kept_detached() -> None:
    weight = nn.Parameter(torch.ones(2))
    kept = captured({"w": weight})
    assert not kept["w"].requires_grad
    assert type(kept["w"]) is Tensor


# detach, device, dtype, slice


def test_undetached_captures_let_gradients_flow(model: nn.Sequential, x: Tensor) -> None:
    with fh.capture(model, "0", detach=False) as acts:
        model(x)
    (grad,) = torch.autograd.grad(acts["0"].sum(), model[0].weight)
    assert torch.allclose(grad, x.sum(0).expand(4, 3))


@pytest.mark.parametrize(
    "options", [{"copy": "clone"}, {"dtype": torch.float64}, {"slice": 0}, {"slice": (..., [1])}]
)
def test_undetached_copies_let_gradients_flow(
    model: nn.Sequential, x: Tensor, options: dict[str, Any]
) -> None:
    with fh.capture(model, "0", detach=False, **options) as acts:
        model(x)
    acts["0"].sum().backward()
    assert model[0].weight.grad is not None


def test_dtype_casts_what_is_of_floating_point() -> None:
    value = (torch.ones(2), torch.ones(2, dtype=torch.int64), torch.ones(1, dtype=torch.bool))
    kept = captured(value, dtype=torch.bfloat16)
    assert [each.dtype for each in kept] == [torch.bfloat16, torch.int64, torch.bool]


def test_device_moves() -> None:
    kept = captured((torch.ones(2),), device="meta")
    assert kept[0].device.type == "meta"
    assert captured(torch.ones(2), device=torch.device("cpu")).device.type == "cpu"


@pytest.mark.parametrize(
    "index",
    [
        0,
        -1,
        slice(1, 3),
        slice(None, None, 2),
        ...,
        (..., 0),
        (slice(None), [0, 2]),
        [0, 1],
        torch.tensor([1, 0]),
        (None, 1),
        [True, False, True, False],
    ],
)
def test_a_slice_is_what_indexing_gives_in_memory_of_its_own(index: Any) -> None:
    big = torch.arange(4_000.0).view(4, 1_000)
    kept = captured(big, slice=index)
    assert torch.equal(kept, big[index])
    assert kept.untyped_storage().nbytes() == kept.nbytes
    before = kept.clone()
    big.zero_()
    assert torch.equal(kept, before)


@pytest.mark.parametrize("options", [{"device": "cpu"}, {"dtype": torch.float32}, {"slice": ...}])
def test_clone_copies_where_nothing_is_to_be_converted(options: dict[str, Any]) -> None:
    value = torch.ones(3)
    kept = captured(value, copy="clone", **options)
    value.zero_()
    assert kept.tolist() == [1, 1, 1]


@pytest.mark.parametrize("options", [{"device": "cpu"}, {"dtype": torch.float32}])
def test_checked_checks_where_nothing_is_to_be_converted(options: dict[str, Any]) -> None:
    value = torch.ones(3)
    module = Returning(lambda: value)
    with fh.capture(module, "", **options) as acts:
        module()
    assert acts[""].data_ptr() == value.data_ptr()
    value.zero_()
    with pytest.raises(fh.StaleActivationError):
        acts[""]


def test_a_slice_that_does_not_fit_is_the_error_of_the_call(
    model: nn.Sequential, x: Tensor
) -> None:
    with fh.capture(model, "0", slice=7):
        with pytest.raises(IndexError) as error:
            model(x)
        assert any("forward hook" in note for note in error.value.__notes__)
        model(torch.randn(8, 3))
    assert_plain(model)


def test_the_options_go_together(model: nn.Sequential, x: Tensor) -> None:
    with fh.capture(
        model, ["0", "2"], slice=(slice(None), -1), dtype=torch.float64, copy="clone", keep=2
    ) as acts:
        for factor in (1, 2, 3):
            model(factor * x)
    assert [each.dtype for each in acts["2"]] == [torch.float64] * 2
    assert torch.equal(acts["2"][1], model(3 * x)[:, -1].double())
    assert torch.equal(acts["2"][0], model(2 * x)[:, -1].double())


# keep


class Twice(nn.Module):
    """Calls one module twice and another in between."""

    def __init__(self) -> None:
        super().__init__()
        self.once = nn.Identity()
        self.shared = nn.Identity()
        self.alias = self.shared

    def forward(self, x: Tensor) -> Tensor:
        return self.alias(self.once(self.shared(x) + 1) + 1) + 1


@pytest.mark.parametrize(
    ("keep", "expected"),
    [("last", 12.0), ("all", [0.0, 2.0, 10.0, 12.0]), (1, [12.0]), (3, [2.0, 10.0, 12.0])],
)
def test_keep_says_which_calls_of_a_module(keep: Any, expected: Any) -> None:
    model = Twice()
    with fh.capture(model, keep=keep) as acts:
        model(torch.tensor(0.0))
        model(torch.tensor(10.0))
    kept = acts["shared"]
    assert (kept if keep == "last" else [each.item() for each in kept]) == expected
    assert list(acts) == ["shared", "once", ""]


def test_many_calls_keep_the_memory_of_the_last() -> None:
    module = Returning(lambda: torch.empty(1))
    with fh.capture(module, "", keep=3) as acts:
        freed = [weakref.ref(module()) for _ in range(50)]
    assert [each() is not None for each in freed] == [False] * 47 + [True] * 3
    assert len(acts[""]) == 3


# grads


def test_grads_are_those_of_autograd(model: nn.Sequential, x: Tensor) -> None:
    with fh.capture(model, ["0", "2"], grads=True) as acts:
        out = model(x)
        assert acts.grads["0"] is None
        (out**2).sum().backward()
    hidden = model[0](x)
    (expected,) = torch.autograd.grad((model[2](model[1](hidden)) ** 2).sum(), hidden)
    assert torch.allclose(acts.grads["0"], expected)
    assert torch.allclose(acts.grads["2"], 2 * out)
    assert list(acts.grads) == ["0", "2"]
    assert not acts.grads["0"].requires_grad


def test_grads_come_after_leaving_too_each_to_its_call(model: nn.Sequential) -> None:
    x = torch.ones(1, 3)
    with fh.capture(model, "0", grads=True, keep="all") as acts:
        outs = [model(x), model(2 * x)]
    outs[0].sum().backward()
    first, second = acts.grads["0"]
    kept = first.clone()
    assert second is None
    outs[1].sum().backward()
    assert torch.equal(acts.grads["0"][0], kept)
    assert acts.grads["0"][1] is not None


def test_the_gradient_of_an_input_is_not_the_memory_that_autograd_adds_to(
    model: nn.Sequential,
) -> None:
    x = torch.ones(1, 3, requires_grad=True)
    with fh.capture(model, "0", inputs=True, grads=True) as acts:
        out = model(x)
    out.sum().backward()
    gradient = acts.grads["0"]
    kept = gradient.clone()
    model(x).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, 2 * kept)
    assert torch.equal(gradient, kept)


def test_grads_of_structures_are_lists_and_of_tensors_tensors() -> None:
    t = torch.ones(2, requires_grad=True)
    for value, shape in (
        (t * 1, None),
        ((t * 1,), 1),
        ({"a": t * 1, "b": [t * 2, torch.ones(1)]}, 3),
    ):
        module = Returning(lambda value=value: value)
        with fh.capture(module, "", grads=True) as acts:
            module()
        next(tensors_of(value)).sum().backward()
        if shape is None:
            assert acts.grads[""].tolist() == [1, 1]
        else:
            assert [g is None for g in acts.grads[""]] == [False, *[True] * (shape - 1)]


def test_grads_are_converted_as_the_tensors(model: nn.Sequential, x: Tensor) -> None:
    with fh.capture(model, "0", grads=True, dtype=torch.float64, slice=(0, [1, 2])) as acts:
        model(x).sum().backward()
    assert acts.grads["0"].dtype == torch.float64
    assert acts.grads["0"].shape == acts["0"].shape == (2,)


def test_grads_are_none_where_none_are_recorded(model: nn.Sequential, x: Tensor) -> None:
    with torch.no_grad(), fh.capture(model, "0", grads=True) as acts:
        model(x)
    assert acts.grads["0"] is None
    with fh.capture(model, "0") as acts:
        model(x).sum().backward()
    assert len(acts.grads) == 0


def test_grads_of_a_backward_on_another_thread(model: nn.Sequential, x: Tensor) -> None:
    with fh.capture(model, "2", grads=True) as acts:
        out = model(x)
    with ThreadPoolExecutor(1) as executor:
        executor.submit(out.sum().backward).result(LIMIT)
    assert torch.equal(acts.grads["2"], torch.ones(5, 2))


# max_bytes


def test_the_budget_ends_the_call_and_keeps_what_came_before(
    model: nn.Sequential, x: Tensor
) -> None:
    # The second did run.
    silent = pytest.warns(fh.NeverFiredWarning, match="^'', '2' were selected and never ran")
    with silent, fh.capture(model, max_bytes=159) as acts:
        with pytest.raises(fh.CaptureBudgetError, match=r"keeping 80 more bytes of .1. .*=159"):
            model(x)
        assert (list(acts), acts.nbytes) == (["0"], 80)
        # What the calls before it left is replaced, and fits.
        with pytest.raises(fh.CaptureBudgetError):
            model(2 * x)
        assert torch.equal(acts["0"], model[0](2 * x))
    assert_plain(model)
    assert model(x).shape == (5, 2)


def test_a_budget_that_is_just_enough_is_kept_to(model: nn.Sequential, x: Tensor) -> None:
    with fh.capture(model, max_bytes=80 + 80 + 40 + 40) as acts:
        for _ in range(3):
            model(x)
    assert acts.nbytes == 240
    with fh.capture(model, "0", max_bytes=3 * 80, keep="all") as acts:
        for _ in range(3):
            model(x)
        with pytest.raises(fh.CaptureBudgetError):
            model(x)
    assert len(acts["0"]) == 3


def test_the_budget_is_that_of_what_is_kept_after_slicing_and_casting(
    model: nn.Sequential, x: Tensor
) -> None:
    with fh.capture(model, "0", max_bytes=8, slice=0, dtype=torch.float16) as acts:
        model(x)
    assert acts.nbytes == 8


def test_the_budget_counts_gradients(model: nn.Sequential, x: Tensor) -> None:
    with fh.capture(model, "0", max_bytes=100, grads=True), pytest.raises(fh.CaptureBudgetError):
        model(x).sum().backward()


# stop


class Guarded(nn.Module):
    """Model code that catches errors, and code that must run at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.third = nn.Linear(3, 3)
        self.ended = 0
        self.caught = 0

    def forward(self, x: Tensor) -> Tensor:
        try:
            return self.third(self.second(self.first(x)))
        except Exception:
            self.caught += 1
            raise
        finally:
            self.ended += 1


@pytest.mark.parametrize("wrapped", [False, True])
def test_stop_ends_the_forward_after_the_last_module_wanted(x: Tensor, wrapped: bool) -> None:
    plain = Guarded()
    model: Any = fh.HookedModule(plain) if wrapped else plain
    with fh.register(model, "third", lambda *_: pytest.fail("it ran")) as group:
        with fh.capture(model, ["second", "first"], stop=True) as acts:
            assert model(x) is fh.STOPPED
        group.disable()
    assert torch.equal(acts["second"], plain.second(plain.first(x)))
    assert (plain.ended, plain.caught) == (1, 0)
    assert repr(fh.STOPPED) == str(fh.STOPPED) == "ferrohook.STOPPED"
    assert isinstance(model(x), Tensor)


def test_stop_with_the_model_itself_wanted(model: nn.Sequential, x: Tensor) -> None:
    with fh.capture(model, stop=True) as acts:
        assert model(x) is fh.STOPPED
    assert torch.equal(acts[""], model(x))
    with fh.capture(model, "", inputs=True, stop=True) as acts:
        assert model(x) is fh.STOPPED
    assert acts[""] is x


def test_stop_restores_what_the_forward_had_set(x: Tensor) -> None:
    class NoGrad(Guarded):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                return super().forward(x)

    model = NoGrad()
    with fh.capture(model, "first", stop=True):
        model(x)
    assert torch.is_grad_enabled()


def test_stop_runs_always_call_hooks_of_the_modules_around(x: Tensor) -> None:
    model = Guarded()
    seen: list[Any] = []
    with (
        fh.register(model, "", lambda *it: seen.append(it[-1]), always_call=True),
        fh.capture(model, "first", stop=True),
    ):
        assert model(x) is fh.STOPPED
    assert seen == [None]


def test_a_model_in_which_one_wanted_does_not_run_goes_to_its_end(
    model: nn.Sequential, x: Tensor
) -> None:
    first = nn.Sequential(*model[:2])
    first.unused = nn.Identity()
    first.forward = lambda x: first[1](first[0](x))  # type: ignore[method-assign]
    with (
        pytest.warns(fh.NeverFiredWarning, match="'unused'"),
        fh.capture(first, ["0", "unused"], stop=True),
    ):
        assert isinstance(first(x), Tensor)


def test_nested_captures_stop_at_their_own_models(x: Tensor) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), nn.Identity())
    with fh.capture(model, ["0.0", ""], keep="all") as outer:
        with fh.capture(model[0], "0", stop=True) as inner:
            assert model[0](x) is fh.STOPPED
        assert isinstance(model(x), Tensor)
        with fh.capture(model, "0.0", stop=True):
            assert model(x) is fh.STOPPED
    assert [len(outer["0.0"]), len(outer[""])] == [3, 1]
    assert torch.equal(inner["0"], outer["0.0"][0])


def test_stop_counts_anew_in_each_call(model: nn.Sequential, x: Tensor) -> None:
    with fh.capture(model, ["0", "1"], stop=True, keep="all") as acts:
        for _ in range(3):
            assert model(x) is fh.STOPPED
    assert [len(calls) for calls in acts.values()] == [3, 3]


def test_a_submodule_called_by_itself_is_not_stopped(model: nn.Sequential, x: Tensor) -> None:
    with fh.capture(model, "0", stop=True) as acts:
        try:
            out = model[0](x)
        except BaseException as error:  # noqa: BLE001 (it is none that one should have to catch)
            pytest.fail(repr(error))
    assert torch.equal(acts["0"], out)


def test_what_other_threads_run_for_a_call_counts_for_its_stop(x: Tensor) -> None:
    class Forking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.helped, self.own, self.last = (nn.Linear(3, 3) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            context = contextvars.copy_context()
            with ThreadPoolExecutor(1) as pool:
                helped = pool.submit(context.run, self.helped, x).result()
            return self.last(self.own(x) + helped)  # type: ignore[no-any-return]

    model = Forking()
    with fh.capture(model, ["helped", "own"], stop=True, keep="all") as acts:
        assert model(x) is fh.STOPPED
        assert model(x) is fh.STOPPED
    assert [len(calls) for calls in acts.values()] == [2, 2]


# What never ran


def test_modules_that_never_ran_are_told(model: nn.Sequential, x: Tensor) -> None:
    with (
        pytest.warns(fh.NeverFiredWarning, match=r"^'1', '2' were selected and never ran") as told,
        fh.capture(model, ["0", "1", "2"]) as acts,
    ):
        model[0](x)
    assert told[0].filename == __file__
    assert list(acts) == ["0"]
    with pytest.raises(fh.SelectionError, match=r"'1' never ran .*: 0$"):
        acts["1"]
    with pytest.raises(fh.SelectionError, match=r"'nope' was not selected .*: 0$"):
        acts["nope"]


def test_a_forward_that_was_called_directly_is_the_reason(x: Tensor) -> None:
    class Direct(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer.forward(x)

    model = Direct()
    reason = r"Direct\.forward calls its forward directly"
    with pytest.warns(fh.NeverFiredWarning, match=reason), fh.capture(model, "layer"):
        model(x)


def test_an_exception_is_not_hidden_by_the_warning(model: nn.Sequential) -> None:
    with pytest.raises(ZeroDivisionError), fh.capture(model):
        raise ZeroDivisionError
    assert_plain(model)


def test_the_warning_as_an_error_leaves_nothing_behind(model: nn.Sequential) -> None:
    with pytest.raises(fh.NeverFiredWarning), fh.capture(model):
        pass
    assert_plain(model)


# The cache


@pytest.fixture
def acts(model: nn.Sequential, x: Tensor) -> fh.ActivationCache:
    with fh.capture(model) as acts:
        model(x)
    return acts


def test_a_cache_is_a_mapping(acts: fh.ActivationCache) -> None:
    assert list(acts) == list(acts.keys()) == [name for name, _ in acts.items()]
    assert len(acts) == len(list(acts.values())) == 4
    assert "0" in acts
    assert "nope" not in acts
    assert acts.get("nope") is None
    assert acts.get("nope", 3) == 3
    assert acts.get("0") is acts["0"]
    for cache in (acts, acts.to("cpu")):
        with pytest.raises(KeyError):
            cache["nope"]
        with pytest.raises(fh.SelectionError, match=r"'nope' .* captured: 0, 1, 2, $"):
            cache["nope"]


def test_stack(acts: fh.ActivationCache) -> None:
    assert torch.equal(acts.stack("0"), acts["0"][None])
    stacked = acts.stack(re.compile("[01]"))
    assert torch.equal(stacked, torch.stack([acts["0"], acts["1"]]))
    with pytest.raises(fh.SelectionError, match=r"'x\.\*' matches none of what was captured"):
        acts.stack("x.*")
    with pytest.raises(fh.HookTypeError, match="stack takes a name, a glob or a compiled regex"):
        acts.stack(3)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="equal size"):
        acts.stack()


def test_stack_takes_all_calls() -> None:
    model = Twice()
    with fh.capture(model, "shared", keep="all") as acts:
        model(torch.zeros(1))
    assert acts.stack("shared").tolist() == [[0], [2]]


def test_nbytes_and_repr(acts: fh.ActivationCache) -> None:
    assert acts.nbytes == 80 + 80 + 40 + 40
    assert repr(acts).splitlines() == [
        "name  shape   dtype    bytes",
        "0     (5, 4)  float32     80",
        "1     (5, 4)  float32     80",
        "2     (5, 2)  float32     40",
        "      (5, 2)  float32     40",
    ]
    assert repr(fh.ActivationCache({})).split() == ["name", "shape", "dtype", "bytes"]
    structure = fh.ActivationCache({"a": [(torch.ones(1), {"b": torch.ones(2)}), None], "n": 3})
    assert [line.split() for line in repr(structure).splitlines()[1:]] == [
        ["a", "(1,)", "float32", "4"],
        ["a", "(2,)", "float32", "8"],
        ["n", "-", "int", "-"],
    ]


def test_to_keeps_structures_and_shares_what_is_there(x: Tensor) -> None:
    value = (Named(x, [Data(x, {"a": Frozen(x)})]), OrderedDict(b=None))
    module = Returning(lambda: value)
    with fh.capture(module, "", grads=True) as acts:
        module()
    same = acts.to("cpu")
    assert repr(same[""]) == repr(acts[""])
    assert same[""][0].first is x
    assert same[""][0].second[0].second["a"].first is x
    moved = acts.to("meta")
    assert type(moved[""][1]) is OrderedDict
    frozen = moved[""][0].second[0].second["a"]
    assert type(frozen) is Frozen
    assert frozen.first.device.type == "meta"
    assert acts[""][0].first is x
    assert moved.grads[""] == [None, None, None]


# Files


def test_a_file_holds_all(tmp_path: Path, model: nn.Sequential, x: Tensor) -> None:
    with fh.capture(model, grads=True, keep="all") as acts:
        for _ in range(2):
            model(x).sum().backward()
    path = tmp_path / "acts.safetensors"
    acts.save(path)
    loaded = fh.ActivationCache.load(str(path))
    assert list(loaded) == list(acts)
    for name, calls in acts.items():
        assert all(map(torch.equal, loaded[name], calls))
        assert all(map(torch.equal, loaded.grads[name], acts.grads[name]))
    # For others that read the format.
    tensors = safetensors.torch.load_file(path)
    assert torch.equal(tensors["/activations/0/1"], acts["0"][1])


def test_a_file_holds_structures_shared_storage_and_any_strides(tmp_path: Path) -> None:
    base = torch.arange(12.0).view(3, 4)
    value = {
        "same": (base, base),
        "views": [base.t(), base[1:], base[:, ::2], base.expand(2, 3, 4)],
        "a/b": torch.zeros(1),
        "a": {"b": torch.ones(1)},
        "empty": [torch.empty(0), (), [], {}],
        "plain": (None, True, 3, 2.5, "text"),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "kinds": [torch.ones(2, dtype=kind) for kind in (torch.bool, torch.int8, torch.bfloat16)],
        "data": Data(base, Named(1, base)),
    }
    path = tmp_path / "acts.safetensors"
    fh.ActivationCache(value).save(path)
    loaded = fh.ActivationCache.load(path)
    assert list(loaded) == list(value)
    expected = list(tensors_of(value))
    found = list(tensors_of(dict(loaded)))
    assert [each.dtype for each in found] == [each.dtype for each in expected]
    assert all(map(torch.equal, found, expected))
    assert loaded["plain"] == (None, True, 3, 2.5, "text")
    assert loaded["plain"][1] is True
    assert loaded["empty"][1:] == [(), [], {}]
    assert type(loaded["same"]) is tuple
    assert loaded["data"]["second"][0] == 1
    assert fh.ActivationCache.load(path).nbytes == sum(each.nbytes for each in expected)


def test_an_undetached_capture_can_be_saved(
    tmp_path: Path, model: nn.Sequential, x: Tensor
) -> None:
    with fh.capture(model, "0", detach=False) as acts:
        model(x)
    acts.save(tmp_path / "file")
    assert torch.equal(fh.ActivationCache.load(tmp_path / "file")["0"], acts["0"])


@pytest.mark.parametrize("wrong", [object(), {1: torch.ones(1)}, b"bytes"])
def test_what_cannot_be_saved_leaves_the_file_as_it_was(
    tmp_path: Path, wrong: Any, acts: fh.ActivationCache
) -> None:
    path = tmp_path / "file"
    acts.save(path)
    before = path.read_bytes()
    with pytest.raises(fh.HookTypeError, match="/activations/x"):
        fh.ActivationCache({"a": torch.ones(1), "x": [wrong]}).save(path)
    sparse = fh.ActivationCache({"x": torch.ones(2, 2).to_sparse()})
    with pytest.raises(fh.HookTypeError, match="/activations/x: a tensor of layout"):
        sparse.save(path)
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_a_saved_file_replaces_another_and_can_be_read_by_others(
    tmp_path: Path, acts: fh.ActivationCache
) -> None:
    path = tmp_path / "file"
    path.write_text("other")
    acts.save(path)
    assert len(fh.ActivationCache.load(path)) == 4
    (tmp_path / "plain").touch()
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no safetensors")
    (tmp_path / "empty").touch()
    safetensors.torch.save_file({"a": torch.ones(1)}, tmp_path / "other")
    for name in ("text", "empty", "other"):
        with pytest.raises(fh.HookError, match=f"{name} holds no activations that ferrohook saved"):
            fh.ActivationCache.load(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        fh.ActivationCache.load(tmp_path / "missing")
    with pytest.raises(FileNotFoundError):
        fh.ActivationCache({}).save(tmp_path / "no" / "folder")


# Misuse


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"keep": "first"}, ValueError, "keep is 'last', 'all' or a number of calls, got 'first'"),
        ({"keep": 0}, ValueError, "keep is at least 1, got 0"),
        ({"keep": -1}, ValueError, "keep is at least 1"),
        ({"keep": True}, fh.HookTypeError, "keep is 'last', 'all' or a number .* got bool"),
        ({"keep": 1.0}, fh.HookTypeError, "got float"),
        ({"keep": None}, fh.HookTypeError, "got NoneType"),
        ({"max_bytes": 0}, ValueError, "max_bytes is at least 1, got 0"),
        ({"max_bytes": True}, fh.HookTypeError, "max_bytes is a whole number, got bool"),
        ({"max_bytes": 2.0**30}, fh.HookTypeError, "max_bytes is a whole number, got float"),
        ({"max_bytes": "1GB"}, fh.HookTypeError, "max_bytes is a whole number, got str"),
        ({"copy": "deep"}, ValueError, "copy is checked, clone or ref, got 'deep'"),
        ({"copy": True}, ValueError, "copy is checked, clone or ref, got True"),
        ({"copy": []}, ValueError, "copy is checked, clone or ref"),
        ({"slice": 1.5}, fh.HookTypeError, "slice is what a tensor can be indexed by, got float"),
        ({"slice": "0"}, fh.HookTypeError, "got str"),
        ({"slice": True}, fh.HookTypeError, "got bool"),
        ({"slice": (0, "a")}, fh.HookTypeError, "got str"),
        ({"slice": [1.5]}, fh.HookTypeError, "got float"),
        ({"slice": slice(0.5)}, fh.HookTypeError, "bounds of a slice .* got float"),
        ({"slice": slice(None, None, -1)}, ValueError, "step .* is at least 1, got -1"),
        ({"inputs": 1}, fh.HookTypeError, "inputs is a bool, got int"),
        ({"detach": None}, fh.HookTypeError, "detach is a bool, got NoneType"),
        ({"grads": "yes"}, fh.HookTypeError, "grads is a bool, got str"),
        ({"stop": "0"}, fh.HookTypeError, "stop is a bool, got str"),
        ({"output_index": True}, fh.HookTypeError, "output_index is .* got bool"),
        ({"dtype": "float16"}, fh.HookTypeError, "dtype is a torch.dtype, got str"),
        ({"dtype": float}, fh.HookTypeError, "dtype is a torch.dtype, got type"),
        ({"device": "nowhere"}, RuntimeError, "nowhere"),
        ({"unknown": 1}, TypeError, "unknown"),
    ],
)
def test_wrong_options_are_refused_where_they_enter(
    model: nn.Sequential, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        fh.capture(model, **options)
    assert_plain(model)


@pytest.mark.parametrize("what", ["nope", [], nn.Conv2d, re.compile("nope"), lambda *_: False])
def test_an_empty_selection_is_refused(model: nn.Sequential, what: Any) -> None:
    with pytest.raises(fh.SelectionError):
        fh.capture(model, what)


def test_numbers_of_any_size_are_taken(model: nn.Sequential, x: Tensor) -> None:
    with fh.capture(model, "0", keep=2**80, max_bytes=2**80) as acts:
        model(x)
    assert len(acts["0"]) == 1


def test_a_capture_is_entered_once_and_left_once(model: nn.Sequential, x: Tensor) -> None:
    with fh.instrument(model):
        capture = fh.capture(model, "0")
        with capture as acts:
            model(x)
            with pytest.raises(fh.HookError, match="a capture is entered once"), capture:
                pytest.fail("it was entered")
        with pytest.raises(fh.HookError, match="a capture is entered once"), capture:
            pytest.fail("it was entered")
        with pytest.raises(fh.HookError, match="left before"):
            capture.__exit__(None, None, None)
        # What others hold is theirs.
        fired: list[int] = []
        model[0].register_forward_hook(lambda *_: fired.append(1))
        model(x)
    assert fired == [1]
    assert list(acts) == ["0"]
    assert_plain(model)


def test_leaving_elsewhere_is_refused_and_changes_nothing(model: nn.Sequential, x: Tensor) -> None:
    capture = fh.capture(model, "0")
    with capture as acts, ThreadPoolExecutor(1) as executor:
        with pytest.raises(fh.HookError, match="left where it was entered"):
            executor.submit(capture.__exit__, None, None, None).result(LIMIT)
        model(x)
    assert torch.equal(acts["0"], model[0](x))
    assert_plain(model)


def test_leaving_out_of_order_leaves_that_capture_alone(model: nn.Sequential, x: Tensor) -> None:
    outer, inner = fh.capture(model, "0"), fh.capture(model, "0")
    first = outer.__enter__()
    model(x)
    second = inner.__enter__()
    with pytest.raises(fh.HookError, match="left all the same"):
        outer.__exit__(None, None, None)
    model(2 * x)
    inner.__exit__(None, None, None)
    assert torch.equal(first["0"], model[0](x))
    assert torch.equal(second["0"], model[0](2 * x))
    assert_plain(model)


def test_a_module_that_cannot_be_instrumented_leaves_nothing_behind(x: Tensor) -> None:
    with warnings.catch_warnings(action="ignore"):
        model = nn.Sequential(nn.Linear(3, 3), torch.jit.script(nn.ReLU()))
    with pytest.raises(fh.HookError, match=r"cannot be instrumented: 1 .*TorchScript"):
        fh.capture(model).__enter__()
    assert type(model[0]) is nn.Linear
    with fh.scope() as s, fh.capture(model, "0") as acts:
        model(x)
    assert s.closed
    assert "0" in acts


# Contexts and threads


def test_another_context_is_not_captured(model: nn.Sequential, x: Tensor) -> None:
    with ThreadPoolExecutor(1) as executor:
        executor.submit(int).result(LIMIT)  # there before the capture
        with fh.capture(model, "0") as outer, fh.scope() as s:
            # The captures around a scope come along with it.
            executor.submit(s.wrap(model), x).result(LIMIT)
            executor.submit(model, 2 * x).result(LIMIT)
    assert torch.equal(outer["0"], model[0](x))


def test_tasks_capture_their_own(model: nn.Sequential) -> None:
    async def use(number: int) -> bool:
        x = torch.full((1, 3), float(number))
        with fh.capture(model, "0") as acts:
            await asyncio.sleep(0)
            await asyncio.to_thread(model, x)
            await asyncio.sleep(0)
        return torch.equal(acts["0"], model[0](x))

    async def main() -> list[bool]:
        return await asyncio.gather(*map(use, range(10)))

    assert asyncio.run(main()) == [True] * 10
    assert_plain(model)


@pytest.mark.usefixtures("switch_often")
def test_threads_that_capture_a_plain_model_at_once_get_their_own_and_put_it_back(
    model: nn.Sequential,
) -> None:
    start = threading.Barrier(4, timeout=LIMIT)
    xs = [torch.full((1, 3), float(number)) for number in range(4)]
    expected = [model[0](x) for x in xs]
    right: list[int] = []
    failed: list[BaseException] = []

    def work(number: int) -> None:
        start.wait()
        try:
            for turn in range(60):
                stop = turn % 2 == 0
                with fh.capture(model, ["0", "1"], stop=stop) as acts:
                    assert (model(xs[number]) is fh.STOPPED) == stop
                right.append(torch.equal(acts["0"], expected[number]))
        except BaseException as error:  # noqa: BLE001 (told below)
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert failed == []
    assert right == [True] * 240
    assert_plain(model)


def test_exceptions_in_the_model_leave_nothing_behind(model: nn.Sequential, x: Tensor) -> None:
    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    with (
        pytest.raises(KeyboardInterrupt),
        fh.scope() as s,
        fh.capture(model) as acts,
        fh.register(model, "1", fail, scope=s),
    ):
        model(x)
    assert list(acts) == ["0"]
    assert_plain(model)
    assert torch.equal(model(x), model(x))


# Lifetimes


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"copy": "clone", "keep": "all"},
        {"slice": 0, "dtype": torch.float64},
        {"grads": True},
        {"grads": True, "inputs": True, "dtype": torch.float64},
        {"detach": False},
        {"stop": True},
        {"max_bytes": 81},
    ],
)
def test_captures_leave_no_tensor_alive(
    model: nn.Sequential, x: Tensor, options: dict[str, Any]
) -> None:
    freed: list[weakref.ref[Tensor]] = []
    gc.collect()
    gc.disable()  # at once, not when the collector comes by
    try:
        for _ in range(125):
            with fh.scope() as s, fh.capture(model, "2", **options) as acts:
                s.wrap(model)(x)
                freed += map(weakref.ref, tensors_of(acts["2"]))
            del acts, s
        alive = sum(each() is not None for each in freed)
    finally:
        gc.enable()
    assert len(freed) >= 125
    assert alive == 0
    assert_plain(model)


def test_undetached_captures_with_gradients_leave_no_tensor_alive(
    model: nn.Sequential, x: Tensor
) -> None:
    freed: list[weakref.ref[Tensor]] = []
    for _ in range(5):
        with fh.capture(model, "2", grads=True, detach=False) as acts:
            model(x).sum().backward()
        freed += map(weakref.ref, tensors_of(acts["2"]))
        del acts
    gc.collect()
    assert sum(each() is not None for each in freed) == 0


def test_an_input_that_lives_on_does_not_keep_what_was_captured(model: nn.Sequential) -> None:
    x = torch.ones(1, 3, requires_grad=True)
    freed: list[weakref.ref[Tensor]] = []
    for _ in range(5):
        with fh.capture(model, "0", inputs=True, grads=True, copy="clone") as acts:
            model(x).sum().backward()
        freed += map(weakref.ref, tensors_of(acts["0"]))
        del acts
    gc.collect()
    assert sum(each() is not None for each in freed) == 0


def test_a_cache_does_not_keep_the_model_alive(x: Tensor) -> None:
    model = nn.Sequential(nn.Linear(3, 4))
    freed = weakref.ref(model)
    with fh.capture(model, "0", grads=True) as acts, torch.no_grad():
        model(x)
    del model
    gc.collect()
    assert freed() is None
    assert acts["0"].shape == (5, 4)


# On a GPU


@pytest.fixture
def on_gpu() -> tuple[nn.Sequential, Tensor]:
    model = nn.Sequential(nn.Linear(1_024, 1_024), nn.ReLU(inplace=True)).cuda()
    return model, torch.randn(4_096, 1_024, device="cuda")


@pytest.mark.cuda
@pytest.mark.parametrize("options", [{}, {"slice": (slice(None), 0)}, {"dtype": torch.bfloat16}])
def test_copies_to_the_cpu_are_complete_when_they_are_read(
    on_gpu: tuple[nn.Sequential, Tensor], options: dict[str, Any]
) -> None:
    model, x = on_gpu
    for _ in range(5):
        with torch.no_grad(), fh.capture(model, "0", device="cpu", **options) as acts:
            torch.cuda._sleep(50_000_000)
            model(x)  # writes in place to what was captured
            read = acts["0"].clone()
        torch.cuda.synchronize()
        expected = model[0](x)[options.get("slice", ...)].to(options.get("dtype", torch.float32))
        assert acts["0"].is_pinned()
        assert torch.equal(read, expected.cpu())


@pytest.mark.cuda
def test_copies_to_the_cpu_do_not_wait_for_the_gpu(on_gpu: tuple[nn.Sequential, Tensor]) -> None:
    model, x = on_gpu
    with torch.no_grad(), fh.capture(model, "0", device="cpu") as acts:
        for _ in range(3):
            model(x)
            acts["0"]  # memory is pinned when it is first needed, and that does wait
        torch.cuda._sleep(2_000_000_000)
        model(x)
        assert not torch.cuda.current_stream().query()
    assert torch.equal(acts["0"], model[0](x).cpu())


@pytest.mark.cuda
def test_what_is_written_after_the_capture_does_not_reach_the_copy(
    on_gpu: tuple[nn.Sequential, Tensor],
) -> None:
    model, x = on_gpu
    with torch.no_grad(), fh.capture(model, "0", device="cpu", keep="all") as acts:
        for factor in range(1, 6):
            out = model(factor * x)
            out.zero_()
    for factor, kept in enumerate(acts["0"], 1):
        assert torch.equal(kept, model[0](factor * x).cpu())


@pytest.mark.cuda
def test_threads_read_complete_copies(on_gpu: tuple[nn.Sequential, Tensor]) -> None:
    model, x = on_gpu
    expected = model[0](x).cpu()
    with torch.no_grad(), fh.capture(model, "0", device="cpu") as acts:
        for _ in range(5):
            torch.cuda._sleep(50_000_000)
            model(x)
            with ThreadPoolExecutor(4) as executor:
                reads = [executor.submit(acts.__getitem__, "0") for _ in range(4)]
            assert all(torch.equal(read.result(LIMIT), expected) for read in reads)


@pytest.mark.cuda
@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_a_device_without_a_number_is_the_same_device(
    on_gpu: tuple[nn.Sequential, Tensor], device: str
) -> None:
    model, x = on_gpu
    with fh.capture(model, "0", device=device, copy="clone") as acts:
        model(x)
    assert torch.equal(acts["0"], model[0](x))  # not what ReLU made of it
    with fh.capture(model, "0", device=device, slice=0) as acts:
        model(x)
    assert acts["0"].untyped_storage().nbytes() == acts["0"].nbytes


@pytest.mark.cuda
def test_gradients_go_to_the_cpu_too(on_gpu: tuple[nn.Sequential, Tensor]) -> None:
    model, x = on_gpu
    with fh.capture(model, "0", device="cpu", grads=True) as acts:
        out = model(x)
        out.sum().backward()
    assert torch.equal(acts.grads["0"], (out > 0).float().cpu())
    assert acts.to("cuda")["0"].is_cuda


@pytest.mark.cuda
def test_a_checkpointed_region_is_recomputed_with_the_scopes_hooks_on_a_gpu() -> None:
    fired: list[str] = []
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).cuda()
    x = torch.ones(2, 4, device="cuda", requires_grad=True)
    with fh.scope() as s:
        fh.register(model, "0", lambda *_: fired.append("x"), phase="forward_pre", scope=s)
        # Autograd's threads for GPUs are in no context.
        out = torch.utils.checkpoint.checkpoint(
            model,
            x,
            use_reentrant=False,
            context_fn=lambda: (contextlib.nullcontext(), s.activate()),
        )
        out.sum().backward()
    assert fired == ["x", "x"]

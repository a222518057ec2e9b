"""Interventions against their formulas in torch."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from collections import UserDict
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.masked import masked_tensor

import ferrohook as fh
from ferrohook.compat import transformer_lens as points
from ferrohook.effects.parts import change_part
from support.modules import Echo
from support.plans import Net, by_hand, part_by_hand

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH = 5
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
MAKERS: dict[str, Callable[..., Any]] = {
    "add": fh.Add,
    "add_scaled": lambda v, **part: fh.Add(v, -2.5, **part),
    "scale": lambda v, **part: fh.Scale(0.3, **part),
    "ablate": fh.Ablate,
    "clamp": lambda v, **part: fh.Clamp(v, -0.2, 0.1, **part),
    "clamp_low": lambda v, **part: fh.Clamp(v, low=0.2, **part),
    "clamp_high": lambda v, **part: fh.Clamp(v, high=-0.2, **part),
    "replace": fh.Replace,
    "zero": lambda v, **part: fh.Zero(**part),
}
WITH_VECTOR = [name for name in MAKERS if name not in {"scale", "zero"}]
kinds = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
with_vector = pytest.mark.parametrize(
    "make", [MAKERS[name] for name in WITH_VECTOR], ids=WITH_VECTOR
)


def applied(intervention: Any, value: Any, phase: str = "forward") -> Any:
    """The value, passed through a module with the intervention."""
    model = nn.Sequential(Echo())
    with fh.register(model, "0", intervention, phase=phase):
        return model(value)


# --- Formulas -----------------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (2, 1, 3)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("phase", ["forward", "forward_pre"])
def test_formulas(make: Any, leading: tuple[int, ...], dtype: torch.dtype, phase: str) -> None:
    for vector_dtype in (dtype, torch.float32):
        intervention = make(torch.randn(WIDTH).to(vector_dtype))
        x = torch.randn(*leading, WIDTH).to(dtype)
        before = x.clone()
        for _ in range(2):  # the second time with the vector cast before
            y = applied(intervention, x, phase)
            assert y.dtype == dtype
            assert y.shape == x.shape
            assert torch.equal(y, by_hand(intervention, x))
        assert torch.equal(x, before)


@with_vector
def test_a_vector_meets_several_dtypes(make: Any) -> None:
    intervention = make(torch.randn(WIDTH))
    xs = [torch.randn(2, WIDTH).to(dtype) for dtype in DTYPES] * 2
    for x in xs:
        assert torch.equal(applied(intervention, x), by_hand(intervention, x))


def test_meaning() -> None:
    x, d = torch.randn(4, WIDTH, dtype=torch.float64), torch.randn(WIDTH, dtype=torch.float64)
    unit = d / d.norm()
    assert torch.allclose(applied(fh.Ablate(d), x) @ unit, torch.zeros(4, dtype=torch.float64))
    clamped = applied(fh.Clamp(d, -0.1, 0.1), x)
    assert torch.allclose(clamped @ unit, (x @ unit).clamp(-0.1, 0.1))
    assert torch.allclose(applied(fh.Ablate(d), clamped), applied(fh.Ablate(d), x))


@kinds
def test_gradients_of_the_input(make: Any) -> None:
    intervention = make(torch.randn(WIDTH))
    grads = []
    for function in (applied, by_hand):
        torch.manual_seed(3)
        x = torch.randn(2, WIDTH, requires_grad=True)
        for _ in range(2):
            args = (intervention, x)
            (function(*args) * torch.randn(2, WIDTH) + x).sum().backward()  # type: ignore[operator]
        grads.append(x.grad)
    assert torch.equal(grads[0], grads[1])


@with_vector
def test_gradients_of_the_vector(make: Any) -> None:
    grads = []
    for function in (applied, by_hand):
        torch.manual_seed(3)
        vector = torch.randn(WIDTH, requires_grad=True)
        intervention = make(vector)
        x = torch.randn(2, WIDTH)
        for _ in range(2):
            function(intervention, x).square().sum().backward()  # type: ignore[operator]
        grads.append(vector.grad)
    assert grads[0].norm() > 0
    assert torch.equal(grads[0], grads[1])


@with_vector
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_trained_vector_is_read_in_each_call(make: Any, mode: Any) -> None:
    vector = torch.randn(WIDTH, requires_grad=True)
    intervention = make(vector)
    x = torch.randn(2, WIDTH)
    with mode():
        assert torch.equal(applied(intervention, x), by_hand(intervention, x))
    applied(intervention, x).sum().backward()
    assert vector.grad is not None
    with torch.no_grad():
        vector += torch.randn(WIDTH)
    assert torch.equal(applied(intervention, x), by_hand(intervention, x))


@kinds
@pytest.mark.parametrize("made_inside", [True, False])
def test_training_after_inference_mode(make: Any, made_inside: bool) -> None:
    vector = torch.randn(WIDTH)
    with torch.inference_mode(made_inside):
        intervention = make(vector)
    with torch.inference_mode():
        x = torch.randn(2, WIDTH)
        assert torch.equal(applied(intervention, x), by_hand(intervention, x))
    x = torch.randn(2, WIDTH, requires_grad=True)
    (applied(intervention, x) + x).square().sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("length", [1e-17, 1e17])
def test_a_direction_may_be_long_or_short(length: float) -> None:
    direction, x = torch.randn(WIDTH), torch.randn(2, WIDTH)
    for make in (fh.Ablate, lambda v: fh.Clamp(v, -0.2, 0.1)):
        long = applied(make(direction * length), x)
        torch.testing.assert_close(long, applied(make(direction), x))


@kinds
def test_propagation_of_shapes_leaves_nothing_fake(make: Any) -> None:
    intervention, x = make(torch.randn(WIDTH)), torch.randn(2, WIDTH)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert isinstance(applied(intervention, mode.from_tensor(x)), FakeTensor)
    assert torch.equal(applied(intervention, x), by_hand(intervention, x))


def test_an_exported_model_keeps_its_interventions() -> None:
    model, add, x = nn.Sequential(nn.Identity()), fh.Add(torch.ones(WIDTH)), torch.randn(WIDTH)
    with fh.register(model, "0", add):
        exported = torch.export.export(model, (x,), strict=False).module()
        assert torch.equal(exported(x), x + 1)
        assert torch.equal(model(x), x + 1)


@kinds
def test_autocast(make: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    plain = copy.deepcopy(model)
    intervention = make(torch.randn(WIDTH))
    x = torch.randn(3, WIDTH)
    with torch.autocast("cpu", torch.bfloat16), fh.register(model, "0", intervention):
        y = model(x)
        expected = by_hand(intervention, plain(x))
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, expected)


# --- Parts --------------------------------------------------------------------------------------


class Named(NamedTuple):
    hidden: Tensor
    other: Tensor


@dataclasses.dataclass(frozen=True)
class Record:
    hidden: Tensor
    other: Tensor


@kinds
def test_parts(make: Any) -> None:
    x, other, vector = torch.randn(2, WIDTH), torch.randn(2, WIDTH), torch.randn(WIDTH)
    values: list[tuple[Any, Any, Callable[[Any], tuple[Any, Any]]]] = [
        ((x, other), 0, lambda value: (value[0], value[1])),
        ((other, x), -1, lambda value: (value[1], value[0])),
        ([x, other], 0, lambda value: (value[0], value[1])),
        ([other, x], -1, lambda value: (value[1], value[0])),
        ({"hidden": x, "other": other}, "hidden", lambda value: (value["hidden"], value["other"])),
        (
            UserDict(hidden=x, other=other),
            "hidden",
            lambda value: (value["hidden"], value["other"]),
        ),
        (Named(x, other), 0, tuple),  # type: ignore[list-item]
        (Named(x, other), "hidden", tuple),  # type: ignore[list-item]
        (Record(x, other), "hidden", lambda value: (value.hidden, value.other)),
    ]
    for value, part, read in values:
        intervention = make(vector, output_index=part)
        by_native = applied(intervention, value)
        by_twin = change_part(value, part, lambda tensor: by_hand(intervention, tensor))  # noqa: B023 (called at once)
        for changed in (by_native, by_twin):
            assert type(changed) is type(value)
            assert changed is not value
            hidden, same = read(changed)
            assert same is other
            assert torch.equal(hidden, by_hand(intervention, x))
            assert read(value)[0] is x


@kinds
@pytest.mark.parametrize("part", ["last_hidden_state", 0])
def test_parts_of_a_model_output(make: Any, part: Any) -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    x, other = torch.randn(2, WIDTH), torch.randn(2, WIDTH)
    value = outputs.BaseModelOutputWithPast(last_hidden_state=x, hidden_states=(other,))
    intervention = make(torch.randn(WIDTH), output_index=part)
    changed = applied(intervention, value)
    assert type(changed) is type(value)
    for hidden in (changed[0], changed.last_hidden_state, changed["last_hidden_state"]):
        assert torch.equal(hidden, by_hand(intervention, x))
    assert changed.hidden_states[0] is other
    assert value.last_hidden_state is x


@kinds
def test_the_sum_of_two_streams(make: Any) -> None:
    hidden, residual = torch.randn(2, WIDTH), torch.randn(2, WIDTH)
    intervention = make(torch.randn(WIDTH), output_index="sum")
    changed = applied(intervention, (hidden, residual))
    expected = part_by_hand(intervention, (hidden, residual))
    assert torch.equal(changed[0], expected[0])
    assert changed[1] is residual
    assert torch.allclose(sum(changed), by_hand(intervention, hidden + residual), atol=1e-6)


def test_inputs_by_position() -> None:
    class Pair(nn.Module):
        def forward(self, x: Tensor, y: Tensor, *, factor: float = 1.0) -> Tensor:
            return x + 10 * y * factor

    model = nn.ModuleDict({"pair": Pair()})
    x, y = torch.ones(2), torch.ones(2)
    with fh.register(model, "pair", fh.Scale(3.0, output_index=1), phase="forward_pre"):
        assert model["pair"](x, y, factor=2.0).tolist() == [61.0, 61.0]
        with pytest.raises(
            fh.HookTypeError, match=r"`Scale.* of `pair` \(Pair\).*changes positional"
        ):
            model["pair"](x=x, y=y)
    with (
        fh.register(model, "pair", fh.Scale(3.0), phase="forward_pre"),
        pytest.raises(fh.HookTypeError, match="output_index"),
    ):
        model["pair"](x, y)


# --- Places -------------------------------------------------------------------------------------


@kinds
def test_in_scopes_and_plans_and_on_points(make: Any) -> None:
    intervention = make(torch.randn(WIDTH))
    x = torch.randn(2, WIDTH)
    model = nn.Sequential(Echo())
    with fh.scope() as scope:
        fh.register(model, "0", intervention, scope=scope)
        assert torch.equal(model(x), by_hand(intervention, x))
    assert model(x) is x
    plan = fh.Plan(fh.on("0", intervention))
    with plan.prepare(model) as prepared, prepared.open():
        assert torch.equal(model(x), by_hand(intervention, x))
    assert model(x) is x
    hooked = fh.HookedModule(Echo())
    handle = hooked.register_forward_hook(intervention)
    assert torch.equal(hooked(x), by_hand(intervention, x))
    handle.remove()
    point = points.HookPoint()
    with fh.register(point, "", intervention):
        assert torch.equal(point(x), by_hand(intervention, x))
    assert point(x) is x


def test_run_takes_interventions() -> None:
    model = Net(WIDTH)
    plain = copy.deepcopy(model)
    intervention = fh.Ablate(torch.randn(WIDTH))
    x = torch.randn(2, WIDTH)
    plain.embed.register_forward_hook(lambda _m, _a, output: by_hand(intervention, output))
    assert torch.equal(fh.run(model, x, hooks={"embed": intervention}).output, plain(x))


# --- Bad input ----------------------------------------------------------------------------------


@with_vector
@pytest.mark.parametrize("shape", [(2, WIDTH + 1), (WIDTH, 2), (2, 1), ()])
def test_a_wrong_width_names_hook_and_module(make: Any, shape: tuple[int, ...]) -> None:
    model = nn.Sequential(Echo())
    with fh.register(model, "0", make(torch.randn(WIDTH))):
        with pytest.raises(fh.HookTypeError, match=rf"width of {WIDTH}") as caught:
            model(torch.randn(shape))
        assert "Echo" in str(caught.value)
        with pytest.raises(
            fh.HookTypeError, match=r"is a tuple: choose a tensor in it with output_index=0"
        ):
            model((torch.randn(2, WIDTH),))


@with_vector
def test_a_value_that_is_not_floating_point_is_refused(make: Any) -> None:
    with pytest.raises(fh.HookTypeError, match=r"floating-point tensors, got torch.int64"):
        applied(make(torch.randn(WIDTH)), torch.ones(2, WIDTH, dtype=torch.long))


def test_a_missing_part_is_named() -> None:
    record, three = Record(*torch.ones(2, 1)), (torch.ones(1),) * 3
    for part, value in ((2, (1, 2)), ("no", {"a": 1}), ("no", record), ("sum", three)):
        with pytest.raises(fh.SelectionError, match=f"has no output_index {part!r}"):
            applied(fh.Scale(1.0, output_index=part), value)
    with pytest.raises(fh.HookTypeError, match="a NoneType"):
        applied(fh.Scale(1.0, output_index=0), (None, 1))


def test_a_shape_that_would_grow_is_refused() -> None:
    vector = torch.ones(3, WIDTH)
    for make in (fh.Add, fh.Replace):
        with pytest.raises((fh.HookTypeError, RuntimeError)):
            applied(make(vector), torch.ones(WIDTH))
        assert applied(make(vector), torch.zeros(2, 3, WIDTH)).shape == (2, 3, WIDTH)


MASKS = torch.tensor([[True, False, True], [True, True, False]])


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
@pytest.mark.parametrize("make", [lambda: fh.Add(torch.ones(3)), lambda: fh.Scale(2.0)])
def test_a_masked_tensor_stays_one(make: Any) -> None:
    numbers, model = torch.randn(2, 3), nn.Sequential(Echo())
    with fh.register(model, "0", make()):
        changed = model(masked_tensor(numbers, MASKS))
    assert torch.equal(changed.get_mask(), MASKS)
    assert torch.equal(changed.get_data()[MASKS], make().apply(numbers)[MASKS])


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
@pytest.mark.filterwarnings("ignore:zeros_like is not implemented")
@pytest.mark.parametrize(
    "make",
    [
        fh.Zero,
        lambda: fh.Ablate(torch.ones(3)),
        lambda: fh.Clamp(torch.ones(3), 0.0, 1.0),
        lambda: fh.Replace(torch.ones(3)),
    ],
)
def test_a_class_of_tensors_that_lacks_an_operation_is_refused(make: Any) -> None:
    """`MaskedTensor` has no `zeros_like`, no `expand_as`, and none of tensors of unlike masks."""
    model = nn.Sequential(Echo())
    refused = "a MaskedTensor does not support an operation .*change it with a function"
    with fh.register(model, "0", make()), pytest.raises(fh.HookTypeError, match=refused) as caught:
        model(masked_tensor(torch.randn(2, 3), MASKS))
    assert caught.value.__cause__ is not None
    assert "of `0` (Echo)" in str(caught.value)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: fh.Add([1.0]), fh.HookTypeError, "vector of Add must be a tensor, got"),
        (lambda: fh.Add(torch.ones(2, dtype=torch.int)), fh.HookTypeError, "floating-point"),
        (lambda: fh.Add(torch.ones(2), "1"), fh.HookTypeError, "scale of Add must be a number"),
        (lambda: fh.Add(torch.ones(2), True), fh.HookTypeError, "scale of Add must be a number"),
        (lambda: fh.Scale(float("nan")), ValueError, "factor of Scale.*NaN"),
        (lambda: fh.Scale(10**400), ValueError, "factor of Scale.*a float can hold"),
        (lambda: fh.Ablate(torch.ones(2, 2)), fh.HookTypeError, "one dimension"),
        (lambda: fh.Ablate(torch.zeros(2)), ValueError, "from 1e-18 to 1e"),
        (lambda: fh.Ablate(torch.full((2,), torch.nan)), ValueError, "got nan"),
        (lambda: fh.Ablate(torch.full((2,), torch.inf)), ValueError, "got inf"),
        (lambda: fh.Clamp(torch.full((2,), 1e30), 0), ValueError, "got 1.41421e"),
        (lambda: fh.Clamp(torch.ones(2)), ValueError, "low, high or both"),
        (lambda: fh.Clamp(torch.ones(2), 2, 1), ValueError, "low must not exceed high"),
        (lambda: fh.Replace(0.0), fh.HookTypeError, "value of Replace"),
        (lambda: fh.Zero(output_index=True), fh.HookTypeError, "output_index of Zero"),
        (lambda: fh.Zero(output_index=1.5), fh.HookTypeError, "output_index of Zero"),
    ],
)
def test_bad_arguments_are_refused(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


# --- Data ---------------------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_copies_are_equal(make: Any, copied: Any) -> None:
    for vector in (torch.randn(WIDTH), torch.randn(WIDTH).to(torch.bfloat16)):
        one = make(vector, output_index="sum")
        other = copied(one)
        assert type(other) is type(one)
        assert (other == one, hash(other) == hash(one), repr(other) == repr(one)) == (True,) * 3
        assert other != make(vector)
        pair = torch.randn(2, WIDTH), torch.randn(2, WIDTH)
        assert torch.equal(applied(other, pair)[0], applied(one, pair)[0])


def test_equality_is_by_content() -> None:
    vector = torch.randn(WIDTH)
    assert fh.Add(vector) == fh.Add(vector.clone())
    assert fh.Add(vector) != fh.Add(vector, 2)
    assert fh.Add(vector) != fh.Add(vector.double())
    assert fh.Add(vector) != fh.Add(vector[None])
    assert fh.Ablate(vector) != fh.Add(vector)
    assert fh.Add(vector) != vector
    assert len({fh.Zero(), fh.Zero(), fh.Zero(output_index=0)}) == 2
    trained = vector.clone().requires_grad_()
    assert fh.Add(trained) == fh.Add(trained)
    assert fh.Add(trained) != fh.Add(trained.detach().clone().requires_grad_())


def test_a_vector_of_no_dimension() -> None:
    one, other = fh.Add(torch.tensor(2.0)), fh.Add(torch.tensor(2.0))
    assert one == other
    assert hash(one) == hash(other)
    assert one != fh.Add(torch.tensor(3.0))
    assert fh.Plan(fh.on("0", one)) == fh.Plan(fh.on("0", other))
    assert applied(one, torch.zeros(3)).tolist() == [2.0] * 3
    assert applied(fh.Replace(torch.tensor(2.0)), torch.zeros(3)).tolist() == [2.0] * 3


def test_reprs() -> None:
    vector = torch.ones(3)
    assert repr(fh.Add(vector, 2)) == "Add(vector=<3 float32>, scale=2.0)"
    assert repr(fh.Clamp(vector, low=0)) == "Clamp(direction=<3 float32>, low=0.0, high=None)"
    assert repr(fh.Replace(torch.tensor(1.0).double())) == "Replace(value=<scalar float64>)"
    assert repr(fh.Zero(output_index="sum")) == "Zero(output_index='sum')"


def test_interventions_are_immutable() -> None:
    vector = torch.ones(WIDTH)
    intervention = fh.Add(vector)
    for name in ("values", "output_index", "other"):
        with pytest.raises(AttributeError, match="Add is immutable: create a new one"):
            setattr(intervention, name, None)
    vector.zero_()
    assert applied(intervention, torch.zeros(WIDTH)).tolist() == [1.0] * WIDTH


@pytest.mark.parametrize(
    ("intervention", "expected"),
    [
        (fh.Add, "vector, scale, output_index"),
        (fh.Scale, "factor, output_index"),
        (fh.Ablate, "direction, output_index"),
        (fh.Clamp, "direction, low, high, output_index"),
        (fh.Replace, "value, output_index"),
        (fh.Zero, "output_index"),
    ],
)
def test_interventions_have_signatures(intervention: Any, expected: str) -> None:
    assert ", ".join(inspect.signature(intervention).parameters) == expected
    with pytest.raises(TypeError, match="foo"):
        intervention(foo=1)


def test_the_base_of_interventions_is_abstract() -> None:
    with pytest.raises(fh.HookTypeError, match="Intervention is abstract: use a kind such as Add"):
        fh.Intervention()

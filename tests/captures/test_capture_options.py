"""Options of captures: conversions, `keep`, gradients and the byte budget."""

from __future__ import annotations

import copy
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import ferrohook as fh
from support.capture import Twice, assert_plain, captured, tensors_of
from support.limits import LIMIT
from support.modules import Returning
from support.numbers import close

if TYPE_CHECKING:
    from pathlib import Path

# detach, device, dtype, slice


def test_gradients_flow_through_undetached_captures(model: nn.Sequential, x: Tensor) -> None:
    with fh.capture(model, "0", detach=False) as acts:
        model(x)
    (grad,) = torch.autograd.grad(acts["0"].sum(), model[0].weight)
    assert close(grad, x.sum(0).expand(4, 3))


@pytest.mark.parametrize(
    "options", [{"copy": "clone"}, {"dtype": torch.float64}, {"slice": 0}, {"slice": (..., [1])}]
)
def test_gradients_flow_through_undetached_copies(
    model: nn.Sequential, x: Tensor, options: dict[str, Any]
) -> None:
    with fh.capture(model, "0", detach=False, **options) as acts:
        model(x)
    acts["0"].sum().backward()
    assert model[0].weight.grad is not None


def test_dtype_casts_floating_point_tensors_only() -> None:
    value = (torch.ones(2), torch.ones(2, dtype=torch.int64), torch.ones(1, dtype=torch.bool))
    kept = captured(value, dtype=torch.bfloat16)
    assert [each.dtype for each in kept] == [torch.bfloat16, torch.int64, torch.bool]


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
def test_a_slice_of_a_tensor_that_wraps_others_is_a_copy() -> None:
    wrapper = torch.masked.masked_tensor(torch.arange(3.0), torch.ones(3, dtype=torch.bool))
    kept = captured(wrapper, slice=slice(0, 2))
    wrapper.get_data().zero_()
    assert kept.get_data().tolist() == [0, 1]


def test_device_moves_tensors() -> None:
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
def test_a_slice_equals_indexing_and_owns_its_memory(index: Any) -> None:
    big = torch.arange(4_000.0).view(4, 1_000)
    kept = captured(big, slice=index)
    assert torch.equal(kept, big[index])
    assert kept.untyped_storage().nbytes() == kept.nbytes
    before = kept.clone()
    big.zero_()
    assert torch.equal(kept, before)


@pytest.mark.parametrize("options", [{"device": "cpu"}, {"dtype": torch.float32}, {"slice": ...}])
def test_clone_copies_without_a_conversion(options: dict[str, Any]) -> None:
    value = torch.ones(3)
    kept = captured(value, copy="clone", **options)
    value.zero_()
    assert kept.tolist() == [1, 1, 1]


@pytest.mark.parametrize("options", [{"device": "cpu"}, {"dtype": torch.float32}])
def test_checked_detects_changes_without_a_conversion(options: dict[str, Any]) -> None:
    value = torch.ones(3)
    module = Returning(lambda: value)
    with fh.capture(module, "", **options) as acts:
        module()
    assert acts[""].data_ptr() == value.data_ptr()
    value.zero_()
    with pytest.raises(fh.StaleActivationError):
        acts[""]


def test_a_slice_that_does_not_fit_fails_the_call(model: nn.Sequential, x: Tensor) -> None:
    with fh.capture(model, "0", slice=7):
        with pytest.raises(IndexError) as error:
            model(x)
        assert any("forward hook" in note for note in error.value.__notes__)
        model(torch.randn(8, 3))
    assert_plain(model)


def test_slice_dtype_copy_and_keep_combine(model: nn.Sequential, x: Tensor) -> None:
    with fh.capture(
        model, ["0", "2"], slice=(slice(None), -1), dtype=torch.float64, copy="clone", calls=2
    ) as acts:
        for factor in (1, 2, 3):
            model(factor * x)
    assert [each.dtype for each in acts["2"]] == [torch.float64] * 2
    assert torch.equal(acts["2"][1], model(3 * x)[:, -1].double())
    assert torch.equal(acts["2"][0], model(2 * x)[:, -1].double())


# calls


@pytest.mark.parametrize(
    ("calls", "expected"),
    [("last", 12.0), ("all", [0.0, 2.0, 10.0, 12.0]), (1, [12.0]), (3, [2.0, 10.0, 12.0])],
)
def test_calls_selects_the_calls_of_a_module(calls: Any, expected: Any) -> None:
    model = Twice()
    with fh.capture(model, calls=calls) as acts:
        model(torch.tensor(0.0))
        model(torch.tensor(10.0))
    kept = acts["shared"]
    assert (kept if calls == "last" else [each.item() for each in kept]) == expected
    assert list(acts) == ["shared", "once", ""]


def test_calls_frees_the_outputs_of_older_calls() -> None:
    module = Returning(lambda: torch.empty(1))
    with fh.capture(module, "", calls=3) as acts:
        freed = [weakref.ref(module()) for _ in range(50)]
    assert [each() is not None for each in freed] == [False] * 47 + [True] * 3
    assert len(acts[""]) == 3


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse")
def test_the_bytes_of_a_sparse_tensor_are_those_of_its_parts(layout: torch.layout) -> None:
    value = torch.eye(100).to_sparse(layout=layout)
    assert captured(value, max_bytes=5_000) is value


# grads


def test_grads_equal_those_of_autograd(model: nn.Sequential, x: Tensor) -> None:
    with fh.capture(model, ["0", "2"], grads=True) as acts:
        out = model(x)
        with pytest.raises(fh.SelectionError, match=r"reached '0' yet: call backward\(\)"):
            acts.grads["0"]
        assert list(acts.grads) == []
        (out**2).sum().backward()
    hidden = model[0](x)
    (expected,) = torch.autograd.grad((model[2](model[1](hidden)) ** 2).sum(), hidden)
    assert close(acts.grads["0"], expected)
    assert close(acts.grads["2"], 2 * out)
    assert list(acts.grads) == ["0", "2"]
    assert not acts.grads["0"].requires_grad


def test_grads_arrive_after_leaving_and_match_their_calls(model: nn.Sequential) -> None:
    x = torch.ones(1, 3)
    with fh.capture(model, "0", grads=True, calls="all") as acts:
        outs = [model(x), model(2 * x)]
    outs[0].sum().backward()
    first, second = acts.grads["0"]
    kept = first.clone()
    assert second is None
    outs[1].sum().backward()
    assert torch.equal(acts.grads["0"][0], kept)
    assert acts.grads["0"][1] is not None


def test_the_gradient_of_an_input_does_not_share_memory_with_the_grad_attribute(
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


def test_grads_of_structures_are_lists_and_grads_of_tensors_are_tensors() -> None:
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


def test_grads_are_converted_like_the_tensors(model: nn.Sequential, x: Tensor) -> None:
    with fh.capture(model, "0", grads=True, dtype=torch.float64, slice=(0, [1, 2])) as acts:
        model(x).sum().backward()
    assert acts.grads["0"].dtype == torch.float64
    assert acts.grads["0"].shape == acts["0"].shape == (2,)


class _DoublesInPlace(torch.autograd.Function):
    """As kernels of libraries that save memory do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        del ctx
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        del ctx
        return grad.mul_(2)


@pytest.mark.parametrize("copy", ["checked", "clone", "ref"])
def test_a_backward_that_writes_to_its_gradient(copy: Any) -> None:
    t = torch.ones(2, requires_grad=True)
    module = Returning(lambda: _DoublesInPlace.apply(t))
    with fh.capture(module, "", grads=True, copy=copy) as acts:
        module().backward(torch.ones(2))
    if copy == "checked":
        with pytest.raises(
            fh.StaleActivationError, match=r"^the gradient of \(model\) was changed"
        ):
            acts.grads[""]
        assert "float32" in repr(acts.grads)
    else:
        assert acts.grads[""].tolist() == [1 if copy == "clone" else 2] * 2


@pytest.mark.parametrize("calls", ["last", "all"])
def test_a_gradient_that_is_not_there_raises_with_the_reason(
    model: nn.Sequential, x: Tensor, tmp_path: Path, calls: Any
) -> None:
    def check(reason: str, *caches: fh.ActivationCache) -> None:
        for acts in caches:
            with pytest.raises(fh.SelectionError, match=reason):
                acts.grads["0"]
            assert "0" not in acts.grads
            assert "0" not in dict(acts.grads)

    with torch.no_grad(), fh.capture(model, "0", grads=True, calls=calls) as acts:
        model(x)
    check("'0': autograd did not record it", acts)
    acts.save(tmp_path / "acts")
    check("reached '0' yet", fh.ActivationCache.load(tmp_path / "acts"), acts.to("cpu"))
    with fh.capture(model, "0", calls=calls) as acts:
        model(x).sum().backward()
    check("open the capture with grads=True", acts, copy.deepcopy(acts))
    with fh.capture(model, ["0", "2"], grads=True, calls=calls) as acts:
        model[2](model[0](x).detach()).sum().backward()
    check("reached '0': backward ran through '2', but not to it", acts)
    assert list(acts.grads) == ["2"]
    with fh.capture(model, ["0", "2"], grads=True, calls=calls) as acts:
        model(x)
    with pytest.raises(fh.SelectionError, match="'1' was not selected"):
        acts.grads["1"]
    plan = fh.Plan(fh.keep("0", calls=calls), fh.keep("2", grads=True, calls=calls))
    with plan.prepare(model) as prepared, prepared.open() as request:
        model(x).sum().backward()
    check("no gradients of '0' were captured: capture it with grads=True", request.acts)
    assert list(request.acts.grads) == ["2"]


def test_grads_of_a_backward_on_another_thread(model: nn.Sequential, x: Tensor) -> None:
    with fh.capture(model, "2", grads=True) as acts:
        out = model(x)
    with ThreadPoolExecutor(1) as executor:
        executor.submit(out.sum().backward).result(LIMIT)
    assert torch.equal(acts.grads["2"], torch.ones(5, 2))


# max_bytes


def test_an_exceeded_budget_ends_the_call_and_keeps_earlier_captures(
    model: nn.Sequential, x: Tensor
) -> None:
    # Module '1' ran and exceeded the budget; '' and '2' never ran.
    silent = pytest.warns(
        fh.errors.NeverFiredWarning, match=r"^\(model\), '2' were selected and never ran"
    )
    with silent, fh.capture(model, max_bytes=159) as acts:
        with pytest.raises(
            fh.errors.CaptureBudgetError, match=r"keeping 80 more bytes of .1. .*=159"
        ):
            model(x)
        assert (list(acts), acts.nbytes) == (["0"], 80)
        # The capture of the first call is replaced, so the second one fits.
        with pytest.raises(fh.errors.CaptureBudgetError):
            model(2 * x)
        assert torch.equal(acts["0"], model[0](2 * x))
    assert_plain(model)
    assert model(x).shape == (5, 2)


def test_a_budget_of_exactly_the_captured_bytes_suffices(model: nn.Sequential, x: Tensor) -> None:
    with fh.capture(model, max_bytes=80 + 80 + 40 + 40) as acts:
        for _ in range(3):
            model(x)
    assert acts.nbytes == 240
    with fh.capture(model, "0", max_bytes=3 * 80, calls="all") as acts:
        for _ in range(3):
            model(x)
        with pytest.raises(fh.errors.CaptureBudgetError):
            model(x)
    assert len(acts["0"]) == 3


def test_the_budget_counts_bytes_after_slicing_and_casting(model: nn.Sequential, x: Tensor) -> None:
    with fh.capture(model, "0", max_bytes=8, slice=0, dtype=torch.float16) as acts:
        model(x)
    assert acts.nbytes == 8


def test_the_budget_counts_gradients(model: nn.Sequential, x: Tensor) -> None:
    with (
        fh.capture(model, "0", max_bytes=100, grads=True),
        pytest.raises(fh.errors.CaptureBudgetError),
    ):
        model(x).sum().backward()


def test_captures_that_are_gone_leave_no_hook_on_a_parameter() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.tap = nn.Parameter(torch.ones(3)), nn.Identity()

        def forward(self, x: Tensor) -> Any:
            return x * self.tap(self.weight)

    model = Scaled()
    for backward in (True, False, False):
        with fh.capture(model, "tap", grads=True) as acts:
            output = model(torch.ones(2, 3)).sum()
        if backward:
            output.backward()
            assert acts.grads["tap"].tolist() == [2.0] * 3
        del acts
        assert not model.weight._backward_hooks

"""Results that leave a request of a batch hold no memory with rows of others."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import ferrohook as fh
from support.capture import saved_and_loaded

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

WIDTH = 8


@pytest.fixture
def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()).requires_grad_(False)


def _pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def numbers_in_storage(tensor: Tensor) -> int:
    """Number of elements that the storage of a tensor has."""
    return tensor.untyped_storage().nbytes() // tensor.element_size()


OPTIONS: dict[str, dict[str, Any]] = {
    "checked": {},
    "ref": {"copy": "ref"},
    "clone": {"copy": "clone"},
    "slice": {"slice": (..., slice(0, 4))},
    "dtype": {"dtype": torch.float32},
    "graph": {"detach": False},
    "budget": {"max_bytes": 2**20},
    "inputs": {"inputs": True},
}
ROWS: dict[str, tuple[Any, Any]] = {
    "half": (slice(0, 2), slice(2, 4)),
    "one of four": (0, [1, 2, 3]),
    "scattered": ([0, 2], [1, 3]),
}


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("leave", [lambda it: it, saved_and_loaded, _pickled, copy.deepcopy])
def test_captures_own_their_memory(
    model: nn.Sequential, leave: Callable[[Any], Any], options: Any, rows: Any
) -> None:
    plan = fh.Plan(fh.keep("0", **options)).prepare(model)
    requests = plan.open(), plan.open()
    x = torch.randn(4, WIDTH, requires_grad="detach" in options)
    with fh.batch(dict(zip(requests, rows, strict=True)), size=4):
        model(x)
    whole = x if "inputs" in options else model[0](x)
    whole = whole[options.get("slice", ...)]
    for request, own in zip(requests, rows, strict=True):
        assert request.acts["0"].requires_grad is ("detach" in options)
        for kept in leave(request.acts["0"].detach()), leave(request.acts)["0"]:
            expected = whole[[own] if isinstance(own, int) else own]
            assert torch.equal(kept, expected)
            assert numbers_in_storage(kept) == expected.numel()


class Whole(Tensor):
    """A view that says that it is its whole storage."""

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        return self.untyped_storage().nbytes()


class SaysWhole(TorchFunctionMode):
    """Makes each view say that it is its whole storage."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        nbytes: Any = Tensor.nbytes
        if func == nbytes.__get__:
            return args[0].untyped_storage().nbytes()
        return func(*args, **(kwargs or {}))


class OfClass(nn.Module):
    """Returns its input doubled, as a tensor of a class."""

    def __init__(self, of: type[Tensor]) -> None:
        super().__init__()
        self.of = of

    def forward(self, x: Tensor) -> Tensor:
        return (x * 2).as_subclass(self.of)


@pytest.mark.parametrize(("of", "reading"), [(Whole, nullcontext), (Tensor, SaysWhole)])
def test_what_is_said_of_a_view_leaves_it_no_memory_of_others(
    of: type[Tensor], reading: Callable[[], AbstractContextManager[Any]]
) -> None:
    model, x = OfClass(of), torch.randn(4, WIDTH)
    requests = [fh.Plan(fh.keep("")).prepare(model).open() for _ in range(2)]
    with fh.batch({requests[0]: slice(0, 2), requests[1]: slice(2, 4)}, size=4):
        model(x)
    for request, own in zip(requests, x.split(2), strict=True):
        with reading():
            kept = request.acts[""]
        assert torch.equal(kept, own * 2)
        assert numbers_in_storage(kept) == own.numel()


def test_a_capture_in_a_batch_owns_its_memory(model: nn.Sequential) -> None:
    captures = fh.capture(model, "0", calls="all"), fh.capture(model, "0")
    with fh.batch({captures[0]: slice(0, 2), captures[1]: slice(2, 4)}, size=4):
        model(torch.randn(4, WIDTH))
    assert numbers_in_storage(captures[0].acts["0"][0]) == 2 * WIDTH
    assert numbers_in_storage(captures[1].acts["0"]) == 2 * WIDTH


def test_beside_hooks_in_python(model: nn.Sequential) -> None:
    first = fh.Plan(fh.on("0", lambda *_: None), fh.keep("0")).prepare(model).open()
    second = fh.Plan(fh.on("0", lambda *call: call[-1] + 1), fh.keep("0")).prepare(model).open()
    with fh.batch({first: slice(0, 2), second: slice(2, 4)}, size=4):
        model(torch.randn(4, WIDTH))
    assert numbers_in_storage(first.acts["0"]) == numbers_in_storage(second.acts["0"]) == 2 * WIDTH


def test_steps_are_read_again_without_a_copy(model: nn.Sequential) -> None:
    request = fh.Plan(fh.keep("0")).prepare(model).open()
    with fh.batch({request: slice(0, 2)}, size=4):
        model(torch.randn(4, WIDTH))
    assert request.acts["0"].data_ptr() == request.acts["0"].data_ptr()


def test_what_is_read_in_inference_mode_can_be_part_of_a_graph(model: nn.Sequential) -> None:
    request = fh.Plan(fh.keep("0")).prepare(model).open()
    with fh.batch({request: slice(0, 2)}, size=4):
        model(torch.randn(4, WIDTH))
    with torch.inference_mode():
        assert request.acts["0"].shape == (2, WIDTH)
    weight = torch.ones(WIDTH, requires_grad=True)
    (grad,) = torch.autograd.grad((request.acts["0"] * weight).sum(), weight)
    assert torch.equal(grad, request.acts["0"].sum(0))


def test_a_stale_capture_stays_stale(model: nn.Sequential) -> None:
    request = fh.Plan(fh.keep("0")).prepare(model).open()
    cloned = fh.Plan(fh.keep("0", copy="clone")).prepare(model).open()
    x = torch.randn(3, WIDTH)
    with fh.batch({request: slice(0, 2), cloned: 2}):
        model[0](x).add_(1)
    assert torch.equal(cloned.acts["0"], model[0](x)[2:])
    assert "(2, 8)" in repr(request.acts)  # its size can be read, and is not a read
    with pytest.raises(fh.StaleActivationError):
        request.acts["0"]


@pytest.mark.parametrize("members", [2, 4])
def test_a_budget_counts_the_bytes_that_are_kept_alive(model: nn.Sequential, members: int) -> None:
    bytes_of_a_row = WIDTH * 4
    prepared = fh.Plan(fh.keep("0")).prepare(model, max_bytes=bytes_of_a_row)
    requests = [prepared.open() for _ in range(members)]
    with fh.batch({each: at for at, each in enumerate(requests)}, size=members):
        model(torch.randn(members, WIDTH))
    for request in requests:
        assert request.error is None
        (kept,) = request.collector(0).read(0, stale=True)  # as it is stored
        assert kept.untyped_storage().nbytes() == bytes_of_a_row

"""Captures that are refused or left out of order."""

from __future__ import annotations

import re
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import ferrohook as fh
from support.capture import assert_plain
from support.limits import LIMIT

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"calls": "first"},
            ValueError,
            "calls must be 'last', 'all' or a number of calls, got 'first'",
        ),
        ({"calls": 0}, ValueError, "calls must be at least 1, got 0"),
        ({"calls": -1}, ValueError, "calls must be at least 1"),
        ({"calls": True}, fh.HookTypeError, "calls must be 'last', 'all' or a number .* got bool"),
        ({"calls": 1.0}, fh.HookTypeError, "got float"),
        ({"calls": None}, fh.HookTypeError, "got NoneType"),
        ({"max_bytes": 0}, ValueError, "max_bytes must be at least 1, got 0"),
        ({"max_bytes": True}, fh.HookTypeError, "max_bytes must be an int, got bool"),
        ({"max_bytes": 2.0**30}, fh.HookTypeError, "max_bytes must be an int, got float"),
        ({"max_bytes": "1GB"}, fh.HookTypeError, "max_bytes must be an int, got str"),
        ({"copy": "deep"}, ValueError, "copy must be 'checked', 'clone' or 'ref', got 'deep'"),
        ({"copy": True}, ValueError, "copy must be 'checked', 'clone' or 'ref', got True"),
        ({"copy": []}, ValueError, "copy must be 'checked', 'clone' or 'ref'"),
        ({"slice": 1.5}, fh.HookTypeError, "slice must be an index into a tensor, got float"),
        ({"slice": "0"}, fh.HookTypeError, "got str"),
        ({"slice": True}, fh.HookTypeError, "got bool"),
        ({"slice": (0, "a")}, fh.HookTypeError, "got str"),
        ({"slice": [1.5]}, fh.HookTypeError, "got float"),
        ({"slice": slice(0.5)}, fh.HookTypeError, "bounds of a slice .* got float"),
        ({"slice": slice(None, None, -1)}, ValueError, "step .* must be at least 1, got -1"),
        ({"inputs": 1}, fh.HookTypeError, "inputs must be a bool, got int"),
        ({"detach": None}, fh.HookTypeError, "detach must be a bool, got NoneType"),
        ({"grads": "yes"}, fh.HookTypeError, "grads must be a bool, got str"),
        ({"stop": "0"}, fh.HookTypeError, "stop must be a bool, got str"),
        ({"output_index": True}, fh.HookTypeError, "output_index must be .* got bool"),
        ({"dtype": "float16"}, fh.HookTypeError, "dtype must be a torch.dtype, got str"),
        ({"dtype": float}, fh.HookTypeError, "dtype must be a torch.dtype, got the class float"),
        ({"device": "nowhere"}, RuntimeError, "^device='nowhere'.*not available: torch finds cpu"),
        ({"device": "cuda:99"}, RuntimeError, "^device='cuda:99'.*Engines do not accept a device"),
        ({"unknown": 1}, TypeError, "unknown"),
    ],
)
def test_wrong_options_are_refused_by_capture_itself(
    model: nn.Sequential, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        fh.capture(model, **options)
    assert_plain(model)


def test_a_subscript_of_a_capture_names_the_with_statement(model: nn.Sequential) -> None:
    with pytest.raises(fh.HookTypeError, match=r"`with capture as acts:`, then acts\['0'\]"):
        fh.capture(model, "0")["0"]


def test_a_capture_that_is_not_entered_says_so(model: nn.Sequential, x: Tensor) -> None:
    capture = fh.capture(model, "0")
    model(x)
    text = "<Capture of 1 module of Sequential, not entered: it captures inside `with`>"
    assert repr(capture) == text
    assert capture  # by no length
    uses: list[Callable[[Any], Any]] = [dict, list, len, lambda it: "0" in it]
    for use in uses:
        with pytest.raises(
            fh.HookTypeError, match="is not a mapping of activations: use `with capture"
        ):
            use(capture)
    with capture as acts:
        assert repr(capture) == "<Capture of 1 module of Sequential, entered>"
        model(x)
    assert repr(capture) == "<Capture of 1 module of Sequential, left>"
    assert list(acts) == ["0"]


@pytest.mark.parametrize("what", ["nope", [], nn.Conv2d, re.compile("nope"), lambda *_: False])
def test_an_empty_selection_is_refused(model: nn.Sequential, what: Any) -> None:
    with pytest.raises(fh.SelectionError):
        fh.capture(model, what)


def test_integers_of_any_size_are_accepted(model: nn.Sequential, x: Tensor) -> None:
    with fh.capture(model, "0", calls=2**80, max_bytes=2**80) as acts:
        model(x)
    assert len(acts["0"]) == 1


def test_a_capture_is_entered_and_left_only_once(model: nn.Sequential, x: Tensor) -> None:
    with fh.instrument(model):
        capture = fh.capture(model, "0")
        with capture as acts:
            model(x)
            with pytest.raises(fh.HookError, match="a capture can be entered only once"), capture:
                pytest.fail("it was entered")
        with pytest.raises(fh.HookError, match="a capture can be entered only once"), capture:
            pytest.fail("it was entered")
        with pytest.raises(fh.HookError, match="already left"):
            capture.__exit__(None, None, None)
        # The refused exit left the instrumentation and hooks of others alone.
        fired: list[int] = []
        model[0].register_forward_hook(lambda *_: fired.append(1))
        model(x)
    assert fired == [1]
    assert list(acts) == ["0"]
    assert_plain(model)


def test_leaving_from_another_thread_is_refused_and_changes_nothing(
    model: nn.Sequential, x: Tensor
) -> None:
    capture = fh.capture(model, "0")
    with capture as acts, ThreadPoolExecutor(1) as executor:
        with pytest.raises(
            fh.HookError, match="must be left in the thread and task that entered it"
        ):
            executor.submit(capture.__exit__, None, None, None).result(LIMIT)
        model(x)
    assert torch.equal(acts["0"], model[0](x))
    assert_plain(model)


def test_leaving_out_of_order_ends_only_that_capture(model: nn.Sequential, x: Tensor) -> None:
    outer, inner = fh.capture(model, "0"), fh.capture(model, "0")
    first = outer.__enter__()
    model(x)
    second = inner.__enter__()
    with pytest.raises(fh.HookError, match="left anyway"):
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


def test_a_capture_that_is_used_like_a_cache_says_how_to_get_one() -> None:
    capture = fh.capture(nn.Sequential(nn.Identity()), "0")
    for name in ("keys", "items", "stack", "to_pandas", "save"):
        with pytest.raises(AttributeError, match=f"`with capture as acts:`, then acts.{name}"):
            getattr(capture, name)
    with pytest.raises(AttributeError, match="'Capture' object has no attribute 'kyes'"):
        getattr(capture, "kyes")  # noqa: B009 (checkers know that there is none)

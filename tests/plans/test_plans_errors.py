"""Bad input to plans, failing hooks, and interrupts."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import gc
import itertools
import logging
import re
import traceback
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import ferrohook as fh
from ferrohook._core import frames
from support.hooks import ignore
from support.internals import in_no_scope, instrumented
from support.interrupts import interrupted, state
from support.plans import Net, Tokens
from support.threads import in_thread

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH = 4
X = torch.ones(2, WIDTH)


def fail(*_: Any) -> None:
    msg = "the hook failed"
    raise ValueError(msg)


# --- Preparing ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entry", "error", "message"),
    [
        (fh.on("embeds", ignore), fh.SelectionError, r"entry 1 .*embeds.*embed"),
        (fh.keep("blocks.9"), fh.SelectionError, r"entry 1 .*blocks\.9"),
        (fh.keep(7), fh.HookTypeError, r"entry 1 "),  # type: ignore[arg-type]
        (fh.on("head", fh.Add(torch.ones(9))), fh.HookTypeError, r"entry 1 .*Add.*9.*'head'.* 4"),
        (fh.on("act", fh.Ablate(torch.ones(9))), None, ""),
        (fh.on("head", fh.Add(torch.ones(1))), None, ""),
    ],
)
def test_what_a_model_lacks_is_told_at_prepare(
    entry: Any, error: type[Exception] | None, message: str
) -> None:
    model = Net(WIDTH)
    before = state(model)
    plan = fh.Plan(fh.on("embed", ignore), entry)
    if error is None:
        plan.prepare(model).close()
    else:
        with pytest.raises(error, match=message):
            plan.prepare(model)
    assert state(model) == before


def test_a_norm_tells_its_width() -> None:
    model = nn.Sequential(nn.LayerNorm((3, WIDTH)), nn.LayerNorm(WIDTH))
    for name in ("0", "1"):
        fh.Plan(fh.on(name, fh.Add(torch.ones(WIDTH)))).prepare(model).close()
        with pytest.raises(fh.HookTypeError, match=rf"width of 9, but the output of '{name}'.* 4"):
            fh.Plan(fh.on(name, fh.Add(torch.ones(9)))).prepare(model)


def test_a_prepared_plan_without_its_model_says_so() -> None:
    prepared = fh.Plan(fh.keep("act")).prepare(Net(WIDTH))
    gc.collect()
    with pytest.raises(fh.HookError, match="was garbage-collected: keep a reference"):
        prepared.places(0)


def test_without_a_capture_reads_say_that_none_was_asked_for() -> None:
    model, plan = Net(WIDTH), fh.Plan(fh.on("act", ignore))
    with plan.open(model) as request:
        model(X)
    for acts in (request.acts, fh.run(model, X, plan=plan).acts, fh.run(model, X).acts):
        with pytest.raises(fh.SelectionError, match=r"no capture= or keep\(\) selected any module"):
            acts["act"]


def test_a_width_that_is_not_known_is_told_at_the_first_call() -> None:
    model = Net(WIDTH)
    plan = fh.Plan(fh.on("embed", ignore), fh.on("act", fh.Ablate(torch.ones(9))))
    with plan.prepare(model) as prepared:
        request = prepared.open()
        with pytest.raises(fh.HookTypeError, match=r"width of 9.* 4") as caught, request:
            model(X)
        assert re.match(
            r"forward hook `Ablate\(direction=<9 float32>\)` of `act` \(Tanh\), "
            r"entry 1 of the plan: ",
            str(caught.value),
        )
        assert type(request.error) is type(caught.value)
        assert str(request.error) == str(caught.value)


@pytest.mark.parametrize("at", [None, slice(0, 2)])
def test_a_vector_that_does_not_broadcast_is_told_with_entry_and_module(at: Any) -> None:
    model = Tokens(WIDTH)
    plan = fh.Plan(fh.on("embed", ignore), fh.on("head", fh.Replace(torch.ones(9, WIDTH)), at=at))
    told = r"\(Linear\), entry 1 of the plan: .* \[9, 4\] does not broadcast to .* \[1, 3, 4\]"
    with (
        plan.prepare(model) as prepared,
        pytest.raises(fh.HookTypeError, match=told),
        prepared.open(),
    ):
        model(torch.tensor([[1, 2, 3]]))


def test_the_note_of_a_failing_function_names_entry_and_module() -> None:
    plan = fh.Plan(fh.keep("act"), fh.on("head", fail))
    with (
        plan.prepare(model := Net(WIDTH)) as prepared,
        pytest.raises(ValueError, match="the hook failed") as caught,
        prepared.open(),
    ):
        model(X)
    (note,) = caught.value.__notes__
    assert note == (
        "ferrohook: raised by the forward hook `fail` of `head` (Linear), entry 1 of the plan"
    )


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: fh.Plan("act"), fh.HookTypeError, r"entries made by on\(\), keep\(\), gate"),
        (lambda: fh.on("act", 7), fh.HookTypeError, "7|int"),
        (lambda: fh.on("act", ignore, phase="before"), ValueError, "before"),
        (lambda: fh.on("act", ignore, on_error="ask"), ValueError, "ask"),
        (lambda: fh.on("act", ignore, priority="high"), fh.HookTypeError, "priority"),
        (lambda: fh.on("act", ignore, at="end"), ValueError, "at must be one of .*'end'"),
        (lambda: fh.on("act", ignore, at=1.5), fh.HookTypeError, "at must be a name"),
        (lambda: fh.on("act", ignore, at=True), fh.HookTypeError, "at must be a name"),
        (lambda: fh.on("act", ignore, at=slice(0, 4, -1)), ValueError, "step"),
        (lambda: fh.on("act", ignore, at=slice("a")), fh.HookTypeError, "bounds"),
        (
            lambda: fh.on("act", ignore, at=0, with_kwargs=True),
            fh.HookTypeError,
            "at= only works with",
        ),
        (
            lambda: fh.on("act", ignore, at=0, phase="forward_pre"),
            fh.HookTypeError,
            "at= only works with",
        ),
        (
            lambda: fh.on("act", fh.ForwardHook(ignore), at=0),
            fh.HookTypeError,
            "at= only works with",
        ),
        (lambda: fh.keep("act", at="never"), ValueError, "never"),
        (lambda: fh.keep("act", at=0, grads=True), fh.HookTypeError, "gradient without at="),
        *(
            (lambda cut=cut: fh.keep("act", at=0, slice=cut), fh.HookTypeError, "tokens that at=")
            for cut in (0, slice(1), [0], (slice(1), 0), torch.tensor([True]))
        ),
        (lambda: fh.keep("act", label=7), fh.HookTypeError, "label must be a str"),
        (lambda: fh.keep("act", calls="some"), ValueError, "some"),
        (lambda: fh.keep("act", max_bytes=0), ValueError, "max_bytes"),
        (lambda: fh.keep("act", inputs=1), fh.HookTypeError, "inputs"),
        (lambda: fh.Plan().prepare("model"), fh.HookTypeError, "prepare needs"),
    ],
)
def test_bad_arguments_are_refused(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_an_empty_plan_is_no_error() -> None:
    model = Net(WIDTH)
    with fh.Plan().prepare(model) as prepared, prepared.open() as request:
        model(X)
    assert list(request.acts) == []
    assert instrumented(model) == []


# --- Entering and leaving -----------------------------------------------------------------------


def test_a_request_is_entered_once() -> None:
    model = Net(WIDTH)
    with fh.Plan(fh.keep("act")).prepare(model) as prepared:
        request = prepared.open()
        with request:
            model(X)
            with pytest.raises(fh.HookError, match="once"), request:
                pass
            model(X)
        with pytest.raises(fh.HookError, match="once"), request:
            pass
        closed = prepared.open()
        closed.close()
        with pytest.raises(fh.HookError, match="once"), closed:
            pass
    assert in_no_scope()


def test_a_request_left_elsewhere_stays_entered() -> None:
    model = Net(WIDTH)
    expected = model(X)
    with fh.Plan(fh.on("embed", fh.Zero())).prepare(model) as prepared:
        request = prepared.open()
        with request:
            leave: Callable[..., object] = functools.partial(request.__exit__, None, None, None)
            with pytest.raises(
                fh.HookError,
                match=r"must be left in the thread and task that entered it|not entered",
            ):
                in_thread(leave)
            with pytest.raises(
                fh.HookError, match="must be left in the thread and task that entered it"
            ):
                contextvars.copy_context().run(leave)

            async def task() -> None:
                with pytest.raises(
                    fh.HookError, match="must be left in the thread and task that entered it"
                ):
                    leave()

            context = contextvars.copy_context()
            in_thread(lambda: context.run(asyncio.run, task()))
            assert not torch.equal(model(X), expected)
        assert torch.equal(model(X), expected)
    assert in_no_scope()


def test_requests_left_out_of_order() -> None:
    model = Net(WIDTH)
    expected = model(X)
    with fh.Plan(fh.on("embed", fh.Zero())).prepare(model) as prepared:
        outer, inner = prepared.open(), prepared.open()
        outer.__enter__()
        inner.__enter__()
        model(X)
        with pytest.raises(fh.HookError, match="left after the scopes"):
            outer.__exit__(None, None, None)
        assert not torch.equal(model(X), expected)
        inner.__exit__(None, None, None)
        assert torch.equal(model(X), expected)
    assert in_no_scope()


# --- Models that change -------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["replaced", "removed", "added"])
def test_a_changed_tree_is_told(change: str) -> None:
    model = Net(WIDTH)
    plan = fh.Plan(fh.on("blocks.*", ignore), fh.keep("head"))
    prepared = plan.prepare(model)
    assert not prepared.outdated
    if change == "replaced":
        model.blocks[1] = nn.Identity()
    elif change == "removed":
        del model.blocks[1]
    else:
        model.blocks.append(Net(WIDTH).blocks[0])
    assert prepared.outdated
    request = prepared.open()
    with pytest.raises(fh.HookError, match="prepare the plan again"), request:
        model(X)
    assert isinstance(request.error, fh.HookError)
    prepared.close()
    if change == "replaced":
        model.blocks[1] = Net(WIDTH).blocks[0]
    with plan.prepare(model) as again, again.open() as request:
        y = model(X)
    assert torch.equal(request.acts["head"], y)
    assert instrumented(model) == []


def test_a_change_elsewhere_is_none() -> None:
    model = Net(WIDTH)
    with fh.Plan(fh.keep("head")).prepare(model) as prepared:
        model.blocks[1] = Net(WIDTH).blocks[0]
        assert not prepared.outdated
        with prepared.open() as request:
            y = model(X)
    assert torch.equal(request.acts["head"], y)


def test_a_collected_model() -> None:
    model = Net(WIDTH)
    prepared = fh.Plan(fh.keep("head")).prepare(model)
    before = prepared.open()
    del model
    gc.collect()
    assert prepared.closed
    assert prepared.outdated
    with pytest.raises(fh.HookError, match="no longer exists"):
        prepared.open()
    with before:
        pass
    assert list(before.acts) == []
    prepared.close()


# --- Failing hooks ------------------------------------------------------------------------------


@pytest.mark.parametrize("on_error", ["raise", "disable", "ignore"])
@pytest.mark.parametrize("phase", ["forward_pre", "forward", "backward"])
def test_a_failing_hook(on_error: str, phase: str, caplog: pytest.LogCaptureFixture) -> None:
    model = Net(WIDTH)
    expected = model(X)
    plan = fh.Plan(fh.on("embed", fail, phase=phase, on_error=on_error), fh.keep("act"))
    x = X.clone().requires_grad_()
    with plan.prepare(model) as prepared, caplog.at_level(logging.WARNING, "ferrohook"):
        other = prepared.open()
        for request in (prepared.open(), other):
            if on_error == "raise":
                with pytest.raises(ValueError, match="the hook failed"), request:
                    model(x).sum().backward()
            else:
                with request:
                    y = model(x)
                    y.sum().backward()
                assert torch.equal(y, expected)
            if on_error != "disable" or request is not other:
                assert isinstance(request.error, ValueError)
                assert str(request.error) == "the hook failed"
            else:
                assert request.error is None
        assert len(caplog.records) == (on_error == "disable")
    assert in_no_scope()


def test_the_error_is_that_of_the_request_alone() -> None:
    model = Net(WIDTH)
    failing = fh.Plan(fh.on("head", fail, on_error="ignore")).prepare(model)
    fine = fh.Plan(fh.on("head", ignore)).prepare(model)
    with fh.scope() as scope, fine.open() as outer, failing.open() as inner:
        fh.register(model, "head", ignore, scope=scope)
        model(X)
    assert isinstance(inner.error, ValueError)
    assert outer.error is None
    assert scope.error is None
    with fh.scope() as scope:
        fh.register(model, "head", fail, scope=scope, on_error="ignore")
        model(X)
    assert isinstance(scope.error, ValueError)


def test_a_plan_opened_twice_in_one_context() -> None:
    model = nn.Sequential(nn.Identity())
    plan = fh.Plan(fh.on("0", fh.Add(torch.ones(WIDTH))), fh.keep("0", calls="all"))
    with plan.prepare(model) as prepared, prepared.open() as outer:
        assert model(X).tolist() == (X + 1).tolist()
        with prepared.open() as inner:
            assert model(X).tolist() == (X + 2).tolist()
        assert model(X).tolist() == (X + 1).tolist()
    assert [value.max().item() for value in outer.acts["0"]] == [2.0, 3.0, 2.0]
    assert [value.max().item() for value in inner.acts["0"]] == [3.0]


# --- Interrupts ---------------------------------------------------------------------------------


def prepare(model: nn.Module, plan: fh.Plan) -> None:
    plan.prepare(model).close()


def open_and_call(model: nn.Module, plan: fh.Plan) -> None:
    with plan.prepare(model) as prepared, prepared.open() as request:
        model(X)
    request.acts["head"]


def open_nested(model: nn.Module, plan: fh.Plan) -> None:
    with plan.prepare(model) as prepared, prepared.open() as request:
        with prepared.open():
            model(X)
        request.close()


@pytest.mark.usefixtures("collect_cheaply")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("act", [prepare, open_and_call, open_nested])
def test_an_interrupt_restores_the_model(act: Callable[[nn.Module, fh.Plan], None]) -> None:
    plan = fh.Plan(
        fh.on("embed", fh.Scale(2.0)),
        fh.on("blocks.*", ignore),
        fh.keep("head"),
        fh.keep("act", inputs=True, stop=False, calls="all"),
    )
    act(Net(WIDTH), plan)
    plain = state(Net(WIDTH))
    left: list[list[str]] = []
    for place in itertools.count():
        model = Net(WIDTH)
        landed, interrupt = interrupted(functools.partial(act, model, plan), place)
        if frames.get() != ():
            stack = traceback.extract_tb(interrupt and interrupt.__traceback__)
            left.append([f"{frame.name}, line {frame.lineno}" for frame in stack])
            frames.set(())
        # A prepared plan that was never returned is closed by its finaliser.
        del interrupt
        gc.collect()
        if state(model) != plain:
            left.append(["state", str(place)])
        if not landed:
            break
    assert left == []
    assert place > 20


def test_a_plan_around_a_call_of_another_model_says_what_to_do() -> None:
    model, other = nn.Sequential(nn.Identity()), nn.Sequential(nn.Identity())
    with fh.Plan(fh.on("0", fh.Scale(2.0)), fh.keep("0")).prepare(model) as prepared:
        told = "prepared for this Sequential, which was not called while the request was open"
        with pytest.warns(fh.errors.NeverFiredWarning, match=told), prepared.open() as request:
            other(torch.ones(1))
        with pytest.raises(fh.SelectionError, match=rf"'0' never ran.*; the plan was {told}"):
            request.acts["0"]
        with prepared.open() as request:
            model(torch.ones(1))
        assert request.acts["0"].item() == 2

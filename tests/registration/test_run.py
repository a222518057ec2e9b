"""`run`: one call with hooks and a capture."""

from __future__ import annotations

import copy
import functools
import inspect
import re
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ferrohook as fh
from ferrohook.compat.transformer_lens import HookedRootModule
from support.hooks import add, ignore
from support.internals import instrumented
from support.limits import LIMIT


def test_run_is_one_call_with_hooks_and_a_capture(model: nn.Sequential, x: Tensor) -> None:
    expected = model(x)
    output = fh.run(model, x, hooks={"1": add(1), "": add(10)}).output
    assert torch.equal(output, expected + 11)
    result = fh.run(model, x, hooks={"1": add(1)}, capture=["0", "1"])
    output, acts = result
    assert output is result.output
    assert acts is result.acts
    assert torch.equal(output, acts["1"])
    assert torch.equal(output, expected + 1)
    assert torch.equal(fh.run(model, x).output, expected)
    assert torch.equal(fh.run(model, input=x).output, expected)
    assert len(fh.run(model, x).acts) == 0
    assert instrumented(model) == []
    assert list(acts) == ["0", "1"]


def test_run_says_that_a_text_is_to_be_tokenized() -> None:
    for args in (("a text",), (["a", "text"],)):
        with pytest.raises(TypeError) as caught:
            fh.run(nn.Embedding(3, 3), *args)
        assert "tokenize the text first, tokenizer(text" in caught.value.__notes__[0]
    with pytest.raises(TypeError) as caught:
        fh.run(nn.Embedding(3, 3), 1.5)
    assert not hasattr(caught.value, "__notes__")


def test_run_accepts_selectors_and_typed_hooks(model: nn.Sequential, x: Tensor) -> None:
    seen: list[str] = []
    hooks: dict[Any, Any] = {
        nn.Linear: lambda *_: seen.append("class"),
        re.compile("^0$"): fh.ForwardPreHook(lambda x: x * 0),
        ("1", "1.1"): fh.ForwardHook(lambda *_: seen.append("tuple")),
    }
    _, acts = fh.run(model, x, hooks=hooks, capture="0")
    assert seen == ["class", "class", "tuple", "tuple"]
    assert torch.equal(acts["0"], model[0](x * 0))


def test_hooks_of_run_do_not_fire_in_other_threads(model: nn.Sequential, x: Tensor) -> None:
    inside, go_on = threading.Event(), threading.Event()
    expected = model(x)
    seen: list[Tensor] = []

    def work() -> None:
        assert inside.wait(LIMIT)
        seen.append(model(x))
        go_on.set()

    def block(*_: Any) -> Tensor:
        inside.set()
        assert go_on.wait(LIMIT)
        return torch.zeros(2, 3)

    thread = threading.Thread(target=work)
    thread.start()  # starts before the hooks are registered
    output = fh.run(model, x, hooks={"": block}).output
    thread.join(LIMIT)
    assert torch.equal(seen[0], expected)
    assert torch.equal(output, torch.zeros(2, 3))


def test_warnings_of_run_point_at_its_call_site(model: nn.Sequential, x: Tensor) -> None:
    model.register_module("unused", nn.Identity())
    model.forward = lambda x: x  # type: ignore[method-assign]
    with pytest.warns(fh.errors.NeverFiredWarning) as told:
        fh.run(model, x, hooks={"0": ignore}, capture=["", "1.1"])
    assert sorted(str(each.message)[:6] for each in told) == ["'0' wa", "'1.1' "]
    assert {each.filename for each in told} == {__file__}
    assert instrumented(model) == []


def test_exceptions_of_the_model_leave_nothing_behind(model: nn.Sequential) -> None:
    with pytest.raises(RuntimeError, match="shapes"):
        fh.run(model, torch.ones(2, 7), hooks={"0": ignore}, capture="**")
    assert instrumented(model) == []


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"hooks": {"nope": ignore}}, fh.SelectionError),
        ({"hooks": {"0": ignore, "1": 3}}, fh.HookTypeError),
        ({"hooks": [("0", ignore)]}, fh.HookTypeError),
        ({"hooks": "0"}, fh.HookTypeError),
        ({"capture": "nope"}, fh.SelectionError),
        ({"capture": 3}, fh.HookTypeError),
    ],
)
def test_run_refuses_bad_input(
    model: nn.Sequential, x: Tensor, options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        fh.run(model, x, **options)
    with pytest.raises(fh.HookTypeError, match=r"run needs an instance of nn\.Module, got"):
        fh.run(nn.Linear, x)  # type: ignore[arg-type]
    assert instrumented(model) == []


def test_run_with_a_plan(model: nn.Sequential, x: Tensor) -> None:
    expected = model(x)
    steered = fh.Plan(fh.on("1", fh.Add(torch.ones(3))))
    keeping = steered + fh.Plan(fh.keep("1", label="late"))
    assert torch.equal(fh.run(model, x, plan=steered).output, expected + 1)
    assert torch.equal(fh.run(model, x, plan=steered, hooks={"1": add(1)}).output, expected + 2)
    output, acts = fh.run(model, x, plan=steered, capture="1")
    assert torch.equal(output, acts["1"])
    for each in (keeping, prepared := keeping.prepare(model)):
        output, acts = fh.run(model, input=x, plan=each)
        assert torch.equal(output, expected + 1)
        assert list(acts) == ["late:1"]
        assert torch.equal(acts["late:1"], output)
    assert not prepared.closed
    prepared.close()
    assert torch.equal(fh.run(model, x).output, expected)
    assert instrumented(model) == []


def test_run_refuses_plans_that_do_not_fit(model: nn.Sequential, x: Tensor) -> None:
    keeping = fh.Plan(fh.keep("1"))
    with pytest.raises(fh.HookTypeError, match="plan must be a Plan or a Prepared, got dict"):
        fh.run(model, x, plan={})  # type: ignore[arg-type]
    with pytest.raises(fh.HookError, match="capture= cannot be combined with a plan that captures"):
        fh.run(model, x, plan=keeping, capture="0")
    with (
        keeping.prepare(copy.deepcopy(model)) as prepared,
        pytest.raises(fh.HookError, match="not prepared for this Sequential"),
    ):
        fh.run(model, x, plan=prepared)
    with pytest.raises(RuntimeError, match="shapes"):
        fh.run(model, torch.ones(2, 7), plan=keeping)
    assert instrumented(model) == []


def test_the_warning_of_a_plan_points_at_the_call_site_of_run(
    model: nn.Sequential, x: Tensor
) -> None:
    model.forward = lambda x: x  # type: ignore[method-assign]
    with pytest.warns(fh.errors.NeverFiredWarning, match="'0'") as told:
        fh.run(model, x, plan=fh.Plan(fh.on("0", fh.Zero()), fh.keep("1")))
    assert {each.filename for each in told} == {__file__}


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("hook", "hooks"),
        ("fwd_hooks", "hooks"),
        ("bwd_hooks", "hooks"),
        ("captures", "capture"),
        ("names_filter", "capture"),
        ("plans", "plan"),
    ],
)
def test_names_near_to_those_of_run_do_not_reach_the_model(name: str, meant: str) -> None:
    class Swallows(nn.Module):
        def forward(self, x: Tensor, **_ignored: Any) -> Tensor:
            return x

    with pytest.raises(fh.HookTypeError, match=f"^run takes {meant}=, not {name}="):
        fh.run(Swallows(), torch.ones(2), **{name: {"": lambda *_: None}})
    assert torch.equal(fh.run(Swallows(), torch.ones(2), mask=3).output, torch.ones(2))


class Swallowing(nn.Module):
    """Takes any keyword, as models of transformers do."""

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        self.kwargs = kwargs
        return x


class Naming(Swallowing):
    """Names keywords that are options of hooks and captures."""

    def forward(self, x: Tensor, at: Any = None, *, dtype: Any = None, **kwargs: Any) -> Tensor:
        self.named = at, dtype
        return super().forward(x, **kwargs)


OPTIONS = sorted(
    {
        name
        for function in (fh.register, fh.on, fh.keep, fh.capture)
        for name, each in inspect.signature(function).parameters.items()
        if each.kind is each.KEYWORD_ONLY
    }
    | {"deadline", "keep", "select", "what"}
)


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_that_run_does_not_have_is_refused_by_name(name: str) -> None:
    model, x = Swallowing(), torch.ones(2)
    lens = HookedRootModule.wrap(Swallowing())
    ways: list[Any] = [functools.partial(fh.run, model, x, hooks={"": add(1)})]
    if name in inspect.signature(fh.capture).parameters:
        ways.append(functools.partial(fh.run, torch.compile(model, backend="eager"), x))
    own = inspect.signature(HookedRootModule.run_with_cache).parameters
    if name not in {"keep", "select", "what"} | own.keys():
        ways += [functools.partial(way, x) for way in (lens.run_with_hooks, lens.run_with_cache)]
    for way in ways:
        with pytest.raises(fh.HookTypeError, match=rf"not declare {name}= and may ignore it"):
            way(**{name: None})
    assert "kwargs" not in vars(model)


def test_a_keyword_that_the_model_names_reaches_it() -> None:
    x = torch.ones(2)
    model = Naming()
    compiled: Any = torch.compile(Naming(), backend="eager")
    for called, own in (
        (model, model),
        (fh.HookedModule(model), model),
        (compiled, compiled._orig_mod),
    ):
        assert torch.equal(fh.run(called, x, hooks={"": add(1)}, at=-1, dtype=3, more=4)[0], x + 1)
        assert (own.named, own.kwargs) == ((-1, 3), {"more": 4})
    lens = HookedRootModule.wrap(Naming())
    lens.run_with_hooks(x, at=5)
    assert lens.inner.named == (5, None)

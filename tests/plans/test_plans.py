"""Plans as data, and how they are prepared and opened."""

from __future__ import annotations

import copy
import functools
import pickle
import re
import time
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import ferrohook as fh
from ferrohook.detectors import CallCounter
from support.hooks import ignore
from support.internals import in_no_scope, instrumented
from support.plans import Net
from support.threads import in_thread

WIDTH = 4
X = torch.ones(2, WIDTH)


def triple(_module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 3


def first_layers(_name: str, module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


def some() -> fh.Plan:
    vector = torch.arange(4.0)
    return fh.Plan(
        fh.on("embed", fh.Add(vector, 2)),
        fh.on("blocks.*", fh.Ablate(vector, output_index="sum"), priority=3),
        fh.on("head", triple, on_error="ignore"),
        fh.on(re.compile("act"), ignore, phase="forward_pre", prepend=True),
        fh.keep("blocks.*.linear", dtype=torch.float16, slice=(..., slice(2))),
        fh.keep("act", label="in", inputs=True, calls="all"),
    )


# --- Data ---------------------------------------------------------------------------------------


def test_equality_and_hash_are_by_content() -> None:
    one, other = some(), some()
    assert one == other
    assert hash(one) == hash(other)
    assert one != fh.Plan(*one.entries[1:])
    assert one != fh.Plan(*reversed(one.entries))
    assert one != "a plan"
    assert fh.Plan() == fh.Plan()
    pairs = [
        (fh.on("act", ignore), fh.on("head", ignore)),
        (fh.on("act", ignore), fh.on("act", triple)),
        (fh.on("act", ignore), fh.on("act", ignore, phase="forward_pre")),
        (fh.on("act", ignore), fh.on("act", ignore, priority=1)),
        (fh.on("act", fh.Zero()), fh.on("act", fh.Zero(), at="prompt")),
        (fh.on("act", fh.Zero(), at=slice(1)), fh.on("act", fh.Zero(), at=slice(2))),
        (fh.keep("act"), fh.keep("act", label="")),
        (fh.keep("act"), fh.keep("act", inputs=True)),
        (fh.keep("act", slice=0), fh.keep("act", slice=slice(0))),
        (fh.keep("act", slice=torch.ones(1)), fh.keep("act", slice=torch.zeros(1))),
    ]
    for first, second in pairs:
        assert first != second
        assert first == copy.copy(first)
        assert len({fh.Plan(first), fh.Plan(second), fh.Plan(copy.copy(first))}) == 2


def test_options_that_are_the_default_make_no_difference() -> None:
    assert fh.keep("act", copy="checked", calls="last") == fh.keep("act")
    text = '{"type": "keep", "what": "act", "copy": "checked", "calls": "last", "stop": false}'
    read = fh.Plan.from_json(f'{{"version": 1, "entries": [{text}]}}')
    assert read == fh.Plan(fh.keep("act"))
    assert read.entries[0].options == {}
    assert fh.on("act", triple, phase="forward", priority=0) == fh.on("act", triple)


def test_plans_combine() -> None:
    one, other = fh.Plan(fh.on("embed", fh.Scale(2.0))), fh.Plan(fh.keep("head"))
    both = one + other
    assert both == fh.Plan(one, other) == fh.Plan(*one.entries, *other.entries)
    assert len(one.entries) == len(other.entries) == 1
    with pytest.raises(TypeError):
        one + fh.keep("head")  # type: ignore[operator]
    model = Net(WIDTH)
    with both.prepare(model) as prepared, prepared.open() as request:
        y = model(X)
    assert torch.equal(request.acts["head"], y)


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_copies_are_equal_and_work(copied: Any) -> None:
    plan = some()
    again = copied(plan)
    assert again == plan
    assert hash(again) == hash(plan)
    assert repr(again) == repr(plan)
    model = Net(WIDTH)
    results = []
    for each in (plan, again):
        with each.prepare(model) as prepared, prepared.open() as request:
            results.append((model(X), dict(request.acts)))
    assert torch.equal(results[0][0], results[1][0])
    assert list(results[0][1]) == list(results[1][1])


def test_a_predicate_pickles_by_its_name() -> None:
    plan = fh.Plan(fh.keep(first_layers))
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_a_plan_with_a_local_function_does_not_pickle() -> None:
    plan = fh.Plan(fh.on("act", lambda *_: None))
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(plan)


def test_the_table() -> None:
    lines = repr(some()).splitlines()
    assert lines[0].split() == ["modules", "hook", "phase", "at", "options"]
    assert len(lines) == 7
    assert "Add(vector=<4 float32>, scale=2.0)" in lines[1]
    assert lines[3].split() == ["head", "triple", "forward", "all", "on_error='ignore'"]
    assert "forward_pre" in lines[4]
    assert "dtype=torch.float16" in lines[5]
    assert lines[6].split()[:5] == ["act", "keep", "as", "'in'", "forward_pre"]
    assert "calls='all'" in lines[6]
    assert repr(fh.Plan()).split() == lines[0].split()


def test_plans_are_immutable() -> None:
    plan = some()
    with pytest.raises(AttributeError, match="a plan is immutable"):
        plan.entries = ()
    names, places = ["act"], torch.tensor([0, 1])
    gate = fh.gate("g", names, fh.Norm())
    plan = fh.Plan(fh.keep(names, slice=(..., places)), fh.on((names,), ignore), gate)
    before = hash(plan)
    names.append("head")
    places += 2
    assert hash(plan) == before
    assert plan == fh.Plan(
        fh.keep(["act"], slice=(..., torch.tensor([0, 1]))),
        fh.on((["act"],), ignore),
        fh.gate("g", ["act"], fh.Norm()),
    )
    with pytest.raises(AttributeError):
        plan.entries[0].what = "head"  # type: ignore[misc]


# --- Opening ------------------------------------------------------------------------------------


def test_requests_have_ids_and_reprs() -> None:
    model = Net(WIDTH)
    with some().prepare(model) as prepared:
        one, other = prepared.open(), prepared.open()
        assert isinstance(one.id, int)
        assert one.id < other.id
        assert repr(one) == f"<Request {one.id}, open>"
        assert "Net" in repr(prepared)
        assert "closed" not in repr(prepared)
    assert prepared.closed
    assert "closed" in repr(prepared)


def test_a_request_that_is_not_entered_does_nothing() -> None:
    model = Net(WIDTH)
    expected = model(X)
    with fh.Plan(fh.on("embed", fh.Zero()), fh.keep("head")).prepare(model) as prepared:
        request = prepared.open()
        assert torch.equal(model(X), expected)
        assert list(request.acts) == []


def test_activations_are_readable_inside_and_after() -> None:
    model = Net(WIDTH)
    with fh.Plan(fh.keep("head")).prepare(model) as prepared:
        with prepared.open() as request:
            y = model(X)
            assert torch.equal(request.acts["head"], y)
        assert torch.equal(request.acts["head"], y)
    assert torch.equal(request.acts["head"], y)
    with pytest.raises(fh.SelectionError, match="among the captured modules: 'head'"):
        request.acts["embed"]


def test_modules_that_never_ran_are_named() -> None:
    model = Net(WIDTH)
    model.kept, model.hooked = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    plan = fh.Plan(fh.keep("kept"), fh.on("hooked", ignore))
    with (
        plan.prepare(model) as prepared,
        pytest.warns(fh.errors.NeverFiredWarning, match="'kept', 'hooked'|'hooked', 'kept'"),
        prepared.open(),
    ):
        model(X)


def test_a_plan_warns_once_of_modules_that_never_ran() -> None:
    model = Net(WIDTH)
    for entry in fh.keep("head"), fh.on("head", ignore), fh.on("head", fh.Zero()):
        with fh.Plan(entry).prepare(model) as prepared:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for _ in range(3):
                    with prepared.open() as request:
                        pass
            assert len(caught) == 1
            assert request.silent == ["head"] * len(prepared.captures)


def test_a_request_without_calls_costs_no_more_with_more_modules() -> None:
    model = nn.Sequential(*[nn.Identity() for _ in range(480)])
    with fh.Plan(fh.on("*", fh.Zero()), fh.keep("*")).prepare(model) as prepared:
        with pytest.warns(fh.errors.NeverFiredWarning), prepared.open():
            pass

        def cost() -> float:
            started = time.perf_counter()
            for _ in range(10):
                with prepared.open():
                    pass
            return (time.perf_counter() - started) / 10

        assert min(cost() for _ in range(50)) < 50e-6  # a look at each module: 250 us


def test_gradients_are_kept() -> None:
    model = Net(WIDTH)
    with fh.Plan(fh.keep("act", grads=True, calls="all")).prepare(model) as prepared:
        with prepared.open() as request:
            model(X).sum().backward()
        grads = request.acts.grads["act"]
    assert [grad.shape for grad in grads] == [X.shape] * 2


def test_one_module_by_two_labels() -> None:
    model = Net(WIDTH)
    plan = fh.Plan(fh.keep("head", label="out"), fh.keep("head", label="in", inputs=True))
    with plan.prepare(model) as prepared, prepared.open() as request:
        y = model(X)
    assert set(request.acts) == {"out:head", "in:head"}
    assert torch.equal(request.acts["out:head"], y)
    same = fh.Plan(fh.keep("head"), fh.keep("h*"))
    with pytest.raises(fh.HookError, match=r"entry 1 keeps 'head' again: give one .* a label"):
        same.prepare(model)
    assert instrumented(model) == []


def test_a_plan_is_prepared_on_several_models() -> None:
    plan = fh.Plan(fh.on("embed", fh.Zero()), fh.keep("embed"))
    one, other = Net(WIDTH), Net(WIDTH)
    with plan.prepare(one) as first, plan.prepare(other) as second:
        with first.open() as outer, second.open() as inner:
            one(X)
            assert list(inner.acts) == []
            other(X)
        assert outer.acts["embed"].abs().sum() == inner.acts["embed"].abs().sum() == 0
    assert instrumented(one) == instrumented(other) == []


class Answering(Net):
    """Answers for every name."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return self.answer(name)

    def answer(self, _name: str) -> Any:
        return None


class Raising(Answering):
    def answer(self, name: str) -> Any:
        raise KeyError(name)


class Sending(Answering):
    def answer(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return functools.partial(pytest.fail, f"{name} was called")


@pytest.mark.parametrize("kind", [Answering, Raising, Sending])
def test_a_model_that_answers_for_every_name(kind: type[Answering]) -> None:
    model = kind(WIDTH)
    plan = fh.Plan(fh.keep("act"), fh.on(first_layers, fh.Zero()))
    for _ in range(2):
        assert len(fh.select(model, nn.Linear)) > 0
        with fh.capture(model, ["act", "head"]) as acts, plan.open(model) as request:
            model(X)
        assert not request.acts["act"].any()
        assert not acts["head"].any()


def test_closing_a_plan_while_requests_are_open() -> None:
    model = Net(WIDTH)
    expected = model(X)
    prepared = fh.Plan(fh.on("embed", fh.Zero()), fh.keep("head")).prepare(model)
    waiting = prepared.open()
    with prepared.open() as request:
        changed = model(X)
        prepared.close()
        prepared.close()
        assert torch.equal(model(X), expected)
    assert torch.equal(request.acts["head"], changed)
    assert not torch.equal(changed, expected)
    with pytest.raises(fh.HookError, match="closed"):
        prepared.open()
    with pytest.warns(fh.errors.NeverFiredWarning, match="'head'"), waiting:
        assert torch.equal(model(X), expected)
    assert list(waiting.acts) == []
    assert instrumented(model) == []


def test_closing_a_request_ends_it_where_it_is_entered() -> None:
    model = Net(WIDTH)
    expected = model(X)
    with fh.Plan(fh.on("embed", fh.Zero())).prepare(model) as prepared:
        request = prepared.open()
        with request:
            assert not torch.equal(model(X), expected)
            request.close()
            assert request.closed
            assert torch.equal(model(X), expected)
            assert repr(request) == f"<Request {request.id}, closed>"
            with pytest.raises(fh.HookError, match="activate needs"), request.activate():
                pass
        assert in_no_scope()
        request = prepared.open()
        with request:
            in_thread(request.close)
            assert torch.equal(model(X), expected)
        assert in_no_scope()
        with pytest.raises(fh.HookError, match="not entered, or was already left"):
            request.__exit__(None, None, None)
    assert torch.equal(model(X), expected)


def test_a_detector_in_a_plan_distinguishes_modules() -> None:
    model = Net(WIDTH)
    calls = CallCounter()
    plan = fh.Plan(fh.on(["embed", "act"], calls))
    with plan.prepare(model) as prepared, prepared.open():
        model(X)
    by_module = {name: each.snapshot()["calls"] for name, each in calls.modules.items()}
    assert by_module == {"embed": 1, "act": 2}


def test_copies_of_the_model_have_no_plan() -> None:
    model = Net(WIDTH)
    expected = model(X)
    with fh.Plan(fh.on("embed", fh.Zero())).prepare(model) as prepared, prepared.open():
        assert not torch.equal(model(X), expected)
        copied = copy.deepcopy(model)
        pickled = pickle.loads(pickle.dumps(model))
        assert torch.equal(pickled(X), expected)
    assert torch.equal(copied(X), expected)
    assert in_no_scope()


# --- One request ---------------------------------------------------------------------------------


def test_open_prepares_for_one_request() -> None:
    model, plan = Net(WIDTH), fh.Plan(fh.on("head", fh.Zero()), fh.keep("act"))
    plain = model(X)
    with plan.open(model, max_bytes=2**20) as request:
        assert not model(X).any()
        assert torch.equal(in_thread(lambda: model(X)), plain)
    assert instrumented(model) == []
    assert torch.equal(model(X), plain)
    assert request.acts["act"].shape == X.shape
    assert request.prepared.closed
    with pytest.raises(fh.HookError, match="was closed"):
        request.prepared.open()


def test_a_request_that_is_not_entered_takes_its_plan_with_it() -> None:
    model = Net(WIDTH)
    request = fh.Plan(fh.on("head", fh.Zero())).open(model, deadline=60)
    with fh.batch({request: 0}):
        assert not model(X)[0].any()
    del request
    assert instrumented(model) == []


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"prompt": 0}, ValueError),
        ({"max_bytes": 0}, ValueError),
        ({"prompt": "long"}, fh.HookTypeError),
        ({"deadline": -1.0}, ValueError),
    ],
)
def test_a_request_that_cannot_be_opened_leaves_no_hook(
    options: dict[str, Any], error: type[Exception]
) -> None:
    model = Net(WIDTH)
    with pytest.raises(error) as raised:
        fh.Plan(fh.on("head", fh.Zero())).open(model, **options)
    assert raised.value  # its traceback refers to the prepared plan
    assert instrumented(model) == []

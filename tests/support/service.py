"""The example's service in this process, and requests to it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from typing import TYPE_CHECKING, Any

from prometheus_client.parser import text_string_to_metric_families

import ferrohook as fh
from examples.service.app import Settings, create_app
from support.http_server import serving_app
from support.limits import LIMIT

if TYPE_CHECKING:
    from collections.abc import Iterator

    import httpx

    from examples.service.encoder import Encoder

TEXTS = ["A cat sleeps.", "Interest rates rose again this quarter, and nobody knows why."]
SETTINGS = Settings(threads=2, seconds=LIMIT, max_body=100_000)
SEPARATE = dataclasses.replace(SETTINGS, max_requests=1)
"""A forward for each request."""


@contextlib.contextmanager
def serving(encoder: Encoder, settings: Settings = SETTINGS) -> Iterator[str]:
    """Runs the service in this process; yields its address."""
    with serving_app(create_app(encoder, settings), settings.seconds) as url:
        yield url


def as_json(request: dict[str, Any]) -> dict[str, Any]:
    """A request, in which a plan may be an `fh.Plan`."""
    written = {
        name: json.loads(it.to_json()) if isinstance(it, fh.Plan) else it
        for name, it in request.items()
    }
    return {"texts": TEXTS, **written}


def embed(client: httpx.Client, **request: Any) -> dict[str, Any]:
    answer = client.post("/embed", json=as_json(request))
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def refused(client: httpx.Client, status: int, **request: Any) -> str:
    answer = client.post("/embed", json=as_json(request))
    assert answer.status_code == status, answer.text
    assert answer.json().keys() == {"detail"}
    detail: str = answer.json()["detail"]
    return detail


def metrics(client: httpx.Client) -> dict[tuple[str, str], float]:
    """Values of metrics without a label besides the module, by name and module."""
    answer = client.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, sample.labels.get("module", "")): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
        if "le" not in sample.labels
    }

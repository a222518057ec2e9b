"""`examples/vllm_service` with two replicas on a CPU, one of which is killed under load."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: run `make vllm`")
pytest.importorskip("ray", reason="needs Ray: run `make vllm`")

import httpx

import support.engines
from ferrohook.engines.wire import HEADER, unpacked
from support.vllm_engine import ENVIRONMENT, EOS, Answer, patience, random_jobs
from support.vllm_server import TEMPLATE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.engines import Job

ROOT = Path(__file__).parents[3]
NEW = 24
IN_FLIGHT = 12
RAY_IS_LATE = "The current node timed out during startup"
LOST = "was lost: the text is not whole", "does not answer; it had"


@pytest.fixture(autouse=True)
def _eos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support.engines, "EOS", EOS)


@pytest.fixture(scope="module")
def service(models: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("service")
    sockets = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # a short name
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {
        "port": port,
        "replicas": 2,
        "cpus": 0.5,
        "model": models["llama"][0],
        "dtype": "float32",
        "max-model-len": 256,
        "max-num-seqs": 16,
        "max-num-batched-tokens": 64,
        "block-size": 32,
        "kv-cache-memory-bytes": 2**26,
        "chat-template": TEMPLATE,
    }
    command = [sys.executable, "-m", "examples.vllm_service", "--enforce-eager"]
    command += [f"--{name}={value}" for name, value in options.items()]
    ray = {"RAY_TMPDIR": sockets, "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    log = folder / "log"
    # Triton's stub is on the path of V2.
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, **ENVIRONMENT, **ray, "PYTHONPATH": path}

    def start() -> subprocess.Popen[bytes]:
        with log.open("w") as out:
            return subprocess.Popen(
                command, cwd=folder, stdout=out, stderr=subprocess.STDOUT, env=environment
            )

    address = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + 0.8 * patience()
    process = start()
    try:
        while replicas(address) != {"vllm-0": True, "vllm-1": True}:
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            if process.poll() is not None:
                # Ray gives a node 30 seconds to start, on any machine.
                assert RAY_IS_LATE in log.read_text(), log.read_text()[-4000:]
                end_processes_in(folder)
                process = start()
            time.sleep(0.2)
        yield address
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        end_processes_in(folder)
        process.wait()
        shutil.rmtree(sockets, ignore_errors=True)


def replicas(address: str) -> Any:
    """Names of the replicas that answer, and True if they serve plans."""
    try:
        return httpx.get(f"{address}/replicas").raise_for_status().json()
    except httpx.HTTPError:
        return {}


def processes_in(folder: Path) -> list[int]:
    """Processes of the service: processes that work in its folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "cwd").readlink() == folder:
                found.append(int(process.name))
    return found


def end_processes_in(folder: Path) -> None:
    """Kills the processes of the service."""
    for pid in processes_in(folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def server_process(replica: str) -> int:
    """Pid of the server of vLLM that a replica started."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = (process / "stat").read_text().rpartition(")")[2].split()[1]
            title = Path(f"/proc/{parent}/cmdline").read_text()
            if replica in title and "api_server" in (process / "cmdline").read_text():
                return int(process.name)
    raise LookupError(replica)


async def ask(client: httpx.AsyncClient, job: Job, *, stream: bool) -> Answer | str:
    """Sends a request; returns its answer, or its error."""
    plan = job.plan
    body = {
        "prompt": job.prompt,
        "max_tokens": NEW,
        "temperature": 0,
        "stream": stream,
        "return_token_ids": True,
        "vllm_xargs": None if plan is None else {"ferrohook": plan.to_json()},
    }
    answer = await client.post("/v1/completions", json=body)
    if not answer.is_success:
        return str(answer.json()["error"]["message"])
    events = [answer.text]
    if stream:
        lines = [line for line in answer.text.split("\n") if line]
        events = [line.removeprefix("data: ") for line in lines if line != "data: [DONE]"]
        if "error" in (last := json.loads(events[-1])):
            return str(last["error"]["message"])
        assert lines[-1] == "data: [DONE]"
    found = [json.loads(event) for event in events]
    tokens = [
        token for it in found for choice in it["choices"] for token in choice["token_ids"] or []
    ]
    acts = {}
    if job.kept:
        token = {HEADER: answer.headers[HEADER]}
        path = f"/v1/ferrohook/captures/{found[0]['id']}"
        captures = await client.get(path, headers=token)
        if not captures.is_success:
            return str(captures.json()["error"]["message"])
        acts = unpacked(captures.content).acts
    return Answer(tokens, acts)


def test_the_page_shows_text_and_norms(service: str) -> None:
    playwright = pytest.importorskip("playwright.sync_api")
    if (chromium := shutil.which("chromium")) is None:
        pytest.skip("needs Debian's chromium, and there is none here")
    with playwright.sync_playwright() as tool:
        page = tool.chromium.launch(executable_path=chromium, args=["--no-sandbox"]).new_page()
        faults: list[str] = []
        page.on("console", lambda message: faults.append(message.text))
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.goto(service)
        playwright.expect(page.locator("#layer option")).to_have_count(4)
        page.fill("#message", "w5 w6 w7 w8")
        page.fill("#tokens", "20")
        texts, points = [], []
        for scale, label in [("0", "not steered"), ("9", "steered by 9 at model.layers.2")]:
            page.fill("#scale", scale)
            page.click("button")
            playwright.expect(page.locator("#label")).to_have_text(label, timeout=60_000)
            texts.append(page.inner_text("#text"))
            points.append(page.get_attribute("#now", "points").split(" "))
            tokens = 4 + len(texts[-1].split())
            assert len(points[-1]) in {tokens - 1, tokens}  # the text has no end token
        assert texts[0] != texts[1]
        assert len(page.get_attribute("#before", "points").split(" ")) == len(points[0])
        page.fill("#tokens", "1000")  # more than fit: refused by the server
        page.click("button")
        playwright.expect(page.locator("#label")).to_have_class("bad")
        assert page.inner_text("#text") == ""
        assert [fault for fault in faults if "400" not in fault] == []


def test_a_replica_is_killed_under_load(models: Any, service: str) -> None:
    _, model = models["llama"]
    jobs = random_jobs(90, seed=71)
    victim = server_process("vllm-0")
    answers: dict[int, Answer | str] = {}

    async def run() -> None:
        waiting = iter(enumerate(jobs))
        async with httpx.AsyncClient(base_url=service, timeout=120) as client:

            async def send() -> None:
                for number, job in waiting:
                    answers[number] = await ask(client, job, stream=number % 2 == 0)
                    if len(answers) == len(jobs) // 3:
                        os.kill(victim, signal.SIGKILL)  # the others of IN_FLIGHT are on their way

            await asyncio.gather(*(send() for _ in range(IN_FLIGHT)))

    asyncio.run(run())
    assert replicas(service)["vllm-1"]
    errors = {number: it for number, it in answers.items() if isinstance(it, str)}
    assert len(answers) == len(jobs)
    assert len(errors) <= IN_FLIGHT
    for number, error in errors.items():
        assert any(reason in error for reason in LOST), error
        assert number % 2 == 0 or jobs[number].kept, "asked again, as no answer had begun"
    for number, job in enumerate(jobs):
        if number not in errors:
            job.check(model, answers[number], NEW)

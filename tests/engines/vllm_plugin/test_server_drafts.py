"""The OpenAI server of vLLM with speculative decoding: clients get nothing of rejected drafts."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: run `make vllm`")

import httpx

import support.engines
from ferrohook.engines.wire import FIELD, GATES, HEADER, Captured, unpacked
from ferrohook.gates.streaming import numbers_of
from support import engine_scenes as scenes
from support.engines import Job
from support.speculation import (
    asked_alone,
    drafted_jobs,
    save_repeating_model,
    speculative_config,
)
from support.vllm_engine import EOS, Answer
from support.vllm_server import KEY, body, frames_of, serving

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

NEW = 24


class Drafting(NamedTuple):
    """A server that drafts, and its model."""

    address: str
    model: Any

    def drafts(self) -> tuple[int, int]:
        """Returns how many drafts it accepted and rejected."""
        text = httpx.get(f"{self.address}/metrics", headers=KEY).text
        accepted, drafted = (
            sum(map(float, re.findall(rf"spec_decode_num_{name}_tokens_total{{.*}} (\S+)", text)))
            for name in ("accepted", "draft")
        )
        return int(accepted), int(drafted - accepted)


@pytest.fixture(autouse=True)
def _eos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support.engines, "EOS", EOS)


@pytest.fixture(scope="module", params=["synchronous", "ahead"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Drafting]:
    """Its model drafts for itself, with blocks for a few requests."""
    folder = tmp_path_factory.mktemp("repeating")
    model = save_repeating_model(folder)
    options = {
        "speculative-config": json.dumps(speculative_config("draft_model", folder)),
        "num-gpu-blocks-override": 11,
        "max-num-batched-tokens": 48,
    }
    with serving(folder, folder / "log", ahead=request.param == "ahead", **options) as made:
        yield Drafting(made.address, model)


@dataclasses.dataclass
class Choice:
    """An answer in a response."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    gates: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    """Values that were streamed with it."""
    ends: tuple[Any, Any] = (None, None)
    """Finish reason and stop reason."""
    captured: Captured = dataclasses.field(default_factory=lambda: Captured({}, {}))

    def check_gates(self) -> None:
        """Asserts that the values that were streamed are the ones that were kept, each once."""
        for name, values in self.gates.items():
            kept = self.captured.acts[f"@gate.{name}"]
            torch.testing.assert_close(torch.tensor(values), kept, equal_nan=True)


class Asked(NamedTuple):
    """A request of a client."""

    sent: dict[str, Any]
    captures: int = 0
    """Number of its answers, if it captures."""
    watched: bool = False
    """Its captures are streamed while it runs."""

    async def choices(self, client: httpx.AsyncClient, name: str, pause: float) -> list[Choice]:
        """Sends it after a pause; returns the answers with their captures."""
        await asyncio.sleep(pause)
        headers = {"X-Request-Id": name, HEADER: f"a token that only the client of {name} knows"}
        path = f"/v1/ferrohook/captures/cmpl-{name}"
        post = asyncio.ensure_future(
            client.post("/v1/completions", json=self.sent, headers=headers)
        )
        captured: list[Captured] = []
        if self.watched:
            paths = [f"{path}/stream?index={index}" for index in range(self.captures)]
            captured += await asyncio.gather(*(watch(client, post, it, headers) for it in paths))
        choices = choices_of(await post)
        for index in range(len(captured), self.captures):
            found = await client.get(path, params={"index": index}, headers=headers)
            assert found.is_success, found.text
            captured.append(unpacked(found.content))
        for choice, each in zip(choices, captured, strict=bool(captured)):
            choice.captured = each
            choice.check_gates()
            assert bool(choice.gates) == (self.sent["stream"] and "@gate" in str([*each.acts]))
        return choices


async def watch(
    client: httpx.AsyncClient, post: asyncio.Future[Any], path: str, headers: dict[str, str]
) -> Captured:
    """Reads captures while their request runs."""
    while True:
        late = post.done()
        found = await client.get(path, headers=headers)
        if found.is_success:
            break
        assert found.status_code == httpx.codes.NOT_FOUND
        assert not late, found.text
        await asyncio.sleep(0.01)  # the request is on its way
    frames = [unpacked(frame) for frame in frames_of(found.content)]
    acts, positions = (
        {
            name: torch.cat([getattr(it, field)[name] for it in frames if name in it.acts])
            for name in dict.fromkeys(name for it in frames for name in it.acts)
        }
        for field in ("acts", "positions")
    )
    return Captured(acts, positions)


def choices_of(answer: httpx.Response) -> list[Choice]:
    """Reads the answers of a response, streamed or not."""
    assert answer.is_success, answer.text
    lines = answer.text.splitlines()
    if not answer.headers["content-type"].startswith("text/event-stream"):
        lines = [f"data: {answer.text}"]
    parts = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert answer.headers.get(HEADER) == parts[0].get(FIELD)
    choices: dict[int, Choice] = {}
    for part in (it for each in parts for it in each["choices"]):
        choice = choices.setdefault(part["index"], Choice())
        choice.tokens += part.get("token_ids") or ()
        if part.get("finish_reason"):
            choice.ends = part["finish_reason"], part["stop_reason"]
        for name, values in part.get(GATES, {}).items():
            choice.gates.setdefault(name, []).extend(numbers_of(values))
    return [choices[index] for index in range(len(choices))]


def served(
    server: Drafting, asked: Sequence[Asked], name: str, accepts: int = 6
) -> list[list[Choice]]:
    """Serves requests that arrive at random; returns the answers to each.

    `accepts`: drafts that are accepted at least.
    """
    rng = random.Random(11)  # noqa: S311 (tests)

    async def run() -> list[list[Choice]]:
        async with httpx.AsyncClient(base_url=server.address, headers=KEY, timeout=120) as client:
            requests = [
                each.choices(client, f"{name}-{number}", 2 * rng.random())
                for number, each in enumerate(asked)
            ]
            return await asyncio.gather(*requests)

    before = server.drafts()
    found = asyncio.run(run())
    accepted, rejected = (now - then for now, then in zip(server.drafts(), before, strict=True))
    print(f"{name}: {accepted} drafts accepted, {rejected} rejected")
    assert accepted >= accepts
    assert rejected > 5
    return found


def answer_of(choice: Choice) -> Answer:
    """Returns an answer as `Job.check` takes it."""
    return Answer(choice.tokens, dict(choice.captured.acts))


def test_random_requests(server: Drafting, request: pytest.FixtureRequest) -> None:
    """Requests have one or two prompts and are streamed or not."""
    rng = random.Random(5)  # noqa: S311 (tests)
    plans = drafted_jobs(request.config.getoption("requests") or 32, seed=13)
    groups, asked = [], []
    for job in plans:
        prompts = [job.prompt, rng.choice(plans).prompt][: rng.choice([1, 1, 2])]
        groups.append([dataclasses.replace(job, prompt=prompt) for prompt in prompts])
        sent = body(job, prompt=prompts, stream=rng.random() < 1 / 2, max_tokens=NEW)
        asked.append(Asked(sent, job.captures * len(prompts), rng.random() < 1 / 3))
    for jobs, choices in zip(groups, served(server, asked, "random"), strict=True):
        for job, choice in zip(jobs, choices, strict=True):
            job.check(server.model, answer_of(choice), NEW)


def test_each_answer_has_its_own_captures(server: Drafting) -> None:
    """Each has any text: vLLM has no temperatures for drafts on a CPU.

    It casts them to int64, and its kernel writes into the copy.
    """
    jobs = [job for job in drafted_jobs(24, seed=17) if job.captures]
    asked = [
        Asked(
            body(job, n=2, temperature=1.0, stream=bool(number % 2), max_tokens=NEW),
            captures=2,
            watched=number % 3 == 0,
        )
        for number, job in enumerate(jobs)
    ]
    for job, choices in zip(jobs, served(server, asked, "several", accepts=0), strict=True):
        assert len(choices) == 2
        for choice in choices:
            job.check_acts(server.model, answer_of(choice))


def test_plans_end_their_requests_at_tokens_only(server: Drafting) -> None:
    stops = scenes.random_stops(lambda *asked: asked_alone(server.model, *asked), 24)
    asked = []
    for number, it in enumerate(stops):
        xargs = {"ferrohook": it.plan.to_json()}
        changes = {"max_tokens": scenes.NEW, "stream": bool(number % 2)}
        sent = body(Job(it.prompt), vllm_xargs=xargs, **changes)
        asked.append(Asked(sent, captures=1, watched=number % 3 == 0))
    found = served(server, asked, "stops")
    for it, each, (choice,) in zip(stops, asked, found, strict=True):
        assert choice.tokens == it.text
        if it.text or not each.sent["stream"]:  # vLLM streams no event of an empty text
            assert choice.ends == ("stop", "the end")
        name = "@gate.the end"
        positions = choice.captured.positions[name].tolist()
        assert positions == [*range(len(it.prompt) + len(it.text))]
        assert float(choice.captured.acts[name][-1]) == pytest.approx(it.value, abs=1e-3)

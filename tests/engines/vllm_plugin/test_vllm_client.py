"""The client, and Inspect's provider on top of it, before the real server of vLLM."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: run `make vllm`")

import safetensors.torch

import ferrohook as fh
import support.engines
from ferrohook.client import (
    AsyncClient,
    Client,
    PlanFailedError,
    RequestRefusedError,
    ServerError,
)
from support.dictionary_jobs import FeatureJob, dictionaries, random_feature_jobs
from support.engine_scenes import Given, random_stops
from support.engines import Change, Job
from support.gate_streams import check_chunks, read_along
from support.vllm_engine import EOS, WIDTH, Answer, random_jobs
from support.vllm_server import NEW, Server, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ferrohook.client import Generated

PROMPT = [*range(10, 60)]
VECTOR = torch.linspace(-2, 2, WIDTH)
STEERED = Job(PROMPT, (Change(1, fh.Add(VECTOR), None),), ("model.layers.0",))
OPTIONS: Any = {"max_tokens": NEW, "temperature": 0, "return_token_ids": True}


@pytest.fixture(autouse=True)
def _eos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support.engines, "EOS", EOS)


@pytest.fixture(scope="module")
def server(models: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder, _ = models["llama"]
    with serving(folder, tmp_path_factory.mktemp("client") / "log") as made:
        yield made


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server.address, api_key="secret") as client:
        yield client


def answer_of(found: Generated) -> Answer:
    return Answer([*(found.token_ids or ())], dict(found.acts))


def test_random_requests(models: Any, server: Server) -> None:
    _, model = models["llama"]
    jobs = random_jobs(24, seed=71)

    async def run() -> list[Generated]:
        async def one(number: int, job: Job) -> Generated:
            if number % 2:
                return await client.generate(job.prompt, job.plan, **OPTIONS)
            async with client.stream(job.prompt, job.plan, **OPTIONS) as stream:
                _ = [piece async for piece in stream]
                return stream.generated

        async with AsyncClient(server.address, api_key="secret") as client:
            return await asyncio.gather(*(one(*pair) for pair in enumerate(jobs)))

    for job, found in zip(jobs, asyncio.run(run()), strict=True):
        job.check(model, answer_of(found), NEW)


@pytest.mark.parametrize("is_chat", [False, True])
def test_gates_are_read_along(models: Any, server: Server, is_chat: bool) -> None:
    """Each request reads its own, beside others; long prompts run in several steps."""
    jobs = [it for it in random_jobs(24, seed=3, gates=1.0) if it.gated][:8]
    jobs.append(Job([*range(10, 110)], gated=jobs[0].gated))
    asked: list[tuple[Any, Any]] = [(job.prompt, job.plan) for job in jobs]
    if is_chat:
        texts = [" ".join(f"w{token}" for token in job.prompt) for job in jobs]
        chats = [[{"role": "user", "content": text}] for text in texts]
        asked = [*zip(chats, (job.plan for job in jobs), strict=True)]
    found = read_along(server.address, [*asked, (PROMPT, None)], OPTIONS, api_key="secret")
    chunks, _ = found.pop()
    assert not any(chunk.gates for chunk in chunks)
    for job, (chunks, generated) in zip(jobs, found, strict=True):
        check_chunks(chunks, generated, ["g"], 0 if is_chat else len(job.prompt))
        if not is_chat:  # whose prompt is the template's
            job.check(models["llama"][1], answer_of(generated), NEW)


def test_a_stop_gives_the_value_that_it_is_for(server: Server, client: Client) -> None:
    def asked(prompt: list[int], plan: Any, _new_tokens: int) -> Given:
        found = client.generate(prompt, plan, **OPTIONS)
        return Given([*(found.token_ids or ())], dict(found.acts), dict(found.positions), 0)

    stops = [it for it in random_stops(asked, 12) if it.text]
    found = read_along(
        server.address, [(it.prompt, it.plan) for it in stops], OPTIONS, api_key="secret"
    )
    for stop, (chunks, generated) in zip(stops, found, strict=True):
        assert [*(generated.token_ids or ())] == stop.text
        check_chunks(chunks, generated, ["the end"], len(stop.prompt))
        last = chunks[-1].gates["the end"]
        assert float(last[-1]) == pytest.approx(stop.value, abs=1e-3)


def test_vectors_by_name(models: Any, client: Client) -> None:
    _, model = models["llama"]
    client.put_vectors({"calm": VECTOR})
    assert client.vectors() == {"calm": (WIDTH,)}
    hook = {"type": "Add", "vector": {"tensor": "calm"}}
    entries = [{"type": "on", "what": "model.layers.1", "hook": hook}]
    found = client.generate(PROMPT, {"version": 1, "entries": entries}, **OPTIONS)
    Job(PROMPT, STEERED.changes).check(model, answer_of(found), NEW)
    client.drop_vectors(["calm"])
    with pytest.raises(KeyError):
        client.drop_vectors(["calm"])


def test_dictionaries_by_name(models: Any, server: Server, client: Client) -> None:
    """Requests at once that share dictionaries; a name means one at a time."""
    jobs = random_feature_jobs(6)

    async def ask(asked: list[FeatureJob]) -> list[Generated]:
        async with AsyncClient(server.address, api_key="secret") as one:
            await one.put_dictionaries(dictionaries(asked[0].seed).values())
            return await asyncio.gather(
                *(one.generate(job.prompt, job.plan, **OPTIONS) for job in asked)
            )

    for seed in (0, 1):
        asked = [dataclasses.replace(job, seed=seed) for job in jobs]
        for job, found in zip(asked, asyncio.run(ask(asked)), strict=True):
            job.check(models["llama"][1], Given([*found.token_ids], found.acts, {}, 0))
    with Client(server.address) as other, pytest.raises(ServerError, match="401"):
        other.dictionaries()
    names = {"sae/relu", "sae/groupmax", "sae/coder"}
    assert client.dictionaries().keys() == names
    client.drop_dictionaries(names)
    with pytest.raises(RequestRefusedError, match="no dictionary 'sae/"):
        client.generate(PROMPT, jobs[0].plan, **OPTIONS)


def test_several_answers_have_captures_of_their_own(models: Any, client: Client) -> None:
    options = OPTIONS | {"n": 4, "temperature": 1.0}
    first = client.generate(PROMPT, STEERED.plan, **options)
    found = [first, *first.others]
    assert len({each.token_ids for each in found}) == 4
    for each in found:
        STEERED.check_acts(models["llama"][1], answer_of(each))
    fails = fh.Plan(fh.keep("model.layers.1", max_bytes=1))
    with pytest.raises(PlanFailedError, match="max_bytes"):
        client.generate(PROMPT, fails, **options)


def test_errors(client: Client) -> None:
    with pytest.raises(RequestRefusedError, match="closest names"):
        client.generate(PROMPT, fh.Plan(fh.keep("model.layers.99")), **OPTIONS)
    fails = fh.Plan(fh.keep("model.layers.1", max_bytes=1))
    with pytest.raises(PlanFailedError, match="max_bytes"):
        client.generate(PROMPT, fails, **OPTIONS)
    streamed = client.stream(PROMPT, fails, **OPTIONS)
    with pytest.raises(PlanFailedError, match="max_bytes"), streamed as stream:
        _ = [*stream]


def test_features(client: Client) -> None:
    info = client.info()
    assert info.engine == "vllm"
    assert info.module("model.layers.1").width == WIDTH
    assert info.modules["lm_head"].refused is not None


def test_inspect(models: Any, server: Server, tmp_path: Path) -> None:
    inspect_ai = pytest.importorskip("inspect_ai", reason="needs inspect-ai")
    from inspect_ai.dataset import Sample  # noqa: PLC0415 (where it is installed)
    from inspect_ai.scorer import match  # noqa: PLC0415 (likewise)

    words, plan = "w10 w11 w12", STEERED.plan
    assert plan is not None
    with Client(server.address, api_key="secret") as client:
        asked: Any = [{"role": "user", "content": words}]
        right = client.generate(asked, plan, max_tokens=NEW, temperature=0)
        assert right.text != client.generate(asked, max_tokens=NEW, temperature=0).text
    target = right.text
    task = inspect_ai.Task(
        dataset=[Sample(input=words, target=target)], scorer=match(location="exact")
    )
    (log,) = inspect_ai.eval(
        task,
        model="ferrohook/tiny",
        model_base_url=f"{server.address}/v1",
        model_args={
            "api_key": "secret",
            "plan": plan.to_json(),
            "captures": str(tmp_path / "acts"),
        },
        temperature=0,
        max_tokens=NEW,
        log_dir=str(tmp_path / "logs"),
        display="none",
    )
    assert log.status == "success", log.error
    assert log.samples[0].output.completion.split() == target.split()
    assert log.results.scores[0].metrics["accuracy"].value == 1.0
    acts = safetensors.torch.load_file(log.samples[0].output.metadata["captures"])
    torch.testing.assert_close(acts, dict(right.acts))

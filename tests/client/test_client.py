"""The client before a server with a real model: texts, captures, streams, vectors."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
pytest.importorskip("safetensors")
pytest.importorskip("transformers")

import ferrohook as fh
from ferrohook.client import (
    AsyncClient,
    Client,
    PlanFailedError,
    RequestRefusedError,
    ServerError,
    UnavailableError,
)
from ferrohook.engines.wire import digest_of
from support.dictionaries import D_SAE, dictionary_of
from support.engines import WIDTH, Change, Job, random_jobs
from support.gate_streams import check_chunks, read_along
from support.planned_server import tokens_of, words
from support.serving import Answer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ferrohook.client import Generated
    from support.planned_server import PlannedServer

NEW = 8
PROMPT = [5, 9, 11, 30, 7]
VECTOR = torch.linspace(-2, 2, WIDTH)
STEERED = Job(PROMPT, (Change(1, fh.Add(VECTOR), None),), ("model.layers.2",))


@pytest.fixture
def client(server: PlannedServer, url: str) -> Iterator[Client]:
    with Client(url) as client:
        yield client


def check(server: PlannedServer, job: Job, generated: Generated) -> None:
    assert generated.token_ids is not None
    assert generated.text == words([*generated.token_ids])
    job.check(server.model, Answer([*generated.token_ids], dict(generated.acts)), NEW)
    for name, act in generated.acts.items():
        assert generated.positions[name].tolist() == [*range(len(act))]


def ask(client: Client, plan: fh.Plan | None, streamed: bool) -> Generated:
    if not streamed:
        return client.generate(PROMPT, plan, max_tokens=NEW)
    with client.stream(PROMPT, plan, max_tokens=NEW) as stream:
        _ = [*stream]
        return stream.generated


def chat(tokens: list[int]) -> list[dict[str, str]]:
    return [{"role": "user", "content": words(tokens)}]


@pytest.mark.parametrize(
    "prompt", [PROMPT, words(PROMPT), chat(PROMPT)], ids=["ids", "text", "chat"]
)
@pytest.mark.parametrize(
    "job",
    [STEERED, Job(PROMPT, STEERED.changes), Job(PROMPT)],
    ids=["plan", "without captures", "none"],
)
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_texts_and_captures_are_those_of_the_request_alone(  # noqa: PLR0913, PLR0917 (parameters)
    server: PlannedServer, client: Client, prompt: Any, job: Job, streamed: bool, engine: str
) -> None:
    server.engine = engine
    if not streamed:
        check(server, job, client.generate(prompt, job.plan, max_tokens=NEW))
        return
    with client.stream(prompt, job.plan, max_tokens=NEW) as stream:
        with pytest.raises(fh.HookError, match="not read to the end"):
            _ = stream.generated
        pieces = [*stream]
    assert len(pieces) == len(stream.generated.token_ids or ())
    assert "".join(pieces) == stream.generated.text
    check(server, job, stream.generated)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_gates_are_read_along(server: PlannedServer, client: Client, url: str, engine: str) -> None:
    """Both clients read them with the tokens that follow; the text alone is as before."""
    server.engine = engine
    direction = torch.linspace(-1, 1, WIDTH)
    plan = fh.Plan(
        fh.gate("each", "model.layers.1", fh.Dot(direction)),
        fh.gate("late", "model.layers.1", fh.Norm(), over=fh.window(len(PROMPT) + 2)),
        fh.gate("unkept", "model.layers.1", fh.Norm()),
        fh.keep("@gate.each"),
        fh.keep("@gate.late"),
    )
    with client.stream(PROMPT, plan, max_tokens=NEW) as stream:
        chunks = [*stream.chunks()]
    check_chunks(chunks, stream.generated, ["each", "late"], len(PROMPT))
    assert chunks[0].gates["late"].isnan().all()
    assert [len(each.gates["each"]) for each in chunks] == [len(PROMPT)] + [1] * (NEW - 1)
    hidden: list[torch.Tensor] = []
    hook = server.model.model.layers[1].register_forward_hook(
        lambda _module, _args, output: hidden.append(output[0])
    )
    ids = [*PROMPT, *(stream.generated.token_ids or ())][:-1]
    server.model(torch.tensor([ids]), use_cache=False)
    hook.remove()
    given = torch.cat([each.gates["each"] for each in chunks])
    torch.testing.assert_close(given, hidden[0] @ direction, rtol=1e-3, atol=1e-3)
    for (own, generated), job in zip(
        read_along(url, [(PROMPT, plan), (PROMPT, None)], {"max_tokens": NEW}),
        (["each", "late"], []),
        strict=True,
    ):
        check_chunks(own, generated, job, len(PROMPT) if job else 0)
    with client.stream(PROMPT, plan, max_tokens=NEW) as stream:
        assert "".join(stream) == stream.generated.text


def test_many_requests_at_once(server: PlannedServer, url: str) -> None:
    jobs = [job for job in random_jobs(24, seed=5) if job.python is None]
    jobs = [Job(it.prompt, it.changes, tuple(n for n in it.kept if n != "lm_head")) for it in jobs]

    async def run() -> list[Generated]:
        async def one(number: int, job: Job) -> Generated:
            if number % 2:
                return await client.generate(job.prompt, job.plan, max_tokens=NEW)
            async with client.stream(job.prompt, job.plan, max_tokens=NEW) as stream:
                _ = [piece async for piece in stream]
                return stream.generated

        async with AsyncClient(url) as client:
            return await asyncio.gather(*(one(*pair) for pair in enumerate(jobs)))

    for job, found in zip(jobs, asyncio.run(run()), strict=True):
        check(server, job, found)


def test_threads_share_a_client(server: PlannedServer, client: Client) -> None:
    found: dict[int, Generated] = {}
    jobs = [STEERED, Job(PROMPT)] * 4
    threads = [
        threading.Thread(
            target=lambda n, job: found.update(
                {n: client.generate(job.prompt, job.plan, max_tokens=NEW)}
            ),
            args=pair,
        )
        for pair in enumerate(jobs)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    for number, job in enumerate(jobs):
        check(server, job, found[number])


def test_each_engine_gets_the_plan_in_its_field(server: PlannedServer, url: str) -> None:
    plan = STEERED.plan
    assert plan is not None
    for engine, key in (("vllm", "vllm_xargs"), ("sglang", "custom_params")):
        server.engine = engine
        with Client(f"{url}/v1/") as client:  # as OpenAI's clients take it
            check(
                server,
                STEERED,
                client.generate(PROMPT, plan, max_tokens=NEW, **{key: {"other": 1}}),
            )
        sent = server.bodies[-1]
        assert sent[key] == {"other": 1, "ferrohook": plan.to_json()}
        assert not sent.keys() & ({"vllm_xargs", "custom_params"} - {key})


def test_a_plan_as_json_names_uploaded_vectors(server: PlannedServer, client: Client) -> None:
    client.put_vectors({"calm/1": VECTOR, "other": torch.ones(2, WIDTH)[:, :3]})
    assert client.vectors() == {"calm/1": (WIDTH,), "other": (2, 3)}
    hook = {"type": "Add", "vector": {"tensor": "calm/1"}}
    entries = [{"type": "on", "what": "model.layers.1", "hook": hook}]
    entries.append({"type": "keep", "what": "model.layers.2"})
    body = {"version": 1, "entries": entries}
    for plan in (body, json.dumps(body)):
        check(server, STEERED, client.generate(PROMPT, plan, max_tokens=NEW))
    client.drop_vectors(["calm/1"])
    with pytest.raises(KeyError, match="calm/1"):
        client.drop_vectors(["calm/1"])
    with pytest.raises(RequestRefusedError, match="calm/1"):
        client.generate(PROMPT, body)
    with pytest.raises(fh.HookTypeError, match="the vector 'x' must be a tensor, got list"):
        client.put_vectors({"x": [1.0]})  # type: ignore[dict-item]


def test_a_plan_names_an_uploaded_dictionary(server: PlannedServer, client: Client) -> None:
    """The client sends it once: the server reports the digests of its dictionaries."""
    sae = dictionary_of("relu", width=WIDTH, name="sae/1", max_activations=torch.ones(D_SAE))
    for _ in range(2):
        client.put_dictionaries([sae])
    assert server.sent == ["sae/1"]
    told = client.dictionaries()["sae/1"]
    assert told["digest"] == digest_of(sae)
    assert (told["d_in"], told["d_sae"], told["activation"]) == (WIDTH, D_SAE, "relu")
    assert told["bytes"] == 4 * (2 * WIDTH * D_SAE + 2 * D_SAE + WIDTH)
    plan = fh.Plan(
        fh.on("model.layers.1", fh.Feature(sae, 3, set=2.0, unit="max")),
        fh.keep("model.layers.1", features=sae, index=[3, 5]),
    )
    found = client.generate(PROMPT, plan, max_tokens=NEW)
    alone, acts = fh.run(
        server.model,
        torch.tensor([[*PROMPT, *tokens_of(found.text)[:-1]]]),
        plan=plan,
    )
    assert alone.logits[0, len(PROMPT) - 1 :].argmax(-1).tolist() == tokens_of(found.text)
    torch.testing.assert_close(
        found.acts["model.layers.1"], acts["model.layers.1"][0], rtol=1e-4, atol=1e-4
    )
    other = dictionary_of("relu", seed=1, width=WIDTH, name="sae/1")
    client.put_dictionaries([other])
    assert server.sent == ["sae/1"] * 2
    assert client.dictionaries()["sae/1"]["digest"] == digest_of(other)
    with pytest.raises(ServerError, match="a dictionary has the name 'sae/1': drop it first"):
        client.put_vectors({"sae/1": VECTOR})
    assert client.vectors() == {}
    with pytest.raises(KeyError, match="sae/1"):
        client.drop_vectors(["sae/1"])
    client.drop_dictionaries(["sae/1"])
    assert client.dictionaries() == {}
    with pytest.raises(KeyError, match="sae/1"):
        client.drop_dictionaries(["sae/1"])
    with pytest.raises(RequestRefusedError, match="no dictionary 'sae/1' was uploaded"):
        client.generate(PROMPT, plan)
    with pytest.raises(ValueError, match="has no name: pass name="):
        client.put_dictionaries([dictionary_of("relu")])
    with pytest.raises(fh.HookTypeError, match="must be a list of Dictionary, got str"):
        client.put_dictionaries(["sae"])  # type: ignore[list-item]


def test_features_of_a_server(client: Client) -> None:
    info = client.info()
    assert (info.engine, info.capture_bytes) == ("vllm", 2**20)
    assert info.module("model.layers.1").width == WIDTH
    with pytest.raises(fh.HookError, match=r"no module 'model.layer.1'.*'model.layers.1'"):
        info.module("model.layer.1")
    with pytest.raises(fh.HookError, match="cannot use the module 'lm_head': it never runs"):
        info.module("lm_head")


def test_a_bad_plan_is_refused_with_the_reason_of_the_server(client: Client) -> None:
    with pytest.raises(RequestRefusedError, match=r"400: .*closest names") as caught:
        client.generate(PROMPT, fh.Plan(fh.keep("model.layers.9")))
    assert isinstance(caught.value, ValueError)
    assert caught.value.status == 400
    assert caught.value.url.endswith("/v1/completions")


@pytest.mark.parametrize("streamed", [False, True])
def test_a_plan_that_fails(client: Client, streamed: bool) -> None:
    plan = fh.Plan(fh.keep("model.layers.1", max_bytes=1))
    with pytest.raises(PlanFailedError, match="max_bytes"):
        ask(client, plan, streamed)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_plan_that_a_server_ignores_is_an_error(
    server: PlannedServer, client: Client, streamed: bool, engine: str
) -> None:
    """The text of the model without the plan is never returned as one with it."""
    server.engine = engine
    client.info()
    server.ignores_plans = True  # such as one that was restarted without the plug-in
    with pytest.raises(ServerError, match="the server ignored the plan"):
        ask(client, STEERED.plan, streamed)
    check(server, Job(PROMPT), client.generate(PROMPT, max_tokens=NEW))


def test_a_stream_that_breaks_off_is_no_text(server: PlannedServer, client: Client) -> None:
    server.breaks_off = True
    with pytest.raises(UnavailableError, match="stopped before"):
        ask(client, None, streamed=True)


def test_a_busy_server_and_one_that_is_not_there(server: PlannedServer, client: Client) -> None:
    server.busy = 1
    with pytest.raises(UnavailableError, match="503: the server is busy"):
        client.generate(PROMPT)
    check(server, Job(PROMPT), client.generate(PROMPT, max_tokens=NEW))
    with Client("http://127.0.0.1:9") as nowhere:
        with pytest.raises(UnavailableError, match="no answer: ConnectError") as caught:
            nowhere.generate(PROMPT)
        assert isinstance(caught.value, ConnectionError)


@pytest.mark.parametrize(
    ("prompt", "plan", "reason"),
    [
        ([], None, r"a text, a list of tokens or a list of messages, got \[\]"),
        ([1.5], None, "got a list of float"),
        ([True], None, "got a list of bool"),
        (None, None, "got NoneType"),
        ("w1", 3, "a plan must be a Plan or its JSON, got int"),
        ("w1", fh.Plan(fh.on("model", print)), "Python function"),
        ("w1", fh.Plan(fh.on("model", fh.Add(torch.tensor([float("nan")])))), "NaN"),
        ("w1", "{", "Expecting property name"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_sent(
    server: PlannedServer, client: Client, prompt: Any, plan: Any, reason: str
) -> None:
    with pytest.raises((fh.HookTypeError, ValueError), match=reason):
        client.generate(prompt, plan)
    assert not server.bodies


@pytest.mark.parametrize("name", ["at", "dtype", "hooks", "keep", "output_index", "max_bytes"])
def test_an_option_of_plans_that_a_server_would_ignore_is_refused(
    server: PlannedServer, client: Client, name: str
) -> None:
    with pytest.raises(fh.HookTypeError, match=rf"not declare {name}= and may ignore it"):
        client.generate("w1", **{name: 1})
    assert not server.bodies
    client.generate("w1", stop=["w9"], priority=1)  # fields of completions
    assert server.bodies


def test_stream_is_a_method_and_no_field(server: PlannedServer, client: Client) -> None:
    with pytest.raises(fh.HookTypeError, match="the client's method generate or stream"):
        client.generate("w1", stream=True)
    with (
        pytest.raises(fh.HookTypeError, match="the client's method generate or stream"),
        client.stream("w1", stream=False),
    ):
        pass
    assert not server.bodies


def test_tokens_and_words_are_inverse() -> None:
    assert tokens_of(words(PROMPT)) == PROMPT

"""Routes of the plug-in with a worker of this process and no engine: what comes between the two."""

from __future__ import annotations

import asyncio
import copy
import gc
import threading
import types
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

pytest.importorskip("vllm", reason="needs vLLM: run `make vllm`")

import fastapi
import httpx
import safetensors.torch

import ferrohook as fh
from ferrohook.engines import routes, uploads
from ferrohook.engines.model.modules import ModuleInfo, ModuleTable
from ferrohook.engines.planned import EnginePlans
from ferrohook.engines.vllm import calls, http, plugin, requests, supported
from ferrohook.engines.vllm.clients import extra_args
from ferrohook.engines.vllm.plugin import connect_async
from ferrohook.engines.vllm.worker import RunnerWorker
from ferrohook.engines.wire import (
    FIELD,
    HEADER,
    digest_of,
    error_of,
    packed_uploads,
    unpacked,
)
from ferrohook.engines.worker import ServedModel
from support.dictionaries import dictionary_of
from support.vllm_server import frames_of
from support.vllm_shapes import config

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

    from ferrohook.engines.vllm.requests import FrontEnd

WIDTH, PROMPT = 4, 3
OWN = "token of the request a"


class Engine:
    """Stands in for the `AsyncLLM` of `Routes`; the worker answers in this process."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH)).requires_grad_(False)
        runner = types.SimpleNamespace(get_model=lambda: self.model)
        self.worker = RunnerWorker(runner, config())
        table = {name: ModuleInfo("tensor", WIDTH, 16) for name in ("", "0")}
        self.worker.served = ServedModel(ModuleTable(table, {}), EnginePlans(self.model))
        self.vllm_config = config()
        self.input_processor = type("InputProcessor", (), {})()
        self.output_processor: Any = type("OutputProcessor", (), {})()
        self.output_processor.request_states = {}
        self.errored = False
        self.dead_error = RuntimeError("the engine is dead")
        self.before: Callable[[str], Coroutine[Any, Any, None] | None] = lambda _name: None
        """Called before each call of the worker, with its name."""
        self.rows = torch.zeros(0, WIDTH)
        self.new_tokens = 1
        """Requests that the front end has seen."""

    @property
    def engine_core(self) -> Engine:
        """The client of the engine cores, which are one."""
        return self

    async def call_utility_all_async(
        self, method: str, name: str, _timeout: None, args: tuple[Any, ...], _kwargs: None
    ) -> list[list[bytes]]:
        assert (method, name) == ("collective_rpc", "ferrohook_call")
        name, *rest = args
        if (waiting := self.before(name)) is not None:
            await waiting
        return [[getattr(self.worker, name)(*rest)]]

    async def send(self, plan: fh.Plan, token: str | None = OWN) -> None:
        """Takes the request "a" of three tokens, as far as the worker's queue."""
        front_end = await connect_async(self)
        request = types.SimpleNamespace(
            request_id="a",
            sampling_params=types.SimpleNamespace(
                extra_args={"ferrohook": plan.to_json(), FIELD: token}, n=1, max_tokens=8
            ),
            resumable=False,
            prompt_token_ids=[5] * PROMPT,
            cache_salt=None,
        )
        front_end.prepare(request)
        self.payload = request.sampling_params.extra_args["ferrohook"]
        request.request_id = "a-engine"
        front_end.joined(request)
        made = types.SimpleNamespace(num_output_tokens=lambda: self.new_tokens)
        state = types.SimpleNamespace(prompt_len=PROMPT, detokenizer=made)
        self.output_processor.request_states["a-engine"] = state

    def step(self, rows: int) -> None:
        """Runs the next rows of the request."""
        first = len(self.rows)
        if not first:
            params = types.SimpleNamespace(extra_args={"ferrohook": self.payload})
            self.worker.take_request("a-engine", params, PROMPT)
        x = torch.randn(rows, WIDTH)
        self.worker.settle(["a-engine"], [rows], [first])
        with self.worker.running(rows):
            self.rows = torch.cat([self.rows, self.model(x)])

    async def finish(self) -> None:
        """Ends the request in the front end, in one turn of its event loop."""
        front_end = await connect_async(self)
        front_end.finished("a-engine", len(self.rows) + 1)
        self.output_processor.request_states.clear()


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr(http, "_PAUSE", 0.0)
    monkeypatch.setattr(calls, "_PATIENCE", 0.001)
    return Engine()


async def asked(engine: Engine, method: str, path: str, **sent: Any) -> httpx.Response:
    """Asks the routes of a server that has the engine, with the token of its requests."""
    sent.setdefault("headers", {HEADER: OWN})
    served = http.VLLMRoutes()
    await served.init_state(engine, None, None)
    app = fastapi.FastAPI()
    served.attach_router(app)
    return await request(app, method, path, **sent)


async def request(app: fastapi.FastAPI, method: str, path: str, **sent: Any) -> httpx.Response:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.request(method, f"/v1/ferrohook/{path}", **sent)


async def streamed(engine: Engine) -> list[bytes]:
    response = await asked(engine, "GET", "captures/a/stream")
    assert response.status_code == httpx.codes.OK
    return frames_of(response.content)


KEEP = fh.Plan(fh.keep("0"))
MONITOR = fh.Plan(fh.gate("long", "0", fh.Norm()), fh.keep("0"), fh.keep("@gate.long"))


def test_a_stream_is_whole_where_the_worker_is_ahead_or_behind(engine: Engine) -> None:
    """The worker has not begun, has a part of the prompt, or has retired the request already."""
    reads = 0

    def before(name: str) -> Any:
        nonlocal reads
        if name != "read_so_far":
            return None
        reads += 1
        match reads:
            case 2:
                engine.step(2)
            case 3:
                engine.step(1)
                engine.new_tokens = 3
            case 4:
                engine.step(1)
            case 5:
                engine.step(1)
                engine.worker.reconcile({})
                return engine.finish()
        return None

    engine.before = before

    async def run() -> list[bytes]:
        await engine.send(MONITOR)
        return await asyncio.wait_for(streamed(engine), 30)

    found = [it for it in map(unpacked, asyncio.run(run())) if it.acts]
    for name, expected in (("0", engine.rows), ("@gate.long", engine.rows.norm(dim=-1))):
        positions = [place for it in found for place in it.positions[name].tolist()]
        assert positions == [*range(PROMPT + 2)]
        torch.testing.assert_close(torch.cat([it.acts[name] for it in found]), expected)
    assert len(found) > 1


def test_a_request_on_its_way_is_waited_for(engine: Engine) -> None:
    async def run() -> list[bytes]:
        front_end = await connect_async(engine)
        await engine.send(KEEP)
        ticket = front_end.find("a")
        ticket.engine_id = None
        state = engine.output_processor.request_states.pop("a-engine")
        stream = asyncio.ensure_future(streamed(engine))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not stream.done()
        ticket.engine_id = "a-engine"
        engine.output_processor.request_states["a-engine"] = state
        engine.step(PROMPT)
        await engine.finish()
        return await asyncio.wait_for(stream, 30)

    (*_, last) = asyncio.run(run())
    assert len(unpacked(last).acts["0"]) == PROMPT


def test_a_plan_that_fails_in_the_middle_of_a_stream_ends_it_with_the_reason(
    engine: Engine,
) -> None:
    plan = fh.Plan(fh.keep("0", max_bytes=(PROMPT + 1) * WIDTH * 4))
    reads = 0

    def before(name: str) -> None:
        nonlocal reads
        if name == "read_so_far":
            reads += 1
            engine.step(PROMPT if reads == 1 else 1)
            engine.new_tokens = reads + 1

    engine.before = before

    async def run() -> list[bytes]:
        await engine.send(plan)
        return await asyncio.wait_for(streamed(engine), 30)

    first, *_, last = asyncio.run(run())
    torch.testing.assert_close(unpacked(first).acts["0"], engine.rows[:PROMPT])
    with pytest.raises(fh.HookError, match=r"the plan of the request failed.*max_bytes"):
        unpacked(last)


def test_a_request_that_is_cancelled_while_it_streams(engine: Engine) -> None:
    def before(name: str) -> Any:
        return cancel() if name == "read_so_far" else None

    async def cancel() -> None:
        (await connect_async(engine)).cancelled("a-engine")
        engine.output_processor.request_states.clear()

    engine.before = before

    async def run() -> tuple[list[bytes], httpx.Response]:
        await engine.send(KEEP)
        engine.step(PROMPT)
        found = await asyncio.wait_for(streamed(engine), 30)
        return found, await asked(engine, "GET", "captures/a")

    found, after = asyncio.run(run())
    assert error_of(found[-1]) == "the request was cancelled"
    assert after.status_code == httpx.codes.NOT_FOUND


@pytest.mark.parametrize("calling", [True, False])
def test_an_engine_that_dies_ends_a_stream_with_the_reason(engine: Engine, calling: bool) -> None:
    """vLLM leaves calls of a dead engine unanswered, and its requests as they were."""

    async def die() -> None:
        engine.errored = True
        await asyncio.Event().wait()

    def before(name: str) -> Any:
        engine.errored = not calling
        return die() if calling and name == "read_so_far" else None

    engine.before = before

    async def run() -> list[bytes]:
        await engine.send(KEEP)
        engine.errored = False
        engine.step(PROMPT)
        return await asyncio.wait_for(streamed(engine), 30)

    *_, last = asyncio.run(run())
    assert error_of(last) == "the engine is dead"


def test_a_stream_says_that_a_worker_died(engine: Engine) -> None:
    """vLLM says "cancelled" of the call that the worker was in."""

    async def die() -> None:
        msg = "Call to collective_rpc method failed: cancelled"
        raise Exception(msg)  # noqa: TRY002 (as vLLM)

    engine.before = lambda name: die() if name == "read_so_far" else None

    async def run() -> list[bytes]:
        await engine.send(KEEP)
        engine.step(PROMPT)
        return await asyncio.wait_for(streamed(engine), 30)

    *_, last = asyncio.run(run())
    assert error_of(last) == "the engine died: a worker ended during a call"


def test_captures_are_fetched_by_one_of_two(engine: Engine) -> None:
    async def run() -> list[httpx.Response]:
        await engine.send(KEEP)
        engine.step(PROMPT)
        await engine.finish()
        return await asyncio.gather(*(asked(engine, "GET", "captures/a") for _ in range(2)))

    codes = sorted(it.status_code for it in asyncio.run(run()))
    assert codes == [httpx.codes.OK, httpx.codes.NOT_FOUND]


def test_a_vector_that_gets_a_second_name_while_the_first_is_dropped(engine: Engine) -> None:
    data = {name: safetensors.torch.save({name: torch.ones(WIDTH)}) for name in ("a", "b")}

    async def slow(reached: asyncio.Event) -> None:
        reached.set()
        for _ in range(20):
            await asyncio.sleep(0)

    async def run() -> None:
        served = http.VLLMRoutes()
        await served.init_state(engine, None, None)
        app = fastapi.FastAPI()
        served.attach_router(app)
        await request(app, "PUT", "vectors", content=data["a"])
        reached = asyncio.Event()
        called = engine.call_utility_all_async

        async def answering(
            method: str, name: str, _timeout: None, args: tuple[Any, ...], _kwargs: None
        ) -> list[list[bytes]]:
            answer = await called(method, name, None, args, None)
            if args[0] == "put":  # on its way back
                await slow(reached)
            return answer

        engine.call_utility_all_async = answering  # type: ignore[method-assign]
        put = asyncio.ensure_future(request(app, "PUT", "vectors", content=data["b"]))
        await reached.wait()
        await request(app, "DELETE", "vectors/a")
        await put

    asyncio.run(run())
    assert [*engine.worker._uploads.values()]


def test_a_name_means_a_vector_once_all_ranks_have_it(engine: Engine) -> None:
    """Another server reads the names from one rank, and may send a request to any other."""
    engine.vllm_config.parallel_config._api_process_count = 2
    put, sent = engine.worker.put, []
    engine.worker.put = lambda data, names: sent.append({*names}) or put(data, names)  # type: ignore[method-assign, func-returns-value]
    data = safetensors.torch.save({"a": torch.ones(WIDTH)})
    assert asyncio.run(asked(engine, "PUT", "vectors", content=data)).is_success
    assert sent == [set(), {"a"}]


def test_a_dictionary_of_another_server(engine: Engine) -> None:
    """Both servers ask the worker for it; the worker has it once, for all requests."""
    other = Engine()
    other.worker = engine.worker
    modules, _ = engine.worker.loaded_model()
    engine.worker.served = ServedModel(modules, EnginePlans(engine.model, size=4))
    for each in (engine, other):
        each.vllm_config.parallel_config._api_process_count = 2
    made = dictionary_of("relu", width=WIDTH, name="sae")
    plan = fh.Plan(fh.on("0", fh.Feature(made, 3, set=2.0)))

    async def run() -> None:
        data = packed_uploads({"sae": made})
        assert (await asked(engine, "PUT", "dictionaries", content=data)).is_success
        told = (await asked(other, "GET", "dictionaries")).json()["sae"]
        assert told["digest"] == digest_of(made)
        front_end = await connect_async(other)
        params = types.SimpleNamespace(extra_args={"ferrohook": plan.to_json()})
        assert front_end.names_uploads(params)
        await other.send(plan)
        other.step(PROMPT)
        assert (await asked(other, "DELETE", "dictionaries/sae")).is_success
        assert (await asked(engine, "GET", "dictionaries")).json() == {}

    asyncio.run(run())
    assert engine.worker.failures() == {}
    assert engine.worker.requests["a-engine"].tokens == PROMPT
    assert engine.worker._uploads == {}
    (prepared,) = plans = [*engine.worker.loaded_model().plans._alive.values()]
    dictionary = weakref.ref(prepared.entries[0].hook.dictionary)
    engine.worker.retire("a-engine")
    del prepared, plans
    gc.collect()
    assert dictionary() is None, "a prepared plan keeps a dropped dictionary"


def test_captures_of_another_server(engine: Engine) -> None:
    other = Engine()
    other.worker = engine.worker
    for each in (engine, other):
        each.vllm_config.parallel_config._api_process_count = 2

    async def status(asked_one: Engine) -> int:
        return (await asked(asked_one, "GET", "captures/a")).status_code

    async def run() -> list[int]:
        await captured(engine)
        engine.worker.retire("a-engine")
        early = await status(other)
        await calls.call_async(engine, "note", (await connect_async(engine)).ended(OWN))
        return [early, await status(other), await status(other), await status(engine)]

    # Not noted yet, there, and fetched.
    assert asyncio.run(run()) == [404, 200, 404, 422]


async def captured(engine: Engine, token: str | None = OWN) -> None:
    await engine.send(KEEP, token)
    engine.step(PROMPT)
    await engine.finish()


@pytest.mark.parametrize(
    ("headers", "status"),
    [({}, 403), ({HEADER: "another"}, 404), ({HEADER: ""}, 404), ({HEADER: OWN}, 200)],
)
@pytest.mark.parametrize("path", ["captures/a", "captures/a/stream"])
def test_captures_take_the_token_of_the_answer(
    engine: Engine, path: str, headers: dict[str, str], status: int
) -> None:
    async def run() -> int:
        await captured(engine)
        return (await asked(engine, "GET", path, headers=headers)).status_code

    assert asyncio.run(run()) == status


def test_captures_without_a_token_are_refused(engine: Engine) -> None:
    """Captures of other routes than completions and chats could not be fetched."""
    with pytest.raises(
        ValueError, match="captures are available only on the routes that return a token"
    ):
        asyncio.run(engine.send(KEEP, None))


def test_whoever_sends_an_id_again_takes_nothing(engine: Engine) -> None:
    async def run() -> tuple[httpx.Response, int]:
        await captured(engine)
        await engine.send(KEEP, "token of whoever sends it again")
        other = {HEADER: "token of whoever sends it again"}
        right = await asked(engine, "GET", "captures/a")
        return right, (await asked(engine, "GET", "captures/a", headers=other)).status_code

    right, other = asyncio.run(run())
    assert right.status_code == httpx.codes.OK
    assert unpacked(right.content).acts["0"].shape == (PROMPT, WIDTH)
    assert other == httpx.codes.CONFLICT  # not finished: its own


def test_ids_alone_do_where_the_operator_asks_for_it(engine: Engine) -> None:
    engine.vllm_config.additional_config = {"ferrohook": {"captures_by_id": True}}

    async def run() -> int:
        await captured(engine)
        return (await asked(engine, "GET", "captures/a", headers={})).status_code

    assert asyncio.run(run()) == httpx.codes.OK


def test_uploads_are_limited(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits: number, bytes and length of names. A list of names in an error is short."""
    engine.vllm_config.additional_config = {"ferrohook": {"vectors_bytes": 400}}
    monkeypatch.setattr(uploads, "_MOST_UPLOADS", 14)

    def body(*names: str, numbers: int = 5) -> bytes:
        return safetensors.torch.save({name: torch.rand(numbers) for name in names})

    async def put(content: bytes, **headers: str) -> httpx.Response:
        return await asked(engine, "PUT", "vectors", content=content, headers=headers)

    async def run() -> None:
        assert (await put(body("x" * 201))).status_code == 413
        assert "vectors_bytes" in (await put(body("a", numbers=101))).text
        assert "at most 14" in (await put(body(*map(str, range(15))))).text
        assert (await put(b"", **{"content-length": str(2**40)})).status_code == 413
        assert [*engine.worker._uploads] == []
        assert (await put(body("a/b", *map(str, range(11))))).is_success
        with pytest.raises(ValueError, match=r"uploaded: (\S+, ){10}\.\.\.$"):
            (await connect_async(engine)).uploads.find("none", torch.Tensor)
        assert (await asked(engine, "DELETE", "vectors/a/b")).is_success
        assert len(engine.worker._uploads) == 11
        for _ in range(40):  # a name that means another vector each time
            assert (await put(body("0"))).is_success
        assert sum(it.nbytes for it in engine.worker._uploads.values()) <= 400

    asyncio.run(run())


def test_uploads_at_a_time_have_a_budget(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each alone is short enough: memory is taken by all whose bodies have not ended."""
    monkeypatch.setattr(routes, "_MOST_BYTES", 1000)
    monkeypatch.setattr(routes, "_MOST_ARRIVING", 2000)
    body = safetensors.torch.save({"a": torch.rand(5)})

    async def run() -> None:
        served = http.VLLMRoutes()
        await served.init_state(engine, None, None)
        app = fastapi.FastAPI()
        served.attach_router(app)
        goes_on = asyncio.Event()

        async def slow() -> AsyncIterator[bytes]:
            yield bytes(900)
            await goes_on.wait()

        held = [asyncio.create_task(request(app, "PUT", "vectors", content=slow())) for _ in "123"]
        done, _ = await asyncio.wait(held, return_when=asyncio.FIRST_COMPLETED)
        assert [task.result().status_code for task in done] == [503]
        # A refused upload gives its room back.
        assert (await request(app, "PUT", "vectors", content=body)).is_success
        goes_on.set()
        assert sorted([(await task).status_code for task in held]) == [422, 422, 503]
        assert served._arriving == 0

    asyncio.run(run())


@pytest.mark.parametrize("token", [5, ["x"], "", 0.5], ids=repr)
def test_a_token_that_no_route_made_opens_nothing_and_stops_nobody(
    engine: Engine, token: Any
) -> None:
    """A route that is not ours passes on a client's value in place of the token."""
    with pytest.raises(
        ValueError, match="captures are available only on the routes that return a token"
    ):
        asyncio.run(engine.send(KEEP, token))
    asyncio.run(engine.send(KEEP))
    for sent, status in (("", 403), ("5", 404), (OWN, 409)):  # 409: it runs
        headers = {HEADER: sent} if sent else {}
        answer = asyncio.run(asked(engine, "GET", "captures/a", headers=headers))
        assert answer.status_code == status


def test_a_large_plan_is_read_beside_the_event_loop(engine: Engine) -> None:
    entries = [fh.on("0", fh.Add(torch.rand(WIDTH)), at=0) for _ in range(200)]
    text = fh.Plan(*entries).to_json() + " " * requests._LARGE
    params = types.SimpleNamespace(extra_args={"ferrohook": text})
    threads: list[Any] = []

    async def run() -> None:
        front_end = await connect_async(engine)
        read = front_end._read
        front_end._read = lambda value: threads.append(threading.current_thread()) or read(value)  # type: ignore[method-assign, func-returns-value]
        read_params = await front_end.read_large(params)
        assert params.extra_args == {"ferrohook": text}
        assert threads != [threading.current_thread()]
        request = types.SimpleNamespace(
            request_id="a",
            sampling_params=copy.deepcopy(read_params),
            resumable=False,
            prompt_token_ids=[5] * PROMPT,
            cache_salt=None,
        )
        front_end.prepare(request)
        assert request.sampling_params.extra_args["ferrohook"]["plan"] == text
        params.extra_args = {"ferrohook": text[:-1] + "}"}
        with pytest.raises(ValueError, match="not valid JSON"):
            await front_end.read_large(params)

    asyncio.run(run())
    assert len(threads) == 2


def test_a_dead_engine_and_an_old_release_say_so(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> tuple[httpx.Response, ...]:
        alive = await asked(engine, "GET", "capabilities")
        engine.errored = True
        dead = await asked(engine, "GET", "capabilities")
        engine.errored = False
        old = fh.engines.Capabilities("vllm", "0.1.9", ("0.32",), (), {})
        for module in (plugin, supported):
            monkeypatch.setattr(module, "CAPABILITIES", old)
        routes = ("GET", "capabilities"), ("PUT", "vectors"), ("GET", "vectors")
        return alive, dead, *[await asked(Engine(), *route) for route in routes]

    alive, dead, *old = asyncio.run(run())
    assert alive.status_code == httpx.codes.OK
    assert dead.status_code == httpx.codes.SERVICE_UNAVAILABLE
    assert "the engine is dead" in dead.text
    for answer in old:
        assert answer.status_code == httpx.codes.NOT_IMPLEMENTED
        assert "0.1.9 is older than the tested releases: 0.32" in answer.text


def test_requests_that_the_engine_refuses_leave_no_ticket(engine: Engine) -> None:
    async def refused(front_end: FrontEnd) -> None:
        with front_end.issuing():
            await engine.send(KEEP)
            front_end.find("a").engine_id = None  # as if it had not joined
            raise ZeroDivisionError

    async def run() -> FrontEnd:
        front_end = await connect_async(engine)
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                await refused(front_end)
        with front_end.issuing():
            await engine.send(KEEP)
        return front_end

    front_end = asyncio.run(run())
    assert front_end.find("a").engine_id == "a-engine"


@pytest.mark.parametrize("name", ["resp_1_0", "resp_1-0", "resp_1"])
def test_failures_are_found_by_the_ids_of_each_route(engine: Engine, name: str) -> None:
    front_end = asyncio.run(connect_async(engine))
    front_end.failed("engine", "engine", name, "it overflowed")
    assert front_end.failure("resp_1") == "it overflowed"
    assert front_end.failure("resp_1") is None


def test_a_plan_that_no_plugin_would_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for listed in ("ferrohook", "other,ferrohook"):
        monkeypatch.setenv("VLLM_PLUGINS", listed)
        assert extra_args(KEEP) == {"ferrohook": KEEP.to_json()}
    for listed in ("other", ""):
        monkeypatch.setenv("VLLM_PLUGINS", listed)
        with pytest.raises(fh.HookError, match="add ferrohook to VLLM_PLUGINS"):
            extra_args(KEEP)

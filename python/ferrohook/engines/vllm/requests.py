"""Front end: plans in the parameters of a request, and the tickets for their captures."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import re
import threading
import uuid
import weakref
from collections import deque
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, Self

from prometheus_client import Counter

from ferrohook.engines.admission import Admission, ReadPlan, text_of
from ferrohook.engines.model.cache_reach import CacheReach
from ferrohook.engines.options import EngineOptions
from ferrohook.engines.uploads import Uploads, UploadsOfPlan, may_name_uploads
from ferrohook.engines.vllm.supported import refuse
from ferrohook.engines.wire import FIELD, GATES, NAME

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ferrohook.engines.gate_events import AnswerGates
    from ferrohook.engines.model.modules import ModuleTable
    from ferrohook.gates.streaming import GateValues

_MOST_TICKETS: Final = 10_000
_LARGE: Final = 2**16
"""Characters of a plan from which it is read in a thread: about a millisecond."""


@dataclasses.dataclass(frozen=True)
class VllmOptions(EngineOptions):
    """Options of an engine: `additional_config={"ferrohook": {...}}`.

    Args:
        results_bytes: bytes of captures of finished requests that wait for their client; beyond
            them the oldest are dropped.
        sites: selector of the modules that a compiled engine serves, laid before it compiles;
            None for none.
        captures_by_id: give captures over HTTP to any client that names the id of the response,
            which clients choose, instead of its token.
    """

    results_bytes: int = 2**30
    sites: Any = None
    captures_by_id: bool = False

    @classmethod
    def of(cls, config: Any) -> Self:
        """Reads the options of a `VllmConfig`.

        Raises:
            ValueError: an unknown option, or one of the wrong type.
        """
        additional = config.additional_config
        found = additional.get(NAME, {}) if isinstance(additional, dict) else {}
        return cls.read(found, f"additional_config[{NAME!r}]")


@dataclasses.dataclass
class CapturingRequest:
    """One answer of a request that captures, as its client and the worker know it."""

    key: str
    """Name of the captures in the worker; random, so that no other request has it."""
    request_id: str
    """Id of the client's request or HTTP response. Clients choose it: it is not unique."""
    choice: int
    """Index of the answer in the response."""
    token: str | None
    """Secret of the client that sent the request over HTTP."""
    engine_id: str | None = None
    """Id in the engine, once the request is on its way there."""
    tokens: int | None = None
    """Tokens of prompt and answer, once it is finished."""
    error: str | None = None
    """Failure of its plan."""
    ran_last: bool = False
    """True if the last token of its answer ran, as its plan ended it."""
    stream: str = ""
    """Key of its answer in `streams`, if its client reads along."""


streams: Final[weakref.WeakValueDictionary[str, AnswerGates]] = weakref.WeakValueDictionary()
"""Answers that are streamed, in the process of their API server, by a random key."""
PLANS: Final = Counter("ferrohook_plans", "Requests with a plan that were admitted")
_FAILURES: Final = Counter("ferrohook_failures", "Requests whose plan failed while they ran")
_ROWS: Final = Counter("ferrohook_rows", "Tokens of finished requests with a plan")
_ISSUED: Final[ContextVar[list[CapturingRequest]]] = ContextVar("ferrohook_issued")
"""Tickets of the request that is being added."""
_COMPLETION: Final = re.compile(r"(cmpl-.+)-(\d+)")
"""Id of the request of one prompt of a completion."""
_SEVERAL: Final = "the plans of several requests with this id failed: choose different ids"


class FrontEnd:
    """Plans of the requests of one engine, in the process that takes them.

    Args:
        modules: the modules of the worker's model.
        options: of the engine.
        secret: key of the salts, of the engine: its API servers share it.
        reach: which changes reach cached keys and values.
        servers: number of API servers.
        serves: requests come over HTTP, so captures need a token.
    """

    def __init__(  # noqa: PLR0913 (of which each is one fact about the engine)
        self,
        modules: ModuleTable,
        options: VllmOptions,
        secret: bytes,
        reach: CacheReach | None = None,
        servers: int = 1,
        *,
        serves: bool = False,
    ) -> None:
        self.modules = modules
        self.options = options
        self.uploads = Uploads(options.vectors_bytes)
        self._admission = Admission(modules, options, secret)
        self._reach = CacheReach() if reach is None else reach
        self.servers = servers
        self.surplus = 0
        """Most rows that captures may have beyond an answer: of drafts, and of a step ahead."""
        self._serves = serves
        self._needs_token = serves and not options.captures_by_id
        self._lock = threading.Lock()
        self._tickets: dict[tuple[str, int], list[CapturingRequest]] = {}
        """Requests by the client's id and the index of the answer."""
        self._by_key: dict[str, CapturingRequest] = {}
        self._running: dict[str, CapturingRequest | None] = {}
        """Tickets of the requests with a plan that the engine has, by its ids; None without one."""
        self._failures: dict[str, tuple[str, str]] = {}
        """Ids of requests and reasons, by the client's id: its other answers may fail too."""
        self._cancelled: deque[str] = deque(maxlen=_MOST_TICKETS)

    def _read(self, value: Any) -> ReadPlan:
        return self._admission.read(value, UploadsOfPlan(self.uploads.find))

    def names_uploads(self, params: Any) -> bool:
        """True if the plan of a request may name uploads."""
        return may_name_uploads(text_of(params.extra_args[NAME]))

    async def read_large(self, params: Any) -> Any:
        """Reads the plan of a request in a thread, if it is large; returns the parameters with it.

        In the event loop the texts of all others would stand still meanwhile. The caller may use
        its parameters again.

        Raises:
            ValueError: the plan is bad.
        """
        value = params.extra_args[NAME]
        if isinstance(value, str) and len(value) > _LARGE:
            read = await asyncio.to_thread(self._read, value)
            params = copy.copy(params)
            params.extra_args = {**params.extra_args, NAME: read}
        return params

    def prepare(self, request: Any) -> None:
        """Validates the plan of an `EngineCoreRequest`, and rewrites its parameters.

        Raises:
            ValueError: the plan is bad, or refused; the request must not be scheduled.
        """
        params = request.sampling_params
        value = params.extra_args[NAME]
        read = value if isinstance(value, ReadPlan) else self._read(value)
        if request.resumable:
            refuse("streamed inputs")
        key = uuid.uuid4().hex
        prompt = _prompt_length(request)
        stream = params.extra_args.get(GATES)
        if not isinstance(stream, str) or stream not in streams:  # a client's
            stream = ""
        if read.captures:
            tokens = params.max_tokens + self.surplus
            self._admission.check_captures(read.plan, prompt, tokens, params.n)
            # Where no route of ours set it, it is whatever the client sent.
            token = params.extra_args.get(FIELD)
            own = token if isinstance(token, str) and token else None
            if own is None and self._needs_token:
                msg = (
                    "captures are available only on the routes that return a token for them: "
                    "completions and chats"
                )
                raise ValueError(msg)
            response, number = self._response_of(request.request_id)
            for index in range(params.n):
                choice = number * params.n + index
                ticket = CapturingRequest(_key_of(key, index), response, choice, own, stream=stream)
                self._issue(ticket)
        prefix = self._admission.prefix(read, prompt, self._reach)
        salt = None if prefix.changed is None else self._admission.salt(read, prompt)
        payload = {
            "plan": read.text,
            "uploads": read.used,
            "digest": read.digest,
            "key": key,
            "first": None,
            "every_rank": False,
            "streams": bool(stream),
            "prefix": prefix._asdict() | {"salt": salt},
        }
        params.extra_args = {**params.extra_args, NAME: payload}
        for ours in (FIELD, GATES):
            params.extra_args.pop(ours, None)

    def _response_of(self, request_id: str) -> tuple[str, int]:
        """Returns the id of a request's response, and the index of its prompt there.

        vLLM's server makes a request of each prompt of a completion.
        """
        if self._serves and (found := _COMPLETION.fullmatch(request_id)):
            return found[1], int(found[2])
        return request_id, 0

    @contextlib.contextmanager
    def issuing(self) -> Iterator[None]:
        """Forgets the tickets that are issued inside, if their requests are refused after that."""
        issued: list[CapturingRequest] = []
        token = _ISSUED.set(issued)
        try:
            yield
        except BaseException:
            with self._lock:
                for ticket in issued:
                    if ticket.engine_id is None and ticket.key in self._by_key:
                        self._forget(ticket)
            raise
        finally:
            _ISSUED.reset(token)

    def _issue(self, ticket: CapturingRequest) -> None:
        _ISSUED.get([]).append(ticket)
        with self._lock:
            self._tickets.setdefault((ticket.request_id, ticket.choice), []).append(ticket)
            self._by_key[ticket.key] = ticket
            while len(self._by_key) > _MOST_TICKETS:  # of clients that never asked
                self._forget(next(iter(self._by_key.values())))

    def joined(self, request: Any) -> None:
        """Notes that the engine gets an `EngineCoreRequest`, which has the engine's id by now."""
        key = request.sampling_params.extra_args[NAME]["key"]
        with self._lock:
            ticket = self._running[request.request_id] = self._by_key.get(key)
            if ticket is not None:
                ticket.engine_id = request.request_id

    def read(self, engine_id: str, values: GateValues) -> None:
        """Makes values of gates go with the next event of a request's answer."""
        with self._lock:
            ticket = self._running.get(engine_id)
        if ticket is not None and (answer := streams.get(ticket.stream)) is not None:
            answer.add(ticket.choice, values)

    def finished(self, engine_id: str, tokens: int) -> None:
        """Notes the number of tokens of prompt and answer of a finished request."""
        with self._lock:
            if engine_id in self._running:
                _ROWS.inc(tokens - 1)  # the last token of an answer does not run
                if (ticket := self._running.pop(engine_id)) is not None:
                    ticket.tokens = tokens + ticket.ran_last

    def stopped(self, engine_id: str) -> None:
        """Notes that a plan ends its request: the last token of the answer has run."""
        with self._lock:
            if (ticket := self._running.get(engine_id)) is not None:
                ticket.ran_last = True

    def failed(self, engine_id: str, answers: str, request_id: str, reason: str) -> None:
        """Notes the failure of a request's plan.

        Args:
            engine_id: of the engine.
            answers: what all answers to its prompt have in common: the engine's id of the first
                request, where that asks for several.
            request_id: of the client.
            reason: why it failed.
        """
        _FAILURES.inc()
        with self._lock:
            # Clients choose the ids: of two with one, neither learns the other's reason.
            other, _ = self._failures.setdefault(request_id, (answers, reason))
            if other != answers:
                self._failures[request_id] = other, _SEVERAL
            if len(self._failures) > _MOST_TICKETS:
                self._failures.pop(next(iter(self._failures)))
            if (ticket := self._running.get(engine_id)) is not None:
                ticket.error = reason

    def failure(self, request_id: str) -> str | None:
        """Returns the failure of a client's request, or of one of its prompts, once."""
        names = re.compile(rf"{re.escape(request_id)}([-_]\d+)?")
        with self._lock:
            name = next(filter(names.fullmatch, self._failures), None)
            return None if name is None else self._failures.pop(name)[1]

    def cancelled(self, engine_id: str) -> None:
        """Forgets the ticket of a cancelled request."""
        with self._lock:
            if (ticket := self._running.pop(engine_id, None)) is not None:
                self._cancelled.append(ticket.key)
                self._forget(ticket)

    def ended(self, token: str) -> list[dict[str, Any]]:
        """Returns the tickets of an answer's finished requests, for other API servers."""
        with self._lock:
            found = [it for it in self._by_key.values() if it.token == token]
        return [dataclasses.asdict(it) for it in found if it.tokens is not None]

    def adopt(self, tickets: list[dict[str, Any]]) -> None:
        """Takes over tickets of other API servers."""
        for each in tickets:
            if each["key"] not in self._by_key:
                self._issue(CapturingRequest(**each))

    def take_cancelled(self) -> list[str]:
        """Returns the keys of captures that were abandoned, for the workers, once."""
        with self._lock:
            keys = [*self._cancelled]
            self._cancelled.clear()
        return keys

    def find(
        self, request_id: str, choice: int = 0, may: Callable[[CapturingRequest], bool] = bool
    ) -> CapturingRequest:
        """Returns the ticket of an answer.

        Args:
            request_id: of the client, see `CapturingRequest`.
            choice: index of the answer.
            may: returns True if the client may have a ticket.

        Raises:
            KeyError: no such answer captured, or it was cancelled, or its captures were fetched.
            ValueError: several have the id.
        """
        with self._lock:
            tickets = [*filter(may, self._tickets.get((request_id, choice), []))]
        if not tickets:
            msg = (
                f"no captures for answer {choice} of request {request_id!r}, or it was cancelled, "
                "or they were already fetched"
            )
            raise KeyError(msg)
        if len(tickets) > 1:
            msg = f"{len(tickets)} requests have the id {request_id!r}: choose different ids"
            raise ValueError(msg)
        return tickets[0]

    def forget(self, ticket: CapturingRequest) -> None:
        """Forgets a ticket whose captures were fetched."""
        with self._lock:
            self._forget(ticket)

    def _forget(self, ticket: CapturingRequest) -> None:
        self._by_key.pop(ticket.key, None)
        name = ticket.request_id, ticket.choice
        tickets = self._tickets.get(name, [])
        if ticket in tickets:
            tickets.remove(ticket)
        if not tickets:
            self._tickets.pop(name, None)


def of_answer(params: Any, index: int, first: str) -> Any:
    """Returns the parameters of a further one of several answers to a prompt.

    Args:
        params: the parameters, as `FrontEnd.prepare` left them.
        index: of the answer, from 1 on.
        first: engine's id of the request of the first answer.
    """
    payload = params.extra_args[NAME]
    own = {**payload, "key": _key_of(payload["key"], index), "first": first}
    made = copy.copy(params)  # several answers may share vLLM's copy
    made.extra_args = {**params.extra_args, NAME: own}
    return made


def _key_of(key: str, index: int) -> str:
    """Returns the name of an answer's captures, from the name of the first answer's."""
    return f"{key}/{index}" if index else key


def _prompt_length(request: Any) -> int:
    ids = request.prompt_token_ids
    return len(request.prompt_embeds if ids is None else ids)

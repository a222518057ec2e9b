"""Calls of a client, without input and output: generators of requests, which get the responses.

As httpx's own `auth_flow`: one description of each call serves the client that waits and the one
that awaits.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import warnings
from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar
from urllib.parse import quote

import httpx
import safetensors
from torch import Tensor

from ferrohook.client.answers import (
    Embedded,
    Generated,
    ServerInfo,
    embedded,
    engine_info,
    service_info,
)
from ferrohook.client.errors import (
    PlanFailedError,
    RequestRefusedError,
    ServerError,
    error_of_status,
    made,
    reason_of,
    strange,
)
from ferrohook.dictionaries.packing import by_name
from ferrohook.engines.wire import (
    FIELD,
    HEADER,
    NAME,
    ROUTES,
    digest_of,
    error_of,
    packed_uploads,
    unpacked,
)
from ferrohook.errors import HookTypeError, NeverFiredWarning
from ferrohook.plans import Plan
from ferrohook.plans.entries import KeepEntry
from ferrohook.util.arguments import describe, expect
from ferrohook.util.swallowed import refuse_swallowed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ferrohook.dictionaries.dictionary import Dictionary

T = TypeVar("T")

Steps: TypeAlias = Generator[httpx.Request, httpx.Response, T]
"""A call: yields requests, is sent their responses, returns the result."""
AnyPlan: TypeAlias = Plan | str | Mapping[str, Any] | None
"""A plan, or its JSON, which may name uploaded vectors as `{"tensor": "name"}`."""
Prompt: TypeAlias = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""A text, its tokens, or the messages of a chat."""

_PLAN_KEYS: Final = {"vllm": "vllm_xargs", "sglang": "custom_params"}
"""Field of a request that has the plan, by engine."""
_CUT_OFF: Final = {"abort", "error"}
"""Reasons for the end of a text that is not whole."""


_MEANT: Final[dict[str, str]] = dict.fromkeys(("hooks", "capture", "keep", "on", "plans"), "plan")
"""Names for a plan."""


def _fields(*, stop: Any, priority: Any) -> None:
    """Names the fields of completions that are named as options of plans are."""


@dataclasses.dataclass(frozen=True)
class Pending:
    """A request for a text, before it is sent."""

    request: httpx.Request
    chat: bool
    planned: bool
    """True if it has a plan."""
    captures: bool
    """True if its plan keeps activations."""


class Calls:
    """Calls of one client.

    Args:
        http: builds the requests.
    """

    def __init__(self, http: httpx.Client | httpx.AsyncClient) -> None:
        self._http = http
        self._info: ServerInfo | None = None

    def info(self) -> Steps[ServerInfo]:
        """Asks the server for its features, once."""
        if self._info is None:
            response = yield self._http.build_request("GET", f"{ROUTES}/capabilities")
            read = engine_info
            if response.status_code == httpx.codes.NOT_FOUND:
                response = yield self._http.build_request("GET", "/capabilities")
                read = service_info
            if response.status_code == httpx.codes.NOT_FOUND:
                msg = (
                    "the server does not support plans: it has no ferrohook routes. For vLLM, add "
                    "ferrohook to VLLM_PLUGINS"
                )
                raise RequestRefusedError(msg, 404, str(response.request.url))
            info: ServerInfo = _read(read, response)
            self._info = info
        return self._info

    # --- texts -------------------------------------------------------------------------------

    def generate(
        self, prompt: Prompt, plan: AnyPlan, model: str | None, options: Mapping[str, Any]
    ) -> Steps[Generated]:
        """Asks for a text, and for its captures."""
        pending = yield from self.begin(prompt, plan, model, options)
        response = yield pending.request
        body = _json(response)
        texts = _read(lambda it: _texts(it, chat=pending.chat), response)
        token = response.headers.get(HEADER) or body.get(FIELD)
        answers: list[Generated] = []
        for index, (choice, text) in enumerate(zip(body["choices"], texts, strict=True)):
            proof = token or proof_in(choice)
            answers.append((yield from self.finish(pending, text, proof, index)))
        first, *others = answers
        return dataclasses.replace(first, others=tuple(others))

    def begin(
        self,
        prompt: Prompt,
        plan: AnyPlan,
        model: str | None,
        options: Mapping[str, Any],
        *,
        stream: bool = False,
    ) -> Steps[Pending]:
        """Prepares the request for a text."""
        chat = _is_chat(prompt)
        refuse_swallowed("generate", _fields, options, _MEANT)
        if "stream" in options:
            msg = (
                "stream= is not supported here: call the client's method generate or stream instead"
            )
            raise HookTypeError(msg)
        if stream and options.get("n", 1) != 1:
            msg = (
                f"a stream has one text, got n={options['n']!r}: call generate for several, or "
                "open several streams"
            )
            raise HookTypeError(msg)
        body: dict[str, Any] = {"messages" if chat else "prompt": prompt, **options}
        if stream:
            body["stream"] = True
        if model is not None:
            body["model"] = model
        captures = False
        if plan is not None:
            text, captures = plan_text(plan)
            info = yield from self.info()
            if (key := _PLAN_KEYS.get(info.engine)) is None:
                msg = f"the server is a {info.engine!r}, which does not generate text"
                raise RequestRefusedError(msg, None, str(self._http.base_url))
            body[key] = {**(body.get(key) or {}), NAME: text}
        path = "/v1/chat/completions" if chat else "/v1/completions"
        request = self._http.build_request("POST", path, json=body)
        return Pending(request, chat, plan is not None, captures)

    def finish(
        self, pending: Pending, text: Generated, proof: str | bytes | None, index: int = 0
    ) -> Steps[Generated]:
        """Checks that the plan was served, and fetches the captures.

        Args:
            pending: the request.
            text: its text.
            proof: that the plan was served: the token of the captures, or the captures.
            index: of the text in the answer.
        """
        url = str(pending.request.url)
        if text.finish_reason in _CUT_OFF:
            reason = (
                text.raw["choices"][index].get("stop_reason")
                or "the server stopped before the text was complete"
            )
            raise made(str(reason), httpx.codes.SERVICE_UNAVAILABLE, url)
        if pending.planned and proof is None:
            msg = "the server ignored the plan: it generated this text without it"
            raise ServerError(msg, httpx.codes.OK, url)
        if not pending.captures:
            return text
        if not isinstance(proof, bytes):
            path = f"{ROUTES}/captures/{quote(text.id, safe='')}"
            headers, asked = {HEADER: str(proof)}, {"index": index} if index else {}
            response = yield self._http.build_request("GET", path, headers=headers, params=asked)
            url, proof = str(response.request.url), response.content
            if response.status_code == httpx.codes.UNPROCESSABLE_ENTITY:  # the text was computed
                raise PlanFailedError(reason_of(response), response.status_code, url)
            if not response.is_success:
                raise error_of_status(response)
        if (error := _read_bytes(error_of, proof, url)) is not None:
            raise PlanFailedError(error, httpx.codes.OK, url)
        captured = _read_bytes(unpacked, proof, url)
        return dataclasses.replace(text, acts=captured.acts, positions=captured.positions)

    # --- vectors -----------------------------------------------------------------------------

    def put_vectors(self, vectors: Mapping[str, Tensor]) -> Steps[None]:
        """Uploads vectors."""
        for name, vector in vectors.items():
            expect(vector, Tensor, f"the vector {name!r} must be a tensor")
        data = packed_uploads(vectors)
        _json((yield self._http.build_request("PUT", f"{ROUTES}/vectors", content=data)))

    def vectors(self) -> Steps[dict[str, tuple[int, ...]]]:
        """Lists the uploaded vectors."""
        response = yield self._http.build_request("GET", f"{ROUTES}/vectors")
        return {name: tuple(shape) for name, shape in _json(response).items()}

    def drop(self, kind: str, names: Iterable[str]) -> Steps[None]:
        """Drops uploads of a kind, `"vectors"` or `"dictionaries"`."""
        for name in names:
            path = f"{ROUTES}/{kind}/{quote(name)}"
            response = yield self._http.build_request("DELETE", path)
            if response.status_code == httpx.codes.NOT_FOUND:
                raise KeyError(name)
            _json(response)

    # --- dictionaries ------------------------------------------------------------------------

    def put_dictionaries(self, dictionaries: Iterable[Dictionary]) -> Steps[None]:
        """Uploads the dictionaries that the server does not have, one by one."""
        named = by_name(dictionaries)
        there = yield from self.dictionaries()
        for name, each in named.items():
            if there.get(name, {}).get("digest") != digest_of(each):
                data = packed_uploads({name: each})
                _json(
                    (yield self._http.build_request("PUT", f"{ROUTES}/dictionaries", content=data))
                )

    def dictionaries(self) -> Steps[dict[str, dict[str, Any]]]:
        """Lists the uploaded dictionaries."""
        return _json((yield self._http.build_request("GET", f"{ROUTES}/dictionaries")))

    # --- services ----------------------------------------------------------------------------

    def embed(
        self, texts: Sequence[str], plan: AnyPlan, reduce: Sequence[str], count: Sequence[str]
    ) -> Steps[Embedded]:
        """Asks a service for embeddings."""
        body: dict[str, Any] = {"texts": [*texts], "reduce": [*reduce], "count": [*count]}
        if plan is not None:
            body["plan"] = json.loads(plan_text(plan)[0])
        response = yield self._http.build_request("POST", "/embed", json=body)
        answer: Embedded
        answer, missing = _read(embedded, response)
        if missing:
            msg = f"captured modules never ran: {', '.join(missing)}"
            warnings.warn(msg, NeverFiredWarning, stacklevel=4)
        return answer

    def call(self, method: str, path: str, body: Any) -> Steps[Any]:
        """Asks any route."""
        content = None if body is None else _jsonable(body)
        return _any((yield self._http.build_request(method, path, json=content)))


def proof_in(choice: Mapping[str, Any]) -> bytes | None:
    """Returns the captures in a choice of SGLang's answer, empty without any.

    None if the answer does not confirm that its plan was served.
    """
    found = choice.get(FIELD)
    return base64.b64decode(found) if isinstance(found, str) else None


def _is_chat(prompt: Prompt) -> bool:
    """True for the messages of a chat.

    Raises:
        HookTypeError: the prompt is none.
    """
    if isinstance(prompt, str):
        return False
    found = prompt if isinstance(prompt, Sequence) else None
    if found and all(isinstance(it, Mapping) for it in found):
        return True
    if found and all(isinstance(it, int) and not isinstance(it, bool) for it in found):
        return False
    given = (
        describe(prompt) if found is None else f"a list of {describe(found[0])}" if found else "[]"
    )
    msg = f"a prompt must be a text, a list of tokens or a list of messages, got {given}"
    raise HookTypeError(msg)


def plan_text(plan: Plan | str | Mapping[str, Any]) -> tuple[str, bool]:
    """Returns the JSON of a plan, and True if it keeps activations.

    Raises:
        HookTypeError: it is no plan, or has Python functions in it.
        ValueError: it is no JSON, or has numbers that JSON has not.
    """
    if isinstance(plan, Plan):
        return plan.to_json(), any(isinstance(entry, KeepEntry) for entry in plan.entries)
    expect(plan, str | Mapping, "a plan must be a Plan or its JSON")
    body = json.loads(plan) if isinstance(plan, str) else plan
    entries = body.get("entries") if isinstance(body, Mapping) else None
    keeps = isinstance(entries, list) and any(
        isinstance(entry, Mapping) and entry.get("type") == "keep" for entry in entries
    )
    return plan if isinstance(plan, str) else json.dumps(plan, allow_nan=False), keeps


def _jsonable(value: Any) -> Any:
    """Returns a value for JSON: plans as objects, tensors as lists."""
    match value:
        case Plan():
            return json.loads(value.to_json())
        case Tensor():
            return value.tolist()
        case Mapping():
            return {key: _jsonable(inside) for key, inside in value.items()}
        case list() | tuple():
            return [_jsonable(inside) for inside in value]
    return value


def _texts(body: Mapping[str, Any], *, chat: bool) -> list[Generated]:
    """Reads the answer to a completion or a chat; raises without a choice."""
    first, *others = body["choices"]
    return [_text(body, each, chat=chat) for each in (first, *others)]


def _text(body: Mapping[str, Any], choice: Mapping[str, Any], *, chat: bool) -> Generated:
    text = choice["message"]["content"] if chat else choice["text"]
    tokens = choice.get("token_ids")
    return Generated(
        text=text or "",
        finish_reason=choice.get("finish_reason"),
        id=body["id"],
        token_ids=None if tokens is None else tuple(tokens),
        acts={},
        positions={},
        raw=body,
    )


def _any(response: httpx.Response) -> Any:
    """Returns the JSON of an answer.

    Raises:
        ServerError: the answer reports an error, or is not JSON.
    """
    if not response.is_success:
        raise error_of_status(response)
    try:
        return response.json()
    except ValueError as error:
        raise strange(error, response.status_code, str(response.request.url)) from error


def _json(response: httpx.Response) -> dict[str, Any]:
    found = _any(response)
    return found if isinstance(found, dict) else {}


def _read(read: Any, response: httpx.Response) -> Any:
    """Reads the JSON of an answer by a function."""
    body = _any(response)
    try:
        return read(body)
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise strange(error, response.status_code, str(response.request.url)) from error


def _read_bytes(read: Any, content: bytes, url: str) -> Any:
    """Reads captures by a function."""
    try:
        return read(content)
    except (safetensors.SafetensorError, KeyError, TypeError, ValueError) as error:
        raise strange(error, httpx.codes.OK, url) from error

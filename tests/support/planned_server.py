"""A server as vLLM's with ferrohook: routes of OpenAI and of plans, before a tiny Llama.

The texts come from transformers' engine, one request at a time.
"""

from __future__ import annotations

import base64
import contextlib
import json
import secrets
import threading
from typing import TYPE_CHECKING, Any

import torch
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

import ferrohook as fh
from ferrohook.engines.transformers import attach
from ferrohook.engines.uploads import Uploads, UploadsOfPlan
from ferrohook.engines.wire import FIELD, GATES, HEADER, NAME, packed
from ferrohook.gates.streaming import GateStream
from ferrohook.plans.entries import KeepEntry
from support.engines import WIDTH, batching, greedy, tiny_llama
from support.http_server import serving_app
from support.limits import LIMIT
from support.upload_routes import Routes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ferrohook.gates.streaming import GateValues

KEYS = {"vllm": "vllm_xargs", "sglang": "custom_params"}


def words(tokens: list[int]) -> str:
    """Text of tokens."""
    return " ".join(f"w{token}" for token in tokens)


def tokens_of(text: str) -> list[int]:
    """Tokens of a text; the inverse of `words`."""
    return [int(word.strip().removeprefix("w")) for word in text.split()]


class PlannedServer(Routes):
    """Routes of the server.

    Args:
        engine: name that it says it has.
    """

    def __init__(self, engine: str = "vllm") -> None:
        super().__init__(Uploads(2**20))
        self.engine = engine
        torch.manual_seed(7)
        self.model = tiny_llama()
        self._engine: Any = None
        self.bodies: list[dict[str, Any]] = []
        """Bodies of the texts, as they came."""
        self.ignores_plans = False
        self.breaks_off = False
        self.busy = 0
        """Texts to refuse, before others are served."""
        self._captures: dict[tuple[str, str], bytes] = {}
        self._lock = threading.Lock()
        self.app = FastAPI()
        self.app.post("/v1/completions")(self.completions)
        self.app.post("/v1/chat/completions")(self.chats)
        self.app.include_router(self.router())
        self.app.get("/v1/ferrohook/captures/{name}")(self.captures)

    @contextlib.contextmanager
    def running(self) -> Iterator[str]:
        """Serves; yields the address."""
        options = {"generation_config": greedy(8), "continuous_batching_config": batching()}
        with (
            self.model.continuous_batching_context_manager(**options) as manager,
            attach(manager) as self._engine,
            serving_app(self.app) as url,
        ):
            yield url

    def forget(self) -> None:
        """Forgets all uploads."""
        self.uploads, self.sent = Uploads(2**20), []

    async def capabilities(self) -> dict[str, Any]:
        modules: dict[str, dict[str, Any]] = {
            name: {"width": WIDTH, "refused": None} for name, _ in self.model.named_modules()
        }
        modules["lm_head"]["refused"] = "it never runs"
        return {
            "engine": self.engine,
            "version": "0.0",
            "served": ["captures"],
            "refused": {"beam search": "one id"},
            "capture_bytes": 2**20,
            "modules": modules,
        }

    def captures(self, name: str, request: Request) -> Response:
        data = self._captures.pop((name, request.headers[HEADER]), None)
        if data is None:
            raise HTTPException(404, f"no captures for request {name!r}")
        return Response(data, media_type="application/octet-stream")

    def completions(self, body: dict[str, Any]) -> Response:
        prompt = body["prompt"]
        tokens = tokens_of(prompt) if isinstance(prompt, str) else prompt
        return self._answer(body, tokens, "text_completion")

    def chats(self, body: dict[str, Any]) -> Response:
        tokens = [token for it in body["messages"] for token in tokens_of(str(it["content"]))]
        return self._answer(body, tokens, "chat.completion")

    def _answer(self, body: dict[str, Any], prompt: list[int], kind: str) -> Response:
        self.bodies.append(body)
        if self.busy:
            self.busy -= 1
            return failure(503, "the server is busy")
        text = (body.get(KEYS[self.engine]) or {}).get(NAME)
        plan = None
        if text is not None and not self.ignores_plans:
            try:
                plan = UploadsOfPlan(self.uploads.find).plan(text)
                self._engine.check_plans([plan])
            except (ValueError, fh.HookError) as error:
                return failure(400, str(error))
        with self._lock:
            most = body.get("max_tokens", 8)
            name = self._engine.add_request(prompt, plan=plan, max_new_tokens=most)
            output = self._engine.get_result(name, timeout=LIMIT)
        if output.hook_error is not None:
            return failure(500, f"the plan of the request failed: {output.hook_error}")
        name = f"cmpl-{secrets.token_hex(4)}"
        token = None if plan is None or self.engine == "sglang" else secrets.token_urlsafe(24)
        inline: str | None = None
        gates = GateStream()
        if plan is not None:
            acts = {
                key: act.flatten() if key.startswith("@gate.") else act.reshape(-1, act.shape[-1])
                for key, act in output.acts.items()
            }
            gates = _gates_in(acts)
            places = {key: [*range(len(act))] for key, act in acts.items()}
            data = packed(acts, places)
            if token is not None:
                self._captures[name, token] = data
            else:  # as SGLang: in the answer
                keeps = any(isinstance(entry, KeepEntry) for entry in plan.entries)
                inline = base64.b64encode(data).decode() if keeps else ""
        headers = None if token is None else {HEADER: token}
        made = output.generated_tokens
        reason = "length" if len(made) == body.get("max_tokens", 8) else "stop"
        if body.get("stream"):
            gated = [gates.take(len(prompt) + place) for place in range(len(made))]
            events = self._events(name, token, inline, made, gated, kind, reason)
            return StreamingResponse(events, headers=headers, media_type="text/event-stream")
        content: dict[str, Any] = {"text": words(made)}
        if kind == "chat.completion":
            content = {"message": {"role": "assistant", "content": words(made)}}
        choice = {"index": 0, "finish_reason": reason, "token_ids": made, **content}
        if inline is not None:
            choice[FIELD] = inline
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(made)}
        usage["total_tokens"] = sum(usage.values())
        found = {"id": name, "object": kind, "created": 0, "model": "tiny", "usage": usage}
        found |= {"choices": [choice]} | ({} if token is None else {FIELD: token})
        return JSONResponse(found, headers=headers)

    def _events(  # noqa: PLR0913, PLR0917 (of one text)
        self,
        name: str,
        token: str | None,
        inline: str | None,
        made: list[int],
        gates: list[GateValues],
        kind: str,
        reason: str,
    ) -> Iterator[str]:
        for place, each in enumerate(made):
            piece = f"{' ' if place else ''}w{each}"
            inside = {"delta": {"content": piece}} if kind == "chat.completion" else {"text": piece}
            end = reason if place == len(made) - 1 else None
            choice: dict[str, Any] = {"index": 0, "finish_reason": end, "token_ids": [each]}
            choice |= inside
            if gates[place]:
                choice[GATES] = gates[place]
            event = {"id": name, "choices": [choice]}
            if token is not None and not place:
                event[FIELD] = token
            yield f"data: {json.dumps(event)}\n\n"
            if self.breaks_off:
                return
        if inline is not None:
            found = [{"index": 0, FIELD: inline}] if inline else []
            yield f"data: {json.dumps({'object': FIELD, 'choices': [], FIELD: found})}\n\n"
        yield "data: [DONE]\n\n"


def _gates_in(acts: dict[str, torch.Tensor]) -> GateStream:
    """Values of gates that were kept."""
    stream = GateStream()
    for key, act in acts.items():
        if key.startswith("@gate."):
            stream.note(key.removeprefix("@gate."), range(len(act)), act.tolist())
    return stream


def failure(code: int, message: str) -> Response:
    """An error in OpenAI's form."""
    return JSONResponse({"error": {"message": message, "code": code}}, code)

"""The endpoints."""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
from fastapi import APIRouter, FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from pydantic_core import to_json

import ferrohook as fh
from ferrohook.service import ModelMetrics, RequestScope, deadline, list_hooks

from .encoder import RefusedError, ignore
from .limits import LimitBody
from .schema import EmbedAnswer, EmbedRequest, Health, Hook, Hooks, Latency, Module, Refusal

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ferrohook.hook_info import HookInfo

    from .encoder import Encoder

LOG = logging.getLogger(__name__)
PAGE = Path(__file__).with_name("page.html")
API = Path(__file__).with_name("api.html")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Options of the service.

    Attributes:
        threads: number of requests computed at once.
        seconds: time limit for receiving a body, and again for its answer.
        max_body: limit of a body in bytes.
        observe: count and time the calls of every module.
    """

    threads: int = 2
    seconds: float = 10.0
    max_body: int = 2**20
    observe: bool = True


def create_app(encoder: Encoder, settings: Settings) -> FastAPI:
    """Creates the service around a model that all requests share."""
    metrics = ModelMetrics(encoder.model) if settings.observe else None

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        yield
        if metrics is not None:
            metrics.close()

    app = FastAPI(
        title="ferrohook: a sentence encoder to look into and to steer",
        lifespan=lifespan,
        # FastAPI's pages load their scripts from the internet: `api.html` is served instead.
        docs_url=None,
        redoc_url=None,
    )
    app.add_middleware(LimitBody, max_bytes=settings.max_body, seconds=settings.seconds)
    app.add_exception_handler(RequestValidationError, refuse)
    app.include_router(embedding(encoder, settings, metrics))
    app.include_router(observing(encoder, metrics))
    return app


def embedding(encoder: Encoder, settings: Settings, metrics: ModelMetrics | None) -> APIRouter:
    """Creates the endpoint for embeddings."""
    router = APIRouter()
    limiter = anyio.CapacityLimiter(settings.threads)
    captured = metrics.add_captured if metrics else ignore

    @router.post(
        "/embed",
        response_model=EmbedAnswer,
        responses={status: {"model": Refusal} for status in (408, 413, 422, 500, 503)},
    )
    async def embed(request: EmbedRequest, scope: RequestScope) -> Response:
        """Embeddings of texts; the plan and the counts are this request's alone."""
        try:
            # `fail_after` ends waiting for a thread, `deadline` the computation in it.
            with anyio.fail_after(settings.seconds), deadline(settings.seconds):
                answer = await anyio.to_thread.run_sync(
                    lambda: to_json(encoder.embed(request, scope, captured)), limiter=limiter
                )
        except TimeoutError as error:
            msg = f"no answer within {settings.seconds:g} seconds: send fewer texts, or again later"
            raise HTTPException(503, msg, {"Retry-After": "1"}) from error
        except (fh.HookError, RefusedError) as error:
            raise HTTPException(422, str(error)) from error
        except Exception as error:
            # An exception that reaches uvicorn closes the connection, which a proxy may share.
            LOG.exception("a request failed")
            raise HTTPException(500, "the request failed: the service's log says why") from error
        return Response(answer, media_type="application/json")

    return router


def observing(encoder: Encoder, metrics: ModelMetrics | None) -> APIRouter:
    """Creates the endpoints for metrics, hooks, health and the page."""
    router = APIRouter()
    registry = CollectorRegistry()
    if metrics is not None:
        registry.register(metrics)

    @router.get("/metrics")
    def prometheus() -> Response:
        """Calls, latencies, hooks' errors and captured bytes, for Prometheus."""
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    @router.get("/hooks")
    def hooks() -> Hooks:
        """Hooks registered for all requests, and statistics of each module."""
        statistics = metrics.snapshot() if metrics else {}
        types = {name: type(module).__name__ for name, module in encoder.model.named_modules()}
        return Hooks(
            modules=[
                Module(
                    name=name,
                    type=types[name],
                    hooks=[described(info) for info in infos],
                    errors=statistics[name]["errors"] if name in statistics else None,
                    latency=(
                        Latency.model_validate(statistics[name]) if name in statistics else None
                    ),
                )
                for name, infos in list_hooks(encoder.model).items()
            ]
        )

    @router.get("/healthz", responses={503: {"model": Health}})
    async def healthz(request: Request, response: Response) -> Health:
        """Readiness: 503 while the service shuts down."""
        if getattr(request.state, "draining", False):
            response.status_code = 503
            return Health(status="draining")
        return Health(status="ok")

    @router.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(PAGE)

    @router.get("/docs", include_in_schema=False)
    async def docs() -> FileResponse:
        return FileResponse(API)

    return router


def described(info: HookInfo) -> Hook:
    """Converts a hook for JSON."""
    hook = getattr(info.hook, "__qualname__", None) or type(info.hook).__name__
    return Hook(
        id=info.id,
        phase=info.phase,
        hook=hook,
        priority=info.priority,
        enabled=info.enabled,
        calls=info.calls,
    )


def refuse(_request: Request, error: Exception) -> JSONResponse:
    """Answers an invalid request with the reason."""
    reason = str(error)
    if isinstance(error, RequestValidationError):
        # Without the input, which may be long, or not representable in JSON.
        reason = "; ".join(
            f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()
        )
    return JSONResponse({"detail": reason}, 422)

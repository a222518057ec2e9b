"""The endpoints."""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import anyio
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import FileResponse
from fastapi_offline import FastAPIOffline
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from pydantic_core import to_json

import ferrohook as fh
from ferrohook.effects.interventions import KINDS
from ferrohook.service import (
    BatcherMetrics,
    ModelMetrics,
    add_exception_handlers,
    deadline,
    list_hooks,
)

from .encoder import MAX_TOKENS, ignore
from .isolation import check
from .limits import LimitBody
from .schema import (
    REFUSED,
    BatchLimits,
    Capabilities,
    EmbedAnswer,
    EmbedRequest,
    Health,
    Hook,
    Hooks,
    Isolation,
    Latency,
    Module,
    Reduction,
    Refusal,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from ferrohook.attach.hook_info import HookInfo

    from .encoder import Encoder

T = TypeVar("T")

LOG = logging.getLogger(__name__)
PAGE = Path(__file__).with_name("page.html")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Options of the service.

    Attributes:
        threads: number of forwards at a time.
        max_requests: number of requests that share a forward.
        max_texts: number of texts in it.
        max_tokens: number of tokens in it, padding included.
        max_wait: seconds that a request waits for others to share its forward.
        seconds: time limit for receiving a body, and again for its answer.
        max_body: limit of a body in bytes.
        observe: count and time the calls of every module.
    """

    threads: int = 2
    max_requests: int = 32
    max_texts: int = 128
    max_tokens: int = 2**13
    max_wait: float = 0.002
    seconds: float = 10.0
    max_body: int = 2**20
    observe: bool = True


class Service:
    """A model, its batcher and its metrics."""

    def __init__(self, encoder: Encoder, settings: Settings) -> None:
        self.encoder = encoder
        self.settings = settings
        self.metrics = ModelMetrics(encoder.model) if settings.observe else None
        self.batcher = encoder.batcher(
            max_requests=settings.max_requests,
            max_rows=settings.max_texts,
            max_tokens=settings.max_tokens,
            max_wait=settings.max_wait,
            workers=settings.threads,
        )
        self._captured = self.metrics.add_captured if self.metrics else ignore
        self._limiter = anyio.CapacityLimiter(settings.threads)
        self._check: asyncio.Task[Isolation] | None = None

    async def embed(
        self, request: EmbedRequest, write: Callable[[EmbedAnswer], T], client: str | None = None
    ) -> T:
        """Answers a request; `write` runs in a thread."""
        job = await self._in_thread(self.encoder.read, request)
        computed = await self.batcher.run(
            job, job.opener, rows=job.rows, length=job.width, client=client
        )
        return await self._in_thread(
            lambda: write(self.encoder.answer(job, computed, self._captured))
        )

    async def _in_thread(self, function: Callable[..., T], *args: Any) -> T:
        return await anyio.to_thread.run_sync(function, *args, limiter=self._limiter)

    async def check(self) -> Isolation:
        """Sends requests to the service itself; who asks meanwhile gets the same result."""
        if self._check is None or self._check.done():
            self._check = asyncio.create_task(
                check(lambda request: self.embed(request, lambda answer: answer))
            )
        return await asyncio.shield(self._check)

    async def close(self) -> None:
        """Answers what waits, and stops observing."""
        await asyncio.to_thread(self.batcher.close)
        if self.metrics is not None:
            self.metrics.close()


def create_app(encoder: Encoder, settings: Settings) -> FastAPI:
    """Creates the service around a model that all requests share."""
    service = Service(encoder, settings)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        yield
        await service.close()

    # FastAPI's own page, with its files served here instead of loaded from the internet.
    app = FastAPIOffline(
        redoc_url=None,
        title="ferrohook: a sentence encoder to look into and to steer",
        lifespan=lifespan,
    )
    app.add_middleware(LimitBody, max_bytes=settings.max_body, seconds=settings.seconds)
    add_exception_handlers(app)
    app.include_router(embedding(service))
    app.include_router(observing(service))
    app.include_router(checking(service))
    return app


def embedding(service: Service) -> APIRouter:
    """Creates the endpoint for embeddings."""
    router = APIRouter()
    seconds = service.settings.seconds

    @router.post(
        "/embed",
        response_model=EmbedAnswer,
        responses={status: {"model": Refusal} for status in (408, 413, 422, 500, 503, 504)},
    )
    async def embed(body: EmbedRequest, request: Request) -> Response:
        """Embeddings of texts; the plan and the counts apply only to this request."""
        client = request.client.host if request.client else None
        # `fail_after` ends waiting, `deadline` the computation.
        with anyio.fail_after(seconds), deadline(seconds):
            answer = await service.embed(body, to_json, client)
        return Response(answer, media_type="application/json")

    return router


def observing(service: Service) -> APIRouter:
    """Creates the endpoints for metrics, hooks and the page."""
    router = APIRouter()
    encoder, metrics = service.encoder, service.metrics
    registry = CollectorRegistry()
    if metrics is not None:
        registry.register(metrics)
        registry.register(BatcherMetrics(service.batcher))

    @router.get("/metrics")
    def prometheus() -> Response:
        """Calls, latencies, hooks' errors and captured bytes, for Prometheus."""
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    @router.get("/hooks")
    def hooks() -> Hooks:
        """Hooks registered for all requests, and statistics of each module."""
        statistics = metrics.snapshot() if metrics else {}
        counts = service.batcher.snapshot()
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
            ],
            forwards=counts["sizes"].total(),
            requests=sum(size * times for size, times in counts["sizes"].items()),
            waiting=counts["waiting"],
        )

    @router.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(PAGE)

    return router


def checking(service: Service) -> APIRouter:
    """Creates the endpoints for capabilities and health."""
    router = APIRouter()
    settings = service.settings

    @router.get("/capabilities")
    async def capabilities() -> Capabilities:
        """Types of interventions, limits, and how requests share forwards."""
        return Capabilities(
            ferrohook=fh.__version__,
            model=type(service.encoder.model).__name__,
            interventions=sorted(KINDS),
            refused_options=sorted(REFUSED),
            reductions=list(get_args(Reduction)),
            max_tokens=MAX_TOKENS,
            max_body=settings.max_body,
            max_capture=service.encoder.max_capture_bytes,
            seconds=settings.seconds,
            batch=BatchLimits(
                max_requests=settings.max_requests,
                max_texts=settings.max_texts,
                max_tokens=settings.max_tokens,
                max_wait=settings.max_wait,
                forwards=settings.threads,
            ),
        )

    @router.get("/healthz", responses={503: {"model": Health}}, response_model_exclude_none=True)
    async def healthz(request: Request, response: Response, *, deep: bool = False) -> Health:
        """Readiness: 503 while the service shuts down.

        With `deep=1` it sends requests with interventions and without to itself: 503 if one changed
        the answer to another.
        """
        if getattr(request.state, "draining", False):
            response.status_code = 503
            return Health(status="draining")
        if not deep:
            return Health(status="ok")
        try:
            isolation = await service.check()
        except Exception:
            LOG.exception("the service's own requests failed")
            response.status_code = 503
            return Health(status="failing")
        if isolation.leaks:
            response.status_code = 503
        return Health(status="leaking" if isolation.leaks else "ok", isolation=isolation)

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

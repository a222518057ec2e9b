"""Tools for services that share one model: plans and hooks of a request, batches, limits, metrics.

Needs the packages fastapi and prometheus-client.

Examples:
    >>> metrics, plans = ModelMetrics(model), PreparedPlans(model, max_bytes=2**23)
    >>> prometheus_client.REGISTRY.register(metrics)
    >>> class Body(pydantic.BaseModel):
    ...     ids: list[int]
    ...     plan: PlanBody
    >>> @app.post("/embed")
    ... def embed(body: Body) -> Answer:
    ...     with plans.open(body.plan) as request:
    ...         output = model(body.ids)  # steered; other requests are not
    ...     return Answer(output, request.acts)
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from ferrohook.util.texts import missing_package

_MISSING = [each for each in ("fastapi", "prometheus_client") if find_spec(each) is None]

# Without its packages the module can be listed, as `help(ferrohook)` does, and each name says what
# is missing.
if TYPE_CHECKING or not _MISSING:
    from ferrohook.plans import PreparedPlans as PreparedPlans
    from ferrohook.service.batching import Answer as Answer
    from ferrohook.service.batching import Batcher as Batcher
    from ferrohook.service.batching import BatcherClosedError as BatcherClosedError
    from ferrohook.service.deadlines import check_deadline as check_deadline
    from ferrohook.service.deadlines import deadline as deadline
    from ferrohook.service.isolation import IsolationReport as IsolationReport
    from ferrohook.service.isolation import Leak as Leak
    from ferrohook.service.isolation import isolation_check as isolation_check
    from ferrohook.service.metrics import BUCKETS as BUCKETS
    from ferrohook.service.metrics import BatcherMetrics as BatcherMetrics
    from ferrohook.service.metrics import ModelMetrics as ModelMetrics
    from ferrohook.service.metrics import list_hooks as list_hooks
    from ferrohook.service.plans import PLAN_SCHEMA as PLAN_SCHEMA
    from ferrohook.service.plans import PlanBody as PlanBody
    from ferrohook.service.plans import plan_of as plan_of
    from ferrohook.service.responses import add_exception_handlers as add_exception_handlers
    from ferrohook.service.scopes import RequestScope as RequestScope
    from ferrohook.service.scopes import request_scope as request_scope
else:

    def __getattr__(name: str) -> object:
        if name in __all__:
            raise ModuleNotFoundError(missing_package(__name__, _MISSING[0]), name=_MISSING[0])
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)


__all__ = [
    "BUCKETS",
    "PLAN_SCHEMA",
    "Answer",
    "Batcher",
    "BatcherClosedError",
    "BatcherMetrics",
    "IsolationReport",
    "Leak",
    "ModelMetrics",
    "PlanBody",
    "PreparedPlans",
    "RequestScope",
    "add_exception_handlers",
    "check_deadline",
    "deadline",
    "isolation_check",
    "list_hooks",
    "plan_of",
    "request_scope",
]


def __dir__() -> list[str]:
    return __all__

"""Schema of requests and answers."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal, TypeAlias

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    StringConstraints,
    WithJsonSchema,
)
from typing_extensions import TypedDict

from ferrohook import Plan
from ferrohook.service import PLAN_SCHEMA, plan_of

MAX_TEXTS = 64
MAX_ENTRIES = 16
"""Maximum number of a plan's entries and of counts."""
MAX_SELECTORS = 64
REFUSED = frozenset({"device", "on_error", "slice", "stop"})
"""Options that a plan may not have: captures are reduced, and errors are answered."""

Modules: TypeAlias = Annotated[
    str, Field(description="a path or a glob, as `ferrohook.select` takes it", max_length=200)
]
Reduction: TypeAlias = Literal["mean", "max", "norm", "first", "none"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


PlanField: TypeAlias = Annotated[
    Plan,
    PlainValidator(
        partial(plan_of, max_entries=MAX_ENTRIES, max_selectors=MAX_SELECTORS, refuse=REFUSED)
    ),
    WithJsonSchema(PLAN_SCHEMA),
]
Text: TypeAlias = Annotated[str, StringConstraints(max_length=20_000)]


class EmbedRequest(_Strict):
    """Texts to embed, with a plan and counts for only this request."""

    texts: Annotated[list[Text], Field(min_length=1, max_length=MAX_TEXTS)]
    plan: PlanField = Field(default_factory=Plan)
    """Changes of modules' outputs, and modules to capture."""
    reduce: Annotated[list[Reduction], Field(min_length=1, max_length=5)] = ["mean"]
    """How to answer each capture, over each text's tokens."""
    count: Annotated[list[Modules], Field(max_length=MAX_ENTRIES)] = []


Nested: TypeAlias = "list[float] | list[list[float]] | list[list[list[float]]]"


# A dict: pydantic serializes it without validating its many numbers.
class EmbedAnswer(TypedDict):
    """Embeddings of the texts, and this request's captures and counts."""

    embeddings: list[list[float]]
    captures: dict[str, dict[Reduction, Nested] | None]
    """By label and module, then by reduction: a number, a vector or a vector per token for each
    text; null if the module never ran."""
    counts: dict[str, int]
    """Calls that this request made, by module."""
    shared: int
    """Number of requests in its forward, this one included."""


class Hook(BaseModel):
    """One registered hook."""

    id: int
    phase: str
    hook: str
    priority: int
    enabled: bool
    calls: int


class Latency(BaseModel):
    """Durations of a module's calls in seconds; None before the first."""

    calls: int
    total: float
    mean: float | None
    p50: float | None
    p99: float | None


class Module(BaseModel):
    """One module of the model, with its hooks in firing order."""

    name: str
    type: str
    hooks: list[Hook]
    errors: int | None
    """Number of exceptions in hooks; None if the module is not observed."""
    latency: Latency | None


class Hooks(BaseModel):
    """The model's modules, in the order of `named_modules`, and how requests share forwards."""

    modules: list[Module]
    forwards: int
    """Number of forwards so far."""
    requests: int
    """Number of requests in them."""
    waiting: int
    """Number of requests that wait."""


class Isolation(BaseModel):
    """Result of `ferrohook.service.isolation_check` on the service itself."""

    requests: int
    """Number of requests that were sent."""
    shared: int
    """Largest number of requests that shared a forward."""
    difference: float
    """Largest difference of numbers that count as equal."""
    leaks: list[str]
    """Answers that another request's intervention changed."""


class Health(BaseModel):
    """Readiness of the service."""

    status: Literal["ok", "draining", "leaking", "failing"]
    isolation: Isolation | None = None
    """Only for `deep=1`."""


class BatchLimits(BaseModel):
    """Limits of a forward that requests share."""

    max_requests: int
    max_texts: int
    max_tokens: int
    """Padding included."""
    max_wait: float
    """Seconds that a request waits for others."""
    forwards: int
    """Number of forwards at a time."""


class Capabilities(BaseModel):
    """Capabilities: plans, limits and modules that a request may ask for."""

    ferrohook: str
    """Version of the library."""
    model: str
    plan_version: Literal[1] = 1
    interventions: list[str]
    """Types of hooks in a plan."""
    refused_options: list[str]
    """Options that a plan may not have."""
    reductions: list[str]
    max_texts: int = MAX_TEXTS
    max_tokens: int
    """Of one text; longer texts are cut off."""
    max_entries: int = MAX_ENTRIES
    max_selectors: int = MAX_SELECTORS
    max_body: int
    """Bytes of a request."""
    max_capture: int
    """Bytes of the activations that one request captures."""
    seconds: float
    """Time limit of an answer."""
    batch: BatchLimits


class Refusal(BaseModel):
    """Reason for an error status."""

    detail: str

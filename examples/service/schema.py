"""Schema of requests and answers."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, StringConstraints
from typing_extensions import TypedDict

MAX_TEXTS = 64
MAX_ENTRIES = 16
"""Maximum length of each list of selectors."""
MAX_VECTOR = 4096

Modules: TypeAlias = Annotated[
    str, Field(description="a path or a glob, as `ferrohook.select` takes it", max_length=200)
]
Reduction: TypeAlias = Literal["mean", "max", "norm", "first", "none"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Capture(_Strict):
    """Capture outputs of modules, and answer with a reduction of each over each text's tokens."""

    modules: Modules
    reduce: Reduction = "mean"


class Add(_Strict):
    """Add a vector to outputs of modules."""

    op: Literal["add"]
    modules: Modules
    vector: Annotated[list[FiniteFloat], Field(min_length=1, max_length=MAX_VECTOR)]


class Scale(_Strict):
    """Multiply outputs of modules by a factor."""

    op: Literal["scale"]
    modules: Modules
    factor: FiniteFloat


class Zero(_Strict):
    """Replace outputs of modules by zeros."""

    op: Literal["zero"]
    modules: Modules


Steer: TypeAlias = Annotated[Add | Scale | Zero, Field(discriminator="op")]
Text: TypeAlias = Annotated[str, StringConstraints(max_length=20_000)]


class EmbedRequest(_Strict):
    """Texts to embed, with captures, steering and counts for this request alone."""

    texts: Annotated[list[Text], Field(min_length=1, max_length=MAX_TEXTS)]
    capture: Annotated[list[Capture], Field(max_length=MAX_ENTRIES)] = []
    steer: Annotated[list[Steer], Field(max_length=MAX_ENTRIES)] = []
    count: Annotated[list[Modules], Field(max_length=MAX_ENTRIES)] = []


Nested: TypeAlias = "list[float] | list[list[float]] | list[list[list[float]]]"


# A dict: pydantic serializes it without validating its many numbers.
class EmbedAnswer(TypedDict):
    """Embeddings of the texts, and this request's captures and counts."""

    embeddings: list[list[float]]
    captures: dict[str, dict[Reduction, Nested] | None]
    """By module, then by reduction: a number, a vector or a vector per token for each text; null
    if the module never ran."""
    counts: dict[str, int]
    """Calls that this request made, by module."""


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
    """The model's modules, in the order of `named_modules`."""

    modules: list[Module]


class Health(BaseModel):
    """Readiness of the service."""

    status: Literal["ok", "draining"]


class Refusal(BaseModel):
    """Reason for an error status."""

    detail: str

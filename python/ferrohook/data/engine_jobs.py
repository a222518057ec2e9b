"""`EngineJob`: a call of `collect` whose prompts an engine runs, and the engines that take one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeAlias

from ferrohook.errors import HookError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ferrohook.data.stores.store import Store
    from ferrohook.plans import Plan, Prepared


class VllmEngine(Protocol):
    """`vllm.LLM`."""

    llm_engine: Any


class SglangEngine(Protocol):
    """`sglang.Engine`."""

    tokenizer_manager: Any


Engine: TypeAlias = VllmEngine | SglangEngine
"""An engine that runs prompts."""


class EngineJob(NamedTuple):
    """Arguments of `collect`."""

    engine: Any
    prompts: Iterable[Any]
    what: Any
    options: dict[str, Any]
    """Options of `keep` for `what`."""
    store: Store
    run: str
    plan: Plan | Prepared | None
    sampling: Any
    """Sampling parameters of the engine; None to run the prompts only."""
    progress: bool


Collector: TypeAlias = "Callable[[EngineJob], tuple[int, int]]"
"""Runs a job; returns the numbers of prompts that it ran and stored, and that were stored."""

collectors: Final[dict[str, Collector]] = {}
"""Functions of the engines' plug-ins, by the path of the engine's class."""


def engine_collector(model: object) -> Collector | None:
    """Returns the function that collects with an engine; None for any other object."""
    paths = (f"{each.__module__}.{each.__qualname__}" for each in type(model).__mro__)
    return next((collectors[path] for path in paths if path in collectors), None)


def refuse_options(**options: object) -> None:
    """Refuses options of `collect` that an engine has no use for.

    Raises:
        HookError: one is given.
    """
    for name, value in options.items():
        if value is not None:
            instead = {"mask": "choose positions with keep(..., at=)"}
            instead["tokens"] = "the tokens of prompts are always stored"
            msg = f"{name}= does not work with an engine: {instead.get(name, 'leave it out')}"
            raise HookError(msg)

"""`System`: the operations that scenes ask for. One that a library does not have is absent."""

from __future__ import annotations

import importlib.metadata
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from benches.rivals.models import load
from benches.rivals.outcomes import AbsentError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch import Tensor, nn


class System(ABC):
    """A library that hooks, and one model that it was given.

    Args:
        folder: of a model of transformers; None for the scenes that bring a module.
    """

    package: ClassVar[str]
    """Name of the distribution."""
    way: ClassVar[str]
    """The documented way that is used."""
    caveats: ClassVar[Mapping[str, str]] = {}
    """Limits that its documentation names, by the scene's name."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self.model: Any = None if folder is None else self.load(folder)

    @classmethod
    def version(cls) -> str:
        """Returns the version of the library."""
        return importlib.metadata.version(cls.package).partition("+")[0]

    def load(self, folder: Path) -> Any:
        """Loads a model of transformers as the library does."""
        return load(folder)

    # --- of a language model -----------------------------------------------------------------

    @abstractmethod
    def logits(self, ids: Tensor) -> Tensor:
        """Returns the logits of a request without hooks."""

    @abstractmethod
    def steered(self, ids: Tensor, layer: int, vector: Tensor) -> Tensor:
        """Returns the logits of a request with a vector added to the output of a layer."""

    @abstractmethod
    def captured(self, ids: Tensor, layer: int) -> Tensor:
        """Returns the output of a layer for a request."""

    @abstractmethod
    def kept_then_steered(self, ids: Tensor, layer: int, vector: Tensor) -> Tensor:
        """Returns a layer's output as it was before the same request adds a vector to it."""

    @abstractmethod
    def generated(self, ids: Tensor, layer: int, vector: Tensor, tokens: int) -> Tensor:
        """Returns the greedy text of a request, with a vector at its first position alone."""

    @abstractmethod
    def failing(self, ids: Tensor, layer: int) -> None:
        """Runs a request whose hook raises `ValueError`."""

    def contributions(self, ids: Tensor) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:  # noqa: ARG002 (systems that have it use them)
        """Returns of each layer: stream before, contributions of attention, MLP, stream after."""
        msg = "it names modules, not quantities"
        raise AbsentError(msg)

    def steered_compiled(self, ids: Tensor, layer: int, vector: Tensor) -> Tensor:  # noqa: ARG002 (systems that have it use them)
        """Runs `steered` on a model that was compiled and called before."""
        msg = "its documentation does not mention compiled models"
        raise AbsentError(msg)

    def standing(self, layer: int, hook: Callable[[], None]) -> Callable[[], None]:  # noqa: ARG002 (systems that have it use them)
        """Registers a hook that observes a layer until it is removed; returns its removal."""
        msg = "it has no hooks that outlive a call"
        raise AbsentError(msg)

    def run(self, ids: Tensor) -> Any:
        """Calls the model, with the hooks that stand."""
        return self.logits(ids)

    # --- of any module -----------------------------------------------------------------------

    def captured_of(self, module: nn.Module, name: str, x: Tensor) -> Tensor:  # noqa: ARG002 (systems that have it use them)
        """Returns the output of a module inside."""
        msg = "it is only for language models"
        raise AbsentError(msg)

    def steered_of(self, module: nn.Module, name: str, x: Tensor, vector: Tensor) -> Tensor:  # noqa: ARG002 (systems that have it use them)
        """Returns the model's output with a vector added to one module's output."""
        msg = "it is only for language models"
        raise AbsentError(msg)

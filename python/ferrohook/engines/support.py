"""Versions of engines, and the features that each adapter serves or refuses."""

from __future__ import annotations

import dataclasses
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ferrohook.errors import HookError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

    from ferrohook.engines.model.modules import ModuleTable
    from ferrohook.engines.options import EngineOptions


@dataclasses.dataclass(frozen=True)
class Capabilities:
    """Features of one engine under ferrohook, see `ferrohook.engines.capabilities`."""

    engine: str
    version: str
    """Version of the installed engine."""
    tried: tuple[str, ...]
    """Releases that the adapter was tried with: "0.32" for each 0.32.x, "0.5.23" for only that."""
    served: tuple[str, ...]
    refused: Mapping[str, str]
    """Reason for each feature that is refused."""
    quantities: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    """Place and proof of each quantity of a model, or why it is refused; empty without a model."""

    def __post_init__(self) -> None:
        for name in ("refused", "quantities"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    @property
    def works(self) -> bool:
        """True if the installed release was tried."""
        return any(f"{self.version}.".startswith(f"{each}.") for each in self.tried)

    def check_version(self, *, untried: bool = False, option: str = "untried=True") -> None:
        """Refuses a release that was not tested.

        Args:
            untried: True to accept it.
            option: what the user sets for that.

        Raises:
            HookError: the release is not among `tried`, and `untried` is False.
        """
        if not self.works and not untried:
            msg = (
                f"{self.engine} {self.version} was not tested with this release of ferrohook, only "
                f"{', '.join(self.tried)}: install one of these, or set {option} to let the "
                "self-test decide"
            )
            raise HookError(msg)

    def explain(self, used: Iterable[str]) -> str:
        """Returns the error of an engine that uses features among `refused`."""
        reasons = "; ".join(f"{feature} ({self.refused[feature]})" for feature in used)
        return f"this {self.engine} engine does not support plans, because it uses {reasons}"

    def described(self, modules: ModuleTable, options: EngineOptions) -> dict[str, Any]:
        """Returns the features of a running engine, as its server reports them.

        Args:
            modules: modules and quantities of its model.
            options: of the engine.
        """
        return {
            "engine": self.engine,
            "version": self.version,
            "served": [*self.served],
            "refused": {**self.refused},
            "capture_bytes": options.capture_bytes,
            "modules": {
                name: {"width": info.width, "refused": info.refused, "proof": info.proof}
                for name, info in modules.table.items()
            },
            "quantities": modules.named.described(),
        }

    def refuse(self, feature: str) -> None:
        """Raises the error for a feature among `refused`.

        Raises:
            HookError: always.
        """
        msg = f"{feature} is not supported with {self.engine}: {self.refused[feature]}"
        raise HookError(msg)

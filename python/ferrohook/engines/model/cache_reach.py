"""Reach of changes into cached keys and values: which places come after the last attention."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Self

from ferrohook.effects.routing import Replay, Route
from ferrohook.quantity.anatomy.observe import observing

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from torch import nn

    from ferrohook.engines.model.modules import ModuleTable
    from ferrohook.plans.entries import HookEntry


@dataclasses.dataclass(frozen=True)
class CacheReach:
    """Places of a model whose changes reach no keys and values.

    Without arguments: of a model of which nothing is known, so that every change reaches all of
    them.
    """

    causal: bool = False
    """True if a token attends to tokens up to itself only."""
    outputs: frozenset[str] = frozenset()
    """Paths of the modules that return after the last attention."""
    inputs: frozenset[str] = frozenset()
    """Paths of the modules that are called after the last attention."""

    def to_json(self) -> dict[str, Any]:
        """Returns it as JSON has it."""
        sides = {"outputs": sorted(self.outputs), "inputs": sorted(self.inputs)}
        return {"causal": self.causal, **sides}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Self:
        """Reads what `to_json` returned."""
        return cls(found["causal"], frozenset(found["outputs"]), frozenset(found["inputs"]))

    def includes(self, entry: HookEntry, modules: ModuleTable) -> bool:
        """Returns False if no change of a rewritten entry reaches keys and values."""
        for name in modules.selected(entry.what):
            quantity = modules.quantity(name)
            path = name if quantity is None else quantity.path
            phase = entry.phase if quantity is None else quantity.phase
            # A route acts between the input and the output of its block.
            inside = isinstance(entry.hook, Route | Replay) or phase != "forward"
            if path not in (self.inputs if inside else self.outputs):
                return True
        return False


def observe_reach(
    model: nn.Module,
    forward: Callable[[], object],
    layers: Collection[nn.Module],
    *,
    causal: bool,
) -> CacheReach:
    """Observes which modules come after the last layer that writes keys and values.

    Args:
        model: the engine's, loaded.
        forward: runs it.
        layers: all modules that write keys and values, or other states of tokens.
        causal: a token attends to tokens up to itself only.
    """
    events: list[tuple[str, nn.Module, bool]] = []

    def note(path: str, module: nn.Module, *call: Any, returned: bool) -> None:
        del call
        events.append((path, module, returned))

    with observing(
        model,
        lambda *call: note(*call, returned=False),
        lambda *call: note(*call, returned=True),
    ):
        forward()
    if not layers or not {*layers} <= {module for _, module, _ in events}:
        return CacheReach(causal)  # some write otherwise than in a call
    last = max(at for at, (_, module, returned) in enumerate(events) if module in layers)
    sides = [
        {path for path, _, returned in events[last:] if returned is output}
        - {path for path, _, returned in events[:last] if returned is output}
        for output in (True, False)
    ]
    return CacheReach(causal, *map(frozenset, sides))

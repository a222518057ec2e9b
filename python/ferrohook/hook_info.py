"""`HookInfo`: one registered hook, as lists of hooks show it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from ferrohook._core import Registry


class HookInfo(NamedTuple):
    """One registered hook, as `HookedModule.hooks` lists it."""

    id: int
    """Unique in the process, increasing, never reused."""
    phase: str
    """`forward_pre`, `forward`, `backward_pre` or `backward`."""
    hook: Any
    """The callable or typed hook that was registered."""
    priority: int
    """Higher fires first."""
    enabled: bool
    """Tells whether it fires when its turn comes."""
    calls: int
    """Number of calls that have returned or raised."""


def timed_hooks(
    registry: Registry | None, phase: str | None = None
) -> list[tuple[HookInfo, float | None]]:
    """The hooks of a registry that fire in this context, in order, with the seconds spent in each.

    Args:
        registry: that of a module; None for a plain module, which has no hooks.
        phase: one phase; None for all.

    Returns:
        Pairs of the hook and its time, None where that is not counted.

    Raises:
        ValueError: an unknown phase.
    """
    rows = [] if registry is None else registry.list(phase)
    return [(HookInfo(*row[:-1]), row[-1]) for row in rows]


def hooks_of(registry: Registry | None, phase: str | None = None) -> list[HookInfo]:
    """The same without the time."""
    return [hook for hook, _ in timed_hooks(registry, phase)]

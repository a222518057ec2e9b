"""`HookInfo`: description of one registered hook."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import torch
from torch.cuda import graphs
from torch.nn.modules import transformer

from ferrohook._core import Dispatcher, EndOfCall, HookedBase, MaskedHook, PlanGuard

if TYPE_CHECKING:
    from torch import nn

    from ferrohook._core import HookHandle, Registry
    from ferrohook.effects.typed import Phase


class HookInfo(NamedTuple):
    """Description of one registered hook; `HookedModule.hooks` returns a list of them."""

    id: int
    """Unique in the process, increasing, never reused."""
    phase: Phase
    """`forward_pre`, `forward`, `backward_pre` or `backward`."""
    hook: Any
    """The callable or typed hook that was registered."""
    priority: int
    """Higher fires first."""
    enabled: bool
    """False while the hook is disabled."""
    calls: int
    """Number of finished calls, see `HookHandle.calls`."""
    failure: str | None = None
    """Error that disabled the hook by its `on_error`; None for a hook that none disabled."""

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in self._asdict().items())
        why = f", {state_of(self)}" if self.failure else ""
        return f"HookInfo({fields}{why})"


def state_of(hook: HookInfo | HookHandle) -> str:
    """Returns whether a hook is enabled and, if not, why, for people."""
    if hook.enabled:
        return "enabled"
    return f"disabled by on_error after {hook.failure}" if hook.failure else "disabled by hand"


def find_registry(module: nn.Module) -> Registry | None:
    """Returns the registry of a wrapper or an instrumented module; None for a plain module."""
    if issubclass(type(module), HookedBase):
        return cast("HookedBase", module)._registry
    dispatcher: Dispatcher | None = vars(module).get(Dispatcher.KEY)
    if dispatcher is None or not dispatcher.serves(module):
        return None
    return dispatcher.registry


_PASS_HOOKS_BY: Final = frozenset({transformer.__name__, graphs.__name__})
"""Modules of torch that run nothing but tensors' operations where they see no hooks."""


def shown_forward_hooks(module: nn.Module) -> Any:
    """Returns a module's own torch hooks, for a property `_forward_hooks`.

    The fast path of TransformerEncoderLayer calls no submodules, and a CUDA graph no hooks. torch
    takes them for modules without hooks in this dict, so an extra entry stands there for the
    registry's hooks.
    """
    hooks = vars(module)["_forward_hooks"]
    if (
        torch.compiler.is_compiling()  # see `attach.dynamo`
        or sys._getframe(1).f_globals.get("__name__") not in _PASS_HOOKS_BY
    ):
        return hooks
    registry = find_registry(module)
    return {**hooks, None: None} if registry is not None and registry.hooked else hooks


def as_given(hook: Any) -> Any:
    """Returns the hook that a user registered in the form of ours."""
    return hook.hook if isinstance(hook, MaskedHook) else hook


def hooks_of(registry: Registry | None, phase: Phase | None = None) -> list[HookInfo]:
    """Lists the hooks of a registry that fire in this context, in order.

    Args:
        registry: a module's registry; None for a plain module, which has no hooks.
        phase: one phase; None for all.

    Raises:
        ValueError: an unknown phase.
    """
    rows = [] if registry is None else map(HookInfo._make, registry.list(phase))
    own = (row for row in rows if not isinstance(row.hook, PlanGuard | EndOfCall))
    return [row._replace(hook=as_given(row.hook)) for row in own]

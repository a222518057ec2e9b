"""`HookPoint`: an identity module that exists to be hooked."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

from torch import nn

from ferrohook._core import Attachment
from ferrohook.attach.instrument import attach, registry_of
from ferrohook.compat.transformer_lens.lens_hooks import (
    HANDLES,
    HookFunction,
    LensHandle,
    TensorConversion,
    check_hook,
    layer_of,
)
from ferrohook.errors import HookTypeError
from ferrohook.util.arguments import describe, expect

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ferrohook._core import Frame
    from ferrohook.effects.typed import Phase

T = TypeVar("T")

Direction: TypeAlias = Literal["fwd", "bwd"]
Directions: TypeAlias = Literal["fwd", "bwd", "both"]

# The phase that `add_hook` registers for.
PHASES: dict[str, Phase] = {"fwd": "forward", "bwd": "backward"}
# All phases in which hooks can fire.
_ALL_PHASES: dict[str, tuple[Phase, ...]] = {
    "fwd": ("forward_pre", "forward"),
    "bwd": ("backward_pre", "backward"),
}


class HookPoint(nn.Module):
    """An identity module that exists to be hooked.

    Follows TransformerLens' class of that name. It is always instrumented: its `register_*`
    methods, `fh.capture`, `fh.register`, scopes, `fh.summary` and `torch.compile` treat it like
    any instrumented module.

    Attributes:
        name: its path in the model, from `HookedRootModule.setup`.
        ctx: a dict for the hooks' own data. All threads share it.
        pos_dim: the position's dimension in the activation, batch included, for `pos_slice`; None
            for the last but one (the last but two with a dimension of heads).
    """

    name: str | None
    ctx: dict[Any, Any]
    pos_dim: int | None

    # Names that torch.jit.script must not compile.
    __jit_unused_properties__ = ("backward_scale", "bwd_hooks", "fwd_hooks", "hook_conversion")

    def __init__(self) -> None:
        super().__init__()
        attach({"": self}, Attachment(), explicit=True)
        self.name = None
        self.ctx = {}
        self.pos_dim = None
        self._hook_conversion: TensorConversion | None = None
        self._backward_scale = 1.0

    def forward(self, x: T) -> T:
        """Returns `x` itself."""
        return x

    def add_hook(
        self,
        hook: HookFunction,
        dir: Direction = "fwd",
        is_permanent: bool = False,
        level: int | None = None,
        prepend: bool = False,
        alias_names: Sequence[str] | None = None,
        *,
        scope: Frame | None = None,
    ) -> LensHandle:
        """Adds a hook, called as `hook(tensor, hook=point)`.

        A forward hook sees the activation that the hooks before it left; a return value other than
        None replaces it. A backward hook sees the gradient of the point's output; its return value
        replaces the gradient of the input, and the last value returned wins.

        Args:
            hook: the callable.
            dir: `fwd` for activations, `bwd` for gradients.
            is_permanent: removed only with `including_permanent=True`.
            level: an int to remove it by, together with others of that level.
            prepend: run ahead of all others instead of behind them.
            alias_names: call it once for each of these names, with a view of the point under that
                name; each call sees the result of the one before.
            scope: fire only in contexts that entered this scope, until it is left.

        Returns:
            The handle of this hook alone.

        Raises:
            HookTypeError: `hook` cannot be called like that, or an option has the wrong type.
            ValueError: `dir` is neither of these, or `alias_names` is empty.
            HookError: the scope was left.
        """
        kind = HANDLES.get(dir)
        if kind is None:
            msg = f"dir is 'fwd' or 'bwd', got {dir!r}"
            raise ValueError(msg)
        check_hook(hook)
        if level is not None and type(level) is not int:
            msg = f"level is an int or None, got {type(level).__name__}"
            raise HookTypeError(msg)
        aliases = None if alias_names is None else _check_aliases(alias_names)
        handle = kind(hook, is_permanent, level, aliases)
        register = registry_of(self).register
        handle.hook = register(handle.phase, handle, prepend=prepend, scope=scope)
        return handle

    def add_perma_hook(self, hook: HookFunction, dir: Direction = "fwd") -> LensHandle:
        """Adds a permanent hook, see `add_hook`."""
        return self.add_hook(hook, dir=dir, is_permanent=True)

    @property
    def fwd_hooks(self) -> list[LensHandle]:
        """The added forward hooks that fire in this context, in firing order."""
        return self._handles("fwd")

    @property
    def bwd_hooks(self) -> list[LensHandle]:
        """The added backward hooks that fire in this context, in firing order."""
        return self._handles("bwd")

    def _handles(self, direction: str) -> list[LensHandle]:
        rows = registry_of(self).list(PHASES[direction])
        return [hook for _, _, hook, *_ in rows if isinstance(hook, LensHandle)]

    def has_hooks(
        self,
        dir: Directions = "both",
        including_permanent: bool = True,
        level: int | None = None,
    ) -> bool:
        """Returns True if a hook fires here in this context: added ones, captures, any other.

        Args:
            dir: `fwd`, `bwd` or `both`.
            including_permanent: count permanent ones too.
            level: count only hooks added with this level.

        Raises:
            ValueError: `dir` is none of these.
        """
        for each in directions(dir):
            for phase in _ALL_PHASES[each]:
                for _, _, hook, *_ in registry_of(self).list(phase):
                    if not isinstance(hook, LensHandle):
                        if level is None:
                            return True
                    elif hook.matches(including_permanent=including_permanent, level=level):
                        return True
        return False

    def remove_hooks(
        self,
        dir: Directions = "fwd",
        including_permanent: bool = False,
        level: int | None = None,
    ) -> None:
        """Removes the added hooks that fire in this context.

        Args:
            dir: `fwd`, `bwd` or `both`.
            including_permanent: remove permanent ones too.
            level: remove only hooks added with this level.

        Raises:
            ValueError: `dir` is none of these.
        """
        for each in directions(dir):
            for handle in self._handles(each):
                if handle.matches(including_permanent=including_permanent, level=level):
                    handle.remove()

    def clear_context(self) -> None:
        """Replaces `ctx` by a new dict; the old one is left unchanged."""
        self.ctx = {}

    @property
    def hook_conversion(self) -> TensorConversion | None:
        """The layout that the hooks see, see `enable_reshape`."""
        return self._hook_conversion

    @hook_conversion.setter
    def hook_conversion(self, conversion: TensorConversion | None) -> None:
        missing = [
            name for name in ("convert", "revert") if not callable(getattr(conversion, name, None))
        ]
        if conversion is not None and missing:
            msg = (
                "a conversion has the methods convert(value) and revert(value), "
                f"{describe(conversion)} lacks {' and '.join(missing)}"
            )
            raise HookTypeError(msg)
        self._hook_conversion = conversion

    def enable_reshape(self, hook_conversion: TensorConversion | None = None) -> None:
        """Shows the hooks the tensor in another layout.

        Args:
            hook_conversion: `convert` maps the tensor to the layout that hooks and caches see;
                `revert` maps a hook's result back. None for no conversion.

        Raises:
            HookTypeError: one of the two methods is missing.
        """
        self.hook_conversion = hook_conversion

    @property
    def backward_scale(self) -> float:
        """Factor for the sum of a gradient in a backward hook.

        As in TransformerLens it scales `gradient.sum()` if the result is one number, not the
        gradient itself.
        """
        return self._backward_scale

    @backward_scale.setter
    def backward_scale(self, scale: float) -> None:
        expect(scale, int | float, "backward_scale is a number")
        if not math.isfinite(scale):
            msg = f"backward_scale is a finite number, got {scale}"
            raise ValueError(msg)
        self._backward_scale = float(scale)

    def layer(self) -> int:
        """Index of the layer in a name of the form `blocks.3.attn`.

        Raises:
            ValueError: the point has no name, or its name has no layer index.
        """
        return layer_of(self.name)

    def extra_repr(self) -> str:
        """The name and the number of added hooks."""
        counts = {"fwd": len(self.fwd_hooks), "bwd": len(self.bwd_hooks)}
        name = [] if self.name is None else [f"name={self.name!r}"]
        return ", ".join(name + [f"{count} {each}" for each, count in counts.items() if count])

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"ctx": {}}  # the hooks' data is run-time state and is not saved

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # torch's
        # A second attachment: a copy's inherited one can be released, this one never is.
        attach({"": self}, Attachment(), explicit=True)
        for hook, handle, _place in registry_of(self).for_everybody():
            if isinstance(hook, LensHandle):
                hook.hook = handle  # a copied LensHandle has no handle yet


def directions(direction: object) -> tuple[str, ...]:
    """Resolves "fwd", "bwd" or "both" to directions.

    Raises:
        ValueError: `direction` is none of these.
    """
    if direction == "both":
        return tuple(PHASES)
    if direction not in PHASES:
        msg = f"dir is 'fwd', 'bwd' or 'both', got {direction!r}"
        raise ValueError(msg)
    return (str(direction),)


def _check_aliases(names: Sequence[str]) -> list[str]:
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        msg = f"alias_names is a list of names, got {names!r}"
        raise HookTypeError(msg)
    if not names:
        msg = "alias_names is empty: the hook would never be called"
        raise ValueError(msg)
    return list(names)

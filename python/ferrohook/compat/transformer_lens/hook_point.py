"""`HookPoint`: an identity module that exists to be hooked, and the handles of its hooks."""

from __future__ import annotations

import copy
import inspect
import math
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from ferrohook._core import Attachment, HookHandle, refuse_async
from ferrohook.attach.instrument import attach, registry_of
from ferrohook.errors import HookTypeError
from ferrohook.util.arguments import describe, expect, expect_callable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ferrohook._core import Frame
    from ferrohook.effects.typed import Phase

T = TypeVar("T")

Direction: TypeAlias = Literal["fwd", "bwd"]
Directions: TypeAlias = Literal["fwd", "bwd", "both"]

# All phases in which hooks can fire.
_ALL_PHASES: dict[str, tuple[Phase, ...]] = {
    "fwd": ("forward_pre", "forward"),
    "bwd": ("backward_pre", "backward"),
}


class HookFunction(Protocol):
    """A callable for `HookPoint.add_hook`.

    Called with the point's tensor, or its gradient, and the point as the keyword `hook`. Returning
    None observes; another value replaces the tensor, or the gradient of the point's input.
    """

    def __call__(self, tensor: Any, /, *, hook: Any) -> Any:
        """Observes, or returns a replacement."""
        ...


class TensorConversion(Protocol):
    """Another layout for the hooks of a point, see `HookPoint.enable_reshape`."""

    def convert(self, input_value: Any, /) -> Any:
        """Maps the point's layout to the hooks'."""
        ...

    def revert(self, input_value: Any, /) -> Any:
        """Maps the hooks' layout to the point's."""
        ...


class LensHandle:
    """One hook added to a hook point.

    Follows TransformerLens' class of that name. It is also the callable in the registry; each call
    passes the point, so a copied point passes itself.

    Attributes:
        hook: the registry's handle: removes, disables and describes the hook.
        is_permanent: removed only with `including_permanent=True`.
        context_level: number of `hooks` contexts around it, its own included; or the `level` of
            `add_hook`.
        user_hook: the callable that was added.
    """

    __call__: Callable[..., Any]
    # Before it is registered: the handle of a removed hook.
    hook: HookHandle = HookHandle._removed("forward")

    def __init__(
        self,
        user_hook: HookFunction,
        is_permanent: bool = False,
        context_level: int | None = None,
        aliases: Sequence[str] | None = None,
    ) -> None:
        self.user_hook = user_hook
        self.is_permanent = is_permanent
        self.context_level = context_level
        # Names that it is called under, in place of the point's own.
        self._aliases = aliases

    def __deepcopy__(self, memo: dict[int, Any]) -> LensHandle:
        user_hook = copy.deepcopy(self.user_hook, memo)
        return type(self)(user_hook, self.is_permanent, self.context_level, self._aliases)

    def remove(self) -> None:
        """Removes the hook; idempotent."""
        self.hook.remove()

    def matches(self, *, including_permanent: bool, level: int | None) -> bool:
        """Returns True if the hook is of this level, and not permanent unless included."""
        permanent = including_permanent or not self.is_permanent
        return permanent and (level is None or self.context_level == level)

    def _apply(self, point: HookPoint, value: Any) -> Any:
        """Calls the hook; returns its result in the point's layout, None if it observes."""
        conversion = point.hook_conversion
        if conversion is not None:
            value = conversion.convert(value)
        if self._aliases is None:
            result = self.user_hook(value, hook=point)
        else:
            result = None
            for alias in self._aliases:
                replaced = self.user_hook(value, hook=AliasedHookPoint(alias, point))
                if replaced is not None:
                    value = result = replaced
        if result is not None and conversion is not None:
            result = conversion.revert(result)
        return result

    def __getattr__(self, name: str) -> Any:
        # Error notes name the user's hook.
        if name == "__qualname__":
            hook = self.user_hook
            return getattr(hook, name, None) or f"an instance of {type(hook).__name__}"
        msg = f"{type(self).__name__!r} object has no attribute {name!r}"
        raise AttributeError(msg)

    def __repr__(self) -> str:
        # Without the hook's repr, which is slow for partials and objects with tensors.
        return (
            f"LensHandle({self.__qualname__}, hook={self.hook!r}, "
            f"is_permanent={self.is_permanent}, context_level={self.context_level})"
        )


class ForwardLensHandle(LensHandle):
    """Handle of a forward hook."""

    phase: Final = "forward"

    def __call__(self, point: HookPoint, _args: Any, output: Any, /) -> Any:
        """A forward hook of PyTorch's contract."""
        if self._aliases is None and point._hook_conversion is None:
            return self.user_hook(output, hook=point)
        return self._apply(point, output)


class BackwardLensHandle(LensHandle):
    """Handle of a backward hook."""

    phase: Final = "backward"

    def __call__(self, point: HookPoint, _grad_input: Any, grad_output: Any, /) -> Any:
        """A full backward hook of PyTorch's contract."""
        gradient = grad_output[0]
        if point.backward_scale != 1 and gradient is not None:
            gradient = ScaledGradient.of(gradient, point.backward_scale)
        result = self._apply(point, gradient)
        if result is None or (isinstance(result, tuple) and len(result) == 1):
            return result
        return (result.as_subclass(Tensor) if isinstance(result, ScaledGradient) else result,)


class AliasedHookPoint:
    """A hook point under another name, passed to hooks added with `alias_names`."""

    def __init__(self, alias_name: str, target: HookPoint) -> None:
        """Shows `target` as `alias_name`."""
        self.name = alias_name
        self._target = target

    @property
    def ctx(self) -> dict[Any, Any]:
        """The point's `ctx`."""
        return self._target.ctx

    @property
    def hook_conversion(self) -> TensorConversion | None:
        """The point's conversion."""
        return self._target.hook_conversion

    def layer(self) -> int:
        """Index of the layer in the alias, see `HookPoint.layer`."""
        return layer_of(self.name)

    def __repr__(self) -> str:
        return f"AliasedHookPoint({self.name!r}, of={self._target!r})"


class ScaledGradient(Tensor):
    """A gradient whose sum over all elements is scaled, see `HookPoint.backward_scale`."""

    # Operations on it return plain tensors.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as Parameter has it
    _scale: float

    @classmethod
    def of(cls, gradient: Tensor, scale: float) -> ScaledGradient:
        """Makes a view of `gradient` with a scale."""
        scaled = gradient.as_subclass(cls)
        scaled._scale = scale
        return scaled

    def sum(self, *args: Any, **kwargs: Any) -> Tensor:
        """`Tensor.sum`, scaled if the result is one number."""
        result: Tensor = super().sum(*args, **kwargs)
        return result * self._scale if result.numel() == 1 else result


HANDLES: dict[str, type[ForwardLensHandle | BackwardLensHandle]] = {
    "fwd": ForwardLensHandle,
    "bwd": BackwardLensHandle,
}
"""Handle classes by direction."""

_USUAL_COUNT = len(("tensor", "hook"))


def usual_code(hook: object) -> CodeType | None:
    """Returns the code of a plain `def hook(tensor, hook)`: valid for every hook that shares it."""
    if (
        type(hook) is FunctionType
        and (code := hook.__code__).co_argcount == _USUAL_COUNT
        and code.co_varnames[1] == "hook"
        and not code.co_kwonlyargcount
        and not code.co_posonlyargcount
    ):
        return code
    return None


def check_hook(hook: Any) -> None:
    """Validates that a hook can be called as `hook(tensor, hook=point)`.

    Raises:
        HookTypeError: it cannot, or it is async.
    """
    refuse_async(hook, "a hook")
    if usual_code(hook):
        return
    expect_callable(hook, "a hook must be callable as hook(tensor, hook=point)")
    try:
        signature = inspect.signature(hook)
    except (TypeError, ValueError):
        return  # builtins have no signature
    try:
        signature.bind(None, hook=None)
    except TypeError as error:
        name = getattr(hook, "__qualname__", type(hook).__name__)
        msg = f"a hook must be callable as hook(tensor, hook=point), but {name}{signature} is not"
        raise HookTypeError(msg) from error


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
            prepend: run ahead of all others instead of after them.
            alias_names: call it once for each of these names, with a view of the point under that
                name; each call sees the result of the one before.
            scope: fire only in contexts that entered this scope, until it is left.

        Returns:
            The handle of this hook only.

        Raises:
            HookTypeError: `hook` cannot be called like that, or an option has the wrong type.
            ValueError: `dir` is neither of these, or `alias_names` is empty.
            HookError: the scope was left.
        """
        kind = HANDLES.get(dir)
        if kind is None:
            msg = f"dir must be 'fwd' or 'bwd', got {dir!r}"
            raise ValueError(msg)
        check_hook(hook)
        if level is not None and type(level) is not int:
            msg = f"level must be an int or None, got {type(level).__name__}"
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
        rows = registry_of(self).list(HANDLES[direction].phase)
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
                "a conversion needs the methods convert(value) and revert(value), but "
                f"{describe(conversion)} has no {' and no '.join(missing)}"
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
        expect(scale, int | float, "backward_scale must be a number")
        if not math.isfinite(scale):
            msg = f"backward_scale must be finite, got {scale}"
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
        for hook, handle, _place in registry_of(self).global_hooks():
            if isinstance(hook, LensHandle):
                hook.hook = handle  # a copied LensHandle has no handle yet


def directions(direction: object) -> tuple[str, ...]:
    """Resolves "fwd", "bwd" or "both" to directions.

    Raises:
        ValueError: `direction` is none of these.
    """
    if direction == "both":
        return tuple(HANDLES)
    if direction not in HANDLES:
        msg = f"dir must be 'fwd', 'bwd' or 'both', got {direction!r}"
        raise ValueError(msg)
    return (str(direction),)


def _check_aliases(names: Sequence[str]) -> list[str]:
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        msg = f"alias_names must be a list of names, got {names!r}"
        raise HookTypeError(msg)
    if not names:
        msg = "alias_names is empty: the hook would never be called"
        raise ValueError(msg)
    return list(names)


def layer_of(name: str | None) -> int:
    """Index of the layer in a name of the form `blocks.3.attn`.

    Raises:
        ValueError: the name has none.
    """
    segments = (name or "").split(".")
    if len(segments) > 1 and segments[1].isdecimal():
        return int(segments[1])
    if name is None:
        msg = "this hook point has no name yet, and therefore no layer: call the model's setup()"
    else:
        msg = f"{name!r} has no layer index as its second segment, unlike 'blocks.3.attn'"
    raise ValueError(msg)

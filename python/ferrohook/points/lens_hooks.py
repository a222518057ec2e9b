"""Hooks of TransformerLens' form, `hook(tensor, hook=point)`, as what the registry calls."""

from __future__ import annotations

import copy
import inspect
from types import CodeType, FunctionType
from typing import Any, Protocol

import torch
from torch import Tensor

from ferrohook._core import PointHook
from ferrohook.errors import HookTypeError


class Point(Protocol):
    """A hook point, as far as its hooks look at it."""

    name: str | None
    ctx: dict[Any, Any]
    _hook_conversion: TensorConversion | None

    @property
    def hook_conversion(self) -> TensorConversion | None:
        """The layout that the hooks see."""
        ...

    @property
    def backward_scale(self) -> float:
        """The factor for the sum of a gradient."""
        ...


class HookFunction(Protocol):
    """What is added to a hook point.

    Called with the point's tensor, or its gradient, and with the point by the keyword `hook`. None
    observes; anything else replaces the tensor, or the gradient of the point's input.
    """

    def __call__(self, tensor: Any, /, *, hook: Any) -> Any:
        """Sees, and may replace."""
        ...


class TensorConversion(Protocol):
    """Another layout for the hooks of a point, see `HookPoint.enable_reshape`."""

    def convert(self, input_value: Any, /) -> Any:
        """From the point's layout to that of the hooks."""
        ...

    def revert(self, input_value: Any, /) -> Any:
        """From the layout of the hooks to the point's."""
        ...


class LensHandle(PointHook):
    """One hook that was added to a hook point.

    Follows TransformerLens' class of that name. It is also what the registry calls; which point it
    is called for it is told each time, so that copies of a point tell themselves.

    Attributes:
        hook: the registry's handle: removes, disables and describes the hook.
        is_permanent: whether it stays when hooks are removed, unless permanent ones are asked for.
        context_level: how many `hooks` contexts were open around it, its own included; None for
            what was added without.
        user_hook: what was added.
    """

    __slots__ = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> LensHandle:
        user_hook = copy.deepcopy(self.user_hook, memo)
        return type(self)(user_hook, self.is_permanent, self.context_level, self._aliases)

    def remove(self) -> None:
        """Removes the hook, from wherever it is called; doing so again does nothing."""
        self.hook.remove()

    def matches(self, *, including_permanent: bool, level: int | None) -> bool:
        """Whether it is one of those that are asked for."""
        permanent = including_permanent or not self.is_permanent
        return permanent and (level is None or self.context_level == level)

    def _apply(self, point: Point, value: Any) -> Any:
        """The hook's result for the tensor in the point's layout; None where it observes."""
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
        # What failed is told by the name of the user's hook.
        if name == "__qualname__":
            hook = self.user_hook
            return getattr(hook, name, None) or f"an instance of {type(hook).__name__}"
        msg = f"{type(self).__name__!r} object has no attribute {name!r}"
        raise AttributeError(msg)

    def __repr__(self) -> str:
        # Without the repr of the hook: partials and objects may hold tensors, which takes long.
        return (
            f"LensHandle({self.__qualname__}, hook={self.hook!r}, "
            f"is_permanent={self.is_permanent}, context_level={self.context_level})"
        )


class ForwardLensHandle(LensHandle):
    """That of a forward hook."""

    __slots__ = ()
    phase = "forward"

    def __call__(self, point: Point, _args: Any, output: Any, /) -> Any:
        """A forward hook of PyTorch's contract."""
        if self._aliases is None and point._hook_conversion is None:
            return self.user_hook(output, hook=point)
        return self._apply(point, output)


class BackwardLensHandle(LensHandle):
    """That of a backward hook."""

    __slots__ = ()
    phase = "backward"

    def __call__(self, point: Point, _grad_input: Any, grad_output: Any, /) -> Any:
        """A full backward hook of PyTorch's contract."""
        gradient = grad_output[0]
        if point.backward_scale != 1 and gradient is not None:
            gradient = ScaledGradient.of(gradient, point.backward_scale)
        result = self._apply(point, gradient)
        if result is None or (isinstance(result, tuple) and len(result) == 1):
            return result
        return (result.as_subclass(Tensor) if isinstance(result, ScaledGradient) else result,)


class AliasedHookPoint:
    """A hook point under another name, as the hooks see it that were added with `alias_names`."""

    def __init__(self, alias_name: str, target: Point) -> None:
        """Shows `target` as `alias_name`."""
        self.name = alias_name
        self._target = target

    @property
    def ctx(self) -> dict[Any, Any]:
        """That of the point."""
        return self._target.ctx

    @property
    def hook_conversion(self) -> TensorConversion | None:
        """That of the point."""
        return self._target.hook_conversion

    def layer(self) -> int:
        """The layer in the alias, see `HookPoint.layer`."""
        return layer_of(self.name)

    def __repr__(self) -> str:
        return f"AliasedHookPoint({self.name!r}, of={self._target!r})"


class ScaledGradient(Tensor):
    """A gradient whose sum over all elements is scaled, see `HookPoint.backward_scale`."""

    # What is computed from it is a plain tensor.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as Parameter has it
    _scale: float

    @classmethod
    def of(cls, gradient: Tensor, scale: float) -> ScaledGradient:
        """The same numbers, with the scale."""
        scaled = gradient.as_subclass(cls)
        scaled._scale = scale
        return scaled

    def sum(self, *args: Any, **kwargs: Any) -> Tensor:
        """As `Tensor.sum`, scaled where one number comes out."""
        result: Tensor = super().sum(*args, **kwargs)
        return result * self._scale if result.numel() == 1 else result


HANDLES: dict[str, type[ForwardLensHandle | BackwardLensHandle]] = {
    "fwd": ForwardLensHandle,
    "bwd": BackwardLensHandle,
}
"""What is registered for a hook, by its direction."""

_USUAL_COUNT = len(("tensor", "hook"))


def usual_code(hook: object) -> CodeType | None:
    """The code of `def hook(tensor, hook)`, as most are, by which all are known that have it."""
    if (
        type(hook) is FunctionType
        and (code := hook.__code__).co_argcount == _USUAL_COUNT
        and code.co_varnames[1] == "hook"
        and not code.co_kwonlyargcount
        and not code.co_posonlyargcount
    ):
        return code
    return None


def check_hook(hook: object) -> None:
    """Refuses what cannot be called as `hook(tensor, hook=point)`.

    Raises:
        HookTypeError: it cannot.
    """
    if usual_code(hook):
        return
    if not callable(hook):
        msg = f"a hook is called as hook(tensor, hook=point), got {type(hook).__name__}"
        raise HookTypeError(msg)
    try:
        signature = inspect.signature(hook)
    except (TypeError, ValueError):
        return  # builtins do not tell
    try:
        signature.bind(None, hook=None)
    except TypeError as error:
        name = getattr(hook, "__qualname__", type(hook).__name__)
        msg = f"a hook is called as hook(tensor, hook=point), and {name}{signature} cannot be"
        raise HookTypeError(msg) from error


def layer_of(name: str | None) -> int:
    """The layer in a name of the form `blocks.3.attn`.

    Raises:
        ValueError: there is none.
    """
    segments = (name or "").split(".")
    if len(segments) > 1 and segments[1].isdecimal():
        return int(segments[1])
    if name is None:
        msg = "this hook point has no name yet, and so no layer: the model's setup() names it"
    else:
        msg = f"{name!r} names no layer: the second segment is its number, as in 'blocks.3.attn'"
    raise ValueError(msg)

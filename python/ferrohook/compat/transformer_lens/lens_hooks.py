"""`LensHandle`: adapts hooks of TransformerLens' form, `hook(tensor, hook=point)`."""

from __future__ import annotations

import copy
import inspect
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
from torch import Tensor

from ferrohook._core import HookHandle, refuse_async
from ferrohook.errors import HookTypeError
from ferrohook.util.arguments import expect_callable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Point(Protocol):
    """The part of a hook point that its hooks read."""

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

    def _apply(self, point: Point, value: Any) -> Any:
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

    def __call__(self, point: Point, _args: Any, output: Any, /) -> Any:
        """A forward hook of PyTorch's contract."""
        if self._aliases is None and point._hook_conversion is None:
            return self.user_hook(output, hook=point)
        return self._apply(point, output)


class BackwardLensHandle(LensHandle):
    """Handle of a backward hook."""

    phase: Final = "backward"

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
    """A hook point under another name, passed to hooks added with `alias_names`."""

    def __init__(self, alias_name: str, target: Point) -> None:
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
    expect_callable(hook, "a hook is called as hook(tensor, hook=point)")
    try:
        signature = inspect.signature(hook)
    except (TypeError, ValueError):
        return  # builtins have no signature
    try:
        signature.bind(None, hook=None)
    except TypeError as error:
        name = getattr(hook, "__qualname__", type(hook).__name__)
        msg = f"a hook is called as hook(tensor, hook=point), and {name}{signature} cannot be"
        raise HookTypeError(msg) from error


def layer_of(name: str | None) -> int:
    """Index of the layer in a name of the form `blocks.3.attn`.

    Raises:
        ValueError: the name has none.
    """
    segments = (name or "").split(".")
    if len(segments) > 1 and segments[1].isdecimal():
        return int(segments[1])
    if name is None:
        msg = "this hook point has no name yet, and so no layer: call the model's setup()"
    else:
        msg = f"{name!r} has no layer index as second segment, as 'blocks.3.attn' has"
    raise ValueError(msg)

"""Typed hooks: hooks with a checked return value.

A plain callable follows PyTorch's contract for the phase. A typed hook is an instance of one of
these classes around a function, made by calling the class or using it as a decorator, and is
registered by the same methods. The names are ferrotorch's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeAlias, TypeVar

from ferrohook._core import TypedHook

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

Phase: TypeAlias = Literal["forward_pre", "forward", "backward_pre", "backward"]
"""Phase of a call."""
OnError: TypeAlias = Literal["raise", "disable", "ignore"]
"""Effect of an exception in a hook: raise it, disable the hook, or ignore it."""
Grads: TypeAlias = "tuple[torch.Tensor | None, ...]"

if TYPE_CHECKING:
    from typing_extensions import TypeVar as DefaultTypeVar

    # Arguments of a lambda are Any: for mypy by the default, for pyright by the bound.
    In = DefaultTypeVar("In", bound=Any, default=Any)
    Out = DefaultTypeVar("Out", bound=Any, default=Any)
else:
    In, Out = TypeVar("In"), TypeVar("Out")


class ForwardPreHook(TypedHook, Generic[In]):
    """Transforms a module's input: `fn(input) -> input`.

    `input` is the positional argument if there is exactly one, else the tuple of them. `fn` returns
    a tensor for a single argument, or a tuple with as many elements as the call has; any other
    value is a `HookTypeError` in that call.

    Args:
        fn: called with the input before the module runs.

    Raises:
        HookTypeError: `fn` is not callable.
    """

    __slots__ = ()

    def __new__(cls, fn: Callable[[In], In]) -> Self:  # noqa: D102 (see the class)
        return super().__new__(cls, "forward_pre", fn)

    if TYPE_CHECKING:

        @property
        def phase(self) -> Literal["forward_pre"]: ...  # noqa: D102 (TypedHook's docstring)

    def __call__(self, input: In, /) -> In:  # noqa: A002 (the contract's word)
        """Calls the function, so a decorated function stays callable."""
        result: In = self.fn(input)
        return result


class ForwardHook(TypedHook, Generic[In, Out]):
    """Observes a module's input and output: `fn(input, output) -> None`.

    It cannot replace the output: returning a value is a `HookTypeError` in that call. `input` is
    the positional argument if there is exactly one, else the tuple of them.

    Args:
        fn: called with the input and the output after the module ran.

    Raises:
        HookTypeError: `fn` is not callable.
    """

    __slots__ = ()

    def __new__(cls, fn: Callable[[In, Out], None]) -> Self:  # noqa: D102 (see the class)
        return super().__new__(cls, "forward", fn)

    if TYPE_CHECKING:

        @property
        def phase(self) -> Literal["forward"]: ...  # noqa: D102 (TypedHook's docstring)

    def __call__(self, input: In, output: Out, /) -> None:  # noqa: A002 (the contract's word)
        """Calls the function, so a decorated function stays callable."""
        self.fn(input, output)


class BackwardHook(TypedHook):
    """Observes gradients: `fn(grad_input, grad_output) -> None`.

    Both are the tuples of PyTorch's full backward hooks, with None for a value that is not a tensor
    or does not require grad. Returning a value is a `HookTypeError` in that backward pass.

    Args:
        fn: called with both tuples once autograd has the gradients of the module's input.

    Raises:
        HookTypeError: `fn` is not callable.
    """

    __slots__ = ()

    def __new__(cls, fn: Callable[[Grads, Grads], None]) -> Self:  # noqa: D102 (see the class)
        return super().__new__(cls, "backward", fn)

    if TYPE_CHECKING:

        @property
        def phase(self) -> Literal["backward"]: ...  # noqa: D102 (TypedHook's docstring)

    def __call__(self, grad_input: Grads, grad_output: Grads, /) -> None:
        """Calls the function, so a decorated function stays callable."""
        self.fn(grad_input, grad_output)

# What the Rust extension offers; held against it by stubtest.

from collections.abc import Callable
from typing import Any, Literal, Self, TypeAlias, final

from typing_extensions import disjoint_base

from ferrohook.typed import BackwardHook, ForwardHook, ForwardPreHook

__all__ = ["HookHandle", "HookedBase", "Registry", "TypedHook", "__version__"]

__version__: str

_Phase: TypeAlias = Literal["forward_pre", "forward", "backward_pre", "backward"]
_OnError: TypeAlias = Literal["raise", "disable", "ignore"]
_Args: TypeAlias = tuple[Any, ...]
_Kwargs: TypeAlias = dict[str, Any]
# PyTorch's contracts. The module is Any: which class a hook expects is the hook's business.
_PlainForwardPreHook: TypeAlias = (
    Callable[[Any, _Args], Any] | Callable[[Any, _Args, _Kwargs], tuple[Any, _Kwargs] | None]
)
_PlainForwardHook: TypeAlias = (
    Callable[[Any, _Args, Any], Any] | Callable[[Any, _Args, _Kwargs, Any], Any]
)
_PlainBackwardPreHook: TypeAlias = Callable[[Any, Any], Any]
_PlainBackwardHook: TypeAlias = Callable[[Any, Any, Any], Any]

@disjoint_base
class TypedHook:
    def __new__(cls, phase: str, fn: Callable[..., Any], /) -> Self: ...
    @property
    def fn(self) -> Callable[..., Any]: ...
    @property
    def phase(self) -> _Phase: ...
    def __reduce__(self) -> tuple[type[Self], tuple[Callable[..., Any]]]: ...

@final
class HookHandle:
    @property
    def id(self) -> int: ...
    @property
    def phase(self) -> _Phase: ...
    @property
    def removed(self) -> bool: ...
    @property
    def enabled(self) -> bool: ...
    @property
    def calls(self) -> int: ...
    priority: int
    def remove(self, *, wait: bool = False, timeout: float | None = None) -> None: ...
    def disable(self) -> None: ...
    def enable(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *exc_info: object) -> None: ...
    def __reduce__(self) -> tuple[Callable[[str], Self], tuple[_Phase]]: ...
    @staticmethod
    def _removed(phase: _Phase) -> HookHandle: ...

@final
class Registry:
    def __new__(cls) -> Self: ...
    def list(self, phase: str | None = None) -> list[tuple[int, _Phase, Any, int, bool, int]]: ...
    def clear(self, phase: str | None = None) -> None: ...
    def quiesce(self, timeout: float | None = None) -> None: ...
    def fork(self, copy: Callable[[Any], Any]) -> Registry: ...
    @property
    def traced(
        self,
    ) -> tuple[tuple[tuple[tuple[Callable[..., Any], bool, bool], ...], ...], bool]: ...
    def occupied(self, phase: _Phase) -> bool: ...
    def run_backward_pre(self, module: Any, grad_output: Any) -> Any: ...
    def run_backward(self, module: Any, grad_input: Any, grad_output: Any) -> Any: ...

@disjoint_base
class HookedBase:
    def __new__(cls, *_args: Any, **_kwargs: Any) -> Self: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
    @property
    def _inner(self) -> Any: ...
    @property
    def _registry(self) -> Registry: ...
    def _wrap(self, inner: Any, registry: Registry) -> None: ...
    def _release(self) -> None: ...
    def register_forward_pre_hook(
        self,
        hook: ForwardPreHook[Any] | _PlainForwardPreHook,
        *,
        prepend: bool = False,
        with_kwargs: bool = False,
        priority: int = 0,
        on_error: _OnError = "raise",
    ) -> HookHandle: ...
    def register_forward_hook(
        self,
        hook: ForwardHook[Any, Any] | _PlainForwardHook,
        *,
        prepend: bool = False,
        with_kwargs: bool = False,
        always_call: bool = False,
        priority: int = 0,
        on_error: _OnError = "raise",
    ) -> HookHandle: ...
    def register_full_backward_pre_hook(
        self,
        hook: _PlainBackwardPreHook,
        prepend: bool = False,
        *,
        priority: int = 0,
        on_error: _OnError = "raise",
    ) -> HookHandle: ...
    def register_full_backward_hook(
        self,
        hook: BackwardHook | _PlainBackwardHook,
        prepend: bool = False,
        *,
        priority: int = 0,
        on_error: _OnError = "raise",
    ) -> HookHandle: ...
    def register_backward_hook(
        self,
        hook: BackwardHook | _PlainBackwardHook,
        prepend: bool = False,
        *,
        priority: int = 0,
        on_error: _OnError = "raise",
    ) -> HookHandle: ...

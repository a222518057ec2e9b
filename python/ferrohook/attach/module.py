"""`HookedModule`: a module that carries its hooks."""

from __future__ import annotations

import copy
import inspect
import pickle
import types
from typing import TYPE_CHECKING, Any, ClassVar, Generic, ParamSpec, Protocol, Self, TypeVar, cast

from torch import nn

import ferrohook.attach.checkpointing as _checkpointing  # noqa: F401 (replaces torch's functions)
from ferrohook._core import HookedBase, Registry
from ferrohook.attach.backward import BackwardPass as _BackwardPass  # noqa: F401 (native calls import it)
from ferrohook.attach.classes import is_generated, stays
from ferrohook.attach.hook_info import HookInfo, hooks_of
from ferrohook.attach.swapping import carry
from ferrohook.attach.traced import traced_call as _traced_call  # noqa: F401 (tells torch.compile)
from ferrohook.attach.wrapper import (
    TransparentWrapper,
    class_around,
    combined_class,
    own_names,
    wrapper_class,
)
from ferrohook.errors import HookTypeError
from ferrohook.util.arguments import expect_module

M = TypeVar("M", bound=nn.Module)
P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrohook.attach.swapping import PutOn
    from ferrohook.effects.typed import Phase

    class _Callable(Protocol[P, R_co]):
        @property
        def forward(self) -> Callable[P, R_co]: ...

    class _Wrapper(Protocol[P, R_co]):
        @property
        def inner(self) -> _Callable[P, R_co]: ...

    class _OfModule(Generic[M]):
        pass
else:

    class _OfModule:
        # Not `Generic`: its position among the bases could conflict with that in a module's class.
        __slots__ = ()
        __class_getitem__ = classmethod(types.GenericAlias)


class HookedModule(HookedBase, TransparentWrapper, _OfModule[M]):  # type: ignore[misc]  # our handles, not torch's
    """Wrapper of a module, with hooks on the Rust registry.

    The wrapper shares the module's `__dict__`: parameters, buffers, submodules, `training` and
    every other attribute are the module's, under the same names, read and written through either.
    It is an instance of the module's class too, so methods of that class call the hooked module
    (`generate` of a language model runs the hooks). Methods of `nn.Module` run on the module
    inside. Calling the wrapper runs its hooks around the module, which still runs its own torch
    hooks and torch's global ones.

    If a module has one of the wrapper's names itself (`inner`, `into_inner`, `hooks`,
    `clear_hooks`, `quiesce`), the wrapper is not an instance of its class. Use
    `hooked.inner.<name>` for the module's attribute.

    Follows ferrotorch's `HookedModule`, but runs hooks without a lock.

    Args:
        module: the module to wrap; it is not changed.

    Raises:
        HookTypeError: `module` is not an `nn.Module`.
    """

    __slots__ = ()

    # Target of `nn.Module.__call__`, which methods of the module's class may call by `super()`.
    _call_impl: ClassVar[Any] = HookedBase.__call__
    # `nn.Module.__call__` prefers it, and the shared dict has the one of the module inside.
    _compiled_call_impl: Any = property(lambda _self: None)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        if "forward" in vars(cls) and not is_generated(cls):
            msg = (
                f"{cls.__qualname__}.forward would never run: a HookedModule calls the forward of "
                "the module inside. Register a hook, or override the forward of that module"
            )
            raise HookTypeError(msg)
        super().__init_subclass__(**kwargs)

    if TYPE_CHECKING:  # the arguments of `__init__`, of a subclass's too

        def __new__(cls, *args: Any, **kwargs: Any) -> Self: ...  # noqa: D102

    else:

        def __new__(cls, module: M | None = None, *_args: Any, **_kwargs: Any) -> Self:  # noqa: D102
            return super().__new__(class_around(cls, module))

    def __init__(self, module: M) -> None:
        expect_module(module, "HookedModule needs")
        self._adopt(module, Registry())

    def _adopt(self, module: nn.Module, registry: Registry, *, shares_hooks: bool = False) -> None:
        self._wrap(module, registry, shares_hooks)
        self._share(module)

    @property
    def inner(self) -> M:
        """The wrapped module.

        Raises:
            HookError: `into_inner` released it.
        """
        return cast("M", self._inner)

    def into_inner(self) -> M:
        """Releases the wrapped module and removes every hook.

        Later calls of the wrapper, and registering with it, raise `HookError`.

        Returns:
            The module, without the wrapper's hooks; its own torch hooks stay.
        """
        module = self.inner
        HookedBase._release(self)
        self._share(None)
        return module

    def hooks(self, phase: Phase | None = None) -> list[HookInfo]:
        """Lists the registered hooks, in firing order.

        Args:
            phase: one of `forward_pre`, `forward`, `backward_pre`, `backward`; None for all.

        Raises:
            ValueError: an unknown phase.
        """
        return hooks_of(self._registry, phase)

    def clear_hooks(self, phase: Phase | None = None) -> None:
        """Removes the hooks of one phase or of all, also hooks of scopes; torch's own stay.

        Args:
            phase: one of `forward_pre`, `forward`, `backward_pre`, `backward`; None for all.

        Raises:
            ValueError: an unknown phase.
        """
        self._registry.clear(phase)

    def quiesce(self, timeout: float | None = None) -> None:
        """Waits until no thread is inside any of the hooks, removed ones included.

        Args:
            timeout: seconds to wait at most; None for no limit.

        Raises:
            HookError: called from inside one of the hooks.
            TimeoutError: a thread was still inside a hook.
        """
        self._registry.quiesce(timeout)

    if TYPE_CHECKING:

        def __call__(  # noqa: D102 (native at run time; these are the module's types)
            self: _Wrapper[P, R_co], *args: P.args, **kwargs: P.kwargs
        ) -> R_co: ...

    def extra_repr(self) -> str:
        """Counts the hooks of each phase, for the repr."""
        counts: dict[str, int] = {}
        for hook in HookedModule.hooks(self):  # `self.hooks` may be the module's own
            counts[hook.phase] = counts.get(hook.phase, 0) + 1
        return ", ".join(f"{phase}={count}" for phase, count in counts.items())

    def __repr__(self) -> str:
        return self._shown("HookedModule", "hooks", self.extra_repr())

    def _get_name(self) -> str:
        # Notes on exceptions show this name.
        name: str = self._inner._get_name()
        return f"HookedModule({name})"

    def __copy__(self) -> HookedModule[M]:
        # Shares the hooks, as a shallow copy of a plain module shares its hook dicts.
        return self._around(copy.copy(self.inner), shares_hooks=True)

    def _around(self, module: nn.Module, *, shares_hooks: bool = False) -> HookedModule[M]:
        cls = class_around(cast("type[TransparentWrapper]", wrapper_class(self)), module)
        wrapper = HookedBase.__new__(cast("type[HookedModule[M]]", cls))
        wrapper._adopt(module, self._registry, shares_hooks=shares_hooks)
        return wrapper

    def __deepcopy__(self, memo: dict[int, Any]) -> HookedModule[M]:
        duplicate = HookedBase.__new__(type(self))
        # Registered before the module is copied, as it may refer to the wrapper.
        memo[id(self)] = duplicate
        inner = copy.deepcopy(self.inner, memo)
        duplicate._adopt(inner, self._registry.fork(lambda hook: copy.deepcopy(hook, memo)))
        return duplicate

    def __reduce_ex__(self, _protocol: Any) -> tuple[Any, ...]:
        # Hooks are run-time state and are not saved.
        cls = wrapper_class(self)
        try:
            inspect.signature(cls).bind(self.inner)
        except TypeError as error:
            msg = (
                f"{cls.__qualname__} cannot be unpickled by its __init__, which gets only the "
                f"module: {error}. Give other arguments a default, or define __reduce_ex__"
            )
            raise pickle.PicklingError(msg) from None
        made_from = getattr(type(self), "_made_from", (cls,))
        if not all(map(stays, made_from)):  # the class of a GraphModule is made as it is loaded
            return _unpickled, (cls, self.inner)
        # The module is the state, not an argument: it may refer to the wrapper.
        return _empty, made_from, self.inner, None, None, _fill

    def _replicate_for_data_parallel(self) -> HookedModule[M]:
        # The replicas share the hooks, as they share PyTorch's hook dicts.
        replica = cast("Any", self.inner)._replicate_for_data_parallel()
        return self._around(replica, shares_hooks=True)


HookedModule._own_names = own_names(HookedModule)


def _unpickled(cls: type[HookedModule[Any]], module: nn.Module) -> HookedModule[Any]:
    wrapper = cls.__new__(cls, module)
    _fill(wrapper, module)
    return wrapper


def _empty(cls: type[TransparentWrapper], *plain: type) -> Any:
    """Makes a wrapper that wraps no module yet."""
    made: Any = combined_class(cls, *plain) if plain else cls
    return HookedBase.__new__(made)


def _fill(wrapper: HookedModule[Any], module: nn.Module) -> None:
    """Wraps a module; attributes stay as pickled, whatever `__init__` of a subclass sets."""
    attributes = {**module.__dict__}
    type(wrapper).__init__(wrapper, module)
    module.__dict__.update(attributes)


@carry
def _unwrap(module: nn.Module) -> tuple[nn.Module, PutOn]:
    """Wraps the replacement of a wrapped module, with the same hooks."""
    if not issubclass(type(module), HookedModule):
        return module, lambda module: module
    hooked = cast("HookedModule[Any]", module)
    inner = hooked.inner
    return inner, lambda module: hooked if module is inner else hooked._around(module)

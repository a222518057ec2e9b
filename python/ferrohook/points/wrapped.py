"""`HookedRootModule.wrap`: hook points on the modules of an existing model."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeAlias

from ferrohook._core import Attachment
from ferrohook.activations import map_tensors, tensors_in
from ferrohook.errors import HookError
from ferrohook.groups import HandleGroup
from ferrohook.instrumentation import attach, find_registry, registry_of
from ferrohook.module import _delegate, _indent
from ferrohook.points.hook_point import HookPoint
from ferrohook.points.root import HookedRootModule
from ferrohook.selection import select

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from ferrohook.selection import Selector

Points: TypeAlias = "dict[tuple[str, str], HookPoint]"
"""Hook points by the name of their module, and which of the two they are."""


class _At:
    """What is registered with a module, for its tensor to go through a hook point."""

    phase: str
    __call__: Callable[..., Any]

    def __init__(self, point: HookPoint) -> None:
        self.point = point

    def through(self, value: Any) -> Any:
        """The value with its first tensor replaced; None where that stays."""
        first = next(tensors_in(value), None)
        if first is None:
            return None
        new = self.point(first)
        if new is first:
            return None

        def convert(tensor: Tensor) -> Any:
            return new if tensor is first else tensor

        return map_tensors(convert, value)


class _AtInput(_At):
    phase = "forward_pre"

    def __call__(self, _module: Any, args: Any, kwargs: Any) -> Any:
        return self.through((args, kwargs))


class _AtOutput(_At):
    phase = "forward"

    def __call__(self, _module: Any, _args: Any, _kwargs: Any, output: Any) -> Any:
        return self.through(output)


_KINDS: dict[str, type[_At]] = {"hook_in": _AtInput, "hook_out": _AtOutput}


def wrap(
    model: nn.Module, points: Mapping[Any, str | Iterable[str]] | Selector
) -> WrappedRootModule:
    """See `HookedRootModule.wrap`."""
    wanted = points if isinstance(points, Mapping) else {None: tuple(_KINDS)}
    made: Points = {}
    for what, kinds in wanted.items():
        selector = what if isinstance(points, Mapping) else points
        for name, module in select(model, selector).items():
            if isinstance(module, HookPoint):
                continue  # it is one
            for kind in _check_kinds(kinds):
                made.setdefault((name, kind), HookPoint())
    return WrappedRootModule(model, made)


def _check_kinds(kinds: str | Iterable[str]) -> list[str]:
    listed = [kinds] if isinstance(kinds, str) or not isinstance(kinds, Iterable) else list(kinds)
    for kind in listed:
        if kind not in _KINDS:
            msg = f"a module gets the hook points 'hook_in', 'hook_out' or both, got {kind!r}"
            raise ValueError(msg)
    return listed


class WrappedRootModule(HookedRootModule):
    """What `HookedRootModule.wrap` returns.

    It shares the model's `__dict__`, as a `HookedModule` does: all but the methods of
    `HookedRootModule` is the model's.
    """

    # Not in the `__dict__`, which is the model's.
    __slots__ = ("_attached", "_made", "_model", "hook_dict", "mod_dict")

    _model: nn.Module | None
    _made: Points
    _attached: HandleGroup

    def __init__(self, model: nn.Module, points: Points) -> None:
        modules = {"": model} | {name: model.get_submodule(name) for name, _ in points}
        attached = HandleGroup(model)
        try:
            attach(modules, attached.attachment)
            self._adopt(model, points, attached)
            for (name, kind), point in points.items():
                hook = _KINDS[kind](point)
                module = {_joined(name, kind): modules[name]}
                attached._register(module, hook.phase, hook, with_kwargs=True)
        except BaseException:
            attached.remove()
            raise

    def _adopt(self, model: nn.Module, points: Points, attached: HandleGroup) -> None:
        object.__setattr__(self, "__dict__", model.__dict__)
        self._model, self._made, self._attached = model, points, attached
        self.setup()

    # What is instrumented is the model, whose `__dict__` has the registry.
    _calls_inner = True

    if not TYPE_CHECKING:  # for checkers that of nn.Module

        def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: D102 (that of nn.Module)
            return self.inner(*args, **kwargs)

    @property
    def inner(self) -> nn.Module:
        """The model.

        Raises:
            HookError: it was given back by `into_inner`.
        """
        if self._model is None:
            msg = "this model was given back by into_inner: wrap it again"
            raise HookError(msg)
        return self._model

    def into_inner(self) -> nn.Module:
        """Gives the model back as it was; using this one raises `HookError` after that."""
        model = self.inner
        self._attached.remove()
        self._model = None
        object.__setattr__(self, "__dict__", {})
        del self.hook_dict, self.mod_dict
        return model

    def setup(self) -> None:
        """Finds the model's modules anew, with the hook points that it has itself."""
        modules = {name: module for name, module in self.inner.named_modules() if name}
        points = {name: it for name, it in modules.items() if isinstance(it, HookPoint)}
        for (name, kind), point in self._made.items():
            point.name = _joined(name, kind)
            if point.name in modules:
                msg = f"cannot make the hook point {point.name!r}: the model has a module there"
                raise HookError(msg)
            points[point.name] = point
        self.mod_dict, self.hook_dict = modules | points, points

    def __getattr__(self, name: str) -> Any:
        # Reached when neither the shared __dict__ nor nn.Module knows the name.
        return getattr(self.inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in WrappedRootModule.__slots__:
            object.__setattr__(self, name, value)
        else:
            setattr(self.inner, name, value)

    def __delattr__(self, name: str) -> None:
        if name in WrappedRootModule.__slots__:
            object.__delattr__(self, name)
        else:
            delattr(self.inner, name)

    def __dir__(self) -> list[str]:
        return sorted({*dir(type(self)), *dir(self.inner)})

    def __repr__(self) -> str:
        if self._model is None:
            return "HookedRootModule(<given back>)"
        points = ", ".join(_joined(*key) for key in self._made) or "none"
        return (
            f"HookedRootModule(\n  (inner): {_indent(repr(self._model))}\n  (points): {points}\n)"
        )

    def __reduce_ex__(self, _protocol: Any) -> tuple[Any, ...]:
        # Hooks are run-time state and are not saved.
        return type(self), (self.inner, self._made)

    def __copy__(self) -> Self:
        copied = type(self).__new__(type(self))
        copied._adopt(self.inner, self._made, self._attached)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = memo[id(self)] = type(self).__new__(type(self))
        # With what is registered with its modules, which comes to the copied points.
        model = copy.deepcopy(self.inner, memo)
        points: Points = copy.deepcopy(self._made, memo)
        modules = {"": model} | {name: model.get_submodule(name) for name, _ in points}
        # Without hooks it was copied as what it was.
        bare = {name: module for name, module in modules.items() if find_registry(module) is None}
        attach(bare, Attachment())
        names = {id(point): _joined(*key) for key, point in points.items()}
        handles = {
            names[id(hook.point)]: handle
            for module in modules.values()
            for hook, handle in registry_of(module).handles()
            if isinstance(hook, _At) and id(hook.point) in names
        }
        attached = HandleGroup(model)
        attached._adopt(modules.values(), handles)
        copied._adopt(model, points, attached)
        return copied

    def _replicate_for_data_parallel(self) -> NoReturn:
        msg = "wrap the model inside DataParallel's replicas: put DataParallel around the model"
        raise HookError(msg)


# Those of nn.Module, which the model's class may have its own of.
for _name in [name for name, value in vars(HookedRootModule.__base__).items() if callable(value)]:
    _own = {"modules", "named_modules", "_call_impl", "_wrapped_call_impl"}
    if not (_name.startswith("__") or _name in _own | {*vars(WrappedRootModule)}):
        setattr(WrappedRootModule, _name, _delegate(_name))


def _joined(name: str, kind: str) -> str:
    return f"{name}.{kind}" if name else kind

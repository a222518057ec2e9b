"""`HookedRootModule.wrap`: hook points on the modules of an existing model."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeAlias

from ferrohook._core import Attachment
from ferrohook.attach.hook_info import find_registry
from ferrohook.attach.instrument import attach, registry_of
from ferrohook.attach.wrapper import TransparentWrapper, wrapper_class
from ferrohook.compat.transformer_lens.hook_point import HookPoint
from ferrohook.errors import HookError
from ferrohook.names.select import select
from ferrohook.registration.register import HandleGroup, add_hooks
from ferrohook.util.tensors import map_tensors, tensors_in

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ferrohook.effects.typed import Phase
    from ferrohook.names.select import Selector

Points: TypeAlias = "dict[tuple[str, str], HookPoint]"
"""Hook points by module name and kind (`hook_in` or `hook_out`)."""


class _PointHook:
    """A hook on a module that passes a tensor of its input or output through a hook point."""

    def __init__(self, point: HookPoint) -> None:
        self.point = point

    def __call__(self, _module: Any, args: Any, kwargs: Any, *output: Any) -> Any:
        """Calls the point with the first tensor; returns the changed value or None."""
        value = output[0] if output else (args, kwargs)
        first = next(tensors_in(value), None)
        if first is None:
            return None
        new = self.point(first)
        if new is first:
            return None

        pending = [new]  # another place may have the same tensor, such as in attn(x, x, x)

        def convert(tensor: Tensor) -> Any:
            return pending.pop() if pending else tensor

        return map_tensors(convert, value)


_KINDS: dict[str, Phase] = {"hook_in": "forward_pre", "hook_out": "forward"}


def make_points(model: nn.Module, points: Mapping[Any, str | Iterable[str]] | Selector) -> Points:
    """Creates the hook points for modules of a model, see `HookedRootModule.wrap`."""
    wanted = points if isinstance(points, Mapping) else {None: tuple(_KINDS)}
    created: Points = {}
    for key, kinds in wanted.items():
        selector = key if isinstance(points, Mapping) else points
        for name, module in select(model, selector, called=True).items():
            if isinstance(module, HookPoint):
                continue  # already one
            for kind in _check_kinds(kinds):
                created.setdefault((name, kind), HookPoint())
    return created


def _check_kinds(kinds: str | Iterable[str]) -> list[str]:
    listed = [kinds] if isinstance(kinds, str) or not isinstance(kinds, Iterable) else list(kinds)
    for kind in listed:
        if kind not in _KINDS:
            msg = f"the hook points of a module must be 'hook_in', 'hook_out' or both, got {kind!r}"
            raise ValueError(msg)
    return listed


class WrappedModel(TransparentWrapper):
    """A wrapper around a model, with hook points that hooks on its modules call.

    The model is instrumented, the wrapper never: they share the `__dict__` with the registry.
    """

    # Slots: the `__dict__` is the model's.
    __slots__ = ("_attached", "_created_points", "_model", "hook_dict", "mod_dict")
    _own_slots = __slots__

    _model: nn.Module | None
    _created_points: Points
    mod_dict: dict[str, nn.Module]
    hook_dict: dict[str, HookPoint]
    _attached: HandleGroup

    def __init__(self, model: nn.Module, points: Points) -> None:
        modules = {"": model} | {name: model.get_submodule(name) for name, _ in points}
        attached = HandleGroup(model)
        try:
            attach(modules, attached.attachment)
            self._adopt(model, points, attached)
            for (name, kind), point in points.items():
                module = {_joined(name, kind): modules[name]}
                add_hooks(attached, module, _KINDS[kind], _PointHook(point), with_kwargs=True)
        except BaseException:
            attached.remove()
            raise

    def _adopt(self, model: nn.Module, points: Points, attached: HandleGroup) -> None:
        self._share(model)
        self._model, self._created_points, self._attached = model, points, attached
        self.setup()

    if not TYPE_CHECKING:  # type checkers use nn.Module's

        def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: D102 (nn.Module's)
            return self.inner(*args, **kwargs)

    @property
    def inner(self) -> nn.Module:
        """The model.

        Raises:
            HookError: `into_inner` was called.
        """
        if self._model is None:
            msg = "into_inner() already returned this model: wrap it again"
            raise HookError(msg)
        return self._model

    def into_inner(self) -> nn.Module:
        """Restores and returns the model; later use of the wrapper raises `HookError`."""
        model = self.inner
        self._attached.remove()
        self._model = None
        self._share(None)
        del self.hook_dict, self.mod_dict
        return model

    def setup(self) -> None:
        """Refreshes `mod_dict` and `hook_dict`, hook points of the model itself included."""
        modules = {name: module for name, module in self.inner.named_modules() if name}
        points = {name: it for name, it in modules.items() if isinstance(it, HookPoint)}
        for (name, kind), point in self._created_points.items():
            point.name = _joined(name, kind)
            if point.name in modules:
                msg = (
                    f"cannot create the hook point {point.name!r}: the model already has a module "
                    "with this name"
                )
                raise HookError(msg)
            points[point.name] = point
        self.mod_dict, self.hook_dict = modules | points, points

    def __repr__(self) -> str:
        return self._shown(
            "HookedRootModule", "points", ", ".join(_joined(*key) for key in self._created_points)
        )

    def __reduce_ex__(self, _protocol: Any) -> tuple[Any, ...]:
        # Hooks are run-time state and are not saved.
        return wrapper_class(self), (self.inner, self._created_points)

    def __copy__(self) -> Self:
        copied = type(self).__new__(type(self))
        copied._adopt(self.inner, self._created_points, self._attached)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = memo[id(self)] = type(self).__new__(type(self))
        # Copies the hooks on its modules too, which then call the copied points.
        model = copy.deepcopy(self.inner, memo)
        points: Points = copy.deepcopy(self._created_points, memo)
        modules = {"": model} | {name: model.get_submodule(name) for name, _ in points}
        # A model without hooks is copied uninstrumented.
        bare = {name: module for name, module in modules.items() if find_registry(module) is None}
        attach(bare, Attachment())
        names = {id(point): _joined(*key) for key, point in points.items()}
        handles = {
            names[id(hook.point)]: handle
            for module in modules.values()
            for hook, handle, _place in registry_of(module).global_hooks()
            if isinstance(hook, _PointHook) and id(hook.point) in names
        }
        attached = HandleGroup(model)
        attached._adopt(modules.values(), handles)
        copied._adopt(model, points, attached)
        return copied

    def _replicate_for_data_parallel(self) -> NoReturn:
        msg = (
            "DataParallel cannot replicate a wrapped model: put DataParallel around the plain "
            "model, and wrap the model inside its replicas"
        )
        raise HookError(msg)


def _joined(name: str, kind: str) -> str:
    return f"{name}.{kind}" if name else kind

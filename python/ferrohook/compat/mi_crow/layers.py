"""`Layers`: addresses a model's layers by name or index and registers hook objects on them."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from ferrohook import Intervention, register
from ferrohook.compat.mi_crow.controllers import Controller, InterventionController
from ferrohook.compat.mi_crow.detectors import Detector
from ferrohook.compat.mi_crow.hooks import Hook, HookType, check_signature
from ferrohook.errors import HookError, HookTypeError, SelectionError
from ferrohook.util.arguments import describe, expect_module
from ferrohook.util.suggestions import MOST_SUGGESTIONS, closest_to
from ferrohook.util.texts import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from ferrohook import Scope
    from ferrohook.typing import HandleGroup, OnError

# Shared by all `Layers`: a hook is on at most one layer.
_LOCK = threading.RLock()


class _Registered(NamedTuple):
    hook: Hook
    module: nn.Module
    group: HandleGroup
    options: dict[str, Any]
    scope: Scope | None


class Layers:
    """The layers of a model, and the detectors and controllers on them.

    A layer is a submodule, named by its path (`encoder.layer.0.output`), by mi_crow's flat name
    (`bertmodel_encoder_layer_0_output`) or by its index in `get_layer_names()`; the path of the
    model itself is `""`. Each method looks the names up again, so layers may be added and replaced.

    Modules are instrumented while a hook is registered on them. Hooks outlive the `Layers`. A copy
    has a copy of the model; a pickle includes the hooks that can be pickled, except scoped ones.

    Args:
        model: any module.

    Raises:
        HookTypeError: `model` is no `nn.Module`.
    """

    def __init__(self, model: nn.Module) -> None:
        expect_module(model, "Layers needs")
        self.model = model
        self._hooks: dict[str, _Registered] = {}

    def register_hook(  # noqa: PLR0913 (the last three by keyword)
        self,
        layer_signature: str | int,
        hook: Hook | Intervention,
        hook_type: HookType | str | None = None,
        *,
        priority: int | None = None,
        on_error: OnError = "raise",
        scope: Scope | None = None,
    ) -> str:
        """Registers a hook on a layer.

        By default controllers have priority 0, as all other hooks, and detectors run after them, so
        they see the result. Hooks of one priority run in registration order.

        Args:
            layer_signature: name or index of the layer.
            hook: a detector or controller that is registered nowhere else; or an intervention, for
                a new `InterventionController`.
            hook_type: new `hook_type` of the hook; None leaves it.
            priority: higher runs first; None for the default of its kind.
            on_error: handling of the hook's exceptions: `raise`, `disable` or `ignore`.
            scope: fire only in the contexts that entered this scope, until it is left; None for
                calls in every context.

        Returns:
            The hook's id.

        Raises:
            SelectionError: the model has no such layer, or several; or it is a container, which is
                never called.
            HookError: the hook, or one of its id, is registered; or the module cannot be
                instrumented, or the scope was left.
            HookTypeError: an argument has the wrong type.
            ValueError: an unknown `hook_type` or `on_error`, or one that the hook cannot have.
        """
        if isinstance(hook, Intervention):
            hook = InterventionController(layer_signature, hook)
        if not isinstance(hook, Hook):
            msg = (
                f"hook must be a Detector or a Controller, got {describe(hook)}: register other "
                "hooks with ferrohook.register(model, layer, hook)"
            )
            raise HookTypeError(msg)
        path, module = self._find(layer_signature)
        kind = hook.hook_type if hook_type is None else hook._validated(hook_type)
        callback, with_kwargs = hook._for_registry(kind)
        options: dict[str, Any] = {
            "priority": hook._priority if priority is None else priority,
            "on_error": on_error,
        }
        with _LOCK:
            if hook._registered:
                msg = f"{hook} is already registered: unregister it first, or create a new one"
                raise HookError(msg)
            if hook.id in self._hooks and self._hooks[hook.id].hook is not hook:
                msg = (
                    f"the id {hook.id!r} is already used by {self._hooks[hook.id].hook}: pass a "
                    "different one"
                )
                raise HookError(msg)
            if hook._layers is not None:  # its handle was removed without its `Layers`
                hook._layers.unregister_hook(hook)
            group = register(
                self.model,
                module,
                callback,
                phase=kind.phase,
                with_kwargs=with_kwargs,
                scope="global" if scope is None else scope,
                **options,
            )
            try:
                if not hook._enabled:
                    group.disable()
                (hook._handle,) = group
                hook.layer_signature, hook._hook_type = layer_signature, kind
                hook._layer, hook._layers = path, self
                self._hooks[hook.id] = _Registered(hook, module, group, options, scope)
            except BaseException:
                group.remove()
                raise
        return hook.id

    def unregister_hook(self, hook_or_id: Hook | str) -> bool:
        """Removes a hook, and restores a module that was instrumented for it.

        Returns:
            True if it was registered here.
        """
        with _LOCK:
            registered = self._hooks.get(_id(hook_or_id))
            if registered is None:
                return False
            hook = registered.hook
            if isinstance(hook_or_id, Hook) and hook_or_id is not hook:
                return False  # a copy, which has the same id
            hook._enabled = hook.enabled
            # First: if Ctrl-C interrupts the rest, the next call completes it.
            registered.group.remove()
            hook._handle = hook._layer = hook._layers = None
            del self._hooks[hook.id]
        return True

    def get_hooks(
        self,
        layer_signature: str | int | None = None,
        hook_type: HookType | str | None = None,
    ) -> list[Hook]:
        """Lists the hooks that are registered here, in registration order.

        Args:
            layer_signature: only hooks of this layer, by any of its names; None for all.
            hook_type: only hooks of this type; None for all.

        Raises:
            SelectionError: the model has no such layer, or several.
            HookTypeError: an argument has the wrong type.
            ValueError: an unknown `hook_type`.
        """
        module = None if layer_signature is None else self._find(layer_signature)[1]
        kind = None if hook_type is None else Hook._validated(hook_type)
        return [
            each.hook
            for each in list(self._hooks.values())
            if module in (None, each.module) and kind in (None, each.hook.hook_type)
        ]

    def get_detectors(self) -> list[Detector]:
        """Lists the detectors that are registered here."""
        return [hook for hook in self.get_hooks() if isinstance(hook, Detector)]

    def get_controllers(self) -> list[Controller]:
        """Lists the controllers that are registered here."""
        return [hook for hook in self.get_hooks() if isinstance(hook, Controller)]

    def enable_hook(self, hook_id: str) -> bool:
        """Lets calls run a hook again.

        Returns:
            True if it is registered here.
        """
        return self._switch(hook_id, Hook.enable)

    def disable_hook(self, hook_id: str) -> bool:
        """Lets calls skip a hook, at no cost.

        Returns:
            True if it is registered here.
        """
        return self._switch(hook_id, Hook.disable)

    def _switch(self, hook_id: str, switch: Callable[[Hook], None]) -> bool:
        registered = self._hooks.get(_id(hook_id))
        if registered is not None:
            switch(registered.hook)
        return registered is not None

    def enable_all_hooks(self) -> None:
        """Lets calls run all hooks again."""
        for hook in self.get_hooks():
            hook.enable()

    def disable_all_hooks(self) -> None:
        """Lets calls skip all hooks, at no cost."""
        for hook in self.get_hooks():
            hook.disable()

    def get_layer_names(self) -> list[str]:
        """Lists the paths of all layers, in the order of their indices."""
        return [path for path, _ in self._walk()]

    def print_layer_names(self) -> None:
        """Prints the path of each layer with the shape of its weight."""
        for path, module in self._walk():
            shape = getattr(getattr(module, "weight", None), "shape", "no weight")
            print(f"{path}: {shape}")  # noqa: T201 (its purpose)

    def _walk(self) -> Iterator[tuple[str, nn.Module]]:
        """Yields every path below the model in mi_crow's order, shared modules repeated."""

        def below(module: nn.Module, prefix: str, above: frozenset[int]) -> Any:
            for name, child in list(module.named_children()):
                yield prefix + name, child
                if id(child) not in above:  # a module may contain itself
                    yield from below(child, f"{prefix}{name}.", above | {id(child)})

        yield from below(self.model, "", frozenset({id(self.model)}))

    def _find(self, layer_signature: str | int) -> tuple[str, nn.Module]:
        check_signature(layer_signature)
        layers = list(self._walk())
        model = type(self.model).__name__
        if isinstance(layer_signature, int):
            if 0 <= layer_signature < len(layers):
                return layers[layer_signature]
            msg = f"{model} has {len(layers)} layers, numbered from 0, got {layer_signature}"
            raise SelectionError(msg)
        places = {"": self.model, **dict(layers)}
        if layer_signature in places:
            return layer_signature, places[layer_signature]
        flat = {path: _flat(self.model, path) for path in places}
        found = [path for path, name in flat.items() if name == layer_signature]
        if len(found) == 1:
            return found[0], places[found[0]]
        if found:
            msg = (
                f"{layer_signature!r} matches {len(found)} layers of {model}: use one of "
                f"{_listed(found)}"
            )
            raise SelectionError(msg)
        names = closest_to(layer_signature, [*places, *flat.values()])
        if names:
            msg = f"{model} has no layer {layer_signature!r}; the closest are {_listed(names)}"
        else:
            first = _listed([*places][:MOST_SUGGESTIONS])
            msg = f"{model} has no layer {layer_signature!r}; the first are {first}"
        raise SelectionError(msg)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # The model's copy includes copies of the hooks.
        return type(self)(copy.deepcopy(self.model, memo))

    def __reduce__(self) -> Any:
        hooks = [
            (each.hook.layer, each.hook, each.options)
            for each in list(self._hooks.values())
            if each.hook._registered and each.scope is None and _can_be_pickled(each.hook)
        ]
        return _restored, (type(self), self.model, hooks)

    def __repr__(self) -> str:
        return f"<Layers of {type(self.model).__name__}, {counted(len(self._hooks), 'hook')}>"


def _restored(cls: type[Layers], model: nn.Module, hooks: list[Any]) -> Layers:
    layers = cls(model)
    for path, hook, options in hooks:
        layers.register_hook(path, hook, **options)
    return layers


def _can_be_pickled(hook: Hook) -> bool:
    try:
        pickle.dumps(hook)
    except Exception:  # noqa: BLE001 (a class's own `__reduce__` may raise anything)
        return False
    return True


def _id(hook_or_id: Hook | str) -> str:
    if isinstance(hook_or_id, Hook):
        return hook_or_id.id
    if isinstance(hook_or_id, str):
        return hook_or_id
    msg = f"expected a hook, or its id as a str, got {describe(hook_or_id)}"
    raise HookTypeError(msg)


def _listed(names: list[str]) -> str:
    return ", ".join(map(repr, names))


def _flat(model: nn.Module, path: str) -> str:
    """mi_crow's flat name of a layer."""
    name = model.__class__.__name__.lower()
    return f"{name}_{path}".replace(".", "_") if path else name

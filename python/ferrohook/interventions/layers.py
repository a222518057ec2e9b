"""`Layers`: the layers of a model by name or index, and the hooks on them."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from ferrohook._core import Attachment, NativeDetector, TypedHook
from ferrohook.arguments import describe, expect_module
from ferrohook.errors import HookError, HookTypeError, SelectionError
from ferrohook.instrumentation import attach
from ferrohook.interventions.controllers import Controller
from ferrohook.interventions.detectors import Detector
from ferrohook.interventions.hooks import Hook, HookType, check_signature
from ferrohook.suggestions import MOST_SUGGESTIONS, closest_to

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from ferrohook.scopes import Scope

# One thread at a time registers: a hook is on one layer, whichever `Layers` are asked.
_LOCK = threading.RLock()


class _Registered(NamedTuple):
    hook: Hook
    module: nn.Module
    attachment: Attachment
    options: dict[str, Any]


class Layers:
    """The layers of a model, and the detectors and controllers on them.

    A layer is one of the modules below the model, named by its path (`encoder.layer.0.output`),
    by mi_crow's flat name (`bertmodel_encoder_layer_0_output`) or by its index in
    `get_layer_names()`; the path of the model itself is `""`. They are looked up when they are
    asked for, so that layers may be added and replaced.

    Modules are instrumented for as long as a hook is registered on them. Hooks outlast the
    `Layers`. A copy of it is one of a copy of the model; pickled, it takes the hooks along that
    can be pickled.

    Args:
        model: any module.

    Raises:
        HookTypeError: `model` is no `nn.Module`.
    """

    def __init__(self, model: nn.Module) -> None:
        expect_module(model, "Layers takes")
        self.model = model
        self._hooks: dict[str, _Registered] = {}

    def register_hook(
        self,
        layer_signature: str | int,
        hook: Hook,
        hook_type: HookType | str | None = None,
        *,
        priority: int | None = None,
        on_error: str = "raise",
    ) -> str:
        """Registers a hook on a layer.

        Where nobody gives a priority, that of controllers is 0, as that of all other hooks, and
        detectors run behind them: they see what flows on. Of the same priority, hooks run in the
        order in which they were registered.

        Args:
            layer_signature: the name or the index of the layer.
            hook: a detector or a controller that is registered nowhere else.
            hook_type: what the hook's `hook_type` becomes; None for what it is.
            priority: higher runs first; None for that of its kind.
            on_error: what a call does about the hook's exception: `raise`, `disable` or `ignore`.

        Returns:
            The hook's id.

        Raises:
            SelectionError: the model has no such layer, or several.
            HookError: the hook, or one of its id, is registered; or the module cannot be
                instrumented.
            HookTypeError: an argument of the wrong type.
            ValueError: an unknown `hook_type` or `on_error`, or one that the hook cannot have.
        """
        return self._register(
            layer_signature, hook, hook_type, priority=priority, on_error=on_error
        )

    def _register(  # noqa: PLR0913 (those of `register_hook`, and one)
        self,
        layer_signature: str | int,
        hook: Hook,
        hook_type: HookType | str | None = None,
        *,
        priority: int | None = None,
        on_error: str = "raise",
        scope: Scope | None = None,
    ) -> str:
        """The same; `scope` is the one in which alone it fires, and until when."""
        if not isinstance(hook, Hook):
            msg = f"hook is a Detector or a Controller, got {describe(hook)}"
            if isinstance(hook, NativeDetector | TypedHook) or (
                callable(hook) and not isinstance(hook, type)
            ):
                msg += "; that is for ferrohook.register(model, layer, hook)"
            raise HookTypeError(msg)
        path, module = self._find(layer_signature)
        kind = hook.hook_type if hook_type is None else hook._checked(hook_type)
        before = kind is HookType.PRE_FORWARD
        options: dict[str, Any] = {
            "priority": hook._priority if priority is None else priority,
            "on_error": on_error,
        }
        with _LOCK:
            if hook._registered:
                msg = f"{hook} is registered: unregister it first, or make another"
                raise HookError(msg)
            if hook.id in self._hooks and self._hooks[hook.id].hook is not hook:
                msg = f"the id {hook.id!r} is that of {self._hooks[hook.id].hook}: give another"
                raise HookError(msg)
            if hook._layers is not None:  # where its handle was removed by others
                hook._layers.unregister_hook(hook)
            attachment = Attachment()
            if scope is not None:
                attachment.release_with(scope)
            try:
                attach({path: module}, attachment)
                (handle,) = attachment.register(
                    [module],
                    kind.phase,
                    hook._before if before else hook._after,
                    with_kwargs=before,
                    scope=scope,
                    **options,
                )
                if not hook._enabled:
                    handle.disable()
                hook.layer_signature, hook._hook_type = layer_signature, kind
                hook._handle, hook._layer, hook._layers = handle, path, self
                self._hooks[hook.id] = _Registered(hook, module, attachment, options)
            except BaseException:
                attachment.release()
                raise
        return hook.id

    def unregister_hook(self, hook_or_id: Hook | str) -> bool:
        """Removes a hook; a module that was instrumented for it is given back.

        Returns:
            Whether it was registered here.
        """
        with _LOCK:
            registered = self._hooks.get(_id(hook_or_id))
            if registered is None:
                return False
            hook = registered.hook
            hook._enabled = hook.enabled
            # Ahead of what can be interrupted, and is then done the next time.
            registered.attachment.release()
            hook._handle = hook._layer = hook._layers = None
            del self._hooks[hook.id]
        return True

    def get_hooks(
        self,
        layer_signature: str | int | None = None,
        hook_type: HookType | str | None = None,
    ) -> list[Hook]:
        """The hooks that are registered here, in the order in which they were.

        Args:
            layer_signature: those of one layer, by any of its names; None for all.
            hook_type: those of one type; None for all.

        Raises:
            SelectionError: the model has no such layer, or several.
            HookTypeError: an argument of the wrong type.
            ValueError: an unknown `hook_type`.
        """
        module = None if layer_signature is None else self._find(layer_signature)[1]
        kind = None if hook_type is None else Hook._checked(hook_type)
        return [
            each.hook
            for each in list(self._hooks.values())
            if module in (None, each.module) and kind in (None, each.hook.hook_type)
        ]

    def get_detectors(self) -> list[Detector]:
        """The hooks that are detectors."""
        return [hook for hook in self.get_hooks() if isinstance(hook, Detector)]

    def get_controllers(self) -> list[Controller]:
        """The hooks that are controllers."""
        return [hook for hook in self.get_hooks() if isinstance(hook, Controller)]

    def enable_hook(self, hook_id: str) -> bool:
        """Lets a hook run again.

        Returns:
            Whether it is registered here.
        """
        registered = self._hooks.get(_id(hook_id))
        if registered is not None:
            registered.hook.enable()
        return registered is not None

    def disable_hook(self, hook_id: str) -> bool:
        """Has calls skip a hook, at no cost.

        Returns:
            Whether it is registered here.
        """
        registered = self._hooks.get(_id(hook_id))
        if registered is not None:
            registered.hook.disable()
        return registered is not None

    def enable_all_hooks(self) -> None:
        """Lets all hooks run again."""
        for hook in self.get_hooks():
            hook.enable()

    def disable_all_hooks(self) -> None:
        """Has calls skip all hooks, at no cost."""
        for hook in self.get_hooks():
            hook.disable()

    def get_layer_names(self) -> list[str]:
        """The paths of all layers; the place of one in it is its index."""
        return [path for path, _ in self._walk()]

    def print_layer_names(self) -> None:
        """Prints the path of each layer with the shape of its weight."""
        for path, module in self._walk():
            shape = getattr(getattr(module, "weight", None), "shape", "no weight")
            print(f"{path}: {shape}")  # noqa: T201 (what it is for)

    def _walk(self) -> Iterator[tuple[str, nn.Module]]:
        """Every place of every module below the model, as mi_crow counts them."""

        def below(module: nn.Module, prefix: str, above: frozenset[int]) -> Any:
            for name, child in list(module.named_children()):
                yield prefix + name, child
                if id(child) not in above:  # a module may be inside itself
                    yield from below(child, f"{prefix}{name}.", above | {id(child)})

        yield from below(self.model, "", frozenset({id(self.model)}))

    def _find(self, layer_signature: str | int) -> tuple[str, nn.Module]:
        check_signature(layer_signature)
        layers = list(self._walk())
        model = type(self.model).__name__
        if isinstance(layer_signature, int):
            if 0 <= layer_signature < len(layers):
                return layers[layer_signature]
            msg = f"{model} has {len(layers)} layers, counted from 0, got {layer_signature}"
            raise SelectionError(msg)
        places = {"": self.model, **dict(layers)}
        if layer_signature in places:
            return layer_signature, places[layer_signature]
        flat = {path: _flat(self.model, path) for path in places}
        found = [path for path, name in flat.items() if name == layer_signature]
        if len(found) == 1:
            return found[0], places[found[0]]
        if found:
            msg = f"{layer_signature!r} is {len(found)} layers of {model}: say {_listed(found)}"
            raise SelectionError(msg)
        names = closest_to(layer_signature, [*places, *flat.values()])
        if names:
            msg = f"{model} has no layer {layer_signature!r}; the closest are {_listed(names)}"
        else:
            first = _listed([*places][:MOST_SUGGESTIONS])
            msg = f"{model} has no layer {layer_signature!r}; the first are {first}"
        raise SelectionError(msg)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # The copy of the model has copies of the hooks already.
        return type(self)(copy.deepcopy(self.model, memo))

    def __reduce__(self) -> Any:
        hooks = [
            (each.hook.layer, each.hook, each.options)
            for each in list(self._hooks.values())
            if _can_be_pickled(each.hook)
        ]
        return _restored, (type(self), self.model, hooks)

    def __repr__(self) -> str:
        return f"<Layers of {type(self.model).__name__}, {len(self._hooks)} hooks>"


def _restored(cls: type[Layers], model: nn.Module, hooks: list[Any]) -> Layers:
    layers = cls(model)
    for path, hook, options in hooks:
        layers.register_hook(path, hook, **options)
    return layers


def _can_be_pickled(hook: Hook) -> bool:
    try:
        pickle.dumps(hook)
    except Exception:  # noqa: BLE001 (whatever a class's own way to be pickled raises)
        return False
    return True


def _id(hook_or_id: Hook | str) -> str:
    if isinstance(hook_or_id, Hook):
        return hook_or_id.id
    if isinstance(hook_or_id, str):
        return hook_or_id
    msg = f"a hook or its id, a str, is expected, got {describe(hook_or_id)}"
    raise HookTypeError(msg)


def _listed(names: list[str]) -> str:
    return ", ".join(map(repr, names))


def _flat(model: nn.Module, path: str) -> str:
    """The name that mi_crow has for a layer."""
    name = model.__class__.__name__.lower()
    return f"{name}_{path}".replace(".", "_") if path else name

"""Recorded layers: the hooks of one model's layers, and their installation."""

from __future__ import annotations

import functools
import sys
import weakref
from threading import RLock, get_ident
from typing import TYPE_CHECKING, Any

import torch

from ferrohook._core import Attachment, LastHook, ModuleTree
from ferrohook.attach.instrument import attach, make_class
from ferrohook.captures.convert import converter
from ferrohook.compat.transformers.calls import (
    CALL,
    HERE,
    IN_FLIGHT,
    EagerCall,
    find_owner,
    first_of,
    innermost,
)
from ferrohook.compat.transformers.declarations import (
    HIDDEN,
    LayerKey,
    Layout,
    is_unchanged,
    layout_of,
)
from ferrohook.util.arguments import expect_module
from ferrohook.util.host_copies import HostCopies
from ferrohook.util.never_trace import never_trace
from ferrohook.util.tensors import map_tensors

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from ferrohook.compat.transformers.declarations import Match, OutputRecorder

# Never held while user code runs. Recursive, as a finaliser may run while it is held.
_LOCK = RLock()
# By the ids of their models.
_INSTALLATIONS: dict[int, Installation] = {}


class Installation:
    """Recorded layers of one model, for one state of its modules and declarations.

    It is looked up by the model's id and keeps no module alive; copies and pickles exclude it.
    """

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        # Removes the entry with the model: a later model may get the same id.
        forget = functools.partial(_forget, _INSTALLATIONS, sys.is_finalizing, id(model))
        self.model = weakref.ref(model, forget)
        # Identifies it, and its successors, in graphs.
        self.number = str(id(model))
        targets = layout.targets
        self.recorders = {key: [each.recorder for each in found] for key, found in targets.items()}
        self.copies = HostCopies()
        self.attachment = Attachment()
        self._tree = ModuleTree([module for module, _ in layout.modules])
        self._declared = [
            (weakref.ref(module), declared)
            for module, declared in layout.modules
            if declared is not None
        ]
        self.retired = False

    def holds(self) -> bool:
        """True if all modules are alive and have the same children and declarations."""
        return self._tree.holds() and all(
            is_unchanged(module(), declared) for module, declared in self._declared
        )

    def retire(self) -> None:
        """Releases the model once no call records any more."""
        self.retired = True
        self.release_if_retired()

    def release_if_retired(self) -> None:
        """Releases the model if it is retired and no call records."""
        if self.retired and not any(
            call.live and call.installation is self for call in IN_FLIGHT.copy()
        ):
            self.attachment.release()

    def attach(self, targets: dict[str, list[Match]]) -> None:
        """Instruments the layers and registers their hooks.

        Raises:
            HookError: a layer cannot be instrumented.
        """
        modules: dict[str, nn.Module] = {}
        keys: dict[int, list[LayerKey]] = {}
        for key, found in targets.items():
            for recorder, module in found:
                if id(module) not in keys:
                    modules[f"{key} {len(modules)}"] = module
                initial = recorder.capture_initial_hidden_state if key == HIDDEN else None
                convert = _conversion(recorder, self.copies)
                layer_key = LayerKey(key, recorder.index, initial, convert)
                keys.setdefault(id(module), []).append(layer_key)
        attach(modules, self.attachment)
        layers = {
            id(module): RecordedLayer(self, keys[id(module)], type(module).__name__)
            for module in modules.values()
        }
        for module in modules.values():
            layer = layers[id(module)]
            others = (layers.get(id(each)) for each in module.modules() if each is not module)
            inside = [other for other in others if other is not None]
            for other in inside:
                other.enclosing.append(layer)
            if inside:
                self.attachment.register([module], "forward_pre", layer)
            self.attachment.register([module], "forward", layer)


def _conversion(recorder: OutputRecorder, copies: HostCopies) -> Callable[[Any], Any] | None:
    """Makes the function that prepares a value for storage; None to store it as it is."""
    device = None if recorder.device is None else torch.device(recorder.device)
    convert = converter(copies, device, recorder.dtype, None, "ref")
    if convert is None and not recorder.detach:
        return None

    def keep(tensor: Tensor) -> Tensor:
        if recorder.detach and tensor.requires_grad:
            tensor = tensor.detach()
        return tensor if convert is None else convert(tensor)

    return functools.partial(map_tensors, keep)


# The names are arguments: at finalization a module's globals may be gone.
def _forget(
    installed: dict[int, Installation], ending: Callable[[], bool], key: int, _model: object
) -> None:
    installation = installed.pop(key, None)
    if installation is not None and not ending():  # its layers may be another model's too
        installation.retire()


def installation_of(model: nn.Module) -> Installation | None:
    """Looks up the installation of a model."""
    return _INSTALLATIONS.get(id(model))


def install(model: nn.Module, *, traced: bool = False) -> Installation:
    """Returns the installation of a model, a new one if there is none or the model has changed.

    `traced`: Dynamo traces the model, so only the classes of the layers change.
    """
    former = installation_of(model)
    if former is not None and former.holds():
        return former
    with _LOCK:
        former = installation_of(model)
        if former is not None and former.holds():
            return former
        layout = layout_of(model)
        installation = Installation(model, layout)
        try:
            installation.attach(layout.targets)
            # Best effort: PyTorch's own call costs more, and its code evicts the layers' code
            # from the processor's caches.
            recorded = {id(each.module) for found in layout.targets.values() for each in found}
            others = [module for module, _ in layout.modules if id(module) not in recorded]
            if not traced:
                installation.attachment.instrument(others, make_class, explicit=False)
            _INSTALLATIONS[id(model)] = installation
        except BaseException:
            installation.attachment.release()
            raise
    if former is not None:
        former.retire()
    return installation


def uninstall(model: nn.Module) -> None:
    """Releases the recorded layers of a model and its sub-models; recording installs them again.

    Layers that nothing else instruments are plain modules again. In-flight calls on other threads
    record to their end.

    Raises:
        HookTypeError: `model` is no `nn.Module`.
    """
    expect_module(model, "uninstall needs")
    for module in model.modules():
        installation = _INSTALLATIONS.pop(id(module), None)
        if installation is not None:
            installation.retire()


class RecordedLayer(LastHook):
    """The hook of a recorded layer: records its outputs for calls of its model.

    A layer with other recorded ones inside has it in the phase `forward_pre` too.
    """

    def __init__(self, installation: Installation, keys: list[LayerKey], name: str) -> None:
        self._installation = installation
        self._number = installation.number
        self._keys = keys
        # Class of the layer.
        self._name = name
        # Recorded layers around it.
        self.enclosing: list[RecordedLayer] = []
        # By thread the call that it runs for, where the context has none.
        self._running: dict[int, EagerCall | None] = {}

    def __call__(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Records the layer's output for its call, if that has the same installation."""
        call = HERE.call
        if call is None:
            if torch.compiler.is_compiling():
                return
            call = self._call_elsewhere(args, kwargs)
            if call is None:
                return
        if call.installation in (self._installation, self._number):
            call.record(self._keys, args, kwargs, output)

    def begin(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Finds the call for the layer and those inside, if thread and context have none."""
        if innermost() is None:
            self._running[get_ident()] = self._find_owner(args, kwargs)

    def _call_elsewhere(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> EagerCall | None:
        call = CALL.get()
        if call is not None:
            return call
        here = get_ident()
        begun = here in self._running
        return self._running.pop(here) if begun else self._find_owner(args, kwargs)

    def _find_owner(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> EagerCall | None:
        enclosing = [layer._running.get(get_ident()) for layer in self.enclosing]
        model = self._installation.model()
        return find_owner(model, self._name, first_of(args, kwargs), enclosing)


# Dynamo would compile functions that the native call of a compiled region calls.
never_trace(RecordedLayer, "begin", "native code calls it")
never_trace(RecordedLayer, "_call_elsewhere", "native code calls it")

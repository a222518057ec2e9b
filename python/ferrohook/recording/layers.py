"""Recorded layers: the hooks of one model's layers, and their installation."""

from __future__ import annotations

import functools
import itertools
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch import nn

from ferrohook._core import (
    Attachment,
    Collector,
    InstallationBase,
    RecordedLayerBase,
    calls_in_progress,
    installations,
)
from ferrohook.arguments import expect_module
from ferrohook.conversion import converter
from ferrohook.host_copies import HostCopies
from ferrohook.instrumentation import attach, make_class
from ferrohook.recording.attribution import ATTRIBUTED, find_owner
from ferrohook.recording.declarations import HIDDEN, OutputRecorder, plan_of
from ferrohook.recording.tracing import TRACED, first_of
from ferrohook.traced import never_trace

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrohook._core import Call
    from ferrohook.recording.declarations import Plan, Target

# Never held while user code runs. Recursive, as a finaliser may run while it is held.
_LOCK = threading.RLock()
_NUMBERS = itertools.count()


class Installation(InstallationBase):
    """Recorded layers of one model, for one state of its modules and declarations.

    It is looked up by the model's id and keeps no module alive; copies and pickles exclude it.
    """

    def __new__(cls, _model: nn.Module, plan: Plan, _former: Installation | None) -> Self:
        """Makes a collector for each key of the plan."""
        copies = HostCopies()
        keys = [_collector(key, recorder, copies) for key, recorder in plan.recorders.items()]
        moved = any(recorder.device is not None for recorder in plan.recorders.values())
        return super().__new__(cls, keys, plan.tree, copies if moved else None)

    def __init__(self, model: nn.Module, plan: Plan, former: Installation | None) -> None:
        # Removes the entry with the model: a later model may get the same id.
        self.model = weakref.ref(model, functools.partial(_remove, installations, id(model)))
        # Identifies it, and its successors, in graphs.
        self.number: str = str(next(_NUMBERS)) if former is None else former.number
        self.recorders = plan.recorders
        self.layers = {key: len(found) for key, found in plan.targets.items()}
        self._attachment = Attachment()

    def attach(self, plan: Plan, *, all_modules: bool) -> None:
        """Instruments the layers of the plan and, with `all_modules`, the model's other modules.

        Raises:
            HookError: a layer cannot be instrumented.
        """
        layers: dict[int, list[Target]] = {}
        for target in itertools.chain.from_iterable(plan.targets.values()):
            layers.setdefault(id(target.module), []).append(target)
        names = {
            f"{each[0].key} {place}": each[0].module for place, each in enumerate(layers.values())
        }
        attach(names, self._attachment)
        for targets in layers.values():
            module = targets[0].module
            around = any(id(each) in layers for each in module.modules() if each is not module)
            layer = RecordedLayer(self, targets, around=around)
            if around:
                self._attachment.register([module], "forward_pre", layer)
            self._attachment.register([module], "forward", layer)
        # Best effort: PyTorch's own call costs more, and its code evicts that of the layers from
        # the processor's caches.
        if all_modules:
            others = [module for module in plan.modules if id(module) not in layers]
            self._attachment.instrument(others, make_class, explicit=False)

    def retire(self) -> None:
        """Releases the model once the in-flight calls have ended."""
        self.retired = True
        self.release_when_idle()

    def release_when_idle(self) -> None:
        """Releases a retired model, once, if no call is in flight."""
        with _LOCK:
            if any(call.installation is self for call in calls_in_progress()):
                return
        self.release()

    def release(self) -> None:
        """Releases the model, even during a call."""
        self._attachment.release()


def _collector(key: str, recorder: OutputRecorder, copies: HostCopies) -> Collector:
    device = None if recorder.device is None else torch.device(recorder.device)
    return Collector(
        [key],
        detach=recorder.detach,
        copy="ref",
        keep=None,
        convert=converter(copies, device, recorder.dtype, None, "ref"),
        grads=False,
        max_bytes=None,
        stop=None,
    )


# `ending` is a default argument: at finalization a module's globals may be gone.
def _remove(
    installed: dict[int, Installation],
    key: int,
    _model: object,
    ending: Callable[[], bool] = sys.is_finalizing,
) -> None:
    installation = installed.pop(key, None)
    if installation is not None and not ending():  # its layers may be another model's too
        installation.retire()


def installation_of(model: nn.Module) -> Installation | None:
    """Looks up the installation of a model."""
    return installations.get(id(model))


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
        plan = plan_of(model)
        installation = Installation(model, plan, former)
        try:
            installation.attach(plan, all_modules=not traced)
            installations[id(model)] = installation
        except BaseException:
            installation.release()
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
    expect_module(model, "uninstall takes")
    for module in model.modules():
        installation = installations.pop(id(module), None)
        if installation is not None:
            installation.retire()


class LayerKey(NamedTuple):
    """Key that a layer is recorded under, see `_core.pyi`."""

    key: int
    item: int
    initial: bool | None


class RecordedLayer(RecordedLayerBase):
    """The hook of a recorded layer.

    Its native half records for the in-flight call of the current context. Python finds the call of
    a layer on a worker thread, whose context has none, and records where `torch.compile` traces.
    """

    def __new__(cls, installation: Installation, targets: list[Target], *, around: bool) -> Self:  # noqa: ARG004 (for __init__)
        """Makes a `LayerKey` for each target."""
        places = {key: place for place, key in enumerate(installation.recorders)}
        keys = [
            LayerKey(
                places[key],
                recorder.index,
                recorder.capture_initial_hidden_state if key == HIDDEN else None,
            )
            for key, recorder, _ in targets
        ]
        return super().__new__(cls, installation, keys)

    def __init__(self, installation: Installation, targets: list[Target], *, around: bool) -> None:
        self._number = installation.number
        self._recorders = tuple((target.key, target.recorder) for target in targets)
        # True if other recorded layers are inside.
        self._around = around

    def __call__(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Records the layer's output in a trace of `torch.compile`."""
        traced = TRACED.call
        if traced is not None and traced.number == self._number:
            for key, recorder in self._recorders:
                if key in traced.recorded:
                    traced.take(key, recorder, first_of(args, kwargs), output)

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Finds the call for the layer and those inside, if the context has none."""
        if TRACED.call is None:
            ATTRIBUTED.enter(module, self._find_owner(module, args, kwargs))

    def end(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Records the layer's output, if the context has no call."""
        if TRACED.call is not None:
            self(module, args, kwargs, output)
            return
        call = ATTRIBUTED.leave(module) if self._around else self._find_owner(module, args, kwargs)
        if call is not None and call.installation is self.installation:
            self.record(call, args, kwargs, output)

    def _find_owner(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Call | None:
        """Returns the call of the enclosing layer, else searches for one."""
        outer = ATTRIBUTED.around(module)
        if outer is not None:
            return outer.call
        model = self.installation.model()
        return None if model is None else find_owner(model, module, first_of(args, kwargs))


# Dynamo would compile functions that the native call of a compiled region calls.
never_trace(RecordedLayer, "begin", "native code calls it")
never_trace(RecordedLayer, "end", "native code calls it")

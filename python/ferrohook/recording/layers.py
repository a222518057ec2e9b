"""What recording puts into a model: something that stays with each layer that is recorded."""

from __future__ import annotations

import functools
import itertools
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

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
from ferrohook.recording.calls import knows, running
from ferrohook.recording.declarations import HIDDEN, OutputRecorder, plan_of
from ferrohook.recording.tracing import TRACED, first_of
from ferrohook.tensors import tensors_in
from ferrohook.traced import never_trace

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrohook._core import Call, ModuleTree
    from ferrohook.recording.declarations import Plan, Target

# Never held while code of the user's runs. A finaliser may come in between.
_LOCK = threading.RLock()
_NUMBERS = itertools.count()


class Task(NamedTuple):
    """One key that a layer is recorded for, see `_core.pyi`."""

    key: int
    index: int
    initial: bool | None


class Installation(InstallationBase):
    """What recording put into one model, for the layers and the declarations that it had then.

    It is found by the model's id and keeps no module alive: copies and files have nothing of it.
    """

    def __init__(
        self,
        _keys: list[Collector],
        _tree: ModuleTree,
        _copies: HostCopies | None,
        model: nn.Module,
        plan: Plan,
        number: str,
    ) -> None:
        # No later model is taken for this one when it gets its id.
        self.model = weakref.ref(model, functools.partial(_forget, installations, id(model)))
        # By this graphs know it, and those that follow it.
        self.number = number
        self.places = {key: place for place, key in enumerate(plan.targets)}
        self.layers = {key: len(found) for key, found in plan.targets.items()}
        self.recorders = {key: _of_all(found) for key, found in plan.targets.items()}
        # Keys whose recorders match no module.
        self.unmatched = {key for key, found in plan.targets.items() if not found}
        self._attachment = Attachment()

    def put_in(self, plan: Plan, others: list[nn.Module]) -> None:
        """Records the layers of the plan, and has the other modules called natively too.

        Raises:
            HookError: a layer cannot be instrumented.
        """
        layers = _by_layer(plan)
        modules = {name: found[0].module for name, found in layers.items()}
        attach(modules, self._attachment)
        recorded = {id(module) for module in modules.values()}
        for found in layers.values():
            module = found[0].module
            tasks = [self._task(target) for target in found]
            around = any(id(each) in recorded for each in module.modules() if each is not module)
            layer = RecordedLayer(self, tasks, found, around=around)
            if around:
                self._attachment.register([module], "forward_pre", layer)
            self._attachment.register([module], "forward", layer)
        # Where they can be: PyTorch's way to call a module costs more, and its code would drive
        # that of the layers out of the processor's caches.
        others = [module for module in others if id(module) not in recorded]
        self._attachment.instrument(others, make_class, explicit=False)

    def _task(self, target: Target) -> Task:
        initial = target.recorder.capture_initial_hidden_state if target.key == HIDDEN else None
        return Task(self.places[target.key], target.recorder.index, initial)

    def retire(self) -> None:
        """Takes it out of the model, when the calls in progress have ended."""
        self.retired = True
        self.release_when_idle()

    def release_when_idle(self) -> None:
        """Gives the modules back, once, if it is retired and no call is in progress."""
        with _LOCK:
            if any(call.installation is self for call in calls_in_progress()):
                return
        self.take_out()

    def take_out(self) -> None:
        """Gives the modules back, whoever records."""
        self._attachment.release()


def _by_layer(plan: Plan) -> dict[str, list[Target]]:
    """What is recorded of each layer."""
    layers: dict[int, list[Target]] = {}
    for target in itertools.chain.from_iterable(plan.targets.values()):
        layers.setdefault(id(target.module), []).append(target)
    return {f"{each[0].key} {place}": each for place, each in enumerate(layers.values())}


_NOTHING = OutputRecorder(nn.Module)


def _of_all(targets: list[Target]) -> OutputRecorder:
    """The recorder that says how the tensors of a key are kept."""
    return targets[0].recorder if targets else _NOTHING


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


# At the interpreter's end modules have no variables any more, neither this one nor others.
def _forget(
    installed: dict[int, Installation],
    key: int,
    _model: object,
    ending: Callable[[], bool] = sys.is_finalizing,
) -> None:
    installation = installed.pop(key, None)
    if installation is not None and not ending():  # its layers may be another model's too
        installation.retire()


def installation_of(model: nn.Module) -> Installation | None:
    """What recording put into this model, if it did."""
    return installations.get(id(model))


def install(model: nn.Module, *, traced: bool = False) -> Installation:
    """The same, made anew where there is none or the model has changed.

    Where Dynamo traces the model, no classes change but those of the layers.
    """
    former = installation_of(model)
    if former is not None and former.holds():
        return former
    with _LOCK:
        former = installation_of(model)
        if former is not None and former.holds():
            return former
        plan = plan_of(model)
        installation = _installation(model, plan, former)
        try:
            installation.put_in(plan, others=[] if traced else plan.modules)
            installations[id(model)] = installation
        except BaseException:
            installation.take_out()
            raise
    if former is not None:
        former.retire()
    return installation


def _installation(model: nn.Module, plan: Plan, former: Installation | None) -> Installation:
    copies = HostCopies()
    recorders = {key: _of_all(found) for key, found in plan.targets.items()}
    keys = [_collector(key, recorder, copies) for key, recorder in recorders.items()]
    moved = any(recorder.device is not None for recorder in recorders.values())
    number = str(next(_NUMBERS)) if former is None else former.number
    return Installation(keys, plan.tree, copies if moved else None, model, plan, number)


def uninstall(model: nn.Module) -> None:
    """Takes out what recording put into a model and its sub-models; recording puts it back.

    Layers that nothing else instruments are plain modules again. Calls in progress on other threads
    record to their end.

    Raises:
        HookTypeError: `model` is no `nn.Module`.
    """
    expect_module(model, "uninstall takes")
    for module in model.modules():
        installation = installations.pop(id(module), None)
        if installation is not None:
            installation.retire()


# --- Layers that the context tells nothing of ---------------------------------------------------


class _Claims(threading.local):
    """The layers that this thread runs for calls of other threads, the outermost first."""

    def __init__(self) -> None:
        self.stack: list[tuple[nn.Module, Call | None]] = []


_CLAIMS = _Claims()


class RecordedLayer(RecordedLayerBase):
    """What stays with a recorded layer.

    Its native half records for the call that the context tells of. Python finds the call of a layer
    on a helper thread, whose context tells of none, and records where `torch.compile` traces.
    """

    def __init__(
        self,
        installation: Installation,
        _tasks: list[Task],
        targets: list[Target],
        *,
        around: bool,
    ) -> None:
        self._number = installation.number
        self._targets = tuple((target.key, target.recorder) for target in targets)
        # Whether other recorded layers are inside.
        self._around = around

    def __call__(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Records what the layer returned, where `torch.compile` traces it."""
        traced = TRACED.call
        if traced is not None and traced.number == self._number:
            for key, recorder in self._targets:
                if key in traced.recorded:
                    traced.take(key, recorder, first_of(args, kwargs), output)

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Finds the call for the layer and for those inside, where no context tells it."""
        if TRACED.call is None:
            _CLAIMS.stack.append((module, self._claimed(module, args, kwargs)))

    def end(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Records what the layer returned, where no context tells the call."""
        if TRACED.call is not None:
            self(module, args, kwargs, output)
            return
        call = _leave(module) if self._around else self._claimed(module, args, kwargs)
        if call is not None and call.installation is self.installation:
            call.record(self, args, kwargs, output)

    def _claimed(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Call | None:
        """The call that the layer runs for: that of the layer around it, or what is found."""
        stack = _CLAIMS.stack
        # What stands above the layer around this one raised, and was not left.
        while stack and (stack[-1][0] is module or not _contains(stack[-1][0], module)):
            stack.pop()
        if stack:
            return stack[-1][1]
        model = self.installation.model()
        return None if model is None else _whose(model, module, first_of(args, kwargs))


# What the native call of a compiled piece calls, Dynamo would compile too.
never_trace(RecordedLayer, "begin", "native code calls it")
never_trace(RecordedLayer, "end", "native code calls it")


def _leave(module: nn.Module) -> Call | None:
    """The call that the layer was entered for."""
    stack = _CLAIMS.stack
    for place in reversed(range(len(stack))):
        if stack[place][0] is module:
            _, call = stack[place]
            del stack[place:]
            return call
    return None


def _contains(outer: nn.Module, inner: nn.Module) -> bool:
    return any(module is inner for module in outer.modules())


def _whose(model: nn.Module, layer: nn.Module, taken: Any) -> Call | None:
    """The call that a layer belongs to which runs in no call's context.

    The one that knows the tensor which the layer takes. Failing that, the only one in progress, if
    this thread is its own or was started during it.
    """
    calls = running(model)
    if not any(call.records for call in calls):
        return None
    if torch._C._current_graph_task_id() != -1:
        return None  # checkpointing runs it again in a backward
    tensors = [*tensors_in(taken)]
    owners = [call for call in calls if knows(call, tensors)]
    here = threading.current_thread()
    if (
        not owners
        and len(calls) == 1
        and (here.ident == calls[0].thread or here not in calls[0].threads)
    ):
        owners = calls
    if len(owners) == 1:
        return owners[0]
    # Of those that record nothing the layers are not watched all the time: it may well be theirs.
    if all(call.records for call in calls):
        for call in calls:
            call.leave_out(type(layer).__name__)
    return None

"""What recording puts into a model: a hook that stays on each layer that is recorded."""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from ferrohook._core import active_scopes, record
from ferrohook.activations import _BEHIND_ALL, tensors_in
from ferrohook.errors import HookTypeError
from ferrohook.instrumentation import hold_all, registry_of, release
from ferrohook.module import _describe
from ferrohook.recording.calls import Call, calls_of, first_of, innermost, picked
from ferrohook.recording.declarations import HIDDEN, Plan, Target, plan_of
from ferrohook.recording.tracing import TRACED

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ferrohook._core import HookHandle

# In the `__dict__` of a model that recorded.
KEY = "_ferrohook_recording"
# Never held while code of the user's runs. A finaliser may come in between.
_LOCK = threading.RLock()
_NUMBERS = itertools.count()


class Installation:
    """What recording put into one model.

    In the model's `__dict__`, where the garbage collector finds it; copies and files leave it out.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = weakref.ref(model)
        self.number = str(next(_NUMBERS))
        self.plan: Plan | None = None
        self.calls = calls_of(model)
        self._retired = False
        self._held: list[nn.Module] = []
        self._handles: list[HookHandle] = []
        self._watching = 0
        # A graph has the watches in it, for good.
        self.traced = False

    def __reduce__(self) -> Any:
        return type(None), ()

    def update(self) -> Plan:
        """Watches the layers that the model has now."""
        plan = self.plan
        if plan is not None and plan.holds():
            return plan
        with _LOCK:
            if self.plan is not None and self.plan.holds():
                return self.plan
            plan = plan_of(cast("nn.Module", self.model()))
            tasks: dict[int, list[Target]] = {}
            for target in itertools.chain.from_iterable(plan.targets.values()):
                tasks.setdefault(id(target.module), []).append(target)
            held = hold_all(
                {
                    f"{each[0].key} {place}": each[0].module
                    for place, each in enumerate(tasks.values())
                }
            )
            # Those of before go afterwards: calls in progress lose no layer.
            former = self._held, self._handles
            self._held, self._handles = held, []
            for each in tasks.values():
                self._handles += _Watch(self, each).register(tasks)
            self.plan = plan
            self._watch()
            _give_back(*former)
            return plan

    def watch(self, *, more: int) -> None:
        """Counts those that want the layers watched: where nobody does, a call pays nothing."""
        with _LOCK:
            before, self._watching = self._watching, self._watching + more
            if not (before and self._watching):
                self._watch()

    def _watch(self) -> None:
        for handle in self._handles:
            if self._watching:
                handle.enable()
            else:
                handle.disable()

    def retire(self) -> None:
        """Takes it out of the model, when the calls in progress have ended."""
        self._retired = True
        self.release_when_idle()

    @property
    def retired(self) -> bool:
        """Whether it is being taken out."""
        return self._retired

    def release_when_idle(self) -> None:
        """Gives the layers back, once, if it is retired and no call is in progress."""
        with _LOCK:
            if not self._retired or any(call.installation is self for call in list(self.calls)):
                return
            former = self._held, self._handles
            self._held, self._handles = [], []
        _give_back(*former)


def _give_back(held: list[nn.Module], handles: list[HookHandle]) -> None:
    for handle in handles:
        handle.remove()
    for module in held:
        release(module)


def installation_of(model: nn.Module) -> Installation | None:
    """What recording put into this model, if it did."""
    installation = vars(model).get(KEY)
    # A shallow copy has that of its original.
    return installation if installation and installation.model() is model else None


def install(model: nn.Module) -> Installation:
    """The same, made where there is none."""
    with _LOCK:
        installation = installation_of(model)
        if installation is None:
            installation = Installation(model)
            vars(model)[KEY] = installation
    return installation


def uninstall(model: nn.Module) -> None:
    """Takes out what recording put into a model and its sub-models; recording puts it back.

    Layers that nothing else instruments are plain modules again. Calls in progress on other threads
    record to their end.

    Raises:
        HookTypeError: `model` is no `nn.Module`.
    """
    if not isinstance(model, nn.Module):
        msg = f"uninstall takes an instance of nn.Module, got {_describe(model)}"
        raise HookTypeError(msg)
    for module in model.modules():
        installation = vars(module).pop(KEY, None)
        if installation and installation.model() is module:
            installation.retire()


# --- Layers that the context tells nothing of ---------------------------------------------------


class _Claims(threading.local):
    """The layers that this thread runs for calls of other threads, the outermost first."""

    def __init__(self) -> None:
        self.stack: list[tuple[nn.Module, Call | None]] = []


_CLAIMS = _Claims()


class _Watch:
    """The hook that stays on a recorded layer.

    It notes what the first layer of a call took; finds the call for a layer that runs on a helper
    thread, whose context tells of none; and records where `torch.compile` traces.
    """

    def __init__(self, installation: Installation | None, targets: list[Target]) -> None:
        self._installation = installation
        self._number = "" if installation is None else installation.number
        self._tasks = tuple((target.key, target.recorder) for target in targets)
        self._module = targets[0].module if targets else None
        self._first = next((task[1] for task in self._tasks if task[0] == HIDDEN), None)
        self._inside: frozenset[int] = frozenset()

    def register(self, recorded: Mapping[int, object]) -> Iterator[HookHandle]:
        """Registers it for the module; `recorded` are the ids of all modules of its kind."""
        module = cast("nn.Module", self._module)
        registry = registry_of(module)
        yield registry.register("forward", self, with_kwargs=True, priority=_BEHIND_ALL)
        self._inside = frozenset(map(id, module.modules())) & recorded.keys() - {id(module)}
        if self._inside:
            yield registry.register(
                "forward_pre", self.begin, with_kwargs=True, priority=_BEHIND_ALL
            )

    # `ferrohook.instrumentation` asks: no reason for a copy of the module to be instrumented.
    stays_behind = True

    def __deepcopy__(self, memo: object) -> _Watch:
        return _Watch(None, [])

    def __repr__(self) -> str:
        return f"recording of {', '.join(key for key, _ in self._tasks)}"

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Finds the call, for the layers inside this one too."""
        if torch.compiler.is_compiling() or innermost() is not None or TRACED.call is not None:
            return
        call = self._claimed(module, args, kwargs)
        _CLAIMS.stack.append((module, call))

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        call = innermost()
        if call is not None:
            if self._installation is not None and call.calls is self._installation.calls:
                self._note(call, args, kwargs, output)
            return
        traced = TRACED.call
        if traced is None:
            if not torch.compiler.is_compiling():
                self._record_elsewhere(module, args, kwargs, output)
        elif traced.number == self._number:
            for key, recorder in self._tasks:
                if key in traced.recorded:
                    traced.take(key, recorder, first_of(args, kwargs), output)

    def _note(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self._first is not None and call.states is not None:
            call.states.begin(self._first, args, kwargs)
        main = output[0] if isinstance(output, tuple) and output else output
        if isinstance(main, Tensor):
            call.seen.append(weakref.ref(main))

    def _record_elsewhere(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if self._inside:
            call = next((call for layer, call in _CLAIMS.stack if layer is module), None)
            while _CLAIMS.stack and _CLAIMS.stack.pop()[0] is not module:
                pass
        else:
            call = self._claimed(module, args, kwargs)
        if call is None:
            return
        self._note(call, args, kwargs, output)
        number = registry_of(module).module
        token = active_scopes.set((call,))
        try:
            wanted = [task for task in self._tasks if task[0] in call.collectors]
            for position, (key, recorder) in enumerate(wanted):
                record(number, "forward", position, picked(key, output, recorder.index))
        finally:
            active_scopes.reset(token)

    def _claimed(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Call | None:
        """The call that the layer runs for: that of the layer around it, or what is found."""
        installation = self._installation
        if installation is None or module is not self._module:
            return None
        stack = _CLAIMS.stack
        # What stands above the layer around this one raised, and was not left.
        while stack and (stack[-1][0] is module or not _contains(stack[-1][0], module)):
            stack.pop()
        return stack[-1][1] if stack else _whose(installation, module, first_of(args, kwargs))


def _contains(outer: nn.Module, inner: nn.Module) -> bool:
    return any(module is inner for module in outer.modules())


def _whose(installation: Installation, module: nn.Module, taken: Any) -> Call | None:
    """The call that a layer belongs to which runs in no call's context.

    The one that knows the tensor which the layer takes. Failing that, the only one in progress, if
    this thread is its own or was started during it.
    """
    # One with an inner call is itself not what runs.
    calls = [call for call in list(installation.calls) if not call.inner]
    if not any(call.collectors for call in calls):
        return None
    if torch._C._current_graph_task_id() != -1:
        return None  # checkpointing runs it again in a backward
    tensors = [*tensors_in(taken)]
    owners = [call for call in calls if call.knows(tensors)]
    here = threading.current_thread()
    if not owners and len(calls) == 1 and (here is calls[0].thread or here not in calls[0].threads):
        owners = calls
    if len(owners) == 1:
        return owners[0]
    # Of those that record nothing the layers are not watched all the time: it may well be theirs.
    if all(call.collectors for call in calls):
        for call in calls:
            call.unattributed.add(type(module).__name__)
    return None

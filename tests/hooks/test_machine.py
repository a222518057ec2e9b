"""Random operation sequences on a hooked module and on PyTorch, side by side.

PyTorch is the oracle for order, arguments, results, exceptions and gradients. The test emulates
priorities, disabling and `on_error`, which PyTorch lacks: a sorted list orders the hooks, and a
guard around each hook decides if it fires. The guard also stops removed hooks, which PyTorch fires
until the phase ends.
"""

from __future__ import annotations

import copy
import logging
import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import nn

import ferrohook as fh
from ferrohook.attach.hook_info import find_registry, hooks_of
from support.amounts import amount
from support.hooks import PHASES, TYPED, times
from support.internals import registry_of

if TYPE_CHECKING:
    from collections import OrderedDict
    from collections.abc import Callable

    from ferrohook.attach.hook_info import HookInfo

ACTIONS = (
    "observe",
    "replace",
    "raise",
    "misshape",
    "remove_self",
    "remove_other",
    "disable_other",
    "enable_other",
    "register",
)
MOST_MODULES = 3
MANY_HOOKS = 20


class Toy(nn.Module):
    """Takes positional and keyword arguments, returns a tensor or a tuple, fails on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.5, -2.0]))
        self.failing = False
        self.pair = False

    def forward(self, x: Any, y: Any = None, *, scale: float = 1.0) -> Any:
        if self.failing:
            msg = "the module failed"
            raise ArithmeticError(msg)
        out = x * self.weight * scale
        if y is not None:
            out = out + y
        return (out, out.sum()) if self.pair else out


@dataclass(frozen=True)
class Spec:
    """Registration options of a hook, and its action when it fires."""

    phase: str
    action: str
    fuse: int
    target: int
    prepend: bool
    with_kwargs: bool
    always_call: bool
    typed: bool
    priority: int
    on_error: str
    child: Spec | None = None

    def register(self, module: nn.Module, hook: Any, **options: Any) -> Any:
        """Registers `hook` with PyTorch's options and `options`."""
        options["prepend"] = self.prepend
        if self.phase in {"forward_pre", "forward"}:
            options["with_kwargs"] = self.with_kwargs
        if self.phase == "forward":
            options["always_call"] = self.always_call
        return getattr(module, PHASES[self.phase])(hook, **options)


def freeze(value: Any) -> Any:
    """Comparable, bit-exact copy of a value."""
    if isinstance(value, torch.Tensor):
        return "tensor", str(value.tolist()), value.requires_grad
    if isinstance(value, tuple | list):
        return type(value).__name__, *map(freeze, value)
    if isinstance(value, dict):
        return "dict", *((key, freeze(each)) for key, each in value.items())
    return value


class Side:
    """One of the two modules, its copies and the log of its hooks."""

    def __init__(self, module: nn.Module) -> None:
        self.modules: list[Any] = [module]
        self.specs: list[Spec] = []
        self.homes: list[int] = []
        self.log: list[Any] = []
        self.fired: dict[Any, int] = {}

    def register(self, index: int, spec: Spec) -> None:
        raise NotImplementedError

    def remove(self, key: int) -> None:
        raise NotImplementedError

    def disable(self, key: int) -> None:
        raise NotImplementedError

    def enable(self, key: int) -> None:
        raise NotImplementedError

    def apply_deferred(self) -> None:
        """Applies deferred changes, while no hook runs."""

    def label(self, module: nn.Module) -> int:
        return next(i for i, each in enumerate(self.modules) if each is module)

    def fire(self, key: int, module: nn.Module | None, given: tuple[Any, ...]) -> Any:
        """Body of a hook, equal on both sides; a typed hook does not get the module."""
        spec = self.specs[key]
        where = None if module is None else self.label(module)
        self.log.append((key, where, freeze(given)))
        turn = self.fired.get((where, key), 0)
        self.fired[where, key] = turn + 1
        if spec.action == "replace":
            return self.replacement(key, given)
        if turn == spec.fuse:
            if spec.action == "misshape":
                return self.misshapen(spec, given)
            self.act(key)
        # A typed pre-hook has to return its input.
        return given[0] if spec.typed and spec.phase == "forward_pre" else None

    def act(self, key: int) -> None:
        spec = self.specs[key]
        other = (key + spec.target) % len(self.specs)
        if spec.action == "raise":
            msg = f"hook {key} failed"
            raise ValueError(msg)
        if spec.action == "remove_self":
            self.remove(key)
        elif spec.action == "remove_other":
            self.remove(other)
        elif spec.action == "disable_other":
            self.disable(other)
        elif spec.action == "enable_other":
            self.enable(other)
        elif spec.child is not None:
            self.register(self.homes[key], spec.child)

    def replacement(self, key: int, given: tuple[Any, ...]) -> Any:
        spec = self.specs[key]
        if spec.phase == "forward_pre":
            args = times(given[0], 2)
            if spec.with_kwargs:
                return args, {**given[1], "scale": 2 * given[1].get("scale", 1.0)}
            # PyTorch takes a single argument with or without the tuple.
            return args[0] if not spec.typed and len(args) == 1 and key % 2 else args
        if spec.typed:
            return None
        if spec.phase == "forward":
            return 7 if given[-1] is None else times(given[-1], 3)
        return times(given[0], 0.5)

    def misshapen(self, spec: Spec, given: tuple[Any, ...]) -> Any:
        if spec.phase == "forward_pre":
            return 5 if spec.with_kwargs else ("extra",) * 4
        if spec.phase == "forward":
            return "odd"
        if spec.phase == "backward" and all(grad is None for grad in given[0]):
            # Both refuse it with different texts: PyTorch's is about inputs without gradients.
            return None
        return (None,) * 5


class Ours(Side):
    """A module of ferrohook."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.handles: list[fh.typing.HookHandle] = []

    def clear(self, index: int, phase: str | None) -> None:
        raise NotImplementedError

    def rows(self, index: int) -> list[HookInfo]:
        raise NotImplementedError

    def register(self, index: int, spec: Spec) -> None:
        key = len(self.specs)

        def hook(module: nn.Module, *given: Any) -> Any:
            return self.fire(key, module, given)

        def typed(*given: Any) -> Any:
            return self.fire(key, None, given)

        self.specs.append(spec)
        self.homes.append(index)
        self.handles.append(
            spec.register(
                self.modules[index],
                TYPED[spec.phase](typed) if spec.typed else hook,
                priority=spec.priority,
                on_error=spec.on_error,
            )
        )

    def remove(self, key: int) -> None:
        self.handles[key].remove()

    def disable(self, key: int) -> None:
        self.handles[key].disable()

    def enable(self, key: int) -> None:
        self.handles[key].enable()


class Wrapped(Ours):
    """A HookedModule."""

    def __init__(self) -> None:
        super().__init__(fh.HookedModule(Toy()))

    def clear(self, index: int, phase: str | None) -> None:
        self.modules[index].clear_hooks(phase)

    def rows(self, index: int) -> list[HookInfo]:
        return self.modules[index].hooks()


class Instrumented(Ours):
    """An instrumented module."""

    def __init__(self) -> None:
        module = Toy()
        fh.instrument(module)
        super().__init__(module)

    def clear(self, index: int, phase: str | None) -> None:
        registry_of(self.modules[index]).clear(phase)

    def rows(self, index: int) -> list[HookInfo]:
        return hooks_of(find_registry(self.modules[index]))


@dataclass
class Registered:
    """Expected state of one hook of one module."""

    rank: int
    priority: int
    torch_id: int | None = None
    removed: bool = False
    enabled: bool = True
    calls: int = 0

    def order(self) -> tuple[int, int]:
        return -self.priority, self.rank


class Oracle(Side):
    """The plain nn.Module with PyTorch's hooks, and emulation of the features it lacks."""

    def __init__(self) -> None:
        super().__init__(Toy())
        self.disabled_by_errors = 0
        self.expected: dict[tuple[int, int], Registered] = {}
        self.running: list[str] = []
        self.deferred: list[tuple[int, int]] = []
        self.prioritised: set[tuple[int, str]] = set()

    def register(self, index: int, spec: Spec) -> None:
        key = len(self.specs)
        self.specs.append(spec)
        self.homes.append(index)
        rank = -key - 1 if spec.prepend else key + 1
        self.expected[index, key] = Registered(rank, spec.priority)
        if spec.phase == "forward" and "forward" in self.running:
            # Deferred to the next call, where it first fires; now it may break PyTorch's iteration.
            self.deferred.append((index, key))
        else:
            self.register_with_torch(index, key)

    def register_with_torch(self, index: int, key: int) -> None:
        spec = self.specs[key]

        def hook(module: nn.Module, *given: Any) -> Any:
            return self.guarded(key, module, given)

        handle = spec.register(self.modules[index], hook)
        self.expected[index, key].torch_id = handle.id
        self.sort(index, spec.phase)

    def guarded(self, key: int, module: nn.Module, given: tuple[Any, ...]) -> Any:
        spec = self.specs[key]
        entry = self.expected[self.label(module), key]
        if entry.removed or not entry.enabled:
            return None
        if spec.typed and spec.phase.startswith("forward") and len(given[0]) == 1:
            given = (given[0][0], *given[1:])
        self.running.append(spec.phase)
        try:
            return self.fire(key, None if spec.typed else module, given)
        except Exception:
            if spec.on_error == "raise":
                raise
            if spec.on_error == "disable" and entry.enabled:
                entry.enabled = False
                self.disabled_by_errors += 1
            return None
        finally:
            self.running.pop()
            entry.calls += 1

    def hooks_of(self, index: int, phase: str) -> OrderedDict[int, Any]:
        hooks: OrderedDict[int, Any] = getattr(self.modules[index], f"_{phase}_hooks")
        return hooks

    def entries(self, index: int, phase: str) -> list[Registered]:
        """Registered hooks, in expected order."""
        entries = [
            entry
            for (where, key), entry in self.expected.items()
            if where == index and self.specs[key].phase == phase
        ]
        return sorted(entries, key=Registered.order)

    def sort(self, index: int, phase: str) -> None:
        """Sorts PyTorch's hooks by priority."""
        hooks = self.hooks_of(index, phase)
        entries = [entry for entry in self.entries(index, phase) if entry.torch_id in hooks]
        order = [entry.torch_id for entry in entries if entry.torch_id is not None]
        if any(entry.priority for entry in entries):
            self.prioritised.add((index, phase))
        if (index, phase) not in self.prioritised:
            assert list(hooks) == order, "without priorities the order is PyTorch's"
        for torch_id in order:
            hooks.move_to_end(torch_id)

    def handle(self, key: int) -> Registered:
        """Target of a handle: the hook on the original module, not on a copy."""
        return self.expected[self.homes[key], key]

    def remove(self, key: int) -> None:
        self.handle(key).removed = True

    def disable(self, key: int) -> None:
        self.handle(key).enabled = False

    def enable(self, key: int) -> None:
        self.handle(key).enabled = True

    def prioritise(self, key: int, priority: int) -> None:
        self.handle(key).priority = priority
        self.sort(self.homes[key], self.specs[key].phase)

    def clear(self, index: int, phase: str | None) -> None:
        for (where, key), entry in self.expected.items():
            if where == index and phase in {None, self.specs[key].phase}:
                entry.removed = True

    def copy(self, index: int) -> None:
        new = len(self.modules)
        self.modules.append(copy.deepcopy(self.modules[index]))
        for (where, key), entry in list(self.expected.items()):
            if where == index and not entry.removed:
                self.expected[new, key] = replace(entry, calls=0)
        self.prioritised |= {(new, phase) for where, phase in self.prioritised if where == index}

    def apply_deferred(self) -> None:
        """Applies changes that were deferred during a call."""
        for index, key in self.deferred:
            self.register_with_torch(index, key)
        self.deferred.clear()
        for (index, key), entry in self.expected.items():
            if entry.removed and entry.torch_id is not None:
                module = self.modules[index]
                for hooks in (
                    self.hooks_of(index, self.specs[key].phase),
                    module._forward_hooks_with_kwargs,
                    module._forward_hooks_always_called,
                    module._forward_pre_hooks_with_kwargs,
                ):
                    hooks.pop(entry.torch_id, None)

    def listing(self, index: int) -> list[tuple[str, int, bool, int]]:
        return [
            (phase, entry.priority, entry.enabled, entry.calls)
            for phase in PHASES
            for entry in self.entries(index, phase)
            if not entry.removed
        ]


@dataclass(frozen=True)
class Call:
    """Parameters of a call, and of the backward pass after it."""

    form: str
    x_grad: bool
    record: bool
    failing: bool
    pair: bool
    backward: bool
    between: list[tuple[str, int]]


def outcome(act: Callable[[], Any]) -> tuple[Any, Any]:
    """Result of `act`, comparable and raw: a value or an exception."""
    try:
        value = act()
    except Exception as error:  # noqa: BLE001 (compared)
        return (type(error), str(error)), error
    return freeze(value), value


def observe(side: Side, index: int, call: Call) -> list[Any]:
    """Observable results of one call and of the backward pass after it."""
    module = side.modules[index]
    module.failing, module.pair = call.failing, call.pair
    module.weight.grad = None
    side.log.clear()
    x = torch.tensor([0.5, 3.0], requires_grad=call.x_grad)
    y = torch.tensor([1.0, -1.0], requires_grad=True)
    args: tuple[Any, ...] = (x, y) if "y" in call.form else (x,)
    kwargs: dict[str, Any] = {"scale": 4.0} if "scale" in call.form else {}
    if call.form == "keywords":
        args, kwargs = (), {"scale": 4.0, "x": x}
    with torch.set_grad_enabled(call.record):
        seen, result = outcome(lambda: module(*args, **kwargs))
    side.apply_deferred()
    for act, pick in call.between:
        if side.specs:
            getattr(side, act)(pick % len(side.specs))
    everything = [seen]
    outputs = result if isinstance(result, tuple) else (result,)
    loss: Any = sum(each.sum() for each in outputs if isinstance(each, torch.Tensor))
    # PyTorch does not observe keyword inputs; test_backward.py covers ours.
    comparable = call.form != "keywords" or not any(
        spec.phase.startswith("backward") for spec in side.specs
    )
    if call.backward and comparable and isinstance(loss, torch.Tensor) and loss.requires_grad:
        seen, result = outcome(loss.backward)
        everything.append(seen)
    if isinstance(side, Ours) and isinstance(result, ValueError):
        (note,) = result.__notes__
        assert note.startswith("ferrohook: raised by the ")
    everything.extend(freeze(each.grad) for each in (x, y, module.weight))
    return everything + side.log


@st.composite
def childless_specs(draw: st.DrawFn, phases: tuple[str, ...], actions: tuple[str, ...]) -> Spec:
    phase = draw(st.sampled_from(phases))
    action = draw(st.sampled_from(actions))
    with_kwargs = phase.startswith("forward") and draw(st.booleans())
    typed = phase in TYPED and not with_kwargs and action != "misshape" and draw(st.booleans())
    return Spec(
        phase=phase,
        action=action,
        fuse=draw(st.sampled_from((0, 0, 0, 1, 2))),
        target=draw(st.integers(-3, 3)),
        prepend=draw(st.booleans()),
        with_kwargs=with_kwargs,
        always_call=phase == "forward" and draw(st.booleans()),
        typed=typed,
        priority=draw(st.sampled_from((0, 0, 0, 0, 5, -5))),
        # PyTorch detects wrong return values outside of the hook, where the guard cannot.
        on_error="raise"
        if action == "misshape"
        else draw(st.sampled_from(("raise", "raise", "disable", "ignore"))),
    )


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    spec = draw(childless_specs(tuple(PHASES), ACTIONS))
    if spec.action != "register":
        return spec
    # PyTorch fixes backward hooks when the call begins, ferrohook when the phase does;
    # test_backward.py covers that.
    own = () if spec.phase.startswith("forward") else (spec.phase,)
    child = draw(childless_specs(("forward_pre", "forward", *own), ACTIONS[:-1]))
    return replace(spec, child=child)


picks = st.integers(0, 20)
# Mostly one module: interactions of hooks matter more than many modules.
indices = st.sampled_from((0, 0, 0, 1, 2))
calls = st.builds(
    Call,
    form=st.sampled_from(("x", "x", "x, y", "x, scale", "x, y, scale", "keywords")),
    x_grad=st.booleans(),
    record=st.sampled_from((True, True, True, False)),
    failing=st.sampled_from((False, False, False, False, False, True)),
    pair=st.booleans(),
    backward=st.sampled_from((True, True, False)),
    between=st.lists(
        st.tuples(st.sampled_from(("remove", "disable", "enable")), picks), max_size=2
    ),
)


class Records(logging.Handler):
    """Counts log records."""

    count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += 1


class HookedAndPlain(RuleBasedStateMachine):
    """Operations; invariants compare the observable state of both sides after each."""

    hooked: type[Wrapped | Instrumented]

    def __init__(self) -> None:
        super().__init__()
        self.ours = self.hooked()
        self.plain = Oracle()
        self.records = Records()
        logging.getLogger("ferrohook").addHandler(self.records)

    def teardown(self) -> None:
        logging.getLogger("ferrohook").removeHandler(self.records)

    def key(self, pick: int) -> int:
        return pick % len(self.ours.specs)

    @rule(some=st.lists(specs(), min_size=1, max_size=6), index=indices)
    def register(self, some: list[Spec], index: int) -> None:
        for spec in some:
            for side in (self.ours, self.plain):
                side.register(index % len(side.modules), spec)

    @precondition(lambda self: self.ours.specs)
    @rule(pick=picks)
    def remove(self, pick: int) -> None:
        for side in (self.ours, self.plain):
            side.remove(self.key(pick))

    @precondition(lambda self: self.ours.specs)
    @rule(pick=picks)
    def leave(self, pick: int) -> None:
        with self.ours.handles[self.key(pick)]:
            pass
        self.plain.remove(self.key(pick))

    @precondition(lambda self: self.ours.specs)
    @rule(pick=picks)
    def disable(self, pick: int) -> None:
        for side in (self.ours, self.plain):
            side.disable(self.key(pick))

    @precondition(lambda self: self.ours.specs)
    @rule(pick=picks)
    def enable(self, pick: int) -> None:
        for side in (self.ours, self.plain):
            side.enable(self.key(pick))

    @precondition(lambda self: self.ours.specs)
    @rule(pick=picks, priority=st.integers(-2, 2))
    def prioritise(self, pick: int, priority: int) -> None:
        self.ours.handles[self.key(pick)].priority = priority
        self.plain.prioritise(self.key(pick), priority)

    @precondition(lambda self: len(self.ours.specs) > MANY_HOOKS)
    @rule(index=indices, phase=st.sampled_from((None, *PHASES)))
    def clear(self, index: int, phase: str | None) -> None:
        index %= len(self.ours.modules)
        self.ours.clear(index, phase)
        self.plain.clear(index, phase)

    @precondition(lambda self: len(self.ours.modules) < MOST_MODULES)
    @rule(index=indices)
    def deepcopy(self, index: int) -> None:
        index %= len(self.ours.modules)
        self.plain.apply_deferred()
        self.ours.modules.append(copy.deepcopy(self.ours.modules[index]))
        self.plain.copy(index)

    @rule(index=indices, call=calls, again=st.integers(1, 3))
    def call(self, index: int, call: Call, again: int) -> None:
        index %= len(self.ours.modules)
        for _ in range(again):
            self.plain.apply_deferred()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                assert observe(self.ours, index, call) == observe(self.plain, index, call)

    @invariant()
    def the_same_hooks_are_listed(self) -> None:
        for index in range(len(self.ours.modules)):
            rows = self.ours.rows(index)
            shown = [(row.phase, row.priority, row.enabled, row.calls) for row in rows]
            assert shown == self.plain.listing(index)

    @invariant()
    def handles_show_the_expected_state(self) -> None:
        for key, handle in enumerate(self.ours.handles):
            entry = self.plain.handle(key)
            assert handle.phase == self.plain.specs[key].phase
            assert (handle.removed, handle.enabled) == (entry.removed, entry.enabled)
            assert (handle.priority, handle.calls) == (entry.priority, entry.calls)

    @invariant()
    def a_hook_disabled_by_its_error_is_logged_once(self) -> None:
        assert self.records.count == self.plain.disabled_by_errors


class WrappedAndPlain(HookedAndPlain):
    hooked = Wrapped


class InstrumentedAndPlain(HookedAndPlain):
    hooked = Instrumented


for _machine in (WrappedAndPlain, InstrumentedAndPlain):
    _machine.TestCase.settings = settings(
        max_examples=amount(90, whole=250),
        stateful_step_count=30,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
TestWrappedAndPlain = WrappedAndPlain.TestCase
TestInstrumentedAndPlain = InstrumentedAndPlain.TestCase

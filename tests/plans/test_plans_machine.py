"""Random plans in random nesting over threads, tasks and scopes, against PyTorch's hooks.

The oracle of a call is a plain copy of the model with the hooks of all open requests registered by
hand, in their one order.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
import functools
import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import ferrohook as fh
from ferrohook._core import frames
from support.amounts import amount
from support.compiling import compiled
from support.hooks import PHASES, times
from support.internals import instrumented
from support.plans import Net, forward_hook, pre_hook
from support.rows import assert_same
from support.threads import in_thread, run_together

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable

WIDTH = 4
TENSORS = ("embed", "blocks.0.linear", "blocks.*.linear", "act", "head")
PAIRS = ("blocks.0", "blocks.1")


@dataclass(frozen=True)
class Hook:
    """A Python function that multiplies, of PyTorch's contract for a phase, or a typed hook."""

    phase: str
    factor: float
    typed: bool = False

    def __call__(self, _module: nn.Module, *values: Any) -> Any:
        # Pre-hooks get the input, backward hooks the gradients of the input first.
        return times(values[-1] if self.phase == "forward" else values[0], self.factor)

    def entry_hook(self) -> Any:
        if self.typed:
            factor = self.factor
            return fh.ForwardPreHook(lambda x: x * factor)
        return self


@dataclass(frozen=True)
class On:
    """An entry of a plan that changes."""

    what: str
    hook: Any
    phase: str
    priority: int
    prepend: bool

    def entry(self) -> Any:
        hook = self.hook.entry_hook() if isinstance(self.hook, Hook) else self.hook
        options = {"phase": self.phase, "priority": self.priority, "prepend": self.prepend}
        return fh.on(self.what, hook, **options)

    def plain(self) -> Any:
        if isinstance(self.hook, Hook):
            return self.hook
        return pre_hook(self.hook) if self.phase == "forward_pre" else forward_hook(self.hook)


@dataclass(frozen=True)
class Keep:
    """An entry of a plan that captures."""

    what: str
    label: str
    options: dict[str, Any]

    def entry(self) -> Any:
        return fh.keep(self.what, label=self.label, **self.options)

    def taken(self, value: Any) -> Any:
        """Converts a value as the options say."""
        part, index, dtype = map(self.options.get, ("output_index", "slice", "dtype"))
        if part is not None:
            value = value[part]
        if isinstance(value, tuple):
            return tuple(
                Keep(self.what, "", {**self.options, "output_index": None}).taken(each)
                for each in value
            )
        value = value.detach()
        value = value if index is None else value[index]
        return (value if dtype is None else value.to(dtype)).clone()

    def limited(self, values: list[Any]) -> Any:
        """Calls that it stores."""
        calls = self.options.get("calls", "last")
        if calls == "last":
            return values[-1]
        return values if calls == "all" else values[-calls:]


def names_of(what: str) -> list[str]:
    return ["blocks.0.linear", "blocks.1.linear"] if "*" in what else [what]


vectors = st.integers(0, 7).map(
    lambda seed: torch.randn(WIDTH, generator=torch.Generator().manual_seed(seed))
)
factors = st.sampled_from((0.5, -2.0, 3.0))


def interventions(output_index: Any) -> st.SearchStrategy[Any]:
    def make(cls: Any, *values: Any) -> st.SearchStrategy[Any]:
        return st.builds(lambda *drawn: cls(*drawn, output_index=output_index), *values)

    return st.one_of(
        make(fh.Add, vectors, factors),
        make(fh.Scale, factors),
        make(fh.Ablate, vectors),
        make(fh.Clamp, vectors, st.sampled_from((None, -0.1)), st.just(0.1)),
        make(fh.Replace, vectors),
        make(fh.Zero),
    )


@st.composite
def changes(draw: st.DrawFn, *, graph: bool = False) -> On:
    what = draw(st.sampled_from((*TENSORS, *PAIRS)))
    phases = ("forward_pre", "forward") if graph else ("forward_pre", "forward", *PHASES)
    phase = draw(st.sampled_from(phases))
    hook: Any
    if phase.startswith("forward") and draw(st.booleans()):
        pair = what in PAIRS and phase == "forward"
        hook = draw(interventions(draw(st.sampled_from((0, 1, -1, "sum"))) if pair else None))
    else:
        hook = Hook(phase, draw(factors), phase == "forward_pre" and draw(st.booleans()))
    return On(what, hook, phase, draw(st.sampled_from((0, 0, 2, -1))), draw(st.booleans()))


@st.composite
def keeps(draw: st.DrawFn, label: str) -> Keep:
    what = draw(st.sampled_from((*TENSORS, *PAIRS)))
    options: dict[str, Any] = {}
    if draw(st.booleans()):
        options["inputs"] = True
    elif what in PAIRS and draw(st.booleans()):
        options["output_index"] = draw(st.sampled_from((0, 1, -1)))
    if draw(st.booleans()):
        options["dtype"] = draw(st.sampled_from((torch.float16, torch.float64)))
    if draw(st.booleans()):
        options["slice"] = draw(st.sampled_from((0, slice(1), (..., slice(2)))))
    if draw(st.booleans()):
        options["calls"] = draw(st.sampled_from(("all", 1, 3)))
    if draw(st.booleans()):
        options["copy"] = draw(st.sampled_from(("clone", "ref")))
    return Keep(what, label, options)


@st.composite
def plans(draw: st.DrawFn, *, graph: bool = False) -> list[On | Keep]:
    entries: list[On | Keep] = draw(st.lists(changes(graph=graph), max_size=4))
    for number in range(draw(st.integers(0, 2))):
        entries.insert(draw(st.integers(0, len(entries))), draw(keeps(f"k{number}")))
    assume(all(in_order(entries, place) for place in range(len(entries))))
    return entries


def key_of(entry: On, rank: int) -> tuple[int, bool, int]:
    """Sorts as hooks fire."""
    return (-entry.priority, not entry.prepend, -rank if entry.prepend else rank)


def neighbours(entries: list[On | Keep], place: int, name: str) -> tuple[list[Any], list[Any]]:
    """The keys of the changes of a module before and after a capture of it, as they stand."""
    capture = entries[place]
    assert isinstance(capture, Keep)
    phase = "forward_pre" if capture.options.get("inputs") else "forward"
    keys = [
        (other, key_of(entry, other))
        for other, entry in enumerate(entries)
        if isinstance(entry, On) and entry.phase == phase and name in names_of(entry.what)
    ]
    return [key for other, key in keys if other < place], [
        key for other, key in keys if other > place
    ]


def in_order(entries: list[On | Keep], place: int) -> bool:
    """True for a change, and for a capture that stands where the changes run in their order."""
    entry = entries[place]
    if isinstance(entry, On):
        return True
    both = [neighbours(entries, place, name) for name in names_of(entry.what)]
    return all(not behind or not ahead or max(ahead) < min(behind) for ahead, behind in both)


PLANS = 3
calls = st.tuples(st.just("call"), st.integers(0, 3))


def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    steps = st.lists(st.one_of(calls, inner), min_size=1, max_size=3)
    return st.one_of(
        st.tuples(st.just("open"), st.integers(0, PLANS - 1), steps),
        st.tuples(st.just("open"), st.integers(0, PLANS - 1), steps),
        st.tuples(st.just("scope"), changes(), steps),
        st.tuples(st.sampled_from(("wrapped", "thread", "to_thread")), steps),
        st.tuples(st.just("tasks"), steps, steps),
    )


programs = st.lists(st.recursive(calls, nested, max_leaves=8), min_size=1, max_size=3)
Step = tuple[Any, ...]


class Opened:
    """Hooks that a context entered, and the oracle's captures for them."""

    def __init__(self, entries: list[Any], rank: int, scope: Any) -> None:
        self.entries = entries
        self.rank = rank
        self.scope = scope
        self.kept: dict[str, list[Any]] = {}


class Run:
    """One model with its plans prepared, and the oracle."""

    def __init__(self, some: Iterable[list[On | Keep]]) -> None:
        torch.manual_seed(1)
        self.model = Net(WIDTH)
        self.plain = copy.deepcopy(self.model)
        self.plans = [*some]
        made = [fh.Plan(*(each.entry() for each in entries)) for entries in self.plans]
        self.prepared = [plan.prepare(self.model) for plan in made]
        self.ranks = itertools.count(PLANS)
        self.call: Callable[[Tensor], Tensor] = self.model

    def by_hand(self, stack: tuple[Opened, ...]) -> nn.Module:
        """A plain copy with the hooks of all that is open."""
        model = copy.deepcopy(self.plain)
        hooks: list[tuple[Any, On | Keep, str, Opened]] = []
        for opened in stack:
            for place, entry in enumerate(opened.entries):
                rank = 100 * opened.rank + place
                for name in names_of(entry.what):
                    if isinstance(entry, On):
                        key: Any = key_of(entry, rank)
                    elif behind := neighbours(opened.entries, place, name)[1]:
                        # Just ahead of the first change after it; of its priority, or of the one
                        # above if that change goes ahead of all its changes.
                        priority, appended, _ = min(behind)
                        key = (priority if appended else priority - 1, True, rank)
                    else:
                        key = (math.inf, True, rank)
                    hooks.append((key, entry, name, opened))
        for _, entry, name, opened in sorted(hooks, key=lambda each: each[0]):
            if isinstance(entry, On):
                getattr(model.get_submodule(name), PHASES[entry.phase])(entry.plain())
            else:
                self.keep_by_hand(model, entry, name, opened.kept)
        return model

    @staticmethod
    def keep_by_hand(model: nn.Module, entry: Keep, name: str, kept: dict[str, list[Any]]) -> None:
        values = kept.setdefault(f"{entry.label}:{name}", [])
        module = model.get_submodule(name)
        if entry.options.get("inputs"):
            module.register_forward_pre_hook(lambda _m, args: values.append(entry.taken(args[0])))
        else:
            module.register_forward_hook(lambda _m, _args, out: values.append(entry.taken(out)))

    def check_call(self, seed: int, stack: tuple[Opened, ...]) -> None:
        expected = self.by_hand(stack)
        given_x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(seed))
        results = []
        for call, model in ((self.call, self.model), (expected, expected)):
            x = given_x.clone().requires_grad_()
            y = call(x)
            inputs = [x, *model.parameters()]
            loss = y.square().sum()
            grads = torch.autograd.grad(loss, inputs, allow_unused=True) if y.requires_grad else ()
            results.append((y, *grads))
        assert_same(results[0], results[1])

    def steps(self, program: list[Step], stack: tuple[Opened, ...]) -> Generator[None]:
        """Runs a program; a task gives way at each step."""
        for kind, *rest in program:
            yield
            if kind == "call":
                self.check_call(rest[0], stack)
            elif kind == "open":
                number, inner = rest
                with self.prepared[number].open() as request:
                    opened = Opened(self.plans[number], number, request)
                    yield from self.steps(inner, (*stack, opened))
                    self.check_kept(request, opened)
                self.check_kept(request, opened)
            elif kind == "scope":
                entry, inner = rest
                with fh.scope() as scope:
                    options: dict[str, Any] = {"priority": entry.priority, "prepend": entry.prepend}
                    hook = entry.entry().hook
                    fh.register(
                        self.model, entry.what, hook, phase=entry.phase, scope=scope, **options
                    )
                    opened = Opened([entry], next(self.ranks), scope)
                    yield from self.steps(inner, (*stack, opened))
            else:
                self.elsewhere(kind, rest, stack)

    def elsewhere(self, kind: str, rest: list[Any], stack: tuple[Opened, ...]) -> None:
        """Runs programs in other threads and tasks."""
        if kind == "thread":  # inherits nothing
            in_thread(lambda: self.run(rest[0], ()))
        elif kind == "wrapped":
            work = lambda: self.run(rest[0], stack)  # noqa: E731
            in_thread(stack[-1].scope.wrap(work) if stack else work)
        elif kind == "to_thread":
            context = contextvars.copy_context()
            in_thread(lambda: context.run(self.run, rest[0], stack))
        else:
            context = contextvars.copy_context()
            in_thread(lambda: context.run(asyncio.run, self.tasks(rest, stack)))

    async def tasks(self, some: list[list[Step]], stack: tuple[Opened, ...]) -> None:
        async def task(program: list[Step]) -> None:
            for _ in self.steps(program, stack):
                await asyncio.sleep(0)

        await asyncio.gather(*map(task, some))

    def run(self, program: list[Step], stack: tuple[Opened, ...] = ()) -> None:
        for _ in self.steps(program, stack):
            pass

    @staticmethod
    def check_kept(request: fh.typing.Request, opened: Opened) -> None:
        kept = {name: values for name, values in opened.kept.items() if values}
        assert set(request.acts) == set(kept)
        for entry in opened.entries:
            if isinstance(entry, Keep):
                for name in names_of(entry.what):
                    key = f"{entry.label}:{name}"
                    if key in kept:
                        assert_same(request.acts[key], entry.limited(kept[key]))

    def close(self) -> None:
        for prepared in self.prepared:
            prepared.close()
        assert instrumented(self.model) == []
        assert frames.get() == ()


def few(examples: int) -> settings:
    return settings(
        max_examples=examples,
        deadline=None,
        suppress_health_check=[*HealthCheck],
    )


some_plans = st.lists(plans(), min_size=PLANS, max_size=PLANS)
# Modules that a random program never runs, and inputs that random hooks cut off from gradients.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ferrohook.errors.NeverFiredWarning"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning"),
]


@few(amount(60, whole=150))
@given(some=some_plans, program=programs)
def test_requests_do_what_the_same_hooks_do(
    some: list[list[On | Keep]], program: list[Step]
) -> None:
    run = Run(some)
    try:
        run.run(program)
    finally:
        run.close()


@few(amount(15, whole=40))
@given(some=some_plans, programs=st.lists(programs, min_size=4, max_size=4))
def test_requests_at_a_time_do_what_the_same_hooks_do(
    some: list[list[On | Keep]], programs: list[list[Step]]
) -> None:
    run = Run(some)
    try:
        run_together(*(functools.partial(run.run, program) for program in programs))
    finally:
        run.close()


def nested_openings(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    steps = st.lists(st.one_of(calls, inner), min_size=1, max_size=2)
    return st.one_of(
        st.tuples(st.just("open"), st.integers(0, PLANS - 1), steps),
        st.tuples(st.just("open"), st.integers(0, PLANS - 1), steps),
        st.tuples(st.just("scope"), changes(graph=True), steps),
        st.tuples(st.just("wrapped"), steps),
    )


@compiled
@few(amount(6, whole=12))
@given(
    some=st.lists(plans(graph=True), min_size=PLANS, max_size=PLANS),
    program=st.lists(st.recursive(calls, nested_openings, max_leaves=4), min_size=1, max_size=2),
)
def test_compiled_requests_do_what_the_same_hooks_do(
    some: list[list[On | Keep]], program: list[Step]
) -> None:
    torch._dynamo.reset()
    run = Run(some)
    # A capture of a whole tuple breaks the graph.
    pairs = any(
        isinstance(entry, Keep)
        and entry.what in PAIRS
        and not entry.options.keys() & {"inputs", "output_index"}
        for entries in some
        for entry in entries
    )
    run.call = torch.compile(run.model, backend="eager", fullgraph=not pairs)
    try:
        run.run(program)
    finally:
        run.close()

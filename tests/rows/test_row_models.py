"""Random batches of models of many kinds, against a loop over the requests by hand."""

from __future__ import annotations

import contextlib
import copy
import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import ferrohook as fh
from ferrohook._core import frames
from support.amounts import amount
from support.internals import instrumented
from support.row_models import MODELS, WIDTH, RowModel, pick
from support.rows import Function, Keep, Loop, Member, On, assert_close, assert_same, leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

pytestmark = pytest.mark.filterwarnings("ignore::ferrohook.errors.NeverFiredWarning")

ROWS = (5, 6, 7, 8)
"""Sizes of batches: none equals the size of another dimension."""
CALLS = 2
GRADIENTS = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.1}
"""Tolerances, relative to the largest value of a gradient."""

factors = st.sampled_from((0.5, -2.0, 3.0))


@st.composite
def vectors(draw: st.DrawFn) -> Tensor:
    shape = draw(st.sampled_from(((WIDTH,), (WIDTH,), (WIDTH,), (1,))))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 7)))
    return torch.randn(shape, generator=generator)


@st.composite
def interventions(draw: st.DrawFn, part: Any) -> Any:
    kind = draw(st.sampled_from((fh.Add, fh.Scale, fh.Ablate, fh.Clamp, fh.Replace, fh.Zero)))
    direction = draw(vectors().filter(lambda vector: len(vector) == WIDTH))
    values: dict[Any, tuple[Any, ...]] = {
        fh.Add: (draw(vectors()), draw(factors)),
        fh.Scale: (draw(factors),),
        fh.Ablate: (direction,),
        fh.Clamp: (direction, draw(st.sampled_from((None, -0.1))), 0.1),
        fh.Replace: (draw(vectors()),),
        fh.Zero: (),
    }
    return kind(*values[kind], output_index=part)


class Focus(NamedTuple):
    """Modules that the hooks of a case meet on."""

    model: RowModel
    names: list[str]
    native: bool
    """True if no hook is a Python function."""


@st.composite
def changes(draw: st.DrawFn, focus: Focus) -> On:
    model = focus.model
    what = draw(st.sampled_from(focus.names))
    phase = draw(st.sampled_from(("forward_pre", "forward", "forward")))
    parts = model.parts[what]
    takes_input = what not in {"nest", "experts.0", "experts.2", "attend"}
    hook: Any
    native = focus.native or draw(st.booleans())
    if native and (takes_input if phase == "forward_pre" else parts):
        part = None if phase == "forward_pre" else draw(st.sampled_from(parts))
        hook = draw(interventions(part))
    else:
        acts = ["scale", "mix", "observe"]
        if phase == "forward_pre" and takes_input:
            acts.append("typed")
        act = draw(st.sampled_from(acts))
        with_kwargs = act != "typed" and draw(st.booleans())
        hook = Function(phase, act, draw(factors), with_kwargs)
    # Hooks of one scope or plan alone are ordered by these.
    return On(what, hook, phase, draw(st.sampled_from((0, 0, 2, -1))), draw(st.booleans()))


@st.composite
def keeps(draw: st.DrawFn, focus: Focus, label: str) -> Keep:
    model = focus.model
    what = draw(st.sampled_from(focus.names))
    single = what not in {"nest", "experts.0", "experts.2", "attend"}
    calls = draw(st.sampled_from(("last", "all", 2)))
    if single and draw(st.booleans()):
        return Keep(what, label, inputs=True, calls=calls)
    parts = [None, *(part for part in model.parts[what] if part != "sum")]
    return Keep(what, label, part=draw(st.sampled_from(parts)), calls=calls)


@st.composite
def entries(draw: st.DrawFn, focus: Focus, way: str) -> tuple[On | Keep, ...]:
    if way == "capture":
        return (draw(keeps(focus, "")),)
    made: list[On | Keep] = draw(st.lists(changes(focus), max_size=4))
    # Captures ahead of changes are drawn in tests/plans/test_plans_machine.py.
    captures = range(draw(st.integers(0, 2)) if way == "plan" else 0)
    return (*made, *(draw(keeps(focus, f"k{number}")) for number in captures))


@st.composite
def layouts(draw: st.DrawFn, rows: int) -> list[tuple[tuple[int, ...], Any]]:
    """Rows of each request, and the form in which they are handed over; the rest is padding."""
    order = [*range(rows)]
    style = draw(st.sampled_from(("blocks", "scattered", "strided")))
    if style == "strided":
        step = draw(st.integers(2, 3))
        return [(tuple(order[start::step]), slice(start, None, step)) for start in range(step - 1)]
    if style == "scattered":
        order = draw(st.permutations(order))
    count = draw(st.integers(1, 4))
    cuts = sorted(draw(st.lists(st.integers(0, rows), min_size=count + 1, max_size=count + 1)))
    found = []
    for start, end in itertools.pairwise(cuts):
        chosen = tuple(order[start:end])
        if not chosen:
            continue
        forms: list[Any] = [list(chosen), torch.tensor(chosen)]
        if len(chosen) == 1:
            forms.append(chosen[0])
        if style == "blocks":
            forms += [slice(start, end), range(start, end)]
        found.append((chosen, draw(st.sampled_from(forms))))
    return found


class Case:
    """A model, a batch of it, and the calls made in it."""

    def __init__(
        self, make: Callable[[], RowModel], rows: int, dtype: torch.dtype, seed: int
    ) -> None:
        torch.manual_seed(seed)
        self.model = make().to(dtype).eval()
        self.plain = copy.deepcopy(self.model)
        self.rows = rows
        self.dtype = dtype
        like = torch.empty(0, dtype=dtype)
        generator = torch.Generator().manual_seed(seed)
        self.calls = [self.model.arguments(rows, like, generator) for _ in range(CALLS)]
        self.members: list[Member] = []
        self.sized = True

    def __repr__(self) -> str:
        shown = "\n".join(f"  {member}" for member in self.members)
        return f"{type(self.model).__name__}, {self.rows} rows, {self.dtype}:\n{shown}"

    def outputs(self, call: Callable[..., Any]) -> list[Any]:
        """Outputs of the calls, and the gradients of each."""
        found = []
        for arguments in self.calls:
            x = arguments["x"].clone().requires_grad_()
            y = call(**(arguments | {"x": x}))
            model = call.__self__ if hasattr(call, "__self__") else call
            variables = [x, *model.parameters()]  # type: ignore[attr-defined]
            loss = sum(leaf.square().sum() for leaf in leaves(y))
            grads: Sequence[Tensor | None] = [None] * len(variables)
            if isinstance(loss, Tensor) and loss.requires_grad:
                grads = torch.autograd.grad(loss, variables, allow_unused=True)
            found.append(
                [
                    y,
                    *(
                        torch.zeros_like(variable) if grad is None else grad
                        for variable, grad in zip(variables, grads, strict=True)
                    ),
                ]
            )
        return found

    def by_hand(self, members: list[Member]) -> list[Any]:
        model = copy.deepcopy(self.plain)
        Loop(model, members, self.rows)
        return self.outputs(model)

    def in_a_batch(self, members: list[Member]) -> list[Any]:
        """Outputs of the calls in one batch; what each member keeps and logs goes into it."""
        with contextlib.ExitStack() as stack:
            opened = {stack.enter_context(self.opened(member)): member for member in members}
            rows = {request: member.form for request, member in opened.items()}
            gathered = self.model.gathered(self.rows)
            if all(member.way == "scope" for member in members):  # names no model
                gathered = {
                    module: gathered[glob]
                    for glob in gathered
                    for module in fh.select(self.model, glob).values()
                }
            size = self.rows if self.sized else None
            with fh.batch(rows, dim=self.model.dim, size=size, gathered=gathered or None):
                found = self.outputs(self.model)
            for request, member in opened.items():
                member.acts = {} if member.way == "scope" else dict(request.acts)
                assert request.error is None
        return found

    @contextlib.contextmanager
    def opened(self, member: Member) -> Iterator[Any]:
        """A request, scope or capture with the member's hooks, not entered."""
        dim = self.model.dim
        if member.way == "plan":
            parts = [
                fh.on(entry.what, entry.made(dim, member.log), **entry.options)
                if isinstance(entry, On)
                else fh.keep(entry.what, label=entry.label, **entry.options)
                for entry in member.entries
            ]
            with fh.Plan(*parts).prepare(self.model) as prepared:
                request = prepared.open()
                yield request
                request.close()
        elif member.way == "scope":
            scope = fh.scope()
            for entry in member.entries:
                assert isinstance(entry, On)
                hook = entry.made(dim, member.log)
                fh.register(self.model, entry.what, hook, scope=scope, **entry.options)
            yield scope
            scope.close()
        else:
            (entry,) = member.entries
            assert isinstance(entry, Keep)
            capture = fh.capture(self.model, entry.what, **entry.options)
            yield capture
            capture.close()

    def kinked(self, members: list[Member]) -> bool:
        """True if gradients may be at a kink: with so few digits a component is often the bound."""
        clamps = (
            isinstance(entry, On) and isinstance(entry.hook, fh.Clamp)
            for member in members
            for entry in member.entries
        )
        return self.dtype == torch.bfloat16 and any(clamps)

    def close(self) -> None:
        assert instrumented(self.model) == []
        assert frames.get() == ()


@st.composite
def cases(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...] = (torch.float64,)) -> Case:
    make = draw(st.sampled_from(MODELS))
    case = Case(
        make, draw(st.sampled_from(ROWS)), draw(st.sampled_from(dtypes)), draw(st.integers(0, 9))
    )
    names = draw(st.lists(st.sampled_from([*case.model.parts]), min_size=1, max_size=2))
    focus = Focus(case.model, names, draw(st.booleans()))
    for rows, form in draw(layouts(case.rows).filter(bool)):
        way = draw(st.sampled_from(("plan", "plan", "plan", "scope", "capture")))
        case.members.append(Member(rows, form, draw(entries(focus, way)), way))
    open_ended = any(
        isinstance(each.form, slice) and each.form.stop is None for each in case.members
    )
    # Read from the call of a request's model, if there is one.
    if not open_ended and all(each.way == "plan" for each in case.members):
        case.sized = draw(st.booleans())
    return case


def few(examples: int) -> settings:
    return settings(max_examples=examples, deadline=None, suppress_health_check=[*HealthCheck])


ANY = (torch.float64, torch.float32, torch.bfloat16)


def check(case: Case, ours: list[Any], members: list[Member]) -> list[Member]:
    """Compares a batch with the loop by hand, which it returns the members of."""
    hands = [member.fresh() for member in members]
    for (y, *grads), (expected, *others) in zip(ours, case.by_hand(hands), strict=True):
        assert_same(y, expected)
        # Terms of a gradient are summed in another order.
        if not case.kinked(members):
            assert_close(grads, others, relative=GRADIENTS[case.dtype])
    for member, hand in zip(members, hands, strict=True):
        assert_same(member.acts, hand.acts)
        assert_same(member.log, hand.log)
    return hands


@few(amount(80, whole=200))
@given(case=cases(ANY))
def test_a_batch_is_bit_for_bit_a_loop_over_requests(case: Case) -> None:
    check(case, case.in_a_batch(case.members), case.members)
    case.close()


@few(amount(50, whole=100))
@given(case=cases(ANY), data=st.data())
def test_rows_of_others_are_those_of_the_batch_without_a_request(
    case: Case, data: st.DataObject
) -> None:
    if not case.members:
        return
    without = data.draw(st.sampled_from(case.members))
    others = [member.fresh() for member in case.members if member is not without]
    full = case.in_a_batch(case.members)
    less = case.in_a_batch(others) if others else case.outputs(case.model)
    rows = [row for row in range(case.rows) if row not in without.rows]
    for (y, *_), (expected, *_) in zip(full, less, strict=True):
        for one, other in zip(leaves(y), leaves(expected), strict=True):
            assert_same(pick(one, case.model.dim, rows), pick(other, case.model.dim, rows))
    left = [member for member in case.members if member is not without]
    for member, other in zip(left, others, strict=True):
        assert_same(member.own_acts(case.model), other.own_acts(case.model))
        if not case.model.whole:  # a tensor that all see whole has the rows of the one without
            assert_same(member.log, other.log)
    case.close()


@few(amount(50, whole=100))
@given(case=cases())
def test_a_request_in_a_batch_is_close_to_it_alone(case: Case) -> None:
    found = case.in_a_batch(case.members)
    for member in case.members:
        alone = member.fresh()
        model = copy.deepcopy(case.plain)
        Loop(model, [alone], None)
        for arguments, (y, *_) in zip(case.calls, found, strict=True):
            expected = leaves(model(**case.model.alone(arguments, member.rows)))
            ours = [pick(leaf, case.model.dim, member.rows) for leaf in leaves(y)]
            assert_close(ours, expected, relative=1e-6)
        if not case.model.gathered(case.rows):  # there the order of rows is another
            acts = (each.own_acts(case.model) for each in (member, alone))
            assert_close(*acts, relative=1e-6)
    case.close()

"""Random batches on the product, compared with the oracle."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import logging
import re
import sys
import threading
import traceback
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import ferrohook as fh
from ferrohook._core import cache_programs, frames
from support.batches import values
from support.batches.cases import (
    ALL,
    BAD,
    BATCH,
    NATIVE,
    PLAIN,
    WIDTH,
    Call,
    Case,
    Event,
    Gate,
    Hook,
    Keep,
    Step,
    at_of,
    draw,
    hooks_of,
)
from support.batches.oracle import Seen, gradient, outcomes
from support.capture import tensors_of
from support.internals import instrumented
from support.limits import LIMIT
from support.threads import Together, in_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from support.batches.oracle import Oracle

REFUSALS = (fh.errors.RowsError, fh.HookTypeError, ValueError, TypeError)
OWN = str(Path(fh.__file__).parent)
"""Folder in which interrupts come; whether torch's functions run depends on its caches."""


class WrongBatchError(AssertionError):
    """A batch that is not as the oracle has it."""


def require(holds: object, message: str) -> None:
    if not holds:
        raise WrongBatchError(message)


class Meanwhile(TorchDispatchMode):
    """Does something at an operation, as another thread might."""

    def __init__(self, number: int, act: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.left, self.act, self.reached = number, act, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.left == 0:
            self.reached = True
            self.act()
        self.left -= 1
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def interrupted(at: int) -> Iterator[None]:
    """Raises KeyboardInterrupt at the start of a Python function, by number."""
    left = at

    def profile(frame: Any, event: str, _arg: object) -> None:
        nonlocal left
        # Nothing is raised out of destructors, which close generators too.
        code = frame.f_code
        destroys = code.co_name == "__del__" or code.co_flags & inspect.CO_GENERATOR
        if event == "call" and code.co_filename.startswith(OWN) and not destroys:
            left -= 1
            if left == 0:
                sys.setprofile(None)
                raise KeyboardInterrupt

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(before)


class Run:
    """Runs the steps of a case on the product."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.model = values.Line(case)
        self.logs: dict[tuple[Any, ...], list[Any]] = {}
        self.done: set[tuple[Any, ...]] = set()
        self.batch: Any = None
        self.former: Any = None
        """Batch that was left last."""
        self.live: dict[int, tuple[int, ...]] = {}
        """Rows of the members of the batch."""
        self.violations: list[str] = []
        self.closed: set[int] = set()
        self.expired: set[int] = set()
        self.used: set[Any] = set()
        self.ended: dict[int, list[int]] = {}
        """Captures that an interrupt closed, by step."""
        self.reached: dict[tuple[int, int], bool] = {}
        self.added: dict[int | str, list[Any]] = {}
        self.globals: list[Any] = []
        self.open: list[Any] = []
        self.failures: dict[int, BaseException] = {}
        """Errors that `fail` was called with."""
        self.stack = contextlib.ExitStack()
        if case.sites:
            self.stack.enter_context(
                fh.rows.sites(
                    self.model,
                    ["a", "head"],
                    max_requests=8,
                    max_rows=32,
                    width=WIDTH,
                    dtype=torch.float32,
                    device="cpu",
                    dim=case.dim,
                )
            )
        for number, hook in enumerate(case.whole):
            self.globals.append(self._register(hook, None, (ALL, number), None))
        self.prepared: dict[int, Any] = {}
        self.members: list[Any] = []
        for number, member in enumerate(case.members):
            self.members.append(self._opened(number, member))

    # --- Members --------------------------------------------------------------------------------

    def _opened(self, number: int, member: Any) -> Any:
        if member.way == "scope":
            scope = fh.scope()
            for place, hook in enumerate(member.entries):
                self._register(hook, scope, (number, place), number)
            return scope
        if member.way == "capture":
            (keep,) = member.entries
            return fh.capture(self.model, keep.what, **self._options(keep))
        if member.twin is not None:
            return self.prepared[member.twin].open()
        entries: list[Any] = []
        kept = 0
        for place, entry in enumerate(member.entries):
            at = at_of(entry.at)
            if isinstance(entry, Gate):
                entries.append(values.gate(entry, at))
            elif isinstance(entry, Keep):
                options = self._options(entry)
                entries.append(fh.keep(entry.what, at=at, label=f"k{kept}", **options))
                kept += 1
            else:
                hook, options = self._made(entry, (number, place), number)
                options["strength"] = entry.strength
                options["when"] = None if entry.when is None else values.condition(entry.when)
                entries.append(fh.on(entry.what, hook, at=at, **options))
        self.prepared[number] = fh.Plan(*entries).prepare(self.model)
        return self.prepared[number].open()

    def _options(self, keep: Keep) -> dict[str, Any]:
        return {
            "inputs": keep.inputs,
            "output_index": keep.part,
            "calls": keep.calls,
            "slice": keep.cut,
            "copy": keep.copy,
        }

    def _register(self, hook: Hook, scope: Any, source: tuple[Any, ...], owner: Any) -> Any:
        made, options = self._made(hook, source, owner)
        audience: Any = "global" if scope is None else scope
        return fh.register(self.model, hook.what, made, scope=audience, **options)

    def _made(self, hook: Hook, source: tuple[Any, ...], owner: Any) -> tuple[Any, dict[str, Any]]:  # noqa: C901 (a hook of each kind)
        case = self.case
        options: dict[str, Any] = {
            "phase": hook.phase,
            "priority": hook.priority,
            "prepend": hook.prepend,
        }
        if hook.kind in NATIVE:
            return values.intervention(case, hook), options

        def check() -> None:
            # Of requests that share a plan any may be the one.
            if isinstance(owner, int) and owner in self.closed and not self._shared(owner):
                self.violations.append(f"{hook} fired after its owner {owner} was closed")

        def act() -> None:
            if hook.does and source not in self.done:
                self.done.add(source)
                for event in hook.does:
                    self.happen(event)

        def log(value: Any) -> None:
            found = [value] if isinstance(value, Tensor) else [*value]
            self.logs.setdefault(source, []).append([each.detach().clone() for each in found])

        def changed(value: Any) -> Any:
            x = value if isinstance(value, Tensor) else value[0]
            dim = min(case.dim, x.dim() - 2)
            if hook.kind == "raise":
                raise ValueError
            if hook.kind == "interrupt":
                raise KeyboardInterrupt
            if hook.kind in BAD:
                new = values.spoiled(x, hook)
            elif hook.kind == "mix":
                new = values.mixed(x, dim)
            else:
                new = values.times(x, hook.seed)
            return new if isinstance(value, Tensor) else (new, *value[1:])

        if hook.kind == "typed":
            return fh.ForwardPreHook(lambda x: values.times(x, hook.seed)), options
        if hook.kind == "typed observe":

            def watch(_input: Any, output: Any) -> None:
                check()
                log(output)
                act()

            return fh.ForwardHook(watch), options

        def plain(_module: Any, args: Any, *output: Any) -> Any:
            check()
            value = output[0] if output else args[0]
            result: Any = None
            if hook.kind == "observe":
                log(value)
            elif hook.kind == "write":
                values.write(value if isinstance(value, Tensor) else value[0], hook.seed)
            else:
                result = changed(value)
                result = result if output else (result,)
            act()
            return result

        plain.__qualname__ = f"{hook.kind} kind"
        return plain, options

    def _shared(self, owner: int) -> bool:
        return any(each.twin == owner for each in self.case.members)

    # --- Events ---------------------------------------------------------------------------------

    def happen(self, event: Event) -> None:
        if event.thread:
            thread = threading.Thread(target=self._happen, args=[event])
            thread.start()
            thread.join()
        else:
            self._happen(event)

    def _happen(self, event: Event) -> None:
        whose = event.whose
        if isinstance(whose, int) and whose >= len(self.members):
            return
        if event.kind in {"register", "remove"}:
            self._change_hooks(event)
            return
        assert isinstance(whose, int)
        member = self.members[whose]
        if event.kind == "close":
            member.close()
            self.closed.add(whose)
            return
        if self.case.members[whose].way != "plan" or member.closed or member in self.open:
            return
        if event.kind == "fail":
            member.fail(RuntimeError("by others"))
        else:
            member.expire(0.0)
            self.expired.add(whose)

    def _change_hooks(self, event: Event) -> None:
        whose = event.whose
        if whose == BATCH and self.batch is None:
            return
        added = self.added.setdefault(whose, [])
        if event.kind == "remove":
            if added:
                added.pop().remove()
            return
        assert event.hook is not None
        scope: Any = None
        if isinstance(whose, int):
            scope = self.members[whose]
            if self.case.members[whose].way == "capture" or scope.closed:
                return
        elif whose == BATCH:
            scope = self.batch
        added.append(self._register(event.hook, scope, ("event", id(event)), whose))
        if whose == ALL:
            self.globals.append(added[-1])

    # --- Steps ----------------------------------------------------------------------------------

    def step(self, number: int, step: Step) -> tuple[str, list[Seen]]:  # noqa: C901, PLR0912 (each point in time)
        for event in step.before:
            self.happen(event)
        self.model.b.table = values.table(self.case, step)
        if step.nested:
            return self._nested(number, step)
        live = {each: rows for each, rows in step.rows.items() if not self.members[each].closed}
        if not any(live.values()):
            return "nobody", []
        self.added[BATCH] = []
        outer = None if step.outer is None else self.members[step.outer]
        ended = outer is None or outer.closed or outer.failed or outer in self.used
        if ended or step.outer in self.expired:
            outer = None
        if step.knock is not None:
            self._knock(step, live)
        if step.interrupt is not None:
            self._interrupt(number, step, live)
            live = {each: own for each, own in live.items() if not self.members[each].closed}
            if not any(live.values()):
                return "nobody", []
        self.model.index = (
            None if step.gathered is None else torch.tensor(step.gathered, dtype=torch.long)
        )
        self.model.flat = step.flat
        self.live = live
        batch = self._batch(step, live)
        self.batch = batch
        if step.late == "made":
            self._move(step.positions)
        for event in step.made:
            self.happen(event)
        try:
            with contextlib.ExitStack() as stack:
                if outer is not None and not (outer.closed or step.outer in self.expired):
                    stack.enter_context(outer)
                    self.open = [outer]
                try:
                    stack.enter_context(batch)
                except fh.HookError as error:
                    batch.close()  # and the hooks that it was given
                    return f"refused {type(error).__name__}", []
                self.used |= set(batch.members)
                if step.late == "entered":
                    self._move(step.positions)
                return "entered", self._calls(number, step)
        finally:
            self.former, self.batch = batch, None
            self.open = []
            if outer is not None:
                outer.close()

    def _batch(self, step: Step, live: dict[int, tuple[int, ...]]) -> Any:
        rows = {
            self.members[each]: form(own, step.forms[each], step.size) for each, own in live.items()
        }
        options: dict[str, Any] = {}
        if self.case.sized(step):
            options["size"] = step.size
        if step.positions is not None and step.late is None:
            options["positions"] = torch.tensor(step.positions)
            options["lengths"] = self._lengths()
        if step.gathered is not None:
            index: Any = torch.tensor(step.gathered, dtype=torch.long)
            if step.form != "tensor":
                if step.form == "far":
                    index[-1] = step.size + 3
                elif step.form == "long":
                    index = torch.cat([index, index[:1]])
                index = functools.partial(returned, index)
            options["gathered"] = {self.model.head: (index, 0) if step.flat else index}
        return fh.batch(rows, self.case.dim, **options, warn=False)

    def _lengths(self) -> dict[Any, int]:
        members = self.case.members
        plans = [at for at in self.live if members[at].way == "plan"]
        return {self.members[at]: members[at].prompt for at in plans}

    def _move(self, positions: Any, *, told: bool = True) -> None:
        self.batch.move(torch.tensor(positions), self._lengths() if told else None)

    def _moved(self, step: Step, call: Call) -> Any:
        """Moves the batch before a call, or returns a context whose call does."""
        if call.strays:
            self._stray(step)
        if call.wrong is not None:
            self._move_wrong(step, call.wrong)
        if call.moved is None:
            return contextlib.nullcontext()
        move = functools.partial(self._move, call.moved, told=call.told)
        if call.way == "hook":
            return self.model.register_forward_pre_hook(lambda *_: move(), prepend=True)
        in_thread(move) if call.way == "thread" else move()
        return contextlib.nullcontext()

    def _move_wrong(self, step: Step, what: str) -> None:
        """Calls `move` with arguments that it refuses."""
        size = step.size
        positions: dict[str, Any] = {
            "float positions": torch.zeros(size),
            "short positions": torch.zeros(size - 1, dtype=torch.long),
            "no tensor": [0] * size,
        }
        lengths = dict.fromkeys(self.batch.members, 1.5)
        try:
            self.batch.move(positions.get(what, torch.zeros(size, dtype=torch.long)), lengths)
        except REFUSALS:
            return
        require(False, f"move takes {what}")

    def _stray(self, step: Step) -> None:
        """Moves two batches that do not run: one that was left, and one that is not entered."""
        positions = torch.full((step.size, *[self.case.columns] * (self.case.columns > 0)), 2)
        lengths = dict.fromkeys(self._lengths(), 7)
        self._batch(step, self.live).move(positions, lengths)
        if self.former is None:
            return
        try:
            self.former.move(positions)
        except fh.HookError as error:
            require("was left" in str(error), f"a batch that was left moves: {error}")
            return
        require(False, "a batch that was left moves")

    def _knock(self, step: Step, live: dict[int, tuple[int, ...]]) -> None:
        """Calls `fh.batch` with arguments that it refuses."""
        good = {self.members[each]: [*own] for each, own in live.items()}
        member, size = next(iter(good)), step.size
        wrong: dict[str, tuple[dict[Any, Any], dict[str, Any]]] = {
            "huge steps": ({member: slice(0, 2**42, 2)}, {}),
            "overlap": ({member: [0, 1, 0]}, {}),
            "out of range": ({member: [0, size]}, {}),
            "negative dim": (good, {"dim": -1}),
            "float positions": (good, {"positions": torch.zeros(size)}),
            "short positions": (good, {"positions": torch.zeros(size - 1, dtype=torch.long)}),
            "float gathered": (good, {"gathered": {self.model.head: torch.zeros(2)}}),
            "flat gathered": (good, {"gathered": {self.model.head: torch.zeros(2, 2).long()}}),
            "far gathered": (good, {"gathered": {self.model.head: torch.tensor([0, size])}}),
            "nobody": ({}, {}),
            "lengths alone": (good, {"lengths": dict.fromkeys(good, 1)}),
        }
        assert step.knock is not None
        rows, options = wrong[step.knock]
        try:
            with fh.batch(rows, **{"dim": self.case.dim, "size": size} | options):
                pass
        except REFUSALS:
            return
        require(False, f"fh.batch takes {step.knock}")

    def _interrupt(self, number: int, step: Step, live: dict[int, tuple[int, ...]]) -> None:
        assert step.interrupt is not None
        self.live = live
        try:
            with interrupted(step.interrupt):
                batch = self._batch(step, live)
                try:
                    batch.__enter__()
                except BaseException:
                    sys.setprofile(None)
                    raise
                sys.setprofile(None)
                batch.__exit__(None, None, None)
        except KeyboardInterrupt:
            require(frames.get() == (), "an interrupted batch stays entered")
            # A capture that an interrupt keeps from beginning is closed, and says so.
            for each in live:
                if self.case.members[each].way == "capture" and self.members[each].closed:
                    self.ended.setdefault(number, []).append(each)
        except fh.errors.RowsError:
            pass

    def _nested(self, number: int, step: Step) -> tuple[str, list[Seen]]:
        self.model.index = None
        entered = [
            self.members[each]
            for each in step.rows
            if not self.members[each].closed
            and not self.members[each].failed
            and self.members[each] not in self.used
            and not self._refuses_to_enter(each)
        ]
        if not entered:
            return "nobody", []
        self.open = entered
        with contextlib.ExitStack() as stack, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for request in entered:
                stack.enter_context(request)
            seen = self._calls(number, step)
        self.open = []
        return "entered", seen

    def _refuses_to_enter(self, member: int) -> bool:
        """True for a request with a deadline, which holds in batches only."""
        if member not in self.expired:
            return False
        try:
            self.members[member].__enter__()
        except fh.HookError as error:
            require("deadline" in str(error), f"another refusal: {error}")
        else:
            require(False, "a request with a deadline was entered")
        return True

    def _calls(self, number: int, step: Step) -> list[Seen]:  # noqa: C901 (each way to end)
        case = self.case
        found = []
        for place, call in enumerate(step.calls):
            for event in call.before:
                self.happen(event)
            x = values.embedded(case, call.rows, call.seed)
            if case.grads:
                x.requires_grad_()
            meanwhile: Any = contextlib.nullcontext()
            if call.during is not None:
                at, event = call.during
                meanwhile = Meanwhile(at, functools.partial(self.happen, event))
            seen = Seen()
            given = x if case.grads else x.clone()
            try:
                with self._moved(step, call), meanwhile:
                    outputs = self.model(inputs_embeds=given) if case.asks else self.model(given)
            except KeyboardInterrupt:
                seen.raised = "KeyboardInterrupt"
            except (ValueError, TypeError, RuntimeError, fh.HookError) as error:
                seen.raised = type(error).__name__
                if seen.raised in {"HookTypeError", "NotImplementedError"}:
                    seen.raised = "ValueError"
            else:
                seen.outputs = tuple(each.detach() for each in outputs)
                if case.grads:
                    loss = sum(each.square().sum() for each in outputs)
                    seen.grad = gradient(loss, x)
            if call.during is not None:
                self.reached[number, place] = meanwhile.reached
            found.append(seen)
        return found

    def close(self) -> None:
        for member in self.members:
            member.close()
        for prepared in self.prepared.values():
            prepared.close()
        for handle in self.globals:
            handle.remove()
        self.stack.close()
        require(frames.get() == (), "a context stays entered")
        require(instrumented(self.model) == [], "modules stay instrumented")


def returned(index: Tensor, _module: Any, _args: Any, _kwargs: Any, _output: Any) -> Tensor:
    """Index of gathered rows, as a function finds it."""
    return index


def form(rows: tuple[int, ...], kind: str, size: int) -> Any:  # noqa: PLR0911 (a form each)
    """Rows of a member, as `fh.batch` takes them."""
    if kind == "tensor":
        return torch.tensor(rows, dtype=torch.long)
    if kind == "int":
        return rows[0]
    if kind == "negative":
        return [row - size for row in rows]
    if kind == "list" or not rows:
        return [*rows] if rows else slice(0, 0)
    if kind == "slice":
        return slice(rows[0], rows[-1] + 1)
    if kind == "range":
        return range(rows[0], rows[-1] + 1)
    step = rows[1] - rows[0] if len(rows) > 1 else size
    return slice(rows[0], None if kind == "open" else rows[-1] + 1, step)


# --- Comparing ----------------------------------------------------------------------------------


def same(ours: Any, expected: Any) -> bool:  # noqa: PLR0911 (a layout each)
    """True if tensors are the same bit for bit, NaN as NaN."""
    if isinstance(expected, list | tuple):
        return (
            isinstance(ours, list | tuple)
            and len(ours) == len(expected)
            and all(same(*pair) for pair in zip(ours, expected, strict=True))
        )
    if not isinstance(ours, Tensor) or (ours.dtype, ours.shape) != (
        expected.dtype,
        expected.shape,
    ):
        return False
    ours, expected = ours.detach(), expected.detach()
    if ours.layout != expected.layout:
        return False
    if ours.is_sparse:
        return same(ours.to_dense(), expected.to_dense())
    if ours.dtype == values.FLOAT8:
        return torch.equal(ours.view(torch.uint8), expected.view(torch.uint8))
    if ours.dtype.is_complex:
        return same(torch.view_as_real(ours), torch.view_as_real(expected))
    if ours.dtype.is_floating_point:
        both = ours.isnan() & expected.isnan()
        return bool((both | (ours == expected)).all())
    return torch.equal(ours, expected)


def same_gradient(ours: Tensor | None, expected: Tensor | None) -> bool:
    """True if gradients are close: their terms are summed in another order."""
    if ours is None or expected is None:
        return ours is expected
    return torch.allclose(ours, expected, 1e-4, 1e-4, equal_nan=True)


def first_mismatch(run: Run, oracle: Oracle, steps: list[tuple[str, list[Seen]]]) -> str | None:  # noqa: C901, PLR0911, PLR0912 (a comparison each)
    """Returns how the product differs from an oracle's outcome, None if it does not."""
    case = run.case
    for number, (step, (ended, seen)) in enumerate(zip(case.steps, steps, strict=True)):
        expected_end, expected = oracle.run(number, step)
        if ended.split()[0] != expected_end:
            return f"step {number}: {ended}, not {expected_end}"
        for place, (ours, right) in enumerate(zip(seen, expected, strict=True)):
            where = f"step {number}, call {place}"
            if ours.raised != right.raised:
                return f"{where}: raised {ours.raised}, not {right.raised}"
            oracle.agreed += 1
            if right.outputs is None:
                continue
            for name, one, other in zip(("c", "head"), ours.outputs, right.outputs, strict=True):
                if not same(one, other):
                    return f"{where}, output of {name}:\n{one}\nnot\n{other}"
                oracle.agreed += 1
            if not same_gradient(ours.grad, right.grad):
                return f"{where}: gradient\n{ours.grad}\nnot\n{right.grad}"
    for owner, member in zip(oracle.owners, run.members, strict=True):
        # A deadline that passed is seen where a hook would run: the values tell.
        told = not owner.closed and not owner.expired
        if told and owner.failed != member.failed:
            state = f"failed {member.failed} ({member.error!r})"
            return f"member {owner.number}: {state}, not {owner.failed}"
        if owner.way != "scope" and (wrong := mismatched_acts(case, owner, member)):
            return wrong
        if wrong := mismatched_error(case, owner, member):
            return wrong
        oracle.agreed += 1
    if wrong := mismatched_logs(run, oracle):
        return wrong
    oracle.agreed += 1
    return next(
        filter(
            None, map(mismatched_memory, [case] * len(oracle.owners), oracle.owners, run.members)
        ),
        None,
    )


def mismatched_logs(run: Run, oracle: Oracle) -> str | None:
    if run.logs.keys() != oracle.logs.keys():
        return (
            f"hooks that observe: {sorted(map(str, run.logs))}, not {sorted(map(str, oracle.logs))}"
        )
    for source, right in oracle.logs.items():
        ours = run.logs[source]
        shared = isinstance(source[0], int) and run._shared(source[0])
        if len(ours) != len(right):
            return f"{source} fired {len(ours)} times, not {len(right)}"
        left = [*ours]
        for at, each in enumerate(right):
            found = next((it for it in (left if shared else left[:1]) if same(it, each)), None)
            if found is None:
                return f"{source} saw at its invocation {at}\n{ours[at]}\nnot\n{each}"
            left = [it for it in left if it is not found]
    return None


def mismatched_acts(case: Case, owner: Any, member: Any) -> str | None:
    expected = owner.acts()
    try:
        acts = member.acts
    except fh.HookError:
        acts = {}  # of a capture that was in no batch
    spoiled = {f"k{number}:{owner.keeps[number].what}" for number in owner.spoiled}
    if set(acts) - spoiled != set(expected):
        return f"member {owner.number} captured {sorted(acts)}, not {sorted(expected)}"
    for number, keep in enumerate(owner.keeps):
        name = keep.what if owner.way == "capture" else f"k{number}:{keep.what}"
        if name not in expected:
            continue
        try:
            ours = acts[name]
        except fh.StaleActivationError as error:
            if keep.copy == "checked" and may_be_stale(case, owner):
                continue
            return f"member {owner.number}: {name} cannot be read: {error}"
        if not same(ours, expected[name]):
            return f"member {owner.number} captured as {name}\n{ours}\nnot\n{expected[name]}"
    for name, positions in owner.positions().items() if owner.way == "plan" else ():
        if member.acts.positions(name) != positions:
            ours = member.acts.positions(name)
            return f"member {owner.number}: {name} has positions {ours}, not {positions}"
    return None


def mismatched_error(case: Case, owner: Any, member: Any) -> str | None:
    """Returns how the error of a member names another hook than one that may have failed."""
    error = member.error
    # torch has few operations for float8: what cannot be written fails whose it is.
    if error is None or case.dtype == values.FLOAT8:
        return None
    told = [str(error)] if isinstance(error, fh.errors.RowsError) else []
    told += getattr(error, "__notes__", [])
    for each in told:
        kind = re.search(r" hook (\w+) kind ", each)
        if kind is None or "of any tensor" in each:  # of any hook that reads
            continue
        found = kind[1]
        guilty = {*BAD, "interrupt"}
        if "in-place" in str(error) or "writes in place" in str(error):
            guilty = {"write"}
        elif any(map(values.spoils, hooks_of(case))):
            guilty |= {*PLAIN}  # it may get a value that it cannot compute with
        if found not in guilty or not any(hook.kind == found for hook in hooks_of(case)):
            return f"member {owner.number}: a hook of the kind {found!r} is named: {each}"
    return None


def mismatched_memory(case: Case, owner: Any, member: Any) -> str | None:
    """Returns which capture of a member holds memory with rows of others."""
    if owner.way == "scope" or case.columns:
        return None
    expected = owner.acts()
    for number, keep in enumerate(owner.keeps):
        name = keep.what if owner.way == "capture" else f"k{number}:{keep.what}"
        if name not in expected:
            continue
        try:
            ours = member.acts[name]
        except fh.StaleActivationError:
            continue
        for leaf in tensors_of(ours):
            held, own = leaf.untyped_storage().nbytes(), leaf.nbytes
            share = 1 if keep.cut is None else 2 if keep.cut[-1] == slice(0, 2) else 4
            if held > own * share:
                return f"member {owner.number}: {name} has {own} bytes and holds {held}"
    return None


def may_be_stale(case: Case, owner: Any) -> bool:
    """True if the case writes in place to a member's captures."""
    return case.in_place or any(each.kind == "write" for each in hooks_of(case))


def difference(case: Case) -> str | None:
    """Returns how a case differs from the oracle, with the cache of programs and without."""
    for remembers in (True, False):
        cache_programs(remembers)
        try:
            if wrong := _difference(case):
                return wrong if remembers else f"without remembering: {wrong}"
        finally:
            cache_programs(True)
    return None


def _difference(case: Case) -> str | None:
    logging.disable(logging.CRITICAL)
    run = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            context = contextlib.nullcontext() if case.grads else torch.no_grad()
            with context:
                run = Run(case)
                with Readers(run) as readers:
                    steps = [readers.step(number, step) for number, step in enumerate(case.steps)]
            if run.violations:
                return run.violations[0]
            nearest, wrong = -1, None
            for oracle in outcomes(case, run.reached, run.ended):
                now = first_mismatch(run, oracle, steps)
                if now is None:
                    break
                if oracle.agreed > nearest:
                    nearest, wrong = oracle.agreed, now
            else:
                return wrong
            run.close()
            return None
    except WrongBatchError as error:
        return str(error)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and not any(
            each.kind == "interrupt" for each in hooks_of(case)
        ):
            raise
        shown = "".join(traceback.format_exception(error)[-6:])
        return f"raised {type(error).__name__}: {str(error)[:200]}\n{shown}"
    finally:
        logging.disable(logging.NOTSET)
        if run is not None:
            with contextlib.suppress(BaseException):
                run.close()


class Readers:
    """Threads that read the captures of all members while each step of a run goes on."""

    READS = 3

    def __init__(self, run: Run) -> None:
        self.run = run
        self.barrier = threading.Barrier(run.case.readers + 1)
        self.interval = sys.getswitchinterval()

    def __enter__(self) -> Self:
        if self.run.case.readers:
            self.together = Together(*[self.read] * self.run.case.readers)
            sys.setswitchinterval(1e-6)
        return self

    def __exit__(self, *_error: object) -> None:
        sys.setswitchinterval(self.interval)
        if self.run.case.readers:
            self.barrier.abort()
            self.together.join()

    def step(self, number: int, step: Step) -> tuple[str, list[Seen]]:
        with contextlib.suppress(threading.BrokenBarrierError):  # a reader failed: `join` raises
            self.barrier.wait(LIMIT)
        return self.run.step(number, step)

    def read(self) -> None:
        while True:
            try:
                self.barrier.wait(LIMIT)
            except threading.BrokenBarrierError:
                return  # the run has ended
            try:
                for member in self.run.members * self.READS:
                    self.read_all(member)
            except BaseException:
                self.barrier.abort()
                raise

    def read_all(self, member: Any) -> None:
        """Reads all that a member captured so far; `first_mismatch` compares it at the end."""
        if isinstance(member, fh.Scope) and not isinstance(member, fh.typing.Request):
            return
        try:
            names = [*member.acts]
        except fh.HookError:
            return  # of a capture that is in no batch yet
        for name in names:
            with contextlib.suppress(fh.StaleActivationError):
                list(tensors_of(member.acts[name]))
            if isinstance(member, fh.typing.Request):
                with contextlib.suppress(fh.HookError):  # of a batch without positions
                    member.acts.positions(name)


# --- Smallest cases -----------------------------------------------------------------------------


def replaced(each: Any, **changes: Any) -> Any:
    return dataclasses.replace(each, **changes)


def without(items: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """Yields a tuple without each of its items."""
    for at in range(len(items)):
        yield items[:at] + items[at + 1 :]


def plainer(each: Any, **defaults: Any) -> Iterator[Any]:
    """Yields a description with each of some fields at its default."""
    for name, value in defaults.items():
        if getattr(each, name, value) != value:
            yield replaced(each, **{name: value})


def changed_at(items: tuple[Any, ...], change: Callable[[Any], Iterator[Any]]) -> Iterator[Any]:
    """Yields a tuple with one of its items changed."""
    for at, item in enumerate(items):
        for new in change(item):
            yield (*items[:at], new, *items[at + 1 :])


def smaller(case: Case) -> Iterator[Case]:
    """Yields cases with less in them."""
    for steps in (*without(case.steps), *changed_at(case.steps, smaller_step)):
        yield replaced(case, steps=steps)
    for whole in without(case.whole):
        yield replaced(case, whole=whole)
    for at, member in enumerate(case.members):
        if member.way == "capture" or member.twin is not None:
            continue
        for entries in (*without(member.entries), *changed_at(member.entries, plainer_entry)):
            members = (
                replaced(each, entries=entries) if at in {number, each.twin} else each
                for number, each in enumerate(case.members)
            )
            yield replaced(case, members=tuple(members))
    usual = {"in_place": False, "alias": False, "grads": False, "sites": False, "table": 0}
    usual["readers"] = 0
    yield from plainer(case, **usual, dtype=torch.float32)


def plainer_entry(entry: Hook | Keep) -> Iterator[Any]:
    plain = {"does": (), "priority": 0, "prepend": False, "strength": None, "when": None}
    yield from plainer(entry, **plain, at=None, cut=None)


def smaller_call(call: Call) -> Iterator[Call]:
    yield from plainer(call, before=(), during=None)


def smaller_step(step: Step) -> Iterator[Step]:
    yield from plainer(step, before=(), made=(), knock=None, interrupt=None, outer=None)
    yield from plainer(step, gathered=None, form="tensor", flat=False)
    for gathered in without(step.gathered or ()):
        if gathered:
            yield replaced(step, gathered=gathered)
    for before in without(step.before):
        yield replaced(step, before=before)
    for member in step.rows:
        if len(step.rows) > 1:
            yield replaced(step, rows={at: own for at, own in step.rows.items() if at != member})
    if len(step.calls) > 1:
        for calls in without(step.calls):
            yield replaced(step, calls=calls)
    for calls in changed_at(step.calls, smaller_call):
        yield replaced(step, calls=calls)


def kind_of(wrong: str) -> str:
    """First line of a difference, without its numbers."""
    return re.sub(r"[-\d.]+", "#", wrong.splitlines()[0])


def smallest(case: Case, wrong: str) -> tuple[Case, str]:
    """Returns the smallest case found that differs in the same way, and how it differs."""
    kind = kind_of(wrong)
    while True:
        for each in smaller(case):
            now = difference(each)
            if now is not None and kind_of(now) == kind:
                case, wrong = each, now
                break
        else:
            return case, wrong


def check(seed: int) -> None:
    """Raises with the smallest description if the case of a seed differs from the oracle."""
    case = draw(seed)
    if wrong := difference(case):
        case, wrong = smallest(case, wrong)
        require(False, f"{case}\n{wrong}")

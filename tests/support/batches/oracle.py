"""Values that a random batch has to give, in plain torch.

Shares no code with the product. Where the contract leaves a choice (the order of members whose
hooks act on each other, say) the oracle draws it from `Choices`, and any of them is right.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from support.batches import values
from support.batches.cases import (
    ALL,
    ATS,
    BATCH,
    FAILING,
    NATIVE,
    Call,
    Case,
    Event,
    Gate,
    Hook,
    Keep,
    Step,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class Choices:
    """Enumerates choices, depth first."""

    def __init__(self) -> None:
        self._path: list[list[int]] = []
        self._at = 0

    def pick(self, options: Sequence[Any]) -> Any:
        if self._at == len(self._path):
            self._path.append([0, len(options)])
        chosen, _ = self._path[self._at]
        self._at += 1
        return options[chosen]

    def advance(self) -> bool:
        """Goes on to the next choices; False if these were the last."""
        self._at = 0
        while self._path:
            self._path[-1][0] += 1
            if self._path[-1][0] < self._path[-1][1]:
                return True
            self._path.pop()
        return False


class InterruptedCallError(Exception):
    """A hook interrupts a call."""


class RaisedInCallError(Exception):
    """A call raises the exception of this name, a hook's that belongs to no batch, say."""


class GateError(Exception):
    """A gate fails its request by the exception of this name."""


@dataclass(frozen=True)
class Token:
    """A token of a member in a value."""

    place: tuple[int, ...]
    """Its row, and its column where rows have several tokens."""
    position: int
    sequence: Any
    """Identifies the sequence: equal for all its tokens, in all calls that continue it."""


@dataclass(eq=False)
class Placed:
    """A hook in the order of its module."""

    hook: Any
    """A `Hook` or a `Gate`."""
    number: int
    """Number of its registration."""
    source: tuple[Any, ...]
    """The function that it calls: requests of one plan share it."""
    removed: bool = False
    before: int | None = 0
    """Greatest priority of the plan's hooks at a gate's place, None if there are none."""

    @property
    def key(self) -> tuple[float, ...]:
        if isinstance(self.hook, Gate):
            return (math.inf if self.before is None else -self.before, True, self.number)
        place = -self.number if self.hook.prepend else self.number
        return (-self.hook.priority, not self.hook.prepend, place)


@dataclass(eq=False)
class Owner:
    """A member: its hooks, its captures, and whether it goes on."""

    number: int
    way: str
    prompt: int
    hooks: list[Placed] = field(default_factory=list)
    keeps: list[Keep] = field(default_factory=list)
    kept: dict[int, list[Any]] = field(default_factory=dict)
    """Values of each capture; with positions, pairs of these and a token's value."""
    closed: bool = False
    failed: bool = False
    expired: bool = False
    gates: dict[str, Gate] = field(default_factory=dict)
    readings: dict[Any, dict[int, float]] = field(default_factory=dict)
    """First reading of each position, by the gate and the sequence."""
    spoiled: set[int] = field(default_factory=set)
    """Captures that may have taken the refused result of the member's own hook."""
    short: bool = False
    """True if a site may serve it in a call that has other rows than the batch."""
    used: bool = False
    """True once it was in a batch."""

    @property
    def out(self) -> bool:
        return self.closed or self.failed

    def acts(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for number, keep in enumerate(self.keeps):
            values_ = self.kept.get(number)
            if not values_ or number in self.spoiled:
                continue
            name = keep.what if self.way == "capture" else f"k{number}:{keep.what}"
            if isinstance(values_[0], tuple):
                tokens = dict(values_)
                found[name] = torch.stack([tokens[position] for position in sorted(tokens)])
            elif keep.calls == "last":
                found[name] = values_[-1]
            else:
                found[name] = values_ if keep.calls == "all" else values_[-keep.calls :]
        return found

    def positions(self) -> dict[str, list[int]]:
        return {
            f"k{number}:{keep.what}": sorted(dict(self.kept[number]))
            for number, keep in enumerate(self.keeps)
            if number not in self.spoiled
            and self.kept.get(number)
            and isinstance(self.kept[number][0], tuple)
        }


@dataclass
class Seen:
    """Result of a call."""

    outputs: Any = None
    grad: Tensor | None = None
    raised: str | None = None


class Oracle:
    """Runs the steps of a case."""

    def __init__(
        self,
        case: Case,
        choices: Choices,
        reached: dict[tuple[int, int], bool],
        ended: dict[int, list[int]],
    ) -> None:
        self.case = case
        self.choices = choices
        self.ended = ended
        """Captures that an interrupt closed, by step."""
        self.reached = reached
        """Calls whose event at an operation happened."""
        self.logs: dict[tuple[Any, ...], list[Any]] = {}
        self.whole: dict[str, list[Placed]] = {ALL: [], BATCH: []}
        self.added: dict[int | str, list[Placed]] = {}
        self.done: set[tuple[Any, ...]] = set()
        self.count = itertools.count()
        self.sources = itertools.count()
        for number, hook in enumerate(case.whole):
            self.whole[ALL].append(Placed(hook, next(self.count), (ALL, number)))
        self.owners: list[Owner] = []
        for number, member in enumerate(case.members):
            owner = Owner(number, member.way, member.prompt)
            twin = member.twin
            for place, entry in enumerate(member.entries):
                if isinstance(entry, Keep):
                    owner.keeps.append(entry)
                elif twin is None:
                    here = {
                        each.priority
                        for each in member.entries
                        if isinstance(each, Hook)
                        and (each.what, each.phase) == (entry.what, entry.phase)
                    }
                    placed = Placed(entry, next(self.count), (number, place))
                    placed.before = max(here, default=None)
                    owner.hooks.append(placed)
            if twin is not None:
                own = len([each for each in member.entries if not isinstance(each, Keep)])
                owner.hooks = [
                    Placed(each.hook, each.number, each.source, before=each.before)
                    for each in self.owners[twin].hooks[:own]
                ]
            owner.gates = {each.name: each for each in member.entries if isinstance(each, Gate)}
            self.owners.append(owner)
        self.calls = itertools.count()
        self.call = 0
        """Number of the running call."""
        self.step: Step | None = None
        self.agreed = 0
        """Comparisons with the product that held."""
        self.size = 0
        self.positions: tuple[Any, ...] | None = None
        """Positions of the batch's rows in its running call."""
        self.live: dict[int, tuple[int, ...]] = {}
        self.entered: list[Owner] = []

    # --- Events ---------------------------------------------------------------------------------

    def happen(self, event: Event, own: Owner | None = None) -> None:
        if event.kind in {"register", "remove"}:
            self._change_hooks(event)
            return
        assert isinstance(event.whose, int)
        if event.whose >= len(self.owners):
            return
        owner = self.owners[event.whose]
        if event.kind == "close":
            owner.closed = True
            return
        if owner.way != "plan" or owner.closed or self._is_entered(owner):
            return
        if event.kind == "fail":
            owner.failed = True
        else:
            owner.expired = True

    def _is_entered(self, owner: Owner) -> bool:
        return owner in self.entered

    def _change_hooks(self, event: Event) -> None:
        whose = event.whose
        if isinstance(whose, int) and whose >= len(self.owners):
            return
        if whose == BATCH and (self.step is None or self.step.nested):
            return
        added = self.added.setdefault(whose, [])
        if event.kind == "remove":
            if added:
                added.pop().removed = True
            return
        assert event.hook is not None
        if isinstance(whose, int):
            owner = self.owners[whose]
            if owner.closed or owner.way == "capture":
                return
            hooks = owner.hooks
        else:
            hooks = self.whole[str(whose)]
        placed = Placed(event.hook, next(self.count), ("event", id(event)))
        hooks.append(placed)
        added.append(placed)

    # --- Steps ----------------------------------------------------------------------------------

    def run(self, number: int, step: Step) -> tuple[str, list[Seen]]:  # noqa: C901 (each point in time)
        """Returns how entering ended, and the results of the calls."""
        case = self.case
        for event in step.before:
            self.happen(event)
        if step.nested:
            return self._run_nested(number, step)
        self.live = {each: rows for each, rows in step.rows.items() if not self.owners[each].closed}
        for each in self.ended.get(number, ()) if any(self.live.values()) else ():
            self.owners[each].closed = True
            self.live.pop(each, None)
        if not any(self.live.values()):
            return "nobody", []
        self.step = step
        self.whole[BATCH], self.added[BATCH] = [], []
        outer = None if step.outer is None else self.owners[step.outer]
        if outer is not None and (outer.out or outer.used or outer.expired):
            outer = None
        for event in step.made:
            self.happen(event)
        # An event may have ended it.
        self.entered = [] if outer is None or outer.out or outer.expired else [outer]
        if case.sites and self.choices.pick(self._refusals(step)):
            return "refused", []
        if any(self.owners[each].closed for each in self.live):
            ended, seen = "refused", []
        else:
            for each in self.live:
                owner = self.owners[each]
                owner.used = True
            if step.positions is not None:
                self._move(step.positions)
            ended, seen = "entered", self._calls(number, step)
        if outer is not None:
            outer.closed = True
        self.entered, self.step, self.positions = [], None, None
        self.whole[BATCH] = []
        return ended, seen

    def _move(self, positions: tuple[Any, ...]) -> None:
        """Makes the batch run the tokens at some positions."""
        self.positions = positions
        for each in self.live:
            owner = self.owners[each]
            ats = [placed.hook.at for placed in owner.hooks] + [keep.at for keep in owner.keeps]
            owner.failed |= any(at in FAILING for at in ats)

    def _refusals(self, step: Step) -> list[bool]:
        """Sites refuse features that they cannot serve."""
        own = any(
            placed.source[0] == "event" and not placed.removed
            for each in self.live
            for placed in self.owners[each].hooks
        )
        return [False, True] if own or step.gathered is not None else [False]

    def _run_nested(self, number: int, step: Step) -> tuple[str, list[Seen]]:
        self.entered = [
            owner
            for each in step.rows
            if not ((owner := self.owners[each]).out or owner.used or owner.expired)
        ]
        self.step, self.live = step, {}
        seen = self._calls(number, step) if self.entered else []
        for owner in self.entered:
            owner.closed = True
        self.entered, self.step = [], None
        return "entered" if seen else "nobody", seen

    def _calls(self, number: int, step: Step) -> list[Seen]:
        found = []
        self.size = step.size if self.case.sized(step) or step.positions is not None else 0
        for place, call in enumerate(step.calls):
            for event in call.before:
                self.happen(event)
            if call.moved is not None:
                self._move(call.moved)
            late = None
            if self.reached.get((number, place)):
                assert call.during is not None
                if self.choices.pick([False, True]):
                    late = call.during[1]
                else:
                    self.happen(call.during[1])
            found.append(self._call(step, call))
            if late is not None:
                self.happen(late)
        return found

    def _call(self, step: Step, call: Call) -> Seen:
        case = self.case
        self.call = next(self.calls)
        x = values.embedded(case, call.rows, call.seed)
        if not self.size and not step.nested:
            # Read from the call of a model.
            self.size = call.rows
        leaf = x
        if case.grads:
            leaf = x.requires_grad_()
        index = None if step.gathered is None else torch.tensor(step.gathered, dtype=torch.long)
        seen = Seen()
        try:
            x = self._module("a", leaf, step)
            x = values.summed(*self._module("b", x, step))
            x = self._module("c", x, step)
            y = self._module("head", values.chosen(x, case, index, flat=step.flat), step)
        except InterruptedCallError:
            seen.raised = "KeyboardInterrupt"
            return seen
        except RaisedInCallError as error:
            seen.raised = str(error)
            return seen
        seen.outputs = (x.detach(), y.detach())
        if case.grads:
            loss = x.square().sum() + y.square().sum()
            seen.grad = gradient(loss, leaf)
        return seen

    def _module(self, name: str, x: Tensor, step: Step) -> Any:
        case = self.case
        x = self._phase(Here(name, "forward_pre", step), x)
        y: Any = values.gained(x, whole=case.sites)
        if name == "b":
            table = values.table(case, step)
            y = (y, x) if table is None else (y, x, table)
        elif name == "c" and case.in_place:
            y = x * 1.5
        elif name == "c" and case.alias:
            y = x
        return self._phase(Here(name, "forward", step), y)

    # --- Phases ---------------------------------------------------------------------------------

    def _phase(self, here: Here, value: Any) -> Any:
        for number in self.live:
            owner = self.owners[number]
            owner.failed |= owner.expired and not owner.closed
        entered = [owner for owner in self.entered if not owner.closed]
        barriers = [*self._barriers(here, entered), None]
        members = {
            number: sorted(
                (each for each in self.owners[number].hooks if here.has(each)),
                key=lambda each: each.key,
            )
            for number in self.live
            if not self.owners[number].out
        }
        for barrier in barriers:
            segment: dict[int, list[Placed]] = {}
            for number, own in members.items():
                key = None if barrier is None else barrier[0].key
                count = len([each for each in own if key is None or each.key < key])
                segment[number], members[number] = own[:count], own[count:]
            value = self._segment(here, value, segment, last=barrier is None)
            if barrier is not None:
                value = self._whole_hook(*barrier, value)
        for owner in entered:
            if not owner.closed:
                self._keep(here, owner, value, None)
        return value

    def _barriers(self, here: Here, entered: list[Owner]) -> list[tuple[Placed, Owner | None]]:
        """Hooks that see the whole batch, in order."""
        found: list[tuple[Placed, Owner | None]] = [
            (each, None) for each in (*self.whole[ALL], *self.whole[BATCH]) if here.has(each)
        ]
        found += [(each, owner) for owner in entered for each in owner.hooks if here.has(each)]
        return sorted(found, key=lambda each: each[0].key)

    def _whole_hook(self, placed: Placed, owner: Owner | None, value: Any) -> Any:
        hook = placed.hook
        if placed.removed or (owner is not None and owner.closed):
            return value
        try:
            mask = self._changed(placed, owner, value, None, None)
        except GateError as error:
            raise RaisedInCallError(str(error)) from None
        if mask is not None and not mask.any():
            return value
        if hook.kind == "raise" or self._refused(hook):
            raise RaisedInCallError("ValueError")  # noqa: EM101 (a name)
        if hook.kind == "write" and first(value).requires_grad and first(value).is_leaf:
            raise RaisedInCallError("RuntimeError")  # noqa: EM101 (a name)
        changed = self._apply(placed, value, owner)
        return changed if mask is None else at_places(value, changed, mask[..., None])

    def _refused(self, hook: Hook) -> bool:
        return hook.kind in NATIVE and values.refuses(hook, self.case)

    def _mask(self, at: str, rows: int) -> Tensor:
        columns = self.case.columns
        row = [ATS[at][1](position, columns) for position in range(columns)]
        return torch.tensor([row] * rows, dtype=torch.bool).reshape(rows, columns)

    def _segment(
        self, here: Here, value: Any, segment: dict[int, list[Placed]], *, last: bool
    ) -> Any:
        """Runs the hooks of members between two that see the whole batch."""
        order = [
            number
            for number, own in segment.items()
            if own or (last and any(here.keeps(keep) for keep in self.owners[number].keeps))
        ]
        order.sort(
            key=lambda number: all(each.hook.kind in {*NATIVE, "gate"} for each in segment[number])
        )
        far = here.gathered is not None and here.step.form == "far"
        busy = far and any(not self.owners[number].out for number in order)
        # A function of the batch is wrong: the call raises, or the requests fail.
        if busy and self.choices.pick([True, False]):
            raise RaisedInCallError("RowsError")  # noqa: EM101 (a name)
        acting = any(
            (each.hook.does and each.source not in self.done) or each.hook.kind == "interrupt"
            for number in order
            for each in segment[number]
        )
        if acting and len(order) > 1:
            order = self.choices.pick([*itertools.permutations(order)])
        for number in order:
            owner = self.owners[number]
            if not owner.out and (cut := self._cut(here, owner, value)) is not None:
                value = self._member(here, owner, cut, segment[number], last=last)
        return value

    def _cut(self, here: Here, owner: Owner, value: Any) -> Cut | None:
        """Cuts a member's rows out of a value; None if it has none, or fails."""
        rows, step = self.live[owner.number], here.step
        places, size, dim = [*rows], self.size, self.case.dim
        if here.gathered is not None:
            gathered, dim = here.gathered, 0 if step.flat else dim
            if step.form in {"far", "long"} and gathered:
                gathered = gathered[:-1] if step.form == "far" else gathered
                owner.failed = any(row in rows for row in gathered)
                return None
            places = [place for place, row in enumerate(gathered) if row in rows]
            size = len(gathered)
        if not places:
            return None
        if not any(leaf.dim() > dim and leaf.shape[dim] == size for leaf in leaves(value)):
            # A site serves rows that are there, or fails the request.
            there = self.case.sites and max(places) < first(value).shape[dim]
            if not (there and self.choices.pick([False, True])):
                owner.failed = True
                return None
            owner.short, size = True, first(value).shape[dim]
        return Cut(value, places, dim, size)

    def _member(  # noqa: C901, PLR0912 (each way to fail)
        self, here: Here, owner: Owner, cut: Cut, hooks: list[Placed], *, last: bool
    ) -> Any:
        """Returns the value after the hooks of a member."""
        now, written, late = cut.rows, None, False
        for placed in hooks:
            hook = placed.hook
            owner.failed |= owner.expired and self.choices.pick([True, False])
            if placed.removed or owner.out:
                break
            failed = False
            unwritable = hook.kind == "write" and now is cut.rows and first(cut.value).requires_grad
            if values.spoils(hook) or (unwritable and first(cut.value).is_leaf):
                # Seen once its other hooks ran, or at once.
                late, failed = True, self.choices.pick([False, True])
            try:
                if not failed:
                    now, failed = self._member_hook(here, owner, placed, now, cut)
            except (RuntimeError, IndexError):
                if not late:
                    raise
                failed = True
            if failed:
                owner.failed = True
                return self._without(cut, written)
            if hook.kind == "write" and not late:
                written = now
        if late:
            # Its captures may have taken a value that was refused afterwards.
            owner.spoiled |= {at for at, keep in enumerate(owner.keeps) if here.keeps(keep)}
            owner.failed = True
            return self._without(cut, written)
        if now is not cut.rows:
            if owner.failed and not self.choices.pick([True, False]):
                return self._without(cut, written)
            if self.case.dtype == values.FLOAT8 and self.choices.pick([False, True]):
                # torch has few operations for it: its rows cannot be written.
                owner.spoiled |= {at for at, keep in enumerate(owner.keeps) if here.keeps(keep)}
                owner.failed = True
                return cut.value
        value = cut.put(now)
        if owner.short:
            owner.short, owner.failed = False, self.choices.pick([False, True])
        if last and not owner.out:
            self._keep(here, owner, Cut(value, cut.places, cut.dim, cut.size).rows, cut)
        return value

    def _without(self, cut: Cut, written: Any) -> Any:
        """Returns a value whose rows go on without hooks; writes in place may stay."""
        if written is None or self.choices.pick([False, True]):
            return cut.value
        return cut.put(written)

    def _tokens(self, here: Here, cut: Cut | None) -> list[Any] | None:
        """Returns the position of each row's token, or of each of its columns."""
        positions = self.positions
        if positions is None or cut is None:
            return None
        gathered = here.gathered
        return [positions[place if gathered is None else gathered[place]] for place in cut.places]

    def _member_hook(
        self, here: Here, owner: Owner, placed: Placed, now: Any, cut: Cut
    ) -> tuple[Any, bool]:
        """Returns the rows after a hook; True if it fails its member."""
        hook = placed.hook
        try:
            chosen = self._changed(placed, owner, now, self._tokens(here, cut), cut)
        except GateError:
            return now, True
        if chosen is not None and not chosen.any():
            # A hook that could not change them may be refused before.
            return now, self._refused(hook) and self.choices.pick([False, True])
        if hook.kind == "raise" or self._refused(hook):
            return now, True
        changed = self._apply(placed, now, owner)
        if chosen is None:
            return changed, False
        mask = chosen[..., None]
        return at_places(now, changed, mask), False

    def _changed(
        self,
        placed: Placed,
        owner: Owner | None,
        value: Any,
        told: list[Any] | None,
        cut: Cut | None,
    ) -> Tensor | None:
        """Returns which tokens of a value a hook changes; None for all. A gate reads it."""
        hook = placed.hook
        if not isinstance(hook, Gate) and hook.when is None:
            if hook.at is None:
                return None
            if cut is None or owner is None:
                return self._mask(hook.at, first(value).shape[0])
            return self._chosen(hook.at, owner.prompt, told, cut)
        assert owner is not None
        rows = first(value).shape[0] if cut is None else len(cut.places)
        tokens = self._found(owner, hook.at, told, cut, rows)
        if not isinstance(hook, Gate):
            return self._acting(owner, hook, tokens, first(value))
        self._read(owner, hook, value, tokens)
        return torch.zeros(())

    def _found(
        self, owner: Owner, at: str | None, told: list[Any] | None, cut: Cut | None, rows: int
    ) -> list[Token]:
        """Returns the tokens of a member at some positions.

        `told`: positions of its rows; None where the call of the model shows them.
        """
        prompt, found = owner.prompt, []
        for row in range(rows):
            positions: Any = [*range(self.case.columns)]
            if told is None:
                prompt, sequence = self.case.columns, (self.call, row)
            else:
                positions = told[row] if self.case.columns else [told[row]]
                sequence = (-1, 0)
            for column, each in enumerate(positions):
                if each < 0 or not (at is None or ATS[at][1](each, prompt)):
                    continue
                place: tuple[int, ...] = (row, column) if self.case.columns else (row,)
                if cut is not None and cut.dim == 1:
                    place = (0, *place)
                found.append(Token(place, each, sequence))
        return found

    def _prompt(self, owner: Owner, token: Token) -> int:
        return owner.prompt if token.sequence == (-1, 0) else self.case.columns

    def _read(self, owner: Owner, gate: Gate, value: Any, tokens: list[Token]) -> None:
        x = value if isinstance(value, Tensor) else value[gate.part or 0]
        if len({(it.sequence, it.position) for it in tokens}) < len(tokens):
            raise GateError("HookError")  # noqa: EM101 (a name)
        for token in tokens:
            number = values.reading(gate, x[token.place].detach())
            if math.isnan(number):
                raise GateError("HookError")  # noqa: EM101 (a name)
            readings = owner.readings.setdefault((gate.name, token.sequence), {})
            readings.setdefault(token.position, number)

    def _acting(self, owner: Owner, hook: Hook, tokens: list[Token], x: Tensor) -> Tensor:
        """Returns at which tokens the condition of a hook is known to be true."""
        assert hook.when is not None
        acting = torch.zeros(x.shape[:-1], dtype=torch.bool)
        found = [(token, self._value(owner, hook.when.gate, token)) for token in tokens]
        for token, value in found:
            if value is not None:
                truth = value > hook.when.bound if hook.when.above else value < hook.when.bound
                acting[token.place] = truth != hook.when.negated
        return acting

    def _value(self, owner: Owner, name: str, token: Token) -> float | None:
        """Returns the value of a gate at a token, None if it is unknown."""
        gate, prompt = owner.gates[name], self._prompt(owner, token)
        last = prompt - 1 if gate.over == "prompt" else token.position
        if token.position < last:
            return None
        counted = [
            each for each in range(last + 1) if gate.at is None or ATS[gate.at][1](each, prompt)
        ]
        if gate.over == "token":
            counted = counted[-1:] if counted[-1:] == [last] else []
        elif gate.over == "window":
            counted = counted[-values.WINDOW :]
        readings = owner.readings.get((name, token.sequence), {})
        if any(each not in readings for each in counted):
            raise GateError("HookError")  # noqa: EM101 (a name)
        if not counted or (gate.over == "window" and len(counted) < values.WINDOW):
            return None
        read = [readings[each] for each in counted]
        return {"max": max(read), "min": min(read), "last": read[-1]}[gate.by]

    def _chosen(self, at: str, prompt: int, tokens: list[Any] | None, cut: Cut) -> Tensor:
        """Returns which of a member's tokens are at some positions."""
        if tokens is None:
            return self._mask(at, len(cut.places))
        test = ATS[at][1]
        if self.case.columns:
            return torch.tensor([[p >= 0 and test(p, prompt) for p in row] for row in tokens])
        flat = torch.tensor([p >= 0 and test(p, prompt) for p in tokens])
        return flat if cut.dim == 0 else flat[None]

    def _apply(self, placed: Placed, value: Any, owner: Owner | None) -> Any:
        """Calls a hook on a value."""
        hook: Hook = placed.hook
        case = self.case
        if values.spoils(hook):
            return changed_part(value, hook.part, lambda x: values.spoiled(x, hook))
        if hook.kind in NATIVE:
            return changed_part(
                value, hook.part, lambda x: values.partly(hook, x, values.intervened(case, hook, x))
            )
        if hook.kind == "interrupt":
            raise InterruptedCallError
        if hook.kind in {"observe", "typed observe"}:
            self.logs.setdefault(placed.source, []).append(
                [leaf.detach().clone() for leaf in leaves(value)]
            )
        elif hook.kind in {"times", "write", "typed"}:
            value = changed_part(
                value, 0, lambda x: values.partly(hook, x, values.times(x, hook.seed))
            )
        elif hook.kind == "mix":
            dim = min(case.dim, first(value).dim() - 2)
            value = changed_part(value, 0, lambda x: values.mixed(x, dim))
        if hook.does and placed.source not in self.done:
            self.done.add(placed.source)
            for event in hook.does:
                self.happen(event, owner)
        return value

    def _keep(self, here: Here, owner: Owner, value: Any, cut: Cut | None) -> None:
        tokens = self._tokens(here, cut)
        for number, keep in enumerate(owner.keeps):
            if not here.keeps(keep):
                continue
            x = value if keep.part is None or here.phase == "forward_pre" else value[keep.part]
            if isinstance(x, tuple):
                copies = [leaf.detach().clone() for leaf in x]
                owner.kept.setdefault(number, []).append(copies)
                continue
            x = x.detach().clone()
            if tokens is not None:
                assert cut is not None
                kept = [*self._kept_tokens(keep, owner.prompt, x, tokens, cut.dim)]
            else:
                if keep.at is not None:
                    x = x[self._mask(keep.at, x.shape[0])]
                    if not len(x):
                        continue
                kept = [x if keep.cut is None else x[keep.cut]]
            if kept:
                owner.kept.setdefault(number, []).extend(kept)

    def _kept_tokens(
        self, keep: Keep, prompt: int, x: Tensor, tokens: list[Any], dim: int
    ) -> Iterator[tuple[int, Tensor]]:
        """Yields the tokens that a capture has, with their positions."""
        for row, position in enumerate(tokens):
            for column, each in enumerate(position if self.case.columns else [position]):
                if each < 0 or (keep.at is not None and not ATS[keep.at][1](each, prompt)):
                    continue
                token = x.select(dim, row)
                if self.case.columns or dim:
                    token = token[column]
                yield each, token if keep.cut is None else token[keep.cut]


@dataclass(frozen=True)
class Here:
    """A phase of a module."""

    name: str
    phase: str
    step: Step

    @property
    def gathered(self) -> tuple[int, ...] | None:
        """Rows of the batch that the module runs on, if they are others."""
        return self.step.gathered if self.name == "head" else None

    def has(self, placed: Placed) -> bool:
        hook = placed.hook
        return not placed.removed and (hook.what, hook.phase) == (self.name, self.phase)

    def keeps(self, keep: Keep) -> bool:
        return keep.what == self.name and keep.inputs == (self.phase == "forward_pre")


@dataclass
class Cut:
    """Rows of a member, cut out of a value."""

    value: Any
    places: list[int]
    dim: int
    size: int

    def __post_init__(self) -> None:
        self._index = torch.tensor(self.places, dtype=torch.long)
        self.rows = mapped(self.value, self._of)

    def _of(self, leaf: Tensor) -> Tensor:
        has_rows = leaf.dim() > self.dim and leaf.shape[self.dim] == self.size
        return values.taken(leaf, self.dim, self._index) if has_rows else leaf

    def put(self, now: Any) -> Any:
        """Returns the value with changed rows."""
        if now is self.rows:
            return self.value
        return joined(
            self.value,
            joined(self.rows, now, lambda old, new: None if new is old else new),
            lambda old, new: old if new is None else values.put(old, self.dim, self._index, new),
        )


def gradient(loss: Tensor, leaf: Tensor) -> Tensor:
    """Returns a gradient; zeros where nothing depends on the leaf."""
    grad = None
    if loss.requires_grad:
        (grad,) = torch.autograd.grad(loss, [leaf], allow_unused=True)
    return torch.zeros_like(leaf) if grad is None else grad


def leaves(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [*value]


def first(value: Any) -> Tensor:
    return leaves(value)[0]


def mapped(value: Any, change: Any) -> Any:
    return change(value) if isinstance(value, Tensor) else tuple(map(change, value))


def joined(one: Any, other: Any, join: Any) -> Any:
    if isinstance(one, Tensor):
        return join(one, other)
    return tuple(itertools.starmap(join, zip(one, other, strict=True)))


def at_places(value: Any, changed: Any, mask: Tensor) -> Any:
    """Returns a value with its changed tensors where a mask is true."""
    return joined(
        value, changed, lambda old, new: old if new is old else torch.where(mask, new, old)
    )


def changed_part(value: Any, part: Any, change: Any) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    items = [*value]
    items[part or 0] = change(items[part or 0])
    return tuple(items)


def outcomes(
    case: Case, reached: dict[tuple[int, int], bool], ended: dict[int, list[int]]
) -> Iterator[Oracle]:
    """Yields an oracle for each of the choices that the contract leaves, a thousand at most."""
    choices = Choices()
    for _ in range(1000):
        yield Oracle(case, choices, reached, ended)
        if not choices.advance():
            return

"""Values that a random batch has to give, in plain torch.

Shares no code with the product. Where the contract leaves a choice (the order of members whose
hooks act on each other, say) the oracle draws it from `Choices`, and any of them is right.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from support.batches import values
from support.batches.cases import (
    ALL,
    ATS,
    BAD,
    BATCH,
    NATIVE,
    Call,
    Case,
    Event,
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


@dataclass(eq=False)
class Placed:
    """A hook in the order of its module."""

    hook: Hook
    number: int
    """Number of its registration."""
    source: tuple[Any, ...]
    """The function that it calls: requests of one plan share it."""
    removed: bool = False

    @property
    def key(self) -> tuple[int, ...]:
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
    spoiled: set[int] = field(default_factory=set)
    """Captures that may have taken the refused result of the member's own hook."""
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
    """What a call gave."""

    outputs: Any = None
    grad: Tensor | None = None
    raised: str | None = None


class Oracle:
    """Runs the steps of a case."""

    def __init__(self, case: Case, choices: Choices, reached: dict[tuple[int, int], bool]) -> None:
        self.case = case
        self.choices = choices
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
                    owner.hooks.append(Placed(entry, next(self.count), (number, place)))
            if twin is not None:
                own = len([each for each in member.entries if isinstance(each, Hook)])
                owner.hooks = [
                    Placed(each.hook, each.number, each.source)
                    for each in self.owners[twin].hooks[:own]
                ]
            self.owners.append(owner)
        self.step: Step | None = None
        self.agreed = 0
        """Comparisons with the product that held."""
        self.size = 0
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

    def run(self, number: int, step: Step) -> tuple[str, list[Seen]]:
        """Returns how entering ended, and what the calls gave."""
        case = self.case
        for event in step.before:
            self.happen(event)
        if step.nested:
            return self._run_nested(number, step)
        self.live = {
            each: rows for each, rows in step.rows.items() if not self.owners[each].closed
        }
        if not any(self.live.values()):
            return "nobody", []
        self.step = step
        self.whole[BATCH], self.added[BATCH] = [], []
        outer = None if step.outer is None else self.owners[step.outer]
        if outer is not None and (outer.out or outer.used):
            outer = None
        for event in step.made:
            self.happen(event)
        self.entered = [outer] if outer is not None and not outer.closed else []
        if case.sites and self.choices.pick(self._refusals(step)):
            return "refused", []
        if any(self.owners[each].closed for each in self.live):
            ended, seen = "refused", []
        else:
            for each in self.live:
                self.owners[each].used = True
            ended, seen = "entered", self._calls(number, step)
        if outer is not None:
            outer.closed = True
        self.entered, self.step = [], None
        self.whole[BATCH] = []
        return ended, seen

    def _refusals(self, step: Step) -> list[bool]:
        """Sites refuse what they cannot serve."""
        own = any(
            placed.source[0] == "event" and not placed.removed
            for each in self.live
            for placed in self.owners[each].hooks
        )
        return [False, True] if own or step.gathered is not None else [False]

    def _run_nested(self, number: int, step: Step) -> tuple[str, list[Seen]]:
        self.entered = [
            owner for each in step.rows if not ((owner := self.owners[each]).out or owner.used)
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
        x = self._phase(name, "forward_pre", x, step)
        if name == "b":
            return self._phase(name, "forward", (values.gained(x, whole=case.sites), x), step)
        if name == "c" and (case.in_place or case.alias):
            return self._phase(name, "forward", x * 1.5 if case.in_place else x, step)
        return self._phase(name, "forward", values.gained(x, whole=case.sites), step)

    # --- Phases ---------------------------------------------------------------------------------

    def _phase(self, name: str, phase: str, value: Any, step: Step) -> Any:
        for owner in self.owners:
            if owner.expired and owner.number in self.live and not owner.closed:
                owner.failed = True

        def here(placed: Placed) -> bool:
            hook = placed.hook
            return not placed.removed and hook.what == name and hook.phase == phase

        whole: list[tuple[Placed, Owner | None]] = [
            (each, None) for each in (*self.whole[ALL], *self.whole[BATCH]) if here(each)
        ]
        keeps: list[Owner] = []
        for owner in self.entered:
            if not owner.closed:
                whole += [(each, owner) for each in owner.hooks if here(each)]
                keeps.append(owner)
        whole.sort(key=lambda each: each[0].key)
        members: dict[int, list[Placed]] = {}
        for number in self.live:
            if not self.owners[number].out:
                own = sorted(filter(here, self.owners[number].hooks), key=lambda each: each.key)
                members[number] = own
        for barrier, owner in (*whole, (None, None)):
            segment: dict[int, list[Placed]] = {}
            for number, own in members.items():
                count = len(own)
                if barrier is not None:
                    count = len([each for each in own if each.key < barrier.key])
                segment[number], members[number] = own[:count], own[count:]
            value = self._segment(name, phase, value, step, segment, last=barrier is None)
            if barrier is not None and not barrier.removed and not (owner and owner.closed):
                value = self._whole_hook(barrier, value, step, owner)
        for owner in keeps:
            if not owner.closed:
                self._keep(owner, name, phase, value, None, step)
        return value

    def _whole_hook(self, placed: Placed, value: Any, step: Step, owner: Owner | None) -> Any:
        hook = placed.hook
        if hook.kind == "raise" or (hook.kind in NATIVE and values.refuses(hook, self.case.dtype)):
            raise RaisedInCallError("ValueError")  # noqa: EM101 (a name)
        if hook.at is not None:
            # Of a request that is entered: the model's call says which tokens are where.
            mask = self._mask(hook.at, first(value).shape[0], self.case.columns)
            changed = self._apply(placed, value, owner)
            return joined(
                value,
                changed,
                lambda old, new: torch.where(mask[..., None], new, old),
            )
        return self._apply(placed, value, owner)

    def _mask(self, at: str, rows: int, columns: int) -> Tensor:
        row = [ATS[at][1](position, columns) for position in range(columns)]
        return torch.tensor([row] * rows, dtype=torch.bool).reshape(rows, columns)

    def _layout(self, name: str, number: int, step: Step) -> tuple[list[int], int, int]:
        """Returns the places of a member's rows in a module's tensors, their number and dim."""
        rows = self.live[number]
        if step.gathered is None or name != "head":
            return [*rows], self.size, self.case.dim
        places = [place for place, row in enumerate(step.gathered) if row in rows]
        return places, len(step.gathered), 0 if step.flat else self.case.dim

    def _segment(
        self,
        name: str,
        phase: str,
        value: Any,
        step: Step,
        segment: dict[int, list[Placed]],
        *,
        last: bool,
    ) -> Any:
        busy = {
            number
            for number, own in segment.items()
            if own or (last and self._has_keeps(self.owners[number], name, phase))
        }
        order = sorted(
            (number for number in self.live if number in busy),
            key=lambda number: all(each.hook.kind in NATIVE for each in segment[number]),
        )
        far = name == "head" and step.gathered is not None and step.form == "far"
        if far and any(not self.owners[number].out for number in order):
            # A function of the batch is wrong: the call raises, or the requests fail.
            if self.choices.pick([True, False]):
                raise RaisedInCallError("RowsError")  # noqa: EM101 (a name)
        acting = any(
            (each.hook.does and each.source not in self.done) or each.hook.kind == "interrupt"
            for number in order
            for each in segment[number]
        )
        if acting and len(order) > 1:
            order = self.choices.pick([*itertools.permutations(order)])
        for number in order:
            value = self._member(name, phase, value, step, number, segment[number], last=last)
        return value

    def _has_keeps(self, owner: Owner, name: str, phase: str) -> bool:
        return any(
            keep.what == name and keep.inputs == (phase == "forward_pre") for keep in owner.keeps
        )

    def _member(
        self,
        name: str,
        phase: str,
        value: Any,
        step: Step,
        number: int,
        hooks: list[Placed],
        *,
        last: bool,
    ) -> Any:
        owner = self.owners[number]
        if owner.out:
            return value
        if name == "head" and step.gathered is not None and step.form in {"far", "long"}:
            owner.failed = True
            return value
        places, size, dim = self._layout(name, number, step)
        if not places:
            return value
        if not any(leaf.dim() > dim and leaf.shape[dim] == size for leaf in leaves(value)):
            if self.case.sites:
                return self._short_site(name, phase, value, step, owner, hooks, places)
            owner.failed = True
            return value
        index = torch.tensor(places, dtype=torch.long)
        narrowed = mapped(value, lambda leaf: values.taken(leaf, dim, index))
        now, written, late = narrowed, None, False
        for placed in hooks:
            hook = placed.hook
            if placed.removed or owner.closed or owner.failed:
                break
            if owner.expired and self.choices.pick([True, False]):
                owner.failed = True
                break
            if values.spoils(hook, self.case.dtype):
                late = True  # seen once its other hooks ran, or at once
                if self.choices.pick([True, False]):
                    try:
                        now = changed_part(
                            now, hook.part, lambda x, hook=hook: values.spoiled(x, hook)
                        )
                    except (RuntimeError, NotImplementedError):
                        break
                    continue
                owner.failed = True
                return self._put_back(value, narrowed, written, dim, index)
            try:
                now, failed = self._member_hook(placed, now, owner, step, places, dim, name)
            except (RuntimeError, IndexError):
                if not late:
                    raise
                failed = True
            if hook.kind == "write" and not failed:
                written = now
            if failed:
                owner.failed = True
                return self._put_back(value, narrowed, written, dim, index)
        if late:
            # Its captures may have taken what was refused afterwards.
            owner.spoiled |= {
                number
                for number, keep in enumerate(owner.keeps)
                if keep.what == name and keep.inputs == (phase == "forward_pre")
            }
            owner.failed = True
            return self._put_back(value, narrowed, written, dim, index)
        if now is not narrowed:
            if owner.failed and not self.choices.pick([True, False]):
                return self._put_back(value, narrowed, written, dim, index)
            if self.case.dtype == values.FLOAT8 and self.choices.pick([False, True]):
                owner.failed = True  # torch has few operations for it
                return value
            value = self._changed(value, narrowed, now, dim, index)
        if last and not owner.out:
            own = mapped(value, lambda leaf: values.taken(leaf, dim, index))
            self._keep(owner, name, phase, own, self._tokens(step, places, name), step, dim)
        return value

    def _changed(self, value: Any, narrowed: Any, now: Any, dim: int, index: Tensor) -> Any:
        """Puts changed rows into a value."""
        return joined(
            value,
            joined(narrowed, now, lambda old, new: None if new is old else new),
            lambda old, new: old if new is None else values.put(old, dim, index, new),
        )

    def _put_back(
        self, value: Any, narrowed: Any, written: Any, dim: int, index: Tensor
    ) -> Any:
        """Returns a value whose rows go on without hooks; what was written in place may stay."""
        if written is None or self.choices.pick([False, True]):
            return value
        return self._changed(value, narrowed, written, dim, index)

    def _short_site(
        self,
        name: str,
        phase: str,
        value: Any,
        step: Step,
        owner: Owner,
        hooks: list[Placed],
        places: list[int],
    ) -> Any:
        """A site in a call with other rows than the batch: fails the request, or serves it."""
        dim = self.case.dim
        there = max(places) < first(value).shape[dim]
        ways = ["fail", "fail steered", "serve"] if there else ["fail"]
        way = self.choices.pick(ways)
        if way != "fail":
            index = torch.tensor(places, dtype=torch.long)
            now = values.taken(first(value), dim, index)
            for placed in hooks:
                now, _ = self._member_hook(placed, now, owner, step, places, dim, name)
            value = values.put(first(value), dim, index, now)
            if way == "serve":
                self._keep(owner, name, phase, now, self._tokens(step, places, name), step, dim)
        owner.failed = way != "serve"
        return value

    def _tokens(self, step: Step, places: list[int], name: str) -> list[Any] | None:
        """Returns the position of each row's token, or of each of its columns."""
        if step.positions is None:
            return None
        rows = places
        if step.gathered is not None and name == "head":
            rows = [step.gathered[place] for place in places]
        return [step.positions[row] for row in rows]

    def _member_hook(
        self,
        placed: Placed,
        now: Any,
        owner: Owner,
        step: Step,
        places: list[int],
        dim: int,
        name: str,
    ) -> tuple[Any, bool]:
        hook = placed.hook
        tokens = self._tokens(step, places, name)
        chosen: Tensor | None = None
        if hook.at is not None:
            test, prompt = ATS[hook.at][1], owner.prompt
            if tokens is None:
                chosen = self._mask(hook.at, len(places), self.case.columns)
            elif self.case.columns:
                chosen = torch.tensor([[p >= 0 and test(p, prompt) for p in row] for row in tokens])
            else:
                flat = torch.tensor([p >= 0 and test(p, prompt) for p in tokens])
                chosen = flat if dim == 0 else flat[None]
            if not chosen.any():  # a hook that could not change them may be refused before
                refused = hook.kind in NATIVE and values.refuses(hook, self.case.dtype)
                return now, refused and self.choices.pick([False, True])
        if hook.kind == "raise" or (hook.kind in NATIVE and values.refuses(hook, self.case.dtype)):
            return now, True
        changed = self._apply(placed, now, owner)
        if chosen is None:
            return changed, False
        mask = chosen[..., None]
        return joined(now, changed, lambda old, new: torch.where(mask, new, old)), False

    def _apply(self, placed: Placed, value: Any, owner: Owner | None) -> Any:
        """Calls a hook on a value."""
        hook, case = placed.hook, self.case
        if hook.kind in NATIVE:
            return changed_part(value, hook.part, lambda x: values.intervened(case, hook, x))
        if hook.kind == "interrupt":
            raise InterruptedCallError
        if hook.kind in {"observe", "typed observe"}:
            self.logs.setdefault(placed.source, []).append(
                [leaf.detach().clone() for leaf in leaves(value)]
            )
        elif hook.kind in {"times", "write", "typed"}:
            value = changed_part(value, 0, lambda x: values.times(x, hook.seed))
        elif hook.kind == "mix":
            dim = self._mix_dim(value)
            value = changed_part(value, 0, lambda x: values.mixed(x, dim))
        if hook.does and placed.source not in self.done:
            self.done.add(placed.source)
            for event in hook.does:
                self.happen(event, owner)
        return value

    def _mix_dim(self, value: Any) -> int:
        return min(self.case.dim, first(value).dim() - 2)

    def _keep(
        self,
        owner: Owner,
        name: str,
        phase: str,
        value: Any,
        tokens: list[Any] | None,
        step: Step,
        dim: int = 0,
    ) -> None:
        case = self.case
        for number, keep in enumerate(owner.keeps):
            if keep.what != name or keep.inputs != (phase == "forward_pre"):
                continue
            x = value if keep.part is None or phase == "forward_pre" else value[keep.part]
            x = x.detach().clone()
            if keep.at is not None and tokens is None:
                x = x[self._mask(keep.at, x.shape[0], case.columns)]
                if not len(x):
                    continue
            kept = owner.kept.setdefault(number, [])
            if tokens is None:
                kept.append(x if keep.cut is None else x[keep.cut])
                continue
            test = (lambda p, n: True) if keep.at is None else ATS[keep.at][1]
            for row, position in enumerate(tokens):
                columns = position if case.columns else [position]
                for column, each in enumerate(columns):
                    if each < 0 or not test(each, owner.prompt):
                        continue
                    token = x.select(dim, row)
                    token = token[column] if case.columns else token[0] if dim else token
                    kept.append((each, token if keep.cut is None else token[keep.cut]))


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


def changed_part(value: Any, part: Any, change: Any) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    items = [*value]
    items[part or 0] = change(items[part or 0])
    return tuple(items)


def outcomes(case: Case, reached: dict[tuple[int, int], bool]) -> Iterator[Oracle]:
    """Yields an oracle for each of the choices that the contract leaves, a thousand at most."""
    choices = Choices()
    for _ in range(1000):
        yield Oracle(case, choices, reached)
        if not choices.advance():
            return

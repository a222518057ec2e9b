"""Requests of an engine that have plans, from submission until the engine has forgotten them."""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import torch

from ferrohook.attach.attention import DIMENSIONS, is_point
from ferrohook.captures.cache import ActivationCache
from ferrohook.errors import HookError
from ferrohook.plans import Plan, Prepared
from ferrohook.plans.entries import HookEntry
from ferrohook.plans.needs import NEEDS, BackEnd
from ferrohook.plans.prepared_plans import PreparedPlans
from ferrohook.rows.batches import batch_of_step
from ferrohook.util.arguments import expect
from ferrohook.util.tensors import map_tensors, tensors_in

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from torch import nn

    from ferrohook.attach.attention import AttentionPoint
    from ferrohook.engines.model.step_values import StepValues
    from ferrohook.engines.steps import Span, Step
    from ferrohook.plans import Request
    from ferrohook.rows import Batch
    from ferrohook.rows.batches import GatheredModule


BACK_END: Final = BackEnd(
    NEEDS - {"calls", "cut rows", "gradients", "not finite", "stop"},
    {
        "calls": "steps are put together by position, so calls= has no meaning",
        "cut rows": "slice= keeps all of the dimension whose rows are put together",
        "gradients": "it computes no gradients",
        "not finite": "its hook has NaN or infinities",
        "stop": "stop=True would end the forward of others",
    },
)
"""Of engines whose plans need not cross processes."""


NO_PATTERN: Final = (
    "the keys of all requests are in pages, in one dimension; capture it in a call of the model "
    "alone, on the tokens of the answer"
)
"""Reason why an engine has no pattern."""


class EnginePlans(PreparedPlans):
    """Plans prepared for the model of an engine.

    Args:
        model: the engine's model.
        values: values of its modules in a step; None if they are unknown.
        dim: dimension of the rows in its tensors.
        size: number of plans that stay prepared without a request.
    """

    def __init__(
        self,
        model: nn.Module,
        values: StepValues | None = None,
        dim: int = 0,
        *,
        size: int = 0,
    ) -> None:
        super().__init__(model)
        self._size = size
        self._values = values
        self._dim = dim
        self._checked: weakref.WeakSet[Prepared] = weakref.WeakSet()

    def serve(self, plan: Plan | Prepared) -> Prepared:
        """Returns the plan prepared for the model.

        Raises:
            HookTypeError: it is neither a plan nor prepared.
            HookError: the plan does not fit the model, see `Plan.prepare`; it was prepared for
                another; or it has a hook or capture that cannot fire in an engine.
        """
        if not isinstance(plan, Prepared):
            expect(plan, Plan, "plan is a Plan or a Prepared")
            return self.prepare(plan)
        if plan.model is not self._model:
            msg = "the plan was prepared for another model than the engine's"
            raise HookError(msg)
        self._check(plan)
        return plan

    def _fresh(self, plan: Plan) -> Prepared:
        prepared = Prepared(plan.entries, self._model, positioned=True)
        self._check(prepared)
        return prepared

    def _check(self, prepared: Prepared) -> None:
        """Refuses a plan of which a part cannot fire."""
        if prepared in self._checked:
            return
        for number, entry in enumerate(prepared.entries):
            needs = prepared.needs[number]
            # At positions, the slice gets a tensor with the tokens first.
            dim = 0 if entry.at is not None else self._dim
            reason = BACK_END.refusal(entry, dim, needs) or self._unfit(prepared, number)
            if reason is not None:
                msg = f"entry {number} of the plan cannot be served by an engine: {reason}"
                raise HookError(msg)
        self._checked.add(prepared)

    def _unfit(self, prepared: Prepared, number: int) -> str | None:
        for name, place in prepared.places(number).items():
            module = place.module
            if is_point(module):
                point = cast("AttentionPoint", module)
                if "keys" in DIMENSIONS[point.name]:
                    return f"{name}: {NO_PATTERN}"
                module = point.points.module
            if self._values is None:
                continue
            if module not in self._values.calls:
                return f"{name!r} does not run in its steps"
            if (reason := self._values.refusal(name, place, prepared.entries[number])) is not None:
                return reason
        return None


class Result(NamedTuple):
    """Activations and failure of a request."""

    acts: ActivationCache
    """In order of position: tensors of (positions, ...)."""
    error: BaseException | None
    positions: Callable[[str], list[int]]
    """Returns the positions of one of the activations."""


class _Member:
    """A request with a plan."""

    # Looked for in each step, in caches that the model's weights have emptied.
    __slots__ = ("_failure", "_prepared", "changes", "parent", "request", "start")

    def __init__(self, prepared: Prepared, parent: _Member | None = None) -> None:
        self.request: Request = prepared.open()
        self.parent = parent
        """The request that it is a fork of."""
        self.start = 0 if parent is None else sys.maxsize
        """First position that ran for it; those before are its parent's."""
        self.changes = any(isinstance(entry, HookEntry) for entry in prepared.entries)
        self._prepared = prepared
        self._failure: BaseException | None = None

    @property
    def closed(self) -> bool:
        return self._prepared.closed or self.request.closed

    @property
    def failure(self) -> BaseException | None:
        # `error` may wait for a GPU.
        return self._failure or (self.request.error if self.request.failed else None)

    @failure.setter
    def failure(self, error: BaseException) -> None:
        self._failure = error

    def result(self, end: int | None) -> Result:
        """Returns its captures before the position `end`; may wait for a GPU."""
        if self._failure is None:
            self._failure = self.request.error
        if self.parent is None and end is None:
            return Result(self.request.acts, self.failure, self.request.positions)
        kept = _Results(self, end)
        return Result(ActivationCache(kept), self.failure, kept.positions)


class _Results(Mapping[str, Any]):
    """Activations of a request before a position; of a fork with its parent's."""

    def __init__(self, member: _Member, end: int | None) -> None:
        self._end = sys.maxsize if end is None else end
        # In order of position; none ran in both.
        self._parts = [(member.request, range(member.start, self._end))]
        if member.parent is not None:
            self._parts.insert(0, (member.parent.request, range(member.start)))

    def positions(self, name: str) -> list[int]:
        return [each for part, ran in self._parts for each in part.positions(name) if each in ran]

    def __getitem__(self, name: str) -> Any:
        parts = []
        for request, ran in self._parts:
            if name in request.acts:
                positions = request.positions(name)
                rows = slice(*(bisect_left(positions, each) for each in (ran.start, ran.stop)))
                parts.append(map_tensors(itemgetter(rows), request.acts[name]))
        if not parts:
            raise KeyError(name)
        if len(parts) == 1:
            return parts[0]
        leaves = zip(*map(tensors_in, parts), strict=True)
        return map_tensors(lambda _tensor: torch.cat(next(leaves)), parts[-1])

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(name for request, _ in self._parts for name in request.acts))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class PlannedRequests:
    """Requests of an engine that have plans.

    Any thread admits; the engine's thread runs steps. An admitted request stays until `retire`,
    or until `reconcile` finds that the engine has forgotten it.

    Args:
        model: the engine's model.
        dim: dimension of the rows in its tensors.
        values: see `EnginePlans`.
        size: see `EnginePlans`.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        dim: int = 0,
        values: StepValues | None = None,
        size: int = 0,
    ) -> None:
        self.plans = EnginePlans(model, values, dim, size=size)
        self._dim = dim
        self._lock = threading.Lock()
        self._members: dict[str, _Member] = {}
        self._submitting: set[str] = set()

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._members

    @contextlib.contextmanager
    def admitting(
        self, request_id: str, plan: Plan | Prepared, children: Sequence[str] = ()
    ) -> Iterator[None]:
        """Opens the plan of a request around its submission to the engine.

        Args:
            request_id: as the engine's steps call it.
            plan: its plan.
            children: ids of its forks, which get the plan too.

        Raises:
            HookError: the plan cannot be served, see `EnginePlans.serve`; or a request with a plan
                has the id.
        """
        prepared = self.plans.serve(plan)
        parent = _Member(prepared)
        members = {request_id: parent}
        members.update((child, _Member(prepared, parent)) for child in children)
        with self._lock:
            if taken := self._members.keys() & members.keys():
                msg = f"a request with a plan has the id {min(taken)!r} already"
                raise HookError(msg)
            self._members |= members
            self._submitting |= members.keys()
        try:
            yield
        except BaseException:
            self.forget(members)
            raise
        finally:
            with self._lock:
                self._submitting -= members.keys()

    def forget(self, request_ids: Collection[str]) -> None:
        """Closes requests and drops their captures."""
        with self._lock:
            gone = [self._members.pop(each, None) for each in request_ids]
        for member in gone:
            if member is not None:
                member.request.close()

    def reconcile(self, read_live: Callable[[], Collection[str]]) -> None:
        """Forgets the requests that the engine has forgotten.

        Args:
            read_live: returns the ids that live in the engine. Called once the requests to look for
                are fixed: one that is submitted meanwhile may be missing there.
        """
        with self._lock:
            submitted = self._members.keys() - self._submitting
        self.forget(submitted - set(read_live()))

    def ids(self) -> list[str]:
        """Returns the ids of the requests."""
        with self._lock:
            return [*self._members]

    @contextlib.contextmanager
    def running(self, step: Step, gathered: list[GatheredModule] | None = None) -> Iterator[None]:
        """Enters the batch of a step, in this thread, for the forward.

        Args:
            step: rows of all requests; rows of requests without a plan stay as they are.
            gathered: modules that see other rows, see `batch_of_step`.
        """
        with contextlib.ExitStack() as stack:
            if (batch := self._enter(step, gathered or [])) is not None:
                stack.push(batch)
            yield

    def _enter(self, step: Step, gathered: list[GatheredModule]) -> Batch | None:
        """Enters the batch of a step; None if no request with a plan is in it."""
        while members := self._members_of(step):
            try:
                rows = [(member.request, span) for member, span in members]
                batch = batch_of_step(rows, self._dim, step.rows, gathered)
                batch.__enter__()
            except Exception as error:  # noqa: BLE001 (the requests' failure: the engine goes on)
                _blame([member for member, _ in members], error)
            else:
                return batch
        return None

    def _members_of(self, step: Step) -> list[tuple[_Member, Span]]:
        """Returns the requests of a step that have a plan and did not fail, and their spans."""
        members = []
        for span in step.spans:
            member = self._members.get(span.request_id)
            if member is not None and member.failure is None:
                if member.parent is not None:
                    member.start = min(member.start, span.position)
                members.append((member, span))
        return members

    def failure_of(self, request_id: str) -> BaseException | None:
        """Returns the failure of a request, None without one."""
        member = self._members.get(request_id)
        return None if member is None else member.failure

    def fail(self, request_id: str, error: Exception) -> None:
        """Fails a request that has not failed yet."""
        member = self._members.get(request_id)
        if member is not None and member.failure is None:
            member.failure = error

    def changes(self, request_id: str) -> bool:
        """Returns True if the plan of a request may change its rows."""
        member = self._members.get(request_id)
        return member is not None and member.changes

    def shares(self, request_id: str, *, write: bool) -> bool:
        """Returns True if a request may read keys and values of others, or write its own for them.

        With a plan none are read: its hooks have to fire at all positions. Its own are for others
        only if the plan changes nothing.
        """
        member = self._members.get(request_id)
        return member is None or (write and not member.changes)

    def peek(self, request_id: str) -> Result | None:
        """Returns the result so far of a request that runs; None for one without a plan."""
        member = self._members.get(request_id)
        return None if member is None else member.result(None)

    def retire(self, request_id: str, end: int | None = None) -> Result | None:
        """Closes a request and returns its result; None for one without a plan.

        Args:
            request_id: its id.
            end: position after the last one that counts.
        """
        with self._lock:
            member = self._members.pop(request_id, None)
        if member is None:
            return None
        member.request.close()
        return member.result(end)


def _blame(members: list[_Member], error: Exception) -> None:
    """Fails the requests for which no batch was entered: the closed ones, else all."""
    closed = [each for each in members if each.closed]
    for member in closed:
        member.failure = HookError("the plan of the request was closed while it ran")
    for member in () if closed else members:
        member.failure = error

"""Requests of an engine that have plans, from submission until the engine has forgotten them."""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

from ferrohook.arguments import expect
from ferrohook.errors import HookError
from ferrohook.plans import Plan, Prepared
from ferrohook.plans.entries import HookEntry
from ferrohook.rows import batch

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from torch import Tensor, nn

    from ferrohook.engines.steps import Step
    from ferrohook.plans import Request
    from ferrohook.plans.entries import KeepEntry


class PreparedPool:
    """Plans prepared for one model, found by content while anybody refers to them."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._prepared: weakref.WeakValueDictionary[object, Prepared]
        self._prepared = weakref.WeakValueDictionary()

    def find(self, plan: Plan | Prepared) -> Prepared:
        """Returns the plan prepared for the model.

        Raises:
            HookTypeError: it is neither a plan nor prepared.
            HookError: the plan does not fit the model, see `Plan.prepare`; it was prepared for
                another; or it has a hook or capture that cannot fire in an engine.
        """
        if isinstance(plan, Prepared):
            if plan.model is not self._model:
                msg = "the plan was prepared for another model than the engine's"
                raise HookError(msg)
            _check_entries(plan.entries)
            return plan
        expect(plan, Plan, "plan is a Plan or a Prepared")
        key = tuple(entry.content() for entry in plan.entries)
        found = self._prepared.get(key)
        if found is None or found.outdated:
            _check_entries(plan.entries)
            found = self._prepared[key] = plan.prepare(self._model)
        return found


def _check_entries(entries: Sequence[HookEntry | KeepEntry]) -> None:
    """Refuses entries that need gradients or end the forward.

    Raises:
        HookError: there is one; names it.
    """
    for number, entry in enumerate(entries):
        if isinstance(entry, HookEntry):
            reason = "engines compute no gradients" if "backward" in entry.phase else None
        elif entry.options.get("grads"):
            reason = "engines compute no gradients"
        else:
            reason = "it would end the forward of others" if entry.options.get("stop") else None
        if reason is not None:
            msg = f"entry {number} of the plan cannot be served by an engine: {reason}"
            raise HookError(msg)


class Result(NamedTuple):
    """Activations and failure of a request."""

    acts: Mapping[str, Any]
    error: BaseException | None


class _Member:
    """A request with a plan."""

    def __init__(self, prepared: Prepared, parent: _Member | None = None) -> None:
        self.request: Request = prepared.open()
        self.parent = parent
        """The request that it is a fork of."""
        self.changes = any(isinstance(entry, HookEntry) for entry in prepared.entries)
        self._prepared = prepared  # closes with its last reference
        self._failure: BaseException | None = None

    @property
    def failure(self) -> BaseException | None:
        return self._failure or self.request.error

    @failure.setter
    def failure(self, error: BaseException) -> None:
        self._failure = error

    def acts(self, end: int | None) -> Mapping[str, Any]:
        return self.request.acts


class PlannedRequests:
    """Requests of an engine that have plans.

    Any thread admits; the engine's thread runs steps. What is admitted stays until `retire`, or
    until `reconcile` finds that the engine has forgotten it.

    Args:
        model: the engine's model.
        dim: dimension of the rows in its tensors.
    """

    def __init__(self, model: nn.Module, *, dim: int = 0) -> None:
        self._dim = dim
        self._pool = PreparedPool(model)
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
            HookError: the plan cannot be served, see `PreparedPool.find`; or a request with a plan
                has the id.
        """
        prepared = self._pool.find(plan)
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
        """Closes requests and drops what they captured."""
        with self._lock:
            gone = [self._members.pop(each, None) for each in request_ids]
        for member in gone:
            if member is not None:
                member.request.close()

    def reconcile(self, live: Collection[str]) -> None:
        """Forgets the requests that are not among those that live in the engine."""
        with self._lock:
            gone = self._members.keys() - self._submitting - live
        self.forget(gone)

    def ids(self) -> list[str]:
        """Returns the ids of the requests."""
        with self._lock:
            return [*self._members]

    @contextlib.contextmanager
    def running(self, step: Step, gathered: Mapping[str, Tensor] | None = None) -> Iterator[None]:
        """Enters the batch of a step, in this thread, for the forward in a block.

        Args:
            step: rows of all requests; those without a plan are nobody's.
            gathered: modules that see other rows, see `batch`.
        """
        members, rows, lengths = [], {}, {}
        for span in step.spans:
            member = self._members.get(span.request_id)
            if member is None or member.failure is not None:
                continue
            if member.request.closed:
                member.failure = HookError("the request's plan was closed while it ran")
                continue
            members.append(member)
            rows[member.request] = slice(span.first_row, span.first_row + span.rows)
            lengths[member.request] = span.prompt_length
        with contextlib.ExitStack() as stack:
            if members:
                shared = batch(
                    rows, self._dim, positions=step.positions, lengths=lengths, gathered=gathered
                )
                try:
                    stack.enter_context(shared)
                except Exception as error:  # noqa: BLE001 (the requests' failure: others go on)
                    for member in members:
                        member.failure = error
            yield

    def failure_of(self, request_id: str) -> BaseException | None:
        """Returns the failure of a request, None without one."""
        member = self._members.get(request_id)
        return None if member is None else member.failure

    def shares(self, request_id: str, *, write: bool) -> bool:
        """Returns True if a request may read keys and values of others, or write its own for them.

        With a plan none are read: its hooks have to fire at all positions. Its own are for others
        only if the plan changes nothing.
        """
        member = self._members.get(request_id)
        return member is None or (write and not member.changes)

    def retire(self, request_id: str, end: int | None = None) -> Result | None:
        """Closes a request and returns its result; None for one without a plan.

        Args:
            request_id: its id.
            end: position behind the last one that counts.
        """
        with self._lock:
            member = self._members.pop(request_id, None)
        if member is None:
            return None
        failure = member.failure
        member.request.close()
        return Result(member.acts(end), failure)

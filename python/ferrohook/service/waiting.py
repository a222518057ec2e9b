"""`WaitingRequest` and `Line`: requests that wait for a forward, and their order."""

from __future__ import annotations

import dataclasses
import math
from collections import OrderedDict, deque
from concurrent.futures import Future
from contextvars import Context, copy_context
from time import monotonic
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ferrohook.service.deadlines import current_deadline
from ferrohook.service.spans import current_span

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from ferrohook.plans import Request

In = TypeVar("In")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchLimits:
    """Limits of one forward, see `Batcher`."""

    max_requests: int
    max_rows: int
    max_tokens: int

    def exceeded_by(self, requests: int, rows: int, length: int) -> bool:
        """Returns True if a padded batch of that size is too large."""
        return (
            requests > self.max_requests or rows > self.max_rows or rows * length > self.max_tokens
        )


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class WaitingRequest(Generic[In]):
    """A request that waits, with the context of the call that submitted it."""

    item: In
    open_request: Callable[[], Request] | None
    rows: int
    length: int
    alone: bool
    client: Hashable
    future: Future[Any] = dataclasses.field(default_factory=Future)
    context: Context = dataclasses.field(default_factory=copy_context)
    limit: tuple[float, float] = dataclasses.field(default_factory=current_deadline)
    span: Any = dataclasses.field(default_factory=current_span)
    arrival: float = dataclasses.field(default_factory=monotonic)

    @property
    def deadline(self) -> float:
        """End of the deadline of the submitting context, by `time.monotonic`."""
        return self.limit[0]

    def open(self, *, shared: bool) -> Request | None:
        """Opens the request of its plan; None without a plan.

        Args:
            shared: for a batch, in which the request's deadline holds; else the context's deadline
                holds.
        """
        if self.open_request is None:
            return None
        request = self.open_request()
        if shared and self.deadline < math.inf:
            request.expire(max(0.0, self.deadline - monotonic()))
        return request


class Line(Generic[In]):
    """Waiting tickets: round-robin between clients, first come first served within a client.

    A later ticket never overtakes an earlier one: a ticket that does not fit ends the batch, and
    starts the next. Used under a lock.
    """

    def __init__(self, limits: BatchLimits) -> None:
        self._limits = limits
        self._clients: OrderedDict[Hashable, deque[WaitingRequest[In]]] = OrderedDict()
        self._rows = 0
        self._requests = 0
        # For the tickets that came since the line was empty.
        self._length = 1
        self._alone = False

    def __len__(self) -> int:
        return self._requests

    def append(self, ticket: WaitingRequest[In]) -> None:
        """Adds a ticket after the other tickets of its client."""
        if not self._requests:
            self._length, self._alone = 1, False
        self._clients.setdefault(ticket.client, deque()).append(ticket)
        self._requests += 1
        self._rows += ticket.rows
        self._length = max(self._length, ticket.length)
        self._alone |= ticket.alone

    def remove(self, future: Future[Any]) -> bool:
        """Removes the ticket of a future; returns False if it waits no more."""
        for tickets in self._clients.values():
            for ticket in tickets:
                if ticket.future is future:
                    tickets.remove(ticket)
                    self._forget(ticket)
                    return True
        return False

    def _forget(self, ticket: WaitingRequest[In]) -> None:
        self._requests -= 1
        self._rows -= ticket.rows
        if not self._clients[ticket.client]:
            del self._clients[ticket.client]

    @property
    def full(self) -> bool:
        """True if the next batch need not wait for more."""
        return self._alone or self._limits.exceeded_by(
            self._requests + 1, self._rows + 1, self._length
        )

    def due(self, max_wait: float) -> float:
        """Returns when the next batch starts, full or not.

        That is when a ticket has waited `max_wait`, or half of the time to its deadline.
        """
        return min(
            ticket.arrival + min(max_wait, (ticket.deadline - ticket.arrival) / 2)
            for tickets in self._clients.values()
            for ticket in tickets
        )

    def take(self) -> list[WaitingRequest[In]]:
        """Removes the tickets of the next batch: at least one, if any waits."""
        taken: list[WaitingRequest[In]] = []
        rows, length = 0, 1
        while self._clients:
            client, tickets = next(iter(self._clients.items()))
            head = tickets[0]
            rows, length = rows + head.rows, max(length, head.length)
            too_many = self._limits.exceeded_by(len(taken) + 1, rows, length)
            if taken and (head.alone or too_many):
                break
            taken.append(tickets.popleft())
            self._clients.move_to_end(client)
            self._forget(head)
            if head.alone:
                break
        return taken

    def clear(self) -> list[WaitingRequest[In]]:
        """Removes all tickets."""
        left = [ticket for tickets in self._clients.values() for ticket in tickets]
        self._clients.clear()
        self._requests = self._rows = 0
        return left

"""`Batcher`: requests of many clients share forwards, each under its own plan."""

# Workers live in an executor as long as anything waits, so a batcher that is never closed keeps no
# process alive. One worker at a time gathers a batch (`_gathering`), the others compute. A ticket's
# future says whether it was cancelled: `set_running_or_notify_cancel` decides between the worker
# that takes it and the client that leaves.

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, Generic, Self, TypeVar

import torch

from ferrohook._core import frames
from ferrohook.errors import CaptureBudgetError, HookError, RowsError
from ferrohook.rows import batch
from ferrohook.service.deadlines import DeadlineExceededError, limited, too_late
from ferrohook.service.sharing import changes, check_rows, consecutive, shares_forwards
from ferrohook.service.spans import annotate
from ferrohook.service.waiting import BatchLimits, Line, WaitingRequest
from ferrohook.util.arguments import at_least, expect, expect_callable

if TYPE_CHECKING:
    from collections.abc import Hashable
    from concurrent.futures import Future

    from ferrohook.plans import Request

In = TypeVar("In")
Out = TypeVar("Out")

COUNTS: Final = ("rows_seen", "rows_changed", "hooks_failed")
LOG = logging.getLogger("ferrohook")
CLOSED: Final = "the batcher is closed: send the request to another instance of the service"


class BatcherClosedError(HookError):
    """A request refused because its `Batcher` was closed."""


@dataclasses.dataclass(frozen=True)
class Answer(Generic[Out]):
    """Answer to one request of a `Batcher`."""

    value: Out
    """The request's part of the output, as `split` returned it."""
    request: Request | None
    """The request that was opened for the forward, closed: it has `acts`."""
    shared: int
    """Number of requests in the forward, this one included."""


class Batcher(Generic[In, Out]):
    """Groups waiting requests into shared forwards, which worker threads run.

    A forward starts as soon as a worker is idle and the batch is full, or a request has waited for
    `max_wait` seconds or half of the time to its deadline. Clients are served round-robin, and a
    later request never overtakes an earlier one. If a hook, budget or deadline of a request fails,
    only that request fails. If the forward itself fails, each of its requests is computed again in
    a separate forward. Some requests never share one: requests with Python hooks, with scopes
    entered around `submit`, or with captures of tensors that have no rows.

    Forwards run without gradients. Shared forwards run in a separate context: the deadline of the
    submitting context holds there, its scopes do not.

    Args:
        model: the model, or any callable that calls it.
        collate: makes the model's arguments from a list of items, with rows in the order of the
            items: a tuple of positional ones, a mapping of keywords, or the only argument.
        split: takes the output and the request's slice of the rows, and returns the request's part
            of the output.
        dim: dimension of the rows, see `batch`.
        max_requests: limit of the requests in a forward.
        max_rows: limit of its rows.
        max_tokens: limit of its tokens, padding included: rows times the longest length.
        max_wait: seconds that a request waits for others.
        workers: number of forwards at a time.

    Raises:
        HookTypeError: an argument has the wrong type.
        ValueError: a limit is below 1, or `max_wait` is negative or NaN.

    Examples:
        >>> batcher = Batcher(model, torch.cat, lambda output, rows: output[rows])
        >>> prepared = plans.prepare(plan)
        >>> answer = await batcher.run(x, prepared.open, rows=len(x))
        >>> answer.value, answer.request.acts, answer.shared
    """

    def __init__(  # noqa: PLR0913 (limits)
        self,
        model: Callable[..., Any],
        collate: Callable[[list[In]], Any],
        split: Callable[[Any, slice], Out],
        *,
        dim: int = 0,
        max_requests: int = 32,
        max_rows: int = 256,
        max_tokens: int = 2**14,
        max_wait: float = 0.002,
        workers: int = 1,
    ) -> None:
        for name, value in (("model", model), ("collate", collate), ("split", split)):
            expect_callable(value, f"{name} must be callable")
        expect(max_wait, int | float, "max_wait must be a number of seconds")
        if not max_wait >= 0:
            msg = f"max_wait must be at least 0 seconds, got {max_wait}"
            raise ValueError(msg)
        self._model = model
        self._collate = collate
        self._split = split
        self._dim = dim
        self._max_wait = max_wait
        self._line: Line[In] = Line(
            BatchLimits(
                max_requests=at_least(1, "max_requests", max_requests),
                max_rows=at_least(1, "max_rows", max_rows),
                max_tokens=at_least(1, "max_tokens", max_tokens),
            )
        )
        self._workers = at_least(1, "workers", workers)
        self._pool = ThreadPoolExecutor(self._workers, "ferrohook-batcher")
        self._changed = threading.Condition()
        self._working = 0
        self._gathering = False
        self._closed = False
        self._sizes: Counter[int] = Counter()
        self._counts: Counter[str] = Counter()

    def submit(  # noqa: PLR0913 (a request's size)
        self,
        item: In,
        open_request: Callable[[], Request] | None = None,
        *,
        rows: int = 1,
        length: int = 1,
        alone: bool = False,
        client: Hashable = None,
    ) -> Future[Answer[Out]]:
        """Adds a request to the waiting ones; returns at once.

        Args:
            item: the input, for `collate`.
            open_request: opens the request of a plan, as `Prepared.open`; called in the worker once
                for each forward. None for a request without a plan.
            rows: number of the item's rows.
            length: tokens in its longest row.
            alone: True for a separate forward. A request that exceeds a limit also gets one.
            client: id of the client; clients are served round-robin.

        Returns:
            A future. Cancelling it before the forward starts drops the request.

        Raises:
            HookTypeError: an argument has the wrong type.
            ValueError: `rows` or `length` is below 1.
            BatcherClosedError: `close` was called.
        """
        if open_request is not None:
            expect_callable(open_request, "open_request must be callable")
        ticket = WaitingRequest(
            item=item,
            open_request=open_request,
            rows=at_least(1, "rows", rows),
            length=at_least(1, "length", length),
            alone=alone or bool(frames.get()),
            client=client,
        )
        with self._changed:
            if self._closed:
                raise BatcherClosedError(CLOSED)
            self._line.append(ticket)
            try:
                self._start_worker()
            except RuntimeError:  # the interpreter ends
                self._line.remove(ticket.future)
                raise
            self._changed.notify()
        # Not a function that refers to the ticket: a future keeps its callbacks, and the ticket it.
        ticket.future.add_done_callback(self._leave)
        return ticket.future

    async def run(
        self, item: In, open_request: Callable[[], Request] | None = None, **options: Any
    ) -> Answer[Out]:
        """Awaits the answer to a request, on the event loop; the forward runs in a worker thread.

        Cancelling the task cancels the request.

        Args:
            item: see `submit`, and so are the others.
            open_request: see `submit`.
            **options: see `submit`.

        Raises:
            BaseException: any exception of the request's hooks, the model, `collate` or `split`.
            TimeoutError: the context's `deadline` passed.
            BatcherClosedError: `close` was called.
        """
        return await asyncio.wrap_future(self.submit(item, open_request, **options))

    def snapshot(self) -> dict[str, Any]:
        """Returns counts since the start.

        Returns:
            `rows_seen`: rows of requests with a plan; `rows_changed`: rows of requests whose plan
            has hooks; `hooks_failed`: requests with a hook that raised, or an exceeded budget;
            `sizes`: number of forwards by number of requests in them; `waiting`: waiting requests.
        """
        with self._changed:
            counts = {name: self._counts[name] for name in COUNTS}
            return {**counts, "sizes": self._sizes.copy(), "waiting": len(self._line)}

    def close(self, *, refuse: bool = False) -> None:
        """Closes the batcher after it has answered all waiting requests; idempotent.

        Blocks until then: on an event loop, call it with `asyncio.to_thread`.

        Args:
            refuse: answer requests that wait with `BatcherClosedError`.
        """
        with self._changed:
            self._closed = True
            refused = self._line.clear() if refuse else []
            self._changed.notify_all()
        for ticket in refused:
            if ticket.future.set_running_or_notify_cancel():
                ticket.future.set_exception(BatcherClosedError(CLOSED))
        self._pool.shutdown(wait=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    # --- The line ---

    def _start_worker(self) -> None:
        """Starts a worker if something waits and no worker is about to take it. Under the lock."""
        idle = self._working < self._workers and not self._gathering
        if idle and self._line and not self._closed:
            self._pool.submit(self._work)
            self._gathering = True
            self._working += 1

    def _leave(self, future: Future[Any]) -> None:
        """Removes the ticket of a future that was cancelled."""
        if future.cancelled():
            with self._changed:
                waited = self._line.remove(future)
                self._changed.notify()
            if waited:
                future.set_running_or_notify_cancel()  # wakes who waits for it

    def _work(self) -> None:
        working = True
        while working:
            self._compute(self._gather())
            with self._changed:
                working = bool(self._line) and not self._gathering
                self._gathering |= working
                self._working -= not working

    def _gather(self) -> list[WaitingRequest[In]]:
        """Waits for a batch, and takes it."""
        with self._changed:
            while self._line and not self._line.full and not self._closed:
                left = self._line.due(self._max_wait) - monotonic()
                if left <= 0:
                    break
                self._changed.wait(min(left, threading.TIMEOUT_MAX))
            tickets = self._line.take()
            self._gathering = False
            with contextlib.suppress(RuntimeError):  # the interpreter ends: this worker continues
                self._start_worker()
        return [each for each in tickets if each.future.set_running_or_notify_cancel()]

    # --- Forwards ---

    def _compute(self, tickets: list[WaitingRequest[In]]) -> None:
        tickets = [ticket for ticket in tickets if not self._is_late(ticket)]
        try:
            for ticket in self._together(tickets) if len(tickets) > 1 else tickets:
                if not self._is_late(ticket):
                    ticket.context.run(self._separately, ticket)
        except BaseException as error:  # noqa: BLE001 (a worker ends by no exception)
            for ticket in tickets:
                if not ticket.future.done():
                    _fail(ticket, error)

    def _together(self, tickets: list[WaitingRequest[In]]) -> list[WaitingRequest[In]]:
        """Computes tickets in one forward; returns tickets that need a separate one."""
        members: dict[WaitingRequest[In], Request | None] = {}
        for ticket in tickets:
            with contextlib.suppress(Exception):  # raised again in its separate forward
                request = ticket.open(shared=True)
                if request is None or shares_forwards(request):
                    members[ticket] = request
                else:
                    request.close()
        alone = [ticket for ticket in tickets if ticket not in members]
        rows = consecutive(members)
        try:
            output = self._share(members, rows)
        except Exception as why:  # noqa: BLE001 (of one of them or of all: each finds out by itself)
            LOG.warning(
                "a forward of %d requests failed, so each of them runs separately: %r",
                len(members),
                why,
            )
            return tickets
        for ticket, request in members.items():
            error = request.error if request is not None and request.failed else None
            # The others' rows may be the reason: they make its padding longer, say.
            if isinstance(error, RowsError | CaptureBudgetError):
                alone.append(ticket)
            else:
                self._finish(ticket, request, len(members), output, rows[ticket], error)
        return alone

    def _share(
        self,
        members: dict[WaitingRequest[In], Request | None],
        rows: dict[WaitingRequest[In], slice],
    ) -> Any:
        """Runs a forward under the latest deadline, with the hooks of each on its own rows."""
        owned = {
            request: rows[ticket] for ticket, request in members.items() if request is not None
        }
        with contextlib.ExitStack() as stack:
            for request in owned:
                stack.callback(request.close)
            if not members:
                return None
            latest = max(ticket.deadline for ticket in members)
            stack.enter_context(limited(max(0.0, latest - monotonic())))
            if owned:
                size = sum(ticket.rows for ticket in members)
                stack.enter_context(batch(owned, self._dim, size=size, warn=False))
            output = self._forward([*members])
        for request in owned:
            if request.error is None:
                request.warn_of_silence()
        with self._changed:
            self._sizes[len(members)] += 1
        return output

    def _separately(self, ticket: WaitingRequest[In]) -> None:
        """Computes one ticket in the context that submitted it."""
        request = output = error = None
        try:
            request = ticket.open(shared=False)
            with request or contextlib.nullcontext():
                output = self._forward([ticket])
            with self._changed:
                self._sizes[1] += 1
        except BaseException as raised:  # noqa: BLE001 (the client's)
            error = raised
        self._finish(ticket, request, 1, output, slice(0, ticket.rows), error)

    def _forward(self, tickets: Sequence[WaitingRequest[In]]) -> Any:
        with torch.no_grad():
            arguments = self._collate([ticket.item for ticket in tickets])
            check_rows(arguments, self._dim, sum(ticket.rows for ticket in tickets))
            if isinstance(arguments, Mapping):
                return self._model(**arguments)
            return self._model(*arguments if isinstance(arguments, tuple) else (arguments,))

    def _is_late(self, ticket: WaitingRequest[In]) -> bool:
        """Refuses a ticket whose deadline has passed."""
        late = monotonic() > ticket.deadline
        if late:
            ticket.future.set_exception(DeadlineExceededError(too_late(ticket.limit[1])))
        return late

    def _finish(  # noqa: PLR0913, PLR0917 (the outcome of a forward)
        self,
        ticket: WaitingRequest[In],
        request: Request | None,
        shared: int,
        output: Any,
        rows: slice,
        error: BaseException | None,
    ) -> None:
        """Resolves the future of a computed ticket."""
        if self._is_late(ticket):
            return
        self._count(ticket, request, shared, failed=error is not None)
        answer = None
        if error is None:
            try:
                answer = Answer(self._split(output, rows), request, shared)
            except BaseException as raised:  # noqa: BLE001 (the client's)
                error = raised
        if error is None:
            ticket.future.set_result(answer)
        else:
            _fail(ticket, error)

    def _count(
        self, ticket: WaitingRequest[In], request: Request | None, shared: int, *, failed: bool
    ) -> None:
        seen = 0 if request is None else ticket.rows
        counts = {
            "rows_seen": seen,
            "rows_changed": seen if changes(request) and not failed else 0,
            "hooks_failed": int(request is not None and request.error is not None),
        }
        with self._changed:
            self._counts.update(counts)
        attributes = {name.replace("_", "."): count for name, count in counts.items()}
        annotate(ticket.span, {"forward.requests": shared, **attributes})


def _fail(ticket: WaitingRequest[Any], error: BaseException) -> None:
    """Ends a ticket with an exception."""
    if isinstance(error, StopIteration):  # a coroutine that awaits cannot raise it
        made = RuntimeError(f"the request raised {error!r}")
        made.__cause__ = error
        error = made
    ticket.future.set_exception(error)

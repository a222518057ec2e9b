"""`PreparedPlans`: plans prepared once for each content."""

# Prepared plans close when garbage-collected, and each request holds the plan that opened it. So
# the cache needs no reference counts.

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import OrderedDict
from typing import TYPE_CHECKING

from ferrohook.errors import HookError
from ferrohook.plans.plan import Plan
from ferrohook.util.arguments import at_least, expect, expect_module

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

    from torch import nn

    from ferrohook.plans.prepared import Prepared, Request


class PreparedPlans:
    """Plans prepared for one model, found by content.

    A plan that is in the cache opens at constant cost. A dropped plan stays open for the requests
    that use it, and is closed after the last one.

    Args:
        model: any module.
        size: number of plans that stay prepared; the least recently used is dropped.
        max_bytes: budget of one request's captures, in addition to the budgets of the plan's
            entries; None for no such budget.

    Raises:
        HookTypeError: an argument has the wrong type.
        ValueError: `size` or `max_bytes` is below 1.
    """

    def __init__(self, model: nn.Module, *, size: int = 64, max_bytes: int | None = None) -> None:
        expect_module(model, "PreparedPlans needs")
        self._model = model
        self._size = at_least(1, "size", size)
        self._max_bytes = None if max_bytes is None else at_least(1, "max_bytes", max_bytes)
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, Prepared] | None = OrderedDict()
        self._alive: weakref.WeakValueDictionary[Hashable, Prepared]
        self._alive = weakref.WeakValueDictionary()
        """Prepared plans that are still referenced."""

    @contextlib.contextmanager
    def open(self, plan: Plan, *, prompt: int | Sequence[int] | None = None) -> Iterator[Request]:
        """Opens a request of a plan for the calls in a block.

        Args:
            plan: the plan, which is prepared if necessary.
            prompt: numbers of tokens of the prompts, see `Prepared.open`.

        Raises:
            HookError: the plan does not fit the model, see `Plan.prepare`; or `close` was called.
        """
        prepared = self.prepare(plan)  # this reference keeps it open
        request = prepared.open(prompt=prompt)
        request.stacklevel = 4  # the block, past two frames of `contextmanager`
        with request:
            yield request

    def prepare(self, plan: Plan) -> Prepared:
        """Returns the prepared plan, for requests of a `Batcher`; open while it is referenced.

        Raises:
            HookError: the plan does not fit the model, see `Plan.prepare`; or `close` was called.
        """
        expect(plan, Plan, "open needs a Plan")
        return self.find(tuple(entry.content() for entry in plan.entries), lambda: plan)

    def find(self, key: Hashable, read: Callable[[], Plan]) -> Prepared:
        """Returns a prepared plan by a key that the caller chooses.

        Args:
            key: equal keys have equal plans.
            read: returns the plan; called if it is not prepared yet.

        Raises:
            HookError: see `prepare`.
        """
        key = _Hashed(key)
        with self._lock:
            self._open_plans()
            former = self._alive.get(key)
            if former is not None and not (former.outdated or former.closed):
                dropped = self._keep(key, former)
                return former
        # Outside of the lock: it runs selectors.
        fresh = self._fresh(read())
        with self._lock:
            faster = self._alive.get(key)  # another thread's
            if faster is None or faster is former:
                self._alive[key] = faster = fresh
            dropped = self._keep(key, faster)
        del dropped  # closed after the lock is released
        return faster

    def _keep(self, key: Hashable, prepared: Prepared) -> list[Prepared | None]:
        """Marks a plan as most recently used; returns evicted ones. Call it under the lock."""
        kept = self._open_plans()
        gone = [kept.get(key)]
        kept[key] = prepared
        kept.move_to_end(key)
        while len(kept) > self._size:
            gone.append(kept.popitem(last=False)[1])
        return gone

    def _fresh(self, plan: Plan) -> Prepared:
        return plan.prepare(self._model, max_bytes=self._max_bytes)

    def _open_plans(self) -> OrderedDict[Hashable, Prepared]:
        if self._kept is None:
            msg = "these prepared plans were closed"
            raise HookError(msg)
        return self._kept

    def __len__(self) -> int:
        return len(self._kept or ())

    def close(self) -> None:
        """Drops all plans; idempotent."""
        with self._lock:
            dropped, self._kept = self._kept, None
        del dropped  # closed after the lock is released


class _Hashed:
    """A key whose hash is computed once.

    A dead plan is removed by its key, also while the interpreter ends and the functions that hash
    interventions are gone.
    """

    def __init__(self, key: Hashable) -> None:
        self._key = key
        self._hash = hash(key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Hashed) and self._key == other._key

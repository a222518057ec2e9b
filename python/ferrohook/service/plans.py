"""Plans in the bodies of requests, and plans prepared once for each content."""

# A prepared plan closes itself when nobody refers to it, so the cache of them counts no requests:
# each holds the one that it opened.

from __future__ import annotations

import contextlib
import json
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

from pydantic import PlainSerializer, PlainValidator, WithJsonSchema

from ferrohook.arguments import at_least_one, describe, expect, expect_module
from ferrohook.errors import HookError
from ferrohook.plans import Plan

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from ferrohook.plans import Prepared, Request


def plan_of(body: Any, **limits: Any) -> Plan:
    """Reads a plan from a request's JSON body: the validator of `PlanBody`.

    Limit the size of bodies too: keys that come twice, and the text's length, are checked in text
    alone.

    Args:
        body: JSON text, or what a framework parsed it into.
        **limits: `tensors` and limits of `Plan.from_json`.

    Raises:
        ValueError: the body is no plan or exceeds a limit; names the entry. As a validator's error
            FastAPI answers it with status 422.

    Examples:
        >>> short = PlainValidator(partial(plan_of, max_entries=4))
        >>> ShortPlan = Annotated[fh.Plan, short]
    """
    if isinstance(body, Plan):
        return body
    if not isinstance(body, str | bytes | Mapping):
        msg = f"a plan is an object, got {describe(body)}"
        raise ValueError(msg)  # noqa: TRY004 (pydantic's way to refuse)
    return Plan.from_json(body, **limits)


PLAN_SCHEMA: Final = {
    "type": "object",
    "description": "a plan, as `ferrohook.Plan.to_json` writes it",
    "properties": {
        "version": {"const": 1},
        "entries": {"type": "array", "items": {"type": "object"}},
    },
    "required": ["version", "entries"],
}
"""JSON schema of a plan, for OpenAPI."""

PlanBody: TypeAlias = Annotated[
    Plan,
    PlainValidator(plan_of),
    PlainSerializer(lambda plan: json.loads(plan.to_json())),
    WithJsonSchema(PLAN_SCHEMA),
]
"""Type of a field of a pydantic model, or with `Body()` of an endpoint's parameter: a plan."""


class PreparedPlans:
    """Plans prepared for one model, found by content.

    A plan that comes again is opened at constant cost. A dropped one stays open for the requests
    that use it, and is closed after the last of them.

    Args:
        model: any module.
        size: number of plans that stay prepared; the least recently used is dropped.
        max_bytes: budget of one request's captures, beside those of the plan's entries; None for
            no other.

    Raises:
        HookTypeError: an argument has the wrong type.
        ValueError: `size` or `max_bytes` is below 1.
    """

    def __init__(self, model: nn.Module, *, size: int = 64, max_bytes: int | None = None) -> None:
        expect_module(model, "PreparedPlans takes")
        self._model = model
        self._size = at_least_one("size", size)
        self._max_bytes = None if max_bytes is None else at_least_one("max_bytes", max_bytes)
        self._lock = threading.Lock()
        self._prepared: OrderedDict[object, Prepared] | None = OrderedDict()

    @contextlib.contextmanager
    def open(self, plan: Plan) -> Iterator[Request]:
        """Opens a request of a plan for the calls in a block.

        Raises:
            HookError: the plan does not fit the model, see `Plan.prepare`; or `close` was called.
        """
        prepared = self.prepare(plan)  # this reference keeps it open
        request = prepared.open()
        request.stacklevel = 4  # the block, behind two frames of `contextmanager`
        with request:
            yield request

    def prepare(self, plan: Plan) -> Prepared:
        """Returns a plan prepared, for requests of a `Batcher`; open while referred to.

        Raises:
            HookError: the plan does not fit the model, see `Plan.prepare`; or `close` was called.
        """
        expect(plan, Plan, "open takes a Plan")
        key = tuple(entry.content() for entry in plan.entries)
        with self._lock:
            former = self._open_plans().get(key)
            if former is not None and not former.outdated:
                self._open_plans().move_to_end(key)
                return former
        # Outside of the lock: it runs selectors.
        fresh = plan.prepare(self._model, max_bytes=self._max_bytes)
        dropped = [former]  # closed after the lock is released
        with self._lock:
            found = self._open_plans()
            if key in found and found[key] is not former:
                return found[key]  # another thread was faster
            found[key] = fresh
            found.move_to_end(key)
            while len(found) > self._size:
                dropped.append(found.popitem(last=False)[1])
        return fresh

    def _open_plans(self) -> OrderedDict[object, Prepared]:
        if self._prepared is None:
            msg = "these prepared plans were closed"
            raise HookError(msg)
        return self._prepared

    def __len__(self) -> int:
        return len(self._prepared or ())

    def close(self) -> None:
        """Drops all plans; idempotent."""
        with self._lock:
            dropped, self._prepared = self._prepared, None
        del dropped  # closed after the lock is released

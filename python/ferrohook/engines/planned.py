"""Plans prepared for the model of an engine, and what none of them may have."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from typing import TYPE_CHECKING, Final, cast

from ferrohook.attach.attention import DIMENSIONS, is_point
from ferrohook.dictionaries.transcoded import check_places
from ferrohook.errors import HookError, HookTypeError
from ferrohook.plans import Plan, Prepared
from ferrohook.plans.entries import dictionary_in
from ferrohook.plans.needs import NEEDS, BackEnd
from ferrohook.plans.prepared_plans import PreparedPlans
from ferrohook.util.arguments import expect

if TYPE_CHECKING:
    from torch import nn

    from ferrohook.attach.attention import AttentionPoint
    from ferrohook.dictionaries.dictionary import Dictionary
    from ferrohook.engines.model.step_values import StepValues
    from ferrohook.plans.entries import HookEntry


BACK_END: Final = BackEnd(
    NEEDS - {"calls", "cut rows", "gradients", "not finite", "stop"},
    {
        "calls": "steps are joined by position, so calls= has no meaning",
        "cut rows": "slice= must keep the whole dimension whose rows are joined",
        "gradients": "it does not compute gradients",
        "not finite": "its hook contains NaN or infinity",
        "stop": "stop=True would end the forward for other requests",
    },
)
"""Back end of engines whose plans need not cross processes."""


NO_PATTERN: Final = (
    "the keys of all requests share pages in one dimension; capture it in a separate call of the "
    "model, on the tokens of the answer"
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

    def clear(self) -> None:
        """Drops the prepared plans; a plan with open requests closes when they end."""
        with self._lock:
            dropped, self._kept = self._kept, OrderedDict()
        del dropped  # closed after the lock is released

    def serve(self, plan: Plan | Prepared) -> Prepared:
        """Returns the plan prepared for the model.

        Raises:
            HookTypeError: it is neither a plan nor prepared.
            HookError: the plan does not fit the model, see `Plan.prepare`; it was prepared for
                another; or it has a hook or capture that cannot fire in an engine.
        """
        if not isinstance(plan, Prepared):
            expect(plan, Plan, "plan must be a Plan or a Prepared")
            return self.prepare(plan)
        if plan.model is not self._model:
            msg = "the plan was prepared for a different model than the engine's"
            raise HookError(msg)
        self._check(plan)
        return plan

    def forget(self, dictionary: Dictionary) -> None:
        """Drops the plans with features of a dictionary: they would keep its weights."""
        with self._lock:
            kept = self._open_plans()
            dropped = [
                kept.pop(key)
                for key, plan in [*kept.items()]
                if any(dictionary_in(entry) is dictionary for entry in plan.entries)
            ]
        del dropped  # closed after the lock is released

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
        places, read = prepared.places(number), prepared.places(number, read=True)
        for name, place in (*read.items(), *places.items()):
            module = place.module
            if is_point(module):
                point = cast("AttentionPoint", module)
                if "keys" in DIMENSIONS[point.name]:
                    return f"{name}: {NO_PATTERN}"
                module = point.points.module
            if self._values is not None and module not in self._values.calls:
                return f"{name!r} does not run in its steps"
        if self._values is None:
            return None
        entry = prepared.entries[number]
        for name, place in places.items():
            if (reason := self._values.refusal(name, place, entry)) is not None:
                return reason
        for reads, writes in zip(read.values(), places.values(), strict=False):
            seen = self._values.seen(reads), self._values.seen(writes)
            try:
                check_places(cast("HookEntry", entry).hook, *seen)
            except HookTypeError as error:
                return str(error)
        return None

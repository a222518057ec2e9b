"""Plans in the bodies of requests."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Final, TypeAlias

from pydantic import PlainSerializer, PlainValidator, WithJsonSchema

from ferrohook.errors import HookTypeError
from ferrohook.plans import Plan
from ferrohook.plans.needs import NEEDS, BackEnd
from ferrohook.util.arguments import describe


def plan_of(body: Any, *, refuse: Collection[str] = (), **limits: Any) -> Plan:
    """Reads a plan from a request's JSON body: the validator of `PlanBody`.

    Limit the size of bodies too: duplicate keys and the length of the text are checked only if
    `body` is text.

    Args:
        body: JSON text, its parsed value from a framework, or a plan; the limits hold for each.
        refuse: options that no entry may have, such as `slice`, `stop`, `device` and `on_error`.
        **limits: `tensors`, `dictionaries` and limits of `Plan.from_json`.

    Raises:
        ValueError: the body is not a plan, exceeds a limit or has a refused option; it names the
            entry. FastAPI answers it with status 422, as a validator's error.
        HookTypeError: limits for a plan that has no JSON form, see `Plan.to_json`, or `refuse` has
            a name that is not an option.

    Examples:
        >>> short = PlainValidator(partial(plan_of, max_entries=4, refuse={"stop"}))
        >>> ShortPlan = Annotated[fh.Plan, short]
    """
    unknown = {refuse} if isinstance(refuse, str) else {*refuse} - NEEDS
    if unknown:
        names = ", ".join(map(repr, unknown))
        msg = f"refuse must be a collection of {', '.join(sorted(NEEDS))}; got {names}"
        raise HookTypeError(msg)
    if isinstance(body, Plan):
        plan = body
        if limits:  # checked where plans are read
            Plan.from_json(body.to_json(), **limits)
    elif isinstance(body, str | bytes | Mapping):
        plan = Plan.from_json(body, **limits)
    else:
        msg = f"a plan must be an object, got {describe(body)}"
        raise ValueError(msg)  # noqa: TRY004 (pydantic's way to refuse)
    served = BackEnd(NEEDS.difference(refuse), {need: f"leave out {need}" for need in refuse})
    for number, entry in enumerate(plan.entries):
        if (reason := served.refusal(entry)) is not None:
            msg = f"entries[{number}]: {reason}"
            raise ValueError(msg)
    return plan


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

"""Prefix cache of vLLM: the blocks that requests with plans read, and give to others.

In the process of the scheduler. Blocks that end before the first position that a plan changes are
every request's; later ones have the plan's salt among their keys. Attention computes masked rows
too, and NaN times zero is NaN, so a changed row may spoil rows before it that run in the same step.
Therefore no request gets a block of a step with changed rows before that step has been checked.
"""

from __future__ import annotations

import dataclasses
import secrets
from typing import TYPE_CHECKING, Any, Final

from ferrohook.engines.wire import NAME

if TYPE_CHECKING:
    from collections.abc import Collection

_PLAN: Final = "ferrohook_plan"
_WAITING: Final = "ferrohook_waiting"


@dataclasses.dataclass
class CachedPlan:
    """A plan as the prefix cache of its request's engine knows it."""

    salt: str | None
    """Key of the blocks that it may have changed."""
    changed: int | None
    """First position whose keys and values it may change; None if it changes none."""
    read: int | None
    """First position that must run for it; None if there is none."""
    checked: int = 0
    """Tokens whose steps have been checked."""


def has_plan(params: Any) -> bool:
    """True if the parameters of a request have a plan."""
    extra = getattr(params, "extra_args", None)  # asked in each step, of each request
    return extra is not None and NAME in extra


def private_key() -> tuple[str, str]:
    """Returns the key of a block that no request shares."""
    return NAME, secrets.token_hex(16)


def keys_of(request: Any, end: int) -> list[tuple[str, str]]:
    """Returns the keys that the plan of a request adds to a block that ends before a position."""
    plan = _plan_of(request)
    if plan.changed is None or end <= plan.changed:
        return []
    return [private_key() if plan.salt is None else (NAME, plan.salt)]


def readable(request: Any, tokens: int) -> int:
    """Returns how many of a request's first tokens may be read from the cache."""
    read = _plan_of(request).read
    return tokens if read is None else min(tokens, read)


def shareable(coordinator: Any, request: Any, tokens: int) -> int:
    """Returns how many of a request's first tokens others may read; `share` shares the rest.

    Args:
        coordinator: of the cache.
        request: the request.
        tokens: tokens that have run by the end of the step.
    """
    plan = _plan_of(request)
    if plan.changed is None or tokens <= plan.changed:
        return tokens
    vars(coordinator).setdefault(_WAITING, {})[request.request_id] = plan
    # One that was preempted runs again, from fewer tokens: their steps are checked anew.
    plan.checked = min(plan.checked, int(request.num_computed_tokens))
    return min(tokens, plan.checked)


def share(scheduler: Any, scheduled: Any, failed: Collection[str]) -> None:
    """Shares blocks of a step that has been checked.

    Args:
        scheduler: the scheduler.
        scheduled: its output for the step.
        failed: requests whose plans failed in it.
    """
    manager = scheduler.kv_cache_manager
    waiting: dict[str, CachedPlan] = vars(manager.coordinator).get(_WAITING, {})
    if not waiting:
        return
    cached = scheduled.scheduled_cached_reqs
    starts = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
    starts |= zip(cached.req_ids, cached.num_computed_tokens, strict=True)
    for request_id, plan in [*waiting.items()]:
        request = scheduler.requests.get(request_id)
        if request is None or request_id in failed:
            del waiting[request_id]
        elif request_id in starts:
            end = starts[request_id] + scheduled.num_scheduled_tokens[request_id]
            # Else it was preempted meanwhile, and its blocks are others.
            if end <= request.num_computed_tokens and not request.num_stale_output_tokens:
                plan.checked = end
                manager.cache_blocks(request, min(end, request.num_tokens))


def evict(scheduler: Any, failed: Collection[str]) -> None:
    """Has no request read what the plans of failed requests changed, not even one of their plan."""
    manager = scheduler.kv_cache_manager
    sizes = [each.block_size for each in manager.coordinator.single_type_managers]
    blocks: set[int] = set()
    for request_id in failed & scheduler.requests.keys():
        changed = _plan_of(scheduler.requests[request_id]).changed
        if changed is not None:
            for size, group in zip(sizes, manager.get_block_ids(request_id), strict=True):
                blocks.update(group[changed // size :])
    manager.evict_blocks(blocks)


def _plan_of(request: Any) -> CachedPlan:
    """Returns the plan of a request that has one."""
    found: CachedPlan | None = vars(request).get(_PLAN)
    if found is None:
        payload = request.sampling_params.extra_args[NAME]
        # One that did not pass the front end fails in the worker.
        prefix = payload["prefix"] if isinstance(payload, dict) and "prefix" in payload else None
        found = CachedPlan(**prefix) if prefix is not None else CachedPlan(None, 0, 0)
        setattr(request, _PLAN, found)
    return found

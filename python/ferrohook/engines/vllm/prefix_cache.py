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
    gated: int | None = None
    """First position that its gates read; None if there is none."""
    first: str | None = None
    """Request of the first answer to its prompt, which captures the rows of the prompt for it; None
    if it is that itself."""
    checked: int = 0
    """Tokens whose steps have been checked."""
    shared: int = 0
    """Tokens of which `share` has shared the whole blocks."""
    again: bool = False
    """True if its request was preempted: one step may run rows of the prompt and changed ones."""


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


def readable(coordinator: Any, request: Any, tokens: int) -> int:
    """Returns how many of a request's first tokens may be read from the cache.

    Args:
        coordinator: of the cache.
        request: the request.
        tokens: its tokens that may be cached.
    """
    plan = _plan_of(request)
    if request.num_preemptions:
        # It may run again to run without drafts, but vLLM adds some where it runs one token only.
        tokens = max(0, min(tokens, request.num_tokens - 2))
    if plan.read is None:
        return tokens
    most = plan.read
    if plan.first is not None:
        most = max(most, min(request.num_prompt_tokens, _captured(coordinator, plan.first)))
    if plan.gated is not None:
        most = min(most, plan.gated)
    return min(tokens, most)


def _captured(coordinator: Any, request_id: str) -> int:
    """Returns how many of a running request's first tokens have run by the end of the step.

    At least: its last block may have room for others. One that does not run has no blocks: it may
    be preempted, ended, or in another engine, and the worker may not have its captures.
    """
    sizes = [each.block_size for each in coordinator.single_type_managers]
    blocks: tuple[list[Any], ...] = coordinator.get_blocks(request_id)
    tokens = min(int(size) * (len(group) - 1) for size, group in zip(sizes, blocks, strict=True))
    plan = vars(coordinator).get(_WAITING, {}).get(request_id)
    return tokens if plan is None or not plan.again else min(tokens, plan.checked)


def shareable(coordinator: Any, request: Any, tokens: int) -> int:
    """Returns how many of a request's first tokens others may read; `share` shares the rest.

    Args:
        coordinator: of the cache.
        request: the request.
        tokens: tokens that have run by the end of the step.
    """
    plan = _plan_of(request)
    if plan.changed is None or _end_of_rows(request, tokens) <= plan.changed:
        return tokens
    vars(coordinator).setdefault(_WAITING, {})[request.request_id] = plan
    plan.again = request.num_preemptions > 0
    # One that was preempted runs again, from fewer tokens: their steps are checked anew. Tokens of
    # a step in flight may be drafts that are rejected.
    run = int(request.num_computed_tokens) - int(request.num_output_placeholders)
    plan.checked = min(plan.checked, run)
    plan.shared = min(plan.shared, plan.checked)
    return min(tokens, plan.checked)


def _end_of_rows(request: Any, tokens: int) -> int:
    """Returns the position after the rows of a step, of which the last ones may be drafts.

    At most: an engine that schedules asynchronously does not know all tokens of the steps before.
    """
    if tokens < request.num_tokens:
        return tokens
    return tokens + len(request.spec_token_ids) + int(request.num_output_placeholders)


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
    sizes = {int(each.block_size) for each in manager.coordinator.single_type_managers}
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
                before, plan.shared = plan.shared, min(end, request.num_tokens)
                if any(before // size != plan.shared // size for size in sizes):
                    manager.cache_blocks(request, plan.shared)


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
        found = (
            CachedPlan(**prefix, first=payload["first"])
            if prefix is not None
            else CachedPlan(None, 0, 0, 0)
        )
        setattr(request, _PLAN, found)
    return found

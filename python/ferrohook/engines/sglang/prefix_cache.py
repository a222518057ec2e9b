"""Prefix cache of SGLang: the tokens that requests with plans read, and give to others.

In the process of the scheduler. The keys of its radix tree are token ids of 64 bits, of which a
vocabulary uses the lower 32. From the first position on that a plan changes, the ids in the keys of
its requests have a number of the plan in their upper bits, so that only requests with this number
find the keys and values there. Those before are every request's.

Attention computes masked rows too, and NaN times zero is NaN, so a changed row may spoil rows
before it that run in the same step. So keys and values enter the tree after the check of their
step, unless it failed their request.
"""

from __future__ import annotations

import importlib
import itertools
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

if TYPE_CHECKING:
    from array import array

_ID_BITS: Final = 32
"""Bits of a token id; the number of a plan is above them."""
_MOST_SALTS: Final = 2**16
"""Salts whose numbers are remembered; one that comes back later shares nothing from before."""
_numbers: Final = itertools.count(1)
"""Numbers of this process. None is used twice: the tree may still have what its last user wrote."""


class NumberedPlan(NamedTuple):
    """A plan as the prefix cache of its request's scheduler knows it."""

    number: int
    """Upper bits of the ids whose keys and values it may have changed."""
    changed: int | None
    """Position of the first of them; None if there is none."""
    read: int | None
    """First position that must run for the plan; None if there is none."""


class PlanNumbers:
    """Numbers of the plans of one scheduler, by their salts."""

    def __init__(self) -> None:
        self._numbers: OrderedDict[str, int] = OrderedDict()

    def find(self, salt: str) -> int:
        """Returns the number of a salt."""
        number = self._numbers.pop(salt, None) or next(_numbers)
        self._numbers[salt] = number
        if len(self._numbers) > _MOST_SALTS:
            self._numbers.popitem(last=False)
        return number


def can_move(cache: Any, args: Any) -> bool:
    """Returns False if others than `keys_of` and the tree see the ids in the keys of a cache.

    KV events would publish numbers as tokens, caches outside the device would store them.

    Args:
        cache: the scheduler's.
        args: its `ServerArgs`.
    """
    unified = importlib.import_module("sglang.srt.mem_cache.unified_radix_cache")
    return (
        type(cache) is unified.UnifiedRadixCache
        and cache.linker is None
        and cache.cache_controller is None
        and not args.kv_events_config
    )


def check_tokens(ids: array[int]) -> None:
    """Refuses a prompt with ids that are not token ids: they could be the keys of a plan.

    Raises:
        ValueError: it has some.
    """
    if ids and bool((_tensor_of(ids) >> _ID_BITS).any()):
        msg = f"token ids must be at least 0 and below 2**{_ID_BITS}"
        raise ValueError(msg)


def keys_of(plan: NumberedPlan, ids: array[int]) -> array[int]:
    """Returns the first ids of a request as its keys have them."""
    if plan.changed is None or plan.changed >= len(ids):
        return ids
    keys = ids[:]
    _tensor_of(keys)[plan.changed :] += plan.number << _ID_BITS
    return keys


def _tensor_of(ids: array[int]) -> torch.Tensor:
    """Returns ids as a tensor of the same memory."""
    return torch.frombuffer(ids, dtype=torch.int64)

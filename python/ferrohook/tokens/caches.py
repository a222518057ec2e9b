"""KV caches and states of models: which a call uses, how many tokens they hold, and where."""

from __future__ import annotations

from typing import Any, Final

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

_CACHES: Final = ("cache", "past_key_values", "cache_params", "state")
"""Names of the KV cache: from transformers 5.24 on, and before; of RWKV's states."""


def has_states_alone(cache: Any) -> bool:
    """True for the cache of a state-space model, which has no keys and does not count."""
    return all(getattr(cache, "is_linear", None) or [False])


def lasting(cache: Any) -> Any:
    """Returns the key of a cache: the first of a list of states, which are written in place."""
    states = isinstance(cache, tuple | list) and cache and isinstance(cache[0], Tensor)
    return cache[0] if states else cache


def memory_of(cache: Any) -> StorageWeakRef | None:
    """Returns the memory of a cache's keys or states, if it keeps them in one place."""
    cache = getattr(cache, "self_attention_cache", cache)
    if getattr(cache, "offloading", False):
        return None
    layers = getattr(cache, "layers", ())
    kept = [getattr(layer, "keys", None) for layer in layers] or getattr(cache, "key_cache", [])
    for layer in layers:
        kept.extend(getattr(layer, "recurrent_states", {}).values())  # written in place
    found = next((each for each in kept if isinstance(each, Tensor) and each.numel()), None)
    return None if found is None else StorageWeakRef(found.untyped_storage())


def length_of(cache: Any) -> int | None:
    """Returns the number of tokens that a KV cache holds; None if it does not know."""
    if has_states_alone(cache):
        return None if cache.has_previous_state() else 0
    return int(cache.get_seq_length()) if hasattr(cache, "get_seq_length") else None


def given_cache(named: dict[str, Any]) -> Any:
    """Returns the KV cache in named values, if there is one."""
    found = (dict.get(named, name) for name in _CACHES)
    return next((cache for cache in found if cache is not None), None)


def cache_in(output: Any) -> Any:
    """Returns the KV cache in a model's output, if there is one."""
    if isinstance(output, dict):
        return given_cache(output)
    items = output if isinstance(output, tuple | list) else ()
    return next((item for item in items if hasattr(item, "get_seq_length")), None)

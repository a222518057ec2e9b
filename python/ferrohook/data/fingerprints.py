"""Fingerprints: short digests of models and batches that change with their contents."""

# Of a tensor of more than `WHOLE` bytes the digest has the sum of each block of 512 words, a word
# being 8 bytes, and some 4,000 words. One changed element changes a sum, and an exchange of rows
# does too, unless both stand in one block: then only the sampled words may show it. All of a large
# tensor is read, once, on its own device: as much memory traffic as its use in one forward.

from __future__ import annotations

import hashlib
import types
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ferrohook._core import NativeDetector
from ferrohook.util.tensors import parts, shape_of

WHOLE = 2**16
"""Bytes of a tensor up to which all of them are hashed."""
BLOCK = 512
"""Words of 8 bytes that are summed."""
SAMPLE = 2**12
"""Least number of words that are sampled."""
DEPTH = 100
"""Levels of a structure that count."""

_NAMED = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType)


def fingerprint(value: object) -> str:
    """Returns the digest of a structure of tensors and data: 16 hexadecimal digits.

    Tensors count by shape, dtype and contents, on any device; structures by their items; numbers,
    strings and bytes by their value; functions, classes and modules by their name; detectors by
    their class; other objects by the state that `pickle` would store, or by their class if they
    have none. All of the contents of a tensor up to 64 KiB is hashed; of a larger one the sum of
    each 4 KiB, and every n-th of its words, some 4,000 in all. Tensors without such memory (`meta`,
    quantised) count by their shape and dtype.
    """
    digest = hashlib.blake2b(digest_size=8)
    _add(digest, value, frozenset())
    return digest.hexdigest()


def fingerprints_of(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Returns the fingerprint of each tensor; one that has several names is read once."""
    found: dict[int, str] = {}
    for tensor in tensors.values():
        if id(tensor) not in found:
            found[id(tensor)] = fingerprint(tensor)
    return {name: found[id(tensor)] for name, tensor in tensors.items()}


def _add(digest: Any, value: Any, above: frozenset[int]) -> None:
    """Adds a value to a digest; `above` has the ids of the objects that contain it."""
    if isinstance(value, Tensor):
        _add_tensor(digest, value, above)
    elif value is None or isinstance(value, bool | int | float | complex | str | bytes):
        _add_text(digest, f"{type(value).__name__} {value!r}")
    elif id(value) in above or len(above) == DEPTH:
        _add_text(digest, "cycle")
    elif isinstance(value, _NAMED):
        _add_text(digest, value.__name__)
    elif isinstance(value, NativeDetector):  # it counts, and changes nothing
        _add_text(digest, type(value).__name__)
    else:
        _add_object(digest, value, above | {id(value)})


def _add_text(digest: Any, text: str) -> None:
    digest.update(f"{text}\0".encode("utf-8", "surrogatepass"))


def _add_object(digest: Any, value: Any, above: frozenset[int]) -> None:
    if isinstance(value, Mapping):
        kind, items = "mapping", sorted(value.items(), key=lambda item: repr(item[0]))
    elif isinstance(value, AbstractSet):
        kind, items = "set", list(enumerate(sorted(map(fingerprint, value))))
    elif isinstance(value, tuple | list):  # a packed sequence with its sizes and order
        kind, items = "structure", list(enumerate(value))
    elif (inside := parts(value)) is not None:
        kind, items = "structure", list(inside)
    else:
        kind, items = type(value).__qualname__, list(enumerate(_state(value)))
    _add_text(digest, f"{kind} of {len(items)}")
    for key, item in items:
        _add_text(digest, repr(key))
        _add(digest, item, above)


def _state(value: Any) -> list[Any]:
    """Returns the parts that `pickle` would store of an object."""
    if isinstance(value, nn.Module):
        return []
    try:
        reduced = value.__reduce_ex__(4)
        if isinstance(reduced, str):
            return [reduced]
        function, arguments, *state = reduced
        # Iterators over list and dict items follow the state.
        return [function, arguments, *state[:1], *(list(each or ()) for each in state[1:3])]
    except Exception:  # noqa: BLE001 (not picklable: whatever its class raises)
        return []


def _add_tensor(digest: Any, tensor: Tensor, above: frozenset[int]) -> None:
    if is_lazy(tensor):
        _add_text(digest, "uninitialised")
        return
    _add_text(digest, f"{tensor.dtype} {[*shape_of(tensor)]}")
    tensor = tensor.detach()
    if tensor.is_nested and tensor.layout == torch.strided:
        _add_object(digest, tensor.unbind(), above)
        return
    flatten: Any = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:  # DTensor, quantised or nested
        for name in flatten()[0]:
            _add(digest, getattr(tensor, name), above)
    elif tensor.layout != torch.strided:
        _add_object(digest, tensor, above | {id(tensor)})
    elif not tensor.is_meta:
        with suppress(RuntimeError, NotImplementedError, TypeError):  # no memory: fake, quantised
            for words in _words(tensor.resolve_conj().resolve_neg().contiguous()):
                digest.update(words.cpu().numpy())


def _words(tensor: Tensor) -> list[Tensor]:
    """Returns the parts of a contiguous tensor's memory that are hashed."""
    memory = tensor.view(-1).view(torch.uint8)
    if len(memory) <= WHOLE:
        return [memory]
    if memory.storage_offset() % 8:
        memory = memory.clone()
    end = len(memory) // (8 * BLOCK) * 8 * BLOCK
    words = memory[:end].view(torch.int64)
    sums = words.view(-1, BLOCK).sum(dim=1)
    # An odd step: samples every column of a matrix, whose rows often are powers of 2.
    sample = words[:: len(words) // SAMPLE | 1]
    return [torch.cat([sums, sample]), memory[end:]]

"""`capture`: keeps the activations that pass modules of a model."""

from __future__ import annotations

import enum
import functools
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy as shallow_copy
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TypeAlias

import torch
from torch import Tensor

from ferrohook import shards
from ferrohook._core import Attachment, Collector, HookHandle, ScopeBase, record_all
from ferrohook.errors import HookTypeError, NeverFiredWarning, SelectionError
from ferrohook.instrumentation import attach, registry_of
from ferrohook.never_fired import explain
from ferrohook.scopes import Scope
from ferrohook.selection import select, select_names

if TYPE_CHECKING:
    import os
    from types import EllipsisType

    from torch import nn

    from ferrohook.selection import Selector

Index: TypeAlias = "int | slice | EllipsisType | Tensor | list[int] | tuple[Any, ...] | None"
Keep: TypeAlias = 'Literal["last", "all"] | int'

# Behind all other hooks: what is captured is what leaves the hooks.
_BEHIND_ALL = -(2**63)
_AHEAD_OF_ALL = 2**63 - 1


class _Stopped(enum.Enum):
    STOPPED = enum.auto()

    def __repr__(self) -> str:
        return "ferrohook.STOPPED"

    __str__ = __repr__


STOPPED: Final = _Stopped.STOPPED
"""What a model's call returns that was ended after the last module wanted."""


class ActivationCache(Mapping[str, Any]):
    """Activations by the names of their modules, in the order in which those first ran.

    A value is what the module returned (or took), with its structure, tensors as they were asked
    for. With `keep="all"` or a number it is a list, with an entry for each call that was kept.
    """

    def __init__(
        self,
        activations: Mapping[str, Any],
        grads: Mapping[str, Any] | None = None,
    ) -> None:
        """Shows `activations` and their gradients."""
        self._activations = activations
        self._grads = {} if grads is None else grads

    def __getitem__(self, name: str) -> Any:
        """The activations of one module.

        Raises:
            SelectionError: no module of that name was selected, or it never ran.
            StaleActivationError: a tensor was changed in place after it was captured.
        """
        try:
            return self._activations[name]
        except SelectionError:
            raise
        except KeyError:
            raise _missing(name, "is not among", self) from None

    def __contains__(self, name: object) -> bool:
        # Without reading: what was changed in place is there too.
        return name in self._activations

    def __iter__(self) -> Iterator[str]:
        return iter(self._activations)

    def __len__(self) -> int:
        return len(self._activations)

    @property
    def grads(self) -> ActivationCache:
        """The gradients of the captured tensors, so far (`capture(grads=True)`).

        A tensor's is a tensor, or None where none came; that of a structure is a list with an entry
        for each of its tensors.
        Empty where gradients were not asked for.
        """
        return ActivationCache(self._grads)

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(tensor.nbytes for name in self for tensor in tensors_in(self._peek(name)))

    def _peek(self, name: str) -> Any:
        # To be described, not to be computed with: stale ones too.
        source = self._activations
        return source.peek(name) if isinstance(source, _Collected) else source[name]

    def stack(self, pattern: str | re.Pattern[str] = "**") -> Tensor:
        """The tensors of several modules as one, along a new first dimension.

        Args:
            pattern: a name, a glob or a compiled regex, see `select`.

        Raises:
            SelectionError: the pattern matches none of the names.
            HookTypeError: `pattern` is none of these.
            RuntimeError: the shapes differ.
        """
        if not isinstance(pattern, str | re.Pattern):
            msg = f"stack takes a name, a glob or a compiled regex, got {type(pattern).__name__}"
            raise HookTypeError(msg)
        names = select_names(self, pattern)
        if not names:
            msg = f"{pattern!r} matches none of what was captured: {', '.join(self) or 'nothing'}"
            raise SelectionError(msg)
        return torch.stack([tensor for name in names for tensor in tensors_in(self[name])])

    def to(self, device: torch.device | str) -> ActivationCache:
        """The same on another device; the tensors that are there already are shared."""
        return self._map(lambda tensor: tensor.to(device))

    def _map(self, convert: Callable[[Tensor], Tensor]) -> ActivationCache:
        def converted(values: Mapping[str, Any]) -> dict[str, Any]:
            return {name: map_tensors(convert, value) for name, value in values.items()}

        return ActivationCache(converted(self._activations), converted(self._grads))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes all to a file in the format of safetensors, which replaces one that is there.

        Tuples, lists and dicts keep their structure; other classes are saved as dicts.

        Raises:
            HookTypeError: a value that is neither plain data nor a tensor of a type that
                safetensors has a name for.
        """
        shards.save(path, {"activations": dict(self), "grads": dict(self._grads)})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """What `save` wrote, on the CPU.

        Needs the package safetensors (`ferrohook[safetensors]`).
        """
        return cls(**shards.load(path))

    def __repr__(self) -> str:
        rows = [("name", "shape", "dtype", "bytes")]
        for name in self:
            value = self._peek(name)
            rows += [
                (name, str(tuple(tensor.shape)), str(tensor.dtype)[6:], f"{tensor.nbytes:,}")
                for tensor in tensors_in(value)
            ] or [(name, "-", type(value).__name__, "-")]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            f"{name:<{widths[0]}}  {shape:<{widths[1]}}  {dtype:<{widths[2]}}  {size:>{widths[3]}}"
            for name, shape, dtype, size in rows
        ]
        return "\n".join(line.rstrip() for line in lines)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of a structure of tuples, lists, dicts and dataclasses, in order."""
    if isinstance(value, Tensor):
        yield value
    else:
        for item in _items(value):
            yield from tensors_in(item)


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, tuple | list):
        return value
    if _is_dataclass(value):
        return [getattr(value, name, None) for name in value.__dataclass_fields__]
    return ()


def map_tensors(convert: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The same structure, of the same classes, with other tensors."""
    if isinstance(value, Tensor):
        return convert(value)
    if isinstance(value, tuple | list):
        items = [map_tensors(convert, item) for item in value]
        return items if isinstance(value, list) else _tuple_like(value, items)
    if isinstance(value, dict):
        # Dynamo traces no copies of plain dicts.
        copied = {} if type(value) is dict else shallow_copy(value)
        for key, item in value.items():
            copied[key] = map_tensors(convert, item)
        return copied
    if _is_dataclass(value):
        copied = shallow_copy(value)
        for name in value.__dataclass_fields__:
            if hasattr(value, name):
                # It may be frozen.
                object.__setattr__(copied, name, map_tensors(convert, getattr(value, name)))
        return copied
    return value


def _tuple_like(value: tuple[Any, ...], items: list[Any]) -> tuple[Any, ...]:
    cls: Any = type(value)
    if hasattr(cls, "n_sequence_fields"):  # one of torch.return_types
        return cls(items)  # type: ignore[no-any-return]
    # As a named tuple is made; how others are, they alone know.
    return getattr(cls, "_make", tuple)(items)


def _is_dataclass(value: Any) -> bool:
    return hasattr(value, "__dataclass_fields__") and not isinstance(value, type)


def _missing(name: object, state: str, names: Iterable[str]) -> SelectionError:
    return SelectionError(f"{name!r} {state} what was captured: {', '.join(names) or 'nothing'}")


class _Collected(Mapping[str, Any]):
    """What a collector holds, by name."""

    def __init__(
        self,
        places: dict[str, int],
        collector: Collector,
        read: Callable[..., list[Any]],
        *,
        only_last: bool,
    ) -> None:
        self._places = places
        self._collector = collector
        self._read = read
        self._only_last = only_last

    def __getitem__(self, name: str) -> Any:
        return self._value(name)

    def peek(self, name: str) -> Any:
        """The same, changed in place or not."""
        return self._value(name, stale=True)

    def _value(self, name: str, **options: bool) -> Any:
        place = self._places.get(name)
        values = [] if place is None else self._read(place, **options)
        if not values:
            state = "was not selected" if place is None else "never ran"
            raise _missing(name, f"{state} and is not among", self)
        return values[-1] if self._only_last else values

    def __contains__(self, name: object) -> bool:
        return name in list(self)

    def __iter__(self) -> Iterator[str]:
        names = list(self._places)
        return iter([names[place] for place in self._collector.ran()])

    def __len__(self) -> int:
        return len(self._collector.ran())


class _HostCopies:
    """A capture's copies from GPUs, made beside what those compute."""

    def __init__(self) -> None:
        self._streams: set[torch.cuda.Stream] = set()

    def finish(self) -> None:
        """Waits until all are complete."""
        for stream in list(self._streams):
            stream.synchronize()

    def start(self, tensor: Tensor, *, clone: bool) -> Tensor:
        """Starts a copy into pinned memory."""
        # On the stream that computes: what it writes in place later must not reach the copy.
        source = tensor.clone() if clone else tensor
        stream = _side_stream(tensor.device)
        self._streams.add(stream)
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            host = torch.empty_like(source, device="cpu", pin_memory=True)
            host.copy_(source, non_blocking=True)
        source.record_stream(stream)
        return host


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _converter(
    copies: _HostCopies,
    device: torch.device | None,
    dtype: torch.dtype | None,
    index: Index,
    copy: str,
) -> Callable[[Tensor], Tensor] | None:
    # Holds the copies and not the collector, which holds it: tensors are not to wait for the
    # garbage collector.
    if device is None and dtype is None and index is None:
        return None

    def convert(tensor: Tensor) -> Tensor:
        result = tensor if index is None else tensor[index]
        if dtype is not None and result.is_floating_point():
            result = result.to(dtype)
        if device is not None and device != result.device:
            if device.type == "cpu" and result.is_cuda and not result.requires_grad:
                return copies.start(result, clone=copy != "ref" and _share(result, tensor))
            result = result.to(device)
        # A slice is not to keep all of the tensor alive.
        own = copy == "clone" or index is not None
        return result.clone() if own and _share(result, tensor) else result

    return convert


def _share(result: Tensor, tensor: Tensor) -> bool:
    if result is tensor:
        return True
    if result.layout != torch.strided or tensor.layout != torch.strided:
        return False  # of several storages, and never views
    return result.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


class Recording:
    """What is recorded of which modules, for one scope; see `capture`."""

    def __init__(
        self,
        model: nn.Module,
        modules: dict[str, nn.Module],
        make: Callable[[int | None], tuple[Collector, ActivationCache]],
        record: Callable[..., list[HookHandle]],
        *,
        stop: bool,
    ) -> None:
        self.model = model
        self._modules = modules
        self._make = make
        self._record = record
        self._stop = stop
        self._handles: list[HookHandle] = []

    def begin(self, scope: ScopeBase) -> ActivationCache:
        """Records the calls in a scope, until it is left; what was recorded stays readable."""
        attachment = Attachment()
        attachment.release_with(scope)
        attach(self._modules | ({"": self.model} if self._stop else {}), attachment)
        root = registry_of(self.model) if self._stop else None
        self._collector, cache = self._make(None if root is None else root.module)
        if root is not None:
            begin = self._collector.begin
            root.register("forward_pre", begin, priority=_AHEAD_OF_ALL, scope=scope)
        modules = list(self._modules.values())
        self._handles = self._record(self._collector, modules, _BEHIND_ALL, scope)
        if root is not None:
            options: Any = {"priority": _BEHIND_ALL, "always_call": True, "scope": scope}
            root.register("forward", self._collector.end, **options)
        return cache

    def clear(self) -> None:
        """Forgets what was captured so far."""
        self._collector.clear()

    def silent(self) -> list[str]:
        """The names of the modules that never ran."""
        # In compiled regions calls are not counted; those that failed left nothing.
        ran = {*self._collector.ran()}
        return [
            name
            for index, (name, handle) in enumerate(zip(self._modules, self._handles, strict=True))
            if index not in ran and not handle.calls
        ]


class _Capture(Scope):
    """A capture as a context manager; see `capture`."""

    _ONCE = "a capture is entered once: call capture() again for another"

    def __init__(self, recording: Recording) -> None:
        self.recording = recording

    if TYPE_CHECKING:

        def __enter__(self) -> ActivationCache: ...  # type: ignore[override]

    def _begin(self) -> ActivationCache:
        return self.recording.begin(self)

    def _left(self, fine: bool) -> None:  # noqa: FBT001 (called from Rust)
        if fine and (silent := self.recording.silent()):
            text = explain(self.recording.model, silent)
            warnings.warn(text, NeverFiredWarning, stacklevel=2)


def _values(
    copies: _HostCopies, collector: Collector, place: int, *, stale: bool = False
) -> list[Any]:
    values = collector.values(place, stale=stale)
    copies.finish()
    return values


def _gradients(
    copies: _HostCopies, collector: Collector, place: int, **_options: bool
) -> list[Any]:
    calls = collector.gradients(place)
    copies.finish()
    values = collector.values(place, stale=True)
    # In step, but for a call that another thread ends in between.
    return [
        gradients[0] if isinstance(value, Tensor) else gradients
        for value, gradients in zip(values, calls, strict=False)
    ]


def capture(  # noqa: PLR0913 (all but the first two by keyword)
    model: nn.Module,
    what: Selector = None,
    *,
    inputs: bool = False,
    output_index: object = None,
    detach: bool = True,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    slice: Index = None,  # noqa: A002 (what the field calls it)
    copy: Literal["checked", "clone", "ref"] = "checked",
    keep: Keep = "last",
    grads: bool = False,
    max_bytes: int | None = None,
    stop: bool = False,
) -> _Capture:
    """Keeps the activations that pass modules of a model, for the calls of this context.

    A context manager that gives an `ActivationCache`, to be read inside and after. Modules that are
    not instrumented are, for as long as it is open. What is captured is what leaves the hooks.
    Leaving it warns with `NeverFiredWarning` of modules that never ran.

    Args:
        model: any module.
        what: which of its modules, see `select`; None for all.
        inputs: capture what the modules take instead of what they return: the single positional
            argument or the tuple of them; the dict of keyword arguments where there are no others.
        output_index: the key, the index or the name of the attribute of what is captured.
        detach: from autograd's graph.
        device: where the tensors are moved to. Copies from a GPU to the CPU go to pinned memory
            beside what the GPU computes, and are waited for when they are read.
        dtype: what tensors of floating point are cast to.
        slice: what part of each tensor is kept, as in `tensor[slice]`.
        copy: `checked` keeps a reference, and reading one that was changed in place raises
            `StaleActivationError`; `clone` copies; `ref` keeps a reference, whatever becomes of it.
            Inference tensors, which count no changes, are copied by `checked`. So are all tensors
            in compiled regions, where buffers are reused.
        keep: the `last` call of each module, `all` of them, or that many of the last.
        grads: keep the gradients of the tensors too, in `ActivationCache.grads`.
        max_bytes: of all tensors together; the call that would exceed it raises
            `CaptureBudgetError`, and what was captured stays readable.
        stop: end each call of the model in which all modules have run; it returns `STOPPED`.

    Raises:
        SelectionError: `what` matches nothing.
        HookTypeError: an option of the wrong type.
        ValueError: an unknown `copy` or `keep`, or a `max_bytes`, a `keep` or a step of `slice`
            below 1.
        RuntimeError: `device` is none, or not there.
        HookError: when entered, if a module cannot be instrumented; or entered for the second time,
            or left where it was not entered.

    Examples:
        >>> with fh.capture(model, "layers.*.mlp", max_bytes=2**30) as acts:
        ...     model(ids)
        >>> acts["layers.0.mlp"].shape
    """
    modules = select(model, what)
    if copy not in ("checked", "clone", "ref"):
        msg = f"copy is checked, clone or ref, got {copy!r}"
        raise ValueError(msg)
    flags = {"inputs": inputs, "detach": detach, "grads": grads, "stop": stop}
    for name, flag in flags.items():
        _expect(flag, bool, f"{name} is a bool")
    if isinstance(output_index, bool):
        _expect(output_index, (), "output_index is an int, a key or the name of an attribute")
    if dtype is not None:
        _expect(dtype, torch.dtype, "dtype is a torch.dtype")
    _check_index(slice)
    copies = _HostCopies()
    # Made on it: one that is not there is refused here, and "cuda" gets its number.
    target = None if device is None else torch.empty(0, device=device).device
    options: dict[str, Any] = {
        "detach": detach,
        "copy": copy,
        "keep": _how_many(keep),
        "convert": _converter(copies, target, dtype, slice, copy),
        "grads": grads,
        "max_bytes": None if max_bytes is None else _at_least_one("max_bytes", max_bytes),
    }

    only_last = keep == "last"

    def make(stop: int | None) -> tuple[Collector, ActivationCache]:
        collector = Collector(list(modules), stop=stop, **options)

        def collected(read: Callable[..., list[Any]]) -> _Collected:
            places = {name: place for place, name in enumerate(modules)}
            read = functools.partial(read, copies, collector)
            return _Collected(places, collector, read, only_last=only_last)

        return collector, ActivationCache(
            collected(_values), collected(_gradients) if grads else None
        )

    record = functools.partial(record_all, inputs=inputs, part=output_index)
    return _Capture(Recording(model, modules, make, record, stop=stop))


_Slice = slice


def _expect(value: object, types: type | tuple[type, ...], expected: str) -> None:
    if not isinstance(value, types):
        msg = f"{expected}, got {type(value).__name__}"
        raise HookTypeError(msg)


def _check_index(index: Any, *, inside: bool = False) -> None:
    """Refuses what no tensor can be indexed by."""
    if isinstance(index, _Slice):
        for bound in (index.start, index.stop, index.step):
            if isinstance(bound, bool) or not (bound is None or hasattr(bound, "__index__")):
                _expect(bound, (), "the bounds of a slice are whole numbers")
        if index.step is not None and not isinstance(index.step, Tensor) and index.step < 1:
            msg = f"the step of a slice of a tensor is at least 1, got {index.step}"
            raise ValueError(msg)
    elif isinstance(index, tuple | list):
        for each in index:
            _check_index(each, inside=True)
    elif not isinstance(index, int | type(...) | Tensor | None) or (
        # In a mask, not by itself: that adds a dimension.
        isinstance(index, bool) and not inside
    ):
        _expect(index, (), "slice is what a tensor can be indexed by")


def _how_many(keep: Any) -> int | None:
    if isinstance(keep, str):
        if keep in _NAMED:
            return _NAMED[keep]
        msg = f"keep is 'last', 'all' or a number of calls, got {keep!r}"
        raise ValueError(msg)
    return _at_least_one("keep", keep, "'last', 'all' or a number of calls")


_NAMED = {"last": 1, "all": None}


def _at_least_one(name: str, value: Any, expected: str = "a whole number") -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        msg = f"{name} is {expected}, got {type(value).__name__}"
        raise HookTypeError(msg)
    if value < 1:
        msg = f"{name} is at least 1, got {value}"
        raise ValueError(msg)
    return min(value, sys.maxsize)

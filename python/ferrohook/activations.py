"""`capture`: keeps the activations that pass modules of a model."""

from __future__ import annotations

import enum
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TypeAlias

import torch
from torch import Tensor

from ferrohook import shards
from ferrohook._core import Collector, Recorder
from ferrohook.errors import HookTypeError, NeverFiredWarning, SelectionError
from ferrohook.instrumentation import hold_all, registry_of, release
from ferrohook.never_fired import explain
from ferrohook.scopes import Scope
from ferrohook.selection import select, select_names

if TYPE_CHECKING:
    import os
    import re
    from types import EllipsisType

    from torch import nn

    from ferrohook.selection import Selector

Index: TypeAlias = "int | slice | EllipsisType | Tensor | list[int] | tuple[Any, ...] | None"
Keep: TypeAlias = 'Literal["last", "all"] | int'

# Behind all other hooks: what is captured is what leaves the hooks.
_BEHIND_ALL = -(2**63)


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
        return self._activations[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._activations)

    def __len__(self) -> int:
        return len(self._activations)

    @property
    def grads(self) -> ActivationCache:
        """The gradients of the captured tensors, so far (`capture(grads=True)`).

        A tensor's is a tensor, or None where none came; that of a structure is a list with an entry
        for each of its tensors.
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
            RuntimeError: the shapes differ.
        """
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

        Tuples, lists and dicts keep their structure; other classes are saved as dicts. Needs the
        package safetensors (`ferrohook[safetensors]`).

        Raises:
            HookTypeError: a value that is neither a tensor nor plain data.
        """
        shards.save(path, {"activations": dict(self), "grads": dict(self._grads)})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """What `save` wrote, on the CPU."""
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
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, tuple | list):
        return value
    if hasattr(value, "__dataclass_fields__"):
        return [getattr(value, name, None) for name in value.__dataclass_fields__]
    return ()


def map_tensors(convert: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The same structure with other tensors; classes other than tuples and lists become dicts."""
    if isinstance(value, Tensor):
        return convert(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(convert, item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        items = [map_tensors(convert, item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if hasattr(value, "__dataclass_fields__"):
        fields = {name: getattr(value, name, None) for name in value.__dataclass_fields__}
        return map_tensors(convert, fields)
    return value


class _Collected(Mapping[str, Any]):
    """What a collector holds, by name."""

    def __init__(self, names: list[str], kept: _Kept, read: Callable[..., list[Any]]) -> None:
        self._names = names
        self._kept = kept
        self._read = read

    def __getitem__(self, name: str) -> Any:
        return self._value(name)

    def peek(self, name: str) -> Any:
        """The same, changed in place or not."""
        return self._value(name, stale=True)

    def _value(self, name: str, **options: bool) -> Any:
        index = self._names.index(name) if name in self._names else -1
        if index not in self._kept.collector.ran():
            state = "never ran" if index >= 0 else "was not selected"
            msg = f"{name!r} {state}; captured: {', '.join(self) or 'nothing'}"
            raise SelectionError(msg)
        self._kept.finish_copies()
        values = self._read(index, **options)
        return values[-1] if self._kept.only_last else values

    def __iter__(self) -> Iterator[str]:
        return iter([self._names[index] for index in self._kept.collector.ran()])

    def __len__(self) -> int:
        return len(self._kept.collector.ran())


class _Kept:
    """A capture's collector, and the copies from GPUs that are under way."""

    collector: Collector

    def __init__(self, *, only_last: bool) -> None:
        self.only_last = only_last
        self._copies: list[torch.cuda.Event] = []

    def finish_copies(self) -> None:
        """Waits until what was copied from a GPU is complete."""
        while self._copies:
            self._copies.pop(0).synchronize()

    def to_host(self, tensor: Tensor, *, clone: bool) -> Tensor:
        """Starts a copy from a GPU into pinned memory, beside what the GPU computes."""
        # On the stream that computes: what it writes in place later must not reach the copy.
        source = tensor.clone() if clone else tensor
        stream = _side_stream(tensor.device)
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            host = torch.empty_like(source, device="cpu", pin_memory=True)
            host.copy_(source, non_blocking=True)
            done = torch.cuda.Event()
            done.record(stream)
        source.record_stream(stream)
        self._copies.append(done)
        return host


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _converter(
    kept: _Kept,
    device: torch.device | None,
    dtype: torch.dtype | None,
    index: Index,
    copy: str,
) -> Callable[[Tensor], Tensor] | None:
    if device is None and dtype is None and index is None:
        return None

    def convert(tensor: Tensor) -> Tensor:
        result = tensor if index is None else tensor[index]
        if dtype is not None and result.is_floating_point():
            result = result.to(dtype)
        own = result.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
        if device is not None and device != result.device:
            if device.type == "cpu" and result.is_cuda and not result.requires_grad:
                return kept.to_host(result, clone=not own and copy != "ref")
            return result.to(device)
        # A slice is not to keep all of the tensor alive.
        return result if own or (copy != "clone" and index is None) else result.clone()

    return convert


class _Capture:
    """A capture as a context manager; see `capture`."""

    def __init__(
        self,
        model: nn.Module,
        modules: dict[str, nn.Module],
        kept: _Kept,
        recording: Callable[[int | None], tuple[Collector, Callable[[int], Recorder]]],
        *,
        stop: bool,
    ) -> None:
        self._model = model
        self._modules = modules
        self._kept = kept
        self._recording = recording
        self._stop = stop

    def __enter__(self) -> ActivationCache:
        modules = self._modules | ({"": self._model} if self._stop else {})
        self._held = hold_all(modules)
        try:
            self._scope = Scope().__enter__()
            root = registry_of(self._model).module if self._stop else None
            collector, recorder = self._recording(root)
            self._kept.collector = collector
            for index, module in enumerate(self._modules.values()):
                hook = recorder(index)
                registry_of(module).register(
                    hook.phase, hook, priority=_BEHIND_ALL, scope=self._scope
                )
        except BaseException:
            self._leave()
            raise
        names = list(self._modules)
        return ActivationCache(
            _Collected(names, self._kept, collector.values),
            _Collected(names, self._kept, self._gradients),
        )

    def _gradients(self, index: int, **_options: bool) -> list[Any]:
        calls = self._kept.collector.gradients(index)
        return [call[0] if len(call) == 1 else call for call in calls]

    def _leave(self) -> None:
        scope = getattr(self, "_scope", None)
        try:
            if scope is not None:
                scope.__exit__(None, None, None)
        finally:
            for module in self._held:
                release(module)

    def __exit__(self, error: type[BaseException] | None, *exc_info: object) -> None:
        self._leave()
        names = list(self._modules)
        silent = sorted({*range(len(names))} - {*self._kept.collector.ran()})
        if silent and error is None:
            message = explain(self._model, [names[index] for index in silent])
            warnings.warn(message, NeverFiredWarning, stacklevel=2)


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
        stop: end the call of the model when all modules have run; it returns `STOPPED`.

    Raises:
        SelectionError: `what` matches nothing.
        HookTypeError: an option of the wrong type.
        ValueError: an unknown `copy` or `keep`, or a `max_bytes` or `keep` below 1.
        HookError: when entered, if a module cannot be instrumented.

    Examples:
        >>> with fh.capture(model, "layers.*.mlp", max_bytes=2**30) as acts:
        ...     model(ids)
        >>> acts["layers.0.mlp"].shape
    """
    modules = select(model, what)
    if copy not in {"checked", "clone", "ref"}:
        msg = f"copy is checked, clone or ref, got {copy!r}"
        raise ValueError(msg)
    if slice is not None and not isinstance(slice, _INDEX_TYPES):
        msg = f"slice is what a tensor can be indexed by, got {type(slice).__name__}"
        raise HookTypeError(msg)
    kept = _Kept(only_last=keep == "last")
    options: dict[str, Any] = {
        "detach": detach,
        "copy": copy,
        "keep": _how_many(keep),
        "convert": _converter(
            kept, None if device is None else torch.device(device), dtype, slice, copy
        ),
        "grads": grads,
        "max_bytes": None if max_bytes is None else _at_least_one("max_bytes", max_bytes),
    }

    def recording(stop: int | None) -> tuple[Collector, Callable[[int], Recorder]]:
        collector = Collector(list(modules), stop=stop, **options)
        return collector, lambda index: Recorder(collector, index, inputs, output_index)

    return _Capture(model, modules, kept, recording, stop=stop)


_INDEX_TYPES = (int, type(slice(None)), type(...), Tensor, list, tuple)


def _how_many(keep: Keep) -> int | None:
    if keep == "last":
        return 1
    if keep == "all":
        return None
    if not isinstance(keep, str):
        return _at_least_one("keep", keep)
    msg = f"keep is 'last', 'all' or a number of calls, got {keep!r}"
    raise ValueError(msg)


def _at_least_one(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        msg = f"{name} is a whole number, got {type(value).__name__}"
        raise HookTypeError(msg)
    if value < 1:
        msg = f"{name} is at least 1, got {value}"
        raise ValueError(msg)
    return value

"""Engine of a capture: native recorders on modules, for the calls of one scope."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ferrohook._core import Attachment, Collector, Frame, HookHandle, RootCalls, record_all
from ferrohook.arguments import at_least_one, check_copy, expect
from ferrohook.conversion import check_index, converter
from ferrohook.errors import HookTypeError, SelectionError
from ferrohook.host_copies import HostCopies
from ferrohook.instrumentation import attach, registry_of
from ferrohook.priorities import AHEAD_OF_ALL, BEHIND_ALL
from ferrohook.tensors import as_leaf, map_tensors, tensors_in

if TYPE_CHECKING:
    from torch import nn

    from ferrohook._core import Registry
    from ferrohook.conversion import Index


Calls: TypeAlias = 'Literal["last", "all"] | int'
"""Calls of each module that a capture stores."""


def not_captured(name: object, state: str, names: Iterable[str]) -> SelectionError:
    """Makes the error for a name without a captured value."""
    captured = ", ".join(map(repr, names)) or "nothing"
    if not isinstance(name, str):
        got = f"{type(name).__name__} {name!r}"
        return SelectionError(f"a module's name is a str, got {got}; captured: {captured}")
    return SelectionError(f"{name!r} {state} the captured modules: {captured}")


class Recorded(NamedTuple):
    """Outputs or inputs in a collector, by place."""

    collector: Collector
    copies: HostCopies

    def ran(self) -> list[int]:
        """Returns the places that ran, in the order of their first calls."""
        return self.collector.ran()

    def read(self, place: int, *, stale: bool = False) -> list[Any]:
        """Reads the values of a place, the oldest first."""
        values = self.collector.values(place, stale=stale)
        self.copies.finish()
        return values


class RecordedSteps(Recorded):
    """Outputs or inputs of a request in batches, put together by position."""

    __slots__ = ()

    def read(self, place: int, *, stale: bool = False) -> list[Any]:
        """Reads the values of a place: a list of one, if the positions of all are known."""
        values = super().read(place, stale=stale)
        collected = self.collector.positions(place)[: len(values)]
        known = [each for each in collected if each is not None]
        if not values or len(known) < len(values):
            return values
        rows = [row for positions, _ in known for row in positions]
        last = {position: row for row, position in enumerate(rows) if position >= 0}
        order = [last[position] for position in sorted(last)]

        def put_together(*calls: Any) -> Any:
            tokens = [
                _tokens_first(tensor, dim, len(positions))
                for tensor, (positions, dim) in zip(calls, known, strict=True)
            ]
            if any(each is None for each in tokens):
                return calls[-1]
            together = tokens[0] if len(tokens) == 1 else torch.cat(tokens)
            if order == list(range(len(together))):
                return together
            return together[torch.tensor(order, dtype=torch.long, device=together.device)]

        return [_map_together(put_together, values)]


def _tokens_first(tensor: Any, dim: int | None, tokens: int) -> Any:
    """Returns a tensor of (tokens, ...); None if it does not have them."""
    shape = tuple(tensor.shape)
    if dim is None:  # a padded row
        return tensor.flatten(0, 1) if shape[:2] == (1, tokens) else None
    if len(shape) <= dim or shape[dim] != tokens:
        return None
    if dim == 0:
        return tensor
    tensor = tensor.movedim(dim, 0)
    return tensor.squeeze(1) if dim == 1 and shape[0] == 1 else tensor


def _map_together(change: Callable[..., Any], values: list[Any]) -> Any:
    """Rebuilds the structure of the last value around the tensors of all of them."""
    leaves = [[*tensors_in(value)] for value in values]
    if len({len(each) for each in leaves}) > 1:
        return values[-1]
    columns = iter([*zip(*leaves, strict=True)])
    return map_tensors(lambda _tensor: change(*next(columns)), values[-1])


class RecordedGradients(Recorded):
    """Gradients in a collector, by place."""

    __slots__ = ()

    def read(self, place: int, *, stale: bool = False) -> list[Any]:
        """Reads the gradients of the values of a place."""
        del stale  # gradients have no version tag
        calls = self.collector.gradients(place)
        self.copies.finish()
        values = self.collector.values(place, stale=True)
        # Not strict: another thread may end a call between the two reads.
        return [
            gradients[0] if isinstance(value, Tensor) else gradients
            for value, gradients in zip(values, calls, strict=False)
        ]


class _Copied(dict[int, list[Any]]):
    """Values of a copy, by place; nothing but its reader writes to them."""

    def ran(self) -> list[int]:
        return list(self)

    def read(self, place: int, *, stale: bool = False) -> list[Any]:
        del stale
        return self.get(place, [])


class Activations(Mapping[str, Any]):
    """View of captured values by module name."""

    def __init__(
        self, places: dict[str, int], values: Recorded | _Copied, *, only_last: bool
    ) -> None:
        self._places = places
        self._values = values
        self._only_last = only_last

    def __getitem__(self, name: str) -> Any:
        return self._value(name)

    def peek(self, name: str) -> Any:
        """Returns a value without the check for writes in place."""
        return self._value(name, stale=True)

    def _value(self, name: str, **options: bool) -> Any:
        place = self._places.get(name)
        values = [] if place is None else self._values.read(place, **options)
        if not values:
            state = "was not selected" if place is None else "never ran"
            raise not_captured(name, f"{state} and is not among", self)
        return values[-1] if self._only_last else values

    def __contains__(self, name: object) -> bool:
        return name in list(self)

    def __iter__(self) -> Iterator[str]:
        names = list(self._places)
        return iter([names[place] for place in self._values.ran()])

    def __len__(self) -> int:
        return len(self._values.ran())

    def __getstate__(self) -> dict[str, Any]:
        ran = self._values.ran()
        values = _Copied({place: map_tensors(as_leaf, self._values.read(place)) for place in ran})
        return {**vars(self), "_values": values}


class Options(NamedTuple):
    """Validated options of a capture; see `capture`."""

    inputs: bool
    output_index: object
    stop: bool
    only_last: bool
    copies: HostCopies
    collector: dict[str, Any]
    """Keyword arguments of the `Collector`."""


def options_of(  # noqa: PLR0913 (the options of `capture`)
    *,
    inputs: bool = False,
    output_index: object = None,
    detach: bool = True,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    slice: Index = None,  # noqa: A002 (what the field calls it)
    copy: str = "checked",
    calls: Any = "last",
    grads: bool = False,
    max_bytes: int | None = None,
    stop: bool = False,
) -> Options:
    """Validates the options of a capture; see `capture` for them and for what is raised."""
    check_copy(copy)
    flags = {"inputs": inputs, "detach": detach, "grads": grads, "stop": stop}
    for name, flag in flags.items():
        expect(flag, bool, f"{name} is a bool")
    if isinstance(output_index, bool):
        expect(output_index, (), "output_index is an int, a key or the name of an attribute")
    if dtype is not None:
        expect(dtype, torch.dtype, "dtype is a torch.dtype")
        _check_converts(dtype)
    check_index(slice)
    copies = HostCopies()
    target = None if device is None else _available(device)
    return Options(
        inputs=inputs,
        output_index=output_index,
        stop=stop,
        only_last=calls == "last",
        copies=copies,
        collector={
            "detach": detach,
            "copy": copy,
            "keep": _calls_to_keep(calls),
            "convert": converter(copies, target, dtype, slice, copy),
            "grads": grads,
            "max_bytes": None if max_bytes is None else at_least_one("max_bytes", max_bytes),
        },
    )


def _check_converts(dtype: torch.dtype) -> None:
    try:
        torch.empty(1).to(dtype)
    except (NotImplementedError, RuntimeError) as error:  # quantised, packed bits
        msg = f"dtype is one that tensors of floating point convert to, got {dtype}"
        raise HookTypeError(msg) from error


def _available(device: torch.device | str) -> torch.device:
    """Returns a device with its index ("cuda" is one of "cuda:0" and others)."""
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        found = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
        msg = (
            f"device={str(device)!r} of a capture is not available: torch sees {', '.join(found)} "
            "here. An engine takes no device, its captures arrive on the CPU"
        )
        raise RuntimeError(msg) from error


def _calls_to_keep(calls: Any) -> int | None:
    if isinstance(calls, str):
        if calls in _KEEP_NAMES:
            return _KEEP_NAMES[calls]
        msg = f"calls is 'last', 'all' or a number of calls, got {calls!r}"
        raise ValueError(msg)
    return at_least_one("calls", calls, "'last', 'all' or a number of calls")


_KEEP_NAMES = {"last": 1, "all": None}


def mark_calls(root: Registry, calls: RootCalls, scope: Frame) -> None:
    """Marks where the calls begin and end that a capture may end, once its recorders are there."""
    root.register("forward_pre", calls, priority=AHEAD_OF_ALL, scope=scope)
    root.register("forward", calls, priority=BEHIND_ALL, always_call=True, scope=scope)


class CaptureSession:
    """Captures the activations of some modules in the calls of a scope."""

    def __init__(self, model: nn.Module, modules: dict[str, nn.Module], options: Options) -> None:
        self.model = model
        self._modules = modules
        self._options = options
        self._handles: list[HookHandle] = []

    def begin(self, scope: Frame) -> tuple[Activations, Activations | None]:
        """Captures the calls in a scope, until it is left; the activations stay readable.

        Returns:
            The activations, and their gradients with `grads=True`, else None.
        """
        options = self._options
        attachment = Attachment()
        attachment.release_with(scope)
        attach(self._modules | ({"": self.model} if options.stop else {}), attachment)
        root = registry_of(self.model) if options.stop else None
        collector = self._collector = Collector(
            list(self._modules), stop=None if root is None else root.module, **options.collector
        )
        self._handles = record_all(
            collector,
            list(self._modules.values()),
            BEHIND_ALL,
            scope,
            inputs=options.inputs,
            part=options.output_index,
        )
        if root is not None:
            mark_calls(root, RootCalls(collector), scope)
        gradients = self._view(RecordedGradients) if options.collector["grads"] else None
        only_last = self._options.only_last
        return self._view(RecordedSteps if only_last else Recorded), gradients

    def _view(self, recorded: type[Recorded]) -> Activations:
        return Activations(
            {name: place for place, name in enumerate(self._modules)},
            recorded(self._collector, self._options.copies),
            only_last=self._options.only_last,
        )

    @property
    def names(self) -> list[str]:
        """The modules' names."""
        return list(self._modules)

    @property
    def per_call(self) -> bool:
        """True if a value is a list with an entry per call."""
        return not self._options.only_last

    def clear(self) -> None:
        """Drops the activations captured so far."""
        self._collector.clear()

    def silent(self) -> list[str]:
        """Returns the names of the modules that never ran."""
        # Compiled regions count no calls; failed calls leave no activation. So look at both.
        ran = {*self._collector.ran()}
        return [
            name
            for index, (name, handle) in enumerate(zip(self._modules, self._handles, strict=True))
            if index not in ran and not handle.calls
        ]

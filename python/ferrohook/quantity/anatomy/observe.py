"""Observation of a forward: its calls, the values of all tensors, and which of them are equal."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import threading
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self, TypeAlias

import torch
from torch import Tensor, nn

from ferrohook.effects.parts import SUM, with_part
from ferrohook.util.tensors import parts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

LARGEST: Final = 2**26
"""Elements of a tensor that is kept, at most."""
_SEED: Final = 20


@contextlib.contextmanager
def observing(
    model: nn.Module,
    before: Callable[..., Any] | None = None,
    after: Callable[..., Any] | None = None,
) -> Iterator[None]:
    """Calls functions around each call of a module that this thread makes in a block.

    Args:
        model: its modules are observed.
        before: takes path, module, args and kwargs; returns args and kwargs, or None.
        after: takes path, module, args, kwargs and output; returns an output, or None.
    """
    thread = threading.get_ident()

    def own(function: Callable[..., Any], *call: Any) -> Any:
        return function(*call) if threading.get_ident() == thread else None

    handles = []
    for path, module in model.named_modules():
        if before is not None:
            taking = functools.partial(own, before, path)
            handles.append(module.register_forward_pre_hook(taking, with_kwargs=True, prepend=True))
        if after is not None:
            returning = functools.partial(own, after, path)
            handles.append(module.register_forward_hook(returning, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class Hidden(NamedTuple):
    """Part of an input that no hook without keyword arguments sees, or a field of a named tuple."""

    name: str


class ObservedTensor(NamedTuple):
    """Tensor that a module takes or returns, by names."""

    path: str
    inputs: bool
    part: Any
    """Index, key or attribute, as `output_index` of a capture; None for the value itself."""

    @classmethod
    def input(cls, path: str, part: Any) -> Self:
        """Makes the site of a tensor that a module takes."""
        return cls(path, inputs=True, part=part)

    @classmethod
    def output(cls, path: str, part: Any) -> Self:
        """Makes the site of a tensor that a module returns."""
        return cls(path, inputs=False, part=part)


class Sighting(NamedTuple):
    """A value at a site, in one forward."""

    site: ObservedTensor
    value: int
    """Number of the value: tensors of equal contents have one, whatever their shapes."""
    time: int
    shape: tuple[int, ...]


class ModuleCall(NamedTuple):
    """One call of a module."""

    path: str
    start: int
    end: int
    inputs: dict[Any, int]
    """Values that it took, by part."""
    outputs: dict[Any, int]

    @property
    def made(self) -> dict[Any, int]:
        """Outputs that it did not take: a fused norm returns the sum of its inputs as well."""
        taken = {*self.inputs.values()}
        return {part: value for part, value in self.outputs.items() if value not in taken}


class Choice(NamedTuple):
    """Integers that a module takes or returns, a row for each position: numbers of experts, say."""

    site: ObservedTensor
    time: int
    """Time at which they were seen, which is the start of the call that takes them."""
    numbers: Tensor


Writes: TypeAlias = "Mapping[ObservedTensor, Callable[[Tensor], Tensor]]"
"""Changes of tensors, by site."""


class Look:
    """Tensors of one forward of a model.

    Args:
        model: its modules are observed.
        forward: calls it.
        writes: changes of tensors; a changed one is seen before and after.
        kept: returns True for the tensors that are kept; `is_kept` by default.
    """

    def __init__(
        self,
        model: nn.Module,
        forward: Callable[[], object],
        writes: Writes | None = None,
        kept: Callable[[Any], bool] | None = None,
    ) -> None:
        self.values: list[Tensor] = []
        """Tensors by number, on the CPU."""
        self.times: list[int] = []
        """Time at which each was seen first."""
        self.sightings: list[Sighting] = []
        self.calls: list[ModuleCall] = []
        self.choices: list[Choice] = []
        self.streams: Mapping[str, ObservedTensor] = {}
        """Sites of the stream after modules that return their contribution to it, by path."""
        self.written: dict[ObservedTensor, int] = {}
        """Values at sites after they were changed."""
        self._writes = writes or {}
        self._kept = kept or is_kept
        self._numbers: dict[Any, int] = {}
        self._time = 0
        self._open: list[tuple[int, dict[Any, int]]] = []
        with observing(model, self._take, self._give):
            forward()
        self.sites = self._once()
        """Sightings of the sites that were passed once, by site."""

    def _take(
        self, path: str, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self._time += 1
        tensors = self._taken(args, kwargs)
        self._open.append((self._time, self._see(path, tensors, inputs=True)))
        self._choose(path, inputs_of(args, kwargs), inputs=True)
        changed = self._changed(path, tensors, inputs=True)
        return with_inputs(args, kwargs, changed)

    def _taken(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[Any, Tensor]:
        """Returns the tensors among the arguments of a call, by part."""
        return {part: it for part, it in inputs_of(args, kwargs) if self._kept(it)}

    def _give(
        self, path: str, _module: nn.Module, _args: Any, _kwargs: dict[str, Any], output: Any
    ) -> Any:
        self._time += 1
        tensors = self._returned(output)
        start, inputs = self._open.pop()
        outputs = self._see(path, tensors, inputs=False)
        self._choose(path, outputs_of(output), inputs=False)
        self.calls.append(ModuleCall(path, start, self._time, inputs, outputs))
        changed = self._changed(path, tensors, inputs=False)
        for part, tensor in changed.items():
            output = with_part(output, part, tensor)
        return output

    def _returned(self, output: Any) -> dict[Any, Tensor]:
        """Returns the tensors of an output by part, and the sum of a stream and a contribution."""
        found = {part: it for part, it in outputs_of(output) if self._kept(it)}
        if isinstance(output, tuple) and len(output) == len(found) == len(("hidden", "residual")):
            hidden, residual = found.values()
            if hidden.shape == residual.shape:
                found[SUM] = hidden + residual
        return found

    def _choose(self, path: str, found: Iterable[tuple[Any, Any]], *, inputs: bool) -> None:
        self.choices += [
            Choice(ObservedTensor(path, inputs, part), self._time, each.cpu().long())
            for part, each in found
            if _is_choice(each)
        ]

    def _see(self, path: str, tensors: dict[Any, Tensor], *, inputs: bool) -> dict[Any, int]:
        found = {}
        for part, tensor in tensors.items():
            found[part] = number = self._number(tensor)
            site = ObservedTensor(path, inputs, part)
            self.sightings.append(Sighting(site, number, self._time, tuple(tensor.shape)))
        return found

    def _changed(self, path: str, tensors: dict[Any, Tensor], *, inputs: bool) -> dict[Any, Tensor]:
        changed = {}
        for part, tensor in tensors.items():
            site = ObservedTensor(path, inputs, part)
            if (change := self._writes.get(site)) is not None:
                changed[part] = change(tensor)
                self.written[site] = self._number(changed[part])
        return changed

    def _number(self, tensor: Tensor) -> int:
        kept = tensor.detach().to("cpu", copy=True).contiguous()
        raw = kept.reshape(-1).view(torch.uint8).numpy()
        key = kept.dtype, kept.numel(), hashlib.blake2b(raw.data, digest_size=16).digest()
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.values)
            self.values.append(kept)
            self.times.append(self._time)
        return number

    def _once(self) -> dict[ObservedTensor, Sighting]:
        found: dict[ObservedTensor, Sighting] = {}
        several: set[ObservedTensor] = set()
        for each in self.sightings:
            if each.site in found:
                several.add(each.site)
            found[each.site] = each
        return {site: each for site, each in found.items() if site not in several}

    def source(self, value: int, time: int) -> ObservedTensor | None:
        """Returns the last output before a time that is a value."""
        found = [
            each.site
            for each in self.sites.values()
            if each.value == value and each.time < time and not each.site.inputs
        ]
        return found[-1] if found else None

    def tensor(self, site: ObservedTensor, *, after: bool = False) -> Tensor:
        """Returns the tensor at a site that was passed once, or the one that replaced it."""
        sighting = self.sites[site]
        number = self.written.get(site, sighting.value) if after else sighting.value
        return self.values[number].view(sighting.shape)


def noise(size: float) -> Callable[[Tensor], Tensor]:
    """Makes the change that adds noise of a size relative to the tensor's own."""

    def change(tensor: Tensor) -> Tensor:
        generator = torch.Generator("cpu").manual_seed(_SEED + tensor.numel())
        drawn = torch.randn(tensor.shape, generator=generator, device="cpu").to(tensor)
        return tensor + drawn * tensor.std(correction=0).clamp(min=1e-6) * size

    return change


def is_kept(value: Any) -> bool:
    """Returns True for a tensor of floating-point numbers that is small enough to be kept."""
    return (
        isinstance(value, Tensor)
        and value.is_floating_point()
        and value.layout == torch.strided
        and not value.is_meta
        and 0 < value.numel() <= LARGEST
    )


def _is_choice(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.dtype in {torch.int32, torch.int64}
        and value.dim() == 2  # noqa: PLR2004 (positions and choices)
        and not value.is_meta
        and 0 < value.numel() <= LARGEST
    )


def _key(args: tuple[Any, ...], place: int) -> int | None:
    """Returns the part that a positional argument is of the input, as captures name it."""
    return None if len(args) == 1 else place


def _name(args: tuple[Any, ...], name: str) -> str | Hidden:
    """Returns the part that a keyword argument is of the input."""
    return Hidden(name) if args else name


def inputs_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Yields the arguments of a call, and the fields of named tuples among them, by part."""
    found: dict[Any, Any] = {_key(args, place): each for place, each in enumerate(args)}
    found |= {_name(args, name): each for name, each in kwargs.items()}
    for part, each in found.items():
        yield part, each
        yield from _fields(part, each).items()


def _fields(part: Any, value: Any) -> dict[Any, Any]:
    """Returns the fields of an argument that is a named tuple, by the part that each is."""
    names = getattr(value, "_fields", ()) if isinstance(value, tuple) else ()
    return {Hidden(f"{part}.{name}"): value[place] for place, name in enumerate(names)}


def with_inputs(
    args: tuple[Any, ...], kwargs: dict[str, Any], changed: Mapping[Any, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of a call with some of them replaced, by part."""

    def replaced(part: Any, value: Any) -> Any:
        fields = _fields(part, value)
        if changed.keys() & fields.keys():
            return value._make(changed.get(field, old) for field, old in fields.items())
        return changed.get(part, value)

    return (
        tuple(replaced(_key(args, place), each) for place, each in enumerate(args)),
        {name: replaced(_name(args, name), each) for name, each in kwargs.items()},
    )


def outputs_of(output: Any) -> Iterable[tuple[Any, Any]]:
    """Returns the parts of an output by their keys; one that is a tensor by None."""
    return [(None, output)] if isinstance(output, Tensor) else parts(output) or ()

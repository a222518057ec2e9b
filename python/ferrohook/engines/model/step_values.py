"""Values of a model's modules in one observed step of an engine, and entries that do not fit them.

An entry of a plan that names a part which an output lacks, or a vector of another width, is refused
as it comes, not as its request runs.
"""

from __future__ import annotations

import contextlib
import itertools
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from ferrohook.attach.attention import is_point
from ferrohook.effects.intervention import Intervention
from ferrohook.effects.parts import part_of
from ferrohook.gates.readings import refusal_of
from ferrohook.plans.entries import Entry, GateEntry, HookEntry, KeepEntry
from ferrohook.quantity.anatomy.observe import observing
from ferrohook.util.tensors import parts, rebuilt, tensors_in

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from ferrohook.names.places import Place


class _Unknown:
    """Stands for an object that may hold anything: the value is not kept alive."""


_UNKNOWN: Final = _Unknown()


class StepCall(NamedTuple):
    """Call of a module; tensors of the device "meta" stand for its own."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    start: int
    """Time of its start, counted in starts and ends of calls."""
    end: int

    def value(self, *, inputs: bool, by_keyword: bool = False) -> Any:
        """Returns the value that a hook or capture of the module's input or output sees."""
        if not inputs:
            return self.output
        if by_keyword or not self.args:
            return self.kwargs
        return self.args[0] if len(self.args) == 1 else self.args


@contextlib.contextmanager
def observed(model: nn.Module) -> Iterator[dict[nn.Module, list[StepCall]]]:
    """Observes the calls of all modules of a model in a block, in this thread.

    Yields:
        The calls so far, by module.
    """
    calls: dict[nn.Module, list[StepCall]] = {}
    times, started = itertools.count(1), dict[str, int]()

    def begin(path: str, *_call: Any) -> None:
        started[path] = next(times)

    def note(path: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        outlines = _outline(args), _outline(kwargs), _outline(output)
        noted = StepCall(*outlines, start=started[path], end=next(times))
        calls.setdefault(module, []).append(noted)

    with observing(model, before=begin, after=note):
        yield calls


def _outline(value: Any) -> Any:
    """Returns a value with its tensors replaced by tensors on the device "meta"."""
    if isinstance(value, Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    inside = parts(value)
    if inside is not None:
        return rebuilt(value, [_outline(item) for _, item in inside])
    return value if isinstance(value, int | float | str | None) else _UNKNOWN


def check_slice(index: Any, where: str, shape: Sequence[int], dim: int = 0) -> None:
    """Checks that an index fits a tensor, and keeps all of its rows in their place.

    Args:
        index: `slice` of a capture; None for none.
        where: description of the value, for the error.
        shape: of the tensor.
        dim: dimension of the rows, of which another step has another number.

    Raises:
        ValueError: it does not.
    """
    if index is None:
        return
    shown = [*map(str, shape[:dim]), "tokens", *map(str, shape[dim + 1 :])]
    for tokens in (2, 3):  # a list of rows may be all rows of one step
        rows = torch.arange(tokens, device="cpu")
        whole = rows.view([-1] + [1] * (len(shape) - dim - 1))
        whole = whole.expand(*shape[:dim], tokens, *shape[dim + 1 :])
        kept = _cut(whole, index, where, shown)
        moved = kept.movedim(dim, -1) if kept.dim() > dim else kept[..., None]
        if moved.shape[-1] != tokens or not bool((moved == rows).all()):
            msg = f"slice={index!r} must keep all tokens of the {where} in their dimension"
            raise ValueError(msg)


def _cut(tensor: Tensor, index: Any, where: str, shape: Sequence[object]) -> Tensor:
    try:
        return tensor if index is None else tensor[index]
    except (IndexError, TypeError) as error:
        shown = f"({', '.join(map(str, shape))})"
        msg = f"slice={index!r} does not fit the {where}, of shape {shown}: {error}"
        raise ValueError(msg) from error


class StepValues(NamedTuple):
    """Values of all modules that run in a step of an engine."""

    calls: Mapping[nn.Module, Sequence[StepCall]]
    rows: int
    dim: int
    """Dimension of the rows."""
    other_dims: Mapping[nn.Module, int]
    """Dimension of the rows of modules with another one."""
    head: Collection[nn.Module] = ()
    """Modules that see other rows than the step, in `dim`."""

    def refusal(self, name: str, place: Place, entry: Entry) -> str | None:
        """Returns why an entry of a plan does not fit one of its places; None if it may.

        Args:
            name: of the place.
            place: where the entry acts.
            entry: of the plan.
        """
        try:
            if is_point(place.module):
                self._check_point(name, place, entry)
            for call in self.calls.get(place.module, ()):
                self._check(name, place, entry, call)
        except ValueError as error:
            return str(error)
        return None

    def seen(self, place: Place) -> Place:
        """Returns a place with the shape and the time of its tensor in the step, if it has one."""
        calls = self.calls.get(place.module)
        if calls is None:
            return place
        call = calls[-1]
        value = call.value(inputs=place.inputs, by_keyword=place.by_keyword)
        found = value if value is _UNKNOWN else part_of(value, place.part)
        shape = tuple(found.shape) if isinstance(found, Tensor) else place.shape
        return place._replace(shape=shape, time=call.start if place.inputs else call.end)

    def _check_point(self, name: str, place: Place, entry: Entry) -> None:
        shape = place.shape
        if isinstance(entry, KeepEntry) and shape is not None and place.head is None:
            tokens_first = shape[self.dim :] if entry.at is not None else shape
            dim = 0 if entry.at is not None else self.dim
            check_slice(entry.options.get("slice"), f"tensor at {name!r}", tokens_first, dim)

    def _check(self, name: str, place: Place, entry: Entry, call: StepCall) -> None:
        if not isinstance(entry, HookEntry):
            inputs, part = place.inputs, place.part
        elif isinstance(entry.hook, Intervention):
            inputs = place.inputs or entry.phase == "forward_pre"
            part = entry.hook.output_index if place.quantity is None else place.part
        else:
            return  # a Python function sees for itself
        value = call.value(inputs=inputs, by_keyword=place.by_keyword)
        where = f"{'input' if inputs else 'output'} of {name!r}"
        found = _part(where, value, part)
        if found is _UNKNOWN:
            return
        dim = self.other_dims.get(place.module, self.dim)
        alone = place.module in self.head
        tensors = [*tensors_in(found)]
        with_rows = [it for it in tensors if alone or it.shape[dim : dim + 1] == (self.rows,)]
        if not with_rows:
            msg = f"the {where} has no tensor with a row per token: {self.rows} tokens give "
            msg += f"{[(*each.shape,) for each in tensors]}"
            raise ValueError(msg)
        if isinstance(entry, HookEntry):
            if inputs and not call.args and not place.by_keyword:
                msg = f"{name!r} takes no positional argument that an intervention could change"
                raise ValueError(msg)
            _check_vector(entry.hook, where, found, dim)
            return
        if isinstance(entry, GateEntry) and isinstance(found, Tensor) and place.head is None:
            check_reading(entry, where, found.numel() // found.shape[dim])
        for tensor in tensors:
            check_features(entry, where, tensor.shape[-1], *tensor.shape[-2:-1])
            rows = dim if any(tensor is it for it in with_rows) else None
            _check_cut(entry, where, tensor, rows)


def _check_cut(entry: Entry, where: str, tensor: Tensor, dim: int | None) -> None:
    """Checks the slice of a capture; `dim` of the rows is None for a tensor without."""
    index = entry.options.get("slice")
    if dim is None:
        _cut(tensor, index, where, tensor.shape)
    elif entry.at is None or dim == 0:
        check_slice(index, where, tensor.shape, dim)
    else:
        check_slice(index, where, tensor.shape[dim:])


def _part(where: str, value: Any, part: Any) -> Any:
    """Returns the part of a value that `output_index` names.

    Raises:
        ValueError: it has none.
    """
    if part is None or value is _UNKNOWN:
        return value
    found = None
    if not isinstance(value, Tensor):
        with contextlib.suppress(Exception):  # whatever an index of another type raises
            found = part_of(value, part)
    if found is None or found is _UNKNOWN:
        msg = f"output_index={part!r}: the {where} "
        if isinstance(value, Tensor):
            msg += "is one tensor: leave it out"
        else:
            msg += f"has tensors at {_keys(value)}"
        raise ValueError(msg)
    return found


def _keys(value: Any) -> list[Any]:
    """Returns the keys of the parts of a value that are or have tensors."""
    return [key for key, item in parts(value) or () if any(True for _ in tensors_in(item))]


def _check_vector(hook: Intervention, where: str, value: Any, dim: int) -> None:
    """Checks that an intervention changes a value, whatever its number of rows.

    Raises:
        ValueError: it does not.
    """
    if not isinstance(value, Tensor):
        msg = (
            f"{hook!r} changes one tensor: choose one of {_keys(value)} in the {where} with "
            "output_index"
        )
        raise ValueError(msg)  # noqa: TRY004 (as of all that does not fit)
    if not value.is_floating_point() and not value.is_complex():
        msg = f"{hook!r} only works on floating-point tensors, but the {where} is {value.dtype}"
        raise ValueError(msg)
    check_width(hook, where, value.shape[-1])
    vector = hook.vector
    if vector is None or not hook.broadcasts:
        return
    # A number of rows that no vector has by chance.
    shape = (*value.shape[:dim], vector.numel() + 1, *value.shape[dim + 1 :])
    try:
        vector.to("meta").expand(shape)
    except RuntimeError as error:
        rest = ", ".join("tokens" if n == dim else str(it) for n, it in enumerate(value.shape))
        msg = f"{hook!r} does not fit the {where}, of shape ({rest}), for every number of tokens"
        raise ValueError(msg) from error


def check_width(hook: Intervention, tensor: str, width: int) -> None:
    """Checks that the vector of an intervention is as wide as a tensor, or broadcasts.

    Raises:
        ValueError: it is not.
    """
    if not hook.fits((width,)):
        msg = f"{hook!r} has a width of {hook.width}, but the {tensor} has {width}"
        raise ValueError(msg)


def check_reading(entry: GateEntry, tensor: str, width: int) -> None:
    """Checks that a gate can read a tensor.

    Raises:
        ValueError: it cannot.
    """
    if (reason := refusal_of(entry.gate.reading, width)) is not None:
        msg = f"gate {entry.gate.name!r} does not fit the {tensor}: {reason}"
        raise ValueError(msg)


def check_features(entry: Entry, tensor: str, width: int, heads: int = 1) -> None:
    """Checks that the dictionary of a capture reads a tensor.

    Args:
        entry: of a plan; any but a capture with `features` passes.
        tensor: description of the tensor, for the error.
        width: of the tensor.
        heads: its dimension before the last one, if these may be heads.

    Raises:
        ValueError: it does not.
    """
    dictionary = entry.options.get("features")
    if dictionary is not None and dictionary.d_in not in {width, heads * width}:
        msg = (
            f"{dictionary!r} reads vectors of width {dictionary.d_in}, but the {tensor} has {width}"
        )
        raise ValueError(msg)

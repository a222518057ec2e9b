"""Batches by hand: in each module one hook of PyTorch's that loops over the requests.

Shares no code with the product: each model declares the rows of its values, rows are
cut out by `index_select` and put back by `index_copy`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import ferrohook as fh
from support.plans import by_hand, part_by_hand
from support.row_models import RowModel, pick

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Path = tuple[Any, ...]
Log = list[list[Tensor]]
INPUT, OUTPUT = "input", "output"


def map_leaves(value: Any, change: Callable[[Tensor, Path], Tensor], path: Path = ()) -> Any:
    """Maps the tensors of a value, each with its path."""
    if isinstance(value, Tensor):
        return change(value, path)
    if isinstance(value, tuple | list):
        items = [map_leaves(each, change, (*path, place)) for place, each in enumerate(value)]
        made: Any = type(value)
        return made(*items) if hasattr(value, "_fields") else made(items)
    if isinstance(value, dict):
        return {key: map_leaves(each, change, (*path, key)) for key, each in value.items()}
    return value


def leaves(value: Any) -> list[Tensor]:
    """Tensors of a value, in order."""
    found: list[Tensor] = []

    def keep(leaf: Tensor, _path: Path) -> Tensor:
        found.append(leaf)
        return leaf

    map_leaves(value, keep)
    return found


def change_first(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Changes the first tensor of a value."""
    done: list[Path] = []

    def once(leaf: Tensor, path: Path) -> Tensor:
        if done:
            return leaf
        done.append(path)
        return change(leaf)

    return map_leaves(value, once)


@dataclass(frozen=True)
class Function:
    """A Python hook: scales, subtracts the maximum of the rows it sees, or observes."""

    phase: str
    act: str
    factor: float = 1.0
    with_kwargs: bool = False

    def hook(self, dim: int, log: Log) -> Any:
        """Makes the hook, of PyTorch's contract or typed; observers append to the log."""
        if self.act == "typed":
            factor = self.factor
            return fh.ForwardPreHook(lambda x: x * factor)
        if self.with_kwargs:
            return functools.partial(self._call, dim, log)
        if self.phase == "forward_pre":
            return lambda module, args: self._call(dim, log, module, args, None)
        return lambda module, args, output: self._call(dim, log, module, args, None, output)

    def _call(self, dim: int, log: Log, _module: Any, args: Any, kwargs: Any, *output: Any) -> Any:
        if self.act == "observe":
            log.append([leaf.detach().clone() for leaf in leaves((args, kwargs, output))])
            return None
        if output:
            return change_first(output[0], functools.partial(self._changed, dim))
        args = change_first(args, functools.partial(self._changed, dim))
        return (args, kwargs) if self.with_kwargs else args

    def _changed(self, dim: int, x: Tensor) -> Tensor:
        if self.act == "mix" and x.numel():
            return x - x.amax(dim, keepdim=True) * self.factor
        return x * self.factor


@dataclass(frozen=True)
class On:
    """An entry of a plan that changes or observes."""

    what: str
    hook: Any
    phase: str
    priority: int = 0
    prepend: bool = False

    @property
    def options(self) -> dict[str, Any]:
        given: dict[str, Any] = {"priority": self.priority, "prepend": self.prepend}
        if isinstance(self.hook, Function) and self.hook.act != "typed":
            given["with_kwargs"] = self.hook.with_kwargs
        return given | {"phase": self.phase}

    def made(self, dim: int, log: Log) -> Any:
        """Makes the product's argument for it."""
        return self.hook.hook(dim, log) if isinstance(self.hook, Function) else self.hook

    def apply(self, dim: int, log: Log, module: Any, args: Any, kwargs: Any, *output: Any) -> Any:
        """Returns (args, kwargs), or the output, after the hook."""
        if isinstance(self.hook, Function):
            plain = Function(self.phase, self.hook.act, self.hook.factor, self.hook.with_kwargs)
            kwargs_seen = kwargs if self.hook.with_kwargs else None
            returned = plain._call(dim, log, module, args, kwargs_seen, *output)
            if returned is None:
                return output[0] if output else (args, kwargs)
            return returned if output or self.hook.with_kwargs else (returned, kwargs)
        if not output:
            return (by_hand(self.hook, args[0]), *args[1:]), kwargs
        (value,), part = output, self.hook.output_index
        if isinstance(value, dict):
            return {**value, part: by_hand(self.hook, value[part])}
        return part_by_hand(self.hook, value)


@dataclass(frozen=True)
class Keep:
    """An entry of a plan that captures."""

    what: str
    label: str = ""
    inputs: bool = False
    part: Any = None
    calls: Any = "last"

    @property
    def options(self) -> dict[str, Any]:
        return {
            "inputs": self.inputs,
            "output_index": self.part,
            "calls": self.calls,
        }

    @property
    def name(self) -> str:
        return f"{self.label}:{self.what}" if self.label else self.what

    def taken(self, value: Any) -> Any:
        value = value if self.part is None else value[self.part]
        return map_leaves(value, lambda leaf, _path: leaf.detach().clone())

    def limited(self, values: list[Any]) -> Any:
        if self.calls == "last":
            return values[-1]
        return values if self.calls == "all" else values[-self.calls :]


@dataclass
class Member:
    """A request of a batch: its rows, in its order, and as the product takes them."""

    rows: tuple[int, ...]
    form: Any
    entries: tuple[On | Keep, ...]
    way: str = "plan"
    log: Log = field(default_factory=list)
    kept: dict[str, list[Any]] = field(default_factory=dict)
    acts: dict[str, Any] = field(default_factory=dict)
    """Captures, as the product has them."""

    def fresh(self) -> Member:
        """Copies it, with nothing recorded."""
        return Member(self.rows, self.form, self.entries, self.way)

    def hooks(self, what: str, phase: str) -> list[On]:
        """Its hooks on a module, in their one order."""
        found = [
            ((-entry.priority, not entry.prepend, -place if entry.prepend else place), entry)
            for place, entry in enumerate(self.entries)
            if isinstance(entry, On) and entry.what == what and entry.phase == phase
        ]
        return [entry for _, entry in sorted(found, key=lambda each: each[0])]

    def keeps(self, what: str, *, inputs: bool) -> list[Keep]:
        return [
            entry
            for entry in self.entries
            if isinstance(entry, Keep) and entry.what == what and entry.inputs == inputs
        ]

    def keep(self, entry: Keep, value: Any) -> None:
        values = self.kept.setdefault(entry.name, [])
        values.append(entry.taken(value))
        self.acts[entry.name] = entry.limited(values)

    def own_acts(self, model: RowModel) -> dict[str, Any]:
        """Captures, without captures of a tensor that every member sees whole."""
        whole = {(name, side) for name, side, _ in model.whole}
        shared = {
            entry.name
            for entry in self.entries
            if isinstance(entry, Keep)
            and entry.part is None
            and (entry.what, INPUT if entry.inputs else OUTPUT) in whole
        }
        return {name: value for name, value in self.acts.items() if name not in shared}


class Loop:
    """A loop over requests, on a separate model.

    Args:
        model: a copy without hooks; gets one pre-hook and one hook on each module.
        members: the requests.
        rows: of the batch; None if one member has all.
    """

    def __init__(self, model: RowModel, members: Sequence[Member], rows: int | None) -> None:
        self.model = model
        self.members = members
        self.gathered = {} if rows is None else model.gathered(rows)
        self.all_rows = rows is None
        for name, module in model.named_modules():
            if any(entry.what == name for member in members for entry in member.entries):
                before = functools.partial(self._before, name)
                after = functools.partial(self._after, name)
                module.register_forward_pre_hook(before, with_kwargs=True)
                module.register_forward_hook(after, with_kwargs=True)

    def _places(self, name: str, member: Member, module: Any, *call: Any) -> list[int] | None:
        """Returns where a member's rows are in a module's tensors; None: all."""
        if self.all_rows:
            return None
        index = next((self.gathered[glob] for glob in self.gathered if fnmatchcase(name, glob)), 0)
        if isinstance(index, int):
            return [*member.rows]
        index = index(module, *call) if callable(index) else index
        return [place for place, row in enumerate(index.tolist()) if row in member.rows]

    def _before(self, name: str, module: Any, args: Any, kwargs: Any) -> Any:
        call = args, kwargs
        for member in self.members:
            places = self._places(name, member, module, *call, None)
            if places == []:
                continue
            view = View(self.model, (name, INPUT), call, places)
            seen = view.narrowed
            for on in member.hooks(name, "forward_pre"):
                seen = on.apply(self.model.dim, member.log, module, *seen)
            for entry in member.keeps(name, inputs=True):
                (value,) = seen[0]
                member.keep(entry, value)
            call = view.put_back(seen)
        return call

    def _after(self, name: str, module: Any, args: Any, kwargs: Any, output: Any) -> Any:
        for member in self.members:
            places = self._places(name, member, module, args, kwargs, output)
            if places == []:
                continue
            call = View(self.model, (name, INPUT), (args, kwargs), places).narrowed
            view = View(self.model, (name, OUTPUT), output, places)
            seen = view.narrowed
            for on in member.hooks(name, "forward"):
                seen = on.apply(self.model.dim, member.log, module, *call, seen)
            for entry in member.keeps(name, inputs=False):
                member.keep(entry, seen)
            output = view.put_back(seen)
        return output


class View:
    """Rows of a value, cut out of it and put back."""

    def __init__(
        self, model: RowModel, side: tuple[str, str], value: Any, places: list[int] | None
    ) -> None:
        self._model = model
        self._side = side
        self._value = value
        self._places = places
        self.narrowed = map_leaves(value, self._narrow)

    def _whole(self, path: Path) -> bool:
        wholes = ((*self._side, path[:end]) for end in range(len(path) + 1))
        return self._places is None or any(whole in self._model.whole for whole in wholes)

    def _narrow(self, leaf: Tensor, path: Path) -> Tensor:
        return leaf if self._whole(path) else pick(leaf, self._model.dim, self._places or [])

    def put_back(self, changed: Any) -> Any:
        if self._places is None:
            return changed
        places = torch.tensor(self._places)
        before, after = iter(leaves(self.narrowed)), iter(leaves(changed))

        def put(leaf: Tensor, path: Path) -> Tensor:
            old, new = next(before), next(after)
            if new is old or self._whole(path):
                return leaf
            # A clone has the strides of the module's output, on which later kernels depend.
            return leaf.clone().index_copy_(self._model.dim, places, new)

        return map_leaves(self._value, put)


def assert_same(ours: Any, expected: Any) -> None:
    """Asserts that values are the same bit for bit."""
    assert type(ours) is type(expected)
    if isinstance(expected, Tensor):
        assert (ours.dtype, ours.shape) == (expected.dtype, expected.shape)
        assert torch.equal(ours.nan_to_num(7), expected.nan_to_num(7)), (ours, expected)
    elif isinstance(expected, tuple | list):
        assert len(ours) == len(expected)
        for pair in zip(ours, expected, strict=True):
            assert_same(*pair)
    elif isinstance(expected, dict):
        assert ours.keys() == expected.keys()
        for key, value in expected.items():
            assert_same(ours[key], value)
    else:
        assert ours == expected


def assert_close(ours: Any, expected: Any, *, relative: float) -> None:
    """Asserts that values are close, in proportion to the largest of each tensor."""
    assert type(ours) is type(expected)
    if isinstance(expected, dict):
        assert ours.keys() == expected.keys()
        ours, expected = [[each[key] for key in expected] for each in (ours, expected)]
    for one, other in zip(leaves(ours), leaves(expected), strict=True):
        assert one.shape == other.shape
        scale = max(1.0, float(other.detach().abs().max())) if other.numel() else 1.0
        assert torch.allclose(one.double(), other.double(), rtol=0, atol=relative * scale)

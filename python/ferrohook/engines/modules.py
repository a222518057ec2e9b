"""Modules of a model in an engine: which can be hooked, and which tensor of their output is meant.

The worker observes one forward of a few tokens as it loads the model. The front end, which has no
model, validates plans by the table; the worker rewrites them by it.
"""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import torch
from torch import Tensor, nn

from ferrohook.errors import HookError, HookTypeError, SelectionError
from ferrohook.operations import SUM
from ferrohook.plans import Plan
from ferrohook.plans.entries import HookEntry, KeepEntry
from ferrohook.plans.needs import CHANGES, Judge
from ferrohook.quantity import Quantities
from ferrohook.quantity_names import SIGN, as_lens, from_lens
from ferrohook.selection import select
from ferrohook.steering import Add, Replace

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from ferrohook.plans import Prepared
    from ferrohook.quantity import Quantity
    from ferrohook.steering import Intervention

Tokens: TypeAlias = tuple[int, int]
"""Width and bytes per token of a tensor."""
Kind: TypeAlias = Literal["tensor", "stream", "first", "other"]
"""Output: a tensor; (hidden, residual); a tuple whose first tensor is meant; unknown."""

OBSERVED_ROWS: Final = 7
"""Tokens of the observed forward. A prime: no other dimension is a multiple by chance."""
_CROSSING: Final = {
    "at function": "at is a function, and a plan crosses processes as JSON",
    "cut rows": "slice of keep in an engine begins with ... or slice(None): all tokens",
    "gradients": "an engine computes no gradients",
    "not finite": "its hook has NaN or infinities",
    "python": "a Python function or object is no JSON, in which a plan crosses processes",
    "table": "a vector in an engine has one dimension, as tokens come in chunks",
}
_KEPT: Final = frozenset({"at", "dtype", "max_bytes", "slice"})
EAGER: Final = Judge(_KEPT | CHANGES | {"inputs", "output_index"}, _CROSSING)
COMPILED: Final = Judge(_KEPT | {"add"}, _CROSSING)


@dataclasses.dataclass(frozen=True)
class ModuleInfo:
    """A module of the model."""

    kind: Kind
    width: int = 0
    """Last dimension of the tensor."""
    row_bytes: int = 0
    """Bytes of the tensor per token."""
    refused: str | None = None
    """Reason why it cannot be hooked."""
    inputs: tuple[Tokens | None, ...] = ()
    """Those of each positional argument; None for one without a row per token."""
    outputs: tuple[Tokens | None, ...] = ()
    """Those of each part of an output that is no single tensor."""
    place: str | None = None
    """Name of a hook point that is hooked in its stead: it sees the stream behind a layer."""


@dataclasses.dataclass(frozen=True)
class NamedTensors:
    """Quantities of an engine's model, at places of its own."""

    table: Quantities = dataclasses.field(default_factory=lambda: Quantities({}, {}, "the engine"))
    heads: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    """Number and width of the heads of those that stand side by side, by name."""

    def to_json(self) -> dict[str, Any]:
        """Returns it as JSON has it."""
        return {"table": self.table.to_json(), "heads": {**self.heads}}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> NamedTensors:
        """Reads what `to_json` returned."""
        heads = {name: (count, width) for name, (count, width) in found["heads"].items()}
        return cls(Quantities.from_json(found["table"]), heads)

    def described(self) -> dict[str, dict[str, Any]]:
        """Returns each with its place and proof, and the reason of each that is refused."""
        shown = described(self.table)
        return {
            name: each if "refused" in each else each | {"heads": self.heads.get(name)}
            for name, each in shown.items()
        }

    def at_sites(self, sites: Collection[str], index: Any) -> NamedTensors:
        """Returns those that stand at the sites of a compiled engine; others are missing."""
        served, missing = {}, dict(self.table.missing)
        for name, each in self.table.items():
            own = each.path in sites and each.phase == "forward" and each.part == index
            if own and each.multiplier == 1:
                served[name] = each
            else:
                missing[name.removeprefix(SIGN)] = (
                    f"it stands at the {each.place}, which is no site of this compiled engine, see "
                    "additional_config"
                )
        return NamedTensors(Quantities(served, missing, self.table.model), {})


def described(table: Quantities) -> dict[str, dict[str, Any]]:
    """Returns each quantity with its place and proof, and the reason of each that is refused."""
    shown: dict[str, dict[str, Any]] = {
        name: {
            "place": each.place,
            "equation": each.equation,
            "residual": each.residual,
            "writable": each.writable,
        }
        for name, each in table.items()
    }
    return shown | {f"{SIGN}{name}": {"refused": it} for name, it in table.missing.items()}


class ModuleTable:
    """Table of the modules of a model, by path.

    Args:
        table: the modules.
        fused: names of modules that the engine fuses, by the name of the fused one.
        compiled: True if they are the sites of a compiled engine.
        named: the quantities of the model.
    """

    def __init__(
        self,
        table: Mapping[str, ModuleInfo],
        fused: Mapping[str, Sequence[str]],
        *,
        compiled: bool = False,
        named: NamedTensors | None = None,
    ) -> None:
        self.table = dict(table)
        self.compiled = compiled
        self.named = named or NamedTensors()
        self.fused = {part: whole for whole, parts in fused.items() for part in parts}
        self._fused = {whole: [*parts] for whole, parts in fused.items()}
        self._owners = {it.place: name for name, it in self.table.items() if it.place is not None}
        # `select` works on modules.
        self._skeleton = _skeleton(self.table)

    def to_json(self) -> str:
        """Writes the table as JSON."""
        table = {name: dataclasses.asdict(info) for name, info in self.table.items()}
        return json.dumps(
            {
                "table": table,
                "fused": self._fused,
                "compiled": self.compiled,
                "named": self.named.to_json(),
            }
        )

    @classmethod
    def from_json(cls, text: str) -> ModuleTable:
        """Reads a table that `to_json` wrote."""
        found = json.loads(text)
        table = {
            name: ModuleInfo(
                **it
                | {
                    side: tuple(each and tuple(each) for each in it[side])
                    for side in ("inputs", "outputs")
                }
            )
            for name, it in found["table"].items()
        }
        named = NamedTensors.from_json(found["named"])
        return cls(table, found["fused"], compiled=found["compiled"], named=named)

    def at_sites(self, what: Any) -> tuple[ModuleTable, list[str], Any]:
        """Returns the table of a compiled engine, its sites and their `output_index`.

        Raises:
            ValueError: a module cannot be a site, or their outputs differ in kind or width.
        """
        found = self.selected(what)
        kinds = {(info.kind, info.width) for info in found.values()}
        if len(kinds) > 1:
            msg = f"the sites of an engine have one kind of output and one width, got {kinds}"
            raise ValueError(msg)
        name, info = next(iter(found.items()))
        refused = dataclasses.replace(
            NEVER_RAN, refused="it is no site of this compiled engine, see additional_config"
        )
        table = {name: found.get(name, refused) for name in self.table}
        index = _index(info, name, None)
        named = self.named.at_sites(found, index)
        return ModuleTable(table, self._fused, compiled=True, named=named), [*found], index

    def without(self, partial: Collection[str]) -> ModuleTable:
        """Returns the table with modules refused whose tensors are parts on each rank."""
        refused = ModuleInfo(
            "other",
            refused="tensor parallelism: its input or output on a rank is a shard or a partial sum",
        )
        table = {
            name: refused if name in partial and info.refused is None else info
            for name, info in self.table.items()
        }
        return ModuleTable(table, self._fused, named=self.named)

    def with_quantities(self, named: NamedTensors) -> ModuleTable:
        """Returns the table with the quantities of the model."""
        return ModuleTable(self.table, self._fused, compiled=self.compiled, named=named)

    def selected(self, what: Any) -> dict[str, ModuleInfo]:
        """Returns the modules that a selector of a plan names.

        Raises:
            ValueError: it matches none, or one that cannot be hooked.
        """
        if isinstance(what, list):
            what = [self._owners.get(it, it) if isinstance(it, str) else it for it in what]
        names, rest = self._split(what)
        found = {name: self._named_info(name) for name in names}
        return found if names and rest is None else found | self._selected(rest)

    def _split(self, what: Any) -> tuple[list[str], Any]:
        """Splits a selector into names of quantities, globs resolved, and the rest, None if empty.

        Raises:
            ValueError: a quantity is not proved.
        """
        if isinstance(what, str):
            lens = None if what in self.table else from_lens(what)
            if not what.startswith(SIGN) and lens is None:
                return [], what
            try:
                found = self.named.table.matching(lens or what)
            except SelectionError as error:
                raise ValueError(str(error)) from error
            return [it.name if lens is None else as_lens(it.name, what) for it in found], None
        if not isinstance(what, list | tuple | set | frozenset):
            return [], what
        names: list[str] = []
        rest = []
        for each in what:
            found_names, left = self._split(each)
            names += found_names
            rest += [] if found_names else [left]
        return names, rest or None

    def quantity(self, name: str) -> Quantity | None:
        """Returns the quantity of this name, None for a path."""
        if name in self.table:
            return None
        found = name if name.startswith(SIGN) else from_lens(name)
        return None if found is None else self.named.table[found]

    def shaped(self, name: str, rows: Tensor) -> Tensor:
        """Returns rows of a capture as the quantity has them: heads in a dimension of their own."""
        quantity = self.quantity(name)
        heads = None if quantity is None else self.named.heads.get(quantity.name)
        return rows if heads is None else rows.unflatten(-1, heads)

    def _named_info(self, name: str) -> ModuleInfo:
        quantity = self.named.table[from_lens(name) or name]
        info = self.table[quantity.path]
        part: Any = quantity.part
        if quantity.phase == "forward_pre":
            width, size = _input(info, quantity.path, part)
        elif part is None or part == SUM:
            width, size = info.width, info.row_bytes
        else:
            width, size = _part(info, quantity.path, part)
        return ModuleInfo("tensor", width, size)

    def _selected(self, what: Any) -> dict[str, ModuleInfo]:
        for path in _paths(what):
            info = self.table.get(path)
            if info is not None and info.refused is not None:
                msg = f"{path!r} cannot be hooked: {info.refused}"
                raise ValueError(msg)
            *_, last = path.rpartition(".")
            if info is None and (whole := self.fused.get(last)) is not None:
                fused = path.removesuffix(last) + whole
                msg = f"{path!r} is part of a module that the engine fuses: {fused!r}"
                raise ValueError(msg)
        try:
            names = [*select(self._skeleton, what, called=True)]
        except (SelectionError, HookTypeError) as error:
            raise ValueError(str(error)) from error
        found = {name: self.table[name] for name in names}
        for name, info in found.items():
            if info.refused is not None:
                msg = f"{name!r} cannot be hooked: {info.refused}"
                raise ValueError(msg)
        return found

    def with_places(self, places: Mapping[str, str]) -> ModuleTable:
        """Returns the table with hook points that stand for the outputs of modules."""
        # The input of such a module is a part of the stream, of which the engine keeps account.
        moved = {
            name: dataclasses.replace(self.table[name], place=place, inputs=())
            for name, place in places.items()
        }
        return ModuleTable(self.table | moved, self._fused, named=self.named)

    def place_of(self, name: str) -> str:
        """Returns the name of the module that is hooked for a module."""
        return (name in self.table and self.table[name].place) or name

    def placed(self, plan: Plan) -> Plan:
        """Moves the entries of a rewritten plan to the hook points of their modules."""
        if not self._owners:
            return plan
        return Plan(*(self._moved(entry) for entry in plan.entries))

    def _moved(self, entry: HookEntry | KeepEntry) -> HookEntry | KeepEntry:
        names = [*self.selected(entry.what)]
        return dataclasses.replace(entry, what=[self.place_of(name) for name in names])

    def rewritten(self, plan: Plan) -> Plan:
        """Rewrites a plan for the outputs of the engine's modules, and validates it.

        An entry without an `output_index` means the stream of a layer that returns
        (hidden, residual), and the first tensor of a linear or norm layer that returns a tuple.

        Raises:
            ValueError: the plan has what an engine does not serve; names the entry.
        """
        entries: list[HookEntry | KeepEntry] = []
        names: set[str] = set()
        for number, entry in enumerate(plan.entries):
            try:
                entries += self._rewritten(entry)
                if isinstance(entry, KeepEntry):
                    kept = {*map(entry.name_of, self.selected(entry.what))}
                    _check_names(names & kept)
                    names |= kept
            except ValueError as error:
                msg = f"entries[{number}]: {error}"
                raise ValueError(msg) from None
        if self.compiled:
            self._check_positions(entries)
        return Plan(*entries)

    def _rewritten(self, entry: HookEntry | KeepEntry) -> list[HookEntry | KeepEntry]:
        names, rest = self._split(entry.what)
        if not names:
            return self._at_modules(entry)
        if (reason := (COMPILED if self.compiled else EAGER).refusal(entry)) is not None:
            raise ValueError(reason)
        moved = [self._at_quantity(entry, name) for name in names]
        if rest is not None:
            moved += self._at_modules(dataclasses.replace(entry, what=rest))
        return moved

    def _at_quantity(self, entry: HookEntry | KeepEntry, name: str) -> HookEntry | KeepEntry:
        """Rewrites an entry for one quantity, which the worker's table places.

        Raises:
            ValueError: the entry does not fit it.
        """
        quantity = self.named.table[from_lens(name) or name]
        heads = self.named.heads.get(quantity.name)
        if isinstance(entry, KeepEntry):
            if entry.options.keys() & {"inputs", "output_index"}:
                msg = f"{name} is one tensor at a place of its own: leave out inputs, output_index"
                raise ValueError(msg)
            if heads is not None and "slice" in entry.options:
                msg = f"{name} is captured whole in an engine, where it has no dimension of heads"
                raise ValueError(msg)
            _check_slice(entry.options.get("slice"), name, self._named_info(name).width)
            copy = {"copy": "clone"} if quantity.phase == "forward_pre" else {}
            return dataclasses.replace(entry, what=[name], options=entry.options | copy)
        if entry.phase != "forward" or entry.hook.output_index is not None:
            msg = f"{name} is one tensor at a place of its own: leave out phase and output_index"
            raise ValueError(msg)
        if not quantity.writable:
            msg = f"{name} can be read and not written: what is written does not arrive"
            raise ValueError(msg)
        hook = entry.hook if heads is None else _for_all_heads(entry.hook, name, *heads)
        _check_width(hook, name, self._named_info(name).width)
        return dataclasses.replace(entry, what=[name], hook=hook)

    def _at_modules(self, entry: HookEntry | KeepEntry) -> list[HookEntry | KeepEntry]:
        found = self.selected(entry.what)
        if (reason := (COMPILED if self.compiled else EAGER).refusal(entry)) is not None:
            raise ValueError(reason)
        if isinstance(entry, KeepEntry):
            index = entry.options.get("output_index")
            for name, info in found.items():
                _check_slice(entry.options.get("slice"), name, _width(info, name, entry.options))
            if entry.options.get("inputs"):
                # A buffer of the runner may be one of them.
                return [dataclasses.replace(entry, options={**entry.options, "copy": "clone"})]
        else:
            index = entry.hook.output_index
            if entry.phase != "forward":
                for name, info in found.items():
                    _check_width(entry.hook, f"input of {name!r}", _input(info, name, index)[0])
                return [entry]
        groups: dict[Any, list[str]] = {}
        for name, info in found.items():
            if isinstance(entry, HookEntry):
                width = info.width if index is None else _part(info, name, index)[0]
                _check_width(entry.hook, f"output of {name!r}", width)
            groups.setdefault(_index(info, name, index), []).append(name)
        return [_with_index(entry, names, index) for index, names in groups.items()]

    def _check_positions(self, entries: Sequence[HookEntry | KeepEntry]) -> None:
        ats: dict[str, Any] = {}
        kept: set[str] = set()
        for entry in entries:
            at: Any = entry.at
            listed: Any = entry.what  # a list, as rewritten
            names = [name if (it := self.quantity(name)) is None else it.path for name in listed]
            if isinstance(entry, KeepEntry):
                kept.update(names)
                continue
            for name in names:
                if name in kept:
                    msg = (
                        f"the plan keeps {name!r} before it changes it: a compiled engine keeps "
                        "last"
                    )
                    raise ValueError(msg)
                if ats.setdefault(name, at) != at:
                    msg = (
                        f"the plan changes {name!r} at several positions: a compiled engine at one"
                    )
                    raise ValueError(msg)

    def row_bytes(self, plan: Plan | Prepared) -> list[tuple[KeepEntry, int]]:
        """Returns for each capture of a rewritten plan the bytes per token."""
        sizes = []
        for entry in plan.entries:
            if isinstance(entry, KeepEntry):
                found = self.selected(entry.what)
                size = sum(_bytes(info, name, entry.options) for name, info in found.items())
                sizes.append((entry, size))
        return sizes


def _check_names(twice: Collection[str]) -> None:
    if twice:
        msg = f"it keeps {min(twice)!r} again: give one of the two a label"
        raise ValueError(msg)


def _for_all_heads(hook: Intervention, name: str, heads: int, head_dim: int) -> Intervention:
    """Returns the intervention on all heads side by side that does to each what `hook` does.

    Raises:
        ValueError: there is none.
    """
    if hook.vector is None:
        return hook
    _check_width(hook, f"head of {name}", head_dim)
    if isinstance(hook, Add):
        vector, scale = hook.values
        return Add(vector.repeat(heads), scale) if hook.width == head_dim else hook
    if isinstance(hook, Replace):
        (vector,) = hook.values
        return Replace(vector.repeat(heads)) if hook.width == head_dim else hook
    msg = f"{type(hook).__name__} on {name} is of each head, which an engine does not take apart"
    raise ValueError(msg)


def _check_width(hook: Intervention, tensor: str, width: int) -> None:
    if hook.width not in {None, 1, width}:
        msg = f"{hook!r} has a width of {hook.width}, the {tensor} one of {width}"
        raise ValueError(msg)


def _index(info: ModuleInfo, name: str, index: Any) -> Any:
    """Returns the `output_index` that is meant at a module."""
    if index is not None:
        _part(info, name, index)
        return index
    if info.kind == "tensor":
        return index
    if info.kind == "other":
        msg = f"{name!r} returns several tensors: name one by output_index"
        raise ValueError(msg)
    return SUM if info.kind == "stream" else 0


def _part(info: ModuleInfo, name: str, index: Any) -> Tokens:
    """Returns width and bytes of the part of an output that is named.

    Raises:
        ValueError: the output has no such part.
    """
    if index == "sum" and info.kind == "stream":
        return info.width, info.row_bytes
    found: Tokens | None = None
    if isinstance(index, int) and -len(info.outputs) <= index < len(info.outputs):
        found = info.outputs[index]
    if found is None:
        places = [place for place, each in enumerate(info.outputs) if each is not None]
        there = f"has the outputs {places}" if places else "returns one tensor: leave it out"
        msg = f"output_index={index!r}: {name!r} {there}"
        raise ValueError(msg)
    return found


def _width(info: ModuleInfo, name: str, options: Mapping[str, Any]) -> int:
    """Returns the width of the tensor that a capture means."""
    index = options.get("output_index")
    if options.get("inputs"):
        return _input(info, name, index)[0]
    return info.width if index is None else _part(info, name, index)[0]


def _check_slice(index: Any, name: str, width: int) -> None:
    """Checks that an index fits a tensor of (tokens, width).

    Raises:
        ValueError: it does not.
    """
    if index is None:
        return
    try:
        torch.empty(1, width)[index]
    except (IndexError, TypeError) as error:
        msg = f"slice={index!r} does not fit {name!r} of (tokens, {width}): {error}"
        raise ValueError(msg) from error


def _with_index(
    entry: HookEntry | KeepEntry, names: list[str], index: Any
) -> HookEntry | KeepEntry:
    if isinstance(entry, KeepEntry):
        options = {name: it for name, it in entry.options.items() if name != "output_index"}
        if index is not None:
            options["output_index"] = index
        return dataclasses.replace(entry, what=names, options=options)
    hook = entry.hook
    if hook.output_index != index:
        hook = type(hook)(*hook.values, output_index=index)
    return dataclasses.replace(entry, what=names, hook=hook)


def _input(info: ModuleInfo, name: str, index: Any) -> Tokens:
    """Returns width and bytes per token of the positional argument that is meant."""
    inputs = info.inputs
    if isinstance(index, int) and index >= 0:
        inputs = inputs[index : index + 1]
    if len(inputs) != 1 or (found := inputs[0]) is None:
        places = [place for place, each in enumerate(info.inputs) if each is not None]
        advice = (
            f"name one of {places} by output_index"
            if places
            else "the engine calls it by keywords, or not at all as one that is fused; take the "
            "output of the module before it, or its own"
        )
        msg = (
            "inputs=True and phase='forward_pre' take a positional argument with a row per token, "
            f"and {name!r} has {'several' if places else 'none'}: {advice}"
        )
        raise ValueError(msg)
    return found


def _bytes(info: ModuleInfo, name: str, options: Mapping[str, Any]) -> int:
    width, size = info.width, info.row_bytes
    index = options.get("output_index")
    if options.get("inputs"):
        width, size = _input(info, name, index)
    elif index is not None:
        width, size = _part(info, name, index)
    dtype: torch.dtype | None = options.get("dtype")
    return size if dtype is None else width * dtype.itemsize


def _paths(what: Any) -> list[str]:
    """Returns the strings in a selector."""
    if isinstance(what, str):
        return [what]
    members = what if isinstance(what, list | tuple | set | frozenset) else ()
    return [path for member in members for path in _paths(member)]


class Model(nn.Module):
    """Stands for a module that runs in a forward; errors of `select` name the class."""

    def forward(self) -> None:
        """Marks the module as one that is called, for `select`."""


def _skeleton(table: Mapping[str, ModuleInfo]) -> nn.Module:
    """Makes modules of the names in a table; those that never ran are containers."""
    made: dict[str, nn.Module] = {}
    for name, info in table.items():
        made[name] = nn.Module() if info == NEVER_RAN else Model()
        if name:
            parent, _, last = name.rpartition(".")
            made[parent].add_module(last, made[name])
    return made[""]


NEVER_RAN: Final = ModuleInfo("other", refused="it never runs in the forward of the engine's model")


def observe(model: nn.Module, forward: Callable[[], object]) -> ModuleTable:
    """Observes the outputs of all modules in one forward of `OBSERVED_ROWS` tokens.

    Raises:
        HookError: no module ran.
    """
    outputs: dict[str, list[Any]] = {}
    inputs: dict[str, Any] = {}

    def note(name: str) -> Callable[..., None]:
        def noted(_module: nn.Module, args: Any, output: Any) -> None:
            outputs.setdefault(name, []).append(_shapes(output))
            inputs[name] = _shapes(args)

        return noted

    modules = dict(model.named_modules())
    hooks = [module.register_forward_hook(note(name)) for name, module in modules.items()]
    try:
        forward()
    finally:
        for hook in hooks:
            hook.remove()
    if not outputs:
        msg = "no module of the engine's model ran in the observed forward"
        raise HookError(msg)
    table = {
        name: dataclasses.replace(
            _info(it, outputs.get(name, [])), inputs=tuple(map(_row, inputs.get(name, ())))
        )
        for name, it in modules.items()
    }
    return ModuleTable(table, getattr(model, "packed_modules_mapping", None) or {})


def _shapes(output: Any) -> Any:
    """Returns shape and dtype in place of tensors."""
    if isinstance(output, Tensor):
        return output.shape, output.element_size()
    if isinstance(output, tuple | list):
        return [_shapes(each) for each in output]
    return None


def _row(shapes: Any) -> Tokens | None:
    """Returns width and bytes per token of a tensor by what `_shapes` has for it, or None."""
    if not isinstance(shapes, tuple):
        return None
    shape, size = shapes
    has_rows = len(shape) > 1 and shape[0] == OBSERVED_ROWS
    return (shape[-1], shape[1:].numel() * size) if has_rows else None


def _info(module: nn.Module, calls: list[Any]) -> ModuleInfo:
    if not calls:
        return NEVER_RAN
    if len(calls) > 1:
        return ModuleInfo(
            "other", refused=f"it runs {len(calls)} times in a forward, for several layers"
        )
    (output,) = calls
    parts = output if isinstance(output, list) else [output]
    tensors = [part for part in parts if isinstance(part, tuple)]
    if not tensors or any(len(shape) < 1 or shape[0] != OBSERVED_ROWS for shape, _ in tensors):
        return ModuleInfo("other", refused="its output is no tensor of a row per token")
    shape, size = tensors[0]
    info = ModuleInfo("tensor", shape[-1], shape[1:].numel() * size)
    if output is not parts:
        return info
    info = dataclasses.replace(info, outputs=tuple(map(_row, parts)))
    norm = "Norm" in type(module).__name__
    if len(tensors) == 1 or norm:
        return dataclasses.replace(info, kind="first")
    layer = len(tensors) == 2 and tensors[0] == tensors[1] and any(True for _ in module.children())  # noqa: PLR2004 (hidden, residual)
    return dataclasses.replace(info, kind="stream" if layer else "other")

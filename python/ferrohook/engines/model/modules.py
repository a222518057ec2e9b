"""Modules of a model in an engine: which can be hooked, and which tensor of their output is meant.

The worker makes the table as it loads the model. The front end, which has no model, validates plans
by it; the worker rewrites them by it.
"""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

import torch
from torch import nn

from ferrohook.effects.parts import SUM
from ferrohook.errors import HookTypeError, SelectionError
from ferrohook.names.places import Place
from ferrohook.names.select import select
from ferrohook.names.spelling import SIGN, as_lens, from_lens, split_head
from ferrohook.plans import Plan
from ferrohook.plans.entries import Entry, GateEntry, HookEntry, KeepEntry
from ferrohook.plans.needs import GATES
from ferrohook.quantity import Quantities
from ferrohook.quantity.resolving import matching

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from ferrohook.plans import Prepared
    from ferrohook.quantity import Quantity
    from ferrohook.tokens.positions import At

Tokens: TypeAlias = tuple[int, int]
"""Width and bytes per token of a tensor."""
Kind: TypeAlias = Literal["tensor", "stream", "first", "other"]
"""Output: a tensor; (hidden, residual); a tuple whose first tensor is meant; unknown."""

Outcomes: TypeAlias = "Mapping[str, Mapping[str, str | None]]"
"""Reason why a form of plan is refused, by module and form; None where it passed."""

OBSERVED_ROWS: Final = 7
"""Tokens of the observed forward. A prime: no other dimension is a multiple by chance."""


def observed_ids(vocabulary: int) -> range:
    """Returns the ids of these tokens: the first and the last of a vocabulary are often special."""
    start = max(0, min(vocabulary // 4, vocabulary - OBSERVED_ROWS))
    step = max(1, vocabulary // 2 // OBSERVED_ROWS)
    return range(start, start + OBSERVED_ROWS * step, step)


def dim_of_rows(shape: Sequence[int]) -> int | None:
    """Returns the dimension of the rows of a tensor in the observed forward, None without rows.

    A model of transformers inside an engine has tensors of (1, tokens, width).
    """
    dims = (dim for dim in (0, 1) if (*shape[: dim + 1],) == (1,) * dim + (OBSERVED_ROWS,))
    return next(dims, None)


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
    """Widths and bytes of positional arguments; None for one without a row per token."""
    outputs: tuple[Tokens | None, ...] = ()
    """Widths and bytes of the parts of an output that is not a single tensor."""
    place: str | None = None
    """Name of a hook point that is hooked in its stead: it sees the stream after a layer."""
    dim: int = 0
    """Dimension of the rows in its tensors."""
    start: int = 0
    """Start of its call in the observed forward, counted in starts and ends of calls."""
    end: int = 0
    proof: Mapping[str, str | None] | None = None
    """Reason why a form of plan is refused, by form (None: it passed); None before a self-test."""

    def index(self, name: str, index: Any) -> Any:
        """Returns the `output_index` that an entry means.

        Args:
            name: of the module, for errors.
            index: of the entry; None without one.

        Raises:
            ValueError: the output has no such part, or several that may be meant.
        """
        if index is not None:
            self.part(name, index)
            return index
        if self.kind == "tensor":
            return index
        if self.kind == "other":
            msg = f"{name!r} returns several tensors: choose one with output_index"
            raise ValueError(msg)
        return SUM if self.kind == "stream" else 0

    def part(self, name: str, index: Any) -> Tokens:
        """Returns width and bytes of the part of an output that is named.

        Raises:
            ValueError: the output has no such part.
        """
        if index == "sum" and self.kind == "stream":
            return self.width, self.row_bytes
        found: Tokens | None = None
        if isinstance(index, int) and -len(self.outputs) <= index < len(self.outputs):
            found = self.outputs[index]
        if found is None:
            places = [place for place, each in enumerate(self.outputs) if each is not None]
            there = f"has outputs at {places}" if places else "returns one tensor: leave it out"
            msg = f"output_index={index!r}: {name!r} {there}"
            raise ValueError(msg)
        return found

    def input(self, name: str, index: Any) -> Tokens:
        """Returns width and bytes per token of the positional argument that is meant.

        Raises:
            ValueError: there is none, or several.
        """
        inputs = self.inputs
        if isinstance(index, int) and index >= 0:
            inputs = inputs[index : index + 1]
        if len(inputs) != 1 or (found := inputs[0]) is None:
            places = [place for place, each in enumerate(self.inputs) if each is not None]
            advice = (
                f"choose one of {places} with output_index"
                if places
                else "the engine calls it with keyword arguments, or never calls it because it is "
                "fused; use the output of the module before it, or its own output"
            )
            msg = (
                "inputs=True and phase='forward_pre' need a positional argument with a row per "
                f"token, but {name!r} has {'several' if places else 'none'}: {advice}"
            )
            raise ValueError(msg)
        return found

    def captured(self, name: str, options: Mapping[str, Any]) -> Tokens:
        """Returns width and bytes per token of the tensor that a capture means.

        Args:
            name: of the module, for errors.
            options: of the capture.

        Raises:
            ValueError: there is none, or several.
        """
        index = options.get("output_index")
        if options.get("inputs"):
            return self.input(name, index)
        return (self.width, self.row_bytes) if index is None else self.part(name, index)


class SampledLogits(NamedTuple):
    """Output of the module that returns the logits of the tokens that an engine samples from."""

    path: str
    width: int
    part: str | None = None
    """Attribute of the output; None if that is the logits."""


@dataclasses.dataclass(frozen=True)
class NamedTensors:
    """Quantities of an engine's model, at the engine's places."""

    table: Quantities = dataclasses.field(default_factory=lambda: Quantities({}, {}, "the engine"))
    heads: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    """Number and width of the heads of quantities with heads side by side, by name."""
    logits: SampledLogits | None = None
    """Logits for gates; None if gates cannot read them."""

    def to_json(self) -> dict[str, Any]:
        """Returns it as JSON has it."""
        return {"table": self.table.to_json(), "heads": {**self.heads}, "logits": self.logits}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> NamedTensors:
        """Reads what `to_json` returned."""
        heads = {name: (count, width) for name, (count, width) in found["heads"].items()}
        logits = None if found["logits"] is None else SampledLogits(*found["logits"])
        return cls(Quantities.from_json(found["table"]), heads, logits)

    def described(self) -> dict[str, dict[str, Any]]:
        """Returns each with its place and proof, and the reason of each that is refused."""
        shown = described(self.table)
        return {
            name: each if "refused" in each else each | {"heads": self.heads.get(name)}
            for name, each in shown.items()
        }

    def at_sites(self, parts: Mapping[str, Any]) -> NamedTensors:
        """Returns the quantities at the sites of a compiled engine; others are missing.

        Args:
            parts: the `output_index` of each site.
        """
        served, missing = {}, dict(self.table.missing)
        for name, each in self.table.items():
            at_site = each.path in parts and each.phase == "forward"
            if at_site and each.part == parts[each.path]:
                served[name] = each
            else:
                missing[name.removeprefix(SIGN)] = (
                    f"it is at the {each.place}, which is not a site of this compiled engine, see "
                    "additional_config"
                )
        heads = {name: it for name, it in self.heads.items() if name in served}
        return NamedTensors(Quantities(served, missing, self.table.model), heads, self.logits)


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
        dims = [info.dim for info in self.table.values() if info.refused is None]
        self.dim = max(dims, key=dims.count, default=0)
        """Dimension of the rows in most modules."""
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
        return cls(table, found["fused"], named=named, compiled=found["compiled"])

    def at_sites(self, what: Any) -> tuple[ModuleTable, dict[str, Any]]:
        """Returns the table of a compiled engine, and the `output_index` of each of its sites.

        Args:
            what: selector of the sites.

        Raises:
            ValueError: a module cannot be a site.
        """
        found = self.selected(what)
        refused = dataclasses.replace(
            NEVER_RAN, refused="it is not a site of this compiled engine, see additional_config"
        )
        table = {name: found.get(name, refused) for name in self.table}
        parts = {name: info.index(name, None) for name, info in found.items()}
        named = self.named.at_sites(parts)
        return ModuleTable(table, self._fused, compiled=True, named=named), parts

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
        reason = (
            "tensor parallelism: each rank has only some of the heads and part of the widths, so "
            "nothing can be proved"
        )
        none = Quantities({}, {"resid_post": reason, "logits": reason}, "the engine")
        return ModuleTable(table, self._fused, named=NamedTensors(none))

    def proved(self, outcomes: Outcomes) -> ModuleTable:
        """Returns the table with the outcomes of a self-test.

        A module is refused if no form of plan was right there.
        """
        table = dict(self.table)
        for name, outcome in outcomes.items():
            table[name] = dataclasses.replace(table[name], proof=outcome)
            if all(outcome.values()):
                refused = (
                    f"the self-test of the engine failed there: {next(iter(outcome.values()))}"
                )
                table[name] = dataclasses.replace(table[name], refused=refused)
        return ModuleTable(table, self._fused, compiled=self.compiled, named=self.named)

    def other_dims(self, model: nn.Module) -> dict[nn.Module, int]:
        """Returns the dimension of the rows of the modules where it is another than `dim`."""
        return {
            model.get_submodule(name): info.dim
            for name, info in self.table.items()
            if info.refused is None and info.dim != self.dim
        }

    def with_quantities(self, named: NamedTensors) -> ModuleTable:
        """Returns the table with the quantities of the model."""
        return ModuleTable(self.table, self._fused, named=named, compiled=self.compiled)

    def selected(self, what: Any) -> dict[str, ModuleInfo]:
        """Returns the modules that a selector of a plan names.

        Raises:
            ValueError: it matches none, or one that cannot be hooked.
        """
        if isinstance(what, list):
            what = [self._owners.get(it, it) if isinstance(it, str) else it for it in what]
        names, rest = self.split(what)
        found = {name: self.quantity_info(name) for name in names}
        return found if names and rest is None else found | self._selected(rest)

    def split(self, what: Any) -> tuple[list[str], Any]:
        """Splits a selector into names of quantities, globs resolved, and the rest, None if empty.

        Raises:
            ValueError: a quantity is not proved.
        """
        if isinstance(what, str):
            lens = None if what in self.table else from_lens(what)
            if not what.startswith(SIGN) and lens is None:
                return [], what
            try:
                found = [
                    name for name, *_ in matching(self.named.table, self.named.heads, lens or what)
                ]
            except SelectionError as error:
                raise ValueError(str(error)) from error
            return [name if lens is None else as_lens(name, what) for name in found], None
        if not isinstance(what, list | tuple | set | frozenset):
            return [], what
        names: list[str] = []
        rest = []
        for each in what:
            found_names, left = self.split(each)
            names += found_names
            rest += [] if found_names else [left]
        return names, rest or None

    def quantity(self, name: str) -> Quantity | None:
        """Returns the quantity of this name, of all heads if it names one; None for a path."""
        if name in self.table:
            return None
        found = name if name.startswith(SIGN) else from_lens(name)
        return None if found is None else self.named.table[split_head(found)[0]]

    def path_of(self, name: str) -> str:
        """Returns the path of the module that is hooked for a module or a quantity."""
        quantity = self.quantity(name)
        return self.place_of(name) if quantity is None else quantity.path

    def heads_of(self, name: str) -> tuple[int, int] | None:
        """Returns number and width of the heads of a quantity that has them side by side."""
        quantity = self.quantity(name)
        one = split_head(name)[1] is not None
        return None if quantity is None or one else self.named.heads.get(quantity.name)

    def quantity_info(self, name: str) -> ModuleInfo:
        """Returns a quantity as a module that returns it."""
        quantity = self.named.table[split_head(from_lens(name) or name)[0]]
        info = self.table[self._owners.get(quantity.path, quantity.path)]
        part: Any = quantity.part
        if quantity.phase == "forward_pre":
            width, size = info.input(quantity.path, part)
        elif part is None or part == SUM:
            width, size = info.width, info.row_bytes
        else:
            width, size = info.part(quantity.path, part)
        return ModuleInfo("tensor", width, size)

    def place(self, name: str, index: Any) -> Place:
        """Returns the place of a quantity, or of a module's output.

        Its module is a stand-in: nothing can be hooked there.

        Args:
            name: as `selected` returns it.
            index: part of a module's output.

        Raises:
            ValueError: the output has no such part.
        """
        if self.quantity(name) is None:
            info = self.table[name]
            width = info.width if index is None else info.part(name, index)[0]
            stand_in = self._skeleton.get_submodule(name)
            return Place(name, stand_in, part=index, shape=(width,), time=info.end)
        ((_, quantity, head),) = matching(
            self.named.table, self.named.heads, from_lens(name) or name
        )
        path = self._owners.get(quantity.path, quantity.path)
        inputs, info = quantity.phase == "forward_pre", self.table[path]
        return Place(
            path,
            self._skeleton.get_submodule(path),
            inputs,
            quantity.part,
            quantity.multiplier,
            name,
            quantity.writable,
            (self.quantity_info(name).width,),
            head,
            time=info.start if inputs else info.end,
        )

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

    def _moved(self, entry: Entry) -> Entry:
        if not entry.has_places or self._at_logits(entry):
            return entry
        names = [*self.selected(entry.what)]
        moved = dataclasses.replace(entry, what=[self.place_of(name) for name in names])
        if isinstance(moved, HookEntry) and (reads := moved.reads) is not None:
            reads = reads._replace(what=self.place_of(reads.what))
            return dataclasses.replace(moved, reads=reads)
        return moved

    def reads_logits(self, plan: Plan | Prepared) -> bool:
        """Returns True if a gate of a rewritten plan reads the logits."""
        return any(map(self._at_logits, plan.entries))

    def _at_logits(self, entry: Entry) -> bool:
        logits = self.named.logits
        at = None if logits is None else [logits.path]
        return isinstance(entry, GateEntry) and entry.what == at

    def unproved(self, entry: Entry) -> str | None:
        """Returns why an entry of a rewritten plan is refused after a self-test; None if it is not.

        The self-test has changed and read the outputs of modules; inputs and quantities are judged
        by their modules.
        """
        if not entry.has_places or self._at_logits(entry):
            return None
        forms = {"capture"} if isinstance(entry, KeepEntry) else set()
        if isinstance(entry, HookEntry):
            forms = {"steer"} if entry.at is None else {"steer", "positions"}
        if not entry.needs.isdisjoint(GATES):
            forms.add("gates")
        reads = entry.reads if isinstance(entry, HookEntry) else None
        whats = [entry.what] if reads is None else [entry.what, reads.what]
        for name in (name for what in whats for name in self.selected(what)):
            proof = self.table[self._owners.get(path := self.path_of(name), path)].proof or {}
            for form in sorted(forms):
                if (reason := proof.get(form)) is not None:
                    return f"{form} at {name!r} failed in the self-test of the engine: {reason}"
        return None

    def kept(self, entry: KeepEntry) -> list[str]:
        """Returns the names of the modules, quantities or gates that an entry captures."""
        return [str(entry.what)] if entry.gates else [*self.selected(entry.what)]

    def captures(self, plan: Plan | Prepared) -> list[CaptureEntry]:
        """Returns the captures of a rewritten plan."""
        gates: dict[str, At] = {
            it.gate.name: it.at for it in plan.entries if isinstance(it, GateEntry)
        }
        found = []
        for entry in plan.entries:
            if not isinstance(entry, KeepEntry):
                continue
            if entry.gates:
                (gate,) = entry.gates
                name = entry.name_of(str(entry.what))
                dtype: torch.dtype = entry.options.get("dtype", torch.float32)
                values = [CapturedValue(name, name, None)]
                found.append(CaptureEntry(gates[gate], dtype.itemsize, values))
                continue
            modules = self.selected(entry.what)
            whole = "features" in entry.options
            values = [
                CapturedValue(
                    entry.name_of(path),
                    entry.name_of(self.place_of(path)),
                    None if whole else self.heads_of(path),
                )
                for path in modules
            ]
            size = sum(_row_bytes(info, name, entry) for name, info in modules.items())
            found.append(CaptureEntry(entry.at, size, values))
        return found


class CapturedValue(NamedTuple):
    """A tensor that a request captures."""

    name: str
    """Name in the engine's answer."""
    place: str
    """Key in the request's activations."""
    heads: tuple[int, int] | None
    """Number and width of heads, which get separate dimensions."""


class CaptureEntry(NamedTuple):
    """An entry of a plan that captures."""

    at: At
    row_bytes: int
    """Bytes per token."""
    values: list[CapturedValue]


def _row_bytes(info: ModuleInfo, name: str, entry: KeepEntry) -> int:
    """Returns the bytes per token of a capture."""
    width, size = info.captured(name, entry.options)
    dtype: torch.dtype | None = entry.options.get("dtype")
    if "features" in entry.options:
        index = entry.options.get("index")
        width = 2 * entry.options["top"] if index is None else len(index)
        dtype = dtype or torch.float32
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
    """Makes modules of the names in a table; modules that never ran are containers."""
    made: dict[str, nn.Module] = {}
    for name, info in table.items():
        made[name] = nn.Module() if info == NEVER_RAN else Model()
        if name:
            parent, _, last = name.rpartition(".")
            made[parent].add_module(last, made[name])
    return made[""]


NEVER_RAN: Final = ModuleInfo("other", refused="it never runs in the forward of the engine's model")

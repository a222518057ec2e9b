"""Plans of clients, checked and rewritten for the modules of an engine."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Final, cast

from ferrohook.dictionaries.transcoded import check_places, one_place
from ferrohook.effects.interventions import Add, Replace
from ferrohook.effects.routing import ONLY_AT_EXPERTS, Replay, Route, bound
from ferrohook.engines.model.step_values import (
    check_features,
    check_reading,
    check_slice,
    check_width,
)
from ferrohook.errors import HookError, HookTypeError
from ferrohook.names.spelling import SIGN, from_lens, kind_of, split_head
from ferrohook.plans import Plan
from ferrohook.plans.entries import (
    Entry,
    GateEntry,
    HookEntry,
    KeepEntry,
    StopEntry,
    TranscoderInput,
    gates_of,
)
from ferrohook.plans.needs import CHANGES, GATES, BackEnd
from ferrohook.util.texts import listed

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from ferrohook.effects.intervention import Intervention
    from ferrohook.engines.model.modules import ModuleInfo, ModuleTable, SampledLogits
    from ferrohook.tokens.positions import At

_NO_ROUTES: Final = "a compiled engine chooses no other experts: start it with enforce_eager=True"
_NO_INPUTS: Final = (
    "a compiled engine serves one tensor of each site, of its output: leave out inputs and "
    "output_index, or start it with enforce_eager=True"
)
_CROSSING: Final = {
    "at function": "at= is a function, but plans are sent between processes as JSON",
    "cut rows": (
        "in an engine, slice= of keep must start with ... or slice(None), to keep all tokens"
    ),
    "gradients": "an engine does not compute gradients",
    "not finite": "its hook contains NaN or infinity",
    "python": (
        "plans are sent between processes as JSON, which cannot hold Python functions or objects"
    ),
    "table": "a vector in an engine must have one dimension, because tokens come in chunks",
}
_TOKENS_AND_CHOSEN: Final = 2
"""Dimensions of ids of one sequence."""
_FIXED: Final = "{} is one tensor at a fixed place: leave out inputs and output_index"
_LOGITS: Final = f"{SIGN}logits"
_KEPT: Final = frozenset({"at", "dtype", "max_bytes", "slice"})
EAGER: Final = BackEnd(
    _KEPT | CHANGES | GATES | {"features", "inputs", "output_index", "route", "transcoder"},
    _CROSSING,
)
"""Back end of engines that evaluate Python in each step."""
COMPILED: Final = BackEnd(
    EAGER.serves - {"inputs", "output_index", "route"},
    _CROSSING | {"inputs": _NO_INPUTS, "output_index": _NO_INPUTS, "route": _NO_ROUTES},
)
"""Back end of engines whose graphs have sites."""


def rewritten(plan: Plan, modules: ModuleTable) -> Plan:
    """Rewrites a plan for the outputs of the engine's modules, and validates it.

    An entry without an `output_index` means the stream of a layer that returns
    (hidden, residual), and the first tensor of a linear or norm layer that returns a tuple.

    Raises:
        ValueError: the plan has a feature that no engine serves, or lacks a gate that an entry
            depends on; names the entry.
    """
    try:
        gates_of(plan.entries)
    except HookError as error:
        raise ValueError(str(error)) from error
    entries: list[Entry] = []
    names: set[str] = set()
    for number, entry in enumerate(plan.entries):
        try:
            moved = [_tokens_first(each, modules) for each in _rewritten(entry, modules)]
            if (reason := next(filter(None, map(modules.unproved, moved)), None)) is not None:
                raise ValueError(reason)  # noqa: TRY301 (the entry's number is added)
            entries += moved
            if isinstance(entry, KeepEntry):
                kept = {*map(entry.name_of, modules.kept(entry))}
                _check_names(names & kept)
                names |= kept
        except ValueError as error:
            msg = f"entries[{number}]: {error}"
            raise ValueError(msg) from None
    return Plan(*entries)


def _rewritten(entry: Entry, modules: ModuleTable) -> list[Entry]:
    if not entry.needs.isdisjoint(GATES):
        _check(entry, modules)  # before all else
    if isinstance(entry, StopEntry) or not entry.has_places:
        return [entry]
    logits = modules.named.logits
    if isinstance(entry, GateEntry) and logits is not None and entry.what in (_LOGITS, [_LOGITS]):
        return [_gate_at_logits(entry, logits)]
    if isinstance(entry, GateEntry):
        return [_gate_at(entry, modules)]
    if isinstance(entry, HookEntry) and entry.reads is not None:
        return [_transcoding(entry, entry.reads, modules)]
    if isinstance(entry, HookEntry) and isinstance(entry.hook, Route | Replay):
        names, rest = modules.split(entry.what)
        _check(entry, modules)
        _check_route(entry.hook, [] if rest else names, modules)
        return [dataclasses.replace(entry, what=names)]
    return _placed(entry, modules)


def _placed(entry: HookEntry | KeepEntry, modules: ModuleTable) -> list[Entry]:
    """Rewrites a hook or a capture, which may act at quantities and at modules."""
    names, rest = modules.split(entry.what)
    if not names:
        return _at_modules(entry, modules)
    _check(entry, modules)
    moved: list[Entry] = [_at_quantity(entry, name, modules) for name in names]
    if rest is not None:
        moved += _at_modules(dataclasses.replace(entry, what=rest), modules)
    return moved


def _transcoding(entry: HookEntry, reads: TranscoderInput, modules: ModuleTable) -> HookEntry:
    """Rewrites a change of features of a transcoder, for the two places at which it acts.

    Raises:
        ValueError: it does not fit them.
    """
    _check(entry, modules)
    try:
        read, _ = one_place(modules.selected(reads.what))
        written, _ = one_place(modules.selected(entry.what))
        moved = cast("HookEntry", _placed(entry, modules)[0])
        index = reads.output_index
        if modules.quantity(read) is None:
            index = modules.table[read].index(read, index)
        places = modules.place(read, index), modules.place(written, moved.hook.output_index)
        check_places(entry.hook, *places)
    except HookTypeError as error:
        raise ValueError(str(error)) from error
    return dataclasses.replace(moved, reads=TranscoderInput(read, index))


def _check_route(hook: Route | Replay, names: Sequence[str], modules: ModuleTable) -> None:
    """Validates that a route fits the blocks whose experts it names.

    Raises:
        ValueError: it does not.
    """
    if {kind_of(name.removeprefix(SIGN)) for name in names} != {"experts"}:
        raise ValueError(ONLY_AT_EXPERTS)
    for name in names:
        found = modules.named.table[name]
        try:
            ids = bound(hook, name, found.routing, found.shape[-1], found.experts).routed.ids
        except HookTypeError as error:
            raise ValueError(str(error)) from error
        if ids.dim() > _TOKENS_AND_CHOSEN and len(ids) > 1:
            msg = (
                f"{hook!r} has ids for {len(ids)} sequences, but a request of an engine is one "
                "sequence: pass each request its own ids"
            )
            raise ValueError(msg)


def _reaches_back(at: At) -> bool:
    """True if positions may be before the last token of the prompt, in a cache and unsampled."""
    start = at.start if isinstance(at, slice) else at
    return start not in {"generated", "last_prompt", -1}


def _gate_at_logits(entry: GateEntry, logits: SampledLogits) -> GateEntry:
    """Rewrites a gate that reads the logits of the tokens that the engine samples from.

    Raises:
        ValueError: it reads others, or does not fit the logits.
    """
    gate = entry.gate
    if _reaches_back(gate.at):
        msg = (
            f"gate {gate.name!r} reads {_LOGITS} at at={gate.at!r}, but the engine computes logits "
            "only from the last token of the prompt on: give the gate at='generated', "
            "at='last_prompt', or at=slice(-1, None) for both"
        )
        raise ValueError(msg)
    if entry.options:
        raise ValueError(_FIXED.format(_LOGITS))
    check_reading(entry, f"tensor at {_LOGITS}", logits.width)
    options = {} if logits.part is None else {"output_index": logits.part}
    return dataclasses.replace(entry, what=[logits.path], options=options)


def _gate_at(entry: GateEntry, modules: ModuleTable) -> GateEntry:
    """Rewrites a gate for the places that it reads.

    Raises:
        ValueError: the gate does not fit them.
    """
    found = modules.selected(entry.what)
    if (problem := entry.sum_refusal(found)) is not None:
        raise ValueError(problem)
    indices = [_gate_index(entry, name, info, modules) for name, info in found.items()]
    if any(index != indices[0] for index in indices):
        msg = f"gate {entry.gate.name!r} reads different outputs of {listed(found)}"
        raise ValueError(msg)
    options = dict(entry.options)
    if indices[0] is not None:
        options["output_index"] = indices[0]
    return dataclasses.replace(entry, what=[*found], options=options)


def _gate_index(entry: GateEntry, name: str, info: ModuleInfo, modules: ModuleTable) -> Any:
    """Returns the `output_index` with which a gate reads a place.

    Raises:
        ValueError: the gate does not fit it.
    """
    index = meant = entry.options.get("output_index")
    if modules.quantity(name) is not None:
        if entry.options:
            raise ValueError(_FIXED.format(name))
        heads = modules.named.heads.get(split_head(from_lens(name) or name)[0])
        one = split_head(name)[1] is not None and heads is not None
        width = heads[1] if one and heads is not None else info.width
    elif entry.options.get("inputs"):
        width, _ = info.input(name, index)
    else:
        width = info.width if index is None else info.part(name, index)[0]
        meant = info.index(name, index)
    check_reading(entry, f"tensor at {name}", width)
    return meant


def _tokens_first(entry: Entry, modules: ModuleTable) -> Entry:
    """Returns a capture whose `slice` gets the tokens in the first dimension.

    Captures at positions do so already. Without them the slice would get the module's output as it
    is, so the capture takes all positions.
    """
    if isinstance(entry, KeepEntry) and (
        modules.dim and entry.at is None and "slice" in entry.options
    ):
        return dataclasses.replace(entry, at=slice(0, None))
    return entry


def _at_quantity(entry: HookEntry | KeepEntry, name: str, modules: ModuleTable) -> Entry:
    """Rewrites an entry for one quantity, which the worker's table places.

    Raises:
        ValueError: the entry does not fit it.
    """
    if isinstance(entry, KeepEntry):
        return _kept_quantity(entry, name, modules)
    base, head = split_head(from_lens(name) or name)
    quantity = modules.named.table[base]
    heads = modules.named.heads.get(base)
    if entry.phase != "forward" or entry.hook.output_index is not None:
        msg = f"{name} is one tensor at a fixed place: leave out phase and output_index"
        raise ValueError(msg)
    if not quantity.writable:
        msg = f"{name} can be read but not written: writes have no effect"
        raise ValueError(msg)
    if kind_of(base.removeprefix(SIGN)) == "experts":
        msg = (
            f"{name} contains the ids of experts, which no intervention can change: use a "
            "Route, or write to @router"
        )
        raise ValueError(msg)
    hook = entry.hook
    if heads is not None and head is not None:
        check_width(hook, f"tensor {name}", heads[1])
        if entry.at is not None and (quantity.phase == "forward_pre" or quantity.part is not None):
            msg = (
                f"{name} can only be written at all positions in an engine: leave out at=, or "
                "write to @z"
            )
            raise ValueError(msg)
        return dataclasses.replace(entry, what=[name])
    if heads is not None:
        hook = _for_all_heads(hook, name, *heads)
    check_width(hook, f"tensor {name}", modules.quantity_info(name).width)
    return dataclasses.replace(entry, what=[name], hook=hook)


def _kept_quantity(entry: KeepEntry, name: str, modules: ModuleTable) -> Entry:
    base, head = split_head(from_lens(name) or name)
    quantity = modules.named.table[base]
    heads = modules.named.heads.get(base)
    if entry.options.keys() & {"inputs", "output_index"}:
        raise ValueError(_FIXED.format(name))
    if heads is not None and "slice" in entry.options:
        msg = (
            f"{name} can only be captured whole in an engine, where it has no heads dimension: "
            "leave out slice="
        )
        raise ValueError(msg)
    width = modules.quantity_info(name).width
    check_slice(entry.options.get("slice"), f"tensor at {name!r}", (1, width))
    partial = (heads is not None and head is not None) or quantity.multiplier != 1
    if "features" in entry.options and partial:
        msg = f"features= reads the whole tensor of a module, but {name} is a part of it"
        raise ValueError(msg)
    check_features(entry, f"tensor at {name!r}", width)
    moved = dataclasses.replace(entry, what=[name])
    return cloning(moved) if quantity.phase == "forward_pre" else moved


def cloning(entry: KeepEntry) -> KeepEntry:
    """Returns a capture that copies the tensors, which the engine changes later."""
    if "features" in entry.options:  # new tensors, shared with no one
        return entry
    return dataclasses.replace(entry, options={**entry.options, "copy": "clone"})


def _at_modules(entry: HookEntry | KeepEntry, modules: ModuleTable) -> list[Entry]:
    found = modules.selected(entry.what)
    _check(entry, modules)
    if isinstance(entry, KeepEntry):
        index = entry.options.get("output_index")
        for name, info in found.items():
            width, _ = info.captured(name, entry.options)
            check_slice(entry.options.get("slice"), f"tensor at {name!r}", (1, width))
            check_features(entry, f"tensor at {name!r}", width)
        if entry.options.get("inputs"):
            return [cloning(entry)]  # a buffer of the runner may be one of them
    else:
        index = entry.hook.output_index
        if entry.phase != "forward":
            for name, info in found.items():
                check_width(entry.hook, f"input of {name!r}", info.input(name, index)[0])
            return [entry]
    groups: dict[Any, list[str]] = {}
    for name, info in found.items():
        if isinstance(entry, HookEntry):
            width = info.width if index is None else info.part(name, index)[0]
            check_width(entry.hook, f"output of {name!r}", width)
        groups.setdefault(info.index(name, index), []).append(name)
    return [_with_index(entry, names, index) for index, names in groups.items()]


def _check(entry: Entry, modules: ModuleTable) -> None:
    """Validates that an engine serves an entry.

    Raises:
        ValueError: it does not.
    """
    if (reason := (COMPILED if modules.compiled else EAGER).refusal(entry)) is not None:
        raise ValueError(reason)


def _check_names(twice: Collection[str]) -> None:
    if twice:
        msg = f"{min(twice)!r} is kept twice: give one of the two entries a label"
        raise ValueError(msg)


def _for_all_heads(hook: Intervention, name: str, heads: int, head_dim: int) -> Intervention:
    """Returns the intervention on all heads side by side that does to each what `hook` does.

    Raises:
        ValueError: there is none.
    """
    if hook.vector is None:
        return hook
    check_width(hook, f"head of {name}", head_dim)
    if isinstance(hook, Add):
        vector, scale = hook.values
        return Add(vector.repeat(heads), scale) if hook.width == head_dim else hook
    if isinstance(hook, Replace):
        (vector,) = hook.values
        return Replace(vector.repeat(heads)) if hook.width == head_dim else hook
    msg = (
        f"{type(hook).__name__} on {name} acts on each head: in an engine, name the heads, as in "
        f"{name}.*"
    )
    raise ValueError(msg)


def _with_index(entry: HookEntry | KeepEntry, names: list[str], index: Any) -> Entry:
    if isinstance(entry, KeepEntry):
        options = {name: it for name, it in entry.options.items() if name != "output_index"}
        if index is not None:
            options["output_index"] = index
        return dataclasses.replace(entry, what=names, options=options)
    hook = entry.hook
    if hook.output_index != index:
        hook = hook.at_part(index)
    return dataclasses.replace(entry, what=names, hook=hook)

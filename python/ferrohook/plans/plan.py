"""`Plan`: the data that says what a request gets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ferrohook.arguments import expect, expect_module
from ferrohook.plans.entries import HookEntry, KeepEntry, table
from ferrohook.plans.prepared import Prepared

if TYPE_CHECKING:
    from torch import nn


class Plan:
    """Hooks, interventions and captures of a request, as data. Immutable.

    Plans combine by `+`, compare and hash by content, and pickle if their functions do.

    Args:
        *entries: results of `on` and `keep`, or plans.

    Raises:
        HookTypeError: an entry is none of these.

    Examples:
        >>> plan = fh.Plan(fh.on("layers.5", fh.Add(vector)), fh.keep("layers.*"))
        >>> with plan.prepare(model) as prepared, prepared.open() as request:
        ...     model(ids)
        >>> request.acts["layers.3"]
    """

    __slots__ = ("entries",)

    entries: tuple[HookEntry | KeepEntry, ...]
    """The entries, in order."""

    def __init__(self, *entries: HookEntry | KeepEntry | Plan) -> None:
        flat: list[HookEntry | KeepEntry] = []
        for entry in entries:
            if isinstance(entry, Plan):
                flat += entry.entries
                continue
            expect(entry, (HookEntry, KeepEntry), "Plan takes results of on() and keep(), or plans")
            flat.append(entry)
        object.__setattr__(self, "entries", tuple(flat))

    def __setattr__(self, name: str, value: object) -> None:
        msg = f"a plan is immutable: make another, such as plan + fh.Plan(...) ({name} was set)"
        raise AttributeError(msg)

    def __reduce__(self) -> Any:
        return type(self), self.entries

    def __add__(self, other: Plan) -> Plan:
        return Plan(self, other) if isinstance(other, Plan) else NotImplemented

    def __eq__(self, other: object) -> bool:
        return self.entries == other.entries if isinstance(other, Plan) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.entries)

    def __repr__(self) -> str:
        return table(self.entries)

    def prepare(self, model: nn.Module) -> Prepared:
        """Registers the hooks with a model, for requests to be opened.

        Modules are instrumented until the result is closed.

        Raises:
            HookTypeError: `model` is no `nn.Module`, or a vector does not fit a module whose width
                is known; names entry and module.
            SelectionError: an entry matches no module; names the entry.
            HookError: a module cannot be instrumented, or is captured twice under one name.
        """
        expect_module(model, "prepare takes")
        return Prepared(self.entries, model)

"""`Plan`: the hooks and captures of a request, as data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ferrohook.errors import HookError
from ferrohook.plans.entries import Entry, GateEntry, PlanEntry, table
from ferrohook.plans.prepared import Prepared
from ferrohook.plans.reading import JsonLimits, read
from ferrohook.plans.writing import written
from ferrohook.util.arguments import at_least, expect, expect_module

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from torch import Tensor, nn

    from ferrohook.dictionaries.dictionary import Dictionary
    from ferrohook.plans.prepared import Request


class Plan:
    """Hooks, interventions and captures of one request, as immutable data.

    Plans combine by `+`, compare and hash by content, and pickle if their functions do.

    Args:
        *entries: results of `on`, `keep`, `gate`, `stop` and `replay`, or plans.

    Raises:
        HookTypeError: an entry is none of these.
        HookError: two gates have one name.

    Examples:
        >>> plan = fh.Plan(fh.on("layers.5", fh.Add(vector)), fh.keep("layers.*"))
        >>> with plan.open(model) as request:
        ...     model(ids)
        >>> request.acts["layers.3"]
    """

    __slots__ = ("entries",)

    entries: tuple[Entry, ...]
    """The entries, in order."""

    def __init__(self, *entries: Entry | Plan) -> None:
        flat: list[Entry] = []
        for entry in entries:
            if isinstance(entry, Plan):
                flat += entry.entries
                continue
            expected = "Plan takes entries made by on(), keep(), gate() or stop(), or other plans"
            expect(entry, PlanEntry, expected)
            flat.append(entry)
        names = [entry.gate.name for entry in flat if isinstance(entry, GateEntry)]
        if len({*names}) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            msg = f"two gates of the plan are called {twice!r}: rename one"
            raise HookError(msg)
        object.__setattr__(self, "entries", tuple(flat))

    def __setattr__(self, name: str, value: object) -> None:
        msg = f"a plan is immutable: create a new one, such as plan + fh.Plan(...) ({name} was set)"
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

    def prepare(self, model: nn.Module, *, max_bytes: int | None = None) -> Prepared:
        """Registers the hooks on a model, so that requests can be opened.

        Modules are instrumented until the result is closed.

        Args:
            model: any module.
            max_bytes: budget of all captures of a request, beside the entries' budgets: a capture
                beyond it raises `CaptureBudgetError`.

        Raises:
            ValueError: `max_bytes` is below 1.
            HookTypeError: `model` is no `nn.Module`, `max_bytes` no int, or a vector does not fit a
                module whose width is known; names entry and module.
            SelectionError: an entry matches no module; names the entry.
            HookError: a module cannot be instrumented, or is captured twice under one name; a gate
                that an entry names is missing, or reads several places.
        """
        expect_module(model, "prepare needs")
        if max_bytes is not None:
            at_least(1, "max_bytes", max_bytes)
        return Prepared(self.entries, model, max_bytes)

    def open(
        self,
        model: nn.Module,
        *,
        deadline: float | None = None,
        prompt: int | Sequence[int] | None = None,
        max_bytes: int | None = None,
    ) -> Request:
        """Prepares the plan for a model and opens one request; leaving the request closes the plan.

        For many requests, `prepare` once: opening then costs the same for any number of modules.

        Args:
            model: any module.
            deadline: see `Prepared.open`.
            prompt: see `Prepared.open`.
            max_bytes: see `prepare`.

        Raises:
            SelectionError, HookError, HookTypeError, ValueError: as `prepare` and `Prepared.open`.
        """
        prepared = self.prepare(model, max_bytes=max_bytes)
        try:
            request = prepared.open(deadline=deadline, prompt=prompt)
            prepared._close_with(request)
        except BaseException:
            prepared.close()
            raise
        return request

    def to_json(self) -> str:
        """Writes the plan as JSON, with tensors inline and dictionaries by name, for `from_json`.

        Raises:
            HookTypeError: a Python function, typed hook, detector, class or predicate in it, or a
                tensor of a dtype other than float16, bfloat16, float32 and float64 or that requires
                grad; names the entry.
            ValueError: NaN or an infinity, or a dictionary without a name; names the entry.

        Examples:
            >>> fh.Plan(fh.on("layers.5", fh.Scale(2), at="generated")).to_json()
            '{"version": 1, "entries": [{"type": "on", "what": "layers.5",
            "at": "generated", "hook": {"type": "Scale", "factor": 2.0},
            "phase": "forward"}]}'
        """
        return written(self.entries)

    @classmethod
    def from_json(  # noqa: PLR0913 (limits)
        cls,
        text: str | bytes | Mapping[str, Any],
        tensors: Mapping[str, Tensor] | str | os.PathLike[str] | None = None,
        *,
        dictionaries: Mapping[str, Dictionary] | None = None,
        regex: bool = False,
        max_text: int = JsonLimits().max_text,
        max_entries: int = JsonLimits().max_entries,
        max_selectors: int = JsonLimits().max_selectors,
        max_bytes: int = JsonLimits().max_bytes,
    ) -> Plan:
        """Reads a plan from JSON, of an author who need not be trusted: no code of it runs.

        Args:
            text: result of `to_json`, or a dict that it was parsed into.
            tensors: tensors that the text names as `{"tensor": "name"}`: a dict, or the path of a
                safetensors file.
            dictionaries: dictionaries that the text names, by their names.
            regex: allow regexes as selectors. A hostile one may take for ever to match.
            max_text: characters of the text.
            max_entries: entries of the plan.
            max_selectors: selectors of all entries, each member of a list counted.
            max_bytes: bytes of all tensors, a named one counted at each use, and of the weights of
                all features that entries name by number.

        Raises:
            ValueError: the text is no plan, has a key twice or an unknown one, or exceeds a limit;
                names the entry, as in `entries[2].hook.vector`.
            HookTypeError: `text` or a tensor in `tensors` has the wrong type.
            OSError: the file of tensors cannot be read.
        """
        limits = JsonLimits(regex, max_text, max_entries, max_selectors, max_bytes)
        return cls(*read(text, tensors, limits, dictionaries))

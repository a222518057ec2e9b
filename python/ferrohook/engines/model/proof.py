"""Proof that plans do in an engine's modules, under its settings, the same as in eager mode.

Modules share requests, each changed at a separate position: the first module to run at the last
position, and so on. A change only reaches later modules, at its position and after it, so the
checked row of a module depends on no other module's change.
"""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeAlias

import torch

from ferrohook.effects.interventions import Add, Scale
from ferrohook.errors import HookError, HookTypeError
from ferrohook.gates.conditions import above
from ferrohook.gates.readings import Dot, Norm
from ferrohook.plans import Plan
from ferrohook.plans.entries import gate, keep, on

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from ferrohook.engines.model.modules import ModuleTable, Outcomes
    from ferrohook.plans.entries import Entry

_MOST_MODULES: Final = 80
"""Modules of one request: up to three entries each, and a plan of JSON has at most 256."""
_MOST_NUMBERS: Final = 2**21
"""Numbers of the vectors of one plan, whose JSON has at most 2**24 characters."""
_MOST_SPLITS: Final = 32
"""Requests that are split in two to find the module at which they fail."""
_FAR: Final = 0.25
"""Share of the distance to the nearest wrong row from which a row is wrong."""
_NOISE: Final = 2**-5
"""Share of a row's length that rounding in other kernels may change."""
_ALMOST: Final = 4 * _NOISE
"""Share of a row's length up to which a gate cannot tell two rows apart."""
_SILENT: Final = "its hook never ran"
_INFINITE: Final = "its rows, or the squares of their numbers, have NaN or infinities"
_END: Final = "end"
_NEW: Final = "new"
"""Labels of captures of the last module, and of the row of the first new token."""


class Served(NamedTuple):
    """Answer to a request of the proof."""

    ranks: Sequence[Mapping[str, Tensor]]
    """Captured rows of each rank; values whose hook did not run are missing."""
    tokens: Sequence[int]
    error: str | None = None
    """Reason of its failure."""


class Serve(Protocol):
    """Serves a request of the proof."""

    def __call__(self, plan: Plan, *, eagerly: bool, again: bool) -> Served:
        """Serves a plan on a prompt of the proof's length, with two new tokens.

        Args:
            plan: the plan.
            eagerly: in one piece, without graphs and compiled code; else under the engine's own
                settings, in chunks.
            again: on another prompt, for modules at which the first one came out wrong.
        """
        ...


@dataclasses.dataclass(frozen=True)
class _Point:
    """Module with the position at which it is changed."""

    name: str
    index: Any
    """The `output_index` of its tensor; None for the one that an entry without it means."""
    position: int
    width: int
    row_bytes: int

    @property
    def kept(self) -> Entry:
        """Capture of the rows before and at its position."""
        return keep(self.name, at=self.at, **self.options)

    @property
    def at(self) -> slice:
        """Its position and the one before."""
        return slice(self.position - 1, self.position + 1)

    @property
    def options(self) -> Any:
        """Options of an entry that name its tensor."""
        return {} if self.index is None else {"output_index": self.index}


class _EagerRows(NamedTuple):
    """Rows of a module in an eager, unchanged request."""

    plain: Tensor
    """Rows before and at the point's position, in float32."""
    end: Tensor
    """Row of the last module at the point's position."""
    width: int
    """Width of its vectors; a row may have several, one for each head, say."""
    dtype: torch.dtype

    @property
    def before(self) -> Tensor:
        """The row before the point's position."""
        return self.plain[0]

    @property
    def here(self) -> Tensor:
        """The row at the point's position."""
        return self.plain[1]

    @property
    def vector(self) -> Tensor:
        """A vector that is long next to the rows."""
        size = self.plain.abs().mean().item()
        return (size or 1.0) * torch.linspace(-4, 4, self.width, device="cpu")

    @property
    def changed(self) -> Tensor:
        """The row at the point's position, with the vector added."""
        vectors = self.here.reshape(-1, self.width)
        return (vectors + self.vector.to(self.dtype).float()).flatten()


_Form: TypeAlias = "Callable[[Proof, Sequence[_Point]], dict[_Point, dict[str, str | None]]]"


class Proof:
    """Proof of the modules that plans may name.

    Args:
        modules: the modules.
        most: most tokens of a prompt.
        capture_bytes: most bytes that a request may capture.
    """

    def __init__(self, modules: ModuleTable, most: int, capture_bytes: int) -> None:
        self._capture_bytes = capture_bytes
        self._points = _points(modules)
        self.length = min(most, _MOST_MODULES + 2, len(self._points) + 2)
        """Tokens of the prompt: one for each module, and two before them."""
        self._again = False
        self._known: dict[_Point, _EagerRows] = {}
        self._rounding = 0.0
        """Distance of the last module's rows in unchanged requests, eagerly and not."""
        self._splits = 0

    def outcomes(self, serve: Serve) -> dict[str, dict[str, str | None]]:
        """Serves the requests; returns `Outcomes`.

        Raises:
            HookError: no prompt is long enough.
        """
        self._serve = serve
        found = self._proved(self._points)
        # Rounding may send a row to other experts, say; a real fault shows at other tokens too.
        wrong = [point for point in self._points if any(found[point.name].values())]
        self._again = True
        for name, again in self._proved(wrong).items():
            found[name] = {form: again[form] and reason for form, reason in found[name].items()}
        return found

    def _proved(self, points: Sequence[_Point]) -> dict[str, dict[str, str | None]]:
        """Serves the requests for some modules; returns `Outcomes`."""
        self._known = {}
        found: dict[str, dict[str, str | None]] = {}
        for group in self._groups(points):
            own: dict[_Point, dict[str, str | None]] = {point: {} for point in group}
            for form in (_captures, _changes, _gates):
                # Unknown rows, and ints such as ids, are not changed: their capture decides.
                able = [it for it in group if form is _captures or it in self._known]
                for point, outcome in self._tried(form, able).items():
                    own[point] |= outcome
            for point, outcome in own.items():
                missing = outcome["capture"]
                found[point.name] = {form: outcome.get(form, missing) for form in FORMS}
        return found

    def _groups(self, waiting: Sequence[_Point]) -> Iterator[list[_Point]]:
        """Splits modules into groups that share a request, and gives each its position."""
        end = self._points[-1].row_bytes if waiting else 0
        while waiting:
            group: list[_Point] = []
            size = numbers = 0
            # The row before the last position is not the first one, which attends to nothing else.
            for point in waiting[: min(_MOST_MODULES, self.length - 2)]:
                size += 3 * point.row_bytes + end
                numbers += point.width
                if group and (size > self._capture_bytes or numbers > _MOST_NUMBERS):
                    break
                position = self.length - 1 - len(group)
                group.append(dataclasses.replace(point, position=position))
            if not group:
                msg = f"a prompt of {self.length} tokens is too short to test a module"
                raise HookError(msg)
            waiting = waiting[len(group) :]
            yield group

    def _tried(self, form: _Form, group: Sequence[_Point]) -> dict[_Point, dict[str, str | None]]:
        """Returns what came of a form of plan; splits a request that fails as a whole."""
        if not group:
            return {}
        try:
            return form(self, group)
        except _FailedError as error:
            if len(group) == 1 or self._splits == _MOST_SPLITS:
                return {point: dict.fromkeys(_OF[form], str(error)) for point in group}
        self._splits += 1
        half = len(group) // 2
        return self._tried(form, group[:half]) | self._tried(form, group[half:])

    def both(self, entries: Sequence[Entry], group: Sequence[_Point]) -> tuple[Served, Served]:
        """Serves a plan eagerly, and under the engine's own settings.

        Raises:
            _FailedError: the request failed.
        """
        low, high = group[-1].position, group[0].position
        last = self._points[-1]
        end = keep(last.name, label=_END, at=slice(low, high + 1), **last.options)
        plan = Plan(*entries, end)
        return self._served(plan, eagerly=True), self._served(plan, eagerly=False)

    def _served(self, plan: Plan, *, eagerly: bool) -> Served:
        try:
            served = self._serve(plan, eagerly=eagerly, again=self._again)
        except (HookError, HookTypeError, ValueError) as error:  # refused before it is scheduled
            raise _FailedError(str(error)) from error
        if served.error is not None:
            raise _FailedError(served.error)
        return served

    def end(self, rows: Mapping[str, Tensor], point: _Point, group: Sequence[_Point]) -> Any:
        """Returns the row of the last module at a position; None if it was not captured."""
        found = rows.get(f"{_END}:{self._points[-1].name}")
        return None if found is None else _flat(found)[point.position - group[-1].position]

    def note_rounding(self, got: Tensor, right: Tensor) -> None:
        """Notes rows of the last module in an unchanged request; see `reaches`."""
        off = (got - right).norm()
        if off <= _FAR * right.norm():
            self._rounding = max(self._rounding, off.item())

    def reaches(self, got: Tensor | None, right: Tensor, plain: Tensor) -> str | None:
        """Returns why a change of a module does not reach the end of the model; None if it does.

        Args:
            got: row of the last module; None if its hook did not run.
            right: the same, served eagerly.
            plain: the same, without the change.
        """
        if got is None:
            return f"its effect is unknown, because the hook of {self._points[-1].name!r} never ran"
        return _reaches(got, right, plain, self._rounding)

    def note(self, point: _Point, known: _EagerRows) -> None:
        """Notes the rows of a module in an unchanged request."""
        self._known[point] = known

    def known(self, point: _Point) -> _EagerRows:
        """Returns what `note` noted."""
        return self._known[point]


class _FailedError(Exception):
    """A request failed, perhaps by one of its modules."""


def _points(modules: ModuleTable) -> list[_Point]:
    """Returns the modules with a tensor that plans may name, in the order of their ends."""
    found = []
    ran = sorted(modules.table.items(), key=lambda each: each[1].end)
    for name, info in ran:
        if not name or info.refused is not None:
            continue
        index, size = None, (info.width, info.row_bytes)
        if info.kind == "other":
            index = next((at for at, it in enumerate(info.outputs) if it is not None), None)
            if index is None:
                continue
            size = info.part(name, index)
        found.append(_Point(name, index, 0, *size))
    return found


def _captures(proof: Proof, group: Sequence[_Point]) -> dict[_Point, dict[str, str | None]]:
    """Checks captured rows of an unchanged prompt, and of a step with a new token."""
    entries = [point.kept for point in group]
    entries += [keep(it.name, label=_NEW, at=proof.length, **it.options) for it in group]
    eager, own = proof.both(entries, group)
    same = eager.tokens[0] == own.tokens[0]
    found: dict[_Point, dict[str, str | None]] = {}
    for point in group:
        rows = eager.ranks[0].get(point.name)
        end = proof.end(eager.ranks[0], point, group)
        if rows is None or end is None:
            found[point] = {"capture": f"{_SILENT}, eagerly too"}
            continue
        known = _EagerRows(_flat(rows), end, rows.shape[-1], rows.dtype)
        if not known.plain.square().sum().isfinite():  # neither a vector nor a direction
            found[point] = {"capture": _INFINITE}
            continue
        if rows.dtype.is_floating_point:
            proof.note(point, known)
        for taken in own.ranks:
            if (reached := proof.end(taken, point, group)) is not None:
                proof.note_rounding(reached, end)
        reasons = [differing(it.get(point.name), known.plain) for it in own.ranks]
        new = f"{_NEW}:{point.name}"
        if same and new in eager.ranks[0]:
            row = _flat(eager.ranks[0][new])
            reasons += [differing(it.get(new), row, known.plain) for it in own.ranks]
        found[point] = {"capture": _first(reasons)}
    return found


def _changes(proof: Proof, group: Sequence[_Point]) -> dict[_Point, dict[str, str | None]]:
    """Checks the rows of a prompt with a vector added at the position of each module."""
    entries: list[Entry] = [
        on(it.name, Add(proof.known(it).vector, **it.options), at=it.position) for it in group
    ]
    eager, own = proof.both([*entries, *(point.kept for point in group)], group)
    found = {}
    for point in group:
        known = proof.known(point)
        right = torch.stack([known.before, known.changed])
        wrong = known.plain
        end = proof.end(eager.ranks[0], point, group)
        steer, positions = [], []
        for of, served in ((" eagerly too", eager), ("", own)):
            for rows in served.ranks:
                got = rows.get(point.name)
                got = None if got is None else _flat(got)
                here = None if got is None else got[1:]
                before = None if got is None else got[:1]
                steer.append(_with(of, differing(here, right[1:], wrong)))
                positions.append(_with(of, differing(before, right[:1], right[1:])))
                reached = proof.end(rows, point, group)
                if steer[-1] is None and served is own:
                    steer.append(proof.reaches(reached, end, known.end))
        found[point] = {"steer": _first(steer), "positions": _first(positions)}
    return found


def _gates(proof: Proof, group: Sequence[_Point]) -> dict[_Point, dict[str, str | None]]:
    """Checks rows that are negated where a gate at the same module is high."""
    entries: list[Entry] = []
    expected = {}
    for number, point in enumerate(group):
        known = proof.known(point)
        before, here = known.before, known.here
        direction = here - before
        at: Any = point.at
        options, name = point.options, f"g{number}"
        if known.width == len(here) and direction.norm() > _ALMOST * here.norm():
            threshold = ((direction @ before + direction @ here) / 2).item()
            reading: Any = Dot(direction)
            expected[point] = torch.stack([before, -here])
        else:
            # True at both rows; the other is the one that the next module is checked at.
            reading, threshold, at = Norm(), -1.0, point.position
            expected[point] = torch.stack([before, -here])
        change = Scale(-1.0, **options)
        entries += [
            gate(name, point.name, reading, at=at, **options),
            on(point.name, change, at=at, when=above(name, threshold)),
        ]
    eager, own = proof.both([*entries, *(point.kept for point in group)], group)
    found = {}
    for point in group:
        known, right = proof.known(point), expected[point]
        wrong = torch.cat([known.plain, -known.plain])
        found[point] = {
            "gates": _first(
                _with(of, differing(rows.get(point.name), right, wrong))
                for of, served in ((" eagerly too", eager), ("", own))
                for rows in served.ranks
            )
        }
    return found


_OF: Final[dict[Any, tuple[str, ...]]] = {
    _captures: ("capture",),
    _changes: ("steer", "positions"),
    _gates: ("gates",),
}
"""Forms that a request of the proof is for."""
FORMS: Final = tuple(form for forms in _OF.values() for form in forms)
"""Forms of plans: captures, changes, changes at positions, and gates."""


def _flat(rows: Tensor) -> Tensor:
    return rows.flatten(1).float()


def _first(reasons: Any) -> str | None:
    return next(filter(None, reasons), None)


def _with(of: str, reason: str | None) -> str | None:
    return reason and f"{reason}{of and ','}{of}"


def differing(got: Tensor | None, right: Tensor, wrong: Tensor | None = None) -> str | None:
    """Returns how rows differ from the right ones; None if they do not.

    Args:
        got: the rows, perhaps more of them; None if the hook did not run.
        right: the right ones.
        wrong: rows that would be wrong.
    """
    if got is None:
        return _SILENT
    got, right = _flat(got)[: len(right)], _flat(right)
    if got.shape != right.shape:
        return f"it has {len(got)} rows for {len(right)} positions"
    own = (got - right).norm(dim=1)
    length = right.norm(dim=1)
    others = torch.cat([right] if wrong is None else [right, _flat(wrong)])
    apart = torch.cdist(right, others, compute_mode="donot_use_mm_for_euclid_dist")
    apart = apart.masked_fill(apart <= _NOISE * length[:, None], torch.inf).amin(1)
    most = torch.maximum(_FAR * torch.minimum(apart, length), _NOISE * length)
    if (own <= most).all():  # NaN is not
        return None
    return f"a row differs by {(own / length).max().item():.2g} of its length"


def _reaches(got: Tensor, right: Tensor, plain: Tensor, rounding: float) -> str | None:
    """Returns how far a row is off the right one; see `Proof.reaches`."""
    effect = (right - plain).norm()
    off = (got - right).norm()
    # Another choice of experts, say, is no error of a plan.
    if off <= max(_FAR * effect.item(), _NOISE * right.norm().item(), 2 * rounding):
        return None
    return f"the model's last row is off by {(off / effect).item():.2g} of the change's effect"


def shown(outcomes: Outcomes) -> str:
    """Returns the outcomes as a table of Markdown, with one row for alike modules of all layers."""
    kinds: dict[str, list[Mapping[str, str | None]]] = {}
    for name, outcome in outcomes.items():
        kinds.setdefault(re.sub(r"\d+", "*", name), []).append(outcome)
    lines = [["module", *FORMS], ["---"] * (1 + len(FORMS))]
    lines += [
        [f"`{kind}`", *(_cell([each[form] for each in of]) for form in FORMS)]
        for kind, of in kinds.items()
    ]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _cell(reasons: Sequence[str | None]) -> str:
    """Returns how many modules were right, and a reason of the others."""
    wrong = [reason for reason in reasons if reason is not None]
    count = f"{len(reasons) - len(wrong)} of {len(reasons)}"
    return f"{count}: {wrong[0]}" if wrong else count

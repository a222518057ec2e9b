"""Descriptions of random batches: plain data, drawn from a seed."""

from __future__ import annotations

import dataclasses
import functools
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

WIDTH = 4
"""Last dimension of all tensors."""
LAYERS = ("a", "b", "c", "head")
SITES = ("a", "head")
MOST_TOKENS = 9
"""Tokens of a request."""

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
ODD = (
    *(torch.int64, torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn),
    *(torch.complex64, torch.complex128),
)

ATS: dict[str, tuple[Any, Any]] = {
    # Positions as a plan has them, and as a function of (position, length of the prompt).
    "prompt": ("prompt", lambda p, n: p < n),
    "last_prompt": ("last_prompt", lambda p, n: p == n - 1),
    "generated": ("generated", lambda p, n: p >= n),
    "first": (0, lambda p, n: p == 0),
    "int": (4, lambda p, n: p == 4),
    "last but one": (-2, lambda p, n: p == n - 2),
    "slice": (slice(1, 4), lambda p, n: 1 <= p < 4),
    "huge slice": (slice(1, 2**42, 2), lambda p, n: p % 2 == 1),
    "from the end": (slice(-2, None), lambda p, n: p >= max(n - 2, 0)),
    "steps": (slice(None, None, 2), lambda p, n: p % 2 == 0),
    "function": (lambda positions: positions % 3 == 1, lambda p, n: p % 3 == 1),
    # Padding is -1, and never chosen.
    "padding": (lambda positions: positions < 2, lambda p, n: p < 2),
    "huge": (2**70, lambda p, n: False),
    "far from the end": (-(2**70), lambda p, n: False),
}


def _fails(_positions: Any) -> Any:
    msg = "on purpose"
    raise ValueError(msg)


FAILING: dict[str, Any] = {
    "raises": _fails,
    "wrong shape": lambda positions: positions[..., None] < 2,
    "wrong dtype": lambda positions: positions,
    "wrong type": lambda positions: [True],
}
"""Functions of positions that fail their request."""


def at_of(name: str | None) -> Any:
    """Positions as a plan has them."""
    return None if name is None else FAILING.get(name) or ATS[name][0]


COMPLEX = 4
"""Seed of a hook with a complex vector."""
NOT_FINITE = 6
"""First seed of those with infinite or NaN values."""
NATIVE = ("add", "scale", "ablate", "clamp", "replace", "zero", "feature")
PLAIN = ("times", "mix", "observe", "write")
BAD = ("shape", "dtype", "sparse", "raise")
"""Functions whose result or exception fails the request."""

ALL, BATCH = "all", "batch"
"""Owners of hooks that see the whole batch: everybody, and the batch as a scope."""


@dataclass(frozen=True)
class When:
    """Condition on a gate."""

    gate: str
    bound: float
    above: bool = True
    negated: bool = False


@dataclass(frozen=True)
class Hook:
    """A hook on a module.

    Its kind is a native one (`NATIVE`), a function (`PLAIN`, `BAD`, `"interrupt"`), or a typed one:
    `"typed"` doubles the input, `"typed observe"` watches the output.
    """

    what: str
    phase: str
    kind: str
    seed: int = 0
    priority: int = 0
    prepend: bool = False
    at: str | None = None
    part: Any = None
    does: tuple[Event, ...] = ()
    """Events at its first invocation."""
    strength: float | None = None
    """Share of the change that is made."""
    when: When | None = None


@dataclass(frozen=True)
class Gate:
    """A gate of a plan, which reads one element of each token's vector."""

    name: str
    what: str
    phase: str
    element: int
    at: str | None = None
    over: str = "token"
    by: str = "max"
    part: Any = None
    feature: bool = False
    """True if it reads the element's positive part, as a feature of a dictionary."""

    kind = "gate"
    prepend = False
    priority = 0
    does = ()


@dataclass(frozen=True)
class Keep:
    """A capture of a module."""

    what: str
    inputs: bool = False
    calls: Any = "last"
    at: str | None = None
    part: Any = None
    cut: Any = None
    copy: str = "checked"


@dataclass(frozen=True)
class Event:
    """Something that happens to a member, or to those hooks that see the whole batch."""

    kind: str
    """`close`, `fail`, `expire`, `register` or `remove` (what `register` added last)."""
    whose: int | str
    hook: Hook | None = None
    thread: bool = False
    """True on a thread that is joined at once."""


@dataclass(frozen=True)
class Member:
    """Hooks of a request, scope or capture."""

    entries: tuple[Hook | Gate | Keep, ...]
    way: str = "plan"
    twin: int | None = None
    """The member whose plan it shares."""
    prompt: int = 1
    """Length of its prompt."""


@dataclass(frozen=True)
class Call:
    """A call of the model."""

    rows: int
    """Rows of its tensors: the batch's, or others."""
    seed: int
    before: tuple[Event, ...] = ()
    during: tuple[int, Event] | None = None
    """An event at an operation of torch's in the call, by number."""
    moved: tuple[Any, ...] | None = None
    """Positions that the batch moves to."""
    way: str = "before"
    """Time of the move: `before` the call, in a `hook` on the model, or on a `thread`."""
    told: bool = False
    """Moves with the lengths of the prompts, which the requests remember."""
    wrong: str | None = None
    """A move before it that is refused."""
    strays: bool = False
    """Batches that do not run move before it."""


@dataclass(frozen=True)
class Step:
    """A batch and its calls, or calls in nested requests."""

    size: int
    rows: dict[int, tuple[int, ...]]
    forms: dict[int, str]
    sized: bool = True
    positions: tuple[Any, ...] | None = None
    late: str | None = None
    """Time when `move` sets the first positions, `made` or `entered`; None if `fh.batch` does."""
    gathered: tuple[int, ...] | None = None
    form: str = "tensor"
    """Form in which `gathered` is passed: `tensor`, `callable`.

    Or a function whose index is wrong: `far` has a row that the batch has not, `long` one too many.
    """
    flat: bool = False
    """True if the gathered tensor has its rows in dimension 0, though the batch has not."""
    nested: bool = False
    outer: int | None = None
    """A request that is entered around the batch."""
    before: tuple[Event, ...] = ()
    made: tuple[Event, ...] = ()
    """Events between making and entering."""
    calls: tuple[Call, ...] = ()
    knock: str | None = None
    """A call of `fh.batch` before it that is refused."""
    interrupt: int | None = None
    """Python function at whose start an interrupt comes while the batch is made and entered."""


@dataclass(frozen=True)
class Case:
    """Members on a model, and the steps that they take."""

    seed: int
    dtype: torch.dtype = torch.float32
    dim: int = 0
    columns: int = 0
    """Columns of padded tensors; 0 for tensors of tokens."""
    in_place: bool = False
    """Module `c` writes its input."""
    alias: bool = False
    """Module `c` returns its input."""
    grads: bool = False
    sites: bool = False
    table: int = 0
    """Rows of an unowned tensor in the output of module `b`, or a few more; 0 for none."""
    asks: bool = False
    """Positions are the model call's."""
    readers: int = 0
    """Threads that read the captures of all members while each step runs."""
    whole: tuple[Hook, ...] = ()
    """Hooks of everybody."""
    members: tuple[Member, ...] = ()
    steps: tuple[Step, ...] = ()

    def sized(self, step: Step) -> bool:
        """True if a batch is made with its size, or finds none in a call of a request's model."""
        members = [self.members[each] for each in step.rows]
        counted = any(form in {"negative", "open"} for form in step.forms.values())
        named = all(each.way == "plan" and each.entries for each in members)
        known = step.sized or counted or not named or self.sites
        return (step.positions is None or step.late is not None) and known

    def __str__(self) -> str:
        lines = [
            f"seed {self.seed}: {self.dtype}, "
            + ", ".join(
                f"{each.name}={getattr(self, each.name)}"
                for each in dataclasses.fields(self)
                if each.name in _SHOWN and getattr(self, each.name) != each.default
            )
        ]
        lines += [f"  everybody: {shown(hook)}" for hook in self.whole]
        lines += [f"  member {number}: {shown(each)}" for number, each in enumerate(self.members)]
        lines += [f"  step {number}: {shown(each)}" for number, each in enumerate(self.steps)]
        return "\n".join(lines)


_SHOWN = ("dim", "columns", "in_place", "alias", "grads", "sites", "table", "asks", "readers")


def shown(value: Any) -> str:
    """Formats a description without default values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [
            f"{each.name}={shown(getattr(value, each.name))}"
            for each in dataclasses.fields(value)
            if getattr(value, each.name) != each.default
        ]
        return f"{type(value).__name__}({', '.join(fields)})"
    if isinstance(value, tuple):
        return "(" + ", ".join(map(shown, value)) + ("," if len(value) == 1 else "") + ")"
    return repr(value)


MOVES = ("float positions", "short positions", "no tensor", "float lengths")
"""Moves that are refused."""
KNOCKS = (
    "huge steps",
    "overlap",
    "out of range",
    "negative dim",
    "float positions",
    "short positions",
    "float gathered",
    "flat gathered",
    "far gathered",
    "nobody",
    "lengths alone",
)


Tokens: TypeAlias = "tuple[int, dict[int, tuple[int, ...]], dict[int, str], tuple[Any, ...]]"
"""Number of rows, rows of each member, their forms, and their positions."""


@dataclass
class Dice:
    """Draws a case."""

    seed: int
    random: random.Random = field(init=False)
    done: dict[int, int] = field(default_factory=dict)
    """Tokens of each member so far."""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)  # noqa: S311 (draws tests)
        # Kernels differ in whether infinity times a zero of an encoder is NaN.
        self.features = self.some(0.5)

    def some(self, chance: float) -> bool:
        return self.random.random() < chance

    def case(self) -> Case:
        pick = self.random
        sites = self.some(0.12)
        quiet = self.some(0.35)
        """No event: batches of the same members, which remember."""
        dtype = pick.choice(FLOATS) if sites or self.some(0.75) else pick.choice(ODD)
        form = "tokens" if sites else pick.choice(("tokens", "tokens", "tokens", "padded", "asks"))
        dim = pick.choice((0, 0, 1)) if form == "tokens" else 0
        case = Case(
            self.seed,
            dtype=torch.float32 if sites else dtype,
            dim=dim,
            columns=0 if form == "tokens" else pick.randint(2, 3),
            in_place=self.some(0.15) and dtype in FLOATS and not sites,
            alias=self.some(0.2) and not sites,
            sites=sites,
            table=pick.randint(1, 6) if not sites and self.some(0.4) else 0,
            asks=form == "asks",
        )
        if case.in_place:
            case = dataclasses.replace(case, alias=False)
        positioned = form != "asks" and self.some(0.4)
        case = dataclasses.replace(case, members=self.members(case, positioned, quiet))
        if not sites:
            whole = tuple(self.hook(case, ALL, quiet) for _ in range(pick.choice((0, 0, 0, 1, 2))))
            case = dataclasses.replace(case, whole=whole)
        steps: list[Step] = []
        for _ in range(pick.choice((1, 2, 3, 3, 4))):
            steps.append(self.step(case, positioned, quiet, steps))
        grads = (
            dtype in FLOATS[:2]
            and not (case.in_place or case.sites)
            and not any(each.kind == "interrupt" for each in hooks_of(case, steps))
            and self.some(0.3)
        )
        readers = pick.choice((0, 0, 1, 2))
        return dataclasses.replace(case, grads=grads, steps=tuple(steps), readers=readers)

    def members(self, case: Case, positioned: bool, quiet: bool) -> tuple[Member, ...]:
        pick = self.random
        members: list[Member] = []
        for number in range(pick.choice((1, 2, 2, 3, 3, 4))):
            plans = [
                at for at, each in enumerate(members) if each.way == "plan" and each.twin is None
            ]
            prompt = pick.randint(1, 4)
            if plans and self.some(0.25):
                twin = pick.choice(plans)
                members.append(Member(members[twin].entries, "plan", twin, prompt))
                continue
            way = "plan" if case.sites else pick.choice(("plan",) * 6 + ("scope", "capture"))
            at = way == "plan" and (positioned or case.asks)
            if way == "capture":
                members.append(Member((self.keep(case, False, positioned),), way, None, prompt))
                continue
            entries: list[Hook | Gate | Keep] = []
            if at and case.dtype in FLOATS and not case.sites and self.some(0.5):
                entries += [self.gate(case, f"g{it}") for it in range(pick.choice((1, 1, 2)))]
            gates = [entry.name for entry in entries if isinstance(entry, Gate)]
            for _ in range(pick.choice((1, 2, 3) if gates else (0, 1, 1, 2, 3))):
                hook = self.hook(case, number, quiet, at=at, plan=way == "plan")
                entries.append(self.gated(hook, gates) if gates else hook)
            if way == "plan":
                kept: dict[tuple[str, bool], Keep] = {}
                for _ in range(pick.choice((0, 1, 1, 2))):
                    keep = self.keep(case, at, positioned)
                    kept[keep.what, keep.inputs] = keep
                entries += kept.values()
            if case.sites:  # at one set of positions for each site
                ats = {each.what: each.at for each in entries if isinstance(each, Hook)}
                entries = [
                    dataclasses.replace(each, at=ats[each.what]) if isinstance(each, Hook) else each
                    for each in entries
                ]
            members.append(Member(tuple(entries), way, None, prompt))
        return tuple(members)

    def at(self, case: Case) -> str:
        """Name of positions; of a function that fails where that is a request's own failure."""
        if not case.asks and self.some(0.08):
            return self.random.choice([*FAILING])
        return self.random.choice([*ATS])

    def keep(self, case: Case, at: bool, positioned: bool) -> Keep:
        pick = self.random
        what = pick.choice(SITES if case.sites else LAYERS)
        inputs = not case.sites and self.some(0.25)
        tokens = positioned or case.asks
        parts: tuple[Any, ...] = (0, 1)
        if case.table and not tokens:
            parts = (0, 1, 2, None, None)
        part = pick.choice(parts) if what == "b" and not inputs else None
        whole = what == "b" and not inputs and part is None
        return Keep(
            what,
            inputs,
            calls="last" if tokens or case.sites else pick.choice(("last", "last", "all", 2)),
            at=self.at(case) if at and self.some(0.5) else None,
            part=part,
            cut=None
            if case.sites or whole or self.some(0.8)
            else pick.choice(((..., slice(0, 2)), (..., 1))),
            copy="checked" if case.sites else pick.choice(("checked", "checked", "clone")),
        )

    def hook(  # noqa: PLR0913 (the last three by keyword)
        self,
        case: Case,
        owner: int | str,
        quiet: bool,
        *,
        at: bool = False,
        plan: bool = False,
        deep: int = 0,
    ) -> Hook:
        pick = self.random
        if case.sites:
            hook = Hook(pick.choice(SITES), "forward", "add", pick.randint(0, 7))
            return dataclasses.replace(hook, at=self.at(case) if at and self.some(0.5) else None)
        what = pick.choice(LAYERS)
        phase = pick.choice(("forward_pre", "forward", "forward"))
        whole = owner in {ALL, BATCH}
        kinds: tuple[str, ...] = (*NATIVE[: None if self.features else -1], *PLAIN)
        if whole:
            kinds = ("times", "observe", "scale", "add") if case.dtype in FLOATS else PLAIN[2:3]
        if not whole:
            kinds += ("typed" if phase == "forward_pre" else "typed observe",)
        if not whole and not quiet:
            kinds += ("raise", pick.choice(BAD))
        kind = pick.choice(kinds)
        if not whole and not quiet and deep == 0 and self.some(0.04):
            kind = "interrupt"
        if kind == "write" and case.dtype is torch.float8_e4m3fn:
            kind = "times"
        chosen = self.at(case) if at and self.some(0.4) else None
        if (
            chosen is not None and kind not in NATIVE and (kind, phase) != ("times", "forward")
        ) or (what == "b" and kind == "times"):
            chosen = None
        if chosen is not None and kind == "scale":
            kind = "add"
        does: tuple[Event, ...] = ()
        acts = not quiet and deep < 2 and kind in {"times", "observe"} and chosen is None
        if acts and self.some(0.3):
            does = (self.event(case, quiet, deep=deep + 1),)
        part = (
            pick.choice((0, 1)) if what == "b" and phase == "forward" and kind in NATIVE else None
        )
        partial = plan and case.dtype in FLOATS and not does and self.some(0.25)
        tensor = kind == "times" and phase == "forward" and what != "b"
        partial = partial and (kind in NATIVE or tensor)
        # Everybody's is never refused: a complex vector would be, on real values.
        finite = NOT_FINITE if self.features else 8
        seeds = [seed for seed in range(finite) if not whole or seed != COMPLEX]
        return Hook(
            what,
            phase,
            kind,
            pick.choice(seeds),
            pick.choice((0, 0, 0, 2, -1)),
            self.some(0.2),
            chosen,
            part,
            does,
            pick.choice((0.0, 0.25, 0.5, 1.0, -0.5)) if partial else None,
        )

    def gate(self, case: Case, name: str) -> Gate:
        pick = self.random
        what = pick.choice(("a", "a", "b", "c"))
        phase = pick.choice(("forward_pre", "forward", "forward"))
        return Gate(
            name,
            what,
            phase,
            pick.randrange(WIDTH),
            self.at(case) if self.some(0.3) else None,
            pick.choice(("token", "token", "so_far", "prompt", "window")),
            pick.choice(("max", "min", "last")),
            pick.choice((0, 1)) if what == "b" and phase == "forward" else None,
            self.features and self.some(0.5),
        )

    def gated(self, hook: Hook, gates: list[str]) -> Hook:
        """A hook that depends on a gate, if it can; most of these run after their gate."""
        pick = self.random
        hook = dataclasses.replace(hook, prepend=False)  # a gate runs ahead of its plan's hooks
        plain = hook.kind == "times" and (hook.what, hook.phase) != ("b", "forward")
        if hook.does or not (hook.kind in NATIVE or (plain and hook.phase == "forward")):
            return hook
        if self.some(0.2):
            return hook
        when = When(pick.choice(gates), pick.choice((-1.0, 0.0, 1.0, 4.0)))
        return dataclasses.replace(
            hook,
            what=pick.choice(("c", "head", hook.what)) if hook.part is None else hook.what,
            when=dataclasses.replace(when, above=self.some(0.5), negated=self.some(0.2)),
        )

    def event(self, case: Case, quiet: bool, *, deep: int = 0, whole: bool = True) -> Event:
        pick = self.random
        owners = [*range(len(case.members) or 3)]
        if not whole:
            kind = "register"
        else:
            kind = pick.choice(("close", "fail", "expire", "register", "register", "remove"))
        whose: int | str = pick.choice(owners)
        hook = None
        if kind in {"register", "remove"} and whole and self.some(0.25):
            whose = pick.choice((ALL, BATCH))
        if kind == "register":
            hook = self.hook(case, whose, quiet, deep=deep + 1)
        return Event(kind, whose, hook, self.some(0.3))

    def events(self, case: Case, chance: float) -> tuple[Event, ...]:
        return tuple(self.event(case, False) for _ in range(2) if self.some(chance))

    def step(self, case: Case, positioned: bool, quiet: bool, steps: list[Step]) -> Step:
        pick = self.random
        events = 0.0 if quiet or case.sites else 0.25
        plans = [at for at, each in enumerate(case.members) if each.way == "plan"]
        again = next((each for each in reversed(steps) if not each.nested), None)
        tame = case.dtype in FLOATS and not any(
            each.kind in {*BAD, "interrupt"} for each in hooks_of(case)
        )
        if tame and not positioned and not case.sites and len(plans) > 1 and self.some(0.12):
            order = pick.sample(plans, pick.randint(1, min(3, len(plans))))
            size = pick.randint(5, 8)
            return Step(
                size,
                dict.fromkeys(order, ()),
                {},
                nested=True,
                before=self.events(case, events),
                calls=self.calls(case, size, events, quiet, nested=True),
            )
        if again is not None and not positioned and self.some(0.6):
            # The same members and rows, which are remembered, with other `gathered` or sizes.
            size, rows, forms = again.size, again.rows, again.forms
            if self.some(0.15) and len(rows) > 1:
                names = [*rows]
                rows = dict(zip(names, [*[*rows.values()][1:], rows[names[0]]], strict=True))
                forms = dict.fromkeys(rows, "list")
            positions = None
        elif positioned:
            size, rows, forms, positions = self.tokens(case)
        else:
            size = pick.randint(5, 9)
            rows, forms = self.layout(case, size)
            positions = None
        sized = not quiet or self.some(0.5)
        gathered, form, flat = None, "tensor", False
        if not case.asks and self.some(0.1 if case.sites else 0.5):
            # Several padded rows of a request have no separate positions.
            gathered = self.gathered(size, once=bool(case.columns and positioned))
            form = pick.choice(("tensor", "tensor", "callable"))
            if not case.sites and gathered and self.some(0.05):
                form = pick.choice(("far", "long"))
            flat = case.dim == 1 and self.some(0.5)
        late, moves = None, None
        if positions is not None:
            moves = functools.partial(self.moved, case, rows, positions)
            late = pick.choice(("made", "entered")) if not case.sites and self.some(0.25) else None
        outer = None
        if not positioned and not case.sites and plans and self.some(0.06):
            free = [each for each in plans if each not in rows]
            outer = pick.choice(free) if free and tame else None
        return Step(
            size,
            rows,
            forms,
            sized=sized or gathered is not None,
            positions=positions,
            late=late,
            gathered=gathered,
            form=form,
            flat=flat,
            outer=outer,
            before=self.events(case, events),
            made=self.events(case, events / 3),
            calls=self.calls(case, size, events, quiet or gathered is not None, moves=moves),
            knock=pick.choice(KNOCKS) if self.some(0.1) else None,
            interrupt=pick.randint(1, 30) if self.some(0.05) else None,
        )

    def calls(  # noqa: PLR0913 (all but the first four by keyword)
        self,
        case: Case,
        size: int,
        events: float,
        quiet: bool,
        *,
        nested: bool = False,
        moves: Callable[[], tuple[Any, ...]] | None = None,
    ) -> tuple[Call, ...]:
        pick = self.random
        made = []
        counts = (1, 1, 2) if moves is None else (1, 2, 3)
        # Sites keep one call of a batch.
        for number in range(1 if case.sites else pick.choice(counts)):
            other = not quiet and not nested and self.some(0.06)
            rows = pick.choice((size - 1, size + 1, 2 * size)) if other else size
            rows = rows + 1 if rows == WIDTH else rows
            during = None
            if events and not nested and self.some(0.1):
                during = (pick.randint(0, 12), self.event(case, quiet, deep=1, whole=False))
            made.append(
                Call(
                    rows,
                    pick.randint(0, 99),
                    self.events(case, events / 2) if number else (),
                    during,
                    moves() if moves is not None and self.some(0.8 if number else 0.2) else None,
                    pick.choice(("before", "before", "hook", "thread")),
                    self.some(0.3),
                    pick.choice(MOVES) if moves is not None and self.some(0.1) else None,
                    moves is not None and self.some(0.1),
                )
            )
        return tuple(made)

    def layout(self, case: Case, size: int) -> tuple[dict[int, tuple[int, ...]], dict[int, str]]:
        """Rows of each member, and the form in which they are handed over; the rest is padding."""
        pick = self.random
        order = [*range(size)]
        style = pick.choice(("blocks", "blocks", "scattered", "strided"))
        members = [*range(len(case.members))]
        pick.shuffle(members)
        rows: dict[int, tuple[int, ...]] = {}
        forms: dict[int, str] = {}
        if style == "strided":
            step = pick.randint(2, 3)
            for start, member in enumerate(members[: step - 1] or members):
                rows[member] = tuple(order[start::step])
                forms[member] = pick.choice(("steps", "open", "list"))
            return rows, forms
        if style == "scattered":
            pick.shuffle(order)
        cuts = sorted(pick.choices(range(size + 1), k=len(members) + 1))
        for member, start, end in zip(members, cuts, cuts[1:], strict=False):
            chosen = tuple(order[start:end])
            if not chosen and (self.some(0.8) or case.sites):
                continue
            rows[member] = chosen
            kinds = ["list", "tensor", "negative"]
            if len(chosen) == 1:
                kinds.append("int")
            if style == "blocks":
                kinds += ["slice", "slice", "range"]
            forms[member] = pick.choice(kinds) if chosen else "slice"
        if not any(rows.values()):
            return {members[0]: tuple(order[:2])}, {members[0]: "list"}
        return rows, forms

    def tokens(self, case: Case) -> Tokens:
        """A step of an engine: the next tokens of some members, or some again."""
        pick = self.random
        chunks: dict[int, range] = {}
        for member, each in enumerate(case.members):
            done = self.done.get(member, 0)
            if self.some(0.25):
                continue
            start = pick.randrange(done) if done and self.some(0.2) else done
            count = pick.randint(1, 3) if start < each.prompt else 1
            if case.columns:
                count = min(count, case.columns)
            end = min(start + count, MOST_TOKENS)
            if start < end:
                chunks[member] = range(start, end)
                self.done[member] = max(done, end)
        if not chunks:
            chunks[0] = range(1)
            self.done[0] = max(self.done.get(0, 0), 1)
        return self.padded(case, chunks) if case.columns else self.flat(chunks)

    def padded(self, case: Case, chunks: dict[int, range]) -> Tokens:
        """A row for each member, padded on one side, and padding rows."""
        pick, left = self.random, self.some(0.5)
        order: list[int | None] = [*chunks, *[None] * pick.randint(1, 3)]
        pick.shuffle(order)
        table = []
        for member in order:
            chunk = [] if member is None else [*chunks[member]]
            padding = [-pick.randint(1, 9) for _ in range(case.columns - len(chunk))]
            table.append(tuple(padding + chunk if left else chunk + padding))
        rows: dict[int, tuple[int, ...]] = {
            member: (row,) for row, member in enumerate(order) if member is not None
        }
        return len(order), rows, dict.fromkeys(rows, "list"), tuple(table)

    def flat(self, chunks: dict[int, range]) -> Tokens:
        """A row for each token, in order or not, and padding rows."""
        pick = self.random
        tokens: list[tuple[int | None, int]] = [
            (member, position) for member, chunk in chunks.items() for position in chunk
        ]
        tokens += [(None, -pick.randint(1, 9)) for _ in range(pick.randint(0, 2))]
        if self.some(0.5):
            pick.shuffle(tokens)
        found: dict[int, list[int]] = {}
        for row, (member, _) in enumerate(tokens):
            if member is not None:
                found.setdefault(member, []).append(row)
        positions = tuple(position for _, position in tokens)
        rows = {member: tuple(own) for member, own in found.items()}
        forms = {member: pick.choice(("list", "tensor")) for member in rows}
        return len(tokens), rows, forms, positions

    def moved(
        self, case: Case, rows: dict[int, tuple[int, ...]], positions: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        """Positions of the next tokens in the same rows, or of earlier ones; others are padding."""
        pick = self.random
        table = [[*each] if isinstance(each, tuple) else [each] for each in positions]
        table = [[-pick.randint(1, 9)] * len(each) for each in table]
        for member, own in rows.items():
            done = self.done.get(member, 0)
            again = done and (done == MOST_TOKENS or self.some(0.2))
            start = pick.randrange(done) if again else done
            places = [(row, column) for row in own for column in range(len(table[row]))]
            places = places if case.members[member].prompt > start else places[:1]
            for position, (row, column) in enumerate(places, start):
                if position == start or (position < MOST_TOKENS and self.some(0.9)):
                    table[row][column] = position
                    self.done[member] = max(self.done.get(member, 0), position + 1)
        return tuple(tuple(each) if case.columns else each[0] for each in table)

    def gathered(self, size: int, *, once: bool) -> tuple[int, ...]:
        """Rows that the head runs on; `once`: none of them twice."""
        pick = self.random
        styles = ("permuted", "partial", "empty", "repeated", "any")
        style = pick.choice(styles[:3] if once else styles)
        if style == "permuted":
            return tuple(pick.sample(range(size), size))
        if style == "partial":
            return tuple(pick.sample(range(size), pick.randint(1, size)))
        if style == "repeated":
            return tuple(row for row in range(size) for _ in range(2))
        if style == "empty":
            return () if self.some(0.3) else (-1, *pick.sample(range(size), 1), -2)
        return tuple(pick.randint(-1, size - 1) for _ in range(pick.randint(1, 12)))


def hooks_of(case: Case, steps: Iterable[Step] | None = None) -> list[Hook]:
    """All hooks of a case, including hooks that events register."""
    entries = (entry for member in case.members for entry in member.entries)
    found = [*case.whole, *(entry for entry in entries if isinstance(entry, Hook))]
    for step in case.steps if steps is None else steps:
        found += hooks_in(*step.before, *step.made)
        for call in step.calls:
            found += hooks_in(*call.before, *([] if call.during is None else [call.during[1]]))
    for hook in found:  # grows meanwhile
        found += hooks_in(*hook.does)
    return found


def hooks_in(*events: Event) -> list[Hook]:
    """Hooks that events register."""
    return [event.hook for event in events if event.hook is not None]


def draw(seed: int) -> Case:
    """Draws the case of a seed."""
    return Dice(seed).case()

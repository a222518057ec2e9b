"""Arithmetic of the random batches: layers, and functions of hooks, for any dtype."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import ferrohook as fh
from support.batches.cases import COMPLEX, WIDTH, Case, Gate, Hook, Step, When

if TYPE_CHECKING:
    from collections.abc import Callable

FLOAT8 = torch.float8_e4m3fn
WINDOW = 2
"""Tokens of a window of gates."""
DICTIONARY = fh.Dictionary(
    torch.eye(WIDTH), torch.eye(WIDTH), b_enc=torch.zeros(WIDTH), b_dec=torch.zeros(WIDTH)
)
"""A feature for each element: its positive part."""


def vector(seed: int, *, whole: bool = False) -> Tensor:
    """Vector of an intervention; complex, or with infinite or NaN values, for some seeds."""
    generator = torch.Generator().manual_seed(seed)
    if whole:
        return torch.randint(-4, 5, (WIDTH,), generator=generator).float()
    made = torch.randn(WIDTH, generator=generator)
    if seed == COMPLEX:
        return torch.complex(made, made.flip(0) + 1)
    if seed == 6:
        made[1] = torch.inf
    if seed == 7:
        made[2] = torch.nan
    return made


def edit(seed: int) -> dict[str, Any]:
    """Change of a feature, as arguments of `Feature`."""
    return {"set": 2.0} if seed % 2 else {"scale": 3.0, "add": 1.0}


def factor(seed: int) -> float:
    return (0.5, -2.0, 3.0)[seed % 3]


def intervention(case: Case, hook: Hook) -> Any:
    """Makes a native hook."""
    given = vector(hook.seed, whole=case.sites)
    part = hook.part
    low = None if hook.seed % 2 else -0.1
    made: dict[str, Callable[[], Any]] = {
        "add": lambda: fh.Add(given, output_index=part),
        "scale": lambda: fh.Scale(factor(hook.seed), output_index=part),
        "replace": lambda: fh.Replace(given, output_index=part),
        "zero": lambda: fh.Zero(output_index=part),
        "ablate": lambda: fh.Ablate(vector(hook.seed % 6), output_index=part),
        "clamp": lambda: fh.Clamp(vector(hook.seed % COMPLEX), low, 0.1, output_index=part),
        "feature": lambda: fh.Feature(
            DICTIONARY, hook.seed % WIDTH, output_index=part, **edit(hook.seed)
        ),
    }
    return made[hook.kind]()


def gate(drawn: Gate, at: Any) -> Any:
    """Makes a gate of a plan."""
    over: Any = fh.window(WINDOW) if drawn.over == "window" else drawn.over
    by: Any = drawn.by
    dot = fh.Dot(torch.eye(WIDTH)[drawn.element])
    return fh.gate(
        drawn.name,
        drawn.what,
        fh.FeatureActivation(DICTIONARY, drawn.element) if drawn.feature else dot,
        at=at,
        over=over,
        by=by,
        inputs=drawn.phase == "forward_pre",
        output_index=drawn.part,
    )


def reading(drawn: Gate, token: Tensor) -> float:
    """Number that a gate reads from a token; NaN for one with infinite or NaN elements."""
    vector = token.flatten().float()
    others = torch.cat((vector[: drawn.element], vector[drawn.element + 1 :]))
    read = vector[drawn.element] + (others * 0).sum()
    return float(read.relu() if drawn.feature else read)


def condition(when: When) -> Any:
    """Makes a condition on a gate."""
    made = (fh.above if when.above else fh.below)(when.gate, when.bound)
    return ~made if when.negated else made


def intervened(case: Case, hook: Hook, x: Tensor) -> Tensor:
    """Formula of a native hook."""
    given = vector(hook.seed, whole=case.sites)
    if hook.kind == "add":
        return x + (given * 1.0).to(x.dtype)
    if hook.kind == "scale":
        return x * factor(hook.seed)
    if hook.kind == "replace":
        return given.to(x.dtype).expand(x.shape).clone()
    if hook.kind == "zero":
        return torch.zeros_like(x)
    if hook.kind == "feature":
        column = torch.eye(WIDTH)[hook.seed % WIDTH]
        flat = x if x.dtype == torch.float64 else x.float()
        value = (flat * column).sum(-1, keepdim=True).relu()
        new = 2.0 if hook.seed % 2 else value * 3.0 + 1.0
        return (flat + (new - value) * column).to(x.dtype)
    return along(hook, x)


def along(hook: Hook, x: Tensor) -> Tensor:
    """Formula of a native hook that changes how far vectors go in a direction."""
    direction = vector(hook.seed % (6 if hook.kind == "ablate" else COMPLEX))
    unit = (direction / direction.norm()).to(x.dtype)
    length = (x * unit.conj()).sum(-1, keepdim=True)
    if hook.kind == "ablate":
        return x - length * unit
    low = None if hook.seed % 2 else -0.1
    return x + (length.clamp(low, 0.1) - length) * unit


def partly(hook: Hook, x: Tensor, changed: Tensor) -> Tensor:
    """The share of a change that a hook makes."""
    return changed if hook.strength is None else x.lerp(changed.to(x.dtype), hook.strength)


def refuses(hook: Hook, case: Case) -> bool:
    """True if a native hook cannot change the tensors."""
    dtype = case.dtype
    if dtype.is_floating_point:
        if hook.seed == COMPLEX and not case.sites and hook.kind in {"add", "ablate", "replace"}:
            return True
        return dtype == FLOAT8 and hook.kind not in {"zero", "replace", "feature"}
    if dtype.is_complex:
        return hook.kind in {"clamp", "feature"}
    return hook.kind != "zero"


def spoils(hook: Hook) -> bool:
    """True if a hook gives a result that cannot stand for the rows."""
    return hook.kind in {"shape", "dtype", "sparse"}


def times(x: Tensor, seed: int) -> Tensor:
    if x.dtype == FLOAT8:
        return (x.float() * 2).to(FLOAT8)
    if x.dtype == torch.bool:
        return ~x
    return x * (2 + seed % 3)


def mixed(x: Tensor, dim: int) -> Tensor:
    """Combines the rows of a tensor, so that other rows give another result."""
    if not x.shape[dim]:
        return x
    if x.dtype.is_floating_point and x.dtype != FLOAT8:
        return x - x.amax(dim, keepdim=True) * 0.5
    order = torch.arange(x.shape[dim] - 1, -1, -1)
    if x.dtype == FLOAT8:
        return x.view(torch.uint8).index_select(dim, order).view(FLOAT8)
    return x.index_select(dim, order)


def write(x: Tensor, seed: int) -> None:
    """Changes a tensor in place."""
    if x.dtype == torch.bool:
        x.logical_not_()
    else:
        x.mul_(2 + seed % 3)


def spoiled(x: Tensor, hook: Hook) -> Tensor:
    """Makes a result that cannot stand for the rows."""
    kind = hook.kind
    if kind == "shape":
        return x[..., :1].clone()
    if kind == "dtype":
        return x.to(torch.float32 if x.dtype != torch.float32 else torch.float64)
    return x.to_sparse()


def gained(x: Tensor, *, whole: bool = False) -> Tensor:
    """Output of a layer."""
    if x.dtype == FLOAT8:
        return x.clone()
    if x.dtype == torch.bool:
        return ~x
    if x.dtype.is_floating_point or x.dtype.is_complex:
        return x * 2 + 1 if whole else x * 1.5 + 0.25
    return x * 2 + 1


def table(case: Case, step: Step) -> Tensor | None:
    """A tensor that has no rows of a batch: perhaps as many as are chosen, but not as it has."""
    if not case.table:
        return None
    taken_ = {step.size, WIDTH, *(call.rows for call in step.calls)}
    rows = next(rows for rows in itertools.count(case.table) if rows not in taken_)
    return embedded(case, rows, 5)


def summed(hidden: Tensor, residual: Tensor, *_table: Tensor) -> Tensor:
    if hidden.dtype == FLOAT8:
        return hidden.clone()
    return hidden ^ residual if hidden.dtype == torch.bool else hidden + residual


def chosen(x: Tensor, case: Case, index: Tensor | None, *, flat: bool) -> Tensor:
    """Rows that the head runs on; padding rows are the first."""
    if index is None:
        return x
    index = index.clamp(min=0)
    if case.dim == 0:
        return taken(x, 0, index)
    return taken(x[0], 0, index) if flat else taken(x, 1, index)


def taken(x: Tensor, dim: int, index: Tensor) -> Tensor:
    if x.dtype == FLOAT8:
        return x.view(torch.uint8).index_select(dim, index).view(FLOAT8)
    return x.index_select(dim, index)


def put(x: Tensor, dim: int, index: Tensor, rows: Tensor) -> Tensor:
    """Returns a tensor with some rows replaced."""
    if x.dtype == FLOAT8:
        return put(x.view(torch.uint8), dim, index, rows.view(torch.uint8)).view(FLOAT8)
    return x.clone().index_copy(dim, index, rows)


def embedded(case: Case, rows: int, seed: int) -> Tensor:
    """Input of a call."""
    generator = torch.Generator().manual_seed(seed)
    shape: tuple[int, ...] = (rows, WIDTH)
    if case.columns:
        shape = (rows, case.columns, WIDTH)
    elif case.dim == 1:
        shape = (1, rows, WIDTH)
    if case.sites:
        return torch.randint(-4, 5, shape, generator=generator).float()
    made = torch.randn(shape, generator=generator, dtype=torch.float64) * 3
    if case.dtype == torch.bool:
        return made > 0
    if not case.dtype.is_floating_point and not case.dtype.is_complex:
        made = made.abs()
    if case.dtype.is_complex:
        return torch.complex(made, made.flip(-1)).to(case.dtype)
    return made.to(case.dtype)


class Gain(nn.Module):
    """Elementwise, so that a row's result does not depend on other rows."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.whole = case.sites

    def forward(self, x: Tensor) -> Tensor:
        return gained(x, whole=self.whole)


class Pair(Gain):
    """Returns its input too, and a table if it has one."""

    table: Tensor | None = None

    def forward(self, x: Tensor) -> Any:
        pair = gained(x, whole=self.whole), x
        return pair if self.table is None else (*pair, self.table)


class Change(Gain):
    """Writes its input, or returns it as it is."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.in_place, self.alias = case.in_place, case.alias

    def forward(self, x: Tensor) -> Tensor:
        if self.in_place:
            return x.mul_(1.5)
        return x if self.alias else super().forward(x)


class Line(nn.Module):
    """Layers that follow each other; the last runs on chosen rows."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.a, self.b, self.c, self.head = Gain(case), Pair(case), Change(case), Gain(case)
        self.case = case
        self.index: Tensor | None = None
        self.flat = False

    def forward(self, inputs_embeds: Tensor) -> tuple[Tensor, Tensor]:
        x = self.c(summed(*self.b(self.a(inputs_embeds))))
        # A copy, as hooks of the head may write its input.
        return x.clone(), self.head(chosen(x, self.case, self.index, flat=self.flat))

"""Models whose rows are known: of each value that a module gets and returns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from support.plans import Net

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

WIDTH = 4
"""Last dimension of all tensors."""
TIME = 3
"""Columns; no batch has so many rows."""


class RowModel(nn.Module):
    """A model that says which tensors have the rows of a batch, independently of their sizes."""

    dim: ClassVar[int] = 0
    parts: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Modules to hook, with the `output_index`es that an intervention takes there."""
    whole: ClassVar[frozenset[tuple[str, str, tuple[Any, ...]]]] = frozenset()
    """Values without rows: module, `"input"` or `"output"`, and the path from there."""
    shared: ClassVar[frozenset[str]] = frozenset()
    """Arguments without rows."""

    def arguments(self, rows: int, like: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        """Makes arguments of a call."""
        return {"x": random((rows, WIDTH), like, generator)}

    def gathered(self, rows: int) -> dict[str, Any]:
        """Modules whose rows are others than the batch's, as `fh.batch` takes them."""
        del rows
        return {}

    def alone(self, arguments: Mapping[str, Tensor], rows: Sequence[int]) -> dict[str, Tensor]:
        """Cuts rows out of a call's arguments."""
        return {
            name: value if name in self.shared else pick(value, self.dim, rows)
            for name, value in arguments.items()
        }


def random(shape: tuple[int, ...], like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(like.dtype)


def pick(value: Tensor, dim: int, rows: Sequence[int]) -> Tensor:
    return value.index_select(dim, torch.tensor(rows, dtype=torch.long))


class Pairs(Net, RowModel):
    """Linear layers, blocks that return pairs, a module that runs twice."""

    parts: ClassVar = {
        "embed": (None,),
        "blocks.0": (0, 1, -1, "sum"),
        "blocks.1.linear": (None,),
        "act": (None,),
        "head": (None,),
    }

    def __init__(self) -> None:
        super().__init__(WIDTH)


class Convolutions(RowModel):
    parts: ClassVar = {"first": (None,), "act": (None,), "second": (None,), "head": (None,)}

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(2, TIME, 3, padding=1)
        self.act = nn.ReLU()
        self.second = nn.Conv1d(TIME, 2, 3, padding=1)
        self.head = nn.Linear(WIDTH, WIDTH)

    def arguments(self, rows: int, like: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        return {"x": random((rows, 2, WIDTH), like, generator)}

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.second(self.act(self.first(x)))
        return self.head(x.sum(1))


class Attend(nn.Module):
    def forward(self, qkv: Tensor, *, mask: Tensor, causal: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = qkv.chunk(3, -1)
        scores = (q @ k.transpose(1, 2)).masked_fill(~causal, -1e4)
        weights = scores.masked_fill(~mask[:, None], -1e4).softmax(-1)
        return weights @ v, weights


class Attention(RowModel):
    """Attention over columns, with a mask of each row and one of all rows, by keyword."""

    parts: ClassVar = {
        "norm": (None,),
        "qkv": (),
        "attend": (0,),
        "project": (None,),
        "mlp": (None,),
    }
    whole: ClassVar = frozenset({("attend", "input", (1, "causal"))})
    shared: ClassVar = frozenset({"causal"})

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.attend = Attend()
        self.project = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, 4))

    def arguments(self, rows: int, like: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        lengths = torch.randint(1, TIME + 1, (rows, 1), generator=generator)
        return {
            "x": random((rows, TIME, WIDTH), like, generator),
            "mask": torch.arange(TIME) >= TIME - lengths,
            "causal": torch.ones(TIME, TIME, dtype=torch.bool).tril(),
        }

    def forward(self, x: Tensor, mask: Tensor, causal: Tensor) -> Tensor:
        hidden, _ = self.attend(self.qkv(self.norm(x)), mask=mask, causal=causal)
        x = x + self.project(hidden)
        return x + self.mlp(x)


class Gain(nn.Module):
    """Elementwise, so that a row's result does not depend on the number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        del index
        return x * self.weight + self.bias


class Experts(RowModel):
    """Mixture of experts: the tokens of each, sorted, are gathered from all rows."""

    count: ClassVar = 3
    chosen: ClassVar = 2
    parts: ClassVar = {
        "embed": (None,),
        "router": (None,),
        "experts.0": (None,),
        "experts.2": (None,),
        "head": (None,),
    }

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(Gain() for _ in range(self.count))
        self.head = nn.Linear(WIDTH, WIDTH)

    def gathered(self, rows: int) -> dict[str, Any]:
        del rows
        return {"experts.*": lambda module, args, kwargs, output: args[1]}

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        weights, chosen = self.router(x)[:, : self.count].softmax(-1).topk(self.chosen)
        order = chosen.flatten().argsort(stable=True)
        token = order // self.chosen
        counts = chosen.flatten().bincount(minlength=self.count).tolist()
        mixed = x
        for expert, tokens, places in zip(
            self.experts, token.split(counts), order.split(counts), strict=True
        ):
            if len(tokens):
                y = expert(x.index_select(0, tokens), tokens)
                mixed = mixed.index_add(0, tokens, y * weights.flatten()[places, None])
        return self.head(mixed)


class Recurrent(RowModel):
    """An RNN, batch first: the last state has rows in another dimension."""

    parts: ClassVar = {"embed": (None,), "rnn": (0,), "head": (None,)}
    whole: ClassVar = frozenset({("rnn", "output", (1,))})

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.rnn = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=self.dim == 0)
        self.head = nn.Linear(WIDTH, WIDTH)

    def arguments(self, rows: int, like: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        shape = (rows, TIME) if self.dim == 0 else (TIME, rows)
        return {"x": random((*shape, WIDTH), like, generator)}

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.rnn(self.embed(x))
        return self.head(hidden)


class RecurrentTimeFirst(Recurrent):
    """An RNN, time first: every state has its rows in dimension 1."""

    dim: ClassVar = 1
    parts: ClassVar = {"embed": (None,), "rnn": (0,), "head": (None,)}
    whole: ClassVar = frozenset()


class Named(NamedTuple):
    hidden: Tensor
    others: list[Tensor]


class Nest(nn.Module):
    def forward(self, x: Tensor, scale: float) -> dict[str, Any]:
        return {"a": x * scale, "b": (x + 1, [x - 1]), "c": Named(x, [x * 2]), "n": None}


class Nested(RowModel):
    """A module that returns tensors in dicts, tuples and lists."""

    parts: ClassVar = {"embed": (None,), "nest": ("a",), "head": (None,)}

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.nest = Nest()
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> dict[str, Any]:
        made = self.nest(self.embed(x), scale=0.5)
        (first, (second,)), named = made["b"], made["c"]
        y = self.head(made["a"] + first - second + named.hidden + named.others[0])
        return {"y": y, "others": [first, second]}


class Packed(RowModel):
    """A batch of tokens without padding, (1, tokens, width)."""

    dim: ClassVar = 1
    parts: ClassVar = {"norm": (None,), "mlp.0": (None,), "mlp": (None,)}

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def arguments(self, rows: int, like: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        return {"x": random((1, rows, WIDTH), like, generator)}

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Folded(RowModel):
    """Rows and columns in one dimension, and a head that runs on every other row."""

    parts: ClassVar = {"embed": (None,), "flat": (None,), "head": (None,)}

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.flat = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)

    def arguments(self, rows: int, like: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        logits = torch.zeros(rows, dtype=torch.bool)
        logits[::2] = True
        return {"x": random((rows, TIME, WIDTH), like, generator), "logits": logits}

    def gathered(self, rows: int) -> dict[str, Any]:
        def flat(module: Any, args: Any, kwargs: Any, output: Any) -> Tensor:
            return torch.arange(rows).repeat_interleave(TIME)

        return {"flat": flat, "head": torch.arange(0, rows, 2)}

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        x = self.embed(x)
        x = x + self.flat(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        return x.index_put((logits,), self.head(x[logits]))


MODELS: tuple[Callable[[], RowModel], ...] = (
    Pairs,
    Convolutions,
    Attention,
    Experts,
    Recurrent,
    RecurrentTimeFirst,
    Nested,
    Packed,
    Folded,
)

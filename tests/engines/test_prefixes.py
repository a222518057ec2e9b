"""First positions that plans change and read, against a look at every position."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import ferrohook as fh
from ferrohook.engines.model.cache_reach import CacheReach, observe_reach
from ferrohook.engines.model.modules import ModuleInfo, ModuleTable
from ferrohook.engines.prefixes import prefix_of
from ferrohook.tokens.positions import Tokens, first_of, mask_of

if TYPE_CHECKING:
    from torch import Tensor

PROMPT = 10
FAR = 64
TABLE = ModuleTable({name: ModuleInfo("tensor", 4, 16) for name in ("", "0", "1", "2")}, {})
CAUSAL = CacheReach(causal=True, outputs=frozenset({"2", ""}))
BOUNDS = [None, 0, 1, 5, 9, 10, 11, 40, -1, -3, -10, -11, -200]
POSITIONS: list[Any] = [
    *(None, "prompt", "last_prompt", "generated", 0, 3, 9, 10, 11, 40, -1, -3, -10, -11, -200),
    *(slice(start, stop) for start, stop in itertools.product(BOUNDS, BOUNDS)),
    *(slice(start, None, 3) for start in BOUNDS),
]


@pytest.mark.parametrize("prompt", [1, 2, PROMPT])
def test_the_first_position_is_the_first_of_all_that_are_named(prompt: int) -> None:
    for at in POSITIONS:
        mask = torch.ones(FAR, dtype=torch.bool)
        if at is not None:
            mask = mask_of(at, Tokens(torch.arange(FAR)[None], torch.tensor([prompt])))[0]
        named = mask.nonzero().flatten().tolist()
        assert first_of(at, prompt) == (named[0] if named else None), at


def test_a_function_may_name_any_position() -> None:
    assert first_of(lambda positions: positions > 5, PROMPT) == 0


def prefix(*entries: Any, reach: CacheReach = CAUSAL) -> tuple[int | None, int | None]:
    """Returns the first positions that a plan changes and reads."""
    found = prefix_of(fh.Plan(*entries), PROMPT, TABLE, reach)
    return found.changed, found.read


def change(at: Any = None, what: str = "0", **options: Any) -> Any:
    return fh.on(what, fh.Scale(2.0), at=at, **options)


def gate(name: str = "g", at: Any = None, **options: Any) -> Any:
    return fh.gate(name, "0", fh.Norm(), at=at, **options)


@pytest.mark.parametrize("at", ["generated", "last_prompt", 3, -2, slice(4, None), slice(-4, 8)])
def test_changes_and_captures_start_where_their_positions_do(at: Any) -> None:
    first = first_of(at, PROMPT)
    assert prefix(change(at)) == (first, None)
    assert prefix(fh.keep("0", at=at)) == (None, first)
    assert prefix(change(at), fh.keep("1", at=7)) == (first, 7)
    assert prefix(change(5), change(at), fh.keep("1", at=at), fh.keep("0", at=5)) == (
        min(5, first or 0),
        min(5, first or 0),
    )


def test_no_position_is_changed_where_none_is_named() -> None:
    assert prefix(change(slice(5, 5)), change(-11)) == (None, None)
    assert prefix(change(slice(5, 5)), change(7)) == (7, None)


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        # A gate alone changes nothing; what depends on it reads what it reads.
        ([gate(at=4)], (None, 4)),
        ([gate(at=4), fh.keep("@gate.g")], (None, 4)),
        ([gate(at="generated"), fh.stop(when=fh.above("g", 1.0))], (None, 10)),
        # Of the whole prompt: known from its last token on.
        ([gate(over="prompt"), change(when=fh.above("g", 1.0))], (9, 0)),
        ([gate(over="prompt"), change("generated", when=fh.above("g", 1.0))], (10, 0)),
        ([gate(over="prompt"), change(strength=fh.ramp("g", 0.0, 1.0))], (9, 0)),
        # Of the token before: at generated tokens.
        ([gate(at="last_prompt", lag=1), change(when=fh.below("g", 1.0))], (10, 9)),
        ([gate(lag=1, over="so_far"), change(3, when=fh.below("g", 1.0))], (10, 0)),
        # Of tokens up to its own.
        ([gate(), change(when=fh.above("g", 1.0))], (0, 0)),
        ([gate(at=slice(4, None)), change(when=fh.above("g", 1.0))], (4, 4)),
        ([gate(at=slice(4, None), over="so_far"), change(2, when=~fh.above("g", 1.0))], (4, 4)),
        # One of several gates may decide a condition; a strength needs its own.
        (
            [
                gate("a", at=6),
                gate("b", at=3),
                change(when=fh.above("a", 1.0) | fh.above("b", 1.0)),
            ],
            (3, 3),
        ),
        (
            [
                gate("a", at=3),
                gate("b", over="prompt"),
                change(when=fh.above("a", 1.0), strength=fh.ramp("b", 0.0, 1.0)),
            ],
            (9, 0),
        ),
        # One that never has a value has its entry never act.
        ([gate(at=slice(5, 5)), change(when=fh.above("g", 1.0))], (None, None)),
        ([change(5, strength=0.5)], (5, None)),
    ],
)
def test_gated_changes_start_where_their_gates_have_values(
    entries: list[Any], expected: tuple[int | None, int | None]
) -> None:
    assert prefix(*entries) == expected


def test_changes_after_the_last_attention_reach_no_keys_and_values() -> None:
    assert prefix(change(3, "2")) == (None, None)
    assert prefix(change(3, ["1", "2"])) == (3, None)  # type: ignore[arg-type]
    # But they can hide rows that another change has spoilt.
    assert prefix(change(5), change(3, "2")) == (3, None)
    assert prefix(change(5), change(7, "2")) == (5, None)
    assert prefix(change(slice(5, 5)), change(3, "2")) == (None, None)
    assert prefix(change(3, "2", phase="forward_pre")) == (3, None)
    after = CacheReach(causal=True, inputs=frozenset({"2"}))
    assert prefix(change(3, "2", phase="forward_pre"), reach=after) == (None, None)
    assert prefix(change(3, "2"), reach=after) == (3, None)


def test_attention_both_ways_has_a_change_reach_all_positions() -> None:
    both = CacheReach(causal=False, outputs=frozenset({"2"}))
    assert prefix(change(7), fh.keep("0", at=5), reach=both) == (0, 5)
    assert prefix(change(7, "2"), reach=both) == (None, None)
    assert prefix(change(7, "2"), reach=CacheReach()) == (0, None)


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.attention, self.after = nn.Identity(), Attention(), nn.Identity()
        self.mlp = nn.Sequential(nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.after(self.attention(self.before(x))))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm, self.shared = nn.Identity(), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.shared(x)
        for block in self.blocks:
            x = block(x)
        return self.shared(self.norm(x))


def observed(layers: list[nn.Module] | None = None) -> CacheReach:
    model = Stack()
    found = [it for it in model.modules() if isinstance(it, Attention)]
    return observe_reach(
        model, lambda: model(torch.ones(2)), found if layers is None else layers, causal=True
    )


def test_places_after_the_last_attention_are_observed() -> None:
    reach = observed()
    own = {"after", "mlp", "mlp.0"}
    assert reach.inputs == {*(f"blocks.1.{name}" for name in own), "norm"}
    # `shared` runs before the attention too.
    assert reach.outputs == {*reach.inputs, "blocks.1", "blocks.1.attention", ""}
    assert CacheReach.from_json(reach.to_json()) == reach


def test_nothing_comes_after_an_attention_that_is_never_called() -> None:
    assert observed([]) == CacheReach(causal=True)
    assert observed([Attention()]) == CacheReach(causal=True)


def test_gates_alone_need_rows_that_another_answer_has() -> None:
    def gated(*entries: Any) -> int | None:
        return prefix_of(fh.Plan(*entries), PROMPT, TABLE, CAUSAL).gated

    assert gated(fh.keep("0"), change(3)) is None
    assert gated(fh.keep("0"), gate(at=4), gate("other", at="generated")) == 4
    assert gated(gate(at="generated"), fh.keep("@gate.g")) == PROMPT

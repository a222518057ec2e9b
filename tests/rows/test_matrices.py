"""Matrices whose rows are the tokens of a padded batch, as in routers and experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ferrohook as fh

WIDTH, EXPERTS = 4, 3
IDS = torch.tensor([[0, 0, 5, 6, 7], [1, 2, 3, 4, 8]])
MASK = (IDS > 0).long()
POSITIONS = torch.tensor([[-1, -2, 0, 1, 2], [0, 1, 2, 3, 4]])


class Router(nn.Linear):
    """Takes tokens of (batch, length, width) too."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = super().forward(x.reshape(-1, WIDTH))
        return logits, logits.topk(2, -1).indices


class Mixture(nn.Module):
    """A router and experts, the former inside of a matrix or in front of it."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.embed, self.router = nn.Embedding(20, WIDTH), Router(WIDTH, EXPERTS)
        self.experts, self.expert = nn.Identity(), nn.Identity()

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        del attention_mask
        x = self.embed(input_ids)
        flat = x.view(-1, WIDTH)
        if self.where == "middle":
            flat = x.flatten(0, -2)
        self.router(x if self.where == "inside" else flat)
        # As many tokens as there are, in another order.
        self.expert(flat[torch.arange(len(flat)).flip(0)])
        return self.experts(flat).view(x.shape)  # type: ignore[no-any-return]


def model(where: str = "before") -> Mixture:
    torch.manual_seed(0)
    return Mixture(where).requires_grad_(False)


def logits(made: Mixture) -> Tensor:
    """Returns the router's logits: (batch, length, experts)."""
    found: Tensor = made.embed(IDS) @ made.router.weight.T + made.router.bias
    return found


ATS: dict[str, tuple[Any, Any]] = {
    "last": (-1, lambda p, n: p == n - 1),
    "slice": (slice(1, 3), lambda p, n: (p >= 1) & (p < 3)),
    "all": ("prompt", lambda p, n: p >= 0),
    "none": (9, lambda p, n: p == 9),
    "function": (lambda p: p % 2 == 0, lambda p, n: p % 2 == 0),
}
wheres = pytest.mark.parametrize("where", ["before", "inside", "middle"])
ats = pytest.mark.parametrize(("at", "by_hand"), ATS.values(), ids=ATS)


def chosen(by_hand: Any) -> Tensor:
    lengths = MASK.sum(1)[:, None]
    found: Tensor = (POSITIONS >= 0) & by_hand(POSITIONS, lengths)
    return found


@wheres
@ats
@pytest.mark.filterwarnings("ignore::ferrohook.errors.NeverFiredWarning")
def test_a_request_finds_the_tokens_of_routers_and_experts(
    where: str, at: Any, by_hand: Any
) -> None:
    made, here = model(where), chosen(by_hand)
    plan = fh.Plan(
        fh.keep("router", at=at, output_index=0, label="before"),
        fh.on("router", fh.Zero(output_index=0), at=at),
        fh.keep("router", output_index=0),
        fh.keep("experts", at=at, inputs=True),
        fh.on("experts", lambda _m, _a, out: out * 3, at=at),
    )
    with plan.prepare(made) as prepared, prepared.open() as request:
        output = made(IDS, attention_mask=MASK)
    before, x = logits(made), made.embed(IDS)
    after = before.masked_fill(here[..., None], 0)
    assert torch.allclose(request.acts["router"], after.flatten(0, 1))
    assert torch.equal(output, torch.where(here[..., None], x * 3, x))
    if here.any():
        assert torch.allclose(request.acts["before:router"], before[here])
        assert torch.equal(request.acts["experts"], x[here])
    else:
        assert {*request.acts} == {"router"}


@wheres
@ats
@pytest.mark.parametrize("generates", [False, True])
@pytest.mark.filterwarnings("ignore::ferrohook.errors.NeverFiredWarning")
def test_members_have_the_tokens_of_their_rows(
    where: str, at: Any, by_hand: Any, generates: bool
) -> None:
    made, here = model(where), chosen(by_hand)
    seen: list[tuple[int, ...]] = []

    def hook(_module: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
        seen.append(tuple(args[0].shape))
        return output * 3

    plan = fh.Plan(
        fh.on("router", fh.Zero(output_index=0), at=at),
        fh.keep("router", at=at, output_index=0, label="at"),
        fh.keep("router", output_index=0),
        fh.on("experts", hook),
    )
    steered, other = plan.prepare(made).open(), fh.Plan(fh.keep("router")).prepare(made).open()
    lengths = MASK.sum(1).tolist()
    if generates:
        batch = fh.rows.generating([other, steered])
    else:
        rows, numbers = {other: 0, steered: 1}, {other: lengths[0], steered: lengths[1]}
        batch = fh.batch(rows, positions=POSITIONS, lengths=numbers)
    with batch:
        output = made(IDS, attention_mask=MASK)
    assert (steered.error, other.error) == (None, None)
    before, x, own = logits(made), made.embed(IDS), here[1]
    after = before[1].masked_fill(own[:, None], 0)
    assert torch.allclose(steered.acts["router"], after)
    assert steered.acts.positions("router") == [0, 1, 2, 3, 4]
    assert torch.equal(output, torch.stack([x[0], x[1] * 3]))
    assert seen == [(5, WIDTH)]
    if own.any():
        assert torch.allclose(steered.acts["at:router"], after[own])
        assert steered.acts.positions("at:router") == own.nonzero().flatten().tolist()
    # Of both tensors, the tokens that are no padding.
    assert torch.allclose(other.acts["router"][0], before[0, 2:])
    assert torch.equal(other.acts["router"][1], before[0, 2:].topk(2, -1).indices)
    assert other.acts.positions("router") == [0, 1, 2]


@wheres
def test_rows_of_one_token_are_found_in_either_way(where: str) -> None:
    made = model(where)
    plan = fh.Plan(fh.keep("router", output_index=0), fh.keep("embed")).prepare(made)
    requests = [plan.open(), plan.open()]
    with fh.batch({each: row for row, each in enumerate(requests)}, size=2) as batch:
        for column in range(5):
            batch.move(torch.arange(column, column + 1).expand(2, 1))
            made(IDS[:, column : column + 1])
    for row, request in enumerate(requests):
        assert request.error is None
        assert torch.allclose(request.acts["router"], logits(made)[row], atol=1e-6)
        assert torch.equal(request.acts["embed"], made.embed(IDS[row]))


@wheres
def test_tokens_without_padding_are_rows_of_a_matrix(where: str) -> None:
    made = model(where)
    plan = fh.Plan(fh.on("router", fh.Zero(output_index=0), at=1), fh.keep("router")).prepare(made)
    first, second = plan.open(), plan.open()
    positions = torch.tensor([0, 1, -1, 0, 1])
    with fh.batch({first: [0, 1], second: [3, 4]}, dim=1, positions=positions):
        made(IDS[1:])
    right = logits(made)[1].index_fill(0, torch.tensor([1, 4]), 0)
    for request, rows in ((first, [0, 1]), (second, [3, 4])):
        assert request.error is None
        assert torch.allclose(request.acts["router"][0], right[rows])
        assert request.acts.positions("router") == [0, 1]


def test_as_many_rows_in_another_order_are_refused() -> None:
    made = model()
    with pytest.raises(
        fh.HookTypeError, match="number of rows matches, but the module took no tensor"
    ):
        fh.run(made, IDS, plan=fh.Plan(fh.keep("expert", at=0)))
    with pytest.raises(
        fh.HookTypeError, match="number of rows matches, but the module took no tensor"
    ):
        fh.run(made, IDS, plan=fh.Plan(fh.on("expert", fh.Zero(), at="prompt")))
    bad, good = (fh.Plan(fh.keep(each)).prepare(made).open() for each in ("expert", "experts"))
    with fh.batch({good: 0, bad: 1}, positions=POSITIONS):
        made(IDS)
    assert isinstance(bad.error, fh.errors.RowsError)
    assert torch.equal(good.acts["experts"], made.embed(IDS[0, 2:]))


def test_in_inference_mode_a_view_is_not_seen() -> None:
    made = model("before")
    with torch.inference_mode(), pytest.raises(fh.HookTypeError, match="In inference mode"):
        fh.run(made, IDS, plan=fh.Plan(fh.keep("router", at=0)))
    inside = model("inside")
    with torch.inference_mode():
        _, acts = fh.run(inside, IDS, plan=fh.Plan(fh.keep("router", at=0)))
        assert torch.allclose(acts["router"][0], logits(inside)[:, 0])

"""Gradients in a batch: each flows to the rows, and to the vectors, that it comes from."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ferrohook as fh
from support.plans import Net, Unit, forward_hook

WIDTH = 4
ROWS = ([0, 1], [4], [6, 3, 2])
"""Rows of three requests; row 5 is padding."""
SIZE = 7

KINDS: dict[str, Any] = {
    "add": lambda vector: fh.Add(vector, 2.0),
    "ablate": fh.Ablate,
    "clamp": lambda vector: fh.Clamp(vector, -0.1, 0.2),
    "replace": fh.Replace,
}
kinds = pytest.mark.parametrize("kind", KINDS)
alike = pytest.mark.parametrize("rows", [ROWS, ([0, 1], [2, 3], [4, 5])], ids=["lists", "slices"])


def vectors() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randn(WIDTH, generator=generator, dtype=torch.float64, requires_grad=True)
        for _ in ROWS
    ]


def by_hand(model: nn.Module, interventions: list[Any], rows: Any) -> nn.Module:
    """A copy with a hook of PyTorch's on `embed` and `act`, that loops over the requests."""
    model = copy.deepcopy(model)

    def hook(module: Any, args: Any, output: Tensor) -> Tensor:
        parts = output.clone()
        for intervention, places in zip(interventions, rows, strict=True):
            changed = forward_hook(intervention)(module, args, output[places])
            parts = parts.index_copy(0, torch.tensor(places), changed)
        return parts

    for name in ("embed", "act"):
        model.get_submodule(name).register_forward_hook(hook)
    return model


def given_as(places: list[int]) -> Any:
    """A slice if it can be one."""
    return slice(places[0], places[-1] + 1) if places == sorted(places) else places


def gradients(model: nn.Module, variables: list[Tensor], weights: Tensor) -> list[Tensor]:
    torch.manual_seed(4)
    x = torch.randn(SIZE, WIDTH, dtype=torch.float64, requires_grad=True)
    loss = (model(x) * weights[:, None]).square().sum()
    found = torch.autograd.grad(loss, [x, *variables, *model.parameters()], allow_unused=True)
    return [torch.zeros(()) if each is None else each for each in found]


def in_a_batch(
    model: nn.Module, interventions: list[Any], rows: Any, variables: list[Tensor], weights: Tensor
) -> list[Tensor]:
    requests = [
        fh.Plan(fh.on(["embed", "act"], each)).prepare(model).open() for each in interventions
    ]
    forms = map(given_as, rows)
    with fh.batch(dict(zip(requests, forms, strict=True)), size=SIZE):
        found = gradients(model, variables, weights)
    assert [request.error for request in requests] == [None] * len(requests)
    return found


@kinds
@alike
def test_gradients_are_those_of_a_loop(kind: str, rows: Any) -> None:
    model, trained = Net(WIDTH).double(), vectors()
    interventions = [KINDS[kind](vector) for vector in trained]
    weights = torch.arange(1.0, SIZE + 1, dtype=torch.float64)
    ours = in_a_batch(model, interventions, rows, trained, weights)
    hand = gradients(by_hand(model, interventions, rows), trained, weights)
    for one, other in zip(ours, hand, strict=True):
        torch.testing.assert_close(one.expand_as(other), other, rtol=1e-9, atol=1e-9)


def test_a_vector_shared_by_requests_gets_the_sum() -> None:
    model = Net(WIDTH).double()
    (vector, *_) = vectors()
    weights = torch.ones(SIZE, dtype=torch.float64)
    interventions = [fh.Add(vector)] * len(ROWS)
    ours = in_a_batch(model, interventions, ROWS, [vector], weights)
    hand = gradients(by_hand(model, interventions, ROWS), [vector], weights)
    for one, other in zip(ours, hand, strict=True):
        torch.testing.assert_close(one.expand_as(other), other, rtol=1e-9, atol=1e-9)


def test_a_member_without_a_token_at_the_positions_keeps_its_gradient() -> None:
    class Model(nn.Sequential):
        def forward(self, input_ids: Tensor) -> Tensor:
            output: Tensor = super().forward(input_ids)
            return output

    model = Model(nn.Embedding(8, WIDTH), nn.Identity())
    model[0].weight.data[0] = 0  # padding, whose length has no gradient
    ids, positions = torch.tensor([[0, 3, 4], [1, 2, 3]]), torch.tensor([[-1, 0, 1], [0, 1, 2]])
    prepared = fh.Plan(fh.on("1", Unit(1.0), at=2)).prepare(model)
    rows = {prepared.open(): row for row in range(2)}
    with fh.batch(rows, positions=positions, lengths=dict.fromkeys(rows, 2)):
        output = model(ids)
    (gradient,) = torch.autograd.grad(output.square().sum(), model[0].weight)
    assert not any(request.error for request in rows)
    assert bool(gradient.isfinite().all())


@pytest.mark.parametrize("at", [None, "prompt"])
def test_a_call_in_inference_mode_leaves_nothing_that_autograd_refuses(at: Any) -> None:
    model, x = nn.Sequential(nn.Embedding(8, WIDTH), nn.Tanh()), torch.arange(8).reshape(4, 2)
    hook = fh.on("0", lambda _module, _args, output: output * 2, at=at)
    request = fh.Plan(hook).prepare(model).open()
    positions = torch.arange(2).repeat(4, 1)
    with fh.batch({request: [2, 0]}, positions=positions, lengths={request: 1}):
        with torch.inference_mode():
            model(x)
        model(x).sum().backward()
    assert request.error is None
    assert model[0].weight.grad is not None


def test_trained_and_fixed_vectors_share_a_module() -> None:
    model, trained = Net(WIDTH).double(), vectors()
    fixed = trained[1].detach().clone()
    interventions = [fh.Add(trained[0]), fh.Ablate(fixed), fh.Add(trained[2], -1.0)]
    weights = torch.ones(SIZE, dtype=torch.float64)
    variables = [trained[0], trained[2]]
    ours = in_a_batch(model, interventions, ROWS, variables, weights)
    hand = gradients(by_hand(model, interventions, ROWS), variables, weights)
    for one, other in zip(ours, hand, strict=True):
        torch.testing.assert_close(one.expand_as(other), other, rtol=1e-9, atol=1e-9)


def test_captured_rows_keep_the_graph() -> None:
    model = Net(WIDTH).double()
    plan = fh.Plan(fh.keep("act", detach=False, calls="all"))
    requests = [plan.prepare(model).open() for _ in ROWS]
    x = torch.randn(SIZE, WIDTH, dtype=torch.float64, requires_grad=True)
    with fh.batch(dict(zip(requests, ROWS, strict=True))):
        model(x)
    for request, rows in zip(requests, ROWS, strict=True):
        (found,) = torch.autograd.grad(request.acts["act"][1].sum(), [x], retain_graph=True)
        touched = found.abs().sum(1).nonzero().flatten().tolist()
        assert touched == sorted(rows)


class _Checkpointed(nn.Module):
    def __init__(self, options: dict[str, bool] | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        scales = torch.linspace(5, 1, 20)[:, None]
        self.embed = nn.Embedding.from_pretrained(torch.randn(20, WIDTH).sign() * scales, False)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.options = options

    def block(self, hidden: Tensor) -> Tensor:
        return torch.tanh(self.last(torch.tanh(self.first(hidden))))

    def forward(self, ids: Tensor) -> Any:
        hidden = self.embed(ids)
        if self.options is None:
            return self.block(hidden)
        return checkpoint(self.block, hidden, **self.options)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("python", [False, True])
def test_a_repeat_has_the_positions_of_its_forward(reentrant: bool, python: bool) -> None:
    """Another step of the batch has run since."""

    def gradient(options: dict[str, bool] | None) -> Tensor:
        model = _Checkpointed(options)
        hook: Any = (lambda _m, _a, output: output * 3) if python else fh.Scale(3.0)
        plan = fh.Plan(
            fh.gate("g", "embed", fh.Norm()), fh.on("last", hook, when=fh.above("g", 6.0))
        )
        with plan.prepare(model) as prepared:
            request = prepared.open()
            rows = {request: slice(0, 4)}
            with fh.batch(rows, positions=torch.arange(4)) as batch:
                output = model(torch.tensor([1, 2, 3, 4]))
                batch.move(torch.arange(4, 8))
                model(torch.tensor([11, 12, 13, 14]))
                output.pow(2).sum().backward()
            assert request.error is None
        found = model.embed.weight.grad
        assert found is not None
        return found

    torch.testing.assert_close(gradient({"use_reentrant": reentrant}), gradient(None))

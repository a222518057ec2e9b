"""A model that is looked at, and the rest of the process, stay as they are."""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

import ferrohook as fh

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH = 16
DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "rand": lambda x: torch.rand(x.shape),
    "randn": lambda x: torch.randn(*x.shape),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint": lambda x: torch.randint(5, x.shape),
    "randint with a lower end": lambda x: torch.randint(-3, 5, x.shape),
    "randint_like": lambda x: torch.randint_like(x, 5),
    "randint_like with a lower end": lambda x: torch.randint_like(x, -3, 5),
    "randperm": lambda x: torch.randperm(x.shape[-1]).float(),
    "normal": lambda x: torch.normal(x, 1.0),
    "normal_": lambda x: torch.empty_like(x).normal_(),
    "uniform_": lambda x: torch.empty_like(x).uniform_(),
    "exponential_": lambda x: torch.empty_like(x).exponential_(),
    "bernoulli": lambda x: x.sigmoid().bernoulli(),
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(0.5),
    "multinomial": lambda x: x.softmax(-1).flatten(0, -2).multinomial(1)[0].float(),
    "poisson": lambda x: torch.poisson(x.exp()),
    "dropout": nn.functional.dropout,
    "rrelu": lambda x: nn.functional.rrelu(x, training=True),
    "gumbel_softmax": nn.functional.gumbel_softmax,
    "attention with dropout": lambda x: nn.functional.scaled_dot_product_attention(
        x, x, x, dropout_p=0.5
    ),
}


class Noisy(nn.Linear):
    """Linear that draws in eval mode too."""

    def __init__(self, draw: Callable[[Tensor], Any]) -> None:
        super().__init__(WIDTH, WIDTH)
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        drawn, out = self.draw(x), super().forward(x)
        return out + 0.1 * drawn if isinstance(drawn, Tensor) else out


class Block(nn.Module):
    def __init__(self, draw: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), Noisy(draw)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.linear(self.norm(x))
        return out


class Net(nn.Module):
    def __init__(self, draw: Callable[[Tensor], Any] = torch.zeros_like, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(96, WIDTH, **options)
        self.layers = nn.ModuleList(Block(draw) for _ in range(3))
        self.head = nn.Linear(WIDTH, 96)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x)
        return out


@pytest.mark.parametrize("name", DRAWS)
def test_a_model_that_draws_takes_nothing_of_the_global_generator(name: str) -> None:
    model = Net(DRAWS[name])
    state = torch.get_rng_state()
    assert "@resid_post.1" in fh.quantities(model)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "around", [lambda: torch.autocast("cpu", dtype=torch.bfloat16), lambda: torch.device("meta")]
)
def test_autocast_and_the_default_device_are_no_part_of_a_table(around: Callable[[], Any]) -> None:
    model = Net()
    with around():
        found = fh.quantities(model)
    assert found.to_json() == fh.quantities(Net()).to_json()


def test_global_hooks_do_not_see_the_copy() -> None:
    called: list[nn.Module] = []
    model = Net()
    handles = [
        register_module_forward_pre_hook(lambda module, _: called.append(module)),
        register_module_forward_hook(lambda module, *_: called.append(module)),
    ]
    found = fh.quantities(model)
    for handle in handles:
        handle.remove()
    assert not called
    assert found.to_json() == fh.quantities(Net()).to_json()


def test_a_thread_that_samples_meanwhile_gets_each_number_once() -> None:
    model = Net(torch.rand_like)
    draws: list[float] = []
    started, done = threading.Event(), threading.Event()

    def sample() -> None:
        torch.manual_seed(1)
        while not done.is_set():
            draws.append(torch.rand(1, dtype=torch.float64).item())
            started.set()

    thread = threading.Thread(target=sample)
    thread.start()
    started.wait()
    fh.quantities(model)
    done.set()
    thread.join()
    generator = torch.Generator().manual_seed(1)
    assert draws == [torch.rand(1, dtype=torch.float64, generator=generator).item() for _ in draws]


@pytest.mark.parametrize("threads", [1, 2])
def test_generators_of_python_and_numpy_are_put_back_unless_a_thread_may_have_drawn(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def draw(_x: Tensor) -> None:
        random.random()  # noqa: S311 (as any model may)
        np.random.rand()  # noqa: NPY002 (the process's generator)

    model = Net(draw)
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002 (as above)
    monkeypatch.setattr(threading, "active_count", lambda: threads)
    fh.quantities(model)
    own, numbers = random.Random(3), np.random.RandomState(3)  # noqa: S311 (as the process's)
    drawn = random.random(), np.random.rand()  # noqa: NPY002, S311 (as above)
    same = drawn[0] == own.random(), drawn[1] == numbers.rand()
    assert same == ((True, True) if threads == 1 else (False, False))


def test_a_table_that_a_forward_scales_keeps_its_rows() -> None:
    model = Net(max_norm=1.0)
    before = model.embed.weight.detach().clone()
    assert "@embed" in fh.quantities(model)
    assert torch.equal(model.embed.weight, before)


def test_a_forward_wrapped_by_a_closure_calls_the_copy() -> None:
    model = Net()
    fired: list[nn.Module] = []

    def wrapped(old: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def inner(x: Tensor) -> Tensor:
            return old(x)

        def outer(x: Tensor) -> Tensor:
            return inner(x)

        return outer

    for layer in model.layers:
        layer.forward = wrapped(layer.forward)
    model.layers[0].linear.register_forward_hook(lambda module, *_: fired.append(module))
    table = fh.quantities(model)
    assert not fired
    assert table["@mlp_out.1"].path == "layers.1.linear"

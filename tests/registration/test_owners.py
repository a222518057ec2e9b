"""Owners: hooks of one that has ended are not started, another of the same plan loses none."""

from __future__ import annotations

import contextlib
import threading
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import ferrohook as fh

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Model(nn.Module):
    """Adds nothing: the output counts the hooks that added one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.a = nn.Embedding(10, 1), nn.Identity()
        nn.init.zeros_(self.embed.weight)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.a(self.embed(input_ids))


def add_one(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    del module, args
    return output + 1


def in_thread(call: Callable[[], object]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()


@pytest.fixture
def model() -> Model:
    return Model()


@contextlib.contextmanager
def owners(model: nn.Module, kind: str, hook: Any, number: int) -> Iterator[list[Any]]:
    """Makes scopes, or requests of one plan, that have the hook on `a`."""
    if kind == "scope":
        scopes = [fh.scope() for _ in range(number)]
        for scope in scopes:
            fh.register(model, "a", hook, scope=scope)
        yield scopes
        return
    at = "prompt" if kind == "request at positions" else None
    with fh.Plan(fh.on("a", hook, at=at)).prepare(model) as prepared:
        yield [prepared.open() for _ in range(number)]


KINDS = ["scope", "request", "request at positions"]
HOOKS = [add_one, fh.Add(torch.ones(1))]
IDS = torch.arange(3)[None]


@pytest.mark.filterwarnings("ignore::ferrohook.errors.NeverFiredWarning")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hook", HOOKS, ids=["python", "native"])
@pytest.mark.parametrize("closed", [0, 1, 2])
@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "in a thread"])
def test_one_closed_by_an_earlier_hook_fires_no_more(
    model: Model, kind: str, hook: Any, closed: int, *, elsewhere: bool
) -> None:
    with owners(model, kind, hook, 3) as three, contextlib.ExitStack() as entered:
        close = three[closed].close
        entered.enter_context(
            fh.register(
                model,
                "a",
                lambda *_: in_thread(close) if elsewhere else close() and None,
                priority=1,
            )
        )
        for each in three:
            entered.enter_context(each)
        assert model(IDS).flatten().tolist() == [2.0] * 3


@pytest.mark.filterwarnings("ignore::ferrohook.errors.NeverFiredWarning")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("closed", [0, 1, 2])
def test_one_that_closes_another_between_two_turns_of_a_hook(
    model: Model, kind: str, closed: int
) -> None:
    turns: list[int] = []
    three: list[Any] = []

    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        del module, args
        turns.append(1)
        if len(turns) == 2:
            three[closed].close()
        return output + 1

    with owners(model, kind, hook, 3) as made, contextlib.ExitStack() as entered:
        three[:] = made
        for each in made:
            entered.enter_context(each)
        # The hook of the second closes: the first has had its turn, the third not yet.
        expected = 2.0 if closed == 2 else 3.0
        assert model(IDS).flatten().tolist() == [expected] * 3


@pytest.mark.parametrize("kind", ["scope", "request"])
def test_backward_hooks_of_a_closed_owner_are_not_started(model: Model, kind: str) -> None:
    calls: list[str] = []

    def hook(module: nn.Module, grad_input: Any, grad_output: Any) -> None:
        del module, grad_input, grad_output
        calls.append("fired")

    with contextlib.ExitStack() as entered:
        if kind == "scope":
            two = [fh.scope(), fh.scope()]
            for scope in two:
                fh.register(model, "a", hook, phase="backward", scope=scope)
        else:
            plan = fh.Plan(fh.on("a", hook, phase="backward"))
            prepared = entered.enter_context(plan.prepare(model))
            two = [prepared.open(), prepared.open()]
        for each in two:
            entered.enter_context(each)
        output = model(IDS).sum()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", fh.errors.NeverFiredWarning)
            two[0].close()
        output.backward()
    assert calls == ["fired"]


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_is_noted_with_its_owner_alone(model: Model, kind: str) -> None:
    failed: list[int] = []

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        del module, args, output
        failed.append(1)
        if len(failed) == 2:
            message = "the second"
            raise ValueError(message)

    with owners(model, kind, hook, 3) as three:
        with contextlib.ExitStack() as entered:
            for each in three:
                entered.enter_context(each)
            with pytest.raises(ValueError, match="the second"):
                model(IDS)
        assert [str(each.error) for each in three] == ["None", "the second", "None"]

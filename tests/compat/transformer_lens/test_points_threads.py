"""One model with hook points in many threads and tasks."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import torch

from support.numbers import close
from support.points import CALLS, NAMES, THREADS, WIDTH, Model, adding, zero
from support.threads import in_threads

if TYPE_CHECKING:
    from ferrohook.compat.transformer_lens import HookPoint


def test_hooks_of_four_threads_are_isolated(switch_often: None) -> None:
    model, x = Model(), torch.ones(1, 1, WIDTH)
    wrong: list[Any] = []
    alone = [model.run_with_hooks(x, fwd_hooks=[("hook_embed", adding(n))]) for n in range(THREADS)]

    def work(number: int) -> None:
        for _ in range(CALLS):
            seen: list[Any] = []
            out = model.run_with_hooks(
                x,
                fwd_hooks=[
                    ("hook_embed", adding(number)),
                    ("hook_out", lambda tensor, hook, seen=seen: seen.append(number)),
                ],
            )
            if not torch.equal(out, alone[number]) or seen != [number]:
                wrong.append(number)

    in_threads(THREADS, work)
    assert wrong == []
    assert model.list_hooks() == {}
    assert model.context_level == 0


def test_threads_that_ablate_cache_and_observe_are_isolated(switch_often: None) -> None:
    # Faults counted on TransformerLens: calls with another thread's hooks, wrong outputs of clean
    # calls, foreign activations in caches, and leaked hooks.
    model, x = Model(), torch.ones(1, 1, WIDTH)
    clean = model(x)
    wrong: list[str] = []

    def expect(right: bool, what: str) -> None:
        if not right:
            wrong.append(what)

    def ablate(number: int) -> None:
        def mine(tensor: torch.Tensor, hook: HookPoint) -> torch.Tensor:
            expect(threading.get_ident() == thread, "fired in another thread")
            return tensor * 0

        thread = threading.get_ident()
        for _ in range(CALLS):
            with model.hooks([("hook_embed", mine)]), model.hooks([("hook_out", mine)]):
                expect(model(x).item() == 0, "own hooks missing")

    def look(number: int) -> None:
        for _ in range(CALLS):
            expect(torch.equal(model(x), clean), "another's output")

    def cache(number: int) -> None:
        mine = torch.full((1, 1, WIDTH), float(number))
        for _ in range(CALLS):
            _, kept = model.run_with_cache(mine)
            expect(torch.equal(kept["hook_embed"], mine), "another's activations")
            expect(list(kept) == NAMES, "others' names")

    roles = (ablate, look, cache, cache)
    in_threads(len(roles), lambda number: roles[number](number))
    assert wrong == []
    assert model.list_hooks() == {}
    assert not any(point.has_hooks() for point in model.hook_points())


def test_hooks_of_tasks_are_isolated(model: Model, x: torch.Tensor) -> None:
    clean = model(x)

    async def task(number: int) -> None:
        for _ in range(10):
            with model.hooks([("hook_out", adding(number))]):
                await asyncio.sleep(0)
                assert close(model(x), clean + number * x.numel())
                assert torch.equal(await asyncio.to_thread(model, x), model(x))
                assert model.context_level == 1
            await asyncio.sleep(0)
            assert torch.equal(model(x), clean)

    async def run() -> None:
        await asyncio.gather(*(task(number) for number in range(1, 6)))

    asyncio.run(run())


def test_hooks_without_reset_stay_in_their_thread(model: Model, x: torch.Tensor) -> None:
    outs: dict[int, torch.Tensor] = {}

    def work(number: int) -> None:
        if number:
            model.run_with_hooks(x, fwd_hooks=[("hook_out", zero)], reset_hooks_end=False)
        outs[number] = model(x)

    in_threads(2, work)
    assert outs[1].item() == 0
    assert torch.equal(outs[0], model(x))

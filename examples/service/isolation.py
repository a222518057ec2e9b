"""`check`: requests that the service sends to itself, and how they changed each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

import ferrohook as fh
from ferrohook.service import isolation_check

from .schema import EmbedRequest, Isolation

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from .schema import EmbedAnswer

LAYERS = (0, 2, 5)
HIDDEN = 384


def pairs() -> list[tuple[EmbedRequest, EmbedRequest]]:
    """Requests without an intervention, each with one that has it; texts of all lengths."""
    keep = fh.Plan(fh.keep("encoder.layer.*"))
    found = []
    for number, layer in enumerate(LAYERS):
        texts = ["word " * (1 + 7 * layer), "a longer word " * (1 + layer)][: 1 + number % 2]
        hooks = (
            fh.Add(torch.linspace(-1, 1, HIDDEN) * (layer + 1)),
            fh.Scale(0.5),
            fh.Zero(),
        )
        steer = fh.Plan(fh.on(f"encoder.layer.{layer}.output", hooks[number]))
        found.append(
            (
                EmbedRequest(texts=texts, plan=keep, reduce=["norm"]),
                EmbedRequest(texts=texts, plan=steer + keep, reduce=["norm"]),
            )
        )
    return found


async def check(embed: Callable[[EmbedRequest], Awaitable[EmbedAnswer]]) -> Isolation:
    """Sends requests that steer and requests that do not, alone and at once."""
    shared = 0

    async def send(request: EmbedRequest) -> list[object]:
        nonlocal shared
        answer = await embed(request)
        shared = max(shared, answer["shared"])
        return [answer["embeddings"], answer["captures"]]

    report = await isolation_check(send, pairs())
    return Isolation(
        requests=report.requests,
        shared=shared,
        difference=report.difference,
        leaks=[
            f"{'steered' if leak.steered else 'plain'} request {leak.pair}: {leak.difference:g}"
            for leak in report.leaks
        ],
    )

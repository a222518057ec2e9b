"""Values of gates that a client reads along, against what their plan keeps."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import torch

from ferrohook.client import AsyncClient

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ferrohook.client import Generated, TextChunk


def read_along(
    url: str, asked: Sequence[tuple[Any, Any]], options: dict[str, Any], **client: Any
) -> list[tuple[list[TextChunk], Generated]]:
    """Streams the answers to prompts with plans, all at once; returns them with their parts."""

    async def one(each: AsyncClient, prompt: Any, plan: Any) -> tuple[list[TextChunk], Generated]:
        async with each.stream(prompt, plan, **options) as stream:
            return [chunk async for chunk in stream.chunks()], stream.generated

    async def run() -> list[tuple[list[TextChunk], Generated]]:
        async with AsyncClient(url, **client) as each:
            return await asyncio.gather(*(one(each, *it) for it in asked))

    return asyncio.run(run())


def check_chunks(
    chunks: Sequence[TextChunk], found: Generated, gates: Sequence[str], prompt: int = 0
) -> None:
    """Asserts that each value came once, with the text, and is the one that was kept.

    `prompt`: tokens of the prompt, if they are known. A token of the text is a word.
    """
    assert "".join(chunk.text for chunk in chunks) == found.text
    assert {name for chunk in chunks for name in chunk.gates} == {*gates}
    for gate in gates:
        words = values_so_far = 0
        for chunk in chunks:
            words += len(chunk.text.split())
            values_so_far += len(chunk.gates.get(gate, ()))
            assert not words or values_so_far >= prompt + words - 1
        parts = [chunk for chunk in chunks if gate in chunk.gates]
        positions = torch.cat([it.positions[gate] for it in parts])
        assert positions.tolist() == found.positions[f"@gate.{gate}"].tolist()
        values = torch.cat([it.gates[gate] for it in parts])
        kept = found.acts[f"@gate.{gate}"]
        torch.testing.assert_close(values, kept, rtol=0, atol=0, equal_nan=True)

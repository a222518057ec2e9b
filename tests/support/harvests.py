"""Prompts for `fh.collect` with an engine, and what its store must hold of them."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import torch

import ferrohook as fh
from support.engines import Job
from support.serving import LAYERS, VOCABULARY

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

NAMES = [*(f"model.layers.{layer}" for layer in range(LAYERS)), "model.embed_tokens"]
PENDING = 2**17
"""Bytes, of which a prompt may have more than a batch."""
Rows = dict[int, dict[str, torch.Tensor]]


def prompts_of(seed: int, number: int = 40) -> list[list[int]]:
    """Random prompts; some share a prefix, some run in chunks."""
    rng = random.Random(seed)  # noqa: S311 (tests)
    shared = [rng.randrange(3, VOCABULARY) for _ in range(70)]
    return [
        [*shared[: rng.choice([0, 0, 40, 70])], *(rng.randrange(3, VOCABULARY) for _ in range(it))]
        for it in (rng.choice([1, 2, 9, 30, 90]) for _ in range(number))
    ]


def collect(engine: Any, prompts: Any, folder: Path, what: Any = NAMES, **options: Any) -> Any:
    """Collects into a folder."""
    with fh.data.LocalStore(folder, max_pending=PENDING) as store:
        return fh.collect(engine, prompts, what, store, **options)


def rows_in(folder: Path, names: Sequence[str] = NAMES, value: str = "output") -> Rows:
    """Rows of each prompt in a store, in order of position; fails if one is there twice."""
    found: Rows = {}
    store = fh.data.LocalStore(folder, read_only=True)
    assert not store.verify("run")
    for batch in store.completed("run"):
        described = store.get("run", batch, "@rows")
        for text in described["text"].unique().tolist():
            assert text not in found, f"prompt {text} is stored twice"
            mine = described["text"] == text
            found[text] = {name: described[name][mine] for name in ("token", "position")}
            for name in names:
                found[text][name] = store.get("run", batch, name)[value][mine]
    return found


def check(
    found: Rows,
    model: Any,
    prompts: list[list[int]],
    texts: Sequence[Sequence[int]] | None = None,
    **job: Any,
) -> None:
    """Asserts that each prompt, with its text if it has one, has the rows that it has alone."""
    for number, prompt in enumerate(prompts):
        one = Job(prompt, kept=tuple(NAMES), **job)
        text = [0] if texts is None else texts[number]
        _, alone = one.alone(model, text)
        if not alone:
            assert number not in found
            continue
        mine, ids = found.pop(number), [*prompt, *text]
        assert mine["token"].tolist() == [ids[it] for it in mine["position"].tolist()]
        for name, right in alone.items():
            scale = 1e-3 * float(right.abs().max())
            torch.testing.assert_close(mine[name], right, rtol=1e-3, atol=scale)
    assert not found


def files_in(folder: Path) -> dict[str, bytes]:
    """Files of a store, without its lock."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}

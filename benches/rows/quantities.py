"""Names of quantities: their cost in a call, and the time of looking at a model."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

import ferrohook as fh
from benches.harness import Group, Row, Sampler, expect, one_thread
from benches.rows.models import llama

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

BLOCKS = 22
"""A Llama of so many blocks has about 300 modules."""
NANOSECONDS = 1e9
MILLISECONDS = 1e3


def large_llama() -> Any:
    """Makes a Llama of about 300 modules."""
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415 (an optional group)

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=BLOCKS,
        num_attention_heads=4,
        vocab_size=512,
    )
    return LlamaForCausalLM(config).eval()


def captured(model: Any, ids: torch.Tensor, what: str) -> Callable[[], float]:
    """Makes the call that captures, reads all of it and returns its sum."""

    def call() -> float:
        with torch.no_grad(), fh.capture(model, what) as acts:
            model(ids)
        return float(sum(acts[name].sum() for name in acts))

    return call


def by_name_and_path() -> dict[str, Sampler]:
    """The same captures by the names of quantities and by paths of modules."""
    model, ids = llama()
    by_name, by_path = captured(model, ids, "@resid_post.*"), captured(model, ids, "layers.*")
    expect(by_name() == by_path(), "the same sum of activations")
    return {"captures by @resid_post.*": calls(by_name), "captures by path": calls(by_path)}


def points_of_another() -> dict[str, Sampler]:
    """A model while the attention of another one is captured, which changes how both are called."""
    model, ids = llama()
    other, _ = llama()
    expected = model(ids)[0]

    def call() -> None:
        with torch.no_grad():
            model(ids)

    def used() -> AbstractContextManager[object]:
        scope = fh.scope()
        fh.register(other, "@z.*", lambda *_: None, scope=scope)
        return scope

    with used():
        expect(torch.equal(model(ids)[0], expected), "the model's output")
    return {
        "small Llama, another's attention is hooked": calls(call, within=used),
        "small Llama, nothing hooked": calls(call),
    }


def calls(
    call: Callable[[], object],
    *,
    per: float = NANOSECONDS,
    within: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Sampler:
    """Samples the mean time of a call, in `per` a second."""

    def sample(seconds: float) -> float:
        with one_thread(), within():
            start, count = time.perf_counter(), 0
            while count < 3 or time.perf_counter() - start < seconds:  # noqa: PLR2004 (calls)
                call()
                count += 1
            return (time.perf_counter() - start) / count * per

    return sample


def looking() -> dict[str, Sampler]:
    """Looks at a model of 300 modules, against its forward of as many tokens."""
    model = large_llama()
    modules = len([*model.modules()])
    expect(modules >= 290, f"about 300 modules, not {modules}")  # noqa: PLR2004 (some)
    ids = torch.arange(14).reshape(2, 7)

    def look() -> None:
        table = fh.quantities(model, input_ids=ids)
        expect(f"@resid_post.{BLOCKS - 1}" in table, "the stream of the last block")

    def forward() -> None:
        with torch.no_grad():
            model(ids)

    return {
        "a look at 300 modules": calls(look, per=MILLISECONDS),
        "a forward of 14 tokens": calls(forward, per=MILLISECONDS),
    }


GROUPS = [
    Group(
        name="captures by names of quantities",
        setup=by_name_and_path,
        rows=[Row(name="captures by @resid_post.*", over="captures by path", bar=1.02)],
        needs="transformers",
    ),
    Group(
        name="attention points that nobody uses",
        setup=points_of_another,
        rows=[
            Row(
                name="small Llama, another's attention is hooked",
                over="small Llama, nothing hooked",
                bar=1.01,
            )
        ],
        needs="transformers",
    ),
    Group(
        name="looking at a model",
        setup=looking,
        rows=[
            Row(
                name="a look at 300 modules",
                over="a forward of 14 tokens",
                bar=3_000,
                absolute=True,
            )
        ],
        unit="ms",
        needs="transformers",
    ),
]

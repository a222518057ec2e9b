"""Models whose texts repeat themselves, their drafters, and requests that are drafted for."""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

import ferrohook as fh
from support.engine_scenes import Given
from support.engines import Change, Gated, Job
from support.serving import EOS, LAYERS, VOCABULARY, WIDTH, save_model

if TYPE_CHECKING:
    from pathlib import Path

WORDS = 12
"""Tokens of a text, at most: so few that it repeats itself."""
DRAFTS = 4
METHODS = ("draft_model", "eagle", "ngram", "suffix")


def save_repeating_model(folder: Path, kind: str = "llama") -> Any:
    """Saves a random model that repeats itself, a Llama with its drafters; returns it."""
    model = save_model(kind, folder)
    model.lm_head.weight[WORDS:] = 0
    model.lm_head.weight[EOS] /= 2
    model.save_pretrained(folder)
    if kind != "llama":
        return model
    own = save_model("llama", folder / "eagle", num_hidden_layers=1).state_dict()
    weights = {
        name.removeprefix("model."): weight
        for name, weight in own.items()
        if ".layers." in name and "input_layernorm" not in name
    }
    # It takes embeddings and hidden states.
    weights["fc.weight"] = torch.eye(WIDTH, 2 * WIDTH)
    save_file(weights, folder / "eagle" / "model.safetensors", metadata={"format": "pt"})
    return model


def speculative_config(method: str, folder: Path) -> dict[str, Any]:
    """Settings of a method; a model that drafts for itself is right unless a plan changes it."""
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": DRAFTS}
    if method == "suffix":
        if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
            # vLLM refuses its start: "Model Runner V2 does not yet support: speculative method".
            pytest.skip("the model runner V2 has no suffix drafts")
        pytest.importorskip("arctic_inference", reason="suffix needs arctic-inference")
        return config
    if method == "ngram":
        return config | {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
    return config | {"model": str(folder / "eagle" if method == "eagle" else folder)}


class DraftCount:
    """Count of drafts and preemptions in an engine of this process, from now on.

    Args:
        llm: the engine.
        patch: undoes the counting.
    """

    def __init__(self, llm: Any, patch: pytest.MonkeyPatch) -> None:
        self.accepted = self.rejected = self.preempted = 0
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        count, preempt = scheduler.make_spec_decoding_stats, scheduler._preempt_request

        def counted(*args: Any, **named: Any) -> Any:
            self.accepted += named["num_accepted_tokens"]
            self.rejected += named["num_draft_tokens"] - named["num_accepted_tokens"]
            return count(*args, **named)

        def preempted(*args: Any, **named: Any) -> Any:
            self.preempted += 1
            return preempt(*args, **named)

        patch.setattr(scheduler, "make_spec_decoding_stats", counted)
        patch.setattr(scheduler, "_preempt_request", preempted)

    def __repr__(self) -> str:
        return (
            f"{self.accepted} drafts accepted, {self.rejected} rejected, "
            f"{self.preempted} preemptions"
        )


def drafted_jobs(number: int, seed: int) -> list[Job]:
    """Requests with repetitive prompts; a third have no plan, and half of the plans have a gate."""
    rng = random.Random(seed)  # noqa: S311 (tests)
    generator = torch.Generator().manual_seed(seed)

    def prompt() -> list[int]:
        words = [rng.randrange(2, WORDS if rng.random() < 0.7 else VOCABULARY) for _ in range(9)]
        return (words * 9)[: rng.randint(1, 75)]

    def change() -> Change:
        vector = torch.randn(WIDTH, generator=generator)
        hooks = [fh.Add(vector), fh.Add(vector, scale=0.3), fh.Scale(0.9), fh.Ablate(vector)]
        ats: list[Any] = [None, "prompt", "generated", "last_prompt", 0, -1, slice(-3, None)]
        return Change(rng.randrange(LAYERS), rng.choice(hooks), rng.choice([*ats, slice(9, 40)]))

    names = [*(f"model.layers.{layer}" for layer in range(LAYERS)), "model.norm"]
    names += ["model.embed_tokens", "model.layers.1.mlp"]
    prompts = [prompt() for _ in range(3)]
    jobs = []
    for _ in range(number):
        tokens = rng.choice(prompts) if rng.random() < 1 / 3 else prompt()
        if rng.random() < 1 / 3:
            jobs.append(Job(tokens))
            continue
        gated = Gated.drawn(rng, generator, LAYERS, WIDTH) if rng.random() < 1 / 2 else None
        changes = tuple(change() for _ in range(rng.choice([0, 1, 1, 2])))
        kept = tuple(rng.sample(names, rng.randint(0 if changes or gated else 1, 2)))
        at = rng.choice([None, None, "generated", -1, slice(-5, None)])
        jobs.append(Job(tokens, changes, kept, gated=gated, kept_at=at))
    return jobs


@torch.no_grad()
def asked_alone(model: Any, prompt: list[int], plan: fh.Plan | None, new_tokens: int) -> Given:
    """Serves a request of `random_stops` in transformers: its text, and what its gate reads."""
    assert plan is not None
    ids = torch.tensor([prompt])
    options: dict[str, Any] = {"do_sample": False, "eos_token_id": EOS, "pad_token_id": 0}
    text = model.generate(ids, max_new_tokens=new_tokens, **options)[0, len(prompt) :].tolist()
    rows: list[torch.Tensor] = []
    hook = model.get_submodule("model.layers.1").register_forward_hook(
        lambda _module, _args, output: rows.append(output[0])
    )
    model(torch.tensor([[*prompt, *text][:-1]]), use_cache=False)
    hook.remove()
    gate: Any = plan.entries[0]
    values = rows[0] @ gate.gate.reading.direction
    name = f"@gate.{gate.gate.name}"
    return Given(text, {name: values}, {name: torch.arange(len(values))}, 0)

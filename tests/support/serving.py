"""Models for engines of other packages, and requests that arrive there at random."""

from __future__ import annotations

import dataclasses
import random
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    AutoModelForCausalLM,
    Glm4MoeConfig,
    LlamaConfig,
    MixtralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

import ferrohook as fh
from support.engines import Change, Gated, Job
from support.transcoding import Transcoded

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

WIDTH = 64
LAYERS = 4
VOCABULARY = 512
EOS = 1
CONFIGS = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "moe": Qwen2MoeConfig,
    "mixtral": MixtralConfig,
    "qwen3_moe": Qwen3MoeConfig,
    "glm4_moe": Glm4MoeConfig,
}
MIXTURES: dict[str, dict[str, Any]] = {
    "moe": {"num_experts": 4, "shared_expert_intermediate_size": 64, "moe_intermediate_size": 64},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 64, "head_dim": 32},
    "glm4_moe": {
        "n_routed_experts": 4,
        "moe_intermediate_size": 64,
        "head_dim": 32,
        "first_k_dense_replace": 0,
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 2.5,
    },
}
"""Settings of those with experts."""


def save_model(kind: str, folder: Path, *, seed: int = 0, **sizes: int) -> Any:
    """Saves a random model and a tokenizer of words w0, w1, ...; returns the model."""
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 128,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,  # heads of 32 are the least that vLLM has for a CPU
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "initializer_range": 0.2,  # logits that differ, so that a tie is no accident of rounding
    }
    if kind in MIXTURES:
        settings |= MIXTURES[kind] | {"num_experts_per_tok": 2}
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind](**(settings | sizes)))
    model.eval().requires_grad_(False).save_pretrained(folder)
    words = WordLevel({f"w{number}": number for number in range(VOCABULARY)}, unk_token="w0")  # noqa: S106 (no password)
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = WhitespaceSplit()
    named = {"unk_token": "w0", "eos_token": "w1", "pad_token": "w2"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(folder)
    return model


@dataclasses.dataclass
class Answer:
    """An answer as `Job.check` takes it."""

    generated_tokens: list[int]
    acts: dict[str, torch.Tensor]
    error: str | None = None
    hook_error: BaseException | None = None


def random_jobs(
    number: int, seed: int, longest: int = 60, *, gates: float = 0.0, transcoders: float = 0.0
) -> list[Job]:
    """Requests of which a third have no plan; every other begins with one of three prefixes.

    `gates`: share of the plans that have a gate; `transcoders`: that change features of one.
    """
    rng = random.Random(seed)  # noqa: S311 (tests)
    generator = torch.Generator().manual_seed(seed)

    def tokens(most: int) -> list[int]:
        return [rng.randrange(3, VOCABULARY) for _ in range(rng.randint(1, most))]

    def change() -> Change:
        vector = torch.randn(WIDTH, generator=generator)
        hooks = [fh.Add(vector, scale=2.0), fh.Add(vector), fh.Scale(0.5), fh.Ablate(vector)]
        hooks.append(fh.Zero())
        at = rng.choice([None, None, "prompt", "generated", "last_prompt", 0, 3, slice(2, 9)])
        return Change(rng.randrange(LAYERS), rng.choice(hooks), at)

    prefixes = [tokens(longest) + tokens(longest) for _ in range(3)]
    plans = [tuple(change() for _ in range(rng.randint(1, 2))) for _ in range(4)]
    jobs = []
    for index in range(number):
        prompt = [*(rng.choice(prefixes) if index % 2 else []), *tokens(longest // 2)]
        if rng.random() < 1 / 3:
            jobs.append(Job(prompt))
            continue
        changes: tuple[Change, ...] = ()
        if rng.random() < 2 / 3:  # half of them a plan that others have too
            changes = rng.choice(plans) if rng.random() < 1 / 2 else (change(),)
        names = [*(f"model.layers.{layer}" for layer in range(LAYERS)), "model.embed_tokens"]
        names += ["model.layers.1.mlp", "model.norm"]
        kept = tuple(rng.sample(names, rng.randint(0 if changes else 1, 3)))
        gated = Gated.drawn(rng, generator, LAYERS, WIDTH) if rng.random() < gates else None
        transcoded = None
        if transcoders and rng.random() < transcoders:
            transcoded = Transcoded.drawn(rng, LAYERS, WIDTH, gated)
        jobs.append(Job(prompt, changes, kept, gated=gated, transcoded=transcoded))
    return jobs


class Arrivals:
    """Requests that arrive between the steps of an engine at random, and are cancelled at random.

    Args:
        jobs: the requests.
        seed: of the random choices.
        aborted: probability with which a step begins by a cancellation.
    """

    def __init__(self, jobs: Sequence[Job], seed: int, aborted: float = 0.0) -> None:
        self._rng = random.Random(seed)  # noqa: S311 (tests)
        self._waiting = [*enumerate(jobs)]
        self._aborted = aborted
        self.running: dict[str, int] = {}
        """Numbers of the requests that arrived and were not cancelled, by id."""

    @property
    def waiting(self) -> bool:
        """True if requests are still to arrive."""
        return bool(self._waiting)

    def step(self) -> tuple[dict[str, Job], str | None]:
        """Returns the requests that arrive now by id, and the id of one that is cancelled."""
        arrived = {}
        for _ in range(min(len(self._waiting), self._rng.choice([0, 0, 1, 3, 8]))):
            number, job = self._waiting.pop(0)
            # Ids that are prefixes of each other.
            name = "job" + "-1" * (number % 3) + f"-{number}"
            arrived[name] = job
            self.running[name] = number
        cancelled = None
        if self.running and self._rng.random() < self._aborted:
            cancelled = self._rng.choice(sorted(self.running))
            del self.running[cancelled]
        return arrived, cancelled


def wrong_answers(
    model: Any, jobs: Sequence[Job], answers: Mapping[int, Answer], new_tokens: int
) -> list[tuple[Job, str]]:
    """Returns the jobs whose answers differ from their answers alone."""
    found = []
    for number, given in answers.items():
        try:
            jobs[number].check(model, given, new_tokens)
        except AssertionError as error:
            found.append((jobs[number], str(error)))
    return found

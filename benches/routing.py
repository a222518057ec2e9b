"""Differences between vLLM and transformers on one mixture of experts, without and with replay.

Run by the interpreter of `make vllm`: `.venv-vllm/bin/python -m benches.routing`. vLLM writes
texts; transformers computes them again, as a trainer does. Then the other way round.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

import ferrohook as fh

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    Compute = Callable[[list[list[int]], list[fh.Plan]], list["Computed"]]

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 16,
    "num_attention_heads": 4,
    "head_dim": 64,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 128,
}
TEXTS, PROMPT, NEW = 32, 16, 64
SCALE: Any = 0.13
"""Standard deviation of the weights: larger ones make the engines differ more."""
RATIO = 2.0
KEPT = fh.keep(["@experts.*", "@final_norm"])


class Computed(NamedTuple):
    """A text as one engine computes it."""

    experts: Tensor
    """(tokens, layers, chosen)."""
    logprobs: Tensor
    """Of all tokens after each one but the last, (tokens - 1, vocabulary)."""
    tokens: Tensor

    @property
    def chosen(self) -> Tensor:
        """Log-probabilities of the text's own tokens."""
        return self.logprobs.gather(-1, self.tokens[1:, None])[:, 0]


def main(texts: int = TEXTS) -> None:
    """Prints the table."""
    from support.serving import VOCABULARY, save_model  # noqa: PLC0415 (tests' own)
    from support.vllm_engine import sampling, start, stop  # noqa: PLC0415 (reads settings)

    folder = Path(tempfile.mkdtemp())
    model = save_model("qwen3_moe", folder, **SIZES, initializer_range=SCALE).to(torch.bfloat16)
    llm = start(folder, dtype="bfloat16", max_num_seqs=64, max_num_batched_tokens=2048)
    prompts = torch.randint(3, VOCABULARY, (texts, PROMPT)).tolist()
    own = {"temperature": 1.0, "ignore_eos": True}
    params = [sampling(None, NEW, seed=seed, **own) for seed in range(texts)]
    outputs = llm.generate([{"prompt_token_ids": it} for it in prompts], params, use_tqdm=False)
    written = [
        [*prompt, *it.outputs[0].token_ids] for prompt, it in zip(prompts, outputs, strict=True)
    ]

    def in_vllm(tokens: list[list[int]], plans: list[fh.Plan]) -> list[Computed]:
        from ferrohook.engines.vllm import activations  # noqa: PLC0415

        asked = [sampling(plan, 1, ignore_eos=True) for plan in plans]
        outputs = llm.generate([{"prompt_token_ids": it} for it in tokens], asked, use_tqdm=False)
        acts = [activations(llm, it).acts for it in outputs]
        return [computed(model, text, it) for text, it in zip(tokens, acts, strict=True)]

    def in_transformers(tokens: list[list[int]], plans: list[fh.Plan]) -> list[Computed]:
        with torch.no_grad():
            acts = [
                fh.run(model, torch.tensor([text]), plan=plan).acts
                for text, plan in zip(tokens, plans, strict=True)
            ]
        return [computed(model, text, it) for text, it in zip(tokens, acts, strict=True)]

    engines: dict[str, Compute] = {"vLLM": in_vllm, "transformers": in_transformers}
    print(f"{texts} texts of {PROMPT + NEW} tokens, bfloat16; {SIZES}")
    print(f"| | decisions | tokens | KL | ratio above {RATIO:g} |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for name, other in (("vLLM", "transformers"), ("transformers", "vLLM")):
        first = engines[name](written, [fh.Plan(KEPT)] * texts)
        for title, plans in (
            ("", [fh.Plan(KEPT)] * texts),
            (" with replay", [fh.Plan(fh.replay(it.experts[:-1]), KEPT) for it in first]),
        ):
            print_row(f"{name}, then {other}{title}", first, engines[other](written, plans))
    stop(llm)


def computed(model: Any, tokens: Sequence[int], acts: Any) -> Computed:
    """Returns a text from the captures of an engine; both engines' logits by one product."""
    blocks = range(SIZES["num_hidden_layers"])
    experts = torch.stack([acts[f"@experts.{block}"].long() for block in blocks], dim=1)
    states = acts["@final_norm"].reshape(len(tokens), -1).float()[:-1]
    logprobs = (states @ model.lm_head.weight.detach().float().T).log_softmax(-1)
    return Computed(experts, logprobs, torch.tensor([*tokens]))


def print_row(title: str, first: Sequence[Computed], second: Sequence[Computed]) -> None:
    """Prints how far the second engine is from the first."""
    pairs = [*zip(first, second, strict=True)]
    differ = torch.cat(
        [
            (one.experts.sort().values != two.experts.sort().values).any(-1)[:-1]
            for one, two in pairs
        ]
    )
    divergence = torch.cat(
        [(one.logprobs.exp() * (one.logprobs - two.logprobs)).sum(-1) for one, two in pairs]
    )
    ratios = torch.cat([(one.chosen - two.chosen).abs().exp() for one, two in pairs])
    routers, tokens, far = (it.float().mean() for it in (differ, differ.any(-1), ratios > RATIO))
    print(f"| {title} | {routers:.1%} | {tokens:.1%} | {divergence.mean():.1e} | {far:.2%} |")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

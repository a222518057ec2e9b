"""Plans on models with adapters: each answer equals the answer of the merged weights."""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

import pytest
import safetensors.torch
import torch

pytest.importorskip("vllm", reason="needs vLLM: run `make vllm`")

import support.engines
from support.engine_scenes import PROMPT, steering
from support.engines import Job
from support.vllm_engine import EOS, LAYERS, Answer, sampling, start, stop

if TYPE_CHECKING:
    from pathlib import Path

RANK, NEW = 8, 8
ADAPTED = {"self_attn.o_proj", "mlp.down_proj", "self_attn.v_proj"}


def save_adapter(model: Any, folder: Path) -> Any:
    """Saves an adapter of random weights; returns the model with these merged."""
    merged, weights = copy.deepcopy(model), {}
    torch.manual_seed(1)
    for layer in range(LAYERS):
        for name in sorted(ADAPTED):
            path = f"model.layers.{layer}.{name}"
            weight = merged.get_submodule(path).weight
            down = torch.randn(RANK, weight.shape[1]) / 8
            up = torch.randn(weight.shape[0], RANK) / 8
            weight += up @ down
            weights[f"base_model.model.{path}.lora_A.weight"] = down
            weights[f"base_model.model.{path}.lora_B.weight"] = up
    safetensors.torch.save_file(weights, folder / "adapter_model.safetensors")
    targets = [name.rpartition(".")[2] for name in ADAPTED]
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return merged


def test_plans_on_a_model_with_an_adapter(
    models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Installing ferrohook never stops an engine with adapters; rows of each are its own."""
    from vllm.lora.request import LoRARequest  # noqa: PLC0415

    from ferrohook.engines import vllm  # noqa: PLC0415

    monkeypatch.setattr(support.engines, "EOS", EOS)
    folder, model = models["llama"]
    merged = save_adapter(model, tmp_path)
    lora = LoRARequest("adapter", 1, str(tmp_path))
    kept = ("model.layers.1.self_attn.o_proj", "model.layers.2.mlp.down_proj", "model.layers.3")
    jobs = [Job(PROMPT[:30]), steering(), Job(PROMPT[:20], steering("generated").changes, kept)]
    llm = start(folder, enable_lora=True, max_lora_rank=RANK)
    try:
        engine = llm.llm_engine
        # One after the other: without ferrohook, too, vLLM on a CPU gives all requests of a step
        # the adapter of one.
        for adapter, alone in ((None, model), (lora, merged)) * 2:
            for number, job in enumerate(jobs):
                prompt, params = {"prompt_token_ids": job.prompt}, sampling(job.plan, NEW)
                engine.add_request(str(number), prompt, params, lora_request=adapter)
            ended = 0
            while engine.has_unfinished_requests():
                for output in filter(lambda each: each.finished, engine.step()):
                    job = jobs[int(output.request_id)]
                    acts = vllm.activations(llm, output).acts if job.kept else {}
                    job.check(alone, Answer([*output.outputs[0].token_ids], acts), NEW)
                    ended += 1
            assert ended == len(jobs)
    finally:
        stop(llm)

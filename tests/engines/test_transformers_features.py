"""Requests that change and read features of a dictionary in transformers' continuous batching."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

import ferrohook as fh
from support.dictionaries import D_SAE, dictionary_of
from support.engines import WIDTH, attached_to, tiny_llama

NEW, WAIT = 6, 100
pytestmark = [
    pytest.mark.filterwarnings("ignore::ferrohook.errors.NeverFiredWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # names of older versions
]


def test_requests_with_features_answer_as_they_do_alone() -> None:
    rng = random.Random(0)  # noqa: S311 (a test)
    torch.manual_seed(0)
    model = tiny_llama()
    # Not top-k: which features compete may depend on the rounding of a row.
    own = {
        kind: dictionary_of(kind, width=WIDTH, normalize_activations="layer_norm")
        for kind in ("relu", "groupmax")
    }
    transcoder = dictionary_of("relu", width=WIDTH, transcoder=True, reads="@mlp_in.1")
    jobs: list[tuple[list[int], fh.Plan]] = []
    for number in range(12):
        dictionary = own["relu" if number % 3 else "groupmax"]
        hook = fh.Feature(dictionary, rng.sample(range(D_SAE), 3), set=rng.uniform(2, 6))
        at: Any = rng.choice([None, "generated", "prompt", slice(1, 4)])
        plan = fh.Plan(
            fh.gate("g", "model.layers.0", fh.FeatureActivation(own["relu"], rng.randrange(D_SAE))),
            fh.on("@resid_post.0", hook, at=at),
            fh.on("@mlp_out.1", fh.Feature(transcoder, rng.randrange(D_SAE), set=9.0), at=at),
            fh.keep("@gate.g"),
            fh.keep("@resid_post.0", label="some", features=own["relu"], index=[1, 7]),
            fh.keep("@resid_post.0", label="top", features=own["groupmax"], top=3),
            fh.keep("@resid_post.1"),
        )
        jobs.append(([rng.randrange(3, 64) for _ in range(rng.randint(2, 20))], plan))
    with attached_to(model, NEW, num_blocks=32, max_batch_tokens=24) as attached:
        for number, (prompt, plan) in enumerate(jobs):
            attached.add_request(prompt, str(number), plan=plan)
        outputs = [attached.get_result(timeout=WAIT) for _ in jobs]
        narrow = fh.Plan(fh.keep("@resid_post.0", features=dictionary_of("relu"), top=2))
        with pytest.raises(fh.HookError, match="reads vectors of width 12, but the output of"):
            attached.add_request([3, 4], "kept", plan=narrow)
        for width, reads, reason in (
            (WIDTH, "model.layers.2.mlp", "layers.2.mlp, which runs later than @mlp_out.1"),
            (12, "model.layers.0.mlp", "vectors of width 12, but model.layers.0.mlp has 32"),
            (WIDTH, "model.layers.0.mlp.experts", "nothing in LlamaForCausalLM matches"),
        ):
            wrong = dictionary_of("relu", 0, width, WIDTH, transcoder=True, reads=reads)
            plan = fh.Plan(fh.on("@mlp_out.1", fh.Feature(wrong, 3, set=1.0)))
            with pytest.raises((fh.HookError, fh.SelectionError), match=reason):
                attached.add_request([3, 4], "wrong", plan=plan)
    for output in outputs:
        prompt, plan = jobs[int(output.request_id)]
        assert output.error is None
        ids = [prompt, *([token] for token in output.generated_tokens[:-1])]
        cache = transformers.DynamicCache()
        features = (dataclasses.replace(it, at=slice(0, None)) for it in plan.entries[-3:])
        keeps = fh.Plan(*plan.entries[:-3], *features)
        with torch.no_grad(), keeps.open(model, prompt=len(prompt)) as request:
            logits = [model(torch.tensor([each]), past_key_values=cache).logits for each in ids]
        best = torch.cat([each[0, -1:] for each in logits])
        chosen = best.gather(1, torch.tensor(output.generated_tokens)[:, None])[:, 0]
        assert (best.amax(1) - chosen).max() <= 1e-3
        for name, found in output.acts.items():
            expected = request.acts[name]
            if name.startswith("top:"):  # of equal values, any feature may come first
                expected = expected[..., 0]
            torch.testing.assert_close(
                (found[..., 0] if name.startswith("top:") else found).reshape(expected.shape),
                expected,
                rtol=1e-3,
                atol=1e-3,
                equal_nan=True,
            )

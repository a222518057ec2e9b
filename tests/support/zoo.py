"""Small models of random weights of each causal language model that transformers has.

Multipliers of configurations are not 1, norms' weights and biases are random: values that
are equal by chance in a fresh model differ here.
"""

from __future__ import annotations

import re
from typing import Any, Final

import pytest
import torch

_SIZES: Final = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "hidden_dim"), 32),
    **dict.fromkeys(("word_embed_proj_dim", "embedding_size"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "inner_dim", "d_inner"), 48),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "dim_ff"), 48),
    **dict.fromkeys(("ffn_hidden_size", "ffn_hidden_dim"), 48),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size"), 24),
    "shared_expert_intermediate_size": 40,
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), 3),
    **dict.fromkeys(("decoder_layers", "encoder_layers", "num_decoder_layers"), 3),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "head_dim"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"), 64),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size"), 8),
    **dict.fromkeys(("chunk_size", "mamba_chunk_size"), 8),
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "vocab_size": 96,
    "image_size": 16,
    "patch_size": 8,
}
_MULTIPLIERS: Final = {
    "embedding_multiplier": 1.7,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.4,
    "logits_scaling": 1.3,
    "logit_scale": 0.6,
}
_HYBRID: Final = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
_OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "bamba": {"mamba_n_heads": 4, "mamba_d_head": 16, "attn_layer_indices": [1]},
    "codegen": {"rotary_dim": 4},
    "bailing_hybrid": _HYBRID,
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    },
    "dots3_note": {"num_key_value_heads": 4, "per_layer_config": {}},
    "dots3_note_text": {"num_key_value_heads": 4, "per_layer_config": {}},
    "ernie4_5_moe": {"moe_k": 2},
    "falcon_h1": {
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "key_multiplier": 0.7,
        "attention_out_multiplier": 0.8,
        "ssm_out_multiplier": 0.6,
        "lm_head_multiplier": 0.9,
    },
    "gemma4_text": {"vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1], [["global"], 1]]},
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": {
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "layer_types": ["mamba", "attention", "mamba"],
    },
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"moe_topk": 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "qwen3_5": {"text_config": _HYBRID},
    "qwen3_5_moe": {"text_config": _HYBRID},
    "qwen3_5_moe_text": _HYBRID,
    "qwen3_5_text": _HYBRID,
    "qwen3_next": _HYBRID,
    "qwen4_exp": {"text_config": _HYBRID},
    "qwen4_exp_text": _HYBRID,
    "reformer": {
        "is_decoder": True,
        "axial_pos_shape": (8, 8),
        "axial_pos_embds_dim": (16, 16),
        "attn_layers": ["local", "local", "local"],
    },
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
    "zamba2": {
        "layer_types": ["mamba", "hybrid", "mamba"],
        "mamba_ngroups": 1,
        "n_mamba_heads": 4,
    },
}
"""Settings that make a type small, beside the sizes."""
MOST_PARAMETERS: Final = 2 * 10**7
IDS: Final = (2, 7)
"""Shape of token ids."""


def make(kind: str, **options: Any) -> Any:
    """Makes a model of a type of transformers' configurations, in eval mode.

    Args:
        kind: name of the type, such as `llama`.
        **options: arguments of its configuration.
    """
    transformers = pytest.importorskip("transformers")
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: PLC0415

    cls: Any = CONFIG_MAPPING[kind]
    chosen = small(cls())
    own = _OPTIONS.get(kind, {}) | options
    merged = {
        name: {**chosen.get(name, {}), **value} if isinstance(value, dict) else value
        for name, value in own.items()
    }
    config = cls(**chosen | merged)
    torch.manual_seed(0)
    with torch.device("meta"):
        size = sum(
            it.numel() for it in transformers.AutoModelForCausalLM.from_config(config).parameters()
        )
    assert size <= MOST_PARAMETERS, f"{kind} has {size:,} parameters"
    return uneven(transformers.AutoModelForCausalLM.from_config(config).eval())


def small(config: Any) -> dict[str, Any]:
    """Returns arguments that make a configuration small, including its parts."""
    found = vars(config)
    changed = {
        name: value
        for name, value in (_SIZES | _MULTIPLIERS).items()
        if (isinstance(found.get(name), int | float) and not isinstance(found[name], bool))
        or (name in {"head_dim", "num_key_value_heads"} and found.get(name, 0) is None)
    }
    if "kv_lora_rank" in changed:
        changed["num_key_value_heads"] = 4
    special = enumerate(("pad_token_id", "bos_token_id", "eos_token_id"))
    changed |= {name: number for number, name in special if name in found}
    for name in getattr(config, "sub_configs", None) or {}:
        part: Any = getattr(config, name, None)
        if hasattr(part, "to_dict"):
            changed[name] = type(part)(**small(part)).to_dict()
    return changed


def uneven(model: Any) -> Any:
    """Makes constant parameters of a model random, and its matrices larger."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_floating_point() or not parameter.numel():
                continue
            if bool((parameter == parameter.flatten()[0]).all()):
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
            elif parameter.dim() > 1:
                parameter.mul_(3.0)
    return model.requires_grad_(requires_grad=False)


def kinds() -> list[str]:
    """Returns the types of configurations that have a causal language model."""
    pytest.importorskip("transformers")
    from transformers.models.auto import modeling_auto  # noqa: PLC0415

    return sorted(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def summary(table: Any) -> dict[str, Any]:
    """Returns the proved quantities: blocks by kind, kinds that can only be read, reasons."""
    proved: dict[str, list[str]] = {}
    for name in table:
        kind, number = _split(name.removeprefix("@"))
        proved.setdefault(kind, []).append(number)
    missing: dict[str, dict[str, list[str]]] = {}
    for name, reason in table.missing.items():
        kind, number = _split(name)
        missing.setdefault(kind, {}).setdefault(_plain(reason), []).append(number)
    return {
        "proved": {kind: " ".join(numbers) for kind, numbers in sorted(proved.items())},
        "read alone": sorted({_split(it[1:])[0] for it in table if not table[it].writable}),
        "missing": {
            kind: {reason: " ".join(numbers) for reason, numbers in reasons.items()}
            for kind, reasons in sorted(missing.items())
        },
    }


def differences(table: Any, other: Any) -> dict[str, str]:
    """Returns the quantities whose places differ in two tables, with the other one's places."""

    def shown(found: Any, name: str) -> str:
        if name not in found:
            return "missing: " + _plain(found.missing.get(name.removeprefix("@"), ""))
        # A multiplier is as exact as the precision.
        place: str = found[name].place.split(" * ")[-1]
        return place if found[name].writable else f"{place}, read alone"

    names = sorted({*table, *other})
    return {name: shown(other, name) for name in names if shown(table, name) != shown(other, name)}


def _plain(reason: str) -> str:
    """Returns a reason without residuals, which are of this machine."""
    return re.sub(r"\d\.\de[-+]\d+", "...", reason)


def _split(name: str) -> tuple[str, str]:
    head, _, last = name.rpartition(".")
    return (head, last) if last.isdigit() else (name, "")


def token_ids(seed: int = 3) -> torch.Tensor:
    """Returns ids that are special in no model."""
    return torch.randint(10, 90, IDS, generator=torch.Generator().manual_seed(seed))

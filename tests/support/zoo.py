"""Small models of random weights of each causal language model that transformers has.

Multipliers of configurations are not 1, norms' weights and biases are random: what is equal by
chance in a fresh model is not equal here.
"""

from __future__ import annotations

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
    config = cls(**small(cls()) | options)
    torch.manual_seed(0)
    with torch.device("meta"):
        size = sum(
            it.numel() for it in transformers.AutoModelForCausalLM.from_config(config).parameters()
        )
    assert size <= MOST_PARAMETERS, f"{kind} has {size:,} parameters"
    return uneven(transformers.AutoModelForCausalLM.from_config(config).eval())


def small(config: Any) -> dict[str, Any]:
    """Returns arguments that make a configuration small, those of its parts included."""
    found = vars(config)
    changed = {
        name: value
        for name, value in (_SIZES | _MULTIPLIERS).items()
        if isinstance(found.get(name), int | float) and not isinstance(found[name], bool)
    }
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


def token_ids(seed: int = 3) -> torch.Tensor:
    """Returns ids that are special in no model."""
    return torch.randint(10, 90, IDS, generator=torch.Generator().manual_seed(seed))

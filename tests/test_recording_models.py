"""Recording: models of transformers, equal to its own recording."""

from __future__ import annotations

import copy
import itertools
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch
from test_recording import FLAGS, LIMIT
from torch import nn

from ferrohook.recording import capture_outputs, merge_with_config_defaults

if TYPE_CHECKING:
    from collections.abc import Iterator

os.environ["HF_HUB_OFFLINE"] = "1"

transformers = pytest.importorskip("transformers")
architectures = pytest.importorskip("test_architectures")


def in_place_of_theirs(forward: Any) -> Any:
    """The forward with our decorators where it has theirs; None where it has none."""
    wrappers = []
    while hasattr(forward, "__wrapped__"):
        wrappers.append(forward)
        forward = forward.__wrapped__
    replaced = False
    for wrapper in reversed(wrappers):
        name = wrapper.__code__.co_qualname
        if name.startswith("capture_outputs."):
            cells = (cell.cell_contents for cell in wrapper.__closure__)
            tie = dict(zip(wrapper.__code__.co_freevars, cells, strict=True))
            forward = capture_outputs(tie_last_hidden_states=tie["tie_last_hidden_states"])(forward)
            replaced = True
        elif name.startswith("merge_with_config_defaults."):
            forward = merge_with_config_defaults(forward)
        elif name.startswith("can_return_tuple."):
            forward = transformers.utils.generic.can_return_tuple(forward)
    return forward if replaced else None


def converted(model: Any) -> Any:
    """A copy whose classes' forwards have our decorators."""
    model = copy.deepcopy(model)
    replaced = 0
    for module in model.modules():
        forward = in_place_of_theirs(type(module).forward)
        if forward is not None:
            module.forward = forward.__get__(module)
            replaced += 1
    assert replaced, "nothing of theirs to compare with"
    return model


def flags_of(model: Any) -> list[str]:
    keys = {key for m in model.modules() for key in getattr(m, "_can_record_outputs", None) or {}}
    return sorted({f"output_{key}" for key in keys} | {"output_attentions"})


WITH_CROSS_ATTENTION = {
    "GPT-2": {"add_cross_attention": True},
    "BERT": {"add_cross_attention": True, "is_decoder": True},
}
RECORDED = [
    "Llama",
    "BERT",
    "GPT-2",
    "T5",
    "CLIP",
    "SAM",
    "Whisper",
    "Mixtral",
    "LLaVA",
    "ViT",
    "ALBERT",
]
QFORMER = architectures.WORDS | {"encoder_hidden_size": 16, "cross_attention_frequency": 1}
TIMES = {
    "prediction_length": 4,
    "context_length": 8,
    "lags_sequence": [1, 2],
    "num_time_features": 1,
}
DECLARED_OTHERWISE = {
    "a class_name": architectures.Architecture(
        "InformerModel",
        "InformerConfig",
        architectures.TWO_STACKS | TIMES | {"encoder_layers": 2},
        lambda: {
            "past_values": torch.randn(2, 10),
            "past_time_features": torch.randn(2, 10, 1),
            "past_observed_mask": torch.ones(2, 10),
            "future_values": torch.randn(2, 4),
            "future_time_features": torch.randn(2, 4, 1),
        },
    ),
    "a layer_name of digits, routers": architectures.Architecture(
        "SwitchTransformersForConditionalGeneration",
        "SwitchTransformersConfig",
        architectures.ARCHITECTURES["T5"].sizes
        | {"num_experts": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
        architectures.texts,
    ),
    "a layer_name of two segments": architectures.Architecture(
        "VJEPA2Model",
        "VJEPA2Config",
        {
            "patch_size": 4,
            "crop_size": 8,
            "frames_per_clip": 2,
            "hidden_size": 24,
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
            "pred_hidden_size": 24,
            "pred_num_attention_heads": 2,
            "pred_num_hidden_layers": 1,
            "pred_num_mask_tokens": 1,
        },
        lambda: {"pixel_values_videos": torch.randn(2, 2, 3, 8, 8)},
    ),
    "a layer_name with a dot": architectures.Architecture(
        "InstructBlipQFormerModel",
        "InstructBlipQFormerConfig",
        QFORMER,
        lambda: {
            "input_ids": torch.arange(3, 13).view(2, 5),
            "query_embeds": torch.randn(2, 3, 16),
            "encoder_hidden_states": torch.randn(2, 4, 16),
        },
    ),
    "no initial hidden state": architectures.Architecture(
        "SegformerModel",
        "SegformerConfig",
        {
            "num_encoder_blocks": 2,
            "depths": [1, 1],
            "sr_ratios": [2, 1],
            "hidden_sizes": [8, 16],
            "patch_sizes": [3, 3],
            "strides": [2, 2],
            "num_attention_heads": [1, 2],
            "mlp_ratios": [2, 2],
        },
        lambda: architectures.image(16),
    ),
    "num_hidden_layers_key": architectures.Architecture(
        "LongcatFlashForCausalLM",
        "LongcatFlashConfig",
        architectures.TOKENS
        | {
            "vocab_size": 40,
            "hidden_size": 16,
            "num_layers": 2,
            "num_attention_heads": 2,
            "ffn_hidden_size": 24,
            "expert_ffn_hidden_size": 8,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 8,
            "head_dim": 4,
            "n_routed_experts": 3,
            "zero_expert_num": 1,
            "moe_topk": 2,
        },
        architectures.text,
    ),
    "a list of two": architectures.Architecture(
        "JetMoeForCausalLM",
        "JetMoeConfig",
        architectures.CAUSAL | {"kv_channels": 8, "num_local_experts": 3, "num_experts_per_tok": 2},
        architectures.text,
    ),
}
"""Ways to declare that the models above have not, each with one of transformers that has it."""


def architecture(name: str) -> tuple[Any, dict[str, Any]]:
    made = (architectures.ARCHITECTURES | DECLARED_OTHERWISE)[name]
    extra = WITH_CROSS_ATTENTION.get(name, {})
    config = getattr(transformers, made.config)(**made.sizes, **extra)
    torch.manual_seed(0)
    model = getattr(transformers, made.model)(config).eval()
    model.set_attn_implementation("eager")
    inputs = made.inputs()
    if extra:
        inputs["encoder_hidden_states"] = torch.randn(2, 3, 16)
    return model, inputs


def outcome(model: Any, inputs: dict[str, Any], flags: dict[str, Any]) -> Any:
    """What a call returns, to be compared: or the exception, where transformers raises."""
    torch.manual_seed(0)  # some attentions sample
    try:
        return architectures.bits(model(**inputs, **flags))
    except Exception as error:  # noqa: BLE001 (whichever)
        return type(error), str(error)


def combinations(model: Any) -> Iterator[dict[str, bool]]:
    names = [*flags_of(model), "return_dict"]
    for values in itertools.product([False, True], repeat=len(names)):
        yield dict(zip(names, values, strict=True))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*RECORDED, *DECLARED_OTHERWISE])
def test_every_combination_of_flags_gives_what_transformers_gives(name: str) -> None:
    model, inputs = architecture(name)
    ours = converted(model)
    compared = 0
    selections = [{"output_hidden_states": each} for each in ([0, -1], 1, range(2))]
    for flags in [*combinations(model), *selections]:
        with torch.no_grad():
            # A copy each time: what transformers records depends on what it recorded before.
            theirs = outcome(copy.deepcopy(model), inputs, flags)
            assert outcome(ours, inputs, flags) == theirs, flags
        compared += not (isinstance(theirs[0], type) and issubclass(theirs[0], Exception))
    # Where a model has no negative indices, transformers raises.
    assert compared >= 2 ** len(next(combinations(model)))


def without_dropout(model: Any) -> Any:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for attribute in ("dropout", "attention_dropout", "layerdrop"):
            if isinstance(vars(module).get(attribute), float):
                setattr(module, attribute, 0.0)
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize(
    "name",
    [name for name in RECORDED if name != "ALBERT"],  # which has no checkpointing
)
def test_gradient_checkpointing_gives_what_transformers_gives(
    name: str, *, reentrant: bool
) -> None:
    model, inputs = architecture(name)
    without_dropout(model).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for value in inputs.values():
        if value.is_floating_point():
            value.requires_grad_()
    if "pixel_values" not in inputs and name != "Whisper":
        model.enable_input_require_grads()
    ours = converted(model)
    for flags in combinations(model):
        assert outcome(ours, inputs, flags) == outcome(copy.deepcopy(model), inputs, flags), flags

    everything = dict.fromkeys(next(combinations(model)), True)
    outputs = [each(**inputs, **everything) for each in (model, ours)]
    requiring = [
        [tensor.requires_grad for tensor in architectures.tensors(dict(output))]
        for output in outputs
    ]
    assert requiring[0] == requiring[1]
    for output in outputs:
        before = architectures.bits(output)
        next(t for t in architectures.tensors(dict(output)) if t.requires_grad).sum().backward()
        # The layers that ran again recorded nothing.
        assert architectures.bits(output) == before
    gradients = 0
    for theirs, given in zip(model.parameters(), ours.parameters(), strict=True):
        assert (theirs.grad is None) == (given.grad is None)
        assert theirs.grad is None or torch.equal(theirs.grad, given.grad)
        gradients += theirs.grad is not None
    assert gradients


@pytest.mark.filterwarnings("ignore")
def test_sams_vision_encoder_is_not_counted_twice_after_its_parent() -> None:
    model, inputs = architecture("SAM")
    ours = converted(model)
    flags = {"output_hidden_states": True, "output_attentions": True}

    def vision(each: Any) -> Any:
        with torch.no_grad():
            return each.vision_encoder(inputs["pixel_values"], **flags)

    right = vision(copy.deepcopy(model))
    for each in (model, ours):
        vision(each)
        with torch.no_grad():
            output = each(**inputs, **flags)
        assert len(output.mask_decoder_attentions) == 2
        counts = (
            len(vision(each).hidden_states),
            len(output.vision_hidden_states),
        )
        assert counts == ((3, 3) if each is ours else (5, 5)), "transformers has the fault"
    assert architectures.bits(vision(ours)) == architectures.bits(right)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("switch_often")
def test_threads_with_different_flags_on_one_llama() -> None:
    model, inputs = architecture("Llama")
    ours = converted(model)
    with torch.no_grad():
        right = [architectures.bits(model(**inputs, **flags)) for flags in FLAGS]
    wrong: list[tuple[int, int]] = []
    ready = threading.Barrier(4)

    def run(number: int) -> None:
        ready.wait(LIMIT)
        for place in range(25):
            choice = (place + number) % 4
            with torch.no_grad():
                given = architectures.bits(ours(**inputs, **FLAGS[choice]))
            if given != right[choice]:
                wrong.append((number, place))

    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(run, number) for number in range(4)]:
            future.result(LIMIT)
    assert wrong == []


@pytest.mark.filterwarnings("ignore")
def test_generate_with_recording_gives_what_transformers_gives() -> None:
    model, inputs = architecture("Llama")
    ours = converted(model)
    options: dict[str, Any] = {
        "max_new_tokens": 3,
        "do_sample": False,
        "output_hidden_states": True,
        "output_attentions": True,
        "return_dict_in_generate": True,
    }
    theirs, given = (each.generate(**inputs, **options) for each in (model, ours))
    assert architectures.bits(given) == architectures.bits(theirs)

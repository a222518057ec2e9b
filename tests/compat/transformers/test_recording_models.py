"""Recording on models of transformers, compared with its own recording."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import io
import itertools
import os
import pickle
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import ferrohook as fh
from ferrohook.compat.transformers import (
    OutputRecorder,
    capture_outputs,
    merge_with_config_defaults,
)
from support.capture import tensors_of
from support.compiling import compiled
from support.limits import LIMIT
from support.recording import FLAGS
from support.threads import in_threads

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

transformers = pytest.importorskip("transformers")
architectures = importlib.import_module("attach.test_architectures")
their_capturing = pytest.importorskip("transformers.utils.output_capturing")


def test_an_output_recorder_has_the_fields_of_transformers() -> None:
    theirs = dataclasses.fields(their_capturing.OutputRecorder)
    ours = dataclasses.fields(OutputRecorder)[: len(theirs)]
    assert [each.name for each in ours] == [each.name for each in theirs]
    assert [each.default for each in ours] == [each.default for each in theirs]
    # Further fields leave recorded tensors unchanged by default.
    further = dataclasses.fields(OutputRecorder)[len(theirs) :]
    assert [(each.name, each.default) for each in further] == [
        ("detach", False),
        ("device", None),
        ("dtype", None),
    ]


class Own(nn.Module):
    """A model that declares with transformers' `OutputRecorder`."""

    def __init__(self, **recorder: Any) -> None:
        super().__init__()
        self.own_layer = nn.Linear(4, 4)
        self._can_record_outputs = {"own": their_capturing.OutputRecorder(**recorder)}

    @capture_outputs
    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {"y": self.own_layer(x)}


def test_a_recorder_of_transformers_is_accepted_or_refused_by_its_key() -> None:
    model = Own(target_class=None, class_name="own_layer")
    output = model(torch.ones(4), output_own=True)
    assert torch.equal(output["own"][0], output["y"])
    with pytest.raises(
        fh.HookTypeError, match=r"_can_record_outputs\['own'\]: .* needs a target_class or"
    ):
        Own(target_class=None)(torch.ones(4), output_own=True)
    with pytest.raises(fh.SelectionError, match="'own' for Linear, which matches none"):
        Own(target_class=nn.Linear, layer_name="layer")(torch.ones(4), output_own=True)


def in_place_of_theirs(forward: Any) -> Any:
    """`forward` with our decorators in place of transformers'; None if it has none."""
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
    """Copy of a model whose classes' forwards have our decorators."""
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
"""Models for the forms of declaration that the models above do not use."""


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
    """Comparable result of a call, or its exception."""
    torch.manual_seed(0)  # some attentions draw random numbers
    try:
        return architectures.bits(model(**inputs, **flags))
    except Exception as error:  # noqa: BLE001 (compared with ours)
        return type(error), str(error)


def combinations(model: Any) -> Iterator[dict[str, bool]]:
    names = [*flags_of(model), "return_dict"]
    for values in itertools.product([False, True], repeat=len(names)):
        yield dict(zip(names, values, strict=True))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*RECORDED, *DECLARED_OTHERWISE])
def test_every_combination_of_flags_equals_transformers(name: str) -> None:
    model, inputs = architecture(name)
    ours = converted(model)
    compared = 0
    selections = [{"output_hidden_states": each} for each in ([0, -1], 1, range(2))]
    for flags in [*combinations(model), *selections]:
        with torch.no_grad():
            # A copy each time: transformers' recording depends on earlier recordings.
            theirs = outcome(copy.deepcopy(model), inputs, flags)
            assert outcome(ours, inputs, flags) == theirs, flags
        compared += not (isinstance(theirs[0], type) and issubclass(theirs[0], Exception))
    # Transformers raises for models without negative indices.
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
    [name for name in RECORDED if name != "ALBERT"],  # has no checkpointing
)
def test_gradient_checkpointing_equals_transformers(name: str, *, reentrant: bool) -> None:
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
        [tensor.requires_grad for tensor in tensors_of(dict(output))] for output in outputs
    ]
    assert requiring[0] == requiring[1]
    for output in outputs:
        before = architectures.bits(output)
        next(t for t in tensors_of(dict(output)) if t.requires_grad).sum().backward()
        # The recomputed layers recorded nothing.
        assert architectures.bits(output) == before
    gradients = 0
    for theirs, given in zip(model.parameters(), ours.parameters(), strict=True):
        assert (theirs.grad is None) == (given.grad is None)
        assert theirs.grad is None or torch.equal(theirs.grad, given.grad)
        gradients += theirs.grad is not None
    assert gradients


@pytest.mark.filterwarnings("ignore")
def test_sams_vision_encoder_records_each_state_once_after_its_parent() -> None:
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


def wrong_of_400_calls(called: Any, model: Any, inputs: dict[str, Any]) -> list[tuple[int, int]]:
    """Calls of 4 threads with different flags that differ from transformers' result."""
    with torch.no_grad():
        right = [architectures.bits(model(**inputs, **flags)) for flags in FLAGS]
    wrong: list[tuple[int, int]] = []

    def run(number: int) -> None:
        for place in range(100):
            choice = (place + number) % 4
            with torch.no_grad():
                given = architectures.bits(called(**inputs, **FLAGS[choice]))
            if given != right[choice]:
                wrong.append((number, place))

    in_threads(4, run)
    return wrong


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("switch_often")
def test_threads_with_different_flags_on_one_llama() -> None:
    model, inputs = architecture("Llama")
    assert wrong_of_400_calls(converted(model), model, inputs) == []


@compiled
@pytest.mark.usefixtures("switch_often")
def test_threads_with_different_flags_on_one_compiled_llama() -> None:
    model, inputs = architecture("Llama")
    compiled = torch.compile(converted(model), fullgraph=True, backend="eager")
    with torch.no_grad():
        for flags in FLAGS:  # compiles ahead: otherwise Dynamo compiles once per thread
            compiled(**inputs, **flags)
    assert wrong_of_400_calls(compiled, model, inputs) == []


@pytest.mark.filterwarnings("ignore")
def test_generate_with_recording_equals_transformers() -> None:
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


# --- Faults of transformers that ferrohook does not have ------------------------------------------


def states_of(model: Any, inputs: dict[str, Any]) -> int:
    with torch.no_grad():
        return len(model(**inputs, output_hidden_states=True).hidden_states)


def both(name: str = "Llama") -> tuple[tuple[Any, Any], dict[str, Any]]:
    """A model that records with transformers, and a copy that records with ferrohook."""
    model, inputs = architecture(name)
    return (model, converted(model)), inputs


class OnAThread(nn.Module):
    """Runs its layer on a new thread."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        returned: list[Any] = []

        def run() -> None:
            with torch.no_grad():  # grad mode is thread-local
                returned.append(self.layer(*args, **kwargs))

        thread = threading.Thread(target=run)
        thread.start()
        thread.join(LIMIT)
        return returned[0]


@pytest.mark.filterwarnings("ignore")
def test_a_layer_on_a_worker_thread_is_recorded() -> None:
    models, inputs = both()
    expected = architectures.bits(models[0](**inputs, output_hidden_states=True))
    for model in models:
        model.model.layers[1] = OnAThread(model.model.layers[1])
    assert [states_of(model, inputs) for model in models] == [2, 3], "transformers has the fault"
    assert architectures.bits(models[1](**inputs, output_hidden_states=True)) == expected


@pytest.mark.filterwarnings("ignore")
def test_a_layer_of_another_model_run_by_a_hook_is_not_recorded() -> None:
    models, inputs = both()
    counts = []
    for model in models:
        other = copy.deepcopy(model)
        # A copied instance's replaced forward is still bound to the original.
        other.model.forward = type(model.model.forward)(model.model.forward.__func__, other.model)
        states_of(other, inputs)
        called: list[int] = []

        def run_other(
            _layer: Any, args: Any, kwargs: Any, _output: Any, other: Any = other, c: Any = called
        ) -> None:
            c.append(1)
            caches = dict.fromkeys(kwargs.keys() & {"cache", "past_key_values"})
            other.model.layers[0](*args, **kwargs | caches)

        model.model.layers[0].register_forward_hook(run_other, with_kwargs=True)
        counts.append(states_of(model, inputs))
        assert called
    assert counts == [4, 3], "transformers has the fault"


@pytest.mark.filterwarnings("ignore")
def test_layers_added_after_the_first_recording_are_recorded() -> None:
    models, inputs = both()
    counts = []
    for model in models:
        states_of(model, inputs)
        model.model.layers.append(type(model.model.layers[0])(model.config, 1))
        model.model.config.num_hidden_layers = 3
        counts.append(states_of(model, inputs | {"use_cache": False}))
    assert counts == [3, 4], "transformers has the fault"


@pytest.mark.filterwarnings("ignore")
def test_a_model_can_be_pickled_and_saved_after_recording(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, inputs = architecture("Llama")
    flags = {"output_hidden_states": True, "output_attentions": True}
    expected = architectures.bits(model(**inputs, **flags))
    with pytest.raises((AttributeError, pickle.PicklingError)):  # transformers' fault
        pickle.dumps(model)

    cls = type(model.model)
    monkeypatch.setattr(cls, "forward", in_place_of_theirs(cls.forward))
    model, _ = architecture("Llama")
    model(**inputs, **flags)
    model.save_pretrained(tmp_path)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    duplicates = [
        pickle.loads(pickle.dumps(model)),
        torch.load(file, weights_only=False),
        copy.deepcopy(model),
        type(model).from_pretrained(tmp_path, attn_implementation="eager"),
    ]
    plain = [type(module) for module in architecture("Llama")[0].modules()]
    for each in duplicates:
        assert [type(module) for module in each.modules()] == plain
    for each in (*duplicates, model):
        assert architectures.bits(each.eval()(**inputs, **flags)) == expected


# --- merge_with_config_defaults -------------------------------------------------------------------


class Defaults:
    """A config of the given values."""

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


def merged_by(decorate: Any, config: Any, args: Any, kwargs: Any, *, checkpointing: bool) -> Any:
    """Arguments of the forward or its exception, and the config afterwards."""

    class Merges(nn.Module):
        gradient_checkpointing = checkpointing

        def forward(self, x: Any, use_cache: Any = None, **kwargs: Any) -> Any:
            return x, use_cache, kwargs, vars(self.config).copy()

    Merges.forward = decorate(Merges.forward)  # type: ignore[method-assign]
    model = Merges()
    model.config = Defaults(**config)
    try:
        returned: Any = model(0, *args, **kwargs)
    except ValueError as error:
        returned = type(error)
    return returned, vars(model.config)


@pytest.mark.filterwarnings("ignore")
def test_defaults_are_merged_as_in_transformers() -> None:
    configs: list[dict[str, Any]] = [
        {},
        {"use_cache": True, "is_causal": True},
        {"use_cache": False, "vision_feature_layer": [-1], "vision_aspect_ratio": "pad"},
        {"use_cache": None, "vision_feature_select_strategy": "full", "is_causal": False},
        {"vision_feature_select_strategy": "neither"},
    ]
    keywords: list[dict[str, Any]] = [
        {},
        {"vision_feature_layer": 0, "vision_feature_select_strategy": None},
        {"is_causal": False, "vision_aspect_ratio": "square"},
        {"is_causal": True, "vision_feature_select_strategy": "default"},
        {"vision_feature_select_strategy": "all", "unrelated": 1},
    ]
    caches: list[tuple[Any, dict[str, Any]]] = [((), {})]
    caches += [((given,), {}) for given in (None, True, False)]
    caches += [((), {"use_cache": given}) for given in (None, True, False)]
    raised = 0
    for config, kwargs, (args, cache), checkpointing, grads in itertools.product(
        configs, keywords, caches, [False, True], [False, True]
    ):
        with torch.set_grad_enabled(grads):
            theirs, ours = (
                merged_by(each, config, args, kwargs | cache, checkpointing=checkpointing)
                for each in (
                    transformers.utils.generic.merge_with_config_defaults,
                    merge_with_config_defaults,
                )
            )
        assert ours == theirs, (config, args, kwargs | cache, checkpointing)
        raised += theirs[0] is ValueError
    assert raised

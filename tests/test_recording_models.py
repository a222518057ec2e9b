"""Recording: models of transformers, equal to its own recording."""

from __future__ import annotations

import copy
import itertools
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from test_recording import FLAGS, LIMIT
from torch import nn

from ferrohook.recording import capture_outputs, merge_with_config_defaults

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
    for module in model.modules():
        forward = in_place_of_theirs(type(module).forward)
        if forward is not None:
            module.forward = forward.__get__(module)
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
    "Whisper",
    "Mixtral",
    "LLaVA",
    "ViT",
    "ALBERT",
]


def architecture(name: str) -> tuple[Any, dict[str, Any]]:
    made = architectures.ARCHITECTURES[name]
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
    try:
        return architectures.bits(model(**inputs, **flags))
    except Exception as error:  # noqa: BLE001 (whichever)
        return type(error), str(error)


def lengths(output: Any) -> list[Any]:
    return [len(each) if isinstance(each, tuple | list) else "" for each in output]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", RECORDED)
def test_every_combination_of_flags_gives_what_transformers_gives(name: str) -> None:
    model, inputs = architecture(name)
    ours = converted(model)
    names = flags_of(model)
    compared = 0
    for values in itertools.product([False, True], repeat=len(names)):
        for return_dict in (True, False):
            flags = dict(zip(names, values, strict=True))
            with torch.no_grad():
                theirs = outcome(model, inputs, flags | {"return_dict": return_dict})
                given = outcome(ours, inputs, flags | {"return_dict": return_dict})
            assert given == theirs, f"{flags}, return_dict={return_dict}"
            compared += not isinstance(theirs[0], type) or not issubclass(theirs[0], Exception)
    assert compared
    for selected in ([0, -1], 1, range(2)):
        with torch.no_grad():
            flags = {"output_hidden_states": selected}
            assert outcome(ours, inputs, flags) == outcome(model, inputs, flags)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["Llama", "BERT", "T5", "Whisper", "Mixtral"])
def test_gradient_checkpointing_gives_what_transformers_gives(
    name: str, *, reentrant: bool
) -> None:
    model, inputs = architecture(name)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for attribute in ("dropout", "attention_dropout", "layerdrop"):
            if isinstance(vars(module).get(attribute), float):
                setattr(module, attribute, 0.0)
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads() if name != "Whisper" else None
    ours = converted(model)
    flags = {"output_hidden_states": True, "output_attentions": True}
    outputs = [each(**inputs, **flags) for each in (model, ours)]
    assert architectures.bits(outputs[1]) == architectures.bits(outputs[0])
    requiring = [
        [tensor.requires_grad for tensor in architectures.tensors(dict(output))]
        for output in outputs
    ]
    assert requiring[0] == requiring[1]
    for output in outputs:
        output[0].sum().backward()
    for theirs, given in zip(model.parameters(), ours.parameters(), strict=True):
        assert (theirs.grad is None) == (given.grad is None)
        assert theirs.grad is None or torch.equal(theirs.grad, given.grad)


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

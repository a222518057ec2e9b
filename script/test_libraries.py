"""Models of libraries around PyTorch, small and with random weights (for `script/ecosystem`).

PyTorch's own hooks on the same model, in the same process, are the oracle, bit for bit.
"""

from __future__ import annotations

import collections
import copy
import functools
import os
from typing import TYPE_CHECKING, Any

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import ferrohook as fh

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 99,
    "max_position_embeddings": 64,
}
IDS = torch.arange(3, 17).view(2, 7)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def llama() -> Any:
    import transformers

    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()


def logits_of(model: nn.Module) -> Callable[[], torch.Tensor]:
    return lambda: model(input_ids=IDS).logits


def tensors(value: Any) -> list[torch.Tensor]:
    value = value.data if isinstance(value, collections.UserDict) else value
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def same(ours: Any, theirs: Any) -> bool:
    ours, theirs = tensors(ours), tensors(theirs)
    return len(ours) == len(theirs) > 0 and all(map(torch.equal, ours, theirs))


def halve(_module: nn.Module, _args: Any, output: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor * 0.5, output)


Outputs = dict[str, list[list[torch.Tensor]]]


def outputs_of(model: nn.Module, call: Callable[[], Any]) -> tuple[Any, Outputs]:
    """Calls with a hook of the model's own `register_forward_hook` on each module."""
    outputs: Outputs = collections.defaultdict(list)
    handles = []
    for name, module in model.named_modules():

        def keep(_module: nn.Module, _args: Any, output: Any, name: str = name) -> None:
            outputs[name].append([tensor.detach().clone() for tensor in tensors(output)])

        handles.append(module.register_forward_hook(keep))
    result = call()
    for handle in handles:
        handle.remove()
    return result, dict(outputs)


def equal_outputs(ours: Outputs, theirs: Outputs) -> bool:
    return ours.keys() == theirs.keys() and all(
        len(ours[name]) == len(theirs[name])
        # A module may return no tensor.
        and all(
            len(a) == len(b) and all(map(torch.equal, a, b))
            for a, b in zip(ours[name], theirs[name], strict=True)
        )
        for name in theirs
    )


def check(model: nn.Module, call: Callable[[], Any], steered: str) -> None:
    """Holds captures, hooks and `instrument` against PyTorch's own hooks, and what stays of them.

    Args:
        model: the model that is hooked.
        call: runs it; must be deterministic.
        steered: path of a module whose output changes the result.
    """
    classes = {name: type(module) for name, module in model.named_modules()}
    names = set(dict(model.named_modules()))
    keys = list(model.state_dict())
    plain, expected = outputs_of(model, call)
    assert same(call(), plain), "not deterministic"
    handle = model.get_submodule(steered).register_forward_hook(halve)
    changed = call()
    handle.remove()
    assert not same(changed, plain)

    with fh.capture(model, [*expected], calls="all", copy="clone") as acts:
        assert same(call(), plain)
    captured = {name: [tensors(value) for value in acts[name]] for name in expected}
    assert equal_outputs(captured, expected)

    with fh.register(model, steered, halve):
        assert same(call(), changed)
    assert same(call(), plain)

    with fh.instrument(model):
        assert same(call(), plain)
        result, observed = outputs_of(model, call)
        assert same(result, plain)
        assert equal_outputs(observed, expected)
        handle = model.get_submodule(steered).register_forward_hook(halve)
        assert same(call(), changed)
        handle.remove()
        assert set(dict(model.named_modules())) == names
        assert list(model.state_dict()) == keys

    assert all(type(module) is classes[name] for name, module in model.named_modules())
    assert same(call(), plain)


def check_training(model: nn.Module, loss: Callable[[], torch.Tensor]) -> None:
    """Compares gradients and backward hooks with PyTorch's."""

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        loss().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    def hooked() -> tuple[list[torch.Tensor], list[str]]:
        fired: list[str] = []
        handles = [
            module.register_full_backward_hook(lambda *_, name=name: fired.append(name))
            for name, module in model.named_modules()
        ]
        result = gradients()
        for handle in handles:
            handle.remove()
        return result, fired

    plain = gradients()
    # Backward hooks add nodes, and with them another order of summation. PyTorch's do not fire for
    # modules that return a ModelOutput, and fire earlier for keyword inputs.
    theirs, expected = hooked()
    with fh.instrument(model):
        assert same(gradients(), plain)
        ours, fired = hooked()
    assert same(ours, theirs)
    assert sorted(name for name in fired if name in expected) == sorted(expected)
    assert same(gradients(), plain)


# --- peft ---------------------------------------------------------------------------------------


def lora(model: nn.Module) -> Any:
    import peft

    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config).eval()


def test_peft() -> None:
    model = lora(llama())
    check(
        model, logits_of(model), "base_model.model.model.layers.1.self_attn.q_proj.lora_A.default"
    )
    check_training(model, lambda: model(input_ids=IDS, labels=IDS).loss)


def test_peft_switches_adapters_of_an_instrumented_model() -> None:
    model = lora(llama())
    call = logits_of(model)
    with_adapter = call()
    with model.disable_adapter():
        without = call()
    assert not same(with_adapter, without)
    with fh.instrument(model), fh.capture(model, "**.lora_A.default") as acts:
        assert same(call(), with_adapter)
        assert len(acts) == 4
        with model.disable_adapter():
            assert same(call(), without)
    assert same(call(), with_adapter)


def test_peft_adapts_and_merges_an_instrumented_model() -> None:
    plain, base = llama(), llama()
    base.load_state_dict(plain.state_dict())
    fh.instrument(base)
    torch.manual_seed(1)
    expected = lora(plain)
    torch.manual_seed(1)
    model = lora(base)
    assert same(logits_of(model)(), logits_of(expected)())
    merged, expected = model.merge_and_unload(), expected.merge_and_unload()
    assert same(logits_of(merged)(), logits_of(expected)())
    seen: list[str] = []
    with fh.register(merged, "model.layers.0.self_attn.q_proj", lambda *_: seen.append("q")):
        logits_of(merged)()
    assert seen == ["q"]


# --- accelerate ---------------------------------------------------------------------------------


def test_accelerate_prepares() -> None:
    import accelerate

    model = llama()
    model = accelerate.Accelerator(cpu=True).prepare(model)
    check(model, logits_of(model), "model.layers.1.mlp")
    check_training(model, lambda: model(input_ids=IDS, labels=IDS).loss)


def test_accelerate_offloads() -> None:
    import accelerate

    model = llama()
    plain = logits_of(model)()
    offloaded = accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert same(logits_of(offloaded)(), plain)
    check(offloaded, logits_of(offloaded), "model.layers.1.mlp")


def test_accelerate_offloads_an_instrumented_model(tmp_path: Path) -> None:
    import accelerate

    model = llama()
    plain = logits_of(model)()
    with fh.instrument(model):
        accelerate.disk_offload(model, tmp_path, execution_device=torch.device("cpu"))
        _, observed = outputs_of(model, logits_of(model))
        assert same(logits_of(model)(), plain)
        assert len(observed["model.layers.0.mlp.up_proj"]) == 1
    assert same(logits_of(model)(), plain)
    accelerate.hooks.remove_hook_from_submodules(model)


# --- diffusers ----------------------------------------------------------------------------------


def unet() -> Any:
    import diffusers

    return diffusers.UNet2DModel(
        sample_size=16,
        in_channels=1,
        out_channels=1,
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ).eval()


def test_diffusers() -> None:
    model, noise = unet(), torch.randn(2, 1, 16, 16)
    check(model, lambda: model(noise, 3).sample, "mid_block")
    check_training(model, lambda: model(noise, 3).sample.square().mean())


def test_diffusers_pipeline() -> None:
    import diffusers

    model = unet()
    pipeline = diffusers.DDPMPipeline(model, diffusers.DDPMScheduler(num_train_timesteps=10))
    pipeline.set_progress_bar_config(disable=True)

    def sample() -> torch.Tensor:
        images = pipeline(
            num_inference_steps=3, output_type="np", generator=torch.Generator().manual_seed(0)
        ).images
        return torch.from_numpy(images)

    check(model, sample, "conv_in")


# --- timm ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "steered"),
    [("vit_tiny_patch16_224", "blocks.6"), ("resnet10t", "layer2"), ("convnext_atto", "stages.1")],
)
def test_timm(name: str, steered: str) -> None:
    import timm

    model = timm.create_model(name, pretrained=False).eval()
    image = torch.randn(1, 3, 224, 224)
    check(model, lambda: model(image), steered)


def test_timm_features() -> None:
    import timm

    model = timm.create_model("resnet10t", pretrained=False, features_only=True).eval()
    image = torch.randn(1, 3, 64, 64)
    check(model, lambda: model(image), "layer2")


# --- torchao, bitsandbytes ----------------------------------------------------------------------


@pytest.mark.parametrize("instrumented", [False, True])
@pytest.mark.parametrize(
    "config",
    ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig", "Float8WeightOnlyConfig"],
)
def test_torchao(config: str, instrumented: bool) -> None:
    from torchao import quantization

    model, other = llama(), llama()
    other.load_state_dict(model.state_dict())
    quantization.quantize_(other, getattr(quantization, config)())
    expected = logits_of(other)()
    assert not same(expected, logits_of(model)())
    if instrumented:
        with fh.instrument(model):
            quantization.quantize_(model, getattr(quantization, config)())
            assert same(logits_of(model)(), expected)
    else:
        quantization.quantize_(model, getattr(quantization, config)())
    assert same(logits_of(model)(), expected)
    check(model, logits_of(model), "model.layers.1.mlp.up_proj")


@pytest.mark.parametrize(
    ("kind", "options"), [("Linear8bitLt", {"has_fp16_weights": False}), ("Linear4bit", {})]
)
def test_bitsandbytes(kind: str, options: dict[str, Any]) -> None:
    import bitsandbytes

    layer = functools.partial(getattr(bitsandbytes.nn, kind), 64, 64, **options)
    model = nn.Sequential(layer(), nn.ReLU(), layer()).eval().to("cpu")  # quantises
    batch = torch.randn(4, 64)

    def call() -> torch.Tensor:
        with torch.no_grad():
            return model(batch)

    check(model, call, "0")


# --- sentence-transformers ----------------------------------------------------------------------


def test_sentence_transformers(tmp_path: Path) -> None:
    import sentence_transformers
    import transformers

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "hook", "fires", "twice"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    config = transformers.BertConfig(**SIZES)
    transformers.BertModel(config).save_pretrained(tmp_path)
    model = sentence_transformers.SentenceTransformer(str(tmp_path), device="cpu")

    def encode() -> torch.Tensor:
        return model.encode(["a hook fires", "twice"], convert_to_tensor=True)

    check(model, encode, "0.model.encoder.layer.0")


# --- Lightning ----------------------------------------------------------------------------------


def test_lightning() -> None:
    import lightning

    class Regression(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return self.net(batch)

        def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
            return self(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    model = Regression()
    batch = torch.randn(16, 4)
    start = copy.deepcopy(model.state_dict())

    def fit() -> list[torch.Tensor]:
        """Trains from the same weights; returns the trained ones."""
        model.load_state_dict(start)
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_epochs=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        data = torch.utils.data.TensorDataset(batch)
        trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=4))
        return [parameter.detach().clone() for parameter in model.parameters()]

    check(model, fit, "net.0")
    model.load_state_dict(start)
    check(model, lambda: model(batch), "net.0")
    check_training(model, lambda: model(batch).square().mean())


# --- torch.export, ONNX -------------------------------------------------------------------------


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 2)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(batch).relu())


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict: bool) -> None:
    model, batch = Small().eval(), torch.randn(3, 4)
    plain = model(batch)
    with fh.instrument(model):
        assert same(torch.export.export(model, (batch,), strict=strict).module()(batch), plain)
        model.first.register_forward_hook(halve)
        changed = model(batch)
        assert not same(changed, plain)
        hooked = torch.export.export(model, (batch,), strict=strict)
    assert same(hooked.module()(batch), changed)
    exported = torch.export.export(model, (batch,), strict=strict)
    assert same(exported.module()(batch), plain)


def test_exported_models() -> None:
    model, batch = Small().eval(), torch.randn(3, 4)
    program = torch.export.export(model, (batch,))
    flat = program.module()
    check(flat, lambda: flat(batch), "")
    unflattened = torch.export.unflatten(program)
    check(unflattened, lambda: unflattened(batch), "first")


def test_onnx(tmp_path: Path) -> None:
    import onnxruntime

    model, batch = Small().eval(), torch.randn(3, 4)

    def run() -> torch.Tensor:
        torch.onnx.export(model, (batch,), tmp_path / "model.onnx", dynamo=True, verbose=False)
        session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
        (name,) = [each.name for each in session.get_inputs()]
        return torch.from_numpy(session.run(None, {name: batch.numpy()})[0])

    plain = run()
    torch.testing.assert_close(plain, model(batch))
    with fh.instrument(model):
        assert same(run(), plain)
        model.first.register_forward_hook(halve)
        torch.testing.assert_close(run(), model(batch))
        assert not same(run(), plain)
    assert same(run(), plain)

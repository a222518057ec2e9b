"""Detectors and controllers: mi_crow's, released, where it is right; and its faults, gone."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import faulthandler
import functools
import gc
import io
import logging
import pickle
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import ferrohook as fh
from ferrohook import interventions as fi
from ferrohook.instrumentation import find_registry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

LIMIT = 30.0
"""Seconds that any wait of these tests may take."""


@pytest.fixture(autouse=True)
def _watchdog() -> Iterator[None]:
    faulthandler.dump_traceback_later(2 * LIMIT, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="module")
def mi_crow() -> Any:
    return pytest.importorskip(
        "mi_crow.hooks", reason="the other side, mi-crow, is in the group rivals"
    )


@pytest.fixture(scope="module")
def crow_layers(mi_crow: Any) -> Callable[[nn.Module], Any]:
    from mi_crow.language_model.context import LanguageModelContext  # noqa: PLC0415 (may be missing)
    from mi_crow.language_model.layers import LanguageModelLayers  # noqa: PLC0415

    def make(model: nn.Module) -> Any:
        return LanguageModelLayers(LanguageModelContext(None, model=model))  # type: ignore[arg-type]

    return make


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 4))

    def forward(self, x: Tensor, scale: float = 1.0) -> tuple[Tensor, str]:
        return x + self.mlp(self.norm(x)) * scale, "cache"


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x, _ = layer(x)
        return self.head(x)


class Returns(nn.Module):
    """Returns what it was told to."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.value


class Echo(nn.Module):
    """Returns what it takes."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs


class Seen(fi.Detector):
    """Keeps everything it sees in a list."""

    def __init__(self, hook_type: fi.HookType | str = "forward", **options: Any) -> None:
        super().__init__(hook_type, **options)
        self.seen: list[tuple[Any, Any]] = []

    def process_activations(self, module: nn.Module, input: Any, output: Any) -> None:
        self.seen.append((input, output))


class Raises(fi.Detector):
    def process_activations(self, module: nn.Module, input: Any, output: Any) -> None:
        raise KeyError(self.id)


class Shift(fi.Controller):
    """Adds to what passes."""

    def modify_activations(
        self, module: nn.Module, inputs: Tensor | None, output: Tensor | None
    ) -> Tensor | None:
        assert output is not None
        return output + 1


@dataclass
class Output:
    last_hidden_state: Any = None
    logits: Any = None


class Pair(NamedTuple):
    first: Any
    second: Any


def double(x: Tensor) -> Tensor:
    return x * 2


def on(module: nn.Module, *hooks: fi.Hook) -> fi.Layers:
    """The module with the hooks registered on itself."""
    layers = fi.Layers(module)
    for hook in hooks:
        layers.register_hook("", hook)
    return layers


def in_thread(target: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(target).result(LIMIT)


X = torch.arange(8.0).reshape(2, 4)
STRUCTURES: list[Any] = [
    X,
    (X, 1),
    (None, X, X + 1),
    [X, 2],
    Output(last_hidden_state=X),
    Output(last_hidden_state="no tensor"),
    Output(logits=X),
    SimpleNamespace(last_hidden_state=X),
    {"x": X},
    (),
    [],
    (1, "a"),
    ((X, 2), 3),
    [(X,)],
    ({"input_ids": X},),
    "text",
    None,
]


# The helpers


@pytest.mark.parametrize("value", STRUCTURES, ids=repr)
def test_tensors_are_found_where_mi_crow_finds_them(mi_crow: Any, value: Any) -> None:
    from mi_crow.hooks import utils  # noqa: PLC0415 (may be missing)

    assert fi.extract_tensor_from_output(value) is utils.extract_tensor_from_output(value)
    if isinstance(value, tuple | list | None):
        assert fi.extract_tensor_from_input(value) is utils.extract_tensor_from_input(value)


@pytest.mark.parametrize("value", STRUCTURES, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_an_applied_modification_is_mi_crows_in_a_new_output(
    mi_crow: Any, value: Any, dtype: torch.dtype
) -> None:
    from mi_crow.hooks import utils  # noqa: PLC0415 (may be missing)

    theirs = copy.deepcopy(value)
    utils.apply_modification_to_output(theirs, (X * 3).to(dtype))
    before = copy.deepcopy(value)
    ours = fi.apply_modification_to_output(value, (X * 3).to(dtype))
    found, original = fi.extract_tensor_from_output(ours), fi.extract_tensor_from_output(value)
    assert type(ours) is type(value)
    if original is None or found is None:
        assert ours is value
    else:
        assert torch.equal(found, utils.extract_tensor_from_output(theirs).float())
        assert found.dtype == original.dtype
        assert torch.equal(original, fi.extract_tensor_from_output(before))
        assert ours is not value


def test_structures_are_kept_around_a_replacement() -> None:
    for output in (Pair("a", X), torch.sort(X), ["a", X, X]):
        changed = fi.apply_modification_to_output(output, X + 1)
        assert type(changed) is type(output)
        assert len(changed) == len(output)
        assert torch.equal(fi.extract_tensor_from_output(changed), X + 1)  # type: ignore[arg-type]
    assert fi.apply_modification_to_output(["a", X, X], X + 1)[2] is X


def test_a_replacement_can_go_to_another_device() -> None:
    moved = fi.apply_modification_to_output((X,), X + 1, target_device="meta")
    assert moved[0].device.type == "meta"
    assert fi.apply_modification_to_output(X, X.to("meta")[:2], "meta").is_meta


@pytest.mark.parametrize("shape", [(1, 4), (4,), (2, 4, 1), (2, 5)])
def test_a_replacement_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"\(2, 4\), got \(" + str(shape[0])):
        fi.apply_modification_to_output([X], torch.ones(shape))


def test_model_outputs_keep_their_attributes_and_items_in_step() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    output = outputs.BaseModelOutput(last_hidden_state=X)
    changed = fi.apply_modification_to_output(output, X + 1)
    assert type(changed) is type(output)
    assert torch.equal(changed.last_hidden_state, X + 1)
    assert torch.equal(changed["last_hidden_state"], X + 1)
    assert torch.equal(changed[0], X + 1)
    assert output[0] is X


# What hooks do: as mi_crow's


@pytest.mark.parametrize("hook_type", ["forward", "pre_forward"])
def test_models_with_controllers_compute_what_they_do_with_mi_crows(
    mi_crow: Any, crow_layers: Any, hook_type: str
) -> None:
    model = Model()
    model.eval()
    theirs = copy.deepcopy(model)
    crow, layers = crow_layers(theirs), fi.Layers(model)
    for name in ("layers.0.mlp", "layers.1", "layers.1.mlp.0", "head"):
        flat = f"model_{name}".replace(".", "_")
        crow.register_hook(
            flat, mi_crow.FunctionController(flat, lambda x: x * 2 + 1, hook_type=hook_type)
        )
        layers.register_hook(
            flat, fi.FunctionController(flat, lambda x: x * 2 + 1, hook_type=hook_type)
        )
    x = torch.randn(5, 4)
    plain = copy.deepcopy(theirs)
    with torch.no_grad():
        assert torch.equal(model(x), theirs(x))
        layers.disable_all_hooks()
        crow.disable_all_hooks()
        assert torch.equal(model(x), theirs(x))
        layers.enable_all_hooks()
        for hook in layers.get_hooks():
            assert layers.unregister_hook(hook)
        assert torch.equal(model(x), theirs(x))
    assert type(model.head) is nn.Linear
    assert type(plain.head) is nn.Linear


def test_layers_are_detected_as_by_mi_crow(mi_crow: Any, crow_layers: Any) -> None:
    model = Model()
    theirs = copy.deepcopy(model)
    crow, layers = crow_layers(theirs), fi.Layers(model)
    pairs = []
    for index, dtype in zip((1, 2, 9, 13), (None, torch.float16, torch.float64, None), strict=True):
        name = crow.get_layer_names()[index]
        pairs.append(
            (
                mi_crow.LayerActivationDetector(name, target_dtype=dtype),
                fi.LayerActivationDetector(name, target_dtype=dtype),
            )
        )
        crow.register_hook(name, pairs[-1][0])
        layers.register_hook(name, pairs[-1][1])
    for _ in range(2):
        x = torch.randn(5, 4)
        theirs(x)
        model(x)
        for their, our in pairs:
            kept = our.get_captured()
            assert kept is not None
            assert torch.equal(kept, their.get_captured())
            assert kept.dtype == their.get_captured().dtype
            assert not kept.requires_grad
            assert dict(our.metadata) == their.metadata
            assert our.tensor_metadata.keys() == their.tensor_metadata.keys()
    for their, our in pairs:
        their.clear_captured()
        our.clear_captured()
        assert our.get_captured() is None is their.get_captured()
        assert our.metadata == {} == their.metadata


IDS = torch.tensor([[101, 7, 8, 102, 0], [101, 9, 102, 0, 0]])
MASK = (IDS != 0).long()
REGULAR = torch.tensor([[0, 1, 1, 0, 0], [0, 1, 0, 0, 0]]).bool()


class Lm(nn.Module):
    def forward(
        self, input_ids: Any = None, attention_mask: Any = None, inputs_embeds: Any = None
    ) -> Any:
        return Output(logits=torch.ones(2, 3, requires_grad=True), last_hidden_state=X)


def test_inputs_are_detected_as_by_mi_crow(mi_crow: Any) -> None:
    encodings = {"input_ids": IDS, "attention_mask": MASK}
    options: Any = {"save_attention_mask": True, "special_token_ids": [101, 102]}
    their, our = mi_crow.ModelInputDetector(**options), fi.ModelInputDetector(**options)
    for feed in (
        lambda detector: detector.set_inputs_from_encodings(encodings),
        lambda detector: detector.process_activations(Lm(), (encodings,), None),
        lambda detector: detector.process_activations(Lm(), (IDS,), None),
    ):
        feed(their)
        feed(our)
        assert torch.equal(our.get_captured_input_ids(), their.get_captured_input_ids())
        ours, theirs = our.get_captured_attention_mask(), their.get_captured_attention_mask()
        assert torch.equal(ours, theirs)
        assert ours.dtype == theirs.dtype
        assert dict(our.metadata) == their.metadata
        our.clear_captured()
        their.clear_captured()
        assert our.get_captured_input_ids() is None
        assert our.get_captured_attention_mask() is None


@pytest.mark.parametrize("value", [*STRUCTURES, Output(X, X + 1)], ids=repr)
def test_outputs_are_detected_as_by_mi_crow(mi_crow: Any, value: Any) -> None:
    options: Any = {"save_output_hidden_state": True}
    their, our = mi_crow.ModelOutputDetector(**options), fi.ModelOutputDetector(**options)
    if not (isinstance(value, Output) and isinstance(value.last_hidden_state, str)):  # fails there
        their.process_activations(None, (), value)
    on(module := Returns(value), our)
    module()
    assert dict(our.metadata) == their.metadata
    assert our.tensor_metadata.keys() == their.tensor_metadata.keys()
    for key, tensor in their.tensor_metadata.items():
        assert torch.equal(our.tensor_metadata[key], tensor)


def test_flat_names_and_indices_are_mi_crows(crow_layers: Any) -> None:
    model = Model()
    model.shared = model.layers[0].mlp
    crow, layers = crow_layers(model), fi.Layers(model)
    names = layers.get_layer_names()
    assert len(set(names)) == len(names) == len(crow.get_layer_names())
    for index, (path, flat) in enumerate(zip(names, crow.get_layer_names(), strict=True)):
        hook = Seen()
        for signature in (path, flat, index):
            layers.register_hook(signature, hook)
            assert hook.layer == path
            assert layers.get_hooks(flat) == [hook]
            assert hook.layer_signature == signature
            module = crow.name_to_layer[flat]
            assert module is crow.idx_to_layer[index] is model.get_submodule(path)
            registry = find_registry(module)
            assert registry is not None
            assert len(registry.list()) == 1
            layers.unregister_hook(hook)
            assert find_registry(module) is None


def test_a_hook_of_both_kinds_detects_first(mi_crow: Any) -> None:
    def both(base: Any, *bases: type) -> Any:
        class Both(*bases):  # type: ignore[misc]
            def __init__(self) -> None:
                bases[0].__init__(self)
                bases[1].__init__(self)

            def process_activations(self, module: Any, input: Any, output: Any) -> None:
                self.tensor_metadata["seen"] = output.clone()

            def modify_activations(self, module: Any, inputs: Any, output: Any) -> Any:
                return output * 10

        return Both()

    theirs = both(mi_crow, mi_crow.Controller, mi_crow.Detector)
    crow = nn.Linear(4, 4)
    module = copy.deepcopy(crow)
    crow.register_forward_hook(theirs.get_torch_hook())
    expected = crow(X)
    for bases in ((fi.Controller, fi.Detector), (fi.Detector, fi.Controller)):
        hook = both(fi, *bases)
        layers = on(module, hook)
        assert torch.equal(module(X), expected)
        assert torch.equal(hook.tensor_metadata["seen"] * 10, expected)
        assert layers.get_controllers() == layers.get_detectors() == [hook]
        layers.unregister_hook(hook)


def test_a_pre_forward_controller_gets_the_input_twice_as_in_mi_crow(mi_crow: Any) -> None:
    for package in (mi_crow, fi):
        got = []

        class Pre(package.Controller):
            def modify_activations(
                self, module: Any, inputs: Any, output: Any, got: list[Any] = got
            ) -> Any:
                got.append((inputs, output))
                return inputs + 1

        module = nn.Identity()
        module.register_forward_pre_hook(Pre("pre_forward").get_torch_hook())
        assert torch.equal(module(X), X + 1)
        assert torch.equal(got[0][0], X)
        assert got[0][1] is got[0][0]


def test_torch_hooks_run_under_torch(mi_crow: Any) -> None:
    for package in (mi_crow, fi):
        module = nn.Linear(4, 4)
        expected = module(X + 1)
        controller = package.FunctionController("x", lambda x: x + 1, "pre_forward")
        detector = package.LayerActivationDetector("x")
        module.register_forward_pre_hook(controller.get_torch_hook())
        module.register_forward_hook(detector.get_torch_hook())
        assert torch.equal(module(X), expected)
        assert torch.equal(detector.get_captured(), expected)
        controller.disable()
        detector.disable()
        assert torch.equal(module(X), module.forward(X))
        assert torch.equal(detector.get_captured(), expected)


def test_torch_hooks_see_keywords_where_torch_passes_them() -> None:
    module = Lm()
    detector = fi.ModelInputDetector()
    module.register_forward_pre_hook(detector.get_torch_hook(), with_kwargs=True)
    module(input_ids=IDS)
    assert torch.equal(detector.tensor_metadata["input_ids"], IDS)
    module = nn.Identity()
    pre = fi.FunctionController("", double, "pre_forward")
    module.register_forward_pre_hook(pre.get_torch_hook(), with_kwargs=True)
    assert torch.equal(module(input=X), X * 2)


# The faults of the original


@pytest.mark.parametrize("module", [nn.Identity(), nn.Flatten(), nn.Dropout(0.0), Block()])
@pytest.mark.parametrize("hook_type", ["forward", "pre_forward"])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_controller_does_not_write_to_the_callers_input(
    module: nn.Module, hook_type: str, mode: Any
) -> None:
    layers = on(module, fi.FunctionController("x", lambda x: x * 3, hook_type))
    with mode():
        x = X.clone()
        output = module(x)
        if not isinstance(module, Block):
            assert torch.equal(output, x * 3)
        assert torch.equal(x, X)
    layers.unregister_hook(layers.get_hooks()[0])


@pytest.mark.parametrize("hook_type", ["forward", "pre_forward"])
def test_a_function_that_writes_in_place_is_refused_or_gets_a_copy(hook_type: str) -> None:
    on(module := nn.Linear(4, 4), fi.FunctionController("x", lambda x: x.mul_(3), hook_type))
    with pytest.raises(fi.HookError, match=r"wrote .* in place.* x \* 2 and not x\.mul_"):
        module(X.clone())
    with torch.inference_mode():
        x = X.clone()
        output = module(x)
        assert torch.equal(x, X)
        expected = module.forward(x * 3) if hook_type == "pre_forward" else module.forward(x) * 3
        assert torch.equal(output, expected)


def test_a_controller_may_leave_the_activations_alone() -> None:
    class Leaves(fi.Controller):
        def modify_activations(self, module: Any, inputs: Any, output: Any) -> None:
            assert inputs is not None

    on(module := nn.Identity(), Leaves(), Leaves("pre_forward"))
    assert module(X) is X
    with torch.inference_mode():
        x = X.clone()
        assert torch.equal(module(x), x)


def test_what_is_written_into_a_copy_counts() -> None:
    class Ablate(fi.Controller):
        def modify_activations(self, module: Any, inputs: Any, output: Any) -> None:
            output[:, 0] = 0

    with torch.inference_mode():
        x = X + 1
        for hook in (Ablate(), Ablate("pre_forward")):
            layers = on(module := nn.Identity(), hook)
            output = module(x)
            assert torch.equal(x, X + 1)
            assert not output[:, 0].any()
            assert torch.equal(output[:, 1:], x[:, 1:])
            layers.unregister_hook(hook)


@pytest.mark.parametrize("hook_type", ["forward", "pre_forward"])
def test_gradients_pass_through_a_controller(hook_type: str) -> None:
    on(module := nn.Identity(), fi.FunctionController("x", lambda x: x * 3, hook_type))
    x = torch.ones(3, requires_grad=True)
    module(x).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 3.0))  # type: ignore[arg-type]


def test_gradients_reach_what_a_controller_computes_with() -> None:
    steering = torch.zeros(4, requires_grad=True)
    on(
        module := Returns((X.requires_grad_(False), "cache")),
        fi.FunctionController("x", lambda x: x + steering),
    )
    module()[0].sum().backward()
    assert torch.equal(steering.grad, torch.full((4,), 2.0))  # type: ignore[arg-type]


def test_a_shared_detector_shows_each_thread_its_own(switch_often: None) -> None:
    model = Model()
    layers = fi.Layers(model)
    detector = fi.LayerActivationDetector("layers.0")
    inputs = fi.ModelInputDetector("", save_attention_mask=True)
    layers.register_hook("layers.0", detector)
    layers.register_hook("", inputs)
    threads, calls = 4, 200
    barrier = threading.Barrier(threads)

    def work(number: int) -> int:
        x = torch.full((1, 4), float(number))
        expected = Block.forward(model.layers[0], x)[0]  # type: ignore[arg-type]
        barrier.wait(LIMIT)
        wrong = 0
        for _ in range(calls):
            with torch.no_grad():
                model(x)
            captured, taken = detector.get_captured(), inputs.get_captured_input_ids()
            assert captured is not None
            assert taken is not None
            assert detector.metadata["activations_shape"] == (1, 4)
            wrong += not (torch.equal(captured, expected) and torch.equal(taken, x))
        return wrong

    with ThreadPoolExecutor(threads) as pool:
        running = [pool.submit(work, number) for number in range(threads)]
        assert [each.result(LIMIT) for each in running] == [0] * threads
    assert detector.get_captured() is None  # nothing ran here
    assert not detector.metadata


def test_a_capture_before_an_in_place_relu_reads_what_was_there() -> None:
    model = Model()
    layers = fi.Layers(model)
    detector = fi.LayerActivationDetector("layers.0.mlp.0")
    layers.register_hook("layers.0.mlp.0", detector)
    for mode in (torch.enable_grad, torch.inference_mode):
        with mode():
            model(torch.ones(2, 4))
            linear = model.layers[0].mlp[0]
            expected = linear.forward(model.layers[0].norm(torch.ones(2, 4)))
        captured = detector.get_captured()
        assert captured is not None
        assert torch.equal(captured, expected)
        assert (captured < 0).any()


def test_inputs_and_outputs_that_the_caller_reuses_stay_as_they_were() -> None:
    ids = IDS.clone()
    taken, returned = fi.ModelInputDetector(), fi.ModelOutputDetector()
    on(module := Lm(), taken, returned)
    output = module(ids)
    ids.zero_()
    output.logits.detach().zero_()
    assert torch.equal(taken.tensor_metadata["input_ids"], IDS)
    assert torch.equal(returned.tensor_metadata["output_logits"], torch.ones(2, 3))


@pytest.mark.parametrize("own", ["forward", "pre_forward"])
@pytest.mark.parametrize("given", ["forward", fi.HookType.PRE_FORWARD])
def test_a_hook_type_can_be_given_at_registration(own: str, given: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    x = X.clone()
    expected = model(x * 2) if given == "pre_forward" else model(x) * 2
    layers = fi.Layers(model)
    controller = fi.FunctionController("0", double, own)
    detector = fi.LayerActivationDetector("0")
    layers.register_hook("0", controller, hook_type=given)
    layers.register_hook("0", detector, given)
    assert torch.equal(model(x), expected)
    assert controller.hook_type is detector.hook_type is fi.HookType(given)
    assert layers.get_hooks(hook_type=given) == [controller, detector]
    seen = x * 2 if given == "pre_forward" else expected
    assert torch.equal(detector.get_captured(), seen)  # type: ignore[arg-type]


def test_detectors_see_what_the_controllers_of_their_layer_make() -> None:
    first, ahead, last = Seen(), Seen(), Seen()
    layers = fi.Layers(module := nn.Identity())
    layers.register_hook("", first)
    layers.register_hook("", Shift())
    layers.register_hook("", ahead, priority=1)
    layers.register_hook("", fi.FunctionController("", double), priority=-5)
    layers.register_hook("", last)
    handle = fh.register(module, "", lambda module, args, output: output + 100)
    assert torch.equal(module(X), (X + 1) * 2 + 200)
    assert torch.equal(ahead.seen[0][1], X)
    for detector in (first, last):
        assert torch.equal(detector.seen[0][1], (X + 1) * 2 + 200)
    handle.remove()


def test_a_disabled_hook_is_skipped_by_the_registry() -> None:
    called = Seen()
    layers = on(module := nn.Identity(), called)
    called.disable()
    handle = called._handle
    assert handle is not None
    assert not called.enabled
    assert not handle.enabled
    module(X)
    assert handle.calls == 0
    assert layers.enable_hook(called.id)
    module(X)
    assert handle.calls == 1
    assert layers.disable_hook(called.id)
    module(X)
    assert len(called.seen) == 1


def test_a_hook_that_was_disabled_stays_so_wherever_it_is_registered() -> None:
    hook = Seen()
    hook.disable()
    layers = on(module := nn.Identity(), hook)
    module(X)
    assert not hook.enabled
    hook.enable()
    module(X)
    hook.disable()
    layers.unregister_hook(hook)
    assert not hook.enabled
    layers.register_hook("", hook)
    module(X)
    assert len(hook.seen) == 1


@pytest.mark.cuda
def test_copies_from_a_gpu_are_complete_when_read() -> None:
    model = nn.Sequential(nn.Linear(2048, 2048), nn.ReLU(inplace=True)).cuda()
    detector = fi.LayerActivationDetector(0)
    fi.Layers(model).register_hook(0, detector)
    x = torch.randn(2048, 2048, device="cuda")
    expected = model[0].forward(x).cpu()
    for _ in range(20):
        model(x)
        captured = detector.tensor_metadata["activations"]
        assert captured.device.type == "cpu"
        assert torch.equal(captured, expected)


# Keyword arguments


@pytest.mark.parametrize(
    "call",
    [
        lambda lm: lm(input_ids=IDS, attention_mask=MASK),
        lambda lm: lm(IDS, attention_mask=MASK),
        lambda lm: lm(IDS, MASK),
        lambda lm: lm({"input_ids": IDS, "attention_mask": MASK}),
    ],
)
def test_the_input_is_seen_however_it_is_given(call: Callable[[Lm], Any]) -> None:
    detector = fi.ModelInputDetector(save_attention_mask=True, special_token_ids={101, 102})
    on(lm := Lm(), detector)
    call(lm)
    assert torch.equal(detector.tensor_metadata["input_ids"], IDS)
    assert torch.equal(detector.tensor_metadata["attention_mask"], REGULAR)
    lm(inputs_embeds=X)
    assert not detector.tensor_metadata  # and not those of the call before


def test_special_tokens_come_from_the_context() -> None:
    detector = fi.ModelInputDetector(save_input_ids=False, save_attention_mask=True)
    detector.set_context(SimpleNamespace(special_token_ids={101, 102}))
    on(lm := Lm(), detector)
    lm(input_ids=IDS, attention_mask=MASK)
    assert dict(detector.metadata) == {"attention_mask_shape": (2, 5)}
    assert torch.equal(detector.tensor_metadata["attention_mask"], REGULAR)
    detector.set_context(None)
    lm(input_ids=IDS, attention_mask=MASK)
    assert torch.equal(detector.tensor_metadata["attention_mask"], MASK.bool())


def test_keyword_arguments_are_changed_where_there_are_no_others() -> None:
    on(module := Echo(), fi.FunctionController("", double, "pre_forward"))
    (args, kwargs) = module(mask=None, hidden=X, other=X)
    assert args == ()
    assert kwargs["mask"] is None
    assert torch.equal(kwargs["hidden"], X * 2)
    assert kwargs["other"] is X
    (args, kwargs) = module([1, X], X, hidden=X)
    assert torch.equal(args[0][1], X * 2)
    assert args[1] is kwargs["hidden"] is X
    assert module("no", "tensor", key=X) == (("no", "tensor"), {"key": X})


def test_pre_forward_detectors_see_keywords_behind_the_arguments() -> None:
    seen, kept = Seen("pre_forward"), fi.LayerActivationDetector("")
    layers = on(module := Echo(), seen)
    layers.register_hook("", kept, "pre_forward")
    module(1, key=X)
    module(key=X)
    module(2)
    assert [given for given, _ in seen.seen] == [(1, {"key": X}), ({"key": X},), (2,)]
    assert kept.get_captured() is None
    module(key=X)
    assert torch.equal(kept.get_captured(), X)  # type: ignore[arg-type]


def test_an_output_without_a_tensor_leaves_nothing_stale() -> None:
    detector = fi.LayerActivationDetector("")
    on(module := Returns(X), detector, Shift())
    module()
    assert detector.get_captured() is not None
    module.value = ("no", "tensor")
    assert module() == ("no", "tensor")
    assert detector.get_captured() is None
    assert not detector.metadata


# What is collected


def test_what_is_collected_is_a_dict_of_the_context() -> None:
    detector = Seen()
    detector.metadata["calls"] = 1
    detector.tensor_metadata = {"x": X}
    assert detector.metadata == {"calls": 1}
    assert repr(detector.metadata) == "{'calls': 1}"
    copied = contextvars.copy_context()
    copied.run(detector.metadata.update, calls=2, more=True)
    assert detector.metadata == {"calls": 1}
    assert copied.run(dict, detector.metadata) == {"calls": 2, "more": True}
    assert copied.run(detector.tensor_metadata.get, "x") is X  # as with any context variable
    assert in_thread(lambda: dict(detector.metadata)) == {}
    del detector.metadata["calls"]
    assert not detector.metadata
    assert len(copied.run(dict, detector.metadata)) == 2
    with pytest.raises(KeyError):
        del detector.metadata["calls"]
    detector.metadata = {"fresh": 0}
    assert [*detector.metadata] == ["fresh"]


def test_tasks_do_not_see_each_other(switch_often: None) -> None:
    detector = fi.LayerActivationDetector("")
    on(module := nn.Identity(), detector)

    async def work(number: int) -> bool:
        x = torch.full((2,), float(number))
        right = True
        for _ in range(20):
            module(x)
            await asyncio.sleep(0)
            right &= torch.equal(detector.tensor_metadata["activations"], x)
        return right

    async def main() -> list[bool]:
        module(X)
        right = await asyncio.gather(*map(work, range(8)))
        return [*right, torch.equal(detector.tensor_metadata["activations"], X)]

    assert asyncio.run(main()) == [True] * 9


def test_what_is_collected_goes_with_its_thread_and_with_its_detector() -> None:
    detector = fi.LayerActivationDetector("")
    layers = on(module := nn.Identity(), detector)

    def call(detector: fi.LayerActivationDetector) -> weakref.ref[Tensor]:
        module(X)
        return weakref.ref(detector.tensor_metadata["activations"])

    gc.disable()
    try:
        assert in_thread(functools.partial(call, detector))() is None
        first = call(detector)
        assert first() is not None
        second = call(detector)
        assert first() is None
        assert second() is not None
        layers.unregister_hook(detector)
        del detector
        assert second() is None
    finally:
        gc.enable()


def test_detectors_that_come_and_go_leave_nothing_in_a_context() -> None:
    def size() -> int:
        return len(contextvars.copy_context())

    fi.LayerActivationDetector("").metadata["x"] = 1
    before = size()
    for number in range(50):
        detector = fi.LayerActivationDetector("")
        assert not detector.metadata  # of the one before
        assert not detector.tensor_metadata
        detector.metadata["x"] = number
        detector.tensor_metadata["x"] = X
    assert size() <= before + 2


@pytest.mark.parametrize("kind", ["memory", "local"])
def test_detectors_save_to_their_store(kind: str, tmp_path: Path) -> None:
    store = fh.MemoryStore() if kind == "memory" else fh.LocalStore(tmp_path)
    model = Model()
    detector = fi.LayerActivationDetector("model_head", store=store)
    other = Seen(store=store)
    layers = fi.Layers(model)
    layers.register_hook("model_head", detector)
    layers.register_hook("head", other)
    outputs = []
    for batch in range(2):
        outputs.append(model(X + batch))
        detector.save("run", batch)
        other.tensor_metadata["sum"] = outputs[-1].sum()
        other.save("run", batch)
        store.complete("run", batch)
    for batch, output in enumerate(outputs):
        found = store.get("run", batch, "head")
        assert [*found] == ["activations", "sum"]
        assert torch.equal(found["activations"], output)
        assert found["sum"] == output.sum()
    store.close()
    with pytest.raises(fh.StoreError, match="closed"):
        detector.save("run", 2)
    layers.unregister_hook(detector)
    with pytest.raises(fh.HookError, match="on no layer"):
        detector.save("run", 2)
    layers.register_hook("head", nowhere := Seen())
    with pytest.raises(fh.HookError, match="no store"):
        nowhere.save("run", 2)
    with pytest.raises(fh.HookTypeError, match=r"a ferrohook.Store or None, got object"):
        Seen(store=object())


# Layers


def test_hooks_are_found_by_layer_and_type() -> None:
    layers = fi.Layers(Model())
    shift, seen, pre = Shift(), Seen(), Seen("pre_forward", hook_id="pre")
    assert layers.register_hook("head", shift) == shift.id == shift.hook_id
    layers.register_hook("model_head", seen)
    assert layers.register_hook(0, pre) == "pre"
    assert layers.get_hooks() == [shift, seen, pre]
    assert layers.get_hooks("head") == layers.get_hooks("model_head") == [shift, seen]
    assert layers.get_hooks(hook_type=fi.HookType.PRE_FORWARD) == [pre]
    assert layers.get_hooks(0, "forward") == []
    assert layers.get_controllers() == [shift]
    assert layers.get_detectors() == [seen, pre]
    assert pre.context is layers
    assert layers.unregister_hook("pre")
    assert pre.context is None
    assert not layers.unregister_hook("pre")
    assert not layers.unregister_hook(pre)
    assert not layers.enable_hook("pre")
    assert not layers.disable_hook("pre")
    assert layers.get_hooks() == [shift, seen]


def test_names_are_printed_with_shapes(capsys: pytest.CaptureFixture[str]) -> None:
    fi.Layers(Model()).print_layer_names()
    printed = capsys.readouterr().out.splitlines()
    assert "head: torch.Size([3, 4])" in printed
    assert "layers.0: no weight" in printed


def test_layers_are_those_of_the_moment() -> None:
    model = nn.Sequential(nn.Identity())
    layers = fi.Layers(model)
    model[0] = nn.Linear(4, 4)
    model.append(nn.Identity())
    layers.register_hook(1, seen := Seen())
    layers.register_hook("0", Shift())
    assert torch.equal(model(X), model[0].forward(X) + 1)
    assert len(seen.seen) == 1


def test_a_module_inside_itself_has_places() -> None:
    model = nn.Sequential(nn.Identity())
    model[0].back = model
    assert fi.Layers(model).get_layer_names() == ["0", "0.back"]


def test_a_flat_name_of_several_layers_is_refused() -> None:
    model = nn.Module()
    model.a_b = nn.Linear(2, 2)
    model.a = nn.Module()
    model.a.b = nn.Linear(2, 2)
    layers = fi.Layers(model)
    with pytest.raises(fh.SelectionError, match=r"'module_a_b' is 2 layers .* 'a_b', 'a\.b'"):
        layers.register_hook("module_a_b", Seen())
    layers.register_hook("a.b", seen := Seen())
    assert seen.layer == "a.b"


def test_wrapped_and_instrumented_models_have_layers_too() -> None:
    for model in (Model(), fh.HookedModule(Model())):
        layers = fi.Layers(model)
        for path in ("head", "", "model_layers_0"):
            layers.register_hook(path, fi.FunctionController(path, double))
        with fh.instrument(model):
            changed = model(X)
        assert torch.equal(model(X), changed)
        layers.disable_all_hooks()
        assert not torch.equal(model(X), changed)


def test_a_hook_can_be_registered_anew_when_its_module_was_cleared() -> None:
    layers = on(module := fh.HookedModule(nn.Identity()), hook := Seen())
    module.clear_hooks()
    assert hook.layer is None
    assert "on" not in repr(hook).split(",")[1]
    layers.register_hook("", hook)
    module(X)
    assert len(hook.seen) == 1
    assert layers.get_hooks() == [hook]


def test_a_hook_that_was_cleared_moves_to_another_model() -> None:
    old, new = fi.Layers(Model()), fi.Layers(Model())
    old.register_hook("head", hook := Seen())
    registry = find_registry(old.model.head)  # type: ignore[arg-type]
    assert registry is not None
    registry.clear()
    new.register_hook("head", hook)
    assert old.get_hooks() == []
    assert new.get_hooks() == [hook]
    assert find_registry(old.model.head) is None  # type: ignore[arg-type]


def test_modules_are_given_back() -> None:
    model = Model()
    layers = fi.Layers(model)
    hooks = [Seen() for _ in range(3)]
    for hook in hooks:
        layers.register_hook("head", hook)
    assert find_registry(model.head) is not None
    for hook in hooks:
        layers.unregister_hook(hook)
    assert find_registry(model.head) is None


def test_hooks_outlast_their_layers_and_nothing_outlasts_the_model() -> None:
    module = nn.Identity()
    on(module, seen := Seen())
    gc.collect()
    module(X)
    assert len(seen.seen) == 1
    left = weakref.ref(module), weakref.ref(seen)
    del module, seen
    gc.collect()
    assert [each() for each in left] == [None, None]


def test_registering_from_many_threads_loses_nothing(switch_often: None) -> None:
    model = Model()
    layers = fi.Layers(model)
    shared = Seen()
    barrier = threading.Barrier(6)
    stop = threading.Event()

    def call() -> int:
        barrier.wait(LIMIT)
        while not stop.is_set():
            model(X)
        return 0

    def register() -> int:
        barrier.wait(LIMIT)
        taken = 0
        for _ in range(30):
            try:
                layers.register_hook("layers.1", shared)
            except fh.HookError:
                continue
            taken += 1
            own = [Seen(), Shift(), Seen("pre_forward")]
            for hook in own:
                layers.register_hook("layers.0.mlp", hook)
            for hook in own:
                assert layers.unregister_hook(hook)
            assert layers.unregister_hook(shared)
        return taken

    with ThreadPoolExecutor(6) as pool:
        callers = [pool.submit(call) for _ in range(2)]
        registering = [pool.submit(register) for _ in range(4)]
        try:
            assert sum(each.result(LIMIT) for each in registering) >= 1
        finally:
            stop.set()
        for caller in callers:
            caller.result(LIMIT)
    assert layers.get_hooks() == []
    assert find_registry(model.layers[0].mlp) is None
    assert find_registry(model.layers[1]) is None


# Bad input


def test_unknown_layers_are_refused_with_the_closest_names() -> None:
    layers = fi.Layers(Model())
    for ask in (
        lambda name: layers.register_hook(name, Seen()),
        layers.get_hooks,
    ):
        with pytest.raises(fh.SelectionError, match=r"no layer 'layer\.0\.mlp'.*'layers\.0\.mlp'"):
            ask("layer.0.mlp")
        with pytest.raises(fh.SelectionError, match="'model_head'"):
            ask("model_heads")
        with pytest.raises(fh.SelectionError, match="the first are '', 'layers'"):
            ask("§")
        for index in (-1, 14, 10**30):
            with pytest.raises(fh.SelectionError, match=f"14 layers, counted from 0, got {index}"):
                ask(index)
    for wrong in (None, True, 1.5, ["head"], Model()):
        with pytest.raises(fh.HookTypeError, match="name or the index of a layer"):
            layers.register_hook(wrong, Seen())  # type: ignore[arg-type]
    assert layers.get_hooks() == []


def test_a_layer_signature_is_asked_for_where_it_is_needed() -> None:
    with pytest.raises(fh.HookTypeError, match="got NoneType"):
        fi.LayerActivationDetector(None)  # type: ignore[arg-type]
    with pytest.raises(fh.HookTypeError, match="got NoneType"):
        fi.FunctionController(None, double)  # type: ignore[arg-type]
    for wrong in (True, 1.5, b"head"):
        with pytest.raises(fh.HookTypeError, match=type(wrong).__name__):
            Seen(layer_signature=wrong)


def test_unknown_hook_types_are_refused() -> None:
    layers = fi.Layers(Model())
    hook = Seen()
    for ask in (
        Seen,
        lambda kind: fi.FunctionController("head", double, kind),
        lambda kind: layers.register_hook("head", hook, kind),
        lambda kind: layers.get_hooks(hook_type=kind),
        lambda kind: setattr(hook, "hook_type", kind),
    ):
        with pytest.raises(
            ValueError, match="'backward': expected one of 'forward', 'pre_forward'"
        ):
            ask("backward")
        with pytest.raises(fh.HookTypeError, match="got int"):
            ask(3)
    for detector, kind in (
        (fi.ModelInputDetector(), "forward"),
        (fi.ModelOutputDetector(), "pre_forward"),
    ):
        with pytest.raises(ValueError, match=type(detector).__name__):
            layers.register_hook("", detector, kind)
    assert layers.get_hooks() == []
    assert find_registry(layers.model.head) is None  # type: ignore[arg-type]


def test_the_type_of_a_registered_hook_is_fixed() -> None:
    layers = on(nn.Identity(), hook := Seen())
    with pytest.raises(fh.HookError, match="is registered"):
        hook.hook_type = fi.HookType.PRE_FORWARD
    layers.unregister_hook(hook)
    hook.hook_type = "pre_forward"  # type: ignore[assignment]
    assert hook.hook_type is fi.HookType.PRE_FORWARD


def test_what_is_no_hook_or_no_model_is_refused() -> None:
    layers = fi.Layers(Model())
    for wrong in (double, Seen, None):
        with pytest.raises(fh.HookTypeError, match="a Detector or a Controller"):
            layers.register_hook("head", wrong)  # type: ignore[arg-type]
    for elsewhere in (double, fh.detectors.CallCounter(), fh.ForwardHook(print)):
        with pytest.raises(
            fh.HookTypeError, match=r"that is for ferrohook\.register\(model, layer"
        ):
            layers.register_hook("head", elsewhere)  # type: ignore[arg-type]
    with pytest.raises(fh.HookTypeError, match=r"instance of nn\.Module, got the class Model"):
        fi.Layers(Model)  # type: ignore[arg-type]
    for act in (layers.unregister_hook, layers.enable_hook, layers.disable_hook):
        with pytest.raises(fh.HookTypeError, match="got int"):
            act(3)  # type: ignore[operator]
    with pytest.raises(fh.HookTypeError, match="hook_id is a str or None, got int"):
        Seen(hook_id=3)
    for options, error in (
        ({"priority": "high"}, fh.HookTypeError),
        ({"on_error": "no"}, ValueError),
    ):
        with pytest.raises(error):
            layers.register_hook("head", Seen(), **options)  # type: ignore[arg-type]
    with pytest.raises(fh.HookTypeError, match="target_dtype"):
        fi.LayerActivationDetector("head", target_dtype="float16")  # type: ignore[arg-type]
    with pytest.raises(fh.HookTypeError, match="encodings is a mapping"):
        fi.ModelInputDetector().set_inputs_from_encodings(IDS)  # type: ignore[arg-type]
    assert find_registry(layers.model.head) is None  # type: ignore[arg-type]


def test_a_hook_is_registered_once_and_so_is_an_id() -> None:
    layers = fi.Layers(Model())
    layers.register_hook("head", hook := Seen(hook_id="mine"))
    for each in (layers, fi.Layers(layers.model)):
        with pytest.raises(fh.HookError, match="'mine', forward on 'head'> is registered"):
            each.register_hook("layers.0", hook)
    with pytest.raises(fh.HookError, match="the id 'mine' is that of"):
        layers.register_hook("layers.0", Seen(hook_id="mine"))
    assert layers.get_hooks() == [hook]
    assert hook.layer == "head"
    assert find_registry(layers.model.layers[0]) is None  # type: ignore[index, arg-type]


def test_functions_are_held_to_their_promise() -> None:
    for wrong in (None, "double", 3):
        with pytest.raises(fh.HookTypeError, match=f"function .* got {type(wrong).__name__}"):
            fi.FunctionController("", wrong)  # type: ignore[arg-type]

    def failing(x: Tensor) -> Tensor:
        raise OSError(x.shape)

    for function, error, text in (
        (lambda x: None, fh.HookTypeError, "function returns a tensor, got NoneType"),
        (lambda x: x.tolist(), fh.HookTypeError, "got list"),
        (lambda x: x[:1], ValueError, r"\(2, 4\), got \(1, 4\)"),
        (lambda x: x.sum(), ValueError, r"got \(\)"),
        (failing, OSError, "torch.Size"),
    ):
        for kind in fi.HookType:
            hook = fi.FunctionController("", function, kind, hook_id="mine")  # type: ignore[arg-type]
            layers = on(module := nn.Identity(), hook)
            with pytest.raises(fi.HookError, match=text) as raised:
                module(X)
            assert isinstance(raised.value, fh.HookError)
            assert isinstance(raised.value.original_error, error)
            assert raised.value.__cause__ is raised.value.original_error
            assert (raised.value.hook_id, raised.value.hook_type) == ("mine", kind.value)
            assert "'mine' on the model itself" in str(raised.value)
            layers.unregister_hook(hook)
            assert module(X) is X

    class Wrong(fi.Controller):
        def modify_activations(self, module: Any, inputs: Any, output: Any) -> Any:
            return "no tensor"

    on(module := nn.Identity(), Wrong())
    with pytest.raises(fi.HookError, match="returns a tensor or None, got str"):
        module(X)


def test_a_detector_that_raises_is_named() -> None:
    model = Model()
    layers = fi.Layers(model)
    for kind in fi.HookType:
        hook = Raises(kind, "mine")
        layers.register_hook("head", hook)
        with pytest.raises(
            fi.HookError, match=f"the {kind} hook 'mine' on 'head' raised KeyError"
        ) as raised:
            model(X)
        assert raised.value.layer == "head"
        again = pickle.loads(pickle.dumps(raised.value))
        assert str(again) == str(raised.value)
        assert again.hook_id == "mine"
        layers.unregister_hook(hook)
    hand = nn.Identity()
    hand.register_forward_hook(Raises(hook_id="mine").get_torch_hook())
    with pytest.raises(fi.HookError, match="the forward hook 'mine' raised KeyError: 'mine'"):
        hand(X)


def test_a_detector_that_raises_can_be_switched_off(caplog: pytest.LogCaptureFixture) -> None:
    layers = fi.Layers(module := nn.Identity())
    layers.register_hook("", hook := Raises(hook_id="mine"), on_error="disable")
    with caplog.at_level(logging.WARNING, "ferrohook"):
        assert module(X) is X
        assert module(X) is X
    assert len(caplog.records) == 1
    assert "'mine'" in caplog.text
    assert not hook.enabled
    layers.unregister_hook(hook)
    assert not hook.enabled


# Copies and pickles


class Importable(fi.Detector):
    def __init__(self, name: str) -> None:
        super().__init__("pre_forward", hook_id=name)
        self.name = name

    def process_activations(self, module: nn.Module, input: Any, output: Any) -> None:
        self.metadata["seen"] = True


def test_hooks_are_pickled_by_importable_names() -> None:
    layers = fi.Layers(Model())
    hook = fi.FunctionController("head", double, "pre_forward", "mine")
    detector = fi.LayerActivationDetector(0, "kept", torch.float64, fh.MemoryStore())
    detector.set_context(lambda: "cannot be pickled")
    layers.register_hook("head", hook)
    layers.register_hook("head", detector)
    detector.disable()
    layers.model(X)
    again = pickle.loads(pickle.dumps(hook))
    assert again.function is double
    assert (again.id, again.hook_type, again.layer_signature) == ("mine", "pre_forward", "head")
    assert again.layer is None
    kept = pickle.loads(pickle.dumps(detector))
    assert kept.target_dtype == torch.float64
    assert kept.store is kept.context is None
    assert not kept.enabled
    assert not kept.metadata
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        pickle.dumps(fi.FunctionController("head", lambda x: x))


def test_layers_are_pickled_with_the_hooks_that_can_be() -> None:
    model = Model()
    layers = fi.Layers(model)
    layers.register_hook("head", fi.FunctionController("head", lambda x: x * 5, hook_id="left out"))
    layers.register_hook("head", fi.FunctionController("head", double, hook_id="mine"), priority=3)
    layers.register_hook("layers.0", Importable("name"))
    again = pickle.loads(pickle.dumps(layers))
    assert [hook.id for hook in again.get_hooks()] == ["mine", "name"]
    head = find_registry(again.model.head)
    assert head is not None
    assert head.list()[0][3] == 3
    layers.disable_hook("left out")
    assert torch.equal(again.model(X), model(X))
    assert again.get_detectors()[0].metadata == {"seen": True}
    buffer = io.BytesIO()
    torch.save(model, buffer)  # hooks of the model are no obstacle
    buffer.seek(0)
    plain = torch.load(buffer, weights_only=False)
    assert find_registry(plain.head) is None


def test_a_copy_of_a_model_has_hooks_of_its_own() -> None:
    model = Model()
    layers = fi.Layers(model)
    controller = fi.FunctionController("head", double)
    detector = fi.LayerActivationDetector("head", store=fh.MemoryStore())
    layers.register_hook("head", controller)
    layers.register_hook("head", detector)
    copied = copy.deepcopy(model)
    expected = model(X)
    detector.clear_captured()
    assert torch.equal(copied(X), expected)
    assert detector.get_captured() is None
    controller.disable()
    assert torch.equal(copied(X), expected)
    assert torch.equal(model(X) * 2, expected)
    other = copy.deepcopy(layers)
    assert other.model is not model
    assert other.get_hooks() == []
    assert torch.equal(other.model(X) * 2, expected)  # disabled, as it was copied


def test_a_copied_hook_is_registered_nowhere() -> None:
    store = fh.MemoryStore()
    hook = fi.LayerActivationDetector("head", store=store)
    hook.set_context("context")
    fi.Layers(Model()).register_hook("head", hook)
    for copied in (copy.deepcopy(hook), copy.copy(hook)):
        assert copied.layer is None
        assert copied.id == hook.id
        copied.disable()
        assert hook.enabled
    assert copy.deepcopy(hook).store is store
    assert copy.deepcopy(hook).context == "context"


# Compiled, and imported


@pytest.mark.filterwarnings("ignore")  # torch's own, of what it traces
@pytest.mark.parametrize("hook_type", ["forward", "pre_forward"])
def test_controllers_are_compiled_into_the_graph(hook_type: str) -> None:
    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(4, 4), nn.Identity())
    layers = fi.Layers(model)
    controller = fi.FunctionController("1", double, hook_type)
    layers.register_hook("1", controller)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    plain = model[0].forward(X)
    assert torch.equal(compiled(X), plain * 2)
    controller.disable()
    assert torch.equal(compiled(X), plain)
    controller.enable()
    assert torch.equal(compiled(X), plain * 2)
    layers.unregister_hook(controller)
    assert torch.equal(compiled(X), plain)
    layers.register_hook("1", fi.FunctionController("1", lambda x: x.mul_(3), hook_type))
    layers.register_hook("", fi.FunctionController("", lambda x: x.mul_(3), "pre_forward"))
    x = X.clone()
    assert torch.equal(compiled(x), model[0].forward(X * 3) * 3)
    assert torch.equal(x, X)


@pytest.mark.filterwarnings("ignore")  # torch's own, of what it traces
def test_detectors_collect_in_every_call_of_a_compiled_model() -> None:
    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
    detector = fi.LayerActivationDetector("0")
    fi.Layers(model).register_hook("0", detector)
    compiled = torch.compile(model, backend="eager")
    for scale in (1, 2, 3):
        compiled(X * scale)
        captured = detector.get_captured()
        assert captured is not None
        assert torch.equal(captured, model[0].forward(X * scale))


def test_ferrohook_does_not_import_it() -> None:
    code = "import sys, ferrohook; print('ferrohook.interventions' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"

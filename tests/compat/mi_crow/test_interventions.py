"""Detectors and controllers: faults of the original, keyword arguments, compiling."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import ferrohook as fh
from ferrohook.compat import mi_crow as fi
from support.interventions import IDS, MASK, Block, Lm, Model, Returns, Seen, Shift, X, double, on
from support.threads import in_threads

if TYPE_CHECKING:
    from collections.abc import Callable


class Echo(nn.Module):
    """Returns its arguments."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs


REGULAR = torch.tensor([[0, 1, 1, 0, 0], [0, 1, 0, 0, 0]]).bool()


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
    with pytest.raises(fi.HookError, match=r"wrote in place.* x \* 2 instead of x\.mul_"):
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


def test_writes_into_the_copy_of_a_controller_take_effect() -> None:
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


def test_gradients_reach_tensors_that_a_controller_uses() -> None:
    steering = torch.zeros(4, requires_grad=True)
    on(
        module := Returns((X.requires_grad_(False), "cache")),
        fi.FunctionController("x", lambda x: x + steering),
    )
    module()[0].sum().backward()
    assert torch.equal(steering.grad, torch.full((4,), 2.0))  # type: ignore[arg-type]


def test_a_shared_detector_keeps_data_by_thread(switch_often: None) -> None:
    model = Model()
    layers = fi.Layers(model)
    detector = fi.LayerActivationDetector("layers.0")
    inputs = fi.ModelInputDetector("", save_attention_mask=True)
    layers.register_hook("layers.0", detector)
    layers.register_hook("", inputs)
    threads, calls = 4, 200

    def work(number: int) -> int:
        x = torch.full((1, 4), float(number))
        expected = Block.forward(model.layers[0], x)[0]  # type: ignore[arg-type]
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

    assert in_threads(threads, work) == [0] * threads
    assert detector.get_captured() is None  # no call on this thread
    assert not detector.metadata


def test_a_detector_before_an_in_place_relu_keeps_the_original_values() -> None:
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


def test_detected_inputs_and_outputs_survive_overwriting_by_the_caller() -> None:
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
def test_registration_accepts_a_hook_type(own: str, given: str) -> None:
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


def test_detectors_run_after_the_controllers_of_their_layer() -> None:
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


def test_a_hook_of_a_scope_fires_in_it_until_it_is_left() -> None:
    layers = fi.Layers(module := nn.Identity())
    with fh.scope() as scope:
        layers.register_hook("", Shift(), scope=scope)
        assert torch.equal(module(X), X + 1)
        assert all(torch.equal(each, X) for each in in_threads(2, lambda _: module(X)))
    assert torch.equal(module(X), X)
    with pytest.raises(fh.errors.HookError, match="left"):
        layers.register_hook("", Shift(), scope=scope)
    assert type(module) is nn.Identity


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


def test_a_disabled_hook_stays_disabled_when_registered_again() -> None:
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
        lambda lm: lm(IDS, MASK, inputs_embeds=None),
        # With a KV cache: the mask covers cached tokens too.
        lambda lm: lm(IDS, torch.cat([torch.ones_like(MASK), MASK], 1)),
        lambda lm: lm(IDS, MASK),
        lambda lm: lm({"input_ids": IDS, "attention_mask": MASK}),
    ],
)
def test_positional_and_keyword_inputs_are_detected(call: Callable[[Lm], Any]) -> None:
    detector = fi.ModelInputDetector(save_attention_mask=True, special_token_ids={101, 102})
    on(lm := Lm(), detector)
    call(lm)
    assert torch.equal(detector.tensor_metadata["input_ids"], IDS)
    assert torch.equal(detector.tensor_metadata["attention_mask"], REGULAR)
    lm(inputs_embeds=X)
    assert not detector.tensor_metadata  # data of the previous call is gone
    lm(IDS, inputs_embeds=None)  # the dict of keywords is not the mask
    assert torch.equal(detector.tensor_metadata["attention_mask"], REGULAR | (IDS == 0))
    for shape in ((2, 3), (2, 1, 5, 5)):
        with pytest.raises(fi.HookError, match=r"mask has the shape .*, input_ids \(2, 5\)"):
            lm(IDS, torch.ones(shape))


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


def test_keyword_arguments_are_changed_in_calls_without_positional_tensors() -> None:
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


def test_pre_forward_detectors_get_keywords_after_positional_arguments() -> None:
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


def test_an_output_without_a_tensor_clears_the_previous_capture() -> None:
    detector = fi.LayerActivationDetector("")
    on(module := Returns(X), detector, Shift())
    module()
    assert detector.get_captured() is not None
    module.value = ("no", "tensor")
    assert module() == ("no", "tensor")
    assert detector.get_captured() is None
    assert not detector.metadata


# Compiled models, and importing ferrohook


@pytest.mark.filterwarnings("ignore")  # torch warns about traced code
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


@pytest.mark.filterwarnings("ignore")  # torch warns about traced code
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


def test_importing_ferrohook_does_not_import_interventions() -> None:
    code = "import sys, ferrohook; print('ferrohook.compat.mi_crow' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"

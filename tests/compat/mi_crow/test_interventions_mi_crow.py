"""Detectors and controllers, compared with mi_crow's."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from torch import nn

import ferrohook as fh
from ferrohook.compat import mi_crow as fi
from support.internals import find_registry
from support.interventions import IDS, MASK, Lm, Model, Output, Returns, Seen, X, double, on

if TYPE_CHECKING:
    from collections.abc import Callable


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


class Pair(NamedTuple):
    first: Any
    second: Any


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
def test_an_applied_modification_equals_mi_crows_in_a_new_output(
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


def test_a_replacement_preserves_the_structure_around_it() -> None:
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


# Hooks


@pytest.mark.parametrize("hook_type", ["forward", "pre_forward"])
def test_models_with_controllers_compute_the_same_as_with_mi_crows(
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


def test_layer_detectors_equal_mi_crows(mi_crow: Any, crow_layers: Any) -> None:
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


@pytest.mark.parametrize("copy", ["clone", "checked"])
@pytest.mark.parametrize(
    "name", ["LayerActivationDetector", "ModelInputDetector", "ModelOutputDetector"]
)
def test_what_a_subclass_collects_stays_as_in_mi_crow(mi_crow: Any, name: str, copy: str) -> None:
    found = []
    for package in (mi_crow, fi):
        base: Any = getattr(package, name)

        class Counting(base):  # type: ignore[misc]
            def process_activations(self, module: Any, input: Any, output: Any) -> None:
                super().process_activations(module, input, output)
                self.metadata["calls"] = self.metadata.get("calls", 0) + 1
                former = self.tensor_metadata.get("sum", torch.zeros(0))
                self.tensor_metadata["sum"] = torch.cat([former, torch.ones(1)])

        by_layer = name.startswith("Layer")
        options: dict[str, Any] = {"copy": copy} if by_layer and package is fi else {}
        detector = Counting(*[""] * by_layer, **options)
        for number in range(3):
            detector.process_activations(Lm(), (IDS + number,), X + number)
        collected = [sorted((detector.metadata | detector.tensor_metadata).items())]
        detector.clear_captured()
        collected.append(sorted(detector.metadata.items()))
        found.append(repr(collected))
    assert found[0] == found[1]
    assert found[0].endswith("[('calls', 3)]]")


def test_input_detectors_equal_mi_crows(mi_crow: Any) -> None:
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
def test_output_detectors_equal_mi_crows(mi_crow: Any, value: Any) -> None:
    options: Any = {"save_output_hidden_state": True}
    their, our = mi_crow.ModelOutputDetector(**options), fi.ModelOutputDetector(**options)
    if not (
        isinstance(value, Output) and isinstance(value.last_hidden_state, str)
    ):  # raises in mi_crow
        their.process_activations(None, (), value)
    on(module := Returns(value), our)
    module()
    assert dict(our.metadata) == their.metadata
    assert our.tensor_metadata.keys() == their.tensor_metadata.keys()
    for key, tensor in their.tensor_metadata.items():
        assert torch.equal(our.tensor_metadata[key], tensor)


def test_flat_names_and_indices_equal_mi_crows(crow_layers: Any) -> None:
    model = Model()
    model.shared = model.layers[0].mlp
    crow, layers = crow_layers(model), fi.Layers(model)
    names = layers.get_layer_names()
    assert len(set(names)) == len(names) == len(crow.get_layer_names())
    for index, (path, flat) in enumerate(zip(names, crow.get_layer_names(), strict=True)):
        hook = Seen()
        for signature in (path, flat, index):
            if path == "layers":  # a container: never called
                with pytest.raises(fh.SelectionError, match="never called"):
                    layers.register_hook(signature, hook)
                continue
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


def test_a_hook_that_is_detector_and_controller_detects_first(mi_crow: Any) -> None:
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


def test_torch_hooks_get_keywords_with_with_kwargs() -> None:
    module = Lm()
    detector = fi.ModelInputDetector()
    module.register_forward_pre_hook(detector.get_torch_hook(), with_kwargs=True)
    module(input_ids=IDS)
    assert torch.equal(detector.tensor_metadata["input_ids"], IDS)
    module = nn.Identity()
    pre = fi.FunctionController("", double, "pre_forward")
    module.register_forward_pre_hook(pre.get_torch_hook(), with_kwargs=True)
    assert torch.equal(module(input=X), X * 2)

"""Recording over the lifetime of a model."""

from __future__ import annotations

import contextvars
import copy
import gc
import io
import pickle
import sys
import textwrap
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ferrohook as fh
from ferrohook.compat.transformers import capture_outputs, uninstall
from ferrohook.compat.transformers.layers import installation_of
from support.internals import in_no_scope, instrumented
from support.interpreters import assert_ends_well, run_fresh, run_with_torch
from support.limits import LIMIT
from support.recording import Attention, Checkpointed, Layer, Model, X, expected, same

if TYPE_CHECKING:
    from collections.abc import Callable


def test_the_first_recording_instruments_and_uninstall_restores() -> None:
    model = Model()
    before = [(type(module), set(vars(module))) for module in model.modules()]
    model(X)
    assert [(type(module), set(vars(module))) for module in model.modules()] == before
    model(X, output_hidden_states=True)
    assert type(model.layers[0]) is not Layer
    assert model.layers[0].__class__ is Layer
    uninstall(model)
    assert [(type(module), set(vars(module))) for module in model.modules()] == before
    uninstall(model)
    assert len(model(X, output_hidden_states=True)["hidden_states"]) == 4


def test_uninstall_covers_sub_models_and_leaves_other_instrumentation() -> None:
    outer = nn.Sequential(Model())
    with fh.instrument(outer):
        seen: list[Any] = []
        outer[0].layers[0].register_forward_hook(lambda *args: seen.append(args))
        outer[0](X, output_hidden_states=True)
        uninstall(outer)
        assert "_ferrohook_recording" not in vars(outer[0])
        outer(X)
        assert len(seen) == 2
    assert type(outer[0].layers[0]) is Layer


def test_a_recorded_model_is_copied_saved_and_pickled() -> None:
    model = Model()
    states, _ = expected(model)
    model(X, output_hidden_states=True)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = [
        pickle.loads(pickle.dumps(model)),
        torch.load(file, weights_only=False),
        copy.deepcopy(model),
        copy.copy(model),
    ]
    for copied in copies[:3]:
        assert type(copied.layers[0]) is Layer
        assert vars(copied).keys() == vars(Model()).keys()
    for each in (*copies, model):
        assert same(each(X, output_hidden_states=True)["hidden_states"], states)
        assert same(each(X, output_hidden_states=True)["hidden_states"], states)


def test_a_copy_with_user_hooks_records_independently() -> None:
    model = Model()
    fh.instrument(model)
    model.layers[0].register_forward_hook(lambda *_: None)
    model(X, output_hidden_states=True)
    copied = copy.deepcopy(model)
    assert len(copied(X, output_hidden_states=True)["hidden_states"]) == 4
    assert len(model(X, output_hidden_states=True)["hidden_states"]) == 4


def _in_a_new_dict_of_the_same(layers: nn.ModuleList) -> None:
    layers._modules = dict(layers._modules)
    layers._modules["1"] = Layer()


def _in_a_new_state(layers: nn.ModuleList) -> None:
    layers.__dict__ = {**vars(layers), "_modules": {**layers._modules, "1": Layer()}}


@pytest.mark.parametrize(
    "change",
    [
        lambda layers: layers.append(Layer()),
        lambda layers: layers.insert(0, Layer()),
        lambda layers: layers.__setitem__(0, Layer()),
        lambda layers: layers.__delitem__(0),
        lambda layers: setattr(layers, "0", Layer()),
        lambda layers: setattr(layers[0], "attention", Attention()),
        lambda layers: layers._modules.__setitem__("0", Layer()),
        lambda layers: layers._modules.update({"0": Layer(), "1": Layer()}),
        lambda layers: layers._modules.popitem(),
        lambda layers: setattr(layers, "_modules", {"0": Layer(), "1": Layer()}),
        lambda layers: vars(layers).__setitem__("_modules", {"0": Layer()}),
        lambda layers: vars(layers).update(_modules={"0": Layer()}),
        _in_a_new_dict_of_the_same,
        _in_a_new_state,
    ],
)
def test_any_change_of_the_layers_is_detected(
    change: Callable[[nn.ModuleList], object],
) -> None:
    model = Model(4)
    for _ in range(3):
        model(X, output_hidden_states=True)
        before = [*model.layers.modules()]
        change(model.layers)
        assert [*model.layers.modules()] != before
        states, attentions = expected(model)
        for _ in range(3):  # later calls hit the cache
            output = model(X, output_hidden_states=True, output_attentions=True)
            assert same(output["hidden_states"], states)
            assert same(output["attentions"], attentions)


def test_a_layer_that_replaces_a_freed_one_at_its_address_is_recorded() -> None:
    model = Model(1)
    for _ in range(20):
        assert len(model(X, output_attentions=True)["attentions"]) == 1
        del model.layers[0]
        model.layers.append(Layer())
        model.layers[0].attention = Attention()


def test_a_layer_added_inside_a_leaf_is_recorded() -> None:
    model = Model(1)
    assert len(model(X, output_attentions=True)["attentions"]) == 1
    mix = model.layers[0].attention.mix
    mix.inner = Attention()
    mix.register_forward_pre_hook(lambda module, args: (module.inner(args[0])[0],))
    assert len(model(X, output_attentions=True)["attentions"]) == 2


def test_a_layer_that_outlives_its_model_is_restored() -> None:
    layer = Layer()
    for _ in range(3):
        model = Model(1)
        model.layers[0] = layer
        assert len(model(X, output_hidden_states=True)["hidden_states"]) == 2
        del model
        gc.collect()
        assert type(layer) is Layer
        assert instrumented(layer) == []


def test_all_modules_of_a_recording_model_are_instrumented_until_uninstall() -> None:
    model = Model()
    plain = {module: type(module) for module in model.modules()}
    model(X)
    assert instrumented(model) == []
    model(X, output_hidden_states=True)
    assert len(instrumented(model)) == len(list(model.modules()))
    model.layers.append(Layer())
    model(X, output_hidden_states=True)
    assert len(instrumented(model)) == len(list(model.modules()))
    uninstall(model)
    assert instrumented(model) == []
    assert all(type(module) is cls for module, cls in plain.items())


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_modules_that_cannot_be_instrumented_stay_unchanged() -> None:
    model = Model()
    model.register_module("scripted", torch.jit.script(nn.ReLU()))
    states = expected(model)[0]
    assert same(model(X, output_hidden_states=True)["hidden_states"], states)
    assert {*dict(model.named_modules())} - {*instrumented(model)} == {"scripted"}


def test_two_models_share_a_layer() -> None:
    one, other = Model(2), Model(2)
    other.layers[1] = one.layers[0]
    for _ in range(2):
        for model in (one, other):
            states, attentions = expected(model)
            output = model(X, output_hidden_states=True, output_attentions=True)
            assert same(output["hidden_states"], states)
            assert same(output["attentions"], attentions)
    uninstall(one)
    assert same(other(X, output_hidden_states=True)["hidden_states"], expected(other)[0])


def test_a_context_that_outlives_its_call_records_nothing_more() -> None:
    contexts: list[contextvars.Context] = []

    class Keeps(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            contexts.append(contextvars.copy_context())
            return super().forward(x)

    model = Model(1)
    model.layers[0] = Keeps()
    model(X, output_hidden_states=True)
    result = weakref.ref(contexts[0].run(model.layers[0], X * 2))
    assert result() is None


class Recorder(SimpleNamespace):
    """A recorder that can change in place, like transformers' own."""

    target_class: type[nn.Module]


@pytest.mark.parametrize(
    ("declared", "change"),
    [
        (Layer, lambda model: setattr(model, "_can_record_outputs", {"hidden_states": Attention})),
        (Layer, lambda model: model._can_record_outputs.update(hidden_states="Attention")),
        ([Layer], lambda model: model._can_record_outputs["hidden_states"].insert(0, Attention)),
        (
            Recorder(target_class=Layer),
            lambda model: setattr(
                model._can_record_outputs["hidden_states"], "target_class", Attention
            ),
        ),
    ],
    ids=["a new one", "another class", "a list in place", "a recorder in place"],
)
def test_a_changed_declaration_takes_effect(declared: Any, change: Any) -> None:
    model = Model()
    model._can_record_outputs = {"hidden_states": declared}
    model(X, output_hidden_states=True)
    installed = installation_of(model)
    model(X, output_hidden_states=True)
    assert installation_of(model) is installed
    change(model)
    first = model.layers[0].attention(X)[0]
    states = model(X, output_hidden_states=True)["hidden_states"]
    assert torch.equal(states[1], first)


def test_an_exception_ends_the_recording() -> None:
    class Fails(Layer):
        broken = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.broken:
                msg = "layer"
                raise KeyboardInterrupt(msg)
            return super().forward(x)

    model = Model()
    model.layers[1] = Fails()
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt, match="layer"):
            model(X, output_hidden_states=True)
    assert in_no_scope()
    Fails.broken = False
    assert list(model(X)) == ["last_hidden_state"]
    assert len(model(X, output_hidden_states=True)["hidden_states"]) == 4


def test_recorded_tensors_are_freed_with_the_output() -> None:
    model = Model()
    output = model(X, output_hidden_states=True, output_attentions=True)
    refs = [weakref.ref(each) for each in (*output["hidden_states"][1:], *output["attentions"])]
    gc.disable()
    try:
        del output
        assert [ref() for ref in refs] == [None] * len(refs)
    finally:
        gc.enable()


def test_recorded_tensors_of_a_failed_call_are_freed() -> None:
    refs: list[weakref.ref[torch.Tensor]] = []
    contexts: list[contextvars.Context] = []

    class Notes(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            contexts.append(contextvars.copy_context())
            y = super().forward(x)
            refs.append(weakref.ref(y))
            return y

    class Fails(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ZeroDivisionError

    model = Model()
    model.layers[0] = model.layers[1] = Notes()
    model.layers[2] = Fails()
    with pytest.raises(ZeroDivisionError):
        model(X, output_hidden_states=True, output_attentions=True)
    gc.collect()
    # A live context keeps nothing of the call made in it.
    assert len(contexts) == len(refs) == 2
    assert [ref() for ref in refs] == [None, None]


def test_a_live_context_keeps_no_recorded_tensors() -> None:
    contexts: list[contextvars.Context] = []

    class Keeps(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            contexts.append(contextvars.copy_context())
            return super().forward(x)

    model = Model()
    model.layers = nn.ModuleList(Keeps() for _ in range(3))
    output = model(X, output_hidden_states=True, output_attentions=True)
    refs = [weakref.ref(each) for each in (*output["hidden_states"][1:], *output["attentions"])]
    del output
    gc.collect()
    assert len(contexts) == 3
    assert [ref() for ref in refs] == [None] * len(refs)


def test_a_recorded_model_is_freed_with_its_last_reference() -> None:
    model = Model()
    model(X, output_hidden_states=True)
    refs = [weakref.ref(module) for module in model.modules()]
    del model
    gc.collect()
    assert [ref() for ref in refs] == [None] * len(refs)


def test_importing_ferrohook_does_not_import_recording() -> None:
    assert "recording" not in vars(fh) or "ferrohook.compat.transformers" in sys.modules
    code = "import sys, ferrohook; print([m for m in sys.modules if 'ferrohook.rec' in m])"
    assert_ends_well(run_fresh(code), "[]\n")


def test_interpreter_exit_is_silent() -> None:
    code = textwrap.dedent("""
        import ferrohook.attach.instrument, torch
        from ferrohook.compat.transformers import capture_outputs
        class Model(torch.nn.Module):
            _can_record_outputs = {"states": torch.nn.Linear}
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(2, 2)
            @capture_outputs
            def forward(self, x, **kwargs):
                return {"output": self.layer(x)}
        model = Model()
        model(torch.ones(1, 2), output_states=True)
        # Goes when that module has lost its variables.
        ferrohook.attach.instrument._MODEL = model
        """)
    assert_ends_well(run_with_torch(code))


class Forces(Checkpointed):
    """Takes gradients in its forward."""

    @capture_outputs
    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        output = super().forward.__wrapped__(self, x)  # type: ignore[attr-defined]
        total = output["last_hidden_state"].sum()
        return output | {"force": torch.autograd.grad(total, x, retain_graph=True)[0]}


@pytest.mark.parametrize(
    ("kind", "reentrant"), [(Checkpointed, True), (Checkpointed, False), (Forces, False)]
)
def test_checkpointed_layers_are_recorded_once(
    kind: type[Checkpointed], *, reentrant: bool
) -> None:
    model = kind()
    model.reentrant = reentrant
    states, attentions = expected(model)
    calls: list[int] = []
    model.layers[0].register_forward_pre_hook(lambda *_: calls.append(1))
    x = X.clone().requires_grad_()
    output = model(x, output_hidden_states=True, output_attentions=True)
    output["last_hidden_state"].sum().backward()
    assert len(calls) == 2 + ("force" in output)
    assert same(output["hidden_states"], states)
    assert same(output["attentions"], attentions)


def test_layers_recomputed_in_backward_are_not_attributed_to_another_call() -> None:
    in_forward, done = threading.Event(), threading.Event()

    class Waits(Model):
        waiting = False

        @capture_outputs
        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=True)
                if self.waiting and threading.current_thread() is not threading.main_thread():
                    in_forward.set()
                    assert done.wait(LIMIT)
            return {"last_hidden_state": self.norm(x)}

    model = Waits()
    states, _ = expected(model)
    loss = model(X.clone().requires_grad_())["last_hidden_state"].sum()
    model.waiting = True
    with ThreadPoolExecutor(1) as pool:
        recorded = pool.submit(model, X.clone().requires_grad_(), output_hidden_states=True)
        assert in_forward.wait(LIMIT)
        # A new thread, like autograd's GPU threads.
        backward = threading.Thread(target=loss.backward)
        backward.start()
        backward.join(LIMIT)
        done.set()
        assert same(recorded.result(LIMIT)["hidden_states"], states)

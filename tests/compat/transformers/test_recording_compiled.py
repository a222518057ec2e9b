"""Recording under torch.compile."""
# ruff: noqa: RUF012 (declarations are dicts of the class, as transformers has them)

from __future__ import annotations

import contextvars
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from ferrohook.compat.transformers import (
    OutputRecorder,
    UnattributedWarning,
    capture_outputs,
    uninstall,
)
from support.compiling import compiled
from support.internals import in_no_scope
from support.recording import (
    FLAGS,
    Attention,
    Checkpointed,
    Helped,
    Layer,
    Looped,
    Model,
    Outer,
    X,
    expected,
    same,
    wrong_calls,
)


@compiled
def test_a_compiled_forward_records_in_its_graph() -> None:
    model = Model()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = X.clone().requires_grad_()
    states, attentions = expected(model, x)
    output = compiled(x, output_hidden_states=True, output_attentions=True)
    assert same(output["hidden_states"], states)
    assert same(output["attentions"], attentions)
    (gradient,) = torch.autograd.grad(output["hidden_states"][1].sum(), x)
    assert torch.equal(gradient, torch.autograd.grad(states[1].sum(), x)[0])
    kept = [s is not None for s in compiled(x, output_hidden_states=[0, -1])["hidden_states"]]
    assert kept == [True, False, False, True]
    assert list(compiled(x)) == ["last_hidden_state"]
    # A change is traced again.
    model.layers.append(Layer())
    assert same(compiled(x, output_hidden_states=True)["hidden_states"], expected(model, x)[0])
    uninstall(model)
    assert same(compiled(x, output_hidden_states=True)["hidden_states"], expected(model, x)[0])


@compiled
@pytest.mark.usefixtures("switch_often")
@pytest.mark.parametrize("broken", [False, True], ids=["fullgraph", "graph breaks"])
def test_threads_record_in_isolation_compiled(*, broken: bool) -> None:
    model = Model()
    if broken:
        model.layers = nn.ModuleList(Breaks() for _ in range(3))
    compiled = torch.compile(model, fullgraph=not broken, backend="eager")
    with torch.no_grad():
        for flags in FLAGS:  # compiles ahead: otherwise Dynamo compiles once per thread
            compiled(X, **flags)
    assert wrong_calls(model, compiled) == []


class Breaks(Layer):
    """A layer that breaks the graph of the enclosing code."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


class BreaksBehind(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        torch._dynamo.graph_break()
        return x


class Disabled(Model):
    """Runs its layers with Dynamo disabled."""

    @capture_outputs
    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        for layer in self.layers:
            x = torch.compiler.disable(layer.__call__)(x)
        return {"last_hidden_state": self.norm(x)}


@compiled
@pytest.mark.parametrize(
    ("kind", "cls", "inside"),
    [
        (Model, Layer, True),
        (Model, Breaks, False),
        (Model, Breaks, True),
        (Model, BreaksBehind, False),
        (Disabled, Layer, False),
        (Disabled, Breaks, True),
    ],
)
def test_layers_added_after_compiling_are_recorded(
    kind: type[Model], cls: type[Layer], *, inside: bool
) -> None:
    model = kind()
    model.layers = nn.ModuleList(cls() for _ in range(2))

    def around(x: torch.Tensor, **flags: Any) -> Any:
        return model(x, **flags)

    compiled = torch.compile(around if inside else model, backend="eager")

    def recorded_as_expected() -> bool:
        states, attentions = expected(model)
        output = compiled(X, output_hidden_states=True, output_attentions=True)
        return same(output["hidden_states"], states) and same(output["attentions"], attentions)

    with torch.no_grad():
        assert recorded_as_expected()
        model.layers.append(cls())
        assert recorded_as_expected()
        model.layers[1] = Layer()
        model.layers[0].attention = Attention()
        assert recorded_as_expected()
        uninstall(model)
        assert recorded_as_expected()


@compiled
def test_an_exception_ends_the_recording_compiled() -> None:
    class Fails(Breaks):
        broken = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.broken:
                torch._dynamo.graph_break()
                raise ZeroDivisionError
            return super().forward(x)

    model = Model()
    model.layers[1] = Fails()
    compiled = torch.compile(model, backend="eager")
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            compiled(X, output_hidden_states=True)
    assert in_no_scope()
    # The next call of a layer is not attributed to the failed call.
    result = weakref.ref(model.layers[0](X))
    assert result() is None
    Fails.broken = False
    assert list(compiled(X)) == list(model(X)) == ["last_hidden_state"]
    for called in (compiled, model):
        assert same(called(X, output_hidden_states=True)["hidden_states"], expected(model)[0])


@compiled
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers_break_the_graph_and_are_recorded_once(*, reentrant: bool) -> None:
    model = Checkpointed()
    model.reentrant = reentrant
    x = X.clone().requires_grad_()
    states, attentions = expected(model, x)
    flags = {"output_hidden_states": True, "output_attentions": True}
    with pytest.raises(torch._dynamo.exc.Unsupported, match="checkpoint"):
        torch.compile(model, fullgraph=True, backend="aot_eager")(x, **flags)
    torch._dynamo.reset()
    output = torch.compile(model, backend="aot_eager")(x, **flags)
    output["last_hidden_state"].sum().backward()
    assert same(output["hidden_states"], states)
    assert same(output["attentions"], attentions)


@compiled
def test_a_layer_in_a_branch_of_torch_cond_raises() -> None:
    class Branches(Model):
        @capture_outputs
        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            return {"x": torch.cond(x.sum() > 0, self.layers[0], self.layers[1], (x,))}

    compiled = torch.compile(Branches(), backend="eager")
    with pytest.raises(torch._dynamo.exc.UncapturedHigherOrderOpError):
        compiled(X, output_hidden_states=True)
    assert list(compiled(X)) == ["x"]


@compiled
@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_model_returns_what_it_recorded(*, strict: bool) -> None:
    class Exported(Model):
        @capture_outputs
        def forward(self, x: torch.Tensor, **_flags: Any) -> dict[str, Any]:
            for layer in self.layers:
                x = layer(x)
            return {"last_hidden_state": self.norm(x)}

    model = Exported()
    flags = {"output_hidden_states": True}
    exported = torch.export.export(model, (X,), flags, strict=strict).module()
    assert same(exported(X, **flags)["hidden_states"], expected(model)[0])
    assert same(model(X, **flags)["hidden_states"], expected(model)[0])
    assert list(model(X)) == ["last_hidden_state"]


@compiled
@pytest.mark.parametrize("kind", [Model, Looped])
def test_selected_states_may_differ_between_calls_of_one_compiled_model(kind: type[Model]) -> None:
    model = kind()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for asked in (1, 2, [0, -1], [1, -1], [-2, -1], (1,), (3,)):
        given, wanted = (
            each(X, output_hidden_states=asked)["hidden_states"] for each in (compiled, model)
        )
        assert [state is None for state in given] == [state is None for state in wanted], asked


@compiled
def test_a_layer_on_a_worker_thread_of_a_compiled_forward_is_recorded_or_warned_about() -> None:
    model = Helped()
    compiled = torch.compile(model, backend="eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        states = compiled(X, output_hidden_states=True)["hidden_states"]
    told = any(issubclass(each.category, UnattributedWarning) for each in caught)
    assert len(states) == 4 or told


@compiled
def test_a_layer_in_a_fresh_context_of_code_compiled_inside_is_recorded() -> None:
    class Pieces(Model):
        @capture_outputs
        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            for layer in self.layers:
                run = contextvars.Context().run
                x = torch.compile(lambda x, run=run, layer=layer: run(layer, x), backend="eager")(x)
            return {"last_hidden_state": self.norm(x)}

    model = Pieces()
    assert same(model(X, output_hidden_states=True)["hidden_states"], expected(model)[0])


@compiled
def test_the_error_of_fullgraph_inside_a_recording_forward_names_the_reason() -> None:
    model = Outer()
    model.inner.compile(backend="eager", fullgraph=True)
    # The reason is not a lock of ours: traced code never meets one.
    told = "a forward that records runs eagerly, and this forward is inside one"
    with pytest.raises(torch._dynamo.exc.Unsupported, match=told) as raised:
        model(X, output_hidden_states=True)
    assert "RLock" not in str(raised.value)
    assert in_no_scope()
    assert "hidden_states" in model.inner(X, output_hidden_states=True)


@compiled
def test_compiled_layers_and_sub_models_in_an_eager_forward() -> None:
    model = Model()
    states, _ = expected(model)
    model.layers[1].compile(backend="eager")
    assert same(model(X, output_hidden_states=True)["hidden_states"], states)
    outer = Outer()
    outer.inner.compile(backend="eager")
    output = outer(X, output_hidden_states=True)
    assert len(output["hidden_states"]) == 2
    assert same(output["inner"]["hidden_states"], expected(outer.inner)[0])
    nested = torch.compile(Outer(), fullgraph=True, backend="eager")
    output = nested(X, output_hidden_states=True)
    assert len(output["hidden_states"]) == 2
    assert len(output["inner"]["hidden_states"]) == 3


@compiled
def test_recorder_options_apply_compiled() -> None:
    class Declares(Model):
        _can_record_outputs = {
            "hidden_states": OutputRecorder(Layer, detach=True, dtype=torch.float16)
        }

    compiled = torch.compile(Declares(), fullgraph=True, backend="eager")
    x = X.clone().requires_grad_()
    states = compiled(x, output_hidden_states=True)["hidden_states"]
    assert [state.dtype for state in states] == [torch.float16] * 4
    assert not any(state.requires_grad for state in states)

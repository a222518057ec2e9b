"""Contract 23: `torch.compile` has hooks in the graph, and changes take effect."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.modules import module as torch_global

import ferrohook as fh
from support.compiling import BACKENDS, compiles
from support.numbers import close

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = compiles


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


class OwnForward(nn.Sequential):
    """Model with its own forward: torch 2.13 compiles none of torch's in place."""

    def forward(self, input: Tensor) -> Any:
        return super().forward(input)


def alone(hooked: nn.Module) -> nn.Module:
    return hooked


def inside_a_sequential(hooked: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), hooked, nn.ReLU())


class Compiled:
    """A model compiled with fullgraph, compared with its eager run."""

    def __init__(self, model: nn.Module, backend: str) -> None:
        self.model = model
        self.compiled = torch.compile(model, fullgraph=True, backend=backend)
        self.x = torch.randn(3, 4)

    def check(self) -> Tensor:
        """Asserts equal outputs, and no recompilation without a change."""
        output = self.compiled(self.x)
        assert close(output, self.model(self.x))
        compiled = graphs()
        assert torch.equal(self.compiled(self.x), output)
        assert graphs() == compiled, "compiled again although nothing changed"
        return output


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("place", [alone, inside_a_sequential])
def test_every_change_of_the_hooks_takes_effect_at_the_next_call(
    backend: str, place: Callable[[nn.Module], nn.Module]
) -> None:
    hooked = fh.HookedModule(nn.Linear(4, 4))
    compiled = Compiled(place(hooked), backend)
    plain = compiled.check()

    double = hooked.register_forward_hook(lambda _module, _args, output: output * 2)
    doubled = compiled.check()
    assert not close(doubled, plain)

    pre = hooked.register_forward_pre_hook(lambda _module, args: (args[0] + 1,))
    assert not close(compiled.check(), doubled)

    pre.disable()
    assert close(compiled.check(), doubled)

    shift = hooked.register_forward_hook(lambda _module, _args, output: output + 1)
    last = compiled.check()
    shift.priority = 1
    first = compiled.check()
    assert not close(last, first)

    double.remove()
    shift.remove()
    assert close(compiled.check(), plain)
    pre.enable()
    assert not close(compiled.check(), plain)
    hooked.clear_hooks()
    assert close(compiled.check(), plain)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_typed_and_keyword_hooks_are_in_the_graph(backend: str) -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return x * scale

    hooked = fh.HookedModule(Scaled())
    shapes: list[torch.Size] = []

    @fh.ForwardPreHook
    def triple(input: Tensor) -> Tensor:
        return input * 3

    @fh.ForwardHook
    def watch(input: Tensor, output: Tensor) -> None:
        shapes.append(output.shape)

    def shift(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> Tensor:
        return output + kwargs["scale"]

    def rescale(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, {"scale": kwargs["scale"] + 1}

    hooked.register_forward_pre_hook(triple)
    hooked.register_forward_pre_hook(rescale, with_kwargs=True)
    hooked.register_forward_hook(watch)
    hooked.register_forward_hook(shift, with_kwargs=True)
    compiled = torch.compile(hooked, fullgraph=True, backend=backend)
    x = torch.randn(3)
    assert close(compiled(x, scale=1.0), x * 6 + 2)
    assert close(hooked(x, scale=1.0), x * 6 + 2)
    assert shapes == [torch.Size([3]), torch.Size([3])]


def test_hooks_get_modules_of_the_same_classes_as_in_eager_mode() -> None:
    hooked = fh.HookedModule(nn.Linear(4, 4))
    for cls, factor in ((nn.Linear, 2), (fh.HookedModule, 3), (nn.ReLU, 5)):
        hooked.register_forward_hook(
            lambda module, _args, output, cls=cls, factor=factor: (
                output * factor if isinstance(module, cls) else output
            )
        )
    compiled = Compiled(hooked, "eager")
    assert close(compiled.check(), hooked.inner(compiled.x) * 6)


def test_the_module_s_own_torch_hooks_and_nested_wrappers_are_in_the_graph() -> None:
    inner = nn.Linear(4, 4)
    outer = fh.HookedModule(fh.HookedModule(inner))
    inner.register_forward_hook(lambda _module, _args, output: output + 1)
    outer.inner.register_forward_hook(lambda _module, _args, output: output * 2)
    outer.register_forward_hook(lambda _module, _args, output: output - 3)
    compiled = Compiled(outer, "eager")
    assert close(compiled.check(), (inner(compiled.x)) * 2 - 3)


def test_gradients_equal_those_of_eager_mode() -> None:
    hooked = fh.HookedModule(nn.Linear(4, 4))
    hooked.register_forward_hook(lambda _module, _args, output: output.sin())
    x = torch.randn(3, 4)
    grads = []
    for model in (hooked, torch.compile(hooked, fullgraph=True, backend="aot_eager")):
        hooked.zero_grad()
        model(x).pow(2).sum().backward()
        grads.append(hooked.weight.grad)
    assert close(*grads)


def test_backward_hooks_break_the_graph_and_fire_or_raise_but_are_never_dropped() -> None:
    hooked = fh.HookedModule(nn.Linear(4, 4))
    handle = hooked.register_full_backward_hook(lambda *_: None)
    x = torch.randn(3, 4, requires_grad=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="compiled autograd"):
        torch.compile(hooked, fullgraph=True, backend="eager")(x)
    torch._dynamo.reset()
    torch.compile(hooked, backend="eager")(x).sum().backward()
    assert handle.calls == 1


def test_backward_hooks_are_traced_with_compiled_autograd() -> None:
    hooked = fh.HookedModule(nn.Linear(4, 4))
    hooked.register_full_backward_hook(lambda _module, grad_input, _go: (grad_input[0] * 3,))
    x = torch.randn(3, 4, requires_grad=True)
    hooked(x).sum().backward()
    expected, x.grad = x.grad, None
    with torch._dynamo.config.patch(compiled_autograd=True):
        compiled = torch.compile(hooked, fullgraph=True, backend="eager")

        @torch.compile(backend="eager")
        def step() -> None:
            compiled(x).sum().backward()

        step()
    assert expected is not None
    assert x.grad is not None
    assert close(x.grad, expected)


@pytest.mark.parametrize("place", [alone, inside_a_sequential])
def test_a_hook_that_raises_is_not_dropped(
    place: Callable[[nn.Module], nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    hooked = fh.HookedModule(nn.Linear(4, 4))

    def fail(*_: Any) -> None:
        msg = "boom"
        raise ValueError(msg)

    handle = hooked.register_forward_hook(fail)
    model = place(hooked)
    x = torch.randn(3, 4)
    with pytest.raises(ValueError, match="boom"):
        torch.compile(model, backend="eager")(x)
    handle.remove()
    torch._dynamo.reset()
    lenient = hooked.register_forward_hook(fail, on_error="disable")
    with caplog.at_level(logging.ERROR, logger="ferrohook"):
        output = torch.compile(model, backend="eager")(x)
    assert close(output, model(x))
    assert not lenient.enabled
    assert [record.name for record in caplog.records].count("ferrohook") == 1


@pytest.mark.parametrize("option", [{"always_call": True}, {"on_error": "ignore"}])
def test_always_call_and_on_error_break_the_graph(option: dict[str, Any]) -> None:
    class Picky(nn.Module):
        def forward(self, x: Tensor, index: Tensor) -> Tensor:
            return x[index]

    hooked = fh.HookedModule(Picky())
    handle = hooked.register_forward_hook(lambda *_: None, **option)
    x = torch.randn(3)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(hooked, fullgraph=True, backend="eager")(x, torch.tensor(1))
    torch._dynamo.reset()
    compiled = torch.compile(hooked, backend="eager")
    assert compiled(x, torch.tensor(1)) == x[1]
    with pytest.raises(IndexError):
        compiled(x, torch.tensor(7))
    assert handle.calls == (2 if "always_call" in option else 1)


@pytest.mark.parametrize("call", ["keywords only", "a list"])
def test_backward_hooks_on_values_that_torch_ignores_break_the_graph(call: str) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return [x * 2] if call == "a list" else x * 2

    hooked = fh.HookedModule(Model())
    seen: list[Any] = []
    hooked.register_full_backward_hook(lambda _module, gi, go: seen.append((gi[0], go[0])))
    x = torch.ones(3, requires_grad=True)
    with torch._dynamo.config.patch(compiled_autograd=True):
        compiled = torch.compile(hooked, backend="eager")
        output = compiled(x=x) if call == "keywords only" else compiled(x)
        (output[0] if call == "a list" else output).sum().backward()
    ((grad_input, grad_output),) = seen
    assert torch.equal(grad_input, torch.full((3,), 2.0))
    assert torch.equal(grad_output, torch.ones(3))


@pytest.mark.parametrize("make", [fh.ForwardHook, fh.BackwardHook])
def test_wrong_results_of_typed_hooks_raise(make: Any) -> None:
    hooked = fh.HookedModule(nn.Linear(4, 4))

    def meddle(first: Any, second: Any) -> Any:
        return second

    fh.register(hooked, "", make(meddle))

    def step() -> None:
        compiled = torch.compile(hooked, backend="eager")
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            compiled(torch.randn(3, 4, requires_grad=True)).sum().backward()

    with pytest.raises(fh.HookTypeError):
        step()


def test_compiling_the_wrapped_module_leaves_the_hooks_around_it() -> None:
    hooked = fh.HookedModule(OwnForward(nn.Linear(4, 4)))
    x = torch.randn(3, 4)
    expected = hooked(x) * 2
    handle = hooked.register_forward_hook(lambda _module, _args, output: output * 2)
    hooked.compile(backend="eager", fullgraph=True)
    assert close(hooked(x), expected)
    assert handle.calls == 1


def test_a_second_backend_and_dynamic_shapes() -> None:
    hooked = fh.HookedModule(nn.Linear(4, 4))
    hooked.register_forward_hook(lambda _module, _args, output: output * output.shape[0])
    compiled = torch.compile(hooked, fullgraph=True, backend="eager", dynamic=True)
    for size in (2, 3, 5, 7):
        x = torch.randn(size, 4)
        assert close(compiled(x), hooked(x))


# --- Instrumented models ------------------------------------------------------------------------


@pytest.fixture(params=BACKENDS)
def instrumented(request: pytest.FixtureRequest) -> Iterator[Compiled]:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 4)))
    with fh.instrument(model):
        yield Compiled(model, request.param)


def test_changes_of_an_instrumented_model_take_effect_at_the_next_call(
    instrumented: Compiled,
) -> None:
    plain = instrumented.check()
    inner: Any = instrumented.model.get_submodule("2.0")
    handle = inner.register_forward_hook(lambda module, args, output: output + 1)
    assert close(instrumented.check(), plain + 1)
    handle.disable()
    assert close(instrumented.check(), plain)
    handle.enable()
    ahead = inner.register_forward_hook(lambda module, args, output: output * 0, priority=1)
    assert torch.equal(instrumented.check(), torch.ones_like(plain))
    ahead.remove()
    handle.remove()
    assert close(instrumented.check(), plain)


def test_hooks_in_torch_s_dicts_are_in_the_graph_ahead_of_ours(instrumented: Compiled) -> None:
    plain = instrumented.check()
    inner: Any = instrumented.model.get_submodule("2.0")
    inner.register_forward_hook(lambda module, args, output: output * 2)
    nn.Module.register_forward_hook(inner, lambda module, args, output: output + 1)
    nn.Module.register_forward_pre_hook(
        inner, lambda module, args, kwargs: ((args[0] * 0,), kwargs), with_kwargs=True
    )
    assert close(instrumented.check(), (inner.bias + 1).expand_as(plain) * 2)


# AOT back ends call their own modules, which have the global hooks too.
@pytest.mark.parametrize("instrumented", ["eager"], indirect=True)
@pytest.mark.parametrize("phase", ["forward_pre", "forward"])
def test_a_global_hook_dict_that_is_replaced_takes_effect(
    instrumented: Compiled, phase: str
) -> None:
    plain = instrumented.check()
    hooks: dict[Any, Any] = OrderedDict(zero=lambda _module, *values: values[-1] * 0)
    if phase == "forward_pre":
        hooks = OrderedDict(zero=lambda _module, args: (args[0] * 0,))
    with mock.patch.object(torch_global, f"_global_{phase}_hooks", hooks):
        assert not close(instrumented.check(), plain)
    assert close(instrumented.check(), plain)


@pytest.mark.parametrize("option", ["with_kwargs", "always_call"])
def test_global_forward_hooks_get_their_arguments(option: str) -> None:
    fh.instrument(model := nn.Linear(4, 4))
    log: list[Any] = []
    compiled = torch.compile(model, backend="eager", fullgraph=option == "with_kwargs")
    with (
        # torch's handle leaves its entry there.
        mock.patch.dict(torch_global._global_forward_hooks_with_kwargs),
        torch_global.register_module_forward_hook(
            lambda module, _args, *values: log.append((module, [type(it) for it in values])),
            **{option: True},
        ),
        torch.no_grad(),
    ):
        compiled(torch.randn(3, 4))
    types = [dict] * (option == "with_kwargs") + [Tensor]
    assert [values for module, values in log if module is model] == [types]


def test_global_backward_hooks_fire() -> None:
    fh.instrument(model := nn.Linear(4, 4))
    log: list[Any] = []
    with (
        torch_global.register_module_full_backward_hook(lambda *call: log.append(call)),
        torch_global.register_module_full_backward_pre_hook(lambda *call: log.append(call)),
    ):
        compiled = torch.compile(model, backend="eager")
        compiled(torch.randn(3, 4, requires_grad=True)).sum().backward()
    assert [len(call) for call in log if call[0] is model] == [2, 3]


@pytest.mark.parametrize("name", ["__call__", "_call_impl"])
def test_a_replaced_call_of_all_modules_is_honoured(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, outputs = getattr(nn.Module, name), []
    monkeypatch.setattr(nn.Module, name, lambda *args, **kwargs: original(*args, **kwargs) * 2)
    for instrumented in (False, True):
        model = nn.Sequential(nn.Identity())
        if instrumented:
            fh.instrument(model)
        outputs.append(torch.compile(model, backend="eager")(torch.ones(1)))
    assert torch.equal(*outputs)


def test_a_scope_around_a_compiled_call(instrumented: Compiled) -> None:
    plain = instrumented.check()
    for _ in range(3):
        with fh.scope() as scope:
            steer = fh.register(instrumented.model, "2.0", add_one, scope=scope)
            assert close(instrumented.check(), plain + 1)
            in_thread: list[Tensor] = []
            other = threading.Thread(
                target=lambda calls=in_thread: calls.append(instrumented.compiled(instrumented.x))
            )
            other.start()
            other.join(60)
            assert close(in_thread[0], plain)
        steer.remove()
        assert close(instrumented.check(), plain)


def add_one(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output + 1


@pytest.mark.parametrize("inputs", [False, True])
def test_a_capture_around_a_compiled_call(instrumented: Compiled, inputs: bool) -> None:
    instrumented.check()
    compiled = []
    for _ in range(12):  # more often than Dynamo's recompile limit
        before = graphs()
        with fh.capture(instrumented.model, inputs=inputs) as acts:
            instrumented.compiled(instrumented.x)
        compiled.append(graphs() - before)
        with fh.capture(instrumented.model, inputs=inputs) as eager:
            instrumented.model(instrumented.x)
        assert list(acts) == list(eager)
        for name, tensor in acts.items():
            assert close(tensor, eager[name])
    assert compiled == [1] + [0] * 11
    instrumented.check()


def test_captures_that_break_the_graph_are_taken_outside_of_it(instrumented: Compiled) -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            y = self.linear(x)
            return y, {"twice": y * 2}

    model = nn.ModuleDict({"pair": Pair()})
    call = torch.compile(lambda x: model["pair"](x)[0] * 3, backend="eager")
    x = torch.randn(3, 4)
    with fh.capture(model, "pair") as acts:
        call(x)
    first, rest = acts["pair"]
    assert torch.equal(rest["twice"], first * 2)
    with fh.capture(model, "pair.linear", detach=False) as acts:
        call(x)
    assert acts["pair.linear"].grad_fn is not None
    with fh.capture(model, "pair.linear", grads=True) as acts:
        call(x).sum().backward()
    assert torch.equal(acts.grads["pair.linear"], torch.full((3, 4), 3.0))
    with (
        fh.instrument(model),
        fh.capture(model, "pair"),
        pytest.raises(
            torch._dynamo.exc.Unsupported, match="captured output of a module has several tensors"
        ),
    ):
        torch.compile(model["pair"], backend="eager", fullgraph=True)(x)


@pytest.mark.parametrize("before", [True, False])
def test_a_model_compiled_in_place_runs_its_hooks_once(before: bool) -> None:
    model = OwnForward(nn.Linear(4, 4))
    x = torch.randn(3, 4)
    plain = model(x)
    if before:
        model.compile(backend="eager", fullgraph=True)
        model(x)
    with fh.instrument(model):
        if not before:
            model.compile(backend="eager", fullgraph=True)
        handle = model.register_forward_hook(lambda module, args, output: output + 1)
        inside = model[0].register_forward_hook(lambda module, args, output: output * 2)
        assert close(model(x), plain * 2 + 1)
        assert handle.calls == 1
        inside.remove()
        assert close(model(x), plain + 1)
    compiled = graphs()
    assert close(model(x), plain)
    assert graphs() <= compiled + 1


def test_restoring_takes_effect_in_compiled_calls(instrumented: Compiled) -> None:
    plain = instrumented.check()
    instrumented.model[2].register_forward_hook(lambda module, args, output: output + 1)  # type: ignore[index]
    assert close(instrumented.check(), plain + 1)
    fh.restore(instrumented.model)
    assert close(instrumented.check(), plain)


# --- Nested graph breaks: Dynamo splits the traced twin of the call -----------------------------


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        y = self.linear(x)
        return y, {"twice": y * 2}


class Listed(nn.Module):
    def forward(self, x: Tensor) -> list[Tensor]:
        return [x.sin()]


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pair, self.listed, self.linear = Pair(), Listed(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.pair(x=x)[0] * self.listed(x)[0] + self.linear(x)


@pytest.mark.parametrize("compiled_autograd", [False, True])
@pytest.mark.parametrize("name", ["linear", "pair", "pair.linear", "listed"])
def test_backward_hooks_fire_with_nested_graph_breaks(name: str, compiled_autograd: bool) -> None:
    model = Mixed()
    x = torch.randn(3, 4, requires_grad=True)
    seen: list[Tensor] = []
    with (
        fh.instrument(model),
        fh.register(model, name, lambda _m, gi, _go: seen.append(gi[0]), phase="backward"),
        torch._dynamo.config.patch(nested_graph_breaks=True, compiled_autograd=compiled_autograd),
    ):
        for call in (model, torch.compile(model, backend="eager")):
            call(x).sum().backward()
    eager, compiled = seen
    assert close(compiled, eager)


def test_hooks_that_break_the_graph_do_so_with_nested_graph_breaks() -> None:
    model, x = Mixed(), torch.randn(3, 4)
    with fh.instrument(model), torch._dynamo.config.patch(nested_graph_breaks=True):
        compiled = torch.compile(model, backend="eager")
        with fh.register(model, "pair", lambda *_: None, always_call=True) as always:
            assert close(compiled(x), model(x))
            assert always.calls == 2
        with fh.capture(model, "pair") as acts:
            compiled(x)
        first, rest = acts["pair"]
        assert torch.equal(rest["twice"], first * 2)
        with fh.capture(model, "linear", grads=True) as acts:
            compiled(x).sum().backward()
        assert torch.equal(acts.grads["linear"], torch.ones(3, 4))
        with (
            fh.capture(model, "pair", output_index=5),
            pytest.raises(fh.SelectionError, match="no output_index 5"),
        ):
            compiled(x)


def test_a_hook_in_a_transformer_layer_is_in_the_graph() -> None:
    """Its fast path calls no submodules: a trace does not take it either."""
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval()
    compiled, x = torch.compile(layer, backend="eager", fullgraph=True), torch.randn(2, 3, 4)
    with torch.no_grad():
        plain = compiled(x)
        for _ in range(2):
            with fh.register(layer, "linear1", lambda _m, _a, output: output * 0):
                torch.testing.assert_close(compiled(x), layer(x))
                assert not torch.allclose(compiled(x), plain)
            torch.testing.assert_close(compiled(x), plain)
        layer.linear1 = fh.HookedModule(layer.linear1)
        layer.linear1.register_forward_hook(lambda _m, _a, output: output * 0)
        torch.testing.assert_close(compiled(x), layer(x))


def test_a_request_that_failed_changes_nothing() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4)
    compiled = torch.compile(model, backend="eager")
    with fh.Plan(fh.on("0", fh.Zero())).open(model) as request:
        assert not compiled(x).any()
        request.fail(ValueError())
        assert torch.equal(compiled(x), model(x))
        assert compiled(x).any()

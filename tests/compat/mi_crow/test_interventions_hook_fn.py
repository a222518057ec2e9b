"""Direct subclasses of `Hook`, which implement mi_crow's `_hook_fn`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ferrohook as fh
from ferrohook.compat import mi_crow as fi
from support.interventions import X, on


class Doubles(fi.Hook):
    """Counts its calls, and returns the doubled input."""

    def __init__(self, hook_type: str = "forward") -> None:
        super().__init__(hook_type=hook_type)
        self.seen: list[tuple[Any, Any]] = []

    def _hook_fn(self, module: nn.Module, input: Any, output: Any) -> Any:
        self.seen.append((input, output))
        return (input[0] * 2,)


class Single(Doubles):
    def _hook_fn(self, module: nn.Module, input: Any, output: Any) -> Any:
        return input[0] * 2


class Fails(fi.Hook):
    def _hook_fn(self, module: nn.Module, input: Any, output: Any) -> None:
        raise ZeroDivisionError


def through_torch(hook: fi.Hook) -> Tensor:
    module = nn.Identity()
    if hook.hook_type is fi.HookType.FORWARD:
        module.register_forward_hook(hook.get_torch_hook())
    else:
        module.register_forward_pre_hook(hook.get_torch_hook())
    return module(X)


def through_layers(hook: fi.Hook) -> Tensor:
    on(module := nn.Identity(), hook)
    return module(X)


@pytest.mark.parametrize("call", [through_layers, through_torch])
def test_a_forward_hook_fn_runs_and_its_result_is_ignored(call: Any) -> None:
    hook = Doubles()
    assert call(hook) is X
    ((seen, output),) = hook.seen
    assert seen == (X,)
    assert output is X


@pytest.mark.parametrize("call", [through_layers, through_torch])
@pytest.mark.parametrize("kind", [Doubles, Single])
def test_a_pre_forward_hook_fn_replaces_the_input(kind: type[Doubles], call: Any) -> None:
    assert torch.equal(call(kind("pre_forward")), X * 2)


@pytest.mark.parametrize("hook_type", ["forward", "pre_forward"])
def test_its_exception_is_a_hook_error(hook_type: str) -> None:
    on(module := nn.Identity(), hook := Fails(hook_type=hook_type, hook_id="mine"))
    with pytest.raises(fi.HookError, match=f"the {hook_type} hook 'mine' .*ZeroDivision"):
        module(X)
    hook.disable()
    assert module(X) is X


def test_a_hook_without_hook_fn_is_refused() -> None:
    class Nothing(fi.Hook):
        pass

    for kind in (fi.Hook, Nothing):
        with pytest.raises(TypeError, match="_hook_fn"):
            kind()


@pytest.mark.parametrize(
    ("base", "method"),
    [(fi.Detector, "process_activations"), (fi.Controller, "modify_activations")],
)
def test_a_hook_fn_of_a_detector_or_controller_is_refused(base: Any, method: str) -> None:
    with pytest.raises(fh.HookTypeError, match=f"^Own has a _hook_fn, .* implement {method}"):

        class Own(base):  # type: ignore[misc]
            def _hook_fn(self, *args: Any) -> None: ...


def test_async_methods_are_refused() -> None:
    class Detects(fi.Detector):
        async def process_activations(self, *args: Any) -> None: ...  # type: ignore[override]

    class Controls(fi.Controller):
        async def modify_activations(self, *args: Any) -> None: ...  # type: ignore[override]

    class Hooks(fi.Hook):
        async def _hook_fn(self, *args: Any) -> None: ...

    async def function(x: Tensor) -> Tensor:
        return x

    for make in (Detects, Controls, Hooks, lambda: fi.FunctionController("", function)):  # type: ignore[arg-type, return-value]
        with pytest.raises(fh.HookTypeError, match=r"async function .* would never run"):
            make()

"""Python twin of the native call, which `torch.compile` traces in its place.

Dynamo reads the hooks from `HookedModule._registry.traced` and guards on the result, so the next
call after a change of hooks is traced again. It cannot trace the counting of calls: inside a
compiled region `HookHandle.calls` does not increase, and `HookHandle.traced` is true. Hooks with
`always_call` or an `on_error` other than `raise`, and hooks that raise while traced, break the
graph (with `fullgraph=True`: raise).
"""

# The twin is registered with Dynamo when Dynamo is first imported, which takes seconds. A capture
# stands in the graph as the operator `ferrohook::record`, which asks the context for its recorders
# when it runs: graphs traced in a capture have the operators of all modules that were captured
# before. These break the graph too: native detectors, captures that keep gradients, the graph or
# structures of several tensors, and backward hooks around structures or a call with only keywords.
# Backward hooks need compiled autograd, as PyTorch's do.

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn
from torch.fx.node import has_side_effect
from torch.nn.modules import module as module_globals
from torch.utils.hooks import BackwardHook

from ferrohook._core import HookedBase, record
from ferrohook.attach.attention import KEY as _POINTS
from ferrohook.attach.backward import UNTRACED, BackwardPass
from ferrohook.attach.dynamo import patch_dynamo
from ferrohook.effects.intervention import check_dtypes, number_dtype
from ferrohook.effects.parts import change_part, part_of
from ferrohook.errors import HookTypeError
from ferrohook.util.never_trace import after_dynamo_import, never_trace_frame
from ferrohook.util.tensors import parts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ferrohook._core import Registry


Rows: TypeAlias = "Sequence[tuple[Any, str, bool]]"
"""Hooks of one phase: callable, kind, `with_kwargs`."""
_TORCH_CALL, _TORCH_CALL_IMPL = nn.Module.__call__, nn.Module._call_impl
NO_TORCH_HOOKS: tuple[Rows, Rows, Rows, Rows] = ((), (), (), ())


def traced_call(self: HookedBase, *args: Any, **kwargs: Any) -> Any:
    """`HookedModule.__call__` for Dynamo."""
    native = HookedBase.__call__
    return _call(native, self, self._registry, self._inner, args, kwargs, NO_TORCH_HOOKS)


def traced_dispatch(native: Callable[..., Any]) -> Callable[..., Any]:
    """Makes the twin of `__call__` or `_call_impl` of instrumented modules for Dynamo."""

    def dispatch(self: Any, *args: Any, **kwargs: Any) -> Any:
        untraceable = (
            (self._backward_hooks and not self._is_full_backward_hook)
            or (
                module_globals._global_backward_hooks
                and not module_globals._global_is_full_backward_hook
            )
            or self._forward_hooks_always_called
            or module_globals._global_forward_hooks_always_called
        )
        replaced = (
            nn.Module.__call__ is not _TORCH_CALL
            or nn.Module._call_impl is not _TORCH_CALL_IMPL
            or "_call_impl" in self.__dict__
        )
        if untraceable or replaced:
            return call_untraced(native, self, args, kwargs)
        torch_hooks = (
            [
                (hook, "plain", number in self._forward_pre_hooks_with_kwargs)
                for number, hook in (
                    *module_globals._global_forward_pre_hooks.items(),
                    *self._forward_pre_hooks.items(),
                )
            ],
            [
                (
                    hook,
                    "plain",
                    number in self._forward_hooks_with_kwargs
                    or number in module_globals._global_forward_hooks_with_kwargs,
                )
                for number, hook in (
                    *module_globals._global_forward_hooks.items(),
                    *self._forward_hooks.items(),
                )
            ],
            [
                (hook, "plain", False)
                for hook in (
                    *module_globals._global_backward_pre_hooks.values(),
                    *self._backward_pre_hooks.values(),
                )
            ],
            [
                (hook, "plain", False)
                for hook in (
                    *module_globals._global_backward_hooks.values(),
                    *self._backward_hooks.values(),
                )
            ],
        )
        registry = self._ferrohook_dispatcher.registry
        # Guarded: points that come later are in no graph that was traced before.
        getattr(self, _POINTS, None)
        return _call(native, self, registry, self.forward, args, kwargs, torch_hooks)

    return dispatch


# With `nested_graph_breaks` the twin itself is split at a graph break and continues after it. So
# each one is the call of an untraced function that does the right thing.
def call_untraced(
    native: Callable[..., Any], module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Breaks the graph and makes the native call; frames inside it are traced again."""
    return native(module, *args, **kwargs)


def _call(  # noqa: PLR0913, PLR0917 (the state of a call)
    native: Callable[..., Any],
    self: Any,
    registry: Registry,
    target: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    torch_hooks: tuple[Rows, Rows, Rows, Rows],
) -> Any:
    phases, traceable = registry.traced
    if not traceable:
        # always_call and on_error apply when the graph itself fails, and some recorders store
        # tensors with their autograd graph.
        return call_untraced(native, self, args, kwargs)
    forward_pre, forward, backward_pre, backward = (
        (*torchs, *ours) for torchs, ours in zip(torch_hooks, phases, strict=True)
    )
    taps = (backward_pre or backward) and torch.is_grad_enabled()
    if taps and not _compiles_backward():
        torch._dynamo.graph_break("backward hooks are traced only with compiled autograd")
        return call_untraced(native, self, args, kwargs)
    args, kwargs = _forward_pre(self, registry, forward_pre, args, kwargs)
    tap = None
    if taps:
        tap = BackwardHook(
            self,
            [_plain_backward(hook, kind) for hook, kind, _ in backward],
            [_plain_backward(hook, kind) for hook, kind, _ in backward_pre],
        )
        if (args or not kwargs) and _flat(args):
            args = tap.setup_input_hook(args)
        else:
            args, kwargs = BackwardPass.tap_inputs(tap, args, kwargs)  # breaks the graph
    output = _forward(self, registry, forward, args, kwargs, target(*args, **kwargs))
    if tap is None:
        return output
    if isinstance(output, torch.Tensor) or (type(output) is tuple and _flat(output)):
        return tap.setup_output_hook(output)
    return BackwardPass.tap_outputs(tap, output)  # breaks the graph


def _flat(values: tuple[Any, ...]) -> bool:
    """Returns True if none of the values is a structure of tensors."""
    return all(isinstance(value, torch.Tensor) or not parts(value) for value in values)


def _compiles_backward() -> bool:
    # Dynamo imports the submodule itself.
    autograd: Any = torch._dynamo.compiled_autograd  # pyright: ignore[reportAttributeAccessIssue]
    return bool(autograd.compiled_autograd_enabled)


def _forward_pre(
    module: Any, registry: Registry, hooks: Rows, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    for hook, kind, with_kwargs in hooks:
        if kind == "recorder":
            value = (args[0] if len(args) == 1 else args) if args or not kwargs else kwargs
            _record(registry, "forward_pre", hook, value)
        elif kind == "intervention":
            if not args:
                msg = "an intervention on inputs needs a positional argument"
                raise HookTypeError(msg)
            changed = _intervene(hook, args[0] if len(args) == 1 else args)
            args = (changed,) if len(args) == 1 else changed
        elif kind == "typed":
            args = _check_typed_result(hook(args[0] if len(args) == 1 else args), args)
        elif with_kwargs:
            args, kwargs = _check_kwargs_result(hook(module, args, kwargs), args, kwargs)
        else:
            result = hook(module, args)
            if result is not None:
                args = result if isinstance(result, tuple) else (result,)
    return args, kwargs


def _forward(  # noqa: PLR0913, PLR0917 (the state of a call)
    module: Any,
    registry: Registry,
    hooks: Rows,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Any,
) -> Any:
    for hook, kind, with_kwargs in hooks:
        if kind == "recorder":
            _record(registry, "forward", hook, output)
            continue
        if kind == "intervention":
            output = _intervene(hook, output)
            continue
        if kind == "typed":
            _check_observer(hook(args[0] if len(args) == 1 else args, output), "ForwardHook")
            continue
        result = hook(module, args, kwargs, output) if with_kwargs else hook(module, args, output)
        if result is not None:
            output = result
    return output


def _intervene(row: tuple[Any, ...], value: Any) -> Any:
    """Applies an intervention; its vector and numbers are inputs of the graph."""
    cls, part, vector, on_gpus, scales, numbers = row

    def changed(x: torch.Tensor) -> torch.Tensor:
        if x.is_nested:  # in the layout `jagged`: no graph has others
            nested: Any = x
            dense = changed(nested.values())
            return torch.nested.nested_tensor_from_jagged(dense, nested.offsets(), nested.lengths())
        operands = []
        if cls.fields:
            check_dtypes(cls, x.dtype, vector)
        if vector is not None:
            if on_gpus is not None and x.is_cuda:
                prepared = on_gpus[x.device.index].tensor
            else:
                prepared = cls.prepare(vector, *scales)
            prepared = prepared.to(x.device, x.dtype)
            rows = cls.broadcasts and prepared.dim() > 1
            operands.append(prepared.expand_as(x) if rows else prepared)
        operands += numbers if x.is_cpu else [_on_device_of(x, number) for number in numbers]
        result: torch.Tensor = cls.formula(x, *operands)
        return result

    return change_part(value, part, changed, adds=cls.adds)


def _on_device_of(x: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    # A sum takes a number of the host on any device, without a copy.
    dtype = number_dtype(x.dtype)
    return x.new_zeros((), dtype=dtype) + number.to(dtype)


def _record(registry: Registry, phase: str, operator: tuple[Any, str], value: Any) -> None:
    part, key = operator
    tensor = part_of(value, part)
    if isinstance(tensor, torch.Tensor):
        torch.ops.ferrohook.record(tensor, registry.id_tensor, phase, key)
    elif (phase, key) in registry.operating:  # else no capture wants it in this call
        record_untraced(registry, phase, key, value)


def record_untraced(registry: Registry, phase: str, key: str, value: Any) -> None:
    """Breaks the graph and records the part of a value natively."""
    record(registry.module, phase, key, value, whole=True)


# In a CUDA graph it would record once, when that is captured: Inductor cuts the graph around it.
@torch.library.custom_op("ferrohook::record", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _record_op(value: torch.Tensor, module: torch.Tensor, phase: str, key: str) -> None:
    record(int(module), phase, key, value)


@_record_op.register_fake
def _(value: torch.Tensor, module: torch.Tensor, phase: str, key: str) -> None:
    pass


# Without this, dead code elimination removes the operator, which has no result.
has_side_effect(torch.ops.ferrohook.record.default)


def _check_kwargs_result(
    result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    if result is None:
        return args, kwargs
    if isinstance(result, tuple) and len(result) == len(("args", "kwargs")):
        return result
    msg = (
        f"forward pre-hook must return None or a tuple of (new_args, new_kwargs), but got {result}."
    )
    raise RuntimeError(msg)


def _check_observer(result: Any, kind: str) -> None:
    if result is not None:
        msg = f"a {kind} only observes and must return None, but it returned a value"
        raise HookTypeError(msg)


def _check_typed_result(result: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    if isinstance(result, tuple) and len(result) == len(args):
        return result
    if isinstance(result, torch.Tensor) and len(args) == 1:
        return (result,)
    msg = (
        f"a ForwardPreHook must return the call's {len(args)} arguments, got "
        f"{type(result).__name__}"
    )
    raise HookTypeError(msg)


def _plain_backward(hook: Any, kind: str) -> Any:
    """Returns a backward hook of PyTorch's contract."""

    def observe(_module: Any, grad_input: Any, grad_output: Any) -> None:
        _check_observer(hook(grad_input, grad_output), "BackwardHook")

    def change(_module: Any, gradients: Any, _grad_output: Any = None) -> Any:
        part = hook[1]
        # Structures are not traced, see `_call`: a lone gradient is a tensor's.
        only = part is None and len(gradients) == 1
        if (gradients[0] if only else part_of(gradients, part)) is None:
            return None  # autograd computes none
        return (_intervene(hook, gradients[0]),) if only else _intervene(hook, gradients)

    return {"typed": observe, "intervention": change}.get(kind, hook)


def trace_as(native: Any, twin: Any) -> None:
    """Makes Dynamo trace `twin` in place of `native`."""

    def substitute() -> None:
        torch.compiler.substitute_in_graph(native, skip_signature_check=True)(twin)

    after_dynamo_import(substitute)


never_trace_frame(
    call_untraced,
    "a module has a hook that graphs do not support: at positions (at=), with always_call or an "
    "on_error, a native detector, or a capture of gradients, with the autograd graph or with stop",
)
never_trace_frame(record_untraced, "a captured output of a module has several tensors")
for _function in UNTRACED:
    never_trace_frame(
        _function, "backward hooks around a structure of tensors, or around keywords only"
    )
trace_as(HookedBase.__call__, traced_call)
after_dynamo_import(patch_dynamo)

"""What `torch.compile` traces in place of the native call: the same walk, in Python.

Dynamo reads the hooks from `HookedModule._registry.traced` while it traces and guards on what it
read, so a later change of the hooks makes the next call trace anew. It cannot follow the counting
of calls: inside a compiled region `HookHandle.calls` stands still. Hooks with `always_call` or an
`on_error` other than `raise`, and those that raise while they are traced, break the graph (with
`fullgraph=True`: raise).
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.fx.node import has_side_effect
from torch.nn.modules import module as module_globals
from torch.utils.hooks import BackwardHook

from ferrohook._core import HookedBase, record
from ferrohook.errors import HookTypeError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    from ferrohook._core import Registry


Rows: TypeAlias = "Sequence[tuple[Any, str, bool]]"
"""Hooks of one phase: what to call, which kind it is, and whether it takes keywords."""
NO_TORCH_HOOKS: tuple[Rows, Rows, Rows, Rows] = ((), (), (), ())
_GLOBAL_PRE = module_globals._global_forward_pre_hooks
_GLOBAL = module_globals._global_forward_hooks


def traced_call(self: HookedBase, *args: Any, **kwargs: Any) -> Any:
    """`HookedModule.__call__` for Dynamo."""
    return _call(self, self._registry, self._inner, args, kwargs, NO_TORCH_HOOKS)


def traced_dispatch(self: Any, *args: Any, **kwargs: Any) -> Any:
    """`__call__` and `_call_impl` of an instrumented module for Dynamo."""
    deprecated = self._backward_hooks and not self._is_full_backward_hook
    if deprecated or self._forward_hooks_always_called:
        torch._dynamo.graph_break()
    torch_hooks = (
        [
            (hook, "plain", number in self._forward_pre_hooks_with_kwargs)
            for number, hook in (*_GLOBAL_PRE.items(), *self._forward_pre_hooks.items())
        ],
        [
            (hook, "plain", number in self._forward_hooks_with_kwargs)
            for number, hook in (*_GLOBAL.items(), *self._forward_hooks.items())
        ],
        [(hook, "plain", False) for hook in self._backward_pre_hooks.values()],
        [(hook, "plain", False) for hook in self._backward_hooks.values()],
    )
    registry = self._ferrohook_dispatcher.registry
    return _call(self, registry, self.forward, args, kwargs, torch_hooks)


# Where it is broken, the native call runs instead: what follows a break here is not reached.
def _call(  # noqa: PLR0913, PLR0917 (the state of a call)
    self: Any,
    registry: Registry,
    target: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    torch_hooks: tuple[Rows, Rows, Rows, Rows],
) -> Any:
    phases, traceable = registry.traced
    if not traceable:
        # always_call and on_error speak of what happens when the graph itself fails; and some
        # recorders keep what hangs on autograd's graph.
        torch._dynamo.graph_break()
    forward_pre, forward, backward_pre, backward = (
        (*torchs, *ours) for torchs, ours in zip(torch_hooks, phases, strict=True)
    )
    args, kwargs = _forward_pre(self, registry, forward_pre, args, kwargs)
    tap = None
    if (backward_pre or backward) and torch.is_grad_enabled():
        if kwargs and not args:
            torch._dynamo.graph_break()  # torch's hook, which Dynamo knows, does not see these
        # Dynamo follows this with compiled autograd and says that it needs it otherwise.
        tap = BackwardHook(
            self,
            [_as_plain(hook) if kind == "typed" else hook for hook, kind, _ in backward],
            [hook for hook, _, _ in backward_pre],
        )
        args = tap.setup_input_hook(args)
    output = _forward(self, registry, forward, args, kwargs, target(*args, **kwargs))
    if tap is None:
        return output
    if not isinstance(output, torch.Tensor | tuple):
        torch._dynamo.graph_break()  # nor lists and dicts
    return tap.setup_output_hook(output)


def _forward_pre(
    module: Any, registry: Registry, hooks: Rows, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    recorders = 0
    for hook, kind, with_kwargs in hooks:
        if kind == "recorder":
            taken = (args[0] if len(args) == 1 else args) if args or not kwargs else kwargs
            _record(registry, "forward_pre", recorders, hook, taken)
            recorders += 1
        elif kind == "typed":
            args = _typed_input(hook(args[0] if len(args) == 1 else args), args)
        elif with_kwargs:
            args, kwargs = _args_and_kwargs(hook(module, args, kwargs), args, kwargs)
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
    recorders = 0
    for hook, kind, with_kwargs in hooks:
        if kind == "recorder":
            _record(registry, "forward", recorders, hook, output)
            recorders += 1
            continue
        if kind == "typed":
            if hook(args[0] if len(args) == 1 else args, output) is not None:
                msg = "a ForwardHook observes and returns None, it returned a value"
                raise HookTypeError(msg)
            continue
        result = hook(module, args, kwargs, output) if with_kwargs else hook(module, args, output)
        if result is not None:
            output = result
    return output


def _record(registry: Registry, phase: str, position: int, part: Any, value: Any) -> None:
    if part is not None:
        by_name = isinstance(part, str) and not isinstance(value, dict)
        value = getattr(value, part) if by_name else value[part]
    if not isinstance(value, torch.Tensor):
        torch._dynamo.graph_break()  # the operator takes one tensor
    torch.ops.ferrohook.record(value, registry.module, phase, position)


@torch.library.custom_op("ferrohook::record", mutates_args=())
def _record_op(value: torch.Tensor, module: int, phase: str, position: int) -> None:
    # A copy: what was compiled may reuse the memory for what it computes next.
    record(module, phase, position, value.detach().clone())


@_record_op.register_fake
def _(value: torch.Tensor, module: int, phase: str, position: int) -> None:
    pass


# Graphs are cleaned of what has neither a result nor an effect.
has_side_effect(torch.ops.ferrohook.record.default)


def _args_and_kwargs(result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    if result is None:
        return args, kwargs
    if isinstance(result, tuple) and len(result) == len(("args", "kwargs")):
        return result
    msg = (
        f"forward pre-hook must return None or a tuple of (new_args, new_kwargs), but got {result}."
    )
    raise RuntimeError(msg)


def _typed_input(result: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    if isinstance(result, tuple) and len(result) == len(args):
        return result
    if isinstance(result, torch.Tensor) and len(args) == 1:
        return (result,)
    msg = (
        f"a ForwardPreHook returns the call's {len(args)} arguments, "
        f"it returned {type(result).__name__}"
    )
    raise HookTypeError(msg)


def _as_plain(hook: Any) -> Any:
    def plain(_module: Any, grad_input: Any, grad_output: Any) -> None:
        hook(grad_input, grad_output)

    return plain


_DYNAMO = "torch._dynamo"
_TOLD: list[Callable[[], object]] = []


def trace_as(native: Any, twin: Any) -> None:
    """Have Dynamo trace `twin` in place of `native`."""

    def tell() -> None:
        torch.compiler.substitute_in_graph(native, skip_signature_check=True)(twin)

    _tell(tell)


def never_trace(owner: type | ModuleType, name: str, reason: str) -> None:
    """Have Dynamo leave a function of a class or a module alone, and all that it calls."""

    def tell() -> None:
        disabled = torch.compiler.disable(vars(owner)[name], reason=reason)
        setattr(owner, name, disabled)

    _tell(tell)


def _tell(tell: Callable[[], object]) -> None:
    if _DYNAMO in sys.modules:
        tell()
    else:
        _TOLD.append(tell)


class _AfterDynamo(MetaPathFinder, Loader):
    """Tells Dynamo as soon as somebody imports it.

    To tell it is to import it, which takes seconds that users who compile nothing should not pay.
    """

    _looking = False

    def find_spec(
        self, name: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _DYNAMO or self._looking:
            return None
        self._looking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._looking = False
        if spec is not None and spec.loader is not None:
            self._loader = spec.loader
            spec.loader = self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        sys.meta_path.remove(self)
        while _TOLD:
            _TOLD.pop(0)()


trace_as(HookedBase.__call__, traced_call)
if _DYNAMO not in sys.modules:
    sys.meta_path.insert(0, _AfterDynamo())

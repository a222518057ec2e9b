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
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import BackwardHook

from ferrohook._core import HookedBase
from ferrohook.errors import HookTypeError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    from ferrohook._core import Registry


def traced_call(self: HookedBase, *args: Any, **kwargs: Any) -> Any:
    """`HookedModule.__call__` for Dynamo."""
    return _call(self, self._registry, self._inner, args, kwargs)


def traced_dispatch(self: Any, *args: Any, **kwargs: Any) -> Any:
    """`__call__` of an instrumented module for Dynamo."""
    registry = self._ferrohook_dispatcher.registry
    hooks = self._forward_pre_hooks or self._forward_hooks
    if hooks or self._backward_hooks or self._backward_pre_hooks:
        # torch's hooks are not traced with ours: the call runs as it is.
        torch._dynamo.graph_break()
    return _call(self, registry, self.forward, args, kwargs)


def _call(
    self: Any, registry: Registry, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    phases, traceable = registry.traced
    forward_pre, forward, backward_pre, backward = phases
    if not traceable:
        # always_call and on_error speak of what happens when the graph itself fails.
        torch._dynamo.graph_break()
    for hook, kind, with_kwargs in forward_pre:
        if kind == "typed":
            args = _typed_input(hook(args[0] if len(args) == 1 else args), args)
        elif with_kwargs:
            args, kwargs = _args_and_kwargs(hook(self, args, kwargs), args, kwargs)
        else:
            result = hook(self, args)
            if result is not None:
                args = result if isinstance(result, tuple) else (result,)
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
    output = _forward(self, forward, args, kwargs, target(*args, **kwargs))
    if tap is None:
        return output
    if not isinstance(output, torch.Tensor | tuple):
        torch._dynamo.graph_break()  # nor lists and dicts
    return tap.setup_output_hook(output)


def _forward(
    module: Any,
    hooks: tuple[tuple[Any, str, bool], ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Any,
) -> Any:
    for hook, kind, with_kwargs in hooks:
        if kind == "typed":
            if hook(args[0] if len(args) == 1 else args, output) is not None:
                msg = "a ForwardHook observes and returns None, it returned a value"
                raise HookTypeError(msg)
            continue
        result = hook(module, args, kwargs, output) if with_kwargs else hook(module, args, output)
        if result is not None:
            output = result
    return output


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
_TWINS: dict[Any, Any] = {}


def trace_as(native: Any, twin: Any) -> None:
    """Have Dynamo trace `twin` in place of `native`."""
    _TWINS[native] = twin
    if _DYNAMO in sys.modules:
        torch.compiler.substitute_in_graph(native, skip_signature_check=True)(twin)


class _AfterDynamo(MetaPathFinder, Loader):
    """Substitutes as soon as somebody imports Dynamo.

    Substituting imports Dynamo, which takes seconds that users who compile nothing should not pay.
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
        for native, twin in list(_TWINS.items()):
            trace_as(native, twin)


trace_as(HookedBase.__call__, traced_call)
if _DYNAMO not in sys.modules:
    sys.meta_path.insert(0, _AfterDynamo())

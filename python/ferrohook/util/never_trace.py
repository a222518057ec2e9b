"""Functions that Dynamo is never to trace, and the wait for Dynamo's import."""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


_DYNAMO = "torch._dynamo"
_CALLBACKS: list[Callable[[], object]] = []


def never_trace(owner: type | ModuleType, name: str, reason: str) -> None:
    """Excludes a function of a class or a module, and all that it calls, from tracing."""

    def disable() -> None:
        disabled = torch.compiler.disable(vars(owner)[name], reason=reason)
        setattr(owner, name, disabled)

    after_dynamo_import(disable)


def never_trace_frame(function: Callable[..., Any], reason: str) -> None:
    """Excludes a function from tracing, but nothing that it calls; it gets no slower."""

    def skip() -> None:
        torch._dynamo.decorators.skip(function)
        vars(function)["_torchdynamo_disable_msg"] = reason  # as `disable` with a reason sets it

    after_dynamo_import(skip)


def untraced_copy(function: Callable[..., Any], reason: str) -> Callable[..., Any]:
    """Returns a copy of a function that is excluded from tracing; the function itself is not."""
    copy = FunctionType(
        function.__code__.replace(),  # Dynamo excludes the code
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    never_trace_frame(copy, reason)
    return copy


def after_dynamo_import(callback: Callable[[], object]) -> None:
    """Calls a function once Dynamo is imported."""
    if _DYNAMO in sys.modules:
        callback()
    else:
        _CALLBACKS.append(callback)


class _DynamoImportHook(MetaPathFinder, Loader):
    """Import hook that runs the callbacks of `after_dynamo_import` once Dynamo is imported.

    The functions of `torch.compiler` import Dynamo, which takes seconds; users who compile nothing
    do not pay for them.
    """

    _searching = False

    def find_spec(
        self, name: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _DYNAMO or self._searching:
            return None
        self._searching = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._searching = False
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
        while _CALLBACKS:
            _CALLBACKS.pop(0)()


if _DYNAMO not in sys.modules:
    sys.meta_path.insert(0, _DynamoImportHook())

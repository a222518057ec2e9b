"""Changes of Dynamo, made when it is imported, for modules whose class was generated.

They concern no other module. torch 2.15 offers no other way in: Dynamo decides by the kind of an
object, and its tables of kinds are its own.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn
from torch.nn.modules import transformer

from ferrohook._core import Dispatcher, HookedBase
from ferrohook.attach.classes import is_generated, plain_class
from ferrohook.attach.hook_info import find_registry


def patch_dynamo() -> None:
    """Makes the changes."""
    _share_graphs()
    _respect_class_property()
    _show_hooks_to_transformers()


def _share_graphs() -> None:
    """Makes `torch.compile(module)` guard the module by its class.

    Dynamo traces a native `__call__` in a separate frame, and guards the bound method in it by its
    identity: a graph for each module. A frame around the module is guarded by class.
    """
    from torch._dynamo import external_utils  # noqa: PLC0415 (takes seconds)

    original = external_utils.wrap_inline

    @functools.wraps(original)
    def wrap_inline(fn: Any) -> Any:
        module = getattr(fn, "__self__", None)
        if isinstance(module, nn.Module) and is_generated(type(module)) and fn == module.__call__:
            fn = module
        return original(fn)

    external_utils.wrap_inline = wrap_inline


def _respect_class_property() -> None:
    """Makes a trace read `module.__class__` as the program does.

    The property of an instrumented module returns the plain class. Dynamo takes `type(module)`
    instead, and its guards read the property: they fail at once, or look a method up at another
    place of the other MRO.
    """
    from torch._dynamo.source import AttrSource  # noqa: PLC0415
    from torch._dynamo.variables.builder import VariableBuilder  # noqa: PLC0415

    original = VariableBuilder.__call__

    @functools.wraps(original)
    def build(self: Any, value: Any) -> Any:
        if (
            isinstance(value, type)
            and is_generated(value)
            and isinstance(self.source, AttrSource)
            and self.source.member == "__class__"
        ):
            value = plain_class(value)
        return original(self, value)

    VariableBuilder.__call__ = build  # type: ignore[method-assign]


def _show_hooks_to_transformers() -> None:
    """Makes a trace of TransformerEncoderLayer see hooks, see `shown_forward_hooks`."""
    from torch._dynamo.source import AttrSource  # noqa: PLC0415
    from torch._dynamo.variables import ConstantVariable, ConstDictVariable  # noqa: PLC0415
    from torch._dynamo.variables.base import VariableTracker  # noqa: PLC0415
    from torch._dynamo.variables.nn_module import (  # noqa: PLC0415
        UnspecializedNNModuleVariable as Variable,
    )

    # Its name in torch 2.15, and in older ones.
    method = "tp_getattro_impl" if hasattr(Variable, "tp_getattro_impl") else "var_getattr"
    original = getattr(Variable, method)

    @functools.wraps(original)
    def read(self: Any, tx: Any, name: str) -> Any:
        if name == "_forward_hooks" and self.source and tx.f_globals is vars(transformer):
            registry = find_registry(self.value)
            if registry is not None:
                wraps = isinstance(self.value, HookedBase)
                path = ("_registry",) if wraps else (Dispatcher.KEY, "registry")
                at = functools.reduce(AttrSource, (*path, "hooked"), self.source)
                hooked = VariableTracker.build(tx, registry.hooked, at)
                if hooked.as_python_constant():  # guarded
                    none: VariableTracker = ConstantVariable.create(None)
                    return ConstDictVariable({none: none})
        return original(self, tx, name)

    setattr(Variable, method, read)

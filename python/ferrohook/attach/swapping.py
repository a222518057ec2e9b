"""Hooks of modules that `torch.ao.quantization` replaces."""

# `convert`, `quantize_dynamic` and `prepare_qat` pass each module through `swap_module`, replaced
# here. It finds rules by `type(module) is ...`, so the module is plain meanwhile; then its hooks
# are put on the replacement. `fuse_modules` puts a module that computes something else in the place
# of another, so hooks do not follow.

from __future__ import annotations

import functools
import importlib
import warnings
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

from torch.ao import quantization

from ferrohook.attach.classes import plain_class
from ferrohook.attach.hook_info import find_registry
from ferrohook.errors import ReplacedWarning

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import nn

    PutOn: TypeAlias = Callable[[nn.Module], nn.Module]
    """Puts hooks on the module that stays or that replaces the former; returns the hooked one."""
    TakeOff: TypeAlias = Callable[[nn.Module], tuple[nn.Module, PutOn]]
    """Returns a module without its hooks, and what puts them on again."""

_Function = TypeVar("_Function", bound="Callable[..., Any]")
_TAKERS: list[TakeOff] = []


def carry(take_off: _Function) -> _Function:
    """Makes a function take hooks off the modules that quantisation swaps; see `TakeOff`."""
    _TAKERS.append(take_off)
    return take_off


def _hooked_in(module: nn.Module) -> dict[nn.Module, str]:
    """Returns the modules with hooks inside a module, itself included, with their names."""
    named = module.named_modules()
    return {each: name for name, each in named if (found := find_registry(each)) and found.list()}


def _warn_of_lost(hooked: dict[nn.Module, str], left: Iterable[nn.Module], whose: str) -> None:
    left = {*left}
    lost = [f"{name!r} ({each._get_name()})" for each, name in hooked.items() if each not in left]
    if lost:
        msg = (
            f"quantisation removed {', '.join(lost)} from {whose}, together with the hooks there: "
            "register them again on the current modules"
        )
        warnings.warn(msg, ReplacedWarning, stacklevel=4)


def _keep_hooks(swap: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    @functools.wraps(swap)
    def swap_module(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        inside = _hooked_in(module)
        inside.pop(module, None)
        name = module._get_name()
        puts: list[PutOn] = []
        try:
            for take_off in _TAKERS:
                module, put_on = take_off(module)
                puts.insert(0, put_on)
            module = swap(module, *args, **kwargs)
        finally:
            for put_on in puts:
                module = put_on(module)
        _warn_of_lost(inside, module.modules(), name)
        return module

    return swap_module


def _without_generated(type_of: Callable[..., type]) -> Callable[..., type]:
    @functools.wraps(type_of)
    def plain_type(module: nn.Module) -> type:
        return cast("type", plain_class(type_of(module)))

    return plain_type


def _warn_of_fused(set_module: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(set_module)
    def warn(model: nn.Module, name: str, module: nn.Module) -> None:
        inside = _hooked_in(model.get_submodule(name))
        set_module(model, name, module)
        hooked = {each: f"{name}.{below}".rstrip(".") for each, below in inside.items()}
        _warn_of_lost(hooked, model.modules(), model._get_name())

    return warn


# Functions of the package hide the modules that define them.
_modules: Any = (
    importlib.import_module(f"{quantization.__name__}.{name}")
    for name in ("quantize", "fuse_modules")
)
_quantize, _fusing = _modules
_quantize.swap_module = quantization.swap_module = _keep_hooks(_quantize.swap_module)
# `prepare` asks whether it `is nn.Dropout`.
_quantize.type_before_parametrizations = _without_generated(_quantize.type_before_parametrizations)
_fusing._set_module = _warn_of_fused(_fusing._set_module)

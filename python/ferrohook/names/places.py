"""Places: where a hook or a capture finds its tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ferrohook._core import NativeHook, TypedHook
from ferrohook.effects.intervention import Intervention
from ferrohook.effects.parts import part_of, with_part
from ferrohook.effects.routing import ONLY_AT_EXPERTS, Replay, Route, Routing, bound
from ferrohook.errors import HookTypeError
from ferrohook.names.spelling import SIGN, kind_of
from ferrohook.util.tensors import version_of
from ferrohook.util.texts import MODEL

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import nn

    from ferrohook.effects.typed import Phase


class Head(NamedTuple):
    """One head of a tensor of all heads."""

    number: int
    dim: int
    """Dimension of the heads, counted from the end."""
    width: int | None = None
    """Width of each head, where they are side by side in the dimension; None if it counts them."""

    def of(self, tensor: Tensor) -> Tensor:
        """Returns the head's part of a tensor."""
        if self.width is None:
            return tensor.select(self.dim, self.number)
        return tensor.narrow(self.dim, self.number * self.width, self.width)

    def replaced(self, tensor: Tensor, new: Tensor) -> Tensor:
        """Returns a tensor with another value of the head."""
        if self.width is None:
            return tensor.select_scatter(new, self.dim, self.number)
        first = self.number * self.width
        return tensor.slice_scatter(new, self.dim, first, first + self.width)


class Place(NamedTuple):
    """A tensor, or a value, that a module takes or returns."""

    path: str
    """Name of the module; a point's name follows the name of its attention module."""
    module: nn.Module
    inputs: bool = False
    part: Any = None
    """Index, key or attribute, see `output_index` of a capture; None for the value itself."""
    multiplier: float = 1.0
    """Factor of the tensor: a capture is multiplied by it, a written value divided."""
    quantity: str | None = None
    """Name of the quantity that stands there; None where a module was selected."""
    writable: bool = True
    """False for a quantity that can only be read."""
    shape: tuple[int, ...] | None = None
    """Shape of a quantity in the observed call, where widths hold for any call."""
    head: Head | None = None
    """Head that is meant of a tensor that has them all."""
    stream_factor: float | None = 1.0
    """Factor of this contribution in the stream after the last block; None if it is no term."""
    routing: Routing | None = None
    """Parts where a module returns ids of experts and their weights, for such ids."""
    experts: int | None = None
    """Number of experts, for their ids; None if it is not known."""
    time: int | None = None
    """Time at which the observed forward passed it; None if it is not known."""

    @property
    def title(self) -> str:
        """Name of the quantity, or path of the module."""
        return self.quantity or self.path or MODEL

    @property
    def phase(self) -> Phase:
        """Phase of the hooks that see it."""
        return "forward_pre" if self.inputs else "forward"

    @property
    def by_keyword(self) -> bool:
        """True for a tensor that the module takes as a keyword argument."""
        return self.inputs and isinstance(self.part, str)

    @property
    def shown(self) -> str:
        """Phase and part, for errors."""
        inside = "" if self.part is None else f"[{self.part!r}]"
        return f"the {'input' if self.inputs else 'output'}{inside} of {self.path or 'the model'!r}"


class HookGroup(NamedTuple):
    """Modules on which a hook is registered in one form."""

    phase: Phase
    hook: Any
    modules: dict[str, nn.Module]
    """Modules by the names of modules and quantities."""
    options: dict[str, Any]


def modules_of(places: Iterable[Place]) -> dict[str, nn.Module]:
    """Returns the modules of places, each once, by name."""
    return {place.path: place.module for place in places}


def hooks_at(
    places: Mapping[str, Place], hook: Any, phase: Phase, at: Any = None
) -> list[HookGroup]:
    """Returns the forms of a hook that act at places as the hook does on selected modules.

    Args:
        places: by name.
        hook: for quantities an intervention, or a callable `hook(module, args, value)`.
        phase: of the hook on selected modules.
        at: positions of the tokens that the rows of a route belong to.

    Raises:
        HookTypeError: a hook on a quantity is of another kind or for another phase, names an
            `output_index`, or changes one that can only be read.
    """
    if isinstance(hook, Route | Replay):
        return _routes_at(places, hook, at)
    modules = {name: place.module for name, place in places.items() if place.quantity is None}
    groups = [HookGroup(phase, hook, modules, {})] if modules else []
    forms: dict[tuple[Any, ...], HookGroup] = {}
    for name, place in places.items():
        if place.quantity is None:
            continue
        key = (place.inputs, type(place.part), *place[3:5], place.writable, place.head)
        if key not in forms:
            _check(place, hook, phase)
            form = _intervention_at(place, hook) if isinstance(hook, Intervention) else None
            options = {"with_kwargs": True} if place.by_keyword else {}
            forms[key] = HookGroup(place.phase, form or Written(place, hook), {}, options)
        forms[key].modules[name] = place.module
    return [*groups, *forms.values()]


def _routes_at(places: Mapping[str, Place], hook: Route | Replay, at: Any) -> list[HookGroup]:
    """Returns the forms of a route, one for each block."""
    groups = []
    for name, place in places.items():
        if place.quantity is None or kind_of(place.quantity.removeprefix(SIGN)) != "experts":
            raise HookTypeError(ONLY_AT_EXPERTS)
        _, chosen = place.shape or (0, 0)
        form = bound(hook, place.quantity, place.routing, chosen, place.experts)
        groups.append(HookGroup("forward", form._replace(at=at), {name: place.module}, {}))
    return groups


def _check(place: Place, hook: Any, phase: Phase) -> None:
    if isinstance(hook, Intervention):
        if not place.writable:
            raise HookTypeError(_read_only(place))
        if hook.output_index is not None:
            msg = (
                f"{place.quantity} is one tensor: leave out the output_index of "
                f"{type(hook).__name__}"
            )
            raise HookTypeError(msg)
        if place.shape is not None and not hook.fits(place.shape):
            msg = (
                f"{hook!r} has a width of {hook.width}, but {place.quantity} has {place.shape[-1]}"
            )
            raise HookTypeError(msg)
    elif isinstance(hook, TypedHook | NativeHook) or not callable(hook):
        msg = (
            f"{place.quantity} needs an intervention or a callable hook(module, args, value), got "
            f"{type(hook).__name__}"
        )
        raise HookTypeError(msg)
    if phase != "forward":
        msg = f"{place.quantity} has a fixed place: leave out phase={phase!r}"
        raise HookTypeError(msg)


def _read_only(place: Place) -> str:
    return (
        f"{place.quantity} can be read but not written: a value written to {place.shown} does not "
        "take effect as its equation says. Write to the contributions around it instead"
    )


def _intervention_at(place: Place, hook: Intervention) -> Any:
    """Returns the native form of an intervention; None if there is none."""
    if place.by_keyword or place.head is not None:
        return None
    scaled = hook if place.multiplier == 1 else hook.on_multiple(place.multiplier)
    return None if scaled is None else scaled.at_part(place.part)


class Written:
    """Hook of PyTorch's contract that acts on a quantity.

    Args:
        place: where it stands.
        hook: an intervention, or `hook(module, args, value)`: its result replaces the
            quantity, None leaves it.
    """

    def __init__(self, place: Place, hook: Any) -> None:
        self._place = place._replace(module=None)  # type: ignore[arg-type]  # no reference cycle
        self._hook = hook
        self.__qualname__ = getattr(hook, "__qualname__", type(hook).__name__)

    @property
    def refuses_positions(self) -> str | None:
        """Reason why it cannot change only some positions; None if it can."""
        place = self._place
        if not place.inputs and place.part is None:
            return None
        own = isinstance(self._hook, Intervention)  # one without a native form
        kind = f"{type(self._hook).__name__} here" if own else "a Python hook"
        instead = (
            "leave them out, or write to another quantity"
            if own or place.by_keyword
            else "use an intervention"
        )
        return (
            f"{kind} with at=, when= or strength= can change only a module's whole output, but "
            f"{place.quantity} is {place.shown}: {instead}"
        )

    def __call__(self, module: nn.Module, args: tuple[Any, ...], *more: Any) -> Any:
        """Returns what replaces the module's input or output; None if nothing does."""
        place = self._place
        if not place.inputs:
            (output,) = more
            return self._changed(module, args, output)
        if place.by_keyword:
            (kwargs,) = more
            changed = self._changed(module, args, kwargs)
            return None if changed is None else (args, changed)
        value = args[0] if len(args) == 1 else args
        changed = self._changed(module, args, value)
        return changed if changed is None or len(args) > 1 else (changed,)

    def _changed(self, module: nn.Module, args: Any, value: Any) -> Any:
        """Returns a module's value with the quantity in it changed; None if nothing is."""
        place = self._place
        tensor = part_of(value, place.part)
        if not isinstance(tensor, Tensor):
            msg = (
                f"{place.quantity} must be a tensor in this call of {module._get_name()}, got "
                f"{type(tensor).__name__}: its place was found in a call with other arguments"
            )
            raise HookTypeError(msg)
        multiple = tensor if place.multiplier == 1 else tensor * place.multiplier
        quantity = multiple if place.head is None else place.head.of(multiple)
        version = None if is_compiling() else version_of(multiple)
        hook = self._hook
        new = (
            hook.apply(quantity) if isinstance(hook, Intervention) else hook(module, args, quantity)
        )
        if new is None:
            if multiple is tensor or (version is not None and version_of(multiple) == version):
                return None
            new = quantity  # written in place
        self._check(new, quantity)
        if place.experts is not None:  # captured ids have a smaller dtype, which cannot index
            new = new.to(tensor.dtype)
        new = self._divided(new, tensor)
        if place.head is not None:
            new = place.head.replaced(tensor, new.to(tensor.dtype))
        return with_part(value, place.part, new)

    def _divided(self, new: Tensor, tensor: Tensor) -> Tensor:
        """Returns what gives a new value of the quantity; elements that are not changed stay.

        Args:
            new: the value.
            tensor: what the module gave, of which the quantity is a multiple.
        """
        place = self._place
        if place.multiplier == 1:
            return new
        before = tensor if place.head is None else place.head.of(tensor)
        multiple = before * place.multiplier
        # Not a choice between them, which would drop the gradient of what leaves an element as is.
        kept = (new == multiple) & multiple.isfinite()
        rounding = torch.where(kept, before - multiple / place.multiplier, 0)
        return new / place.multiplier + rounding.detach()

    def _check(self, new: Any, tensor: Tensor) -> None:
        if not self._place.writable:
            raise HookTypeError(_read_only(self._place))
        if not isinstance(new, Tensor) or new.shape != tensor.shape:
            got = (
                f"one of shape {tuple(new.shape)}"
                if isinstance(new, Tensor)
                else type(new).__name__
            )
            msg = (
                f"{self._place.quantity} is a tensor of shape {tuple(tensor.shape)} in this call "
                f"and must be replaced by one of this shape, got {got}"
            )
            raise HookTypeError(msg)

"""`Targets`: tensors inside a model that analyses read and change."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ferrohook.analysis.calls import gradients_of, score
from ferrohook.attach.never_fired import explain
from ferrohook.effects.parts import part_of, with_part
from ferrohook.errors import HookError, HookTypeError
from ferrohook.names.spelling import from_lens
from ferrohook.quantity import places_of, quantities
from ferrohook.registration.register import register
from ferrohook.registration.scopes import Scope
from ferrohook.util.arguments import OutputIndex, at_least, expect_module
from ferrohook.util.tensors import map_tensors, tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import nn

    from ferrohook.analysis.calls import ModelCall
    from ferrohook.names.places import Place
    from ferrohook.names.select import Selector

    Change = Callable[[Tensor], Tensor | None]

T = TypeVar("T")


class Cell(NamedTuple):
    """A part of a target: all of it, a position, a head, or one head at one position."""

    name: str
    position: int | None = None
    head: int | None = None


class Axes(NamedTuple):
    """Dimensions of a target that an analysis goes over."""

    position: int | None
    """Dimension of the tokens' positions; None if there is none."""
    head: int | None = None
    """Dimension of the heads; None if they lie side by side in the last one, if anywhere."""


def cloned(_name: str, tensor: Tensor) -> Tensor:
    """Copies a tensor, for `Targets.read`: later modules may write in place."""
    return tensor.clone()


class Targets:
    """Tensors of a model: quantities, and the outputs of modules or the first tensor in them.

    Args:
        model: any module.
        what: quantities and modules, see `register`.
        inputs: the inputs of modules instead.
        output_index: the part of an output (or of the positional or keyword arguments) that is
            meant, see `capture`; None for the first tensor.
        heads: number of heads that lie side by side in the last dimension.
    """

    def __init__(
        self,
        model: nn.Module,
        what: Selector,
        *,
        inputs: bool = False,
        output_index: OutputIndex = None,
        heads: int | None = None,
    ) -> None:
        expect_module(model, "an analysis needs")
        self.model = model
        self.places = places_of(model, what, inputs=inputs, output_index=output_index)
        """Places by name."""
        self.heads = None if heads is None else at_least(1, "heads", heads)
        self._axes = {name: _axes(model, place) for name, place in self.places.items()}
        self._phase: Any = "forward_pre" if inputs else "forward"
        self._part = output_index

    @property
    def names(self) -> list[str]:
        """Names of quantities and modules."""
        return [*self.places]

    @contextmanager
    def changed(self, changes: Mapping[str, Change]) -> Iterator[None]:
        """Puts the targets through functions, in this context; None leaves them."""
        with Scope() as scope:
            for name, change in changes.items():
                if self.places[name].quantity is None:
                    options: dict[str, Any] = {"phase": self._phase, "with_kwargs": True}
                    register(self.model, name, self._hook(change), scope=scope, **options)
                else:
                    register(self.model, name, _hook_on_quantity(change), scope=scope)
            yield

    def _hook(self, change: Change) -> Callable[..., Any]:
        part = self._part

        def through(value: Any, part: OutputIndex) -> Any:
            found = next(tensors_in(value), None) if part is None else part_of(value, part)
            if not isinstance(found, Tensor):
                of = "" if part is None else f"output_index {part!r} of "
                msg = f"{of}a {type(value).__name__} is not a tensor and contains none"
                raise HookTypeError(msg)
            new = change(found)
            if new is None:
                return value
            if part is not None:
                return with_part(value, part, new)
            return map_tensors(lambda tensor: new if tensor is found else tensor, value)

        if self._phase == "forward":
            return lambda _module, _args, _kwargs, output: through(output, part)

        def on_inputs(_module: Any, args: Any, kwargs: Any) -> Any:
            if isinstance(part, str):
                return args, through(kwargs, part)
            return through((args, kwargs), None) if part is None else (through(args, part), kwargs)

        return on_inputs

    def read(self, call: ModelCall, keep: Callable[[str, Tensor], T]) -> tuple[dict[str, T], Any]:
        """Calls the model; returns what `keep` makes of each target and its tensor, and the output.

        Raises:
            HookError: a module runs more than once, or not at all.
        """

        def kept(name: str, tensor: Tensor) -> tuple[T, None]:
            return keep(name, tensor), None

        with torch.no_grad():
            return self._pass(call, kept)

    def gradients(
        self, call: ModelCall, metric: Callable[[Any], Any]
    ) -> tuple[dict[str, tuple[Tensor, Tensor]], Tensor]:
        """Calls the model and returns each place with the gradient of the score, and the score.

        Raises:
            HookError: a module runs more than once, or not at all; or no gradient reaches a place.
        """

        def reached(_name: str, tensor: Tensor) -> tuple[Tensor, Tensor]:
            # Parameters may need no gradients, and later modules may write in place.
            leaf = tensor if tensor.requires_grad else tensor.detach().requires_grad_()
            return leaf, leaf.clone()

        with torch.inference_mode(mode=False), torch.enable_grad():
            found, output = self._pass(call.recordable(), reached)
            value = score(metric, output)
            gradients = gradients_of(value, found)
        places = {name: (tensor.detach(), gradients[name]) for name, tensor in found.items()}
        return places, value.detach()

    def _pass(
        self, call: ModelCall, take: Callable[[str, Tensor], tuple[T, Tensor | None]]
    ) -> tuple[dict[str, T], Any]:
        """Calls the model; `take` gets each place's tensor, returns a result and a replacement.

        The places stand in the order in which they ran.
        """
        found: dict[str, T] = {}

        def taking(name: str) -> Change:
            def hook(tensor: Tensor) -> Tensor | None:
                if name in found:
                    msg = (
                        f"{name!r} runs more than once in a call of the model: an analysis only "
                        "works on modules that run once"
                    )
                    raise HookError(msg)
                found[name], passed = take(name, tensor)
                return passed

            return hook

        with self.changed({name: taking(name) for name in self.names}):
            output = call.run(self.model)
        if silent := [name for name in self.names if name not in found]:
            raise HookError(explain(self.model, silent))
        return found, output

    def view(self, name: str, tensor: Tensor) -> Tensor:
        """Returns a target's tensor with a dimension of heads, if there are any."""
        if self.heads is None or self._axes[name].head is not None:
            return tensor
        if tensor.shape[-1] % self.heads:
            msg = f"a width of {tensor.shape[-1]} cannot be divided into {self.heads} heads"
            raise HookTypeError(msg)
        by_head: Tensor = tensor.unflatten(-1, (self.heads, -1))
        return by_head

    def cells(self, name: str, shape: torch.Size, over: tuple[str, ...]) -> list[Cell]:
        """Lists the cells of a target, positions before heads.

        Raises:
            HookTypeError: it has no positions, or its number of heads is not known.
        """
        axes = self._axes[name]
        positions: Any = [None]
        heads: Any = [None]
        if "position" in over:
            if axes.position is None or len(shape) <= axes.position + 1:
                msg = (
                    f"{name!r} has shape {tuple(shape)}, without positions: over='position' needs "
                    "tensors of shape (batch, positions, ...)"
                )
                raise HookTypeError(msg)
            positions = range(shape[axes.position])
        if "head" in over:
            count = self.heads if axes.head is None else shape[axes.head]
            if self.heads not in {None, count}:
                msg = f"{name!r} has {count} heads, got heads={self.heads}"
                raise HookTypeError(msg)
            if count is None:
                msg = (
                    "over='head' needs the number of heads in the last dimension: pass it, such as "
                    "heads=12"
                )
                raise HookTypeError(msg)
            heads = range(count)
        return [Cell(name, position, head) for position in positions for head in heads]

    def all_cells(self, shapes: Mapping[str, torch.Size], over: tuple[str, ...]) -> list[Cell]:
        """Lists the cells of all targets, see `cells`."""
        return [cell for name in self.names for cell in self.cells(name, shapes[name], over)]

    def mean(self, name: str, tensor: Tensor, mask: Tensor | None = None) -> Tensor:
        """Averages over the texts and positions; the result broadcasts to the tensor.

        Args:
            name: of the target.
            tensor: its value.
            mask: True for positions that are no padding, (rows, positions).

        Raises:
            HookTypeError: the tensor has other rows or positions than the mask.
        """
        position = self._axes[name].position
        if position is None or tensor.dim() <= position + 1:
            return tensor.mean(0, keepdim=True)
        if mask is None or bool(mask.all()):
            return tensor.mean((0, position), keepdim=True)
        if mask.shape != (len(tensor), tensor.shape[position]):
            msg = (
                f"{name!r} has shape {tuple(tensor.shape)}, but the attention_mask has shape "
                f"{tuple(mask.shape)}: it does not show which positions are padding, which a mean "
                "must leave out. Pass a reference without padding"
            )
            raise HookTypeError(msg)
        tokens = tensor.transpose(1, position)[mask.to(tensor.device)]
        return tokens.mean(0)[None, None].transpose(1, position)

    def index(self, cell: Cell, tensor: Tensor) -> tuple[Any, ...]:
        """Returns the index of a cell in the `view` of a target's tensor."""
        axes = self._axes[cell.name]
        found: list[Any] = [slice(None)] * tensor.dim()
        if cell.position is not None and axes.position is not None:
            found[axes.position] = cell.position
        if cell.head is not None:
            found[-2 if axes.head is None else axes.head] = cell.head
        return tuple(found)


def _hook_on_quantity(change: Change) -> Callable[..., Any]:
    return lambda _module, _args, value: change(value)


def _axes(model: nn.Module, place: Place) -> Axes:
    if place.quantity is None:
        return Axes(1)  # (batch, positions, ...)
    table = quantities(model)
    name = from_lens(place.quantity) or place.quantity
    whole = name in table  # not one head of a quantity, which has no dimension of heads
    names = table[name if whole else name.rpartition(".")[0]].dimensions

    def find(*wanted: str) -> int | None:
        return next((number for number, each in enumerate(names) if each in wanted), None)

    return Axes(find("tokens", "queries"), find("heads", "kv_heads") if whole else None)

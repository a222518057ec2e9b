"""`Places`: tensors inside a model that analyses read and change, by the names of modules."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ferrohook.analysis.calls import score
from ferrohook.arguments import at_least_one, expect_module
from ferrohook.errors import HookError, HookTypeError
from ferrohook.groups import register
from ferrohook.never_fired import explain
from ferrohook.operations import change_part, part_of
from ferrohook.scopes import Scope
from ferrohook.selection import select
from ferrohook.tensors import map_tensors, tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import nn

    from ferrohook.analysis.calls import Call
    from ferrohook.selection import Selector

    Change = Callable[[Tensor], Tensor]

T = TypeVar("T")


class Cell(NamedTuple):
    """A part of a place: all of it, a position, a head, or one head at one position."""

    name: str
    position: int | None = None
    head: int | None = None


class Places:
    """Tensors of modules: of each the output, or the first tensor in it.

    Args:
        model: any module.
        what: the modules, see `select`.
        inputs: their inputs instead.
        output_index: the part of an output (or of the positional or keyword arguments) that is
            meant, see `capture`; None for the first tensor.
        heads: number of heads that lie side by side in the last dimension.
    """

    POSITIONS = 1
    """Dimension of the positions of the tokens."""

    def __init__(
        self,
        model: nn.Module,
        what: Selector,
        *,
        inputs: bool = False,
        output_index: int | str | None = None,
        heads: int | None = None,
    ) -> None:
        expect_module(model, "an analysis takes")
        self.model = model
        self.names = [*select(model, what, called=True)]
        self.heads = None if heads is None else at_least_one("heads", heads)
        self._phase: Any = "forward_pre" if inputs else "forward"
        self._part = output_index

    @contextmanager
    def changed(self, changes: Mapping[str, Change]) -> Iterator[None]:
        """Puts the tensors of places through functions, in this context."""
        with Scope() as scope:
            for name, change in changes.items():
                hook = self._hook(change)
                register(self.model, name, hook, phase=self._phase, with_kwargs=True, scope=scope)
            yield

    def _hook(self, change: Change) -> Callable[..., Any]:
        part = self._part

        def through(value: Any, part: int | str | None) -> Any:
            if part is not None:
                found = part_of(value, part)
                if not isinstance(found, Tensor):
                    msg = f"output_index {part!r} of a {type(value).__name__} is no tensor"
                    raise HookTypeError(msg)
                return change_part("replace", value, part, change)
            first = next(tensors_in(value), None)
            if first is None:
                msg = f"a {type(value).__name__} has no tensor"
                raise HookTypeError(msg)
            new = change(first)
            return map_tensors(lambda tensor: new if tensor is first else tensor, value)

        if self._phase == "forward":
            return lambda _module, _args, _kwargs, output: through(output, part)

        def on_inputs(_module: Any, args: Any, kwargs: Any) -> Any:
            if isinstance(part, str):
                return args, through(kwargs, part)
            return through((args, kwargs), None) if part is None else (through(args, part), kwargs)

        return on_inputs

    def read(self, call: Call, keep: Callable[[Tensor], T]) -> tuple[dict[str, T], Any]:
        """Calls the model and returns what `keep` makes of each place, and the output.

        Raises:
            HookError: a module runs more than once, or not at all.
        """

        def kept(tensor: Tensor) -> tuple[T, Tensor]:
            return keep(tensor), tensor

        with torch.no_grad():
            return self._pass(call, kept)

    def gradients(
        self, call: Call, metric: Callable[[Any], Any]
    ) -> tuple[dict[str, tuple[Tensor, Tensor]], Tensor]:
        """Calls the model and returns each place with the gradient of the score, and the score.

        Raises:
            HookError: a module runs more than once, or not at all; or no gradient reaches a place.
        """

        def reached(tensor: Tensor) -> tuple[Tensor, Tensor]:
            # Parameters may need no gradients, and later modules may write in place.
            leaf = tensor if tensor.requires_grad else tensor.detach().requires_grad_()
            return leaf, leaf.clone()

        with torch.inference_mode(mode=False), torch.enable_grad():
            found, output = self._pass(call, reached)
            value = score(metric, output)
            if not value.requires_grad:
                msg = (
                    "the metric has no gradient: it computes with the tensors of the output, and "
                    "does not detach them or take numbers out of them"
                )
                raise HookError(msg)
            given = torch.autograd.grad(value, [*found.values()], allow_unused=True)
        gradients = {
            name: (tensor.detach(), torch.zeros_like(tensor) if each is None else each)
            for (name, tensor), each in zip(found.items(), given, strict=True)
        }
        return gradients, value.detach()

    def _pass(
        self, call: Call, take: Callable[[Tensor], tuple[T, Tensor]]
    ) -> tuple[dict[str, T], Any]:
        """Calls the model; `take` returns what is found of a place, and what goes on from it.

        The places stand in the order in which they ran.
        """
        found: dict[str, T] = {}

        def taking(name: str) -> Change:
            def hook(tensor: Tensor) -> Tensor:
                if name in found:
                    msg = (
                        f"{name!r} runs more than once in a call of the model: an analysis takes "
                        "modules that run once"
                    )
                    raise HookError(msg)
                found[name], passed = take(tensor)
                return passed

            return hook

        with self.changed({name: taking(name) for name in self.names}):
            output = call.run(self.model)
        if silent := [name for name in self.names if name not in found]:
            raise HookError(explain(self.model, silent))
        return found, output

    def view(self, tensor: Tensor) -> Tensor:
        """Returns the tensor with a dimension of heads, if it has any."""
        if self.heads is None:
            return tensor
        if tensor.shape[-1] % self.heads:
            msg = f"{self.heads} heads do not divide a width of {tensor.shape[-1]}"
            raise HookTypeError(msg)
        by_head: Tensor = tensor.unflatten(-1, (self.heads, -1))
        return by_head

    def cells(self, name: str, shape: torch.Size, over: tuple[str, ...]) -> list[Cell]:
        """Lists the cells of a place, positions before heads.

        Raises:
            HookTypeError: the place has no positions, or `heads` was not passed.
        """
        if "position" in over and len(shape) <= self.POSITIONS + 1:
            msg = (
                f"{name!r} has the shape {tuple(shape)}, without positions: "
                "over='position' takes tensors of the shape (batch, positions, ...)"
            )
            raise HookTypeError(msg)
        if "head" in over and self.heads is None:
            msg = "over='head' needs the number of heads that lie in the last dimension: heads=12"
            raise HookTypeError(msg)
        positions = range(shape[self.POSITIONS]) if "position" in over else [None]
        heads = range(self.heads or 0) if "head" in over else [None]
        return [Cell(name, position, head) for position in positions for head in heads]

    def mean(self, tensor: Tensor) -> Tensor:
        """Averages over the texts and positions; the result broadcasts to the tensor."""
        dims = (0, self.POSITIONS) if tensor.dim() > self.POSITIONS + 1 else (0,)
        return tensor.mean(dims, keepdim=True)

    def index(self, cell: Cell) -> tuple[Any, ...]:
        """Returns the index of a cell in a `view`."""
        everything = slice(None)
        if cell.position is None:
            return (...,) if cell.head is None else (..., cell.head, everything)
        if cell.head is None:
            return (everything, cell.position)
        return (everything, cell.position, ..., cell.head, everything)

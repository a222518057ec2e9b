"""Emulated CUDA graphs: operations recorded in one call, replayed on static addresses.

Python between the operations does not run in a replay. Operators among `cuts` do, as between the
pieces of a piecewise graph: they return new memory, which no piece of the graph reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Collection


class Operation(NamedTuple):
    """A recorded operation."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    is_cut: bool

    def replay(self) -> None:
        """Runs it again; the graph's operations write to the addresses of the recording."""
        found = self.function(*self.args, **self.kwargs)
        if self.is_cut:
            return
        for old, new in zip(tree_leaves(self.output), tree_leaves(found), strict=True):
            if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                old.copy_(new)


class Recorder(TorchDispatchMode):
    """Records the operations of a call."""

    def __init__(self, cuts: Collection[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self.operations: list[Operation] = []
        self._cuts = cuts

    def __torch_dispatch__(
        self, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = function.name().removesuffix(".default")
        output = function(*args, **kwargs)
        if name in self._cuts:
            self.operations.append(Operation(function, args, kwargs, output, is_cut=True))
        elif name == "ferrohook::run":
            # Its kernels outside of a batch: a graph has no more of it.
            clone = torch.ops.aten.clone.default
            self.operations.append(Operation(clone, args[:1], {}, output, is_cut=False))
        elif torch.Tag.cudagraph_unsafe not in function.tags:
            self.operations.append(Operation(function, args, kwargs, output, is_cut=False))
        return output


class Replayed:
    """Graph of a function of tensors, recorded in its first call.

    Args:
        function: the function.
        cuts: names of operators at which the graph is cut.
    """

    def __init__(self, function: Callable[..., Any], cuts: Collection[str] = ()) -> None:
        self._function = function
        self._cuts = cuts
        self._inputs: dict[str, Any] = {}
        self._operations: list[Operation] | None = None
        self._output: Any = None

    def record(self, **inputs: Any) -> None:
        """Records the operations of a call; no batch may be entered."""
        self._inputs = {
            name: it.clone() if isinstance(it, Tensor) else it for name, it in inputs.items()
        }
        with Recorder(self._cuts) as recorder:
            self._output = self._function(**self._inputs)
        self._operations = recorder.operations

    def lose(self, name: str, number: int) -> None:
        """Loses one of the operators of a name that it is cut at."""
        assert self._operations is not None, "record it first"
        cuts = [it for it in self._operations if it.is_cut and it.function.name() == name]
        self._operations = [it for it in self._operations if it is not cuts[number]]

    def __call__(self, **inputs: Any) -> Any:
        """Replays them on other inputs of the same shapes."""
        assert self._operations is not None, "record it first"
        for name, static in self._inputs.items():
            if isinstance(static, Tensor):
                static.copy_(inputs[name])
        for operation in self._operations:
            operation.replay()
        return self._output

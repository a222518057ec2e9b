"""The residual stream after a layer, which SGLang keeps beside its layers.

A layer returns its last contribution, and the engine adds it to the stream as the next
layer begins. A hook point in each layer sees the stream; where it changes that, the contribution is
replaced in place, so that it yields the changed stream. All else stays as it is, bit for bit.
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from ferrohook.quantity.anatomy.observe import observing

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable, Collection, Iterable

    from torch import Tensor

POINT: Final = "ferrohook_stream"
"""Name of the hook point in a layer."""


def stream_layers(model: nn.Module, forward: Callable[[], object]) -> list[str]:
    """Returns the layers whose output is a contribution, by one forward.

    None if layers return the hidden state and the residual.
    """
    found: list[str] = []

    def note(name: str, _module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        stream = getattr(_forward_batch(args, kwargs), "residual_stream", None)
        pending = getattr(stream, "pending", None)
        if pending is not None and output is pending.value:
            found.append(name)

    with observing(model, after=note):
        forward()
    return found


class StreamPoints:
    """Hook points after layers of a model.

    Args:
        model: the engine's model.
        layers: names of the layers.
        guard: makes the context in which our code runs in the engine's forward.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Iterable[str],
        guard: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:
        self.wanted: Collection[str] = ()
        """Hook points that requests of the running step see."""
        self._guard = guard
        self.places = {name: f"{name}.{POINT}" for name in layers}
        if self.places:
            self._residual = importlib.import_module(
                "sglang.srt.layers.layer_boundary.residual.batch"
            )
        for name, place in self.places.items():
            layer = model.get_submodule(name)
            point = nn.Identity()
            layer.add_module(POINT, point)
            layer.forward = functools.partial(self._forward, place, layer.forward, point)

    def _forward(
        self, place: str, original: Callable[..., Any], point: nn.Module, *args: Any, **kwargs: Any
    ) -> Any:
        hidden = original(*args, **kwargs)
        if place in self.wanted:
            with self._guard():
                self._pass(hidden, _forward_batch(args, kwargs), point)
        return hidden

    def _pass(self, hidden: Any, batch: Any, point: nn.Module) -> None:
        """Passes the stream through a hook point, and writes what changed there into `hidden`."""
        stream: Tensor = self._residual.snapshot(hidden, batch)
        changed = point(stream)
        if changed is not stream:
            own = self._residual.complete_output(hidden, batch)
            before = self._residual.written_residual(batch)
            added = changed if before is None else changed - before
            torch.where(changed == stream, own, added, out=own)


def _forward_batch(args: Any, kwargs: Any) -> Any:
    """Returns the `ForwardBatch` among the arguments of a layer, or None."""
    values = (*args, *kwargs.values())
    return next((each for each in values if hasattr(each, "forward_mode")), None)

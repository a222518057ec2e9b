"""Activation checkpointing: backward repeats a forward with the hooks that ran in it."""

# `torch.utils.checkpoint` calls a function again in backward, on whichever thread autograd uses. It
# compares nothing (reentrant) or shapes with the forward. Both kinds pass the function through one
# callable, replaced here: its first call is logged, and later ones follow that log.

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

from torch.utils import checkpoint

from ferrohook._core import ForwardLog

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class _Region:
    """Checkpointed function: its first call is the forward; later ones repeat it."""

    def __init__(self, function: Callable[..., Any], *, detached: bool = False) -> None:
        self._function = function
        self.log = ForwardLog(detached)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.log.complete:
            return self._function(*args, **kwargs)
        with self.log.repeat():
            return self._function(*args, **kwargs)


def _reentrant(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def logged(ctx: Any, function: Callable[..., Any], *args: Any) -> Any:
        region = _Region(function, detached=any(ctx.needs_input_grad))
        with region.log.record():
            return forward(ctx, region, *args)

    return logged


def _non_reentrant(generator: Callable[..., Iterator[None]]) -> Callable[..., Iterator[None]]:
    @functools.wraps(generator)
    def logged(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
        region = _Region(function)
        with region.log.record():
            yield from generator(region, *args, **kwargs)  # torch runs the forward at the `yield`

    return logged


checkpoint.CheckpointFunction.forward = staticmethod(  # type: ignore[method-assign]
    _reentrant(checkpoint.CheckpointFunction.forward)
)
_COMPOSABLE = "torch.distributed._composable.checkpoint_activation"
# The second is the only one in older versions of torch, and calls the first in newer ones.
for _name in (
    "_checkpoint_without_reentrant_generator_impl",
    "_checkpoint_without_reentrant_generator",
):
    if hasattr(checkpoint, _name):
        _logged = _non_reentrant(getattr(checkpoint, _name))
        # The second, if imported already, has copied the name.
        for _place in ("torch.utils.checkpoint", _COMPOSABLE):
            if _place in sys.modules:
                setattr(sys.modules[_place], _name, _logged)
        break

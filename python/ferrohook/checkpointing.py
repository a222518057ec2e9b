"""Activation checkpointing: backward repeats a forward in the scopes that it was made in."""

# `torch.utils.checkpoint` calls a function again in backward, on whichever thread autograd uses.
# Without the scope's hooks the gradient would be wrong, and torch would not notice: it compares
# nothing (reentrant) or shapes. Both kinds pass the function through one callable, replaced here.

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from torch.utils import checkpoint

from ferrohook._core import Frame, RequestBase, frames
from ferrohook.errors import HookError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class _Region:
    """Checkpointed function: its first call is the forward; later ones repeat it in its scopes."""

    def __init__(self, function: Callable[..., Any], scopes: tuple[Frame, ...]) -> None:
        self._function = function
        self._scopes = scopes
        self._changes = self._count()
        # Of a request that has positions, the tokens there.
        self._masks = [(each, each.masks) for each in scopes if isinstance(each, RequestBase)]
        # Scopes whose hooks ran in the forward; None until it ends.
        self._needed: list[Frame] | None = None

    def _count(self) -> list[int]:
        return [scope.changes() for scope in self._scopes]

    def end(self) -> None:
        """Ends the forward."""
        counts = zip(self._scopes, self._changes, self._count(), strict=True)
        self._needed = [scope for scope, before, after in counts if before != after]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._needed is None:
            return self._function(*args, **kwargs)
        if any(scope.closed for scope in self._needed):
            msg = (
                "backward() repeats a checkpointed forward, and a scope whose hooks ran in it was "
                "left: without them the gradient would be wrong. Call backward() inside the scope"
            )
            raise HookError(msg)
        active = frames.get()
        missing = [each for each in self._scopes if each not in active and not each.closed]
        for request, masks in self._masks:
            request.begin_repeat(masks)
        token = frames.set((*active, *missing))
        try:
            return self._function(*args, **kwargs)
        finally:
            for request, _ in self._masks:
                request.end_repeat()
            frames.reset(token)


def _reentrant(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def in_scopes(ctx: Any, function: Callable[..., Any], *args: Any) -> Any:
        scopes = frames.get()
        if not scopes:
            return forward(ctx, function, *args)
        region = _Region(function, scopes)
        output = forward(ctx, region, *args)
        region.end()
        return output

    return in_scopes


def _non_reentrant(generator: Callable[..., Iterator[None]]) -> Callable[..., Iterator[None]]:
    @functools.wraps(generator)
    def in_scopes(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
        scopes = frames.get()
        if not scopes:
            yield from generator(function, *args, **kwargs)
            return
        region = _Region(function, scopes)
        yield from generator(region, *args, **kwargs)  # torch runs the forward at the `yield`
        region.end()

    return in_scopes


checkpoint.CheckpointFunction.forward = staticmethod(  # type: ignore[method-assign]
    _reentrant(checkpoint.CheckpointFunction.forward)
)
# The second is the only one in older versions of torch, and calls the first in newer ones.
for _name in (
    "_checkpoint_without_reentrant_generator_impl",
    "_checkpoint_without_reentrant_generator",
):
    if hasattr(checkpoint, _name):
        setattr(checkpoint, _name, _non_reentrant(getattr(checkpoint, _name)))
        break

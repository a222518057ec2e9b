"""Routes at the tokens of a call, by their positions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ferrohook._core import to_device
from ferrohook.effects.routing import Route
from ferrohook.errors import HookTypeError
from ferrohook.util.never_trace import never_trace

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from ferrohook._core import CallTokens
    from ferrohook.effects.routing import BoundRoute, Replay
    from ferrohook.tokens.positions import At


class TokenRoute:
    """Makes the tokens of a call take the experts of a route.

    Args:
        route: at a router.
    """

    def __init__(self, route: BoundRoute) -> None:
        self._route = route
        self.__qualname__ = repr(route.hook)

    def __call__(self, _request: object, value: Any, places: Tensor, tokens: CallTokens) -> Any:
        """Returns the router's output with other experts; None if all are left to the router.

        Args:
            value: the output.
            places: of the tokens in its tensors.
            tokens: the tokens.
        """
        positions = tokens.positions
        routed = self._route.routed
        rows = positions
        if routed.start is not None:
            rows = [position - routed.start for position in positions]
        elif routed.ids.dim() > 1:
            rows = _numbers_of(self._route.at, positions, tokens.prompts)
        taking, index = routed.of_tokens(rows, tokens.rows)
        if not taking:
            return None
        if len(taking) < len(rows):
            places = places.index_select(
                0, to_device(torch.tensor(taking, device="cpu"), places.device)
            )
        return self._route.change(value, places, *routed.at(index))


def _numbers_of(at: At, positions: Sequence[int], prompts: Sequence[int]) -> list[int]:
    """Returns the numbers of tokens among those at some positions, from the first one on."""
    if at == "generated":
        return [it - prompt for it, prompt in zip(positions, prompts, strict=True)]
    if at == "last_prompt" or isinstance(at, int):
        return [0] * len(positions)
    if not isinstance(at, slice):
        return [*positions]
    start, step = at.start or 0, at.step or 1
    return [
        (it - (start if start >= 0 else max(prompt + start, 0))) // step
        for it, prompt in zip(positions, prompts, strict=True)
    ]


def check_route(hook: Route | Replay, at: At, options: Mapping[str, Any]) -> None:
    """Validates the options of a route, and the positions of its tokens.

    Raises:
        HookTypeError: an option that it does not have, or positions without an order.
    """
    if found := [name for name, value in options.items() if value not in {None, False, "forward"}]:
        msg = f"{hook!r} has a fixed place and acts in full: leave out {found[0]}="
        raise HookTypeError(msg)
    if callable(at) and isinstance(hook, Route) and hook.by_position:
        msg = (
            "at= of a Route with a row of ids for each token must be a name, an int or a slice: a "
            "function does not say which row a token takes"
        )
        raise HookTypeError(msg)


# Dynamo would compile functions that the native call of a compiled region calls.
never_trace(TokenRoute, "__call__", "native code calls it")

"""Routes: the experts that tokens take in a mixture of experts, in place of the router's choice."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import torch
from torch import Tensor

from ferrohook.effects.parts import part_of, with_part
from ferrohook.errors import HookError, HookTypeError
from ferrohook.util.arguments import at_least, describe
from ferrohook.util.tensors import ByContent, as_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

LEFT: Final = -1
"""Id that leaves a token to the router."""
MOST_EXPERTS: Final = 2**15
"""Experts of a block, at most: ids are stored as int16."""


class RoutingRule(NamedTuple):
    """Rule by which a router weighs the chosen experts."""

    scores: str
    """Key of `SCORES`."""
    in_float32: bool
    """True if the weights are computed in float32, whatever the dtype of the logits."""
    sum: str | None
    """`add` or `clamp` if weights are divided by their sum, to which `least` is added or which is
    at least `least`; None if they are not divided."""
    least: float
    scale: float

    def weights(self, logits: Tensor, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the weights of experts.

        Args:
            logits: of a router, (tokens, experts).
            ids: of the experts, int64 of (tokens, chosen).
            dtype: of the result.
        """
        found = SCORES[self.scores](logits.float() if self.in_float32 else logits, ids)
        if self.sum is not None:
            total = found.sum(dim=-1, keepdim=True)
            total = total.clamp(min=self.least) if self.sum == "clamp" else total + self.least
            found = found / total
        return (found if self.scale == 1 else found * self.scale).to(dtype)


SCORES: Final[Mapping[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "softmax(router)[ids]": lambda logits, ids: logits.softmax(dim=-1).gather(-1, ids),
    "softmax(router[ids])": lambda logits, ids: logits.gather(-1, ids).softmax(dim=-1),
    "exp(router[ids] - logsumexp(router))": lambda logits, ids: (
        logits.gather(-1, ids) - logits.logsumexp(dim=-1, keepdim=True)
    ).exp(),
    "sigmoid(router)[ids]": lambda logits, ids: logits.sigmoid().gather(-1, ids),
    "sigmoid(router[ids])": lambda logits, ids: logits.gather(-1, ids).sigmoid(),
}
"""Scores of experts, by their equations: from logits of all experts and the experts' ids."""


class Routing(NamedTuple):
    """Parts of a module's output that hold a block's experts and their weights, and their rule."""

    ids: Any
    """Part of the module's output, as `output_index` of a capture."""
    weights: Any
    logits: Any = None
    """None if the module does not return them."""
    rule: RoutingRule | None = None
    reason: str = ""
    """Reason why there is no rule."""
    factor: float = 1.0
    """Factor of the experts' output, which the module's weights do not contain."""


class _OnlyAtExperts(ByContent):
    """Base of routes: refused as a plain hook."""

    def __call__(self, _module: object, _args: object, _output: object) -> None:
        """Refuses to be called as a hook.

        Raises:
            HookTypeError: always.
        """
        raise HookTypeError(ONLY_AT_EXPERTS)


ONLY_AT_EXPERTS: Final = (
    "a Route acts on the experts that tokens choose: register it at '@experts.N', see "
    "fh.quantities for the blocks that have them"
)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Route(_OnlyAtExperts):
    """Tokens take these experts, in place of the router's choice.

    An entry of a plan takes it at `"@experts.N"`: `fh.on("@experts.3", fh.Route(ids))`. Without
    weights the model's own rule is applied to the router's logits at these ids, so that gradients
    reach the router. With weights, these are used as they are.

    Args:
        ids: experts of each token, ints. (chosen,): the same for all tokens at the entry's `at`.
            (tokens, chosen): a row for each token at `at`, in the order of positions, from the
            first position that `at` names; without `at`, from position 0. (sequences, tokens,
            chosen): the same for each row of a call. A row of -1 leaves its token to the router,
            and so does a missing row at the end.
        weights: of these experts, floats of the shape of `ids`; None for the model's own rule.

    Raises:
        HookTypeError: the ids are not ints, or the weights not floats.
        ValueError: a shape does not fit, an id is below -1 or comes twice in a row, a row has both
            ids and -1, or a weight is not finite.

    Examples:
        >>> plan = fh.Plan(fh.on("@experts.3", fh.Route([0, 5]), at="generated"))
    """

    ids: Tensor
    """int16."""
    weights: Tensor | None = None

    def __post_init__(self) -> None:
        ids = _ids_of(self.ids, "ids of Route", (1, 3), "(chosen,), (tokens, chosen)")
        _check_rows(ids, "ids of Route")
        object.__setattr__(self, "ids", ids)
        if self.weights is not None:
            object.__setattr__(self, "weights", _weights_of(self.weights, ids))

    @property
    def by_position(self) -> bool:
        """True if each token has its row."""
        return self.ids.dim() > 1

    def of_block(self, _block: int) -> RoutedIds:
        """Returns the ids of one block."""
        return RoutedIds(self.ids, self.weights)

    def __repr__(self) -> str:
        weights = "" if self.weights is None else ", weights"
        return f"Route({_shown(self.ids)}{weights})"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Replay(_OnlyAtExperts):
    """Experts of all blocks, see `replay`."""

    ids: Tensor
    """int16 of (tokens, layers, chosen) or (sequences, tokens, layers, chosen)."""
    start: int = 0
    """Position of the first row."""

    def __post_init__(self) -> None:
        ids = _ids_of(self.ids, "the array of replay", (3, 4), "(tokens, layers, chosen)")
        object.__setattr__(self, "ids", ids)
        object.__setattr__(self, "start", at_least(0, "start of replay", self.start))

    def of_block(self, block: int) -> RoutedIds:
        """Returns the ids of one block.

        Raises:
            HookTypeError: the array has no ids of the block, or ids that `Route` refuses.
        """
        layers = self.ids.shape[-2]
        if block >= layers:
            msg = f"the array of replay has {layers} layers, and none for block {block}"
            raise HookTypeError(msg)
        ids = self.ids[..., block, :]
        try:
            _check_rows(ids, f"ids of block {block} in the array of replay")
        except ValueError as error:
            raise HookTypeError(str(error)) from error
        return RoutedIds(ids, None, self.start)

    def __repr__(self) -> str:
        start = "" if self.start == 0 else f", start={self.start}"
        return f"Replay({_shown(self.ids)}{start})"


ROUTES: Final[Mapping[str, type[Route | Replay]]] = {"Route": Route, "Replay": Replay}
"""The classes of routes by name, for JSON."""


class RoutedIds:
    """Ids that tokens of one block take.

    Args:
        ids: see `Route`.
        weights: of these, if they are given.
        start: position of the first row; None if that is the first one of the entry's `at`.
    """

    def __init__(
        self, ids: Tensor, weights: Tensor | None = None, start: int | None = None
    ) -> None:
        self.ids, self.weights, self.start = ids, weights, start
        left = ids[..., 0] == LEFT
        self._left: Any = left.tolist() if bool(left.any()) else None
        """True for each row that leaves its token to the router; None if no row does."""

    def of_tokens(self, rows: Sequence[int], sequences: Sequence[int]) -> tuple[list[int], Any]:
        """Returns which of some tokens take experts, and the index of their rows of ids.

        Args:
            rows: number of each token's row of ids, which may not be there.
            sequences: number of its sequence.

        Raises:
            HookError: a sequence has no ids.
        """
        dims, left = self.ids.dim(), self._left
        if dims == 1:
            return [] if left else [*range(len(rows))], [0] * len(rows)
        count, several = self.ids.shape[-2], dims > 2  # noqa: PLR2004 (tokens, chosen)
        if several and max(sequences) >= len(self.ids):
            msg = (
                f"a Route has ids of {len(self.ids)} sequences, but row {max(sequences)} of a call "
                "takes experts too"
            )
            raise HookError(msg)

        def takes(place: int) -> bool:
            row = rows[place]
            if not 0 <= row < count:
                return False
            return left is None or not (left[sequences[place]][row] if several else left[row])

        taking = [place for place in range(len(rows)) if takes(place)]
        index: Any = torch.tensor([rows[place] for place in taking], device="cpu")
        if several:
            chosen = torch.tensor([sequences[place] for place in taking], device="cpu")
            index = chosen, index
        return taking, index

    def at(self, index: Any) -> tuple[Tensor, Tensor | None]:
        """Returns the rows of ids and weights at an index, (tokens, chosen)."""
        ids, weights = self.ids, self.weights
        if ids.dim() == 1:
            ids, weights = ids[None], None if weights is None else weights[None]
        return ids[index], None if weights is None else weights[index]


class BoundRoute(NamedTuple):
    """A route at the module that returns a block's experts."""

    hook: Route | Replay
    """The user's hook."""
    routed: RoutedIds
    routing: Routing
    at: Any = None
    """Positions of the tokens."""

    def change(self, value: Any, places: Tensor, ids: Tensor, weights: Tensor | None) -> Any:
        """Returns the module's output in which some tokens take other experts.

        Args:
            value: the output.
            places: of the tokens in it, int64 of (tokens,).
            ids: of the experts, (tokens, chosen).
            weights: of these; None for the model's own rule.

        Raises:
            HookTypeError: the output has no such tensors.
        """
        routing = self.routing
        own_ids, own_weights = _part(value, routing.ids), _part(value, routing.weights)
        new = own_ids.index_copy(0, places, ids.to(own_ids))
        if weights is not None:
            made = (weights / routing.factor).to(own_weights)
        else:
            rule = cast("RoutingRule", routing.rule)  # without one, `bound` refuses the route
            # Of all tokens, as in the model: torch rounds the last elements of a tensor otherwise.
            logits = _part(value, routing.logits)
            made = rule.weights(logits, new.long(), own_weights.dtype).index_select(0, places)
        value = with_part(value, routing.ids, new)
        return with_part(value, routing.weights, own_weights.index_copy(0, places, made))


def _part(value: Any, part: Any) -> Tensor:
    found = part_of(value, part)
    if not isinstance(found, Tensor) or found.dim() != 2:  # noqa: PLR2004 (tokens, experts)
        msg = (
            f"part {part!r} of a router's output must be a matrix with a row for each token, got "
            f"{describe(found)}"
        )
        raise HookTypeError(msg)
    return found


def bound(
    hook: Route | Replay, name: str, routing: Routing | None, chosen: int, experts: int | None
) -> BoundRoute:
    """Binds a route to the experts of a block.

    Args:
        hook: the route.
        name: of the quantity, `@experts.N`.
        routing: where a module returns them; None if none does.
        chosen: number of experts that a token takes.
        experts: number of experts; None if it is not known.

    Raises:
        HookTypeError: the ids do not fit the block.
    """
    if routing is None:
        msg = (
            f"a Route cannot change {name}: no module returns both the ids of the experts and "
            "their weights so that a write to them reaches the experts"
        )
        raise HookTypeError(msg)
    routed = hook.of_block(int(name.rpartition(".")[2]))
    count, most = routed.ids.shape[-1], int(routed.ids.max())
    if count != chosen:
        msg = f"{hook!r} has {count} ids for each token, but {name} has {chosen}"
        raise HookTypeError(msg)
    if experts is not None and most >= experts:
        msg = f"{hook!r} has the id {most}, but {name} has experts 0 to {experts - 1}"
        raise HookTypeError(msg)
    if routed.weights is None and routing.rule is None:
        msg = f"a Route needs weights= at {name}, whose ids do not define them: {routing.reason}"
        raise HookTypeError(msg)
    return BoundRoute(hook, routed, routing)


def _ids_of(given: Any, name: str, dims: tuple[int, int], shapes: str) -> Tensor:
    """Returns ids as int16.

    Raises:
        HookTypeError: they are no ints.
        ValueError: a shape or an id that no ids can have.
    """
    found = _tensor_of(given, f"{name} must be ints")
    if found.dtype == torch.bool or found.is_floating_point() or found.is_complex():
        msg = f"{name} must be ints, got {found.dtype}"
        raise HookTypeError(msg)
    least, most = dims
    if not least <= found.dim() <= most or not found.numel():
        msg = (
            f"{name} must have the shape {shapes} or one more dimension ahead, of sequences, and "
            f"at least one id; got {tuple(found.shape)}"
        )
        raise ValueError(msg)
    found = found.detach().to("cpu", torch.int64)
    low, high = int(found.min()), int(found.max())
    if low < LEFT or high >= MOST_EXPERTS:
        msg = f"{name} must be from -1 to {MOST_EXPERTS - 1}, got {low if low < LEFT else high}"
        raise ValueError(msg)
    return found.to(torch.int16)


def _tensor_of(given: Any, expected: str) -> Tensor:
    try:
        return as_tensor(given)
    except (TypeError, ValueError, RuntimeError) as error:
        msg = f"{expected} in a tensor, an array or lists, got {describe(given)}: {error}"
        raise HookTypeError(msg) from error


def _check_rows(ids: Tensor, name: str) -> None:
    """Validates rows of ids: each expert once, or -1 only."""
    left = ids == LEFT
    mixed = left.any(-1) & ~left.all(-1)
    ordered = ids.sort(-1).values
    twice = ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] != LEFT)).any(-1)
    for wrong, text in ((mixed, "has both ids and -1"), (twice, "has an expert twice")):
        if bool(wrong.any()):
            row = [int(each) for each in wrong.nonzero()[0]] if wrong.dim() else []
            shown = ids[tuple(row)].tolist()
            msg = (
                f"{name}: a row must have distinct experts, or only -1 to leave its token to the "
                f"router, but row {row} {text}: {shown}"
            )
            raise ValueError(msg)


def _weights_of(given: Any, ids: Tensor) -> Tensor:
    weights = _tensor_of(given, "weights of Route must be floats")
    if not weights.is_floating_point():
        msg = f"weights of Route must be floats, got {weights.dtype}"
        raise HookTypeError(msg)
    if weights.shape != ids.shape:
        msg = (
            f"weights of Route must have the shape of its ids, {tuple(ids.shape)}, got "
            f"{tuple(weights.shape)}"
        )
        raise ValueError(msg)
    if not bool(weights.isfinite().all()):
        msg = "weights of Route must not have NaN or infinities"
        raise ValueError(msg)
    return weights if weights.requires_grad else weights.detach().clone()


def _shown(ids: Tensor) -> str:
    return f"<{'x'.join(map(str, ids.shape))} ids>"

"""Routers: the logits that choose and weigh the experts of a mixture."""

# A module that has experts takes their numbers and weights, a row for each position, or for each of
# them all positions times their weights. The router is the first tensor of which these weights are
# a softmax or sigmoid at these numbers.

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor, nn

from ferrohook.errors import HookError
from ferrohook.quantity.anatomy.equations import SIGNIFICANT, differ, tolerance
from ferrohook.quantity.anatomy.observe import Hidden, noise

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from ferrohook.quantity.anatomy.observe import Look, ObservedTensor
    from ferrohook.quantity.anatomy.subjects import Subject

_LEAST_EXPERTS: Final = 2
_MOST_EXPERTS: Final = 4096
_FUSED_DIMS: Final = 3

NO_ROUTER: Final = (
    "no module takes the ids and weights of the experts, with a row for each position, so "
    "weights = f(router) cannot be checked"
)
_EQUAL: Final = "the weights of its experts are all equal, or 0, so they do not identify the router"
FUSED: Final = "each token goes through its own experts, whose code contains the last projections"

SEVERAL: Final = "the block has several mixtures of experts"


def _softmax(logits: Tensor, numbers: Tensor) -> Tensor:
    return logits.softmax(-1).gather(-1, numbers)


def _softmax_of_chosen(logits: Tensor, numbers: Tensor) -> Tensor:
    return logits.gather(-1, numbers).softmax(-1)


def _sigmoid(logits: Tensor, numbers: Tensor) -> Tensor:
    return logits.sigmoid().gather(-1, numbers)


def _sigmoid_of_chosen(logits: Tensor, numbers: Tensor) -> Tensor:
    chosen = _sigmoid(logits, numbers)
    return chosen / chosen.sum(-1, keepdim=True)


_FORMS: Final[Mapping[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "softmax(router)[chosen]": _softmax,
    "softmax(router[chosen])": _softmax_of_chosen,
    "sigmoid(router)[chosen]": _sigmoid,
    "sigmoid(router)[chosen] / sum": _sigmoid_of_chosen,
}
_SHARES: Final = ("softmax(router[chosen])", "sigmoid(router)[chosen] / sum")
"""Forms whose sum is 1."""


class Weighed(NamedTuple):
    """Experts of each position with their weights, as a module took them."""

    path: str
    start: int
    """Time at which its call began."""
    numbers: Tensor
    """(positions, chosen experts)."""
    weights: Tensor
    """Weights, of the same shape."""
    sites: tuple[ObservedTensor, ObservedTensor] | None = None
    """Numbers and weights among the module's arguments; None if it takes them in another form."""


class Routed(NamedTuple):
    """A router, with the equation that proves it."""

    path: str
    """Module that has the experts."""
    site: ObservedTensor
    form: str
    """Key of the form of the weights."""
    multiplier: float
    residual: float
    shares: bool
    """True if it gives the shares of the weights in their sum, which shared experts are part of."""

    @property
    def equation(self) -> str:
        """The equation."""
        times = "" if self.multiplier == 1 else f"{self.multiplier:.6g} * "
        return f"{times}{self.form} = weights of the experts{' / sum' if self.shares else ''}"


def router_of(look: Look, prefix: str) -> Routed | str:
    """Finds the router of a block; the reason if there is none.

    Args:
        look: at the model.
        prefix: path of the block.
    """
    least = torch.inf
    found = [*weighed(look, prefix)]
    for shares in (False, True):
        for each in found:
            weights = _shares(each.weights) if shares else each.weights
            limit = SIGNIFICANT * tolerance(weights) * float(weights.abs().max())
            # Of weights that are saturated, 1 and 0, nearly any logits are the router.
            if not float(weights[weights.abs() > limit].std(correction=0)) > limit:
                if shares:
                    continue
                return _EQUAL
            for site, logits in _candidates(look, prefix, each):
                for form in _SHARES if shares else _FORMS:
                    multiplier, residual = _fit(form, logits, each.numbers, weights)
                    if shares and multiplier != 1:
                        continue
                    least = min(least, residual)
                    if residual <= tolerance(weights, logits):
                        return Routed(each.path, site, form, multiplier, residual, shares)
    if least == torch.inf:
        return NO_ROUTER
    return f"weights = f(router) fails by {least:.1e} for all earlier outputs of modules"


def residual_of(look: Look, routed: Routed, *, after: bool = False) -> tuple[float, bool]:
    """Returns the residual of a router's equation in another look, and whether it holds.

    Args:
        look: the other one.
        routed: the router.
        after: after writes.
    """
    parent = routed.path.rpartition(".")[0]
    found = [each for each in weighed(look, parent) if each.path == routed.path]
    if len(found) != 1 or routed.site not in look.sites:
        return torch.inf, False
    _, _, numbers, weights, _ = found[0]
    logits = look.tensor(routed.site, after=after).reshape(len(numbers), -1)
    if int(numbers.max()) >= logits.shape[1]:
        return torch.inf, False
    own = _FORMS[routed.form](logits.double(), numbers.long()) * routed.multiplier
    residual = differ(_shares(weights) if routed.shares else weights, own)
    return residual, residual <= tolerance(weights, logits)


def arrive(subject: Subject, found: Mapping[str, Routed]) -> set[str]:
    """Returns the names of routers whose logits can be written: the weights then follow from them.

    Args:
        subject: the copy that was examined.
        found: routers by name.
    """
    try:
        look = subject.look({each.site: noise(0.5) for each in found.values()})
    except HookError:
        return set()
    return {name for name, it in found.items() if residual_of(look, it, after=True)[1]}


def has_several(look: Look, prefix: str) -> bool:
    """Returns True if tokens choose experts in a block more than once."""
    numbers = [each.numbers for each in weighed(look, prefix)]
    return any(not torch.equal(numbers[0], each) for each in numbers)


def has_experts(block: nn.Module, apart: Collection[str]) -> bool:
    """Returns True if a block has experts: parameters of all in one tensor, or a list of them.

    Args:
        block: the block.
        apart: paths in it of what mixes tokens, and is left out with all that is inside.
    """
    for path, module in block.named_modules():
        if any(path == each or path.startswith(f"{each}.") for each in apart):
            continue
        if isinstance(module, nn.modules.conv._ConvNd):
            continue
        if any(it.dim() == _FUSED_DIMS and len(it) > 1 for it in module.parameters(recurse=False)):
            return True
        if isinstance(module, nn.ModuleList) and len(module) > 1:
            sizes = {sum(it.numel() for it in child.parameters()) for child in module}
            if len({type(child) for child in module}) == len(sizes) == 1 and sizes != {0}:
                return True
    return False


def weighed(look: Look, prefix: str) -> Iterator[Weighed]:
    """Yields what modules in a block took that has the numbers and weights of experts.

    Args:
        look: at the model.
        prefix: path of the block.
    """
    taken: dict[tuple[str, int], list[tuple[ObservedTensor, Tensor]]] = {}
    for each in look.sightings:
        if each.site.inputs and f"{each.site.path}.".startswith(f"{prefix}."):
            tensor = look.values[each.value].view(each.shape)
            taken.setdefault((each.site.path, each.time), []).append((each.site, tensor))
    for numbers, start, chosen in look.choices:
        for site, weights in taken.get((numbers.path, start), ()):
            if weights.shape == chosen.shape:
                yield Weighed(site.path, start, chosen, weights, (numbers, site))
                break
    for (path, start), inputs in taken.items():
        parent = path.rpartition(".")[0]
        around = [it.start for it in look.calls if it.path == parent and it.start < start < it.end]
        beside = [each for time in around for each in taken.get((parent, time), ())]
        for _, tensor in inputs:
            for _, positions in beside:
                found = _weights(tensor, positions)
                if found is not None:
                    yield Weighed(path, start, *found)


def _weights(taken: Tensor, positions: Tensor) -> tuple[Tensor, Tensor] | None:
    """Returns numbers and weights of experts if a tensor has all positions weighed for each."""
    own = positions.double().reshape(-1, positions.shape[-1])
    experts = taken.numel() // own.numel()
    if experts < _LEAST_EXPERTS or taken.shape != (experts * len(own), own.shape[-1]):
        return None
    each = taken.double().view(experts, *own.shape)
    weights = (each * own).sum(-1) / own.square().sum(-1)
    if differ(each, weights[..., None] * own) > tolerance(taken):
        return None
    chosen = (weights != 0).T
    counts = chosen.sum(-1)
    if not int(counts.min()) == int(counts.max()) > 0:
        return None
    numbers = chosen.nonzero()[:, 1].view(len(own), -1)
    return numbers, weights.T.gather(-1, numbers).to(taken.dtype)


def _shares(weights: Tensor) -> Tensor:
    return weights / weights.sum(-1, keepdim=True)


def _candidates(look: Look, prefix: str, choice: Weighed) -> list[tuple[ObservedTensor, Tensor]]:
    """Returns outputs with a number for each expert, in the order in which they were seen."""
    positions, least = len(choice.numbers), int(choice.numbers.max()) + 1
    found = []
    for each in look.sites.values():
        value = look.values[each.value]
        width = value.numel() // positions
        if (
            each.time < choice.start
            and each.site.path.startswith(f"{prefix}.")
            and not each.site.inputs
            and not isinstance(each.site.part, Hidden)
            and each.shape[-1:] == (width,)
            and width * positions == value.numel()
            and max(least, _LEAST_EXPERTS) <= width <= _MOST_EXPERTS
        ):
            found.append((each.site, value.view(positions, width)))
    return found


def _fit(form: str, logits: Tensor, numbers: Tensor, weights: Tensor) -> tuple[float, float]:
    """Returns multiplier and residual of the weights in one form."""
    own = _FORMS[form](logits.double(), numbers.long())
    size = float(own.square().sum())
    if not size:
        return 1.0, torch.inf
    multiplier = float((weights.double() * own).sum()) / size
    if abs(multiplier - 1) <= tolerance(weights, logits):
        multiplier = 1.0
    return multiplier, differ(weights, own * multiplier)

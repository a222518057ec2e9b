"""Experts that tokens choose: their numbers and weights, at the module that has them."""

# In one forward each such module gets other numbers and weights. Then it is called again with two
# parts of them: an expert whose weight is 0 adds nothing, so the two outputs add up to its own.

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from ferrohook.errors import HookError
from ferrohook.quantity.anatomy.equations import SIGNIFICANT, differ, tolerance
from ferrohook.quantity.anatomy.observe import Hidden, inputs_of, noise, observing, with_inputs
from ferrohook.quantity.proofs.proved import Proved
from ferrohook.quantity.proofs.routers import SEVERAL, has_several, weighed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ferrohook.quantity.anatomy.observe import Look, ObservedTensor
    from ferrohook.quantity.anatomy.subjects import Subject
    from ferrohook.quantity.proofs.routers import Routed

_EQUATION: Final = "mixture(experts, expert_weights) = sum of mixture(expert, weight) over them"
_ALL: Final = "each token goes through all experts, some with a weight of 0"
_NOWHERE: Final = "no module takes the numbers and weights of the experts where hooks see them"
_OTHER: Final = f"no router explains the weights, and {_EQUATION} fails for other ones"


class Mixture(NamedTuple):
    """A block with experts."""

    path: str
    names: tuple[str, ...]
    """Names of the quantities: of the numbers and of the weights."""
    routed: Routed | None
    """Its router, if that is proved."""


class _Chosen(NamedTuple):
    """Arguments of a module of experts."""

    numbers: ObservedTensor
    weights: ObservedTensor
    shape: tuple[int, ...]


def prove_experts(
    subject: Subject, look: Look, mixtures: Iterable[Mixture]
) -> tuple[list[Proved], dict[str, str]]:
    """Proves numbers and weights of experts: with other ones that are written, or by the router.

    Args:
        subject: the copy that was looked at.
        look: at the subject.
        mixtures: blocks with experts.

    Returns:
        The quantities, and the reasons of those that are not proved.
    """
    chosen = {each: _chosen_in(look, each) for each in mixtures}
    found = {each: it for each, it in chosen.items() if not isinstance(it, str)}
    residuals = _residuals(subject, [*found.values()]) if found else {}
    missing = {each: it for each, it in chosen.items() if isinstance(it, str)}
    proved = []
    for each, (numbers, weights, shape) in found.items():
        residual = residuals.get(numbers.path)
        if residual is None and each.routed is None:
            missing[each] = _OTHER
            continue
        for name, site in zip(each.names, (numbers, weights), strict=True):
            if residual is not None:
                proved.append(Proved(name, site, shape, _EQUATION, residual, writable=True))
            elif each.routed is not None:
                proved.append(Proved(name, site, shape, each.routed.equation, each.routed.residual))
    reasons = {name: reason for each, reason in missing.items() for name in each.names}
    return proved, reasons


def _chosen_in(look: Look, mixture: Mixture) -> _Chosen | str:
    """Finds the arguments in a block; the reason if there are none."""
    if has_several(look, mixture.path):
        return SEVERAL
    for each in weighed(look, mixture.path):
        own = mixture.routed is None or mixture.routed.path == each.path
        if own and each.sites is not None and each.sites[1] in look.sites:
            if any(isinstance(site.part, Hidden) for site in each.sites):
                continue
            if not bool(each.weights.all()):
                return _ALL
            return _Chosen(*each.sites, tuple(each.weights.shape))
    return _NOWHERE


def _residuals(subject: Subject, chosen: Iterable[_Chosen]) -> dict[str, float]:
    """Writes other experts and weights; returns residuals by the paths where the equation holds."""
    at = {each.numbers.path: (each.numbers.part, each.weights.part) for each in chosen}
    found: dict[str, float] = {}

    def write(path: str, _module: nn.Module, args: Any, kwargs: Any) -> Any:
        if path not in at:
            return None
        inputs, (numbers, weights) = dict(inputs_of(args, kwargs)), at[path]
        other = {numbers: _others(inputs[numbers]), weights: noise(0.5)(inputs[weights])}
        return with_inputs(args, kwargs, other)

    def check(path: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if path not in at or not isinstance(output, Tensor):
            return

        def mixed(numbers: Tensor, weights: Tensor) -> Tensor:
            inputs = dict(zip(at[path], (numbers, weights), strict=True))
            args_, kwargs_ = with_inputs(args, kwargs, inputs)
            returned: Tensor = module.forward(*args_, **kwargs_)
            return returned

        inputs = dict(inputs_of(args, kwargs))
        numbers, weights = (inputs[part] for part in at[path])
        others = _others(numbers)
        half = torch.arange(numbers.shape[1], device=numbers.device) % 2 == 0
        parts = [mixed(numbers.where(it, others), weights * it) for it in (half, ~half)]
        residual, limit = differ(output, parts[0] + parts[1]), tolerance(output)
        if residual <= limit and differ(output, mixed(others, weights)) > SIGNIFICANT * limit:
            found[path] = residual

    try:
        with observing(subject.model, write, check):
            subject.forward()
    except HookError:
        return {}
    return found


def _others(numbers: Tensor) -> Tensor:
    """Returns other numbers of experts."""
    return (numbers + 1) % (numbers.max() + 1)

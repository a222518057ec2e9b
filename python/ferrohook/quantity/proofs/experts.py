"""Experts that tokens choose: their numbers and weights, at the module that has them."""

# In one forward each such module gets other numbers and weights. Then it is called again with two
# parts of them: an expert whose weight is 0 adds nothing, so the two outputs add up to its own.
# Numbers and weights stand where one module returns both, if a write there arrives, else
# where the module with the experts takes them.

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from ferrohook.effects.parts import with_part
from ferrohook.effects.routing import Routing
from ferrohook.errors import HookError
from ferrohook.quantity.anatomy.equations import SIGNIFICANT, differ, tolerance
from ferrohook.quantity.anatomy.observe import (
    Hidden,
    ObservedTensor,
    inputs_of,
    noise,
    observing,
    outputs_of,
    with_inputs,
)
from ferrohook.quantity.proofs.proved import Proved
from ferrohook.quantity.proofs.routers import SEVERAL, has_several, weighed

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from ferrohook.quantity.anatomy.observe import Look
    from ferrohook.quantity.anatomy.subjects import Subject
    from ferrohook.quantity.proofs.routers import Routed, Weighed

_EQUATION: Final = "mixture(experts, expert_weights) = sum of mixture(expert, weight) over them"
_ALL: Final = "each token goes through all experts, some with a weight of 0"
_NOWHERE: Final = "no module takes the ids and weights of the experts where hooks can see them"
_NO_ROUTER: Final = "its router is not proved"
_ELSEWHERE: Final = "the module that returns them does not return the router's logits"
_OTHER: Final = f"no router explains the weights, and {_EQUATION} fails for other weights"


class Mixture(NamedTuple):
    """A block with experts."""

    path: str
    names: tuple[str, ...]
    """Names of the quantities: of the numbers and of the weights."""
    routed: Routed | None
    """Its router, if that is proved."""


class _Chosen(NamedTuple):
    """Numbers and weights that a module of experts takes."""

    path: str
    parts: list[Any]
    """Parts of the module's input."""
    sites: tuple[ObservedTensor, ...]
    """Places where hooks see them."""
    shape: tuple[int, ...]
    experts: int
    """Number of the experts, as far as tokens take them."""
    returned: bool
    """True if one module returns both, at the sites."""

    def write_numbers(self, numbers: Tensor) -> Tensor:
        """Returns other experts, in another order."""
        return _others(numbers, self.experts).roll(1, 1)


def prove_experts(
    subject: Subject, look: Look, mixtures: Iterable[Mixture]
) -> tuple[list[Proved], dict[str, str]]:
    """Proves numbers and weights of experts: with other ones that are written, or by the router.

    Args:
        subject: the copy that was examined.
        look: at the subject.
        mixtures: blocks with experts.

    Returns:
        The quantities, and reasons for the ones that are not proved.
    """
    chosen = {each: _chosen_in(look, each) for each in mixtures}
    found = {each: it for each, it in chosen.items() if not isinstance(it, str)}
    residuals = _residuals(subject, [*found.values()])
    again = {each: it for each, it in found.items() if it.returned and it.path not in residuals}
    for each in again:
        taken = _chosen_in(look, each, returned=False)
        if not isinstance(taken, str):
            found[each] = taken
    residuals |= _residuals(subject, [found[each] for each in again])
    missing = {each: it for each, it in chosen.items() if isinstance(it, str)}
    proved = []
    for each, it in found.items():
        residual = residuals.get(it.path)
        if residual is None and each.routed is None:
            missing[each] = _OTHER
            continue
        for name, site in zip(each.names, it.sites, strict=True):
            if residual is not None:
                proved.append(Proved(name, site, it.shape, _EQUATION, residual, writable=True))
            elif each.routed is not None:
                routed = each.routed
                proved.append(Proved(name, site, it.shape, routed.equation, routed.residual))
        ids = proved[-len(it.sites)]
        ids.experts = _count(look, each.routed, subject.model.get_submodule(it.path))
        if residual is not None and it.returned:
            ids.routing = _routing(look, each.routed, it)
    reasons = {name: reason for each, reason in missing.items() for name in each.names}
    return proved, reasons


def _count(look: Look, routed: Routed | None, module: nn.Module) -> int | None:
    """Returns the number of experts of a module; None if it is not known."""
    if routed is not None:
        return look.sites[routed.site].shape[-1]
    # Each parameter of fused experts has all of them in its first dimension.
    counts = {len(it) for it in module.parameters(recurse=False) if it.dim() > 1}
    return counts.pop() if len(counts) == 1 else None


def _routing(look: Look, routed: Routed | None, chosen: _Chosen) -> Routing:
    """Returns where a module returns experts, their weights and, if it does, their logits."""
    numbers, weights = chosen.sites
    if routed is None:
        return Routing(numbers.part, weights.part, reason=_NO_ROUTER)
    value = look.sites[routed.site].value
    for site, sighting in look.sites.items():
        if site[:2] == numbers[:2] and sighting.value == value:
            return Routing(numbers.part, weights.part, site.part)
    return Routing(numbers.part, weights.part, reason=_ELSEWHERE)


def _chosen_in(look: Look, mixture: Mixture, *, returned: bool = True) -> _Chosen | str:
    """Finds numbers and weights in a block; the reason if there are none.

    Args:
        look: at the model.
        mixture: the block.
        returned: where one module returns both, if there is one; else what experts take.
    """
    if has_several(look, mixture.path):
        return SEVERAL
    for each in weighed(look, mixture.path):
        own = mixture.routed is None or mixture.routed.path == each.path
        if own and each.sites is not None and each.sites[1] in look.sites:
            sites = _source(look, each, each.sites[1]) if returned else None
            seen = not any(isinstance(site.part, Hidden) for site in each.sites)
            if sites is None and not seen:
                continue
            if not bool(each.weights.all()):
                return _ALL
            parts, shape = [site.part for site in each.sites], tuple(each.weights.shape)
            experts = int(each.numbers.max()) + 1
            return _Chosen(
                each.path, parts, sites or each.sites, shape, experts, returned=sites is not None
            )
    return _NOWHERE


def _source(
    look: Look, weighed_: Weighed, taken: ObservedTensor
) -> tuple[ObservedTensor, ...] | None:
    """Returns where a module returns numbers and weights; `taken`: where experts take weights."""
    source = look.source(look.sites[taken].value, weighed_.start)
    if source is not None:
        for each in look.choices:
            if each.site[:2] == source[:2] and torch.equal(each.numbers, weighed_.numbers):
                return each.site, source
    return None


def _residuals(subject: Subject, chosen: Collection[_Chosen]) -> dict[str, float]:
    """Writes other experts and weights; returns residuals by the paths where the equation holds."""
    if not chosen:
        return {}
    writing = _Writing(chosen)
    try:
        with observing(subject.model, writing.before, writing.after):
            subject.forward()
    except HookError:
        return {}
    return writing.residuals


class _Writing:
    """Writes other experts and weights in a forward, and checks the equation where they arrive."""

    def __init__(self, chosen: Collection[_Chosen]) -> None:
        self.residuals: dict[str, float] = {}
        self._chosen = {each.path: each for each in chosen}
        self._changes: dict[ObservedTensor, Callable[[Tensor], Tensor]] = {}
        for each in chosen:
            self._changes.update(zip(each.sites, (each.write_numbers, noise(0.5)), strict=True))
        self._written: dict[ObservedTensor, Tensor] = {}
        self._calls: dict[str, tuple[Any, Any]] = {}
        """Arguments of modules with experts, which may change their own in place."""

    def before(self, path: str, _module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Writes to an input of a module."""
        changed = self._changed(path, inputs_of(args, kwargs), inputs=True)
        call = with_inputs(args, kwargs, changed)
        if path not in self._chosen:
            return call
        self._calls[path] = call
        return _copied(*call)

    def after(self, path: str, module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> Any:
        """Checks an output of a module, or writes to it."""
        if path in self._chosen and isinstance(output, Tensor):
            self._check(self._chosen[path], module, output)
        for part, tensor in self._changed(path, outputs_of(output), inputs=False).items():
            output = with_part(output, part, tensor)
        return output

    def _changed(
        self, path: str, values: Iterable[tuple[Any, Any]], *, inputs: bool
    ) -> dict[Any, Tensor]:
        changed = {}
        for part, value in values:
            site = ObservedTensor(path, inputs, part)
            if site in self._changes:
                changed[part] = self._written[site] = self._changes[site](value)
        return changed

    def _check(self, chosen: _Chosen, module: nn.Module, output: Tensor) -> None:
        args, kwargs = self._calls[chosen.path]

        def mixed(*taken: Tensor) -> Tensor:
            changed = with_inputs(args, kwargs, dict(zip(chosen.parts, taken, strict=True)))
            args_, kwargs_ = _copied(*changed)
            returned: Tensor = module.forward(*args_, **kwargs_)
            return returned

        inputs = dict(inputs_of(args, kwargs))
        numbers, weights = taken = [inputs[part] for part in chosen.parts]
        written = [self._written.get(site) for site in chosen.sites]
        if any(it is not other for it, other in zip(taken, written, strict=True)):
            return
        others = _others(numbers, chosen.experts)
        half = torch.arange(numbers.shape[1], device=numbers.device) % 2 == 0
        parts = [mixed(numbers.where(it, others), weights * it) for it in (half, ~half)]
        residual, limit = differ(output, parts[0] + parts[1]), tolerance(output)
        other = mixed(chosen.write_numbers(numbers), weights)
        if residual <= limit and differ(output, other) > SIGNIFICANT * limit:
            self.residuals[chosen.path] = residual


def _copied(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Copies the tensors among the arguments of a call."""
    tensors = {part: it for part, it in inputs_of(args, kwargs) if isinstance(it, Tensor)}
    return with_inputs(args, kwargs, {part: it.clone() for part, it in tensors.items()})


def _others(numbers: Tensor, least: int) -> Tensor:
    """Returns experts that a token did not take, each once; its own where there are no more.

    Kernels count on experts that differ.
    """
    # Writes in earlier blocks may choose experts that the look has not seen.
    experts, chosen = max(least, int(numbers.max()) + 1), numbers.shape[1]
    taken = torch.zeros(len(numbers), experts, dtype=torch.uint8, device=numbers.device)
    unused = taken.scatter(1, numbers.long(), 1).argsort(dim=1, stable=True)[:, :chosen]
    place = torch.arange(chosen, device=numbers.device)
    return unused.to(numbers.dtype).where(place < experts - chosen, numbers)

"""Rules of routers: how they weigh experts, whichever they are."""

# A router is called with noise in place of its vectors, in the model's own dtype and in copies of
# other dtypes. The rule is the one that gives the router's weights from its logits and its choice,
# bit for bit in all of these calls. Kernels of engines may fuse it: there within rounding.

from __future__ import annotations

import copy
import itertools
import math
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from ferrohook.effects.parts import part_of
from ferrohook.effects.routing import SCORES, RoutingRule
from ferrohook.errors import HookError
from ferrohook.quantity.anatomy.equations import differ, tolerance
from ferrohook.quantity.anatomy.observe import observing
from ferrohook.quantity.anatomy.subjects import structural_copy, undisturbed
from ferrohook.util.tensors import map_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ferrohook.effects.routing import Routing
    from ferrohook.quantity.anatomy.subjects import Subject
    from ferrohook.quantity.proofs.proved import Proved

_SIZES: Final = (1.0, 4.0, 16.0)
"""Standard deviations of the noise."""
_VECTORS: Final = 2
"""Dimensions of tensors, at least, that have a vector for each token."""
_CASTS: Final = (torch.float32, torch.bfloat16)
_ADDED: Final = (1e-20, 1e-12, 1e-9, 1e-8, 1e-6, 1e-5)
"""Numbers that routers add to sums. The first one changes no sum but 0, which divides to NaN."""
_SEED: Final = 20

NO_RULE: Final = "no rule that knows only the ids gives the weights from the router's logits"


def prove_rules(
    model: nn.Module, subject: Subject, found: Iterable[Proved], *, fused: bool = False
) -> None:
    """Adds the rules of routers to the places where they return experts.

    Args:
        model: the model.
        subject: the model or a copy, and the call in which it is examined.
        found: ids of experts among them.
        fused: the model is an engine's; its own routers are called, not the routers of a copy. A
            kernel may compute the weights, which rounds differently: where no rule gives the same
            bits, one that holds within rounding will do.
    """
    routed = [each for each in found if each.routing is not None]
    if not routed:
        return
    calls = _calls_of(subject, {each.site.path for each in routed})
    own, last = model if fused else structural_copy(model), None
    dtypes = (it.dtype for it in model.parameters() if it.is_floating_point())
    dtype = next(dtypes, torch.float32)
    for each in routed:
        routing: Any = each.routing
        if routing.logits is None:
            continue
        router = own.get_submodule(each.site.path)
        try:
            samples = [*_samples(router, calls[each.site.path], routing, dtype)]
        except HookError as error:
            each.routing = routing._replace(reason=str(error))
            continue
        ways = (_equal, _alike) if fused else (_equal,)
        rules = ((it, way) for way in ways for it in _rules(router, last))
        last = next((it for it, way in rules if _holds(it, samples, way)), None)
        each.routing = routing._replace(rule=last, reason="" if last else NO_RULE)


def _calls_of(subject: Subject, paths: set[str]) -> dict[str, tuple[Any, Any]]:
    """Returns the arguments of the last call of each module."""
    calls: dict[str, tuple[Any, Any]] = {}

    def see(path: str, _module: nn.Module, args: Any, kwargs: Any) -> None:
        if path in paths:
            calls[path] = args, kwargs

    with observing(subject.model, see):
        subject.forward()
    return calls


class _Sample:
    """Output of a router."""

    def __init__(self, routing: Routing, output: Any) -> None:
        parts = (routing.logits, routing.ids, routing.weights)
        self.logits, ids, self.weights = (part_of(output, part) for part in parts)
        self.ids = ids.long()


def _samples(
    router: nn.Module, call: tuple[Any, Any], routing: Routing, dtype: torch.dtype
) -> Iterator[list[_Sample]]:
    """Yields a router's outputs for noise, in the model's own dtype and then in others.

    Raises:
        HookError: it fails in the model's own dtype.
    """
    casts = [(None, dtype), *((each, each) for each in _CASTS if each != dtype)]
    has_tensors = any(True for _ in itertools.chain(router.parameters(), router.buffers()))
    for cast, of_vectors in casts:
        try:
            is_own = cast is None or not has_tensors
            module = router if is_own else copy.deepcopy(router).to(cast)
            with undisturbed():
                made = []
                for number, size in enumerate(_SIZES):
                    args, kwargs = _drawn(call, size, of_vectors, _SEED + number)
                    made.append(_Sample(routing, module.forward(*args, **kwargs)))
        except Exception as error:
            if cast is None:
                msg = f"{type(router).__name__} fails for random vectors of {dtype}: {error}"
                raise HookError(msg) from error
            continue
        yield made


def _drawn(call: tuple[Any, Any], size: float, dtype: torch.dtype, seed: int) -> Any:
    """Returns the arguments of a call with noise in place of vectors."""
    generator = torch.Generator("cpu").manual_seed(seed)

    def noise(tensor: Tensor) -> Tensor:
        if tensor.dim() < _VECTORS or not tensor.is_floating_point():
            return tensor
        made = torch.randn(tensor.shape, generator=generator, device="cpu") * size
        return made.to(tensor.device, dtype)

    return map_tensors(noise, call)


def _rules(router: nn.Module, first: RoutingRule | None) -> Iterator[RoutingRule]:
    """Yields rules that a router may have; `first`: one to try ahead of others."""
    if first is not None:
        yield first
    numbers = [*_numbers_in(router)]
    sums: list[tuple[str | None, float]] = [(None, 0.0)]
    sums += [("add", each) for each in (*_ADDED, *numbers)]
    sums += [("clamp", each) for each in (*_ADDED, *numbers)]
    scales = [1.0, *numbers]
    for scores, in_float32, of_sum, scale in itertools.product(SCORES, (True, False), sums, scales):
        yield RoutingRule(scores, in_float32, *of_sum, scale)


def _numbers_in(router: nn.Module) -> Iterator[float]:
    """Yields the numbers that a router may multiply by or add: its own and its attributes'."""
    seen = {1.0}
    for owner in (router, *vars(router).values()):
        for value in getattr(owner, "__dict__", {}).values():
            if type(value) in {int, float} and value not in seen and 0 < value < math.inf:
                seen.add(value)
                yield float(value)


def _holds(
    rule: RoutingRule, samples: list[list[_Sample]], way: Callable[[_Sample, Tensor], bool]
) -> bool:
    """Returns True if a rule gives the weights of all samples."""
    return all(
        way(it, rule.weights(it.logits, it.ids, it.weights.dtype))
        for of_dtype in samples
        for it in of_dtype
    )


def _equal(sample: _Sample, made: Tensor) -> bool:
    return torch.equal(sample.weights, made)


def _alike(sample: _Sample, made: Tensor) -> bool:
    return differ(sample.weights, made) <= tolerance(sample.weights, sample.logits)

"""Proofs of q, k, v, z and pattern: looks at what attention functions take and return."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from ferrohook._core import Attachment
from ferrohook.attach.attention import POINTS, attended, attended_to, points_of
from ferrohook.attach.instrument import attach
from ferrohook.errors import HookError
from ferrohook.quantity.anatomy.equations import differ, tolerance
from ferrohook.quantity.anatomy.observe import ObservedTensor, noise, observing
from ferrohook.quantity.proofs.proved import Proved

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ferrohook.attach.attention import Attended
    from ferrohook.quantity.anatomy.subjects import Subject

EQUATION: Final = "softmax(q @ k, scaled and masked) @ v = pattern @ v = z"


class FoundHeads(NamedTuple):
    """Quantities found inside one attention module."""

    inside: tuple[Proved, ...]
    """Proofs by names of kinds, such as `q`."""
    missing: Mapping[str, str]
    """Reasons of kinds that are not proved, by name."""


def look_inside(subject: Subject) -> dict[str, FoundHeads]:
    """Proves the quantities inside the attention modules of a model.

    The model's eager attention computes the pattern from q and k, whichever attention function the
    model runs with. The pattern is accepted if `pattern @ v` is z. Then each tensor is overwritten.

    Modules that attend to other things than tokens, such as earlier blocks, have the tokens in the
    dimension of heads, and are left out.

    Args:
        subject: a copy of the model; hooks stay on none of its modules.

    Returns:
        The findings, by the path of the attention module. Empty for a model whose attention does
        not use transformers' `AttentionInterface`.
    """
    tokens = None if subject.example.shape is None else subject.example.shape[1]
    names = {id(module): name for name, module in subject.model.named_modules()}
    with attended() as calls:
        subject.forward()
    found: dict[str, list[Attended]] = {}
    for each in calls:
        name = names.get(id(each.module))
        if name is not None and not each.q.shape[1] != tokens == each.q.shape[2]:
            found.setdefault(name, []).append(each)
    once = {name: each[0] for name, each in found.items() if len(each) == 1}
    written = _written(once, subject)
    heads = {}
    for name, (first, *others) in found.items():
        if others:
            reason = f"its module calls {len(others) + 1} attention functions in a forward"
            heads[name] = FoundHeads((), dict.fromkeys(POINTS, reason))
        else:
            arrives = {point: name in written[point] for point in POINTS}
            heads[name] = _proved(name, first, arrives)
    return heads


def _proved(path: str, attended: Attended, arrives: Mapping[str, bool]) -> FoundHeads:
    _, q, k, v, z, _ = attended
    tensors = {"q": q, "k": k, "v": v, "z": z}
    try:
        pattern = attended.pattern()
        residual = differ(z, attended_to(pattern, v))
    except (HookError, RuntimeError, TypeError, ValueError) as error:  # of the model's own function
        reason = f"its eager attention fails: {error}"
        return FoundHeads((), dict.fromkeys(POINTS, reason))
    if not residual <= _limit(z, pattern):
        reason = f"pattern @ v = z fails by {residual:.1e}"
        return FoundHeads((), dict.fromkeys(POINTS, reason))
    tensors["pattern"] = pattern
    site = ObservedTensor.output(path, None)
    return FoundHeads(
        tuple(
            Proved(
                point,
                site,
                tuple(tensors[point].shape),
                EQUATION,
                residual,
                writable=arrives[point],
                point=point,
            )
            for point in POINTS
        ),
        {},
    )


# --- Writing ----------------------------------------------------------------------------------


def _written(modules: Mapping[str, Attended], subject: Subject) -> dict[str, set[str]]:
    """Returns the names of modules in which a written value arrives as it should, by point.

    One call writes to the pattern, and one to all other points. A point whose values do not arrive
    in all modules is written to once more, in a separate call.
    """
    if not modules:
        return {point: set() for point in POINTS}
    together = [point for point in POINTS if point != "pattern"]
    found = {"pattern": set[str](), **_arrivals(modules, subject, together)}
    for point, names in found.items():
        if names != {*modules}:
            names.update(_arrivals(modules, subject, [point])[point])
    return found


def _arrivals(
    modules: Mapping[str, Attended], subject: Subject, points: Sequence[str]
) -> dict[str, set[str]]:
    """Writes to points of modules in one call; returns the names of those where it arrives."""
    written: dict[tuple[str, str], Tensor] = {}
    taken: dict[str, list[Tensor]] = {name: [] for name in modules}

    def see(path: str, _module: nn.Module, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        for name, each in modules.items():
            if path.startswith(f"{name}.") and args and isinstance(args[0], Tensor):
                taken[name] += [args[0]] if args[0].numel() == each.z.numel() else []

    hooked = {
        (name, point): getattr(points_of(each.module), point)
        for name, each in modules.items()
        for point in points
    }
    attachment = Attachment()
    attach({".".join(key): each for key, each in hooked.items()}, attachment)
    try:
        for key, each in hooked.items():
            change = functools.partial(_change, written, key)
            attachment.register([each], "forward", change, names=[".".join(key)])
        with observing(subject.model, see), attended() as calls:
            subject.forward()
        after = {id(each.module): each for each in calls}
    except HookError:  # the model fails where it is written to
        after = {}
    finally:
        attachment.release()
    return {
        point: {
            name
            for name, each in modules.items()
            if (name, point) in written
            and (now := after.get(id(each.module))) is not None
            and _arrived(point, written[name, point], now, taken[name])
        }
        for point in points
    }


def _arrived(point: str, written: Tensor, now: Attended, taken: list[Tensor]) -> bool:
    if point == "z":
        flat = written.flatten(2)
        if any(torch.equal(each.reshape(flat.shape), flat) for each in taken):
            return True
        # A gate may stand before the projection, or the projection outside; the old one may not.
        former = now.z.flatten(2)
        return not any(torch.equal(each.reshape(flat.shape), former) for each in taken)
    pattern = written if point == "pattern" else now.pattern()
    if point != "pattern" and not torch.equal(getattr(now, point), written):
        return False
    return differ(now.z, attended_to(pattern, now.v)) <= _limit(now.z, pattern)


def _limit(z: Tensor, pattern: Tensor) -> float:
    # Eager attention computes the softmax in float32, in models of float64 too.
    return tolerance(z, pattern, torch.empty(0, dtype=torch.float32, device="cpu"))


def _change(
    written: dict[tuple[str, str], Tensor],
    key: tuple[str, str],
    _point: nn.Module,
    _args: Any,
    x: Tensor,
) -> Any:
    """Adds noise to a tensor, and keeps the sum."""
    written[key] = changed = noise(0.5)(x)
    return changed

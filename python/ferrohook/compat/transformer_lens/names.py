"""`NamesFilter`: selects hook points of a model by name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, TypeAlias

from ferrohook.errors import HookError, HookTypeError, SelectionError
from ferrohook.util.arguments import describe, expect
from ferrohook.util.suggestions import MOST_SUGGESTIONS, closest_to
from ferrohook.util.texts import with_article

if TYPE_CHECKING:
    from torch import nn

    from ferrohook.compat.transformer_lens.hook_point import HookPoint

NamesFilter: TypeAlias = "str | Collection[str] | Callable[[str], bool] | None"
"""A name, several (a list, tuple or set), a predicate of names, or None for all."""


class SetupError(HookError, AttributeError):
    """A model was used before its `setup()` was called, or while it has no hook points yet."""


def points_named(model: nn.Module, names: Iterable[str]) -> dict[str, HookPoint]:
    """Returns the hook points of these names.

    Raises:
        SelectionError: no hook point has that name.
        HookTypeError: a name is no str.
    """
    points: Mapping[str, HookPoint] = model.hook_dict  # type: ignore[assignment]  # of a root
    found: dict[str, HookPoint] = {}
    for name in names:
        expect(name, str, "the name of a hook point must be a str")
        point = points.get(name)
        if point is None:
            raise SelectionError(_unknown(model, name))
        found[name] = point
    return found


def points_filtered(model: nn.Module, names_filter: NamesFilter) -> dict[str, HookPoint]:
    """Returns the hook points that a filter selects, in the model's order.

    Raises:
        SelectionError: no hook point has that name.
        HookTypeError: `names_filter` is no `NamesFilter`.
    """
    points: dict[str, HookPoint] = model.hook_dict  # type: ignore[assignment]  # of a root
    if names_filter is None:
        return dict(points)
    if isinstance(names_filter, str):
        return points_named(model, [names_filter])
    if callable(names_filter):
        return {name: point for name, point in points.items() if names_filter(name)}
    if isinstance(names_filter, Collection) and not isinstance(names_filter, bytes | Mapping):
        wanted = points_named(model, names_filter)
        return {name: point for name, point in points.items() if name in wanted}
    msg = (
        "names_filter must be a name, a list, tuple or set of names, a predicate of names or "
        f"None, got {describe(names_filter)}"
    )
    raise HookTypeError(msg)


def _unknown(model: nn.Module, name: str) -> str:
    points: Mapping[str, HookPoint] = model.hook_dict  # type: ignore[assignment]  # of a root
    modules: Mapping[str, nn.Module] = model.mod_dict  # type: ignore[assignment]  # of a root
    owner = model._get_name()
    if name in modules:
        msg = f"{name!r} is {with_article(modules[name])} in {owner}, not a hook point"
    else:
        msg = f"{owner} has no hook point {name!r}"
    if not points:
        return f"{msg}: it has none at all"
    closest = closest_to(name, points)
    listed = ", ".join(map(repr, closest or list(points)[:MOST_SUGGESTIONS]))
    return f"{msg}; the {'closest' if closest else 'first'} hook points are {listed}"

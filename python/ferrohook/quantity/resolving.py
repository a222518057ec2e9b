"""Selectors with names of quantities, resolved to places."""

from __future__ import annotations

import weakref
from collections.abc import Set as AbstractSet
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from ferrohook.attach.attention import points_of
from ferrohook.errors import HookTypeError, SelectionError
from ferrohook.names.places import Head, Place
from ferrohook.names.select import MOST_SELECTIONS, select
from ferrohook.names.spelling import SIGN, as_lens, from_lens, split_head
from ferrohook.quantity.known import Resolved, known_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import nn

    from ferrohook.effects.typed import Phase
    from ferrohook.names.select import Selector
    from ferrohook.quantity.table import Quantities, Quantity


def places_of(
    model: nn.Module, what: Selector, *, inputs: bool = False, output_index: object = None
) -> dict[str, Place]:
    """Resolves a selector to places: what `capture`, `register` and plans go by.

    Args:
        model: any module.
        what: see `select`; names and globs of quantities too, `@resid_post.*`, also in lists,
            and names of TransformerLens' hook points that are no module here.
        inputs: the inputs of selected modules, not their outputs.
        output_index: part of them.

    Returns:
        Places by the names that the caller uses: paths of modules, and names of quantities.

    Raises:
        SelectionError: see `select`; or a quantity is not there or not proved.
        HookTypeError: `inputs` or `output_index` with a quantity, which has both itself.
        HookError: the model cannot be examined.
    """
    wanted = [*_quantities_in(model, what)]
    if not wanted:
        modules = select(model, what, called=True)
        return {path: Place(path, module, inputs, output_index) for path, module in modules.items()}
    if inputs or output_index is not None:
        msg = (
            f"{wanted[0]!r} is one tensor at a fixed place: leave out inputs, phase and "
            "output_index"
        )
        raise HookTypeError(msg)
    found: dict[str, Place] = {}
    for name in wanted:
        found |= _places(model, name)
    others = _without_quantities(model, what)
    if others is not None:
        modules = select(model, others, called=True)
        found |= {path: Place(path, module) for path, module in modules.items()}
    return found


def _places(model: nn.Module, name: str) -> dict[str, Place]:
    """Returns the places of the quantities that one name or glob matches."""
    known = known_of(model)
    resolved = known.resolved.get(name)
    if resolved is None:
        lens = from_lens(name)
        if len(known.resolved) >= MOST_SELECTIONS:
            known.resolved.clear()
        resolved = known.resolved[name] = [
            Resolved(
                title if lens is None else as_lens(title, name),
                quantity,
                head,
                weakref.ref(model.get_submodule(quantity.path)),
            )
            for title, quantity, head in matching(known.table, known.heads, lens or name)
        ]
    return {
        each.title: _place(each, module)
        for each in resolved
        if (module := each.module()) is not None
    }


def _place(resolved: Resolved, module: nn.Module) -> Place:
    quantity = resolved.quantity
    path, point = quantity.path, quantity.point
    shape = quantity.shape
    if resolved.head is not None and resolved.head.width is not None:
        shape = (*shape[:-1], resolved.head.width)
    if point is not None:
        path, module = f"{path}.{point}", getattr(points_of(module), point)
    return Place(
        path,
        module,
        quantity.phase == "forward_pre",
        quantity.part,
        quantity.multiplier,
        resolved.title,
        quantity.writable,
        None if point == "pattern" else shape,  # its shape depends on the call
        resolved.head,
        quantity.stream_factor,
        quantity.routing,
        quantity.experts,
        quantity.time,
    )


def matching(
    table: Quantities, side_by_side: Mapping[str, tuple[int, int]], pattern: str
) -> Iterator[tuple[str, Quantity, Head | None]]:
    """Yields the matches of a name or glob, with the head if it names one: `@z.3.5`.

    Args:
        table: of a model.
        side_by_side: number and width of heads in one dimension, by the names of quantities.
        pattern: the name or glob.

    Raises:
        SelectionError: nothing matches.
    """
    base, head = split_head(pattern)
    if head is None:
        yield from ((quantity.name, quantity, None) for quantity in table.matching(pattern))
        return
    found, heads = False, list[Head]()
    for quantity in table.matching(base):
        heads = _heads_of(quantity, side_by_side)
        for each in heads:
            if fnmatchcase(str(each.number), head):
                found = True
                yield f"{quantity.name}.{each.number}", quantity, each
    if not found:
        numbers = f"0 to {len(heads) - 1}" if heads else "that cannot be told apart here"
        msg = f"{pattern} names no head: {base} has heads {numbers}"
        raise SelectionError(msg)


def _heads_of(quantity: Quantity, side_by_side: Mapping[str, tuple[int, int]]) -> list[Head]:
    """Returns the heads of a quantity; none if they cannot be distinguished."""
    if quantity.name in side_by_side:
        count, width = side_by_side[quantity.name]
        return [Head(number, -1, width) for number in range(count)]
    sizes = [*zip(quantity.dimensions, quantity.shape, strict=True)]
    for dim, (name, count) in enumerate(sizes, -len(sizes)):
        if name in {"heads", "kv_heads"}:
            return [Head(number, dim) for number in range(count)]
    return []


def _quantities_in(model: nn.Module, what: Any) -> Iterator[str]:
    """Yields the names of quantities in a selector."""
    if isinstance(what, str):
        if _is_quantity(model, what):
            yield what
    elif isinstance(what, list | tuple | AbstractSet):
        for each in what:
            # Most strings are paths, and cost no call: captures are opened often.
            if not isinstance(each, str) or SIGN in each or "hook_" in each:
                yield from _quantities_in(model, each)


def _is_quantity(model: nn.Module, name: str) -> bool:
    if name.startswith(SIGN):
        return True
    if from_lens(name) is None:
        return False
    try:
        select(model, name)
    except SelectionError:
        return True
    return False


def _without_quantities(model: nn.Module, what: Any) -> Any:
    """Returns a selector without the quantities in it; None if nothing is left."""
    if isinstance(what, str):
        return None if _is_quantity(model, what) else what
    if isinstance(what, list | tuple | AbstractSet):
        left = [_without_quantities(model, each) for each in what]
        return [each for each in left if each is not None] or None
    return what


def hooked_places_of(model: nn.Module, what: Selector, phase: Phase) -> dict[str, Place]:
    """Resolves the selector of a hook to places, as `places_of`; of modules in a phase.

    A module that is selected under several names is hooked once, under the first one.
    """
    found = places_of(model, what)
    modules = {name: place.module for name, place in found.items() if place.quantity is None}
    first = {id(module): name for name, module in reversed(modules.items())}
    again = {name for name, module in modules.items() if first[id(module)] != name}
    places = {name: place for name, place in found.items() if name not in again}
    if phase != "forward_pre":
        return places
    return {
        name: place if place.quantity else place._replace(inputs=True)
        for name, place in places.items()
    }

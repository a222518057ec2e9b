"""Tables of the examined models, stored as long as their modules stay."""

from __future__ import annotations

import weakref
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from ferrohook._core import ModuleTree
from ferrohook.quantity.table import Quantities, Quantity, looked_at
from ferrohook.util.arguments import expect_module
from ferrohook.util.swallowed import refuse_swallowed
from ferrohook.util.weak import PerObject

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import nn

    from ferrohook.names.places import Head


class Resolved(NamedTuple):
    """A quantity that a selector names."""

    title: str
    """Name of the capture."""
    quantity: Quantity
    head: Head | None
    module: weakref.ref[nn.Module]


class Known:
    """Table of a model, and the state of the model in which it holds.

    Args:
        model: the model.
        table: its quantities.
        heads: number and width of heads that are side by side, by the names of quantities.
    """

    def __init__(
        self, model: nn.Module, table: Quantities, heads: Mapping[str, tuple[int, int]]
    ) -> None:
        self.table = table
        self.heads = heads
        self._tree = ModuleTree([*model.modules()])
        self._numbers = [*_numbers_in(model)]
        self.resolved: dict[str, list[Resolved]] = {}
        """Names and globs that were resolved before."""

    def holds(self) -> bool:
        """Returns True if the model has the modules and the numbers that it had."""
        return self._tree.holds() and all(map(_unchanged, self._numbers))


class _Numbers(NamedTuple):
    """Numbers of a module, and of its configuration."""

    module: weakref.ref[nn.Module]
    read: attrgetter[Any]
    values: Any


def _numbers_in(model: nn.Module) -> Iterator[_Numbers]:
    """Yields the numbers that a forward may multiply by: attributes of modules not of torch."""
    configs: dict[int, Any] = {}
    for module in model.modules():
        own = not type(module).__module__.startswith("torch.")
        names = _floats(module) if own else []
        config = vars(module).get("config")
        if id(config) not in configs:
            configs[id(config)] = config
            names += [f"config.{each}" for each in _floats(config)]
        if names:
            read = attrgetter(*names)
            yield _Numbers(weakref.ref(module), read, read(module))


def _floats(owner: object) -> list[str]:
    content = getattr(owner, "__dict__", {})
    return [name for name, value in content.items() if type(value) is float and value == value]  # noqa: PLR0124 (NaN equals nothing)


def _unchanged(numbers: _Numbers) -> bool:
    module = numbers.module()
    try:
        return module is not None and bool(numbers.read(module) == numbers.values)
    except AttributeError:
        return False


_KNOWN: PerObject[Known] = PerObject()


def quantities(model: nn.Module, *args: Any, **kwargs: Any) -> Quantities:
    """Finds the quantities of a model and proves them.

    The model is examined once: a copy that shares its parameters runs a few short forwards, in eval
    mode and without gradients, so nothing about the model or its hooks changes. The table is stored
    with the model, and discarded when a module is replaced or a float in a module or in the
    configuration changes. Selectors that name a quantity (`@resid_post.12`) examine the model too;
    this function returns the table, and takes an example for models without `input_ids`.

    Args:
        model: any module.
        *args: arguments of an example call; without any, token ids are made.
        **kwargs: keyword arguments of the example call.

    Returns:
        The table. With an example the model is examined again, and the new table replaces the
        stored one.

    Raises:
        HookTypeError: `model` is not an `nn.Module`; or a keyword is an option of hooks or captures
            that the model's forward does not name.
        HookError: the model takes no `input_ids` and there is no example; its forward fails or is
            not deterministic; or it cannot be copied.

    Examples:
        >>> table = fh.quantities(model)
        >>> table["resid_mid.3"].equation
        'resid_pre + attn_out = resid_mid'
    """
    expect_module(model, "quantities needs")
    if not args and not kwargs:
        return known_of(model).table
    refuse_swallowed("quantities", model, kwargs)
    known = _KNOWN[model] = Known(model, looked_at(model, args, kwargs), {})
    return known.table


def known_of(model: nn.Module) -> Known:
    """Returns the stored findings of a model; examines it if there are none, or they are stale."""
    known = _KNOWN.get(model)
    if known is None or not known.holds():
        known = _KNOWN[model] = Known(model, looked_at(model, (), {}), {})
    return known


def remember(model: nn.Module, table: Quantities, heads: Mapping[str, tuple[int, int]]) -> None:
    """Stores a table for a model, as if the model had been examined.

    For engines, which look in their own way.

    Args:
        model: the engine's.
        table: its quantities.
        heads: see `Known`.
    """
    _KNOWN[model] = Known(model, table, heads)

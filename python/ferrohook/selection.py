"""`select`: names modules of a model by path, glob, regex, class or predicate."""

from __future__ import annotations

import functools
import re
from collections.abc import Set as AbstractSet
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, TypeAlias, get_origin

from torch import nn

from ferrohook.arguments import describe, expect_module
from ferrohook.errors import HookTypeError, SelectionError
from ferrohook.suggestions import MOST_SUGGESTIONS, closest_to

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

_Single: TypeAlias = "str | re.Pattern[str] | type[nn.Module] | Callable[[str, nn.Module], object]"
_Union: TypeAlias = "Sequence[_Single | _Union] | AbstractSet[_Single | _Union]"
Selector: TypeAlias = "_Single | _Union | None"


def select(model: nn.Module, what: Selector = None) -> dict[str, nn.Module]:
    """Names modules of a model.

    Whatever matches nothing is an error, also when other members of its collection do match.

    Args:
        model: the module whose submodules, itself included, are selected.
        what: None for all modules, or one of

            - a path as in `named_modules()`, `""` for the model itself. A module that stands in
              several places is found by each of its paths; everything below sees each module once,
              under the first.
            - a glob: `*`, `?` and `[...]` match inside one segment of a dotted path, the segment
              `**` any number of segments, none included. Where it is the path of a module, it is
              that path.
            - a compiled regex, which is searched for in the path (`re.search`).
            - a subclass of `nn.Module`, for its instances.
            - a predicate `(name, module) -> bool`.
            - a list, tuple or set of any of these, for their union.

    Returns:
        The modules by path, in the order of `named_modules()`.

    Raises:
        SelectionError: something matches no module.
        HookTypeError: `model` is no `nn.Module`, or `what` is none of the above.
    """
    expect_module(model, "select names modules of")
    if isinstance(what, str) and (module := _at(model, what)) is not None:
        return {what: module}  # without a look at all others
    tree = _Tree(model)
    return tree.named if what is None else tree.ordered(_match(tree, what))


def _at(model: nn.Module, path: str) -> nn.Module | None:
    """The module at a path, if there is one."""
    found: nn.Module | None = model
    for segment in path.split(".") if path else ():
        if found is None:
            break
        found = found._modules.get(segment)
    return found


def select_names(names: Iterable[str], pattern: str | re.Pattern[str]) -> list[str]:
    """Those of some names that a path, a glob or a compiled regex matches, see `select`."""
    names = list(names)
    if isinstance(pattern, str) and pattern in names:
        return [pattern]
    return [name for name in names if _pattern_fits(pattern, name)]


def _pattern_fits(pattern: str | re.Pattern[str], name: str) -> bool:
    """Whether a glob or a compiled regex matches a path."""
    if isinstance(pattern, str):
        return _fits(pattern, name)
    return pattern.search(name) is not None


class _Tree:
    """The modules of a model at one moment.

    Not taken by `named_modules`, which fails when another thread adds a module meanwhile and,
    asked for every path of shared modules, may yield exponentially many.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        # By their first path, in the order of `named_modules`.
        self.named: dict[str, nn.Module] = {}
        seen: set[int] = set()
        waiting = [("", model)]
        while waiting:
            name, module = waiting.pop()
            if id(module) in seen:
                continue
            seen.add(id(module))
            self.named[name] = module
            if children := list(module._modules.items()):
                prefix = f"{name}." if name else ""
                waiting += [
                    (prefix + segment, child)
                    for segment, child in reversed(children)
                    if child is not None
                ]

    def ordered(self, found: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
        """In the order of `named_modules`, modules at other than their first paths too."""
        if found.keys() <= self.named.keys():
            return {name: module for name, module in self.named.items() if name in found}
        return {name: found[name] for name in sorted(found, key=self._place)}

    def _place(self, path: str) -> list[int]:
        """The indices of the path's segments among their siblings."""
        place: list[int] = []
        module: nn.Module | None = self.model
        for segment in path.split(".") if path else ():
            siblings = {} if module is None else dict(module._modules)
            place.append([*siblings].index(segment) if segment in siblings else -1)
            module = siblings.get(segment)
        return place


def _match(tree: _Tree, what: object) -> dict[str, nn.Module]:
    if isinstance(what, (list, tuple, AbstractSet)):
        if not what:
            msg = f"an empty {type(what).__name__} selects nothing"
            raise SelectionError(msg)
        return {name: it for member in what for name, it in _match(tree, member).items()}
    if isinstance(what, str) and (module := _at(tree.model, what)) is not None:
        return {what: module}
    if isinstance(what, nn.Module):
        names = (repr(name) for name, module in tree.named.items() if module is what)
        msg = (
            f"select takes the name of a module ({next(names, 'this one is not in the model')}), "
            f"not the module itself, got {describe(what)}"
        )
        raise HookTypeError(msg)
    fits = _criterion(what)
    found = {name: module for name, module in tree.named.items() if fits(name, module)}
    if not found:
        raise SelectionError(_nothing(tree, what))
    return found


def _criterion(what: object) -> Callable[[str, nn.Module], object]:
    if isinstance(what, str) or (isinstance(what, re.Pattern) and isinstance(what.pattern, str)):
        return lambda name, _: _pattern_fits(what, name)
    if isinstance(what, type) and issubclass(what, nn.Module):
        return lambda _, module: isinstance(module, what)
    if callable(what) and not isinstance(what, type) and get_origin(what) is None:
        return _predicate(what)
    given = f"the pattern {what!r}" if isinstance(what, re.Pattern) else describe(what)
    msg = (
        "select takes a path, a glob, a compiled regex of str, a subclass of nn.Module, a predicate"
        f" (name, module) -> bool, or a list, tuple or set of these, got {given}"
    )
    raise HookTypeError(msg)


@functools.lru_cache(maxsize=2**14)  # a capture for each call asks the same each time
def _fits(pattern: str, name: str) -> bool:
    glob, segments = pattern.split("."), name.split(".") if name else []
    # How many segments the parts of the glob so far may have matched.
    ends = {0}
    for part in glob:
        if part == "**":
            ends = set(range(min(ends), len(segments) + 1))
        else:
            ends = {n + 1 for n in ends if n < len(segments) and fnmatchcase(segments[n], part)}
        if not ends:
            return False
    return len(segments) in ends


def _predicate(function: Callable[..., object]) -> Callable[[str, nn.Module], object]:
    def fits(name: str, module: nn.Module) -> object:
        try:
            return function(name, module)
        except TypeError as error:
            # Raised by the call, not in the function: that has a frame of its own.
            if error.__traceback__ is not None and error.__traceback__.tb_next is None:
                msg = f"select calls a predicate with (name, module), got {_title(function)}"
                raise HookTypeError(msg) from error
            raise

    return fits


def _nothing(tree: _Tree, what: object) -> str:
    """The message when `what`, which is of a right type, matches no module."""
    names: Iterable[str] = (name for name in tree.named if name)
    kind, given = "names", ""
    if isinstance(what, type):
        shown, given = f"the class {_title(what)}", what.__name__
        kind, names = "classes", (_title(type(module)) for module in tree.named.values())
    elif isinstance(what, re.Pattern):
        shown, given = repr(what), what.pattern
    elif isinstance(what, str):
        shown, given = repr(what), what
    else:
        shown = f"the predicate {_title(what)}"
    msg = f"nothing in {tree.model._get_name()} matches {shown}"
    if len(tree.named) == 1:
        return f"{msg}: it has no submodules"
    names = list(dict.fromkeys(names))
    closest = closest_to(given, names)
    listed = ", ".join(map(repr, closest or names[:MOST_SUGGESTIONS]))
    return f"{msg}; the {'closest' if closest else 'first'} {kind} in it are {listed}"


def _title(value: object) -> str:
    name = getattr(value, "__qualname__", None)
    return repr(value) if name is None else f"{getattr(value, '__module__', None)}.{name}"

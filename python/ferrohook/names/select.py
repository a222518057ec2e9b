"""`select`: names modules of a model by path, glob, regex, class or predicate."""

from __future__ import annotations

import functools
import re
import weakref
from collections.abc import Set as AbstractSet
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, get_origin

from torch import nn

from ferrohook._core import ModuleTree
from ferrohook.errors import HookTypeError, SelectionError
from ferrohook.names.spelling import SIGN, suggested
from ferrohook.util.arguments import describe, expect_module
from ferrohook.util.suggestions import MOST_SUGGESTIONS, closest_to
from ferrohook.util.texts import shown
from ferrohook.util.weak import PerObject

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

_Single: TypeAlias = (
    "str | re.Pattern[str] | nn.Module | type[nn.Module] | Callable[[str, nn.Module], object]"
)
_Union: TypeAlias = "Sequence[_Single | _Union] | AbstractSet[_Single | _Union]"
Chosen: TypeAlias = "_Single | _Union"
Selector: TypeAlias = "Chosen | None"
"""Modules of a model, see `select`: a path, glob, regex, module, class, predicate, or a list of
these; None for all.
"""


def select(
    model: nn.Module, what: Selector = None, *, called: bool = False
) -> dict[str, nn.Module]:
    """Selects modules of a model by name.

    A selector that matches nothing is an error, also inside a list whose other members match.

    Args:
        model: the module to select from; its submodules and the module itself.
        what: None for all modules, or one of

            - a path as in `named_modules()`, `""` for the model itself. A shared module is found by
              each of its paths; all selectors below see each module once, under its first path.
            - a glob: `*`, `?` and `[...]` match inside one segment of a dotted path, the segment
              `**` any number of segments, none included. A str that is the path of a module is
              that path, and no glob.
            - a module of the model.
            - a compiled regex, for `re.search` in the path.
            - a subclass of `nn.Module`, for its instances.
            - a predicate `(name, module) -> bool`.
            - a list, tuple or set of any of these, for their union.
        called: leave out containers: modules without a `forward`, such as a ModuleList. They are
            never called, so no hook fires on them. A selector that matches
            nothing else is an error. `register`, `capture` and everything built on them select so.

    Returns:
        The modules by path, in the order of `named_modules()`.

    Raises:
        SelectionError: a selector matches no module, or only containers with `called=True`.
        HookTypeError: `model` is not an `nn.Module`, or `what` is none of the above.
    """
    expect_module(model, "model must be")
    if isinstance(what, list | tuple) and len(what) == 1 and isinstance(what[0], str):
        (what,) = what  # plans have lists
    if isinstance(what, str) and (module := _module_at(model, what)) is not None:
        return _without_containers({what: module}, called)  # without walking the model
    key = _key(what)
    selections = {} if key is None else _SELECTIONS.setdefault(model, {})
    former = selections.get((key, called))
    if former is not None and (found := former.found()) is not None:
        return found
    if isinstance(what, str) and what.startswith(SIGN):
        msg = (
            f"{what!r} is a quantity, not a module: capture, register, run and plans accept it, "
            "and fh.quantities(model) shows the module that has it"
        )
        raise SelectionError(msg)
    tree = _Tree(model)
    if what is None:
        return _without_containers(tree.named, called)
    found = tree.ordered(_match(tree, what, called))
    modules = [*tree.named.values()]
    # The children of wrappers and scripted modules stand elsewhere.
    if key and all(vars(module).get("_modules") is module._modules for module in modules):
        if len(selections) >= MOST_SELECTIONS:
            selections.clear()
        references = [(name, weakref.ref(module)) for name, module in found.items()]
        selections[key, called] = _Selection(ModuleTree(modules), references)
    return found


class _Selection(NamedTuple):
    """Modules that were selected, and the state of the model in which they are."""

    tree: ModuleTree
    modules: list[tuple[str, weakref.ref[nn.Module]]]

    def found(self) -> dict[str, nn.Module] | None:
        """Returns the modules; None if the model has changed."""
        if not self.tree.holds():
            return None
        found = {name: reference() for name, reference in self.modules}
        alive = {name: module for name, module in found.items() if module is not None}
        return alive if len(alive) == len(found) else None


# Code that captures for each call selects the same each time.
_SELECTIONS: PerObject[dict[tuple[Any, bool], _Selection]] = PerObject()
MOST_SELECTIONS = 64
"""Number of selectors of a model whose results are remembered."""


def _key(what: Selector) -> Any:
    """Returns the key that a selector is remembered by; None for one that is not."""
    if isinstance(what, list | tuple):
        names = tuple(what)
        return names if names and all(type(name) is str for name in names) else None
    return what if isinstance(what, str) else None


def refuse_container(name: str, module: nn.Module) -> None:
    """Validates that a module selected for hooks has a `forward`.

    Raises:
        SelectionError: it has none; names the modules inside to select instead.
    """
    if not _is_container(module):
        return
    depths = [
        inner.count(".") + 1
        for inner, child in _Tree(module).named.items()
        if inner and not _is_container(child)
    ]
    advice = ""
    if depths:
        children = ".".join([*filter(None, [name]), *["*"] * min(depths)])
        advice = f": select the modules in it, {children!r}"
    msg = (
        f"{shown(name)} is a {module._get_name()}, which has no forward and is never called{advice}"
    )
    raise SelectionError(msg)


def _is_container(module: nn.Module) -> bool:
    forward = getattr(module, "forward", None)  # a scripted container has none
    return forward is None or getattr(forward, "__func__", None) is nn.Module.forward


def _without_containers(found: dict[str, nn.Module], called: bool) -> dict[str, nn.Module]:  # noqa: FBT001 (the option of `select`)
    """Leaves out containers with `called`; raises if nothing else was found."""
    if not called:
        return found
    left = {name: module for name, module in found.items() if not _is_container(module)}
    if not left:
        refuse_container(*next(iter(found.items())))
    return left


def _module_at(model: nn.Module, path: str) -> nn.Module | None:
    """Returns the module at a path, or None."""
    found: nn.Module | None = model
    for segment in path.split(".") if path else ():
        if found is None:
            break
        children = found._modules
        # The children of a scripted module are in no dict.
        children = children if isinstance(children, dict) else dict(children.items())
        found = children.get(segment)
    return found


def select_names(names: Iterable[str], pattern: str | re.Pattern[str]) -> list[str]:
    """Filters names by a path, a glob or a compiled regex, see `select`."""
    names = list(names)
    if isinstance(pattern, str) and pattern in names:
        return [pattern]
    return [name for name in names if _pattern_matches(pattern, name)]


def _pattern_matches(pattern: str | re.Pattern[str], name: str) -> bool:
    if isinstance(pattern, str):
        return _glob_matches(pattern, name)
    return pattern.search(name) is not None


class _Tree:
    """Snapshot of the modules of a model.

    Not made by `named_modules`, which raises if another thread adds a module meanwhile and, with
    `remove_duplicate=False`, may yield exponentially many paths of shared modules.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        # By first path, in the order of `named_modules`.
        self.named: dict[str, nn.Module] = {}
        visited: set[int] = set()
        stack = [("", model)]
        while stack:
            name, module = stack.pop()
            if id(module) in visited:
                continue
            visited.add(id(module))
            self.named[name] = module
            if children := list(module._modules.items()):
                prefix = f"{name}." if name else ""
                stack += [
                    (prefix + segment, child)
                    for segment, child in reversed(children)
                    if child is not None
                ]

    def ordered(self, found: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
        """Sorts modules in the order of `named_modules`; paths may be other than the first."""
        if found.keys() <= self.named.keys():
            return {name: module for name, module in self.named.items() if name in found}
        return {name: found[name] for name in sorted(found, key=self._sort_key)}

    def _sort_key(self, path: str) -> list[int]:
        """Returns the index of each segment of the path among its siblings."""
        key: list[int] = []
        module: nn.Module | None = self.model
        for segment in path.split(".") if path else ():
            siblings = {} if module is None else dict(module._modules)
            key.append([*siblings].index(segment) if segment in siblings else -1)
            module = siblings.get(segment)
        return key


def _match(tree: _Tree, what: object, called: bool) -> dict[str, nn.Module]:  # noqa: FBT001 (the option of `select`)
    if isinstance(what, (list, tuple, AbstractSet)):
        if not what:
            msg = f"an empty {type(what).__name__} selects nothing"
            raise SelectionError(msg)
        return {name: it for member in what for name, it in _match(tree, member, called).items()}
    if isinstance(what, str) and (module := _module_at(tree.model, what)) is not None:
        return _without_containers({what: module}, called)
    matches = _matcher(what)
    found = {name: module for name, module in tree.named.items() if matches(name, module)}
    if not found:
        raise SelectionError(_no_match_message(tree, what))
    return _without_containers(found, called)


def _matcher(what: object) -> Callable[[str, nn.Module], object]:
    if isinstance(what, nn.Module):
        return lambda _, module: module is what
    if isinstance(what, str) or (isinstance(what, re.Pattern) and isinstance(what.pattern, str)):
        return lambda name, _: _pattern_matches(what, name)
    if isinstance(what, type) and issubclass(what, nn.Module):
        return lambda _, module: isinstance(module, what)
    if callable(what) and not isinstance(what, type) and get_origin(what) is None:
        return _predicate_matcher(what)
    got = f"the pattern {what!r}" if isinstance(what, re.Pattern) else describe(what)
    msg = (
        "a selector must be a path, a glob, a compiled regex of str, a module, a subclass of "
        "nn.Module, a predicate (name, module) -> bool, or a list, tuple or set of these, got "
        f"{got}"
    )
    raise HookTypeError(msg)


@functools.lru_cache(maxsize=2**14)  # code that captures per call selects the same each time
def _glob_matches(pattern: str, name: str) -> bool:
    glob, segments = pattern.split("."), name.split(".") if name else []
    # Numbers of segments that the glob's parts up to here can match.
    ends = {0}
    for part in glob:
        if part == "**":
            ends = set(range(min(ends), len(segments) + 1))
        else:
            ends = {n + 1 for n in ends if n < len(segments) and fnmatchcase(segments[n], part)}
        if not ends:
            return False
    return len(segments) in ends


def _predicate_matcher(function: Callable[..., object]) -> Callable[[str, nn.Module], object]:
    def matches(name: str, module: nn.Module) -> object:
        try:
            return function(name, module)
        except TypeError as error:
            # Raised by the call itself: an error inside the function has a second frame.
            if error.__traceback__ is not None and error.__traceback__.tb_next is None:
                called = "a function that selects modules must accept (name, module)"
                msg = f"{called}, got {_title(function)}"
                raise HookTypeError(msg) from error
            raise

    return matches


def _no_match_message(tree: _Tree, what: object) -> str:
    names: Iterable[str] = (name for name in tree.named if name)
    kind, unknown = "names", ""
    if isinstance(what, type):
        selector, unknown = f"the class {_title(what)}", what.__name__
        kind, names = "classes", (_title(type(module)) for module in tree.named.values())
    elif isinstance(what, re.Pattern):
        selector, unknown = repr(what), what.pattern
    elif isinstance(what, str):
        selector, unknown = repr(what), what
    elif isinstance(what, nn.Module):
        return f"this {what._get_name()} is not in the {tree.model._get_name()}"
    else:
        selector = f"the predicate {_title(what)}"
    msg = f"nothing in {tree.model._get_name()} matches {selector}"
    if len(tree.named) == 1:
        return f"{msg}: it has no submodules"
    if isinstance(what, str) and (deeper := _deeper_glob(tree, what)):
        return f"{msg}; {deeper!r} does"
    if isinstance(what, str) and (suggestion := suggested(what)) is not None:
        return f"{msg}; {suggestion}"
    names = list(dict.fromkeys(names))
    closest = closest_to(unknown, names)
    listed = ", ".join(map(repr, closest or names[:MOST_SUGGESTIONS]))
    return f"{msg}; the {'closest' if closest else 'first'} {kind} in it are {listed}"


def _deeper_glob(tree: _Tree, glob: str) -> str | None:
    """Returns the glob with the prefix under which it matches."""
    if not set(glob) & set("*?["):
        return None
    prefixes = set()
    for name in tree.named:
        segments = name.split(".")
        for depth in range(1, len(segments)):
            if _glob_matches(glob, ".".join(segments[depth:])):
                prefixes.add(".".join(segments[:depth]))
                break
    if not prefixes:
        return None
    return f"{prefixes.pop() if len(prefixes) == 1 else '**'}.{glob}"


def _title(value: object) -> str:
    name = getattr(value, "__qualname__", None)
    return repr(value) if name is None else f"{getattr(value, '__module__', None)}.{name}"

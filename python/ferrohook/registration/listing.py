"""`hooks` and `clear`: the global hooks of a model."""

from __future__ import annotations

import linecache
from typing import TYPE_CHECKING, Any, NamedTuple

from ferrohook._core import HookedBase, release_unused
from ferrohook.attach.attention import KEY as POINTS
from ferrohook.attach.hook_info import as_given, find_registry, hooks_of, state_of
from ferrohook.names.select import select
from ferrohook.util.arguments import expect_module
from ferrohook.util.tables import html_table, text_table
from ferrohook.util.texts import MODEL, counted, name_of, shown

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from ferrohook._core import HookHandle, Registry
    from ferrohook.effects.typed import Phase

_HEADINGS = ("module", "phase", "hook", "state", "calls", "registered in", "by")


class RegisteredHook(NamedTuple):
    """A global hook: it fires in all contexts."""

    module: str
    """Name of the module."""
    phase: Phase
    """`forward_pre`, `forward`, `backward_pre` or `backward`."""
    hook: Any
    """The callable or typed hook that was registered."""
    handle: HookHandle
    """Removes, disables and describes it."""
    file: str | None
    """Name of the file that registered it, a notebook's cell included; None if no Python did."""
    line: int | None
    """Number of the line in it, from 1."""

    @property
    def code(self) -> str:
        """Text of the line, if it can be read."""
        if self.file is None or self.line is None:
            return ""
        return linecache.getline(self.file, self.line).strip()

    def __repr__(self) -> str:
        name = name_of(self.hook)
        state = "" if self.handle.enabled else f", {state_of(self.handle)}"
        module = shown(self.module)
        return f"<{self.phase} hook {name} of {module}, registered in {self._place}{state}>"

    @property
    def _place(self) -> str:
        return "unknown" if self.file is None else f"{self.file}:{self.line}"

    def _cells(self) -> tuple[str, ...]:
        calls = f"{self.handle.calls:,}"
        module, state = self.module or MODEL, state_of(self.handle)
        return (module, self.phase, name_of(self.hook), state, calls, self._place, self.code)


class RegisteredHooks(list[RegisteredHook]):
    """Global hooks of a model; prints as a table."""

    of_scopes = 0
    """Number of other hooks that fire in this context, by its scopes; not in the list."""

    def _lines(self) -> list[tuple[str, ...]]:
        return [_HEADINGS, *(each._cells() for each in self)]

    def __repr__(self) -> str:
        table = text_table(self._lines(), right="calls") if self else "no global hooks"
        return f"{table}{self._others()}"

    def _repr_html_(self) -> str:
        if not self:
            return f"<p>{self!r}</p>"
        return html_table(self._lines()) + (self._others() and f"<p>{self._others()}</p>")

    def _others(self) -> str:
        if not self.of_scopes:
            return ""
        return f"\n({counted(self.of_scopes, 'hook')} more in scopes that this context has entered)"


def hooks(model: nn.Module) -> RegisteredHooks:
    """Lists the global hooks of a model, with the file and line that registered each.

    Hooks of scopes, captures and plans end by themselves and are left out, and so are hooks in
    torch's own dicts.

    Args:
        model: any module, with wrappers or instrumented modules in it.

    Returns:
        A list that prints as a table, in the order of the modules and of firing.

    Raises:
        HookTypeError: `model` is not an `nn.Module`.

    Examples:
        >>> fh.hooks(model)[0].handle.remove()
    """
    expect_module(model, "hooks needs")
    registries = [(name, registry) for name, _module, registry in _registries(model)]
    found = RegisteredHooks(
        RegisteredHook(name, handle.phase, as_given(hook), handle, *(place or (None, None)))
        for name, registry in registries
        for hook, handle, place in registry.global_hooks()
    )
    ids = {each.handle.id for each in found}
    here = (info.id for _, registry in registries for info in hooks_of(registry))
    found.of_scopes = len({*here} - ids)
    return found


def clear(model: nn.Module) -> None:
    """Removes all global hooks of a model, also ones that other code registered.

    Modules that were instrumented only for these hooks are plain again. Hooks of scopes, captures
    and plans stay, and so do hooks in torch's own dicts.

    Args:
        model: any module, with wrappers or instrumented modules in it.

    Raises:
        HookTypeError: `model` is not an `nn.Module`.
    """
    expect_module(model, "clear needs")
    hooked = [*_registries(model)]
    for _name, _module, registry in hooked:
        registry.clear(scopes=False)
    for _name, module, _registry in hooked:
        release_unused(module)


def _registries(model: nn.Module) -> Iterator[tuple[str, nn.Module, Registry]]:
    for name, module in _modules(model):
        # A wrapper and the module inside have a registry each.
        for each in (module, *([module._inner] if isinstance(module, HookedBase) else [])):
            if (registry := find_registry(each)) is not None:
                yield name, each, registry


def _modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the modules of a model, and the points of its attention, by name."""
    for name, module in select(model).items():
        yield name, module
        if (points := vars(module).get(POINTS)) is not None:
            for point in points.all:
                yield f"{name}.{point.name}".lstrip("."), point

"""`summary`: a printable tree of the hooked modules of a model."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from ferrohook._core import NativeDetector
from ferrohook.attach.hook_info import find_registry, hooks_of, state_of
from ferrohook.attach.priorities import BEHIND_ALL
from ferrohook.errors import HookError
from ferrohook.names.select import select
from ferrohook.quantity.anatomy.subjects import structural_copy, undisturbed
from ferrohook.util.arguments import expect_module
from ferrohook.util.tensors import tensors_by_path
from ferrohook.util.texts import counted, missing_package, name_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.tree import Tree
    from torch import nn

    from ferrohook.attach.hook_info import HookInfo
    from ferrohook.names.select import Selector


MOST_SHAPES = 3
"""Shapes that a line shows."""
UNLIMITED = 10_000
"""Columns of a tree whose lines stay whole."""


def summary(model: nn.Module, *args: Any, also: Selector = (), **kwargs: Any) -> Tree:
    """Returns the modules of a model that have hooks, as a tree.

    `print`, `rich.print` and notebooks show it. It lists the hooks that fire in this context, in
    firing order: phase, hook, priority and calls.

    Args:
        model: any module, with wrappers or instrumented modules in it.
        *args: arguments of the model. With any, a copy of the model is called once, in eval mode
            and without hooks. All modules are shown, with the shapes of their outputs and their
            parameters.
        also: modules to show although they have no hooks, see `select`; None for all.
        **kwargs: keyword arguments of the model.

    Raises:
        HookTypeError: `model` is not an `nn.Module`.
        SelectionError: `also` matches nothing.
        HookError: the package rich is not installed, or the model cannot be copied.

    Examples:
        >>> print(fh.summary(model, ids))
    """
    try:
        summary_class = _summary_class()
    except ModuleNotFoundError as error:
        raise HookError(missing_package("summary", "rich")) from error
    expect_module(model, "summary needs")
    modules = select(model)
    hooks = {name: hooks_of(find_registry(module)) for name, module in modules.items()}
    shown = {""}
    details = shapes_of(model, args, kwargs) if args or kwargs else {}
    forced = details if also == () else select(model, also)
    for name, rows in hooks.items():
        path = name
        while (rows or name in forced) and path not in shown:
            shown.add(path)
            path = path.rpartition(".")[0]
    nodes: dict[str, Tree] = {}
    for name, module in modules.items():
        if name not in shown:
            continue
        parent, _, last = name.rpartition(".")
        title = _title(last, module, details.get(name, ""))
        nodes[name] = nodes[parent].add(title) if name else summary_class(title)
        for hook in hooks[name]:
            nodes[name].add(_line(name, hook))
    return nodes[""]


def shapes_of(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, str]:
    """Calls a copy of a model; returns the shapes of outputs and the parameter counts by module."""
    seen: dict[nn.Module, set[tuple[int, ...]]] = {}

    def note(module: nn.Module, _args: object, output: object) -> None:
        shapes = seen.setdefault(module, set())
        tensors = (tensor for _, tensor in tensors_by_path(output))
        shapes.update(tuple(each.shape) for each in tensors if not each.is_nested)

    copied = structural_copy(model)  # a call changes the statistics of a batch norm, for example
    modules = select(copied)
    for module in modules.values():
        module.register_forward_hook(note)
    with undisturbed():
        copied(*args, **kwargs)
    details = {}
    for name, module in modules.items():
        shapes = [*map(str, sorted(seen.get(module, ())))]
        if len(shapes) > MOST_SHAPES:
            shapes[MOST_SHAPES:] = [f"{len(shapes) - MOST_SHAPES} more"]
        count = sum(each.numel() for each in module.parameters())
        parameters = [counted(count, "parameter")] if count else []
        details[name] = ", ".join([*shapes, *parameters])
    return details


def _summary_class() -> type[Tree]:
    # Rich is an extra.
    from rich.console import Console  # noqa: PLC0415
    from rich.tree import Tree  # noqa: PLC0415

    class Summary(Tree):
        def __str__(self) -> str:
            file = io.StringIO()
            Console(file=file, width=UNLIMITED).print(self)
            return file.getvalue().rstrip("\n")

        __repr__ = __str__

    return Summary


def _title(name: str, module: nn.Module, detail: str) -> str:
    kind = _escaped(module._get_name())
    title = f"[bold]{_escaped(name)}[/bold] {kind}" if name else f"[bold]{kind}[/bold]"
    return f"{title} [dim]{_escaped(detail)}[/dim]" if detail else title


def _line(module: str, hook: HookInfo) -> str:
    shown = hook.hook
    if isinstance(shown, NativeDetector):
        shown = shown.modules.get(module, shown)
    details = [counted(hook.calls, "call")]
    if hook.priority > BEHIND_ALL and hook.priority:
        details.append(f"priority {hook.priority}")
    if not hook.enabled:
        details.append(_escaped(state_of(hook)))
    return f"[cyan]{hook.phase}[/cyan] {_escaped(name_of(shown))} [dim]({', '.join(details)})[/dim]"


def _escaped(text: str) -> str:
    from rich.markup import escape  # noqa: PLC0415 (an extra)

    return escape(text)

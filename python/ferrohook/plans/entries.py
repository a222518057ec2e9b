"""Entries of plans: `on` and `keep`."""

from __future__ import annotations

import dataclasses
import functools
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import torch

from ferrohook._core import NativeDetector, Registry, TypedHook
from ferrohook.captures.recorders import CaptureKeywords, options_of
from ferrohook.effects.intervention import Intervention
from ferrohook.tokens.positions import At, check_at
from ferrohook.tokens.tracking import check_takes_at
from ferrohook.util.arguments import check_encodes, expect
from ferrohook.util.tables import text_table
from ferrohook.util.tensors import content_of
from ferrohook.util.texts import MODEL, name_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from typing_extensions import Unpack

    from ferrohook.captures.recorders import Calls
    from ferrohook.effects.typed import OnError, Phase
    from ferrohook.names.select import Selector

_DEFAULTS: Final[dict[str, Any]] = {
    "prepend": False,
    "with_kwargs": False,
    "always_call": False,
    "priority": 0,
    "on_error": "raise",
}


class PlanEntry:
    """An entry of a plan: made by `on` or `keep`."""

    what: Selector
    at: At
    options: dict[str, Any]
    """The options that are not the default."""

    @cached_property
    def needs(self) -> frozenset[str]:
        """Features that a back end must support to serve it, see `BackEnd`."""
        at = () if self.at is None else ("at function" if callable(self.at) else "at",)
        return frozenset((*at, *self._needs()))

    def _needs(self) -> Iterator[str]:
        raise NotImplementedError

    def content(self) -> tuple[Any, ...]:
        """Returns what identifies the entry, hashable."""
        raise NotImplementedError

    def row(self) -> tuple[str, ...]:
        """Returns its row in the table of a plan."""
        raise NotImplementedError

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PlanEntry) and self.content() == other.content()

    def __hash__(self) -> int:
        return hash(self.content())


@dataclasses.dataclass(frozen=True, eq=False)
class HookEntry(PlanEntry):
    """A hook on modules of a plan's model."""

    what: Selector
    hook: Any
    at: At
    phase: Phase
    options: dict[str, Any]

    def _needs(self) -> Iterator[str]:
        yield from self.options
        if self.phase != "forward":
            yield "inputs" if self.phase == "forward_pre" else "gradients"
        if isinstance(self.hook, NativeDetector):
            yield "native detector"
        elif not isinstance(self.hook, Intervention):
            yield "python"
        else:
            yield from self.hook.needs()

    def content(self) -> tuple[Any, ...]:  # noqa: D102 (PlanEntry's)
        own = (self.what, self.hook, self.at, self.phase, self.options)
        return ("on", *map(content_of, own))

    def __reduce__(self) -> Any:
        # Through `on`, which validates the contents of a damaged pickle.
        own = {"at": self.at, "phase": self.phase, **self.options}
        return functools.partial(on, **own), (self.what, self.hook)

    def row(self) -> tuple[str, ...]:  # noqa: D102 (PlanEntry's)
        return (
            _shown(self.what),
            name_of(self.hook),
            self.phase,
            _shown(self.at),
            _shown_options(self.options),
        )


@dataclasses.dataclass(frozen=True, eq=False)
class KeepEntry(PlanEntry):
    """A capture of modules of a plan's model."""

    what: Selector
    at: At
    label: str | None
    options: dict[str, Any]

    def _needs(self) -> Iterator[str]:
        return ("gradients" if name == "grads" else name for name in self.options)

    def name_of(self, path: str) -> str:
        """Returns the name of a module's activations in `acts`."""
        return path if self.label is None else f"{self.label}:{path}"

    def content(self) -> tuple[Any, ...]:  # noqa: D102 (PlanEntry's)
        return ("keep", *map(content_of, (self.what, self.at, self.label, self.options)))

    def __reduce__(self) -> Any:
        own = {"at": self.at, "label": self.label, **self.options}
        return functools.partial(keep, **own), (self.what,)

    def row(self) -> tuple[str, ...]:  # noqa: D102 (PlanEntry's)
        phase = "forward_pre" if self.options.get("inputs") else "forward"
        title = "keep" if self.label is None else f"keep as {self.label!r}"
        shown = {name: value for name, value in self.options.items() if name != "inputs"}
        return (_shown(self.what), title, phase, _shown(self.at), _shown_options(shown))


def on(  # noqa: PLR0913 (the options of `register`)
    what: Selector,
    hook: Intervention | TypedHook | Callable[..., Any],
    *,
    at: At = None,
    phase: Phase | None = None,
    prepend: bool = False,
    with_kwargs: bool = False,
    always_call: bool = False,
    priority: int = 0,
    on_error: OnError = "raise",
) -> HookEntry:
    """Makes a plan entry that puts a hook on modules.

    Args:
        what: modules, see `select`.
        hook: an intervention, or anything that `register` takes.
        at: positions of tokens that the hook changes, see `At`; None for all. With it, the hook is
            an intervention or a forward hook of PyTorch's contract that returns a tensor. Under
            `torch.compile` it breaks the graph.
        phase: as in `register`, and so are the others.
        prepend: see `register`.
        with_kwargs: see `register`.
        always_call: see `register`.
        priority: see `register`.
        on_error: see `register`.

    Raises:
        HookTypeError: the hook or an option has the wrong type.
        ValueError: an unknown phase, `on_error` or `at`.
    """
    check_at(at)
    if phase is None:
        phase = hook.phase if isinstance(hook, TypedHook) else "forward"
    options = {
        "prepend": prepend,
        "with_kwargs": with_kwargs,
        "always_call": always_call,
        "priority": priority,
        "on_error": on_error,
    }
    Registry().register(phase, hook, **options)  # type: ignore[arg-type]  # validates them
    if at is not None:
        check_takes_at(hook, phase, with_kwargs=with_kwargs, always_call=always_call)
    chosen = {name: value for name, value in options.items() if value != _DEFAULTS[name]}
    return HookEntry(what, hook, at, phase, chosen)


class KeepOptions(CaptureKeywords, total=False):
    """Options of `keep`; see `capture`."""

    calls: Calls


_CAPTURE_DEFAULTS: Final = {"detach": True, "copy": "checked", "calls": "last"}
"""Defaults other than None and False."""


def keep(
    what: Selector = None, *, label: str | None = None, **options: Unpack[KeepOptions]
) -> KeepEntry:
    """Makes a plan entry that captures modules, with the options of `capture`.

    Args:
        what: modules, see `select`; None for all.
        label: prefix of the names in the request's `acts`, as in `"label:layers.3"`; for plans that
            capture a module twice.
        **options: as in `capture`: `at`, `inputs`, `output_index`, `detach`, `device`, `dtype`,
            `slice`, `copy`, `calls`, `grads`, `stop`, and `max_bytes` for each request.

    Raises:
        HookTypeError, ValueError, RuntimeError: as `capture` does.
        TypeError: an option that `capture` has not.
    """
    if unknown := options.keys() - KeepOptions.__annotations__.keys():
        msg = f"keep() got an unexpected keyword argument {min(unknown)!r}"
        raise TypeError(msg)
    expect(label, str | None, "label must be a str")
    if label is not None:
        check_encodes(label, "label")
    options_of(**options)
    at = options.pop("at", None)
    if (device := options.get("device")) is not None:
        options["device"] = str(torch.device(device))
    in_order = {name: options.get(name) for name in KeepOptions.__annotations__}
    chosen = {
        name: value
        for name, value in in_order.items()
        if value is not None and value is not _CAPTURE_DEFAULTS.get(name, False)
    }
    return KeepEntry(what, at, label, chosen)


def _shown(value: Any) -> str:
    if value is None:
        return "all"
    if isinstance(value, str):
        return value or MODEL
    return name_of(value)


def _shown_options(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in options.items()) or "-"


def table(entries: Iterable[PlanEntry]) -> str:
    """Formats entries as a table, a line for each."""
    headings = ("modules", "hook", "phase", "at", "options")
    return text_table([headings, *(each.row() for each in entries)])

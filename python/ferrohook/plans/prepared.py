"""Prepared plans and their requests."""

from __future__ import annotations

import functools
import sys
import warnings
import weakref
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor, nn

from ferrohook._core import (
    Attachment,
    Frame,
    HookHandle,
    MaskedHook,
    ModuleTree,
    PlanGuard,
    RequestBase,
)
from ferrohook.activations import ActivationCache, cache_of
from ferrohook.captured import not_captured
from ferrohook.errors import HookError, HookTypeError, NeverFiredWarning, SelectionError
from ferrohook.instrumentation import attach
from ferrohook.never_fired import explain, never_fired
from ferrohook.pending import finish
from ferrohook.plans.entries import HookEntry, KeepEntry, table
from ferrohook.plans.positions import At, mask_of, tokens_of
from ferrohook.priorities import AHEAD_OF_ALL, BEHIND_ALL
from ferrohook.recorders import PlaceInPlan, Recorders, options_of
from ferrohook.scopes import Scope
from ferrohook.selection import select
from ferrohook.steering import Intervention
from ferrohook.traced import never_trace, never_trace_frame

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ferrohook._core import Collector
    from ferrohook.plans.positions import Prompt


class _Contents:
    """State that a prepared plan shares with its requests."""

    def __init__(self, model: nn.Module, frame: Frame) -> None:
        # No request is opened for a model that is gone.
        self.model = weakref.ref(model, functools.partial(_close, weakref.ref(frame)))
        self.captures: list[Recorders] = []
        self.handles: list[tuple[str, HookHandle]] = []
        self.ats: list[At] = []
        # Read by the core when a request ends: True once every hook has fired, and once a warning
        # named those that had not.
        self.fired = False
        self.warned = False


class Prepared:
    """A plan whose hooks stand in the registries of a model, see `Plan.prepare`.

    A context manager: leaving it closes it.
    """

    def __init__(
        self,
        entries: tuple[HookEntry | KeepEntry, ...],
        model: nn.Module,
        max_bytes: int | None = None,
    ) -> None:
        self.entries = entries
        self._max_bytes = max_bytes
        self._frame = Frame()
        self._contents = _Contents(model, self._frame)
        attachment = Attachment()
        attachment.release_with(self._frame)
        try:
            self._prepare(model, attachment)
        except BaseException:
            self._frame._close()
            raise

    def _prepare(self, model: nn.Module, attachment: Attachment) -> None:
        selected = [_select(model, number, entry) for number, entry in enumerate(self.entries)]
        for number, (entry, modules) in enumerate(zip(self.entries, selected, strict=True)):
            if isinstance(entry, HookEntry) and isinstance(entry.hook, Intervention):
                _check_width(number, entry, modules)
        everything = {name: module for modules in selected for name, module in modules.items()}
        attach(everything | {"": model}, attachment)
        self.tree = _tree_of(model, everything)
        """Modules of the model; plans for the same ones share it."""
        guard = PlanGuard(self.tree, _find_untraced if self._needs_positions() else None)
        first: Any = {"priority": AHEAD_OF_ALL, "prepend": True, "scope": self._frame}
        attachment.register([model], "forward_pre", guard, **first)
        names: set[str] = set()
        for number, (entry, modules) in enumerate(zip(self.entries, selected, strict=True)):
            if isinstance(entry, HookEntry):
                self._register(number, entry, modules, attachment)
                continue
            kept = {entry.name_of(name): module for name, module in modules.items()}
            if twice := names & kept.keys():
                msg = f"entry {number} keeps {min(twice)!r} again: give one of the two a label"
                raise HookError(msg)
            names |= kept.keys()
            self._keep(model, number, entry, kept, selected)
        self._templates = tuple(capture.collector for capture in self._contents.captures)

    def _needs_positions(self) -> bool:
        return any(entry.at is not None for entry in self.entries)

    def _register(
        self, number: int, entry: HookEntry, modules: dict[str, nn.Module], attachment: Attachment
    ) -> None:
        hook = entry.hook
        if entry.at is not None:
            hook = MaskedHook(hook, self._mask(entry.at))
        handles = attachment.register(
            [*modules.values()],
            entry.phase,
            hook,
            scope=self._frame,
            names=[*modules],
            entry=number,
            **entry.options,
        )
        self._contents.handles += zip(modules, handles, strict=True)

    def _keep(
        self,
        model: nn.Module,
        number: int,
        entry: KeepEntry,
        modules: dict[str, nn.Module],
        selected: list[dict[str, nn.Module]],
    ) -> None:
        captures = self._contents.captures
        mask = None if entry.at is None else self._mask(entry.at)
        captures.append(
            Recorders.begin(
                model,
                modules,
                options_of(**entry.options),
                self._frame,
                priority_of=functools.partial(_priority_of_keep, self.entries, selected, number),
                place=PlaceInPlan(len(captures), mask),
            )
        )

    def _mask(self, at: At) -> int:
        """Returns the index of positions among those of the plan."""
        self._contents.ats.append(at)
        return len(self._contents.ats) - 1

    def open(self, *, deadline: float | None = None) -> Request:
        """Opens a request: enter it by `with` around its calls, or give it to `batch`.

        Costs the same for any number of modules. A request is opened by any thread or task, and any
        number of them at a time. The first one that leaves modules out, for which none of its hooks
        fired or nothing was captured, warns with `NeverFiredWarning`; later ones have `silent`.

        Args:
            deadline: seconds from now after which the request fails in batches, by `TimeoutError`.

        Raises:
            HookError: the plan was closed, or its model is gone.
        """
        request = Request(self._frame, self._contents, self._templates, self._max_bytes)
        request._prepared = self
        if deadline is not None:
            request.expire(deadline)
        return request

    def close(self) -> None:
        """Removes the hooks, and restores modules that nothing else instruments.

        Open requests go on without hooks; what they captured stays readable.
        """
        self._frame._close()

    @property
    def model(self) -> nn.Module | None:
        """The model, which it does not keep alive; None once that is gone."""
        return self._contents.model()

    @property
    def captures(self) -> list[dict[str, int]]:
        """For each `keep` in order, the indices of the names in its collector."""
        return [capture.places for capture in self._contents.captures]

    @property
    def closed(self) -> bool:
        """True once it is closed."""
        return self._frame.closed

    @property
    def outdated(self) -> bool:
        """True if modules of the model were replaced: calls in requests raise `HookError`."""
        return not self.tree.holds()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        # Nobody can open it any more. `_frame` is missing if `__init__` was interrupted.
        if (frame := vars(self).get("_frame")) is not None:
            frame._close()

    def __repr__(self) -> str:
        model = self.model
        title = "a model that is gone" if model is None else model._get_name()
        return f"<Prepared for {title}{', closed' if self.closed else ''}>\n{table(self.entries)}"


def _find_positions(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], request: Request
) -> None:
    """Finds the positions of a forward that runs for a request."""
    if not request._positioned:
        tokens = tokens_of(model, args, kwargs, request._prompt)
        request._prompt = tokens.prompt
        masks = (_shortened(mask_of(at, tokens)) for at in request.plan_positions)
        request._set_masks(tuple(masks))


def _find_untraced(*call: Any) -> None:
    _find_positions(*call)


# Dynamo would compile functions that the native call of a compiled region calls. Two of them, as a
# plan may be prepared before Dynamo is imported: the second is then looked up in each call.
never_trace(sys.modules[__name__], "_find_positions", "native code calls it")
never_trace_frame(_find_untraced, "native code calls it")


class Request(RequestBase, Scope):
    """A plan opened, see `Prepared.open`: hooks fire and captures are stored in its context.

    A scope: `wrap` and `activate` take it to other threads and tasks. It is entered once.
    """

    if TYPE_CHECKING:

        @property
        def _plan(self) -> _Contents: ...

    _prepared: Prepared
    """Kept alive: dropping it removes the hooks."""
    _prompt: Prompt | None = None
    _positioned = False
    prompt_lengths: Any = None
    """Number of tokens of its prompt, as the last batch with `lengths` for it had it."""
    stacklevel = 2
    """Of its warnings: the frame that leaves it."""

    @property
    def acts(self) -> ActivationCache:
        """The activations that the plan keeps, of this request; readable after it is closed."""
        captures = enumerate(self._plan.captures)
        return cache_of(
            ((capture, self._collector(place)) for place, capture in captures), self._plan.model()
        )

    @property
    def kept(self) -> list[str]:
        """The names in `acts` of all modules that the plan keeps, those that never ran included."""
        return [name for capture in self._plan.captures for name in capture.places]

    def positions(self, name: str) -> list[int]:
        """The positions whose activations `acts[name]` has, in order; one for each of its rows.

        Known for requests in batches with positions.

        Raises:
            SelectionError: the plan keeps nothing of this name.
            HookError: the positions of a captured call were not known.
        """
        for place, capture in enumerate(self._plan.captures):
            if (index := capture.places.get(name)) is not None:
                collected = self.collector(place).positions(index)
                known = [each for each in collected if each is not None]
                if len(known) < len(collected):
                    msg = f"the positions of {name!r} are not known: give positions to the batch"
                    raise HookError(msg)
                return sorted({each for calls, _ in known for each in calls if each >= 0})
        raise not_captured(name, "is not among", self.kept)

    @property
    def silent(self) -> list[str]:
        """The names of the modules that the plan keeps and that never ran for this request."""
        return [
            name
            for place, capture in enumerate(self._plan.captures)
            for name, index in capture.places.items()
            if index not in self.collector(place).ran()
        ]

    @property
    def entries(self) -> tuple[HookEntry | KeepEntry, ...]:
        """The entries of its plan."""
        return self._prepared.entries

    @property
    def model(self) -> nn.Module | None:
        """The model of its plan; None once that is gone."""
        return self._plan.model()

    @property
    def prepared(self) -> Prepared:
        """The prepared plan that it is a request of."""
        return self._prepared

    @property
    def error(self) -> BaseException | None:
        """The exception by which it failed in a batch, or the first of its hooks.

        Waits for a GPU that has not said yet whether sites have kept its rows.
        """
        for place in range(len(self._plan.captures)):
            self.collector(place)
        return super().error

    def collector(self, capture: int, *, complete: bool = True) -> Collector:
        """Returns the collector of one of the plan's captures.

        Args:
            capture: its number among them.
            complete: wait until it has all values so far.
        """
        collector = self._collector(capture)
        if complete:
            finish(collector)
        return collector

    @property
    def plan_positions(self) -> Sequence[At]:
        """The positions that its plan names."""
        return self._plan.ats

    def set_masks(self, masks: tuple[Any, ...] | None) -> None:
        """Sets the tokens at the plan's positions in this step; None: the model's call says."""
        self._positioned = masks is not None
        self._set_masks(masks)

    def set_places(self, places: list[list[int]], count: int, dim: int) -> None:
        """Sets which of its `count` rows of a batch are at the plan's positions in this step."""
        self._positioned = True
        self._set_places(places, count, dim)

    def _warn_of_silence(self) -> None:
        """Warns of modules that never ran; called as a request is left, up to the first warning."""
        plan = self._plan
        silent = self.silent
        idle = never_fired(plan.handles)
        plan.fired = not idle
        model = plan.model()
        if (names := [*dict.fromkeys(silent + idle)]) and model is not None:
            plan.warned = True
            warnings.warn(explain(model, names), NeverFiredWarning, stacklevel=self.stacklevel)

    def __repr__(self) -> str:
        state = "closed" if self.closed else "open" if self._entered is None else "entered"
        return f"<Request {self.id}, {state}>"


def _close(frame: weakref.ref[Frame], _model: object) -> None:
    if (open_frame := frame()) is not None:
        open_frame._close()


def _select(model: nn.Module, number: int, entry: HookEntry | KeepEntry) -> dict[str, nn.Module]:
    try:
        return select(model, entry.what, called=True)
    except (SelectionError, HookTypeError) as error:
        msg = f"entry {number} of the plan: {error}"
        raise type(error)(msg) from error


def _priority_of_keep(
    entries: tuple[HookEntry | KeepEntry, ...],
    selected: list[dict[str, nn.Module]],
    number: int,
    module: nn.Module,
) -> int:
    """Returns the priority by which a capture of a module sees the entries before it alone.

    Raises:
        HookError: entries behind it run before one ahead of it, by their priorities.
    """
    phase = "forward_pre" if entries[number].options.get("inputs") else "forward"
    ahead: list[tuple[int, int]] = []
    behind: list[tuple[int, int]] = []
    for other, (entry, modules) in enumerate(zip(entries, selected, strict=True)):
        changes = isinstance(entry, HookEntry) and entry.phase == phase
        if changes and any(each is module for each in modules.values()):
            rank = -other - 1 if entry.options.get("prepend") else other
            (ahead if other < number else behind).append((-entry.options.get("priority", 0), rank))
    if not behind:
        return BEHIND_ALL
    first = min(behind)
    if ahead and max(ahead) > first:
        name = next(name for name, each in selected[number].items() if each is module)
        msg = (
            f"entry {number} of the plan keeps {name!r} between entries that run in the other "
            "order, by priority= or prepend=: let them run in the order in which they stand"
        )
        raise HookError(msg)
    priority, rank = -first[0], first[1]
    # Entries are registered in their order, so the capture goes ahead of those behind it, but for
    # a prepended one.
    return priority + 1 if rank < 0 else priority


def _check_width(number: int, entry: HookEntry, modules: dict[str, nn.Module]) -> None:
    """Validates the width of a vector where a module says its own.

    Raises:
        HookTypeError: they differ.
    """
    intervention: Intervention = entry.hook
    width = intervention.width
    if width in {None, 1} or intervention.output_index is not None or entry.phase != "forward":
        return
    for name, module in modules.items():
        known = _width_of(module)
        if known is not None and known != width:
            msg = (
                f"entry {number} of the plan: {intervention!r} has a width of {width}, the output "
                f"of {name!r} ({type(module).__name__}) one of {known}"
            )
            raise HookTypeError(msg)


def _width_of(module: nn.Module) -> int | None:
    """Returns the last dimension of a module's output, if its class tells."""
    if isinstance(module, nn.Linear):
        return module.out_features
    if isinstance(module, nn.Embedding):
        return module.embedding_dim
    return module.normalized_shape[-1] if isinstance(module, nn.LayerNorm) else None


_trees: weakref.WeakKeyDictionary[nn.Module, weakref.WeakValueDictionary[Any, ModuleTree]]
_trees = weakref.WeakKeyDictionary()


def _tree_of(model: nn.Module, modules: dict[str, nn.Module]) -> ModuleTree:
    """Returns the tree of the modules whose children lie on the paths to `modules`.

    Plans for the same modules share it: a batch checks it once for all of them.
    """
    paths = {""} | {name[:end] for name in modules for end, sign in enumerate(name) if sign == "."}
    trees = _trees.setdefault(model, weakref.WeakValueDictionary())
    key = tuple(sorted(paths))
    tree = trees.get(key)
    if tree is None or not tree.holds():
        tree = trees[key] = ModuleTree([model.get_submodule(path) for path in key])
    return tree


def _shortened(mask: Tensor) -> Any:
    """Returns None for a mask of no tokens, and True for one of all, where asking is cheap."""
    if mask.device.type != "cpu":
        return mask
    if not mask.any():
        return None
    return True if mask.all() else mask

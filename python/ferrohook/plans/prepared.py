"""Prepared plans and their requests."""

from __future__ import annotations

import functools
import warnings
import weakref
from typing import TYPE_CHECKING, Any, Final, Self, cast

from torch import Tensor, nn

from ferrohook._core import (
    Attachment,
    Collector,
    Frame,
    GateHook,
    HookHandle,
    ModuleTree,
    RequestBase,
    StopCheck,
    TokenHook,
    name_positions,
)
from ferrohook.attach.instrument import attach
from ferrohook.attach.never_fired import explain, never_fired
from ferrohook.captures.cache import ActivationCache, cache_of
from ferrohook.captures.pending import finish
from ferrohook.captures.recorders import CapturePlace, Recorders, options_of
from ferrohook.dictionaries.transcoded import TranscodedFeature
from ferrohook.effects.intervention import Intervention
from ferrohook.errors import HookError, NeverFiredWarning
from ferrohook.gates.conditions import Ramp
from ferrohook.gates.hooks import GateReader
from ferrohook.gates.state import GateStates, Stopped
from ferrohook.names.places import hooks_at, modules_of
from ferrohook.plans.entries import (
    Entry,
    GateEntry,
    HookEntry,
    KeepEntry,
    StopEntry,
    gates_of,
    table,
)
from ferrohook.plans.needs import needs_at
from ferrohook.plans.placing import (
    check_order,
    check_width,
    extent_of,
    find_places,
    naming,
    priority_of_reader,
    read_places,
)
from ferrohook.registration.scopes import Scope
from ferrohook.tokens.positions import EVERYWHERE, At, native_at
from ferrohook.tokens.sequences import Sequences
from ferrohook.tokens.tracking import (
    encoders_in,
    is_inside,
    masked,
    paths_of,
    stacks_around,
    track,
)
from ferrohook.util.arguments import expect
from ferrohook.util.weak import PerObject, weakly

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ferrohook._core import CallTokens, GateAggregation, NativeHook
    from ferrohook.names.places import Place
    from ferrohook.tokens.stacks import TokenStack


_LONGEST: Final = 2**63 - 1
"""Tokens of a prompt at most."""


class _Contents:
    """State that a prepared plan shares with its requests."""

    def __init__(self, model: nn.Module, frame: Frame) -> None:
        # No request is opened for a model that is gone.
        close = weakly(frame._close)
        self.model = weakref.ref(model, lambda _: close())
        self.captures: list[Recorders] = []
        self.handles: list[tuple[str, HookHandle]] = []
        self.ats: list[At] = []
        self.gates: dict[str, GateReader] = {}
        self.stops = False
        """True if a `stop` may end a request."""
        self.transcodes: list[int] = []
        """Entries that change features of a transcoder."""
        self.guard: HookHandle | None = None
        """Runs as the model is called."""
        # Read by the core when a request ends. True once every hook has fired, or once a warning
        # has named the hooks that had not.
        self.fired = False
        self.warned = False


class Prepared:
    """A plan prepared for a model, see `Plan.prepare`: open it for each request.

    A context manager: leaving it closes it.
    """

    def __init__(
        self,
        entries: tuple[Entry, ...],
        model: nn.Module,
        max_bytes: int | None = None,
        *,
        positioned: bool = False,
    ) -> None:
        self.entries = entries
        self._max_bytes = max_bytes
        self._positioned = positioned
        """True if all its requests run in batches that know their positions."""
        self._frame = Frame()
        self._contents = _Contents(model, self._frame)
        self._attachment = Attachment()
        self._attachment.release_with(self._frame)
        try:
            self._prepare(model)
        except BaseException:
            self._frame._close()
            raise

    def _prepare(self, model: nn.Module) -> None:
        found = [find_places(model, number, entry) for number, entry in enumerate(self.entries)]
        read = [read_places(model, number, entry) for number, entry in enumerate(self.entries)]
        self.needs = [
            entry.needs.union(*(needs_at(each) for each in places.values()))
            for entry, places in zip(self.entries, found, strict=True)
        ]
        """Needs of each entry in this model, see `BackEnd`."""
        for number, (entry, places) in enumerate(zip(self.entries, found, strict=True)):
            if isinstance(entry, HookEntry) and isinstance(entry.hook, Intervention):
                check_width(number, entry, places)
        check_order(self.entries, found)
        self._gates = {
            name: (gate, gate.aggregation()) for name, gate in gates_of(self.entries).items()
        }
        aggregations = {name: aggregation for name, (_, aggregation) in self._gates.items()}
        everything = modules_of(it for places in found + read for it in places.values())
        stacks = self._stacks(model, found)
        parts = {path: model.get_submodule(path) for path in stacks}
        attach(everything | {"": model} | parts, self._attachment)
        self.tree = _tree_of(model, everything)
        """Modules of the model; plans for the same ones share it."""
        guarded = {"": model} | parts
        guards = track(self._attachment, guarded, stacks, scope=self._frame, tree=self.tree)
        self._contents.guard = guards[""]
        strengths = [entry.options.get("strength") for entry in self.entries]
        followed = {each.gate for each in strengths if isinstance(each, Ramp)}
        stops = [entry for entry in self.entries if isinstance(entry, StopEntry)]
        self._contents.stops = bool(stops)
        checks = [(it.gates, StopCheck(aggregations, it.when, it.name)) for it in stops]
        self._contents.gates = {
            entry.gate.name: GateReader(
                entry.gate,
                aggregations[entry.gate.name],
                next(iter(places.values())),
                [check for names, check in checks if entry.gate.name in names],
                followed=entry.gate.name in followed,
            )
            for entry, places in zip(self.entries, found, strict=True)
            if isinstance(entry, GateEntry)
        }
        for number, (entry, places) in enumerate(zip(self.entries, found, strict=True)):
            if isinstance(entry, HookEntry) and entry.reads is not None:
                self._transcode(number, entry, found, read[number], aggregations)
            elif isinstance(entry, HookEntry):
                self._register(number, entry, places, aggregations)
            elif isinstance(entry, GateEntry):
                self._read(number, entry, found)
            elif isinstance(entry, KeepEntry):
                self._capture(model, number, entry, found)
        if ats := self._contents.ats:
            name_positions(self._frame, [native_at(at) for at in ats])
        self._templates = tuple(capture.collector for capture in self._contents.captures)

    def places(self, number: int, *, read: bool = False) -> dict[str, Place]:
        """Returns the places of an entry in the model, by names of modules and quantities.

        Args:
            number: of the entry.
            read: the place that a transcoder reads whose features it changes; {} for none.

        Raises:
            HookError: the model is gone.
        """
        model = self.model
        if model is None:
            msg = "the model of this prepared plan was garbage-collected: keep a reference to it"
            raise HookError(msg)
        return (read_places if read else find_places)(model, number, self.entries[number])

    def _stacks(
        self, model: nn.Module, found: list[dict[str, Place]]
    ) -> dict[str, TokenStack | None]:
        """Returns the modules, by path, whose inputs give positions; None for one without them."""
        at = [number for number, entry in enumerate(self.entries) if entry.positioned]
        if at and self._positioned:
            return {"": None}
        stacks: dict[str, TokenStack | None] = {}
        paths = paths_of(model) if at else {}
        for number in at:
            with naming(number):
                stacks |= stacks_around(model, found[number].values(), paths)
        return stacks

    def _register(
        self,
        number: int,
        entry: HookEntry,
        places: dict[str, Place],
        gates: dict[str, GateAggregation],
    ) -> None:
        mask = self._mask(entry)
        with naming(number):
            groups = hooks_at(places, entry.hook, entry.phase, entry.at)
            if not (mask is None and "strength" not in entry.options):
                extent = extent_of(entry, gates)
                groups = [it._replace(hook=masked(it.hook, mask, **extent)) for it in groups]
        for group in groups:
            handles = self._attachment.register(
                [*group.modules.values()],
                group.phase,
                group.hook,
                scope=self._frame,
                names=[*group.modules],
                entry=number,
                **entry.hook_options | group.options,
            )
            self._contents.handles += zip(group.modules, handles, strict=True)

    def _transcode(
        self,
        number: int,
        entry: HookEntry,
        found: list[dict[str, Place]],
        read: dict[str, Place],
        gates: dict[str, GateAggregation],
    ) -> None:
        """Registers the two hooks of a change of features of a transcoder."""
        mask = cast("int", self._mask(entry))
        ((read_name, reads),), ((name, writes),) = read.items(), found[number].items()
        if writes.quantity is None:
            writes = writes._replace(part=entry.hook.output_index)
        with naming(number):
            change = TranscodedFeature(entry.hook, number, reads, writes, **extent_of(entry, gates))
        priority = priority_of_reader(self.entries, found, number, reads)
        reader = TokenHook(change.read, reads.part, mask)
        self._register_at(reads, reader, read_name, number, priority=priority)
        writer = TokenHook(change.write, writes.part, mask)
        self._register_at(writes, writer, name, number, **entry.hook_options)
        self._contents.transcodes.append(number)

    def _register_at(
        self, place: Place, hook: NativeHook, name: str, number: int, **options: Any
    ) -> None:
        """Registers a native hook of an entry at one place."""
        (handle,) = self._attachment.register(
            [place.module],
            place.phase,
            hook,
            scope=self._frame,
            names=[place.path],
            entry=number,
            **options,
        )
        self._contents.handles.append((name, handle))

    def _capture(
        self, model: nn.Module, number: int, entry: KeepEntry, found: list[dict[str, Place]]
    ) -> None:
        """Registers the recorders of an entry, or has a gate give its values."""
        captures = self._contents.captures
        places = {entry.name_of(name): place for name, place in found[number].items()}
        names = [entry.name_of(str(entry.what))] if entry.gates else [*places]
        if twice := {*names} & {name for capture in captures for name in capture.places}:
            msg = f"entry {number} keeps {min(twice)!r} again: give one of the two a label"
            raise HookError(msg)
        if entry.gates:
            (gate,) = entry.gates
            self._contents.gates[gate].kept.append(len(captures))
            options = options_of(**entry.options)
            collector = Collector(names, stop=None, **options.collector)
            captures.append(Recorders({names[0]: 0}, options, collector, [], {}, {}))
            return
        mask = self._mask(entry)
        captures.append(
            Recorders.begin(
                model,
                places,
                options_of(**entry.options),
                self._frame,
                priority_of=functools.partial(priority_of_reader, self.entries, found, number),
                place=CapturePlace(len(captures), mask),
            )
        )

    def _read(self, number: int, entry: GateEntry, found: list[dict[str, Place]]) -> None:
        """Registers the hook of a gate, which reads the value that the entries before it left."""
        places = found[number]
        reader = self._contents.gates[entry.gate.name]
        mask = cast("int", self._mask(entry))
        readers = [reader] if len(places) == 1 else reader.at([*places.values()])
        for (name, place), own in zip(places.items(), readers, strict=True):
            hook = GateHook(own, place.part, mask)
            priority = priority_of_reader(self.entries, found, number, place)
            self._register_at(place, hook, name, number, priority=priority)

    def _mask(self, entry: Entry) -> int | None:
        """Returns the index of an entry's positions in the plan; None if it needs none."""
        if not entry.positioned:
            return None
        self._contents.ats.append(EVERYWHERE if entry.at is None else entry.at)
        return len(self._contents.ats) - 1

    def open(
        self, *, deadline: float | None = None, prompt: int | Sequence[int] | None = None
    ) -> Request:
        """Opens a request: enter it with `with` around its calls, or pass it to `batch`.

        Costs the same for any number of modules. Any thread or task may open requests, any number
        at a time. The first request for which a module ran no hook or captured nothing warns with
        `NeverFiredWarning`; later ones only list such modules in `silent`.

        Args:
            deadline: seconds from now after which the request fails in batches, with
                `TimeoutError`. A request with a deadline cannot be entered.
            prompt: number of tokens of the prompt, those in a KV cache included; for calls with
                several rows, one for each or one for all. For positions that refer to the prompt
                where the call does not show its end.

        Raises:
            HookError: the plan was closed, or its model is gone.
            HookTypeError: `prompt` is not made of ints.
            ValueError: `prompt` is empty, or has an int below 1 or of more than 64 bits.
        """
        if self._attachment.released:
            self.close()
        request = Request(self._frame, self._contents, self._templates, self._max_bytes)
        request.prepared = self
        if prompt is not None:
            request.prompt = _lengths_of(prompt)
            request.set_prompt_lengths(request.prompt)
        if self._contents.ats:
            stopped = weakly(request.stopped_rows) if self._contents.stops else None
            request.sequences = Sequences(request.prompt, weakly(request.accept), stopped)
        if self._contents.gates:
            request.gates = GateStates(self._gates)
        if self._contents.transcodes:
            request.transcoded = {number: {} for number in self._contents.transcodes}
        if deadline is not None:
            request.expire(deadline)
        return request

    def _close_with(self, request: Request) -> None:
        """Closes the plan when a request closes."""
        self._attachment.release_with(request)

    def close(self) -> None:
        """Removes the hooks, and restores modules that nothing else instruments.

        Open requests continue without hooks; their captures stay readable.
        """
        self._frame._close()

    @property
    def model(self) -> nn.Module | None:
        """The model, which the plan does not keep alive; None once the model is gone."""
        return self._contents.model()

    @property
    def captures(self) -> list[dict[str, int]]:
        """Indices of the names in their collector, for each `keep` in order."""
        return [capture.places for capture in self._contents.captures]

    @property
    def closed(self) -> bool:
        """True once the plan is closed."""
        return self._frame.closed or self._attachment.released

    @property
    def outdated(self) -> bool:
        """True if modules of the model were replaced: calls in requests raise `HookError`."""
        return not self.tree.holds()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        # No more requests can be opened. `_frame` is missing if `__init__` was interrupted.
        if (frame := vars(self).get("_frame")) is not None:
            frame._close()

    def __repr__(self) -> str:
        model = self.model
        title = "a model that is gone" if model is None else model._get_name()
        return f"<Prepared for {title}{', closed' if self.closed else ''}>\n{table(self.entries)}"


def _lengths_of(prompt: Any) -> list[int]:
    """Returns the lengths of prompts that a caller gave."""
    given = prompt.tolist() if isinstance(prompt, Tensor) else prompt
    lengths = [*given] if isinstance(given, list | tuple) else [given]
    for length in lengths:
        expect(length, int, "prompt must be an int, or a list of ints, one for each row")
    if not lengths or min(lengths) < 1 or max(lengths) > _LONGEST:
        msg = f"prompt must be the number of tokens of each prompt, 1 to {_LONGEST}, got {prompt!r}"
        raise ValueError(msg)
    return lengths


class Request(RequestBase, Scope):
    """One request of a prepared plan, see `Prepared.open`: hooks and captures of one context.

    A scope: `wrap` and `activate` take it to other threads and tasks. It is entered once.
    """

    if TYPE_CHECKING:

        @property
        def _plan(self) -> _Contents: ...

    prepared: Prepared
    """The prepared plan of the request, kept alive: dropping it removes the hooks."""
    sequences: Sequences
    """Sequences that its calls ran, for a plan with positions."""
    gates: GateStates
    """Readings of its gates, for a plan with some."""
    transcoded: Mapping[int, dict[int, tuple[CallTokens, Tensor]]]
    """Changed features that a call has read, of a plan with some, see `TranscodedRequest`."""
    prompt: Sequence[int] = ()
    """The numbers of tokens of its prompts that it was opened with; none if it was not."""
    stacklevel = 2
    """Stack level of its warnings: the frame that leaves it."""

    @property
    def acts(self) -> ActivationCache:
        """The activations that the plan keeps for this request; readable after it is closed."""
        captures = enumerate(self._plan.captures)
        return cache_of(
            ((capture, self._collector(place)) for place, capture in captures),
            self._plan.model(),
            functools.partial(_why_silent, weakref.ref(self)),
        )

    @property
    def kept(self) -> list[str]:
        """The names in `acts` of all modules that the plan keeps, even if they never ran."""
        return [name for capture in self._plan.captures for name in capture.places]

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
    def stopped(self) -> list[Stopped]:
        """The sequences that a `stop` of its plan has ended, in order of their rows.

        In a `generate` of several prompts a text that has ended runs on with padding tokens: ignore
        a stop whose position is past the end of its text.
        """
        return self.gates.stopped() if self._plan.stops else []

    @property
    def may_stop(self) -> bool:
        """True if its plan has a `stop`."""
        return self._plan.stops

    def stopped_rows(self, sequences: int) -> list[tuple[int, int]]:
        """Returns the rows that a `stop` has ended, with the positions of their last tokens."""
        return [(each.row, each.position) for each in self.gates.stopped(sequences)]

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The entries of its plan."""
        return self.prepared.entries

    @property
    def model(self) -> nn.Module | None:
        """The model of its plan; None once the model is gone."""
        return self._plan.model()

    @property
    def error(self) -> BaseException | None:
        """The exception with which the request failed in a batch, or the first one of its hooks.

        Waits until the GPU has reported whether sites kept the request's rows.
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

    def accept(self, tokens: int, sequences: int) -> None:
        """Removes the values of rejected draft tokens from captures and gates.

        Args:
            tokens: number of the accepted tokens.
            sequences: id of their sequences.
        """
        if self._plan.gates:
            self.gates.take_back(tokens, sequences)
        model = self.model
        encoders = () if model is None else encoders_in(model)
        numbers = [n for n, entry in enumerate(self.entries) if isinstance(entry, KeepEntry)]
        for place, number in enumerate(numbers):
            entry = cast("KeepEntry", self.entries[number])
            places = self.prepared.places(number) if encoders else {}
            indices = self._plan.captures[place].places
            beside = [
                indices[entry.name_of(name)]
                for name, found in places.items()
                if is_inside(found.path, encoders)
            ]
            self.collector(place, complete=False).take_back(tokens, sequences, beside)

    @property
    def plan_positions(self) -> Sequence[At]:
        """The positions that its plan names."""
        return self._plan.ats

    def warns_first(self) -> bool:
        """Returns True for the first warning of its plan's silence, which comes once."""
        first, self._plan.warned = not self._plan.warned, True
        return first

    def _warn_of_silence(self) -> None:
        """Warns of modules that never ran; called as a request is left, up to the first warning."""
        plan = self._plan
        silent = self.silent
        idle = never_fired(plan.handles)
        plan.fired = not idle
        model = plan.model()
        if (names := [*dict.fromkeys(silent + idle)]) and model is not None:
            plan.warned = True
            text = explain(model, names)
            if reason := _not_called(plan, model):
                text = f"{text}; {reason}"
            warnings.warn(text, NeverFiredWarning, stacklevel=self.stacklevel)

    def __repr__(self) -> str:
        state = "closed" if self.closed else "open" if self._entered is None else "entered"
        return f"<Request {self.id}, {state}>"


def _not_called(plan: _Contents, model: nn.Module | None) -> str:
    """Returns the text for a plan whose model was never called; "" if it was."""
    guard = plan.guard
    if model is None or guard is None or guard.calls or guard.traced:
        return ""
    return (
        f"the plan was prepared for this {model._get_name()}, which was not called while the "
        "request was open: call it, or prepare the plan for the model that is called"
    )


def _why_silent(request: weakref.ref[Request]) -> str:
    """Returns why modules of a request did not run, if it is known; "" if not."""
    # Weak: the captures of a request keep no hooks in the model.
    found = request()
    if found is None:
        return ""
    if found.error is not None and found.failed:
        return f"the request failed: {type(found.error).__name__}: {found.error}"
    return _not_called(found._plan, found._plan.model())


_trees: PerObject[weakref.WeakValueDictionary[Any, ModuleTree]] = PerObject()


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

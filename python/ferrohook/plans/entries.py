"""Entries of plans: `on`, `keep`, `gate` and `stop`."""

from __future__ import annotations

import dataclasses
import functools
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ferrohook._core import NativeDetector, Registry, TypedHook
from ferrohook.captures.recorders import CaptureKeywords, options_of
from ferrohook.dictionaries.features import Feature
from ferrohook.effects.intervention import Intervention
from ferrohook.effects.routing import Replay, Route
from ferrohook.errors import HookError, HookTypeError
from ferrohook.gates.aggregation import By, Over, check_over
from ferrohook.gates.conditions import (
    Condition,
    Ramp,
    check_condition,
    check_name,
    strength_of,
)
from ferrohook.gates.gate import Gate
from ferrohook.gates.readings import Reading
from ferrohook.tokens.positions import At, check_at
from ferrohook.tokens.routes import check_route
from ferrohook.tokens.tracking import check_takes_at
from ferrohook.util.arguments import check_encodes, check_output_index, expect
from ferrohook.util.tables import text_table
from ferrohook.util.tensors import ByContent, content_of
from ferrohook.util.texts import MODEL, listed, name_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from typing_extensions import Unpack

    from ferrohook.captures.recorders import Calls
    from ferrohook.dictionaries.dictionary import Dictionary
    from ferrohook.effects.typed import OnError, Phase
    from ferrohook.names.select import Selector
    from ferrohook.util.arguments import OutputIndex

_DEFAULTS: Final[dict[str, Any]] = {
    "prepend": False,
    "with_kwargs": False,
    "always_call": False,
    "priority": 0,
    "on_error": "raise",
    "when": None,
    "strength": None,
}
_GATE: Final = "@gate."
"""Prefix of the names of gates among quantities."""


class PlanEntry(ByContent):
    """An entry of a plan: made by `on`, `keep`, `gate` or `stop`."""

    what: Selector
    at: At
    options: dict[str, Any]
    """The options that are not the default."""

    @property
    def gates(self) -> frozenset[str]:
        """Names of the gates that it depends on."""
        return frozenset()

    @property
    def has_places(self) -> bool:
        """True if it stands at modules or quantities of the model."""
        return True

    @property
    def positioned(self) -> bool:
        """True if it needs the positions of tokens."""
        return self.at is not None or bool(self.gates)

    @cached_property
    def needs(self) -> frozenset[str]:
        """Features that a back end must support to serve it, see `BackEnd`."""
        at = () if self.at is None else ("at function" if callable(self.at) else "at",)
        return frozenset((*at, *self._needs()))

    def _needs(self) -> Iterator[str]:
        raise NotImplementedError

    def row(self) -> tuple[str, ...]:
        """Returns its row in the table of a plan."""
        raise NotImplementedError


class TranscoderInput(NamedTuple):
    """Tensor that a transcoder reads."""

    what: str
    """Module or quantity, see `select`."""
    output_index: OutputIndex = None
    """Part of the module's output, see `capture`."""


@dataclasses.dataclass(frozen=True, eq=False)
class HookEntry(PlanEntry):
    """A hook on modules of a plan's model."""

    what: Selector
    hook: Any
    at: At
    phase: Phase
    options: dict[str, Any]
    reads: TranscoderInput | None = None
    """Place where a transcoder's changed features are read; None for any other hook.

    The place that the dictionary names; engines rewrite it for their modules, like `what`."""

    @property
    def gates(self) -> frozenset[str]:
        """Names of the gates that it depends on."""
        when, strength = self.options.get("when"), self.options.get("strength")
        own = frozenset() if when is None else frozenset(when.gates())
        return own | {strength.gate} if isinstance(strength, Ramp) else own

    @property
    def positioned(self) -> bool:
        """True if it needs the positions of tokens."""
        own = isinstance(self.hook, Route | Replay) or self.reads is not None
        return super().positioned or own

    @property
    def hook_options(self) -> dict[str, Any]:
        """Options of the hook as a registry takes them."""
        return {name: it for name, it in self.options.items() if name not in {"when", "strength"}}

    def _needs(self) -> Iterator[str]:
        yield from self.options
        if self.phase != "forward":
            yield "inputs" if self.phase == "forward_pre" else "gradients"
        if isinstance(self.hook, NativeDetector):
            yield "native detector"
        elif isinstance(self.hook, Route | Replay):
            yield "route"
        elif not isinstance(self.hook, Intervention):
            yield "python"
        else:
            yield from self.hook.needs()

    def content(self) -> tuple[Any, ...]:  # noqa: D102 (PlanEntry's)
        own = (self.what, self.hook, self.at, self.phase, self.options, self.reads)
        return ("on", *map(content_of, own))

    def __reduce__(self) -> Any:
        # Through `on`, which validates the contents of a damaged pickle. Rewritten entries stay in
        # their process.
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

    @property
    def gates(self) -> frozenset[str]:
        """Name of the gate whose values it captures."""
        named = isinstance(self.what, str) and self.what.startswith(_GATE)
        return frozenset((str(self.what).removeprefix(_GATE),)) if named else frozenset()

    @property
    def has_places(self) -> bool:
        """False for the values of a gate, which the gate gives."""
        return not self.gates

    def _needs(self) -> Iterator[str]:
        names = {"grads": "gradients", "top": "features", "index": "features"}
        yield from (names.get(name, name) for name in self.options)
        if self.gates:
            yield "gate"

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


@dataclasses.dataclass(frozen=True, eq=False)
class GateEntry(PlanEntry):
    """A number that a plan reads from each token, on which its hooks may depend."""

    gate: Gate
    what: Selector
    options: dict[str, Any]

    @property
    def at(self) -> At:  # type: ignore[override]  # it does not change
        """Tokens that it reads."""
        return self.gate.at

    @property
    def positioned(self) -> bool:
        """True: its values belong to tokens."""
        return True

    def sum_refusal(self, places: Collection[str]) -> str | None:
        """Returns why it does not read the sum of some places; None if it does, or of one."""
        several = len(self.what) if isinstance(self.what, list | tuple) else 1
        if len(places) in {1, several}:
            return None
        return (
            f"gate {self.gate.name!r} reads one place, and its `what` selects {listed(places)}: to "
            "read the sum of several, list each of them"
        )

    def _needs(self) -> Iterator[str]:
        yield from ("gate", *self.options)

    def content(self) -> tuple[Any, ...]:  # noqa: D102 (PlanEntry's)
        it = self.gate
        own = map(content_of, (it.name, self.what, it.at, it.lag, self.options))
        return ("gate", *own, it.reading.content(), it.over, it.by)

    def __reduce__(self) -> Any:
        it = self.gate
        own = {"at": it.at, "over": it.over, "by": it.by, "lag": it.lag, **self.options}
        return functools.partial(gate, **own), (it.name, self.what, it.reading)

    def row(self) -> tuple[str, ...]:  # noqa: D102 (PlanEntry's)
        phase = "forward_pre" if self.options.get("inputs") else "forward"
        it = self.gate
        shown = {"over": it.over, "by": it.by, **({"lag": it.lag} if it.lag else {})}
        shown |= {name: value for name, value in self.options.items() if name != "inputs"}
        title = f"gate {it.name!r}: {type(it.reading).__name__}"
        return (_shown(self.what), title, phase, _shown(self.at), _shown_options(shown))


@dataclasses.dataclass(frozen=True, eq=False)
class StopEntry(PlanEntry):
    """An end of the request that depends on gates of its plan."""

    when: Condition
    what: Selector = dataclasses.field(default=None, init=False)
    at: At = dataclasses.field(default=None, init=False)
    options: dict[str, Any] = dataclasses.field(default_factory=dict, init=False)

    @property
    def gates(self) -> frozenset[str]:
        """Names of the gates that it depends on."""
        return frozenset(self.when.gates())

    @property
    def name(self) -> str:
        """Name of the gate; of several, with commas between them."""
        return ", ".join(dict.fromkeys(self.when.gates()))

    @property
    def has_places(self) -> bool:
        """False: its gates have theirs."""
        return False

    def _needs(self) -> Iterator[str]:
        yield "stop when"

    def content(self) -> tuple[Any, ...]:  # noqa: D102 (PlanEntry's)
        return ("stop", self.when)

    def __reduce__(self) -> Any:
        return functools.partial(stop, when=self.when), ()

    def row(self) -> tuple[str, ...]:  # noqa: D102 (PlanEntry's)
        return ("", "stop", "", "", f"when={self.when!r}")


Entry: TypeAlias = HookEntry | KeepEntry | GateEntry | StopEntry
"""An entry of a plan."""


def gate(  # noqa: PLR0913 (all but the first three by keyword)
    name: str,
    what: Selector,
    reading: Reading,
    *,
    at: At = None,
    over: Over = "token",
    by: By = "max",
    lag: int = 0,
    inputs: bool = False,
    output_index: OutputIndex = None,
) -> GateEntry:
    """Makes a plan entry that reads a number from each token, for entries that depend on it.

    Other entries of the plan refer to it by name: `on(..., when=above(name, 0.3))`,
    `on(..., strength=ramp(name, 0.1, 0.5))`, `keep("@gate.name")`. Without such entries, a gate
    only monitors the model. It changes nothing itself, and reads the value with the changes of the
    entries before it.

    Its value at a token is computed from the readings up to that token. A reading is stored with
    the position of its token: a token that runs again has the reading of its first run.

    Args:
        name: its name in the plan.
        what: a module that returns a tensor, or a quantity, see `select`. Or a list of several:
            the sum of their tensors is read, once the last one has run.
        reading: the number to read from each token, such as `Cosine(direction)`.
        at: tokens that it reads, see `At`; None for all. Models give their first tokens huge
            norms, so `slice(1, None)` or `"generated"` often fits better.
        over: readings that make a value: of `"token"` itself; of the `"prompt"`, known from its
            last token on; of the sequence `"so_far"`; or `window(n)`, `ema(decay)`.
        by: how several readings make one value: `max`, `min`, `mean` or `last`. Not used with
            `ema`.
        lag: 1 for the value of the token before, at generated tokens only: for a gate that reads
            later in the forward than the entries that depend on it.
        inputs: read the module's input.
        output_index: tensor to read in a value of several, as in `capture`.

    Raises:
        HookTypeError: an argument has the wrong type.
        ValueError: an unknown `at`, `over` or `by`, an empty name, or a `lag` that does not fit.

    Examples:
        >>> plan = fh.Plan(
        ...     fh.gate("refuses", "layers.12", fh.Cosine(direction), over="prompt"),
        ...     fh.on("layers.16", fh.Add(v, scale=4.0), when=fh.above("refuses", 0.3)),
        ... )
    """
    check_name(name)
    expect(reading, Reading, "reading must be one, such as Cosine(direction)")
    check_at(at)
    check_over(over, by)
    expect(lag, int, "lag must be 0 or 1")
    if lag not in {0, 1} or (lag and over == "prompt"):
        msg = f"lag must be 0 or 1, and 0 with over='prompt', got {lag}"
        raise ValueError(msg)
    expect(inputs, bool, "inputs must be a bool")
    check_output_index(output_index, "output_index", object)
    options: dict[str, Any] = {}
    if inputs:
        options["inputs"] = True
    if output_index is not None:
        options["output_index"] = output_index
    return GateEntry(Gate(name, reading, at, over, by, lag), _copied(what), options)


def stop(*, when: Condition) -> StopEntry:
    """Makes a plan entry that ends its request where a condition on gates is true.

    It acts at the last token of the prompt and at generated tokens. The answer ends with the token
    that the gate read: in transformers' `generate` the end-of-sequence token follows, and an engine
    reports the name of the gate. `Request.stopped` reports the stop in any call.

    Args:
        when: condition on gates of the plan.

    Raises:
        HookTypeError: `when` is not a condition.

    Examples:
        >>> plan = fh.Plan(
        ...     fh.gate("angry", "layers.10", fh.Probe(w, bias), over="so_far"),
        ...     fh.stop(when=fh.above("angry", 0.8)),
        ... )
    """
    check_condition(when)
    return StopEntry(when)


def on(  # noqa: PLR0913 (the options of `register`)
    what: Selector,
    hook: Intervention | TypedHook | Route | Replay | Callable[..., Any],
    *,
    at: At = None,
    phase: Phase | None = None,
    prepend: bool = False,
    with_kwargs: bool = False,
    always_call: bool = False,
    priority: int = 0,
    on_error: OnError = "raise",
    when: Condition | None = None,
    strength: float | Ramp | None = None,
) -> HookEntry:
    """Makes a plan entry that puts a hook on modules.

    Args:
        what: modules, see `select`.
        hook: an intervention, or anything that `register` takes.
        at: positions of tokens that the hook changes, see `At`; None for all. With it, the hook is
            an intervention or a forward hook of PyTorch's contract that returns a tensor. Under
            `torch.compile` it breaks the graph.
        phase: see `register`.
        prepend: see `register`.
        with_kwargs: see `register`.
        always_call: see `register`.
        priority: see `register`.
        on_error: see `register`.
        when: condition on gates of the plan, such as `above("angry", 0.3)`: the hook acts only at
            tokens where it is known to be true. The hook is one that takes `at`.
        strength: how much of its change is made: a number `s` for `x + s * (changed - x)`, or a
            `ramp` for one that follows a gate. The hook is one that takes `at`.

    Raises:
        HookTypeError: the hook or an option has the wrong type.
        ValueError: an unknown phase, `on_error` or `at`.
    """
    check_at(at)
    if phase is None:
        phase = hook.phase if isinstance(hook, TypedHook) else "forward"
    if isinstance(hook, Route | Replay):
        refused = {"phase": phase, "with_kwargs": with_kwargs, "always_call": always_call}
        check_route(hook, at, refused | {"when": when, "strength": strength})
    options: dict[str, Any] = {
        "prepend": prepend,
        "with_kwargs": with_kwargs,
        "always_call": always_call,
        "priority": priority,
        "on_error": on_error,
    }
    Registry().register(phase, hook, **options)  # validates them
    reads = _input_of(hook, what, phase) if isinstance(hook, Feature) else None
    if when is not None:
        check_condition(when)
    if strength is not None:
        strength = strength_of(strength)
    given = {"at": at, "when": when, "strength": strength}
    if (option := next((name for name, it in given.items() if it is not None), None)) is not None:
        check_takes_at(hook, phase, with_kwargs=with_kwargs, always_call=always_call, option=option)
    options |= {"when": when, "strength": strength}
    chosen = {name: it for name, it in options.items() if it != _DEFAULTS[name]}
    return HookEntry(_copied(what), hook, at, phase, chosen, reads)


def replay(array: Any, *, start: int = 0, at: At = None) -> HookEntry:
    """Makes a plan entry that replays the experts of another forward.

    One array is for all mixtures of experts of the model, in the form that vLLM and SGLang return
    for a request (`routed_experts`). The weights are the model's own, from its router's logits at
    these ids.

    Args:
        array: ids of experts, ints of (tokens, layers, chosen), for the tokens from position
            `start` on; tokens past its end, such as the last one of a sequence, are left to the
            router, and so are tokens with ids of -1. Layers without experts have ids too, which are
            ignored. Or (sequences, tokens, layers, chosen), for the rows of a call.
        start: position of the first token in the array.
        at: positions of tokens that take them, see `At`; None for all.

    Raises:
        HookTypeError: the array does not have ints, or `start` is not an int.
        ValueError: ids of experts cannot have that shape, or such a value.

    Examples:
        >>> plan = fh.Plan(fh.replay(completion.routed_experts))
    """
    return on("@experts.*", Replay(array, start), at=at)


class KeepOptions(CaptureKeywords, total=False):
    """Options of `keep`; see `capture` but for `features`, `top` and `index`."""

    calls: Calls
    features: Dictionary
    top: int
    index: int | Sequence[int]


_NOT_OF_GATES: Final = frozenset(
    {"at", "inputs", "output_index", "slice", "grads", "stop", "features"}
)
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
            `slice`, `copy`, `calls`, `grads`, `stop`, and `max_bytes` for each request; and
            `features`, with `top` or `index`.

    `features=dictionary` captures values of its features in place of the tensor, in float32, or in
    float64 of a float64 tensor. With `top=32`: for each token the 32 largest values and the indices
    of their features, a tensor of (..., tokens, 32, 2): `values, numbers = acts[name].unbind(-1)`.
    With `index=[3, 17]`: the values of these features, (..., tokens, 2).

    `"@gate.NAME"` captures the values of a gate of the plan: one for each token that it reads, NaN
    where the value is unknown.

    Raises:
        HookTypeError, ValueError, RuntimeError: as `capture` does.
        TypeError: an option that `capture` does not have.
    """
    if unknown := options.keys() - KeepOptions.__annotations__.keys():
        msg = f"keep() got an unexpected keyword argument {min(unknown)!r}"
        raise TypeError(msg)
    expect(label, str | None, "label must be a str")
    if label is not None:
        check_encodes(label, "label")
    options_of(**options)
    if "features" in options:
        _check_place(what)
    at = options.pop("at", None)
    if (device := options.get("device")) is not None:
        options["device"] = str(torch.device(device))
    if (index := options.get("index")) is not None:
        options["index"] = (index,) if isinstance(index, int) else tuple(index)
    in_order = {name: options.get(name) for name in KeepOptions.__annotations__}
    chosen = {name: value for name, value in in_order.items() if not _is_default(name, value)}
    if "slice" in chosen:
        chosen["slice"] = _copied(chosen["slice"])
    entry = KeepEntry(_copied(what), at, label, chosen)
    given = chosen.keys() | ({"at"} if at is not None else set())
    if entry.gates and (refused := given & _NOT_OF_GATES):
        msg = (
            f"{what!r} has one number for each token that its gate reads: leave out {min(refused)}"
        )
        raise HookTypeError(msg)
    return entry


def _copied(value: Any) -> Any:
    """Copies the lists, sets and tensors of a selector or index: their owner may change them."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, slice):
        return slice(*map(_copied, (value.start, value.stop, value.step)))
    if type(value) in {list, tuple, set, frozenset}:
        return type(value)(map(_copied, value))
    return value


def _is_default(name: str, value: Any) -> bool:
    default = _CAPTURE_DEFAULTS.get(name, False)
    return value is None or (type(value) is type(default) and value == default)  # 0 is no False


def _input_of(feature: Feature, what: Selector, phase: Phase) -> TranscoderInput | None:
    """Returns where features to change are read; None if that is where they are changed.

    Raises:
        HookTypeError: the place of the change, or where a transcoder reads, is missing or wrong.
    """
    _check_place(what)
    dictionary = feature.dictionary
    if not dictionary.transcoder:
        return None
    if dictionary.reads is None:
        msg = f"{dictionary!r} does not say where it reads: make or load it with reads="
        raise HookTypeError(msg)
    if phase != "forward":
        msg = f"features of a transcoder change an output: leave out phase={phase!r}"
        raise HookTypeError(msg)
    return TranscoderInput(dictionary.reads)


def _check_place(what: Selector) -> None:
    if what is None:  # as of a dictionary whose place is unknown
        msg = "a dictionary reads features from one tensor: name its module or quantity, not None"
        raise HookTypeError(msg)


def dictionary_in(entry: PlanEntry) -> Dictionary | None:
    """Returns the dictionary whose features an entry changes, reads or captures."""
    used = entry.hook if isinstance(entry, HookEntry) else None
    used = entry.gate.reading if isinstance(entry, GateEntry) else used
    found: Dictionary | None = getattr(used, "dictionary", entry.options.get("features"))
    return found


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


def gates_of(entries: Sequence[Entry]) -> dict[str, Gate]:
    """Returns the gates of a plan by name.

    Raises:
        HookError: an entry depends on one that is not there.
    """
    gates = {it.gate.name: it.gate for it in entries if isinstance(it, GateEntry)}
    for number, entry in enumerate(entries):
        if unknown := entry.gates - gates.keys():
            known = f"it has {listed(gates)}" if gates else "it has none"
            msg = f"entry {number}: the plan has no gate {min(unknown)!r}; {known}"
            raise HookError(msg)
    return gates

"""Life of a request of an engine that has a plan: queued, running, ended with a reason."""

from __future__ import annotations

import dataclasses
import sys
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import torch

from ferrohook.captures.cache import ActivationCache
from ferrohook.dictionaries.features import Feature
from ferrohook.effects.interventions import Ablate, Add, Clamp, Scale
from ferrohook.effects.routing import Replay, Route
from ferrohook.errors import HookError
from ferrohook.plans.entries import GateEntry, HookEntry, KeepEntry
from ferrohook.tokens.positions import OF_REQUEST
from ferrohook.util.tensors import map_tensors, tensors_in

if TYPE_CHECKING:
    from ferrohook.engines.model.modules import CaptureEntry
    from ferrohook.gates.state import Stopped
    from ferrohook.gates.streaming import GateStream
    from ferrohook.plans import Prepared, Request


_KEEPS_BAD: Final = (Ablate, Add, Clamp, Feature, Replay, Route, Scale)
"""Hooks after which a row with NaN or infinity has some too."""


class Result(NamedTuple):
    """Activations and failure of a request."""

    acts: ActivationCache
    """Activations in order of position: tensors of (positions, ...)."""
    error: BaseException | None


class Span(NamedTuple):
    """Rows of one request in a step: `rows` of them from `first_row` on."""

    request_id: str
    first_row: int
    rows: int
    position: int
    """Absolute position in the request of the first row."""
    prompt_length: int


# Slots: looked for in each step, in caches that the model's weights have emptied.
@dataclasses.dataclass(slots=True, eq=False)
class EngineRequest:
    """A request that has a plan, until the engine has forgotten it."""

    name: str
    """Name that the steps use."""
    prepared: Prepared | None = None
    """Its plan, rewritten; None if it could not be opened."""
    prompt_length: int = 0
    key: str = ""
    """Name of its captures."""
    captures: list[CaptureEntry] = dataclasses.field(default_factory=list)
    """Captures of the plan."""
    parent: EngineRequest | None = None
    """The request whose rows stand for those before its own first one: both have one prompt."""
    inherited: Request | None = dataclasses.field(init=False, default=None)
    """The parent's plan, as it was open when its own first row ran: the parent may run again."""
    opened: Request | None = dataclasses.field(init=False, default=None)
    """Its plan, opened."""
    changes: bool = dataclasses.field(init=False, default=False)
    """True if its plan may change rows."""
    hides: bool = dataclasses.field(init=False, default=False)
    """True if its plan may hide the NaN and infinities that it made at another place."""
    first_changed: int | None = dataclasses.field(init=False, default=0)
    """Position from which its plan may change keys and values; None if it changes none."""
    reads_logits: bool = dataclasses.field(init=False, default=False)
    """True if a gate of its plan reads the logits that the engine samples from."""
    start: int = dataclasses.field(init=False)
    """First position that ran for it; those before are its parent's."""
    end: int = dataclasses.field(init=False, default=0)
    """Position after its last row."""
    tokens: int = dataclasses.field(init=False, default=0)
    """Tokens that ran."""
    drafts: int = dataclasses.field(init=False, default=0)
    """Drafts among the last rows that ran, until `decide` learns how many were accepted."""
    retried: int = dataclasses.field(init=False, default=0)
    """Tokens that it had when it had to run again; 0 if it never had to."""
    waits: bool = dataclasses.field(init=False, default=False)
    """True if it has to run again and has not begun: steps that were scheduled before do not
    count."""
    error: BaseException | None = dataclasses.field(init=False, default=None)
    """Failure of its plan."""
    valid: int = dataclasses.field(init=False, default=0)
    """Tokens of its answer before the step in which it failed."""
    gate_stream: GateStream | None = dataclasses.field(init=False, default=None)
    """Values of its kept gates, if its client reads along."""
    taken: bool = dataclasses.field(init=False, default=False)
    """True once its client has its captures: nothing is kept of it."""

    def __post_init__(self) -> None:
        if self.prepared is not None:
            self.opened = self.prepared.open()
            hooks = [it.hook for it in self.prepared.entries if isinstance(it, HookEntry)]
            self.changes = bool(hooks)
            self.hides = not all(isinstance(hook, _KEEPS_BAD) for hook in hooks)
        self._begin()

    def _begin(self) -> None:
        """Notes that none of its rows ran."""
        self.start = 0 if self.parent is None else sys.maxsize

    @property
    def state(self) -> Literal["queued", "running", "ended"]:
        """Stage that the request has reached."""
        if self.error is not None:
            return "ended"
        return "running" if self.tokens else "queued"

    @property
    def reason(self) -> str:
        """Reason for its client why its plan failed; empty as long as it has not."""
        return "" if self.error is None else reason_of(self.error)

    @property
    def capture_bytes(self) -> int:
        """Bytes that it captured, at most: activations are joined only when they are read."""
        return self.tokens * sum(each.row_bytes for each in self.captures)

    @property
    def failure(self) -> BaseException | None:
        """Reason why its plan failed, once it is known; `result` may wait for a GPU first."""
        if self.error is None and self.opened is not None and self.opened.failed:
            return self.opened.error
        return self.error

    @property
    def stopped(self) -> Stopped | None:
        """Its end by a `stop` of its plan; None if it goes on."""
        return next(iter(self.opened.stopped), None) if self.opened is not None else None

    @property
    def answered(self) -> int:
        """Tokens of the answer that a `stop` of its plan has ended."""
        stopped = self.stopped
        return 0 if stopped is None else max(0, stopped.position + 1 - self.prompt_length)

    @property
    def closed(self) -> bool:
        """True if its plan was closed."""
        return any(it is not None and it.closed for it in (self.prepared, self.opened))

    @property
    def _gated(self) -> bool:
        """True if its plan has gates."""
        entries = () if self.prepared is None else self.prepared.entries
        return any(isinstance(entry, GateEntry) for entry in entries)

    def writes(self, span: Span) -> bool:
        """Returns True if its plan may change keys and values of some of its rows."""
        first = self.first_changed
        return first is not None and first < span.position + span.rows

    def stream_gates(self, stream: GateStream) -> None:
        """Has a stream take the values of its kept gates, if there are any."""
        entries = () if self.prepared is None else self.prepared.entries
        if self.opened is not None and any(
            isinstance(entry, KeepEntry) and entry.gates for entry in entries
        ):
            self.opened.gates.stream = self.gate_stream = stream

    def run(self, position: int, rows: int, drafts: int = 0) -> None:
        """Notes that a step runs its rows from a position on, of which the last ones are drafts."""
        if self.parent is not None and self.start == sys.maxsize:
            first, self.inherited = self.inherited is None, self.parent.opened
            # Once: it keeps its readings where it runs again.
            if first and self._gated and self.opened is not None and self.inherited is not None:
                self.opened.gates.inherit(self.inherited.gates, position)
        self.start = min(self.start, position)
        self.end = position + rows
        self.tokens = max(self.tokens, self.end)
        self.drafts = drafts

    def decide(self, tokens: int) -> None:
        """Takes back the readings of drafts that were rejected.

        Rows that were captured need not be: the tokens that follow replace them, or their positions
        are past the end.

        Args:
            tokens: number of tokens of prompt and answer. The last one took the place of the first
                rejected draft, if there was one.
        """
        if self.waits:  # tokens of its failed step, which are dropped
            return
        drafts, self.drafts = self.drafts, 0
        if drafts and self.opened is not None:
            if self._gated:
                self.opened.gates.take_back(tokens - 1, OF_REQUEST)
            if self.gate_stream is not None:
                self.gate_stream.take_back(tokens - 1)

    def wait(self) -> None:
        """Notes that it has to run again, from a step on in which the engine resumes it."""
        self.waits = True
        self.retried = self.end - self.drafts

    def resume(self, tokens: int) -> None:
        """Notes that it runs again after a preemption, with that many tokens, see `decide`."""
        self.waits = False
        if self.error is None:
            self._reopen()
        self.decide(tokens)

    def _reopen(self) -> None:
        """Opens its plan anew, for a request all of whose tokens run again."""
        before = self.opened
        self.close()
        self._begin()  # it may read more of its parent's rows from the cache than at first
        if self.prepared is None or before is None:
            return
        self.opened = self.prepared.open()
        if self._gated:
            # A gate with `lag` needs earlier readings; `decide` drops the ones of drafts.
            self.opened.gates = before.gates

    def fail(self, error: BaseException) -> None:
        """Ends it for a reason."""
        self.error = error
        self.valid = max(0, self.end - self.prompt_length)

    def close(self) -> None:
        """Stops its hooks and captures."""
        if self.opened is not None:
            self.opened.close()

    def result(self, end: int | None = None) -> Result:
        """Returns its captures; may wait for a GPU.

        Args:
            end: position after the last one that counts.

        Raises:
            HookError: its plan could not be opened.
        """
        opened = self.opened
        if opened is None:
            msg = f"the plan of the request {self.name!r} was never opened"
            raise HookError(msg)
        error = self.error or opened.error
        if self.parent is None and end is None:
            return Result(opened.acts, error)
        return Result(ActivationCache(_Joined(self, opened, end)), error)


class _Joined(Mapping[str, Any]):
    """Activations of a request before a position; of a fork with its parent's."""

    def __init__(self, request: EngineRequest, opened: Request, end: int | None) -> None:
        # In order of position; none ran in both.
        self._parts = [(opened, range(request.start, sys.maxsize if end is None else end))]
        if request.inherited is not None:
            self._parts.insert(0, (request.inherited, range(request.start)))

    def positions(self, name: str) -> list[int]:
        """Returns the positions of a value's tokens, for `ActivationCache.positions`."""
        return [
            each for part, ran in self._parts for each in part.acts.positions(name) if each in ran
        ]

    def __getitem__(self, name: str) -> Any:
        parts = []
        for request, ran in self._parts:
            if name in request.acts:
                positions = request.acts.positions(name)
                rows = slice(*(bisect_left(positions, each) for each in (ran.start, ran.stop)))
                parts.append(map_tensors(itemgetter(rows), request.acts[name]))
        if not parts:
            raise KeyError(name)
        if len(parts) == 1:
            return parts[0]
        leaves = zip(*map(tensors_in, parts), strict=True)
        return map_tensors(lambda _tensor: torch.cat(next(leaves)), parts[-1])

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(name for request, _ in self._parts for name in request.acts))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def error_text(error: BaseException) -> str:
    """Returns an error as text, with the notes that name hook and module."""
    return "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])


def reason_of(error: BaseException) -> str:
    """Returns the reason of a failure, for the client of its request."""
    return f"the plan of the request failed: {error_text(error)}"

"""Plans of an engine's requests where its model runs, step by step."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
import weakref
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from ferrohook.engines.admission import wanted
from ferrohook.engines.finite import failure, is_finite
from ferrohook.engines.steps import Span, Step
from ferrohook.engines.wire import NAME, packed, spans_of
from ferrohook.errors import HookError
from ferrohook.plans.entries import HookEntry

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from torch import Tensor

    from ferrohook.engines.model.modules import CaptureEntry, ModuleTable
    from ferrohook.engines.planned import PlannedRequests, Result
    from ferrohook.engines.support import Capabilities
    from ferrohook.plans import Plan, Prepared

_LOG: Final = logging.getLogger("ferrohook")
PROBE: Final = f"{NAME}-self-test"
"""Begin of the ids of a self-test's requests."""


@dataclasses.dataclass
class EngineRequest:
    """A request that has a plan, until the engine has forgotten it."""

    name: str
    """As the steps call it."""
    digest: str = ""
    """Of its plan and vectors."""
    key: str = ""
    """Name of its captures."""
    prompt_length: int = 0
    prepared: Prepared | None = None
    """Its plan, rewritten; None if it could not be opened."""
    captures: list[CaptureEntry] = dataclasses.field(default_factory=list)
    """Captures of the plan."""
    end: int = 0
    """Position after its last row."""
    tokens: int = 0
    """Tokens that ran."""
    reason: str | None = None
    """Why its plan failed."""
    valid: int = 0
    """Tokens of its answer before the step in which it failed."""
    taken: bool = False
    """True once its client has its captures: nothing is kept of it."""

    @property
    def state(self) -> Literal["queued", "running", "ended"]:
        """Where it is."""
        if self.reason is not None:
            return "ended"
        return "running" if self.tokens else "queued"

    @property
    def row_bytes(self) -> int:
        """Bytes that it captures per token, at most."""
        return sum(each.row_bytes for each in self.captures)

    @property
    def changes(self) -> bool:
        """True if its plan may change rows."""
        entries = () if self.prepared is None else self.prepared.entries
        return any(isinstance(entry, HookEntry) for entry in entries)


class ServedModel(NamedTuple):
    """A loaded model whose requests may have plans."""

    modules: ModuleTable
    planned: PlannedRequests


class EngineWorker:
    """Plans of the requests of one model in an engine.

    An engine derives from it, and answers where its rows, positions and requests are: it calls
    `admit`, then `settle` and `running` for each forward, `check_rows` inside of that, and
    `reconcile` or `retire`.

    Args:
        capabilities: of the engine.
    """

    def __init__(self, capabilities: Capabilities) -> None:
        self._capabilities = capabilities
        self.refusal = "the model is not loaded"
        """Reason why no plan is served, while `served` is None."""
        self.served: ServedModel | None = None
        self.steps = 0
        """Forwards in which a request with a plan had rows."""
        self._requests: dict[str, EngineRequest] = {}
        self._captures: weakref.WeakKeyDictionary[Prepared, list[CaptureEntry]] = (
            weakref.WeakKeyDictionary()
        )
        self._spans: list[Span] = []
        self._from_cache: list[str] = []
        """Requests of the settled step that begin with keys and values of others."""
        self._failures: dict[str, str] = {}
        """Reasons of failures that the engine does not know yet, by request."""

    def loaded_model(self) -> ServedModel:
        """Returns the model.

        Raises:
            HookError: plans are refused, or it is not loaded.
        """
        if self.served is None:
            raise HookError(self.refusal)
        return self.served

    def refuse(self, reason: str) -> None:
        """Serves no plans from now on, for a reason."""
        if self.served is not None:
            self.served.planned.forget([*self._requests])
        self._requests.clear()
        self.served, self.refusal = None, reason
        _LOG.warning("ferrohook: %s", reason)

    # --- faults ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """Runs code that prepares for plans: if it fails, the engine serves without them."""
        try:
            yield
        except HookError as error:
            self.refuse(str(error))
        except Exception as error:  # noqa: BLE001 (the engine starts, whatever is wrong here)
            _LOG.debug("ferrohook failed at the start of the engine", exc_info=error)
            it = self._capabilities
            reason = f"{type(error).__name__}: {error}"
            self.refuse(f"no plans with this model in {it.engine} {it.version}: {reason}")

    def failing(self) -> contextlib.AbstractContextManager[None]:
        """Runs code of ours in a step, whose faults fail requests with plans, never the engine."""
        return guarded(self._fail_all)

    def _fail_all(self, error: Exception) -> None:
        for name in self._requests:
            self.fail(name, reason_of(error))

    def fail(self, name: str, reason: str, digest: str = "") -> None:
        """Ends a request whose plan failed, once.

        Args:
            name: of the request.
            reason: why it failed.
            digest: of its plan, if it was not admitted.
        """
        request = self._requests.setdefault(name, EngineRequest(name, digest))
        if request.state != "ended":
            request.valid = max(0, request.end - request.prompt_length)
            request.reason = self._failures[name] = reason

    # --- requests ----------------------------------------------------------------------------

    def admit(
        self, request_id: str, prompt_length: int, digest: str, read: Callable[[], Plan], key: str
    ) -> None:
        """Opens the plan of a request.

        Args:
            request_id: as the steps call it.
            prompt_length: tokens of its prompt.
            digest: of its plan and vectors.
            read: returns the plan, rewritten; called if it is not prepared.
            key: name of its captures.

        Raises:
            HookError: the plan cannot be served.
        """
        served = self.loaded_model()
        prepared = served.planned.plans.find(digest, lambda: served.modules.placed(read()))
        with served.planned.admitting(request_id, prepared):
            captures = self._captures.get(prepared)
            if captures is None:
                captures = self._captures[prepared] = served.modules.captures(prepared)
        self._requests[request_id] = EngineRequest(
            request_id, digest, key, prompt_length, prepared, captures
        )

    def reconcile(self, live: Collection[str]) -> None:
        """Closes the requests that no longer live in the engine."""
        for request_id in self._requests.keys() - live:
            self.retire(request_id)

    def retire(self, request_id: str) -> tuple[EngineRequest, Result] | None:
        """Closes a request; returns its captures, None for one without a plan."""
        request = self._requests.get(request_id)
        opened = request is not None and request.prepared is not None
        result = self.loaded_model().planned.retire(request_id) if opened else None
        self._requests.pop(request_id, None)
        return None if request is None or result is None else (request, result)

    # --- steps -------------------------------------------------------------------------------

    def settle(
        self, request_ids: Sequence[str | None], counts: Sequence[int], positions: Sequence[int]
    ) -> None:
        """Takes the row map of the next forward.

        Args:
            request_ids: in order of their rows; None for one without a plan.
            counts: rows of each.
            positions: position of the first row of each.
        """
        self._spans, self._from_cache = [], []
        if not self._requests:
            return
        spans, row = [], 0
        for request_id, count, position in zip(request_ids, counts, positions, strict=True):
            request = None if request_id is None else self._requests.get(request_id)
            rows = int(count)
            if request is not None and request.prepared is not None:
                first = int(position)
                if first not in {0, request.end}:
                    self._from_cache.append(request.name)
                request.end = first + rows
                request.tokens = max(request.tokens, request.end)
                spans.append(Span(request.name, row, rows, first, request.prompt_length))
            row += rows
        self._spans = spans

    @contextlib.contextmanager
    def running(self, rows: int) -> Iterator[None]:
        """Enters the batch of the settled step around its forward of `rows` rows."""
        if not self._requests:
            yield
            return
        around = contextlib.ExitStack()
        with self.failing():
            if self._spans:
                self.steps += 1
                step = Step(self._spans, rows)
                around.enter_context(self.loaded_model().planned.running(step))
        try:
            yield
        except BaseException:
            with self.failing():
                around.__exit__(*sys.exc_info())
            raise
        with self.failing():
            around.close()
        with self.failing():
            self._note_failures()
        self._spans = []
        with self.failing():
            self._agree()
        if self._from_cache:
            with self.failing():
                self._fail_sharers()

    def _note_failures(self) -> None:
        """Notes the requests whose plans failed in the step that ran."""
        for span in self._spans:
            error = self.loaded_model().planned.failure_of(span.request_id)
            if error is not None:
                self.fail(span.request_id, reason_of(error))

    def _agree(self) -> None:
        """Exchanges failures with other workers of the same rows."""

    def check_rows(self, hidden: Tensor, clean: Callable[[slice], object]) -> None:
        """Fails the requests whose plans made rows NaN or infinite, inside of `running`.

        Their writes of this step are zeroed: the next owner of the blocks reads them through a
        mask, and NaN times zero is NaN.

        Args:
            hidden: after the last norm of the model, where NaN and infinities have become NaN.
            clean: zeroes what some rows of the step wrote.
        """
        changed = [it for it in self._spans if self.loaded_model().planned.changes(it.request_id)]
        if not changed:
            return
        end = changed[-1].first_row + changed[-1].rows
        if is_finite(hidden[changed[0].first_row : end]):
            return
        for span in changed:
            rows = slice(span.first_row, span.first_row + span.rows)
            if not is_finite(hidden[rows]):
                self.loaded_model().planned.fail(span.request_id, failure("hidden states"))
                hidden[rows] = 0
                clean(rows)

    def _fail_sharers(self) -> None:
        """Fails requests that begin with keys and values of one whose plan failed.

        The scheduler shares them until it learns of the failure; they may lack the plan's changes.
        """
        digests = {it.digest for it in self._requests.values() if it.state == "ended"}
        for name in self._from_cache:
            if self._requests[name].changes and self._requests[name].digest in digests:
                msg = "its cached prefix may be that of a request whose plan failed: send it again"
                self.fail(name, reason_of(HookError(msg)))

    def failures(self) -> dict[str, str]:
        """Returns the requests that failed since it was called last, with the reasons."""
        if not self._failures:
            return {}
        failed, self._failures = self._failures, {}
        for request_id, reason in failed.items():
            level = logging.DEBUG if request_id.startswith(PROBE) else logging.ERROR
            _LOG.log(level, "ferrohook: request %s: %s", request_id, reason)
        return failed

    # --- captures ----------------------------------------------------------------------------

    def packed_captures(
        self,
        request: EngineRequest,
        result: Result,
        tokens: int,
        *,
        since: int = 0,
        partial: bool = False,
    ) -> bytes:
        """Packs the captures of a request, or why rows are missing.

        Args:
            request: the request.
            result: its captures.
            tokens: tokens of prompt and answer. Rows from the last one on are cut off: an
                engine that schedules ahead runs them for nothing.
            since: first position that is wanted.
            partial: pack none, instead of the reason, until all ran.
        """
        acts: dict[str, Tensor] = {}
        positions: dict[str, list[int]] = {}
        for capture in request.captures:
            mask = wanted(capture.at, request.prompt_length, tokens - 1)
            expected = [position for position in mask.nonzero()[:, 0].tolist() if position >= since]
            inside = {*expected}
            for name, place, heads in capture.values:
                found = result.positions(place)
                if missing := sorted(inside.difference(found)):
                    if result.error is not None:
                        return packed({}, {}, error=reason_of(result.error))
                    if partial:
                        return packed({}, {})
                    error = f"{name!r} never ran for the positions {spans_of(missing)}"
                    return packed({}, {}, error=error)
                if expected:
                    rows = result.acts[place]
                    if found != expected:
                        rows = rows[[row for row, each in enumerate(found) if each in inside]]
                    rows = rows.cpu().contiguous()
                    acts[name] = rows if heads is None else rows.unflatten(-1, heads)
                    positions[name] = expected
        return packed(acts, positions)


@contextlib.contextmanager
def guarded(fail: Callable[[Exception], None]) -> Iterator[None]:
    """Runs code of ours in an engine's step; a fault there is logged, and fails requests.

    Args:
        fail: takes the fault, and fails the requests that the code is for.
    """
    try:
        yield
    except Exception as error:  # noqa: BLE001 (the requests' failure: the engine goes on)
        _LOG.error(
            "ferrohook failed in a step of the engine: requests with plans fail", exc_info=error
        )
        fail(error)


def reason_of(error: BaseException) -> str:
    """Returns the reason of a failure, with the notes that name hook and module."""
    lines = [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]
    return f"the plan of the request failed: {'; '.join(lines)}"

"""Plans of an engine's requests where its model runs, step by step."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import torch

from ferrohook._core import to_device
from ferrohook.dictionaries.dictionary import Dictionary
from ferrohook.engines.admission import wanted
from ferrohook.engines.finite import WatchedRows, failure, is_drawable
from ferrohook.engines.harvest import Harvest, error_answer
from ferrohook.engines.planned import EnginePlans
from ferrohook.engines.requests import EngineRequest, Span, reason_of
from ferrohook.engines.wire import NAME, packed, spans_of
from ferrohook.errors import HookError, StoreError
from ferrohook.rows.batches import batch_of_step

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor, nn

    from ferrohook.engines.harvest import HarvestSettings
    from ferrohook.engines.model.modules import CaptureEntry, ModuleTable, Outcomes
    from ferrohook.engines.support import Capabilities
    from ferrohook.engines.wire import Upload
    from ferrohook.gates.state import Stopped
    from ferrohook.plans import Plan, Prepared
    from ferrohook.rows.batches import Batch, GatheredModule

_LOG: Final = logging.getLogger("ferrohook")
_MOST_PLANS: Final = 256
"""Plans that stay prepared without a request."""
PROBE: Final = f"{NAME}-self-test"
"""Begin of the ids of a self-test's requests."""


class MissingRowsError(HookError):
    """Rows that a request captures never ran."""


class ServedModel(NamedTuple):
    """A loaded model whose requests may have plans."""

    modules: ModuleTable
    plans: EnginePlans


class WrittenRows(NamedTuple):
    """Places where the rows of a step wrote to one tensor."""

    tensor: Tensor
    places: Tensor
    """Index in the first dimension, such as a block, for each row."""
    slots: tuple[int, Tensor] | None = None
    """Dimension of the rows in a place, and for each row the index in it; None if it has one."""

    @property
    def values(self) -> Tensor:
        """Values that the rows wrote, of shape (rows, ...)."""
        if self.slots is None:
            return self.tensor[self.places]
        dim, index = self.slots
        return self.tensor.movedim(dim, 1)[self.places, index]


Written: TypeAlias = "Callable[[slice | Tensor], Iterable[WrittenRows]]"
"""Returns where some rows of a step wrote keys and values."""


class StepCheck(NamedTuple):
    """Check of the rows of a step that plans changed."""

    watched: WatchedRows
    changed: list[tuple[EngineRequest, Span]]
    written: Written
    owners: set[str]
    """Requests that own what their rows wrote."""

    def clean(self, request: EngineRequest, span: Span) -> None:
        """Zeroes what rows of a request wrote if some are bad, once: then others may own it.

        Also those before the changed rows: attention reads later rows through a mask, and NaN times
        zero is NaN. So does the next owner.
        """
        if request.name not in self.owners:
            return
        self.owners.remove(request.name)
        if request.writes(span):
            is_bad = self.watched.is_bad(request.name)
            for each in self.written(slice(span.first_row, span.first_row + span.rows)):
                own = each.places if span.rows == 1 else each.places.unique()
                each.tensor[own] = each.tensor[own].masked_fill(is_bad, 0)


class EngineWorker:
    """Plans of the requests of one model in an engine.

    An engine derives from it, and answers where its rows, positions and requests are: it calls
    `admit`, then `settle` and `running` for each forward, `check_rows` inside of that, `sampling`
    and `check_logits` where it computes logits, `failures` after it, and `reconcile` or `retire`.
    One thread admits at a time; another one may run steps.

    Args:
        capabilities: of the engine.
        dim: dimension of the rows in its tensors.
    """

    def __init__(self, capabilities: Capabilities, dim: int = 0) -> None:
        self._capabilities = capabilities
        self._dim = dim
        self._other_dims: Mapping[nn.Module, int] = {}
        """Dimension of the rows in modules where it differs."""
        self.refusal = "the model is not loaded"
        """Reason why no plan is served, while `served` is None."""
        self.served: ServedModel | None = None
        self.steps = 0
        """Forwards in which a request with a plan had rows."""
        self.requests: dict[str, EngineRequest] = {}
        """Requests with a plan, by name, until the engine has forgotten them."""
        self._captures: weakref.WeakKeyDictionary[Prepared, list[CaptureEntry]] = (
            weakref.WeakKeyDictionary()
        )
        self._in_step: list[tuple[EngineRequest, Span]] = []
        """Requests of the settled step, and their rows."""
        self._sampled: list[tuple[EngineRequest, Span]] = []
        """Requests with gates that read logits, and their rows among the step's rows of logits."""
        self._drawn: list[tuple[EngineRequest, Span]] = []
        """Requests whose plans may change logits, and their rows among the step's logits."""
        self._sampling = 0
        """Number of the step's rows of logits: one for each request and each draft."""
        self._drafts: Mapping[str, Collection[int]] = {}
        """Drafts of the next step by request: tokens of its last rows, each of which may be
        rejected."""
        self._stopped: dict[str, Stopped] = {}
        """Ends of requests by a `stop` of their plans, in the last step."""
        self._retried: set[str] = set()
        """Requests for which the last step counts for nothing."""
        self._checks: deque[StepCheck] = deque()
        """Checks of steps whose outcome the host has not read yet, in their order."""
        self._harvest: Harvest | None = None
        """Run whose prompts are stored here."""
        self._failed: list[EngineRequest] = []
        """Requests whose failures the engine does not know yet."""

    def loaded_model(self) -> ServedModel:
        """Returns the model.

        Raises:
            HookError: plans are refused, or it is not loaded.
        """
        if self.served is None:
            raise HookError(self.refusal)
        return self.served

    def serve(self, model: nn.Module, modules: ModuleTable) -> None:
        """Serves plans for a model from now on."""
        self._dim, self._other_dims = modules.dim, modules.other_dims(model)
        plans = EnginePlans(model, dim=modules.dim, size=_MOST_PLANS)
        self.served = ServedModel(modules, plans)

    def admit_proved(self, outcomes: Outcomes) -> None:
        """Serves from now on only what a self-test found to be right, see `ModuleTable.proved`."""
        if self.served is not None:
            self.served.plans.clear()  # the test's, with vectors as large as the model's
            self.served = self.served._replace(modules=self.served.modules.proved(outcomes))

    def refuse(self, reason: str) -> None:
        """Serves no plans from now on, for a reason."""
        for request in self.requests.values():
            request.close()
        self.requests.clear()
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
            self.refuse(
                f"plans are not supported with this model in {it.engine} {it.version}: {reason}"
            )

    def failing(
        self, requests: Iterable[EngineRequest] | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Runs code of ours in a step, whose faults fail requests with plans, never the engine.

        Args:
            requests: the ones that the code is for; None for all with a plan.
        """
        return _Failing(self, requests)

    def fail(self, request: EngineRequest, error: BaseException) -> None:
        """Ends a request whose plan failed, once."""
        if request.state != "ended":
            request.fail(error)
            self._failed.append(request)

    def failures(self) -> dict[str, str]:
        """Returns the requests that failed since it was called last, with the reasons."""
        failed, self._failed = self._failed, []
        for request in failed:
            level = logging.DEBUG if request.name.startswith(PROBE) else logging.ERROR
            text = "ferrohook: request %s: %s"
            _LOG.log(level, text, request.name, request.reason, exc_info=request.error)
        return {request.name: request.reason for request in failed}

    def stops(self) -> dict[str, Stopped]:
        """Returns the requests that a `stop` of their plans ended in the last step.

        Unless that is at a draft, and the draft is rejected.
        """
        stopped, self._stopped = self._stopped, {}
        return stopped

    def retries(self) -> set[str]:
        """Returns the requests that have to run again, as if the last step had not been.

        They failed, perhaps because of drafts that are rejected: the first step runs without.
        """
        retried, self._retried = self._retried, set()
        return retried

    # --- requests ----------------------------------------------------------------------------

    def admit(  # noqa: PLR0913 (of which each is one fact about the request)
        self,
        request_id: str,
        prompt_length: int,
        digest: str,
        read: Callable[[], Plan],
        key: str,
        *,
        parent: EngineRequest | None = None,
    ) -> None:
        """Opens the plan of a request.

        Args:
            request_id: as the steps call it.
            prompt_length: tokens of its prompt.
            digest: of its plan and the uploads that it names.
            read: returns the plan, rewritten; called if it is not prepared.
            key: name of its captures.
            parent: request whose rows stand for those before its own first one.

        Raises:
            HookError: the plan cannot be served.
        """
        self.check_free([request_id])
        modules, plans = self.loaded_model()
        prepared = plans.find(digest, lambda: modules.placed(read()))
        captures = self._captures.get(prepared)
        if captures is None:
            captures = self._captures[prepared] = modules.captures(prepared)
        request = EngineRequest(request_id, prepared, prompt_length, key, captures, parent)
        request.reads_logits = modules.reads_logits(prepared)
        self.requests[request_id] = request

    def forget(self, upload: Upload | None) -> None:
        """Drops what is kept of a discarded upload beside the requests that run."""
        if isinstance(upload, Dictionary) and self.served is not None:
            self.served.plans.forget(upload)

    def check_free(self, names: Iterable[str | None]) -> None:
        """Checks that no request with a plan has one of these names.

        Raises:
            HookError: one has.
        """
        for name in names:
            if name in self.requests:
                msg = f"a request with a plan already has the id {name!r}"
                raise HookError(msg)

    def reconcile(self, live: Collection[str]) -> None:
        """Closes the requests that no longer live in the engine."""
        self.read_checks()
        for request_id in self.requests.keys() - live:
            self.retire(request_id)

    def retire(self, request_id: str) -> EngineRequest | None:
        """Closes a request and returns it, its captures still readable; None without a plan."""
        request = self.requests.pop(request_id, None)
        if request is not None:
            self._drawn = [each for each in self._drawn if each[0] is not request]
            request.close()
        return request

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
        self._in_step, self._stopped, self._retried = [], {}, set()
        self._sampled, self._drawn, self._sampling = [], [], 0
        if not self.requests:
            return
        in_step, row = [], 0
        steps = zip(request_ids, counts, positions, strict=True)
        for request_id, rows, first in steps:
            request = None if request_id is None else self.requests.get(request_id)
            drafts = len(self._drafts.get(request_id or "", ())) if self._drafts else 0
            if request is not None and request.opened is not None and not request.waits:
                name, prompt = request.name, request.prompt_length
                request.run(first, rows, drafts)
                in_step.append((request, Span(name, row, rows, first, prompt)))
                if request.reads_logits or request.changes:
                    last = first + rows - 1 - drafts
                    drawn = request, Span(name, self._sampling, 1 + drafts, last, prompt)
                    if request.reads_logits:
                        self._sampled.append(drawn)
                    if request.changes:
                        self._drawn.append(drawn)
            row += rows
            self._sampling += 1 + drafts
        self._in_step = in_step

    @contextlib.contextmanager
    def running(self, rows: int) -> Iterator[None]:
        """Enters the batch of the settled step around its forward of `rows` rows."""
        if not self.requests:
            yield
            return
        if self._in_step:
            self.steps += 1
        with self._serving(self._in_step, rows):
            yield
        self._in_step = []
        with self.failing():
            self._agree()

    @contextlib.contextmanager
    def sampling(self, rows: int) -> Iterator[None]:
        """Enters a batch around the first call that computes `rows` rows of logits of a step."""
        sampled, self._sampled = self._sampled, []
        if sampled and rows != self._sampling:
            msg = (
                f"a gate cannot read logits where the engine computes {rows} rows of them for "
                f"{self._sampling} tokens"
            )
            for request, _ in sampled:
                self.fail(request, HookError(msg))
            sampled = []
        if not sampled:
            yield
            return
        with self._serving(sampled, rows, logits=True):
            yield

    @contextlib.contextmanager
    def _serving(
        self, members: Sequence[tuple[EngineRequest, Span]], rows: int, *, logits: bool = False
    ) -> Iterator[None]:
        """Enters a batch of requests, and notes which it ended; `logits`: its rows are logits."""
        batch: Batch | None = None
        failing = self.failing([request for request, _ in members])
        with failing:
            batch = self._entered(members, rows, logits=logits)
        try:
            yield
        except BaseException:
            if batch is not None:
                with failing:
                    batch.__exit__(*sys.exc_info())
            raise
        if batch is not None:
            with failing:
                batch.__exit__(None, None, None)
        with failing:
            for request, span in members:
                if (error := request.failure) is not None:
                    # Logits that were read are not computed again.
                    if request.reads_logits or not self._runs_again(request):
                        self.fail(request, error)
                elif (
                    (stopped := request.stopped) is not None
                    and request.name not in self._retried
                    and stopped.position in range(span.position, span.position + span.rows)
                ):
                    self._stopped[request.name] = stopped

    def _runs_again(self, request: EngineRequest) -> bool:
        """Has a request with drafts in the step run again, but not forever: once for each token.

        An engine may pad even that run with drafts: vLLM does so with prompts of one token.
        """
        if request.name not in self._retried:
            if not request.drafts or request.end - request.drafts == request.retried:
                return False
            request.wait()
            self._retried.add(request.name)
        return True

    def _entered(
        self, in_batch: Sequence[tuple[EngineRequest, Span]], rows: int, *, logits: bool
    ) -> Batch | None:
        """Enters a batch; requests that cannot be in it fail, perhaps all."""
        while opened := [
            (each, span)
            for request, span in in_batch
            if request.failure is None and (each := request.opened) is not None
        ]:
            try:
                dim, gathered = (0, []) if logits else (self._dim, self._gathered(rows))
                batch = batch_of_step(opened, dim, rows, gathered)
                batch.__enter__()
            except Exception as error:  # noqa: BLE001 (the requests' failure: the engine goes on)
                members = [request for request, _ in in_batch if request.failure is None]
                closed = [request for request in members if request.closed]
                for request in closed:
                    msg = "the plan of the request was closed while it ran"
                    self.fail(request, HookError(msg))
                for request in () if closed else members:
                    self.fail(request, error)
            else:
                return batch
        return None

    def _gathered(self, rows: int) -> list[GatheredModule]:
        """Returns the modules of another layout in a step of `rows` rows, see `batch_of_step`."""
        if not self._other_dims:
            return []
        every = torch.arange(rows, device="cpu")
        return [(module, every, dim) for module, dim in self._other_dims.items()]

    def _agree(self) -> None:
        """Exchanges failures with other workers of the same rows."""

    def check_rows(self, hidden: Tensor, written: Written, *, later: bool = False) -> None:
        """Fails the requests whose plans made rows NaN or infinite, inside of `running`.

        All that their rows of the step wrote is zeroed, see `StepCheck.clean`. An engine therefore
        shares blocks of such a step once it has been checked. With drafts in the step it is not
        known yet which rows count: the request runs again.

        Args:
            hidden: after the last norm of the model, where NaN and infinities have become NaN. Bad
                numbers become zeros.
            written: where rows wrote keys and values.
            later: leave the outcome to `read_checks` if each request has one row.
        """
        changed = [each for each in self._in_step if each[0].changes]
        if not changed:
            return
        watched = WatchedRows([span for _, span in changed])
        cleaned = watched.clean(hidden, 0, "hidden states")
        if cleaned is not hidden:
            hidden.copy_(cleaned)
        hiding = [span for request, span in changed if request.hides and request.writes(span)]
        if hiding:  # their hidden states may not show what they wrote
            rows = [span.first_row + row for span in hiding for row in range(span.rows)]
            owners = [span.request_id for span in hiding for _ in range(span.rows)]
            places = written(to_device(torch.tensor(rows, device="cpu"), hidden.device))
            watched.watch("keys and values", owners, (each.values for each in places))
        if not watched.found:
            return
        watched.send()
        self._checks.append(StepCheck(watched, changed, written, {it.name for it, _ in changed}))
        if not later or any(span.rows > 1 for _, span in changed):
            self.read_checks(wait=True)

    def check_logits(self, logits: Tensor, *, later: bool = False) -> Tensor:
        """Fails the requests whose plans leave no token to draw: a sampler may raise, for all.

        Args:
            logits: of the step, by the first call that computes some: (rows, vocabulary).
            later: leave the outcome to `read_checks`.

        Returns:
            the logits, with zeros in rows of these requests.
        """
        changed, self._drawn = self._drawn, []
        if not changed or len(logits) != self._sampling or is_drawable(logits):
            return logits  # of other rows, or as they may be
        owners = [""] * len(logits)
        for request, span in changed:
            owners[span.first_row : span.first_row + span.rows] = [request.name] * span.rows
        watched = WatchedRows([span for _, span in changed])
        cleaned = watched.clean_logits(logits[None], owners)[0]
        watched.send()
        self._checks.append(StepCheck(watched, changed, _wrote_nothing, set()))
        if not later:
            self.read_checks(wait=True)
        return cleaned

    def sent_checks(self) -> Callable[[], dict[str, str]] | None:
        """Returns what waits for the outcomes of steps: the requests that fail, and why.

        None if all are known. Called on any thread.
        """
        if not self._checks:
            return None
        sent = [each.watched for each in self._checks]
        return lambda: {
            name: reason_of(failure(what)) for each in sent for name, what in each.lost().items()
        }

    def read_checks(self, *, wait: bool = False) -> None:
        """Fails the requests with bad rows in steps whose outcome is known.

        Args:
            wait: wait for the outcomes of all steps.
        """
        while self._checks and (wait or self._checks[0].watched.arrived):
            check = self._checks.popleft()
            lost = check.watched.lost()
            for request, span in check.changed:
                if request.name not in lost:
                    continue
                # Else it had ended, and the step ran for nothing.
                if self.requests.get(request.name) is request and not self._runs_again(request):
                    self.fail(request, failure(lost[request.name]))
                check.clean(request, span)

    def release(self, owners: Collection[str]) -> None:
        """Cleans what steps with an unknown outcome wrote, before others get the blocks.

        Args:
            owners: requests that keep the blocks that they had in the steps before.
        """
        for check in self._checks:
            for request, span in check.changed:
                if request.name not in owners:
                    check.clean(request, span)

    # --- captures ----------------------------------------------------------------------------

    def captured(
        self, request: EngineRequest, tokens: int, *, since: int = 0, whole: bool = True
    ) -> tuple[dict[str, Tensor], dict[str, list[int]]]:
        """Returns the captures of a request and the positions of their rows, by name.

        Args:
            request: the request.
            tokens: tokens of prompt and answer. Rows from the last one on are cut off: an
                engine that schedules ahead runs them for nothing.
            since: first position that is wanted.
            whole: raise if rows are missing, instead of leaving out their value.

        Raises:
            HookError: rows are missing.
        """
        result = request.result()
        acts: dict[str, Tensor] = {}
        positions: dict[str, list[int]] = {}
        for capture in request.captures:
            mask = wanted(capture.at, request.prompt_length, tokens - 1)
            expected = [position for position in mask.nonzero()[:, 0].tolist() if position >= since]
            inside = {*expected}
            for name, place, heads in capture.values:
                found = result.acts.positions(place)
                if missing := sorted(inside.difference(found)):
                    failed = result.error
                    if failed is None and request.parent is not None:
                        failed = request.parent.failure
                    if failed is not None:
                        raise HookError(reason_of(failed))
                    if not whole:
                        continue
                    msg = f"{name!r} never ran for positions {spans_of(missing)}"
                    raise MissingRowsError(msg)
                if expected:
                    rows = result.acts[place]
                    if found != expected:
                        rows = rows[[row for row, each in enumerate(found) if each in inside]]
                    rows = rows.cpu().contiguous()
                    acts[name] = rows if heads is None else rows.unflatten(-1, heads)
                    positions[name] = expected
        return acts, positions

    def start_harvest(self, settings: HarvestSettings) -> dict[str, Any]:
        """Stores the captures of a run's requests from now on; answers as `finish_harvest`."""
        self.finish_harvest()
        try:
            self._harvest = Harvest(settings)
        except (HookError, StoreError) as error:
            return error_answer(error)
        return {}

    def finish_harvest(self) -> dict[str, Any]:
        """Stores the rest of the run; returns its numbers or its error, and nothing without one."""
        harvest, self._harvest = self._harvest, None
        if harvest is None:
            return {}
        harvest.close()
        if harvest.error is not None:
            return error_answer(harvest.error)
        return {"taken": harvest.taken, "most_bytes": harvest.most_bytes}

    def _store(self, harvest: Harvest, request: EngineRequest) -> None:
        """Stores the captures of a request; if that fails, the run's other requests fail."""
        harvest.take(request, functools.partial(self.captured, request))
        self._check_harvest(harvest)

    def _check_harvest(self, harvest: Harvest) -> None:
        if (error := harvest.error) is not None:
            for other in self.requests.values():
                if harvest.owns(other.name):
                    self.fail(other, error)

    def packed_captures(
        self,
        request: EngineRequest,
        tokens: int,
        *,
        since: int = 0,
        partial: bool = False,
        whole: bool = True,
    ) -> bytes:
        """Packs what `captured` returns, or why rows are missing.

        Args:
            request: the request.
            tokens: tokens of prompt and answer.
            since: first position that is wanted.
            partial: pack none, instead of the reason, until all ran.
            whole: see `captured`.
        """
        try:
            return packed(*self.captured(request, tokens, since=since, whole=whole))
        except MissingRowsError as error:
            return packed({}, {}, error=None if partial else str(error))
        except HookError as error:
            return packed({}, {}, error=str(error))


def _wrote_nothing(_rows: slice | Tensor) -> Iterable[WrittenRows]:
    """Is where logits wrote keys and values."""
    return ()


class _Failing(NamedTuple):
    """See `EngineWorker.failing`: a step enters it faster than a generator."""

    worker: EngineWorker
    requests: Iterable[EngineRequest] | None

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> bool:
        if not isinstance(error, Exception):
            return False
        _LOG.error(
            "ferrohook failed in a step of the engine, so requests with plans fail", exc_info=error
        )
        worker, requests = self
        for request in [*worker.requests.values()] if requests is None else requests:
            worker.fail(request, error)
        return True

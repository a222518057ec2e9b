"""Worker: the plans of a manager's requests, step by step."""

# The engine's loop runs in its own thread: `prepare_next_batch` settles which requests have
# which rows, `_generation_step` runs the forward, `update_batch` hands out tokens. Asynchronous
# batching prepares step n + 1 while n computes, but launches each step right after its own
# preparation: `_generation_step` reads the map of the forward that it runs. Methods are replaced
# on instances only (manager, output router, cache), and given back by `close`.

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus
from transformers.generation.continuous_batching.utils import stream_context

from ferrohook.attach.attention import pass_ahead
from ferrohook.engines.finite import WatchedRows, failure, is_drawable
from ferrohook.engines.planned import EnginePlans
from ferrohook.engines.requests import EngineRequest
from ferrohook.engines.transformers.steps import ROWS, check_row_map, read_step
from ferrohook.engines.transformers.supported import CAPABILITIES
from ferrohook.engines.worker import EngineWorker
from ferrohook.errors import HookError
from ferrohook.util.tensors import map_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from torch import Tensor

    from ferrohook.engines.transformers.steps import StepRows
    from ferrohook.plans import Plan, Prepared
    from ferrohook.rows.batches import GatheredModule


class Prompt(list[int]):
    """Tokens on their way to `add_request`, with the plan of their request."""

    def __init__(self, tokens: Iterable[int], plan: Plan | Prepared | None) -> None:
        super().__init__(tokens)
        self.plan = plan


class ManagerWorker(EngineWorker):
    """Plans of the requests of one manager. Any thread adds them, the engine's runs them.

    Args:
        manager: whose loop is started or not.

    Raises:
        HookError: the self-test failed.
    """

    def __init__(self, manager: Any) -> None:
        super().__init__(CAPABILITIES, ROWS)
        self._manager = manager
        self._asynchronous = manager.continuous_batching_config.use_async_batching
        head = manager.model.get_output_embeddings()
        self._head = [] if head is None else [*head.modules()]
        self._lock = threading.RLock()
        """Held while a request with a plan is submitted."""
        self._submitting: Collection[str] = ()
        """Requests that the engine may not know yet."""
        self._step: StepRows
        """Rows of the step that runs."""
        self._watched: WatchedRows | None = None
        """Rows that plans may make NaN or infinite, of the step that runs or is given out next."""
        self._in_flight: WatchedRows | None = None
        """Those of the step that runs while the one before is given out."""
        self._late: list[EngineRequest] = []
        """Requests that failed in that step: the one before may end them as they should."""
        self._replaced: list[tuple[weakref.ref[Any], str, Any]] = []
        self.closed = False
        with self._paused():  # an engine that runs has its processor by then
            if manager.batch_processor is None:
                # As `warmup` does; the engine's thread takes it over.
                manager.batch_processor = manager._create_batch_processor()
            if manager.model.device.type == "cuda":
                # The engine zeroes its buffers on one stream, and writes them on others.
                torch.cuda.synchronize(manager.model.device)
            values, self._cached = check_row_map(manager, self._head)
            self._other_dims = values.other_dims
            self.plans = EnginePlans(manager.model, values, ROWS)
            self._hold()

    def _paused(self) -> contextlib.AbstractContextManager[None]:
        return self._manager.pause() if self._manager.is_running() else contextlib.nullcontext()

    # --- methods of the manager ---------------------------------------------------------------

    def _hold(self) -> None:
        """Replaces methods on the instances of the manager and its parts."""
        manager = self._manager
        self._replace(manager, "add_request", self._add_request)
        self._replace(manager, "_create_batch_processor", self._create_batch_processor)
        self._replace(manager, "_generation_step", self._generation_step)
        self._replace(manager, "_generation_loop_body", self._generation_loop_body)
        self._replace(manager.output_router, "deliver", self._deliver)
        self._replace(manager.output_router, "deliver_batch", self._deliver_batch)
        self._hold_processor(manager.batch_processor)

    def _hold_processor(self, processor: Any) -> None:
        cache = processor.cache
        if "update" not in vars(cache):  # else it is taken up again
            if self._manager.model.dtype == torch.float16:
                inputs = processor.inputs_and_outputs
                self._replace(inputs, "get_model_kwargs", self._get_model_kwargs)
            self._replace(processor.model_runner, "_sample", self._sample)
            self._replace(cache, "update", self._update)
            self._replace(cache, "search_prefix_match", self._search_prefix_match)
            self._replace(cache, "mark_complete_blocks", self._mark_complete_blocks)

    def _replace(self, owner: Any, name: str, ours: Callable[..., Any]) -> None:
        method = getattr(type(owner), name)
        reference = weakref.ref(owner)

        @functools.wraps(method)
        def replaced(*args: Any, **options: Any) -> Any:
            # Not a bound method: a cycle would keep the cache's memory until a collection.
            return ours(functools.partial(method, reference()), *args, **options)

        setattr(owner, name, replaced)
        self._replaced.append((reference, name, replaced))

    def _create_batch_processor(self, original: Callable[[], Any]) -> Any:
        processor = original()
        self._hold_processor(processor)
        return processor

    # --- requests ----------------------------------------------------------------------------

    def check_open(self) -> None:
        """Refuses requests once it is closed.

        Raises:
            HookError: it is closed.
        """
        if self.closed:
            msg = "the engine was detached: attach it again"
            raise HookError(msg)

    def _add_request(
        self,
        original: Callable[..., str | None],
        input_ids: Sequence[int],
        request_id: str | None = None,
        *args: Any,
        **options: Any,
    ) -> str | None:
        plan = input_ids.plan if isinstance(input_ids, Prompt) else None
        if plan is None:
            self.check_free([request_id])
            return original(input_ids, request_id, *args, **options)
        prepared, manager = self.plans.serve(plan), self._manager
        if request_id is None:
            with manager._request_lock:
                request_id = f"req_{manager._request_counter}"
                manager._request_counter += 1
        parent = EngineRequest(request_id, prepared, len(input_ids))
        requests = {request_id: parent}
        for child in _children(request_id, manager.num_return_sequences - 1):
            requests[child] = EngineRequest(child, prepared, len(input_ids), parent=parent)
        added = None
        with self._lock:
            self.check_open()  # under the lock: `close` ends the requests that it finds
            self.check_free(requests)
            self._submitting = requests.keys()
            try:
                self.requests |= requests
                added = original(input_ids, request_id, *args, **options)
            finally:
                if added is None:
                    for name in requests:
                        self.retire(name)
                self._submitting = ()
        return added

    def close(self) -> None:
        """Gives the methods back; idempotent. Requests that still run fail."""
        with self._lock, self._paused():
            if self.closed:
                return
            self.closed = True
            for request in self.requests.values():
                self.fail(request, HookError("the engine was detached while it ran"))
            self._end_failed()
            for reference, name, ours in self._replaced:
                owner = reference()
                if owner is not None and vars(owner).get(name) is ours:
                    delattr(owner, name)

    # --- steps -------------------------------------------------------------------------------

    def _generation_loop_body(
        self, original: Callable[..., bool], *args: Any, **options: Any
    ) -> bool:
        goes_on = original(*args, **options)
        if self._in_flight is not None:
            self._watched, self._in_flight = self._in_flight, None
        with self.failing():
            late, self._late = self._late, []
            self._failed += [each for each in late if each.name in self.requests]
            if self.requests:
                self._forget_gone()
        return goes_on

    def _generation_step(self, original: Callable[[], None]) -> None:
        before, self._watched = self._watched, None
        if not self.requests:
            original()
            return
        rows = 0
        with self.failing():
            step = self._step = read_step(self._manager.batch_processor)
            rows = step.rows
            self.settle(step.requests, step.counts, step.positions)
            self._drawn = []  # `_sample` looks at the logits
            if changed := [span for request, span in self._in_step if request.changes]:
                self._watched = WatchedRows(changed)
        in_step = [request for request, _ in self._in_step]
        with self.running(rows):
            original()
        if self._asynchronous:
            self._in_flight, self._watched = self._watched, None
            self._late, self._failed = self._failed, []
        with self.failing(in_step):
            # Asynchronous: the step before is given out now, and nothing waits for this one.
            self._fail_lost(before if self._asynchronous else self._watched)
        self._end_failed()

    def _gathered(self, rows: int) -> list[GatheredModule]:
        processor = self._manager.batch_processor
        gathered = super()._gathered(rows)
        if processor.model_runner.supports_logits_to_keep(self._manager.model):
            head = torch.tensor(self._step.head, device="cpu")
            gathered += [(module, head, None) for module in self._head]
        return gathered

    # The keys of all requests of a step stand in one tensor. A mask hides other requests' keys, but
    # NaN plus a mask is NaN, so watched rows are cleaned before others read them. In float16 large
    # scores exceed a mask of the lowest number, so masks are minus infinity there.

    def _get_model_kwargs(
        self, original: Callable[..., dict[str, Any]], *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        made = original(*args, **kwargs)
        if self._watched is not None:
            stream = self._manager.batch_processor.inputs_and_outputs.compute_stream
            with self._failing_in_step(), stream_context(stream):
                made["attention_mask"] = map_tensors(_hiding, made["attention_mask"])
        return made

    def _sample(self, original: Callable[..., None], scores: Tensor, *others: Any) -> None:
        if self._watched is not None:
            with self._failing_in_step():
                if not is_drawable(scores):  # drawing from NaN would raise, for all
                    scores = self._watched.clean_logits(scores, self._step.drawn)
                self._watched.send()
        with self._failing_in_step():
            scores = self._ending(scores)
        original(scores, *others)

    def _ending(self, scores: Tensor) -> Tensor:
        """Returns logits from which requests that their plans stop draw the end of a sequence."""
        stopped = {it.name: it for it, _ in self._in_step if it.stopped is not None}
        if not stopped:
            return scores
        for row, (owner, ends) in enumerate(zip(self._step.drawn, self._step.ends, strict=True)):
            if owner not in stopped:
                continue
            if not ends:
                msg = "the model has no end-of-sequence token with which stop() could end it"
                self.fail(stopped[owner], HookError(msg))
                continue
            end = torch.full_like(scores[0, row], -torch.inf)
            end[ends[0]] = 0
            scores = scores.index_copy(
                1, torch.tensor([row], device=scores.device), end[None, None]
            )
        return scores

    def _failing_in_step(self) -> contextlib.AbstractContextManager[None]:
        return self.failing([request for request, _ in self._in_step])

    def _update(
        self,
        original: Callable[..., Any],
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        kwargs: dict[str, Any],  # of the attention function, updated in place
    ) -> Any:
        """Passes a layer's keys and values on to the cache."""
        keys, values = key_states, value_states
        try:  # not `failing`: each layer of each step comes here
            module = self._cached.get(layer_idx)
            if module is not None:
                keys, values = pass_ahead(module, keys, values, kwargs)
            if self._watched is not None:
                what = f"keys or values of layer {layer_idx}"
                keys = self._watched.clean(keys, 2, what)
                values = self._watched.clean(values, 2, what)
        except Exception:
            with self.failing():
                raise
        return original(keys, values, layer_idx, kwargs=kwargs)

    def _search_prefix_match(
        self, original: Callable[..., int], request_id: str, prompt_ids: list[int]
    ) -> int:
        # With a plan none are read: its hooks have to fire at all positions.
        return 0 if request_id in self.requests else original(request_id, prompt_ids)

    def _mark_complete_blocks(
        self, original: Callable[..., None], state: Any, complete_blocks: dict[str, int]
    ) -> None:
        request = self.requests.get(state.request_id)
        if request is None or not (request.changes or request.state == "ended"):
            original(state, complete_blocks)

    # --- ends --------------------------------------------------------------------------------

    def _forget_gone(self) -> None:
        """Ends failed requests, then drops requests that the engine no longer knows."""
        self._end_failed()
        # Before the look at the engine: a request that is submitted meanwhile may be missing there.
        known = {*self.requests}.difference(self._submitting)
        states = self._states()
        forks = (_children(name, state.num_children) for name, state in states.items())
        for name in known.difference(states, *forks):
            self.retire(name)

    def _states(self) -> dict[str, Any]:
        """Returns the requests that the engine knows, by id."""
        processor, queue = self._manager.batch_processor, self._manager.input_queue
        with queue.mutex:
            states = [*queue.queue]
        if processor is not None:
            states += processor.scheduler.active_requests.values()
            states += processor.scheduler.waiting_requests.values()
        return {state.request_id: state for state in states}

    def _fail_lost(self, watched: WatchedRows | None) -> None:
        """Fails the requests whose rows in a step were NaN or infinite."""
        for name, what in ({} if watched is None else watched.lost()).items():
            if (request := self.requests.get(name)) in self._late:
                self._late.remove(request)
                self._failed.append(request)
            elif request is not None:
                self.fail(request, failure(what))

    def _end_failed(self) -> None:
        """Ends the requests that failed, and their forks to come."""
        while self._failed:
            states = self._states()
            for name in self.failures():
                with self.failing():
                    self._end(self.requests[name], states)

    def _end(self, request: EngineRequest, states: Mapping[str, Any]) -> None:
        manager, name = self._manager, request.name
        own = state = states.get(name)
        if own is None and request.parent is not None:
            state = states.get(request.parent.name)
        output: Any = GenerationOutput(name) if state is None else state.to_generation_output()
        output.request_id = name
        _give(output, request)
        type(manager.output_router).deliver(manager.output_router, output)
        if manager.batch_processor is not None:  # before the next step is scheduled
            manager.batch_processor.scheduler.set_request_cancellation(name)
        if own is None:  # it has not come so far
            manager.cancel_request(name)
        else:
            for child in _children(name, own.num_children):
                if (fork := self.requests.get(child)) is not None:
                    self.fail(fork, output.hook_error)
            if self._asynchronous:
                own._status = RequestStatus.FINISHED  # its row in flight is skipped

    def _deliver(self, original: Callable[[Any], None], output: Any) -> None:
        if self._complete(output):
            original(output)

    def _deliver_batch(self, original: Callable[[Any], None], outputs: list[Any]) -> None:
        original([output for output in outputs if self._complete(output)])

    def _complete(self, output: Any) -> bool:
        """Gives an output what its request captured; returns False if that has ended before."""
        with self.failing():
            watched, self._watched = self._watched, None
            self._fail_lost(watched)
        self._end_failed()
        request = self.requests.get(output.request_id)
        late = request in self._late
        if request is not None and request.state == "ended" and not late:
            return False
        ended = end = None
        if request is not None and output.is_finished():
            ended = self.requests.pop(request.name)
            if self._asynchronous:
                # The last token does not count: it runs if the next step was prepared before.
                end = len(output.prompt_ids) + len(output.generated_tokens) - 1
        _give(output, ended, end, late=late)
        return True


def _give(
    output: Any, request: EngineRequest | None, end: int | None = None, *, late: bool = False
) -> None:
    """Closes a request that ends; adds its activations before a position and its failure.

    Args:
        output: of the engine.
        request: of the output; None to add nothing.
        end: the position.
        late: whether the failure came after it.
    """
    output.acts, output.hook_error = {}, None
    if request is None:
        return
    try:
        request.close()
        output.acts, error = request.result(end)
        output.hook_error = None if late else error
    except Exception as fault:  # noqa: BLE001 (the request's failure: the engine goes on)
        output.hook_error = request.error or fault
    if output.hook_error is not None:
        output.status = RequestStatus.FAILED
        output.error = f"{type(output.hook_error).__name__}: {output.hook_error}"


def _children(request_id: str, number: int) -> list[str]:
    """Returns the ids that the engine gives to forks of a request."""
    return [f"{request_id}__child#{child}" for child in range(number)]


def _hiding(mask: Tensor) -> Tensor:
    """Returns an attention mask whose lowest numbers are minus infinity."""
    return mask.masked_fill(mask == torch.finfo(mask.dtype).min, -torch.inf)

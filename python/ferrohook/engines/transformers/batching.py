"""Plans for the requests of transformers' continuous batching.

Examples:
    >>> outputs = generate_batch(model, prompts, plans=[plan, None])
    >>> outputs["req_0"].generated_tokens, outputs["req_0"].acts["model.layers.3"]

    >>> with model.continuous_batching_context_manager(**configs) as manager:
    ...     with attach(manager) as attached:
    ...         attached.add_request(ids, plan=plan)
    ...         for output in attached:
    ...             output.acts
"""

# The engine's loop runs in its own thread: `prepare_next_batch` settles which requests have
# which rows, `_generation_step` runs the forward, `update_batch` hands out tokens. Asynchronous
# batching prepares step n + 1 while n computes, but launches each step right after its own
# preparation: `_generation_step` reads the map of the forward that it runs. Methods are replaced
# on instances only (manager, output router, cache), and given back by `close`.

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any, Final, Self

import torch
import transformers
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from ferrohook.attach.attention import pass_ahead
from ferrohook.engines.finite import WatchedRows, failure
from ferrohook.engines.model.modules import described
from ferrohook.engines.planned import NO_PATTERN, EnginePlans, PlannedRequests
from ferrohook.engines.support import Capabilities
from ferrohook.engines.transformers.steps import (
    ROWS,
    check_row_map,
    head_rows,
    read_step,
    requests_in,
)
from ferrohook.engines.worker import guarded
from ferrohook.errors import HookError
from ferrohook.quantity import quantities
from ferrohook.util.arguments import expect_module
from ferrohook.util.swallowed import refuse_swallowed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor, nn

    from ferrohook.engines.steps import Step
    from ferrohook.plans import Plan, Prepared
    from ferrohook.rows.batches import GatheredModule

CAPABILITIES = Capabilities(
    engine="transformers",
    version=transformers.__version__,
    tried=("5.19", "5.23", "5.24"),
    served=(
        "python hooks",
        "interventions",
        "captures",
        "positions",
        "chunked prefill",
        "prefix sharing",
        "preemption",
        "forks",
        "cancelling",
        "streaming",
    ),
    refused={
        "CUDA graphs": (
            "a replayed graph runs no hooks; pass ContinuousBatchingConfig(use_cuda_graph=False)"
        ),
        "compilation": (
            "hooks that come after a compilation may not fire; pass neither varlen_compile_config, "
            "decode_compile_config nor default_compile_level"
        ),
        "tensor parallelism": "it was not tried: a module's tensors may be shards",
        "float16 with eager attention": (
            "products of one request's queries and another's keys overflow there, which no mask "
            'hides; load the model with attn_implementation="sdpa" or in bfloat16'
        ),
    },
)


def capabilities_of(model: nn.Module) -> Capabilities:
    """Returns `CAPABILITIES` with the quantities of a model, see `ferrohook.engines.capabilities`.

    Raises:
        HookError: the model cannot be looked at.
    """
    table = quantities(model)
    shown = described(table) | {
        name: {"refused": NO_PATTERN} for name, each in table.items() if each.point == "pattern"
    }
    return dataclasses.replace(CAPABILITIES, quantities=shown)


_MEANT: Final = {
    **dict.fromkeys(("hooks", "capture", "keep", "on", "plan"), "plans"),
    "plans": "plan",
}
"""Mistaken option names, and the option to use instead."""


def generate_batch(
    model: Any,
    inputs: Sequence[Sequence[int]],
    plans: Sequence[Plan | Prepared | None] | None = None,
    *,
    untried: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Generates texts for prompts as `model.generate_batch` does, with one plan for each prompt.

    Args:
        model: a model of transformers.
        inputs: tokens of the prompts.
        plans: a plan for each prompt, or None for none.
        untried: see `attach`.
        **options: as of the model's own. Without a `continuous_batching_config`, one without CUDA
            graphs is made.

    Returns:
        Outputs as from the model's own method. Each also has `acts`, the activations that the plan
        keeps, and `hook_error`, an exception or None: with one its status is FAILED.

    Raises:
        ValueError: as many plans as inputs are needed.
        HookTypeError: a plan is neither a `Plan` nor a `Prepared`; or an option is one of a plan's
            entries, which the model's own does not name.
        HookError: a plan does not fit the model or cannot be served; or see `attach`.

    Examples:
        >>> outputs = generate_batch(model, prompts, plans=[plan, None])
        >>> outputs["req_0"].acts["model.layers.3"].shape
    """
    expect_module(model, "generate_batch takes")
    refuse_swallowed("generate_batch", type(model).generate_batch, options, _MEANT)
    prompts = _with_plans(EnginePlans(model, dim=ROWS), inputs, plans)
    options.setdefault("continuous_batching_config", ContinuousBatchingConfig(use_cuda_graph=False))
    stand_in = _AttachingModel(model, prompts, untried)
    try:
        results: dict[str, Any] = type(model).generate_batch(stand_in, prompts, **options)
    finally:
        stand_in.attachments.close()
    return results


class _AttachingModel:
    """Stands in for a model in its own `generate_batch`, and attaches the manager made there."""

    def __init__(self, model: Any, prompts: list[_Prompt], untried: bool) -> None:  # noqa: FBT001 (used here alone)
        self._model = model
        self._prompts = prompts
        self._untried = untried
        self.attachments = contextlib.ExitStack()

    def continuous_batching_context_manager(self, **options: Any) -> Any:
        return type(self._model).continuous_batching_context_manager(self, **options)

    def init_continuous_batching(self, **options: Any) -> Any:
        manager = self._model.init_continuous_batching(**options)
        try:
            attached = self.attachments.enter_context(attach(manager, untried=self._untried))
            # Raised here: the model's own method only logs errors while it adds requests.
            attached.check_plans(prompt.plan for prompt in self._prompts)
        except BaseException:
            if manager._original_attn_impl is not None:  # given back by `stop`, once started
                self._model.set_attn_implementation(manager._original_attn_impl)
            raise
        return manager

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def attach(manager: Any, *, untried: bool = False) -> Attached:
    """Lets requests of a manager have plans.

    Args:
        manager: of `init_continuous_batching` or `continuous_batching_context_manager`, started or
            not.
        untried: accept an untried release of transformers, if the self-test passes.

    Raises:
        HookError: the release was not tried or fails the self-test, the manager is attached
            already, or it is set up for a feature that is refused, see `CAPABILITIES.refused`.

    Examples:
        >>> with attach(manager) as attached:
        ...     request_id = attached.add_request(ids, plan=plan)
        ...     output = attached.get_result(request_id)
    """
    CAPABILITIES.check_version(untried=untried)
    config = manager.continuous_batching_config
    if any(config.cuda_graph_booleans):
        CAPABILITIES.refuse("CUDA graphs")
    if config.varlen_compile_config is not None or config.decode_compile_config is not None:
        CAPABILITIES.refuse("compilation")
    if manager.distributed_helper.tp_size > 1:
        CAPABILITIES.refuse("tensor parallelism")
    model = manager.model
    if model.dtype == torch.float16 and "eager" in str(model.config._attn_implementation):
        CAPABILITIES.refuse("float16 with eager attention")
    if "_generation_step" in vars(manager):
        msg = "the manager is attached already: close that attachment first"
        raise HookError(msg)
    return Attached(manager)


class Attached:
    """A manager whose requests may have plans, see `attach`. A context manager that closes it.

    Attributes and methods that are not defined here are the manager's.
    """

    def __init__(self, manager: Any) -> None:
        self.manager = manager
        self._asynchronous = manager.continuous_batching_config.use_async_batching
        head = manager.model.get_output_embeddings()
        self._head = [] if head is None else [*head.modules()]
        self._lock = threading.RLock()  # held while a request with a plan is submitted
        self._rejected: set[str] = set()  # failed here, and not yet forgotten by the engine
        self._watched: WatchedRows | None = None
        """Rows of the last step, until it is known which are lost."""
        self._cleaning: WatchedRows | None = None
        """Rows of the step that runs, if plans may make them NaN or infinite."""
        self._seams: list[tuple[weakref.ref[Any], str, Any]] = []
        self._closed = False
        if manager.batch_processor is None:
            # As `warmup` does; the engine's thread takes it over.
            manager.batch_processor = manager._create_batch_processor()
        with self._paused():
            if manager.model.device.type == "cuda":
                # The engine zeroes its buffers on one stream, and writes them on others.
                torch.cuda.synchronize(manager.model.device)
            values, self._cached = check_row_map(manager, self._head)
            self._other_dims = values.other_dims
            self._planned = PlannedRequests(manager.model, dim=ROWS, values=values)
            self._hold()

    # --- In the caller's thread --------------------------------------------------------------

    def add_request(
        self,
        input_ids: Sequence[int],
        request_id: str | None = None,
        *args: Any,
        plan: Plan | Prepared | None = None,
        **options: Any,
    ) -> str | None:
        """Adds a request, as the manager's own `add_request`.

        Args:
            input_ids: tokens of the prompt.
            request_id: its id; one is made if None.
            *args: as of the manager's.
            plan: hooks and captures of this request; None for none.
            **options: as of the manager's.

        Returns:
            Its id; None if the engine takes no more requests.

        Raises:
            HookTypeError: `plan` is neither a `Plan` nor a `Prepared`.
            HookError: the plan does not fit the model or cannot be served; a request with a plan
                has the id; or `close` was called.
        """
        self._check_open()
        refuse_swallowed("add_request", type(self.manager).add_request, options, _MEANT)
        prompt = _Prompt(input_ids, plan)
        added: str | None = self.manager.add_request(prompt, request_id, *args, **options)
        return added

    def add_requests(
        self,
        inputs: Sequence[Sequence[int]],
        *args: Any,
        plans: Sequence[Plan | Prepared | None] | None = None,
        **options: Any,
    ) -> list[str]:
        """Adds requests, as the manager's own `add_requests`.

        Raises:
            ValueError: as many plans as inputs are needed.
            HookError, HookTypeError: see `add_request`.
        """
        self._check_open()
        refuse_swallowed("add_requests", type(self.manager).add_requests, options, _MEANT)
        prompts = _with_plans(self._planned.plans, inputs, plans)
        added: list[str] = self.manager.add_requests(prompts, *args, **options)
        return added

    def check_plans(self, plans: Iterable[Plan | Prepared | None]) -> None:
        """Checks that requests may have these plans.

        Raises:
            HookError, HookTypeError: see `add_request`.
        """
        for plan in plans:
            if plan is not None:
                self._planned.plans.serve(plan)

    def close(self) -> None:
        """Detaches from the manager; idempotent. Requests with a plan that still run fail."""
        with self._lock, self._paused():
            if self._closed:
                return
            self._closed = True
            for request_id in self._planned.ids():
                self._reject(request_id, HookError("the engine was detached while it ran"))
            for reference, name, ours in self._seams:
                owner = reference()
                if owner is not None and vars(owner).get(name) is ours:
                    delattr(owner, name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.manager, name)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.manager)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._planned)} requests with plans"
        return f"<Attached to {type(self.manager).__name__}, {state}>"

    def _check_open(self) -> None:
        if self._closed:
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
        plan = input_ids.plan if isinstance(input_ids, _Prompt) else None
        if request_id in self._rejected:
            msg = f"the request {request_id!r} failed, and the engine has not forgotten it yet"
            raise HookError(msg)
        if plan is None:
            return original(input_ids, request_id, *args, **options)
        manager = self.manager
        if request_id is None:
            with manager._request_lock:
                request_id = f"req_{manager._request_counter}"
                manager._request_counter += 1
        children = _children(request_id, manager.num_return_sequences - 1)
        with self._lock:
            self._check_open()  # under the lock: `close` closes the requests that are listed
            with self._planned.admitting(request_id, plan, children):
                added = original(input_ids, request_id, *args, **options)
                if added is None:
                    self._planned.forget([request_id, *children])
        return added

    def _hold(self) -> None:
        """Replaces methods on the instances of the manager and its parts."""
        manager = self.manager
        self._replace(manager, "add_request", self._add_request)
        self._replace(manager, "_create_batch_processor", self._create_batch_processor)
        self._replace(manager, "_generation_step", self._generation_step)
        self._replace(manager, "_generation_loop_body", self._generation_loop_body)
        self._replace(manager.output_router, "deliver", self._deliver)
        self._replace(manager.output_router, "deliver_batch", self._deliver_batch)
        self._hold_cache(manager.batch_processor.cache)

    def _hold_cache(self, cache: Any) -> None:
        if "search_prefix_match" not in vars(cache):
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
        self._seams.append((reference, name, replaced))

    def _paused(self) -> contextlib.AbstractContextManager[None]:
        return self.manager.pause() if self.manager.is_running() else contextlib.nullcontext()

    # --- In the engine's thread --------------------------------------------------------------

    def _failing(
        self, request_ids: Iterable[str] | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Runs code of ours, whose faults fail these requests and never end the engine.

        Args:
            request_ids: those that the code is for; None for all that have a plan.
        """
        return guarded(functools.partial(self._fail_all, request_ids))

    def _fail_all(self, request_ids: Iterable[str] | None, error: Exception) -> None:
        for request_id in self._planned.ids() if request_ids is None else request_ids:
            self._reject(request_id, error)

    def _create_batch_processor(self, original: Callable[[], Any]) -> Any:
        processor = original()
        self._hold_cache(processor.cache)
        return processor

    def _generation_loop_body(
        self, original: Callable[..., bool], *args: Any, **options: Any
    ) -> bool:
        goes_on = original(*args, **options)
        with self._failing():
            if self._planned:
                self._planned.reconcile(self._live)
            if self._rejected:
                self._rejected &= self._live()
        return goes_on

    def _generation_step(self, original: Callable[[], None]) -> None:
        idle = False
        with self._failing():
            idle = not self._planned and not self._rejected
        if idle:
            original()
            return
        around, watched = contextlib.ExitStack(), None
        ids: list[str] | None = None
        with self._failing():
            step = read_step(self.manager.batch_processor)
            ids = [span.request_id for span in step.spans]
            around.enter_context(self._planned.running(step, self._gathered(step)))
            if (rows := self._watch(step)) is not None:
                around.enter_context(self._apart(step, rows))
            watched = rows
        try:
            original()
        except BaseException:
            with self._failing(ids):
                around.__exit__(*sys.exc_info())
            raise
        with self._failing(ids):
            around.close()
        # Asynchronous: tokens of this step are given out behind the next, and nothing waits here.
        before, self._watched = self._watched, watched
        if not self._asynchronous:
            before, self._watched = watched, None
        with self._failing(ids):
            self._fail_lost(before)
            for request_id in ids or ():
                if self._planned.failure_of(request_id) is not None:
                    self._reject(request_id)

    def _watch(self, step: Step) -> WatchedRows | None:
        """Returns the rows of a step that plans may make NaN or infinite; None without any."""
        changed = [
            span
            for span in step.spans
            if self._planned.changes(span.request_id) or span.request_id in self._rejected
        ]
        return WatchedRows(changed) if changed else None

    def _gathered(self, step: Step) -> list[GatheredModule]:
        """Returns the modules that see other rows in a step."""
        processor = self.manager.batch_processor
        gathered: list[GatheredModule] = []
        if self._other_dims:
            every = torch.arange(step.rows)
            gathered += [(module, every, dim) for module, dim in self._other_dims.items()]
        if processor.model_runner.supports_logits_to_keep(self.manager.model):
            head = head_rows(step, requests_in(processor))
            gathered += [(module, head, None) for module in self._head]
        return gathered

    def _fail_lost(self, watched: WatchedRows | None) -> None:
        """Fails the requests whose rows in a step were NaN or infinite."""
        for request_id, what in ({} if watched is None else watched.lost()).items():
            self._planned.fail(request_id, failure(what))
            self._reject(request_id)

    @contextlib.contextmanager
    def _apart(self, step: Step, watched: WatchedRows) -> Iterator[None]:
        """Keeps rows that plans make NaN or infinite from others.

        The keys of all requests of a step stand in one tensor. A mask hides other requests' keys,
        but NaN plus a mask is NaN, and large float16 scores exceed a mask of its lowest number.
        """
        processor = self.manager.batch_processor
        runner, inputs = processor.model_runner, processor.inputs_and_outputs
        drawn = [span.request_id for span in step.spans if span.wants_logits]

        def sample(scores: Tensor, *others: Any) -> None:
            with self._failing(drawn):
                # Drawing from NaN would raise, for all.
                scores = watched.clean_logits(scores, drawn)
            type(runner)._sample(runner, scores, *others)

        def get_model_kwargs(*args: Any, **kwargs: Any) -> dict[str, Any]:
            made: dict[str, Any] = type(inputs).get_model_kwargs(inputs, *args, **kwargs)
            with self._failing(), _computing(inputs):
                made["attention_mask"] = _hiding(made["attention_mask"])
            return made

        self._cleaning, runner._sample = watched, sample
        inputs.get_model_kwargs = get_model_kwargs
        try:
            yield
        finally:
            self._cleaning = None
            del runner._sample, inputs.get_model_kwargs
        with _computing(inputs):
            watched.send()

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
        try:  # not `_failing`: each layer of each step comes here
            module = self._cached.get(layer_idx)
            if module is not None:
                keys, values = pass_ahead(module, keys, values, kwargs)
            if self._cleaning is not None:
                what = f"keys or values of layer {layer_idx}"
                keys = self._cleaning.clean(keys, 2, what)
                values = self._cleaning.clean(values, 2, what)
        except Exception:
            with self._failing():
                raise
        return original(keys, values, layer_idx, kwargs=kwargs)

    def _deliver(self, original: Callable[[Any], None], output: Any) -> None:
        if self._complete(output):
            original(output)

    def _deliver_batch(self, original: Callable[[Any], None], outputs: list[Any]) -> None:
        original([output for output in outputs if self._complete(output)])

    def _search_prefix_match(
        self, original: Callable[..., int], request_id: str, prompt_ids: list[int]
    ) -> int:
        return original(request_id, prompt_ids) if self._shares(request_id, write=False) else 0

    def _mark_complete_blocks(
        self, original: Callable[..., None], state: Any, complete_blocks: dict[str, int]
    ) -> None:
        if self._shares(state.request_id, write=True):
            original(state, complete_blocks)

    def _shares(self, request_id: str, *, write: bool) -> bool:
        """Returns True if a request may read keys and values of others, or write its own."""
        shares = False
        with self._failing([request_id]):
            shares = self._planned.shares(request_id, write=write)
        return shares and request_id not in self._rejected

    def _states(self) -> list[Any]:
        """Returns the requests that the engine knows."""
        processor, queue = self.manager.batch_processor, self.manager.input_queue
        with queue.mutex:
            states = [*queue.queue]
        if processor is not None:
            states += processor.scheduler.active_requests.values()
            states += processor.scheduler.waiting_requests.values()
        return states

    def _live(self) -> set[str]:
        """Returns the ids of the engine's requests, and of their forks to come."""
        states = self._states()
        live = {state.request_id for state in states}
        for state in states:
            if state.num_children:
                live.update(_children(state.request_id, state.num_children))
        return live

    def _complete(self, output: Any) -> bool:
        """Gives an output what its request captured; returns False if it was rejected before."""
        watched, self._watched = self._watched, None
        planned = False
        with self._failing():
            self._fail_lost(watched)
            planned = output.request_id in self._planned
        if output.request_id in self._rejected:
            return False
        acts: Mapping[str, Any] = {}
        error: BaseException | None = None
        try:
            if planned and output.is_finished():
                acts, error = self._retire(output)
        except Exception as fault:  # noqa: BLE001 (the request's failure: the engine goes on)
            error = fault
        _give(output, acts, error)
        return True

    def _retire(self, output: Any) -> tuple[Mapping[str, Any], BaseException | None]:
        """Returns the activations and the failure of a finished request."""
        end = None
        if self._asynchronous:
            # The last token does not count: it runs if the next step was prepared before.
            end = len(output.prompt_ids) + len(output.generated_tokens) - 1
        result = self._planned.retire(output.request_id, end)
        return ({}, None) if result is None else result[:2]  # None: rejected meanwhile

    def _reject(self, request_id: str, error: BaseException | None = None) -> None:
        """Ends a request that failed, and its forks to come."""
        result = self._planned.retire(request_id)
        if result is None:
            return
        manager, processor = self.manager, self.manager.batch_processor
        state = next((it for it in self._states() if it.request_id == request_id), None)
        output = GenerationOutput(request_id) if state is None else state.to_generation_output()
        unborn = [] if state is None else _children(request_id, state.num_children)
        self._planned.forget(unborn)
        self._rejected.update((request_id, *unborn))
        for each in (request_id, *unborn):
            failed = dataclasses.replace(output, request_id=each)
            _give(failed, result.acts, error or result.error)
            type(manager.output_router).deliver(manager.output_router, failed)
            if processor is not None:  # before the next step is scheduled
                processor.scheduler.set_request_cancellation(each)
        manager.cancel_request(request_id)  # it may not have come so far
        if state is not None and self._asynchronous:
            state._status = RequestStatus.FINISHED  # its row in flight is skipped


class _Prompt(list[int]):
    """Tokens on their way to `add_request`, with the plan of their request."""

    def __init__(self, tokens: Iterable[int], plan: Plan | Prepared | None) -> None:
        super().__init__(tokens)
        self.plan = plan


def _with_plans(
    known: EnginePlans,
    inputs: Sequence[Sequence[int]],
    plans: Sequence[Plan | Prepared | None] | None,
) -> list[_Prompt]:
    """Returns prompts with their plans, prepared."""
    if plans is None:
        plans = [None] * len(inputs)
    if len(plans) != len(inputs):
        msg = f"there is a plan (or None) for each input, got {len(plans)} for {len(inputs)}"
        raise ValueError(msg)
    return [
        _Prompt(tokens, None if plan is None else known.serve(plan))
        for tokens, plan in zip(inputs, plans, strict=True)
    ]


def _computing(inputs: Any) -> contextlib.AbstractContextManager[Any]:
    """Returns a context whose work is done where the engine's is."""
    stream = inputs.compute_stream
    # Without one torch would look for a GPU, each time.
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


def _hiding(mask: Any) -> Any:
    """Returns attention masks in float16 whose lowest numbers are minus infinity, others as given.

    Args:
        mask: a tensor, a dict of tensors or None.
    """
    if isinstance(mask, dict):
        return {name: _hiding(each) for name, each in mask.items()}
    if mask is None or mask.dtype != torch.float16:
        return mask
    return mask.masked_fill(mask == torch.finfo(mask.dtype).min, -torch.inf)


def _children(request_id: str, number: int) -> list[str]:
    """Returns the ids that the engine gives to forks of a request."""
    return [f"{request_id}__child#{child}" for child in range(number)]


def _give(output: Any, acts: Mapping[str, Any], error: BaseException | None) -> None:
    """Adds activations and failure to an output."""
    output.acts, output.hook_error = acts, error
    if error is not None:
        output.status = RequestStatus.FAILED
        output.error = f"{type(error).__name__}: {error}"

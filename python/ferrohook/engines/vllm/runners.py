"""Patch points in vLLM's model runners, V1 and V2.

Wrapped on the instance, after it was made and before the model is loaded. The row map is read where
the runner has settled its batch and the model is called next: in V1 after `_prepare_inputs`, in V2
from the `InputBatch` that `prepare_inputs` returns.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ferrohook.engines.vllm.supported import CAPABILITIES
from ferrohook.engines.vllm.worker import RunnerWorker
from ferrohook.errors import HookError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from ferrohook.gates.state import Stopped
    from ferrohook.gates.streaming import GateValues


class StepReport(NamedTuple):
    """Results of a step for requests with a plan, by their ids."""

    failed: dict[str, str]
    """Requests whose plans failed, with the reason."""
    stopped: dict[str, Stopped]
    """Requests that a `stop` of their plans ended, perhaps at a draft."""
    gates: dict[str, GateValues]
    """Values of gates that clients read along, of drafts too."""
    retried: set[str]
    """Requests that have to run again, as if the step had not been."""


NO_REPORT: Final = StepReport({}, {}, {}, set())
"""Report of a step without requests that have a plan, or in which their plans did nothing."""


def attach(runner: Any, config: Any) -> RunnerWorker:
    """Attaches to a model runner before it loads its model."""
    worker = RunnerWorker(runner, config)

    def loading(_result: Any, *_args: Any, **_kwargs: Any) -> None:
        with worker.starting():
            worker.loaded()
        model = runner.get_model()
        if worker.served is not None and hasattr(model, "compute_logits"):
            around(model, "compute_logits", computing)

    def computing(original: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        with worker.sampling(len(hidden_states)):
            logits = original(hidden_states, *args, **kwargs)
        if logits is not None:  # else another rank has them
            with worker.failing():
                logits = worker.draw(logits)
        return logits

    def sampling(output: Any, *_args: Any, **_kwargs: Any) -> None:
        if output is None:
            return  # vLLM's own error follows
        is_later = hasattr(output, "get_output")
        with worker.failing():
            worker.read_checks(wait=not is_later)
        check = worker.sent_checks()
        report = StepReport(
            worker.failures(), worker.stops(), worker.gate_values(), worker.retries()
        )
        if check is not None or report != NO_REPORT:
            _mark(output, report, check)

    with worker.starting():
        if all(hasattr(runner, name) for name in _V1):
            _attach_v1(runner, worker)
        elif all(hasattr(runner, name) for name in _V2):
            _attach_v2(runner, worker)
        else:
            kind = type(runner).__name__
            msg = f"{kind} of vLLM {CAPABILITIES.version} is an unknown model runner"
            raise HookError(msg)
        _after(runner, "load_model", loading)
        _after(runner, "sample_tokens", sampling)
    return worker


_V1: Final = ("_update_states", "_prepare_inputs", "_model_forward")
_V2: Final = ("add_requests", "prepare_inputs", "execute_model")


def around(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Replaces a method, of a class or an object, by a function of it and its arguments."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    setattr(owner, name, replaced)


def _after(runner: Any, name: str, function: Callable[..., None]) -> None:
    """Calls a function after a method, with the result and the arguments of that."""

    def replaced(original: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        function(result, *args, **kwargs)
        return result

    around(runner, name, replaced)


@contextlib.contextmanager
def _forcing(module: Any, name: str, forced: Mapping[str, Any]) -> Iterator[None]:
    """Replaces keyword arguments of a function of a module."""
    original = getattr(module, name)
    setattr(module, name, lambda *args, **kwargs: original(*args, **{**kwargs, **forced}))
    try:
        yield
    finally:
        setattr(module, name, original)


def _mark(output: Any, report: StepReport, check: Callable[[], dict[str, str]] | None) -> None:
    """Passes a report on with the output of a step, to the scheduler in its process.

    Args:
        output: of the step.
        report: the report.
        check: waits for the device, and returns further requests that failed; None if none did.
    """
    if not hasattr(output, "get_output"):
        output.ferrohook_report = report
        return
    resolve = output.get_output

    def get_output() -> Any:
        resolved = resolve()
        failed = report.failed if check is None else {**report.failed, **check()}
        resolved.ferrohook_report = report._replace(failed=failed)
        return resolved

    output.get_output = get_output


def _attach_v1(runner: Any, worker: RunnerWorker) -> None:
    forward_context = importlib.import_module("vllm.forward_context").get_forward_context

    def updating(_result: Any, scheduler_output: Any) -> None:
        with worker.failing():
            worker.reconcile(runner.requests)
        for new in scheduler_output.scheduled_new_reqs:
            length = runner.requests[new.req_id].num_prompt_tokens
            worker.take_request(new.req_id, new.sampling_params, length)
        with worker.failing():
            worker.take_step(scheduler_output)
            worker.note_prompts(scheduler_output.scheduled_new_reqs)

    def preparing(
        _result: Any, _scheduler_output: Any, counts: Any, *_args: Any, **_kwargs: Any
    ) -> None:
        with worker.failing():
            batch = runner.input_batch
            number = batch.num_reqs
            positions = batch.num_computed_tokens_cpu[:number].tolist()
            exact = runner.num_computed_tokens[:number].tolist  # a view: nothing waits for it
            worker.settle_step(batch.req_ids[:number], counts.tolist(), positions, exact)

    def calling(
        original: Any, input_ids: Any = None, positions: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        if worker.is_eager:
            context = forward_context()
            context.skip_compiled = True
            context.cudagraph_runtime_mode = type(context.cudagraph_runtime_mode).NONE
        with worker.running(positions.shape[-1]):
            output = original(input_ids, positions, *args, **kwargs)
            with worker.failing():
                worker.check(output, forward_context().slot_mapping)
            return output

    _after(runner, "_update_states", updating)
    _after(runner, "_prepare_inputs", preparing)
    around(runner, "_model_forward", calling)


def _attach_v2(runner: Any, worker: RunnerWorker) -> None:
    entered = contextlib.ExitStack()
    runners = importlib.import_module("vllm.v1.worker.gpu.model_runner")
    eager = {
        "dispatch_cg_and_sync_dp": {"need_eager": True},
        "set_forward_context": {"skip_compiled": True},
    }
    preempted: set[str] = set()

    def adding(original: Any, scheduler_output: Any) -> Any:
        # The runner has dropped finished and preempted ones by now. A preempted one resumes as a
        # new one, but keeps its plan, whose gates have read logits that are computed only once.
        preempted.update(scheduler_output.preempted_req_ids or ())
        preempted.difference_update(scheduler_output.finished_req_ids)
        with worker.failing():
            worker.reconcile(preempted.union(runner.req_states.req_id_to_index))
        result = original(scheduler_output)
        for new in scheduler_output.scheduled_new_reqs:
            if new.req_id in preempted:
                preempted.remove(new.req_id)
            else:
                worker.take_request(new.req_id, new.sampling_params, new.prompt_len)
        with worker.failing():
            worker.take_step(scheduler_output)
            worker.note_prompts(scheduler_output.scheduled_new_reqs)
        return result

    def preparing(batch: Any, *_args: Any, **_kwargs: Any) -> None:
        with worker.failing():
            positions = batch.num_computed_tokens_np[: batch.num_reqs].tolist()

            def exact() -> list[int]:
                computed: list[int] = runner.req_states.num_computed_tokens.gpu.tolist()
                return [computed[each] for each in batch.idx_mapping_np]

            counts = batch.num_scheduled_tokens.tolist()
            worker.settle_step(batch.req_ids, counts, positions, exact)
        entered.enter_context(worker.running(batch.num_tokens_after_padding))

    def executing(original: Any, *args: Any, **kwargs: Any) -> Any:
        with entered, contextlib.ExitStack() as calls:
            for name, forced in eager.items() if worker.is_eager else ():
                calls.enter_context(_forcing(runners, name, forced))
            result = original(*args, **kwargs)
            if (state := runner.execute_model_state) is not None:
                with worker.failing():
                    worker.check(state.hidden_states, state.slot_mappings_by_layer)
            return result

    around(runner, "add_requests", adding)
    _after(runner, "prepare_inputs", preparing)
    around(runner, "execute_model", executing)

"""End of a step in vLLM's scheduler: plans end requests, have them run again, and report gates.

Only here it is known how many drafts of speculative decoding were accepted. The rows of a rejected
one are none of its request's: they end it nowhere, and their values reach no client.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from ferrohook.engines.wire import GATES
from ferrohook.gates.streaming import GateStream, numbers_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from ferrohook.gates.state import Stopped
    from ferrohook.gates.streaming import GateValues

_WAITING: Final = "ferrohook_gates"


def cut(
    scheduler: Any, output: Any, stopped: Mapping[str, Stopped]
) -> tuple[dict[str, str], dict[str, str]]:
    """Cuts the answers of requests after the tokens at which their plans end them.

    Args:
        scheduler: the scheduler, before it takes over the tokens of the step.
        output: of the step; drafts that were accepted after an end are dropped from it.
        stopped: ends of requests, some perhaps at drafts that were rejected.

    Returns:
        the gates of the requests that end before they get a token of the step, and of those that
        end after they got theirs.
    """
    at_once: dict[str, str] = {}
    later: dict[str, str] = {}
    for request_id in stopped.keys() & scheduler.requests.keys():
        gate, position, _ = stopped[request_id]
        request = scheduler.requests[request_id]
        if request.num_stale_output_tokens and request.drop_stale_output:
            continue  # its tokens are dropped and run again
        accepted = position + 1 - request.num_tokens
        if accepted <= 0:
            at_once[request_id] = gate
            continue
        tokens = output.sampled_token_ids[output.req_id_to_index[request_id]]
        if accepted < len(tokens):
            del tokens[accepted:]
            later[request_id] = gate
    return at_once, later


def retry(scheduler: Any, requests: set[str]) -> None:
    """Runs requests again, first without drafts, and drops their tokens of the step.

    Args:
        scheduler: the scheduler, before it takes over the tokens of the step.
        requests: their ids.
    """
    for request_id in sorted(requests & scheduler.requests.keys()):
        request = scheduler.requests[request_id]
        if request not in scheduler.running:
            # Preempted in the step that was scheduled meanwhile: else the tokens arrive later.
            request.drop_stale_output = request.num_stale_output_tokens > 0
            continue
        scheduler.running.remove(request)
        scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
        # They may resume in the next step, which has to know them as preempted.
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)


def end(
    scheduler: Any, reasons: Mapping[str, str], status: Any, make: Any
) -> list[tuple[int, Any]]:
    """Ends requests; returns their last outputs, with the clients' indices.

    Args:
        scheduler: the scheduler.
        reasons: reason of each request.
        status: `RequestStatus` of their ends.
        make: `EngineCoreOutput`.
    """
    live = reasons.keys() & scheduler.requests.keys()
    return [
        (
            request.client_index,
            make(
                request_id=request.request_id,
                new_token_ids=[],
                finish_reason=request.get_finished_reason(),
                stop_reason=reasons[request.request_id],
                events=request.take_events(),
                trace_headers=request.trace_headers,
            ),
        )
        for request in scheduler.finish_requests(live, status)
    ]


def note_gates(scheduler: Any, gates: Mapping[str, GateValues]) -> None:
    """Notes values of gates, before the scheduler takes over the tokens of the step."""
    waiting = _waiting(scheduler)
    for request_id in scheduler.requests.keys() & gates.keys():
        _, stream = waiting.setdefault(request_id, (scheduler.requests[request_id], GateStream()))
        for gate, values in gates[request_id].items():
            stream.note(gate, values["positions"], numbers_of(values))


def add_gates(scheduler: Any, outputs: Iterable[Any], ended: Collection[str]) -> None:
    """Adds the values of gates to the outputs of their requests, and drops all others.

    A step that runs a part of a prompt makes no output: its values wait. They travel in the only
    field for a dict.

    Args:
        scheduler: the scheduler, after it took over the tokens of the step.
        outputs: of the step.
        ended: requests whose last token has run, since their plans end them.
    """
    if not (waiting := _waiting(scheduler)):
        return
    for each in outputs:
        if each.request_id in waiting:
            request, stream = waiting[each.request_id]
            values = stream.take(request.num_tokens - (each.request_id not in ended))
            if values:
                each.kv_transfer_params = {**(each.kv_transfer_params or {}), GATES: values}
    for request_id in waiting.keys() - scheduler.requests.keys():
        del waiting[request_id]


def _waiting(scheduler: Any) -> dict[str, tuple[Any, GateStream]]:
    """Returns the requests with values of gates that wait for an output, and these."""
    found: dict[str, tuple[Any, GateStream]] = vars(scheduler).setdefault(_WAITING, {})
    return found

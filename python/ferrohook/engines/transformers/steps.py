"""Rows of the steps of transformers' continuous batching, and the self-test of reading them."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import transformers
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingAsyncIOs
from transformers.generation.continuous_batching.requests import (
    FutureRequestState,
    RequestState,
    RequestStatus,
)

from ferrohook.attach.attention import attended
from ferrohook.engines.model.step_values import StepValues, observed
from ferrohook.errors import HookError
from ferrohook.util.tensors import tensors_in

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from torch import nn

    from ferrohook.attach.attention import Attended
    from ferrohook.engines.model.step_values import StepCall

ROWS = 1
"""Dimension of the rows: hidden states are (1, tokens, width)."""


class StepRows(NamedTuple):
    """Rows of one forward, one item for each request with rows, in order of these."""

    requests: list[str]
    counts: list[int]
    positions: list[int]
    """Position of each request's first row."""
    drawn: list[str]
    """Requests whose next tokens are drawn, in order of the head's rows."""
    head: list[int]
    """Row of the step for each of the head's, which are as many as requests; -1 for padding."""
    rows: int
    """Rows of the step."""
    ends: list[list[int]]
    """End-of-sequence tokens of each request whose next token is drawn."""


def read_step(processor: Any) -> StepRows:
    """Returns the rows of the step that an engine prepared last."""
    io = _prepared_io(processor)
    # A prompt of one token has none before it is forked: each fork runs that token.
    futures = [each for each in io.requests_in_batch if each.query_length]
    counts = [each.query_length for each in futures]
    drawn = [
        (each.state, end - 1)
        for each, end in zip(futures, itertools.accumulate(counts), strict=True)
        if each.has_new_token
    ]
    padding = [-1] * (len(io.requests_in_batch) - len(drawn))
    return StepRows(
        [each.state.request_id for each in futures],
        counts,
        # The preparation has moved the offset past these rows.
        [each.state.position_offset - each.query_length for each in futures],
        [state.request_id for state, _ in drawn],
        [row for _, row in drawn] + padding,
        io.num_q_tokens,
        [sorted(state._eos_token_ids) for state, _ in drawn],
    )


def _prepared_io(processor: Any) -> Any:
    """Returns the host's side of the inputs that were prepared last."""
    io = processor.inputs_and_outputs
    if isinstance(io, ContinuousBatchingAsyncIOs):
        return io.io_pairs[io.current_pair].host_io
    return io


@torch.no_grad()
def check_row_map(
    manager: Any, head: Collection[nn.Module] = ()
) -> tuple[StepValues, dict[int, nn.Module]]:
    """Runs a dummy step, and compares the rows read from it with the inputs of the model.

    For an engine whose loop is paused or does not run yet.

    Args:
        manager: of the engine.
        head: modules that see the rows of which logits are computed.

    Returns:
        The values of the model's modules in the step. A mixture of experts flattens (1, tokens,
        width), so that rows are in another dimension; the sizes of a single step could confuse
        rows and experts. Then the attention modules by their index in the cache, where the
        attention function gets only keys and values of the cache, without the step's: so since
        transformers 5.24.

    Raises:
        HookError: they differ, or the engine has no room for the step.
    """
    processor = manager.batch_processor
    # The end of a prompt, and a chunk of another's beginning.
    most = processor.cb_config.max_requests_per_batch
    dummies = [_dummy("ferrohook-test-0", 3, 1, [0, 1]), _dummy("ferrohook-test-1", 2, 0, [1])]
    dummies, rows = dummies[:most], sum(each.query_length for each in dummies[:most])
    names = [each.state.request_id for each in dummies]
    expected = StepRows(names, [2, 1][:most], [1, 0][:most], names[:1], [1, -1][:most], rows, [[]])
    try:
        if processor.max_batch_tokens < rows or not all(
            processor.cache.can_store_request_tokens(dummy.state, dummy.query_length)
            for dummy in dummies
        ):
            msg = "the engine has no room for the self-test of 3 tokens: attach it while it is idle"
            raise HookError(msg)
        inputs, calls, heads = _run(processor, manager.model, dummies, rows)
        found = read_step(processor)
    finally:
        for name in names:
            processor.cache.free_blocks(name, no_cache=True)
        io = _prepared_io(processor)
        io.requests_in_batch, io.req_id_to_new_token_position = [], {}
    tokens, positions, drawn = (
        inputs[name].tolist() for name in ("input_ids", "position_ids", "logits_indices")
    )
    right = (
        found == expected
        and tokens == [[0, 1, 1][:rows]]
        and positions == [[1, 2, 0][:rows]]
        and drawn[0] == expected.head[0]
        and len(drawn) == len(expected.head)
    )
    if not right:
        msg = (
            f"the rows of a step in transformers {transformers.__version__} are not as expected: "
            f"expected {expected}, got {found} with {tokens=}, {positions=}, logits of rows {drawn}"
        )
        raise HookError(msg)
    other_dims = {
        module: dims[0]
        for module, (first, *_) in calls.items()
        for tensor in itertools.islice(tensors_in(first.output), 1)
        if (dims := _dims(tensor.shape, rows)) and ROWS not in dims
    }
    values = StepValues(calls, rows, ROWS, other_dims, frozenset(head))
    cached = [each.module for each in heads if each.k.shape[1] != rows]
    return values, {cast("int", module.layer_idx): module for module in cached}


def _dims(shape: Sequence[int], rows: int) -> list[int]:
    """Returns the dimensions that may be of the rows; `ROWS` means the rest is 1."""
    if shape[:1] == (rows,):
        return [0]
    return [dim for dim, size in enumerate(shape) if size == rows]


def _dummy(name: str, prompt: int, position: int, tokens: list[int]) -> FutureRequestState:
    """Makes a request in the state in which the scheduler hands it on."""
    state = RequestState(name, [0] * prompt, max_new_tokens=1)
    state._status = RequestStatus.PREFILLING
    state.tokens_to_process = tokens
    state.position_offset = position
    is_end = position + len(tokens) == prompt
    return FutureRequestState(
        state, has_new_token=is_end, complete_blocks={}, query_length=len(tokens)
    )


def _run(
    processor: Any, model: Any, dummies: list[FutureRequestState], rows: int
) -> tuple[dict[str, Any], dict[nn.Module, list[StepCall]], list[Attended]]:
    """Runs a step; returns the model's inputs and its calls."""
    io = processor.inputs_and_outputs
    io.prepare_batch_tensors(
        requests_in_batch=dummies,
        logits_processors=processor.logit_processor,
        use_decode_fast_path=False,
        num_q_tokens=rows,
        max_kv_read=sum(dummy.state.position_offset for dummy in dummies),
        use_padding=False,
    )
    inputs = io.get_model_kwargs(use_padding=False)
    with observed(model) as calls, attended() as heads:
        processor.model_runner.compute_batch(model, inputs)
    if io.compute_stream is not None:  # the engine's first step writes over its inputs
        io.compute_stream.synchronize()
    return inputs, calls, heads

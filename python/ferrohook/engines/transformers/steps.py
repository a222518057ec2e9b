"""Step maps of transformers' continuous batching, and their self-test."""

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
from ferrohook.engines.steps import Span, Step
from ferrohook.errors import HookError
from ferrohook.quantity.anatomy.observe import observing
from ferrohook.util.tensors import tensors_in

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from torch import Tensor, nn

    from ferrohook.attach.attention import Attended
    from ferrohook.engines.model.step_values import StepCall

ROWS = 1
"""Dimension of the rows: hidden states are (1, tokens, width)."""


def read_step(processor: Any) -> Step:
    """Returns the map of the step that an engine prepared last."""
    io = _prepared_io(processor)
    first, spans = 0, []
    for future in io.requests_in_batch:
        state, rows = future.state, future.query_length
        # A preempted request comes back with its text in `initial_tokens`.
        prompt = state._true_initial_tokens or len(state.initial_tokens)
        # The preparation has moved the offset past these rows.
        position = state.position_offset - rows
        spans.append(Span(state.request_id, first, rows, position, prompt, future.has_new_token))
        first += rows
    # A prompt of one token has none before it is forked: each fork runs that token.
    return Step([span for span in spans if span.rows], io.num_q_tokens)


def head_rows(step: Step, requests: int) -> Tensor:
    """Returns the row of each of the head's, -1 for padding: as many as requests in the step."""
    rows = step.logits_rows
    return torch.tensor(rows + [-1] * (requests - len(rows)), dtype=torch.long)


def requests_in(processor: Any) -> int:
    """Returns the number of requests in the step that an engine prepared last."""
    return len(_prepared_io(processor).requests_in_batch)


def _prepared_io(processor: Any) -> Any:
    """Returns the host's side of the inputs that were prepared last."""
    io = processor.inputs_and_outputs
    if isinstance(io, ContinuousBatchingAsyncIOs):
        return io.io_pairs[io.current_pair].host_io
    return io


class DummyStepFacts(NamedTuple):
    """Facts that a dummy step of an engine shows."""

    values: StepValues
    """A mixture of experts flattens (1, tokens, width), so that rows are in another dimension: by
    the sizes of one step alone, rows and experts could be taken for each other."""
    cached: Mapping[int, nn.Module]
    """Attention modules by their index in the cache, where the attention function gets only keys
    and values of the cache, without the step's: so since transformers 5.24."""


@torch.no_grad()
def check_row_map(manager: Any, head: Collection[nn.Module] = ()) -> DummyStepFacts:
    """Runs a dummy step, and compares the map read from it with the inputs of the model.

    For an engine whose loop is paused or does not run yet.

    Args:
        manager: of the engine.
        head: modules that see the rows of which logits are computed, see `head_rows`.

    Returns:
        The observed layout of the step.

    Raises:
        HookError: they differ, or the engine has no room for the step.
    """
    processor = manager.batch_processor
    # The end of a prompt, and a chunk of another's beginning.
    spans = [
        Span("ferrohook-test-0", 0, 2, 1, 3),
        Span("ferrohook-test-1", 2, 1, 0, 2, wants_logits=False),
    ]
    expected = Step(spans[: processor.cb_config.max_requests_per_batch])
    tokens = [0, 1, 1][: expected.rows]
    dummies = [_dummy(span, tokens) for span in expected.spans]
    try:
        if processor.max_batch_tokens < expected.rows or not all(
            processor.cache.can_store_request_tokens(dummy.state, dummy.query_length)
            for dummy in dummies
        ):
            msg = "the engine has no room for the self-test of 3 tokens: attach it while it is idle"
            raise HookError(msg)
        inputs, embedded, calls, heads = _run(processor, manager.model, dummies, expected.rows)
        found = read_step(processor)
    finally:
        for dummy in dummies:
            processor.cache.free_blocks(dummy.state.request_id, no_cache=True)
        io = _prepared_io(processor)
        io.requests_in_batch, io.req_id_to_new_token_position = [], {}
    right = (
        found == expected
        and embedded == [[tokens]]
        and inputs["position_ids"].tolist() == [expected.positions.tolist()]
        and inputs["logits_indices"].tolist()[:1] == expected.logits_rows
        and inputs["logits_indices"].shape == head_rows(expected, len(expected.spans)).shape
    )
    if not right:
        msg = (
            f"the rows of a step in transformers {transformers.__version__} are not the expected: "
            f"{expected} of tokens {tokens}; got {found} of tokens {embedded}, positions "
            f"{inputs['position_ids'].tolist()}, logits of rows {inputs['logits_indices'].tolist()}"
        )
        raise HookError(msg)
    other_dims = {
        module: dims[0]
        for module, (first, *_) in calls.items()
        for tensor in itertools.islice(tensors_in(first.output), 1)
        if (dims := _dims(tensor.shape, expected.rows)) and ROWS not in dims
    }
    values = StepValues(calls, expected.rows, ROWS, other_dims, frozenset(head))
    cached = [each.module for each in heads if each.k.shape[1] != expected.rows]
    return DummyStepFacts(values, {cast("int", module.layer_idx): module for module in cached})


def _dims(shape: Sequence[int], rows: int) -> list[int]:
    """Returns the dimensions that may be of the rows; `ROWS` means the rest is 1."""
    if shape[:1] == (rows,):
        return [0]
    return [dim for dim, size in enumerate(shape) if size == rows]


def _dummy(span: Span, tokens: list[int]) -> FutureRequestState:
    """Makes a request in the state in which the scheduler hands it on."""
    own = tokens[span.first_row : span.first_row + span.rows]
    state = RequestState(span.request_id, [0] * span.prompt_length, max_new_tokens=1)
    state._status = RequestStatus.PREFILLING
    state.tokens_to_process = own
    state.position_offset = span.position
    return FutureRequestState(
        state, has_new_token=span.wants_logits, complete_blocks={}, query_length=span.rows
    )


def _run(
    processor: Any, model: Any, dummies: list[FutureRequestState], rows: int
) -> tuple[dict[str, Any], list[Any], dict[nn.Module, list[StepCall]], list[Attended]]:
    """Runs a step; returns the model's inputs, the tokens that it embedded and its calls."""
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
    embedded: list[Any] = []

    def embed(_path: str, _module: nn.Module, args: tuple[Tensor, ...], _kwargs: Any) -> None:
        embedded.append(args[0].tolist())

    with (
        observing(model.get_input_embeddings(), embed),
        observed(model) as calls,
        attended() as heads,
    ):
        processor.model_runner.compute_batch(model, inputs)
    if io.compute_stream is not None:  # the engine's first step writes over its inputs
        io.compute_stream.synchronize()
    return inputs, embedded, calls, heads

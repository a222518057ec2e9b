"""Rows of transformers' steps, against the tokens that the model gets."""

from __future__ import annotations

import dataclasses
import itertools
import types
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("transformers")

from ferrohook.engines import capabilities, transformers
from ferrohook.engines.transformers import steps as transformers_steps
from ferrohook.errors import HookError
from support.engines import Job, batching, greedy, random_jobs, tiny_llama

if TYPE_CHECKING:
    from torch import Tensor

    from ferrohook.engines.transformers.steps import StepRows


class Watched:
    """Positions and tokens of each request, by the map and the embedding's inputs."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._step: StepRows | None = None
        self.steps = 0
        self.seen: list[tuple[str, int, int]] = []
        # On the instance, as the adapter does.
        manager._generation_step = self._generation_step
        embedding = manager.model.get_input_embeddings()
        self.handle = embedding.register_forward_pre_hook(self._record)

    def _generation_step(self) -> None:
        self._step = transformers_steps.read_step(self._manager.batch_processor)
        self.steps += 1
        type(self._manager)._generation_step(self._manager)

    def _record(self, _module: object, args: tuple[Tensor, ...]) -> None:
        (tokens,) = args[0].tolist()
        step = self._step
        assert step is not None
        assert len(tokens) == step.rows == sum(step.counts)
        left = iter(tokens)
        for name, count, position in zip(step.requests, step.counts, step.positions, strict=True):
            own = enumerate(itertools.islice(left, count))
            self.seen += [(name, position + index, token) for index, token in own]
        drawn = dict(zip(step.drawn, step.head, strict=False))
        ends = dict(zip(step.requests, itertools.accumulate(step.counts), strict=True))
        assert all(row == ends[name] - 1 for name, row in drawn.items())


@pytest.mark.parametrize("sharing", [True, False])
@pytest.mark.parametrize("blocks", [64, 10], ids=["roomy", "preempted"])
@pytest.mark.parametrize("tokens", [7, 64], ids=["chunked", "whole"])
def test_each_row_is_the_token_of_its_request(sharing: bool, blocks: int, tokens: int) -> None:
    model, jobs = tiny_llama(), random_jobs(30, seed=tokens)
    config = batching(num_blocks=blocks, max_batch_tokens=tokens, allow_block_sharing=sharing)
    manager = model.init_continuous_batching(greedy(), config)
    watched = Watched(manager)
    ids = manager.add_requests([job.prompt for job in jobs], max_new_tokens=10)
    manager.start()
    outputs = {}
    while len(outputs) < len(jobs):
        output = manager.get_result(timeout=60)
        outputs[output.request_id] = output
    manager.stop()
    watched.handle.remove()

    ran = set()
    for name, position, token in watched.seen:
        output = outputs[name]
        assert [*output.prompt_ids, *output.generated_tokens][position] == token
        ran.add((name, position))
    reruns = len(watched.seen) - len(ran)
    assert reruns > 0 or blocks > 10, "nothing was preempted"
    if not sharing:
        everything = [(name, each) for name in ids for each in range(_end(outputs[name]))]
        assert sorted(ran) == sorted(everything)
    for name, job in zip(ids, jobs, strict=True):
        outputs[name].acts, outputs[name].hook_error = {}, None
        Job(job.prompt).check(model, outputs[name], most=10)


def _end(output: Any) -> int:
    return len(output.prompt_ids) + len(output.generated_tokens) - 1


@pytest.fixture
def manager() -> Any:
    return tiny_llama().init_continuous_batching(greedy(), batching())


def test_the_self_test_finds_a_map_in_another_order(
    manager: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = transformers_steps.read_step

    def in_another_order(processor: Any) -> StepRows:
        step = read(processor)
        lists = {name: each[::-1] for name, each in step._asdict().items() if name != "rows"}
        return step._replace(**lists)

    monkeypatch.setattr(transformers_steps, "read_step", in_another_order)

    with pytest.raises(HookError, match=r"rows of a step in transformers 5\.\d+"):
        transformers.attach(manager)
    assert "_generation_step" not in vars(manager)
    assert not manager.model.get_input_embeddings()._forward_pre_hooks


def test_the_self_test_leaves_the_cache_free(manager: Any) -> None:
    with transformers.attach(manager):
        cache = manager.batch_processor.cache
        assert not any(allocator.block_table for allocator in cache.cache_allocators.values())
        assert transformers_steps.read_step(manager.batch_processor).requests == []


def test_an_engine_too_small_for_the_self_test_is_refused() -> None:
    small = tiny_llama().init_continuous_batching(greedy(), batching(max_batch_tokens=2))
    with pytest.raises(HookError, match="no room for the self-test"):
        transformers.attach(small)


def test_a_release_that_nobody_tried_is_refused(
    manager: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    unknown = dataclasses.replace(transformers.CAPABILITIES, version="5.99.1")
    monkeypatch.setattr("ferrohook.engines.transformers.batching.CAPABILITIES", unknown)

    with pytest.raises(HookError, match=r"transformers 5\.99\.1 was not tested"):
        transformers.attach(manager)
    with transformers.attach(manager, untried=True):
        pass


def test_capabilities_name_the_installed_release() -> None:
    found = capabilities("transformers")

    assert found is transformers.CAPABILITIES
    assert found.works
    assert "captures" in found.served
    assert "use_cuda_graph=False" in found.refused["CUDA graphs"]


@pytest.mark.parametrize(
    ("setting", "value", "feature"),
    [
        ("use_cuda_graph", True, "CUDA graphs"),
        ("varlen_compile_config", object(), "compilation"),
        ("decode_compile_config", object(), "compilation"),
    ],
)
def test_what_would_skip_hooks_is_refused(
    manager: Any, setting: str, value: object, feature: str
) -> None:
    setattr(manager.continuous_batching_config, setting, value)
    with pytest.raises(HookError, match=f"{feature} is not supported with transformers"):
        transformers.attach(manager)


def test_tensor_parallelism_is_refused(manager: Any) -> None:
    manager.distributed_helper.tp_size = 2
    with pytest.raises(HookError, match="tensor parallelism is not supported"):
        transformers.attach(manager)


def test_a_manager_is_attached_once_at_a_time(manager: Any) -> None:
    with (
        transformers.attach(manager),
        pytest.raises(HookError, match="already attached"),
    ):
        transformers.attach(manager)
    transformers.attach(manager).close()


def test_a_running_engine_is_attached_between_two_steps() -> None:
    model = tiny_llama()
    with model.continuous_batching_context_manager(
        greedy(100), continuous_batching_config=batching()
    ) as manager:
        manager.add_request([5, 6, 7], eos_token_id=-1)
        with transformers.attach(manager) as attached:
            output = attached.get_result(timeout=60)
    output.acts, output.hook_error = {}, None
    assert len(output.generated_tokens) == 100


def test_the_head_has_as_many_rows_as_requests() -> None:
    def future(name: str, rows: int, offset: int, *, draws: bool) -> Any:
        state = types.SimpleNamespace(
            request_id=name, position_offset=offset, _eos_token_ids={2, 1}
        )
        return types.SimpleNamespace(state=state, query_length=rows, has_new_token=draws)

    io = types.SimpleNamespace(
        requests_in_batch=[
            future("a", 3, 7, draws=False),
            future("forked before it ran", 0, 0, draws=False),
            future("b", 2, 2, draws=True),
        ],
        num_q_tokens=5,
    )
    step = transformers_steps.read_step(types.SimpleNamespace(inputs_and_outputs=io))
    assert step == (["a", "b"], [3, 2], [4, 0], ["b"], [4, -1, -1], 5, [[1, 2]])

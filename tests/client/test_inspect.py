"""Evaluations of Inspect, by its own command and its API, of a model under a plan."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
import safetensors.torch
import torch

pytest.importorskip("inspect_ai", reason="needs inspect-ai")
pytest.importorskip("openai")
pytest.importorskip("fastapi")
pytest.importorskip("transformers")

import inspect_ai
from inspect_ai.dataset import Sample
from inspect_ai.log import resolve_sample_attachments
from inspect_ai.model import GenerateConfig, get_model
from inspect_ai.scorer import match
from inspect_ai.solver import Generate, Solver, TaskState, generate, solver
from inspect_ai.tool import ToolInfo

import ferrohook as fh
from ferrohook.client.inspect import FerrohookAPI
from support.engines import WIDTH, Change, Job
from support.planned_server import words

if TYPE_CHECKING:
    from pathlib import Path

    from inspect_ai.log import EvalLog

    from support.planned_server import PlannedServer

NEW = 6
PROMPTS = [[5, 9, 11, 30], [7, 7, 8], [40, 12, 33, 21, 9]]
CHANGE = Change(1, fh.Add(torch.linspace(-2, 2, WIDTH)), None)
STEER = fh.Plan(fh.on("model.layers.1", CHANGE.hook))
# Inspect's own.
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore::ResourceWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
)


def alone(server: PlannedServer, job: Job) -> str:
    """The greedy text of a request, by PyTorch's hooks."""
    made: list[int] = []
    while len(made) < NEW:
        logits, _ = job.alone(server.model, [*made, 0])
        made.append(int(logits[-1].argmax()))
        if made[-1] == 2:
            break
    return words(made)


def evaluated(
    url: str, folder: Path, targets: list[str], steps: Any = None, **options: Any
) -> EvalLog:
    samples = [
        Sample(input=words(prompt), target=target)
        for prompt, target in zip(PROMPTS, targets, strict=True)
    ]
    task = inspect_ai.Task(
        dataset=samples, solver=steps or generate(), scorer=match(location="exact")
    )
    (log,) = inspect_ai.eval(
        task,
        model="ferrohook/tiny",
        model_base_url=url,
        model_args=options,
        max_tokens=NEW,
        log_dir=str(folder / "logs"),
        display="none",
        fail_on_error=False,
    )
    return log


def accuracy(log: EvalLog) -> float:
    assert log.status == "success", log.error
    assert log.results is not None
    return float(log.results.scores[0].metrics["accuracy"].value)


@pytest.fixture
def targets(server: PlannedServer) -> dict[str, list[str]]:
    found = {
        "plain": [alone(server, Job(prompt)) for prompt in PROMPTS],
        "steered": [alone(server, Job(prompt, (CHANGE,))) for prompt in PROMPTS],
    }
    assert not {*found["plain"]} & {*found["steered"]}
    return found


def test_an_evaluation_is_of_the_model_under_its_plan(
    server: PlannedServer, url: str, tmp_path: Path, targets: dict[str, list[str]]
) -> None:
    path = tmp_path / "plan.json"
    path.write_text(STEER.to_json())
    for plan in (None, STEER.to_json(), str(path), json.loads(STEER.to_json())):
        options = {} if plan is None else {"plan": plan}
        right, wrong = ("plain", "steered") if plan is None else ("steered", "plain")
        log = evaluated(url, tmp_path, targets[right], **options)
        assert accuracy(log) == 1.0
        assert accuracy(evaluated(url, tmp_path, targets[wrong], **options)) == 0.0
        # The log tells which plan its answers are of.
        sample = resolve_sample_attachments(log.samples[0], "full")  # type: ignore[index]
        (event,) = [it for it in sample.events if it.event == "model"]
        assert event.call is not None
        assert event.call.request.get("ferrohook") == (None if plan is None else STEER.to_json())


def test_captures_are_files_that_the_log_names(
    server: PlannedServer, url: str, tmp_path: Path, targets: dict[str, list[str]]
) -> None:
    plan = STEER + fh.Plan(fh.keep("model.layers.2"))
    folder = tmp_path / "acts"
    log = evaluated(url, tmp_path, targets["steered"], plan=plan.to_json(), captures=str(folder))
    assert accuracy(log) == 1.0
    assert log.samples is not None
    paths = [it.output.metadata["captures"] for it in log.samples]  # type: ignore[index]
    assert sorted(map(str, folder.iterdir())) == sorted(paths)
    for prompt, sample, path in zip(PROMPTS, log.samples, paths, strict=True):
        acts = safetensors.torch.load_file(path)
        job = Job(prompt, (CHANGE,), ("model.layers.2",))
        tokens = [int(word.removeprefix("w")) for word in sample.output.completion.split()]
        _, right = job.alone(server.model, tokens)
        torch.testing.assert_close(
            acts["model.layers.2"], right["model.layers.2"], atol=1e-4, rtol=1e-4
        )


def test_a_solver_may_give_each_request_its_plan(
    server: PlannedServer, url: str, tmp_path: Path, targets: dict[str, list[str]]
) -> None:
    @solver
    def every_other() -> Solver:
        async def solve(state: TaskState, ask: Generate) -> TaskState:
            steered = state.sample_id == 2
            extra = {"ferrohook": json.loads(STEER.to_json())} if steered else None
            return await ask(state, extra_body=extra)

        return solve

    mixed = [targets["plain"][0], targets["steered"][1], targets["plain"][2]]
    assert accuracy(evaluated(url, tmp_path, mixed, every_other())) == 1.0


def test_a_plan_that_is_refused_or_fails_is_the_error_of_its_sample(
    server: PlannedServer, url: str, tmp_path: Path, targets: dict[str, list[str]]
) -> None:
    for plan, reason in (
        (fh.Plan(fh.on("model.layers.9", fh.Zero())), "closest names"),
        (fh.Plan(fh.keep("model.layers.1")), "pass captures=FOLDER"),
    ):
        log = evaluated(url, tmp_path, targets["plain"], plan=plan.to_json())
        assert log.samples is not None
        found = [str(it.error and it.error.message) for it in log.samples]
        assert [each for each in found if reason not in each] == []


def test_a_busy_server_is_asked_again(
    server: PlannedServer, url: str, tmp_path: Path, targets: dict[str, list[str]]
) -> None:
    server.busy = 1
    assert accuracy(evaluated(url, tmp_path, targets["steered"], plan=STEER.to_json())) == 1.0
    assert len(server.bodies) == 4


def test_options_and_tools_are_openai_s(server: PlannedServer, url: str) -> None:
    tool = ToolInfo(name="add", description="Adds.")
    config = GenerateConfig(max_tokens=NEW, temperature=0.5, stop_seqs=["w2"], seed=3, top_k=4)
    model = get_model("ferrohook/tiny", base_url=url, memoize=False)
    assert isinstance(model.api, FerrohookAPI)

    async def run() -> None:
        await model.generate("w5 w6", [tool], "any", config)
        await model.api.aclose()

    asyncio.run(run())
    sent = server.bodies[-1]
    assert sent["messages"] == [{"role": "user", "content": "w5 w6"}]
    function = {"name": "add", "description": "Adds."}
    assert sent["tools"][0]["function"].items() >= function.items()
    wanted = {"model": "tiny", "max_tokens": NEW, "temperature": 0.5, "stop": ["w2"], "seed": 3}
    wanted |= {"top_k": 4, "tool_choice": "required"}
    assert sent.items() >= wanted.items()


def test_an_address_is_needed() -> None:
    with pytest.raises(fh.HookError, match="pass model_base_url"):
        get_model("ferrohook/tiny", memoize=False)


def test_a_plan_as_an_object_is_refused(url: str) -> None:
    """Inspect would take it for any other, and answer by the model that it has."""
    with pytest.raises(fh.HookTypeError, match=r"pass plan\.to_json\(\)"):
        get_model("ferrohook/tiny", base_url=url, plan=STEER)


def test_a_file_with_another_plan_than_before_is_an_error(
    server: PlannedServer, url: str, tmp_path: Path, targets: dict[str, list[str]]
) -> None:
    path = tmp_path / "plan.json"
    path.write_text(STEER.to_json())
    assert accuracy(evaluated(url, tmp_path, targets["steered"], plan=str(path))) == 1.0
    path.write_text(fh.Plan(fh.on("model.layers.1", fh.Zero())).to_json())
    log = evaluated(url, tmp_path, targets["steered"], plan=str(path))
    assert log.samples is not None
    assert all("changed since its plan was read" in str(it.error) for it in log.samples)


def test_answers_that_inspect_caches_are_of_the_same_plan_alone(
    server: PlannedServer,
    url: str,
    tmp_path: Path,
    targets: dict[str, list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("INSPECT_CACHE_DIR", str(tmp_path / "cache"))
    steps = generate(cache=True)
    for _ in range(2):
        assert accuracy(evaluated(url, tmp_path, targets["plain"], steps)) == 1.0
        log = evaluated(url, tmp_path, targets["steered"], steps, plan=STEER.to_json())
        assert accuracy(log) == 1.0
    assert len(server.bodies) == 2 * len(PROMPTS)  # the second time by the cache

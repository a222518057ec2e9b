"""Toy engine of docs/new-engine.md: each answer equals the answer to the request alone."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import ferrohook as fh
from support.faults import NOWHERE, Injector

if TYPE_CHECKING:
    from torch import Tensor

PAGE = Path(__file__).parent.parent.parent / "docs" / "new-engine.md"
WIDTH, NEW = 8, 5
UNGUARDED = {"state", "failures", "reason_of"}
"""Functions that run after a fault."""


@pytest.fixture(scope="module")
def toy() -> dict[str, Any]:
    (code,) = re.findall(r'```python title="toy_engine.py"\n(.*?)```', PAGE.read_text(), re.DOTALL)
    assert code.count("\n") <= 150
    names: dict[str, Any] = {"__name__": "toy_engine"}
    exec(compile(code, str(PAGE), "exec", dont_inherit=True), names)
    torch.manual_seed(3)
    return names


def engine(toy: dict[str, Any]) -> Any:
    return toy["ToyEngine"](toy["ToyModel"]())


def alone(model: Any, request: Any, vector: Tensor | None, at: str | None) -> Tensor:
    """Checks the text of a request by hand; returns a layer's output for its tokens."""
    kept = []

    def hook(_module: object, _args: object, output: Tensor) -> Tensor:
        if vector is not None:
            first = request.prompt_length if at == "generated" else 0
            output = torch.cat([output[:first], output[first:] + vector])
        kept.append(output)
        return output

    handle = model.layers[1].register_forward_hook(hook)
    with torch.no_grad():
        hidden = model(torch.tensor(request.tokens[:-1]))
        logits = model.head(hidden)[request.prompt_length - 1 :]
    handle.remove()
    assert logits.argmax(-1).tolist() == request.tokens[request.prompt_length :]
    return kept[0]


def test_each_request_is_served_as_alone(toy: dict[str, Any]) -> None:
    made = engine(toy)
    rng = random.Random(1)  # noqa: S311 (tests)
    asked = []
    for number in range(30):
        vector = torch.randn(WIDTH) if number % 3 else None
        at = rng.choice([None, "generated"])
        entries = [] if vector is None else [fh.on("layers.1", fh.Add(vector), at=at)]
        plan = fh.Plan(*entries, fh.keep("layers.1")).to_json() if number % 4 else None
        vector = vector if plan else None
        prompt = [rng.randrange(32) for _ in range(rng.randint(1, 20))]
        asked.append((made.submit(prompt, NEW, plan), vector, at, plan))
        for _ in range(rng.randrange(3)):
            made.step()
    made.run()
    for request, vector, at, plan in asked:
        assert request.failure is None
        kept = alone(made.model, request, vector, at)
        if plan is not None:
            torch.testing.assert_close(request.acts["layers.1"], kept)
    assert len(made.worker.requests) == 0


def test_a_plan_that_fails_ends_its_request_alone(toy: dict[str, Any]) -> None:
    made = engine(toy)
    fails = made.submit([1, 2], NEW, fh.Plan(fh.keep("layers.0", max_bytes=1)).to_json())
    wild = made.submit([1, 2], NEW, fh.Plan(fh.on("layers.0", fh.Scale(1e38))).to_json())
    plain = made.submit([1, 2, 3], NEW)
    with pytest.raises(ValueError, match="closest names"):
        made.submit([1], NEW, fh.Plan(fh.keep("layers.9")).to_json())
    made.run()
    assert "max_bytes" in fails.failure
    assert fails.tokens == [1, 2]
    assert wild.failure is None  # tanh hides it
    alone(made.model, plain, None, None)


def test_a_fault_in_any_call_fails_requests_with_plans_alone(toy: dict[str, Any]) -> None:
    plan = fh.Plan(fh.on("layers.1", fh.Add(torch.ones(WIDTH))), fh.keep("layers.1")).to_json()

    def run(at: int | None) -> Injector:
        made, injector = engine(toy), Injector(UNGUARDED, at)
        for _ in range(2):
            had_fault = injector.where != NOWHERE
            planned, plain = made.submit([1, 2, 3], NEW, plan), made.submit([4, 5], NEW)
            while made.requests:
                with injector.here():
                    made.step()
            alone(made.model, plain, None, None)
            if had_fault or planned.failure is None:
                alone(made.model, planned, torch.ones(WIDTH), None)
            else:
                assert injector.where in planned.failure
        return injector

    first = run(None)
    for at in first.draw(60):
        run(at)

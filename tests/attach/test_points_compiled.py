"""Points of attention modules under `torch.compile`."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import ferrohook as fh
from ferrohook.attach.attention import AttentionPoints, points_of
from support.attention_models import attention_model, attention_of
from support.compiling import compiles

if TYPE_CHECKING:
    from collections.abc import Callable

pytest.importorskip("transformers")
pytestmark = compiles
IDS = torch.arange(1, 13).reshape(2, 6)


@pytest.fixture(scope="module")
def llama() -> Any:
    return attention_model("llama", num_hidden_layers=1)


def points(model: nn.Module, layer: int = 0) -> AttentionPoints:
    return points_of(attention_of(model, "llama", layer))


class Graphs:
    """Compiles a model, and counts its graphs."""

    def __init__(self, model: Any) -> None:
        self.count = 0
        self._model = torch.compile(model, backend=self._compile, fullgraph=True)

    def _compile(self, graph: Any, _inputs: Any) -> Callable[..., Any]:
        self.count += 1
        forward: Callable[..., Any] = graph.forward
        return forward

    def __call__(self) -> Tensor:
        with torch.no_grad():
            return self._model(IDS, use_cache=False).logits


def eager(model: Any) -> Tensor:
    with torch.no_grad():
        return model(IDS, use_cache=False).logits


def scaled(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 0.5


def test_a_hook_of_each_point_stands_in_the_graph(llama: Any) -> None:
    graphs, reached = Graphs(llama), eager(llama)
    with contextlib.ExitStack() as stack:
        for point in points(llama).all:
            stack.enter_context(fh.register(point, "", scaled))
            before, reached = reached, eager(llama)
            assert not torch.equal(reached, before), point.name
        torch.testing.assert_close(graphs(), reached)


def test_a_hook_comes_and_goes(llama: Any) -> None:
    graphs, plain = Graphs(llama), eager(llama)
    assert torch.equal(graphs(), plain)  # traced before there were points
    with fh.register(points(llama).z, "", scaled) as handles:
        expected = eager(llama)
        assert not torch.equal(expected, plain)
        torch.testing.assert_close(graphs(), expected)
        count = graphs.count
        torch.testing.assert_close(graphs(), expected)
        assert graphs.count == count
        handles.disable()
        torch.testing.assert_close(graphs(), plain)
    assert torch.equal(graphs(), plain)


def test_a_graph_of_an_instrumented_model_is_traced_anew_for_a_point(llama: Any) -> None:
    with fh.instrument(llama):
        graphs, plain = Graphs(llama), eager(llama)
        assert torch.equal(graphs(), plain)
        with fh.register(points(llama).q, "", scaled):
            torch.testing.assert_close(graphs(), eager(llama))
        assert torch.equal(graphs(), plain)


def test_captures_and_interventions_work_in_the_graph(llama: Any) -> None:
    graphs, every = Graphs(llama), points(llama).all
    graphs()
    with contextlib.ExitStack() as stack:
        for point in every:
            stack.enter_context(fh.register(point, "", fh.Scale(0.5)))
        captures = [stack.enter_context(fh.capture(point, "")) for point in every]
        logits = eager(llama)
        expected = [acts[""].clone() for acts in captures]
        torch.testing.assert_close(graphs(), logits)
        for point, acts, tensor in zip(every, captures, expected, strict=True):
            torch.testing.assert_close(acts[""], tensor, msg=point.name)


def test_scopes_in_a_graph_are_those_of_the_context(llama: Any) -> None:
    graphs, plain = Graphs(llama), eager(llama)
    with fh.scope() as s:
        fh.register(points(llama).z, "", scaled, scope=s)
        inside = graphs()
    assert not torch.equal(inside, plain)
    assert torch.equal(graphs(), plain)

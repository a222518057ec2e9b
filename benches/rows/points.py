"""Hook points: against TransformerLens' on the same models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from benches.harness import Group, Row, Sampler, expect
from benches.rows.models import LAYERS, model_calls, stack
from ferrohook.compat.transformer_lens import HookedRootModule, HookPoint

if TYPE_CHECKING:
    from collections.abc import Callable


def rooted(root: Any, layers: list[nn.Module]) -> Any:
    """A model of either library."""

    class Rooted(root):  # type: ignore[misc]  # either class
        def __init__(self) -> None:
            super().__init__()
            self.steps = nn.Sequential(*layers)
            self.setup()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.steps(x)
            return result

    return Rooted()


def both(*, layers: bool) -> tuple[Any, Any]:
    """One model on our classes and on TransformerLens'."""
    from transformer_lens import HookedRootModule as LensRoot  # noqa: PLC0415 # pyright: ignore[reportMissingImports]
    from transformer_lens.hook_points import HookPoint as LensPoint  # noqa: PLC0415 # pyright: ignore[reportMissingImports]

    def steps(point: Any) -> list[nn.Module]:
        if not layers:
            return [point() for _ in range(LAYERS)]
        return [step for layer in stack().children() for step in (layer, point())]

    ours, other = rooted(HookedRootModule, steps(HookPoint)), rooted(LensRoot, steps(LensPoint))
    expect(len(ours.hook_dict) == len(other.hook_dict) == LAYERS, "as many hook points")
    return ours, other


def idle() -> dict[str, Sampler]:
    """Hook points in a row, and no hook."""
    ours, other = both(layers=False)
    x = torch.randn(1, 64)
    expect(ours(x) is x and other(x) is x, "the input as the output")
    return {
        "48 hook points in a row, idle": model_calls(ours.steps, x),
        "TransformerLens: 48 hook points in a row, idle": model_calls(other.steps, x),
    }


def cached() -> dict[str, Sampler]:
    """One call with a cache of all hook points."""
    ours, other = both(layers=True)
    x = torch.randn(1, 64)
    with torch.no_grad():
        (our_out, our_cache), (out, cache) = ours.run_with_cache(x), other.run_with_cache(x)
    expect(torch.equal(our_out, out), "the output of TransformerLens")
    expect(list(our_cache) == list(cache), "the names of TransformerLens")
    expect(all(torch.equal(our_cache[name], cache[name]) for name in cache), "its activations")
    return {
        "48 layers and hook points, run_with_cache": model_calls(ours.run_with_cache, x),
        "TransformerLens: run_with_cache": model_calls(other.run_with_cache, x),
    }


def hooked() -> dict[str, Sampler]:
    """One call with a hook on each hook point."""
    ours, other = both(layers=True)
    x = torch.randn(1, 64)
    fired: list[str] = []

    def note(tensor: torch.Tensor, hook: Any) -> None:  # noqa: ARG001
        fired.append(hook.name)

    def halve(tensor: torch.Tensor, hook: Any) -> torch.Tensor:  # noqa: ARG001
        return tensor / 2

    def observe(tensor: torch.Tensor, hook: Any) -> None:
        """Does nothing."""

    def calls(model: Any, hook: Callable[..., Any]) -> Callable[[Any], torch.Tensor]:
        hooks = [(name, hook) for name in model.hook_dict]
        return lambda x: model.run_with_hooks(x, fwd_hooks=hooks)

    with torch.no_grad():
        calls(ours, note)(x)
        calls(other, note)(x)
        expect(fired[:LAYERS] == fired[LAYERS:], "the calls of TransformerLens")
        expect(torch.equal(calls(ours, halve)(x), calls(other, halve)(x)), "its output")
        expect(torch.equal(ours(x), other(x)), "no hook left")
    return {
        "48 layers and hook points, run_with_hooks": model_calls(calls(ours, observe), x),
        "TransformerLens: run_with_hooks": model_calls(calls(other, observe), x),
    }


GROUPS = [
    Group(
        name="idle hook points, beside TransformerLens",
        setup=idle,
        rows=[
            Row(
                name="48 hook points in a row, idle",
                over="TransformerLens: 48 hook points in a row, idle",
                bar=0.40,
            )
        ],
        needs="transformer_lens",
    ),
    Group(
        name="run_with_cache, beside TransformerLens",
        setup=cached,
        rows=[
            Row(
                name="48 layers and hook points, run_with_cache",
                over="TransformerLens: run_with_cache",
                bar=0.40,
            )
        ],
        needs="transformer_lens",
    ),
    Group(
        name="run_with_hooks, beside TransformerLens",
        setup=hooked,
        rows=[
            Row(
                name="48 layers and hook points, run_with_hooks",
                over="TransformerLens: run_with_hooks",
                bar=0.50,
            )
        ],
        needs="transformer_lens",
    ),
]

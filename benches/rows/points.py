"""Hook points: against those of TransformerLens on the same models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ferrohook.benches.harness import Contest, Row, expect
from ferrohook.benches.models import LAYERS, model_calls, stack
from ferrohook.points import HookedRootModule, HookPoint

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
    """The same model on our classes and on those of TransformerLens."""
    from transformer_lens import HookedRootModule as LensRoot  # noqa: PLC0415 # pyright: ignore[reportMissingImports]
    from transformer_lens.hook_points import HookPoint as LensPoint  # noqa: PLC0415 # pyright: ignore[reportMissingImports]

    def steps(point: Any) -> list[nn.Module]:
        if not layers:
            return [point() for _ in range(LAYERS)]
        return [step for layer in stack().children() for step in (layer, point())]

    ours, other = rooted(HookedRootModule, steps(HookPoint)), rooted(LensRoot, steps(LensPoint))
    expect(len(ours.hook_dict) == len(other.hook_dict) == LAYERS, "as many hook points")
    return ours, other


def idle() -> Contest:
    """Hook points in a row, and no hook."""
    ours, other = both(layers=False)
    x = torch.randn(1, 64)
    expect(ours(x) is x and other(x) is x, "the input as the output")
    return Contest(model_calls(ours.steps, x), model_calls(other.steps, x))


def cached() -> Contest:
    """One call with a cache of all hook points."""
    ours, other = both(layers=True)
    x = torch.randn(1, 64)
    with torch.no_grad():
        (our_out, our_cache), (out, cache) = ours.run_with_cache(x), other.run_with_cache(x)
    expect(torch.equal(our_out, out), "the output of TransformerLens")
    expect(list(our_cache) == list(cache), "the names of TransformerLens")
    expect(all(torch.equal(our_cache[name], cache[name]) for name in cache), "its activations")
    return Contest(model_calls(ours.run_with_cache, x), model_calls(other.run_with_cache, x))


def hooked() -> Contest:
    """One call with a hook on each hook point."""
    ours, other = both(layers=True)
    x = torch.randn(1, 64)
    seen: list[str] = []

    def note(tensor: torch.Tensor, hook: Any) -> None:  # noqa: ARG001
        seen.append(hook.name)

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
        expect(seen[:LAYERS] == seen[LAYERS:], "the calls of TransformerLens")
        expect(torch.equal(calls(ours, halve)(x), calls(other, halve)(x)), "its output")
        expect(torch.equal(ours(x), other(x)), "no hook left")
    return Contest(
        model_calls(calls(ours, observe), x),
        model_calls(calls(other, observe), x),
    )


ROWS = [
    Row(
        name="48 hook points in a row, idle / TransformerLens",
        bar=0.40,
        setup=idle,
        needs="transformer_lens",
    ),
    Row(
        name="48 linear layers and hook points, run_with_cache / TransformerLens",
        bar=0.40,
        setup=cached,
        needs="transformer_lens",
    ),
    Row(
        name="48 linear layers and hook points, run_with_hooks / TransformerLens",
        bar=0.50,
        setup=hooked,
        needs="transformer_lens",
    ),
]

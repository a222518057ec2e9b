"""Detectors and controllers on a trivial module: `ferrohook.interventions` against mi-crow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ferrohook import interventions
from ferrohook.benches.harness import Contest, Row, expect, timed
from ferrohook.benches.hooks import Trivial, X, calls

if TYPE_CHECKING:
    from collections.abc import Callable


def counting(package: Any) -> Any:
    """A detector of either package that counts its calls."""

    class Counter(package.Detector):  # type: ignore[misc]
        count = 0

        def process_activations(self, module: nn.Module, input: Any, output: Any) -> None:  # noqa: A002, ARG002 (the contract's)
            self.count += 1

    return Counter()


def keeping(package: Any) -> Any:
    """A detector of either package that keeps the output."""
    return package.LayerActivationDetector("")


def replacing(package: Any) -> Any:
    """A controller of either package, whose function computes nothing."""
    replacement = X * 2
    return package.FunctionController("", lambda _: replacement)


def hooked(hook: interventions.Hook) -> nn.Module:
    """A trivial module with one of our hooks."""
    module = Trivial()
    interventions.Layers(module).register_hook("", hook)
    return module


def against_mi_crow(make: Callable[[Any], Any]) -> Callable[[], Contest]:
    """The same hook of both packages."""

    def setup() -> Contest:
        import mi_crow.hooks  # noqa: PLC0415 # pyright: ignore[reportMissingImports]

        our, their = make(interventions), make(mi_crow.hooks)
        ours, theirs = hooked(our), Trivial()
        theirs.register_forward_hook(their.get_torch_hook())
        # A copy: the other side writes to what it is given.
        expect(torch.equal(ours(X), theirs(X.clone())), "mi-crow's output")
        if isinstance(our, interventions.LayerActivationDetector):
            kept = our.get_captured()
            expect(kept is not None and torch.equal(kept, X), "mi-crow's activations")
        else:
            expect(getattr(our, "count", 1) == 1, "the detector to be called")
        return Contest(timed(calls(ours)), timed(calls(theirs)))

    return setup


def disabled() -> Contest:
    """A module with a disabled detector against a plain one."""
    detector = counting(interventions)
    ours = hooked(detector)
    detector.disable()
    expect(ours(X) is X and detector.count == 0, "the detector not to be called")
    return Contest(timed(calls(ours)), timed(calls(Trivial())))


ROWS = [
    Row(
        name="disabled detector / nn.Module without hooks",
        bar=0.60,
        setup=disabled,
    ),
    Row(
        name="one detector / mi-crow",
        bar=0.35,
        setup=against_mi_crow(counting),
        needs="mi_crow",
    ),
    Row(
        name="one detector that keeps a copy / mi-crow's, which keeps a reference",
        bar=1.5,
        setup=against_mi_crow(keeping),
        needs="mi_crow",
    ),
    Row(
        name="one controller / mi-crow",
        bar=0.35,
        setup=against_mi_crow(replacing),
        needs="mi_crow",
    ),
]

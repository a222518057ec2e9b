"""Detectors and controllers on a trivial module: `ferrohook.compat.mi_crow` against mi-crow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from benches.harness import Group, Row, Sampler, expect
from benches.rows.calls import Trivial, X, calls
from ferrohook.compat import mi_crow as interventions

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn


def counting(package: Any) -> Any:
    """A detector of either package that counts its calls."""

    class Counter(package.Detector):  # type: ignore[misc]
        count = 0

        def process_activations(self, module: nn.Module, input: Any, output: Any) -> None:  # noqa: A002, ARG002 (the contract's)
            self.count += 1

    return Counter()


def keeping(package: Any) -> Any:
    """A detector of either package that keeps the output: ours a copy, mi-crow's a reference."""
    return package.LayerActivationDetector("")


def replacing(package: Any) -> Any:
    """A controller of either package, whose function computes nothing."""
    replacement = X * 2
    return package.FunctionController("", lambda _: replacement)


def against_mi_crow() -> dict[str, Sampler]:
    """Equal hooks of both packages."""
    import mi_crow.hooks  # noqa: PLC0415 # pyright: ignore[reportMissingImports]

    makes: dict[str, Callable[[Any], Any]] = {
        "detector": counting,
        "detector that keeps the output": keeping,
        "controller": replacing,
    }
    samplers = {}
    for name, make in makes.items():
        our, their = make(interventions), make(mi_crow.hooks)
        ours, theirs = Trivial(), Trivial()
        interventions.Layers(ours).register_hook("", our)
        theirs.register_forward_hook(their.get_torch_hook())
        # A clone: the other side writes to its input.
        expect(torch.equal(ours(X), theirs(X.clone())), "mi-crow's output")
        if isinstance(our, interventions.LayerActivationDetector):
            captured = our.get_captured()
            expect(captured is not None and torch.equal(captured, X), "mi-crow's activations")
        else:
            expect(getattr(our, "count", 1) == 1, "the detector to be called")
        samplers[name] = calls(ours)
        samplers[f"mi-crow: {name}"] = calls(theirs)
    checked = interventions.LayerActivationDetector("", copy="checked")
    ours = Trivial()
    interventions.Layers(ours).register_hook("", checked)
    expect(ours(X) is X and checked.get_captured() is X, "a reference to the output")
    samplers["detector that keeps a checked reference"] = calls(ours)
    return samplers


GROUPS = [
    Group(
        name="detectors and controllers, beside mi-crow",
        setup=against_mi_crow,
        rows=[
            Row(name="detector", over="mi-crow: detector", bar=0.35),
            Row(
                name="detector that keeps the output",
                over="mi-crow: detector that keeps the output",
                bar=1.5,
            ),
            Row(
                name="detector that keeps a checked reference",
                over="mi-crow: detector that keeps the output",
                bar=0.5,
            ),
            Row(name="controller", over="mi-crow: controller", bar=0.35),
        ],
        needs="mi_crow",
    ),
]

"""Native detectors against torch's reductions, and a store's disk against safetensors alone."""

from __future__ import annotations

import math
import shutil
import tempfile
from itertools import repeat
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import torch

import ferrohook as fh
from benches.harness import Group, Row, Sampler, expect, one_thread, timed
from benches.rows.calls import Trivial

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrohook.detectors import NativeDetector

NUMBERS = 1_000_000
BATCHES, LAYERS = 8, 4
"""Number of batches of 16 MB, 4 tensors each: outputs of some layers of an encoder."""


def on_one_thread(call: Callable[[], object]) -> Callable[[int], None]:
    """A loop of calls on one thread, the one that is timed."""

    def loop(count: int) -> None:
        with one_thread():
            for _ in repeat(None, count):
                call()

    return loop


def watched(detector: NativeDetector) -> fh.HookedModule[Trivial]:
    """A module that does nothing, with a detector on its output."""
    module = fh.HookedModule(Trivial())
    module.register_forward_hook(detector)
    return module


def non_finite() -> dict[str, Sampler]:
    """A call of a module with a detector, against torch's reduction alone."""
    torch.manual_seed(0)
    x = torch.randn(NUMBERS)
    holes = x.clone()
    holes[7], holes[-1] = torch.nan, torch.inf
    detector = fh.detectors.NonFiniteDetector()
    module = watched(detector)
    module(holes)
    module(x)
    found = detector.snapshot()
    expect(found == {"tensors": 2, "affected": 1, "nan": 1, "inf": 1}, "both of two numbers")
    return {
        "NonFiniteDetector, 10⁶ floats": timed(on_one_thread(lambda: module(x))),
        "torch.isfinite(x).all()": timed(on_one_thread(lambda: torch.isfinite(x).all())),
    }


def norms() -> dict[str, Sampler]:
    """Mean, variance, minimum and maximum by a detector, against torch's reductions."""
    torch.manual_seed(0)
    x = torch.randn(NUMBERS)
    detector = fh.detectors.NormDetector()
    module = watched(detector)
    module(x)
    found = detector.snapshot()
    for name, by_torch in {
        "mean": x.mean(),
        "variance": x.var(),
        "min": x.min(),
        "max": x.max(),
    }.items():
        same = math.isclose(found[name], by_torch.item(), rel_tol=1e-5, abs_tol=1e-6)
        expect(same, f"torch's {name}, {by_torch}, not {found[name]}")
    return {
        "NormDetector, 10⁶ floats": timed(on_one_thread(lambda: module(x))),
        "mean, var, min and max by torch": timed(
            on_one_thread(lambda: (x.mean(), x.var(), x.min(), x.max()))
        ),
    }


def storing() -> dict[str, Sampler]:
    """Gigabytes a second of wall time: another thread writes.

    Neither side copies: as in `collect`, the tensors are the store's own.
    """
    from safetensors.torch import load_file, save_file  # noqa: PLC0415 (an extra)

    torch.manual_seed(0)
    outputs = {f"layer.{n}": torch.randn(64, 128, 128) for n in range(LAYERS)}
    nbytes = BATCHES * sum(tensor.nbytes for tensor in outputs.values())

    def by_store(folder: Path) -> None:
        with fh.data.LocalStore(folder) as store:
            for batch in range(BATCHES):
                for layer, tensor in outputs.items():
                    store.put("run", batch, layer, {"output": tensor}, copy=False)
                store.complete("run", batch)

    def by_file(folder: Path) -> None:
        for batch in range(BATCHES):
            save_file(outputs, folder / f"{batch}.safetensors")

    def speed(write: Callable[[Path], None]) -> Callable[[float], float]:
        def sample(_seconds: float) -> float:
            folder = Path(tempfile.mkdtemp())
            try:
                start = perf_counter()
                write(folder)
                return nbytes / 1e9 / (perf_counter() - start)
            finally:
                shutil.rmtree(folder)

        return sample

    folder = Path(tempfile.mkdtemp())
    by_store(folder)
    for batch in range(BATCHES):
        found = load_file(folder / "run" / f"{batch:08}.safetensors")
        for layer, tensor in outputs.items():
            expect(torch.equal(found[f"{layer}/output"], tensor), f"{layer} of batch {batch}")
    shutil.rmtree(folder)
    return {
        "LocalStore, 128 MiB in 8 batches": speed(by_store),
        "safetensors.torch.save_file": speed(by_file),
    }


GROUPS = [
    Group(
        name="a detector of NaN and infinity",
        setup=non_finite,
        rows=[
            Row(name="NonFiniteDetector, 10⁶ floats", over="torch.isfinite(x).all()", bar=0.60),
        ],
    ),
    Group(
        name="a detector of moments and extremes",
        setup=norms,
        rows=[
            Row(
                name="NormDetector, 10⁶ floats",
                over="mean, var, min and max by torch",
                bar=0.50,
            )
        ],
    ),
    Group(
        name="writing activations",
        setup=storing,
        rows=[
            Row(
                name="LocalStore, 128 MiB in 8 batches",
                over="safetensors.torch.save_file",
                bar=0.80,
                at_least=True,
            )
        ],
        unit="GB/s",
        repeats=15,
    ),
]

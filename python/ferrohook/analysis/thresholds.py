"""`threshold`: where to put the threshold of a gate, from texts that it should tell apart."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from ferrohook.analysis.calls import ModelCall
from ferrohook.errors import HookError
from ferrohook.gates.aggregation import Window
from ferrohook.plans import Plan, keep
from ferrohook.plans.entries import GateEntry
from ferrohook.util.arguments import expect, expect_module
from ferrohook.util.tables import Printed, frame

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn

_MOST_LINES: Final = 20
"""Printed lines of a table."""


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ThresholdTable(Printed):
    """Hits and false alarms of a gate at each threshold, see `threshold`.

    `print` and notebooks show it.
    """

    best: float
    """The chosen threshold, for `above`."""
    thresholds: Tensor
    """All thresholds that differ in their result, ascending; float64, (thresholds,)."""
    hits: Tensor
    """Share of the texts of `yes` above each threshold: the true positive rate, or recall."""
    false_alarms: Tensor
    """Share of the texts of `no` above each threshold: the false positive rate."""
    f1: Tensor
    """F1 score at each threshold: harmonic mean of precision and recall."""
    yes: Tensor
    """Score of each text that should be above, -inf without one: float64, (texts,)."""
    no: Tensor
    """Score of each text that should not: float64, (texts,)."""

    @property
    def area(self) -> float:
        """Area under the ROC curve: how often a text of `yes` scores higher than a text of `no`."""
        higher = (self.yes[:, None] > self.no).double() + (self.yes[:, None] == self.no) / 2
        return float(higher.mean())

    def _columns(self) -> dict[str, Tensor]:
        return {
            "threshold": self.thresholds,
            "hits": self.hits,
            "false alarms": self.false_alarms,
            "F1": self.f1,
        }

    def to_pandas(self) -> pd.DataFrame:
        """Makes a DataFrame with a line for each threshold.

        Raises:
            HookError: the package pandas is not installed.
        """
        columns = self._columns()
        rows = torch.stack([*columns.values()], 1).tolist()
        return frame([dict(zip(columns, row, strict=True)) for row in rows])

    def _cells(self) -> list[list[str]]:
        """Returns the printed table, headings first; of many thresholds some."""
        columns = self._columns()
        count = len(self.thresholds)
        spread = (
            torch.linspace(0, count - 1, min(count, _MOST_LINES), device="cpu")
            .round()
            .long()
            .tolist()
        )
        at_best = int((self.thresholds - self.best).abs().argmin())
        lines = []
        for line in sorted({*spread, at_best}):
            found = [float(it[line]) for it in columns.values()]
            mark = "*" if line == at_best else ""
            lines.append([f"{found[0]:.4g}{mark}", *(f"{each:.2f}" for each in found[1:])])
        return [[*columns], *lines]


def threshold(
    model: nn.Module, gate: GateEntry, yes: Any, no: Any, *, false_alarms: float | None = None
) -> ThresholdTable:
    """Finds the threshold of a gate from texts for which it should fire, and others.

    The score of a text is the largest value that the gate has at one of its tokens: a condition
    `above(gate, threshold)` is true somewhere in the text if its score is above the threshold.

    Args:
        model: any model of tokens.
        gate: result of `fh.gate`, without `lag`.
        yes: inputs of the model, a row for each text that should be above the threshold: keyword
            arguments as a dict, a tuple of positional ones, or the only one. Padding counts by
            `attention_mask`.
        no: likewise, of texts that should not.
        false_alarms: largest share of `no` that may be above the threshold; the lowest such
            threshold is chosen. None for the one of the best F1 score.

    Returns:
        a table with the chosen threshold, which lies halfway between two scores.

    Raises:
        HookTypeError: an argument has the wrong type.
        HookError: the gate has no value in any text, or does not fit the model.
        ValueError: `false_alarms` is not from 0 to 1, or the gate has a `lag`.

    Examples:
        >>> found = fh.analysis.threshold(model, gate, sad_texts, other_texts)
        >>> plan = fh.Plan(gate, fh.on(LAYER, hook, when=fh.above("sad", found.best)))
    """
    expect_module(model, "threshold needs")
    expect(gate, GateEntry, "gate must be the result of fh.gate")
    if gate.gate.lag:
        msg = "a gate with lag= has values at generated tokens only, and these texts have none"
        raise ValueError(msg)
    if false_alarms is not None:
        expect(false_alarms, int | float, "false_alarms must be a number")
        if not 0 <= false_alarms <= 1:
            msg = f"false_alarms must be from 0 to 1, got {false_alarms}"
            raise ValueError(msg)
    scores = {name: _scores(model, gate, it, name) for name, it in (("yes", yes), ("no", no))}
    own, others = scores["yes"], scores["no"]
    scored = torch.cat((own, others))
    found = scored[scored.isfinite()].unique()  # ascending
    if not len(found):
        msg = f"gate {gate.gate.name!r} has no value in any text"
        raise HookError(msg)
    between = found[1:] / 2 + found[:-1] / 2
    # Below all scores everything fires, from the highest on nothing does.
    limits = torch.cat((found[:1] - 1 - found[:1].abs(), between, found[-1:]))
    hits = (own[:, None] > limits).double().mean(0)
    alarms = (others[:, None] > limits).double().mean(0)
    true, false = hits * len(own), alarms * len(others)
    f1 = 2 * true / (true + false + len(own))
    chosen = int(f1.argmax())
    if false_alarms is not None:
        chosen = int((alarms <= false_alarms).nonzero()[0])
    return ThresholdTable(float(limits[chosen]), limits, hits, alarms, f1, own, others)


@torch.no_grad()
def _scores(model: nn.Module, entry: GateEntry, inputs: Any, name: str) -> Tensor:
    """Returns the largest value of the gate in each text; -inf where it has none."""
    gate = entry.gate
    readings, values = dataclasses.replace(gate, over="token"), f"@gate.{gate.name}"
    plan = Plan(dataclasses.replace(entry, gate=readings), keep(values))
    least = gate.over.size if isinstance(gate.over, Window) else 1
    aggregation = gate.aggregation()
    found: list[float] = []
    with plan.prepare(model) as prepared:
        for call in ModelCall.of(inputs, name).batches(1):
            with prepared.open() as request:
                call.run(model)
            read = request.acts[values].tolist() if values in request.acts else []
            # The value over a prompt is known once, at its end.
            counts = [len(read)] if gate.over == "prompt" else [*range(least, len(read) + 1)]
            if len(read) < least:
                found.append(-math.inf)
                continue
            each = aggregation.values(read, counts)
            found.append(float(torch.tensor(each, dtype=torch.float64, device="cpu").max()))
    return torch.tensor(found, dtype=torch.float64, device="cpu")

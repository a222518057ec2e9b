"""Ends of the stream: the embedding before the first block, norm and logits after the last."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor

from ferrohook.quantity.anatomy.equations import SIGNIFICANT, fit, tolerance
from ferrohook.quantity.anatomy.observe import Hidden, ObservedTensor
from ferrohook.quantity.anatomy.stacks import NUMBERED, inside
from ferrohook.quantity.anatomy.subjects import through
from ferrohook.util.tensors import tensors_in

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import nn

    from ferrohook.quantity.anatomy.blocks import Anatomist
    from ferrohook.quantity.anatomy.observe import Look, ModuleCall
    from ferrohook.quantity.anatomy.subjects import Example, Subject

_MOST_MODULES: Final = 6
"""Modules between the embedding and the first block, or the last norm and the logits, at most."""


class Beginning(NamedTuple):
    """Start of the stream: `stream = modules(multiplier * first(embed) + positions)`."""

    embed: ObservedTensor
    multiplier: float
    positions: Tensor | None
    """Position embeddings: the added term, equal in all rows of the batch."""
    modules: tuple[str, ...]
    """Paths of modules that the sum passes, in order."""
    first: tuple[str, ...]
    """Paths of modules that the embedding passes, in order."""

    @property
    def is_term(self) -> bool:
        """True if the stream is the embedding by a factor, and positions."""
        return not self.modules and not self.first

    @property
    def is_multiple(self) -> bool:
        """True if the stream is a multiple of the embedding."""
        return self.is_term and self.positions is None

    @property
    def text(self) -> str:
        """The equation."""
        text = _applied("embed", self.first)
        text = text if self.positions is None else f"{text} + positions"
        return f"{_applied(text, self.modules)} = resid_pre.0"


class Ending(NamedTuple):
    """End of the stream: `logits = cap * tanh(multiplier * unembed(modules(norm)) / cap)`."""

    norm: ObservedTensor | None
    logits: ObservedTensor | None
    modules: tuple[str, ...]
    """Paths from the norm to the logits; the last is the unembedding."""
    multiplier: float = 1.0
    cap: float | None = None
    failure: float | None = None
    """Least residual of the model's results, if no logits are among them."""

    @property
    def text(self) -> str:
        """The equation."""
        text = _applied("final_norm" if self.norm is not None else "resid_post", self.modules)
        if self.multiplier != 1:
            text = f"{self.multiplier:.6g} * {text}"
        if self.cap is not None:
            text = f"{self.cap:.6g} * tanh({text} / {self.cap:.6g})"
        return f"{text} = logits"


def _applied(text: str, paths: Iterable[str]) -> str:
    """Returns the text of what modules return for a value, innermost first."""
    for path in paths:
        text = f"{path.rpartition('.')[2]}({text})"
    return text


def beginning(subject: Subject, look: Look, stream: int, start: int) -> Beginning | str:
    """Finds how the stream begins; the reason if it does not.

    Args:
        subject: the copy that was examined.
        look: of the copy.
        stream: value that the first block takes.
        start: time at which it begins.
    """
    model, example = subject.model, subject.example
    ids = [
        each
        for each in tensors_in([*example.args, *example.kwargs.values()])
        if not each.is_floating_point() and not each.is_complex()
    ]
    before = sorted((each for each in look.calls if each.end < start), key=lambda it: it.start)
    tables = [call for call in before if _looks_up(model, look, call, ids)]
    embedded = [
        (ObservedTensor.output(call.path, part), value, first)
        for call in tables
        for part in call.outputs
        if ObservedTensor.output(call.path, part) in look.sites
        for value, first in islice(_passed(before, call.outputs[part]), _MOST_MODULES)
    ]
    if not embedded:
        return "no module that ran before the first block looks up the token ids"
    total, modules, least = stream, list[str](), torch.inf
    for _ in range(_MOST_MODULES):
        for site, value, first in embedded:
            found = _embedded(look, total, value, example)
            if isinstance(found, tuple):
                return Beginning(site, *found, tuple(modules), first)
            least = min(least, found)
        inner = _returning(before, total)
        if inner is None:
            break
        modules.insert(0, inner.path)
        (total,) = inner.inputs.values()
    by = "" if least == torch.inf else f" by {least:.1e}"
    return (
        f"embed + positions = resid_pre.0 fails{by}: the input of the first block is a different "
        "sum"
    )


def _looks_up(model: nn.Module, look: Look, call: ModuleCall, ids: list[Tensor]) -> bool:
    """Returns True if a module returns the rows of its table that the example's ids name."""
    weight = getattr(model.get_submodule(call.path), "weight", None)
    if call.inputs or len(call.outputs) != 1 or not isinstance(weight, Tensor) or weight.dim() != 2:  # noqa: PLR2004 (a table)
        return False
    (value,) = call.outputs.values()
    returned = look.values[value]
    for each in ids:
        flat = each.reshape(-1)
        if returned.numel() != flat.numel() * weight.shape[1] or int(flat.max()) >= len(weight):
            continue
        # The weight of an offloaded module is there while it runs.
        rows = through(model, call.path, flat) if weight.is_meta else weight.detach()[flat.long()]
        if rows is None:
            continue
        rows = rows.to("cpu", returned.dtype).reshape(-1)
        factor = float(
            (returned.reshape(-1).double() @ rows.double()) / rows.double().square().sum()
        )
        if fit(returned.reshape(-1), [rows], (factor,)).holds:
            return True
    return False


def _embedded(
    look: Look, total: int, value: int, example: Example
) -> tuple[float, Tensor | None] | float:
    """Fits a value by a factor of the embedding, and a part that is the same in each row.

    Returns:
        Factor and rest; the residual if they do not fit.
    """
    if total == value:
        return 1.0, None
    one, other = look.values[total], look.values[value]
    if one.numel() != other.numel():
        return torch.inf
    alone = fit(one, [other])
    if alone.holds:
        return alone.multipliers[0], None
    if example.shape is None or example.shape[0] < 2:  # noqa: PLR2004 (rows to compare)
        return alone.residual
    rows, batch = one.double().reshape(example.shape[0], -1), example.shape[0]
    embedded = other.double().reshape(batch, -1)
    apart = embedded - embedded.mean(0)
    factor = float((apart * (rows - rows.mean(0))).sum() / apart.square().sum())
    limit = tolerance(one, other)
    factor = 1.0 if abs(factor - 1) <= limit else factor
    rest = rows - factor * embedded
    size = float(rows.abs().max())
    residual = float((rest - rest.mean(0)).abs().max()) / size
    # Rows that are alike are no embedding's: a decoder may have equal rows, for example.
    shown = float((factor * apart).abs().max()) > SIGNIFICANT * limit * size
    return (factor, rest.mean(0)) if residual <= limit and shown else residual


def _passed(calls: list[ModuleCall], value: int) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yields a value, and the outputs of modules that take only it, with their paths."""
    paths: tuple[str, ...] = ()
    yield value, paths
    while (call := next((it for it in calls if _takes_only(it, value)), None)) is not None:
        (value,) = call.outputs.values()
        paths = (*paths, call.path)
        yield value, paths


def _returning(calls: list[ModuleCall], value: int) -> ModuleCall | None:
    """Returns the outermost module that computes a value from one tensor."""
    for call in calls:
        taken, returned = [*call.inputs.values()], [*call.outputs.values()]
        if returned[:1] == [value] and len(taken) == 1 and taken[0] != value:
            return call
    return None


def ending(anatomist: Anatomist, stream: int, end: int) -> Ending:
    """Finds how the stream ends.

    Args:
        anatomist: of the look.
        stream: value that the last block returns.
        end: time at which it returns.
    """
    look = anatomist.look
    after = sorted((each for each in look.calls if each.start > end), key=lambda it: it.start)
    taking = [call for call in after if stream in call.inputs.values()]
    # A block of another stage, which is not proved, norms its input for itself.
    blocks = [call.path for call in taking if NUMBERED.search(call.path)]
    norms = (
        call
        for call in taking
        if len(call.inputs) == len(call.made) == 1
        and not inside(call.path, blocks)
        and anatomist.is_norm(call)
    )
    norm = next(norms, None)
    site, value = None, stream
    if norm is not None:
        ((part, value),) = norm.made.items()
        site = ObservedTensor.output(norm.path, part)
        site = site if site in look.sites else None
    # An engine may call the model's forward itself.
    outputs = next((call.outputs for call in look.calls if not call.path), {})
    failures: list[float] = []
    for projected, modules in islice(_passed(after, value), 1, _MOST_MODULES + 1):
        for part, returned in outputs.items():
            logits = ObservedTensor.output("", part)
            if logits not in look.sites or not _by_position(look, logits, projected, stream):
                continue
            found = _as_logits(look, returned, projected)
            if isinstance(found, tuple):
                if not isinstance(part, Hidden):
                    return Ending(site, logits, modules, *found)
            elif found < torch.inf:
                failures.append(found)
    return Ending(site, None, (), failure=min(failures, default=None))


def _by_position(look: Look, logits: ObservedTensor, value: int, stream: int) -> bool:
    """Returns True if the model returns a projection of each position of the stream."""
    width = look.sites[logits].shape[-1]
    positions = look.values[value].numel() // width
    return width * positions == look.values[value].numel() and any(
        positions * each.shape[-1] == look.values[stream].numel()
        for each in look.sightings
        if each.value == stream
    )


def _takes_only(call: ModuleCall, value: int) -> bool:
    """Returns True if a module takes only a value, and returns one that is another."""
    one = [*call.inputs.values()] == [value] and len(call.outputs) == 1
    return one and value not in call.outputs.values()


def _as_logits(look: Look, returned: int, value: int) -> tuple[float, float | None] | float:
    """Fits the model's results by a factor and a softcap of a projection.

    Returns:
        Factor and cap; the residual if they do not fit.
    """
    if returned == value:
        return 1.0, None
    one, other = look.values[returned].reshape(-1), look.values[value].reshape(-1)
    if one.numel() != other.numel():
        return torch.inf
    alone = fit(one, [other])
    if alone.holds:
        return alone.multipliers[0], None
    # cap * tanh(x / cap): the cap is where the largest element says, found by halving.
    x, y = other.double(), one.double()
    place = int(y.abs().argmax())
    size = float(y.abs()[place])
    low, high = size, size * 2**20
    if not 0 < low < float(x.abs()[place]):
        return alone.residual
    cap = high
    for _ in range(200):
        cap = (low + high) / 2
        if float(cap * torch.tanh(x[place].abs() / cap)) > size:
            high = cap
        else:
            low = cap
    limit = tolerance(one, other) * size
    # A round number, if it fits as well.
    for fitted in (float(f"{cap:.2g}"), float(f"{cap:.3g}"), cap):
        if float((fitted * torch.tanh(x / fitted) - y).abs().max()) <= limit:
            return 1.0, fitted
    return alone.residual

"""Heat maps, lines and bars of activations, by matplotlib."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from torch import Tensor

from ferrohook.captures.cache import ActivationCache
from ferrohook.errors import HookTypeError, SelectionError
from ferrohook.util.arguments import describe, expect
from ferrohook.util.tables import Row, norms_of, values_of
from ferrohook.util.tensors import as_tensor
from ferrohook.util.texts import imported

if TYPE_CHECKING:
    from matplotlib.axes import Axes


Numbers: TypeAlias = "Tensor | Sequence[float]"

MOST_LABELS = 40
"""Labels of an axis; a longer one labels every other row, or fewer."""
LINES_BEHIND_A_LEGEND = 4
"""Lines of a picture; the legend of more stands beside them."""
_NUMBERED: Final = re.compile(r"(.+?)\.(\d.*)")
"""Name of a layer: what all layers share, and the number with what follows it."""


def norms(
    acts: ActivationCache,
    pattern: str | re.Pattern[str] = "**",
    *,
    tokens: Sequence[str] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draws the L2 norm of each position's vector as a heat map, a row for each captured tensor.

    The position is a tensor's last but one dimension, its vectors lie along the last. Norms are
    averaged over all other dimensions, such as the batch.

    Args:
        acts: captured activations.
        pattern: modules to draw: a name, a glob or a compiled regex, see `select`.
        tokens: labels of the positions.
        ax: axes to draw into.

    Raises:
        SelectionError: `pattern` matches no captured tensor.
        StaleActivationError: a tensor was changed in place.
        HookTypeError: an argument has the wrong type.
        HookError: matplotlib is not installed.
    """
    rows = _rows(acts, pattern)
    grid = _padded([norms_of(values) for _, values in rows])
    return _by_layer(grid, _labels(rows, acts), tokens, "L2 norm", ax)


def difference(
    one: ActivationCache,
    other: ActivationCache,
    pattern: str | re.Pattern[str] = "**",
    *,
    tokens: Sequence[str] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draws where two caches differ: the norm of their difference, relative to the norm of `one`.

    A heat map like `norms`, of the modules that both have.

    Args:
        one: captured activations.
        other: activations of the same shapes.
        pattern: modules to draw, see `norms`.
        tokens: labels of the positions.
        ax: axes to draw into.

    Raises:
        SelectionError: `pattern` matches no tensor that both have.
        StaleActivationError: a tensor was changed in place.
        HookTypeError: the shapes of a tensor differ, or an argument has the wrong type.
        HookError: matplotlib is not installed.
    """
    expect(other, ActivationCache, "other must be an ActivationCache")
    others = {row[:3]: values for row, values in _readable(other.rows())}
    rows = [each for each in _rows(one, pattern) if each[0][:3] in others]
    if not rows:
        msg = f"{pattern!r} matches no tensor that both caches have"
        raise SelectionError(msg)
    grid = []
    for row, mine in rows:
        its = others[row[:3]]
        if mine.shape != its.shape:
            msg = (
                f"{row.name!r} has shape {tuple(mine.shape)} in one cache and {tuple(its.shape)} "
                "in the other"
            )
            raise HookTypeError(msg)
        pairs = zip(norms_of(mine - its.to(mine.device)), norms_of(mine), strict=True)
        grid.append([norm / own if own else norm for norm, own in pairs])
    return _by_layer(_padded(grid), _labels(rows, one), tokens, "relative difference", ax)


def logit_lens(  # noqa: PLR0913 (all but three by keyword)
    acts: ActivationCache,
    pattern: str | re.Pattern[str],
    to_logits: Callable[[Tensor], Tensor],
    *,
    decode: Callable[[int], str] = str,
    tokens: Sequence[str] | None = None,
    row: int = 0,
    ax: Axes | None = None,
) -> Axes:
    """Draws the token that each layer's hidden state would predict, coloured by probability.

    Args:
        acts: captured hidden states of the shape (batch, positions, width).
        pattern: modules to draw, see `norms`.
        to_logits: maps hidden states to logits: the model's last norm and its head, as in
            `lambda hidden: model.head(model.norm(hidden))`.
        decode: text of a token id, such as `tokenizer.decode`.
        tokens: labels of the positions.
        row: index in the batch.
        ax: axes to draw into.

    Raises:
        SelectionError: `pattern` matches no captured tensor.
        StaleActivationError: a tensor was changed in place.
        HookTypeError: a hidden state has other dimensions, or an argument has the wrong type.
        HookError: matplotlib is not installed.
    """
    rows = _rows(acts, pattern)
    best, ids = [], []
    for read, _ in rows:
        hidden = read.leaf
        if hidden.dim() != 3:  # noqa: PLR2004 (batch, positions, width)
            shape = tuple(hidden.shape)
            msg = (
                f"a hidden state must have shape (batch, positions, width), but {read.name!r} has "
                f"{shape}"
            )
            raise HookTypeError(msg)
        with torch.no_grad():
            found = to_logits(hidden[row]).float().softmax(-1).max(-1)
        best.append(found.values.tolist())
        ids.append(found.indices.tolist())
    texts = [[decode(token) for token in line] for line in ids]
    return predictions(_padded(best), texts, _labels(rows, acts), tokens=tokens, ax=ax)


def predictions(
    probabilities: Tensor | Sequence[Numbers],
    texts: Sequence[Sequence[str]],
    names: Sequence[str] | None = None,
    *,
    tokens: Sequence[str] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draws the tokens that layers predict at each position, coloured by probability.

    Args:
        probabilities: numbers by layer and position.
        texts: texts by layer and position.
        names: labels of the layers.
        tokens: labels of the positions.
        ax: axes to draw into.

    Raises:
        HookTypeError: `probabilities` has not two dimensions, or an argument has the wrong type.
        HookError: matplotlib is not installed.
    """
    grid = _numbers(probabilities, "probabilities", 2)
    lines = [_texts(line, "texts") for line in texts]
    ax = _by_layer(grid, names, tokens, "probability", ax, vmin=0, vmax=1)
    for y, line in enumerate(lines):
        for x, text in enumerate(line):
            dark = grid[y, x] < 0.5  # noqa: PLR2004 (half of the colours)
            color = "white" if dark else "black"
            # A dollar sign begins a formula.
            label = text.replace("$", r"\$")
            ax.text(x, y, label, color=color, ha="center", va="center", fontsize="small")
    return ax


def patching(  # noqa: PLR0913 (options by keyword)
    effects: Tensor | Sequence[Numbers],
    names: Sequence[str] | None = None,
    *,
    tokens: Sequence[str] | None = None,
    label: str = "effect",
    signed: bool = True,
    ax: Axes | None = None,
) -> Axes:
    """Draws the effect of patching each position of each module.

    Args:
        effects: numbers by module and position.
        names: labels of the modules.
        tokens: labels of the positions.
        label: label of the colours.
        signed: draw positive effects blue, negative ones red and none white. False for effects
            that have no sign, such as a distance: their colours begin at 0.
        ax: axes to draw into.

    Raises:
        HookTypeError: `effects` does not have two dimensions, or an argument has the wrong type.
        HookError: matplotlib is not installed.
    """
    grid = _numbers(effects, "effects", 2)
    finite = grid[grid.isfinite()].abs()
    limit = float(finite.max()) if finite.any() else 1.0
    if not signed:
        return _by_layer(grid, names, tokens, label, ax, vmin=0, vmax=limit)
    return _by_layer(grid, names, tokens, label, ax, vmin=-limit, vmax=limit, cmap="RdBu")


def attention(
    pattern: Tensor | Sequence[Numbers],
    *,
    tokens: Sequence[str] | None = None,
    queries: Sequence[str] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draws the pattern of one head: a row for each query, by the keys that it looks at.

    Args:
        pattern: weights by query and key, such as `acts["@pattern.3"][0, 5]`.
        tokens: labels of the keys.
        queries: labels of the queries; by default the last of `tokens`.
        ax: axes to draw into.

    Raises:
        HookTypeError: `pattern` does not have two dimensions, or an argument has the wrong type.
        HookError: matplotlib is not installed.
    """
    grid = _numbers(pattern, "pattern", 2)
    if queries is None and tokens is not None:
        keys = list(tokens)[: grid.shape[1]]
        queries = keys[max(len(keys) - grid.shape[0], 0) :]
    ax = _heat_map(grid, queries, tokens, "attention", ax, vmin=0)
    ax.set(title="attention", xlabel="key", ylabel="query")
    return ax


def steering(
    scales: Numbers,
    scores: Numbers | Mapping[str, Numbers],
    *,
    label: str = "score",
    ax: Axes | None = None,
) -> Axes:
    """Draws scores against the scale of a steering vector; the unsteered model is at 0.

    Args:
        scales: scales of the vector.
        scores: a score for each scale; or a dict of several lines by label.
        label: label of the axis of scores.
        ax: axes to draw into.

    Raises:
        HookTypeError: a line does not have one number for each scale.
        HookError: matplotlib is not installed.
    """
    xs = _numbers(scales, "scales", 1)
    lines = scores if isinstance(scores, Mapping) else {"": scores}
    points = {name: _numbers(line, "scores", 1) for name, line in lines.items()}
    for line in points.values():
        if len(line) != len(xs):
            msg = f"scores must have one number for each of the {len(xs)} scales, got {len(line)}"
            raise HookTypeError(msg)
    many = len(points) > LINES_BEHIND_A_LEGEND
    ax = _axes(ax, 7 if many else 5, 3)
    ax.axvline(0, color="grey", linewidth=0.8, linestyle=":")
    for name, line in points.items():
        ax.plot(xs.tolist(), line.tolist(), marker="o", markersize=3, label=name or None)
    ax.set(title="steering", xlabel="scale", ylabel=label)
    if isinstance(scores, Mapping):
        if many:
            ax.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
        else:
            ax.legend(frameon=False)
    return ax


_Read: TypeAlias = "list[tuple[Row, Tensor]]"
"""Rows of tensors, with their values in floating point."""


def _readable(rows: Iterable[Row]) -> _Read:
    return [(row, values) for row in rows if (values := values_of(row.leaf)) is not None]


def _rows(acts: ActivationCache, pattern: str | re.Pattern[str]) -> _Read:
    """Returns the captured tensors of the modules that match.

    Raises:
        SelectionError: there are none.
    """
    expect(acts, ActivationCache, "acts must be an ActivationCache")
    rows = _readable(acts.rows(pattern))
    if not rows:
        msg = f"{pattern!r} matches no tensor with values"
        raise SelectionError(msg)
    return rows


def _labels(rows: _Read, acts: ActivationCache) -> list[str]:
    labels = []
    for row, _ in rows:
        call = "" if row.call is None else f" #{row.call}"
        labels.append(f"{row.name or acts.model}{row.part}{call}")
    return labels


def _padded(lines: list[list[float]]) -> Tensor:
    """Makes a grid of lines, with NaN after the shorter ones."""
    width = max(map(len, lines), default=0)
    return torch.tensor([line + [torch.nan] * (width - len(line)) for line in lines], device="cpu")


def _numbers(values: Any, name: str, dimensions: int) -> Tensor:
    try:
        found = as_tensor(values, torch.float64)
    except (TypeError, ValueError) as error:
        msg = f"{name} must be a tensor or a sequence of numbers, got {describe(values)}: {error}"
        raise HookTypeError(msg) from error
    if found.dim() != dimensions:
        msg = f"{name} must have {dimensions} dimensions, got {found.dim()}"
        raise HookTypeError(msg)
    if found.is_complex():
        msg = f"{name} must be real numbers, got {found.dtype}"
        raise HookTypeError(msg)
    return found.detach().cpu().double()


def _texts(labels: Any, name: str) -> list[str]:
    """Validates and returns labels, or other texts."""
    expected = f"{name} must be a list of str"
    expect(labels, () if isinstance(labels, str) else Iterable, expected)
    found = [*labels]
    for each in found:
        expect(each, str, expected)
    return found


def _by_layer(
    grid: Tensor,
    names: Sequence[str] | None,
    tokens: Sequence[str] | None,
    label: str,
    ax: Axes | None,
    **colours: Any,
) -> Axes:
    """Draws a heat map with a row for each layer; what their names share is in the title."""
    short, shared = _shortened([] if names is None else _texts(names, "names"))
    ax = _heat_map(grid, None if names is None else short, tokens, label, ax, **colours)
    ax.set_title(f"{label}: {shared}.*" if shared else label)
    ax.set_xlabel("position" if tokens is None else "token")
    if names is not None:
        ax.set_ylabel("layer" if shared else "module")
    return ax


def _shortened(names: list[str]) -> tuple[list[str], str]:
    """Returns names without what most of them share before a number, and that."""
    numbered = [_NUMBERED.fullmatch(name) for name in names]
    counts = Counter(found[1] for found in numbered if found is not None)
    shared = next((stem for stem, count in counts.items() if 2 * count > len(names)), "")
    pairs = zip(names, numbered, strict=True)
    return [found[2] if found and found[1] == shared else name for name, found in pairs], shared


def _heat_map(
    grid: Tensor,
    names: Sequence[str] | None,
    tokens: Sequence[str] | None,
    label: str,
    ax: Axes | None,
    **colours: Any,
) -> Axes:
    height, width = grid.shape
    names = None if names is None else _texts(names, "names")
    tokens = None if tokens is None else _texts(tokens, "tokens")
    if names is not None and len(names) != height:
        msg = f"names must have one label for each of the {height} rows, got {len(names)}"
        raise HookTypeError(msg)
    if tokens is not None and len(tokens) < width:
        msg = f"tokens must have a label for each of the {width} positions, got {len(tokens)}"
        raise HookTypeError(msg)
    ax = _axes(ax, 3 + 0.45 * min(width, MOST_LABELS), 1.2 + 0.28 * min(height, MOST_LABELS))
    image = ax.imshow(grid.tolist(), aspect="auto", interpolation="nearest", **colours)
    if (figure := ax.figure) is not None:
        figure.colorbar(image, ax=ax, label=label)
    if names is not None:
        _tick(ax.set_yticks, names)
    if tokens is not None:
        _tick(ax.set_xticks, tokens[:width], rotation=45, ha="right")
    return ax


def _tick(set_ticks: Callable[..., object], labels: Sequence[str], **style: Any) -> None:
    step = -(-len(labels) // MOST_LABELS)
    places = range(0, len(labels), step)
    # A dollar sign begins a formula.
    set_ticks(places, [labels[place].replace("$", r"\$") for place in places], **style)


def _axes(ax: Axes | None, width: float, height: float) -> Axes:
    if ax is not None:
        return ax
    plt = imported("matplotlib.pyplot", "plot", extra="plot")
    made: Axes = plt.subplots(figsize=(width, height), layout="constrained")[1]
    return made

"""`active_features`: the features of a dictionary that texts activate most, with their tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor

from ferrohook.analysis.calls import ModelCall
from ferrohook.analysis.targets import Targets, cloned
from ferrohook.dictionaries.dictionary import Dictionary
from ferrohook.errors import HookError
from ferrohook.util.arguments import at_least, expect, expect_callable, expect_module
from ferrohook.util.progress import progress_bar
from ferrohook.util.tables import Printed, frame

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pandas as pd
    from torch import nn

    from ferrohook.analysis.lens import Decoder


_AROUND: Final = 4
"""Tokens that are shown on either side of the most active one."""


class FeatureActivity(NamedTuple):
    """Activity of a feature in some texts."""

    feature: int
    """Number of the feature."""
    value: float
    """Its largest value."""
    row: int
    """Row of the text with that value."""
    position: int
    """Position of its token."""
    tokens: int
    """Number of tokens at which the feature is active."""


@dataclass(frozen=True, eq=False, repr=False)
class ActiveFeatures(Printed):
    """Features that texts activate most, see `active_features`. `print` and notebooks show them."""

    features: Sequence[FeatureActivity]
    """Active features, by decreasing value."""
    values: Tensor
    """Their values at all tokens, (rows, positions, features), float32; 0 at padding."""
    texts: Sequence[Sequence[str]]
    """Texts of the tokens of each row; empty for padding."""

    def to_pandas(self) -> pd.DataFrame:
        """Makes a DataFrame with a line for each feature.

        Raises:
            HookError: the package pandas is not installed.
        """
        return frame([{**it._asdict(), "token": self._token(it)} for it in self.features])

    def _token(self, each: FeatureActivity) -> str:
        return self.texts[each.row][each.position]

    def _cells(self) -> list[list[str]]:
        """Returns the printed table, headings first."""
        lines = [["feature", "value", "tokens", "text"]]
        for each in self.features:
            words = [*self.texts[each.row]]
            words[each.position] = f"«{words[each.position].strip()}»"
            start = max(each.position - _AROUND, 0)
            text = "".join(words[start : each.position + _AROUND + 1]).replace("\n", " ")
            lines.append([str(each.feature), f"{each.value:.3g}", f"{each.tokens:,}", text.strip()])
        return lines


@torch.no_grad()
def active_features(  # noqa: PLR0913 (options by keyword)
    model: nn.Module,
    inputs: Any,
    dictionary: Dictionary,
    *,
    top: int = 10,
    decode: Callable[[int], str] | Decoder = str,
    skip_first: int = 0,
    batch_size: int = 8,
    progress: bool = True,
) -> ActiveFeatures:
    """Lists the features of a dictionary that are most active in texts, with their tokens.

    Args:
        model: any model of tokens; call `eval()` before.
        inputs: keyword arguments of the model, a tuple of positional ones, or the only one.
            Padding counts by `attention_mask`.
        dictionary: with the place that it reads.
        top: number of features.
        decode: a tokenizer, or a function of a token id.
        skip_first: first tokens of each text that are left out: models give them huge norms.
        batch_size: texts of a forward.
        progress: show a progress bar, if stderr is a terminal and rich or tqdm is installed.

    Raises:
        HookTypeError: an argument has the wrong type, or the dictionary another width.
        HookError: the dictionary does not say which place it reads, or no feature is active.
        SelectionError: the model lacks the place.
        ValueError: a number is too small.

    Examples:
        >>> print(fh.analysis.active_features(model, ids, sae, decode=tokenizer))
    """
    expect_module(model, "active_features needs")
    expect(dictionary, Dictionary, "dictionary must be a fh.Dictionary")
    if dictionary.reads is None:
        msg = "the dictionary does not say which place it reads: pass reads= to it"
        raise HookError(msg)
    at_least(1, "top", top)
    at_least(0, "skip_first", skip_first)
    decoding: Any = getattr(decode, "decode", decode)
    expect_callable(decoding, "decode must be a tokenizer or a function of a token id")
    targets, call = Targets(model, dictionary.reads), ModelCall.of(inputs, "inputs")

    def values_of(row: int, x: Tensor) -> Tensor:
        """Returns the values of all features in a text, (positions, d_sae); 0 where left out."""
        values = dictionary.encode(x).float().cpu()
        counts = torch.ones(len(values), dtype=torch.bool, device="cpu")
        if call.mask is not None:
            counts = call.mask[row].cpu()
        values[~counts | (counts.cumsum(0) <= skip_first)] = 0
        return values

    largest = torch.full((dictionary.d_sae,), -torch.inf, device="cpu")
    places = torch.zeros(dictionary.d_sae, 2, dtype=torch.int64, device="cpu")
    counts = torch.zeros(dictionary.d_sae, dtype=torch.int64, device="cpu")
    read: list[Tensor] = []
    batches = call.batches(batch_size)
    with progress_bar("active features", len(batches), "batch", shown=progress) as advance:
        for batch in batches:
            (x,) = targets.read(batch, cloned)[0].values()
            for own in x:
                number = len(read)
                values = values_of(number, own)
                read.append(own)
                best, position = values.max(0)
                better = best > largest
                largest[better] = best[better]
                places[better] = torch.stack((torch.full_like(position, number), position), 1)[
                    better
                ]
                counts += (values != 0).sum(0)
            advance()
    order = largest.sort(descending=True, stable=True).indices[:top]
    found = []
    for feature in order.tolist():
        if (value := float(largest[feature])) > 0:
            row, position = places[feature].tolist()
            count = int(counts[feature])
            found.append(FeatureActivity(feature, value, row, position, count))
    if not found:
        msg = f"no feature of {dictionary!r} is active in these texts"
        raise HookError(msg)
    kept = torch.tensor([each.feature for each in found], device="cpu")
    values = torch.stack([values_of(row, own)[:, kept] for row, own in enumerate(read)])
    ids = call.token_ids(values.shape[:2])
    labels = (
        torch.arange(values.shape[1], device="cpu").expand(len(values), -1) if ids is None else ids
    )
    shown = torch.ones_like(labels, dtype=torch.bool) if call.mask is None else call.mask
    text_of: Callable[[int], str] = str if ids is None else decoding
    texts = [
        [text_of(each) if token else "" for each, token in zip(row, mask, strict=True)]
        for row, mask in zip(labels.tolist(), shown.tolist(), strict=True)
    ]
    return ActiveFeatures(found, values, texts)

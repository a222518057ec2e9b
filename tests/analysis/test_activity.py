"""The most active features, against plain loops over tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ferrohook as fh
from support.dictionaries import D_IN, KINDS, dictionary_of
from support.language_models import language_model

pytest.importorskip("transformers")

IDS = torch.tensor([[3, 5, 9, 11, 4], [7, 1, 8, 2, 6], [0, 0, 2, 3, 4]])
MASK = torch.tensor([[1] * 5, [1] * 5, [0, 0, 1, 1, 1]])
PLACE = "@resid_post.0"


def expected(model: Any, made: fh.Dictionary, skip: int) -> dict[int, tuple[float, int, int, int]]:
    """Largest value, its row and position and the number of active tokens, by feature."""
    with torch.no_grad():
        x = fh.run(model, IDS, attention_mask=MASK, capture=PLACE).acts[PLACE]
    found: dict[int, tuple[float, int, int, int]] = {}
    values = made.encode(x)
    for row in range(len(IDS)):
        for position in MASK[row].nonzero().flatten().tolist()[skip:]:
            for feature, value in enumerate(values[row, position].tolist()):
                if not value:
                    continue
                known = found.get(feature)
                count = 1 if known is None else known[3] + 1
                best = (value, row, position) if known is None or value > known[0] else known[:3]
                found[feature] = (*best, count)
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("skip", "batch_size"), [(0, 8), (1, 2)])
def test_features_are_the_most_active_ones(kind: str, skip: int, batch_size: int) -> None:
    model = language_model("llama", D_IN)
    made = dictionary_of(kind, reads=PLACE)
    inputs = {"input_ids": IDS, "attention_mask": MASK}
    found = fh.analysis.active_features(
        model, inputs, made, top=6, skip_first=skip, batch_size=batch_size, progress=False
    )
    right = expected(model, made, skip)
    best = sorted((it for it in right.items() if it[1][0] > 0), key=lambda it: -it[1][0])[:6]
    assert [it.feature for it in found.features] == [feature for feature, _ in best]
    for each, (_, (value, row, position, count)) in zip(found.features, best, strict=True):
        assert each.value == pytest.approx(value, rel=1e-5)
        assert (each.row, each.position, each.tokens) == (row, position, count)
        line = found.values[row, position, found.features.index(each)]
        assert float(line) == pytest.approx(value, rel=1e-5)
    assert not found.values[2, :2].any()
    assert not fh.hooks(model)


def test_the_table_marks_the_token() -> None:
    pytest.importorskip("pandas")
    model = language_model("llama", D_IN)
    words = {each: f" w{each}" for each in range(32)}
    found = fh.analysis.active_features(
        model, IDS[:1], dictionary_of("relu", reads=PLACE), top=3, decode=words.__getitem__
    )
    first = found.features[0]
    token = f"w{int(IDS[0, first.position])}"
    assert f"«{token}»" in str(found)
    assert found.to_pandas()["token"][0].strip() == token


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"dictionary": "sae"}, fh.HookTypeError, "must be a fh.Dictionary"),
    ({"dictionary": dictionary_of("relu")}, fh.HookError, "which place it reads: pass reads="),
    ({"dictionary": dictionary_of("relu", reads="@no.0")}, fh.SelectionError, "@no"),
    ({"top": 0}, ValueError, "top must be at least 1"),
    ({"skip_first": -1}, ValueError, "skip_first must be at least 0"),
    ({"skip_first": 9}, fh.HookError, "no feature of .* is active"),
]


@pytest.mark.parametrize(("options", "error", "words"), REFUSED)
def test_bad_arguments_are_refused(
    options: dict[str, Any], error: type[Exception], words: str
) -> None:
    options = {"dictionary": dictionary_of("relu", reads=PLACE), **options}
    made = options.pop("dictionary")
    with pytest.raises(error, match=words):
        fh.analysis.active_features(language_model("llama", D_IN), IDS, made, **options)

"""Numbers that are finite, and told so by sums that may overflow."""

import pytest
import torch

from ferrohook.engines.finite import LIMIT, WatchedRows, is_drawable
from ferrohook.engines.requests import Span

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
OURS = [Span("a", 1, 2, 0, 2)]


@each_dtype
def test_watched_rows_alone_are_cleaned(dtype: torch.dtype) -> None:
    rows = torch.randn(1, 2, 4, 8).to(dtype)
    large = min(1e25, torch.finfo(dtype).max)  # its square overflows in float32
    rows[0, 0, 2, 3] = large
    rows[0, 1, 3, 0] = torch.nan  # of an unwatched row
    watched = WatchedRows(OURS)
    cleaned = watched.clean(rows, 2, "keys")
    torch.testing.assert_close(cleaned, rows, rtol=0, atol=0, equal_nan=True)
    assert watched.lost() == {}

    rows[0, 1, 2, 7] = -torch.inf
    expected = rows.clone()
    expected[0, 1, 2, 7] = 0
    cleaned = watched.clean(rows, 2, "keys")
    torch.testing.assert_close(cleaned, expected, rtol=0, atol=0, equal_nan=True)
    assert watched.lost() == {"a": "keys"}
    assert watched.is_bad("a")


def test_rows_of_each_request_are_told_apart() -> None:
    watched = WatchedRows([Span("a", 0, 2, 0, 2), Span("b", 2, 1, 5, 2)])
    rows = torch.randn(3, 8)
    assert watched.clean(rows, 0, "hidden states") is rows
    assert not watched.is_bad("a")
    rows[1, 4] = torch.nan
    watched.clean(rows, 0, "hidden states")
    assert watched.is_bad("a")
    assert not watched.is_bad("b")
    assert watched.arrived


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_magnitudes_that_overflow_with_others_are_cleaned(dtype: torch.dtype) -> None:
    rows = torch.zeros(1, 2, 4, 8, dtype=dtype)
    rows[0, 0, 1, :2] = torch.tensor([2 * LIMIT, -2 * LIMIT])  # their sum is 0
    watched = WatchedRows(OURS)
    assert not watched.clean(rows, 2, "values").any()
    assert watched.lost() == {"a": "values"}


@each_dtype
def test_logits_of_watched_rows_alone_are_cleaned(dtype: torch.dtype) -> None:
    scores = torch.randn(1, 3, 16).to(dtype)
    scores[0, :, 4] = -torch.inf  # a token that the model masks
    watched = WatchedRows(OURS)
    drawn = ["b", "a", "c"]
    assert torch.equal(watched.clean_logits(scores, drawn), scores)
    scores[0, :, 5] = torch.inf
    expected = scores.clone()
    expected[0, 1] = 0
    assert torch.equal(watched.clean_logits(scores, drawn), expected)
    assert watched.lost() == {"a": "logits"}


@each_dtype
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_without_a_token_is_told_from_masked_tokens(dtype: torch.dtype, bad: float) -> None:
    scores = torch.randn(1, 3, 16).to(dtype)
    scores[0, :, 4] = -torch.inf  # a token that the model masks
    assert is_drawable(scores)
    scores[0, 1, slice(None) if bad < 0 else 5] = bad
    assert not is_drawable(scores)

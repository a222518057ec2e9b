"""Tables of an `ActivationCache`: HTML for notebooks, a pandas DataFrame, rows."""

from __future__ import annotations

import copy
import math
import re
import sys
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import ferrohook as fh
from support.capture import Twice

if TYPE_CHECKING:
    from pathlib import Path


class Cells(HTMLParser):
    """Texts of the cells of a table, by row."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag == "tr":
            self.rows.append([])
        elif tag in {"th", "td"}:
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        if self.rows and self.rows[-1] and data.strip():
            self.rows[-1][-1] += data


def table(acts: fh.ActivationCache) -> list[list[str]]:
    return Cells(acts._repr_html_()).rows


def norms(value: Any) -> str:
    """Sparkline of a captured value."""
    return table(fh.ActivationCache({"x": value}))[1][-1]


def test_a_notebook_shows_the_printed_table_with_norms(model: nn.Sequential, x: Tensor) -> None:
    with fh.capture(model) as acts:
        model(x)
    heading, *rows = table(acts)
    assert heading == ["name", "shape", "dtype", "bytes", "norms"]
    printed = [re.split(" {2,}", line) for line in repr(acts).splitlines()]
    assert [heading[:-1], *(row[:-1] for row in rows)] == printed
    assert [len(row[-1]) for row in rows] == [5, 5, 5, 5]
    assert "<" not in repr(acts)


def test_a_sparkline_has_the_norm_of_each_position() -> None:
    positions = torch.tensor([0.0, 1.0, 2.0, 4.0])[:, None].expand(4, 3)
    assert norms(positions) == "▁▃▅█"
    # Averaged over all dimensions before the positions.
    assert norms(positions.expand(2, 5, 4, 3)) == "▁▃▅█"
    assert norms(positions.to(torch.int64)) == "▁▃▅█"
    assert norms(positions.bool()) == "▁███"
    assert norms(positions.half() * 1e4) == "▁▃▅█"  # a norm above the greatest half
    assert norms(positions.double() * 1e100) == "▁▃▅█"
    assert norms(torch.complex(positions, positions)) == "▁▃▅█"
    assert norms(torch.tensor(3.0)) == norms(torch.ones(3)) == "█"
    assert norms(torch.zeros(2, 3)) == "▁▁"


def test_a_long_sparkline_shows_the_largest_norms() -> None:
    positions = torch.ones(3_200, 1)
    positions[1_234] = 100
    line = norms(positions)
    assert len(line) == 32
    assert line.index("█") == 12


def test_nan_and_infinity_are_marked_in_a_sparkline() -> None:
    positions = torch.ones(4, 2)
    positions[1, 0], positions[2, 1] = math.nan, math.inf
    assert norms(positions) == "█!!█"
    assert norms(torch.full((64, 1), math.nan)) == "!" * 32


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(2, 3, device="meta"),
        torch.ones(2, 3).to_sparse(),
        torch.empty(0, 3),
        None,
        "text",
    ],
)
def test_a_value_without_readable_numbers_has_no_sparkline(value: Any) -> None:
    acts = fh.ActivationCache({"x": (torch.ones(1), value)})
    assert table(acts)[2][-1] == ""
    assert len(repr(acts).splitlines()) == 3
    assert math.isnan(pytest.importorskip("pandas").Series(acts.to_pandas()["norm"])[1])


def test_a_value_changed_in_place_is_named_so(model: nn.Sequential, x: Tensor) -> None:
    with fh.capture(model, ["0", "2"]) as acts:
        hidden = model[0](x)
        model[2](model[1](hidden))
    hidden.add_(1)
    rows = table(acts)
    assert rows[1][-1] == "changed in place"
    assert len(rows[2][-1]) == 5
    pytest.importorskip("pandas")
    with pytest.raises(fh.StaleActivationError):
        acts.to_pandas()


def test_names_are_escaped() -> None:
    text = fh.ActivationCache({"<b>x</b>": torch.ones(1)}, model="<i>")._repr_html_()
    assert "&lt;b&gt;x&lt;/b&gt;" in text
    assert "<b>" not in text


def test_a_long_table_names_the_number_of_rows_left_out() -> None:
    acts = fh.ActivationCache({"x": [torch.ones(1)] * 205}, per_call=True)
    assert len(table(acts)) == 1 + 200
    assert "5 more rows" in acts._repr_html_()
    assert len(repr(acts).splitlines()) == 1 + 205


def test_gradients_have_tables(model: nn.Sequential, x: Tensor) -> None:
    with fh.capture(model, grads=True) as acts:
        model(x).sum().backward()
    assert [row[0] for row in table(acts.grads)] == ["name", "0", "1", "2", "(model)"]


# pandas


def test_a_data_frame_has_a_line_for_each_tensor(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    acts = fh.ActivationCache(
        {"a": [x, (x.half(), {"b": x[0]})], "": [x]}, model="Net", per_call=True
    )
    frame = acts.to_pandas()
    assert list(frame.columns[:6]) == ["name", "call", "part", "shape", "dtype", "bytes"]
    assert frame[["name", "call", "part", "dtype"]].values.tolist() == [
        ["a", 0, "", "float32"],
        ["a", 1, "[0]", "float16"],
        ["a", 1, "[1]['b']", "float32"],
        ["", 0, "", "float32"],
    ]
    assert frame["shape"].tolist() == [(2, 2), (2, 2), (2,), (2, 2)]
    assert frame["bytes"].tolist() == [16, 8, 8, 16]
    first = frame.iloc[0]
    assert (first["norm"], first["mean"], first["min"], first["max"]) == (2.5, 1.75, 0, 4)
    assert first["std"] == pytest.approx(float(x.std(correction=0)))
    assert frame["norm"].tolist() == [2.5, 2.5, 5, 2.5]


def test_a_data_frame_counts_nan_and_infinities() -> None:
    pytest.importorskip("pandas")
    acts = fh.ActivationCache({"x": torch.tensor([math.nan, math.inf, 1.0]), "y": torch.ones(2)})
    assert acts.to_pandas()["nonfinite"].tolist() == [2, 0]


def test_an_empty_cache_has_tables() -> None:
    assert table(fh.ActivationCache({})) == [["name", "shape", "dtype", "bytes", "norms"]]
    pytest.importorskip("pandas")
    assert fh.ActivationCache({}).to_pandas().empty


def test_to_pandas_names_the_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(fh.HookError, match="to_pandas needs the package pandas: pip install pand"):
        fh.ActivationCache({}).to_pandas()


# Rows


def test_rows_of_a_pattern() -> None:
    x = torch.ones(1)
    acts = fh.ActivationCache({"a.0": (x, None), "a.1": x, "b": x})
    assert [(row.name, row.part) for row in acts.rows("a.*")] == [
        ("a.0", "[0]"),
        ("a.0", "[1]"),
        ("a.1", ""),
    ]
    assert [row.name for row in acts.rows()] == ["a.0", "a.0", "a.1", "b"]
    with pytest.raises(fh.SelectionError, match="'c' matches no captured module"):
        list(acts.rows("c"))
    with pytest.raises(fh.HookTypeError, match="rows needs a name, a glob or a compiled regex"):
        list(acts.rows(3))  # type: ignore[arg-type]


def test_views_of_a_cache_name_what_is_in_it() -> None:
    acts = fh.ActivationCache({"a": torch.ones(1, 2), "b": torch.ones(3)})
    assert repr(acts.keys()) == "names of captured values: 'a', 'b'"
    assert repr(fh.ActivationCache({}).keys()) == "names of captured values: none"
    assert repr(acts.values()) == f"captured values:\n{acts!r}"
    assert repr(acts.items()) == f"names and captured values:\n{acts!r}"
    assert acts.keys() == {"a", "b"}
    assert acts.keys() | {"c"} == {"a", "b", "c"}


def test_tables_say_of_how_many_calls_a_value_is_the_last() -> None:
    model, x = Twice(), torch.ones(2, 4)  # runs `shared` twice
    with fh.capture(model, ["shared", "once"]) as acts:
        model(x)
        assert [line.split()[1:4] for line in str(acts).splitlines()[1:]] == [
            ["last", "of", "2"],
            ["(2,", "4)", "float32"],
        ]
        model(x)
    for shown in (str(acts), acts._repr_html_()):
        assert "last of 4" in shown
        assert "last of 2" in shown
    with fh.capture(model, ["shared", "once"], calls="all") as acts:
        model(x)
    assert "last" not in str(acts)
    with fh.capture(model, "once") as acts:
        model(x)
    assert "call" not in str(acts)
    acts = copy.deepcopy(acts)
    assert "call" not in str(acts)

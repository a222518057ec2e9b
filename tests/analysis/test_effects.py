"""The table of an analysis: its text, plots and counts."""

from __future__ import annotations

import pytest
import torch

import ferrohook as fh
from ferrohook.analysis import Effects

VALUES = torch.tensor([[0.5, -2.0, 0.0], [0.004, float("nan"), -0.0001]]).double()


def test_a_table_has_a_line_for_each_place() -> None:
    effects = Effects(VALUES, ["a", "layer"], ("position",), tokens=["x", "<y>", "z"])
    assert repr(effects) == (
        "name      x    <y>     z\na      0.50  -2.00  0.00\nlayer  0.00    nan  0.00"
    )
    assert ">-2.00</td>" in effects._repr_html_()
    assert ">&lt;y&gt;</th>" in effects._repr_html_()
    assert torch.equal(effects["a"], VALUES[0])
    assert effects.largest(2) == [("a <y>", -2.0), ("a x", 0.5)]
    with pytest.raises(fh.SelectionError, match="'b' is not among the places: 'a', 'layer'"):
        effects["b"]


def test_small_values_have_digits_and_wide_tables_a_gap() -> None:
    assert repr(Effects(VALUES[:, 0] / 1e4, ["a", "b"])) == (
        "name    effect\na     0.000050\nb     0.000000"
    )
    wide = repr(Effects(torch.ones(1, 40), ["a"], ("position",)))
    assert wide.split()[:8] == ["name", *map(str, range(6)), "…"]
    assert wide.splitlines()[0].split()[-1] == "39"


def test_heads_and_positions_are_columns_or_rows() -> None:
    by_head = Effects(VALUES, ["a", "b"], ("head",))
    assert repr(by_head).split()[:3] == ["name", "head", "0"]
    both = Effects(torch.arange(12.0).reshape(2, 3, 2), ["a", "b"], ("position", "head"))
    lines = repr(both).splitlines()
    assert [line[:8] for line in lines[1:]] == ["a head 0", "a head 1", "b head 0", "b head 1"]
    assert lines[2].split()[3:] == ["1.00", "3.00", "5.00"]
    named = {
        f"{name} head {head} {place}": float(both.values[number, place, head])
        for number, name in enumerate("ab")
        for place in range(3)
        for head in range(2)
    }
    assert dict(both.largest(12)) == named


def test_a_frame_has_a_line_for_each_cell() -> None:
    pytest.importorskip("pandas")
    both = Effects(
        torch.arange(12.0).reshape(2, 3, 2),
        ["a", "b"],
        ("position", "head"),
        "change",
        tokens=["x", "y", "z"],
    )
    frame = both.to_pandas()
    assert [*frame.columns] == ["name", "position", "head", "token", "change"]
    assert frame.change.tolist() == [*range(12)]
    assert frame.iloc[3].tolist() == ["a", 1, 1, "y", 3.0]
    assert Effects(torch.ones(2), ["a", "b"]).to_pandas().name.tolist() == ["a", "b"]


def test_a_table_plots_itself() -> None:
    mpl = pytest.importorskip("matplotlib")
    mpl.use("agg")
    both = Effects(torch.arange(12.0).reshape(2, 3, 2), ["a", "b"], ("position", "head"), "change")
    ax = both.plot()
    grid = torch.tensor(ax.images[0].get_array().filled(torch.nan))
    assert torch.equal(grid, both.values.transpose(1, 2).flatten(0, 1).double())
    assert [each.get_text() for each in ax.get_yticklabels()][1] == "a head 1"
    single = Effects(torch.ones(2), ["a", "b"]).plot()
    assert single.images[0].get_array().shape == (2, 1)
    heads = Effects(torch.ones(2, 3), ["a", "b"], ("head",)).plot()
    assert [each.get_xlabel() for each in (ax, single, heads)] == ["position", "", "head"]
    words = Effects(torch.ones(1, 2), ["a"], ("position",), tokens=["x", "y"]).plot()
    assert words.get_xlabel() == "token"
    pytest.importorskip("matplotlib.pyplot").close("all")

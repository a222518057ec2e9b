"""`ferrohook.plot`: axes with the values and labels of the activations."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import ferrohook as fh

mpl = pytest.importorskip("matplotlib")
mpl.use("agg")
plt = pytest.importorskip("matplotlib.pyplot")

if TYPE_CHECKING:
    from collections.abc import Iterator

    from matplotlib.axes import Axes

DOCS = Path(__file__).parents[2] / "docs"
LARGEST_PICTURE = 60_000


@pytest.fixture(autouse=True)
def _close_figures() -> Iterator[None]:
    yield
    plt.close("all")


def shown(ax: Axes) -> Tensor:
    """Values of a heat map."""
    return torch.tensor(ax.images[0].get_array().filled(torch.nan))


def labels(ticks: Any) -> list[str]:
    return [each.get_text() for each in ticks]


@pytest.fixture
def acts() -> fh.ActivationCache:
    torch.manual_seed(0)
    values = {"a": torch.randn(2, 3, 4), "b": (torch.randn(2, 3, 4), torch.randn(5, 4))}
    return fh.ActivationCache(values)


def drawn(name: str, acts: fh.ActivationCache, ax: Axes | None) -> Axes:
    arguments: dict[str, tuple[Any, ...]] = {
        "norms": (acts,),
        "difference": (acts, acts),
        "logit_lens": (acts, "a", nn.Linear(4, 6)),
        "attention": (torch.eye(3),),
        "patching": ([[1.0, -2.0]],),
        "steering": ([0, 1], [2, 3]),
    }
    axes: Axes = getattr(fh.plot, name)(*arguments[name], ax=ax)
    return axes


@pytest.mark.parametrize("name", fh.plot.__all__)
def test_each_draws_into_the_axes_or_a_new_figure(name: str, acts: fh.ActivationCache) -> None:
    mine = plt.figure().add_subplot()
    assert drawn(name, acts, mine) is mine
    assert mine.has_data()
    new = drawn(name, acts, None)
    assert new is not mine
    new.figure.canvas.draw()


@pytest.mark.parametrize("name", fh.plot.__all__)
def test_each_has_a_section_with_a_small_picture(name: str) -> None:
    drawn = re.compile(rf"```python\n[^`]*fh\.plot\.{name}\([^`]*```\n\n!\[.+\]\((.+)\)")
    pages = {page: page.read_text() for page in DOCS.rglob("*.md")}
    pictures = [page.parent / each for page in pages for each in drawn.findall(pages[page])]
    assert pictures
    for picture in pictures:
        assert 0 < picture.stat().st_size < LARGEST_PICTURE
    assert f"fh.plot.{name}" in pages[DOCS / "plotting.md"]


def test_norms_are_those_of_each_position(acts: fh.ActivationCache) -> None:
    ax = fh.plot.norms(acts, tokens=["x", "$y", "z", "u", "v"])
    expected = acts["a"].norm(dim=-1).mean(0)
    torch.testing.assert_close(shown(ax)[0, :3].float(), expected)
    torch.testing.assert_close(shown(ax)[2].float(), acts["b"][1].norm(dim=-1))
    assert shown(ax)[0, 3:].isnan().all()  # a shorter row
    assert labels(ax.get_yticklabels()) == ["a", "b[0]", "b[1]"]
    assert labels(ax.get_xticklabels()) == ["x", r"\$y", "z", "u", "v"]
    assert shown(fh.plot.norms(acts, "b")).shape == (2, 5)


def test_rows_are_labelled_by_call_and_model() -> None:
    x = torch.ones(1, 2)
    acts = fh.ActivationCache({"a": [x, x], "": [x]}, model="Net", per_call=True)
    assert labels(fh.plot.norms(acts).get_yticklabels()) == ["a #0", "a #1", "Net #0"]


def test_rows_of_layers_have_their_numbers_and_the_title_what_they_share() -> None:
    x = torch.ones(1, 2, 4)
    layers = [f"@resid_post.{number}" for number in range(3)]
    ax = fh.plot.norms(fh.ActivationCache(dict.fromkeys(["@resid_pre.0", *layers], x)))
    assert labels(ax.get_yticklabels()) == ["@resid_pre.0", "0", "1", "2"]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("position", "layer")
    assert ax.get_title() == "L2 norm: @resid_post.*"
    ax = fh.plot.patching(torch.ones(2, 2), ["h.0.mlp", "h.11.mlp"], tokens=["x", "y"])
    assert labels(ax.get_yticklabels()) == ["0.mlp", "11.mlp"]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("token", "layer")
    assert ax.get_title() == "effect: h.*"
    ax = fh.plot.patching(torch.ones(2, 2), ["a.0", "b.0"])  # neither is most of them
    assert labels(ax.get_yticklabels()) == ["a.0", "b.0"]
    assert (ax.get_ylabel(), ax.get_title()) == ("module", "effect")


def test_many_rows_are_labelled_in_part() -> None:
    acts = fh.ActivationCache({f"m{n}": torch.ones(1, 2) for n in range(100)})
    ax = fh.plot.norms(acts)
    assert labels(ax.get_yticklabels())[:2] == ["m0", "m3"]
    assert shown(ax).shape == (100, 1)


def test_the_difference_is_relative_to_the_first(acts: fh.ActivationCache) -> None:
    changed = acts["a"].clone()
    changed[:, 1] *= 3
    other = fh.ActivationCache({"a": changed, "c": changed})
    ax = fh.plot.difference(acts, other)
    torch.testing.assert_close(shown(ax).float(), torch.tensor([[0.0, 2.0, 0.0]]))
    zero = fh.ActivationCache({"a": torch.zeros(1, 1)})
    ones = fh.ActivationCache({"a": torch.ones(1, 1)})
    assert shown(fh.plot.difference(zero, ones)).tolist() == [[1.0]]
    phase = fh.ActivationCache({"a": torch.tensor([[1j]])})
    turned = fh.ActivationCache({"a": torch.tensor([[-1j]])})
    assert shown(fh.plot.difference(phase, turned)).tolist() == [[2.0]]
    with pytest.raises(fh.HookTypeError, match=r"'a' has shape \(2, 3, 4\) in .* and \(1, 1\)"):
        fh.plot.difference(acts, ones)
    with pytest.raises(fh.SelectionError, match="'b' matches no tensor that both caches have"):
        fh.plot.difference(acts, other, "b")
    with pytest.raises(fh.HookTypeError, match="other must be an ActivationCache, got dict"):
        fh.plot.difference(acts, {})  # type: ignore[arg-type]


def test_the_logit_lens_shows_the_most_probable_token(acts: fh.ActivationCache) -> None:
    head = nn.Linear(4, 6)
    ax = fh.plot.logit_lens(acts, "a", head, decode="uvwxyz".__getitem__, row=1)
    best = head(acts["a"][1]).softmax(-1).max(-1)
    torch.testing.assert_close(shown(ax)[0].float(), best.values.detach())
    assert [text.get_text() for text in ax.texts] == ["uvwxyz"[each] for each in best.indices]
    with pytest.raises(
        fh.HookTypeError, match=r"\(batch, positions, width\), but 'b' has \(5, 4\)"
    ):
        fh.plot.logit_lens(acts, "b", head)


def test_no_effect_of_patching_is_in_the_middle_of_the_colours() -> None:
    ax = fh.plot.patching(torch.tensor([[0.5, -2.0], [torch.nan, 0.0]]), ["a", "b"])
    assert ax.images[0].get_clim() == (-2, 2)
    assert fh.plot.patching([[0.0]]).images[0].get_clim() == (-1, 1)
    assert ax.images[0].cmap.name == "RdBu"


def test_colours_of_effects_without_a_sign_begin_at_zero() -> None:
    image = fh.plot.patching([[0.5, 2.0]], signed=False).images[0]
    assert image.get_clim() == (0, 2)
    assert image.cmap.name == mpl.rcParams["image.cmap"]


def test_bad_effects_are_refused() -> None:
    for wrong in ([1.0], [[1.0], [1.0, 2.0]], "text", torch.ones(1, 1, dtype=torch.complex64)):
        with pytest.raises(fh.HookTypeError, match="effects"):
            fh.plot.patching(wrong)  # type: ignore[arg-type]


def test_a_pattern_has_its_queries_down_and_its_keys_across() -> None:
    words = ["a", "b", "c", "d"]
    pattern = torch.tensor([[0.5, 0.25, 0.25, 0.0], [0.0, 0.0, 0.25, 0.75]])
    ax = fh.plot.attention(pattern, tokens=words)
    assert torch.equal(shown(ax), pattern.double())
    assert labels(ax.get_xticklabels()) == words
    assert labels(ax.get_yticklabels()) == ["c", "d"]  # the last, as with a cache
    assert ax.images[0].get_clim() == (0, 0.75)
    assert (ax.get_title(), ax.get_xlabel(), ax.get_ylabel()) == ("attention", "key", "query")
    other = fh.plot.attention(pattern, tokens=words, queries=["x", "y"])
    assert labels(other.get_yticklabels()) == ["x", "y"]
    assert not labels(fh.plot.attention(pattern).get_yticklabels())[0].isalpha()
    with pytest.raises(
        fh.HookTypeError, match="names must have one label for each of the 2 rows, got 1"
    ):
        fh.plot.attention(pattern, queries=["x"])
    with pytest.raises(fh.HookTypeError, match="pattern must have 2 dimensions, got 3"):
        fh.plot.attention(pattern[None])


def test_steering_draws_a_line_for_each_label() -> None:
    ax = fh.plot.steering(
        torch.tensor([-1, 0, 1]), {"p": [1, 2, 3], "q": torch.zeros(3)}, label="s"
    )
    lines = {line.get_label(): list(line.get_ydata()) for line in ax.lines[1:]}
    assert lines == {"p": [1, 2, 3], "q": [0, 0, 0]}
    assert (ax.get_title(), ax.get_xlabel(), ax.get_ylabel()) == ("steering", "scale", "s")
    assert ax.get_legend() is not None
    assert fh.plot.steering([0, 1], [0, 1]).get_legend() is None
    with pytest.raises(fh.HookTypeError, match="one number for each of the 2 scales, got 1"):
        fh.plot.steering([0, 1], [1])


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"tokens": ["x"]}, "tokens must have a label for each of the 2 positions, got 1"),
        ({"names": ["a", "b"]}, "names must have one label for each of the 1 rows, got 2"),
        ({"tokens": [1, 2]}, "tokens must be a list of str, got int"),
        ({"tokens": "ab"}, "tokens must be a list of str, got str"),
        ({"names": [1]}, "names must be a list of str, got int"),
    ],
)
def test_labels_match_the_grid(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(fh.HookTypeError, match=reason):
        fh.plot.patching([[1.0, 2.0]], **options)


def test_a_value_changed_in_place_is_not_drawn() -> None:
    model = nn.Sequential(nn.Identity())
    with fh.capture(model, "0") as acts:
        model(torch.ones(1, 2)).add_(1)
    with pytest.raises(fh.StaleActivationError):
        fh.plot.norms(acts)


def test_a_pattern_without_tensors_is_refused(acts: fh.ActivationCache) -> None:
    with pytest.raises(
        fh.SelectionError, match="'nope' matches no captured module; captured: 'a', 'b'"
    ):
        fh.plot.norms(acts, "nope")
    with pytest.raises(fh.SelectionError, match=r"'\*\*' matches no tensor"):
        fh.plot.norms(fh.ActivationCache({"a": None, "b": torch.ones(1, device="meta")}))
    with pytest.raises(fh.HookTypeError, match="acts must be an ActivationCache, got dict"):
        fh.plot.norms({})  # type: ignore[arg-type]


def test_a_missing_matplotlib_names_the_extra(
    acts: fh.ActivationCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    wanted = r"plot needs the package matplotlib \(the extra plot\): pip install matplotlib"
    with pytest.raises(fh.HookError, match=wanted):
        fh.plot.norms(acts)

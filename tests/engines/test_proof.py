"""The proof of an engine's modules, with emulated graphs: recorded and replayed operations."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import ferrohook as fh
from ferrohook.engines.model import proof
from ferrohook.engines.model.modules import ModuleTable, observed_ids
from ferrohook.engines.model.observing import observe
from ferrohook.engines.model.proof import FORMS, Proof, Served, shown
from ferrohook.engines.rewriting import rewritten
from ferrohook.plans.entries import HookEntry
from ferrohook.rows.site_hooks import IN_PLACE, HookSites
from support.replayed import Replayed

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrohook.plans import Plan

WIDTH, LAYERS, VOCABULARY = 16, 3, 64
SITES = ["embed", *(f"layers.{layer}" for layer in range(LAYERS)), "norm"]
RIGHT = dict.fromkeys(FORMS)


class Layer(nn.Module):
    """Attends to the mean of all earlier tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.mlp = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(x.cumsum(0) / torch.arange(1, len(x) + 1)[:, None])
        return x + self.mlp(x).tanh()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Engine:
    """Serves one request at a time, in one forward, eagerly or by a replay."""

    def __init__(self, model: Model, cuts: tuple[str, ...] = (), ranks: int = 1) -> None:
        self.model = model
        self.modules = observe(model, lambda: model(torch.tensor(observed_ids(VOCABULARY))))
        self.graph = Replayed(model.forward, cuts)
        self.ranks = ranks
        self.spoil: Callable[[dict[str, Tensor], int], object] = lambda _acts, _rank: None
        """Changes what comes of a replay on a rank."""
        self.served = 0
        self.again = False
        """True if the last request had the second prompt."""

    def outcomes(self) -> dict[str, dict[str, str | None]]:
        made = Proof(self.modules, 100, 2**20)
        ids = torch.arange(3, 4 + made.length)
        with torch.no_grad():
            self.graph.record(ids=ids)
            return made.outcomes(lambda plan, **how: self.serve(ids, plan, **how))

    def serve(self, ids: Tensor, plan: Plan, *, eagerly: bool, again: bool) -> Served:
        self.served += 1
        self.again = again
        ids = ids.flip(0) if again else ids
        call = self.model if eagerly else self.graph
        found = []
        for rank in range(self.ranks):
            with rewritten(plan, self.modules).prepare(self.model) as prepared:
                request = prepared.open()
                rows = {request: slice(0, len(ids))}
                try:
                    batch = fh.batch(rows, positions=torch.arange(len(ids)))
                    batch.warns = False  # as in an engine's steps
                    with batch:
                        call(ids=ids)
                    acts = {name: request.acts[name] for name in request.acts}
                except fh.HookError as error:
                    return Served([], [0], str(error))
            if not eagerly:
                self.spoil(acts, rank)
            found.append(acts)
        return Served(found, [0])


def check_only_one_is_wrong(found: dict[str, dict[str, str | None]]) -> None:
    """Checks that the captures of `layers.1` are refused, and what needs them, and nothing else."""
    wrong = found.pop("layers.1")
    assert all(wrong[form] for form in ("capture", "steer", "gates"))
    assert found == dict.fromkeys([it for it in SITES if it != "layers.1"], RIGHT)


def at_sites(engine: Engine) -> Engine:
    engine.modules, _ = engine.modules.at_sites(SITES)
    return engine


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model().eval()


def test_hooks_that_a_graph_does_not_run_are_refused(model: Model) -> None:
    engine = Engine(model)
    for outcome in engine.outcomes().values():
        assert outcome == dict.fromkeys(FORMS, "its hook never ran")


def test_hooks_in_python_are_refused_where_a_graph_is_whole(model: Model) -> None:
    with fh.rows.sites(model, SITES):
        found = at_sites(Engine(model)).outcomes()
    assert found == dict.fromkeys(SITES, dict.fromkeys(FORMS, "its hook never ran"))


def test_hooks_in_python_are_admitted_where_a_graph_is_cut(model: Model) -> None:
    with HookSites(model, dict.fromkeys(SITES), in_place=True).opened():
        engine = at_sites(Engine(model, cuts=(IN_PLACE,)))
        assert engine.outcomes() == dict.fromkeys(SITES, RIGHT)
    assert engine.served == 6  # three forms, twice


@pytest.mark.parametrize("limit", ["_MOST_MODULES", "_MOST_NUMBERS"])
def test_many_modules_take_several_requests(
    model: Model, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(proof, limit, 2 if limit == "_MOST_MODULES" else 2 * WIDTH)
    with HookSites(model, dict.fromkeys(SITES), in_place=True).opened():
        engine = at_sites(Engine(model, cuts=(IN_PLACE,)))
        assert engine.outcomes() == dict.fromkeys(SITES, RIGHT)
    assert engine.served == 6 * 3  # two modules in each but the last
    with HookSites(model, dict.fromkeys(SITES), in_place=True).opened():
        engine = at_sites(Engine(model, cuts=(IN_PLACE,)))
        engine.spoil = shifted
        found = engine.outcomes()
    check_only_one_is_wrong(found)


def test_changes_are_refused_that_later_pieces_of_a_graph_do_not_read(model: Model) -> None:
    with fh.rows.sites(model, SITES):
        found = at_sites(Engine(model, cuts=("ferrohook::run",))).outcomes()
    assert all(each["capture"] is None for each in found.values())
    for name in SITES[:-1]:
        assert "last row is off" in str(found[name]["steer"])


def test_tables_are_admitted_for_what_they_serve(model: Model) -> None:
    with fh.rows.sites(model, SITES, max_requests=2, max_rows=64, width=WIDTH):
        found = at_sites(Engine(model)).outcomes()
    assert [*found] == SITES
    for outcome in found.values():
        assert "sites evaluate no gates" in str(outcome.pop("gates"))
        assert not any(outcome.values())


def test_modules_that_fail_their_request_are_found(model: Model) -> None:
    with HookSites(model, dict.fromkeys(SITES), in_place=True).opened():
        found = Engine(model, cuts=(IN_PLACE,)).outcomes()
    for name, outcome in found.items():
        if name in SITES:
            assert outcome == RIGHT
        else:
            assert "is not a site" in str(outcome["capture"])
    assert {*SITES} < found.keys()


def shifted(acts: dict[str, Tensor], _rank: int) -> None:
    if "layers.1" in acts:
        acts["layers.1"] = acts["layers.1"].roll(1, 0)


def not_a_number(acts: dict[str, Tensor], _rank: int) -> None:
    acts["layers.1"] = acts["layers.1"] * torch.nan


def zeros(acts: dict[str, Tensor], _rank: int) -> None:
    acts["layers.1"] = acts["layers.1"] * 0


def cut_off(acts: dict[str, Tensor], _rank: int) -> None:
    acts["layers.1"] = acts["layers.1"][:1]


def on_one_rank(acts: dict[str, Tensor], rank: int) -> None:
    if rank:
        shifted(acts, rank)


@pytest.mark.parametrize("spoil", [shifted, not_a_number, zeros, cut_off, on_one_rank])
def test_wrong_rows_are_refused_at_their_module(model: Model, spoil: Any) -> None:
    with HookSites(model, dict.fromkeys(SITES), in_place=True).opened():
        engine = at_sites(Engine(model, cuts=(IN_PLACE,), ranks=2))
        engine.spoil = spoil
        found = engine.outcomes()
    check_only_one_is_wrong(found)


def test_changes_are_refused_whose_effect_is_unknown(model: Model) -> None:
    def without_the_end(acts: dict[str, Tensor], _rank: int) -> None:
        for name in [it for it in acts if it.endswith("norm")]:
            del acts[name]

    with HookSites(model, dict.fromkeys(SITES), in_place=True).opened():
        engine = at_sites(Engine(model, cuts=(IN_PLACE,)))
        engine.spoil = without_the_end
        found = engine.outcomes()
    assert found.pop("norm") == dict.fromkeys(FORMS, "its hook never ran")
    for outcome in found.values():
        reason = outcome.pop("steer")
        assert reason == "its effect is unknown, because the hook of 'norm' never ran"
        assert not any(outcome.values())


def test_rounding_is_admitted(model: Model) -> None:
    def rounded(acts: dict[str, Tensor], _rank: int) -> None:
        for name, rows in acts.items():
            acts[name] = rows.bfloat16().float()

    with HookSites(model, dict.fromkeys(SITES), in_place=True).opened():
        engine = at_sites(Engine(model, cuts=(IN_PLACE,)))
        engine.spoil = rounded
        assert engine.outcomes() == dict.fromkeys(SITES, RIGHT)


@pytest.mark.parametrize("again", [False, True])
def test_a_row_of_another_expert_is_admitted_if_other_prompts_agree(
    model: Model, *, again: bool
) -> None:
    def flipped(acts: dict[str, Tensor], _rank: int) -> None:
        if "layers.1" in acts and (again or not engine.again):
            acts["layers.1"] = acts["layers.1"] * torch.tensor([[1.0], [0.5]])

    with HookSites(model, dict.fromkeys(SITES), in_place=True).opened():
        engine = at_sites(Engine(model, cuts=(IN_PLACE,)))
        engine.spoil = flipped
        found = engine.outcomes()
    assert engine.served == 6 * 2
    wrong = found.pop("layers.1")
    assert all(wrong[form] for form in ("capture", "steer", "gates")) if again else wrong == RIGHT
    assert found == dict.fromkeys([it for it in SITES if it != "layers.1"], RIGHT)


class Behind(nn.Module):
    """Applies a function to the hidden states first."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def ended(model: Model, function: Callable[[Tensor], Tensor]) -> dict[str, dict[str, str | None]]:
    """Returns the outcomes of a model whose norm gets what modules make of a function's rows."""
    odd, small = Behind(function), Behind(lambda x: x.nan_to_num().clamp(-3, 3))
    model.norm = nn.Sequential(odd, small, nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))
    sites = [*SITES[:-1], "norm.0", "norm.2", "norm.3"]
    with HookSites(model, dict.fromkeys(sites), in_place=True).opened():
        engine = Engine(model, cuts=(IN_PLACE,))
        engine.modules, _ = engine.modules.at_sites(sites)
        return engine.outcomes()


def test_a_module_of_almost_equal_rows_leaves_others_alone(model: Model) -> None:
    found = ended(model, lambda x: 0.01 * x + torch.linspace(-3, 3, WIDTH))
    assert found == dict.fromkeys([*SITES[:-1], "norm.0", "norm.2", "norm.3"], RIGHT)


@pytest.mark.parametrize("number", [torch.inf, torch.nan, 1e30])
def test_a_module_of_infinite_rows_is_refused_and_no_other(model: Model, number: float) -> None:
    odd = torch.arange(WIDTH) == 3
    found = ended(model, lambda x: x.masked_fill(odd, number))
    reason = "its rows, or the squares of their numbers, have NaN or infinities"
    assert found.pop("norm.0") == dict.fromkeys(FORMS, reason)
    assert found["layers.2"] == RIGHT


def test_a_change_everywhere_is_refused_at_positions(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    with HookSites(model, dict.fromkeys(SITES), in_place=True).opened():
        engine = at_sites(Engine(model, cuts=(IN_PLACE,)))
        serve = engine.serve

        def everywhere(ids: Tensor, plan: Plan, *, eagerly: bool, again: bool) -> Served:
            if not eagerly:
                plan = fh.Plan(*(without_positions(each) for each in plan.entries))
            return serve(ids, plan, eagerly=eagerly, again=again)

        monkeypatch.setattr(engine, "serve", everywhere)
        found = engine.outcomes()
    for outcome in found.values():
        assert outcome["capture"] is None
        assert outcome["positions"] is not None


def without_positions(entry: Any) -> Any:
    is_change = isinstance(entry, HookEntry) and isinstance(entry.hook, fh.Add)
    return dataclasses.replace(entry, at=None) if is_change else entry


@pytest.mark.parametrize("setting", ["python", "uncut", "no tables for gates"])
def test_without_the_comparison_all_of_it_is_admitted(
    model: Model, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    """Control: only the comparison refuses wrong modules."""
    monkeypatch.setattr(proof, "differing", lambda *_: None)
    monkeypatch.setattr(Proof, "reaches", lambda *_: None)
    if setting == "python":
        assert {*map(str, Engine(model).outcomes().values())} == {str(RIGHT)}
        return
    tables = {"max_requests": 2, "max_rows": 64, "width": WIDTH} if "tables" in setting else {}
    with fh.rows.sites(model, SITES, **tables):
        found = at_sites(Engine(model)).outcomes()
    refused = {form for each in found.values() for form, reason in each.items() if reason}
    assert refused == ({"gates"} if tables else set())  # which fail as they are served


def test_a_table_refuses_what_was_wrong(model: Model) -> None:
    made = observe(model, lambda: model(torch.tensor(observed_ids(VOCABULARY))))
    wrong = dict.fromkeys(FORMS, "it differs")
    outcomes = {
        "embed": RIGHT,
        "layers.0": {**RIGHT, "gates": "no gate"},
        "layers.1": {**RIGHT, "positions": "all rows", "gates": "no gate"},
        "layers.2": wrong,
    }
    proved = ModuleTable.from_json(made.proved(outcomes).to_json())
    keep, change = fh.keep("layers.*"), fh.on("layers.1", fh.Zero())
    with pytest.raises(ValueError, match=r"'layers\.2' cannot be hooked: the self-test.*differs"):
        rewritten(fh.Plan(keep), proved)
    rewritten(fh.Plan(fh.keep(["layers.0", "layers.1"]), change), proved)
    with pytest.raises(
        ValueError, match=r"entries\[0\]: positions at 'layers\.1' failed.*all rows"
    ):
        rewritten(fh.Plan(dataclasses.replace(change, at="generated")), proved)
    for name in ("layers.0", "layers.1"):
        gate = fh.gate("g", name, fh.Norm())
        with pytest.raises(ValueError, match=rf"gates at '{name}' failed.*no gate"):
            rewritten(fh.Plan(gate), proved)
    when = fh.on("layers.0", fh.Zero(), when=fh.above("g", 1.0))
    with pytest.raises(ValueError, match=r"entries\[1\]: gates at 'layers\.0' failed"):
        rewritten(fh.Plan(fh.gate("g", "embed", fh.Norm()), when), proved)
    rewritten(fh.Plan(fh.gate("g", "embed", fh.Norm())), proved)
    assert (
        shown(outcomes)
        == """| module | capture | steer | positions | gates |
| --- | --- | --- | --- | --- |
| `embed` | 1 of 1 | 1 of 1 | 1 of 1 | 1 of 1 |
| `layers.*` | 2 of 3: it differs | 2 of 3: it differs | 1 of 3: all rows | 0 of 3: no gate |"""
    )

"""Sites of all kinds of interventions, against the same batches without sites."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import ferrohook as fh
from ferrohook.effects.interventions import KINDS
from support.amounts import amount
from support.compiling import compiled
from support.gpu import captured, waits

WIDTH = 4
ROWS = 12
SITES = ["0", "2"]


class Twist(fh.Intervention):
    """A kind of a user's own, with a vector and two numbers."""

    vector_field = "direction"
    number_fields = ("by", "shift")

    @staticmethod
    def formula(x: Tensor, direction: Tensor, by: Any, shift: Any) -> Tensor:
        return x.flip(-1) * by + direction * shift


class Shaped(fh.Intervention):
    """A kind that takes a matrix."""

    vector_field = "matrix"
    broadcasts = False

    @staticmethod
    def formula(x: Tensor, matrix: Tensor) -> Tensor:
        return x @ matrix


ORDER = ("Twist", "Scale", "Ablate", "Clamp", "Replace", "Zero")
DTYPES = [(torch.float32, torch.float32), (torch.float64, torch.float64)]
DTYPES += [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)]
"""Dtypes of the model and of the tables."""


def model_of(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    return nn.Sequential(*layers).to(dtype).requires_grad_(False)


def kinds() -> list[type[fh.Intervention]]:
    return [KINDS[name] for name in ORDER]


numbers = st.sampled_from((-2.0, -0.5, 0.0, 1.0, 3.0, 1e4))
vectors = st.lists(numbers, min_size=WIDTH, max_size=WIDTH).map(torch.tensor)
directions = vectors.filter(lambda vector: bool(vector.norm() > 0))
hooks: dict[str, st.SearchStrategy[Any]] = {
    "Add": st.builds(fh.Add, vectors, numbers),
    "Twist": st.builds(Twist, vectors, numbers, numbers),
    "Scale": st.builds(fh.Scale, numbers),
    "Ablate": st.builds(fh.Ablate, directions),
    "Clamp": st.builds(
        lambda vector, ends: fh.Clamp(vector, low=min(ends), high=max(ends)),
        directions,
        st.tuples(numbers, numbers),
    ),
    "Replace": st.builds(fh.Replace, vectors),
    "Zero": st.builds(fh.Zero),
}


@st.composite
def plans(draw: Any) -> fh.Plan:
    """A plan whose changes of each site stand in the sites' order, at the same positions."""
    entries: list[Any] = []
    for site in SITES:
        at = draw(st.sampled_from((None, "prompt", "generated", 1, slice(1, 3))))
        chosen = draw(st.lists(st.sampled_from(("Add", *ORDER)), max_size=4, unique=True))
        names = [name for name in ("Add", *ORDER) if name in chosen]
        entries += [fh.on(site, draw(hooks[name]), at=at) for name in names]
    if draw(st.booleans()) or not entries:
        entries.append(fh.keep(draw(st.sampled_from(SITES))))
    return fh.Plan(*entries)


@st.composite
def batches(draw: Any) -> list[tuple[int, range, int]]:
    """Draws a batch: plan, rows and length of the prompt of each member."""
    members, first = [], 0
    while first < ROWS and len(members) < 4:
        first += draw(st.integers(0, 2))
        count = draw(st.integers(1, 4))
        rows = range(first, min(first + count, ROWS))
        if rows:
            members.append((draw(st.integers(0, 5)), rows, draw(st.integers(1, 3))))
        first += count
    return members


def run(model: nn.Module, call: Any, own: list[fh.typing.Prepared], batch: Any, x: Tensor) -> Any:
    """The output of a call, and the captures of its members."""
    requests = [own[number].open() for number, _, _ in batch]
    positions = torch.zeros(ROWS, dtype=torch.long)
    for _, rows, _ in batch:
        positions[rows.start : rows.stop] = torch.arange(len(rows))
    members = {request: [*rows] for request, (_, rows, _) in zip(requests, batch, strict=True)}
    lengths = {request: length for request, (_, _, length) in zip(requests, batch, strict=True)}
    with torch.no_grad(), fh.batch(members, positions=positions, lengths=lengths):
        output = call(x)
    assert [each.error for each in requests] == [None] * len(requests)
    return output, [dict(each.acts) for each in requests]


@pytest.mark.filterwarnings("ignore::ferrohook.errors.NeverFiredWarning")
@settings(max_examples=amount(30, whole=400), deadline=None, suppress_health_check=[*HealthCheck])
@given(
    dtypes=st.sampled_from(DTYPES),
    drawn=st.lists(plans(), min_size=6, max_size=6),
    steps=st.lists(batches().filter(bool), min_size=1, max_size=4),
    seed=st.integers(0, 9),
)
def test_sites_change_rows_as_hooks_do(
    dtypes: tuple[torch.dtype, torch.dtype], drawn: list[fh.Plan], steps: list[Any], seed: int
) -> None:
    of_model, of_tables = dtypes
    model = model_of(of_model)
    generator = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(ROWS, WIDTH, generator=generator).to(of_model) for _ in steps]
    prepared = [plan.prepare(model) for plan in drawn]
    expected = [
        run(model, model, prepared, batch, x) for batch, x in zip(steps, inputs, strict=True)
    ]
    # Fewer rows than plans: they take each other's.
    with fh.rows.sites(
        model, SITES, max_requests=4, max_rows=16, width=WIDTH, dtype=of_tables, kinds=kinds()
    ):
        got = [
            run(model, model, prepared, batch, x) for batch, x in zip(steps, inputs, strict=True)
        ]
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if of_model is not torch.bfloat16 else {}
    for (output, acts), (other, others) in zip(got, expected, strict=True):
        assert output.dtype == other.dtype
        torch.testing.assert_close(output, other, **tolerance)
        for own, kept in zip(acts, others, strict=True):
            assert own.keys() == kept.keys()
            for name, value in own.items():
                torch.testing.assert_close(value.to(of_model), kept[name], **tolerance)


class Pairs(nn.Module):
    """Returns hidden state and residual."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin(), x * 3


class Nested(Pairs):
    """Returns the pair with a tensor ahead of it."""

    def forward(self, x: Tensor) -> Any:
        return x, super().forward(x)


@pytest.mark.parametrize(
    ("hook", "kinds"),
    [
        (fh.Ablate(torch.ones(WIDTH)), (fh.Ablate, fh.Zero)),
        (fh.Zero(), (fh.Ablate, fh.Zero)),
        (fh.Add(torch.ones(WIDTH)), (fh.Ablate, fh.Zero)),
        (fh.Add(torch.ones(WIDTH)), ()),
    ],
)
@pytest.mark.parametrize("part", ["sum", (1, "sum")])
def test_a_sum_is_changed_in_its_hidden_state(hook: fh.Intervention, kinds: Any, part: Any) -> None:
    nested = part != "sum"
    model, x = nn.Sequential(Nested() if nested else Pairs()), torch.randn(5, WIDTH)
    hidden, residual = model(x)[1] if nested else model(x)
    changed = type(hook)(*hook.values, output_index=part)
    plan = fh.Plan(fh.on("0", changed), fh.keep("0", output_index=part))
    laid: Any = {"max_rows": 8, "width": WIDTH, "output_index": part, "dtype": x.dtype}
    with fh.rows.sites(model, "0", max_requests=2, kinds=kinds, **laid):
        request = plan.prepare(model).open()
        with fh.batch({request: [1, 3]}, size=5):
            new, same = model(x)[1] if nested else model(x)
    torch.testing.assert_close(new[[1, 3]] + same[[1, 3]], hook.apply((hidden + residual)[[1, 3]]))
    assert torch.equal(new[[0, 2, 4]], hidden[[0, 2, 4]])
    assert torch.equal(same, residual)
    torch.testing.assert_close(request.acts["0"], (new + same)[[1, 3]])


def test_rows_of_others_keep_their_bits() -> None:
    model, x = model_of(torch.float32), torch.randn(4, WIDTH)
    plain = model(x)
    with fh.rows.sites(model, SITES, max_requests=2, max_rows=8, kinds=kinds()):
        request = fh.Plan(fh.on("0", fh.Scale(2.0)), fh.on("2", fh.Zero())).prepare(model).open()
        with fh.batch({request: [1, 3]}, size=4):
            output = model(x)
    assert torch.equal(output[[0, 2]], plain[[0, 2]])
    assert not output[[1, 3]].any()


@compiled
def test_a_compiled_model_serves_all_kinds_without_another_trace() -> None:
    model, x = model_of(torch.float32), torch.randn(ROWS, WIDTH)
    own = [
        fh.Plan(fh.on("0", fh.Scale(by)), fh.on("2", fh.Ablate(torch.ones(WIDTH)))).prepare(model)
        for by in (2.0, -1.0)
    ]
    batch = [(0, range(3), 1), (1, range(3, 7), 1)]
    expected, _ = run(model, model, own, batch, x)
    counter = CompileCounter()
    with fh.rows.sites(model, SITES, max_requests=2, max_rows=16, kinds=(fh.Scale, fh.Ablate)):
        call = torch.compile(model, backend=counter, fullgraph=True)
        for members in (batch, batch[::-1], batch[:1]):
            output, _ = run(model, call, own, members, x)
            if len(members) > 1:
                torch.testing.assert_close(output, expected)
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([fh.on("0", fh.Ablate(torch.ones(WIDTH))), fh.on("0", fh.Scale(2.0))], "in this order"),
        ([fh.on("0", fh.Scale(2.0)), fh.on("0", fh.Scale(3.0))], "in this order"),
        ([fh.on("0", fh.Scale(2.0)), fh.on("0", fh.Add(torch.ones(WIDTH)))], "in this order"),
        ([fh.on("0", fh.Zero())], "add Zero to their kinds="),
        ([fh.on("0", fh.Ablate(torch.ones(1)))], "not have the sites' width"),
        ([fh.keep("0"), fh.on("0", fh.Scale(2.0))], "sites keep after all changes"),
    ],
)
def test_what_sites_cannot_do_is_refused(entries: list[Any], words: str) -> None:
    model = model_of(torch.float32)
    with fh.rows.sites(model, SITES, max_requests=2, max_rows=8, kinds=(fh.Scale, fh.Ablate)):
        request = fh.Plan(*entries).prepare(model).open()
        with pytest.raises(fh.errors.RowsError, match=words), fh.batch({request: 0}, size=4):
            pass


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kinds": (fh.Add,)}, "other than Add, each once"),
        ({"kinds": (fh.Zero, fh.Zero)}, "other than Add, each once"),
        ({"kinds": (fh.Zero(),)}, "other than Add, each once"),
        ({"kinds": ("Zero",)}, "other than Add, each once"),
        ({"kinds": (Shaped,)}, "takes a vector of any shape"),
    ],
)
def test_kinds_that_sites_cannot_have_are_refused(options: dict[str, Any], words: str) -> None:
    model = model_of(torch.float32)
    with pytest.raises(fh.HookTypeError, match=words):
        fh.rows.sites(model, SITES, max_requests=2, max_rows=8, **options)


def test_gradients_go_through_add_only() -> None:
    model = model_of(torch.float32)
    x = torch.randn(2, WIDTH, requires_grad=True)
    with (
        fh.rows.sites(model, SITES, max_requests=2, max_rows=8, kinds=(fh.Scale,)),
        pytest.raises(fh.HookError, match="do not support gradients"),
    ):
        model(x).sum().backward()


@pytest.mark.cuda
def test_a_replayed_graph_changes_the_rows_of_other_requests() -> None:
    model = model_of(torch.float32).cuda()
    x = torch.randn(6, WIDTH, device="cuda")
    with (
        torch.no_grad(),
        fh.rows.sites(model, "0", max_requests=2, max_rows=8, kinds=(fh.Scale, fh.Ablate)),
    ):
        graph, out = captured(model, x)
        for step in range(8):
            torch.manual_seed(step)
            direction, by = torch.randn(WIDTH), 1.0 + step
            plan = fh.Plan(fh.on("0", fh.Scale(by)), fh.on("0", fh.Ablate(direction)))
            request = plan.prepare(model).open()
            x.normal_()
            with waits() as found, fh.batch({request: [1, 4]}, size=6):
                graph.replay()
            assert step < 2 or found == []
            inner = model[0].forward(x)
            inner[[1, 4]] = fh.Ablate(direction).apply(inner[[1, 4]] * by)
            torch.testing.assert_close(out, model[2].forward(inner.tanh()), rtol=1e-4, atol=1e-4)

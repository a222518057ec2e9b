"""Sites: requests come and go in a compiled model, without a new trace."""

from __future__ import annotations

import contextlib
import copy
import random
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import ferrohook as fh
from support.compiling import compiled
from support.gpu import captured, waits

WIDTH = 8


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).tanh()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = input_ids
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model().eval()


def by_hand(model: Model, x: Tensor, vectors: list[tuple[slice, list[Tensor]]]) -> list[Tensor]:
    """The outputs of the layers, with vectors added to rows."""
    outputs = []
    for at, layer in enumerate(model.layers):
        x = Layer.forward(layer, x).clone()
        for rows, own in vectors:
            x[rows] += own[at]
        outputs.append(x)
    return outputs


def plan_of(vectors: list[Tensor], *, keep: bool) -> fh.Plan:
    entries = [fh.on(f"layers.{at}", fh.Add(vector)) for at, vector in enumerate(vectors)]
    return fh.Plan(*entries, *([fh.keep("layers.*")] if keep else []))


@compiled
@pytest.mark.parametrize("in_graph", [False, True])
def test_requests_come_and_go_without_a_new_trace(model: Model, in_graph: bool) -> None:
    chosen, traces = random.Random(0), CompileCounter()  # noqa: S311 (no secret)
    with (
        torch.no_grad(),
        fh.rows.sites(model, "layers.*", max_requests=4, max_rows=16, width=WIDTH),
    ):
        run = torch.compile(model, backend=traces, fullgraph=True) if in_graph else model
        x = torch.randn(12, WIDTH)
        assert torch.equal(run(x), by_hand(model, x, [])[-1])
        live: list[tuple[Any, fh.typing.Prepared, list[Tensor], bool]] = []
        traced = traces.frame_count
        changes = 0
        while changes < (1000 if in_graph else 50):
            if live and chosen.random() < 0.5:
                live.pop(chosen.randrange(len(live)))
            else:
                vectors = [torch.randn(WIDTH) for _ in range(3)]
                keep = chosen.random() < 0.3
                prepared = plan_of(vectors, keep=keep).prepare(model)
                live = [*live[-3:], (prepared.open(), prepared, vectors, keep)]
            changes += 1
            if not live or changes % 10:
                continue
            rows = {each[0]: slice(3 * at, 3 * at + 2) for at, each in enumerate(live)}
            with fh.batch(rows, size=12):
                out = run(x)
            own = [(rows[request], vectors) for request, _, vectors, _ in live]
            expected = by_hand(model, x, own)
            assert torch.allclose(out, expected[-1], atol=1e-6)
            for request, _, _, keep in live:
                assert request.error is None
                if keep:
                    for at, each in enumerate(expected):
                        kept = request.acts[f"layers.{at}"]
                        assert torch.allclose(kept, each[rows[request]], atol=1e-6)
        assert torch.equal(run(x), by_hand(model, x, [])[-1])  # no row has an owner outside a batch
        assert traces.frame_count == traced
        assert traced == int(in_graph)


@compiled
def test_with_inductor(model: Model) -> None:
    vectors = [torch.randn(WIDTH) for _ in range(3)]
    prepared = plan_of(vectors, keep=True).prepare(model)
    x = torch.randn(6, WIDTH)
    with torch.no_grad(), fh.rows.sites(model, "layers.*", max_requests=2, max_rows=8, width=WIDTH):
        run = torch.compile(model, fullgraph=True)
        run(x)
        request = prepared.open()
        with fh.batch({request: slice(2, 4)}, size=6):
            out = run(x)
        expected = by_hand(model, x, [(slice(2, 4), vectors)])
        assert torch.allclose(out, expected[-1], atol=1e-5)
        assert torch.allclose(request.acts["layers.1"], expected[1][2:4], atol=1e-5)


@pytest.mark.parametrize("dim", [0, 1])
def test_positions(model: Model, dim: int) -> None:
    v = torch.randn(WIDTH)
    plan = fh.Plan(
        fh.on("layers.1", fh.Add(v), at="generated"),
        fh.on("layers.2", fh.Add(v)),
        fh.keep("layers.0", at=slice(1, None)),
        fh.keep("layers.1"),
    )
    sites = fh.rows.sites(model, "layers.*", max_requests=2, max_rows=8, width=WIDTH, dim=dim)
    with torch.no_grad(), sites, plan.prepare(model) as prepared:
        request, other = prepared.open(), prepared.open()
        tokens = torch.randn(4, WIDTH)
        for start, count in ((0, 2), (2, 1), (2, 2)):
            x = torch.cat([torch.randn(2, WIDTH), tokens[start : start + count]])
            positions = torch.tensor([-1, 7, *range(start, start + count)])
            rows = {request: range(2, 2 + count), other: 1}
            lengths = {request: 2, other: 9}
            with fh.batch(rows, dim, positions=positions, lengths=lengths):
                model(x if dim == 0 else x[None])
        h = Layer.forward(model.layers[0], tokens)
        assert torch.allclose(request.acts["layers.0"], h[1:], atol=1e-6)
        assert request.acts.positions("layers.0") == [1, 2, 3]
        h = Layer.forward(model.layers[1], h)
        h[2:] += v
        assert torch.allclose(request.acts["layers.1"], h, atol=1e-6)
        assert other.acts.positions("layers.1") == [7]


def test_gradients_pass_through(model: Model) -> None:
    x = torch.randn(4, WIDTH, requires_grad=True)
    (expected,) = torch.autograd.grad(model(x).square().sum(), x)
    with fh.rows.sites(model, "layers.*", max_requests=1, max_rows=4, width=WIDTH):
        (grad,) = torch.autograd.grad(model(x).square().sum(), x)
    assert torch.allclose(grad, expected)


def test_calls_in_other_contexts_are_not_served(model: Model) -> None:
    vectors = [torch.randn(WIDTH) for _ in range(3)]
    prepared, x = plan_of(vectors, keep=True).prepare(model), torch.randn(6, WIDTH)
    with torch.no_grad(), fh.rows.sites(model, "layers.*", max_requests=1, max_rows=4, width=WIDTH):
        request, found = prepared.open(), []
        with fh.batch({request: slice(0, 2)}, size=3):
            out = model(x[:3])
            thread = threading.Thread(target=lambda: found.append(model(x)))
            thread.start()
            thread.join()
        assert torch.allclose(found[0], by_hand(model, x, [])[-1])
        expected = by_hand(model, x[:3], [(slice(0, 2), vectors)])
        assert torch.allclose(out, expected[-1], atol=1e-6)
        assert torch.allclose(request.acts["layers.2"], expected[-1][:2], atol=1e-6)
        assert torch.allclose(model(x), found[0])  # more rows than the tables have


def test_padded_rows_are_steered_and_not_kept(model: Model) -> None:
    vectors = [torch.randn(WIDTH) for _ in range(3)]
    with torch.no_grad(), fh.rows.sites(model, "layers.*", max_requests=2, max_rows=2, width=WIDTH):
        plans = [plan_of(vectors, keep=keep).prepare(model) for keep in (False, True)]
        steered, kept = (each.open() for each in plans)
        x = torch.randn(2, 3, WIDTH)
        with fh.batch({steered: 0, kept: 1}, size=2):
            out = model(x)
    both = [(slice(0, 2), vectors)]
    assert torch.allclose(out, by_hand(model, x, both)[-1], atol=1e-6)
    assert steered.error is None
    assert "must have shape (rows, width)" in str(kept.error)


def test_a_shared_module_that_two_names_select_is_changed_once(model: Model) -> None:
    model.layers[2] = model.layers[0]
    plan = fh.Plan(fh.on(["layers.0", "layers.2"], fh.Add(torch.randn(WIDTH))))
    x = torch.randn(4, WIDTH)
    expected = fh.run(model, x, plan=plan).output
    with fh.rows.sites(model, "layers.*", max_requests=1, max_rows=4, width=WIDTH):
        request = plan.prepare(model).open()
        with fh.batch({request: slice(0, 4)}, size=4):
            assert torch.equal(model(x), expected)


def test_what_a_site_cannot_serve_is_refused(model: Model) -> None:
    v = torch.randn(WIDTH)
    refused = [
        (fh.Plan(fh.on("layers.0", fh.Scale(2))), "cannot be served"),
        (fh.Plan(fh.on("layers.0", lambda *_: None)), "cannot be served"),
        (fh.Plan(fh.on("layers.0", fh.Add(v, output_index=1))), "output_index"),
        (fh.Plan(fh.on("layers.0", fh.Add(v.clone().requires_grad_()))), "not trained"),
        (fh.Plan(fh.on("layers.0", fh.Add(torch.ones(1)))), "width"),
        (fh.Plan(fh.on("layers.0", fh.Add(v), phase="forward_pre")), "cannot be served"),
        (fh.Plan(fh.keep("layers.0.linear")), "not a site"),
        (
            fh.Plan(fh.keep("layers.*"), fh.on("layers.0", fh.Add(torch.ones(WIDTH)))),
            "keeps 'layers.0' before it changes it",
        ),
        (fh.Plan(fh.keep("layers.0", inputs=True)), "cannot be served"),
    ]
    with fh.rows.sites(model, "layers.*", max_requests=1, max_rows=4, width=WIDTH) as sites:
        good = fh.Plan(fh.on("layers.0", fh.Add(v))).prepare(model)
        fine = good.open()
        for plan, message in refused:
            request = plan.prepare(model).open()
            batch = fh.batch({fine: 0, request: 1}, size=4)
            with pytest.raises(fh.errors.RowsError, match=message) as raised, batch:
                pass
            assert raised.value.member is request
        with (
            pytest.raises(fh.errors.RowsError, match="requests of plans"),
            fh.batch({fine: 0, fh.scope(): 1}, size=4),
        ):
            pass
        with (
            pytest.raises(fh.errors.RowsError, match="room for 4 rows"),
            fh.batch({fine: 4}, size=5),
        ):
            pass
        with pytest.raises(fh.errors.RowsError, match="dimension"), fh.batch({fine: 0}, dim=1):
            pass
        more = fh.Plan(fh.on("layers.0", fh.Add(v))).prepare(model).open()
        with (
            pytest.raises(fh.errors.RowsError, match="room for 1 plans"),
            fh.batch({fine: 0, more: 1}, size=4),
        ):
            pass
        with fh.batch({fine: 0}, size=4):
            model(torch.randn(4, WIDTH))
            with pytest.raises(fh.HookError, match="leave the batch first"):
                sites.close()
        with pytest.raises(fh.HookError, match="close them first"):
            fh.rows.sites(model, "layers.*", max_requests=1, max_rows=1, width=WIDTH)
    with pytest.raises(fh.HookTypeError, match="pass width"):
        fh.rows.sites(model, "layers.*", max_requests=1, max_rows=1)
    with fh.batch({fine: 0}):  # sites are closed: it may have hooks again
        x = torch.randn(2, WIDTH)
        out = model(x)
    h = Layer.forward(model.layers[0], x)
    h[0] += v
    assert torch.allclose(out, model.layers[2](model.layers[1](h)))


def test_captures_of_two_calls_in_a_batch_are_told_of(model: Model) -> None:
    plan = fh.Plan(fh.keep("layers.0"))
    with fh.rows.sites(model, "layers.*", max_requests=1, max_rows=4, width=WIDTH):
        prepared = plan.prepare(model)
        request, silent = prepared.open(), prepared.open()
        with fh.batch({request: 0}, size=4):
            model(torch.randn(4, WIDTH))
            model(torch.randn(4, WIDTH))
        assert "2 times" in str(request.error)
        with pytest.warns(fh.errors.NeverFiredWarning), fh.batch({silent: 0}, size=4):
            pass
        big = fh.Plan(fh.keep("layers.*", max_bytes=WIDTH * 4 * 2)).prepare(model).open()
        with fh.batch({big: 0}, size=4):
            model(torch.randn(4, WIDTH))
        assert isinstance(big.error, fh.errors.CaptureBudgetError)


@pytest.mark.cuda
def test_a_replayed_graph_serves_other_requests(model: Model) -> None:
    model = model.cuda()
    x = torch.randn(6, WIDTH, device="cuda")
    with torch.no_grad(), fh.rows.sites(model, "layers.*", max_requests=3, max_rows=8, width=WIDTH):
        graph, out = captured(model, x)
        for seed in range(20):
            torch.manual_seed(seed)
            vectors = [[torch.randn(WIDTH, device="cuda") for _ in range(3)] for _ in range(2)]
            requests = [plan_of(each, keep=True).prepare(model).open() for each in vectors]
            rows = {requests[0]: slice(0, 2), requests[1]: slice(3, 5)}
            x.normal_()
            with fh.batch(rows, size=6):
                graph.replay()
            expected = by_hand(model, x, [*zip(rows.values(), vectors, strict=True)])
            assert torch.allclose(out, expected[-1], atol=1e-5)
            for request, own in rows.items():
                assert request.error is None
                assert torch.allclose(request.acts["layers.1"], expected[1][own], atol=1e-5)


@pytest.mark.cuda
@pytest.mark.parametrize("keep", [False, True])
def test_a_warm_batch_waits_for_nothing_before_its_rows_are_read(model: Model, keep: bool) -> None:
    on_gpu, x = copy.deepcopy(model).cuda(), torch.randn(6, WIDTH)
    there, vectors = x.cuda(), [torch.randn(WIDTH) for _ in range(3)]
    with (
        torch.no_grad(),
        fh.rows.sites(on_gpu, "layers.*", max_requests=3, max_rows=8, width=WIDTH),
    ):
        prepared = plan_of(vectors, keep=keep).prepare(on_gpu)
        requests = [prepared.open() for _ in range(2)]
        for step in range(6):
            rows = {requests[0]: slice(0, 1 + step % 3), requests[1]: [5, 3]}
            with waits() as found, fh.batch(rows, size=6):
                on_gpu(there)
            assert step <= 2 or found == []
        assert [each.error for each in requests] == [None, None]
    if keep:
        expected = by_hand(model, x, [(slice(0, 3), vectors), ([5, 3], vectors)])
        for at, kept in enumerate(expected):
            assert torch.allclose(requests[0].acts[f"layers.{at}"].cpu(), kept[:3], atol=1e-5)
            assert torch.allclose(requests[1].acts[f"layers.{at}"].cpu(), kept[[5, 3]], atol=1e-5)


@pytest.mark.cuda
@pytest.mark.parametrize("rows", [0, 4, 9])
def test_calls_outside_of_batches_may_have_any_number_of_rows(model: Model, rows: int) -> None:
    model, x = model.cuda(), torch.randn(rows, WIDTH, device="cuda")
    plain = model(x)
    for kinds in ((), (fh.Scale,)):
        laid: Any = {"max_requests": 1, "max_rows": 4, "width": WIDTH, "kinds": kinds}
        with torch.no_grad(), fh.rows.sites(model, "layers.*", **laid):
            assert torch.equal(model(x), plain)


@pytest.mark.cuda
@pytest.mark.parametrize("rows", [0, 3])
def test_failures_at_sites_are_known_when_their_rows_are_read(model: Model, rows: int) -> None:
    model, calls = model.cuda(), [1, 2, 1]
    with torch.no_grad(), fh.rows.sites(model, "layers.*", max_requests=3, max_rows=8, width=WIDTH):
        prepared = fh.Plan(fh.keep("layers.*")).prepare(model)
        requests = [prepared.open() for _ in calls]
        late = prepared.open()
        for request, count in zip(requests, calls, strict=True):
            with fh.batch({request: 0}, size=4):
                for _ in range(count):
                    model(torch.randn(4, WIDTH, device="cuda"))
        with fh.batch({late: 0}, size=4):
            model.layers[0](torch.randn(rows, WIDTH, device="cuda"))
        late.close()
    assert [*requests[0].acts] == [*requests[2].acts] == [f"layers.{at}" for at in range(3)]
    assert requests[0].error is None
    assert "2 times" in str(requests[1].error)
    assert f"{rows} rows in 1 call" in str(late.error)
    assert not late.acts


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("replays", "joined"),
    [(False, False), (False, True), (True, True)],
    ids=["eager", "eager, joined", "replayed, joined"],
)
def test_the_model_runs_on_another_stream_than_the_batch(
    model: Model, replays: bool, joined: bool
) -> None:
    on_gpu, side = copy.deepcopy(model).cuda(), torch.cuda.Stream()
    inputs = [torch.randn(6, WIDTH) for _ in range(4)]
    xs, x = [each.cuda() for each in inputs], torch.zeros(6, WIDTH, device="cuda")
    vectors = [[torch.randn(WIDTH) for _ in range(3)] for _ in xs]
    outs = [torch.empty_like(x) for _ in xs]
    with (
        torch.no_grad(),
        fh.rows.sites(on_gpu, "layers.*", max_requests=2, max_rows=8, width=WIDTH),
    ):
        plans = [plan_of(each, keep=True).prepare(on_gpu) for each in vectors]
        on_gpu(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = on_gpu(x)
        requests = [plan.open() for plan in plans]
        torch.cuda.synchronize()
        for number, request in enumerate(requests):
            with fh.batch({request: slice(number, number + 2)}, size=6):
                if joined:
                    side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    torch.cuda._sleep(10_000_000)
                    x.copy_(xs[number])
                    if replays:
                        graph.replay()
                    outs[number].copy_(replayed if replays else on_gpu(x))
                if joined:
                    torch.cuda.current_stream().wait_stream(side)
        side.synchronize()
        for number, request in enumerate(requests):
            rows = slice(number, number + 2)
            expected = by_hand(model, inputs[number], [(rows, vectors[number])])
            assert torch.allclose(outs[number].cpu(), expected[-1], atol=1e-5)
            for at, kept in enumerate(expected):
                assert torch.allclose(request.acts[f"layers.{at}"].cpu(), kept[rows], atol=1e-5)


@pytest.mark.parametrize("fails", [False, True])
def test_the_bytes_of_the_tables_are_logged_before_they_are_taken(
    model: Model, fails: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Tensor] = []
    for name in ("full", "full_like", "zeros"):
        plain = getattr(torch, name)

        def make(*args: Any, plain: Any = plain, **kwargs: Any) -> Tensor:
            assert "the tables of" in caplog.text
            if fails:
                raise torch.OutOfMemoryError
            taken.append(plain(*args, **kwargs))
            return taken[-1]

        monkeypatch.setattr(torch, name, make)
    with caplog.at_level("INFO", "ferrohook"), contextlib.ExitStack() as stack:
        if fails:
            stack.enter_context(pytest.raises(torch.OutOfMemoryError))
        fh.rows.sites(model, "layers.*", max_requests=3, max_rows=1234, width=WIDTH).close()
    assert "3 sites" in caplog.text
    assert "on cpu: 3 requests and 1,234 rows of width 8 in torch.float32" in caplog.text
    if not fails:
        assert f"take {sum(it.nbytes for it in taken):,} bytes" in caplog.text

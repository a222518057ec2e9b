"""Sites without tables: in a graph they do the same as the hooks of a batch without sites."""

from __future__ import annotations

import copy
import gc
import random
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import ferrohook as fh
from ferrohook.errors import HookTypeError, RowsError
from ferrohook.rows.site_hooks import IN_PLACE, HookSites
from support.amounts import amount
from support.compiling import compiled
from support.replayed import Replayed
from support.threads import LIMIT, in_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WIDTH, ROWS = 6, 10
PARTS: dict[str, Any] = {"first": None, "pair": 0, "stream": "sum", "last": None}
SPLIT = {"last"}
"""Modules outside of the graph."""


class Pair(nn.Module):
    """Returns a tensor in a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x).tanh(), x


class Stream(Pair):
    """Returns a hidden state and a residual."""


class Body(nn.Module):
    """Part of the model that is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.pair, self.stream = Pair(), Stream()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        x = x + self.pair(x)[0]
        hidden, residual = self.stream(x)
        return hidden + residual


class Model(nn.Module):
    """A compiled body, and a head that is called outside of the graph."""

    prefixes: ClassVar = {name: f"body.{name}" for name in PARTS if name not in SPLIT}

    def __init__(self) -> None:
        super().__init__()
        self.body = Body()
        self.last = nn.Linear(WIDTH, WIDTH)
        self.call: Callable[[Tensor], Tensor] = self.body.forward

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.call(x))
        return y


def named(name: str) -> str:
    return Model.prefixes.get(name, name)


def model() -> Model:
    torch.manual_seed(0)
    return Model().double().requires_grad_(False)


def laid(own: Model, *, in_place: bool = False) -> HookSites:
    inside = {named(name): part for name, part in PARTS.items() if name not in SPLIT}
    return HookSites(own, inside, outside=[*SPLIT], in_place=in_place).opened()


class Drawing:
    """Random plans, batches and calls."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)  # noqa: S311 (a test)
        self.generator = torch.Generator().manual_seed(seed)
        encoder, decoder = torch.randn(2, WIDTH, 12, generator=self.generator, dtype=torch.float64)
        biases = {"b_enc": decoder[0], "b_dec": decoder[:, 0]}
        self.dictionary = fh.Dictionary(encoder, decoder.T, **biases, activation="topk", k=3)
        places = {"reads": "body.first", "writes": "body.pair"}
        self.transcoder = fh.Dictionary(encoder, decoder.T, **biases, **places, transcoder=True)

    def vector(self) -> Tensor:
        return torch.randn(WIDTH, generator=self.generator, dtype=torch.float64)

    def change(self, part: Any) -> Any:
        inner = {"output_index": part}
        vector = self.vector()
        return self.rng.choice(
            [
                fh.Add(vector, scale=self.rng.choice([1.0, -2.0]), **inner),
                fh.Scale(0.5, **inner),
                fh.Ablate(vector, **inner),
                fh.Clamp(vector, low=-0.5, high=0.5, **inner),
                fh.Replace(vector, **inner),
                fh.Zero(**inner),
                fh.Feature(self.dictionary, self.rng.randrange(12), set=2.0, **inner),
            ]
        )

    def at(self) -> Any:
        return self.rng.choice([None, None, "prompt", "generated", "last_prompt", 1, slice(1, 4)])

    def plan(self) -> fh.Plan:
        entries: list[Any] = []
        gate = self.rng.choice([None, 0, 1, 2])
        if gate is not None:
            entries.append(self.gate(gate))
        places = self.rng.sample(range(len(PARTS)), self.rng.randint(1, len(PARTS)))
        follow = [gate is not None and place > gate for place in places]
        entries += map(self.changed, places, follow)
        entries += map(self.kept, self.rng.sample(range(len(PARTS)), self.rng.randint(0, 3)))
        if gate is not None:
            entries.append(fh.keep("@gate.g"))
            if self.rng.random() < 0.2:
                entries.append(fh.stop(when=fh.above("g", 1.5)))
        return fh.Plan(*entries)

    def gate(self, place: int) -> Any:
        name, part = [*PARTS.items()][place]
        vector = self.vector()
        reading = self.rng.choice([fh.Norm(), fh.Dot(vector), fh.Cosine(vector)])
        over = self.rng.choice(["token", "so_far", fh.window(2), fh.ema(0.5)])
        by = self.rng.choice(["max", "mean", "last"])
        options = {} if part is None else {"output_index": part}
        return fh.gate("g", named(name), reading, over=over, by=by, **options)

    def changed(self, place: int, follows: bool) -> Any:
        name, part = [*PARTS.items()][place]
        options: dict[str, Any] = {"at": self.at()}
        if follows and self.rng.random() < 0.7:
            options["when"] = self.rng.choice([fh.above("g", 0.2), ~fh.below("g", 0.6)])
        if self.rng.random() < 0.3:
            options["strength"] = fh.ramp("g", -1.0, 1.0) if follows else 0.5
        if self.rng.random() < 0.3:
            options["priority"] = self.rng.choice([-1, 1])
        change = self.change(part)
        if name == "pair" and self.rng.random() < 0.5:
            index = self.rng.randrange(12)
            change = fh.Feature(self.transcoder, index, add=2.0, output_index=part)
        return fh.on(named(name), change, **options)

    def kept(self, place: int) -> Any:
        name, part = [*PARTS.items()][place]
        options: dict[str, Any] = {"at": self.at(), "label": f"kept {place}"}
        if part is not None:
            options["output_index"] = part
        if self.rng.random() < 0.3:
            options |= {"features": self.dictionary, "top": 2}
        return fh.keep(named(name), **options)

    def steps(self, members: int) -> Iterator[tuple[dict[int, list[int]], Tensor, Tensor]]:
        """Yields rows of the members, the positions of all rows, and the input of a call."""
        done = [0] * members
        for _ in range(self.rng.randint(1, 4)):
            order = self.rng.sample(range(ROWS), ROWS)
            rows, positions = {}, torch.full((ROWS,), -1)
            for member in range(members):
                count = self.rng.randint(0, ROWS // members)
                rows[member] = sorted(order.pop() for _ in range(count))
                for place, row in enumerate(rows[member]):
                    positions[row] = done[member] + place
                done[member] += count
            x = torch.randn(ROWS, WIDTH, generator=self.generator, dtype=torch.float64)
            yield rows, positions, x


def ran(own: Model, seed: int) -> list[Any]:
    """Serves a drawn program; returns what can be seen of it."""
    drawing = Drawing(seed)
    plans = [drawing.plan() for _ in range(drawing.rng.randint(1, 4))]
    prepared = [plan.prepare(own) for plan in plans]
    late = drawing.rng.random() < 0.1
    members = [each.open() for each in prepared]
    if late:
        members[0] = prepared[0].open(deadline=0.0)
        time.sleep(0.001)
    lengths = {request: drawing.rng.randint(1, 4) for request in members}
    seen: list[Any] = []
    for rows, positions, x in drawing.steps(len(members)):
        batch = fh.batch(
            {members[number]: own_rows for number, own_rows in rows.items()},
            positions=positions,
            lengths=lengths,
            warn=False,
        )
        with torch.no_grad(), batch:
            seen.append(own(x))
        if drawing.rng.random() < 0.2 and len(members) > 1:
            members[-1].close()
            members[-1] = prepared[-1].open()
            lengths[members[-1]] = 2
    for request in members:
        seen += [type(request.error), [*request.acts], *request.acts.values(), request.stopped]
        request.close()
    for each in prepared:
        each.close()
    return seen


def assert_same(found: list[Any], right: list[Any], tolerance: float = 0.0) -> None:
    assert len(found) == len(right)
    for one, other in zip(found, right, strict=True):
        if isinstance(other, Tensor):
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)
        else:
            assert one == other


@pytest.mark.parametrize("part", range(4))
def test_calls_with_sites_are_calls_without(part: int) -> None:
    """Eager: an operator runs the hooks in place of the module."""
    plain, own = model(), model()
    failed = 0
    with laid(own):
        for seed in range(part, amount(120, whole=2_000), 4):
            right = ran(plain, seed)
            failed += TimeoutError in [it for it in right if isinstance(it, type)]
            assert_same(ran(own, seed), right)
    assert failed


@compiled
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_graph_serves_what_eager_calls_do(backend: str, in_place: bool) -> None:
    plain, own = model(), model()
    graphs: list[Any] = []

    def counting(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    with laid(own, in_place=in_place):
        own.call = torch.compile(own.body, fullgraph=True, backend=counting)
        for seed in range(amount(60, whole=600)):
            tolerance = 0.0 if backend == "eager" else 1e-6
            assert_same(ran(own, seed), ran(plain, seed), tolerance)
    assert len(graphs) == 1


def replaying(own: Model, cut: str) -> None:
    """Makes the body replay a graph that is cut at an operator of its sites."""
    graph = Replayed(own.body.forward, [cut])
    with torch.no_grad():
        graph.record(x=torch.zeros(ROWS, WIDTH, dtype=torch.float64))
    own.call = lambda x: graph(x=x)


def test_a_graph_that_is_cut_at_sites_is_replayed() -> None:
    plain, own = model(), model()
    with laid(own, in_place=True):
        replaying(own, IN_PLACE)
        for seed in range(amount(60, whole=600)):
            assert_same(ran(own, seed), ran(plain, seed))


def test_a_replayed_graph_does_not_read_new_memory() -> None:
    """Control: sites that return a tensor instead of changing one."""
    plain, own = model(), model()
    with laid(own):
        replaying(own, "ferrohook::run")
        found = [it for seed in range(20) for it in ran(own, seed)]
    right = [it for seed in range(20) for it in ran(plain, seed)]
    with pytest.raises(AssertionError):
        assert_same(found, right)


@compiled
@pytest.mark.usefixtures("switch_often")
@pytest.mark.timeout(LIMIT * 10)
def test_threads_are_served_at_a_time(request: pytest.FixtureRequest) -> None:
    plain, own = model(), model()
    total = request.config.getoption("requests") or 40
    known = {seed: ran(plain, seed) for seed in range(8)}
    with laid(own):
        own.call = torch.compile(own.body, fullgraph=True, backend="eager")
        own.call(torch.zeros(ROWS, WIDTH, dtype=torch.float64))
        begun = threading.Barrier(4)

        def work(thread: int) -> None:
            begun.wait()
            for number in range(total // 4):
                seed = (thread + number) % 8
                assert_same(ran(own, seed), known[seed])

        in_threads(4, work)


def open_of(own: nn.Module, *entries: Any) -> fh.Request:
    return fh.Plan(*entries).prepare(own).open()


def transcoded(wrong: Any) -> fh.Feature:
    """A change of a transcoder that is wrong where it writes, or reads."""
    reads, part = ("body.first", None) if wrong == 0 else (wrong, 0)
    weights = torch.ones(2, WIDTH, WIDTH, dtype=torch.float64)
    biases = {"b_enc": weights[0, 0], "b_dec": weights[0, 0]}
    transcoder = fh.Dictionary(*weights, **biases, transcoder=True, reads=reads)
    return fh.Feature(transcoder, 0, set=1.0, output_index=part)


REFUSED: list[tuple[Any, str]] = [
    (fh.keep("body"), "'body', which is not a site"),
    (fh.keep("body.first", inputs=True), "no inputs"),
    (fh.on("body.first", lambda *_: None), "no inputs for Python functions"),
    (fh.keep("body.pair", output_index=1), "output_index differs from the sites', 0"),
    (fh.gate("g", "body.stream", fh.Norm(), output_index=0), "output_index differs"),
    (fh.keep("body.first", detach=False), "detach is not supported"),
    (fh.on("body.pair", transcoded(0)), "output_index differs from the sites', 0"),
    (fh.on("body.pair", transcoded("body")), "'body', which is not a site"),
]


@pytest.mark.parametrize(("entry", "words"), REFUSED)
def test_what_sites_cannot_serve_is_refused_as_a_batch_begins(entry: Any, words: str) -> None:
    own = model()
    with laid(own), torch.no_grad():
        refused, other = open_of(own, entry), open_of(own, fh.keep("body.first"))
        with pytest.raises(RowsError, match=words) as caught:
            fh.batch({refused: [0], other: [1]}, size=ROWS).__enter__()
        assert caught.value.member is refused
        with fh.batch({other: [1]}, size=ROWS):
            own(torch.zeros(ROWS, WIDTH, dtype=torch.float64))
        assert other.acts["body.first"].shape == (1, WIDTH)


def test_a_batch_with_gradients_is_refused() -> None:
    own = model()
    with laid(own):
        request = open_of(own, fh.keep("body.first"))
        with pytest.raises(RowsError, match=r"inside torch\.no_grad"):
            fh.batch({request: [0]}, size=ROWS).__enter__()


def test_sites_are_not_closed_while_they_serve() -> None:
    own = model()
    sites = laid(own)
    request = open_of(own, fh.keep("body.first"))
    entered = fh.batch({request: [0]}, size=ROWS, warn=False)
    with torch.no_grad(), entered, pytest.raises(fh.HookError, match="leave the batch first"):
        sites.close()
    sites.close()
    assert "open" not in repr(sites)
    assert repr(sites).endswith("closed>")
    with torch.no_grad(), fh.batch({open_of(own, fh.keep("body")): [0]}, size=ROWS):
        own(torch.zeros(ROWS, WIDTH, dtype=torch.float64))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_requests": 2}, "max_requests is an argument of tables: pass both"),
        ({"width": WIDTH}, "width is an argument of tables"),
        ({"kinds": (fh.Scale,)}, "kinds is an argument of tables"),
        ({"max_requests": 2, "max_rows": 2, "outside": "last"}, "outside is an argument of sites"),
    ],
)
def test_arguments_of_the_other_kind_are_refused(options: Any, words: str) -> None:
    own = model()
    with pytest.raises(HookTypeError, match=words):
        fh.rows.sites(own, "body.first", **options)
    fh.rows.sites(own, "body.first", outside="last").close()


def test_a_capture_is_not_the_memory_of_the_graph() -> None:
    """A hook writes into the output, as a graph does into a buffer that it needs no longer."""
    own = model()
    with laid(own), torch.no_grad():
        request = open_of(own, fh.keep("body.first"))
        known = own.body.first(x := torch.ones(ROWS, WIDTH, dtype=torch.float64))

        def spoil(_module: object, _args: object, output: Tensor) -> None:
            output.detach().numpy().fill(7.0)

        with (
            fh.register(own, "body.first", spoil),
            fh.batch({request: slice(0, ROWS)}, size=ROWS),
        ):
            own(x)
        assert torch.equal(request.acts["body.first"], known)


@pytest.mark.filterwarnings("ignore::ferrohook.errors.NeverFiredWarning")
def test_another_number_of_rows_fails_the_requests_with_hooks_there() -> None:
    own = model()
    with laid(own), torch.no_grad():
        request, other = (open_of(own, fh.keep(name)) for name in ("body.first", "last"))
        own.call = lambda x: own.body(x[1:])
        with fh.batch({request: [0], other: [1]}, size=ROWS):
            own(torch.zeros(ROWS, WIDTH, dtype=torch.float64))
        assert isinstance(request.error, RowsError)
        assert isinstance(other.error, RowsError)


class Unused(nn.Module):
    """Computes something that it does not return."""

    def __init__(self) -> None:
        super().__init__()
        self.aside, self.main = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.aside(x)
        y: Tensor = self.main(x)
        return y


@compiled
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_outputs_that_a_graph_does_not_use_are_captured(backend: str) -> None:
    own = Unused().requires_grad_(False)
    x = torch.randn(ROWS, WIDTH)
    known = own.aside(x)
    with fh.rows.sites(own, "aside"), torch.no_grad():
        call = torch.compile(own, fullgraph=True, backend=backend)
        request = open_of(own, fh.keep("aside"))
        with fh.batch({request: slice(0, ROWS)}, size=ROWS):
            call(x)
    torch.testing.assert_close(request.acts["aside"], known)


class Parallel(nn.Module):
    """Runs modules whose order no tensor fixes; Inductor would move the wide one."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.small = nn.Linear(WIDTH, 4096), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        wide, small = self.wide(x), self.small(x + 1)
        again = small.repeat(1, 600).sin().sum(-1)
        return self.small(x * 2).relu().sum(0), again, wide.sum(-1)


@compiled
def test_inductor_keeps_the_order_of_hooks() -> None:
    torch.manual_seed(0)
    own = Parallel().requires_grad_(False)
    x = torch.randn(ROWS, WIDTH)
    plan = fh.Plan(
        fh.gate("g", "wide", fh.Norm()),
        fh.on("small", fh.Scale(100.0), when=fh.above("g", 0.0)),
        fh.keep("small", calls="all"),
    )

    def served(call: Any) -> list[Tensor]:
        request = plan.prepare(own).open()
        with torch.no_grad(), fh.batch({request: slice(0, ROWS)}, positions=torch.arange(ROWS)):
            outputs = call(x)
        assert request.error is None
        return [*outputs, *request.acts["small"]]

    right = served(own)
    with fh.rows.sites(own, "*"):
        found = served(torch.compile(own, fullgraph=True))
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_sites_keep_no_batch_that_was_left() -> None:
    own = copy.deepcopy(model())
    request = fh.Plan(fh.on("body.first", fh.Scale(2.0))).prepare(own).open()
    batch = fh.batch({request: slice(0, ROWS)}, positions=torch.arange(ROWS))
    gone = weakref.ref(batch)
    with fh.rows.sites(own, "body.first"):
        with torch.no_grad(), batch:
            own(torch.randn(ROWS, WIDTH, dtype=torch.float64))
        del batch
        gc.collect()
        assert gone() is None


def test_a_model_with_sites_is_collected() -> None:
    own = copy.deepcopy(model())
    gone = weakref.ref(own)
    laid(own)
    del own
    gc.collect()
    assert gone() is None

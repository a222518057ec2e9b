"""Faults of sites that attacks found, one test for the class of each."""

from __future__ import annotations

import gc
import io
import linecache
import logging
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import ferrohook as fh
from ferrohook.rows import operators
from support.compiling import compiled
from support.interpreters import run_with_torch
from support.interrupts import interrupted as interrupted_at

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WIDTH = 4
ROWS = 6


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.CRITICAL, "ferrohook")
    with torch.no_grad():
        yield


class Net(nn.Module):
    """Two layers that add nothing, and a head, on chosen rows if there are some."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Identity(), nn.Identity(), nn.Identity()

    def forward(self, x: Tensor, chosen: Tensor | None = None) -> Tensor:
        x = self.second(self.first(x))
        out: Tensor = self.head(x if chosen is None else x[chosen])
        return out


@pytest.fixture
def model() -> Net:
    return Net()


@pytest.fixture
def sites(model: Net) -> Iterator[Any]:
    with fh.rows.sites(model, "*", max_requests=4, max_rows=8, width=WIDTH) as laid:
        yield laid


def test_rows_of_an_interrupted_copy_are_nobody_s(
    model: Net, sites: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not sites.closed
    prepared = fh.Plan(fh.keep("first")).prepare(model)
    for interrupted in (False, True):
        request = prepared.open()

        def flat(*_args: object) -> Tensor:
            raise KeyboardInterrupt

        if interrupted:
            monkeypatch.setattr(operators, "_flat", flat)
            with pytest.raises(KeyboardInterrupt), fh.batch({request: [0]}, size=2):
                model(numbered(2))
        else:
            with fh.batch({request: [0]}, size=2):
                model(numbered(2))
        assert [*request.acts] == ([] if interrupted else ["first"])


def test_a_batch_of_fake_tensors_is_refused(model: Net, sites: Any) -> None:
    """Tables that it wrote would be none."""
    assert not sites.closed
    prepared = fh.Plan(fh.on("first", fh.Add(torch.ones(WIDTH)))).prepare(model)
    for rows in ([0], [1]):
        with (
            FakeTensorMode(allow_non_fake_inputs=True),
            pytest.raises(fh.errors.RowsError, match="FakeTensorMode"),
            fh.batch({prepared.open(): rows}, size=2),
        ):
            pass
        with fh.batch({prepared.open(): rows}, size=2):
            out = model(torch.zeros(2, WIDTH))
        assert type(out) is Tensor
        assert out[:, 0].tolist() == [float(row in rows) for row in range(2)]


def numbered(rows: int = ROWS, first: float = 1.0) -> Tensor:
    return torch.arange(first, first + rows)[:, None].expand(rows, WIDTH).contiguous()


def adding(name: str, value: float = 100.0) -> Any:
    return fh.on(name, fh.Add(torch.full((WIDTH,), value)))


def opened(model: nn.Module, *entries: Any) -> Any:
    return fh.Plan(*entries).prepare(model).open()


# --- refusals ---------------------------------------------------------------------------------


def test_a_site_in_gathered_is_refused(model: Net) -> None:
    request, chosen = opened(model, fh.keep("first")), torch.tensor([2, 3, 0, 1])
    for refused, names in ((True, ["first", "head"]), (False, ["first"])):
        gathered = {"head": chosen}
        with fh.rows.sites(model, names, max_requests=1, max_rows=8, width=WIDTH):
            batch = fh.batch({request: slice(0, 2)}, size=ROWS, gathered=gathered)
            if refused:
                with (
                    pytest.raises(fh.errors.RowsError, match="a module in gathered has other rows"),
                    batch,
                ):
                    pass
                continue
            with batch:
                model(numbered(), chosen)
    assert request.acts["first"][:, 0].tolist() == [1, 2]


@pytest.mark.usefixtures("sites")
def test_a_batch_without_a_size_is_refused(model: Net) -> None:
    request = opened(model, fh.keep("head"))
    with pytest.raises(fh.errors.RowsError, match="pass size"), fh.batch({request: 0}):
        pass
    with fh.batch({request: 0}, positions=torch.arange(ROWS)):
        model(numbered())
    assert request.acts.positions("head") == [0]


@pytest.mark.usefixtures("sites")
def test_hooks_of_the_request_itself_are_refused(model: Net) -> None:
    request, other = opened(model, fh.keep("first")), opened(model, adding("first"))
    own = fh.register(model, "head", fh.Zero(), scope=request)
    rows = {other: slice(2, 4), request: slice(0, 2)}
    with (
        pytest.raises(fh.errors.RowsError, match="cannot have extra hooks") as refused,
        fh.batch(rows, size=ROWS),
    ):
        pass
    assert refused.value.member is request
    own.remove()
    with fh.batch(rows, size=ROWS):
        with pytest.raises(fh.errors.RowsError, match="cannot have extra hooks"):
            fh.register(model, "head", fh.Zero(), scope=request)
        out = model(numbered())
    assert out[:, 0].tolist() == [1, 2, 103, 104, 5, 6]
    fh.register(model, "head", fh.Zero(), scope=request)  # in no batch now


@pytest.mark.usefixtures("sites")
def test_positions_that_are_not_known_are_refused(model: Net) -> None:
    plan = fh.Plan(fh.keep("first", at=-1)).prepare(model)
    request, other = plan.open(), opened(model, fh.keep("first"))
    batch = fh.batch({other: 0, request: 1}, size=ROWS)
    with pytest.raises(fh.errors.RowsError, match="pass positions to the batch") as refused, batch:
        pass
    assert refused.value.member is request
    batch = fh.batch({other: 0, request: 1}, positions=torch.arange(ROWS))
    with pytest.raises(fh.errors.RowsError, match="pass lengths") as refused, batch:
        pass
    batch = fh.batch({other: 0}, positions=torch.zeros(ROWS, 2, dtype=torch.long))
    with pytest.raises(fh.errors.RowsError, match=r"shape \(rows,\)"), batch:
        pass
    with fh.batch({other: 0, request: 1}, positions=torch.arange(ROWS), lengths={request: 2}):
        model(numbered())
    assert request.acts["first"][:, 0].tolist() == [2]


def test_sites_are_those_that_are_open_as_the_batch_is_entered(model: Net) -> None:
    request = opened(model, adding("first"))
    with fh.rows.sites(model, "first", max_requests=1, max_rows=8, width=WIDTH):
        made = fh.batch({request: 0}, size=ROWS)
    with made:
        assert model(numbered())[0, 0] == 101
    made = fh.batch({request: 0}, size=ROWS)
    with (
        fh.rows.sites(model, "second", max_requests=1, max_rows=8, width=WIDTH),
        pytest.raises(fh.errors.RowsError, match="not a site"),
        made,
    ):
        pass


# --- rows -------------------------------------------------------------------------------------


@compiled
@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("rows", [3, 7])
@pytest.mark.usefixtures("sites")
def test_a_call_with_other_rows_than_the_batch_reads_nobodys(
    model: Net, rows: int, in_graph: bool
) -> None:
    run: Any = torch.compile(model, backend="eager", fullgraph=True) if in_graph else model
    plan = fh.Plan(fh.keep("first")).prepare(model)
    secret, reads, steers = plan.open(), plan.open(), opened(model, adding("second"))
    with fh.batch({secret: slice(2, 6)}, size=ROWS):
        run(numbered(first=50))
    with fh.batch({reads: slice(2, 5), steers: slice(0, 2)}, size=ROWS):
        out = run(numbered(rows))
    assert out.tolist() == numbered(rows).tolist()
    assert not reads.acts
    for request, name in ((reads, "first"), (steers, "second")):
        assert isinstance(request.error, fh.errors.RowsError)
        assert f"site '{name}', which has a tensor with {rows} rows" in str(request.error)


@pytest.mark.usefixtures("sites")
def test_other_rows_at_one_site_fail_those_with_hooks_there(model: Net) -> None:
    early, late = opened(model, fh.keep("*")), opened(model, adding("first"))
    with fh.batch({early: slice(0, 2), late: slice(2, 4)}, size=ROWS):
        out = model(numbered(), torch.tensor([3, 0]))
    assert "'head', which has a tensor with 2 rows" in str(early.error)
    assert early.acts["second"][:, 0].tolist() == [1, 2]  # as before the failure
    assert "head" not in early.acts
    assert late.error is None
    assert out[:, 0].tolist() == [104, 1]


@pytest.mark.usefixtures("sites")
@pytest.mark.parametrize(
    "spoil",
    [
        lambda x: x.double(),
        lambda x: x.long(),
        lambda x: x.to(torch.float8_e4m3fn),
        lambda x: x.to_sparse(),
        lambda x: x[:, :2],
        lambda x: x[:, 0],
    ],
)
def test_an_output_of_another_kind_fails_those_with_hooks_there(
    model: Net, spoil: Callable[[Tensor], Tensor]
) -> None:
    model.second.register_forward_hook(lambda _module, _args, output: spoil(output), prepend=True)
    model.head.register_forward_hook(lambda *_: numbered(), prepend=True)
    keeps, steers = opened(model, fh.keep("second")), opened(model, adding("second"))
    other = opened(model, fh.keep("first"), adding("head"))
    with fh.batch({keeps: 0, steers: 1, other: 2}, size=ROWS):
        out = model(numbered())
    assert isinstance(keeps.error, fh.errors.RowsError)
    assert isinstance(steers.error, fh.errors.RowsError)
    assert other.error is None
    assert other.acts["first"][:, 0].tolist() == [3]
    assert out[:, 0].tolist() == [1, 2, 103, 4, 5, 6]


@pytest.mark.usefixtures("sites")
@pytest.mark.parametrize("narrow", [torch.float16, torch.bfloat16])
def test_an_output_of_a_narrower_dtype_is_served(model: Net, narrow: torch.dtype) -> None:
    request = opened(model, adding("*"), fh.keep("head"))
    with fh.batch({request: slice(1, 3)}, size=ROWS):
        out = model(numbered().to(narrow))
    assert out.dtype == narrow
    assert out[:, 0].tolist() == [1, *out[1:3, 0].tolist(), 4, 5, 6]
    assert torch.equal(request.acts["head"], out[1:3].float())


@pytest.mark.usefixtures("sites")
def test_a_capture_has_no_memory_of_others(model: Net) -> None:
    plan = fh.Plan(fh.keep("*")).prepare(model)
    members = {plan.open(): slice(0, 1), plan.open(): slice(1, 6)}
    with fh.batch(members, size=ROWS):
        model(numbered())
    for request, rows in members.items():
        for kept in request.acts.values():
            file = io.BytesIO()
            torch.save(kept, file)
            written = torch.load(io.BytesIO(file.getvalue())).untyped_storage()
            own = {*numbered()[rows].flatten().tolist()}
            assert {*torch.tensor([], dtype=kept.dtype).set_(written).tolist()} == own


# --- failures ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("sites")
def test_a_slice_that_does_not_fit_fails_its_request_alone(model: Net) -> None:
    whole, wrong = slice(None), (slice(None), 99)
    good = [opened(model, fh.keep("*", slice=whole)) for _ in range(2)]
    bad = opened(model, fh.keep("*", slice=wrong))
    with fh.batch({good[0]: 0, bad: 1, good[1]: 2}, size=ROWS):
        model(numbered())
    assert isinstance(bad.error, IndexError)
    assert [each.acts["head"][:, 0].tolist() for each in good] == [[1], [3]]


@pytest.mark.usefixtures("sites")
def test_failures_are_logged(model: Net, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "ferrohook")
    bad = opened(model, fh.keep("*", slice=(slice(None), 99)))
    with fh.batch({bad: 1}, size=ROWS):
        model(numbered())
    assert "failed in a batch" in caplog.text


@pytest.mark.usefixtures("sites")
def test_a_deadline_that_has_passed_fails_the_request(model: Net) -> None:
    late, other = opened(model, adding("*"), fh.keep("*")), opened(model, fh.keep("head"))
    late.expire(0)
    time.sleep(0.01)
    with fh.batch({late: 0, other: 1}, size=ROWS):
        assert model(numbered())[0, 0] == 1
    assert isinstance(late.error, TimeoutError)
    assert not late.acts
    assert other.acts["head"][:, 0].tolist() == [2]


def _fail(request: Any) -> None:
    request.fail(ValueError("cancelled"))


def _expire(request: Any) -> None:
    request.expire(0)
    time.sleep(0.01)


@pytest.mark.usefixtures("sites")
@pytest.mark.parametrize(
    "end", [lambda it: it.close(), lambda it: it.prepared.close(), _fail, _expire]
)
def test_a_request_that_ends_within_a_call_is_steered_and_kept_no_more(
    model: Net, end: Callable[[Any], None]
) -> None:
    request, other = opened(model, adding("*"), fh.keep("*")), opened(model, adding("*"))
    model.second.register_forward_pre_hook(lambda *_: end(request))
    with fh.batch({request: 0, other: 1}, size=ROWS):
        out = model(numbered())
    assert out[:, 0].tolist() == [101, 302, 3, 4, 5, 6]
    assert {name: kept[:, 0].tolist() for name, kept in request.acts.items()} == {"first": [101]}


def test_members_of_silent_sites_are_told_of(model: Net, sites: Any) -> None:
    ran, silent = opened(model, fh.keep("first")), opened(model, adding("head"))
    batch = fh.batch({ran: 0, silent: 1}, size=ROWS)
    with pytest.warns(fh.errors.NeverFiredWarning), batch:
        model.first(numbered())
    assert batch.silent == [silent]
    assert not sites.closed


# --- interrupts -------------------------------------------------------------------------------


class InterruptedAt:
    """Ctrl-C at one line of the files of sites, and of batches.

    Not at one with a `with`: no signal handler runs between its block and `__exit__`.
    """

    def __init__(self, line: int) -> None:
        self.left = line

    def __enter__(self) -> None:
        sys.settrace(self._trace)

    def __exit__(self, *_exception: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: Any, event: str, _value: object) -> Any:
        if (
            Path(frame.f_code.co_filename).parent.name != "rows"
            or "tests" in frame.f_code.co_filename
        ):
            return None
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and not line.lstrip().startswith("with "):
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt
        return self._trace


@pytest.mark.parametrize("leaving", [False, True])
def test_an_interrupt_at_any_line_leaves_sites_as_they_were(
    model: Net, sites: Any, leaving: bool
) -> None:
    after = fh.Plan(adding("first"), fh.keep("head")).prepare(model)
    lines = 0
    interrupted = True
    while interrupted:
        interrupted, lines = False, lines + 1
        before = opened(model, adding("*", 1000.0), fh.keep("*"))  # anew: the same lines run
        batch = fh.batch({before: slice(0, 4)}, size=ROWS)
        try:
            if leaving:
                batch.__enter__()
                model(numbered())
                with InterruptedAt(lines):
                    batch.__exit__(None, None, None)
            else:
                with InterruptedAt(lines):
                    batch.__enter__()
                batch.__exit__(RuntimeError, None, None)
        except KeyboardInterrupt:
            interrupted = True
        assert model(numbered())[:, 0].tolist() == [1, 2, 3, 4, 5, 6]
        request = after.open()
        with fh.batch({request: slice(2, 4)}, size=ROWS):
            out = model(numbered())
        assert out[:, 0].tolist() == [1, 2, 103, 104, 5, 6], lines
        assert request.acts["head"][:, 0].tolist() == [103, 104]
    assert lines > 30
    sites.close()


def test_two_threads_do_not_take_the_sites_from_each_other(model: Net, sites: Any) -> None:
    first, second = opened(model, adding("*")), opened(model, adding("*"))
    refused: list[BaseException] = []

    def enter() -> None:
        try:
            with fh.batch({second: 0}, size=ROWS):
                pass
        except fh.errors.RowsError as error:
            refused.append(error)

    with fh.batch({first: 0}, size=ROWS):
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
        assert model(numbered())[0, 0] == 301
        with pytest.raises(fh.HookError, match="leave the batch first"):
            sites.close()
    assert "one batch at a time" in str(refused[0])


INTERRUPTED = """
import linecache

class Interrupts:
    def __init__(self, line):
        self.left = line
    def trace(self, frame, event, value):
        if not frame.f_code.co_filename.endswith("rows/operators.py"):
            return None
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and not line.lstrip().startswith("with "):
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt
        return self.trace

model = torch.nn.Linear(4, 4).requires_grad_(False)
for line in range(1, 1000):
    sys.settrace(Interrupts(line).trace)
    try:
        sites = fh.rows.sites(model, "", max_requests=1, max_rows=4)
    except KeyboardInterrupt:
        continue
    finally:
        sys.settrace(None)
    break
request = fh.Plan(fh.on("", fh.Add(torch.ones(4))), fh.keep("")).prepare(model).open()
x = torch.randn(4, 4)
with fh.batch({request: [1]}, size=4):
    y = model(x)
assert torch.allclose(y[1], model(x)[1] + 1), y
assert torch.equal(request.acts[""], y[1:2])
print("interrupts:", line - 1)
"""


def test_an_interrupt_while_the_operators_are_defined_is_made_good() -> None:
    done = run_with_torch(INTERRUPTED)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) > 10


# Callbacks of weak references keep it to themselves.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("parity", [0, 1])
def test_an_interrupt_at_any_place_leaves_no_sites(parity: int) -> None:
    """Covers each place of opening and leaving sites; each test takes every second one."""
    plan, x, places = fh.Plan(adding("first")), numbered(), parity

    def act() -> None:
        with fh.rows.sites(model, "*", max_requests=2, max_rows=8, width=WIDTH):
            model(x)

    reached = True
    while reached:
        model = Net()
        reached, _ = interrupted_at(act, places)
        assert fh.hooks(model) == [], places
        with plan.prepare(model) as prepared:
            request = prepared.open()
            with fh.batch({request: slice(0, 2)}):  # sites would want its size
                out = model(x)
            assert out[:, 0].tolist() == [101, 102, 3, 4, 5, 6]
        fh.rows.sites(model, "*", max_requests=2, max_rows=8, width=WIDTH).close()
        places += 2
    assert places > 200


def test_sites_stay_open_without_their_handle_and_go_with_their_model() -> None:
    model = Net()
    fh.rows.sites(model, "*", max_requests=2, max_rows=8, width=WIDTH)
    gc.collect()
    request = opened(model, adding("first"))
    with pytest.raises(fh.errors.RowsError, match="pass size"), fh.batch({request: 0}):
        pass
    with fh.batch({request: 0}, size=ROWS):
        assert model(numbered())[:, 0].tolist() == [101, 2, 3, 4, 5, 6]
    gone = weakref.ref(model)
    del model, request
    gc.collect()
    assert gone() is None
    with fh.batch({fh.scope(): 0}, warn=False):  # no sites, no size
        pass

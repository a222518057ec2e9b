"""Faults that random batches or attacks found, one test for the class of each."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.masked import masked_tensor
from torch.utils.checkpoint import checkpoint

import ferrohook as fh
from support.batches.runs import Meanwhile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WIDTH = 4


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "ferrohook")


@pytest.fixture
def requests() -> Iterator[Callable[..., Any]]:
    """Opens a request of a plan with these entries."""
    prepared = []

    def open_request(model: nn.Module, *entries: Any) -> Any:
        prepared.append(fh.Plan(*entries).prepare(model))
        return prepared[-1].open()

    yield open_request
    for each in prepared:
        each.close()


class Head(nn.Module):
    """A body on all rows, and a head on chosen ones."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Identity(), nn.Identity()
        self.rows = torch.arange(0)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)[self.rows])


def numbered(rows: int) -> Tensor:
    return torch.arange(1.0, rows + 1)[:, None].expand(rows, WIDTH).contiguous()


# --- the cache of programs ----------------------------------------------------------------


@pytest.mark.parametrize("by", ["tensor", "function"])
def test_batches_of_the_same_members_with_other_gathered_rows(
    requests: Callable[..., Any], by: str
) -> None:
    model = Head()
    a = requests(model, fh.on("head", fh.Zero()), fh.keep("head"))
    b = requests(model, fh.keep("head"))
    x = numbered(6)
    for rows in ([0, 1, 4, 5], [4, 5, 0, 1], [3, 0], [5, 5, 2, 2], None, [0, 1, 4, 5]):
        model.rows = torch.tensor(range(6) if rows is None else rows)
        index = model.rows if by == "tensor" else (lambda *_: model.rows)
        gathered = None if rows is None else {"head": index}
        with fh.batch({a: slice(0, 3), b: slice(3, 6)}, size=6, gathered=gathered):
            got = model(x)
        own = model.rows < 3
        expected = x[model.rows].masked_fill(own[:, None], 0)
        assert torch.equal(got, expected)
        if len(own) > own.sum() > 0:
            assert torch.equal(b.acts["head"], x[model.rows][~own])
            assert torch.equal(a.acts["head"], torch.zeros(int(own.sum()), WIDTH))


@pytest.mark.parametrize("change", ["register", "close", "fail", "priority"])
@pytest.mark.parametrize("another_module", [True, False])
def test_a_change_while_merged_hooks_run_is_seen_by_the_next_batch(
    requests: Callable[..., Any], change: str, *, another_module: bool
) -> None:
    model = nn.Sequential(nn.Identity(), nn.Identity())
    a = requests(model, fh.on("0", fh.Scale(2.0)), fh.on("1", fh.Scale(1.0)))
    b = requests(model, fh.on("0", fh.Scale(3.0)), fh.on("1", fh.Scale(1.0)))
    handle = fh.register(model, "0", fh.Add(torch.ones(WIDTH)), scope=a)

    def meanwhile() -> None:
        if change == "register":
            fh.register(model, "0", fh.Zero(), scope=a)
        elif change == "close":
            b.close()
        elif change == "fail":
            b.fail(ValueError("stopped"))
        else:
            (each,) = handle
            each.priority = 5
        if another_module:
            model[1](numbered(4))

    rows, x = {a: slice(0, 2), b: slice(2, 4)}, numbered(4)
    with fh.batch(rows, size=4, warn=False), Meanwhile(0, meanwhile) as change_point:
        model[0](x)
    assert change_point.reached
    expected = {
        "register": [0, 0, 9, 12],
        "priority": [4, 6, 9, 12],
        "close": [3, 5, 3, 4],
        "fail": [3, 5, 3, 4],
    }[change]
    if change == "close":
        rows = {a: slice(0, 2)}
    with fh.batch(rows, size=4, warn=False):
        got = model[0](numbered(4))
    assert got[:, 0].tolist() == expected


def test_registering_elsewhere_forgets_nothing_and_results_are_those_without_remembering(
    requests: Callable[..., Any],
) -> None:
    model = nn.Sequential(nn.Identity(), nn.Identity())
    a, b = (requests(model, fh.on("0", fh.Scale(factor))) for factor in (2.0, 3.0))
    outputs = []
    for on in (True, False):
        fh._core.cache_programs(on)
        try:
            for _ in range(3):
                with fh.batch({a: slice(0, 2), b: slice(2, 4)}):
                    outputs.append(model(numbered(4)))
        finally:
            fh._core.cache_programs(True)
    assert all(torch.equal(output, outputs[0]) for output in outputs)


WANTED: dict[Any, list[int]] = {"last_prompt": [1], 0: [0], "prompt": [0, 1]}
"""Chosen positions, out of a prompt of two tokens and one more token."""


# --- places -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("hook", [fh.Zero(), lambda _module, _args, output: output * 0])
@pytest.mark.parametrize("index", [[1, 4], [4, 1], [1, 1, 0, 4], [2, 5], [], [0, -1, 1]])
@pytest.mark.parametrize("at", ["last_prompt", 0, "prompt", slice(1, None)])
def test_positions_of_gathered_rows(
    requests: Callable[..., Any], dim: int, hook: Any, index: list[int], at: Any
) -> None:
    model = Head()
    a = requests(model, fh.on("head", hook, at=at))
    b = requests(model, fh.keep("head", at=at))
    positions = torch.tensor([0, 1, 2, 0, 1, 2])
    model.rows = torch.tensor(index, dtype=torch.long)
    x = numbered(6)
    if dim:
        x = x[None]
        model.forward = lambda x: model.head(model.body(x)[:, model.rows])  # type: ignore[method-assign]
    with fh.batch(
        {a: slice(0, 3), b: slice(3, 6)},
        dim,
        positions=positions,
        lengths={a: 2, b: 2},
        gathered={"head": model.rows},
        warn=False,
    ):
        got = model(x)
    assert a.error is None
    assert b.error is None
    wanted = [1, 2] if isinstance(at, slice) else WANTED[at]
    expected = [
        0.0 if 0 <= row < 3 and positions[row] in wanted else float(x.flatten()[row * WIDTH])
        for row in index
    ]
    assert got.flatten()[::WIDTH].tolist() == expected
    kept = [float(row + 1) for row in index if row >= 3 and positions[row] in wanted]
    if kept:
        assert b.acts["head"].reshape(-1, WIDTH)[:, 0].tolist() == kept


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (torch.tensor([0, 7]), "out of range"),
        (torch.tensor([2**40]), "out of range"),
        (torch.zeros(2, 2, dtype=torch.long), "one dimension"),
        (torch.tensor(1), "one dimension"),
    ],
)
@pytest.mark.parametrize("by", ["tensor", "function"])
def test_a_gathered_index_that_cannot_be_is_an_error(
    requests: Callable[..., Any], index: Tensor, message: str, by: str
) -> None:
    model = Head()
    a = requests(model, fh.on("head", fh.Zero()))
    model.rows = torch.tensor([0, 1])
    if by == "tensor":
        with pytest.raises(fh.errors.RowsError, match=message):
            fh.batch({a: slice(0, 3)}, size=6, gathered={"head": index})
        return
    with (
        fh.batch({a: slice(0, 3)}, size=6, gathered={"head": lambda *_: index}, warn=False),
        pytest.raises(fh.errors.RowsError, match=message),
    ):
        model(numbered(6))


@pytest.mark.parametrize(
    "rows",
    [
        slice(0, 2**42, 2),
        slice(0, 2**62, 2),
        slice(2**62, 2**63 - 1),
        slice(0, 2**40),
        [2**40],
        2**62,
        -(2**63),
        slice(-(2**63), 3),
        slice(0, 2**70),
    ],
    ids=str,
)
@pytest.mark.parametrize("size", [None, 4])
def test_hostile_rows_are_refused(
    requests: Callable[..., Any], rows: Any, size: int | None
) -> None:
    a = requests(nn.Identity(), fh.on("", fh.Zero()))
    if isinstance(rows, slice) and rows.start == -(2**63) and size is not None:
        fh.batch({a: rows}, size=size)  # as slices do, from the start
        return
    with pytest.raises((ValueError, fh.HookTypeError, OverflowError)):
        fh.batch({a: rows}, size=size)


def test_masks_of_an_earlier_batch_are_not_those_of_the_next(requests: Callable[..., Any]) -> None:
    model = Head()
    model.rows = torch.arange(3)
    a = requests(model, fh.on("body", fh.Zero(), at=0))
    with fh.batch({a: slice(0, 3)}, positions=torch.arange(3), warn=False):
        model(numbered(3))
    with fh.batch({a: slice(0, 3)}, size=3, warn=False):
        got = model.body(numbered(3))
    assert torch.equal(got, numbered(3))
    assert "positions" in str(a.error)


# --- failures of one --------------------------------------------------------------------------


class Float8(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.to(torch.float8_e4m3fn)


HOSTILE: dict[str, tuple[nn.Module, Any]] = {
    "sparse": (nn.Identity(), lambda _module, _args, output: output.to_sparse()),
    "float8": (Float8(), fh.Zero()),
    "meta": (nn.Identity(), lambda _module, _args, output: output.to("meta")),
    "complex": (nn.Identity(), lambda _module, _args, output: output + 0j),
    "shape": (nn.Identity(), lambda _module, _args, output: output[:1]),
    "text": (nn.Identity(), lambda _module, _args, _output: "text"),
    "raises": (nn.Identity(), lambda _module, _args, output: output.missing),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("rows", [[0, 2], slice(0, 2)], ids=["index", "range"])
def test_a_result_that_cannot_be_written_fails_its_request_alone(
    requests: Callable[..., Any], name: str, rows: Any
) -> None:
    layer, hook = HOSTILE[name]
    model = nn.Sequential(layer)
    a = requests(model, fh.on("0", hook))
    b = requests(model, fh.keep("0"))
    c = requests(model, fh.on("0", lambda _module, _args, output: output.clone()))
    with fh.batch({a: rows, b: slice(4, 6), c: 3}, size=6):
        got = model(numbered(6))
    assert torch.equal(got.float(), layer(numbered(6)).float()) or (
        name == "float8" and a.error is None
    )
    assert a.error is not None or name == "float8"
    assert b.error is None
    assert c.error is None
    assert torch.equal(b.acts["0"].float(), numbered(6)[4:])


@pytest.mark.parametrize("on_error", ["raise", "ignore", "disable"])
@pytest.mark.parametrize("batched", [False, True])
def test_the_end_of_a_recomputation_is_no_failure(
    requests: Callable[..., Any], on_error: Any, *, batched: bool
) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)])

        def forward(self, x: Tensor) -> Tensor:
            inner = lambda x: self.layers[1](self.layers[0](x))  # noqa: E731
            return self.layers[2](checkpoint(inner, x, use_reentrant=False))

    model = Checkpointed()
    x = numbered(6).requires_grad_()

    def ablate(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        del module, args
        return output - output.sin() * output.cos()

    entries = fh.on("layers.0", fh.Scale(2.0)), fh.on("layers.1", ablate, on_error=on_error)
    a, b = requests(model, *entries), requests(model, *entries)
    gradients = []
    for whole in (False, True):
        x.grad = None
        if not whole:
            with (
                fh.register(model, "layers.0", fh.Scale(2.0)),
                fh.register(model, "layers.1", ablate),
            ):
                model(x).sum().backward()
        elif batched:
            with fh.batch({a: slice(0, 3), b: slice(3, 6)}, size=6):
                model(x).sum().backward()
        else:
            with a:
                model(x).sum().backward()
        assert x.grad is not None
        gradients.append(x.grad.clone())
    assert a.error is None
    assert b.error is None
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("beside", [False, True])
def test_the_size_is_found_whoever_is_beside(requests: Callable[..., Any], *, beside: bool) -> None:
    class Embeds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(50, WIDTH)

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.embed(input_ids)

    model = Embeds()
    a = requests(model, fh.on("embed", fh.Zero(), at="last_prompt"))
    b = requests(model, fh.keep("embed"))
    rows = {a: slice(0, 2), b: slice(2, 3)} if beside else {a: slice(0, 3)}
    with fh.batch(rows):  # the last row has no owner
        got = model(torch.arange(12).view(4, 3))
    assert a.error is None
    assert got[:, -1].abs().sum(-1).eq(0).tolist() == [True, True, not beside, False]


@pytest.mark.parametrize("when", ["before", "made", "entered"])
def test_a_python_hook_that_comes_late_spoils_no_capture_of_others(
    requests: Callable[..., Any], when: str
) -> None:
    model = nn.Sequential(nn.Identity(), nn.Identity())
    a = requests(model, fh.on("1", fh.Scale(2.0)))
    b = requests(model, fh.keep("0"))

    def zero(module: nn.Module, args: Any) -> None:
        del module
        args[0].zero_()

    def register() -> None:
        fh.register(model, "1", zero, scope=a, phase="forward_pre")

    if when == "before":
        register()
    batch = fh.batch({b: slice(1, 4), a: slice(0, 1)})
    if when == "made":
        register()
    with batch:
        if when == "entered":
            register()
        got = model(numbered(4))
    assert a.error is None
    assert got[:, 0].tolist() == [0, 2, 3, 4]
    assert torch.equal(b.acts["0"], numbered(4)[1:])


def test_a_batch_left_in_another_context_frees_its_members(requests: Callable[..., Any]) -> None:
    model = nn.Identity()
    a = requests(model, fh.on("", fh.Zero()))
    batch = fh.batch({a: slice(0, 2)}, warn=False)
    contextvars.copy_context().run(batch.__enter__)
    with pytest.raises(fh.HookError):
        batch.__exit__(None, None, None)
    assert batch.closed
    with fh.batch({a: slice(0, 2)}):
        assert not model(numbered(2)).any()


def test_a_batch_left_by_a_finalised_generator_frees_its_members(
    requests: Callable[..., Any],
) -> None:
    model = nn.Identity()
    a = requests(model, fh.on("", fh.Zero()))

    async def entered() -> Any:
        with fh.batch({a: slice(0, 2)}, warn=False):
            yield

    async def left_midway() -> None:
        generator = entered()
        await asyncio.create_task(generator.__anext__())  # enters in the context of a task
        with pytest.raises(fh.HookError):
            await generator.aclose()

    asyncio.run(left_midway())
    with fh.batch({a: slice(0, 2)}):
        assert not model(numbered(2)).any()


# --- locks --------------------------------------------------------------------------------------


class Elsewhere(Tensor):
    """A tensor whose device is of Python: comparing it runs `met`."""

    met: Callable[[], None] | None = None


class Device:
    type = "cpu"

    def __eq__(self, other: object) -> bool:
        met, Elsewhere.met = Elsewhere.met, None
        if met is not None:
            met()
        return True

    def __hash__(self) -> int:
        return 1


Elsewhere.device = property(lambda _tensor: Device())  # type: ignore[assignment]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "rows", [([0, 2], [1, 3]), (slice(0, 2), slice(2, 4))], ids=["index", "range"]
)
@pytest.mark.parametrize("at", [None, "prompt"])
def test_devices_are_compared_without_a_lock(
    requests: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, rows: Any, at: Any
) -> None:
    class Into(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.as_subclass(Elsewhere)

    plain = Tensor.to

    def to(tensor: Tensor, *args: Any) -> Tensor:
        return plain(tensor, *("cpu" if isinstance(each, Device) else each for each in args))

    monkeypatch.setattr(Tensor, "to", to)
    model = nn.Sequential(Into())
    a, b = (requests(model, fh.on("0", fh.Scale(factor), at=at)) for factor in (2.0, 3.0))
    met = []

    def call_again() -> None:
        met.append(1)
        model(numbered(4))

    known = {} if at is None else {"positions": torch.arange(4), "lengths": {a: 4, b: 4}}
    with fh.batch(dict(zip((a, b), rows, strict=True)), size=4, **known):
        first = model(numbered(4)).as_subclass(Tensor)
        for _ in range(3):
            Elsewhere.met = call_again
            assert torch.equal(model(numbered(4)).as_subclass(Tensor), first)
    Elsewhere.met = None
    assert met


# --- found by the random machine --------------------------------------------------------------


def test_a_refused_batch_leaves_its_other_members_as_they_were(
    requests: Callable[..., Any],
) -> None:
    model = nn.Sequential(nn.Identity())
    closed, other = (requests(model, fh.on("0", fh.Zero())) for _ in range(2))
    batch = fh.batch({other: 0, closed: 1}, size=2)
    closed.close()
    with pytest.raises(fh.errors.RowsError, match="closed"):
        batch.__enter__()
    with other:
        assert not model(numbered(2)).any()


def test_a_capture_that_is_interrupted_as_it_begins_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.Sequential(nn.Identity())
    capture = fh.capture(model, "0")

    def interrupt(*_args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(capture._tag), "begin", interrupt)
        with pytest.raises(KeyboardInterrupt):
            fh.batch({capture: 0}, size=2).__enter__()
    with pytest.raises(fh.errors.RowsError, match="closed"):
        fh.batch({capture: 0}, size=2).__enter__()


def test_captures_of_gathered_padded_rows_have_the_positions_of_their_columns(
    requests: Callable[..., Any],
) -> None:
    model = Head()
    request = requests(model, fh.keep("head"))
    model.rows = torch.tensor([2])
    x = numbered(3)[:, None] * torch.tensor([1.0, 10.0])[None, :, None]
    for positions in ([1, 2], [-1, 0]):
        table = torch.tensor([[-1, -1], [-1, -1], positions])
        with fh.batch({request: 2}, positions=table, gathered={"head": model.rows}):
            model(x)
    assert request.acts.positions("head") == [0, 1, 2]
    assert request.acts["head"][:, 0].tolist() == [30, 3, 30]


def test_a_slice_of_no_tokens_is_not_captured(requests: Callable[..., Any]) -> None:
    model = nn.Sequential(nn.Identity())
    request = requests(model, fh.keep("0", at=5, slice=(..., slice(0, 2))))
    with fh.batch({request: 0}, positions=torch.tensor([0])):
        model(numbered(1))
    assert not request.acts


def test_a_site_captures_rows_in_their_dimension(requests: Callable[..., Any]) -> None:
    model = nn.Sequential(nn.Identity())
    options: Any = {"max_requests": 1, "max_rows": 4, "width": WIDTH, "dim": 1}
    with fh.rows.sites(model, "0", **options, dtype=torch.float32, device="cpu"):
        request = requests(model, fh.keep("0"))
        with fh.batch({request: [1, 2]}, dim=1, size=3):
            model(numbered(3)[None])
        assert torch.equal(request.acts["0"], numbered(3)[None, 1:])


class Tagged(torch.Tensor):
    """A subclass whose rows are views, as of most."""


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
@pytest.mark.parametrize("hook", [fh.Scale(2.0), lambda _module, _args, output: output * 2])
def test_a_subclass_whose_rows_are_no_views_loses_no_change(hook: Any) -> None:
    """A write to rows of a `MaskedTensor` changes nothing, and says nothing."""
    model = nn.Sequential(nn.Identity())
    numbers = torch.randn(4, 3)
    masked = masked_tensor(numbers, torch.ones(4, 3, dtype=torch.bool))
    with fh.Plan(fh.on("0", hook)).prepare(model) as prepared:
        for value in (numbers, numbers.as_subclass(Tagged), masked):
            requests = [prepared.open(), prepared.open()]
            with fh.batch({requests[0]: [0, 1], requests[1]: [2]}):
                output = model(value)
            failed = [request.error is not None for request in requests]
            assert failed == [value is masked] * 2
            rows = output.get_data() if value is masked else output
            right = numbers.clone()
            right[:3] *= 1 if value is masked else 2
            assert torch.equal(rows, right)


class _Writing(nn.Module):
    """A module that writes to its input, which others read later."""

    def __init__(self) -> None:
        super().__init__()
        self.act, self.late = nn.ReLU(inplace=True), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        hidden = x.clone()
        changed = self.act(hidden)
        self.late(changed)
        return torch.cat([hidden, changed], -1)


def test_a_module_writes_to_the_rows_of_a_member_that_failed(
    requests: Callable[..., Any],
) -> None:
    model, x = _Writing(), torch.randn(6, WIDTH)
    add = fh.on("act", fh.Add(torch.ones(WIDTH)), phase="forward_pre")
    late = fh.on("act", fh.Scale(2.0), phase="forward_pre", when=fh.above("g", 0.0))
    fine = requests(model, add)
    failing = requests(model, fh.gate("g", "late", fh.Norm()), add, late)
    rows = {fine: slice(0, 3), failing: slice(3, 6)}
    positions = torch.tensor([0, 1, 2, 0, 1, 2])
    plain = model(x)
    with fh.batch(rows, positions=positions, lengths={fine: 3, failing: 3}):
        output = model(x)
    assert failing.error is not None
    assert torch.equal(output[3:], plain[3:])
    assert torch.equal(output[:3, :WIDTH], x[:3])

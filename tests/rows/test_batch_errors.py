"""Bad input of `fh.batch`, and the failures of one request among others."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ferrohook as fh

WIDTH = 4


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


@pytest.fixture
def prepared(model: nn.Module) -> fh.typing.Prepared:
    return fh.Plan(fh.on("0", fh.Add(torch.ones(WIDTH)))).prepare(model)


def test_rows(prepared: fh.typing.Prepared) -> None:
    a, b = prepared.open(), prepared.open()
    for rows, message in [
        ({}, "at least one"),
        ({a: slice(0, 4), b: slice(3, 5)}, "row 3 belongs to members 0 and 1"),
        ({a: [1, 1]}, "named twice"),
        ({a: slice(0, 9)}, "row 8 is out of range: the batch has 8"),
        ({a: [-9]}, "row -9 is out of range"),
        ({a: 8}, "row 8 is out of range"),
    ]:
        with pytest.raises(fh.errors.RowsError, match=message):
            fh.batch(rows, size=8)
    for rows in ({a: slice(None)}, {a: -1}):
        with pytest.raises(fh.errors.RowsError, match="positions or size"):
            fh.batch(rows)
    with pytest.raises(fh.errors.RowsError, match="out of range"):
        fh.batch({a: slice(0, 10**12)})
    for wrong in ("0", 1.5, torch.tensor([True]), torch.tensor([[1]]), None, [0.5]):
        with pytest.raises(fh.HookTypeError):
            fh.batch({a: wrong}, size=8)
    with pytest.raises(ValueError, match="step"):
        fh.batch({a: slice(4, 0, -1)}, size=8)


def test_arguments(prepared: fh.typing.Prepared) -> None:
    a = prepared.open()
    for arguments in (
        {"rows": [a]},
        {"rows": {prepared: 0}},
        {"rows": {"a": 0}},
        {"rows": {a: 0}, "dim": -1},
        {"rows": {a: 0}, "dim": True},
        {"rows": {a: 0}, "size": 1.5},
        {"rows": {a: 0}, "positions": [0]},
        {"rows": {a: 0}, "positions": torch.tensor([0.5])},
        {"rows": {a: 0}, "gathered": {"0": 3}},
    ):
        with pytest.raises(fh.HookTypeError):
            fh.batch(**arguments)
    with pytest.raises(fh.errors.RowsError, match="positions has 3"):
        fh.batch({a: 0}, size=2, positions=torch.arange(3))
    with pytest.raises(fh.errors.RowsError, match="shape"):
        fh.batch({a: 0}, dim=1, positions=torch.zeros(2, 2, dtype=torch.long))
    with pytest.raises(fh.SelectionError):
        fh.batch({a: 0}, gathered={"nowhere": torch.arange(2)})
    with pytest.raises(fh.errors.RowsError, match="names a model"):
        fh.batch({fh.scope(): 0}, gathered={"0": torch.arange(2)})


def test_states_of_requests(model: nn.Module, prepared: fh.typing.Prepared) -> None:
    a, b = prepared.open(), prepared.open()
    closed = prepared.open()
    closed.close()
    with pytest.raises(fh.errors.RowsError, match="closed"), fh.batch({a: 0, closed: 1}):
        pass
    with prepared.open() as entered:
        model(torch.randn(1, WIDTH))
        with pytest.raises(fh.errors.RowsError, match="entered with"), fh.batch({a: 0, entered: 1}):
            pass
    with fh.batch({a: 0}) as batch:
        with pytest.raises(fh.errors.RowsError, match="cannot be nested"), fh.batch({b: 0}):
            pass
        with pytest.raises(fh.HookError), a:
            pass
        errors = []

        def elsewhere() -> None:
            try:
                with fh.batch({b: 0, a: 1}):
                    pass
            except fh.errors.RowsError as error:
                errors.append(str(error))

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert "one batch at a time" in errors[0]
        model(torch.randn(1, WIDTH))
    with pytest.raises(fh.errors.RowsError, match="entered only once"), batch:
        pass
    with fh.batch({a: 1, b: 0}):  # released by the batches that could not be entered
        model(torch.randn(2, WIDTH))


def test_requests_of_several_models(model: nn.Module, prepared: fh.typing.Prepared) -> None:
    other = nn.Linear(WIDTH, WIDTH)
    stranger = fh.Plan(fh.keep("")).prepare(other).open()
    with pytest.raises(fh.errors.RowsError, match="for one model"):
        fh.batch({prepared.open(): 0, stranger: 1})
    part = fh.Plan(fh.keep("")).prepare(model[0]).open()
    with fh.batch({prepared.open(): 0, part: 1}):
        model(torch.randn(2, WIDTH))
    assert part.acts[""].shape == (1, WIDTH)
    with pytest.warns(fh.errors.NeverFiredWarning, match="no module"), fh.batch({stranger: 0}):
        model(torch.randn(2, WIDTH))


def test_backward_hooks_are_refused(model: nn.Module) -> None:
    scope = fh.scope()
    fh.register(model, "0", lambda *_: None, phase="backward", scope=scope)
    with pytest.raises(fh.errors.RowsError, match="backward"), fh.batch({scope: 0}):
        pass
    late = fh.scope()
    with fh.batch({late: 0}), pytest.raises(fh.errors.RowsError, match="backward"):
        fh.register(model, "0", lambda *_: None, phase="backward", scope=late)


def test_captures_of_gradients_are_refused(model: nn.Module) -> None:
    fine = fh.Plan(fh.keep("0")).prepare(model).open()
    request = fh.Plan(fh.keep("0", grads=True)).prepare(model).open()
    with (
        pytest.raises(fh.errors.RowsError, match="captures of gradients") as raised,
        fh.batch({fine: 0, request: 1}),
    ):
        pass
    assert raised.value.member is request


def _raises(_m: object, _a: object, _o: object) -> None:
    msg = "of the hook"
    raise ZeroDivisionError(msg)


@pytest.mark.parametrize(
    ("hook", "error", "message"),
    [
        (_raises, ZeroDivisionError, "of the hook"),
        (lambda _m, _a, o: o[:1], fh.errors.RowsError, "different rows than it got"),
        (lambda _m, _a, o: o.double(), fh.errors.RowsError, "different rows than it got"),
        (lambda _m, _a, o: (o, o), fh.errors.RowsError, "a different structure"),
        (fh.Add(torch.ones(WIDTH + 1)), fh.HookTypeError, "width"),
    ],
)
def test_a_failing_hook_fails_its_request_alone(
    model: nn.Module,
    caplog: pytest.LogCaptureFixture,
    hook: object,
    error: type[Exception],
    message: str,
) -> None:
    x = torch.randn(5, WIDTH)
    good = fh.Plan(fh.on("2", fh.Scale(2)), fh.keep("1"))
    bad = fh.Plan(fh.on("1", hook), fh.on("2", fh.Zero()), fh.keep("0"), fh.keep("2", label="l"))
    a, b = good.prepare(model).open(), bad.prepare(model).open()
    with fh.batch({a: slice(0, 2)}):
        expected = model(x)
    acts = a.acts["1"].clone()
    with fh.batch({a: slice(0, 2), b: slice(2, 4)}) as batch:
        out = model(x)
    assert torch.equal(out, expected)
    assert torch.equal(a.acts["1"], acts)
    assert isinstance(b.error, error)
    assert message in str(b.error)
    assert b.failed
    assert not a.failed
    assert batch.errors == {b: b.error}
    assert [*b.acts] == ["0"]
    assert "failed in a batch" in caplog.text
    with fh.batch({a: slice(0, 2), b: slice(2, 4)}):  # it stays so
        assert torch.equal(model(x), expected)


class _SpentError(Exception):
    def __init__(self, request: Any, *, detail: str) -> None:
        super().__init__(f"spent: {detail}")
        self.request = request


class _MissingError(Exception):
    def __init__(self, name: str) -> None:
        super().__init__(f"no {name}")


@pytest.mark.parametrize(
    "kind", [lambda it: _SpentError(it, detail="all"), lambda _: _MissingError("head")]
)
def test_a_failure_is_the_exception_of_the_hook_and_keeps_no_request(
    prepared: fh.typing.Prepared, kind: Any
) -> None:
    request = prepared.open()
    gone = weakref.ref(request)
    raised = kind(request)
    request.fail(raised)
    error = request.error
    assert error is not raised
    assert repr(error) == repr(raised)
    assert vars(error) == vars(raised)
    request.close()
    del request, raised, error
    gc.collect()
    assert gone() is None


def test_positions_are_not_known_after_a_dimension_of_heads() -> None:
    class Heads(nn.Module):
        def forward(self, input_ids: Tensor) -> Tensor:
            return torch.stack([input_ids, -input_ids])

    model, x = nn.Sequential(Heads()), torch.randn(3, 2, 1)
    entries = fh.on("0", fh.Add(torch.ones(1)), at=1), fh.keep("0")
    steered, kept = (fh.Plan(entry).prepare(model).open() for entry in entries)
    rows, gathered = {steered: [0, 1], kept: 2}, {"0": (torch.arange(3), 1)}
    with fh.batch(rows, positions=torch.arange(2).repeat(3, 1), gathered=gathered):
        output = model(x)
    assert torch.equal(output, model(x))
    assert "not in the first dimension" in str(steered.error)
    assert torch.equal(kept.acts["0"], output[:, 2:])
    with pytest.raises(fh.HookError, match="positions of '0' are not known"):
        kept.acts.positions("0")


def test_budgets_deadlines_and_outside_failures(model: nn.Module) -> None:
    x = torch.randn(4, WIDTH)
    small = fh.Plan(fh.keep("*", max_bytes=3 * WIDTH * 4)).prepare(model).open()
    late = fh.Plan(fh.on("2", fh.Zero())).prepare(model).open(deadline=0)
    ended = fh.Plan(fh.on("2", fh.Zero())).prepare(model).open()
    error = RuntimeError("the client left")
    with fh.batch({small: slice(0, 2), late: 2, ended: 3}):
        assert ended.fail(error)
        assert not ended.fail(ValueError("a later one"))
        out = model(x)
    assert torch.equal(out, model(x))
    assert isinstance(small.error, fh.errors.CaptureBudgetError)
    assert [*small.acts] == ["0"]
    assert isinstance(late.error, TimeoutError)
    assert isinstance(ended.error, RuntimeError)


def test_a_deadline_that_nothing_would_look_at_is_refused(model: nn.Module) -> None:
    late = fh.Plan(fh.on("2", fh.Zero())).prepare(model).open(deadline=600)
    with pytest.raises(fh.HookError, match="deadline of a request applies only in batches"), late:
        pass
    with fh.batch({late: 0}):  # refusing it closed nothing
        assert not model(torch.randn(1, WIDTH)).any()


def test_lengths_of_prompts_without_positions_are_refused(model: nn.Module) -> None:
    request = fh.Plan(fh.on("2", fh.Zero())).prepare(model).open()
    with pytest.raises(fh.HookTypeError, match="lengths= only works with positions"):
        fh.batch({request: 0}, lengths={request: 1})


def test_on_error_as_ever(model: nn.Module) -> None:
    plan = fh.Plan(fh.on("1", _raises, on_error="ignore"), fh.on("2", fh.Zero()))
    request = plan.prepare(model).open()
    with fh.batch({request: 0}):
        out = model(torch.randn(2, WIDTH))
    assert not request.failed
    assert isinstance(request.error, ZeroDivisionError)
    assert out[0].count_nonzero() == 0


def test_what_ends_the_program_goes_through(model: nn.Module) -> None:
    def interrupt(_m: object, _a: object, _o: object) -> None:
        raise KeyboardInterrupt

    request = fh.Plan(fh.on("1", interrupt)).prepare(model).open()
    with pytest.raises(KeyboardInterrupt), fh.batch({request: 0}):
        model(torch.randn(2, WIDTH))
    assert not request.failed


def test_hooks_of_the_whole_batch_raise(model: nn.Module, prepared: fh.typing.Prepared) -> None:
    request = prepared.open()
    with fh.batch({request: 0}) as batch:
        fh.register(model, "1", _raises, scope=batch)
        with pytest.raises(ZeroDivisionError):
            model(torch.randn(2, WIDTH))
    assert request.error is None


def test_rows_that_are_not_found(model: nn.Module) -> None:
    folded = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Flatten(0, 1), nn.ReLU())
    request = fh.Plan(fh.on("2", fh.Zero())).prepare(folded).open()
    fine = fh.Plan(fh.keep("0")).prepare(folded).open()
    with fh.batch({request: 0, fine: 1}):
        folded(torch.randn(2, 3, WIDTH))
    assert isinstance(request.error, fh.errors.RowsError)
    for part in ("ReLU", "Zero", "[6, 4]", "2 rows"):
        assert part in str(request.error)
    assert fine.acts["0"].shape == (1, 3, WIDTH)


def test_a_plan_whose_model_changed_fails_its_request(model: nn.Sequential) -> None:
    request = fh.Plan(fh.on("1", fh.Zero())).prepare(model).open()
    model[1] = nn.Tanh()
    with fh.batch({request: 0}):
        model(torch.randn(2, WIDTH))
    assert "replaced" in str(request.error)


def test_other_parts_of_a_value_are_shared() -> None:
    class Pair(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, torch.zeros(7)

    model = Pair()
    scope = fh.scope()
    fh.register(model, "", lambda _m, _a, o: (o[0], o[1] + 1), scope=scope)
    with fh.batch({scope: 0}, size=3):
        out = model(torch.randn(3, 2))
    assert "no rows of the batch" in str(scope.error)
    assert out[1].count_nonzero() == 0


def test_activations_of_a_failed_request_say_why_they_are_not_there() -> None:
    model = nn.Sequential(nn.Identity())
    with fh.Plan(fh.keep("0"), fh.on("0", fh.Scale(2.0))).prepare(model) as prepared:
        request = prepared.open()
        with fh.batch({request: [5]}):  # the tensors have one row
            model(torch.ones(1, 2))
        told = r"'0' never ran .*; the request failed: RowsError: .* shape \[1, 2\]"
        with pytest.raises(fh.SelectionError, match=told):
            request.acts["0"]


def test_batches_warn_once_of_a_plan_of_which_nothing_ran(prepared: fh.typing.Prepared) -> None:
    for number in range(3):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with fh.batch({prepared.open(): 0, prepared.open(): 1}) as batch:
                pass
        assert len(batch.silent) == 2
        assert [each.category for each in caught] == [fh.errors.NeverFiredWarning] * (number == 0)


def _shorter(_m: object, _a: object, output: Tensor) -> Tensor:
    return output[:1]


def _longer(_m: object, _a: object, output: Tensor) -> Tensor:
    return torch.cat((output, output))


def _mended(_m: object, _a: object, output: Tensor) -> Tensor:
    return output[:2]


def _watching(_m: object, _a: object, _output: object) -> None:
    pass


def _fewer_arguments(_m: object, args: tuple[Tensor]) -> Tensor:
    return args[0][:1]


def _sparse(_m: object, _a: object, output: Tensor) -> Tensor:
    return output.to_sparse()


@pytest.mark.parametrize("shape", [(5,), (5, 3)])
def test_what_a_failing_hook_returned_is_read(model: nn.Module, shape: tuple[int, ...]) -> None:
    x = torch.randn(*shape, 4)
    plan = fh.Plan(fh.on("0", _sparse), fh.keep("0"))
    request = plan.prepare(model).open()
    positions = torch.arange(x[..., 0].numel()).view(shape)
    with torch.no_grad(), fh.batch({request: [1]}, positions=positions):
        model(x)
    assert "layout torch.sparse_coo" in str(request.error)
    assert request.acts["0"].is_sparse


def _raising(_m: object, _a: object, _output: object) -> None:
    raise KeyError


AT_THE_PART: dict[str, tuple[list[Any], str | None]] = {
    "behind a capture": ([fh.keep("0"), fh.on("0", _shorter)], "_shorter"),
    "ahead of others": ([fh.on("0", _shorter), fh.on("0", _watching), fh.keep("0")], "_shorter"),
    "between others": (
        [fh.on("0", _watching), fh.on("0", _sparse), fh.on("0", _watching)],
        "_sparse",
    ),
    "of two, the first": ([fh.on("0", _shorter), fh.on("0", _shorter)], "_shorter"),
    "another mends it": ([fh.on("0", _longer), fh.on("0", _mended)], None),
    "mended, and spoilt": (
        [fh.on("0", _longer), fh.on("0", _mended), fh.on("0", _shorter)],
        "_shorter",
    ),
    "raises": ([fh.on("0", _watching), fh.keep("0"), fh.on("0", _raising)], "_raising"),
    "an intervention": ([fh.keep("0"), fh.on("0", fh.Add(torch.ones(7)))], "Add"),
    "a part that is not there": ([fh.on("0", _watching), fh.keep("0", output_index=9)], "capture"),
    "its input": (
        [
            fh.on("0", lambda *_: None, phase="forward_pre"),
            fh.on("0", _fewer_arguments, phase="forward_pre"),
        ],
        "_fewer_arguments",
    ),
}


@pytest.mark.parametrize("rows", [slice(0, 2), [5, 1]], ids=["slice", "list"])
@pytest.mark.parametrize("case", AT_THE_PART)
def test_an_error_names_the_hook_that_failed(case: str, rows: Any) -> None:
    entries, guilty = AT_THE_PART[case]
    model = nn.Sequential(nn.Identity(), nn.Identity())
    beside: list[Any] = [fh.on("0", _watching), fh.keep("0")]
    with fh.Plan(*entries).prepare(model) as bad, fh.Plan(*beside).prepare(model) as good:
        failing, fine = bad.open(), good.open()
        x = torch.arange(24.0).reshape(6, 4)
        with fh.batch({failing: rows, fine: [3, 4]}, size=6):
            y = model(x)
        assert fine.error is None
        assert torch.equal(y[3:5], x[3:5])
        assert torch.equal(fine.acts["0"], x[3:5])
        if guilty is None:
            assert failing.error is None
            return
        assert failing.error is not None
        told = [str(failing.error), *getattr(failing.error, "__notes__", [])]
        named = [each for each in told if " hook " in each]
        assert named
        phase = "forward_pre" if case == "its input" else "forward"
        for each in named:
            assert f"{phase} hook `" in each
            assert guilty in each
            assert "` of `0` (Identity)" in each
        assert "at 0x" not in "".join(named)


def test_each_of_many_is_told_its_own_error() -> None:
    """Hooks of many members that run as one fail one by one, by name."""
    model = nn.Sequential(nn.Identity())
    plans = [
        fh.Plan(fh.keep("0", label=f"k{number}", output_index=9)).prepare(model)
        for number in range(3)
    ]
    requests = [plan.open() for plan in plans]
    with fh.batch({each: number for number, each in enumerate(requests)}, size=6):
        model(torch.ones(6, 4)[None].expand(6, 6, 4))
    errors = [each.error for each in requests]
    assert len({id(error) for error in errors}) == len(requests)
    for number, error in enumerate(errors):
        assert f"k{number}:0" in str(error)
        assert error is not None
        assert len(error.__notes__) == 1
    for plan in plans:
        plan.close()


def test_negative_lengths_are_refused(model: nn.Module) -> None:
    with fh.Plan(fh.keep("0")).prepare(model) as prepared:
        request = prepared.open()
        with pytest.raises(fh.errors.RowsError, match="0 or more, got -3"):
            fh.batch({request: slice(0, 4)}, positions=torch.arange(4), lengths={request: -3})

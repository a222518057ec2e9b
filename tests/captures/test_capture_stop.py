"""Captures that end the forward, and modules that never ran."""

from __future__ import annotations

import contextvars
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ferrohook as fh
from support.capture import assert_plain

# stop


class Guarded(nn.Module):
    """Model code that catches errors, and code that must run at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.third = nn.Linear(3, 3)
        self.ended = 0
        self.caught = 0

    def forward(self, x: Tensor) -> Tensor:
        try:
            return self.third(self.second(self.first(x)))
        except Exception:
            self.caught += 1
            raise
        finally:
            self.ended += 1


@pytest.mark.parametrize("wrapped", [False, True])
def test_stop_ends_the_forward_after_the_last_selected_module(x: Tensor, wrapped: bool) -> None:
    plain = Guarded()
    model: Any = fh.HookedModule(plain) if wrapped else plain
    with fh.register(model, "third", lambda *_: pytest.fail("it ran")) as group:
        with fh.capture(model, ["second", "first"], stop=True) as acts:
            assert model(x) is fh.STOPPED
        group.disable()
    assert torch.equal(acts["second"], plain.second(plain.first(x)))
    assert (plain.ended, plain.caught) == (1, 0)
    assert repr(fh.STOPPED) == str(fh.STOPPED) == "ferrohook.STOPPED"
    assert isinstance(model(x), Tensor)


def test_stop_with_the_model_itself_selected(model: nn.Sequential, x: Tensor) -> None:
    with fh.capture(model, stop=True) as acts:
        assert model(x) is fh.STOPPED
    assert torch.equal(acts[""], model(x))
    with fh.capture(model, "", inputs=True, stop=True) as acts:
        assert model(x) is fh.STOPPED
    assert acts[""] is x


def test_stop_leaves_the_context_managers_of_the_forward(x: Tensor) -> None:
    class NoGrad(Guarded):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                return super().forward(x)

    model = NoGrad()
    with fh.capture(model, "first", stop=True):
        model(x)
    assert torch.is_grad_enabled()


def test_stop_runs_always_call_hooks_of_enclosing_modules(x: Tensor) -> None:
    model = Guarded()
    seen: list[Any] = []
    with (
        fh.register(model, "", lambda *it: seen.append(it[-1]), always_call=True),
        fh.capture(model, "first", stop=True),
    ):
        assert model(x) is fh.STOPPED
    assert seen == [None]


def test_a_forward_without_one_selected_module_runs_to_its_end(
    model: nn.Sequential, x: Tensor
) -> None:
    first = nn.Sequential(*model[:2])
    first.unused = nn.Identity()
    first.forward = lambda x: first[1](first[0](x))  # type: ignore[method-assign]
    with (
        pytest.warns(fh.errors.NeverFiredWarning, match="'unused'"),
        fh.capture(first, ["0", "unused"], stop=True),
    ):
        assert isinstance(first(x), Tensor)


def test_nested_captures_stop_their_own_models(x: Tensor) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), nn.Identity())
    with fh.capture(model, ["0.0", ""], calls="all") as outer:
        with fh.capture(model[0], "0", stop=True) as inner:
            assert model[0](x) is fh.STOPPED
        assert isinstance(model(x), Tensor)
        with fh.capture(model, "0.0", stop=True):
            assert model(x) is fh.STOPPED
    assert [len(outer["0.0"]), len(outer[""])] == [3, 1]
    assert torch.equal(inner["0"], outer["0.0"][0])


def test_stop_restarts_its_count_in_each_call(model: nn.Sequential, x: Tensor) -> None:
    with fh.capture(model, ["0", "1"], stop=True, calls="all") as acts:
        for _ in range(3):
            assert model(x) is fh.STOPPED
    assert [len(calls) for calls in acts.values()] == [3, 3]


def test_a_submodule_called_directly_is_not_stopped(model: nn.Sequential, x: Tensor) -> None:
    with fh.capture(model, "0", stop=True) as acts:
        try:
            out = model[0](x)
        except BaseException as error:  # noqa: BLE001 (the stop exception is a BaseException)
            pytest.fail(repr(error))
    assert torch.equal(acts["0"], out)


def test_modules_run_on_worker_threads_count_for_stop(x: Tensor) -> None:
    class Forking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.helped, self.own, self.last = (nn.Linear(3, 3) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            context = contextvars.copy_context()
            with ThreadPoolExecutor(1) as pool:
                helped = pool.submit(context.run, self.helped, x).result()
            return self.last(self.own(x) + helped)  # type: ignore[no-any-return]

    model = Forking()
    with fh.capture(model, ["helped", "own"], stop=True, calls="all") as acts:
        assert model(x) is fh.STOPPED
        assert model(x) is fh.STOPPED
    assert [len(calls) for calls in acts.values()] == [2, 2]


def test_a_module_on_a_worker_thread_ends_no_call_of_others(x: Tensor) -> None:
    begun, helped = Event(), Event()

    class Forking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.helped, self.own = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor, *, share: bool) -> Tensor:
            if not share:
                begun.set()
                assert helped.wait(10)
                return self.helped(self.own(x))  # type: ignore[no-any-return]
            assert begun.wait(10)
            context = contextvars.copy_context()
            with ThreadPoolExecutor(1) as pool:
                y = pool.submit(context.run, self.helped, x).result()
            helped.set()
            return self.own(y)  # type: ignore[no-any-return]

    model = Forking()
    with (
        fh.capture(model, ["helped", "own"], stop=True, calls="all") as acts,
        ThreadPoolExecutor(2) as pool,
    ):
        calls = [
            pool.submit(contextvars.copy_context().run, partial(model, x, share=share))
            for share in (True, False)
        ]
        for call in calls:
            call.result()
    assert [len(values) for values in acts.values()] == [2, 2]


# Modules that never ran


def test_modules_that_never_ran_are_reported(model: nn.Sequential, x: Tensor) -> None:
    with (
        pytest.warns(
            fh.errors.NeverFiredWarning, match=r"^'1', '2' were selected and never ran"
        ) as told,
        fh.capture(model, ["0", "1", "2"]) as acts,
    ):
        model[0](x)
    assert told[0].filename == __file__
    assert list(acts) == ["0"]
    with pytest.raises(fh.SelectionError, match=r"'1' never ran .*: '0'$"):
        acts["1"]
    with pytest.raises(fh.SelectionError, match=r"'nope' was not selected .*: '0'$"):
        acts["nope"]


def test_the_warning_names_a_direct_call_of_forward(x: Tensor) -> None:
    class Direct(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer.forward(x)

    model = Direct()
    reason = r"Direct\.forward calls its forward directly"
    with pytest.warns(fh.errors.NeverFiredWarning, match=reason), fh.capture(model, "layer"):
        model(x)


def test_the_warning_does_not_hide_an_exception(model: nn.Sequential) -> None:
    with pytest.raises(ZeroDivisionError), fh.capture(model):
        raise ZeroDivisionError
    assert_plain(model)


def test_the_warning_raised_as_an_error_leaves_nothing_behind(model: nn.Sequential) -> None:
    with pytest.raises(fh.errors.NeverFiredWarning), fh.capture(model):
        pass
    assert_plain(model)

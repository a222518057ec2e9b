"""Instrumented models: transparency, counting and restoring."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import ferrohook as fh
from support import wrapping
from support.instrumentation import Log, call, logging, same, small, state_of, x
from support.internals import is_instrumented
from support.interpreters import assert_ends_well, run_with_torch

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CASES = wrapping.CASES | {
    "encoder": (lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.0), lambda: (x(),)),
    "ModuleDict": (lambda: nn.ModuleDict({"a": nn.ReLU()}), lambda: ()),
}
del CASES["lazy"]  # changes its class at its first call


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> wrapping.Case:
    make, arguments = CASES[request.param]
    return make(), arguments()


# Transparency


def test_the_result_of_instrument_names_the_model() -> None:
    model = nn.Sequential(nn.Identity())
    instrumented = fh.instrument(model)
    assert repr(instrumented) == "<Instrumentation of Sequential, active>"
    instrumented.restore()
    assert repr(instrumented) == "<Instrumentation of Sequential, restored>"
    assert repr(copy.deepcopy(instrumented)).startswith("<Instrumentation of a model that is gone")
    del model
    gc.collect()
    assert repr(instrumented) == "<Instrumentation of a model that is gone, restored>"


def test_an_instrumented_model_looks_like_the_plain_one(case: wrapping.Case) -> None:
    model, arguments = case
    plain = copy.deepcopy(model)
    expected = call(plain, arguments)
    attributes = {name: list(vars(each)) for name, each in model.named_modules()}
    with fh.instrument(model):
        assert all(is_instrumented(each) for each in model.modules())
        assert same(call(model, arguments), expected)
        for (name, ours), (same_name, theirs) in zip(
            model.named_modules(), plain.named_modules(), strict=True
        ):
            assert name == same_name
            assert isinstance(ours, type(theirs))
            assert ours.__class__ is type(theirs)
            for attribute in ("__name__", "__qualname__", "__module__", "__doc__"):
                assert getattr(type(ours), attribute) == getattr(type(theirs), attribute)
            assert [key for key in vars(ours) if "ferrohook" not in key] == attributes[name]
        assert repr(model) == repr(plain)
        assert list(model.state_dict()) == list(plain.state_dict())
        assert model.state_dict()._metadata == plain.state_dict()._metadata  # type: ignore[attr-defined]
        assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
        assert [n for n, _ in model.named_buffers()] == [n for n, _ in plain.named_buffers()]
        assert model.double() is model
        assert all(p.dtype == torch.float64 for p in model.parameters())
        assert model.float().eval() is model
        assert not any(each.training for each in model.modules())


def test_a_call_without_hooks_returns_the_module_s_own_object() -> None:
    with fh.instrument(identity := nn.Identity()):
        result = object()
        assert identity(result) is result


def test_restore_restores_class_attributes_and_torch_s_hooks(case: wrapping.Case) -> None:
    model, arguments = case
    for each in model.modules():
        each.register_forward_hook(lambda *_: None)
        each.register_full_backward_pre_hook(lambda *_: None)
    before = state_of(model)
    fh.instrument(model)
    for each in model.modules():
        each.register_forward_hook(lambda *_: None)
        each.register_forward_pre_hook(lambda *_: None)
    call(model, arguments)
    fh.restore(model)
    assert state_of(model) == before


def test_attributes_set_while_instrumented_keep_their_order() -> None:
    linear = nn.Linear(4, 4)
    before = list(vars(linear))
    linear.old = 1
    with fh.instrument(linear):
        linear.new = 2
        behind = nn.Module.register_forward_hook(linear, log := lambda *_: None)
        del linear.old
    assert list(vars(linear)) == [*before, "new"]
    assert list(linear._forward_hooks.values()) == [log]
    behind.remove()
    assert not linear._forward_hooks


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickle_saves_the_plain_class(protocol: int) -> None:
    with fh.instrument(model := small()):
        model.register_forward_hook(lambda *_: None)  # a hook that cannot be pickled
        model.handle = model[0].register_forward_hook(lambda *_: None)
        loaded = pickle.loads(pickle.dumps(model, protocol))
        assert type(loaded) is nn.Sequential
        assert type(loaded[0]) is nn.Linear
        assert list(vars(loaded[0])) == list(vars(nn.Linear(4, 4)))
        assert loaded.handle.removed
        assert torch.equal(loaded(x()), model(x()))


def test_a_saved_instrumented_model_loads_without_ferrohook(tmp_path: Path) -> None:
    with fh.instrument(model := small()):
        model.register_forward_hook(lambda *_: None)
        (tmp_path / "pickled").write_bytes(pickle.dumps(model))
        (tmp_path / "attributes").write_bytes(pickle.dumps(vars(model)))
        torch.save(model, tmp_path / "saved")
    program = f"""
import pickle
sys.modules.update(dict.fromkeys([name for name in sys.modules if "ferrohook" in name]))
folder = {str(tmp_path)!r}
vars_ = pickle.load(open(folder + "/attributes", "rb"))
assert vars_["_modules"]["first"].weight.shape == (4, 4)
for model in (
    pickle.load(open(folder + "/pickled", "rb")),
    torch.load(folder + "/saved", weights_only=False),
):
    assert type(model) is torch.nn.Sequential and type(model[0]) is torch.nn.Linear
    assert model(torch.ones(4)).shape == (4,)
    assert not any("ferrohook" in key for each in model.modules() for key in vars(each))
"""
    assert_ends_well(run_with_torch(program))


class StateInAList(nn.Linear):
    """A class with a custom state: its `__dict__` as a list."""

    def __getstate__(self) -> Any:
        return [self.__dict__.copy()]

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state[0])


class Rebuilt(nn.Linear):
    """A class with a custom `__reduce__`: constructor arguments and parameters."""

    def __reduce__(self) -> Any:
        return type(self), (self.in_features, self.out_features), {"_parameters": self._parameters}


@pytest.mark.parametrize("cls", [StateInAList, Rebuilt])
def test_custom_pickling_and_copying_still_work(cls: type[nn.Linear]) -> None:
    with fh.instrument(model := cls(4, 4)):
        handle = model.register_forward_hook(lambda _module, _args, output: output + 1)
        loaded = pickle.loads(pickle.dumps(model))
        assert type(loaded) is cls
        assert torch.equal(loaded(x()) + 1, model(x()))
        duplicate = copy.deepcopy(model)
        assert torch.equal(duplicate(x()), model(x()))
        handle.remove()
        assert torch.equal(duplicate(x()), model(x()) + 1)
        fh.restore(duplicate)
        assert type(duplicate) is cls
    # The saved state has no dispatcher: the loaded model instruments and restores like a plain one.
    with fh.instrument(loaded):
        assert torch.equal(loaded(x()), model(x()))
    assert not is_instrumented(loaded)


# Counting


def test_nested_and_repeated_instrumenting_is_counted() -> None:
    model = small()
    before = state_of(model)
    with fh.instrument(model):
        outer = model.first.register_forward_hook(logging(log := [], "outer"))
        with fh.instrument(model, "first"), fh.instrument(model.first):
            model.first.register_forward_hook(logging(log, "inner"))
        model(x())
        assert log == ["outer", "inner"]
        again = fh.instrument(model, "second")
        again.restore()
        again.restore()
        assert is_instrumented(model.second)
    assert state_of(model) == before
    model(x())
    assert log == ["outer", "inner"]
    assert outer.removed
    fh.instrument(model, "first")
    fh.instrument(model, "second")
    fh.restore(model)
    assert [is_instrumented(each) for each in model.modules()] == [False, True, False]
    fh.restore(model)
    assert state_of(model) == before


def test_restoring_twice_raises_and_changes_nothing() -> None:
    model = small()
    first, _second = fh.instrument(model), fh.instrument(model)
    first.restore()
    fh.restore(model)
    assert not is_instrumented(model)
    with pytest.raises(fh.HookError):
        fh.restore(model)
    with first:
        pass
    assert not is_instrumented(model)


@pytest.mark.parametrize("wrong", [small, lambda: 3, lambda: nn.Linear])
def test_restore_without_instrument_is_an_error(wrong: Callable[[], Any]) -> None:
    with pytest.raises(fh.HookError, match="is not instrumented"):
        fh.restore(wrong())


def test_restoring_a_submodule_of_an_instrumented_model_is_an_error() -> None:
    with fh.instrument(model := small()):
        with pytest.raises(fh.HookError, match="this Linear is not instrumented"):
            fh.restore(model.first)
        assert is_instrumented(model.first)


@pytest.mark.parametrize("wrong", [3, None, nn.Linear, "model"])
def test_only_modules_are_instrumented(wrong: Any) -> None:
    with pytest.raises(fh.HookTypeError, match=r"instance of nn\.Module"):
        fh.instrument(wrong)


def test_an_unknown_name_instruments_nothing() -> None:
    model = small()
    with pytest.raises(fh.SelectionError, match="first"):
        fh.instrument(model, ["second", "frist"])
    assert not any(is_instrumented(each) for each in model.modules())


def test_modules_added_and_removed_while_instrumented() -> None:
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    with fh.instrument(model):
        model.append(added := nn.Linear(4, 4))
        taken, dropped = model[0], weakref.ref(model[1])
        del model[:2]
        gc.collect()
        assert dropped() is None
        assert [each is added for each in model] == [True]
        assert not is_instrumented(added)
        assert is_instrumented(taken)
    assert type(taken) is nn.Linear
    assert not any(is_instrumented(each) for each in model.modules())


def test_a_hook_of_pytorch_s_methods_outlasts_a_capture() -> None:
    model = small()
    log: Log = []
    with fh.capture(model, "first"), fh.register(model, "first", lambda *_: None) as group:
        handle = model.first.register_forward_hook(logging(log, "theirs"))
        model(x())
        group.remove()
        model(x())
    model(x())
    assert log == ["theirs"] * 3
    handle.remove()
    model(x())
    assert log == ["theirs"] * 3
    with fh.capture(model, "first"):
        with fh.instrument(model):
            ours = model.first.register_forward_hook(lambda *_: None, priority=3)
            model(x())
        assert ours.calls == 1
    assert ours.removed


# Errors


def test_the_note_of_an_exception_names_hook_phase_and_module() -> None:
    def my_hook(*_: Any) -> None:
        msg = "broken"
        raise ValueError(msg)

    with fh.instrument(model := small()):
        for name, phase in (("forward_pre", "forward_pre"), ("forward", "forward")):
            with getattr(model.first, f"register_{name}_hook")(my_hook):
                with pytest.raises(ValueError, match="broken") as caught:
                    model(x())
                (note,) = caught.value.__notes__
                for part in ("my_hook", phase, "Linear", __file__):
                    assert part in note
        model(x())
        model.first.register_full_backward_hook(my_hook)
        with pytest.raises(ValueError, match="broken") as caught:
            model(x().requires_grad_()).sum().backward()
        assert "backward" in caught.value.__notes__[0]


def test_always_call_hooks_run_for_every_exception() -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with fh.instrument(model := small()):
        log: Log = []
        model.register_forward_hook(logging(log, "outer"), always_call=True)
        model.first.register_forward_hook(interrupt)
        model.first.register_forward_hook(logging(log, "skipped"))
        model.first.register_forward_hook(logging(log, "inner"), always_call=True)
        with pytest.raises(KeyboardInterrupt):
            model(x())
        assert log == ["inner", "outer"]


def test_refused_hooks_leave_nothing_behind() -> None:
    with fh.instrument(linear := nn.Linear(4, 4)):
        for wrong in (3, None, "hook"):
            with pytest.raises(fh.HookTypeError):
                linear.register_forward_hook(wrong)  # type: ignore[arg-type]
        with pytest.raises(fh.HookTypeError):
            linear.register_forward_hook(fh.ForwardPreHook(lambda value: value))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="on_error"):
            linear.register_forward_hook(print, on_error="sometimes")  # type: ignore[call-arg]
        with pytest.raises(TypeError, match="unexpected"):
            linear.register_forward_hook(print, sometimes=True)  # type: ignore[call-arg]
        value = x()
        assert torch.equal(linear(value), linear.forward(value))


def test_typed_hooks_and_ferrohook_s_options() -> None:
    with fh.instrument(linear := nn.Linear(4, 4)):
        log: Log = []
        linear.register_forward_pre_hook(fh.ForwardPreHook(lambda value: value + 1))  # type: ignore[arg-type]
        linear.register_forward_hook(logging(log, "low"), priority=-1)  # type: ignore[call-arg]
        linear.register_forward_hook(logging(log, "high"), priority=1)  # type: ignore[call-arg]
        with fh.scope() as scope:
            linear.register_forward_hook(logging(log, "scoped"), scope=scope)  # type: ignore[call-arg]
            linear(x())
        linear(x())
        assert log == ["high", "scoped", "low", "high", "low"]


# Wrappers and instrumented modules


def test_a_wrapper_around_an_instrumented_module() -> None:
    linear = nn.Linear(4, 4)
    log: Log = []
    with fh.instrument(linear):
        linear.register_forward_hook(logging(log, "inside"))
        hooked = fh.HookedModule(linear)
        hooked.register_forward_hook(logging(log, "around"))
        hooked(x())
        assert log == ["inside", "around"]
        assert isinstance(hooked, nn.Linear)
        copy.deepcopy(hooked)(x())
        assert log == ["inside", "around"] * 2
        assert type(pickle.loads(pickle.dumps(hooked)).inner) is nn.Linear
        with fh.instrument(hooked):
            hooked(x())
    assert type(linear) is nn.Linear
    hooked(x())
    assert log == ["inside", "around"] * 3 + ["around"]


def test_a_wrapper_in_an_instrumented_model() -> None:
    hooked = fh.HookedModule(nn.Linear(4, 4))
    model = nn.Sequential(hooked, nn.ReLU())
    kept = hooked.register_forward_hook(lambda *_: None)
    with fh.instrument(model):
        assert isinstance(model[0], fh.HookedModule)
        model.register_forward_hook(outer := logging([], "outer"))
        hooked.register_forward_hook(outer)
        model(x())
        assert kept.calls == 1
    assert [row.hook for row in hooked.hooks()] == [row.hook for row in hooked.hooks()][:2]
    model(x())
    assert kept.calls == 2
    assert not kept.removed
    assert type(model) is nn.Sequential

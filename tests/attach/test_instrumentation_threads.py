"""Instrumenting in threads, and lifetimes of instrumented models."""

from __future__ import annotations

import copy
import gc
import pickle
import sysconfig
import threading
import weakref
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import ferrohook as fh
from support.instrumentation import Log, hook_dicts, logging, small, state_of, x
from support.internals import is_instrumented
from support.interpreters import assert_ends_well, run_with_torch
from support.threads import in_threads, repeating

if TYPE_CHECKING:
    from collections.abc import Iterator

# Threads


def failures_of_one_round(model: Any, expected: Tensor) -> Iterator[str]:
    """Registers a hook, calls, removes the hook and calls again; yields failed checks."""
    fired: Log = []
    thread = threading.get_ident()
    handle = model.first.register_forward_hook(
        lambda *_: fired.append(1) if threading.get_ident() == thread else None
    )
    theirs = None
    # Without a GIL, PyTorch's own call of a restored module fails if a hook is registered while it
    # iterates over its hook dict.
    if not sysconfig.get_config_var("Py_GIL_DISABLED"):
        theirs = nn.Module.register_forward_hook(model.second, lambda *_: None)
    if not torch.equal(model(x()), expected):
        yield "output"
    if len(fired) != 1 or handle.removed:
        yield "hook"
    handle.remove()
    if theirs is not None:
        theirs.remove()
    model(x())
    if len(fired) != 1:
        yield "removal"


@pytest.mark.usefixtures("switch_often")
def test_threads_instrument_register_and_restore_one_model_while_others_call() -> None:
    model = small()
    before = state_of(model)
    expected = model(x())
    lost: Log = []

    def call_on() -> None:
        if not torch.equal(model(x()), expected):
            lost.append("output")

    def act(number: int) -> None:
        for step in range(150):
            select = (None, "first", ["second", "first"], nn.Linear)[(number + step) % 4]
            with fh.instrument(model, select):
                lost.extend(failures_of_one_round(model, expected))

    with repeating(call_on, threads=2):
        in_threads(4, act)
    assert lost == []
    assert state_of(model) == before


@pytest.mark.usefixtures("switch_often")
@pytest.mark.parametrize(
    "hooked",
    [lambda module: (fh.instrument(module), module)[1], fh.HookedModule],
    ids=["instrument", "HookedModule"],
)
def test_threads_share_the_generated_class_of_a_plain_one(hooked: Any) -> None:
    for _ in range(1000):
        plain = type("Plain", (nn.Module,), {"forward": lambda _self, x: x})
        made = in_threads(4, lambda _, plain=plain: hooked(plain()))
        assert len({id(type(each)) for each in made}) == 1
        assert all(isinstance(each, type(made[0])) for each in made)


def test_threads_that_change_classes_leave_the_garbage_collector_as_it_is() -> None:
    # In a separate process, as audit hooks stay. CPython calls them for each change of class.
    code = """
import gc
gc.disable()  # as this thread left it
model = nn.Sequential(nn.Linear(2, 2))
fh.instrument  # its import changes a class
off = []

def look(event, arguments):
    if event == "object.__setattr__" and arguments[1] == "__class__":
        off.append(gc.isenabled())

sys.addaudithook(look)
for enabled in (True, False):
    (gc.enable if enabled else gc.disable)()
    with fh.instrument(model):
        pass
    assert gc.isenabled() is enabled
assert off == [True] * 4 + [False] * 4, off
"""
    assert_ends_well(run_with_torch(code))


def test_threads_change_the_class_of_a_module_one_after_the_other() -> None:
    # In a separate process, as audit hooks stay. CPython calls them for each change of class.
    code = """
import threading
import time
module = nn.Linear(2, 2)
inside, most = [], []

def look(event, arguments):
    if event == "object.__setattr__" and arguments[0] is module and arguments[1] == "__class__":
        inside.append(event)
        most.append(len(inside))
        time.sleep(0.001)
        inside.pop()

def change():
    for _ in range(50):
        with fh.instrument(module):
            pass

sys.addaudithook(look)
threads = [threading.Thread(target=change) for _ in range(4)]
for each in threads:
    each.start()
for each in threads:
    each.join()
assert set(most) == {1}, most
"""
    assert_ends_well(run_with_torch(code))


@pytest.mark.usefixtures("switch_often")
def test_each_restore_of_concurrent_threads_undoes_one_instrument() -> None:
    model = small()
    before = state_of(model)

    def act(_number: int) -> None:
        for _ in range(300):
            fh.instrument(model)
            fh.restore(model)

    in_threads(4, act)
    assert state_of(model) == before
    with pytest.raises(fh.HookError):
        fh.restore(model)


@pytest.mark.usefixtures("switch_often")
def test_a_hook_of_pytorch_s_methods_survives_captures_of_other_threads() -> None:
    model = small()
    expected = model(x())

    def act(number: int) -> None:
        for _ in range(150):
            if number:
                with fh.capture(model, "first") as acts:
                    model(x())
                assert acts["first"].shape == (2, 3, 4)
                assert type(pickle.loads(pickle.dumps(model.second))) is nn.ReLU
                assert torch.equal(copy.copy(model.second)(expected), expected)
                continue
            fired: Log = []
            handle = model.first.register_forward_hook(lambda *_, to=fired: to.append(1))
            model(x())
            assert fired
            handle.remove()
            count = len(fired)
            model.first(x())
            assert len(fired) <= count + 2 * 3  # at most the in-flight calls fire it

    in_threads(4, act)
    assert not any(is_instrumented(each) for each in model.modules())
    assert not any(hook_dicts(each) for each in model.modules())


@pytest.mark.skipif(
    bool(sysconfig.get_config_var("Py_GIL_DISABLED")),
    reason="without a GIL, CPython 3.13's OrderedDict cannot be read while another thread writes",
)
def test_torch_s_hooks_keep_their_order_while_another_thread_changes_them() -> None:
    log: Log = []
    model = nn.Identity()
    for name in ("second", "first"):
        model.register_forward_hook(logging(log, name), prepend=True)

    def change() -> None:
        ahead = model.register_forward_hook(lambda *_: None, prepend=True)
        behind = nn.Module.register_forward_hook(model, lambda *_: None)
        ahead.remove()
        behind.remove()

    with fh.register(model, "", lambda *_: None), repeating(change):
        for _ in range(2000):
            model(None)
    assert log == ["first", "second"] * 2000


# Lifetimes


@pytest.mark.frees_classes
def test_instrumenting_leaves_nothing_behind() -> None:
    class Mine(nn.Linear):  # torch.jit keeps the classes that it has seen
        pass

    model = nn.Sequential(OrderedDict(first=Mine(4, 4), second=nn.ReLU()))
    before = state_of(model)
    made: Log = []

    def cycle() -> None:
        with fh.instrument(model):
            made.append(weakref.ref(type(model.first)))
            model.first.register_forward_hook(lambda *_, me=model: me)
            copy.copy(model.first)
        if len(made) > 100:
            del made[:50]

    for _ in range(1000):
        cycle()
    gc.collect()
    count = len(gc.get_objects())
    for _ in range(9000):
        cycle()
    gc.collect()
    assert len(gc.get_objects()) < count + 200
    assert not any(cls() for cls in made)
    assert state_of(model) == before


@pytest.mark.frees_classes
def test_models_and_their_classes_are_collected() -> None:
    class Mine(nn.Linear):
        pass

    model, cls = Mine(4, 4), weakref.ref(Mine)
    del Mine
    hook = lambda *_, me=model: me  # noqa: E731 (a cycle through the hook)
    fh.instrument(model)
    model.register_forward_hook(hook)
    duplicate = copy.deepcopy(model)
    model(x())
    references = [weakref.ref(each) for each in (model, duplicate, hook, type(model))]
    del model, hook, duplicate
    gc.collect()
    assert not any(reference() for reference in references)
    assert cls() is None


def test_the_context_manager_does_not_keep_the_model() -> None:
    model = small()
    reference = weakref.ref(model)
    undo = fh.instrument(model)
    del model
    gc.collect()
    assert reference() is None
    undo.restore()

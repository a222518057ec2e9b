"""Wrappers, nested, unwrapped, copied and saved."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ferrohook as fh
from support.wrapping import Case, same, x


def test_nested_wrappers_fire_from_the_outside_in(case: Case) -> None:
    module, arguments = case
    module(*arguments)
    expected = copy.deepcopy(module)(*arguments)
    inside = fh.HookedModule(module)
    outside = fh.HookedModule(inside)
    order: list[str] = []
    for name, hooked in (("in", inside), ("out", outside)):
        hooked.register_forward_pre_hook(lambda *_, name=name: order.append(f"pre {name}"))
        hooked.register_forward_hook(lambda *_, name=name: order.append(f"post {name}"))
    assert same(outside(*arguments), expected)
    assert order == ["pre out", "pre in", "post in", "post out"]
    assert list(outside.state_dict()) == list(module.state_dict())
    assert outside.inner.inner is module
    assert "HookedModule" in repr(outside)


def test_into_inner_returns_the_original_module(case: Case) -> None:
    module, arguments = case
    hooked = fh.HookedModule(module)
    handle = hooked.register_forward_hook(lambda *_: pytest.fail("fired"))
    assert hooked.into_inner() is module
    assert handle.removed
    module(*arguments)
    for use in (
        lambda: hooked(*arguments),
        lambda: hooked.forward(*arguments),
        lambda: hooked.inner,
        lambda: hooked.weight,
        hooked.into_inner,
        lambda: hooked.register_forward_hook(print),
        lambda: hooked.register_full_backward_pre_hook(print),
        hooked.state_dict,
    ):
        with pytest.raises(fh.HookError, match="into_inner"):
            use()
    assert repr(hooked) == "HookedModule(<given back>)"
    assert hooked.hooks() == []
    fh.HookedModule(module)(*arguments)


def test_deepcopy_copies_module_and_hooks_and_handles_act_on_the_original(case: Case) -> None:
    module, arguments = case
    module(*arguments)
    hooked = fh.HookedModule(module)
    fired: list[Any] = []
    first = hooked.register_forward_hook(lambda m, *_: fired.append(m))
    hooked.register_forward_hook(lambda m, *_: fired.append("low"), priority=-1)
    hooked.register_forward_hook(lambda m, *_: fired.append("off")).disable()
    duplicate = copy.deepcopy(hooked)
    assert [(h.phase, h.hook, h.priority, h.enabled) for h in duplicate.hooks()] == [
        (h.phase, h.hook, h.priority, h.enabled) for h in hooked.hooks()
    ]
    assert not {h.id for h in duplicate.hooks()} & {h.id for h in hooked.hooks()}
    assert same(duplicate(*arguments), hooked(*arguments))
    assert fired == [duplicate, "low", hooked, "low"]
    first.remove()
    duplicate(*arguments)
    assert fired[4:] == [duplicate, "low"]
    for one, other in zip(duplicate.parameters(), hooked.parameters(), strict=True):
        assert one is not other
        assert torch.equal(one, other)


class Counting(nn.Module):
    count = 0

    def forward(self, value: Tensor) -> Tensor:
        return value

    def hook(self, *_: Any) -> None:
        self.count += 1


@pytest.mark.parametrize("instrumented", [False, True])
def test_deepcopy_rebinds_hooks_that_are_methods_of_the_module(instrumented: bool) -> None:
    counting = Counting()
    module: Any = counting if instrumented else fh.HookedModule(counting)
    with fh.instrument(counting) if instrumented else contextlib.nullcontext():
        module.register_forward_hook(counting.hook)
        duplicate = copy.deepcopy(module)
        duplicate(x())
    assert (counting.count, duplicate.count) == (0, 1)


def test_a_copy_preserves_a_subclass_of_the_wrapper() -> None:
    class Named(fh.HookedModule[nn.Linear]):
        pass

    outer = Named(fh.HookedModule(nn.Linear(4, 2)))
    assert isinstance(outer, Named)
    assert isinstance(outer, nn.Linear)
    assert not isinstance(fh.HookedModule(outer).inner.inner, Named)
    assert type(copy.deepcopy(outer)) is type(outer)
    assert outer(x()).shape == (2, 3, 2)


class Counted(fh.HookedModule[nn.Linear]):
    def __init__(self, module: nn.Linear, limit: int = 100) -> None:
        super().__init__(module)
        self.seen, self.limit = 0, limit
        self.register_forward_pre_hook(self.count)

    def count(self, _module: nn.Module, args: tuple[Tensor]) -> None:
        self.seen += len(args[0])


def test_a_pickle_has_the_attributes_of_a_subclass_and_init_its_hooks() -> None:
    counted = Counted(nn.Linear(4, 2), limit=3)
    counted(torch.ones(5, 4))
    for other in (pickle.loads(pickle.dumps(counted)), copy.deepcopy(counted)):
        assert isinstance(other, Counted)
        assert (other.seen, other.limit, len(other.hooks())) == (5, 3, 1)
        other(torch.ones(2, 4))
        assert (other.seen, counted.seen) == (7, 5)
        assert torch.equal(other.weight, counted.weight)


def test_a_subclass_that_could_not_be_unpickled_is_refused() -> None:
    class Limited(fh.HookedModule[nn.Linear]):
        def __init__(self, module: nn.Linear, limit: int) -> None:
            super().__init__(module)
            self.limit = limit

    with pytest.raises(
        pickle.PicklingError, match=r"only the module: missing a required argument: 'limit'\."
    ):
        pickle.dumps(Limited(nn.Linear(4, 2), 3))


def test_a_subclass_whose_forward_would_never_run_is_refused() -> None:
    with pytest.raises(
        fh.HookTypeError, match=r"Doubled\.forward would never run: a HookedModule "
    ):

        class Doubled(fh.HookedModule[nn.Linear]):
            def forward(self, value: Tensor) -> Tensor:  # type: ignore[override]
                return 2 * self.inner(value)

    class Own(nn.Linear):
        def forward(self, value: Tensor) -> Tensor:
            return 2 * super().forward(value)

    plain = Own(4, 2)  # the wrapper's class inherits from it
    assert torch.equal(fh.HookedModule(plain)(x()), plain(x()))


@pytest.mark.parametrize("through", ["pickle", "torch.save"])
def test_saving_never_fails_because_of_a_hook(case: Case, through: str) -> None:
    module, arguments = case
    module(*arguments)
    hooked = fh.HookedModule(module)
    # Neither hook can be pickled: hooks are run-time state.
    hooked.register_forward_hook(lambda *_: None)
    module.handle = hooked.register_full_backward_hook(fh.BackwardHook(lambda *_: None))
    if through == "pickle":
        restored = pickle.loads(pickle.dumps(hooked))
    else:
        file = io.BytesIO()
        torch.save(hooked, file)
        file.seek(0)
        restored = torch.load(file, weights_only=False)
    assert isinstance(restored, fh.HookedModule)
    assert restored.hooks() == []
    assert restored.handle.removed
    assert same(restored(*arguments), hooked(*arguments))


@pytest.mark.parametrize("first", ["wrapper", "module"])
def test_a_module_that_refers_to_its_wrapper_is_saved_and_loaded(first: str) -> None:
    hooked: Any = fh.HookedModule(nn.Sequential(nn.Linear(4, 4)))
    vars(hooked[0])["owner"] = hooked
    saved = pickle.dumps(hooked if first == "wrapper" else hooked.inner)
    restored = pickle.loads(saved)
    owner = restored[0].owner
    assert owner is restored if first == "wrapper" else owner.inner is restored
    assert isinstance(owner, fh.HookedModule)
    assert isinstance(owner, nn.Sequential)
    assert torch.equal(owner(x()), hooked(x()))


def test_a_shallow_copy_copies_the_module_shallowly() -> None:
    hooked = fh.HookedModule(nn.Linear(4, 4))
    handle = hooked.register_forward_hook(lambda *_: None)
    duplicate = copy.copy(hooked)
    duplicate.training = False
    assert hooked.training
    assert duplicate.weight is hooked.weight
    duplicate(x())
    assert handle.calls == 1
    duplicate.into_inner()
    hooked(x())
    assert handle.calls == 2

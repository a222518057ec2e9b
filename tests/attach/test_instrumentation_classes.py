"""Instrumenting classes of every kind."""

from __future__ import annotations

import abc
import copy
import dataclasses
import pickle
from typing import Any, Generic, TypeVar
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import ferrohook as fh
from support.instrumentation import Log, Slotted, logging, x

T = TypeVar("T")


def test_a_custom_getattr_still_works() -> None:
    class Anything(nn.Linear):
        def __getattr__(self, name: str) -> Any:
            return f"made up {name}" if name[0] != "_" else super().__getattr__(name)

    class Model(Anything):
        def __init__(self) -> None:
            nn.Module.__init__(self)

        def forward(self, value: Tensor) -> Tensor:
            return value

    model = Model()
    with fh.instrument(model):
        handle = model.register_forward_hook(lambda *_: None)
        assert model.anything == "made up anything"
        copy.deepcopy(model)(x())
        copy.copy(model)(x())
        assert handle.calls == 1
    assert type(model) is Model


def test_slots_still_work() -> None:
    model = Slotted(4, 4)
    with fh.instrument(model):
        handle = model.register_forward_hook(lambda *_: None)
        model.gain = 3.0
        model(x())
        assert handle.calls == 1
    assert type(model) is Slotted
    assert model.gain == 3.0


def test_instrumenting_runs_neither_init_subclass_nor_a_metaclass() -> None:
    known: Log = []

    class Meta(type):
        def __new__(cls, name: str, bases: Any, namespace: Any, **kwargs: Any) -> Any:
            known.append(f"new {name}")
            return super().__new__(cls, name, bases, namespace)

        def __init__(cls, name: str, bases: Any, namespace: Any, **kwargs: Any) -> None:
            known.append(f"init {name}")
            super().__init__(name, bases, namespace)

        def __init_subclass__(cls, **_: Any) -> None:
            known.append(f"derived {cls.__name__}")

    class Mine(nn.Linear, metaclass=Meta):
        def __init_subclass__(cls, **_: Any) -> None:
            msg = f"{cls.__name__} is sealed"
            raise ValueError(msg)

    model = Mine(4, 4)
    with fh.instrument(model):
        handle = model.register_forward_hook(lambda *_: None)
        model(x())
        assert handle.calls == 1
        assert isinstance(type(model), Meta)
    fh.HookedModule(model)(x())
    assert known == ["new Mine", "init Mine"]


def local_metaclass() -> type:
    class Meta(type):
        pass

    return Meta


class OfLocal(nn.ReLU, metaclass=local_metaclass()):
    """Can be imported, though its metaclass cannot."""

    class Inner(nn.ReLU, metaclass=local_metaclass()):
        pass


@pytest.mark.parametrize("cls", [OfLocal, OfLocal.Inner])
def test_a_class_whose_metaclass_cannot_be_imported_is_pickled(cls: type[nn.Module]) -> None:
    model = cls()
    assert pickle.loads(pickle.dumps(type(model))) is cls
    with fh.instrument(model):
        fh.register(model, "", lambda *_: None)
        assert pickle.loads(pickle.dumps(type(model))) is cls


def test_abstract_generic_and_data_classes() -> None:
    class Abstract(nn.Module, abc.ABC):
        @abc.abstractmethod
        def forward(self, value: Tensor) -> Tensor: ...

    class Concrete(Abstract):
        def forward(self, value: Tensor) -> Tensor:
            return value

    class Typed(Generic[T], nn.Module):  # noqa: PYI059 (an order in use)
        def forward(self, value: Tensor) -> Tensor:
            return value

    @dataclasses.dataclass(eq=True)  # eq=True removes __hash__
    class Data(nn.Module):
        size: int

        def __post_init__(self) -> None:
            super().__init__()

        def forward(self, value: Tensor) -> Tensor:
            return value

    class AbstractFirst(abc.ABC, nn.Linear):
        pass

    class SlottedToo(Generic[T], Slotted):  # noqa: PYI059
        __slots__ = ("more",)

    for model in (Concrete(), Typed[int](), Data(3), AbstractFirst(4, 4), SlottedToo[int](4, 4)):
        plain = type(model)
        with fh.instrument(model):
            handle = model.register_forward_hook(lambda *_: None)
            model(x())
            assert handle.calls == 1
            assert isinstance(model, plain)
            assert isinstance(model, type(model))
            assert not isinstance(nn.Linear(4, 4), type(model))
        assert type(model) is plain


def test_new_instances_of_an_instrumented_module_s_class_work_as_plain_ones() -> None:
    with fh.instrument(linear := nn.Linear(4, 4)):
        other = type(linear)(4, 4)
        assert isinstance(other, nn.Linear)
        other.register_forward_hook(logging(log := [], "torch"))
        other(x())
        assert log == ["torch"]
        assert type(pickle.loads(pickle.dumps(linear))) is nn.Linear
    with fh.instrument(other):
        other(x())
    assert type(other) is nn.Linear


def test_overridden_register_methods_still_run() -> None:
    class Own(nn.Linear):
        def register_forward_hook(self, hook: Any, **options: Any) -> Any:  # type: ignore[override]
            self.own = hook
            return super().register_forward_hook(hook, **options)

    with fh.instrument(own := Own(4, 4)):
        own.register_forward_hook(hook := logging(log := [], "fired"))
        own(x())
    assert own.own is hook
    own(x())
    assert log == ["fired", "fired"]


def test_a_shared_module_has_one_registry() -> None:
    shared = nn.Linear(4, 4)
    model = nn.ModuleList([shared, nn.Sequential(shared, shared)])
    with fh.instrument(model):
        handle = shared.register_forward_hook(lambda *_: None)
        model[1](x())
        model[0](x())
        assert handle.calls == 3
        assert len({id(each) for each in (shared, model[0], model[1][0])}) == 1
    assert type(shared) is nn.Linear


def test_a_module_that_contains_itself() -> None:
    class Recursive(nn.Linear):
        def forward(self, value: Tensor, depth: int = 3) -> Tensor:
            return self(value, depth - 1) if depth else super().forward(value)

    recursive = Recursive(4, 4)
    recursive.own = recursive
    with fh.instrument(recursive):
        handle = recursive.register_forward_hook(lambda *_: None)
        recursive(x())
        assert handle.calls == 4
        duplicate = copy.deepcopy(recursive)
        assert duplicate.own is duplicate
        duplicate(x())
        assert handle.calls == 4
        fh.restore(duplicate)
        with pytest.raises(RecursionError):
            recursive(x(), 100_000)
    assert type(recursive) is type(duplicate) is Recursive


def test_instances_of_the_plain_class_are_instances_of_the_made_one() -> None:
    class Narrow(nn.Linear):
        pass

    module = nn.Linear(4, 4)
    fh.instrument(module)
    made = type(module)
    assert made is not nn.Linear
    assert isinstance(pickle.loads(pickle.dumps(module)), made)
    assert isinstance(copy.deepcopy(module), made)
    assert isinstance(nn.Linear(4, 4), made)
    assert isinstance(Narrow(4, 4), made)
    assert issubclass(nn.Linear, made)
    assert issubclass(Narrow, made)
    assert issubclass(made, nn.Linear)
    assert isinstance(module, made)
    for other in nn.Bilinear(4, 4, 4), nn.Module(), 3:
        assert not isinstance(other, made)
    assert not issubclass(nn.Module, made)
    fh.restore(module)
    assert isinstance(module, made)


def test_a_subclass_of_a_made_class_has_its_own_instances_alone() -> None:
    instrumented = nn.Linear(4, 4)
    fh.instrument(instrumented)
    made: Any = type(instrumented)

    class Below(made):
        pass

    assert not isinstance(nn.Linear(4, 4), Below)
    assert not issubclass(nn.Linear, Below)
    assert not isinstance(instrumented, Below)
    assert issubclass(Below, made)
    assert issubclass(Below, nn.Linear)


@pytest.mark.parametrize("base", [object, abc.ABC])
def test_what_a_module_writes_to_its_class_is_the_plain_class_s(base: type) -> None:
    class Counting(nn.Module, base):  # type: ignore[misc]
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            type(self).calls += 1
            return x

    module = Counting()
    with fh.instrument(module):
        module(torch.ones(1))
        type(module).forward = lambda _self, x: x + 1  # type: ignore[method-assign]
        type(module).more = 1  # type: ignore[attr-defined]
        del type(module).more  # type: ignore[attr-defined]
        assert module(torch.ones(1)) == 2
    assert Counting.calls == 1
    assert module(torch.ones(1)) == 2
    assert not hasattr(Counting, "more")
    hooked = fh.HookedModule(Counting())
    type(hooked).forward = lambda _self, x: x + 2  # type: ignore[method-assign]
    assert hooked(torch.ones(1)) == 3
    with fh.instrument(module):
        del type(module).calls
    assert not hasattr(Counting, "calls")


@pytest.mark.parametrize("wrap", [False, True])
def test_virtual_subclasses_of_an_abstract_class_stay(wrap: bool) -> None:
    class Abstract(nn.Module, abc.ABC):
        pass

    class Virtual:
        pass

    Abstract.register(Virtual)
    module = _hooked(Abstract(), wrap)
    assert isinstance(Virtual(), Abstract)
    assert isinstance(module, Abstract)
    assert isinstance(module, type(module))


class _Base(nn.Module):
    def inherited(self) -> int:
        return 2


class _Scaling(_Base):
    def forward(self, x: Tensor) -> Tensor:
        return x * self.inherited()


class _Abstract(_Scaling, abc.ABC):
    pass


def _hooked(module: nn.Module, wrap: bool) -> Any:
    if wrap:
        return fh.HookedModule(module)
    fh.instrument(module)
    return module


@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize("plain", [_Scaling, _Abstract])
@pytest.mark.parametrize(
    ("name", "patches"),
    [
        ("forward", [lambda _self, x: x * 3, lambda _self, x: x * 5]),
        ("_call_impl", [lambda _self, x: x * 3, lambda _self, x: x * 5]),
        ("inherited", [lambda _self: 3, lambda _self: 5]),
    ],
)
def test_a_patch_of_a_module_s_class_is_for_all_its_modules_and_undone(
    name: str, patches: list[Any], plain: type[nn.Module], wrap: bool
) -> None:
    module, other = _hooked(plain(), wrap), plain()
    module.register_forward_hook(lambda _m, _a, output: output + 100)
    kind, before, one = type(module), dict(vars(plain)), torch.ones(1)

    def outputs() -> list[int]:
        return [int(module(one)), int(other(one))]

    with pytest.MonkeyPatch.context() as patch:
        with mock.patch.object(kind, name, patches[0]):
            assert outputs() == [103, 3]
            with mock.patch.object(kind, name, patches[1]):
                assert outputs() == [105, 5]
            assert outputs() == [103, 3]
        assert outputs() == [102, 2]
        patch.setattr(kind, name, patches[0])
        assert outputs() == [103, 3]
    assert outputs() == [102, 2]
    assert dict(vars(plain)) == before


@pytest.mark.parametrize("wrap", [False, True])
def test_patches_of_methods_that_hooks_need_are_undone(wrap: bool) -> None:
    module, before = _hooked(_Scaling(), wrap), dict(vars(_Scaling))
    for name in "compile", "register_forward_hook", "_forward_hooks", "__call__", "__repr__":
        with mock.patch.object(type(module), name, lambda _self, x=None: repr(x)):
            assert (repr(module) == "None") is (name == "__repr__")
    handle = module.register_forward_hook(lambda _m, _a, output: output + 100)
    assert module(torch.ones(1)) == 102
    assert handle.calls == 1
    assert "_Scaling" in repr(module)
    assert dict(vars(_Scaling)) == before


def test_a_dict_that_replaces_a_module_s_own_is_its_state() -> None:
    plain, module = nn.Linear(4, 4), nn.Linear(4, 4)
    hooked = fh.HookedModule(nn.Linear(4, 4))
    x = torch.randn(4)
    with fh.instrument(module):
        module.__dict__ = dict(vars(plain))
        assert torch.equal(module(x), plain(x))
    hooked.__dict__ = dict(vars(plain)) | {"size": 9}
    assert torch.equal(hooked(x), plain(x))
    assert hooked.size == 9


class _KnowsItsClass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kind: type = type(self)

    def forward(self, x: Tensor) -> Tensor:
        self.kind = type(self)
        return x


class _KnowsItsClassToo(_KnowsItsClass, abc.ABC):
    pass


@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize("plain", [_KnowsItsClass, _KnowsItsClassToo])
def test_a_class_in_the_state_is_pickled_as_the_plain_one(
    plain: type[_KnowsItsClass], wrap: bool
) -> None:
    module: Any = _hooked(plain(), wrap)
    module(torch.ones(1))
    assert pickle.loads(pickle.dumps(module)).kind is plain
    assert issubclass(copy.deepcopy(module).kind, plain)


@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize("plain", [_KnowsItsClass, _KnowsItsClassToo])
def test_a_subclass_of_a_made_class_is_pickled_as_itself(
    plain: type[_KnowsItsClass], wrap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    below = type(plain)("_Below", (type(_hooked(plain(), wrap)),), {"__module__": __name__})
    monkeypatch.setitem(globals(), "_Below", below)
    below.__qualname__ = "_Below"
    assert pickle.loads(pickle.dumps(below)) is below

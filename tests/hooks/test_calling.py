"""Calls: phases, PyTorch's contract argument for argument, typed hooks."""

from __future__ import annotations

import functools
import re
import types
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import ferrohook as fh
from support.hooks import PHASES, TYPED
from support.numbers import close

if TYPE_CHECKING:
    from collections.abc import Callable


class Affine(nn.Module):
    """A module with positional and keyword arguments that logs its calls."""

    def __init__(self, log: list[Any] | None = None) -> None:
        super().__init__()
        self.log = [] if log is None else log

    def forward(self, x: Any, shift: Any = 0, *, scale: Any = 1) -> Any:
        self.log.append("module")
        return x * scale + shift


@pytest.fixture(params=["plain", "hooked"])
def affine(request: pytest.FixtureRequest) -> nn.Module:
    """Plain and hooked modules: one contract for PyTorch's hooks and ours."""
    return Affine() if request.param == "plain" else fh.HookedModule(Affine())


def same_error(act: Callable[[nn.Module], object], module: nn.Module) -> BaseException:
    """Error of `act` on a hooked module, asserted equal to the plain one's in type and text."""
    with pytest.raises(Exception) as plain:  # noqa: PT011 (whatever PyTorch raises)
        act(module)
    with pytest.raises(type(plain.value)) as ours:
        act(fh.HookedModule(type(module)()))
    assert type(ours.value) is type(plain.value)
    assert str(ours.value) == str(plain.value)
    return ours.value


# Phases


def test_pre_hooks_then_module_then_forward_hooks(affine: Any) -> None:
    log = affine.log
    affine.register_forward_hook(lambda *_: log.append("forward 1"))
    affine.register_forward_pre_hook(lambda *_: log.append("pre 1"))
    affine.register_forward_hook(lambda *_: log.append("forward 2"))
    affine.register_forward_pre_hook(lambda *_: log.append("pre 2"))
    affine(1)
    assert log == ["pre 1", "pre 2", "module", "forward 1", "forward 2"]


def test_each_hook_gets_the_return_value_of_the_previous_one(affine: Any) -> None:
    seen: list[Any] = []

    def add_one(_module: nn.Module, args: tuple[int]) -> tuple[int]:
        seen.append(args)
        return (args[0] + 1,)

    def double(_module: nn.Module, args: tuple[int], output: int) -> int:
        seen.append((args, output))
        return output * 2

    for _ in range(2):
        affine.register_forward_pre_hook(add_one)
        affine.register_forward_hook(double)
    assert affine(5, scale=10) == 280
    # Forward hooks get the arguments as changed by the pre-hooks.
    assert seen == [(5,), (6,), ((7,), 70), ((7,), 140)]


def test_a_hook_registered_during_a_phase_fires_in_the_next_phase() -> None:
    log: list[str] = []
    hooked = fh.HookedModule(Affine(log))

    def pre(module: fh.HookedModule[Any], _args: Any) -> None:
        log.append("pre")
        if not module.hooks("forward"):
            module.register_forward_pre_hook(lambda *_: log.append("late pre"))
            module.register_forward_hook(forward)

    def forward(module: fh.HookedModule[Any], _args: Any, _output: Any) -> None:
        log.append("forward")
        if len(module.hooks("forward")) == 1:
            module.register_forward_hook(lambda *_: log.append("late forward"))

    hooked.register_forward_pre_hook(pre)
    hooked(1)
    assert log == ["pre", "module", "forward"]
    log.clear()
    hooked(1)
    assert log == ["pre", "late pre", "module", "forward", "late forward"]


def test_a_backward_hook_registered_by_a_pre_hook_fires_in_the_same_call() -> None:
    hooked = fh.HookedModule(Affine())
    log: list[str] = []

    def pre(module: Any, _args: Any) -> None:
        module.register_full_backward_hook(lambda *_: log.append("backward"))

    hooked.register_forward_pre_hook(pre)
    hooked(torch.ones(2, requires_grad=True)).sum().backward()
    assert log == ["backward"]


def test_a_prepended_hook_registered_by_a_hook_waits_for_the_next_phase(affine: Any) -> None:
    log: list[str] = []

    def pre(module: Any, _args: Any) -> None:
        log.append("pre")
        module.register_forward_pre_hook(lambda *_: log.append("ahead"), prepend=True)

    affine.register_forward_pre_hook(pre)
    affine(1)
    assert log == ["pre"]
    affine(1)
    assert log == ["pre", "ahead", "pre"]


def test_a_hook_may_call_its_module(affine: Any) -> None:
    outputs: list[int] = []

    def again(module: Any, args: tuple[int], output: int) -> None:
        if args[0] > 0:
            module(args[0] - 1)
        outputs.append(output)

    affine.register_forward_hook(again)
    affine(3)
    assert outputs == [0, 1, 2, 3]


# PyTorch's contract


def test_hooks_get_the_called_module_and_tuples_of_arguments() -> None:
    hooked = fh.HookedModule(Affine())
    seen: list[Any] = []
    hooked.register_forward_pre_hook(lambda *given: seen.append(given))
    hooked.register_forward_hook(lambda *given: seen.append(given))
    hooked(2, 3, scale=4)
    assert seen == [(hooked, (2, 3)), (hooked, (2, 3), 11)]
    assert all(given[0] is hooked for given in seen)


def test_with_kwargs_hooks_get_the_keyword_arguments(affine: Any) -> None:
    seen: list[Any] = []
    affine.register_forward_pre_hook(lambda _, *given: seen.append(given), with_kwargs=True)
    affine.register_forward_hook(lambda _, *given: seen.append(given), with_kwargs=True)
    affine(2, scale=4)
    affine(3)
    assert seen == [
        ((2,), {"scale": 4}),
        ((2,), {"scale": 4}, 8),
        ((3,), {}),
        ((3,), {}, 3),
    ]


def test_hooks_without_with_kwargs_do_not_get_keyword_arguments(
    affine: Any,
) -> None:
    seen: list[Any] = []
    affine.register_forward_pre_hook(lambda _, *given: seen.append(given))
    affine.register_forward_hook(lambda _, *given: seen.append(given))
    assert affine(x=2, scale=4) == 8
    assert seen == [((),), ((), 8)]


def test_with_kwargs_hooks_share_one_dict_that_is_not_the_callers(affine: Any) -> None:
    seen: list[dict[str, Any]] = []

    def pre(_module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        seen.append(kwargs)
        kwargs["scale"] = 10

    affine.register_forward_pre_hook(pre, with_kwargs=True)
    affine.register_forward_hook(lambda _m, _a, kwargs, _o: seen.append(kwargs), with_kwargs=True)
    given = {"scale": 2}
    assert affine(3, **given) == 30
    assert given == {"scale": 2}
    assert seen[0] is seen[1]


@pytest.mark.parametrize("returned", [(8,), [8], 8, "8", {"x": 8}])
def test_the_return_value_of_a_pre_hook_replaces_the_arguments(affine: Any, returned: Any) -> None:
    seen: list[Any] = []
    affine.register_forward_pre_hook(lambda *_: returned)
    affine.register_forward_pre_hook(lambda _, args: seen.append(args))
    affine.forward = lambda *args: args
    expected = returned if isinstance(returned, tuple) else (returned,)
    assert affine(1) == expected
    assert seen == [expected]


def test_none_observes_and_every_other_value_replaces(affine: Any) -> None:
    for falsy in (0, (), "", False):
        handle = affine.register_forward_hook(lambda *_, falsy=falsy: falsy)
        assert affine(1) is falsy
        handle.remove()
    affine.register_forward_hook(lambda *_: None)
    affine.register_forward_pre_hook(lambda *_: None)
    assert affine(1) == 1


def test_with_kwargs_pre_hook_replaces_both_kinds_of_arguments(affine: Any) -> None:
    affine.register_forward_pre_hook(
        lambda _, args, kwargs: ((args[0] + 1,), {"scale": kwargs["scale"] * 2}), with_kwargs=True
    )
    seen: list[Any] = []
    affine.register_forward_hook(lambda _, *given: seen.append(given), with_kwargs=True)
    assert affine(4, scale=3) == 30
    assert seen == [((5,), {"scale": 6}, 30)]


def test_a_pre_hook_may_move_arguments_between_positions_and_keywords(affine: Any) -> None:
    affine.register_forward_pre_hook(
        lambda _, args, kwargs: ((), {"x": args[0], **kwargs}), with_kwargs=True
    )
    assert affine(4, scale=3) == 12


@pytest.mark.parametrize(
    "returned",
    [
        5,
        "text",
        (),
        (1,),
        (1, {}, 3),
        [(1,), {}],
        {"x": 1},
        False,
        (5, {}),
        (None, {}),
        ((1,), 5),
        ((1,), None),
        ((1,), {"unknown": 1}),
        ((1,), {2: 1}),
        ((1, 2, 3), {}),
        ((), {}),
        ((1,), {"x": 1}),
    ],
    ids=repr,
)
def test_a_wrong_return_value_of_a_with_kwargs_pre_hook_raises_pytorchs_error(
    returned: Any,
) -> None:
    def act(module: nn.Module) -> None:
        module.register_forward_pre_hook(lambda *_: returned, with_kwargs=True)
        module(1)

    same_error(act, Affine())


@pytest.mark.parametrize("returned", [(), (1, 2, 3)], ids=repr)
def test_too_few_or_many_arguments_from_a_pre_hook_raise_pytorchs_error(returned: Any) -> None:
    def act(module: nn.Module) -> None:
        module.register_forward_pre_hook(lambda *_: returned)
        module(1)

    same_error(act, Affine())


def takes(*names: str) -> Callable[..., None]:
    return eval(f"lambda {', '.join(names)}: None")  # type: ignore[no-any-return]  # noqa: S307


class Taking:
    """Makes callables of each kind that take arguments of these names."""

    def __init__(self, *names: str) -> None:
        cls = type("Hook", (), {"__call__": takes("self", *names)})
        method = types.MethodType(takes("self", *names), object())
        self.hooks = {
            "function": takes(*names),
            "method": method,
            "object": cls(),
            "partial": functools.partial(takes("first", *names), 0),
        }


WAYS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "the wrapper's method": lambda phase, hook, options: getattr(
        fh.HookedModule(nn.Linear(2, 2)), PHASES[phase]
    )(hook, **options),
    "the module's method": lambda phase, hook, options: getattr(
        instrumented(nn.Linear(2, 2)), PHASES[phase]
    )(hook, **options),
    "register": lambda phase, hook, options: fh.register(
        nn.Linear(2, 2), "", hook, phase=phase, **options
    ),
    "on": lambda phase, hook, options: fh.on("", hook, phase=phase, **options),
}
TAKEN = {
    "forward_pre": ["module", "args"],
    "forward": ["module", "args", "output"],
    "backward_pre": ["module", "grad_output"],
    "backward": ["module", "grad_input", "grad_output"],
}


def instrumented(module: nn.Module) -> nn.Module:
    fh.instrument(module)
    return module


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["function", "method", "object", "partial"])
@pytest.mark.parametrize(
    ("phase", "with_kwargs"),
    [*((phase, False) for phase in TAKEN), ("forward_pre", True), ("forward", True)],
)
def test_a_hook_of_the_wrong_arity_is_refused_as_it_is_registered(
    way: str, kind: str, phase: str, with_kwargs: bool
) -> None:
    taken = TAKEN[phase]
    if with_kwargs:
        taken = [*taken[:2], "kwargs", *taken[2:]]
    options = {"with_kwargs": True} if with_kwargs else {}
    fits = [taken, ["*rest"], [*taken, "more=1"], [*taken, "*", "key=1"]]
    for names in fits:
        WAYS[way](phase, Taking(*names).hooks[kind], options)
    for names in (
        [],
        taken[:-1],
        [*taken, "more"],
        [*taken, "*", "key"],
        [*taken[:-1], "*", "last"],
    ):
        called = re.escape(
            f"a {phase} hook is called as hook({', '.join(taken)}), but this one takes ("
        )
        with pytest.raises(fh.HookTypeError, match=called):
            WAYS[way](phase, Taking(*names).hooks[kind], options)


@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        (fh.ForwardPreHook, ["input"]),
        (fh.ForwardHook, ["input", "output"]),
        (fh.BackwardHook, ["grad_input", "grad_output"]),
    ],
)
def test_the_function_of_a_typed_hook_takes_its_arguments(make: Any, arguments: list[str]) -> None:
    for names in (arguments, ["*rest"], [*arguments, "more=1"]):
        make(takes(*names))
    for names in ([], arguments[:-1], [*arguments, "more"]):
        called = re.escape(f"hook is called as hook({', '.join(arguments)}), but this one takes (")
        with pytest.raises(fh.HookTypeError, match=called):
            make(takes(*names))


@pytest.mark.parametrize("name", ["torch.nn.utils.mine", "", None, 3])
def test_a_hook_may_compute_its_module_s_name(affine: Any, name: Any) -> None:
    class Hook:
        @property
        def __module__(self) -> Any:
            return name

        def __call__(self, _module: nn.Module, _args: Any, output: int) -> int:
            return output + 1

    affine.register_forward_hook(Hook())
    assert affine(1) == 2


def test_other_callables_are_taken() -> None:
    hooked = fh.HookedModule(nn.Linear(2, 2))
    keywords = functools.partial(takes("module", "args", "output", "key"), key=1)
    for hook in (print, max, nn.Identity(), dict, keywords):
        hooked.register_forward_hook(hook)


@pytest.mark.parametrize("args", [(), (1, 2, 3)], ids=repr)
@pytest.mark.parametrize("hook", [False, True])
def test_a_call_with_wrong_arguments_raises_pytorchs_error(
    args: tuple[Any, ...],
    hook: bool,
) -> None:
    def act(module: nn.Module) -> None:
        if hook:
            module.register_forward_hook(lambda *_: None)
        module(*args)

    same_error(act, Affine())


def test_the_register_methods_take_pytorchs_arguments_by_position_and_by_name() -> None:
    hooked = fh.HookedModule(nn.Linear(2, 2))
    log: list[str] = []
    hooked.register_full_backward_hook(lambda *_: log.append("last"))
    hooked.register_full_backward_hook(lambda *_: log.append("first"), True)
    hooked.register_full_backward_hook(hook=lambda *_: log.append("end"), prepend=False)
    hooked.register_full_backward_pre_hook(lambda *_: log.append("pre 2"))
    hooked.register_full_backward_pre_hook(lambda *_: log.append("pre 1"), True)
    hooked.register_forward_hook(hook=lambda *_: log.append("forward"))
    hooked.register_forward_pre_hook(hook=lambda *_: log.append("forward pre"))
    hooked(torch.ones(1, 2, requires_grad=True)).sum().backward()
    assert log == ["forward pre", "forward", "pre 1", "pre 2", "first", "last", "end"]


@pytest.mark.parametrize("attach", [fh.HookedModule, instrumented])
def test_register_backward_hook_is_the_full_one(attach: Callable[[nn.Module], Any]) -> None:
    module = attach(nn.Linear(2, 3))
    shapes: list[Any] = []
    module.register_backward_hook(lambda _, gi, go: shapes.append((gi[0].shape, go[0].shape)))
    module(torch.ones(4, 2, requires_grad=True)).sum().backward()
    assert shapes == [((4, 2), (4, 3))]


def test_one_callable_registered_twice_fires_twice(affine: Any) -> None:
    affine.register_forward_hook(hook := lambda _m, _a, output: output * 2)
    affine.register_forward_hook(hook)
    assert affine(1) == 4


# No hooks


def test_a_call_without_hooks_returns_the_modules_own_object() -> None:
    result = object()
    module = nn.Identity()
    hooked = fh.HookedModule(module)
    assert hooked(result) is result
    x = torch.ones(3, requires_grad=True)
    assert hooked(x) is x


def test_a_call_after_removal_returns_the_modules_own_object() -> None:
    hooked = fh.HookedModule(nn.Identity())
    x = torch.ones(3, requires_grad=True)
    handles = [
        hooked.register_forward_pre_hook(lambda _, args: args[0] + 1),
        hooked.register_forward_hook(lambda _m, _a, output: output * 2),
        hooked.register_full_backward_hook(lambda *_: None),
        hooked.register_full_backward_pre_hook(lambda *_: None),
    ]
    assert torch.equal(hooked(x), 2 * (x + 1))
    for handle in handles:
        handle.remove()
    assert hooked(x) is x


def test_a_call_with_observers_returns_the_modules_own_object() -> None:
    hooked = fh.HookedModule(nn.Identity())
    hooked.register_forward_hook(lambda *_: None)
    hooked.register_forward_pre_hook(lambda *_: None)
    hooked.register_forward_hook(fh.ForwardHook(lambda _i, _o: None))
    result = object()
    assert hooked(result) is result


def test_forward_runs_the_module_without_hooks() -> None:
    hooked = fh.HookedModule(Affine())
    for register in (hooked.register_forward_pre_hook, hooked.register_forward_hook):
        register(lambda *_: pytest.fail("forward() ran a hook"))
    assert hooked.forward(2, 3, scale=4) == 11
    assert [row.calls for row in hooked.hooks()] == [0, 0]


# Typed hooks


class Pair(nn.Module):
    def forward(self, a: Any, b: Any, *, scale: Any = 1) -> Any:
        return (a + b) * scale


def test_input_is_the_single_positional_argument() -> None:
    hooked = fh.HookedModule(Affine())
    seen: list[Any] = []

    def add_one(given: Tensor) -> Tensor:
        seen.append(given)
        return given + 1

    hooked.register_forward_pre_hook(fh.ForwardPreHook[Any](add_one))
    hooked.register_forward_hook(
        fh.ForwardHook[Any, Any](lambda given, output: seen.append((given, output)))
    )
    x = torch.ones(2)
    out = hooked(x, scale=3)
    assert seen[0] is x
    assert torch.equal(seen[1][0], x + 1)
    assert seen[1][1] is out
    assert torch.equal(out, 3 * (x + 1))


def test_input_is_the_tuple_of_several_arguments_and_of_none() -> None:
    hooked = fh.HookedModule(Pair())
    seen: list[Any] = []

    def swap(given: tuple[str, ...]) -> tuple[str, ...]:
        seen.append(given)
        return given[::-1]

    hooked.register_forward_pre_hook(fh.ForwardPreHook(swap))
    hooked.register_forward_hook(
        fh.ForwardHook[Any, Any](lambda given, output: seen.append((given, output)))
    )
    assert hooked("a", "b") == "ba"
    assert hooked(a="a", b="b") == "ab"
    assert seen == [("a", "b"), (("b", "a"), "ba"), (), ((), "ab")]


def test_a_backward_hook_observes_both_gradients() -> None:
    hooked = fh.HookedModule(nn.Linear(2, 1, bias=False))
    seen: list[Any] = []
    hooked.register_full_backward_hook(fh.BackwardHook(lambda *given: seen.append(given)))
    x = torch.ones(1, 2, requires_grad=True)
    (hooked(x) * 3).sum().backward()
    ((grad_input, grad_output),) = seen
    assert torch.equal(grad_output[0], torch.tensor([[3.0]]))
    assert close(grad_input[0], 3 * hooked.inner.weight.detach())
    assert x.grad is not None
    assert torch.equal(x.grad, grad_input[0])


def test_typed_and_plain_hooks_chain() -> None:
    hooked = fh.HookedModule(Affine())
    hooked.register_forward_pre_hook(lambda _, args: args[0] + 1)
    hooked.register_forward_pre_hook(fh.ForwardPreHook[Tensor](lambda x: x * 2))
    hooked.register_forward_pre_hook(lambda _, args: (args[0] + 3,))
    assert hooked(torch.tensor(1)).item() == 7


@pytest.mark.parametrize("returned", [torch.tensor(3.0), (torch.tensor(3.0),), ("any",)], ids=repr)
def test_a_forward_pre_hook_may_return_a_tensor_or_a_tuple_of_the_calls_arity(
    returned: Any,
) -> None:
    hooked = fh.HookedModule(nn.Identity())
    hooked.register_forward_pre_hook(fh.ForwardPreHook[Any](lambda _: returned))
    expected = returned[0] if isinstance(returned, tuple) else returned
    assert hooked(torch.tensor(1.0)) is expected


def named_hook(returned: Any) -> Callable[..., Any]:
    def my_hook(*_: Any) -> Any:
        return returned

    return my_hook


def assert_names_hook_phase_and_module(
    error: fh.HookTypeError, handle: fh.typing.HookHandle, module: str, got: str
) -> None:
    assert isinstance(error, TypeError)
    text = str(error)
    for part in ("my_hook`", f"{handle.phase} hook `", f" of {module}, registered at {__file__}:"):
        assert part in text
    assert text.endswith(f", got {got}")


ONE_ITEM = "must return a tensor or a tuple with one item"
TWO_ITEMS = "must return a tuple of 2 items, one for each"
NONE = "only observes and must return None"
TENSOR = torch.ones(1)
WRONG_RETURNS: list[tuple[str, nn.Module, str, list[Any]]] = [
    (
        "forward_pre",
        nn.Linear(1, 1),
        ONE_ITEM,
        [None, 5, "text", [TENSOR], {}, (), (TENSOR, TENSOR)],
    ),
    ("forward_pre", Pair(), TWO_ITEMS, [None, TENSOR, (1,), [1, 2]]),
    ("forward", nn.Identity(), NONE, [0, False, (), TENSOR]),
    ("backward", nn.Linear(1, 1), NONE, [0, (None,), ()]),
]


@pytest.mark.parametrize(
    ("phase", "module", "words", "returned"),
    [(*case, returned) for *case, values in WRONG_RETURNS for returned in values],
)
def test_a_typed_hook_returning_anything_else_is_a_hook_type_error(
    phase: str, module: nn.Module, words: str, returned: Any
) -> None:
    hooked = fh.HookedModule(module)
    handle = getattr(hooked, PHASES[phase])(TYPED[phase](named_hook(returned)))
    arguments = [torch.ones(1, requires_grad=True) for _ in range(2 if words == TWO_ITEMS else 1)]
    with pytest.raises(fh.HookTypeError, match=words) as caught:
        hooked(*arguments).backward()
    name, got = type(module).__name__, type(returned).__name__
    assert_names_hook_phase_and_module(caught.value, handle, f"HookedModule({name})", got)
    assert all(each.grad is None for each in arguments)


def test_typed_hooks_decorate_functions_that_stay_callable() -> None:
    @fh.ForwardPreHook
    def double(x: Tensor) -> Tensor:
        return 2 * x

    seen: list[tuple[Tensor, Tensor]] = []

    @fh.ForwardHook
    def watch(x: Tensor, y: Tensor) -> None:
        seen.append((x, y))

    grads: list[Any] = []

    @fh.BackwardHook
    def gradients(grad_input: Any, grad_output: Any) -> None:
        grads.append((grad_input, grad_output))

    x = torch.ones(2, requires_grad=True)
    hooked = fh.HookedModule(nn.Identity())
    hooked.register_forward_pre_hook(double)
    hooked.register_forward_hook(watch)
    hooked.register_full_backward_hook(gradients)
    assert torch.equal(hooked(x), 2 * x)
    assert len(seen) == 1
    assert torch.equal(double(x), 2 * x)
    watch(x, x)
    gradients((None,), (None,))
    assert (len(seen), len(grads)) == (2, 1)


def test_a_typed_hook_exposes_function_phase_and_repr() -> None:
    for kind, phase in (
        (fh.ForwardPreHook, "forward_pre"),
        (fh.ForwardHook, "forward"),
        (fh.BackwardHook, "backward"),
    ):
        function = named_hook(None)
        typed = kind(function)
        assert typed.fn is function
        assert typed.phase == phase
        assert repr(typed) == f"{kind.__name__}({function!r})"


def test_one_typed_hook_may_serve_several_modules() -> None:
    seen: list[Any] = []
    watch = fh.ForwardHook[Any, Any](lambda *given: seen.append(given))
    for module in (nn.Identity(), nn.Flatten(0)):
        fh.HookedModule(module).register_forward_hook(watch)
        hooked = fh.HookedModule(module)
        hooked.register_forward_hook(watch)
        hooked(torch.ones(1))
    assert len(seen) == 2

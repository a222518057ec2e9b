"""Checkpointed models against plain ones: the same hooks, the same changes before backward.

The oracle is the model without checkpointing: its forward runs once, so nothing that changes before
backward can reach a forward hook. An error is right only if a hook that may change values is gone.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import ferrohook as fh
from support.amounts import amount
from support.limits import LIMIT

if TYPE_CHECKING:
    from collections.abc import Iterator

X = torch.linspace(-1.0, 1.5, 12, dtype=torch.float64).reshape(4, 3)
V = torch.tensor([0.5, -1.0, 0.25], dtype=torch.float64)
PLACES = [f"blocks.{block}.{part}" for block in range(2) for part in ("proj", "act")]

REPEATS = r"^backward\(\) repeats a checkpointed forward"

How = tuple[bool, ...]
"""Nested checkpoints around a block, the innermost first; True for a reentrant one."""


class Block(nn.Module):
    def __init__(self, how: How) -> None:
        super().__init__()
        self.proj, self.act, self.how = nn.Linear(3, 3), nn.Tanh(), how

    def body(self, x: Tensor) -> Tensor:
        result: Tensor = self.act(self.proj(x))
        return result

    def forward(self, x: Tensor) -> Tensor:
        run: Any = self.body
        for reentrant in self.how:
            run = functools.partial(checkpoint, run, use_reentrant=reentrant)
        result: Tensor = run(x)
        return result


class Net(nn.Module):
    def __init__(self, hows: list[How]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(how) for how in hows)
        self.last = nn.Identity()
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.last(x)
        return result


def sin(_module: Any, _args: Any, output: Tensor) -> Tensor:
    return output.sin()


def halve(_module: Any, args: tuple[Tensor]) -> tuple[Tensor]:
    return (args[0] * 0.5,)


def double_gradient(_module: Any, grads: Any, _output: Any) -> Any:
    return tuple(None if each is None else each * 2 for each in grads)


CHANGING: dict[str, tuple[str, Any]] = {
    "scale": ("forward", fh.Scale(2.0)),
    "add": ("forward", fh.Add(V)),
    "ablate": ("forward", fh.Ablate(V)),
    "scale input": ("forward_pre", fh.Scale(-1.5)),
    "function": ("forward", sin),
    "function of the input": ("forward_pre", halve),
    "typed": ("forward_pre", fh.ForwardPreHook(lambda value: value * value)),
}
OBSERVING: dict[str, tuple[str, Any]] = {
    "typed observer": ("forward", fh.ForwardHook(lambda _input, _output: None)),
    "backward": ("backward", double_gradient),
}
KINDS = CHANGING | OBSERVING


@dataclass(frozen=True)
class Spec:
    """A hook that is registered before the forward."""

    kind: str
    place: str
    audience: str
    """`all`, `outer` or `inner`."""
    enabled: bool

    def register(self, model: nn.Module, scope: fh.Scope | None) -> fh.typing.HandleGroup:
        phase: Any
        phase, hook = KINDS[self.kind]
        handles = fh.register(model, self.place, hook, phase=phase, scope=scope or "global")
        if not self.enabled:
            handles.disable()
        return handles


@dataclass(frozen=True)
class Script:
    """Events of a run, without the checkpointing."""

    hooks: list[Spec]
    planned: list[tuple[str, str]]
    """Kinds and places of a plan, whose request is entered, of the kinds that a plan takes."""
    capture: tuple[str, bool, bool, str] | None
    """Place, `inputs`, `detach` and `copy`."""
    capture_left: bool
    forwards: int
    changes: list[tuple[str, int]]
    added: list[Spec]
    foreign: tuple[str, str, str] | None
    """Kind of frame around backward, with the hook of a kind at a place."""
    thread: bool
    backwards: int


@dataclass
class Outcome:
    gradients: list[Tensor | None]
    captured: list[Tensor]
    captured_gradients: list[Any]
    calls: int


def spec() -> st.SearchStrategy[Spec]:
    return st.builds(
        Spec,
        st.sampled_from(sorted(KINDS)),
        st.sampled_from(PLACES),
        st.sampled_from(["all", "outer", "inner"]),
        st.booleans() | st.just(value=True),
    )


CHANGES = ["remove", "disable", "enable", "priority", "leave inner", "close request"]
change = st.tuples(st.sampled_from(CHANGES), st.integers(0, 3))
plannable = [kind for kind, (phase, _) in CHANGING.items() if phase == "forward"]

scripts = st.builds(
    Script,
    hooks=st.lists(spec(), max_size=4),
    planned=st.lists(
        st.tuples(st.sampled_from(plannable), st.sampled_from(PLACES)), max_size=2, unique=True
    ),
    capture=st.none()
    | st.tuples(
        st.sampled_from(PLACES), st.booleans(), st.booleans(), st.sampled_from(["checked", "clone"])
    ),
    capture_left=st.booleans(),
    forwards=st.integers(1, 2),
    changes=st.lists(change, max_size=3),
    added=st.lists(spec(), max_size=2),
    foreign=st.none()
    | st.tuples(
        st.sampled_from(["scope", "request", "capture", "batch"]),
        st.sampled_from(plannable),
        st.sampled_from(PLACES),
    ),
    thread=st.booleans(),
    backwards=st.integers(1, 2),
)
hows = st.lists(st.lists(st.booleans(), max_size=2).map(tuple), min_size=2, max_size=2)


@contextlib.contextmanager
def entered_elsewhere(model: nn.Module, foreign: tuple[str, str, str] | None) -> Any:
    """Enters a frame that the forward did not have."""
    if foreign is None:
        yield
        return
    frame, kind, place = foreign
    hook = KINDS[kind][1]
    with contextlib.ExitStack() as stack:
        if frame == "scope":
            scope = stack.enter_context(fh.scope())
            fh.register(model, place, hook, scope=scope)
        elif frame == "capture":
            stack.enter_context(fh.capture(model, place, stop=True))
        else:
            prepared = stack.enter_context(fh.Plan(fh.on(place, hook)).prepare(model))
            request = prepared.open()
            stack.enter_context(request if frame == "request" else fh.batch({request: [0]}, size=4))
        yield


def captured_in(model: nn.Module, capture: tuple[str, bool, bool, str]) -> Any:
    place, of_inputs, detach, copy = capture
    options: Any = {"inputs": of_inputs, "detach": detach, "copy": copy}
    return fh.capture(model, place, grads=True, calls="all", **options)


def change_hooks(
    script: Script, handles: list[fh.typing.HandleGroup], inner: fh.Scope, request: Any
) -> None:
    """Changes the hooks between forward and backward."""
    for name, number in script.changes:
        if name == "leave inner":
            inner.close()
        elif name == "close request":
            if request is not None:
                request.close()
        elif handles:
            handle = handles[number % len(handles)]
            if name == "priority":
                handle.priority = 7
            else:
                getattr(handle, name)()


def play(script: Script, how: list[How]) -> Outcome:
    """Runs a script on a model of these checkpoints; `HookError` where backward raises it."""
    model = Net(how)
    inputs = [(X + shift).requires_grad_() for shift in range(script.forwards)]
    with contextlib.ExitStack() as stack:
        prepared = stack.enter_context(
            fh.Plan(*(fh.on(place, KINDS[kind][1]) for kind, place in script.planned)).prepare(
                model
            )
            if script.planned
            else contextlib.nullcontext()
        )
        outer = stack.enter_context(fh.scope())
        request = prepared.open() if prepared is not None else None
        if request is not None:
            stack.enter_context(request)
        inner = stack.enter_context(fh.scope())
        scopes = {"all": None, "outer": outer, "inner": inner}
        handles = [each.register(model, scopes[each.audience]) for each in script.hooks]
        counter = fh.detectors.CallCounter()
        fh.register(model, PLACES, counter, scope="global")
        capture_stack = stack.enter_context(contextlib.ExitStack())
        acts: Any = None
        if script.capture is not None:
            acts = capture_stack.enter_context(captured_in(model, script.capture))
        outputs = [model(x) for x in inputs]
        if script.capture_left:
            capture_stack.close()
        change_hooks(script, handles, inner, request)
        for each in script.added:
            scope = scopes[each.audience]
            if scope is None or not scope.closed:
                each.register(model, scope)

        def backward() -> None:
            with entered_elsewhere(model, script.foreign):
                loss = sum(output.sum() for output in outputs)
                for number in range(script.backwards):
                    loss.backward(retain_graph=number + 1 < script.backwards)

        if script.thread:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(backward).result(LIMIT)
        else:
            backward()
        captured: Any = [] if acts is None else acts[script.capture[0]]  # type: ignore[index]
        gradients: Any = [] if acts is None else acts.grads[script.capture[0]]  # type: ignore[index]
        return Outcome(
            [each.grad for each in (*inputs, *model.parameters())],
            [each.detach() for each in captured],
            list(gradients),
            counter.snapshot()["calls"],
        )


def gone(script: Script, how: list[How]) -> bool:
    """True if a hook that may have changed a value in a checkpointed block is gone by backward."""
    checkpointed = {place for place in PLACES if how[int(place.split(".")[1])]}
    names = [name for name, _ in script.changes]
    count = len(script.hooks)
    removed = {number % count for name, number in script.changes if name == "remove" and count}
    for number, each in enumerate(script.hooks):
        left = each.audience == "inner" and "leave inner" in names
        changes = each.kind in CHANGING and each.enabled and each.place in checkpointed
        if changes and (number in removed or left):
            return True
    in_plan = any(place in checkpointed for _, place in script.planned)
    return in_plan and "close request" in names


def same(first: Outcome, second: Outcome) -> None:
    assert first.calls == second.calls
    assert len(first.captured) == len(second.captured)
    for name in ("gradients", "captured", "captured_gradients"):
        for one, other in zip(getattr(first, name), getattr(second, name), strict=True):
            assert (one is None) == (other is None), name
            if one is not None:
                torch.testing.assert_close(one, other)


@settings(
    max_examples=amount(60, whole=2_000),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(scripts, hows, st.booleans())
def test_a_checkpointed_model_has_the_gradients_of_a_plain_one(
    script: Script, how: list[How], early: bool
) -> None:
    with warnings.catch_warnings(), set_checkpoint_early_stop(early):
        warnings.simplefilter("ignore")
        if gone(script, how):
            event("a hook is gone")
            with pytest.raises(fh.HookError, match=REPEATS):
                play(script, how)
            return
        event("all hooks are there")
        same(play(script, how), play(script, [(), ()]))


@dataclass(frozen=True)
class BatchScript:
    """A forward of two requests, and what happens before backward."""

    rows: tuple[Any, Any]
    kinds: tuple[str, str]
    at: tuple[Any, Any]
    place: str
    kept: bool
    fails: str
    """How the first request fails: `hook` (after the blocks), `inside` (in one), `fail` or `""`."""
    moved: bool
    closed: bool


batch_scripts = st.builds(
    BatchScript,
    rows=st.sampled_from([([0, 1], [2, 3]), ([3, 0], [1]), (slice(0, 2), slice(2, 4)), ([2], [0])]),
    kinds=st.tuples(st.sampled_from(plannable), st.sampled_from(plannable)),
    at=st.tuples(st.sampled_from([None, "prompt", 1]), st.sampled_from([None, "generated", 0])),
    place=st.sampled_from(PLACES),
    kept=st.booleans(),
    fails=st.sampled_from(["", "hook", "inside", "fail"]),
    moved=st.booleans(),
    closed=st.sampled_from([False, False, True]),
)


def fails(*_: Any) -> None:
    msg = "on purpose"
    raise ValueError(msg)


def play_batch(script: BatchScript, how: list[How]) -> tuple[list[Tensor | None], list[Any]]:
    model, x = Net(how), X.clone().requires_grad_()
    first, second = torch.tensor([0, 1, 0, 1]), torch.tensor([2, 3, 2, 3])
    of_first = [fh.on(script.place, CHANGING[script.kinds[0]][1], at=script.at[0])]
    of_second = [fh.on(script.place, CHANGING[script.kinds[1]][1], at=script.at[1])]
    if script.kept:
        of_second.append(fh.keep(script.place))  # type: ignore[arg-type]
    if script.fails == "hook":
        of_first.append(fh.on("last", fails))
    with (
        fh.Plan(*of_first).prepare(model) as one,
        fh.Plan(*of_second).prepare(model) as other,
    ):
        requests = [one.open(), other.open()]
        if script.fails == "inside":
            fh.register(model, script.place, fails, scope=requests[0])
        rows = dict(zip(requests, script.rows, strict=True))
        with fh.batch(rows, size=4, positions=first, lengths=dict.fromkeys(requests, 1)) as batch:
            y = model(x)
            if script.fails == "fail":
                requests[0].fail(ValueError("on purpose"))
            if script.moved:
                batch.move(second)
                model(torch.zeros_like(X).requires_grad_())
            if script.closed:
                requests[0].close()
            y.sum().backward()
        errors = [type(each.error) for each in requests]
        kept = [requests[1].acts[script.place].detach()] if script.kept else []
    return [each.grad for each in (x, *model.parameters())], [errors, kept]


@pytest.fixture(scope="module")
def quiet() -> Iterator[None]:
    """Logs no failures of requests."""
    logger = logging.getLogger("ferrohook")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(before)


@pytest.mark.usefixtures("quiet")
@settings(
    max_examples=amount(60, whole=2_000),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(batch_scripts, hows)
def test_a_checkpointed_batch_has_the_gradients_of_a_plain_one(
    script: BatchScript, how: list[How]
) -> None:
    block = int(script.place.split(".")[1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected, (errors, kept) = play_batch(script, [(), ()])
        try:
            found, (its_errors, its_kept) = play_batch(script, how)
        except fh.HookError:
            assert script.closed
            assert how[block]
            return
    assert its_errors == errors
    for one, other in zip((*found, *its_kept), (*expected, *kept), strict=True):
        torch.testing.assert_close(one, other)

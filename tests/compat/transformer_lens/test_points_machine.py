"""Random operation sequences on TransformerLens' classes and ours, side by side.

The released TransformerLens is the oracle for call logs, outputs, gradients, caches and the lists
of hooks. The sequences avoid its known faults: hooks added by hand at the level of a `hooks`
context, unknown names, and points that run twice with cached gradients.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import nn

from ferrohook.compat import transformer_lens as points
from support.amounts import amount

if TYPE_CHECKING:
    from collections.abc import Callable

lens_root = pytest.importorskip(
    "transformer_lens.HookedRootModule", reason="transformer_lens is not installed: no oracle"
)
lens_points = pytest.importorskip("transformer_lens.hook_points")

WIDTH = 3
MOST_HOOKS = 8
# Contexts use levels 1, 2, …: levels set by hand must differ.
BY_HAND = (None, 7, 8)


class Double:
    """An invertible conversion that changes values."""

    def convert(self, value: torch.Tensor, *context: Any) -> torch.Tensor:
        return value * 2

    def revert(self, value: torch.Tensor, *context: Any) -> torch.Tensor:
        return value / 2


def make(root: Any, point: Any) -> Any:
    """Builds a model of three hook points, one of them in a block, from one side's classes."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hook_mid = point()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.hook_mid(x * 2) + 1

    class Model(root):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.hook_in = point()
            self.blocks = nn.ModuleList([Block()])
            self.hook_out = point()
            self.setup()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.blocks[0](self.hook_in(x))
            return self.hook_out(x * x).sum()

    return Model()


NAMES = ("hook_in", "blocks.0.hook_mid", "hook_out")
PREDICATES: dict[str, Callable[[str], bool]] = {
    "all": lambda name: True,
    "hooks": lambda name: name.startswith("hook_"),
    "none": lambda name: False,
}
which = st.sampled_from([*NAMES, *PREDICATES])
directions = st.sampled_from(["fwd", "bwd"])
all_directions = st.sampled_from(["fwd", "bwd", "both"])
levels = st.sampled_from(BY_HAND)
added = st.lists(st.tuples(which, st.sampled_from(["observe", "replace"])), max_size=2)


def named(what: str) -> Any:
    return PREDICATES.get(what, what)


class Side(NamedTuple):
    """A model, the log of its hooks and its open contexts."""

    model: Any
    log: list[Any]
    open: list[Any]

    def hook(self, number: int, action: str) -> Callable[..., Any]:
        def hook(tensor: torch.Tensor, hook: Any) -> Any:
            layer = hook.layer() if hook.name.startswith("blocks") else None
            self.log.append((number, hook.name, layer, tensor.tolist()))
            hook.ctx[number] = len(self.log)
            return tensor + 0.5 if action == "replace" else None

        return hook


class PointsMachine(RuleBasedStateMachine):
    """Runs each operation on both sides and compares their observable state."""

    @initialize()
    def begin(self) -> None:
        ours = make(points.HookedRootModule, points.HookPoint)
        theirs = make(lens_root.HookedRootModule, lens_points.HookPoint)
        self.sides = (Side(ours, [], []), Side(theirs, [], []))
        self.number = 0

    def both(self, act: Callable[[Side], Any]) -> list[Any]:
        return [act(side) for side in self.sides]

    def next_number(self) -> int:
        self.number += 1
        return self.number

    def compare(self, results: list[Any]) -> None:
        ours, theirs = results
        assert ours == theirs
        assert self.sides[0].log == self.sides[1].log

    def few(self) -> bool:
        return all(len(point.fwd_hooks) < MOST_HOOKS for point in self.sides[0].model.hook_points())

    @precondition(few)
    @rule(
        what=which,
        action=st.sampled_from(["observe", "replace"]),
        # direction, is_permanent, level, prepend
        options=st.tuples(directions, st.booleans(), levels, st.booleans()),
    )
    def add(self, what: str, action: str, options: tuple[Any, ...]) -> None:
        number = self.next_number()
        self.both(
            lambda side: side.model.add_hook(named(what), side.hook(number, action), *options)
        )

    @precondition(few)
    @rule(
        name=st.sampled_from(NAMES),
        action=st.sampled_from(["observe", "replace"]),
        direction=directions,
        aliases=st.lists(st.sampled_from(["blocks.3.a", "b"]), min_size=1, max_size=3),
    )
    def add_with_aliases(self, name: str, action: str, direction: str, aliases: list[str]) -> None:
        number = self.next_number()
        self.both(
            lambda side: side.model.hook_dict[name].add_hook(
                side.hook(number, action), dir=direction, alias_names=list(aliases)
            )
        )

    @precondition(few)
    @rule(name=which, direction=directions)
    def add_permanent(self, name: str, direction: str) -> None:
        number = self.next_number()
        self.both(
            lambda side: side.model.add_perma_hook(
                named(name), side.hook(number, "replace"), dir=direction
            )
        )

    @rule(
        name=st.sampled_from(NAMES), direction=all_directions, permanent=st.booleans(), level=levels
    )
    def remove(self, name: str, direction: str, permanent: bool, level: int | None) -> None:
        self.both(lambda side: side.model.hook_dict[name].remove_hooks(direction, permanent, level))

    @rule(clear=st.booleans(), direction=all_directions, permanent=st.booleans(), level=levels)
    def reset(self, clear: bool, direction: str, permanent: bool, level: int | None) -> None:
        self.both(lambda side: side.model.reset_hooks(clear, direction, permanent, level))

    @rule(name=st.sampled_from(NAMES), on=st.booleans())
    def convert(self, name: str, on: bool) -> None:
        self.both(lambda side: side.model.hook_dict[name].enable_reshape(Double() if on else None))

    @rule(fwd=added, bwd=added, clear=st.booleans())
    def enter(self, fwd: list[Any], bwd: list[Any], clear: bool) -> None:
        if len(self.sides[0].open) > 2 or not self.few():
            return
        first = self.number
        self.number += len(fwd) + len(bwd)

        def act(side: Side) -> None:
            hooks = [side.hook(first + at, action) for at, (_, action) in enumerate([*fwd, *bwd])]
            pairs = [
                (named(what), hook) for (what, _), hook in zip([*fwd, *bwd], hooks, strict=True)
            ]
            context = side.model.hooks(pairs[: len(fwd)], pairs[len(fwd) :], clear_contexts=clear)
            side.open.append(context)
            context.__enter__()

        self.both(act)

    @precondition(lambda self: self.sides[0].open)
    @rule()
    def leave(self) -> None:
        self.both(lambda side: side.open.pop().__exit__(None, None, None))

    @rule(fwd=added)
    def run_with_hooks(self, fwd: list[Any]) -> None:
        first = self.number
        self.number += len(fwd)

        def act(side: Side) -> float:
            pairs = [
                (named(what), side.hook(first + at, action))
                for at, (what, action) in enumerate(fwd)
            ]
            return side.model.run_with_hooks(torch.ones(WIDTH), fwd_hooks=pairs).item()

        self.compare(self.both(act))

    @rule(
        what=st.one_of(st.none(), which, st.lists(st.sampled_from(NAMES), unique=True)),
        backward=st.booleans(),
        options=st.fixed_dictionaries(
            {
                "remove_batch_dim": st.booleans(),
                "pos_slice": st.sampled_from([None, 1, (0, 2), [2, 0]]),
            }
        ),
        keyword=st.booleans(),
    )
    def run_with_cache(
        self, what: Any, backward: bool, options: dict[str, Any], keyword: bool
    ) -> None:
        names = what if what is None or isinstance(what, list) else named(what)
        data = torch.arange(12.0).reshape(1, 4, WIDTH)

        def act(side: Side) -> Any:
            x = data.clone().requires_grad_()
            out, cache = side.model.run_with_cache(
                *(() if keyword else (x,)),
                names_filter=names,
                incl_bwd=backward,
                **options,
                **({"x": x} if keyword else {}),
            )
            kept = {name: value.tolist() for name, value in cache.items()}
            return out.item(), kept, list(cache)[: len(cache) // (1 + backward)], _grad(x)

        self.compare(self.both(act))

    @rule(what=st.one_of(st.none(), which), backward=st.booleans())
    def caching_hooks(self, what: Any, backward: bool) -> None:
        def act(side: Side) -> Any:
            cache, fwd, bwd = side.model.get_caching_hooks(
                None if what is None else named(what), incl_bwd=backward, cache={}
            )
            with side.model.hooks(fwd, bwd):
                x = torch.ones(2, WIDTH, requires_grad=True)
                side.model(x).backward()
            return {name: value.tolist() for name, value in cache.items()}, list(cache), _grad(x)

        self.compare(self.both(act))

    @rule(gradients=st.booleans())
    def call(self, gradients: bool) -> None:
        def act(side: Side) -> Any:
            x = torch.ones(WIDTH, requires_grad=gradients)
            out = side.model(x)
            if gradients:
                out.backward()
            return out.item(), _grad(x)

        self.compare(self.both(act))

    @invariant()
    def looks_the_same(self) -> None:
        if not hasattr(self, "sides"):
            return

        def shown(side: Side) -> Any:
            def handles(listed: Any) -> list[Any]:
                return [(each.is_permanent, each.context_level) for each in listed]

            return [
                (
                    handles(point.fwd_hooks),
                    handles(point.bwd_hooks),
                    [
                        point.has_hooks(direction, permanent, level)
                        for direction in ("fwd", "bwd", "both")
                        for permanent in (True, False)
                        for level in (None, 1, 7)
                    ],
                    point.ctx,
                    repr(point),
                )
                for point in side.model.hook_points()
            ] + [
                side.model.context_level,
                {
                    name: handles(listed)
                    for name, listed in side.model.list_hooks(dir="both").items()
                },
                list(side.model.list_hooks(["hook_in"], dir="fwd", including_permanent=False)),
            ]

        self.compare(self.both(shown))

    def teardown(self) -> None:
        for side in getattr(self, "sides", ()):
            while side.open:
                with contextlib.suppress(Exception):
                    side.open.pop().__exit__(None, None, None)


def _grad(x: torch.Tensor) -> Any:
    return None if x.grad is None else x.grad.tolist()


PointsMachine.TestCase.settings = settings(
    max_examples=amount(30, whole=60),
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestPoints = pytest.mark.filterwarnings("ignore::UserWarning")(PointsMachine.TestCase)

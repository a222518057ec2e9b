"""Hooks on a model that find the tokens of its calls, for hooks and captures at positions."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any, Final, cast

from ferrohook._core import (
    BatchBase,
    EndOfCall,
    MaskedHook,
    PlanGuard,
    TokenHook,
    TokenTracker,
    TypedHook,
    frames,
)
from ferrohook.attach.attention import DIMENSIONS, is_point
from ferrohook.effects.intervention import Intervention
from ferrohook.effects.routing import BoundRoute
from ferrohook.errors import HookError, HookTypeError
from ferrohook.names.places import Head, Written
from ferrohook.tokens.positions import check_prompt, mask_of
from ferrohook.tokens.routes import TokenRoute
from ferrohook.tokens.sequences import Sequences
from ferrohook.tokens.stacks import no_tokens, stacks_in, stacks_of
from ferrohook.util.never_trace import never_trace, never_trace_frame

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import nn

    from ferrohook._core import Attachment, Frame, HookHandle, ModuleTree, TokenChoice
    from ferrohook.attach.attention import AttentionPoint
    from ferrohook.names.places import Place
    from ferrohook.tokens.positions import At, Tokens
    from ferrohook.tokens.stacks import TokenStack

_HEADS_BEHIND_QUERIES: Final = DIMENSIONS["queries"].index("heads") - len(DIMENSIONS["queries"])


class Tracker(TokenTracker):
    """Tokens of the running calls of a model, for a hook or a capture outside of plans.

    Args:
        at: the positions.
        accept: see `Sequences`.
    """

    def __init__(self, at: At, accept: Callable[[int, int], None] | None = None) -> None:
        self.plan_positions: Sequence[At] = (at,)
        self.sequences = Sequences((), accept)


def with_tokens_ahead(place: Place) -> Place:
    """Returns where a tensor has its tokens right after the batch dimension, for positions.

    For a pattern, (batch, heads, queries, keys), that is the point `queries`.
    """
    if not is_point(place.module):
        return place
    point = cast("AttentionPoint", place.module)
    if point.name != "pattern":
        return place
    head = None if place.head is None else Head(place.head.number, _HEADS_BEHIND_QUERIES)
    path = f"{place.path.removesuffix(point.name)}queries"
    return place._replace(path=path, module=point.points.queries, head=head)


def check_takes_at(
    hook: Any, phase: str, *, with_kwargs: bool, always_call: bool, option: str = "at"
) -> None:
    """Validates that a hook can act at some positions only; `option`: the one that needs it.

    Raises:
        HookTypeError: it cannot.
    """
    if isinstance(hook, Intervention):
        takes = phase.startswith("forward")
    else:
        plain = callable(hook) and not isinstance(hook, TypedHook) and phase == "forward"
        takes = plain and not with_kwargs and not always_call
    if not takes:
        msg = (
            f"{option}= only works with an intervention in a forward phase, or with a forward hook "
            "of the form hook(module, args, output), without with_kwargs and always_call"
        )
        raise HookTypeError(msg)


def masked(
    hook: Any,
    mask: int | None,
    tracker: Tracker | None = None,
    *,
    condition: TokenChoice | None = None,
    strength: float | None = None,
) -> MaskedHook | TokenHook:
    """Makes the form of a hook that acts at positions, under a condition or with a strength.

    Args:
        hook: as `hooks_at` has it.
        mask: index of the positions in the plan or the tracker; None for a strength only.
        tracker: outside of plans.
        condition: chooses among the tokens at the positions.
        strength: how much of its change is made; None for all of it.

    Raises:
        HookTypeError: it cannot change some positions only.
    """
    if isinstance(hook, BoundRoute):
        return TokenHook(TokenRoute(hook), hook.routing.ids, cast("int", mask), tracker)
    if isinstance(hook, Written) and hook.refuses_positions is not None:
        raise HookTypeError(hook.refuses_positions)
    return MaskedHook(hook, mask, tracker, condition=condition, strength=strength)


def paths_of(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Returns all paths of each module of a model."""
    paths: dict[nn.Module, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(module, []).append(path)
    return paths


def stacks_around(
    model: nn.Module, places: Iterable[Place], paths: Mapping[nn.Module, list[str]]
) -> dict[str, TokenStack | None]:
    """Returns the modules, by path, whose inputs give positions; None for one without them.

    Args:
        model: the model.
        places: where positions are needed.
        paths: result of `paths_of`.

    Raises:
        HookError: the nearest model around a place takes something else, such as images.
    """
    stacks: dict[str, TokenStack | None] = {}
    for place in places:
        own = [stacks_of(model, path) for path in paths.get(place.module, [place.path])]
        # A part of encoder and decoder runs in these, and not in the model that holds it.
        inside = [each for each in own if each and not any(it.prefix for it in each.values())]
        for each in inside or own:
            if each:
                stacks.update(each)
            else:
                stacks[""] = None
    return stacks


def stacks_to_track(model: nn.Module, places: Iterable[Place]) -> dict[str, TokenStack | None]:
    """Returns the modules, by path, whose inputs give positions outside of plans.

    Raises:
        HookError: inputs of the model give none.
    """
    stacks = stacks_around(model, places, paths_of(model))
    if None in stacks.values():
        msg = (
            f"at= selects tokens by position, but {model._get_name()} takes neither input_ids nor "
            "inputs_embeds: leave out at=, or use a plan and pass positions= to the batch"
        )
        raise HookError(msg)
    return stacks


def encoders_in(model: nn.Module) -> tuple[str, ...]:
    """Returns the paths of encoders, which do not run the generated tokens."""
    return tuple(path for path, stack in stacks_in(model).items() if stack.encoder)


def is_inside(path: str, parts: Iterable[str]) -> bool:
    """True if the module of a path is one of these parts of a model, or inside of one."""
    return any(f"{path}.".startswith(f"{part}.") for part in parts)


def track(  # noqa: PLR0913 (all but the first three by keyword)
    attachment: Attachment,
    modules: Mapping[str, nn.Module],
    stacks: Mapping[str, TokenStack | None],
    *,
    scope: Frame | None,
    tree: ModuleTree | None = None,
    tracker: Tracker | None = None,
) -> dict[str, HookHandle]:
    """Registers the hooks that find the tokens of calls, on instrumented modules.

    Args:
        attachment: owns the hooks.
        modules: the model and the stacks, by path.
        stacks: see `stacks_around`.
        scope: the scope of the hooks; None for all contexts.
        tree: modules of a plan, which the model's hook compares.
        tracker: outside of plans.

    Returns:
        The hook ahead of each module's calls, by path.
    """
    guards: dict[str, HookHandle] = {}
    for path, module in modules.items():
        find = functools.partial(_find_untraced, stacks[path]) if path in stacks else None
        guard = PlanGuard(None if path else tree, find, tracker)
        guards[path] = attachment.guard(module, "forward_pre", guard, scope)
        if find is not None:
            attachment.guard(module, "forward", EndOfCall(_note, tracker), scope)
    return guards


def _find_positions(
    stack: TokenStack | None,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tracker: Any,
) -> None:
    """Finds the positions of a call; `tracker`: a request or a `Tracker`."""
    if stack is None:
        raise no_tokens(module._get_name())
    if isinstance(tracker, Tracker):
        _refuse_positioned_batch(module)
    around: tuple[Tokens, Sequences] | None = tracker.tokens_around
    outer = around[0] if stack.inner and around is not None else None
    if outer is not None and stack.repeats(args, kwargs, outer):
        tracker.inherit_tokens()
        return
    found = tracker.sequences.find(stack, module, args, kwargs, outer)
    for at in tracker.plan_positions:
        check_prompt(at, found, module._get_name())
    masks = tuple(mask_of(at, found) for at in tracker.plan_positions)
    known = (found, tracker.sequences)
    tracker.set_masks(masks, known, found.positions, found.number, found.lengths)


def _refuse_positioned_batch(module: nn.Module) -> None:
    """Refuses a batch with positions of its requests, which its call may not have."""
    if any(isinstance(frame, BatchBase) and frame._positions for frame in frames.get(())):
        msg = (
            f"this call of {module._get_name()} belongs to a batch with positions: there, pass at= "
            "in the plan of each request (fh.on, fh.keep)"
        )
        raise HookError(msg)


def _find_untraced(*call: Any) -> None:
    _find_positions(*call)


def _note(known: tuple[Tokens, Sequences], output: Any) -> None:
    """Takes note of the KV cache that a call made."""
    tokens, sequences = known
    sequences.note(tokens, output)


# Dynamo would compile functions that the native call of a compiled region calls. Two of them, as a
# hook may be registered before Dynamo is imported: the second is then looked up in each call.
never_trace(sys.modules[__name__], "_find_positions", "native code calls it")
never_trace(sys.modules[__name__], "_note", "native code calls it")
never_trace_frame(_find_untraced, "native code calls it")

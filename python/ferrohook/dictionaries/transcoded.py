"""Changed features of transcoders, which read at one place of a model and write at another."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from ferrohook._core import to_device
from ferrohook.dictionaries.dictionary import flattened
from ferrohook.dictionaries.features import computed_in
from ferrohook.effects.parts import change_part, part_of
from ferrohook.errors import HookError, HookTypeError
from ferrohook.util.never_trace import never_trace
from ferrohook.util.texts import listed
from ferrohook.util.unfinished import leave

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from ferrohook._core import CallTokens, TokenChoice
    from ferrohook.dictionaries.features import Feature
    from ferrohook.names.places import Place


T = TypeVar("T")


class TranscodedRequest(Protocol):
    """A request whose plan changes features of transcoders."""

    transcoded: Mapping[int, dict[int, tuple[CallTokens, Tensor]]]
    """Changes of features that a running call has read and not written, with their tokens: by the
    number of the entry, and the id of the sequences."""


class TranscodedFeature:
    """Change of a transcoder's features by two hooks of a plan: `read` and `write`.

    Args:
        feature: the change.
        number: of the entry in its plan.
        reads: where the transcoder reads.
        writes: where it writes.
        condition: chooses among the tokens; None for all.
        strength: how much of the change is made, without a condition.

    Raises:
        HookTypeError: a place does not fit the transcoder, or cannot be written.
    """

    def __init__(  # noqa: PLR0913 (parts of an entry)
        self,
        feature: Feature,
        number: int,
        reads: Place,
        writes: Place,
        *,
        condition: TokenChoice | None = None,
        strength: float | None = None,
    ) -> None:
        self._feature, self._number = feature, number
        # Without their modules, which would make a reference cycle.
        self._reads, self._writes = (it._replace(module=None) for it in (reads, writes))  # type: ignore[arg-type]
        self._condition, self._strength = condition, strength
        check_places(feature, reads, writes)

    def read(
        self, request: TranscodedRequest, value: Any, places: Tensor, tokens: CallTokens
    ) -> None:
        """Reads the features of some tokens; `places`: of the tokens in the tensor there."""
        x = flattened(self._feature.dictionary, part_of(value, self._reads.part))
        x = x.flatten(0, -2).index_select(0, places)
        if self._reads.multiplier != 1:
            x = x * self._reads.multiplier
        change = self._feature._edit.change_of(x.to(computed_in(x)))
        leave(request.transcoded[self._number], tokens.sequences, (tokens, change))

    def write(
        self, request: TranscodedRequest, value: Any, places: Tensor, tokens: CallTokens
    ) -> Any:
        """Returns the value with the features of the same tokens changed.

        Raises:
            HookError: they were not read in this call.
            HookTypeError: the tensor is not as wide as the output of the transcoder.
        """
        read, change = request.transcoded[self._number].pop(tokens.sequences, (None, None))
        if change is None or read != tokens:
            msg = (
                f"{self._feature!r} changes {self._writes.shown} by features of the same tokens at "
                f"{self._reads.shown}, which has not run before it in this call"
            )
            raise HookError(msg)
        strength: Any = self._strength
        if self._condition is not None:
            acts, strengths = self._condition(request, tokens)
            if not any(acts):
                return None
            acting = torch.tensor([place for place, each in enumerate(acts) if each], device="cpu")
            if strengths is not None:
                strength = to_device(strengths[acting.to(strengths.device), None], change.device)
            acting = to_device(acting, change.device)
            places, change = places.index_select(0, acting), change.index_select(0, acting)
        if strength is not None:
            change = change * strength

        def changed(x: Tensor) -> Tensor:
            width = self._feature.width
            if x.shape[-1] != width or not x.is_floating_point():
                msg = (
                    f"{self._feature!r} writes tensors of floating point as wide as {width}, got "
                    f"{x.dtype} of {tuple(x.shape)}"
                )
                raise HookTypeError(msg)
            rows, exact = x.flatten(0, -2), computed_in(x)
            written = (
                self._feature._edit.written(change.to(x.device, exact)) / self._writes.multiplier
            )
            new = rows.index_select(0, places).to(exact) + written
            return rows.index_copy(0, places, new.to(x.dtype)).view_as(x)

        return change_part(value, self._writes.part, changed, adds=True)


def one_place(found: Mapping[str, T]) -> tuple[str, T]:
    """Returns the only place that a selector of a transcoder names, with its name.

    Raises:
        HookTypeError: there are several.
    """
    if len(found) > 1:
        msg = f"a transcoder reads and writes one place each, not {listed(found)}"
        raise HookTypeError(msg)
    return next(iter(found.items()))


def check_places(feature: Feature, reads: Place, writes: Place) -> None:
    """Validates the places of a transcoder.

    Raises:
        HookTypeError: one does not fit it, or cannot be written; or it reads later than it writes.
    """
    dictionary = feature.dictionary
    for place, width, label, last in (
        (reads, dictionary.d_in, "reads", 2),  # heads may be side by side
        (writes, feature.width, "writes", 1),
    ):
        if place.head is not None:
            msg = f"{dictionary!r} {label} {place.quantity}, a single head: not supported"
            raise HookTypeError(msg)
        shape = place.shape
        if shape is not None and width not in {shape[-1], math.prod(shape[-last:])}:
            msg = (
                f"{dictionary!r} {label} vectors of width {width}, but {place.title} has "
                f"{shape[-1]}"
            )
            raise HookTypeError(msg)
    if writes.inputs or not writes.writable:
        msg = (
            f"{dictionary!r} writes {writes.title}, which is not an output that can be changed: "
            "choose the contribution of a block, such as @mlp_out"
        )
        raise HookTypeError(msg)
    if reads.time is not None and writes.time is not None and reads.time > writes.time:
        msg = (
            f"{dictionary!r} reads {reads.title}, which runs later than {writes.title}, where it "
            "writes: choose a place that runs before"
        )
        raise HookTypeError(msg)


# Dynamo would compile functions that the native call of a compiled region calls.
never_trace(TranscodedFeature, "read", "native code calls it")
never_trace(TranscodedFeature, "write", "native code calls it")

"""A call of a model in progress."""

from __future__ import annotations

import threading
import warnings
from typing import TYPE_CHECKING, Any, ClassVar

from ferrohook._core import CallBase, active_scopes
from ferrohook.activations import _share, tensors_in
from ferrohook.errors import UnattributedWarning

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ferrohook.recording.layers import Installation


class Call(CallBase):
    """One call of a model in progress: what it records is in its native half."""

    # All of them, those that record nothing too: a layer on a helper thread is one of theirs.
    IN_PROGRESS: ClassVar[set[Call]] = set()

    def __init__(
        self,
        _installation: Installation | None,
        flags: dict[str, Any],
        _selected: list[int] | None,
        _around: Call | None,
        _given: tuple[Any, ...],
        model: nn.Module,
    ) -> None:
        self.model = model
        self.thread = threading.get_ident()
        # Those that were there before have other things to do than help.
        self.threads = threading.enumerate() if flags else []
        self.unattributed: set[str] = set()

    def knows(self, tensors: list[Tensor]) -> bool:
        """Whether it was called with one of these, or a layer of it returned it."""
        known = [*tensors_in(self.given), *self.seen()]
        return any(_share(each, tensor) for tensor in tensors if tensor.numel() for each in known)

    def tell_unattributed(self) -> None:
        """Warns of layers that ran and may be missing."""
        msg = (
            f"{', '.join(sorted(self.unattributed))} ran on a thread whose context tells of no "
            "call, and nothing else told whose it was: it was not recorded. Run such a layer "
            "with contextvars.copy_context().run"
        )
        warnings.warn(msg, UnattributedWarning, stacklevel=6)


def running(model: nn.Module | None) -> list[Call]:
    """The calls of a model in progress, but for those that wait for one of a sub-model."""
    calls = list(Call.IN_PROGRESS)
    around = {id(call.around) for call in calls}
    return [call for call in calls if call.model is model and id(call) not in around]


def innermost() -> Call | None:
    """The call that records in this context, or keeps others from it."""
    for scope in active_scopes.get():
        if type(scope) is Call:
            return scope
    return None

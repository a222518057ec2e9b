"""A call of a model in progress."""

from __future__ import annotations

import threading
import warnings
from typing import TYPE_CHECKING, Any

from ferrohook._core import CallBase, active_scopes
from ferrohook.activations import _share, tensors_in
from ferrohook.errors import UnattributedWarning

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ferrohook.recording.layers import Installation

IN_PROGRESS: set[Call] = set()
"""All calls, those that record nothing too: a layer on a helper thread is one of theirs."""


class Call(CallBase):
    """One call of a model in progress: what it records is in its native half."""

    def __init__(
        self,
        _installation: Installation | None,
        flags: dict[str, Any],
        _selected: list[int] | None,
        model: nn.Module,
        around: Call | None,
        given: tuple[Any, ...],
    ) -> None:
        self.model = model
        # The one that does not record while this one is in progress.
        self.around = around
        self.thread = threading.current_thread()
        # Those that were there before have other things to do than help.
        self.threads = threading.enumerate() if flags else []
        self.unattributed: set[str] = set()
        self._given = given
        IN_PROGRESS.add(self)

    def finish(self) -> None:
        """Records nothing from now on."""
        self.end()
        self._given = ()
        IN_PROGRESS.discard(self)
        if self.installation is not None and self.installation.retired:
            self.installation.release_when_idle()

    def knows(self, tensors: list[Tensor]) -> bool:
        """Whether it was called with one of these, or a layer of it returned it."""
        known = [*tensors_in(self._given), *self.seen()]
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
    calls = list(IN_PROGRESS)
    around = {id(call.around) for call in calls}
    return [call for call in calls if call.model is model and id(call) not in around]


def innermost() -> Call | None:
    """The call that records in this context, or keeps others from it."""
    for scope in active_scopes.get():
        if type(scope) is Call:
            return scope
    return None

"""A call of a model in progress, and what it records."""

from __future__ import annotations

import itertools
import operator
import threading
import warnings
import weakref
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from torch import nn

from ferrohook._core import Collector, Recorder, ScopeBase, active_scopes
from ferrohook.activations import (
    _BEHIND_ALL,
    _converter,
    _HostCopies,
    _share,
    map_tensors,
    tensors_in,
)
from ferrohook.errors import HookTypeError, SelectionError, UnattributedWarning
from ferrohook.instrumentation import registry_of
from ferrohook.recording.declarations import HIDDEN, OutputRecorder, unmatched

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from ferrohook.recording.declarations import Target
    from ferrohook.recording.layers import Installation

LEFT_OUT = object()
"""In place of a hidden state that was not selected."""


class States:
    """The hidden states of one call: which are kept, and what the first layer took."""

    def __init__(self, selected: frozenset[int] | None, keep: Callable[[Tensor], Tensor]) -> None:
        self.initial: list[Any] = []
        self._begun = False
        self._selected = selected
        self._keep = keep
        self._places = itertools.count()

    def begin(self, recorder: OutputRecorder, args: tuple[Any, ...], kwargs: Any) -> None:
        """Keeps what the first layer took."""
        if not self._begun:
            self._begun = True
            if recorder.capture_initial_hidden_state:
                wanted = self._selected is None or 0 in self._selected
                taken = first_of(args, kwargs)
                self.initial.append(map_tensors(self._keep, taken) if wanted else None)

    def convert(self, tensor: Tensor) -> Any:
        """The next state as it is kept."""
        place = next(self._places) + len(self.initial)
        wanted = self._selected is None or place in self._selected
        return self._keep(tensor) if wanted else LEFT_OUT


def first_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a layer takes, as far as hidden states go."""
    return args[0] if args else next(iter(kwargs.values()), None)


def picked(key: str, output: Any, index: int) -> Any:
    """What is recorded of a layer's output.

    Raises:
        SelectionError: a tuple has no such index.
    """
    if not isinstance(output, tuple):
        return output
    if not -len(output) <= index < len(output):
        msg = f'"{key}" has no output_index {index}: it is a tuple of {len(output)}'
        raise SelectionError(msg)
    return output[index]


class Call(ScopeBase):
    """One call of a model in progress: the scope of what it records, if anything.

    The innermost one of a context is the one that records there.
    """

    def __new__(cls, *_args: Any) -> Self:  # noqa: D102 (its base takes no arguments)
        return super().__new__(cls)

    def __init__(
        self, calls: set[Call], installation: Installation | None, given: tuple[Any, ...]
    ) -> None:
        # Those of the same model.
        self.calls = calls
        self.installation = installation
        # Calls of sub-models in progress, which record for themselves.
        self.inner: set[Call] = set()
        self.collectors: dict[str, Collector] = {}
        self.states: States | None = None
        self.thread = threading.current_thread()
        # Those that were there before have other things to do than help.
        self.threads: list[threading.Thread] = []
        self.unattributed: set[str] = set()
        # What its layers returned: by that a layer is known which another thread runs for it.
        self.seen: list[weakref.ref[Tensor]] = []
        self._given = given
        self._watches = False
        self._copies = _HostCopies()

    def begin(self, model: nn.Module, flags: dict[str, Any], asked: list[str]) -> None:
        """Has what was asked for recorded."""
        installation = cast("Installation", self.installation)
        plan = installation.update()
        installation.watch(more=1)
        self._watches = True
        self.threads = threading.enumerate()
        for key, flag in flags.items():
            targets = plan.targets[key]
            if not targets and key in asked:
                raise unmatched(model, key, plan.modules)
            recorder = targets[0].recorder if targets else NOTHING
            convert = _converter(self._copies, _device(recorder), recorder.dtype, None, "ref")
            if key == HIDDEN:
                selected = selected_of(model, flag, targets)
                self.states = States(selected, _keep(recorder, convert))
                convert = convert if selected is None else self.states.convert
            collector = self.collectors[key] = _collector(key, recorder, convert)
            for _, each, module in targets:
                registry_of(module).register(
                    "forward",
                    Recorder(collector, 0, False, each.index, of_tuples=True),  # noqa: FBT003 (not its inputs)
                    priority=_BEHIND_ALL,
                    scope=self,
                )

    def recorded(self) -> dict[str, tuple[Any, ...]]:
        """What was recorded, in the order of the layers' calls."""
        found = {}
        for key, collector in self.collectors.items():
            values = [value for value in collector.values(0) if value is not None]
            if key == HIDDEN and self.states is not None:
                values = [*self.states.initial, *values]
            found[key] = tuple(None if value is LEFT_OUT else value for value in values)
        self._copies.finish()
        return found

    def end(self) -> None:
        """Records nothing from now on."""
        self._close()
        for collector in self.collectors.values():
            collector.clear()
        self.calls.discard(self)
        installation = self.installation
        if installation is not None:
            if self._watches:
                installation.watch(more=-1)
            if installation.retired:
                installation.release_when_idle()

    def knows(self, tensors: list[Tensor]) -> bool:
        """Whether it was called with one of these, or a layer of it returned it."""
        seen = (reference() for reference in list(self.seen))
        known = [*tensors_in(self._given), *(each for each in seen if each is not None)]
        return any(_share(each, tensor) for tensor in tensors if tensor.numel() for each in known)

    def tell_unattributed(self) -> None:
        """Warns of layers that ran and may be missing."""
        if self.unattributed:
            msg = (
                f"{', '.join(sorted(self.unattributed))} ran on a thread whose context tells of no "
                "call, and nothing else told whose it was: it was not recorded. Run such a layer "
                "with contextvars.copy_context().run"
            )
            warnings.warn(msg, UnattributedWarning, stacklevel=6)


NOTHING = OutputRecorder(nn.Module)


def _collector(
    key: str, recorder: OutputRecorder, convert: Callable[[Tensor], Any] | None
) -> Collector:
    return Collector(
        [key],
        detach=recorder.detach,
        copy="ref",
        keep=None,
        convert=convert,
        grads=False,
        max_bytes=None,
        stop=None,
    )


def _device(recorder: OutputRecorder) -> torch.device | None:
    # "cuda" gets its number.
    return None if recorder.device is None else torch.empty(0, device=recorder.device).device


def _keep(
    recorder: OutputRecorder, convert: Callable[[Tensor], Tensor] | None
) -> Callable[[Tensor], Tensor]:
    def keep(tensor: Tensor) -> Tensor:
        tensor = tensor.detach() if recorder.detach else tensor
        return tensor if convert is None else convert(tensor)

    return keep


def selected_of(model: nn.Module, flag: Any, targets: list[Target]) -> frozenset[int] | None:
    """The places that `output_hidden_states` asks for, or None for all; others select nothing."""
    if isinstance(flag, bool):
        return None
    try:
        indices = [flag] if isinstance(flag, int) else [operator.index(each) for each in flag]
    except TypeError as error:
        msg = f"output_hidden_states is a bool, an index or a list of them, got {flag!r}"
        raise HookTypeError(msg) from error
    if min(indices, default=0) >= 0:
        return frozenset(indices)
    recorder = targets[0].recorder if targets else NOTHING
    config = getattr(model, "config", None)
    layers = getattr(config, recorder.num_hidden_layers_key, len(targets))
    count = layers + recorder.capture_initial_hidden_state
    return frozenset(index % count for index in indices if -count <= index < count)


_CALLS: weakref.WeakKeyDictionary[nn.Module, set[Call]] = weakref.WeakKeyDictionary()


def calls_of(model: nn.Module) -> set[Call]:
    """The calls of a model in progress, those that record nothing too."""
    calls = _CALLS.get(model)
    return _CALLS.setdefault(model, set()) if calls is None else calls


def innermost() -> Call | None:
    """The call that records in this context, or keeps others from it."""
    for scope in active_scopes.get():
        if type(scope) is Call:
            return scope
    return None

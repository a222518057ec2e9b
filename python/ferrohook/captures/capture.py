"""`capture`: the activations of modules of a model, for one context."""

from __future__ import annotations

import enum
import warnings
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, NoReturn, overload

from ferrohook._core import Attachment
from ferrohook.attach.instrument import attach
from ferrohook.attach.never_fired import CAPTURE_IN_THREADS, explain
from ferrohook.captures.cache import ActivationCache, V_co, cache_of
from ferrohook.captures.recorders import CaptureOptions, CapturePlace, Recorders, options_of
from ferrohook.errors import HookError, HookTypeError, NeverFiredWarning
from ferrohook.names.places import modules_of
from ferrohook.quantity import places_of
from ferrohook.registration.scopes import Scope
from ferrohook.tokens.tracking import (
    Tracker,
    encoders_in,
    is_inside,
    stacks_to_track,
    track,
    with_tokens_ahead,
)
from ferrohook.util.weak import weakly

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from typing_extensions import Unpack

    from ferrohook._core import Frame
    from ferrohook.captures.convert import Index
    from ferrohook.captures.recorders import Calls, CaptureKeywords
    from ferrohook.names.places import Place
    from ferrohook.names.select import Selector
    from ferrohook.tokens.positions import At
    from ferrohook.tokens.stacks import TokenStack


class _Stopped(enum.Enum):
    STOPPED = enum.auto()

    def __repr__(self) -> str:
        return "ferrohook.STOPPED"

    __str__ = __repr__


STOPPED: Final = _Stopped.STOPPED
"""Return value of a model's call that `capture(stop=True)` ended early."""


class CaptureSession:
    """Capture of some modules of a model: the tag of its frame."""

    ONCE = "a capture can be entered only once: call capture() again"

    def __init__(
        self, model: nn.Module, places: dict[str, Place], options: CaptureOptions, at: At
    ) -> None:
        self.model = model
        self._options = options
        self._at: At = at
        self._places = places
        self._stacks: dict[str, TokenStack | None] = {}
        if at is not None:
            self._places = {name: with_tokens_ahead(place) for name, place in places.items()}
            self._stacks = stacks_to_track(model, self._places.values())

    def begin(self, frame: Frame) -> ActivationCache:
        """Captures the calls in a scope, until it is left; the activations stay readable."""
        attachment = Attachment()
        attachment.release_with(frame)
        modules = modules_of(self._places.values())
        stacks = {path: self.model.get_submodule(path) for path in self._stacks}
        root = {"": self.model} if self._options.stop else {}
        attach(modules | root | stacks, attachment)
        tracker = None if self._at is None else Tracker(self._at, weakly(self._take_back))
        place = None if tracker is None else CapturePlace(mask=0, tracker=tracker)
        self._recorders = Recorders.begin(
            self.model, self._places, self._options, frame, place=place
        )
        track(attachment, stacks, self._stacks, scope=frame, tracker=tracker)
        return cache_of([(self._recorders, self._recorders.collector)], self.model)

    def _take_back(self, tokens: int, sequences: int) -> None:
        """Takes back captured rows of rejected drafts of sequences; `tokens`: accepted ones."""
        encoders = encoders_in(self.model)
        places = enumerate(self._places.values())
        beside = [index for index, place in places if is_inside(place.path, encoders)]
        self._recorders.collector.take_back(tokens, sequences, beside)

    def left(self, fine: bool) -> None:  # noqa: FBT001 (called from Rust)
        """Warns of modules that never ran."""
        if fine and (silent := self.silent()):
            # If none ran, the calls may have been made in other threads.
            in_threads = CAPTURE_IN_THREADS if silent == self.names else ""
            text = explain(self.model, silent, in_threads=in_threads)
            warnings.warn(text, NeverFiredWarning, stacklevel=2)

    @property
    def names(self) -> list[str]:
        """The modules' names."""
        return list(self._places)

    def clear(self) -> None:
        """Drops the activations captured so far."""
        self._recorders.collector.clear()

    def silent(self) -> list[str]:
        """Returns the names of the modules that never ran."""
        # Compiled regions count no calls; failed calls leave no activation. So look at both.
        ran = {*self._recorders.collector.ran()}
        names = enumerate(zip(self._places, self._recorders.handles, strict=True))
        return [name for index, (name, it) in names if index not in ran and not it.calls]


class Capture(Scope, Generic[V_co]):
    """A scope that captures, see `capture`; its `with` statement gives the activations."""

    _takes_hooks = False

    if TYPE_CHECKING:

        @property
        def _tag(self) -> CaptureSession: ...
        def __enter__(self) -> ActivationCache[V_co]: ...  # type: ignore[override]

    @property
    def acts(self) -> ActivationCache[V_co]:
        """The activations of a capture that is in batches instead of being entered.

        Raises:
            HookError: it was in none yet.
        """
        acts: ActivationCache[V_co] | None = self._begun
        if acts is None:
            msg = (
                "this capture has not been in a batch: use `with capture as acts:` to get the "
                "activations"
            )
            raise HookError(msg)
        return acts

    def __getitem__(self, name: object) -> NoReturn:
        msg = f"a capture cannot be indexed: use `with capture as acts:`, then acts[{name!r}]"
        raise HookTypeError(msg)

    def _no_mapping(self, *_args: object) -> NoReturn:
        msg = (
            f"{self!r} is not a mapping of activations: use `with capture as acts:`, which "
            "captures the calls inside the block and yields the mapping"
        )
        raise HookTypeError(msg)

    __iter__ = __len__ = __contains__ = _no_mapping

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            if hasattr(ActivationCache, name):
                msg = f"{self!r} has no {name}: use `with capture as acts:`, then acts.{name}"
                raise AttributeError(msg, name=name, obj=self)
            msg = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise AttributeError(msg, name=name, obj=self)

    def __bool__(self) -> bool:
        return True  # not by `__len__`

    def __repr__(self) -> str:
        state = "not entered: it captures inside `with`"
        if self.closed:
            state = "left"
        elif self._entered is not None or self._begun is not None:
            state = "entered"
        session = self._tag
        names, model = len(session.names), session.model._get_name()
        return f"<Capture of {names} module{'s'[: names != 1]} of {model}, {state}>"


@overload
def capture(
    model: nn.Module,
    what: Selector = None,
    *,
    calls: Literal["last"] = "last",
    **options: Unpack[CaptureKeywords],
) -> Capture[Tensor]: ...
@overload
def capture(
    model: nn.Module,
    what: Selector = None,
    *,
    calls: int | Literal["all"],
    **options: Unpack[CaptureKeywords],
) -> Capture[list[Tensor]]: ...
def capture(  # noqa: PLR0913 (all but the first two by keyword)
    model: nn.Module,
    what: Selector = None,
    *,
    at: At = None,
    inputs: bool = False,
    output_index: object = None,
    detach: bool = True,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    slice: Index = None,  # noqa: A002 (the field's term)
    copy: Literal["checked", "clone", "ref"] = "checked",
    calls: Calls = "last",
    grads: bool = False,
    max_bytes: int | None = None,
    stop: bool = False,
) -> Capture[Any]:
    """Captures the activations of modules of a model, for the calls of this context.

    A context manager that returns an `ActivationCache`, readable inside the block and after it.
    Modules are instrumented for the duration of the block. Hooks run first: the capture sees their
    result. Leaving warns with `NeverFiredWarning` of modules that never ran.

    Args:
        model: any module.
        what: modules to capture, see `select`; None for all. Containers (ModuleList) are left out.
            Or names of quantities, as `"@resid_post.*"`, see `quantities`.
        at: positions of tokens to capture, see `At`: tensors of (tokens, ...); None for all. Under
            `torch.compile` it breaks the graph. In a batch with positions use a plan's `keep`.
        inputs: capture inputs instead of outputs: the single positional argument or the tuple of
            them, or the dict of keywords if there are no positional arguments.
        output_index: key, index or attribute of the captured value, to capture only that part, or a
            tuple of them for a nested part; `"sum"` for the sum of the hidden state and residual
            that a layer returns as a pair.
        detach: detach the tensors from autograd's graph.
        device: move the tensors to this device. Copies from a GPU to the CPU run asynchronously
            into pinned memory, and reading waits for them; beyond 1 GiB of them the host waits.
        dtype: cast floating-point tensors to this dtype.
        slice: part of each tensor to capture, as in `tensor[slice]`. A sliced `PackedSequence` is
            captured as the tensor of the data that the slice leaves. With `at`, the first dimension
            has the chosen tokens, and the slice keeps it whole.
        copy: `checked` stores a reference, and reading it raises `StaleActivationError` after a
            write in place; `clone` copies; `ref` stores a reference without that check. `checked`
            copies inference tensors, which have no version, and tensors in compiled regions, where
            buffers are reused. It does not see writes through `.data`, `.numpy()` or the storage,
            which change no version: use `clone` there.
        calls: calls of each module to store: the `last` one, `all`, or an int for that many of the
            latest.
        grads: capture the tensors' gradients too, in `ActivationCache.grads`: the sum over all
            backward passes.
        max_bytes: limit for all tensors together. The call that would exceed it raises
            `CaptureBudgetError`; earlier activations stay readable.
        stop: end each call of the model once all modules have run; the call returns `STOPPED`.

    Raises:
        SelectionError: `what` matches nothing, or only containers, which are never called.
        HookError: `at` where no tokens run, as in a model of images.
        HookTypeError: an option has the wrong type.
        ValueError: an unknown `copy` or `calls`, or a `max_bytes`, `calls` or a step of `slice`
            below 1.
        RuntimeError: `device` is not a device or not available.
        HookError: when entered, if a module cannot be instrumented; or entered for the second time,
            or left in a context that did not enter it.

    Examples:
        >>> with fh.capture(model, "layers.*.mlp", max_bytes=2**30) as acts:
        ...     model(ids)
        >>> acts["layers.0.mlp"].shape
    """
    places = places_of(model, what, inputs=inputs, output_index=output_index)
    options = options_of(
        at=at,
        inputs=inputs,
        output_index=output_index,
        detach=detach,
        device=device,
        dtype=dtype,
        slice=slice,
        copy=copy,
        calls=calls,
        grads=grads,
        max_bytes=max_bytes,
        stop=stop,
    )
    return Capture(CaptureSession(model, places, options, at))

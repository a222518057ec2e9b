"""`capture`: the activations of modules of a model, for one context."""

from __future__ import annotations

import enum
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn, Self

import torch
from torch import Tensor

from ferrohook import shards
from ferrohook.capture_session import Activations, CaptureSession, not_captured, options_of
from ferrohook.errors import HookError, HookTypeError, NeverFiredWarning, SelectionError
from ferrohook.never_fired import CAPTURE_IN_THREADS, explain
from ferrohook.scopes import Scope
from ferrohook.selection import select, select_names
from ferrohook.tables import as_frame, as_html, as_text, rows_of
from ferrohook.tensors import map_tensors, nbytes, tensors_in

if TYPE_CHECKING:
    import os

    import pandas as pd
    from torch import nn

    from ferrohook._core import Frame
    from ferrohook.capture_session import Calls
    from ferrohook.conversion import Index
    from ferrohook.selection import Selector
    from ferrohook.tables import Row


class _Stopped(enum.Enum):
    STOPPED = enum.auto()

    def __repr__(self) -> str:
        return "ferrohook.STOPPED"

    __str__ = __repr__


STOPPED: Final = _Stopped.STOPPED
"""Return value of a model's call that `capture(stop=True)` ended early."""


class _NoGradients(dict[str, Any]):
    def __missing__(self, name: str) -> Any:
        msg = "no gradients were captured: open the capture with grads=True"
        raise SelectionError(msg)


class ActivationCache(Mapping[str, Any]):
    """Captured activations by module name, in the order in which the modules first ran.

    A value is a module's output (or input) in its own structure, its tensors converted as the
    options of `capture` say. With `calls="all"` or an int it is a list: one entry per call.

    Copies and pickles include the values, cut from autograd's graph; a value that was changed in
    place raises `StaleActivationError` there.

    Args:
        activations: values by module name.
        grads: gradients by module name; None if they were not captured.
        model: name of the model, printed for the module of the empty path.
        per_call: True if a value is a list with an entry per call.
    """

    def __init__(
        self,
        activations: Mapping[str, Any],
        grads: Mapping[str, Any] | None = None,
        *,
        model: str = "",
        per_call: bool = False,
    ) -> None:
        self._activations = activations
        self._grads = grads
        self._model = model
        self._per_call = per_call

    def __getitem__(self, name: str) -> Any:
        """Returns the activations of one module; of the model by `""` or by its name in tables.

        Raises:
            SelectionError: no module of that name was selected, or it never ran.
            StaleActivationError: a tensor was changed in place after the capture.
        """
        if name and name == self._model and name not in self and "" in self:
            name = ""  # as tables print it
        try:
            return self._activations[name]
        except SelectionError:
            raise
        except KeyError:
            raise not_captured(name, "is not among", self) from None

    def __contains__(self, name: object) -> bool:
        # `Mapping` would read the value, which raises for a stale one.
        return name in self._activations

    def __iter__(self) -> Iterator[str]:
        return iter(self._activations)

    def __len__(self) -> int:
        return len(self._activations)

    @property
    def grads(self) -> ActivationCache:
        """The gradients of the captured tensors, so far; empty without `capture(grads=True)`.

        A value is a tensor, or None if no gradient arrived. For a structure it is a list with one
        entry per tensor.
        """
        grads = _NoGradients() if self._grads is None else self._grads
        return ActivationCache(grads, model=self._model, per_call=self._per_call)

    @property
    def model(self) -> str:
        """Name of the model, printed for the module of the empty path; "" if it is unknown."""
        return self._model

    @property
    def nbytes(self) -> int:
        """Total size of the tensors, in bytes."""
        return sum(nbytes(tensor) for name in self for tensor in tensors_in(self._peek(name)))

    def _peek(self, name: str) -> Any:
        # For sizes and shapes alone, so stale tensors are fine.
        source = self._activations
        return source.peek(name) if isinstance(source, Activations) else source[name]

    def stack(self, pattern: str | re.Pattern[str] = "**") -> Tensor:
        """Stacks the tensors of several modules along a new first dimension.

        Args:
            pattern: a name, a glob or a compiled regex, see `select`.

        Raises:
            SelectionError: the pattern matches none of the names.
            HookTypeError: `pattern` is none of these.
            RuntimeError: the shapes differ.
        """
        names = self._matching(pattern, "stack")
        return torch.stack([tensor for name in names for tensor in tensors_in(self[name])])

    def _matching(self, pattern: str | re.Pattern[str], taker: str) -> list[str]:
        if not isinstance(pattern, str | re.Pattern):
            msg = f"{taker} takes a name, a glob or a compiled regex, got {type(pattern).__name__}"
            raise HookTypeError(msg)
        names = select_names(self, pattern)
        if not names:
            captured = ", ".join(map(repr, self)) or "nothing"
            msg = f"{pattern!r} matches no captured module: {captured}"
            raise SelectionError(msg)
        return names

    def to(self, device: torch.device | str) -> ActivationCache:
        """Returns a cache on another device; tensors that are there already are shared."""
        return self._map(lambda tensor: tensor.to(device))

    def _map(self, convert: Callable[[Tensor], Tensor]) -> ActivationCache:
        def converted(values: Mapping[str, Any]) -> dict[str, Any]:
            return {name: map_tensors(convert, value) for name, value in values.items()}

        return ActivationCache(
            converted(self._activations),
            None if self._grads is None else converted(self._grads),
            model=self._model,
            per_call=self._per_call,
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the cache to a safetensors file, replacing one that exists.

        Tuples, lists and dicts keep their structure; other classes are saved as dicts.

        Raises:
            HookTypeError: a value is neither plain data nor a tensor of a dtype that safetensors
                supports.
        """
        content = {
            "activations": dict(self),
            "grads": None if self._grads is None else dict(self._grads),
            "model": self._model,
            "per_call": self._per_call,
        }
        shards.save(path, content)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads a file that `save` wrote, onto the CPU.

        Needs the package safetensors.
        """
        return cls(**shards.load(path))

    def rows(
        self, pattern: str | re.Pattern[str] | None = None, *, stale: bool = False
    ) -> Iterator[Row]:
        """Yields a row for each captured tensor, and for each part of a value without tensors.

        Args:
            pattern: a name, a glob or a compiled regex, see `select`; None for all.
            stale: yield values changed in place too, instead of raising.

        Raises:
            SelectionError: the pattern matches none of the names.
            HookTypeError: `pattern` is none of these.
            StaleActivationError: a value was changed in place.
        """
        for name in self if pattern is None else self._matching(pattern, "rows"):
            value = self._peek(name) if stale else self[name]
            yield from rows_of(name, value, per_call=self._per_call)

    def to_pandas(self) -> pd.DataFrame:
        """Makes a DataFrame with a line for each captured tensor.

        Columns: `name`, `call` (index among the captured calls), `part` (place in a structure),
        `shape`, `dtype`, `bytes`, and `norm` (L2 norm along the last dimension, averaged), `mean`,
        `std`, `min`, `max` and `nonfinite` (count of NaN and infinities); of complex numbers, those
        of their absolute values.

        Raises:
            StaleActivationError: a value was changed in place.
            HookError: the package pandas is not installed.
        """
        return as_frame(self.rows())

    def __repr__(self) -> str:
        return as_text(self.rows(stale=True), self._model)

    def _repr_html_(self) -> str:
        return as_html([*self.rows(stale=True)], self._model, self.__getitem__)


def begin_capture(session: CaptureSession, scope: Frame) -> ActivationCache:
    """Captures the calls in a scope, until it is left; the activations stay readable."""
    return ActivationCache(
        *session.begin(scope), model=session.model._get_name(), per_call=session.per_call
    )


class _CaptureTag:
    """The tag of a capture's frame."""

    ONCE = "a capture is entered once: call capture() again for another"

    def __init__(self, session: CaptureSession) -> None:
        self.session = session

    def begin(self, frame: Frame) -> ActivationCache:
        return begin_capture(self.session, frame)

    def left(self, fine: bool) -> None:  # noqa: FBT001 (called from Rust)
        if fine and (silent := self.session.silent()):
            # If none ran, the calls may have been made in other threads.
            in_threads = CAPTURE_IN_THREADS if silent == self.session.names else ""
            text = explain(self.session.model, silent, in_threads=in_threads)
            warnings.warn(text, NeverFiredWarning, stacklevel=2)


class Capture(Scope):
    """A scope that captures, see `capture`; its `with` statement gives the activations."""

    if TYPE_CHECKING:

        @property
        def tag(self) -> _CaptureTag: ...  # noqa: D102 (for checkers)
        def __enter__(self) -> ActivationCache: ...  # type: ignore[override]

    @property
    def acts(self) -> ActivationCache:
        """The activations of a capture that is in batches instead of being entered.

        Raises:
            HookError: it was in none yet.
        """
        acts: ActivationCache | None = self._begun
        if acts is None:
            msg = "this capture was in no batch: `with capture as acts:` gives the activations"
            raise HookError(msg)
        return acts

    def __getitem__(self, name: object) -> NoReturn:
        msg = f"`with capture as acts:` gives the activations, then acts[{name!r}]"
        raise HookTypeError(msg)

    def _no_mapping(self, *_args: object) -> NoReturn:
        msg = (
            f"{self!r} is no mapping of activations: `with capture as acts:` captures the calls "
            "inside the block, and gives one"
        )
        raise HookTypeError(msg)

    __iter__ = __len__ = __contains__ = _no_mapping

    def __bool__(self) -> bool:
        return True  # not by `__len__`

    def __repr__(self) -> str:
        state = "not entered: it captures inside `with`"
        if self.closed:
            state = "left"
        elif self._entered is not None or self._begun is not None:
            state = "entered"
        session = self.tag.session
        names, model = len(session.names), session.model._get_name()
        return f"<Capture of {names} module{'s'[: names != 1]} of {model}, {state}>"


def capture(  # noqa: PLR0913 (all but the first two by keyword)
    model: nn.Module,
    what: Selector = None,
    *,
    inputs: bool = False,
    output_index: object = None,
    detach: bool = True,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    slice: Index = None,  # noqa: A002 (what the field calls it)
    copy: Literal["checked", "clone", "ref"] = "checked",
    calls: Calls = "last",
    grads: bool = False,
    max_bytes: int | None = None,
    stop: bool = False,
) -> Capture:
    """Captures the activations of modules of a model, for the calls of this context.

    A context manager that returns an `ActivationCache`, readable inside the block and after it.
    Modules are instrumented for the duration of the block. Hooks run first: the capture sees their
    result. Leaving warns with `NeverFiredWarning` of modules that never ran.

    Args:
        model: any module.
        what: modules to capture, see `select`; None for all. Containers (ModuleList) are left out.
        inputs: capture inputs instead of outputs: the single positional argument or the tuple of
            them, or the dict of keywords if there are no positional arguments.
        output_index: key, index or attribute of the captured value, to capture that part alone;
            `"sum"` for the sum of the hidden state and residual that a layer returns as a pair.
        detach: detach the tensors from autograd's graph.
        device: move the tensors to this device. Copies from a GPU to the CPU run asynchronously
            into pinned memory; reading waits for them.
        dtype: cast floating-point tensors to this dtype.
        slice: part of each tensor to capture, as in `tensor[slice]`.
        copy: `checked` stores a reference, and reading it raises `StaleActivationError` after a
            write in place; `clone` copies; `ref` stores a reference without that check. `checked`
            copies inference tensors, which have no version, and tensors in compiled regions, where
            buffers are reused.
        calls: calls of each module to store: the `last` one, `all`, or an int for that many of the
            latest.
        grads: capture the tensors' gradients too, in `ActivationCache.grads`.
        max_bytes: limit for all tensors together. The call that would exceed it raises
            `CaptureBudgetError`; earlier activations stay readable.
        stop: end each call of the model once all modules have run; the call returns `STOPPED`.

    Raises:
        SelectionError: `what` matches nothing, or containers alone, which are never called.
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
    modules = select(model, what, called=True)
    options = options_of(
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
    return Capture(_CaptureTag(CaptureSession(model, modules, options)))

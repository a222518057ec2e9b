"""`capture`: keeps the activations that pass modules of a model."""

from __future__ import annotations

import enum
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TypeAlias

import torch
from torch import Tensor

from ferrohook import shards
from ferrohook.arguments import at_least_one, check_copy, expect
from ferrohook.capture_session import Activations, CaptureSession, Options, not_captured
from ferrohook.conversion import check_index, converter
from ferrohook.errors import HookTypeError, NeverFiredWarning, SelectionError
from ferrohook.host_copies import HostCopies
from ferrohook.never_fired import explain
from ferrohook.scopes import Scope
from ferrohook.selection import select, select_names
from ferrohook.tensors import map_tensors, tensors_in

if TYPE_CHECKING:
    import os

    from torch import nn

    from ferrohook._core import Frame
    from ferrohook.conversion import Index
    from ferrohook.selection import Selector

Keep: TypeAlias = 'Literal["last", "all"] | int'


class _Stopped(enum.Enum):
    STOPPED = enum.auto()

    def __repr__(self) -> str:
        return "ferrohook.STOPPED"

    __str__ = __repr__


STOPPED: Final = _Stopped.STOPPED
"""What a model's call returns that was ended after the last module wanted."""


class ActivationCache(Mapping[str, Any]):
    """Activations by the names of their modules, in the order in which those first ran.

    A value is what the module returned (or took), with its structure, tensors as they were asked
    for. With `keep="all"` or a number it is a list, with an entry for each call that was kept.
    """

    def __init__(
        self,
        activations: Mapping[str, Any],
        grads: Mapping[str, Any] | None = None,
    ) -> None:
        """Shows `activations` and their gradients."""
        self._activations = activations
        self._grads = {} if grads is None else grads

    def __getitem__(self, name: str) -> Any:
        """The activations of one module.

        Raises:
            SelectionError: no module of that name was selected, or it never ran.
            StaleActivationError: a tensor was changed in place after it was captured.
        """
        try:
            return self._activations[name]
        except SelectionError:
            raise
        except KeyError:
            raise not_captured(name, "is not among", self) from None

    def __contains__(self, name: object) -> bool:
        # Without reading: what was changed in place is there too.
        return name in self._activations

    def __iter__(self) -> Iterator[str]:
        return iter(self._activations)

    def __len__(self) -> int:
        return len(self._activations)

    @property
    def grads(self) -> ActivationCache:
        """The gradients of the captured tensors, so far (`capture(grads=True)`).

        A tensor's is a tensor, or None where none came; that of a structure is a list with an entry
        for each of its tensors.
        Empty where gradients were not asked for.
        """
        return ActivationCache(self._grads)

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(tensor.nbytes for name in self for tensor in tensors_in(self._peek(name)))

    def _peek(self, name: str) -> Any:
        # To be described, not to be computed with: stale ones too.
        source = self._activations
        return source.peek(name) if isinstance(source, Activations) else source[name]

    def stack(self, pattern: str | re.Pattern[str] = "**") -> Tensor:
        """The tensors of several modules as one, along a new first dimension.

        Args:
            pattern: a name, a glob or a compiled regex, see `select`.

        Raises:
            SelectionError: the pattern matches none of the names.
            HookTypeError: `pattern` is none of these.
            RuntimeError: the shapes differ.
        """
        if not isinstance(pattern, str | re.Pattern):
            msg = f"stack takes a name, a glob or a compiled regex, got {type(pattern).__name__}"
            raise HookTypeError(msg)
        names = select_names(self, pattern)
        if not names:
            msg = f"{pattern!r} matches none of what was captured: {', '.join(self) or 'nothing'}"
            raise SelectionError(msg)
        return torch.stack([tensor for name in names for tensor in tensors_in(self[name])])

    def to(self, device: torch.device | str) -> ActivationCache:
        """The same on another device; the tensors that are there already are shared."""
        return self._map(lambda tensor: tensor.to(device))

    def _map(self, convert: Callable[[Tensor], Tensor]) -> ActivationCache:
        def converted(values: Mapping[str, Any]) -> dict[str, Any]:
            return {name: map_tensors(convert, value) for name, value in values.items()}

        return ActivationCache(converted(self._activations), converted(self._grads))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes all to a file in the format of safetensors, which replaces one that is there.

        Tuples, lists and dicts keep their structure; other classes are saved as dicts.

        Raises:
            HookTypeError: a value that is neither plain data nor a tensor of a type that
                safetensors has a name for.
        """
        shards.save(path, {"activations": dict(self), "grads": dict(self._grads)})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """What `save` wrote, on the CPU.

        Needs the package safetensors (`ferrohook[safetensors]`).
        """
        return cls(**shards.load(path))

    def __repr__(self) -> str:
        rows = [("name", "shape", "dtype", "bytes")]
        for name in self:
            value = self._peek(name)
            rows += [
                (name, str(tuple(tensor.shape)), str(tensor.dtype)[6:], f"{tensor.nbytes:,}")
                for tensor in tensors_in(value)
            ] or [(name, "-", type(value).__name__, "-")]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            f"{name:<{widths[0]}}  {shape:<{widths[1]}}  {dtype:<{widths[2]}}  {size:>{widths[3]}}"
            for name, shape, dtype, size in rows
        ]
        return "\n".join(line.rstrip() for line in lines)


class _CaptureTag:
    """The tag of a capture's frame."""

    ONCE = "a capture is entered once: call capture() again for another"

    def __init__(self, session: CaptureSession) -> None:
        self.session = session

    def begin(self, frame: Frame) -> ActivationCache:
        return ActivationCache(*self.session.begin(frame))

    def left(self, fine: bool) -> None:  # noqa: FBT001 (called from Rust)
        if fine and (silent := self.session.silent()):
            text = explain(self.session.model, silent)
            warnings.warn(text, NeverFiredWarning, stacklevel=2)


class Capture(Scope):
    """A scope that captures, see `capture`; its `with` statement gives the activations."""

    if TYPE_CHECKING:

        @property
        def tag(self) -> _CaptureTag: ...  # noqa: D102 (for checkers)
        def __enter__(self) -> ActivationCache: ...  # type: ignore[override]


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
    keep: Keep = "last",
    grads: bool = False,
    max_bytes: int | None = None,
    stop: bool = False,
) -> Capture:
    """Keeps the activations that pass modules of a model, for the calls of this context.

    A context manager that gives an `ActivationCache`, to be read inside and after. Modules that are
    not instrumented are, for as long as it is open. What is captured is what leaves the hooks.
    Leaving it warns with `NeverFiredWarning` of modules that never ran.

    Args:
        model: any module.
        what: which of its modules, see `select`; None for all.
        inputs: capture what the modules take instead of what they return: the single positional
            argument or the tuple of them; the dict of keyword arguments where there are no others.
        output_index: the key, the index or the name of the attribute of what is captured.
        detach: from autograd's graph.
        device: where the tensors are moved to. Copies from a GPU to the CPU go to pinned memory
            beside what the GPU computes, and are waited for when they are read.
        dtype: what tensors of floating point are cast to.
        slice: what part of each tensor is kept, as in `tensor[slice]`.
        copy: `checked` keeps a reference, and reading one that was changed in place raises
            `StaleActivationError`; `clone` copies; `ref` keeps a reference, whatever becomes of it.
            Inference tensors, which count no changes, are copied by `checked`. So are all tensors
            in compiled regions, where buffers are reused.
        keep: the `last` call of each module, `all` of them, or that many of the last.
        grads: keep the gradients of the tensors too, in `ActivationCache.grads`.
        max_bytes: of all tensors together; the call that would exceed it raises
            `CaptureBudgetError`, and what was captured stays readable.
        stop: end each call of the model in which all modules have run; it returns `STOPPED`.

    Raises:
        SelectionError: `what` matches nothing.
        HookTypeError: an option of the wrong type.
        ValueError: an unknown `copy` or `keep`, or a `max_bytes`, a `keep` or a step of `slice`
            below 1.
        RuntimeError: `device` is none, or not there.
        HookError: when entered, if a module cannot be instrumented; or entered for the second time,
            or left where it was not entered.

    Examples:
        >>> with fh.capture(model, "layers.*.mlp", max_bytes=2**30) as acts:
        ...     model(ids)
        >>> acts["layers.0.mlp"].shape
    """
    modules = select(model, what)
    check_copy(copy)
    flags = {"inputs": inputs, "detach": detach, "grads": grads, "stop": stop}
    for name, flag in flags.items():
        expect(flag, bool, f"{name} is a bool")
    if isinstance(output_index, bool):
        expect(output_index, (), "output_index is an int, a key or the name of an attribute")
    if dtype is not None:
        expect(dtype, torch.dtype, "dtype is a torch.dtype")
    check_index(slice)
    copies = HostCopies()
    # Made on it: one that is not there is refused here, and "cuda" gets its number.
    target = None if device is None else torch.empty(0, device=device).device
    options = Options(
        inputs=inputs,
        output_index=output_index,
        stop=stop,
        only_last=keep == "last",
        copies=copies,
        collector={
            "detach": detach,
            "copy": copy,
            "keep": _how_many(keep),
            "convert": converter(copies, target, dtype, slice, copy),
            "grads": grads,
            "max_bytes": None if max_bytes is None else at_least_one("max_bytes", max_bytes),
        },
    )
    return Capture(_CaptureTag(CaptureSession(model, modules, options)))


def _how_many(keep: Any) -> int | None:
    if isinstance(keep, str):
        if keep in _NAMED:
            return _NAMED[keep]
        msg = f"keep is 'last', 'all' or a number of calls, got {keep!r}"
        raise ValueError(msg)
    return at_least_one("keep", keep, "'last', 'all' or a number of calls")


_NAMED = {"last": 1, "all": None}

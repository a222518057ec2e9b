"""`ActivationCache`: captured activations by module name."""

from __future__ import annotations

import re
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, overload

import torch
from torch import Tensor

from ferrohook._core import CacheBase
from ferrohook.captures import tensor_files
from ferrohook.captures.captured import CapturedView, Gradients, not_captured
from ferrohook.errors import HookError, SelectionError
from ferrohook.names.select import select_names
from ferrohook.util.arguments import expect
from ferrohook.util.tables import as_frame, as_html, as_text, rows_of
from ferrohook.util.tensors import map_tensors, nbytes, padded, tensors_in
from ferrohook.util.texts import MODEL

if TYPE_CHECKING:
    import os

    import pandas as pd
    from torch import nn
    from typing_extensions import TypeVar as TypeVarWithDefault

    from ferrohook._core import Collector
    from ferrohook.captures.recorders import Recorders
    from ferrohook.util.tables import Row

    V_co = TypeVarWithDefault("V_co", covariant=True, default=Any)
else:
    V_co = TypeVar("V_co", covariant=True)


class _Names(KeysView[str]):
    def __repr__(self) -> str:
        return f"names of captured values: {', '.join(map(repr, self)) or 'none'}"


class _Values(ValuesView[Any]):
    def __repr__(self) -> str:
        return f"captured values:\n{self._mapping!r}"  # type: ignore[attr-defined]


class _Items(ItemsView[str, Any]):
    def __repr__(self) -> str:
        return f"names and captured values:\n{self._mapping!r}"  # type: ignore[attr-defined]


class ActivationCache(CacheBase, Mapping[str, V_co]):
    """Captured activations by module name, in the order in which the modules first ran.

    A value has the structure of the module's output (or input); its tensors are converted as the
    options of `capture` say. With `calls="all"` or an int it is a list: one entry per call.

    For type checkers a value is a tensor, as most modules return one, or a list of tensors. Cast
    other values, such as `acts[""]`, the value of the model itself.

    Copies and pickles include the values, cut from autograd's graph. Making one raises
    `StaleActivationError` if a value was changed in place.

    Args:
        activations: values by module name.
        grads: gradients by module name; None if they were not captured.
        model: name of the model.
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
        del activations  # the base has them
        self._grads = grads
        self._model = model
        self._per_call = per_call

    if TYPE_CHECKING:

        @overload
        def __getitem__(self, name: Literal[""], /) -> Any: ...
        @overload
        def __getitem__(self, name: str, /) -> V_co: ...
        def __getitem__(self, name: str, /) -> Any: ...

    def _missing(self, name: str, error: KeyError) -> Any:
        """Returns the value of the model by its name in tables; called for names without a value.

        Raises:
            SelectionError: no module of that name was selected, or it never ran.
        """
        if name == MODEL and "" in self:
            return self._activations[""]
        if isinstance(error, SelectionError):
            raise error
        raise not_captured(name, self) from None

    def __getnewargs__(self) -> tuple[Any, ...]:
        return (self._activations,)

    def __contains__(self, name: object) -> bool:
        # `Mapping` would read the value, which raises for a stale one.
        return name in self._activations

    def __iter__(self) -> Iterator[str]:
        return iter(self._activations)

    def __len__(self) -> int:
        return len(self._activations)

    def keys(self) -> KeysView[str]:
        """The names."""
        return _Names(self)

    def values(self) -> ValuesView[V_co]:
        """The values; reading one raises if it was changed in place."""
        return _Values(self)

    def items(self) -> ItemsView[str, V_co]:
        """Pairs of name and value."""
        return _Items(self)

    @property
    def grads(self) -> ActivationCache:
        """The gradients of the captured tensors that have arrived so far.

        A value is a tensor. For a structure it is a list with one entry per tensor, and for several
        calls a list with one per call; None in it for one that no gradient reached. Reading a name
        that has none raises `SelectionError` with the reason: captured without `grads=True`, not
        recorded by autograd, no backward yet, or none that reached it.
        """
        return ActivationCache(
            Gradients(self._grads, self._activations), model=self._model, per_call=self._per_call
        )

    @property
    def model(self) -> str:
        """Name of the model, printed for the module of the empty path; "" if it is unknown."""
        return self._model

    @property
    def nbytes(self) -> int:
        """Total size of the tensors, in bytes."""
        return sum(nbytes(tensor) for name in self for tensor in tensors_in(self._unchecked(name)))

    def _unchecked(self, name: str) -> Any:
        # Only for sizes and shapes, so stale tensors are fine.
        source = self._activations
        return (
            source.unchecked(name) if isinstance(source, CapturedView | Gradients) else source[name]
        )

    def stack(self, pattern: str | re.Pattern[str] = "**") -> Tensor:
        """Stacks the tensors of several modules along a new first dimension.

        Nested tensors are padded: NaN stands where a sequence has no token.

        Args:
            pattern: a name, a glob or a compiled regex, see `select`.

        Raises:
            SelectionError: the pattern matches none of the names.
            HookTypeError: `pattern` is none of these, or a nested tensor has no floating point.
            RuntimeError: the shapes differ.
        """
        names = self._matching(pattern, "stack")
        return torch.stack([padded(tensor) for name in names for tensor in tensors_in(self[name])])

    def _matching(self, pattern: str | re.Pattern[str], taker: str) -> list[str]:
        expect(pattern, str | re.Pattern, f"{taker} needs a name, a glob or a compiled regex")
        names = select_names(self, pattern)
        if not names:
            captured = ", ".join(map(repr, self)) or "nothing"
            msg = f"{pattern!r} matches no captured module; captured: {captured}"
            raise SelectionError(msg)
        return names

    def to(self, device: torch.device | str) -> ActivationCache[V_co]:
        """Returns a cache on another device; tensors that are there already are shared."""
        return self._map(lambda tensor: tensor.to(device))

    def _map(self, convert: Callable[[Tensor], Tensor]) -> ActivationCache[V_co]:
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
        tensor_files.save(path, content)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads a file that `save` wrote, onto the CPU.

        Needs the package safetensors.
        """
        return cls(**tensor_files.load(path))

    def positions(self, name: str) -> list[int]:
        """Returns the positions of the tokens of a captured value, one for each row, in order.

        Known for captures at positions (`at=`), and for requests in batches with positions. With
        several sequences, the positions of the first one come first, then the next one's.

        Raises:
            SelectionError: no module of this name was selected.
            HookError: the positions of a captured call are not known, or it is a copy, which has
                the values only.
        """
        find = getattr(self._activations, "positions", None)
        tokens: list[int] | None = None if find is None else find(name)
        if tokens is not None:
            return tokens
        msg = (
            f"the positions of {name!r} are not known: capture with at= and calls='last', or pass "
            "positions to the batch"
        )
        raise HookError(msg)

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
            value = self._unchecked(name) if stale else self[name]
            source = self._activations
            counts = source.counts_of(name) if isinstance(source, CapturedView) else (1, 0)
            yield from rows_of(name, value, per_call=self._per_call, counts=counts)

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
        return as_text(self.rows(stale=True))

    def _repr_html_(self) -> str:
        return as_html([*self.rows(stale=True)], self.__getitem__)


def cache_of(
    recorded: Iterable[tuple[Recorders, Collector]],
    model: nn.Module | None,
    reason: Callable[[], str] = str,
) -> ActivationCache:
    """Makes the cache of what recorders of a model stored into collectors.

    Args:
        recorded: the recorders and their collectors.
        model: the model, for its name.
        reason: returns why modules may not have run, for errors.
    """
    pairs = [*recorded]
    grads = [each.part(at, grads=True) for each, at in pairs if each.options.collector["grads"]]
    return ActivationCache(
        CapturedView([each.part(at) for each, at in pairs], reason),
        CapturedView(grads) if grads else None,
        model="" if model is None else model._get_name(),
        per_call=bool(pairs) and not any(each.options.only_last for each, _ in pairs),
    )

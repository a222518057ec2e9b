"""`collect`: runs a model over batches and stores activations of its modules."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from ferrohook.arguments import describe
from ferrohook.errors import HookError, HookTypeError, NeverFiredWarning, StoreError
from ferrohook.never_fired import explain
from ferrohook.scopes import Scope
from ferrohook.sources import CapturedOutputs, Collectable, Source, source_of
from ferrohook.stores import Store

if TYPE_CHECKING:
    from ferrohook.selection import Selector


Detectors: TypeAlias = "Selector | Collectable | Iterable[Selector | Collectable]"


class Collected(NamedTuple):
    """Counts of one call of `collect`."""

    batches: int
    """Number of batches that it ran and stored."""
    skipped: int
    """Number of batches that were complete before."""


def collect(  # noqa: PLR0913 (the options by keyword)
    model: nn.Module,
    batches: Iterable[Any],
    detectors: Detectors,
    store: Store,
    *,
    run: str = "run",
    forward: Callable[[Any], object] | None = None,
    progress: bool = True,
) -> Collected:
    """Runs a model over batches and stores activations of its modules.

    Runs in inference mode; calling `model.eval()` is left to the caller. Each batch is stored as a
    whole: if an error or Ctrl-C ends the loop, all batches before are complete in the store, and
    the same call with the same batches resumes behind them. The store stays open.

    A `NeverFiredWarning` lists selected modules that never ran.

    Args:
        model: any module.
        batches: inputs of the model: its keyword arguments as a mapping, its arguments as a tuple
            or a list, or its only argument. Their order numbers them.
        detectors: modules whose outputs to store, see `select`; or detectors of
            `ferrohook.interventions`; or a list, tuple or set of both. A module's output tensor is
            stored as `output`, tensors of a structure as `output.0` or `output.name`; a module's
            second call in a batch has `output#1` in place of `output`. A detector's
            `tensor_metadata` is stored under the path of its layer and cleared after each batch. A
            detector on no layer is registered on that of its `layer_signature` meanwhile.
        store: the store for the tensors.
        run: name of the run in the store.
        forward: runs one batch; None calls the model.
        progress: show a progress bar, if stderr is a terminal and rich or tqdm is installed.

    Raises:
        SelectionError: a selector matches no module.
        HookTypeError: an argument has the wrong type.
        HookError: two detectors collected tensors of the same layer and name; one has no
            `layer_signature`, or another store of its own; one raised.
        StoreError: the store is closed, read only or failed to write.

    Examples:
        >>> with LocalStore("activations") as store:
        ...     collect(model, batches, "encoder.layer.*", store)
        >>> store.get("run", 0, "encoder.layer.0")["output"].shape
    """
    _check(model, batches, store, forward)
    sources = _sources(model, detectors, store)
    done = {*store.completed(run)}
    call = forward or _caller(model)
    ran = skipped = 0
    bar = _progress(batches, run) if progress else _no_progress()
    # Leaving the scope removes every hook, even if Ctrl-C interrupts the loop anywhere.
    with Scope() as scope, _attached(sources, scope), bar as advance, _flushing(store):
        for number, batch in enumerate(batches):
            if number in done:
                skipped += 1
            else:
                with _batch_note(number, run):
                    with torch.inference_mode():
                        call(batch)
                    _put(store, run, number, _gathered(sources))
                ran += 1
            advance()
    silent = [name for source in sources for name in source.silent()]
    if ran and silent:
        warnings.warn(explain(model, silent), NeverFiredWarning, stacklevel=2)
    return Collected(ran, skipped)


@contextmanager
def _attached(sources: list[Source], scope: Scope) -> Iterator[None]:
    try:
        for source in sources:
            source.attach(scope)
        yield
    finally:
        for source in sources:
            source.detach()


def _sources(model: nn.Module, detectors: Any, store: Store) -> list[Source]:
    several = isinstance(detectors, list | tuple | AbstractSet)
    listed = list(detectors) if several else [detectors]
    sources = [source_of(each, model, store) for each in listed if isinstance(each, Collectable)]
    selectors = [each for each in listed if not isinstance(each, Collectable)]
    if selectors or not sources:  # selecting nothing is an error
        sources.append(CapturedOutputs(model, selectors if several else detectors))
    return sources


def _gathered(sources: list[Source]) -> dict[str, dict[str, Tensor]]:
    gathered: dict[str, dict[str, Tensor]] = {}
    for source in sources:
        for layer, tensors in source.take().items():
            own = gathered.setdefault(layer, {})
            if both := own.keys() & tensors.keys():
                msg = (
                    f"two detectors collected {min(both)!r} of layer {layer!r}: leave one of them "
                    "out, or collect them in runs of their own"
                )
                raise HookError(msg)
            own.update(tensors)
    return gathered


def _put(store: Store, run: str, number: int, layers: Mapping[str, Mapping[str, Tensor]]) -> None:
    try:
        for layer, tensors in layers.items():
            store.put(run, number, layer, tensors, copy=False)
        store.complete(run, number)
    except BaseException:
        store.discard(run, number)
        raise


def _caller(model: nn.Module) -> Callable[[Any], object]:
    def call(batch: Any) -> object:
        if isinstance(batch, Mapping):
            return model(**batch)
        if isinstance(batch, tuple | list):
            return model(*batch)
        return model(batch)

    return call


@contextmanager
def _flushing(store: Store) -> Iterator[None]:
    try:
        yield
    except BaseException:
        with suppress(StoreError):  # the loop's own exception is raised
            store.flush()
        raise
    store.flush()


@contextmanager
def _batch_note(number: int, run: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(f"ferrohook: in batch {number} of run {run!r}; those before are complete")
        raise


@contextmanager
def _no_progress() -> Iterator[Callable[[], object]]:
    yield lambda: None


@contextmanager
def _progress(batches: Iterable[Any], run: str) -> Iterator[Callable[[], object]]:
    """Shows a bar on stderr by rich or tqdm; yields a callable that advances it."""
    total = None
    if isinstance(batches, Sized):
        with suppress(TypeError):  # a DataLoader's __len__ raises if its data set has none
            total = len(batches)
    hidden = not sys.stderr.isatty()
    try:
        from rich.console import Console  # noqa: PLC0415 (an extra)
        from rich.progress import Progress  # noqa: PLC0415
    except ModuleNotFoundError:
        try:
            from tqdm import tqdm  # type: ignore[import-untyped]  # noqa: PLC0415 (an extra)
        except ModuleNotFoundError:
            yield lambda: None
            return
        with tqdm(total=total, desc=run, unit="batch", disable=hidden) as line:
            yield line.update
        return
    with Progress(console=Console(stderr=True), disable=hidden) as bars:
        task = bars.add_task(run, total=total)
        yield lambda: bars.advance(task)


def _check(model: object, batches: object, store: object, forward: object) -> None:
    expected = {
        "model is an instance of nn.Module": (model, nn.Module),
        "batches is an iterable of batches": (batches, Iterable),
        "store is a Store": (store, Store),
    }
    for expectation, (argument, types) in expected.items():
        if not isinstance(argument, types):
            msg = f"collect: {expectation}, got {describe(argument)}"
            raise HookTypeError(msg)
    if not (forward is None or callable(forward)):
        msg = f"collect: forward is called with a batch, got {type(forward).__name__}"
        raise HookTypeError(msg)

"""`collect`: runs a model over batches and stores the outputs of its modules."""

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
    """Batches that it ran and stored."""
    skipped: int
    """Batches that were complete in the store before."""


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
    """Runs a model over batches and stores the outputs of its modules.

    The forwards run in inference mode; call `model.eval()` yourself if you need it. A batch is
    stored completely or not at all. After an error or Ctrl-C, the same call with the same batches
    runs the remaining ones. The store stays open.

    Args:
        model: any module.
        batches: the model's inputs. A batch is a mapping of keyword arguments, a tuple or list of
            positional arguments, or the only argument. Batches are numbered in order.
        detectors: modules whose outputs to store, see `select`; or detectors of
            `ferrohook.interventions`; or a list, tuple or set of both. A module's output is stored
            as `output`, the tensors of a structure as `output.0` or `output.name`, and those of
            the module's second call in a batch with `output#1` instead of `output`. A detector's
            `tensor_metadata` is stored after each batch, under the path of its layer, and cleared.
            A detector without a layer is registered on its `layer_signature` for the duration.
        store: the store to write to.
        run: name of the run in the store.
        forward: runs one batch; default: calls the model with it.
        progress: show a progress bar, if stderr is a terminal and rich or tqdm is installed.

    Warns with `NeverFiredWarning` of selected modules that never ran.

    Raises:
        SelectionError: a selector matches no module.
        HookTypeError: an argument has the wrong type.
        HookError: two detectors collected tensors of the same layer and name; a detector has
            neither a layer nor a `layer_signature`, or has another store; or a detector raised.
        StoreError: the store could not write a tensor.

    Examples:
        >>> with LocalStore("activations") as store:
        ...     collect(model, batches, "encoder.layer.*", store)
        >>> store.get("run", 0, "encoder.layer.0")["output"].shape
    """
    _check(model, batches, store, forward)
    sources = _sources(model, detectors, store)
    done = {*store.completed(run)}
    call = forward or _batch_caller(model)
    ran = skipped = 0
    bar = _progress(batches, run) if progress else _no_progress()
    # The scope removes the hooks from the model, wherever Ctrl-C interrupts.
    with Scope() as scope, _attached(sources, scope), bar as advance, _flushing(store):
        for number, batch in enumerate(batches):
            if number in done:
                skipped += 1
            else:
                with _error_note(number, run):
                    with torch.inference_mode():
                        call(batch)
                    _put(store, run, number, _merge_tensors(sources))
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


def _merge_tensors(sources: list[Source]) -> dict[str, dict[str, Tensor]]:
    merged: dict[str, dict[str, Tensor]] = {}
    for source in sources:
        for layer, tensors in source.take().items():
            own = merged.setdefault(layer, {})
            if both := own.keys() & tensors.keys():
                msg = (
                    f"two detectors collected {min(both)!r} of layer {layer!r}: drop one of them, "
                    "or collect them in separate runs"
                )
                raise HookError(msg)
            own.update(tensors)
    return merged


def _put(store: Store, run: str, number: int, layers: Mapping[str, Mapping[str, Tensor]]) -> None:
    try:
        for layer, tensors in layers.items():
            store.put(run, number, layer, tensors, copy=False)
        store.complete(run, number)
    except BaseException:
        store.discard(run, number)
        raise


def _batch_caller(model: nn.Module) -> Callable[[Any], object]:
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
        with suppress(StoreError):  # the loop's own exception comes first
            store.flush()
        raise
    store.flush()


@contextmanager
def _error_note(number: int, run: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(f"ferrohook: in batch {number} of run {run!r}; earlier batches are complete")
        raise


@contextmanager
def _no_progress() -> Iterator[Callable[[], object]]:
    yield lambda: None


@contextmanager
def _progress(batches: Iterable[Any], run: str) -> Iterator[Callable[[], object]]:
    """Shows a bar on stderr by rich or tqdm; yields the function to call after each batch."""
    total = None
    if isinstance(batches, Sized):
        with suppress(TypeError):  # a DataLoader of an IterableDataset has a `__len__` that raises
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
    for requirement, (value, types) in expected.items():
        if not isinstance(value, types):
            msg = f"collect: {requirement}, got {describe(value)}"
            raise HookTypeError(msg)
    if not (forward is None or callable(forward)):
        msg = f"collect: forward is a callable or None, got {type(forward).__name__}"
        raise HookTypeError(msg)

"""`collect`: runs a model over batches and stores the outputs of its modules."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ferrohook.attach.never_fired import explain
from ferrohook.data import Store
from ferrohook.data.engine_jobs import EngineJob, engine_collector, refuse_options
from ferrohook.data.fingerprints import fingerprint
from ferrohook.data.manifests import check_same, manifest
from ferrohook.data.sources import CapturedOutputs, Collectable, Source, source_of
from ferrohook.data.token_rows import LAYER, TokenRows, by_rule
from ferrohook.errors import (
    HookError,
    HookTypeError,
    NeverFiredWarning,
    ResumeError,
    StoreError,
    UnverifiedWarning,
)
from ferrohook.plans import Plan, Prepared
from ferrohook.plans.entries import KeepEntry
from ferrohook.registration.scopes import Scope
from ferrohook.util.arguments import describe, expect, expect_callable, expect_module
from ferrohook.util.progress import progress_bar
from ferrohook.util.texts import listed

if TYPE_CHECKING:
    from ferrohook.captures.convert import Index
    from ferrohook.data.engine_jobs import Engine
    from ferrohook.data.token_rows import Tokens
    from ferrohook.names.select import Selector


What: TypeAlias = (
    "Selector | Collectable | KeepEntry | Iterable[Selector | Collectable | KeepEntry]"
)
Mask: TypeAlias = "str | Callable[[Any], Tensor]"


class Collected(NamedTuple):
    """Counts of one call of `collect`."""

    batches: int
    """Batches that it ran and stored."""
    skipped: int
    """Batches that were complete in the store before."""


_in_progress: WeakKeyDictionary[Store, dict[str, object]] = WeakKeyDictionary()
"""The runs that calls are collecting into, each with a token of its call."""


def collect(  # noqa: PLR0913 (the options by keyword)
    model: nn.Module | Engine,
    batches: Iterable[Any],
    what: What,
    store: Store,
    *,
    run: str = "run",
    forward: Callable[[Any], object] | None = None,
    inputs: bool = False,
    output_index: object = None,
    slice: Index = None,  # noqa: A002 (the field's term)
    dtype: torch.dtype | None = None,
    mask: Mask | None = None,
    tokens: Tokens | None = None,
    plan: Plan | Prepared | None = None,
    sampling: Any = None,
    progress: bool = True,
) -> Collected:
    """Runs a model over batches and stores the outputs of its modules.

    With an engine (`vllm.LLM` or `sglang.Engine`), `batches` are prompts, and its worker writes
    their rows into the `LocalStore` itself, see below.

    The forwards run in inference mode; call `model.eval()` yourself if you need it. A batch is
    stored completely or not at all. After an error or Ctrl-C, the same call with the same batches
    runs the missing ones: not yet run, cut off, or damaged (a file was deleted, or its checksum
    differs; to find out, the call reads all files of the run). The store stays open.

    A run records its model, data and options, and resumes only with the same: selected modules and
    detectors with their options, `forward` and `mask` by name, the plan, the class of each module,
    the number of modules in training mode, and a fingerprint of each parameter, buffer and batch.
    See `ferrohook.data.fingerprints.fingerprint` for how it is computed: once a call for the model,
    which reads each parameter once (a forward of one row does so too), and for each batch. Code,
    hooks on the model, and attributes such as the number of heads are not recorded. If a forward
    changes buffers, as a BatchNorm does in training mode, the model counts as a different one
    afterwards.

    An engine runs prompts in the order of its scheduler, so a batch in the store holds whole
    prompts in the order in which they ended; `@rows` is always stored. With `sampling` the engine
    generates a text after each prompt. Rows and tokens of the text are stored too, except for its
    last token, which does not run. The worker's memory holds the rows of running prompts; of
    finished prompts up to an eighth of the store's `max_pending`, plus one prompt; and up to
    `max_pending` bytes that wait to be written. A slow disk slows the engine.
    After an error, Ctrl-C or a killed process the same call runs the prompts that are not stored.
    The store only reads during the call, as the worker has its folder. `Collected` counts prompts.

    Args:
        model: any module; or an engine whose plug-in is installed.
        batches: the model's inputs. A batch is a mapping of keyword arguments, a tuple or list of
            positional arguments, or the only argument. Batches are numbered in order. Of an
            engine: prompts, texts or lists of token ids.
        what: modules whose outputs to store, see `select`; or detectors of
            `ferrohook.compat.mi_crow`; or a list, tuple or set of both. A module's output is stored
            as `output`, the tensors of a structure as `output.0` or `output.name`; tensors of
            the module's second call in a batch with `output#1` instead of `output`. A detector's
            `tensor_metadata` is stored after each batch, under the path of its layer, and cleared.
            A detector without a layer is registered on its `layer_signature` for the duration.
            Of an engine: modules and quantities; or what `keep` returns, or a list of that, for
            its other options, as `at`.
        store: the store to write to.
        run: name of the run in the store.
        forward: runs one batch; default: calls the model with it.
        inputs: store the inputs of the selected modules, as `input`, see `capture`.
        output_index: part of each output or input to store, see `capture`.
        slice: part of each tensor to store, see `capture`.
        dtype: cast floating-point tensors to this dtype.
        mask: key of a batch, as `"attention_mask"`, or a function of a batch that returns its mask.
            Of a tensor of shape (batch, tokens, width), only the vectors where the mask is not 0
            are stored, as (vectors, width). It applies after `slice`. With a mask or `tokens`, an
            attention pattern, `"@pattern.0"`, is (batch, queries, heads, keys), for `slice` too.
        tokens: key of a batch, as `"input_ids"`, or a function of a batch that returns its token
            ids, of the shape (batch, tokens). They are stored for each row, with the position in
            its text and the number of the text among all of the run, see `ActivationDataset`. If
            `mask` is a key, positions count only the tokens that it keeps; else they count columns.
        plan: a plan whose hooks run in each forward; without `keep`. An engine takes no prepared
            one, and neither `forward`, `mask` nor `tokens`.
        sampling: of an engine: its sampling parameters (`SamplingParams`, or SGLang's dict), with
            which it generates a text after each prompt; default: none. They are recorded. With a
            temperature, vLLM's need a `seed`, to which the number of the prompt is added, so that
            repeated prompts get different texts; SGLang's temperature must be 0.
        progress: show a progress bar, if stderr is a terminal and rich or tqdm is installed.

    Warns with `NeverFiredWarning` of selected modules that never ran, and with `UnverifiedWarning`
    if it skips batches without a fingerprint, which `Store.put` stored.

    Raises:
        ResumeError: the run has another model, data or options, which the message names; or another
            call is collecting into it. Nothing of the run was changed.
        SelectionError: a selector matches no module.
        HookTypeError: an argument has the wrong type.
        HookError: two detectors collected tensors of the same layer and name; a detector has
            neither a layer nor a `layer_signature`, or has another store; or a detector raised; the
            mask does not fit a tensor; or the plan keeps, or was prepared for another model.
        StoreError: the store could not write a tensor.

    Examples:
        >>> with LocalStore("activations") as store:
        ...     collect(model, batches, "encoder.layer.*", store)
        >>> store.get("run", 0, "encoder.layer.0")["output"].shape
    """
    captured = {"inputs": inputs, "output_index": output_index, "slice": slice, "dtype": dtype}
    if (engine := engine_collector(model)) is not None:
        expect(batches, Iterable, "collect: batches must be an iterable of prompts")
        refuse_options(forward=forward, mask=mask, tokens=tokens)
        options = _not_default(captured)
        job = EngineJob(model, batches, what, options, store, run, plan, sampling, progress)
        return Collected(*engine(job))
    if sampling is not None:
        msg = "sampling= only works with an engine: leave it out"
        raise HookError(msg)
    _check(model, batches, store, forward, mask)
    _check_rule("tokens", tokens)
    chosen = cast("nn.Module", model)
    _check_plan(chosen, plan)
    return _collect(
        chosen, batches, what, store, run, forward, captured, mask, tokens, plan, progress=progress
    )


def _collect(  # noqa: PLR0913, PLR0917 (arguments of `collect`)
    model: nn.Module,
    batches: Iterable[Any],
    what: What,
    store: Store,
    run: str,
    forward: Callable[[Any], object] | None,
    captured: dict[str, Any],
    mask: Mask | None,
    tokens: Tokens | None,
    plan: Plan | Prepared | None,
    *,
    progress: bool,
) -> Collected:
    """Collects with a model in this process."""
    options = _not_default({**captured, "mask": mask, "tokens": tokens})
    rows_are_tokens = mask is not None or tokens is not None
    captured = {**captured, "rows_are_tokens": rows_are_tokens}
    sources = _sources(model, what, store, captured, options)
    if plan is not None:
        options["plan"] = Plan(*plan.entries)
    numbered = None if tokens is None else TokenRows(tokens)
    call = forward or partial(_call, model)
    ran = skipped = 0
    bar = progress_bar(run, _length(batches), "batch", shown=progress)
    token = object()
    runs = _in_progress.setdefault(store, {})
    try:
        if runs.setdefault(run, token) is not token:
            msg = (
                f"run {run!r} is being collected by another call: wait for it, or pass another run"
            )
            raise ResumeError(msg)
        texts = (text for it in sources for text in it.contents())
        made_of = manifest(model, texts, forward, options)
        stored = _RunContents.of(store, run, made_of, progress=progress)
        if stored.unverified:
            warnings.warn(stored.unverified, UnverifiedWarning, stacklevel=3)
        # The scope removes the hooks from the model, wherever Ctrl-C interrupts.
        with (
            _prepared(model, plan) as prepared,
            Scope() as scope,
            _attached(sources, scope),
            bar as advance,
            _flushing(store),
        ):
            for number, batch in enumerate(batches):
                digest = fingerprint(batch)
                stored.check(number, digest)
                with _error_note(number, run):
                    rows = _Rows.of(batch, mask, numbered)
                if number in stored.intact:
                    skipped += 1
                else:
                    with _error_note(number, run):
                        with torch.inference_mode(), _opened(prepared):
                            call(batch)
                        tensors = _merge_tensors(sources, rows)
                        with _discarding(store, run, number):
                            if number in stored.known:
                                store.restart(run, number)
                            for layer, named in tensors.items():
                                store.put(run, number, layer, named, copy=False)
                            store.complete(run, number, fingerprint=digest, manifest=made_of)
                    ran += 1
                advance()
    finally:
        if run in runs and runs[run] is token:  # without a call, which Ctrl-C might interrupt
            del runs[run]
    silent = [name for source in sources for name in source.silent()]
    if ran and silent:
        warnings.warn(explain(model, silent), NeverFiredWarning, stacklevel=3)
    return Collected(ran, skipped)


class _Rows(NamedTuple):
    """Rows of a batch that are stored."""

    mask: Tensor | None
    described: dict[str, Tensor] | None
    """Token, position and text of each."""
    shape: torch.Size | None
    """Texts and tokens that tensors begin with; None for any."""

    @classmethod
    def of(cls, batch: Any, mask: Mask | None, numbered: TokenRows | None) -> _Rows:
        kept = _mask_of(batch, mask)
        if numbered is None:
            return cls(kept, None, None)
        ids = numbered.of(batch)
        if kept is not None and kept.shape != ids.shape[: kept.dim()]:
            msg = (
                f"the mask of a batch has shape {tuple(kept.shape)}, but its tokens have shape "
                f"{tuple(ids.shape)}"
            )
            raise HookError(msg)
        padding = kept if isinstance(mask, str) else None
        return cls(kept, numbered.rows(ids, kept, padding), ids.shape)


class _RunContents(NamedTuple):
    """Contents of a run before a call."""

    run: str
    known: AbstractSet[int]
    """Batches in the store, incomplete and damaged ones too."""
    intact: AbstractSet[int]
    """Complete batches with all of their files."""
    fingerprints: Mapping[int, str]

    @classmethod
    def of(
        cls, store: Store, run: str, made_of: Mapping[str, Any], *, progress: bool
    ) -> _RunContents:
        """Reads the record of a run.

        Raises:
            ResumeError: it is made of something else than `made_of`.
        """
        complete = {*store.completed(run)}
        known = {*store.batches(run)} if run in store.runs() else set()
        check_same(run, store.manifest(run), made_of)
        damaged = store.verify(run, progress=progress) if known else []
        intact = complete - {each.batch for each in damaged}
        return cls(run, known, intact, store.fingerprints(run))

    @property
    def unverified(self) -> str:
        """Text of a warning of batches without a fingerprint; `""` if there are none."""
        numbers = sorted(self.intact - self.fingerprints.keys())
        if not numbers:
            return ""
        return (
            f"run {self.run!r} skips batches {listed(numbers)}, which have no fingerprint because "
            "put() stored them: nothing shows that they come from this model and these batches. To "
            "be sure, pass another run"
        )

    def check(self, number: int, digest: str) -> None:
        """Compares a batch with the one in the store.

        Raises:
            ResumeError: it is another.
        """
        if self.fingerprints.get(number, digest) != digest:
            msg = (
                f"batch {number} of run {self.run!r} was collected from a different batch (other "
                "data, another order or another batch size): pass the same batches, or another run"
            )
            raise ResumeError(msg)


@contextmanager
def _attached(sources: list[Source], scope: Scope) -> Iterator[None]:
    try:
        for source in sources:
            source.attach(scope)
        yield
    finally:
        for source in sources:
            source.detach()


def _not_default(options: dict[str, Any]) -> dict[str, Any]:
    """Drops defaults, which are not recorded."""
    return {
        name: value for name, value in options.items() if value is not None and value is not False
    }


def _sources(
    model: nn.Module,
    what: Any,
    store: Store,
    captured: dict[str, Any],
    chosen: dict[str, Any],
) -> list[Source]:
    several = isinstance(what, list | tuple | AbstractSet)
    listed = list(what) if several else [what]
    sources = [source_of(each, model, store) for each in listed if isinstance(each, Collectable)]
    selectors = [each for each in listed if not isinstance(each, Collectable)]
    if selectors or not sources:  # selecting nothing is an error
        selected = selectors if several else what
        sources.append(CapturedOutputs(model, selected, **captured))
    elif chosen:
        msg = f"{min(chosen)}= only works with selected modules: detectors have their own options"
        raise HookError(msg)
    return sources


def _prepared(model: nn.Module, plan: Plan | Prepared | None) -> AbstractContextManager[Any]:
    return plan.prepare(model) if isinstance(plan, Plan) else nullcontext(plan)


def _opened(prepared: Prepared | None) -> AbstractContextManager[object]:
    if prepared is None:
        return nullcontext()
    request = prepared.open()
    request.stacklevel = 4  # of the caller of `collect`
    return request


def _mask_of(batch: Any, mask: Mask | None) -> Tensor | None:
    if mask is None:
        return None
    found = by_rule("mask", mask, batch)
    if not isinstance(found, Tensor) or not found.dim():
        msg = (
            "the mask of a batch must be a tensor with at least one dimension, got "
            f"{describe(found)}"
        )
        raise HookTypeError(msg)
    return found.detach().to("cpu", torch.bool)


def _merge_tensors(sources: list[Source], rows: _Rows) -> dict[str, dict[str, Tensor]]:
    merged: dict[str, dict[str, Tensor]] = {}
    if rows.described is not None:
        merged[LAYER] = {**rows.described}
    for source in sources:
        if isinstance(source, CapturedOutputs):
            taken = source.take(rows.mask, rows.shape)
        else:
            taken = source.take()
        for layer, tensors in taken.items():
            own = merged.setdefault(layer, {})
            if both := own.keys() & tensors.keys():
                msg = (
                    f"two detectors collected {min(both)!r} of layer {layer!r}: drop one of them, "
                    "or collect them in separate runs"
                )
                raise HookError(msg)
            own.update(tensors)
    return merged


@contextmanager
def _discarding(store: Store, run: str, number: int) -> Iterator[None]:
    try:
        yield
    except BaseException:
        store.discard(run, number)
        raise


def _call(model: nn.Module, batch: Any) -> object:
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, tuple | list):
        return model(*batch)
    return model(batch)


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


def _length(batches: Iterable[Any]) -> int | None:
    if isinstance(batches, Sized):
        with suppress(TypeError):  # a DataLoader of an IterableDataset has a `__len__` that raises
            return len(batches)
    return None


def _check(model: object, batches: object, store: object, forward: object, mask: object) -> None:
    expect_module(model, "collect: model must be")
    expect(batches, Iterable, "collect: batches must be an iterable of batches")
    expect(store, Store, "collect: store must be a Store")
    if isinstance(batches, Tensor | Mapping):
        msg = (
            f"collect: batches must be an iterable of batches, got {describe(batches)}: pass "
            "[batch] for a single batch"
        )
        raise HookTypeError(msg)
    if forward is not None:
        expect_callable(forward, "collect: forward must be a callable or None")
    _check_rule("mask", mask)


def _check_rule(name: str, rule: object) -> None:
    if not isinstance(rule, str | None):
        expect_callable(rule, f"collect: {name} must be a str, a callable or None")


def _check_plan(model: nn.Module, plan: object) -> None:
    expect(plan, Plan | Prepared | None, "collect: plan must be a Plan or a Prepared")
    if isinstance(plan, Prepared) and plan.model is not model:
        msg = f"the plan was not prepared for this {model._get_name()}"
        raise HookError(msg)
    if isinstance(plan, Plan | Prepared) and any(isinstance(it, KeepEntry) for it in plan.entries):
        msg = "the plan keeps activations, which collect does not store: pass it without keep()"
        raise HookError(msg)

"""Worker: the plans of an engine's requests, step by step."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import json
import logging
import secrets
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import psutil
import safetensors.torch
import torch

from ferrohook.engines.finite import failure, is_finite
from ferrohook.engines.planned import PlannedRequests, Result
from ferrohook.engines.steps import Span, Step
from ferrohook.engines.vllm.captures import digest_of, packed, spans_of
from ferrohook.engines.vllm.modules import OBSERVED_ROWS, ModuleTable, observe
from ferrohook.engines.vllm.ranks import Ranks, fill
from ferrohook.engines.vllm.requests import NAME, PROBE, EngineOptions, wanted
from ferrohook.engines.vllm.supported import explain, refusals
from ferrohook.errors import HookError
from ferrohook.plans import Plan
from ferrohook.plans.entries import HookEntry, KeepEntry
from ferrohook.rows.site_tables import bytes_of_tables, sites

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from ferrohook.plans import Prepared

_LOG: Final = logging.getLogger("ferrohook")
_MOST_PLANS: Final = 256
_MOST_DROPPED: Final = 10_000
_DROPPED: Final = "the captures of the request were dropped for results_bytes"


@dataclasses.dataclass
class _Admitted:
    """A request of the engine that has a plan."""

    key: str
    """Name of its captures."""
    prompt_length: int
    digest: str
    """Of its plan and vectors."""
    prepared: Prepared
    """Its plan, rewritten."""
    row_bytes: int
    """Bytes that it captures per token, at most; 0 without a capture."""
    end: int = 0
    """Position behind its last row."""
    tokens: int = 0
    """Tokens that ran."""


@dataclasses.dataclass
class _Finished:
    """Captures that wait for their client."""

    admitted: _Admitted
    result: Result
    size: int
    """Bytes."""


class Served(NamedTuple):
    """A loaded model whose requests may have plans."""

    modules: ModuleTable
    planned: PlannedRequests


class Worker:
    """Plans of the requests of one model runner.

    Args:
        runner: of V1 or V2.
        config: the `VllmConfig`.
    """

    def __init__(self, runner: Any, config: Any) -> None:
        self._runner = runner
        self._config = config
        self.options = EngineOptions.of(config)
        self.refused = refusals(config, has_sites=self.options.sites is not None)
        self.served: Served | None = None
        self._failed_test: str | None = None
        """Reason, if the self-test failed."""
        self._vectors: dict[str, Tensor] = {}
        self._admitted: dict[str, _Admitted] = {}
        self._finished: OrderedDict[str, _Finished] = OrderedDict()
        self._finished_bytes = 0
        self._dropped: OrderedDict[str, None] = OrderedDict()
        self._spans: list[Span] = []
        self._from_cache: list[str] = []
        """Requests of the settled step that begin with keys and values of others."""
        self._failures: dict[str, str] = {}
        """Reasons, by request."""
        self._failed: dict[str, str] = {}
        """Digests of the plans of failed requests that live in the runner."""
        self._ranks = Ranks.of(config)
        self._secret = secrets.token_hex(32)
        """Key of salts, which all API servers ask for."""
        self.steps = 0
        """Forwards in which a request with a plan had rows."""

    # --- the model ---------------------------------------------------------------------------

    def loaded(self) -> None:
        """Takes over a model that was loaded, before it is compiled or called."""
        if self.refused:
            _LOG.warning("ferrohook: %s", explain(self.refused))
            return
        model = self._runner.get_model()
        forward = functools.partial(self._forward, model)
        modules = observe(model, forward)
        if self._ranks is not None:
            modules = modules.without(self._ranks.partial(model, forward))
        if self._config.compilation_config.mode:
            modules, names, index = modules.at_sites(self.options.sites)
            self._lay_sites(model, names, index, modules.table[names[0]].width)
        self.served = Served(modules, PlannedRequests(model, size=_MOST_PLANS))

    def _lay_sites(self, model: Any, names: list[str], index: Any, width: int) -> None:
        """Lays the operators of a compiled engine, if their tables fit.

        Raises:
            HookError: they do not.
        """
        scheduler = self._config.scheduler_config
        requests, rows = scheduler.max_num_seqs, scheduler.max_num_batched_tokens
        dtype = self._config.model_config.dtype
        size = bytes_of_tables(len(names), requests, rows, width, dtype)
        tables = (
            f"the tables of {len(names)} sites take {size:,} bytes for {requests:,} requests and "
            f"{rows:,} tokens of a step, of width {width:,} in {dtype}"
        )
        _LOG.info("ferrohook: %s", tables)
        advice = "name fewer sites, or lower max_num_batched_tokens or max_num_seqs"
        if size > self.options.sites_bytes:
            msg = f"{tables}; sites_bytes={self.options.sites_bytes:,}: {advice}, or raise it"
            raise HookError(msg)
        if size > (free := _free_bytes(self._runner.device)):
            msg = f"{tables}; {free:,} bytes are free on {self._runner.device}: {advice}"
            raise HookError(msg)
        self._sites = sites(  # open as long as the engine
            model,
            names,
            max_requests=requests,
            max_rows=rows,
            output_index=index,
            width=width,
            dtype=dtype,
        )

    def _forward(self, model: Any) -> None:
        """Runs tokens that nobody wants, without a KV cache, as vLLM's profiling does."""
        context = importlib.import_module("vllm.forward_context")
        device = self._runner.device
        ids: Tensor | None = torch.arange(1, 1 + OBSERVED_ROWS, dtype=torch.int32, device=device)
        embeds = None
        config = self._config.model_config
        if config.supports_multimodal_inputs or config.enable_prompt_embeds:
            # The runner embeds the tokens before the forward: no hook fires there.
            shape = OBSERVED_ROWS, config.get_inputs_embeds_size()
            embeds = torch.linspace(-1, 1, shape[0] * shape[1]).reshape(shape)
            embeds = embeds.to(device, config.dtype)
            ids = ids if getattr(model, "requires_raw_input_tokens", False) else None
        positions = torch.arange(OBSERVED_ROWS, dtype=torch.int64, device=device)
        # Attention leaves its output as the memory was. Of ranks it is a shard, so it differs.
        layers = importlib.import_module("vllm.model_executor.layers.attention_layer_base")
        noise = torch.Generator().manual_seed(0 if self._ranks is None else self._ranks.rank)
        hooks = [
            module.register_forward_hook(lambda *call: fill(call[-1], noise), prepend=True)
            for module in model.modules()
            if isinstance(module, layers.AttentionLayerBase)
        ]
        try:
            with (
                torch.inference_mode(),
                context.set_forward_context(
                    None, self._config, num_tokens=OBSERVED_ROWS, skip_compiled=True
                ),
            ):
                model(
                    input_ids=ids,
                    positions=positions,
                    intermediate_tensors=None,
                    inputs_embeds=embeds,
                )
        finally:
            for hook in hooks:
                hook.remove()

    # --- requests ----------------------------------------------------------------------------

    def admit(self, request_id: str, params: Any, prompt_length: int) -> None:
        """Opens the plan of a request that the runner has taken, if it has one."""
        payload = ((params and params.extra_args) or {}).get(NAME)
        if payload is None:
            return
        self._retire(request_id)
        digest = ""
        try:
            if not isinstance(payload, dict):
                msg = "a plan came to the worker past the front end"
                raise HookError(msg)  # noqa: TRY301 (fails the request, as any error here does)
            digest = payload["digest"]
            for key in payload.get("cancelled", ()):
                self._discard(key)
            prepared = self._prepared(payload)
            with self._loaded().planned.admitting(request_id, prepared):
                pass
        except Exception as error:  # noqa: BLE001 (the request's failure: the engine goes on)
            self._fail(request_id, digest, error)
            return
        row_bytes = sum(size for _, size in self._loaded().modules.row_bytes(prepared))
        self._discard(payload["key"])
        key = payload["key"]
        self._admitted[request_id] = _Admitted(key, prompt_length, digest, prepared, row_bytes)

    def _loaded(self) -> Served:
        if self.served is None:
            raise HookError(self._reason())
        return self.served

    def _reason(self) -> str:
        """Returns why no plan is served."""
        if self._failed_test is not None:
            return self._failed_test
        return explain(self.refused) if self.refused else "the model is not loaded"

    def _prepared(self, payload: Mapping[str, Any]) -> Prepared:
        served = self._loaded()
        read = functools.partial(self._read, payload, served.modules)
        return served.planned.plans.find(payload["digest"], read)

    def _read(self, payload: Mapping[str, Any], modules: ModuleTable) -> Plan:
        missing = [it for it in payload["vectors"].values() if it not in self._vectors]
        if missing:
            msg = f"vectors were dropped before the request ran: {missing}"
            raise HookError(msg)
        vectors = {name: self._vectors[it] for name, it in payload["vectors"].items()}
        plan = modules.rewritten(Plan.from_json(payload["plan"], vectors))
        if self._ranks is not None and self._ranks.rank:  # the first one captures
            return Plan(*(each for each in plan.entries if isinstance(each, HookEntry)))
        return plan

    def reconcile(self, live: Mapping[str, Any]) -> None:
        """Closes the requests that are not among those that live in the runner."""
        for request_id in self._admitted.keys() - live.keys():
            self._retire(request_id)
        for request_id in self._failed.keys() - live.keys():
            del self._failed[request_id]

    def _retire(self, request_id: str) -> None:
        admitted = self._admitted.pop(request_id, None)
        if admitted is None:
            return
        result = self._loaded().planned.retire(request_id)
        if result is not None and admitted.row_bytes:
            # Not that of the activations, which are put together as they are read.
            self._keep(_Finished(admitted, result, admitted.row_bytes * admitted.tokens))

    def _keep(self, finished: _Finished) -> None:
        self._finished[finished.admitted.key] = finished
        self._finished_bytes += finished.size
        while self._finished_bytes > self.options.results_bytes:
            key, dropped = self._finished.popitem(last=False)
            self._finished_bytes -= dropped.size
            self._dropped[key] = None
            if len(self._dropped) > _MOST_DROPPED:
                self._dropped.popitem(last=False)

    def _discard(self, key: str) -> _Finished | None:
        finished = self._finished.pop(key, None)
        if finished is not None:
            self._finished_bytes -= finished.size
        return finished

    # --- steps -------------------------------------------------------------------------------

    def settle(
        self, request_ids: Sequence[str], counts: Sequence[int], positions: Sequence[int]
    ) -> None:
        """Takes the row map of the next forward.

        Args:
            request_ids: in order of their rows.
            counts: rows of each.
            positions: position of the first row of each.
        """
        self._spans = []
        self._from_cache = []
        if not self._admitted:
            return
        row = 0
        for request_id, count, position in zip(request_ids, counts, positions, strict=True):
            admitted = self._admitted.get(request_id)
            rows = int(count)
            if admitted is not None:
                first = int(position)
                if first not in {0, admitted.end}:
                    self._from_cache.append(request_id)
                admitted.end = first + rows
                admitted.tokens = max(admitted.tokens, admitted.end)
                self._spans.append(Span(request_id, row, rows, first, admitted.prompt_length))
            row += rows

    @contextlib.contextmanager
    def running(self, rows: int) -> Iterator[None]:
        """Enters the batch of the settled step around its forward of `rows` rows."""
        spans = self._spans
        if spans:
            self.steps += 1
            planned = self._loaded().planned
            try:
                with planned.running(Step(spans, rows)):
                    yield
            finally:
                self._spans = []
            for span in spans:
                error = planned.failure_of(span.request_id)
                if error is not None and span.request_id not in self._failed:
                    self._fail(span.request_id, self._admitted[span.request_id].digest, error)
        else:
            yield
        if self._ranks is not None and (self._admitted or self._failed):  # alike on all ranks
            for request_id, reason in self._ranks.merged(self._failures).items():
                self._failures[request_id] = reason
                admitted = self._admitted.get(request_id)
                self._failed.setdefault(request_id, admitted.digest if admitted else "")
        if self._failed:
            self._fail_sharers()

    def check(self, output: Any, slots: Mapping[str, Tensor]) -> None:
        """Fails the requests whose plans made rows NaN or infinite, inside of `running`.

        What they wrote in this step is zeroed: whoever gets the blocks next reads them behind a
        mask, and NaN times zero is NaN.

        Args:
            output: of the model, behind its last norm, where NaN and infinities have become NaN.
            slots: of each layer, the slots of the step's rows.
        """
        changed = [it for it in self._spans if self._loaded().planned.changes(it.request_id)]
        if not changed:
            return
        hidden = output[0] if isinstance(output, tuple) else output
        end = changed[-1].first_row + changed[-1].rows
        if is_finite(hidden[changed[0].first_row : end]):
            return
        for span in changed:
            rows = slice(span.first_row, span.first_row + span.rows)
            if not is_finite(hidden[rows]):
                self._loaded().planned.fail(span.request_id, failure("hidden states"))
                hidden[rows] = 0
                self._zero({layer: each[rows] for layer, each in slots.items()})

    def _zero(self, slots: Mapping[str, Tensor]) -> None:
        """Zeroes the blocks of some slots, which nobody shares: they were not full before."""
        config = self._runner.kv_cache_config
        for group in config.kv_cache_groups:
            for layer in group.layer_names:
                cache = self._config.compilation_config.static_forward_context[layer].kv_cache
                if layer in slots and isinstance(cache, torch.Tensor):  # else it is no attention
                    size = group.kv_cache_spec.block_size * config.num_blocks // cache.shape[0]
                    cache[(slots[layer] // size).unique()] = 0

    def _fail(self, request_id: str, digest: str, error: BaseException) -> None:
        self._failed[request_id] = digest
        self._failures[request_id] = _reason(error)

    def _fail_sharers(self) -> None:
        """Fails requests that begin with keys and values of one whose plan failed.

        The scheduler shares them until it learns of the failure; they may lack the plan's changes.
        """
        digests = {*self._failed.values()}
        for request_id in self._from_cache:
            admitted = self._admitted[request_id]
            changes = any(isinstance(entry, HookEntry) for entry in admitted.prepared.entries)
            if changes and admitted.digest in digests and request_id not in self._failed:
                msg = "its cached prefix may be that of a request whose plan failed: send it again"
                self._fail(request_id, "", HookError(msg))

    def failures(self) -> dict[str, str]:
        """Returns the requests that failed since it was called last, with the reasons."""
        if not self._failures:
            return {}
        failed, self._failures = self._failures, {}
        for request_id, reason in failed.items():
            level = logging.DEBUG if request_id.startswith(PROBE) else logging.ERROR
            _LOG.log(level, "ferrohook: request %s: %s", request_id, reason)
        return failed

    # --- calls from the front end: bytes, so that nothing is pickled -------------------------

    def describe(self) -> bytes:
        """Returns the table of the modules and the key of salts, or the reason of a refusal."""
        if self.served is None:
            return json.dumps({"refused": self._reason()}).encode()
        described = {"modules": self.served.modules.to_json(), "secret": self._secret}
        return json.dumps(described).encode()

    def refuse(self, reason: str) -> bytes:
        """Serves no plan from now on, as the self-test failed."""
        if self.served is not None:
            self.served.planned.forget([*self._admitted])
        self._admitted.clear()
        self.served, self._failed_test = None, reason
        return b""

    def put(self, data: bytes) -> bytes:
        """Stores vectors, by their digests."""
        vectors = safetensors.torch.load(data)
        self._vectors |= {digest_of(vector): vector for vector in vectors.values()}
        return b""

    def drop(self, digest: str) -> bytes:
        """Drops a vector. A request that needs it and has not begun fails."""
        self._vectors.pop(digest, None)
        return b""

    def state(self) -> bytes:
        """Returns numbers of requests and captures, for tests and metrics."""
        numbers = {
            "requests": len(self._admitted),
            "results": len(self._finished),
            "results_bytes": self._finished_bytes,
            "steps": self.steps,
        }
        return json.dumps(numbers).encode()

    def take(self, key: str, tokens: int, since: int = 0) -> bytes:
        """Returns the captures of a finished request, and forgets them.

        Args:
            key: of its ticket.
            tokens: tokens of prompt and answer. Rows of the last one and behind it are cut off:
                an engine that schedules ahead runs them for nothing.
            since: first position that is wanted.
        """
        found = self._captured(key)
        self._discard(key)
        if found is None:
            missing = "the captures of the request are not there"
            return packed({}, {}, error=_DROPPED if key in self._dropped else missing)
        # The runner may run it once more, and others read what that writes: its plan stays.
        found[0].row_bytes = 0  # nothing is kept of it
        return self._packed(*found, since, tokens)

    def peek(self, key: str, tokens: int, since: int) -> bytes:
        """Returns captures of a request as `take` does, and keeps them; none until all ran.

        The front end asks while it takes the request to run: here it may wait, or be preempted, or
        be finished.
        """
        if (found := self._captured(key)) is not None:
            return self._packed(*found, since, tokens, partial=True)
        return packed({}, {}, error=_DROPPED if key in self._dropped else None)

    def _captured(self, key: str) -> tuple[_Admitted, Result] | None:
        """Returns what a request has captured, of one that lives what there is so far."""
        for request_id, admitted in self._admitted.items():
            if admitted.key == key:
                result = self._loaded().planned.peek(request_id)
                return None if result is None else (admitted, result)
        finished = self._finished.get(key)
        return None if finished is None else (finished.admitted, finished.result)

    def _packed(
        self,
        admitted: _Admitted,
        result: Result,
        since: int,
        tokens: int,
        *,
        partial: bool = False,
    ) -> bytes:
        modules = self._loaded().modules
        acts, positions = {}, {}
        for entry in admitted.prepared.entries:
            if not isinstance(entry, KeepEntry):
                continue
            expected = wanted(entry.at, admitted.prompt_length, tokens - 1).nonzero()[:, 0]
            expected = expected[expected >= since]
            for path in modules.selected(entry.what):
                name = entry.name_of(path)
                found = torch.tensor(result.positions(name), dtype=torch.int64)
                if len(missing := expected[~torch.isin(expected, found)]):
                    if result.error is not None:
                        return packed({}, {}, error=_reason(result.error))
                    if partial:
                        return packed({}, {})
                    error = f"{name!r} never ran for the positions {spans_of(missing)}"
                    return packed({}, {}, error=error)
                if len(expected):
                    inside = torch.isin(found, expected)
                    acts[name] = result.acts[name][inside].cpu().contiguous()
                    positions[name] = expected
        return packed(acts, positions)


def _reason(error: BaseException) -> str:
    """Returns the reason of a failure, with the notes that name hook and module."""
    lines = [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]
    return f"the plan of the request failed: {'; '.join(lines)}"


def _free_bytes(device: torch.device) -> int:
    """Returns the bytes of memory that are free on a device."""
    if device.type == "cpu":
        return int(psutil.virtual_memory().available)
    free, _ = torch.get_device_module(device).mem_get_info(device)
    return int(free)

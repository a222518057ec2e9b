"""Worker: the plans of an engine's requests, step by step."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import logging
import secrets
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ferrohook.data.manifests import manifest
from ferrohook.engines.finite import is_read_at_once
from ferrohook.engines.harvest import HarvestSettings, TextEnd
from ferrohook.engines.model.cache_reach import CacheReach, observe_reach
from ferrohook.engines.model.looks import HeadSizes, look_at
from ferrohook.engines.model.modules import OBSERVED_ROWS, observed_ids
from ferrohook.engines.model.observing import observe, observe_logits
from ferrohook.engines.requests import EngineRequest, error_text
from ferrohook.engines.rewriting import rewritten
from ferrohook.engines.vllm.experts import call_experts, factor_of
from ferrohook.engines.vllm.ranks import Ranks, fill
from ferrohook.engines.vllm.requests import VllmOptions
from ferrohook.engines.vllm.supported import CAPABILITIES, refusals
from ferrohook.engines.wire import NAME, Upload, packed, packed_uploads, unpacked_uploads
from ferrohook.engines.worker import EngineWorker, WrittenRows
from ferrohook.errors import HookError
from ferrohook.gates.streaming import GateStream
from ferrohook.plans import Plan
from ferrohook.plans.entries import KeepEntry
from ferrohook.rows.site_hooks import IN_PLACE, HookSites

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from ferrohook.engines.model.modules import SampledLogits
    from ferrohook.gates.streaming import GateValues

_LOG: Final = logging.getLogger("ferrohook")
_VLLM_LOG: Final = logging.getLogger("vllm.ferrohook")
"""Its handlers show information too."""
_MOST_DROPPED: Final = 10_000
_DROPPED: Final = "the captures of the request were dropped to stay within results_bytes"


def _cached_layer() -> Any:
    """Returns the class of the layers that write keys and values, or other states of tokens."""
    found = importlib.import_module("vllm.model_executor.layers.attention_layer_base")
    return found.AttentionLayerBase


def _heads_of(module: Any) -> HeadSizes | None:
    """Returns the heads of what vLLM calls as attention(q, k, v), None for any other module."""
    sizes = [getattr(module, name, None) for name in ("num_heads", "num_kv_heads", "head_size")]
    if not isinstance(module, _cached_layer()) or None in sizes:
        return None
    heads, kv_heads, head_dim = map(int, filter(None, sizes))
    return HeadSizes(heads, kv_heads, head_dim)


def _attend(noise: torch.Generator, module: Any, args: Any, output: Any) -> None:
    """Computes the attention of an observed forward, which leaves its output as the memory was.

    Noise for what takes no q, k and v. Of ranks it is a shard, so it differs.
    """
    sizes = _heads_of(module)
    taken = [each.flatten(1) for each in args[:3] if isinstance(each, Tensor)]
    if sizes is None or [it.shape[1] for it in taken] != [*map(sizes.width, "qkv")]:
        fill(output, noise)
        return
    q, k, v = (it.unflatten(1, (-1, sizes.head_dim)).transpose(0, 1) for it in taken)
    z = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    output.copy_(z.transpose(0, 1).reshape(output.shape))


class RunnerWorker(EngineWorker):
    """Plans of the requests of one model runner.

    Args:
        runner: of V1 or V2.
        config: the `VllmConfig`.
    """

    def __init__(self, runner: Any, config: Any) -> None:
        super().__init__(CAPABILITIES)
        self._runner = runner
        self._config = config
        # Its drafter's configuration is made of this one, and may change it.
        self._schedules_ahead = bool(config.scheduler_config.async_scheduling)
        self.options = VllmOptions()
        self._ranks: Ranks | None = None
        self._uploads: dict[str, Upload] = {}
        """Uploads by digest."""
        self._names: dict[str, str] = {}
        """Digests of the uploads, by name."""
        self._finished: OrderedDict[str, EngineRequest] = OrderedDict()
        """Requests whose captures wait for their client."""
        self._finished_bytes = 0
        self._dropped: OrderedDict[str, None] = OrderedDict()
        self._tickets: dict[str, dict[str, Any]] = {}
        """Tickets of finished requests, by key, where there are several API servers."""
        self._reach = CacheReach()
        self._secret = secrets.token_hex(32)
        """Key of salts, which all API servers ask for."""
        self.is_eager = False
        """True while steps run without graphs and compiled code: the reference of a self-test."""

    # --- the model ---------------------------------------------------------------------------

    def loaded(self) -> None:
        """Takes over a model that was loaded, before it is compiled or called.

        Raises:
            HookError, ValueError: it serves no plans, with the reason.
        """
        self.options = VllmOptions.of(self._config)
        if refused := refusals(self._config, has_sites=self.options.sites is not None):
            raise HookError(CAPABILITIES.explain(refused))
        self._ranks = Ranks.of(self._config)
        model = self._runner.get_model()
        forward = functools.partial(self._forward, model)
        if not self._config.compilation_config.mode:
            call_experts(model)
        modules = observe(model, forward, _heads_of)
        self._reach = self._observed_reach(model, forward)
        if self._ranks is not None:
            modules = modules.without(self._ranks.partial(model, forward))
        else:
            named = look_at(model, self._observed_ids, forward, _heads_of, factor_of=factor_of)
            logits = self._observed_logits(model)
            modules = modules.with_quantities(dataclasses.replace(named, logits=logits))
        if self._config.compilation_config.mode:
            modules, parts = modules.at_sites(self.options.sites)
            logits = modules.named.logits
            outside = [] if logits is None else [logits.path]
            # Open as long as the engine.
            cuts = self._cut_graphs()
            self._sites = HookSites(model, parts, outside=outside, in_place=cuts).opened()
        self.serve(model, modules)

    def _cut_graphs(self) -> bool:
        """Has vLLM cut its piecewise CUDA graphs at the sites, where Python runs; False without.

        A piece reads what the one before it wrote, at the address of its capture: sites must change
        tensors in place.
        """
        compilation = self._config.compilation_config
        if uses_graphs := getattr(compilation.cudagraph_mode, "name", "NONE") != "NONE":
            compilation.splitting_ops = [*(compilation.splitting_ops or ()), IN_PLACE]
        return uses_graphs

    def _observed_reach(self, model: Any, forward: Callable[[], None]) -> CacheReach:
        """Observes which changes reach cached keys and values.

        A drafter makes its own of tokens only, or of the last hidden states, which all of them
        reach.
        """
        own = {*model.modules()}
        layers = [
            layer
            for layer in self._config.compilation_config.static_forward_context.values()
            if isinstance(layer, _cached_layer()) and layer in own
        ]
        # Some models let the tokens of an image attend to each other, both ways.
        causal = not self._config.model_config.is_mm_prefix_lm and all(
            getattr(layer, "attn_type", "decoder") == "decoder" for layer in layers
        )
        drafts = self._config.speculative_config
        if drafts is not None and drafts.use_eagle():
            return CacheReach(causal)
        return observe_reach(model, forward, layers, causal=causal)

    def _observed_logits(self, model: Any) -> SampledLogits | None:
        """Finds the module that returns the logits; None, with the reason logged, if that fails."""
        config = self._config.model_config
        try:
            shape = OBSERVED_ROWS, config.get_hidden_size()
            hidden = torch.ones(shape, dtype=config.dtype, device=self._runner.device)
            with torch.inference_mode(), self._without_adapters():
                return observe_logits(model, lambda: model.compute_logits(hidden))
        except Exception:  # noqa: BLE001 (the engine starts, without such gates)
            _LOG.exception("computing logits failed, so no gate can read them")
            return None

    def _without_adapters(self) -> contextlib.AbstractContextManager[None]:
        """Runs `OBSERVED_ROWS` rows as for requests without an adapter, the same modules."""
        found: contextlib.AbstractContextManager[None] = self._runner.maybe_select_dummy_loras(
            self._runner.lora_config, np.array([OBSERVED_ROWS], dtype=np.int32)
        )
        return found

    @property
    def _observed_ids(self) -> range:
        return observed_ids(self._config.model_config.get_vocab_size())

    def _forward(self, model: Any) -> None:
        """Runs dummy tokens without a KV cache, like vLLM's profiling run."""
        context = importlib.import_module("vllm.forward_context")
        device = self._runner.device
        ids: Tensor | None = torch.tensor(self._observed_ids, dtype=torch.int32, device=device)
        embeds = None
        config = self._config.model_config
        if config.supports_multimodal_inputs or config.enable_prompt_embeds:
            # The runner embeds the tokens before the forward: no hook fires there.
            shape = OBSERVED_ROWS, config.get_inputs_embeds_size()
            embeds = torch.linspace(-1, 1, shape[0] * shape[1], device="cpu").reshape(shape)
            embeds = embeds.to(device, config.dtype)
            ids = ids if getattr(model, "requires_raw_input_tokens", False) else None
        positions = torch.arange(OBSERVED_ROWS, dtype=torch.int64, device=device)
        noise = torch.Generator().manual_seed(0 if self._ranks is None else self._ranks.rank)
        hooks = [
            module.register_forward_hook(functools.partial(_attend, noise), prepend=True)
            for module in model.modules()
            if isinstance(module, _cached_layer())
        ]
        try:
            with (
                torch.inference_mode(),
                self._without_adapters(),
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

    def take_request(self, request_id: str, params: Any, prompt_length: int) -> None:
        """Opens the plan of a request that the runner has taken, if it has one."""
        payload = ((params and params.extra_args) or {}).get(NAME)
        if payload is None:
            return
        try:
            self._open(request_id, payload, prompt_length)
        except Exception as error:  # noqa: BLE001 (the request's failure: the engine goes on)
            self._fail_named(request_id, error)

    def note_prompts(self, started: Iterable[Any]) -> None:
        """Notes the tokens of prompts that are stored, of vLLM's `NewRequestData`."""
        if (harvest := self._harvest) is not None:
            for new in started:
                if (number := harvest.number_of(new.req_id)) is None:
                    continue
                harvest.start(new.req_id, number, new.prompt_token_ids)
                if harvest.error is not None:
                    self._fail_named(new.req_id, harvest.error)

    def _fail_named(self, request_id: str, error: Exception) -> None:
        """Fails a request, even if its plan could not be opened here."""
        self.fail(self.requests.setdefault(request_id, EngineRequest(request_id)), error)

    def _open(self, request_id: str, payload: Any, prompt_length: int) -> None:
        self.retire(request_id)
        if not isinstance(payload, dict):
            msg = "a plan reached the worker without passing the front end"
            raise HookError(msg)
        read = functools.partial(self._read, payload)
        parent = self.requests.get(payload["first"])
        digest: str = payload["digest"]
        if payload["every_rank"]:  # else the ranks behind the first one prepare it without captures
            digest = f"{digest}/every rank"
        names = digest, read, payload["key"]
        self.admit(request_id, prompt_length, *names, parent=parent)
        self.requests[request_id].first_changed = payload["prefix"]["changed"]
        if payload["streams"]:
            self.requests[request_id].stream_gates(GateStream())
        self._forget(payload["key"])

    def _read(self, payload: Mapping[str, Any]) -> Plan:
        missing = [it for it in payload["uploads"].values() if it not in self._uploads]
        if missing:
            msg = f"uploads were dropped before the request ran: {missing}"
            raise HookError(msg)
        # A name means one upload, of the kind that the front end has checked.
        named: Any = {name: self._uploads[it] for name, it in payload["uploads"].items()}
        plan = Plan.from_json(payload["plan"], named, dictionaries=named)
        plan = rewritten(plan, self.loaded_model().modules)
        others = self._ranks is not None and self._ranks.rank and not payload["every_rank"]
        if others:  # the first one captures
            return Plan(*(each for each in plan.entries if not isinstance(each, KeepEntry)))
        return plan

    def retire(self, request_id: str) -> EngineRequest | None:
        """Closes a request, and keeps its captures for the client."""
        request = super().retire(request_id)
        if request is not None and request.captures and not request.taken:
            if self._harvest is not None and self._harvest.owns(request.name):
                self._store(self._harvest, request)
            else:
                self._keep(request)
        return request

    def _keep(self, request: EngineRequest) -> None:
        self._finished[request.key] = request
        self._finished_bytes += request.capture_bytes
        while self._finished_bytes > self.options.results_bytes:
            key, dropped = self._finished.popitem(last=False)
            self._finished_bytes -= dropped.capture_bytes
            self._dropped[key] = None
            if len(self._dropped) > _MOST_DROPPED:
                self._dropped.popitem(last=False)

    def _forget(self, key: str) -> None:
        finished = self._finished.pop(key, None)
        if finished is not None:
            self._finished_bytes -= finished.capture_bytes

    # --- steps -------------------------------------------------------------------------------

    def take_step(self, scheduled: Any) -> None:
        """Takes over the drafts of a step, and the requests that resume after a preemption."""
        if self._checks:
            it = scheduled.scheduled_cached_reqs
            self.release({*it.req_ids} - it.resumed_req_ids)
        if self._config.speculative_config is None:
            return
        self._drafts = scheduled.scheduled_spec_decode_tokens
        cached = scheduled.scheduled_cached_reqs
        for name, answered in zip(cached.req_ids, cached.num_output_tokens, strict=True):
            request = self.requests.get(name)
            if request is not None and name in cached.resumed_req_ids:
                request.resume(request.prompt_length + answered)
        for new in scheduled.scheduled_new_reqs:  # V2 resumes a preempted one as a new one
            if (request := self.requests.get(new.req_id)) is not None and request.tokens:
                request.resume(len(new.prefill_token_ids))

    def settle_step(
        self,
        request_ids: Sequence[str],
        counts: Sequence[int],
        positions: Sequence[int],
        exact: Callable[[], list[int]],
    ) -> None:
        """Takes the row map of the next forward, as `settle`.

        Args:
            request_ids: in order of their rows.
            counts: rows of each.
            positions: position of the first row of each, as the host knows it: an engine that
                schedules asynchronously assumes that all drafts are accepted.
            exact: returns the positions of the device, after the steps before have run there.
        """
        if self.requests and self._config.speculative_config is not None:
            planned = [self.requests.get(name) for name in request_ids]
            if self._schedules_ahead and any(
                request is not None and request.drafts for request in planned
            ):
                positions = exact()
            for request, position in zip(planned, positions, strict=True):
                if request is not None:
                    request.decide(position + 1)
        self.settle(request_ids, counts, positions)

    def gate_values(self) -> dict[str, GateValues]:
        """Returns the values of gates that clients read along, by request, each value once."""
        found = {}
        for name, request in [*self.requests.items()]:
            if (stream := request.gate_stream) is not None:
                with self.failing([request]):
                    if values := stream.take():
                        found[name] = values
        return found

    def _agree(self) -> None:
        if self._ranks is not None and self.requests:  # alike on all ranks
            failed = {it.name: error_text(it.error) for it in self._failed if it.error is not None}
            failures, self._retried = self._ranks.merged(failed, self._retried)
            for name, error in failures.items():
                self._fail_named(name, HookError(error))
            for name in self._retried & self.requests.keys():
                self.requests[name].wait()
                self._stopped.pop(name, None)

    def check(self, output: Any, slots: Mapping[str, Tensor]) -> None:
        """Fails the requests whose plans made rows NaN or infinite, inside of `running`.

        Args:
            output: of the model.
            slots: of each layer, the slots of the step's rows.
        """
        if not any(request.changes for request, _ in self._in_step):
            return  # as in a dummy step, which has no slots
        hidden = output[0] if isinstance(output, tuple) else output
        later = self._reads_later(hidden)
        if later:  # the next step overwrites them
            copies = {id(each): each.clone() for each in slots.values()}
            slots = {layer: copies[id(each)] for layer, each in slots.items()}

        def written(rows: slice | Tensor) -> Iterator[WrittenRows]:
            yield from self._written({layer: each[rows] for layer, each in slots.items()})

        self.check_rows(hidden, written, later=later)

    def draw(self, logits: Tensor) -> Tensor:
        """Returns the logits of a step as a sampler may have them, see `check_logits`."""
        return self.check_logits(logits, later=self._reads_later(logits))

    def _reads_later(self, tensor: Tensor) -> bool:
        # Ranks agree on failures in the step, and a request with drafts may run again.
        decided = self._ranks is None and self._config.speculative_config is None
        return decided and not is_read_at_once(tensor)

    def _written(self, slots: Mapping[str, Tensor]) -> Iterator[WrittenRows]:
        """Returns where some slots are in the caches of all layers of attention.

        No request shares their blocks before the step is checked.
        """
        config = self._runner.kv_cache_config
        for group in config.kv_cache_groups:
            for layer in group.layer_names:
                cache = self._config.compilation_config.static_forward_context[layer].kv_cache
                if layer in slots and isinstance(cache, torch.Tensor):  # else it is no attention
                    size = group.kv_cache_spec.block_size * config.num_blocks // cache.shape[0]
                    own = slots[layer]
                    dims = [dim for dim in range(1, cache.dim()) if cache.shape[dim] == size]
                    # Else whole blocks are read.
                    inside = (dims[0], own % size) if len(dims) == 1 else None
                    yield WrittenRows(cache, own // size, inside)

    @torch.inference_mode()  # as the caches were made
    def read_checks(self, *, wait: bool = False) -> None:  # noqa: D102 (EngineWorker's)
        super().read_checks(wait=wait)

    # --- calls from the front end: bytes, so that nothing is pickled -------------------------

    def describe(self) -> bytes:
        """Returns the table of the modules, the key of salts and the reach of changes.

        Or the reason of a refusal.
        """
        if self.served is None:
            return json.dumps({"refused": self.refusal}).encode()
        described = {
            "modules": self.served.modules.to_json(),
            "secret": self._secret,
            "reach": self._reach.to_json(),
        }
        return json.dumps(described).encode()

    def manifest(self, names: list[str], options: dict[str, str]) -> bytes:
        """Returns the manifest of a run that stores some values of this model."""
        if self._ranks is not None and self._ranks.rank:  # the first one stores
            return b""
        return json.dumps(manifest(self._runner.get_model(), names, None, options)).encode()

    def begin_harvest(self, settings: str) -> bytes:
        """Stores the captures of a run's requests from now on; answers as `end_harvest`."""
        if self._ranks is not None and self._ranks.rank:
            return b""
        return json.dumps(self.start_harvest(HarvestSettings.from_json(settings))).encode()

    def end_texts(self, ends: list[list[Any]]) -> bytes:
        """Notes the ends of texts of the run, see `TextEnd`."""
        if (harvest := self._harvest) is not None:
            for each in ends:
                harvest.end_text(TextEnd(*each))
            self._check_harvest(harvest)
        return b""

    def end_harvest(self) -> bytes:
        """Stores the rest of the run; returns its numbers or its error."""
        self.read_checks(wait=True)
        if (harvest := self._harvest) is None:
            return b""
        # Those of the last step: the runner learns of their ends with the next one.
        for request in [*self.requests.values()]:
            if harvest.owns(request.name) and request.captures:
                self._store(harvest, request)
        return json.dumps(self.finish_harvest()).encode()

    def put(self, data: bytes, names: dict[str, str]) -> bytes:
        """Stores uploads by their digests, and the names that mean them from now on."""
        self._uploads |= unpacked_uploads(data)
        self._names |= names
        return b""

    def drop(self, digest: str, name: str = "") -> bytes:
        """Drops a name and its upload. A request that needs it and has not begun fails."""
        self._names.pop(name, None)
        if digest not in self._names.values():
            self.forget(self._uploads.pop(digest, None))
        return b""

    def uploaded(self, known: list[str]) -> bytes:
        """Returns the names of all uploads, and the uploads of unknown digests."""
        found = {it: self._uploads[it] for it in self._names.values() if it not in {*known}}
        return packed_uploads(found, names=json.dumps(self._names))

    def note(self, tickets: list[dict[str, Any]]) -> bytes:
        """Notes the tickets of finished requests, for the other API servers."""
        self._tickets |= {each["key"]: each for each in tickets}
        while len(self._tickets) > _MOST_DROPPED:
            del self._tickets[next(iter(self._tickets))]
        return b""

    def tickets(self, request_id: str) -> bytes:
        """Returns the tickets that were noted of a response."""
        found = [it for it in self._tickets.values() if it["request_id"] == request_id]
        return json.dumps(found).encode()

    def state(self) -> bytes:
        """Returns numbers of requests and captures, for tests and metrics."""
        numbers = {
            "requests": sum(it.prepared is not None for it in self.requests.values()),
            "results": len(self._finished),
            "results_bytes": self._finished_bytes,
            "steps": self.steps,
        }
        return json.dumps(numbers).encode()

    def take(self, key: str, tokens: int, since: int = 0) -> bytes:
        """Returns the captures of a finished request, and forgets them; empty without any.

        Args:
            key: of its ticket.
            tokens: tokens of prompt and answer. Rows from the last one on are cut off:
                an engine that schedules ahead runs them for nothing.
            since: first position that is wanted.
        """
        found = self._captured(key)
        self.discard([key])
        return (
            self._missing(key)
            if found is None
            else self.packed_captures(found, tokens, since=since)
        )

    def eagerly(self, is_eager: int) -> bytes:
        """Has steps run without graphs and compiled code, or under the engine's settings again."""
        self.is_eager = bool(is_eager)
        return b""

    def take_proof(self, key: str, tokens: int) -> bytes:
        """Returns the captures of a self-test as `take` does, without those that never ran."""
        found = self._captured(key)
        self.discard([key])
        if found is None:
            return self._missing(key)
        return self.packed_captures(found, tokens, whole=False)

    def prove(self, outcomes: str) -> bytes:
        """Serves from now on only what a self-test found to be right."""
        self.admit_proved(json.loads(outcomes))
        return b""

    def discard(self, keys: list[str]) -> bytes:
        """Forgets captures that no client wants, or that it has."""
        for key in keys:
            if (found := self._captured(key)) is not None:
                # The runner may run it once more, and others read what that writes: its plan stays.
                found.taken = True
            self._forget(key)
            self._tickets.pop(key, None)
        return b""

    def read_so_far(self, key: str, tokens: int, since: int) -> bytes:
        """Returns captures of a request as `take` does, and keeps them; none until all ran.

        The front end asks while it takes the request to run: here it may wait, or be preempted, or
        be finished.
        """
        found = self._captured(key)
        if found is None:
            return self._missing(key)
        return self.packed_captures(found, tokens, since=since, partial=True)

    def _captured(self, key: str) -> EngineRequest | None:
        """Returns the request that has captures: one that runs, or that is finished."""
        self.read_checks(wait=True)
        capturing = (it for it in self.requests.values() if it.key == key and it.captures)
        return next(capturing, None) or self._finished.get(key)

    def _missing(self, key: str) -> bytes:
        """Returns why captures are missing; nothing if another worker may have them."""
        return packed({}, {}, error=_DROPPED) if key in self._dropped else b""

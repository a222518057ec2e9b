"""Worker: the plans of a scheduler's requests, where its model runs."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import importlib
import itertools
import json
import logging
import secrets
import sys
import weakref
from array import array
from collections import OrderedDict
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

import safetensors
import safetensors.torch
import torch

from ferrohook.attach.attention import attended
from ferrohook.data.manifests import manifest
from ferrohook.effects.interventions import Add
from ferrohook.engines.admission import Admission, check_salt, text_of
from ferrohook.engines.harvest import HarvestSettings, TextEnd, error_answer
from ferrohook.engines.model.cache_reach import CacheReach, observe_reach
from ferrohook.engines.model.looks import HeadSizes, look_at
from ferrohook.engines.model.modules import OBSERVED_ROWS, SampledLogits, observed_ids
from ferrohook.engines.model.observing import observe
from ferrohook.engines.model.proof import differing
from ferrohook.engines.requests import reason_of
from ferrohook.engines.rewriting import cloning
from ferrohook.engines.sglang.options import SglangOptions
from ferrohook.engines.sglang.prefix_cache import NumberedPlan, PlanNumbers, can_move, check_tokens
from ferrohook.engines.sglang.streams import StreamPoints, stream_layers
from ferrohook.engines.sglang.supported import CAPABILITIES, refusals
from ferrohook.engines.uploads import UploadsOfPlan
from ferrohook.engines.wire import (
    ANSWERS,
    DIGESTS,
    FIELD,
    GATES,
    NAME,
    VECTORS,
    header_of,
    unpacked,
    unpacked_uploads,
)
from ferrohook.engines.worker import EngineWorker, WrittenRows
from ferrohook.errors import HookError
from ferrohook.gates.streaming import GateStream
from ferrohook.plans import Plan
from ferrohook.plans.entries import HookEntry, KeepEntry, keep, on

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch import Tensor, nn

    from ferrohook.engines.admission import ReadPlan
    from ferrohook.engines.model.modules import ModuleTable
    from ferrohook.engines.requests import EngineRequest
    from ferrohook.gates.streaming import GateValues
    from ferrohook.plans import Prepared
    from ferrohook.rows.batches import GatheredModule

_LOG: Final = logging.getLogger("ferrohook")
_LONGEST: Final = 600
"""Most tokens of a page that the self-test fills."""
_MOST_FIRSTS: Final = 64
"""Requests whose captures are kept for further answers; later ones run their prompts again."""
_names: Final = itertools.count()


class SchedulerWorker(EngineWorker):
    """Plans of the requests of one scheduler.

    A request has two attributes of ours: `ferrohook`, its name here (clients choose `rid`, and two
    may be alike), and `ferrohook_numbered`, its `NumberedPlan`. Both are None without a plan.

    Args:
        scheduler: the `Scheduler`.
    """

    def __init__(self, scheduler: Any) -> None:
        super().__init__(CAPABILITIES)
        self._scheduler = scheduler
        self._reqs: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
        """Requests with a plan, by its name."""
        self._wanted_by: tuple[frozenset[Prepared], frozenset[str]] = (frozenset(), frozenset())
        """Plans of the last step, and the hook points that they see."""
        self._last_rows = torch.empty(0, dtype=torch.long, device="cpu")
        """Last row of each request of the running step, whose logits are computed."""
        self._slots: Any = None
        """Slots of the keys and values of the running step's rows."""
        self._dictionaries: dict[str, Any] = {}
        """Uploaded dictionaries, by digest."""
        self._numbers: PlanNumbers | None = None
        """None where plans have salts: all ids in the keys of the cache must be tokens."""
        self._reach = CacheReach()
        self._firsts: OrderedDict[Any, tuple[EngineRequest, int]] = OrderedDict()
        """Requests that run a prompt for several answers to it, and the number of those to come."""

    # --- the model ---------------------------------------------------------------------------

    def load(self) -> None:
        """Takes over the model of a scheduler that is about to run.

        Raises:
            HookError: it serves no plans, with the reason.
        """
        self._runner = self._scheduler.tp_worker.model_runner
        args = importlib.import_module("sglang.srt.runtime_context").get_server_args()
        if refused := refusals(self._scheduler, args):
            raise HookError(CAPABILITIES.explain(refused))
        self._numbers = PlanNumbers() if can_move(self._scheduler.tree_cache, args) else None
        try:
            options = SglangOptions.of_environment()
        except ValueError as error:
            raise HookError(str(error)) from error
        model = self._runner.model
        processor = getattr(model, "logits_processor", None)
        if processor is None:
            msg = f"{type(model).__name__} has no logits_processor, where rows are checked"
            raise HookError(msg)
        self._add_attention(model)
        layers = stream_layers(model, self._run_alone)
        modules = observe(model, self._run_alone, _heads_of)
        self._points = StreamPoints(model, layers, self.failing)
        with self._all_points():
            named = look_at(
                model,
                self._observed_ids,
                self._run_alone,
                _heads_of,
                places=self._points.places,
                factor_of=_factor_of,
            )
            self._reach = self._observed_reach(model)
        named = dataclasses.replace(named, logits=self._observed_logits(processor))
        modules = modules.with_places(self._points.places).with_quantities(named)
        processor.register_forward_pre_hook(self._checking, with_kwargs=True)
        processor.register_forward_hook(self._drawing)
        self.serve(model, modules)
        secret = secrets.token_bytes(32)
        # Its requests are within no limits but their own.
        self._options = SglangOptions(capture_bytes=sys.maxsize)
        self._admission = Admission(modules, self._options, secret)
        self._test_itself(modules)
        self._options = options
        self._admission = Admission(modules, options, secret)

    def _add_attention(self, model: nn.Module) -> None:
        """Makes the attention of a model of transformers, which SGLang keeps in a dict, modules."""
        instances = getattr(model, "attention_instances", None)
        if instances:
            with attended() as calls:
                self._run_alone()
            for each in calls:
                layer: Any = each.module
                layer.add_module("attn", instances[layer.layer_idx])

    @contextlib.contextmanager
    def _all_points(self) -> Iterator[None]:
        """Makes the hook points of all layers see the stream."""
        self._points.wanted = self._points.places.values()
        try:
            yield
        finally:
            self._points.wanted = ()

    def _observed_reach(self, model: nn.Module) -> CacheReach:
        """Observes which changes reach cached keys and values.

        Speculative decoding is refused: the keys and values of a drafter may be made of the last
        hidden states.
        """
        layers: list[Any] = [it for it in model.modules() if isinstance(it, _attention())]
        causal = all(it.attn_type.value == "decoder" for it in layers)
        return observe_reach(model, self._run_alone, layers, causal=causal)

    def _observed_logits(self, processor: nn.Module) -> SampledLogits:
        """Looks at the logits that the model returns."""
        part, outputs = "next_token_logits", list[Any]()
        handle = processor.register_forward_hook(lambda *call: outputs.append(call[-1]))
        try:
            self._run_alone()
        finally:
            handle.remove()
        return SampledLogits("logits_processor", getattr(outputs[0], part).shape[-1], part)

    def describe(self) -> dict[str, Any]:
        """Returns what plans may do, or the reason of a refusal."""
        if self.served is None:
            return {"refusal": self.refusal}
        return CAPABILITIES.described(self.served.modules, self._options)

    def answer_call(self, call: str, argument: str) -> dict[str, Any]:
        """Answers a call of the front end, see `front_end.ask`.

        Args:
            call: `"describe"`; `"put"` for dictionaries, as safetensors by their digests, in
                base64; `"drop"` for one of them; or of `collect`: `"describe_harvest"`,
                `"begin_harvest"` and `"end_harvest"`.
            argument: of the call.
        """
        if call == "describe_harvest":
            return self._describe_harvest(**json.loads(argument))
        if call == "begin_harvest":
            return self.start_harvest(HarvestSettings.from_json(argument))
        if call == "end_harvest":
            return self.finish_harvest()
        if call == "put":
            self._dictionaries |= unpacked_uploads(base64.b64decode(argument))
        elif call == "drop":
            self.forget(self._dictionaries.pop(argument, None))
        else:
            return self.describe()
        return {}

    def _describe_harvest(self, custom: dict[str, Any], options: dict[str, str]) -> dict[str, Any]:
        """Returns the captured values and the manifest of a run, and the most requests at once."""
        try:
            modules = self.loaded_model().modules
            read = self._read(custom)
        except (HookError, ValueError) as error:
            return error_answer(error)
        names = [value.name for each in modules.captures(read.plan) for value in each.values]
        made_of = manifest(self._runner.model, names, None, {**options, "plan": read.digest})
        most = self._scheduler.max_running_requests
        return {"names": names, "made_of": made_of, "most_running": most}

    def _test_itself(self, modules: ModuleTable) -> None:
        """Runs known requests through the scheduler, and compares the rows that they capture.

        Two in one batch, one of them changed at some positions. Both capture the stream after a
        layer, and a quantity of each kind. Then requests of the same tokens, one after the other,
        with a change and without one: none must read keys and values of another.

        Raises:
            HookError: they are not the rows of the requests.
        """
        names = [name for name, it in modules.table.items() if it.place or it.kind == "stream"]
        names += [name for name in modules.named.table if name.startswith("@resid_post.")]
        if not names:
            msg = "no layer was found whose output is the residual stream that plans see"
            raise HookError(msg)
        stream = names[0]
        kinds = {name.partition(".")[0]: name for name in modules.named.table}
        kinds.pop("@experts", None)  # rounding decides the order of two whose weights are alike
        plain = Plan(keep([stream, *kinds.values()]))
        first = self._observed_ids
        alone = [self._captured([(each, plain)])[0] for each in (first, first[::-1])]
        size = alone[1][stream].float().abs().mean()
        add = on(stream, Add(4 * size[None]), at=slice(1, 4))
        both = self._captured([(first, plain), (first[::-1], Plan(add, *plain.entries))])
        changed = alone[1][stream].clone()
        changed[1:4] += 4 * size
        for found, expected in ((both[0], alone[0]), (both[1], {stream: changed})):
            for name, right in expected.items():
                if reason := differing(found[name], right, alone[1][name]):
                    msg = f"the self-test failed: a request captured wrong rows of {name!r}: "
                    raise HookError(msg + reason)
        self._test_cache(stream, names[-1], size)

    def _test_cache(self, stream: str, last: str, magnitude: Tensor) -> None:
        """Compares requests that find the keys and values of others with the same tokens.

        Args:
            stream: a layer whose output some of them change.
            last: the last layer.
            magnitude: of numbers of the stream.

        Raises:
            HookError: one has read what another's plan changed, or not what its own did.
        """
        page = max(self._scheduler.tree_cache.page_size, OBSERVED_ROWS)
        if page > _LONGEST:
            return
        tokens = [1 + token % OBSERVED_ROWS for token in range(page + OBSERVED_ROWS)]
        add = on(stream, Add(4 * magnitude[None]), at=slice(1, page))
        plain, steered = ((tokens, Plan(*it, keep(last, at="last_prompt"))) for it in ([], [add]))

        def end_of(*asked: tuple[Iterable[int], Plan]) -> list[Tensor]:
            return [acts[last].float() for acts in self._captured(*([each] for each in asked))]

        rows = end_of(steered, plain, steered)
        (right,) = end_of(plain)
        effect = torch.dist(rows[0], right)
        if max(torch.dist(rows[1], right), torch.dist(rows[2], rows[0])) > effect / 4:
            msg = "the self-test failed: requests with different plans shared keys and values"
            raise HookError(msg)

    def _captured(self, *batches: Iterable[tuple[Iterable[int], Plan]]) -> list[dict[str, Tensor]]:
        """Runs batches of requests with plans, one after the other; returns what each captured."""
        sent = [[_request(tokens, plan) for tokens, plan in batch] for batch in batches]
        self._run(*sent)
        found = []
        for req in (req for batch in sent for req in batch):
            if not (req.customized_info or {}).get(FIELD):
                msg = f"the self-test failed: {req.finished_reason}"
                raise HookError(msg)
            (data,) = req.customized_info[FIELD][0:1]
            found.append(unpacked(data).acts)
        return found

    @property
    def _observed_ids(self) -> range:
        return observed_ids(self._scheduler.model_config.vocab_size)

    def _run_alone(self) -> None:
        """Runs a dummy request of the observed tokens, in one step."""
        self._run([_request(self._observed_ids)])

    @torch.no_grad()
    def _run(self, *batches: Iterable[Any]) -> None:
        """Runs batches of requests of the scheduler's process to their ends; empties the cache."""
        scheduler, streamer = self._scheduler, self._scheduler.output_streamer
        sender, streamer.send_to_detokenizer = streamer.send_to_detokenizer, _Nowhere()
        try:
            for batch in batches:
                self._run_batch(batch)
        finally:
            streamer.send_to_detokenizer = sender
            scheduler.flush_cache()

    def _run_batch(self, reqs: Iterable[Any]) -> None:
        scheduler = self._scheduler
        for req in reqs:
            scheduler.init_req_max_new_tokens(req)
            scheduler._add_request_to_queue(req)
        while True:
            plan = scheduler.get_next_batch_to_run(
                running_batch=scheduler.running_batch, last_batch=scheduler.last_batch
            )
            scheduler.running_batch, batch = plan.running_batch, plan.batch_to_run
            if batch:
                scheduler.process_batch_result(batch, scheduler.run_batch(batch))
            scheduler.last_batch = batch
            if not batch:
                return

    # --- requests ----------------------------------------------------------------------------

    def take_request(self, req: Any) -> None:
        """Opens the plan of a request that comes into the queue, if it has one.

        Raises:
            HookError, ValueError: the plan is bad or refused, or the request has keys of ours.
        """
        if hasattr(req, "ferrohook"):  # it was retracted
            return
        req.ferrohook = req.ferrohook_numbered = None
        if self._numbers is not None:
            check_tokens(req.origin_input_ids)
        params = getattr(req.sampling_params, "custom_params", None)
        custom = params if isinstance(params, dict) else {}
        if req.to_finish is None:
            if req.cache_salt:
                check_salt(req.cache_salt)
            if custom.get(NAME) is not None:
                self._open(req, custom)

    def _open(self, req: Any, custom: Mapping[str, Any]) -> None:
        self.loaded_model()
        for feature, is_used in (
            ("sessions", req.session is not None),
            ("prompts as embeddings", req.input_embeds is not None),
        ):
            if is_used:
                CAPABILITIES.refuse(feature)
        read = self._read(custom)
        params, prompt = req.sampling_params, len(req.origin_input_ids)
        if read.captures:
            self._admission.check_captures(read.plan, prompt, params.max_new_tokens, params.n)
        name, first, kept = str(next(_names)), None, None
        if ANSWERS in custom:
            prompt_of_answers = custom[ANSWERS], tuple(req.origin_input_ids)
            if params.max_new_tokens == 0:  # SGLang's own request, which runs the prompt
                kept = prompt_of_answers
            else:
                first = self._first_of(prompt_of_answers)
        self.admit(name, prompt, read.digest, lambda: _cloning(read.plan), name, parent=first)
        if kept is not None:
            self._keep_first(kept, self.requests[name], params.n)
        # One that leaves a queue otherwise than by `_aborting` comes to no step and no answer.
        weakref.finalize(req, self.retire, name).atexit = False
        self._reqs[name] = req
        req.ferrohook = name
        req.ferrohook_numbered = self._numbered_plan(read, req, is_first=first is None)
        if req.stream:
            self._stream_gates(req, self.requests[name])
        harvest = self._harvest
        if harvest is not None and (number := harvest.number_of(req.rid)) is not None:
            harvest.start(name, number, req.origin_input_ids)
            self._check_harvest(harvest)

    def _read(self, custom: Mapping[str, Any]) -> ReadPlan:
        """Reads the plan of `custom_params`.

        Raises:
            ValueError: it is bad.
        """
        text, uploads = text_of(custom[NAME]), custom.get(VECTORS, "")
        self._options.check_plan(len(text) + (len(uploads) if isinstance(uploads, str) else 0))
        return self._admission.read(text, self._named(uploads))

    def _keep_first(self, name: Any, request: EngineRequest, answers: int) -> None:
        """Keeps the request that SGLang runs before several answers to its prompt.

        It has no answer. Its captures are the rows of the prompt of theirs.
        """
        request.taken = True
        self._firsts[name] = request, answers
        if len(self._firsts) > _MOST_FIRSTS:
            self._firsts.popitem(last=False)

    def _first_of(self, name: Any) -> EngineRequest | None:
        """Returns the request that ran the prompt for an answer; None if that has to run it."""
        request, answers = self._firsts.pop(name, (None, 0))
        if request is None or request.failure is not None or request.tokens < request.prompt_length:
            return None
        if answers > 1:
            self._firsts[name] = request, answers - 1
        return request

    def _numbered_plan(self, read: ReadPlan, req: Any, *, is_first: bool) -> NumberedPlan:
        """Returns the plan of a request as the cache knows it, or gives the request a salt."""
        prompt = len(req.origin_input_ids)
        prefix = self._admission.prefix(read, prompt, self._reach)
        of_client = req.cache_salt if self._numbers is None else None
        salt = self._admission.salt(read, prompt, of_client)
        plan = NumberedPlan(0, None, prefix.read if is_first else prefix.gated)
        if prefix.changed is None or salt is None:
            return plan
        if self._numbers is None:
            req.cache_salt = salt
            return plan
        return plan._replace(number=self._numbers.find(salt), changed=prefix.changed)

    def _stream_gates(self, req: Any, request: EngineRequest) -> None:
        """Makes the values of a request's kept gates go with the tokens that its client reads."""
        stream, prompt = GateStream(), len(req.origin_input_ids)
        request.stream_gates(stream)
        if request.gate_stream is None:
            return

        def part_of(tokens: slice) -> GateValues:
            # The last token runs in the next step, which the overlap may have run already.
            end = prompt + tokens.stop - 1
            return self._taken(request, stream, end) if tokens.stop > tokens.start else {}

        req.customized_info = {**(req.customized_info or {}), GATES: _Parts(part_of)}

    def _taken(self, request: EngineRequest, stream: GateStream, end: int) -> GateValues:
        """Takes values of a request's gates, where SGLang reads what goes with its tokens."""
        with self.failing([request]):
            return stream.take(end)
        return {}

    def _named(self, data: Any) -> UploadsOfPlan:
        """Reads the uploads that a plan names: vectors, and the digests of dictionaries.

        Raises:
            ValueError: they are none, or a dictionary was dropped.
        """
        if data == "":
            return UploadsOfPlan.travelled({})
        try:
            content = base64.b64decode(data, validate=True)
            vectors = safetensors.torch.load(content)
            text = header_of(content).get("__metadata__", {}).get(DIGESTS, "{}")
            digests = dict(json.loads(text))
            dropped = [name for name, it in digests.items() if it not in self._dictionaries]
        except (
            safetensors.SafetensorError,
            KeyError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            msg = f"{VECTORS} must be safetensors in base64: {error}"
            raise ValueError(msg) from error
        if dropped:
            msg = f"dictionaries were dropped before the request came: {dropped}"
            raise ValueError(msg)
        found = {name: (self._dictionaries[it], it) for name, it in digests.items()}
        return UploadsOfPlan.travelled(vectors, found)

    def reject(self, req: Any, error: Exception) -> None:
        """Ends a request that is not in the queue yet, with a status of 400."""
        scheduler, reason = self._scheduler, str(error)
        if not isinstance(error, HookError | ValueError):
            _LOG.error("ferrohook: request %s", req.rid, exc_info=error)
            reason = f"the plan could not be read: {type(error).__name__}: {error}"
        if req.beam_group is not None:
            scheduler.beam_coordinator.retire_group(req)
        req.to_finish, req.finished_reason = None, _abort(reason, HTTPStatus.BAD_REQUEST)
        scheduler.output_streamer.stream_output([req], req.return_logprob)

    def names(self, reqs: Iterable[Any]) -> set[str]:
        """Returns the names of the plans of requests."""
        return {req.ferrohook for req in reqs} & self.requests.keys()

    # --- steps -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def forward(self, forward_batch: Any) -> Iterator[None]:
        """Enters the batch of a step around its forward."""
        rows = 0
        with self.failing():
            rows = len(forward_batch.input_ids)
            names, counts, positions = _rows(forward_batch)
            self.settle(names, counts, positions)
            self._last_rows = torch.tensor(counts, dtype=torch.long, device="cpu").cumsum(0) - 1
            self._slots = forward_batch.out_cache_loc
            self._points.wanted = self._wanted()
        try:
            with self.running(rows):
                yield
        finally:
            self._points.wanted, self._slots = (), None
        for name in self.failures():
            if (req := self._reqs.get(name)) is not None:
                req.skip_radix_cache_insert = True

    def _gathered(self, rows: int) -> list[GatheredModule]:
        gathered = super()._gathered(rows)
        if self._sampled:
            gathered.append((self._runner.model.logits_processor, self._last_rows, None))
        return gathered

    def _wanted(self) -> frozenset[str]:
        """Returns the hook points that requests of the settled step see."""
        plans = frozenset(it.prepared for it, _ in self._in_step if it.prepared is not None)
        if plans != self._wanted_by[0]:
            places = self._points.places.values()
            entries = [entry for plan in plans for entry in plan.entries]
            # The place of a module; a gate that is captured has none.
            listed: list[Any] = [it.what for it in entries if isinstance(it.what, list)]
            names: list[str] = [name for of_entry in listed for name in of_entry]
            names += [it.reads.what for it in entries if isinstance(it, HookEntry) and it.reads]
            paths = map(self.loaded_model().modules.path_of, names)
            wanted = frozenset(path for path in paths if path in places)
            self._wanted_by = plans, wanted
        return self._wanted_by[1]

    def _checking(self, _module: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Looks at the hidden states in front of the logits, the second argument."""
        with self.failing():
            if self._in_step:
                hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[1]
                self.check_rows(hidden, self._written)

    def _drawing(self, _module: object, _args: object, output: Any) -> None:
        """Looks at the logits that tokens are drawn from."""
        with self.failing():
            if self._drawn and output.next_token_logits is not None:
                output.next_token_logits = self.check_logits(output.next_token_logits)

    def _written(self, rows: slice | Tensor) -> Iterator[WrittenRows]:
        """Returns where rows of the step wrote keys and values, see `check_rows`."""
        pool, slots = self._runner.token_to_kv_pool, self._slots[rows]
        for name in ("k_buffer", "v_buffer", "kv_buffer"):
            for buffer in getattr(pool, name, None) or ():
                yield WrittenRows(buffer, slots)

    def end_early(self, reqs: Iterable[Any]) -> None:
        """Ends requests whose plans failed or stop them, before their step's result is processed.

        The overlap runs a step before the result of the one before it: a request that ends there
        has not failed.
        """
        for req in reqs:
            request = self.requests.get(getattr(req, "ferrohook", None) or "")
            if request is not None and not req.finished():
                with self.failing([request]):
                    _end_early(req, request)

    # --- answers -----------------------------------------------------------------------------

    def answer(self, reqs: Iterable[Any]) -> None:
        """Attaches captures to finished requests, before they are answered."""
        for req in reqs:
            if getattr(req, "ferrohook", None) in self.requests and req.finished():
                try:
                    self._answer(req)
                except Exception as error:  # noqa: BLE001 (the request's failure)
                    status = HTTPStatus.INTERNAL_SERVER_ERROR
                    req.finished_reason, req.finished_len = _abort(reason_of(error), status), 0
                    with self.failing():
                        self.retire(req.ferrohook)

    def _answer(self, req: Any) -> None:
        request, end = self.requests[req.ferrohook], req.finished_reason.to_json()
        if request.reason and end.get("message") == request.reason:
            req.finished_len = min(request.valid, len(req.output_ids))
        stops = (stopped := request.stopped) and end.get("matched") == stopped.gate
        if stops:
            req.finished_len = min(request.answered, len(req.output_ids))
        self.retire(req.ferrohook)
        texts = req.output_ids_through_stop
        if not request.captures or request.taken or end["type"] == "abort":
            return
        # The last token ran only if a gate read it, or if it is the prompt's.
        tokens = len(req.origin_input_ids) + len(texts) + (1 if stops or not texts else 0)
        harvest = self._harvest
        if harvest is not None and (number := harvest.number_of(req.rid)) is not None:
            harvest.end_text(TextEnd(number, [*texts], tokens))
            self._store(harvest, request)
            return
        data = self.packed_captures(request, tokens)
        info = {**(req.customized_info or {}), FIELD: _Parts(lambda _tokens: data)}
        if (stream := request.gate_stream) is not None:
            info[GATES] = _Parts(lambda _tokens: self._taken(request, stream, tokens - 1))
        req.customized_info = info


def _end_early(req: Any, request: EngineRequest) -> None:
    """Ends a request whose plan failed or stops it; see `SchedulerWorker.end_early`."""
    if request.state == "ended":
        if len(req.output_ids) >= request.valid:
            req.to_finish = _abort(request.reason, HTTPStatus.INTERNAL_SERVER_ERROR)
    elif (stopped := request.stopped) and len(req.output_ids) >= request.answered:
        req.to_finish = _matched(stopped.gate)
        req.sampling_params.no_stop_trim = True  # a text may contain the gate's name


class _Parts:
    """Captures or values that go with the tokens of an answer, in place of SGLang's list.

    SGLang takes a slice for each output. The last one may have no token: a plan may end a request
    after its last token was sent.

    Args:
        part_of: returns what goes with some tokens of the answer; empty for nothing.
    """

    def __init__(self, part_of: Callable[[slice], Any]) -> None:
        self._part_of = part_of

    def __getitem__(self, tokens: slice) -> list[Any]:
        count = tokens.stop - tokens.start
        part = self._part_of(tokens)
        return [None] * (count - 1) + [part] if part else [None] * count


def _abort(reason: str, status: HTTPStatus) -> Any:
    """Makes the end of a request with an error."""
    finish = importlib.import_module("sglang.srt.managers.schedule_batch").FINISH_ABORT
    return finish(reason, status)


def _matched(gate: str) -> Any:
    """Makes the end of a request by its plan."""
    batches = importlib.import_module("sglang.srt.managers.schedule_batch")
    return batches.FINISH_MATCHED_STR(gate)


def _request(tokens: Iterable[int], plan: Plan | None = None) -> Any:
    """Makes a request that ends with its prompt."""
    batches = importlib.import_module("sglang.srt.managers.schedule_batch")
    sampling = importlib.import_module("sglang.srt.sampling.sampling_params")
    params = sampling.SamplingParams(temperature=0.0, max_new_tokens=1, ignore_eos=True)
    params.normalize(None)
    params.custom_params = None if plan is None else {NAME: plan.to_json()}
    return batches.Req("ferrohook-test", "", array("q", tokens), params)


def _heads_of(module: Any) -> HeadSizes | None:
    """Returns the heads of what SGLang calls as attention(q, k, v), None for any other module."""
    if not isinstance(module, _attention()) or module.v_head_dim != module.head_dim:
        return None
    return HeadSizes(module.tp_q_head_num, module.tp_k_head_num, module.head_dim)


def _attention() -> Any:
    """Returns the class of the modules that write keys and values."""
    return importlib.import_module("sglang.srt.layers.radix_attention").RadixAttention


def _factor_of(router: nn.Module) -> float:
    """Returns the factor of the output of the experts that a module chooses."""
    topk = importlib.import_module("sglang.srt.layers.moe.topk")
    if not isinstance(router, topk.TopK):
        return 1.0
    config: Any = router.topk_config
    fused = topk.is_routed_scaling_factor_fused_in_topk(config)
    return 1.0 if fused else float(config.routed_scaling_factor or 1.0)


class _Nowhere:
    """Replaces the detokenizer for requests without a client."""

    def send_output(self, *_args: object) -> None:
        """Drops an answer."""


def _cloning(plan: Plan) -> Plan:
    """Returns the plan with captures that are copies: SGLang adds to outputs in place."""
    return Plan(*(cloning(it) if isinstance(it, KeepEntry) else it for it in plan.entries))


def _rows(forward_batch: Any) -> tuple[list[str | None], list[int], list[int]]:
    """Returns the names of requests in order of their rows, rows of each, and first positions."""
    names = [req.ferrohook for req in getattr(forward_batch, "ferrohook_reqs", None) or ()]
    lengths = forward_batch.seq_lens_cpu
    if lengths is None:
        lengths = forward_batch.seq_lens
    ends = lengths.tolist()[: len(names)]
    if forward_batch.forward_mode.is_decode():
        return names, [1] * len(names), [end - 1 for end in ends]
    return names, forward_batch.extend_seq_lens_cpu, forward_batch.extend_prefix_lens_cpu

"""Self-test of an engine before its first request: known requests, by its scheduler and runner.

First the proof of its modules: under the engine's settings they serve plans as they do eagerly, or
they are refused. Then known requests share steps at modules that passed. Requests that run one at
a time, in one piece, are the reference for requests that share steps in chunks. A row is right if
no other known row is nearer, so low precision and other batch shapes do no harm.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import logging
from typing import TYPE_CHECKING, Any, Final

import torch

from ferrohook.effects.interventions import Add
from ferrohook.engines.model.cache_reach import CacheReach
from ferrohook.engines.model.modules import ModuleTable
from ferrohook.engines.model.proof import Proof, Served
from ferrohook.engines.vllm.calls import call
from ferrohook.engines.vllm.requests import FrontEnd, VllmOptions
from ferrohook.engines.vllm.supported import CAPABILITIES, is_newer
from ferrohook.engines.wire import NAME, unpacked
from ferrohook.engines.worker import PROBE
from ferrohook.errors import HookError
from ferrohook.plans import Plan
from ferrohook.plans.entries import KeepEntry, keep, on

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

_LOG: Final = logging.getLogger("ferrohook")
_VLLM_LOG: Final = logging.getLogger("vllm.ferrohook")
"""Its handlers show information too."""
_MARK: Final = "_ferrohook_tested"
_MOST_STEPS: Final = 1_000
_MOST_LOGGED: Final = 4
"""Refused modules that the log names."""
_NEW: Final = 2
"""New tokens of a request of the proof."""
_LONGEST: Final = 600
"""Most tokens of a prompt; larger blocks are not filled, so the salt is not tested there."""
_GONE: Final = "a vector that was never uploaded"
_FAR: Final = 0.25
"""Share of a plan's effect from which a value is another one."""


def run(core: Any) -> None:
    """Tests an `EngineCore` that is idle, once; plans are refused if a known request is wrong."""
    if getattr(core, _MARK, False):
        return
    setattr(core, _MARK, True)
    try:
        described = json.loads(call(core, "describe")[0])
        if "refused" in described:
            return
        prove(core, described)
        check(core, json.loads(call(core, "describe")[0]))
    except Exception as error:  # noqa: BLE001 (whatever an unknown release raises)
        reason = f"the self-test of ferrohook in vLLM {CAPABILITIES.version} failed: {error}"
        _LOG.error("ferrohook: plans are refused: %s", reason)
        with contextlib.suppress(Exception):  # of a worker without ferrohook
            call(core, "refuse", reason)
        return
    if is_newer():
        _LOG.warning(
            "ferrohook: vLLM %s is newer than the tested releases (%s); plans are served, because "
            "the self-test passed",
            CAPABILITIES.version,
            ", ".join(CAPABILITIES.tried),
        )


def prove(core: Any, described: Mapping[str, Any]) -> Mapping[str, Mapping[str, str | None]]:
    """Serves plans at all modules, and has the workers admit what comes out as it does eagerly.

    Args:
        core: an `EngineCore` that is idle.
        described: answer of its worker to `describe`.

    Returns:
        the outcomes, by module and form of plan.

    Raises:
        HookError: no module can be captured and changed at positions.
    """
    engine = _Engine(core, described)
    proof = Proof(engine.modules, engine.max_length - _NEW, VllmOptions().capture_bytes)
    try:
        outcomes = proof.outcomes(lambda plan, **how: engine.prove(plan, proof.length, **how))
    finally:
        engine.forget()
    refused = {name: each for name, each in outcomes.items() if any(each.values())}
    if outcomes and _sites(engine.modules.proved(outcomes)) is None:
        named, told = next(iter(refused.items()))
        msg = (
            f"no module can be captured and changed at positions in an engine with "
            f"{settings(core.vllm_config)}; {_told(named, told)}"
        )
        raise HookError(msg)
    call(core, "prove", json.dumps(outcomes))
    log = _LOG.warning if refused else _VLLM_LOG.info
    shown = [_told(*each) for each in [*refused.items()][:_MOST_LOGGED]]
    if len(refused) > _MOST_LOGGED:
        shown.append(f"and {len(refused) - _MOST_LOGGED} more, see the capabilities of the engine")
    log(
        "ferrohook: with %s, %d of %d modules serve plans as they do eagerly%s",
        settings(core.vllm_config),
        len(outcomes) - len(refused),
        len(outcomes),
        "".join(f"; {each}" for each in shown),
    )
    return outcomes


def _told(name: str, outcome: Mapping[str, str | None]) -> str:
    """Returns the forms of plan that are refused at a module, with the reasons."""
    forms: dict[str, list[str]] = {}
    for form, reason in outcome.items():
        if reason is not None:
            forms.setdefault(reason, []).append(form)
    reasons = (f"{', '.join(each)} ({reason})" for reason, each in forms.items())
    return f"refused at {name!r}: {', '.join(reasons)}"


def settings(config: Any) -> str:
    """Returns the settings of a `VllmConfig` with which an engine may serve plans differently."""
    compilation, parallel = config.compilation_config, config.parallel_config
    model = config.model_config
    return ", ".join(
        [
            "compilation" if compilation.mode else "eager mode",
            f"cudagraph_mode {getattr(compilation.cudagraph_mode, 'name', 'NONE')}",
            f"quantization {model.quantization}",
            f"{model.dtype}",
            f"tensor_parallel_size {parallel.tensor_parallel_size}",
            config.device_config.device_type,
        ]
    )


def check(core: Any, described: Mapping[str, Any]) -> None:
    """Serves known requests, and checks what comes of them.

    Args:
        core: an `EngineCore` that is idle.
        described: answer of its worker to `describe`.

    Raises:
        HookError: a row is another's, a vector was added elsewhere, a failure was lost, a cache was
            read or written without a plan's salt, or a request stays open.
    """
    engine = _Engine(core, described)
    if (sites := _sites(engine.modules)) is None:
        return
    engine.forget()
    try:
        _check(engine, *sites)
    finally:
        engine.forget()
    if numbers := engine.open_requests():
        msg = f"{numbers} requests stayed open"
        raise HookError(msg)


def _sites(modules: ModuleTable) -> tuple[str, str] | None:
    """Returns an early and a late module; None if none can be captured and changed at positions."""
    usable = {
        name: info
        for name, info in modules.table.items()
        if name
        and info.refused is None
        and info.kind != "other"
        and not any((info.proof or {}).get(form) for form in ("capture", "steer", "positions"))
    }
    streams = [name for name, info in usable.items() if info.kind == "stream"]
    layers = [name for name in usable if name.rpartition(".")[2].isdigit()]
    found = streams or layers or [*usable]
    return (found[0], found[-1]) if found else None


def _check(engine: _Engine, first: str, last: str) -> None:
    length = min(engine.block + 8, _LONGEST, engine.max_length - 2)
    one, other = engine.prompts(length)
    both = [keep(name) for name in dict.fromkeys((first, last))]

    # Each request by itself, in one piece.
    (plain,) = engine.serve(_Known(one, Plan(*both), 2))
    (beside,) = engine.serve(_Known(other, Plan(*both), 2))
    known = torch.cat([plain.rows(first), beside.rows(first)])
    vector = known.float().abs().mean() * torch.linspace(-4, 4, known.shape[-1], device="cpu")
    steer = on(first, Add(vector))
    (steered,) = engine.serve(_Known(one, Plan(steer, *both)))

    # Together, in chunks; one from its middle on.
    half = length // 2
    changed, beside_again, plain_again, failed = engine.serve(
        _Known(one, Plan(on(first, Add(vector), at=slice(half, None)), *both), 2),
        _Known(other, Plan(*both), 2),
        _Known(one, Plan(*both), 2),
        _Known(other, Plan(keep(first)), fails=True),
        budget=max(1, 2 * length // 3),
    )
    if _GONE not in (failed.error or ""):
        msg = "a request whose plan fails did not end with the right reason"
        raise HookError(msg)
    vector = vector.to(known.dtype)
    known = torch.cat([known, known + vector])
    for got, right in ((beside_again, beside), (plain_again, plain)):
        ran = length + (got.tokens[0] == right.tokens[0])
        _compare(first, got.rows(first)[:ran], right.rows(first)[:ran], known)
    expected = plain.rows(first)[:length].clone()
    expected[half:] += vector
    _compare(first, changed.rows(first)[:length], expected, known)
    known = torch.cat([each.rows(last) for each in (plain, beside, steered)])
    _compare(last, changed.rows(last)[:half], plain.rows(last)[:half], known)

    def differ(got: _Known, of: _Known) -> float:
        """Returns the distance of two answers at the end of the prompt."""
        one, another = (each.rows(last)[:length][-1].float() for each in (got, of))
        return torch.dist(one, another).item()

    effect = differ(steered, plain)
    if not min(effect, differ(changed, plain)) > 4 * differ(plain_again, plain):
        msg = f"a vector that was added to {first!r} did not reach {last!r}"
        raise HookError(msg)

    # By now the prefix cache holds these tokens, from requests that changed nothing.
    end = keep(last, at="last_prompt")
    (steered_again,) = engine.serve(_Known(one, Plan(steer, end)))
    engine.forget()
    engine.serve(_Known(one, Plan(steer)))
    (plain_again,) = engine.serve(_Known(one, Plan(end)))
    for got, right in ((steered_again, steered), (plain_again, plain)):
        if not differ(got, right) <= _FAR * effect:
            msg = "requests with different plans shared a prefix in the cache"
            raise HookError(msg)


def _compare(name: str, got: Tensor, right: Tensor, known: Tensor) -> None:
    """Checks that each row is nearest to the one that is right, of the known ones.

    Raises:
        HookError: a row is not; or some are missing.
    """
    if got.shape != right.shape:
        msg = f"{name!r} has {len(got)} rows instead of {len(right)}"
        raise HookError(msg)
    exact = "donot_use_mm_for_euclid_dist"
    nearest = torch.cdist(got.float(), known.float(), compute_mode=exact).amin(1)
    own = torch.linalg.vector_norm(got.float() - right.float(), dim=1)
    wrong = (~(own <= nearest * (1 + 1e-5))).nonzero().flatten().tolist()
    if wrong:
        msg = f"{name!r} has wrong rows at positions {wrong}"
        raise HookError(msg)


@dataclasses.dataclass
class _Known:
    """A request, and what came of it."""

    prompt: list[int]
    plan: Plan
    new_tokens: int = 1
    fails: bool = False
    """The worker fails it, as vectors of its plan are gone."""
    key: str = ""
    """Key of its captures."""
    tokens: list[int] = dataclasses.field(default_factory=list)
    acts: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    every_rank: bool = False
    """All ranks capture, and values whose hook did not run are left out."""
    ranks: list[dict[str, Tensor]] = dataclasses.field(default_factory=list)
    """Captures of each rank, if all capture."""
    error: str | None = None
    """Reason of its failure."""

    def rows(self, name: str) -> Tensor:
        """Returns its captures.

        Raises:
            HookError: it failed.
        """
        if self.error is not None:
            raise HookError(self.error)
        return self.acts[name]


class _Engine:
    """Requests to an `EngineCore`, in its process.

    Args:
        core: the `EngineCore`.
        described: answer of its worker to `describe`.
    """

    def __init__(self, core: Any, described: Mapping[str, Any]) -> None:
        self._core = core
        self.modules = ModuleTable.from_json(described["modules"])
        secret = bytes.fromhex(described["secret"])
        reach = CacheReach.from_json(described["reach"])
        self._front_end = FrontEnd(self.modules, VllmOptions(), secret, reach)
        self._number = 0
        config = core.vllm_config
        self.block: int = config.cache_config.block_size
        self.max_length: int = config.model_config.max_model_len
        self._vocabulary: int = config.model_config.get_vocab_size()
        self._in_chunks = bool(config.scheduler_config.enable_chunked_prefill)

    def prompts(self, length: int) -> tuple[list[int], list[int]]:
        """Returns two prompts that have no token in common, as far as the vocabulary goes."""
        tokens = [token % self._vocabulary for token in range(2 * length)]
        return tokens[::2], tokens[1::2]

    def serve(self, *sent: _Known, budget: int | None = None) -> tuple[_Known, ...]:
        """Serves requests at once.

        Args:
            sent: the requests.
            budget: most tokens of a step; None for the engine's own limit.
        """
        known = {self._add(each): each for each in sent}
        scheduler = self._core.scheduler
        whole = scheduler.max_num_scheduled_tokens
        if budget is not None and self._in_chunks:
            scheduler.max_num_scheduled_tokens = min(budget, whole)
        try:
            for output in self._outputs():
                self._take(output, known[output.request_id])
        except BaseException:
            self._core.abort_requests([*known])
            raise
        finally:
            scheduler.max_num_scheduled_tokens = whole
        return sent

    def prove(self, plan: Plan, length: int, *, eagerly: bool, again: bool) -> Served:
        """Serves a request of the proof, see `Serve`."""
        self.forget()
        known = _Known(self.prompts(length)[again], plan, _NEW, every_rank=True)
        try:
            if eagerly:
                call(self._core, "eagerly", int(eagerly))
            self.serve(known, budget=None if eagerly else max(1, 2 * length // 3))
        finally:
            if eagerly:
                call(self._core, "eagerly", int(not eagerly))
        return Served(known.ranks, known.tokens, known.error)

    def forget(self) -> None:
        """Empties the cache of prefixes."""
        self._core.reset_prefix_cache()

    def open_requests(self) -> int:
        """Returns the number of requests that the worker has."""
        found: int = json.loads(call(self._core, "state")[0])["requests"]
        return found

    def _add(self, sent: _Known) -> str:
        """Adds a request; returns its id."""
        self._number += 1
        request_id = f"{PROBE}-{self._number}"
        params = importlib.import_module("vllm").SamplingParams(
            temperature=0,
            max_tokens=sent.new_tokens,
            ignore_eos=True,
            detokenize=False,
            extra_args={NAME: sent.plan.to_json()},
        )
        request = importlib.import_module("vllm.v1.engine").EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=sent.prompt,
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        self._front_end.prepare(request)
        payload = params.extra_args[NAME]
        if sent.fails:
            payload |= {"digest": _GONE, "uploads": {_GONE: _GONE}}
        payload["every_rank"] = sent.every_rank
        self._core.add_request(*self._core.preprocess_add_request(request))
        sent.key = payload["key"]
        return request_id

    def _outputs(self) -> Iterator[Any]:
        """Runs until nothing is left, and the worker has learned of each end."""
        for _ in range(_MOST_STEPS):
            if not self._core.scheduler.has_requests() and not self._core.batch_queue:
                return
            made, _ = self._core.step_fn()
            for outputs in (made or {}).values():
                yield from outputs.outputs
        msg = f"known requests did not end within {_MOST_STEPS:,} steps"
        raise HookError(msg)

    def _take(self, output: Any, known: _Known) -> None:
        """Takes the output of a step, and the captures at the request's end."""
        known.tokens += output.new_token_ids
        if output.finish_reason is None:
            return
        if str(output.finish_reason) == "error":
            known.error = str(output.stop_reason)
        elif not known.fails and any(isinstance(it, KeepEntry) for it in known.plan.entries):
            tokens = len(known.prompt) + len(known.tokens)
            if known.every_rank:
                answers = call(self._core, "take_proof", known.key, tokens)
                known.ranks = [unpacked(each).acts for each in answers]
                return
            data, *_ = call(self._core, "take", known.key, tokens)
            known.acts = unpacked(data).acts

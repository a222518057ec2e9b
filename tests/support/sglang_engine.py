"""A scheduler of SGLang in this process, on a CPU: its own event loop, fed from a list."""

from __future__ import annotations

import asyncio
import base64
import itertools
import os
from array import array
from typing import TYPE_CHECKING, Any

import torch

import ferrohook as fh
from ferrohook.engines.sglang import activations, plugin
from ferrohook.engines.sglang.front_end import encode, prepared
from ferrohook.engines.uploads import Uploads
from ferrohook.engines.wire import FIELD, GATES, NAME
from ferrohook.gates.streaming import extend, numbers_of
from support.quantity_plans import NEW, dictionaries
from support.serving import Answer, Arrivals

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from ferrohook.engines.sglang.worker import SchedulerWorker
    from ferrohook.gates.streaming import GateValues
    from support.engines import Job

ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"}
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "attention_backend": "torch_native",
    "disable_cuda_graph": True,
    "max_total_tokens": 2048,
    "max_running_requests": 16,
    "chunked_prefill_size": 32,
    "log_level": "error",
    "random_seed": 0,
}


class Local:
    """One scheduler; a process can have one.

    Args:
        folder: of the model.
        options: of `ServerArgs`.
    """

    def __init__(self, folder: Path, **options: Any) -> None:
        os.environ.update(ENVIRONMENT)
        from sglang.srt import runtime_context  # noqa: PLC0415 (reads the environment)
        from sglang.srt.managers.scheduler import Scheduler  # noqa: PLC0415
        from sglang.srt.plugins import load_plugins  # noqa: PLC0415
        from sglang.srt.server_args import PortArgs, ServerArgs  # noqa: PLC0415

        load_plugins()
        args = ServerArgs(model_path=str(folder), **(OPTIONS | options))
        args.resolve_once()
        args.check_server_args()
        ranks = runtime_context.SpawnRanks(world_rank=0, gpu_id=0)
        runtime_context.publish(args, role="scheduler", ranks=ranks)
        self.scheduler = Scheduler(args, PortArgs.init_new(args))
        self.sent: list[Any] = []
        sink = _Sink(self.sent)
        self.scheduler.output_streamer.send_to_detokenizer = sink
        for name in ("send_to_tokenizer", "send_to_detokenizer"):
            object.__setattr__(self.scheduler.ipc_channels, name, sink)
        self.scheduler.ingest_requests = self._ingest
        self._feed: Iterator[Iterable[Any]] = iter(())
        self._uploads = Uploads(2**30)

    def put_dictionaries(self, dictionaries: Mapping[str, fh.Dictionary]) -> None:
        """Uploads dictionaries, as a front end does."""
        data, digests = self._uploads.packed(dictionaries)
        assert self.worker.answer_call("put", base64.b64encode(data).decode()) == {}
        self._uploads.put(dictionaries, digests)

    def drop_dictionaries(self) -> None:
        """Drops the worker's dictionaries."""
        for digest in [*self.worker._dictionaries]:
            self.worker.answer_call("drop", digest)

    def with_uploads(self, plan: str) -> dict[str, Any]:
        """Returns parameters of a request whose plan, as JSON, names dictionaries."""
        params = {"custom_params": {NAME: plan}}
        found: dict[str, Any] = asyncio.run(prepared(params, self._uploads))
        return found

    def _ingest(self, stop_at_pause: bool = False) -> list[Any]:
        now = next(self._feed, None)
        self.scheduler.process_input_requests([*(now or ())])
        if now is None and self.scheduler.is_fully_idle():
            self.scheduler.gracefully_exit = True
        return [*(now or ())]

    def run(self, feed: Iterable[Iterable[Any]]) -> dict[str, Any]:
        """Serves requests until all are answered; returns their last answers by id.

        Args:
            feed: what comes in before each step.
        """
        self.serve(feed)
        return answers(self.sent)

    def serve(self, feed: Iterable[Iterable[Any]]) -> None:
        """Serves requests until all are answered in `sent`, like the scheduler's process."""
        self._feed = iter(feed)
        self.sent.clear()
        self.scheduler.gracefully_exit = False
        self.scheduler.run_event_loop()

    @property
    def worker(self) -> SchedulerWorker:
        """The one of the plug-in."""
        return plugin._workers[self.scheduler]


class _Sink:
    def __init__(self, sent: list[Any]) -> None:
        self._sent = sent

    def send_output(self, output: Any, _request: Any = None) -> None:
        self._sent.append(output)


def request(
    rid: str, prompt: list[int], plan: Any = None, new_tokens: int = 12, **extra: Any
) -> Any:
    """A greedy request, tokenized."""
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput  # noqa: PLC0415
    from sglang.srt.observability.req_time_stats import APIServerReqTimeStats  # noqa: PLC0415
    from sglang.srt.sampling.sampling_params import SamplingParams  # noqa: PLC0415

    if isinstance(plan, fh.Plan):
        plan = plan.to_json()
    custom = {} if plan is None else {"custom_params": {NAME: plan}}
    params = {"temperature": 0.0, "max_new_tokens": new_tokens, **custom, **extra.pop("params", {})}
    sampling = SamplingParams(**params)
    sampling.normalize(None)
    fields: dict[str, Any] = dict.fromkeys(
        ("input_text", "input_embeds", "mm_inputs", "token_type_ids", "token_ids_logprob")
    )
    fields |= {"return_logprob": False, "logprob_start_len": -1, "top_logprobs_num": 0}
    fields |= {"stream": False, "time_stats": APIServerReqTimeStats()}
    return TokenizedGenerateReqInput(
        rid=rid, input_ids=array("q", prompt), sampling_params=sampling, **(fields | extra)
    )


def answers(sent: Iterable[Any]) -> dict[str, Any]:
    """Returns the answers that a front end would make, by id."""
    from sglang.srt.managers.io_struct import unwrap_from_pickle  # noqa: PLC0415

    found: dict[str, Any] = {}
    for each in sent:
        if not hasattr(each, "rids"):  # an abort
            found.setdefault(each.rid, {"tokens": []})["finish"] = each.finished_reason or {}
            continue
        info: dict[str, Any] = {}
        if each.customized_info is not None:
            info = unwrap_from_pickle(each.customized_info)
        for place, rid in enumerate(each.rids):
            answer = found.setdefault(rid, {"tokens": [], "cached": 0})
            answer["tokens"] += each.output_ids[place]
            answer["finish"] = each.finished_reasons[place]
            answer["cached"] = each.cached_tokens[place]
            for part in filter(None, info.get(GATES, {place: ()})[place]):
                answer.setdefault(GATES, []).append((len(answer["tokens"]), part))
            if FIELD in info:
                encode(info, place)
                for part in filter(None, info[FIELD][place]):
                    answer[FIELD] = part
    return found


def abort(rid: str) -> Any:
    """Cancels the requests whose ids begin so: SGLang's way."""
    from sglang.srt.managers.io_struct import AbortReq  # noqa: PLC0415

    return AbortReq(rid=rid)


def serve(
    local: Local, jobs: Sequence[Job], seed: int, new_tokens: int = 12, aborted: float = 0.0
) -> dict[int, Answer]:
    """Sends requests between steps at random, cancels some; returns the answers by number.

    Every other is streamed, and so are the values of its gates.

    Some of their prompts come again with plans that are bad or fail as they run.
    """
    arrivals = Arrivals(jobs, seed, aborted)
    local.put_dictionaries({name: it for job in jobs for name, it in job.dictionaries.items()})
    spoilt = [
        fh.Plan(fh.keep("model.layers.77")),
        fh.Plan(fh.keep("model.layers.1", max_bytes=4000)),
        fh.Plan(fh.on("model.layers.2", fh.Scale(1e38), at="generated")),
    ]

    def is_streamed(name: str) -> bool:
        return int(name.rpartition("-")[2]) % 2 == 1

    def feed() -> Iterator[list[Any]]:
        for step in itertools.count():
            if not arrivals.waiting:
                return
            arrived, cancelled = arrivals.step()
            now = []
            for name, it in arrived.items():
                own: dict[str, Any] = {"stream": is_streamed(name)}
                if it.plan is not None:
                    own["params"] = local.with_uploads(it.plan.to_json())
                now.append(request(f"{name}.", it.prompt, None, new_tokens, **own))
            if cancelled is not None:
                now.append(abort(f"{cancelled}."))  # SGLang cancels all that begin so
            if arrived:
                job = next(iter(arrived.values()))
                now.append(request(f"spoilt-{step}.", job.prompt, spoilt[step % 3], 40))
            yield now

    found = local.run(feed())
    local.drop_dictionaries()
    ends = {
        name: each["finish"]["type"] for name, each in found.items() if name.startswith("spoilt")
    }
    # The second fails where it has many tokens.
    assert all(end == "abort" for name, end in ends.items() if int(name[7:-1]) % 3 == 0), ends
    for name, number in arrivals.running.items():
        assert (GATES in found[f"{name}."]) == (is_streamed(name) and bool(jobs[number].gated))
    return {
        number: answer_of(found[f"{name}."], jobs[number])
        for name, number in arrivals.running.items()
    }


def serve_plans(
    local: Local, asked: Sequence[tuple[list[int], str]]
) -> list[tuple[list[int], Mapping[str, Tensor]]]:
    """Serves requests of `quantity_plans` at once; returns their texts and captures."""
    local.put_dictionaries(dictionaries())
    sent = [
        request(
            f"{number}.", prompt, None, NEW, params={"ignore_eos": True, **local.with_uploads(text)}
        )
        for number, (prompt, text) in enumerate(asked)
    ]
    answered = local.run([sent])
    local.drop_dictionaries()
    for each in answered.values():
        assert each["finish"]["type"] != "abort", each["finish"]
    found = [answered[each.rid] for each in sent]
    return [(each["tokens"], activations(each).acts) for each in found]


def answer_of(found: Mapping[str, Any], job: Job) -> Answer:
    """Returns an answer as `Job.check` takes it."""
    failed = found["finish"]["type"] == "abort"
    if failed:
        return Answer([], {}, found["finish"]["message"])
    if GATES in found:
        check_streamed(found, len(job.prompt))
    return Answer([*found["tokens"]], activations(found).acts if job.captures else {})


def check_streamed(found: Mapping[str, Any], prompt: int, ran_last: int = 0) -> None:
    """Asserts that the values of gates came with the next tokens, each once, and as captured."""
    captured = activations(found)
    joined: GateValues = {}
    for tokens, values in found[GATES]:
        is_last = tokens == len(found["tokens"])
        for own in values.values():
            assert max(own["positions"]) < prompt + tokens - 1 + (ran_last if is_last else 0)
        extend(joined, values)
    for gate, own in joined.items():
        name = f"@gate.{gate}"
        assert own["positions"] == captured.positions[name].tolist()
        values = torch.tensor(numbers_of(own))
        torch.testing.assert_close(values, captured.acts[name], rtol=0, atol=0, equal_nan=True)

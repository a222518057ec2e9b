"""Requests that share prefixes in a scheduler of SGLang, compared with transformers.

`python -m support.sglang_prefixes --requests 400 --options '{"page_size": 16}'` prints a line of
JSON; with `--system` of requests that have one long system prompt.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import ferrohook as fh
import support.engines
from ferrohook.engines.sglang import prefix_cache
from support.engines import Change, Job
from support.prefix_jobs import border_jobs, first_changed
from support.serving import EOS, VOCABULARY, WIDTH, save_model, wrong_answers
from support.sglang_engine import Local, answer_of, request, serve

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

NEW = 12
SYSTEM = 2000
"""Tokens of the long system prompt."""


class Slots:
    """Checks that requests read only unchanged keys and values, or the ones of their own plan.

    Args:
        local: the scheduler.
        jobs: its requests, by the numbers at the ends of their ids.
    """

    def __init__(self, local: Local, jobs: Sequence[Job]) -> None:
        self._jobs = jobs
        self._rows: dict[int, tuple[bool, Any]] = {}
        """True if the writer of a slot has changes, and its plan if they changed the slot."""
        self._seen: set[int] = set()
        self.wrong: list[str] = []
        self.changed = 0
        """Cached tokens that requests read of their own plan."""
        self.of_plans = 0
        """Cached tokens that requests without changes read of requests with some."""
        runner = local.scheduler.tp_worker.model_runner
        self._tables = runner.req_to_token_pool.req_to_token
        self._inner: Callable[..., Any] = runner.forward
        runner.forward = self._forward

    def _forward(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        ends = batch.seq_lens.tolist()
        counts = batch.extend_seq_lens_cpu or [1] * len(ends)
        for index, req in enumerate(batch.ferrohook_reqs):
            self._run(
                req, self._tables[batch.req_pool_indices[index], : ends[index]], counts[index]
            )
        return self._inner(batch, *args, **kwargs)

    def _run(self, req: Any, table: Any, count: int) -> None:
        number = int(req.rid.rstrip(".").rpartition("-")[2])
        is_spoilt = req.rid.startswith("spoilt")  # of which the third changes generated tokens
        job = Job([*req.origin_input_ids]) if is_spoilt else self._jobs[number]
        first = first_changed(job)
        if is_spoilt and number % 3 == 2:
            first = len(job.prompt)
        changes = first < math.inf
        plan = (req.sampling_params.custom_params, first)
        slots = table.tolist()
        start = len(slots) - count
        is_new = id(req) not in self._seen
        self._seen.add(id(req))
        for position, slot in enumerate(slots):
            own = plan if position >= first else None
            if position >= start:
                self._rows[slot] = changes, own
                continue
            of_plan, found = self._rows[slot]
            if found != own:
                self.wrong.append(f"{req.rid} at {position}")
            if is_new:
                self.changed += found is not None
                self.of_plans += of_plan and not changes


def border_numbers(local: Local, model: Any, requests: int, seed: int) -> dict[str, Any]:
    """Serves random plans at the borders of pages; returns what came of them."""
    jobs = border_jobs(requests, seed)
    slots = Slots(local, jobs)
    answers = serve(local, jobs, seed, NEW)
    ended = [
        (count or 0, cached)
        for each in local.sent
        if hasattr(each, "rids")
        for count, cached, reason in zip(
            each.retraction_counts, each.cached_tokens, each.finished_reasons, strict=True
        )
        if reason is not None
    ]
    return {
        "answered": len(answers),
        "wrong": [str(each) for each in wrong_answers(model, jobs, answers, NEW)],
        "wrong_reads": slots.wrong,
        "captures": sum(job.captures for job in jobs),
        "retractions": sum(count for count, _ in ended),
        "prompts": sum(len(job.prompt) for job in jobs),
        "cached": sum(cached for _, cached in ended),
        "cached_changed": slots.changed,
        "cached_of_plans": slots.of_plans,
        "moves": local.worker._numbers is not None,
        "open": len(local.worker.requests),
    }


def system_numbers(local: Local, model: Any, requests: int, seed: int) -> dict[str, Any]:
    """Serves requests that steer by different vectors after one long prompt."""
    rng = random.Random(seed)  # noqa: S311 (tests)
    generator = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(3, VOCABULARY) for _ in range(count)]

    system = tokens(SYSTEM)
    jobs = [
        Job(
            [*system, *tokens(rng.randint(1, 30))],
            (Change(1, fh.Add(torch.randn(WIDTH, generator=generator)), "generated"),),
        )
        for _ in range(requests)
    ]
    local.run([[request("system", system, None, 1)]])
    found = local.run([[request(str(n), job.prompt, job.plan, 4) for n, job in enumerate(jobs)]])
    answers = {n: answer_of(found[str(n)], job) for n, job in enumerate(jobs)}
    return {
        "answered": len(answers),
        "wrong": [reason for _, reason in wrong_answers(model, jobs, answers, 4)],
        "cached": [each["cached"] for each in found.values()],
    }


def main() -> None:
    """Serves them, and prints which answers were right."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--options", type=json.loads, default={})
    parser.add_argument("--system", action="store_true")
    parser.add_argument("--unmoved", action="store_true", help="a control: all share all")
    given = parser.parse_args()

    support.engines.EOS = EOS
    folder = Path(tempfile.mkdtemp())
    model = save_model("llama", folder, max_position_embeddings=4096)
    local = Local(folder, **given.options)
    if given.unmoved:
        prefix_cache.keys_of = lambda _plan, ids: ids  # type: ignore[assignment]
    numbers = system_numbers if given.system else border_numbers
    print(json.dumps(numbers(local, model, given.requests, given.seed)))


if __name__ == "__main__":
    main()

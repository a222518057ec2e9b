"""Random requests through a scheduler of SGLang in this process, compared with transformers.

`python -m support.sglang_random --requests 2000 --options '{"enable_mixed_chunk": true}'` prints a
line of JSON.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from http import HTTPStatus
from pathlib import Path

import support.engines
from support.quantity_plans import PROMPTS, check_router, differing, wrong_plans
from support.routes import BAD_ROUTES, check_routes
from support.serving import EOS, random_jobs, save_model, wrong_answers

NEW = 12


def main() -> None:
    """Serves them, and prints which answers were right."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", default="llama")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--aborted", type=float, default=0.0)
    parser.add_argument("--options", type=json.loads, default={})
    found = parser.parse_args()

    from support.sglang_engine import Local, request, serve, serve_plans  # noqa: PLC0415 (imports SGLang)

    support.engines.EOS = EOS
    folder = Path(tempfile.mkdtemp())
    model = save_model(found.kind, folder)
    local = Local(folder, **found.options)
    jobs = random_jobs(found.requests, found.seed, transcoders=0.3)
    answers = serve(local, jobs, found.seed, NEW, found.aborted)
    wrong = wrong_answers(model, jobs, answers, NEW)
    table = local.worker.loaded_model().modules.named.table
    if "@router.1" in table:
        check_router(model, lambda asked: serve_plans(local, asked))
        check_routes(model, lambda asked: serve_plans(local, asked))
        for text, reason in BAD_ROUTES:
            finish = local.run([[request("bad", PROMPTS[0], text)]])["bad"]["finish"]
            assert finish["status_code"] == HTTPStatus.BAD_REQUEST, finish
            assert re.search(reason, finish["message"]), (reason, finish["message"])
    batches = [each for each in local.sent if hasattr(each, "rids")]
    numbers = {
        "answered": len(answers),
        "wrong": [str(each) for each in wrong],
        "planned": sum(1 for job in jobs if job.plan is not None),
        "retractions": sum(
            count or 0
            for each in batches
            for count, ended in zip(each.retraction_counts, each.finished_reasons, strict=True)
            if ended is not None
        ),
        "cached": sum(
            tokens
            for each in batches
            for tokens, ended in zip(each.cached_tokens, each.finished_reasons, strict=True)
            if ended is not None
        ),
        "steps": local.worker.steps,
        "wrong_plans": wrong_plans(model, lambda asked: serve_plans(local, asked)),
        "differing": sorted(differing(model, table)),
        "open": len(local.worker.requests),
    }
    print(json.dumps(numbers))


if __name__ == "__main__":
    main()

"""SmolLM2 in a scheduler of SGLang in this process, compared with transformers.

`python -m support.sglang_trained bfloat16` prints a line of JSON.
"""

from __future__ import annotations

import json
import sys

from support.quantity_plans import differing
from support.smollm2 import loaded, saved, wrong_plans


def main(dtype: str) -> None:
    """Serves its plans, and prints which differ, and which quantities."""
    from support.sglang_engine import Local, serve_plans  # noqa: PLC0415 (imports SGLang)

    model = loaded(dtype)
    local = Local(saved(), dtype=dtype)
    found = {
        "differing": [*differing(model, local.worker.loaded_model().modules.named.table)],
        "wrong_plans": wrong_plans(model, lambda asked: serve_plans(local, asked)),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])

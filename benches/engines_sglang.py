"""CPU time of SGLang with plans, as ratios to the engine without ferrohook, in one process.

Run by the interpreter of `make sglang`:
`PYTHONPATH=tests/support/sgl_kernel_stub .venv-sglang/bin/python -m benches.engines_sglang`.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benches.engine_rows import (
    HEADS,
    MODEL,
    NEW,
    REQUESTS,
    ROUNDS,
    SIZES,
    Round,
    print_rows,
    requests_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WRAPPED = {
    "managers.scheduler.Scheduler": ("_add_request_to_queue",),
    "managers.schedule_batch.Req": ("_compute_max_prefix_len",),
    "model_executor.forward_batch_info.ForwardBatch": ("init_new",),
    "model_executor.model_runner.ModelRunner": ("forward",),
    "managers.scheduler_components.output_streamer.SchedulerOutputStreamer": ("stream_output",),
}


def main(rounds: int = ROUNDS) -> None:
    """Prints the table."""
    from support.serving import save_model  # noqa: PLC0415 (tests' own)
    from support.sglang_engine import Local  # noqa: PLC0415

    folder = Path(tempfile.mkdtemp())
    save_model("llama", folder, **SIZES, **HEADS)
    limits = {"max_total_tokens": 8192, "max_running_requests": 64, "chunked_prefill_size": 2048}
    local = Local(folder, **limits)
    print(f"{MODEL}; CPU time / without ferrohook")

    def plain(run: Callable[[], Round]) -> Round:
        with without(local):
            return run()

    for requests in REQUESTS:
        print_rows(requests, rounds, lambda plans: measure(local, plans), plain)


@contextlib.contextmanager
def without(local: Any) -> Iterator[None]:
    """Gives SGLang its own methods back, and the layers theirs."""
    from pkgutil import resolve_name  # noqa: PLC0415

    taken = []
    for path, names in WRAPPED.items():
        owner = resolve_name(f"sglang.srt.{path}")
        for name in names:
            wrapped = vars(owner)[name]
            original = getattr(wrapped, "__func__", wrapped).__wrapped__
            plain = classmethod(original) if isinstance(wrapped, classmethod) else original
            taken.append((owner, name, wrapped))
            setattr(owner, name, plain)
    layers = local.scheduler.tp_worker.model_runner.model.model.layers
    forwards = [vars(layer).pop("forward", None) for layer in layers]
    try:
        yield
    finally:
        for owner, name, wrapped in taken:
            setattr(owner, name, wrapped)
        for layer, forward in zip(layers, forwards, strict=True):
            if forward is not None:
                layer.forward = forward


def measure(local: Any, plans: list[Any]) -> Round:
    """Measures the steps that serve requests with these plans."""
    from support.sglang_engine import answers, request  # noqa: PLC0415

    local.scheduler.flush_cache()
    params = {"ignore_eos": True}
    asked = [
        request(f"{number}.", prompt, text, NEW, params=params)
        for number, (prompt, text) in enumerate(requests_of(plans))
    ]
    begin = time.process_time()
    local.serve([asked])
    spent = time.process_time() - begin
    found = answers(local.sent)  # once: what it reads is encoded in place
    texts = [found[f"{number}."]["tokens"] for number in range(len(plans))]
    if any(len(each) != NEW for each in texts):
        msg = "a request was cut short"
        raise RuntimeError(msg)
    return Round(spent, texts)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    main(*map(int, sys.argv[1:]))

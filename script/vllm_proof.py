"""Prints which modules vLLM's self-test admits on this machine, as tables to send in.

A random Llama of a few layers runs eagerly, compiled with sites, and with piecewise CUDA graphs.
Without a GPU it prints SKIPPED; `--any-device` runs it nevertheless.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import torch

ROOT: Final = Path(__file__).parents[1]
SITES: Final = ["model.embed_tokens", "model.layers.*", "model.layers.*.mlp", "model.norm"]
MODES: Final = {"eager": None, "compiled": "NONE", "piecewise CUDA graphs": "PIECEWISE"}
"""Setting `cudagraph_mode` by engine; None for one that is not compiled."""


def proof_of(engine: Any) -> str:
    """Returns the outcomes of an engine's self-test, or the reason of its refusal."""
    from ferrohook.engines.model.modules import ModuleTable  # noqa: PLC0415 (needs vLLM)
    from ferrohook.engines.model.proof import shown  # noqa: PLC0415
    from ferrohook.engines.vllm.calls import call  # noqa: PLC0415

    found = json.loads(call(engine, "describe")[0])
    if "refused" in found:
        return f"refused: {found['refused']}"
    table = ModuleTable.from_json(found["modules"]).table
    return shown({name: it.proof for name, it in table.items() if it.proof is not None})


def main() -> None:
    """Prints the tables."""
    is_cuda = torch.cuda.is_available()
    if not is_cuda and "--any-device" not in sys.argv:
        print("SKIPPED vllm proof: no GPU")
        return
    if importlib.util.find_spec("vllm") is None:
        print(f"SKIPPED vllm proof: {sys.executable} has no vllm")
        return
    sys.path.insert(0, str(ROOT / "tests"))
    from ferrohook.engines.vllm.self_test import settings  # noqa: PLC0415
    from ferrohook.engines.vllm.supported import CAPABILITIES  # noqa: PLC0415
    from support.vllm_engine import save_model, start, start_compiled, stop  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as folder:
        save_model("llama", Path(folder))
        options: dict[str, Any] = {"dtype": "bfloat16"}
        for name, mode in MODES.items():
            if mode is None:
                engine = start(Path(folder), **options)
            else:
                sites = {"additional_config": {"ferrohook": {"sites": SITES}}}
                graphs = {"compilation_config": {"cudagraph_mode": mode}}
                engine = start_compiled(Path(folder), **options, **sites, **graphs)
            device = torch.cuda.get_device_name() if is_cuda else "CPU"
            told = settings(engine.llm_engine.vllm_config)
            print(f"\n{name}: vLLM {CAPABILITIES.version}, torch {torch.__version__}, {device}")
            print(f"{told}\n")
            print(proof_of(engine), flush=True)
            stop(engine)


main()

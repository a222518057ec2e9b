"""Looks at every type of transformers' causal language models, of a small size.

Writes the golden file of the tests, and the figures and misses on the page of quantities:
`PYTHONPATH=tests python script/quantities.py [TYPE ...]`; with types, those alone are looked at.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers

import ferrohook as fh
from support.zoo import differences, kinds, make, summary, token_ids

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests/quantity/golden.json"
PAGE = ROOT / "docs/quantities.md"
MARK = "<!-- types: written by script/quantities.py -->"
SHOWN = (
    "resid_pre",
    "resid_post",
    "attn_out",
    "mlp_out",
    "resid_mid",
    "z",
    "q",
    "pattern",
    "router",
    "experts",
)
ABSENT = ("parallel block", "no contribution to the stream is of this kind", "does not have both")
"""Starts of reasons of quantities that a block does not have."""


def looked_at(kind: str) -> dict[str, Any]:
    """Returns the summary of a type, or why it was not built."""
    try:
        model = make(kind)
        with torch.no_grad():
            model(input_ids=token_ids())
    except (Exception, AssertionError) as error:  # noqa: BLE001 (whatever a configuration raises)
        text = " ".join(str(error).split())[:120]
        return {"not built": f"{type(error).__name__}: {text}"}
    try:
        table = fh.quantities(model)
    except fh.HookError as error:
        return {"proved": {}, "read alone": [], "missing": {"all": {str(error): ""}}}
    return summary(table) | {"bfloat16": differences(table, fh.quantities(model.bfloat16()))}


def missed(found: dict[str, Any], quantity: str) -> dict[str, str]:
    """Returns the reasons for which a quantity is missing that the type has, with its blocks."""
    if not found["proved"].get("resid_post") and quantity not in {"router", "experts"}:
        missing = found["missing"]
        reasons: dict[str, Any] = missing.get("resid_post") or missing["all"]
        return dict.fromkeys(reasons, "all")
    return {
        reason: blocks
        for reason, blocks in found["missing"].get(quantity, {}).items()
        if not any(each in reason for each in ABSENT)
    }


def page(golden: dict[str, dict[str, Any]]) -> str:
    """Returns figures and misses as Markdown."""
    built = {kind: it for kind, it in golden.items() if "not built" not in it}
    lines = [
        (
            f"Of {len(golden)} types that have a causal language model in transformers "
            f"{transformers.__version__}, {len(built)} were built small, with random weights and "
            "multipliers other than 1:"
        ),
        "",
        "| quantity | types that have it | proved in all their blocks |",
        "| --- | ---: | ---: |",
    ]
    for quantity in SHOWN:
        having = [
            kind for kind, it in built.items() if it["proved"].get(quantity) or missed(it, quantity)
        ]
        proved = [kind for kind in having if not missed(built[kind], quantity)]
        share = 100 * len(proved) / max(len(having), 1)
        lines.append(f"| `{quantity}` | {len(having)} | {len(proved)} ({share:.0f} %) |")
    misses: dict[tuple[str, str], list[str]] = {}
    for kind, it in built.items():
        for quantity in (
            "resid_post",
            "attn_out",
            "mlp_out",
            "resid_mid",
            "embed",
            "final_norm",
            "logits",
            "z",
            "q",
            "mlp_act",
            "router",
            "experts",
        ):
            for reason in missed(it, quantity):
                if it["proved"].get("resid_post") or quantity == "resid_post":
                    misses.setdefault((quantity, reason), []).append(kind)
    lines += [
        "",
        "Every miss, with its reason:",
        "",
        "| quantity | reason | types |",
        "| --- | --- | --- |",
    ]
    for (quantity, reason), types in misses.items():
        title = "all" if quantity == "resid_post" else quantity
        lines.append(f"| `{title}` | {reason} | {', '.join(types)} |")
    lines += ["", "Not built here:", "", "| type | reason |", "| --- | --- |"]
    for kind, it in golden.items():
        if kind not in built:
            reason = it["not built"].replace("|", "/").replace("<", "&lt;")
            lines.append(f"| {kind} | {reason} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Looks, and writes both."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    few = sys.argv[1:]
    golden = json.loads(GOLDEN.read_text()) if few else {}
    for kind in few or kinds():
        golden[kind] = looked_at(kind)
        print(kind, golden[kind].get("not built", "looked at"), flush=True)
        GOLDEN.write_text(json.dumps(golden, indent=1, sort_keys=True) + "\n")
    text = PAGE.read_text()
    head = text.partition(MARK)[0].rstrip("\n")
    PAGE.write_text(f"{head}\n\n{MARK}\n\n{page(dict(sorted(golden.items())))}")


if __name__ == "__main__":
    main()

"""Quantities of the types of causal language models, against a golden file and three oracles.

`make quantities` looks at all types, `script/quantities.py` writes the golden file and the page.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import ferrohook as fh
from support.zoo import differences, kinds, make, summary, token_ids

if TYPE_CHECKING:
    from collections.abc import Mapping

GOLDEN: Mapping[str, Any] = json.loads(Path(__file__).with_name("golden.json").read_text())
FEW = (
    *("bart", "bert", "bloom", "cohere", "falcon", "gemma2", "gemma3_text", "gpt2", "gpt_neox"),
    *("gpt_oss", "granite", "llama", "llama4_text", "mamba", "mpt", "olmo2", "opt", "phi"),
    *("qwen3_moe", "deepseek_v3"),
)
IDS = token_ids()
BEHIND = ("falcon_mamba", "mamba", "mamba2", "rwkv")
"""Types whose hidden states start after the first block."""
RULELESS = ("inkling_text", "phimoe")
"""Types whose routers weigh experts by more than their ids: with a shared expert, or in order."""
CUT = {"cpmant": slice(-IDS.shape[1], None), "prophetnet": slice(IDS.shape[1])}
"""Types that add tokens, of a prompt or of n-grams, and leave them out of their output."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "kind" in metafunc.fixturenames:
        everything = metafunc.config.getoption("whole")
        metafunc.parametrize("kind", kinds() if everything else FEW, scope="module")


@pytest.fixture(scope="module")
def model(kind: str) -> Any:
    if kind not in GOLDEN:
        pytest.fail(f"{kind} is new in transformers: script/quantities.py {kind} looks at it")
    if "not built" in GOLDEN[kind]:
        pytest.skip(GOLDEN[kind]["not built"])
    made = make(kind)
    with torch.no_grad():
        made(input_ids=IDS)  # BigBird takes other modules from its first short call on
    return made


@pytest.fixture(scope="module")
def table(model: Any) -> fh.Quantities:
    return fh.quantities(model)


def test_the_table_is_the_golden_one(kind: str, table: fh.Quantities) -> None:
    assert GOLDEN[kind] == summary(table) | {"bfloat16": GOLDEN[kind]["bfloat16"]}


def test_places_in_bfloat16_differ_where_the_golden_file_says(
    kind: str, model: Any, table: fh.Quantities
) -> None:
    half = copy.deepcopy(model).bfloat16()
    assert differences(table, fh.quantities(half)) == GOLDEN[kind]["bfloat16"]


def test_the_stream_is_what_the_model_returns_as_hidden_states(
    kind: str, model: Any, table: fh.Quantities
) -> None:
    first = "@resid_post." if kind in BEHIND else "@resid_pre."
    names = [name for name in table if name.startswith(first)]
    if not names:
        pytest.skip("nothing is proved of the stream")
    with torch.no_grad(), fh.capture(model, names) as acts:
        output = model(input_ids=IDS, output_hidden_states=True)
    hidden = output.hidden_states
    if not hidden:
        pytest.skip("the model returns no hidden states")
    for name in names:
        found, expected = acts[name], hidden[int(name.rpartition(".")[2])]
        if kind in CUT:
            found = found[:, CUT[kind]]
        # The order of dimensions is the model's own.
        expected = expected if expected.shape == found.shape else expected.transpose(0, 1)
        assert torch.equal(found, expected), name


def test_patterns_are_what_eager_attention_returns(
    kind: str, model: Any, table: fh.Quantities
) -> None:
    names = [name for name in table if name.startswith("@pattern.")]
    if not names:
        pytest.skip("no pattern is proved")
    eager = make(kind, attn_implementation="eager")
    with torch.no_grad():
        returned = eager(input_ids=IDS, output_attentions=True).attentions
    if not returned:
        pytest.skip("the model returns no attentions")
    with torch.no_grad(), fh.capture(model, names) as acts:
        model(input_ids=IDS)
    found = [each for each in returned if each is not None and each.dim() == 4]
    assert len(found) >= len(names)
    for name in names:
        number = int(name.rpartition(".")[2])
        expected = returned[number] if len(returned) > number else found[names.index(name)]
        torch.testing.assert_close(acts[name], expected, rtol=1e-3, atol=1e-4)


def test_own_experts_that_a_plan_names_change_no_bit(
    kind: str, model: Any, table: fh.Quantities
) -> None:
    names = [name for name in table if name.startswith("@experts.")]
    if not names:
        pytest.skip("no experts are proved")
    rules = [table[name].routing.rule for name in names]  # type: ignore[union-attr]
    assert (None in rules) == (kind in RULELESS)
    if kind in RULELESS:
        pytest.skip("ids do not define weights")
    with torch.no_grad(), fh.capture(model, names) as acts:
        plain = model(input_ids=IDS).logits
    routes = [fh.on(name, fh.Route(acts[name].view(*IDS.shape, -1))) for name in names]
    with torch.no_grad(), fh.Plan(*routes).open(model):
        assert torch.equal(model(input_ids=IDS).logits, plain)


def test_routers_are_what_the_model_returns_as_router_logits(
    model: Any, table: fh.Quantities
) -> None:
    names = [name for name in table if name.startswith("@router.")]
    if not names:
        pytest.skip("no router is proved")
    with torch.no_grad(), fh.capture(model, names) as acts:
        returned = model(input_ids=IDS, output_router_logits=True).router_logits
    # Blocks without experts return none, and stand ahead, as one does whose stream is not proved.
    logits = [each for each in returned if each is not None][-len(names) :]
    for name, expected in zip(names, logits, strict=True):
        assert torch.equal(acts[name], expected.view_as(acts[name])), name

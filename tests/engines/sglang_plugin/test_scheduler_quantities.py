"""Plans of quantities in SGLang: the same JSON, captures and texts as in transformers alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang: run `make sglang`")

import ferrohook as fh
from ferrohook.engines import sglang
from support.quantity_plans import ABSENT, HEAD, WIDTH, differing, wrong_plans
from support.serving import LAYERS
from support.sglang_engine import request, serve_plans

if TYPE_CHECKING:
    from support.sglang_engine import Local

PROMPT = [3, 4, 5]


def test_plans_at_once_give_what_transformers_gives_for_each(llama: Any, local: Local) -> None:
    assert wrong_plans(llama[1], lambda sent: serve_plans(local, sent)) == {}


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (fh.keep("@pattern.1"), "@pattern.1 is not proved .* attention does not compute a pattern"),
        (fh.keep("@logits"), "@logits is not proved .* only for the tokens that it samples from"),
        (fh.keep("@resid_post.9"), r"has no @resid_post.9: its blocks are 0 to \d"),
        (fh.on("@resid_mid.1", fh.Zero()), "@resid_mid.1 can be read but not written"),
        (
            fh.on("@z.1", fh.Add(torch.ones(WIDTH))),
            "has a width of 64, but the head of @z.1 has 32",
        ),
        (fh.on("@z.1", fh.Ablate(torch.ones(HEAD))), "Ablate on @z.1 acts on each head"),
        (fh.on("@z.1.2", fh.Zero()), "@z.1.2 names no head: @z.1 has heads 0 to 1"),
        (fh.keep("@resid_post.1", inputs=True), "leave out inputs"),
        (fh.keep("model.layers.1.ferrohook_stream"), "closest names"),
    ],
)
def test_what_does_not_fit_is_refused_at_the_door_with_the_reason(
    local: Local, entry: Any, reason: str
) -> None:
    finish = local.run([[request("one", PROMPT, fh.Plan(entry))]])["one"]["finish"]
    assert finish["status_code"] == 400
    with pytest.raises(ValueError, match=reason):
        raise ValueError(finish["message"])


def test_a_layer_and_its_quantity_are_one_tensor(local: Local) -> None:
    """Entries act in their order: an earlier capture has the value before the change."""
    plan = fh.Plan(
        fh.keep("model.layers.1", label="before"),
        fh.on("@resid_post.1", fh.Add(torch.ones(WIDTH))),
        fh.on("model.layers.1", fh.Scale(2.0)),
        fh.keep(["@resid_post.1", "@resid_pre.2", "model.layers.1"]),
    )
    acts = sglang.activations(local.run([[request("one", PROMPT, plan)]])["one"]).acts
    right = 2 * (acts["before:model.layers.1"] + 1)
    for name in ("@resid_post.1", "@resid_pre.2", "model.layers.1"):
        torch.testing.assert_close(acts[name], right, rtol=1e-4, atol=1e-4)


def test_the_table_comes_with_its_proofs(local: Local) -> None:
    named = local.worker.loaded_model().modules.named
    for layer in range(LAYERS):
        for kind in ("resid_pre", "resid_post", "attn_out", "mlp_out", "q", "k", "v", "z"):
            quantity = named.table[f"@{kind}.{layer}"]
            assert quantity.writable
            assert quantity.residual < 1e-5
    assert named.heads["@q.0"] == (2, HEAD)


def test_the_engine_has_what_transformers_has(llama: Any, local: Local) -> None:
    table = local.worker.loaded_model().modules.named.table
    assert differing(llama[1], table) <= ABSENT


def test_a_worker_whose_quantities_are_of_other_rows_serves_no_plans(
    local: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The self-test reads quantities too."""
    worker, captured = local.worker, local.worker._captured

    def mixed(*asked: Any) -> list[dict[str, torch.Tensor]]:
        found = captured(*asked)
        if len(found) > 1:
            found[0]["@z.3"] = found[1]["@z.3"]
        return found

    worker._test_itself(worker.loaded_model().modules)
    monkeypatch.setattr(worker, "_captured", mixed)
    with pytest.raises(fh.HookError, match=r"wrong rows of '@z\.3'"):
        worker._test_itself(worker.loaded_model().modules)

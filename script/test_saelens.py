"""SAELens reads stored activations as it reads its own (for `script/ecosystem`)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

os.environ["HF_HUB_OFFLINE"] = "1"

import datasets
import pytest
import torch
from sae_lens import (
    ActivationsStore,
    LanguageModelSAERunnerConfig,
    LanguageModelSAETrainingRunner,
    LoggingConfig,
    TopKTrainingSAEConfig,
)
from transformer_lens import HookedTransformer, HookedTransformerConfig

import ferrohook as fh

if TYPE_CHECKING:
    from pathlib import Path

HOOK = "blocks.0.hook_resid_post"
WIDTH, CONTEXT, TEXTS, AT_ONCE = 16, 8, 32, 8


@pytest.fixture
def model() -> HookedTransformer:
    torch.manual_seed(0)
    sizes = {"n_layers": 2, "d_model": WIDTH, "n_ctx": CONTEXT, "d_head": 8, "n_heads": 2}
    config = HookedTransformerConfig(**sizes, d_vocab=50, act_fn="relu")
    return HookedTransformer(config).eval().requires_grad_(False)


@pytest.fixture
def tokens() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randint(0, 50, (TEXTS, CONTEXT))


def export(store: fh.data.Store, folder: Path) -> str:
    """Writes the folder as docs/saelens.md does."""
    store.to_datasets(HOOK, context=CONTEXT).save_to_disk(folder / "contexts")
    return str(folder / "contexts")


def reader(model: HookedTransformer | None, **source: Any) -> ActivationsStore:
    return ActivationsStore(
        model=model,
        hook_name=HOOK,
        context_size=CONTEXT,
        d_in=WIDTH,
        n_batches_in_buffer=4,
        total_training_tokens=TEXTS * CONTEXT,
        store_batch_size_prompts=AT_ONCE,
        train_batch_size_tokens=16,
        normalize_activations="none",
        device=torch.device("cpu"),
        streaming=False,
        prepend_bos=False,
        hook_head_index=None,
        **source,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_its_reader_gets_the_rows_of_its_own_run_of_the_model(
    model: HookedTransformer, tokens: torch.Tensor, dtype: torch.dtype, tmp_path: Path
) -> None:
    with fh.data.LocalStore(tmp_path / "store") as store:
        fh.collect(
            model, tokens.split(AT_ONCE), HOOK, store, dtype=dtype, tokens=lambda batch: batch
        )
        path = export(store, tmp_path)
    prompts = datasets.Dataset.from_dict({"input_ids": tokens.tolist()})
    own = reader(model, dataset=prompts, dtype="float32")
    name = str(dtype).removeprefix("torch.")
    ours = reader(None, dataset=None, dtype=name, cached_activations_path=path)
    for _ in range(TEXTS // AT_ONCE):
        expected, ids = own.get_raw_llm_batch()
        rows, own_ids = ours.get_raw_llm_batch()
        assert torch.equal(own_ids, ids)
        assert rows.dtype == dtype
        assert torch.equal(rows, expected.to(dtype))


def test_its_runner_trains_on_them_and_never_calls_the_model(
    model: HookedTransformer, tokens: torch.Tensor, tmp_path: Path
) -> None:
    with fh.data.LocalStore(tmp_path / "store") as store:
        fh.collect(model, tokens.split(AT_ONCE), HOOK, store)
        path = export(store, tmp_path)
    config = LanguageModelSAERunnerConfig(
        sae=TopKTrainingSAEConfig(d_in=WIDTH, d_sae=32, k=4),
        hook_name=HOOK,
        context_size=CONTEXT,
        use_cached_activations=True,
        cached_activations_path=path,
        training_tokens=4 * TEXTS * CONTEXT,
        train_batch_size_tokens=16,
        store_batch_size_prompts=AT_ONCE,
        n_batches_in_buffer=4,
        prepend_bos=False,
        streaming=False,
        is_dataset_tokenized=True,
        device="cpu",
        logger=LoggingConfig(log_to_wandb=False),
        output_path=None,
        checkpoint_path=None,
    )
    prompts = datasets.Dataset.from_dict({"input_ids": tokens.tolist()})
    runner = LanguageModelSAETrainingRunner(config, prompts, model)
    before = runner.sae.W_dec.detach().clone()
    calls = fh.register(model, "", lambda *_: None)
    autoencoder = runner.run()
    assert calls.calls == 0
    assert not torch.equal(autoencoder.W_dec, before)
    assert autoencoder.cfg.metadata.hook_name == HOOK

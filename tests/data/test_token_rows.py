"""Rows know their tokens, positions and texts, and become data sets of Hugging Face."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import ferrohook as fh
from ferrohook.data import ActivationDataset, ActivationStream, LocalStore, MemoryStore, Store
from support.language_models import language_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytest.importorskip("safetensors")

WORDS, WIDTH = 50, 4
MASKS = [[[1, 1, 1, 0], [1, 1, 1, 1]], [[0, 0, 1, 1], [0, 1, 1, 1]], [[1, 0, 0, 0]]]
"""Padding on the right, on the left, and a batch of another size."""


class Encoder(nn.Module):
    """Has a layer with a row for each token, one with heads, and one without tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.heads = nn.Unflatten(-1, (2, 2))
        self.pooled = nn.Linear(WIDTH, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.words(input_ids)
        self.heads(hidden)
        pooled: Tensor = self.pooled(hidden[:, 0])
        return pooled


@pytest.fixture
def model() -> Encoder:
    torch.manual_seed(0)
    return Encoder()


@pytest.fixture
def batches() -> list[dict[str, Tensor]]:
    masks = [torch.tensor(mask) for mask in MASKS]
    return [
        {"input_ids": torch.randint(WORDS, mask.shape), "attention_mask": mask} for mask in masks
    ]


def described(batches: list[dict[str, Tensor]], masked: str) -> list[tuple[int, int, int]]:
    """Token, position and text of each row, counted one by one."""
    rows, text = [], 0
    for batch in batches:
        for ids, mask in zip(*batch.values(), strict=True):
            position = 0
            for column, (token, real) in enumerate(zip(ids.tolist(), mask.tolist(), strict=True)):
                if masked == "none" or real:
                    rows.append((token, position if masked == "key" else column, text))
                    position += 1
            text += 1
    return rows


@pytest.mark.parametrize("masked", ["none", "key", "function"])
@pytest.mark.parametrize("tokens", ["input_ids", lambda batch: batch["input_ids"].int()])
def test_each_row_knows_its_token(
    store: Store, model: Encoder, batches: list[dict[str, Tensor]], masked: str, tokens: Any
) -> None:
    mask: Any = {"none": None, "key": "attention_mask"}.get(
        masked, lambda batch: batch["attention_mask"]
    )
    fh.collect(model, batches, ["words", "heads"], store, mask=mask, tokens=tokens)
    data = ActivationDataset(store, "words")
    columns = (data.tokens, data.positions, data.texts)
    assert [*zip(*(each.tolist() for each in columns), strict=True)] == described(batches, masked)
    assert torch.equal(data[:], model.words.weight[data.tokens])
    by_head = ActivationDataset(store, "heads")
    assert torch.equal(by_head.tokens, data.tokens.repeat_interleave(2))
    assert torch.equal(by_head[::2], data[:][:, :2])


def test_a_resumed_run_counts_on(model: Encoder, batches: list[dict[str, Tensor]]) -> None:
    whole, parts = MemoryStore(), MemoryStore()
    options: dict[str, Any] = {"mask": "attention_mask", "tokens": "input_ids"}
    fh.collect(model, batches, "words", whole, **options)
    for upto in (1, 3):
        assert fh.collect(model, batches[:upto], "words", parts, **options).skipped == upto // 2
    assert [
        torch.equal(getattr(ActivationDataset(one, "words"), name), other)
        for name in ("tokens", "positions", "texts")
        for one, other in [(parts, getattr(ActivationDataset(whole, "words"), name))]
    ] == 3 * [True]
    with pytest.raises(fh.errors.ResumeError, match="option 'tokens': \"'input_ids'\", now None"):
        fh.collect(model, batches, "words", parts, mask="attention_mask")


def test_tokens_that_do_not_fit_are_refused(
    model: Encoder, batches: list[dict[str, Tensor]]
) -> None:
    store = MemoryStore()

    def refused(error: type[Exception], text: str, what: Any = "words", **options: Any) -> None:
        with pytest.raises(error, match=text):
            fh.collect(model, batches, what, store, **{"tokens": "input_ids", **options})
        assert store.runs() == []

    refused(fh.HookError, "tokens='ids' names a key of the batches", tokens="ids")
    refused(fh.HookTypeError, "tokens must be a str, a callable or None, got int", tokens=1)
    refused(
        fh.HookTypeError, r"got torch.float32 of shape \(1, 4\)", tokens=lambda _: torch.ones(1, 4)
    )
    refused(fh.HookTypeError, r"got torch.int64 of shape \(4,\)", tokens=lambda _: torch.arange(4))
    refused(fh.HookTypeError, "got list", tokens=lambda batch: batch["input_ids"].tolist())
    refused(
        fh.HookError,
        r"'output' of layer 'pooled' has shape \(2, 2\), without a row for each of the tokens",
        ["words", "pooled"],
    )
    refused(fh.HookError, "without a row for each of the tokens", slice=(slice(None), slice(1, 3)))
    refused(
        fh.HookError,
        r"the mask of a batch has shape \(2, 3\), but its tokens have shape \(2, 4\)",
        mask=lambda _: torch.ones(2, 3),
    )
    fh.collect(model, batches, "words", store)
    with pytest.raises(fh.SelectionError, match="run 'run' has no token ids: collect it with"):
        _ = ActivationDataset(store, "words").tokens


def test_rows_become_a_data_set_of_hugging_face(
    store: Store, model: Encoder, batches: list[dict[str, Tensor]], tmp_path: Path
) -> None:
    datasets = pytest.importorskip("datasets")
    options: dict[str, Any] = {"mask": "attention_mask", "tokens": "input_ids"}
    fh.collect(model, batches, "words", store, **options)
    data = ActivationDataset(store, "words")
    made = store.to_datasets()
    assert made.column_names == ["words", "token", "position", "text"]
    for source in (made, _saved(datasets, made, tmp_path / "made")):
        read = source.with_format("torch")
        assert torch.equal(read["words"][:], data[:])
        assert torch.equal(read["token"][:], data.tokens)
        assert torch.equal(read["position"][:], data.positions)
        assert torch.equal(read["text"][:], data.texts)
    fh.collect(model, batches, "words", store, run="plain", dtype=torch.bfloat16)
    plain = store.to_datasets("words", run="plain")
    assert plain.column_names == ["words"]
    rows = ActivationDataset(store, "words", run="plain")[:]
    assert torch.equal(plain.with_format("torch")["words"][:], rows.float())


def _saved(datasets: Any, made: Any, folder: Path) -> Any:
    made.save_to_disk(str(folder))
    return datasets.load_from_disk(str(folder))


def test_a_data_set_has_the_rows_that_are_stored_now(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    # The second store has the path and the sizes of the first, and `map` has a cache.
    for factor in (1, 2):
        with LocalStore(tmp_path / "store") as store:
            store.restart("run", 0)
            store.put("run", 0, "a", {"output": torch.full((3, 2), float(factor))})
            store.complete("run", 0)
            made = store.to_datasets().map(lambda row: {"twice": [2 * it for it in row["a"]]})
        assert made["a"][:] == 3 * [2 * [factor]]
        assert made["twice"][:] == 3 * [2 * [2 * factor]]


def test_contexts_span_batches(model: Encoder, batches: list[dict[str, Tensor]]) -> None:
    pytest.importorskip("datasets")
    store = MemoryStore()
    fh.collect(model, batches, "words", store, mask="attention_mask", tokens="input_ids")
    data = ActivationDataset(store, "words")
    assert len(data) == 13
    for size in (1, 3, 5, 13):
        made = store.to_datasets(context=size).with_format("torch")
        assert made.column_names == ["words", "token_ids"]
        whole = 13 // size * size
        assert torch.equal(made["words"][:], data[:whole].unflatten(0, (-1, size)))
        assert torch.equal(made["token_ids"][:], data.tokens[:whole].unflatten(0, (-1, size)))
    assert len(store.to_datasets(context=14)) == 0


def test_columns_are_the_memory_of_the_files(
    tmp_path: Path, model: Encoder, batches: list[dict[str, Tensor]]
) -> None:
    pytest.importorskip("datasets")
    pa = pytest.importorskip("pyarrow")
    with LocalStore(tmp_path) as store:
        fh.collect(model, batches, "words", store)
        before = pa.total_allocated_bytes()
        made = store.to_datasets()
        assert pa.total_allocated_bytes() == before  # nothing of Arrow's own
    read = made.with_format("torch")["words"][:]  # of a closed store
    assert torch.equal(
        read, torch.cat([model.words(it["input_ids"]).flatten(0, 1) for it in batches])
    )


def test_what_is_no_table_is_refused(store: Store, batches: list[dict[str, Tensor]]) -> None:
    pytest.importorskip("datasets")
    store.put("run", 0, "a", {"output": torch.ones(3, 2)})
    store.put("run", 0, "b", {"output": torch.ones(2, 2)})
    store.put("run", 0, "token", {"output": torch.ones(3, 2)})
    store.put("run", 0, "complex", {"output": torch.ones(3, 2, dtype=torch.complex64)})
    store.put("run", 0, "@rows", {"token": torch.arange(3)})
    store.complete("run", 0)
    with pytest.raises(fh.HookError, match=r"'b' has 2 rows .* in batch 0 of run 'run'"):
        store.to_datasets("a", "b")
    with pytest.raises(fh.HookError, match="a layer has the same name as the column 'token'"):
        store.to_datasets("a", "token")
    with pytest.raises(
        fh.HookTypeError, match=r"Arrow does not support torch.complex64, the dtype of 'complex'"
    ):
        store.to_datasets("complex")
    with pytest.raises(ValueError, match="context must be at least 1, got 0"):
        store.to_datasets("a", context=0)
    for layer, run, name in (("nope", "run", "output"), ("a", "none", "output"), ("a", "run", "x")):
        with pytest.raises(
            fh.SelectionError, match=f"run '{run}' has a tensor '{name}' of '{layer}'"
        ):
            store.to_datasets(layer, run=run, name=name)
    store.put("run", 1, "a", {"output": torch.ones(3, 4)})
    store.complete("run", 1)
    with pytest.raises(
        fh.HookError, match=r"'a' has 3 rows of \(\(4,\), torch.float32\) in batch 1"
    ):
        store.to_datasets("a")


def test_a_missing_package_is_named(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(fh.HookError, match="to_datasets needs the package datasets"):
        store.to_datasets()


def test_epochs_follow_each_other(model: Encoder, batches: list[dict[str, Tensor]]) -> None:
    store = MemoryStore()
    fh.collect(model, batches, "words", store)
    data = ActivationDataset(store, "words")
    stream, endless = ActivationStream(data, 7), ActivationStream(data, 7).epochs()
    for _ in range(3):
        for batch in stream:
            assert torch.equal(next(endless), batch)


def test_quantities_are_collected_by_their_names() -> None:
    model = language_model("llama", 16)
    ids = torch.randint(32, (2, 2, 5))
    store = MemoryStore()
    batches = [{"input_ids": each} for each in ids]
    fh.collect(model, batches, "@resid_post.*", store, tokens="input_ids")
    assert store.layers("run", 0) == ["@rows", "@resid_post.0", "@resid_post.1"]
    data = ActivationDataset(store, "@resid_post.1")
    with fh.capture(model, "model.layers.1", calls="all") as acts, torch.no_grad():
        for batch in batches:
            model(**batch)
    assert torch.equal(data[:], torch.cat([each.flatten(0, 1) for each in acts["model.layers.1"]]))
    assert torch.equal(data.tokens, ids.flatten())


@pytest.mark.parametrize(
    ("tokens", "masked"),
    [("input_ids", None), ("input_ids", "attention_mask"), (None, "attention_mask")],
)
def test_rows_of_a_pattern_are_queries(tokens: str | None, masked: str | None) -> None:
    model = language_model("llama", 16)
    ids = torch.randint(32, (2, model.config.num_attention_heads))  # as many tokens as heads
    batch = {"input_ids": ids, "attention_mask": torch.tensor([[1, 0], [1, 1]])}
    with fh.capture(model, "@pattern.0") as acts, torch.no_grad():
        model(**batch)
    by_query = acts["@pattern.0"].transpose(1, 2)
    chosen = torch.ones_like(ids) if masked is None else batch[masked]
    store = MemoryStore()
    fh.collect(model, [batch], "@pattern.0", store, tokens=tokens, mask=masked)
    rows = store.get("run", 0, "@pattern.0")["output"]
    assert torch.equal(rows.flatten(0, -2), by_query[chosen.bool()].flatten(0, -2))
    if tokens is not None:
        data = ActivationDataset(store, "@pattern.0")
        assert torch.equal(data[:], rows.flatten(0, -2))
        assert torch.equal(data.tokens, ids[chosen.bool()].repeat_interleave(2))


@pytest.mark.parametrize("masked", [None, "attention_mask"])
def test_a_loader_may_use_the_buffer_of_its_tokens_again(
    store: Store, model: Encoder, masked: str | None
) -> None:
    every = torch.randint(WORDS, (3, 2, 4))

    def loader() -> Iterator[dict[str, Tensor]]:
        buffer = torch.empty_like(every[0])
        for ids in every:
            yield {"input_ids": buffer.copy_(ids), "attention_mask": torch.ones(2, 4)}

    fh.collect(model, loader(), "words", store, mask=masked, tokens="input_ids")
    assert torch.equal(ActivationDataset(store, "words").tokens, every.flatten())


def test_a_table_has_the_layers_of_the_first_batch(store: Store) -> None:
    pytest.importorskip("datasets")
    for batch, layers in enumerate(["ab", "a", "ab"]):
        for layer in layers:
            store.put("run", batch, layer, {"output": torch.full((2, 3), float(batch))})
        store.complete("run", batch)
    made = store.to_datasets()
    assert made.column_names == ["a", "b"]
    assert [row[0] for row in made["b"][:]] == [0, 0, 2, 2]

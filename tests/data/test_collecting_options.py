"""Options of `collect`: parts, dtypes, inputs, masks and plans."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import ferrohook as fh
from ferrohook.compat import mi_crow as fi
from ferrohook.data import LocalStore, MemoryStore
from support.modules import Returning

if TYPE_CHECKING:
    from pathlib import Path

PLAN = fh.Plan(fh.on("0", fh.Scale(2)))


class Encoder(nn.Module):
    """Takes tokens and their mask, as encoders of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 4)
        self.layer = nn.Linear(4, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.layer(self.words(input_ids) * attention_mask.unsqueeze(-1))


@pytest.fixture
def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).eval()


@pytest.fixture
def batches() -> list[Tensor]:
    return [torch.randn(5, 3) for _ in range(3)]


@pytest.fixture
def padded() -> list[dict[str, Tensor]]:
    return [
        {
            "input_ids": torch.randint(9, (2, 5)),
            "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]),
        }
        for _ in range(3)
    ]


def test_slices_are_stored_in_a_dtype(model: nn.Sequential, batches: list[Tensor]) -> None:
    store = MemoryStore()
    part = (slice(None), slice(1, 3))
    fh.collect(model, batches, "0", store, slice=part, dtype=torch.bfloat16)
    for number, batch in enumerate(batches):
        assert torch.equal(
            store.get("run", number, "0")["output"], model[0](batch)[part].to(torch.bfloat16)
        )


def test_inputs_and_parts_of_outputs_are_stored(
    model: nn.Sequential, batches: list[Tensor]
) -> None:
    store = MemoryStore()
    fh.collect(model, batches, ["0", "2"], store, inputs=True)
    assert [*store.get("run", 1, "0")] == ["input"]
    assert torch.equal(store.get("run", 1, "0")["input"], batches[1])
    assert torch.equal(store.get("run", 1, "2")["input"], model[:2](batches[1]))
    pair = Returning(lambda x: (x, {"second": x + 1}))
    for index, names in ((0, ["output"]), (1, ["output.second"])):
        fh.collect(pair, batches, "", store, run=f"part{index}", output_index=index)
        assert [*store.get(f"part{index}", 0, "")] == names


@pytest.mark.parametrize("mask", ["attention_mask", lambda batch: batch["attention_mask"].bool()])
def test_a_mask_drops_padding(padded: list[dict[str, Tensor]], mask: Any) -> None:
    model, store = Encoder(), MemoryStore()
    fh.collect(model, padded, ["words", "layer"], store, mask=mask)
    for number, batch in enumerate(padded):
        real = batch["attention_mask"].bool()
        found = store.get("run", number, "layer")["output"]
        assert found.shape == (7, 3)
        torch.testing.assert_close(found, model(**batch)[real])
        assert torch.equal(
            store.get("run", number, "words")["output"], model.words(batch["input_ids"])[real]
        )
    rows = fh.data.ActivationDataset(store, "layer")
    assert len(rows) == 21


def test_masks_that_do_not_fit_are_refused(padded: list[dict[str, Tensor]]) -> None:
    model = Encoder()
    for mask, error, told in (
        (
            "padding",
            fh.HookError,
            "mask='padding' names a key of the batches, but this batch does not have it",
        ),
        (lambda batch: [1], fh.HookTypeError, "a tensor with at least one dimension, got list"),
        (
            lambda batch: torch.tensor(1),
            fh.HookTypeError,
            "with at least one dimension, got Tensor",
        ),
        (
            lambda batch: torch.ones(2, 4),
            fh.HookError,
            r"'output' of layer 'layer' has shape \(2, 5, 3\), which does not start with",
        ),
        (1, fh.HookTypeError, "mask must be a str, a callable or None, got int"),
    ):
        store = MemoryStore()
        with pytest.raises(error, match=told):
            fh.collect(model, padded, "layer", store, mask=mask)  # type: ignore[arg-type]
        assert store.runs() == []


@pytest.mark.parametrize("prepared", [False, True])
def test_a_plan_runs_in_each_forward(
    model: nn.Sequential, batches: list[Tensor], prepared: bool
) -> None:
    store = MemoryStore()
    plan = PLAN.prepare(model) if prepared else PLAN
    fh.collect(model, batches, ["0", "2"], store, plan=plan)
    for number, batch in enumerate(batches):
        assert torch.equal(store.get("run", number, "0")["output"], model[0](batch) * 2)
        steered = fh.run(model, batch, plan=PLAN).output
        assert torch.equal(store.get("run", number, "2")["output"], steered)
    if isinstance(plan, fh.typing.Prepared):
        assert plan.open() is not None  # the caller's
        plan.close()
    assert type(model[0]) is nn.Linear


def test_plans_that_cannot_be_used_are_refused(model: nn.Sequential, batches: list[Tensor]) -> None:
    store = MemoryStore()
    with pytest.raises(fh.HookTypeError, match="plan must be a Plan or a Prepared, got str"):
        fh.collect(model, batches, "0", store, plan="plan")  # type: ignore[arg-type]
    with pytest.raises(fh.HookError, match="the plan keeps activations"):
        fh.collect(model, batches, "0", store, plan=PLAN + fh.Plan(fh.keep("2")))
    with (
        PLAN.prepare(nn.Sequential(nn.Linear(1, 1))) as others,
        pytest.raises(fh.HookError, match="was not prepared for this Sequential"),
    ):
        fh.collect(model, batches, "0", store, plan=others)
    with pytest.raises(fh.SelectionError, match="'9'"):
        fh.collect(model, batches, "0", store, plan=fh.Plan(fh.on("9", fh.Zero())))
    assert store.runs() == []


def test_a_plan_whose_module_never_ran_warns() -> None:
    model = Encoder()
    model.unused = nn.Linear(1, 1)
    batch = {"input_ids": torch.zeros(1, 2, dtype=torch.long), "attention_mask": torch.ones(1, 2)}
    plan = fh.Plan(fh.on("unused", fh.Zero()))
    with pytest.warns(fh.errors.NeverFiredWarning, match="'unused' was selected") as told:
        fh.collect(model, [batch], "layer", MemoryStore(), plan=plan)
    assert told[0].filename == __file__


@pytest.mark.parametrize(
    ("option", "value"),
    [("slice", 0), ("dtype", torch.float16), ("inputs", True), ("output_index", 0)],
)
def test_options_are_of_selected_modules(
    model: nn.Sequential, batches: list[Tensor], option: str, value: Any
) -> None:
    detector = fi.LayerActivationDetector("0")
    with pytest.raises(fh.HookError, match=f"{option}= only works with selected modules"):
        fh.collect(model, batches, detector, MemoryStore(), **{option: value})
    with pytest.raises(fh.HookTypeError, match=r"dtype must be a torch\.dtype"):
        fh.collect(model, batches, "0", MemoryStore(), dtype="half")  # type: ignore[arg-type]


def row_mask(batch: Tensor) -> Tensor:
    return batch[:, 0] > 0


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"slice": (0,)}, r"option 'slice': None, now '\(0,\)'"),
        ({"slice": torch.tensor([0])}, "option 'slice': None, now '[0-9a-f]{16}'"),
        ({"dtype": torch.float16}, "option 'dtype': None, now 'torch.float16'"),
        ({"inputs": True}, "option 'inputs': None, now 'True'"),
        ({"output_index": 0}, "option 'output_index': None, now '0'"),
        ({"mask": row_mask}, "option 'mask': None, now 'row_mask'"),
        ({"plan": PLAN}, "option 'plan': None, now '[0-9a-f]{16}'"),
    ],
)
def test_a_run_is_resumed_over_its_options_alone(
    model: nn.Sequential,
    batches: list[Tensor],
    options: dict[str, Any],
    told: str,
    tmp_path: Path,
) -> None:
    with LocalStore(tmp_path) as store:
        fh.collect(model, batches[:1], "0", store)
        with pytest.raises(fh.errors.ResumeError, match=told):
            fh.collect(model, batches, "0", store, **options)
        fh.collect(model, batches[:1], "0", store, run="own", **options)
        assert fh.collect(model, batches, "0", store, run="own", **options) == (2, 1)
        name = next(iter(options))
        with pytest.raises(fh.errors.ResumeError, match=f"option '{name}': '.+', now None"):
            fh.collect(model, batches, "0", store, run="own")


def test_another_plan_is_another_run(model: nn.Sequential, batches: list[Tensor]) -> None:
    store = MemoryStore()
    fh.collect(model, batches, "2", store, plan=PLAN)
    with PLAN.prepare(model) as same:
        assert fh.collect(model, batches, "2", store, plan=same) == (0, 3)
    with pytest.raises(fh.errors.ResumeError, match="option 'plan'"):
        fh.collect(model, batches, "2", store, plan=fh.Plan(fh.on("0", fh.Scale(3))))


@pytest.mark.parametrize("output", [{"a.b": 1, "a": {"b": 2}}, {0: 1, "0": 2}], ids=str)
def test_tensors_with_one_path_are_refused(output: Any) -> None:
    class Both(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return map_leaves(output, x)

    def map_leaves(value: Any, x: Tensor) -> Any:
        if isinstance(value, dict):
            return {key: map_leaves(inside, x) for key, inside in value.items()}
        return x * value

    model = nn.Sequential(Both())
    with pytest.raises(fh.HookError, match="two tensors of layer '0' have one path"):
        fh.collect(model, [torch.ones(2, 3)], "0", MemoryStore())

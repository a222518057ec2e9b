"""`LayerActivationDetector(copy=...)`: references, checked for writes in place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import ferrohook as fh
from ferrohook.compat import mi_crow as fi
from support.interventions import Model, X, on

if TYPE_CHECKING:
    from collections.abc import Callable


class Negates(nn.Module):
    """Writes to the output of its layer, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).neg_()


def detecting(model: nn.Module, layer: str, **options: Any) -> fi.LayerActivationDetector:
    detector = fi.LayerActivationDetector(layer, **options)
    on_layer = fi.Layers(model)
    on_layer.register_hook(layer, detector)
    return detector


@pytest.mark.parametrize("copy", ["checked", "ref"])
def test_a_reference_shares_memory_and_is_detached(copy: Any) -> None:
    model = Model()
    detector = detecting(model, "head", copy=copy)
    output = model(X)
    kept = detector.get_captured()
    assert kept is not None
    assert output.requires_grad
    assert not kept.requires_grad
    assert kept.data_ptr() == output.data_ptr()
    assert torch.equal(kept, output)
    assert detector.metadata == {"activations_shape": tuple(output.shape)}


@pytest.mark.parametrize(
    ("options", "mode", "expected"),
    [
        ({}, torch.enable_grad, lambda output: -output),  # a clone
        ({"copy": "ref"}, torch.enable_grad, lambda output: output),
        (
            {"copy": "checked", "target_dtype": torch.float64},
            torch.enable_grad,
            lambda output: -output.double(),  # a cast is a copy
        ),
        # Inference tensors have no version, and are copied.
        ({"copy": "checked"}, torch.inference_mode, lambda output: -output),
    ],
    ids=["clone", "ref", "cast", "inference"],
)
def test_what_is_kept_before_a_write_in_place(
    options: dict[str, Any], mode: Callable[[], Any], expected: Callable[[Tensor], Tensor]
) -> None:
    model = Negates()
    detector = detecting(model, "layer", **options)
    with mode():
        output = model(X)
        kept = detector.get_captured()
        assert kept is not None
        assert kept.dtype == expected(output).dtype
        assert torch.equal(kept, expected(output))


def test_reading_after_a_write_in_place_raises() -> None:
    model = Negates()
    detector = detecting(model, "layer", copy="checked")
    model(X)
    for read in (
        detector.get_captured,
        lambda: detector.tensor_metadata["activations"],
        lambda: dict(detector.tensor_metadata),
        lambda: detector.tensor_metadata | {},
        lambda: [*detector.tensor_metadata.values()],
    ):
        with pytest.raises(fh.StaleActivationError, match="'activations' was changed in place"):
            read()
    assert detector.metadata == {"activations_shape": (2, 4)}
    detector.tensor_metadata["activations"] = X  # a user's own value is not checked
    X.neg_().neg_()
    assert detector.get_captured() is X


def test_an_input_is_kept_and_another_call_replaces_it() -> None:
    detector = fi.LayerActivationDetector("", copy="checked")
    detector.hook_type = "pre_forward"  # type: ignore[assignment]
    on(module := nn.Identity(), detector)
    module(X)
    assert detector.get_captured() is X
    module("no tensor")
    assert detector.get_captured() is None
    assert not detector.metadata


def test_collect_stores_checked_tensors_or_raises() -> None:
    store = fh.data.MemoryStore()
    model = Model()
    fh.collect(model, [X], fi.LayerActivationDetector("head", copy="checked"), store)
    assert torch.equal(store.get("run", 0, "head")["activations"], model(X))


def test_an_unknown_copy_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^copy must be 'checked', 'clone' or 'ref', got 'deep'$"):
        fi.LayerActivationDetector("", copy="deep")  # type: ignore[arg-type]

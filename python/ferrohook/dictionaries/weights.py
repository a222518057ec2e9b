"""Weights of dictionaries on the devices and in the dtypes of the tensors that they meet."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ferrohook._core import to_device
from ferrohook.util.streams import Made, lasting, made
from ferrohook.util.tensors import normal

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class StoredWeights:
    """Tensors by name, and their copies, each made once for a device and a dtype.

    Args:
        tensors: by name, on one device.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        with lasting():
            self.tensors = {name: normal(each) for name, each in tensors.items()}
        self._copies: dict[
            tuple[torch.device, torch.dtype], tuple[dict[str, Tensor], Made | None]
        ] = {}

    def on(self, device: torch.device, dtype: torch.dtype) -> Mapping[str, Tensor]:
        """Returns the tensors on a device, tensors of floating point in a dtype."""
        found = self._copies.get((device, dtype))
        if found is None and torch.compiler.is_compiling():
            return self._moved(device, dtype, Tensor.to)  # in the graph
        if found is None:
            with lasting():
                copies = self._moved(device, dtype, to_device)
            order = made([*copies.values()]) if device.type == "cuda" else None
            found = self._copies[device, dtype] = copies, order
        copies, order = found
        if order is not None:
            order.use()
        return copies

    def _moved(
        self,
        device: torch.device,
        dtype: torch.dtype,
        move: Callable[[Tensor, torch.device], Tensor],
    ) -> dict[str, Tensor]:
        copies = {
            name: move(each.to(dtype) if each.is_floating_point() else each, device)
            for name, each in self.tensors.items()
        }
        if "norms" in copies and dtype != self.tensors["norms"].dtype:
            copies["norms"] = copies["W_dec"].norm(dim=-1)  # rounded once, not twice
        return copies

    def __getstate__(self) -> dict[str, Tensor]:
        return self.tensors

    def __setstate__(self, tensors: dict[str, Tensor]) -> None:
        self.__init__(tensors)  # type: ignore[misc]  # it has nothing else


def columns_of(weights: Mapping[str, Tensor], index: list[int]) -> dict[str, Tensor]:
    """Returns the weights of some features: columns of the encoder, rows of the decoder.

    Args:
        weights: of all features, by name.
        index: numbers of features.

    Returns:
        Copies of the weights, of the names in `weights`; a skip connection is left out.
    """
    found = {"b_dec": weights["b_dec"]}
    for name, each in weights.items():
        if name == "W_dec":
            found[name] = each[index]
        elif name not in {"b_dec", "W_skip"}:
            found[name] = each[..., index]
    return found

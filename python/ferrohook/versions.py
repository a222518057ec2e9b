"""Versions of tensors: PyTorch counts the writes in place to a tensor's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ferrohook.errors import StaleActivationError
from ferrohook.tensors import tensors_in

if TYPE_CHECKING:
    from torch import Tensor


def version_of(tensor: Tensor) -> int | None:
    """The number of writes to a tensor; None for inference tensors, which count none."""
    try:
        return tensor._version
    except RuntimeError:
        return None


def versions_of(value: Any) -> list[int | None]:
    """Those of the tensors of a structure, in order."""
    return [version_of(tensor) for tensor in tensors_in(value)]


def check_unchanged(value: Any, versions: list[int | None], name: str) -> None:
    """Refuses a captured structure of tensors that was written to.

    Args:
        value: the structure.
        versions: those of its tensors when it was captured.
        name: of the module or the hook point, for the message.

    Raises:
        StaleActivationError: a tensor was changed in place since.
    """
    if versions_of(value) != versions:
        msg = (
            f"{name!r} was changed in place after it was captured: capture with "
            'copy="clone" to keep what it was'
        )
        raise StaleActivationError(msg)

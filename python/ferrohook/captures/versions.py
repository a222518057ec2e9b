"""Version tags of tensors, which PyTorch increments at each write in place."""

from __future__ import annotations

from typing import Any

from ferrohook.errors import StaleActivationError
from ferrohook.util.tensors import tensors_in, version_of


def versions_of(value: Any) -> list[int | None]:
    """Returns the versions of the tensors of a structure, in order."""
    return [version_of(tensor) for tensor in tensors_in(value)]


def check_unchanged(value: Any, versions: list[int | None], name: str) -> None:
    """Checks that no tensor of a captured structure was changed in place.

    Args:
        value: the structure.
        versions: versions of its tensors at the time of the capture.
        name: name of the module or the hook point, for the message.

    Raises:
        StaleActivationError: a tensor was changed in place since.
    """
    if versions_of(value) != versions:
        msg = (
            f'{name!r} was changed in place after it was captured: capture with copy="clone" to '
            "keep the original values"
        )
        raise StaleActivationError(msg)

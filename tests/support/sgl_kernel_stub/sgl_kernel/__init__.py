"""Stands in for SGLang's kernels: they have no wheel for a CPU, and nothing calls them there."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_args: object, **_kwargs: object) -> NoReturn:
        msg = f"sgl_kernel.{name} is called, which is a stub here"
        raise NotImplementedError(msg)

    return missing

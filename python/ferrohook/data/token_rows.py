"""`TokenRows`: token ids, positions and texts of the rows that `collect` stores."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from ferrohook.errors import HookError, HookTypeError

Tokens: TypeAlias = "str | Callable[[Any], Tensor]"

LAYER: Final = "@rows"
"""Name of the layer that they are stored as; of no module, and of no quantity."""
PARTS: Final = ("token", "position", "text")
"""Names of its tensors."""


def by_rule(name: str, rule: str | Callable[[Any], Tensor], batch: Any) -> Any:
    """Returns a tensor of a batch, by a key of the batch or a function of it.

    Args:
        name: of the option of `collect`.
        rule: the key or function.
        batch: the batch.

    Raises:
        HookError: the batch has no such key.
    """
    if not isinstance(rule, str):
        return rule(batch)
    if not isinstance(batch, Mapping) or rule not in batch:
        msg = (
            f"{name}={rule!r} names a key of the batches, but this batch does not have it: pass a "
            "function"
        )
        raise HookError(msg)
    return batch[rule]


class TokenRows:
    """Counter of the texts of batches, that describes the rows of each.

    Args:
        tokens: key of the token ids in a batch, or a function of a batch that returns them.
    """

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._texts = 0

    def of(self, batch: Any) -> Tensor:
        """Returns the token ids of a batch.

        Raises:
            HookError: the batch has no such key.
            HookTypeError: they are no ints of the shape (batch, tokens).
        """
        found = by_rule("tokens", self._tokens, batch)
        ints = isinstance(found, Tensor) and not (
            found.is_floating_point() or found.is_complex() or found.dtype == torch.bool
        )
        if not ints or found.dim() != 2:  # noqa: PLR2004 (batch and tokens)
            got = (
                f"{found.dtype} of shape {tuple(found.shape)}" if isinstance(found, Tensor) else ""
            )
            msg = (
                "the tokens of a batch must be ints of shape (batch, tokens), got "
                f"{got or type(found).__name__}"
            )
            raise HookTypeError(msg)
        ids: Tensor = found.detach().to("cpu", copy=True)  # a loader may use its buffer again
        return ids

    def rows(self, ids: Tensor, mask: Tensor | None, padding: Tensor | None) -> dict[str, Tensor]:
        """Describes the rows of a batch, and counts its texts.

        Args:
            ids: result of `of`.
            mask: rows that are stored; None for all.
            padding: 0 at tokens that do not count as positions.
        """
        texts, length = ids.shape
        if padding is not None and padding.shape == ids.shape:
            positions = padding.long().cumsum(1) - 1
        else:
            positions = torch.arange(length, device="cpu").expand_as(ids)
        numbers = (self._texts + torch.arange(texts, device="cpu"))[:, None].expand_as(ids)
        self._texts += texts
        parts = dict(zip(PARTS, (ids.long(), positions, numbers), strict=True))
        if mask is not None:
            parts = {name: part[mask] for name, part in parts.items()}
        return {name: part.flatten() for name, part in parts.items()}

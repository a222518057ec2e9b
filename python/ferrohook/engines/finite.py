"""Rows that a plan made NaN or infinite, found before others read them."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import torch

from ferrohook._core import to_device
from ferrohook.errors import HookError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from ferrohook.engines.requests import Span

LIMIT = 1e30
"""Magnitude from which keys and values count as infinite: a product with the queries of others may
overflow, and infinity plus a mask of minus infinity is NaN."""


def failure(what: str) -> HookError:
    """Makes the failure of a request."""
    msg = f"the plan of the request made its rows NaN, infinite or larger than {LIMIT}: {what}"
    return HookError(msg)


def is_read_at_once(tensor: Tensor) -> bool:
    """Returns True if the host reads a number of a tensor without waiting for a device."""
    return tensor.is_cpu


def is_drawable(logits: Tensor) -> bool:
    """Returns True if a token can be drawn from each row, as `WatchedRows.clean_logits` has it.

    False if the host would have to wait for a device to know.
    """
    if not is_read_at_once(logits):
        return False
    return all(abs(most) < LIMIT for most in logits.amax(-1).flatten().tolist())


def _wide(rows: Tensor) -> torch.dtype:
    return torch.promote_types(rows.dtype, torch.float32)


class WatchedRows:
    """Rows of one step whose numbers are cleaned before others read them.

    On the CPU tensors without bad numbers cost one reduction. The host does not wait for a GPU:
    the counts reach it after the step. Used on one stream.

    Args:
        spans: rows of the requests whose plans change them.
    """

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = spans
        self._rows: dict[torch.device, Tensor] = {}
        self.found: list[tuple[str, list[str], Tensor]] = []
        """Tensors that may have bad numbers: name, owners of the rows, and bools of the rows."""
        self._sent: tuple[Tensor, torch.cuda.Event] | None = None

    def _rows_on(self, device: torch.device) -> Tensor:
        """Returns the rows as an index, which goes to a device once a step."""
        if device not in self._rows:
            rows = [span.first_row + row for span in self._spans for row in range(span.rows)]
            self._rows[device] = to_device(torch.tensor(rows, device="cpu"), device)
        return self._rows[device]

    @cached_property
    def _owners(self) -> list[str]:
        return [span.request_id for span in self._spans for _ in range(span.rows)]

    @property
    def arrived(self) -> bool:
        """True if `lost` does not wait."""
        return self._sent is None or self._sent[1].query()

    def clean(self, tensor: Tensor, dim: int, what: str) -> Tensor:
        """Returns keys or values with zeros for the watched numbers that are NaN or too large.

        Args:
            tensor: of the rows of all requests.
            dim: dimension of the rows.
            what: its name, for `lost`.
        """
        # Sums of squares that overflow, and the rows of others, are told apart below. The largest
        # magnitude itself is found 5 to 20 times slower.
        if is_read_at_once(tensor):
            norm = torch.linalg.vector_norm(tensor, dtype=_wide(tensor))
            if norm.item() < LIMIT:
                return tensor
        index = self._rows_on(tensor.device)
        rows = tensor.index_select(dim, index)
        bad = ~(rows.abs() < LIMIT)  # NaN is not below anything
        self.found.append((what, self._owners, bad.movedim(dim, 0).flatten(1).any(1)))
        return tensor.index_copy(dim, index, rows.masked_fill(bad, 0))

    def watch(self, what: str, owners: list[str], values: Iterable[Tensor]) -> None:
        """Looks for bad numbers in further tensors, and leaves them there.

        Args:
            what: their name, for `lost`.
            owners: request of each row.
            values: of shape (rows, ...).
        """
        # The numbers of one byte have no magnitude in torch.
        wide = (each if each.dtype.itemsize > 1 else each.float() for each in values)
        good = [(each.flatten(1).abs() < LIMIT).all(1) for each in wide]
        if good:
            self.found.append((what, owners, ~torch.stack(good).all(0)))

    def clean_logits(self, scores: Tensor, drawn: Sequence[str]) -> Tensor:
        """Returns logits with zeros in the watched rows from which no token can be drawn.

        Those with NaN, with a number that is infinite once a temperature has divided it, or without
        any finite number: some models mask tokens by minus infinity.

        Args:
            scores: (1, rows, vocabulary).
            drawn: request of each row.
        """
        watched = {span.request_id for span in self._spans}
        places = [place for place, owner in enumerate(drawn) if owner in watched]
        if not places:
            return scores
        index = to_device(torch.tensor(places, device="cpu"), scores.device)
        rows = scores.index_select(1, index)
        bad = ~(rows.amax(-1).abs() < LIMIT)
        self.found.append(("logits", [drawn[place] for place in places], bad[0]))
        return scores.index_copy(1, index, rows.masked_fill(bad[..., None], 0))

    def send(self) -> None:
        """Starts to copy the counts of bad numbers to the host, on the current stream."""
        found = [bad for _, _, bad in self.found]
        if found and not found[0].is_cpu:
            bad = torch.cat(found)
            host = torch.empty_like(bad, device="cpu", pin_memory=True)
            host.copy_(bad, non_blocking=True)
            sent = torch.cuda.Event()
            sent.record(torch.cuda.current_stream(bad.device))
            self._sent = host, sent

    def is_bad(self, request_id: str) -> Tensor:
        """Returns a bool on the device: whether a tensor had bad numbers in rows of a request."""
        found = [
            bad[place]
            for _, owners, bad in self.found
            for place, owner in enumerate(owners)
            if owner == request_id
        ]
        return torch.stack(found).any() if found else torch.tensor(data=False, device="cpu")

    def lost(self) -> dict[str, str]:
        """Returns the requests with bad numbers, and the name of the first tensor that has some.

        Waits for the copy.
        """
        found = [each for _, _, each in self.found]
        if self._sent is not None:
            host, event = self._sent
            event.synchronize()
            found = [*host.split([len(each) for each in found])]
        lost: dict[str, str] = {}
        for (what, owners, _), bad in zip(self.found, found, strict=True):
            for row in bad.nonzero().flatten().tolist():
                lost.setdefault(owners[row], what)
        return lost

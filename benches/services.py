"""The example's service as others would write it: `python -m benches.services {plain,locked}`."""

from __future__ import annotations

import sys
import threading
from contextlib import ExitStack
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import ferrohook as fh
from examples.service.__main__ import main
from examples.service.encoder import Encoder, as_lists, ignore, reduced, tensor_of
from ferrohook.plans.entries import KeepEntry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from examples.service.schema import EmbedAnswer, EmbedRequest


class PlainEncoder(Encoder):
    """An encoder without hooks, those for the time limit included."""

    def instrument(self) -> None:
        """Leaves the model as it is."""


class LockedEncoder(PlainEncoder):
    """An encoder with PyTorch's hooks, one request at a time: the hooks fire for all requests.

    Tokens and answer are computed outside the lock.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._modules = dict(self.model.named_modules())
        self._lock = threading.Lock()

    def _select(self, pattern: Any) -> Iterator[str]:
        parts = pattern.count(".")
        return (
            name
            for name in self._modules
            if name.count(".") == parts and fnmatchcase(name, pattern)
        )

    def embed(
        self,
        request: EmbedRequest,
        scope: fh.Scope,  # noqa: ARG002 (has none)
        captured: Callable[[fh.ActivationCache], None] = ignore,  # noqa: ARG002
    ) -> EmbedAnswer:
        """Answers one request."""
        batch = self.tokenize(request.texts)
        mask = batch["attention_mask"].unsqueeze(-1)
        acts: dict[str, Any] = {}
        counts: dict[str, int] = {}
        wanted: list[str] = []
        hooks: list[tuple[str, Callable[..., Any]]] = []
        for entry in request.plan.entries:
            names = [*self._select(entry.what)]
            if isinstance(entry, KeepEntry):
                wanted += names
            else:
                hooks += [(name, steering(entry.hook)) for name in names]
        for pattern in request.count:
            for name in self._select(pattern):
                counts[name] = 0
                hooks.append((name, counting(counts, name)))
        hooks += [(name, keeping(acts, name)) for name in wanted]
        with torch.no_grad():
            with self._lock, ExitStack() as stack:
                for name, hook in hooks:
                    stack.enter_context(self._modules[name].register_forward_hook(hook))
                embeddings = self._forward(batch, mask)
            return {
                "embeddings": as_lists(embeddings),
                "captures": {
                    name: reduced(tensor_of(name, acts[name]), mask, set(request.reduce))
                    for name in wanted
                },
                "counts": counts,
            }


def steering(intervention: fh.Intervention) -> Callable[..., Any]:
    """A hook that does what an intervention does, on the output or its first item."""

    def change(output: Tensor) -> Tensor:
        values = intervention.values
        if isinstance(intervention, fh.Add):
            return output.add(values[0] * values[1])
        if isinstance(intervention, fh.Scale):
            return output.mul(values[0])
        assert isinstance(intervention, fh.Zero)  # noqa: S101 (the load test has no others)
        return torch.zeros_like(output)

    def hook(_module: object, _args: object, output: Any) -> Any:
        if isinstance(output, Tensor):
            return change(output)
        return change(output[0]), *output[1:]

    return hook


def counting(counts: dict[str, int], name: str) -> Callable[..., None]:
    """A hook that counts."""

    def hook(_module: object, _args: object, _output: object) -> None:
        counts[name] += 1

    return hook


def keeping(acts: dict[str, Any], name: str) -> Callable[..., None]:
    """A hook that stores the output."""

    def hook(_module: object, _args: object, output: Any) -> None:
        acts[name] = output

    return hook


KINDS: dict[str, Callable[..., Encoder]] = {"plain": PlainEncoder, "locked": LockedEncoder}


if __name__ == "__main__":
    kind, *arguments = sys.argv[1:]
    main([*arguments, "--no-observe"], KINDS[kind])

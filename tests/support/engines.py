"""Requests with random plans, and what transformers computes for each alone, hooked by hand."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import random
from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

import ferrohook as fh

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from ferrohook.engines.transformers import Attached
    from support.transcoding import Transcoded

EOS = 2
LAYERS = 3
WIDTH = 32
HEAD = "lm_head"


SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": EOS,
}


def tiny_llama() -> Any:
    """A random Llama, about a millisecond a forward."""
    return LlamaForCausalLM(LlamaConfig(**SIZES)).eval().requires_grad_(requires_grad=False)


def batching(**changes: Any) -> ContinuousBatchingConfig:
    """The engine's configuration: small, and without features that a CPU lacks."""
    settings = {
        "page_size": 8,
        "num_blocks": 64,
        "max_batch_tokens": 24,
        "auto_switch_to_flash": False,
        "use_cuda_graph": False,
    }
    return ContinuousBatchingConfig(**(settings | changes))


def greedy(new_tokens: int = 10, forks: int = 1) -> GenerationConfig:
    """Greedy decoding; of forks by sampling among one token, as greedy ones are refused."""
    settings: dict[str, Any] = {"do_sample": False}
    if forks > 1:
        settings = {"do_sample": True, "top_k": 1, "num_return_sequences": forks}
    return GenerationConfig(max_new_tokens=new_tokens, eos_token_id=EOS, **settings)


@contextlib.contextmanager
def attached_to(model: Any, new_tokens: int, **settings: Any) -> Iterator[Attached]:
    """Starts transformers' engine with plans; asserts that it is left as it was."""
    from ferrohook.engines.transformers import attach  # noqa: PLC0415 (other engines' tests import this module)

    with (
        model.continuous_batching_context_manager(
            greedy(new_tokens), continuous_batching_config=batching(**settings)
        ) as manager,
        attach(manager) as attached,
    ):
        yield attached
    assert not [name for name, value in vars(manager).items() if callable(value) and name[0] == "_"]
    assert "deliver" not in vars(manager.output_router)


@dataclasses.dataclass(frozen=True)
class Change:
    """An intervention on the output of one decoder layer, and its twin by hand."""

    layer: int
    hook: fh.Intervention
    at: Any

    def by_hand(self, x: Tensor, prompt: int) -> Tensor:
        """Applies the change to hidden states of (1, positions, width)."""
        chosen = chosen_positions(self.at, x.shape[1], prompt)
        return torch.where(chosen[None, :, None], self._everywhere(x), x)

    def _everywhere(self, x: Tensor) -> Tensor:
        values = self.hook.values
        match self.hook:
            case fh.Add():
                return x + values[1] * values[0]
            case fh.Scale():
                return x * values[0]
            case fh.Ablate():
                unit = values[0] / values[0].norm()
                return x - (x @ unit)[..., None] * unit
            case fh.Zero():
                return torch.zeros_like(x)
        raise TypeError(self.hook)


def chosen_positions(at: Any, length: int, prompt: int) -> Tensor:
    """Mask of the positions that `at` names."""
    positions = torch.arange(length)
    match at:
        case None:
            return positions >= 0
        case "prompt":
            return positions < prompt
        case "generated":
            return positions >= prompt
        case "last_prompt":
            return positions == prompt - 1
        case slice():
            start, stop = (
                bound + prompt if bound is not None and bound < 0 else bound
                for bound in (at.start, at.stop)
            )
            inside = positions >= (start or 0)
            return inside if stop is None else inside & (positions < stop)
        case _:
            return positions == (at if at >= 0 else prompt + at)


def add(_module: object, _args: object, output: Tensor) -> Tensor:
    """A hook in Python."""
    return output + 0.25


@dataclasses.dataclass(frozen=True)
class Gated:
    """A gate of a plan, and a change that follows it without a jump, as rows differ in rounding."""

    read: list[int]
    """Layers whose sum it reads."""
    changed: int
    """Layer that is changed."""
    direction: Tensor
    vector: Tensor
    over: Any
    by: Any
    lag: int

    @classmethod
    def drawn(
        cls, rng: random.Random, generator: torch.Generator, layers: int, width: int
    ) -> Gated:
        """Draws one."""
        direction, vector = torch.randn(2, width, generator=generator)
        over = rng.choice(["token", "so_far", "prompt", fh.window(3), fh.ema(0.7)])
        by = rng.choice(["max", "mean", "min", "last"])
        lag = 0 if over == "prompt" else rng.choice([0, 0, 1])
        changed = rng.randrange(layers)
        read = [rng.randint(0, changed)]  # the hooks by hand run all positions at once
        if read[0] and rng.random() < 0.3:
            read.insert(0, rng.randrange(read[0]))
        return cls(read, changed, direction, vector, over, by, lag)

    @property
    def entries(self) -> list[Any]:
        """Entries of the plan."""
        options: dict[str, Any] = {"over": self.over, "by": self.by, "lag": self.lag}
        known, dot = fh.above("g", -1e6), fh.Dot(self.direction)
        return [
            fh.gate("g", [f"model.layers.{it}" for it in self.read], dot, **options),
            fh.on(
                f"model.layers.{self.changed}",
                fh.Add(self.vector),
                when=known,
                strength=fh.ramp("g", -4.0, 4.0),
            ),
            fh.keep("@gate.g"),
        ]

    def value(self, readings: list[float], position: int, prompt: int) -> float:
        """The value at a position, in plain Python; NaN where it is unknown."""
        if (self.over == "prompt" and position < prompt - 1) or (self.lag and position < prompt):
            return math.nan
        position = prompt - 1 if self.over == "prompt" else position - self.lag
        read = readings[: position + 1]
        if self.over == fh.ema(0.7):
            return functools.reduce(lambda average, each: 0.7 * average + 0.3 * each, read)
        if self.over == fh.window(3):
            read = read[-3:]
        if len(read) < 3 and self.over == fh.window(3):
            return math.nan
        if self.over == "token":
            return read[-1]
        reduced = {"max": max(read), "min": min(read), "mean": sum(read) / len(read)}
        return reduced.get(self.by, read[-1])

    def hooks(self, prompt: int, acts: dict[str, Tensor]) -> list[tuple[str, Any]]:
        """Hooks of PyTorch's on layers, which do the same by hand; `acts` takes the values."""
        parts: dict[int, Tensor] = {}

        def read(layer: int, _module: Any, _args: Any, output: Tensor) -> None:
            parts[layer] = output[0]
            if layer != self.read[-1]:
                return
            total = torch.stack([*parts.values()]).sum(0)
            readings = (total * self.direction).sum(-1).tolist()
            values = [self.value(readings, at, prompt) for at in range(len(readings))]
            acts["@gate.g"] = torch.tensor(values)[None]

        def change(_module: Any, _args: Any, output: Tensor) -> Tensor:
            strengths = ((acts["@gate.g"] + 4) / 8).clamp(0, 1).nan_to_num(0.0)
            return output + strengths[..., None] * self.vector

        reads = [(f"model.layers.{it}", functools.partial(read, it)) for it in self.read]
        return [*reads, (f"model.layers.{self.changed}", change)]


@dataclasses.dataclass(frozen=True)
class Job:
    """A request: its prompt, the changes of its plan and the layers that it keeps."""

    prompt: list[int]
    changes: tuple[Change, ...] = ()
    kept: tuple[str, ...] = ()
    python: str | None = None
    """Module to whose output a Python hook adds."""
    gated: Gated | None = None
    kept_at: Any = None
    """Positions at which it keeps them."""
    transcoded: Transcoded | None = None

    @property
    def dictionaries(self) -> dict[str, fh.Dictionary]:
        """The dictionaries that its plan names."""
        own = [] if self.transcoded is None else [self.transcoded.dictionary]
        return {str(each.name): each for each in own}

    @property
    def captures(self) -> bool:
        """True if its plan captures."""
        return bool(self.kept or self.gated)

    @property
    def plan(self) -> fh.Plan | None:
        """The plan; None if it would be empty."""
        entries: list[Any] = [
            fh.on(f"model.layers.{each.layer}", each.hook, at=each.at) for each in self.changes
        ]
        if self.python is not None:
            entries.append(fh.on(self.python, add))
        entries += [] if self.gated is None else self.gated.entries
        entries += [] if self.transcoded is None else [self.transcoded.entry]
        entries += [fh.keep(each, at=self.kept_at) for each in self.kept]
        return fh.Plan(*entries) if entries else None

    def alone(self, model: Any, text: Sequence[int]) -> tuple[Tensor, dict[str, Tensor]]:
        """Runs prompt and text alone; returns the logits, and the kept states by position."""
        acts: dict[str, Tensor] = {}

        def change(each: Change) -> Any:
            return lambda _module, _args, out: each.by_hand(out, len(self.prompt))

        def record(name: str) -> Any:
            return lambda _module, _args, out: acts.__setitem__(name, out.detach().clone())

        def hook(name: str, function: Any) -> Any:
            return model.get_submodule(name).register_forward_hook(function)

        handles = [hook(f"model.layers.{each.layer}", change(each)) for each in self.changes]
        if self.python is not None:
            handles.append(hook(self.python, add))
        if self.gated is not None:
            handles += [hook(*each) for each in self.gated.hooks(len(self.prompt), acts)]
        if self.transcoded is not None:
            handles += self.transcoded.register(model, len(self.prompt), acts)
        handles += [hook(name, record(name)) for name in self.kept]
        ids = torch.tensor([[*self.prompt, *text][:-1]])
        with torch.no_grad():
            logits = model(ids, use_cache=False).logits
        for handle in handles:
            handle.remove()
        chosen = chosen_positions(self.kept_at, ids.shape[1], len(self.prompt))
        if self.kept_at is not None and not chosen.any():
            acts = {name: act for name, act in acts.items() if name not in self.kept}
        return logits[0], {
            name: act[0, chosen] if name in self.kept else act[0] for name, act in acts.items()
        }

    def check(self, model: Any, output: Any, most: int, tolerance: float = 1e-3) -> None:
        """Asserts that an output equals the answer to the request alone.

        The text is greedy if each token has the highest logit after the tokens before it.
        """
        text = output.generated_tokens
        assert output.error is None, output.error
        assert output.hook_error is None
        assert 1 <= len(text) <= most
        assert EOS not in text[:-1]
        assert len(text) == most or text[-1] == EOS
        logits, acts = self.alone(model, text)
        behind = logits[len(self.prompt) - 1 :]
        chosen = behind.gather(1, torch.tensor(text)[:, None])[:, 0]
        assert (behind.amax(1) - chosen).max() <= tolerance, "not the text that it gives alone"
        self._check_acts(output.acts, acts, behind, tolerance)

    def check_acts(self, model: Any, output: Any, tolerance: float = 1e-3) -> None:
        """Asserts that an output, of any text, has the captures of the request run alone."""
        logits, acts = self.alone(model, output.generated_tokens)
        self._check_acts(output.acts, acts, logits[len(self.prompt) - 1 :], tolerance)

    @staticmethod
    def _check_acts(
        given: dict[str, Tensor], acts: dict[str, Tensor], behind: Tensor, tolerance: float
    ) -> None:
        assert sorted(given) == sorted(acts)
        for name, right in acts.items():
            if name == HEAD:
                right = behind  # noqa: PLW2901 (the head runs for tokens to come alone)
            got = given[name].reshape(-1, *right.shape[1:])
            assert got.shape == right.shape, f"{name}: {got.shape} instead of {right.shape}"
            # The value of a gate may be a sum of large products that is close to zero.
            least = 0.1 if name == "@gate.g" else 0.0
            atol = tolerance * max(least, float(right.nan_to_num().abs().max()))
            torch.testing.assert_close(got, right, rtol=tolerance, atol=atol, equal_nan=True)


def random_jobs(number: int, seed: int, longest: int = 40) -> list[Job]:
    """Requests of which a third have no plan; every other begins with one of three prefixes."""
    rng = random.Random(seed)  # noqa: S311 (tests)
    generator = torch.Generator().manual_seed(seed)

    def tokens(most: int) -> list[int]:
        return [rng.randrange(3, 64) for _ in range(rng.randint(1, most))]

    def change() -> Change:
        vector = torch.randn(WIDTH, generator=generator)
        hook = rng.choice(
            [
                fh.Add(vector, scale=rng.choice([0.5, 2.0])),
                fh.Add(vector),
                fh.Scale(rng.choice([0.5, 1.5])),
                fh.Ablate(vector),
                fh.Zero(),
            ]
        )
        at = rng.choice([None, None, "prompt", "generated", "last_prompt", 0, 3, slice(2, 9)])
        return Change(rng.randrange(LAYERS), hook, at)

    prefixes = [tokens(3 * longest // 4) for _ in range(3)]
    jobs = []
    for index in range(number):
        prompt = [*(rng.choice(prefixes) if index % 2 else []), *tokens(longest // 2)]
        if rng.random() < 1 / 3:
            jobs.append(Job(prompt))
            continue
        changes = tuple(change() for _ in range(rng.randint(0, 2)))
        names = [*(f"model.layers.{layer}" for layer in range(LAYERS)), "model.embed_tokens"]
        names += ["model.layers.1.mlp", HEAD]
        kept = tuple(rng.sample(names, rng.randint(0 if changes else 1, 3)))
        jobs.append(Job(prompt, changes, kept, rng.choice([None, None, None, names[0]])))
    return jobs

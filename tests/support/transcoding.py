"""Random changes of features of transcoders, and what PyTorch's own hooks compute for each."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

import ferrohook as fh
from support.dictionaries import D_SAE, dictionary_of, rows_of_values, weights_of
from support.engines import chosen_positions

if TYPE_CHECKING:
    import random

    from torch import Tensor

    from support.engines import Gated


class TensorOfLayer(NamedTuple):
    """A tensor of a layer, as plans name it, and where transformers' model has it."""

    plan: str
    module: str
    """Path in the layer; "" for the layer."""
    inputs: bool
    rank: int
    """Place in the order of the layer's forward."""


READ: Final = (
    TensorOfLayer("@resid_pre.{}", "", inputs=True, rank=0),
    TensorOfLayer("@z.{}", "self_attn.o_proj", inputs=True, rank=1),
    TensorOfLayer("@attn_out.{}", "self_attn.o_proj", inputs=False, rank=2),
    TensorOfLayer("@resid_mid.{}", "post_attention_layernorm", inputs=True, rank=3),
    TensorOfLayer("@mlp_in.{}", "mlp", inputs=True, rank=4),
    TensorOfLayer("model.layers.{}.mlp", "mlp", inputs=False, rank=5),
    TensorOfLayer("model.layers.{}", "", inputs=False, rank=6),
)
WRITTEN: Final = (
    TensorOfLayer("@attn_out.{}", "self_attn.o_proj", inputs=False, rank=2),
    TensorOfLayer("@mlp_out.{}", "mlp", inputs=False, rank=5),
    TensorOfLayer("model.layers.{}.mlp", "mlp", inputs=False, rank=5),
    TensorOfLayer("@resid_post.{}", "", inputs=False, rank=6),
    TensorOfLayer("model.layers.{}", "", inputs=False, rank=6),
)
LAST: Final = 6
"""Rank of a layer's output."""


@dataclasses.dataclass(frozen=True)
class Transcoded:
    """A change of features of a transcoder, which are read at one place and changed at another."""

    read: tuple[int, TensorOfLayer]
    """Layer, and tensor there."""
    written: tuple[int, TensorOfLayer]
    kind: str
    skip: bool
    width: int
    index: list[int]
    change: tuple[str, float]
    """Argument of `Feature`, and its value."""
    at: Any
    when: bool
    """True if it acts only where the gate of the request's plan has a value."""
    strength: float | str | None
    """"ramp" for one that follows the gate."""

    @classmethod
    def drawn(cls, rng: random.Random, layers: int, width: int, gated: Gated | None) -> Transcoded:
        """Draws one; of two places, the first in the forward is read."""
        numbers = range(layers)
        first = (0, 0) if gated is None else (gated.read[-1], LAST)  # the gate has a value by then
        writes = [(layer, it) for layer in numbers for it in WRITTEN if (layer, it.rank) >= first]
        written = rng.choice(writes)
        end = written[0], written[1].rank
        reads = [(layer, it) for layer in numbers for it in READ if (layer, it.rank) <= end]
        change = rng.choice([("set", rng.uniform(2, 6)), ("scale", 3.0), ("add", 2.0)])
        strengths = [None, 0.5] if gated is None else [None, 0.5, "ramp"]
        return cls(
            rng.choice(reads[-9:]),
            written,
            rng.choice(["relu", "groupmax"]),
            rng.random() < 1 / 2,
            width,
            rng.sample(range(D_SAE), rng.randint(1, 3)),
            change,
            rng.choice([None, None, "prompt", "generated", "last_prompt", 3, slice(2, 9)]),
            gated is not None and rng.random() < 1 / 2,
            rng.choice(strengths),
        )

    @property
    def dictionary(self) -> fh.Dictionary:
        """The transcoder, by a name that says all of it."""
        (read, here), (written, there) = self.read, self.written
        reads, writes = here.plan.format(read), there.plan.format(written)
        name = f"{self.kind}/{self.skip}/{reads}/{writes}"
        own: Any = {"transcoder": True, "reads": reads, "writes": writes, "name": name}
        own |= {"W_skip": torch.eye(self.width)} if self.skip else {}
        return dictionary_of(self.kind, width=self.width, **own)

    @property
    def entry(self) -> Any:
        """Entry of the plan."""
        own, (name, number) = self.dictionary, self.change
        hook = fh.Feature(own, self.index, **{name: number})  # type: ignore[arg-type]
        when = fh.above("g", -1e6) if self.when else None
        ramp = fh.ramp("g", -4.0, 4.0)
        strength: Any = ramp if self.strength == "ramp" else self.strength
        return fh.on(own.writes, hook, at=self.at, when=when, strength=strength)

    def register(self, model: Any, prompt: int, acts: dict[str, Tensor]) -> list[Any]:
        """Registers hooks of PyTorch's that do the same; `acts` has the gate's values."""
        weights = weights_of(self.kind, self.width, width=self.width)
        pending: list[Tensor] = []

        def read(x: Tensor) -> None:
            values = rows_of_values(self.kind, weights, x)[..., self.index]
            name, number = self.change
            new = {"set": torch.full_like(values, number), "scale": values * number}
            changed = new.get(name, values + number)
            pending.append((changed - values) @ weights["W_dec"][self.index])

        def write(_module: Any, _args: Any, output: Tensor) -> Tensor:
            (added,) = pending
            chosen = chosen_positions(self.at, output.shape[1], prompt).float()
            if self.when:
                chosen = chosen * ~acts["@gate.g"][0].isnan()
            if self.strength == "ramp":
                chosen = chosen * ((acts["@gate.g"][0] + 4) / 8).clamp(0, 1).nan_to_num(0.0)
            elif isinstance(self.strength, float):
                chosen = chosen * self.strength
            return output + chosen[None, :, None] * added

        layers = model.model.layers
        (layer, here), (other, there) = self.read, self.written
        reading, writing = (
            layers[number].get_submodule(place.module)
            for number, place in ((layer, here), (other, there))
        )
        first = (
            reading.register_forward_pre_hook(lambda _module, args: read(args[0]))
            if here.inputs
            else reading.register_forward_hook(lambda _module, _args, output: read(output))
        )
        return [first, writing.register_forward_hook(write)]


def _bad(what: Any, **own: Any) -> Any:
    """An entry with a transcoder that does not fit; `own`: arguments of `dictionary_of`."""
    sizes: dict[str, Any] = {"width": 64, "d_out": 64, "reads": "@mlp_in.1"}
    named = {"transcoder": True, "name": f"bad/{what}/{own}"}
    return fh.on(what, fh.Feature(dictionary_of("relu", **sizes | own | named), 3, set=4.0))


BAD: Final = (
    (_bad("@mlp_out.1", reads="@mlp_in.9"), "has no @mlp_in.9: its blocks are 0 to 3"),
    (_bad("@mlp_out.1", reads="@z.1.2", width=32), "@z.1.2 names no head"),
    (_bad("@mlp_out.1", reads="@pattern.1"), "@pattern.1 is not proved"),
    (_bad("@mlp_out.1", reads="model.layers.9"), "closest names.*model.layers.0"),
    (_bad("@mlp_out.1", reads="lm_head"), "never runs"),
    (_bad("@mlp_out.1", reads="model.layers.1.self_attn.q_proj"), "qkv_proj"),
    (_bad("@mlp_out.1", width=8), "reads vectors of width 8, but @mlp_in.1 has 64"),
    (_bad("@mlp_out.1", reads="model.layers.1.mlp.gate_up_proj"), "gate_up_proj has 256"),
    (_bad("@mlp_out.1", d_out=8), "has a width of 8, but the tensor @mlp_out.1 has 64"),
    (_bad("model.layers.1.mlp", d_out=8), "has a width of 8, but the output of 'model.layers.1.m"),
    (_bad("@mlp_out.1", reads="@mlp_in.2"), "reads @mlp_in.2, which runs later than @mlp_out.1"),
    (_bad("@attn_out.1"), "reads @mlp_in.1, which runs later than @attn_out.1"),
    (_bad("@mlp_out.1", reads="model.layers.1"), "reads model.layers.1, which runs later than"),
    (_bad("model.layers.0", reads="@resid_mid.1"), "reads @resid_mid.1, which runs later than mod"),
    (_bad("model.layers.0.mlp", reads="model.norm"), "reads model.norm, which runs later than"),
    (_bad("@mlp_out.1", reads="@mlp_in.*"), "a transcoder reads and writes one place each, not"),
    (_bad(["@mlp_out.1", "@mlp_out.2"]), "a transcoder reads and writes one place each, not"),
    (_bad("model.layers.*.mlp"), "a transcoder reads and writes one place each, not"),
    (_bad("@mlp_out.1", reads="@z.1.0", width=32), "reads @z.1.0, a single head: not supported"),
    (_bad("@z.2.0", d_out=32), "writes @z.2.0, a single head: not supported"),
    (_bad("@q.2"), "writes @q.2, which is not an output that can be changed"),
    (_bad("@resid_mid.1"), "@resid_mid.1 can be read but not written"),
)
"""Entries that Llama's engines refuse, and the reasons."""

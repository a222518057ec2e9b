"""Small models of drawn architectures, which know what each of their quantities is.

`SmallModel(seed)` draws an architecture from independent choices. Its modules compute in plain
torch and name each quantity where they compute it, by `at`. While an `Oracle` is entered, these
tensors are recorded or replaced; otherwise `at` does nothing.
"""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

T = TypeVar("T")
VOCABULARY: Final = 48
PAD: Final = 1


class Oracle:
    """Records the tensors that a model names, and replaces some.

    Args:
        writes: functions of tensors, by name.
    """

    entered: Oracle | None = None

    def __init__(self, writes: Mapping[str, Callable[[Tensor], Tensor]] | None = None) -> None:
        self.seen: dict[str, Tensor] = {}
        self._writes = writes or {}

    def __enter__(self) -> Self:
        Oracle.entered = self
        return self

    def __exit__(self, *_error: object) -> None:
        Oracle.entered = None

    def at(self, tensor: Tensor, names: tuple[str, ...]) -> Tensor:
        """Records a tensor under its names, and returns what goes on."""
        for name in names:
            tensor = self._writes[name](tensor) if name in self._writes else tensor
        self.seen |= dict.fromkeys(names, tensor)
        return tensor


def at(tensor: Tensor, *names: str) -> Tensor:
    """Names a tensor of the running model."""
    return tensor if Oracle.entered is None else Oracle.entered.at(tensor, names)


class Draw:
    """Draws choices, and remembers them by name.

    Args:
        seed: of the draw.
        plain: True to draw no rare feature.
    """

    def __init__(self, seed: int, *, plain: bool) -> None:
        self.random = random.Random(seed)  # noqa: S311 (an architecture)
        self.made: dict[str, Any] = {}
        self._plain = plain

    def one(self, what: str, *options: T, usual: float = 0.0) -> T:
        """Draws an option; the first one with at least the probability `usual`."""
        first = self.random.random() < usual or (self._plain and usual > 0)
        self.made[what] = drawn = options[0] if first else self.random.choice(options)
        return drawn

    def rarely(self, what: str, probability: float = 0.12) -> bool:
        """Draws whether a model has a feature."""
        drawn = self.random.random() < probability and (probability == 1 or not self._plain)
        if drawn:
            self.made[what] = True
        return drawn

    def name(self, *names: str) -> str:
        """Draws the name of a module."""
        odd = ("mlp", "attn", "norm", "a", "inner", "op", "embed", "head", "gate", "layer")
        return self.random.choice(odd if self.random.random() < 0.15 and not self._plain else names)


class Gain(nn.Module):
    """LayerScale: a factor for each channel."""

    def __init__(self, width: int, size: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((width,), size))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class RMSNorm(nn.Module):
    """Root mean square norm, with the weight or one plus the weight."""

    def __init__(self, width: int, *, plus_one: bool) -> None:
        super().__init__()
        self.plus_one = plus_one
        self.weight = nn.Parameter(torch.zeros(width) if plus_one else torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        normed = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        return normed * (1 + self.weight if self.plus_one else self.weight)


def norm_of(kind: str, width: int) -> nn.Module:
    """Makes a norm."""
    if kind == "layer norm":
        return nn.LayerNorm(width)
    if kind == "layer norm without weight":
        return nn.LayerNorm(width, elementwise_affine=False)
    return RMSNorm(width, plus_one=kind == "one plus weight")


class Inline:
    """A module whose children are another's, and whose code runs as the other's own."""

    def __init__(self, parent: nn.Module, name: str, module: nn.Module) -> None:
        assert not module._parameters, "a copy of the model replaces the parameters of modules only"
        for key, child in module.named_children():
            parent.add_module(f"{name}_{key}", child)
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.forward(*args, **kwargs)


def put(it: Draw, parent: nn.Module, name: str, module: nn.Module, inline: float = 0.15) -> Any:
    """Adds a module to another, or only its code; returns the callable."""
    while any(f"{each}_".startswith(f"{name}_") for each in parent._modules):
        name += "_"
    whole = module._parameters or getattr(module, "how", None) == "interface"
    if not whole and [*module.children()] and it.rarely(f"{name} inline", inline):
        return Inline(parent, name, module)
    parent.add_module(name, module)
    return _Child(parent, name)


class _Child:
    """Calls a child of a module by its name, in copies too."""

    def __init__(self, parent: nn.Module, name: str) -> None:
        self.parent, self.name = parent, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.parent.get_submodule(self.name)(*args, **kwargs)


# --- Sublayers --------------------------------------------------------------------------------


def allowed(kind: str, queries: int, keys: int) -> Tensor:
    """Returns which keys a query sees."""
    distance = torch.arange(queries)[:, None] - torch.arange(keys)
    masks = {
        "causal": distance >= 0,
        "all": torch.ones_like(distance, dtype=torch.bool),
        "anti-causal": distance <= 0,
        "window": (distance >= 0) & (distance < 2),
        "band": distance.abs() < 2,
        "first apart": (distance == 0)
        | (torch.arange(keys) > 0)
        & (distance < queries)
        & (torch.arange(queries)[:, None] > 0 if queries > 2 else True),
    }
    return masks[kind]


def eager(  # noqa: PLR0913, PLR0917 (an attention function's arguments)
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **_more: Any
) -> tuple[Tensor, Tensor]:
    """Attention written out, as a model of transformers has it."""
    groups = q.shape[1] // k.shape[1]
    k, v = (each.repeat_interleave(groups, 1) for each in (k, v))
    scores = q @ k.mT * scaling
    if mask is not None:
        scores = scores + mask
    sinks = getattr(module, "sinks", None)
    if sinks is not None:
        column = sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1)
    weights = weights if sinks is None else weights[..., :-1]
    return (weights @ v).transpose(1, 2).contiguous(), weights


class Attention(nn.Module):
    """Attention by hand, by torch's function, or through transformers' interface."""

    is_causal = False

    def __init__(
        self, it: Draw, width: int, name: Callable[[str], str], how: str, *, cross: bool
    ) -> None:
        super().__init__()
        self.name = name
        self.heads = it.one("heads", 4, 2, 1)
        self.kv_heads = self.heads // it.one("groups", 1, 1, 2) or 1
        self.size = width // self.heads
        self.how = how
        self.mask = "all" if cross else it.one("mask", *MASKS, usual=0.4)
        inner, kv = self.heads * self.size, self.kv_heads * self.size
        bias = it.one("bias", True, False)
        self.fused = not cross and it.one("fused qkv", False, True)
        if self.fused:
            self.qkv = nn.Linear(width, inner + 2 * kv, bias=bias)
        else:
            self.q, self.k, self.v = (nn.Linear(width, n, bias=bias) for n in (inner, kv, kv))
        self.normed = it.rarely("q and k normed")
        if self.normed:
            self.q_norm, self.k_norm = RMSNorm(self.size, plus_one=False), nn.LayerNorm(self.size)
        self.rope = not cross and it.rarely("rope", 0.2)
        if how == "interface" and it.rarely("sinks", 0.2):
            self.sinks = nn.Parameter(torch.randn(self.heads))
        self.gated = it.rarely("gated attention")
        if self.gated:
            self.gate = nn.Linear(width, inner)
        self.out = None if it.rarely("no output projection", 0.05) else nn.Linear(inner, width)
        self.factor = it.one("factor in the module", 1.0, 0.6, usual=0.9)
        self.tuple = it.one("attention returns a tuple", False, True)

    def forward(self, x: Tensor, memory: Tensor | None = None, seen: Tensor | None = None) -> Any:
        source = x if memory is None else memory
        if self.fused:
            sizes = [self.heads * self.size, *[self.kv_heads * self.size] * 2]
            q, k, v = self.qkv(x).split(sizes, -1)
        else:
            q, k, v = self.q(x), self.k(source), self.v(source)
        q, k, v = (each.unflatten(-1, (-1, self.size)).transpose(1, 2) for each in (q, k, v))
        # Weights that are 0 or 1 show nothing.
        q, k = (functional.rms_norm(each, each.shape[-1:]) for each in (q, k))
        if self.normed:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope:
            q, k = rotated(q), rotated(k)
        visible = allowed(self.mask, q.shape[2], k.shape[2])[None, None]
        if seen is not None:
            visible = visible & seen[:, None, None] | torch.eye(q.shape[2], dtype=torch.bool)
        mask = torch.zeros(visible.shape, dtype=x.dtype).masked_fill(
            ~visible, torch.finfo(x.dtype).min
        )
        z = self._attended(q, k, v, mask, memory is not None)
        if self.gated:
            z = z * self.gate(x).sigmoid()
        if self.how != "interface" or memory is not None:
            named = () if self.out is None or memory is not None else (self.name("z"),)
            z = at(z, *named)
        y = z if self.out is None else self.out(z)
        y = y * self.factor if self.factor != 1 else y
        return (y, None) if self.tuple else y

    def _attended(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, cross: bool) -> Tensor:
        scaling = self.size**-0.5
        if self.how == "interface":
            return self._through_interface(q, k, v, mask, scaling, cross)
        if self.how == "by hand":
            return eager(self, q, k, v, mask, scaling)[0].flatten(2)
        groups = self.heads // self.kv_heads
        k, v = (each.repeat_interleave(groups, 1) for each in (k, v))
        z = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return z.transpose(1, 2).flatten(2)

    def _through_interface(self, *call: Any) -> Tensor:
        q, k, v, mask, scaling, cross = call
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as FUNCTIONS  # noqa: PLC0415

        def name(point: str) -> str:
            return self.name(f"cross {point}" if cross else point)

        q, k, v = (
            at(each.transpose(1, 2), name(point)).transpose(1, 2)
            for each, point in zip((q, k, v), "qkv", strict=True)
        )
        function = FUNCTIONS.get_interface("eager", eager)
        z, weights = function(self, q, k, v, mask, scaling=scaling)
        if Oracle.entered is not None:
            groups = q.shape[1] // k.shape[1]
            written = at(weights, name("pattern"))
            if written is not weights:
                z = (written @ v.repeat_interleave(groups, 1)).transpose(1, 2)
            z = at(z, name("z"))
        return z.flatten(2)


MASKS: Final = ("causal", "all", "anti-causal", "window", "band", "first apart")


def rotated(x: Tensor) -> Tensor:
    """Rotates pairs of channels by their position."""
    angles = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] / torch.arange(
        1, x.shape[-1] // 2 + 1
    )
    left, right = x.chunk(2, -1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


class LeafAttention(nn.Module):
    """Attention in one module, with its parameters in its own code."""

    def __init__(self, width: int, name: Callable[[str], str]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, width, width) / math.sqrt(width))

    def forward(self, x: Tensor, **_more: Any) -> Tensor:
        q, k, v = (x @ each for each in self.weight[:3])
        q, k = (functional.rms_norm(each, each.shape[-1:]) for each in (q, k))
        return (q @ k.mT / math.sqrt(x.shape[-1])).softmax(-1) @ v @ self.weight[3]


class Mixer(nn.Module):
    """Mixes tokens by weights that do not depend on them, or by none that add up to one."""

    def __init__(self, it: Draw, width: int) -> None:
        super().__init__()
        self.how = it.one("mixer", "causal", "circular", "same", "linear attention", "mean", "gru")
        self.into = nn.Linear(width, 3 * width if self.how == "linear attention" else width)
        self.out = nn.Linear(width, width)
        groups = it.one("convolution by channel", width, 1)
        self.gated = self.how in {"causal", "same"} and it.one("gated mixer", False, True)
        if self.gated:
            self.gate = nn.Linear(width, width)
        if self.how in {"causal", "circular", "same"}:
            padding = {"causal": 2, "circular": 1, "same": 1}[self.how]
            mode: Any = "circular" if self.how == "circular" else "zeros"
            self.conv = nn.Conv1d(
                width, width, 3, padding=padding, groups=groups, padding_mode=mode
            )
        if self.how == "gru":
            self.gru = nn.GRU(width, width, batch_first=True)

    def forward(self, x: Tensor, seen: Tensor | None = None) -> Tensor:
        y = self.into(x)
        if self.how in {"causal", "circular", "same"}:
            y = self.conv(y.mT)[..., : x.shape[1]].mT
        elif self.how == "linear attention":
            q, k, v = y.chunk(3, -1)
            y = (q @ k.mT).tril() @ v
        elif self.how == "mean":
            y = y.mean(1, keepdim=True).expand_as(x)
        else:
            y = self.gru(y)[0]
        if self.gated:
            y = y * functional.silu(self.gate(x))
        result: Tensor = self.out(y)
        return result


ACTIVATIONS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "gelu": functional.gelu,
    "relu": functional.relu,
    "silu": functional.silu,
    "square": lambda x: x.relu().square(),
    "tanh": torch.tanh,
}


class MLP(nn.Module):
    """Position-wise sublayer."""

    def __init__(self, it: Draw, width: int, name: Callable[[str], str], *, named: bool) -> None:
        super().__init__()
        self.name, self.named = name, named
        self.how = it.one("mlp", "plain", "gated", "fused gate", "deep", "single", "normed")
        inner = it.one("neurons", 2 * width, 3 * width, width)
        bias = it.one("mlp bias", True, False)
        self.act = ACTIVATIONS[it.one("activation", *ACTIVATIONS)]
        if self.how != "single":
            self.up = nn.Linear(width, inner * (2 if self.how == "fused gate" else 1), bias=bias)
        if self.how == "gated":
            self.gate = nn.Linear(width, inner, bias=bias)
        if self.how == "deep":
            self.middle = nn.Linear(inner, inner)
        if self.how == "normed":
            self.norm = nn.LayerNorm(inner)
        self.dropout = nn.Dropout(0.1) if it.rarely("dropout in the mlp", 0.3) else nn.Identity()
        self.down = nn.Linear(width if self.how == "single" else inner, width, bias=bias)
        self.factor = it.one("factor in the module", 1.0, 0.6, usual=0.9)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "single":
            y = x
        elif self.how == "fused gate":
            left, right = self.up(x).chunk(2, -1)
            y = self.act(left) * right
        else:
            y = self.act(self.up(x))
        if self.how == "gated":
            y = y * self.gate(x)
        if self.how == "deep":
            y = self.act(self.middle(y))
        if self.how == "normed":
            y = self.norm(y)
        y = self.dropout(y)
        y = at(y, self.name("mlp_act")) if self.named else y
        y = self.down(y)
        result: Tensor = y * self.factor if self.factor != 1 else y
        return result


class LeafMLP(nn.Module):
    """MLP in one module, with its parameters in its own code."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(width, 2 * width) / math.sqrt(width))
        self.down = nn.Parameter(torch.randn(2 * width, width) / math.sqrt(width))

    def forward(self, x: Tensor) -> Tensor:
        return functional.gelu(x @ self.up) @ self.down


class Router(nn.Module):
    """Logits of experts, with their numbers and weights."""

    def __init__(self, it: Draw, width: int, experts: int, name: Callable[[str], str]) -> None:
        super().__init__()
        self.name = name
        self.gate = nn.Linear(width, experts, bias=it.one("router bias", False, True))
        self.form = it.one("router", "softmax, top", "top, softmax", "sigmoid, top")
        self.top = it.one("experts of a token", 2, 1, 3)
        self.shares = self.form != "top, softmax" and it.one("weights are shares", True, False)
        self.factor = it.one("factor of experts", 1.0, 2.5, usual=0.7)
        corrected = self.form == "sigmoid, top" and it.one("corrected choice", False, True)
        self.correction: Tensor | None
        self.register_buffer("correction", torch.randn(experts) / 4 if corrected else None)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = at(self.gate(x), self.name("router"))
        scores = {
            "softmax, top": lambda: logits.softmax(-1),
            "top, softmax": lambda: logits,
            "sigmoid, top": logits.sigmoid,
        }[self.form]()
        chosen = scores if self.correction is None else scores + self.correction
        numbers = chosen.topk(self.top, -1).indices
        weights = scores.gather(-1, numbers)
        if self.form == "top, softmax":
            weights = weights.softmax(-1)
        if self.shares:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights * self.factor if self.factor != 1 else weights, numbers


class Experts(nn.Module):
    """Experts whose parameters are in one tensor."""

    def __init__(self, it: Draw, width: int, experts: int) -> None:
        super().__init__()
        inner = width // 2
        self.up = nn.Parameter(torch.randn(experts, width, inner) / math.sqrt(width))
        self.down = nn.Parameter(torch.randn(experts, inner, width) / math.sqrt(inner))
        self.inputs = it.rarely("weights multiply the inputs of experts")

    def forward(self, x: Tensor, numbers: Tensor, weights: Tensor) -> Tensor:
        if self.inputs:
            each = torch.einsum("pkd,pkde->pke", x[:, None] * weights[..., None], self.up[numbers])
            return torch.einsum("pke,pked->pd", functional.gelu(each), self.down[numbers])
        each = torch.einsum("pd,pkde->pke", x, self.up[numbers])
        each = torch.einsum("pke,pked->pkd", functional.gelu(each), self.down[numbers])
        return (each * weights[..., None]).sum(1)


class Mixture(nn.Module):
    """Mixture of experts."""

    def __init__(self, it: Draw, width: int, name: Callable[[str], str]) -> None:
        super().__init__()
        self.name, self.width = name, width
        count = it.one("experts", 4, 6)
        self.how = it.one("how experts run", "module", "module", "list", "all")
        self.route = put(it, self, it.name("router", "gate"), Router(it, width, count, name), 0.5)
        self.count = count
        self.experts: Any
        if self.how == "list":
            self.experts = nn.ModuleList(LeafMLP(width) for _ in range(count))
        else:
            self.experts = Experts(it, width, count)
        self.shared = it.rarely("shared expert", 0.3)
        if self.shared:
            self.shared_expert = MLP(it, width, name, named=False)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        _, weights, numbers = self.route(flat)
        numbers = at(numbers, self.name("experts"))
        weights = at(weights, self.name("expert_weights"))
        if self.how == "module":
            y = self.experts(flat, numbers, weights)
        elif self.how == "all":
            dense = torch.zeros(len(flat), self.count, dtype=x.dtype)
            dense = dense.scatter(1, numbers, weights)
            every = torch.arange(self.count).expand(len(flat), -1)
            y = self.experts(flat, every, dense)
        else:
            y = torch.zeros_like(flat)
            for number, expert in enumerate(self.experts):
                rows, places = (numbers == number).nonzero(as_tuple=True)
                if len(rows):
                    own = expert(flat[rows]) * weights[rows, places, None]
                    y = y.index_add(0, rows, own)
        if self.shared:
            y = y + self.shared_expert(flat)
        return y.view_as(x)


# --- Blocks -----------------------------------------------------------------------------------

PLACEMENTS: Final = ("before", "after", "sandwich", "contribution", "none")


class Step(nn.Module):
    """A sublayer with its norms and multipliers, added to the stream."""

    def __init__(  # noqa: PLR0913, PLR0917 (a block's drawn parts)
        self,
        it: Draw,
        width: int,
        kind: str,
        name: Callable[..., str],
        norms: str,
        how: str,
        sparse: bool,
    ) -> None:
        super().__init__()
        self.kind, self.title, self.name = kind, {"attention": "attn"}.get(kind, kind), name
        norm = it.one("norm", *NORMS)
        self.before = self.behind = self.after = None
        if norms in {"before", "sandwich"}:
            self.before = put(it, self, it.name("norm", "ln_1"), norm_of(norm, width))
        if norms in {"sandwich", "contribution"}:
            self.behind = put(it, self, it.name("post_norm", "ln_2"), norm_of(norm, width))
        if norms == "after":
            self.after = put(it, self, it.name("norm", "ln"), norm_of(norm, width))
        body = self._body(it, width, how, sparse=sparse and kind == "mlp")
        self.mixture = isinstance(body, Mixture)
        self.body = put(it, self, it.name(kind, "layer", "fn"), body)
        gain = it.one(f"{kind} gain", None, 1.0, 0.1, 0.0, usual=0.8)
        self.gain = None if gain is None else put(it, self, "ls", Gain(width, gain))
        self.dropout = nn.Dropout(0.2) if it.rarely("dropout", 0.3) else nn.Identity()
        self.stream = it.one("factor of the stream", 1.0, 0.5, 0.9, usual=0.85)
        self.times = it.one("factor of the contribution", 1.0, 0.3, -1.0, 1.7, usual=0.8)
        self.total = it.one("factor of the sum", 1.0, 0.7, usual=0.9)

    def _body(self, it: Draw, width: int, how: str, *, sparse: bool) -> nn.Module:
        if self.kind in {"attention", "cross"}:
            if self.kind == "attention" and it.rarely("attention in one module", 0.07):
                return LeafAttention(width, self.name)
            return Attention(it, width, self.name, how, cross=self.kind == "cross")
        if self.kind == "mixer":
            return Mixer(it, width)
        if sparse:
            return Mixture(it, width, self.name)
        if it.rarely("mlp in one module", 0.07):
            return LeafMLP(width)
        return MLP(it, width, self.name, named=True)

    def taken(self, x: Tensor) -> Tensor:
        """Returns the sublayer's input."""
        return x if self.before is None else self.before(x)

    def contribution(self, taken: Tensor, memory: Tensor | None, seen: Tensor | None) -> Tensor:
        """Returns the sublayer's contribution."""
        more = {} if self.kind == "mlp" else {"seen": seen}
        if self.kind == "cross":
            more = {"memory": memory}
        y = self.body(taken, **more)
        y = y[0] if isinstance(y, tuple) else y
        y = y if self.behind is None else self.behind(y)
        y = y if self.gain is None else self.gain(y)
        factor = self.times * self.total
        y = self.dropout(y)
        return at(y * factor if factor != 1 else y, self.name(f"{self.title}_out"))

    def forward(
        self, x: Tensor, memory: Tensor | None = None, seen: Tensor | None = None
    ) -> Tensor:
        taken = at(self.taken(x), self.name(f"{self.title}_in"))
        x = self.kept(x) + self.contribution(taken, memory, seen)
        return x if self.after is None else self.after(x)

    def kept(self, x: Tensor) -> Tensor:
        """Returns what stays of the stream."""
        factor = self.stream * self.total
        return x * factor if factor != 1 else x


NORMS: Final = ("layer norm", "rms", "one plus weight", "layer norm without weight")


class Block(nn.Module):
    """A block: its steps in order, or in parallel."""

    def __init__(  # noqa: PLR0913 (a stack's drawn parts)
        self, it: Draw, width: int, prefix: str, number: int, returns: str, *, cross: bool
    ) -> None:
        super().__init__()
        kinds = self._kinds(it, cross=cross)
        self.counts = {kind: kinds.count(kind) for kind in kinds}
        self.prefix, self.number = prefix, number
        norms = it.one("norms", *PLACEMENTS, usual=0.4)
        self.parallel = norms != "after" and it.rarely("parallel", 0.25)
        how = it.one("attention", "by hand", "sdpa", "interface")
        # A second mixture could not be told from the first.
        sparse = kinds.count("mlp") == 1 and it.rarely("mixture", 0.3)
        steps = [Step(it, width, kind, self.named, norms, how, sparse) for kind in kinds]
        self.counts["mixture"] = sum(each.mixture for each in steps)
        self.shares = (
            self.parallel and norms in {"before", "sandwich"} and it.one("one norm", True, False)
        )
        inline = 1.0 if self.parallel else it.one("steps in the block", 1.0, 0.0)
        self.steps = [
            put(it, self, it.name(each.kind, f"sub_{each.kind}"), each, inline) for each in steps
        ]
        self.returns = returns
        mixing = [n for n, kind in enumerate(kinds) if kind != "mlp"]
        pointwise = [n for n, kind in enumerate(kinds) if kind == "mlp"]
        between = mixing and pointwise and min(pointwise) > max(mixing) and not self.parallel
        self.middle = min(pointwise) if between else None

    def _kinds(self, it: Draw, *, cross: bool) -> list[str]:
        kinds = it.one(
            "sublayers",
            ["attention", "mlp"],
            ["mixer", "mlp"],
            ["mlp", "attention"],
            ["attention"],
            ["mlp"],
            ["attention", "mlp", "mlp"],
            ["mixer", "attention", "mlp"],
            ["attention", "attention", "mlp"],
            usual=0.6,
        )
        if cross:
            place = kinds.index("attention") + 1 if "attention" in kinds else 0
            kinds = [*kinds[:place], "cross", *kinds[place:]]
        return kinds

    def named(self, kind: str) -> str:
        """Returns the name of a quantity, or of none where a block has several."""
        title = kind.partition("_")[0]
        own = {"attn": "attention", "q": "attention", "k": "attention", "v": "attention"}
        own |= {"z": "attention", "pattern": "attention", "router": "mixture"}
        own |= {"experts": "mixture", "expert": "mixture"}
        several = self.counts.get(own.get(title, title), 1) > 1
        name = f"{self.prefix}{kind}.{self.number}"
        return f"several {name}" if several else name

    def forward(self, x: Tensor, memory: Tensor | None = None, seen: Tensor | None = None) -> Any:
        x = at(x, self.named("resid_pre"))
        if self.parallel:
            x = self._in_parallel(x, memory, seen)
        else:
            for number, step in enumerate(self.steps):
                if number == self.middle:
                    x = at(x, self.named("resid_mid"))
                x = step(x, memory, seen)
        x = at(x, self.named("resid_post"))
        return {"tensor": x, "tuple": (x, None), "dict": {"hidden": x}}[self.returns]

    def _in_parallel(self, x: Tensor, memory: Tensor | None, seen: Tensor | None) -> Tensor:
        steps = [each.module for each in self.steps]
        names = [self.named(f"{each.title}_in") for each in steps]
        if self.shares:
            taken = [at(steps[0].taken(x), *names)] * len(steps)
        else:
            taken = [at(each.taken(x), name) for each, name in zip(steps, names, strict=True)]
        total = steps[0].kept(x)
        for each, own in zip(steps, taken, strict=True):
            total = total + each.contribution(own, memory, seen)
        return total


class Stack(nn.Module):
    """Blocks one after another."""

    def __init__(
        self, it: Draw, width: int, prefix: str, *, cross: bool = False, first: int = 0
    ) -> None:
        super().__init__()
        alike = it.one("blocks alike", True, False)
        seed = it.random.random()
        self.list = it.name("layers", "blocks", "h")
        returns = it.one("block returns", "tensor", "tuple", "dict")
        blocks = nn.ModuleList()
        for number in range(it.one("blocks", 2, 3, 1, 4)):
            if alike:
                it.random.seed(seed)
            blocks.append(Block(it, width, prefix, first + number, returns, cross=cross))
        self.add_module(self.list, blocks)
        self.keyword = it.one("blocks take keywords", False, True)

    def forward(
        self, x: Tensor, memory: Tensor | None = None, seen: Tensor | None = None
    ) -> Tensor:
        for block in self.get_submodule(self.list).children():
            y = block(x=x, memory=memory, seen=seen) if self.keyword else block(x, memory, seen)
            x = y[0] if isinstance(y, tuple) else y["hidden"] if isinstance(y, dict) else y
        return x


class Ends(nn.Module):
    """Embedding of a stack."""

    def __init__(self, it: Draw, width: int, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix
        inner = width // 2 if it.rarely("narrow embedding") else width
        self.table = nn.Embedding(VOCABULARY, inner, padding_idx=PAD)
        self.project = nn.Linear(inner, width, bias=False) if inner != width else None
        self.times = it.one("factor of the embedding", 1.0, math.sqrt(width), 0.6, usual=0.6)
        learned = it.one("positions", "learned", "none", "sinusoidal")
        self.positions = nn.Embedding(64, width) if learned == "learned" else None
        self.waves = learned == "sinusoidal"
        kind = it.one("norm of the embedding", None, *NORMS, usual=0.8)
        self.norm = None if kind is None else norm_of(kind, width)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        x = at(x * self.times if self.times != 1 else x, f"{self.prefix}embed")
        x = x if self.project is None else self.project(x)
        places = torch.arange(ids.shape[1])
        if self.positions is not None:
            x = x + self.positions(places)
        if self.waves:
            x = x + (places[:, None] / torch.arange(1, x.shape[-1] + 1)).sin().to(x.dtype)
        return x if self.norm is None else self.norm(x)


class SmallModel(nn.Module):
    """A model of a drawn architecture, in eval mode, with an example.

    Args:
        seed: of the draw.
        plain: True for one without rare features.
    """

    def __init__(self, seed: int, *, plain: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        it = Draw(seed, plain=plain)
        self.seed, self.drawn = seed, it.made
        self.kind = it.one("kind", "one stack", "one stack", "two stacks", "encoder-decoder")
        self.takes_ids = self.kind == "encoder-decoder" or not it.rarely("takes vectors", 0.2)
        width = it.one("width", 16, 24, 32)
        main = {"encoder-decoder": "decoder", "two stacks": "late"}.get(self.kind, "body")
        other = {"encoder-decoder": "encoder", "two stacks": "early"}.get(self.kind)
        self.main, self.other = main, other
        first, joined = 0, False
        self.link: nn.Module | None = None
        if other is not None:
            joined = self.kind == "two stacks" and it.rarely("stacks in one", 0.3)
            prefix = "" if joined else f"{other}."
            self.add_module(other, Stack(it, width, prefix))
            if joined:
                (blocks,) = self.get_submodule(other).children()
                first = len([*blocks.children()])
            elif self.kind == "two stacks" or it.one("encoder's norm", True, False):
                self.link = norm_of(it.one("norm between stacks", *NORMS), width)
        self.add_module(
            main, Stack(it, width, "", cross=self.kind == "encoder-decoder", first=first)
        )
        if self.takes_ids:
            prefix = f"{other}." if other is not None and not joined else ""
            self.ends = nn.ModuleDict({"first": Ends(it, width, prefix)})
            if self.kind == "encoder-decoder":
                self.ends["second"] = Ends(it, width, "")
        kind = it.one("final norm", *NORMS, None, usual=0.2)
        self.norm = None if kind is None else norm_of(kind, width)
        self.head = (
            None
            if it.rarely("no head", 0.15)
            else nn.Linear(width, VOCABULARY, bias=it.rarely("bias of the head"))
        )
        self.tied = self._tie(it)
        self.transform = (
            nn.Linear(width, width) if self.head and it.rarely("head transform", 0.1) else None
        )
        self.cap = it.one("softcap", None, 5.0, usual=0.8)
        self.times = it.one("factor of the logits", 1.0, 0.4, usual=0.8)
        self.returns = it.one("model returns", "tensor", "tuple", "dict")
        self._initialise(it)
        self.example: dict[str, Tensor] = self._example(it, width)
        dtype = it.one("dtype", torch.float32, torch.float64, torch.bfloat16, usual=0.8)
        self.to(dtype)
        self.example = {
            key: each.to(dtype) if each.is_floating_point() else each
            for key, each in self.example.items()
        }
        self.eval().requires_grad_(requires_grad=it.one("gradients", True, False))

    def _tie(self, it: Draw) -> bool:
        if not self.takes_ids or self.head is None or not it.one("tied", False, True):
            return False
        table: Any = [*self.ends.children()][-1].get_submodule("table").weight
        if table.shape != self.head.weight.shape:
            return False
        self.head.weight = table
        return True

    def _initialise(self, it: Draw) -> None:
        """Makes parameters uneven, or leaves them as made; and zeroes some."""
        gain = it.one("gain", 1.0, 2.0)
        uneven = it.one("uneven", True, False)
        zero = it.one("zeroed", None, "out", "down", "up", usual=0.8)
        for name, parameter in self.named_parameters():
            with torch.no_grad():
                constant = bool((parameter == parameter.reshape(-1)[0]).all())
                if parameter.dim() > 1:
                    parameter.mul_(gain)
                elif uneven and (not constant or "gamma" not in name):
                    parameter.add_(torch.randn_like(parameter) / 4)
                if zero is not None and f".{zero}." in name:
                    parameter.zero_()

    def _example(self, it: Draw, width: int) -> dict[str, Tensor]:
        self.rows = it.one("rows", 2, 3, 1)
        tokens = it.one("tokens", 7, 5, 3, 2, 1, 8, usual=0.4)
        self.tokens = tokens
        if not self.takes_ids:
            return {"x": torch.randn(self.rows, tokens, width)}
        made = {"input_ids": torch.randint(2, VOCABULARY, (self.rows, tokens))}
        if tokens > 2 and it.rarely("left padding", 0.25):
            mask = torch.ones(self.rows, tokens, dtype=torch.long)
            mask[0, : it.one("padded", 1, tokens - 1 if self.rows == 1 else tokens - 2)] = 0
            made["input_ids"] = made["input_ids"].masked_fill(mask == 0, PAD)
            made["attention_mask"] = mask
        if self.kind == "encoder-decoder":
            count = it.one("decoder tokens", max(1, tokens - 2), tokens)
            self.tokens = min(tokens, count)
            made["decoder_input_ids"] = torch.randint(2, VOCABULARY, (self.rows, count))
        return made

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        x: Tensor | None = None,
    ) -> Any:
        seen = None if attention_mask is None else attention_mask != 0
        if x is None:
            x = self.ends["first"](input_ids)
        memory = None
        if self.other is not None:
            x = self.get_submodule(self.other)(x, None, seen)
            x = x if self.link is None else self.link(x)
        if self.kind == "encoder-decoder":
            memory, seen = x, None
            x = self.ends["second"](decoder_input_ids)
        x = self.get_submodule(self.main)(x, memory, seen)
        if self.norm is not None:
            x = at(self.norm(x), "final_norm")
        if self.head is not None:
            x = self.head(x if self.transform is None else self.transform(x))
            x = x * self.times if self.times != 1 else x
            x = x if self.cap is None else self.cap * torch.tanh(x / self.cap)
            x = at(x, "logits")
        return {"tensor": x, "tuple": (x,), "dict": {"logits": x}}[self.returns]

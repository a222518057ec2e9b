"""Names of quantities, and their names in TransformerLens."""

from __future__ import annotations

import re
from typing import Final

SIGN: Final = "@"
"""First character of the name of a quantity where a selector is taken."""
KINDS: Final = (
    "embed",
    "resid_pre",
    "attn_in",
    "mixer_in",
    "q",
    "k",
    "v",
    "pattern",
    "z",
    "attn_out",
    "mixer_out",
    "cross_in",
    "cross_out",
    "resid_mid",
    "mlp_in",
    "router",
    "experts",
    "expert_weights",
    "mlp_act",
    "mlp_out",
    "resid_post",
    "final_norm",
    "logits",
)
"""Kinds of quantities, in the order of tables. A block's number follows the kind after a dot."""
ENDS: Final = ("embed", "final_norm", "logits")
"""Kinds without the number of a block."""

_LENS: Final = {
    "hook_resid_pre": "resid_pre",
    "hook_resid_mid": "resid_mid",
    "hook_resid_post": "resid_post",
    "hook_attn_out": "attn_out",
    "hook_mlp_out": "mlp_out",
    "attn.hook_rot_q": "q",
    "attn.hook_rot_k": "k",
    "attn.hook_v": "v",
    "attn.hook_z": "z",
    "attn.hook_pattern": "pattern",
    "mlp.hook_post": "mlp_act",
}
"""Hook points of TransformerLens' blocks that are a quantity in every model.

Not among them: `hook_q` and `hook_k`, which are before rope, and `hook_normalized`, which is before
or after the norm's weight, by the kind of the norm.
"""
_LENS_BLOCK: Final = re.compile(r"blocks\.(\d+|\*|\[[^\]]*\])\.(.+)")


_DIFFERENCES: Final = {
    "hook_q": "after RoPE, while hook_q is before it",
    "hook_k": "after RoPE, while hook_k is before it",
    "hook_attn_in": "after the norm, while hook_attn_in is before it, for each head",
    "hook_mlp_in": "after the norm, while hook_mlp_in is before it",
}
"""Hook points whose names resemble a quantity's, and how the quantity differs."""
_POINTS: Final = {
    "hook_embed": "embed",
    **{name.rpartition(".")[2]: kind for name, kind in _LENS.items()},
    **{name: name.removeprefix("hook_") for name in _DIFFERENCES},
}
"""Kinds that names of hook points lead to, whatever module they are in."""


def from_lens(name: str) -> str | None:
    """Returns the quantity that a hook point of TransformerLens is; None for any other name.

    Examples:
        >>> from_lens("blocks.12.hook_resid_post")
        '@resid_post.12'
    """
    if name == "hook_embed":
        return f"{SIGN}embed"
    found = _LENS_BLOCK.fullmatch(name)
    if found is None or found[2] not in _LENS:
        return None
    return f"{SIGN}{_LENS[found[2]]}.{found[1]}"


HEADED: Final = ("q", "k", "v", "z", "pattern")
"""Kinds that have heads, named by a number after the block's: `@z.3.5`."""


def split_head(name: str) -> tuple[str, str | None]:
    """Returns the name of a quantity of all heads, and the head or glob of heads after it."""
    segments = name.split(".")
    if len(segments) > 2 and segments[-3].removeprefix(SIGN) in HEADED:  # noqa: PLR2004 (kind, block, head)
        return ".".join(segments[:-1]), segments[-1]
    return name, None


def suggested(name: str) -> str | None:
    """Returns a sentence on the quantity that the name of no module may mean; None for no quantity.

    Examples:
        >>> suggested("resid_post.3")
        "the quantity of this name is '@resid_post.3'"
        >>> suggested("hook_q")
        "'@q.*' is after RoPE, while hook_q is before it"
    """
    segments = name.removeprefix(SIGN).split(".")
    points = [each for each in segments if each.startswith("hook_")]
    # `layers.3.mlp.experts` is the path of a module.
    kind = _POINTS.get(points[0]) if points else segments[0]
    if kind not in KINDS:
        return None
    number = next((each for each in segments if each.isdigit()), "*")
    quantity = f"{SIGN}{kind}" if kind in ENDS else f"{SIGN}{kind}.{number}"
    if points and points[0] in _DIFFERENCES:
        return f"{quantity!r} is {_DIFFERENCES[points[0]]}"
    return f"the quantity of this name is {quantity!r}"


def as_lens(quantity: str, asked: str) -> str:
    """Returns the name of a quantity in the form in which it was asked for.

    Examples:
        >>> as_lens("@resid_post.12", "blocks.*.hook_resid_post")
        'blocks.12.hook_resid_post'
    """
    found = _LENS_BLOCK.fullmatch(asked)
    return asked if found is None else f"blocks.{quantity.rpartition('.')[2]}.{found[2]}"


def kind_of(name: str) -> str:
    """Returns the kind of a quantity: its name without stack, block and head."""
    for segment in name.split("."):
        if segment in KINDS:
            return segment
    return name


def order_of(name: str) -> tuple[object, ...]:
    """Returns the sort key of a name: stack, block and kind."""
    segments = name.split(".")
    kind = kind_of(name)
    place = segments.index(kind) if kind in segments else 0
    stack = ".".join(segments[:place])
    numbers = [int(each) for each in segments[place + 1 :] if each.isdigit()]
    rank = KINDS.index(kind) if kind in KINDS else len(KINDS)
    block = numbers[0] if numbers else (-1 if kind == "embed" else 2**62)
    return (not stack, stack, block, rank, *numbers[1:])

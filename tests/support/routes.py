"""Routes of requests in engines, against hooks by hand on the routers of transformers."""

from __future__ import annotations

import base64
import functools
import json
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

import ferrohook as fh
from support.quantity_plans import NEW, PROMPTS, check

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from ferrohook.plans.entries import HookEntry
    from support.quantity_plans import Serve

    Chosen = Callable[[int, int], tuple[list[int], list[float] | None] | None]

EXPERTS, CHOSEN, LAYERS = 4, 2, 4
KEPT = ("@experts.*", "@expert_weights.*", "@resid_post.3")
"""Values that requests with routes keep."""
_LONG = [(7 * place + 3) % 60 for place in range(80)]
"""Prompt that an engine computes in several chunks."""


class Routed(NamedTuple):
    """A request with a route."""

    prompt: list[int]
    entry: HookEntry | None
    chosen: Chosen
    """Ids and weights by block and position; None for a token that is left to the router."""


def drawn(tokens: int, seed: int) -> Tensor:
    """Returns ids of experts at random, (tokens, layers, chosen)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, LAYERS, EXPERTS, generator=generator).argsort(-1)[..., :CHOSEN]


def _route(*ids: int) -> fh.Route:
    return fh.Route(torch.tensor(ids))


def _replayed(array: Tensor, start: int = 0) -> Chosen:
    def chosen(block: int, position: int) -> tuple[list[int], None] | None:
        row = position - start
        if not 0 <= row < len(array) or int(array[row, block, 0]) < 0:
            return None
        return array[row, block].tolist(), None

    return chosen


def requests() -> list[Routed]:
    """Returns requests with routes of all kinds, and one without; two have the same prompt."""
    first, second, third = PROMPTS
    every, short = drawn(len(first) + NEW - 1, 1), drawn(len(first) - 2, 2)
    every[2] = -1
    late, long = drawn(5, 3), drawn(len(_LONG) + NEW - 2, 4)
    rows = [[3, 0], [1, 2]]

    def of_generated(block: int, position: int) -> Any:
        row = position - len(third)
        return (rows[row], None) if block == 1 and 0 <= row < len(rows) else None

    def given(_block: int, position: int) -> Any:
        return ([2, 0], [0.9, 0.3]) if 1 <= position < 4 else None

    weighted = fh.on(
        "@experts.*", fh.Route(torch.tensor([2, 0]), torch.tensor([0.9, 0.3])), at=slice(1, 4)
    )
    generated = fh.on("@experts.1", fh.Route(torch.tensor(rows)), at="generated")
    return [
        Routed(first, fh.replay(every), _replayed(every)),
        Routed(first, fh.replay(short), _replayed(short)),
        Routed(first, None, lambda _block, _position: None),
        Routed(second, fh.replay(late, start=2), _replayed(late, 2)),
        Routed(third, generated, of_generated),
        Routed(third, weighted, given),
        Routed(_LONG, fh.replay(long), _replayed(long)),
    ]


def _weights(config: Any, logits: Tensor, ids: Tensor) -> Tensor:
    """Returns the weights of a token's experts, as its model computes them."""
    scale = getattr(config, "routed_scaling_factor", None)
    scores = logits.softmax(-1)[ids] if scale is None else logits.sigmoid()[ids]
    shares = scores / scores.sum() if getattr(config, "norm_topk_prob", True) else scores
    return shares * (scale or 1.0)


@torch.no_grad()
def by_hand(
    model: Any, prompt: Sequence[int], chosen: Chosen, guess: Sequence[int] = ()
) -> tuple[list[int], dict[str, Tensor]]:
    """Returns text and captures of a request, the whole sequence anew for each token.

    `guess`: a text of which no token is computed anew, as far as it is right.
    """
    acts: dict[str, Tensor] = {}

    def force(block: int, _module: Any, _args: Any, output: Any) -> Any:
        logits, weights, ids = (it.clone() for it in output)
        for position in range(len(ids)):
            if (found := chosen(block, position)) is None:
                continue
            own, given = torch.tensor(found[0]), found[1]
            ids[position] = own
            made = _weights(model.config, logits[position], own)
            weights[position] = made if given is None else torch.tensor(given)
        acts[f"@experts.{block}"], acts[f"@expert_weights.{block}"] = ids, weights
        return logits, weights, ids

    def see(_module: Any, _args: Any, output: Tensor) -> None:
        acts["@resid_post.3"] = output[0]

    layers = model.model.layers
    hooks = [
        each.mlp.gate.register_forward_hook(functools.partial(force, block))
        for block, each in enumerate(layers)
    ]
    hooks.append(layers[3].register_forward_hook(see))
    tokens = [*prompt]
    try:
        while len(tokens) < len(prompt) + (len(guess) or NEW):
            ahead = [*tokens, *guess[len(tokens) - len(prompt) : -1]]
            logits = model(torch.tensor([ahead]), use_cache=False).logits
            for place in range(len(tokens) - 1, len(ahead)):
                tokens.append(int(logits[0, place].argmax()))
                if tokens != ahead[: len(tokens)]:
                    break
    finally:
        for hook in hooks:
            hook.remove()
    return tokens[len(prompt) :], acts


def check_routes(model: Any, serve: Serve) -> None:
    """Serves requests with routes at once; each is as hooks by hand have it.

    Args:
        model: of transformers, whose blocks all have `EXPERTS` experts.
        serve: see `wrong_plans`.
    """
    asked = requests()
    plans = [fh.Plan(*filter(None, [it.entry]), fh.keep([*KEPT])) for it in asked]
    found = serve([(it.prompt, plan.to_json()) for it, plan in zip(asked, plans, strict=True)])
    for number, (it, answer) in enumerate(zip(asked, found, strict=True)):
        check(f"request {number}", answer, by_hand(model, it.prompt, it.chosen))
    _, acts = found[-1]
    array = drawn(len(_LONG) + NEW - 2, 4)  # in the order of the array, and as small as captures
    for block in range(LAYERS):
        ids = acts[f"@experts.{block}"]
        assert ids.dtype == torch.uint8
        assert torch.equal(ids.reshape(-1, CHOSEN)[: len(array)].long(), array[:, block])


def _hostile(**fields: Any) -> str:
    """Returns a plan of a client that has other fields in its route than `Route` makes."""
    plan = json.loads(fh.Plan(fh.on("@experts.1", _route(0, 1))).to_json())
    plan["entries"][0]["hook"] |= fields
    return json.dumps(plan)


def _int16(*shape: int, data: bytes) -> dict[str, Any]:
    return {"dtype": "int16", "shape": [*shape], "base64": base64.b64encode(data).decode()}


_BAD: tuple[tuple[HookEntry, str], ...] = (
    (fh.on("@experts.1", _route(0, 1, 2)), "has 3 ids for each token, but @experts.1 has 2"),
    (fh.on("@experts.1", _route(0, 4)), "has the id 4, but @experts.1 has experts 0 to 3"),
    (fh.replay(drawn(5, 0)[:, :2]), "the array of replay has 2 layers, and none for block 2"),
    (fh.replay(torch.zeros(5, LAYERS, 2, dtype=torch.int64)), "has an expert twice"),
    (fh.replay(drawn(5, 0).expand(3, -1, -1, -1)), "ids for 3 sequences, but a request"),
    (fh.on("@router.1", _route(0, 1)), "register it at '@experts.N'"),
    (fh.on("model.layers.1", _route(0, 1)), "register it at '@experts.N'"),
    (fh.on("@experts.9", _route(0, 1)), r"has no @experts.9: its blocks are 0 to \d"),
)
BAD_ROUTES = (
    *((fh.Plan(entry).to_json(), reason) for entry, reason in _BAD),
    (_hostile(ids=_int16(2, data=bytes(4))), "has an expert twice"),
    (_hostile(ids=_int16(2, data=b"\0\0\xf0\xff")), "must be from -1 to 32767, got -16"),
    (_hostile(ids=_int16(0, 2, data=b"")), "at least one id"),
    (_hostile(start=1), "start"),
)
"""Plans as JSON that engines refuse, with the reasons."""

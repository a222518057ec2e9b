"""Plans of quantities for small language models, the same JSON for every engine."""

from __future__ import annotations

import copy
import functools
from typing import TYPE_CHECKING, Any

import torch

import ferrohook as fh
from support.dictionaries import dictionary_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    Serve = Callable[[list[tuple[list[int], str]]], list[tuple[list[int], Mapping[str, Tensor]]]]

WIDTH, HEAD = 64, 32
NEW = 4
PROMPTS = ([5, 9, 22, 31, 4, 17, 8], [40, 3, 12], [7, 7, 19, 60, 2, 33, 28, 15, 9])


def _direction(size: int, seed: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


@functools.cache
def dictionaries() -> dict[str, fh.Dictionary]:
    """Returns the transcoders of the plans, by name."""
    places = {"in a layer": ("@resid_mid.1", "@mlp_out.1"), "of heads": ("@z.1", "@mlp_out.1")}
    places["between layers"] = ("@resid_post.0", "@attn_out.2")
    return {
        name: dictionary_of(
            "relu", width=WIDTH, transcoder=True, reads=reads, writes=writes, name=name
        )
        for name, (reads, writes) in places.items()
    }


def read_plan(text: str) -> fh.Plan:
    """Reads one of the plans from JSON."""
    return fh.Plan.from_json(text, dictionaries=dictionaries())


def _features(name: str, *kept: str, **options: Any) -> fh.Plan:
    """A plan that changes features of one of the transcoders."""
    own = dictionaries()[name]
    hook = fh.Feature(own, [3, 7], set=4.0)
    return fh.Plan(fh.on(own.writes, hook, **options), fh.keep([*kept]))


def plans() -> dict[str, fh.Plan]:
    """Returns plans that change and read by quantity, by their purpose."""
    wide, narrow = _direction(WIDTH, 1), _direction(HEAD, 2)
    add, end = fh.Add(wide, scale=0.5), "@resid_post.3"
    return {
        "read the stream": fh.Plan(fh.keep(["@embed", "@resid_post.*", "@final_norm"])),
        "read contributions": fh.Plan(fh.keep(["@attn_out.*", "@mlp_out.*", "@resid_mid.1"])),
        "read inside attention": fh.Plan(fh.keep(["@q.1", "@k.1", "@v.1", "@z.*"])),
        "steer": fh.Plan(fh.on("@resid_post.1", add), fh.keep(end)),
        "steer the prompt": fh.Plan(fh.on("@resid_pre.2", add, at="prompt"), fh.keep(end)),
        "steer what is generated": fh.Plan(
            fh.on("@resid_post.0", add, at="generated"), fh.keep(end, at="generated")
        ),
        "ablate a direction": fh.Plan(fh.on("@resid_post.*", fh.Ablate(wide)), fh.keep(end)),
        "scale attention": fh.Plan(fh.on("@attn_out.1", fh.Scale(0.25)), fh.keep("@resid_mid.1")),
        "no mlp": fh.Plan(fh.on("@mlp_out.2", fh.Zero()), fh.keep(["@mlp_out.2", end])),
        "turn heads": fh.Plan(fh.on("@z.1", fh.Add(narrow)), fh.keep(["@z.1", "@attn_out.1"])),
        "other queries": fh.Plan(fh.on("@q.2", fh.Scale(0.5)), fh.keep(["@q.2", "@z.2"])),
        "other values": fh.Plan(
            fh.on("@v.0", fh.Replace(narrow), at=1), fh.keep(["@v.0", "@z.0"], at=slice(0, 3))
        ),
        "no head": fh.Plan(fh.on("@z.1.0", fh.Zero()), fh.keep(["@z.1.*", "@attn_out.1"])),
        "turn a head": fh.Plan(
            fh.on("@z.2.1", fh.Ablate(narrow), at="generated"), fh.keep(["@z.2.1", end])
        ),
        "other keys of a head": fh.Plan(
            fh.on("@k.2.0", fh.Add(narrow)),
            fh.on("@q.1.1", fh.Scale(0.5)),
            fh.keep(["@k.2.0", "@q.*.1", "@z.2"], at="generated"),
        ),
        "features in a layer": _features("in a layer", "@mlp_out.1", end),
        "features by heads": _features("of heads", "@mlp_out.1", "@z.1", strength=0.5),
        "features later": _features("between layers", "@attn_out.2", end, at=slice(2, None)),
    }


MIXED = ["@router.*", "@experts.*", "@expert_weights.*"]


def plans_of_mixtures() -> dict[str, fh.Plan]:
    """Returns plans that read routers and experts, and change the weights of these."""
    kept = fh.keep(["@experts.1", "@expert_weights.1", "@mlp_out.1"])
    return {
        "read the experts": fh.Plan(fh.keep(MIXED)),
        "read the experts of the prompt": fh.Plan(fh.keep(MIXED, at="prompt")),
        "other weights": fh.Plan(fh.on("@expert_weights.1", fh.Scale(0.5)), kept),
        "other weights of generated tokens": fh.Plan(
            fh.on("@expert_weights.1", fh.Scale(-2.0), at="generated"), kept
        ),
        "other experts": fh.Plan(
            fh.on("@resid_post.0", fh.Add(_direction(WIDTH, 3), scale=2.0)), fh.keep(MIXED)
        ),
    }


@functools.cache
def texts(*, mixture: bool = False) -> dict[str, str]:
    """Returns the plans as JSON, for a model with experts or without."""
    every = plans() | (plans_of_mixtures() if mixture else {})
    return {name: plan.to_json() for name, plan in every.items()}


@torch.no_grad()
def alone(
    model: Any, plan: fh.Plan, prompt: Sequence[int], new_tokens: int
) -> tuple[list[int], dict[str, Tensor]]:
    """Returns the text and captures of a request, the whole sequence anew for each token."""
    tokens = [*prompt]
    with plan.prepare(model) as prepared, prepared.open(prompt=len(prompt)) as request:
        for _ in range(new_tokens):
            logits = model(torch.tensor([tokens]), use_cache=False).logits
            tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :], dict(request.acts)


def by_expert(acts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns captures with the weight of each expert: engines have a token's in any order."""
    found = dict(acts)
    for name, numbers in acts.items():
        if "@experts." in name:
            weights = found.pop(name.replace("experts", "expert_weights"))
            empty = torch.zeros(*weights.shape[:-1], 8)
            found[name] = empty.scatter(-1, numbers.long(), weights)
    return found


def check(
    name: str, found: tuple[list[int], Mapping[str, Tensor]], expected: tuple[list[int], Any]
) -> None:
    """Compares a text and captures with the answer to the request alone."""
    tokens, acts = found[0], by_expert(found[1])
    assert tokens == expected[0], name
    assert found[1].keys() == expected[1].keys(), name
    for key, whole in by_expert(expected[1]).items():
        # Rows of one request: at positions, transformers alone has them in one dimension too.
        tensor = whole if whole.dim() == acts[key].dim() else whole[0]
        assert acts[key].shape == tensor.shape, (name, key, acts[key].shape, tensor.shape)
        size = tensor.abs().max().clamp(min=1e-6)
        error = float((acts[key] - tensor).abs().max() / size)
        assert error < 1e-4, (name, key, error)


def wrong_plans(
    model: Any,
    serve: Serve,
) -> dict[str, str]:
    """Serves the plans at once; returns how each differs from its answer alone.

    Args:
        model: of transformers.
        serve: takes prompts with plans as JSON; returns texts of `NEW` tokens, with captures.
    """
    named = texts(mixture="@experts.1" in fh.quantities(model))
    asked = [(PROMPTS[n % len(PROMPTS)], text) for n, text in enumerate(named.values())]
    wrong = {}
    for name, (prompt, text), found in zip(named, asked, serve(asked), strict=True):
        try:
            check(name, found, alone(model, read_plan(text), prompt, NEW))
        except AssertionError as error:
            wrong[name] = str(error)
    return wrong


def check_router(model: Any, serve: Serve) -> None:
    """Writes to a router, as a model of transformers whose router has other weights computes.

    Args:
        model: of transformers, with experts.
        serve: see `wrong_plans`.
    """
    turned = copy.deepcopy(model)
    turned.model.layers[1].mlp.gate.weight.neg_()
    read = fh.keep([*MIXED, "@resid_post.3"])
    (found,) = serve([(PROMPTS[0], fh.Plan(fh.on("@router.1", fh.Scale(-1.0)), read).to_json())])
    expected = alone(turned, fh.Plan(read), PROMPTS[0], NEW)
    check("turn the router", found, expected)
    plain = alone(model, fh.Plan(read), PROMPTS[0], NEW)
    assert not torch.equal(expected[1]["@experts.1"], plain[1]["@experts.1"])


ABSENT = {"logits", "pattern"}
"""Kinds of quantities that engines do not have."""


def differing(model: Any, table: Mapping[str, fh.typing.Quantity]) -> set[str]:
    """Returns the kinds of the quantities that only one has, transformers or an engine."""
    example = torch.tensor([*PROMPTS[:1], *PROMPTS[:1]])
    own = fh.quantities(model, input_ids=example)
    return {name.removeprefix("@").partition(".")[0] for name in own.keys() ^ table.keys()}

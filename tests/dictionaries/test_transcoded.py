"""Changed features of transcoders, against their formula written out and hooks by hand."""

from __future__ import annotations

import functools
import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ferrohook as fh
from ferrohook.errors import HookError, HookTypeError
from support.amounts import amount
from support.dictionaries import (
    D_IN,
    D_SAE,
    KINDS,
    dictionary_of,
    normalized_by_hand,
    values_by_hand,
    weights_of,
)
from support.language_models import language_model
from support.modules import Echo, Tokens

pytest.importorskip("transformers")

WIDTH, LENGTH = 8, 5
IDS = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]])
READS, WRITES = "@mlp_in.0", "@mlp_out.0"
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # names of older versions


def transcoder(
    kind: str = "relu", width: int = WIDTH, d_out: int | None = None, **more: Any
) -> fh.Dictionary:
    places = {"reads": READS, "writes": WRITES}
    return dictionary_of(kind, width=width, d_out=d_out, transcoder=True, **places | more)


@functools.cache
def model() -> Any:
    return language_model("llama", WIDTH).requires_grad_(requires_grad=False)


@functools.cache
def plain() -> dict[str, Tensor]:
    return {**fh.run(model(), IDS, capture=[READS, WRITES]).acts}


def kept(*entries: Any, what: str = WRITES) -> Tensor:
    return fh.run(model(), IDS, plan=fh.Plan(*entries, fh.keep(what))).acts[what]


def change(own: fh.Dictionary, index: int, new: float, x: Tensor) -> Tensor:
    """Vectors that setting a feature adds where it writes."""
    value = own.encode(x)[..., index, None]
    return (new - value) * own.weights.tensors["W_dec"][index]


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("normalization", ["none", "layer_norm", "constant_norm_rescale"])
@pytest.mark.parametrize("kind", [*KINDS])
def test_the_formula(kind: str, normalization: str, skip: bool) -> None:
    more = {"W_skip": torch.randn(WIDTH, WIDTH)} if skip else {}
    own = transcoder(kind, normalize_activations=normalization, **more)
    weights = weights_of(kind, WIDTH, width=WIDTH)
    hook = fh.Feature(own, [3, 9], set=[5.0, None], scale=[None, 2.0])
    found = kept(fh.on(WRITES, hook))
    for row, token in ((0, 0), (1, 3)):
        h, _, _ = normalized_by_hand(normalization, plain()[READS][row, token])
        values = values_by_hand(kind, weights, h)
        rows = weights["W_dec"][[3, 9]]
        if "rescaled" in kind:
            rows = rows / rows.square().sum(-1, keepdim=True).sqrt()
        expected = plain()[WRITES][row, token] + (5 - values[3]) * rows[0] + values[9] * rows[1]
        torch.testing.assert_close(found[row, token], expected, rtol=1e-4, atol=1e-5)


def test_at_positions_and_with_a_strength() -> None:
    own = transcoder()
    hook = fh.Feature(own, 3, set=4.0)
    expected = plain()[WRITES].clone()
    expected[:, 2:4] += change(own, 3, 4.0, plain()[READS])[:, 2:4] / 2
    found = kept(fh.on(WRITES, hook, at=slice(2, 4), strength=0.5))
    torch.testing.assert_close(found, expected)
    assert torch.equal(found[:, :2], plain()[WRITES][:, :2])


def test_under_a_condition_and_with_a_ramp() -> None:
    own, direction = transcoder(), torch.linspace(-1, 1, WIDTH)
    gate = fh.gate("g", "@resid_pre.0", fh.Dot(direction))
    read = fh.run(model(), IDS, capture="@resid_pre.0").acts["@resid_pre.0"] @ direction
    middle = float(read.flatten().sort().values[4:6].mean())  # far from any value
    hook = fh.Feature(own, 3, set=4.0)
    changed = change(own, 3, 4.0, plain()[READS])
    found = kept(gate, fh.on(WRITES, hook, when=fh.above("g", middle)))
    acts = read > middle
    assert 0 < acts.sum() < acts.numel()
    torch.testing.assert_close(found[acts], (plain()[WRITES] + changed)[acts])
    assert torch.equal(found[~acts], plain()[WRITES][~acts])
    low, high = float(read.min()), float(read.max())
    found = kept(gate, fh.on(WRITES, hook, strength=fh.ramp("g", low, high)))
    share = ((read - low) / (high - low))[..., None]
    torch.testing.assert_close(found, plain()[WRITES] + share * changed)


def test_it_reads_what_the_entries_before_it_left() -> None:
    own, vector = transcoder(), torch.ones(WIDTH)
    hook, add = fh.Feature(own, 3, set=4.0), fh.Add(vector)
    moved = plain()[READS] + vector
    by_hand = {}
    for name, entries in (("before", (add, hook)), ("after", (hook, add))):
        what = {add: READS, hook: WRITES}
        by_hand[name] = kept(*(fh.on(what[it], it) for it in entries))
    with fh.register(model(), READS, add):
        shifted = fh.run(model(), IDS, capture=WRITES).acts[WRITES]
    torch.testing.assert_close(by_hand["before"], shifted + change(own, 3, 4.0, moved))
    torch.testing.assert_close(by_hand["after"], shifted + change(own, 3, 4.0, plain()[READS]))


def test_it_may_read_where_it_writes() -> None:
    own = transcoder(reads=WRITES)
    found = kept(fh.on(WRITES, fh.Feature(own, 3, set=4.0)))
    torch.testing.assert_close(found, plain()[WRITES] + change(own, 3, 4.0, plain()[WRITES]))


def test_while_generating() -> None:
    own = transcoder("jumprelu")
    arguments = {"max_new_tokens": 4, "do_sample": False}
    plan = fh.Plan(fh.on(WRITES, fh.Feature(own, 3, set=40.0), at="generated"))
    with plan.open(model()):
        found = model().generate(IDS[:1], **arguments)

    def steer(_module: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
        changed = output.clone()
        changed[:, LENGTH:] += change(own, 3, 40.0, args[0])[:, LENGTH:]
        return changed

    tokens = IDS[:1]
    with fh.register(model(), "model.layers.0.mlp", steer):
        for _ in range(4):
            logits = model()(tokens, use_cache=False).logits[:, -1]
            tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], dim=1)
    assert found.tolist() == tokens.tolist()
    assert found.tolist() != model().generate(IDS[:1], **arguments).tolist()


def test_it_reads_heads_side_by_side() -> None:
    read = fh.run(model(), IDS, capture="@z.0").acts["@z.0"].flatten(-2)
    own = transcoder(reads="@z.0")
    found = kept(fh.on(WRITES, fh.Feature(own, 3, set=4.0)))
    torch.testing.assert_close(found, plain()[WRITES] + change(own, 3, 4.0, read))


def test_half_precision_is_computed_in_float32() -> None:
    own = transcoder()
    half = language_model("llama", WIDTH).to(torch.bfloat16)
    acts = fh.run(half, IDS, capture=[READS, WRITES]).acts
    plan = fh.Plan(fh.on(WRITES, fh.Feature(own, 3, set=4.0)), fh.keep(WRITES))
    expected = acts[WRITES].float() + change(own, 3, 4.0, acts[READS].float())
    assert torch.equal(fh.run(half, IDS, plan=plan).acts[WRITES], expected.to(torch.bfloat16))


def test_gradients_pass_through_what_it_reads() -> None:
    own = transcoder().weights.tensors
    hook = fh.Feature(transcoder(), 3, scale=3.0)
    embeddings = model().model.embed_tokens(IDS).requires_grad_()
    plan = fh.Plan(fh.on(WRITES, hook)).prepare(model())
    with plan.open(prompt=LENGTH):
        model()(inputs_embeds=embeddings).logits.sum().backward()
    (found,) = [embeddings.grad]

    def steer(_module: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
        value = (args[0] @ own["W_enc"][:, 3] + own["b_enc"][3]).relu()
        return output + 2 * value[..., None] * own["W_dec"][3]

    embeddings.grad = None
    with fh.register(model(), "model.layers.0.mlp", steer):
        model()(inputs_embeds=embeddings).logits.sum().backward()
    torch.testing.assert_close(found, embeddings.grad)


def test_a_quantity_that_is_a_multiple_is_changed_as_itself() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GraniteConfig(
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=32,
        residual_multiplier=0.25,
    )
    granite = transformers.GraniteForCausalLM(config).eval()
    own = transcoder()
    acts = fh.run(granite, IDS, capture=[READS, WRITES, "@resid_post.0"]).acts
    plan = fh.Plan(fh.on(WRITES, fh.Feature(own, 3, set=4.0)), fh.keep([WRITES, "@resid_post.0"]))
    found = fh.run(granite, IDS, plan=plan).acts
    changed = change(own, 3, 4.0, acts[READS])
    for what in (WRITES, "@resid_post.0"):
        torch.testing.assert_close(found[what], acts[what] + changed, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seed", range(amount(40, whole=1000)))
def test_random_batches(seed: int) -> None:
    """Requests with changes at both places, in any order, against sums of tensors."""
    rng = random.Random(seed)  # noqa: S311 (a test)
    generator = torch.Generator().manual_seed(seed)
    kinds = ["relu", "jumprelu", "gated", "groupmax"]
    known = [
        transcoder(rng.choice(kinds), D_IN, seed=number, reads="0", writes="1")
        for number in range(2)
    ]
    size = rng.randint(1, 6)
    x = torch.randn(size, LENGTH, D_IN, generator=generator)
    order = rng.sample(range(size), size)
    cuts = sorted({0, size, *(rng.randint(1, size) for _ in range(3))})
    requests, expected = {}, x.clone()
    for start, end in itertools.pairwise(cuts):
        rows, entries = order[start:end], []
        here, added = x[rows], torch.zeros(end - start, LENGTH, D_IN)
        for _ in range(rng.randint(1, 4)):
            at = rng.choice([None, slice(1, 3), slice(4, None)])
            tokens = slice(None) if at is None else at
            vector, own, index = torch.randn(D_IN, generator=generator), rng.choice(known), 3
            what = rng.choice(["0", "1", "features"])
            if what == "features":
                index = rng.randrange(D_SAE)
                entries.append(fh.on("1", fh.Feature(own, index, set=2.0), at=at))
                added[:, tokens] += change(own, index, 2.0, here)[:, tokens]
            else:
                entries.append(fh.on(what, fh.Add(vector), at=at))
                where = here.clone() if what == "0" else added
                where[:, tokens] += vector
                here = where if what == "0" else here
        requests[fh.Plan(*entries).open(network())] = rows
        expected[rows] = here + added
    positions = torch.arange(LENGTH).expand(size, LENGTH)
    with torch.no_grad(), fh.batch(requests, positions=positions):
        found = network()(x)
    assert [request.error for request in requests] == [None] * len(requests)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@functools.cache
def network() -> nn.Module:
    return Tokens(Echo(), Echo())


def test_a_module_that_runs_later_is_named_by_the_call() -> None:
    own = transcoder(reads="model.layers.1.post_attention_layernorm")
    plan = fh.Plan(fh.on(WRITES, fh.Feature(own, 3, set=4.0)))
    expected = (
        "changes the output of 'model.layers.0.mlp' by features of the same tokens at the output "
        "of 'model.layers.1.post_attention_layernorm', which has not run before it in this call"
    )
    with pytest.raises(HookError, match=expected), plan.open(model()):
        model()(IDS)


@pytest.mark.parametrize(
    ("what", "more", "message"),
    [
        (WRITES, {"width": 9, "d_out": WIDTH}, "reads vectors of width 9, but @mlp_in.0 has 8"),
        (WRITES, {"d_out": 9}, "has a width of 9, but the output of '@mlp_out.0'"),
        (
            WRITES,
            {"reads": "@mlp_in.1"},
            "reads @mlp_in.1, which runs later than @mlp_out.0, where it writes: choose a place",
        ),
        (WRITES, {"reads": "@mlp_in.*"}, "a transcoder reads and writes one place each, not"),
        ("@mlp_out.*", {}, "a transcoder reads and writes one place each, not"),
        (WRITES, {"reads": "@z.0.1"}, "reads @z.0.1, a single head: not supported"),
        ("@resid_pre.0", {}, "writes @resid_pre.0, which is not an output that can be changed"),
    ],
)
def test_places_that_do_not_fit_are_refused(what: str, more: Any, message: str) -> None:
    plan = fh.Plan(fh.on(what, fh.Feature(transcoder(**more), 3, set=4.0)))
    with pytest.raises(HookTypeError, match=message):
        plan.prepare(model())


def test_only_plans_change_features_of_transcoders() -> None:
    hook = fh.Feature(transcoder(), 3, set=4.0)
    expected = "features of a transcoder are read at one place and changed at another, which only a"
    with pytest.raises(HookTypeError, match=expected):
        fh.register(model(), WRITES, hook)
    with pytest.raises(HookTypeError, match=expected):
        hook.apply(torch.ones(2, WIDTH))
    with pytest.raises(HookTypeError, match="does not say where it reads: make or load it with re"):
        fh.on(WRITES, fh.Feature(transcoder(reads=None), 3, set=4.0))
    with pytest.raises(HookTypeError, match="change an output: leave out phase='forward_pre'"):
        fh.on(WRITES, hook, phase="forward_pre")


def test_calls_that_read_and_do_not_write_leave_little() -> None:
    class Skipping(Tokens):
        def forward(self, input_ids: Tensor, *, whole: bool = True) -> Tensor:
            return super().forward(input_ids) if whole else self[0](input_ids)

    own = transcoder(width=D_IN, reads="0", writes="1")
    x = torch.randn(1, LENGTH, D_IN)
    skipping = Skipping(Echo(), Echo())
    with fh.Plan(fh.on("1", fh.Feature(own, 3, set=2.0))).open(skipping) as request:
        for _ in range(100):
            skipping(x, whole=False)
        torch.testing.assert_close(skipping(x), x + change(own, 3, 2.0, x))
    assert [len(each) for each in request.transcoded.values()] == [63]


def test_json() -> None:
    own = transcoder(name="t")
    plan = fh.Plan(fh.on(WRITES, fh.Feature(own, [3, 9], set=5.0), at="generated", strength=0.5))
    text = plan.to_json()
    assert fh.Plan.from_json(text, dictionaries={"t": own}) == plan


def test_a_failing_member_fails_alone() -> None:
    plans = [
        fh.Plan(fh.on("1", fh.Feature(transcoder(width=D_IN, reads=it, writes="1"), 3, set=2.0)))
        for it in ("0", "1.*")
    ]
    first = plans[0].open(network())
    wrong = fh.Plan(fh.on("0", fh.Feature(transcoder(width=D_IN, reads="1"), 3, set=2.0)))
    second = wrong.open(network())
    x = torch.randn(2, LENGTH, D_IN)
    positions = torch.arange(LENGTH).expand(2, LENGTH)
    with torch.no_grad(), fh.batch({first: [0], second: [1]}, positions=positions):
        found = network()(x)
    assert first.error is None
    assert "which has not run before it in this call" in str(second.error)
    own = transcoder(width=D_IN, reads="0", writes="1")
    torch.testing.assert_close(found[0], x[0] + change(own, 3, 2.0, x[0]))

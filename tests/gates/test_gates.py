"""Gates: refusals, NaN, order, gradients, checkpoints, graphs, heads, structures."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import pickle
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ferrohook as fh
from ferrohook.gates.state import GateStates
from support.language_models import language_model

transformers = pytest.importorskip("transformers")

WIDTH = 8
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # names of older versions
IDS = torch.tensor([[1, 2, 3, 4, 5]])
UP, DOWN = torch.eye(WIDTH)[0], -torch.eye(WIDTH)[0]
LAYERS = "model.layers"


@functools.cache
def model() -> Any:
    return language_model("llama", WIDTH).requires_grad_(requires_grad=False)


@pytest.fixture(autouse=True)
def no_gradients(request: pytest.FixtureRequest) -> Any:
    with torch.set_grad_enabled("gradients" in request.node.name):
        yield


def hidden(plan: fh.Plan, ids: Tensor = IDS, layer: int = 1) -> Tensor:
    """Output of a layer with a plan."""
    return fh.run(model(), ids, plan=plan + fh.Plan(fh.keep(f"{LAYERS}.{layer}"))).acts[
        f"{LAYERS}.{layer}"
    ]


def plain(layer: int = 1) -> Tensor:
    return fh.run(model(), IDS, capture=f"{LAYERS}.{layer}").acts[f"{LAYERS}.{layer}"]


GATE = fh.gate("g", f"{LAYERS}.0", fh.Dot(UP))

REFUSED: list[tuple[Any, type[Exception], str]] = [
    (lambda: fh.gate("", "x", fh.Norm()), ValueError, "must not be empty"),
    (lambda: fh.gate(3, "x", fh.Norm()), fh.HookTypeError, "name of a gate must be a str, got int"),
    (lambda: fh.gate("g", "x", UP), fh.HookTypeError, "reading must be one"),
    (lambda: fh.gate("g", "x", fh.Norm(), over="all"), ValueError, "over must be one of 'token'"),
    (lambda: fh.gate("g", "x", fh.Norm(), by="sum"), ValueError, "by must be one of 'max'"),
    (lambda: fh.gate("g", "x", fh.Norm(), lag=2), ValueError, "lag must be 0 or 1"),
    (
        lambda: fh.gate("g", "x", fh.Norm(), over="prompt", lag=1),
        ValueError,
        "0 with over='prompt'",
    ),
    (lambda: fh.gate("g", "x", fh.Norm(), at="start"), ValueError, "start"),
    (lambda: fh.window(0), ValueError, "size must be at least 1"),
    (lambda: fh.ema(1.0), ValueError, "below 1, got 1.0"),
    (lambda: fh.ema("x"), fh.HookTypeError, "decay must be a number"),
    (lambda: fh.Dot(torch.zeros(2, 2)), fh.HookTypeError, "must be a vector of floating point"),
    (lambda: fh.Dot(torch.zeros(2), float("nan")), ValueError, "bias of Dot must be finite"),
    (lambda: fh.Cosine(torch.zeros(3)), ValueError, "a length from 1e-18 to 1e"),
    (lambda: fh.Cosine(UP, projected=1), fh.HookTypeError, "projected of Cosine must be a bool"),
    (lambda: fh.Probe(UP, index=0), ValueError, "none for weights of one class"),
    (lambda: fh.Probe(torch.ones(2, 3)), ValueError, "must be 0 to 1, got None"),
    (lambda: fh.Probe(torch.ones(2, 3), index=2), ValueError, "must be 0 to 1, got 2"),
    (lambda: fh.Probe(UP, mean=torch.ones(3)), fh.HookTypeError, "one width, got [3, 8]"),
    (
        lambda: fh.Probe(torch.ones(2, 3), UP, index=0),
        fh.HookTypeError,
        "shape (2,), got torch.float32 of (8,)",
    ),
    (lambda: fh.TokenProbability([]), ValueError, "each once, got []"),
    (lambda: fh.TokenProbability([1, 1]), ValueError, "each once"),
    (lambda: fh.TokenProbability(["a"]), fh.HookTypeError, "a list of ints"),
    (lambda: fh.above("g", float("inf")), ValueError, "threshold must be finite"),
    (lambda: fh.above("g", 10**400), ValueError, "threshold must be finite"),
    (lambda: fh.on("x", fh.Zero(), strength=10**400), ValueError, "strength must be finite"),
    (lambda: fh.Cosine(torch.tensor([float("inf"), 0])), ValueError, "must not have NaN or inf"),
    (lambda: fh.above("g", None), fh.HookTypeError, "threshold must be a number"),
    (lambda: fh.between("g", 2, 1), ValueError, "not be greater than high"),
    (lambda: fh.ramp("g", 1, 1), ValueError, "must differ"),
    (lambda: bool(fh.above("g", 1)), fh.HookTypeError, "combine conditions with &, | and ~"),
    (lambda: fh.above("g", 1) or fh.below("g", 0), fh.HookTypeError, "no truth value"),
    (lambda: fh.on("x", fh.Zero(), when=True), fh.HookTypeError, "when must be a condition"),
    (lambda: fh.on("x", fh.Zero(), strength="1"), fh.HookTypeError, "strength must be a number"),
    (lambda: fh.on("x", fh.Zero(), strength=float("nan")), ValueError, "strength must be finite"),
    (
        lambda: fh.on("x", fh.ForwardHook(print), when=fh.above("g", 1)),
        fh.HookTypeError,
        "an intervention in a forward phase",
    ),
    (lambda: fh.keep("@gate.g", at="prompt"), fh.HookTypeError, "leave out at"),
    (lambda: fh.keep("@gate.g", grads=True), fh.HookTypeError, "leave out grads"),
    (lambda: fh.Plan(GATE, GATE), fh.HookError, "two gates of the plan are called 'g'"),
]


@pytest.mark.parametrize(("call", "error", "words"), REFUSED)
def test_bad_arguments_are_refused(call: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert words in str(caught.value)


UNPREPARED: list[tuple[list[Any], type[Exception], str]] = [
    (
        [fh.on(f"{LAYERS}.1", fh.Zero(), when=fh.above("g", 0))],
        fh.HookError,
        "entry 0: the plan has no gate 'g'; it has none",
    ),
    ([GATE, fh.keep("@gate.h")], fh.HookError, "entry 1: the plan has no gate 'h'; it has 'g'"),
    ([fh.gate("g", f"{LAYERS}.*", fh.Norm())], fh.HookError, "reads one place"),
    (
        [fh.gate("g", "@resid_post.0", fh.Dot(torch.ones(3)))],
        fh.HookTypeError,
        "width 3, got 8 at @resid_post.0",
    ),
    ([GATE, fh.keep("@gate.g"), fh.keep("@gate.g")], fh.HookError, "keeps '@gate.g' again"),
    ([fh.gate("g", "missing", fh.Norm())], fh.SelectionError, "missing"),
]


@pytest.mark.parametrize(("entries", "error", "words"), UNPREPARED)
def test_plans_are_refused_as_they_are_prepared(
    entries: list[Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error) as caught:
        fh.Plan(*entries).prepare(model())
    assert words in str(caught.value)
    assert not fh.hooks(model())


def test_a_model_without_tokens_is_refused() -> None:
    images = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU())
    plan = fh.Plan(fh.gate("g", "0", fh.Norm()), fh.keep("@gate.g"))
    with pytest.raises(fh.HookError, match="neither input_ids nor inputs_embeds"):
        fh.run(images, torch.zeros(1, 3, 2, 2), plan=plan)


def test_a_strength_without_a_gate_needs_no_tokens() -> None:
    images = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU())
    x = torch.randn(1, 3, 2, 2)
    plan = fh.Plan(fh.on("0", fh.Zero(), strength=0.25), fh.keep("0"))
    got = fh.run(images, x, plan=plan).acts["0"]
    torch.testing.assert_close(got, images[0](x) * 0.75)
    function = fh.Plan(fh.on("0", lambda _m, _a, out: out + 4, strength=0.5), fh.keep("0"))
    torch.testing.assert_close(fh.run(images, x, plan=function).acts["0"], images[0](x) + 2)


@pytest.mark.parametrize(
    ("reading", "words"),
    [
        (fh.Dot(torch.ones(3)), "width 3, got 8"),
        (fh.TokenProbability([99]), "token id 99 of .* is out of range"),
    ],
)
def test_a_reading_that_does_not_fit_names_the_gate(reading: Any, words: str) -> None:
    plan = fh.Plan(fh.gate("g", f"{LAYERS}.0", reading), fh.keep("@gate.g"))
    with pytest.raises(fh.HookTypeError, match=words) as caught:
        fh.run(model(), IDS, plan=plan)
    assert any("gate 'g'" in note for note in caught.value.__notes__)


def test_nan_fails_the_request() -> None:
    plan = fh.Plan(
        fh.on(f"{LAYERS}.0", fh.Replace(torch.tensor(float("nan"))), at=2),
        fh.gate("g", f"{LAYERS}.0", fh.Norm()),
    )
    with pytest.raises(fh.HookError, match="gate 'g' is NaN at position 2"):
        fh.run(model(), IDS, plan=plan)


def test_nan_fails_only_its_member_of_a_batch() -> None:
    bad = fh.Plan(
        fh.on(f"{LAYERS}.0", fh.Replace(torch.tensor(float("nan")))),
        fh.gate("g", f"{LAYERS}.0", fh.Norm()),
    )
    good = fh.Plan(GATE, fh.keep("@gate.g"))
    one, other = (plan.prepare(model()).open() for plan in (bad, good))
    with fh.batch({one: [0], other: [1]}, dim=0):
        model()(IDS.repeat(2, 1))
    assert "gate 'g' is NaN" in str(one.error)
    assert other.error is None
    alone = fh.run(model(), IDS, plan=good).acts
    torch.testing.assert_close(other.acts["@gate.g"], alone["@gate.g"])


def test_the_sum_of_listed_places_is_read() -> None:
    places = [f"{LAYERS}.0.mlp", f"{LAYERS}.1"]
    plan = fh.Plan(
        fh.gate("g", places, fh.Probe(UP, 0.5)), fh.keep("@gate.g"), *map(fh.keep, places)
    )
    acts = fh.run(model(), IDS, plan=plan).acts
    total = acts[places[0]] + acts[places[1]]
    expected = ((total[0].float() * UP).sum(-1) + 0.5).sigmoid()
    torch.testing.assert_close(acts["@gate.g"].flatten(), expected)


def test_a_sum_of_tensors_that_differ_fails() -> None:
    places = [f"{LAYERS}.0", f"{LAYERS}.0.mlp.gate_proj"]
    plan = fh.Plan(fh.gate("g", places, fh.Norm()), fh.keep("@gate.g"))
    with pytest.raises(fh.HookError, match="the sum of 2 places, whose tensors differ"):
        fh.run(model(), IDS, plan=plan)


def test_a_sum_begins_anew_after_a_call_that_failed() -> None:
    """The first place has run in a call that ended before the second one did."""
    places = [f"{LAYERS}.0", f"{LAYERS}.1"]
    plan = fh.Plan(fh.gate("g", places, fh.Norm()), fh.keep("@gate.g"))
    request = plan.prepare(model()).open()
    positions = torch.arange(IDS.shape[1])[None]
    with fh.batch({request: [0]}, positions=positions):
        with fh.scope() as scope:
            fh.register(model(), f"{LAYERS}.1.mlp", _raise, scope=scope)
            with pytest.raises(ValueError, match="on purpose"):
                model()(IDS)
        model()(IDS)
    expected = fh.run(model(), IDS, plan=plan).acts["@gate.g"].flatten()
    torch.testing.assert_close(request.acts["@gate.g"].flatten(), expected)


def test_a_sum_whose_place_runs_again_reads_the_next_call_gradients() -> None:
    """A batch repeats a place of requests that have gradients."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(16, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    gate = fh.gate("g", ["1", "2"], fh.Norm())
    requests = [
        fh.Plan(gate, fh.keep("@gate.g"), fh.on("2", fh.Scale(3.0), when=fh.above("g", limit)))
        .prepare(net)
        .open()
        for limit in (1e9, 0.0)
    ]
    for step in range(3):
        positions = torch.tensor([0, 1, 0, 1]) + 2 * step
        batch = {requests[0]: slice(0, 2), requests[1]: slice(2, 4)}
        with fh.batch(batch, positions=positions):
            net(torch.tensor([1, 2, 3, 4]) + step)
        assert [each.error for each in requests] == [None, None]


def test_a_sum_whose_places_run_again_has_the_plain_gradients() -> None:
    """A batch runs the hooks of its members again where it changes only some of them."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(16, WIDTH), *(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    requests = [
        fh.Plan(
            fh.gate("first", "1", fh.Norm()),
            fh.gate("g", ["1", "2", "3"], fh.Norm()),
            fh.on("2", fh.Scale(2.0), when=fh.above("first", limit)),
            fh.on("3", fh.Scale(3.0), when=fh.above("first", limit), strength=fh.ramp("g", 0, 9)),
            fh.keep("@gate.g"),
        )
        .prepare(net)
        .open()
        for limit in (1e9, 0.0)
    ]
    members = {requests[0]: slice(0, 2), requests[1]: slice(2, 4)}
    positions = torch.tensor([0, 1, 0, 1])
    ids = torch.arange(8).view(2, 4)
    with fh.batch(members, positions=positions) as batch:
        loss = net(ids[0]).square().sum()
        batch.move(positions=positions + 2)
        (loss + net(ids[1]).square().sum()).backward()
    assert [each.error for each in requests] == [None, None]
    found = [parameter.grad.clone() for parameter in net.parameters()]
    net.zero_grad()
    one = net[1](net[0](ids))
    two = net[2](one)
    changed = torch.tensor([False, False, True, True])[:, None]
    three = net[3](torch.where(changed, 2 * two, two))
    gate = (one + two + three).norm(dim=-1, keepdim=True)
    output = torch.where(changed, three * (1 + 2 * (gate / 9).clamp(0, 1)), three)
    output.square().sum().backward()
    torch.testing.assert_close(found, [parameter.grad for parameter in net.parameters()])
    for request, columns in zip(requests, (slice(0, 2), slice(2, 4)), strict=True):
        read = request.acts["@gate.g"].flatten()
        torch.testing.assert_close(read, gate[:, columns].detach().flatten())


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("place", ["mlp", "self_attn.o_proj"])
def test_a_sum_over_checkpointed_layers_has_the_plain_gradients(
    place: str, reentrant: bool
) -> None:
    """The backward repeats the layers one by one, the last one first."""
    places = [f"{LAYERS}.0.{place}", f"{LAYERS}.1.{place}"]
    gate = fh.gate("g", places, fh.Norm())
    scaled = functools.partial(fh.on, "model.norm", fh.Scale(3.0))
    plans = [
        fh.Plan(gate, fh.keep("@gate.g")),
        fh.Plan(gate, scaled(when=fh.above("g", 0.0))),
        # A reentrant checkpoint runs its layers without gradients.
        *([] if reentrant else [fh.Plan(gate, scaled(strength=fh.ramp("g", 0.0, 9.0)))]),
    ]
    for plan in plans:
        found = []
        for repeats in (False, True):
            own = copy.deepcopy(model()).requires_grad_().train()
            if repeats:
                own.gradient_checkpointing_enable({"use_reentrant": reentrant})
            with plan.open(own):
                for ids in (IDS, IDS + 5):
                    own(ids, use_cache=False).logits.square().sum().backward()
            found.append(own.get_submodule(f"{LAYERS}.0.mlp.down_proj").weight.grad)
        torch.testing.assert_close(*found)


class Checkpointed(nn.Module):
    """Linear layers, each in a checkpoint, and a head outside.

    Args:
        reentrant: kind of the checkpoints; None for none.
        layers: number of layers.
        width: of the layers.
    """

    def __init__(self, reentrant: bool | None, layers: int = 3, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(16, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head = nn.Linear(width, width)
        self.reentrant = reentrant

    def forward(self, input_ids: Tensor) -> Tensor:
        x: Tensor = self.embed(input_ids)
        for layer in self.layers:

            def call(x: Tensor, layer: nn.Module = layer) -> Tensor:
                return x + torch.tanh(layer(x))

            if self.reentrant is None:
                x = call(x)
            else:
                x = checkpoint(call, x, use_reentrant=self.reentrant)
        return self.head(x)  # type: ignore[no-any-return]

    def gradients(self) -> list[Tensor | None]:
        return [parameter.grad for parameter in self.parameters()]


WHEN = fh.on("layers.2", fh.Scale(3.0), when=fh.above("g", 1.0))
FOLLOWED = fh.on("layers.2", fh.Scale(3.0), strength=fh.ramp("g", 0.0, 9.0))
PLACES = [["layers.0"], ["layers.0", "layers.1"], ["embed", "layers.2"], ["layers.1", "layers.2"]]


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize(("reentrant", "changed"), [(False, WHEN), (False, FOLLOWED), (True, WHEN)])
@pytest.mark.parametrize("batched", [False, True])
def test_gradients_of_several_forwards_with_a_checkpointed_gate(
    places: list[str], reentrant: bool, changed: Any, batched: bool
) -> None:
    """Gradient accumulation: a backward repeats the layers of two forwards, twice."""
    found = []
    for repeats in (None, reentrant):
        net = Checkpointed(repeats)
        request = fh.Plan(fh.gate("g", places, fh.Norm()), changed).prepare(net).open()
        ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
        if batched:  # the members of batches share the id of the sequences
            with fh.batch({request: slice(0, 1)}, positions=torch.arange(3)[None]) as batch:
                loss = net(ids[:1]).square().sum()
                batch.move(positions=torch.arange(3, 6)[None])
                loss = loss + net(ids[1:]).square().sum()
                loss.backward(retain_graph=True)
                loss.backward()
        else:
            with request:
                loss = net(ids[:1]).square().sum() + net(ids[1:]).square().sum()
                loss.backward(retain_graph=True)
                loss.backward()
        assert request.error is None
        found.append(net.gradients())
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("places", [["layers.0"], ["embed", "layers.2"]])
def test_a_repeat_of_gradients_keeps_no_values_again(places: list[str], reentrant: bool) -> None:
    net = Checkpointed(reentrant)
    gate = fh.gate("g", places, fh.Norm())
    last, every = (fh.keep("@gate.g", calls=calls, label=calls) for calls in ("last", "all"))
    with fh.Plan(gate, last, every).open(net) as request:
        loss = net(IDS).sum() + net(IDS + 3).sum()
        found = [request.acts["last:@gate.g"], *request.acts["all:@gate.g"]]
        loss.backward()
    torch.testing.assert_close([request.acts["last:@gate.g"], *request.acts["all:@gate.g"]], found)


@pytest.mark.parametrize("reentrant", [None, False])
def test_sums_keep_vectors_only_for_repeats_and_no_graph_gradients(reentrant: bool | None) -> None:
    width, layers = 97, 4
    net = Checkpointed(reentrant, layers, width)
    gate = fh.gate("g", [f"layers.{number}" for number in range(layers)], fh.Norm())

    def vectors() -> list[Tensor]:
        gc.collect()
        found = [it for it in gc.get_objects() if type(it) is Tensor and it.dim() > 1]
        return [it for it in found if it.shape[-1] == width and len(it) == IDS.shape[1]]

    graphs = []

    def count(_gradient: Tensor) -> None:
        graphs.extend(it for it in vectors() if it.grad_fn is not None)

    net.embed.weight.register_hook(count)
    with fh.Plan(gate, fh.keep("@gate.g")).open(net) as request:
        loss = net(IDS).sum()
        assert len(vectors()) == (0 if reentrant is None else layers - 1)
        loss.backward()
        assert not graphs
        del loss
        assert not vectors()
        assert len(request.acts["@gate.g"].flatten()) == IDS.numel()


@pytest.mark.parametrize("places", [["layers.0"], ["embed", "layers.2"], ["layers.0", "layers.2"]])
@pytest.mark.parametrize("place", ["layers.2", "head"])
def test_gradients_that_a_reentrant_checkpoint_loses_are_refused(
    places: list[str], place: str
) -> None:
    net = Checkpointed(reentrant=True)
    changed = fh.on(place, fh.Scale(3.0), strength=fh.ramp("g", 0.0, 9.0))
    plan = fh.Plan(fh.gate("g", places, fh.Norm()), changed)
    with plan.open(net), pytest.raises(fh.HookError, match="use_reentrant=False"):
        net(IDS).square().sum().backward()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_gradients_that_a_reentrant_checkpoint_does_not_lose_are_right() -> None:
    """The checkpointed layers are frozen, so the gate has no gradient."""
    found = []
    for reentrant in (None, True):
        net = Checkpointed(reentrant).requires_grad_(requires_grad=False)
        net.head.requires_grad_()
        changed = fh.on("head", fh.Scale(3.0), strength=fh.ramp("g", 0.0, 9.0))
        with fh.Plan(fh.gate("g", "layers.0", fh.Norm()), changed).open(net):
            net(IDS).square().sum().backward()
        found.append(net.gradients())
    torch.testing.assert_close(*found)


def test_parts_of_calls_that_failed_are_dropped() -> None:
    states, parts = GateStates({}), [torch.ones(1, WIDTH) for _ in range(100)]
    kept = [weakref.ref(part) for part in parts]
    for number in range(len(parts)):
        tokens: Any = SimpleNamespace(sequences=number)
        assert states.add_part("g", tokens, 0, 2, parts.pop()) is None
    assert sum(each() is not None for each in kept) < len(kept)


def _raise(*_: object) -> None:
    msg = "on purpose"
    raise ValueError(msg)


def test_a_gate_that_reads_later_is_refused_with_the_remedy() -> None:
    entries = [
        fh.gate("g", f"{LAYERS}.1", fh.Norm()),
        fh.on(f"{LAYERS}.0", fh.Zero(), when=fh.above("g", 0)),
    ]
    with pytest.raises(fh.HookError, match=r"reads later in the forward .* give it lag=1"):
        fh.run(model(), IDS, plan=fh.Plan(*entries))


def test_a_later_gate_with_lag_acts_on_generated_tokens_only() -> None:
    entries = [fh.gate("g", f"{LAYERS}.1", fh.Norm(), lag=1), fh.keep(f"{LAYERS}.0", calls="all")]
    kept = []
    for options in ({"when": fh.above("g", 0)}, {"at": "generated"}):
        plan = fh.Plan(entries[0], fh.on(f"{LAYERS}.0", fh.Zero(), **options), entries[1])
        with plan.open(model()) as request:
            model().generate(IDS, max_new_tokens=4, do_sample=False)
        kept.append(torch.cat([*request.acts[f"{LAYERS}.0"]], 1))
    assert torch.equal(*kept)
    assert kept[0][0].any(-1).tolist() == [True] * 5 + [False] * 3


def test_tokens_that_ran_before_the_request_are_missed() -> None:
    cache = transformers.DynamicCache()
    model()(IDS, past_key_values=cache)
    plan = fh.Plan(
        fh.gate("g", f"{LAYERS}.0", fh.Norm(), over="so_far"),
        fh.on(f"{LAYERS}.1", fh.Zero(), when=fh.above("g", 0)),
    )
    with (
        pytest.raises(fh.HookError, match="did not read the tokens at positions from 0 on"),
        plan.prepare(model()).open(prompt=5),
    ):
        model()(IDS[:, :1], past_key_values=cache)


def test_a_window_needs_its_own_tokens_only() -> None:
    cache = transformers.DynamicCache()
    model()(IDS, past_key_values=cache)
    plan = fh.Plan(
        fh.gate("g", f"{LAYERS}.0", fh.Norm(), over=fh.window(2), at=slice(5, None)),
        fh.on(f"{LAYERS}.1", fh.Zero(), when=fh.above("g", 0)),
        fh.keep(f"{LAYERS}.1"),
        fh.keep("@gate.g"),
    )
    with plan.prepare(model()).open(prompt=5) as request:
        model()(IDS[:, :3], past_key_values=cache)
    assert request.acts[f"{LAYERS}.1"][0].any(-1).tolist() == [True, False, False]
    assert request.acts["@gate.g"].isnan().tolist() == [True, False, False]


def test_a_token_that_runs_again_has_its_first_reading() -> None:
    """A later entry of the same forward would change the vector: the stored reading counts."""
    plan = fh.Plan(
        fh.gate("g", f"{LAYERS}.0", fh.Norm()),
        fh.keep("@gate.g"),
        fh.on(f"{LAYERS}.1", fh.Add(UP), when=fh.above("g", 0.0)),
    )
    cache = transformers.DynamicCache()
    with plan.prepare(model()).open(prompt=5) as request:
        model()(IDS, past_key_values=cache)
        first = request.acts["@gate.g"].clone()
        cache.crop(-2)
        model()(IDS[:, 3:], past_key_values=cache)
        again = request.acts["@gate.g"]
    assert torch.equal(first[3:], again[3:])


def test_the_last_token_of_a_step_that_runs_again_counts_once() -> None:
    net = nn.Sequential(nn.Embedding(8, WIDTH), nn.Identity())
    gate = fh.gate("g", "0", fh.Norm(), over="so_far", by="mean")
    request = fh.Plan(gate, fh.keep("@gate.g")).prepare(net).open()
    values = []
    for ids, positions in (([1, 2, 3], [0, 1, 2]), ([4], [2])):
        with fh.batch({request: [*range(len(ids))]}, positions=torch.tensor(positions)):
            net(torch.tensor(ids))
        values.append(request.acts["@gate.g"].clone())
    assert torch.equal(*values)


def test_gradients_reach_values_and_not_comparisons() -> None:
    own = copy.deepcopy(model()).requires_grad_(requires_grad=False)
    embedded = own.get_input_embeddings()(IDS).detach().requires_grad_()
    plan = fh.Plan(
        fh.gate("g", f"{LAYERS}.0", fh.Dot(UP)),
        fh.on(f"{LAYERS}.1", fh.Add(UP), strength=fh.ramp("g", -50.0, 50.0)),
    )

    def gradient(run: Any) -> Tensor:
        embedded.grad = None
        run().logits.square().sum().backward()
        assert embedded.grad is not None
        return embedded.grad.clone()

    def by_plan() -> Any:
        with plan.open(own):
            return own(inputs_embeds=embedded)

    def by_hand() -> Any:
        read: list[Tensor] = []
        one = own.get_submodule(f"{LAYERS}.0").register_forward_hook(
            lambda _m, _a, out: read.append(out[..., 0])
        )
        two = own.get_submodule(f"{LAYERS}.1").register_forward_hook(
            lambda _m, _a, out: out + (((read[0] + 50) / 100).clamp(0, 1))[..., None] * UP
        )
        try:
            return own(inputs_embeds=embedded)
        finally:
            one.remove()
            two.remove()

    torch.testing.assert_close(gradient(by_plan), gradient(by_hand))
    compared = fh.Plan(
        fh.gate("g", f"{LAYERS}.0", fh.Dot(UP)),
        fh.on(f"{LAYERS}.1", fh.Zero(), when=fh.above("g", -1e9)),
    )
    with compared.open(own):
        assert (
            not own(inputs_embeds=embedded).logits.requires_grad
            or not gradient(lambda: own(inputs_embeds=embedded)).any()
        )


def test_gradients_through_a_checkpoint_repeat_the_decisions() -> None:
    own = copy.deepcopy(model())
    for layer in own.model.layers:
        layer.register_forward_pre_hook(lambda _m, _a: None)
    embedded = own.get_input_embeddings()(IDS).detach().requires_grad_()
    plan = fh.Plan(
        fh.gate("g", f"{LAYERS}.0", fh.Dot(UP), over="so_far", by="mean"),
        fh.on(f"{LAYERS}.0.mlp", fh.Scale(0.5), at=0),
        fh.on(f"{LAYERS}.1", fh.Scale(0.5), when=fh.above("g", 0.0)),
    )
    gradients = []
    for repeated in (False, True):
        embedded.grad = None
        with plan.open(own):
            call = functools.partial(own.model, inputs_embeds=embedded, use_cache=False)
            output = checkpoint(call, use_reentrant=False) if repeated else call()
            output.last_hidden_state.square().sum().backward()
        gradients.append(embedded.grad)
    torch.testing.assert_close(*gradients)


def test_a_compiled_model_breaks_the_graph_and_agrees() -> None:
    own = copy.deepcopy(model())
    plan = fh.Plan(
        fh.gate("g", f"{LAYERS}.0", fh.Dot(UP)),
        fh.on(f"{LAYERS}.1", fh.Zero(), when=fh.above("g", 0.0)),
        fh.keep("@gate.g"),
    )
    eager = fh.run(own, IDS, plan=plan)
    compiled = torch.compile(own, backend="eager")
    with plan.open(own) as request:
        output = compiled(IDS)
    torch.testing.assert_close(output.logits, eager.output.logits)
    torch.testing.assert_close(request.acts["@gate.g"], eager.acts["@gate.g"])


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # read by Dynamo
def test_gradients_of_strengths_are_not_compiled() -> None:
    own = copy.deepcopy(model())
    embedded = own.get_input_embeddings()(IDS).detach().requires_grad_()
    plan = fh.Plan(
        fh.gate("g", f"{LAYERS}.0", fh.Dot(UP)),
        fh.on(f"{LAYERS}.1", fh.Scale(0.5), strength=fh.ramp("g", -3.0, 3.0)),
    )
    traces: list[str] = []

    def noted(graph: Any, _inputs: Any) -> Any:
        traces.extend(node.stack_trace or "" for node in graph.graph.nodes)
        return graph.forward

    gradients = []
    for call in (own, torch.compile(own, backend=noted)):
        embedded.grad = None
        with plan.open(own):
            call(inputs_embeds=embedded).logits.square().sum().backward()
        gradients.append(embedded.grad)
    torch.testing.assert_close(*gradients)
    assert traces
    assert not any("ferrohook/gates" in trace for trace in traces)


def test_a_head_and_a_tuple_are_read() -> None:
    plan = fh.Plan(
        fh.gate("head", "@z.0.1", fh.Norm()),
        fh.gate("all", "@z.0", fh.Norm()),
        fh.gate("part", f"{LAYERS}.0.self_attn", fh.Norm(), output_index=0),
        fh.gate("input", f"{LAYERS}.0.mlp", fh.Norm(), inputs=True),
        *(fh.keep(f"@gate.{name}") for name in ("head", "all", "part", "input")),
        fh.keep("@z.0"),
    )
    acts = fh.run(model(), IDS, plan=plan).acts
    z = acts["@z.0"]
    torch.testing.assert_close(acts["@gate.head"], z[0, :, 1].norm(dim=-1))
    torch.testing.assert_close(acts["@gate.all"], z[0].flatten(1).norm(dim=-1))
    own = fh.run(model(), IDS, capture=[f"{LAYERS}.0.self_attn"]).acts[f"{LAYERS}.0.self_attn"]
    torch.testing.assert_close(acts["@gate.part"], own[0][0].norm(dim=-1))
    with fh.capture(model(), f"{LAYERS}.0.mlp", inputs=True) as inputs:
        model()(IDS)
    torch.testing.assert_close(acts["@gate.input"], inputs[f"{LAYERS}.0.mlp"][0].norm(dim=-1))


def test_a_module_that_returns_several_tensors_is_refused() -> None:
    plan = fh.Plan(fh.gate("g", f"{LAYERS}.0.self_attn", fh.Norm()))
    with pytest.raises(fh.HookTypeError, match="choose one with output_index"):
        fh.run(model(), IDS, plan=plan)


def test_plans_with_gates_are_data() -> None:
    plan = fh.Plan(
        fh.gate("a", f"{LAYERS}.0", fh.Probe(UP, 0.5, mean=UP, scale=UP + 1), over=fh.window(3)),
        fh.gate("b", "lm_head", fh.TokenProbability([3, 1]), at="generated", lag=1, by="mean"),
        fh.gate("c", f"{LAYERS}.0", fh.Cosine(UP, projected=True), over=fh.ema(0.9), inputs=True),
        fh.on(
            f"{LAYERS}.1",
            fh.Add(UP),
            when=(fh.above("a", "c") | ~fh.below("b", 0.1)) & fh.between("c", -1, 0.5),
            strength=fh.ramp("c", 0.5, -0.5),
        ),
        fh.on(f"{LAYERS}.1", fh.Zero(), strength=0.5),
        fh.keep("@gate.a", label="x"),
    )
    for made in (
        fh.Plan.from_json(plan.to_json()),
        pickle.loads(pickle.dumps(plan)),
        copy.deepcopy(plan),
    ):
        assert made == plan
        assert hash(made) == hash(plan)
    assert plan != fh.Plan(*plan.entries[:-1])
    text = repr(plan)
    assert "((above('a', 'c') | ~below('b', 0.1)) & between('c', -1.0, 0.5))" in text
    assert "ramp('c', 0.5, -0.5)" in text


BAD_JSON: list[tuple[dict[str, Any], str]] = [
    ({"name": "g", "what": "x"}, "'reading' is missing"),
    ({"name": "g", "what": "x", "reading": {"type": "Add"}}, "type is one of Dot, Cosine"),
    ({"name": "g", "what": "x", "reading": {"type": "Norm", "x": 1}}, "unknown key 'x'"),
    ({"name": "g", "what": "x", "reading": {"type": "Norm"}, "over": {"window": 0}}, "at least 1"),
    ({"name": "g", "what": "x", "reading": {"type": "Norm"}, "over": {"window": [1, 2]}}, "over"),
    ({"name": "g", "what": "x", "reading": {"type": "Norm"}, "over": {"sum": 1}}, "unknown key"),
    ({"name": "g", "what": "x", "reading": {"type": "Norm"}, "lag": 7}, "lag must be 0 or 1"),
    ({"name": "g" * 2000, "what": "x", "reading": {"type": "Norm"}}, "at most 1024"),
    (
        {"name": "g", "what": "x", "reading": {"type": "TokenProbability", "ids": [1] * 5000}},
        "at most 1024 ints",
    ),
    ({"name": "g", "what": "x", "reading": {"type": "Dot", "direction": [1.0]}}, "ints"),
]


@pytest.mark.parametrize(("entry", "words"), BAD_JSON)
def test_bad_json_of_gates_is_refused(entry: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=r"entries\[0\]") as caught:
        fh.Plan.from_json({"version": 1, "entries": [{"type": "gate", **entry}]})
    assert words in str(caught.value)


BAD_CONDITIONS: list[tuple[Any, str]] = [
    ("x", "an object with one key"),
    ({}, "an object with one key"),
    ({"above": ["g", 1], "below": ["g", 2]}, "an object with one key"),
    ({"above": ["g"]}, "above"),
    ({"above": ["g", 1, 2, 3]}, "at most 3"),
    ({"above": [1, 1]}, "must be a str"),
    ({"and": [{"above": ["g", 1]}]}, "at least two conditions"),
    ({"or": [{"above": ["g", 1]}] * 2000}, "more than 1024 conditions"),
    ({"not": [{"above": ["g", 1]}]}, "an object with one key"),
    (functools.reduce(lambda it, _: {"not": it}, range(40), {"above": ["g", 1]}), "16 deep"),
]


@pytest.mark.parametrize(("when", "words"), BAD_CONDITIONS)
def test_bad_json_of_conditions_is_refused(when: Any, words: str) -> None:
    entry = {"type": "on", "what": "x", "hook": {"type": "Zero"}, "when": when}
    with pytest.raises(ValueError, match=r"entries\[0\]\.when") as caught:
        fh.Plan.from_json({"version": 1, "entries": [entry]})
    assert words in str(caught.value)


def test_a_bad_strength_in_json_is_refused() -> None:
    for strength in ({"ramp": ["g", 1, 1]}, {"ramp": ["g"]}, "x", {"slope": []}):
        entry = {"type": "on", "what": "x", "hook": {"type": "Zero"}, "strength": strength}
        with pytest.raises(ValueError, match=r"entries\[0\]"):
            fh.Plan.from_json({"version": 1, "entries": [entry]})


def test_sites_refuse_gates_by_name() -> None:
    own = copy.deepcopy(model())
    plans = {
        "gates": fh.Plan(fh.gate("g", f"{LAYERS}.0", fh.Norm())),
        "strengths": fh.Plan(fh.on(f"{LAYERS}.0", fh.Add(UP), strength=0.5)),
    }
    with fh.rows.sites(own, f"{LAYERS}.*", width=WIDTH, max_requests=2, max_rows=8):
        for words, plan in plans.items():
            request = plan.prepare(own).open()
            with (
                pytest.raises(fh.HookError, match=words),
                fh.batch({request: [0]}, positions=torch.arange(1)),
            ):
                pass


# Faults that a review found, one test for each.


def test_a_plan_that_reads_nothing_leaves_the_checks_of_others() -> None:
    late = fh.Plan(
        fh.gate("late", f"{LAYERS}.1", fh.Dot(UP), over="so_far"),
        fh.on(f"{LAYERS}.0", fh.Zero(), when=fh.above("late", -1e9)),
    )
    nothing = fh.Plan(
        fh.gate("g", f"{LAYERS}.0", fh.Dot(UP), over="so_far", at=slice(100, None)),
        fh.on(f"{LAYERS}.1", fh.Zero(), when=fh.above("g", 0)),
    )
    fh.run(model(), IDS, plan=nothing)
    with pytest.raises(fh.HookError, match="reads later in the forward"):
        fh.run(model(), IDS, plan=late)


@pytest.mark.parametrize(("packed", "position"), [([0, 1, 2, 0, 1], 0), ([0, 1, 1, 2, 3], 1)])
def test_texts_that_share_a_row_are_refused(packed: list[int], position: int) -> None:
    plan = fh.Plan(GATE, fh.keep("@gate.g"))
    with pytest.raises(fh.HookError, match=f"two tokens at position {position} of one row"):
        fh.run(model(), IDS, position_ids=torch.tensor([packed]), plan=plan)


@pytest.mark.parametrize("over", ["token", "so_far", fh.window(2)])
def test_positions_need_not_ascend(over: Any) -> None:
    net = nn.Sequential(nn.Embedding(8, WIDTH), nn.Identity())
    plan = fh.Plan(
        fh.gate("g", "0", fh.Dot(UP), over=over, by="last"),
        fh.on("1", fh.Zero(), when=fh.above("g", 0.0)),
        fh.keep("1"),
    )
    results = []
    for order in ([0, 1, 2], [2, 1, 0]):
        with plan.prepare(net) as prepared:
            request = prepared.open()
            with fh.batch({request: [0, 1, 2]}, positions=torch.tensor(order)):
                net(torch.tensor(order) + 3)
            results.append(request.acts["1"])
    assert torch.equal(*results)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_strength_of_one_is_the_whole_change_in_half_precision(dtype: torch.dtype) -> None:
    net, value = nn.Sequential(nn.Identity()), torch.linspace(-1, 1, WIDTH)
    x = (torch.randn(4, WIDTH) * 100).to(dtype)
    acts = [
        fh.run(net, x, plan=fh.Plan(fh.on("0", fh.Replace(value), **options), fh.keep("0"))).acts
        for options in ({}, {"strength": 1.0}, {"strength": 0.0})
    ]
    assert torch.equal(acts[0]["0"], acts[1]["0"])
    assert torch.equal(acts[2]["0"], x)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradients_through_a_strength_survive_a_checkpoint(reentrant: bool) -> None:
    own = copy.deepcopy(model()).requires_grad_()
    plan = fh.Plan(
        fh.gate("g", f"{LAYERS}.0", fh.Dot(UP)),
        fh.on(f"{LAYERS}.1", fh.Scale(3.0), strength=fh.ramp("g", -3.0, 3.0)),
    )
    weight = own.get_submodule(f"{LAYERS}.0.mlp.down_proj").weight
    gradients = []
    for repeated in (False, True):
        own.zero_grad()
        embedded = own.get_input_embeddings()(IDS).detach().requires_grad_()
        with plan.open(own):

            def call(inputs: Tensor) -> Tensor:
                return own.model(inputs_embeds=inputs, use_cache=False).last_hidden_state

            output = (
                checkpoint(call, embedded, use_reentrant=reentrant) if repeated else call(embedded)
            )
            output.square().sum().backward()
        gradients.append(weight.grad.clone())
    torch.testing.assert_close(*gradients)


def test_the_prompt_of_a_further_turn_counts_anew() -> None:
    gate = fh.gate("g", f"{LAYERS}.0", fh.Dot(UP), at=slice(-4, None), over="prompt", by="min")
    plan = fh.Plan(gate, fh.keep("@gate.g"))
    with plan.open(model()) as request:
        first = model().generate(
            IDS, max_new_tokens=3, do_sample=False, return_dict_in_generate=True, use_cache=True
        )
        text = torch.cat((first.sequences, torch.tensor([[7, 9]])), 1)
        cache = getattr(first, "cache", None) or first.past_key_values
        name = "cache" if hasattr(first, "cache") else "past_key_values"
        model().generate(text, max_new_tokens=2, do_sample=False, **{name: cache})
        turns = request.acts["@gate.g"][-1]
    with plan.open(model()) as request:
        model().generate(text, max_new_tokens=2, do_sample=False)
        at_once = request.acts["@gate.g"][-1]
    torch.testing.assert_close(turns, at_once)


def test_a_cache_that_is_cut_back_leaves_the_readings_of_others() -> None:
    plan = fh.Plan(
        fh.gate("g", f"{LAYERS}.0", fh.Norm(), over="so_far"),
        fh.on(f"{LAYERS}.1", fh.Zero(), when=fh.above("g", 0)),
    )
    one, other = transformers.DynamicCache(), transformers.DynamicCache()
    with plan.open(model()):
        for cache in (one, other):
            model()(IDS, past_key_values=cache)
        one.crop(-3)
        for cache in (one, other):
            model()(IDS[:, :1], past_key_values=cache)


@pytest.mark.parametrize("others", [63, 64])
def test_the_readings_of_the_last_64_sequences_are_kept(others: int) -> None:
    plan = fh.Plan(
        fh.gate("g", f"{LAYERS}.0", fh.Norm(), over="so_far"),
        fh.on(f"{LAYERS}.1", fh.Zero(), when=fh.above("g", 0)),
    )
    cache = transformers.DynamicCache()
    with plan.open(model()):
        model()(IDS, past_key_values=cache)
        for _ in range(others):
            model()(IDS[:, :1])
        lost = pytest.raises(fh.HookError, match="at least 64 other sequences ago")
        with lost if others >= 64 else contextlib.nullcontext():
            model()(IDS[:, :1], past_key_values=cache)


def test_a_gate_reads_ahead_of_later_entries_that_run_first() -> None:
    later = fh.on(f"{LAYERS}.0", fh.Add(UP, scale=100.0), prepend=True)
    kept = fh.keep(f"{LAYERS}.0")
    acts = fh.run(model(), IDS, plan=fh.Plan(GATE, kept, later, fh.keep("@gate.g"))).acts
    torch.testing.assert_close(acts["@gate.g"], acts[f"{LAYERS}.0"][0, :, 0])


def test_two_gates_of_one_name_in_json_are_refused_with_the_entry() -> None:
    entry = {"type": "gate", "name": "g", "what": "x", "reading": {"type": "Norm"}}
    with pytest.raises(ValueError, match=r"entries\[1\]: the plan has a gate 'g' already"):
        fh.Plan.from_json({"version": 1, "entries": [entry, entry]})


def test_many_conditions_are_flat() -> None:
    when = functools.reduce(lambda it, _: it & fh.above("g", 0), range(500), fh.above("g", 0))
    plan = fh.Plan(GATE, fh.on("x", fh.Zero(), when=when))
    assert fh.Plan.from_json(plan.to_json()) == plan


def test_readings_keep_no_graph_unless_a_strength_follows_them() -> None:
    own = copy.deepcopy(model()).requires_grad_()
    alive: weakref.WeakSet[Saved] = weakref.WeakSet()

    class Saved:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor.detach()
            alive.add(self)

    followed = fh.on(f"{LAYERS}.1", fh.Add(torch.ones(WIDTH)), strength=fh.ramp("g", 0, 1))
    summed = fh.gate("g", [f"{LAYERS}.0.mlp", f"{LAYERS}.0"], fh.Norm())
    plans = (
        (fh.Plan(GATE, fh.keep("@gate.g")), False),
        (fh.Plan(summed, fh.keep("@gate.g")), False),
        (fh.Plan(GATE, followed), True),
    )
    for plan, kept in plans:
        with (
            torch.enable_grad(),
            torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor),
            plan.open(own) as request,
        ):
            own(IDS)
        gc.collect()
        assert bool(alive) is kept
        assert request.error is None

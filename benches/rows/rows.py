"""Batches: requests that share a forward, each with hooks on its own rows."""

from __future__ import annotations

import copy
import os
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import ferrohook as fh
from benches.harness import Group, Row, Sampler, expect
from benches.rows.models import model_calls

if TYPE_CHECKING:
    from collections.abc import Callable

LAYERS = 8
WIDTH = 512
REQUESTS, TOKENS = 32, 16
FEATURES, TOP = 8 * WIDTH, 32
STEPS = 128
"""Positions after which requests begin again."""
MODULES, MOST = 48, 64
NAMES = [f"layers.{number}" for number in range(LAYERS)]


def llama() -> nn.Module:
    """A Llama of random weights."""
    from transformers import LlamaConfig, LlamaModel  # noqa: PLC0415 (takes seconds)

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=1376,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=1000,
        use_cache=False,
    )
    model: nn.Module = LlamaModel(config).eval()
    return model


def output(model: Callable[..., Any], ids: torch.Tensor) -> torch.Tensor:
    """The last hidden states."""
    found: torch.Tensor = model(ids)[0]
    return found


class Batched:
    """Calls of a model in batches of requests, each of a row."""

    def __init__(self, model: nn.Module, plans: list[fh.Plan]) -> None:
        self.model: Any = model
        self.prepared = [plan.prepare(model) for plan in plans]
        self.requests = [prepared.open() for prepared in self.prepared]
        self.rows: dict[Any, Any] = {request: row for row, request in enumerate(self.requests)}

    def __call__(self, x: torch.Tensor) -> Any:
        """Calls the model in a new batch, as an engine does in each step."""
        with fh.batch(self.rows):
            return self.model(x)


def looped(model: nn.Module, names: list[str], vectors: torch.Tensor, each: int) -> nn.Module:
    """Puts hooks of PyTorch's on modules that loop over the requests of a batch."""

    def steer(_module: object, _args: object, output: torch.Tensor) -> torch.Tensor:
        changed = output.clone()
        for request, vector in enumerate(vectors):
            changed[request * each : (request + 1) * each] += vector
        return changed

    for name in names:
        model.get_submodule(name).register_forward_hook(steer)
    return model


def expect_captured(batched: Batched, requests: int, ids: torch.Tensor) -> None:
    """Checks activations of requests against PyTorch's hooks."""
    kept: dict[str, torch.Tensor] = {}
    plain = llama()
    for name in NAMES:
        plain.get_submodule(name).register_forward_hook(
            lambda _module, _args, output, name=name: kept.update({name: output})
        )
    expect(torch.equal(output(batched, ids), output(plain, ids)), "the plain model's output")
    for row, request in enumerate(batched.requests[:requests]):
        for name in NAMES:
            right = torch.equal(request.acts[name].squeeze(0), kept[name][row])
            expect(right, f"row {row} of {name}")


def shared_forward() -> dict[str, Sampler]:
    """A forward of 32 requests: without hooks, steered, captured."""
    ids = torch.randint(1000, (REQUESTS, TOKENS), generator=torch.Generator().manual_seed(0))
    vectors = torch.randn(REQUESTS, WIDTH)
    nothing, keep = fh.Plan(), fh.Plan(fh.keep(NAMES))
    unhooked = Batched(llama(), [nothing] * REQUESTS)
    steered = Batched(llama(), [fh.Plan(fh.on(NAMES, fh.Add(vector))) for vector in vectors])
    one = Batched(llama(), [keep, *[nothing] * (REQUESTS - 1)])
    captured = Batched(llama(), [keep] * REQUESTS)
    plain, loop = llama(), looped(llama(), NAMES, vectors, 1)
    # Modules with hooks of requests in no batch.
    expect(not keep.prepare(unhooked.model).closed, "a plan prepared")
    with torch.no_grad():
        expect(torch.equal(output(unhooked, ids), output(plain, ids)), "the plain model's output")
        expect(torch.equal(output(steered, ids), output(loop, ids)), "the output of the loop")
        expect_captured(one, 1, ids)
        expect_captured(captured, REQUESTS, ids)
    return {
        "Llama of width 512": model_calls(plain, ids),
        "Llama of width 512, a batch without hooks": model_calls(unhooked, ids),
        "Llama of width 512, 32 requests steered": model_calls(steered, ids),
        "Llama of width 512, a loop over 32 requests in PyTorch's hooks": model_calls(loop, ids),
        "Llama of width 512, 1 request of 32 captured": model_calls(one, ids),
        "Llama of width 512, 32 requests captured": model_calls(captured, ids),
    }


class Decoding:
    """Decode steps of a batch of requests with a KV cache, a token of each in every step."""

    def __init__(self, plan_of: Callable[[torch.Tensor], fh.Plan]) -> None:
        self.model: Any = llama()
        generator = torch.Generator().manual_seed(0)
        vectors = torch.randn(REQUESTS, WIDTH, generator=generator)
        self.prompts = torch.randint(1000, (REQUESTS, TOKENS), generator=generator)
        self.prepared = [plan_of(vector).prepare(self.model) for vector in vectors]
        self.start()

    def start(self) -> None:
        """Runs the prompts of new requests."""
        from transformers import DynamicCache  # noqa: PLC0415 (takes seconds)

        self.requests = [prepared.open() for prepared in self.prepared]
        self.cache, self.length = DynamicCache(), 0
        self(self.prompts)

    def __call__(self, ids: torch.Tensor) -> Any:
        """Calls the model in a new batch, as an engine does in each step."""
        if self.length > STEPS:
            self.start()
        count = ids.shape[1]
        positions = torch.arange(self.length, self.length + count).expand(REQUESTS, -1)
        rows: dict[Any, Any] = {request: row for row, request in enumerate(self.requests)}
        lengths = dict.fromkeys(self.requests, TOKENS)
        with fh.batch(rows, positions=positions, lengths=lengths):
            found = self.model(ids, past_key_values=self.cache, use_cache=True)
        self.length += count
        return found


def decoded() -> dict[str, Sampler]:
    """Decode steps of 32 requests: each steered in a layer, or where its gate allows; a feature."""
    early, late = NAMES[2], NAMES[5]

    def plan(vector: torch.Tensor, *, gated: bool) -> fh.Plan:
        add = fh.Add(vector)
        if not gated:
            return fh.Plan(fh.on(late, add))
        gate = fh.gate("g", early, fh.Cosine(vector), over="so_far")
        return fh.Plan(gate, fh.on(late, add, when=fh.above("g", -1.5)))

    steered = Decoding(lambda vector: plan(vector, gated=False))
    gated = Decoding(lambda vector: plan(vector, gated=True))
    with torch.no_grad():
        ids = steered.prompts[:, :1]
        for _ in range(3):  # a cosine is above that
            right = torch.equal(output(gated, ids), output(steered, ids))
            expect(right, "the output of steered requests")
        expect(all(request.error is None for request in gated.requests), "no request that failed")
    return {
        f"{REQUESTS} tokens decoded, steered": model_calls(steered, ids),
        f"{REQUESTS} tokens decoded, gated and steered": model_calls(gated, ids),
        f"{REQUESTS} tokens decoded, a feature set": model_calls(with_features(), ids),
    }


def dictionary() -> fh.Dictionary:
    """A dictionary of random weights."""
    random = torch.Generator().manual_seed(0)
    shapes = ((WIDTH, FEATURES), (FEATURES, WIDTH))
    encoder, decoder = (torch.randn(it, generator=random) / 8 for it in shapes)
    return fh.Dictionary(encoder, decoder, b_enc=torch.zeros(FEATURES), b_dec=torch.zeros(WIDTH))


def with_features() -> Decoding:
    """Decode steps of 32 requests, a feature of each set in a layer."""
    made, late = dictionary(), NAMES[5]
    numbers = iter(range(REQUESTS))
    changed = Decoding(lambda _: fh.Plan(fh.on(late, fh.Feature(made, next(numbers), set=4.0))))
    by_hand = Decoding(lambda _: fh.Plan())
    rows = torch.arange(REQUESTS)

    def change(_module: object, _args: object, output: torch.Tensor) -> torch.Tensor:
        values = made.encode(output)[rows, :, rows]
        return output + (4.0 - values)[..., None] * made.weights.tensors["W_dec"][rows, None]

    ids = changed.prompts[:, :1]
    with torch.no_grad():
        with fh.register(by_hand.model, late, change):
            by_hand.start()
            expected = output(by_hand, ids)
        close = torch.allclose(output(changed, ids), expected, rtol=1e-3, atol=1e-4)
        expect(close, "the output of features that are set by hand")
        expect(all(request.error is None for request in changed.requests), "no failed request")
    return changed


def kept_features() -> dict[str, Sampler]:
    """A layer of many tokens: the largest features kept, or all encoded from a captured tensor."""
    made, layer = dictionary(), nn.Sequential(nn.Identity())
    weights, x = made.weights.tensors, torch.randn(REQUESTS * TOKENS, WIDTH)
    prepared = fh.Plan(fh.keep("0", features=made, top=TOP)).prepare(layer)
    plain = copy.deepcopy(layer)
    captured: list[torch.Tensor] = []
    plain[0].register_forward_hook(lambda _module, args, _output: captured.append(args[0]))

    def kept(x: torch.Tensor) -> torch.Tensor:
        with prepared.open() as request:
            layer(x)
        found: torch.Tensor = request.acts["0"]
        return found

    def encoded(x: torch.Tensor) -> torch.Tensor:
        plain(x)
        values: torch.Tensor = captured.pop() @ weights["W_enc"] + weights["b_enc"]
        return values.relu()

    with torch.no_grad():
        values, places = kept(x).unbind(-1)
        right = torch.equal(values, encoded(x).gather(-1, places.long()))
        expect(right, "the values that the formula gives")
        expect(torch.equal(values, encoded(x).topk(TOP).values), "the largest ones")
    return {
        f"the {TOP} largest features of {len(x)} tokens kept": model_calls(kept, x),
        f"all features of {len(x)} captured tokens encoded": model_calls(encoded, x),
    }


def modules() -> nn.Sequential:
    """Modules that do nothing."""
    return nn.Sequential(*(nn.Identity() for _ in range(MODULES)))


def steered(
    model: nn.Module, names: list[str], requests: int, each: int
) -> tuple[Batched, nn.Module]:
    """A batch of requests with a vector for `each` rows, and a loop in PyTorch's hooks."""
    vectors = torch.randn(requests, WIDTH)
    plans = [fh.Plan(fh.on(names, fh.Add(vector))) for vector in vectors]
    batched = Batched(copy.deepcopy(model), plans)
    for number, request in enumerate(batched.requests):
        batched.rows[request] = slice(number * each, (number + 1) * each)
    return batched, looped(copy.deepcopy(model), names, vectors, each)


def steered_modules() -> dict[str, Sampler]:
    """Modules whose rows are all steered, by one request or by many, each with its own vector."""
    names = [str(number) for number in range(MODULES)]

    def calls(requests: int, tokens: int, shape: tuple[int, ...]) -> dict[str, Sampler]:
        x = torch.randn(*shape, WIDTH)
        batched, loop = steered(modules(), names, requests, shape[0] // requests)
        with torch.no_grad():
            expect(torch.equal(batched(x), loop(x)), "the output of the loop")
        name = f"a module, {requests} x {tokens} tokens steered"
        return {
            name: model_calls(batched, x, per=MODULES),
            f"{name}, a loop in PyTorch's hook": model_calls(loop, x, per=MODULES),
        }

    return {
        **calls(1, MOST, (MOST,)),
        **calls(MOST, 1, (MOST,)),
        **calls(REQUESTS, TOKENS, (REQUESTS, TOKENS)),
    }


def peak(run: Callable[[], object]) -> int:
    """The most bytes of tensors at a time that a run allocates."""
    os.environ["KINETO_LOG_LEVEL"] = "99"  # else each profile writes lines to stderr
    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        run()
    results: Any = found.profiler
    events = [each for each in results.kineto_results.events() if each.name() == "[memory]"]
    events.sort(key=lambda each: each.start_ns())
    most: int = max(accumulate(each.nbytes() for each in events))
    return most


def memory() -> dict[str, Sampler]:
    """Peaks of a layer's calls, in copies of its output."""
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    copies: dict[str, Sampler] = {}

    def add(name: str, call: Callable[[torch.Tensor], object], *shape: int) -> None:
        x = torch.randn(*shape, WIDTH)
        with torch.no_grad():
            call(x)  # fills the caches
        size = x.numel() * x.element_size()
        copies[name] = lambda _seconds: peak(lambda: call(x)) / size

    add("peak of a layer", plain, MOST, TOKENS)
    for what, each, shape in (("", 1, (MOST, TOKENS)), (" in one row", TOKENS, (MOST * TOKENS,))):
        batched, loop = steered(plain, ["0"], MOST, each)
        x = torch.randn(*shape, WIDTH)
        with torch.no_grad():
            expect(torch.equal(batched(x), loop(x)), "the output of the loop")
        add(f"peak of a layer, {MOST} requests steered{what}", batched, *shape)
    return copies


GROUPS = [
    Group(
        name="32 requests in a forward",
        setup=shared_forward,
        rows=[
            Row(
                name="Llama of width 512, a batch without hooks",
                over="Llama of width 512",
                bar=1.01,
            ),
            Row(
                name="Llama of width 512, 32 requests steered",
                over="Llama of width 512",
                bar=1.05,
            ),
            # The loop's share of such a forward is about a hundredth: see the modules below.
            Row(
                name="Llama of width 512, 32 requests steered",
                over="Llama of width 512, a loop over 32 requests in PyTorch's hooks",
                bar=1.01,
            ),
            Row(
                name="Llama of width 512, 1 request of 32 captured",
                over="Llama of width 512",
                bar=1.02,
            ),
            Row(
                name="Llama of width 512, 32 requests captured",
                over="Llama of width 512",
                bar=1.08,
            ),
        ],
        needs="transformers",
    ),
    Group(
        name="gates and features of 32 requests",
        setup=decoded,
        rows=[
            Row(
                name=f"{REQUESTS} tokens decoded, gated and steered",
                over=f"{REQUESTS} tokens decoded, steered",
                bar=1.03,
            ),
            Row(
                name=f"{REQUESTS} tokens decoded, a feature set",
                over=f"{REQUESTS} tokens decoded, steered",
                bar=1.05,
            ),
        ],
        needs="transformers",
    ),
    Group(
        name="features kept",
        setup=kept_features,
        rows=[
            Row(
                name=f"the {TOP} largest features of {REQUESTS * TOKENS} tokens kept",
                over=f"all features of {REQUESTS * TOKENS} captured tokens encoded",
                bar=1.10,
            ),
        ],
    ),
    Group(
        name="requests at a module",
        setup=steered_modules,
        rows=[
            Row(
                name=f"a module, {MOST} x 1 tokens steered",
                over=f"a module, 1 x {MOST} tokens steered",
                bar=1.30,
            ),
            Row(
                name=f"a module, {REQUESTS} x {TOKENS} tokens steered",
                over=f"a module, {REQUESTS} x {TOKENS} tokens steered, a loop in PyTorch's hook",
                bar=0.90,
            ),
        ],
    ),
    Group(
        name="memory of a steered layer",
        setup=memory,
        unit="copies",
        repeats=1,
        rows=[
            # The result beside the output.
            Row(name=f"peak of a layer, {MOST} requests steered", over="peak of a layer", bar=2.0),
            Row(
                name=f"peak of a layer, {MOST} requests steered in one row",
                over="peak of a layer",
                bar=2.0,
            ),
        ],
    ),
]

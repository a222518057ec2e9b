"""Instrumented models, scopes and captures: against plain models and PyTorch's hooks."""

from __future__ import annotations

import contextvars
from itertools import repeat
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import ferrohook as fh
from ferrohook.benches.harness import Contest, Row, Sampler, expect, one_thread, timed
from ferrohook.benches.hooks import Trivial, X, as_it_is, calls, forward_hooks, no_hooks

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrohook.benches.hooks import Attach

LAYERS = 48
SCOPES = 64
MODULES = 1_000


def instrumented(module: nn.Module) -> nn.Module:
    """The module, instrumented for good."""
    fh.instrument(module)
    return module


def observe(module: nn.Module, args: object, output: object) -> None:
    """A forward hook that does nothing."""


def trivial(ours: Attach, other: Attach) -> Callable[[], Contest]:
    """A trivial module, instrumented and with hooks, against a plain one."""

    def setup() -> Contest:
        hooked, plain = instrumented(Trivial()), Trivial()
        ours(hooked, as_it_is)
        other(plain, as_it_is)
        expect(hooked(X) is plain(X), "the input as the output")
        return Contest(timed(calls(hooked)), timed(calls(plain)))

    return setup


def llama() -> tuple[nn.Module, torch.Tensor]:
    """A small Llama, whose calls are mostly overhead, and its input."""
    from transformers import LlamaConfig, LlamaModel  # noqa: PLC0415 (takes seconds)

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=128,
        use_cache=False,
    )
    return LlamaModel(config).eval(), torch.arange(8)[None]


def model_calls(model: Callable[[Any], object], x: object) -> Sampler:
    """Calls of a model without gradients, on one thread."""

    def loop(count: int) -> None:
        with one_thread(), torch.no_grad():
            for _ in repeat(None, count):
                model(x)

    return timed(loop)


def every_module_of_llama(*, torch_hooks: bool) -> Callable[[], Contest]:
    """A small Llama with an empty forward hook on every module."""

    def setup() -> Contest:
        (hooked, ids), (plain, _) = llama(), llama()
        group = fh.register(hooked, None, observe)
        if torch_hooks:
            for module in plain.modules():
                module.register_forward_hook(observe)
        with torch.no_grad():
            ours, other = hooked(ids)[0], plain(ids)[0]
        expect(torch.equal(ours, other), "the plain model's output")
        expect(group.calls >= len(group) - 1, "a call of every module's hook")
        return Contest(model_calls(hooked, ids), model_calls(plain, ids))

    return setup


def stack() -> nn.Sequential:
    """Many linear layers."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(LAYERS)))


def collected(model: nn.Module) -> Callable[[Any], list[torch.Tensor]]:
    """Calls a model whose layers append their outputs to a list by PyTorch's hooks."""
    kept: list[torch.Tensor] = []
    for layer in model.children():
        layer.register_forward_hook(lambda module, args, output: kept.append(output.detach()))  # noqa: ARG005

    def call(x: torch.Tensor) -> list[torch.Tensor]:
        kept.clear()
        model(x)
        return kept

    return call


def expect_activations(acts: dict[str, torch.Tensor], x: torch.Tensor) -> None:
    """Checks what was captured of `stack` against its layers called one by one."""
    for number, layer in enumerate(stack()):
        x = layer(x)
        expect(torch.equal(acts[str(number)], x), f"the output of layer {number}")


def capture_all(other: Callable[[nn.Module], Callable[[Any], object]]) -> Callable[[], Contest]:
    """All outputs of a stack of layers, in a model that stays instrumented."""

    def setup() -> Contest:
        x = torch.randn(1, 64)
        model = instrumented(stack())
        call = other(stack())
        with torch.no_grad(), fh.capture(model, "*") as acts:
            model(x)
            expect_activations(dict(acts), x)
            if isinstance(kept := call(x), list):
                expect(all(map(torch.equal, kept, acts.values())), "the other's activations")
        # One capture for all calls: what a call costs that is captured.
        return Contest(captured_calls(model, x), model_calls(call, x))

    return setup


def captured_calls(model: nn.Module, x: torch.Tensor) -> Sampler:
    """Calls of a model that is captured."""

    def loop(count: int) -> None:
        with one_thread(), torch.no_grad(), fh.capture(model, "*"):
            for _ in repeat(None, count):
                model(x)

    return timed(loop)


def nnsight(model: nn.Module) -> Callable[[Any], list[torch.Tensor]]:
    """The same by nnsight's tracing."""
    from nnsight import NNsight  # noqa: PLC0415 # pyright: ignore[reportMissingImports]

    traced = NNsight(model)

    def call(x: torch.Tensor) -> list[torch.Tensor]:
        with traced.trace(x):
            kept: list[torch.Tensor] = list().save()  # type: ignore[attr-defined]  # noqa: C408 (nnsight's own)
            for layer in traced:
                kept.append(layer.output)  # noqa: PERF401 (nnsight reads the source)
        return kept  # pyright: ignore[reportPossiblyUnboundVariable]

    return call


def transformer_lens(model: nn.Module) -> Callable[[Any], list[torch.Tensor]]:
    """The same by TransformerLens' `run_with_cache`."""
    from transformer_lens import HookedRootModule  # noqa: PLC0415 # pyright: ignore[reportMissingImports]
    from transformer_lens.hook_points import HookPoint  # noqa: PLC0415 # pyright: ignore[reportMissingImports]

    class Rooted(HookedRootModule):  # type: ignore[misc]  # untyped
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(model.children())
            self.hooks_after = nn.ModuleList(HookPoint() for _ in self.layers)
            self.setup()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer, hook in zip(self.layers, self.hooks_after, strict=True):
                x = hook(layer(x))
            return x

    rooted = Rooted()

    def call(x: torch.Tensor) -> list[torch.Tensor]:
        _, cache = rooted.run_with_cache(x)
        return list(cache.values())

    return call


RIVALS = {"nnsight": nnsight, "transformer_lens": transformer_lens}


def run_and_capture(rival: str) -> Callable[[], Contest]:
    """One call with a capture of its own, against another library's form of that."""

    def setup() -> Contest:
        x = torch.randn(1, 64)
        model, call = instrumented(stack()), RIVALS[rival](stack())

        def run(x: torch.Tensor) -> list[torch.Tensor]:
            _, acts = fh.run(model, x, capture="*")
            return list(acts.values())

        with torch.no_grad():
            expect(all(map(torch.equal, run(x), call(x))), f"the activations of {rival}")
        return Contest(model_calls(run, x), model_calls(call, x))

    return setup


def scopes_elsewhere() -> Contest:
    """A call in one thread while scopes with hooks for the module are open in others."""
    here, alone = instrumented(Trivial()), instrumented(Trivial())
    forward_hooks(1)(here, as_it_is)
    forward_hooks(1)(alone, as_it_is)
    # What other contexts entered: open, and not this one's.
    contexts = [contextvars.copy_context() for _ in range(SCOPES)]
    scopes = [context.run(fh.scope().__enter__) for context in contexts]
    fired: list[object] = []
    for scope in scopes:
        here.register_forward_hook(lambda *_: fired.append(None), scope=scope)  # type: ignore[call-arg]
    expect(here(X) is X and not fired, "no call of another context's hook")
    contexts[0].run(here, X)
    expect(len(fired) == 1, "a call in the context that entered the scope")
    # Kept as long as the contest.
    return Contest(_keeping(timed(calls(here)), (contexts, scopes)), timed(calls(alone)))


def _keeping(sampler: Sampler, alive: object) -> Sampler:
    def sample(seconds: float) -> float:
        assert alive  # noqa: S101 (a reference)
        return sampler(seconds)

    return sample


def instrument_and_restore() -> Contest:
    """Microseconds for each module of a large model."""
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(MODULES - 1)))
    state = [(type(module), dict(vars(module))) for module in model.modules()]

    def loop(count: int) -> None:
        for _ in repeat(None, count):
            fh.instrument(model).restore()

    loop(1)
    after = [(type(module), dict(vars(module))) for module in model.modules()]
    expect(
        all(a[0] is b[0] and a[1].keys() == b[1].keys() for a, b in zip(state, after, strict=True)),
        "the model of before",
    )

    def walk(count: int) -> None:
        for _ in repeat(None, count):
            for _module in model.modules():
                pass

    return Contest(microseconds(timed(loop, per=MODULES)), microseconds(timed(walk, per=MODULES)))


def microseconds(sampler: Sampler) -> Sampler:
    """The same in another unit."""
    return lambda seconds: sampler(seconds) / 1e3


ROWS = [
    Row(
        name="instrumented, no hook / nn.Module without hooks",
        bar=0.35,
        setup=trivial(no_hooks, no_hooks),
    ),
    Row(
        name="instrumented, one forward hook / PyTorch",
        bar=0.20,
        setup=trivial(forward_hooks(1), forward_hooks(1)),
    ),
    Row(
        name="small Llama, a hook on every module / without hooks",
        bar=1.00,
        setup=every_module_of_llama(torch_hooks=False),
        needs="transformers",
    ),
    Row(
        name="small Llama, a hook on every module / PyTorch's hooks",
        bar=0.90,
        setup=every_module_of_llama(torch_hooks=True),
        needs="transformers",
    ),
    Row(
        name="48 linear layers, all captured / nothing captured",
        bar=1.05,
        setup=capture_all(lambda model: model),
    ),
    Row(
        name="48 linear layers, all captured / PyTorch's hooks and a list",
        bar=0.80,
        setup=capture_all(collected),
    ),
    Row(
        name="a call while 64 scopes are open elsewhere / no scope",
        bar=1.10,
        setup=scopes_elsewhere,
    ),
    Row(
        name="instrument + restore, for each of 1,000 modules (other: a walk)",
        bar=20,
        setup=instrument_and_restore,
        unit="µs",
        absolute=True,
    ),
]
for rival, captured_by in RIVALS.items():
    ROWS += [
        Row(
            name=f"48 linear layers, all captured / {rival}",
            bar=0.50,
            setup=capture_all(captured_by),
            needs=rival,
        ),
        Row(
            name=f"the same with a capture opened for each call / {rival}",
            bar=1.00,
            setup=run_and_capture(rival),
            needs=rival,
        ),
    ]

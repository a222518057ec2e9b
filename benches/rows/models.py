"""Instrumented models, scopes and captures: against plain models and PyTorch's hooks."""

from __future__ import annotations

from itertools import repeat
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import ferrohook as fh
from benches.harness import Group, Row, Sampler, expect, one_thread, timed
from benches.rows.calls import instrumented, observe

if TYPE_CHECKING:
    from collections.abc import Callable

LAYERS = 48
MODULES = 1_000


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


def model_calls(
    model: Callable[[Any], object],
    x: object,
    mode: Callable[[], Any] = torch.no_grad,
    *,
    per: int = 1,
) -> Sampler:
    """Calls of a model, without gradients unless `mode` says so, on one thread; see `timed`."""

    def loop(count: int) -> None:
        with one_thread(), mode():
            for _ in repeat(None, count):
                model(x)

    return timed(loop, per)


def every_module_of_llama() -> dict[str, Sampler]:
    """A small Llama without hooks, and with an empty forward hook on every module."""
    (plain, ids), (torchs, _), (ours, _) = llama(), llama(), llama()
    for module in torchs.modules():
        module.register_forward_hook(observe)
    group = fh.register(ours, None, observe)
    with torch.no_grad():
        for hooked in (torchs, ours):
            expect(torch.equal(hooked(ids)[0], plain(ids)[0]), "the plain model's output")
    expect(group.calls >= len(group) - 1, "a call of every module's hook")
    return {
        "small Llama": model_calls(plain, ids),
        "small Llama, PyTorch's hooks on every module": model_calls(torchs, ids),
        "small Llama, our hooks on every module": model_calls(ours, ids),
    }


def stack() -> nn.Sequential:
    """Many linear layers."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(LAYERS)))


def collected(model: nn.Module) -> Callable[[Any], list[torch.Tensor]]:
    """Calls a model whose layers append their outputs to a list by PyTorch's hooks."""
    captured: list[torch.Tensor] = []
    for layer in model.children():
        layer.register_forward_hook(lambda module, args, output: captured.append(output.detach()))  # noqa: ARG005

    def call(x: torch.Tensor) -> list[torch.Tensor]:
        captured.clear()
        model(x)
        return captured

    return call


def expect_activations(acts: dict[str, torch.Tensor], x: torch.Tensor) -> None:
    """Checks the captures of `stack` against its layers called one by one."""
    for number, layer in enumerate(stack()):
        x = layer(x)
        expect(torch.equal(acts[str(number)], x), f"the output of layer {number}")


MODES = {
    "no_grad": torch.no_grad,
    "gradients": torch.enable_grad,
    "inference_mode": torch.inference_mode,
}


def capture_all() -> dict[str, Sampler]:
    """All outputs of a stack of layers: kept and read by name, and by hooks that fill a list."""
    x = torch.randn(1, 64)
    model, append = instrumented(stack()), collected(stack())
    expect_captured(model, x, append)
    kept_and_read = reading(model, fh.Plan(fh.keep("*")))
    by_reference = reading(model, fh.Plan(fh.keep("*", copy="ref")))
    samplers = {
        "48 layers": model_calls(stack(), x),
        "48 layers, all captured": captured_calls(model, x),
    }
    for name, mode in MODES.items():
        with mode():
            expect(all(map(torch.equal, kept_and_read(x), append(x))), "the list's activations")
        samplers[f"48 layers, PyTorch's hooks and a list, {name}"] = model_calls(append, x, mode)
        samplers[f"48 layers, kept and read by name, {name}"] = model_calls(kept_and_read, x, mode)
    samplers["48 layers, kept by reference and read by name, inference_mode"] = model_calls(
        by_reference, x, torch.inference_mode
    )
    return samplers


def reading(model: nn.Module, plan: fh.Plan) -> Callable[[Any], list[torch.Tensor]]:
    """Calls a model for a request that keeps all layers, and reads them by name."""
    prepared = plan.prepare(model)
    names = [str(number) for number in range(LAYERS)]

    def call(x: torch.Tensor) -> list[torch.Tensor]:
        with prepared.open() as request:
            model(x)
        acts = request.acts
        return [acts[name] for name in names]

    return call


def expect_captured(
    model: nn.Module, x: torch.Tensor, other: Callable[[Any], list[torch.Tensor]]
) -> None:
    """Checks that a capture of `model` and the `other` call have the right activations."""
    with torch.no_grad(), fh.capture(model, "*") as acts:
        model(x)
        expect_activations(dict(acts), x)
        captured = other(x)
        expect(len(captured) == LAYERS, "as many activations of the other side")
        expect(all(map(torch.equal, captured, acts.values())), "the other side's activations")


def captured_calls(model: nn.Module, x: torch.Tensor) -> Sampler:
    """Calls of a model that is captured."""

    def loop(count: int) -> None:
        with one_thread(), torch.no_grad(), fh.capture(model, "*"):
            for _ in repeat(None, count):
                model(x)

    return timed(loop)


def nnsight(model: nn.Module) -> Callable[[Any], list[torch.Tensor]]:
    """Captures by nnsight's tracing."""
    from nnsight import NNsight  # noqa: PLC0415 # pyright: ignore[reportMissingImports]

    traced = NNsight(model)

    def call(x: torch.Tensor) -> list[torch.Tensor]:
        with traced.trace(x):
            captured: list[torch.Tensor] = list().save()  # type: ignore[attr-defined]  # noqa: C408 (nnsight's own)
            for layer in traced:
                captured.append(layer.output)  # noqa: PERF401 (nnsight reads the source)
        return captured  # pyright: ignore[reportPossiblyUnboundVariable]

    return call


def transformer_lens(model: nn.Module) -> Callable[[Any], list[torch.Tensor]]:
    """Captures by TransformerLens' `run_with_cache`."""
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


RIVALS = {"nnsight": nnsight, "TransformerLens": transformer_lens}
"""Rivals by their names in the tables."""


def beside(rival: str) -> Callable[[], dict[str, Sampler]]:
    """All outputs of a stack of layers, by ferrohook and by another library."""

    def setup() -> dict[str, Sampler]:
        x = torch.randn(1, 64)
        model, call = instrumented(stack()), RIVALS[rival](stack())

        def run(x: torch.Tensor) -> list[torch.Tensor]:
            _, acts = fh.run(model, x, capture="*")
            return list(acts.values())

        expect_captured(model, x, call)
        with torch.no_grad():
            expect(all(map(torch.equal, run(x), call(x))), f"the activations of {rival}")
        captured, opened, other = beside_names(rival)
        return {
            captured: captured_calls(model, x),
            opened: model_calls(run, x),
            other: model_calls(call, x),
        }

    return setup


def beside_names(rival: str) -> tuple[str, str, str]:
    """The sides of `beside`: importing the rival changes the time of the first two."""
    return (
        f"48 layers, all captured (beside {rival})",
        f"48 layers, a capture opened in each call (beside {rival})",
        f"{rival}: 48 layers, all captured",
    )


def instrument_and_restore() -> dict[str, Sampler]:
    """Time for each module of a large model."""
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

    return {
        "instrument + restore, each of 1,000 modules": timed(loop, per=MODULES, nanoseconds=1e3),
        "a walk over them": timed(walk, per=MODULES, nanoseconds=1e3),
    }


GROUPS = [
    Group(
        name="a hook on every module of a small Llama",
        setup=every_module_of_llama,
        rows=[
            Row(
                name="small Llama, our hooks on every module",
                over="small Llama",
                bar=1.00,
            ),
            Row(
                name="small Llama, our hooks on every module",
                over="small Llama, PyTorch's hooks on every module",
                bar=0.90,
            ),
        ],
        needs="transformers",
    ),
    Group(
        name="captures of 48 linear layers",
        setup=capture_all,
        rows=[
            Row(name="48 layers, all captured", over="48 layers", bar=1.05),
            *(
                Row(
                    name=f"48 layers, kept and read by name, {mode}",
                    over=f"48 layers, PyTorch's hooks and a list, {mode}",
                    bar=bar,
                )
                for mode, bar in zip(MODES, (0.80, 0.85, 0.90), strict=True)
            ),
            Row(
                name="48 layers, kept by reference and read by name, inference_mode",
                over="48 layers, PyTorch's hooks and a list, inference_mode",
                bar=0.90,
            ),
        ],
    ),
    Group(
        name="instrumenting",
        setup=instrument_and_restore,
        rows=[
            Row(
                name="instrument + restore, each of 1,000 modules",
                over="a walk over them",
                bar=20,
                absolute=True,
            )
        ],
        unit="µs",
    ),
]
for rival, module in {"nnsight": "nnsight", "TransformerLens": "transformer_lens"}.items():
    captured, opened, other = beside_names(rival)
    GROUPS.append(
        Group(
            name=f"captures of 48 linear layers, beside {rival}",
            setup=beside(rival),
            rows=[
                Row(name=captured, over=other, bar=0.50),
                Row(name=opened, over=other, bar=1.00),
            ],
            needs=module,
        )
    )

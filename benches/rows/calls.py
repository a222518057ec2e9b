"""Calls of a module that does nothing: pure overhead."""

from __future__ import annotations

import contextvars
from itertools import repeat
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

import ferrohook as fh
from benches.harness import Group, Row, Sampler, expect, timed
from ferrohook.compat import mi_crow as interventions

if TYPE_CHECKING:
    from collections.abc import Callable

    Hook: TypeAlias = Callable[..., Any]
    Wrap: TypeAlias = Callable[[Hook], Hook]
    Attach: TypeAlias = Callable[[nn.Module, Wrap], None]

X = torch.arange(3.0)
BURST = 100_000
SCOPES = 64


class Trivial(nn.Module):
    """Returns its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the input."""
        return x


class TrivialWithKeyword(nn.Module):
    """A `Trivial` with a keyword argument."""

    def forward(self, x: torch.Tensor, *, flag: bool) -> torch.Tensor:  # noqa: ARG002
        """Returns the input."""
        return x


def no_hooks(module: nn.Module, wrap: Wrap) -> None:
    """Attaches nothing."""


def observe(module: nn.Module, args: object, output: object) -> None:
    """A forward hook that does nothing."""


def forward_hooks(count: int) -> Attach:
    """Attaches forward hooks that observe."""

    def attach(module: nn.Module, wrap: Wrap) -> None:
        for _ in range(count):
            module.register_forward_hook(wrap(lambda module, args, output: None))  # noqa: ARG005

    return attach


def replacing_hooks(module: nn.Module, wrap: Wrap) -> None:
    """Attaches three pre- and three forward hooks that return a value each."""
    for _ in range(3):
        module.register_forward_pre_hook(wrap(lambda module, args: args))  # noqa: ARG005
        module.register_forward_hook(wrap(lambda module, args, output: output))  # noqa: ARG005


def keyword_hook(module: nn.Module, wrap: Wrap) -> None:
    """Attaches a forward hook that gets the keyword arguments."""
    hook = wrap(lambda module, args, kwargs, output: None)  # noqa: ARG005
    module.register_forward_hook(hook, with_kwargs=True)


def unwrapped(hook: Hook) -> Hook:
    """Wraps a hook in nothing."""
    return hook


class Recorder:
    """Wraps hooks: logs their arguments and changes their results.

    The changes do not commute, so a hook that is skipped, called twice or called out of order
    shows in the output.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self._hooks = 0

    def __call__(self, hook: Hook) -> Hook:
        """Returns the hook that records."""
        index = self._hooks
        self._hooks += 1

        def recorded(module: object, *arguments: object) -> object:
            self.log.append(f"{index}: {arguments}")
            result = hook(module, *arguments)
            if isinstance(result, torch.Tensor):
                return result * 2 + index
            if isinstance(result, tuple):
                return (result[0] * 2 + index, *result[1:])
            return result

        return recorded


def expect_as_pytorch(inner: type[nn.Module], attach: Attach, **kwargs: object) -> None:
    """Checks that hooks do the same on a `HookedModule` as on the plain module."""
    outputs, logs = [], []
    for module in (fh.HookedModule(inner()), inner()):
        recorder = Recorder()
        attach(module, recorder)
        outputs.append(module(X, **kwargs))
        logs.append(recorder.log)
    ours, torchs = logs
    expect(torch.equal(*outputs), f"the output of PyTorch, {outputs[1]}, not {outputs[0]}")
    expect(ours == torchs, f"the calls of PyTorch, {torchs}, not {ours}")


def calls(module: nn.Module, *, keyword: bool = False, per: int = 1) -> Sampler:
    """Samples the time of a call of `module`, or of its `per` parts."""

    def loop(count: int) -> None:
        # Local variables: the loop should cost as little as it can.
        call, x = module, X
        for _ in repeat(None, count):
            call(x)

    def loop_with_keyword(count: int) -> None:
        call, x = module, X
        for _ in repeat(None, count):
            call(x, flag=True)

    return timed(loop_with_keyword if keyword else loop, per)


def with_hooks(module: nn.Module, attach: Attach) -> nn.Module:
    """The module, with hooks."""
    attach(module, unwrapped)
    return module


def instrumented(module: nn.Module) -> nn.Module:
    """The module, instrumented for good."""
    fh.instrument(module)
    return module


def wrapped() -> dict[str, Sampler]:
    """Hooks on plain and on wrapped modules, in a process that instruments nothing."""
    attached = {
        "": no_hooks,
        ", one hook": forward_hooks(1),
        ", eight hooks": forward_hooks(8),
        ", six hooks that replace": replacing_hooks,
    }
    samplers = {}
    for name, attach in attached.items():
        expect_as_pytorch(Trivial, attach)
        samplers[f"nn.Module{name}"] = calls(with_hooks(Trivial(), attach))
        samplers[f"HookedModule{name}"] = calls(with_hooks(fh.HookedModule(Trivial()), attach))
    return {**samplers, "HookedModule, one typed hook": calls(typed())}


BESIDE = "nn.Module beside instrumented ones"


def instrumented_modules() -> dict[str, Sampler]:
    """Hooks on plain and on instrumented modules."""
    sides = {
        BESIDE: Trivial(),
        f"{BESIDE}, one hook": with_hooks(Trivial(), forward_hooks(1)),
        "instrumented": instrumented(Trivial()),
        "instrumented, one hook": with_hooks(instrumented(Trivial()), forward_hooks(1)),
        "instrumented, a disabled detector": disabled(),
    }
    for name, module in sides.items():
        expect(module(X) is X, f"the input as the output of {name}")
    samplers = {name: calls(module) for name, module in sides.items()}
    return {**samplers, "instrumented, one hook, 64 scopes elsewhere": scopes_elsewhere()}


def typed() -> nn.Module:
    """A module with a typed hook that observes."""
    pair: list[torch.Tensor] = []
    checked = fh.HookedModule(Trivial())
    checked.register_forward_hook(fh.ForwardHook(lambda x, y: pair.extend((x, y))))
    output = checked(X)
    expect(len(pair) == 2 and pair[0] is X and pair[1] is output, "input and output, once")  # noqa: PLR2004
    module = fh.HookedModule(Trivial())
    module.register_forward_hook(fh.ForwardHook(lambda x, y: None))  # noqa: ARG005
    return module


class Counter(interventions.Detector):
    """Counts its calls."""

    count = 0

    def process_activations(self, module: nn.Module, input: Any, output: Any) -> None:  # noqa: A002, ARG002 (the contract's)
        """Counts one."""
        self.count += 1


def disabled() -> nn.Module:
    """A module with a disabled detector."""
    module, detector = Trivial(), Counter()
    interventions.Layers(module).register_hook("", detector)
    detector.disable()
    expect(module(X) is X and detector.count == 0, "the detector not to be called")
    return module


def scopes_elsewhere() -> Sampler:
    """Calls in one context while scopes with hooks for the module are open in others."""
    module = with_hooks(instrumented(Trivial()), forward_hooks(1))
    contexts = [contextvars.copy_context() for _ in range(SCOPES)]
    scopes = [context.run(fh.scope().__enter__) for context in contexts]
    fired: list[object] = []
    for scope in scopes:
        module.register_forward_hook(lambda *_: fired.append(None), scope=scope)  # type: ignore[call-arg]
    expect(module(X) is X and not fired, "no call of another context's hook")
    contexts[0].run(module, X)
    expect(len(fired) == 1, "a call in the context that entered the scope")
    sampler = calls(module)

    def sample(seconds: float) -> float:
        assert scopes  # noqa: S101 (a reference)
        return sampler(seconds)

    return sample


def with_keywords() -> dict[str, Sampler]:
    """A call with keyword arguments and a hook that gets them."""
    expect_as_pytorch(TrivialWithKeyword, keyword_hook, flag=True)
    ours, theirs = fh.HookedModule(TrivialWithKeyword()), TrivialWithKeyword()
    return {
        "HookedModule, a with_kwargs hook": calls(with_hooks(ours, keyword_hook), keyword=True),
        "nn.Module, a with_kwargs hook": calls(with_hooks(theirs, keyword_hook), keyword=True),
    }


def after_many() -> dict[str, Sampler]:
    """A module that a million hooks came and went on, and a new one; both have one hook."""
    used, new = fh.HookedModule(Trivial()), fh.HookedModule(Trivial())
    live = used.register_forward_hook(observe)
    new.register_forward_hook(observe)
    fired: list[object] = []
    for _ in range(1_000_000 // BURST):
        handles = [
            used.register_forward_hook(lambda *arguments: fired.append(arguments))
            for _ in range(BURST)
        ]
        for handle in handles:
            handle.remove()
        before = live.calls
        expect(torch.equal(used(X), X), "the input as output")
        expect(not fired, f"no removed hook to fire, {len(fired)} did")
        expect(live.calls == before + 1, "the hook that stayed to fire once")
    return {"a call after 10⁶ hooks came and went": calls(used), "a call before": calls(new)}


def many_per_hook() -> dict[str, Sampler]:
    """The time per hook of a call with a thousand hooks and of one with ten."""
    samplers = {}
    for count in (1_000, 10):
        expect_as_pytorch(Trivial, forward_hooks(count))
        module = with_hooks(fh.HookedModule(Trivial()), forward_hooks(count))
        samplers[f"each hook of {count:,} in a call"] = calls(module, per=count)
    return samplers


GROUPS = [
    Group(
        name="calls of a module that does nothing",
        setup=wrapped,
        rows=[
            Row(name="HookedModule", over="nn.Module", bar=0.30),
            Row(name="HookedModule, one hook", over="nn.Module", bar=0.35),
            Row(name="HookedModule, one hook", over="nn.Module, one hook", bar=0.15),
            Row(name="HookedModule, eight hooks", over="nn.Module, eight hooks", bar=0.15),
            Row(
                name="HookedModule, six hooks that replace",
                over="nn.Module, six hooks that replace",
                bar=0.20,
            ),
            Row(name="HookedModule, one typed hook", over="HookedModule, one hook", bar=1.3),
        ],
    ),
    Group(
        name="calls of an instrumented module that does nothing",
        setup=instrumented_modules,
        rows=[
            Row(name="instrumented", over=BESIDE, bar=0.35),
            Row(name="instrumented, one hook", over=f"{BESIDE}, one hook", bar=0.20),
            Row(name="instrumented, a disabled detector", over=BESIDE, bar=0.60),
            Row(
                name="instrumented, one hook, 64 scopes elsewhere",
                over="instrumented, one hook",
                bar=1.10,
            ),
        ],
    ),
    Group(
        name="a call with keywords",
        setup=with_keywords,
        rows=[
            Row(
                name="HookedModule, a with_kwargs hook",
                over="nn.Module, a with_kwargs hook",
                bar=0.30,
            )
        ],
    ),
    Group(
        name="hooks that came and went",
        setup=after_many,
        rows=[Row(name="a call after 10⁶ hooks came and went", over="a call before", bar=1.1)],
    ),
    Group(
        name="many hooks",
        setup=many_per_hook,
        rows=[
            Row(name="each hook of 1,000 in a call", over="each hook of 10 in a call", bar=1.1),
        ],
    ),
]

"""Types of the public names; checked by mypy and pyright, never run."""

from typing import Any, Literal, assert_type

import torch
from torch import Tensor, nn

import ferrohook as fh
from ferrohook.service import ModelMetrics, RequestScope, check_deadline

hooked = fh.HookedModule(nn.Linear(4, 2))
assert_type(hooked, fh.HookedModule[nn.Linear])
assert_type(hooked.inner, nn.Linear)
assert_type(hooked.inner.in_features, int)
assert_type(hooked.into_inner(), nn.Linear)

nested = fh.HookedModule(hooked)
assert_type(nested.inner.inner, nn.Linear)


class Pair(nn.Module):
    def forward(self, one: Tensor, *, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        return one * scale, one


# A call has the arguments and the result of the module's forward.
assert_type(hooked(torch.ones(4)), Tensor)
assert_type(fh.HookedModule(Pair())(torch.ones(4), scale=2.0), tuple[Tensor, Tensor])
assert_type(nested(torch.ones(4)), Any)
fh.HookedModule(Pair())(torch.ones(4), scael=2.0)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
hooked("a text")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def of_any_module(module: nn.Module) -> None:
    assert_type(fh.HookedModule(module)(1, flag=True), Any)


@fh.ForwardPreHook
def double(input: Tensor) -> Tensor:
    return input * 2


@fh.ForwardHook
def watch(input: Tensor, output: Tensor) -> None:
    print(input.shape, output.shape)


@fh.BackwardHook
def watch_grads(
    grad_input: tuple[Tensor | None, ...], grad_output: tuple[Tensor | None, ...]
) -> None:
    print(len(grad_input), len(grad_output))


assert_type(double, fh.ForwardPreHook[Tensor])
assert_type(watch, fh.ForwardHook[Tensor, Tensor])
assert_type(watch_grads, fh.BackwardHook)
assert_type(double(torch.ones(1)), Tensor)
fh.ForwardHook(lambda _input, _output: 1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
fh.ForwardPreHook(3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]

assert_type(hooked.register_forward_pre_hook(double), fh.typing.HookHandle)
assert_type(
    hooked.register_forward_hook(watch, priority=1, on_error="disable"), fh.typing.HookHandle
)
assert_type(hooked.register_full_backward_hook(watch_grads, prepend=True), fh.typing.HookHandle)
assert_type(hooked.register_backward_hook(watch_grads), fh.typing.HookHandle)
hooked.register_forward_hook(watch, on_error="explode")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
hooked.register_forward_hook(double)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
hooked.register_full_backward_pre_hook(double)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
hooked.register_forward_hook(3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def plain(module: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
    return output + args[0].sum() + sum(1 for _ in module.parameters())


def keywords(
    module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], output: Tensor
) -> None:
    print(module, args, kwargs, output)


with hooked.register_forward_hook(plain) as handle:
    assert_type(handle, fh.typing.HookHandle)
    assert_type(handle.id, int)
    assert_type(handle.calls, int)
    handle.priority = 3
    handle.remove(wait=True, timeout=1.0)
hooked.register_forward_hook(keywords, with_kwargs=True)

for hook in hooked.hooks("forward"):
    assert_type(hook.priority, int)
    assert_type(hook.enabled, bool)

assert_type(fh.Add(torch.ones(4), 2, output_index="sum"), fh.Add)
assert_type(fh.Clamp(torch.ones(4), low=0.0), fh.Clamp)
fh.Add([1.0])  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
fh.Add(torch.ones(4), 3, 4)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
fh.Add(torch.ones(4), foo="x")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
fh.Zero(1)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]

norms = fh.detectors.NormDetector()
assert_type(hooked.register_forward_hook(norms), fh.typing.HookHandle)
assert_type(hooked.register_forward_pre_hook(norms), fh.typing.HookHandle)
assert_type(fh.register(hooked, "", norms), fh.typing.HandleGroup)
fh.register(hooked, "", watch, phase="sideways")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
fh.register(hooked, "", watch, on_error="explode")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
fh.on("", watch, phase="sideways")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
fh.on("", watch, on_error="explode")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
hooked.hooks("sideways")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
assert_type(norms.merge(fh.detectors.NormDetector()), None)
norms.merge(fh.detectors.CallCounter())  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]

with fh.data.LocalStore("folder") as local:
    assert_type(local, fh.data.LocalStore)
    assert_type(fh.collect(hooked, [torch.ones(4)], ["", nn.Linear], local), fh.typing.Collected)
    assert_type(local.get("run", 0, ""), dict[str, Tensor])


class Counted(fh.HookedModule[nn.Linear]):
    def __init__(self, module: nn.Linear, limit: int = 100) -> None:
        super().__init__(module)
        self.limit = limit


assert_type(Counted(nn.Linear(4, 2), limit=3).inner, nn.Linear)
Counted(nn.Linear(4, 2), limt=3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


def lambdas(model: nn.Module, seen: list[Tensor]) -> None:
    fh.register(model, "0", fh.ForwardHook(lambda _x, y: seen.append(y)))
    look = fh.ForwardHook(lambda _x, y: seen.append(y.norm()))
    fh.HookedModule(model).register_forward_hook(look)
    fh.HookedModule(model).register_forward_pre_hook(fh.ForwardPreHook(lambda x: x))


def runs(model: nn.Module, chosen: str | list[type[nn.Module]], any_: str | None) -> None:
    _, acts = fh.run(model, 1, capture=chosen, hooks={"": watch}, flag=True)
    assert_type(acts, fh.ActivationCache[Tensor])
    assert_type(acts["mlp"].shape, torch.Size)
    assert_type(
        fh.run(model, 1, capture=lambda name, _module: "mlp" in name)[1], fh.ActivationCache[Tensor]
    )
    assert_type(fh.run(model, 1, plan=fh.Plan()).output, Any)
    print(fh.run(model, capture=any_))
    fh.run(model, capture=3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def captures(model: nn.Module, calls: Literal["last", "all"]) -> None:
    with fh.capture(model, "layers.*", dtype=torch.half, stop=True) as acts:
        model(1)
    assert_type(acts["layers.0"], Tensor)
    assert_type(acts["layers.0"].shape, torch.Size)
    assert_type([*acts.values()], list[Tensor])
    assert_type(acts.to("cpu")["layers.0"], Tensor)
    with fh.capture(model, calls="all") as each:
        assert_type(torch.stack(each["layers.0"]), Tensor)
    with fh.capture(model, calls=3) as last:
        assert_type(last["layers.0"], list[Tensor])
    assert_type(fh.capture(model, calls=calls).acts["layers.0"], Tensor | list[Tensor])
    with fh.capture(model, "") as root:
        assert_type(root[""].logits, Any)
    bare: fh.ActivationCache = acts
    assert_type(bare["layers.0"].shape, Any)
    assert_type(fh.Plan().prepare(model).open().acts["layers.0"].shape, Any)
    fh.capture(model, copy="deep")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    fh.capture(model, call="all")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]


def endpoint(scope: RequestScope) -> None:
    assert_type(scope, fh.Scope)
    fh.register(hooked, "", check_deadline, phase="forward_pre", scope=scope)
    fh.register(hooked, "", check_deadline, phase="forward_pre", scope="global")
    fh.register(hooked, "", watch, scope="all")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


assert_type(ModelMetrics(hooked, buckets=(0.1, 1.0)).close(), None)
assert_type(fh.service.ModelMetrics(hooked), ModelMetrics)

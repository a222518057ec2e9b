"""Ways into a repeat that the machine of `test_checkpointing_machine.py` does not draw."""

from __future__ import annotations

import contextvars
import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import ferrohook as fh
from support.limits import LIMIT

if TYPE_CHECKING:
    from collections.abc import Callable

X = torch.linspace(-1.0, 1.0, 6).reshape(2, 3)
KINDS = pytest.mark.parametrize("reentrant", [True, False])


@pytest.fixture
def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh())


def gradient(run: Callable[[Tensor], Tensor]) -> Tensor:
    x = X.clone().requires_grad_()
    run(x).sum().backward()
    assert x.grad is not None
    return x.grad


@KINDS
def test_segments_of_a_sequence_are_repeated_with_their_hooks(
    model: nn.Sequential, reentrant: bool
) -> None:
    with fh.scope():
        handle = fh.register(model, "2", fh.Scale(3.0))
        expected = gradient(model)

        def run(x: Tensor) -> Tensor:
            output = checkpoint_sequential(model, 2, x, use_reentrant=reentrant)
            handle.disable()
            return output  # type: ignore[no-any-return]

        assert torch.equal(gradient(run), expected)


def test_a_selective_checkpoint_is_repeated_with_its_hooks(model: nn.Sequential) -> None:
    def policy(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        saved = operator is torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    def run(x: Tensor) -> Tensor:
        contexts = lambda: create_selective_checkpoint_contexts(policy)  # noqa: E731
        output: Tensor = checkpoint(model, x, use_reentrant=False, context_fn=contexts)
        handle.disable()
        return output

    with fh.scope():
        handle = fh.register(model, "2", lambda _module, _args, output: output.sin())
        expected = gradient(model)
        assert torch.equal(gradient(run), expected)


@KINDS
def test_a_function_that_registers_hooks_itself_is_repeated_with_its_own(
    model: nn.Sequential, reentrant: bool
) -> None:
    def everybody(x: Tensor) -> Tensor:
        with fh.register(model, "0", fh.Scale(2.0), scope="global"):
            return model(x)  # type: ignore[no-any-return]

    def scoped(x: Tensor) -> Tensor:
        with fh.scope():
            fh.register(model, "0", fh.Scale(2.0))
            return model(x)  # type: ignore[no-any-return]

    def through_run(x: Tensor) -> Tensor:
        return fh.run(model, x, hooks={"0": fh.Scale(2.0)}).output  # type: ignore[no-any-return]

    def lazily(x: Tensor) -> Tensor:
        if not registered:
            registered.append(fh.register(model, "0", fh.Scale(2.0), scope="global"))
        return model(x)  # type: ignore[no-any-return]

    registered: list[fh.typing.HandleGroup] = []
    for function in (everybody, scoped, through_run, lazily):
        expected = gradient(function)
        for handle in registered:
            handle.remove()
        registered.clear()
        with fh.scope():
            fh.register(model, "2", fh.Add(torch.ones(3)))
            other = gradient(function)
            for handle in registered:
                handle.remove()
            registered.clear()
            found = gradient(lambda x, it=function: checkpoint(it, x, use_reentrant=reentrant))  # type: ignore[misc]
        assert torch.equal(found, other), function.__name__
        assert not torch.equal(found, expected)
        for handle in registered:
            handle.remove()
        registered.clear()


@KINDS
def test_always_called_hooks_do_not_see_the_end_of_a_repeat(
    model: nn.Sequential, reentrant: bool
) -> None:
    outputs: list[Any] = []
    hooked = fh.HookedModule(model)
    hooked.register_forward_hook(
        lambda _module, _args, output: outputs.append(output), always_call=True
    )
    gradient(lambda x: checkpoint(hooked, x, use_reentrant=reentrant))
    assert all(isinstance(output, Tensor) for output in outputs)


@KINDS
def test_two_threads_repeat_their_forwards_at_once(model: nn.Sequential, reentrant: bool) -> None:
    barrier = threading.Barrier(2, timeout=LIMIT)

    def steered(factor: float | None) -> Tensor:
        with fh.scope() as scope:
            if factor is not None:
                fh.register(model, "0", fh.Scale(factor), scope=scope)
            x = X.clone().requires_grad_()
            output = checkpoint(model, x, use_reentrant=reentrant)
            with fh.capture(model, "0", calls="all") as acts:
                for _ in range(20):
                    barrier.wait()
                    output.sum().backward(retain_graph=True)
                model(X)
            assert len(acts["0"]) == 1
        assert x.grad is not None
        return x.grad / 20

    expected = {
        factor: gradient(functools.partial(model_with, model, factor)) for factor in (None, 3.0)
    }
    with ThreadPoolExecutor(2) as pool:
        runs = {factor: pool.submit(steered, factor) for factor in expected}
        for factor, run in runs.items():
            torch.testing.assert_close(run.result(LIMIT), expected[factor])


def model_with(model: nn.Module, factor: float | None, x: Tensor) -> Tensor:
    if factor is None:
        return model(x)  # type: ignore[no-any-return]
    return fh.run(model, x, hooks={"0": fh.Scale(factor)}).output  # type: ignore[no-any-return]


@KINDS
def test_a_hook_that_is_removed_in_the_repeat_is_reported(
    model: nn.Sequential, reentrant: bool
) -> None:
    calls: list[int] = []

    def removes(*_: Any) -> None:
        calls.append(1)
        if len(calls) > 1:
            handle.remove()

    with fh.scope():
        fh.register(model, "0", removes)
        handle = fh.register(model, "2", fh.Scale(2.0))
        x = X.clone().requires_grad_()
        output = checkpoint(model, x, use_reentrant=reentrant)
        with pytest.raises(
            fh.HookError, match=r"the hook that ran in it was removed.*: without .*Scale"
        ):
            output.sum().backward()


def tripled(model: nn.Sequential, rows: int) -> Tensor:
    """The gradient of a model whose first layer's first rows count three times, by hand."""

    def run(x: Tensor) -> Tensor:
        hidden: Tensor = model[0](x)
        factor = torch.tensor([3.0 if row < rows else 1.0 for row in range(len(x))])
        return model[1:](hidden * factor[:, None])  # type: ignore[no-any-return]

    return gradient(run)


@KINDS
def test_a_batch_that_a_checkpointed_function_enters_is_repeated(
    model: nn.Sequential, reentrant: bool
) -> None:
    prepared = fh.Plan(fh.on("0", fh.Scale(3.0)), fh.keep("2", calls="all")).prepare(model)
    request = prepared.open()

    def run(x: Tensor) -> Tensor:
        with fh.batch({request: 0}):
            return model(x)  # type: ignore[no-any-return]

    expected = tripled(model, 1)
    found = gradient(lambda x: checkpoint(run, x, use_reentrant=reentrant))
    torch.testing.assert_close(found, expected)
    assert len(request.acts["2"]) == 1


@KINDS
def test_backward_behind_the_batch_of_its_forward_is_refused(
    model: nn.Sequential, reentrant: bool
) -> None:
    request = fh.Plan(fh.on("0", fh.Scale(3.0))).prepare(model).open()
    with fh.batch({request: 0}):
        output = checkpoint(model, X.clone().requires_grad_(), use_reentrant=reentrant)
    with pytest.raises(fh.HookError, match=r"or its batch was left: without .*Scale"):
        output.sum().backward()


@KINDS
def test_a_thread_in_the_context_of_a_checkpointed_function_is_repeated(
    model: nn.Sequential, reentrant: bool
) -> None:
    def run(x: Tensor) -> Tensor:
        outputs: list[Tensor] = []

        def work() -> None:
            with torch.set_grad_enabled(enabled):
                outputs.append(model(x))

        enabled, context = torch.is_grad_enabled(), contextvars.copy_context()
        thread = threading.Thread(target=context.run, args=(work,))
        thread.start()
        thread.join(LIMIT)
        return outputs[0]

    foreign: list[int] = []

    def backward(output: Tensor) -> None:
        with fh.scope():
            fh.register(model, "*", lambda *_: foreign.append(1))
            output.sum().backward()

    with fh.scope():
        fh.register(model, "0", fh.Scale(3.0))
        x = X.clone().requires_grad_()
        output = checkpoint(run, x, use_reentrant=reentrant)
        contextvars.Context().run(backward, output)
    assert not foreign
    assert x.grad is not None
    torch.testing.assert_close(x.grad, tripled(model, len(X)))


@KINDS
@pytest.mark.parametrize("compiled", ["inside", "around"])
def test_compilation_and_checkpoints_in_each_other(
    model: nn.Sequential, reentrant: bool, compiled: str
) -> None:
    run: Any = functools.partial(checkpoint, model, use_reentrant=reentrant)
    if compiled == "inside":
        inner = torch.compile(model, backend="aot_eager")
        run = functools.partial(checkpoint, inner, use_reentrant=reentrant)
    else:
        run = torch.compile(run, backend="aot_eager")
    plan = fh.Plan(fh.on("0", fh.Scale(3.0)), fh.keep("2", calls="all"))
    foreign: list[int] = []

    def backward(output: Tensor) -> None:
        with fh.scope():
            fh.register(model, "*", lambda *_: foreign.append(1))
            output.sum().backward()

    with plan.prepare(model) as prepared, prepared.open() as request:
        x = X.clone().requires_grad_()
        contextvars.Context().run(backward, run(x))
    assert not foreign
    assert len(request.acts["2"]) == 1
    assert x.grad is not None
    torch.testing.assert_close(x.grad, tripled(model, len(X)))


@KINDS
def test_an_exception_in_a_repeat_leaves_nothing_behind(
    model: nn.Sequential, reentrant: bool
) -> None:
    calls: list[int] = []

    def fails_again(*_: Any) -> None:
        calls.append(1)
        if len(calls) > 1:
            raise ZeroDivisionError

    expected = gradient(model)
    with fh.scope():
        handle = fh.register(model, "0", fails_again)
        x = X.clone().requires_grad_()
        output = checkpoint(model, x, use_reentrant=reentrant)
        with pytest.raises(ZeroDivisionError):
            output.sum().backward()
        handle.remove()
        assert torch.equal(gradient(model), expected)


@KINDS
def test_positions_of_a_capture_save_nothing_for_backward(reentrant: bool) -> None:
    """A capture at positions takes rows of a tensor: its indices are not saved by the forward."""

    class Tokens(nn.Module):
        def __init__(self, *, repeats: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.layer, self.repeats = nn.Embedding(8, 3), nn.Linear(3, 3), repeats

        def forward(self, input_ids: Tensor) -> Tensor:
            x = self.embed(input_ids)
            run: Callable[[Tensor], Tensor] = lambda x: self.layer(x).tanh()  # noqa: E731
            return checkpoint(run, x, use_reentrant=reentrant) if self.repeats else run(x)

    found = []
    for repeats in (False, True):
        model = Tokens(repeats=repeats)
        with fh.Plan(fh.keep("layer", at=[0, -1][0])).prepare(model) as prepared:
            with prepared.open() as request:
                model(torch.arange(5)[None]).sum().backward()
            found.append((model.embed.weight.grad, request.acts["layer"]))
    torch.testing.assert_close(found[0], found[1])


@KINDS
def test_gradients_of_a_capture_are_the_sum_of_all_backward_passes(
    model: nn.Sequential, reentrant: bool
) -> None:
    h = model[0](X).detach().requires_grad_()
    model[1:](h).sum().backward()
    assert h.grad is not None
    expected = h.grad.clone()
    model[1:](h).sum().backward()
    repeated = functools.partial(checkpoint, model, use_reentrant=reentrant)
    runs: list[Any] = [model, repeated]
    for run in runs:
        x = X.clone().requires_grad_()
        with fh.capture(model, "0", grads=True) as acts:
            output = run(x)
        output.sum().backward(retain_graph=True)
        torch.testing.assert_close(acts.grads["0"], expected)
        output.sum().backward()
        torch.testing.assert_close(acts.grads["0"], h.grad)


@KINDS
def test_a_log_keeps_no_hook_alive(model: nn.Sequential, reentrant: bool) -> None:
    import weakref  # noqa: PLC0415

    class Hook:
        def __call__(self, *_: Any) -> None:
            return None

    hook = Hook()
    alive = weakref.ref(hook)
    with fh.scope():
        fh.register(model, "0", hook)
        output = checkpoint(model, X.clone().requires_grad_(), use_reentrant=reentrant)
    del hook
    assert alive() is None
    assert output.requires_grad

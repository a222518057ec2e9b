"""Backward hooks on autograd's tape.

`torch.utils.hooks.BackwardHook` puts a module's inputs and outputs through one autograd node each
and calls back with the gradients. It takes tensors and tuples of them; this module converts other
structures and keyword inputs to tuples and back.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch._C._functorch import maybe_current_level
from torch.nn.modules.module import _WrappedHook
from torch.utils.hooks import BackwardHook

from ferrohook.util.tensors import DEEPEST, map_tensors, nested_of, parts, rebuilt, tensors_in

if TYPE_CHECKING:
    from torch import nn

Hook: TypeAlias = Callable[..., Any]


class BackwardPass(BackwardHook):
    """The backward phases of one call.

    The phases begin when autograd reaches them: hooks removed after the forward do not fire, and
    hooks registered after it do, if the call was made with a hook of that phase.
    """

    def __init__(self, module: nn.Module, pre: list[Hook], full: list[Hook]) -> None:
        """Prepares a call of `module` for its `backward_pre` and `backward` hooks.

        The registry adds one hook per phase, which walks that phase's snapshot.
        """
        super().__init__(module, full, pre)

    # `self` is any BackwardHook; its own methods have no types.
    def tap_inputs(
        self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the call's arguments, put through the autograd node of the inputs.

        As in PyTorch, `grad_input` has the positional arguments. If a call has only keyword
        arguments, it has those, in the call's order (PyTorch observes none of them). The gradients
        of an argument that is a structure are that structure.
        """
        if args or not kwargs:
            return _tapped(self, self.setup_input_hook, args, inputs=True), kwargs
        values = _tapped(self, self.setup_input_hook, tuple(kwargs.values()), inputs=True)
        return (), dict(zip(kwargs, values, strict=True))

    def tap_outputs(self: Any, output: Any) -> Any:
        """Returns the output, a tensor or a structure of them, put through the outputs' node."""
        if isinstance(output, Tensor):
            return _tapped(self, self.setup_output_hook, (output,), inputs=False)[0]
        inside = parts(output)
        if inside is None:
            warnings.warn(
                "backward hooks cannot observe this module's output: expected a tensor or a tuple, "
                f"list, dict or dataclass of tensors, got {type(output).__name__}",
                stacklevel=2,
            )
            return output
        items = tuple(item for _, item in inside)
        new = _tapped(self, self.setup_output_hook, items, inputs=False)
        # A new one of its class: the module may refer to the original.
        return output if new is items else rebuilt(output, [*new])

    def _apply_on_tensors(self: Any, fn: Hook, args: Any) -> Any:
        if maybe_current_level() is None:
            return super()._apply_on_tensors(fn, args)  # type: ignore[no-untyped-call]
        places = [place for place, arg in enumerate(args) if isinstance(arg, Tensor)]
        if not torch.is_grad_enabled() or not any(args[place].requires_grad for place in places):
            return args, None
        outputs = _Tap.apply(*(args[place] for place in places))
        fn(next(tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None))
        items = dict(zip(places, outputs, strict=True))
        return tuple(items.get(place, arg) for place, arg in enumerate(args)), places


class _Tap(torch.autograd.Function):
    """The node of a `BackwardHook`, for the transforms of `torch.func`, which refuse torch's."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        del inputs
        fixed = [it for it in output if not (it.is_floating_point() or it.is_complex())]
        ctx.mark_non_differentiable(*fixed)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # noqa: ARG004 (torch's signature)
        return grads

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:  # noqa: ARG004 (torch's signature)
        return tuple(None if each is None else each.view_as(each) for each in tangents)


class _Slots(NamedTuple):
    """Places, among the tensors that a node gets, of a tensor or of the components of one."""

    places: list[int]
    components: bool
    """True for a strided nested tensor, which no node of Python takes."""

    def filled(self, grads: tuple[Any, ...]) -> Any:
        own = [grads[place] for place in self.places]
        if not self.components:
            return own[0]
        return None if any(each is None for each in own) else nested_of(own, torch.strided)


def _has_components(tensor: Tensor) -> bool:
    return tensor.is_nested and tensor.layout == torch.strided


def _tapped(tap: Any, setup: Hook, items: tuple[Any, ...], *, inputs: bool) -> tuple[Any, ...]:
    """Puts the tensors of a tuple through a node of a `BackwardHook`.

    Args:
        tap: the hook.
        setup: its method for that node.
        items: tensors and structures of them.
        inputs: True for the inputs of the call.
    """
    if not any(
        _has_components(item) if isinstance(item, Tensor) else parts(item) for item in items
    ):
        return setup(items)  # type: ignore[no-any-return]
    flat: list[Tensor] = []

    def placed(tensor: Tensor) -> Any:
        components = _has_components(tensor)
        start = len(flat)
        flat.extend(tensor.unbind() if components else [tensor])
        return _Slots([*range(start, len(flat))], components)

    form = [map_tensors(placed, item) for item in items]
    outputs = setup(tuple(flat))
    # After the node is made, as its hooks are called with the gradients of flat tensors.
    tap.user_hooks = [_structured(hook, form, inputs=inputs, full=True) for hook in tap.user_hooks]
    if not inputs:
        tap.user_pre_hooks = [
            _structured(hook, form, inputs=inputs, full=False) for hook in tap.user_pre_hooks
        ]
    if all(one is other for one, other in zip(outputs, flat, strict=True)):
        return items  # no tensor requires grad
    return tuple(_replaced(*each, outputs) for each in zip(form, items, strict=True))


def _replaced(form: Any, value: Any, outputs: tuple[Any, ...], depth: int = 0) -> Any:
    """Puts the outputs of a node into a structure.

    A structure without gradients stays the same object: the module may write to it.
    """
    if isinstance(form, _Slots):
        return form.filled(outputs)
    inside = parts(value) if depth <= DEEPEST else None
    if inside is None or not any(tensor.requires_grad for tensor in tensors_in(value, depth)):
        return value
    pairs = zip(parts(form) or (), inside, strict=True)
    return rebuilt(value, [_replaced(one, it, outputs, depth + 1) for (_, one), (_, it) in pairs])


def _filled(form: Any, grads: tuple[Any, ...], depth: int = 0) -> Any:
    """Rebuilds a structure with gradients in its slots, and None in place of other leaves."""
    if isinstance(form, _Slots):
        return form.filled(grads)
    inside = parts(form) if depth <= DEEPEST else None
    if inside is None:
        return None
    return rebuilt(form, [_filled(it, grads, depth + 1) for _, it in inside])


def _gradient(form: Any, grads: tuple[Any, ...]) -> Any:
    """Returns the gradients of an item in its structure; None if it got none."""
    found = _filled(form, grads)
    return found if isinstance(found, Tensor) or any(True for _ in tensors_in(found)) else None


def _structured(hook: Hook, form: list[Any], *, inputs: bool, full: bool) -> Hook:
    """Returns a hook with flat gradients around one that takes them in structures.

    Args:
        hook: a hook of `backward`, or of `backward_pre`.
        form: the structures, of the inputs or of the output.
        inputs: True for gradients of the inputs.
        full: True for a hook of `backward`.
    """

    def structured(grads: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(_gradient(each, grads) for each in form)

    def call(module: nn.Module, grads: tuple[Any, ...], *grad_output: Any) -> Any:
        if full and not inputs:
            return hook(module, grads, structured(*grad_output))
        result = hook(module, structured(grads), *grad_output)
        if result is None:
            return None
        flat: list[Any] = [None] * len(grads)
        _collect(form, [result] if isinstance(result, Tensor) else [*result], flat)
        return tuple(flat)

    return call


def _collect(form: Any, given: Any, flat: list[Any]) -> None:
    """Puts the gradients that a hook returned into the slots of a structure."""
    if given is None:
        return
    if isinstance(form, _Slots):
        own = given.unbind() if form.components else [given]
        for place, each in zip(form.places, own, strict=True):
            flat[place] = each
        return
    inside, returned = parts(form), parts(given)
    if inside is None:
        return
    wanted = dict(inside)
    found = {} if returned is None else dict(returned)
    if found.keys() != wanted.keys():
        msg = (
            f"a backward hook returned {type(given).__name__} with {[*found]}, expected gradients "
            f"for {[*wanted]}"
        )
        raise RuntimeError(msg)
    for key, each in wanted.items():
        _collect(each, found[key], flat)


UNTRACED: Final = (
    *(BackwardPass.tap_inputs, BackwardPass.tap_outputs),
    *(BackwardPass._apply_on_tensors, _tapped),
)
"""Functions that Dynamo leaves as they are."""


def hook_non_full(module: nn.Module, hooks: list[Hook], args: tuple[Any, ...], output: Any) -> None:
    """Registers torch's deprecated backward hooks as `nn.Module` does.

    They go on the autograd node that computed the first tensor of the output.
    """
    tensor = output
    while not isinstance(tensor, torch.Tensor):
        if isinstance(tensor, dict):
            tensor = next(value for value in tensor.values() if isinstance(value, torch.Tensor))
        else:
            tensor = tensor[0]
    if tensor.grad_fn is None:
        return
    for hook in hooks:
        tensor.grad_fn.register_hook(_WrappedHook(hook, module))
    module._maybe_warn_non_full_backward_hook(args, output, tensor.grad_fn)

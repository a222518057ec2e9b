"""`Controller`: a hook that replaces a module's activations."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor
from torch.compiler import is_compiling

from ferrohook._core import refuse_async
from ferrohook.compat.mi_crow.hooks import Hook, HookType, check_signature
from ferrohook.compat.mi_crow.tensors import (
    apply_modification_to_output,
    extract_tensor_from_input,
    extract_tensor_from_output,
    first_tensor,
    fit,
    put_first,
)
from ferrohook.effects.intervention import Intervention
from ferrohook.util.arguments import expect, expect_callable
from ferrohook.util.tensors import version_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn


class Controller(Hook):
    """A hook that replaces a module's activations.

    Subclasses implement `modify_activations`, whose result replaces the activations; autograd
    tracks it. Writing to the activations in place raises an error; in inference mode and in
    compiled regions, where a write cannot be detected, the controller gets a copy. A hook that is
    a `Detector` too detects first.

    Args:
        hook_type: `HookType.FORWARD` to change the module's output, `HookType.PRE_FORWARD` to
            change its input; see `Hook`.
        hook_id: see `Hook`.
        layer_signature: see `Hook`.

    Raises:
        ValueError: an unknown `hook_type`.
        HookTypeError: an argument has the wrong type.
    """

    _controls = True
    _hook_fn: ClassVar[Any] = None  # its `_run_before` and `_run_after` do without

    def __init__(
        self,
        hook_type: HookType | str = HookType.FORWARD,
        hook_id: str | None = None,
        layer_signature: str | int | None = None,
    ) -> None:
        super().__init__(layer_signature=layer_signature, hook_type=hook_type, hook_id=hook_id)

    @abc.abstractmethod
    def modify_activations(
        self, module: nn.Module, inputs: Tensor | None, output: Tensor | None
    ) -> Tensor | None:
        """Computes the replacement for the activations, without writing to them.

        Args:
            module: the module that is called.
            inputs: its input tensor, see `extract_tensor_from_input`; in a pre-forward hook of a
                call without positional arguments, the first tensor among the keyword arguments.
            output: its output tensor, see `extract_tensor_from_output`; in a pre-forward hook the
                same as `inputs`.

        Returns:
            A tensor of the same shape, moved to the device and cast to the dtype of the original;
            or None to leave the activations unchanged.
        """

    def _run_before(self, module: Any, args: Any, kwargs: Any) -> Any:
        if self._detects:
            super()._run_before(module, args, kwargs)
        holder = args[0] if args else kwargs
        original = first_tensor(holder, in_dicts=holder is kwargs)
        changed = None if original is None else self._change(module, None, original)
        if original is None or changed is None:
            return None
        holder = put_first(holder, original, fit(changed, original))
        return ((holder, *args[1:]), kwargs) if args else (args, holder)

    def _run_after(self, module: Any, args: Any, output: Any) -> Any:
        if self._detects:
            super()._run_after(module, args, output)
        original = output if isinstance(output, Tensor) else extract_tensor_from_output(output)
        changed = None if original is None else self._change(module, args, original)
        if original is None or changed is None:
            return None
        if output is original:
            return fit(changed, original)
        return apply_modification_to_output(output, changed)

    def _change(self, module: Any, args: Any, original: Tensor) -> Tensor | None:
        """Returns the replacement of a tensor, or None; `args` is None in a pre-forward hook."""
        # Without a version tag a write cannot be detected: pass a copy.
        version = None if is_compiling() else version_of(original)
        passed = original.clone() if version is None else original
        inputs = passed if args is None else extract_tensor_from_input(args)
        changed = self.modify_activations(module, inputs, passed)
        if version is not None and version_of(passed) != version:
            msg = (
                "it wrote in place to the activations, which others may share: return a new "
                "tensor, such as x * 2 instead of x.mul_(2), or write to x.clone()"
            )
            raise RuntimeError(msg)
        if changed is None or changed is original:
            return None if passed is original else passed
        expect(changed, Tensor, "modify_activations must return a tensor or None")
        return changed


class FunctionController(Controller):
    """A controller made of a function from tensor to tensor.

    Args:
        layer_signature: name or index of the layer.
        function: maps the activations to their replacement, a new tensor of the same shape.
        hook_type: see `Controller`.
        hook_id: see `Hook`.

    Raises:
        ValueError: an unknown `hook_type`.
        HookTypeError: no `layer_signature`, `function` is not callable, or an argument has the
            wrong type.

    Examples:
        >>> controller = FunctionController("layers.3.mlp", lambda x: x * 2)
        >>> Layers(model).register_hook("layers.3.mlp", controller)
    """

    def __init__(
        self,
        layer_signature: str | int,
        function: Callable[[Tensor], Tensor],
        hook_type: HookType | str = HookType.FORWARD,
        hook_id: str | None = None,
    ) -> None:
        check_signature(layer_signature)
        expect_callable(function, "function must be a callable that takes a tensor")
        refuse_async(function, "function")
        super().__init__(hook_type=hook_type, hook_id=hook_id, layer_signature=layer_signature)
        self.function = function

    def modify_activations(  # noqa: D102 (Controller's)
        self,
        module: nn.Module,  # noqa: ARG002
        inputs: Tensor | None,
        output: Tensor | None,
    ) -> Tensor | None:
        target: Any = output if self._hook_type is HookType.FORWARD else inputs
        result = self.function(target)
        expect(result, Tensor, "function must return a tensor")
        return result


class InterventionController(Controller):
    """A controller made of an intervention, which runs without Python.

    It changes a tensor, or the part at the intervention's `output_index`, not the first tensor of a
    structure as other controllers do. It raises the intervention's exceptions.

    Args:
        layer_signature: name or index of the layer.
        intervention: `ferrohook.Add` or another.
        hook_type: see `Controller`.
        hook_id: see `Hook`.

    Raises:
        ValueError: an unknown `hook_type`.
        HookTypeError: no `layer_signature`, or an argument has the wrong type.

    Examples:
        >>> controller = InterventionController("layers.3.mlp", fh.Add(vector))
        >>> Layers(model).register_hook("layers.3.mlp", controller)
    """

    def __init__(
        self,
        layer_signature: str | int,
        intervention: Intervention,
        hook_type: HookType | str = HookType.FORWARD,
        hook_id: str | None = None,
    ) -> None:
        check_signature(layer_signature)
        expect(intervention, Intervention, "intervention must be an Intervention, such as Add")
        super().__init__(hook_type=hook_type, hook_id=hook_id, layer_signature=layer_signature)
        self.intervention = intervention

    def modify_activations(  # noqa: D102 (Controller's)
        self,
        module: nn.Module,  # noqa: ARG002
        inputs: Tensor | None,
        output: Tensor | None,
    ) -> Any:
        changed = output if self._hook_type is HookType.FORWARD else inputs
        return self.intervention.apply(changed)

    def _for_registry(self, hook_type: HookType) -> tuple[Any, bool]:
        del hook_type  # native in both
        return self.intervention, False

    # For PyTorch's own registering methods.
    def _before(self, module: Any, args: Any, kwargs: Any) -> Any:
        del module
        if len(args) == 1:
            return (self.intervention.apply(args[0]),), kwargs
        return self.intervention.apply(args), kwargs

    def _after(self, module: Any, args: Any, output: Any) -> Any:
        del module, args
        return self.intervention.apply(output)

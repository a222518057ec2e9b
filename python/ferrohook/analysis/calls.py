"""`ModelCall`: the inputs of one call of a model, repeated for many variants in one forward."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ferrohook.errors import HookError, HookTypeError
from ferrohook.util.arguments import at_least
from ferrohook.util.tensors import leaves_by_path, map_tensors, normal, tensors_in
from ferrohook.util.texts import tokenize_hint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn


class ModelCall(NamedTuple):
    """Arguments of a call of a model, with a row for each text."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    rows: int
    """Size of the first dimension of the first tensor."""

    @classmethod
    def of(cls, inputs: Any, name: str = "batch") -> ModelCall:
        """Reads a batch: keyword arguments, a tuple or list of positional ones, or the only one.

        Raises:
            HookTypeError: there is no tensor with rows among them.
        """
        args: tuple[Any, ...] = ()
        kwargs: Mapping[str, Any] = {}
        if isinstance(inputs, Mapping):
            kwargs = {**inputs}
        else:
            args = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
        rows = next((len(it) for it in tensors_in((args, kwargs)) if it.dim()), 0)
        if not rows:
            msg = (
                f"{name} must contain a tensor with one row per text, such as token ids of shape "
                f"(batch, positions), got {type(inputs).__name__}{tokenize_hint(args, kwargs)}"
            )
            raise HookTypeError(msg)
        return cls(args, kwargs, rows)

    def repeated(self, times: int) -> ModelCall:
        """Returns the call with all rows repeated, one copy after the other."""
        if times == 1:
            return self
        return self._mapped(
            lambda tensor: tensor.repeat(times, *[1] * (tensor.dim() - 1)), self.rows * times
        )

    def batches(self, size: int | None) -> list[ModelCall]:
        """Splits the call by its rows into calls of at most `size`; None for one of all rows.

        Raises:
            ValueError: `size` is less than 1.
        """
        if size is None:
            return [self]

        def part(start: int) -> ModelCall:
            return self._mapped(
                lambda tensor: tensor[start : start + size], min(size, self.rows - start)
            )

        return [*map(part, range(0, self.rows, at_least(1, "batch_size", size)))]

    def _mapped(self, change: Callable[[Tensor], Tensor], rows: int) -> ModelCall:
        """Returns a call of other rows; tensors that all rows share, as position ids, stay."""

        def own(tensor: Tensor) -> Tensor:
            return change(tensor) if tensor.dim() and len(tensor) == self.rows else tensor

        args, kwargs = map_tensors(own, (self.args, self.kwargs))
        return ModelCall(args, kwargs, rows)

    def recordable(self) -> ModelCall:
        """Returns the call with tensors that autograd can save, outside of inference mode."""
        args, kwargs = map_tensors(normal, (self.args, self.kwargs))
        return ModelCall(args, kwargs, self.rows)

    @property
    def mask(self) -> Tensor | None:
        """Tokens that are no padding, (rows, positions), by `attention_mask`; None without one."""
        mask = self.kwargs.get("attention_mask")
        return mask.bool() if isinstance(mask, Tensor) and mask.dim() == 2 else None  # noqa: PLR2004 (rows, positions)

    def token_ids(self, shape: torch.Size) -> Tensor | None:
        """Returns the argument that has an integer for each position; None if there is none.

        Args:
            shape: (rows, positions).
        """
        first = self.kwargs.get("input_ids", next(iter(self.args), None))
        if isinstance(first, Tensor) and first.shape == shape and not first.is_floating_point():
            return first.cpu()
        return None

    def run(self, model: nn.Module) -> Any:
        """Calls the model."""
        return model(*self.args, **self.kwargs)


def variants(output: Any, plain: Any, times: int) -> Iterator[Any]:
    """Splits the output of a repeated call into the outputs of its copies.

    Args:
        output: the output of the repeated call.
        plain: the output of the call itself.
        times: number of the copies.

    Raises:
        HookError: a tensor has not the rows of all copies.
    """
    if times == 1:
        yield output
        return
    for (part, many), (_, one) in zip(leaves_by_path(output), leaves_by_path(plain), strict=True):
        if isinstance(many, Tensor) and (
            not one.dim() or many.shape != (times * len(one), *one.shape[1:])
        ):
            msg = (
                f"output{part} has shape {tuple(one.shape)}, but {tuple(many.shape)} for inputs "
                f"repeated {times} times: it does not have one row per text. Pass batch_size=1 to "
                "run one forward per variant"
            )
            raise HookError(msg)
    for number in range(times):

        def own(tensor: Tensor, number: int = number) -> Tensor:
            rows = len(tensor) // times
            return tensor[number * rows : (number + 1) * rows]

        yield map_tensors(own, output)


def check_repeatable(found: Any, expected: Any, model: nn.Module) -> None:
    """Compares the output of an unchanged copy with the output of the call itself.

    Raises:
        HookError: they differ by more than rounding.
    """
    for one, other in zip(tensors_in(found), tensors_in(expected), strict=True):
        if not one.is_floating_point():
            continue
        if (distance := relative_distance(one, other)) > tolerance(other):
            msg = (
                f"{model._get_name()} returned a different output for the same input (difference: "
                f"{distance:.2g} of its norm). Its calls are random: call model.eval(). Or they "
                "keep a state, such as a KV cache: leave it out. Or its rows depend on each other: "
                "pass batch_size=1"
            )
            raise HookError(msg)


def relative_distance(one: Tensor, other: Tensor) -> float:
    """Returns the norm of the tensors' difference, relative to `other`, where finite."""
    finite = one.isfinite() & other.isfinite()
    if not finite.any():
        return 0.0
    one, other = (each[finite].double() for each in (one, other))
    distance, scale = float((one - other).norm()), float(other.norm())
    return distance / scale if scale else distance


def tolerance(tensor: Tensor) -> float:
    """Returns the relative distance up to which tensors are equal but for rounding."""
    return math.sqrt(torch.finfo(tensor.dtype).eps)


def gradients_of(value: Tensor, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the gradients of the value of a metric; zeros for tensors that it does not depend on.

    Raises:
        HookError: the value has no gradient.
    """
    if not value.requires_grad:
        msg = (
            "the metric has no gradient: compute it from the output's tensors, without detaching "
            "them or converting them to numbers"
        )
        raise HookError(msg)
    given = torch.autograd.grad(value, [*tensors.values()], materialize_grads=True)
    return dict(zip(tensors, given, strict=True))


def score(metric: Callable[[Any], Any], output: Any) -> Tensor:
    """Calls a metric, and averages over the rows that it returns.

    Raises:
        HookTypeError: it returned neither a number nor a tensor of real numbers.
    """
    value = metric(output)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    found = torch.tensor(value, dtype=torch.float64, device="cpu") if number else value
    rows = {len(each) for each in tensors_in(output) if each.dim()}
    if (
        not isinstance(found, Tensor)
        or found.is_complex()
        or not (found.numel() == 1 or (found.dim() and found.numel() == len(found) in rows))
    ):
        shape = f" of shape {tuple(found.shape)}" if isinstance(found, Tensor) else ""
        msg = (
            "a metric must map the model's output to a number, or to a tensor with one number per "
            f"row, got {type(value).__name__}{shape}"
        )
        raise HookTypeError(msg)
    return found.double().mean()

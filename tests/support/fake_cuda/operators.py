"""Operators on the emulated GPU: views now, kernels later, and operators that wait."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from support.fake_cuda.memory import (
    Pinned,
    inside_kernel,
    memory_of,
    on_gpu,
    placed,
    poison,
    write,
)
from support.fake_cuda.streams import TIMELINE, Kernel

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._ops import OpOverload

aten = torch.ops.aten
_WAITING = {
    "aten::_local_scalar_dense",
    "aten::_unique2",
    "aten::equal",
    "aten::is_nonzero",
    "aten::item",
    "aten::masked_select",
    "aten::nonzero",
    "aten::unique_consecutive",
    "aten::unique_dim",
}
_INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
_DATA_DEPENDENT = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
)


class Operators:
    """Runs operators with tensors of which some are on the GPU."""

    def __init__(self) -> None:
        self.pinned = Pinned()
        self._shapes = FakeTensorMode(allow_non_fake_inputs=True)
        self._lock = threading.RLock()
        """Held while shapes are computed: the mode serves one thread at a time."""
        self._own: dict[str, Callable[..., Any]] = {
            "aten::_to_copy": self._to_copy,
            "aten::copy_": self._copy,
            "aten::is_pinned": lambda *_, **__: False,
        }

    def run(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operator, on the CPU if nothing of it is on the GPU."""
        tensors = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, Tensor)]
        target = kwargs.get("device")
        to_gpu = target is not None and torch.device(target).type == "cuda"
        if not to_gpu and not any(placed(each) for each in tensors):
            return self._on_cpu(func, args, kwargs)
        if (own := self._own.get(func._schema.name)) is not None:
            return own(*args, **kwargs)
        if target is not None and not to_gpu:  # `empty_like(x, device="cpu")`
            return self._on_cpu(func, *tree_map(memory_of, (args, kwargs)))
        if _is_view(func):
            return self._view(func, args, kwargs)
        _check(func, tensors)
        return self._compute(func, args, kwargs)

    def _compute(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if (what := _waits_for(func, args)) is not None:
            return self._now(func, args, kwargs, what)
        if any(_is_written(each) for each in func._schema.arguments):
            return self._write(func, args, kwargs)
        return self._launch(func, args, kwargs)

    def _on_cpu(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        pin = kwargs.pop("pin_memory", None)
        result = func(*args, **kwargs)
        return self.pinned.add(result) if pin else result

    def _view(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inner, options = tree_map(memory_of, (args, kwargs))
        with inside_kernel():
            result = func(*inner, **options)
        owner = placed(args[0])
        assert owner is not None, f"{func} views no tensor on the GPU"
        return tree_map(
            lambda each: on_gpu(each, owner.allocation) if isinstance(each, Tensor) else each,
            result,
        )

    def _now(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], what: str
    ) -> Any:
        """Runs an operator whose result the host waits for."""
        TIMELINE.wait(what)
        inner, options = tree_map(memory_of, (args, _for_cpu(kwargs)))
        with inside_kernel():
            result = func(*inner, **options)
        written = {id(memory_of(each)): each for each in args if placed(each) is not None}

        def outside(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return written[id(value)] if id(value) in written else on_gpu(value)

        return tree_map(outside, result)

    def _for_launch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns arguments for a kernel; numbers of the host go with the launch."""

        def inner(value: Any) -> Any:
            if isinstance(value, Tensor) and placed(value) is None:
                with inside_kernel():
                    return value.detach().clone()
            return memory_of(value)

        return tree_map(inner, (args, _for_cpu(kwargs)))

    def _write(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Enqueues a kernel that writes arguments."""
        inner, options = self._for_launch(args, kwargs)
        arguments = func._schema.arguments
        written = [
            args[place] if place < len(args) else kwargs.get(argument.name)
            for place, argument in enumerate(arguments)
            if _is_written(argument)
        ]
        inference = any(memory_of(each).is_inference() for each in written if each is not None)

        def kernel() -> None:
            with inside_kernel(), torch.inference_mode(mode=inference):
                func(*inner, **options)

        TIMELINE.current.push(Kernel(kernel, func.name()))
        returns = len(func._schema.returns)
        return None if not returns else written[0] if returns == 1 else tuple(written)

    def _launch(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Enqueues a kernel: its outputs have a shape now, and numbers later."""
        inner, options = self._for_launch(args, kwargs)
        try:
            with self._lock, _disable_current_modes():
                fake_args, fake_options = tree_map(self._shape_of, (inner, options))
                with self._shapes:
                    shapes, spec = tree_flatten(func(*fake_args, **fake_options))
        except _DATA_DEPENDENT:
            what = f"{func._schema.name}, whose shape depends on data"
            return self._now(func, args, kwargs, what)
        with inside_kernel():
            outputs = [
                poison(torch.empty_strided(each.shape, each.stride(), dtype=each.dtype))
                if isinstance(each, Tensor)
                else each
                for each in shapes
            ]

        def kernel() -> None:
            with inside_kernel():
                results, _ = tree_flatten(func(*inner, **options))
                for output, result in zip(outputs, results, strict=True):
                    if isinstance(output, Tensor):
                        write(output, result)

        made = [on_gpu(each) if isinstance(each, Tensor) else each for each in outputs]
        TIMELINE.current.push(Kernel(kernel, func.name()))
        return tree_unflatten(made, spec)

    def _shape_of(self, value: Any) -> Any:
        return self._shapes.from_tensor(value) if isinstance(value, Tensor) else value

    def _to_copy(
        self,
        x: Tensor,
        *,
        device: Any = None,
        non_blocking: bool = False,
        pin_memory: bool | None = None,
        **kwargs: Any,
    ) -> Tensor:
        target = x.device if device is None else torch.device(device)
        if target.type == "cuda" and placed(x) is not None:
            copied: Tensor = self._launch(aten._to_copy.default, (x,), kwargs)
            return copied
        dtype = kwargs.get("dtype") or x.dtype
        shape_of = torch.empty_like(memory_of(x).detach(), device="meta", dtype=dtype)
        with inside_kernel():
            made = poison(torch.empty_strided(x.size(), shape_of.stride(), dtype=dtype))
        if target.type == "cuda":
            with inside_kernel():
                source = x if x.dtype == dtype else x.detach().to(dtype)
            there = on_gpu(made)
            return self._copy(there, source, non_blocking)
        if pin_memory:
            self.pinned.add(made)
        return self._copy(made, x, non_blocking)

    def _copy(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        """Copies within the GPU, to it, or from it to the host."""
        if placed(target) is not None and placed(source) is not None:
            self._write(aten.copy_.default, (target, source), {})
            return target
        host = source if placed(source) is None else target
        waits = not (non_blocking and self.pinned.has(host))
        with inside_kernel():
            # Pageable memory is read before the copy returns; pinned memory when the copy runs.
            taken = memory_of(source).detach()
            taken = taken.clone() if waits and host is source else taken
            memory = memory_of(target)
            memory = memory.data if host is target else memory  # its version is counted by now

        def kernel() -> None:
            with inside_kernel():
                write(memory, taken)

        TIMELINE.current.push(Kernel(kernel, "copy"))
        if waits and not (host is source and non_blocking):
            way = "to the GPU from pageable memory" if host is source else "from the GPU"
            TIMELINE.wait(f"a copy {way}")
        return target


def _check(func: OpOverload, tensors: list[Tensor]) -> None:
    """Refuses calls that a GPU or the emulation refuses; waits for an index's copy on the host."""
    name = func._schema.name
    if torch.Tag.inplace_view in func.tags:
        msg = f"{name} changes the shape of a tensor in place, which is not emulated"
        raise NotImplementedError(msg)
    if all(placed(each) or not each.dim() for each in tensors):
        return
    if name not in _INDEXING:
        msg = f"{name}: Expected all tensors to be on the same device, cuda:0 and cpu"
        raise RuntimeError(msg)
    TIMELINE.wait(f"{name} by an index on the host")


def _waits_for(func: OpOverload, args: tuple[Any, ...]) -> str | None:
    """Returns the reason why the host waits in an operator; None for a kernel."""
    name: str = func._schema.name
    if name in _WAITING:
        return name
    indices = args[1] if name in _INDEXING else ()
    masks = {torch.bool, torch.uint8}
    return f"{name} by a mask" if any(getattr(x, "dtype", None) in masks for x in indices) else None


def _for_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    options = {name: value for name, value in kwargs.items() if name != "pin_memory"}
    if options.get("device") is not None:
        options["device"] = torch.device("cpu")
    return options


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _is_view(func: OpOverload) -> bool:
    if func._schema.name in {"aten::detach", "aten::alias", "aten::lift_fresh"}:
        return True
    aliases = [each.alias_info for each in func._schema.returns if each.alias_info is not None]
    return bool(aliases) and not any(alias.is_write for alias in aliases)

"""Subjects of looks: a copy of a model, and the call in which it is examined."""

# The copy shares the parameters with the model and nothing else: it is in eval mode, its hooks are
# gone, and what its forwards change (caches, statistics) is its own. So a look leaves no trace,
# whatever else uses the model meanwhile.

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import random
import threading
import types
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ferrohook._core import keeps_state_in_torch_hooks, release_copy
from ferrohook.attach.hook_info import find_registry
from ferrohook.errors import HookError
from ferrohook.quantity.anatomy.observe import Look, is_kept, noise
from ferrohook.util.tensors import map_tensors, tensors_in
from ferrohook.util.texts import tokenize_hint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from ferrohook.quantity.anatomy.observe import Writes

HALF: Final = frozenset({torch.float16, torch.bfloat16})
LARGEST_COPY: Final = 2**30
"""Parameters of half precision that are copied to float32, at most."""
ROWS: Final = 2
"""Rows of an example that is made for a model."""
TOKENS: Final = 7
"""Tokens of each of its rows."""
_FEW: Final = 3
"""Tokens of a row, at most, that may not show how a sublayer mixes them."""
_NOISE: Final = 0.1
"""Size of the noise on parameters whose elements are all equal."""
_SEED: Final = 20


class Example(NamedTuple):
    """Arguments of one call of a model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shape: tuple[int, int] | None
    """Rows and tokens of a row; None if they are not known."""


class Subject:
    """A model that is examined, and the call in which it is.

    Args:
        model: a structural copy, see `structural_copy`.
        example: arguments of the call.
    """

    def __init__(self, model: nn.Module, example: Example) -> None:
        self.model = model
        self.example = example

    def forward(self) -> object:
        """Calls the model with the example, and returns its results.

        Raises:
            HookError: the model failed.
        """
        try:
            with undisturbed():
                return self.model(*self.example.args, **self.example.kwargs)
        except Exception as error:
            msg = (
                f"{self.model._get_name()} cannot be inspected: its forward failed with "
                f"{type(error).__name__}: {error}; pass fh.quantities an example that the model "
                f"accepts{tokenize_hint(self.example.args, self.example.kwargs)}"
            )
            raise HookError(msg) from error

    def look(self, writes: Writes | None = None) -> Look:
        """Observes one call.

        Args:
            writes: changes of tensors; a changed one is seen before and after.

        Raises:
            HookError: the model failed.
        """
        return Look(self.model, self.forward, writes)


def through(model: nn.Module, path: str, tensor: Tensor) -> Tensor | None:
    """Calls a module of a copy with a tensor; None if it takes or returns anything else."""
    module = model.get_submodule(path)
    try:
        with undisturbed():
            returned: Any = module.forward(tensor.to(_device(module)))
    except Exception:  # noqa: BLE001 (a module that takes more fails as it likes)
        return None
    if isinstance(returned, tuple) and returned[1:] == (None,):  # an engine's bias
        returned = returned[0]
    return returned.detach().cpu() if isinstance(returned, Tensor) else None


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Runs a forward without gradients that takes nothing from the generators of the process.

    `random` and numpy have no generator of a thread's own. Their states are put back if no other
    thread runs: one that draws meanwhile must not get a number twice.
    """
    alone = threading.active_count() == 1
    states = random.getstate(), np.random.get_state()  # noqa: NPY002 (it is the caller's)
    try:
        with torch.inference_mode(mode=False), torch.no_grad(), _PrivateGenerators():
            yield
    finally:
        if alone:
            random.setstate(states[0])
            np.random.set_state(states[1])  # noqa: NPY002 (as above)


@contextlib.contextmanager
def without_autocast(model: nn.Module) -> Iterator[None]:
    """Turns autocast off in a block: no equation holds for products of lower precision."""
    kinds = {"cpu", *(each.device.type for each in model.parameters())} - {"meta"}
    with contextlib.ExitStack() as stack:
        for kind in filter(torch.is_autocast_enabled, kinds):
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


class _PrivateGenerators(TorchDispatchMode):
    """Gives the operators that draw in this thread a separate generator."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generators: dict[torch.device, torch.Generator] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None:
            with_generator = _with_generator(func)
            if with_generator is not None:
                tensor = next((each for each in args if isinstance(each, Tensor)), None)
                device = kwargs.get("device") or ("cpu" if tensor is None else tensor.device)
                kwargs = {**kwargs, "generator": self._generator(torch.device(device))}
                return with_generator(*args, **kwargs)
        return func(*args, **kwargs)

    def _generator(self, device: torch.device) -> torch.Generator:
        made = self._generators.get(device)
        if made is None:
            made = self._generators[device] = torch.Generator(device).manual_seed(_SEED)
        return made


def _with_generator(func: Any) -> Any:
    """Returns the overload of an operator that takes a generator; None if it has none."""
    own, packet = func._overloadname, func.overloadpacket
    names = own.replace("low", "low_generator"), own.replace("default", "generator")
    for name in (own, f"{own}_generator", *names):
        found = getattr(packet, name, None)
        if found is not None and any(it.name == "generator" for it in found._schema.arguments):
            return found
    return None


def structural_copy(model: nn.Module) -> nn.Module:
    """Copies the modules of a model and shares its parameters, in eval mode and without hooks.

    Raises:
        HookError: the model cannot be copied.
    """
    # `deepcopy` takes the objects in its memo; it refuses tensors that are results of operations.
    shared: dict[int, Any] = {id(tensor): tensor for tensor in _shared(model)}
    try:
        copied: nn.Module = copy.deepcopy(model, shared)
    except Exception as error:
        msg = (
            f"{model._get_name()} cannot be inspected: copying it failed with "
            f"{type(error).__name__}: {error}"
        )
        raise HookError(msg) from error
    for module in copied.modules():
        if (original := module._modules.get("_orig_mod")) is not None:  # of torch.compile(model)
            vars(module)["forward"] = original
        _rebind(module, shared)
        release_copy(module)
        if (registry := find_registry(module)) is not None:
            registry.clear()
        _remove_hooks(module)
        vars(module)["_compiled_call_impl"] = functools.partial(_call_alone, module)
    return copied.eval()


def _call_alone(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls a module with its hooks, as `nn.Module` does, but without torch's global ones."""
    for key, hook in [*module._forward_pre_hooks.items()]:
        if key in module._forward_pre_hooks_with_kwargs:
            args, kwargs = hook(module, args, kwargs) or (args, kwargs)
        elif (changed := hook(module, args)) is not None:
            args = changed if isinstance(changed, tuple) else (changed,)
    output = module.forward(*args, **kwargs)
    for key, hook in [*module._forward_hooks.items()]:
        named = (kwargs,) if key in module._forward_hooks_with_kwargs else ()
        changed = hook(module, args, *named, output)
        output = output if changed is None else changed
    return output


def _rebind(module: nn.Module, copies: dict[int, Any]) -> None:
    """Replaces functions of a copied module by ones whose closures hold the copies.

    `deepcopy` copies no function: a wrapped `forward` would call the original's modules.
    """

    def copied(cell: types.CellType) -> types.CellType:
        held = cell.cell_contents
        if isinstance(held, types.FunctionType):
            return types.CellType(rebound(held))
        kinds = (nn.Module, types.MethodType, functools.partial)
        return types.CellType(copy.deepcopy(held, copies)) if isinstance(held, kinds) else cell

    def rebound(function: types.FunctionType) -> types.FunctionType:
        cells = tuple(map(copied, function.__closure__ or ()))
        made = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, cells
        )
        made.__kwdefaults__ = function.__kwdefaults__
        functools.update_wrapper(made, function)
        return made

    for name, each in [*vars(module).items()]:
        if isinstance(each, types.FunctionType) and each.__closure__:
            vars(module)[name] = rebound(each)


def _shared(model: nn.Module) -> Iterator[Tensor]:
    """Yields the tensors that a copy shares: parameters, but for tables that a forward scales."""
    scaled = {id(each.weight) for each in model.modules() if getattr(each, "max_norm", None)}
    for module in model.modules():
        own = module._parameters.values()
        yield from (each for each in own if each is not None and id(each) not in scaled)
        for each in vars(module).values():
            if isinstance(each, Tensor) and not each.is_leaf:
                yield each


def _remove_hooks(module: nn.Module) -> None:
    """Removes torch's hooks, except the ones that compute parameters, and a compiled call.

    A model of transformers has hooks that record outputs, and puts them in again where they are not
    noted.
    """
    for name in ("_forward_hooks", "_forward_pre_hooks"):
        hooks = getattr(module, name)
        for key in [key for key, hook in hooks.items() if not keeps_state_in_torch_hooks(hook)]:
            del hooks[key]
    for name in ("_compiled_call_impl", "_output_capturing_hooks_installed"):
        vars(module).pop(name, None)


def in_float32(subject: Subject) -> Subject:
    """Returns a structural copy that computes in float32 if it is of half precision and not large.

    In half precision rounding hides the terms of an equation. The model's own subject where the
    forward of the copy fails, as one with kernels only for half precision does.
    """

    def converted(value: Any) -> Any:
        return value.float() if isinstance(value, Tensor) and value.dtype in HALF else value

    def parameter(old: nn.Parameter) -> nn.Parameter | None:
        made = old.detach().float() if old.dtype in HALF else None
        return None if made is None else nn.Parameter(made, old.requires_grad)

    half = {id(it): it.numel() for it in subject.model.parameters() if it.dtype in HALF}
    if not half or sum(half.values()) > LARGEST_COPY:
        return subject
    args, kwargs = map_tensors(converted, subject.example[:2])
    try:
        model = structural_copy(subject.model)
        _replace(model, parameter)
        for module in model.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = converted(buffer)
        example = Example(args, kwargs, subject.example.shape)
        Subject(structural_copy(model), example).forward()
    except Exception:  # noqa: BLE001 (of the model's own code, or of memory that is lacking)
        return subject
    return Subject(model, example)


def with_tokens_to_mix(subject: Subject) -> Subject:
    """Returns a subject with an example in which tokens are mixed, if the model takes it.

    Rows of few tokens are extended by others, and a mask leaves out no token.
    """
    args, kwargs = map_tensors(_extended, subject.example[:2])
    made = Subject(subject.model, Example(args, kwargs, _shape_of(args, kwargs)))
    given, extended = (
        [*tensors_in([*it.args, *it.kwargs.values()])] for it in (subject.example, made.example)
    )
    if any(one is not other for one, other in zip(given, extended, strict=True)):
        with contextlib.suppress(HookError):
            output = made.forward()
            if not any(bool(each.isnan().any()) for each in tensors_in([output])):
                return made
    return subject


def _extended(value: Tensor) -> Tensor:
    if value.dim() < 2 or value.is_nested or value.is_meta:  # noqa: PLR2004 (rows, tokens)
        return value
    if value.dim() == 2 and value.unique().tolist() == [0, 1]:  # noqa: PLR2004 (a mask)
        value = torch.ones_like(value)
    tokens = value.shape[1]
    if not 0 < tokens <= _FEW:
        return value
    place = torch.arange(TOKENS, device=value.device)
    value = value[:, place % tokens]
    again = (place // tokens).view(-1, *[1] * (value.dim() - 2))
    if value.is_floating_point():
        return noise(1.0)(value).where(again > 0, value)
    # Ids have others below them; of a mask, ones stay ones.
    return (value - again).abs() if int(value.max()) > 1 else value


def _replace(model: nn.Module, new: Callable[[nn.Parameter], nn.Parameter | None]) -> None:
    """Replaces parameters of a structural copy; tied ones by one."""
    made: dict[nn.Parameter, nn.Parameter | None] = {}
    for module in model.modules():
        for name, old in module._parameters.items():
            if old is None:
                continue
            if old not in made:
                made[old] = new(old)
            replaced = made[old]
            module._parameters[name] = old if replaced is None else replaced


def make_generic(model: nn.Module) -> None:
    """Replaces parameters of a structural copy whose elements are all equal by uneven ones.

    A bias of zero, a norm's weight of one and a factor of one make tensors equal that are others
    once the model is trained: no equation between tensors of this copy holds by such a chance.
    """
    generator = torch.Generator("cpu").manual_seed(_SEED)

    def uneven(parameter: nn.Parameter) -> nn.Parameter | None:
        if not _is_constant(parameter):
            return None
        drawn = torch.randn(parameter.shape, generator=generator, device="cpu")
        size = parameter.detach().reshape(-1)[0].abs()
        scaled = drawn.to(parameter) * _NOISE * (size if bool(size) else 1)
        return nn.Parameter(parameter.detach() + scaled, parameter.requires_grad)

    _replace(model, uneven)


def _is_constant(parameter: Tensor) -> bool:
    if not is_kept(parameter):
        return False
    flat = parameter.detach().reshape(-1)
    # The first elements decide nearly all cases.
    return bool((flat[:64] == flat[0]).all()) and bool((flat == flat[0]).all())


def example_of(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Example:
    """Returns the arguments of a call: the caller's, or token ids that are made.

    Raises:
        HookError: there are none, and the model takes no `input_ids`.
    """
    if args or kwargs:
        return Example(args, kwargs, _shape_of(args, kwargs))
    names = _names(model)
    if "input_ids" not in names:
        msg = (
            f"{model._get_name()} does not take input_ids: pass arguments for its forward as an "
            "example, as in fh.quantities(model, x)"
        )
        raise HookError(msg)
    made = {"input_ids": _token_ids(model)}
    if "decoder_input_ids" in names:
        made["decoder_input_ids"] = _token_ids(model, TOKENS - 2)
    return Example((), made, (ROWS, TOKENS))


def _names(model: nn.Module) -> Iterable[str]:
    """Returns the names of a model's arguments.

    A model that passes any on gets the arguments of its first part that takes token ids.
    """
    names = _parameters(model)
    if "input_ids" in names or all(each.kind is not each.VAR_KEYWORD for each in names.values()):
        return names
    inside = (_parameters(module) for module in model.modules())
    return next((each for each in inside if "input_ids" in each), names)


def _parameters(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(model.forward).parameters
    except (TypeError, ValueError):
        return {}


def _shape_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int] | None:
    """Returns rows and tokens, if the first tensor has ids of tokens."""
    tensors = (each for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
    first = next(tensors, None)
    if first is None or first.is_floating_point() or first.dim() != 2:  # noqa: PLR2004 (rows, tokens)
        return None
    return first.shape[0], first.shape[1]


def _token_ids(model: nn.Module, tokens: int = TOKENS) -> Tensor:
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    entries = max((each.num_embeddings for each in tables), default=0)
    config = getattr(model, "config", None)
    size = getattr(getattr(config, "text_config", config), "vocab_size", None)
    if isinstance(size, int):
        entries = min(entries, size) if entries else size
    # The first and last ids of a vocabulary are often special.
    low, high = (entries // 4, entries - entries // 4) if entries > 4 else (0, max(entries, 1))  # noqa: PLR2004 (quarters)
    generator = torch.Generator("cpu").manual_seed(_SEED + TOKENS - tokens)
    drawn = torch.randint(low, high, (ROWS, tokens), generator=generator, device="cpu")
    return drawn.to(_device(model))


def _device(module: nn.Module) -> torch.device:
    """Returns the device of a module's parameters; the CPU for none, and for offloaded ones."""
    devices = (each.device for each in module.parameters() if not each.is_meta)
    return next(devices, torch.device("cpu"))

"""Looks at a model: short forwards of a copy in which every tensor of every module is kept."""

# The copy shares the parameters with the model and nothing else: it is in eval mode, its hooks are
# gone, and what its forwards change (caches, statistics) is its own. So a look leaves no trace,
# whatever else uses the model meanwhile.

from __future__ import annotations

import contextlib
import copy
import hashlib
import inspect
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self, TypeAlias

import torch
from torch import Tensor, nn

from ferrohook._core import keeps_state_in_torch_hooks, release_copy
from ferrohook.attach.hook_info import find_registry
from ferrohook.effects.formulas import SUM
from ferrohook.errors import HookError
from ferrohook.util.tensors import parts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

ROWS: Final = 2
"""Rows of an example that is made for a model."""
TOKENS: Final = 7
"""Tokens of each of its rows."""
LARGEST: Final = 2**26
"""Elements of a tensor that is kept, at most."""
_NOISE: Final = 0.1
"""Size of the noise on parameters whose elements are all equal."""
_SEED: Final = 20


class Example(NamedTuple):
    """Arguments of one call of a model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shape: tuple[int, int] | None
    """Rows and tokens of a row; None if they are not known."""


class Hidden(NamedTuple):
    """Part of an input that no hook without keyword arguments sees."""

    name: str


class ObservedTensor(NamedTuple):
    """Tensor that a module takes or returns, by names."""

    path: str
    inputs: bool
    part: Any
    """Index, key or attribute, as `output_index` of a capture; None for the value itself."""

    @classmethod
    def input(cls, path: str, part: Any) -> Self:
        """Makes the site of a tensor that a module takes."""
        return cls(path, inputs=True, part=part)

    @classmethod
    def output(cls, path: str, part: Any) -> Self:
        """Makes the site of a tensor that a module returns."""
        return cls(path, inputs=False, part=part)


class Sighting(NamedTuple):
    """A value at a site, in one forward."""

    site: ObservedTensor
    value: int
    """Number of the value: tensors of equal contents have one, whatever their shapes."""
    time: int
    shape: tuple[int, ...]


class ModuleCall(NamedTuple):
    """One call of a module."""

    path: str
    start: int
    end: int
    inputs: dict[Any, int]
    """Values that it took, by part."""
    outputs: dict[Any, int]


class Choice(NamedTuple):
    """Integers that a module takes, a row for each position: numbers of experts, say."""

    path: str
    start: int
    """Time at which its call began."""
    numbers: Tensor


Writes: TypeAlias = "Mapping[ObservedTensor, Callable[[Tensor], Tensor]]"
"""Changes of tensors, by site."""


class Look:
    """Tensors of one forward of a model.

    Args:
        model: a structural copy, see `structural_copy`.
        example: arguments of the call.
        writes: changes of tensors; a changed one is seen before and after.

    Raises:
        HookError: the model failed.
    """

    def __init__(self, model: nn.Module, example: Example, writes: Writes | None = None) -> None:
        self.values: list[Tensor] = []
        """Tensors by number, on the CPU."""
        self.times: list[int] = []
        """Time at which each was seen first."""
        self.sightings: list[Sighting] = []
        self.calls: list[ModuleCall] = []
        self.choices: list[Choice] = []
        self.written: dict[ObservedTensor, int] = {}
        """Values at sites after they were changed."""
        self._writes = writes or {}
        self._numbers: dict[Any, int] = {}
        self._time = 0
        self._open: list[tuple[int, dict[Any, int]]] = []
        handles = [handle for path, it in model.named_modules() for handle in self._hook(path, it)]
        try:
            with undisturbed():
                model(*example.args, **example.kwargs)
        except Exception as error:
            msg = (
                f"{model._get_name()} cannot be looked at: its forward failed with "
                f"{type(error).__name__}: {error}; pass an example that it takes to fh.quantities"
            )
            raise HookError(msg) from error
        finally:
            for handle in handles:
                handle.remove()
        self.sites = self._once()
        """Sightings of the sites that were passed once, by site."""

    def _hook(self, path: str, module: nn.Module) -> Iterator[Any]:
        def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self._time += 1
            tensors = dict(_inputs(args, kwargs))
            self._open.append((self._time, self._see(path, tensors, inputs=True)))
            chosen = filter(_is_choice, (*args, *kwargs.values()))
            self.choices += [Choice(path, self._time, each.cpu()) for each in chosen]
            changed = self._changed(path, tensors, inputs=True)
            if changed:
                args = tuple(changed.get(_key(args, n), each) for n, each in enumerate(args))
                kwargs = {name: changed.get(_name(args, name), it) for name, it in kwargs.items()}
            return args, kwargs

        def after(_module: nn.Module, _args: Any, output: Any) -> Any:
            self._time += 1
            tensors = dict(_outputs(output))
            start, inputs = self._open.pop()
            outputs = self._see(path, tensors, inputs=False)
            self.calls.append(ModuleCall(path, start, self._time, inputs, outputs))
            changed = self._changed(path, tensors, inputs=False)
            for part, tensor in changed.items():
                output = _with_part(output, part, tensor)
            return output

        yield module.register_forward_pre_hook(before, with_kwargs=True)
        yield module.register_forward_hook(after)

    def _see(self, path: str, tensors: dict[Any, Tensor], *, inputs: bool) -> dict[Any, int]:
        found = {}
        for part, tensor in tensors.items():
            found[part] = number = self._number(tensor)
            site = ObservedTensor(path, inputs, part)
            self.sightings.append(Sighting(site, number, self._time, tuple(tensor.shape)))
        return found

    def _changed(self, path: str, tensors: dict[Any, Tensor], *, inputs: bool) -> dict[Any, Tensor]:
        changed = {}
        for part, tensor in tensors.items():
            site = ObservedTensor(path, inputs, part)
            if (change := self._writes.get(site)) is not None:
                changed[part] = change(tensor)
                self.written[site] = self._number(changed[part])
        return changed

    def _number(self, tensor: Tensor) -> int:
        kept = tensor.detach().to("cpu", copy=True).contiguous()
        raw = kept.reshape(-1).view(torch.uint8).numpy()
        key = kept.dtype, kept.numel(), hashlib.blake2b(raw.data, digest_size=16).digest()
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.values)
            self.values.append(kept)
            self.times.append(self._time)
        return number

    def _once(self) -> dict[ObservedTensor, Sighting]:
        found: dict[ObservedTensor, Sighting] = {}
        several: set[ObservedTensor] = set()
        for each in self.sightings:
            if each.site in found:
                several.add(each.site)
            found[each.site] = each
        return {site: each for site, each in found.items() if site not in several}

    def tensor(self, site: ObservedTensor, *, after: bool = False) -> Tensor:
        """Returns the tensor at a site that was passed once, or what it was changed to."""
        sighting = self.sites[site]
        number = self.written.get(site, sighting.value) if after else sighting.value
        return self.values[number].view(sighting.shape)


def noise(size: float) -> Callable[[Tensor], Tensor]:
    """Makes the change that adds noise of a size relative to the tensor's own."""

    def change(tensor: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(_SEED + tensor.numel())
        drawn = torch.randn(tensor.shape, generator=generator).to(tensor)
        return tensor + drawn * tensor.std(correction=0).clamp(min=1e-6) * size

    return change


def _kept(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.is_floating_point()
        and value.layout == torch.strided
        and not value.is_meta
        and 0 < value.numel() <= LARGEST
    )


def _is_choice(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.dtype in {torch.int32, torch.int64}
        and value.dim() == 2  # noqa: PLR2004 (positions and choices)
        and not value.is_meta
        and 0 < value.numel() <= LARGEST
    )


def _key(args: tuple[Any, ...], place: int) -> int | None:
    """Returns the part that a positional argument is of the input, as captures name it."""
    return None if len(args) == 1 else place


def _name(args: tuple[Any, ...], name: str) -> str | Hidden:
    """Returns the part that a keyword argument is of the input."""
    return Hidden(name) if args else name


def _inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Any, Tensor]]:
    for place, each in enumerate(args):
        if _kept(each):
            yield _key(args, place), each
    for name, each in kwargs.items():
        if _kept(each):
            yield _name(args, name), each


def _outputs(output: Any) -> Iterator[tuple[Any, Tensor]]:
    if isinstance(output, Tensor):
        if _kept(output):
            yield None, output
        return
    found = [(key, each) for key, each in parts(output) or () if _kept(each)]
    yield from found
    if isinstance(output, tuple) and len(output) == len(found) == len(("hidden", "residual")):
        (_, hidden), (_, residual) = found
        if hidden.shape == residual.shape:
            yield SUM, hidden + residual


def _with_part(output: Any, part: Any, tensor: Tensor) -> Any:
    if part is None:
        return tensor
    if part == SUM and isinstance(output, tuple):
        return type(output)((tensor - output[1], output[1]))
    if isinstance(output, tuple):
        items = [tensor if key == part else each for key, each in enumerate(output)]
        make: Callable[[list[Any]], Any] = getattr(output, "_make", type(output))
        return make(items)
    copied = copy.copy(output)
    copied[part] = tensor
    return copied


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Runs a forward without gradients and with a random state of its own."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices), torch.inference_mode(mode=False), torch.no_grad():
        torch.manual_seed(_SEED)
        yield


def structural_copy(model: nn.Module) -> nn.Module:
    """Copies the modules of a model and shares its parameters, in eval mode and without hooks.

    Raises:
        HookError: the model cannot be copied.
    """
    # `deepcopy` takes what is in its memo; it refuses tensors that are results of operations.
    shared: dict[int, Any] = {id(tensor): tensor for tensor in _shared(model)}
    try:
        copied: nn.Module = copy.deepcopy(model, shared)
    except Exception as error:
        msg = (
            f"{model._get_name()} cannot be looked at: copying it failed with "
            f"{type(error).__name__}: {error}"
        )
        raise HookError(msg) from error
    for module in copied.modules():
        release_copy(module)
        if (registry := find_registry(module)) is not None:
            registry.clear()
        _remove_hooks(module)
    return copied.eval()


def _shared(model: nn.Module) -> Iterator[Tensor]:
    for module in model.modules():
        yield from (each for each in module._parameters.values() if each is not None)
        for each in vars(module).values():
            if isinstance(each, Tensor) and not each.is_leaf:
                yield each


def _remove_hooks(module: nn.Module) -> None:
    """Removes torch's hooks but for those that compute parameters, and a compiled call."""
    for name in ("_forward_hooks", "_forward_pre_hooks"):
        hooks = getattr(module, name)
        for key in [key for key, hook in hooks.items() if not keeps_state_in_torch_hooks(hook)]:
            del hooks[key]
    vars(module).pop("_compiled_call_impl", None)


def make_generic(model: nn.Module) -> None:
    """Replaces parameters of a structural copy whose elements are all equal by uneven ones.

    A bias of zero, a norm's weight of one and a factor of one make tensors equal that are others
    once the model is trained: no equation between tensors of this copy holds by such a chance.
    """
    generator = torch.Generator().manual_seed(_SEED)
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or not _is_constant(parameter):
                continue
            if id(parameter) not in made:
                noise = torch.randn(parameter.shape, generator=generator).to(parameter)
                size = parameter.detach().reshape(-1)[0].abs()
                scaled = noise * _NOISE * (size if bool(size) else 1)
                made[id(parameter)] = nn.Parameter(
                    parameter.detach() + scaled, requires_grad=parameter.requires_grad
                )
            module._parameters[name] = made[id(parameter)]


def _is_constant(parameter: Tensor) -> bool:
    if not _kept(parameter):
        return False
    flat = parameter.detach().reshape(-1)
    # The first elements tell of nearly all.
    return bool((flat[:64] == flat[0]).all()) and bool((flat == flat[0]).all())


def example_of(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Example:
    """Returns the arguments of a call: those of the caller, or token ids that are made.

    Raises:
        HookError: there are none, and the model takes no `input_ids`.
    """
    if args or kwargs:
        return Example(args, kwargs, _shape_of(args, kwargs))
    names = _names(model)
    if "input_ids" not in names:
        msg = (
            f"{model._get_name()} takes no input_ids, so an example is needed: "
            "fh.quantities(model, x), with arguments of its forward"
        )
        raise HookError(msg)
    made = {"input_ids": _token_ids(model)}
    if "decoder_input_ids" in names:
        made["decoder_input_ids"] = _token_ids(model).flip(0)
    return Example((), made, (ROWS, TOKENS))


def _names(model: nn.Module) -> Iterable[str]:
    """Returns the names of a model's arguments.

    Those of a model that passes any on are those of the first part that takes token ids.
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


def _token_ids(model: nn.Module) -> Tensor:
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    entries = max((each.num_embeddings for each in tables), default=0)
    config = getattr(model, "config", None)
    size = getattr(getattr(config, "text_config", config), "vocab_size", None)
    if isinstance(size, int):
        entries = min(entries, size) if entries else size
    # The first and last ids of a vocabulary are often special.
    low, high = (entries // 4, entries - entries // 4) if entries > 4 else (0, max(entries, 1))  # noqa: PLR2004 (quarters)
    generator = torch.Generator().manual_seed(_SEED)
    device = next((each.device for each in model.parameters()), torch.device("cpu"))
    return torch.randint(low, high, (ROWS, TOKENS), generator=generator).to(device)

"""Declarations of a model's recorded outputs, and the modules that they match."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import jit, nn

from ferrohook.attach.classes import plain_class
from ferrohook.errors import HookError, HookTypeError, SelectionError
from ferrohook.util.arguments import describe, expect
from ferrohook.util.suggestions import closest_to

DECLARATION = "_can_record_outputs"
HIDDEN = "hidden_states"


@dataclasses.dataclass(frozen=True)
class OutputRecorder:
    """Selector of modules whose outputs are recorded, with options (transformers' class).

    It matches instances of `target_class`, and modules whose class or path ends in `class_name`.
    The recorders of one key share `detach`, `device` and `dtype`.

    Args:
        target_class: a subclass of `nn.Module`, or None to match only by `class_name`.
        index: the recorded item of an output that is a tuple; other outputs are recorded whole.
        layer_name: match only modules with these segments in their path, such as `self_attn`.
        class_name: the end of the class's name, or of the module's path.
        capture_initial_hidden_state: begin `hidden_states` with the input of the first layer.
        num_hidden_layers_key: the config's attribute with the number of layers, for negative
            indices in `output_hidden_states`.
        detach: detach the tensors from autograd's graph.
        device: the device to move the tensors to, see `capture`.
        dtype: the dtype to cast tensors of floating point to.

    Raises:
        HookTypeError: neither class nor suffix, or one of the wrong type.
        RuntimeError: `device` is no device.
    """

    target_class: type[nn.Module] | None
    index: int = 0
    layer_name: str | None = None
    class_name: str | None = None
    capture_initial_hidden_state: bool = True
    num_hidden_layers_key: str = "num_hidden_layers"
    detach: bool = False
    device: torch.device | str | None = None
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        """Validates the fields."""
        target = self.target_class
        if target is None and not self.class_name:
            msg = "an OutputRecorder needs a target_class or a class_name"
            raise HookTypeError(msg)
        if target is not None and not (isinstance(target, type) and issubclass(target, nn.Module)):
            msg = f"target_class must be a subclass of nn.Module, got {describe(target)}"
            raise HookTypeError(msg)
        expect(self.index, int, "index must be an int")
        for name in ("layer_name", "class_name"):
            expect(getattr(self, name), str | None, f"{name} must be a str")
        expect(self.num_hidden_layers_key, str, "num_hidden_layers_key must be a str")
        for name in ("capture_initial_hidden_state", "detach"):
            expect(getattr(self, name), bool, f"{name} must be a bool")
        expect(self.dtype, torch.dtype | None, "dtype must be a torch.dtype")
        if self.device is not None:
            torch.device(self.device)

    @property
    def kept(self) -> tuple[object, ...]:
        """Options of storage, equal for all recorders of a key."""
        return self.detach, self.device, self.dtype

    def fits(self, module: nn.Module, path: str) -> bool:
        """True if it matches the module; `path` begins with a dot."""
        cls = plain_class(type(module))
        ends = self.class_name is not None and (
            cls.__name__.endswith(self.class_name) or path.endswith(self.class_name)
        )
        if not ends and not (self.target_class and isinstance(module, self.target_class)):
            return False
        return self.layer_name is None or f".{self.layer_name.strip('.')}." in f"{path}."


def declares(module: nn.Module) -> bool:
    """True if a module or its class has a declaration, even an empty one."""
    return DECLARATION in vars(module) or hasattr(type(module), DECLARATION)


def declared_by(module: nn.Module) -> dict[str, Any]:
    """Reads the declaration of a module; an empty dict if it has none.

    Raises:
        HookTypeError: the declaration is no dict.
    """
    declared = getattr(module, DECLARATION, None) or {}
    expect(declared, Mapping, f"{DECLARATION} must be a dict from keys to recorders")
    return cast("dict[str, Any]", declared)


def _recorders(declared: dict[str, Any]) -> dict[str, list[OutputRecorder]]:
    """Parses a declaration."""
    return {
        key: [_parsed(key, each) for each in (value if isinstance(value, list) else [value])]
        for key, value in declared.items()
    }


def _parsed(key: str, declared: Any) -> OutputRecorder:
    if isinstance(declared, OutputRecorder):
        return declared
    # transformers' default: attentions are the second item, after the layer's main output.
    index = 0 if HIDDEN in key else 1
    try:
        if isinstance(declared, str):
            return OutputRecorder(None, index=index, class_name=declared)
        if isinstance(declared, type):
            return OutputRecorder(declared, index=index)
        if hasattr(declared, "target_class"):  # transformers' own recorder
            names = [field.name for field in dataclasses.fields(OutputRecorder)]
            return OutputRecorder(
                **{name: getattr(declared, name) for name in names if hasattr(declared, name)}
            )
    except HookTypeError as error:
        msg = f"{DECLARATION}[{key!r}]: {error}"
        raise HookTypeError(msg) from error
    msg = (
        f"{DECLARATION}[{key!r}] must be a subclass of nn.Module, the end of a class's name, an "
        f"OutputRecorder or a list of these, got {describe(declared)}"
    )
    raise HookTypeError(msg)


def copied(declared: dict[str, Any]) -> dict[str, Any]:
    """Copies a declaration, so that later changes in place of lists and recorders show."""

    def fixed(key: str, each: Any) -> Any:
        return each if isinstance(each, str | type | OutputRecorder) else _parsed(key, each)

    return {
        key: [fixed(key, each) for each in value] if isinstance(value, list) else fixed(key, value)
        for key, value in declared.items()
    }


def is_unchanged(module: nn.Module | None, former: dict[str, Any]) -> bool:
    """True if the declaration of a module still is the one that was `copied`."""
    declared = getattr(module, DECLARATION, None) or {}
    # A recorder that can change in place never equals its copy.
    return declared == former or (module is not None and copied(declared_by(module)) == former)


class LayerKey(NamedTuple):
    """Key that a layer is recorded under."""

    key: str
    # Index of the recorded item, for an output that is a tuple.
    item: int
    # Only for hidden states: true if they begin with the input of the first layer.
    initial: bool | None
    # Detaches, moves and casts a value; None to store it as it is.
    convert: Callable[[Any], Any] | None


class Match(NamedTuple):
    """A recorded module."""

    recorder: OutputRecorder
    module: nn.Module


class Layout(NamedTuple):
    """Modules of a model, each with its `copied` declaration, and the recorded ones by key."""

    modules: list[tuple[nn.Module, dict[str, Any] | None]]
    targets: dict[str, list[Match]]


def layout_of(model: nn.Module) -> Layout:
    """Finds the recorded layers. A sub-model with its own declaration uses that one."""
    modules: list[tuple[nn.Module, dict[str, Any] | None]] = []
    targets: dict[str, list[Match]] = {key: [] for key in declared_by(model)}
    visited: set[int] = set()

    def walk(module: nn.Module, path: str, recorders: dict[str, list[OutputRecorder]]) -> None:
        declared = copied(declared_by(module)) if module is model or declares(module) else None
        recorders = recorders if declared is None else _recorders(declared)
        modules.append((module, declared))
        visited.add(id(module))
        # TorchScript runs its modules outside of Python.
        scripted = isinstance(module, jit.ScriptModule)
        for name, child in () if scripted else module._modules.items():
            if child is not None and id(child) not in visited:
                walk(child, f"{path}.{name}", recorders)
        for key, each in recorders.items():
            for recorder in each:
                if recorder.fits(module, path):
                    targets.setdefault(key, []).append(Match(recorder, module))

    walk(model, "", {})
    for key, found in targets.items():
        if len({target.recorder.kept for target in found}) > 1:
            msg = (
                f"the recorders of {key!r} differ in detach, device or dtype: all recorders of a "
                "key must share them"
            )
            raise HookError(msg)
    return Layout(modules, targets)


def unmatched(model: nn.Module, key: str) -> SelectionError:
    """Makes the error for a key whose recorders match none of the model's modules."""
    named = [
        recorder.class_name or getattr(recorder.target_class, "__name__", "")
        for recorder in _recorders(declared_by(model))[key]
    ]
    classes = dict.fromkeys(type(module).__name__ for module in model.modules())
    closest = list(dict.fromkeys(name for each in named for name in closest_to(each, classes)))
    msg = (
        f"{type(model).__name__} declares {key!r} for {', '.join(named)}, which matches none of "
        f"its modules; the closest classes are {', '.join(closest) or 'none'}"
    )
    return SelectionError(msg)

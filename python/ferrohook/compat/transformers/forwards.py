"""`capture_outputs`: a forward whose output includes the records that its model declares."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import operator
import sys
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
from torch import nn

from ferrohook.attach.classes import plain_class
from ferrohook.compat.transformers.calls import (
    CALL,
    HERE,
    IN_FLIGHT,
    Call,
    EagerCall,
    innermost,
    resolve_indices,
    warn_unattributed,
)
from ferrohook.compat.transformers.declarations import (
    HIDDEN,
    declared_by,
    unmatched,
)
from ferrohook.compat.transformers.layers import install, installation_of
from ferrohook.errors import HookTypeError
from ferrohook.util.arguments import describe, expect_callable
from ferrohook.util.never_trace import never_trace
from ferrohook.util.suggestions import closest_to
from ferrohook.util.weak import PerObject

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ferrohook.compat.transformers.layers import Installation

F = TypeVar("F", bound="Callable[..., Any]")

FLAG = "output_"
ATTENTIONS = "attentions"
CROSS = "cross_attentions"
# Recorded for `output_attentions` too, as in transformers.
WITH_ATTENTIONS = (CROSS, "mask_decoder_attentions")
SELF_AND_CROSS = 2


@overload
def capture_outputs(func: F, *, tie_last_hidden_states: bool = True) -> F: ...
@overload
def capture_outputs(
    func: None = None, *, tie_last_hidden_states: bool = True
) -> Callable[[F], F]: ...
def capture_outputs(func: Any = None, *, tie_last_hidden_states: bool = True) -> Any:
    """Adds the records that a model declares to its forward's output, on request (transformers').

    The class declares it in `_can_record_outputs`: a dict from keys to a subclass of `nn.Module`,
    the end of a class's name, an `OutputRecorder`, or a list of these. Each key has a flag, the
    keyword argument `output_<key>` or, without it, the attribute of that name of `self.config`. The
    recorded values are added under the key to the mapping or dataclass that the forward returns, as
    a tuple in the order of the layers' calls. `hidden_states` begin with the input of the first
    layer. `output_hidden_states` also takes an index or several, and stores None for the others.
    `output_attentions` requests `cross_attentions` and `mask_decoder_attentions` too.
    `return_dict=False` makes the output a tuple.

    Calls in the context of the forward are recorded; calls of its layers on worker threads are if
    they can be attributed (see the guide to migrating). A sub-model with a decorated forward
    records for itself.

    Args:
        func: the forward; None to decorate with options.
        tie_last_hidden_states: replace the last hidden state by the output's `last_hidden_state`
            or `vision_hidden_states`. `config.tie_last_hidden_states` takes precedence.

    The forward raises:
        HookTypeError: an unknown `output_` flag; a declaration of the wrong type; an output that is
            no mapping or dataclass.
        SelectionError: a requested declaration matches no module, or its index is out of range of a
            layer's output.
        HookError: a layer cannot be instrumented.

    Examples:
        >>> class Model(nn.Module):
        ...     _can_record_outputs = {"hidden_states": Layer}
        ...     @capture_outputs
        ...     def forward(self, x):
        ...         ...
        >>> model(x, output_hidden_states=True)["hidden_states"]
    """

    def decorate(forward: Any) -> Any:
        names = parameter_names(forward)

        @functools.wraps(forward)
        def recorded_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            config = getattr(self, "config", None)
            declared = declared_by(self)
            return_dict = kwargs.pop("return_dict", getattr(config, "return_dict", True))
            flags, explicit = _flags(self, declared, config, kwargs)
            if names is not None:  # drops flags that the forward does not take
                kwargs = {
                    name: value
                    for name, value in kwargs.items()
                    if name in names or not name.startswith(FLAG)
                }
            tie = getattr(config, "tie_last_hidden_states", None)
            tie = tie_last_hidden_states if tie is None else tie
            outputs, recorded = _run(_Recording(self, forward, args, kwargs, flags, explicit, tie))
            if recorded:
                outputs = _add_to_output(outputs, _match_output(outputs, recorded, declared))
            return _as_tuple(outputs) if return_dict is False else outputs

        return recorded_forward

    if func is not None:
        expect_callable(func, "capture_outputs must decorate a forward")
    return decorate if func is None else decorate(func)


def parameter_names(function: Callable[..., Any]) -> frozenset[str] | None:
    """Returns the names that it takes as keywords; None if it takes any."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(parameter.name for parameter in parameters)


def _as_constant(function: F) -> F:
    """Makes Dynamo run a function while it traces, and treat the result as a constant."""
    # `torch.compiler.assume_constant_result` does the same but imports Dynamo.
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def _flags(
    model: nn.Module, declared: dict[str, Any], config: object, kwargs: dict[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Returns the requested keys with their flags, and the keys requested by a keyword argument.

    Raises:
        HookTypeError: an unknown flag.
    """
    flags, explicit = {}, []
    for key in declared:
        with_attentions = key in WITH_ATTENTIONS
        name = FLAG + (ATTENTIONS if with_attentions else key)
        value = kwargs[name] if name in kwargs else getattr(config, name, False)
        if value:
            flags[key] = value
            if name in kwargs and not with_attentions:
                explicit.append(key)
    for name, value in kwargs.items():
        if not name.startswith(FLAG) or value is None or value is False:
            continue
        if name.removeprefix(FLAG) not in declared and not hasattr(config, name):
            _check_flag(model, name)
    return flags, explicit


@_as_constant
def _check_flag(model: nn.Module, name: str) -> None:
    # An enclosing model passes on its flags.
    models = [model, *_callers(model)]

    def known() -> bool:
        return any(name in (_FLAGS.get(each) or ()) for each in models)

    if not known():
        # Not seen yet, or changed since.
        for each in models:
            _FLAGS[each] = _flags_of(each)
    if known():
        return
    flags = sorted(_FLAGS[model])
    closest = ", ".join(closest_to(name, flags) or flags)
    msg = (
        f"{type(model).__name__} does not know {name!r}: the closest flags are {closest or 'none'}"
    )
    raise HookTypeError(msg)


def _callers(model: nn.Module) -> Iterator[nn.Module]:
    """Finds the models that contain this one and whose methods run on this thread."""
    frame = inspect.currentframe()
    while frame is not None:
        caller = _unwrap_traced(frame.f_locals.get("self"))
        if isinstance(caller, nn.Module) and any(each is model for each in caller.modules()):
            yield caller
        frame = frame.f_back


def _unwrap_traced(caller: Any) -> Any:
    """Returns the traced `self` if `caller` is a Dynamo object that stands for a frame."""
    variable: Any = getattr(caller, "symbolic_locals", {}).get("self")
    variable = variable.unwrap() if hasattr(variable, "unwrap") else variable
    return getattr(variable, "value", caller)


def _flags_of(model: nn.Module) -> set[str]:
    """Returns the flags that the model or a sub-module declares, or a forward takes."""
    flags: set[str] = set()
    for module in model.modules():
        flags.update(FLAG + key for key in declared_by(module))
        with contextlib.suppress(TypeError, ValueError):  # without a signature
            names = inspect.signature(plain_class(type(module)).forward).parameters
            flags.update(name for name in names if name.startswith(FLAG))
    if not flags.isdisjoint(FLAG + key for key in WITH_ATTENTIONS):
        flags.add(FLAG + ATTENTIONS)
    return flags


# Of models whose forwards got flags that these do not declare.
_FLAGS: PerObject[set[str]] = PerObject()


def _match_output(
    outputs: Any, recorded: dict[str, tuple[Any, ...]], declared: dict[str, Any]
) -> dict[str, tuple[Any, ...]]:
    """Matches recorded values to the output: splits attentions by kind.

    A key without values keeps those of the forward itself, such as records of a sub-model.
    """
    matched = {}
    for key, values in recorded.items():
        former = None if values else _field(outputs, key)
        if former is not None and former is not _ABSENT:
            continue
        matched[key] = values
        if (
            key == ATTENTIONS
            and isinstance(declared[key], list)
            and len(declared[key]) == SELF_AND_CROSS
            and CROSS not in declared
            and _field(outputs, CROSS) is not _ABSENT
        ):
            # A layer's self-attention and its cross-attention alternate.
            matched[key], matched[CROSS] = values[0::2], values[1::2]
    return matched


def _field(outputs: Any, name: str) -> Any:
    """Returns an attribute or an item of an output, `_ABSENT` if it has none."""
    item = outputs.get(name, _ABSENT) if isinstance(outputs, (dict, Mapping)) else _ABSENT
    return getattr(outputs, name, item)


_ABSENT = object()


def _add_to_output(outputs: Any, recorded: dict[str, tuple[Any, ...]]) -> Any:
    if isinstance(outputs, (dict, MutableMapping)):
        for key, values in recorded.items():
            outputs[key] = values
        return outputs
    if not dataclasses.is_dataclass(outputs) or isinstance(outputs, type):
        msg = (
            f"{', '.join(recorded)} was recorded for a forward that returned {describe(outputs)}: "
            "it can only be added to a dict or a dataclass"
        )
        raise HookTypeError(msg)
    missing = recorded.keys() - {field.name for field in dataclasses.fields(outputs)}
    if missing:
        msg = (
            f"{type(outputs).__name__} has no field for these recorded outputs: "
            f"{', '.join(missing)}"
        )
        raise HookTypeError(msg)
    outputs = copy.copy(outputs)
    for key, values in recorded.items():
        object.__setattr__(outputs, key, values)  # works for a frozen dataclass too
    return outputs


def _as_tuple(outputs: Any) -> Any:
    if hasattr(outputs, "to_tuple"):
        return outputs.to_tuple()
    if isinstance(outputs, Mapping):
        values = [*outputs.values()]
    elif dataclasses.is_dataclass(outputs) and not isinstance(outputs, type):
        values = [getattr(outputs, field.name) for field in dataclasses.fields(outputs)]
    else:
        return outputs
    return tuple(value for value in values if value is not None)


@dataclasses.dataclass
class _Recording:
    """Call of a forward, the requested keys with their flags, and those named by a keyword."""

    model: nn.Module
    forward: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    flags: dict[str, Any]
    explicit: list[str]
    tie: bool

    def run(self, call: Call) -> Any:
        outputs = self.forward(self.model, *self.args, **self.kwargs)
        if HIDDEN in self.flags:
            names = ("vision_hidden_states", "last_hidden_state") if self.tie else ()
            states = [_field(outputs, name) for name in names]
            call.finish([state for state in states if state is not _ABSENT])
        return outputs


def _run(request: _Recording) -> tuple[Any, dict[str, tuple[Any, ...]]]:
    """Runs the forward. Returns its output and the values recorded for each key."""
    outer = HERE.call
    if outer is not None:  # passed on by an enclosing model
        request.explicit = []
    traced = torch.compiler.is_compiling() and not isinstance(outer, EagerCall)
    if traced and outer is None and not request.flags:
        return request.forward(request.model, *request.args, **request.kwargs), {}
    recorded: dict[str, list[Any]] = {key: [] for key in request.flags}
    try:
        if traced:
            HERE.call = call = _make_traced_call(request, recorded)
            outputs = request.run(call)
        else:
            outputs = _run_eagerly(request, recorded)
    finally:
        HERE.call = outer
    return outputs, {key: tuple(values) for key, values in recorded.items()}


def _make_traced_call(request: _Recording, recorded: dict[str, list[Any]]) -> Call:
    if not recorded:
        return Call("", None, recorded)
    indices = _indices(request.flags)
    return Call(*_install_for_trace(request.model, indices, request.explicit), recorded)


@_as_constant
def _install_for_trace(
    model: nn.Module, indices: list[int] | None, explicit: list[str]
) -> tuple[str, tuple[int, ...] | None]:
    """Installs for a trace. Returns the installation's number and the selected states."""
    installation = install(model, traced=True)
    selected = _select_states(installation, model, indices, explicit)
    return installation.number, None if selected is None else tuple(selected)


def _run_eagerly(request: _Recording, recorded: dict[str, list[Any]]) -> Any:
    # Assignments end the call: Ctrl-C may land in a call of a function, not in them.
    while True:
        call = _make_call(request, recorded)
        outer, before = HERE.call, CALL.get()
        installation: Installation | None = call.installation
        try:
            IN_FLIGHT.add(call)
            if installation is None or not installation.retired:
                HERE.call = call
                CALL.set(call)
                outputs = request.run(call)
                break
        finally:
            HERE.call = outer
            call.live = False
            CALL.set(before)
            call.end()
    if installation is not None and recorded:
        installation.copies.finish()
    if call.unattributed:
        warn_unattributed(call)
    return outputs


def _make_call(request: _Recording, recorded: dict[str, list[Any]]) -> EagerCall:
    model, arguments, around = request.model, (request.args, request.kwargs), innermost()
    if not recorded:
        return EagerCall(installation_of(model), None, recorded, model, arguments, around)
    installation = install(model)
    explicit = request.explicit if around is None else []
    selected = _select_states(installation, model, _indices(request.flags), explicit)
    return EagerCall(installation, selected, recorded, model, arguments, around)


never_trace(
    sys.modules[__name__],
    "_make_call",
    "a forward that records runs eagerly, and this forward is inside one",
)


def _indices(flags: dict[str, Any]) -> list[int] | None:
    """Returns the indices of the requested hidden states, None for all."""
    flag = flags.get(HIDDEN, True)
    if isinstance(flag, bool):
        return None
    try:
        # Plain ints: Dynamo makes them dynamic once they differ between calls.
        # A symbolic int of Dynamo has no attributes that older versions of torch can look up.
        several = [flag] if isinstance(flag, int) or hasattr(flag, "__index__") else flag
        return [operator.index(each) for each in several]
    except TypeError as error:
        msg = f"output_hidden_states must be a bool, an index or a list of indices, got {flag!r}"
        raise HookTypeError(msg) from error


def _select_states(
    installation: Installation, model: nn.Module, indices: list[int] | None, explicit: list[str]
) -> list[int] | None:
    """Resolves negative indices, if the config has the number of layers.

    Raises for an explicit key that matches no module.
    """
    for key in explicit:
        if not installation.recorders[key]:
            raise unmatched(model, key)
    if indices is None or min(indices, default=0) >= 0:
        return indices
    recorders, config = installation.recorders[HIDDEN], getattr(model, "config", None)
    layers = getattr(config, recorders[0].num_hidden_layers_key, None) if recorders else None
    if layers is None:
        return indices
    return resolve_indices(indices, layers + recorders[0].capture_initial_hidden_state)

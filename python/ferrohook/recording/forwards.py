"""`capture_outputs`: a forward whose output includes the records that its model declares."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import operator
import sys
import weakref
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
from torch import nn

from ferrohook._core import Call, in_flight
from ferrohook.arguments import describe
from ferrohook.classes import plain_class
from ferrohook.errors import HookTypeError
from ferrohook.recording.attribution import warn_unattributed
from ferrohook.recording.declarations import HIDDEN, declared_by, unmatched
from ferrohook.recording.layers import install, installation_of
from ferrohook.recording.tracing import TRACED, TracedCall
from ferrohook.suggestions import closest_to
from ferrohook.traced import never_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ferrohook.recording.layers import Installation

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
            flags, asked = _flags(self, declared, config, kwargs)
            around = in_flight.innermost
            traced = torch.compiler.is_compiling() and around is None
            if around is not None or TRACED.call is not None:
                asked = []  # passed on by an enclosing model
            if names is not None:  # drops flags that the forward does not take
                kwargs = {
                    name: value
                    for name, value in kwargs.items()
                    if name in names or not name.startswith(FLAG)
                }
            if traced:
                outputs, recorded = _traced_call(self, forward, args, kwargs, flags, asked)
            else:
                outputs, recorded = _call(self, around, forward, args, kwargs, flags, asked)
            if recorded:
                tie = getattr(config, "tie_last_hidden_states", None)
                tie = tie_last_hidden_states if tie is None else tie
                outputs = _add_to_output(
                    outputs, _match_output(outputs, recorded, declared, tie=tie)
                )
            return _as_tuple(outputs) if return_dict is False else outputs

        return recorded_forward

    if func is not None and not callable(func):
        msg = f"capture_outputs decorates a forward, got {describe(func)}"
        raise HookTypeError(msg)
    return decorate if func is None else decorate(func)


def parameter_names(function: Callable[..., Any]) -> frozenset[str] | None:
    """Returns the names that it takes as keywords; None if it takes any."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(parameter.name for parameter in parameters)


def _as_constant(function: F) -> F:
    """Has Dynamo run a function while it traces, and treat the result as a constant."""
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
    flags, by_keyword = {}, []
    for key in declared:
        with_attentions = key in WITH_ATTENTIONS
        name = FLAG + (ATTENTIONS if with_attentions else key)
        explicit = name in kwargs
        value = kwargs[name] if explicit else getattr(config, name, False)
        if value:
            flags[key] = value
            if explicit and not with_attentions:
                by_keyword.append(key)
    for name, value in kwargs.items():
        if not name.startswith(FLAG) or value is None or value is False:
            continue
        if name.removeprefix(FLAG) not in declared and not hasattr(config, name):
            _check_flag(model, name)
    return flags, by_keyword


@_as_constant
def _check_flag(model: nn.Module, name: str) -> None:
    # An enclosing model passes on its flags.
    models = [model, *_callers(model)]
    if any(name in _flags_of(each) for each in models):
        return
    for each in models:
        _FLAGS.pop(each, None)  # stale if a sub-model was added
    if any(name in _flags_of(each) for each in models):
        return
    flags = sorted(_flags_of(model))
    closest = ", ".join(closest_to(name, flags) or flags)
    msg = f"{type(model).__name__} knows no {name!r}: the closest it has are {closest or 'none'}"
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


def _flags_of(model: nn.Module) -> frozenset[str]:
    """Returns the flags that the model or a sub-module declares, or a forward takes."""
    with contextlib.suppress(KeyError):
        return _FLAGS[model]
    declared_flags: set[str] = set()
    for module in model.modules():
        declared_flags.update(FLAG + key for key in declared_by(module))
        with contextlib.suppress(TypeError, ValueError):  # without a signature
            declared_flags |= _parameters_of_class(plain_class(type(module)))
    if FLAG + CROSS in declared_flags or FLAG + "mask_decoder_attentions" in declared_flags:
        declared_flags.add(FLAG + ATTENTIONS)
    _FLAGS[model] = frozenset(declared_flags)
    return _FLAGS[model]


_FLAGS: weakref.WeakKeyDictionary[nn.Module, frozenset[str]] = weakref.WeakKeyDictionary()


@functools.cache
def _parameters_of_class(cls: type[nn.Module]) -> frozenset[str]:
    names = inspect.signature(cls.forward).parameters
    return frozenset(name for name in names if name.startswith(FLAG))


def _match_output(
    outputs: Any, recorded: dict[str, tuple[Any, ...]], declared: dict[str, Any], *, tie: bool
) -> dict[str, tuple[Any, ...]]:
    """Matches recorded values to the output: ties the last state, splits attentions by kind."""
    matched = {}
    for key, values in recorded.items():
        matched[key] = values
        if key == HIDDEN and tie and values and values[-1] is not None:
            for name in ("vision_hidden_states", "last_hidden_state"):
                if _has(outputs, name):
                    matched[key] = (*values[:-1], _get(outputs, name))
                    break
        elif (
            key == ATTENTIONS
            and isinstance(declared[key], list)
            and len(declared[key]) == SELF_AND_CROSS
            and CROSS not in declared
            and _has(outputs, CROSS)
        ):
            # A layer's self-attention and its cross-attention alternate.
            matched[key], matched[CROSS] = values[0::2], values[1::2]
    return matched


def _has(outputs: Any, name: str) -> bool:
    return hasattr(outputs, name) or (isinstance(outputs, (dict, Mapping)) and name in outputs)


def _get(outputs: Any, name: str) -> Any:
    return getattr(outputs, name) if hasattr(outputs, name) else outputs[name]


def _add_to_output(outputs: Any, recorded: dict[str, tuple[Any, ...]]) -> Any:
    if isinstance(outputs, (dict, MutableMapping)):
        for key, values in recorded.items():
            outputs[key] = values
        return outputs
    if not dataclasses.is_dataclass(outputs) or isinstance(outputs, type):
        msg = (
            f"{', '.join(recorded)} was recorded for a forward that returned "
            f"{describe(outputs)}: only a dict or a dataclass can take it up"
        )
        raise HookTypeError(msg)
    missing = recorded.keys() - {field.name for field in dataclasses.fields(outputs)}
    if missing:
        msg = f"{type(outputs).__name__} has no field for what was recorded: {', '.join(missing)}"
        raise HookTypeError(msg)
    outputs = copy.copy(outputs)
    for key, values in recorded.items():
        object.__setattr__(outputs, key, values)  # works for a frozen dataclass too
    return outputs


def _as_tuple(outputs: Any) -> Any:
    if hasattr(outputs, "to_tuple"):
        return outputs.to_tuple()
    if isinstance(outputs, Mapping):
        return tuple(value for value in outputs.values() if value is not None)
    if dataclasses.is_dataclass(outputs) and not isinstance(outputs, type):
        values = [getattr(outputs, field.name) for field in dataclasses.fields(outputs)]
        return tuple(value for value in values if value is not None)
    return outputs


def _make_call(  # noqa: PLR0913, PLR0917 (the state of a call)
    model: nn.Module,
    around: Call | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    flags: dict[str, Any],
    asked: list[str],
) -> Call:
    """Installs the recorders and makes the call."""
    installation = install(model) if flags else installation_of(model)
    selected = _select_states(model, flags, asked, installation) if installation and flags else None
    return Call(model, installation, flags, selected, around, args, kwargs)


never_trace(
    sys.modules[__name__],
    "_make_call",
    "a forward that records runs eagerly, and this one is inside of it",
)


def _select_states(
    model: nn.Module, flags: dict[str, Any], asked: list[str], installation: Installation
) -> list[int] | None:
    """Returns the indices of the requested hidden states, None for all."""
    for key in asked:
        if not installation.layers[key]:
            raise unmatched(model, key)
    flag = flags.get(HIDDEN, True)
    if isinstance(flag, bool):
        return None
    try:
        indices = [flag] if isinstance(flag, int) else [operator.index(each) for each in flag]
    except TypeError as error:
        msg = f"output_hidden_states is a bool, an index or a list of them, got {flag!r}"
        raise HookTypeError(msg) from error
    if min(indices, default=0) >= 0:
        return indices
    recorder = installation.recorders[HIDDEN]
    config = getattr(model, "config", None)
    layers = getattr(config, recorder.num_hidden_layers_key, None)
    layers = installation.layers[HIDDEN] if layers is None else layers
    count = layers + recorder.capture_initial_hidden_state
    return [index % count for index in indices if -count <= index < count]


def _call(  # noqa: PLR0913, PLR0917 (the state of a call)
    model: nn.Module,
    around: Call | None,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    flags: dict[str, Any],
    asked: list[str],
) -> tuple[Any, dict[str, tuple[Any, ...]]]:
    """Runs the forward. Returns its output and the recorded values."""
    traced = TRACED.call
    if traced is not None:
        TRACED.call = None
    try:
        while True:
            call = _make_call(model, around, args, kwargs, flags, asked)
            ran = call.run(forward)
            if ran is not None:  # None: another thread has uninstalled meanwhile
                break
    finally:
        if traced is not None:
            TRACED.call = traced
    if call.unattributed:
        warn_unattributed(call)
    return ran


def _static_flag(flag: Any) -> Any:
    """Converts a flag to plain ints: Dynamo makes those that differ between calls dynamic."""
    if isinstance(flag, (list, tuple)):
        return [operator.index(each) for each in flag]
    return operator.index(flag) if isinstance(flag, int) and not isinstance(flag, bool) else flag


@_as_constant
def _install_for_trace(
    model: nn.Module, flags: dict[str, Any], asked: list[str]
) -> tuple[str, tuple[int, ...] | None]:
    """Installs for a trace. Returns the installation's number and the selected states."""
    installation = install(model, traced=True)
    selected = _select_states(model, flags, asked, installation)
    installation.watch()
    return installation.number, None if selected is None else tuple(selected)


def _traced_call(  # noqa: PLR0913, PLR0917 (the state of a call)
    model: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    flags: dict[str, Any],
    asked: list[str],
) -> tuple[Any, dict[str, tuple[Any, ...]]]:
    """`_call` for Dynamo: runs the forward and records in the trace."""
    outer = TRACED.call
    if not flags and outer is None:
        return forward(model, *args, **kwargs), {}
    if not torch.compiler.is_compiling() and outer is None:  # the graph broke: this is Python
        return _call(model, None, forward, args, kwargs, flags, asked)
    if HIDDEN in flags:
        flags = {**flags, HIDDEN: _static_flag(flags[HIDDEN])}
    number, selected = _install_for_trace(model, flags, asked) if flags else ("", None)
    call = TracedCall(number, list(flags), selected)
    TRACED.call = call
    try:
        outputs = forward(model, *args, **kwargs)
    finally:
        TRACED.call = outer
    return outputs, {key: tuple(values) for key, values in call.recorded.items()}

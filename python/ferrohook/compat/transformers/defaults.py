"""`merge_with_config_defaults`: defaults of a forward's arguments, from the model's config."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from ferrohook.compat.transformers.forwards import parameter_names
from ferrohook.util.arguments import expect_callable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

F = TypeVar("F", bound="Callable[..., Any]")

_WITH_DEFAULTS = (
    "use_cache",
    "vision_feature_layer",
    "vision_feature_select_strategy",
    "vision_aspect_ratio",
)
_STRATEGIES = ("default", "full")
_ABSENT = object()
_LOG = logging.getLogger("ferrohook")


def merge_with_config_defaults(func: F) -> F:
    """Fills in arguments that the caller of a forward left out, from `self.config` (transformers').

    They are `use_cache`, `vision_feature_layer`, `vision_feature_select_strategy`,
    `vision_aspect_ratio` and `is_causal`. None counts as left out, except for `is_causal`.
    `use_cache` is off where `self.gradient_checkpointing` is on while training with gradients. An
    `is_causal` that differs from the config's is set in the config too during the call, as masks
    are made from it: other threads see it, and overlapping calls that differ in it need a config
    each.

    The forward raises:
        ValueError: a `vision_feature_select_strategy` other than default and full.
    """
    expect_callable(func, "merge_with_config_defaults must decorate a forward")
    names = parameter_names(func)
    places = {name: place for place, name in enumerate(inspect.signature(func).parameters, -1)}

    @functools.wraps(func)
    def merged_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        config = getattr(self, "config", None)
        positionals = list(args)
        for name in _WITH_DEFAULTS:
            place = places.get(name, len(positionals))
            positional = place < len(positionals)
            value = positionals[place] if positional else kwargs.get(name)
            value = getattr(config, name, None) if value is None else value
            if value is None or not (positional or names is None or name in names):
                continue
            value = _checked_default(self, name, value)
            if positional:
                positionals[place] = value
            else:
                kwargs[name] = value
        if names is None or "is_causal" in names:
            place = places.get("is_causal", len(positionals))
            if place < len(positionals):
                causal = positionals[place]
            else:
                causal = kwargs.get("is_causal", getattr(config, "is_causal", None))
                if causal is not None:
                    kwargs["is_causal"] = causal
            if causal is not None:
                with _in_config(config, "is_causal", causal):
                    return func(self, *positionals, **kwargs)
        return func(self, *positionals, **kwargs)

    return cast("F", merged_forward)


def _checked_default(model: nn.Module, name: str, value: Any) -> Any:
    if name == "vision_feature_select_strategy" and value not in _STRATEGIES:
        msg = (
            f"vision_feature_select_strategy must be one of {', '.join(_STRATEGIES)}, got {value!r}"
        )
        raise ValueError(msg)
    checkpointed = model.training and getattr(model, "gradient_checkpointing", False)
    if name == "use_cache" and value and checkpointed and torch.is_grad_enabled():
        if not torch.compiler.is_compiling():
            _warn_no_cache()
        return False
    return value


@functools.cache
def _warn_no_cache() -> None:
    _LOG.warning(
        "use_cache=True does not work with gradient checkpointing: use_cache is set to False"
    )


@contextlib.contextmanager
def _in_config(config: Any, name: str, value: Any) -> Iterator[None]:
    """Sets an attribute of the config, unless it is None, and restores it at exit."""
    if config is None or getattr(config, name, None) == value:
        yield
        return
    before = vars(config).get(name, _ABSENT)
    setattr(config, name, value)
    try:
        yield
    finally:
        if before is _ABSENT:
            delattr(config, name)
        else:
            setattr(config, name, before)

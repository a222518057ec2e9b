"""`merge_with_config_defaults`: arguments, and defaults from the config."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ferrohook.compat.transformers import capture_outputs, merge_with_config_defaults
from support.recording import X


class Merged(nn.Module):
    @merge_with_config_defaults
    @capture_outputs
    def forward(self, x: Any, use_cache: Any = None, **kwargs: Any) -> Any:
        return {"use_cache": use_cache, **kwargs, "config": vars(self.config).copy()}


class Config:
    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


def test_a_strategy_that_is_none_of_the_two_is_refused() -> None:
    model = Merged()
    model.config = Config()
    with pytest.raises(ValueError, match="one of default, full, got 'all'"):
        model(X, vision_feature_select_strategy="all")


def test_no_cache_while_checkpointing(caplog: pytest.LogCaptureFixture) -> None:
    model = Merged()
    model.config = Config(use_cache=True)
    model.gradient_checkpointing = True
    with caplog.at_level("WARNING", logger="ferrohook"):
        assert model(X)["use_cache"] is False
    with torch.no_grad():
        assert model(X)["use_cache"] is True
    assert model.eval()(X)["use_cache"] is True


def test_is_causal_may_be_positional_or_none() -> None:
    class Positional(nn.Module):
        config = Config(is_causal=True)

        @merge_with_config_defaults
        def forward(self, x: Any, is_causal: Any = None) -> Any:
            return is_causal, self.config.is_causal

    assert Positional()(X, False) == (False, False)
    assert Positional()(X) == (True, True)
    model = Merged()
    model.config = Config(is_causal=True)
    assert model(X, is_causal=None)["is_causal"] is None

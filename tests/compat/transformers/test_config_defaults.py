"""`merge_with_config_defaults`: arguments, and defaults from the config."""

from __future__ import annotations

from typing import Any

import pytest
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


def test_defaults_come_from_the_config_and_arguments_take_precedence() -> None:
    model = Merged()
    model.config = Config(use_cache=True, vision_feature_layer=-2)
    assert model(X)["use_cache"] is True
    assert model(X)["vision_feature_layer"] == -2
    assert model(X, use_cache=None)["use_cache"] is True
    assert model(X, None)["use_cache"] is True
    assert model(X, use_cache=False)["use_cache"] is False
    assert model(X, False)["use_cache"] is False
    with pytest.raises(ValueError, match="one of default, full, got 'all'"):
        model(X, vision_feature_select_strategy="all")


def test_no_cache_while_checkpointing(caplog: pytest.LogCaptureFixture) -> None:
    model = Merged()
    model.config = Config(use_cache=True)
    model.gradient_checkpointing = True
    with caplog.at_level("WARNING", logger="ferrohook"):
        assert model(X)["use_cache"] is False
    assert model.eval()(X)["use_cache"] is True


def test_is_causal_is_set_in_the_config_during_the_call() -> None:
    model = Merged()
    model.config = Config(is_causal=True)
    output = model(X, is_causal=False)
    assert output["is_causal"] is False
    assert output["config"]["is_causal"] is False
    assert model.config.is_causal is True
    model.config = Config()
    assert model(X, is_causal=False)["config"] == {"is_causal": False}
    assert vars(model.config) == {}
    assert "is_causal" not in model(X)

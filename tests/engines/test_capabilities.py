"""The table of engines: their releases and their features."""

from __future__ import annotations

import pytest

from ferrohook.engines import Capabilities, capabilities
from ferrohook.errors import HookError


def engine(version: str) -> Capabilities:
    return Capabilities("some-engine", version, ("1.2", "1.3"), ("x",), {"y": "it cannot"})


def test_a_release_that_nobody_tried_is_refused_by_name() -> None:
    engine("1.3.7").check_version()
    engine("1.4.0").check_version(untried=True)

    assert not engine("1.4.0").works
    with pytest.raises(HookError, match=r"some-engine 1\.4\.0 was not tested .* only 1\.2, 1\.3"):
        engine("1.4.0").check_version()
    with pytest.raises(HookError, match="or set SOME_ENGINE=1 to let the self-test decide"):
        engine("1.4.0").check_version(option="SOME_ENGINE=1")


def test_a_refused_feature_has_its_reason() -> None:
    with pytest.raises(HookError, match="y is not supported with some-engine: it cannot"):
        engine("1.2").refuse("y")


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(ValueError, match="transformers, vllm, sglang; got 'tgi'"):
        capabilities("tgi")

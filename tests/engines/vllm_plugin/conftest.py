"""Models and engines that the tests of vLLM share. They run by `make vllm`, in its environment."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

INSTALLED = importlib.util.find_spec("vllm") is not None


def pytest_configure(config: pytest.Config) -> None:
    if INSTALLED:
        config.addinivalue_line("filterwarnings", "ignore")  # vLLM's own, many


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Any]]:
    """Folders and models of transformers, by kind."""
    from support.vllm_engine import CONFIGS, save_model  # noqa: PLC0415 (needs transformers)

    folders = {kind: tmp_path_factory.mktemp(kind) for kind in CONFIGS}
    return {kind: (folder, save_model(kind, folder)) for kind, folder in folders.items()}


@pytest.fixture(scope="module")
def llm(models: dict[str, tuple[Any, Any]]) -> Iterator[Any]:
    """An engine of Llama in this process."""
    from support.vllm_engine import start, stop  # noqa: PLC0415

    engine = start(models["llama"][0])
    yield engine
    stop(engine)

"""Models and engines that the tests of vLLM share. They run by `make vllm`, in its environment."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

INSTALLED = importlib.util.find_spec("vllm") is not None


def pytest_configure(config: pytest.Config) -> None:
    if INSTALLED:
        config.addinivalue_line("filterwarnings", "ignore")  # vLLM's own, many


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Limits follow from the machine and its load: from the time that an import of vLLM takes."""
    ours = [item for item in items if item.path.is_relative_to(Path(__file__).parent)]
    if INSTALLED and ours:
        from support.vllm_engine import patience  # noqa: PLC0415 (needs transformers)

        for item in ours:
            item.add_marker(pytest.mark.timeout(patience()))


@pytest.fixture(scope="session", autouse=True)
def _no_process_is_left() -> Iterator[None]:
    """Ends the processes that a fixture left behind which failed."""
    yield
    if INSTALLED:
        from support.vllm_engine import end_children  # noqa: PLC0415

        end_children(set())


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

"""Models and schedulers that the tests of SGLang share. They run by `make sglang`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from support.sglang_engine import Local

INSTALLED = importlib.util.find_spec("sglang") is not None


def pytest_configure(config: pytest.Config) -> None:
    if INSTALLED:
        config.addinivalue_line("filterwarnings", "ignore")  # SGLang's own, many


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Limits leave room for a busy machine: an import of SGLang takes a minute there."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(1200))


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Folder and model of transformers."""
    from support.serving import save_model  # noqa: PLC0415 (needs transformers)

    folder = tmp_path_factory.mktemp("llama")
    return folder, save_model("llama", folder)


@pytest.fixture(scope="session")
def local(llama: tuple[Path, Any]) -> Local:
    """The scheduler of this process: mixed chunks, overlap, the radix cache."""
    from support.sglang_engine import Local  # noqa: PLC0415

    return Local(llama[0], enable_mixed_chunk=True)

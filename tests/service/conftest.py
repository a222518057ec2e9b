"""The example's service, and its oracle."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.limits import LIMIT

if TYPE_CHECKING:
    from collections.abc import Iterator

    import httpx

    from benches.services import LockedEncoder
    from examples.service.encoder import Encoder


@pytest.fixture(scope="module")
def encoder(one_thread: None) -> Encoder:
    from examples.service.encoder import Encoder

    encoder = Encoder(max_capture_bytes=2**20)
    encoder.instrument()
    return encoder


@pytest.fixture(scope="module")
def plain(one_thread: None) -> LockedEncoder:
    """The same model with PyTorch's hooks: the oracle for responses."""
    from benches.services import LockedEncoder

    return LockedEncoder()


@pytest.fixture(scope="module")
def url(encoder: Encoder) -> Iterator[str]:
    from support.service import serving

    with serving(encoder) as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[httpx.Client]:
    import httpx

    with httpx.Client(base_url=url, timeout=LIMIT) as client:
        yield client

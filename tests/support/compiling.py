"""Marks of tests under torch.compile."""

from __future__ import annotations

import sys
import sysconfig
from typing import Any

import pytest

from support import amounts

BACKENDS = ["eager", "inductor" if amounts.everything else "aot_eager"]
"""Backends of tests that compile often: Inductor takes seconds for a kernel that is not cached."""

compiles = [
    pytest.mark.filterwarnings("ignore"),  # Dynamo and Inductor warn about themselves
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.skipif(
        bool(sysconfig.get_config_var("Py_GIL_DISABLED")) and sys.version_info < (3, 14),
        reason="torch.compile does not support free-threaded CPython 3.13",
    ),
]


def compiled(test: Any) -> Any:
    """Decorates a test that compiles."""
    for mark in compiles:
        test = mark(test)
    return test

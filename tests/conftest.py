"""Fixtures and skips that all tests share."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import sysconfig
import tempfile
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest.register_assert_rewrite("support")
with contextlib.suppress(ModuleNotFoundError):  # a machine with a GPU may lack it
    import hypothesis

    # No deadline: the time of an example says nothing on a loaded machine. The examples depend on
    # the test only, not on the run, and none is remembered: one commit has one result.
    hypothesis.settings.register_profile(
        "ferrohook", deadline=None, derandomize=True, database=None
    )
    hypothesis.settings.load_profile("ferrohook")
if capability := os.environ.get("ATEN_CPU_CAPABILITY"):
    # Inductor's cache holds kernels for other CPU capabilities, some of which fail to compile here.
    cache = os.path.join(tempfile.gettempdir(), f"torchinductor-{capability}")  # noqa: PTH118
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", cache)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--other-blas", action="store_true", help="round matrix products otherwise for each shape"
    )
    parser.addoption(
        "--fake-cuda", action="store_true", help="run tests marked cuda on an emulated GPU"
    )
    parser.addoption(
        "--whole", action="store_true", help="run every case of tests that run a fixed part"
    )
    parser.addoption(
        "--requests",
        type=int,
        help="number of random requests in each test that counts wrong answers",
    )


@pytest.hookimpl(tryfirst=True)  # before pytest-timeout reads its option
def pytest_configure(config: pytest.Config) -> None:
    from support import amounts  # noqa: PLC0415 (registered for rewriting above)

    amounts.everything = config.getoption("whole")
    if config.getoption("whole") and config.getoption("timeout") is None:
        config.option.timeout = 1_800  # thousands of examples, on a machine that others use too
    if config.getoption("other_blas"):
        import support.blas  # noqa: F401, PLC0415 (replaces torch's kernels)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Runs a test marked `cuda` under each schedule of the emulated GPU."""
    markers = {each.name for each in metafunc.definition.iter_markers()}
    emulated = "cuda" in markers and "not_emulated" not in markers
    if emulated and metafunc.config.getoption("fake_cuda"):
        from support.fake_cuda import SCHEDULES  # noqa: PLC0415 (its parts import Dynamo)

        metafunc.parametrize("_gpu", SCHEDULES, indirect=True)


@pytest.fixture(autouse=True)
def _gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Opens the emulated GPU, in tests that run on it."""
    if not hasattr(request, "param"):
        yield
        return
    from support.fake_cuda import FakeCuda  # noqa: PLC0415 (its parts import Dynamo)

    with FakeCuda(request.param):
        yield


@pytest.fixture(autouse=True)
def _deterministic(_gpu: None) -> None:
    torch.manual_seed(0)


@pytest.fixture
def switch_often() -> Iterator[None]:
    """Lets threads interleave as finely as the interpreter can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """One torch thread, for a fixed order of summation."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Enables KeyboardInterrupt, which background jobs of a shell ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def collect_cheaply() -> None:
    """Makes collections in a test skip all earlier objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Dynamo with empty caches and no recompile limit."""
    import torch._dynamo  # noqa: PLC0415 (takes seconds)

    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=64):
        yield
    torch._dynamo.reset()


def pytest_collection_finish() -> None:
    """Makes collections in tests skip imported objects: a million took half a second."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Lets the interpreter free imported objects, as its extensions look for leaks at exit."""
    gc.unfreeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips tests that this machine cannot run, with a reason."""
    skipped = {}
    if config.getoption("fake_cuda"):
        skipped["not_emulated"] = "needs what the emulated GPU lacks"
    elif not torch.cuda.is_available():
        skipped["cuda"] = "needs a GPU, and torch sees none"
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        skipped["collects_at_once"] = "free-threaded CPython collects after thousands of objects"
        if sys.version_info < (3, 14):
            skipped["frees_classes"] = "free-threaded CPython 3.13 makes classes immortal"
    for item in items:
        for marker, reason in skipped.items():
            if found := item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=": ".join([reason, *found.args])))

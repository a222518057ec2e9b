"""Operations of all kinds at once, with and without a GIL: a million with `--whole`."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import sysconfig
import time
import weakref
from typing import TYPE_CHECKING

import pytest
from torch import nn

import ferrohook as fh
from support.amounts import amount
from support.limits import LIMIT
from support.probes import Call, Probe
from support.threads import THREADS, run_together

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.modules import Module

pytestmark = pytest.mark.usefixtures("switch_often")
FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))


# --- The big mix --------------------------------------------------------------------------------


KINDS = ("plain_pre", "kwargs_pre", "typed_pre", "plain", "kwargs", "typed")


class Scaled(nn.Module):
    def forward(self, call: Call, *, scale: int) -> int:
        # The forward phase begins after this.
        call.last = time.perf_counter_ns()
        return scale


class Mix:
    """One module, the threads' operations on it and their counts."""

    CALLS, PAIRS, SWITCHES = (amount(each // 8, whole=each) for each in (50_000, 125_000, 100_000))
    """Operations of each calling, each registering and the one switching thread."""

    def __init__(self) -> None:
        self.hooked: Module = fh.HookedModule(Scaled())
        # Permanent hooks, first and last of both phases; some change the arguments or the output.
        self.stay = [Probe() for _ in range(4)]
        self.stay_handles = [
            self.stay[0].register(self.hooked, "scaling", priority=2),
            self.stay[1].register(self.hooked, "plain_pre", priority=-2),
            self.stay[2].register(self.hooked, "adding", priority=2),
            self.stay[3].register(self.hooked, "adding", priority=-2),
        ]
        self.switched = [Probe() for _ in range(3)]
        self.switched_handles = [
            probe.register(self.hooked, kind, priority=1)
            for probe, kind in zip(self.switched, ("typed_pre", "kwargs", "typed"), strict=True)
        ]
        self.removed: list[tuple[fh.typing.HookHandle, list[int]]] = []
        self.sampled: list[weakref.ref[Probe]] = []

    def call(self, thread: int) -> None:
        order = {probe: place for place, probe in enumerate(self.stay)}
        for scale in range(self.CALLS):
            call = Call(thread, scale)
            assert self.hooked(call, scale=scale) == 2 * scale + 2
            fired = call.fired
            assert len(set(fired)) == len(fired), "fired twice in one phase"
            assert [order[probe] for probe in fired if probe in order] == [0, 1, 2, 3]

    def register(self, seed: int) -> None:
        choose = random.Random(seed)  # noqa: S311 (not for cryptography)
        mine: list[tuple[fh.typing.HookHandle, Probe]] = []

        def remove_one() -> None:
            handle, probe = mine.pop(choose.randrange(len(mine)))
            handle.remove()
            probe.gone = time.perf_counter_ns()

        for done in range(self.PAIRS):
            probe = Probe()
            kind, prepend = choose.choice(KINDS), choose.random() < 0.5
            handle = probe.register(self.hooked, kind, prepend=prepend)
            mine.append((handle, probe))
            self.removed.append((handle, probe.calls))
            if done % 64 == 0:
                self.sampled.append(weakref.ref(probe))
            if done % 4096 == 0:
                gc.collect()
                self.check_list()
            while len(mine) > choose.randrange(3):
                remove_one()
        while mine:
            remove_one()

    def check_list(self) -> None:
        ids = [hook.id for hook in self.hooked.hooks("forward")]
        assert len(set(ids)) == len(ids)
        assert (ids[0], ids[-1]) == (self.stay_handles[2].id, self.stay_handles[3].id)

    def switch(self) -> None:
        choose = random.Random(0)  # noqa: S311 (not for cryptography)
        half, end = THREADS * self.CALLS // 2, time.monotonic() + LIMIT
        done = 0
        # On a busy machine it may be through before the others have begun.
        while done < self.SWITCHES or (
            self.stay_handles[0].calls < half and time.monotonic() < end
        ):
            done += 1
            place = choose.randrange(len(self.switched))
            handle, probe = self.switched_handles[place], self.switched[place]
            if handle.enabled:
                handle.disable()
                probe.gone = time.perf_counter_ns()
            else:
                probe.gone = None
                handle.enable()


@pytest.mark.usefixtures("collect_cheaply")
def test_operations_of_all_kinds_at_once() -> None:
    mix = Mix()

    run_together(
        *(lambda thread=thread: mix.call(thread) for thread in range(THREADS)),
        *(lambda seed=seed: mix.register(seed) for seed in range(2)),
        mix.switch,
    )

    calls = THREADS * Mix.CALLS
    assert [handle.calls for handle in mix.stay_handles] == [calls] * 4
    assert [sum(probe.calls) for probe in mix.stay] == [calls] * 4
    assert len(mix.removed) == 2 * Mix.PAIRS
    assert all(handle.removed for handle, _ in mix.removed)
    assert [handle.calls for handle, _ in mix.removed] == [sum(each) for _, each in mix.removed]
    assert sum(handle.calls for handle, _ in mix.removed) > 0, "the threads never met"
    switched = [handle.calls for handle in mix.switched_handles]
    assert switched == [sum(probe.calls) for probe in mix.switched]
    assert 0 < min(switched) <= max(switched) < calls
    live = sorted(handle.id for handle in (*mix.stay_handles, *mix.switched_handles))
    assert sorted(hook.id for hook in mix.hooked.hooks()) == live
    gc.collect()
    assert [ref for ref in mix.sampled if ref() is not None] == []


# --- The interpreter ----------------------------------------------------------------------------


@pytest.mark.skipif(not FREE_THREADED, reason="needs an interpreter built without the GIL")
def test_importing_ferrohook_does_not_turn_the_gil_on() -> None:
    # PYTHON_GIL overrides imports; without it, an import may turn the GIL on.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHON_GIL"}
    code = "import sys; import ferrohook._core; print(sys._is_gil_enabled())"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", "")


@pytest.mark.skipif(not FREE_THREADED, reason="needs an interpreter built without the GIL")
@pytest.mark.skipif(os.environ.get("PYTHON_GIL") == "1", reason="PYTHON_GIL=1 asks for the GIL")
def test_these_tests_ran_without_the_gil() -> None:
    enabled: Callable[[], bool] = vars(sys)["_is_gil_enabled"]
    assert not enabled()

"""Interrupts, recursion, interpreter exit, forks and imports."""

from __future__ import annotations

import os
from typing import Any

import pytest

import ferrohook as fh
from support.interpreters import assert_ends_well, run_fresh, run_with_torch
from support.modules import Echo, Module

WITH_MODULE = """
class Echo(nn.Module):
    def forward(self, *value):
        return value
hooked = fh.HookedModule(Echo())
"""


# --- Interrupts and recursion -------------------------------------------------------------------


@pytest.mark.parametrize("on_error", ["raise", "disable", "ignore"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_ctrl_c_in_a_hook_ends_the_call_and_harms_nothing(
    on_error: Any, error: type[BaseException]
) -> None:
    hooked: Module = fh.HookedModule(Echo())
    interrupting = True
    raised = error()

    def interrupted(module: Any, args: Any, output: Any) -> None:
        if interrupting:
            raise raised

    handle = hooked.register_forward_hook(interrupted, on_error=on_error)
    behind = hooked.register_forward_hook(lambda *_: None)
    with pytest.raises(error) as caught:
        hooked(1)
    assert caught.value is raised
    assert (handle.calls, behind.calls) == (1, 0)
    assert handle.enabled
    hooked.quiesce(0)
    interrupting = False
    assert hooked(1) == 1
    assert (handle.calls, behind.calls) == (2, 1)
    handle.remove(wait=True, timeout=0)


RECURSION = {
    "a hook calls the module": "hooked.register_forward_hook(lambda m, a, o: m(*a))",
    "a pre-hook calls the module": "hooked.register_forward_pre_hook(lambda m, a: m(*a))",
    "a typed hook calls the module": (
        "hooked.register_forward_pre_hook(fh.ForwardPreHook(lambda x: hooked(x)))"
    ),
    "the module is its own hook": "hooked.register_forward_hook(hooked)",
    "the module is its own always_call hook": (
        "hooked.register_forward_hook(hooked, always_call=True)"
    ),
    "the module is its own forward": "hooked.inner.__dict__['forward'] = hooked",
}


@pytest.mark.parametrize("setup", RECURSION.values(), ids=RECURSION)
def test_infinite_recursion_is_a_recursion_error(setup: str) -> None:
    code = f"""
def recurse():
    hooked = fh.HookedModule(Echo())
    {setup}
    try:
        hooked(1)
    except RecursionError:
        print("refused")
    hooked.quiesce(0)
    hooked.inner.__dict__.pop("forward", None)
    calls = [hook.calls for hook in hooked.hooks()]
    assert all(calls), calls
    hooked.clear_hooks()
    assert hooked(1) == (1,)

warnings.simplefilter("ignore")
recurse()
thread = threading.Thread(target=recurse)
thread.start()
thread.join()
recurse()
"""
    assert_ends_well(run_with_torch(WITH_MODULE + code), "refused\n" * 3)


# --- Interpreter exit ---------------------------------------------------------------------------


ALL_PHASES = """
hooked.register_forward_pre_hook(lambda m, a: None)
hooked.register_forward_hook(lambda m, a, o: (hooked, None)[1])
hooked.register_full_backward_pre_hook(lambda m, g: None)
hooked.register_full_backward_hook(fh.BackwardHook(lambda i, o: None))
"""


def test_the_interpreter_exits_with_hooks_alive() -> None:
    code = """
hooked.inner.__dict__["wrapper"] = hooked
output = hooked(torch.ones(1, requires_grad=True))
sys.kept = [hooked, hooked.hooks(), output]
"""
    assert_ends_well(run_with_torch(WITH_MODULE + ALL_PHASES + code))


def test_hooks_work_during_interpreter_exit() -> None:
    code = """
class Last:
    def __init__(self):
        self.handle = hooked.register_forward_hook(lambda m, a, o: print("called", flush=True))
    def __call__(self, *args):
        pass
    def __del__(self, write=os.write):
        self.handle.remove()
        write(1, b"finalised\\n")
hooked.register_forward_hook(Last())
def at_exit(hooked=hooked):
    hooked(1)
    hooked.register_forward_pre_hook(lambda m, a: print("called too"))
    hooked(1)
import atexit
atexit.register(at_exit)
"""
    done = run_with_torch(WITH_MODULE + code)
    assert_ends_well(done, "called\ncalled too\ncalled\nfinalised\n")


@pytest.mark.parametrize("where", ["hook", "module", "backward hook", "backward in hook"])
@pytest.mark.parametrize(
    "does",
    {
        "blocks": "threading.Event().wait()",
        "runs": "while True: pass",
        "sleeps": "while True: time.sleep(1e-4)",
    }.items(),
    ids=lambda item: item[0],
)
def test_the_interpreter_exits_with_a_daemon_thread_inside_a_hook(
    does: tuple[str, str], where: str
) -> None:
    code = f"""
started = threading.Event()
def stay(*args):
    started.set()
    {does[1]}
x = torch.ones(1, requires_grad=True)
if {where!r} == "hook":
    hooked.register_forward_hook(stay)
    target = lambda: hooked(x)
elif {where!r} == "module":
    hooked.register_forward_hook(lambda m, a, o: None)
    hooked.inner.__dict__["forward"] = stay
    target = lambda: hooked(x)
elif {where!r} == "backward hook":
    hooked.register_full_backward_hook(stay)
    target = lambda: hooked(x)[0].backward()
else:
    other = fh.HookedModule(Echo())
    other.register_full_backward_pre_hook(stay)
    hooked.register_forward_pre_hook(lambda m, a: other(*a)[0].backward())
    target = lambda: hooked(x)
threading.Thread(target=target, daemon=True).start()
assert started.wait(60)
"""
    assert_ends_well(run_with_torch(WITH_MODULE + code))


def test_the_interpreter_exits_with_a_daemon_thread_that_computes_a_checksum() -> None:
    code = """
from ferrohook._core import crc32
data, started = bytearray(1 << 24), threading.Event()
def work():
    while True:
        crc32(data)
        started.set()
threading.Thread(target=work, daemon=True).start()
assert started.wait(60)
"""
    assert_ends_well(run_with_torch(code))


def test_the_interpreter_exits_with_a_daemon_thread_waiting_for_a_hook() -> None:
    code = """
inside = threading.Event()
def block(*args):
    inside.set()
    threading.Event().wait()
handle = hooked.register_forward_hook(block)
threading.Thread(target=hooked, daemon=True).start()
assert inside.wait(60)
for wait in (lambda: handle.remove(wait=True), hooked.quiesce):
    threading.Thread(target=wait, daemon=True).start()
while not handle.removed:
    time.sleep(0)
"""
    assert_ends_well(run_with_torch(WITH_MODULE + code))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_fork_with_hooks_alive() -> None:
    code = """
warnings.simplefilter("ignore")  # of forking with threads, which is the point
seen = []
handles = [hooked.register_forward_hook(lambda m, a, o: seen.append(a)) for _ in range(3)]
inside, release = threading.Event(), threading.Event()
def block(m, a, o):
    if a == ("block",):
        inside.set()
        release.wait()
blocked = hooked.register_forward_hook(block)
other = threading.Thread(target=hooked, args=("block",))
other.start()
assert inside.wait(60)
seen.clear()
child = os.fork()
if child == 0:
    hooked(1)
    assert seen == [(1,)] * 3, seen
    before = handles[-1].id
    new = hooked.register_forward_hook(lambda m, a, o: 5)
    assert new.id > blocked.id
    assert hooked(1) == 5
    for handle in handles:
        handle.remove(wait=True)
    # The thread inside it exists in the parent alone.
    try:
        blocked.remove(wait=True, timeout=0.01)
    except TimeoutError:
        assert blocked.removed
        os._exit(0)
    os._exit(1)
_, status = os.waitpid(child, 0)
assert not any(handle.removed for handle in (*handles, blocked))
release.set()
other.join()
hooked.quiesce(60)
assert len(hooked.hooks()) == 4
print(os.waitstatus_to_exitcode(status))
"""
    assert_ends_well(run_with_torch(WITH_MODULE + code), "0\n")


# --- Imports ------------------------------------------------------------------------------------


def test_the_extension_works_without_torch() -> None:
    code = """
sys.modules["torch"] = None
import ferrohook._core
registry = ferrohook._core.Registry()
registry.quiesce()
print(registry.list(), registry.list("forward"))
import ferrohook
print(ferrohook.ForwardHook(print).phase, ferrohook._core.HookHandle.__name__)
try:
    ferrohook.HookedModule
except ImportError as error:
    print(error.name)
"""
    assert_ends_well(run_fresh(code), "[] []\nforward HookHandle\ntorch\n")


def test_importing_and_calling_does_not_import_dynamo() -> None:
    # Importing Dynamo takes seconds, a cost for users who compile nothing.
    code = """
if "torch._dynamo" in sys.modules:
    print("torch imports it itself")
    raise SystemExit
hooked.register_forward_hook(lambda m, a, o: None)
hooked(1)
print("torch._dynamo" in sys.modules)
"""
    done = run_with_torch(WITH_MODULE + code)
    if done.stdout == "torch imports it itself\n":
        pytest.skip(done.stdout)
    assert_ends_well(done, "False\n")


def test_the_package_itself_does_not_import_torch() -> None:
    assert_ends_well(run_fresh("import ferrohook; print('torch' in sys.modules)"), "False\n")

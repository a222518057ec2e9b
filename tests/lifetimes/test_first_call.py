"""The first hooked call of a process, in the middle of which another one runs."""

from __future__ import annotations

import pytest

from support.amounts import amount
from support.interpreters import assert_ends_well, run_fresh, run_with_torch

FIRST_CALLS = {
    "wrapped": """
hooked = fh.HookedModule(nn.Linear(2, 2))
hooked.register_forward_hook(lambda *_: None)
def call():
    hooked(x)
""",
    "instrumented": """
model = nn.Linear(2, 2)
fh.instrument(model)
model.register_forward_hook(lambda *_: None)
def call():
    model(x)
""",
    "backward": """
hooked = fh.HookedModule(nn.Linear(2, 2))
hooked.register_full_backward_hook(lambda *_: None)
def call():
    with torch.enable_grad():
        hooked(x)
""",
    "a failing hook": """
hooked = fh.HookedModule(nn.Linear(2, 2))
import logging
logging.disable()
def call():
    hooked.register_forward_hook(lambda *_: 1 / 0, on_error="disable")
    hooked(x)
""",
    "captured": """
model = nn.Linear(2, 2)
capture = fh.capture
def call():
    with torch.enable_grad(), capture(model, "", grads=True) as acts:
        model(x)
    acts[""]
""",
    "detected": """
from ferrohook.detectors import NonFiniteDetector
hooked = fh.HookedModule(nn.Linear(2, 2))
hooked.register_forward_hook(NonFiniteDetector())
def call():
    hooked(x)
""",
    "detected by torch": """
from ferrohook.detectors import NonFiniteDetector
hooked = fh.HookedModule(nn.Identity())
hooked.register_forward_hook(NonFiniteDetector())
integers = torch.ones(2, dtype=torch.int32)
def call():
    hooked(integers)
""",
    "a point": """
from ferrohook.compat.transformer_lens import HookedRootModule
model = HookedRootModule.wrap(nn.Linear(2, 2), {"": "hook_out"})
hooks = [("hook_out", lambda tensor, hook: None)]
def call():
    model.run_with_hooks(x, fwd_hooks=hooks)
""",
}

# Each child makes the call at another run of the garbage collector, up to the last that a first
# call has; the later ones, which are alike, further apart.
AT_EACH_COLLECTION = (
    f"apart = {amount(3, whole=8)}"
    """
import signal, traceback
class Litter:
    def __init__(self):
        self.me = self
    def __del__(self):
        global collections
        if first_call:
            collections += 1
            Litter()
            if collections == wanted:
                try:
                    call()
                except BaseException:
                    traceback.print_exc()
                    os._exit(2)
x = torch.ones(1, 2, requires_grad=True)
torch.set_num_threads(1)
first_call, collections, wanted = False, 0, 0
MORE = 9
status = MORE
while status == MORE:
    wanted += 1 + wanted // apart
    if not (child := os.fork()):
        signal.alarm(30)
        gc.collect()
        Litter()
        gc.set_threshold(1)
        first_call = True
        call()
        first_call = False
        os._exit(MORE if collections >= wanted else 0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in {0, MORE}, (status, wanted)
assert wanted > 1
"""
)


@pytest.mark.collects_at_once
@pytest.mark.parametrize("kind", FIRST_CALLS)
def test_a_finaliser_may_call_a_module_in_the_middle_of_the_first_call(kind: str) -> None:
    assert_ends_well(run_with_torch(FIRST_CALLS[kind] + AT_EACH_COLLECTION))


def test_a_signal_handler_may_call_a_module_in_the_middle_of_the_first_call() -> None:
    code = """
import signal
signal.alarm(30)
x = torch.ones(1, 2)
signal.signal(signal.SIGUSR1, lambda *_: call())
initialise = nn.Module.__init__
interrupts = []
def interrupted(module, *args, **kwargs):
    if not interrupts:
        interrupts.append(1)
        signal.raise_signal(signal.SIGUSR1)
    initialise(module, *args, **kwargs)
nn.Module.__init__ = interrupted
call()
assert interrupts
"""
    assert_ends_well(run_with_torch(FIRST_CALLS["wrapped"] + code))


@pytest.mark.collects_at_once
def test_a_finaliser_may_enter_a_scope_while_another_is_entered() -> None:
    # CPython 3.11 collects garbage in the allocations of `PyContextVar_Set`, which this code walks.
    code = f"""
class Litter:
    def __init__(self):
        self.me = self
    def __del__(self):
        if littering:
            with fh.scope():
                pass
            Litter()
littering = True
Litter()
gc.set_threshold(1)
for entering in range({amount(36, whole=100)}):
    scope = fh.scope()
    gc.collect()
    more = [[] for _ in range(entering % 12)]
    with scope:
        pass
littering = False
"""
    assert_ends_well(run_with_torch(code))


def test_a_fork_during_the_first_registering_of_another_thread_ends() -> None:
    # A child for each moment: importing torch takes seconds, and none has registered before.
    code = """
import faulthandler
import torch
from torch import nn
import ferrohook as fh
warnings.simplefilter("ignore")  # forks of a process with numpy's threads
for moment in range(6):
    if not (child := os.fork()):
        break
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == 0, (moment, status)
else:
    sys.exit()
model, begun = nn.Sequential(nn.ReLU(), nn.ReLU()), threading.Event()

def register():
    begun.set()
    fh.register(model, "0", lambda *_: None)

thread = threading.Thread(target=register)
thread.start()
begun.wait()
time.sleep(moment * 0.02)  # a moment within the import, or after it
child = os.fork()
if not child:
    faulthandler.dump_traceback_later(20, exit=True)
    fh.register(model, "1", lambda *_: None)
    with fh.capture(model, "1") as acts:
        model(torch.ones(1))
    os._exit(0 if "1" in acts else 2)
thread.join()
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
assert status == 0, status
"""
    assert_ends_well(run_fresh(code))

"""Types of the arguments and results of ferrohook's functions, for annotations."""

from ferrohook._core import HookHandle as HookHandle
from ferrohook.attach.hook_info import HookInfo as HookInfo
from ferrohook.data.collect import Collected as Collected
from ferrohook.effects.typed import OnError as OnError
from ferrohook.effects.typed import Phase as Phase
from ferrohook.gates.state import Stopped as Stopped
from ferrohook.names.select import Selector as Selector
from ferrohook.plans import Prepared as Prepared
from ferrohook.plans import Request as Request
from ferrohook.plans.run import RunResult as RunResult
from ferrohook.quantity import Quantity as Quantity
from ferrohook.registration.register import HandleGroup as HandleGroup
from ferrohook.registration.register import Hook as Hook
from ferrohook.tokens.positions import At as At
from ferrohook.util.arguments import OutputIndex as OutputIndex

__all__ = [
    "At",
    "Collected",
    "HandleGroup",
    "Hook",
    "HookHandle",
    "HookInfo",
    "OnError",
    "OutputIndex",
    "Phase",
    "Prepared",
    "Quantity",
    "Request",
    "RunResult",
    "Selector",
    "Stopped",
]


def __dir__() -> list[str]:
    return __all__

# Stubs of the Rust extension, checked against it by stubtest.

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from threading import Thread
from typing import Any, Final, Literal, Protocol, Self, TypeAlias, TypeVar, final

from typing_extensions import Buffer, disjoint_base

__all__ = [
    "Activation",
    "Attachment",
    "AttachmentContext",
    "BatchBase",
    "CallCache",
    "CallCounter",
    "Collector",
    "Dispatcher",
    "Frame",
    "HookHandle",
    "HookedBase",
    "InFlight",
    "InstallationBase",
    "InterventionBase",
    "LatencyDetector",
    "MaskedHook",
    "ModuleTree",
    "NativeDetector",
    "NativeHook",
    "NonFiniteDetector",
    "NormDetector",
    "PlanGuard",
    "PointHook",
    "RecordedCall",
    "RecordedLayerBase",
    "Recorder",
    "Registry",
    "RequestBase",
    "RootCalls",
    "ShapeDetector",
    "Stop",
    "TypedHook",
    "__version__",
    "assign_class",
    "calls_in_progress",
    "crc32",
    "frames",
    "in_flight",
    "record",
    "record_all",
    "refuse_async",
    "register_all",
    "release_copy",
    "remember_merged",
    "store_rows",
    "to_device",
]

frames: ContextVar[tuple[Frame, ...]]
in_flight: InFlight

__version__: str

_Phase: TypeAlias = Literal["forward_pre", "forward", "backward_pre", "backward"]
_Handles: TypeAlias = list[tuple[Any, HookHandle]]
_OnError: TypeAlias = Literal["raise", "disable", "ignore"]
_Args: TypeAlias = tuple[Any, ...]
_Kwargs: TypeAlias = dict[str, Any]
# PyTorch's contracts. The module is Any, since a hook may expect any class of module.
_PlainForwardPreHook: TypeAlias = (
    Callable[[Any, _Args], Any] | Callable[[Any, _Args, _Kwargs], tuple[Any, _Kwargs] | None]
)
_PlainForwardHook: TypeAlias = (
    Callable[[Any, _Args, Any], Any] | Callable[[Any, _Args, _Kwargs, Any], Any]
)
_PlainBackwardPreHook: TypeAlias = Callable[[Any, Any], Any]
_PlainBackwardHook: TypeAlias = Callable[[Any, Any, Any], Any]

_PhaseT_co = TypeVar("_PhaseT_co", covariant=True)

class _Typed(Protocol[_PhaseT_co]):
    # A typed hook of one phase: a subclass of TypedHook with that phase in its type.
    @property
    def fn(self) -> Callable[..., Any]: ...
    @property
    def phase(self) -> _PhaseT_co: ...

@disjoint_base
class NativeHook: ...

@disjoint_base
class TypedHook(NativeHook):
    def __new__(cls, phase: str, fn: Callable[..., Any], /) -> Self: ...
    @property
    def fn(self) -> Callable[..., Any]: ...
    @property
    def phase(self) -> _Phase: ...
    def __reduce__(self) -> tuple[type[Self], tuple[Callable[..., Any]]]: ...

@disjoint_base
class PointHook(NativeHook):
    def __new__(
        cls,
        user_hook: Callable[..., Any],
        is_permanent: bool = False,
        context_level: int | None = None,
        aliases: Sequence[str] | None = None,
    ) -> Self: ...
    @property
    def user_hook(self) -> Callable[..., Any]: ...
    @property
    def is_permanent(self) -> bool: ...
    @property
    def context_level(self) -> int | None: ...
    @property
    def _aliases(self) -> Sequence[str] | None: ...
    @property
    def hook(self) -> HookHandle: ...
    def _registered(self, handle: HookHandle) -> None: ...

@disjoint_base
class NativeDetector(NativeHook):
    def snapshot(self) -> dict[str, Any]: ...
    @property
    def modules(self) -> dict[str, Self]: ...
    def merge(self, other: Self) -> None: ...
    def __reduce__(self) -> tuple[type[Self], tuple[()], Any]: ...
    def __setstate__(self, state: Any) -> None: ...

@final
class CallCounter(NativeDetector):
    def __new__(cls) -> Self: ...

@final
class LatencyDetector(NativeDetector):
    def __new__(cls) -> Self: ...

@final
class ShapeDetector(NativeDetector):
    def __new__(cls, *, limit: int = 1024) -> Self: ...

@final
class NonFiniteDetector(NativeDetector):
    def __new__(cls) -> Self: ...
    @property
    def first(self) -> str | None: ...

@final
class NormDetector(NativeDetector):
    def __new__(cls) -> Self: ...

@final
class HookHandle:
    @property
    def id(self) -> int: ...
    @property
    def phase(self) -> _Phase: ...
    @property
    def removed(self) -> bool: ...
    @property
    def enabled(self) -> bool: ...
    @property
    def calls(self) -> int: ...
    @property
    def traced(self) -> bool: ...
    priority: int
    def remove(self, *, wait: bool = False, timeout: float | None = None) -> None: ...
    def disable(self) -> None: ...
    def enable(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *exc_info: object) -> None: ...
    def __reduce__(self) -> tuple[Callable[[str], Self], tuple[_Phase]]: ...
    @staticmethod
    def _removed(phase: _Phase) -> HookHandle: ...

@final
class Registry:
    def __new__(cls) -> Self: ...
    @property
    def module(self) -> int: ...
    @property
    def errors(self) -> int: ...
    def register(
        self,
        phase: _Phase,
        hook: NativeHook | Callable[..., Any],
        *,
        prepend: bool = False,
        with_kwargs: bool = False,
        always_call: bool = False,
        priority: int = 0,
        on_error: _OnError = "raise",
        timed: bool = False,
        scope: Frame | None = None,
    ) -> HookHandle: ...
    def list(
        self, phase: _Phase | None = None
    ) -> list[tuple[int, _Phase, Any, int, bool, int, float | None]]: ...
    def handles(self) -> _Handles: ...
    def clear(self, phase: _Phase | None = None) -> None: ...
    def quiesce(self, timeout: float | None = None) -> None: ...
    def fork(self, copy: Callable[[Any], Any]) -> Registry: ...
    @property
    def hooked(self) -> bool: ...
    @property
    def traced(self) -> tuple[tuple[tuple[tuple[Any, str, bool], ...], ...], bool]: ...
    @property
    def operating(self) -> tuple[tuple[_Phase, str], ...]: ...
    @property
    def id_tensor(self) -> Any: ...

@final
class CallCache:
    def __new__(cls) -> Self: ...

@final
class Dispatcher:
    KEY: Final = "_ferrohook_dispatcher"
    @property
    def registry(self) -> Registry: ...
    @staticmethod
    def methods(module: type) -> list[Any]: ...
    @property
    def explicit(self) -> bool: ...
    def __copy__(self) -> Dispatcher: ...
    def __deepcopy__(self, memo: dict[int, Any]) -> Dispatcher: ...

@final
class Attachment:
    def __new__(cls) -> Self: ...
    def instrument(
        self, modules: list[Any], make_class: Callable[[Any], Any], explicit: bool
    ) -> list[tuple[int, Exception]]: ...  # each a HookError
    def register(
        self,
        modules: list[Any],
        phase: _Phase,
        hook: NativeHook | Callable[..., Any],
        *,
        prepend: bool = False,
        with_kwargs: bool = False,
        always_call: bool = False,
        priority: int = 0,
        on_error: _OnError = "raise",
        timed: bool = False,
        scope: Frame | None = None,
        names: list[str] | None = None,
        entry: int | None = None,
    ) -> list[HookHandle]: ...
    def adopt(self, modules: list[Any], handles: list[HookHandle]) -> None: ...
    def release_with(self, scope: Frame) -> None: ...
    def release(self) -> bool: ...
    @property
    def released(self) -> bool: ...

@disjoint_base
class AttachmentContext:
    def __new__(cls, *_others: Any, **_options: Any) -> Self: ...
    @property
    def attachment(self) -> Attachment: ...
    def _leaving(self, _fine: bool, /) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, error: type[BaseException] | None = None, *_others: object) -> None: ...

def release_copy(module: Any) -> bool: ...
def crc32(data: Buffer, value: int = 0, /) -> int: ...
def assign_class(module: Any, plain: type, instrumented: type | None) -> bool: ...

@final
class Activation:
    def __new__(cls, frame: Frame) -> Self: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *_exception: object) -> None: ...

@disjoint_base
class Frame:
    def __new__(cls, tag: object = None, *, for_graphs: bool = False) -> Self: ...
    @property
    def tag(self) -> Any: ...
    @property
    def error(self) -> BaseException | None: ...
    @property
    def closed(self) -> bool: ...
    @property
    def _entered(self) -> tuple[Frame, ...] | None: ...
    def enter_outermost(self) -> None: ...
    def take_out(self) -> None: ...
    def changes(self) -> int: ...
    @property
    def failed(self) -> bool: ...
    @property
    def hooked(self) -> bool: ...
    @property
    def _begun(self) -> Any: ...  # what the tag makes
    def fail(self, error: BaseException) -> bool: ...
    def expire(self, seconds: float) -> None: ...
    def _close(self) -> bool: ...
    def __enter__(self) -> Any: ...  # what the tag makes, or the frame
    def __exit__(self, error: type[BaseException] | None = None, *_others: object) -> None: ...

@disjoint_base
class BatchBase(Frame):
    def __new__(
        cls,
        rows: dict[Any, Any] | Sequence[tuple[Frame, tuple[Any, int, int, int, int, Any]]],
        dim: int,
        size: int | None,
        gathered: list[tuple[Any, Any, int | None]],
        *_others: object,
    ) -> Self: ...
    @property
    def dim(self) -> int: ...
    @property
    def size(self) -> int | None: ...
    @property
    def members(self) -> list[Frame]: ...
    @property
    def _ran(self) -> list[bool]: ...
    @property
    def _named(self) -> int: ...
    @property
    def _gathered(self) -> list[Any]: ...
    def _serve(self) -> None: ...
    def _live(self) -> list[int]: ...
    def _version(self) -> int: ...
    def _fail(self, member: int, error: BaseException) -> None: ...
    def _mark_ran(self, member: int) -> None: ...
    def _rows(self, member: int) -> list[int]: ...
    def _set_positions(
        self, values: list[int], columns: int | None, lengths: dict[Any, Any]
    ) -> None: ...
    def _place(self) -> None: ...
    @property
    def _positions(self) -> list[int] | None: ...
    @property
    def _columns(self) -> int | None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, error: type[BaseException] | None = None, *_others: object) -> None: ...

@disjoint_base
class InstallationBase:
    def __new__(
        cls, modules: Sequence[tuple[Any, dict[str, Any] | None]], *_others: object
    ) -> Self: ...
    @property
    def attachment(self) -> Attachment: ...
    def holds(self) -> bool: ...
    def watch(self) -> None: ...
    def retire(self) -> None: ...

class _LayerKey(Protocol):
    @property
    def key(self) -> str: ...
    @property
    def item(self) -> int: ...
    @property
    def initial(self) -> bool | None: ...
    @property
    def convert(self) -> Callable[[Any], Any] | None: ...

@disjoint_base
class RecordedLayerBase(NativeHook):
    def __new__(
        cls, installation: InstallationBase, keys: Sequence[_LayerKey], *_others: object
    ) -> Self: ...
    def record(self, call: RecordedCall, args: _Args, kwargs: _Kwargs, output: Any) -> None: ...

@final
class RecordedCall:
    def __new__(
        cls,
        model: Any,
        installation: InstallationBase | None,
        recorded: dict[str, list[Any]],
        selected: Sequence[int] | None,
        arguments: tuple[_Args, _Kwargs],
        other_threads: list[Thread],
    ) -> Self: ...
    def __enter__(self) -> bool: ...
    def __exit__(self, *_exception: object) -> None: ...
    @property
    def model(self) -> Any: ...
    @property
    def installation(self) -> Any: ...  # a subclass of InstallationBase, or None
    @property
    def around(self) -> RecordedCall | None: ...
    @property
    def records(self) -> bool: ...
    @property
    def other_threads(self) -> list[Thread]: ...
    @property
    def unattributed(self) -> set[str]: ...
    def known(self) -> list[Any]: ...

@final
class InFlight:
    @property
    def innermost(self) -> RecordedCall | None: ...

class Stop(BaseException): ...

def calls_in_progress() -> set[RecordedCall]: ...
def store_rows(
    collector: Collector, values: list[tuple[int, Any]], positions: list[int] | None
) -> None: ...
def to_device(tensor: Any, device: Any) -> Any: ...
def remember_merged(on: bool) -> None: ...
def count_sites(opened: bool) -> None: ...
def name_positions(frame: Frame, ats: list[Any]) -> None: ...
def places_at(at: Any, positions: list[int], prompt_length: int | None) -> list[int]: ...
def record_all(
    collector: Collector,
    modules: list[Any],
    priority: int,
    scope: Frame,
    inputs: bool = False,
    part: object = None,
    place: _Place | None = None,
    indices: list[int] | None = None,
) -> list[HookHandle]: ...
def refuse_async(callable: Callable[..., Any], taker: str, /) -> None: ...  # noqa: A002 (the name in Rust)
def register_all(hooks: Sequence[tuple[Any, PointHook]], phase: _Phase, scope: Frame) -> None: ...
def record(module: int, phase: str, key: str, value: Any, *, whole: bool = False) -> None: ...

@final
class Collector:
    def __new__(
        cls,
        names: list[str],
        *,
        detach: bool,
        copy: str,
        keep: int | None,
        convert: Callable[[Any], Any] | None,
        grads: bool,
        max_bytes: int | None,
        stop: int | None,
    ) -> Self: ...
    def ran(self) -> list[int]: ...
    def values(self, index: int, *, stale: bool = False) -> list[Any]: ...
    def positions(self, index: int) -> list[tuple[list[int], int | None] | None]: ...
    def gradients(self, index: int) -> list[list[Any]]: ...
    def clear(self) -> None: ...

@final
class Recorder(NativeHook):
    def __new__(
        cls,
        collector: Collector,
        index: int,
        inputs: bool,
        part: Any,
        place: _Place | None = None,
    ) -> Self: ...
    @property
    def phase(self) -> _Phase: ...

@final
class RootCalls(NativeHook):
    def __new__(cls, collector: Collector, place: _Place | None = None) -> Self: ...

class _Place(Protocol):
    @property
    def capture(self) -> int: ...
    @property
    def mask(self) -> int | None: ...

class _PreparedPlan(Protocol):
    fired: bool
    warned: bool

@disjoint_base
class RequestBase(Frame):
    def __new__(
        cls,
        shared: Frame,
        plan: _PreparedPlan,
        templates: tuple[Collector, ...],
        max_bytes: int | None = None,
        *_others: object,
    ) -> Self: ...
    @property
    def id(self) -> int: ...
    @property
    def _plan(self) -> Any: ...  # the one that it was made with
    def _collector(self, capture: int) -> Collector: ...
    def set_masks(self, masks: tuple[Any, ...], *, positioned: bool) -> None: ...
    @property
    def positioned(self) -> bool: ...
    @property
    def prompt_lengths(self) -> list[int]: ...
    def warn_of_silence(self) -> None: ...
    def __exit__(self, error: type[BaseException] | None = None, *_others: object) -> None: ...

@disjoint_base
class InterventionBase(NativeHook):
    def __new__(
        cls,
        operation: str,
        numbers: tuple[float | None, ...],
        part: int | str | None,
        width: int | None,
        traced: tuple[Any, ...],
        *_others: object,
    ) -> Self: ...
    def apply(self, value: Any) -> Any: ...  # the value's type

@final
class MaskedHook(NativeHook):
    def __new__(cls, hook: NativeHook | Callable[..., Any], mask: int) -> Self: ...

@final
class PlanGuard(NativeHook):
    def __new__(
        cls,
        tree: ModuleTree,
        positions: Callable[[Any, _Args, _Kwargs, Any], None] | None,
    ) -> Self: ...

@final
class ModuleTree:
    def __new__(cls, modules: list[Any]) -> Self: ...
    def holds(self) -> bool: ...

@disjoint_base
class HookedBase:
    def __new__(cls, *_args: Any, **_kwargs: Any) -> Self: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
    @property
    def _inner(self) -> Any: ...
    @property
    def _registry(self) -> Registry: ...
    def _wrap(self, inner: Any, registry: Registry) -> None: ...
    def _release(self) -> None: ...
    def register_forward_pre_hook(
        self,
        hook: _Typed[Literal["forward_pre"]] | NativeDetector | _PlainForwardPreHook,
        *,
        prepend: bool = False,
        with_kwargs: bool = False,
        priority: int = 0,
        on_error: _OnError = "raise",
        scope: Frame | None = None,
    ) -> HookHandle: ...
    def register_forward_hook(
        self,
        hook: _Typed[Literal["forward"]] | NativeDetector | _PlainForwardHook,
        *,
        prepend: bool = False,
        with_kwargs: bool = False,
        always_call: bool = False,
        priority: int = 0,
        on_error: _OnError = "raise",
        scope: Frame | None = None,
    ) -> HookHandle: ...
    def register_full_backward_pre_hook(
        self,
        hook: NativeDetector | _PlainBackwardPreHook,
        prepend: bool = False,
        *,
        priority: int = 0,
        on_error: _OnError = "raise",
        scope: Frame | None = None,
    ) -> HookHandle: ...
    def register_full_backward_hook(
        self,
        hook: _Typed[Literal["backward"]] | NativeDetector | _PlainBackwardHook,
        prepend: bool = False,
        *,
        priority: int = 0,
        on_error: _OnError = "raise",
        scope: Frame | None = None,
    ) -> HookHandle: ...
    def register_backward_hook(
        self,
        hook: _Typed[Literal["backward"]] | NativeDetector | _PlainBackwardHook,
        prepend: bool = False,
        *,
        priority: int = 0,
        on_error: _OnError = "raise",
        scope: Frame | None = None,
    ) -> HookHandle: ...

"""`Hook`: the base class of detectors and controllers."""

from __future__ import annotations

import abc
import copy
import enum
import uuid
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self

from ferrohook._core import refuse_async
from ferrohook.errors import HookError as _HookError
from ferrohook.errors import HookTypeError
from ferrohook.util.arguments import expect

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from ferrohook._core import HookHandle


class HookType(enum.StrEnum):
    """Time at which a hook runs: before or after its module's forward."""

    FORWARD = "forward"
    PRE_FORWARD = "pre_forward"

    @property
    def phase(self) -> Literal["forward", "forward_pre"]:
        """The registry's phase."""
        return "forward" if self is HookType.FORWARD else "forward_pre"


class HookError(_HookError):
    """A detector or a controller raised while a module was called.

    Attributes:
        hook_id: the hook's id.
        hook_type: `forward` or `pre_forward`.
        original_error: its exception; `__cause__` too.
        layer: path of its module; None if it was registered without `Layers`.
    """

    def __init__(
        self, hook_id: str, hook_type: str, original_error: Exception, layer: str | None = None
    ) -> None:
        # `args` has all arguments: pickle rebuilds exceptions from it.
        super().__init__(hook_id, hook_type, original_error, layer)
        self.hook_id = hook_id
        self.hook_type = hook_type
        self.original_error = original_error
        self.layer = layer

    def __str__(self) -> str:
        error = f"{type(self.original_error).__name__}: {self.original_error}"
        return f"the {self.hook_type} hook {self.hook_id!r}{_on(self.layer)} raised {error}"


class Owner(Protocol):
    """The `Layers` that a hook is registered with."""

    def unregister_hook(self, hook: Any, /) -> bool:
        """Removes the hook."""
        ...


class Hook(abc.ABC):
    """A hook object, registered by `Layers`; see `Detector` and `Controller`.

    Any other subclass implements `_hook_fn`.

    Args:
        layer_signature: name or index of its layer.
        hook_type: `HookType.FORWARD`, `HookType.PRE_FORWARD`, or the string of one.
        hook_id: unique among the hooks of a `Layers`; None for a random UUID.

    Raises:
        ValueError: an unknown `hook_type`.
        HookTypeError: an argument has the wrong type.
    """

    _types: ClassVar[tuple[HookType, ...]] = tuple(HookType)
    """Allowed hook types."""

    _priority: ClassVar[int] = 0
    """Default priority."""

    _default_layer: ClassVar[str | None] = None
    """Layer used without a `layer_signature`."""

    # Steps of `_run_before` and `_run_after`; a hook may have both.
    _detects: ClassVar[bool] = False
    _controls: ClassVar[bool] = False

    # State of this process or of one registration; not copied or pickled.
    _handle: HookHandle | None = None
    _layer: str | None = None
    _layers: Owner | None = None
    _context: Any = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if (cls._detects or cls._controls) and cls._hook_fn is not None:
            method = "process_activations" if cls._detects else "modify_activations"
            msg = (
                f"{cls.__name__} has a _hook_fn, which only direct subclasses of Hook may "
                f"implement: implement {method} instead"
            )
            raise HookTypeError(msg)

    def __init__(
        self,
        layer_signature: str | int | None = None,
        hook_type: HookType | str = HookType.FORWARD,
        hook_id: str | None = None,
    ) -> None:
        expect(hook_id, str | None, "hook_id must be a str or None")
        check_signature(layer_signature, optional=True)
        for name in ("_hook_fn", "process_activations", "modify_activations"):
            if method := getattr(self, name, None):
                refuse_async(method, name)
        self.layer_signature = layer_signature
        self._hook_type = self._validated(hook_type)
        self._id = str(uuid.uuid4()) if hook_id is None else hook_id
        self._enabled = True

    @property
    def id(self) -> str:
        """The hook's id, unique among the hooks of a `Layers`."""
        return self._id

    @property
    def hook_id(self) -> str:
        """Alias of `id`."""
        return self._id

    @property
    def hook_type(self) -> HookType:
        """Time at which it runs; settable while it is not registered."""
        return self._hook_type

    @hook_type.setter
    def hook_type(self, hook_type: HookType | str) -> None:
        if self._registered:
            msg = (
                f"{self} is already registered: set its hook_type before registering it, or pass "
                "hook_type to register_hook"
            )
            raise _HookError(msg)
        self._hook_type = self._validated(hook_type)

    @property
    def layer(self) -> str | None:
        """Path of the layer it is registered on, `""` for the model itself."""
        return self._layer if self._registered else None

    @property
    def enabled(self) -> bool:
        """True if calls of its module run it."""
        handle = self._handle
        # The registry may have disabled it (`on_error="disable"`).
        return self._enabled if handle is None else handle.enabled

    def enable(self) -> None:
        """Lets calls run it again, at its place in the order."""
        self._enabled = True
        if self._handle is not None:
            self._handle.enable()

    def disable(self) -> None:
        """Lets calls skip it, at no cost; it keeps its place in the order."""
        self._enabled = False
        if self._handle is not None:
            self._handle.disable()

    @property
    def context(self) -> Any:
        """Object from `set_context`, else the `Layers` it is registered with."""
        return self._layers if self._context is None else self._context

    def set_context(self, context: Any) -> None:
        """Sets an object for look-ups, such as of `special_token_ids`."""
        self._context = context

    def get_torch_hook(self) -> Callable[..., Any]:
        """Makes a callable for PyTorch's own registering methods, for its `hook_type`.

        The callable reads `enabled` in every call. As a pre-forward hook it sees keyword arguments
        if it is registered `with_kwargs=True`.
        """
        if self._hook_type is HookType.FORWARD:

            def forward_hook(module: nn.Module, args: Any, output: Any) -> Any:
                return self._after(module, args, output) if self.enabled else None

            return forward_hook

        def forward_pre_hook(module: nn.Module, args: Any, *kwargs: Any) -> Any:
            if not self.enabled:
                return None
            changed = self._before(module, args, *(kwargs or ({},)))
            return changed if kwargs or changed is None else changed[0]

        return forward_pre_hook

    @abc.abstractmethod
    def _hook_fn(self, module: nn.Module, input: Any, output: Any) -> Any:  # noqa: A002 (mi_crow's name)
        """Runs at each call of the module.

        Args:
            module: the module that is called.
            input: tuple of its positional arguments.
            output: its output, None in a pre-forward hook.

        Returns:
            In a pre-forward hook, the arguments that replace `input`, or None to leave it. Ignored
            in a forward hook, as in mi_crow.
        """

    def _before(self, module: Any, args: Any, kwargs: Any) -> Any:
        """Hook that the registry calls before a forward."""
        try:
            return self._run_before(module, args, kwargs)
        except Exception as error:
            raise self._failed(error) from error

    def _after(self, module: Any, args: Any, output: Any) -> Any:
        """Hook that the registry calls after a forward."""
        try:
            return self._run_after(module, args, output)
        except Exception as error:
            raise self._failed(error) from error

    # A detector or controller has no `_hook_fn`: for one that is both, these end the chain.

    def _run_before(self, module: Any, args: Any, kwargs: Any) -> Any:
        changed = None if self._hook_fn is None else self._hook_fn(module, args, None)
        if changed is None:
            return None
        return changed if isinstance(changed, tuple) else (changed,), kwargs

    def _run_after(self, module: Any, args: Any, output: Any) -> Any:
        if self._hook_fn is not None:
            self._hook_fn(module, args, output)

    def _for_registry(self, hook_type: HookType) -> tuple[Any, bool]:
        """Returns the hook that is registered, and its `with_kwargs`."""
        before = hook_type is HookType.PRE_FORWARD
        return (self._before, True) if before else (self._after, False)

    def _failed(self, error: Exception) -> HookError:
        return HookError(self._id, self._hook_type.value, error, self.layer)

    @property
    def _registered(self) -> bool:
        return self._handle is not None and not self._handle.removed

    @classmethod
    def _validated(cls, hook_type: HookType | str) -> HookType:
        expect(hook_type, str, "hook_type must be a HookType or a str")
        allowed = ", ".join(repr(each.value) for each in cls._types)
        try:
            found = HookType(hook_type)
        except ValueError:
            msg = f"unknown hook_type {hook_type!r}: expected one of {allowed}"
            raise ValueError(msg) from None
        if found not in cls._types:
            msg = f"the hook_type of a {cls.__name__} must be one of {allowed}, got {found.value!r}"
            raise ValueError(msg)
        return found

    def __getstate__(self) -> dict[str, Any]:
        """Returns the settings, without state of this process."""
        left_out = ("_handle", "_layer", "_layers", "_context")
        state = {key: value for key, value in vars(self).items() if key not in left_out}
        return state | {"_enabled": self.enabled}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        vars(copied).update(copy.deepcopy(self.__getstate__(), memo))
        copied._context = self._context
        return copied

    def __repr__(self) -> str:
        state = "" if self.enabled else ", disabled"
        kind = type(self).__name__
        return f"<{kind} {self._id!r}, {self._hook_type.value}{_on(self.layer)}{state}>"


def _on(layer: str | None) -> str:
    if layer is None:
        return ""
    return f" on {layer!r}" if layer else " on the model itself"


def check_signature(layer_signature: object, *, optional: bool = False) -> None:
    """Validates the name or index of a layer."""
    expected = "layer_signature must be the name or the index of a layer ('' for the model itself)"
    expect(layer_signature, str | int | None if optional else str | int, expected)

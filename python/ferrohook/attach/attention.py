"""Points inside attention: q, k, v, z and the pattern of a transformers attention module.

A point is an identity module that its tensor passes on the way into or out of the attention
function, so it is hooked, captured and named in plans as any module. It is not in the tree of the
model: paths, `state_dict` and `named_modules()` stay as they are.
"""

# An attention module asks `AttentionInterface.get_interface` for its function in each forward. That
# method is replaced while a point is instrumented anywhere, and the function that it returns then
# looks in the `__dict__` of the attention module for points; modules without are called as ever.
# Dynamo guards that look-up, and the class of the attention module, which is instrumented as long
# as its points are: a graph traced before has neither.

from __future__ import annotations

import contextlib
import contextvars
import functools
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import torch
from torch import Tensor, nn

from ferrohook._core import Dispatcher
from ferrohook.errors import HookError, HookTypeError
from ferrohook.util.weak import PerObject

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ferrohook._core import Registry

POINTS: Final = ("q", "k", "v", "z", "pattern")
"""Names of the points of an attention module, in the order in which they run."""
DIMENSIONS: Final = {
    "q": ("batch", "tokens", "heads", "head_dim"),
    "k": ("batch", "tokens", "kv_heads", "head_dim"),
    "v": ("batch", "tokens", "kv_heads", "head_dim"),
    "z": ("batch", "tokens", "heads", "head_dim"),
    "pattern": ("batch", "heads", "queries", "keys"),
    "queries": ("batch", "queries", "heads", "keys"),
}
"""Dimensions of the tensor at each point."""
KEY: Final = "_ferrohook_points"
"""Key of the points of an attention module in its `__dict__`, while one is instrumented."""
_PASSED: Final = "ferrohook_passed"
"""Keyword of an attention function that is called with k and v that passed their points."""
_PATTERN_DIMS: Final = len(DIMENSIONS["pattern"])
_INSTRUMENTED: Final = Dispatcher.KEY


class AttentionPoint(nn.Module):
    """Identity that a tensor inside an attention module passes.

    Attributes:
        name: one of `POINTS`, or `queries`.
    """

    def __init__(self, name: str, points: AttentionPoints) -> None:
        super().__init__()
        self.name = name
        self._points = weakref.ref(points)

    @property
    def points(self) -> AttentionPoints:
        """The points of its attention module.

        Raises:
            HookError: the module is gone.
        """
        points = self._points()
        if points is None:
            msg = f"the attention module of this point ({self.name}) is gone"
            raise HookError(msg)
        return points

    def forward(self, tensor: Tensor) -> Tensor:
        """Returns the tensor."""
        return tensor

    def _get_name(self) -> str:
        return f"AttentionPoint({self.name})"

    def __reduce__(self) -> Any:
        msg = (
            "a point belongs to one attention module and cannot be copied or saved by itself: copy "
            "or save the model"
        )
        raise HookTypeError(msg)


class AttentionPoints:
    """The points of one attention module."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self.q, self.k, self.v, self.z, self.pattern = named = tuple(
            AttentionPoint(name, self) for name in POINTS
        )
        self.queries = AttentionPoint("queries", self)
        """The pattern again, after hooks on it, with its queries ahead of the heads."""
        self.all = (*named, self.queries)

    @property
    def module(self) -> nn.Module:
        """The attention module.

        Raises:
            HookError: it is gone.
        """
        module = self._module()
        if module is None:
            msg = "the attention module of these points is gone"
            raise HookError(msg)
        return module

    def __deepcopy__(self, _memo: object) -> None:
        """Copies of the module get new points."""

    def __reduce__(self) -> Any:
        return type(None), ()


_LOCK: Final = threading.RLock()  # reentrant: a finaliser may restore a point, which runs `_update`
_KNOWN: Final[PerObject[AttentionPoints]] = PerObject()


def points_of(module: nn.Module) -> AttentionPoints:
    """Returns the points of an attention module, the same ones as long as it lives.

    Args:
        module: what calls the function that `AttentionInterface.get_interface` returns, see
            `attended`. Points of any other module never run.
    """
    with _LOCK:
        points = _KNOWN.get(module)
        if points is None:
            points = _KNOWN[module] = AttentionPoints(module)
        return points


def is_point(module: nn.Module) -> bool:
    """Returns True for a point, instrumented or not."""
    # `isinstance` would read `__class__`, a property of instrumented modules.
    return issubclass(type(module), AttentionPoint)


def hold(point: AttentionPoint) -> None:
    """Makes a tensor pass a point that was instrumented, until it is restored.

    Raises:
        HookError: the transformers library is not loaded, or has no `AttentionInterface`.
    """
    points = point.points
    with _LOCK:
        dispatcher: Dispatcher | None = vars(point).get(_INSTRUMENTED)
        if dispatcher is not None:
            dispatcher.when_restored(functools.partial(_update, weakref.ref(points)))
        _update(weakref.ref(points))


def _update(reference: weakref.ref[AttentionPoints]) -> None:
    """Lets an attention module have its points if one of them is instrumented, else not."""
    if _LOCK is None:  # the interpreter ends, and has cleared this module
        return
    points = reference()
    if points is None:
        return
    with _LOCK:
        module = points._module()
        used = any(_INSTRUMENTED in vars(point) for point in points.all)
        if used and module is not None:
            REPLACEMENT.use(points)
            vars(module)[KEY] = points
        else:
            if module is not None:
                vars(module).pop(KEY, None)
            REPLACEMENT.leave(points)


class _InterfaceReplacement:
    """Replacement of `AttentionInterface.get_interface`, installed as long as it has users."""

    def __init__(self) -> None:
        self._users: dict[int, weakref.ref[Any]] = {}
        self._original: Callable[..., Any] | None = None
        self._ours: Callable[..., Any] | None = None

    def use(self, user: object) -> None:
        with _LOCK:
            if self._ours is None:
                interface = _interface()
                original: Callable[..., Any] = vars(interface)["get_interface"]
                self._original, self._ours = original, _replacement(original)
                interface.get_interface = self._ours
            key = id(user)
            self._users[key] = weakref.ref(user, lambda _: self._forget(key))

    def leave(self, user: object) -> None:
        self._forget(id(user))

    def _forget(self, key: int) -> None:
        if _LOCK is None:  # as in `_update`
            return
        with _LOCK:
            self._users.pop(key, None)
            # As the interpreter ends, the library may be gone before a model of it.
            if self._users or self._ours is None or sys.is_finalizing():
                return
            interface = _interface()
            # Where another library has replaced it again, ours stays inside of that.
            if vars(interface)["get_interface"] is self._ours:
                interface.get_interface = self._original
                self._ours = self._original = None


REPLACEMENT: Final = _InterfaceReplacement()


def _interface() -> Any:
    library = sys.modules.get("transformers.modeling_utils")
    interface = getattr(library, "AttentionInterface", None)
    if not hasattr(interface, "get_interface"):
        msg = (
            "q, k, v, z and pattern are read where transformers calls its attention functions, but "
            "this process has not loaded transformers, or has a release without "
            "AttentionInterface.get_interface"
        )
        raise HookError(msg)
    return interface


def _replacement(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_interface(self: Any, attn_implementation: Any, default: Any) -> Any:
        function = original(self, attn_implementation, default)
        return functools.partial(_attend, function, attn_implementation, default)

    return get_interface


class _Function(NamedTuple):
    """Attention function of a call, and what computes its pattern."""

    call: Callable[..., tuple[Tensor, Tensor | None]]
    implementation: str | None
    """Its name, as `config._attn_implementation` has it."""
    eager: Callable[..., tuple[Tensor, Tensor | None]]
    """The model's own, written out in torch: its weights are the pattern."""


def _attend(  # noqa: PLR0913, PLR0917 (an attention function's arguments, and three ahead of them)
    call: Any,
    implementation: str | None,
    eager: Any,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    **kwargs: Any,
) -> Any:
    """Calls an attention function, through the points of the module."""
    passed = kwargs.pop(_PASSED, False)
    if torch.compiler.is_compiling():
        points = getattr(module, KEY, None)  # guarded, which a look-up in the dict is not
        calls = None
    else:
        points = module.__dict__.get(KEY)
        calls = _CALLS.get()
    if points is None and calls is None:
        return call(module, query, key, value, attention_mask, **kwargs)
    function = _Function(call, implementation, eager)
    if points is not None:
        query = _heads_inside(points.q, query)
        if not passed:
            key, value = _heads_inside(points.k, key), _heads_inside(points.v, value)
    if points is not None and (_asked_for(points.pattern) or _asked_for(points.queries)):
        output, weights = _through_pattern(
            points, function, module, query, key, value, attention_mask, kwargs
        )
    else:
        output, weights = call(module, query, key, value, attention_mask, **kwargs)
    if calls is not None:
        arguments = (function, module, query, key, value, attention_mask, dict(kwargs))
        q, k, v = (each.transpose(1, 2) for each in (query, key, value))
        calls.append(Attended(module, q, k, v, output, functools.partial(pattern_of, *arguments)))
    if points is not None:
        output = _passed(points.z, output).contiguous()  # models view it by rows of all heads
    return output, weights


def pass_ahead(
    module: nn.Module, key: Tensor, value: Tensor, kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Passes k and v through their points ahead of a cache whose pages hold other requests too.

    Args:
        module: the attention module.
        key: of only this call's tokens, (batch, kv_heads, tokens, head_dim).
        value: as `key`.
        kwargs: keywords with which the attention function leaves k and v unchanged.

    Returns:
        The k and v for the cache to store.
    """
    points = module.__dict__.get(KEY)
    if points is None:
        return key, value
    kwargs[_PASSED] = True
    return _heads_inside(points.k, key), _heads_inside(points.v, value)


def _heads_inside(point: AttentionPoint, tensor: Tensor) -> Tensor:
    """Passes (batch, heads, tokens, ...) through a point, as `DIMENSIONS` has it."""
    if not torch.compiler.is_compiling() and _INSTRUMENTED not in point.__dict__:
        return tensor
    return _passed(point, tensor.transpose(1, 2)).transpose(1, 2)


def _passed(point: AttentionPoint, tensor: Tensor) -> Tensor:
    """Passes a tensor through a point.

    Raises:
        HookTypeError: a hook replaced it by another shape.
    """
    passed: Any = point(tensor)
    if passed is not tensor:
        if not isinstance(passed, Tensor):
            msg = f"{point.name} must be replaced by a tensor, got {type(passed).__name__}"
            raise HookTypeError(msg)
        if passed.shape != tensor.shape:
            got, expected = tuple(passed.shape), tuple(tensor.shape)
            dimensions = ", ".join(DIMENSIONS[point.name])
            msg = (
                f"{point.name} must keep shape {expected} ({dimensions}), but a hook returned {got}"
            )
            raise HookTypeError(msg)
    return passed


def _registry_of(point: AttentionPoint) -> Registry | None:
    dispatcher = getattr(point, _INSTRUMENTED, None)
    return None if dispatcher is None else cast("Dispatcher", dispatcher).registry


def _asked_for(point: AttentionPoint) -> bool:
    """Returns True if a hook of this context reads or writes the tensor at a point."""
    registry = _registry_of(point)
    if registry is None:
        return False
    if torch.compiler.is_compiling():
        phases, faithful = registry.traced
        return not faithful or any(len(rows) > 0 for rows in phases)
    return registry.hooked or bool(registry.list())


# --- The pattern ------------------------------------------------------------------------------


def _through_pattern(  # noqa: PLR0913, PLR0917 (an attention function's arguments)
    points: AttentionPoints,
    function: _Function,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    kwargs: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """Calls an attention function with its pattern passing the point.

    Where a hook changes the pattern, these queries and heads get the changed output; the others
    keep the function's own, bit for bit. With gradients the whole output is computed from the
    pattern, so that the pattern has a gradient to read.
    """
    output, weights = function.call(module, query, key, value, mask, **kwargs)
    pattern = weights
    if function.call is not function.eager or pattern is None:
        pattern = pattern_of(function, module, query, key, value, mask, kwargs)
    # A hook may write to it in place, or detach it.
    before, has_gradient = pattern.detach().clone(), pattern.requires_grad
    pattern = _passed(points.pattern, pattern)
    pattern = _heads_inside(points.queries, pattern)
    own = _attended_to(pattern, value)
    if not (torch.is_grad_enabled() and (has_gradient or pattern.requires_grad)):
        same = (pattern == before) | (pattern.isnan() & before.isnan())
        changed = (~same).any(-1).transpose(1, 2)
        own = torch.where(changed[..., None], own, output)
    return own, pattern if weights is not None else None


def _attended_to(pattern: Tensor, value: Tensor) -> Tensor:
    """Returns `pattern @ value` as attention functions do, (batch, tokens, heads, head_dim)."""
    groups = pattern.shape[1] // value.shape[1]
    if groups > 1:
        value = value.repeat_interleave(groups, dim=1)
    return (pattern @ value.to(pattern.dtype)).transpose(1, 2).contiguous()


def pattern_of(  # noqa: PLR0913, PLR0917 (an attention function's arguments)
    function: _Function,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    kwargs: dict[str, Any],
) -> Tensor:
    """Computes the pattern of a call, without dropout, by the model's own eager attention.

    So scale, softcap, sinks and position bias are as in the model.

    Returns:
        (batch, heads, queries, keys).

    Raises:
        HookError: the model's own function returns no weights, or the keys are in a paged cache.
    """
    if "write_index" in kwargs:  # of a paged cache
        msg = "the pattern is not available in continuous batching: its keys are in pages"
        raise HookError(msg)
    added = _added_mask(function, module, query, key, mask, kwargs)
    options = kwargs | ({"dropout": 0.0} if "dropout" in kwargs else {})
    _, weights = function.eager(module, query, key, value, added, **options)
    if weights is None or weights.dim() != _PATTERN_DIMS:
        msg = (
            f"the pattern of {type(module).__name__} cannot be computed: its eager attention "
            "returns no weights of shape (batch, heads, queries, keys)"
        )
        raise HookError(msg)
    return weights


def _added_mask(  # noqa: PLR0913, PLR0917 (an attention function's arguments)
    function: _Function,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    mask: Any,
    kwargs: dict[str, Any],
) -> Tensor | None:
    """Returns the mask of a call as eager attention adds it: broadcast to (batch, 1, q, k).

    Functions take it as bools (sdpa), as a mask of only the padding (flash), as a `BlockMask`
    (flex), or leave it out if it is the causal one.
    """
    if isinstance(mask, Tensor) and mask.dim() == _PATTERN_DIMS:
        return mask if mask.is_floating_point() else _as_added(mask != 0, query)
    queries, keys = query.shape[2], key.shape[2]
    if mask is not None and not isinstance(mask, Tensor):
        from torch.nn.attention.flex_attention import create_mask  # noqa: PLC0415 (takes seconds)

        batch = query.shape[0]
        dense = create_mask(mask.mask_mod, batch, 1, queries, keys, device=str(query.device))
        return _as_added(dense, query)
    causal = kwargs.get("is_causal")
    if causal is None:
        causal = getattr(module, "is_causal", True)
    padding: Tensor | None = mask
    allowed = None if padding is None else padding[:, None, None, :keys] != 0
    if causal and queries > 1:
        # sdpa counts keys from the first one, flash attention from the last.
        first = 0 if function.implementation == "sdpa" else keys - queries
        last = torch.arange(queries, device=query.device)[:, None] + first
        distance = last - torch.arange(keys, device=query.device)
        seen = distance >= 0
        if (window := kwargs.get("sliding_window")) is not None:
            seen &= distance < window
        allowed = seen[None, None] if allowed is None else allowed & seen
    return None if allowed is None else _as_added(allowed, query)


def _as_added(allowed: Tensor, query: Tensor) -> Tensor:
    # Attention functions may compute scores of float64 in float32.
    lowest = max(torch.finfo(query.dtype).min, torch.finfo(torch.float32).min)
    return torch.zeros_like(allowed, dtype=query.dtype).masked_fill(~allowed, lowest)


# --- Looking ----------------------------------------------------------------------------------


class Attended(NamedTuple):
    """One call of an attention function, with the tensors as `DIMENSIONS` has them."""

    module: nn.Module
    q: Tensor
    k: Tensor
    v: Tensor
    """Arguments of the attention function, after hooks at the points."""
    z: Tensor
    """Its result, before hooks on z."""
    pattern: Callable[[], Tensor]
    """Computes its pattern from these arguments, see `pattern_of`."""


_CALLS: Final[contextvars.ContextVar[list[Attended] | None]] = contextvars.ContextVar(
    "ferrohook_attended", default=None
)


class _Look:
    """User of the replaced interface while an observation runs."""


@contextlib.contextmanager
def attended() -> Iterator[list[Attended]]:
    """Lists the calls of attention functions that are made in a block, in this context.

    Empty if the model asks for none: it is not of transformers, or its attention has no choice of
    functions.
    """
    calls: list[Attended] = []
    if getattr(sys.modules.get("transformers.modeling_utils"), "AttentionInterface", None) is None:
        yield calls
        return
    look = _Look()
    REPLACEMENT.use(look)
    token = _CALLS.set(calls)
    try:
        yield calls
    finally:
        _CALLS.reset(token)
        REPLACEMENT.leave(look)


def attended_to(pattern: Tensor, value: Tensor) -> Tensor:
    """Returns `pattern @ v` for values of (batch, tokens, kv_heads, head_dim)."""
    return _attended_to(pattern, value.transpose(1, 2))

"""`HookedRootModule`: a model with hook points in it."""

from __future__ import annotations

import contextlib
import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from types import FunctionType
from typing import TYPE_CHECKING, Any, Self, TypeAlias, cast, overload

import torch
from torch import Tensor, nn

from ferrohook._core import Frame, Recorder, frames
from ferrohook.attach.instrument import registry_of
from ferrohook.attach.never_fired import explain
from ferrohook.attach.priorities import BEHIND_ALL
from ferrohook.attach.wrapper import own_names
from ferrohook.compat.transformer_lens.caching import (
    CacheOptions,
    Copy,
    PointCache,
    SavingHook,
    recorded_cache,
)
from ferrohook.compat.transformer_lens.hook_point import (
    HANDLES,
    Direction,
    Directions,
    HookFunction,
    HookPoint,
    LensHandle,
    check_hook,
    directions,
    usual_code,
)
from ferrohook.compat.transformer_lens.names import (
    NamesFilter,
    SetupError,
    points_filtered,
    points_named,
)
from ferrohook.compat.transformer_lens.slices import Slice, SliceInput
from ferrohook.compat.transformer_lens.wrapped import WrappedModel, make_points
from ferrohook.errors import HookTypeError, NeverFiredWarning
from ferrohook.registration.scopes import Scope
from ferrohook.util.arguments import check_copy, expect, expect_callable
from ferrohook.util.swallowed import refuse_swallowed

if TYPE_CHECKING:
    from collections.abc import ValuesView

    from ferrohook.names.select import Selector

NameOrFilter: TypeAlias = "str | Callable[[str], bool]"
"""A hook point's name, or a predicate of names."""
Hooks: TypeAlias = "Iterable[tuple[NameOrFilter, HookFunction]]"


_MEANT = {
    **dict.fromkeys(("fwd_hooks", "bwd_hooks"), "names_filter"),
    **dict.fromkeys(("names_filter", "remove_batch_dim", "incl_bwd", "pos_slice"), "fwd_hooks"),
}
"""Options of the other of two functions that call the model, and what each takes instead."""


class _HooksContext:
    """Tag of the scope of one `hooks` context."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model


class _PersistentHooks:
    """Tag of the frame of `hooks(reset_hooks_end=False)`, active until its hooks are removed."""

    def __init__(self, model: nn.Module) -> None:
        self.handles: list[LensHandle] = []
        # The context keeps the frame, so the hooks must end with the model.
        self._model = weakref.ref(model, functools.partial(_remove_all, self.handles))


def _remove_all(handles: list[LensHandle], _model: object) -> None:
    while handles:
        handles.pop().remove()


def _leave_empty_frames() -> None:
    for frame in frames.get():
        tag = frame._tag
        if isinstance(tag, _PersistentHooks) and all(each.hook.removed for each in tag.handles):
            frame._take_out()


class HookedRootModule(nn.Module):
    """A model with hook points, addressed by name.

    Follows TransformerLens' class of that name: subclass it, create a `HookPoint` for each
    activation to hook, and call `setup` at the end of `__init__`. `wrap` creates hook points on an
    existing model instead.

    Hooks of `hooks`, `run_with_hooks` and `run_with_cache` fire only in the calling context:
    threads and tasks that share the model do not see each other's. Hooks of `add_hook` fire in all.

    Attributes:
        mod_dict: all submodules by name, from `setup`.
        hook_dict: the hook points among them.
    """

    mod_dict: dict[str, nn.Module]
    hook_dict: dict[str, HookPoint]

    def __init__(self, *_args: Any) -> None:
        super().__init__()

    @staticmethod
    def wrap(
        model: nn.Module, points: Mapping[Any, str | Iterable[str]] | Selector = None
    ) -> HookedRootModule:
        """Creates hook points on the modules of an existing model.

        The hook point `layers.0.hook_out` sees the output of the module `layers.0`, and
        `layers.0.hook_in` its input; of a structure, the first tensor. A hook's return value
        replaces that tensor. The model is instrumented and otherwise unchanged; the wrapper has
        its parameters, attributes and methods, under the same names.

        Args:
            model: any module.
            points: a dict from selectors (see `select`) to `"hook_in"`, `"hook_out"` or a
                collection of both; or one selector, for both.

        Returns:
            A `HookedRootModule` around the model; `into_inner` restores and returns the model. An
            instance of the model's class too, unless the model uses names of `HookedRootModule`.

        Raises:
            SelectionError: a pattern matches no module.
            HookTypeError: `model` is no `nn.Module`, or a pattern has the wrong type.
            ValueError: a kind other than `hook_in` and `hook_out`.
            HookError: a module cannot be instrumented, or has an attribute of a point's name.

        Examples:
            >>> model = HookedRootModule.wrap(llama, points={"layers.*.mlp": "hook_out"})
            >>> _, cache = model.run_with_cache(ids)
            >>> cache["layers.0.mlp.hook_out"].shape
        """
        return WrappedRootModule(model, make_points(model, points))

    def __getattr__(self, name: str) -> Any:
        if name in {"mod_dict", "hook_dict"}:
            msg = f"{type(self).__name__} has no {name} yet: call self.setup() in its __init__"
            raise SetupError(msg)
        return super().__getattr__(name)

    def setup(self) -> None:
        """Finds the hook points and sets each module's `name`.

        Call it at the end of `__init__`, and again after adding modules.
        """
        self.mod_dict = {name: module for name, module in self.named_modules() if name}
        self.hook_dict = {
            name: module for name, module in self.mod_dict.items() if isinstance(module, HookPoint)
        }
        for name, module in self.mod_dict.items():
            # A module may define its own read-only `name`.
            with contextlib.suppress(AttributeError, TypeError):
                module.name = name  # type: ignore[assignment]  # as in TransformerLens

    def hook_points(self) -> ValuesView[HookPoint]:
        """All hook points."""
        return self.hook_dict.values()

    @property
    def context_level(self) -> int:
        """Number of `hooks` contexts of this model that are open in this context."""
        tags = (frame._tag for frame in frames.get())
        return sum(isinstance(tag, _HooksContext) and tag.model is self for tag in tags)

    @property
    def is_caching(self) -> bool:
        """True if a caching hook fires at a hook point in this context."""
        return any(
            isinstance(hook, Recorder)
            or (isinstance(hook, LensHandle) and isinstance(hook.user_hook, SavingHook))
            for point in self.hook_points()
            for _, _, hook, *_ in registry_of(point).list()
        )

    @overload
    def add_hook(
        self,
        name: str,
        hook: HookFunction,
        dir: Direction = ...,
        is_permanent: bool = ...,
        level: int | None = ...,
        prepend: bool = ...,
    ) -> LensHandle: ...
    @overload
    def add_hook(
        self,
        name: Callable[[str], bool],
        hook: HookFunction,
        dir: Direction = ...,
        is_permanent: bool = ...,
        level: int | None = ...,
        prepend: bool = ...,
    ) -> list[LensHandle]: ...
    def add_hook(
        self,
        name: NameOrFilter,
        hook: HookFunction,
        dir: Direction = "fwd",
        is_permanent: bool = False,
        level: int | None = None,
        prepend: bool = False,
    ) -> LensHandle | list[LensHandle]:
        """Adds a hook to hook points by name, for all contexts, until it is removed.

        Args:
            name: the hook point's name, or a predicate of names.
            hook: see `HookPoint.add_hook`, as for the other arguments.
            dir: `fwd` or `bwd`.
            is_permanent: removed only with `including_permanent=True`.
            level: an int to remove it by.
            prepend: run ahead of all others.

        Returns:
            The handle; for a predicate, a list of handles.

        Raises:
            SelectionError: no hook point has that name.
            HookTypeError: `hook` cannot be called as `hook(tensor, hook=point)`.
            ValueError: `dir` is neither of these.
        """
        handles: list[LensHandle] = []
        try:
            for found, point in self._points(name).items():
                handles.append(
                    self.check_and_add_hook(point, found, hook, dir, is_permanent, level, prepend)
                )
        except BaseException:
            for handle in handles:
                handle.remove()
            raise
        return handles[0] if isinstance(name, str) else handles

    def _points(self, name: NameOrFilter) -> dict[str, HookPoint]:
        if isinstance(name, str):
            return points_named(self, [name])
        expect_callable(name, "a hook must be added to a name or a predicate of names")
        return points_filtered(self, name)

    def add_perma_hook(
        self, name: NameOrFilter, hook: HookFunction, dir: Direction = "fwd"
    ) -> LensHandle | list[LensHandle]:
        """Adds a permanent hook, see `add_hook`."""
        return self.add_hook(cast("str", name), hook, dir=dir, is_permanent=True)

    def check_and_add_hook(
        self,
        hook_point: HookPoint,
        hook_point_name: str,
        hook: HookFunction,
        dir: Direction = "fwd",
        is_permanent: bool = False,
        level: int | None = None,
        prepend: bool = False,
    ) -> LensHandle:
        """Calls `check_hooks_to_add`, then adds the hook to the point."""
        self.check_hooks_to_add(
            hook_point,
            hook_point_name,
            hook,
            dir=dir,
            is_permanent=is_permanent,
            prepend=prepend,
        )
        return hook_point.add_hook(
            hook, dir=dir, is_permanent=is_permanent, level=level, prepend=prepend
        )

    def check_hooks_to_add(
        self,
        hook_point: HookPoint,
        hook_point_name: str,
        hook: HookFunction,
        dir: Direction = "fwd",
        is_permanent: bool = False,
        prepend: bool = False,
    ) -> None:
        """Override it to refuse hooks: an exception it raises leaves `add_hook`."""

    @contextlib.contextmanager
    def hooks(
        self,
        fwd_hooks: Hooks = (),
        bwd_hooks: Hooks = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
    ) -> Iterator[Self]:
        """Adds hooks for the calls of this context, and removes exactly those at its end.

        Backward hooks fire in the backward of the calls made in the block, also after it: they are
        removed with the graphs that these calls recorded.

        Args:
            fwd_hooks: pairs of a name, or a predicate of names, and a forward hook.
            bwd_hooks: likewise for backward hooks.
            reset_hooks_end: remove them at the end; False leaves them in this context until
                `reset_hooks` is called in it, or the model is freed.
            clear_contexts: with `reset_hooks_end`, empty the `ctx` of all hook points at the end.

        Raises:
            SelectionError: no hook point has that name; nothing was added.
            HookTypeError: a hook cannot be called as `hook(tensor, hook=point)`; nothing was added.

        Examples:
            >>> with model.hooks(fwd_hooks=[("blocks.0.hook_out", ablate)]):
            ...     model(ids)
        """
        with Scope(_HooksContext(self), for_graphs=bool(bwd_hooks)) as level:
            persistent = None if reset_hooks_end else Frame(_PersistentHooks(self))
            if persistent is not None:
                _leave_empty_frames()  # of models that are gone
                persistent._enter_outermost()
            try:
                handles = self._add_all(fwd_hooks, bwd_hooks, persistent or level)
            except BaseException:
                if persistent is not None:
                    persistent._take_out()
                raise
            if persistent is not None:
                persistent._tag.handles += handles
            try:
                yield self
            finally:
                if reset_hooks_end and clear_contexts:
                    self.clear_contexts()

    def _add_all(self, fwd_hooks: Hooks, bwd_hooks: Hooks, scope: Frame) -> list[LensHandle]:
        level = self.context_level
        points = self.hook_dict
        handles: list[LensHandle] = []
        hooks: dict[Direction, Hooks] = {"fwd": fwd_hooks, "bwd": bwd_hooks}
        for dir, pairs in hooks.items():
            kind = HANDLES[dir]
            checked_code = None  # consecutive hooks are often one function, or one loop's closures
            rows: list[tuple[HookPoint, LensHandle]] = []
            for name, hook in _pairs(pairs, dir):
                if type(hook) is not FunctionType or hook.__code__ is not checked_code:
                    check_hook(hook)
                    checked_code = usual_code(hook)
                if isinstance(name, str) and name in points:
                    rows.append((points[name], kind(hook, False, level)))
                else:
                    found = self._points(name).values()
                    rows += [(each, kind(hook, False, level)) for each in found]
            for point, handle in rows:
                hook = handle.user_hook
                priority = hook.priority if isinstance(hook, SavingHook) else 0
                register = registry_of(point).register
                handle.hook = register(kind.phase, handle, priority=priority, scope=scope)
                handles.append(handle)
        return handles

    def run_with_hooks(
        self,
        *model_args: Any,
        fwd_hooks: Hooks = (),
        bwd_hooks: Hooks = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
        **model_kwargs: Any,
    ) -> Any:
        """Calls the model with hooks for this call only, see `hooks`.

        Args:
            *model_args: positional arguments of the model.
            fwd_hooks: pairs of a name, or a predicate of names, and a forward hook.
            bwd_hooks: likewise for backward hooks.
            reset_hooks_end: remove them when the model has returned.
            clear_contexts: with `reset_hooks_end`, empty the `ctx` of all hook points then.
            **model_kwargs: keyword arguments of the model.

        Returns:
            The model's output.

        Raises:
            SelectionError: no hook point has that name.
            HookTypeError: a hook cannot be called as `hook(tensor, hook=point)`; or a keyword is an
                option of hooks or captures that the model's forward does not name.
        """
        refuse_swallowed("run_with_hooks", self, model_kwargs, _MEANT)
        with self.hooks(fwd_hooks, bwd_hooks, reset_hooks_end, clear_contexts):
            return self(*model_args, **model_kwargs)

    def run_with_cache(
        self,
        *model_args: Any,
        names_filter: NamesFilter = None,
        device: torch.device | str | None = None,
        remove_batch_dim: bool = False,
        incl_bwd: bool = False,
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
        pos_slice: Slice | SliceInput = None,
        copy: Copy = "checked",
        **model_kwargs: Any,
    ) -> tuple[Any, PointCache]:
        """Calls the model and caches the activations of its hook points.

        Activations are cached detached, as they leave the hooks. A `NeverFiredWarning` lists hook
        points that were selected by name and never fired.

        Args:
            *model_args: positional arguments of the model.
            names_filter: hook points to cache: a name, a list, tuple or set of names, a predicate
                of names, or None for all.
            device: device that tensors are moved to; None leaves them on theirs.
            remove_batch_dim: drop the first dimension if its size is 1.
            incl_bwd: call `backward` of the output too and cache the gradient of each `name` under
                `name_grad`.
            reset_hooks_end: stop caching after this call; False has the calls of this context
                refill the cache until `reset_hooks` is called in it.
            clear_contexts: with `reset_hooks_end`, empty the `ctx` of all hook points at the end.
            pos_slice: positions to cache, see `Slice`; an int keeps the dimension.
            copy: `checked` keeps a reference, and reading one that was changed in place raises
                `StaleActivationError`; `clone` copies; `ref` keeps an unchecked reference.
            **model_kwargs: keyword arguments of the model.

        Returns:
            The model's output and the cache.

        Raises:
            SelectionError: no hook point has that name.
            HookTypeError: `names_filter` is of another type; or a keyword is an option of hooks or
                captures that the model's forward does not name.
            ValueError: `remove_batch_dim` with a first argument whose batch size is not 1, an
                unknown `copy`, or an invalid `pos_slice`.
            RuntimeError: `incl_bwd` with an output that is no scalar, or an invalid `device`.
        """
        refuse_swallowed("run_with_cache", self, model_kwargs, _MEANT)
        if remove_batch_dim and model_args:
            _check_batch(model_args[0])
        points = points_filtered(self, names_filter)
        options = _cache_options(device, remove_batch_dim, pos_slice, copy)
        # One collector, unless the tensors of each point are converted or sliced in another way.
        converted = any(point._hook_conversion for point in points.values())
        native = reset_hooks_end and not options.sliced and not converted
        saved = {} if native else points
        cache, fwd, bwd = self._saving_hooks(saved, options, None, incl_bwd, BEHIND_ALL)
        with self.hooks(fwd, bwd, reset_hooks_end, clear_contexts):
            if native:
                cache = recorded_cache(points, options, frames.get()[-1], grads=incl_bwd)
            output = self(*model_args, **model_kwargs)
            if incl_bwd:
                output.backward()
                if native:
                    len(cache)  # reads the gradients before a later backward changes them
        if reset_hooks_end:
            for _, hook in bwd:
                cast("SavingHook", hook).open = False
        by_name = names_filter is not None and not callable(names_filter)
        silent = [name for name in points if name not in cache] if by_name else []
        if silent:
            warnings.warn(explain(self, silent), NeverFiredWarning, stacklevel=2)
        return output, cache

    def get_caching_hooks(
        self,
        names_filter: NamesFilter = None,
        incl_bwd: bool = False,
        device: torch.device | str | None = None,
        remove_batch_dim: bool = False,
        cache: MutableMapping[str, Any] | None = None,
        pos_slice: Slice | SliceInput = None,
        copy: Copy = "checked",
    ) -> tuple[
        MutableMapping[str, Any], list[tuple[str, HookFunction]], list[tuple[str, HookFunction]]
    ]:
        """Makes caching hooks for `hooks` or `run_with_hooks`; adds none.

        Args:
            names_filter: hook points, see `run_with_cache`, as for the other arguments.
            incl_bwd: make hooks for gradients too.
            device: device that tensors are moved to.
            remove_batch_dim: drop the first dimension if its size is 1.
            cache: mapping to fill; None for a new `PointCache`. A dict gets unchecked references
                for `copy="checked"`.
            pos_slice: positions to cache.
            copy: `checked`, `clone` or `ref`.

        Returns:
            The cache, pairs of a name and a forward hook, pairs of a name and a backward hook.

        Raises:
            SelectionError: no hook point has that name.
            HookTypeError: `names_filter` is of another type, or `cache` is no mutable mapping.
            ValueError: an unknown `copy`, or an invalid `pos_slice`.
            RuntimeError: an invalid `device`.
        """
        options = _cache_options(device, remove_batch_dim, pos_slice, copy)
        points = points_filtered(self, names_filter)
        return self._saving_hooks(points, options, cache, incl_bwd)

    def _saving_hooks(
        self,
        points: dict[str, HookPoint],
        options: CacheOptions,
        cache: Any,
        incl_bwd: bool,
        priority: int = 0,
    ) -> tuple[Any, list[tuple[str, HookFunction]], list[tuple[str, HookFunction]]]:
        if cache is None:
            cache = PointCache()
        expect(cache, MutableMapping, "cache must be a dict, or None for a new one")

        def hooks(suffix: str) -> list[tuple[str, HookFunction]]:
            return [
                (name, SavingHook(cache, name + suffix, point, options, priority))
                for name, point in points.items()
            ]

        return cache, hooks(""), hooks("_grad") if incl_bwd else []

    def add_caching_hooks(
        self,
        names_filter: NamesFilter = None,
        incl_bwd: bool = False,
        device: torch.device | str | None = None,
        remove_batch_dim: bool = False,
        cache: MutableMapping[str, Any] | None = None,
        copy: Copy = "checked",
    ) -> MutableMapping[str, Any]:
        """Adds caching hooks for all contexts, until `reset_hooks`.

        Takes the arguments of `get_caching_hooks`, and raises its errors.

        Returns:
            The cache, which calls of the model fill.
        """
        cache, fwd, bwd = self.get_caching_hooks(
            names_filter, incl_bwd, device, remove_batch_dim, cache, copy=copy
        )
        for name, hook in fwd:
            self.hook_dict[name].add_hook(hook, "fwd")
        for name, hook in bwd:
            self.hook_dict[name].add_hook(hook, "bwd")
        return cache

    def cache_all(
        self,
        cache: MutableMapping[str, Any] | None,
        incl_bwd: bool = False,
        device: torch.device | str | None = None,
        remove_batch_dim: bool = False,
    ) -> None:
        """Deprecated, as in TransformerLens: `add_caching_hooks` or `run_with_cache`."""
        _deprecated("cache_all")
        self.add_caching_hooks(None, incl_bwd, device, remove_batch_dim, cache)

    def cache_some(
        self,
        cache: MutableMapping[str, Any] | None,
        names: Callable[[str], bool],
        incl_bwd: bool = False,
        device: torch.device | str | None = None,
        remove_batch_dim: bool = False,
    ) -> None:
        """Deprecated, as in TransformerLens: `add_caching_hooks` or `run_with_cache`."""
        _deprecated("cache_some")
        self.add_caching_hooks(names, incl_bwd, device, remove_batch_dim, cache)

    def clear_contexts(self) -> None:
        """Empties the `ctx` of all hook points."""
        for point in self.hook_points():
            point.clear_context()

    def remove_all_hook_fns(
        self,
        direction: Directions = "both",
        including_permanent: bool = False,
        level: int | None = None,
    ) -> None:
        """Removes hooks from all hook points, see `HookPoint.remove_hooks`."""
        for point in self.hook_points():
            point.remove_hooks(direction, including_permanent=including_permanent, level=level)
        _leave_empty_frames()

    def reset_hooks(
        self,
        clear_contexts: bool = True,
        direction: Directions = "both",
        including_permanent: bool = False,
        level: int | None = None,
    ) -> None:
        """Removes the added hooks that fire in this context, but for permanent ones.

        Args:
            clear_contexts: empty the `ctx` of all hook points too.
            direction: `fwd`, `bwd` or `both`.
            including_permanent: remove permanent ones too.
            level: remove only hooks of this level.

        Raises:
            ValueError: `direction` is none of these.
        """
        if clear_contexts:
            self.clear_contexts()
        self.remove_all_hook_fns(direction, including_permanent, level=level)

    def list_hooks(
        self,
        name_filter: NamesFilter = None,
        dir: Directions = "both",
        including_permanent: bool = True,
    ) -> dict[str, list[LensHandle]]:
        """Lists the added hooks that fire in this context, by hook point, in firing order.

        Args:
            name_filter: hook points, see `NamesFilter`; points without hooks are left out.
            dir: `fwd`, `bwd` or `both`, forward hooks first.
            including_permanent: list permanent ones too.

        Raises:
            SelectionError: no hook point has that name.
            HookTypeError: `name_filter` is of another type.
            ValueError: `dir` is none of these.
        """
        listed = {}
        for name, point in points_filtered(self, name_filter).items():
            handles = [
                handle
                for each in directions(dir)
                for handle in point._handles(each)
                if handle.matches(including_permanent=including_permanent, level=None)
            ]
            if handles:
                listed[name] = handles
        return listed


class WrappedRootModule(WrappedModel, HookedRootModule):
    """The wrapper that `HookedRootModule.wrap` returns."""

    __slots__ = ()


WrappedRootModule._own_names = own_names(WrappedRootModule)


def _pairs(pairs: Hooks, dir: Direction) -> Hooks:
    """Validates and returns the pairs."""
    try:
        names, hooks = tuple(zip(*pairs, strict=True)) or ((), ())
        return zip(names, hooks, strict=True)
    except (TypeError, ValueError) as error:
        msg = f"{dir}_hooks must be a list of pairs (name, hook), got {pairs!r}"
        raise HookTypeError(msg) from error


def _cache_options(
    device: torch.device | str | None, remove_batch_dim: bool, pos_slice: Any, copy: Copy
) -> CacheOptions:
    check_copy(copy)
    # An empty tensor validates the device.
    target = None if device is None else torch.empty(0, device=device).device
    return CacheOptions(target, bool(remove_batch_dim), Slice.unwrap(pos_slice), copy)


def _check_batch(first: object) -> None:
    if isinstance(first, Tensor) and first.ndim and first.shape[0] != 1:
        msg = (
            "remove_batch_dim needs a first dimension of size 1, but that of the model's first "
            f"argument has size {first.shape[0]}"
        )
        raise ValueError(msg)


def _deprecated(name: str) -> None:
    msg = f"{name} is deprecated: use add_caching_hooks or run_with_cache"
    warnings.warn(msg, DeprecationWarning, stacklevel=3)

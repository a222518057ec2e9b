"""`HookedRootModule`: a model with hook points in it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from types import FunctionType
from typing import TYPE_CHECKING, Any, Self, TypeAlias, cast, overload

import torch
from torch import Tensor, nn

from ferrohook._core import Recorder, ScopeBase, active_scopes, register_all
from ferrohook.arguments import check_copy, describe
from ferrohook.errors import HookTypeError, NeverFiredWarning
from ferrohook.instrumentation import registry_of
from ferrohook.never_fired import explain
from ferrohook.points.caching import Copy, Keeping, PointCache, Recording, SavingHook
from ferrohook.points.hook_point import PHASES, Direction, Directions, HookPoint, directions
from ferrohook.points.lens_hooks import (
    HANDLES,
    HookFunction,
    LensHandle,
    check_hook,
    usual_code,
)
from ferrohook.points.names import NamesFilter, SetupError, points_filtered, points_named
from ferrohook.points.slices import Slice, SliceInput
from ferrohook.points.wrapped import WrappedModel, points_on
from ferrohook.scopes import Scope
from ferrohook.wrapper import own_names

if TYPE_CHECKING:
    from collections.abc import ValuesView

    from ferrohook.selection import Selector

Which: TypeAlias = "str | Callable[[str], bool]"
"""The name of a hook point, or a predicate of names."""
Hooks: TypeAlias = "Iterable[tuple[Which, HookFunction]]"


class _Level(Scope):
    """What one `hooks` of a model entered."""

    model: nn.Module

    @classmethod
    def of(cls, model: nn.Module) -> Self:
        scope = cls()
        scope.model = model
        return scope


class _Lasting(ScopeBase):
    """The hooks of a `hooks(reset_hooks_end=False)`: in its context until they are removed."""

    def __init__(self) -> None:
        self.handles: list[LensHandle] = []

    def enter(self) -> None:
        # Ahead of the others, which are left one inside the other.
        active_scopes.set((self, *active_scopes.get()))

    def leave(self) -> None:
        self._close()
        active_scopes.set(tuple(scope for scope in active_scopes.get() if scope is not self))


def _leave_empty_ones() -> None:
    for scope in active_scopes.get():
        if isinstance(scope, _Lasting) and all(handle.hook.removed for handle in scope.handles):
            scope.leave()


class HookedRootModule(nn.Module):
    """A model with hook points in it, and what is done with them by name.

    Follows TransformerLens' class of that name: derive from it, make hook points where activations
    are to be seen, and call `setup` at the end of `__init__`. `wrap` makes the hook points of an
    existing model instead.

    What `hooks`, `run_with_hooks` and `run_with_cache` add fires in the calling context alone:
    threads and tasks that share the model do not see each other's. `add_hook` adds for all.

    Attributes:
        mod_dict: all modules below by name, from `setup`.
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
        """Makes hook points out of the modules of an existing model.

        The hook point `layers.0.hook_out` sees what the module `layers.0` returns, and
        `layers.0.hook_in` what it takes: the first tensor of it, where that is a structure. What
        their hooks return takes the tensor's place. The model itself is instrumented and otherwise
        as it was; what is returned has its parameters, attributes and methods, under the same
        names.

        Args:
            model: any module.
            points: from what `select` takes to `"hook_in"`, `"hook_out"` or both in a collection;
                or just what `select` takes, for both.

        Returns:
            A `HookedRootModule` around the model, whose `into_inner` gives it back as it was. It is
            an instance of the model's class too, unless the model has names of `HookedRootModule`.

        Raises:
            SelectionError: a pattern matches no module.
            HookTypeError: `model` is no `nn.Module`, or a pattern of the wrong type.
            ValueError: something other than `hook_in` and `hook_out`.
            HookError: a module that cannot be instrumented, or has something of that name.

        Examples:
            >>> model = HookedRootModule.wrap(llama, points={"layers.*.mlp": "hook_out"})
            >>> _, cache = model.run_with_cache(ids)
            >>> cache["layers.0.mlp.hook_out"].shape
        """
        return WrappedRootModule(model, points_on(model, points))

    def __getattr__(self, name: str) -> Any:
        if name in {"mod_dict", "hook_dict"}:
            msg = f"{type(self).__name__} has no {name} yet: call self.setup() in its __init__"
            raise SetupError(msg)
        return super().__getattr__(name)

    def setup(self) -> None:
        """Finds the hook points and tells all modules their names.

        To be called at the end of `__init__`, and again when modules were added.
        """
        self.mod_dict = {name: module for name, module in self.named_modules() if name}
        self.hook_dict = {
            name: module for name, module in self.mod_dict.items() if isinstance(module, HookPoint)
        }
        for name, module in self.mod_dict.items():
            # Others may have a `name` that is not ours to set.
            with contextlib.suppress(AttributeError, TypeError):
                module.name = name  # type: ignore[assignment]  # as in TransformerLens

    def hook_points(self) -> ValuesView[HookPoint]:
        """All hook points."""
        return self.hook_dict.values()

    @property
    def context_level(self) -> int:
        """How many `hooks` of this model are open in this context."""
        open_ones = (scope for scope in active_scopes.get() if isinstance(scope, _Level))
        return sum(scope.model is self for scope in open_ones)

    @property
    def is_caching(self) -> bool:
        """Whether anything that caches fires at a hook point in this context."""
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
        name: Which,
        hook: HookFunction,
        dir: Direction = "fwd",
        is_permanent: bool = False,
        level: int | None = None,
        prepend: bool = False,
    ) -> LensHandle | list[LensHandle]:
        """Adds a hook to hook points by name, for all contexts, until it is removed.

        Args:
            name: of the hook point, or a predicate of names.
            hook: see `HookPoint.add_hook`, as for the other arguments.
            dir: `fwd` or `bwd`.
            is_permanent: it stays when hooks are removed, unless permanent ones are asked for.
            level: a number to remove it by.
            prepend: ahead of all others.

        Returns:
            The handle, or those of all that the predicate names.

        Raises:
            SelectionError: the name is not that of a hook point.
            HookTypeError: `hook` cannot be called as `hook(tensor, hook=point)`.
            ValueError: another `dir`.
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

    def _points(self, which: Which) -> dict[str, HookPoint]:
        if isinstance(which, str):
            return points_named(self, [which])
        if not callable(which):
            msg = f"hooks go to a name or to a predicate of names, got {describe(which)}"
            raise HookTypeError(msg)
        return points_filtered(self, which)

    def add_perma_hook(
        self, name: Which, hook: HookFunction, dir: Direction = "fwd"
    ) -> LensHandle | list[LensHandle]:
        """Adds a hook that stays when others are removed, see `add_hook`."""
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
        """Asks `check_hooks_to_add`, and adds the hook to the point."""
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
        """To be overridden by models that refuse some hooks: it raises, and `add_hook` with it."""

    @contextlib.contextmanager
    def hooks(
        self,
        fwd_hooks: Hooks = (),
        bwd_hooks: Hooks = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
    ) -> Iterator[Self]:
        """Adds hooks for the calls of this context, and removes exactly those at its end.

        Args:
            fwd_hooks: pairs of a name, or a predicate of names, and a hook.
            bwd_hooks: likewise, of the backward.
            reset_hooks_end: remove them at the end. Else they stay in this context until
                `reset_hooks` is called in it.
            clear_contexts: with `reset_hooks_end`, empty the `ctx` of all hook points at the end.

        Raises:
            SelectionError: a name is not that of a hook point; nothing was added.
            HookTypeError: a hook cannot be called as `hook(tensor, hook=point)`; nothing was added.

        Examples:
            >>> with model.hooks(fwd_hooks=[("blocks.0.hook_out", ablate)]):
            ...     model(ids)
        """
        with _Level.of(self) as level:
            lasting = None if reset_hooks_end else _Lasting()
            if lasting is not None:
                lasting.enter()
            try:
                handles = self._add_all(fwd_hooks, bwd_hooks, lasting or level)
            except BaseException:
                if lasting is not None:
                    lasting.leave()
                raise
            if lasting is not None:
                lasting.handles = handles
            try:
                yield self
            finally:
                if reset_hooks_end and clear_contexts:
                    self.clear_contexts()

    def _add_all(self, fwd_hooks: Hooks, bwd_hooks: Hooks, scope: ScopeBase) -> list[LensHandle]:
        level = self.context_level
        points = self.hook_dict
        handles: list[LensHandle] = []
        hooks: dict[Direction, Hooks] = {"fwd": fwd_hooks, "bwd": bwd_hooks}
        for dir, pairs in hooks.items():
            kind = HANDLES[dir]
            known = None  # the same hook, or hooks of one loop, stand one after the other
            rows: list[tuple[HookPoint, LensHandle]] = []
            for which, hook in _pairs(pairs, dir):
                if type(hook) is not FunctionType or hook.__code__ is not known:
                    check_hook(hook)
                    known = usual_code(hook)
                if isinstance(which, str) and which in points:
                    rows.append((points[which], kind(hook, False, level)))
                else:
                    found = self._points(which).values()
                    rows += [(each, kind(hook, False, level)) for each in found]
            if rows:
                register_all(rows, PHASES[dir], scope)
                handles += [handle for _, handle in rows]
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
        """Calls the model with hooks for this call alone, see `hooks`.

        Backward hooks need `reset_hooks_end=False`, and `reset_hooks` after the backward: it warns.

        Args:
            *model_args: for the model.
            fwd_hooks: pairs of a name, or a predicate of names, and a hook.
            bwd_hooks: likewise, of the backward.
            reset_hooks_end: remove them when the model has returned.
            clear_contexts: with `reset_hooks_end`, empty the `ctx` of all hook points then.
            **model_kwargs: for the model.

        Returns:
            What the model returns.

        Raises:
            SelectionError: a name is not that of a hook point.
            HookTypeError: a hook cannot be called as `hook(tensor, hook=point)`.
        """
        if bwd_hooks and reset_hooks_end:
            msg = (
                "the backward hooks are removed at the end of run_with_hooks, before any backward: "
                "pass reset_hooks_end=False, or call the model and backward inside hooks()"
            )
            warnings.warn(msg, UserWarning, stacklevel=2)
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
        """Calls the model and keeps what passes its hook points.

        What is kept is what leaves the hooks, detached. Hook points that were asked for by name and
        never fired are told in a `NeverFiredWarning`.

        Args:
            *model_args: for the model.
            names_filter: the hook points to keep: a name, a list, tuple or set of names, a
                predicate of names, or None for all.
            device: where tensors are moved to; None leaves them where they are.
            remove_batch_dim: drop the first dimension, where it is 1.
            incl_bwd: call `backward` of the output too and keep the gradients, under the name with
                `_grad` behind it.
            reset_hooks_end: end it with the call. Else the cache goes on being filled by the calls
                of this context, until `reset_hooks` is called in it.
            clear_contexts: with `reset_hooks_end`, empty the `ctx` of all hook points at the end.
            pos_slice: the positions to keep, see `Slice`; an integer keeps the dimension.
            copy: `checked` keeps a reference, and reading one that was changed in place raises
                `StaleActivationError`; `clone` copies; `ref` keeps a reference, whatever becomes of
                it.
            **model_kwargs: for the model.

        Returns:
            What the model returns, and the cache.

        Raises:
            SelectionError: a name is not that of a hook point.
            HookTypeError: `names_filter` is something else.
            ValueError: `remove_batch_dim` with a first argument of another batch size than 1, an
                unknown `copy`, or a `pos_slice` that is none.
            RuntimeError: `incl_bwd` with an output that is no scalar, or `device` is none.
        """
        if remove_batch_dim and model_args:
            _check_batch(model_args[0])
        points = points_filtered(self, names_filter)
        keeping = _keeping(device, remove_batch_dim, pos_slice, copy)
        if not reset_hooks_end:
            cache, fwd, bwd = self._saving(points, keeping, None, incl_bwd=incl_bwd)
            with self.hooks(fwd, bwd, reset_hooks_end=False):
                return self._call(model_args, model_kwargs, backward=incl_bwd), cache
        with _Level.of(self) as level:
            recording = Recording(points, keeping, level, grads=incl_bwd)
            try:
                output = self._call(model_args, model_kwargs, backward=incl_bwd)
            finally:
                if clear_contexts:
                    self.clear_contexts()
        cache = recording.cache()
        by_name = names_filter is not None and not callable(names_filter)
        silent = [name for name in points if name not in cache] if by_name else []
        if silent:
            warnings.warn(explain(self, silent), NeverFiredWarning, stacklevel=2)
        return output, cache

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, backward: bool) -> Any:
        output = self(*args, **kwargs)
        if backward:
            output.backward()
        return output

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
        """Makes hooks that keep activations, for `hooks` or `run_with_hooks`, and adds none.

        Args:
            names_filter: which hook points, see `run_with_cache`, as for the others.
            incl_bwd: hooks for the gradients too.
            device: where tensors are moved to.
            remove_batch_dim: drop the first dimension, where it is 1.
            cache: what to fill; None for a new one. A dict cannot check what `copy="checked"`
                checks: it gets references.
            pos_slice: the positions to keep.
            copy: `checked`, `clone` or `ref`.

        Returns:
            The cache; pairs of a name and a hook for the forward; and for the backward.

        Raises:
            SelectionError: a name is not that of a hook point.
            HookTypeError: `names_filter` is something else, or `cache` is no mutable mapping.
            ValueError: an unknown `copy`, or a `pos_slice` that is none.
            RuntimeError: `device` is none.
        """
        keeping = _keeping(device, remove_batch_dim, pos_slice, copy)
        points = points_filtered(self, names_filter)
        return self._saving(points, keeping, cache, incl_bwd=incl_bwd)

    def _saving(
        self,
        points: dict[str, HookPoint],
        keeping: Keeping,
        cache: Any,
        *,
        incl_bwd: bool,
    ) -> tuple[Any, list[tuple[str, HookFunction]], list[tuple[str, HookFunction]]]:
        if cache is None:
            cache = PointCache()
        if not isinstance(cache, MutableMapping):
            msg = f"cache is a dict, or None for a new one, got {describe(cache)}"
            raise HookTypeError(msg)

        def hooks(suffix: str) -> list[tuple[str, HookFunction]]:
            return [
                (name, SavingHook(cache, name + suffix, point, keeping))
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
        """Adds hooks that keep activations, for all contexts, until `reset_hooks`.

        The arguments, and what is raised, are those of `get_caching_hooks`.

        Returns:
            The cache, which the calls of the model fill.
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
        _leave_empty_ones()

    def reset_hooks(
        self,
        clear_contexts: bool = True,
        direction: Directions = "both",
        including_permanent: bool = False,
        level: int | None = None,
    ) -> None:
        """Removes the hooks that were added and fire in this context, but for permanent ones.

        Args:
            clear_contexts: empty the `ctx` of all hook points too.
            direction: `fwd`, `bwd` or `both`.
            including_permanent: permanent ones too.
            level: only those of this level.

        Raises:
            ValueError: another `direction`.
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
        """The hooks that were added and fire in this context, by hook point, in firing order.

        Args:
            name_filter: which hook points; those without hooks are left out.
            dir: `fwd`, `bwd` or `both`, forward ones first.
            including_permanent: list permanent ones too.

        Raises:
            SelectionError: a name is not that of a hook point.
            HookTypeError: `name_filter` is something else.
            ValueError: another `dir`.
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
    """The model that `HookedRootModule.wrap` returns, with the methods of this class."""

    __slots__ = ()


WrappedRootModule._own_names = own_names(WrappedRootModule)


def _pairs(pairs: Hooks, dir: Direction) -> Hooks:
    """The pairs, or an error that says what was expected."""
    try:
        whiches, hooks = tuple(zip(*pairs, strict=True)) or ((), ())
        return zip(whiches, hooks, strict=True)
    except (TypeError, ValueError) as error:
        msg = f"{dir}_hooks is a list of pairs (name, hook), got {pairs!r}"
        raise HookTypeError(msg) from error


def _keeping(
    device: torch.device | str | None, remove_batch_dim: bool, pos_slice: Any, copy: Copy
) -> Keeping:
    check_copy(copy)
    # Made on it: one that is not there is refused here.
    target = None if device is None else torch.empty(0, device=device).device
    return Keeping(target, bool(remove_batch_dim), Slice.unwrap(pos_slice), copy)


def _check_batch(first: object) -> None:
    if isinstance(first, Tensor) and first.ndim and first.shape[0] != 1:
        msg = (
            "remove_batch_dim drops a first dimension of 1, and the model's first argument has "
            f"one of {first.shape[0]}"
        )
        raise ValueError(msg)


def _deprecated(name: str) -> None:
    msg = f"{name} is deprecated: use add_caching_hooks or run_with_cache"
    warnings.warn(msg, DeprecationWarning, stacklevel=3)

"""`nan_watch`: names the step, the batch and the module in which a NaN or an infinity appears."""

# A native detector counts on all modules, without Python in their calls. Hooks at the begin and the
# end of each call of the model ask it, and put a new one in its place if it found something: a
# detector knows the first module of its life. Of a backward it sees the gradients of outputs, which
# modules whose inputs need no gradient have too.

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias, cast

from torch.optim import Optimizer

from ferrohook._core import NonFiniteDetector
from ferrohook.attach.priorities import AHEAD_OF_ALL, BEHIND_ALL
from ferrohook.errors import NonFiniteError
from ferrohook.names.select import select
from ferrohook.registration.register import register
from ferrohook.registration.scopes import Scope
from ferrohook.util.arguments import expect, expect_module

if TYPE_CHECKING:
    from torch import nn

    from ferrohook._core import Frame
    from ferrohook.effects.typed import Phase
    from ferrohook.names.select import Selector
    from ferrohook.registration.register import HandleGroup

Direction: TypeAlias = Literal["forward", "backward"]
_PLACES: Final = {
    "forward": "first in the output of",
    "backward": "first in the gradient of the output of",
    "parameter": "first in the gradient of",
}


class NonFinite(NamedTuple):
    """Place at which a NaN or an infinity appeared."""

    step: int
    """Steps of the optimizer before it, since the watch began or was reset."""
    batch: int
    """Calls of the model before it."""
    module: str
    """The first module with one in its output, or in the gradient of its output; a parameter."""
    phase: Direction | Literal["parameter"]
    nan: int
    """Elements that are NaN, in all outputs of the call or all gradients of the backward."""
    inf: int
    """Elements that are infinite."""

    def __str__(self) -> str:
        return (
            f"{self.nan} NaN and {self.inf} infinities in step {self.step}, batch {self.batch}, "
            f"{_PLACES[self.phase]} {self.module or 'the model'!r}"
        )


class NanWatch:
    """A watch of a model, see `nan_watch`."""

    def __init__(self, watched: _Watched, frame: Scope) -> None:
        self.found: list[NonFinite] = []
        """The first module of each call, and of each backward, that had some."""
        self.step = 0
        """Number of the step; set it yourself where no `optimizer` was passed."""
        self.batches = 0
        """Number of the calls of the model so far."""
        self._watched = watched
        self._frame = frame
        self._detectors: dict[Direction, tuple[NonFiniteDetector, HandleGroup]] = {}
        self._renew("forward")
        if watched.gradients:
            self._renew("backward")

    @property
    def first(self) -> NonFinite | None:
        """The first that was found; None if all was finite."""
        return self.found[0] if self.found else None

    def reset(self) -> None:
        """Forgets its findings, and counts steps and batches from 0."""
        self.found.clear()
        self.step = self.batches = 0
        for phase in self._detectors:
            self._renew(phase)

    def check(self) -> None:
        """Looks now, as each call of the model and each step of the optimizer do.

        Raises:
            NonFiniteError: something was found, and the watch stops.
        """
        phases: list[Direction] = [*self._detectors]
        for phase in phases:
            self._look(phase)

    def _renew(self, phase: Direction) -> None:
        if phase in self._detectors:
            self._detectors[phase][1].remove()
        detector, what = NonFiniteDetector(), self._watched
        on: Phase = "forward" if phase == "forward" else "backward_pre"
        group = register(what.model, what.names, detector, phase=on, scope=self._frame)
        self._detectors[phase] = detector, group

    def _take(self, phase: Direction) -> NonFinite | None:
        """Reads the detector of a phase, and adds its findings in the last call."""
        detector, _ = self._detectors[phase]
        numbers = detector.snapshot()
        if not numbers["affected"]:
            return None
        batch = max(self.batches - 1, 0)
        module = detector.first or ""
        found = NonFinite(self.step, batch, module, phase, numbers["nan"], numbers["inf"])
        self.found.append(found)
        return found

    def _look(self, phase: Direction) -> None:
        found = self._take(phase)
        if found is not None:
            self._renew(phase)
            if self._watched.stop:
                raise NonFiniteError(str(found))

    def _began(self, _model: nn.Module, _args: Any) -> None:
        self.check()  # findings of a call that raised, and the gradients
        self.batches += 1

    def _ended(self, _model: nn.Module, _args: Any, _output: Any) -> None:
        self._look("forward")

    def _steps(self, optimizer: Optimizer, *_arguments: Any) -> None:
        self.check()
        if self._watched.stop:
            self._check_gradients(optimizer)

    def _check_gradients(self, optimizer: Optimizer) -> None:
        """Raises if a gradient of the optimizer's parameters is not finite."""
        every = (it for group in optimizer.param_groups for it in group["params"])
        used = [it for it in every if it.grad is not None]
        values = [it.grad._values() if it.grad.is_sparse else it.grad for it in used]
        finite = [it.isfinite().all() for it in values]  # a GPU has them all before the first read
        if all(finite):
            return
        names = {it: name for name, it in self._watched.model.named_parameters()}
        counts = [(int(it.isnan().sum()), int(it.isinf().sum())) for it in values]
        first = next(it for it, count in zip(used, counts, strict=True) if any(count))
        name = names.get(first, "a parameter")
        nan, inf = map(sum, zip(*counts, strict=True))
        found = NonFinite(self.step, max(self.batches - 1, 0), name, "parameter", nan, inf)
        self.found.append(found)
        raise NonFiniteError(str(found))

    def _stepped(self, *_optimizer: Any) -> None:
        self.step += 1

    def __repr__(self) -> str:
        names = len(self._watched.names)
        seen = f"{self.first}" if self.found else "all finite"
        return f"<NanWatch of {names} modules, {self.batches} batches: {seen}>"


class _Watched:
    """Modules of a model that are watched: the tag of a frame."""

    ONCE = "a watch can be entered only once: call nan_watch() again"

    def __init__(
        self,
        model: nn.Module,
        names: list[str],
        *,
        optimizer: Optimizer | None,
        gradients: bool,
        stop: bool,
    ) -> None:
        self.model = model
        self.names = names
        self.gradients = gradients
        self.stop = stop
        self._optimizer = optimizer
        self._handles: list[Any] = []

    def begin(self, frame: Frame) -> NanWatch:
        """Watches the calls in a scope, until it is left."""
        scope = cast("Scope", frame)
        watch = self._watch = NanWatch(self, scope)
        # Around the detector's hook on the model itself.
        register(
            self.model,
            "",
            watch._began,
            phase="forward_pre",
            priority=AHEAD_OF_ALL,
            scope=scope,
        )
        register(self.model, "", watch._ended, priority=BEHIND_ALL, scope=scope)
        if self._optimizer is not None:
            self._handles = [
                self._optimizer.register_step_pre_hook(watch._steps),
                self._optimizer.register_step_post_hook(watch._stepped),
            ]
        return watch

    def left(self, fine: bool) -> None:  # noqa: ARG002, FBT001 (called from Rust)
        """Looks for the last time."""
        for handle in self._handles:
            handle.remove()
        for phase in self._watch._detectors:
            self._watch._take(phase)


class Watch(Scope):
    """A scope that is watched, see `nan_watch`; its `with` statement gives the `NanWatch`."""

    _takes_hooks = False

    if TYPE_CHECKING:

        def __enter__(self) -> NanWatch: ...  # type: ignore[override]


def nan_watch(
    model: nn.Module,
    what: Selector = None,
    *,
    optimizer: Optimizer | None = None,
    gradients: bool = False,
    stop: bool = False,
) -> Watch:
    """Watches for the first NaN or infinity in the calls of this context.

    A context manager that returns a `NanWatch`. Counting is native, on each module. The counts are
    read once per call of the model, which waits for a GPU. Counts of gradients are read before a
    step of the optimizer and at the next call.

    Args:
        model: any module; its calls are the batches.
        what: modules to watch, see `select`; None for all. Leave out modules that return infinities
            on purpose, such as masks.
        optimizer: its steps are counted; with `stop`, it takes no step on gradients of parameters
            with NaN or infinities.
        gradients: watch the gradients of the modules' outputs too.
        stop: raise `NonFiniteError` at the end of the call, or before the step, in which something
            was found.

    Raises:
        SelectionError: `what` matches nothing.
        HookTypeError: an argument has the wrong type.
        HookError: when entered, if a module cannot be instrumented; or entered for the second time.

    Examples:
        >>> with fh.nan_watch(model, optimizer=optimizer) as watch:
        ...     train(model, optimizer)
        >>> print(watch.first)
        12 NaN and 0 infinities in step 4, batch 9, first in the output of 'net.3'
    """
    expect_module(model, "nan_watch needs")
    expect(optimizer, Optimizer | None, "optimizer must be a torch.optim.Optimizer or None")
    names = [*select(model, what, called=True)]
    watched = _Watched(model, names, optimizer=optimizer, gradients=gradients, stop=stop)
    return Watch(watched)

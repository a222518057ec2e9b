"""Sites: modules of a compiled model at which operators in its graph serve batches."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Final, Self

import torch
from torch import nn
from torch._subclasses import FakeTensor

from ferrohook._core import SitesBase
from ferrohook.attach.instrument import attach
from ferrohook.errors import HookError, RowsError
from ferrohook.plans import Request
from ferrohook.rows import operators
from ferrohook.util.arguments import expect
from ferrohook.util.texts import counted
from ferrohook.util.weak import PerObject

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ferrohook._core import BatchBase, ModuleTree
    from ferrohook.names.places import Place
    from ferrohook.plans import Prepared

_OPEN: Final[PerObject[weakref.ref[Sites]]] = PerObject()


def open_sites(model: nn.Module | None) -> Sites | None:
    """Returns the open sites of a model, if it has some."""
    reference = None if model is None else _OPEN.get(model)
    opened = None if reference is None else reference()
    return None if opened is None or opened.closed else opened


class Sites(SitesBase, ABC):
    """Sites of a model, see `sites`. A context manager: leaving it closes them.

    They are open from `opened` on.
    """

    def __init__(
        self, model: nn.Module, parts: Mapping[str, Any], outside: Sequence[str] = ()
    ) -> None:
        """Makes them.

        Args:
            model: the model.
            parts: the `output_index` of each site, by the path of its module.
            outside: paths of modules outside of the graph, at which hooks run as without sites.
        """
        self.names = [*parts]
        self._parts = [*parts.values()]
        self._outside = {name: model.get_submodule(name) for name in outside}
        self._model = weakref.ref(model)
        operators.define()

    def opened(self) -> Self:
        """Lays the operators, and returns the sites; an interrupt leaves none.

        Raises:
            HookError: a module cannot be instrumented.
        """
        try:
            model = self._model()
            if model is not None:
                self._open(model)
        except BaseException:
            self.close()
            raise
        else:
            return self

    def _open(self, model: nn.Module) -> None:
        # The model too, which is where the plans of requests begin: instrumenting it later would
        # have it traced again.
        modules = {name: model.get_submodule(name) for name in self.names}
        attach({"": model} | self._outside | modules, self._attachment)
        for site, (name, module) in enumerate(modules.items()):
            self._attachment.register([module], "forward", self._hook(site), names=[name])
        self._attachment.release_when_unused([*modules.values()])
        _OPEN[model] = weakref.ref(self)
        self._count()

    @abstractmethod
    def _hook(self, site: int) -> Callable[..., Any]:
        """Makes the hook of a site, which Dynamo traces: it calls the operators."""

    @abstractmethod
    def begin_service(self, batch: BatchBase) -> None:
        """Begins to serve a batch that is being entered, and notifies the batch.

        Raises:
            RowsError: a member or its rows cannot be served; `member` is that one.
        """

    @abstractmethod
    def moved(self, batch: BatchBase) -> None:
        """Records the positions of a batch, for the calls from now on.

        Raises:
            RowsError: they are not served.
        """

    @abstractmethod
    def end_service(self, batch: BatchBase) -> None:
        """Ends the service of a batch."""

    def __repr__(self) -> str:
        return f"<Sites at {counted(len(self.names), 'module')}{', closed' if self.closed else ''}>"

    def _refusal(self, batch: BatchBase) -> str | None:
        """Returns why a batch cannot be served, regardless of its members; None if it can."""
        if self.closed:
            return "these sites were closed"
        if isinstance(torch.empty(0, device="cpu"), FakeTensor):
            return "sites serve batches only with real tensors: leave FakeTensorMode"
        if batch.size is None:
            return (
                "sites find rows by their number in the batch: pass size or positions to the batch"
            )
        if self._gathers(batch):
            return "sites have the rows of the batch, but a module in gathered has other rows"
        return None

    def _gathers(self, batch: BatchBase) -> bool:
        model = self._model()
        if model is None or not batch._gathered:
            return False
        gathered = {id(module) for module in batch._gathered}
        return any(id(model.get_submodule(name)) in gathered for name in self.names)

    def _members_of(self, batch: BatchBase) -> dict[int, Request]:
        """Returns the members of a batch that did not fail, by their places in it.

        Raises:
            RowsError: see `begin_service`.
        """
        if (reason := self._refusal(batch)) is not None:
            raise RowsError(reason)
        found: dict[int, Request] = {}
        trees: set[ModuleTree] = set()
        for number, request in enumerate(batch.members):
            if request.failed:
                continue
            try:
                found[number] = self._checked(request, trees)
            except HookError as error:
                refusal = RowsError(str(error))
                refusal.member = request
                raise refusal from error
        return found

    def _checked(self, request: Any, trees: set[ModuleTree]) -> Request:
        """Returns a member that can be served.

        Args:
            request: a member of a batch.
            trees: trees of its other members, which are up to date.
        """
        expect(request, Request, "sites only serve requests of plans")
        prepared: Prepared = request.prepared
        self._check_plan(prepared)
        if prepared.tree not in trees:
            if prepared.outdated:
                msg = "modules of the model were replaced since the plan was prepared"
                raise HookError(msg)
            trees.add(prepared.tree)
        served: Request = request
        return served

    @abstractmethod
    def _check_plan(self, prepared: Prepared) -> None:
        """Validates that the sites serve a plan.

        Raises:
            HookError: they do not.
        """

    def _check_model(self, prepared: Prepared) -> nn.Module:
        """Returns the model of a plan.

        Raises:
            HookError: it is another one than the sites'.
        """
        model = self._model()
        if model is None or prepared.model is not model:
            msg = "the plan was prepared for a different model than the sites"
            raise HookError(msg)
        return model

    def _sites_of(self, model: nn.Module, number: int, places: dict[str, Place]) -> dict[str, int]:
        """Returns the sites at places of an entry of a plan, by their names.

        Raises:
            HookError: one is no site.
        """
        sites = {id(model.get_submodule(name)): site for site, name in enumerate(self.names)}
        missing = [name for name, place in places.items() if id(place.module) not in sites]
        if missing:
            msg = f"entry {number} of the plan is for {missing[0]!r}, which is not a site"
            raise HookError(msg)
        return {name: sites[id(place.module)] for name, place in places.items()}

    def _part_refusal(
        self, places: dict[str, Place], sites: dict[str, int], hook: Any = None
    ) -> str | None:
        """Returns why places, of a hook if it is given, are not the tensors of their sites."""
        for name, place in places.items():
            part = place.part if hook is None or place.quantity else hook.output_index
            if part != (own := self._parts[sites[name]]):
                return f"its output_index differs from the sites', {own!r}"
        return None

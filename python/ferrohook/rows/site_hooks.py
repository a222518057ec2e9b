"""Sites without tables: their operators run the hooks of batches as the graph is called."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import Tensor, nn

from ferrohook._core import run_forward_hooks
from ferrohook.attach.instrument import registry_of
from ferrohook.effects.parts import SUM, change_part, part_of
from ferrohook.errors import HookError
from ferrohook.plans.needs import CHANGES, GATES, BackEnd
from ferrohook.rows import operators
from ferrohook.rows.sites import Sites

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ferrohook._core import BatchBase
    from ferrohook.names.places import Place
    from ferrohook.plans import Prepared

IN_PLACE: Final = "ferrohook::run_in_place"
"""Operator at which a graph is cut, as `CompilationConfig.splitting_ops` of vLLM has it."""
_AFTER: Final = "sites run after modules: they have no inputs"
BACK_END: Final = BackEnd(
    CHANGES
    | GATES
    | {"at", "at function", "not finite", "output_index", "prepend", "priority", "table"}
    | {"transcoder"}
    | {"calls", "copy", "cut rows", "device", "dtype", "features", "max_bytes", "slice"},
    {
        "inputs": _AFTER,
        "python": f"{_AFTER} for Python functions",
        "route": f"{_AFTER}, and a Route needs the scores of the router",
    },
)


class _HookSite:
    """A site, for its operator."""

    __slots__ = ("__weakref__", "_module", "_outer", "_sites", "beside", "part")

    def __init__(self, sites: HookSites, module: nn.Module, part: Any) -> None:
        self._sites = weakref.ref(sites)
        self._module = weakref.ref(module)
        path = part if isinstance(part, tuple) else () if part is None else (part,)
        sums = path[-1:] == (SUM,)
        self._outer = path[:-1] if sums else path
        # The hidden state takes the changes of a sum.
        self.part: tuple[Any, ...] = (*self._outer, 0) if sums else path
        """Path in an output to the tensor that the operator takes and returns."""
        self.beside: tuple[Any, ...] | None = (*self._outer, 1) if sums else None
        """Path to the other term of a sum."""

    def run(self, x: Tensor, residual: Tensor | None) -> Tensor | None:
        """Runs the hooks of the batch of this context; None without a batch.

        Returns:
            the tensor, in new memory.
        """
        sites, module = self._sites(), self._module()
        batch = None if sites is None or module is None else sites._batch_here()
        if batch is None:
            return None
        own = x.clone()
        value: Any = own if self.beside is None else (own, residual)
        for step in reversed(self._outer):
            value = _holding(step, value)
        changed = run_forward_hooks(batch, module, value)
        if changed is None:
            return own
        found: Tensor = part_of(changed, self.part)
        return found if found.stride() == x.stride() else torch.empty_like(x).copy_(found)


class HookSites(Sites):
    """Sites without tables, see `sites`."""

    def __init__(
        self,
        model: nn.Module,
        parts: Mapping[str, Any],
        outside: Sequence[str] = (),
        *,
        in_place: bool = False,
    ) -> None:
        """Makes them, see `Sites`.

        Args:
            model: the model.
            parts: the `output_index` of each site, by the path of its module.
            outside: paths of modules outside of the graph.
            in_place: lay `IN_PLACE`, for a graph that is cut there, replayed and not compiled with
                gradients.
        """
        super().__init__(model, parts, outside)
        self._in_place = in_place
        self._keys, self._order = (
            torch.zeros(len(parts), 1, device="cpu"),
            torch.zeros(1, device="cpu"),
        )
        self._points = [
            _HookSite(self, model.get_submodule(name), part) for name, part in parts.items()
        ]
        self._served: weakref.WeakSet[Prepared] = weakref.WeakSet()

    def _hook(self, site: int) -> Callable[..., Any]:
        key, point = self._keys[site], self._points[site]
        operators.assign(key, point)
        part, beside = point.part, point.beside
        run, ran, order = torch.ops.ferrohook.run, torch.ops.ferrohook.ran, self._order
        run_in_place, in_place = torch.ops.ferrohook.run_in_place, self._in_place

        def hook(_module: nn.Module, _args: object, output: Any) -> Any:
            residual = None if beside is None else part_of(output, beside)

            def changed(x: Tensor) -> Tensor:
                if in_place:
                    x = x.clone()
                    run_in_place(x, residual, key, order)
                    return x
                x = cast("Tensor", run(x, residual, key, order))
                ran(x.detach(), order)
                return x

            return change_part(output, part or None, changed)

        # The hook keeps them alive while they are open.
        vars(hook)["sites"] = self
        return hook

    def begin_service(self, batch: BatchBase) -> None:  # noqa: D102 (of Sites)
        self._members_of(batch)
        self._serve(batch, beside=True)
        outside = [registry_of(module).module for module in self._outside.values()]
        batch._serve(copies=True, outside=outside)

    def _refusal(self, batch: BatchBase) -> str | None:
        if torch.is_grad_enabled():
            return (
                "sites without tables compute no gradients: enter the batch inside torch.no_grad() "
                "or torch.inference_mode()"
            )
        return super()._refusal(batch)

    def _check_plan(self, prepared: Prepared) -> None:
        if prepared in self._served:
            return
        model = self._check_model(prepared)
        for number, entry in enumerate(prepared.entries):
            reason, needs = None, prepared.needs[number]
            read = self._inside(prepared.places(number, read=True))
            places, hook = prepared.places(number), getattr(entry, "hook", None)
            own = self._inside(places)
            if own or not places:  # modules outside are served as without sites
                reason = BACK_END.refusal(entry, needs=needs)
            if any(place.inputs for place in read.values()):
                reason = _AFTER
            for each, of in ((own, hook), (read, None)):
                sites = self._sites_of(model, number, each)
                reason = reason or self._part_refusal(each, sites, of)
            if reason is not None:
                msg = f"entry {number} of the plan cannot be served at a site: {reason}"
                raise HookError(msg)
        self._served.add(prepared)

    def _inside(self, places: dict[str, Place]) -> dict[str, Place]:
        """Returns the places at modules inside the graph."""
        outside = [*map(id, self._outside.values())]
        return {name: place for name, place in places.items() if id(place.module) not in outside}

    def moved(self, batch: BatchBase) -> None:
        """Does nothing: the hooks know the positions of the batch."""

    def end_service(self, batch: BatchBase) -> None:  # noqa: D102 (of Sites)
        self._end(batch)


def _holding(step: str | int, value: Any) -> Any:
    """Returns a structure that has a value where a step of an `output_index` leads."""
    if isinstance(step, str):
        return {step: value}
    return (*[None] * step, value) if step >= 0 else (value, *[None] * (-step - 1))

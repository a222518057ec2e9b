"""Looks at the model of an engine, in forwards of a few tokens as it is loaded.

The prover of quantities is the same as for all models. What differs: the model is not copied, and
the engine calls it; a layer returns the stream as a pair of tensors, or its contribution to the
stream; a norm adds the last contribution and returns the sum too; attention is a module that takes
q, k, v.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from ferrohook.effects.parts import SUM
from ferrohook.engines.model.modules import NamedTensors, dim_of_rows
from ferrohook.errors import HookError
from ferrohook.names.spelling import SIGN, kind_of
from ferrohook.quantity import Quantities, remember
from ferrohook.quantity.anatomy.observe import Hidden, Look, ModuleCall, ObservedTensor, noise
from ferrohook.quantity.anatomy.subjects import Example, Subject
from ferrohook.quantity.proofs.attention import FoundHeads
from ferrohook.quantity.proofs.proved import Findings, Proved
from ferrohook.quantity.proofs.proving import prove
from ferrohook.quantity.proofs.routing_rules import prove_rules
from ferrohook.quantity.table import table_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ferrohook.quantity.anatomy.observe import Writes

_ROWS_AND_WIDTH: Final = 2
_STREAM: Final = Hidden(SUM)
"""Part of an input: the sum of the two tensors that a module takes."""
_EQUATION: Final = "attention(q, k, v) = z"
_SAMPLED: Final = (
    "the engine computes logits after the layers, and only for the tokens that it samples from: "
    "keep @final_norm, the input of the unembedding"
)
_OTHER_NUMBERS: Final = "its router is not proved: the engine may number the experts differently"
_NO_PATTERN: Final = "the engine's attention does not compute a pattern"
_OTHER_SHAPE: Final = (
    "attention does not take or return it as a tensor of shape (tokens, heads * head_dim)"
)
_NO_ATTENTION: Final = "none of its modules is called as attention(q, k, v)"


class HeadSizes(NamedTuple):
    """Sizes of an attention module, on this rank."""

    heads: int
    kv_heads: int
    head_dim: int

    def count(self, kind: str) -> int:
        """Returns the number of heads of q, k, v or z."""
        return self.kv_heads if kind in {"k", "v"} else self.heads

    def width(self, kind: str) -> int:
        """Returns the width of q, k, v or z, its heads side by side."""
        return self.count(kind) * self.head_dim


def has_rows(value: Any) -> bool:
    """Returns True for a floating-point tensor of (rows, width) or (1, rows, width)."""
    return (
        isinstance(value, Tensor)
        and value.is_floating_point()
        and (dim := dim_of_rows(value.shape)) is not None
        and value.dim() == dim + _ROWS_AND_WIDTH
    )


class StepLook(Look):
    """Look at a forward of a few tokens: the tensors with a row per token.

    Args:
        model: the engine's.
        forward: runs it for `OBSERVED_ROWS` tokens.
        streams: see `Look`.
        writes: changes of tensors, by site.
    """

    def __init__(
        self,
        model: nn.Module,
        forward: Callable[[], object],
        streams: Mapping[str, ObservedTensor],
        writes: Writes | None = None,
    ) -> None:
        super().__init__(model, forward, writes, has_rows)
        self.streams = streams
        outer = {call.path.rpartition(".")[0] for call in self.calls}
        self.calls = [it if it.path in outer else _unfused(it) for it in self.calls]

    def _taken(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[Any, Tensor]:
        found = super()._taken(args, {})
        found |= {Hidden(name): it for name, it in kwargs.items() if has_rows(it)}
        if len(found) == len(("hidden", "residual")):
            hidden, residual = found.values()
            if hidden.shape == residual.shape:
                found[_STREAM] = hidden + residual
        return found


def _unfused(call: ModuleCall) -> ModuleCall:
    """Returns the call of a norm that takes a pair and returns its sum, as if it took the sum."""
    total = call.inputs.get(_STREAM)
    if total is None or total not in call.outputs.values():
        return call
    outputs = {part: value for part, value in call.outputs.items() if part != SUM}
    return call._replace(inputs={_STREAM: total}, outputs=outputs)


class StepSubject(Subject):
    """The model of an engine, which is looked at in forwards of the engine's own.

    Args:
        model: the engine's, loaded.
        ids: of the tokens.
        forward: runs it for them, alike each time.
        streams: see `Look`.
    """

    def __init__(
        self,
        model: nn.Module,
        ids: Sequence[int],
        forward: Callable[[], object],
        streams: Mapping[str, ObservedTensor],
    ) -> None:
        super().__init__(model, Example((torch.tensor(ids, device="cpu"),), {}, None))
        self._forward = forward
        self._streams = streams

    def forward(self) -> None:
        """Runs the forward.

        Raises:
            HookError: it failed.
        """
        try:
            self._forward()
        except Exception as error:
            msg = f"its forward failed with {type(error).__name__}: {error}"
            raise HookError(msg) from error

    def look(self, writes: Writes | None = None) -> Look:
        """Observes one forward, see `Subject`."""
        return StepLook(self.model, self.forward, self._streams, writes)


def look_at(  # noqa: PLR0913 (what differs between engines)
    model: nn.Module,
    ids: Sequence[int],
    forward: Callable[[], object],
    heads_of: Callable[[nn.Module], HeadSizes | None],
    *,
    places: Mapping[str, str] | None = None,
    factor_of: Callable[[nn.Module], float] = lambda _router: 1.0,
) -> NamedTensors:
    """Proves the quantities of an engine's model, and has plans for it resolve their names.

    An engine runs without them: a failed look is logged, and its reason reported with missing ones.

    Args:
        model: the engine's, loaded.
        ids: of some tokens, see `observed_ids`.
        forward: runs it for them, alike each time.
        heads_of: returns the sizes of a module that is called as attention(q, k, v, ...), None for
            any other.
        places: hook points that see the stream after blocks, by the names of the blocks.
        factor_of: returns the engine's factor of the output of the experts that
            a module chooses, where it does not multiply their weights.

    Returns:
        The table, with places as plans in this engine need them.
    """
    streams = {path: ObservedTensor.output(it, None) for path, it in (places or {}).items()}
    try:
        named = _named(StepSubject(model, ids, forward, streams), heads_of, factor_of)
    except Exception as error:
        logging.getLogger("ferrohook").exception("inspecting the engine's model failed")
        reason = f"inspecting the model failed with {type(error).__name__}: {error}"
        named = NamedTensors(Quantities({}, {"resid_post": reason}, type(model).__name__))
    remember(model, named.table, named.heads)
    return named


def _named(
    subject: StepSubject,
    heads_of: Callable[[nn.Module], HeadSizes | None],
    factor_of: Callable[[nn.Module], float],
) -> NamedTensors:
    with torch.no_grad():
        look = subject.look()
        sizes = {
            call.path: found
            for call in look.calls
            if (found := heads_of(subject.model.get_submodule(call.path))) is not None
        }
        findings = prove(subject, look, look, _inside(subject, look, sizes), _NO_ATTENTION)
        _check_numbers(findings)
        prove_rules(subject.model, subject, findings.proved, fused=True)
        _multiply_weights(subject.model, findings, factor_of)
    findings.missing["logits"] = _SAMPLED
    table = table_of(subject.model, findings)
    heads = {
        name: (sizes[each.path].count(kind), sizes[each.path].head_dim)
        for name, each in table.items()
        if (kind := kind_of(name.removeprefix(SIGN))) in {"q", "k", "v", "z"} and each.path in sizes
    }
    return NamedTensors(table, heads)


def _check_numbers(findings: Findings) -> None:
    """Takes out experts without a router, whose columns show which numbers they have."""
    for each in [*findings.proved]:
        kind = kind_of(each.name)
        if kind in {"experts", "expert_weights"}:
            router = each.name.replace(kind, "router")
            if router in findings.missing:
                findings.proved.remove(each)
                findings.missing[each.name] = _OTHER_NUMBERS


def _multiply_weights(
    model: nn.Module, findings: Findings, factor_of: Callable[[nn.Module], float]
) -> None:
    """Makes weights of experts contain the engine's factor of their output."""
    for each in findings.proved:
        kind = kind_of(each.name)
        if kind == "expert_weights":
            each.multiplier = factor_of(model.get_submodule(each.site.path))
        elif kind == "experts" and each.routing is not None:
            factor = factor_of(model.get_submodule(each.site.path))
            each.routing = each.routing._replace(factor=factor)


def _inside(
    subject: StepSubject, look: Look, sizes: Mapping[str, HeadSizes]
) -> dict[str, FoundHeads]:
    """Finds q, k, v and z where attention modules take and return them, and writes to each z.

    Keys are the paths of the sublayers: of the module around the attention, or of the attention
    itself if that module is the block.
    """
    writes = {ObservedTensor.output(path, None): noise(0.5) for path in sizes}
    changed = subject.look(writes) if writes else look
    taken = {value for call in changed.calls for value in call.inputs.values()}
    found = {}
    for path, size in sizes.items():
        sites = {kind: ObservedTensor.input(path, place) for place, kind in enumerate("qkv")}
        sites["z"] = z = ObservedTensor.output(path, None)
        # A gate may stand before the projection; but the value before it goes no further.
        arrives = z in changed.written and (
            changed.written[z] in taken or changed.sites[z].value not in taken
        )
        proved = [
            Proved(
                kind,
                site,
                look.sites[site].shape,
                _EQUATION,
                writable=site.inputs or arrives,
            )
            for kind, site in sites.items()
            if site in look.sites and look.sites[site].shape[-1] == size.width(kind)
        ]
        absent = sites.keys() - {each.name for each in proved}
        missing = dict.fromkeys(sorted(absent), _OTHER_SHAPE)
        parent, _, name = path.rpartition(".")[0].rpartition(".")
        around = path if name.isdigit() else f"{parent}.{name}"
        found[around] = FoundHeads((*proved,), missing | {"pattern": _NO_PATTERN})
    return found

"""Proofs of the quantities of a model in an engine, in forwards of a few tokens as it is loaded.

An engine's model cannot be called as one of transformers: it has a forward of its own, its modules
are fused, its layers return the stream as a pair. So each block is taken apart by what its modules
took and returned: `resid_pre + attn_out = resid_mid`, `resid_mid + mlp_out = resid_post`.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from ferrohook.effects.formulas import SUM
from ferrohook.engines.model.modules import OBSERVED_ROWS, NamedTensors
from ferrohook.quantity import Quantities, Quantity, remember
from ferrohook.quantity.anatomy.equations import Terms, fit, tolerance
from ferrohook.quantity.anatomy.observe import Look, ObservedTensor, noise

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ferrohook.quantity.anatomy.observe import Writes

_ROWS_AND_WIDTH: Final = 2
_BEHIND: Final = "the engine computes it behind the forward of its modules"


class HeadSizes(NamedTuple):
    """Sizes of an attention module, on this rank."""

    heads: int
    kv_heads: int
    head_dim: int


class StepLook(Look):
    """Look at a forward of a few tokens: the tensors with a row per token.

    Args:
        model: the engine's.
        forward: runs it for `OBSERVED_ROWS` tokens.
        writes: changes of tensors, by site.
    """

    def __init__(
        self, model: nn.Module, forward: Callable[[], object], writes: Writes | None = None
    ) -> None:
        super().__init__(model, forward, writes, has_rows)
        self.ran = {call.path: call for call in self.calls}
        """Last call of each module, by path."""

    def now(self, site: ObservedTensor) -> Tensor:
        """Returns the tensor at a site, as it goes on."""
        return self.tensor(site, after=True)

    def taken(self, path: str) -> list[Tensor]:
        """Returns the tensors that a module took, as it got them."""
        return [self.now(site) for site in self.sites if site.path == path and site.inputs]

    def inside(self, path: str) -> list[ObservedTensor]:
        """Returns the outputs of the modules inside one, in the order in which they ran."""
        return [
            site
            for site in self.returned()
            if site.path.startswith(f"{path}.") and site.part != SUM
        ]

    def returned(self) -> list[ObservedTensor]:
        """Returns the outputs of all modules, in the order in which they ran."""
        return [site for site in self.sites if not site.inputs]


def has_rows(value: Any) -> bool:
    """Returns True for a floating-point tensor of (rows, width)."""
    return (
        isinstance(value, Tensor)
        and value.is_floating_point()
        and value.dim() == _ROWS_AND_WIDTH
        and value.shape[0] == OBSERVED_ROWS
    )


@dataclasses.dataclass
class _Found:
    """A quantity that is to be proved writable."""

    name: str
    site: ObservedTensor
    equation: str
    residual: float
    arrives: Callable[[StepLook], bool] | None = None
    """Tells in a forward in which it was written to whether the equation holds."""
    multiplier: float = 1.0


@dataclasses.dataclass
class _Block:
    """A block taken apart: sites of its stream and of its contributions."""

    index: int
    path: str
    before: Callable[[StepLook], Tensor]
    """Reads the stream that it takes."""
    post: ObservedTensor
    mid: ObservedTensor | None
    terms: list[tuple[ObservedTensor, float]]
    """Contributions in order, with their multipliers."""
    residual: float


def look_at(
    model: nn.Module,
    forward: Callable[[], object],
    heads_of: Callable[[nn.Module], HeadSizes | None],
    places: Mapping[str, str] | None = None,
) -> NamedTensors:
    """Proves the quantities of an engine's model, and has plans for it resolve their names.

    An engine runs without them: a look that fails is logged, and its reason told to who asks.

    Args:
        model: the engine's, loaded.
        forward: runs it for `OBSERVED_ROWS` tokens, alike each time.
        heads_of: returns the sizes of a module that is called as attention(q, k, v, ...), None for
            any other.
        places: hook points that see the stream behind blocks, by the names of these.

    Returns:
        The table, with places as plans in this engine need them.
    """
    try:
        prover = _EngineProver(model, forward, heads_of, places or {})
        named = NamedTensors(prover.table(), prover.heads)
    except Exception as error:
        logging.getLogger("ferrohook").exception("looking at the engine's model failed")
        reason = f"looking at the model failed with {type(error).__name__}: {error}"
        named = NamedTensors(Quantities({}, {"resid_post": reason}, type(model).__name__))
    remember(model, named.table)
    return named


class _EngineProver:
    def __init__(
        self,
        model: nn.Module,
        forward: Callable[[], object],
        heads_of: Callable[[nn.Module], HeadSizes | None],
        places: Mapping[str, str],
    ) -> None:
        self._model = model
        self._forward = forward
        self._places = places
        self._look = StepLook(model, forward)
        self._heads = {
            path: sizes
            for path, module in model.named_modules()
            if path in self._look.ran and (sizes := heads_of(module)) is not None
        }
        self.heads: dict[str, tuple[int, int]] = {}
        self._found: list[_Found] = []
        self._missing: dict[str, str] = {"logits": _BEHIND}

    def table(self) -> Quantities:
        blocks = self._blocks()
        for block in blocks:
            self._name(block)
        if blocks:
            self._ends(blocks[0], blocks[-1])
        else:
            self._missing["resid_post"] = "no numbered modules add to the stream that they take"
        arrived = self._arrived()
        listed = {
            f"@{each.name}": Quantity(
                name=f"@{each.name}",
                path=each.site.path,
                phase="forward_pre" if each.site.inputs else "forward",
                part=each.site.part,
                point=None,
                multiplier=each.multiplier,
                shape=tuple(self._look.tensor(each.site).shape),
                dimensions=("positions", _WIDTHS.get(each.name.partition(".")[0], "width")),
                writable=each.name in arrived,
                equation=each.equation,
                residual=each.residual,
            )
            for each in self._found
        }
        return Quantities(listed, self._missing, type(self._model).__name__)

    # --- Blocks -------------------------------------------------------------------------------

    def _blocks(self) -> list[_Block]:
        look = self._look
        stacks: dict[str, list[tuple[int, str]]] = {}
        for path in look.ran:
            parent, _, last = path.rpartition(".")
            if last.isdigit() and any(it.startswith(f"{path}.") for it in self._heads):
                stacks.setdefault(parent, []).append((int(last), path))
        if not stacks:
            return []
        chosen = max(stacks.values(), key=len)
        blocks: list[_Block] = []
        stream = self._first_stream(min(chosen)[1])
        for place, (index, path) in enumerate(sorted(chosen)):
            behind = sorted(chosen)[place + 1][1] if place + 1 < len(chosen) else None
            block = (
                "what it takes is not proved: see the blocks before it"
                if stream is None
                else self._apart(index, path, stream, behind)
            )
            if isinstance(block, str):
                for kind in ("resid_pre", "resid_post"):
                    self._missing[f"{kind}.{index}"] = block
                stream = None
                continue
            blocks.append(block)
            stream = _reading(block.post)
        return blocks

    def _first_stream(self, path: str) -> Callable[[StepLook], Tensor] | None:
        if not self._look.taken(path):
            return None

        def read(look: StepLook) -> Tensor:
            return torch.stack(look.taken(path)).sum(0)

        return read

    def _apart(
        self, index: int, path: str, stream: Callable[[StepLook], Tensor], behind: str | None
    ) -> _Block | str:
        """Finds the sums by which a block's output follows from its input; the reason if none."""
        look = self._look
        before = stream(look)
        values = self._values(path, before)
        residuals = []
        for post in self._posts(path, behind):
            total = look.tensor(post)
            if total.shape != before.shape or torch.equal(total, before):
                continue
            found = self._two_sums(before, total, values) or self._one_sum(before, total, values)
            if found is not None:
                mid, terms, residual = found
                return _Block(index, path, stream, post, mid, terms, residual)
            residuals.append(self._nearest(before, total, values))
        by = f" by {min(residuals):.1e}" if residuals else ""
        return f"resid_pre + contributions = resid_post fails{by} for all that its modules return"

    def _nearest(self, before: Tensor, total: Tensor, values: Sequence[ObservedTensor]) -> float:
        """Returns the residual of the sum that is nearest."""
        tensors = [self._look.tensor(site) for site in values]
        others = [it for it in tensors if not torch.equal(it, total)]
        return Terms([total, before, *others]).nearest(0, 1)

    def _values(self, path: str, like: Tensor) -> list[ObservedTensor]:
        """Returns a site for each distinct output inside a block: the last, so the outermost."""
        found: dict[int, ObservedTensor] = {}
        for site in self._look.inside(path):
            if self._look.tensor(site).shape == like.shape:
                found[self._look.sites[site].value] = site
        return [*found.values()]

    def _posts(self, path: str, behind: str | None) -> Iterator[ObservedTensor]:
        """Yields the sites where the stream behind a block may be."""
        look = self._look
        if (place := self._places.get(path)) is not None:
            yield ObservedTensor.output(place, None)
            return
        for part in (SUM, None, 0):
            site = ObservedTensor.output(path, part)
            if site in look.sites:
                yield site
        # The norm ahead of what comes next adds the last contribution, and returns the sum too.
        later = (
            look.inside(behind)
            if behind
            else [site for site in look.returned() if look.sites[site].time > look.ran[path].end]
        )
        yield from (site for site in later[:4] if site.part == 1)

    def _two_sums(
        self, before: Tensor, total: Tensor, values: Sequence[ObservedTensor]
    ) -> tuple[ObservedTensor | None, list[tuple[ObservedTensor, float]], float] | None:
        look = self._look
        for mid in values:
            middle = look.tensor(mid)
            if torch.equal(middle, before) or torch.equal(middle, total):
                continue
            last = self._term(total, middle, values)
            first = None if last is None else self._term(middle, before, values)
            if first is None or last is None:
                continue
            if look.sites[first[0]].time <= look.sites[mid].time <= look.sites[last[0]].time:
                return mid, [first[:2], last[:2]], max(first[2], last[2])
        return None

    def _term(
        self, total: Tensor, start: Tensor, values: Sequence[ObservedTensor]
    ) -> tuple[ObservedTensor, float, float] | None:
        """Finds x in `total = start + c x`; returns its site, c and the residual."""
        for fixed in ((1.0, 1.0), (1.0,)):
            for site in values:
                found = fit(total, [start, self._look.tensor(site)], fixed)
                if found.holds:
                    return site, found.multipliers[1], found.residual
        return None

    def _one_sum(
        self, before: Tensor, total: Tensor, values: Sequence[ObservedTensor]
    ) -> tuple[ObservedTensor | None, list[tuple[ObservedTensor, float]], float] | None:
        tensors = {site: self._look.tensor(site) for site in values}
        for one, other in itertools.combinations(values, 2):
            found = fit(total, [before, tensors[one], tensors[other]], (1.0, 1.0, 1.0))
            if found.holds:
                return None, [(one, 1.0), (other, 1.0)], found.residual
        return None

    # --- Names --------------------------------------------------------------------------------

    def _name(self, block: _Block) -> None:
        index, mid = block.index, block.mid
        attention = [it for it in self._heads if it.startswith(f"{block.path}.")]
        kinds = self._kinds(block, attention)
        added = " + ".join(f"{kind or 'other'}_out" for kind in kinds)
        equation = f"resid_pre + {added} = resid_post"

        def holds(look: StepLook) -> bool:
            return self._holds(block, look)

        self._add(f"resid_post.{index}", block.post, equation, block.residual, None)
        previous = next((it for it in self._found if it.name == f"resid_post.{index - 1}"), None)
        if previous is not None:
            self._add(f"resid_pre.{index}", previous.site, equation, block.residual, holds)
            previous.arrives = holds
        if mid is not None:
            self._add(f"resid_mid.{index}", mid, "resid_pre + attn_out = resid_mid", block.residual)
        else:
            self._missing[f"resid_mid.{index}"] = "parallel block: no sum lies between its parts"
        for kind, (site, multiplier) in zip(kinds, block.terms, strict=True):
            if kind is None or kinds.count(kind) > 1:
                continue
            name = f"{kind}_out.{index}"
            self._add(name, site, equation, block.residual, holds, multiplier=multiplier)
            self._entry(block, kind, site)
        for kind in ("attn", "mlp"):
            if kinds.count(kind) != 1:
                self._missing[f"{kind}_out.{index}"] = (
                    "no contribution of the block is of this kind"
                )
        if len(attention) == 1:
            terms = zip(kinds, block.terms, strict=True)
            own = next((site for kind, (site, _) in terms if kind == "attn"), None)
            self._inside(block, attention[0], own)

    def _kinds(self, block: _Block, attention: Sequence[str]) -> list[str | None]:
        """Tells the contributions: one that attention ran before, and one behind the middle."""
        look = self._look
        if len(attention) != 1:
            return [None for _ in block.terms]
        ran = look.ran[attention[0]].end
        sites = [site for site, _ in block.terms]
        if block.mid is not None:
            middle = look.sites[block.mid].time
            return ["attn" if ran < middle else None, "mlp" if ran < middle else None]
        within = [attention[0].startswith(f"{site.path}.") for site in sites]
        if sum(within) != 1:
            return [None for _ in sites]
        return ["attn" if each else "mlp" for each in within]

    def _holds(self, block: _Block, look: StepLook) -> bool:
        state = block.before(look)
        terms = [factor * look.now(site) for site, factor in block.terms]
        if block.mid is None:
            return _equal(look.tensor(block.post), [state, *terms])
        return _equal(look.tensor(block.mid), [state, terms[0]]) and _equal(
            look.tensor(block.post), [look.now(block.mid), terms[1]]
        )

    def _entry(self, block: _Block, kind: str, contribution: ObservedTensor) -> None:
        """Finds what a sublayer takes: the norm of the stream that was returned before it."""
        look, index = self._look, block.index
        state = (
            block.before(look) if kind == "attn" or block.mid is None else look.tensor(block.mid)
        )
        stream = "resid_pre" if kind == "attn" or block.mid is None else "resid_mid"
        taker = self._taker(block, contribution)
        for site in reversed(look.inside(block.path)):
            tensor = look.tensor(site)
            if taker is None or look.sites[site].time > look.ran[taker].start or site.part == 1:
                continue
            if not _among(tensor, look.taken(taker)):
                continue
            partner = ObservedTensor.output(site.path, 1)
            of_stream = [look.tensor(partner)] if partner in look.sites else look.taken(site.path)
            if _among(state, of_stream):
                equation = f"{kind}_in = norm({stream})"
                self._add(f"{kind}_in.{index}", site, equation, 0.0, self._reaches(site, taker))
                self._act(index, kind, taker, contribution)
                return
        if taker is not None:
            self._act(index, kind, taker, contribution)

    def _taker(self, block: _Block, contribution: ObservedTensor) -> str | None:
        """Returns the child of a block that computes a contribution: its last before that."""
        look = self._look
        depth = block.path.count(".") + 1
        children = [
            path
            for path in look.ran
            if path.startswith(f"{block.path}.") and path.count(".") == depth
        ]
        # A norm behind the sublayer may be what returns it.
        busy = [it for it in children if any(each.startswith(f"{it}.") for each in look.ran)]
        done = [it for it in busy if look.ran[it].end <= look.sites[contribution].time]
        return max(done, key=lambda it: look.ran[it].end, default=None)

    def _act(self, index: int, kind: str, taker: str, contribution: ObservedTensor) -> None:
        """Finds what the last projection of a sublayer takes."""
        if kind != "mlp":
            return
        look = self._look
        # A norm may stand between projection and contribution.
        results = [look.tensor(contribution), *look.taken(contribution.path)]
        for site in reversed(look.inside(taker)):
            own = ObservedTensor.input(site.path, None)
            leaf = not any(it.startswith(f"{site.path}.") for it in look.ran)
            if leaf and own in look.sites and _among(look.tensor(site), results):
                self._add(f"mlp_act.{index}", own, "projection(mlp_act) = mlp_out", 0.0, _taken)
                return
        self._missing[f"mlp_act.{index}"] = "no single projection returns the output"

    def _reaches(self, site: ObservedTensor, taker: str) -> Callable[[StepLook], bool]:
        def reaches(look: StepLook) -> bool:
            return _among(look.now(site), look.taken(taker))

        return reaches

    def _inside(self, block: _Block, attention: str, contribution: ObservedTensor | None) -> None:
        """Names what an attention module takes and returns."""
        look, sizes, index = self._look, self._heads[attention], block.index
        z = ObservedTensor.output(attention, None)
        taker = None
        if contribution is not None and z in look.sites:
            # A norm may stand between projection and contribution.
            results = [look.tensor(contribution), *look.taken(contribution.path)]
            taker = next(
                (
                    site.path
                    for site in look.inside(block.path)
                    if _among(look.tensor(site), results)
                    and _among(look.tensor(z), look.taken(site.path))
                ),
                None,
            )
        if taker is None:
            for kind in ("q", "k", "v", "z"):
                self._missing[f"{kind}.{index}"] = (
                    "projection(z) = attn_out fails for what attention returns"
                )
            return
        equation = "attention(q, k, v) = z; projection(z) = attn_out"
        self._add(f"z.{index}", z, equation, 0.0, self._reaches(z, taker))
        self.heads[f"@z.{index}"] = sizes.heads, sizes.head_dim
        for place, kind in enumerate("qkv"):
            site = ObservedTensor.input(attention, place)
            count = sizes.heads if kind == "q" else sizes.kv_heads
            if site in look.sites and look.tensor(site).shape[-1] == count * sizes.head_dim:
                self.heads[f"@{kind}.{index}"] = count, sizes.head_dim
                self._add(f"{kind}.{index}", site, equation, 0.0, _taken)
        self._missing[f"pattern.{index}"] = "the engine's attention computes no pattern"

    def _ends(self, first: _Block, last: _Block) -> None:
        look = self._look
        stream = first.before(look)
        ahead = [
            site for site in look.returned() if look.sites[site].time < look.ran[first.path].start
        ]
        for site in reversed(ahead):
            found = (
                fit(stream, [look.tensor(site)])
                if look.tensor(site).shape == stream.shape
                else None
            )
            if found is not None and found.holds:
                factor = found.multipliers[0]
                text = (
                    "embed = resid_pre.0" if factor == 1 else f"{factor:.6g} * embed = resid_pre.0"
                )
                holds = self._begins(site, factor, first)
                self._add("embed", site, text, found.residual, holds, multiplier=factor)
                if first.index == 0:
                    self._add("resid_pre.0", site, text, found.residual, holds, multiplier=factor)
                break
        state = look.tensor(last.post)
        behind = (
            site for site in look.returned() if look.sites[site].time > look.ran[last.path].end
        )
        for site in behind:
            partner = ObservedTensor.output(site.path, 1)
            of_stream = [look.tensor(partner)] if partner in look.sites else look.taken(site.path)
            if site.part != 1 and _among(state, of_stream):
                self._add("final_norm", site, "final_norm = norm(resid_post)", 0.0, _always)
                found_post = next(it for it in self._found if it.site == last.post)
                found_post.arrives = self._ends_in(last.post, site.path)
                return

    def _begins(
        self, site: ObservedTensor, factor: float, first: _Block
    ) -> Callable[[StepLook], bool]:
        def begins(look: StepLook) -> bool:
            return _equal(first.before(look), [factor * look.now(site)])

        return begins

    def _ends_in(self, post: ObservedTensor, norm: str) -> Callable[[StepLook], bool]:
        def ends(look: StepLook) -> bool:
            partner = ObservedTensor.output(norm, 1)
            taken = [look.tensor(partner)] if partner in look.sites else look.taken(norm)
            return any(_equal(each, [look.now(post)]) for each in taken)

        return ends

    def _add(
        self,
        name: str,
        site: ObservedTensor,
        equation: str,
        residual: float,
        arrives: Callable[[StepLook], bool] | None = None,
        **more: Any,
    ) -> None:
        self._found.append(_Found(name, site, equation, residual, arrives, **more))

    # --- Writing ------------------------------------------------------------------------------

    def _arrived(self) -> set[str]:
        """Returns the quantities whose equations hold while those of their kind are written to."""
        kinds: dict[str, list[_Found]] = {}
        for each in self._found:
            kinds.setdefault(each.name.partition(".")[0], []).append(each)
        arrived: set[str] = set()
        for found in kinds.values():
            look = StepLook(
                self._model, self._forward, dict.fromkeys((it.site for it in found), noise(0.5))
            )
            arrived |= {
                each.name
                for each in found
                if each.arrives is not None and each.site in look.written and each.arrives(look)
            }
        return arrived


_WIDTHS: Final = {
    "q": "heads * head_dim",
    "k": "kv_heads * head_dim",
    "v": "kv_heads * head_dim",
    "z": "heads * head_dim",
    "mlp_act": "neurons",
}


def _reading(site: ObservedTensor) -> Callable[[StepLook], Tensor]:
    def read(look: StepLook) -> Tensor:
        return look.now(site)

    return read


def _among(tensor: Tensor, others: Sequence[Tensor]) -> bool:
    return any(torch.equal(tensor, each) for each in others)


def _equal(total: Tensor, terms: Sequence[Tensor]) -> bool:
    """Returns True if a sum is right up to the rounding of its largest element.

    What is written to the sum of a pair goes on as hidden state less residual.
    """
    right = torch.stack([each.double() for each in terms]).sum(0)
    size = max(float(each.abs().max()) for each in (total, *terms))
    return float((total.double() - right).abs().max()) <= tolerance(total) * size


def _taken(_look: StepLook) -> bool:
    """Of an input: what is written there is what the module gets."""
    return True


_always = _taken

"""Proofs of the quantities of a model in an engine, in forwards of a few tokens as it is loaded.

An engine's model cannot be called as one of transformers: it has a forward of its own, its modules
are fused, its layers return the stream as a pair. So each block is taken apart by what its modules
took and returned: `resid_pre + attn_out = resid_mid`, `resid_mid + mlp_out = resid_post`.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from ferrohook.effects.formulas import SUM
from ferrohook.engines.model.modules import OBSERVED_ROWS, NamedTensors
from ferrohook.quantity import Quantities, Quantity, remember
from ferrohook.quantity.anatomy.equations import Terms, fit, rounding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

Change: TypeAlias = "Callable[[Tensor], Tensor]"
_ROWS_AND_WIDTH: Final = 2
_ROUNDINGS: Final = 32
_NOISE: Final = 0.5
_SEED: Final = 27
_BEHIND: Final = "the engine computes it behind the forward of its modules"


class HeadSizes(NamedTuple):
    """Sizes of an attention module, on this rank."""

    heads: int
    kv_heads: int
    head_dim: int


class EngineTensor(NamedTuple):
    """Tensor that a module takes or returns."""

    path: str
    inputs: bool
    part: Any
    """As `output_index` of a capture."""


class StepTensors:
    """Tensors of one forward with a row per token.

    Args:
        model: the engine's.
        forward: runs it for `OBSERVED_ROWS` tokens.
        writes: changes of tensors, by site.
    """

    def __init__(
        self,
        model: nn.Module,
        forward: Callable[[], object],
        writes: Mapping[EngineTensor, Change] | None = None,
    ) -> None:
        self.before: dict[EngineTensor, Tensor] = {}
        """Tensors as modules took and returned them."""
        self.after: dict[EngineTensor, Tensor] = {}
        """Those that were changed."""
        self.keywords: dict[str, list[Tensor]] = {}
        """What modules took by keyword."""
        self.times: dict[EngineTensor, int] = {}
        self.starts: dict[str, int] = {}
        self.ends: dict[str, int] = {}
        self._writes = writes or {}
        self._time = itertools.count()
        self._calls: dict[str, int] = {}
        handles = [it for path, module in model.named_modules() for it in self._hook(path, module)]
        try:
            forward()
        finally:
            for handle in handles:
                handle.remove()
        several = {path for path, count in self._calls.items() if count > 1}
        for site in [site for site in self.before if site.path in several]:
            del self.before[site]

    def _hook(self, path: str, module: nn.Module) -> Iterator[Any]:
        def take(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self.starts[path] = now = next(self._time)
            self._calls[path] = self._calls.get(path, 0) + 1
            self.keywords[path] = [it.clone() for it in kwargs.values() if has_rows(it)]
            alone = len(args) == 1
            sites = [
                EngineTensor(path, inputs=True, part=None if alone else place)
                for place in range(len(args))
            ]
            return self._see_all(sites, args, now), kwargs

        def give(_module: nn.Module, _args: Any, output: Any) -> Any:
            self.ends[path] = now = next(self._time)
            if not isinstance(output, tuple):
                return self._see_all([EngineTensor(path, False, None)], [output], now)[0]  # noqa: FBT003 (a field)
            sites = [EngineTensor(path, False, place) for place in range(len(output))]  # noqa: FBT003 (a field)
            parts = self._see_all(sites, output, now)
            if len(parts) == _ROWS_AND_WIDTH and all(map(has_rows, parts)):
                parts = self._see_sum(path, *parts, now)
            return parts

        yield module.register_forward_pre_hook(take, with_kwargs=True, prepend=True)
        yield module.register_forward_hook(give)

    def _see_all(
        self, sites: Sequence[EngineTensor], values: Sequence[Any], time: int
    ) -> tuple[Any, ...]:
        pairs = zip(sites, values, strict=True)
        return tuple(self._see(site, it, time) if has_rows(it) else it for site, it in pairs)

    def _see_sum(self, path: str, hidden: Tensor, residual: Tensor, time: int) -> tuple[Any, ...]:
        if hidden.shape != residual.shape:
            return hidden, residual
        whole = hidden + residual
        changed = self._see(EngineTensor(path, False, SUM), whole, time)  # noqa: FBT003 (a field)
        return (hidden if changed is whole else changed - residual), residual

    def _see(self, site: EngineTensor, tensor: Tensor, time: int) -> Tensor:
        self.before[site] = tensor.detach().clone()
        self.times[site] = time
        change = self._writes.get(site)
        if change is None:
            return tensor
        changed = change(tensor)
        self.after[site] = changed.detach().clone()
        return changed

    def now(self, site: EngineTensor) -> Tensor:
        """Returns the tensor at a site, as it goes on."""
        return self.after.get(site, self.before[site])

    def taken(self, path: str) -> list[Tensor]:
        """Returns the tensors that a module took, as it got them."""
        own = [self.now(site) for site in self.before if site.path == path and site.inputs]
        return own + self.keywords.get(path, [])

    def inside(self, path: str) -> list[EngineTensor]:
        """Returns the outputs of the modules inside one, in the order in which they ran."""
        found = [
            site
            for site in self.before
            if site.path.startswith(f"{path}.") and not site.inputs and site.part != SUM
        ]
        return sorted(found, key=self.times.__getitem__)


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
    site: EngineTensor
    equation: str
    residual: float
    arrives: Callable[[StepTensors], bool] | None = None
    """Tells in a forward in which it was written to whether the equation holds."""
    multiplier: float = 1.0


@dataclasses.dataclass
class _Block:
    """A block taken apart: sites of its stream and of its contributions."""

    index: int
    path: str
    before: Callable[[StepTensors], Tensor]
    """Reads the stream that it takes."""
    post: EngineTensor
    mid: EngineTensor | None
    terms: list[tuple[EngineTensor, float]]
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
        self._look = StepTensors(model, forward)
        self._heads = {
            path: sizes
            for path, module in model.named_modules()
            if path in self._look.starts and (sizes := heads_of(module)) is not None
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
                shape=tuple(self._look.before[each.site].shape),
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
        for path in look.starts:
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

    def _first_stream(self, path: str) -> Callable[[StepTensors], Tensor] | None:
        if not self._look.taken(path):
            return None

        def read(look: StepTensors) -> Tensor:
            return torch.stack(look.taken(path)).sum(0)

        return read

    def _apart(
        self, index: int, path: str, stream: Callable[[StepTensors], Tensor], behind: str | None
    ) -> _Block | str:
        """Finds the sums by which a block's output follows from its input; the reason if none."""
        look = self._look
        before = stream(look)
        values = self._values(path, before)
        residuals = []
        for post in self._posts(path, behind):
            total = look.before[post]
            if total.shape != before.shape or torch.equal(total, before):
                continue
            found = self._two_sums(before, total, values) or self._one_sum(before, total, values)
            if found is not None:
                mid, terms, residual = found
                return _Block(index, path, stream, post, mid, terms, residual)
            residuals.append(self._nearest(before, total, values))
        by = f" by {min(residuals):.1e}" if residuals else ""
        return f"resid_pre + contributions = resid_post fails{by} for all that its modules return"

    def _nearest(self, before: Tensor, total: Tensor, values: Sequence[EngineTensor]) -> float:
        """Returns the residual of the sum that is nearest."""
        tensors = [self._look.before[site] for site in values]
        others = [it for it in tensors if not torch.equal(it, total)]
        return Terms([total, before, *others]).nearest(0, 1)

    def _values(self, path: str, like: Tensor) -> list[EngineTensor]:
        """Returns a site for each distinct output inside a block: the last, so the outermost."""
        found: dict[bytes, EngineTensor] = {}
        for site in self._look.inside(path):
            tensor = self._look.before[site]
            if tensor.shape == like.shape:
                raw = tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()
                found[raw] = site
        return [*found.values()]

    def _posts(self, path: str, behind: str | None) -> Iterator[EngineTensor]:
        """Yields the sites where the stream behind a block may be."""
        look = self._look
        if (place := self._places.get(path)) is not None:
            yield EngineTensor(place, False, None)  # noqa: FBT003 (a field)
            return
        for part in (SUM, None, 0):
            site = EngineTensor(path, False, part)  # noqa: FBT003 (a field)
            if site in look.before:
                yield site
        # The norm ahead of what comes next adds the last contribution, and returns the sum too.
        later = (
            look.inside(behind)
            if behind
            else [
                site
                for site in sorted(look.before, key=look.times.__getitem__)
                if not site.inputs and look.times[site] > look.ends[path]
            ]
        )
        yield from (site for site in later[:4] if site.part == 1)

    def _two_sums(
        self, before: Tensor, total: Tensor, values: Sequence[EngineTensor]
    ) -> tuple[EngineTensor | None, list[tuple[EngineTensor, float]], float] | None:
        look = self._look
        for mid in values:
            middle = look.before[mid]
            if torch.equal(middle, before) or torch.equal(middle, total):
                continue
            last = self._term(total, middle, values)
            first = None if last is None else self._term(middle, before, values)
            if first is None or last is None:
                continue
            if look.times[first[0]] <= look.times[mid] <= look.times[last[0]]:
                return mid, [first[:2], last[:2]], max(first[2], last[2])
        return None

    def _term(
        self, total: Tensor, start: Tensor, values: Sequence[EngineTensor]
    ) -> tuple[EngineTensor, float, float] | None:
        """Finds x in `total = start + c x`; returns its site, c and the residual."""
        for fixed in ((1.0, 1.0), (1.0,)):
            for site in values:
                found = fit(total, [start, self._look.before[site]], fixed)
                if found.holds:
                    return site, found.multipliers[1], found.residual
        return None

    def _one_sum(
        self, before: Tensor, total: Tensor, values: Sequence[EngineTensor]
    ) -> tuple[EngineTensor | None, list[tuple[EngineTensor, float]], float] | None:
        tensors = self._look.before
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

        def holds(look: StepTensors) -> bool:
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
        ran = look.ends[attention[0]]
        sites = [site for site, _ in block.terms]
        if block.mid is not None:
            middle = look.times[block.mid]
            return ["attn" if ran < middle else None, "mlp" if ran < middle else None]
        within = [attention[0].startswith(f"{site.path}.") for site in sites]
        if sum(within) != 1:
            return [None for _ in sites]
        return ["attn" if each else "mlp" for each in within]

    def _holds(self, block: _Block, look: StepTensors) -> bool:
        state = block.before(look)
        terms = [factor * look.now(site) for site, factor in block.terms]
        if block.mid is None:
            return _equal(look.before[block.post], [state, *terms])
        return _equal(look.before[block.mid], [state, terms[0]]) and _equal(
            look.before[block.post], [look.now(block.mid), terms[1]]
        )

    def _entry(self, block: _Block, kind: str, contribution: EngineTensor) -> None:
        """Finds what a sublayer takes: the norm of the stream that was returned before it."""
        look, index = self._look, block.index
        state = (
            block.before(look) if kind == "attn" or block.mid is None else look.before[block.mid]
        )
        stream = "resid_pre" if kind == "attn" or block.mid is None else "resid_mid"
        taker = self._taker(block, contribution)
        for site in reversed(look.inside(block.path)):
            tensor = look.before[site]
            if taker is None or look.times[site] > look.starts[taker] or site.part == 1:
                continue
            if not _among(tensor, look.taken(taker)):
                continue
            partner = EngineTensor(site.path, False, 1)  # noqa: FBT003 (a field)
            of_stream = [look.before[partner]] if partner in look.before else look.taken(site.path)
            if _among(state, of_stream):
                equation = f"{kind}_in = norm({stream})"
                self._add(f"{kind}_in.{index}", site, equation, 0.0, self._reaches(site, taker))
                self._act(index, kind, taker, contribution)
                return
        if taker is not None:
            self._act(index, kind, taker, contribution)

    def _taker(self, block: _Block, contribution: EngineTensor) -> str | None:
        """Returns the child of a block that computes a contribution: its last before that."""
        look = self._look
        depth = block.path.count(".") + 1
        children = [
            path
            for path in look.ends
            if path.startswith(f"{block.path}.") and path.count(".") == depth
        ]
        # A norm behind the sublayer may be what returns it.
        busy = [it for it in children if any(each.startswith(f"{it}.") for each in look.ends)]
        done = [it for it in busy if look.ends[it] <= look.times[contribution]]
        return max(done, key=look.ends.__getitem__, default=None)

    def _act(self, index: int, kind: str, taker: str, contribution: EngineTensor) -> None:
        """Finds what the last projection of a sublayer takes."""
        if kind != "mlp":
            return
        look = self._look
        # A norm may stand between projection and contribution.
        results = [look.before[contribution], *look.taken(contribution.path)]
        for site in reversed(look.inside(taker)):
            own = EngineTensor(site.path, True, None)  # noqa: FBT003 (a field)
            leaf = not any(it.startswith(f"{site.path}.") for it in look.ends)
            if leaf and own in look.before and _among(look.before[site], results):
                self._add(f"mlp_act.{index}", own, "projection(mlp_act) = mlp_out", 0.0, _taken)
                return
        self._missing[f"mlp_act.{index}"] = "no single projection returns the output"

    def _reaches(self, site: EngineTensor, taker: str) -> Callable[[StepTensors], bool]:
        def reaches(look: StepTensors) -> bool:
            return _among(look.now(site), look.taken(taker))

        return reaches

    def _inside(self, block: _Block, attention: str, contribution: EngineTensor | None) -> None:
        """Names what an attention module takes and returns."""
        look, sizes, index = self._look, self._heads[attention], block.index
        z = EngineTensor(attention, False, None)  # noqa: FBT003 (a field)
        taker = None
        if contribution is not None and z in look.before:
            # A norm may stand between projection and contribution.
            results = [look.before[contribution], *look.taken(contribution.path)]
            taker = next(
                (
                    site.path
                    for site in look.inside(block.path)
                    if _among(look.before[site], results)
                    and _among(look.before[z], look.taken(site.path))
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
            site = EngineTensor(attention, True, place)  # noqa: FBT003 (a field)
            count = sizes.heads if kind == "q" else sizes.kv_heads
            if site in look.before and look.before[site].shape[-1] == count * sizes.head_dim:
                self.heads[f"@{kind}.{index}"] = count, sizes.head_dim
                self._add(f"{kind}.{index}", site, equation, 0.0, _taken)
        self._missing[f"pattern.{index}"] = "the engine's attention computes no pattern"

    def _ends(self, first: _Block, last: _Block) -> None:
        look = self._look
        stream = first.before(look)
        ahead = [
            site
            for site in sorted(look.before, key=look.times.__getitem__)
            if not site.inputs and look.times[site] < look.starts[first.path]
        ]
        for site in reversed(ahead):
            found = (
                fit(stream, [look.before[site]])
                if look.before[site].shape == stream.shape
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
        state = look.before[last.post]
        behind = (
            site
            for site in sorted(look.before, key=look.times.__getitem__)
            if not site.inputs and look.times[site] > look.ends[last.path]
        )
        for site in behind:
            partner = EngineTensor(site.path, False, 1)  # noqa: FBT003 (a field)
            of_stream = [look.before[partner]] if partner in look.before else look.taken(site.path)
            if site.part != 1 and _among(state, of_stream):
                self._add("final_norm", site, "final_norm = norm(resid_post)", 0.0, _always)
                found_post = next(it for it in self._found if it.site == last.post)
                found_post.arrives = self._ends_in(last.post, site.path)
                return

    def _begins(
        self, site: EngineTensor, factor: float, first: _Block
    ) -> Callable[[StepTensors], bool]:
        def begins(look: StepTensors) -> bool:
            return _equal(first.before(look), [factor * look.now(site)])

        return begins

    def _ends_in(self, post: EngineTensor, norm: str) -> Callable[[StepTensors], bool]:
        def ends(look: StepTensors) -> bool:
            partner = EngineTensor(norm, False, 1)  # noqa: FBT003 (a field)
            taken = [look.before[partner]] if partner in look.before else look.taken(norm)
            return any(_equal(each, [look.now(post)]) for each in taken)

        return ends

    def _add(
        self,
        name: str,
        site: EngineTensor,
        equation: str,
        residual: float,
        arrives: Callable[[StepTensors], bool] | None = None,
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
            look = StepTensors(
                self._model, self._forward, dict.fromkeys((it.site for it in found), _add_noise)
            )
            arrived |= {
                each.name
                for each in found
                if each.arrives is not None and each.site in look.after and each.arrives(look)
            }
        return arrived


_WIDTHS: Final = {
    "q": "heads * head_dim",
    "k": "kv_heads * head_dim",
    "v": "kv_heads * head_dim",
    "z": "heads * head_dim",
    "mlp_act": "neurons",
}


def _reading(site: EngineTensor) -> Callable[[StepTensors], Tensor]:
    def read(look: StepTensors) -> Tensor:
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
    return float((total.double() - right).abs().max()) <= _ROUNDINGS * rounding(total) * size


def _taken(_look: StepTensors) -> bool:
    """Of an input: what is written there is what the module gets."""
    return True


_always = _taken


def _add_noise(tensor: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(_SEED + tensor.numel())
    noise = torch.randn(tensor.shape, generator=generator).to(tensor)
    size = tensor.float().std(correction=0).clamp(min=1e-6)
    return tensor + noise * (size * _NOISE).to(tensor)

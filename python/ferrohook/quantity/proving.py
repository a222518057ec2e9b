"""Proofs: the quantities of a model, from what several looks at it show."""

# 1. Two looks at a copy, which have to agree: they give multipliers.
# 2. A look at a copy whose constant parameters are uneven: the anatomy of blocks is found in it.
# 3. Looks in which each sublayer takes what it took before but for one token, and in which it takes
#    the same at all tokens: attention mixes tokens, and averages them.
# 4. A look in which every quantity is written to: the equations hold for the values before and
#    behind the writes, so each arrives where it should.

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from ferrohook.attention import POINTS
from ferrohook.errors import HookError
from ferrohook.inside_attention import EQUATION, look_inside
from ferrohook.quantity.blocks import Anatomist
from ferrohook.quantity.checks import Checks
from ferrohook.quantity.ends import Beginning, Ending, beginning, ending
from ferrohook.quantity.equations import fit, rounding
from ferrohook.quantity.looking import (
    Look,
    Site,
    example_of,
    make_generic,
    structural_copy,
    undisturbed,
)
from ferrohook.quantity.stacks import chains, inside
from ferrohook.quantity.sublayers import Sublayer, Tracer

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from ferrohook.inside_attention import Heads
    from ferrohook.quantity.blocks import Step
    from ferrohook.quantity.looking import Example
    from ferrohook.quantity.stacks import Block

_ALIKE: Final = 0.02
"""Largest relative difference of two looks of one call, and of an average from its parts."""
_SEED: Final = 27


@dataclasses.dataclass
class Proved:
    """A quantity at a place, with the equation that proves it."""

    name: str
    site: Site
    shape: tuple[int, ...]
    equation: str
    residual: float = 0.0
    multiplier: float = 1.0
    """Factor of the tensor at the place."""
    writable: bool = False
    point: str | None = None
    """Point inside the attention module at the site, see `ferrohook.attention`."""


@dataclasses.dataclass
class Part:
    """A block of a stack, taken apart."""

    block: Block
    index: int
    steps: list[Step]
    results: list[Site | None]
    """Sites of the results of its steps."""
    sublayers: list[Sublayer]
    kinds: dict[Site, str] = dataclasses.field(default_factory=dict)
    """Kinds of its contributions: attention, cross, mixer or mlp."""


@dataclasses.dataclass
class Stack:
    """A stack of blocks, taken apart."""

    prefix: str
    parts: list[Part]
    broken: dict[int, str]
    """Blocks that are not understood, with the reason."""
    beginning: Beginning | None = None
    ending: Ending | None = None


@dataclasses.dataclass
class Findings:
    """All that looking at a model showed."""

    proved: list[Proved]
    missing: dict[str, str]
    """Reasons of quantities that are not there, or not proved."""
    example: Example


def look_at(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Findings:
    """Finds the quantities of a model and proves them.

    Args:
        model: any module; nothing about it is changed.
        args: arguments of the example call; none for token ids that are made.
        kwargs: its keyword arguments.

    Raises:
        HookError: the model fails, takes no `input_ids` while there is no example, cannot be
            copied, or two looks at it differ.
    """
    example = example_of(model, args, kwargs)
    plain = structural_copy(model)
    first = Look(plain, example)
    _check_same(model, first, Look(plain, example))
    generic = structural_copy(model)
    make_generic(generic)

    def call() -> None:
        with undisturbed():
            generic(*example.args, **example.kwargs)

    return _Prover(generic, example, first, look_inside(generic, call)).findings()


def _check_same(model: nn.Module, one: Look, other: Look) -> None:
    for site in one.sites:
        if site not in other.sites:
            continue
        left, right = one.tensor(site), other.tensor(site)
        if left.shape != right.shape or not _alike(left, right):
            msg = (
                f"{model._get_name()} is not deterministic: {_where(site)} differs between two "
                "calls with equal arguments, so no equation about it can be proved"
            )
            raise HookError(msg)


def _alike(one: Tensor, other: Tensor) -> bool:
    if torch.equal(one, other):
        return True
    size = float(one.double().abs().max())
    return float((one.double() - other.double()).abs().max()) <= _ALIKE * size


def _where(site: Site) -> str:
    phase = "input" if site.inputs else "output"
    part = "" if site.part is None else f"[{site.part!r}]"
    return f"the {phase}{part} of {site.path or 'the model'!r}"


class _Prover:
    """Proves the quantities of one model.

    Args:
        model: a copy with uneven parameters.
        example: arguments of the call.
        first: a look at the model with its own parameters.
        heads: what was found inside its attention modules, by path.
    """

    def __init__(
        self, model: nn.Module, example: Example, first: Look, heads: dict[str, Heads]
    ) -> None:
        self._model = model
        self._example = example
        self._first = first
        self._heads = heads
        self._look = Look(model, example)
        self._anatomist = Anatomist(model, self._look)
        self._proved: list[Proved] = []
        self._missing: dict[str, str] = {}
        self._moves: dict[Site, bool] = {}
        """Contributions, and whether they depend on their sublayer's entry."""

    def findings(self) -> Findings:
        stacks = self._stacks()
        if not stacks:
            self._missing["resid_post"] = (
                "no chain of numbered modules adds to what it takes: block output = block input + "
                "contributions fails in all of them"
            )
        for stack in stacks:
            self._classify(stack, [each for each in stacks if each is not stack])
        for stack in stacks:
            for number, reason in stack.broken.items():
                for kind in ("resid_pre", "resid_post"):
                    self._missing[f"{stack.prefix}{kind}.{number}"] = reason
            for part in stack.parts:
                self._name(stack, part)
            self._around(stack)
        self._write(stacks)
        return Findings(self._proved, self._missing, self._example)

    # --- The stream -------------------------------------------------------------------------

    def _stacks(self) -> list[Stack]:
        found: list[list[Part]] = []
        broken: list[dict[int, str]] = []
        covered: list[str] = []
        for chain in chains(self._look):
            if inside(chain[0].path, covered):
                continue
            numbers = _numbers(chain)
            parts, failed = [], {}
            for number, block in zip(numbers, chain, strict=True):
                steps = self._anatomist.steps(block)
                if steps is None or not any(step.terms for step in steps):
                    failed[number] = (
                        "resid_pre + contributions = resid_post fails: its output is no sum of its "
                        "input and tensors that its modules return"
                    )
                    continue
                tracer = Tracer(self._anatomist, block, steps)
                results = [tracer.state_site(step.result) for step in steps[:-1]]
                results.append(block.after)
                parts.append(Part(block, number, steps, results, [*tracer.sublayers()]))
            if 2 * len(parts) >= len(chain) and parts:
                found.append(parts)
                broken.append(failed)
                covered += [block.path for block in chain]
        order = sorted(range(len(found)), key=lambda place: found[place][-1].block.call.end)
        names = _prefixes([found[place][0].block.path for place in order])
        return [
            Stack(name, found[place], broken[place])
            for name, place in zip(names, order, strict=True)
        ]

    # --- Kinds of sublayers -------------------------------------------------------------------

    def _classify(self, stack: Stack, others: list[Stack]) -> None:
        """Tells attention, cross-attention, other mixers of tokens and position-wise sublayers."""
        entries = {
            site
            for part in stack.parts
            for each in part.sublayers
            if each.entry is not None
            for site in each.entry.sites
        }
        clean = {site: self._look.tensor(site) for site in entries}
        moved = self._held(clean, _first_moved)
        same = self._held(clean, _all_equal)
        sources = [each.parts[-1].block.after for each in others]
        elsewhere = (
            self._held(clean, None, {site: _noise(0.5) for site in sources}) if sources else None
        )
        for part in stack.parts:
            for each in part.sublayers:
                if each.entry is None:
                    continue
                site = each.contribution
                own = _positions(self._look.tensor(site))
                after = moved and moved.sites.get(site)
                if moved is None or same is None or after is None:
                    continue
                changed = _changed(own, _positions(moved.tensor(site)))
                self._moves[site] = bool(changed[0])
                if elsewhere is not None and bool(
                    _changed(own, _positions(elsewhere.tensor(site))).any()
                ):
                    part.kinds[site] = "cross"
                elif not bool(changed[1:].any()):
                    part.kinds[site] = "mlp" if bool(changed[0]) else "constant"
                elif self._attends(each) or _is_average(_positions(same.tensor(site))):
                    part.kinds[site] = "attention"
                else:
                    part.kinds[site] = "mixer"

    def _attends(self, sublayer: Sublayer) -> bool:
        """Returns True if it goes through an attention module whose pattern is proved."""
        paths = self._heads.keys() & sublayer.inside
        return any(self._heads[path].inside for path in paths)

    def _held(
        self,
        clean: dict[Site, Tensor],
        change: Callable[[Tensor], Tensor] | None,
        more: dict[Site, Any] | None = None,
    ) -> Look | None:
        """Looks while each sublayer takes what it took before, changed; None if the model fails."""
        writes: dict[Site, Any] = {**(more or {})}
        for site, tensor in clean.items():
            taken = tensor if change is None else change(tensor)
            writes[site] = _replacing(taken)
        try:
            return Look(self._model, self._example, writes)
        except HookError:
            return None

    # --- Names --------------------------------------------------------------------------------

    def _name(self, stack: Stack, part: Part) -> None:
        index, block, prefix = part.index, part.block, stack.prefix
        residual = self._residual_of(part)
        if residual is None:
            self._missing[f"{prefix}resid_post.{index}"] = (
                "a tensor of its sum is seen only at a module that runs several times, or the sum "
                "fails with the model's own parameters"
            )
            return
        equation = _sum_text(part)
        self._add(f"{prefix}resid_pre.{index}", block.before, equation, residual)
        self._add(f"{prefix}resid_post.{index}", block.after, equation, residual)
        counts: dict[str, int] = {}
        for each in part.sublayers:
            kind = part.kinds.get(each.contribution, "unknown")
            counts[kind] = counts.get(kind, 0) + 1
        for each in part.sublayers:
            kind = part.kinds.get(each.contribution, "unknown")
            title = _TITLES.get(kind)
            if title is None or counts[kind] > 1:
                continue
            self._sublayer(stack, part, each, title)
        for kind, title in _TITLES.items():
            if counts.get(kind, 0) != 1 and kind in {"attention", "mlp"}:
                self._missing[f"{prefix}{title}_out.{index}"] = _absence(kind, counts)
        self._mid(stack, part)

    def _mid(self, stack: Stack, part: Part) -> None:
        name = f"{stack.prefix}resid_mid.{part.index}"
        found = self._mid_step(part)
        if isinstance(found, str):
            self._missing[name] = found
            return
        site = part.results[found - 1]
        if site is None:
            self._missing[name] = "no module takes or returns the sum"
            return
        residual = self._residual_of(part, found)
        if residual is None:
            self._missing[name] = "its sum fails with the model's own parameters"
            return
        self._add(name, site, _sum_text(part, found), residual)

    def _mid_step(self, part: Part) -> int | str:
        """Returns the number of steps before the stream between attention and mlp."""
        kinds = [(each.step, part.kinds.get(each.contribution)) for each in part.sublayers]
        pointwise = [step for step, kind in kinds if kind == "mlp"]
        mixing = [step for step, kind in kinds if kind in {"attention", "cross", "mixer"}]
        if not pointwise or not mixing:
            return "the block has not both, attention and a position-wise sublayer"
        if min(pointwise) <= max(mixing):
            parallel = "parallel block: " if min(pointwise) == max(mixing) else ""
            return f"{parallel}no sum lies between attention and mlp"
        return min(pointwise)

    def _sublayer(self, stack: Stack, part: Part, each: Sublayer, title: str) -> None:
        prefix, index = stack.prefix, part.index
        multiplier = self._multiplier(part, each)
        residual = self._residual_of(part)
        if multiplier is None or residual is None:
            return
        self._add(
            f"{prefix}{title}_out.{index}",
            each.contribution,
            _sum_text(part),
            residual,
            multiplier=multiplier,
        )
        entry = each.entry
        if entry is not None and len(entry.sites) > 1:
            self._missing[f"{prefix}{title}_in.{index}"] = "its module takes it several times"
        elif entry is not None and entry.sites and self._moves.get(each.contribution):
            stream = self._state_name(part, entry.state)
            text = (
                f"{title}_in = {stream}" if entry.norm is None else f"{title}_in = norm({stream})"
            )
            self._add(f"{prefix}{title}_in.{index}", entry.sites[0], text)
        inner = {"attn": "z", "mlp": "mlp_act"}.get(title)
        if inner is None:
            return
        if title == "attn" and self._points(stack, part, each):
            return
        if each.last is None:
            self._missing[f"{prefix}{inner}.{index}"] = "no single projection returns the output"
            return
        projected = f"projection({inner})"
        shown = f"norm({projected})" if each.norm is not None else projected
        text = f"{_times(multiplier)}{shown} = {title}_out"
        self._add(f"{prefix}{inner}.{index}", each.last, text)

    def _points(self, stack: Stack, part: Part, each: Sublayer) -> bool:
        """Adds what is proved inside an attention module; returns False if z is not among it."""
        paths = sorted(self._heads.keys() & each.inside)
        if len(paths) != 1:
            reason = (
                "its attention goes through no function of transformers' AttentionInterface"
                if not paths
                else f"{len(paths)} attention modules are in one sublayer"
            )
            for point in POINTS:
                self._missing.setdefault(f"{stack.prefix}{point}.{part.index}", reason)
            return False
        heads = self._heads[paths[0]]
        site = Site.output(paths[0], None)
        for it in heads.inside:
            name = f"{stack.prefix}{it.point}.{part.index}"
            self._proved.append(
                Proved(name, site, it.shape, EQUATION, it.residual, 1.0, it.writable, it.point)
            )
        for point, reason in heads.missing.items():
            self._missing[f"{stack.prefix}{point}.{part.index}"] = reason
        return any(it.point == "z" for it in heads.inside)

    def _state_name(self, part: Part, value: int) -> str:
        """Returns the equation of the stream in a block, as far as a value of it."""
        if value == part.steps[0].source:
            return "resid_pre"
        done = next(n for n, step in enumerate(part.steps, 1) if step.result == value)
        mid = self._mid_step(part)
        return "resid_mid" if done == mid else _sum_text(part, done).partition(" = ")[0]

    def _add(
        self, name: str, site: Site, equation: str, residual: float = 0.0, **more: Any
    ) -> None:
        if site not in self._first.sites:
            self._missing[name] = f"{_where(site)} was passed several times, or not at all"
            return
        shape = self._first.sites[site].shape
        self._proved.append(Proved(name, site, shape, equation, residual, **more))

    def _multiplier(self, part: Part, each: Sublayer) -> float | None:
        """Returns the multiplier of a contribution, with the model's own parameters."""
        step = part.steps[each.step]
        found = self._multipliers(part, each.step)
        return None if found is None else found[1 + each.term] if step.terms else 1.0

    def _multipliers(self, part: Part, number: int) -> tuple[float, ...] | None:
        """Returns the multipliers of a step, solved for with the model's own parameters."""
        step = part.steps[number]
        tensors = self._tensors_of(part, number)
        if tensors is None:
            return None
        total, terms = tensors
        known = fit(total, terms, step.multipliers)
        if known.residual <= 8 * rounding(total, *terms):
            return step.multipliers
        solved = fit(total, terms)
        return solved.multipliers if solved.holds else None

    def _tensors_of(self, part: Part, number: int) -> tuple[Tensor, list[Tensor]] | None:
        """Returns the sum of a step and its terms, with the model's own parameters."""
        step = part.steps[number]
        sites = [self._site_of(part, step.source), *(self._site_of(part, v) for v in step.terms)]
        total = self._site_of(part, step.result)
        first = self._first
        if total is None or any(site not in first.sites for site in (total, *sites)):
            return None
        return first.tensor(total), [first.tensor(site) for site in sites if site is not None]

    def _site_of(self, part: Part, value: int) -> Site | None:
        if value == part.steps[0].source:
            return part.block.before
        if value == part.steps[-1].result:
            return part.block.after
        for each in self._look.sightings:
            if (
                each.value == value
                and each.site.path.startswith(f"{part.block.path}.")
                and each.site in self._look.sites
            ):
                return each.site
        return None

    def _residual_of(self, part: Part, steps: int | None = None) -> float | None:
        """Returns the largest residual of the sums of a block; None if one fails."""
        largest = 0.0
        for number, step in enumerate(part.steps[:steps]):
            if not step.terms:
                continue
            multipliers = self._multipliers(part, number)
            tensors = self._tensors_of(part, number)
            if multipliers is None or tensors is None:
                return None
            largest = max(largest, fit(*tensors, multipliers).residual)
        return largest

    # --- Ends of the model --------------------------------------------------------------------

    def _around(self, stack: Stack) -> None:
        """Finds what is before the first block and behind the last."""
        first, last = stack.parts[0].block, stack.parts[-1].block
        stream = self._look.sites[first.before].value
        began = beginning(self._model, self._look, self._example, stream, first.call.start)
        name = f"{stack.prefix}embed"
        if isinstance(began, str):
            self._missing[name] = began
        else:
            stack.beginning = began
            self._add(name, began.embed, began.text, multiplier=self._embed_factor(began, first))
        if stack.prefix:
            return
        stream = self._look.sites[last.after].value
        stack.ending = ended = ending(self._anatomist, stream, last.call.end)
        if ended.norm is None:
            self._missing["final_norm"] = "no norm takes what the last block returns"
        else:
            self._add("final_norm", ended.norm, "final_norm = norm(resid_post)")
        if ended.logits is None:
            self._missing["logits"] = (
                "the model returns no projection of the last stream: unembed(final_norm) = logits "
                "fails for all that it returns"
            )
        else:
            self._add("logits", ended.logits, ended.text)

    def _embed_factor(self, began: Beginning, first: Block) -> float:
        """Returns the factor of the embedding, with the model's own parameters."""
        if began.positions is not None or began.modules or began.first:
            return began.multiplier
        sites = self._first.sites
        if began.embed not in sites or first.before not in sites:
            return began.multiplier
        total, term = self._first.tensor(first.before), self._first.tensor(began.embed)
        return fit(total, [term.view_as(total)]).multipliers[0]

    # --- Writing ------------------------------------------------------------------------------

    def _write(self, stacks: list[Stack]) -> None:
        """Proves, in looks in which quantities are written to, that the writes arrive.

        All at once; if an equation fails, those of each kind by themselves.
        """
        sites = {each.name: each.site for each in self._proved if each.point is None}
        sums = {name for name in sites if _kind(name) == "resid_mid" and sites[name].inputs}
        everything = {name: site for name, site in sites.items() if name not in sums}
        arrived = self._arrivals(stacks, everything)
        failed = everything.keys() - arrived
        for kind in sorted({_kind(name) for name in failed}):
            own = {name: site for name, site in everything.items() if _kind(name) == kind}
            arrived |= self._arrivals(stacks, own) & own.keys()
        for each in self._proved:
            if each.point is None:
                each.writable = each.name in arrived

    def _arrivals(self, stacks: list[Stack], written: dict[str, Site]) -> set[str]:
        """Returns the names whose equations hold while all of them are written to."""
        try:
            look = Look(self._model, self._example, dict.fromkeys(written.values(), _noise(0.5)))
        except HookError:
            return set()
        check = Checks(self._model, look)
        for stack in stacks:
            for part in stack.parts:
                self._check_part(check, stack, part)
            if stack.beginning is not None:
                check.begins(f"{stack.prefix}embed", stack.beginning, stack.parts[0].block.before)
            if stack.ending is not None:
                check.ends(stack.ending, stack.parts[-1].block.after)
        for each in self._proved:
            if each.name in check.residuals:
                each.residual = max(each.residual, check.residuals[each.name])
        return {name for name in written if check.residuals.get(name, 1) <= check.tolerance}

    def _check_part(self, check: Checks, stack: Stack, part: Part) -> None:
        prefix, index = stack.prefix, part.index
        names = [f"{prefix}resid_pre.{index}", f"{prefix}resid_post.{index}"]
        names += [f"{prefix}resid_mid.{index}"]
        states = {part.steps[0].source: part.block.before}
        states |= {
            step.result: site
            for step, site in zip(part.steps, part.results, strict=True)
            if site is not None
        }
        terms = {(each.step, each.term): each.contribution for each in part.sublayers}
        for each in part.sublayers:
            title = _TITLES.get(part.kinds.get(each.contribution, ""))
            names.append(f"{prefix}{title}_out.{index}")
            entry = each.entry
            if entry is not None and entry.state in states and self._moves.get(each.contribution):
                check.enters(f"{prefix}{title}_in.{index}", states[entry.state], entry)
            if each.last is not None:
                inner = {"attn": "z", "mlp": "mlp_act"}.get(str(title))
                check.projects(f"{prefix}{inner}.{index}", each)
        check.sums(names, part.block.before, part.steps, part.results, terms)


_TITLES: Final = {"attention": "attn", "cross": "cross", "mixer": "mixer", "mlp": "mlp"}


def _kind(name: str) -> str:
    """Returns the name of a quantity without the number of its block."""
    head, _, last = name.rpartition(".")
    return head if last.isdigit() else name


def _times(multiplier: float) -> str:
    return "" if multiplier == 1 else f"{multiplier:.6g} * "


def _sum_text(part: Part, steps: int | None = None) -> str:
    """Returns the sums of a block, or of its first steps, as an equation."""
    text = "resid_pre"
    names = {
        (each.step, each.term): f"{_TITLES.get(part.kinds.get(each.contribution, ''), 'other')}_out"
        for each in part.sublayers
    }
    for number, step in enumerate(part.steps[:steps]):
        if not step.terms:
            text = f"norm({text})"
            continue
        added = [names.get((number, term), "other_out") for term in range(len(step.terms))]
        text = f"{_times(step.multipliers[0])}{text}"
        text = " + ".join([text, *added])
    return f"{text} = {'resid_post' if steps is None else 'resid_mid'}"


def _absence(kind: str, counts: dict[str, int]) -> str:
    if counts.get(kind, 0) > 1:
        return f"the block adds {counts[kind]} contributions of this kind"
    others = ", ".join(sorted(f"{n} {each}" for each, n in counts.items()))
    return f"no contribution to the stream is of this kind; the block adds {others or 'none'}"


def _numbers(chain: list[Block]) -> list[int]:
    """Returns the numbers of blocks: those of their names if they rise, else their places."""
    names = [block.path.rpartition(".") for block in chain]
    if len({parent for parent, _, _ in names}) == 1 and all(last.isdigit() for *_, last in names):
        numbers = [int(last) for *_, last in names]
        if numbers == sorted({*numbers}):
            return numbers
    return [*range(len(chain))]


def _prefixes(paths: list[str]) -> list[str]:
    """Returns prefixes of names for stacks: none for the last, the main one."""
    if not paths:
        return []
    main = paths[-1].split(".")
    prefixes: list[str] = []
    for path in paths[:-1]:
        own = next((each for each in path.split(".") if each not in main), "other")
        while f"{own}." in prefixes:
            own = f"{own}_"
        prefixes.append(f"{own}.")
    return [*prefixes, ""]


def _positions(tensor: Tensor) -> Tensor:
    """Returns a tensor as (positions, width)."""
    return tensor.double().reshape(-1, tensor.shape[-1])


def _changed(one: Tensor, other: Tensor) -> Tensor:
    """Returns which positions differ by more than rounding."""
    size = one.abs().max()
    return (one - other).abs().amax(-1) > 1e-4 * size


def _is_average(positions: Tensor) -> bool:
    size = float(positions.abs().max())
    return float((positions - positions[:1]).abs().max()) <= _ALIKE * size


def _first_moved(tensor: Tensor) -> Tensor:
    moved = tensor.clone()
    flat = moved.view(-1, moved.shape[-1])
    flat[0] = _noise(1.0)(flat[0])
    return moved


def _all_equal(tensor: Tensor) -> Tensor:
    flat = tensor.reshape(-1, tensor.shape[-1])
    return flat[:1].expand_as(flat).reshape(tensor.shape).clone()


def _noise(size: float) -> Callable[[Tensor], Tensor]:
    """Makes the change that adds noise of a size relative to the tensor's own."""

    def change(tensor: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(_SEED + tensor.numel())
        noise = torch.randn(tensor.shape, generator=generator).to(tensor)
        return tensor + noise * tensor.std(correction=0).clamp(min=1e-6) * size

    return change


def _replacing(value: Tensor) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        return value.to(tensor).reshape(tensor.shape)

    return change

"""Proofs: the quantities of a model, from what several looks at it show."""

# 1. Two looks at a copy, which have to agree: they give multipliers.
# 2. A look at a copy whose constant parameters are uneven: the anatomy of blocks is found in it.
# 3. Looks in which one token of each sublayer's input changes, and looks in which all tokens of it
#    are equal: attention mixes tokens, and averages them.
# 4. A look in which every quantity is written to: the equations hold for the values before and
#    after the writes, so each arrives where it should.

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, Final

import torch

from ferrohook.attach.attention import POINTS
from ferrohook.errors import HookError
from ferrohook.quantity.anatomy.blocks import Anatomist
from ferrohook.quantity.anatomy.ends import Beginning, beginning, ending
from ferrohook.quantity.anatomy.equations import differ, fit, tolerance
from ferrohook.quantity.anatomy.observe import Hidden
from ferrohook.quantity.anatomy.parts import stacks_of
from ferrohook.quantity.anatomy.stacks import inside, is_seen
from ferrohook.quantity.anatomy.subjects import (
    Subject,
    example_of,
    in_float32,
    make_generic,
    structural_copy,
    with_tokens_to_mix,
)
from ferrohook.quantity.anatomy.sublayers import TITLES, Classifier
from ferrohook.quantity.proofs.arrivals import Arrivals
from ferrohook.quantity.proofs.attention import look_inside
from ferrohook.quantity.proofs.experts import Mixture, prove_experts
from ferrohook.quantity.proofs.own_sums import OwnSums
from ferrohook.quantity.proofs.proved import Findings, Proved
from ferrohook.quantity.proofs.routers import (
    FUSED,
    SEVERAL,
    arrive,
    has_experts,
    has_several,
    residual_of,
    router_of,
    weighed,
)
from ferrohook.quantity.proofs.routing_rules import prove_rules

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from ferrohook.quantity.anatomy.observe import Look, ObservedTensor
    from ferrohook.quantity.anatomy.stacks import Block
    from ferrohook.quantity.anatomy.sublayers import BlockParts, BlockStack, Sublayer
    from ferrohook.quantity.proofs.attention import FoundHeads
    from ferrohook.quantity.proofs.routers import Routed

_NO_ATTENTION: Final = "its attention does not use transformers' AttentionInterface"


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
    subject = Subject(structural_copy(model), example_of(model, args, kwargs))
    plain = with_tokens_to_mix(in_float32(subject))
    generic = Subject(structural_copy(plain.model), plain.example)
    first = plain.look()
    _check_same(model, first, plain.look())
    make_generic(generic.model)
    found = prove(generic, generic.look(), first, look_inside(generic), _NO_ATTENTION)
    prove_rules(model, plain, found.proved)
    return found


def prove(
    subject: Subject, look: Look, first: Look, heads: Mapping[str, FoundHeads], no_heads: str
) -> Findings:
    """Proves the quantities of a model by looks at it.

    Args:
        subject: the model that is examined; of a copy, with uneven parameters.
        look: at the subject.
        first: at the model with its own parameters.
        heads: quantities found inside its attention modules, by path.
        no_heads: reason for quantities inside attention of a sublayer without such a module.
    """
    return _ModelProver(subject, look, first, heads, no_heads).findings()


def _check_same(model: nn.Module, one: Look, other: Look) -> None:
    for site in one.sites:
        if site not in other.sites:
            continue
        left, right = one.tensor(site), other.tensor(site)
        # Independent roundings of the calls before it add up like a random walk.
        limit = tolerance(left, right) * math.sqrt(one.sites[site].time)
        if differ(left, right) > limit and not torch.equal(left, right):
            msg = (
                f"{model._get_name()} is not deterministic: {_where(site)} differs between two "
                "calls with equal arguments, so no equation about it can be proved"
            )
            raise HookError(msg)


def _where(site: ObservedTensor) -> str:
    phase = "input" if site.inputs else "output"
    name = site.part.name if isinstance(site.part, Hidden) else site.part
    part = "" if site.part is None else f"[{name!r}]"
    return f"the {phase}{part} of {site.path or 'the model'!r}"


class _ModelProver:
    def __init__(
        self,
        subject: Subject,
        look: Look,
        first: Look,
        heads: Mapping[str, FoundHeads],
        no_heads: str,
    ) -> None:
        self._subject = subject
        self._look = look
        self._first = first
        self._heads = heads
        self._no_heads = no_heads
        self._anatomist = Anatomist(subject.model, self._look)
        self._proved: list[Proved] = []
        self._inside: list[Proved] = []
        """Inside attention modules, where writes were tried already."""
        self._missing: dict[str, str] = {}
        self._blocks: list[str] = []
        """Paths of the blocks of all stacks."""
        self._sums = OwnSums(self._look, first)
        self._routed: dict[str, Routed] = {}
        """Routers by the names of their quantities."""
        self._mixtures: list[Mixture] = []

    def findings(self) -> Findings:
        stacks, failures, self._blocks, ends = stacks_of(self._anatomist)
        self._missing |= {f"{prefix}resid_post": it for prefix, it in failures.items()}
        classifier = Classifier(self._subject, self._look, self._heads)
        for stack in stacks:
            classifier.classify(stack, [it for it in ends if it != stack.parts[-1].block.after])
        for stack in stacks:
            for number, reason in stack.broken.items():
                for kind in ("resid_pre", "resid_post"):
                    self._missing[f"{stack.prefix}{kind}.{number}"] = reason
            for part in stack.parts:
                self._name(stack, part)
            self._around(stack)
        streams = [each for each in self._proved if each.name not in self._routed]
        Arrivals(self._subject, stacks).prove(streams)
        if self._routed:
            arrived = arrive(self._subject, self._routed)
            for each in self._proved:
                each.writable |= each.name in arrived
        experts, missing = prove_experts(self._subject, self._look, self._mixtures)
        proved = [*self._proved, *self._inside, *experts]
        times = {site: each.time for site, each in self._look.sites.items()}
        return Findings(proved, self._missing | missing, self._subject.example, times)

    def _name(self, stack: BlockStack, part: BlockParts) -> None:
        index, block, prefix = part.index, part.block, stack.prefix
        residual = self._sums.residual(part)
        if isinstance(residual, str):
            for kind in ("resid_pre", "resid_post"):
                self._missing[f"{prefix}{kind}.{index}"] = residual
            return
        equation = _sum_text(part)
        self._add(f"{prefix}resid_pre.{index}", block.before, equation, residual)
        self._add(f"{prefix}resid_post.{index}", block.after, equation, residual)
        counts: dict[str, int] = {}
        for each in part.sublayers:
            kind = part.kinds.get(each.contribution, "unknown")
            counts[kind] = counts.get(kind, 0) + 1
        unclear = {"attention", "mixer"} if "unclear" in counts else set[str]()
        for each in part.sublayers:
            kind = part.kinds.get(each.contribution, "unknown")
            title = TITLES.get(kind)
            if title is None or counts[kind] > 1 or kind in unclear:
                continue
            self._sublayer(stack, part, each, title, residual)
        for kind, title in TITLES.items():
            if kind in unclear or (counts.get(kind, 0) != 1 and kind in {"attention", "mlp"}):
                self._missing[f"{prefix}{title}_out.{index}"] = _absence(kind, counts)
        self._mid(stack, part)
        if self._has_experts(part):
            self._router(stack, part)
            kinds = ("router", "experts", "expert_weights")
            router, *names = (f"{stack.prefix}{kind}.{index}" for kind in kinds)
            self._mixtures.append(Mixture(block.path, (*names,), self._routed.get(router)))

    def _router(self, stack: BlockStack, part: BlockParts) -> None:
        """Finds the logits that choose experts."""
        name = f"{stack.prefix}router.{part.index}"
        path = part.block.path
        found = SEVERAL if has_several(self._look, path) else router_of(self._look, path)
        if isinstance(found, str):
            self._missing[name] = found
            return
        residual, holds = residual_of(self._first, found)
        if not holds:
            self._missing[name] = (
                f"{found.equation} fails by {residual:.1e} with the model's own parameters"
            )
            return
        self._routed[name] = found
        self._add(name, found.site, found.equation, max(residual, found.residual))

    def _has_experts(self, part: BlockParts) -> bool:
        prefix = f"{part.block.path}."
        apart = {
            path.removeprefix(prefix)
            for each in part.sublayers
            if part.kinds.get(each.contribution) in {"attention", "cross", "mixer"}
            for path in each.inside
        }
        block = self._subject.model.get_submodule(part.block.path)
        return has_experts(block, apart) or any(weighed(self._look, part.block.path))

    def _mid(self, stack: BlockStack, part: BlockParts) -> None:
        name = f"{stack.prefix}resid_mid.{part.index}"
        found = self._mid_step(part)
        if isinstance(found, str):
            self._missing[name] = found
            return
        site = part.results[found - 1]
        if site is None:
            self._missing[name] = "no module takes or returns the sum"
            return
        residual = self._sums.residual(part, found)
        if isinstance(residual, str):
            self._missing[name] = residual
            return
        self._add(name, site, _sum_text(part, found), residual)

    def _mid_step(self, part: BlockParts) -> int | str:
        """Returns the number of steps before the stream between attention and mlp."""
        kinds = [(each.step, part.kinds.get(each.contribution)) for each in part.sublayers]
        if not {kind for _, kind in kinds} <= TITLES.keys():
            return "a contribution to the block is of an unknown kind"
        pointwise = [step for step, kind in kinds if kind == "mlp"]
        mixing = [step for step, kind in kinds if kind in {"attention", "cross", "mixer"}]
        if not pointwise or not mixing:
            return "the block does not have both attention and a position-wise sublayer"
        if min(pointwise) <= max(mixing):
            parallel = "parallel block: " if min(pointwise) == max(mixing) else ""
            return f"{parallel}no sum lies between attention and mlp"
        return min(pointwise)

    def _sublayer(
        self, stack: BlockStack, part: BlockParts, each: Sublayer, title: str, residual: float
    ) -> None:
        prefix, index = stack.prefix, part.index
        multiplier = self._sums.multiplier(part, each)
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
        elif entry is not None and entry.sites and each.contribution in part.moving:
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
            experts = self._has_experts(part)
            self._missing[f"{prefix}{inner}.{index}"] = (
                FUSED if title == "mlp" and experts else "no single projection returns the output"
            )
            return
        shown = f"projection({inner})"
        for path in each.rescaled:
            shown = f"{self._anatomist.kind_of(path)}({shown})"
        text = f"{_times(multiplier)}{shown} = {title}_out"
        self._add(f"{prefix}{inner}.{index}", each.last, text)

    def _points(self, stack: BlockStack, part: BlockParts, each: Sublayer) -> bool:
        """Adds the quantities proved inside an attention module; returns False if z is not one."""
        paths = sorted(self._heads.keys() & each.inside)
        if len(paths) != 1:
            reason = (
                self._no_heads if not paths else f"{len(paths)} attention modules in one sublayer"
            )
            for point in POINTS:
                self._missing.setdefault(f"{stack.prefix}{point}.{part.index}", reason)
            return False
        heads = self._heads[paths[0]]
        for it in heads.inside:
            name = f"{stack.prefix}{it.name}.{part.index}"
            self._inside.append(dataclasses.replace(it, name=name))
        for point, reason in heads.missing.items():
            self._missing[f"{stack.prefix}{point}.{part.index}"] = reason
        return any(it.name == "z" for it in heads.inside)

    def _state_name(self, part: BlockParts, value: int) -> str:
        """Returns the equation of the stream in a block, as far as a value of it."""
        if value == part.steps[0].source:
            return "resid_pre"
        done = next(n for n, step in enumerate(part.steps, 1) if step.result == value)
        mid = self._mid_step(part)
        return "resid_mid" if done == mid else _sum_text(part, done).partition(" = ")[0]

    def _add(
        self, name: str, site: ObservedTensor, equation: str, residual: float = 0.0, **more: Any
    ) -> None:
        if site not in self._first.sites:
            self._missing[name] = f"{_where(site)} was passed several times, or not at all"
            return
        if not is_seen(self._look, site):
            self._missing[name] = f"no hook can see {_where(site)}"
            return
        shape = self._first.sites[site].shape
        self._proved.append(Proved(name, site, shape, equation, residual, **more))

    def _around(self, stack: BlockStack) -> None:
        """Finds the quantities before the first block and after the last."""
        first, last = stack.parts[0].block, stack.parts[-1].block
        name = f"{stack.prefix}embed"
        began = self._began(stack)
        if isinstance(began, str):
            self._missing[name] = began
        else:
            stack.beginning = began
            factor = self._embed_factor(began, first)
            self._add(name, began.embed, began.text, multiplier=factor)
            if began.is_multiple and not is_seen(self._look, first.before):
                name = f"{stack.prefix}resid_pre.{stack.parts[0].index}"
                self._add(name, began.embed, began.text, multiplier=factor)
        if stack.prefix:
            return
        if max(stack.broken, default=-1) > stack.parts[-1].index:
            self._missing["final_norm"] = self._missing["logits"] = "the last block is not proved"
            return
        factors = self._sums.stream_factors(stack.parts)
        if not isinstance(began, str) and began.is_term and first.before in factors:
            factors[began.embed] = factors[first.before]
        for each in self._proved:
            if each.point is None:
                each.stream_factor = factors.get(each.site)
        stream = self._look.sites[last.after].value
        stack.ending = ended = ending(self._anatomist, stream, last.call.end)
        if ended.norm is None:
            self._missing["final_norm"] = "no norm takes the output of the last block"
        else:
            self._add("final_norm", ended.norm, "final_norm = norm(resid_post)")
        if ended.logits is None:
            by = "" if ended.failure is None else f" by {ended.failure:.1e}"
            self._missing["logits"] = (
                "the model returns no projection of the last stream: unembed(final_norm) = logits "
                f"fails{by} for all its outputs"
            )
        else:
            self._add("logits", ended.logits, ended.text)

    def _began(self, stack: BlockStack) -> Beginning | str:
        """Finds how the stream of a stack begins; the reason if it does not."""
        if min(stack.broken, default=stack.parts[0].index) < stack.parts[0].index:
            return "the first block is not proved"
        first = stack.parts[0].block
        stream = self._look.sites[first.before].value
        began = beginning(self._subject, self._look, stream, first.call.start)
        passed = () if isinstance(began, str) else (*began.first, *began.modules)
        if any(inside(path, passed) or path in passed for path in self._blocks):
            return "the input of the first block is the output of another stack"
        return began

    def _embed_factor(self, began: Beginning, first: Block) -> float:
        """Returns the factor of the embedding, with the model's own parameters."""
        sites = self._first.sites
        if not began.is_multiple or began.embed not in sites or first.before not in sites:
            return began.multiplier
        total, term = self._first.tensor(first.before), self._first.tensor(began.embed)
        return fit(total, [term.view_as(total)]).multipliers[0]


def _times(multiplier: float) -> str:
    return "" if multiplier == 1 else f"{multiplier:.6g} * "


def _sum_text(part: BlockParts, steps: int | None = None) -> str:
    """Returns the sums of a block, or of its first steps, as an equation."""
    text = "resid_pre"
    names = {
        (each.step, each.term): f"{TITLES.get(part.kinds.get(each.contribution, ''), 'other')}_out"
        for each in part.sublayers
    }
    for number, step in enumerate(part.steps[:steps]):
        if not step.terms:
            text = f"norm({text})"
            continue
        added = [names.get((number, term), "other_out") for term in range(len(step.terms))]
        times = _times(step.multipliers[0])
        text = f"{times}({text})" if times and " + " in text else f"{times}{text}"
        text = " + ".join([text, *added])
    return f"{text} = {'resid_post' if steps is None else 'resid_mid'}"


def _absence(kind: str, counts: dict[str, int]) -> str:
    if counts.get(kind, 0) > 1:
        return f"the block adds {counts[kind]} contributions of this kind"
    if "unclear" in counts and kind != "mlp":
        return "the example does not show whether a sublayer attends"
    if "unmixed" in counts:
        return "no row of the example has two tokens, so nothing shows which tokens it mixes"
    others = ", ".join(sorted(f"{n} {each}" for each, n in counts.items()))
    return f"no contribution to the stream is of this kind; the block adds {others or 'none'}"

"""Random members of a batch against each request alone, on a plain copy of the model.

Modules return structures whose tensors share memory with each other and with their arguments; hooks
write to any of them in place. The oracle puts the same functions on torch's own hooks and runs the
rows of one member. All numbers are whole, so that results are equal bit for bit.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import ferrohook as fh
from support.amounts import amount

pytest.importorskip("transformers")
from support.structures import Named, Output, Pair

if TYPE_CHECKING:
    from collections.abc import Callable

SIZE, COLUMNS, WIDTH = 7, 3, 4
DTYPES = (torch.float64, torch.float32, torch.complex128)
BITS = {torch.float64: torch.int64, torch.float32: torch.int32}
MODES = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}
LEAVES: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    # Of the argument, the keyword argument, and the tensor that stands before it.
    "fresh": lambda x, o, b: x * 2,
    "input": lambda x, o, b: x,
    "keyword": lambda x, o, b: o,
    "part of the input": lambda x, o, b: x[..., 1:3],
    "strides of the keyword": lambda x, o, b: o[..., ::2],
    "the same": lambda x, o, b: b,
    "part of it": lambda x, o, b: b[..., :1],
    "overlaps it": lambda x, o, b: b[..., 1:],
    "another shape of it": lambda x, o, b: (
        b.unflatten(-1, (-1, 2)).mT if b.shape[-1] % 2 == 0 else b
    ),
    "empty": lambda x, o, b: b[..., :0],
    "expanded": lambda x, o, b: x[..., :1].expand(x.shape),
    "fresh and expanded": lambda x, o, b: (x * 2)[..., :1].expand(x.shape),
    "saved": lambda x, o, b: x.square(),
    "product": lambda x, o, b: x * o,
    "whole numbers": lambda x, o, b: x.real.long(),
    "truths": lambda x, o, b: x.real > 0,
}
READ_OTHERWISE: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    # The memory of another tensor, of other numbers.
    "conjugate": lambda x, o, b: x.conj(),
    "conjugate of it": lambda x, o, b: b.conj(),
    "part of the conjugate": lambda x, o, b: x.conj().imag if x.is_complex() else x,
    "bits": lambda x, o, b: x if x.is_complex() else x.view(BITS[x.dtype]),
}
LEAVES |= READ_OTHERWISE
SHARED: dict[str, Callable[[Tensor], Any]] = {
    # Values without rows; of a tensor of its dtype.
    "table": lambda x: torch.arange(12.0).to(x.dtype).reshape(3, 4),
    "number": lambda x: torch.tensor(2.0, dtype=x.dtype),
    "text": lambda x: "text",
    "none": lambda x: None,
}
CONTAINERS = ("tuple", "list", "dict", "named", "dataclass", "model output")


def steps_of(container: str) -> tuple[Any, ...]:
    """Steps from a container to its two items."""
    return (0, 1) if container in {"tuple", "list", "named"} else ("first", "second")


def made(container: str, items: list[Any]) -> Any:
    if container == "model output" and not (isinstance(items[0], Tensor) and items[1] is not None):
        container = "dataclass"  # transformers takes apart what else is first
    kinds: dict[str, Callable[[list[Any]], Any]] = {
        "tuple": tuple,
        "list": list,
        "dict": lambda items: dict(zip(("first", "second"), items, strict=True)),
        "named": lambda items: Named(*items),
        "dataclass": lambda items: Pair(*items),
        "model output": lambda items: Output(*items),
    }
    return kinds[container](items)


def mapped(recipe: Any, value: Any, change: Callable[[str, tuple[Any, ...], Any], Any]) -> Any:
    """Returns the structure of a recipe with each of its leaves changed."""

    def walk(recipe: Any, value: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(recipe, str):
            return change(recipe, path, value)
        container, inner = recipe
        items = []
        for step, each in zip(steps_of(container), inner, strict=True):
            named = container in {"dataclass", "model output"}
            item = None if value is None else getattr(value, step) if named else value[step]
            items.append(walk(each, item, (*path, step)))
        return made(container, items)

    return walk(recipe, value, ())


def leaves(recipe: Any, value: Any) -> list[tuple[str, tuple[Any, ...], Any]]:
    """Names, paths and values of the leaves of a structure."""
    found: list[Any] = []
    mapped(recipe, value, lambda *leaf: found.append(leaf))
    return found


def number(value: Any, dtype: torch.dtype) -> Tensor:
    return cast("Tensor", value.to(dtype))


class Part(nn.Module):
    """Returns the structure of a recipe."""

    def __init__(self, recipe: Any, *, inside: bool) -> None:
        super().__init__()
        self.recipe, self.inside = recipe, inside

    def forward(self, x: Tensor, *, other: Tensor) -> Any:
        if self.inside:
            x, other = x.flatten(0, 1), other.flatten(0, 1)
        before = x

        def make(name: str, _path: object, _value: object) -> Any:
            nonlocal before
            if name in SHARED:
                return SHARED[name](x)
            leaf = LEAVES[name](x, other, before)
            if leaf.dtype == x.dtype and leaf.numel():
                before = leaf
            return leaf

        return mapped(self.recipe, None, make)


class Model(nn.Module):
    """Uses the arguments of its part again, as residual streams are, and all that it returns."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.part = Part(case.recipe, inside=case.router == "inside")
        self.router = case.router

    def forward(self, inputs_embeds: Tensor) -> Tensor:
        x = inputs_embeds
        h, other = x * 2, x + 1
        if self.router == "in front":
            out = self.part(h.flatten(0, 1), other=other.flatten(0, 1))
        else:
            out = self.part(h, other=other)
        total = h.square() + other
        for name, _, leaf in leaves(self.part.recipe, out):
            if name in LEAVES:
                rows = number(leaf, x.dtype).reshape(*x.shape[:-1], leaf[..., :1].numel() and -1)
                total = total + rows.sum(-1, keepdim=True)
        return total


# --- Hooks --------------------------------------------------------------------------------------

WRITES: dict[str, Callable[[Tensor], Any]] = {
    "mul": lambda t: t.mul_(3),
    "add": lambda t: t.add_(1),
    "item": lambda t: t.__setitem__((..., slice(0, 1)), 5),
    "view": lambda t: t[..., -1:].mul_(2),
    "copy": lambda t: t.copy_(t.flip(-1)),
    "transposed": lambda t: t.unsqueeze(-1).mT.add_(2),
}
E1 = torch.tensor([0.0, 1.0, 0.0, 0.0])
V = torch.tensor([1.0, -2.0, 3.0, 0.0])
NATIVE: dict[str, tuple[Callable[[Any], Any], Callable[[Tensor], Tensor]]] = {
    "add": (lambda p: fh.Add(V, 2.0, output_index=p), lambda t: t + 2 * V),
    "scale": (lambda p: fh.Scale(-2.0, output_index=p), lambda t: t * -2),
    "zero": (lambda p: fh.Zero(output_index=p), torch.zeros_like),
    "replace": (
        lambda p: fh.Replace(V, output_index=p),
        lambda t: V.to(t.dtype).expand(t.shape).clone(),
    ),
    "ablate": (lambda p: fh.Ablate(E1, output_index=p), lambda t: t * (1 - E1)),
}
ATS: dict[str, tuple[Any, Callable[[Tensor], Tensor]]] = {
    # Positions as a plan has them; the prompt has two tokens.
    "prompt": ("prompt", lambda p: p < 2),
    "last_prompt": ("last_prompt", lambda p: p == 1),
    "generated": ("generated", lambda p: p >= 2),
    "int": (2, lambda p: p == 2),
    "slice": (slice(1, 4, 2), lambda p: (p == 1) | (p == 3)),
    "function": (lambda p: p % 2 == 0, lambda p: p % 2 == 0),
}


@dataclass(frozen=True)
class Hook:
    """An entry of a plan.

    Its kind is `write` (in place, to one tensor), `native`, `map` (returns its input doubled),
    `swap` (returns one tensor in place of another), `observe` or `keep`.
    """

    kind: str
    what: str
    phase: str
    target: int
    """Number of the tensor, counted around: arguments of a pre-hook, leaves of an output."""
    how: str
    with_kwargs: bool = False
    at: str | None = None
    copy: str = "clone"
    calls: Any = "last"


@dataclass(frozen=True)
class Case:
    """A model and the members of its batches."""

    recipe: Any
    layout: str
    """`rows`, `tokens` with a position each, or `padded` rows of tokens."""
    router: str | None
    dim: int
    dtype: torch.dtype
    mode: str
    owners: tuple[int | None, ...]
    """Member of each row."""
    forms: tuple[str, ...]
    members: tuple[tuple[Hook, ...], ...]
    calls: tuple[int, ...]
    """Number of calls in each batch."""

    def rows(self, member: int | None) -> list[int]:
        """Rows of a member, in the order in which they are handed over."""
        rows = [row for row, owner in enumerate(self.owners) if owner == member]
        if self.layout == "padded":
            return rows[:1] if member is not None else rows
        return rows[::-1] if member is not None and self.forms[member] == "reversed" else rows

    def form(self, member: int) -> Any:
        """Rows of a member, as `fh.batch` takes them."""
        rows, form = self.rows(member), self.forms[member]
        gaps = {two - one for one, two in itertools.pairwise(rows)}
        if form == "tensor":
            return torch.tensor(rows)
        if form == "slice" and len(rows) > 1 and len(gaps) == 1:
            return slice(rows[0], rows[-1] + 1, gaps.pop())
        return rows

    def positions(self) -> Tensor | None:
        """Place of each row in its member; -1 for padding."""
        if self.layout == "rows":
            return None
        padded = self.layout == "padded"
        table = torch.full((SIZE, COLUMNS) if padded else (SIZE,), -1)
        for member in range(len(self.members)):
            rows = self.rows(member)
            if padded:
                # The first column is padding for some.
                table[rows] = torch.arange(COLUMNS) - member % 2
            else:
                table[rows] = (
                    torch.arange(len(rows)).flip(0) if member % 2 else torch.arange(len(rows))
                )
        return table

    def inputs(self, seed: int) -> Tensor:
        shape = {"padded": (SIZE, COLUMNS, WIDTH)}.get(
            self.layout, (1, SIZE, WIDTH) if self.dim else (SIZE, WIDTH)
        )
        whole = torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed))
        x = whole.to(torch.float64)
        return (torch.complex(x, x.flip(-1)) if self.dtype.is_complex else x).to(self.dtype)

    def taken(self, x: Tensor, member: int | None) -> Tensor:
        """Rows of a member."""
        return x.index_select(self.dim, torch.tensor(self.rows(member), dtype=torch.long))


def arguments(args: Any, kwargs: Any) -> list[Tensor]:
    return [*args, *kwargs.values()]


class Puts:
    """Puts hooks of a member on a model: with a plan of ours, or with torch's own hooks."""

    def __init__(self, case: Case, member: int) -> None:
        self.case, self.member = case, member
        self.logs: list[Any] = []
        self.kept: dict[str, list[Any]] = {}

    def recipe(self, what: str) -> Any:
        return self.case.recipe if what == "part" else "fresh"

    def path(self, hook: Hook) -> Any:
        """Path to the target in an output; None if the output is that."""
        found = [path for name, path, _ in self.leaves(hook) if name in LEAVES]
        return found[hook.target % len(found)] or None if found else None

    def leaves(self, hook: Hook, value: Any = None) -> list[Any]:
        return leaves(self.recipe(hook.what), value)

    def function(self, hook: Hook) -> Any:  # noqa: C901 (a hook of each kind)
        """Function with the signature that torch gives hooks `with_kwargs`, or without."""

        def change(args: Any, kwargs: Any, *output: Any) -> Any:
            if output:
                found = [leaf for name, _, leaf in self.leaves(hook, *output) if name in LEAVES]
            else:
                found = arguments(args, kwargs)
            if hook.kind == "observe":
                self.logs.append([each.detach().clone() for each in (*args, *found)])
                self.logs.append(
                    [each.square() for each in found if each.is_floating_point()] and 1
                )
                return None
            if hook.kind == "write":
                both = [*found, *arguments(args, kwargs)] if output else found
                target = both[hook.target % len(both)]
                if target.dtype != torch.bool:
                    WRITES[hook.how](target)
                return None
            if output:
                recipe = self.recipe(hook.what)
                if hook.kind == "map":
                    return mapped(recipe, output[0], doubled)
                same = [each for each in arguments(args, kwargs) if each.shape == found[0].shape]
                into = [each for each in same if each.dtype == found[0].dtype]
                return mapped(
                    recipe,
                    output[0],
                    lambda n, p, leaf: into[0] if into and leaf is found[0] else leaf,
                )
            if hook.kind == "swap":
                args = (args[0], *args[1:])
                kwargs = dict.fromkeys(kwargs, args[0])
            else:
                args = tuple(each * 2 for each in args)
            return (args, kwargs) if hook.with_kwargs else args

        if hook.phase == "forward_pre":
            if hook.with_kwargs:
                return lambda _m, args, kwargs: change(args, kwargs)
            return lambda _m, args: change(args, {})
        if hook.with_kwargs:
            return lambda _m, args, kwargs, output: change(args, kwargs, output)
        return lambda _m, args, output: change(args, {}, output)

    # --- Ours -----------------------------------------------------------------------------------

    def plan(self) -> fh.Plan:
        entries: list[Any] = []
        for place, hook in enumerate(self.case.members[self.member]):
            at = None if hook.at is None else ATS[hook.at][0]
            if hook.kind == "keep":
                inputs = hook.phase == "forward_pre"
                options: dict[str, Any] = {"copy": hook.copy, "calls": hook.calls}
                index = None if inputs or hook.how == "whole" else self.path(hook)
                entries.append(
                    fh.keep(
                        hook.what,
                        at=at,
                        label=f"k{place}",
                        inputs=inputs,
                        output_index=index,
                        **options,
                    )
                )
            elif hook.kind == "native":
                index = None if hook.phase == "forward_pre" else self.path(hook)
                native = NATIVE[hook.how][0](index)
                entries.append(fh.on(hook.what, native, at=at, phase=hook.phase))
            else:
                function = self.function(hook)
                entries.append(
                    fh.on(hook.what, function, phase=hook.phase, with_kwargs=hook.with_kwargs)
                )
        return fh.Plan(*entries)

    # --- Torch's --------------------------------------------------------------------------------

    def by_hand(self, model: nn.Module) -> None:
        for place, hook in enumerate(self.case.members[self.member]):
            module = model.get_submodule(hook.what)
            function = self.function(hook)
            if hook.kind == "keep":
                function = self.keeper(hook, place)
            elif hook.kind == "native":
                function = self.native(hook)
            plain = hook.kind in {"keep", "native"}
            with_kwargs = hook.with_kwargs and not plain
            if hook.phase == "forward_pre":
                module.register_forward_pre_hook(function, with_kwargs=with_kwargs)
            else:
                module.register_forward_hook(function, with_kwargs=with_kwargs)

    def mask(self, hook: Hook, leaf: Tensor) -> Tensor | None:
        """Mask of the member's chosen tokens, in a leaf's shape."""
        positions = self.case.positions()
        if positions is None:
            return None
        positions = positions[self.case.rows(self.member)]
        mask = positions >= 0
        if hook.at is not None:
            mask &= ATS[hook.at][1](positions)
        return self.shaped(mask, leaf)

    def shaped(self, mask: Tensor, leaf: Tensor) -> Tensor:
        if self.case.layout == "tokens":
            mask = mask[None] if self.case.dim else mask
        elif leaf.shape[: mask.dim()] != mask.shape:
            mask = mask.flatten()
        return mask

    def native(self, hook: Hook) -> Any:
        formula = NATIVE[hook.how][1]

        def changed(leaf: Tensor) -> Tensor:
            mask = None if hook.at is None else self.mask(hook, leaf)
            if mask is not None and not mask.any():
                return leaf
            numbers = leaf.is_floating_point() or leaf.is_complex()
            fits = numbers and (hook.how == "scale" or leaf.shape[-1] == WIDTH)
            if hook.how != "zero" and not fits:
                raise ValueError(hook.how)
            new = formula(leaf).to(leaf.dtype)
            if mask is None:
                return new
            return torch.where(
                mask.reshape(mask.shape + (1,) * (leaf.dim() - mask.dim())), new, leaf
            )

        if hook.phase == "forward_pre":
            return lambda _m, args: (changed(args[0]), *args[1:])
        path = self.path(hook) or ()
        return lambda _m, _a, output: mapped(
            self.recipe(hook.what), output, lambda n, p, leaf: changed(leaf) if p == path else leaf
        )

    def keeper(self, hook: Hook, place: int) -> Any:
        kept = self.kept.setdefault(f"k{place}:{hook.what}", [])

        def clone(_name: str, _path: object, leaf: Any) -> Any:
            return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf

        def keep(_m: object, args: Any, *output: Any) -> None:
            if not output:
                kept.append(("fresh", args[0].detach().clone()))
                return
            recipe, value = self.recipe(hook.what), output[0]
            if hook.how == "whole":
                kept.append((recipe, mapped(recipe, value, clone)))
                return
            path = self.path(hook) or ()
            found = next(leaf for leaf in leaves(recipe, value) if leaf[1] == path)
            kept.append((found[0], found[2].detach().clone()))

        return keep

    def expected(self, hook: Hook, kept: list[Any]) -> Any:
        """Value of a capture after some calls; None if it took no token."""
        if self.case.positions() is None:
            values = [value for _, value in kept]
            if hook.calls == "last":
                return kept[-1][0], values[-1]
            return ("tuple", [each for each, _ in kept]), values
        positions = cast("Tensor", self.case.positions())[self.case.rows(self.member)]
        recipe, value = kept[-1]

        def chosen(name: str, _path: object, leaf: Any) -> Any:
            if name not in LEAVES:
                return leaf
            mask = cast("Tensor", self.mask(hook, leaf))
            order = self.shaped(positions, leaf)[mask].argsort()
            return leaf[mask][order]

        return recipe, mapped(recipe, value, chosen)


def doubled(name: str, _path: object, leaf: Any) -> Any:
    return leaf * 2 if name in LEAVES and leaf.dtype != torch.bool else leaf


# --- Drawing ------------------------------------------------------------------------------------


def hooks(draw: st.DrawFn, layout: str) -> Hook:
    kind = draw(
        st.sampled_from(
            ("write", "write", "write", "native", "map", "swap", "observe", "keep", "keep")
        )
    )
    what = draw(st.sampled_from(("part", "part", "part", "")))
    phase = draw(st.sampled_from(("forward", "forward", "forward_pre")))
    how = {"write": [*WRITES], "native": [*NATIVE], "keep": ["whole", "part"]}.get(kind, [""])
    at = None
    if layout != "rows" and kind in {"native", "keep"}:
        at = draw(st.sampled_from((None, *ATS)))
    if at is not None and kind == "keep":
        how = ["part"]  # tensors without tokens have none at positions
    calls = draw(st.sampled_from(("last", "all"))) if layout == "rows" else "last"
    return Hook(
        kind,
        what,
        phase,
        draw(st.integers(0, 5)),
        draw(st.sampled_from(how)),
        draw(st.booleans()),
        at,
        draw(st.sampled_from(("clone", "checked"))),
        calls,
    )


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.tuples(st.sampled_from(CONTAINERS), st.lists(inner, min_size=2, max_size=2))


recipes = st.recursive(st.sampled_from((*LEAVES, *SHARED)), containers, max_leaves=4)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    layout = draw(st.sampled_from(("rows", "rows", "tokens", "padded")))
    count = draw(st.integers(1, 3))
    owners = draw(
        st.lists(st.sampled_from((None, *range(count))), min_size=SIZE, max_size=SIZE).filter(
            lambda owners: {*range(count)} <= {*owners}
        )
    )
    recipe = draw(
        recipes.filter(lambda recipe: any(name in LEAVES for name, _, _ in leaves(recipe, None)))
    )
    if layout == "padded":  # a row for each member
        owners = [owner if owner not in owners[:row] else None for row, owner in enumerate(owners)]
    members = tuple(
        tuple(hooks(draw, layout) for _ in range(draw(st.integers(1, 3)))) for _ in range(count)
    )
    return Case(
        recipe,
        layout,
        draw(st.sampled_from((None, "in front", "inside"))) if layout == "padded" else None,
        0 if layout == "padded" else draw(st.sampled_from((0, 0, 1))),
        draw(st.sampled_from(DTYPES)),
        draw(st.sampled_from([*MODES])),
        tuple(owners),
        tuple(draw(st.sampled_from(("list", "reversed", "tensor", "slice"))) for _ in range(count)),
        members,
        draw(st.sampled_from(((1,), (2,), (1, 1)))),
    )


# --- Comparing ----------------------------------------------------------------------------------


def run(model: nn.Module, x: Tensor, mode: str) -> tuple[Tensor, Any]:
    """Returns the output of a call, and a function for the gradient of its input."""
    x = x.clone().requires_grad_(mode == "grad")
    y = model(x)

    def gradient() -> Tensor | None:
        if mode != "grad" or not y.requires_grad:
            return None
        loss = torch.view_as_real(y).sum() if y.is_complex() else y.sum()
        (grad,) = torch.autograd.grad(loss, [x], allow_unused=True)
        return torch.zeros_like(x) if grad is None else grad

    return y.detach(), gradient


def same(one: Any, other: Any) -> bool:
    if isinstance(other, Tensor):
        return isinstance(one, Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@dataclass
class Alone:
    """Results of a member's rows alone."""

    puts: Puts
    outputs: list[Tensor] = dataclasses.field(default_factory=list)
    grads: list[Tensor | None] = dataclasses.field(default_factory=list)
    error: BaseException | None = None

    @classmethod
    def of(cls, case: Case, member: int) -> Alone:
        puts = Puts(case, member)
        model, found = Model(case), cls(puts)
        puts.by_hand(model)
        try:
            for seed in range(sum(case.calls)):
                y, gradient = run(model, case.taken(case.inputs(seed), member), case.mode)
                found.outputs.append(y)
                found.grads.append(gradient())
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            found.error = error
        return found


def writes(case: Case) -> bool:
    return any(hook.kind == "write" for member in case.members for hook in member)


def may_be_refused(case: Case, member: int, error: BaseException | None) -> bool:
    """True for a request whose result in a batch need not be the one alone."""
    names = {name for name, _, _ in leaves(case.recipe, None)}
    return (
        # Views there do not say of what, so that nothing tells whose the rows of a matrix are.
        (case.router == "in front" and case.mode == "inference")
        # Hooks there may replace all arguments that are such views.
        or ("were not found" in str(error) and case.router == "in front" and swaps(case))
        # Of a router only matrices are known to have the tokens.
        or (case.router is not None and "another shape of it" in names)
        # Copies of tokens, and of the matrix of all tokens, cannot share memory.
        or ("shares memory" in str(error) and (case.router == "inside" or swaps(case)))
        # Nor can copies of rows that are read as other numbers.
        or ("shares memory" in str(error) and bool(names & READ_OTHERWISE.keys()))
        # Alone the gradient may go another way.
        or ("autograd has saved" in str(error) and bool(names & {"saved", "product"}))
    )


def swaps(case: Case) -> bool:
    """True if two arguments may be one tensor for a member, and two in the batch."""
    return any(
        hook.kind == "swap" and hook.phase == "forward_pre"
        for member in case.members
        for hook in member
    )


def check(case: Case) -> None:
    model = Model(case)
    puts = [Puts(case, member) for member in range(len(case.members))]
    with MODES[case.mode]():
        alone = [Alone.of(case, member) for member in range(len(case.members))]
        prepared = [each.plan().prepare(model) for each in puts]
        requests = [each.open() for each in prepared]
        outputs: list[Tensor] = []
        grads: list[Any] = []
        seed = 0
        for calls in case.calls:
            rows = {request: case.form(member) for member, request in enumerate(requests)}
            options: dict[str, Any] = {"size": SIZE, "warn": False}
            if (positions := case.positions()) is not None:
                options |= {"positions": positions, "lengths": dict.fromkeys(requests, 2)}
            with fh.batch(rows, case.dim, **options):
                for _ in range(calls):
                    y, gradient = run(model, case.inputs(seed), case.mode)
                    outputs.append(y)
                    grads.append(gradient())
                    seed += 1
        for member, (request, right) in enumerate(zip(requests, alone, strict=True)):
            if may_be_refused(case, member, request.error):
                continue
            if right.error is not None:
                assert request.failed, f"member {member} fails alone: {right.error!r}"
                continue
            assert request.error is None, f"member {member}: {request.error!r}"
            compare(case, member, outputs, grads, right)
            compare_kept(case, member, request, puts[member], right)
        plain = Model(case)
        for seed, y in enumerate(outputs):
            expected, _ = run(plain, case.taken(case.inputs(seed), None), case.mode)
            assert same(case.taken(y, None), expected), "rows of nobody"
        for each in prepared:
            each.close()


def compare(case: Case, member: int, outputs: list[Tensor], grads: list[Any], right: Alone) -> None:
    for number_, (y, expected) in enumerate(zip(outputs, right.outputs, strict=True)):
        got = case.taken(y, member)
        assert same(got, expected), f"member {member}, call {number_}:\n{got}\nnot\n{expected}"
    for number_, (grad, expected_grad) in enumerate(zip(grads, right.grads, strict=True)):
        if expected_grad is None:
            continue
        got = case.taken(grad, member)
        assert same(got, expected_grad), (
            f"member {member}, gradient of call {number_}:\n{got}\nnot\n{expected_grad}"
        )


def compare_kept(case: Case, member: int, request: Any, ours: Puts, right: Alone) -> None:
    assert same(ours.logs, right.puts.logs), (
        f"member {member} saw\n{ours.logs}\nnot\n{right.puts.logs}"
    )
    for place, hook in enumerate(case.members[member]):
        if hook.kind != "keep":
            continue
        key = f"k{place}:{hook.what}"
        recipe, expected = right.puts.expected(hook, right.puts.kept[key])
        sizes = [leaf.shape[0] for name, _, leaf in leaves_of(recipe, expected) if name in LEAVES]
        if hook.at is not None and not any(sizes):
            assert key not in request.acts
            continue
        try:
            got = request.acts[key]
        except fh.StaleActivationError:
            assert hook.copy == "checked"
            assert writes(case)
            continue
        same_leaves = [leaf for _, _, leaf in leaves_of(recipe, expected)]
        found = [leaf for _, _, leaf in leaves_of(recipe, got)]
        assert same(found, same_leaves), f"member {member}, {key}:\n{got}\nnot\n{expected}"


def leaves_of(recipe: Any, value: Any) -> list[Any]:
    if isinstance(recipe, tuple) and recipe[0] == "tuple" and isinstance(value, list):
        return [
            leaf for each, item in zip(recipe[1], value, strict=True) for leaf in leaves(each, item)
        ]
    return leaves(recipe, value)


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "ferrohook")


def test_each_member_is_the_request_alone(request: pytest.FixtureRequest) -> None:
    examples = request.config.getoption("requests") or amount(100, whole=3_000)
    settings(max_examples=examples, suppress_health_check=[*HealthCheck])(given(cases())(check))()


def write(target: int, how: str = "mul") -> Hook:
    return Hook("write", "part", "forward", target, how)


FOUND: dict[str, tuple[Any, str | None, tuple[Hook, ...]]] = {
    # Recipe, router, and hooks of the member.
    "an argument that the module saved": ("saved", None, (write(1),)),
    "an argument of a router": ("fresh", "inside", (write(1),)),
    "a router's input, and its matrix": ("input", "inside", (write(0), write(1))),
    "an expanded tensor": ("fresh and expanded", None, (write(0, "item"),)),
    "expanded tensors that share memory": (
        ("tuple", ["fresh and expanded", "overlaps it"]),
        None,
        (write(0, "item"),),
    ),
}
"""Strategies of wide runs only."""


@pytest.mark.parametrize("mode", ["grad", "no_grad"])
@pytest.mark.parametrize("what", FOUND)
def test_found_by_wide_runs(what: str, mode: str) -> None:
    recipe, router, entries = FOUND[what]
    layout = "rows" if router is None else "padded"
    owners = (None, 0, *[None] * (SIZE - 2))
    check(Case(recipe, layout, router, 0, DTYPES[0], mode, owners, ("list",), (entries,), (1,)))

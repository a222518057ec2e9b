"""Tables of quantities: the proved ones with their equations, and reasons for the others."""

from __future__ import annotations

import dataclasses
import json
import weakref
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, Self

from ferrohook.attach.attention import DIMENSIONS
from ferrohook.effects.routing import Routing, RoutingRule
from ferrohook.errors import HookError, SelectionError
from ferrohook.names.select import select_names
from ferrohook.names.spelling import KINDS, SIGN, kind_of, order_of
from ferrohook.quantity.anatomy.subjects import without_autocast
from ferrohook.quantity.proofs.proving import look_at
from ferrohook.util.suggestions import MOST_SUGGESTIONS, closest_to
from ferrohook.util.swallowed import refuse_swallowed
from ferrohook.util.tables import html_table, text_table
from ferrohook.util.texts import MODEL

if TYPE_CHECKING:
    from torch import nn

    from ferrohook.quantity.anatomy.subjects import Example
    from ferrohook.quantity.proofs.proved import Findings, Proved

VERSION: Final = 1
_ENCODER: Final = "encoder."
_DECODER: Final = "decoder."
_COLUMNS: Final = ("quantity", "place", "shape", "write", "equation", "residual")


@dataclasses.dataclass(frozen=True)
class Quantity:
    """A named tensor of a computation, at a place that an equation proves."""

    name: str
    """Name as selectors take it, `@resid_post.12`."""
    path: str
    """Module that takes or returns it."""
    phase: str
    """`forward_pre` for an input, `forward` for an output."""
    part: int | str | None
    """Index, key or attribute in the module's input or output, as `output_index` of a capture."""
    point: str | None
    """Point inside an attention module, such as `q`; None outside."""
    multiplier: float
    """Factor of the tensor there: the quantity is `multiplier * tensor`."""
    shape: tuple[int, ...]
    """Shape in the call that was examined."""
    dimensions: tuple[str, ...]
    """Names of the dimensions: batch, tokens, width and others."""
    writable: bool
    """True if a write there arrives as the equation says."""
    equation: str
    residual: float
    """Largest difference of the equation's sides, relative to the largest element."""
    stream_factor: float | None = None
    """Factor of the quantity in the stream after the last block, where the stream is multiplied on
    the way; None if it is no term of that stream, or passes a norm before."""
    routing: Routing | None = None
    """Parts where a module returns ids of experts and their weights, for a `Route`."""
    experts: int | None = None
    """Number of experts, for their ids; None if it is not known."""
    time: int | None = None
    """Time at which the examined call passed it, counted in starts and ends of modules' calls;
    None inside an attention module."""

    @property
    def place(self) -> str:
        """Module, phase, part and multiplier as text."""
        name = self.path or MODEL
        if self.point is not None:
            return f"{self.point} inside {name}"
        inside = "" if self.part is None else f"[{self.part!r}]"
        text = f"{name} {'input' if self.phase == 'forward_pre' else 'output'}{inside}"
        return text if self.multiplier == 1 else f"{self.multiplier:.6g} * {text}"

    @property
    def _row(self) -> tuple[str, ...]:
        sizes = zip(self.dimensions, self.shape, strict=True)
        shape = ", ".join(f"{name} {size}" for name, size in sizes)
        write = "yes" if self.writable else "no"
        return self.name, self.place, shape, write, self.equation, f"{self.residual:.0e}"


class Quantities(Mapping[str, Quantity]):
    """Table of the quantities of a model, by name, in the order of the computation.

    Args:
        found: the quantities that are proved.
        missing: reasons for quantities that are not there or not proved, by name.
        model: name of the model's class.
    """

    def __init__(
        self, found: Mapping[str, Quantity], missing: Mapping[str, str], model: str
    ) -> None:
        ordered = sorted(found, key=lambda name: order_of(_plain(name)))
        self._found = {name: found[name] for name in ordered}
        self.missing = dict(sorted(missing.items()))
        """Reasons of the quantities that are not there or not proved, by name."""
        self.model = model
        """Name of the model's class."""
        self._aliases: dict[str, Quantity] = {}
        """Quantities of the last stack by `@decoder.*`, where one before it is an encoder."""
        if any(name.startswith(_ENCODER) for name in [*map(_plain, found), *missing]):
            for name, each in self._found.items():
                if _plain(name).partition(".")[0] in KINDS:
                    alias = f"{SIGN}{_DECODER}{_plain(name)}"
                    self._aliases[alias] = dataclasses.replace(each, name=alias)
        self._model: weakref.ref[nn.Module] | None = None

    def __getitem__(self, name: str) -> Quantity:
        """Returns a quantity, by its name with or without the sign.

        Raises:
            SelectionError: it is missing or not proved; the message has the reason and the
                closest ones.
        """
        full = f"{SIGN}{_plain(name)}"
        found = self._found.get(full) or self._aliases.get(full)
        if found is None:
            raise self.refusal(name)
        return found

    def __contains__(self, name: object) -> bool:
        full = f"{SIGN}{_plain(name)}" if isinstance(name, str) else None
        return full in self._found or full in self._aliases

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def matching(self, pattern: str) -> list[Quantity]:
        """Returns the quantities that a name or glob matches, `@resid_post.*` for example.

        Raises:
            SelectionError: there is none.
        """
        for quantities in (self._found, self._aliases):
            if names := select_names(quantities, pattern):
                return [quantities[name] for name in names]
        raise self.refusal(pattern)

    def refusal(self, name: str) -> SelectionError:
        """Makes the error for a quantity that cannot be used."""
        plain = _plain(name)
        if self._aliases:
            plain = plain.removeprefix(_DECODER)
        reasons = {each: self.missing[each] for each in select_names(self.missing, plain)}
        if not reasons:
            reasons = {each: self.missing[each] for each in _causes(plain) if each in self.missing}
        kind, _, number = plain.rpartition(".")
        blocks = [
            int(each.rpartition(".")[2]) for each in select_names(self._found, f"{SIGN}{kind}.*")
        ]
        if number.isdecimal() and blocks and int(number) > max(blocks):
            msg = (
                f"{self.model} has no {SIGN}{plain}: its blocks are {min(blocks)} to {max(blocks)}"
            )
            return SelectionError(msg)
        kinds = {kind_of(_plain(each)) for each in self._found}
        if not reasons and kind_of(plain) in {*KINDS} - kinds:
            others = ", ".join(f"{SIGN}{each}" for each in KINDS if each in kinds)
            return SelectionError(f"{self.model} has no {SIGN}{kind_of(plain)}; it has {others}")
        msg = f"{SIGN}{plain} is not proved in {self.model}"
        if reasons:
            first = next(iter(reasons))
            shown = "" if first == plain else f" ({SIGN}{first})"
            msg = f"{msg}{shown}: {reasons[first]}"
        closest = closest_to(f"{SIGN}{plain}", self._found) or [*self._found][:MOST_SUGGESTIONS]
        if closest:
            msg = f"{msg}; the closest proved quantities: {', '.join(closest)}"
        return SelectionError(msg)

    def verify(self, model: nn.Module | None = None, *args: Any, **kwargs: Any) -> None:
        """Examines a model again and compares the tables.

        Args:
            model: another model than that which the table is of; for a table from JSON, the model.
            *args: arguments of the example call, as for `quantities`.
            **kwargs: keyword arguments of it.

        Raises:
            HookError: a quantity of the table is no longer proved, or at another place; or the
                model is gone.
            HookTypeError: a keyword is an option of hooks or captures, see `quantities`.
        """
        if model is None:
            model = None if self._model is None else self._model()
        if model is None:
            msg = (
                "the model of this table is unknown or no longer exists: pass it, as in "
                "verify(model)"
            )
            raise HookError(msg)
        refuse_swallowed("verify", model, kwargs)
        now = looked_at(model, args, kwargs)
        for name, quantity in self._found.items():
            if name not in now:
                msg = f"{now.refusal(name)}; this table has it at {quantity.place}"
                raise HookError(msg)
            if now[name].place != quantity.place:
                msg = (
                    f"{name} is at {now[name].place} in this model, but at {quantity.place} in the "
                    "table"
                )
                raise HookError(msg)
            if quantity.writable and not now[name].writable:
                msg = f"{name} can no longer be written in this model"
                raise HookError(msg)

    def to_json(self) -> str:
        """Writes the table as JSON, for `from_json`."""
        listed = [dataclasses.asdict(each) for each in self._found.values()]
        content = {"version": VERSION, "model": self.model, "quantities": listed}
        return json.dumps({**content, "missing": self.missing}, allow_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Reads a table that `to_json` wrote.

        Raises:
            ValueError: the text is none.
        """
        try:
            content = json.loads(text)
            if content["version"] != VERSION:
                raise ValueError  # noqa: TRY301 (as any other fault of the text)
            listed = [Quantity(**_tuples(each)) for each in content["quantities"]]
            missing = {str(name): str(reason) for name, reason in content["missing"].items()}
            return cls({each.name: each for each in listed}, missing, str(content["model"]))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            msg = (
                f"this is not a table of quantities written by to_json of version {VERSION}: "
                f"{error}"
            )
            raise ValueError(msg) from None

    def _rows(self) -> list[tuple[str, ...]]:
        return [_COLUMNS, *(each._row for each in self._found.values())]

    def __repr__(self) -> str:
        missing = [f"{SIGN}{name}: {reason}" for name, reason in self.missing.items()]
        return "\n".join([text_table(self._rows()), *missing])

    def _repr_html_(self) -> str:
        missing = [
            (f"{SIGN}{name}", reason, "", "", "", "") for name, reason in self.missing.items()
        ]
        return html_table([*self._rows(), *missing])


def _plain(name: str) -> str:
    return name.removeprefix(SIGN)


def _causes(name: str) -> tuple[str, ...]:
    """Returns the quantities without which the one of a name is not looked for."""
    kind, segments = kind_of(name), name.split(".")
    place = segments.index(kind) if kind in segments else 0
    stream = [*segments[:place], "resid_post", *segments[place + 1 : place + 2]]
    return kind, ".".join(stream), "resid_post"


def _tuples(fields: dict[str, Any]) -> dict[str, Any]:
    made = dict(fields)
    for name in ("shape", "dimensions"):
        made[name] = tuple(made[name])
    if made.get("routing") is not None:
        routing = Routing(*made["routing"])
        rule = None if routing.rule is None else RoutingRule(*routing.rule)
        made["routing"] = routing._replace(rule=rule)
    return made


def looked_at(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Quantities:
    """Looks at a model, and makes its table."""
    with without_autocast(model):
        return table_of(model, look_at(model, args, kwargs))


def table_of(model: nn.Module, findings: Findings) -> Quantities:
    """Makes the table of a model's quantities."""
    found = [_quantity(each, findings) for each in findings.proved]
    named = {each.name: each for each in found}
    missing = {name: it for name, it in findings.missing.items() if f"{SIGN}{name}" not in named}
    table = Quantities(named, missing, model._get_name())
    table._model = weakref.ref(model)
    return table


def _quantity(proved: Proved, findings: Findings) -> Quantity:
    return Quantity(
        name=f"{SIGN}{proved.name}",
        path=proved.site.path,
        phase="forward_pre" if proved.site.inputs else "forward",
        part=proved.site.part,
        point=proved.point,
        multiplier=proved.multiplier,
        shape=proved.shape,
        dimensions=_dimensions(proved, findings.example),
        writable=proved.writable,
        stream_factor=proved.stream_factor,
        equation=proved.equation,
        residual=proved.residual,
        routing=proved.routing,
        experts=proved.experts,
        time=findings.times.get(proved.site) if proved.point is None else None,
    )


_WIDTHS = {
    "expert_weights": "chosen",
    "experts": "chosen",
    "k": "kv_heads * head_dim",
    "logits": "vocabulary",
    "mlp_act": "neurons",
    "q": "heads * head_dim",
    "router": "experts",
    "v": "kv_heads * head_dim",
    "z": "heads * head_dim",
}


def _dimensions(proved: Proved, example: Example) -> tuple[str, ...]:
    """Returns names of dimensions: by their sizes where the example's rows and tokens are known."""
    if proved.point is not None:
        return DIMENSIONS[proved.point]
    last = _WIDTHS.get(kind_of(proved.name), "width")
    names = ["positions"] * (len(proved.shape) - 1)
    if example.shape is None:
        if len(names) == 2:  # noqa: PLR2004 (rows of tokens)
            names = ["batch", "tokens"]
        return (*names, last)
    batch, tokens = example.shape
    sizes = {batch * tokens: "batch * tokens", tokens: "tokens", batch: "batch"}
    if batch == tokens:
        sizes.pop(batch)
    return (*(sizes.get(size, name) for size, name in zip(proved.shape, names, strict=False)), last)

"""`direct_effects`: the contribution of each feature of dictionaries to a metric, and the rest."""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor

from ferrohook.analysis.calls import ModelCall, gradients_of, score, tolerance
from ferrohook.analysis.effects import Effects, check_tokens
from ferrohook.analysis.norms import FrozenNorm
from ferrohook.analysis.targets import Targets, cloned
from ferrohook.dictionaries.dictionary import Dictionary
from ferrohook.errors import HookError, HookTypeError
from ferrohook.quantity import quantities
from ferrohook.registration.register import register
from ferrohook.registration.scopes import Scope
from ferrohook.util.arguments import describe, expect_module
from ferrohook.util.tables import Printed, frame

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import pandas as pd
    from torch import nn

_MOST_SHOWN: Final = 20
"""Lines of a printed table."""


class FeatureEffect(NamedTuple):
    """Direct effect of a feature at one token."""

    place: str
    """Place that its dictionary writes."""
    row: int
    """Row of the text."""
    position: int
    """Position of the token."""
    feature: int
    """Number of the feature."""
    value: float
    """Value of the feature there."""
    effect: float
    """Its part of the metric."""


@dataclass(frozen=True, eq=False, repr=False)
class DirectEffects(Printed):
    """Terms of a metric, see `direct_effects`. `print` and notebooks show the largest."""

    features: Sequence[FeatureEffect]
    """Effects of all active features, by decreasing size."""
    sources: Effects
    """Other terms, by place and position: embeddings, the errors of the reconstructions, and the
    outputs of MLPs without a dictionary."""
    biases: float
    """All biases together, also the dictionaries'."""
    metric: float
    """Value of the metric: the sum of all."""
    tokens: Sequence[str] | None = None
    """Labels of the positions."""

    def to_pandas(self) -> pd.DataFrame:
        """Makes a DataFrame with a line for each active feature: place, row, position, and so on.

        Raises:
            HookError: the package pandas is not installed.
        """
        return frame([self._line(each) for each in self.features])

    def _line(self, each: FeatureEffect) -> dict[str, Any]:
        line = each._asdict()
        return line if self.tokens is None else {**line, "token": self.tokens[each.position]}

    def _cells(self) -> list[list[str]]:
        """Returns the printed table, headings first."""
        lines = [["term", "token", "value", "effect"]]
        for each in self.features[:_MOST_SHOWN]:
            token = str(each.position) if self.tokens is None else self.tokens[each.position]
            term = f"{each.place} feature {each.feature}"
            lines.append([term, token, f"{each.value:.3g}", f"{each.effect:.3g}"])
        if others := [each.effect for each in self.features[_MOST_SHOWN:]]:
            lines.append([f"{len(others):,} other features", "", "", f"{sum(others):.3g}"])
        sums = {name: float(self.sources[name].sum()) for name in self.sources.names}
        # Those before a dictionary of the stream reach the metric only by its terms.
        sums = {name: it for name, it in sums.items() if bool(self.sources[name].any())}
        sums |= {"biases": self.biases, "metric": self.metric}
        return [*lines, *([name, "", "", f"{value:.3g}"] for name, value in sums.items())]


def direct_effects(
    model: nn.Module,
    inputs: Any,
    metric: Callable[[Any], Any],
    dictionaries: Dictionary | Sequence[Dictionary],
    *,
    tokens: Sequence[str] | None = None,
) -> DirectEffects:
    """Splits a logit into the direct effects of features, errors, embeddings and biases.

    The first step of an attribution graph, as circuit-tracer draws them: attention patterns and
    the scales of norms are constants of this call, so that the metric is a sum over the additions
    to the residual stream. A feature's term is its value times the gradient along its decoder row.
    Effects that pass through later MLPs are those MLPs' own features and errors.

    The sum must equal the metric up to rounding. If it does not, the logit depends on the stream in
    another way too, and the model is refused.

    Args:
        model: a language model whose quantities are known; call `eval()` before.
        inputs: keyword arguments of the model, a tuple of positional ones, or the only one.
        metric: maps the model's output to a logit or a difference of logits, or to one for each
            text, which are averaged; linear in the logits.
        dictionaries: with the places that they read and write, such as transcoders of MLPs
            (`reads="@mlp_in.3", writes="@mlp_out.3"`) or autoencoders of the stream.
        tokens: labels of the positions.

    Returns:
        the terms, whose sum is the metric.

    Raises:
        HookTypeError: an argument has the wrong type, or a dictionary another width than a place.
        HookError: a dictionary has no places, two write one place, the metric has no gradient, or
            the terms do not add up to it.
        SelectionError: the model lacks a place.

    Examples:
        >>> logit = lambda out: out.logits[:, -1, token]
        >>> effects = fh.analysis.direct_effects(model, ids, logit, transcoders)
        >>> print(effects)
    """
    expect_module(model, "direct_effects needs")
    given = [dictionaries] if isinstance(dictionaries, Dictionary) else [*dictionaries]
    read = _by_place(given)
    with torch.inference_mode(mode=False):
        return _Linearized(model, ModelCall.of(inputs, "inputs"), metric, read).effects(tokens)


def _by_place(dictionaries: list[Any]) -> dict[str, Dictionary]:
    """Returns the dictionaries by the places that they write.

    Raises:
        HookTypeError: one is none.
        HookError: one has no places, or two write one.
    """
    found: dict[str, Dictionary] = {}
    for number, each in enumerate(dictionaries):
        if not isinstance(each, Dictionary):
            msg = f"dictionaries[{number}] must be a fh.Dictionary, got {describe(each)}"
            raise HookTypeError(msg)
        if each.reads is None or each.writes is None:
            missing = "reads" if each.reads is None else "writes"
            msg = f"dictionaries[{number}] does not say what it {missing}: pass {missing}= to it"
            raise HookError(msg)
        if each.writes in found:
            msg = f"two dictionaries write {each.writes!r}: leave one out"
            raise HookError(msg)
        found[each.writes] = each
    return found


class _Linearized:
    """A call of a model with constant patterns and scales: linear in the additions to the stream.

    Args:
        model: the model.
        call: its inputs.
        metric: maps the output to a number.
        dictionaries: by the place that they write.
    """

    def __init__(
        self,
        model: nn.Module,
        call: ModelCall,
        metric: Callable[[Any], Any],
        dictionaries: Mapping[str, Dictionary],
    ) -> None:
        self._model, self._call, self._metric = model, call, metric
        self._dictionaries = dictionaries
        known = quantities(model)
        embedded = known["embed"].stream_factor is not None
        names = ["@embed" if embedded else "@resid_pre.0", "@mlp_out.*"]
        self._leaves = Targets(model, [*names, *dictionaries])
        reads = {str(it.reads) for it in dictionaries.values()}
        self._read = Targets(model, [*sorted(reads), "@q.*", "@k.*"])
        self._values, _ = self._read.read(call, cloned)
        self._frozen = [name for name in self._read.names if name not in reads]
        """Queries and keys."""
        self._plain = 0.0
        """Metric of the model itself."""
        with torch.no_grad():
            self._norms = self._find_norms()

    def _find_norms(self) -> dict[str, list[FrozenNorm]]:
        """Finds the norms of the model by calling its modules: one for each of their calls."""
        seen: dict[str, list[tuple[Tensor, Tensor]]] = defaultdict(list)

        def look(name: str) -> Any:
            def hook(_module: Any, args: Any, kwargs: Any, output: Any) -> None:
                alone = len(args) == 1 and not kwargs and isinstance(args[0], Tensor)
                if alone and isinstance(output, Tensor) and output.shape == args[0].shape:
                    seen[name].append((args[0].detach().clone(), output.detach().clone()))

            return hook

        with Scope() as scope:
            for name, module in self._model.named_modules():
                if not [*module.children()]:
                    options: Any = {"scope": scope, "with_kwargs": True}
                    register(self._model, name, look(name), **options)
            self._plain = float(score(self._metric, self._call.run(self._model)))
        found: dict[str, list[FrozenNorm]] = {}
        for name, calls in seen.items():
            module = self._model.get_submodule(name)
            try:
                found[name] = [FrozenNorm.of(name, module, *each) for each in calls]
            except Exception:  # noqa: BLE001, S112 (a module that is no norm may raise anything)
                continue
        return found

    def effects(self, tokens: Sequence[str] | None) -> DirectEffects:
        """Returns the terms of the metric.

        Raises:
            HookError: they do not add up to it.
        """
        added: dict[str, Tensor] = {}
        with torch.enable_grad():
            value = self._run(added)
            gradients = gradients_of(value, added)
        with torch.no_grad():
            biases = float(self._run(None))
        features: list[FeatureEffect] = []
        rows: list[Tensor] = []
        names: list[str] = []
        for name, leaf in added.items():
            gradient, left = gradients[name].double(), leaf.detach().double()
            if (dictionary := self._dictionaries.get(name)) is not None:
                biases += self._split(name, dictionary, gradient, left, features)
            names.append(f"{name} error" if dictionary is not None else name)
            rows.append((left * gradient).flatten(2).sum((0, 2)))
        features.sort(key=lambda it: -abs(it.effect))
        values = torch.stack(rows).cpu()
        if tokens is not None:
            check_tokens(tokens, values.shape[1])
        metric = float(value.detach())
        effects = [biases, *(it.effect for it in features), *values.flatten().tolist()]
        self._check_sum(effects, metric, next(iter(added.values())))
        sources = Effects(values, names, ("position",), "effect", {"metric": metric}, tokens)
        return DirectEffects(features, sources, biases, metric, tokens)

    def _check_sum(self, effects: list[float], metric: float, leaf: Tensor) -> None:
        """Validates that the terms are the metric.

        Raises:
            HookError: they do not add up to it, or it is another one than the model's own.
        """
        total, plain = math.fsum(effects), self._plain
        size = math.fsum(map(abs, effects))
        # RMS norms compute in float32, in models of float64 too.
        rounding = max(tolerance(leaf), tolerance(leaf.float()))
        if not (
            abs(total - metric) <= size * tolerance(leaf) and abs(metric - plain) <= size * rounding
        ):
            msg = (
                f"the terms add up to {total:.6g}, but the metric is {plain:.6g}: it is not linear "
                "in the logits, or the stream reaches them in another way than by MLPs, attention "
                "and norms, such as a cap on the logits"
            )
            raise HookError(msg)

    def _run(self, added: dict[str, Tensor] | None) -> Tensor:
        """Calls the linearised model.

        Args:
            added: takes the additions to the stream, by place; None for zeros instead.

        Returns:
            The metric.
        """
        read: dict[str, Tensor] = {}

        def note(name: str) -> Any:
            def change(tensor: Tensor) -> None:
                read[name] = tensor

            return change

        def constant(name: str) -> Any:
            return lambda _tensor: self._values[name]

        def leaf(name: str) -> Any:
            dictionary = self._dictionaries.get(name)

            def change(tensor: Tensor) -> Tensor:
                skipped = None
                if dictionary is not None:
                    _check_width(name, dictionary, tensor)
                    skipped = dictionary.skip(read[str(dictionary.reads)])
                if added is None:
                    own = torch.zeros_like(tensor)
                else:
                    own = tensor if skipped is None else tensor - skipped.to(tensor)
                    own = added[name] = own.detach().requires_grad_()
                return own.clone() if skipped is None else own + skipped.to(tensor)

            return change

        with Scope() as scope, contextlib.ExitStack() as stack:
            for name, norms in self._norms.items():
                register(self._model, name, _linear(norms), scope=scope)
            # Norms come first: a dictionary may read the output of one.
            changes = {name: note(name) for name in self._read.names}
            changes |= {name: constant(name) for name in self._frozen}
            leaves = {name: leaf(name) for name in self._leaves.names}
            stack.enter_context(self._read.changed(changes))
            stack.enter_context(self._leaves.changed(leaves))
            return score(self._metric, self._call.run(self._model))

    def _split(
        self,
        name: str,
        dictionary: Dictionary,
        gradient: Tensor,
        left: Tensor,
        features: list[FeatureEffect],
    ) -> float:
        """Splits the tensor at a dictionary's place into features; `left` keeps the error.

        Returns:
            The effect of its bias.
        """
        x = self._values[str(dictionary.reads)]
        values = dictionary.encode(x)
        flat = gradient.flatten(2)
        bias = dictionary.decode(torch.zeros_like(values), x).flatten(2).double()
        if (skipped := dictionary.skip(x)) is not None:
            bias = bias - skipped.double()
        error = left.view(flat.shape)
        error -= bias
        for row, position in torch.cartesian_prod(*map(torch.arange, values.shape[:2])).tolist():
            active = values[row, position].nonzero()[:, 0]
            own = values[row, position, active].double()
            written = dictionary.written(active, x[row, position]).double()
            error[row, position] -= own @ written
            effects = own * (written @ flat[row, position])
            of_token = zip(active.tolist(), own.tolist(), effects.tolist(), strict=True)
            features += [FeatureEffect(name, row, position, *each) for each in of_token]
        return float((bias * flat).sum())


def _check_width(name: str, dictionary: Dictionary, tensor: Tensor) -> None:
    """Validates that a dictionary can write a tensor.

    Raises:
        HookTypeError: it has another width.
    """
    if (width := tensor.flatten(2).shape[-1]) != dictionary.d_out:
        msg = f"{dictionary!r} writes vectors of width {dictionary.d_out}, {name} has {width}"
        raise HookTypeError(msg)


def _linear(norms: list[FrozenNorm]) -> Callable[..., Tensor]:
    """Returns a hook that puts the frozen form in place of a norm's output, call by call."""
    calls = iter(norms)

    def hook(_module: Any, args: Any, output: Tensor) -> Tensor:
        frozen = next(calls)
        return (frozen(args[0]) + frozen.bias).to(output)

    return hook

"""`run`: one call of a model with hooks, a capture and a plan."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ferrohook.attach.never_fired import explain
from ferrohook.captures.cache import ActivationCache
from ferrohook.captures.capture import capture as _capture
from ferrohook.errors import HookError, NeverFiredWarning
from ferrohook.plans.entries import KeepEntry
from ferrohook.plans.plan import Plan
from ferrohook.plans.prepared import Prepared
from ferrohook.registration.register import register, warnings_of
from ferrohook.registration.scopes import Scope
from ferrohook.util.arguments import expect, expect_module
from ferrohook.util.swallowed import refuse_swallowed
from ferrohook.util.texts import tokenize_hint

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ferrohook.names.select import Selector
    from ferrohook.plans.prepared import Request
    from ferrohook.registration.register import Hook


_MEANT: Final = {
    **dict.fromkeys(
        ("hook", "fwd_hooks", "bwd_hooks", "forward_hooks", "interventions", "on"), "hooks"
    ),
    **dict.fromkeys(
        ("captures", "captured", "keep", "names_filter", "return_cache", "select", "what"),
        "capture",
    ),
    "plans": "plan",
}
"""Names for what `run` takes, near to ours or of other libraries."""


class RunResult(NamedTuple):
    """Result of `run`; it unpacks as `output, acts`."""

    output: Any
    """Output of the model."""
    acts: ActivationCache[Tensor]
    """Activations that `capture` or the plan keeps; empty without either."""


def run(
    model: nn.Module,
    *args: Any,
    hooks: Mapping[Any, Hook] | None = None,
    capture: Selector = None,
    plan: Plan | Prepared | None = None,
    **kwargs: Any,
) -> RunResult:
    """Calls a model once, with hooks, a capture and a plan for this call only.

    Args:
        model: any module.
        *args: positional arguments for the model.
        hooks: dict from a selector, see `select`, to a hook: a forward hook of PyTorch's contract,
            or a typed hook of any phase.
        capture: modules whose outputs to capture, see `select`; None for none.
        plan: a plan, or one prepared for this model, which costs nothing to open. `hooks` fire
            after its hooks of equal priority.
        **kwargs: keyword arguments for the model.

    Warns with `NeverFiredWarning` of modules that never ran.

    Returns:
        The model's `output` and the captured `acts`, as a named tuple.

    Raises:
        SelectionError: a selector matches no module.
        HookTypeError: a hook is neither a callable nor a typed hook, `plan` is no plan, or a
            keyword is another name for `hooks`, `capture` or `plan` (`hook`, `fwd_hooks`) or an
            option of `on`, `keep` or `register` (`at`, `dtype`), and the model's forward does not
            name it.
        HookError: the plan was prepared for another model; or it has a `keep`, and `capture` was
            passed.

    Examples:
        >>> hooks = {"layers.3": steer}
        >>> output, acts = fh.run(model, ids, hooks=hooks, capture="layers.*")
    """
    expect_module(model, "run needs")
    refuse_swallowed("run", model, kwargs, _MEANT)
    expect(hooks, Mapping | None, "hooks must be a dict from selectors to hooks")
    expect(plan, Plan | Prepared | None, "plan must be a Plan or a Prepared")
    keeps = plan is not None and any(isinstance(each, KeepEntry) for each in plan.entries)
    if keeps and capture is not None:
        msg = (
            "capture= cannot be combined with a plan that captures: add fh.keep(...) to the plan "
            "instead"
        )
        raise HookError(msg)
    if isinstance(plan, Prepared) and plan.model is not model:
        msg = f"the plan was not prepared for this {model._get_name()}"
        raise HookError(msg)
    session = None if capture is None else _capture(model, capture)._tag
    acts: ActivationCache[Any] = ActivationCache({})
    nothing = contextlib.nullcontext()
    request: Request | None = None
    if plan is not None:
        request = plan.open(model) if isinstance(plan, Plan) else plan.open()
        request.stacklevel = 3  # of this function's caller
        acts = request.acts
    with request or nothing, Scope() as own:
        groups = [register(model, what, hook, scope=own) for what, hook in (hooks or {}).items()]
        if session is not None:
            acts = session.begin(own)
        try:
            output = model(*args, **kwargs)
        except TypeError as error:
            if hint := tokenize_hint(args, kwargs):
                error.add_note(f"ferrohook: run calls the model with these arguments{hint}")
            raise
        texts = warnings_of(groups)
    if session is not None and (silent := session.silent()):
        texts.append(explain(model, silent))
    for text in texts:
        warnings.warn(text, NeverFiredWarning, stacklevel=2)
    return RunResult(output, acts)

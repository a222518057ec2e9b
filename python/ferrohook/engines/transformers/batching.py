"""Plans for the requests of transformers' continuous batching.

Examples:
    >>> outputs = generate_batch(model, prompts, plans=[plan, None])
    >>> outputs["req_0"].generated_tokens, outputs["req_0"].acts["model.layers.3"]

    >>> with model.continuous_batching_context_manager(**configs) as manager:
    ...     with attach(manager) as attached:
    ...         attached.add_request(ids, plan=plan)
    ...         for output in attached:
    ...             output.acts
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any, Final, Self

from transformers.generation.configuration_utils import ContinuousBatchingConfig

from ferrohook.engines.model.modules import described
from ferrohook.engines.planned import NO_PATTERN, EnginePlans
from ferrohook.engines.transformers.steps import ROWS
from ferrohook.engines.transformers.supported import CAPABILITIES, check_features
from ferrohook.engines.transformers.worker import ManagerWorker, Prompt
from ferrohook.errors import HookError
from ferrohook.quantity import quantities
from ferrohook.util.arguments import expect_module
from ferrohook.util.swallowed import refuse_swallowed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import nn

    from ferrohook.engines.support import Capabilities
    from ferrohook.plans import Plan, Prepared


def capabilities_of(model: nn.Module) -> Capabilities:
    """Returns `CAPABILITIES` with the quantities of a model, see `ferrohook.engines.capabilities`.

    Raises:
        HookError: the model cannot be looked at.
    """
    table = quantities(model)
    shown = described(table) | {
        name: {"refused": NO_PATTERN} for name, each in table.items() if each.point == "pattern"
    }
    return dataclasses.replace(CAPABILITIES, quantities=shown)


_MEANT: Final = {
    **dict.fromkeys(("hooks", "capture", "keep", "on", "plan"), "plans"),
    "plans": "plan",
}
"""Mistaken option names, and the option to use instead."""


def generate_batch(
    model: Any,
    inputs: Sequence[Sequence[int]],
    plans: Sequence[Plan | Prepared | None] | None = None,
    *,
    untried: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Generates texts for prompts as `model.generate_batch` does, with one plan for each prompt.

    Args:
        model: a model of transformers.
        inputs: tokens of the prompts.
        plans: a plan for each prompt, or None for none.
        untried: see `attach`.
        **options: as of the model's own. Without a `continuous_batching_config`, one without CUDA
            graphs is made.

    Returns:
        Outputs as from the model's own method. Each also has `acts`, the activations that the plan
        keeps, and `hook_error`, an exception or None: with one its status is FAILED.

    Raises:
        ValueError: as many plans as inputs are needed.
        HookTypeError: a plan is neither a `Plan` nor a `Prepared`; or an option is one of a plan's
            entries, which the model's own does not name.
        HookError: a plan does not fit the model or cannot be served; or see `attach`.

    Examples:
        >>> outputs = generate_batch(model, prompts, plans=[plan, None])
        >>> outputs["req_0"].acts["model.layers.3"].shape
    """
    expect_module(model, "generate_batch needs")
    refuse_swallowed("generate_batch", type(model).generate_batch, options, _MEANT)
    prompts = _with_plans(EnginePlans(model, dim=ROWS), inputs, plans)
    options.setdefault("continuous_batching_config", ContinuousBatchingConfig(use_cuda_graph=False))
    stand_in = _AttachingModel(model, prompts, untried)
    try:
        results: dict[str, Any] = type(model).generate_batch(stand_in, prompts, **options)
    finally:
        stand_in.attachments.close()
    return results


class _AttachingModel:
    """Stands in for a model in its own `generate_batch`, and attaches the manager made there."""

    def __init__(self, model: Any, prompts: list[Prompt], untried: bool) -> None:  # noqa: FBT001 (used only here)
        self._model = model
        self._prompts = prompts
        self._untried = untried
        self.attachments = contextlib.ExitStack()

    def continuous_batching_context_manager(self, **options: Any) -> Any:
        return type(self._model).continuous_batching_context_manager(self, **options)

    def init_continuous_batching(self, **options: Any) -> Any:
        manager = self._model.init_continuous_batching(**options)
        try:
            attached = self.attachments.enter_context(attach(manager, untried=self._untried))
            # Raised here: the model's own method only logs errors while it adds requests.
            attached.check_plans(prompt.plan for prompt in self._prompts)
        except BaseException:
            if manager._original_attn_impl is not None:  # given back by `stop`, once started
                self._model.set_attn_implementation(manager._original_attn_impl)
            raise
        return manager

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def attach(manager: Any, *, untried: bool = False) -> Attached:
    """Lets requests of a manager have plans.

    Args:
        manager: of `init_continuous_batching` or `continuous_batching_context_manager`, started or
            not.
        untried: accept an untried release of transformers, if the self-test passes.

    Raises:
        HookError: the release was not tried or fails the self-test, the manager is attached
            already, or it is set up for a feature that is refused, see `CAPABILITIES.refused`.

    Examples:
        >>> with attach(manager) as attached:
        ...     request_id = attached.add_request(ids, plan=plan)
        ...     output = attached.get_result(request_id)
    """
    CAPABILITIES.check_version(untried=untried)
    check_features(manager)
    if "_generation_step" in vars(manager):
        msg = "the manager is already attached: close that attachment first"
        raise HookError(msg)
    return Attached(manager)


class Attached:
    """A manager whose requests may have plans, see `attach`. A context manager that closes it.

    Attributes and methods that are not defined here are the manager's.
    """

    def __init__(self, manager: Any) -> None:
        self.manager = manager
        self._worker = ManagerWorker(manager)

    def add_request(
        self,
        input_ids: Sequence[int],
        request_id: str | None = None,
        *args: Any,
        plan: Plan | Prepared | None = None,
        **options: Any,
    ) -> str | None:
        """Adds a request, as the manager's own `add_request`.

        Args:
            input_ids: tokens of the prompt.
            request_id: its id; one is made if None.
            *args: as of the manager's.
            plan: hooks and captures of this request; None for none.
            **options: as of the manager's.

        Returns:
            Its id; None if the engine takes no more requests.

        Raises:
            HookTypeError: `plan` is neither a `Plan` nor a `Prepared`.
            HookError: the plan does not fit the model or cannot be served; a request with a plan
                has the id; or `close` was called.
        """
        self._worker.check_open()
        refuse_swallowed("add_request", type(self.manager).add_request, options, _MEANT)
        prompt = Prompt(input_ids, plan)
        added: str | None = self.manager.add_request(prompt, request_id, *args, **options)
        return added

    def add_requests(
        self,
        inputs: Sequence[Sequence[int]],
        *args: Any,
        plans: Sequence[Plan | Prepared | None] | None = None,
        **options: Any,
    ) -> list[str]:
        """Adds requests, as the manager's own `add_requests`.

        Raises:
            ValueError: as many plans as inputs are needed.
            HookError, HookTypeError: see `add_request`.
        """
        self._worker.check_open()
        refuse_swallowed("add_requests", type(self.manager).add_requests, options, _MEANT)
        prompts = _with_plans(self._worker.plans, inputs, plans)
        added: list[str] = self.manager.add_requests(prompts, *args, **options)
        return added

    def check_plans(self, plans: Iterable[Plan | Prepared | None]) -> None:
        """Checks that requests may have these plans.

        Raises:
            HookError, HookTypeError: see `add_request`.
        """
        for plan in plans:
            if plan is not None:
                self._worker.plans.serve(plan)

    def close(self) -> None:
        """Detaches from the manager; idempotent. Requests with a plan that still run fail."""
        self._worker.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.manager, name)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.manager)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        served = sum(it.state != "ended" for it in [*self._worker.requests.values()])
        state = "closed" if self._worker.closed else f"{served} requests with plans"
        return f"<Attached to {type(self.manager).__name__}, {state}>"


def _with_plans(
    known: EnginePlans,
    inputs: Sequence[Sequence[int]],
    plans: Sequence[Plan | Prepared | None] | None,
) -> list[Prompt]:
    """Returns prompts with their plans, prepared."""
    if plans is None:
        plans = [None] * len(inputs)
    if len(plans) != len(inputs):
        msg = (
            f"plans must have one plan (or None) for each input, got {len(plans)} for "
            f"{len(inputs)} inputs"
        )
        raise ValueError(msg)
    return [
        Prompt(tokens, None if plan is None else known.serve(plan))
        for tokens, plan in zip(inputs, plans, strict=True)
    ]

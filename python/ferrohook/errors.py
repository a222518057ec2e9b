"""Exceptions and warnings of ferrohook."""

from typing import Any

__all__ = [
    "CaptureBudgetError",
    "HookError",
    "HookTypeError",
    "NeverFiredWarning",
    "NonFiniteError",
    "NotInstrumentedWarning",
    "ReplacedWarning",
    "ResumeError",
    "RowsError",
    "SelectionError",
    "StaleActivationError",
    "StoreError",
    "UnattributedWarning",
    "UnverifiedWarning",
]


class HookError(Exception):
    """Invalid use of a hook, a handle or a hooked module."""


class HookTypeError(HookError, TypeError):
    """Argument of the wrong type in place of a hook, a module or an option.

    A call raises it too, if a typed hook returns a value that its type forbids.
    """


class SelectionError(HookError, KeyError):
    """Selector, or a part of one, that matches no module of the model."""

    # KeyError's own puts the message in quotes.
    __str__ = Exception.__str__


class StaleActivationError(HookError):
    """Captured activation that was changed in place after the capture."""


class RowsError(HookError, ValueError):
    """Rows of a batch that are invalid, or that cannot be found in a tensor."""

    member: Any = None
    """The member that a batch refused as it was entered."""


class CaptureBudgetError(HookError):
    """Activation that would exceed `max_bytes`; earlier activations stay readable."""


class NonFiniteError(HookError, FloatingPointError):
    """NaN or infinity that a watch found; names step, batch and module."""


class StoreError(HookError):
    """Failed operation of a store; batches that it acknowledged stay stored."""


class ResumeError(HookError):
    """Run that cannot be resumed: its model, selection, options or batches differ."""


class NeverFiredWarning(UserWarning):
    """Selected modules never ran."""


class NotInstrumentedWarning(UserWarning):
    """Modules that cannot be instrumented were skipped."""


class ReplacedWarning(UserWarning):
    """Quantisation replaced a module with hooks, which do not follow it."""


class UnattributedWarning(UserWarning):
    """Recorded layer ran, but no rule identified its call; its output was dropped."""


class UnverifiedWarning(UserWarning):
    """Stored batches without a fingerprint could not be compared."""


def __dir__() -> list[str]:
    return __all__

"""The package's exceptions."""


class HookError(Exception):
    """A hook, a handle or a hooked module was used in a way that cannot work."""


class HookTypeError(HookError, TypeError):
    """Something of the wrong type where a hook, a module or an option was expected.

    Raised where it enters, and also in a call when a typed hook returns what its type forbids.
    """


class SelectionError(HookError, KeyError):
    """What was to be selected, or a part of it, matches no module of the model."""

    # That of KeyError shows the message in quotes.
    __str__ = Exception.__str__


class StaleActivationError(HookError):
    """A captured activation was changed in place after it was captured."""


class CaptureBudgetError(HookError):
    """Keeping an activation would have exceeded `max_bytes`; what was captured stays readable."""


class StoreError(HookError):
    """A store cannot keep or give back what it was asked for; what it acknowledged stays there."""


class NeverFiredWarning(UserWarning):
    """Modules that were selected never ran."""


class NotInstrumentedWarning(UserWarning):
    """Modules that cannot be instrumented were left as they are."""


class UnattributedWarning(UserWarning):
    """A recorded layer ran where nothing told which call it belongs to."""

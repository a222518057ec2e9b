"""The package's exceptions."""


class HookError(Exception):
    """A hook, a handle or a hooked module was used in a way that cannot work."""


class HookTypeError(HookError, TypeError):
    """Something of the wrong type where a hook, a module or an option was expected.

    Raised where it enters, and also in a call when a typed hook returns what its type forbids.
    """

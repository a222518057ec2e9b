"""Check of torch's version."""

from __future__ import annotations

import re
import sys
import sysconfig

OLDEST = (2, 13)
# Free-threaded CPython 3.13 has no wheels of newer torch. Older torch fails only under Dynamo,
# which does not run there.
OLDEST_FREE_THREADED = (2, 11)


def refuse_old_torch() -> None:
    """Checks the imported torch, or the installed one, without importing it.

    Raises:
        ImportError: it is too old.
    """
    found = getattr(sys.modules.get("torch"), "__version__", None) or _installed()
    numbers = re.match(r"(\d+)\.(\d+)", found)
    if numbers is None or (version := (int(numbers[1]), int(numbers[2]))) >= OLDEST:
        return
    free_threaded = sysconfig.get_config_var("Py_GIL_DISABLED") and sys.version_info < (3, 14)
    oldest = OLDEST_FREE_THREADED if free_threaded else OLDEST
    if version < oldest:
        needed = ".".join(map(str, oldest))
        msg = (
            f"ferrohook needs torch {needed} or later, found {found}: "
            f"pip install --upgrade 'torch>={needed}'"
        )
        raise ImportError(msg)


def _installed() -> str:
    """Returns the installed version; an empty string if none is."""
    import importlib.metadata  # noqa: PLC0415 (takes longer than importing ferrohook)

    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""

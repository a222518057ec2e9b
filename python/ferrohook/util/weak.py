"""Methods of objects that their callers do not keep alive."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that calls a method as long as its object lives, and then does nothing."""
    name, reference = method.__name__, weakref.ref(method.__self__)  # type: ignore[attr-defined]

    def call(*args: Any, **kwargs: Any) -> Any:
        found = reference()
        return None if found is None else getattr(found, name)(*args, **kwargs)

    return call

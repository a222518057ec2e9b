"""Parts of error messages, and packages that may be missing."""

from __future__ import annotations

import importlib
import itertools
import re
from typing import TYPE_CHECKING, Any, Final

from ferrohook.errors import HookError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

MODEL: Final = "(model)"
"""Name of the model itself, whose path is empty, for people."""
MOST_LISTED: Final = 5
"""Items that a text lists."""


def with_article(value: object) -> str:
    """Returns the name of a value's type, after its article."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOaeio' else 'a'} {name}"


def shown(path: str) -> str:
    """Returns the path of a module for people, in quotes; `MODEL` for the model itself."""
    return repr(path) if path else MODEL


def listed(items: Collection[object]) -> str:
    """Lists the first items, and the number of the others."""
    first = ", ".join(map(repr, itertools.islice(items, MOST_LISTED)))
    more = len(items) - MOST_LISTED
    return f"{first} and {more} more" if more > 0 else first


def counted(number: int, noun: str) -> str:
    """Returns a number of things: "1 batch", "2 batches", "1,000 hooks"."""
    plural = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{plural}"


def tokenize_hint(args: Iterable[object], kwargs: Mapping[str, object]) -> str:
    """Returns the end of an error about the arguments of a model, if texts are among them."""
    values = [*args, *kwargs.values()]
    lists = [each for value in values if isinstance(value, list | tuple) for each in value]
    texts = any(isinstance(each, str) for each in values + lists)
    return ": tokenize the text first, tokenizer(text, return_tensors='pt')" if texts else ""


def missing_package(user: str, package: str, extra: str = "") -> str:
    """Returns the error of a package that `user` needs and that is not installed.

    Args:
        user: name of the feature.
        package: name of the package.
        extra: name of the extra that has the package, if it is another.
    """
    # Not "ferrohook[extra]", which no registry has.
    of_extra = f" (the extra {extra})" if extra else ""
    return f"{user} needs the package {package}{of_extra}: pip install {package}"


def imported(name: str, user: str, extra: str = "") -> Any:
    """Imports a module of a package that `user` needs, see `missing_package`.

    Raises:
        HookError: the package is not installed.
    """
    package = name.partition(".")[0]
    try:
        importlib.import_module(package)
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise HookError(missing_package(user, package, extra)) from error


_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def name_of(hook: object) -> str:
    """Returns the name of a hook for people: the same in each process."""
    name: str | None = getattr(hook, "__qualname__", None)
    return name or _ADDRESS.sub("", repr(hook)).partition("\n")[0].removesuffix("(")

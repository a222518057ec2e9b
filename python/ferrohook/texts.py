"""Parts of error messages."""

from __future__ import annotations


def with_article(value: object) -> str:
    """Returns the name of a value's type behind its article."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOaeio' else 'a'} {name}"


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

"""Pictures of activations, by matplotlib.

Each function draws into `ax`, or into a new figure, and returns the axes.

Examples:
    >>> with fh.capture(model, "layers.*") as acts:
    ...     model(ids)
    >>> fh.plot.norms(acts, tokens=words).figure.savefig("norms.svg")
"""

from ferrohook.plot.pictures import attention as attention
from ferrohook.plot.pictures import difference as difference
from ferrohook.plot.pictures import logit_lens as logit_lens
from ferrohook.plot.pictures import norms as norms
from ferrohook.plot.pictures import patching as patching
from ferrohook.plot.pictures import steering as steering

__all__ = ["attention", "difference", "logit_lens", "norms", "patching", "steering"]


def __dir__() -> list[str]:
    return __all__

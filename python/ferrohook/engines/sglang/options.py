"""Options of an engine of SGLang."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Final, Self

from ferrohook.engines.options import EngineOptions

OPTIONS: Final = "FERROHOOK_SGLANG"
"""Environment variable with the options of an engine, as JSON."""


@dataclasses.dataclass(frozen=True)
class SglangOptions(EngineOptions):
    """Options of an engine: JSON in the environment variable `FERROHOOK_SGLANG`.

    Args:
        plan_bytes: most characters of a plan, with the vectors that it names. Others wait while the
            scheduler reads it.
    """

    plan_bytes: int = 2**23

    def check_plan(self, size: int) -> None:
        """Checks the number of characters of a plan, with the vectors that it names.

        Raises:
            ValueError: there are too many.
        """
        if size > self.plan_bytes:
            msg = f"the plan has {size:,} characters, more than plan_bytes={self.plan_bytes:,}"
            raise ValueError(msg)

    @classmethod
    def of_environment(cls) -> Self:
        """Reads the options of this process.

        Raises:
            ValueError: no JSON, an unknown option, or one of the wrong type.
        """
        return cls.read(json.loads(os.environ.get(OPTIONS, "{}")), OPTIONS)

"""Plans on their way into an engine: read, checked, measured, and given the salt of their cache."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from ferrohook._core import needs_prompt
from ferrohook.engines.prefixes import Prefix, prefix_of
from ferrohook.engines.rewriting import rewritten
from ferrohook.engines.wire import NAME
from ferrohook.errors import HookTypeError
from ferrohook.plans.entries import HookEntry, KeepEntry
from ferrohook.tokens.positions import Tokens, mask_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from ferrohook.engines.model.cache_reach import CacheReach
    from ferrohook.engines.model.modules import ModuleTable
    from ferrohook.engines.options import EngineOptions
    from ferrohook.engines.uploads import UploadsOfPlan
    from ferrohook.plans import Plan
    from ferrohook.tokens.positions import At

_SALT: Final = f"{NAME}:"
"""Begin of the salts that are made here."""


class ReadPlan(NamedTuple):
    """A plan that was read and validated."""

    plan: Plan
    """Rewritten for the engine's modules."""
    text: str
    used: dict[str, str]
    """Digests of the uploads that it names."""
    digest: str
    """Digest of text and uploads."""

    @property
    def captures(self) -> bool:
        """True if it keeps anything."""
        return any(isinstance(entry, KeepEntry) for entry in self.plan.entries)

    @property
    def changes(self) -> list[HookEntry]:
        """The entries that may change rows."""
        return [entry for entry in self.plan.entries if isinstance(entry, HookEntry)]

    def __deepcopy__(self, _memo: object) -> ReadPlan:
        return self  # engines copy parameters


class Admission:
    """Check of the plans of one engine's requests.

    Args:
        modules: modules of its model.
        options: of the engine.
        secret: key of the salts. Its owner can read and write a plan's cached values.
    """

    def __init__(self, modules: ModuleTable, options: EngineOptions, secret: bytes) -> None:
        self._modules = modules
        self._options = options
        self._secret = secret

    def read(self, value: Any, named: UploadsOfPlan) -> ReadPlan:
        """Reads a plan that a client sent.

        Args:
            value: its JSON, as text or as objects.
            named: the uploads that it may name.

        Raises:
            ValueError: the plan is bad; the request must not be scheduled.
        """
        text = text_of(value)
        try:
            plan = named.plan(text)
        except HookTypeError as error:
            raise ValueError(str(error)) from error
        used = named.used
        return ReadPlan(rewritten(plan, self._modules), text, used, _digest(text, used))

    def check_captures(
        self, plan: Plan, prompt_length: int, new_tokens: int, answers: int = 1
    ) -> None:
        """Checks that the captures of a request keep within `capture_bytes`.

        Args:
            plan: its plan, rewritten.
            prompt_length: tokens of its prompt.
            new_tokens: most tokens of an answer.
            answers: number of answers, each with its own captures.

        Raises:
            ValueError: they may not.
        """
        most = prompt_length + max(new_tokens, 1) - 1  # the last new token never runs
        size = answers * sum(
            each.row_bytes * int(wanted(each.at, prompt_length, most).sum())
            for each in self._modules.captures(plan)
        )
        if size > self._options.capture_bytes:
            several = f"{answers} answers of " if answers > 1 else ""
            msg = (
                f"the captures of {several}{most:,} tokens may take {size:,} bytes, more than "
                f"capture_bytes={self._options.capture_bytes:,}: capture fewer modules or "
                "positions, or ask for fewer new tokens"
            )
            raise ValueError(msg)

    def prefix(self, read: ReadPlan, prompt_length: int, reach: CacheReach) -> Prefix:
        """Returns where a plan first changes and first reads a request, see `prefix_of`."""
        return prefix_of(read.plan, prompt_length, self._modules, reach)

    def salt(self, read: ReadPlan, prompt_length: int, of_client: object = None) -> str | None:
        """Returns the cache salt of a request; None if its plan changes nothing.

        Keys and values that a plan changed are only for requests of the same plan, and of the same
        length of prompt where the plan counts from its end. The secret keys the salt, so that
        clients cannot compute it.

        Args:
            read: its plan.
            prompt_length: tokens of its prompt.
            of_client: salts that its client gave it; None where the cache has them as keys beside.
        """
        if not read.changes:
            return None
        counts = any(entry.gates or needs_prompt(entry.at) for entry in read.changes)
        content = json.dumps([of_client, read.digest, prompt_length if counts else None])
        salt = hashlib.blake2b(content.encode(), key=self._secret, digest_size=16).hexdigest()
        return f"{_SALT}{salt}"


def check_salt(salt: str | None) -> None:
    """Refuses a client's cache salt of the form of ours.

    Raises:
        ValueError: it has that form.
    """
    if salt is not None and salt.startswith(_SALT):
        msg = f"a cache_salt that starts with {_SALT!r} is reserved for ferrohook: choose another"
        raise ValueError(msg)


def wanted(at: At, prompt: int, tokens: int) -> Tensor:
    """Returns which of the first positions of a request an entry names: bools, (tokens,)."""
    if at is None:
        return torch.ones(tokens, dtype=torch.bool, device="cpu")
    return mask_of(
        at, Tokens(torch.arange(tokens, device="cpu")[None], torch.tensor([prompt], device="cpu"))
    )[0]


def text_of(value: Any) -> str:
    """Returns a plan that a client sent, as text.

    Raises:
        ValueError: it is neither text nor made of what JSON has.
    """
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        msg = f"the plan of a request must be the JSON of Plan.to_json: {error}"
        raise ValueError(msg) from error


def _digest(text: str, uploads: Mapping[str, str]) -> str:
    content = json.dumps([text, sorted(uploads.items())])
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()

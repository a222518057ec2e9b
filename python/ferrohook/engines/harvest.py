"""`Harvest`: captures of prompts and texts, written into a store by the worker that runs them."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self, TypeAlias

import torch

from ferrohook import errors
from ferrohook.data.fingerprints import fingerprint
from ferrohook.data.stores.local import LentFolder
from ferrohook.data.token_rows import LAYER, PARTS
from ferrohook.errors import HookError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from ferrohook.engines.requests import EngineRequest

    Read: TypeAlias = Callable[[int], tuple[Mapping[str, Tensor], Mapping[str, list[int]]]]

SHARE: Final = 8
"""Shards of the usual size that a store's `max_pending` has room for."""


class HarvestSettings(NamedTuple):
    """Contents of one run, as its client tells the worker."""

    prefix: str
    """Start of its requests' ids, which go on with the number of the prompt and `-`."""
    run: str
    names: list[str]
    """Captured values, which are the layers of the store."""
    value: str
    """Name of the tensor of each layer."""
    made_of: dict[str, Any]
    """Manifest of the run."""
    generates: bool
    """True if texts follow the prompts."""
    folder: LentFolder

    def to_json(self) -> str:
        """Returns them as text."""
        return json.dumps(self)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Reads what `to_json` returned."""
        found = cls(*json.loads(text))
        return found._replace(folder=LentFolder(*found.folder))


class _Prompt(NamedTuple):
    """A prompt that runs."""

    number: int
    ids: list[int]


class TextEnd(NamedTuple):
    """End of a text, which its client knows: a stop string ends it there."""

    number: int
    """Of its prompt."""
    ids: list[int]
    """Generated tokens."""
    tokens: int
    """Tokens of prompt and text; rows from the last one on do not count."""


class _EndedRequest(NamedTuple):
    """A request that the engine has forgotten, and whose text's end is not known here yet."""

    prompt: _Prompt
    request: EngineRequest
    read: Read


class _StoredPrompt(NamedTuple):
    """Rows of a prompt that ran, and of its text."""

    number: int
    digest: str
    described: list[Tensor]
    """Token, position and text of each row."""
    rows: Mapping[str, Tensor]
    """By captured value."""


class Harvest:
    """Rows of finished prompts on their way into a store.

    The length of a prompt is known from its start; that of a text once its client tells its end.
    Rows wait for an eighth of the store's `max_pending`, then become a batch of the run, of whole
    prompts in order of their ends. The store's `put` blocks while too many bytes wait to be
    written, and the engine with it.

    Args:
        settings: of the run.

    Raises:
        StoreError: the folder cannot be written.
    """

    def __init__(self, settings: HarvestSettings) -> None:
        self._settings = settings
        self._store = settings.folder.opened()
        run = settings.run
        complete = {*self._store.completed(run)}
        self._known = {*self._store.batches(run)} if run in self._store.runs() else set()
        self._numbers = (number for number in itertools.count() if number not in complete)
        self._shard_bytes = max(1, settings.folder.max_pending // SHARE)
        self._prompts: dict[str, _Prompt] = {}
        self._texts: dict[int, TextEnd] = {}
        """Ends of texts whose requests the engine has not forgotten yet."""
        self._ended: dict[int, _EndedRequest] = {}
        self._waiting: list[_StoredPrompt] = []
        self._waiting_bytes = 0
        self.most_bytes = 0
        """Most bytes of rows that waited to become a batch."""
        self.taken = 0
        """Prompts whose rows were taken, with those of their texts."""
        self.error: Exception | None = None
        """Why nothing is taken any more."""

    def number_of(self, request_id: object) -> int | None:
        """Returns the number of a request's prompt, by the engine's id; None if it has none."""
        if not isinstance(request_id, str) or not request_id.startswith(self._settings.prefix):
            return None
        return int(request_id.removeprefix(self._settings.prefix).partition("-")[0])

    def owns(self, name: str) -> bool:
        """True for a request of this run whose rows were not taken."""
        return name in self._prompts

    def start(self, name: str, number: int, ids: Sequence[int]) -> None:
        """Notes a request of this run.

        Args:
            name: as the steps call it.
            number: of its prompt.
            ids: tokens of its prompt.
        """
        self._prompts[name] = _Prompt(number, [*ids])
        if not self._settings.generates:
            self._texts[number] = TextEnd(number, [], len(ids) + 1)

    def end_text(self, end: TextEnd) -> None:
        """Notes the end of a text, before or after the engine forgets its request."""
        self._texts[end.number] = end
        if (ended := self._ended.pop(end.number, None)) is not None:
            self._take(*ended)

    def take(self, request: EngineRequest, read: Read) -> None:
        """Takes the rows of a request that the engine has forgotten.

        Rows of one that failed or was aborted are dropped: the client knows.

        Args:
            request: the request.
            read: returns its captured values by name, and the positions of their rows, of as many
                tokens.
        """
        request.taken = True
        prompt = self._prompts.pop(request.name, None)
        if prompt is not None and self.error is None:
            self._take(prompt, request, read)

    def _take(self, prompt: _Prompt, request: EngineRequest, read: Read) -> None:
        text = self._texts.pop(prompt.number, None)
        if request.failure is not None:
            return
        if text is None:
            self._ended[prompt.number] = _EndedRequest(prompt, request, read)
        elif request.end >= text.tokens - 1:
            try:
                self._add(prompt, text.ids, *read(text.tokens))
            except Exception as error:  # noqa: BLE001 (a full disk, say: the client learns of it)
                self.error = error

    def _add(
        self,
        prompt: _Prompt,
        text: list[int],
        rows: Mapping[str, Tensor],
        positions: Mapping[str, list[int]],
    ) -> None:
        first, *others = self._settings.names
        chosen = positions.get(first, [])
        if other := next((it for it in others if positions.get(it, []) != chosen), None):
            msg = f"{other!r} has other positions than {first!r}: collect them in separate runs"
            raise HookError(msg)
        ids = [*prompt.ids, *text]
        described = [
            torch.tensor([ids[each] for each in chosen], dtype=torch.long),
            torch.tensor(chosen, dtype=torch.long),
            torch.full((len(chosen),), prompt.number),
        ]
        stored = _StoredPrompt(prompt.number, digest_of(prompt.ids), described, rows)
        self._waiting.append(stored)
        self._waiting_bytes += sum(each.nbytes for each in rows.values())
        self.most_bytes = max(self.most_bytes, self._waiting_bytes)
        self.taken += 1
        if self._waiting_bytes >= self._shard_bytes:
            self._write()

    def _write(self) -> None:
        """Puts the waiting rows into the store, as one batch."""
        run, number = self._settings.run, next(self._numbers)
        waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
        if number in self._known:
            self._store.restart(run, number)
        described = zip(PARTS, zip(*(each.described for each in waiting), strict=True), strict=True)
        self._store.put(run, number, LAYER, {name: torch.cat(parts) for name, parts in described})
        for name in self._settings.names:
            pieces = [each.rows[name] for each in waiting if name in each.rows]
            self._store.put(run, number, name, {self._settings.value: pieces}, copy=False)
        digests = digests_text({each.number: each.digest for each in waiting})
        made_of = self._settings.made_of
        self._store.complete(run, number, fingerprint=digests, manifest=made_of)

    def close(self) -> None:
        """Writes what waits and closes the store; `error` tells if that failed. Idempotent."""
        try:
            if self.error is None and self._waiting_bytes:
                self._write()
        except Exception as error:  # noqa: BLE001 (as in `take`)
            self.error = error
        try:
            self._store.close()
        except Exception as error:  # noqa: BLE001 (as in `take`)
            self.error = self.error or error


def digest_of(ids: Sequence[int]) -> str:
    """Returns the digest of a prompt's tokens."""
    return fingerprint(torch.tensor(ids, dtype=torch.long).numpy().tobytes())


def digests_text(digests: Mapping[int, str]) -> str:
    """Returns the digests of a batch's prompts, by their numbers, as the batch's fingerprint."""
    return " ".join(f"{number}:{digest}" for number, digest in digests.items())


def digests_in(text: str) -> dict[int, str]:
    """Reads what `digests_text` returned."""
    pairs = (each.split(":") for each in text.split())
    return {int(number): digest for number, digest in pairs}


def error_answer(error: Exception) -> dict[str, str]:
    """Returns the answer of a worker whose run cannot go on."""
    return {"error": str(error), "kind": type(error).__name__}


def error_in(answer: Mapping[str, Any]) -> HookError | None:
    """Returns the error that a worker answers; None if there is none."""
    if "error" not in answer:
        return None
    made: HookError = getattr(errors, answer.get("kind", ""), HookError)(answer["error"])
    return made

"""`collect` with an engine: `HarvestJob` is the client's part, `Harvest` the worker's.

The worker that runs the prompts writes their captures into the store.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import secrets
from collections.abc import Sequence, Sized
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self, TypeAlias, cast

import torch
from torch import Tensor

from ferrohook import errors
from ferrohook.data.fingerprints import fingerprint
from ferrohook.data.manifests import check_same
from ferrohook.data.stores.local import LentFolder, LocalStore, lent
from ferrohook.data.token_rows import LAYER, PARTS
from ferrohook.engines.wire import NAME
from ferrohook.errors import HookError, HookTypeError, ResumeError
from ferrohook.plans import Plan
from ferrohook.plans.entries import KeepEntry, keep
from ferrohook.util.arguments import describe, expect
from ferrohook.util.progress import progress_bar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from ferrohook.data.engine_jobs import EngineJob
    from ferrohook.engines.requests import EngineRequest
    from ferrohook.util.progress import Advance

    Read: TypeAlias = Callable[[int], tuple[Mapping[str, Tensor], Mapping[str, list[int]]]]

AHEAD: Final = 2
"""Requests submitted ahead, in multiples of the number that an engine runs at once."""
SHARE: Final = 8
"""Shards of the usual size that a store's `max_pending` has room for."""


class HarvestSettings(NamedTuple):
    """Contents of one run, as its client sends them to the worker."""

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
    """Number of its prompt."""
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
    """Rows by captured value."""


class Harvest:
    """Rows of finished prompts on their way into a store.

    The length of a prompt is known when it starts, of a text only when its client reports the end.
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
        """Prompts whose rows were taken, including the rows of their texts."""
        self.error: Exception | None = None
        """Reason why no more rows are taken."""

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
        # The client has the end of a text: what failed then ran past it, in a step ahead.
        if request.failure is not None and not self._settings.generates:
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
            torch.tensor([ids[each] for each in chosen], dtype=torch.long, device="cpu"),
            torch.tensor(chosen, dtype=torch.long, device="cpu"),
            torch.full((len(chosen),), prompt.number, device="cpu"),
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
        """Writes waiting rows and closes the store; a failure is the `error`. Idempotent."""
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
    return fingerprint(torch.tensor(ids, dtype=torch.long, device="cpu").numpy().tobytes())


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


# --- client ------------------------------------------------------------------------------------


class HarvestJob:
    """A call of `collect` with an engine: its plan, and the prompts that are to run.

    Args:
        job: arguments of `collect`.

    Raises:
        HookError, HookTypeError: one is wrong.
    """

    def __init__(self, job: EngineJob) -> None:
        expect(job.store, LocalStore, "collect: the store of an engine must be a LocalStore")
        if isinstance(job.prompts, str | Tensor):
            msg = f"collect: pass a list of prompts, got {describe(job.prompts)}"
            raise HookTypeError(msg)
        expect(job.plan, Plan | None, "collect: the plan of an engine must be a Plan")
        if job.plan is not None and any(isinstance(it, KeepEntry) for it in job.plan.entries):
            msg = "the plan keeps activations: pass what it keeps as the third argument"
            raise HookError(msg)
        entries = _captures(job)
        inputs = {bool(each.options.get("inputs")) for each in entries}
        if len(inputs) > 1:
            msg = "inputs and outputs cannot be stored in one run: collect them in separate runs"
            raise HookError(msg)
        self.value = "input" if inputs == {True} else "output"
        self.plan = Plan(*(() if job.plan is None else job.plan.entries), *entries)
        self.ran = 0
        """Prompts that ran."""
        self.skipped = 0
        """Prompts that were stored before."""
        self._job = job
        self._prefix = f"{NAME}-collect-{secrets.token_hex(8)}-"
        self._stored: dict[int, str] = {}
        """Digests of the stored prompts."""

    def request_id(self, number: int) -> str:
        """Returns the id of a prompt's request."""
        return f"{self._prefix}{number}"

    @staticmethod
    def check_idle(running: Any) -> None:
        """Validates that the engine runs no request: it has `running` ones.

        Raises:
            HookError: it does.
        """
        if running:
            msg = "the engine runs other requests: wait until they are finished"
            raise HookError(msg)

    @contextlib.contextmanager
    def settings(
        self, names: list[str], made_of: dict[str, Any], *, generates: bool
    ) -> Iterator[HarvestSettings]:
        """Reads the prompts that are stored, and lends the store's folder to the worker.

        Args:
            names: captured values.
            made_of: manifest of the run.
            generates: texts follow the prompts.

        Raises:
            ResumeError: the run was made of something else.
        """
        run, store = self._job.run, cast("LocalStore", self._job.store)
        check_same(run, store.manifest(run), made_of)
        if run in store.runs():
            if store.manifest(run) is None:
                msg = f"run {run!r} was not collected with an engine: pass another run"
                raise ResumeError(msg)
            store.repair(run, progress=self._job.progress)
            fingerprints = store.fingerprints(run)
            for batch in store.completed(run):
                self._stored |= digests_in(fingerprints[batch])
        with lent(store) as folder:
            yield HarvestSettings(self._prefix, run, names, self.value, made_of, generates, folder)

    @contextlib.contextmanager
    def progress(self) -> Iterator[Advance]:
        """Shows a progress bar, which counts prompts and tokens."""
        prompts = self._job.prompts
        length = len(prompts) if isinstance(prompts, Sized) else None
        shown = self._job.progress
        with progress_bar(self._job.run, length, "prompt", counted="token", shown=shown) as advance:
            yield advance

    def missing(
        self, encode: Callable[[str], list[int]], advance: Advance
    ) -> Iterator[tuple[int, list[int]]]:
        """Yields number and tokens of each prompt that is not stored.

        Args:
            encode: returns the tokens of a text.
            advance: of the progress bar.

        Raises:
            HookTypeError: a prompt is neither a text nor a list of ids.
            ResumeError: another one is stored.
        """
        for number, prompt in enumerate(self._job.prompts):
            with noted(number):
                ids = encode(prompt) if isinstance(prompt, str) else _ids(prompt)
                digest = self._stored.get(number)
                if digest not in {None, digest_of(ids)}:
                    msg = (
                        "the stored prompt is another (other data, or another order): pass the "
                        "same prompts, or another run"
                    )
                    raise ResumeError(msg)
            if digest is None:
                yield number, ids
            else:
                self.skipped += 1
                advance()

    def counts(self, taken: int) -> tuple[int, int]:
        """Returns the numbers of prompts that ran and that were stored before.

        Args:
            taken: prompts whose rows the worker has stored.

        Raises:
            HookError: the worker has stored more or fewer prompts than ran.
        """
        if taken != self.ran:
            msg = f"{self.ran} prompts ran, but the worker has the rows of {taken}"
            raise HookError(msg)
        return self.ran, self.skipped


def _captures(job: EngineJob) -> list[KeepEntry]:
    """Returns the captures of a job.

    Raises:
        HookError, HookTypeError: modules and captures are mixed, or captures have options beside.
    """
    listed = [*job.what] if isinstance(job.what, list | tuple) else [job.what]
    entries = [each for each in listed if isinstance(each, KeepEntry)]
    if not entries:
        return [keep(job.what, **job.options)]
    if len(entries) < len(listed):
        msg = "either select modules, or pass keep() for all of them"
        raise HookTypeError(msg)
    if job.options:
        msg = f"{min(job.options)}= only works with selected modules: pass it to keep()"
        raise HookError(msg)
    return entries


def _ids(prompt: Any) -> list[int]:
    """Returns the token ids of a prompt.

    Raises:
        HookTypeError: it has none.
    """
    listed = prompt.tolist() if isinstance(prompt, Tensor) else prompt
    if not isinstance(listed, Sequence) or not all(type(each) is int for each in listed):
        msg = f"a prompt must be a text or a list of token ids, got {describe(prompt)}"
        raise HookTypeError(msg)
    return [*listed]


@contextlib.contextmanager
def noted(number: int) -> Iterator[None]:
    """Notes the number of the prompt in errors."""
    try:
        yield
    except Exception as error:
        error.add_note(f"ferrohook: at prompt {number}")
        raise

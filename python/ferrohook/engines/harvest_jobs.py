"""`HarvestJob`: client side of `collect` with any engine; `harvest` is the worker's."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Sequence, Sized
from typing import TYPE_CHECKING, Any, Final, cast

from torch import Tensor

from ferrohook.data.manifests import check_same
from ferrohook.data.stores.local import LocalStore, lent
from ferrohook.engines.harvest import HarvestSettings, digest_of, digests_in
from ferrohook.engines.wire import NAME
from ferrohook.errors import HookError, HookTypeError, ResumeError
from ferrohook.plans import Plan
from ferrohook.plans.entries import KeepEntry, keep
from ferrohook.util.arguments import describe, expect
from ferrohook.util.progress import progress_bar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ferrohook.data.engine_jobs import EngineJob
    from ferrohook.util.progress import Advance

AHEAD: Final = 2
"""Requests that run or wait, in multiples of those that an engine runs at once."""


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
            HookError: these are not those that ran.
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

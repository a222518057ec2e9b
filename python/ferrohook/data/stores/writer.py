"""`Writer`: the background thread of a `LocalStore`."""

from __future__ import annotations

import os
import threading
from _thread import start_new_thread
from collections import deque
from queue import SimpleQueue
from typing import TYPE_CHECKING

from ferrohook.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ferrohook.data.stores.folder import FolderLock
    from ferrohook.data.stores.shard import Shard


class Writer:
    """Writes shards on a background thread, in the order of `put`.

    Writes nothing after an error: later shards would leave a gap.
    """

    def __init__(
        self, folder_lock: FolderLock, write: Callable[[Shard], None], most_bytes: int
    ) -> None:
        self._folder_lock = folder_lock
        self._write = write
        self._most_bytes = most_bytes
        self.process = os.getpid()
        # Ctrl-C can leave a Condition's lock acquired, a deadlock. A lock in a `with` is released,
        # and a SimpleQueue is never in between. Recursive: the garbage collector may close an
        # unreachable store on any thread, under this lock.
        self._lock = threading.RLock()
        # The shard that is being written stays first until it is complete.
        self._waiting: deque[tuple[Shard, int]] = deque()
        self._wakeups: SimpleQueue[None] = SimpleQueue()
        self._waiters: list[SimpleQueue[None]] = []
        self.closed = False
        self._error: StoreError | None = None
        self._thread: int | None = None
        self._started = False
        self._finished = threading.Lock()
        self._finished.acquire()

    def start(self) -> None:
        """Starts the thread."""
        # Not a Thread, whose `start` waits by a Condition. A daemon: process exit must not wait
        # for a store that is only closed then.
        self._started = True  # first, so that no Ctrl-C can separate the two
        try:
            start_new_thread(self._run, ())
        except RuntimeError:
            self._started = False
            raise

    def put(self, shard: Shard) -> None:
        """Queues a shard; blocks while too many bytes wait."""
        nbytes = shard.content.nbytes
        own = threading.get_ident() == self._thread  # the garbage collector closes the store

        def fits() -> bool:
            pending = sum(waiting for _, waiting in self._waiting)
            return own or not self._waiting or pending + nbytes <= self._most_bytes

        self._wait_until(lambda: self.closed or fits(), lambda: self._add(shard, nbytes))
        self._wakeups.put(None)

    def _add(self, shard: Shard, nbytes: int) -> None:
        if self.closed:
            raise StoreError(closed_message(self._folder_lock.folder))
        self._waiting.append((shard, nbytes))

    def drain(self) -> None:
        """Waits until the queue is written."""
        self._wait_until(lambda: not self._waiting, lambda: None)

    def _wait_until(self, ready: Callable[[], bool], act: Callable[[], None]) -> None:
        """Waits until `ready()`, then calls `act` under the same lock."""
        while True:
            with self._lock:
                self._raise_error()
                if ready():
                    act()
                    return
                wakeup: SimpleQueue[None] = SimpleQueue()
                self._waiters.append(wakeup)
            # Wakes the thread: Ctrl-C may have ended a `put` before it did.
            self._wakeups.put(None)
            wakeup.get()

    def _notify(self) -> None:
        """Wakes all waiting threads."""
        for wakeup in self._waiters:
            wakeup.put(None)
        self._waiters.clear()

    def refuse(self) -> None:
        """Refuses further shards; the thread ends when the queue is written."""
        with self._lock:
            self.closed = True
            self._notify()
        self._wakeups.put(None)

    def close(self) -> None:
        """Ends the thread when the queue is written, and waits for that."""
        self.refuse()
        if threading.get_ident() == self._thread:
            return  # see `put`
        if self._started:  # False if `start` was interrupted
            with self._finished:
                self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            # A new exception each time: a traceback grows with each raise.
            raise StoreError(*self._error.args) from self._error.__cause__

    def _run(self) -> None:
        self._thread = threading.get_ident()
        try:
            with self._folder_lock:
                self._write_all()
        finally:
            self._finished.release()

    def _write_all(self) -> None:
        while not self._ended():
            self._wakeups.get()
            while self._waiting:
                shard, _ = self._waiting[0]
                try:
                    self._write(shard)
                except Exception as error:  # noqa: BLE001 (the next put or flush raises it)
                    self._fail(shard, error)
                    return
                with self._lock:
                    self._waiting.popleft()
                    self._notify()
                del shard  # frees it while waiting for the next

    def _ended(self) -> bool:
        with self._lock:
            return self.closed and not self._waiting

    def _fail(self, shard: Shard, error: Exception) -> None:
        msg = (
            f"writing {shard} to {self._folder_lock.folder} failed: {error}. Everything before it "
            "is stored: make room or repair the folder, then reopen the store and continue"
        )
        with self._lock:
            self._error = StoreError(msg)
            self._error.__cause__ = error
            self._waiting.clear()
            self._notify()


def closed_message(folder: Path) -> str:
    """Message for use after `close`."""
    return f"the store of {folder} is closed: put tensors before close()"

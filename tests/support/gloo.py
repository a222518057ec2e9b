"""Two processes connected by gloo."""

from __future__ import annotations

import multiprocessing
import socket
import traceback
from contextlib import suppress
from datetime import timedelta
from multiprocessing import connection
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.context import ForkServerProcess

RANKS = 2
LIMIT = 250.0
"""Time limit of a check in seconds, start of the processes included."""


class Pair:
    """Two gloo processes that run checks one after another.

    They start with the first check, as importing torch takes seconds. They restart after a failed
    check, which may leave the other rank waiting.
    """

    def __init__(self) -> None:
        self._ranks: list[tuple[ForkServerProcess, connection.Connection]] = []

    def run(self, check: Callable[..., None], *args: Any) -> None:
        """Runs `check(rank, *args)` in both processes; raises if either fails."""
        if not self._ranks:
            self._start()
        waiting: dict[Any, int] = {pipe: rank for rank, (_, pipe) in enumerate(self._ranks)}
        try:
            for pipe in waiting:
                pipe.send((check, args))
            while waiting:
                ready: list[Any] = connection.wait([*waiting], LIMIT)
                assert ready, f"no answer of ranks {[*waiting.values()]}"
                for pipe in ready:
                    rank = waiting.pop(pipe)
                    error = pipe.recv()
                    assert not error, f"rank {rank}: {error}"
        except BaseException:
            self.end()
            raise

    def _start(self) -> None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        # Forked from one process that has imported them, which takes seconds.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch._dynamo", "torch.distributed.fsdp"])
        for rank in range(RANKS):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))

    def end(self) -> None:
        """Kills both processes: an orderly exit aborts now and then in gloo's destructors."""
        for process, pipe in self._ranks:
            process.kill()
            process.join()
            pipe.close()
        self._ranks.clear()


def _serve(rank: int, port: int, pipe: connection.Connection) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=LIMIT),
    )
    torch.set_num_threads(1)
    with suppress(EOFError):  # the test process has exited
        while True:
            check, args = pipe.recv()
            error = ""
            try:
                torch.manual_seed(0)
                check(rank, *args)
            except BaseException:  # noqa: BLE001 (sent to the test)
                error = traceback.format_exc()
            pipe.send(error)

"""Two processes that train together."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

if TYPE_CHECKING:
    from collections.abc import Callable


def on_two_processes(train: Callable[[int], None]) -> None:
    """Runs `train(rank)` in two processes, connected by gloo."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    mp.spawn(_run, args=(train, port), nprocs=2)


def _run(rank: int, train: Callable[[int], None], port: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.manual_seed(0)
    train(rank)
    dist.destroy_process_group()
    # Past the destructors of C++: gloo's abort a process now and then, with plain PyTorch too.
    os._exit(0)

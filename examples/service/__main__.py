"""Runs the service: `python -m examples.service --help`."""

from __future__ import annotations

import argparse
import os
import warnings
from typing import TYPE_CHECKING, NoReturn

import torch

import ferrohook as fh

from .app import Settings, create_app
from .encoder import Encoder
from .server import Server

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class _Parser(argparse.ArgumentParser):
    """A parser that prints errors in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def main(
    arguments: Sequence[str] | None = None, make_encoder: Callable[..., Encoder] = Encoder
) -> None:
    """Serves until SIGINT or SIGTERM, then answers open requests."""
    parser = _Parser(prog="service", description="A sentence encoder to look into and to steer.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0 for any free one")
    parser.add_argument(
        "--threads",
        type=positive(int),
        default=os.cpu_count(),
        help="forwards at a time (default: the number of cores)",
    )
    parser.add_argument(
        "--torch-threads",
        type=positive(int),
        default=1,
        help="threads per forward (default: 1)",
    )
    parser.add_argument(
        "--max-requests", type=positive(int), default=32, help="requests that share a forward"
    )
    parser.add_argument(
        "--max-wait",
        type=float,
        default=2.0,
        help="milliseconds that a request waits for others to share its forward",
    )
    parser.add_argument(
        "--seconds", type=positive(float), default=10.0, help="time limit of one request"
    )
    parser.add_argument("--max-body", type=positive(int), default=2**20, help="bytes of a request")
    parser.add_argument(
        "--max-capture", type=positive(int), default=2**23, help="bytes that a request captures"
    )
    parser.add_argument(
        "--grace", type=float, default=1.0, help="seconds to accept requests after a signal to end"
    )
    parser.add_argument(
        "--no-observe", dest="observe", action="store_false", help="leave out the modules' metrics"
    )
    options = parser.parse_args(arguments)

    torch.set_num_threads(options.torch_threads)
    # The client gets the reason in its answer.
    warnings.simplefilter("ignore", fh.errors.NeverFiredWarning)
    encoder = make_encoder(max_capture_bytes=options.max_capture)
    encoder.instrument()
    settings = Settings(
        threads=options.threads,
        max_requests=options.max_requests,
        max_wait=options.max_wait / 1e3,
        seconds=options.seconds,
        max_body=options.max_body,
        observe=options.observe,
    )
    app = create_app(encoder, settings)
    Server(
        app,
        grace=options.grace,
        seconds=options.seconds,
        host=options.host,
        port=options.port,
        access_log=False,
    ).run()


def positive(number: Callable[[str], float]) -> Callable[[str], float]:
    """Type of an option: a positive number."""

    def parsed(text: str) -> float:
        value = number(text)
        if value <= 0:
            msg = f"is above 0, got {text}"
            raise argparse.ArgumentTypeError(msg)
        return value

    parsed.__name__ = number.__name__
    return parsed


if __name__ == "__main__":
    main()

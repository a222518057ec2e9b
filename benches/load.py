"""Concurrent clients of the example's service: `python -m benches.load --help`.

Each request steers, captures and counts in its own way; its expected answer is computed before by
the same model, alone, with PyTorch's hooks. Sides alternate, so that other load on the machine
affects all. All traffic stays on the loopback interface.
"""

from __future__ import annotations

import http.client
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import numpy as np
import torch
from pydantic_core import from_json
from rich.console import Console
from rich.table import Table

import ferrohook as fh
from benches.services import LockedEncoder
from examples.service.schema import EmbedRequest
from ferrohook.cli import Parser

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence


TEXT = "a cat sleeps on the warm windowsill while interest rates rose again this quarter"
LAYERS = 6
HIDDEN = 384
VARIANTS = 36
CLOSE = 1e-5
"""Absolute tolerance of a number; the variants differ by far more."""
REMEMBERED = 8
"""Right answers to a request that are not parsed again; other batches give other last digits."""
START_SECONDS = 300.0
ANSWER_SECONDS = 60.0
GROWTH = 8.0
"""Limit of the growth of memory, in MiB: thread pools and allocators stabilize late."""


@dataclass
class Variant:
    """A request and its answer."""

    body: bytes
    expected: dict[str, Any]
    # Answers found correct, so that an equal one is not parsed again.
    right: set[bytes] = field(default_factory=set)

    def is_right(self, answer: bytes) -> bool:
        """Returns True if the answer is the expected one."""
        if answer not in self.right:
            found = from_json(answer)
            shared = found.pop("shared", 0)
            if shared < 1 or not alike({**found, "shared": 1}, self.expected):
                return False
            if len(self.right) < REMEMBERED:
                self.right.add(answer)
        return True


def alike(answer: Any, expected: Any) -> bool:
    """Returns True if two answers have the same keys and close numbers."""
    if isinstance(expected, dict):
        return (
            isinstance(answer, dict)
            and answer.keys() == expected.keys()
            and all(alike(answer[key], expected[key]) for key in expected)
        )
    found, wanted = np.asarray(answer), np.asarray(expected)
    return found.shape == wanted.shape and bool(np.allclose(found, wanted, rtol=0, atol=CLOSE))


def make_variants(kind: str, texts: int, words: int, encoder: LockedEncoder) -> list[Variant]:
    """Requests that differ in texts and in wanted answers.

    Args:
        kind: `plain` asks for embeddings alone, `capture` and `steer` for the one or the other,
            `all` for both and counts.
        texts: in each request.
        words: in each text.
        encoder: computes the right answers with PyTorch's hooks; used only for that.
    """
    vocabulary = TEXT.split()
    generator = torch.Generator().manual_seed(0)
    variants = []
    for n in range(VARIANTS):
        request: dict[str, Any] = {
            "texts": [
                " ".join(vocabulary[(n + i * 3 + j) % len(vocabulary)] for j in range(words))
                for i in range(texts)
            ]
        }
        layer = f"encoder.layer.{n % LAYERS}"
        plan = fh.Plan()
        if kind in ("steer", "all"):
            vector = torch.randn(HIDDEN, generator=generator)
            plan += fh.Plan(
                [
                    fh.on(layer, fh.Add(vector)),
                    fh.on(layer, fh.Scale(0.5 + n / VARIANTS)),
                    fh.on(f"{layer}.attention", fh.Zero(output_index=0)),
                ][n // LAYERS % 3]
            )
        if kind in ("capture", "all"):
            plan += fh.Plan(fh.keep("encoder.layer.*"))
            request["reduce"] = [("norm", "mean", "max")[n % 3]]
        request["plan"] = json.loads(plan.to_json())
        if kind == "all":
            request["count"] = [f"{layer}.attention.*"]
        answer = encoder.embed(EmbedRequest.model_validate(request))
        variants.append(Variant(json.dumps(request).encode(), {**answer}))
    return variants


class Service:
    """A server in a separate process.

    Args:
        module: argument of `python -m`, with options.
    """

    def __init__(self, *module: str) -> None:
        command = [sys.executable, "-m", *module, "--port", "0"]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)  # noqa: S603 (ours)
        self.port = 0
        self._started = threading.Event()
        self._log: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stderr is not None  # noqa: S101 (for the type)
        with self._process.stderr as log:
            for line in log:
                self._log.append(line)
                if running := re.search(r"running on http://127\.0\.0\.1:(\d+)", line):
                    self.port = int(running[1])
                    self._started.set()

    def __enter__(self) -> Self:
        return self

    def ready(self) -> int:
        """Waits until it serves; returns its port."""
        if not self._started.wait(START_SECONDS):
            msg = f"the service did not start: {''.join(self._log)}"
            raise TimeoutError(msg)
        return self.port

    def memory(self) -> float:
        """Private memory in MiB."""
        rollup = Path(f"/proc/{self._process.pid}/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) for line in rollup if line.startswith("Private_")) / 1024

    def cpu(self) -> float:
        """CPU time so far, in seconds."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def end(self) -> None:
        """Sends SIGTERM."""
        self._process.send_signal(signal.SIGTERM)

    def wait(self) -> int:
        """Waits for its end; returns the exit status."""
        return self._process.wait(ANSWER_SECONDS)

    def __exit__(self, *exc_info: object) -> None:
        if self._process.poll() is None:
            self.end()
        try:
            self.wait()
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._reader.join(ANSWER_SECONDS)


@dataclass
class Outcome:
    """Outcome of the clients' requests."""

    seconds: float = 0.0
    cpu: float = 0.0
    latencies: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Answers per second."""
        return len(self.latencies) / self.seconds

    def quantile(self, percent: int) -> float:
        """Percentile of the latencies, in milliseconds."""
        return statistics.quantiles(self.latencies, n=100)[percent - 1] * 1e3


def drive(
    port: int,
    variants: Sequence[Variant],
    clients: int,
    *,
    requests: int | None = None,
    seconds: float = float("inf"),
) -> Outcome:
    """Sends requests from concurrent clients, up to a number or a time.

    A client ends too where the server says goodbye or takes no new connection: an unanswered
    request is dropped then.
    """
    outcome = Outcome()
    answers: list[tuple[Variant, int, bytes]] = []
    numbers = itertools.count()
    start = perf_counter()

    def client() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_SECONDS)
        try:
            connection.connect()
            while perf_counter() - start < seconds:
                number = next(numbers)
                if requests is not None and number >= requests:
                    return
                variant = variants[number % len(variants)]
                sent = perf_counter()
                connection.request(
                    "POST", "/embed", variant.body, {"Content-Type": "application/json"}
                )
                response = connection.getresponse()
                answer = response.read()
                outcome.latencies.append(perf_counter() - sent)
                answers.append((variant, response.status, answer))
                if response.getheader("connection") == "close":
                    return
        except ConnectionRefusedError:
            return
        except (OSError, http.client.HTTPException) as error:
            outcome.dropped.append(repr(error))
        finally:
            connection.close()

    threads = [threading.Thread(target=client) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    outcome.seconds = perf_counter() - start
    # Afterwards: the service has the cores until then.
    outcome.wrong += [
        f"{status}: {answer[:200]!r}"
        for variant, status, answer in answers
        if status != http.HTTPStatus.OK or not variant.is_right(answer)
    ]
    return outcome


Bar: TypeAlias = tuple[str, str, float]
"""Names of two sides, and the least ratio of their rates."""


@dataclass(frozen=True)
class Side:
    """A service with requests, measured alternately with others."""

    name: str
    service: Service
    variants: list[Variant]


def speeds(options: argparse.Namespace, console: Console) -> tuple[list[str], int]:
    """Measures all sides; returns the bars missed and the number of wrong answers."""
    encoder = LockedEncoder()
    kinds = {kind: make_variants(kind, options.texts, options.words, encoder) for kind in KINDS}
    with (
        Service("benches.services", "plain") as off,
        Service("examples.service") as observed,
        Service("benches.services", "locked") as locked,
        Service("benches.services", "locked", "--torch-threads", "2") as wide,
    ):
        sides = [
            Side("hooks off", off, kinds["plain"]),
            Side("every module observed", observed, kinds["plain"]),
            Side("captured per request", observed, kinds["capture"]),
            Side("steered per request", observed, kinds["steer"]),
            Side("steered, plain hooks behind a lock", locked, kinds["steer"]),
            Side("the same, two threads a forward", wide, kinds["steer"]),
        ]
        title = f"{options.clients} clients, {options.texts} texts of {options.words} words"
        outcomes = alternate(sides, options.clients, options)
        return show(title, outcomes, BARS, console)


def batches(options: argparse.Namespace, console: Console) -> tuple[list[str], int]:
    """Compares forwards that requests share with a forward for each, and checks many answers."""
    variants = make_variants("steer", 1, options.words, LockedEncoder())
    with (
        Service("examples.service") as shared,
        Service("examples.service", "--max-requests", "1") as separate,
    ):
        sides = [Side("batched", shared, variants), Side("a forward each", separate, variants)]
        title = f"{options.many} clients, a text of {options.words} words, each steering"
        missed, wrong = show(title, alternate(sides, options.many, options), BATCH_BARS, console)
        step = options.requests // STEPS
        runs = [drive(shared.port, variants, options.many, requests=step) for _ in range(STEPS)]
    bad = [reason for run in runs for reason in run.wrong + run.dropped]
    for reason in bad[:3]:
        console.print(reason)
    rate = step * STEPS / sum(run.seconds for run in runs)
    console.print(
        f"{step * STEPS:,} requests, batched, {rate:.1f} a second: {len(bad)} wrong or dropped",
        highlight=False,
    )
    return missed, wrong + len(bad)


def alternate(
    sides: Sequence[Side], clients: int, options: argparse.Namespace
) -> dict[str, list[Outcome]]:
    """Measures sides in turns."""
    outcomes: dict[str, list[Outcome]] = {side.name: [] for side in sides}
    for turn in range(options.rounds + 1):
        # Alternate order: no side always comes first.
        for side in sides if turn % 2 else reversed(sides):
            port = side.service.ready()
            cpu = side.service.cpu()
            outcome = drive(port, side.variants, clients, seconds=options.seconds)
            outcome.cpu = side.service.cpu() - cpu
            if turn:  # the first turn warms up
                outcomes[side.name].append(outcome)
    return outcomes


def show(
    title: str, outcomes: dict[str, list[Outcome]], bars: Sequence[Bar], console: Console
) -> tuple[list[str], int]:
    """Prints a table and ratios; returns the bars missed and the number of wrong answers."""
    table = Table(title=title)
    for heading in ("", "requests/s", "p50 (ms)", "p99 (ms)", "CPU (ms)", "wrong", "dropped"):
        table.add_column(heading, justify="right" if heading else "left")
    wrong = 0
    for name, runs in outcomes.items():
        everything = Outcome(latencies=[took for run in runs for took in run.latencies])
        bad = [reason for run in runs for reason in run.wrong + run.dropped]
        wrong += len(bad)
        table.add_row(
            name,
            f"{statistics.median(run.rate for run in runs):.1f}",
            f"{everything.quantile(50):.1f}",
            f"{everything.quantile(99):.1f}",
            f"{statistics.median(run.cpu / len(run.latencies) for run in runs) * 1e3:.1f}",
            f"{sum(len(run.wrong) for run in runs)}",
            f"{sum(len(run.dropped) for run in runs)}",
        )
        for reason in bad[:3]:
            console.print(reason)
    console.print(table)
    rate = {name: [run.rate for run in runs] for name, runs in outcomes.items()}
    missed = []
    for ours_name, other, bar in bars:
        ratios = [a / b for a, b in zip(rate[ours_name], rate[other], strict=True)]
        value = statistics.median(ratios)
        console.print(
            f"{ours_name} / {other}: {value:.3f} "
            f"({min(ratios):.3f} to {max(ratios):.3f}), bar ≥ {bar}",
            highlight=False,
        )
        if value < bar:
            missed.append(f"{ours_name} / {other}")
    return missed, wrong


KINDS = ("plain", "capture", "steer")
BARS = (
    ("every module observed", "hooks off", 0.97),
    ("steered per request", "steered, plain hooks behind a lock", 1.5),
    ("steered per request", "the same, two threads a forward", 1.5),
)
BATCH_BARS = (("batched", "a forward each", 1.5),)


def endurance(options: argparse.Namespace, console: Console) -> tuple[list[str], int]:
    """Sends many short requests that steer, capture and count; checks answers and memory."""
    variants = make_variants("all", 1, 6, LockedEncoder())
    step = options.requests // STEPS
    memory, wrong, seconds = [], 0, 0.0
    with Service("examples.service") as service:
        service.ready()
        for _ in range(STEPS):
            outcome = drive(service.port, variants, options.clients, requests=step)
            seconds += outcome.seconds
            memory.append(service.memory())
            wrong += len(outcome.wrong) + len(outcome.dropped)
            for reason in (outcome.wrong + outcome.dropped)[:3]:
                console.print(reason)
    half = STEPS // 2
    growth = statistics.median(memory[half:]) - statistics.median(memory[2:half])
    console.print(
        f"{step * STEPS:,} requests that steer, capture and count, {step * STEPS / seconds:.1f} a "
        f"second: {wrong} wrong or dropped; memory {' '.join(f'{mib:.0f}' for mib in memory)} MiB, "
        f"from the first half to the second {growth:+.1f} MiB, bar ≤ {GROWTH:g}",
        highlight=False,
    )
    return (["memory"] if growth > GROWTH else []), wrong


STEPS = 20


def shutdowns(options: argparse.Namespace, console: Console) -> tuple[list[str], int]:
    """Ends the service under load; checks that every request sent is answered."""
    variants = make_variants("all", 1, 6, LockedEncoder())
    answered, lost = 0, 0
    for _ in range(options.shutdowns):
        with Service("examples.service") as service:
            service.ready()
            threading.Timer(1.0, service.end).start()
            outcome = drive(service.port, variants, options.clients, seconds=ANSWER_SECONDS)
        answered += len(outcome.latencies)
        lost += len(outcome.dropped) + len(outcome.wrong)
        for reason in outcome.dropped + outcome.wrong:
            console.print(reason)
    console.print(
        f"{options.shutdowns} shutdowns under load: {answered} answered, {lost} dropped or wrong",
        highlight=False,
    )
    return [], lost


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the selected parts.

    Returns:
        1 if an answer was wrong or missing. A bar that was missed is printed and nothing more.
    """
    parts = {"speeds": speeds, "batches": batches, "endurance": endurance, "shutdowns": shutdowns}
    parser = Parser(prog="load", description="Concurrent clients of the example's service.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(parts)}; default all")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--many", type=int, default=32, help="clients (batches)")
    parser.add_argument("--texts", type=int, default=4, help="in a request (speeds)")
    parser.add_argument("--words", type=int, default=12, help="in a text (speeds, batches)")
    parser.add_argument("--seconds", type=float, default=2.0, help="of one turn (speeds, batches)")
    parser.add_argument("--rounds", type=int, default=9, help="turns (speeds, batches)")
    parser.add_argument("--requests", type=int, default=20_000, help="(batches, endurance)")
    parser.add_argument("--shutdowns", type=int, default=5)
    options = parser.parse_args(arguments)
    for part in options.parts:
        if part not in parts:
            parser.error(f"no part {part!r}, only {', '.join(parts)}")
    torch.set_num_threads(1)
    console = Console(width=None if sys.stdout.isatty() else 130)
    missed, wrong = [], 0
    for name in options.parts or parts:
        over, bad = parts[name](options, console)
        missed += over
        wrong += bad
    console.print(f"missed: {', '.join(missed) or 'nothing'}; wrong or dropped: {wrong}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

"""`Batcher`: which requests share a forward, who waits, who leaves, and the end."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import math
import threading
import time
import weakref
from concurrent.futures import CancelledError
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import ferrohook as fh

pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")

from ferrohook.service import Batcher, BatcherClosedError, check_deadline, deadline
from ferrohook.service.waiting import BatchLimits, Line, WaitingRequest
from support.interpreters import run_with_torch
from support.limits import LIMIT
from support.threads import in_threads, run_together, wait

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

    from ferrohook.service import Answer


class Recorder(nn.Module):
    """Doubles numbers; records the batches, blocks in them while it is shut, and fails for -1."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[list[int]] = []
        self.entered = threading.Semaphore(0)
        self.open = threading.Event()
        self.open.set()

    def forward(self, x: Tensor) -> Tensor:
        self.batches.append(x.int().tolist())
        self.entered.release()
        wait(self.open)
        if -1 in x:
            msg = "-1 is in the batch"
            raise ArithmeticError(msg)
        return x * 2


def split(output: Tensor, rows: slice) -> list[float]:
    return output[rows].tolist()


@pytest.fixture
def model() -> Recorder:
    return Recorder()


@pytest.fixture
def make(model: Recorder) -> Iterator[Callable[..., Batcher[Tensor, list[float]]]]:
    """Makes batchers of the model that are closed after the test."""
    made = []

    def make(**options: Any) -> Batcher[Tensor, list[float]]:
        made.append(Batcher(model, torch.cat, split, **{"max_wait": LIMIT, **options}))
        return made[-1]

    yield make
    model.open.set()
    for batcher in made:
        batcher.close()


def number(value: float, rows: int = 1) -> Tensor:
    return torch.full((rows,), float(value))


def send(
    batcher: Batcher[Tensor, list[float]], value: float, rows: int = 1, **options: Any
) -> Future[Answer[list[float]]]:
    return batcher.submit(number(value, rows), rows=rows, **options)


def block(model: Recorder, batcher: Batcher[Tensor, list[float]]) -> Future[Any]:
    """Occupies the worker with a forward of 0 until `model.open` is set; what comes now waits."""
    model.open.clear()
    first = send(batcher, 0, alone=True)
    assert model.entered.acquire(timeout=LIMIT)
    return first


def test_requests_share_a_forward_and_get_their_rows(make: Any, model: Recorder) -> None:
    batcher = make(max_requests=3)
    futures = [send(batcher, value, rows) for value, rows in ((1, 1), (2, 3), (3, 2))]
    answers = [future.result(LIMIT) for future in futures]
    assert [each.value for each in answers] == [[2.0], [4.0] * 3, [6.0] * 2]
    assert [each.shared for each in answers] == [3, 3, 3]
    assert [each.request for each in answers] == [None] * 3
    assert model.batches == [[1, 2, 2, 2, 3, 3]]
    assert batcher.snapshot()["sizes"] == {3: 1}


@pytest.mark.parametrize(
    ("limits", "batches"),
    [
        ({"max_requests": 2}, [[1, 1, 2], [3, 3, 3, 4]]),
        ({"max_rows": 3}, [[1, 1, 2], [3, 3, 3], [4]]),
        ({"max_rows": 4}, [[1, 1, 2], [3, 3, 3, 4]]),
        # Lengths are 2, 5, 1 and 1: padded, the first two have 3 * 5 tokens.
        ({"max_tokens": 14}, [[1, 1], [2], [3, 3, 3, 4]]),
        ({"max_tokens": 15}, [[1, 1, 2], [3, 3, 3, 4]]),
        ({"max_rows": 1}, [[1, 1], [2], [3, 3, 3], [4]]),  # what exceeds a limit goes alone
        ({}, [[1, 1, 2, 3, 3, 3, 4]]),
    ],
    ids=str,
)
def test_a_forward_stays_within_the_limits(
    make: Any, model: Recorder, limits: dict[str, int], batches: list[list[int]]
) -> None:
    batcher = make(max_wait=0.0, **limits)
    block(model, batcher)
    futures = [
        send(batcher, value, rows, length=length)
        for value, rows, length in ((1, 2, 2), (2, 1, 5), (3, 3, 1), (4, 1, 1))
    ]
    model.open.set()
    for future in futures:
        future.result(LIMIT)
    assert model.batches[1:] == batches


@pytest.mark.parametrize(
    "options", [{"max_requests": 1}, {"max_rows": 1}, {"max_tokens": 1}, {"max_wait": 0.001}]
)
def test_a_request_waits_no_longer_than_it_may(make: Any, options: dict[str, Any]) -> None:
    assert send(make(**options), 1).result(LIMIT).shared == 1


def test_a_request_alone_does_not_wait_and_does_not_share(make: Any, model: Recorder) -> None:
    batcher = make(max_wait=0.0)
    block(model, batcher)
    futures = [send(batcher, value, alone=value == 2) for value in (1, 2, 3, 4)]
    model.open.set()
    assert [future.result(LIMIT).shared for future in futures] == [1, 1, 2, 2]
    assert send(make(), 5, alone=True).result(LIMIT).shared == 1


def test_clients_take_turns(make: Any, model: Recorder) -> None:
    batcher = make(max_requests=2, max_wait=0.0)
    block(model, batcher)
    many = [send(batcher, value, client="many") for value in (1, 2, 3, 4)]
    few = [send(batcher, value, client="few") for value in (5, 6)]
    model.open.set()
    for future in (*many, *few):
        future.result(LIMIT)
    assert model.batches[1:] == [[1, 5], [2, 6], [3, 4]]


def test_a_large_request_is_not_overtaken(make: Any, model: Recorder) -> None:
    batcher = make(max_rows=4, max_wait=0.0)
    block(model, batcher)
    futures = [send(batcher, value, rows) for value, rows in ((1, 1), (2, 4), (3, 1), (4, 1))]
    model.open.set()
    for future in futures:
        future.result(LIMIT)
    assert model.batches[1:] == [[1], [2] * 4, [3, 4]]


# Leaving


def test_a_cancelled_request_leaves(make: Any, model: Recorder) -> None:
    batcher = make(max_wait=0.0)
    first = block(model, batcher)
    futures = [send(batcher, value) for value in (1, 2, 3)]
    assert futures[1].cancel()
    assert batcher.snapshot()["waiting"] == 2
    assert not first.cancel()  # its forward has begun
    model.open.set()
    assert [futures[place].result(LIMIT).shared for place in (0, 2)] == [2, 2]
    assert first.result(LIMIT).value == [0.0]
    with pytest.raises(CancelledError):
        futures[1].result(LIMIT)
    assert concurrent.futures.wait(futures, LIMIT).not_done == set()
    assert model.batches == [[0], [1, 3]]


def test_the_last_request_leaves_while_the_batch_is_gathered(make: Any, model: Recorder) -> None:
    batcher = make(max_requests=2)
    assert send(batcher, 1).cancel()
    both = [send(batcher, value) for value in (2, 3)]
    assert [future.result(LIMIT).shared for future in both] == [2, 2]
    assert model.batches == [[2, 3]]


def test_a_cancelled_task_leaves(make: Any, model: Recorder) -> None:
    batcher = make(max_wait=0.0)

    async def requests() -> None:
        block(model, batcher)
        tasks = [asyncio.create_task(batcher.run(number(value))) for value in (1, 2)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]
        model.open.set()
        answer = await asyncio.wait_for(tasks[1], LIMIT)
        assert (answer.value, answer.shared) == ([4.0], 1)

    asyncio.run(requests())
    assert model.batches == [[0], [2]]


def test_the_event_loop_runs_during_a_forward(make: Any, model: Recorder) -> None:
    async def requests() -> None:
        model.open.clear()
        task = asyncio.create_task(make(max_wait=0.0).run(number(1)))
        assert await asyncio.to_thread(model.entered.acquire, timeout=LIMIT)
        assert not task.done()
        model.open.set()
        assert (await asyncio.wait_for(task, LIMIT)).value == [2.0]

    asyncio.run(requests())


def test_a_request_whose_deadline_passes_leaves(make: Any, model: Recorder) -> None:
    batcher = make(max_wait=0.0)
    block(model, batcher)
    with deadline(0.0):
        late = send(batcher, 1)
    with deadline(LIMIT):
        early = [send(batcher, value) for value in (2, 3)]
    model.open.set()
    with pytest.raises(TimeoutError, match=r"deadline exceeded: this call had 0\.0 s"):
        late.result(LIMIT)
    assert [future.result(LIMIT).shared for future in early] == [2, 2]
    assert model.batches == [[0], [2, 3]]


def test_a_deadline_ends_the_wait_for_others(make: Any, model: Recorder) -> None:
    batcher = make(max_wait=math.inf)
    with deadline(LIMIT):
        send(batcher, 1)
    with deadline(6.0):
        answers = [send(batcher, 2), send(batcher, 3)]
    assert [future.result(LIMIT).shared for future in answers] == [3, 3]
    assert model.batches == [[1, 2, 3]]


def test_a_forward_has_the_latest_deadline_of_its_requests(make: Any, model: Recorder) -> None:
    batcher = make(max_requests=2)
    until = threading.Event()

    def late(*_args: object) -> None:
        until.wait(0.2)  # longer than the first deadline

    with (
        fh.register(model, "", late, phase="forward_pre"),
        fh.register(model, "", check_deadline, phase="forward_pre"),
    ):
        with deadline(0.1):
            first = send(batcher, 1)
        with deadline(LIMIT):
            second = send(batcher, 2)
        with pytest.raises(TimeoutError):
            first.result(LIMIT)
        assert second.result(LIMIT).value == [4.0]


# Failing


def test_a_failing_request_fails_alone(
    make: Any, model: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    batcher = make(max_requests=3)
    futures = [send(batcher, value) for value in (1, -1, 2)]
    assert [futures[place].result(LIMIT).value for place in (0, 2)] == [[2.0], [4.0]]
    with pytest.raises(ArithmeticError, match="-1 is in the batch"):
        futures[1].result(LIMIT)
    assert model.batches == [[1, -1, 2], [1], [-1], [2]]
    (logged,) = caplog.messages
    assert logged.startswith(
        "a forward of 3 requests failed, so each of them runs separately: ArithmeticError("
    )


@pytest.mark.parametrize("error", [ArithmeticError, SystemExit])
def test_a_failing_split_or_collate_fails_its_request_alone(error: type[BaseException]) -> None:
    def fail_for_one(value: Tensor) -> Tensor:
        if value.numel() == 1 and value == 1:
            raise error
        return value

    for options in (
        {"collate": torch.cat, "split": lambda output, rows: fail_for_one(output[rows])},
        {"collate": lambda items: fail_for_one(torch.cat(items)), "split": split},
    ):
        with Batcher(nn.Identity(), **options, max_requests=2, max_wait=LIMIT) as batcher:  # type: ignore[arg-type]
            # Of a forward alone: a collate that fails for both is repeated for each.
            futures = [send(batcher, value, alone=True) for value in (1, 2)]
            with pytest.raises(error):
                futures[0].result(LIMIT)
            assert futures[1].result(LIMIT).shared == 1


def test_arguments_of_the_model() -> None:
    def model(*args: float, **kwargs: float) -> Any:
        return args, kwargs

    for arguments, expected in (
        ((1, 2), ((1, 2), {})),
        ({"x": 3}, ((), {"x": 3})),
        (4, ((4,), {})),
    ):
        collate = partial(lambda arguments, _items: arguments, arguments)
        with Batcher(model, collate, lambda output, _rows: output, max_wait=0.0) as batcher:
            assert batcher.submit(None).result(LIMIT).value == expected


def test_forwards_record_no_gradients() -> None:
    layer = nn.Linear(1, 1)
    with Batcher(layer, torch.cat, lambda output, rows: output[rows], max_wait=0.0) as batcher:
        for alone in (False, True):
            answer = batcher.submit(torch.ones(1, 1), alone=alone).result(LIMIT)
            assert not answer.value.requires_grad


@pytest.mark.parametrize(
    ("options", "error", "reason"),
    [
        ({"model": 3}, fh.HookTypeError, "model must be callable, got int"),
        ({"split": None}, fh.HookTypeError, "split must be callable, got NoneType"),
        ({"max_requests": 0}, ValueError, "max_requests must be at least 1, got 0"),
        ({"max_tokens": 2.5}, fh.HookTypeError, "max_tokens must be an int, got float"),
        ({"max_wait": -1}, ValueError, "max_wait must be at least 0 seconds, got -1"),
        ({"max_wait": float("nan")}, ValueError, "max_wait must be at least 0 seconds, got nan"),
        ({"max_wait": "1"}, fh.HookTypeError, "max_wait must be a number of seconds, got str"),
        ({"max_wait": True}, fh.HookTypeError, "max_wait must be a number of seconds, got bool"),
        ({"workers": 0}, ValueError, "workers must be at least 1, got 0"),
    ],
    ids=str,
)
def test_bad_arguments_are_refused(options: Any, error: Any, reason: str) -> None:
    with pytest.raises(error, match=reason):
        Batcher(**{"model": nn.Identity(), "collate": torch.cat, "split": split, **options})


def test_bad_sizes_are_refused(make: Any) -> None:
    batcher = make()
    for options, error in (({"rows": 0}, ValueError), ({"length": "3"}, fh.HookTypeError)):
        with pytest.raises(error):
            batcher.submit(number(1), **options)
    with pytest.raises(fh.HookTypeError, match="open_request must be callable, got Plan"):
        batcher.submit(number(1), fh.Plan())
    assert batcher.snapshot()["waiting"] == 0


@pytest.mark.parametrize("said", [1, 3])
def test_wrong_numbers_of_rows_are_refused(make: Any, model: Recorder, said: int) -> None:
    batcher = make(max_requests=2)
    futures = [send(batcher, 1), batcher.submit(number(2, 2), rows=said)]
    with pytest.raises(
        fh.errors.RowsError, match=rf"returned \(2,\) for items with {said} rows in dimension 0"
    ):
        futures[1].result(LIMIT)
    assert futures[0].result(LIMIT).value == [2.0]
    assert model.batches == [[1]]


# Scopes of the caller


def test_a_request_inside_a_scope_is_computed_alone_with_its_hooks(
    make: Any, model: Recorder
) -> None:
    batcher = make(max_requests=2)

    def add_one(_module: object, _args: object, output: Tensor) -> Tensor:
        return output + 1

    with fh.scope() as scope:
        fh.register(model, "", add_one, scope=scope)
        inside = send(batcher, 1)
        assert inside.result(LIMIT).value == [3.0]
        assert inside.result(LIMIT).shared == 1


# The end


def test_closing_answers_what_waits(make: Any, model: Recorder) -> None:
    batcher = make()
    futures = [send(batcher, value) for value in (1, 2)]
    batcher.close()
    assert [future.result(0).value for future in futures] == [[2.0], [4.0]]
    batcher.close()
    with pytest.raises(BatcherClosedError, match="the batcher is closed"):
        send(batcher, 3)


def test_closing_refuses_what_waits(make: Any, model: Recorder) -> None:
    batcher = make(max_wait=0.0)
    first = block(model, batcher)
    futures = [send(batcher, value) for value in (1, 2)]
    closing = threading.Thread(target=partial(batcher.close, refuse=True))
    closing.start()
    for future in futures:
        with pytest.raises(BatcherClosedError):
            future.result(LIMIT)
    model.open.set()
    closing.join(LIMIT)
    assert not closing.is_alive()
    assert first.result(0).value == [0.0]
    assert model.batches == [[0]]


def test_a_dropped_batcher_answers_what_waits_and_is_freed(model: Recorder) -> None:
    batcher = Batcher(model, torch.cat, split, max_wait=0.0)
    first = block(model, batcher)
    second = send(batcher, 1)
    gone = weakref.ref(batcher)
    del batcher
    model.open.set()
    assert second.result(LIMIT).value == [2.0]
    del first, second
    until = time.monotonic() + LIMIT
    while gone() is not None:  # its worker still leaves
        gc.collect()
        assert time.monotonic() < until


def test_a_process_ends_without_closing() -> None:
    program = """
from ferrohook.service import Batcher
def split(output, rows):
    time.sleep(0.1)  # the main thread has ended when the next is taken
    print(f"{output[rows].item()}\\n", end="")  # one write: workers print at the same time
batcher = Batcher(torch.nn.Identity(), torch.cat, split, max_requests=1, max_wait=0, workers=2)
for number in range(5):
    batcher.submit(torch.full((1,), number))
"""
    done = run_with_torch(program)
    assert sorted(done.stdout.split()) == [f"{number}" for number in range(5)]
    assert done.stderr == ""


# Threads


@pytest.mark.parametrize("workers", [1, 3])
def test_threads_get_their_own_answers(make: Any, workers: int) -> None:
    batcher = make(max_requests=4, max_wait=0.0005, workers=workers)
    requests = 300

    def work(thread: int) -> int:
        cancelled = 0
        for turn in range(requests):
            value, rows = thread * requests + turn, 1 + turn % 3
            future = send(batcher, value, rows, client=thread, alone=turn % 7 == 0)
            if turn % 5 == 0 and future.cancel():
                cancelled += 1
                continue
            assert future.result(LIMIT).value == [2.0 * value] * rows
        return cancelled

    cancelled = sum(in_threads(6, work))
    counted = batcher.snapshot()
    assert sum(size * times for size, times in counted["sizes"].items()) == 6 * requests - cancelled
    assert max(counted["sizes"]) <= 4
    assert counted["waiting"] == 0


def test_closing_while_threads_submit_answers_or_refuses_each(model: Recorder) -> None:
    for refuse in (False, True):
        batcher = Batcher(model, torch.cat, split, max_requests=3, max_wait=0.001, workers=2)

        def work(batcher: Batcher[Tensor, list[float]] = batcher) -> None:
            value = 0
            while True:
                value += 1
                try:
                    answer = send(batcher, value).result(LIMIT)
                except BatcherClosedError:
                    return
                assert answer.value == [2.0 * value]

        def close(batcher: Any = batcher, *, refuse: bool = refuse) -> None:
            while batcher.snapshot()["sizes"].total() < 20:
                pass
            batcher.close(refuse=refuse)

        run_together(*[work] * 4, close)


# The line


TICKETS = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.integers(1, 5),
        st.integers(1, 5),
        st.sampled_from([False] * 4 + [True]),
    ),
    max_size=30,
)


@given(TICKETS, st.integers(1, 4), st.integers(1, 8), st.integers(1, 20), st.data())
@settings(deadline=None, max_examples=200)
def test_the_line_loses_nobody_and_lets_nobody_overtake(
    sizes: list[tuple[int, int, int, bool]],
    requests: int,
    rows: int,
    tokens: int,
    data: st.DataObject,
) -> None:
    limits = BatchLimits(max_requests=requests, max_rows=rows, max_tokens=tokens)
    line: Line[int] = Line(limits)
    tickets = [
        WaitingRequest(
            item=n, open_request=None, client=client, rows=rows, length=length, alone=alone
        )
        for n, (client, rows, length, alone) in enumerate(sizes)
    ]
    for ticket in tickets:
        line.append(ticket)
    left = [ticket for ticket in tickets if data.draw(st.integers(0, 5)) == 0]
    for ticket in left:
        assert line.remove(ticket.future)
        assert not line.remove(ticket.future)
    waiting = [ticket for ticket in tickets if ticket not in left]
    assert len(line) == len(waiting)
    taken: list[WaitingRequest[int]] = []
    while line:
        was_full = line.full
        batch = line.take()
        longest = max(each.length for each in batch)
        size = (len(batch), sum(each.rows for each in batch), longest)
        assert len(batch) == 1 or not (
            limits.exceeded_by(*size) or any(each.alone for each in batch)
        )
        if line and not was_full:  # what ended the batch had said so before
            pytest.fail("the batch ended early")
        # No client gets a second place while another one waits.
        clients = [each.client for each in batch]
        behind = {each.client for each in waiting} - set(clients)
        assert not behind or len(clients) == len(set(clients))
        taken += batch
        waiting = [each for each in waiting if each not in batch]
    assert line.take() == []
    assert {each.item for each in taken} == {each.item for each in tickets} - {
        each.item for each in left
    }
    for client in range(4):
        own = [each.item for each in taken if each.client == client]
        assert own == sorted(own)


def test_a_request_may_raise_what_no_coroutine_may() -> None:
    def stop(_output: Tensor, _rows: slice) -> list[float]:
        raise StopIteration

    async def run() -> None:
        with Batcher(nn.Identity(), torch.cat, stop, max_wait=0.0) as batcher:
            await asyncio.wait_for(batcher.run(number(1)), LIMIT)

    with pytest.raises(RuntimeError, match=r"the request raised StopIteration\(\)"):
        asyncio.run(run())

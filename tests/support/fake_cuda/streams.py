"""Streams and events of the emulated GPU: queues of work, and points in them."""

from __future__ import annotations

import collections
import itertools
import threading
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch

from support.fake_cuda.schedules import Schedule
from support.fake_cuda.waits import Waits

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.fake_cuda.graphs import Recording

GPU = torch.device("cuda", 0)


class Kernel(NamedTuple):
    """Work that runs once all work before it in its stream has."""

    run: Callable[[], object]
    label: str


class Sleep(NamedTuple):
    """Work that lasts until the host waits for it, of `torch.cuda._sleep`."""


class Point:
    """A point in a stream, that an event recorded."""

    def __init__(self, stream: Stream, recording: Recording | None) -> None:
        self.stream = stream
        self.recording = recording
        """The graph being captured that it is part of."""
        self.passed = False


class WaitFor(NamedTuple):
    """Work of a stream that waits for a point of another."""

    point: Point


Work = Kernel | Sleep | Point | WaitFor


class Timeline:
    """All streams of the process, and who runs when."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.open = False
        self.schedule = Schedule("eager")
        self.waits = Waits()
        self.recording: Recording | None = None
        """The graph that is being captured."""
        self._streams: weakref.WeakSet[Stream] = weakref.WeakSet()
        self._local = threading.local()
        self.default = Stream(timeline=self)

    @property
    def current(self) -> Stream:
        """The current stream of this thread."""
        stream: Stream = getattr(self._local, "stream", self.default)
        return stream

    @current.setter
    def current(self, stream: Stream) -> None:
        self._local.stream = stream

    @property
    def streams(self) -> list[Stream]:
        """All streams, in the order in which they were made."""
        return sorted(self._streams, key=lambda each: each.cuda_stream)

    def add(self, stream: Stream) -> None:
        """Adds a stream."""
        self._streams.add(stream)

    def advance(self) -> None:
        """Runs as much as the schedule lets run now."""
        while stream := self.schedule.pick([each for each in self.streams if each.ready]):
            stream.step()

    def wait(self, what: str, *streams: Stream, hidden: bool = True) -> None:
        """Lets the host wait until streams have run.

        Args:
            what: operator or function that waits.
            streams: streams; the current one by default.
            hidden: see `Waits.note`.
        """
        self.refuse_in_capture(what)
        self.waits.note(what, hidden=hidden)
        for stream in streams or (self.current,):
            stream.drain()

    def refuse_in_capture(self, what: str) -> None:
        """Ends the capture of a graph with an error: it forbids the current operation."""
        if self.recording is not None:
            msg = f"CUDA error: operation not permitted when stream is capturing: {what}"
            self.recording.error = msg
            raise RuntimeError(msg)


class Stream:
    """A stream, with the names of `torch.cuda.Stream`."""

    _numbers = itertools.count(1)
    device = GPU
    device_index = 0
    device_type = 1

    def __init__(self, *_: Any, timeline: Timeline | None = None, **__: Any) -> None:
        self._timeline = TIMELINE if timeline is None else timeline
        self.cuda_stream = self.stream_id = next(Stream._numbers)
        self._queue: collections.deque[Work] = collections.deque()
        self._before: list[Stream] = []
        self._timeline.add(self)

    def __repr__(self) -> str:
        return f"<emulated stream {self.cuda_stream}, {len(self._queue)} queued>"

    def push(self, work: Work) -> None:
        """Enqueues work, or adds it to the graph that the stream is being captured into."""
        timeline = self._timeline
        with timeline.lock:
            recording = timeline.recording
            if recording is not None and recording.takes(self, work):
                return
            self._queue.append(work)
            timeline.advance()

    def append(self, work: Work) -> None:
        """Enqueues work and runs none: for finalisers, which may run anywhere."""
        with self._timeline.lock:
            self._queue.append(work)

    @property
    def ready(self) -> bool:
        """True if the next work can run."""
        if not self._queue:
            return False
        work = self._queue[0]
        return not isinstance(work, Sleep) and not (
            isinstance(work, WaitFor) and not work.point.passed
        )

    def step(self) -> None:
        """Runs the next work, and work that it waits for."""
        work = self._queue[0]
        if isinstance(work, WaitFor):
            while not work.point.passed:
                work.point.stream.step()
        if self._queue and self._queue[0] is work:
            self._queue.popleft()
        if isinstance(work, Kernel):
            work.run()
        elif isinstance(work, Point):
            work.passed = True

    def drain(self) -> None:
        """Runs all work."""
        with self._timeline.lock:
            while self._queue:
                self.step()

    def synchronize(self) -> None:
        self._timeline.wait("Stream.synchronize", self, hidden=False)

    def query(self) -> bool:
        self._timeline.refuse_in_capture("Stream.query")
        return not self._queue

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        if (point := event.checked_point) is not None:
            self.push(WaitFor(point))

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def __enter__(self) -> Self:
        self._before.append(self._timeline.current)
        self._timeline.current = self
        return self

    def __exit__(self, *_: object) -> None:
        self._timeline.current = self._before.pop()


class Event:
    """An event, with the names of `torch.cuda.Event`."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.point: Point | None = None

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or TIMELINE.current
        recording = TIMELINE.recording
        captured = recording is not None and stream in recording.streams
        self.point = Point(stream, recording if captured else None)
        stream.push(self.point)

    @property
    def checked_point(self) -> Point | None:
        """The point; an event that is part of a graph has none outside of its capture."""
        point = self.point
        if point is not None and point.recording not in {None, TIMELINE.recording}:
            msg = "CUDA error: operation not permitted on an event last recorded in a capture"
            raise RuntimeError(msg)
        return point

    def query(self) -> bool:
        TIMELINE.refuse_in_capture("Event.query")
        point = self.checked_point
        return point is None or point.passed

    def synchronize(self) -> None:
        TIMELINE.refuse_in_capture("Event.synchronize")
        point = self.checked_point
        with TIMELINE.lock:
            if point is None or point.passed:
                return
            TIMELINE.waits.note("Event.synchronize", hidden=False)
            while not point.passed:
                point.stream.step()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or TIMELINE.current).wait_event(self)

    def elapsed_time(self, _other: Event) -> float:
        return 0.0


TIMELINE = Timeline()
"""The GPU's; as with a real one, streams outlive the tests that made them."""

"""CUDA graphs of the emulated GPU: work that is recorded, and replayed in that order."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from support.fake_cuda.streams import TIMELINE, Point, Stream, WaitFor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.fake_cuda.streams import Work


class Recording:
    """A capture that is going on: the streams that take part, and the work."""

    def __init__(self, origin: Stream) -> None:
        self.origin = origin
        self.streams = {origin}
        self.work: list[Work] = []
        self.error: str | None = None
        """Error that has ended it, although the host may go on."""
        self._unjoined: set[Stream] = set()
        """Streams with work that the origin has not waited for."""

    def takes(self, stream: Stream, work: Work) -> bool:
        """Returns True for work of a stream that is captured, which is recorded, not run."""
        if isinstance(work, WaitFor) and work.point.recording is self:
            if stream is self.origin:
                self._unjoined.discard(work.point.stream)
            else:
                self.streams.add(stream)
                self._unjoined.add(stream)
            return True
        if stream not in self.streams:
            return False
        if isinstance(work, WaitFor):
            self.error = "CUDA error: dependency created on uncaptured work in another stream"
            raise RuntimeError(self.error)  # noqa: TRY004 (CUDA's)
        if not isinstance(work, Point):  # the recorded order is the one of all points
            self.work.append(work)
            if stream is not self.origin:
                self._unjoined.add(stream)
        return True

    def finish(self) -> list[Work]:
        """Returns the work.

        Raises:
            RuntimeError: the capture was ended by an error, or a stream has not joined the origin.
        """
        if self.error is not None:
            msg = (
                f"CUDA error: operation failed due to a previous error during capture: {self.error}"
            )
            raise RuntimeError(msg)
        if self._unjoined:
            msg = "CUDA error: capturing stream has unjoined work"
            raise RuntimeError(msg)
        return self.work


class Graph:
    """A graph, with the names of `torch.cuda.CUDAGraph`; pools of memory are not emulated."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._work: list[Work] = []

    def replay(self) -> None:
        stream = TIMELINE.current
        for work in self._work:
            stream.push(work)

    def reset(self) -> None:
        self._work = []

    @contextlib.contextmanager
    def capture(self, stream: Stream | None) -> Iterator[None]:
        """Records the work that the block enqueues."""
        TIMELINE.wait("torch.cuda.graph", *TIMELINE.streams, hidden=False)
        with stream or Stream() as origin:
            recording = TIMELINE.recording = Recording(origin)
            try:
                yield
            finally:
                TIMELINE.recording = None
        self._work = recording.finish()


def capture(graph: Graph, pool: object = None, stream: Stream | None = None, **_: Any) -> Any:
    """Captures a graph, as `torch.cuda.graph` does."""
    del pool
    return graph.capture(stream)

"""A server of HTTP in this process."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING

from examples.service.server import Server
from support.limits import LIMIT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from starlette.types import ASGIApp


@contextlib.contextmanager
def serving_app(app: ASGIApp, seconds: float = LIMIT) -> Iterator[str]:
    """Serves an app on a free port; yields its address.

    Args:
        app: the app.
        seconds: time limit for the headers of a request.
    """
    server = Server(app, grace=0.0, seconds=seconds, port=0, log_config=None, access_log=False)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        until = time.monotonic() + LIMIT
        while not server.started:
            assert thread.is_alive()
            assert time.monotonic() < until
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(LIMIT)
        assert not thread.is_alive()

"""A web server on this machine that misbehaves as it is told."""

from __future__ import annotations

import contextlib
import http.server
import threading
from collections.abc import Callable, Iterator


class FileServer:
    """Serves `files` by name.

    Attributes:
        address: of its folder.
        files: what it has.
        ranges: whether it answers requests for a part of a file.
        breaks: after how many bytes each of the next connections ends, in order; -1: it is refused as busy.
        halfway: called once in the middle of an answer.
        asked: (name, Range header) of each request.
    """

    def __init__(self, port: int) -> None:
        self.address = f"http://127.0.0.1:{port}/mirror"
        self.files: dict[str, bytes] = {}
        self.ranges = True
        self.breaks: list[int] = []
        self.halfway: Callable[[], None] | None = None
        self.asked: list[tuple[str, str | None]] = []


@contextlib.contextmanager
def file_server() -> Iterator[FileServer]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name, asked = self.path.rpartition("/")[2], self.headers.get("Range")
            state.asked.append((name, asked))
            limit = state.breaks.pop(0) if state.breaks else None
            if limit == -1 or name not in state.files:
                self.send_error(404 if limit != -1 else 503)
                return
            whole = state.files[name]
            begin = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and state.ranges else 0
            if begin >= len(whole):
                self.send_error(416)
                return
            self.send_response(206 if asked and state.ranges else 200)
            if asked and state.ranges:
                self.send_header("Content-Range", f"bytes {begin}-{len(whole) - 1}/{len(whole)}")
            body = whole[begin:]
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            body = body[:limit]
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            if state.halfway is not None:
                state.halfway, call = None, state.halfway
                call()
            with contextlib.suppress(ConnectionError):
                self.wfile.write(body[len(body) // 2 :])

        def log_message(self, *arguments: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        state = FileServer(server.server_address[1])
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield state
        finally:
            server.shutdown()
            thread.join()

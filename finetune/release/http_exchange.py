"""One exchange with a server over HTTP, with one deadline for all of it and a bound on its bytes.

A timeout of a socket starts again with every byte that arrives, so a server that sends one now and then would hold a
caller for ever: in its headers, in its body, or in the body of an error. Here the connection is shut down at the
deadline, whatever it is doing, and what waits for it raises TimeoutError. Used for judges, for vLLM as a sampler, and
for `chat --url` and `verify --url`. No redirects: they would take the key and the texts to a server that nobody named.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import partial
from typing import Any

_ERROR_BYTES = 2000  # of the body of an error, which is shown


class StatusError(Exception):
    """A status that is no success."""

    def __init__(self, code: int, text: str):
        super().__init__(code, text)
        self.code, self.text = code, text


class TooLargeError(Exception):
    """More bytes than the caller takes."""


class Deadline:
    """Shuts connections down when its seconds are over; `extend` begins them again."""

    def __init__(self, seconds: float):
        self._seconds, self._sockets = max(0.0, seconds), list[socket.socket]()
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self.extend()

    @property
    def left(self) -> float:
        return self._end - time.monotonic()

    def extend(self) -> None:
        self._end = time.monotonic() + self._seconds
        if self._timer is not None:
            self._timer.cancel()
        self._timer = threading.Timer(self._seconds, self._shut_down)
        self._timer.daemon = True
        self._timer.start()

    def watch(self, connection: socket.socket) -> None:
        # A copy: TLS takes the descriptor of the socket that it wraps.
        with self._lock:
            self._sockets.append(connection.dup())
        if self.left <= 0:  # of several addresses a later one was reached after the timer
            self._shut_down()

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        with self._lock:
            for one in self._sockets:
                one.close()
            self._sockets.clear()

    def _shut_down(self) -> None:
        with self._lock:
            for one in self._sockets:
                with contextlib.suppress(OSError):  # the other end is gone already
                    one.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def response(
    url: str, data: bytes | None, headers: dict[str, str], deadline: Deadline
) -> Iterator[http.client.HTTPResponse]:
    """Yields the response to a request. Raises TimeoutError at the deadline, StatusError, OSError for a connection that
    fails, and HTTPException for what is not HTTP."""
    opener = urllib.request.build_opener(_Handler(deadline), _NoRedirect)
    try:
        if deadline.left <= 0:
            raise TimeoutError
        with opener.open(urllib.request.Request(url, data, headers), timeout=deadline.left) as opened:
            yield opened
    except urllib.error.HTTPError as error:
        with error:
            raise StatusError(error.code, _text_of(error)) from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None)
        if deadline.left <= 0 or isinstance(error, TimeoutError) or isinstance(reason, TimeoutError):
            raise TimeoutError from None
        raise
    finally:
        deadline.end()


def content(url: str, data: bytes | None, headers: dict[str, str], seconds: float, most_bytes: int) -> bytes:
    """Returns the body of a response. Raises as `response`, and TooLargeError."""
    deadline = Deadline(seconds)
    with response(url, data, headers, deadline) as opened:
        read = opened.read(most_bytes + 1)
        if len(read) > most_bytes:
            raise TooLargeError(f"more than {most_bytes:,} bytes")
        expected = opened.headers.get("Content-Length", "")
        if deadline.left <= 0:  # shut down in the body, which may look as if it had ended
            raise TimeoutError
        if expected.isdecimal() and len(read) < int(expected):
            raise http.client.IncompleteRead(read, int(expected) - len(read))
        return read


def _text_of(error: urllib.error.HTTPError) -> str:
    """Returns the beginning of an error's body; what can be read of it, if the server stalls or resets."""
    try:
        return error.read(_ERROR_BYTES).decode("utf-8", "replace")
    except (OSError, http.client.HTTPException):
        return ""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


class _Handler(urllib.request.HTTPSHandler, urllib.request.HTTPHandler):
    """Opens connections that a deadline watches, those to proxies as well."""

    def __init__(self, deadline: Deadline):
        super().__init__()
        self._deadline = deadline

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(partial(self._connection, http.client.HTTPConnection), req)  # pyright: ignore[reportArgumentType]

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(partial(self._connection, http.client.HTTPSConnection), req)  # pyright: ignore[reportArgumentType]

    def _connection(self, kind: Any, host: str, **arguments: Any) -> Any:
        connection = kind(host, **arguments)
        # The function by which http.client connects, before TLS and a proxy's CONNECT: it has no public one.
        connection._create_connection = self._connect
        return connection

    def _connect(self, *arguments: Any, **named: Any) -> socket.socket:
        connection = socket.create_connection(*arguments, **named)
        self._deadline.watch(connection)
        return connection

"""Names of a server of this machine: what `serve`, `studio` and `report --watch` allow in a request's header `Host`.

A web page may use a name that resolves to this machine (DNS rebinding); its requests have that name as their `Host`.
Imports nothing heavy.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
from collections.abc import Callable, Collection
from typing import Any

LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")  # names of a server reachable from this machine only
ANY_ADDRESS = "any address"  # among the names of a server that listens on all addresses


def host_name(header: str) -> str:
    """Returns the name in a request's header `Host`, in lower case and without its port.

    >>> host_name("[::1]:8000"), host_name("Localhost:8000"), host_name("[::1].evil.example")
    ('::1', 'localhost', '[::1].evil.example')
    """
    match = re.fullmatch(r"(?:\[([^\[\]]*)\]|([^\[\]:]*))(?::\d*)?", header.strip().lower())
    return header if match is None else match[1] or match[2]


def is_allowed_host(header: str, hosts: Collection[str] = LOCAL_HOSTS) -> bool:
    """Returns whether a request's `Host` is one of the names, with or without a port; "*" in hosts allows any."""
    name = host_name(header)
    if name in hosts or "*" in hosts:
        return True
    with contextlib.suppress(ValueError):
        return ANY_ADDRESS in hosts and bool(ipaddress.ip_address(name))
    return False


class HostCheck:
    """Middleware (ASGI) that refuses requests for a server of another name. refusal: the response for the name that
    was asked for."""

    def __init__(self, app: Any, hosts: Collection[str], refusal: Callable[[str], Any]):
        self._app, self._hosts, self._refusal = app, hosts, refusal

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            names = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
            if len(names) != 1 or not is_allowed_host(names[0], self._hosts):
                await self._refusal(", ".join(names)[:100])(scope, receive, send)
                return
        await self._app(scope, receive, send)

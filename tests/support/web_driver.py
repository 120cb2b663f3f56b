"""A headless Chromium through chromedriver, by the W3C's protocol (https://www.w3.org/TR/webdriver2/)."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-component-update",
)
_FLAGS += ("--disable-background-networking", "--disable-sync")


class Chromium:
    """A page. Scripts are bodies of functions, as in `return document.title`."""

    def __init__(self, port: int, profile: Path, width: int):
        self._port, self._session = port, ""
        flags = [*_FLAGS, f"--user-data-dir={profile}", f"--window-size={width},900"]
        settings = {"binary": CHROMIUM, "args": flags}
        wanted = {"browserName": "chrome", "goog:chromeOptions": settings, "goog:loggingPrefs": {"browser": "ALL"}}
        made = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._session = f"/session/{made['sessionId']}"

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=120)
        with contextlib.closing(connection):
            connection.request(method, self._session + path, None if body is None else json.dumps(body))
            answer = connection.getresponse()
            value = json.loads(answer.read())["value"]
        assert answer.status == 200, value
        return value

    def open(self, address: str) -> None:
        self._ask("POST", "/url", {"url": address})

    def open_tab(self) -> str:
        """Opens another tab, which is the page from now on; returns the handle of the one before."""
        before = self._ask("GET", "/window")
        self.to_tab(self._ask("POST", "/window/new", {"type": "tab"})["handle"])
        return before

    def to_tab(self, handle: str) -> None:
        self._ask("POST", "/window", {"handle": handle})

    def run(self, script: str, *arguments: Any) -> Any:
        return self._ask("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def until(self, script: str, *arguments: Any) -> Any:
        """Returns what a script returns as soon as it is true; the test's own time limit ends the wait."""
        while not (value := self.run(script, *arguments)):
            time.sleep(0.1)
        return value

    def click(self, selector: str) -> None:
        self._ask("POST", f"/element/{self._find(selector)}/click", {})

    def type(self, selector: str, text: str) -> None:
        self._ask("POST", f"/element/{self._find(selector)}/value", {"text": text})

    def _find(self, selector: str) -> str:
        found = self._ask("POST", "/element", {"using": "css selector", "value": selector})
        return next(iter(found.values()))

    def log(self) -> list[str]:
        """Returns messages of the console since the last call."""
        return [entry["message"] for entry in self._ask("POST", "/se/log", {"type": "browser"})]

    def picture(self) -> bytes:
        return base64.b64decode(self._ask("GET", "/screenshot"))

    def close(self) -> None:
        self._ask("DELETE", "")


@contextlib.contextmanager
def chromium(profile: Path, width: int) -> Iterator[Chromium]:
    """Yields a browser with an empty profile."""
    assert DRIVER is not None
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with subprocess.Popen([DRIVER, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as driver:
        try:
            while True:
                with contextlib.suppress(ConnectionError):
                    socket.create_connection(("127.0.0.1", port)).close()
                    break
                time.sleep(0.05)
            page = Chromium(port, profile, width)
            try:
                yield page
            finally:
                page.close()
        finally:
            driver.terminate()

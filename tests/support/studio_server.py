"""The studio of a folder in this process, and what a browser sends to it."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from finetune.desk.studio.app import build_app

TOKEN = "a-token-of-these-tests"


@dataclass(frozen=True)
class Browser:
    """What a browser sends; `cookie` as the address with the token has set it."""

    port: int
    cookie: str = ""

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, str], str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        given = {
            "Host": f"127.0.0.1:{self.port}",
            "Accept": "text/html",
            **({"Cookie": self.cookie} if self.cookie else {}),
        }
        if method == "POST":
            given |= {"Origin": f"http://127.0.0.1:{self.port}", "Content-Type": "application/json"}
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        content = body if body is None or isinstance(body, str) else json.dumps(body)
        try:
            connection.request(method, path, content, {name: value for name, value in given.items() if value})
            answer = connection.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read().decode()
        finally:
            connection.close()

    def get(self, path: str) -> str:
        status, _, text = self.ask("GET", path)
        assert status == 200, text
        return text

    def post(self, path: str, values: Any) -> Any:
        status, _, text = self.ask("POST", path, values)
        assert status == 200, text
        return json.loads(text)


@contextlib.contextmanager
def served(folder: Path) -> Iterator[int]:
    """The studio of a folder, in this process; yields its port."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        server = uvicorn.Server(uvicorn.Config(build_app(folder, TOKEN, port), log_level="error"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield port
        finally:
            server.should_exit = True
            thread.join()


def ended(browser: Browser, number: int) -> dict[str, Any]:
    """Follows a command as a page does; returns its last answer, with all that it has printed as `text`."""
    text, at = "", 0
    while True:
        said = json.loads(browser.get(f"/jobs/{number}?start={at}"))
        text, at, more = text + said["text"], said["next"], said["next"] > at
        if not said["running"] and not more:
            return {**said, "text": text}
        time.sleep(0.02)

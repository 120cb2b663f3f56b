"""What an OpenAI-compatible server says to `chat --url` and `verify --url` is checked: types, sizes, ends."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from finetune.errors import RunFailure
from finetune.release.inference.sampling import Sampling
from finetune.release.inference.server_client import KEY, Server


class Liar(ThreadingHTTPServer):
    reply: bytes = b""
    status = 200


class Handler(BaseHTTPRequestHandler):
    server: Liar

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        content = self.server.reply.replace(b"KEY", self.headers.get("Authorization", "").encode())
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def liar() -> Iterator[Liar]:
    server = Liar(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def client(liar: Liar) -> Server:
    return Server(f"http://127.0.0.1:{liar.server_port}/v1")


def choice(**keys: Any) -> dict[str, Any]:
    return {"choices": [{"message": {"content": "a"}, "finish_reason": "stop", **keys}], "usage": {"prompt_tokens": 3}}


LIES: dict[str, Any] = {
    "no choices": {},
    "none": {"choices": []},
    "choice as text": {"choices": ["a"]},
    "a list": [1],
    "text as number": choice(message={"content": 5}),
    "text as list": choice(message={"content": ["a"]}),
    "reason as number": choice(finish_reason=5),
    "tokens below 0": {**choice(), "usage": {"prompt_tokens": -1}},
    "tokens as text": {**choice(), "usage": {"prompt_tokens": "3"}},
    "tokens as truth": {**choice(), "usage": {"prompt_tokens": True}},
}


@pytest.mark.parametrize("lie", LIES)
def test_an_answer_is_checked(lie: str, liar: Liar) -> None:
    liar.reply = json.dumps(choice()).encode()
    assert client(liar).answer("m", []).prompt_tokens == 3
    liar.reply = json.dumps(LIES[lie]).encode()
    with pytest.raises(RunFailure, match="does not answer as an OpenAI-compatible server: ") as error:
        client(liar).answer("m", [])
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize(
    "piece",
    [
        b"data: {",
        b'data: {"choices": [5]}',
        b'data: {"choices": [{"delta": {"content": 5}}]}',
        b'data: {"choices": [{"delta": {"reasoning": {"a": 1}}}]}',
        b'data: {"choices": [{"delta": {"content": "a"}}]}',  # without an end
        b"data: " + b"[" * 10**5,
    ],
    ids=range(6),
)
def test_a_stream_is_checked(piece: bytes, liar: Liar) -> None:
    liar.reply = piece + b"\n\n"
    with pytest.raises(RunFailure, match="does not answer as an OpenAI-compatible server: "):
        list(client(liar).stream("m", [], Sampling(max_new_tokens=4)))


def test_an_error_is_one_line_without_the_key(liar: Liar, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, "a-key-of-ours")
    liar.status, liar.reply = 500, b"first\nKEY\nhttps://me:secret@host/x" + b"." * 10_000
    with pytest.raises(RunFailure, match="status 500: first Bearer ") as error:
        client(liar).answer("m", [])
    assert not [part for part in ("a-key-of-ours", "secret", "\n") if part in str(error.value)]
    assert len(str(error.value)) < 400

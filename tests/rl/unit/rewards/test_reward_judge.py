"""Judges: what is asked, how a reply becomes a number, and servers that fail, on a server of this test."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from completions import completion, reward

from finetune.errors import UserError
from finetune.rl.rewards.completion import Reward
from finetune.rl.rewards.scoring import LOG, Rewards


class Server(ThreadingHTTPServer):
    """Replies with what the last word of a request says. asked: bodies and headers; most: requests at once."""

    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[tuple[dict[str, Any], dict[str, str]]] = []
        self.busy, self.at_once, self.most = 0, 0, 0
        self.lock = threading.Lock()
        self.end = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server, text = self.server, body["messages"][0]["content"]
        with server.lock:
            server.asked.append((body, dict(self.headers)))
            server.at_once += 1
            server.most = max(server.most, server.at_once)
        try:
            self.reply(text.rpartition("|")[2].strip())
        finally:
            with server.lock:
                server.at_once -= 1

    def reply(self, word: str) -> None:
        if word == "busy":
            self.server.busy += 1
            word = "7" if self.server.busy == 3 else "status 503"
        if word == "hang":
            self.server.end.wait(20)
            return
        if word == "drip":
            self.send_response(200)
            self.end_headers()
            self.drip(b" ")
            return
        if word == "break off":
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b'{"choices"')
            return
        if word in ("drip status", "drip headers"):
            line = b"HTTP/1.1 200 OK\r\nX-Slow: " if word == "drip headers" else b"HTTP/1."
            self.wfile.write(line)
            self.drip(b"1")
            return
        if word.startswith(("stall", "reset", "trickle")):  # in the body of an error
            self.send_response(int(word.split()[1]))
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b"busy")
            self.wfile.flush()
            if word.startswith("reset"):
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()
            elif word.startswith("stall"):
                self.server.end.wait(20)
            else:
                self.drip(b".")
            return
        if word == "huge":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b" " * (1 << 21))
            return
        if word == "garbage":
            self.wfile.write(b"220 mail.example ESMTP\r\n")
            return
        if word.startswith("status"):
            code = int(word.split()[1])
            self.send_response(code)
            self.send_header("Location", f"http://127.0.0.1:{self.server.server_port}/elsewhere")
            self.end_headers()
            self.wfile.write(f"no: {self.headers.get('Authorization')}".encode())
            return
        content = json.dumps({"choices": [{"message": {"content": word}}]}).encode()
        content = {
            "not json": b"<html>",
            "no choices": b"{}",
            "null": b'{"choices": [{"message": {"content": null}}]}',
        }.get(word, content)
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def drip(self, byte: bytes) -> None:
        with contextlib.suppress(OSError):  # the client has hung up
            while not self.server.end.wait(0.1):
                self.wfile.write(byte)

    def finish(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            super().finish()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield server
    server.end.set()
    server.shutdown()
    server.server_close()
    thread.join()


def judged(server: Server, replies: list[str], folder: Path | None = None, **keys: Any) -> list[Reward]:
    settings = {"judge": server.url, "model": "m", "prompt": "{completion}", "on_failure": -1.0, "seconds": 5.0, **keys}
    with Rewards((reward(**settings),), folder) as rewards:
        return rewards.score([completion(f"|{text}") for text in replies])


def test_numbers_become_values(server: Server) -> None:
    replies = ["7", "0", "10", "8/10", "8 out of 10", "Score: 2.5.", "<think>maybe 3</think>4", "-0"]
    assert [one.by_name["judge"] for one in judged(server, replies)] == [0.7, 0, 1, 0.8, 0.8, 0.25, 0.4, 0]
    assert [one.total for one in judged(server, ["1", "3", "5"], scale=[1, 5])] == [0, 0.5, 1]
    tagged = ["I say 3, no: <n>4</n>", "<n>1</n> <n>2</n>"]
    assert [one.total for one in judged(server, tagged, pattern="<n>(.+?)</n>")] == [0.4, 0.2]


REFUSED = {
    "none": 'the judge gave no numbers: "none"',
    "3 or 4": 'the judge gave 2 numbers; `pattern` can say which: "3 or 4"',
    "11": 'the judge gave 11, not a number from 0 to 10: "11"',
    "-1": 'the judge gave -1, not a number from 0 to 10: "-1"',
    "not json": "the judge does not answer as an OpenAI-compatible server: '<html>'",
    "no choices": "the judge does not answer as an OpenAI-compatible server: '{}'",
    "null": "the judge does not answer as an OpenAI-compatible server: "
    '\'{"choices": [{"message": {"content": null}}]}\'',
    "status 400": "the judge answered with status 400: no: Bearer ***",
    "status 302": "the judge answered with status 302: no: Bearer ***",
    "status 307": "the judge answered with status 307: no: Bearer ***",
    "status 500": "the judge gave no answer in 3 s",
    "hang": "the judge gave no answer in 3 s",
    "drip": "the judge gave no answer in 3 s",
    "drip status": "the judge gave no answer in 3 s",
    "drip headers": "the judge gave no answer in 3 s",
    "stall 503": "the judge gave no answer in 3 s",
    "reset 503": "the judge gave no answer in 3 s",
    "trickle 503": "the judge gave no answer in 3 s",
    "reset 429": "the judge gave no answer in 3 s",
    "stall 404": "the judge answered with status 404: busy",
    "huge": "the judge sent more than 1,048,576 bytes",
    "nan": 'the judge gave no numbers: "nan"',
}


@pytest.mark.long
def test_what_is_no_number_is_a_failure(server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-secret")
    replies = [*REFUSED, "garbage", "break off", "5"]
    results = judged(server, replies, tmp_path, key="JUDGE_KEY", seconds=3.0, processes=16)
    assert [one.failures for one in results[: len(REFUSED)]] == [(f"judge: {what}",) for what in REFUSED.values()]
    assert results[-3].failures[0].startswith("judge: the judge ")
    assert results[-1].total == 0.5
    assert all(one.total == -1 for one in results[:-1])
    assert not [body for body, _ in server.asked if "elsewhere" in str(body)]  # redirects are not followed
    assert "sk-secret" not in (tmp_path / LOG).read_text()
    assert {headers.get("Authorization") for _, headers in server.asked} == {"Bearer sk-secret"}


def test_a_busy_server_is_asked_again_and_requests_at_once_are_limited(server: Server) -> None:
    assert judged(server, ["busy"])[0].total == 0.7
    assert server.busy == 3
    many = [str(i % 10) for i in range(40)]
    assert [one.total for one in judged(server, many, processes=3)] == [int(text) / 10 for text in many]
    assert server.most <= 3


def test_the_request(server: Server) -> None:
    settings = reward(judge=f"{server.url}/", model="m", prompt="{prompt}+{reference}+{completion}|5", max_new_tokens=9)
    with Rewards((settings,), None) as rewards:
        assert rewards.score([completion("{reference} {prompt}", "R")])[0].total == 0.5
    ((body, headers),) = server.asked
    assert body["messages"] == [{"role": "user", "content": "How many?+R+{reference} {prompt}|5"}]
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("m", 0, 9)
    assert "Authorization" not in headers


def test_no_server_and_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(
        UserError, match=r"rewards\[0\] \(judge\): the environment variable JUDGE_KEY \(`key`\) is not set"
    ):
        Rewards((reward(judge="http://127.0.0.1:1/v1", model="m", key="JUDGE_KEY"),), None).__enter__()
    unreachable = pytest.raises(UserError, match=r"completion 1 of 1: the judge cannot be reached: .*refused")
    with Rewards((reward(judge="http://127.0.0.1:1/v1", model="m"),), None) as rewards, unreachable:
        rewards.score([completion("a")])


def test_a_failure_that_stops_the_run_ends_the_requests(server: Server) -> None:
    with pytest.raises(UserError, match=r"rewards\[0\] \(judge\): completion 2 of 200: the judge gave no numbers"):
        judged(server, ["1", "none", *["2"] * 198], on_failure=None)
    assert len(server.asked) < 100

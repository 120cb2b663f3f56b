"""What a sampling server says is checked before it is trained on: types, ids, log-probabilities, lengths, bytes."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from finetune.errors import UserError
from finetune.recipe.schema import Rollouts
from finetune.rl.rollouts.vllm_server import VllmServer

PROMPT, END, VOCABULARY, LONGEST = [5, 6, 7], 2, 100, 3
HONEST = {"prompt_token_ids": PROMPT, "token_ids": [9, 8, END], "logprobs": {"token_logprobs": [-0.5, -1.0, 0.0]}}


class Server(ThreadingHTTPServer):
    """Answers every request with `reply`, as JSON unless it is bytes."""

    reply: Any = None
    model: Any = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.answer(self.server.model)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(self.server.reply)

    def answer(self, reply: Any) -> None:
        content = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def settings_of(server: Server) -> Rollouts:
    return Rollouts(prompts=1, samples=2, max_new_tokens=LONGEST, engine="vllm", url=server.url, seconds=5)


def sample(server: Server) -> Any:
    settings = settings_of(server)
    return VllmServer(settings, VOCABULARY).sample("m", PROMPT, 1, settings, {END})


def changed(**keys: Any) -> dict[str, Any]:
    return {"choices": [{**HONEST, **keys}]}


def probabilities(*values: Any) -> dict[str, Any]:
    return changed(logprobs={"token_logprobs": list(values)})


LIES: dict[str, Any] = {
    "huge id": changed(token_ids=[10**30, 8, END]),
    "negative id": changed(token_ids=[-7, 8, END]),
    "first id behind the vocabulary": changed(token_ids=[VOCABULARY, 8, END]),
    "id as text": changed(token_ids=["9", 8, END]),
    "id as float": changed(token_ids=[9.0, 8, END]),
    "id as truth": changed(token_ids=[True, 8, END]),
    "id missing": changed(token_ids=[None, 8, END]),
    "no ids": changed(token_ids=[]),
    "ids as an object": changed(token_ids={"0": 9}),
    "more after the end": changed(token_ids=[9, END, 8]),
    "too few": changed(token_ids=[9, 8], logprobs={"token_logprobs": [-0.5, -1.0]}),
    "too many": changed(token_ids=[9, 8, 7, END], logprobs={"token_logprobs": [-0.5] * 4}),
    "another prompt": changed(prompt_token_ids=[5, 6, 8]),
    "prompt missing": changed(prompt_token_ids=None),
    "log-probability above 0": probabilities(3.0, -1.0, 0.0),
    "log-probability infinite": b'{"choices": [{"prompt_token_ids": [5, 6, 7], "token_ids": [9, 8, 2], "logprobs": '
    b'{"token_logprobs": [-Infinity, -1, 0]}}]}',
    "log-probability nan": b'{"choices": [{"prompt_token_ids": [5, 6, 7], "token_ids": [9, 8, 2], "logprobs": '
    b'{"token_logprobs": [NaN, -1, 0]}}]}',
    "log-probability as text": probabilities("-0.5", -1.0, 0.0),
    "log-probability as truth": probabilities(False, -1.0, 0.0),
    "log-probability missing": probabilities(None, -1.0, 0.0),
    "log-probability of 401 digits": probabilities(-(10**400), -1.0, 0.0),
    "log-probability of 401 digits above 0": probabilities(10**400, -1.0, 0.0),
    "log-probabilities too few": probabilities(-0.5, -1.0),
    "logprobs as a list": changed(logprobs=[-0.5]),
    "logprobs as text": changed(logprobs="-0.5"),
    "two choices": {"choices": [HONEST, HONEST]},
    "no choices": {"choices": []},
    "choice as text": {"choices": ["9 8 2"]},
    "choices as an object": {"choices": {"0": HONEST}},
    "a list": [HONEST],
    "no JSON": b"<html>",
    "half of it": b'{"choices": [',
    "deep": b"[" * 100_000,
    "nothing": b"",
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_told_in_one_line(lie: str, server: Server) -> None:
    server.reply = changed()
    assert sample(server)[0] == HONEST["token_ids"]
    server.reply = LIES[lie]
    with pytest.raises(UserError, match="/v1/completions does not answer as a vLLM server: ") as error:
        sample(server)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400


@pytest.mark.parametrize("value", ["9", 9.5, True, -1, 0, [9], math.inf])
def test_a_length_that_is_no_number_is_refused(value: Any, server: Server) -> None:
    server.model = {"data": [{"id": "m", "max_model_len": value}]}
    with pytest.raises(UserError, match=r"`max_model_len` is .* not a number of tokens"):
        VllmServer(settings_of(server)).base_model(8)


SCORED: dict[str, Callable[[float], Any]] = {
    "a text": lambda p: {"6": {"logprob": str(p)}},
    "above 0": lambda p: {"6": {"logprob": 2.0}},
    "of another token": lambda p: {"9": {"logprob": p}},
    "a number alone": lambda p: p,
}


@pytest.mark.parametrize("lie", SCORED)
def test_scores_of_a_prompt_are_checked(lie: str, server: Server) -> None:
    honest = [None, {"6": {"logprob": -1.0}}, {"7": {"logprob": -2.0}}]
    server.reply = changed(prompt_logprobs=honest)
    client = VllmServer(settings_of(server), VOCABULARY)
    assert client.score("m", PROMPT).tolist() == [-1.0, -2.0]
    server.reply = changed(prompt_logprobs=[None, SCORED[lie](-1.0), honest[2]])
    with pytest.raises(UserError, match="does not answer as a vLLM server: a log-probability"):
        client.score("m", PROMPT)

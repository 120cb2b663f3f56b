"""Client of OpenAI-compatible servers, for `chat --url` and `verify --url`. No heavy imports."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from finetune.errors import RunFailure, UserError, without_secrets
from finetune.release.http_exchange import Deadline, StatusError, TooLargeError, content, response
from finetune.release.inference.sampling import Sampling

KEY = "FINETUNE_SERVER_KEY"  # environment variable: sent as the server's key, never printed
MAX_TOKENS, TIMEOUT_S = 32, 120.0
_MOST_BYTES = 1 << 26  # of an answer
REASONING = ("reasoning_content", "thinking", "reasoning")  # as in finetune/data/formats/messages.py


@dataclass(frozen=True)
class Reply:
    text: str
    finish_reason: str | None
    prompt_tokens: int | None
    has_thoughts: bool


class Server:
    """OpenAI-compatible server. url: up to /v1."""

    def __init__(self, url: str):
        if not url.startswith(("http://", "https://")):
            raise UserError(f"--url {url}: not an address. Fix: give http://HOST:PORT/v1")
        self._url = url.rstrip("/")

    def choose(self, requested: str | None, run: str | None = None) -> str:
        """Returns the `requested` model, the only one, or the one with the run's name. Raises UserError."""
        models: list[Any] = self._part(self._ask("/models"), "data", list, "/models")
        names = [one["id"] for one in models if isinstance(one, dict) and isinstance(one.get("id"), str)]
        if requested is None and len(names) == 1:
            return names[0]
        name = requested or run
        if name is None or name not in names:
            lacks = f"no model {name!r}; there are" if name else "several models:" if names else "no model:"
            raise UserError(f"{self._url} has {lacks} {', '.join(names) or 'none'}. Fix: give --model")
        return name

    def answer(self, model: str, messages: list[dict[str, Any]]) -> Reply:
        """Returns the greedy answer. Raises RunFailure for an invalid answer."""
        path, request = "/chat/completions", {"model": model, "messages": messages, "temperature": 0}
        reply = self._ask(path, {**request, "max_tokens": MAX_TOKENS})
        choices = self._part(reply, "choices", list, path)
        message = self._part(choices[0] if choices else None, "message", dict, path)
        text = message.get("content")
        if text is not None and not isinstance(text, str):
            raise self._invalid(path, f"the answer is {json.dumps(text)[:80]}")
        usage = reply.get("usage") if isinstance(reply.get("usage"), dict) else {}
        count = usage.get("prompt_tokens")
        reason = choices[0].get("finish_reason")
        if (count is not None and (type(count) is not int or count < 0)) or not isinstance(reason, str | None):
            raise self._invalid(path, f"its `prompt_tokens` or `finish_reason` is {json.dumps([count, reason])[:80]}")
        return Reply(text or "", reason, count, any(message.get(key) for key in REASONING))

    def stream(
        self, model: str, messages: Sequence[Mapping[str, Any]], sampling: Sampling
    ) -> Iterator[tuple[str, bool]]:
        """Yields pieces of an answer as the server sends them, with whether each is a thought. Raises RunFailure
        for an invalid or incomplete answer."""
        names = ("temperature", "top_p", "top_k", "repetition_penalty", "seed")
        chosen = {name: value for name in names if (value := getattr(sampling, name)) is not None}
        stop = {"stop": list(sampling.stop)} if sampling.stop else {}
        request = {"model": model, "messages": list(messages), "max_tokens": sampling.max_new_tokens, "stream": True}
        path, is_ended = "/chat/completions", False
        for line in self._lines(path, {**request, **chosen, **stop}):
            if not line.startswith(b"data:"):  # https://html.spec.whatwg.org/multipage/server-sent-events.html
                continue
            if (data := line[len(b"data:") :].strip()) == b"[DONE]":  # not every server sends this
                return
            choices = self._part(self._json(path, data), "choices", list, path)
            is_ended |= bool(choices and isinstance(choices[0], dict) and choices[0].get("finish_reason"))
            delta = self._part(choices[0], "delta", dict, path) if choices else {}  # the last may have only the usage
            thought = next((delta[key] for key in REASONING if delta.get(key)), "")
            for text in (thought, delta.get("content")):
                if not isinstance(text, str | None):
                    raise self._invalid(path, f"a piece of the answer is {json.dumps(text)[:80]}")
                if text:
                    yield text, text is thought
        if not is_ended:
            raise self._invalid(path, "the answer broke off")

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        with self._failures(path):
            return self._json(path, content(*self._request(path, body), TIMEOUT_S, _MOST_BYTES))

    def _lines(self, path: str, body: dict[str, Any]) -> Iterator[bytes]:
        """Yields the lines of a server's response as they arrive. Raises RunFailure."""
        deadline, total = Deadline(TIMEOUT_S), 0
        with self._failures(path), response(*self._request(path, body), deadline) as opened:
            while line := opened.readline(_MOST_BYTES + 1):
                total += len(line)
                if total > _MOST_BYTES:
                    raise TooLargeError(f"more than {_MOST_BYTES:,} bytes")
                deadline.extend()  # to the next line: an answer may be long
                yield line

    def _request(self, path: str, body: dict[str, Any] | None) -> tuple[str, bytes | None, dict[str, str]]:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(KEY):
            headers["Authorization"] = f"Bearer {key}"
        return self._url + path, None if body is None else json.dumps(body).encode(), headers

    @contextlib.contextmanager
    def _failures(self, path: str) -> Iterator[None]:
        """Raises RunFailure for an exchange that fails."""
        try:
            yield
        except TooLargeError as error:
            raise self._invalid(path, str(error)) from None
        except StatusError as error:
            text = without_secrets(error.text.replace(os.environ.get(KEY) or "\0", "***"))
            raise self._invalid(path, f"status {error.code}: {' '.join(text.split())[:200]}") from None
        except TimeoutError:
            raise RunFailure(f"{self._url}{path} gave no answer in {TIMEOUT_S:g} s. Fix: look at its log") from None
        except http.client.IncompleteRead:
            raise self._invalid(path, "the answer broke off") from None
        except (OSError, http.client.HTTPException) as error:  # refused, reset, timed out; a line that is not HTTP
            reason = getattr(error, "reason", None) or error
            raise RunFailure(f"{self._url} cannot be reached: {reason}. Fix: start it, or correct --url") from None

    def _json(self, path: str, text: bytes) -> Any:
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise self._invalid(path, f"not JSON: {text[:80].decode('utf-8', 'replace')!r}") from None

    def _part(self, reply: Any, key: str, kind: type, path: str) -> Any:
        if not isinstance(reply, dict) or not isinstance(reply.get(key), kind):
            raise self._invalid(path, f"no `{key}` in {json.dumps(reply)[:80]}")
        return reply[key]

    def _invalid(self, path: str, what: str) -> RunFailure:
        return RunFailure(
            f"{self._url}{path} does not answer as an OpenAI-compatible server: {what}. Fix: check --url (up to /v1), "
            f"--model, and {KEY} if it needs a key"
        )

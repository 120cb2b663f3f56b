"""OpenAI's API over HTTP: routes, bodies, streams, errors, and clients that disconnect."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import AsyncIterator, Collection
from typing import Any

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from transformers.cli.serving.utils import ReasoningText, ToolCall

from finetune.errors import UserError
from finetune.release.inference.answering import Answerer
from finetune.release.inference.api_requests import Prompts, Refused
from finetune.release.inference.lane import Finished, Lane, Piece, Request
from finetune.release.local_server import LOCAL_HOSTS, HostCheck

BODY_TIMEOUT_S = 30.0  # until a request's body is complete
MAX_WAITING = 256  # requests, including the one being answered
MAX_BODIES_BYTES = 256 * 2**20  # total of requests being read or waiting


def build_app(entries: dict[str, Answerer], hosts: Collection[str] = LOCAL_HOSTS) -> Any:
    """Returns the application. hosts: names allowed in a request's header `Host`."""
    api = Api(entries)
    app = FastAPI(lifespan=api.lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    for kind in (Refused, UserError, HTTPException, Exception):
        app.add_exception_handler(kind, _failed)
    app.add_api_route("/health", api.health)
    app.add_api_route("/v1/models", api.models)
    app.add_api_route("/v1/chat/completions", api.chat, methods=["POST"])
    app.add_api_route("/v1/completions", api.completions, methods=["POST"])
    app.add_middleware(HostCheck, hosts=hosts, refusal=_other_name)
    return app


class Api:
    """The routes, and what their requests hold: a place each of `MAX_WAITING`, and bytes of `MAX_BODIES_BYTES`."""

    def __init__(self, entries: dict[str, Answerer]):
        self._models = tuple(entries)
        self._lane, self._prompts = Lane(), Prompts(entries)
        self._waiting, self._held = 0, 0  # requests, including the one being answered; bytes of their bodies

    @contextlib.asynccontextmanager
    async def lifespan(self, _: Any) -> AsyncIterator[None]:
        yield
        self._prompts.close()
        self._lane.close()

    async def health(self) -> Any:
        answering = self._lane.answering
        return {"status": "ok", "answering": answering, "waiting": max(0, self._waiting - answering)}

    async def models(self) -> Any:
        data = [{"id": name, "object": "model", "created": 0, "owned_by": "finetune"} for name in self._models]
        return {"object": "list", "data": data}

    async def chat(self, http: HttpRequest) -> Any:
        return await self._respond(http, is_chat=True)

    async def completions(self, http: HttpRequest) -> Any:
        return await self._respond(http, is_chat=False)

    async def _respond(self, http: HttpRequest, is_chat: bool) -> Any:
        fields, request, answer = await self._start(http, is_chat)
        about = {"id": f"finetune-{uuid.uuid4().hex}", "created": int(time.time()), "model": fields["model"]}
        if not fields.get("stream"):
            return JSONResponse(_whole(request, await answer, about, is_chat))
        begun = asyncio.create_task(request.begun.wait())
        await asyncio.wait({begun, answer}, return_when=asyncio.FIRST_COMPLETED)  # until then errors have a status
        begun.cancel()
        if answer.done():
            answer.result()
        usage = bool((fields.get("stream_options") or {}).get("include_usage"))
        return StreamingResponse(_events(answer, request, about, is_chat, usage), media_type="text/event-stream")

    async def _start(self, http: HttpRequest, is_chat: bool) -> tuple[dict[str, Any], Request, asyncio.Task[Finished]]:
        """Reads a request and puts it into the lane; it holds its place and its bytes until its answer has ended."""
        body = await self._read_body(http)
        if self._waiting >= MAX_WAITING:
            raise Refused(429, f"{MAX_WAITING} requests wait already: try again later")
        size = len(body)
        self._hold(1, size)
        try:
            fields, request = await self._prompts.make(body, is_chat)
        except BaseException:
            self._hold(-1, -size)
            raise
        answer = asyncio.create_task(_answer(self._lane, request, http))
        answer.add_done_callback(lambda _: self._hold(-1, -size))
        return fields, request, answer

    def _hold(self, requests: int, size: int) -> None:
        self._waiting, self._held = self._waiting + requests, self._held + size

    async def _read_body(self, http: HttpRequest) -> bytes:
        if http.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise Refused(415, "expected a JSON body, with the header Content-Type: application/json")
        try:
            return await asyncio.wait_for(self._receive(http), BODY_TIMEOUT_S)
        except asyncio.TimeoutError:
            raise Refused(408, f"the body was incomplete after {BODY_TIMEOUT_S:g} s") from None
        except ClientDisconnect:
            raise Refused(400, "the connection was closed within the body") from None

    async def _receive(self, http: HttpRequest) -> bytes:
        parts: list[bytes] = []
        size = 0
        try:
            async for part in http.stream():
                size += len(part)
                self._hold(0, len(part))
                if size > self._prompts.max_body:
                    raise Refused(413, f"the body has more than {self._prompts.max_body:,} bytes")
                if self._held > MAX_BODIES_BYTES:
                    raise Refused(503, "too many bodies are being sent: try again later")
                parts.append(part)
            return b"".join(parts)
        finally:
            self._hold(0, -size)


async def _failed(_: HttpRequest, error: Exception) -> JSONResponse:
    if isinstance(error, Refused):
        return _error(error.status, str(error))
    if isinstance(error, HTTPException):  # of the routes
        return _error(error.status_code, str(error.detail))
    if isinstance(error, UserError):  # such as an image that cannot be decoded
        return _error(400, str(error))
    return _error(500, f"{type(error).__name__}: {str(error)[:200]}")


def _other_name(name: str) -> JSONResponse:
    return _error(403, f"{name!r} is not a name of this server: `serve --allow-host NAME` allows a name")


async def _answer(lane: Lane, request: Request, http: HttpRequest) -> Finished:
    """Waits for an answer, and ends it if its client closes the connection, also before its turn in the lane."""

    async def until_gone() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass
        request.gone.set()
        future.cancel()  # if it is still waiting

    future = lane.submit(request)
    watch = asyncio.create_task(until_gone())
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        if future.cancelled() and request.gone.is_set():
            return Finished("", "stop", 0)  # the client is gone
        raise
    finally:
        request.gone.set()
        watch.cancel()


def _error(status: int, message: str) -> JSONResponse:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    error = {"message": message, "type": kind, "param": None, "code": status}
    headers = {"Connection": "close"} if status in (403, 408, 413, 415, 503) else None  # the body was not read
    return JSONResponse({"error": error}, status, headers)


def _usage(request: Request, finished: Finished) -> dict[str, int]:
    prompt = len(request.prompt.ids)
    return {"prompt_tokens": prompt, "completion_tokens": finished.tokens, "total_tokens": prompt + finished.tokens}


def _call(call: ToolCall, index: int) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "index": index, "function": function}


def _whole(request: Request, finished: Finished, about: dict[str, Any], is_chat: bool) -> dict[str, Any]:
    """Returns an answer that is not streamed."""
    pieces = [request.pieces.get_nowait() for _ in range(request.pieces.qsize())]
    joined = "".join(piece for piece in pieces if type(piece) is str)
    text = joined if finished.text is None else finished.text
    choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finished.finish_reason}
    if not is_chat:
        choice["text"] = text
    else:
        choice["message"] = dict[str, Any](role="assistant", content=text)
        if thought := "".join(piece for piece in pieces if isinstance(piece, ReasoningText)):
            choice["message"]["reasoning_content"] = thought
        if calls := [piece for piece in pieces if isinstance(piece, ToolCall)]:
            choice["message"]["tool_calls"] = [_call(call, i) for i, call in enumerate(calls)]
            choice["finish_reason"] = "tool_calls"
    kind = "chat.completion" if is_chat else "text_completion"
    return {**about, "object": kind, "choices": [choice], "usage": _usage(request, finished)}


async def _events(
    answer: asyncio.Task[Finished], request: Request, about: dict[str, Any], is_chat: bool, usage: bool
) -> AsyncIterator[str]:
    """Yields a streamed answer as server-sent events. usage: also at the end, for `include_usage`."""
    about = {**about, "object": "chat.completion.chunk" if is_chat else "text_completion"}
    calls = 0

    def event(delta: dict[str, Any], reason: str | None = None, **more: Any) -> str:
        content: dict[str, Any] = {"delta": delta} if is_chat else {"text": delta.get("content", "")}
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": reason}
        return f"data: {json.dumps({**about, 'choices': [choice], **more})}\n\n"

    def as_delta(piece: Piece) -> dict[str, Any]:
        nonlocal calls
        if isinstance(piece, ToolCall):
            calls += 1
            return {"tool_calls": [_call(piece, calls - 1)]}
        return {"reasoning_content" if isinstance(piece, ReasoningText) else "content": piece}

    try:
        if is_chat:
            yield event({"role": "assistant", "content": ""})
        while not (answer.done() and request.pieces.empty()):
            piece = asyncio.create_task(request.pieces.get())
            await asyncio.wait({piece, answer}, return_when=asyncio.FIRST_COMPLETED)
            if piece.done():
                yield event(as_delta(piece.result()))
            else:
                piece.cancel()
        try:
            finished = answer.result()
        except RuntimeError as error:  # from torch, such as a full memory
            yield f"data: {json.dumps({'error': {'message': str(error)[:200], 'type': 'server_error'}})}\n\n"
            return
        count = _usage(request, finished)
        yield event({}, "tool_calls" if calls else finished.finish_reason, usage=count)
        if usage:
            yield f"data: {json.dumps({**about, 'choices': [], 'usage': count})}\n\n"
        yield "data: [DONE]\n\n"
    finally:
        request.gone.set()
        answer.cancel()

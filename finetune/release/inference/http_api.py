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
    lane, prompts = Lane(), Prompts(entries)
    waiting, held = 0, 0  # requests; bytes of bodies

    @contextlib.asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        yield
        prompts.close()
        lane.close()

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)

    @app.exception_handler(Refused)
    async def refused(_: HttpRequest, error: Refused) -> JSONResponse:
        return _error(error.status, str(error))

    @app.exception_handler(UserError)
    async def of_request(_: HttpRequest, error: UserError) -> JSONResponse:  # an image that cannot be decoded
        return _error(400, str(error))

    @app.exception_handler(HTTPException)
    async def of_routes(_: HttpRequest, error: HTTPException) -> JSONResponse:
        return _error(error.status_code, str(error.detail))

    @app.exception_handler(Exception)
    async def unforeseen(_: HttpRequest, error: Exception) -> JSONResponse:
        return _error(500, f"{type(error).__name__}: {str(error)[:200]}")

    @app.get("/health")
    async def health() -> Any:
        return {"status": "ok", "answering": lane.answering, "waiting": max(0, waiting - lane.answering)}

    @app.get("/v1/models")
    async def models() -> Any:
        data = [{"id": name, "object": "model", "created": 0, "owned_by": "finetune"} for name in entries]
        return {"object": "list", "data": data}

    @app.post("/v1/chat/completions")
    async def chat(http: HttpRequest) -> Any:
        return await answered(http, is_chat=True)

    @app.post("/v1/completions")
    async def completions(http: HttpRequest) -> Any:
        return await answered(http, is_chat=False)

    async def answered(http: HttpRequest, is_chat: bool) -> Any:
        nonlocal waiting, held
        body = await whole_body(http)
        if waiting >= MAX_WAITING:
            raise Refused(429, f"{MAX_WAITING} requests wait already: try again later")
        size = len(body)
        waiting, held = waiting + 1, held + size

        def done(_: Any = None) -> None:
            nonlocal waiting, held
            waiting, held = waiting - 1, held - size

        try:
            fields, request = await prompts.make(body, is_chat)
        except BaseException:
            done()
            raise
        answer = asyncio.create_task(_answer(lane, request, http))
        answer.add_done_callback(done)
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

    async def whole_body(http: HttpRequest) -> bytes:
        if http.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise Refused(415, "expected a JSON body, with the header Content-Type: application/json")
        parts: list[bytes] = []

        async def read() -> None:
            nonlocal held
            size = 0
            try:
                async for part in http.stream():
                    size, held = size + len(part), held + len(part)
                    if size > prompts.max_body:
                        raise Refused(413, f"the body has more than {prompts.max_body:,} bytes")
                    if held > MAX_BODIES_BYTES:
                        raise Refused(503, "too many bodies are being sent: try again later")
                    parts.append(part)
            finally:
                held -= size

        try:
            await asyncio.wait_for(read(), BODY_TIMEOUT_S)
        except asyncio.TimeoutError:
            raise Refused(408, f"the body was incomplete after {BODY_TIMEOUT_S:g} s") from None
        except ClientDisconnect:
            raise Refused(400, "the connection was closed within the body") from None
        return b"".join(parts)

    def other_name(name: str) -> JSONResponse:
        return _error(403, f"{name!r} is not a name of this server: `serve --allow-host NAME` allows a name")

    app.add_middleware(HostCheck, hosts=hosts, refusal=other_name)
    return app


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

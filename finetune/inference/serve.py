"""`serve`: finished runs behind OpenAI's API, for one request at a time.

    POST /v1/chat/completions, POST /v1/completions, GET /v1/models, GET /health

    request ── body and fields (api_request.py) ── prompt: read, rendered and tokenized as in training, in a thread
            ── waits for the lane (lane.py), in which models generate ── pieces, or one answer

The event loop does none of this work, so that /health answers meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import socket
import time
import uuid
from collections.abc import AsyncIterator, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from transformers import AutoTokenizer, GenerationConfig
from transformers.cli.serving.utils import ReasoningText, ToolCall, build_response_parser

from finetune.errors import UserError
from finetune.export.commands import load_trained, model_folder
from finetune.export.scoring import is_scoring
from finetune.inference.answering import Answerer, Prompt, answerer_of, images_of, read_asked
from finetune.inference.api_request import (
    MAX_BODY_BYTES,
    Refused,
    check_fields,
    parse_body,
    settings_of,
    stops_of,
)
from finetune.inference.lane import Finished, Lane, Piece, Request
from finetune.models.remote_code import load_auto
from finetune.utils import LOCAL_HOSTS, host_name

BODY_TIMEOUT_S = 30.0  # until a request's body is whole
MAX_WAITING = 256  # requests, the one that is answered included
MAX_BODIES_BYTES = 256 * 2**20  # of all bodies that are being read
_CONTEXT = 32_768  # tokens, of a model that states none


class Served:
    """One name of the server: an adapter is switched on for each request."""

    def __init__(self, model: Any, adapter: str | None, settings: GenerationConfig):
        self._model, self._adapter = model, adapter
        self.generation_config, self.config = settings, model.config

    @property
    def device(self) -> torch.device:
        return self._model.device

    def generate(self, **arguments: Any) -> Any:
        if self._adapter is not None:
            self._model.set_adapter(self._adapter)
        self._model.generation_config = self.generation_config
        with torch.no_grad():
            return self._model.generate(**arguments)


def load_served(runs: Sequence[tuple[str, Path]], device: str) -> dict[str, Answerer]:
    """Returns the results of runs by their names; adapters of the same base share it. Raises UserError."""
    shared: dict[tuple[str, int], Any] = {}
    entries: dict[str, Answerer] = {}
    for name, run_dir in runs:
        folder = model_folder(run_dir)
        if is_scoring(folder):
            raise UserError(f"{run_dir}: a model of scores answers nothing: `finetune score` is what it does")
        if name in entries:
            raise UserError(f"serve: two models are named {name!r}: give one another name, as NAME={run_dir}")
        tokenizer, adapter = load_auto(AutoTokenizer, folder), f"served_{len(entries)}"
        base = _base_to_share(folder)
        key = (base or str(folder), len(tokenizer))
        if key in shared:
            model = shared[key]
            model.load_adapter(str(folder), adapter_name=adapter)
        else:
            model = _placed(folder, device, adapter)
            if base is not None:
                shared[key] = model
        has_settings = (folder / "generation_config.json").is_file()
        settings = GenerationConfig.from_pretrained(folder) if has_settings else model.generation_config
        is_adapter = (folder / "adapter_config.json").is_file()
        served = Served(model.eval(), adapter if is_adapter else None, settings)
        entries[name] = answerer_of(run_dir, served, tokenizer)
    return entries


def _base_to_share(folder: Path) -> str | None:
    """Returns the base of an adapter that leaves all else of it as it is; None: it needs a model of its own."""
    file = folder / "adapter_config.json"
    if not file.is_file():
        return None
    settings = json.loads(file.read_text(encoding="utf-8"))
    own = ("modules_to_save", "target_parameters", "trainable_token_indices")
    return None if any(settings.get(key) for key in own) else settings["base_model_name_or_path"]


def _placed(folder: Path, device: str, adapter: str) -> Any:
    """Returns the model on a device; auto: over all accelerators if there are several. Raises UserError."""
    if device == "auto" and torch.accelerator.is_available() and torch.accelerator.device_count() > 1:
        return load_trained(folder, adapter=adapter, device_map="auto")
    there = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    try:
        place = there if device == "auto" else torch.device(device)
        return load_trained(folder, adapter=adapter).to(place)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {device}: {str(error).splitlines()[0]}") from None


# --- from a request to what a lane answers


def context_of(entry: Answerer) -> int:
    """Returns how many tokens a model takes, prompt and answer together."""
    config = entry.model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    stated = getattr(config, "max_position_embeddings", None) or _CONTEXT
    original = rope.get("original_max_position_embeddings") or stated
    return max(stated, int(original * (rope.get("factor") or 1)))


class Prompts:
    """Makes of requests what a lane answers, in one thread: tokenizers are not to be used by two at once."""

    def __init__(self, entries: dict[str, Answerer]):
        self.entries, self._thread = entries, ThreadPoolExecutor(1, "prompts")
        sees = any(hasattr(entry.model.config, "vision_config") for entry in entries.values())
        self.max_body = MAX_BODY_BYTES if sees else MAX_BODY_BYTES // 4
        self._longest: dict[int, int] = {}  # characters of a token, by the tokenizer

    async def make(self, body: bytes, is_chat: bool) -> tuple[dict[str, Any], Request]:
        """Returns a request's fields, and what is to be answered. Raises Refused."""
        return await asyncio.wrap_future(self._thread.submit(self._make, body, is_chat))

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _make(self, body: bytes, is_chat: bool) -> tuple[dict[str, Any], Request]:
        fields = parse_body(body)
        check_fields(fields, is_chat)
        stops, name = stops_of(fields), fields.get("model") or next(iter(self.entries))
        if name not in self.entries:
            raise Refused(404, f"there is no model {name[:100]!r}; there are {', '.join(self.entries)}")
        entry, fields["model"] = self.entries[name], name
        context = context_of(entry)
        try:
            prompt = self._chat(entry, fields, context) if is_chat else self._text(entry, fields["prompt"], context)
            room = context - len(prompt.ids)
            if room < 1:
                raise Refused(400, f"the prompt has {len(prompt.ids):,} tokens, and the model takes {context:,}")
            inputs = entry.inputs([prompt])
        except (UserError, RecursionError) as error:
            raise Refused(400, str(error)) from None
        settings = settings_of(fields, entry.model.generation_config, room, len(entry.tokenizer))
        parser = None
        if is_chat:
            tools = fields.get("tools") or None
            parser = build_response_parser(entry.tokenizer, entry.model, inputs["input_ids"], tools)
        return fields, Request(entry, prompt, inputs, settings, stops, fields.get("seed"), parser)

    def _chat(self, entry: Answerer, fields: dict[str, Any], context: int) -> Prompt:
        if entry.chat is None:
            raise Refused(400, "this model has no chat template: use /v1/completions")
        asked = read_asked(fields["messages"], fields.get("tools"))
        if not all(isinstance(one, str) and one[:5].lower() == "data:" for one in images_of(asked)):
            raise Refused(
                400, "pictures are taken as data URLs (data:image/png;base64,...): no file is read, no address fetched"
            )
        said = [(one.content, one.reasoning, one.tool_calls) for one in asked.messages]
        if len(said) > context:
            raise Refused(400, f"the prompt has {len(said):,} messages, and the model takes {context:,} tokens")
        self._check_length(entry, len(json.dumps([said, asked.tools], ensure_ascii=False)), context)
        return entry.tokens(replace(asked, template_arguments=fields.get("chat_template_kwargs") or {}))

    def _text(self, entry: Answerer, text: str, context: int) -> Prompt:
        self._check_length(entry, len(text), context)
        prompt = entry.plain(text)
        if not prompt.ids:
            raise Refused(400, "`prompt` is empty")
        return prompt

    def _check_length(self, entry: Answerer, characters: int, context: int) -> None:
        """Raises Refused for a text that has more tokens than the context if each were the longest there is."""
        key = id(entry.tokenizer)
        if key not in self._longest:
            self._longest[key] = max(map(len, entry.tokenizer.get_vocab()))
        if characters > context * self._longest[key]:
            raise Refused(400, f"the prompt has {characters:,} characters, and the model takes {context:,} tokens")


# --- HTTP


def build_app(entries: dict[str, Answerer], hosts: Collection[str] = LOCAL_HOSTS) -> Any:
    """Returns the application. hosts: names that a request may give in its header `Host`."""
    lane, prompts = Lane(), Prompts(entries)
    waiting, reading = 0, 0  # requests; bytes of bodies

    @contextlib.asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        yield
        prompts.close()
        lane.close()

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)

    @app.exception_handler(Refused)
    async def refused(_: HttpRequest, error: Refused) -> JSONResponse:
        return _error(error.status, str(error))

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
        nonlocal waiting
        body = await whole_body(http)
        if waiting >= MAX_WAITING:
            raise Refused(429, f"{MAX_WAITING} requests wait already: try again later")
        waiting += 1
        is_streamed = False
        try:
            fields, request = await prompts.make(body, is_chat)
            about = {"id": f"finetune-{uuid.uuid4().hex}", "created": int(time.time()), "model": fields["model"]}
            answer = asyncio.create_task(_answer(lane, request, http))
            answer.add_done_callback(done)
            is_streamed = True
            if fields.get("stream"):
                usage = bool((fields.get("stream_options") or {}).get("include_usage"))
                events = _events(answer, request, about, is_chat, usage)
                return StreamingResponse(events, media_type="text/event-stream")
            finished = await answer
            return JSONResponse(_whole(request, finished, about, is_chat))
        finally:
            if not is_streamed:
                waiting -= 1

    def done(_: Any) -> None:
        nonlocal waiting
        waiting -= 1

    async def whole_body(http: HttpRequest) -> bytes:
        nonlocal reading
        if http.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise Refused(415, "expected a body of JSON, with the header Content-Type: application/json")
        parts: list[bytes] = []
        size = 0

        async def read() -> None:
            nonlocal reading, size
            async for part in http.stream():
                size, reading = size + len(part), reading + len(part)
                if size > prompts.max_body:
                    raise Refused(413, f"the body has more than {prompts.max_body:,} bytes")
                if reading > MAX_BODIES_BYTES:
                    raise Refused(503, "too many bodies are being sent: try again later")
                parts.append(part)

        try:
            await asyncio.wait_for(read(), BODY_TIMEOUT_S)
        except asyncio.TimeoutError:
            raise Refused(408, f"the body was not whole after {BODY_TIMEOUT_S:g} s") from None
        except ClientDisconnect:
            raise Refused(400, "the connection was closed within the body") from None
        finally:
            reading -= size
        return b"".join(parts)

    app.add_middleware(_HostCheck, hosts=hosts)
    return app


async def _answer(lane: Lane, request: Request, http: HttpRequest) -> Finished:
    """Waits for an answer, and ends it once its client closes the connection, also while it waits for the lane."""

    async def until_gone() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass
        request.gone.set()
        future.cancel()  # if it still waits

    future = lane.submit(request)
    watch = asyncio.create_task(until_gone())
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        if future.cancelled() and request.gone.is_set():
            return Finished("", "stop", 0)  # nobody reads it
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
        choice["message"] = {"role": "assistant", "content": text}
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
    """Yields a streamed answer as server-sent events. usage: once more at the end, as `include_usage` asks."""
    about = {**about, "object": "chat.completion.chunk" if is_chat else "text_completion"}
    calls = 0

    def event(delta: dict[str, Any], reason: str | None = None, **more: Any) -> str:
        said: dict[str, Any] = {"delta": delta} if is_chat else {"text": delta.get("content", "")}
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": reason}
        return f"data: {json.dumps({**about, 'choices': [choice], **more})}\n\n"

    def of(piece: Piece) -> dict[str, Any]:
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
                yield event(of(piece.result()))
            else:
                piece.cancel()
        try:
            finished = answer.result()
        except RuntimeError as error:  # of torch, such as a full memory
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


# --- names by which the server is called


def is_allowed_host(header: str, hosts: Collection[str]) -> bool:
    """Returns whether a request's `Host` is one of some names, with or without a port. A page of another name that
    resolves to this machine (DNS rebinding) is none; "*" in hosts: any."""
    name = host_name(header)
    return name in hosts or "*" in hosts or ("any address" in hosts and _is_address(name))


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class _HostCheck:
    """Around an application: refuses requests for a server of another name."""

    def __init__(self, app: Any, hosts: Collection[str]):
        self._app, self._hosts = app, hosts

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            given = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
            if len(given) != 1 or not is_allowed_host(given[0], self._hosts):
                shown = ", ".join(given)[:100]
                message = f"this server is not called {shown!r}: `serve --allow-host NAME` allows a name"
                await _error(403, message)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def hosts_of(host: str, more: Sequence[str]) -> set[str]:
    """Returns the names of a server that listens on a host; on all addresses, it has them all."""
    every = {"any address"} if host in ("0.0.0.0", "::", "") else set[str]()
    return {*LOCAL_HOSTS, host.lower(), *map(str.lower, more), *every}


def serve(runs: Sequence[tuple[str, Path]], host: str, port: int, device: str, allowed: Sequence[str] = ()) -> None:
    """Serve runs until Ctrl-C. port 0: any that is free; allowed: more names of the server. Raises UserError."""
    try:
        listening = socket.create_server((host, port))
    except OSError as error:
        raise UserError(f"serve: {host}:{port} cannot be listened on: {error.strerror}; give another --port") from None
    with listening:
        app = build_app(load_served(runs, device), hosts_of(host, allowed))
        url = f"http://{host}:{listening.getsockname()[1]}/v1"
        print(f"serving {', '.join(name for name, _ in runs)} at {url} (Ctrl-C ends it)", flush=True)
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=3)
        uvicorn.Server(config).run(sockets=[listening])

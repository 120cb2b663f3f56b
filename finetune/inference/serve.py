"""`serve`: transformers' own OpenAI-compatible server, with runs in place of the hub's models.

What is ours, at its seams: models by name (adapters of one base share it), messages read and rendered as training did,
pictures (data URLs) seen as training saw them, sampling that a request asks for, answers without the text that stopped
them, and refusal of what would be ignored.

    POST /v1/chat/completions, POST /v1/completions, GET /v1/models, GET /health
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
from collections import deque
from collections.abc import Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
import uvicorn
from fastapi import HTTPException
from fastapi.responses import JSONResponse
from transformers import AutoTokenizer, BatchFeature, GenerationConfig, StoppingCriteria, StoppingCriteriaList
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.server import build_server
from transformers.cli.serving.utils import BaseHandler, GenerateManager, GenerationState, Modality

from finetune.data.samples import Conversation
from finetune.errors import UserError
from finetune.export.commands import load_trained, model_folder
from finetune.export.scoring import is_scoring
from finetune.inference.answering import Answerer, StopFilter, answerer_of, images_of, read_asked, render_prompt
from finetune.models.remote_code import load_auto

_ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/health")
_MORE = frozenset({"top_k", "repetition_penalty"})  # of a request: vLLM's and SGLang's names
# Fields of a request that transformers' server leaves out, with the values that ask for nothing.
_IGNORED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False, 0),
    "top_logprobs": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "audio": (),
    "prediction": (),
    "suffix": ("",),
    "modalities": (["text"],),
    "web_search_options": (),
}

_NUMBERS = {  # fields of a request, with their least and largest values
    "temperature": (0, None),
    "top_p": (0, 1),
    "top_k": (0, None),
    "repetition_penalty": (0.01, None),
    "max_tokens": (1, None),
    "max_completion_tokens": (1, None),
    "seed": (0, None),
}


class Served:
    """One name of the server, as its handlers see a model: an adapter is switched on for each request."""

    def __init__(self, model: Any, adapter: str | None, settings: GenerationConfig, lock: threading.Lock):
        self._model, self._adapter, self._lock = model, adapter, lock
        self.generation_config, self.config = settings, model.config

    @property
    def device(self) -> torch.device:
        return self._model.device

    def generate(self, **arguments: Any) -> Any:
        with self._lock:  # adapters of one base share its modules
            if self._adapter is not None:
                self._model.set_adapter(self._adapter)
            self._model.generation_config = self.generation_config
            return self._model.generate(**arguments)


def load_served(runs: Sequence[tuple[str, Path]], device: str) -> dict[str, Answerer]:
    """Returns the results of runs by their names; adapters of the same base share it. Raises UserError."""
    shared: dict[tuple[str, int], tuple[Any, threading.Lock]] = {}
    found: dict[str, Answerer] = {}
    for name, run_dir in runs:
        folder = model_folder(run_dir)
        if is_scoring(folder):
            raise UserError(f"{run_dir}: a model of scores answers nothing: `finetune score` is what it does")
        if name in found:
            raise UserError(f"serve: two models are named {name!r}: give one another name, as NAME={run_dir}")
        tokenizer, adapter = load_auto(AutoTokenizer, folder), f"served_{len(found)}"
        base = _base_to_share(folder)
        key = (base or str(folder), len(tokenizer))
        if key in shared:
            model, lock = shared[key]
            model.load_adapter(str(folder), adapter_name=adapter)
        else:
            model, lock = _placed(folder, device, adapter), threading.Lock()
            if base is not None:
                shared[key] = model, lock
        has_settings = (folder / "generation_config.json").is_file()
        settings = GenerationConfig.from_pretrained(folder) if has_settings else model.generation_config
        is_adapter = (folder / "adapter_config.json").is_file()
        served = Served(model.eval(), adapter if is_adapter else None, settings, lock)
        found[name] = answerer_of(run_dir, served, tokenizer)
    return found


def _base_to_share(folder: Path) -> str | None:
    """Returns the base of an adapter that leaves all else of it as it is; None: it needs a model of its own."""
    file = folder / "adapter_config.json"
    if not file.is_file():
        return None
    settings = json.loads(file.read_text(encoding="utf-8"))
    own = ("modules_to_save", "target_parameters", "trainable_token_indices")
    return None if any(settings.get(key) for key in own) else settings["base_model_name_or_path"]


def _placed(folder: Path, device: str, adapter: str) -> Any:
    """Returns the model on a device; auto: over all accelerators where there are several. Raises UserError."""
    if device == "auto" and torch.accelerator.is_available() and torch.accelerator.device_count() > 1:
        return load_trained(folder, adapter=adapter, device_map="auto")
    there = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    try:
        place = there if device == "auto" else torch.device(device)
        return load_trained(folder, adapter=adapter).to(place)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {device}: {str(error).splitlines()[0]}") from None


# --- what handlers of transformers' server ask for


class _Models(ModelManager):
    """The runs, in place of the hub's models."""

    def __init__(self, entries: dict[str, Answerer]):
        super().__init__(model_timeout=-1)
        self.entries = entries

    @staticmethod
    def get_model_modality(model: Any, processor: Any = None) -> Modality:
        return Modality.LLM  # it says how messages are read, which is ours

    def get_gen_models(self, cache_dir: str | None = None) -> list[dict[str, Any]]:
        return [{"id": name, "object": "model", "created": 0, "owned_by": "finetune"} for name in self.entries]


class _Generating(GenerateManager):
    """Generation whose text ends before a stop, and which ends where nobody waits for it."""

    def generate_streaming(self, model: Any, processor: Any, inputs: Any, gen_config: Any, *more: Any, **named: Any):
        queue, streamer = super().generate_streaming(model, processor, _watched(inputs), gen_config, *more, **named)
        return _UpToStop(queue, _STOPS.get()), streamer

    async def generate_non_streaming(self, model: Any, processor: Any, inputs: Any, *more: Any, **named: Any):
        text, *rest = await super().generate_non_streaming(model, processor, _watched(inputs), *more, **named)
        return StopFilter(_STOPS.get()).feed(text, is_last=True), *rest


class _Gone(StoppingCriteria):
    """Ends a generation at its next token once the client has gone."""

    def __init__(self, gone: threading.Event):
        self._gone = gone

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:  # (1, T), (1, V) -> (1,)
        return torch.full((len(input_ids),), self._gone.is_set(), device=input_ids.device)


def _watched(inputs: Any) -> dict[str, Any]:
    return {**inputs, "stopping_criteria": StoppingCriteriaList([_Gone(_GONE.get())])}


class _ClientWatch:
    """Around an application: sets `_GONE` of a request whose client closes the connection. transformers' server notices
    it of streamed answers alone, and others wait for the model meanwhile."""

    def __init__(self, app: Any):
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        gone, watches = threading.Event(), list[asyncio.Task[None]]()

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            gone.set()

        async def heard() -> Any:
            message = await receive()
            if message["type"] == "http.request" and not message.get("more_body"):
                watches.append(asyncio.create_task(watch()))
            return message

        _GONE.set(gone)
        try:
            await self._app(scope, heard, send)
        finally:
            for one in watches:
                one.cancel()


# Of the request that a task answers.
_GONE: ContextVar[threading.Event] = ContextVar("gone")
_STOPS: ContextVar[tuple[str, ...]] = ContextVar("stops", default=())
_SEEN: ContextVar[dict[str, torch.Tensor] | None] = ContextVar("seen", default=None)  # inputs of a prompt with pictures


class _UpToStop:
    """A queue of pieces of an answer, without a stop and what follows it."""

    def __init__(self, queue: asyncio.Queue[Any], stops: Sequence[str]):
        self._queue, self._filter, self._ready = queue, StopFilter(stops), deque[Any]()

    async def get(self) -> Any:
        while not self._ready:
            self._take(await self._queue.get())
        return self._ready.popleft()

    def get_nowait(self) -> Any:
        """Raises asyncio.QueueEmpty."""
        while not self._ready:
            self._take(self._queue.get_nowait())
        return self._ready.popleft()

    def _take(self, item: Any) -> None:
        if type(item) is str or item is None:  # others are thoughts, calls and errors
            text = self._filter.feed(item or "", is_last=item is None)
            self._ready.extend([text] if text else [])
        if type(item) is not str:
            self._ready.append(item)


class _State(GenerationState):
    def get_manager(self, model_id: str, use_cb: bool = False) -> GenerateManager:
        if model_id not in self._generate_managers:
            self._generate_managers[model_id] = _Generating()
        return self._generate_managers[model_id]


class _Prepared:
    """A tokenizer, for a conversation whose tokens and pictures are known already."""

    def __init__(self, tokenizer: Any, inputs: dict[str, torch.Tensor]):
        self.tokenizer, self._inputs = tokenizer, inputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def apply_chat_template(self, *_: Any, **__: Any) -> BatchFeature:
        return BatchFeature(self._inputs)


class _Asked(BaseHandler):
    """What both endpoints do with a request before transformers' handler has it."""

    model_manager: _Models

    def _prepare(self, body: dict[str, Any]) -> Answerer:
        """Returns the model that is asked for. Raises HTTPException for what would be ignored."""
        entries = self.model_manager.entries
        body["model"] = name = body.get("model") or next(iter(entries))
        if name not in entries:
            raise HTTPException(404, f"there is no model {name!r}; there are {', '.join(entries)}")
        for field, nothing in _IGNORED.items():
            if (value := body.get(field)) is not None and value not in nothing:
                raise HTTPException(400, f"`{field}: {json.dumps(value)}` is not supported by this server")
        for field, (least, largest) in _NUMBERS.items():
            if (value := body.get(field)) is None:
                continue
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or value < least or (largest is not None and value > largest):
                upper = "" if largest is None else f" and at most {largest}"
                raise HTTPException(
                    400, f"`{field}: {json.dumps(value)}`: expected a number of at least {least}{upper}"
                )
        stop = body.get("stop") or ()
        _STOPS.set((stop,) if isinstance(stop, str) else tuple(stop))
        if not all(isinstance(text, str) and text for text in _STOPS.get()):
            raise HTTPException(400, "`stop` is a text, or a list of texts")
        return entries[name]

    def _resolve_model(self, body: dict[str, Any]) -> tuple[str, Any, Any]:
        entry, seen = self.model_manager.entries[body["model"]], _SEEN.get()
        return body["model"], entry.model, entry.tokenizer if seen is None else _Prepared(entry.tokenizer, seen)

    def _build_generation_config(self, body: dict[str, Any], model_generation_config: Any, use_cb: bool = False):
        settings = super()._build_generation_config(body, model_generation_config, use_cb)
        if (temperature := body.get("temperature")) is not None:  # theirs stays greedy where the config is
            settings.do_sample = float(temperature) > 0
        if not settings.do_sample:  # transformers' defaults: it warns of others, which greedy search does not use
            settings.temperature, settings.top_p, settings.top_k = 1.0, 1.0, 50
        elif body.get("top_k") is not None:
            settings.top_k = int(body["top_k"])
        if body.get("repetition_penalty") is not None:
            settings.repetition_penalty = float(body["repetition_penalty"])
        return settings


def _with_more(params: Any) -> type:
    return type("Params", (), {"__mutable_keys__": params.__mutable_keys__ | _MORE})


class _Chat(_Asked, ChatCompletionHandler):
    _valid_params_class = _with_more(ChatCompletionHandler._valid_params_class)

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
        entry = self._prepare(body)
        if entry.chat is None:
            raise HTTPException(400, "this model has no chat template: use /v1/completions")
        try:
            asked = read_asked(body.get("messages"), body.get("tools"))
            render_prompt(entry.chat, asked)  # a template refuses by raising
            _SEEN.set(_seen(entry, asked))
        except UserError as error:
            raise HTTPException(400, str(error)) from None
        body["messages"], body["tools"] = entry.chat.traits.as_dicts(asked), list(asked.tools) or None
        return await super().handle_request(body, request_id)

    @staticmethod
    def get_processor_inputs_from_messages(messages: list[dict[str, Any]], modality: Any) -> list[dict[str, Any]]:
        return messages  # they are as templates see them

    def _build_completion(self, request_id: str, content: str, *more: Any, **named: Any) -> dict[str, Any]:
        content = StopFilter(_STOPS.get()).feed(content or "", is_last=True)
        return super()._build_completion(request_id, content, *more, **named)


def _seen(entry: Answerer, asked: Conversation) -> dict[str, torch.Tensor] | None:
    """Returns what the model takes for a conversation with pictures; None where it has none. Raises UserError."""
    references = images_of(asked)
    if not all(isinstance(one, str) and one[:5].lower() == "data:" for one in references):
        raise UserError(
            "pictures are taken as data URLs (data:image/png;base64,...): no file is read, no address fetched"
        )
    return entry.inputs([entry.tokens(asked)]) if references else None


class _Text(_Asked, CompletionHandler):
    _valid_params_class = _with_more(CompletionHandler._valid_params_class)

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
        self._prepare(body)
        return await super().handle_request(body, request_id)


# --- the server


def build_app(entries: dict[str, Answerer]) -> Any:
    """Returns transformers' application with these models, without its routes that load others."""
    models, state, none = _Models(entries), _State(), dict[str, Any]()
    for name in ("response", "transcription", "systemone"):
        none[f"{name}_handler"] = None  # their routes are taken away
    app = build_server(models, _Chat(models, state), _Text(models, state), generation_state=state, **none)

    @app.exception_handler(HTTPException)
    async def as_openai_does(_request: Any, error: HTTPException) -> JSONResponse:
        return JSONResponse({"error": {"message": error.detail, "code": error.status_code}}, error.status_code)

    app.add_middleware(_ClientWatch)
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", None) in _ROUTES]
    return app


def serve(runs: Sequence[tuple[str, Path]], host: str, port: int, device: str) -> None:
    """Serve runs until Ctrl-C. port 0: any that is free. Raises UserError."""
    logging.getLogger("transformers.cli.serving").setLevel(logging.ERROR)  # it warns of every request
    try:
        listening = socket.create_server((host, port))
    except OSError as error:
        raise UserError(f"serve: {host}:{port} cannot be listened on: {error.strerror}; give another --port") from None
    with listening:
        app = build_app(load_served(runs, device))
        url = f"http://{host}:{listening.getsockname()[1]}/v1"
        print(f"serving {', '.join(name for name, _ in runs)} at {url} (Ctrl-C ends it)", flush=True)
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listening])

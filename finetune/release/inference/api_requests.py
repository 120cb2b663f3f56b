"""Requests of OpenAI clients: checks of body, fields and bounds before any computation, and their prompts as tokens."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from transformers import GenerationConfig
from transformers.cli.serving.utils import build_response_parser

from finetune.data.samples import BadRow, MediaKind, Reference
from finetune.errors import UserError
from finetune.recipe.schema import check_template_arguments
from finetune.release.inference.answering import Answerer, files_of, generation_settings, read_request
from finetune.release.inference.lane import Request
from finetune.release.inference.sampling import Sampling

MAX_BODY_BYTES = 32 * 2**20  # a prompt with images, videos or sound; a quarter for models without
MAX_VIDEO_PIXELS = 2**32  # of all frames of a prompt's videos: two and a half minutes of 720p, 30 frames a second
MAX_VALUES = 200_000  # in a body's JSON: lists, objects and their items
MAX_DEPTH = 64
MAX_STOPS, MAX_STOP_CHARACTERS = 16, 256
MAX_BIASES = 1024
MAX_ARGUMENTS = 4096  # characters of template arguments as JSON: templates are cached by them
DEFAULT_MAX_TOKENS = 1024

# Numbers of a request: (is an integer, minimum, maximum).
_NUMBERS: dict[str, tuple[bool, float, float]] = {
    "temperature": (False, 0, 100),
    "top_p": (False, 0, 1),
    "top_k": (True, 0, 2**31 - 1),
    "repetition_penalty": (False, 0.01, 100),
    "max_tokens": (True, 1, 2**31 - 1),
    "max_completion_tokens": (True, 1, 2**31 - 1),
    "seed": (True, 0, 2**63 - 1),
}
_LEAST_TEMPERATURE = 0.01  # above 0; smaller divisors overflow logits
# Fields without an effect here, with the values that request no effect.
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False, 0),
    "top_logprobs": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto",),
    "parallel_tool_calls": (True,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "reasoning_effort": (),
    "audio": (),
    "prediction": (),
    "suffix": ("",),
    "modalities": (["text"],),
    "web_search_options": (),
    "store": (False,),
    "service_tier": ("auto", "default"),
}
_KINDS = {  # fields of other types, by required type
    "model": (str, "a text"),
    "messages": (list, "a list of messages"),
    "prompt": (str, "a text"),
    "stream": (bool, "true or false"),
    "stream_options": (dict, "an object"),
    "tools": (list, "a list of functions"),
    "chat_template_kwargs": (dict, "an object"),
    "logit_bias": (dict, "an object of token ids and numbers"),
    "user": (str, "a text"),
    "metadata": (dict, "an object"),
}
_OF_CHAT = {"messages", "tools", "chat_template_kwargs", "tool_choice", "parallel_tool_calls", "max_completion_tokens"}
_OF_TEXT = {"prompt", "best_of", "echo", "suffix"}
_AS_DATA: dict[MediaKind, str] = {
    "image": "images must be data URLs (data:image/png;base64,...)",
    "audio": "sound must be base64 in a part of type `input_audio`, or a data URL (data:audio/wav;base64,...)",
    "video": "videos must be data URLs (data:video/mp4;base64,...)",
}
_FIELDS = {*_NUMBERS, *_WITHOUT_EFFECT, *_KINDS, "stop"}


class Refused(Exception):
    """Rejection of a request, with its HTTP status."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


def parse_body(body: bytes) -> dict[str, Any]:
    """Returns the JSON object of a request's body. Raises Refused if it is not one, or is out of bounds."""
    if sum(body.count(sign) for sign in (b",", b"[", b"{")) > MAX_VALUES:
        raise Refused(400, f"the body has more than {MAX_VALUES:,} values")
    try:
        fields = json.loads(body)
        rest = [(fields, 0)]
        while rest:
            value, depth = rest.pop()
            if depth > MAX_DEPTH:
                raise RecursionError
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{value} is not a number in JSON, or a number is too large")
            if isinstance(value, dict | list):
                rest += [(item, depth + 1) for item in (value.values() if isinstance(value, dict) else value)]
        json.dumps(fields, ensure_ascii=False).encode()
    except RecursionError:
        raise Refused(400, f"the body is nested more than {MAX_DEPTH} deep") from None
    except UnicodeEncodeError as error:
        surrogate = error.object[error.start : error.start + 1]
        raise Refused(400, f"the body contains an unpaired surrogate ({surrogate!a})") from None
    except ValueError as error:  # not UTF-8, not JSON, a number of thousands of digits
        raise Refused(400, f"the body is not JSON: {str(error)[:200]}") from None
    if not isinstance(fields, dict):
        raise Refused(400, "the body is not a JSON object")
    return fields


def check_fields(fields: dict[str, Any], is_chat: bool) -> None:
    """Raises Refused for a field that is unknown, of the wrong type, out of bounds or not supported."""
    supported = _FIELDS - (_OF_TEXT if is_chat else _OF_CHAT)
    if unknown := sorted(fields.keys() - supported):
        raise Refused(400, f"unknown field {unknown[0][:100]!r}: this server supports {', '.join(sorted(supported))}")
    for name, value in fields.items():
        if value is None:
            continue
        if name in _WITHOUT_EFFECT:
            equal = [allowed for allowed in _WITHOUT_EFFECT[name] if value == allowed]
            if not any(isinstance(value, bool) == isinstance(allowed, bool) for allowed in equal):
                raise Refused(400, f"`{name}: {_shown(value)}` is not supported by this server")
        if name in _NUMBERS:
            is_whole, least, most = _NUMBERS[name]
            is_number = isinstance(value, int) or (isinstance(value, float) and not is_whole)
            if isinstance(value, bool) or not is_number or not least <= value <= most:
                kind = "whole number" if is_whole else "number"
                raise Refused(
                    400, f"`{name}: {_shown(value)}`: expected a {kind} of at least {least} and at most {most}"
                )
        if name in _KINDS and not isinstance(value, _KINDS[name][0]):
            raise Refused(400, f"`{name}: {_shown(value)}`: expected {_KINDS[name][1]}")
    required = "messages" if is_chat else "prompt"
    if fields.get(required) is None:
        raise Refused(400, f"`{required}` is missing")
    temperature = fields.get("temperature") or 0
    if 0 < temperature < _LEAST_TEMPERATURE:
        raise Refused(400, f"`temperature: {temperature}`: expected 0, or at least {_LEAST_TEMPERATURE}")
    arguments = fields.get("chat_template_kwargs") or {}
    if len(json.dumps(arguments)) > MAX_ARGUMENTS:
        raise Refused(400, f"`chat_template_kwargs`: at most {MAX_ARGUMENTS:,} characters")
    try:
        check_template_arguments(arguments)
    except ValueError as error:
        raise Refused(400, f"`chat_template_kwargs`: {error}") from None
    options = fields.get("stream_options") or {}
    if options.keys() - {"include_usage"} or not isinstance(options.get("include_usage", False), bool):
        raise Refused(400, f"`stream_options: {_shown(options)}`: expected include_usage, true or false")


def stops_of(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the texts that end an answer. Raises Refused."""
    stop = [] if fields.get("stop") is None else fields["stop"]
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(text, str) and text for text in stops):
        raise Refused(400, "`stop`: expected a text, or a list of texts, none of them empty")
    if len(stops) > MAX_STOPS or max(map(len, stops), default=0) > MAX_STOP_CHARACTERS:
        raise Refused(400, f"`stop`: at most {MAX_STOPS} texts of {MAX_STOP_CHARACTERS} characters")
    return tuple(stops)


def settings_of(fields: Mapping[str, Any], of_model: GenerationConfig, room: int, vocabulary: int) -> GenerationConfig:
    """Returns the model's settings with a request's fields. room: tokens left in its context. Raises Refused."""
    limit = fields.get("max_completion_tokens") or fields.get("max_tokens")
    limit = min(room, limit or max(of_model.max_new_tokens or 0, DEFAULT_MAX_TOKENS))
    if (temperature := fields.get("temperature")) is None:
        temperature = (of_model.temperature or 1.0) if of_model.do_sample else 0.0
    options: dict[str, Any] = {name: fields.get(name) for name in ("top_p", "top_k", "repetition_penalty")}
    settings = generation_settings(of_model, Sampling(limit, float(temperature), **options))
    if biases := fields.get("logit_bias"):
        if len(biases) > MAX_BIASES:
            raise Refused(400, f"`logit_bias`: at most {MAX_BIASES} tokens")
        for key, value in biases.items():
            if not (key.isascii() and key.isdecimal() and len(key) < 10 and int(key) < vocabulary):
                raise Refused(
                    400, f"`logit_bias`: {key[:40]!r} is not a token of this model, whose ids are below {vocabulary:,}"
                )
            if isinstance(value, bool) or not isinstance(value, int | float) or not -100 <= value <= 100:
                raise Refused(400, f"`logit_bias`: {_shown(value)}: expected a number from -100 to 100")
        settings.sequence_bias = {(int(key),): float(value) for key, value in biases.items()}
    return settings


def _shown(value: Any) -> str:
    return json.dumps(value)[:100]


# --- prompts


class Prompts:
    """Converts HTTP requests for a lane, in one thread: tokenizers are not safe for two."""

    def __init__(self, entries: dict[str, Answerer]):
        self.entries, self._thread = entries, ThreadPoolExecutor(1, "prompts")
        configs = [entry.model.config for entry in entries.values()]
        takes_files = any(hasattr(one, "vision_config") or hasattr(one, "audio_config") for one in configs)
        self.max_body = MAX_BODY_BYTES if takes_files else MAX_BODY_BYTES // 4
        self._longest: dict[int, int] = {}  # characters of the longest token, by tokenizer

    async def make(self, body: bytes, is_chat: bool) -> tuple[dict[str, Any], Request]:
        """Returns a request's fields, and its request for the lane. Raises Refused."""
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
        try:
            if is_chat:
                if entry.chat is None:
                    raise Refused(400, "this model has no chat template: use /v1/completions")
                request = read_request(fields["messages"], fields.get("tools"))
                for file in files_of(request):
                    if not (isinstance(file.source, str) and file.source[:5].lower() == "data:"):
                        raise Refused(400, f"{_AS_DATA[file.kind]}: no file is read, no address fetched")
                texts = [(message.content, message.reasoning, message.tool_calls) for message in request.messages]
                if len(texts) > entry.context:
                    raise Refused(
                        400, f"the prompt has {len(texts):,} messages, and the model takes {entry.context:,} tokens"
                    )
                self._check_length(entry, len(json.dumps([texts, request.tools], ensure_ascii=False)))
                _check_videos(entry, files_of(request))
                prompt = entry.tokens(replace(request, template_arguments=fields.get("chat_template_kwargs") or {}))
            else:
                self._check_length(entry, len(fields["prompt"]))
                prompt = entry.plain(fields["prompt"])
                if not prompt.ids:
                    raise Refused(400, "`prompt` is empty")
            room = entry.context - len(prompt.ids)
        except (UserError, BadRow, RecursionError) as error:
            raise Refused(400, str(error)) from None
        settings = settings_of(fields, entry.model.generation_config, room, len(entry.tokenizer))
        tools = fields.get("tools") or None
        parser = build_response_parser(entry.tokenizer, entry.model, prompt.ids, tools) if is_chat else None
        return fields, Request(entry, prompt, settings, stops, fields.get("seed"), parser)

    def _check_length(self, entry: Answerer, characters: int) -> None:
        """Raises Refused for a text that exceeds the context even if each token were the longest of the vocabulary."""
        key = id(entry.tokenizer)
        if key not in self._longest:
            self._longest[key] = max(map(len, entry.tokenizer.get_vocab()))
        if characters > entry.context * self._longest[key]:
            raise Refused(
                400, f"the prompt has {characters:,} characters, and the model takes {entry.context:,} tokens"
            )


def _check_videos(entry: Answerer, files: Sequence[Reference]) -> None:
    """Raises Refused for videos that take minutes to decode, as a few bytes may, whose frames are alike. Raises BadRow
    for one that cannot be measured."""
    from finetune.data.media.family_table import kinds_taken
    from finetune.data.media.video_files import find_video

    if "video" not in kinds_taken(entry.model.config.model_type):
        return  # it is refused, and not opened
    rules: Any = entry.rules_of("video").model_copy(update={"verify": "header"})
    pixels = 0
    for file in files:
        if file.kind == "video":
            found = find_video(file.source or b"", rules, "", 1.0)
            pixels += found.frames * found.height * found.width
    if pixels > MAX_VIDEO_PIXELS:
        raise Refused(400, f"the videos have {pixels:,} pixels in all frames; at most {MAX_VIDEO_PIXELS:,} are decoded")

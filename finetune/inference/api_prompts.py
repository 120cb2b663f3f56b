"""Converts requests of OpenAI clients to requests for a lane."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from transformers.cli.serving.utils import build_response_parser

from finetune.errors import UserError
from finetune.inference.answering import Answerer, Prompt, images_of, read_request
from finetune.inference.api_fields import MAX_BODY_BYTES, Refused, check_fields, parse_body, settings_of, stops_of
from finetune.inference.lane import Request

_CONTEXT = 32_768  # tokens, for a model without a limit


def context_of(entry: Answerer) -> int:
    """Returns the model's limit of tokens, prompt and answer together."""
    config = entry.model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    stated = getattr(config, "max_position_embeddings", None) or _CONTEXT
    original = rope.get("original_max_position_embeddings") or stated
    return max(stated, int(original * (rope.get("factor") or 1)))


class Prompts:
    """Converts HTTP requests for a lane, in one thread: tokenizers are not safe for two."""

    def __init__(self, entries: dict[str, Answerer]):
        self.entries, self._thread = entries, ThreadPoolExecutor(1, "prompts")
        sees = any(hasattr(entry.model.config, "vision_config") for entry in entries.values())
        self.max_body = MAX_BODY_BYTES if sees else MAX_BODY_BYTES // 4
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
        context = context_of(entry)
        try:
            if is_chat:
                prompt = self._chat(entry, fields, context)
            else:
                self._check_length(entry, len(fields["prompt"]), context)
                prompt = entry.plain(fields["prompt"])
                if not prompt.ids:
                    raise Refused(400, "`prompt` is empty")
            room = context - len(prompt.ids)
            if room < 1:
                raise Refused(400, f"the prompt has {len(prompt.ids):,} tokens, and the model takes {context:,}")
        except (UserError, RecursionError) as error:
            raise Refused(400, str(error)) from None
        settings = settings_of(fields, entry.model.generation_config, room, len(entry.tokenizer))
        tools = fields.get("tools") or None
        parser = build_response_parser(entry.tokenizer, entry.model, prompt.ids, tools) if is_chat else None
        return fields, Request(entry, prompt, settings, stops, fields.get("seed"), parser)

    def _chat(self, entry: Answerer, fields: dict[str, Any], context: int) -> Prompt:
        if entry.chat is None:
            raise Refused(400, "this model has no chat template: use /v1/completions")
        request = read_request(fields["messages"], fields.get("tools"))
        if not all(isinstance(image, str) and image[:5].lower() == "data:" for image in images_of(request)):
            raise Refused(
                400, "images must be data URLs (data:image/png;base64,...): no file is read, no address fetched"
            )
        texts = [(message.content, message.reasoning, message.tool_calls) for message in request.messages]
        if len(texts) > context:
            raise Refused(400, f"the prompt has {len(texts):,} messages, and the model takes {context:,} tokens")
        self._check_length(entry, len(json.dumps([texts, request.tools], ensure_ascii=False)), context)
        return entry.tokens(replace(request, template_arguments=fields.get("chat_template_kwargs") or {}))

    def _check_length(self, entry: Answerer, characters: int, context: int) -> None:
        """Raises Refused for a text that exceeds the context even if each token were the longest of the vocabulary."""
        key = id(entry.tokenizer)
        if key not in self._longest:
            self._longest[key] = max(map(len, entry.tokenizer.get_vocab()))
        if characters > context * self._longest[key]:
            raise Refused(400, f"the prompt has {characters:,} characters, and the model takes {context:,} tokens")

"""A thread in which models generate, one answer at a time, and the pieces that it reports meanwhile."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from tokenizers.decoders import DecodeStream
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList
from transformers.cli.serving.utils import ReasoningText, ToolCall, response_events_to_chunks

from finetune.data.dataset import until_end
from finetune.release.inference.answering import Prompt, StopFilter

Piece = str | ReasoningText | ToolCall  # piece of an answer; str: text


@dataclass(frozen=True)
class Finished:
    """End of an answer. text: all of it; None: a parser split it, and its pieces are the answer."""

    text: str | None
    finish_reason: str
    tokens: int


@dataclass
class Request:
    """Request for an answer: prompt, settings, and the destination of its pieces."""

    entry: Any  # an Answerer
    prompt: Prompt
    settings: GenerationConfig
    stops: tuple[str, ...]
    seed: int | None
    parser: Any = None  # transformers' ResponseParser: separates thoughts and tool calls from the text
    pieces: asyncio.Queue[Piece] = field(default_factory=asyncio.Queue)
    begun: asyncio.Event = field(default_factory=asyncio.Event)  # set by the first piece
    gone: threading.Event = field(default_factory=threading.Event)  # the client has closed the connection

    def put(self, piece: Piece) -> None:
        self.pieces.put_nowait(piece)
        self.begun.set()


class Lane:
    """A thread that answers requests in order. Without its client, a request is dropped or ends at the next token."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "answering")
        self._closing = threading.Event()
        self._decoders: dict[int, Any] = {}
        self.answering = 0  # requests

    def submit(self, request: Request) -> Future[Finished]:
        loop = asyncio.get_running_loop()

        def tell(piece: Piece) -> None:
            loop.call_soon_threadsafe(request.put, piece)

        return self._thread.submit(self._answer, request, tell)

    def close(self) -> None:
        self._closing.set()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _answer(self, request: Request, tell: Callable[[Piece], None]) -> Finished:
        if request.gone.is_set() or self._closing.is_set():
            return Finished("", "stop", 0)
        self.answering = 1
        try:
            if request.seed is not None:
                torch.manual_seed(request.seed)
            tokenizer = request.entry.tokenizer
            if id(tokenizer) not in self._decoders:  # this thread's own copy: tokenizers are not thread-safe
                self._decoders[id(tokenizer)] = copy.deepcopy(tokenizer)
            watch = PieceReporter(request, self._decoders[id(tokenizer)], tell, self._closing)
            inputs, criteria = request.entry.inputs([request.prompt]), StoppingCriteriaList([watch])
            more = {"generation_config": request.settings, "stopping_criteria": criteria}
            output = request.entry.model.generate(**inputs, **more)
            return watch.finish(output[0, len(request.prompt.ids) :].tolist())
        finally:
            self.answering = 0


class PieceReporter(StoppingCriteria):
    """Reports the pieces of an answer after each token; ends it at a stop, or if its client is gone."""

    def __init__(self, request: Request, tokenizer: Any, tell: Callable[[Piece], None], closing: threading.Event):
        self._request, self._tokenizer, self._tell, self._closing = request, tokenizer, tell, closing
        self._seen = len(request.prompt.ids)
        ends: Any = request.settings.eos_token_id
        self._ends = set(ends if isinstance(ends, list) else [ends])
        self._hides_special = request.parser is None
        self._stream = DecodeStream([], skip_special_tokens=self._hides_special)
        self._text, self._filter = "", StopFilter(request.stops)
        if request.parser is not None:
            self._parsed(request.parser.initial_events)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> Any:  # (1, T), (1, V) -> (1,)
        new, self._seen = input_ids[0, self._seen :].tolist(), input_ids.shape[1]
        for token in new:
            if token in self._ends and self._hides_special:
                break
            self._feed(self._stream.step(self._tokenizer.backend_tokenizer, token) or "")
        stops = self._filter.ended or self._request.gone.is_set() or self._closing.is_set()
        return torch.full((len(input_ids),), stops, device=input_ids.device)

    def finish(self, ids: list[int]) -> Finished:
        """Returns the end of an answer, after sending held-back text: part of a character, or of a stop."""
        kept = until_end(ids, self._ends)
        whole = self._tokenizer.decode(kept if self._hides_special else ids, skip_special_tokens=self._hides_special)
        self._feed(whole[len(self._text) :] if whole.startswith(self._text) else "")
        if self._request.parser is not None:
            try:
                _, events = self._request.parser.finalize()
            except (ValueError, RuntimeError):  # the answer ended within a call
                events = []
            self._parsed(events)
        if rest := self._filter.feed("", is_last=True):
            self._tell(rest)
        reason = "stop" if len(kept) < len(ids) or self._filter.ended else "length"
        text = StopFilter(self._request.stops).feed(whole, is_last=True) if self._request.parser is None else None
        return Finished(text, reason, len(ids))

    def _feed(self, text: str) -> None:
        self._text += text
        if not text:
            return
        if self._request.parser is not None:
            self._parsed(self._request.parser.feed(text))
        elif shown := self._filter.feed(text):
            self._tell(shown)

    def _parsed(self, events: Any) -> None:
        for piece in response_events_to_chunks(events):
            if type(piece) is not str:
                self._tell(piece)
            elif shown := self._filter.feed(piece):
                self._tell(shown)

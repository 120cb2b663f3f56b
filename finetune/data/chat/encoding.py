"""Converts a text and spans of its characters to token ids and a mask of the trained ones.

In use the model is given the tokens of the prompt alone, and writes the answer after them. The full text is tokenized
once, so that the ids are the usual ones, and kept if it begins with the tokens of the text up to each border of a span:

    prompt    "ASSISTANT: "                ▁AS SIST ANT : ▁
    full      "ASSISTANT: Hello</s>"       ▁AS SIST ANT : ▁Hello </s>       another token before "Hello"
    cut                                    ▁AS SIST ANT : ▁ Hello </s>      as in use

If it does not, as here and where a prompt ends and an answer begins with a newline, and "\\n\\n" is one token, the text
is cut at its borders, and each piece becomes the tokens that continue those before it. Without such tokens the
row is bad.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from finetune.data.chat.template import Span
from finetune.data.samples import BadRow
from finetune.errors import UserError
from finetune.utils import is_from_rust

Tokens = tuple[NDArray[np.int32], NDArray[np.bool_]]  # input_ids (T,), loss mask (T,)

# Words whose tokens a tokenizer remembers; it begins with 10,000, and a corpus has more. Saves a tenth of the time and
# changes no token.
WORDS_CACHED = 200_000

# Texts that a piece is tokenized after, so that it is no beginning of a text, to which many tokenizers add a space. The
# first is hardly ever part of a longer token; a letter is what a piece continues in the middle of a word.
_ANCHORS = ("\N{FOX FACE}", "\n", ":", "(", "0", "x", "Q", "\N{CJK UNIFIED IDEOGRAPH-6F22}")

_CONTEXT_TOKENS = 32  # before a piece, with which it is decoded


@dataclass(frozen=True)
class Offsets:
    """Positions of the tokens of a text, looked up one by one: few are needed, and a list of all is slow to build."""

    count: int  # of tokens
    at: Callable[[int], Span]  # characters [begin, end) of a token; begins ascend

    def first_from(self, character: int) -> int:
        """Returns the first token that begins at a character or after it; `count` if there is none."""
        return bisect_left(range(self.count), character, key=lambda i: self.at(i)[0])


@dataclass(frozen=True)
class _Whole:
    """A text, tokenized at once, and its spans."""

    text: str
    spans: Sequence[Span]
    ids: list[int]
    offsets: Offsets

    def borders(self) -> list[int]:
        return sorted({border for span in self.spans for border in span if 0 < border < len(self.text)})


@dataclass(frozen=True)
class Encoder:
    """A tokenizer and its added tokens. Build it with `encoder`."""

    tokenizer: PreTrainedTokenizerBase
    added: frozenset[int]  # ids of added tokens, which are never part of another
    swallowed: re.Pattern[str]  # the white space that some of them take as theirs

    def encode(self, texts: Sequence[str], spans: Sequence[Sequence[Span]]) -> list[Tokens | BadRow]:
        """Returns ids and masks of many texts in a few calls; the reason for a text that cannot be cut.

        Raises UserError for a text that the library fails on.
        """
        try:
            # Not through the tokenizer's __call__: it lists the offsets of all tokens, and masks need only a few.
            wholes = [self._whole(*one) for one in zip(texts, spans, self._encoded(texts), strict=True)]
            # After the last added token: of most templates the same few characters in every text.
            ends = {one.text[begin:end]: None for one in wholes for _, begin, end in self._last_parts(one)}
            tokens_of = dict(zip(ends, (one.ids for one in self._encoded(list(ends))), strict=True))
            return [self._tokens(one, tokens_of) for one in wholes]
        except BaseException as error:
            if not is_from_rust(error):
                raise
            raise UserError(
                f"the tokenizer fails{self._first_failing(texts)}: {str(error)[:200]}. Its tokenizer.json is damaged, "
                "or made for another version of `tokenizers`. Fix: restore the file, or install that version"
            ) from None

    def continuation(self, ids: Sequence[int], text: str, begin: int) -> list[int]:
        """Returns the tokens of text[begin:] after `ids`, those of text[:begin]. Raises BadRow if there are none.

        Those whose decoding adds just these characters; or, as some tokenizers do not keep all characters, the same as
        the tokens of the whole text give.
        """
        piece, context = text[begin:], list(ids[-_CONTEXT_TOKENS:])
        if not begin:
            return self.ids(text)
        wanted = self._decoded(context) + self.swallowed.sub("", piece)
        whole = self.ids(text)
        candidates = [self.ids(piece), *([whole[len(ids) :]] if whole[: len(ids)] == list(ids) else [])]
        for candidate in (*candidates, *self._anchored(piece)):
            if self._decoded([*context, *candidate]) == wanted:
                return candidate
            if self._decoded([*ids, *candidate]) == self._decoded(whole):
                return candidate
        raise BadRow(
            f"the tokenizer cannot separate {text[max(0, begin - 20) : begin]!r} from {piece[:20]!r}. It has no tokens "
            "for the second text after the first, which the model would be given in use. Fix: end the prompt with a "
            "whole word, or begin the answer with a space or a newline"
        )

    def _encoded(self, texts: Sequence[str]) -> list[Any]:
        fast: Any = self.tokenizer
        backend = fast.backend_tokenizer
        backend.no_truncation()  # a tokenizer.json may ask for them
        backend.no_padding()
        # add_special_tokens=False: the template writes its own, a second BOS would be one too many.
        return backend.encode_batch(list(texts), add_special_tokens=False)

    def ids(self, text: str) -> list[int]:
        return self._encoded([text])[0].ids

    def _decoded(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    def _anchored(self, piece: str) -> Iterator[list[int]]:
        """Yields the tokens of a text in the middle of another."""
        for anchor in _ANCHORS:
            alone, joined = self.ids(anchor), self.ids(anchor + piece)
            if joined[: len(alone)] == alone:
                yield joined[len(alone) :]

    def _first_failing(self, texts: Sequence[str]) -> str:
        for text in texts:
            try:
                self.tokenizer(text, add_special_tokens=False)
            except BaseException as error:
                if not is_from_rust(error):
                    raise
                return f" on the text that begins {text[:60]!a}"
        return ""

    def _whole(self, text: str, spans: Sequence[Span], encoding: Any) -> _Whole:
        ids = encoding.ids  # a new list each time
        offsets = Offsets(len(ids), encoding.token_to_chars)
        for i, (begin, end) in enumerate(spans := list(spans)):
            last = offsets.first_from(end) - 1
            if last >= 0 and ids[last] in self.added:  # it may swallow white space after it (Phi-3's <|end|>)
                spans[i] = (begin, max(end, offsets.at(last)[1]))
        return _Whole(text, spans, ids, offsets)

    def _last_parts(self, whole: _Whole) -> Iterator[tuple[int, int, int]]:
        """Yields for each border the last added token before it and the characters from it to the border.

        Tokens after an added token do not depend on the text before it.
        """
        for border in whole.borders():
            last = whole.offsets.first_from(border) - 1
            while last >= 0 and not (whole.ids[last] in self.added and whole.offsets.at(last)[1] <= border):
                last -= 1
            yield max(last, 0), whole.offsets.at(last)[0] if last >= 0 else 0, border

    def _tokens(self, whole: _Whole, tokens_of: Mapping[str, list[int]]) -> Tokens | BadRow:
        """tokens_of: of the texts in `_last_parts`."""
        counts = {0: 0, len(whole.text): len(whole.ids)}  # tokens up to a border
        for first, begin, border in self._last_parts(whole):
            part = tokens_of[whole.text[begin:border]]
            if whole.ids[first : first + len(part)] != part:
                first, part = 0, self.ids(whole.text[:border])
                if whole.ids[: len(part)] != part:
                    return self._cut(whole)
            counts[border] = count = first + len(part)
            if count and whole.offsets.at(count - 1)[1] > border:  # white space that an added token swallows
                return self._cut(whole)
        trained = np.zeros(len(whole.ids), bool)
        for begin, end in whole.spans:
            trained[counts[begin] : counts[end]] = True
        return np.array(whole.ids, np.int32), trained

    def _cut(self, whole: _Whole) -> Tokens | BadRow:
        ids, trained = list[int](), list[bool]()
        for begin, end in pairwise([0, *whole.borders(), len(whole.text)]):
            try:
                piece = self.continuation(ids, whole.text[:end], begin)
            except BadRow as error:
                return error
            ids += piece
            trained += [any(first <= begin and end <= last for first, last in whole.spans)] * len(piece)
        return np.array(ids, np.int32), np.array(trained, bool)


def encoder(tokenizer: PreTrainedTokenizerBase) -> Encoder:
    """Returns a tokenizer with its added tokens, without the unknown one: it stands for a part of a text."""
    remember_words(tokenizer)
    added: dict[int, Any] = tokenizer.added_tokens_decoder
    before = [rf"\s+(?={re.escape(str(token))})" for token in added.values() if token.lstrip and str(token)]
    after = [rf"(?<={re.escape(str(token))})\s+" for token in added.values() if token.rstrip and str(token)]
    swallowed = re.compile("|".join([*before, *after]) or r"(?!)")
    unknown: Any = tokenizer.unk_token_id
    return Encoder(tokenizer, frozenset(added) - {unknown}, swallowed)


def remember_words(tokenizer: PreTrainedTokenizerBase) -> None:
    """Enlarges the tokenizer's word cache. Repeat it in each process: a tokenizer sent there has lost it."""
    fast: Any = tokenizer
    if resize := getattr(fast.backend_tokenizer.model, "_resize_cache", None):  # BPE and Unigram have one
        resize(WORDS_CACHED)

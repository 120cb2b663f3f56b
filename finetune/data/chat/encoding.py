"""Converts a text and spans of its characters to token ids and a mask of the trained ones.

The full text is tokenized once, so the ids are the usual ones. Only if a token holds characters on
both sides of a border, as "\\n\\n" does when a prompt ends and an answer begins with a newline, the text is cut at its
borders and tokenized in pieces: in use the model is given the tokens of the prompt, and writes the answer after them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from finetune.data.chat.template import Span
from finetune.errors import UserError
from finetune.utils import is_from_rust

Tokens = tuple[NDArray[np.int32], NDArray[np.bool_]]  # input_ids (T,), loss mask (T,)

# Words whose tokens a tokenizer remembers; it begins with 10,000, and a corpus has more. Saves a tenth of the time and
# changes no token.
WORDS_CACHED = 200_000


@dataclass(frozen=True)
class Offsets:
    """Positions of the tokens of a text, looked up one by one: few are needed, and a list of all is slow to build."""

    count: int  # of tokens
    at: Callable[[int], Span]  # characters [begin, end) of a token; begins ascend

    def first_from(self, character: int) -> int:
        """Returns the first token that begins at a character or after it; `count` if there is none."""
        return bisect_left(range(self.count), character, key=lambda i: self.at(i)[0])


@dataclass(frozen=True)
class Encoder:
    """A tokenizer, with the traits that masks depend on. Build it with `encoder`."""

    tokenizer: PreTrainedTokenizerBase
    added: frozenset[int]  # ids of added tokens, which are never part of another; some swallow the white space around
    can_cut: bool  # whether pieces of a text, tokenized one by one, are the text again

    def encode(self, texts: Sequence[str], spans: Sequence[Sequence[Span]]) -> list[Tokens]:
        """Returns ids and masks of many texts in a few calls. Raises UserError for a text that the library fails on."""
        try:
            fast: Any = self.tokenizer
            backend = fast.backend_tokenizer
            backend.no_truncation()  # a tokenizer.json may ask for them
            backend.no_padding()
            # Not through the tokenizer's __call__: it lists the offsets of all tokens, and masks need only a few.
            # add_special_tokens=False: the template writes its own, a second BOS would be one too many.
            encoded = backend.encode_batch(list(texts), add_special_tokens=False)
            return [self._by_offsets(*one) for one in zip(texts, spans, encoded, strict=True)]
        except BaseException as error:
            if not is_from_rust(error):
                raise
            raise UserError(
                f"the tokenizer fails{self._first_failing(texts)}: {str(error)[:200]}; its tokenizer.json is damaged, "
                "or made for another version of `tokenizers`"
            ) from None

    def _first_failing(self, texts: Sequence[str]) -> str:
        for text in texts:
            try:
                self.tokenizer(text, add_special_tokens=False)
            except BaseException as error:
                if not is_from_rust(error):
                    raise
                return f" on the text that begins {text[:60]!a}"
        return ""

    def _by_offsets(self, text: str, spans: Sequence[Span], encoding: Any) -> Tokens:
        ids = encoding.ids  # a new list each time
        offsets = Offsets(len(ids), encoding.token_to_chars)
        if not self.can_cut:
            return np.array(ids, np.int32), tokens_in_spans(offsets, spans)
        for i, (begin, end) in enumerate(spans := list(spans)):
            last = offsets.first_from(end) - 1
            if last >= 0 and ids[last] in self.added:  # it may swallow white space after it (Phi-3's <|end|>)
                spans[i] = (begin, max(end, offsets.at(last)[1]))
        borders = sorted({border for span in spans for border in span if 0 < border < len(text)})
        if all(is_clean(border, offsets) for border in borders):
            return np.array(ids, np.int32), tokens_in_spans(offsets, spans)
        pieces = list(pairwise([0, *borders, len(text)]))
        batch = self.tokenizer([text[a:b] for a, b in pieces], add_special_tokens=False, verbose=False)["input_ids"]
        inside = [any(begin <= a and b <= end for begin, end in spans) for a, b in pieces]
        trained = np.repeat(inside, [len(ids) for ids in batch])
        return np.concatenate([np.asarray(ids, np.int32) for ids in batch]), trained.astype(bool)


def encoder(tokenizer: PreTrainedTokenizerBase) -> Encoder:
    """Returns a tokenizer with its traits, determined by trying it."""
    pieces: Collection[list[int]] = tokenizer(["b", "c"], add_special_tokens=False)["input_ids"]
    joined = tokenizer.decode([i for ids in pieces for i in ids], clean_up_tokenization_spaces=False)
    remember_words(tokenizer)
    # Tokenizers made from SentencePiece put a space before every text: pieces of one would have more than the whole.
    return Encoder(tokenizer, frozenset(tokenizer.added_tokens_decoder), can_cut=joined == "bc")


def remember_words(tokenizer: PreTrainedTokenizerBase) -> None:
    """Enlarges the tokenizer's word cache. Repeat it in each process: a tokenizer sent there has lost it."""
    fast: Any = tokenizer
    if resize := getattr(fast.backend_tokenizer.model, "_resize_cache", None):  # BPE and Unigram have one
        resize(WORDS_CACHED)


def is_clean(border: int, offsets: Offsets) -> bool:
    """Returns whether one token ends at a border and the next begins there, so that no token holds both sides.

        offsets  (0,3) (3,8) (8,9) (9,13)      a border at 8 is clean, at 5 it is not: the second token is on both sides

    Not clean either: white space that no token owns up to (offsets trimmed), on either side.
    """
    after = offsets.first_from(border)
    if after < offsets.count:
        begin, end = offsets.at(after)
        if begin != border or end == border:
            return False
    return after == 0 or offsets.at(after - 1)[1] == border


def tokens_in_spans(offsets: Offsets, spans: Sequence[Span]) -> NDArray[np.bool_]:
    """Returns a mask of the tokens that begin in a span.

        offsets  (0,3) (3,8) (8,9) (9,13)      spans  (3,8) (8,12)
        mask       no   yes   yes   yes

    A token that begins before a span belongs to the model's input there, not to its output.
    """
    mask = np.zeros(offsets.count, bool)
    for begin, end in spans:
        mask[offsets.first_from(begin) : offsets.first_from(end)] = True
    return mask

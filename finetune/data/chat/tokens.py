"""From a text and spans of its characters to token ids and which of them are trained.

The text is tokenised once, whole, so the ids are those that everyone else gets. Only where a token holds characters on
both sides of a border, as "\\n\\n" does where a prompt ends and an answer begins with a newline, the text is cut at its
borders and tokenised in pieces: in use the model is given the tokens of the prompt, and writes the answer behind them.

Where the bytes of the tokens prove where they lie (`byte_level.py`), the tokenizer is not asked for it.
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

from finetune.data.chat.byte_level import ByteLevel, Tokens, byte_level
from finetune.data.chat.jinja import Span

# Words whose tokens a tokenizer remembers; it begins with 10,000, and a corpus has more. Saves a tenth of the time and
# changes no token.
WORDS_CACHED = 200_000

SEARCHED = 10_000  # tokens that a tokenizer looks through sooner than Python asks for a dozen of them

TRIED = 16  # texts that say whether the bytes of the others are worth a try


@dataclass(frozen=True)
class Offsets:
    """Where the tokens of a text lie, asked one by one: few are of interest, and a list of all takes long to make."""

    count: int  # of tokens
    at: Callable[[int], Span]  # characters [begin, end) of a token; begins ascend
    owner: Callable[[int], int | None] = lambda character: None  # the first token that holds it; None: none, or unknown

    def first_from(self, character: int) -> int:
        """The first token that begins at a character or behind it; `count` where none does."""
        if not self.count or self.at(self.count - 1)[0] < character:
            return self.count
        owner = self.owner(character) if self.count <= SEARCHED else None
        # An owner may begin earlier, or behind an empty token that begins there as well.
        if owner is not None and self.at(owner)[0] == character and (owner == 0 or self.at(owner - 1)[0] < character):
            return owner
        return bisect_left(range(self.count), character, key=lambda i: self.at(i)[0])


@dataclass(frozen=True)
class Encoder:
    """A tokenizer, and what masks must know of it. Build it with `encoder`."""

    tokenizer: PreTrainedTokenizerBase
    added: frozenset[int]  # ids of added tokens, which are never part of another; some swallow the white space around
    can_cut: bool  # whether pieces of a text, tokenised one by one, are the text again
    byte_level: ByteLevel | None  # None where bytes do not tell where tokens lie

    def encode(self, texts: Sequence[str], spans: Sequence[Sequence[Span]]) -> list[Tokens]:
        """Ids and masks of many in a few calls."""
        fast: Any = self.tokenizer
        backend = fast.backend_tokenizer
        backend.no_truncation()  # a tokenizer.json may ask for them
        backend.no_padding()
        placed = self._placed(texts, spans)
        rest = [i for i, one in enumerate(placed) if one is None]
        # Not through the tokenizer's __call__: it makes a list of the offsets of all tokens, of which masks need few.
        # add_special_tokens=False: the template writes its own, a second BOS would be one too many.
        encoded = backend.encode_batch([texts[i] for i in rest], add_special_tokens=False) if rest else []
        asked = (self._one(texts[i], spans[i], encoding) for i, encoding in zip(rest, encoded, strict=True))
        return [next(asked) if one is None else one for one in placed]

    def _placed(self, texts: Sequence[str], spans: Sequence[Sequence[Span]]) -> list[Tokens | None]:
        """What bytes prove. Of texts whose answers begin within a token they prove nothing, and all is done twice."""
        if self.byte_level is None:
            return [None] * len(texts)
        first = self.byte_level.place(texts[:TRIED], spans[:TRIED])
        if 2 * first.count(None) > len(first):
            return first + [None] * len(texts[TRIED:])
        return first + self.byte_level.place(texts[TRIED:], spans[TRIED:])

    def _one(self, text: str, spans: Sequence[Span], encoding: Any) -> Tokens:
        ids = encoding.ids  # a list that is made anew each time
        offsets = Offsets(len(ids), encoding.token_to_chars, encoding.char_to_token)
        if self.can_cut:
            spans = [(begin, self._behind_added(end, ids, offsets)) for begin, end in spans]
            borders = sorted({border for span in spans for border in span if 0 < border < len(text)})
            if any(not is_clean(border, offsets) for border in borders):
                return self._in_pieces(text, spans, [0, *borders, len(text)])
        return np.array(ids, np.int32), tokens_in_spans(offsets, spans)

    def _behind_added(self, end: int, ids: Sequence[int], offsets: Offsets) -> int:
        """The end of a span, moved behind the white space that the added token there swallows (Phi-3's <|end|>)."""
        last = offsets.first_from(end) - 1
        return max(end, offsets.at(last)[1]) if last >= 0 and ids[last] in self.added else end

    def _in_pieces(self, text: str, spans: Sequence[Span], cuts: Sequence[int]) -> Tokens:
        pieces = list(pairwise(cuts))
        batch = self.tokenizer([text[a:b] for a, b in pieces], add_special_tokens=False, verbose=False)["input_ids"]
        inside = [any(begin <= a and b <= end for begin, end in spans) for a, b in pieces]
        trained = np.repeat(inside, [len(ids) for ids in batch])
        return np.concatenate([np.asarray(ids, np.int32) for ids in batch]), trained.astype(bool)


def encoder(tokenizer: PreTrainedTokenizerBase) -> Encoder:
    """What a tokenizer is like, found by trying it."""
    pieces: Collection[list[int]] = tokenizer(["b", "c"], add_special_tokens=False)["input_ids"]
    joined = tokenizer.decode([i for ids in pieces for i in ids], clean_up_tokenization_spaces=False)
    remember_words(tokenizer)
    # Tokenizers made from SentencePiece put a space before every text: pieces of one would have more than the whole.
    can_cut = joined == "bc"
    by_bytes = byte_level(tokenizer) if can_cut else None
    return Encoder(tokenizer, frozenset(tokenizer.added_tokens_decoder), can_cut, by_bytes)


def remember_words(tokenizer: PreTrainedTokenizerBase) -> None:
    """To be said again in another process: a tokenizer that was sent there has forgotten it."""
    fast: Any = tokenizer
    if resize := getattr(fast.backend_tokenizer.model, "_resize_cache", None):  # BPE and Unigram have one
        resize(WORDS_CACHED)


def is_clean(border: int, offsets: Offsets) -> bool:
    """Whether one token ends at a border and the next begins there, so that no token holds both sides.

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
    """Tokens that begin in a span.

        offsets  (0,3) (3,8) (8,9) (9,13)      spans  (3,8) (8,12)
        mask       no   yes   yes   yes

    A token that begins before a span is what the model is given there, not what it writes.
    """
    mask = np.zeros(offsets.count, bool)
    for begin, end in spans:
        mask[offsets.first_from(begin) : offsets.first_from(end)] = True
    return mask

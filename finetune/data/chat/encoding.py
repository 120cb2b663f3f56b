"""Converts a text and spans of its characters to token ids and a mask of the trained ones.

The full text is tokenized once, so the ids are the usual ones. Only if a token holds characters on
both sides of a border, as "\\n\\n" does when a prompt ends and an answer begins with a newline, the text is cut at its
borders and tokenized in pieces: in use the model is given the tokens of the prompt, and writes the answer after them.

If the bytes of the tokens prove their positions, the tokenizer need not compute them.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import models, pre_tokenizers
from transformers import PreTrainedTokenizerBase

from finetune.data.chat.template import Span
from finetune.errors import UserError
from finetune.utils import is_from_rust

Tokens = tuple[NDArray[np.int32], NDArray[np.bool_]]  # input_ids (T,), loss mask (T,)

# Words whose tokens a tokenizer remembers; it begins with 10,000, and a corpus has more. Saves a tenth of the time and
# changes no token.
WORDS_CACHED = 200_000

TRIED = 16  # texts that say whether the bytes of the others are worth a try


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
    byte_level: ByteLevel | None  # None if bytes do not determine the positions of tokens

    def encode(self, texts: Sequence[str], spans: Sequence[Sequence[Span]]) -> list[Tokens]:
        """Returns ids and masks of many texts in a few calls. Raises UserError for a text that the library fails on."""
        try:
            return self._encoded(texts, spans)
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

    def _encoded(self, texts: Sequence[str], spans: Sequence[Sequence[Span]]) -> list[Tokens]:
        fast: Any = self.tokenizer
        backend = fast.backend_tokenizer
        backend.no_truncation()  # a tokenizer.json may ask for them
        backend.no_padding()
        placed: list[Tokens | None] = [None] * len(texts)
        if self.byte_level is not None:
            placed = self.byte_level.place(texts[:TRIED], spans[:TRIED])
            # For texts whose answers begin within a token, bytes prove nothing, and the work would be done twice.
            proves = 2 * placed.count(None) <= len(placed)
            others = texts[TRIED:], spans[TRIED:]
            placed += self.byte_level.place(*others) if proves else [None] * len(others[0])
        rest = [i for i, one in enumerate(placed) if one is None]
        # Not through the tokenizer's __call__: it lists the offsets of all tokens, and masks need only a few.
        # add_special_tokens=False: the template writes its own, a second BOS would be one too many.
        encoded = backend.encode_batch([texts[i] for i in rest], add_special_tokens=False) if rest else []
        by_offsets = (self._by_offsets(texts[i], spans[i], one) for i, one in zip(rest, encoded, strict=True))
        return [next(by_offsets) if one is None else one for one in placed]

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
    can_cut = joined == "bc"
    by_bytes = byte_level(tokenizer) if can_cut else None
    return Encoder(tokenizer, frozenset(tokenizer.added_tokens_decoder), can_cut, by_bytes)


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


# --- placed by the bytes that each token stands for
#
# Under a byte-level tokenizer a token always stands for the same bytes, so a table of lengths gives the
# begin of each one, and the tokenizer need not compute it: offsets take a quarter of its time.
#
#     text     Hi<|end|>\n      tokens   Hi  <|end|>  \n      lengths  2 7 1      begin at  0 2 9, end at 10
#
# These positions are proved: no token stands for more bytes than it has in its text, and together they have
# those of the text, so each has as many as the table says; and every border of a trained span lies between two tokens.
# For the rest (`None`) the tokenizer is called, which gives the same ids and masks if both have an answer.


@dataclass(frozen=True)
class ByteLevel:
    """Byte lengths of the tokens of such a tokenizer. Build it with `byte_level`."""

    backend: Any  # the tokenizer of `tokenizers`
    lengths: NDArray[np.int32]  # (V,) bytes that a token stands for; 0 if unknown

    def place(self, texts: Sequence[str], spans: Sequence[Sequence[Span]]) -> list[Tokens | None]:
        """Returns ids and masks of many texts, in one call of the tokenizer; None if the bytes prove nothing."""
        # A text is kept if the normalizer, NFC if there is one, does not change it. Added tokens are cut out before it,
        # but a text that it leaves whole it also leaves in parts: normal forms are closed under substrings
        # (https://www.unicode.org/reports/tr15).
        normalizer = self.backend.normalizer
        kept = [normalizer is None or text.isascii() or normalizer.normalize_str(text) == text for text in texts]
        # An empty text replaces one that is not kept: its length is wrong, so it comes out as None.
        encoded = self.backend.encode_batch_fast(
            [text if one else "" for text, one in zip(texts, kept, strict=True)], add_special_tokens=False
        )
        every = [one.ids for one in encoded]  # new lists each time
        rows = np.fromiter(accumulate(map(len, every), initial=0), np.int64, len(every) + 1)  # first token of each text
        ids = np.fromiter(chain.from_iterable(every), np.int32, int(rows[-1]))  # (T,) of all texts

        begins = np.concatenate(([0], np.cumsum(self.lengths[ids], dtype=np.int64)))  # (T + 1,) in bytes, over all
        proved = np.diff(begins[rows]) == np.array([len(text.encode()) for text in texts], np.int64)
        row = np.repeat(np.arange(len(texts)), [2 * len(one) for one in spans])  # (B,) of each border
        borders = np.fromiter(  # in bytes; spans are characters
            (
                border if text.isascii() else len(text[:border].encode())
                for text, of_text in zip(texts, spans, strict=True)
                for border in chain.from_iterable(of_text)
            ),
            np.int64,
            len(row),
        )
        targets = begins[rows[row]] + borders
        at = np.clip(np.searchsorted(begins, targets), rows[row], rows[row + 1])  # the first token from there
        proved[row[begins[at] != targets]] = False
        trained = np.zeros(len(ids), bool)
        for begin, end in at.reshape(-1, 2).tolist():
            trained[begin:end] = True
        places = zip(rows[:-1].tolist(), rows[1:].tolist(), proved.tolist(), strict=True)
        return [(ids[begin:end], trained[begin:end]) if one else None for begin, end, one in places]


def byte_level(tokenizer: PreTrainedTokenizerBase) -> ByteLevel | None:
    """Returns None for a tokenizer whose tokens may stand for other bytes than their own, or whose offsets leave out
    the white space at a token's ends."""
    fast: Any = tokenizer
    backend, added = fast.backend_tokenizer, fast.added_tokens_decoder
    model, vocabulary = backend.model, backend.get_vocab(with_added_tokens=False)
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    before = list(_parts(backend.pre_tokenizer))
    levels = [part for part in before if part["type"] == "ByteLevel"]
    is_exact = (
        # The model's tokens, joined, are its input: no mark of a word's parts, no unknown token.
        isinstance(model, models.BPE)
        and not (model.continuing_subword_prefix or model.end_of_word_suffix or model.byte_fallback)
        and (vocabulary.keys() >= alphabet or model.unk_token is None)
        # The text reaches it unchanged, except for one spelling in bytes, or NFC.
        and len(levels) == 1
        and not levels[0]["add_prefix_space"]
        and all(part["type"] in ("ByteLevel", "Split", "Digits", "Punctuation") for part in before)  # add no byte
        and all(part["type"] == "NFC" for part in _parts(backend.normalizer))
        and not any(token.lstrip or token.rstrip for token in added.values())  # stands for white space as well
        and not any(part.get("trim_offsets") for part in _parts(backend.post_processor))
    )
    if not is_exact:
        return None
    lengths = np.zeros(max([*vocabulary.values(), *added], default=-1) + 1, np.int32)
    for text, number in vocabulary.items():
        lengths[number] = len(text) * alphabet.issuperset(text)
    normalizer = backend.normalizer
    for number, token in added.items():
        text = str(token)
        # 0, which proves nothing, if a text would have to be changed to hold this token.
        is_kept = normalizer is None or normalizer.normalize_str(text) == text
        lengths[number] = len(text.encode()) * is_kept
    return ByteLevel(backend, lengths)


def _parts(component: Any) -> Iterator[dict[str, Any]]:
    """Yields a component of a tokenizer, or those of a sequence, as tokenizer.json has them."""
    waiting = [json.loads(component.__getstate__())] if component is not None else []
    while waiting:
        part = waiting.pop()
        if part["type"] == "Sequence":
            waiting += next(value for value in part.values() if isinstance(value, list))
        else:
            yield part

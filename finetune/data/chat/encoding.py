"""Converts a text and spans of its characters to token ids and a mask of the trained ones.

The full text is tokenized once, so the ids are the usual ones. Only if a token holds characters on
both sides of a border, as "\\n\\n" does when a prompt ends and an answer begins with a newline, the text is cut at its
borders and tokenized in pieces: in use the model is given the tokens of the prompt, and writes the answer after them.

If the bytes of the tokens prove their positions, the tokenizer is not needed for them.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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

SEARCHED = 10_000  # tokens that a tokenizer looks through sooner than Python asks for a dozen of them

TRIED = 16  # texts that say whether the bytes of the others are worth a try


@dataclass(frozen=True)
class Offsets:
    """Positions of the tokens of a text, looked up one by one: few are needed, and a list of all is slow to build."""

    count: int  # of tokens
    at: Callable[[int], Span]  # characters [begin, end) of a token; begins ascend
    owner: Callable[[int], int | None] = lambda character: None  # the first token that holds it, or None

    def first_from(self, character: int) -> int:
        """The first token that begins at a character or after it; `count` if there is none."""
        if not self.count or self.at(self.count - 1)[0] < character:
            return self.count
        owner = self.owner(character) if self.count <= SEARCHED else None
        # An owner may begin earlier, or after an empty token that begins there as well.
        if owner is not None and self.at(owner)[0] == character and (owner == 0 or self.at(owner - 1)[0] < character):
            return owner
        return bisect_left(range(self.count), character, key=lambda i: self.at(i)[0])


@dataclass(frozen=True)
class Encoder:
    """A tokenizer, with the traits that masks depend on. Build it with `encoder`."""

    tokenizer: PreTrainedTokenizerBase
    added: frozenset[int]  # ids of added tokens, which are never part of another; some swallow the white space around
    can_cut: bool  # whether pieces of a text, tokenized one by one, are the text again
    byte_level: ByteLevel | None  # None if bytes do not determine the positions of tokens

    def encode(self, texts: Sequence[str], spans: Sequence[Sequence[Span]]) -> list[Tokens]:
        """Ids and masks of many texts in a few calls. Raises UserError for a text that the library fails on."""
        try:
            return self._encoded(texts, spans)
        except BaseException as error:
            if is_from_rust(error):
                raise UserError(self._failure(texts, error)) from None
            raise

    def _failure(self, texts: Sequence[str], error: BaseException) -> str:
        """Returns a description of the failure, with the first text that the tokenizer fails on by itself."""
        begin = ""
        for text in texts:
            try:
                self.tokenizer(text, add_special_tokens=False)
            except BaseException as again:
                if not is_from_rust(again):
                    raise
                begin = f" on the text that begins {text[:60]!a}"
                break
        return (
            f"the tokenizer fails{begin}: {str(error)[:200]}; its tokenizer.json is damaged, or made for another "
            "version of `tokenizers`"
        )

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
        by_offsets = (self._one(texts[i], spans[i], encoding) for i, encoding in zip(rest, encoded, strict=True))
        return [next(by_offsets) if one is None else one for one in placed]

    def _one(self, text: str, spans: Sequence[Span], encoding: Any) -> Tokens:
        ids = encoding.ids  # a new list each time
        offsets = Offsets(len(ids), encoding.token_to_chars, encoding.char_to_token)
        if self.can_cut:
            for i, (begin, end) in enumerate(spans := list(spans)):
                last = offsets.first_from(end) - 1
                if last >= 0 and ids[last] in self.added:  # it may swallow white space after it (Phi-3's <|end|>)
                    spans[i] = (begin, max(end, offsets.at(last)[1]))
            borders = sorted({border for span in spans for border in span if 0 < border < len(text)})
            if any(not is_clean(border, offsets) for border in borders):
                return self._in_pieces(text, spans, [0, *borders, len(text)])
        return np.array(ids, np.int32), tokens_in_spans(offsets, spans)

    def _in_pieces(self, text: str, spans: Sequence[Span], cuts: Sequence[int]) -> Tokens:
        pieces = list(pairwise(cuts))
        batch = self.tokenizer([text[a:b] for a, b in pieces], add_special_tokens=False, verbose=False)["input_ids"]
        inside = [any(begin <= a and b <= end for begin, end in spans) for a, b in pieces]
        trained = np.repeat(inside, [len(ids) for ids in batch])
        return np.concatenate([np.asarray(ids, np.int32) for ids in batch]), trained.astype(bool)


def encoder(tokenizer: PreTrainedTokenizerBase) -> Encoder:
    """Traits of a tokenizer, determined by trying it."""
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
    """Tokens that begin in a span.

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
# Under a byte-level tokenizer a token always stands for the same bytes, so a table of lengths tells where
# each one begins, and the tokenizer need not compute it: offsets take a quarter of its time.
#
#     text     Hi<|end|>\n      tokens   Hi  <|end|>  \n      lengths  2 7 1      begin at  0 2 9, end at 10
#
# These positions are proved: no token stands for more bytes than it has in its text, and together they have
# those of the text, so each has as many as the table says; and every border of a trained span lies between two tokens.
# For the rest (`None`) the tokenizer is called, which gives the same ids and masks if both have an answer.

_SPLITTERS = ("Split", "Digits", "Punctuation")  # pre-tokenizers that add no byte
_SPACE = "Ġ"  # a space in the alphabet of byte-level vocabularies


@dataclass(frozen=True)
class ByteLevel:
    """Byte lengths of the tokens of such a tokenizer. Build it with `byte_level`."""

    backend: Any  # the tokenizer of `tokenizers`
    lengths: NDArray[np.int32]  # (V,) bytes that a token stands for; 0 if unknown
    spaced: NDArray[np.bool_] | None  # (V,) whether it begins or ends with characters that offsets lack; None: none do

    def place(self, texts: Sequence[str], spans: Sequence[Sequence[Span]]) -> list[Tokens | None]:
        """Ids and masks of many texts, in one call of the tokenizer; None if the bytes prove nothing."""
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
        ends = np.fromiter(accumulate(map(len, every)), np.int64, len(every))
        ids = np.fromiter(chain.from_iterable(every), np.int32, int(ends[-1]) if every else 0)
        return self._masked(ids, np.concatenate(([0], ends)), texts, spans)

    def _masked(
        self, ids: NDArray[np.int32], rows: NDArray[np.int64], texts: Sequence[str], spans: Sequence[Sequence[Span]]
    ) -> list[Tokens | None]:
        """ids: (T,) of all texts; rows: (R + 1,) first token of each text."""
        begins = np.concatenate(([0], np.cumsum(self.lengths[ids], dtype=np.int64)))  # (T + 1,) in bytes, over all
        size = np.array([len(text.encode()) for text in texts], np.int64)
        proved = np.diff(begins[rows]) == size
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
        wanted = begins[rows[row]] + borders
        at = np.clip(np.searchsorted(begins, wanted), rows[row], rows[row + 1])  # the first token from there
        proved[row[begins[at] != wanted]] = False
        if self.spaced is not None:  # white space at a border, which offsets leave out: `Encoder` cuts the text there
            spaced = np.append(self.spaced[ids], False)
            proved[row[(spaced[at] & (at < rows[row + 1])) | (spaced[at - 1] & (at > rows[row]))]] = False
        trained = np.zeros(len(ids), bool)
        for begin, end in at.reshape(-1, 2).tolist():
            trained[begin:end] = True
        places = zip(rows[:-1].tolist(), rows[1:].tolist(), proved.tolist(), strict=True)
        return [(ids[begin:end], trained[begin:end]) if known else None for begin, end, known in places]


def byte_level(tokenizer: PreTrainedTokenizerBase) -> ByteLevel | None:
    """Returns None for a tokenizer whose tokens may stand for other bytes than their own."""
    fast: Any = tokenizer
    backend, added = fast.backend_tokenizer, fast.added_tokens_decoder
    vocabulary = backend.get_vocab(with_added_tokens=False)
    if not (_writes_itself(backend.model, vocabulary) and _adds_nothing(backend)):
        return None
    if any(token.lstrip or token.rstrip for token in added.values()):  # such a token stands for white space as well
        return None
    texts = {number: text for text, number in vocabulary.items()} | {number: str(one) for number, one in added.items()}
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    lengths = np.zeros(max(texts, default=-1) + 1, np.int32)
    spaced = np.zeros(len(lengths), bool)
    for number, text in texts.items():
        lengths[number] = _added_bytes(backend, text) if number in added else len(text) * alphabet.issuperset(text)
        spaced[number] = text[:1] == _SPACE or text[-1:] == _SPACE or text.strip() != text
    # Whether offsets leave out the white space at a token's ends.
    trims = any(part.get("trim_offsets") for part in _parts(backend.post_processor))
    return ByteLevel(backend, lengths, spaced if trims else None)


def _writes_itself(model: Any, vocabulary: Mapping[str, int]) -> bool:
    """Returns whether a model's joined tokens are at most its input: no mark of a word's parts, no unknown token."""
    if not isinstance(model, models.BPE) or model.continuing_subword_prefix or model.end_of_word_suffix:
        return False
    has_all_bytes = vocabulary.keys() >= set(pre_tokenizers.ByteLevel.alphabet())
    return not model.byte_fallback and (has_all_bytes or model.unk_token is None)


def _adds_nothing(backend: Any) -> bool:
    """Returns whether the text reaches the model unchanged, except for one spelling in bytes, or NFC."""
    before = list(_parts(backend.pre_tokenizer))
    levels = [part for part in before if part["type"] == "ByteLevel"]
    return (
        len(levels) == 1
        and not levels[0]["add_prefix_space"]
        and all(part["type"] in ("ByteLevel", *_SPLITTERS) for part in before)
        and all(part["type"] == "NFC" for part in _parts(backend.normalizer))
    )


def _parts(component: Any) -> Iterator[dict[str, Any]]:
    """A component of a tokenizer, or those of a sequence, as tokenizer.json has them."""
    waiting = [json.loads(component.__getstate__())] if component is not None else []
    while waiting:
        part = waiting.pop()
        if part["type"] == "Sequence":
            waiting += next(value for value in part.values() if isinstance(value, list))
        else:
            yield part


def _added_bytes(backend: Any, text: str) -> int:
    """Returns 0, which proves nothing, if a text would have to be changed to hold this token."""
    normalizer = backend.normalizer
    return len(text.encode()) if normalizer is None or normalizer.normalize_str(text) == text else 0

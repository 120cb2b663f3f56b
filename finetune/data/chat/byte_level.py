"""Ids and masks under a byte-level tokenizer, placed by the bytes that each token stands for.

There a token stands for the same bytes wherever it is found, so a table of lengths says where each one begins, and the
tokenizer need not say it: a quarter of its time goes into offsets.

    text     Hi<|end|>\\n      tokens   Hi  <|end|>  \\n      lengths  2 7 1      begin at  0 2 9, end at 10

What is placed so is proved to be. No token stands for more bytes than it has in its text, and together they have those
of the text, so each has as many as the table says; and every border of what is trained lies between two tokens. The
rest (`None`) is for `tokens.py`, which asks the tokenizer and gives the same ids and masks where both have an answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import models, pre_tokenizers
from transformers import PreTrainedTokenizerBase

from finetune.data.chat.jinja import Span

Tokens = tuple[NDArray[np.int32], NDArray[np.bool_]]  # input_ids (T,), trained (T,)

_SPLITTERS = ("Split", "Digits", "Punctuation")  # pre-tokenizers that add no byte
_SPACE = "Ġ"  # a space in the alphabet of byte-level vocabularies


@dataclass(frozen=True)
class ByteLevel:
    """What the tokens of such a tokenizer stand for. Build it with `byte_level`."""

    backend: Any  # the tokenizer of `tokenizers`
    lengths: NDArray[np.int32]  # (V,) bytes that a token stands for; 0 where it is not known
    spaced: NDArray[np.bool_] | None  # (V,) whether it begins or ends with what offsets leave out; None: they do not

    def place(self, texts: Sequence[str], spans: Sequence[Sequence[Span]]) -> list[Tokens | None]:
        """Ids and masks of many, in one call of the tokenizer; None where the bytes prove nothing."""
        kept = [self._is_kept(text) for text in texts]
        # An empty text in the place of one that is not kept: its length is wrong, so it comes out as None.
        encoded = self.backend.encode_batch_fast(
            [text if one else "" for text, one in zip(texts, kept, strict=True)], add_special_tokens=False
        )
        every = [one.ids for one in encoded]  # lists that are made anew each time
        ends = np.fromiter(accumulate(map(len, every)), np.int64, len(every))
        ids = np.fromiter(chain.from_iterable(every), np.int32, int(ends[-1]) if every else 0)
        return self._masked(ids, np.concatenate(([0], ends)), texts, spans)

    def _is_kept(self, text: str) -> bool:
        """Whether the normalizer, NFC if there is one, changes nothing. Added tokens are cut out before it, but what it
        leaves whole it leaves in parts: normal forms are closed under substrings (https://www.unicode.org/reports/tr15).
        """
        normalizer = self.backend.normalizer
        return normalizer is None or text.isascii() or normalizer.normalize_str(text) == text

    def _masked(
        self, ids: NDArray[np.int32], rows: NDArray[np.int64], texts: Sequence[str], spans: Sequence[Sequence[Span]]
    ) -> list[Tokens | None]:
        """ids: (T,) of all texts; rows: (R + 1,) where those of each text begin."""
        begins = np.concatenate(([0], np.cumsum(self.lengths[ids], dtype=np.int64)))  # (T + 1,) in bytes, over all
        size = np.array([_num_bytes(text) for text in texts], np.int64)
        proved = np.diff(begins[rows]) == size
        row = np.repeat(np.arange(len(texts)), [2 * len(one) for one in spans])  # (B,) of each border
        borders = np.fromiter(chain.from_iterable(map(_in_bytes, texts, spans)), np.int64, len(row))
        wanted = begins[rows[row]] + borders
        at = np.clip(np.searchsorted(begins, wanted), rows[row], rows[row + 1])  # the first token from there
        proved[row[(begins[at] != wanted) | self._are_spaced(ids, at, rows[row], rows[row + 1])]] = False
        trained = np.zeros(len(ids), bool)
        for begin, end in at.reshape(-1, 2).tolist():
            trained[begin:end] = True
        places = zip(rows[:-1].tolist(), rows[1:].tolist(), proved.tolist(), strict=True)
        return [(ids[begin:end], trained[begin:end]) if known else None for begin, end, known in places]

    def _are_spaced(
        self, ids: NDArray[np.int32], at: NDArray[np.int64], first: NDArray[np.int64], end: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """(B,) whether offsets would leave out white space at a border: `tokens.py` cuts the text there."""
        if self.spaced is None:
            return np.zeros(len(at), bool)
        spaced = np.append(self.spaced[ids], False)
        return (spaced[at] & (at < end)) | (spaced[at - 1] & (at > first))


def byte_level(tokenizer: PreTrainedTokenizerBase) -> ByteLevel | None:
    """None for a tokenizer whose tokens may stand for other bytes than their own."""
    fast: Any = tokenizer
    backend, added = fast.backend_tokenizer, fast.added_tokens_decoder
    vocabulary = backend.get_vocab(with_added_tokens=False)
    if not (_writes_itself(backend.model, vocabulary) and _adds_nothing(backend)):
        return None
    if any(token.lstrip or token.rstrip for token in added.values()):  # such a one stands for white space as well
        return None
    texts = {number: text for text, number in vocabulary.items()} | {number: str(one) for number, one in added.items()}
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    lengths = np.zeros(max(texts, default=-1) + 1, np.int32)
    spaced = np.zeros(len(lengths), bool)
    for number, text in texts.items():
        lengths[number] = _added_bytes(backend, text) if number in added else len(text) * alphabet.issuperset(text)
        spaced[number] = text[:1] == _SPACE or text[-1:] == _SPACE or text.strip() != text
    return ByteLevel(backend, lengths, spaced if _trims(backend) else None)


def _writes_itself(model: Any, vocabulary: Mapping[str, int]) -> bool:
    """Whether a model's tokens, joined, are at most what it was given: no mark of a word's parts, no unknown token."""
    if not isinstance(model, models.BPE) or model.continuing_subword_prefix or model.end_of_word_suffix:
        return False
    whole = vocabulary.keys() >= set(pre_tokenizers.ByteLevel.alphabet())
    return not model.byte_fallback and (whole or model.unk_token is None)


def _adds_nothing(backend: Any) -> bool:
    """Whether the text reaches the model as it is but for one spelling in bytes, or for NFC."""
    before = list(_parts(backend.pre_tokenizer))
    levels = [part for part in before if part["type"] == "ByteLevel"]
    return (
        len(levels) == 1
        and not levels[0]["add_prefix_space"]
        and all(part["type"] in ("ByteLevel", *_SPLITTERS) for part in before)
        and all(part["type"] == "NFC" for part in _parts(backend.normalizer))
    )


def _trims(backend: Any) -> bool:
    """Whether offsets leave out the white space at a token's ends."""
    return any(part.get("trim_offsets") for part in _parts(backend.post_processor))


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
    """0, which proves nothing, where a text would have to be changed to hold this token."""
    normalizer = backend.normalizer
    return len(text.encode()) if normalizer is None or normalizer.normalize_str(text) == text else 0


def _num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _in_bytes(text: str, spans: Sequence[Span]) -> Iterator[int]:
    """The borders of spans, which are characters."""
    borders = chain.from_iterable(spans)
    return borders if text.isascii() else (len(text[:border].encode()) for border in borders)

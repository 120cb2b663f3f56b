"""What each token of an example writes, as text that people can read."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

SHOWN_TOKENS = 400  # of an example inside an error message, and in a terminal

# What has no picture of its own, or turns the text after it around: controls but newline and tab, directions, spaces
# of no width, surrogates, tags. The joiners U+200C and U+200D stay: emoji and Persian are written with them.
INVISIBLE = re.compile(
    "[\0-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # what a decoder writes for a part of a character
LONGEST_PART = 16  # tokens that are tried as one character


@dataclass(frozen=True)
class Token:
    """One token as people see it. The texts of an example's tokens, joined, are its decoded text."""

    id: int
    trained: bool
    special: bool  # an added token: it has an id of its own wherever it stands
    text: str  # what it adds; "" in a character of several tokens, but for the last of them
    part: str = ""  # what it is where `text` does not say: the bytes of a part of a character, ⟨E2⟩⟨80⟩


def tokens_in(
    input_ids: NDArray[np.integer], trained: NDArray[np.bool_], tokenizer: PreTrainedTokenizerBase
) -> list[Token]:
    """Both (T,). Each with the text that it adds."""
    ids, special = input_ids.tolist(), special_ids(tokenizer)
    names = [str(name) for name in tokenizer.convert_ids_to_tokens(ids)]
    texts = _texts(ids, lambda some: str(tokenizer.decode(some, clean_up_tokenization_spaces=False)))
    found = zip(ids, trained.tolist(), names, texts, strict=True)
    return [
        Token(i, is_trained, i in special, text, _part(name) if is_part or not text else "")
        for i, is_trained, name, (text, is_part) in found
    ]


def special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Ids of the added tokens. `all_special_ids` has those with a role only: not Llama 3's <|start_header_id|>."""
    added: dict[int, Any] = tokenizer.added_tokens_decoder
    return {*tokenizer.all_special_ids, *added}


_Text = tuple[str, bool]  # what a token adds, whether it is part of a character
_Decode = Callable[[list[int]], str]


def _texts(ids: list[int], decode: _Decode) -> list[_Text]:
    """By the token where that adds up to the whole text, else (SentencePiece drops spaces) by its context."""
    texts = _texts_alone(ids, decode)
    return texts if "".join(text for text, _ in texts) == decode(ids) else _texts_in_context(ids, decode)


def _texts_alone(ids: list[int], decode: _Decode) -> list[_Text]:
    """Each token decoded without the others; parts of a character are decoded together.

    ids of "a🦊b"    64      172  253  99  232        65
    texts            a       ""   ""   ""  🦊         b
    """
    alone = {i: decode([i]) for i in set(ids)}
    is_part = [INCOMPLETE in alone[i] for i in ids] + [False]
    texts, begin = [], 0
    for at, i in enumerate(ids):
        text = decode(ids[begin : at + 1]) if is_part[at] else alone[i]
        # A token that is whole cannot complete the character before it.
        if INCOMPLETE in text and is_part[at + 1] and at - begin < LONGEST_PART:
            continue
        texts += [("", True)] * (at - begin) + [(text, is_part[at])]
        begin = at + 1
    return texts


def _texts_in_context(ids: list[int], decode: _Decode) -> list[_Text]:
    """What each token adds to the text of the one before it, so that a decoder knows that the text has begun."""
    texts, before, begin = [], 0, 0
    for at in range(len(ids)):
        text = decode(ids[before : at + 1])
        if text.endswith(INCOMPLETE) and at + 1 < len(ids) and at - begin < LONGEST_PART:
            continue
        count = at + 1 - begin
        texts += [("", True)] * (count - 1) + [(text[len(decode(ids[before:begin])) :], count > 1)]
        before, begin = begin, at + 1
    return texts


def _byte_letters() -> dict[str, int]:
    """The letters that byte-level vocabularies write bytes with (https://github.com/openai/gpt-2, encoder.py)."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTES = _byte_letters()
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")  # of SentencePiece


def _part(name: str) -> str:
    """A token of the vocabulary as bytes: `Ġâ` and `<0xE2>` are " ⟨E2⟩" and "⟨E2⟩"; its name if it has none."""
    if found := _BYTE_TOKEN.fullmatch(name):
        return f"⟨{found[1]}⟩"
    if not all(letter in _BYTES for letter in name):
        return f"⟨{name}⟩"
    return "".join(chr(byte) if 0x20 <= byte < 0x7F else f"⟨{byte:02X}⟩" for byte in map(_BYTES.__getitem__, name))


# --- what cannot be seen


def visible(text: str) -> str:
    """The text with a name in place of what cannot be seen: ␛ for the escape of terminals, ⟨U+202E⟩, ..."""
    return INVISIBLE.sub(lambda found: name_of(found[0]), text)


def name_of(character: str) -> str:
    """Of an invisible character: its picture in Unicode's block of them, else its number."""
    code = ord(character)
    if code < 0x20 or code == 0x7F:
        return chr(0x2421 if code == 0x7F else 0x2400 + code)
    return f"⟨U+{code:04X}⟩"


def plain_text(input_ids: NDArray[np.integer], trained: NDArray[np.bool_], tokenizer: PreTrainedTokenizerBase) -> str:
    """The decoded example, shortened, with [[ ]] around what is trained."""
    tokens = tokens_in(input_ids[:SHOWN_TOKENS], trained[:SHOWN_TOKENS], tokenizer)
    runs = [(key, "".join(token.text for token in run)) for key, run in groupby(tokens, key=lambda t: t.trained)]
    text = "".join(f"[[{visible(run)}]]" if is_trained else visible(run) for is_trained, run in runs)
    return text + (f" ... ({len(input_ids)} tokens)" if len(input_ids) > SHOWN_TOKENS else "")

"""Visible text of a token, and names for invisible characters. Imports nothing heavy."""

from __future__ import annotations

import re
from dataclasses import dataclass

# Characters without a glyph, or that turn later text around: controls but newline and tab, directions, spaces
# of no width, surrogates, tags. The joiners U+200C and U+200D stay: emoji and Persian are written with them.
INVISIBLE = re.compile(
    "[\0-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)


@dataclass(frozen=True)
class Token:
    """One token as people see it. The texts of an example's tokens, joined, are its decoded text."""

    id: int
    trained: bool
    special: bool  # an added token: it has an id of its own wherever it stands
    text: str  # its text; "" in a character of several tokens, except for the last of them
    part: str = ""  # the bytes of a part of a character, ⟨E2⟩⟨80⟩, which `text` cannot show


def visible(text: str) -> str:
    """The text with a name in place of each invisible character: ␛ for the escape of terminals, ⟨U+202E⟩, ..."""
    return INVISIBLE.sub(lambda match: name_of(match[0]), text)


def name_of(character: str) -> str:
    """Returns for an invisible character its picture in Unicode's block of them, else its number."""
    code = ord(character)
    if code < 0x20 or code == 0x7F:
        return chr(0x2421 if code == 0x7F else 0x2400 + code)
    return f"⟨U+{code:04X}⟩"

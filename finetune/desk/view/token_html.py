"""Tokens as HTML, for the pages of `inspect` and `report`.

An example is a sequence of runs of similar tokens: <mark> if supervised, else <span>; each special token is its own
run. A run keeps its tokens in attributes, which the page's script reads on hover:

    <mark data-p="7" data-i="284 220 19" data-n="2 1 1"> = 4</mark>
        position of the first token, ids, lengths of their texts in UTF-16 units (as in JavaScript)
    data-b="1 ⟨E2⟩|2 ⟨80⟩"    bytes of tokens (index within the run) that are part of a character
    <s data-c="202e" ...>     a character that is invisible or not allowed in HTML; other <s> are marks before one
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from itertools import groupby

from markupsafe import Markup

from finetune.data.visible_text import INVISIBLE, Token, visible
from finetune.recipe.objective_settings import OBJECTIVE_SECTIONS


def sequence_names(objective: str, count: int) -> tuple[str, ...]:
    """Returns the names of an example's sequences; empty for a single one."""
    return ("",) if count == 1 else OBJECTIVE_SECTIONS[objective].row_kind.sequences


def tokens_html(tokens: Sequence[Token], first: int = 0) -> Markup:
    """Returns runs of tokens, see the module docstring; first: position of tokens[0]."""
    parts, position = [], first
    # Groups similar tokens; a special one is alone.
    alike = groupby(enumerate(tokens), key=lambda one: (one[1].trained, one[0] if one[1].special else -1))
    for run in ([token for _, token in group] for _, group in alike):
        name = "mark" if run[0].trained else "span"
        attributes = f' data-p="{position}" data-i="{" ".join(str(token.id) for token in run)}"'
        if len(run) > 1:
            lengths = (len(token.text.encode("utf-16-le", "surrogatepass")) // 2 for token in run)  # in JavaScript
            attributes += f' data-n="{" ".join(map(str, lengths))}"'
        if marks := "|".join(f"{n} {visible(token.part)}" for n, token in enumerate(run) if token.part):
            attributes += f' data-b="{html.escape(marks)}"'
        if run[0].special:
            attributes += ' class="x"'
        # With marks before newlines, tabs and trailing spaces, and in place of invisible characters.
        pieces = _MARKED.split("".join(token.text for token in run))
        for n, piece in enumerate(pieces):
            if n % 2 == 0:
                pieces[n] = html.escape(piece, quote=False)
            elif piece[0] in _WHITESPACE:
                pieces[n] = _WHITESPACE[piece[0]] * len(piece)
            else:
                pieces[n] = f'<s data-c="{ord(piece):x}" data-v="U+{ord(piece):04X}"></s>'
        parts.append(Markup(f"<{name}{attributes}>{''.join(pieces)}</{name}>"))
        position += len(run)
    return Markup("").join(parts)


_MARKED = re.compile(rf"(\n|\t| +(?=\n|\Z)|{INVISIBLE.pattern})")
_WHITESPACE = {"\n": "<s></s>\n", "\t": '<s class="t"></s>\t', " ": '<s class="d"></s> '}  # each with its mark

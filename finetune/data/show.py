"""Examples for people and for other programs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any

from rich.text import Text
from transformers import PreTrainedTokenizerBase

from finetune.data.chat.renderer import UNTRAINED
from finetune.data.examples import Example
from finetune.data.token_text import SHOWN_TOKENS, Token, tokens_in, visible

TRAINED_STYLE, CONTEXT_STYLE, SPECIAL_STYLE, MARK_STYLE = "bold green", "dim", "magenta", "dim"
EVEN_STYLE, ODD_STYLE = "", "underline"  # tell a token from its neighbour, on dark and light terminals alike


def to_json_lines(examples: Iterable[Example], rows: int | None = None) -> Iterator[dict[str, Any]]:
    """{path, row, input_ids, labels} of the first `rows` examples (all of them if None), one dict each."""
    for example in islice(examples, rows):
        yield {
            "path": example.path,
            "row": example.row,
            "input_ids": example.input_ids.tolist(),
            "labels": example.labels.tolist(),
        }


def tokens_of(example: Example, tokenizer: PreTrainedTokenizerBase) -> list[Token]:
    """The tokens of an example with the text that each of them adds."""
    return tokens_in(example.input_ids, example.labels != UNTRAINED, tokenizer)


@dataclass(frozen=True)
class Look:
    """How examples are drawn in a terminal."""

    colour: bool = True  # False: [[ ]] around what is trained
    borders: bool = False  # between tokens, with ids
    full: bool = False  # False: long examples without their middle


def render_rich(example: Example, tokenizer: PreTrainedTokenizerBase, look: Look | None = None) -> Text:
    """The decoded example for a terminal: trained tokens green, the rest dim, special tokens visible and magenta.

    In trained text newlines, tabs and spaces at the end of a line have a mark.
    """
    look = look or Look()
    shown, tokens = Text(), tokens_of(example, tokenizer)
    kept, left_out = shortened(tokens, None if look.full else SHOWN_TOKENS)
    _draw(shown, kept[0], 0, look)
    if left_out:
        shown.append(f"\n... {left_out_note(left_out)} (--full shows them) ...\n", style="italic yellow")
        _draw(shown, kept[1], len(tokens) - len(kept[1]), look)
    return shown


def left_out_note(left_out: Sequence[Token]) -> str:
    """How much of an example is not shown."""
    return f"{len(left_out):,} tokens not shown here, {sum(token.trained for token in left_out):,} of them trained"


def shortened(tokens: Sequence[Token], most: int | None) -> tuple[tuple[Sequence[Token], ...], Sequence[Token]]:
    """((head, tail), what is between them): at most `most` tokens, two thirds of them at the head; None: all."""
    if most is None or len(tokens) <= most:
        return (tokens, []), []
    head, tail = most - most // 3, len(tokens) - most // 3
    return (tokens[:head], tokens[tail:]), tokens[head:tail]


def _draw(shown: Text, tokens: Sequence[Token], first: int, look: Look) -> None:
    """first: the position of tokens[0]."""
    at = first
    for trained, run in groupby(tokens, key=lambda token: token.trained):
        brackets = ("[[", "]]") if trained and not look.colour else ("", "")
        shown.append(brackets[0])
        for _, alike in groupby(run, key=lambda token: token.special):
            pieces = list(alike)
            _draw_run(shown, pieces, at, look)
            at += len(pieces)
        shown.append(brackets[1])


def _draw_run(shown: Text, tokens: Sequence[Token], first: int, look: Look) -> None:
    """Tokens that are alike."""
    trained, special = tokens[0].trained, tokens[0].special
    style = TRAINED_STYLE if trained else SPECIAL_STYLE if special else CONTEXT_STYLE
    if not look.borders:
        _draw_text(shown, "".join(token.text for token in tokens), style, trained)
        return
    for at, token in enumerate(tokens, start=first):
        _draw_token(shown, token, style, at, look)


_SUBSCRIPT = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")


def _draw_token(shown: Text, token: Token, style: str, at: int, look: Look) -> None:
    edge = (EVEN_STYLE, ODD_STYLE)[at % 2] if look.colour else ""
    shown.append("" if look.colour else "|")
    number = str(token.id).translate(_SUBSCRIPT)
    before, after = (number, "") if token.text.endswith("\n") else ("", number)  # not on the next line
    shown.append(visible(token.part) + before, style=f"{MARK_STYLE} {edge}")
    _draw_text(shown, token.text, f"{style} {edge}", marked=True)
    shown.append(after, style=f"{MARK_STYLE} {edge}")


_MARKS = re.compile(r"(\n|\t| +(?=\n|\Z))")


def _draw_text(shown: Text, text: str, style: str, marked: bool) -> None:
    """marked: newlines, tabs and spaces at the end of a line become visible."""
    for n, piece in enumerate(_MARKS.split(visible(text)) if marked else [visible(text)]):
        if n % 2 == 0:
            shown.append(piece, style=style)
        else:
            shown.append(piece.replace("\n", "⏎\n").replace("\t", "⇥\t").replace(" ", "·"), style=MARK_STYLE)

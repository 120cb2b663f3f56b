"""Examples as text that people can read: the text of each token, coloured for a terminal, and as JSON."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as ListLike
from dataclasses import astuple, dataclass, replace
from itertools import groupby, islice, zip_longest
from typing import Any

from rich.text import Text
from transformers import PreTrainedTokenizerBase

from finetune.data.chat.renderer import labels_of
from finetune.data.samples import LISTED, Clip, Example, Medium, Sequence, Video, files_of
from finetune.data.visible_text import Token, visible

SHOWN_TOKENS = 400  # of an example inside an error message, and in a terminal

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # a decoder's output for a part of a character
LONGEST_PART = 16  # tokens that are tried as one character


def tokens_of(sequence: Sequence, tokenizer: PreTrainedTokenizerBase) -> list[Token]:
    """Returns the tokens of a sequence, each with the text that it adds."""
    ids, special = sequence.input_ids.tolist(), special_ids(tokenizer)
    names = [str(name) for name in tokenizer.convert_ids_to_tokens(ids)]

    def decode(some: list[int]) -> str:
        return str(tokenizer.decode(some, clean_up_tokenization_spaces=False))

    texts = _texts_alone(ids, decode)
    if "".join(text for text, _ in texts) != decode(ids):  # SentencePiece drops spaces
        # Each after the one before it, so that a decoder knows that the text has begun.
        texts, before, begin = [], 0, 0
        for at in range(len(ids)):
            text = decode(ids[before : at + 1])
            if text.endswith(INCOMPLETE) and at + 1 < len(ids) and at - begin < LONGEST_PART:
                continue
            count = at + 1 - begin
            texts += [("", True)] * (count - 1) + [(text[len(decode(ids[before:begin])) :], count > 1)]
            before, begin = begin, at + 1
    return [
        Token(i, is_trained, i in special, text, _part(name) if is_part or not text else "")
        for i, is_trained, name, (text, is_part) in zip(ids, sequence.loss_mask.tolist(), names, texts, strict=True)
    ]


def special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Returns ids of added tokens. `all_special_ids` has only those with a role, not Llama 3's <|start_header_id|>."""
    added: dict[int, Any] = tokenizer.added_tokens_decoder
    return {*tokenizer.all_special_ids, *added}


_Text = tuple[str, bool]  # the text of a token, whether it is part of a character
_Decode = Callable[[list[int]], str]


def _texts_alone(ids: list[int], decode: _Decode) -> list[_Text]:
    """Decodes each token without the others; parts of a character are decoded together.

    ids of "a🦊b"    64      172  253  99  232        65
    texts            a       ""   ""   ""  🦊         b
    """
    alone = {i: decode([i]) for i in set(ids)}
    is_part = [INCOMPLETE in alone[i] for i in ids] + [False]
    texts, begin = [], 0
    for at, i in enumerate(ids):
        text = decode(ids[begin : at + 1]) if is_part[at] else alone[i]
        # A token of complete characters cannot complete the character before it.
        if INCOMPLETE in text and is_part[at + 1] and at - begin < LONGEST_PART:
            continue
        texts += [("", True)] * (at - begin) + [(text, is_part[at])]
        begin = at + 1
    return texts


# The letters that byte-level vocabularies write bytes with (https://github.com/openai/gpt-2, encoder.py).
_OWN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _OWN]
_BYTES = {chr(byte): byte for byte in _OWN} | {chr(256 + n): byte for n, byte in enumerate(_OTHERS)}
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")  # of SentencePiece


def _part(name: str) -> str:
    """Returns a token of the vocabulary as bytes: " ⟨E2⟩" for `Ġâ`, "⟨E2⟩" for `<0xE2>`; its name if it has none."""
    if match := _BYTE_TOKEN.fullmatch(name):
        return f"⟨{match[1]}⟩"
    if not all(letter in _BYTES for letter in name):
        return f"⟨{name}⟩"
    return "".join(chr(byte) if 0x20 <= byte < 0x7F else f"⟨{byte:02X}⟩" for byte in map(_BYTES.__getitem__, name))


def plain_text(sequence: Sequence, tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns the decoded sequence, shortened, with [[ ]] around trained text."""
    length = len(sequence.input_ids)
    tokens = tokens_of(Sequence(sequence.input_ids[:SHOWN_TOKENS], sequence.loss_mask[:SHOWN_TOKENS]), tokenizer)
    runs = [(key, "".join(token.text for token in run)) for key, run in groupby(tokens, key=lambda t: t.trained)]
    text = "".join(f"[[{visible(run)}]]" if is_trained else visible(run) for is_trained, run in runs)
    return text + (f" ... ({length} tokens)" if length > SHOWN_TOKENS else "")


# --- in a terminal, and for other programs

TRAINED_STYLE, CONTEXT_STYLE, SPECIAL_STYLE, MARK_STYLE = "bold green", "dim", "magenta", "dim"
SHARED_END = "⟫"  # after the common beginning of both sequences of a pair
EVEN_STYLE, ODD_STYLE = "", "underline"  # tell a token from its neighbour, on dark and light terminals alike


def to_json_lines(examples: Iterable[Example], rows: int | None = None) -> Iterator[dict[str, Any]]:
    """Yields {path, row, input_ids, labels} of the first `rows` examples (all if None), one dict each; for an example
    of several sequences one dict for each, with its index as `sequence`. labels: -100 if not trained."""
    for example in islice(examples, rows):
        for i, sequence in enumerate(example.sequences):
            yield {
                "path": example.path,
                "row": example.row,
                **({"sequence": i} if len(example.sequences) > 1 else {}),
                "input_ids": sequence.input_ids.tolist(),
                "labels": labels_of(sequence.input_ids, sequence.loss_mask).tolist(),
            }


RECORDED, RECORDED_TOKENS = 4, 400  # examples that a run keeps, tokens of each of their sequences


def recorded(sources: ListLike[ListLike[Example]], tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """Returns the first examples of sources, taken in turn, as a run keeps them for people: tokens of each sequence as
    [id, is supervised, is special, text, part], in two pieces if the middle is left out."""
    in_turn = (one for group in zip_longest(*sources) for one in group if one is not None)
    examples = []
    for one in islice(in_turn, RECORDED):
        sequences = []
        for sequence in one.sequences:
            pieces, left_out = shortened(media_as_one(tokens_of(sequence, tokenizer), sequence), RECORDED_TOKENS)
            sequences.append(
                {
                    "tokens": len(sequence.input_ids),
                    "supervised": sequence.num_targets,
                    "pieces": [[list(astuple(token)) for token in piece] for piece in pieces if piece],
                    "left_out": left_out_note(left_out) if left_out else "",
                }
            )
        examples.append({"path": one.path, "row": one.row, "sequences": sequences})
    return examples


@dataclass(frozen=True)
class Look:
    """Style of sequences drawn in a terminal."""

    colour: bool = True  # False: [[ ]] around trained text
    borders: bool = False  # between tokens, with ids
    full: bool = False  # False: long examples without their middle


def render_rich(
    sequence: Sequence, tokenizer: PreTrainedTokenizerBase, look: Look | None = None, shared: int = 0
) -> Text:
    """Returns the decoded sequence for a terminal: trained tokens green, others dim, special ones visible and magenta.

    In trained text newlines, tabs and spaces at the end of a line have a mark; so has the end of the first `shared`
    tokens, with which another sequence begins as well.
    """
    look = look or Look()
    shown, tokens = Text(), media_as_one(tokens_of(sequence, tokenizer), sequence)
    kept, left_out = shortened(tokens, None if look.full else SHOWN_TOKENS)
    _draw(shown, kept[0][:shared], 0, look)
    if 0 < shared <= len(kept[0]):
        shown.append(SHARED_END, style="bold cyan")
    _draw(shown, kept[0][shared:], shared, look)
    if left_out:
        shown.append(f"\n... {left_out_note(left_out)} (--full shows them) ...\n", style="italic yellow")
        _draw(shown, kept[1], len(tokens) - len(kept[1]), look)
    return shown


def media_note(medium: Medium, number: int) -> str:
    """Returns a description of a file, in a line: image 1: cats/1.jpg, 60 x 90 pixels, 6 tokens."""
    name = "in the row" if isinstance(medium.source, bytes) else visible(files_of(medium.source)[0])
    if isinstance(medium, Clip):
        said = f"clip {number}: {name}, {medium.samples / medium.rate:.2f} s at {medium.rate:,} Hz"
    elif isinstance(medium, Video):
        more = " and more" if isinstance(medium.source, str) and medium.source.startswith(LISTED) else ""
        size = f"{float(medium.frames / medium.rate):.2f} s of {medium.width} x {medium.height} pixels"
        said = f"video {number}: {name}{more}, {size}, {medium.seen:,} of {medium.frames:,} frames"
    else:
        said = f"image {number}: {name}, {medium.width} x {medium.height} pixels"
    return f"{said}, {medium.end - medium.begin:,} tokens"


def media_as_one(tokens: list[Token], sequence: Sequence) -> list[Token]:
    """Returns the tokens with one in place of those of each image, which describes it."""
    for number, image in reversed(list(enumerate(sequence.media, start=1))):
        first = replace(tokens[image.begin], text=f"[{media_note(image, number)}]", part="")
        tokens[image.begin : image.end] = [first]
    return tokens


def left_out_note(left_out: ListLike[Token]) -> str:
    """Returns a line about the part of an example that is not shown."""
    return f"{len(left_out):,} tokens not shown here, {sum(token.trained for token in left_out):,} of them trained"


def shortened(tokens: ListLike[Token], most: int | None) -> tuple[tuple[ListLike[Token], ...], ListLike[Token]]:
    """Returns ((head, tail), tokens between them). most: of both, two thirds of them at the head; None: all."""
    if most is None or len(tokens) <= most:
        return (tokens, []), []
    head, tail = most - most // 3, len(tokens) - most // 3
    return (tokens[:head], tokens[tail:]), tokens[head:tail]


def _draw(shown: Text, tokens: ListLike[Token], first: int, look: Look) -> None:
    """Draws tokens. first: the position of tokens[0]."""
    at = first
    for trained, run in groupby(tokens, key=lambda token: token.trained):
        brackets = ("[[", "]]") if trained and not look.colour else ("", "")
        shown.append(brackets[0])
        for special, group in groupby(run, key=lambda token: token.special):
            style = TRAINED_STYLE if trained else SPECIAL_STYLE if special else CONTEXT_STYLE
            alike = list(group)
            if look.borders:
                for place, token in enumerate(alike, start=at):
                    edge = (EVEN_STYLE, ODD_STYLE)[place % 2] if look.colour else ""
                    shown.append("" if look.colour else "|")
                    number = str(token.id).translate(_SUBSCRIPT)
                    before, after = (number, "") if token.text.endswith("\n") else ("", number)  # not on the next line
                    shown.append(visible(token.part) + before, style=f"{MARK_STYLE} {edge}")
                    _draw_text(shown, token.text, f"{style} {edge}", marked=True)
                    shown.append(after, style=f"{MARK_STYLE} {edge}")
            else:
                _draw_text(shown, "".join(token.text for token in alike), style, trained)
            at += len(alike)
        shown.append(brackets[1])


_SUBSCRIPT = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")


_MARKS = re.compile(r"(\n|\t| +(?=\n|\Z))")


def _draw_text(shown: Text, text: str, style: str, marked: bool) -> None:
    """Appends text. marked: newlines, tabs and spaces at the end of a line become visible."""
    for n, piece in enumerate(_MARKS.split(visible(text)) if marked else [visible(text)]):
        if n % 2 == 0:
            shown.append(piece, style=style)
        else:
            shown.append(piece.replace("\n", "⏎\n").replace("\t", "⇥\t").replace(" ", "·"), style=MARK_STYLE)

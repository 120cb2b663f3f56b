"""Examples for people and for other programs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from finetune.data.chat import UNTRAINED

if TYPE_CHECKING:
    from finetune.data.examples import Example

TRAINED_STYLE, CONTEXT_STYLE, SPECIAL_STYLE = "bold green", "dim", "magenta"
SHOWN_TOKENS = 400  # of an example inside an error message


def to_json_lines(examples: Iterable[Example], rows: int | None = None) -> Iterator[dict[str, Any]]:
    """{path, row, input_ids, labels} of the first `rows` examples (all of them if None), one dict each."""
    for example in islice(examples, rows):
        yield {
            "path": example.path,
            "row": example.row,
            "input_ids": example.input_ids.tolist(),
            "labels": example.labels.tolist(),
        }


def render_rich(example: Example, tokenizer: PreTrainedTokenizerBase) -> Text:
    """The decoded example for a terminal: trained tokens green, the rest dim, special tokens visible and magenta."""
    special = np.isin(example.input_ids, tokenizer.all_special_ids)
    shown = Text()
    for trained, is_special, piece in _pieces(example.input_ids, example.labels != UNTRAINED, special, tokenizer):
        kind = TRAINED_STYLE if trained else CONTEXT_STYLE
        shown.append(piece, style=f"{kind} {SPECIAL_STYLE}" if is_special and not trained else kind)
    return shown


def plain_text(input_ids: NDArray[np.integer], trained: NDArray[np.bool_], tokenizer: PreTrainedTokenizerBase) -> str:
    """The decoded example, shortened, with [[ ]] around what is trained."""
    ids, mask = input_ids[:SHOWN_TOKENS], trained[:SHOWN_TOKENS]
    pieces = _pieces(ids, mask, np.zeros(len(ids), bool), tokenizer)
    text = "".join(f"[[{piece}]]" if is_trained else piece for is_trained, _, piece in pieces)
    return text + (f" ... ({len(input_ids)} tokens)" if len(input_ids) > SHOWN_TOKENS else "")


def _pieces(
    ids: NDArray[np.integer], trained: NDArray[np.bool_], special: NDArray[np.bool_], tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[bool, bool, str]]:
    """(trained, special, text) of runs of tokens alike; decoded as a run, for a character may be several tokens."""
    for kind, run in groupby(range(len(ids)), key=lambda i: (bool(trained[i]), bool(special[i]))):
        text = tokenizer.decode([int(ids[i]) for i in run], clean_up_tokenization_spaces=False)
        yield kind[0], kind[1], str(text)

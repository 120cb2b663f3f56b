"""Files in a rendered text: each becomes its tokens, as the model's processor would write them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from finetune.data.chat.template import Span
from finetune.data.media.families import MediaFamily
from finetune.data.media.stored_files import AS_ONE, NAMES, FileRules
from finetune.data.samples import BadRow, MediaKind, Medium, Reference
from finetune.errors import UserError

_COLUMNS: dict[MediaKind, str] = {"image": "images", "audio": "audios", "video": "videos"}
_PLURALS: dict[MediaKind, str] = {"image": "images", "audio": "clips", "video": "videos"}
Counted = tuple[Any, int]  # a file as it is stored, and the tokens of it that the model fills


@dataclass(frozen=True)
class RowMedia:
    """The model's handling of files, and the folders that they may be in."""

    family: MediaFamily
    rules: FileRules

    def expand(
        self, text: str, spans: Sequence[Span], references: Sequence[Reference], data_file: str, template: str
    ) -> tuple[str, list[Span], tuple[Counted, ...]]:
        """Returns a text with a file's tokens in place of each placeholder of the template, its trained spans, and
        the files as they are stored.

        text     Look: <|image_pad|> nice    spans (20, 24)
        result   Look: <|image_pad|><|image_pad|> nice    spans (33, 37)

        Raises BadRow for an unusable file, or if the template does not write as many as there are.
        """
        kind, placeholder = self.family.kind, self.family.placeholder
        begins = [match.start() for match in re.finditer(re.escape(placeholder), text)]
        for reference in references:
            if reference.kind != kind:
                raise BadRow(f"the row has {AS_ONE[reference.kind]}, and `data.{reference.kind}` is not set")
            if reference.source is None:
                raise BadRow(
                    f"a part of type `{kind}` names no {NAMES[kind]}, and the row has no column `{_COLUMNS[kind]}` "
                    "that would"
                )
        if len(begins) != len(references):
            raise BadRow(
                f"{template} writes {len(begins)} times {placeholder!r} for {len(references)} {_PLURALS[kind]}: give a "
                f"model.chat_template that writes {_PLURALS[kind]} as the model's own does"
            )
        if self.family.takes_one and len(references) > 1:
            raise BadRow(
                f"{len(references)} {_PLURALS[kind]}: this model's tower computes one otherwise beside a longer one. A "
                "row has one at most: make several rows of it"
            )
        pieces, last, found, gained = [], 0, [], [(0, 0)]  # gained: characters added from this one of the text on
        for begin, reference in zip(begins, references, strict=True):
            stored = self.family.find(reference.source or b"", data_file)
            written = self.family.written(stored)
            found.append((stored, written.count))
            pieces += [text[last:begin], written.text]
            last = begin + len(placeholder)
            gained.append((last, gained[-1][1] + len(written.text) - len(placeholder)))

        def moved(border: int) -> int:  # a border within a placeholder stays at its beginning
            return border + next(more for begin, more in reversed(gained) if begin <= border)

        return "".join([*pieces, text[last:]]), [(moved(begin), moved(end)) for begin, end in spans], tuple(found)

    def place(
        self, input_ids: NDArray[np.int32], trained: NDArray[np.bool_], found: Sequence[Counted]
    ) -> tuple[Medium, ...]:
        """Returns the files at their tokens, which this takes out of the mask.

        Raises UserError if the text has another number of them.
        """
        places = np.flatnonzero(input_ids == self.family.token_id)
        ends = np.cumsum([0, *(count for _, count in found)], dtype=np.int64)
        if len(places) != ends[-1]:
            raise UserError(
                f"{len(places)} tokens {self.family.token!r}, but {len(found)} {_PLURALS[self.family.kind]} have "
                f"{ends[-1]}. Fix: take this token out of the row's own text or ids"
            )
        if found:
            trained &= ~np.isin(input_ids, self.family.mark_ids)
        media = list[Medium]()
        for (stored, _), begin, end in zip(found, ends[:-1], ends[1:], strict=True):
            whole = self.family.whole(input_ids, int(places[begin]), int(places[end - 1]) + 1)
            media.append(self.family.placed(stored, *whole))
            if self.family.kind == "video":  # the times between its frames are no marks
                trained[whole[0] : whole[1]] = False
        return tuple(media)

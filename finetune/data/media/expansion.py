"""Files in a rendered text: each becomes its tokens, as the model's processor would write them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from finetune.data.chat.template import Span
from finetune.data.media.families import MediaFamily
from finetune.data.media.stored_files import AS_ONE, NAMES, FileRules
from finetune.data.samples import BadRow, MediaKind, Medium, Reference
from finetune.errors import UserError

_COLUMNS: dict[MediaKind, str] = {"image": "images", "audio": "audios", "video": "videos"}
_PLURALS: dict[MediaKind, str] = {"image": "images", "audio": "clips", "video": "videos"}


class Counted(NamedTuple):
    """A file as it is stored."""

    stored: Any
    count: int  # of the tokens of it that the model fills
    kind: MediaKind


@dataclass(frozen=True)
class RowMedia:
    """The model's handling of files, and the folders that they may be in."""

    family: MediaFamily
    rules: FileRules
    also: tuple[MediaFamily, ...] = ()  # of other kinds of files, with rules of their own
    # In place of a family's `find`: those of caches, which make features of the files that they check.
    finders: Mapping[MediaKind, Callable[[str | bytes, str], Any]] = field(default_factory=dict)

    @cached_property
    def families(self) -> dict[MediaKind, MediaFamily]:
        """The handling of each kind of files that rows may have."""
        return {family.kind: family for family in (self.family, *self.also)}

    def expand(
        self, text: str, spans: Sequence[Span], references: Sequence[Reference], data_file: str, template: str
    ) -> tuple[str, list[Span], tuple[Counted, ...]]:
        """Returns a text with a file's tokens in place of each placeholder of the template, its trained spans, and
        the files as they are stored.

        text     Look: <|image_pad|> nice    spans (20, 24)
        result   Look: <|image_pad|><|image_pad|> nice    spans (33, 37)

        Raises BadRow for an unusable file, or if the template does not write as many as there are.
        """
        self._check(references)
        pieces, last, found, gained = [], 0, [], [(0, 0)]  # gained: characters added from this one of the text on
        for begin, reference in zip(self._begins(text, references, template), references, strict=True):
            family = self.families[reference.kind]
            find = self.finders.get(reference.kind, family.find)
            stored = find(reference.source or b"", data_file)
            written = family.written(stored)
            found.append(Counted(stored, written.count, reference.kind))
            pieces += [text[last:begin], written.text]
            last = begin + len(family.placeholder)
            gained.append((last, gained[-1][1] + len(written.text) - len(family.placeholder)))

        def moved(border: int) -> int:  # a border within a placeholder stays at its beginning
            return border + next(more for begin, more in reversed(gained) if begin <= border)

        return "".join([*pieces, text[last:]]), [(moved(begin), moved(end)) for begin, end in spans], tuple(found)

    def _check(self, references: Sequence[Reference]) -> None:
        """Raises BadRow for files of another kind, that are not named, or that are too many."""
        for kind, source in references:
            if kind not in self.families:
                raise BadRow(f"the row has {AS_ONE[kind]}, and `data.{kind}` is not set")
            if source is None:
                raise BadRow(
                    f"a part of type `{kind}` names no {NAMES[kind]}, and the row has no column `{_COLUMNS[kind]}` "
                    "that would"
                )
        for kind, family in self.families.items():
            count = sum(reference.kind == kind for reference in references)
            if family.takes_one and count > 1:
                raise BadRow(
                    f"{count} {_PLURALS[kind]}: this model's tower computes one otherwise beside a longer one. A row "
                    "has one at most: make several rows of it"
                )

    def _begins(self, text: str, references: Sequence[Reference], template: str) -> list[int]:
        """Returns where the placeholder of each file begins. Raises BadRow if the template writes others."""
        by_text: dict[str, MediaKind] = {family.placeholder: kind for kind, family in self.families.items()}
        places = [*re.finditer("|".join(map(re.escape, by_text)), text)]
        written = [by_text[place.group()] for place in places]
        for placeholder, kind in by_text.items():
            count, expected = written.count(kind), sum(reference.kind == kind for reference in references)
            if count != expected:
                raise BadRow(
                    f"{template} writes {count} times {placeholder!r} for {expected} {_PLURALS[kind]}: give a "
                    f"model.chat_template that writes {_PLURALS[kind]} as the model's own does"
                )
        if written != [reference.kind for reference in references]:
            raise BadRow(
                f"{template} moves files of different kinds: give a model.chat_template that keeps their order"
            )
        return [place.start() for place in places]

    def place(
        self, input_ids: NDArray[np.int32], trained: NDArray[np.bool_], found: Sequence[Counted]
    ) -> tuple[Medium, ...]:
        """Returns the files at their tokens, which this takes out of the mask.

        Raises UserError if the text has another number of them.
        """
        of_kind = {
            kind: iter(self._placed(family, input_ids, trained, found)) for kind, family in self.families.items()
        }
        return tuple(next(of_kind[one.kind]) for one in found)

    def _placed(
        self,
        family: MediaFamily,
        input_ids: NDArray[np.int32],
        trained: NDArray[np.bool_],
        found: Sequence[Counted],
    ) -> list[Medium]:
        """Returns the files of one kind."""
        mine = [one for one in found if one.kind == family.kind]
        places = np.flatnonzero(input_ids == family.token_id)
        ends = np.cumsum([0, *(one.count for one in mine)], dtype=np.int64)
        if len(places) != ends[-1]:
            raise UserError(
                f"{len(places)} tokens {family.token!r}, but {len(mine)} {_PLURALS[family.kind]} have {ends[-1]}. Fix: "
                "take this token out of the row's own text or ids"
            )
        if found:
            trained &= ~np.isin(input_ids, family.mark_ids)
        media = list[Medium]()
        for one, begin, end in zip(mine, ends[:-1], ends[1:], strict=True):
            whole = family.whole(input_ids, int(places[begin]), int(places[end - 1]) + 1)
            media.append(family.placed(one.stored, *whole))
            if family.kind == "video":  # the times between its frames are no marks
                trained[whole[0] : whole[1]] = False
        return media

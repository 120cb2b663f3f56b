"""Images in a rendered text: each becomes its tokens, as the model's processor would write them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from finetune.data.chat.template import Span
from finetune.data.media.families import MediaFamily
from finetune.data.media.image_files import StoredImage, find_image
from finetune.data.samples import BadRow, Image, ImageReference
from finetune.errors import UserError
from finetune.recipe.schema import Images

Counted = tuple[StoredImage, int]  # an image and the tokens of it that the model fills


@dataclass(frozen=True)
class RowMedia:
    """Image settings of the model, and the folders that image files may be in."""

    family: MediaFamily
    rules: Images

    def expand(
        self, text: str, spans: Sequence[Span], references: Sequence[ImageReference], data_file: str, template: str
    ) -> tuple[str, list[Span], tuple[Counted, ...]]:
        """Returns a text with an image's tokens in place of each placeholder of the template, its trained spans,
        and the images.

        text     Look: <|image_pad|> nice    spans (20, 24)
        result   Look: <|image_pad|><|image_pad|> nice    spans (33, 37)

        Raises BadRow for an unusable image, or if the template does not write as many images as there are.
        """
        placeholder = self.family.placeholder
        begins = [match.start() for match in re.finditer(re.escape(placeholder), text)]
        if None in references:
            raise BadRow("a part of type `image` names no image, and the row has no column `images` that would")
        if len(begins) != len(references):
            raise BadRow(
                f"{template} writes {len(begins)} times {placeholder!r} for {len(references)} images: give a "
                "model.chat_template that writes images as the model's own does"
            )
        pieces, last, images, gained = [], 0, [], [(0, 0)]  # gained: characters added from this one of the text on
        for begin, reference in zip(begins, references, strict=True):
            image = find_image(reference or b"", self.rules, data_file)
            try:
                written = self.family.write(image.height, image.width)
            except ValueError as error:
                raise BadRow(f"an image of {image.width} x {image.height} pixels cannot be used: {error}") from None
            images.append((image, written.count))
            pieces += [text[last:begin], written.text]
            last = begin + len(placeholder)
            gained.append((last, gained[-1][1] + len(written.text) - len(placeholder)))

        def moved(border: int) -> int:  # a border within a placeholder stays at its beginning
            return border + next(more for begin, more in reversed(gained) if begin <= border)

        return "".join([*pieces, text[last:]]), [(moved(begin), moved(end)) for begin, end in spans], tuple(images)

    def place(
        self, input_ids: NDArray[np.int32], trained: NDArray[np.bool_], images: Sequence[Counted]
    ) -> tuple[Image, ...]:
        """Returns the images at their tokens, which this takes out of the mask.

        Raises UserError if the text has another number of them.
        """
        places = np.flatnonzero(input_ids == self.family.token_id)
        ends = np.cumsum([0, *(count for _, count in images)], dtype=np.int64)
        if len(places) != ends[-1]:
            raise UserError(
                f"{len(places)} tokens {self.family.token!r}, but {len(images)} images have {ends[-1]}. Fix: take this "
                "token out of the row's own text or ids"
            )
        if images:
            trained &= ~np.isin(input_ids, self.family.mark_ids)
        return tuple(
            Image(image.source, image.height, image.width, int(places[begin]), int(places[end - 1]) + 1)
            for (image, _), begin, end in zip(images, ends[:-1], ends[1:], strict=True)
        )

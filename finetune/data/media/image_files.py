"""Files of images: measured by their header alone, and decoded. `stored_files.py` locates them.

A file that would unpack to more than `MAX_PIXELS` is never unpacked.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from finetune.data.media.stored_files import check_copy, part_of_file, printable, source_of
from finetune.data.samples import BadRow
from finetune.recipe.schema import Images

# Pixels of a file as it is stored: the bound above which Pillow warns of decompression bombs, once, and continues. Here
# such a file is refused with its place, so Pillow need not look.
MAX_PIXELS = 89_478_485
Image.MAX_IMAGE_PIXELS = None
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")  # no format that runs a program (EPS)
_TURNED = (5, 6, 7, 8)  # EXIF's orientations with width and height exchanged
_TAIL = 4096  # bytes, in which a file's end mark has to be: some programs write a little after it

# Errors that Pillow raises for a file that is no image of its kind, is cut off, or needs too much memory.
BROKEN = (OSError, SyntaxError, ValueError, EOFError, IndexError, TypeError, MemoryError, Image.DecompressionBombError)


@dataclass(frozen=True)
class StoredImage:
    """An image as it is stored, with the size that it is seen in."""

    source: str | bytes  # path of its file, or the file itself
    height: int
    width: int


def find_image(reference: str | bytes, rules: Images, data_file: str) -> StoredImage:
    """Returns the image that a row of `data_file` names. Raises BadRow with the problem."""
    source = source_of(reference, "image", rules, data_file)
    try:
        height, width = size_of(source)
        if rules.verify == "pixels":
            decode(source)
    except BROKEN as error:
        name = "its bytes" if isinstance(source, bytes) else printable(source)
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise BadRow(f"the image cannot be read ({name}): {reason}") from None
    return StoredImage(source, height, width)


_END_MARKS = {"JPEG": b"\xff\xd9", "MPO": b"\xff\xd9", "PNG": b"IEND"}


def size_of(source: str | bytes) -> tuple[int, int]:
    """Returns (height, width) as displayed: from the header, if the format has an end mark or a length that shows a
    truncated file; else by decoding it. Raises ValueError and `BROKEN` for unusable files."""
    with _opened(source) as image:
        width, height = image.size
        if width * height > MAX_PIXELS:
            raise ValueError(
                f"{width} x {height} pixels, more than {MAX_PIXELS:,}: taken for a decompression bomb; scale it down"
            )
        if image.format != "MPO" and (frames := getattr(image, "n_frames", 1)) > 1:
            raise ValueError(f"{frames} frames or pages: save the one that is meant")
        if image.mode in ("I", "F"):
            raise ValueError("32 bits a pixel, whose white is unknown: save it with 8 or 16")
        if image.format in _END_MARKS:
            is_complete = _END_MARKS[image.format] in part_of_file(source, -_TAIL)
        elif image.format == "WEBP":  # a RIFF file, which begins with its size
            size = len(source) if isinstance(source, bytes) else Path(source).stat().st_size
            is_complete = int.from_bytes(part_of_file(source, 8)[4:8], "little") + 8 <= size
        else:
            width, height = decode(source).size
            return height, width
        if not is_complete:
            raise ValueError("cut off: the file ends before its end mark")
        turned = "exif" in image.info and image.getexif().get(ExifTags.Base.Orientation) in _TURNED
    return (width, height) if turned else (height, width)


def decode(source: str | bytes) -> Image.Image:
    """Returns the image as displayed: upright, in RGB of 8 bits, on white if it is transparent.

    Grey of 16 bits is scaled to 8; Pillow would clip it. Raises `BROKEN` for a damaged file.
    """
    check_copy(source)
    with _opened(source) as stored:
        image: Any = ImageOps.exif_transpose(stored)
    if image.mode.startswith("I;16"):
        image = image.point(lambda value: value / 257 + 0.5).convert("L")
    if image.has_transparency_data:
        background = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(background, image.convert("RGBA"))
    return image.convert("RGB")


def _opened(source: str | bytes) -> Any:
    try:
        return Image.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=FORMATS)
    except UnidentifiedImageError:
        raise ValueError(f"not an image of a kind that is read ({', '.join(FORMATS)})") from None


THUMBNAIL_SIDE = 320  # pixels, at most


def thumbnails(sources: Sequence[str | bytes]) -> bytes:
    """Returns images side by side, small, as one PNG file. Raises `BROKEN`."""
    return side_by_side([decode(source) for source in sources], THUMBNAIL_SIDE)


def side_by_side(pictures: Sequence[Image.Image], side: int) -> bytes:
    """Returns pictures as one PNG file, scaled down in place to at most `side` pixels a side."""
    for picture in pictures:
        picture.thumbnail((side, side))
    gap = 8
    widths = [picture.width + gap for picture in pictures]
    shown = Image.new("RGB", (sum(widths) - gap, max(picture.height for picture in pictures)), "white")
    for i, picture in enumerate(pictures):
        shown.paste(picture, (sum(widths[:i]), 0))
    content = io.BytesIO()
    shown.save(content, "png")
    return content.getvalue()

"""Files of images: located by the row's reference, measured by their header alone, and decoded.

References in a row are not trusted: a path stays within its folder, only plain files are read, and a file that would
unpack to more than `MAX_PIXELS` is never unpacked.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from finetune.data.checksums import Damaged, verify_file, write_checksum
from finetune.data.samples import BadRow
from finetune.data.sources.files import cache_root, package_errors
from finetune.recipe.schema import Images
from finetune.recipe.urls import is_url, scrubbed, without_credentials
from finetune.utils import write_atomically

# Pixels of a file as it is stored: the bound above which Pillow warns of decompression bombs, once, and continues. Here
# such a file is refused with its place, so Pillow need not look.
MAX_PIXELS = 89_478_485
Image.MAX_IMAGE_PIXELS = None
MAX_BYTES = 1 << 28  # of a file
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")  # no format that runs a program (EPS)
_FETCH_S = 60  # for an image of the web
_TURNED = (5, 6, 7, 8)  # EXIF's orientations with width and height exchanged
_TAIL = 4096  # bytes, in which a file's end mark has to be: some programs write a little after it

# Errors that Pillow raises for a file that is no image of its kind, is cut off, or needs too much memory.
BROKEN = (OSError, SyntaxError, ValueError, EOFError, IndexError, TypeError, MemoryError, Image.DecompressionBombError)


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StoredImage:
    """An image as it is stored, with the size that it is seen in."""

    source: str | bytes  # path of its file, or the file itself
    height: int
    width: int


def find_image(reference: str | bytes, rules: Images, data_file: str) -> StoredImage:
    """Returns the image that a row of `data_file` names. Raises BadRow with the problem."""
    source = reference if isinstance(reference, bytes) else _source(reference, rules, data_file)
    if isinstance(source, bytes) and len(source) > MAX_BYTES:
        raise BadRow(f"an image of {len(source):,} bytes; at most {MAX_BYTES:,} are read")
    try:
        height, width = _size(source)
        if rules.verify == "pixels":
            decode(source)
    except BROKEN as error:
        name = "its bytes" if isinstance(source, bytes) else source
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise BadRow(f"the image cannot be read ({name}): {reason}") from None
    return StoredImage(source, height, width)


def _source(reference: str, rules: Images, data_file: str) -> str | bytes:
    """Returns the path that a reference means, or the bytes of a data URL."""
    if reference[:5].lower() == "data:":
        head, comma, body = reference.partition(",")
        if not comma or not head.lower().endswith(";base64"):
            raise BadRow(f"{head[:60]}...: expected data:image/...;base64,...")
        try:
            return base64.b64decode("".join(body.split()), validate=True)
        except (binascii.Error, ValueError) as error:
            raise BadRow(f"{head[:60]},...: not base64: {error}") from None
    if is_url(reference):
        return str(_fetched(reference, rules))
    if "\0" in reference or len(reference) > 4096:
        raise BadRow("the path of an image has a NUL or more than 4,096 characters; is it the image itself?")
    folder = Path(rules.folder).expanduser() if rules.folder else Path(data_file).parent
    if rules.folder is None and not Path(data_file).is_file():
        raise BadRow(f"{reference}: {data_file} is no local file, so it has no folder: set `data.image.folder`")
    try:
        path, root = (folder / Path(reference)).resolve(), folder.resolve()
        if os.path.lexists(path):
            path.stat()
    except (OSError, RuntimeError) as error:  # links that lead in circles: a RuntimeError before Python 3.13
        raise BadRow(f"{reference}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not rules.outside and not path.is_relative_to(root):
        raise BadRow(
            f"{reference}: leads out of {folder}; `data.image: {{folder: ...}}` names another folder, and `outside: "
            "true` allows any"
        )
    if not path.exists():
        raise BadRow(f"no such image: {path}")
    if not path.is_file():
        raise BadRow(f"{path}: not a file")
    if (size := path.stat().st_size) > MAX_BYTES:
        raise BadRow(f"{path}: {size:,} bytes; at most {MAX_BYTES:,} are read")
    return str(path)


def _fetched(url: str, rules: Images) -> Path:
    """Returns the cache's copy of an image of the web, fetched if it is missing or damaged."""
    label = without_credentials(url)[:200]
    if not rules.allow_urls:
        raise BadRow(
            f"{label}: images are not fetched; download them and give paths, or set `data.image.allow_urls: true`"
        )
    if not url.lower().startswith(("http://", "https://")):
        raise BadRow(f"{label}: of addresses only http:// and https:// are fetched")
    copy = _copies() / hashlib.sha256(url.encode()).hexdigest()
    try:
        verify_file(copy)
        if copy.is_file():
            return copy
    except FileNotFoundError:
        pass
    except Damaged:
        log.warning("%s: damaged on the disk; the image is fetched again", copy)
    try:
        content = _download(url)
    except (OSError, ValueError, *package_errors()) as error:
        reason = scrubbed(" ".join(str(error).split()), url)[:200] or type(error).__name__
        raise BadRow(f"{label}: cannot be fetched: {reason}") from None
    if len(content) > MAX_BYTES:
        raise BadRow(f"{label}: more than {MAX_BYTES:,} bytes")
    copy.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(copy, content, shared=True)
    write_checksum(copy, copy)
    return copy


def _copies() -> Path:
    return cache_root() / "images"


def _download(url: str) -> bytes:
    """Returns the content of a URL, little more than `MAX_BYTES` of it. Raises OSError, aiohttp's errors."""
    import fsspec
    from aiohttp import ClientTimeout

    content = bytearray()
    # Blocks of size 0: one request for all of it, for servers that send no parts.
    stream: Any = fsspec.open(url, "rb", block_size=0, client_kwargs={"timeout": ClientTimeout(total=_FETCH_S)})
    with stream as file:
        while len(content) <= MAX_BYTES and (piece := file.read(1 << 20)):
            content += piece
    return bytes(content)


_END_MARKS = {"JPEG": b"\xff\xd9", "MPO": b"\xff\xd9", "PNG": b"IEND"}


def _size(source: str | bytes) -> tuple[int, int]:
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
            is_complete = _END_MARKS[image.format] in _part_of(source, -_TAIL)
        elif image.format == "WEBP":  # a RIFF file, which begins with its size
            size = len(source) if isinstance(source, bytes) else Path(source).stat().st_size
            is_complete = int.from_bytes(_part_of(source, 8)[4:8], "little") + 8 <= size
        else:
            width, height = decode(source).size
            return height, width
        if not is_complete:
            raise ValueError("cut off: the file ends before its end mark")
        turned = "exif" in image.info and image.getexif().get(ExifTags.Base.Orientation) in _TURNED
    return (width, height) if turned else (height, width)


def _part_of(source: str | bytes, count: int) -> bytes:
    """Returns the first bytes of a file, or the last if `count` is negative."""
    if isinstance(source, bytes):
        return source[:count] if count > 0 else source[count:]
    with Path(source).open("rb") as file:
        file.seek(0 if count > 0 else max(Path(source).stat().st_size + count, 0))
        return file.read(abs(count))


def decode(source: str | bytes) -> Image.Image:
    """Returns the image as displayed: upright, in RGB of 8 bits, on white if it is transparent.

    Grey of 16 bits is scaled to 8; Pillow would clip it. Raises `BROKEN` for a damaged file.
    """
    if isinstance(source, str) and Path(source).parent == _copies():
        try:
            verify_file(Path(source))
        except Damaged:
            raise ValueError("its copy in the cache is damaged; `finetune cache clean`, and start again") from None
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
    pictures = [decode(source) for source in sources]
    for picture in pictures:
        picture.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE))
    gap = 8
    widths = [picture.width + gap for picture in pictures]
    shown = Image.new("RGB", (sum(widths) - gap, max(picture.height for picture in pictures)), "white")
    for i, picture in enumerate(pictures):
        shown.paste(picture, (sum(widths[:i]), 0))
    content = io.BytesIO()
    shown.save(content, "png")
    return content.getvalue()

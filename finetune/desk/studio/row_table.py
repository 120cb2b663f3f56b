"""The first rows of a file as a table, with the role that `new` would give each column, sound to play, and frames."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from finetune.data.formats.converters import FORMATS
from finetune.data.formats.detect import parse_row
from finetune.data.formats.values import Row
from finetune.data.samples import BadRow, Clip, MediaKind, Video
from finetune.desk.setup.roles import RoleChoice
from finetune.desk.setup.rows import conversation_of
from finetune.desk.studio.project_folder import inside
from finetune.errors import UserError
from finetune.recipe.schema import Audio, Videos

_ROWS, _SHOWN_ROWS, _SHOWN_COLUMNS = 200, 6, 40  # read for the roles; shown
_LONGEST = 240  # characters of a cell


def row_table(path: str, folder: Path) -> dict[str, Any]:
    """Returns columns, cells and roles of a file. A file that cannot be read has no columns, and its problem. Raises
    UserError for a path that is no file of the folder."""
    file = inside(path, folder)
    if not (folder / file).is_file():
        raise UserError(f"{path}: no such file. Fix: choose a file of rows")
    table: dict[str, Any] = {"path": str(file), "columns": [], "rows": [], "more": 0}
    table |= {"problem": "", "doubts": (), "reason": "", "sounds": [], "films": []}
    try:
        rows = _read(str(file))
    except UserError as error:
        return {**table, "problem": str(error)}
    names = list(dict.fromkeys(str(name) for row in rows for name in row))
    roles, said = _roles(rows)
    choice = said.pop("choice")
    kinds: dict[str, MediaKind] = {"sounds": "audio", "films": "video"}
    for name, kind in kinds.items():  # files of each row
        counts = [len(_files_of(row, choice, kind)) for row in rows[:_SHOWN_ROWS]]
        said[name] = counts if any(counts) else []
    shown = names[:_SHOWN_COLUMNS]
    cells = [[_cell(row.get(name)) for name in shown] for row in rows[:_SHOWN_ROWS]]
    columns = [{"name": name, "role": roles.get(name, "")} for name in shown]
    return {**table, "columns": columns, "rows": cells, "more": len(names) - len(shown), **said}


def _read(path: str) -> Sequence[Row]:
    """Returns the first rows that can be read. Raises UserError if there are none."""
    from finetune.data.sources.source import SourceReader
    from finetune.recipe.schema import Source

    reader = SourceReader(Source(path=path))
    try:
        read = [row for _, _, row in islice(reader.readable_and_bad(), _ROWS)]
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}. Fix: check its permissions") from None
    if rows := [row for row in read if not isinstance(row, BadRow)]:
        return rows
    reason = f": {read[0]}" if read else ""
    raise UserError(f"{path}: no row can be read{reason}. Fix: correct the file, or choose another")


def _roles(rows: Sequence[Row]) -> tuple[dict[str, str], dict[str, Any]]:
    """Returns the field of each column that has one; and why this is a guess, or why there is none."""
    from finetune.desk.setup.roles import choose_columns

    try:
        choice = choose_columns(rows)
    except UserError as error:
        return {}, {"problem": str(error), "choice": None}
    given = {column: field for field, column in choice.fields.items()}
    optional = {name: name for name in FORMATS[choice.format].optional if name in rows[0] and name not in given}
    return {**optional, **given}, {"reason": choice.reason, "doubts": choice.doubts, "choice": choice}


def _files_of(row: Row, choice: RoleChoice | None, kind: MediaKind) -> list[str | bytes]:
    """Returns the files of a kind that a row names, in order; none of a row that cannot be read."""
    try:
        sample = parse_row(row, choice.format, choice.columns) if choice is not None else None
    except BadRow:
        return []
    conversation = conversation_of(sample) if sample is not None else None
    files = [one for message in conversation.messages for one in message.media] if conversation is not None else []
    return [one.source for one in files if one.kind == kind and one.source is not None]


_CALLED: dict[MediaKind, str] = {"audio": "clip", "video": "video"}
_FILMED_S = 60  # of a video, from its beginning


def sound_of(path: str, row: int, clip: int, folder: Path) -> bytes:
    """Returns the beginning of a clip of a row that is shown, as a WAV file. row, clip: from 0.

    Files are located and bounded as in a run: none outside of the file's folder, no address fetched. Raises UserError.
    """
    from finetune.data.media.audio_files import broken, find_clip, playable

    file, reference = _file_of_row(path, row, clip, folder, "audio")
    try:
        found = find_clip(reference, Audio(), file)
        return playable(Clip(found.source, found.samples, found.rate, 0, 0))
    except (BadRow, *broken()) as error:
        raise UserError(f"{path}, row {row + 1}: {error}. Fix: restore the file") from None


def film_of(path: str, row: int, video: int, folder: Path) -> bytes:
    """Returns some frames of the first minute of a video of a row that is shown, side by side, as a PNG file. Otherwise
    as `sound_of`."""
    from finetune.data.media.video_files import broken, film, find_video

    file, reference = _file_of_row(path, row, video, folder, "video")
    try:
        found = find_video(reference, Videos(verify="header"), file, listed_rate=1.0)
        shown = min(found.frames, max(1, int(_FILMED_S * found.rate)))
        return film(Video(found.source, found.frames, found.rate, found.height, found.width, shown, 0, 0), range(shown))
    except (BadRow, *broken()) as error:
        raise UserError(f"{path}, row {row + 1}: {error}. Fix: restore the file") from None


def _file_of_row(path: str, row: int, number: int, folder: Path, kind: MediaKind) -> tuple[str, str | bytes]:
    """Returns the file of rows, and a file that one of its rows names. Raises UserError if there is none."""
    file = str(inside(path, folder))
    rows = _read(file)[:_SHOWN_ROWS]
    _, said = _roles(rows)
    files = _files_of(rows[row], said["choice"], kind) if 0 <= row < len(rows) else []
    if not 0 <= number < len(files):
        raise UserError(f"{path}: row {row + 1} has no {_CALLED[kind]} {number + 1}. Fix: reload the page")
    return file, files[number]


def role_names() -> list[str]:
    """Returns the fields of all formats, those of the common ones first."""
    common = ("prompt_completion", "messages", "alpaca", "text")
    ordered = [*common, *(name for name in FORMATS if name not in common)]
    return list(dict.fromkeys(field for name in ordered for field in FORMATS[name].fields))


def _cell(value: Any) -> str:
    """Returns a value as text: what is no text as JSON."""
    if value is None:
        return ""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    text = text.encode(errors="replace").decode()
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} …"

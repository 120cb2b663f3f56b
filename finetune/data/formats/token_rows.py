"""Rows that are tokens already, with their trained parts."""

from __future__ import annotations

from typing import Any

from finetune.data.formats.values import Misfit, Row, kind, names, shown
from finetune.data.samples import BadRow, Ids

IGNORED = -100  # of labels: not trained (Hugging Face convention)
LARGEST = 2**31 - 1  # ids are kept as int32
MASKS = ("trained", "completion_mask", "assistant_masks")  # ours; TRL's of a completion and of assistant turns


def ids_and_mask(value: Any, row: Row) -> Ids:
    """input_ids of a row, and its labels or masks; the first token is never trained, as no token predicts it.

    input_ids  1 450 4996 2
    labels     - 450 4996 2      (- is -100; aligned with input_ids, not shifted)
    trained    0   1    1 1
    """
    input_ids = _ids(value)
    _check_unpadded(row.get("attention_mask"), len(input_ids))
    positions = row.get("position_ids")
    if positions is not None and _list_of(positions, "position_ids", len(input_ids)) != list(range(len(input_ids))):
        raise BadRow("`position_ids` are not 0, 1, 2, ...: several documents in a row; give each a row of its own")
    masks = {name: _mask(row[name], name, len(input_ids)) for name in MASKS if row.get(name) is not None}
    if row.get("labels") is not None:
        masks["labels"] = _label_mask(row["labels"], input_ids)
    trained = {name: (False, *mask[1:]) for name, mask in masks.items()}
    if len(set(trained.values())) > 1:
        raise BadRow(f"{names(trained)} train different tokens; keep one of them")
    return Ids(input_ids, next(iter(trained.values()), (False, *(True,) * (len(input_ids) - 1))))


def _ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise (BadRow if value is None else Misfit)(f"`input_ids` is {kind(value)}; expected a list of token ids")
    if not value:
        raise BadRow("`input_ids` is an empty list; expected token ids")
    for i, id_ in enumerate(value):
        if type(id_) is not int:
            raise Misfit(f"input_ids[{i}] is {kind(id_)} ({shown(id_)}); expected a token id")
        if not 0 <= id_ <= LARGEST:
            raise BadRow(f"input_ids[{i}] is {shown(id_)}; expected a token id, 0 or more")
    return tuple(value)


def _list_of(value: Any, name: str, length: int) -> list[Any]:
    if not isinstance(value, list):
        raise BadRow(f"`{name}` is {kind(value)}; expected a list as long as `input_ids`")
    if len(value) != length:
        raise BadRow(f"`{name}` has {len(value)} items, but `input_ids` {length}")
    return value


def _mask(value: Any, name: str, length: int) -> tuple[bool, ...]:
    for i, item in enumerate(_list_of(value, name, length)):
        if type(item) not in (bool, int) or item not in (0, 1):
            raise BadRow(f"{name}[{i}] is {shown(item)}; expected 0 or 1")
    return tuple(bool(item) for item in value)


def _label_mask(value: Any, input_ids: tuple[int, ...]) -> tuple[bool, ...]:
    for i, (label, id_) in enumerate(zip(_list_of(value, "labels", len(input_ids)), input_ids, strict=True)):
        if type(label) is not int or label not in (IGNORED, id_):
            raise BadRow(
                f"labels[{i}] is {shown(label)}; expected {IGNORED} (not trained) or {id_}, the id at the same place "
                "(labels are aligned with `input_ids`, they are shifted later)"
            )
    return tuple(label != IGNORED for label in value)


def _check_unpadded(value: Any, length: int) -> None:
    if value is None:
        return
    for i, seen in enumerate(_mask(value, "attention_mask", length)):
        if not seen:
            raise BadRow(f"attention_mask[{i}] is 0: the row is padded; strip the padding, rows are packed here")

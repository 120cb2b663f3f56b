"""Rows that are tokens already, with their trained parts."""

from __future__ import annotations

from typing import Any

from finetune.data.formats.values import Misfit, Row, kind, names, shown
from finetune.data.samples import BadRow, Ids

IGNORED = -100  # of labels: not trained (Hugging Face convention)
LARGEST = 2**31 - 1  # ids are kept as int32
MASKS = ("trained", "completion_mask", "assistant_masks")  # ours; TRL's of a completion and of assistant turns


def ids_and_mask(value: Any, row: Row) -> Ids:
    """Reads input_ids of a row, and its labels or masks; the first token is never trained, as no token predicts it.

    input_ids  1 450 4996 2
    labels     - 450 4996 2      (- is -100; aligned with input_ids, not shifted)
    trained    0   1    1 1
    """
    if not isinstance(value, list):
        raise (BadRow if value is None else Misfit)(f"`input_ids` is {kind(value)}; expected a list of token ids")
    if not value:
        raise BadRow("`input_ids` is an empty list; expected token ids")
    for i, id_ in enumerate(value):
        if type(id_) is not int:
            raise Misfit(f"input_ids[{i}] is {kind(id_)} ({shown(id_)}); expected a token id")
        if not 0 <= id_ <= LARGEST:
            raise BadRow(f"input_ids[{i}] is {shown(id_)}; expected a token id, 0 or more")
    length = len(value)
    if row.get("attention_mask") is not None and not all(seen := _mask(row, "attention_mask", length)):
        raise BadRow(f"attention_mask[{seen.index(False)}] is 0: the row is padded; strip the padding, rows are packed")
    if row.get("position_ids") is not None and _list_of(row, "position_ids", length) != list(range(length)):
        raise BadRow("`position_ids` are not 0, 1, 2, ...: several documents in a row; give each a row of its own")
    masks = {name: _mask(row, name, length) for name in MASKS if row.get(name) is not None}
    if row.get("labels") is not None:
        labels = _list_of(row, "labels", length)
        for i, (label, id_) in enumerate(zip(labels, value, strict=True)):
            if type(label) is not int or label not in (IGNORED, id_):
                raise BadRow(
                    f"labels[{i}] is {shown(label)}; expected {IGNORED} (not trained) or {id_}, the id at the same "
                    "place (labels are aligned with `input_ids`, they are shifted later)"
                )
        masks["labels"] = [label != IGNORED for label in labels]
    trained = {name: (False, *mask[1:]) for name, mask in masks.items()}
    if len(set(trained.values())) > 1:
        raise BadRow(f"{names(trained)} train different tokens; keep one of them")
    return Ids(tuple(value), next(iter(trained.values()), (False, *(True,) * (length - 1))))


def _mask(row: Row, name: str, length: int) -> list[bool]:
    mask = _list_of(row, name, length)
    for i, item in enumerate(mask):
        if type(item) not in (bool, int) or item not in (0, 1):
            raise BadRow(f"{name}[{i}] is {shown(item)}; expected 0 or 1")
    return [bool(item) for item in mask]


def _list_of(row: Row, name: str, length: int) -> list[Any]:
    value = row[name]
    if not isinstance(value, list):
        raise BadRow(f"`{name}` is {kind(value)}; expected a list as long as `input_ids`")
    if len(value) != length:
        raise BadRow(f"`{name}` has {len(value)} items, but `input_ids` {length}")
    return value

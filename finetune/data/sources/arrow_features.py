"""The values of a table as its writer meant them: by the features that `datasets` keeps in an Arrow schema's metadata.

    feature       in the file             in a row
    Json          its text                the value
    ClassLabel    the index of a name     the name
    the others    as Arrow has them       the same

A struct has the keys of all rows of its file, null where a row has none: one with a null becomes a `Struct`, so that
who writes it as JSON leaves these out. The value of a `Json` is what the row had, and its nulls were meant.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow
import pyarrow.types as kinds

from finetune.data.formats.values import Struct
from finetune.data.samples import BadRow
from finetune.errors import UserError

Change = Callable[[Any], Any]  # from a value as Arrow gives it; None where nothing changes
Decode = Callable[[str], Any]  # of a JSON text

_LISTS = ("Sequence", "List", "LargeList")
# Of datasets 1.0 to 5.2; their values are used as Arrow has them (images: bytes and path).
_AS_STORED = (
    *("Value", "Array2D", "Array3D", "Array4D", "Array5D", "Translation", "TranslationVariableLanguages"),
    *("Image", "Audio", "Video", "Pdf", "Nifti", "Mesh", "BioSequence", "BioStructure"),
)


@dataclass(frozen=True)
class Table:
    """How the columns of a table become values of rows."""

    names: list[str]
    plain: list[Change | None]  # of each column
    padded: list[Change | None]  # the same where structs have nulls

    @classmethod
    def of(cls, label: str, schema: pyarrow.Schema, decode: Decode) -> Table:
        """Raises UserError for features that are not known. label: of the file, for messages."""
        features = features_of(label, schema)
        changes = [
            [
                _change(f"{label}: column `{field.name}`", features.get(field.name), field.type, decode, padded)
                for field in schema
            ]
            for padded in (False, True)
        ]
        return cls(schema.names, *changes)

    def rows(self, batch: pyarrow.RecordBatch | pyarrow.Table) -> list[dict[str, Any]]:
        """Raises BadRow, or what pyarrow raises, for a value that cannot be read."""
        rows = batch.to_pylist()
        for name, array, plain, padded in zip(self.names, batch.columns, self.plain, self.padded, strict=True):
            change = padded if padded is not None and _has_padding(array) else plain
            if change is None:
                continue
            try:
                for row in rows:
                    row[name] = change(row[name])
            except BadRow as error:
                raise BadRow(f"`{name[:100]}`: {error}") from None
        return rows


def features_of(label: str, schema: pyarrow.Schema) -> Mapping[str, Any]:
    """Returns the features of each column in the schema's metadata; none if `datasets` did not write it."""
    text = (schema.metadata or {}).get(b"huggingface")
    if text is None:
        return {}
    try:
        features = json.loads(text)["info"]["features"]
    except KeyError:
        return {}
    except (ValueError, TypeError, RecursionError):
        features = ()
    if features is not None and not isinstance(features, Mapping):
        raise UserError(
            f"{label}: the metadata `huggingface` of its schema cannot be read. Fix: write the file without it"
        )
    return features or {}


def _change(place: str, feature: Any, type_: pyarrow.DataType, decode: Decode, padded: bool) -> Change | None:
    """Returns the change of a value of this type; as `datasets`, only a feature that the type fits is followed."""
    inner = partial(_change, place, decode=decode, padded=padded)
    kind = _kind(place, feature)
    if _is_json(type_) or (kind == "Json" and _is_text(type_)):
        return None if kind == "Json" and not feature.get("decode", True) else partial(_decoded, decode)
    if kind == "ClassLabel" and kinds.is_integer(type_):
        names = feature.get("names") or []
        # Names that only repeat the index tell nothing.
        return None if names == [str(i) for i in range(len(names))] else partial(_named, names)
    if isinstance(type_, pyarrow.BaseExtensionType):
        return inner(feature, type_.storage_type)
    if kinds.is_dictionary(type_):
        return inner(feature, type_.value_type)
    if isinstance(type_, pyarrow.ListType | pyarrow.LargeListType | pyarrow.FixedSizeListType) or _is_list_view(type_):
        item = feature["feature"] if kind in _LISTS else feature[0] if kind == "[]" else None
        change = inner(item, type_.value_type)
        return None if change is None else partial(_in_list, change)
    if isinstance(type_, pyarrow.StructType):
        changes = {}
        for field in type_:
            of_field = feature.get(field.name) if kind == "{}" else None
            if kind == "Sequence" and isinstance(feature["feature"], Mapping) and "_type" not in feature["feature"]:
                # Until datasets 4 a sequence of structs was a struct of sequences.
                item = feature["feature"].get(field.name)
                of_field = None if item is None else {"feature": item, "_type": "Sequence"}
            if (change := inner(of_field, field.type)) is not None:
                changes[field.name] = change
        return partial(_in_struct, changes, padded) if changes or padded else None
    return None


def _kind(place: str, feature: Any) -> str:
    """Returns the name of a feature's type, {} for a struct, [] for a list as it was written until datasets 4."""
    if isinstance(feature, list) and len(feature) == 1:
        return "[]"
    if not isinstance(feature, Mapping):
        return ""
    if "_type" not in feature or isinstance(feature["_type"], Mapping):  # a column of that name
        return "{}"
    kind = feature["_type"]
    if kind not in ("Json", "ClassLabel", *_LISTS, *_AS_STORED) or (kind in _LISTS and "feature" not in feature):
        raise UserError(
            f"{place} has the feature type {str(kind)[:60]!r}, which is not known. Fix: write the rows with "
            "`Dataset.to_json`, or remove the column"
        )
    return kind


def _is_json(type_: pyarrow.DataType) -> bool:
    return isinstance(type_, pyarrow.BaseExtensionType) and type_.extension_name == "arrow.json"


def _is_text(type_: pyarrow.DataType) -> bool:
    return kinds.is_string(type_) or kinds.is_large_string(type_) or kinds.is_string_view(type_)


def _is_list_view(type_: pyarrow.DataType) -> bool:
    return kinds.is_list_view(type_) or kinds.is_large_list_view(type_)


# --- one value


def _decoded(decode: Decode, value: str | None) -> Any:
    return None if value is None else decode(value)


def _named(names: Sequence[str], value: int | None) -> Any:
    """Returns the name of a class; an index without one, such as the -1 of a missing label, stays."""
    return names[value] if value is not None and 0 <= value < len(names) else value


def _in_list(change: Change, value: list[Any] | None) -> list[Any] | None:
    return None if value is None else list(map(change, value))


def _in_struct(changes: Mapping[str, Change], padded: bool, value: dict[str, Any] | None) -> dict[str, Any] | None:
    if value is None:
        return None
    if changes:
        value = {name: changes[name](item) if name in changes else item for name, item in value.items()}
    return Struct(value) if padded and None in value.values() else value


def _has_padding(array: pyarrow.Array | pyarrow.ChunkedArray) -> bool:
    """Returns whether a struct in it may have a null; only then its values are looked at one by one."""
    if isinstance(array, pyarrow.ChunkedArray):
        return any(map(_has_padding, array.chunks))
    if isinstance(array, pyarrow.ExtensionArray):
        return _has_padding(array.storage)
    if isinstance(array, pyarrow.StructArray):
        return any(part.null_count > 0 or _has_padding(part) for part in array.flatten())
    if isinstance(array, pyarrow.ListArray | pyarrow.LargeListArray | pyarrow.FixedSizeListArray):
        return _has_padding(array.flatten())
    return kinds.is_nested(array.type)  # views and maps, which are rare: a struct in them may have one

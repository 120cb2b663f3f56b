"""What sections of a recipe are made of: their base, those that are one of several, and types of values."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler
from pydantic.annotated_handlers import GetJsonSchemaHandler
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUseDefault, core_schema

RUN_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"

Answers = Literal["messages", "sharegpt", "alpaca", "prompt_completion", "speech", "text", "tokens"]
Format = Literal["auto", Answers, "prompt", "preference", "comparison", "ranked", "unpaired", "classification"]


class Section(BaseModel):
    """Base of every section: refuses unknown keys, does not coerce between types, is frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Variant(Section):
    """Base of sections of which a key holds one: each has its own keys and refuses those of the others."""

    @classmethod
    def kind(cls) -> str:
        """Returns the value of `name`, or the key in its place, that chooses this section."""
        raise NotImplementedError

    @classmethod
    def unread(cls, readers: Sequence[str]) -> str:
        """Returns the message for a key that only others read. readers: kinds of these."""
        raise NotImplementedError


def list_to_tuple(value: Any) -> Any:
    """Converts YAML's lists to the tuples of a frozen recipe."""
    return tuple(value) if isinstance(value, list) else value


def _int_to_float(value: Any) -> Any:
    """Accepts `lr: 1` as `1.0`, but no bool."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < 2**63 else value


def _variable(name: str) -> str:
    """Refuses what may be a key itself, without showing it."""
    if not re.fullmatch(r"[A-Z_][A-Z0-9_]*", name):
        raise ValueError(
            "expected the name of an environment variable in capitals, such as JUDGE_KEY; not the key itself"
        )
    return name


Float = Annotated[float, BeforeValidator(_int_to_float), Field(allow_inf_nan=False)]
Positive = Annotated[Float, Field(gt=0)]
NonNegative = Annotated[Float, Field(ge=0)]
Share = Annotated[Float, Field(ge=0, le=1)]
Beta = Annotated[Float, Field(ge=0, lt=1)]
Betas = Annotated[tuple[Beta, Beta], BeforeValidator(list_to_tuple), Field(strict=False)]
Bounds = Annotated[tuple[NonNegative, Positive], BeforeValidator(list_to_tuple), Field(strict=False)]
Scale = Annotated[tuple[Float, Float], BeforeValidator(list_to_tuple), Field(strict=False)]
Names = Annotated[tuple[str, ...], BeforeValidator(list_to_tuple), Field(strict=False, min_length=1)]
Count = Annotated[int, Field(ge=1, le=10**9)]
Variable = Annotated[str, AfterValidator(_variable)]  # of the environment


class _NullIsDefault:
    """Reads null as the key's default, and says in the JSON Schema that it may be given."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_before_validator_function(_default_if_null, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"anyOf": [handler(schema), {"type": "null"}]}


def _default_if_null(value: Any) -> Any:
    if value is None:
        raise PydanticUseDefault
    return value


T = TypeVar("T")
OrDefault = Annotated[T, _NullIsDefault()]


def _unset(field: FieldInfo) -> Any:
    """Returns the value of a key that is as good as none."""
    takes_null = any(isinstance(one, _NullIsDefault) for one in field.metadata)
    return None if takes_null or field.is_required() else field.default


def own_values(values: dict[str, Any], own: type[Variant], variants: Collection[type[Variant]]) -> dict[str, Any]:
    """Returns the values without unset keys of other variants, which recipes have that were recorded while all variants
    had all keys."""
    others = [fields for fields in (one.model_fields for one in variants) if fields is not own.model_fields]

    def is_unset(key: str) -> bool:
        unset = [_unset(fields[key]) for fields in others if key in fields]
        return any(values[key] == one and isinstance(values[key], bool) == isinstance(one, bool) for one in unset)

    return {key: value for key, value in values.items() if key in own.model_fields or not is_unset(key)}

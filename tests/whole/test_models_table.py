"""The table of families in docs/reference/models.md is what its sources say."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from conftest import script
from usual import usual


@pytest.fixture(scope="module")
def made() -> Any:
    return script("scripts/docs/models_table.py")


def test_the_table_is_current(made: Any) -> None:
    """With what the page says of tp, pp and ep: these are tried below, some of them by default."""
    page = made.PAGE.read_text(encoding="utf-8")
    tried = made.stated(page)
    assert {*tried} == {name for types in made.FAMILIES.values() for name in types}
    assert made.table(page, tried) in page, "make it anew: python scripts/docs/models_table.py"


@pytest.mark.parametrize(
    "name",
    usual(
        ["llama", "gpt_oss", "qwen3_5_text", "nemotron_h", "gemma4_unified_text", "deepseek_v3", "mamba"],
        "llama",
    ),
)
def test_what_is_offered_is_as_the_page_says(made: Any, name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert made.offered(name) == made.stated(made.PAGE.read_text(encoding="utf-8"))[name]

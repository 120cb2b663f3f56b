"""The table of families in docs/reference/models.md is what its sources say."""

from __future__ import annotations

import warnings

import models_table
import pytest
from usual import usual


def test_the_table_is_current() -> None:
    """With what the page says of tp, pp and ep: these are tried below, one of them by default."""
    page = models_table.PAGE.read_text(encoding="utf-8")
    tried = models_table.stated(page)
    assert {*tried} == {name for types in models_table.FAMILIES.values() for name in types}
    assert models_table.table(page, tried) in page, "make it anew: python scripts/docs/models_table.py"


@pytest.mark.parametrize(
    "name",
    usual(
        ["llama", "gpt_oss", "qwen3_5_text", "nemotron_h", "gemma4_unified_text", "deepseek_v3", "mamba"],
        "llama",
    ),
)
def test_what_is_offered_is_as_the_page_says(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert models_table.offered(name) == models_table.stated(models_table.PAGE.read_text(encoding="utf-8"))[name]

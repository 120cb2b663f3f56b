"""`prepare` enters a run as `train` does, but for a teacher, whose predictions are computed from the tokens."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from finetune.data.cache_entries import CachedEntry
from finetune.desk.setup.prepare_data import prepare, show_entries
from finetune.errors import UserError
from finetune.features import load_recipe
from finetune.plan.search import config_folder


def test_tokens_are_prepared_before_the_predictions_of_a_teacher(
    recipe: dict[str, Any], write_recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    path = write_recipe({**recipe, "objective": {"name": "distill", "teacher": recipe["model"]["name"]}})
    sources, _ = prepare(load_recipe(path), str(path))
    assert [(one.part, one.build_s is None) for one in sources] == [("train", False), ("eval", False)]
    again, _ = prepare(load_recipe(path), str(path))
    assert [one.build_s for one in again] == [None, None]


def test_what_train_refuses_is_refused(recipe: dict[str, Any], write_recipe: Any) -> None:
    path = write_recipe({**recipe, "model": {**recipe["model"], "name": "no/such-folder/here"}})
    with pytest.raises(UserError, match=r"model\.name"):
        prepare(load_recipe(path), str(path))


def test_configs_are_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert (config_folder() / "single.yaml").is_file()


def test_an_entry_of_a_teacher_s_file_is_shown(tmp_path: Path) -> None:
    """It has no tokenizer and no max_length."""
    key = {"source": "teacher.parquet", "format": "teacher", "finetune": "1.0"}
    entry = CachedEntry("a", str(tmp_path / "a"), bytes=10, used=0.0, is_whole=True, of=key, examples=3)
    shown = io.StringIO()
    show_entries(Console(file=shown, width=200), tmp_path, [entry])
    assert "teacher.parquet (teacher)" in shown.getvalue()

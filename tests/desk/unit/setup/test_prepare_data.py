"""`prepare` enters a run as `train` does, but for a teacher, whose predictions are computed from the tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from finetune.desk.setup.prepare_data import prepare
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

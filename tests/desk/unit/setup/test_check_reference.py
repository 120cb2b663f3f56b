"""`check` of a run that reads another model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny

from finetune.desk.setup.check import check_recipe


def test_a_reference_of_another_vocabulary(recipe: dict[str, Any], write_recipe: Any, tmp_path: Path) -> None:
    rows = tiny.write_rows(tmp_path / "pairs.jsonl", tiny.preferences(8))
    recipe["data"] = {"train": [{"path": str(rows), "format": "preference"}], "max_length": 96}
    recipe["objective"] = {"name": "dpo", "reference_model": str(tiny.save_with_exchanged_tokens(tmp_path / "other"))}
    del recipe["evaluate"]
    error = check_recipe(write_recipe(recipe), ()).error or ""
    assert "objective.reference_model" in error
    assert "has another vocabulary than the model that is trained" in error

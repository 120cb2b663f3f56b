"""Chat templates that a repository keeps with its processor alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny

from finetune.errors import UserError
from finetune.models.tokenizer import load_tokenizer
from finetune.recipe.schema import Model


def saved(folder: Path, own: str | None, of_processor: str) -> Path:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = own
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.json").write_text(of_processor, encoding="utf-8")
    return folder


def test_a_processor_s_template_is_the_tokenizer_s_if_that_has_none(tmp_path: Path) -> None:
    of_processor = json.dumps({"chat_template": "of the processor"})
    for own in (None, "its own"):
        loaded = load_tokenizer(Model(name=str(saved(tmp_path / str(own), own, of_processor))))
        assert loaded.chat_template == (own or "of the processor")


def test_a_damaged_one_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"chat_template\.json: damaged"):
        load_tokenizer(Model(name=str(saved(tmp_path / "model", None, "{"))))

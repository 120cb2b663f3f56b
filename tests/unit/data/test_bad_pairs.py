"""Every mistake in pairs, their files and their settings is answered with its place and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
from data_helpers import recipe, text_tokenizer, write_jsonl

from finetune.data.dataset import build_held_out, build_training
from finetune.errors import UserError

PAIR = {"prompt": "q", "chosen": "a", "rejected": "b"}
ANSWER = {"prompt": "q", "completion": "a"}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("key", ["train", "eval"])
@pytest.mark.parametrize(
    ("objective", "row", "message"),
    [
        (
            "sft",
            PAIR,
            "pairs.jsonl: rows of format `preference` are not for `objective.name: sft`.* to dpo or .* chosen",
        ),
        (
            "dpo",
            ANSWER,
            "`prompt_completion` are not for .*dpo`, which takes `preference` or `ranked`: set .* to sft or",
        ),
        ("kto", {"text": "a"}, "pairs.jsonl: rows of format `text` are not for `objective.name: kto`"),
    ],
)
def test_rows_that_are_not_for_the_objective(
    objective: str, row: dict[str, str], message: str, key: str, streaming: bool, tmp_path: Path
) -> None:
    sources = [{"path": str(write_jsonl(tmp_path / "pairs.jsonl", [row]))}]
    made = recipe("", "auto", objective__name=objective, data__streaming=streaming, data__train=sources)
    made = made.model_copy(update={"data": made.data.model_copy(update={"eval": made.data.train})})
    with pytest.raises(UserError, match=message):
        (build_training if key == "train" else build_held_out)(made, text_tokenizer())

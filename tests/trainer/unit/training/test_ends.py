"""Which tokens end a generation, from recipes over sources of several formats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
from data_helpers import byte_level, recipe, renderer_of, write_jsonl
from transformers import GenerationConfig

from finetune.data.dataset import build_training
from finetune.recipe import Recipe
from finetune.training.evaluation import end_ids

BASE = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>")
TOKENIZER = byte_level(BASE, bos_token=BASE[0], eos_token=BASE[1], pad_token=BASE[1])  # as Llama 3's base has it
BEGIN, EOS, _, _, EOT, EOM = range(len(BASE))
CHATS = {"format": "messages", "rows": tiny.conversations(3)}
TEXTS = {"format": "text", "rows": [{"text": "hello world"}] * 3}


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))


def made(folder: Path, sources: list[dict[str, Any]], model: dict[str, Any] | None = None, **data: Any) -> Recipe:
    train = []
    for i, source in enumerate(sources):
        path = write_jsonl(folder / f"{i}.jsonl", source["rows"])
        train.append({"path": str(path), "format": source["format"]})
    base = recipe("unused").model_dump(mode="json")
    base["model"]["chat_template"] = "llama3"
    base["model"] |= model or {}
    base["data"] |= {"train": train, **data}
    if data.get("streaming"):
        base["train"] = {"max_steps": 2}
    return Recipe.model_validate(base)


def ids(*rows: list[int]) -> dict[str, Any]:
    return {"format": "tokens", "rows": [{"input_ids": row} for row in rows]}


@pytest.mark.parametrize("streaming", [False, True], ids=["on the disk", "a stream"])
@pytest.mark.parametrize(
    ("sources", "ends"),
    [
        ([CHATS], {EOS, EOT}),
        ([TEXTS, CHATS], {EOS, EOT}),
        ([TEXTS], {EOS}),
        ([TEXTS, ids([30, 31, EOM], [30, 31, 32, EOM])], {EOS, EOM}),
        ([ids([30, 31, 32], [30, 31, 33])], {EOS}),
        ([ids(*[[30, 31, EOM]] * 19, [30, 31, EOT])], {EOS, EOM}),
    ],
    ids=["chats", "text first", "text", "ids", "ids without an end", "one row that was cut off"],
)
def test_the_ends_do_not_depend_on_the_first_row(
    tmp_path: Path, sources: list[dict[str, Any]], ends: set[int], streaming: bool
) -> None:
    one = made(tmp_path, sources, streaming=streaming)
    assert end_ids(one.model, TOKENIZER, [build_training(one, renderer_of(one, TOKENIZER)), None]) == ends


def test_the_ends_of_the_base_stay(tmp_path: Path) -> None:
    """Llama 3.1 ends with any of three tokens; an id that is no added token is another tokenizer's."""
    GenerationConfig(eos_token_id=[EOS, EOM, 40]).save_pretrained(tmp_path / "base")
    (tmp_path / "other").mkdir()
    found = {}
    for name, model in {
        "its own tokenizer": {"name": str(tmp_path / "base"), "tokenizer": None, "config": None},
        "another tokenizer": {"name": str(tmp_path / "base"), "config": None},
        "no such file": {"name": str(tmp_path / "other"), "tokenizer": None, "config": None},
    }.items():
        one = made(tmp_path, [CHATS], model)
        found[name] = end_ids(one.model, TOKENIZER, [build_training(one, renderer_of(one, TOKENIZER))])
    assert found == {
        "its own tokenizer": {EOS, EOT, EOM},
        "another tokenizer": {EOS, EOT},
        "no such file": {EOS, EOT},
    }

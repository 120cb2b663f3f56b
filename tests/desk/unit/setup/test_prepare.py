"""One way into a run: whatever `train` refuses, `check` refuses, in the same words."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
from conftest import train_here

from finetune.desk.setup.check import check_recipe
from finetune.errors import UserError

LORA = ("mode=lora", "lora={rank: 4, alpha: 8}")
DPO = ("objective={name: dpo}", "data.eval=[]", "data.train=[{path: {folder}/pairs.jsonl, format: preference}]")
# Where a run is refused, and the overrides that make it be; {made}: the tests' models, {folder}: rows of this test.
REFUSED: dict[str, tuple[str, ...]] = {
    "no model": ("model.name=./nothing",),
    "sizes without a model": (
        'model={config: {model_type: llama, vocab_size: 384, hidden_size: 30, num_attention_heads: 4}, "tokenizer": '
        '"{made}/llama"}',
    ),
    "tracker without a key": ("tracking.wandb.project=x",),
    "no file": ("data.train.0.path=nothing.jsonl",),
    "bad row": ("data.train.0.path={folder}/bad.jsonl",),
    "nothing supervised": ("data.max_length=2",),
    "warm-up longer than the data": ("train={epochs: 1, precision: fp32}", "schedule.warmup_steps=500"),
    "question without an answer": ("evaluate={every_steps: 2, exact_match: 4, answer: '(xyz)'}",),
    "attention of another device": ("model.attention=finetune_varlen",),
    "shared prompts without pairs": (*DPO, "objective.share_prompts=true", "objective.dropout=true"),
    "no such module": (*LORA, "lora.targets=[q_project]"),
    "no such module to save": (*LORA, "lora.modules_to_save=[heads]"),
    "cross entropy of another device": ("model.cross_entropy=liger",),
    "balance of a dense model": ("objective.router_aux_loss_coef=0.1",),
    "reference of another vocabulary": (*DPO, "objective.reference_model={folder}/other"),
    "reference to compute first": (*DPO, "objective.reference_model={made}/qwen3"),
    "teacher of another vocabulary": ("objective={name: distill, teacher: {folder}/other, top_k: 4}",),
    "teacher to compute first": ("objective={name: distill, teacher: {made}/qwen3, top_k: 4}",),
    "teacher with too few tokens": ("objective={name: distill, teacher: {made}/qwen3, top_k: 4000}",),
}


@pytest.fixture
def folder(tmp_path: Path, made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Rows and a model that are refused."""
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("NETRC", str(tmp_path / "nothing"))
    (tmp_path / "bad.jsonl").write_text('{"messages": 1}\n')
    tiny.write_rows(tmp_path / "pairs.jsonl", tiny.preferences(20))
    other = tmp_path / "other"
    other.mkdir()
    for file in (made / "llama").iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    first, second, *_ = tokenizer["model"]["vocab"]
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    return tmp_path


@pytest.mark.parametrize("case", REFUSED)
def test_check_refuses_what_train_refuses(
    case: str, folder: Path, made: Path, recipe: dict[str, Any], write_recipe: Callable[..., Path]
) -> None:
    overrides = [one.replace("{made}", str(made)).replace("{folder}", str(folder)) for one in REFUSED[case]]
    path = write_recipe(recipe)
    with pytest.raises(UserError) as refused:
        train_here(path, *overrides)
    assert str(refused.value) in str(check_recipe(path, overrides).error)

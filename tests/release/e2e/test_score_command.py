"""Models of scores from the recipe to their use: by `finetune score`, by transformers' pipeline and by peft."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from conftest import finetune, metrics, train_here
from rich.console import Console
from transformers import AutoTokenizer, pipeline

from finetune.errors import RunFailure
from finetune.release.inference.score import score_file, source_of

LORA = ("mode=lora", "lora={rank: 2, alpha: 4}", "optimizer.lr=5e-3")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scored")
    pairs = tiny.preferences(60)
    for row in pairs[:30]:
        row["margin"] = 0.5
    tiny.write_rows(folder / "pairs.jsonl", pairs)
    tiny.write_rows(folder / "texts.jsonl", tiny.texts(60))
    return folder


@pytest.fixture
def reward(recipe: dict[str, Any], files: Path, write_recipe: Any) -> Path:
    sources = [{"path": str(files / "pairs.jsonl"), "format": "preference"}]
    data = {"train": sources, "eval": sources, "max_length": 128}
    return write_recipe({**recipe, "objective": {"name": "reward"}, "data": data})


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def chat(row: dict[str, Any], answer: str, folder: Path) -> str:
    return AutoTokenizer.from_pretrained(folder).apply_chat_template([*row["prompt"], *row[answer]], tokenize=False)


def pipeline_scores(folder: Path, texts: list[str], batch_size: int, **options: Any) -> list[Any]:
    made: Any = pipeline("text-classification", model=str(folder), device="cpu", **options)
    return made(texts, batch_size=batch_size)


def test_a_reward_model_is_trained_saved_and_used(reward: Path, files: Path, tmp_path: Path) -> None:
    """The tokenizer's padding is its end token, which ends every document: transformers must not take it for padding.

    Texts of a pair differ in length, so that a batch of them is padded."""
    base = tiny.save_model(tmp_path, "llama")
    tokenizer: Any = AutoTokenizer.from_pretrained(base)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.chat_template = tiny.CHATML.replace("<|im_end|>\n", "<|im_end|>")
    tokenizer.save_pretrained(base)
    train_here(reward, f"model.name={base}", "train.max_steps=8", "run.name=full")
    run, rows = tmp_path / "runs" / "full", read(files / "pairs.jsonl")
    evaluated = metrics(run)[-1]
    done = finetune("score", run, "--data", files / "pairs.jsonl", "--output", tmp_path / "out.jsonl", "--json")
    assert done.returncode == 0, done.stderr
    means, scored = json.loads(done.stdout), read(tmp_path / "out.jsonl")
    assert means["rows"] == len(scored) == 60
    assert means["chosen"] == pytest.approx(evaluated["eval_rewards/chosen"], abs=1e-6)
    assert means["margin"] == pytest.approx(evaluated["eval_rewards/margin"], abs=1e-6)
    assert means["accuracy"] == pytest.approx(evaluated["eval_rewards/accuracy"])
    assert scored[3]["path"].endswith("pairs.jsonl")
    assert scored[3]["row"] == 4
    texts = [chat(row, answer, run / "model") for row in rows[:8] for answer in ("chosen", "rejected")]
    assert all(tokenizer(text)["input_ids"][-1] == tokenizer.pad_token_id for text in texts)
    wanted = [one[answer] for one in scored[:8] for answer in ("chosen", "rejected")]
    for batch_size in (1, 5):
        found = pipeline_scores(run / "model", texts, batch_size)
        assert {one["label"] for one in found} == {"reward"}
        assert [one["score"] for one in found] == pytest.approx(wanted, abs=1e-6)
    refused = finetune("generate", run, "hello")
    assert refused.returncode == 2
    assert "use `finetune score`" in refused.stderr


@pytest.mark.long
def test_adapters_of_a_reward_model_load_by_peft_and_merge(reward: Path, files: Path, tmp_path: Path) -> None:
    from peft import AutoPeftModelForSequenceClassification

    train_here(reward, *LORA, "train.max_steps=5")
    run = tmp_path / "runs" / "run"
    assert json.loads((run / "model" / "labels.json").read_text()) == ["reward"]
    done = finetune("score", run, "--data", files / "pairs.jsonl", "--output", tmp_path / "a.jsonl", "--limit", 6)
    assert done.returncode == 0, done.stderr
    assert "accuracy" in done.stdout
    merged = finetune("merge", run)
    assert merged.returncode == 0, merged.stderr
    again = finetune(
        *("score", run / "merged", "--data", files / "pairs.jsonl", "--output", tmp_path / "b.jsonl", "--limit", 6)
    )
    assert again.returncode == 0, again.stderr
    (tmp_path / "c.jsonl.partial").symlink_to("/dev/full")
    with pytest.raises(RunFailure, match=r"c\.jsonl could not be written: .*No space left"):
        score_file(run, source_of(str(files / "pairs.jsonl"), "auto", None), tmp_path / "c.jsonl", Console(quiet=True))
    assert not list(tmp_path.glob("c.jsonl*"))
    rows, scored, of_merged = (
        read(path) for path in (files / "pairs.jsonl", tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    )
    assert [one["margin"] for one in of_merged] == pytest.approx([one["margin"] for one in scored], abs=1e-6)
    texts = [chat(row, "chosen", run / "model") for row in rows[:6]]
    found = pipeline_scores(run / "merged", texts, 6)
    assert [one["score"] for one in found] == pytest.approx([one["chosen"] for one in scored], abs=1e-6)
    peft = AutoPeftModelForSequenceClassification.from_pretrained(run / "model", num_labels=1).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(run / "model")
    with torch.no_grad():
        by_peft = [peft(**tokenizer(text, return_tensors="pt")).logits.item() for text in texts]
    assert by_peft == pytest.approx([one["chosen"] for one in scored], abs=1e-6)


def test_a_classifier_gives_labels_to_plain_texts(
    recipe: dict[str, Any], files: Path, write_recipe: Any, tmp_path: Path
) -> None:
    """By a pipeline that is given the text alone: nothing is put behind it in training, either."""
    sources = [{"path": str(files / "texts.jsonl")}]
    objective = {"name": "classify", "labels": list(tiny.LABELS)}
    data = {"train": sources, "eval": sources, "max_length": 64}
    train_here(
        write_recipe({**recipe, "objective": objective, "data": data}), "train.max_steps=20", "optimizer.lr=3e-3"
    )
    run = tmp_path / "runs" / "run"
    done = finetune("score", run, "--data", files / "texts.jsonl", "--output", tmp_path / "out.jsonl", "--json")
    assert done.returncode == 0, done.stderr
    means, scored, rows = json.loads(done.stdout), read(tmp_path / "out.jsonl"), read(files / "texts.jsonl")
    assert means["accuracy"] == pytest.approx(metrics(run)[-1]["eval_accuracy"])
    assert sum(means[f"share of {name}"] for name in tiny.LABELS) == pytest.approx(1)
    assert scored[0]["given"] == rows[0]["label"]
    for batch_size in (1, 7):
        found = pipeline_scores(run / "model", [row["text"] for row in rows], batch_size)
        assert [one["label"] for one in found] == [one["label"] for one in scored]
        wanted = [one["probabilities"][one["label"]] for one in scored]
        assert [one["score"] for one in found] == pytest.approx(wanted, abs=1e-6)


def test_what_cannot_be_scored_is_refused(made: Path, files: Path, tmp_path: Path) -> None:
    assert "no result here" in finetune("score", tmp_path, "--data", files / "pairs.jsonl").stderr
    done = finetune("score", made / "llama", "--data", files / "pairs.jsonl")
    assert done.returncode == 2
    assert "has no score head. Fix: give a reward model or a classifier, or use `finetune generate`" in done.stderr

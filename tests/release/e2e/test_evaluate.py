"""`evaluate`: lm_eval's accuracy of local tasks is our own, of the trained model and its base; where it is written."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import yaml
from conftest import ROOT, full_disk, metrics, train_here
from huggingface_hub import ModelCard
from rich.console import Console
from transformers import AutoModelForCausalLM

from finetune.checkpoints.trained import find_trained
from finetune.errors import RunFailure, UserError
from finetune.release.export.loading import load_result
from finetune.release.export.verify_answers import load_reference
from finetune.release.inference.evaluate import EvaluateOptions, Score, evaluate_runs, paired, write_scores
from finetune.tracking.metrics import add_to_step

CHOICES = ["good", "bad"]
CHOICE_TASK = {
    "task": "choice_local",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": "data/gsm8k_test.jsonl"}},
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": [f"so #### {one}" for one in CHOICES],
    "doc_to_target": "{{['good', 'bad'].index(answer.split(' ')[-1])}}",
    "target_delimiter": "",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}


def rows(count: int, seed: int, share: int) -> list[dict[str, str]]:
    """Questions, whose answer is good but for each share-th."""
    questions = [row["messages"][0]["content"] for row in tiny.conversations(count, seed=seed)]
    return [
        {"question": question, "answer": f"so #### {CHOICES[i % share == 0]}"} for i, question in enumerate(questions)
    ]


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with data/gsm8k_test.jsonl, where 4 of 11 answers are bad, and tasks/."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    (tmp_path / "data").mkdir()
    tiny.write_rows(tmp_path / "data" / "train.jsonl", rows(64, 0, 1000))
    test = rows(8, 1, 1000)[1:] + rows(4, 2, 1)
    tiny.write_rows(tmp_path / "data" / "gsm8k_test.jsonl", test)
    (tmp_path / "tasks").mkdir()
    task = yaml.safe_load((ROOT / "recipes" / "tasks" / "gsm8k.yaml").read_text())
    task["generation_kwargs"]["max_gen_toks"] = 24
    (tmp_path / "tasks" / "gsm8k.yaml").write_text(yaml.safe_dump(task))
    (tmp_path / "tasks" / "choice.yaml").write_text(yaml.safe_dump(CHOICE_TASK))
    tiny.save_model(tmp_path, "llama")
    return tmp_path


def trained(folder: Path, mode: str) -> Path:
    recipe = {
        "run": {"name": mode, "dir": str(folder)},
        "model": {"name": str(folder / "llama")},
        "mode": mode,
        **({"lora": {"rank": 8}} if mode == "lora" else {}),
        "data": {
            "train": [
                {"path": "data/train.jsonl", "format": "prompt_completion"}
                | {"columns": {"prompt": "question", "completion": "answer"}}
            ],
            "max_length": 64,
        },
        "batch": {"rows": 4},
        "optimizer": {"lr": 2e-2 if mode == "lora" else 5e-3},
        "train": {"max_steps": 60, "precision": "fp32"},
        "checkpoint": {"every_steps": 40},
        "tracking": {"tensorboard": True},
    }
    (folder / f"{mode}.yaml").write_text(yaml.safe_dump(recipe))
    train_here(folder / f"{mode}.yaml")
    return folder / mode


@torch.no_grad()
def our_own(model: Any, tokenizer: Any, row: dict[str, str]) -> tuple[bool, bool]:
    """Whether the answer is right: as it is generated greedily, token by token, and as the likelier of two."""
    messages = [{"role": "user", "content": row["question"]}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    out: list[int] = []
    while len(out) < 24:
        token = int(model(input_ids=torch.tensor([ids + out])).logits[0, -1].argmax())
        if token == tokenizer.eos_token_id:
            break
        out.append(token)
    found = re.findall("#### *(.+)", tokenizer.decode(out, skip_special_tokens=True))
    scores = []
    for choice in CHOICES:
        answer = tokenizer(f"so #### {choice}", add_special_tokens=False)["input_ids"]
        log_probs = model(input_ids=torch.tensor([ids + answer])).logits[0, len(ids) - 1 : -1].log_softmax(-1)
        scores.append(float(log_probs[torch.arange(len(answer)), answer].sum()))
    target = row["answer"].split(" ")[-1]
    return bool(found) and found[-1] == target, CHOICES[scores.index(max(scores))] == target


@pytest.mark.parametrize("mode", ["lora", "full"])
@pytest.mark.filterwarnings("ignore")  # lm_eval's own
def test_accuracy_is_our_own(workplace: Path, mode: str) -> None:
    pytest.importorskip("lm_eval")
    run = trained(workplace, mode)
    last = metrics(run)[-1]
    options = EvaluateOptions(("gsm8k_local", "choice_local"), workplace / "tasks", batch_size=5)
    (scores,) = evaluate_runs([run], options, Console(quiet=True))
    test = [json.loads(line) for line in (workplace / "data" / "gsm8k_test.jsonl").read_text().splitlines()]
    model, tokenizer = load_result(run)
    base = AutoModelForCausalLM.from_pretrained(workplace / "llama").eval()
    answered = {}
    for name, one in (("trained", model), ("base", base)):
        right = answered[name] = torch.tensor([our_own(one, tokenizer, row) for row in test]).float()
        for task, shares in {"gsm8k_local/exact_match,answer": right[:, 0], "choice_local/acc": right[:, 1]}.items():
            mean = float(shares.mean())
            stderr = math.sqrt(mean * (1 - mean) / (len(test) - 1))
            assert getattr(scores[task], name) == pytest.approx(mean), (task, name)
            assert getattr(scores[task], f"{name}_stderr") == pytest.approx(stderr), (task, name)
    differences = answered["trained"] - answered["base"]  # (rows, 2)
    for column, task in enumerate(("gsm8k_local/exact_match,answer", "choice_local/acc")):
        assert scores[task].difference == pytest.approx(float(differences[:, column].mean()))
        stderr = float(differences[:, column].std()) / math.sqrt(len(test))
        assert scores[task].difference_stderr == pytest.approx(stderr)
    exact = scores["gsm8k_local/exact_match,answer"]
    assert (exact.rows, exact.base) == (11, 0)
    if mode == "full":  # it has learnt to say good
        assert exact.trained == pytest.approx(7 / 11)
    # in the line of the last step, and nothing else of it is changed
    line = metrics(run)[-1]
    assert {key: value for key, value in line.items() if not key.startswith("eval_tasks/")} == last
    assert line["eval_tasks/gsm8k_local/exact_match,answer"] == exact.trained
    assert line["eval_tasks/gsm8k_local/exact_match,answer/base"] == 0
    written = json.loads((run / "evaluate.json").read_text())["scores"]
    assert written.keys() == scores.keys()
    assert written["choice_local/acc"]["trained"] == scores["choice_local/acc"].trained
    logged = b"".join(path.read_bytes() for path in (run / "tensorboard").rglob("events*"))
    assert b"eval/tasks/choice_local/acc" in logged
    with pytest.raises(UserError, match=r"--tasks absent: lm_eval has no such task; .*choice_local, gsm8k_local"):
        evaluate_runs([run], EvaluateOptions(("absent",), workplace / "tasks"), Console(quiet=True))


@pytest.mark.filterwarnings("ignore")  # lm_eval's own
def test_checkpoints_of_several_runs(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("lm_eval")
    runs = [trained(workplace, mode) for mode in ("lora", "full")]
    options = EvaluateOptions(("choice_local",), workplace / "tasks", step="40")
    every = evaluate_runs(runs, options, Console(width=200))
    assert "- lora" in capsys.readouterr().out
    test = [json.loads(line) for line in (workplace / "data" / "gsm8k_test.jsonl").read_text().splitlines()]
    answered = []
    for run, scores in zip(runs, every, strict=True):
        checkpoint = find_trained(run, "40")
        _, tokenizer = load_result(run)
        answered.append(torch.tensor([our_own(load_reference(checkpoint), tokenizer, row)[1] for row in test]).float())
        score = scores["choice_local/acc"]
        assert score.trained == pytest.approx(float(answered[-1].mean()))
        (line,) = [line for line in metrics(run) if "eval_tasks/choice_local/acc" in line]
        assert (line["step"], line["eval_tasks/choice_local/acc/difference"]) == (40, score.difference)
    over = answered[1] - answered[0]
    assert every[1]["choice_local/acc"].over_first == pytest.approx(float(over.mean()))
    assert every[1]["choice_local/acc"].over_first_stderr == pytest.approx(float(over.std()) / math.sqrt(len(test)))
    # a result and a checkpoint stand next to each other, and each is replaced by its own
    for _ in range(2):
        evaluate_runs(
            runs[1:], EvaluateOptions(("choice_local",), workplace / "tasks", base=False), Console(quiet=True)
        )
    written = json.loads((runs[1] / "evaluate.json").read_text())["scores"]
    assert {name: score["step"] for name, score in written.items()} == {
        "choice_local/acc@40": 40,
        "choice_local/acc": 60,
    }


def test_paired_errors_are_of_the_same_rows() -> None:
    ours, theirs = {7: 1.0, 3: 0.0, 5: 1.0, 1: 1.0}, {3: 0.0, 7: 1.0, 1: 1.0, 5: 0.0}
    mean, stderr = paired(ours, theirs)
    a, b = (torch.tensor([one[row] for row in ours], dtype=torch.float64) for one in (ours, theirs))
    variance = a.var() + b.var() - 2 * torch.cov(torch.stack([a, b]))[0, 1]
    assert (mean, stderr) == (0.25, pytest.approx(math.sqrt(float(variance) / 4)))
    assert paired(ours, {**theirs, 9: 1.0}) == paired({}, {}) == paired({1: 1.0}, {1: 0.0}) == (None, None)


def test_values_are_added_to_the_line_of_a_step(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    lines = [
        '{"step": 1, "loss": 0.5}',
        '{"step": 2, "loss": 0.25}',
        '{"step": 2, "eval_loss": 1.0}',
        '{"step": 3, "lo',
    ]
    file.write_text("\n".join(lines))
    add_to_step(file, 2, {"eval_tasks/a": 1.0})
    lines[2] = '{"step": 2, "eval_loss": 1.0, "eval_tasks/a": 1.0}'
    assert file.read_text() == "\n".join(lines)


def test_a_full_disk_leaves_the_scores_of_before(tmp_path: Path) -> None:
    how = {"limit": None, "fewshot": None, "lm_eval": "0.4"}
    write_scores(tmp_path, None, {"a/acc": Score(5, 0.5, 0.1)}, how)
    before = (tmp_path / "evaluate.json").read_bytes()
    with full_disk(len(before)), pytest.raises(RunFailure, match=r"the scores above could not be written: .*too large"):
        write_scores(tmp_path, None, {"b/acc": Score(5, 0.5, 0.1)}, how)
    assert [path.name for path in tmp_path.iterdir()] == ["evaluate.json"]
    assert (tmp_path / "evaluate.json").read_bytes() == before


def test_scores_of_the_result_are_in_its_card(tmp_path: Path) -> None:
    """As the hub's own reader finds them; those of a checkpoint, and of an earlier evaluation, are not."""
    card = tmp_path / "model" / "README.md"
    card.parent.mkdir()
    card.write_text("---\nlibrary_name: peft\nbase_model: org/base\n---\n\n# run\n", encoding="utf-8")
    for scores, step in (
        ({"gsm8k/acc": 0.1}, None),
        ({"gsm8k/acc": 0.9}, 4),
        ({"gsm8k/acc": 0.5, "arc/f1": 1.0}, None),
    ):
        write_scores(tmp_path, None, {name: Score(8, value, None) for name, value in scores.items()}, {}, step)
    read = ModelCard.load(card)
    assert (read.data.library_name, read.data.base_model, read.text.strip()) == ("peft", "org/base", "# run")
    found = {(one.dataset_type, one.metric_type): one.metric_value for one in read.data.eval_results}
    assert found == {("gsm8k", "acc"): 0.5, ("arc", "f1"): 1.0}


def test_a_damaged_card_is_told_after_the_scores_are_written(tmp_path: Path) -> None:
    card = tmp_path / "model" / "README.md"
    card.parent.mkdir()
    card.write_text("---\nlicense: [mit\ntags: x: y\n---\n\n# run\n", encoding="utf-8")
    before = card.read_bytes()
    with pytest.raises(UserError, match=r"README.md of the model: its metadata is no YAML \(line \d\)"):
        write_scores(tmp_path, None, {"gsm8k/acc": Score(8, 0.5, None)}, {})
    assert "gsm8k/acc" in (tmp_path / "evaluate.json").read_text(encoding="utf-8")
    assert card.read_bytes() == before


def test_a_folder_without_a_result_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no result here"):
        evaluate_runs([tmp_path], EvaluateOptions(("gsm8k",)), Console(quiet=True))

"""`check` on data that are small, wrong or repeated: what a person is told before a run is wasted on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from conftest import train_here
from repository import ROOT

from finetune.desk.setup.check import check_recipe
from finetune.engine.product_speed import EMULATED, compute_device, times_slower

QUIET = ("train.max_steps=1", "schedule.warmup_steps=0")


@pytest.fixture
def path(recipe: dict[str, Any], write_recipe: Any) -> Path:
    recipe["train"] = {"epochs": 2, "precision": "fp32"}
    recipe["data"]["max_length"] = 256
    recipe["batch"] = {"rows": 8}
    recipe["schedule"] = {"warmup_steps": 10}
    return write_recipe(recipe)


def test_a_warm_up_that_the_data_end_before(path: Path) -> None:
    error = check_recipe(path, []).error or ""
    assert error.startswith("schedule.warmup_steps: the data give 2 steps, fewer than the 10 of warm-up")
    assert "batch.rows: 1 (16 steps) or data.max_length: 32 (16 steps)" in error
    for said in ("batch.rows=1", "data.max_length=32"):
        assert check_recipe(path, [said, "schedule.warmup_steps=1"]).facts["steps"] == 16
    assert check_recipe(path, ["schedule.warmup_ratio=0.1"]).error is None


def test_a_smoke_test_may_end_within_the_warm_up(path: Path) -> None:
    report = check_recipe(path, ["train.max_steps=2"])
    assert report.error is None
    assert any("the warm-up (10 steps) does not end within train.max_steps: 2" in note for note in report.notes)


def test_few_steps_are_noted(path: Path) -> None:
    few, enough = (check_recipe(path, ["schedule.warmup_steps=0", f"train.epochs={n}"]).notes for n in (49, 50))
    assert any("only 49 steps" in note and "batch.rows: 4 (98 steps)" in note for note in few)
    assert enough == []


def test_memory_that_cannot_be_calculated_is_no_problem(path: Path) -> None:
    alone = ROOT / "accelerate_configs" / "single.yaml"
    packed = (*QUIET, "mode=qlora", "lora={rank: 4, alpha: 8}", "quantization={type: nf4}")
    assert "of tensors on a GPU" in check_recipe(path, packed, alone).facts["memory"]
    report = check_recipe(path, (*packed, "lora.dora=true"), alone)
    assert (report.error, "memory" in report.facts) == (None, False)
    assert any("memory is not estimated: `lora.dora` on packed weights" in note for note in report.notes)


def test_all_problems_at_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("NETRC", "/nowhere")
    wrong = ["tracking.wandb.project=x", "data.train.0.path=nix.jsonl", "data.eval=[{path: nox.csv}]"]
    error = check_recipe(path, [*wrong, "model.name=./nomodel"]).error or ""
    for part in (
        "5 problems",
        "no API key",
        "no model config",
        "nix.jsonl: no such file",
        "nox.csv: no such file",
        "no tokenizer from",
    ):
        assert part in error


def test_rows_that_are_trained_on_and_evaluated(path: Path, recipe: dict[str, Any]) -> None:
    few = ["train.max_steps=4", "batch.rows=1", "schedule.warmup_steps=0"]
    same = f"data.eval=[{{path: {recipe['data']['train'][0]['path']}}}]"
    (note,) = check_recipe(path, [same, *few]).notes
    assert "has the rows that are trained on" in note
    halves = ["data.train.0.split=train[:50%]", same.replace("}]", ", split: 'train[50%:]'}]")]
    (note,) = check_recipe(path, [*halves, *few]).notes  # five conversations are there twice
    assert "has 5 of its 60 examples among those that are trained on" in note


def test_rows_on_both_sides_are_found_by_their_content(path: Path, tmp_path: Path) -> None:
    """Other files, another format, a part of the rows; between two sources of `share`; and as a stream."""
    few = ["train.max_steps=4", "batch.rows=1", "schedule.warmup_steps=0"]
    words = [f"river stone {i} light" for i in range(40)]
    tiny.write_rows(tmp_path / "a.jsonl", [{"text": text} for text in words[:30]])
    (tmp_path / "b.txt").write_text("\n".join(words[20:]) + "\n", encoding="utf-8")
    train, evaluated = f"data.train=[{{path: {tmp_path / 'a.jsonl'}}}]", f"data.eval=[{{path: {tmp_path / 'b.txt'}}}]"
    note = check_recipe(path, [train, evaluated, *few]).notes[0]
    assert "b.txt) has 10 of its 20 examples among those that are trained on: eval_loss" in note
    stream = ["data.streaming=true", "data.window=32", "train.epochs=null"]
    notes = check_recipe(path, [train, evaluated, *stream, *few]).notes
    assert any("10 of its 20 examples among those that are trained on in the first 32 rows" in one for one in notes)
    both = f"data.train=[{{path: {tmp_path / 'a.jsonl'}}}, {{path: {tmp_path / 'b.txt'}}}]"
    note = check_recipe(path, [both, "data.eval={share: 0.5}", *few]).notes[0]
    assert note.startswith("data.eval.share has ")


def test_a_folder_that_has_splits_is_told(path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "rows").mkdir()
    for name, count in (("train-0", 30), ("test-0", 10)):
        tiny.write_rows(tmp_path / "rows" / f"{name}.jsonl", [{"text": f"{name} {i}"} for i in range(count)])
    folder = f"data.train=[{{path: {tmp_path / 'rows'}}}]"
    few = ["train.max_steps=4", "batch.rows=1", "schedule.warmup_steps=0"]
    report = check_recipe(path, [folder, f"data.eval=[{{path: {tmp_path / 'rows'}, split: test}}]", *few])
    assert (report.error, report.notes) == (None, [])
    assert "split `train` is train-0.jsonl; not taken: test-0.jsonl" in caplog.text


def test_a_long_document_names_what_keeps_it(path: Path, tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("short\n" + "river stone light " * 99 + "\n")
    source = f"data.train=[{{path: {tmp_path / 'long.txt'}}}]"
    notes = check_recipe(path, [source, *QUIET]).notes
    assert (
        "train: 1 rows dropped because they exceed data.max_length (`data.overlong: split` keeps their pieces)" in notes
    )


def test_a_share_of_bad_rows_that_would_do(path: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "good"}\n' * 5 + "bad\n")
    told = [f"data.train=[{{path: {tmp_path / 'bad.jsonl'}}}]", "data.on_bad_row=skip", *QUIET]
    error = check_recipe(path, told).error or ""
    assert "1 of 6 rows are bad, more than data.max_bad_share (0.01) allows" in error
    assert error.endswith("Fix: correct them, or set data.max_bad_share to 0.1667")
    assert check_recipe(path, [*told, "data.max_bad_share=0.1667"]).error is None


def test_a_table_of_texts_is_told_its_columns(path: Path, tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text("id,frage,antwort\n1,was ist zwei,eins plus eins\n")
    table = f"path: {tmp_path / 'table.csv'}"
    error = check_recipe(path, [f"data.train=[{{{table}}}]", *QUIET]).error or ""
    columns = "`format: prompt_completion` and `columns: {prompt: frage, completion: antwort}`"
    assert columns in error
    told = f"data.train=[{{{table}, {columns.replace('`', '').replace(' and', ',')}}}]"
    assert check_recipe(path, [told, *QUIET]).error is None


def test_check_looks_into_the_first_window_of_a_stream(recipe: dict[str, Any], write_recipe: Any) -> None:
    recipe["data"] |= {"streaming": True, "window": 30}
    report = check_recipe(write_recipe(recipe), ())
    assert report.error is None
    assert report.facts["train_data"] == "a stream; its first window has 30 examples"
    assert report.facts["steps"] == 6


def test_precision_that_this_machine_emulates(path: Path) -> None:
    """Both commands say what bf16 costs here, or neither; the recipe's maths stays."""
    emulated = times_slower(torch.bfloat16, compute_device()) >= EMULATED
    for precision, expected in (("bf16", emulated), ("fp32", False)):
        given = (*QUIET, f"train.precision={precision}")
        report = check_recipe(path, given)
        for said in ("".join(report.notes), train_here(path, *given)):
            assert ("bf16 is emulated here" in said and "Fix: train.precision=fp32" in said) == expected

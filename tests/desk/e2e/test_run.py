"""Runs from the command line, from recipe to result: run directory, evaluation, trackers, generate, merge."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import forks
import pytest
import tiny
import torch
import yaml
from conftest import launch, train_here
from repository import ROOT
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from finetune.features import load_recipe
from finetune.release.export.loading import load_result
from finetune.tracking.trackers import grouped
from finetune.training.run_plan import Plan

WORKER = ROOT / "tests" / "trainer" / "distributed" / "worker.py"
TRAIN_KEYS = {"step", "epoch", "loss", "grad_norm", "lr", "tokens", "supervised_tokens", "tokens_per_s", "step_s"}
ROWS, EPOCHS, LR = 4, 9, 1e-2

Line = dict[str, Any]


def run(*command: object) -> forks.Done:
    """A program of ours; it must succeed."""
    done = forks.python(*command)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done


def lines_of(folder: Path) -> list[Line]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def train_lines(folder: Path) -> list[Line]:
    return [line for line in lines_of(folder) if "loss" in line]


def eval_lines(folder: Path) -> list[Line]:
    return [line for line in lines_of(folder) if "eval_loss" in line]


def write(folder: Path, values: dict[str, Any]) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


def inspected(recipe: Path, *overrides: str) -> list[Line]:
    done = run("-m", "finetune", "inspect", recipe, *overrides, "--json", "--rows", 1000)
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="session")
def full_recipe(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("full")
    values = {
        "run": {
            "name": "full",
            "dir": str(folder / "runs"),
            "seed": 3,
        },  # of those tried, it ends with outputs that differ
        "model": {"name": str(made / "llama")},
        "mode": "full",
        "data": {
            "train": [{"path": str(made / "rows.jsonl"), "format": "messages"}],
            "eval": [{"path": str(made / "held_out.jsonl"), "format": "messages"}],
            "max_length": 64,
        },
        "batch": {"rows": ROWS, "rows_per_device": 2},
        "optimizer": {"lr": LR},
        "train": {"epochs": EPOCHS, "precision": "fp32"},
        "evaluate": {"every_steps": 20, "generate": 12, "exact_match": 16, "max_new_tokens": 10, "answer": r"(\w)"},
        "tracking": {
            "wandb": {"project": "tests", "tags": ["tiny"], "mode": "offline", "log_model": "result"},
            "tensorboard": True,
        },
    }
    return write(folder, values)


@pytest.fixture(scope="session")
def full_run(full_recipe: Path) -> Path:
    """On one process. By the command a person types: test_preemption.py."""
    done = launch("single", 1, "train", full_recipe)
    assert done.returncode == 0, done.stderr[-6000:]
    return full_recipe.parent / "runs" / "full"


@pytest.fixture(scope="session")
def ddp_run(full_recipe: Path) -> Path:
    done = launch("ddp", 2, "train", full_recipe, "run.name=ddp")
    assert done.returncode == 0, done.stderr[-6000:]
    return full_recipe.parent / "runs" / "ddp"


@pytest.fixture(scope="session")
def lora_run(full_recipe: Path) -> Path:
    """As a plain `python -m finetune train`: a launcher is not needed for one process."""
    lora = ("run.name=lora", "mode=lora", "lora={rank: 4, alpha: 8}", "optimizer.lr=5e-3")
    short = (
        "train.max_steps=8",
        "tracking.wandb=null",
        "tracking.tensorboard=false",
        "evaluate.exact_match=0",
        "evaluate.answer=null",
    )
    run("-m", "finetune", "train", full_recipe, *lora, *short)
    return full_recipe.parent / "runs" / "lora"


# --- the run directory


def test_the_resolved_recipe_is_the_recipe(full_recipe: Path, full_run: Path, lora_run: Path) -> None:
    assert load_recipe(full_run / "recipe.yaml") == load_recipe(full_recipe)
    assert (
        load_recipe(lora_run / "recipe.yaml").lora
        == load_recipe(full_recipe, ["mode=lora", "lora={rank: 4, alpha: 8}"]).lora
    )


def test_the_plan_says_what_follows(full_recipe: Path, full_run: Path) -> None:
    plan = json.loads((full_run / "plan.json").read_text(encoding="utf-8"))
    assert {field.name for field in fields(Plan)} <= set(plan)
    examples = inspected(full_recipe)
    supervised = sum(label != -100 for example in examples for label in example["labels"])
    assert (plan["where"], plan["world_size"], plan["precision"]) == ("single", 1, "fp32")
    assert plan["examples"] == len(examples) == 120
    assert plan["tokens_per_epoch"] == sum(len(example["input_ids"]) for example in examples)
    assert plan["supervised_tokens_per_epoch"] == supervised
    assert plan["total_rows"] == EPOCHS * plan["rows_per_epoch"]
    assert plan["steps"] == -(-plan["total_rows"] // ROWS)
    assert plan["micro_batches"] == ROWS // 2
    model = AutoModelForCausalLM.from_pretrained(full_run / "model")
    assert plan["parameters"] == plan["trainable_parameters"] == sum(p.numel() for p in model.parameters())
    assert {"torch", "transformers", "accelerate", "python"} <= set(plan["versions"])
    assert plan["measured"]["steps"] == plan["steps"] - 1


def test_one_train_line_for_every_step(full_run: Path) -> None:
    plan = json.loads((full_run / "plan.json").read_text(encoding="utf-8"))
    found = train_lines(full_run)
    assert [line["step"] for line in found] == list(range(1, plan["steps"] + 1))
    assert all(set(line) >= TRAIN_KEYS for line in found)
    assert all(isinstance(line[key], int) for line in found for key in ("tokens", "supervised_tokens"))
    assert all(line["tokens_per_s"] > 0 and line["step_s"] > 0 and line["grad_norm"] > 0 for line in found)
    assert found[0]["lr"] == pytest.approx(LR)
    assert 0 < found[-1]["lr"] < LR / 100
    assert found[-1]["loss"] < 0.7 * found[0]["loss"]


def test_epochs_end_with_a_short_step(full_run: Path) -> None:
    """Every row twice and no more: the last step has what is left."""
    plan = json.loads((full_run / "plan.json").read_text(encoding="utf-8"))
    found = train_lines(full_run)
    assert plan["total_rows"] % ROWS, "otherwise the last step is not short: change ROWS"
    assert found[-1]["epoch"] == EPOCHS
    assert found[-2]["epoch"] == (plan["steps"] - 1) * ROWS / plan["rows_per_epoch"] < EPOCHS
    assert found[-1]["tokens"] == EPOCHS * plan["tokens_per_epoch"]
    assert found[-1]["supervised_tokens"] == EPOCHS * plan["supervised_tokens_per_epoch"]
    steps = [b["tokens"] - a["tokens"] for a, b in pairwise(found)]
    assert steps[-1] < min(steps[:-1])


def test_eval_lines(full_run: Path) -> None:
    plan = json.loads((full_run / "plan.json").read_text(encoding="utf-8"))
    found = eval_lines(full_run)
    assert [line["step"] for line in found] == [0, *range(20, plan["steps"], 20), plan["steps"]]
    assert all(set(line) == {"step", "eval_loss", "exact_match"} for line in found)
    assert found[-1]["eval_loss"] < found[0]["eval_loss"]


def test_the_result_folder(full_run: Path) -> None:
    folder = full_run / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == tiny.CHATML
    generation = GenerationConfig.from_pretrained(folder)
    ends = generation.eos_token_id if isinstance(generation.eos_token_id, list) else [generation.eos_token_id]
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in ends
    assert generation.pad_token_id == tokenizer.pad_token_id
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert config["use_cache"] is True
    assert config["dtype"] == "float32"
    card = (folder / "README.md").read_text(encoding="utf-8")
    head = yaml.safe_load(card.split("---\n")[1])
    assert head["library_name"] == "transformers"
    last, plan = train_lines(full_run)[-1], json.loads((full_run / "plan.json").read_text(encoding="utf-8"))
    for value in (f"{last['loss']:.4f}", f"{eval_lines(full_run)[-1]['eval_loss']:.4f}", f"{plan['parameters']:,}"):
        assert value in card
    assert not list(full_run.glob("*.partial"))


def test_a_second_result_replaces_the_first(full_recipe: Path, lora_run: Path) -> None:
    """The same run directory again, trained from the start: no line of the old run stays."""
    again = ("run.name=lora", "mode=lora", "lora={rank: 2, alpha: 8}")
    off = ("tracking.wandb=null", "tracking.tensorboard=false", "evaluate={at_start: false}")
    other = lora_run.parent.parent / "again"
    for steps in ("train.max_steps=3", "train.max_steps=2"):
        run("-m", "finetune", "train", full_recipe, *again, *off, f"run.dir={other}", steps, "checkpoint.resume=never")
    folder = other / "lora"
    assert [line["step"] for line in lines_of(folder)] == [1, 2, 2]
    assert json.loads((folder / "model" / "adapter_config.json").read_text(encoding="utf-8"))["r"] == 2


# --- trackers


def test_wandb_offline_has_config_metrics_and_summary(full_run: Path) -> None:
    assert re.fullmatch(r"[0-9a-f]{8}", json.loads((full_run / "wandb.json").read_text(encoding="utf-8"))["id"])
    (stored,) = full_run.glob("wandb/offline-run-*/run-*.wandb")
    content = stored.read_bytes()
    for key in (
        b"recipe.optimizer.lr",
        b"plan.steps",
        b"grad_norm",
        b"eval_loss",
        b"exact_match",
        b"supervised_tokens",
        b"model.safetensors",  # of the artifact
    ):
        assert key in content


@pytest.mark.long
def test_wandb_has_the_best_checkpoint(full_recipe: Path) -> None:
    """Offline, by wandb itself: two artifacts, of which one has the checkpoint's files and the name `best`."""
    changes = (
        "run.name=best",
        "tracking.wandb.log_model=best",
        "checkpoint={best: eval_loss, every_steps: 1, keep: 1}",
    )
    short = ("train.epochs=null", "train.max_steps=2", "evaluate.every_steps=1", "evaluate.generate=0")
    train_here(
        full_recipe, *changes, *short, "evaluate.exact_match=0", "evaluate.answer=null", "tracking.tensorboard=false"
    )
    run = full_recipe.parent / "runs" / "best"
    (stored,) = run.glob("wandb/offline-run-*/run-*.wandb")
    content = stored.read_bytes()
    run_id = json.loads((run / "wandb.json").read_text(encoding="utf-8"))["id"]
    for key in (f"{run_id}-model", f"{run_id}-checkpoint", "manifest.json", "rank-00000", "best", "model.safetensors"):
        assert key.encode() in content, key


def test_wandb_has_a_table_of_generations_for_each_evaluation(full_run: Path) -> None:
    assert len(tables(full_run)) == len(eval_lines(full_run))
    assert all(len(rows) == 12 for rows in tables(full_run))


def test_tensorboard_has_the_same_numbers(full_run: Path) -> None:
    events = EventAccumulator(str(full_run / "tensorboard")).Reload()
    for tag, found in (("loss", train_lines(full_run)), ("eval_loss", eval_lines(full_run))):
        scalars = events.Scalars(grouped(tag))
        assert [event.step for event in scalars] == [line["step"] for line in found]
        assert [event.value for event in scalars] == pytest.approx([line[tag] for line in found], rel=1e-6)


def tables(folder: Path) -> list[list[list[str]]]:
    """Rows of (prompt, output, reference), evaluation by evaluation."""
    files = folder.glob("wandb/offline-run-*/files/media/table/generations_*.table.json")
    numbered = sorted(files, key=lambda file: int(file.name.split("_")[1]))
    return [json.loads(file.read_text(encoding="utf-8"))["data"] for file in numbered]


# --- generations against transformers


@pytest.fixture(scope="session")
def held_out(full_recipe: Path, made: Path) -> list[Line]:
    found = inspected(full_recipe, f"data.train=[{{path: {made / 'held_out.jsonl'}, format: messages}}]")
    assert len(found) == 16
    return found


@torch.no_grad()
def greedily(folder: Path, examples: list[Line]) -> list[tuple[str, str]]:
    """(output, reference) of each example by transformers' own `generate`, one prompt at a time."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    found = []
    for example in examples:
        begin = next(i for i, label in enumerate(example["labels"]) if label != -100)
        prompt = torch.tensor([example["input_ids"][:begin]])
        mask = torch.ones_like(prompt)
        end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
        output = model.generate(
            prompt, attention_mask=mask, max_new_tokens=10, do_sample=False, eos_token_id=end, pad_token_id=pad
        )
        both = (output[0, begin:].tolist(), example["input_ids"][begin:])
        found.append((tokenizer.decode(both[0], skip_special_tokens=True), tokenizer.decode(both[1][:-1])))
    return found


def last_word_character(text: str) -> str | None:
    """What `answer: (\\w)` finds: its last occurrence."""
    found = re.findall(r"\w", text)
    return found[-1] if found else None


@pytest.mark.parametrize("when", ["at the start", "at the end, one process", "at the end, two processes"])
def test_generations_and_exact_match_are_those_of_transformers(
    full_run: Path, ddp_run: Path, made: Path, held_out: list[Line], when: str
) -> None:
    folder, model, place = {
        "at the start": (full_run, made / "llama", 0),
        "at the end, one process": (full_run, full_run / "model", -1),
        "at the end, two processes": (ddp_run, ddp_run / "model", -1),
    }[when]
    expected = greedily(model, held_out)
    assert len({output for output, _ in expected}) > (3 if when == "at the start" else 1), (
        "outputs all alike would prove little"
    )
    assert [(output, reference) for _, output, reference in tables(folder)[place]] == expected[:12]
    matches = [last_word_character(output) == last_word_character(reference) for output, reference in expected]
    assert eval_lines(folder)[place]["exact_match"] == sum(matches) / len(matches)


def test_two_processes_evaluate_as_one(full_run: Path, ddp_run: Path) -> None:
    for ours, theirs in zip(eval_lines(full_run), eval_lines(ddp_run), strict=True):
        assert theirs["eval_loss"] == pytest.approx(ours["eval_loss"], rel=1e-5)
        assert theirs["exact_match"] == ours["exact_match"]
    assert tables(ddp_run) == tables(full_run)


# --- every field of `evaluate`


@pytest.fixture(scope="session")
def constant_answers(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of one process on data whose answer is always `stone river`, held out: 5 of 8 times.

    Names of the runs: the field of `evaluate` that they change.
    """
    folder = tmp_path_factory.mktemp("constant")
    words = ["stone river"] * 5 + ["my stone river", "green", "quick stone river light"]
    asked = [row["messages"][0] for row in tiny.conversations(72)]
    rows = [{"messages": [question, {"role": "assistant", "content": "stone river"}]} for question in asked[8:]]
    held_out = [
        {"messages": [question, {"role": "assistant", "content": word}]}
        for question, word in zip(asked, words, strict=False)
    ]
    values = {
        "run": {"name": "unused", "dir": str(folder / "runs")},
        "model": {"name": str(made / "llama")},
        "mode": "full",
        "data": {
            "train": [{"path": str(tiny.write_rows(folder / "rows.jsonl", rows)), "format": "messages"}],
            "eval": [{"path": str(tiny.write_rows(folder / "held_out.jsonl", held_out)), "format": "messages"}],
            "max_length": 64,
        },
        "batch": {"rows": 4, "rows_per_device": 4},
        "optimizer": {"lr": 1e-2},
        "train": {"max_steps": 20, "precision": "fp32"},
        "evaluate": {"at_start": False, "exact_match": 8, "max_new_tokens": 8},
    }
    changes = {
        "base": [],
        "at_start": ["evaluate.at_start=true"],
        "every_steps": ["evaluate.every_steps=8"],
        "generate": ["evaluate.generate=3"],
        "exact_match": ["evaluate.exact_match=6"],
        "no_exact_match": ["evaluate.exact_match=0"],
        "answer": [r"evaluate.answer='(stone river|green)'"],
        "max_new_tokens": ["evaluate.max_new_tokens=1"],
        # As Llama 3's base: the end of turn is an added token that is not the tokenizer's end token.
        "end_of_turn": [f"model.tokenizer={without_roles(folder)}"],
    }
    cases = [{"name": name, "overrides": overrides} for name, overrides in changes.items()]
    plan = {"recipe": str(write(folder, values)), "out": str(folder), "cases": cases}
    (folder / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    run(WORKER, folder / "plan.json")
    for case in cases:
        assert json.loads((folder / f"{case['name']}-0.json").read_text(encoding="utf-8"))["error"] is None
    return folder


@pytest.mark.parametrize(
    ("name", "steps", "exact_match", "shown"),
    [
        ("base", [20], 5 / 8, 0),
        ("at_start", [0, 20], 5 / 8, 0),
        ("every_steps", [8, 16, 20], 5 / 8, 0),
        ("generate", [20], 5 / 8, 3),
        ("exact_match", [20], 5 / 6, 0),
        ("no_exact_match", [20], None, 0),
        ("answer", [20], 7 / 8, 0),  # two more have the answer in them
        ("max_new_tokens", [20], 0.0, 0),  # two words are more than a token
        ("end_of_turn", [20], 5 / 8, 0),
    ],
)
def test_each_field_of_evaluate_has_its_effect(
    constant_answers: Path, name: str, steps: list[int], exact_match: float | None, shown: int
) -> None:
    found = eval_lines(constant_answers / "runs" / name)
    assert [line["step"] for line in found] == steps
    assert found[-1].get("exact_match") == exact_match
    text = (constant_answers / f"{name}.txt").read_text(encoding="utf-8")
    assert len([line for line in text.splitlines() if re.search(r"│ (yes|no ) ", line)]) == shown
    assert found[-1]["eval_loss"] == eval_lines(constant_answers / "runs" / "base")[-1]["eval_loss"]


def without_roles(folder: Path) -> Path:
    """A tokenizer whose end of turn has no role."""
    tokenizer = tiny.tokenizer()
    tokenizer.eos_token = tokenizer.pad_token
    tokenizer.save_pretrained(folder / "without_roles")
    return folder / "without_roles"


def test_the_result_ends_where_training_taught_it_to(constant_answers: Path) -> None:
    folder = constant_answers / "runs" / "end_of_turn" / "model"
    assert GenerationConfig.from_pretrained(folder).eos_token_id == [0, 2]
    assert AutoTokenizer.from_pretrained(folder).eos_token_id == 0
    model, tokenizer = load_result(constant_answers / "runs" / "end_of_turn")
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "green"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**asked, max_new_tokens=20, do_sample=False)[0, asked["input_ids"].shape[1] :]
    assert tokenizer.decode(output) == "stone river<|im_end|>"


# --- generate and merge


def test_generate_answers_prompts(full_run: Path) -> None:
    prompts = ["river stone light", "green"]
    done = run("-m", "finetune", "generate", full_run, *prompts, "--json", "--max-new-tokens", 10)
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [answer["prompt"] for answer in answers] == prompts
    tokenizer = AutoTokenizer.from_pretrained(full_run / "model")
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        asked = {"input_ids": [*ids, 0], "labels": [-100] * len(ids) + [0]}
        assert answer["answer"] == greedily(full_run / "model", [asked])[0][0]


def test_an_adapter_ends_where_its_own_config_says(lora_run: Path, tmp_path: Path) -> None:
    """Not where its base's does."""
    shutil.copytree(lora_run / "model", tmp_path / "model")
    GenerationConfig(eos_token_id=[1, 2]).save_pretrained(tmp_path / "model")
    model, _ = load_result(tmp_path)
    assert model.generation_config.eos_token_id == [1, 2]


@pytest.mark.long
def test_generate_reads_standard_input(full_run: Path, lora_run: Path) -> None:
    typed = "river stone\ngreen\n\nnot asked\n"
    command = [sys.executable, "-m", "finetune", "generate", str(full_run), "--json", "--max-new-tokens", "4"]
    done = subprocess.run(command, capture_output=True, text=True, input=typed, check=True)
    assert [json.loads(line)["prompt"] for line in done.stdout.splitlines()] == ["river stone", "green"]
    shown = run("-m", "finetune", "generate", full_run, "river stone", "--max-new-tokens", 4).stdout
    answer = json.loads(done.stdout.splitlines()[0])["answer"].strip()
    assert shown.strip() == f"> river stone\n{answer}".strip()
    adapted = run("-m", "finetune", "generate", lora_run, "green", "--json", "--max-new-tokens", 4)
    assert json.loads(adapted.stdout)["prompt"] == "green"


@pytest.fixture(scope="session")
def merged(lora_run: Path) -> Path:
    done = run("-m", "finetune", "merge", lora_run)
    assert done.stdout == f"merged into {lora_run / 'merged'}\n"
    return lora_run / "merged"


@torch.no_grad()
def test_the_merged_model_is_the_adapted_one(made: Path, lora_run: Path, merged: Path) -> None:
    ids = torch.arange(3, 60)[None]
    base, adapted, whole = (
        AutoModelForCausalLM.from_pretrained(folder).eval()(input_ids=ids).logits
        for folder in (made / "llama", lora_run / "model", merged)
    )
    torch.testing.assert_close(whole, adapted, rtol=0, atol=1e-5)
    assert (adapted - base).abs().max() > 0.1
    assert not (merged / "adapter_config.json").exists()
    assert AutoTokenizer.from_pretrained(merged).chat_template == tiny.CHATML
    assert (
        GenerationConfig.from_pretrained(merged).eos_token_id
        == GenerationConfig.from_pretrained(lora_run / "model").eos_token_id
    )


def refused(*command: object) -> str:
    done = forks.python("-m", "finetune", *command)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
    return done.stderr


def test_merge_overwrites_nothing(lora_run: Path, merged: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in merged.iterdir()}
    assert f"error: {merged} exists already. Fix: remove it, or choose another --out" in refused("merge", lora_run)
    assert {path: path.stat().st_mtime_ns for path in merged.iterdir()} == before


def test_merge_refuses_a_full_run(full_run: Path) -> None:
    assert f"error: {full_run}: no adapter here" in refused("merge", full_run)
    assert not (full_run / "merged").exists()


# --- the embedded default


def test_quickstart_learns(tmp_path: Path) -> None:
    run(ROOT / "scripts" / "make_quickstart.py", "--out", tmp_path / "data")
    sources = [
        f"data.{name}=[{{path: {tmp_path / 'data' / file}, format: messages}}]"
        for name, file in (("train", "train.jsonl"), ("eval", "test.jsonl"))
    ]
    short = (
        "train.max_steps=12",
        "schedule.warmup_steps=3",
        "evaluate.at_start=false",
        "evaluate.exact_match=0",
        "evaluate.generate=2",
    )
    done = launch(
        "single",
        1,
        "train",
        ROOT / "recipes" / "quickstart" / "full.yaml",
        f"run.dir={tmp_path / 'runs'}",
        f"model.tokenizer={tmp_path / 'data' / 'tokenizer'}",
        "checkpoint.every_steps=null",
        *sources,
        *short,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [line["loss"] for line in train_lines(tmp_path / "runs" / "quickstart-full")]
    assert len(losses) == 12
    assert losses[-1] < 0.5 * losses[0]
    assert "quickstart-full" in done.stdout
    assert (tmp_path / "runs" / "quickstart-full" / "model" / "model.safetensors").is_file()

"""From a file as people have it to an answer, by the commands that a person types: new, check, train, generate."""

from __future__ import annotations

import csv
import json
import random
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import tiny
from conftest import finetune, metrics
from PIL import Image
from usual import usual
from workbooks import workbook

from finetune.desk.cli import main
from finetune.features import load_recipe

COUNT = 60
_DRAWN = random.Random(0)


def words(least: int = 3, most: int = 9) -> str:
    return " ".join(_DRAWN.choice(("river", "stone", "light", "cloud")) for _ in range(_DRAWN.randint(least, most)))


def tickets(folder: Path) -> Path:
    with (folder / "tickets.csv").open("w", newline="", encoding="utf-8") as file:
        lines = ((f"T-{i}", f"{words()}?", words(5, 20), "de", i % 5) for i in range(COUNT))
        csv.writer(file).writerows((("Ticket ID", "Customer Message", "Agent Reply", "Sprache", "CSAT"), *lines))
    return folder / "tickets.csv"


def sharegpt_with_tools(folder: Path) -> Path:
    """LLaMA-Factory's example of tools: calls and schemas as JSON texts."""
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    schema = {"name": "weather", "description": "The weather.", "parameters": parameters}
    rows = [
        {
            "conversations": [
                {"from": "human", "value": words()},
                {"from": "function_call", "value": json.dumps({"name": "weather", "arguments": {"city": "Rome"}})},
                {"from": "observation", "value": words()},
                {"from": "gpt", "value": words()},
            ],
            "tools": json.dumps([schema]),
        }
        for _ in range(COUNT)
    ]
    return tiny.write_rows(folder / "tools.jsonl", rows)


def parquet_of_text(folder: Path) -> Path:
    columns = {"id": list(range(COUNT)), "url": [f"https://a.org/{i}" for i in range(COUNT)]}
    table = pyarrow.table({**columns, "text": [words(10, 60) for _ in range(COUNT)]})
    pyarrow.parquet.write_table(table, folder / "pages.parquet")
    return folder / "pages.parquet"


def spreadsheet(folder: Path) -> Path:
    lines = [[i, f"{words()}?", words(5, 20)] for i in range(COUNT)]
    return workbook(folder / "fragen.xlsx", {"Tabelle1": [["Nr", "Frage", "Antwort"], *lines], "Tabelle2": []})


def markdown_folder(folder: Path) -> Path:
    for i in range(COUNT):
        (folder / "docs" / f"part{i % 3}").mkdir(parents=True, exist_ok=True)
        (folder / "docs" / f"part{i % 3}" / f"{i}.md").write_text(f"# {words()}\n\n{words(20, 60)}\n", encoding="utf-8")
    return folder / "docs"


def alpaca_with_history(folder: Path) -> Path:
    rows = [
        {"instruction": words(), "input": "", "output": words(), "history": [[words(), words()]] * (i % 3)}
        for i in range(COUNT)
    ]
    (folder / "alpaca.json").write_text(json.dumps(rows), encoding="utf-8")
    return folder / "alpaca.json"


def chosen_and_rejected(folder: Path) -> Path:
    rows = [{"prompt": words(), "chosen": words(), "rejected": words(10, 12)} for _ in range(COUNT)]
    return tiny.write_rows(folder / "pairs.jsonl", rows)


def two_answers(folder: Path) -> Path:
    with (folder / "arena.csv").open("w", newline="", encoding="utf-8") as file:
        lines = ((words(), words(), words(10, 12), "ab"[i % 2]) for i in range(COUNT))
        csv.writer(file).writerows((("question", "answer_a", "answer_b", "winner"), *lines))
    return folder / "arena.csv"


def pairs_of_llama_factory(folder: Path) -> Path:
    rows = [
        {
            "conversations": [{"from": "human", "value": words()}],
            "chosen": {"from": "gpt", "value": words()},
            "rejected": {"from": "gpt", "value": words(10, 12)},
        }
        for _ in range(COUNT)
    ]
    (folder / "dpo.json").write_text(json.dumps(rows), encoding="utf-8")
    return folder / "dpo.json"


def llava(folder: Path) -> Path:
    rows = []
    for i in range(COUNT):
        Image.new("RGB", (60 + i % 7, 70), ((i * 37) % 256, 90, 30)).save(folder / f"{i}.png")
        turns = [{"from": "human", "value": f"<image>\n{words()}?"}, {"from": "gpt", "value": words()}]
        rows.append({"id": str(i), "image": f"{i}.png", "conversations": turns})
    (folder / "llava.json").write_text(json.dumps(rows), encoding="utf-8")
    return folder / "llava.json"


def bad_rows(folder: Path) -> Path:
    lines = [json.dumps({"prompt": words(), "completion": words() if i % 20 else ""}) for i in range(COUNT)]
    (folder / "bad.jsonl").write_text("\n".join([*lines, "{not JSON"]) + "\n", encoding="utf-8")
    return folder / "bad.jsonl"


@dataclass(frozen=True)
class Journey:
    write: Callable[[Path], Path]
    format: str
    objective: str = "sft"
    seen: str = "the first row, what is trained on in ⟦ ⟧"  # in the output of `new`
    sees: bool = False  # pictures


JOURNEYS = {
    "CSV with an id in front": Journey(tickets, "prompt_completion", seen="Ticket ID, Sprache, CSAT"),
    "ShareGPT with tools": Journey(sharegpt_with_tools, "sharegpt", seen="<tool_call>"),
    "parquet of text": Journey(parquet_of_text, "text", seen="id, url"),
    "spreadsheet": Journey(spreadsheet, "prompt_completion", seen="`Frage` is the prompt"),
    "Markdown folder": Journey(markdown_folder, "text", seen="⟦# "),
    "Alpaca with history": Journey(alpaca_with_history, "alpaca"),
    "chosen and rejected": Journey(chosen_and_rejected, "preference", "dpo"),
    "two answers and a winner": Journey(two_answers, "comparison", "dpo"),
    "pairs of LLaMA-Factory": Journey(pairs_of_llama_factory, "preference", "dpo"),
    "LLaVA's pictures": Journey(llava, "sharegpt", sees=True),
    "bad rows": Journey(bad_rows, "prompt_completion", seen="4 rows cannot be used and are skipped"),
}
WHOLE = ("CSV with an id in front", "two answers and a winner")  # the others train under --all


def model_of(journey: Journey, made: Path, folder: Path) -> Path:
    if journey.sees:
        return tiny.save_seeing(folder, "smolvlm")
    model = shutil.copytree(made / "llama", folder / "model")  # of a longer context, for the schemas of tools
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1024}), encoding="utf-8")
    return model


def new_arguments(journey: Journey, model: Path, folder: Path) -> list[str]:
    data, output = journey.write(folder), folder / "recipe.yaml"
    return ["new", "--model", str(model), "--data", str(data), "--mode", "lora", "-o", str(output), f"run.dir={folder}"]


@pytest.mark.parametrize("name", usual(JOURNEYS, *list(JOURNEYS)[::2]))
def test_from_file_to_check(
    name: str, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process: what is written and shown, and that nothing is left for `check` to refuse."""
    journey = JOURNEYS[name]
    monkeypatch.setenv("COLUMNS", "200")

    def typed(*arguments: str) -> Any:
        monkeypatch.setattr(sys, "argv", ["finetune", *arguments])
        with pytest.raises(SystemExit) as stop:
            main()
        printed = capsys.readouterr()
        assert not stop.value.code, printed.err
        return printed.out

    shown = typed(*new_arguments(journey, model_of(journey, made, tmp_path), tmp_path))
    assert journey.seen in shown
    recipe = load_recipe(tmp_path / "recipe.yaml")
    assert (recipe.data.train[0].format, recipe.objective.name) == (journey.format, journey.objective)
    assert (recipe.data.image is not None) == journey.sees
    assert "ok" in typed("check", str(tmp_path / "recipe.yaml"))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in WHOLE else [pytest.mark.long]) for name in JOURNEYS]
)
def test_from_file_to_an_answer(name: str, made: Path, tmp_path: Path) -> None:
    journey, path = JOURNEYS[name], tmp_path / "recipe.yaml"
    model = model_of(journey, made, tmp_path)
    short = ("train.max_steps=2", "train.precision=fp32", "evaluate.max_new_tokens=4")
    for command in (new_arguments(journey, model, tmp_path), ["check", path], ["train", path, *short]):
        done = finetune(*command)
        assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / load_recipe(path).run.name
    picture = ["--image", tmp_path / "0.png"] if journey.sees else []
    done = finetune("generate", run, "river stone?", "--max-new-tokens", 4, *picture)
    assert done.returncode == 0, done.stderr
    assert [line["step"] for line in metrics(run) if "loss" in line] == [1, 2]
    assert (run / "model" / "adapter_model.safetensors").is_file()

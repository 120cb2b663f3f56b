"""The commands as a person types them: help, exit codes, messages, output for programs, nothing written by mistake."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import yaml
from conftest import finetune
from repository import ROOT
from transformers import AutoTokenizer
from typer.main import get_command

from finetune.desk.cli import app, main

COMMANDS = sorted(command.callback.__name__ for command in app.registered_commands if command.callback)
HEAVY = {"torch", "transformers", "datasets", "accelerate", "peft"}

Outcome = tuple[int, str, str]  # exit status, standard output, standard error


def command(*arguments: object, cwd: Path | None = None, python: tuple[str, ...] = ()) -> Outcome:
    """`python -m finetune ...` in a process of its own, on a wide terminal."""
    done = subprocess.run(
        [sys.executable, *python, "-m", "finetune", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "COLUMNS": "250"},
        timeout=120,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """The same entry point in this process: a second each is saved on what imports torch."""
    for name in ("TOKENIZERS_PARALLELISM", "TRANSFORMERS_VERBOSITY", "HF_HUB_DISABLE_PROGRESS_BARS"):
        monkeypatch.setenv(name, os.environ.get(name, "1" if name.endswith("BARS") else "error"))
    monkeypatch.setenv("COLUMNS", "250")

    def run(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["finetune", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as stop:
            main()
        code = stop.value.code
        return (code if isinstance(code, int) else 0, *capfd.readouterr())

    return run


def imported(importtime: str) -> set[str]:
    """Top-level modules in the report of `python -X importtime`."""
    return {line.rpartition("|")[2].strip().partition(".")[0] for line in importtime.splitlines() if "|" in line}


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --- help and exit codes


def test_help_imports_nothing_heavy() -> None:
    code, out, err = command("--help", python=("-X", "importtime"))
    assert code == 0
    assert "finetune" in imported(err)
    assert not imported(err) & HEAVY
    for name in COMMANDS:
        assert name in out


def test_a_run_imports_no_library_that_it_does_not_use() -> None:
    """What every process of every launch pays for; `check` imports a part of it."""
    code = "import sys, finetune.desk.setup.check, finetune.training.run; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    unused = {"peft", "bitsandbytes", "deepspeed", "datasets", "pandas", "wandb", "tensorboard", "matplotlib"}
    modules = set(done.stdout.split())
    assert {"torch", "transformers", "accelerate"} <= modules
    assert not modules & unused


@pytest.mark.parametrize("flag", ["--version", "-V"])
def test_versions(here: Callable[..., Outcome], flag: str) -> None:
    code, out, _ = here(flag)
    assert code == 0
    assert re.fullmatch(r"finetune [\d.]+, torch \S+, transformers \S+, .*, Python 3\S+\n", out)


def options_of_commands() -> list[tuple[str, str]]:
    found = [(name, option) for name, one in get_command(app).commands.items() for option in one_of(one)]
    return [(name, option) for name, option in found if "-" in option.strip("-")]


def one_of(command: Any) -> list[str]:
    return [option for parameter in command.params for option in parameter.opts if option.startswith("--")]


@pytest.mark.parametrize(("name", "option"), options_of_commands())
def test_both_spellings_of_every_option(here: Callable[..., Outcome], name: str, option: str) -> None:
    """Each is known, and lacks its value or the command's argument."""
    said = [here(name, spelling)[2] for spelling in (option, "--" + option[2:].replace("-", "_"))]
    assert "No such option" not in said[0]
    assert said[0].replace("_", "-") == said[1].replace("_", "-")


def test_completion_of_commands_and_of_keys() -> None:
    """As bash asks for it, of the console script."""
    script = Path(sys.executable).with_name("finetune")
    for words, count, offered in (
        ("finetune che", 1, "check checkpoints"),
        ("finetune train a.yaml optimizer.l", 3, "optimizer.lr="),
    ):
        asked = {"_FINETUNE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(count)}
        done = subprocess.run([script], capture_output=True, text=True, timeout=60, env={**os.environ, **asked})
        assert (done.stdout.split(), done.stderr) == (offered.split(), "")


@pytest.mark.parametrize("arguments", [("-v", "train", "absent.yaml"), ("train", "absent.yaml", "--verbose")])
def test_verbose_shows_where_an_error_is_from(
    monkeypatch: pytest.MonkeyPatch, here: Callable[..., Outcome], arguments: tuple[str, ...]
) -> None:
    monkeypatch.setenv("FINETUNE_VERBOSE", "0")  # put back afterwards
    code, _, err = here(*arguments)
    assert code == 2
    assert err.startswith("Traceback")
    assert err.splitlines()[-2:] == ["error: absent.yaml: 1 problem", "  absent.yaml: no such file"]


def test_a_folder_is_checked_against_a_launch(
    here: Callable[..., Outcome], recipe: dict[str, Any], write_recipe: Any, tmp_path: Path
) -> None:
    write_recipe(recipe)
    config = ROOT / "accelerate_configs" / "ddp.yaml"
    assert here("check", tmp_path, "--config_file", config)[0] == 0
    code, _, err = here("check", tmp_path, "--config-file", config, "--num_processes", 3)
    assert code == 2
    assert "batch.rows: 4 must be divisible by rows_per_device x processes (2 x 3 = 6)" in err


def test_the_commands_are_these() -> None:
    assert {"train", "check", "inspect", "prepare", "generate", "merge", "schema"} <= set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_help_with_a_worked_example(here: Callable[..., Outcome], name: str) -> None:
    code, out, _ = here(name, "-h")
    assert (code, out) == here(name, "--help")[:2]
    assert code == 0
    assert "<bool>" not in out  # a flag takes no value
    text = " ".join(out.split())
    example = text.partition("Example: ")[2]
    assert re.search(rf"-m finetune {name}\b", example), text
    for path in re.findall(r"(?:recipes|accelerate_configs)/[\w./-]+\.yaml", example):
        assert (ROOT / path).is_file(), path


def test_console_script() -> None:
    script = Path(sys.executable).with_name("finetune")
    done = subprocess.run([str(script), "schema"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (ROOT / "recipes" / "recipe.schema.json").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (["tain"], "No such command 'tain'"),
        (["train"], "Missing argument 'RECIPE'"),
        (["check", "--procs", "2"], "No such option: --procs"),
        (["inspect", "x.yaml", "--rows", "0"], "Invalid value for '--rows'"),
        (["inspect", "recipes/quickstart/full.yaml", "--json", "--html", "a.html"], "--html has no effect with"),
        (["inspect", "recipes/quickstart/full.yaml", "--html", "a.yaml"], "not the name of a page to write"),
        (["train", "absent.yaml"], "absent.yaml"),
        (["check", "absent.yaml"], "absent.yaml"),
        (["generate", "runs/absent", "hello"], "runs/absent: no result here"),
        (["merge", "runs/absent"], "runs/absent: no result here"),
        (["export", "runs/absent"], "runs/absent: no such run directory"),
    ],
)
def test_what_was_typed_wrongly_is_status_2(here: Callable[..., Outcome], arguments: list[str], fragment: str) -> None:
    code, out, err = here(*arguments)
    assert (code, out) == (2, "")
    assert fragment in err
    assert "Traceback" not in err


# --- a bad recipe


ON_A_CLUSTER = "launch --on slurm --devices 1xH100-80"


@pytest.mark.parametrize("name", ["train", "check", "inspect", "plan", ON_A_CLUSTER])
def test_a_bad_recipe_stops_before_anything_heavy_and_writes_nothing(
    recipe: dict[str, Any], write_recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    recipe["optimizer"]["learning_rate"] = recipe["optimizer"].pop("lr")
    recipe["data"]["train"][0]["fromat"] = "text"
    path = write_recipe(recipe)
    before = tree(tmp_path)
    code, out, err = command(*name.split(), path, cwd=tmp_path, python=("-X", "importtime"))
    said = "\n".join(line for line in err.splitlines() if not line.startswith("import time:"))
    assert (code, out) == (2, "")
    for part in (str(path), "optimizer.learning_rate", "did you mean `optimizer.lr`?", "data.train[0].fromat"):
        assert part in said
    assert "Traceback" not in said
    assert not imported(err) & HEAVY
    assert tree(tmp_path) == before
    assert {child.name for child in tmp_path.iterdir()} == {path.name}


def test_a_bad_override_is_named_as_typed(
    here: Callable[..., Outcome], recipe: dict[str, Any], write_recipe: Any
) -> None:
    code, _, err = here("check", write_recipe(recipe), "optimizer.lr=fast", "batch.rowz=3")
    assert code == 2
    assert "command line, 'optimizer.lr=fast': optimizer.lr: expected a number" in err
    assert "command line, 'batch.rowz=3': batch.rowz: unknown key; did you mean `rows`?" in err


# --- bad data

_GOOD = json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}) + "\n"


def _turns(*turns: tuple[str, Any]) -> str:
    return json.dumps({"messages": [{"role": role, "content": content} for role, content in turns]}) + "\n"


BAD_DATA: list[tuple[str, str, str | bytes, str, str]] = [
    # what is wrong, file, its content, format, `:row: ` and the message (or `: ` where no row has it)
    ("not JSON", "x.jsonl", _GOOD + "{oops\n", "messages", ":2: not valid JSON"),
    ("not an object", "x.jsonl", _GOOD + _GOOD + "[1]\n", "messages", ":3: expected an object with columns"),
    ("not UTF-8", "x.jsonl", _GOOD.encode() + b'{"a": "\xff"}\n', "messages", ":2: byte 8 of the line is not UTF-8"),
    ("array cut short", "x.json", "[\n" + _GOOD + ",\n", "messages", ":4: not valid JSON"),
    ("item of an array", "x.json", f"[{_GOOD}, 7]", "messages", ":2: (line 2) expected an object with columns"),
    ("other column", "x.jsonl", '{"mesages": []}\n', "messages", ":1: format `messages`: no column `messages`"),
    ("other format", "x.jsonl", '{"text": "hello"}\n', "messages", "the row looks like format `text`"),
    ("no messages", "x.jsonl", '{"messages": []}\n', "messages", ":1: format `messages`: `messages` is an empty list"),
    ("unknown role", "x.jsonl", _turns(("bot", "x")), "messages", ":1: format `messages`: messages[0].role is 'bot'"),
    (
        "two users",
        "x.jsonl",
        _GOOD + _turns(("user", "x"), ("user", "y")),
        "messages",
        ":2: format `messages`: message 1",
    ),
    ("no assistant", "x.jsonl", _turns(("user", "x")), "messages", ":1: format `messages`: no assistant message"),
    (
        "content is null",
        "x.jsonl",
        _turns(("user", None), ("assistant", "y")),
        "messages",
        ":1: format `messages`: messages[0].content is null",
    ),
    (
        "cells missing",
        "x.csv",
        "prompt,completion\na,b\nc\n",
        "prompt_completion",
        ":3: 1 cells in a table of 2 columns",
    ),
    ("stray quote", "x.csv", 'prompt,completion\na,"b"c\n', "prompt_completion", ":2: not valid CSV"),
    ("column twice", "x.csv", "text,text\na,b\n", "text", ":1: the header has `text` twice"),
    ("empty file", "x.jsonl", "", "messages", ": the file has no rows"),
    ("not parquet", "x.parquet", "PAR?", "text", ": not a readable parquet file"),
    ("unknown kind", "x.xls", "", "text", ": `.xls` is not a kind of file that is read"),
    ("too long", "x.jsonl", _GOOD + _turns(("user", "w " * 99), ("assistant", "y")), "messages", ":2: 20"),
    ("all too long", "x.txt", "word " * 999 + "\n", "text", ": none of its 1 rows can be trained on"),
]


@pytest.mark.parametrize(
    ("file", "content", "format", "message"), [case[1:] for case in BAD_DATA], ids=[case[0] for case in BAD_DATA]
)
def test_check_names_file_and_row_of_bad_data(
    here: Callable[..., Outcome],
    recipe: dict[str, Any],
    write_recipe: Any,
    tmp_path: Path,
    file: str,
    content: str | bytes,
    format: str,
    message: str,
) -> None:
    path = tmp_path / file
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    recipe["data"]["train"] = [{"path": str(path), "format": format}]
    recipe["data"]["overlong"] = "error" if message == ":2: 20" else "drop"
    code, out, err = here("check", write_recipe(recipe))
    assert (code, out) == (2, "")
    assert str(path) in err
    assert message in err if message.startswith("the") else f"{path}{message}" in err, err
    assert "Traceback" not in err


@pytest.mark.long
def test_bad_data_outside_this_process(recipe: dict[str, Any], write_recipe: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(_GOOD + "{oops\n", encoding="utf-8")
    recipe["data"]["eval"][0]["path"] = str(path)
    done = finetune("check", write_recipe(recipe))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"{path}:2: not valid JSON")
    assert "Traceback" not in done.stderr


# --- models that do not fit


def test_missing_model_folder(here: Callable[..., Outcome], recipe: dict[str, Any], write_recipe: Any) -> None:
    recipe["model"]["name"] = "/nowhere/llama"
    code, _, err = here("check", write_recipe(recipe))
    assert code == 2
    assert "model.name" in err
    assert "/nowhere/llama" in err
    assert "Traceback" not in err


def test_model_that_no_one_can_download_here(
    here: Callable[..., Outcome], recipe: dict[str, Any], write_recipe: Any
) -> None:
    recipe["model"]["name"] = "someone/some-model"
    code, _, err = here("check", write_recipe(recipe))
    assert code == 2
    assert "'someone/some-model'" in err
    assert "Traceback" not in err


def test_tokenizer_of_another_model(
    here: Callable[..., Outcome], recipe: dict[str, Any], write_recipe: Any, tmp_path: Path
) -> None:
    recipe["model"]["name"] = str(tiny.save_model(tmp_path, "llama", vocab_size=100))
    code, _, err = here("check", write_recipe(recipe))
    assert code == 2
    assert "the model's embedding 100 rows" in err
    assert "They do not belong together" in err


def test_model_without_a_chat_template(
    here: Callable[..., Outcome], recipe: dict[str, Any], write_recipe: Any, tmp_path: Path
) -> None:
    folder = tiny.save_model(tmp_path, "llama")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = None
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(folder)
    recipe["model"]["name"] = str(folder)
    path = write_recipe(recipe)
    code, _, err = here("check", path)
    assert code == 2
    assert "the tokenizer has no chat template" in err
    assert "model.chat_template to one of chatml" in err
    assert here("check", path, "model.chat_template=chatml")[0] == 0
    code, _, err = here("check", path, "model.chat_template=chatmk")
    assert code == 2
    assert "did you mean `chatml`?" in err


# --- check


def test_check_of_all_recipes() -> None:
    code, out, err = command("check", "recipes", cwd=ROOT)
    assert (code, err) == (0, "")
    count = len([path for path in (ROOT / "recipes").rglob("*.yaml") if path.parent.name not in ("base", "tasks")])
    assert out.splitlines()[-1] == f"{count} recipes, 0 with problems"
    assert out.count(": ok\n") == count > 15


def test_check_of_a_folder_continues_after_a_bad_recipe(
    here: Callable[..., Outcome], recipe: dict[str, Any], tmp_path: Path
) -> None:
    folder = tmp_path / "many"
    (folder / "deeper").mkdir(parents=True)
    (folder / "a.yaml").write_text(yaml.safe_dump({**recipe, "mode": "fulll"}), encoding="utf-8")
    (folder / "deeper" / "b.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    code, out, err = here("check", folder)
    assert code == 2
    assert out.splitlines()[-1] == "2 recipes, 1 with problems"
    assert f"{folder / 'deeper' / 'b.yaml'}: ok" in out
    assert "did you mean `full`?" in err
    code, out, _ = here("check", folder, "--json")
    assert code == 2
    assert [(Path(report["recipe"]).name, report["ok"]) for report in json.loads(out)] == [
        ("a.yaml", False),
        ("b.yaml", True),
    ]


def test_check_of_an_empty_folder(here: Callable[..., Outcome], tmp_path: Path) -> None:
    code, out, err = here("check", tmp_path)
    assert (code, out) == (2, "")
    assert f"error: {tmp_path}: no recipes" in err


def test_check_of_rows_per_device_auto(here: Callable[..., Outcome], recipe: dict[str, Any], write_recipe: Any) -> None:
    recipe["batch"] = {"rows": 8, "rows_per_device": "auto"}
    config = ROOT / "accelerate_configs" / "zero3.yaml"
    code, out, err = here("check", write_recipe(recipe), "--config-file", config, "--num-processes", 2, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)[0]["launch"] == (
        "zero3, 2 processes, at most 4 micro-batches per process and step (batch.rows_per_device: auto, measured at "
        "the start)"
    )


@pytest.mark.parametrize(
    ("config", "processes", "override", "fragment"),
    [
        ("fsdp2", 4, "batch.rows=12", "batch.rows:"),
        ("zero3", 2, "train.precision=bf16_true", "against `bf16_true`"),
        (
            "own",
            2,
            "optimizer.max_grad_norm=0.5",
            "`deepspeed gradient_clipping: 1.0` against `optimizer.max_grad_norm: 0.5`",
        ),
    ],
)
def test_check_against_an_accelerate_config_names_both_files(
    here: Callable[..., Outcome],
    recipe: dict[str, Any],
    write_recipe: Any,
    tmp_path: Path,
    config: str,
    processes: int,
    override: str,
    fragment: str,
) -> None:
    path, file = write_recipe(recipe), ROOT / "accelerate_configs" / f"{config}.yaml"
    if config == "own":
        values = yaml.safe_load((ROOT / "accelerate_configs" / "zero3.yaml").read_text(encoding="utf-8"))
        values["deepspeed_config"]["gradient_clipping"] = 1.0
        file = tmp_path / "own.yaml"
        file.write_text(yaml.safe_dump(values), encoding="utf-8")
    launched = ("--config-file", file, "--num-processes", processes, "--recipe-only")
    code, out, err = here("check", path, override, *launched)
    assert (code, out) == (2, "")
    for part in (str(path), str(file), fragment):
        assert part in err, err
    code, out, _ = here("check", path, *launched[:3], 1, launched[4])
    assert code == 0, out
    assert f"launch: {file.stem}, 1 processes, 2 micro-batches per process and step" in out


def test_check_says_where_processes_would_wait_for_each_other(
    here: Callable[..., Outcome], recipe: dict[str, Any], write_recipe: Any
) -> None:
    recipe["batch"] = {"rows": 32, "rows_per_device": 2}
    path, asked = write_recipe(recipe), ("--recipe-only", "--num-processes")
    for processes, balance, is_said in ((1, 8, False), (4, 8, False), (8, 8, True), (8, 16, False)):
        code, out, _ = here("check", path, f"data.balance={balance}", *asked, processes)
        assert code == 0
        assert (f"with `data.balance: {2 * processes}`" in out) == is_said


def test_check_without_a_file_but_with_a_size(
    here: Callable[..., Outcome], recipe: dict[str, Any], write_recipe: Any
) -> None:
    code, _, err = here("check", write_recipe(recipe), "--num-processes", 3, "--recipe-only")
    assert code == 2
    assert "nearest: 6" in err


def test_check_json(here: Callable[..., Outcome], recipe: dict[str, Any], write_recipe: Any) -> None:
    path = write_recipe(recipe)
    code, out, _ = here("check", path, "--json", "--config-file", ROOT / "accelerate_configs" / "ddp.yaml")
    (report,) = json.loads(out)
    assert code == 0
    assert (report["recipe"], report["ok"], report["error"], report["steps"]) == (str(path), True, None, 6)
    assert report["train_data"].startswith("120 examples, ")
    assert report["eval_data"].startswith("16 examples, ")
    assert report["launch"] == "ddp, 2 processes, 1 micro-batches per process and step"
    code, out, _ = here("check", path, "--json", "data.max_length=3")
    (report,) = json.loads(out)
    assert (code, report["ok"]) == (2, False)
    assert "none of its 120 rows can be trained on" in report["error"]


def test_check_counts_what_was_dropped(here: Callable[..., Outcome], recipe: dict[str, Any], write_recipe: Any) -> None:
    code, out, _ = here("check", write_recipe(recipe), "data.max_length=24")
    assert code == 0
    dropped = re.search(r"note: train: (\d+) rows dropped because they exceed data\.max_length", out)
    assert dropped
    kept = re.search(r"train data: (\d+) examples", out)
    assert kept
    assert int(dropped[1]) + int(kept[1]) == 120


# --- inspect


@pytest.mark.parametrize("rows", [1, 5, 1000])
def test_inspect_json_is_the_contract(
    here: Callable[..., Outcome], recipe: dict[str, Any], write_recipe: Any, made: Path, rows: int
) -> None:
    code, out, _ = here("inspect", write_recipe(recipe), "--json", "--rows", rows)
    assert code == 0
    found = [json.loads(line) for line in out.splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(made / "llama")
    asked = [json.loads(line) for line in (made / "rows.jsonl").read_text(encoding="utf-8").splitlines()][:rows]
    assert len(found) == len(asked) == min(rows, 120)
    for number, (line, row) in enumerate(zip(found, asked, strict=True), start=1):
        wanted = tokenizer.apply_chat_template(
            row["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        labels = [i if m else -100 for i, m in zip(wanted["input_ids"], wanted["assistant_masks"], strict=True)]
        assert line == {
            "path": str(made / "rows.jsonl"),
            "row": number,
            "input_ids": wanted["input_ids"],
            "labels": labels,
        }
        assert labels[-1] == tokenizer.convert_tokens_to_ids("<|im_end|>"), "the end-of-turn is trained"


@pytest.mark.long
def test_inspect_json_in_a_process_of_its_own(recipe: dict[str, Any], write_recipe: Any) -> None:
    """Nothing else reaches standard output."""
    code, out, _ = command("inspect", write_recipe(recipe), "--json")
    assert code == 0
    assert [set(json.loads(line)) for line in out.splitlines()] == [{"path", "row", "input_ids", "labels"}] * 3


def test_inspect_shows_examples_and_totals(
    here: Callable[..., Outcome], recipe: dict[str, Any], write_recipe: Any, made: Path
) -> None:
    path = write_recipe(recipe)
    every = [json.loads(line) for line in here("inspect", path, "--json", "--rows", 1000)[1].splitlines()]
    code, out, _ = here("inspect", path, "--rows", 2)
    assert code == 0
    assert out.count("<|im_start|>assistant") == 2
    assert f"{made / 'rows.jsonl'}:1 " in out
    text = " ".join(out.replace("│", " ").split())
    tokens = sum(len(example["input_ids"]) for example in every)
    supervised = sum(label != -100 for example in every for label in example["labels"])
    assert "examples 120" in text
    assert f"tokens {tokens:,}, {supervised / tokens:.1%} supervised" in text
    assert "dropped overlong 0" in text


def test_inspect_writes_a_page_and_totals(
    here: Callable[..., Outcome], recipe: dict[str, Any], write_recipe: Any, tmp_path: Path
) -> None:
    path, page = write_recipe(recipe), tmp_path / "inspect.html"
    code, out, _ = here("inspect", path, "--eval", "--html", page, "--rows", 4)
    assert code == 0
    assert out.startswith(f"wrote {page}: 4 examples, ")
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    code, out, _ = here("inspect", path, "--json", "--totals")
    assert code == 0
    assert json.loads(out)["examples"] == 120


# --- prepare, cache


def test_prepare_makes_what_a_run_then_finds(
    here: Callable[..., Outcome],
    recipe: dict[str, Any],
    write_recipe: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    path = write_recipe(recipe)
    code, out, _ = here("prepare", path)
    assert code == 0
    assert re.search(
        r"train: .*rows\.jsonl \(messages\), tokenized in [\d.]+ s\n  120 rows, 120 examples, [\d,]+ tokens", out
    )
    code, out, _ = here("prepare", path, "--json")
    sources = json.loads(out)["sources"]
    assert [(one["part"], one["cached"], one["rows"]) for one in sources] == [("train", True, 120), ("eval", True, 16)]
    examples = len(here("inspect", path, "--json", "--rows", 1000)[1].splitlines())
    assert examples == sources[0]["examples"]
    assert len(list((tmp_path / "cache").rglob("report.json"))) == 2


def test_cache_is_listed_and_cleaned(
    here: Callable[..., Outcome],
    recipe: dict[str, Any],
    write_recipe: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    assert here("cache", "list")[1] == f"{tmp_path / 'cache' / 'data'}: the cache is empty\n"
    here("prepare", write_recipe(recipe))
    listed = json.loads(here("cache", "list", "--json")[1])
    assert {Path(entry["of"]["source"]).name for entry in listed} == {"rows.jsonl", "held_out.jsonl"}
    assert "held_out.jsonl" in here("cache", "list")[1]
    monkeypatch.setenv("COLUMNS", "80")
    narrow = here("cache", "list")[1].splitlines()
    assert max(map(len, narrow[:-1])) <= 80  # the last line is the folder
    assert any(str(listed[0]["tokens"]) in line.replace(",", "") for line in narrow)
    assert not any("…" in line for line in narrow)
    monkeypatch.setenv("COLUMNS", "250")  # else a name may be cut in two
    assert "nothing to remove, all was used within 30d" in here("cache", "clean", "--yes")[1]
    code, out, err = here("cache", "clean", "--all")
    assert code == 2
    assert "rows.jsonl" in out
    assert "give --yes" in err
    assert here("cache", "clean", "--older-than", "soon")[0] == 2
    code, out, _ = here("cache", "clean", "--all", "--yes")
    assert code == 0
    assert "removed 2, " in out
    assert json.loads(here("cache", "list", "--json")[1]) == []


@pytest.mark.parametrize("name", ["list", "clean"])
def test_each_command_of_the_cache_has_help_with_a_worked_example(here: Callable[..., Outcome], name: str) -> None:
    code, out, _ = here("cache", name, "--help")
    assert code == 0
    assert f"-m finetune cache {name}" in " ".join(out.split())


def test_schema_is_the_shipped_one(here: Callable[..., Outcome]) -> None:
    code, out, _ = here("schema")
    assert code == 0
    assert json.loads(out) == json.loads((ROOT / "recipes" / "recipe.schema.json").read_text(encoding="utf-8"))


def test_every_rank_reports_a_mistake(tmp_path: Path) -> None:
    """A launcher ends all ranks as soon as one has left: whichever that is has said what is wrong."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    program = ["-m", "finetune", "train", "nowhere.yaml"]
    done = subprocess.run([*launch, *program], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    said = [line for line in done.stderr.splitlines() if "error: nowhere.yaml" in line]
    assert 1 <= len(said) == done.stderr.count("no such file") <= 2
    assert {line.partition("error:")[0] for line in said} <= {"", "[rank 1] "}

"""`finetune new`: the recipe that it writes passes `check`, makes enough steps, and nothing is overwritten."""

from __future__ import annotations

import csv
import io
import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tiny
import yaml
from repository import ROOT
from rich.console import Console
from usual import usual

from finetune.desk.setup.check import check_recipe
from finetune.desk.setup.new import write_new
from finetune.desk.setup.new_options import NewOptions
from finetune.desk.setup.recipe_text import base_paths
from finetune.desk.setup.roles import choose_columns, refusal
from finetune.desk.setup.row_fit import GOAL_STEPS, ExampleLengths, fit_rows, pieces
from finetune.desk.setup.rows import read_sample
from finetune.errors import UserError
from finetune.features import load_recipe
from finetune.objectives.own import load_own
from finetune.recipe.objective_settings import Own


def words(drawn: random.Random, least: int, most: int) -> str:
    return " ".join(drawn.choice(("river", "stone", "light", "cloud")) for _ in range(drawn.randint(least, most)))


def table(folder: Path, columns: tuple[str, ...], count: int = 300) -> Path:
    """A CSV as people have it: an id, a question, an answer."""
    drawn, path = random.Random(0), folder / "table.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("id", *columns))
        writer.writerows((i, words(drawn, 3, 9) + "?", words(drawn, 5, 30)) for i in range(count))
    return path


def texts(folder: Path) -> Path:
    drawn, path = random.Random(0), folder / "book.txt"
    path.write_text("\n".join(words(drawn, 3, 90) for _ in range(200)), encoding="utf-8")
    return path


def new(
    model: Path | str, data: Path, mode: str = "lora", output: Path | None = None, ask: Any = None, **more: Any
) -> str:
    """Writes the recipe; returns what is printed. more: fields of the options."""
    console = Console(file=io.StringIO(), width=80)
    write_new(NewOptions(str(model), str(data), mode, None, output, **more), console, ask)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


KINDS = ("questions", "other names", "chat", "text", "pairs", "marked", "classes", "few")


@pytest.mark.parametrize("kind", usual(KINDS, "other names", "chat", "pairs", "classes"))
def test_what_is_written_passes_check(made: Path, tmp_path: Path, kind: str) -> None:
    files = {
        "questions": lambda: table(tmp_path, ("question", "answer")),
        "other names": lambda: table(tmp_path, ("frage", "antwort")),
        "chat": lambda: tiny.write_rows(tmp_path / "chat.jsonl", tiny.conversations(400)),
        "text": lambda: texts(tmp_path),
        "pairs": lambda: tiny.write_rows(tmp_path / "pairs.jsonl", tiny.preferences(200)),
        "marked": lambda: tiny.write_rows(tmp_path / "marked.jsonl", tiny.unpaired(200)),
        "classes": lambda: tiny.write_rows(
            tmp_path / "c.jsonl", [{"text": f"a text {i}", "label": ("no", "yes")[i % 2]} for i in range(100)]
        ),
        "few": lambda: tiny.write_rows(tmp_path / "few.jsonl", tiny.conversations(8)),
    }
    output = tmp_path / "mine" / "recipe.yaml"
    printed = new(made / "llama", files[kind](), "full" if kind == "text" else "lora", output)
    report = check_recipe(output, ())
    assert report.error is None
    assert not [note for note in report.notes if "emulated" in note]
    assert [note for note in report.notes if "step" in note] == ([] if kind != "few" else report.notes)
    recipe = load_recipe(output)
    assert recipe.objective.name == {"pairs": "dpo", "marked": "kto", "classes": "classify"}.get(kind, "sft")
    if kind == "other names":
        assert recipe.data.train[0].columns == {"prompt": "frage", "completion": "antwort"}
        assert "`frage` is the prompt" in " ".join(printed.replace("│", " ").split())
    if kind != "few":
        assert report.facts["steps"] >= 0.9 * GOAL_STEPS
        assert "held out" in printed
    assert "rows dropped" not in " ".join(report.notes)
    commands = [line.strip() for line in printed.splitlines() if line.startswith("  python -m finetune ")]
    assert commands[:2] == [f"python -m finetune {name} {output}" for name in ("check", "launch")]
    assert len(commands) == 3


NUMBERS = [{"question": f"What is {i} and {i}?", "answer": f"It is {2 * i}."} for i in range(60)]
PROMPTS = [{"prompt": f"Count to {i}."} for i in range(60)]


@pytest.mark.parametrize(
    ("rows", "mode", "options", "rewards"),
    [
        (NUMBERS, "lora", {"objective": "grpo", "rewards": ("number",)}, ["number"]),
        (
            NUMBERS,
            "full",
            {"objective": "grpo", "rewards": ("{name: length, target: 8}", "number")},
            ["length", "number"],
        ),
        (NUMBERS, "qlora", {"objective": "grpo", "rewards": ("number",)}, ["number"]),
        (PROMPTS, "lora", {"objective": "grpo", "rewards": ("REWARDS:words",)}, ["words"]),  # rows that have no answers
    ],
)
def test_a_recipe_on_samples(
    made: Path, tmp_path: Path, rows: list[dict[str, Any]], mode: str, options: dict[str, Any], rewards: list[str]
) -> None:
    code = tmp_path / "rewards.py"
    code.write_text("def words(completion):\n    return float(len(completion.split()))\n", encoding="utf-8")
    options["rewards"] = tuple(one.replace("REWARDS", str(code)) for one in options["rewards"])
    output, data = tmp_path / "recipe.yaml", tiny.write_rows(tmp_path / "rows.jsonl", rows)
    printed = new(made / "llama", data, mode, output, **options)
    recipe = load_recipe(output)
    assert (recipe.objective.name, recipe.mode) == ("grpo", mode)
    assert [one.label for one in recipe.rewards] == rewards
    assert recipe.train.max_steps is not None
    assert recipe.train.max_steps >= GOAL_STEPS
    assert "16 prompts x 8 samples" in printed
    assert ("no row has an answer" in printed) == (rows is PROMPTS)
    report = check_recipe(output, ())
    assert report.error is None
    assert not [note for note in report.notes if "emulated" in note or "dropped" in note]


def test_rewards_are_asked_for_or_refused(made: Path, tmp_path: Path) -> None:
    output, data = tmp_path / "recipe.yaml", tiny.write_rows(tmp_path / "rows.jsonl", NUMBERS)
    for options, message in (
        ({"objective": "grpo"}, "`grpo` needs a reward, and there is no terminal to ask on. Fix: add --reward"),
        (
            {"objective": "grpo", "rewards": ("nomber",)},
            "--reward nomber: no such reward. Fix: use exact_match, number",
        ),
        ({"objective": "grpo", "rewards": ("regex",)}, "pattern"),
        ({"rewards": ("number",)}, "`sft` trains on rows, not on rewards. Fix: leave it out, or add --objective grpo"),
        ({"objective": "dpo"}, "not for rows of prompt_completion.*Fix: use --objective sft"),
        ({"objective": "dop"}, "no such objective. Fix: use one of sft"),
    ):
        with pytest.raises(UserError, match=message):
            new(made / "llama", data, output=output, **options)
        assert not output.exists()
    new(made / "llama", data, output=output, objective="grpo", ask=lambda _question, default: default)
    assert [one.label for one in load_recipe(output).rewards] == ["exact_match"]


@pytest.mark.parametrize("objective", ["dpo", "kto", "orpo", "reward"])
def test_an_objective_of_the_same_rows(made: Path, tmp_path: Path, objective: str) -> None:
    output, data = tmp_path / "recipe.yaml", tiny.write_rows(tmp_path / "pairs.jsonl", tiny.preferences(60))
    new(made / "llama", data, output=output, objective=objective)
    recipe = load_recipe(output)
    assert (recipe.objective.name, recipe.run.name) == (objective, f"pairs-{objective}-lora")
    assert check_recipe(output, ()).error is None


def test_a_loss_of_one_s_own(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = tiny.write_rows(tmp_path / "rows.jsonl", NUMBERS)
    printed = new(made / "llama", data, output=tmp_path / "first.yaml", objective="own")
    assert "my_loss.py is written too, with the loss of sft: edit `my_loss`" in printed
    assert dict(load_own(Own(file="my_loss.py", function="my_loss")).units) == {"objective": "target_tokens"}
    starter = Path("my_loss.py").read_text(encoding="utf-8")
    Path("mine.py").write_text(starter.replace("my_loss(", "short("), encoding="utf-8")
    for name, objective, answer, expected in (
        ("second", "own", None, ("my_loss.py", "my_loss")),  # the file stays as it is
        ("third", "mine.py:short", None, ("mine.py", "short")),
        ("fourth", "own", "asked.py:f", ("asked.py", "f")),
    ):
        ask = None if answer is None else lambda _question, _default, answer=answer: answer
        printed = new(made / "llama", data, output=Path(f"{name}.yaml"), objective=objective, ask=ask)
        own = load_recipe(f"{name}.yaml").objective
        assert isinstance(own, Own)
        assert (own.file, own.function) == expected
        assert ("is written too" in printed) == (answer is not None)
    assert Path("my_loss.py").read_text(encoding="utf-8") == starter
    for objective, message in (
        ("absent.py:f", "no such file. Fix: correct the path, or give --objective own"),
        ("mine.py:absent", "absent"),
        ("mine.txt:f", "no such objective"),
    ):
        with pytest.raises(UserError, match=message):
            new(made / "llama", data, output=Path("fifth.yaml"), objective=objective)
    assert not Path("fifth.yaml").exists()
    assert check_recipe(Path("first.yaml"), ()).error is None


def test_a_template_for_a_tokenizer_without_one(made: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = tmp_path / "base"
    tokenizer = AutoTokenizer.from_pretrained(made / "llama")
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_bytes((made / "llama" / "config.json").read_bytes())
    for columns, template in ((("question", "answer"), "chatml"), (("prompt", "completion"), None)):
        output = tmp_path / f"{columns[0]}.yaml"
        new(folder, table(tmp_path, columns), output=output)
        assert load_recipe(output).model.chat_template == template
        assert check_recipe(output, ()).error is None


def test_lengths_are_estimated_where_the_hub_is_out_of_reach(tmp_path: Path) -> None:
    output = tmp_path / "recipe.yaml"
    printed = new("some-org/some-model", table(tmp_path, ("question", "answer")), "qlora", output)
    assert "some-org/some-model: its tokenizer is not on this machine, and the hub cannot be reached" in printed
    assert "estimated from characters, 4 a token" in " ".join(printed.split())
    assert load_recipe(output).mode == "qlora"
    text = output.read_text(encoding="utf-8")
    longest = int(re.findall(r"at most (\d+) by estimate: 2 x that fit", text)[0])
    assert load_recipe(output).data.max_length >= 2 * longest


def test_mistakes_are_messages_and_leave_files_alone(made: Path, tmp_path: Path) -> None:
    data, output = table(tmp_path, ("question", "answer")), tmp_path / "recipe.yaml"
    output.write_text("mine", encoding="utf-8")
    numbers = tiny.write_rows(tmp_path / "numbers.jsonl", [{"a": 1, "b": 2}])
    alike = tiny.write_rows(tmp_path / "alike.jsonl", [{"text": "x", "label": "good"}] * 30)
    (tmp_path / "empty.jsonl").write_text("", encoding="utf-8")
    other = tmp_path / "other.yaml"
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"output": output}, "exists already and is left as it is"),
        ({"model": tmp_path / "absent"}, "no such folder"),
        ({"data": tmp_path / "absent.csv"}, "no such file or folder"),
        ({"data": numbers}, "no format fits the first row"),
        ({"data": alike}, "`label` is good in every row"),
        ({"data": tmp_path / "empty.jsonl"}, "has no rows|no row can be read"),
        ({"mode": "qlorra"}, "no such mode. Fix: use one of full, lora, qlora"),
    ]
    for changes, message in wrong:
        with pytest.raises(UserError, match=message):
            new(**{"model": made / "llama", "data": data, "output": other, **changes})
        assert not other.exists()
    assert output.read_text(encoding="utf-8") == "mine"


def tickets(folder: Path, names: tuple[str, ...], count: int = 60) -> Path:
    """A CSV of ids, two texts and a language under other names."""
    drawn, path = random.Random(0), folder / "tickets.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        writer.writerows(
            (f"T-{i}", words(drawn, 3, 9) + "?", words(drawn, 5, 30), drawn.choice(("de", "en"))) for i in range(count)
        )
    return path


def test_the_columns_of_tickets(made: Path, tmp_path: Path) -> None:
    data = tickets(tmp_path, ("Ticket ID", "Customer Message", "Agent Reply", "Sprache"))
    printed = new(made / "llama", data, output=tmp_path / "recipe.yaml")
    (source,) = load_recipe(tmp_path / "recipe.yaml").data.train
    assert source.columns == {"prompt": "Customer Message", "completion": "Agent Reply"}
    assert "Ticket ID, Sprache" in " ".join(printed.replace("│", " ").split())
    row = printed.partition("the first row, what is trained on in ⟦ ⟧:\n")[2]
    assert re.match(r"<\|im_start\|>user\n[a-z ]+\?<\|im_end\|><\|im_start\|>assistant\n⟦[a-z ]+<\|im_end\|>⟧", row)
    assert check_recipe(tmp_path / "recipe.yaml", ()).error is None


def test_a_guess_is_refused_or_asked_about(made: Path, tmp_path: Path) -> None:
    data, output = tickets(tmp_path, ("Nr", "Betreff", "Inhalt", "Sprache")), tmp_path / "recipe.yaml"
    with pytest.raises(UserError, match="is a guess") as refused:
        new(made / "llama", data, output=output)
    option = re.findall(r"add: --columns (\S+) --format (\S+)", str(refused.value))
    assert option == [("prompt=Betreff,completion=Inhalt", "prompt_completion")]
    assert not output.exists()
    asked: list[tuple[str, str]] = []

    def answer(question: str, default: str) -> str:
        asked.append((question, default))
        return default if len(asked) == 1 else "text=Inhalt"

    new(made / "llama", data, output=output, ask=answer)
    assert asked == [("Columns (field=column,...)", "prompt=Betreff,completion=Inhalt")]
    assert load_recipe(output).data.train[0].columns == {"prompt": "Betreff", "completion": "Inhalt"}
    new(made / "llama", data, output=tmp_path / "text.yaml", ask=answer)
    assert load_recipe(tmp_path / "text.yaml").data.train[0].format == "text"
    told = {"prompt": "Inhalt", "completion": "Betreff"}
    new(made / "llama", data, output=tmp_path / "told.yaml", columns=told, format="prompt_completion")
    assert load_recipe(tmp_path / "told.yaml").data.train[0].columns == told


def test_two_answers_are_preferences(made: Path, tmp_path: Path) -> None:
    drawn = random.Random(0)
    rows = [
        {
            "question": words(drawn, 3, 9),
            "answer_a": words(drawn, 3, 9),
            "answer_b": words(drawn, 10, 19),
            "winner": "tie" if i % 9 == 0 else drawn.choice(("model_a", "model_b")),
        }
        for i in range(200)
    ]
    new(made / "llama", tiny.write_rows(tmp_path / "arena.jsonl", rows), output=tmp_path / "recipe.yaml")
    recipe = load_recipe(tmp_path / "recipe.yaml")
    assert (recipe.objective.name, recipe.data.train[0].format, recipe.data.on_bad_row) == ("dpo", "comparison", "skip")
    assert 23 / 200 <= recipe.data.max_bad_share < 24 / 200
    assert "# TODO: these are many" in (tmp_path / "recipe.yaml").read_text(encoding="utf-8")
    assert check_recipe(tmp_path / "recipe.yaml", ()).error is None


def test_overrides_are_written_in_place(made: Path, tmp_path: Path) -> None:
    data, output = table(tmp_path, ("question", "answer")), tmp_path / "recipe.yaml"
    chosen = ("optimizer.lr=3e-4", "data.max_length=48", "data.train.0.limit=50", "lora.rank=4", "tracking.wandb=true")
    chosen += ("schedule.warmup_steps=5", "data.eval=[]", "run.seed=7")
    new(made / "llama", data, output=output, overrides=chosen)
    recipe, text = load_recipe(output), output.read_text(encoding="utf-8")
    assert (recipe.optimizer.lr, recipe.data.max_length, recipe.data.train[0].limit) == (3e-4, 48, 50)
    assert (recipe.lora and recipe.lora.rank, recipe.tracking.wandb and recipe.tracking.wandb.project) == (
        4,
        "finetune",
    )
    assert (recipe.schedule.warmup_steps, recipe.schedule.warmup_ratio, recipe.data.eval) == (5, None, ())
    assert (recipe.run.seed, recipe.run.name, recipe.data.train[0].format) == (7, "table-lora", "prompt_completion")
    assert text.count("# from the command line") >= len(chosen)
    with pytest.raises(UserError, match=r"command line, 'optimizer\.lrr=1': optimizer\.lrr: unknown key"):
        new(made / "llama", data, output=tmp_path / "other.yaml", overrides=("optimizer.lrr=1",))
    assert not (tmp_path / "other.yaml").exists()


def test_a_recipe_names_its_base_so_that_both_can_move(made: Path, tmp_path: Path) -> None:
    """A copy of the project, a recipe in it, one beside it, and one elsewhere, whose base is what ships."""
    project = tmp_path / "work" / "project"
    shutil.copytree(ROOT / "recipes" / "base", project / "recipes" / "base")
    shutil.copy(ROOT / "recipes" / "recipe.schema.json", project / "recipes")
    data = table(tmp_path, ("question", "answer"))
    inside, beside = project / "recipes" / "mine" / "a.yaml", tmp_path / "work" / "b.yaml"
    elsewhere = tmp_path / "elsewhere" / "c.yaml"
    for path, base, schema in (
        (inside, "../base/lora.yaml", "../recipe.schema.json"),
        (elsewhere, "recipes/base/lora.yaml", str(ROOT / "recipes" / "recipe.schema.json")),
    ):
        new(made / "llama", data, output=path)
        text = path.read_text(encoding="utf-8")
        assert text.startswith(f"# yaml-language-server: $schema={schema}\n")
        assert yaml.safe_load(text)["extends"] == base
        assert (path.parent / schema).is_file()
    assert base_paths(project / "recipes" / "base" / "lora.yaml", beside) == (
        "project/recipes/base/lora.yaml",
        "project/recipes/recipe.schema.json",
    )
    moved = (tmp_path / "work").rename(tmp_path / "moved") / inside.relative_to(tmp_path / "work")
    assert load_recipe(moved).mode == load_recipe(elsewhere).mode == "lora"


def test_what_cannot_be_known_is_marked(tmp_path: Path) -> None:
    rows, output = tiny.write_rows(tmp_path / "a.jsonl", tiny.conversations(30)), tmp_path / "a.yaml"
    new("some-org/some-model", rows, output=output)
    text = output.read_text(encoding="utf-8")
    assert "# TODO: a base model without a chat template needs `chat_template`: chatml, gemma" in text
    assert "TODO: `check` counts them" in text


def test_settings_follow_the_size_of_the_data() -> None:
    """300 short rows: short sequences, small steps. 200,000 of any length: as recipes/base has it."""
    few = fit_rows(ExampleLengths(np.full(300, 40), np.full(300, 20), False, 1.0), 4096)
    assert (few.max_length, few.rows, few.held_out) == (64, 4, 0.1)
    assert few.steps >= GOAL_STEPS
    long = np.random.default_rng(0).integers(100, 6000, 5000)
    many = fit_rows(ExampleLengths(long, long, False, 40.0), 4096)
    assert (many.max_length, many.rows, many.epochs, many.held_out) == (4096, 8, 2, 0.01)
    assert many.overlong == (long > 4096).sum()


@pytest.mark.parametrize("packing", [True, False])
def test_pieces_of_long_texts_are_counted(made: Path, tmp_path: Path, packing: bool) -> None:
    """60 texts of about 435 tokens and a model of 128 positions: as many steps as the run makes."""
    drawn, model, output = random.Random(0), tmp_path / "model", tmp_path / "recipe.yaml"
    shutil.copytree(made / "llama", model)
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 128}), encoding="utf-8")
    lines = [" ".join(drawn.choice(("river", "stone", "light", "cloud")) for _ in range(200)) for _ in range(60)]
    (tmp_path / "long.txt").write_text("\n".join(lines), encoding="utf-8")
    printed = new(model, tmp_path / "long.txt", output=output, overrides=() if packing else ("data.packing=false",))
    report = check_recipe(output, ())
    assert (report.error, load_recipe(output).data.overlong) == (None, "split")
    promised = int(re.findall(r"about ([\d,]+) steps", printed)[0].replace(",", ""))
    assert promised == pytest.approx(report.facts["steps"], rel=0.05)
    assert promised >= GOAL_STEPS
    assert load_recipe(output).data.packing == packing


def test_pieces_of_lengths() -> None:
    assert pieces(np.array([435, 128, 129, 5, 1]), 128).tolist() == [128] * 5 + [51, 5, 1]


def test_classes_are_written_by_their_names(made: Path, tmp_path: Path) -> None:
    features = {"label": {"names": ["neg", "pos"], "_type": "ClassLabel"}}
    table = pyarrow.table({"text": [f"a text {i}" for i in range(40)], "label": [i % 2 for i in range(40)]})
    table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    new(made / "llama", tmp_path / "a.parquet", output=tmp_path / "recipe.yaml")
    assert load_recipe(tmp_path / "recipe.yaml").objective.labels == ("neg", "pos")


WIDE = {
    "a thousand columns": [{f"c{j}": f"words of a text {i} {j}" for j in range(1000)} for i in range(100)],
    "a word of 3 MB": [{"note": "x" * 3_000_000, "other": "a few words"}] * 3,
    "a number of 3 MB": [{"note": "1" * 3_000_000 + "x", "other": "a few words"}] * 3,
}


@pytest.mark.parametrize("name", WIDE)
def test_large_rows_are_looked_at_in_one_pass(tmp_path: Path, name: str) -> None:
    sample = read_sample(str(tiny.write_rows(tmp_path / "a.jsonl", WIDE[name])))
    with pytest.raises(UserError, match=r"is a guess|no format fits"):
        raise UserError(refusal(sample.rows, choose_columns(sample.rows)))


def test_what_is_not_given_is_asked_for(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import sys

    from finetune.desk.cli import main

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    data, output = table(tmp_path, ("question", "answer")), tmp_path / "recipe.yaml"
    monkeypatch.setattr(sys, "argv", ["finetune", "new", "--data", str(data), "-o", str(output)])
    monkeypatch.setattr(sys, "stdin", Terminal(f"{made / 'llama'}\n\n"))  # the model; the mode as suggested
    with pytest.raises(SystemExit) as stop:
        main()
    assert not stop.value.code
    assert yaml.safe_load(output.read_text(encoding="utf-8"))["extends"].endswith("base/lora.yaml")
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert "no --model, and no terminal to ask on" in capsys.readouterr().err

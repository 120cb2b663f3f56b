"""The quickstart's rows and tokenizer are what its two recipes say they are."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from datetime import date, timedelta
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
from conftest import script
from repository import ROOT
from transformers import AutoTokenizer

from finetune.features import load_recipe

FULL = load_recipe(ROOT / "recipes/quickstart/full.yaml")
WORDS = load_recipe(ROOT / "recipes/quickstart/lora.yaml")
PAIRS = load_recipe(ROOT / "recipes/quickstart/dpo-lora.yaml")


@pytest.fixture(scope="module")
def quickstart() -> ModuleType:
    return script("scripts/make_quickstart.py")


@pytest.fixture(scope="module")
def data(quickstart: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("quickstart")
    quickstart.make(out)
    return out


def turns(data: Path, path: str) -> list[tuple[str, str]]:
    """Question and answer of each row of a file that a recipe names."""
    lines = (data / Path(path).relative_to("runs/quickstart-data")).read_text().splitlines()
    return [tuple(turn["content"] for turn in json.loads(line)["messages"]) for line in lines]


@pytest.mark.long
def test_no_date_is_both_trained_and_tested(data: Path):
    for recipe in (FULL, WORDS):
        tested = {answer for _, answer in turns(data, recipe.data.eval[0].path)}
        assert len(tested) == 200 == recipe.evaluate.exact_match
        assert tested.isdisjoint(answer for _, answer in turns(data, recipe.data.train[0].path))


def test_the_second_stage_asks_the_same_and_wants_another_answer(data: Path):
    first, second = (turns(data, recipe.data.eval[0].path) for recipe in (FULL, WORDS))
    assert [question for question, _ in first] == [question for question, _ in second]
    assert all(one != other for (_, one), (_, other) in zip(first, second, strict=True))


def test_no_two_dates_are_written_alike(quickstart: ModuleType):
    """Whatever the format, what is written has one reading among all dates and formats."""
    read: dict[str, date] = {}
    days = [quickstart.FIRST + timedelta(days=n) for n in range((quickstart.LAST - quickstart.FIRST).days + 1)]
    for day in days:
        for write in quickstart.FORMATS:
            assert read.setdefault(write(day), day) == day
    assert len(read) == len(days) * len(quickstart.FORMATS)


def test_tokenizer_fits_the_model_and_the_rows(data: Path):
    tokenizer = AutoTokenizer.from_pretrained(data / "tokenizer")
    config = FULL.model.config
    assert config is not None
    assert len(tokenizer) == config["vocab_size"]
    ids = {name: getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    assert ids == {name: config[f"{name}_token_id"] for name in ids}
    assert len(set(ids.values())) == 3
    assert tokenizer.tokenize("2021-03-03") == list("2021-03-03")
    for path in (FULL.data.train[0].path, WORDS.data.train[0].path):
        question, answer = max(turns(data, path), key=lambda turn: len("".join(turn)))
        assert len(tokenizer(f"{question}{answer}")["input_ids"]) + 16 <= FULL.data.max_length


def test_template_marks_the_answer_and_the_end_of_turn(data: Path):
    tokenizer = AutoTokenizer.from_pretrained(data / "tokenizer")
    messages = [{"role": "user", "content": "3 Mar 21"}, {"role": "assistant", "content": "2021-03-03"}]
    made = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    marked = [i for i, mark in zip(made["input_ids"], made["assistant_masks"], strict=True) if mark]
    assert marked == [*tokenizer("2021-03-03")["input_ids"], tokenizer.eos_token_id]
    prompt = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, tokenize=False)
    assert tokenizer.apply_chat_template(messages, tokenize=False) == prompt + "2021-03-03<|im_end|>\n"


def test_every_number_of_digits_is_trained_or_tested_with_its_reverse(data: Path):
    recipe = load_recipe(ROOT / "recipes/quickstart/digits-full.yaml")
    train, test = (turns(data, source[0].path) for source in (recipe.data.train, recipe.data.eval_sources))
    assert len(test) == 200
    assert sorted(question for question, _ in [*train, *test]) == [f"{n:04}" for n in range(10_000)]
    assert all(answer == question[::-1] for question, answer in [*train, *test])


def test_every_run_writes_the_same_bytes(quickstart: ModuleType, data: Path, tmp_path: Path):
    quickstart.make(tmp_path)
    files = sorted(path.relative_to(data) for path in data.rglob("*") if path.is_file())
    assert [(data / file).read_bytes() == (tmp_path / file).read_bytes() for file in files] == [True] * 11


def test_pairs_are_of_both_writings_and_none_is_both_trained_and_tested(data: Path):
    files = [PAIRS.data.train[0].path, PAIRS.data.eval[0].path]
    train, test = [
        [json.loads(line) for line in (data / Path(path).relative_to("runs/quickstart-data")).read_text().splitlines()]
        for path in files
    ]
    assert not {row["rejected"][0]["content"] for row in train} & {row["rejected"][0]["content"] for row in test}
    assert [row["prompt"][0]["content"] for row in test] == [
        question for question, _ in turns(data, FULL.data.eval[0].path)
    ]
    assert all(row["chosen"][0]["content"].replace("/", "-") == row["rejected"][0]["content"] for row in train + test)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Metrics of the three stages: an evaluation, two steps, an evaluation."""
    for stage in ("full", "lora", "dpo-lora"):
        names = ["exact_match", *(["eval_rewards/accuracy"] if stage == "dpo-lora" else [])]
        before, after = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.995)
        lines = [{"step": 0, **before}, {"step": 1, "loss": 5.0}, {"step": 2, "loss": 1e-9}, {"step": 2, **after}]
        path = tmp_path / f"quickstart-{stage}" / "metrics.jsonl"
        path.parent.mkdir()
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def report(runs: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts/quickstart_report.py"), str(runs)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_report_shows_before_and_after_and_draws_every_step(runs: Path):
    done = report(runs)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("0.0%") == 4
    assert done.stdout.count("99.5%") == 4
    curves = ElementTree.parse(runs / "quickstart.svg").findall(".//{*}polyline")
    points = [[tuple(map(float, point.split(","))) for point in curve.attrib["points"].split()] for curve in curves]
    assert [len(curve) for curve in points] == [2] * 6  # of each stage: losses, scores
    assert all(0 < x < 760 and 0 < y < 300 and later > x for (x, y), (later, _) in points)


def test_report_fails_if_a_stage_learned_too_little(runs: Path):
    """For instance a DPO that tells all pairs apart, but answers with something else."""
    path = runs / "quickstart-dpo-lora" / "metrics.jsonl"
    path.write_text(path.read_text().replace('"exact_match": 0.995', '"exact_match": 0.0'))
    done = report(runs)
    assert done.returncode == 1
    assert done.stderr == "dpo-lora: exact match 0.0%, expected 85%: please report this with the output above\n"


def test_what_quickstart_prints_can_be_copied():
    run = re.search(r"^run\(\) \{.*?^\}", (ROOT / "scripts/quickstart.sh").read_text(), re.DOTALL | re.MULTILINE)
    assert run is not None
    words = 'echo "the 3rd of March, 2021" runs/a-b_c.yaml lr=1e-3'
    shown = subprocess.run(["bash", "-c", f"{run[0]}\nrun {words}"], capture_output=True, text=True, check=True)
    assert shown.stdout == f"\n+ {words}\nthe 3rd of March, 2021 runs/a-b_c.yaml lr=1e-3\n"

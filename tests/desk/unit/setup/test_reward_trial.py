"""The trial of rewards in `check`: references against garbage, before a run is wasted on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
from completions import completion, reward

from finetune.data.dataset import Dataset, build_training, on_disk
from finetune.desk.setup.reward_rows import check_rewards, reference_answers
from finetune.errors import UserError
from finetune.features import load_recipe
from finetune.models.base_model import Base
from finetune.models.tokenizer import load_tokenizer
from finetune.recipe import Recipe
from finetune.rl.rewards.completion import Completion
from finetune.rl.rewards.trial import try_rewards


def rows(count: int = 6) -> list[Completion]:
    return [completion("", f"{i} eggs\n#### {10 + i}", tests=f"assert x == {i}") for i in range(count)]


def test_rewards_that_tell_references_from_garbage() -> None:
    trial = try_rewards((reward(name="number"), reward(name="length", target=100, weight=0.5)), rows())
    assert trial.rows == 6
    assert trial.means["reference"] == {"number": 1, "length": 0, "total": 1}
    assert {kind: means["number"] for kind, means in trial.means.items()} == {
        "reference": 1,
        "empty": 0,
        "another row's": 0,
        "reversed": 0,
    }
    assert trial.problems == ()
    assert trial.notes == ("rewards: `length` gives 0.000 to every answer that was tried",)
    assert trial.table() == (
        "               number  length  total\n"
        "reference       1.000   0.000  1.000\n"
        "empty           0.000   0.000  0.000\n"
        "another row's   0.000   0.000  0.000\n"
        "reversed        0.000   0.000  0.000"
    )


def test_rewards_that_teach_nothing_or_the_opposite(tmp_path: Path) -> None:
    path = tmp_path / "rewards.py"
    path.write_text("def constant(completion): return 0\ndef short(completion): return -len(completion)\n")
    learn = "so a run would learn nothing, or the opposite: do references have the form that the rewards ask for?"
    for function, totals in (
        ("constant", "reference 0.000, empty 0.000, another row's 0.000, reversed 0.000"),
        ("short", "reference -14.000, empty 0.000, another row's -14.000, reversed -14.000"),
    ):
        (problem,) = try_rewards((reward(file=str(path), function=function),), rows()).problems
        assert f"no reference answer gets more than garbage in its place (mean totals: {totals}), {learn}" in problem
    trial = try_rewards((reward(name="regex", pattern="^<answer>"),), rows())
    assert trial.problems == ()
    assert trial.notes[0].endswith("; these rewards look at the form of an answer alone")


def test_a_reward_that_some_references_fail_is_noted() -> None:
    """Half of the references have no answer in the form that the reward asks for."""
    mixed = [completion("", reference) for reference in ("```\nx = 0\n```", "x is 1", "```\nx = 2\n```", "x is 3")]
    cases = [completion("", one.reference, tests=f"assert x == {i}") for i, one in enumerate(mixed)]
    trial = try_rewards((reward(name="tests"),), cases)
    assert trial.means["reference"]["tests"] == 0.5
    assert trial.problems == ()
    assert trial.notes[-1].startswith("rewards: 6 of 12 reference answers get more than garbage in their place")


def test_failures_stop_a_run_unless_they_have_a_value(tmp_path: Path) -> None:
    path = tmp_path / "rewards.py"
    path.write_text("def last(completion, reference): return completion.split()[-1] == reference.split()[-1]\n")
    (problem,) = try_rewards((reward(file=str(path), function="last"),), rows()).problems
    assert problem == (
        "rewards[0] (last): row 1: garbage (empty): raised IndexError: list index out of range. Such a completion "
        "stops the run: fix the reward or the rows, or set `on_failure`"
    )
    trial = try_rewards((reward(file=str(path), function="last", on_failure=0.0),), rows())
    assert (trial.problems, trial.failures) == ((), {"last": 6})
    assert trial.table().splitlines()[-1].split() == ["failures", "6"]
    assert "rewards: `last` failed for 6 of 24 answers that were tried (raised IndexError: list" in trial.notes[0]


def test_rows_without_references_and_references_that_are_garbage() -> None:
    trial = try_rewards((reward(name="length", target=4),), [completion("", None)])
    assert (trial.rows, trial.problems) == (0, ())
    assert trial.notes == ("no row that was tried has a reference answer, so the rewards were only loaded",)
    trial = try_rewards((reward(name="exact_match"),), [completion("", "7"), completion("", "7")])
    assert set(trial.means) == {"reference", "empty"}  # reversed, and the other row's, are the reference


@pytest.fixture
def loaded(recipe: dict[str, Any], write_recipe: Any, tmp_path: Path) -> Recipe:
    lines = [
        {"prompt": f"How much is {i} + 2?", "completion": f"{i + 2}", "level": i, "format": "x"} for i in range(10, 40)
    ]
    chats = [{**row, "source": "chat"} for row in tiny.conversations(20)]
    sources = [
        {"path": str(tiny.write_rows(tmp_path / "sums.jsonl", lines)), "format": "auto"},
        {"path": str(tiny.write_rows(tmp_path / "chats.jsonl", chats)), "format": "messages"},
    ]
    online = {
        "objective": {"name": "grpo"},
        "rollouts": {"prompts": 2, "samples": 4, "max_new_tokens": 16},
        "rewards": [{"name": "exact_match"}],
        "batch": {"rows": 8},
    }
    data = {"train": sources, "max_length": 80, "packing": False}
    return load_recipe(write_recipe({**recipe, **online, "data": data}))


@pytest.fixture
def data(loaded: Recipe) -> Dataset:
    return on_disk(build_training(loaded, Base.of(loaded).renderer(loaded.objective)))


def test_the_first_rows_of_a_recipe_s_sources(loaded: Recipe, data: Dataset) -> None:
    tokenizer = load_tokenizer(loaded.model)
    completions = reference_answers(loaded, data, tokenizer, 16)
    assert len(completions) == 16
    first, ninth = completions[0], completions[8]
    assert first.messages == ({"role": "user", "content": "How much is 10 + 2?"},)
    assert first.prompt.startswith("<|im_start|>user\nHow much is 10 + 2?<|im_end|>")
    assert first.prompt.endswith("<|im_start|>assistant\n")
    assert (first.text, first.reference, first.columns) == ("12", "12", {"level": 10, "format": "x"})
    assert first.num_tokens == len(tokenizer("12<|im_end|>", add_special_tokens=False)["input_ids"])  # type: ignore[arg-type]
    assert first.place.endswith("sums.jsonl:1")
    assert ninth.columns == {"source": "chat"}
    assert ninth.messages[-1]["role"] == "user"
    assert ninth.reference
    assert ninth.prompt.endswith("<|im_start|>assistant\n")


def test_check_refuses_with_the_table(loaded: Recipe, data: Dataset) -> None:
    tokenizer = load_tokenizer(loaded.model)
    trial = check_rewards(loaded, data, tokenizer)
    assert (trial.rows, trial.problems, trial.means["reference"]["total"]) == (16, (), 1)
    with pytest.raises(UserError) as error:
        check_rewards(loaded.model_copy(update={"rewards": (reward(name="number"),)}), data, tokenizer)
    first, *table, fix = str(error.value).splitlines()
    assert first.startswith("rewards[0] (number): ")
    assert "chats.jsonl:1: the reference answer: the reference has no number. Such a completion stops the run" in first
    assert table[0] == "                   number  total"
    assert table[-1].split() == ["failures", "32"]
    assert fix.startswith("Fix: correct the rewards or the rows; ")

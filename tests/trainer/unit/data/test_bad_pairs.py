"""Every mistake in pairs, labels and scores, and in their settings, is answered with its place and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from data_helpers import prepare, recipe, text_tokenizer, write_jsonl
from tokenizers import normalizers
from transformers import PreTrainedTokenizerFast

from finetune.data.dataset import build_held_out, build_training
from finetune.errors import UserError
from finetune.recipe import RecipeError, load_recipe

PAIR = {"prompt": "q", "chosen": "one", "rejected": "two"}
ANSWER = {"prompt": "q", "completion": "a"}
COMPARED = {"prompt": "q", "answer_a": "one", "answer_b": "two", "winner": "a"}
RANKED = {"prompt": "q", "responses": ["one", "two"], "scores": [1, 0]}
MARKED = {**ANSWER, "label": True}
CLASS = {"text": "a", "label": "yes"}
E_1, E_2 = "\u00e9", "e\u0301"  # é as one character and as two; equal in normal form
USER = [{"role": "user", "content": "q"}]


def say(content: str, role: str = "assistant") -> list[dict[str, str]]:
    return [{"role": role, "content": content}]


def normalising() -> PreTrainedTokenizerFast:
    tokenizer = text_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()  # pyright: ignore[reportAttributeAccessIssue]
    return tokenizer


ROWS: dict[str, tuple[str, Mapping[str, Any], str]] = {
    # --- preference
    "no rejected": ("preference", {"prompt": "q", "chosen": "a"}, "no column `rejected`"),
    "no chosen": ("preference", {"prompt": "q", "rejected": "a"}, "no column `chosen`"),
    "no prompt": ("preference", {"chosen": "a", "rejected": "b"}, "there is no `prompt` that they answer"),
    "an empty prompt": ("preference", {**PAIR, "prompt": ""}, "there is no `prompt` that they answer"),
    "a blank prompt": ("preference", {**PAIR, "prompt": " "}, "`prompt` is empty"),
    "a prompt of a number": ("preference", {**PAIR, "prompt": 3}, "`prompt` is a number; expected text or a list"),
    "an empty answer": ("preference", {**PAIR, "rejected": ""}, "`rejected` is empty; expected text"),
    "an answer of null": ("preference", {**PAIR, "chosen": None}, "`chosen` is null and `rejected` text"),
    "text against messages": ("preference", {**PAIR, "chosen": say("one")}, "expected text for both, or a list"),
    "equal answers": ("preference", {**PAIR, "rejected": "one"}, "are the same, so there is nothing to prefer"),
    "equal messages": ("preference", {"chosen": USER + say("a"), "rejected": USER + say("a")}, "are the same"),
    "equal tokens": (
        "preference",
        {**PAIR, "chosen": E_1, "rejected": E_2},
        "both answers are the same tokens",
    ),
    "unlike beginnings": (
        "preference",
        {"chosen": USER + say("a"), "rejected": [{"role": "user", "content": "r"}, *say("b")]},
        "begin differently and there is no `prompt`",
    ),
    "another prompt": (
        "preference",
        {"prompt": "other", "chosen": USER + say("a"), "rejected": USER + say("b")},
        "`prompt` is 'other', but `chosen` and `rejected` are conversations that do not begin with it",
    ),
    "one goes on": (
        "preference",
        {"chosen": USER + say("a"), "rejected": USER + say("a") + USER + say("b")},
        "`chosen` has no answer of its own: the other one continues it",
    ),
    "users differ": (
        "preference",
        {"prompt": USER, "chosen": say("x", "user"), "rejected": say("y", "user")},
        "do not begin with it",
    ),
    "a margin of text": ("preference", {**PAIR, "margin": "big"}, "`margin` is 'big'; expected a number"),
    "a margin of true": ("preference", {**PAIR, "margin": True}, "`margin` is True; expected a number"),
    "a picture": ("preference", {**PAIR, "images": ["a.png"]}, "the row has 1 images, but its messages 0 places"),
    "a misspelt role": ("preference", {**PAIR, "chosen": say("a", "bot"), "rejected": say("b")}, "role is 'bot'"),
    # --- comparison
    "no winner": ("comparison", {"prompt": "q", "answer_a": "a", "answer_b": "b"}, "no column `winner`"),
    "a tie": ("comparison", {**COMPARED, "winner": "tie (bothbad)"}, "so there is nothing to prefer"),
    "a winner that is no answer": ("comparison", {**COMPARED, "winner": "c"}, "`winner` is 'c'; expected a or b"),
    "a winner of a number": ("comparison", {**COMPARED, "winner": 1}, "`winner` is 1; expected a or b, for the better"),
    "a winner of null": ("comparison", {**COMPARED, "winner": None}, "`winner` is None; expected a or b"),
    "equal answers of two": ("comparison", {**COMPARED, "answer_b": "one", "answer_a": "one"}, "are the same"),
    # --- ranked
    "no scores": ("ranked", {"prompt": "q", "responses": ["a", "b"]}, "no column `scores`"),
    "no responses": ("ranked", {"prompt": "q", "scores": [1, 2]}, "no column `responses`"),
    "responses of text": ("ranked", {**RANKED, "responses": "ab"}, "`responses` is text; expected a list"),
    "scores of null": ("ranked", {**RANKED, "scores": None}, "`scores` is null; expected a list"),
    "too few scores": ("ranked", {**RANKED, "scores": [1]}, "`responses` has 2 items, but `scores` 1"),
    "a score of text": ("ranked", {**RANKED, "scores": [1, "2"]}, r"scores\[1\] is '2'; expected a number"),
    "equal scores": ("ranked", {**RANKED, "scores": [1, 1]}, "all scores are equal, so there is nothing to prefer"),
    "no answers": ("ranked", {**RANKED, "responses": [], "scores": []}, "all scores are missing"),
    "a response of a number": ("ranked", {**RANKED, "responses": ["a", 2]}, r"responses\[1\] is a number; expected"),
    "an empty response": ("ranked", {**RANKED, "responses": ["a", ""]}, r"responses\[1\] is empty"),
    "a response of the user": (
        "ranked",
        {**RANKED, "responses": [say("a"), say("b", "user")]},
        r"responses\[1\] begins with a message of user",
    ),
    "equal responses": ("ranked", {**RANKED, "responses": ["one", "one"]}, "both answers are the same tokens"),
    # --- unpaired
    "no label": ("unpaired", ANSWER, "no column `label`"),
    "a label of text": ("unpaired", {**MARKED, "label": "good"}, "`label` is 'good'; expected true .* or false"),
    "a label of null": ("unpaired", {**MARKED, "label": None}, "`label` is None; expected true"),
    "a label of two": ("unpaired", {**MARKED, "label": 2}, "`label` is 2; expected true .* or 1 or 0"),
    "a label without an answer": ("unpaired", {"prompt": "q", "label": True}, "no column `completion`"),
    "messages without an answer": (
        "unpaired",
        {"messages": USER, "label": True},
        "`messages` ends with a message of user; expected the assistant's",
    ),
    # --- classification
    "no class": ("classification", {"text": "a"}, "no column `label`"),
    "an unknown class": ("classification", {**CLASS, "label": "maybe"}, "'maybe', which is not in `objective.labels`"),
    "a class beyond the last": (
        "classification",
        {**CLASS, "label": 2},
        "is 2, .* one of 'no', 'yes', or 0 to 1",
    ),
    "a class of true": ("classification", {**CLASS, "label": True}, "`label` is True; expected a name"),
    "a class without a text": ("classification", {"label": "yes"}, "no column `text`"),
    "an empty text": ("classification", {**CLASS, "text": ""}, "`text` is empty"),
    "text and messages": ("classification", {**CLASS, "messages": USER}, "the row has `text` and `messages`; keep"),
}


@pytest.mark.parametrize(("format", "row", "message"), ROWS.values(), ids=ROWS.keys())
def test_a_bad_row(format: str, row: Mapping[str, Any], message: str, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [row])
    advice = r"Fix: correct the row, or set `data\.on_bad_row: skip`, which leaves such rows out"
    with pytest.raises(UserError, match=rf"rows\.jsonl:1: (.|\n)*{message}(.|\n)*\n{advice}"):
        prepare(path, format, tokenizer=normalising())


def test_bad_rows_are_counted_and_listed(tmp_path: Path) -> None:
    rows = [PAIR] * 3 + [{**PAIR, "rejected": "one"}, {**PAIR, "chosen": E_1, "rejected": E_2}]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    skips = {"data__on_bad_row": "skip", "data__max_bad_share": 0.5}
    (report,) = prepare(path, "preference", tokenizer=normalising(), **skips).report.sources
    assert (report.rows, report.bad, report.examples) == (5, 2, 3)
    assert [line.rpartition("/")[2].partition(" ")[0] for line in report.bad_rows] == ["rows.jsonl:4:", "rows.jsonl:5:"]


def test_an_answer_that_is_too_long_takes_its_pair_along(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [PAIR, {**PAIR, "rejected": "two " * 80}])
    examples = prepare(path, "preference")
    assert [(example.row, len(example.sequences)) for example in examples] == [(1, 2)]
    assert examples.report.totals()["dropped_overlong"] == 1
    with pytest.raises(
        UserError, match=r"rows\.jsonl:2: \d+ tokens in both answers, .* or set data\.overlong to drop$"
    ):
        prepare(path, "preference", data__overlong="error")


# --- rows of another objective


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("key", ["train", "eval"])
@pytest.mark.parametrize(
    ("objective", "row", "message"),
    [
        (
            "sft",
            PAIR,
            "pairs.jsonl: rows of format `preference` are not for .*name: sft`.* to dpo or .*chosen",
        ),
        (
            "dpo",
            ANSWER,
            "`prompt_completion` are not for .*dpo`, which takes `preference` or .*`ranked`. Fix: set .* sft or",
        ),
        ("kto", {"text": "a"}, "pairs.jsonl: rows of format `text` are not for `objective.name: kto`"),
    ],
)
def test_rows_that_are_not_for_the_objective(
    objective: str, row: dict[str, str], message: str, key: str, streaming: bool, tmp_path: Path
) -> None:
    sources = [{"path": str(write_jsonl(tmp_path / "pairs.jsonl", [row]))}]
    made = recipe("", "auto", objective__name=objective, data__streaming=streaming, data__train=sources)
    made = made.model_copy(update={"data": made.data.model_copy(update={"eval": made.data.train})})
    with pytest.raises(UserError, match=message):
        (build_training if key == "train" else build_held_out)(made, text_tokenizer())


FOUND = {"kto": (MARKED, "unpaired"), "sft": (MARKED, "prompt_completion"), "classify": (CLASS, "classification")}


@pytest.mark.parametrize("objective", FOUND)
def test_a_label_is_read_where_the_objective_asks_for_it(objective: str, tmp_path: Path) -> None:
    row, format = FOUND[objective]
    path = write_jsonl(
        tmp_path / "rows.jsonl", [row, {**row, **{key: "other" for key in ("prompt", "text") if key in row}}]
    )
    labels = {"objective__labels": ["no", "yes"]} if objective == "classify" else {}
    examples = prepare(path, "auto", objective__name=objective, **labels)
    assert {source.format for source in examples.report.sources} == {format}
    assert [example.columns for example in examples] == [{} if objective == "sft" else {"label": 1.0}] * 2


# --- settings

SETTINGS = {
    "text for dpo": (["objective.name=dpo"], "`messages` are not for `objective.name: dpo`"),
    "truncated pairs": (
        ["objective.name=dpo", "data.overlong=truncate"],
        "without its end teaches to ramble",
    ),
    "split answers": (["objective.name=kto", "data.overlong=split"], "judge a part of an answer"),
    "split texts": (["objective.name=classify", "data.overlong=split"], "would give the label of a text to each"),
    "classes without names": (["objective.name=classify"], "objective.labels: name the labels of the rows"),
    "one class": (["objective={name: classify, labels: [a]}"], "objective.labels: name the labels of the rows, two"),
    "a class twice": (["objective={name: classify, labels: [a, a]}"], "has a name twice"),
    "labels of pairs": (["objective={name: dpo, labels: [a, b]}"], "labels: has no effect under `name: dpo`"),
    "trained prompts": (["objective={name: dpo, train_on: all}"], "`all` has no effect under `name: dpo`"),
    "pairs of answers": (
        ["data.train=[{path: a, format: messages, pairs: all}]"],
        "only for rows of ranked answers",
    ),
    "a loss of another": (["objective={name: kto, loss: hinge}"], "objective.loss: has no effect under `name: kto`"),
    "an unknown loss": (["objective={name: dpo, loss: sigmod}"], "objective.loss: "),
    "a beta of zero": (["objective={name: dpo, beta: 0}"], "objective.beta: expected a number > 0"),
    "an unknown format": (["data.train=[{path: a, format: preferences}]"], 'did you mean `?"?preference'),
    "unknown pairs": (["data.train=[{path: a, format: ranked, pairs: best}]"], "data.train.0..pairs: "),
    "beta of sft": (["objective.beta=0.1"], "objective.beta: has no effect under `name: sft`"),
}


@pytest.mark.parametrize(("overrides", "message"), SETTINGS.values(), ids=SETTINGS.keys())
def test_a_bad_setting(overrides: list[str], message: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "run: {name: a}\nmodel: {name: org/model}\nmode: full\n"
        "data: {train: [{path: a.jsonl, format: messages}], max_length: 64}\n"
        "batch: {rows: 8}\noptimizer: {lr: 1e-4}\ntrain: {epochs: 1}\n"
    )
    with pytest.raises(RecipeError, match=message):
        load_recipe(path, overrides)

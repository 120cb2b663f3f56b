"""Held-out examples as prompts and references; what is said of them before the model loads."""

from __future__ import annotations

from pathlib import Path

import pytest
from data_helpers import byte_level, conversation, prepare, recipe, renderer_of, write_jsonl

from finetune.data.dataset import build_held_out, check_questions, questions, until_end
from finetune.errors import UserError
from finetune.recipe.schema import Evaluate
from finetune.utils import answer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOKENIZER = byte_level(
    ("<|im_start|>", "<|im_end|>", "</s>"), template=CHATML, words=("<end>",), eos_token="</s>", pad_token="</s>"
)
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")


def messages(*contents: str) -> dict[str, object]:
    return {"messages": conversation(*contents)}


def test_the_last_answer_is_the_question_s(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [messages("hello", "fine", "and you?", "so am I")])
    (question,) = questions(prepare(path, "messages", tokenizer=TOKENIZER), {END})
    asked = "fine<|im_end|>\n<|im_start|>user\nand you?<|im_end|>\n<|im_start|>assistant\n"
    assert TOKENIZER.decode(question.prompt).endswith(asked)
    assert TOKENIZER.decode(question.reference) == "so am I"


@pytest.mark.parametrize(
    ("trained", "reference"),
    [([7, 8, END], [7, 8]), ([7, 8], [7, 8]), ([7, END, 8], [7]), ([END], [])],
    ids=["an end", "no end", "more behind the end", "nothing but the end"],
)
def test_a_reference_loses_its_end_token_and_no_other(tmp_path: Path, trained: list[int], reference: list[int]) -> None:
    row = {"input_ids": [5, 6, *trained], "labels": [-100, -100, *trained]}
    path = write_jsonl(tmp_path / "a.jsonl", [row])
    (question,) = questions(prepare(path, "tokens", tokenizer=TOKENIZER), {END, 9})
    assert (question.prompt, question.reference) == ([5, 6], reference)
    assert until_end(trained, {END, 9}) == reference


def test_rows_without_a_prompt_give_no_question(tmp_path: Path) -> None:
    """Rows of text come first: the questions are of those that follow."""
    text = write_jsonl(tmp_path / "a.jsonl", [{"text": "hello world how are you"}] * 3)
    chats = write_jsonl(tmp_path / "b.jsonl", [messages("hello", "fine")])
    made = recipe(text)
    sources = [made.data.train[0], made.data.train[0].model_copy(update={"path": str(chats), "format": "messages"})]
    made = made.model_copy(update={"data": made.data.model_copy(update={"eval": tuple(sources)})})
    held_out = build_held_out(made, renderer_of(made, TOKENIZER))
    assert held_out is not None
    assert [TOKENIZER.decode(question.reference) for question in questions(held_out.examples, {END})] == ["fine"]
    assert check_questions(Evaluate(exact_match=2), held_out.examples, TOKENIZER) == []
    only_text = prepare(text, tokenizer=TOKENIZER)
    with pytest.raises(UserError, match=r"data\.eval: no row has a prompt to answer"):
        check_questions(Evaluate(generate=1), only_text, TOKENIZER)
    assert check_questions(Evaluate(), only_text, TOKENIZER) == []


def test_a_prompt_of_one_token_is_one(tmp_path: Path) -> None:
    plain = byte_level(eos_token="</s>")
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a", "completion": "b"}])
    (question,) = questions(prepare(path, "prompt_completion", tokenizer=plain), {plain.eos_token_id})
    assert (plain.decode(question.prompt), plain.decode(question.reference)) == ("a", "b")


@pytest.mark.parametrize(
    ("text", "pattern", "found"),
    [
        (" four\n", None, "four"),
        ("#### 3 #### 4", "#### (.)", "4"),
        ("a=4", "(a|b)=(.)", "a"),
        ("no mark", "#### (.)", None),
        ("", "#### (.)", None),
        ("", None, ""),
    ],
)
def test_what_is_compared(text: str, pattern: str | None, found: str | None) -> None:
    assert answer(text, pattern) == found


def test_references_that_hold_no_answer(tmp_path: Path) -> None:
    path = write_jsonl(
        tmp_path / "a.jsonl", [messages("one?", "#### 4"), messages("two?", "five"), messages("x", "#### 6")]
    )
    examples = prepare(path, "messages", tokenizer=TOKENIZER)
    with pytest.raises(UserError, match=r"evaluate.answer: '@ \(\.\)' occurs in none of the 3 references.*'#### 4'"):
        check_questions(Evaluate(exact_match=3, answer="@ (.)"), examples, TOKENIZER)
    (note,) = check_questions(Evaluate(exact_match=3, answer="#### (.)"), examples, TOKENIZER)
    assert note == ("evaluate.answer occurs in 2 of 3 references; the others count as not matched, such as 'five'")
    assert check_questions(Evaluate(exact_match=1, answer="#### (.)"), examples, TOKENIZER) == []

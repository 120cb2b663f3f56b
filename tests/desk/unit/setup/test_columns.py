"""Tables with odd columns: how many `new` reads right, how many it asks about, and that it reads none wrong."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from finetune.desk.setup.columns import columns_of_table
from finetune.desk.setup.roles import choose_columns, refusal
from finetune.errors import UserError

COUNT = 30
_WORDS = ("river", "stone", "light", "cloud", "paper", "green", "seven", "house", "under", "table", "quick", "stars")
_CHINESE = ("怎么退款这件商品", "为什么我的包裹还没有到", "请问如何修改收货地址", "可以开发票吗请告诉我")
Cell = Callable[[random.Random, int], Any]


def sentence(least: int, most: int, end: str) -> Cell:
    return lambda drawn, i: " ".join(drawn.choice(_WORDS) for _ in range(drawn.randint(least, most))) + end


ASKS, ANSWERS, DOCUMENT = sentence(3, 9, "?"), sentence(5, 30, "."), sentence(60, 90, ".")


def one_of(*values: Any) -> Cell:
    return lambda drawn, i: drawn.choice(values)


def numbered(write: Callable[[int], Any]) -> Cell:
    return lambda drawn, i: write(i)


NAME, LETTER, SIDE = one_of("Alice", "Bob", "Carla", "Deniz"), one_of(*"ABCD"), one_of("a", "b")
LANGUAGE, SITE, MOOD = one_of("de", "en", "fr"), one_of("wikipedia", "forum"), one_of("positive", "negative")
TRUE, MODEL_SIDE, ONE_TWO = one_of("true", "false"), one_of("model_a", "model_b", "tie"), one_of("1", "2")
NUMBER, PRICE = one_of(*"12345"), one_of("12,50 €", "7,99 €", "1.200,00 €")
SAME, EMPTY = one_of("You are a helpful assistant of the shop."), one_of("")
TICKET, LINK = numbered(lambda i: f"T-{1000 + i}"), numbered(lambda i: f"https://example.org/{i}")
UUID = numbered(lambda i: f"{i * 2654435761:016x}-{i}")
DATE = numbered(lambda i: f"2024-0{i % 9 + 1}-{i % 28 + 1:02d} 10:{i:02d}")
CHINESE, REPLY = (numbered(lambda i, shift=shift: _CHINESE[(i + shift) % 4] + str(i)) for shift in (0, 1))
JSON = numbered(lambda i: f'[{{"role": "user", "content": "stone {i}"}}]')
OBJECT = numbered(lambda i: f'{{"name": "stone {i}"}}')
CHAT = numbered(lambda i: [{"role": "user", "content": f"stone {i}?"}, {"role": "assistant", "content": "Yes."}])
TURNS = numbered(lambda i: [{"from": "human", "value": f"stone {i}?"}, {"from": "gpt", "value": "Yes."}])
OPTIONS, REPEATED = one_of(["one river", "two stones"]), numbered(lambda i: f"a river {i} is")

PAIR = "prompt_completion"


def answers(prompt: str, completion: str) -> tuple[str, dict[str, str]]:
    return PAIR, {"prompt": prompt, "completion": completion}


# Columns of a table, and what they are: a format with the column of each field; None: a guess, which is asked about.
TABLES: dict[str, tuple[dict[str, Cell], tuple[str, dict[str, str]] | None]] = {
    "tickets": (
        {"Ticket ID": TICKET, "Customer Message": ASKS, "Agent Reply": ANSWERS, "Sprache": LANGUAGE, "CSAT": NUMBER},
        answers("Customer Message", "Agent Reply"),
    ),
    "two answers": (
        {"question": ASKS, "answer_a": ANSWERS, "answer_b": ANSWERS, "winner": SIDE},
        ("comparison", {"prompt": "question", "answer_a": "answer_a", "answer_b": "answer_b", "winner": "winner"}),
    ),
    "a source in front": ({"source": SITE, "input": ASKS, "response": ANSWERS}, answers("input", "response")),
    "arena": (
        {"id": UUID, "Prompt": ASKS, "Response A": ANSWERS, "Response B": ANSWERS, "Winner": MODEL_SIDE, "judge": NAME},
        ("comparison", {"prompt": "Prompt", "answer_a": "Response A", "answer_b": "Response B", "winner": "Winner"}),
    ),
    "numbered answers": ({"query": ASKS, "answer 1": ANSWERS, "answer 2": ANSWERS, "better": ONE_TWO}, None),
    "pairs in words": (
        {"nr": NUMBER, "frage": ASKS, "bevorzugte Antwort": ANSWERS, "abgelehnt": ANSWERS},
        None,
    ),
    "pairs": (
        {"Question": ASKS, "Preferred Answer": ANSWERS, "Rejected Answer": ANSWERS},
        ("preference", {"prompt": "Question", "chosen": "Preferred Answer", "rejected": "Rejected Answer"}),
    ),
    "better and worse": (
        {"prompt": ASKS, "better": ANSWERS, "worse": ANSWERS, "annotator": NAME},
        ("preference", {"prompt": "prompt", "chosen": "better", "rejected": "worse"}),
    ),
    "German": ({"ID": TICKET, "Frage": ASKS, "Antwort": ANSWERS, "Datum": DATE}, answers("Frage", "Antwort")),
    "French": ({"Numéro": NUMBER, "Requête": ASKS, "Réponse": ANSWERS}, answers("Requête", "Réponse")),
    "Spanish": ({"Pregunta": ASKS, "Respuesta": ANSWERS, "Idioma": LANGUAGE}, answers("Pregunta", "Respuesta")),
    "Chinese": ({"编号": NUMBER, "问题": CHINESE, "回答": REPLY}, answers("问题", "回答")),
    "Spanish Alpaca": (
        {"instrucción": ASKS, "entrada": ANSWERS, "salida": ANSWERS},
        ("alpaca", {"instruction": "instrucción", "input": "entrada", "output": "salida"}),
    ),
    "Alpaca": ({"instruction": SAME, "input": ASKS, "output": ANSWERS}, ("alpaca", {})),
    "camel case": ({"rowId": TICKET, "userInput": ASKS, "botResponse": ANSWERS}, answers("userInput", "botResponse")),
    "ids that look asked": ({"question_id": UUID, "question": ASKS, "answer": ANSWERS}, answers("question", "answer")),
    "a prompt of ids": ({"prompt": TICKET, "message": ASKS, "completion": ANSWERS}, None),
    "answers that are numbers": ({"question": ASKS, "answer": NUMBER}, answers("question", "answer")),
    "prices": ({"question": ASKS, "answer": PRICE}, answers("question", "answer")),
    "answers that are ids": ({"question": ASKS, "answer": UUID}, None),
    "a constant answer": ({"question": ASKS, "answer": SAME}, None),
    "a system prompt": (
        {"system_prompt": SAME, "question": ASKS, "response": ANSWERS},
        (PAIR, {"prompt": "question", "completion": "response", "system": "system_prompt"}),
    ),
    "a subject line": ({"Betreff": ASKS, "Nachricht": ANSWERS, "Antwort": ANSWERS}, None),
    "people": ({"customer": NAME, "message": ASKS, "agent": NAME, "reply": ANSWERS}, None),
    "who speaks": ({"user": ASKS, "assistant": ANSWERS, "timestamp": DATE}, answers("user", "assistant")),
    "two languages": ({"en": ASKS, "de": ANSWERS}, None),
    "a translation": ({"source": ASKS, "target": ANSWERS}, None),
    "a summary": ({"document": DOCUMENT, "summary": ANSWERS}, None),
    "a title": ({"title": ASKS, "text": DOCUMENT}, None),
    "text alone": ({"id": TICKET, "text": DOCUMENT, "url": LINK}, ("text", {})),
    "text under another name": ({"Datum": DATE, "Inhalt": DOCUMENT}, ("text", {"text": "Inhalt"})),
    "notes": ({"id": TICKET, "notes": DOCUMENT}, None),
    "a sentiment": ({"text": ASKS, "sentiment": MOOD}, None),
    "a label": ({"text": ASKS, "label": MOOD}, ("classification", {})),
    "a review": ({"review": ASKS, "class": MOOD}, None),
    "marked in a CSV": ({"prompt": ASKS, "completion": ANSWERS, "label": TRUE}, None),
    "choices": (
        {"question": ASKS, "A": ANSWERS, "B": ANSWERS, "C": ANSWERS, "D": ANSWERS, "answer": LETTER},
        None,
    ),
    "a list of choices": ({"question": ASKS, "choices": OPTIONS, "answer": LETTER}, None),
    "a context left out": ({"prompt": ASKS, "response": ANSWERS, "context": DOCUMENT}, None),
    "two completions": ({"prompt": ASKS, "answer": ANSWERS, "response": ANSWERS}, None),
    "JSON in cells": ({"id": TICKET, "messages": JSON}, None),
    "chats": ({"id": TICKET, "chat": CHAT}, ("messages", {"messages": "chat"})),
    "turns": ({"id": TICKET, "dialog_turns": TURNS}, ("sharegpt", {"conversations": "dialog_turns"})),
    "a chat and a date": ({"messages": CHAT, "created": DATE}, ("messages", {})),
    "no text": ({"a": NUMBER, "b": DATE, "c": TICKET}, None),
    "empty columns": ({"prompt": EMPTY, "frage": ASKS, "antwort": ANSWERS}, answers("frage", "antwort")),
    "no names": ({"column1": ASKS, "column2": ANSWERS}, None),
    "an index": ({"": NUMBER, "Unnamed: 1": ASKS, "Unnamed: 2": ANSWERS}, None),
    "the same twice": (
        {"prompt": REPEATED, "completion": REPEATED},
        None,
    ),
    "structured answers": ({"Text": ASKS, "Expected Output": OBJECT}, None),
    "objects as answers": ({"input": ASKS, "output": OBJECT}, answers("input", "output")),
    "pairs with an input": ({"instruction": ASKS, "input": ANSWERS, "chosen": ANSWERS, "rejected": ANSWERS}, None),
    "a third answer": (
        {"prompt": ASKS, "response_a": ANSWERS, "response_b": ANSWERS, "response_c": ANSWERS, "winner": SIDE},
        None,
    ),
    "a message a row": ({"role": one_of("user", "assistant"), "content": ANSWERS}, None),
    "a speaker a row": ({"dialogue": NUMBER, "speaker": one_of("customer", "agent"), "text": ANSWERS}, None),
    "reasoning left out": ({"question": ASKS, "reasoning": DOCUMENT, "answer": NUMBER}, None),
    "questions in two parts": ({"question_title": ASKS, "question_body": DOCUMENT, "answer": ANSWERS}, None),
    "SQuAD": ({"id": UUID, "title": ASKS, "context": DOCUMENT, "question": ASKS, "answers": OPTIONS}, None),
    "support": (
        {"Ticket-Nr.": TICKET, "Kundenanfrage": ASKS, "Antwort des Supports": ANSWERS, "Erstellt am": DATE},
        answers("Kundenanfrage", "Antwort des Supports"),
    ),
    "an FAQ": ({"Kategorie": SITE, "Frage": ASKS, "Antwort": ANSWERS, "Quelle": LINK}, answers("Frage", "Antwort")),
    "links": ({"question": ASKS, "answer": ANSWERS, "link": LINK, "votes": NUMBER}, answers("question", "answer")),
}


def rows_of(columns: dict[str, Cell]) -> list[dict[str, Any]]:
    drawn = random.Random(0)
    return [{name: cell(drawn, i) for name, cell in columns.items()} for i in range(COUNT)]


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_read_right_or_asked_about(name: str) -> None:
    cells, expected = TABLES[name]
    rows = rows_of(cells)
    try:
        choice = choose_columns(rows)
    except UserError:
        assert expected is None
        return
    if expected is None:
        assert choice.doubts, f"read as {choice}"
        message = refusal(rows, choice)
        assert "--columns" in message
        assert f"--format {choice.format}" in message
        return
    assert not choice.doubts, choice.doubts
    format, columns = expected
    assert choice.format == format
    fields = {**{field: field for field in columns if field in cells}, **(choice.columns or {})}
    assert {field: fields.get(field, field) for field in columns} == columns


def test_most_tables_need_no_question() -> None:
    assert len(TABLES) >= 40
    read = [name for name, (_, expected) in TABLES.items() if expected is not None]
    assert len(read) >= 0.4 * len(TABLES)


@pytest.mark.parametrize(
    ("cell", "kind"),
    [
        (TICKET, "id"),
        (UUID, "id"),
        (LINK, "id"),
        (NUMBER, "number"),
        (PRICE, "number"),
        (DATE, "date"),
        (LANGUAGE, "choice"),
        (SAME, "constant"),
        (TRUE, "truth"),
        (EMPTY, "empty"),
        (JSON, "json"),
        (CHAT, "messages"),
        (OPTIONS, "list"),
        (ASKS, "text"),
        (CHINESE, "text"),
        (lambda drawn, i: i, "number"),
        (lambda drawn, i: i % 2 == 0, "truth"),
        (lambda drawn, i: None, "empty"),
        (lambda drawn, i: "yes" if i else "Take the river.", "constant"),
    ],
)
def test_the_kind_of_a_column(cell: Cell, kind: str) -> None:
    assert columns_of_table(rows_of({"a": cell}))["a"].kind == kind


def test_lists_as_text_and_no_text_at_all_are_no_guess() -> None:
    with pytest.raises(UserError, match=r"`messages` holds JSON as text.*JSON lines"):
        choose_columns(rows_of(TABLES["JSON in cells"][0]))
    with pytest.raises(UserError, match="no format fits the first row"):
        choose_columns(rows_of(TABLES["no text"][0]))


def test_a_guess_is_made_of_text() -> None:
    guess = choose_columns(rows_of(TABLES["a prompt of ids"][0]))
    assert guess.columns == {"prompt": "message", "completion": "completion"}


def test_a_column_that_is_named_as_the_prompt_may_hold_anything_if_no_text_is_left() -> None:
    choice = choose_columns(rows_of({"question": DATE, "answer": NUMBER}))
    assert (choice.format, choice.doubts) == (PAIR, ())


def test_of_two_columns_the_one_that_is_no_text_may_be_the_answer() -> None:
    choice = choose_columns(rows_of({"day": ASKS, "quarter": UUID}))
    assert choice.columns == {"prompt": "day", "completion": "quarter"}
    assert choice.doubts


def test_what_is_given_is_certain() -> None:
    rows = rows_of(TABLES["no names"][0])
    columns = {"prompt": "column2", "completion": "column1"}
    for format in (None, "prompt_completion"):
        choice = choose_columns(rows, format, columns)
        assert (choice.format, choice.columns, choice.doubts) == ("prompt_completion", columns, ())
    assert choose_columns(rows, "text", {"text": "column1"}).format == "text"
    with pytest.raises(UserError, match=r"--format txt: no such format\. Fix: use one of messages"):
        choose_columns(rows, "txt")
    with pytest.raises(UserError, match=r"no field `promt`\. .* did you mean `prompt`"):
        choose_columns(rows, "prompt_completion", {"promt": "column1"})
    with pytest.raises(UserError, match="`columns` names `column3`"):
        choose_columns(rows, "prompt_completion", {"prompt": "column3", "completion": "column1"})
    assert choose_columns(rows_of(TABLES["notes"][0]), "text").columns == {"text": "notes"}


def test_a_reason_is_said_once() -> None:
    rows = [{"day": f"{day} Nov 27", "quarter": f"20{day}-Q{day % 4 + 1}"} for day in range(10, 30)]
    choice = choose_columns(rows)
    assert choice.doubts
    assert "; ".join(choice.doubts).count("`quarter` holds ids") == 1

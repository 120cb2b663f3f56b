"""Every format reads its rows into exact samples, refuses what it cannot mean with the place in the row, and `auto`
finds it among the columns of well-known datasets."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import replace

import pyarrow
import pyarrow.parquet
import pytest
from data_helpers import byte_level, conversation, prepare, write_jsonl
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.data.formats.converters import FORMATS
from finetune.data.formats.detect import detect_format, nearest_format, parse_row
from finetune.data.formats.values import Struct
from finetune.data.samples import (
    FILE,
    BadRow,
    Conversation,
    Ids,
    Labelled,
    Message,
    Preference,
    PromptCompletion,
    PromptOnly,
    Ranked,
    Reference,
    Sample,
    Text,
)
from finetune.data.sources.source import read_rows
from finetune.errors import UserError
from finetune.recipe.schema import Source

Q, A = Message("user", "q"), Message("assistant", "a")
WEATHER = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
SCHEMA = {"name": "weather", "description": "Of a city.", "parameters": {"type": "object", "required": ["city"]}}
TOOL = {"type": "function", "function": SCHEMA}


def say(role: str, content: object = "x", **more: object) -> dict:
    return {"role": role, "content": content, **more}


def calling(*ids: str, **more: object) -> dict:
    """An assistant message with a call for each id."""
    return {"role": "assistant", "content": None, "tool_calls": [{"id": id_, **WEATHER} for id_ in ids], **more}


def called(call: object) -> dict:
    """A row whose second message makes one call."""
    return {"messages": [say("user"), say("assistant", None, tool_calls=[call])]}


def said(*more: dict) -> dict:
    """A row of one question and answer, and what follows."""
    return {"messages": [*conversation("q", "a"), *more]}


def spoken(*turns: tuple[str, str], **more: object) -> dict:
    return {"conversations": [{"from": speaker, "value": value} for speaker, value in turns], **more}


def preferred(chosen: object, rejected: object, **more: object) -> dict:
    return {"chosen": chosen, "rejected": rejected, **more}


GOOD = {
    "messages": {"messages": conversation("q", "a")},
    "sharegpt": {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    "alpaca": {"instruction": "q", "output": "a"},
    "prompt_completion": {"prompt": "q", "completion": "a"},
    "speech": {"audio": "a.wav", "text": "a"},
    "prompt": {"prompt": "q"},
    "text": {"text": "a"},
    "tokens": {"input_ids": [5, 6, 7]},
    "preference": {"prompt": "q", "chosen": "a", "rejected": "b"},
    "comparison": {"prompt": "q", "answer_a": "b", "answer_b": "a", "winner": "B"},
    "ranked": {"prompt": "q", "responses": ["a", "b", "c"], "scores": [0.5, 2, 2]},
    "unpaired": {"prompt": "q", "completion": "a", "label": False},
    "classification": {"text": "a", "label": "yes"},
}
SAMPLES: dict[str, Sample] = {
    "messages": Conversation((Q, A)),
    "sharegpt": Conversation((Q, A)),
    "alpaca": Conversation((Q, A)),
    "prompt_completion": PromptCompletion("q", "a"),
    "speech": Conversation((Message("user", FILE, media=(Reference("audio", "a.wav"),)), A)),
    "prompt": PromptOnly(Conversation((Q,)), "q"),
    "text": Text("a"),
    "tokens": Ids((5, 6, 7), (False, True, True)),
    "preference": Preference(PromptCompletion("q", "a"), PromptCompletion("q", "b")),
    "comparison": Preference(PromptCompletion("q", "a"), PromptCompletion("q", "b")),
    "ranked": Ranked(tuple(PromptCompletion("q", answer) for answer in "abc"), (0.5, 2.0, 2.0)),
    "unpaired": Labelled(PromptCompletion("q", "a"), False),
    "classification": Labelled(Text("a"), "yes"),
}


def test_the_tables_agree():
    assert set(FORMATS) == set(GOOD)
    assert all(format.content for format in FORMATS.values())
    assert {name for format in FORMATS.values() for others in format.other_names for name in others} <= {
        name for format in FORMATS.values() for name in format.fields
    }


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_reads_its_row_and_refuses_the_others(format):
    assert parse_row(GOOD[format], format) == SAMPLES[format]
    for other in FORMATS:
        reads_too = (other == "prompt" and other in GOOD[format]) or (other, format) == ("text", "speech")
        if other != format and not FORMATS[format].if_taken and not reads_too:  # such formats read rows of others, too
            with pytest.raises(BadRow, match=f"format `{other}`: .*the row looks like format `{format}`"):
                parse_row(GOOD[format], other)


@pytest.mark.parametrize("format", FORMATS)
def test_columns_name_the_files_columns(format):
    renamed = {f"my {name}": value for name, value in GOOD[format].items()}
    columns = {name: f"my {name}" for name in GOOD[format]}
    assert set(columns) <= set(FORMATS[format].fields)
    assert parse_row(renamed, format, columns) == SAMPLES[format]


def test_a_column_is_one_field_only():
    """`input` named as the instruction is not the input as well."""
    row = {"input": "q", "output": "a"}
    assert parse_row(row, "alpaca", {"instruction": "input"}) == Conversation((Q, A))


# --- good rows: (format, row, sample)

TWO_CALLS = (
    Q,
    Message("assistant", "", tool_calls=({"id": "1", **WEATHER}, {"id": "2", **WEATHER})),
    Message("tool", "sun", tool_call_id="2"),
    Message("tool", "rain", tool_call_id="1"),
    A,
)
CALL = (Q, Message("assistant", "", tool_calls=(WEATHER,)))
CONTEXT_A = replace(A, train=False)

GOOD_ROWS: dict[str, tuple[str, dict, Sample]] = {
    "a system message": (
        "messages",
        {"messages": conversation("q", "a", system="s")},
        Conversation((Message("system", "s"), Q, A)),
    ),
    "a developer message": (
        "messages",
        {"messages": [say("developer", "s"), *conversation("q", "a")]},
        Conversation((Message("developer", "s"), Q, A)),
    ),
    "a user's last word": (
        "messages",
        said(say("user", "r")),
        Conversation((Q, A, Message("user", "r"))),
    ),
    "a call at the end": (
        "messages",
        {"messages": [say("user", "q"), calling("7")]},
        Conversation(
            (
                Q,
                Message(
                    "assistant", "", tool_calls=({"type": "function", "id": "7", "function": WEATHER["function"]},)
                ),
            )
        ),
    ),
    "two calls answered in another order": (
        "messages",
        {
            "messages": [
                say("user", "q"),
                calling("1", "2"),
                say("tool", "sun", tool_call_id="2"),
                say("tool", "rain", tool_call_id="1"),
                say("assistant", "a"),
            ]
        },
        Conversation(TWO_CALLS),
    ),
    "answers without ids are those of the calls in order": (
        "messages",
        {"messages": [say("user", "q"), calling("1", "2"), say("tool", "sun"), say("tool", "", name="weather")]},
        Conversation((*TWO_CALLS[:2], Message("tool", "sun"), Message("tool", "", name="weather"))),
    ),
    "arguments as JSON": (
        "messages",
        {
            "messages": [
                say("user", "q"),
                say("assistant", "", tool_calls=[{"function": {"name": "weather", "arguments": '{"city": "Rome"}'}}]),
            ]
        },
        Conversation(CALL),
    ),
    "a flat call with text": (
        "messages",
        {"messages": [say("user", "q"), say("assistant", "so", tool_calls=[WEATHER["function"]])]},
        Conversation((Q, Message("assistant", "so", tool_calls=(WEATHER,)))),
    ),
    "calls as JSON": (
        "messages",
        {"messages": [say("user", "q"), {"role": "assistant", "tool_calls": json.dumps([WEATHER])}]},
        Conversation(CALL),
    ),
    "no arguments": (
        "messages",
        {
            "messages": [
                say("user", "q"),
                say("assistant", tool_calls=[{"name": "f", "arguments": ""}, {"name": "g", "arguments": None}]),
            ]
        },
        Conversation(
            (
                Q,
                Message(
                    "assistant",
                    "x",
                    tool_calls=tuple(
                        {"type": "function", "function": {"name": name, "arguments": {}}} for name in ("f", "g")
                    ),
                ),
            )
        ),
    ),
    "the older function_call": (
        "messages",
        {
            "messages": [
                say("user", "q"),
                say("assistant", None, function_call={"name": "weather", "arguments": '{"city": "Rome"}'}),
                say("function", "sun", name="weather"),
                say("assistant", "a"),
            ]
        },
        Conversation((*CALL, Message("tool", "sun", name="weather"), A)),
    ),
    "train: false": (
        "messages",
        {"messages": [say("user", "q"), say("assistant", "a", train=False), say("user", "q"), say("assistant", "a")]},
        Conversation((Q, CONTEXT_A, Q, A)),
    ),
    "weights": (
        "messages",
        {
            "messages": [
                say("user", "q", weight=0),
                say("assistant", "a", weight=0.0),
                say("user", "q", train=False),
                say("assistant", "a", weight=1, train=True),
            ]
        },
        Conversation((Q, CONTEXT_A, Q, A)),
    ),
    "reasoning by each name": (
        "messages",
        {
            "messages": [
                say("user", "q"),
                say("assistant", "a", reasoning_content="r", thinking="r"),
                say("user", "q"),
                say("assistant", "a", reasoning="r"),
                say("user", "q"),
                say("assistant", "a", thinking=""),
            ]
        },
        Conversation((Q, replace(A, reasoning="r"), Q, replace(A, reasoning="r"), Q, A)),
    ),
    "parts and weights of LLaMA-Factory": (
        "messages",
        {
            "messages": [
                {**say("user", [{"type": "text", "value": "q"}]), "loss_weight": 0.0},
                say("assistant", [{"type": "reasoning", "value": "r"}, {"type": "text", "value": "a"}], loss_weight=1),
                say("user", [{"type": "text", "value": "q"}, {"type": "text", "value": ""}]),
                say("assistant", [{"type": "text", "value": "a"}], loss_weight=0),
                say("user", [{"type": "text", "value": "q"}]),
                say("assistant", [{"type": "tool_call", "value": '{"name": "weather", "arguments": {"city": null}}'}]),
                say("tool", [{"type": "text", "value": "x"}]),
                say("assistant", [{"type": "text", "value": "a"}]),
            ]
        },
        Conversation(
            (
                Q,
                replace(A, reasoning="r"),
                Q,
                replace(A, train=False),
                Q,
                Message(
                    "assistant",
                    "",
                    tool_calls=({"type": "function", "function": {"name": "weather", "arguments": {"city": None}}},),
                ),
                Message("tool", "x"),
                A,
            )
        ),
    ),
    "parts": (
        "messages",
        {
            "messages": [
                say("user", [{"type": "text", "text": "q"}, {"type": "text", "text": "", "image_url": None}]),
                say("assistant", "a"),
            ]
        },
        Conversation((Q, A)),
    ),
    "metadata and what says nothing": (
        "messages",
        {
            "messages": [
                say("user", "q", id=3, language="English", toxic=False, images=[], audio=None),
                say("assistant", "a", model="m", tool_calls=[], refusal=None, function_call=None, weight=None),
            ]
        },
        Conversation((Q, A)),
    ),
    "tools, wrapped and bare": (
        "messages",
        {**GOOD["messages"], "tools": [TOOL, SCHEMA, {"type": "function", **SCHEMA}, json.dumps(SCHEMA)]},
        Conversation((Q, A), (TOOL,) * 4),
    ),
    "tools as JSON": ("messages", {**GOOD["messages"], "tools": json.dumps([SCHEMA])}, Conversation((Q, A), (TOOL,))),
    "arguments of the template": (
        "messages",
        {**GOOD["messages"], "chat_template_arguments": {"enable_thinking": False, "date": None}},
        Conversation((Q, A), template_arguments={"enable_thinking": False, "date": None}),
    ),
    "arguments by TRL's name, as JSON": (
        "preference",
        {"prompt": "q", "chosen": "a", "rejected": "b", "chat_template_kwargs": '{"depth": {"a": 1}}'},
        Preference(
            Conversation((Q, A), template_arguments={"depth": {"a": 1}}),
            Conversation((Q, Message("assistant", "b")), template_arguments={"depth": {"a": 1}}),
        ),
    ),
    "no tools": ("messages", {**GOOD["messages"], "tools": "[]", "system": ""}, Conversation((Q, A))),
    "a system column": (
        "messages",
        {**GOOD["messages"], "system": "s"},
        Conversation((Message("system", "s"), Q, A)),
    ),
    "a system column that repeats the message": (
        "messages",
        {"messages": conversation("q", "a", system="s"), "system": "s"},
        Conversation((Message("system", "s"), Q, A)),
    ),
    "speakers": (
        "sharegpt",
        spoken(("system", "s"), ("user", "q"), ("model", "a"), ("human", "q"), ("chatgpt", "a")),
        Conversation((Message("system", "s"), Q, A, Q, A)),
    ),
    "sharegpt's calls": (
        "sharegpt",
        spoken(
            ("human", "q"),
            ("function_call", json.dumps(WEATHER["function"])),
            ("observation", "sun"),
            ("gpt", "a"),
            tools=json.dumps([SCHEMA]),
            system="s",
        ),
        Conversation((Message("system", "s"), *CALL, Message("tool", "sun"), A), (TOOL,)),
    ),
    "sharegpt's list of calls": (
        "sharegpt",
        spoken(
            ("human", "q"),
            ("function_call", json.dumps([WEATHER["function"], WEATHER])),
            ("tool", "sun"),
            ("function_response", "rain"),
        ),
        Conversation(
            (Q, Message("assistant", "", tool_calls=(WEATHER,) * 2), Message("tool", "sun"), Message("tool", "rain"))
        ),
    ),
    "sharegpt's weights": (
        "sharegpt",
        {
            "conversations": [
                {"from": "human", "value": "q", "weight": 0},
                {"from": "gpt", "value": "a", "weight": 0},
                {"from": "human", "value": "q", "weight": None},
                {"from": "gpt", "value": "a", "train": True},
            ]
        },
        Conversation((Q, CONTEXT_A, Q, A)),
    ),
    "alpaca's input and system": (
        "alpaca",
        {"instruction": "q", "input": "more", "output": "a", "system": "be brief"},
        Conversation((Message("system", "be brief"), Message("user", "q\n\nmore"), A)),
    ),
    "alpaca's empty fields": (
        "alpaca",
        {**GOOD["alpaca"], "input": "", "system": None, "history": []},
        Conversation((Q, A)),
    ),
    "alpaca's history": (
        "alpaca",
        {**GOOD["alpaca"], "system": "s", "history": [["q", "b"], ["r", "a"]]},
        Conversation((Message("system", "s"), Q, Message("assistant", "b"), Message("user", "r"), A, Q, A)),
    ),
    "prompt and completion as messages": (
        "prompt_completion",
        {"prompt": conversation("q", "a", "q"), "completion": [say("assistant", "a")], "tools": [SCHEMA]},
        Conversation((Q, CONTEXT_A, Q, A), (TOOL,)),
    ),
    "a completion of several turns": (
        "prompt_completion",
        {"prompt": conversation("q"), "completion": [say("assistant", "a", train=False), *conversation("q", "a")]},
        Conversation((Q, CONTEXT_A, Q, A)),
    ),
    "a prompt with a system column": (
        "prompt_completion",
        {**GOOD["prompt_completion"], "system": "s"},
        Conversation((Message("system", "s"), Q, A)),
    ),
    "labels": ("tokens", {"input_ids": [5, 6, 7], "labels": [-100, -100, 7]}, Ids((5, 6, 7), (False, False, True))),
    "labels of the first": ("tokens", {"input_ids": [5, 6], "labels": [5, 6]}, Ids((5, 6), (False, True))),
    "trained": (
        "tokens",
        {"input_ids": [5, 6, 7], "trained": [True, True, False]},
        Ids((5, 6, 7), (False, True, False)),
    ),
    "completion_mask": (
        "tokens",
        {"input_ids": [5, 6, 7], "completion_mask": [0, 0, 1], "attention_mask": [1, 1, 1], "position_ids": [0, 1, 2]},
        Ids((5, 6, 7), (False, False, True)),
    ),
    "masks that agree": (
        "tokens",
        {"input_ids": [0, 6], "assistant_masks": [1, 1], "labels": [-100, 6], "trained": None},
        Ids((0, 6), (False, True)),
    ),
    "one token": ("tokens", {"input_ids": [5]}, Ids((5,), (False,))),
    "a comparison by the name of the answer": (
        "comparison",
        {"prompt": "q", "answer_a": "a", "answer_b": "b", "winner": "Answer A", "margin": 2},
        Preference(PromptCompletion("q", "a"), PromptCompletion("q", "b"), 2.0),
    ),
    "a comparison of whole conversations": (
        "comparison",
        {"answer_a": conversation("q", "b"), "answer_b": conversation("q", "a"), "winner": "model_b"},
        Preference(Conversation((Q, A)), Conversation((Q, Message("assistant", "b")))),
    ),
    "a preference of LLaMA-Factory": (
        "preference",
        {
            "conversations": [{"from": "human", "value": "q"}],
            "chosen": {"from": "gpt", "value": "a"},
            "rejected": {"from": "gpt", "value": "b"},
        },
        Preference(Conversation((Q, A)), Conversation((Q, Message("assistant", "b")))),
    ),
    "a preference of single messages": (
        "preference",
        preferred(say("assistant", "a"), say("assistant", "b"), prompt="q"),
        Preference(Conversation((Q, A)), Conversation((Q, Message("assistant", "b")))),
    ),
    "a preference of answers as messages": (
        "preference",
        preferred([say("assistant", "a")], [say("assistant", "b")], prompt=conversation("q", "a", "q")),
        Preference(Conversation((Q, CONTEXT_A, Q, A)), Conversation((Q, CONTEXT_A, Q, Message("assistant", "b")))),
    ),
    "a preference of text after messages": (
        "preference",
        preferred("a", "b", prompt=conversation("q")),
        Preference(Conversation((Q, A)), Conversation((Q, Message("assistant", "b")))),
    ),
    "a preference of answers after text": (
        "preference",
        preferred([say("assistant", "a")], [say("assistant", "b")], prompt="q"),
        Preference(Conversation((Q, A)), Conversation((Q, Message("assistant", "b")))),
    ),
    "a preference of whole conversations": (
        "preference",
        preferred(conversation("q", "a", "q", "a"), conversation("q", "a", "q", "b")),
        Preference(Conversation((Q, CONTEXT_A, Q, A)), Conversation((Q, CONTEXT_A, Q, Message("assistant", "b")))),
    ),
    "a preference of whole conversations and their prompt": (
        "preference",
        preferred(conversation("q", "a"), conversation("q", "b"), prompt="q "),
        Preference(Conversation((Q, A)), Conversation((Q, Message("assistant", "b")))),
    ),
    "a preference of whole conversations and their prompt as messages": (
        "preference",
        preferred(conversation("q", "a"), conversation("q", "b"), prompt=conversation("q")),
        Preference(Conversation((Q, A)), Conversation((Q, Message("assistant", "b")))),
    ),
    "a preference with a system column and tools": (
        "preference",
        preferred("a", "b", prompt="q", system="s", tools=[SCHEMA]),
        Preference(
            Conversation((Message("system", "s"), Q, A), (TOOL,)),
            Conversation((Message("system", "s"), Q, Message("assistant", "b")), (TOOL,)),
        ),
    ),
}


@pytest.mark.parametrize(("format", "row", "sample"), GOOD_ROWS.values(), ids=GOOD_ROWS.keys())
def test_good_rows(format, row, sample):
    before = json.dumps(row)
    assert parse_row(row, format) == sample
    assert json.dumps(row) == before  # the caller's row stays as it is


def test_arguments_keep_the_nulls_that_were_meant():
    """In a struct of a table a null may be for a key that the row never had; any other was written by someone."""
    arguments = {"a": None, "b": {"c": None, "d": [None, 1]}}
    as_struct = Struct(a=None, b=Struct(c=None, d=[None, 1]))
    found = [
        parse_row(called({"name": "f", "arguments": given}), "messages").messages[1].tool_calls[0]["function"]
        for given in (as_struct, arguments, json.dumps(arguments))
    ]
    assert [one["arguments"] for one in found] == [{"b": {"d": [None, 1]}}, arguments, arguments]


def test_messages_that_datasets_kept_as_lists_of_values():
    """Until datasets 4 a `Sequence` of structs was read as a struct of lists."""
    lists = {"role": ["user", "assistant"], "content": ["q", "a"], "weight": [None, 1]}
    assert parse_row({"messages": lists}, "messages") == parse_row({"messages": conversation("q", "a")}, "messages")
    turns_of = {"from": ["human", "gpt"], "value": ["q", "a"]}
    assert parse_row({"conversations": turns_of}, "sharegpt").messages[1].content == "a"
    with pytest.raises(BadRow, match="`messages` is an object; expected a list of messages"):
        parse_row({"messages": {"role": ["user"], "content": ["q", "a"]}}, "messages")


def test_parquet_gives_the_same_conversations_as_json(tmp_path):
    """Its structs have all keys of all rows; those of other messages, calls and tools are null."""
    rows = [
        {
            "messages": [say("user", "q"), calling("1"), say("tool", "sun", tool_call_id="1"), say("assistant", "a")],
            "tools": [TOOL],
        },
        {
            "messages": [
                say("user", "q"),
                say("assistant", None, tool_calls=[{"id": "2", "function": {"name": "f", "arguments": {"n": 1}}}]),
            ],
            "tools": [{"type": "function", "function": {"name": "f", "strict": True}}],
        },
        {"messages": [say("user", "q"), say("assistant", "a", weight=0, thinking="r"), *conversation("q", "a")]},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    source = Source.model_validate({"path": str(tmp_path / "rows.parquet"), "format": "messages"})
    read = [row for _, _, row in read_rows(source)]
    assert read[0]["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"city": "Rome", "n": None}
    assert [parse_row(row, "messages") for row in read] == [parse_row(row, "messages") for row in rows]


# --- bad rows: (format, row, parts of the message)


def turns(*roles: str) -> dict:
    return {"messages": [say(role) for role in roles]}


LONG = "x" * 1000
BAD_MESSAGES = {
    "no column": ({"mesages": []}, ["no column `messages`", "`mesages`", "columns: {messages: mesages}"]),
    "not a list": ({"messages": "hi"}, ["`messages` is text", "expected a list of messages"]),
    "null messages": ({"messages": None}, ["`messages` is null"]),
    "no messages": ({"messages": []}, ["empty list"]),
    "a message of text": ({"messages": ["hi"]}, ["messages[0] is text ('hi')", "`role` and `content`"]),
    "no role": ({"messages": [{"content": "x"}]}, ["messages[0] has no `role`", "it has `content`"]),
    "no content": ({"messages": [{"role": "user"}]}, ["messages[0] has no `content`", "it has `role`"]),
    "a wrong role": (turns("user", "bot"), ["messages[1].role is 'bot'", "expected system, developer, user"]),
    "a role of null": ({"messages": [say(None)]}, ["messages[0].role is None"]),  # type: ignore[arg-type]
    "a role of a list": ({"messages": [say(["user"])]}, ["messages[0].role is ['user']"]),  # type: ignore[arg-type]
    "assistant first": (turns("assistant", "user"), ["message 0 (first) is from assistant; expected user"]),
    "two users": (turns("user", "user", "assistant"), ["message 1 (after user) is from user; expected assistant"]),
    "two assistants": (turns("user", "assistant", "assistant"), ["message 2 (after assistant)", "expected user"]),
    "system later": (turns("user", "assistant", "system"), ["message 2 (after assistant) is from system"]),
    "system and developer": (turns("system", "developer"), ["message 1 (after system) is from developer"]),
    "system alone": (turns("system"), ["no assistant message"]),
    "no assistant": (turns("system", "user"), ["no assistant message", "nothing to train on"]),
    "a tool after a user": (turns("user", "tool"), ["message 1 (after user) is from tool; expected assistant"]),
    "a tool without a call": (
        turns("user", "assistant", "tool"),
        ["message 2 (after assistant) is from tool", "no `tool_calls` to answer", "into its text"],
    ),
    "a tool too many": (
        {"messages": [say("user"), calling("1"), say("tool"), say("tool")]},
        ["message 3 (after tool) is from tool; expected assistant: every call has its answer"],
    ),
    "no answer to a call": (
        {"messages": [say("user"), calling("1"), say("user"), say("assistant")]},
        ["message 2 (after assistant) is from user; expected tool", "so far: 1", "(`1`)"],
    ),
    "one answer to two calls": (
        {"messages": [say("user"), calling("1", "2"), say("tool", tool_call_id="1"), say("assistant")]},
        ["message 3 (after tool) is from assistant; expected tool", "so far: 1", "(`2`)"],
    ),
    "an end between two answers": (
        {"messages": [say("user"), calling("1", "2"), say("tool", tool_call_id="1")]},
        ["the conversation ends at message 2 (tool)", "(`2`)"],
    ),
    "an answer to no call": (
        {"messages": [say("user"), calling("1"), say("tool", tool_call_id="9")]},
        ["message 2 (tool) answers the call '9'", "that wait for an answer are `1`"],
    ),
    "a call answered twice": (
        {"messages": [say("user"), calling("1", "2"), *[say("tool", tool_call_id="1")] * 2]},
        ["message 3 (tool) answers the call '1'", "are `2`"],
    ),
    "an id where calls have none": (
        {"messages": [say("user"), say("assistant", tool_calls=[WEATHER]), say("tool", tool_call_id="9")]},
        ["answers the call '9'", "have no `id`"],
    ),
    "nothing trained": (
        {"messages": [say("user"), say("assistant", weight=0)]},
        ["every assistant message has `train: false` or `weight: 0`"],
    ),
    "null content": (said(say("user", None)), ["messages[2].content is null"]),
    "null from a tool": ({"messages": [say("user"), calling("1"), say("tool", None)]}, ["messages[2].content is null"]),
    "empty content": (said(say("user", " \n")), ["messages[2].content is empty"]),
    "a number as content": (said(say("user", 3.5)), ["messages[2].content is a number", "expected text"]),
    "NaN as content": (said(say("user", float("nan"))), ["content is a number"]),
    "an object as content": (said(say("user", {"a": 1})), ["messages[2].content is an object"]),
    "half a character": (
        said(say("user", "a\ud83e")),
        ["messages[2].content contains an unpaired surrogate '\\ud83e' at character 1"],
    ),
    "no parts": (said(say("user", [])), ["messages[2].content is a list"]),
    "a part without a type": (said(say("user", [{"text": "x"}])), ["messages[2].content[0] has no `type`", "`text`"]),
    "an image": (
        said(say("user", [{"type": "text", "text": "x"}, {"type": "input_video", "input_video": LONG}])),
        ["messages[2].content[1] is of type 'input_video'", "only parts of type 'text', 'image', 'audio' and 'video'"],
    ),
    "sound that is no object": (
        said(say("user", [{"type": "input_audio", "input_audio": LONG}])),
        ["messages[2].content[0].input_audio is text", 'expected an object such as {"data": BASE64, "format": "wav"}'],
    ),
    "sound without its format": (
        said(say("user", [{"type": "input_audio", "input_audio": {"data": "UklGRg=="}}])),
        ["messages[2].content[0].input_audio.format is null"],
    ),
    "a part of text": (said(say("user", ["x"])), ["messages[2].content[0] is text ('x')"]),
    "a part without text": (said(say("user", [{"type": "text"}])), ["messages[2].content[0].text is null"]),
    "a part with more": (
        said(say("user", [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}])),
        ["messages[2].content[0] has `cache_control`"],
    ),
    "empty parts": (said(say("user", [{"type": "text", "text": ""}])), ["messages[2].content is empty"]),
    "images": (said(say("user", images=[LONG])), ["messages[2] has `images`", "not supported"]),
    "a key misspelt": (
        said(say("user"), say("assistant", None, tool_call=[WEATHER])),
        ["messages[3] has `tool_call`", "did you mean `tool_calls`?"],
    ),
    "a mask of another trainer": (said(say("user"), say("assistant", mask=True)), ["messages[3] has `mask` (True)"]),
    "images of the row": ({**said(), "images": ["a.png"]}, ["the row has 1 images", "0 places for them"]),
    "videos of the row": ({**said(), "videos": ["a.mp4"]}, ["the row has 1 videos", "0 places for them"]),
    "train of text": (
        said(say("user"), say("assistant", train="yes")),
        ["messages[3].train is 'yes'"],
    ),
    "train of a number": (said(say("user"), say("assistant", train=1)), ["messages[3].train is 1"]),
    "half a weight": (
        said(say("user"), say("assistant", weight=0.5)),
        ["messages[3].weight is 0.5", "expected 0 or 1", "a share of a message is not supported"],
    ),
    "half a loss_weight": (said(say("user"), say("assistant", loss_weight=0.5)), ["messages[3].loss_weight is 0.5"]),
    "an image of LLaMA-Factory": (
        said(say("user", [{"type": "image_url", "value": "a.png"}])),
        ["messages[2].content[0] is of type 'image_url'", "`text`, `reasoning`, `tool_call`"],
    ),
    "a call in a user's parts": (
        said(say("user", [{"type": "tool_call", "value": '{"name": "f"}'}])),
        ["messages[2] is from user and has `content` with calls"],
    ),
    "a weight of text": (said(say("user"), say("assistant", weight="1")), ["messages[3].weight is '1'"]),
    "a weight of true": (said(say("user"), say("assistant", weight=True)), ["messages[3].weight is True"]),
    "train against weight": (
        said(say("user"), say("assistant", train=True, weight=0)),
        ["messages[3].train is True and its weight is 0", "keep one"],
    ),
    "a trained user": (
        said(say("user", train=True)),
        ["messages[2] is from user and has `train: True`", "objective.train_on: all"],
    ),
    "a user of weight": (said(say("user", weight=1)), ["messages[2] is from user and has `weight: 1`"]),
    "a thinking user": (said(say("user", thinking="hm")), ["messages[2] is from user and has `thinking`"]),
    "two thoughts": (
        said(say("user"), say("assistant", thinking="a", reasoning="b")),
        ["messages[3] has `thinking`, `reasoning`, which say different things"],
    ),
    "a thought of parts": (said(say("user"), say("assistant", thinking=["a"])), ["messages[3].thinking is a list"]),
    "a name of a number": (said(say("user", name=3)), ["messages[2].name is a number"]),
    "a calling user": (said(say("user", tool_calls=[WEATHER])), ["is from user and has `tool_calls`"]),
    "an answering user": (said(say("user", tool_call_id="1")), ["is from user and has `tool_call_id`"]),
    "both names of calls": (
        said(say("user"), say("assistant", tool_calls=[WEATHER], function_call=WEATHER["function"])),
        ["messages[3] has `tool_calls`, `function_call`", "keep one"],
    ),
    "a function_call of text": (
        said(say("user"), say("assistant", function_call="auto")),
        ["messages[3].function_call is text ('auto')"],
    ),
    "calls of an object": (
        said(say("user"), say("assistant", tool_calls=WEATHER)),
        ["messages[3].tool_calls is an object", "expected a list of calls"],
    ),
    "calls of broken JSON": (
        said(say("user"), say("assistant", tool_calls='[{"name": ')),
        ["messages[3].tool_calls is not valid JSON", "line 1, column 11"],
    ),
    "a call of text": (called("f()"), ["messages[1].tool_calls[0] is text ('f()')"]),
    "another type of call": (called({"type": "custom", "name": "f"}), ["tool_calls[0].type is 'custom'"]),
    "a call without a name": (called({"arguments": {"a": 1}}), ["tool_calls[0] has no `name`; it has `arguments`"]),
    "a function without a name": (
        called({"function": {"arguments": {"a": 1}}}),
        ["messages[1].tool_calls[0].function has no `name`"],
    ),
    "a name of null": (called({"name": None, "arguments": {}}), ["tool_calls[0].name is null"]),
    "parameters for arguments": (
        called({"name": "f", "parameters": {"a": 1}}),
        ["messages[1].tool_calls[0] has `parameters` ({'a': 1})"],
    ),
    "an id of a number": (called({"id": 7, **WEATHER}), ["tool_calls[0].id is a number"]),
    "two calls of an id": (
        {"messages": [say("user"), calling("1", "1")]},
        ["messages[1].tool_calls has two calls of the id '1'"],
    ),
    "arguments of broken JSON": (
        called({"function": {"name": "f", "arguments": '{"city": "Rome",\n "days" 3}'}}),
        ["messages[1].tool_calls[0].function.arguments is not valid JSON", "line 2, column 9"],
    ),
    "arguments of a list": (
        called({"name": "f", "arguments": "[1]"}),
        ["tool_calls[0].arguments is the JSON of a list ('[1]')", "expected that of an object"],
    ),
    "arguments of NaN": (
        called({"name": "f", "arguments": '{"a": NaN}'}),
        ["cannot be read: NaN is not a JSON number"],
    ),
    "arguments nested too deeply": (
        called({"name": "f", "arguments": '{"a":' * 100_000}),
        ["arguments is JSON that cannot be read"],
    ),
    "arguments of a date": (
        called({"name": "f", "arguments": {"a": {1, 2}}}),
        ["arguments cannot be written as JSON", "set"],
    ),
    "arguments of half a character": (
        called({"name": "f", "arguments": '{"a": "\\ud83e"}'}),
        ["messages[1].tool_calls[0].arguments contains an unpaired surrogate"],
    ),
    "tools of an object": ({**said(), "tools": TOOL}, ["tools is an object", "expected a list of functions"]),
    "tools of broken JSON": ({**said(), "tools": "[{]"}, ["tools is not valid JSON", "column 3"]),
    "a tool of a number": ({**said(), "tools": [3]}, ["tools[0] is a number (3)"]),
    "a tool without a name": ({**said(), "tools": [{"type": "function", "function": {}}]}, ["tools[0].function"]),
    "a tool of another type": ({**said(), "tools": [{"type": "web_search"}]}, ["tools[0].type is 'web_search'"]),
    "parameters of text": (
        {**said(), "tools": [{"name": "f", "parameters": "none"}]},
        ["tools[0].parameters is text ('none')", "a JSON schema"],
    ),
    "a system column against the message": (
        {"messages": conversation("q", "a", system="s"), "system": "t"},
        ["`system` is 't', but message 0 (system) is 's'"],
    ),
    "a system column of a list": ({**said(), "system": ["t"]}, ["`system` is a list"]),
}
BAD_OTHERS = {
    "a wrong speaker": ("sharegpt", spoken(("me", "x")), ["conversations[0].from is 'me'", "human", "gpt"]),
    "roles in sharegpt": (
        "sharegpt",
        {"conversations": conversation("q", "a")},
        ["has no `from`, `value`; it has `role`", "looks like format `messages` with `columns: {messages: conv"],
    ),
    "sharegpt in messages": (
        "messages",
        {"messages": GOOD["sharegpt"]["conversations"]},
        ["messages[0] has no `role`, `content`", "format `sharegpt` with `columns: {conversations: messages}`"],
    ),
    "two humans": ("sharegpt", spoken(("human", "q"), ("user", "r")), ["message 1 (after user) is from user"]),
    "an observation of nothing": ("sharegpt", spoken(("human", "q"), ("observation", "r")), ["is from tool"]),
    "a call of no JSON": (
        "sharegpt",
        spoken(("human", "q"), ("function_call", "f(x)")),
        ["conversations[1].value is not valid JSON", "column 1"],
    ),
    "a call of a number": ("sharegpt", spoken(("human", "q"), ("function_call", "3")), ["value[0] is a number (3)"]),
    "a list of no calls": ("sharegpt", spoken(("human", "q"), ("function_call", "[]")), ["value has no call"]),
    "a turn's half weight": (
        "sharegpt",
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a", "weight": 0.5}]},
        ["conversations[1].weight is 0.5"],
    ),
    "a turn with a picture": (
        "sharegpt",
        {"conversations": [{"from": "human", "value": "q", "image": "a.png"}]},
        ["conversations[0] has `image` ('a.png')"],
    ),
    "a value of null": ("sharegpt", {"conversations": [{"from": "gpt", "value": None}]}, ["[0].value is null"]),
    "alpaca without output": ("alpaca", {"instruction": "q"}, ["no column `output`", "`instruction`"]),
    "alpaca's null output": ("alpaca", {"instruction": "q", "output": None}, ["`output` is null"]),
    "alpaca's input": ("alpaca", {"instruction": "q", "input": 3, "output": "a"}, ["`input` is a number"]),
    "a history of text": ("alpaca", {**GOOD["alpaca"], "history": "q a"}, ["`history` is text", "[question, answer]"]),
    "a history of threes": ("alpaca", {**GOOD["alpaca"], "history": [["q", "a", "b"]]}, ["history[0] is a list of 3"]),
    "a history of objects": ("alpaca", {**GOOD["alpaca"], "history": [{"q": "a"}]}, ["history[0] is an object"]),
    "a history of null": ("alpaca", {**GOOD["alpaca"], "history": [["q", None]]}, ["history[0][1] is null"]),
    "text and list": ("prompt_completion", {"prompt": "q", "completion": []}, ["`prompt` is text", "a list"]),
    "a bad completion": ("prompt_completion", {"prompt": "q", "completion": "a", "label": False}, ["`label` is false"]),
    "no completion": ("prompt_completion", {"prompt": "q"}, ["no column `completion`"]),
    "an empty completion": ("prompt_completion", {"prompt": "q", "completion": ""}, ["`completion` is empty"]),
    "nothing completed": (
        "prompt_completion",
        {"prompt": conversation("q", "a"), "completion": conversation("r")},
        ["`completion` has no assistant message"],
    ),
    "a prompt in a wrong order": (
        "prompt_completion",
        {"prompt": conversation("q", "a"), "completion": [say("assistant")]},
        ["message 2 (after assistant) is from assistant"],
    ),
    "a message of the completion": (
        "prompt_completion",
        {"prompt": conversation("q"), "completion": [{"role": "assistant"}]},
        ["completion[0] has no `content`"],
    ),
    "text of null": ("text", {"text": None}, ["`text` is null"]),
    "text of nothing": ("text", {"text": "\n"}, ["`text` is empty"]),
    "text of an object": ("text", {"text": {"a": 1}}, ["`text` is an object"]),
    "another format": ("text", GOOD["alpaca"], ["no column `text`", "looks like format `alpaca`"]),
    "another format's bad row": (
        "text",
        turns("user", "user"),
        ["no column `text`", "format `messages` comes nearest, but: message 1 (after user)"],
    ),
    "ids of text": ("tokens", {"input_ids": "1 2"}, ["`input_ids` is text", "expected a list of token ids"]),
    "no ids": ("tokens", {"input_ids": []}, ["`input_ids` is an empty list"]),
    "a word as id": ("tokens", {"input_ids": [1, "a"]}, ["input_ids[1] is text ('a')"]),
    "a float as id": ("tokens", {"input_ids": [1.0]}, ["input_ids[0] is a number (1.0)"]),
    "true as id": ("tokens", {"input_ids": [True]}, ["input_ids[0] is true or false"]),
    "a negative id": ("tokens", {"input_ids": [1, -100]}, ["input_ids[1] is -100", "0 or more"]),
    "an id beyond int32": ("tokens", {"input_ids": [2**31]}, ["input_ids[0] is 2147483648"]),
    "labels too short": ("tokens", {"input_ids": [1, 2], "labels": [1]}, ["`labels` has 1 items, but `input_ids` 2"]),
    "labels shifted": (
        "tokens",
        {"input_ids": [1, 2, 3], "labels": [2, 3, -100]},
        ["labels[0] is 2; expected -100 (not trained) or 1", "aligned", "shifted later"],
    ),
    "labels of text": ("tokens", {"input_ids": [1], "labels": "1"}, ["`labels` is text"]),
    "a mask of two": ("tokens", {"input_ids": [1, 2], "trained": [0, 2]}, ["trained[1] is 2; expected 0 or 1"]),
    "a mask of floats": ("tokens", {"input_ids": [1], "completion_mask": [1.0]}, ["completion_mask[0] is 1.0"]),
    "masks that differ": (
        "tokens",
        {"input_ids": [1, 2], "trained": [0, 0], "labels": [-100, 2]},
        ["`trained`, `labels` train different tokens"],
    ),
    "padding": (
        "tokens",
        {"input_ids": [1, 2, 0], "attention_mask": [1, 1, 0]},
        ["attention_mask[2] is 0", "strip the padding"],
    ),
    "packed": ("tokens", {"input_ids": [1, 2, 1], "position_ids": [0, 1, 0]}, ["`position_ids`", "a row of its own"]),
    "no rejected": ("preference", {"prompt": "q", "chosen": "a"}, ["no column `rejected`"]),
    "no prompt": ("preference", preferred("a", "b"), ["no `prompt` that they answer"]),
    "a prompt of null": ("preference", preferred("a", "b", prompt=None), ["no `prompt` that they answer"]),
    "a prompt of a number": ("preference", preferred("a", "b", prompt=3), ["`prompt` is a number"]),
    "text and messages": (
        "preference",
        preferred("a", [say("assistant")], prompt="q"),
        ["`chosen` is text and `rejected` a list; expected text for both"],
    ),
    "a rejected of null": ("preference", preferred("a", None, prompt="q"), ["`rejected` null"]),
    "an empty answer": ("preference", preferred("a", " ", prompt="q"), ["`rejected` is empty"]),
    "the same text": ("preference", preferred("a", "a", prompt="q"), ["`chosen` and `rejected` are the same"]),
    "the same messages": ("preference", preferred(*[conversation("q", "a")] * 2), ["are the same"]),
    "the same answers": ("preference", preferred(*[[say("assistant")]] * 2, prompt="q"), ["are the same"]),
    "nothing shared": (
        "preference",
        preferred([say("assistant", "a")], [say("assistant", "b")]),
        ["begin differently and there is no `prompt`"],
    ),
    "other questions": (
        "preference",
        preferred([say("system"), *conversation("q", "a")], [say("system"), *conversation("r", "a")]),
        ["differ from a message of user on ('q')"],
    ),
    "one goes on": (
        "preference",
        preferred(conversation("q", "a", "r"), conversation("q", "a")),
        ["differ from a message of user on ('r')"],
    ),
    "one ends before": (
        "preference",
        preferred(conversation("q"), conversation("q", "a")),
        ["`chosen` has no answer of its own"],
    ),
    "another prompt": (
        "preference",
        preferred(conversation("q", "a"), conversation("q", "b"), prompt="r"),
        ["`prompt` is 'r'", "do not begin with it"],
    ),
    "another prompt of messages": (
        "preference",
        preferred(conversation("q", "a"), conversation("q", "b"), prompt=conversation("r")),
        ["`prompt` is 'r'", "do not begin with it"],
    ),
    "an answer in a wrong order": (
        "preference",
        preferred([say("assistant"), say("assistant")], [say("assistant", "b")], prompt="q"),
        ["message 2 (after assistant) is from assistant"],
    ),
    "a column that is none": ("text", {"content": "a"}, ["no column `text`", "the row has the columns `content`"]),
}
BAD_ROWS = {**{name: ("messages", *case) for name, case in BAD_MESSAGES.items()}, **BAD_OTHERS}


@pytest.mark.parametrize(("format", "row", "parts"), BAD_ROWS.values(), ids=BAD_ROWS.keys())
def test_bad_rows(format, row, parts):
    with pytest.raises(BadRow) as caught:
        parse_row(row, format)
    message = str(caught.value)
    assert message.startswith(f"format `{format}`: ")
    assert "\n" not in message
    assert LONG[:100] not in message
    for part in parts:
        assert part in message


@pytest.mark.parametrize("where", ["role", "content", "train", "weight", "tool_calls", "extra"])
def test_values_in_messages_are_short(where):
    item = {**say("assistant"), where: [LONG] if where in ("content", "tool_calls") else LONG}
    with pytest.raises(BadRow) as caught:
        parse_row({"messages": [say("user"), item]}, "messages")
    assert len(str(caught.value)) < 400
    assert "..." in str(caught.value)


def test_a_bad_row_has_its_place(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [GOOD["messages"], turns("user", "bot")])
    tokenizer = byte_level(bos_token="<s>", eos_token="</s>")
    with pytest.raises(UserError) as caught:
        prepare(path, "messages", tokenizer=tokenizer, model__chat_template="plain")
    assert str(caught.value).startswith(f"{path}:2: format `messages`: messages[1].role is 'bot'")
    assert "on_bad_row: skip" in str(caught.value)


BAD_COLUMNS = {
    "a field that is none": ({"message": "text"}, ["no field `message`", "Fix: name one of its fields `text`"]),
    "a field misspelt": ({"txt": "text"}, ["no field `txt`", "did you mean `text`?"]),
    "a column that is none": ({"text": "content"}, ["rows.jsonl:1:", "`columns` names `content`", "`text`"]),
}


@pytest.mark.parametrize(("columns", "parts"), BAD_COLUMNS.values(), ids=BAD_COLUMNS.keys())
def test_bad_columns(tmp_path, columns, parts):
    path = write_jsonl(tmp_path / "rows.jsonl", [GOOD["text"]])
    with pytest.raises(UserError) as caught:
        prepare(path, source={"columns": columns})
    for part in parts:
        assert part in str(caught.value)


# --- whatever a row holds

ODD = (None, True, -1, 0.5, float("nan"), "", "odd", "[{", "\ud83e", [], [None], ["odd"], {}, {"odd": 1}, {1, 2})


def with_one_odd(value: object) -> Iterator[object]:
    """The value with one of its parts at a time replaced by each of `ODD`, or gone."""
    yield from ODD
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in list(parts):
        for odd in with_one_odd(part):
            changed = copy.copy(value)
            changed[key] = odd  # type: ignore[index]
            yield changed
        gone = copy.copy(value)
        del gone[key]  # type: ignore[attr-defined]
        yield gone


DEEP = json.loads('{"a":' * 450 + "[" * 450 + "1" + "]" * 450 + "}" * 450)


def problem(row: dict, format: str) -> str:
    """Why a row is bad; any other exception fails the test."""
    try:
        parse_row(row, format)
    except BadRow as error:
        return str(error)
    return f"format `{format}`: "


@pytest.mark.parametrize(("format", "row"), [case[:2] for case in GOOD_ROWS.values()], ids=GOOD_ROWS.keys())
def test_a_row_with_anything_odd_in_it_is_a_sample_or_a_bad_row(format, row):
    for changed in with_one_odd(row):
        if isinstance(changed, dict):
            assert problem(changed, format).startswith(f"format `{format}`: ")
            assert nearest_format(changed)[0] in FORMATS


@pytest.mark.parametrize("key", ["content", "tool_calls", "arguments", "train", "tools", "system", "messages"])
@pytest.mark.parametrize("format", FORMATS)
def test_values_nested_deeply(format, key):
    call = {"name": "f", "arguments": DEEP if key == "arguments" else {}}
    message = {"role": "assistant", "content": "x", "tool_calls": [DEEP if key == "tool_calls" else call]}
    message |= {key: DEEP} if key in ("content", "train") else {}
    row = {"messages": [say("user"), message], **({key: DEEP} if key in ("tools", "system", "messages") else {})}
    assert len(problem(row, format)) < 500
    assert len(problem(dict.fromkeys(FORMATS[format].fields, DEEP), format)) < 500


# --- the same conversation, written in two formats

WORDS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8).filter(str.strip)
JSON = st.recursive(st.none() | st.booleans() | st.integers(-9, 9) | WORDS, lambda kids: st.lists(kids, max_size=2))
CALLS = st.builds(lambda name, arguments: {"name": name, "arguments": arguments}, WORDS, st.dictionaries(WORDS, JSON))


@st.composite
def exchanges(draw: st.DrawFn) -> list[tuple[str, object, bool]]:
    """(role, what is said or the calls made, whether trained), from a question to its answer."""
    found: list[tuple[str, object, bool]] = [("user", draw(WORDS), True)]
    for _ in range(draw(st.integers(0, 2))):
        calls = draw(st.lists(CALLS, min_size=1, max_size=2))
        found += [("assistant", calls, draw(st.booleans())), *[("tool", draw(WORDS), True) for _ in calls]]
    return [*found, ("assistant", draw(WORDS), draw(st.booleans()))]


SPEAKER = {"system": "system", "user": "human", "assistant": "gpt", "tool": "observation"}


@settings(max_examples=60, derandomize=True, database=None)
@given(st.lists(exchanges(), min_size=1, max_size=3), st.none() | WORDS)
def test_messages_and_sharegpt_give_the_same_conversation(exchanges, system):
    spoken_turns = [turn for exchange in exchanges for turn in exchange]
    spoken_turns[-1] = (*spoken_turns[-1][:2], True)
    chat, turns_ = [], []
    for role, what, train in ([("system", system, True)] if system else []) + spoken_turns:
        key = {} if train else {"train": False}
        if isinstance(what, list):
            calls = [{"function": {**call, "arguments": json.dumps(call["arguments"])}} for call in what]
            chat.append({"role": role, "content": None, "tool_calls": calls, **key})
            turns_.append({"from": "function_call", "value": json.dumps(what), **key})
        else:
            chat.append({"role": role, "content": what, **key})
            turns_.append({"from": SPEAKER[role], "value": what, **key})
    as_messages = parse_row({"messages": chat}, "messages")
    as_sharegpt = parse_row({"conversations": turns_}, "sharegpt")
    assert isinstance(as_messages, Conversation)
    assert as_messages == as_sharegpt
    assert [message.train for message in as_messages.messages if message.role == "assistant"] == [
        train for role, _, train in spoken_turns if role == "assistant"
    ]


# --- detection: (rows, format, columns, parts of the reason)

SPOKEN = GOOD["sharegpt"]["conversations"]
WHOLE, WORSE = conversation("q", "a"), conversation("q", "b")
DATASETS = {
    "no_robots": (
        {"prompt": "q", "prompt_id": "1", "messages": WHOLE, "category": "Chat"},
        "messages",
        None,
        ["column `messages` holds lists of role and content", "not read: `prompt`, `prompt_id`, `category`"],
    ),
    "ultrachat_200k": ({"prompt": "q", "prompt_id": "1", "messages": WHOLE}, "messages", None, ["`messages` holds"]),
    "tulu-3": ({"id": "1", "messages": WHOLE, "source": "x"}, "messages", None, ["not read: `id`, `source`"]),
    "NuminaMath-CoT": ({"source": "x", "problem": "q", "solution": "a", "messages": WHOLE}, "messages", None, []),
    "lmsys-chat-1m": (
        {"conversation_id": "1", "model": "m", "conversation": WHOLE, "turn": 1, "language": "English"},
        "messages",
        {"messages": "conversation"},
        ["column `conversation` holds lists of role and content"],
    ),
    "role and content under conversations": (
        {"conversations": WHOLE},
        "messages",
        {"messages": "conversations"},
        ["column `conversations` holds lists of role"],
    ),
    "OpenHermes-2.5": (
        {"conversations": [*SPOKEN], "source": "x", "category": None, "title": None, "system_prompt": None},
        "sharegpt",
        None,
        ["column `conversations` holds lists of from and value", "`system_prompt`"],
    ),
    "from and value under messages": (
        {"messages": SPOKEN},
        "sharegpt",
        {"conversations": "messages"},
        ["column `messages` holds lists of from and value"],
    ),
    "glaive's calls": (
        spoken(
            ("human", "q"),
            ("function_call", json.dumps(WEATHER["function"])),
            ("observation", "sun"),
            ("gpt", "a"),
            tools=json.dumps([SCHEMA]),
        ),
        "sharegpt",
        None,
        ["also read: `tools`"],
    ),
    "calls with tools": (
        {"messages": [say("user"), calling("1")], "tools": json.dumps([SCHEMA])},
        "messages",
        None,
        ["also read: `tools`"],
    ),
    "alpaca": (
        {"instruction": "q", "input": "", "output": "a", "text": "Below is an instruction. q a"},
        "alpaca",
        None,
        ["columns `instruction`, `output` hold an instruction and its answer; also read: `input`; not read: `text`"],
    ),
    "dolly-15k": (
        {"instruction": "q", "context": "c", "response": "a", "category": "qa"},
        "alpaca",
        {"input": "context", "output": "response"},
        ["also read: `context`", "not read: `category`"],
    ),
    "gsm8k": (
        {"question": "q", "answer": "a"},
        "prompt_completion",
        {"prompt": "question", "completion": "answer"},
        ["columns `question`, `answer` hold a prompt and its completion"],
    ),
    "a context beside question and answer": (
        {"context": "c", "question": "q", "answer": "a"},
        "alpaca",
        {"instruction": "question", "input": "context", "output": "answer"},
        ["also read: `context`"],
    ),
    "OpenOrca": (
        {"id": "1", "system_prompt": "s", "question": "q", "response": "a"},
        "prompt_completion",
        {"prompt": "question", "completion": "response", "system": "system_prompt"},
        ["also read: `system_prompt`"],
    ),
    "MetaMathQA": (
        {"query": "q", "response": "a", "type": "x", "original_question": "o"},
        "prompt_completion",
        {"prompt": "query", "completion": "response"},
        [],
    ),
    "input and output": (
        {"input": "q", "output": "a"},
        "prompt_completion",
        {"prompt": "input", "completion": "output"},
        [],
    ),
    "own names before others": (
        {"prompt": "q", "completion": "a", "question": "r", "answer": "b"},
        "prompt_completion",
        None,
        ["not read: `question`, `answer`"],
    ),
    "ultrafeedback_binarized": (
        {"prompt": "q", "prompt_id": "1", "chosen": WHOLE, "rejected": WORSE, "messages": WHOLE, "score_chosen": 8.0},
        "preference",
        None,
        ["columns `chosen`, `rejected` hold a better and a worse answer; also read: `prompt`", "`messages`"],
    ),
    "orca_dpo_pairs": (
        {"system": "s", "question": "q", "chosen": "a", "rejected": "b"},
        "preference",
        {"prompt": "question"},
        ["also read: `system`, `question`"],
    ),
    "chosen and rejected alone": ({"chosen": WHOLE, "rejected": WORSE}, "preference", None, []),
    "wikitext": ({"text": " = Title = \n"}, "text", None, ["column `text` holds text"]),
    "text and metadata": ({"text": "a", "url": "b", "id": 3}, "text", None, ["not read: `url`, `id`"]),
    "tokens": ({"input_ids": [1, 2], "labels": [-100, 2]}, "tokens", None, ["holds token ids; also read: `labels`"]),
    "tokens under tokens": ({"tokens": [1, 2]}, "tokens", {"input_ids": "tokens"}, ["column `tokens` holds"]),
}


@pytest.mark.parametrize(("row", "format", "columns", "parts"), DATASETS.values(), ids=DATASETS.keys())
def test_detection_on_well_known_columns(row, format, columns, parts):
    found = detect_format([row, row])
    assert (found.format, found.columns) == (format, columns)
    assert "\n" not in found.reason
    for part in parts:
        assert part in found.reason
    parse_row(row, found.format, found.columns)
    assert nearest_format(row) == (format, "")


@pytest.mark.parametrize("format", FORMATS)
def test_detection_of_every_format(format):
    assert (found := detect_format([GOOD[format]], formats=tuple(FORMATS))).format == format
    assert found.columns is None


def test_detection_with_the_recipes_columns():
    found = detect_format([{"body": "a", "text": "b"}], {"text": "body"})
    assert (found.format, found.columns) == ("text", {"text": "body"})
    row = {"messages": WHOLE, "question": "q", "answer": "a"}
    assert detect_format([row], {"prompt": "question", "completion": "answer"}).format == "prompt_completion"
    found = detect_format([{"q": "q", "response": "a"}], {"prompt": "q"})  # the other field by another name
    assert (found.format, found.columns) == ("prompt_completion", {"completion": "response", "prompt": "q"})
    with pytest.raises(UserError, match=r"no format has all of the fields `chosen`, `text`\. Fix: set `format`"):
        detect_format([row], {"chosen": "question", "text": "answer"})
    with pytest.raises(UserError, match=r"no field `promt`\. .* did you mean `prompt`"):
        detect_format([row], {"promt": "question"})
    with pytest.raises(UserError, match="Format `prompt_completion` comes nearest, but: `columns` names `body`"):
        detect_format([row], {"completion": "body"})


def test_detection_leaves_bad_rows_to_reading():
    """Empty lines of wikitext, and a format that most rows fit although a few fit another."""
    found = detect_format([{"text": ""}, {"text": "a"}, {"text": "b"}])
    assert found.format == "text"
    assert found.reason.endswith("2 of the first 3 rows fit")
    some = {"prompt": "q", "chosen": WHOLE, "rejected": WHOLE, "messages": WHOLE}  # nothing to prefer
    assert detect_format([{**some, "rejected": WORSE}, some]).format == "preference"
    assert detect_format([{**some, "rejected": WORSE}, some, some]).format == "messages"
    assert detect_format([{"text": ""}] * 9 + [{"text": "a"}]).format == "text"


def test_detection_looks_at_the_first_hundred_rows():
    rows = [GOOD["text"]] * 100 + [GOOD["messages"]] * 200
    assert detect_format(rows).format == "text"
    assert "100" not in detect_format(rows).reason
    assert detect_format(rows[50:]).reason.endswith("50 of the first 100 rows fit")


AMBIGUOUS = {
    "text and tokens": (
        {"text": "a", "input_ids": [1, 2]},
        ["`text` (column `text` holds text)", "`tokens` (column `input_ids` holds token ids)"],
    ),
    "two conversations": (
        {"messages": WHOLE, "conversations": [{"from": "human", "value": "r"}, {"from": "gpt", "value": "b"}]},
        ["`messages`", "`sharegpt`", "set `format`"],
    ),
    "a pair and an instruction": (
        {**GOOD["alpaca"], **GOOD["prompt_completion"]},
        ["`alpaca`", "`prompt_completion`"],
    ),
    "two answers": (
        {"question": "q", "answer": "a", "response": "b"},
        ["with `columns: {prompt: question, completion: answer}`", "{prompt: question, completion: response}"],
    ),
}


@pytest.mark.parametrize(("row", "parts"), AMBIGUOUS.values(), ids=AMBIGUOUS.keys())
def test_what_could_be_two_formats_is_an_error(row, parts):
    with pytest.raises(UserError, match="fit two formats that would train different things") as caught:
        detect_format([row])
    for part in parts:
        assert part in str(caught.value)


def test_two_formats_that_say_the_same_are_no_error():
    assert detect_format([{"messages": WHOLE, "conversations": SPOKEN}]).format == "messages"


NEAREST = {
    "a bad call": (
        called({"name": "f", "arguments": "{"}),
        "messages",
        ["`messages` (a list of 2, the first an object with `role`, `content`)", "messages[1].tool_calls[0].arguments"],
    ),
    "a misspelt column": ({"promt": 3, "completion": "a"}, "prompt_completion", ["`promt` (a number)", "`prompt`"]),
    "half a pair": ({"instruction": "q", "id": 3, "b": "c"}, "alpaca", ["no column `output`"]),
    "messages of another name": (
        {"id": 7, "talk": WHOLE},
        "messages",
        ["`talk` (a list of 2", "set `format: messages` and `columns: {messages: talk}`"],
    ),
    "turns of another name": ({"talk": SPOKEN}, "sharegpt", ["`columns: {conversations: talk}`"]),
    "text of another name": ({"id": 7, "body": "some text"}, "text", ["`columns: {text: body}`"]),
    "glaive as text": (
        {"system": "SYSTEM: You are a helpful assistant", "chat": "USER: q ASSISTANT: a"},
        "messages",
        ["`system` (text), `chat` (text)", "no column `messages`"],
    ),
    "numbers": (
        {"a": 1, "b": None, "c": [], "d": {}},
        "messages",
        ["`b` (null), `c` (an empty list), `d` (an object)"],
    ),
    "nothing": ({}, "messages", ["has no columns"]),
    "only chosen": ({"prompt": "q", "chosen": "a"}, "preference", ["no column `rejected`"]),
    "an ill prompt": ({"prompt": "q", "completion": {"a": 1}}, "prompt_completion", ["`completion` an object"]),
}


@pytest.mark.parametrize(("row", "format", "parts"), NEAREST.values(), ids=NEAREST.keys())
def test_what_fits_nothing_comes_nearest_to_something(row, format, parts):
    with pytest.raises(UserError) as caught:
        detect_format([row])
    message = str(caught.value)
    assert message.startswith("no format fits the first row, which has ")
    assert f"Format `{format}` comes nearest, but: " in message
    for part in parts:
        assert part in message
    found, why = nearest_format(row)
    assert (found, bool(why)) == (format, True)


def test_no_rows():
    with pytest.raises(UserError, match=r"no rows to tell the format from\. Fix: set `format`"):
        detect_format([])

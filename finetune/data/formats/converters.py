"""The formats: a function from a row to a sample and a row in `FORMATS`, from which reading, `columns`, detection and
hints follow."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from finetune.data.formats.answers import answered, preference_of
from finetune.data.formats.messages import (
    as_context,
    check_answers,
    context_of,
    file_reference,
    read_messages,
    read_turn,
    to_conversation,
)
from finetune.data.formats.token_rows import ids_and_mask
from finetune.data.formats.tools import Tool, read_tools
from finetune.data.formats.values import (
    Misfit,
    Row,
    closest,
    columns_of,
    from_json,
    has_value,
    json_object,
    kind,
    mapping,
    names,
    number,
    optional_text,
    shown,
)
from finetune.data.formats.values import text as text_of
from finetune.data.samples import (
    FILE,
    BadRow,
    Conversation,
    Ids,
    Labelled,
    MediaKind,
    Message,
    Preference,
    PromptCompletion,
    PromptOnly,
    Ranked,
    Reference,
    Sample,
    Text,
)
from finetune.errors import UserError
from finetune.recipe.schema import check_template_arguments


class FileColumn(NamedTuple):
    """Columns with a chat row's files of a kind, a list or one, and the mark that stands for each in its texts, in the
    order of the list: LLaVA's, which LLaMA-Factory and ms-swift have as well."""

    kind: MediaKind
    several: str
    one: str
    mark: str


FILES = (
    FileColumn("image", "images", "image", "<image>"),
    FileColumn("audio", "audios", "audio", "<audio>"),
    FileColumn("video", "videos", "video", "<video>"),
)
IMAGES = FILES[0].several
OF_FILES = tuple(name for column in FILES for name in (column.several, column.one))

# Of the chat template's variables, for a row; the other name is TRL's (docs "Dataset formats and types").
ARGUMENTS, OTHER_ARGUMENTS = "chat_template_arguments", ("chat_template_kwargs",)
READ_BY_MANY = (*OF_FILES, ARGUMENTS, *OTHER_ARGUMENTS)  # without being a field of each
CHAT = ("tools", "system", ARGUMENTS, *(column.several for column in FILES))  # of every format of chat


def messages(row: Row) -> Conversation:
    """messages: [{role: system | developer | user | assistant | tool, content, ...}, ...]; optional tools, system"""
    return context_of(read_messages(_field(row, "messages"), "messages"), *_system_and_tools(row))


def sharegpt(row: Row) -> Conversation:
    """conversations: [{from: system | human | gpt | function_call | observation, value}, ...]; also tools, system"""
    turns = read_messages(_field(row, "conversations"), "conversations", read_turn)
    return context_of(turns, *_system_and_tools(row))


def alpaca(row: Row) -> Conversation:
    """instruction, output; optional input (below the instruction, after an empty line), system, and history

    history: [[question, answer], ...] before the instruction; these answers are answers like the last, so
    `objective.train_on` says whether they are trained.
    """
    system, tools = _system_and_tools(row)
    extra = optional_text(row.get("input"), "`input`")
    instruction, output = _text_field(row, "instruction"), _text_field(row, "output")
    history = row["history"] if has_value(row.get("history")) else []
    if not isinstance(history, list):
        raise BadRow(f"`history` is {kind(history)}; expected a list of [question, answer]")
    turns = []
    for i, pair in enumerate(history):
        if not isinstance(pair, list) or len(pair) != 2:
            size = f" of {len(pair)}" if isinstance(pair, list) else ""
            raise BadRow(f"history[{i}] is {kind(pair)}{size}; expected [question, answer]")
        question, answer = (text_of(part, f"history[{i}][{side}]") for side, part in enumerate(pair))
        turns += [Message("user", question), Message("assistant", answer)]
    turns += [Message("user", f"{instruction}\n\n{extra}" if extra else instruction), Message("assistant", output)]
    return to_conversation(turns, system, tools)


def prompt_completion(row: Row) -> Conversation | PromptCompletion:
    """prompt and completion, both text or both messages; only the completion is trained; optional tools, system"""
    if row.get("label") is False:  # as data sets of marked answers say it
        raise BadRow("`label` is false: the completion is marked as a bad one, and would be trained on; leave it out")
    return _completion(row)


def _completion(row: Row) -> Conversation | PromptCompletion:
    prompt, completion = _field(row, "prompt"), _field(row, "completion")
    system, tools = _system_and_tools(row)
    if isinstance(prompt, str) and isinstance(completion, str):
        pair = PromptCompletion(text_of(prompt, "`prompt`"), text_of(completion, "`completion`"))
        # Without these it stays a pair of texts, which needs no chat template.
        return to_conversation(pair.as_conversation().messages, system, tools) if system or tools else pair
    if not isinstance(prompt, list) or not isinstance(completion, list):
        raise _of_two_kinds({"prompt": prompt, "completion": completion})
    before, after = read_messages(prompt, "prompt"), read_messages(completion, "completion")
    if not any(message.role == "assistant" for message in after):
        raise BadRow("`completion` has no assistant message, so there is nothing to train on")
    return to_conversation([*as_context(before), *after], system, tools)


def prompt(row: Row) -> PromptOnly:
    """prompt: text, or messages that do not end with an answer; optional tools, system"""
    value, (system, tools) = _field(row, "prompt"), _system_and_tools(row)
    if isinstance(value, str):
        conversation = context_of([Message("user", text_of(value, "`prompt`"))], system, tools)
        return PromptOnly(conversation, None if system or tools else value)
    messages = read_messages(value, "prompt")
    if messages[-1].role == "assistant":
        raise BadRow("`prompt` ends with an answer; expected the messages before it, or all under `messages`")
    return PromptOnly(context_of(messages, system, tools))


def preference(row: Row) -> Preference:
    """chosen and rejected, each text or messages, after `prompt` or a beginning they share; optional tools, system,
    and margin, a number: by how much the chosen one is better"""
    chosen, rejected = _field(row, "chosen"), _field(row, "rejected")
    prompt = row.get("prompt")
    if isinstance(chosen, Mapping) and isinstance(rejected, Mapping):  # LLaMA-Factory's, data/README.md "Preference"
        chosen, rejected = [chosen], [rejected]
        prompt = row["conversations"] if has_value(row.get("conversations")) else prompt
    if type(chosen) is not type(rejected) or not isinstance(chosen, str | list):
        raise _of_two_kinds({"chosen": chosen, "rejected": rejected})
    margin = 0.0 if row.get("margin") is None else number(row["margin"], "`margin`")
    return replace(preference_of(prompt, chosen, rejected, *_system_and_tools(row)), margin=margin)


# Spellings of `winner`, in lower case. No numbers: 1 is the first answer if they count from 1, the second from 0.
WINNERS = {
    **dict.fromkeys(("a", "answer_a", "response_a", "model_a", "output_a", "left", "first", "chosen_a"), "a"),
    **dict.fromkeys(("b", "answer_b", "response_b", "model_b", "output_b", "right", "second", "chosen_b"), "b"),
}


def comparison(row: Row) -> Preference:
    """answer_a and answer_b, each text or messages, after `prompt` or a beginning they share; winner: a or b; optional
    tools, system"""
    first, second, winner = (_field(row, name) for name in ("answer_a", "answer_b", "winner"))
    if not isinstance(winner, str):
        raise (BadRow if winner is None or winner in (0, 1, 2) else Misfit)(f"`winner` is {shown(winner)}; {_A_OR_B}")
    if winner.strip().lower().startswith("tie"):
        raise BadRow(f"`winner` is {shown(winner)}, so there is nothing to prefer")
    if (side := WINNERS.get(winner.strip().lower().replace(" ", "_"))) is None:
        raise BadRow(f"`winner` is {shown(winner)}; {_A_OR_B}")
    chosen, rejected = (first, second) if side == "a" else (second, first)
    return preference({**row, "chosen": chosen, "rejected": rejected})


_A_OR_B = "expected a or b, for the better of `answer_a` and `answer_b`"


def ranked(row: Row) -> Ranked:
    """prompt, responses: [text or messages, ...], scores: [number, ...], higher is better; optional tools, system"""
    prompt, responses, scores = (_field(row, name) for name in ("prompt", "responses", "scores"))
    for name, value in (("responses", responses), ("scores", scores)):
        if not isinstance(value, list):
            raise (BadRow if value is None else Misfit)(f"`{name}` is {kind(value)}; expected a list")
    if len(responses) != len(scores):
        raise BadRow(f"`responses` has {len(responses)} items, but `scores` {len(scores)}; expected one score for each")
    values = tuple(number(score, f"scores[{i}]") for i, score in enumerate(scores))
    if len(set(values)) < 2:
        problem = "equal" if values else "missing"
        raise BadRow(f"all scores are {problem}, so there is nothing to prefer; expected at least two that differ")
    system, tools = _system_and_tools(row)
    answers = [answered(prompt, one, f"responses[{i}]", system, tools) for i, one in enumerate(responses)]
    return Ranked(tuple(answers), values)


def unpaired(row: Row) -> Labelled:
    """prompt and completion, as in prompt_completion, or messages that end with the answer; label: true or false"""
    label = _field(row, "label")
    if type(label) not in (bool, int) or label not in (0, 1):
        raise BadRow(f"`label` is {shown(label)}; expected true (a good answer) or false (a bad one), or 1 or 0")
    if not has_value(row.get("messages")):
        return Labelled(_completion(row), bool(label))
    system, tools = _system_and_tools(row)
    *before, answer = read_messages(row["messages"], "messages")
    if answer.role != "assistant":
        raise BadRow(f"`messages` ends with a message of {answer.role}; expected the assistant's that `label` is about")
    return Labelled(to_conversation([*as_context(before), answer], system, tools), bool(label))


def classification(row: Row) -> Labelled:
    """label: a name or an index of `objective.labels`; text, or messages; with messages optional tools, system"""
    label = _field(row, "label")
    if type(label) not in (int, str) or label == "":
        raise BadRow(f"`label` is {shown(label)}; expected a name of `objective.labels`, or its index from 0")
    if not has_value(row.get("messages")):
        return Labelled(Text(_text_field(row, "text")), label)
    if has_value(row.get("text")):
        raise BadRow("the row has `text` and `messages`; keep the one that `label` is about")
    return Labelled(context_of(read_messages(row["messages"], "messages"), *_system_and_tools(row)), label)


def tokens(row: Row) -> Ids:
    """input_ids; optional labels, or trained | completion_mask | assistant_masks (0 or 1); all are trained without"""
    return ids_and_mask(_field(row, "input_ids"), row)


def speech(row: Row) -> Conversation:
    """audio and text, its transcript; optional prompt (asked about it), system"""
    system, tools = _system_and_tools(row)
    sound = Reference("audio", file_reference("audio", _field(row, "audio"), "`audio`"))
    asked = FILE + optional_text(row.get("prompt"), "`prompt`")
    return to_conversation(
        [Message("user", asked, media=(sound,)), Message("assistant", _text_field(row, "text"))], system, tools
    )


def text(row: Row) -> Text:
    """text"""
    return Text(_text_field(row, "text"))


@dataclass(frozen=True)
class Format:
    """A format's reader, the fields that it reads of a row, and how `format: auto` detects it."""

    read: Callable[[Row], Sample]
    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    content: str = ""  # of the required columns, in the line that reports the detected format
    # If a row fits several formats the one of the lowest rank is meant: a column that only this format has says
    # more than one that comes along, such as the `prompt` and `text` next to `messages`.
    rank: int = 0
    # field: column of datasets that call them otherwise; all columns of a set have to be there.
    other_names: tuple[Mapping[str, str], ...] = ()
    if_taken: bool = False  # detected only for an objective that takes it: other formats' rows have its columns

    @property
    def fields(self) -> tuple[str, ...]:
        return self.required + self.optional


FORMATS: dict[str, Format] = {
    "messages": Format(
        messages,
        ("messages",),
        CHAT,
        "lists of role and content",
        rank=1,
        other_names=tuple({"messages": name} for name in ("conversation", "conversations", "dialog", "dialogue")),
    ),
    "sharegpt": Format(
        sharegpt,
        ("conversations",),
        CHAT,
        "lists of from and value",
        rank=1,
        other_names=tuple({"conversations": name} for name in ("conversation", "messages", "dialog", "dialogue")),
    ),
    "alpaca": Format(
        alpaca,
        ("instruction", "output"),
        ("input", "history", *CHAT),
        "an instruction and its answer",
        rank=2,
        other_names=(
            {"output": "response"},
            {"input": "context", "output": "response"},  # dolly-15k
            {"instruction": "question", "input": "context", "output": "answer"},
        ),
    ),
    "prompt_completion": Format(
        prompt_completion,
        ("prompt", "completion"),
        CHAT,
        "a prompt and its completion",
        rank=2,
        other_names=(
            {"completion": "response"},
            {"prompt": "question", "completion": "answer"},  # gsm8k
            {"prompt": "question", "completion": "response"},
            {"prompt": "question", "completion": "response", "system": "system_prompt"},  # OpenOrca
            {"prompt": "query", "completion": "response"},  # MetaMathQA
            {"prompt": "problem", "completion": "solution"},  # MATH
            {"prompt": "input", "completion": "output"},
        ),
    ),
    "prompt": Format(
        prompt,
        ("prompt",),
        CHAT,
        "prompts",
        rank=2,
        other_names=tuple({"prompt": name} for name in ("question", "query", "problem", "instruction", "input")),
        if_taken=True,
    ),
    "speech": Format(
        speech,
        ("audio", "text"),
        ("prompt", "system", ARGUMENTS),
        "sound files and their transcripts",
        rank=2,
        other_names=({"text": "sentence"}, {"text": "transcription"}, {"text": "transcript"}),  # Common Voice, FLEURS
    ),
    "text": Format(text, ("text",), content="text", rank=3),
    "tokens": Format(
        tokens,
        ("input_ids",),
        ("labels", "trained", "completion_mask", "assistant_masks", "attention_mask", "position_ids"),
        "token ids",
        rank=3,
        other_names=({"input_ids": "tokens"}, {"input_ids": "token_ids"}),
    ),
    "preference": Format(
        preference,
        ("chosen", "rejected"),
        ("prompt", "margin", "conversations", *CHAT),
        "a better and a worse answer",
        rank=0,
        other_names=({"prompt": "question"}, {"prompt": "input"}, {"prompt": "instruction"}),  # orca_dpo_pairs
    ),
    "comparison": Format(
        comparison,
        ("answer_a", "answer_b", "winner"),
        ("prompt", "margin", *CHAT),
        "two answers and the better one",
        rank=0,
        other_names=(
            {"prompt": "question"},
            {"answer_a": "response_a", "answer_b": "response_b"},
            {"prompt": "question", "answer_a": "response_a", "answer_b": "response_b"},
            {"answer_a": "conversation_a", "answer_b": "conversation_b"},  # lmsys/chatbot_arena_conversations
        ),
    ),
    "ranked": Format(ranked, ("prompt", "responses", "scores"), CHAT, "answers and their scores", rank=0),
    "unpaired": Format(
        unpaired,
        ("label",),
        ("prompt", "completion", "messages", *CHAT),
        "whether an answer is good",
        rank=0,
        if_taken=True,
    ),
    "classification": Format(
        classification,
        ("label",),
        ("text", "messages", *CHAT),
        "the class of a text",
        rank=0,
        other_names=({"text": "sentence"},),  # GLUE
        if_taken=True,
    ),
}


def check_columns(format: str, columns: Mapping[str, str] | None) -> None:
    """Raises UserError for a key of `columns` that the format has no field for; under auto, no one format has all."""
    if format in FORMATS:
        fields = FORMATS[format].fields
    else:
        fields = tuple(dict.fromkeys(name for one in FORMATS.values() for name in one.fields))
    for name in columns or {}:
        if name not in fields:
            close = closest(name, fields, cutoff=0.5)
            fix = f"correct the name; did you mean `{close}`?" if close else f"name one of its fields {names(fields)}"
            raise UserError(
                f"columns: format `{format}` has no field `{name}`. `columns` is written as field: column. Fix: {fix}"
            )
    if format not in FORMATS and not any(set(columns or ()) <= set(one.fields) for one in FORMATS.values()):
        raise UserError(f"columns: no format has all of the fields {names(columns or ())}. Fix: set `format`")


def read(row: Row, format: str, columns: Mapping[str, str] | None = None, prompts: bool = False) -> Sample:
    """Returns the sample in a row; raises BadRow, which is a Misfit if the row is not of this format at all.

    prompts: a conversation that does not end with an answer is a prompt, for an objective that samples answers.
    """
    if columns:
        missing = [column for column in columns.values() if column not in row]
        if missing:
            raise Misfit(f"`columns` names {names(missing)}, but the row has {columns_of(row)}")
        # A column that is one field is no other: `instruction: input` has no `input`.
        taken = set(columns.values())
        rest = {name: value for name, value in row.items() if name not in taken}
        row = {**rest, **{field: row[column] for field, column in columns.items()}}
    sample, fields = FORMATS[format].read(row), FORMATS[format].fields
    if isinstance(sample, Conversation):
        if prompts and sample.messages[-1].role != "assistant":
            sample = PromptOnly(sample)
        else:
            check_answers(sample)
    if IMAGES in fields:
        sample = with_files_of(sample, row)
    given = [name for name in (ARGUMENTS, *OTHER_ARGUMENTS) if name in row and has_value(row[name])]
    if not given or ARGUMENTS not in fields:
        return sample
    if len(given) > 1:
        raise BadRow(f"the row has {names(given)}, which are the same; keep one")
    name, value = given[0], row[given[0]]
    expected = 'values of the chat template\'s variables, such as {"enable_thinking": false}'
    decoded = mapping(from_json(value, name) if isinstance(value, str) else value, name, expected)
    try:
        arguments = check_template_arguments(json_object(decoded, name))
    except ValueError as error:
        raise BadRow(f"{name}: {error}") from None
    return _in_conversations(sample, lambda one: replace(_as_conversation(one), template_arguments=arguments))


def with_files_of(sample: Any, row: Row) -> Any:
    """Returns a sample with the files of its row's columns in their places: marks in texts, and parts without a
    reference. Raises BadRow if they do not fit."""
    columns = [found for column in FILES if (found := _column_of(column, row)) is not None]
    return _in_conversations(sample, lambda part: _with_files(part, columns)) if columns else sample


class _Column(NamedTuple):
    """A row's files of one kind."""

    kind: MediaKind
    several: str  # the column's name, if it is a list
    mark: str
    sources: list[str | bytes]
    must_fit: bool  # whether files without a place are an error


def _column_of(column: FileColumn, row: Row) -> _Column | None:
    several, one, sources = row.get(column.several), row.get(column.one), list[str | bytes]()
    if has_value(several):
        values = several if isinstance(several, list) else [several]
        sources = [file_reference(column.kind, value, f"{column.several}[{i}]") for i, value in enumerate(values)]
    elif not has_value(one):
        return None
    elif isinstance(one, str | bytes | Mapping):
        # In some corpora `image` is a name or a number: it is an image if the texts have a place for it.
        sources = [file_reference(column.kind, one, column.one)]
    return _Column(column.kind, column.several, column.mark, sources, has_value(several))


def _with_files(sample: Conversation | PromptCompletion, columns: list[_Column]) -> Conversation | PromptCompletion:
    kinds: dict[str, MediaKind] = {column.mark: column.kind for column in columns}
    marks, must_fit = re.compile("|".join(map(re.escape, kinds))), any(column.must_fit for column in columns)
    if isinstance(sample, PromptCompletion) and not must_fit and not marks.search(sample.prompt):
        return sample
    conversation, messages = _as_conversation(sample), []
    for i, message in enumerate(conversation.messages):
        if not message.media and (found := marks.findall(message.content)):
            if FILE in message.content:
                raise BadRow(f"message {i} has the character U+FFFC, which stands for a file here: take it out")
            references = tuple(Reference(kinds[mark], None) for mark in found)
            message = replace(message, content=marks.sub(FILE, message.content), media=references)
        messages.append(message)
    changed = False
    for column in columns:
        places = sum(message.media.count(Reference(column.kind, None)) for message in messages)
        if not places and not column.must_fit:
            continue
        if places != len(column.sources):
            raise BadRow(
                f"the row has {len(column.sources)} {column.several}, but its messages {places} places for them "
                f"({column.mark})"
            )
        messages, changed = _filled(messages, column), True
    return replace(conversation, messages=tuple(messages)) if changed else conversation


def _filled(messages: list[Message], column: _Column) -> list[Message]:
    """Returns the messages with the column's files in the places of their kind, in order."""
    unused, empty = iter(column.sources), Reference(column.kind, None)
    return [
        replace(
            message,
            media=tuple(Reference(column.kind, next(unused)) if one == empty else one for one in message.media),
        )
        for message in messages
    ]


def _as_conversation(sample: Conversation | PromptCompletion) -> Conversation:
    return sample.as_conversation() if isinstance(sample, PromptCompletion) else sample


def _in_conversations(sample: Any, change: Callable[[Conversation | PromptCompletion], Any]) -> Any:
    """Returns a sample with each conversation, or pair of texts, in it as `change` returns it."""
    if isinstance(sample, Conversation | PromptCompletion):
        return change(sample)
    if isinstance(sample, PromptOnly):
        return replace(sample, conversation=change(sample.conversation))
    if isinstance(sample, Preference):
        return replace(sample, chosen=change(sample.chosen), rejected=change(sample.rejected))
    if isinstance(sample, Ranked):
        return replace(sample, answers=tuple(map(change, sample.answers)))
    return replace(sample, sample=_in_conversations(sample.sample, change)) if isinstance(sample, Labelled) else sample


# --- fields of a row


def _field(row: Row, name: str) -> Any:
    if name not in row:
        hint = f"set `columns: {{{name}: {closest(name, row) or '<your column>'}}}` if it has another name"
        raise Misfit(f"no column `{name}`; the row has {columns_of(row)}; {hint}")
    return row[name]


def _text_field(row: Row, name: str) -> str:
    value = _field(row, name)
    if not isinstance(value, str) and value is not None:
        raise Misfit(f"`{name}` is {kind(value)}; expected text")
    return text_of(value, f"`{name}`")


def _of_two_kinds(fields: Mapping[str, Any]) -> BadRow:
    """Returns the error for two fields that have to be of one kind."""
    kinds = " and ".join(f"`{name}` {'is ' if i == 0 else ''}{kind(fields[name])}" for i, name in enumerate(fields))
    is_empty = any(value is None for value in fields.values())
    return (BadRow if is_empty else Misfit)(f"{kinds}; expected text for both, or a list of messages for both")


def _system_and_tools(row: Row) -> tuple[str, tuple[Tool, ...]]:
    return optional_text(row.get("system"), "`system`"), read_tools(row.get("tools"))

"""Messages, and the conversations they form: the order of speakers, and the answers that are trained.

A conversation is, with at least one answer to train on:

    [system | developer]  user  assistant  user  assistant ...
                          user  assistant with n calls  tool x n  assistant ...
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from finetune.data.formats.tools import Call, Tool, function_of, read_calls, read_turn_calls
from finetune.data.formats.values import (
    Misfit,
    Row,
    has_value,
    keys_of,
    kind,
    mapping,
    names,
    only_keys,
    optional_text,
    shown,
    text,
)
from finetune.data.samples import FILE, BadRow, Conversation, MediaKind, Message, Reference, listed

ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",  # OpenAI's name of it until 2023
}
SPEAKERS = {  # of sharegpt; which names are in use: the chat models' own, and those of tool-calling datasets
    "system": "system",
    "developer": "developer",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "function_call": "assistant",  # its value is the JSON of the calls
    "tool_call": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
}
CALLING = ("function_call", "tool_call")
FIRST = ("system", "developer")

# Metadata of a message, not content. Every other key with a value is refused.
METADATA = (
    # of records
    *("id", "message_id", "parent_id", "conversation_id", "index", "idx", "turn", "turn_identifier"),
    *("timestamp", "created_at", "date", "source", "model", "model_name", "language", "lang"),
    # of moderation and its logs (WildChat)
    *("redacted", "toxic", "toxicity", "country", "state", "hashed_ip", "header", "finish_reason"),
    # of content that is also given as text
    *("tokens", "num_tokens", "token_count", "markdown"),
)
REASONING = ("reasoning_content", "thinking", "reasoning")  # DeepSeek's and Qwen's, gpt-oss's, OpenRouter's name
TRAINED = ("train", "weight", "loss_weight")  # ours, OpenAI's, LLaMA-Factory's
KEYS = (
    *("role", "content", "name", "tool_calls", "tool_call_id", "function_call"),
    *(*TRAINED, *REASONING, *METADATA),
)
SHAREGPT_KEYS = ("from", "value", "name", *TRAINED, *METADATA)


# --- messages


def read_message(value: Any, where: str) -> Message:
    """Reads {role, content} and the optional keys of a message."""
    item = _with_keys(value, "role", "content", where)
    role = _role(item["role"], ROLES, f"{where}.role")
    only_keys(item, KEYS, where)
    part_calls: tuple[Call, ...] = ()
    if isinstance(item.get("content"), list):
        item, part_calls = _from_parts(item, f"{where}.content")
    keys = [key for key in ("tool_calls", "function_call") if has_value(item.get(key))]
    if part_calls and (keys or role != "assistant"):
        raise BadRow(f"{where} is from {role} and has {names(['content', *keys])} with calls; keep an assistant's")
    if part_calls or not keys:
        calls = part_calls
    elif role != "assistant":
        raise BadRow(f"{where} is from {role} and has {names(keys)}; only an assistant calls tools")
    elif len(keys) == 2:
        raise BadRow(f"{where} has {names(keys)}, the new and the old name of the same; keep one")
    elif keys == ["function_call"]:
        calls = ({"type": "function", "function": function_of(item["function_call"], f"{where}.function_call")},)
    else:
        calls = read_calls(item["tool_calls"], f"{where}.tool_calls")
    content, images = _content(item.get("content"), role, f"{where}.content", has_calls=bool(calls))
    train = _train(item, role, where)
    reasoning = {key: text(item[key], f"{where}.{key}") for key in REASONING if has_value(item.get(key))}
    if reasoning and role != "assistant":
        raise BadRow(f"{where} is from {role} and has {names(reasoning)}; only an assistant thinks aloud")
    if len(set(reasoning.values())) > 1:
        raise BadRow(f"{where} has {names(reasoning)}, which say different things; keep one")
    name = optional_text(item.get("name"), f"{where}.name") or None
    call_id = optional_text(item.get("tool_call_id"), f"{where}.tool_call_id") or None
    if call_id and role != "tool":
        raise BadRow(f"{where} is from {role} and has `tool_call_id`; only a tool answers calls")
    return Message(role, content, train, next(iter(reasoning.values()), None), calls, name, call_id, images)


def read_turn(value: Any, where: str) -> Message:
    """Reads {from, value} and the optional keys of a turn of sharegpt."""
    item = _with_keys(value, "from", "value", where)
    role = _role(item["from"], SPEAKERS, f"{where}.from")
    only_keys(item, SHAREGPT_KEYS, where)
    train, name = _train(item, role, where), optional_text(item.get("name"), f"{where}.name") or None
    if item["from"] in CALLING:
        return Message(role, "", train=train, tool_calls=read_turn_calls(item["value"], f"{where}.value"), name=name)
    content, images = _content(item["value"], role, f"{where}.value")
    return Message(role, content, train=train, name=name, media=images)


def read_messages(value: Any, where: str, read: Callable[[Any, str], Message] = read_message) -> list[Message]:
    """Reads [{role, content, ...}, ...]; with `read_turn` [{from, value, ...}, ...].

    Until datasets 4 such a list, if its feature was a `Sequence`, became {role: [...], content: [...]}.
    """
    if isinstance(value, Mapping) and value and all(isinstance(items, list) for items in value.values()):
        lengths = {len(items) for items in value.values()}
        if len(lengths) == 1:
            value = [dict(zip(value, items, strict=True)) for items in zip(*value.values(), strict=True)]
    if not isinstance(value, list):
        raise (BadRow if value is None else Misfit)(f"`{where}` is {kind(value)}; expected a list of messages")
    if not value:
        raise BadRow(f"`{where}` is an empty list; expected at least a user and an assistant message")
    return [read(item, f"{where}[{i}]") for i, item in enumerate(value)]


def _with_keys(value: Any, first: str, second: str, where: str) -> Row:
    """Checks for the two keys of a message; a message that only calls may leave out its content."""
    if not isinstance(value, Mapping):
        raise Misfit(f"{where} is {kind(value)} ({shown(value)}); expected an object with `{first}` and `{second}`")
    missing = [key for key in (first, second) if key not in value]
    if "content" in missing and (has_value(value.get("tool_calls")) or has_value(value.get("function_call"))):
        missing.remove("content")
    if missing:
        raise Misfit(f"{where} has no {names(missing)}; it has {keys_of(value)}")
    return value


def _role(value: Any, roles: dict[str, str], where: str) -> str:
    if not isinstance(value, str) or value not in roles:
        raise BadRow(f"{where} is {shown(value)}; expected {', '.join(list(roles)[:-1])} or {list(roles)[-1]}")
    return roles[value]


# Keys of the file in a part; the first is datasets' and Qwen's name, the others transformers' (docs "chat templates,
# multimodal"), then OpenAI's for images and, of sound, Qwen2-Audio's, of video, vLLM's; the last OpenAI's for sound.
_OF_FILE = ("url", "path", "base64")
_FILE_KEYS: dict[MediaKind, tuple[str, ...]] = {
    "image": ("image", *_OF_FILE, "image_url"),
    "audio": ("audio", *_OF_FILE, "audio_url", "input_audio"),
    "video": ("video", *_OF_FILE, "video_url"),
}
_KINDS: dict[Any, MediaKind] = {key: kind for kind, keys in _FILE_KEYS.items() for key in keys if key not in _OF_FILE}


def _content(value: Any, role: str, where: str, *, has_calls: bool = False) -> tuple[str, tuple[Reference, ...]]:
    """Returns a message's text, with `FILE` for each file, and the files.

    Parts of type text are joined as chat templates join them, without a separator.
    """
    files: list[Reference] = []
    if isinstance(value, list) and value:
        value = "".join(_part(part, f"{where}[{i}]", files) for i, part in enumerate(value))
    if has_calls and not has_value(value):
        return "", ()
    if files and value.count(FILE) != len(files):
        raise BadRow(f"{where} has the character U+FFFC in a text, which stands for a file here: take it out")
    # A command that prints nothing has still answered.
    return text(value, where, may_be_blank=role == "tool"), tuple(files)


def _part(value: Any, where: str, files: list[Reference]) -> str:
    part = mapping(value, where, 'a part such as {"type": "text", "text": ...}')
    type_ = part.get("type")
    if isinstance(type_, str) and type_ in _KINDS:
        of_kind = _KINDS[type_]
        only_keys(part, ("type", "index", *_FILE_KEYS[of_kind]), where)
        given = [key for key in _FILE_KEYS[of_kind] if has_value(part.get(key))]
        if len(given) > 1:
            raise BadRow(f"{where} has {names(given)}; keep one")
        read = _input_audio if given == ["input_audio"] else partial(file_reference, of_kind)
        source = read(part[given[0]], f"{where}.{given[0]}") if given else None
        files.append(Reference(of_kind, source))
        return FILE
    if type_ != "text":
        problem = f"has no `type`; it has {keys_of(part)}" if type_ is None else f"is of type {shown(type_)}"
        raise BadRow(f"{where} {problem}; only parts of type 'text', 'image', 'audio' and 'video' are supported")
    only_keys(part, ("type", "text"), where)
    return text(part.get("text"), f"{where}.text", may_be_blank=True)


_FILE_NAMES: dict[MediaKind, str] = {"image": "an image", "audio": "a sound file", "video": "a video"}


def file_reference(kind: MediaKind, value: Any, where: str) -> str | bytes:
    """Returns a path, a data URL or the bytes of a file; also from an object with one of them, as `datasets` has.

    Of a video also from a list of its frames' paths, as Qwen's and LLaMA-Factory's rows have it: see `samples.listed`.
    """
    if kind == "video" and isinstance(value, list) and value and all(isinstance(one, str) for one in value):
        return listed(value)
    if isinstance(value, Mapping):
        only_keys(value, ("bytes", "path", "url"), where)
        # datasets keeps the name next to the bytes.
        value = next((value[key] for key in ("bytes", "path", "url") if has_value(value.get(key))), None)
    if (isinstance(value, bytes) and value) or (isinstance(value, str) and value.strip()):
        return value
    expected = f"the path of {_FILE_NAMES[kind]}, a data URL, or the bytes of its file"
    raise BadRow(f"{where} is {shown(value)}; expected {expected}")


def _input_audio(value: Any, where: str) -> str:
    """Returns a data URL for OpenAI's {data, format}, whose data is base64.

    https://platform.openai.com/docs/api-reference/chat/create
    """
    part = mapping(value, where, 'an object such as {"data": BASE64, "format": "wav"}')
    only_keys(part, ("data", "format"), where)
    data, format = (text(part.get(key), f"{where}.{key}") for key in ("data", "format"))
    return f"data:audio/{format};base64,{data}"


def _from_parts(item: Row, where: str) -> tuple[Row, tuple[Call, ...]]:
    """Returns LLaMA-Factory's content, a list of {type: text | reasoning | tool_call, value}, as text and reasoning,
    and its calls. Other messages stay as they are.

    https://github.com/hiyouga/LLaMA-Factory, src/llamafactory/v1/utils/types.py
    """
    parts = item["content"]
    if not any(isinstance(part, Mapping) and part.get("value") is not None for part in parts):
        return item, ()
    values: dict[str, list[str]] = {"text": [], "reasoning": [], "tool_call": []}
    for i, part in enumerate(parts):
        part = mapping(part, f"{where}[{i}]", 'a part such as {"type": "text", "value": ...}')
        only_keys(part, ("type", "value"), f"{where}[{i}]")
        if part.get("type") not in list(values):  # it may be anything
            raise BadRow(f"{where}[{i}] is of type {shown(part.get('type'))}; only {names(values)} are supported")
        values[part["type"]].append(text(part.get("value"), f"{where}[{i}].value", may_be_blank=True))
    message = {**item, "content": "".join(values["text"])}
    if values["reasoning"]:
        if others := [key for key in REASONING if has_value(item.get(key))]:
            raise BadRow(f"{where} has reasoning, and so has {names(others)}; keep one")
        message["reasoning_content"] = "".join(values["reasoning"])
    return message, tuple(call for value in values["tool_call"] for call in read_turn_calls(value, where))


def _train(item: Row, role: str, where: str) -> bool:
    """Returns whether a message is trained, by a key of `TRAINED`; without one, every assistant's message is.

    weight: https://platform.openai.com/docs/guides/supervised-fine-tuning, 0 or 1 there as well.
    """
    given = {key: item[key] for key in TRAINED if item.get(key) is not None}
    for key, value in given.items():
        if key == "train" and not isinstance(value, bool):
            raise BadRow(f"{where}.train is {shown(value)}; expected true or false")
        if key != "train" and (isinstance(value, bool) or value not in (0, 1)):
            raise BadRow(f"{where}.{key} is {shown(value)}; expected 0 or 1: a share of a message is not supported")
    values = {bool(value) for value in given.values()}
    if len(values) == 2:
        both = " and its ".join(f"{key} is {shown(value)}" for key, value in given.items())
        raise BadRow(f"{where}.{both}; keep one")
    if role == "assistant":
        return values != {False}
    if True in values:
        key = next(iter(given))
        raise BadRow(
            f"{where} is from {role} and has `{key}: {shown(item[key])}`; only an assistant's messages are trained "
            "(objective.train_on: all trains every token)"
        )
    return True  # without meaning: as if no key were given


# --- conversations


def to_conversation(messages: Sequence[Message], system: str = "", tools: tuple[Tool, ...] = ()) -> Conversation:
    """Returns a conversation with an answer to train on, after a row's `system`, if it is not among the messages."""
    conversation = context_of(messages, system, tools)
    check_answers(conversation)
    return conversation


def check_answers(conversation: Conversation) -> None:
    """Raises BadRow if a conversation has no answer to train on."""
    answers = [message for message in conversation.messages if message.role == "assistant"]
    if not answers:
        raise BadRow("no assistant message, so there is nothing to train on")
    if not any(message.train for message in answers):
        raise BadRow("every assistant message has `train: false` or `weight: 0`, so there is nothing to train on")


def context_of(messages: Sequence[Message], system: str = "", tools: tuple[Tool, ...] = ()) -> Conversation:
    """Returns a conversation that is only read: it may be without an answer."""
    # One system or developer message at most: templates that know both take the first, and some drop a second unseen.
    start = 1 if messages and messages[0].role in FIRST else 0
    before: Message | None = messages[0] if start else None
    waiting: list[str | None] = []  # ids of calls without an answer so far
    for i, message in enumerate(messages[start:], start):
        answers = before is not None and before.role in ("user", "tool")
        expected = "tool" if waiting else "assistant" if answers else "user"
        if message.role != expected:
            after = f"after {before.role}" if before else "first"
            why = _unanswered(waiting)
            if not waiting and message.role == "tool" and before and before.role == "tool":
                why = ": every call has its answer"
            elif not waiting and message.role == "tool" and before and before.role != "user":
                why = ": the message before it has no `tool_calls` to answer (calls written into its text are not seen)"
            raise BadRow(f"message {i} ({after}) is from {message.role}; expected {expected}{why}")
        if message.role != "tool":
            waiting = [call.get("id") for call in message.tool_calls]
        elif message.tool_call_id is None:
            waiting.pop(0)
        elif message.tool_call_id in waiting:
            waiting.remove(message.tool_call_id)
        else:
            ids = [id_ for id_ in waiting if id_]
            raise BadRow(
                f"message {i} (tool) answers the call {shown(message.tool_call_id)}; the calls that wait for an answer "
                + (f"are {names(ids)}" if ids else "have no `id`")
            )
        before = message
    if waiting and before and before.role == "tool":
        raise BadRow(f"the conversation ends at message {len(messages) - 1} (tool){_unanswered(waiting)}")
    first = messages[0]
    if not system or (first.role in FIRST and first.content == system):
        return Conversation(tuple(messages), tools)
    if first.role in FIRST:
        raise BadRow(
            f"`system` is {shown(system)}, but message 0 ({first.role}) is {shown(first.content)}; keep one of them"
        )
    return Conversation((Message("system", system), *messages), tools)


def as_context(messages: Sequence[Message]) -> list[Message]:
    """Marks messages as context: they are seen, not trained."""
    return [replace(message, train=False) if message.role == "assistant" else message for message in messages]


def _unanswered(waiting: list[str | None]) -> str:
    ids = [id_ for id_ in waiting if id_]
    return f"; calls without an answer so far: {len(waiting)}{f' ({names(ids)})' if ids else ''}" if waiting else ""

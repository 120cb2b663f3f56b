"""What a row says, whatever its format: a conversation, plain text, a prompt and its completion, ids, or a preference.

Formats make these; rendering turns them into tokens and masks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class BadRow(Exception):
    """A row that cannot be used: what was seen and what was expected. Whoever knows file and row adds them."""


@dataclass(frozen=True)
class Message:
    """One turn. Of an assistant, `content` may be empty where `tool_calls` are not."""

    role: str  # system | developer | user | assistant | tool
    content: str
    train: bool = True  # an assistant's: false leaves it as context; without meaning for the other roles
    reasoning: str | None = None  # what an assistant thought before it answered
    tool_calls: tuple[
        Mapping[str, Any], ...
    ] = ()  # {"type": "function", "id"?: ..., "function": {"name", "arguments"}}
    name: str | None = None  # of the tool that answers
    tool_call_id: str | None = None  # of the call that a tool answers

    def as_dict(self) -> dict[str, Any]:
        """As chat templates see it; keys without a value are absent."""
        found: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.reasoning is not None:
            # Both names are in use: Qwen's and DeepSeek's templates read the first, gpt-oss the second.
            found |= {"reasoning_content": self.reasoning, "thinking": self.reasoning}
        if self.tool_calls:
            found["tool_calls"] = [dict(call) for call in self.tool_calls]
        if self.name is not None:
            found["name"] = self.name
        if self.tool_call_id is not None:
            found["tool_call_id"] = self.tool_call_id
        return found


@dataclass(frozen=True)
class Conversation:
    """Messages in an order that makes sense, with at least one assistant message to train on."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()  # JSON schemas of the functions that may be called


@dataclass(frozen=True)
class Text:
    """Plain text, trained on whole."""

    text: str


@dataclass(frozen=True)
class PromptCompletion:
    """Two strings. With a chat template a user and an assistant message; without, one text after the other."""

    prompt: str
    completion: str

    def as_conversation(self) -> Conversation:
        return Conversation((Message("user", self.prompt), Message("assistant", self.completion)))


@dataclass(frozen=True)
class Ids:
    """Tokens as they are, with what is trained of them."""

    input_ids: tuple[int, ...]
    trained: tuple[bool, ...]  # as long; the first is never trained


@dataclass(frozen=True)
class Preference:
    """Two answers to the same prompt, the better one first."""

    chosen: Conversation | PromptCompletion
    rejected: Conversation | PromptCompletion


Sample = Conversation | Text | PromptCompletion | Ids | Preference

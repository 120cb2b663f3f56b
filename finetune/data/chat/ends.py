"""The tokens that end an assistant's turn under a chat template, found by rendering short conversations with it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedTokenizerBase

from finetune.data.chat.renderer import chat_of
from finetune.data.chat.template import Template
from finetune.data.chat.traits import ANSWER, QUESTION, THOUGHT, probe_call, probe_tool
from finetune.data.chat.turns import Chat, parts_of
from finetune.data.samples import BadRow, Conversation, Message
from finetune.errors import UserError


def turn_end_ids(tokenizer: PreTrainedTokenizerBase, template: Template) -> set[int]:
    """Ids of the tokens that end an answer and a tool call, whatever role the tokenizer gives them.

    Llama 3: <|eot_id|>, an added token that is not `eos_token` of its base; gpt-oss: <|return|> and <|call|>, not
    <|end|>, with which its reasoning ends. Empty where a template ends turns with text of several tokens.
    """
    chat, added = chat_of(tokenizer, template), set(tokenizer.added_tokens_decoder)
    end_of_turn = _ids(tokenizer, chat.traits.end_of_turn)
    whole = set(end_of_turn) if len(end_of_turn) == 1 else set()  # a token of the vocabulary may end turns as well
    last = {_ids(tokenizer, text)[-1] for text in _up_to_the_end(chat)}
    return last & (added | whole)


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: Any = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _up_to_the_end(chat: Chat) -> Iterator[str]:
    """Conversations up to where their last turn ends; none for what the template refuses."""
    question = Message("user", QUESTION)
    conversations = [
        Conversation((question, Message("assistant", ANSWER))),
        Conversation((question, Message("assistant", ANSWER, reasoning=THOUGHT))),
        Conversation((question, Message("assistant", "", tool_calls=(probe_call(),))), (probe_tool(),)),
    ]
    for conversation in conversations:
        try:
            text, spans = parts_of(chat, conversation, "assistant")[-1]
        except (BadRow, UserError):
            continue
        yield text[: spans[-1][1]]

"""Special tokens typed by a user, kept as text.

Training refuses rows with such texts (`Renderer`). In use anyone may type `<|im_end|>`, which must not end a turn:

    content    say <|im_end|>                       typed by a user
    hidden     say \\ue000                            one private character
    rendered   <|im_start|>user\\nsay \\ue000<|im_end|>\\n...
    ids        1 872 198 36339 27 91 318 ...        the turn's own tokens are 1 and 2; the typed ones are letters

Texts without special tokens have the ids of training: the tokenizer encodes them as usual.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerBase

from finetune.data.samples import Conversation, Message

_PRIVATE = (*range(0xE000, 0xF900), *range(0xF0000, 0xFFFFE))  # characters that Unicode gives no meaning
_TEXT_KEYS = (
    "content",
    "reasoning",
    "name",
    "tool_call_id",
    "tool_calls",
)  # keys of a message that a template may write
_ALIASES = 0x100000  # first character for a template's tokens


@dataclass(frozen=True)
class Hidden:
    """A conversation with a character in the place of each special token, and the token of each character."""

    conversation: Conversation
    typed: Mapping[str, str]


@dataclass(frozen=True)
class ControlTokens:
    """A tokenizer's special tokens, as written by a template and as typed by a user."""

    tokenizer: PreTrainedTokenizerBase

    @cached_property
    def _special(self) -> dict[str, tuple[int, AddedToken]]:
        added: dict[int, Any] = self.tokenizer.added_tokens_decoder
        return {token.content: (number, token) for number, token in added.items() if token.special and token.content}

    @cached_property
    def _typed(self) -> re.Pattern[str]:
        """Pattern of the tokens that must stay text; not the unknown token, which is a word in some corpora."""
        return _any_of([text for text in self._special if text != self.tokenizer.unk_token])

    def hide(self, conversation: Conversation) -> Hidden:
        """Returns a conversation with special tokens in its texts hidden."""
        contents = [{name: getattr(message, name) for name in _TEXT_KEYS} for message in conversation.messages]
        texts = "\n".join(_texts([conversation.tools, dict(conversation.template_arguments), contents]))
        tokens = dict.fromkeys(self._typed.findall(texts))
        free = (chr(number) for number in _PRIVATE if chr(number) not in texts)
        characters = dict(zip(tokens, free, strict=False))
        if not characters:
            return Hidden(conversation, {})

        def hidden(value: Any) -> Any:
            if isinstance(value, str):
                return self._typed.sub(lambda match: characters[match.group()], value)
            if isinstance(value, Mapping):
                return {hidden(key): hidden(item) for key, item in value.items()}
            return [hidden(item) for item in value] if isinstance(value, list | tuple) else value

        def without_tokens(message: Message) -> Message:
            texts = {name: hidden(getattr(message, name)) for name in _TEXT_KEYS[:-1]}
            return replace(message, **texts, tool_calls=tuple(map(hidden, message.tool_calls)))

        messages, tools = tuple(map(without_tokens, conversation.messages)), tuple(map(hidden, conversation.tools))
        typed = {character: token for token, character in characters.items()}
        return Hidden(Conversation(messages, tools, hidden(conversation.template_arguments)), typed)

    def ids(self, text: str, typed: Mapping[str, str]) -> list[int]:
        """Returns the tokens of a rendered text, with `typed` as the text of some characters."""
        if not typed:
            return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        backend, aliases, numbers = self._by_alias
        text = _any_of(aliases).sub(lambda match: aliases[match.group()], text)
        text = re.sub("|".join(typed), lambda match: typed[match.group()], text)
        return [numbers.get(number, number) for number in backend.encode(text, add_special_tokens=False).ids]

    @cached_property
    def _by_alias(self) -> tuple[Tokenizer, dict[str, str], dict[int, int]]:
        """Returns a tokenizer to which special tokens are text, and the characters that replace them:
        token -> character, and the character's id -> the token's."""
        fast: Any = self.tokenizer
        backend = Tokenizer.from_str(fast.backend_tokenizer.to_str())
        backend.no_truncation()
        backend.no_padding()
        aliases = {text: chr(_ALIASES + i) for i, text in enumerate(self._special)}
        kept = ("single_word", "lstrip", "rstrip")
        as_text = [
            AddedToken(aliases[text], **{name: getattr(token, name) for name in kept}, normalized=False, special=False)
            for text, (_, token) in self._special.items()
        ]
        backend.add_tokens(as_text)
        backend.encode_special_tokens = True
        numbers: Any = {backend.token_to_id(aliases[text]): number for text, (number, _) in self._special.items()}
        return backend, aliases, numbers


def _any_of(texts: Sequence[str] | Mapping[str, Any]) -> re.Pattern[str]:
    """Returns a pattern of any of the texts, longest first, as in tokenizers."""
    return re.compile("|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)) or r"(?!)")


def _texts(value: Any) -> list[str]:
    """Returns every text in a JSON value, including keys."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    return [text for item in value for text in _texts(item)] if isinstance(value, list | tuple) else []

"""Renders a sample to token ids and labels, with an exact mask under any chat template.

A conversation is rendered to text (`template.py`), the part that the model writes is marked by spans of characters
(`trained_spans.py`), and the text is tokenized with offsets (`encoding.py`). Under a ChatML-shaped template:

    text    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello<|im_end|>\\n
    ids      1 872 198 13048 2 198            1 77091 198          9707 2          198
    labels   - - - - - -                      - - -                9707 2          -      (- is -100)

Trained is the text that the model writes in use: from the end of the generation prompt through the end-of-turn.
Neither the header before it nor the newline after it. Labels are aligned with the ids; `batch.py` shifts them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from finetune.data.chat.encoding import Encoder, Tokens, encoder
from finetune.data.chat.template import Jinja, Span, Template
from finetune.data.chat.template_choice import (
    EMPTY_THOUGHT,
    TOOL_USE,
    built_in_templates,
    own_template,
    special_tokens,
    unknown_argument,
)
from finetune.data.chat.template_traits import traits_of
from finetune.data.chat.trained_spans import Chat, parts_of, prompt_of
from finetune.data.samples import (
    BadRow,
    Conversation,
    Drawable,
    Ids,
    Medium,
    Message,
    Preference,
    PromptCompletion,
    PromptOnly,
    Text,
)
from finetune.errors import UserError

if TYPE_CHECKING:  # Pillow and transformers' processors are only needed for images
    from finetune.data.media.expansion import Counted, RowMedia

TokensAndMedia = tuple[NDArray[np.int32], NDArray[np.bool_], tuple[Medium, ...]]

UNTRAINED = -100  # Hugging Face convention, the ignore_index of torch's cross entropy


@dataclass(frozen=True)
class Rendered:
    """A sequence as the string to tokenize, and the characters of it to train on."""

    text: str
    spans: Sequence[Span] = ()
    is_plain: bool = False  # no template wrote its BOS and its end
    is_prompt: bool = False  # an answer follows: it has no end
    ready: Ids | None = None  # tokens as the row gave them, in place of a text
    media: tuple[Counted, ...] = ()  # in the text's order


@dataclass(frozen=True)
class Renderer:
    """Turns samples into tokens and masks under one tokenizer, template and `train_on`; see `build_renderer`."""

    tokenizer: PreTrainedTokenizerBase
    template: Template | None
    train_on: str  # assistant | last_assistant | all
    special: dict[str, str] = field(repr=False)  # bos_token, eos_token, ... as templates see them
    adds_bos: bool  # whether the tokenizer would put its BOS before a plain text
    chat: Chat | None = field(repr=False)
    encoder: Encoder = field(repr=False)
    special_text: re.Pattern[str] = field(repr=False)  # finds special tokens in the text of a row
    ends_plain: bool = True  # EOS after a plain text; if not, only if the tokenizer itself would add it
    media: RowMedia | None = None  # if rows have them

    def draw(self, sample: Drawable, data_file: str = "") -> list[tuple[Rendered, ...]]:
        """Returns the examples of a sample, each with its sequences. One example of one sequence; of a conversation
        whose template rewrites history, several; of a preference, one of two sequences, chosen and rejected.

        data_file: file of the row; image paths are relative to its folder.
        Raises BadRow for a problem of this row alone, UserError for one that every row has.
        """
        if isinstance(sample, Text):
            return [(Rendered(sample.text, [(0, len(sample.text))], is_plain=True),)]
        if isinstance(sample, Ids):
            size = len(self.tokenizer)
            wrong = next((i for i in sample.input_ids if not 0 <= i < size), None)
            if wrong is not None:
                raise BadRow(
                    f"token id {wrong} is beyond this tokenizer's {size} tokens. Fix: tokenize the row with this one"
                )
            return [(Rendered("", ready=sample),)]
        if isinstance(sample, Preference):
            chosen, rejected = sample.chosen, sample.rejected
            return [(self._answer(chosen, "chosen", data_file), self._answer(rejected, "rejected", data_file))]
        if isinstance(sample, PromptCompletion):
            if self.chat is None:
                text = sample.prompt + sample.completion
                return [(Rendered(text, [(len(sample.prompt), len(text))], is_plain=True),)]
            sample = sample.as_conversation()
        if isinstance(sample, PromptOnly):
            if self.chat is None and sample.text is not None:
                return [(Rendered(sample.text, is_plain=True, is_prompt=True),)]
            chat = self.chat_for(sample.conversation)
            prompt = Rendered(prompt_of(chat, sample.conversation), is_prompt=True)
            return [(self._with_files(prompt, sample.conversation.messages, data_file, chat),)]
        chat = self.chat_for(sample)
        return [
            (self._with_files(Rendered(part.text, part.spans), sample.messages[: part.messages], data_file, chat),)
            for part in parts_of(chat, sample, self.train_on)
        ]

    def _with_files(self, rendered: Rendered, messages: Sequence[Message], data_file: str, chat: Chat) -> Rendered:
        """Returns a text with the tokens of its messages' files. Raises BadRow."""
        references = [one for message in messages for one in message.media]
        if self.media is not None:
            text, spans, files = self.media.expand(rendered.text, rendered.spans, references, data_file, chat.name)
            return replace(rendered, text=text, spans=spans, media=files)
        if references:
            kind = references[0].kind
            what = {"image": "images", "audio": "sound", "video": "videos"}[kind]
            verb = "hears" if kind == "audio" else "sees"
            raise BadRow(f"the row has {what}. Fix: set `data.{kind}: {{}}` to train on it, with a model that {verb}")
        return rendered

    def chat_for(self, sample: Conversation) -> Chat:
        """Returns the template under the arguments of a row. Raises UserError if there is none, and BadRow for special
        tokens in the row's texts."""
        if self.chat is None:
            raise UserError(
                "the tokenizer has no chat template, so messages cannot be rendered. Fix: set model.chat_template to "
                f"one of {', '.join(built_in_templates())} or to the path of a .jinja file"
            )
        for place, text in _texts(sample):
            # An end-of-turn in mid-answer, an invented turn, or a content that was rendered before.
            if match := self.special_text.search(text):
                raise BadRow(
                    f"{place} contains {match.group()!r}, which this tokenizer reads as a special token, not as text. "
                    "The template writes such tokens itself. Fix: take it out of the row"
                )
        chat = self.chat.selected(sample)
        return with_arguments(chat, sample.template_arguments) if sample.template_arguments else chat

    def _answer(self, sample: Conversation | PromptCompletion, name: str, data_file: str) -> Rendered:
        examples = self.draw(sample, data_file)
        if len(examples) > 1:
            raise BadRow(
                f"the chat template rewrites history, so {name!r} would become {len(examples)} examples. Fix: give "
                "the earlier turns as the prompt, so that the last answer alone is compared"
            )
        return examples[0][0]

    def tokenize(self, rendered: Sequence[Rendered]) -> list[Tokens | TokensAndMedia]:
        """Returns ids and masks of many samples, and images if rows have them. Raises BadRow for one that has none."""
        tokens: list[Tokens | TokensAndMedia] = []
        for one in self.tokenize_each(rendered):
            if isinstance(one, BadRow):
                raise one
            tokens.append(one)
        return tokens

    def tokenize_each(self, rendered: Sequence[Rendered]) -> list[Tokens | TokensAndMedia | BadRow]:
        """Returns the same, in few calls of the tokenizer; the reason for a sample that has no tokens."""
        texts = [one for one in rendered if one.ready is None]
        encoded = iter(self.encoder.encode([one.text for one in texts], [one.spans for one in texts]))
        tokens: list[Tokens | TokensAndMedia | BadRow] = []
        for one in rendered:
            if one.ready:
                input_ids, trained = np.array(one.ready.input_ids, np.int32), np.array(one.ready.trained, bool)
            else:
                found = next(encoded)
                if isinstance(found, BadRow):
                    tokens.append(found)
                    continue
                input_ids, trained = found
                if one.is_plain:
                    # BOS before a plain text if the tokenizer would add it, EOS after (see `ends_plain`) unless an
                    # answer follows, neither twice.
                    tokenizer: Any = self.tokenizer
                    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
                    if eos is None:
                        raise UserError(
                            "the tokenizer has no end-of-text token (eos_token). Plain text would never end. Fix: set "
                            "it in the tokenizer's files"
                        )
                    if self.adds_bos and input_ids[:1].tolist() != [bos]:
                        input_ids, trained = np.append(np.int32(bos), input_ids), np.append(False, trained)
                    if self.ends_plain and not one.is_prompt and input_ids[-1:].tolist() != [eos]:
                        input_ids, trained = np.append(input_ids, np.int32(eos)), np.append(trained, True)
                if self.train_on == "all":
                    trained = np.ones(len(input_ids), bool)
            trained[:1] = False  # no token predicts the first one
            if self.media:
                tokens.append((input_ids, trained, self.media.place(input_ids, trained, one.media)))
            else:
                tokens.append((input_ids, trained))
        return tokens


def _texts(conversation: Conversation) -> Iterator[tuple[str, str]]:
    """Yields (place, text) of all texts of a row."""
    for i, message in enumerate(conversation.messages):
        yield f"message {i} ({message.role})", message.content
        if message.reasoning:
            yield f"the reasoning of message {i}", message.reasoning
        if message.name:
            yield f"the `name` of message {i} ({message.role})", message.name
        if message.tool_call_id:
            yield f"the `tool_call_id` of message {i}", message.tool_call_id
        for text in _strings(message.tool_calls):
            yield f"a tool call of message {i}", text
    for text in _strings(conversation.tools):
        yield "a tool", text


def _strings(value: Any) -> Iterator[str]:
    """Yields every text in a JSON value, keys among them. Not its JSON: quotes are escaped there, and templates may
    write a text as it is."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from _strings(item)
    elif isinstance(value, Sequence):
        for item in value:
            yield from _strings(item)


def build_renderer(
    tokenizer: PreTrainedTokenizerBase,
    template: Template | None = None,
    train_on: str = "assistant",
    is_scored: bool = False,
    media: RowMedia | None = None,
) -> Renderer:
    """
    Args:
        template: the tokenizer's own if None
        is_scored: texts are classified, with the tokens that the tokenizer adds by itself and no end token
        media: settings of the files that rows have

    Raises UserError for a tokenizer without offsets.
    """
    if not tokenizer.is_fast:
        raise UserError(
            f"{type(tokenizer).__name__} is a slow tokenizer. It cannot say which characters a token stands for, which "
            "the mask needs. Fix: use a model folder with a tokenizer.json"
        )
    template = template or own_template(tokenizer)
    plain = tokenizer("a")["input_ids"]
    added: dict[int, Any] = tokenizer.added_tokens_decoder
    # Not the unknown one, which is a word of some corpora and not a mark.
    marks = [str(token) for token in added.values() if token.special and str(token) != tokenizer.unk_token]
    return Renderer(
        tokenizer=tokenizer,
        template=template,
        train_on=train_on,
        special=special_tokens(tokenizer),
        adds_bos=tokenizer.bos_token_id is not None and plain[:1] == [tokenizer.bos_token_id],
        chat=chat_of(tokenizer, template) if template else None,
        encoder=encoder(tokenizer),
        special_text=re.compile("|".join(re.escape(text) for text in marks if text) or r"(?!)"),
        ends_plain=not is_scored or plain[-1:] == [tokenizer.eos_token_id],
        media=media,
    )


def chat_of(tokenizer: PreTrainedTokenizerBase, template: Template) -> Chat:
    """Returns the template as this tokenizer uses it, with its traits."""
    added: dict[int, Any] = tokenizer.added_tokens_decoder
    tokens = tuple(str(token) for token in added.values() if str(token))
    return _chat(template, tuple(special_tokens(tokenizer).items()), tokens, "{}")


@lru_cache(maxsize=64)
def _chat(template: Template, special: tuple[tuple[str, str], ...], tokens: tuple[str, ...], arguments: str) -> Chat:
    """arguments: of a row, as JSON. A template has other traits under other arguments."""
    jinja = Jinja(template, dict(special), json.loads(arguments))
    chat = Chat(jinja, traits_of(jinja, tokens), tokens)
    if template.tool_use is not None:
        tool_use = Template(template.tool_use, f"{template.name} `{TOOL_USE}`")
        chat = replace(chat, tool_use=_chat(tool_use, special, tokens, arguments))
    if EMPTY_THOUGHT not in template.text or EMPTY_THOUGHT in jinja.arguments:
        return chat
    return replace(chat, thinking=with_arguments(chat, {EMPTY_THOUGHT: False}))


def with_arguments(chat: Chat, arguments: Mapping[str, Any]) -> Chat:
    """Returns the template as it is under more arguments. Raises BadRow for those it does not know."""
    if problem := unknown_argument(chat.jinja.template, arguments):
        raise BadRow(f"chat_template_arguments: {problem}. Fix: correct the name, or remove it")
    every = json.dumps({**chat.jinja.arguments, **arguments}, sort_keys=True)
    return _chat(chat.jinja.template, tuple(chat.jinja.special.items()), chat.tokens, every)


def labels_of(input_ids: NDArray[np.int32], trained: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Returns (T,) the id of a trained token, else -100."""
    return np.where(trained, input_ids, np.int32(UNTRAINED)).astype(np.int32)

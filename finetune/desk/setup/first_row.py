"""The first row of the data as the model sees it, in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text as StyledText

from finetune.data.chat.renderer import Renderer
from finetune.data.chat.template import Span
from finetune.data.samples import (
    BadRow,
    Ids,
    Labelled,
    Message,
    Preference,
    PromptCompletion,
    PromptOnly,
    Ranked,
    Sample,
    Text,
)
from finetune.desk.setup.rows import RowsFound

_SHOWN = 1200  # characters


def show_first_row(rows: RowsFound, renderer: Renderer | None, console: Console) -> None:
    """Prints the first row as the model sees it, its trained part green and in brackets; its messages if there is no
    tokenizer."""
    drawn = next(filter(None, (_drawn(sample, renderer, rows.items[0][0]) for sample in rows.samples[:20])), ())
    if drawn:
        console.print("the first row, what is trained on in ⟦ ⟧:", highlight=False)
    for text, spans in drawn:
        shown, last = StyledText(), 0
        for begin, end in spans:
            shown.append(text[last:begin]).append(f"⟦{text[begin:end]}⟧", style="green")
            last = end
        shown.append(text[last:])
        shown.truncate(_SHOWN)
        console.print(shown, soft_wrap=True)


def _drawn(sample: Sample, renderer: Renderer | None, data_file: str) -> list[tuple[str, Sequence[Span]]]:
    """Returns the texts of a sample and their trained spans, of characters; none if it cannot be rendered."""
    while isinstance(sample, Labelled | Ranked):
        sample = sample.sample if isinstance(sample, Labelled) else sample.answers[0]
    if renderer is not None:
        try:
            return [(part.text, part.spans) for part in renderer.draw(sample, data_file)[0]]
        except BadRow:
            return []
    if isinstance(sample, Text | Ids):
        return [(sample.text, [(0, len(sample.text))])] if isinstance(sample, Text) else []
    if isinstance(sample, PromptOnly):
        return [_messages_drawn(sample.conversation.messages)]
    answers = [sample.chosen, sample.rejected] if isinstance(sample, Preference) else [sample]
    chats = [one.as_conversation() if isinstance(one, PromptCompletion) else one for one in answers]
    return [_messages_drawn(chat.messages) for chat in chats]


def _messages_drawn(messages: Sequence[Message]) -> tuple[str, Sequence[Span]]:
    text, spans = "", []
    for message in messages:
        text += f"{message.role}: "
        if message.role == "assistant" and message.train:
            spans.append((len(text), len(text) + len(message.content)))
        text += f"{message.content}\n"
    return text.rstrip("\n"), spans

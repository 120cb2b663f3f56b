"""Checks of a chat template by short conversations, once per run: whether masks can be right, and the end of turns."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from transformers import PreTrainedTokenizerBase

from finetune.data.chat.renderer import Renderer, build_renderer, chat_of
from finetune.data.chat.template import ANSWER, DATE, QUESTION, THOUGHT, Template, asks_for_today, dated, probe
from finetune.data.chat.template_choice import own_template
from finetune.data.chat.template_traits import CALL_ID, RESULT, TOOL, probe_call, probe_tool
from finetune.data.chat.trained_spans import Chat, parts_of
from finetune.data.samples import BadRow, Conversation, Message, PromptCompletion
from finetune.errors import UserError
from finetune.utils import common_prefix_length

CHECK_S = 30  # of this process's own time, for conversations of a few words


def check_template(
    tokenizer: PreTrainedTokenizerBase, template: Template | None = None, train_on: str = "assistant"
) -> list[str]:
    """Returns problems (`problem: ...`) and remarks (`note: ...`) about masks under this template.

    Empty for a tokenizer without a template: `text` needs none, and messages are refused when they appear.
    """
    name = template.name if template else "the chat template"
    with time_limit(CHECK_S, f"{name} takes more than {CHECK_S} s. Fix: simplify the template, or give another one"):
        try:
            renderer = build_renderer(tokenizer, template)  # every answer trained, so that all are looked at
            if renderer.chat is None:
                return []
            problems = _text_problems(renderer, renderer.chat)
            notes, thought = _thought_notes(renderer, renderer.chat)
            one, two = (_trained(renderer, _plain(turns, thought)) for turns in (1, 2))
            if train_on != "all":  # without a mask, it cannot be wrong
                problems += [*_mask_problems(renderer.chat, one, 1), *_mask_problems(renderer.chat, two, 2)]
        except (BadRow, UserError) as error:
            return [f"problem: {error}"]
        notes += [*_notes(renderer, renderer.chat, two, train_on), *_tool_notes(renderer, renderer.chat, thought)]
        return [f"problem: {text}" for text in dict.fromkeys(problems)] + [f"note: {text}" for text in notes]


def joined_texts_note(samples: Iterable[Any]) -> list[str]:
    """Returns a note if prompts and answers of rows, joined without a template, meet in the middle of a word."""
    texts = [one for sample in samples for one in (sample, getattr(sample, "chosen", None))]
    rows = [one for one in texts if isinstance(one, PromptCompletion)]
    joined = [one for one in rows if one.prompt[-1:].isalnum() and one.completion[:1].isalnum()]
    if len(joined) <= len(rows) / 2:
        return []
    return [
        f"prompts and answers are joined as they are, such as {joined[0].prompt[-20:] + joined[0].completion[:20]!r}: "
        f"the tokenizer has no chat template, and nothing separates them in {len(joined)} of {len(rows)} rows. Fix: "
        "end prompts with a newline or a mark, or set model.chat_template"
    ]


@contextlib.contextmanager
def time_limit(seconds: int, message: str) -> Iterator[None]:
    """Raises UserError after so much computing; on the main thread, which alone receives signals."""

    def stop(_number: int, _frame: object) -> None:
        raise UserError(message)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _plain(turns: int, reasoning: str | None = None) -> Conversation:
    return Conversation((Message("user", QUESTION), Message("assistant", ANSWER, reasoning=reasoning)) * turns)


def _trained(renderer: Renderer, conversation: Conversation) -> list[list[str]]:
    """Returns the texts that are trained, of each example of a conversation."""
    return [
        [text.text[begin:end] for begin, end in text.spans] for group in renderer.draw(conversation) for text in group
    ]


def _text_problems(renderer: Renderer, chat: Chat) -> list[str]:
    """Returns problems of the template's text, for any choice of trained tokens."""
    name, tokenizer, end = chat.name, renderer.tokenizer, chat.traits.end_of_turn
    bos, text = tokenizer.bos_token_id, chat.jinja.text(chat.traits.as_dicts(_plain(1)))
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    problems = []
    if bos is not None and ids[:2] == [bos, bos]:
        problems.append(f"{name} begins with {tokenizer.bos_token!r} twice: remove one from the template")
    if not end:
        return [*problems, f"{name} writes no end-of-turn after an answer: the model would not learn to stop"]
    first = next((token for token in chat.tokens if end.startswith(token)), end)
    pieces = tokenizer(first, add_special_tokens=False)["input_ids"]
    if len(pieces) > 1 or pieces == [tokenizer.unk_token_id]:
        count = f"{len(pieces)} tokens for" if len(pieces) > 1 else "unknown to"
        problems.append(
            f"{name} ends turns with {end!r}, which is {count} this tokenizer: the template is for another one; "
            "try model.chat_template: plain"
        )
    return problems


def _mask_problems(chat: Chat, examples: list[list[str]], turns: int) -> Iterator[str]:
    """Each turn of a conversation is trained once: from its content through its end-of-turn, and no header."""
    name, end = chat.name, chat.traits.end_of_turn
    trained = [text for one in examples for text in one]
    answers = [text for text in trained if ANSWER in text]
    if len(answers) != turns:
        other = next((text for text in trained if ANSWER not in text), "")
        yield f"{name} marks {other[:40]!r} as generated, which is not the answer"
    for text in answers:
        before = text.partition(ANSWER)[0]
        if QUESTION in text or (not chat.traits.prompt and before.strip() and chat.jinja.template.marks_generation):
            yield f"{name} marks more than the answer as generated: {text[:60]!r}"
        if end and not text.endswith(end):
            yield f"{name}: the end-of-turn {end!r} is not trained after every answer"


def _thought_notes(renderer: Renderer, chat: Chat) -> tuple[list[str], str | None]:
    """Returns notes, and the reasoning to try answers with, if a template prompts for one and refuses answers
    without."""
    try:
        renderer.draw(_plain(1))
    except BadRow as error:
        if not chat.traits.writes_reasoning:
            raise
        return [f"rows without `reasoning` will be refused: {error}"], THOUGHT
    thought = chat.traits.empty_thought
    if thought is None:
        return [], None
    if not thought.text:
        trained = f"the answer alone is trained, after the prompt {chat.traits.prompt[-40:]!r}"
    else:
        how = "which the model would have to write in use" if thought.opener else "as the template writes it"
        trained = (
            f"the empty thought {thought.text!r} is trained before the answer, {how}; model.empty_thought: given makes "
            "it the end of the generation prompt"
        )
    return [f"rows without `reasoning`: {trained}"], None


def _notes(renderer: Renderer, chat: Chat, two: list[list[str]], train_on: str) -> Iterator[str]:
    """two: trained texts of a conversation of two turns."""
    tokenizer, end, text = renderer.tokenizer, chat.traits.end_of_turn, chat.jinja.template.text
    if end and tokenizer.pad_token == end:
        yield (
            f"the padding token is the end-of-turn {end!r}: harmless here, as nothing is padded, but other trainers "
            "would not train it"
        )
    if asks_for_today(text):
        yield f"{chat.name} writes today's date: rows tokenized on another day differ"
    elif dated(text) != text:
        yield f"{chat.name} writes today's date: rows say {DATE:%d %B %Y}, so that they are the same on every day"
    bos = str(tokenizer.bos_token)
    if renderer.adds_bos and not chat.jinja.text(chat.traits.as_dicts(_plain(1))).startswith(bos):
        yield (
            f"{chat.name} does not begin with {bos!r}, which this tokenizer puts before plain text: conversations are "
            "trained without it, as they are served by whoever renders the template and adds nothing"
        )
    change = "turns are written differently" if len(two) > 1 else ""
    if not change and chat.traits.writes_reasoning and len(_trained(renderer, _plain(2, THOUGHT))) > 1:
        change = "earlier reasoning is left out"
    if change and train_on == "all":
        yield f"{chat.name}: {change} once more turns follow; under train_on: all only what is left is trained"
    elif change and train_on == "assistant":
        yield (
            f"{chat.name}: {change} once more turns follow; each such turn is trained as an example of its own, up to "
            "n examples for a conversation of n turns, with the tokens of their context again in each"
        )


def _tool_notes(renderer: Renderer, chat: Chat, thought: str | None) -> Iterator[str]:
    """Yields a note if a template that supports calls refuses a row with a tool, its call and its result."""
    chat = chat.tool_use or chat
    if chat.traits.calls is None:
        return
    call = Message("assistant", "", reasoning=thought, tool_calls=(probe_call(),))
    result = Message("tool", RESULT, name=TOOL, tool_call_id=CALL_ID)
    turns = (Message("user", QUESTION), call, result, Message("assistant", ANSWER, reasoning=thought))
    try:
        renderer.draw(Conversation(turns, (probe_tool(),) if chat.traits.writes_tools else ()))
    except (BadRow, UserError) as error:
        yield f"rows with tool calls and their results will be refused: {error}"


# --- the tokens that end an assistant's turn


def turn_end_ids(tokenizer: PreTrainedTokenizerBase, template: Template) -> set[int]:
    """Returns the ids of the tokens that end an answer and a tool call, whatever role the tokenizer gives them.

    Llama 3: <|eot_id|>, an added token that is not `eos_token` of its base; gpt-oss: <|return|> and <|call|>, not
    <|end|>, with which its reasoning ends. Empty if a template ends turns with text of several tokens.
    """

    def ids_of(text: str) -> list[int]:
        ids: Any = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    chat, added = chat_of(tokenizer, template), set(tokenizer.added_tokens_decoder)
    end_of_turn = ids_of(chat.traits.end_of_turn)
    # A token of the vocabulary may end turns as well.
    single_token = set(end_of_turn) if len(end_of_turn) == 1 else set()
    question, last = Message("user", QUESTION), set[int]()
    for conversation in (
        Conversation((question, Message("assistant", ANSWER))),
        Conversation((question, Message("assistant", ANSWER, reasoning=THOUGHT))),
        Conversation((question, Message("assistant", "", tool_calls=(probe_call(),))), (probe_tool(),)),
    ):
        try:
            part = parts_of(chat, conversation, "assistant")[-1]
        except (BadRow, UserError):
            continue
        last.add(ids_of(part.text[: part.spans[-1][1]])[-1])
    return last & (added | single_token)


def last_question(prompt: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns the user's last text in a prompt, without the template's text around it; else the prompt.

    "<|im_start|>user\\nWhen?<|im_end|>\\n<|im_start|>assistant\\n": "When?"
    """
    template = own_template(tokenizer)
    if template is None:
        return prompt
    jinja, (question, answer) = chat_of(tokenizer, template).jinja, probe(1)
    try:
        first, later = jinja.text([question], prompt=True), jinja.text([question, answer, question], prompt=True)
    except (BadRow, UserError):
        return prompt
    # A first message follows BOS or a system message, a later one the end of an answer: what both have in common is the
    # message's own.
    before, before_later = first.partition(QUESTION)[0], later.rpartition(QUESTION)[0]
    common = common_prefix_length(before[::-1], before_later[::-1])
    text = prompt.removesuffix(first.partition(QUESTION)[2])
    return text.rpartition(before[len(before) - common :])[2] if common else text

"""Whether masks can be right under a chat template, found by rendering two short conversations; once per run."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from finetune.data.chat import ANSWER, QUESTION, Renderer, Span, probe, renderer
from finetune.data.chat_template import Template
from finetune.data.samples import BadRow, Conversation, Message
from finetune.errors import UserError


def check_template(
    tokenizer: PreTrainedTokenizerBase, template: Template | None = None, train_on: str = "assistant"
) -> list[str]:
    """What is wrong (`problem: ...`) or worth knowing (`note: ...`) about masks under this template; once per run.

    Nothing to say of a tokenizer without a template: `text` needs none, and messages are refused where they appear.
    """
    try:
        made = renderer(tokenizer, template, train_on)
        if made.template is None:
            return []
        one, two = (_tried(made, turns) for turns in (1, 2))
    except (BadRow, UserError) as error:
        return [f"problem: {error}"]
    problems = [f"problem: {text}" for text in (*_mask_problems(made, one), *_turn_problems(made, two))]
    return list(dict.fromkeys(problems)) + [f"note: {text}" for text in _notes(made)]


@dataclass(frozen=True)
class _Tried:
    text: str
    spans: list[Span]
    ids: list[int]
    turns: int


def _tried(made: Renderer, turns: int) -> _Tried:
    sample = Conversation(tuple(Message(m["role"], m["content"]) for m in probe(turns)))
    rendered = made.draw(sample)
    (ids, _) = made.tokenise([rendered])[0]
    return _Tried(rendered.text, rendered.spans, ids.tolist(), turns)


def _mask_problems(made: Renderer, tried: _Tried) -> list[str]:
    assert made.template is not None
    name, bos, end = made.template.name, made.tokenizer.bos_token_id, made.end_of_turn
    problems = []
    if not tried.spans:
        problems.append(f"{name} marks nothing as written by the assistant: every row would be without a target")
    if bos is not None and tried.ids[:2] == [bos, bos]:
        problems.append(f"{name} begins with {made.tokenizer.bos_token!r} twice: remove one from the template")
    if not end:
        problems.append(f"{name} writes no end-of-turn after an answer: the model would not learn to stop")
    elif (pieces := made.tokenizer(end, add_special_tokens=False)["input_ids"]) and (
        len(pieces) > 1 or pieces == [made.tokenizer.unk_token_id]
    ):
        count = f"{len(pieces)} tokens for" if len(pieces) > 1 else "unknown to"
        problems.append(
            f"{name} ends turns with {end!r}, which is {count} this tokenizer: the template is for another one; "
            "try model.chat_template: plain"
        )
    return problems


def _turn_problems(made: Renderer, tried: _Tried) -> list[str]:
    """Each turn of a longer conversation: from its content through its end-of-turn, and no header."""
    assert made.template is not None
    name = made.template.name
    problems = []
    if tried.spans and len(tried.spans) != tried.turns:
        problems.append(f"{name} marks {len(tried.spans)} parts as generated in {tried.turns} assistant messages")
    for begin, end in tried.spans:
        trained = tried.text[begin:end]
        if made.end_of_turn and not trained.endswith(made.end_of_turn):
            problems.append(f"{name}: the end-of-turn {made.end_of_turn!r} is not trained after every answer")
        if ANSWER not in trained:
            problems.append(f"{name} marks {trained[:40]!r} as generated, which is not the answer")
        elif QUESTION in trained or (made.template.marks_generation and trained.partition(ANSWER)[0].strip()):
            problems.append(f"{name} marks more than the answer as generated: {trained[:60]!r}")
    return problems


def _notes(made: Renderer) -> list[str]:
    assert made.template is not None
    notes = []
    if made.end_of_turn and made.tokenizer.pad_token == made.end_of_turn:
        notes.append(
            f"the padding token is the end-of-turn {made.end_of_turn!r}: harmless here, where nothing is padded, but "
            "other trainers would not train it"
        )
    if "strftime_now" in made.template.text:
        notes.append(f"{made.template.name} writes today's date: rows tokenised on another day differ")
    return notes

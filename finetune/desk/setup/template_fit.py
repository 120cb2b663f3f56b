"""The chat template that a tokenizer without one needs, or one whose own refuses the rows."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from finetune.data.chat.renderer import build_renderer
from finetune.data.chat.template_choice import resolve_template
from finetune.data.samples import BadRow
from finetune.desk.setup.rows import RowsFound, conversation_of
from finetune.errors import UserError

_TRIED = 20  # conversations

# Tokens of which a vocabulary with a template's turns has all; the first built-in template whose tokens are there.
_TOKENS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("chatml", ("<|im_start|>", "<|im_end|>")),
    ("llama3", ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")),
    ("gemma", ("<start_of_turn>", "<end_of_turn>")),
    ("mistral-tekken", ("[INST]", "[/INST]", "[IMG]")),  # vocabularies of before Tekken have no images
    ("mistral-v3", ("[INST]", "[/INST]")),
    ("zephyr", ("<|user|>", "<|assistant|>")),
)


@dataclass(frozen=True)
class TemplateChoice:
    """`model.chat_template` of a new recipe; a name of None is the tokenizer's own, or none."""

    name: str | None = None
    reason: str = ""


def fitting_template(rows: RowsFound, tokenizer: PreTrainedTokenizerBase | None) -> TemplateChoice:
    """Returns the built-in template that these rows need; files are written by a model's own alone, but for Voxtral,
    whose repository has none."""
    renames = rows.columns is not None and rows.format == "prompt_completion"
    is_chat = renames or any(conversation_of(sample) is not None for sample in rows.samples[:100])
    if tokenizer is None or not is_chat:
        return TemplateChoice()
    vocabulary = tokenizer.get_vocab().keys()
    if rows.media_kind:
        of_voxtral = not tokenizer.chat_template and "[BEGIN_AUDIO]" in vocabulary
        return TemplateChoice("voxtral", "the tokenizer has no chat template") if of_voxtral else TemplateChoice()
    names = [name for name, tokens in _TOKENS if vocabulary >= set(tokens)]
    if not tokenizer.chat_template:
        # `plain` has no tokens of its own; `chatml` writes tools, as text where its tokens are missing.
        refused = {name: _refusal(rows, tokenizer, name) for name in [*names[:1], "plain", "chatml"]}
        name = min(refused, key=lambda name: bool(refused[name]))
        problem = refused[next(iter(refused))]
        why = f", and the one of its tokens refuses these rows: {problem}" if problem else ""
        return TemplateChoice(name, f"the tokenizer has no chat template{why}")
    problem = _refusal(rows, tokenizer, None)
    other = (
        next((name for name in (*names, "chatml") if not _refusal(rows, tokenizer, name)), None) if problem else None
    )
    return TemplateChoice(other, f"the tokenizer's own refuses these rows: {problem}") if other else TemplateChoice()


def _refusal(rows: RowsFound, tokenizer: PreTrainedTokenizerBase, name: str | None) -> str:
    """Returns why a template refuses at least half of the first conversations; "" if it does not."""
    conversations = [one for sample in rows.samples if (one := conversation_of(sample)) is not None][:_TRIED]
    problems = []
    try:
        renderer = build_renderer(tokenizer, resolve_template(name, tokenizer))
        for conversation in conversations:
            try:
                renderer.draw(conversation)
            except BadRow as error:
                problems.append(str(error))
    except UserError as error:
        return str(error)
    return problems[0] if len(problems) > len(conversations) / 2 else ""

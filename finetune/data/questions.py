"""Held-out examples as questions: a prompt to answer, and the reference that the answer is compared with."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
from transformers import PreTrainedTokenizerBase

from finetune.data.examples import Examples
from finetune.errors import UserError
from finetune.recipe.schema import Evaluate

# The one format whose prompt may be a single token. Elsewhere a second token that is trained means that there is no
# prompt: plain text, rows of ids that are trained whole, the rest of an answer that `overlong: split` cut.
_SHORT_PROMPTS = "prompt_completion"


@dataclass(frozen=True)
class Question:
    """An example cut where its last trained stretch begins.

    ids        1 872 13048 2 77091 9707 2      end_ids {2}
    trained    -   -     - -     -  yes yes
    prompt     1 872 13048 2 77091
    reference                      9707
    """

    prompt: list[int]
    reference: list[int]  # up to and without its end token, where it has one


def questions(examples: Examples, end_ids: Collection[int]) -> Iterator[Question]:
    """Of every example that has a prompt, in their order."""
    formats = [source.format for source in examples.report.sources]
    for example in examples:
        sequence = example.sequences[0]
        last = begin = int(np.flatnonzero(sequence.loss_mask)[-1])
        while sequence.loss_mask[begin - 1]:  # the first token is never trained
            begin -= 1
        if begin == 1 and formats[example.source] != _SHORT_PROMPTS:
            continue
        ids = sequence.input_ids.tolist()
        yield Question(ids[:begin], until_end(ids[begin : last + 1], end_ids))


def until_end(ids: list[int], end_ids: Collection[int]) -> list[int]:
    """Up to and without the first end token; all where there is none."""
    return next((ids[:i] for i, token in enumerate(ids) if token in end_ids), ids)


def answer(text: str, pattern: str | None) -> str | None:
    """What is compared: the whole text without outer blanks, or the pattern's first group in its last occurrence.

    None where the pattern does not occur: such a text has no answer, and equals no other.
    """
    if pattern is None:
        return text.strip()
    found = re.findall(pattern, text)
    if not found:
        return None
    return (found[-1][0] if isinstance(found[-1], tuple) else found[-1]).strip()


def check_questions(recipe: Evaluate, examples: Examples, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Notes on references that no answer can match; before the model loads.

    Raises UserError where no row has a prompt, or none of the references holds an answer.
    """
    wanted = max(recipe.exact_match, recipe.generate)
    if not wanted:
        return []
    if next(questions(examples, ()), None) is None:
        raise UserError("data.eval: no row has a prompt to answer: set evaluate.generate and evaluate.exact_match to 0")
    if not recipe.exact_match or recipe.answer is None:
        return []
    references = [one.reference for one in islice(questions(examples, ()), recipe.exact_match)]
    texts = [str(tokenizer.decode(ids, skip_special_tokens=True)) for ids in references]
    without = [text for text in texts if answer(text, recipe.answer) is None]
    if len(without) == len(texts):
        raise UserError(
            f"evaluate.answer: {recipe.answer!r} occurs in none of the {len(texts)} references of data.eval, so no "
            f"answer could match; the first is {without[0][:80]!r}"
        )
    if without:
        return [
            f"evaluate.answer occurs in {len(texts) - len(without)} of {len(texts)} references; the others count as "
            f"not matched, such as {without[0][:80]!r}"
        ]
    return []

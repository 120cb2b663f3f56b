"""Held-out loss, exact match and sample generations; the same numbers at any number of processes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from finetune.data import Example, Examples
from finetune.data.batch import Batch
from finetune.data.loader import Loader
from finetune.engine.base import Engine
from finetune.models.attention import AttentionChoice
from finetune.models.compiled import uncompiled
from finetune.models.head import LossHead
from finetune.objectives import supervised_losses
from finetune.recipe.schema import Evaluate
from finetune.training.by_source import SourceSums
from finetune.training.feed import fed_batches
from finetune.training.generation import greedy

_PROMPTS_AT_ONCE = 32  # per rank; bounds the cache of keys and values


@dataclass(frozen=True)
class Question:
    """An example taken apart at its last trained stretch."""

    prompt: list[int]
    reference: list[int]  # without the end token


@dataclass(frozen=True)
class Generation:
    prompt: str
    output: str
    reference: str
    matches: bool


@dataclass(frozen=True)
class Evaluator:
    engine: Engine
    loader: Loader
    examples: Examples  # that the loader deals
    attention: AttentionChoice
    head: LossHead
    tokenizer: PreTrainedTokenizerFast
    recipe: Evaluate
    source_names: tuple[str, ...] = ()

    def run(self) -> tuple[dict[str, float], list[Generation]]:
        """Metrics by name (`eval_loss` in nats per supervised token), and the generations to show. Collective."""
        self.engine.model.eval()
        with torch.no_grad():
            metrics = self._losses()
        wanted = max(self.recipe.exact_match, self.recipe.generate)
        with uncompiled():
            generations = self._generations(wanted) if wanted else []
        self.engine.model.train()
        if self.recipe.exact_match and generations:
            judged = generations[: self.recipe.exact_match]
            metrics["exact_match"] = sum(g.matches for g in judged) / len(judged)
        return metrics, generations[: self.recipe.generate]

    def _losses(self) -> dict[str, float]:
        total = torch.zeros((), dtype=torch.float64, device=self.engine.device)
        items, sources = 0, SourceSums(self.source_names, self.engine.device)
        with fed_batches(self.loader.all_batches(), self.engine.device) as feed:
            for batch, losses in self.engine.forwards(feed, self._token_losses):
                total += losses.sum()
                items += batch.counts["target_tokens"]
                sources.add(batch, losses)
        loss, count, *of_sources = self.engine.total(total, items, *sources.values())
        each = {f"eval_loss/{name}": value for name, value in sources.losses(of_sources).items()}
        return {"eval_loss": loss / count, **each}

    def _token_losses(self, model: Any, batch: Batch) -> torch.Tensor:
        arguments = self.attention.forward_arguments(batch.sequence_lengths)
        head = self.head.for_evaluation()
        return supervised_losses(model, batch, arguments, self.engine.device, head).each

    def _generations(self, wanted: int) -> list[Generation]:
        """The first `wanted` examples, dealt to ranks in turn, back in order on every rank."""
        questions = [q for q in (question(self.examples, i) for i in range(_limit(self, wanted))) if q]
        shared_by = self.engine.parallelism.data
        mine = questions[self.engine.data_rank :: shared_by]
        rounds = -(-len(questions) // (_PROMPTS_AT_ONCE * shared_by))
        outputs: list[list[int]] = []
        for i in range(rounds):
            outputs += self._answer(mine[i * _PROMPTS_AT_ONCE : (i + 1) * _PROMPTS_AT_ONCE])
        shares = dict(self.engine.gather((self.engine.data_rank, outputs)))  # ranks of the same rows answer alike
        ordered = [shares[i % shared_by][i // shared_by] for i in range(len(questions))]
        return [self._judged(q, ids) for q, ids in zip(questions, ordered, strict=True)]

    def _answer(self, questions: list[Question]) -> list[list[int]]:
        prompts = [question.prompt for question in questions]
        return greedy(self.engine, prompts, self._end_ids(), self._pad_id(), self.recipe.max_new_tokens)

    def _end_ids(self) -> set[int]:
        return end_ids(self.examples[0], self.tokenizer)

    def _pad_id(self) -> int:
        assert isinstance(self.tokenizer.pad_token_id, int)  # load_tokenizer sees to it
        return self.tokenizer.pad_token_id

    def _text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def _judged(self, asked: Question, output: list[int]) -> Generation:
        said = self._text(output)
        right = self._text(asked.reference)
        matches = answer(said, self.recipe.answer) == answer(right, self.recipe.answer)
        return Generation(str(self.tokenizer.decode(asked.prompt)), said, right, matches)


def _limit(evaluator: Evaluator, wanted: int) -> int:
    return min(wanted, len(evaluator.examples))


def question(examples: Examples, index: int) -> Question | None:
    """The last trained stretch is the reference, all before it the prompt; None where nothing precedes it."""
    sequence = examples[index].sequences[0]
    start = end = int(np.flatnonzero(sequence.loss_mask)[-1])
    while start - 1 >= 0 and sequence.loss_mask[start - 1]:
        start -= 1
    if start == 0:
        return None
    ids = sequence.input_ids.tolist()
    return Question(prompt=ids[:start], reference=ids[start:end])  # ids[end] is the end-of-turn


def end_ids(example: Example, tokenizer: PreTrainedTokenizerFast) -> set[int]:
    """What ends a generation: the tokenizer's end token and the end-of-turn that the data teaches."""
    sequence = example.sequences[0]
    taught = int(sequence.input_ids[np.flatnonzero(sequence.loss_mask)[-1]])
    ends = {taught} if taught in tokenizer.all_special_ids else set()
    return ends | ({tokenizer.eos_token_id} if isinstance(tokenizer.eos_token_id, int) else set())


def answer(text: str, pattern: str | None) -> Any:
    """What is compared: the whole text without outer blanks, or the pattern's first group (its last occurrence)."""
    if pattern is None:
        return text.strip()
    found = re.findall(pattern, text)
    if not found:
        return None if text else ""
    last = found[-1]
    return (last[0] if isinstance(last, tuple) else last).strip()

"""Held-out loss, exact match and sample generations; the same numbers at any number of processes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from finetune.data import Examples
from finetune.data.batch import Batch
from finetune.data.loader import Loader
from finetune.data.questions import Question, answer, questions
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
    end_ids: set[int]  # that end a generation
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
        """Of the first `wanted` examples with a prompt, dealt to ranks in turn, back in order on every rank."""
        asked = list(islice(questions(self.examples, self.end_ids), wanted))
        shared_by = self.engine.parallelism.data
        mine = asked[self.engine.data_rank :: shared_by]
        rounds = -(-len(asked) // (_PROMPTS_AT_ONCE * shared_by))
        outputs: list[list[int]] = []
        for i in range(rounds):
            outputs += self._answer(mine[i * _PROMPTS_AT_ONCE : (i + 1) * _PROMPTS_AT_ONCE])
        shares = dict(self.engine.gather((self.engine.data_rank, outputs)))  # ranks of the same rows answer alike
        ordered = [shares[i % shared_by][i // shared_by] for i in range(len(asked))]
        return [self._judged(q, ids) for q, ids in zip(asked, ordered, strict=True)]

    def _answer(self, questions: list[Question]) -> list[list[int]]:
        prompts = [question.prompt for question in questions]
        return greedy(self.engine, prompts, self.end_ids, self._pad_id(), self.recipe.max_new_tokens)

    def _pad_id(self) -> int:
        assert isinstance(self.tokenizer.pad_token_id, int)  # load_tokenizer sees to it
        return self.tokenizer.pad_token_id

    def _text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def _judged(self, asked: Question, output: list[int]) -> Generation:
        said = self._text(output)
        right = self._text(asked.reference)
        expected = answer(right, self.recipe.answer)
        matches = expected is not None and answer(said, self.recipe.answer) == expected
        return Generation(str(self.tokenizer.decode(asked.prompt)), said, right, matches)

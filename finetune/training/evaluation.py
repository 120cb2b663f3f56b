"""Held-out loss, exact match and sample generations; the same numbers at any number of processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

import torch
from transformers import PreTrainedTokenizerFast

from finetune.data.batch import Batch
from finetune.data.dataset import Question, answer, questions
from finetune.data.examples import Examples
from finetune.data.loader import Loader
from finetune.data.prefetch import fed_batches
from finetune.engine.base import Engine
from finetune.models.compiled import uncompiled
from finetune.models.loss_model import Outputs
from finetune.objectives.forward import ForwardPass
from finetune.objectives.objective import Sums, Terms
from finetune.recipe.schema import Evaluate
from finetune.training.generation import greedy
from finetune.training.statistics import as_columns, sum_terms

_PROMPTS_PER_BATCH = 32  # per rank; bounds the KV cache


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
    examples: Examples  # that the loader distributes
    forward: ForwardPass
    tokenizer: PreTrainedTokenizerFast
    end_ids: set[int]  # tokens that end a generation
    recipe: Evaluate

    def run(self) -> tuple[dict[str, float], list[Generation]]:
        """Returns metrics by name (`eval_loss` in nats per supervised token) and generations to show. Collective."""
        self.engine.model.eval()
        with torch.no_grad():
            metrics = self._losses()
        num_generations = max(self.recipe.exact_match, self.recipe.generate)
        with uncompiled():
            generations = self._generations(num_generations) if num_generations else []
        self.engine.model.train()
        if self.recipe.exact_match and generations:
            scored = generations[: self.recipe.exact_match]
            metrics["exact_match"] = sum(g.matches for g in scored) / len(scored)
        return metrics, generations[: self.recipe.generate]

    def _losses(self) -> dict[str, float]:
        objective, columns = self.forward.objective, {}
        if objective.statistics is not None:
            columns = as_columns(self._sums(objective.statistics), self.engine.device)
        total = self._sums(lambda outputs, batch: objective.terms(outputs, batch.with_columns(columns)))
        return {"eval_loss": total.loss(), **{f"eval_{name}": v for name, v in objective.metrics(total).items()}}

    def _sums(self, terms: Callable[[Outputs, Batch], Terms]) -> Sums:
        with fed_batches(self.loader.all_batches(), self.engine.device) as feed:
            return sum_terms(self.engine, self.forward, terms, feed, feed.peek(), self.loader.all_counts())

    def _generations(self, count: int) -> list[Generation]:
        """Returns those of the first `count` examples with a prompt, in order, on every rank.

        Data-parallel ranks take the prompts in turn.
        """
        prompts = list(islice(questions(self.examples, self.end_ids), count))
        num_ranks = self.engine.parallelism.data
        local = [question.prompt for question in prompts[self.engine.data_rank :: num_ranks]]
        pad_id = self.tokenizer.pad_token_id
        assert isinstance(pad_id, int)  # load_tokenizer ensures it
        outputs: list[list[int]] = []
        for start in range(0, -(-len(prompts) // num_ranks), _PROMPTS_PER_BATCH):
            batch = local[start : start + _PROMPTS_PER_BATCH]
            outputs += greedy(self.engine, batch, self.end_ids, pad_id, self.recipe.max_new_tokens)
        # Ranks that share sequences generate the same.
        by_rank = dict(self.engine.ranks.gather((self.engine.data_rank, outputs)))
        ordered = [by_rank[i % num_ranks][i // num_ranks] for i in range(len(prompts))]
        return [self._scored(question, ids) for question, ids in zip(prompts, ordered, strict=True)]

    def _text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def _scored(self, question: Question, output_ids: list[int]) -> Generation:
        output, reference = self._text(output_ids), self._text(question.reference)
        expected = answer(reference, self.recipe.answer)
        matches = expected is not None and answer(output, self.recipe.answer) == expected
        return Generation(str(self.tokenizer.decode(question.prompt)), output, reference, matches)

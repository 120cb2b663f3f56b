"""Held-out loss, exact match and sample generations; the same numbers at any number of processes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

import torch
from transformers import PreTrainedTokenizerFast

from finetune.data.dataset import Question, answer, questions
from finetune.data.examples import Examples
from finetune.data.loader import Loader
from finetune.data.prefetch import fed_batches
from finetune.engine.base import Engine
from finetune.models.compiled import uncompiled
from finetune.objectives.base import Sums, TermSums
from finetune.objectives.forward import ForwardPass
from finetune.recipe.schema import Evaluate
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
    forward: ForwardPass
    tokenizer: PreTrainedTokenizerFast
    end_ids: set[int]  # that end a generation
    recipe: Evaluate

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
        objective, sums = self.forward.objective, TermSums()
        with fed_batches(self.loader.all_batches(), self.engine.device) as feed:
            first = feed.peek()
            for batch, outputs in self.engine.forwards(feed, self.forward):
                sums.add(objective.terms(outputs, batch))
        if not sums.terms:  # a pipeline's early stages have no outputs
            sums.add(objective.no_terms(first))
        total = Sums(self.engine.ranks.total(sums.totals), sums.terms, self.loader.all_counts())
        return {"eval_loss": total.loss(), **{f"eval_{name}": v for name, v in objective.metrics(total).items()}}

    def _generations(self, wanted: int) -> list[Generation]:
        """Of the first `wanted` examples with a prompt, dealt to ranks in turn, back in order on every rank."""
        asked = list(islice(questions(self.examples, self.end_ids), wanted))
        shared_by = self.engine.parallelism.data
        mine = asked[self.engine.data_rank :: shared_by]
        rounds = -(-len(asked) // (_PROMPTS_AT_ONCE * shared_by))
        outputs: list[list[int]] = []
        for i in range(rounds):
            outputs += self._answer(mine[i * _PROMPTS_AT_ONCE : (i + 1) * _PROMPTS_AT_ONCE])
        shares = dict(self.engine.ranks.gather((self.engine.data_rank, outputs)))  # ranks of the same rows answer alike
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

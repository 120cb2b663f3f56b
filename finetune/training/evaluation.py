"""Held-out loss, exact match, error rates and sample generations; the same numbers for any number of processes.

Generation is greedy and ends at the tokens of `end_ids`, which the result's generation config has, too.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerFast

from finetune.data.batch import Batch
from finetune.data.chat.template_check import last_question, turn_end_ids
from finetune.data.chat.template_choice import template_of
from finetune.data.dataset import questions, until_end
from finetune.data.examples import Examples
from finetune.data.loader import Loader
from finetune.data.prefetch import fed_batches
from finetune.data.row_source import RowSource
from finetune.data.samples import Medium
from finetune.data.token_text import media_note, special_ids
from finetune.data.transcripts import error_rates
from finetune.engine.base import Engine
from finetune.models.compiled import uncompiled
from finetune.models.wrapped import Outputs
from finetune.objectives.forward import ForwardPass
from finetune.objectives.objective import Sums, Terms, TermSums
from finetune.recipe.schema import Evaluate, Model
from finetune.training.decoding import PromptMedia, decode, prompt_media
from finetune.utils import answer

_PROMPTS_PER_BATCH = 32  # per rank; bounds the KV cache
_IMAGE_PROMPTS_PER_BATCH = 8  # and the tower's activations


@dataclass(frozen=True)
class Generation:
    prompt: str
    question: str  # last user message of the prompt
    output: str
    reference: str
    matches: bool
    media: tuple[Medium, ...] = ()  # images of the prompt, which has a note for each


@dataclass(frozen=True)
class Evaluator:
    engine: Engine
    loader: Loader
    examples: Examples  # distributed by the loader
    forward: ForwardPass
    tokenizer: PreTrainedTokenizerFast
    end_ids: set[int]  # tokens that end a generation
    recipe: Evaluate
    with_reference: Callable[[list[Batch]], list[Batch]] | None = None  # adds log-probabilities computed on demand

    def run(self) -> tuple[dict[str, float], list[Generation]]:
        """Returns metrics by name (`eval_loss` in nats per supervised token) and generations to show. Collective."""
        objective, columns = self.forward.objective, dict[str, Tensor]()
        with self.engine.evaluating():
            if objective.statistics is not None:
                columns = as_columns(self._sums(objective.statistics, columns), self.engine.device)
            total = self._sums(lambda outputs, batch: objective.terms(outputs, batch.with_columns(columns)), columns)
        metrics = {"eval_loss": total.loss()}
        metrics |= {f"eval_{name}": value for name, value in objective.metrics(total).items()}
        generations: list[Generation] = []
        if num_generations := self.recipe.answered:
            with self.engine.evaluating(), self.engine.generating(), uncompiled():
                generations = self._generations(num_generations)
        if self.recipe.exact_match and generations:
            scored = generations[: self.recipe.exact_match]
            metrics["exact_match"] = sum(g.matches for g in scored) / len(scored)
        if self.recipe.word_error_rate and generations:
            transcripts = generations[: self.recipe.word_error_rate]
            pairs = [[answer(text, self.recipe.answer) or "" for text in (g.reference, g.output)] for g in transcripts]
            metrics |= error_rates(*zip(*pairs, strict=True))
        return metrics, generations[: self.recipe.generate]

    def _sums(self, terms: Callable[[Outputs, Batch], Terms], columns: Mapping[str, Tensor]) -> Sums:
        with fed_batches(self.loader.all_batches(), self.engine.device) as feed:
            first = feed.peek().with_columns(columns)
            each = ((self.with_reference([batch]) if self.with_reference else [batch]) for batch in feed)
            batches = chain.from_iterable(each)
            return sum_terms(self.engine, self.forward, terms, batches, first, self.loader.all_counts())

    def _generations(self, count: int) -> list[Generation]:
        """Returns the generations for the first `count` examples with a prompt, in order, on every rank.

        Data-parallel ranks take the prompts in turn.
        """
        prompts = list(islice(questions(self.examples, self.end_ids), count))
        num_ranks = self.engine.parallelism.data
        local = prompts[self.engine.data_rank :: num_ranks]
        pad_id = self.tokenizer.pad_token_id
        assert isinstance(pad_id, int)  # load_tokenizer ensures it
        outputs: list[list[int]] = []
        at_once = _PROMPTS_PER_BATCH if self.loader.media_inputs is None else _IMAGE_PROMPTS_PER_BATCH
        for start in range(0, -(-len(prompts) // num_ranks), at_once):
            batch = local[start : start + at_once]
            ids, of_prompts = [question.prompt for question in batch], [question.media for question in batch]
            config = self.engine.unwrapped.config
            media = prompt_media(self.loader.media_inputs, config, ids, of_prompts, pad_id)
            outputs += greedy(self.engine, ids, self.end_ids, pad_id, self.recipe.max_new_tokens, media)
        # Ranks that share sequences generate the same tokens.
        by_rank = dict(self.engine.ranks.gather((self.engine.data_rank, outputs)))
        ordered = [by_rank[i % num_ranks][i // num_ranks] for i in range(len(prompts))]
        generations: list[Generation] = []
        for question, output_ids in zip(prompts, ordered, strict=True):
            output, reference = (
                str(self.tokenizer.decode(ids, skip_special_tokens=True)) for ids in (output_ids, question.reference)
            )
            expected = answer(reference, self.recipe.answer)
            matches = expected is not None and answer(output, self.recipe.answer) == expected
            pieces, last = list[str](), 0
            for number, image in enumerate(question.media, start=1):
                text = str(self.tokenizer.decode(question.prompt[last : image.begin]))
                pieces, last = [*pieces, text, f"[{media_note(image, number)}]"], image.end
            prompt = "".join([*pieces, str(self.tokenizer.decode(question.prompt[last:]))])
            asked = last_question(prompt, self.tokenizer)
            generations.append(Generation(prompt, asked, output, reference, matches, question.media))
        return generations


def greedy(
    engine: Engine,
    prompts: list[list[int]],
    end_ids: set[int],
    pad_id: int,
    max_new_tokens: int,
    media: PromptMedia | None = None,
) -> list[list[int]]:
    """Returns the likeliest new tokens of each prompt, without its end token. Collective; see `decode`."""
    rows = decode(engine, prompts, end_ids, pad_id, max_new_tokens, lambda logits, _: logits.argmax(-1), media)
    return [until_end(row, end_ids) for row in rows]


_EXAMPLES_READ = 1000  # per source of ids
_MIN_SHARE = 0.1  # share of rows: truncated rows end with any token


def end_ids(model: Model, tokenizer: PreTrainedTokenizerFast, datasets: Sequence[RowSource | None]) -> set[int]:
    """Returns the ids that end a generation, the same on every rank.

    These are the tokenizer's end token; the special tokens among the ends of a published model's generation config
    (Llama 3.1 has three), if it keeps its tokenizer; the end of turn, if rows are rendered by the chat template; and
    the special tokens that are the last target of at least `_MIN_SHARE` of the rows given as ids.
    """
    assert isinstance(tokenizer.eos_token_id, int)  # load_tokenizer ensures it
    ends, special = {tokenizer.eos_token_id}, special_ids(tokenizer)
    if model.name is not None and model.config is None and model.tokenizer is None:
        with contextlib.suppress(OSError):  # the model has no such file
            ids = GenerationConfig.from_pretrained(model.name, revision=model.revision or "main").eos_token_id
            ends |= special & set(ids if isinstance(ids, list) else [ids])
    formats = {format for data in datasets if data for format in data.formats}
    template = template_of(model, tokenizer)
    if template is not None and formats - {"text", "tokens"}:
        ends |= turn_end_ids(tokenizer, template)
    for data in datasets:
        for source, format in enumerate(data.formats if data else ()):
            if data and format == "tokens":
                examples = data.first_examples(source, _EXAMPLES_READ)
                last = Counter(int(one.sequences[0].input_ids[one.sequences[0].loss_mask][-1]) for one in examples)
                ends |= {i for i, count in last.items() if i in special and count >= _MIN_SHARE * last.total()}
    return ends


# --- terms of forwards without a backward: an evaluation, or an objective's statistics of a whole step


@torch.no_grad()
def sum_terms(
    engine: Engine,
    forward: ForwardPass,
    terms: Callable[[Outputs, Batch], Terms],
    batches: Iterable[Batch],
    first: Batch,
    counts: Mapping[str, int],
) -> Sums:
    """Returns terms summed over all ranks. Collective.

    batches: this rank's; first: the first of them; counts: totals of all batches of all ranks.
    """
    sums = TermSums()
    for batch, outputs in engine.forwards(batches, forward):
        sums.add(terms(outputs, batch))
    if not sums.terms:  # a pipeline's early stages have no outputs
        sums.add(forward.objective.no_terms(first, terms))
    return Sums(engine.ranks.total(sums.totals, sums.largest), sums.terms, counts)


def as_columns(statistics: Sums, device: torch.device) -> dict[str, Tensor]:
    """Returns the mean of each statistic, () fp64."""
    return {name: torch.tensor(statistics.mean(name), dtype=torch.float64, device=device) for name in statistics.terms}

"""Rollouts in a plan: memory and time of sampling a cohort, by the run's own modules on fake tensors.

    prompts    one forward of all prompts of the cohort, which fills the caches
    tokens     one forward for each new token; the last one has the longest caches

Weighed with the layers of `short_model`; caches of a rank's other layers are added.

Letters: B samples of a cohort, P longest prompt, T prompt and sample, V vocabulary.
"""

from __future__ import annotations

import contextlib
import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

# torch documents this mode, and has it under no other name.
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from transformers import DynamicCache, PretrainedConfig

from finetune.models.base_config import dtypes
from finetune.plan.images import KnownIntegers
from finetune.plan.meter import Meter, OperatorCounter, Work
from finetune.plan.micro_batch import How, NotEstimated, attention_at, fill, model_at, short_model
from finetune.plan.shapes import CacheKey, shortened
from finetune.plan.stand_ins import stand_ins
from finetune.recipe import Recipe
from finetune.recipe.schema import Rollouts
from finetune.rl.rollouts.sampler import Sampler


@dataclass(frozen=True)
class CohortCosts:
    """One cohort on one rank; bytes above those of weights and optimizer."""

    samples: int
    cache: int  # bytes of keys and values of the rank's layers at the end
    prompts: int  # bytes at the peak of the prompts' forward
    tokens: int  # bytes at the peak of the last token: caches, logits in fp64, noise
    prompt_work: Work
    token_work: Work

    @property
    def peak(self) -> int:
        return max(self.prompts, self.tokens)

    def largest(self, room: int, most: int) -> int:
        """Returns the most samples that fit into `room` bytes: a power of two, or `most`; 0 if not even one fits.
        All tensors of a cohort grow with its samples."""
        fitting = min(room * self.samples // self.peak, most)
        return fitting if fitting in (0, most) else 1 << (fitting.bit_length() - 1)


def longest_prompt(rollouts: Rollouts, documents: tuple[int, ...]) -> int:
    """Returns the tokens of the longest prompt. documents: samples with their prompts, of the heaviest micro-batch."""
    return max(1, max(documents) - rollouts.max_new_tokens)


def sampling_of(recipe: Recipe, config: PretrainedConfig, prompt: int, how: How) -> CohortCosts:
    """Returns memory and work of the recipe's cohort. prompt: tokens. Raises UserError if the model cannot be made."""
    assert recipe.rollouts is not None
    cohort = min(recipe.rollouts.cohort, recipe.rollouts.prompts * recipe.rollouts.samples)
    return _sampling(CacheKey(recipe, config, {"precision"}, recipe.rollouts, cohort, prompt, how))


@functools.lru_cache(maxsize=64)
def _sampling(key: CacheKey) -> CohortCosts:
    recipe, config = key.recipe, key.config
    settings, samples, prompt, how = key.others
    short, kinds = short_model(config), shortened(config)[1]
    model, _ = model_at(recipe, short, attention_at(recipe, config, how), how)
    operators = OperatorCounter()
    meter = Meter("cpu", count=operators.count)
    model.eval()
    with contextlib.ExitStack() as stack:
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(meter)
        stack.enter_context(torch.no_grad())
        stack.enter_context(stand_ins(dtypes(recipe).compute, how.keeps_inputs_alone, how.device != "cpu"))
        fill(model, dtypes(recipe).compute if how.casts_weights else None)
        cache, begin = DynamicCache(config=short), meter.now
        sampler = Sampler(settings, torch.zeros(samples, dtype=torch.int64))
        try:
            for phase, tokens, place in (("prompts", prompt, 0), ("tokens", 1, prompt + settings.max_new_tokens - 2)):
                if phase == "tokens":
                    meter.begin("between")
                    _lengthen(cache, place - prompt)
                operators.part = phase
                meter.begin(phase)
                _one_forward(model, sampler, cache, tokens, place, has_tower=recipe.model.train is not None)
        except DynamicOutputShapeException as error:
            raise NotEstimated(
                f"{type(config).__name__}: what its layers compute depends on values ({error}), so the memory of "
                "sampling cannot be calculated from shapes"
            ) from None
        # Keys and values, or states of layers that mix by them.
        caches = [sum(one.nbytes for one in vars(layer).values() if isinstance(one, Tensor)) for layer in cache.layers]
    # Of a rank's layers, the larger ones if they differ; those of the prompts by their share of the length.
    here = sorted((caches[kind] for kind in kinds), reverse=True)[: math.ceil(len(kinds) / how.pipeline)]
    whole = sum(here)
    more, share = whole - sum(caches), prompt / (prompt + settings.max_new_tokens)
    peaks = {phase: meter.peaks[phase] - begin for phase in ("prompts", "tokens")}
    works = [operators.work(phase).times(len(kinds) / len(caches)) for phase in ("prompts", "tokens")]
    return CohortCosts(samples, whole, int(peaks["prompts"] + more * share), peaks["tokens"] + more, *works)


def _one_forward(
    model: torch.nn.Module, sampler: Sampler, cache: DynamicCache, tokens: int, place: int, *, has_tower: bool
) -> None:
    """Runs one turn of `rollouts.decoding.decode`. place: of the first of `tokens` in each sequence; has_tower: which
    reads sizes of files, here of the smallest there is."""
    samples = len(sampler.keys)
    with KnownIntegers() if has_tower else contextlib.nullcontext():
        positions = torch.arange(place, place + tokens).expand(samples, -1)
        output = model(
            input_ids=torch.zeros(samples, tokens, dtype=torch.int64),
            attention_mask=torch.ones(samples, place + tokens, dtype=torch.int64),
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
    sampler(output.logits[:, -1], place)


def _lengthen(cache: DynamicCache, tokens: int) -> None:
    """Adds tokens to the keys and values of each layer, as the forwards between prompts and the last token do."""
    for layer in cache.layers:
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if tokens > 0 and isinstance(keys, Tensor) and isinstance(values, Tensor):
            room = [torch.empty(*t.shape[:-2], tokens, t.shape[-1], dtype=t.dtype) for t in (keys, values)]
            layer.update(*room)  # pyright: ignore[reportAttributeAccessIssue]


def cohorts(settings: Rollouts, ranks: int) -> tuple[int, int]:
    """Returns the cohorts of a step, and how many of them a data-parallel rank decodes one after another."""
    count = math.ceil(settings.prompts * settings.samples / settings.cohort)
    return count, math.ceil(count / ranks)

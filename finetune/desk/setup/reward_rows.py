"""Rewards in `check`: tried on the reference answers of the recipe's first prompts, as if these had been sampled."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from finetune.data.dataset import Dataset
from finetune.errors import UserError
from finetune.recipe import Recipe
from finetune.recipe.reward_settings import JudgeReward
from finetune.rl.rewards.completion import Completion
from finetune.rl.rewards.trial import JUDGED_ROWS, TRIED_ROWS, RewardTrial, try_rewards
from finetune.rl.rollouts.prompts import RowPrompt, RunPrompts, completion_of, read_contents


def check_rewards(recipe: Recipe, data: Dataset, tokenizer: PreTrainedTokenizerBase) -> RewardTrial:
    """Returns the trial of the rewards but the environment's. Raises UserError if a run could not use them
    or learn from them."""
    rewards = tuple(one for one in recipe.rewards if one.kind() != "environment")
    count = JUDGED_ROWS if any(isinstance(one, JudgeReward) for one in rewards) else TRIED_ROWS
    trial = try_rewards(rewards, reference_answers(recipe, data, tokenizer, count))
    if trial.problems:
        fix = "Fix: correct the rewards or the rows; the table has the mean reward of each kind of answer"
        raise UserError("\n".join([*trial.problems, *(f"    {line}" for line in trial.table().splitlines()), fix]))
    return trial


def reference_answers(
    recipe: Recipe, data: Dataset, tokenizer: PreTrainedTokenizerBase, count: int
) -> list[Completion]:
    """Returns the references of the first prompts of each source, `count` of all, as if they had been sampled."""
    first = first_prompts(recipe, data, count)
    contents = read_contents(recipe, recipe.data.train, first)
    return [completion_of(one, contents[one.key], one.reference, tokenizer, is_truncated=False) for one in first]


def first_prompts(recipe: Recipe, data: Dataset, count: int) -> list[RowPrompt]:
    """Returns the first prompts of each source, `count` of all."""
    prompts, each = RunPrompts(recipe, data).prompts, -(-count // len(recipe.data.train))
    of_sources = [[prompt for prompt in prompts if prompt.source == i] for i in range(len(recipe.data.train))]
    return [prompt for of_source in of_sources for prompt in of_source[:each]][:count]

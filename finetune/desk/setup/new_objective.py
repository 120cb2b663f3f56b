"""The objective of a new recipe, if it is not that of the rows: checked against them; and a run on samples, with its
rewards, prompts and steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import yaml

from finetune.desk.setup.row_fit import GOAL_STEPS, LONGEST, ExampleLengths
from finetune.errors import UserError
from finetune.recipe.objective_settings import OBJECTIVE_SECTIONS
from finetune.recipe.reward_settings import REWARD_SECTIONS
from finetune.recipe.yaml_tree import flow

BASE_OF_SAMPLES = "gsm8k_grpo.yaml"  # in recipes/base, of all modes
PROMPTS, SAMPLES = 16, 8  # of a step, by default
PASSES = 2  # over the prompts, unless that makes fewer than `GOAL_STEPS`
MOST_STEPS = 500
LEAST_TOKENS, MOST_TOKENS = 64, 512  # of a sample
LONGER = 4  # times the longest references, which have the answer alone, without the way to it
BUILT_IN = tuple(name for name, one in REWARD_SECTIONS.items() if "name" in one.model_fields and name != "environment")
_LORA = "lora: {rank: 16, alpha: 32, dropout: 0.0, targets: all-linear}  # as recipes/base/lora.yaml"


def check_objective(name: str, format: str, data: str) -> None:
    """Raises UserError for an objective that does not take rows of a format."""
    formats = OBJECTIVE_SECTIONS[name].row_kind.formats
    if format not in formats:
        fitting = [one for one, section in OBJECTIVE_SECTIONS.items() if format in section.row_kind.formats]
        raise UserError(
            f"--objective {name}: not for rows of {format}, as in {data}. It takes {', '.join(formats)}. Fix: use "
            f"{', '.join(f'--objective {one}' for one in fitting)}, or other rows"
        )


def parse_reward(text: str) -> dict[str, Any]:
    """Reads `exact_match`, `rewards.py:score`, or a section of a recipe's `rewards`.

    >>> parse_reward("rewards.py:score")
    {'file': 'rewards.py', 'function': 'score'}
    """
    file, colon, function = text.strip().rpartition(":")
    if text.strip() in BUILT_IN:
        return {"name": text.strip()}
    if colon and file.endswith(".py") and function.isidentifier():
        return {"file": file, "function": function}
    try:
        given = yaml.safe_load(text)
    except yaml.YAMLError:
        given = None
    if isinstance(given, dict):
        return given
    raise UserError(
        f"--reward {text}: no such reward. Fix: use {', '.join(BUILT_IN)}, FILE.py:FUNCTION, or a section such "
        "as '{name: regex, pattern: ...}'"
    )


def chosen_rewards(
    objective: str, given: Sequence[str], ask: Callable[[str, str], str] | None
) -> tuple[dict[str, Any], ...]:
    """Returns the rewards of an objective on samples; asks for one if none is given. Raises UserError."""
    if not OBJECTIVE_SECTIONS[objective].takes_rewards:
        if given:
            raise UserError(
                f"--reward: `{objective}` trains on rows, not on rewards. Fix: leave it out, or add --objective grpo"
            )
        return ()
    if not given and ask is None:
        raise UserError(
            f"new: `{objective}` needs a reward, and there is no terminal to ask on. Fix: add --reward exact_match, "
            "another built-in, or FILE.py:FUNCTION"
        )
    if not given and ask is not None:
        given = [ask("Reward (a built-in such as number, or FILE.py:FUNCTION)", "exact_match")]
    return tuple(parse_reward(text) for text in given)


@dataclass(frozen=True)
class SampledRun:
    """Settings of a run on samples that fit the rows."""

    rewards: tuple[dict[str, Any], ...]
    prompts: int  # of a step
    max_new_tokens: int  # of a sample
    max_length: int  # of prompt and sample
    steps: int
    held_out: float  # share of the rows
    overlong: int  # prompts that leave no room, among those read
    longest_answer: int  # tokens of nearly all references

    @property
    def rows(self) -> int:
        return self.prompts * SAMPLES

    @property
    def interval(self) -> int:
        return max(5, math.ceil(self.steps / 25) * 5)


def fit_samples(
    lengths: ExampleLengths, rewards: tuple[dict[str, Any], ...], held_out: float, longest: int | None
) -> SampledRun:
    """Returns settings for these prompts. longest: the model's context."""
    limit = min(longest or LONGEST, LONGEST)
    answer = int(np.percentile(lengths.answers, 99)) if len(lengths.answers) else 0
    wanted = _power_of_two(LONGER * answer)
    tokens = max(1, min(max(LEAST_TOKENS, min(MOST_TOKENS, wanted)), limit // 2))
    prompt = int(lengths.examples.max()) if lengths.is_estimate else int((lengths.examples - lengths.answers).max())
    max_length = min(limit, _power_of_two(prompt + tokens + 1))
    count = max(1, round(len(lengths.examples) * lengths.scale * (1 - held_out)))
    prompts = min(PROMPTS, count)
    steps = min(MOST_STEPS, max(GOAL_STEPS, math.ceil(PASSES * count / prompts)))
    held_out = held_out if answer else 0.0  # held-out loss is that of answers
    overlong = int((lengths.examples > max_length).sum())
    return SampledRun(rewards, prompts, tokens, max_length, steps, held_out, overlong, answer)


def _power_of_two(number: int) -> int:
    """Returns the smallest one that is as large."""
    return 1 << max(5, (max(1, number) - 1).bit_length())


def sampled_lines(objective: str, mode: str, run: SampledRun) -> list[str]:
    """Returns the sections of a run on samples that the base leaves open, or has for its own rows."""
    of_mode = {"full": [], "lora": [_LORA], "qlora": [_LORA, "quantization: {type: nf4}"]}[mode]
    references = f"references have {run.longest_answer:,}" if run.longest_answer else "rows have no references"
    rollouts = {"prompts": run.prompts, "samples": SAMPLES, "max_new_tokens": run.max_new_tokens}
    return [
        f"mode: {mode}",
        *of_mode,
        f"objective: {{name: {objective}}}",
        f"rollouts: {flow(rollouts)}  # {references} tokens; raise it if samples are cut",
        "rewards:",
        *(f"  - {flow(reward)}" for reward in run.rewards),
        f"batch: {{rows: {run.rows}}}  # rollouts.prompts x rollouts.samples",
    ]

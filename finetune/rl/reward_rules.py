"""Rules for `rewards`: one kind each, its keys and no others, and values that can work at all."""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from finetune.recipe.objective_settings import OBJECTIVE_SECTIONS
from finetune.recipe.reward_settings import (
    BoxedReward,
    EnvironmentReward,
    ExactMatchReward,
    JudgeReward,
    ModelReward,
    RegexReward,
    RewardSettings,
)
from finetune.recipe.schema import Recipe

_REQUIRED = {  # kind: key, and an example of it
    "regex": ("pattern", "`pattern: '^<answer>.+</answer>$'`"),
    "json_schema": ("answer_schema", "`answer_schema: {type: object}`, or the path of a schema"),
    "length": ("target", "`target: 512`, the tokens that cost nothing"),
    "file": ("function", "`function: correct`, the function in it"),
    "judge": ("model", "`model: NAME`, as the server calls it"),
}
PLACES = ("{prompt}", "{completion}", "{reference}")  # in a judge's prompt


def rewards(recipe: Recipe) -> Iterator[tuple[str, str]]:
    if recipe.rewards and not recipe.objective.takes_rewards:
        takers = " or ".join(f"`{name}`" for name, one in OBJECTIVE_SECTIONS.items() if one.takes_rewards)
        yield "rewards", f"`objective.name: {recipe.objective.name}` takes no rewards, only {takers}: remove this"
    labels: dict[str, int] = {}
    environment = recipe.rollouts.environment if recipe.rollouts is not None else None
    for i, reward in enumerate(recipe.rewards):
        key = f"rewards[{i}]"
        if isinstance(reward, EnvironmentReward) and environment is None:
            yield key, "`environment` is what `rollouts.environment` returns: add that, such as `environment: env.py`"
        yield from ((f"{key}.{name}" if name else key, problem) for name, problem in _problems(reward))
        first = labels.setdefault(reward.label, i)
        if first != i:
            yield f"{key}.metric", f"rewards[{first}] is called {reward.label!r} as well: give one of them a `metric`"


def _problems(reward: RewardSettings) -> Iterator[tuple[str, str]]:
    kind = reward.kind()
    required, example = _REQUIRED.get(kind, ("", ""))
    if required and getattr(reward, required) is None:
        yield "", f"`{kind}` needs {example}"
    if reward.weight == 0:
        yield "weight", "is 0, so the reward has no effect: remove the reward"
    if isinstance(reward, ModelReward | EnvironmentReward):
        limited = (
            "which scores in the run's own process: remove it"
            if isinstance(reward, ModelReward)
            else "which is called as `rollouts.environment` says: set it there"
        )
        for key in ("seconds", "processes"):
            if getattr(reward, key) != type(reward).model_fields[key].default:
                yield key, f"has no effect on `{kind}`, {limited}"
    if isinstance(reward, BoxedReward) and reward.on_failure is None:
        yield (
            "on_failure",
            "sympy needs longer than `seconds` for some answers, such as towers of powers: say what they get, such as "
            "`on_failure: 0.0`",
        )
    if isinstance(reward, ExactMatchReward | RegexReward | JudgeReward):
        yield from _pattern_problems(reward)
    if isinstance(reward, JudgeReward):
        url = urlsplit(reward.judge)
        if url.scheme not in ("http", "https") or not url.netloc:
            yield "judge", "expected http://HOST:PORT/v1, or https://"
        elif url.username or url.password or url.query:
            yield (
                "judge",
                "must not hold a user, a password or a query: name the variable that has the key, `key: NAME`",
            )
        prompt, scale = reward.prompt, reward.scale
        if prompt is not None and "{completion}" not in prompt:
            yield (
                "prompt",
                f"lacks {{completion}}, so every completion would be judged alike; there are {', '.join(PLACES)}",
            )
        if scale[0] >= scale[1]:
            yield "scale", f"is the lowest and the highest number, and {scale[0]:g} is not below {scale[1]:g}"


def _pattern_problems(reward: ExactMatchReward | RegexReward | JudgeReward) -> Iterator[tuple[str, str]]:
    if reward.pattern is None:
        return
    try:
        groups = re.compile(reward.pattern).groups
    except re.error as error:
        yield "pattern", f"is not a valid regular expression: {error}"
        return
    if not isinstance(reward, RegexReward) and groups < 1:
        yield "pattern", "needs a group for the answer, such as `#### (.+)`"
    if not reward.pattern:
        yield "pattern", "is empty, so it is found in every text: give a pattern"

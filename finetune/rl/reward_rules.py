"""Rules for `rewards`: one kind each, its keys and no others, and values that can work at all."""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from finetune.recipe.schema import REWARD_KEYS, TAKES_REWARDS, Recipe, RewardSettings

_KINDS = ("name", "file", "reward_model", "judge")
_REQUIRED = {  # kind: key, and an example of it
    "regex": ("pattern", "`pattern: '^<answer>.+</answer>$'`"),
    "json_schema": ("answer_schema", "`answer_schema: {type: object}`, or the path of a schema"),
    "length": ("target", "`target: 512`, the tokens that cost nothing"),
    "file": ("function", "`function: correct`, the function in it"),
    "judge": ("model", "`model: NAME`, as the server calls it"),
}
PLACES = ("{prompt}", "{completion}", "{reference}")  # in a judge's prompt


def rewards(recipe: Recipe) -> Iterator[tuple[str, str]]:
    if recipe.rewards and recipe.objective.name not in TAKES_REWARDS:
        takers = " or ".join(f"`{name}`" for name in sorted(TAKES_REWARDS))
        yield "rewards", f"`objective.name: {recipe.objective.name}` takes no rewards, only {takers}: remove this"
    labels: dict[str, int] = {}
    environment = recipe.rollouts.environment if recipe.rollouts is not None else None
    for i, reward in enumerate(recipe.rewards):
        key = f"rewards[{i}]"
        given = [kind for kind in _KINDS if getattr(reward, kind) is not None]
        if len(given) != 1:
            has = f"has {' and '.join(f'`{kind}`' for kind in given)}: keep one" if given else "has none"
            yield key, f"a reward is one of `name`, `file`, `reward_model` and `judge`, and this {has}"
            continue
        if reward.kind == "environment" and environment is None:
            yield key, "`environment` is what `rollouts.environment` returns: add that, such as `environment: env.py`"
        yield from ((f"{key}.{name}" if name else key, problem) for name, problem in _problems(reward))
        first = labels.setdefault(reward.label, i)
        if first != i:
            yield f"{key}.metric", f"rewards[{first}] is called {reward.label!r} as well: give one of them a `metric`"


def _problems(reward: RewardSettings) -> Iterator[tuple[str, str]]:
    kind, keys = reward.kind, {key for keys in REWARD_KEYS.values() for key in keys}
    for key in sorted(keys - set(REWARD_KEYS[kind])):
        if getattr(reward, key) != RewardSettings.model_fields[key].default:
            readers = " and ".join(f"`{name}`" for name, own in REWARD_KEYS.items() if key in own)
            yield key, f"has no effect on `{kind}`, only on {readers}: remove it"
    required, example = _REQUIRED.get(kind, ("", ""))
    if required and getattr(reward, required) is None:
        yield "", f"`{kind}` needs {example}"
    if reward.weight == 0:
        yield "weight", "is 0, so the reward has no effect: remove the reward"
    limited = {
        "reward_model": "which scores in the run's own process: remove it",
        "environment": "which is called as `rollouts.environment` says: set it there",
    }
    for key in ("seconds", "processes"):
        if kind in limited and getattr(reward, key) != RewardSettings.model_fields[key].default:
            yield key, f"has no effect on `{kind}`, {limited[kind]}"
    if kind == "boxed" and reward.on_failure is None:
        yield (
            "on_failure",
            "sympy needs longer than `seconds` for some answers, such as towers of powers: say what they get, such as "
            "`on_failure: 0.0`",
        )
    yield from _pattern_problems(reward)
    if kind == "judge":
        url = urlsplit(reward.judge or "")
        if url.scheme not in ("http", "https") or not url.netloc:
            yield "judge", "expected http://HOST:PORT/v1, or https://"
        elif url.username or url.password or url.query:
            yield (
                "judge",
                "must not hold a user, a password or a query: name the variable that has the key, `key: NAME`",
            )
        prompt, scale = reward.prompt, reward.value("scale")
        if prompt is not None and "{completion}" not in prompt:
            yield (
                "prompt",
                f"lacks {{completion}}, so every completion would be judged alike; there are {', '.join(PLACES)}",
            )
        if scale[0] >= scale[1]:
            yield "scale", f"is the lowest and the highest number, and {scale[0]:g} is not below {scale[1]:g}"


def _pattern_problems(reward: RewardSettings) -> Iterator[tuple[str, str]]:
    if reward.pattern is None or "pattern" not in REWARD_KEYS[reward.kind]:
        return
    try:
        groups = re.compile(reward.pattern).groups
    except re.error as error:
        yield "pattern", f"is not a valid regular expression: {error}"
        return
    if reward.kind != "regex" and groups < 1:
        yield "pattern", "needs a group for the answer, such as `#### (.+)`"
    if not reward.pattern:
        yield "pattern", "is empty, so it is found in every text: give a pattern"

"""The environment in `check`: begun on the recipe's first prompts, and given one turn by the run's own code, which is
the reference answer or garbage; nothing is sampled."""

from __future__ import annotations

from collections import Counter

from transformers import PreTrainedTokenizerFast

from finetune.data.chat.renderer import Renderer
from finetune.data.chat.turns import TurnRenderer
from finetune.data.dataset import Dataset
from finetune.desk.setup.reward_rows import first_prompts
from finetune.recipe import Recipe
from finetune.rl.rollouts.episodes import Episodes
from finetune.rl.rollouts.prompts import read_contents
from finetune.training.evaluation import end_ids

TRIED_ROWS = 4
_GARBAGE = 'qwerty {"'
_DID = {"over": "ends it", "max_turns": "is the last turn", "max_new_tokens": "leaves no room", "failed": "fails"}


def check_environment(
    recipe: Recipe, data: Dataset, tokenizer: PreTrainedTokenizerFast, of_rows: Renderer
) -> list[str]:
    """Returns lines on what the environment does, by kind of turn. Raises UserError if a run could not use it."""
    assert recipe.rollouts is not None  # the caller's condition
    ends = end_ids(recipe.model, tokenizer, [data])
    renderer = TurnRenderer(of_rows, frozenset(ends))
    prompts = first_prompts(recipe, data, TRIED_ROWS)
    contents = read_contents(recipe, recipe.data.train, prompts)
    garbage = [*tokenizer.encode(_GARBAGE, add_special_tokens=False), min(ends)]
    lines = []
    with Episodes(recipe, renderer, None) as tried:
        for kind, turns in {
            "the reference": [prompt.reference for prompt in prompts],
            "garbage": [garbage for _ in prompts],
        }.items():
            given = [i for i, turn in enumerate(turns) if turn]
            episodes = tried.reset(0, [prompts[i] for i in given], [contents[prompts[i].key] for i in given], 1)
            rooms = [recipe.rollouts.max_new_tokens - len(turns[i]) for i in given]
            tried.step(episodes, [turns[i] for i in given], rooms)
            tried.end(episodes)
            did = Counter("is answered" if one.ended is None else _DID[one.ended] for one in episodes)
            if episodes:
                outcomes = [one.outcome for one in episodes if one.outcome is not None]
                values = [outcome.value for outcome in outcomes if outcome.value is not None]
                mean = f"; mean reward {sum(values) / len(values):.3f}" if values else ""
                failed = next((f" ({one.what})" for one in outcomes if one.value is None), "")
                each = ", ".join(f"{what} {count}" for what, count in did.items())
                lines.append(f"{kind} as a turn, of {len(episodes)} rows: {each}{failed}{mean}")
    if renderer.pattern is None:
        lines.append("the chat template writes no tool calls as JSON: `calls` is always empty, `text` has the turn")
    return lines

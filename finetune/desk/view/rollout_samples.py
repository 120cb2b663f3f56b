"""Samples of a run's rollouts for `report`: of the first, a middle and the last recorded step, and the last evaluation.

Of each, the prompts with the lowest, the median and the highest mean reward; of each prompt, answers from the best to
the worst.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from finetune.checkpoints.folder import step_of
from finetune.rl.rollouts import records
from finetune.rl.rollouts.records import Sample

ANSWERS = 8  # of a prompt: the best and the worst half of them
CHARACTERS = 2000  # of a text
LEVELS = 5  # of colour, from the lowest to the highest reward of a step


def read_samples(folder: Path) -> list[dict[str, Any]]:
    """Returns the chosen steps with their prompts and answers, as values of report.html.jinja. folder: of a run.

    Raises errors of damaged files; a record that is not complete, as a kill leaves it, is left out.
    """
    file, shown = folder / "tokenizer" / "tokenizer.json", list[dict[str, Any]]()
    tokenizer = Tokenizer.from_file(str(file)) if file.is_file() else None
    for kind, name in ((records.STEP, "step {}"), (records.EVALUATION, "held-out prompts after step {}")):
        files = (folder / records.FOLDER).glob(f"{kind}-*.jsonl")
        steps = sorted(map(step_of, files))
        first = () if kind == records.EVALUATION else (0, len(steps) // 2)
        chosen = sorted({steps[i] for i in (*first, -1)}) if steps else []
        read = [(step, records.read_record(folder / records.FOLDER, step, kind)) for step in chosen]
        shown += [
            {"title": name.format(step), **_step(found[0], tokenizer)} for step, found in read if found is not None
        ]
    return shown


def _step(samples: Sequence[Sample], tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Returns the reward of a step and its chosen prompts."""
    rewards = [sample.reward.total for sample in samples]
    low, high = min(rewards), max(rewards)
    groups = [list(group) for _, group in groupby(samples, lambda one: (one.source, one.path, one.row, one.prompt))]
    ordered = sorted(groups, key=lambda group: np.mean([one.reward.total for one in group]))
    some = {id(group): group for group in (ordered[0], ordered[len(ordered) // 2], ordered[-1])}.values()
    prompts: list[dict[str, Any]] = []
    for group in some:
        shown = sorted(group, key=lambda one: -one.reward.total)
        if len(shown) > ANSWERS:
            shown = [*shown[: ANSWERS // 2], *shown[-ANSWERS // 2 :]]
        text = tokenizer.decode(group[0].prompt, skip_special_tokens=False) if tokenizer else ""
        prompts.append(
            {
                "place": f"{group[0].path}:{group[0].row}",
                "text": _cut(text),
                "reward": float(np.mean([one.reward.total for one in group])),
                "answers": [_answer(one, low, high) for one in shown],
                "left_out": len(group) - len(shown),
            }
        )
    return {"reward": float(np.mean(rewards)), "num_prompts": len(groups), "prompts": prompts}


def _answer(sample: Sample, low: float, high: float) -> dict[str, Any]:
    share = (sample.reward.total - low) / (high - low) if high > low else 0.5
    values = [
        f"{name} {'failed' if value is None else f'{value:.4g}'}" for name, value in sample.reward.by_name.items()
    ]
    return {
        "reward": f"{sample.reward.total:.4g}",
        "level": round(share * (LEVELS - 1)),
        "text": _cut(sample.text),
        "values": values if len(values) > 1 or sample.reward.failures else [],
        "failures": sample.reward.failures,
        "tokens": len(sample.ids),
        "is_truncated": sample.is_truncated,
    }


def _cut(text: str) -> str:
    return text if len(text) <= CHARACTERS else f"{text[:CHARACTERS]} ... {len(text) - CHARACTERS:,} more characters"

"""The numbers of a step that are looked at first: the loss, and what the objective is about."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Headline(NamedTuple):
    name: str  # in a line for people
    form: str  # of the number


# By key of metrics.jsonl, those of a policy, of pairs and marked answers, of classes, of a teacher; the first is the
# main one. A policy's loss is 0 in the mean by construction, and a loss of pairs says little of how many are in the
# right order.
HEADLINES = {
    "reward": Headline("reward", ".4f"),
    "zero_variance": Headline("no variance", ".0%"),
    "rewards/accuracy": Headline("accuracy", ".1%"),
    "rewards/margin": Headline("margin", ".3g"),
    "accuracy": Headline("accuracy", ".1%"),
    "divergence": Headline("divergence", ".4f"),
}
# Of an evaluation; the first that is measured is shown.
EVALUATIONS = {
    "exact_match": Headline("exact answers", ".1%"),
    "word_error_rate": Headline("word errors", ".1%"),
    "eval_reward": Headline("reward", ".4f"),
    "eval_accuracy": Headline("accuracy", ".1%"),
    "eval_loss": Headline("loss", ".4f"),
}


def headlines(line: Mapping[str, Any]) -> list[str]:
    """Returns the numbers of a step beside its loss, as text.

    >>> headlines({"loss": 0.0, "reward": 0.125, "zero_variance": 0.75})
    ['reward 0.1250', 'no variance 75%']
    """
    return [f"{name} {line[key]:{form}}" for key, (name, form) in HEADLINES.items() if key in line]


def progress_text(line: Mapping[str, Any]) -> str:
    """Returns a step in a line of a hundred columns, with its count and time: MFU where there is room.

    >>> progress_text({"loss": 0.5, "rewards/accuracy": 0.75, "tokens_per_s": 1234.5, "mfu": 0.4})
    'loss 0.5000  accuracy 75.0%  1,234 tok/s'
    """
    numbers, speed = headlines(line), [f"{line['tokens_per_s']:,.0f} tok/s"]
    speed += [f"MFU {line['mfu']:.1%}"] if "mfu" in line and not numbers else []
    return "  ".join([f"loss {line['loss']:.4f}", *numbers, *speed])

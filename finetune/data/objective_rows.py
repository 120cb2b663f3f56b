"""Converts a row to the examples of an objective, with the numbers that it reads next to their tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from finetune.data.samples import BadRow, Drawable, Labelled, Preference, Ranked, Sample
from finetune.recipe.objective_settings import ObjectiveSection


@dataclass(frozen=True)
class ObjectiveRows:
    """Settings of a recipe that decide which examples a row gives."""

    columns: tuple[str, ...] = ()  # of each example
    labels: tuple[str, ...] = ()  # names of the classes
    is_unpaired: bool = False  # the answers of a pair are two examples
    is_text: bool = False  # the text is read, whoever says it
    is_prompt: bool = False  # answers are sampled: a row may be without one


PLAIN = ObjectiveRows()


def objective_rows(objective: ObjectiveSection, is_prompt: bool = False) -> ObjectiveRows:
    kind = objective.row_kind
    labels = objective.score_labels if kind.is_text else ()
    return ObjectiveRows(kind.columns, labels, kind.is_unpaired, kind.is_text, is_prompt)


def trained_part(objective: ObjectiveSection) -> str:
    """Returns which tokens of a conversation are targets: of pairs and marked answers the answer, of a class all."""
    if objective.row_kind.is_text:
        return "all"
    return objective.train_on if objective.row_kind.has_turns else "assistant"


def examples_of(sample: Sample, rows: ObjectiveRows, pairs: str) -> Iterator[tuple[Drawable, tuple[float, ...]]]:
    """Yields the content of each example of a row, with its numbers. pairs: of ranked answers, see `Source.pairs`.

    Raises BadRow for a label that the recipe does not list.
    """
    if isinstance(sample, Labelled):
        label = sample.label
        if rows.is_text and isinstance(label, str) and label in rows.labels:
            label = rows.labels.index(label)
        elif rows.is_text and not (isinstance(label, int) and 0 <= label < len(rows.labels)):
            expected = f"one of {', '.join(map(repr, rows.labels))}, or 0 to {len(rows.labels) - 1}"
            raise BadRow(f"`label` is {label!r}, which is not in `objective.labels`; expected {expected}")
        yield sample.sample, (float(label),)
    elif isinstance(sample, Ranked):  # the best answer against the worst, or every two whose scores differ
        scores = sample.scores
        order = sorted(range(len(scores)), key=lambda i: -scores[i])  # the first of equals comes first
        for better, worse in itertools.combinations(order, 2) if pairs == "all" else [(order[0], order[-1])]:
            if scores[better] > scores[worse]:
                pair = Preference(sample.answers[better], sample.answers[worse])
                yield pair, tuple(0.0 for _ in rows.columns)
    elif isinstance(sample, Preference) and rows.is_unpaired:
        yield from ((sample.chosen, (1.0,)), (sample.rejected, (0.0,)))
    elif isinstance(sample, Preference):
        yield sample, tuple(sample.margin for _ in rows.columns)
    else:
        yield sample, ()

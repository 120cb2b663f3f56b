"""The data of a recipe as `inspect` shows it: its statistics, and the choice of examples.

Letters: `N` examples of an epoch, `R` packed sequences, `B` bins of a histogram.
"""

from __future__ import annotations

import itertools
import json
import re
import tempfile
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from finetune.data.chat.renderer import Renderer
from finetune.data.dataset import Dataset
from finetune.data.examples import Examples, prepare_examples
from finetune.data.packing import row_work
from finetune.data.samples import Example
from finetune.data.sources.source import read_rows
from finetune.data.token_cache import DataReport
from finetune.errors import UserError
from finetune.recipe import Recipe
from finetune.recipe.objective_settings import ObjectiveSettings
from finetune.recipe.schema import Data, Source


@dataclass(frozen=True)
class DatasetView:
    """A recipe's data, built, with its statistics."""

    recipe: Recipe
    recipe_path: Path
    sources: Sequence[Source]  # data.train or data.eval
    renderer: Renderer
    template: str  # name of the chat template
    data: Dataset
    totals: DatasetStatistics


def numbers_of(example: Example, objective: ObjectiveSettings) -> str:
    """Returns an example's label or margin in words."""
    label, margin = example.columns.get("label"), example.columns.get("margin")
    if isinstance(label, float):
        names = [f"label {name}" for name in objective.score_labels] or ["a bad answer", "a good answer"]
        return names[int(label)]
    return f"margin {margin:g}" if isinstance(margin, float) and margin else ""


BINS = 20  # approximate number, for lengths
# Rows dropped or changed before they are examples: {count in the report: (event, advice)}.
LOSSES = {
    "bad": ("bad rows skipped", "`data.on_bad_row: error` stops at the first"),
    "dropped_overlong": ("dropped, longer than max_length", "raise `data.max_length`, or `data.overlong: split`"),
    "truncated": ("truncated to max_length", "raise `data.max_length`: the end of the answer is often what is lost"),
    "split": ("split into pieces of max_length", "raise `data.max_length` to keep them in one piece"),
    "no_supervised_token": ("dropped, no supervised token", "answers without content, or truncated before one"),
    "no_other_answer": ("dropped, no other row's answer fits next to it", "raise `data.max_length`"),
    "unrolled": ("conversations turned into several examples", "the template rewrites earlier turns"),
    "duplicates": ("same tokens as an earlier example; kept", "remove them from the source if not intended"),
}


@dataclass(frozen=True)
class Histogram:
    """counts[b] values are within (edges[b], edges[b + 1]]."""

    edges: tuple[float, ...]  # (B + 1,) from 0
    counts: tuple[int, ...]  # (B,)


@dataclass(frozen=True)
class PackingStatistics:
    """Attention work: the sum of squared document lengths of a packed sequence, in token pairs."""

    packed: bool  # false: one document per sequence
    rows: int
    efficiency: float  # tokens / (rows * max_length)
    documents_per_row: dict[str, float]  # min, mean, max
    attention_work_per_row: dict[str, float]


@dataclass(frozen=True)
class DatasetStatistics:
    split: str  # train | eval
    max_length: int  # tokens
    overlong: str
    report: DataReport
    examples: int  # per epoch, like all below
    tokens: int
    supervised_tokens: int
    lengths: Histogram  # tokens of an example
    percentiles: dict[str, int]  # {percentile: length}
    supervised_share: Histogram  # supervised tokens / tokens of an example
    packing: PackingStatistics
    notes: tuple[str, ...]

    @property
    def supervised(self) -> float:
        """Share of supervised tokens."""
        return self.supervised_tokens / self.tokens

    def as_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON, with the report's counts under `counts` and `sources`."""
        counts = self.report.as_dict()
        sources = counts.pop("sources")
        plain = {name: value for name, value in asdict(self).items() if name != "report"}
        return {**plain, "supervised": self.supervised, "counts": counts, "sources": sources}


def dataset_statistics(data: Dataset, settings: Data, split: str, notes: Sequence[str] = ()) -> DatasetStatistics:
    """Computes statistics of a dataset without reading its tokens."""
    examples, rows = data.examples, data.rows
    lengths, trained = examples.lengths, examples.num_targets
    percents = {"min": 0, "p25": 25, "median": 50, "p75": 75, "p90": 90, "p99": 99, "max": 100}
    percentiles = np.percentile(lengths, list(percents.values()), method="inverted_cdf")  # lengths that occur
    documents = np.diff(examples.sizes.offsets)[rows.members]
    return DatasetStatistics(
        split=split,
        max_length=settings.max_length,
        overlong=settings.overlong,
        report=examples.report,
        examples=len(examples),
        tokens=data.tokens,
        supervised_tokens=data.supervised_tokens,
        lengths=_histogram(lengths, length_edges(lengths, settings.max_length)),
        percentiles={name: int(value) for name, value in zip(percents, percentiles, strict=True)},
        supervised_share=_histogram(trained / lengths, [n / 10 for n in range(11)]),
        packing=PackingStatistics(
            packed=settings.packing,
            rows=len(rows),
            efficiency=data.efficiency(settings.max_length),
            documents_per_row=_min_mean_max(np.add.reduceat(documents, rows.offsets[:-1])),
            attention_work_per_row=_min_mean_max(row_work(rows, examples.sizes.attention_work)),
        ),
        notes=tuple(notes),
    )


def _histogram(values: NDArray[Any], edges: Sequence[float]) -> Histogram:
    bins = np.maximum(np.searchsorted(edges, values, side="left") - 1, 0)  # a prompt has a share of 0
    counts = np.bincount(bins, minlength=len(edges) - 1)
    return Histogram(tuple(edges), tuple(counts.tolist()))


def length_edges(lengths: NDArray[np.integer], max_length: int) -> list[int]:
    """Returns powers of two if most examples are far shorter than the longest, else equal widths.

    Ends at max_length if the longest is near it; the last bin may be narrower.
    """
    longest, middle = int(lengths.max()), float(np.median(lengths))
    end = max_length if 2 * longest > max_length else longest
    if longest > 16 * middle:
        return [0, *(1 << n for n in range(end.bit_length()) if 1 << n < end), end]
    widths = (10**power * factor for power in itertools.count() for factor in (1, 2, 5))
    width = next(width for width in widths if width >= end / BINS)
    last = end if end == max_length else -(-end // width) * width
    return [*range(0, last, width), last]


def _min_mean_max(values: NDArray[np.integer]) -> dict[str, float]:
    return {"min": int(values.min()), "mean": float(values.mean()), "max": int(values.max())}


def first_examples(examples: Examples, count: int) -> list[int]:
    """Returns the indices of `count` examples, taken from the sources in turn; sorted."""
    ranges, end = [], 0
    for source in examples.report.sources:
        ranges.append((end, end + source.taken))
        end += source.taken
    longest = max((end - start for start, end in ranges), default=0)
    in_turn = (start + i for i in range(longest) for start, end in ranges if start + i < end)
    return sorted(itertools.islice(in_turn, count))


def find_row(view: DatasetView, address: str) -> list[int]:
    """Returns the indices of the examples made from a row PATH:NUMBER; the end of a path suffices.

    Raises UserError with the nearest rows and the reason for its absence.
    """
    path, _, digits = address.rpartition(":")
    if not path or not digits.isdecimal():
        raise UserError(f"--row {address}: not of the form PATH:NUMBER. Fix: write it like train.jsonl:12")
    number, rows, indices = int(digits), set[tuple[int, str]](), []
    for i, example in enumerate(view.data.examples):
        if matches_path(example.path, path):
            rows.add((example.row, example.path))
            if example.row == number:
                indices.append(i)
    if indices:
        return indices
    if not rows:
        paths = sorted({example.path for example in view.data.examples})
        raise UserError(f"--row {address}: no example is from {path}. Fix: use one of {', '.join(paths)}")
    ordered = sorted(rows)
    index = bisect_left(ordered, (number, ""))
    nearest = [f"{near}:{row}" for row, near in ordered[max(0, index - 1) : index + 1]]
    nearest = f"{'are' if len(nearest) > 1 else 'is'} {' and '.join(nearest)}"
    reason = _absence_reason(view, path, number)
    begin = "Or" if "Fix: " in reason else "Fix:"
    raise UserError(f"--row {address}: {reason}\n{begin} give a row that has an example; the nearest {nearest}")


def matches_path(label: str, typed: str) -> bool:
    """Returns whether `typed` is a source's label, or its last path components."""
    return label == typed or label.endswith(f"/{typed.removeprefix('./')}")


def _absence_reason(view: DatasetView, path: str, number: int) -> str:
    """Returns the reason that a row has no example: reads and renders it again, alone."""
    bad: dict[tuple[str, int], str] = {}
    for source, report in zip(view.sources, view.data.examples.report.sources, strict=True):
        for label, n, row in read_rows(source, lambda label, n, message: bad.update({(label, n): message})):
            if n == number and matches_path(label, path):
                return _drop_reason(view, source, report.format, row, f"{label}:{n}")
        for (label, n), message in bad.items():
            if n == number and matches_path(label, path):
                return f"a bad row: {message}"
    return "there is no such row"


def _drop_reason(view: DatasetView, source: Source, format: str, row: dict[str, Any], address: str) -> str:
    """Returns the error for a file with only this row if dropping is not allowed."""
    strict = {"overlong": "error", "on_bad_row": "error", "mixture": None, "streaming": False}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "row.jsonl"
        path.write_text(json.dumps(row, default=str) + "\n", encoding="utf-8")
        alone = {"path": str(path), "config": None, "split": "train", "weight": 1.0, "max_epochs": None, "limit": None}
        only = source.model_copy(update={**alone, "format": format or source.format})
        data = view.recipe.data.model_copy(update={**strict, "train": (only,), "eval": ()})
        recipe = view.recipe.model_copy(update={"data": data})
        try:
            prepare_examples(recipe, [only], view.renderer)
        except UserError as error:
            why = re.split(r"\n.*`data\.on_bad_row", str(error))[0]  # without the advice for a run that stops there
            return f"dropped: {why}".replace(f"{path}:1", address).replace(str(path), address)
    return f"usable, but not sampled: an epoch takes only part of its source (weight {source.weight:g})"

"""What the data adds up to: counts of every source, lengths, shares and how the rows are packed.

Letters: `N` examples of an epoch, `R` packed rows, `B` bins of a histogram.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from finetune.data import DataReport, row_work
from finetune.data.dataset import Dataset
from finetune.recipe.schema import Data

BINS = 20  # of lengths, about
# What is lost or changed on the way from a row to examples: count of the report, what happened, what to do about it.
LOSSES = {
    "bad": ("bad rows left out", "`data.on_bad_row: error` stops at the first"),
    "dropped_overlong": ("dropped, longer than max_length", "raise `data.max_length`, or `data.overlong: split`"),
    "truncated": ("cut off at max_length", "raise `data.max_length`: what is cut off is often the answer's end"),
    "split": ("cut into pieces of max_length", "raise `data.max_length` to keep them whole"),
    "no_supervised_token": ("dropped, nothing in them is trained", "answers without content, or cut off before one"),
    "unrolled": ("conversations made several examples", "the template rewrites earlier turns"),
    "duplicates": ("the same tokens as an earlier example; kept", "remove them from the source if not meant"),
}


@dataclass(frozen=True)
class Histogram:
    """counts[b] values are within (edges[b], edges[b + 1]]."""

    edges: tuple[float, ...]  # (B + 1,) from 0
    counts: tuple[int, ...]  # (B,)


@dataclass(frozen=True)
class Packing:
    """How the examples lie in rows. Attention work: the sum of a row's squared document lengths, in token pairs."""

    packed: bool  # false: one document a row
    rows: int
    efficiency: float  # tokens / (rows * max_length)
    documents_per_row: dict[str, float]  # min, mean, max
    attention_work_per_row: dict[str, float]


@dataclass(frozen=True)
class Totals:
    split: str  # train | eval
    max_length: int  # tokens
    overlong: str
    report: DataReport
    examples: int  # of an epoch, as the rest below
    tokens: int
    supervised_tokens: int
    lengths: Histogram  # tokens of an example
    percentiles: dict[str, int]  # of lengths
    supervised_share: Histogram  # trained tokens over tokens, of an example
    packing: Packing
    notes: tuple[str, ...]

    @property
    def supervised(self) -> float:
        """Share of all tokens."""
        return self.supervised_tokens / self.tokens

    def as_dict(self) -> dict[str, Any]:
        """For JSON: plain values, the report's counts under `counts` and `sources`."""
        counts = self.report.as_dict()
        sources = counts.pop("sources")
        plain = {name: value for name, value in asdict(self).items() if name != "report"}
        return {**plain, "supervised": self.supervised, "counts": counts, "sources": sources}


def totals_of(data: Dataset, settings: Data, split: str, notes: Sequence[str] = ()) -> Totals:
    """Everything that can be counted of a dataset without reading its tokens."""
    lengths, trained = data.examples.lengths, data.examples.num_targets
    return Totals(
        split=split,
        max_length=settings.max_length,
        overlong=settings.overlong,
        report=data.examples.report,
        examples=len(data.examples),
        tokens=data.tokens,
        supervised_tokens=data.supervised_tokens,
        lengths=_histogram(lengths, _length_edges(lengths, settings.max_length)),
        percentiles=_percentiles(lengths),
        supervised_share=_histogram(trained / lengths, [n / 10 for n in range(11)]),
        packing=_packing(data, settings),
        notes=tuple(notes),
    )


def _histogram(values: NDArray[Any], edges: Sequence[float]) -> Histogram:
    places = np.searchsorted(edges, values, side="left") - 1
    counts = np.bincount(places, minlength=len(edges) - 1)
    return Histogram(tuple(edges), tuple(counts.tolist()))


def _length_edges(lengths: NDArray[np.integer], max_length: int) -> list[int]:
    """Powers of two where most examples are far shorter than the longest, else steps of one width.

    Up to max_length where the longest is near it; the last bin may be narrower.
    """
    longest, middle = int(lengths.max()), float(np.median(lengths))
    end = max_length if 2 * longest > max_length else longest
    if longest > 16 * middle:
        edges = [0, *(1 << n for n in range(end.bit_length()) if 1 << n < end), end]
    else:
        width = _round_width(end / BINS)
        last = end if end == max_length else -(-end // width) * width
        edges = [*range(0, last, width), last]
    return edges


def _round_width(width: float) -> int:
    """The smallest of 1, 2, 5, 10, 20, 50, ... that is no less."""
    unit = 1
    while True:
        for factor in (1, 2, 5):
            if unit * factor >= width:
                return unit * factor
        unit *= 10


def _percentiles(lengths: NDArray[np.integer]) -> dict[str, int]:
    """Lengths that occur: so many per cent of the examples are no longer."""
    asked = {"min": 0, "p25": 25, "median": 50, "p75": 75, "p90": 90, "p99": 99, "max": 100}
    found = np.percentile(lengths, list(asked.values()), method="inverted_cdf")
    return {name: int(value) for name, value in zip(asked, found, strict=True)}


def _packing(data: Dataset, settings: Data) -> Packing:
    sequences = np.diff(data.examples.sizes.offsets)[data.rows.members]
    return Packing(
        packed=settings.packing,
        rows=len(data.rows),
        efficiency=data.efficiency(settings.max_length),
        documents_per_row=_spread(np.add.reduceat(sequences, data.rows.offsets[:-1])),
        attention_work_per_row=_spread(row_work(data.rows, data.examples.sizes.attention_work)),
    )


def _spread(values: NDArray[np.integer]) -> dict[str, float]:
    return {"min": int(values.min()), "mean": float(values.mean()), "max": int(values.max())}

"""`prepare`: tokenise ahead of a run, and say what came out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from finetune.data import SourceReport, prepare_examples
from finetune.data.building import OpenedSources
from finetune.data.dataset import template_notes
from finetune.models.tokenizer import load_tokenizer
from finetune.recipe import Recipe


@dataclass(frozen=True)
class Prepared:
    """One source as it lies in the cache now."""

    part: str  # train | eval
    report: SourceReport
    build_s: float | None  # None: it was there

    def as_dict(self) -> dict[str, Any]:
        return {
            "part": self.part,
            "cached": self.build_s is None,
            "seconds": self.build_s or 0.0,
            **asdict(self.report),
        }

    @property
    def dropped(self) -> int:
        """Rows and examples that are not trained on."""
        return self.report.bad + self.report.dropped_overlong + self.report.no_supervised_token


def prepare(recipe: Recipe) -> tuple[list[Prepared], list[str]]:
    """Every source of a recipe into the cache, and notes on the template. Raises UserError."""
    tokenizer = load_tokenizer(recipe.model)
    opened = OpenedSources(recipe)
    notes = template_notes(recipe, tokenizer, opened)
    prepared: list[Prepared] = []
    if recipe.data.streaming:
        notes.append("data.streaming: data.train is read as the run needs it, so nothing of it is prepared")
    train = () if recipe.data.streaming else recipe.data.train
    for part, sources in (("train", train), ("eval", recipe.data.eval)):
        if sources:
            examples = prepare_examples(recipe, sources, tokenizer, opened=opened)
            reports = zip(examples.report.sources, examples.build_s, strict=True)
            prepared += [Prepared(part, report, seconds) for report, seconds in reports]
    return prepared, notes


def show_prepared(console: Console, prepared: list[Prepared], notes: list[str]) -> None:
    """Two lines a source, the rows that were skipped, and the notes."""
    for one in prepared:
        for line in (*_lines(one), *(f"  skipped: {row}" for row in one.report.bad_rows)):
            console.print(line, soft_wrap=True, highlight=False, markup=False)
    for note in notes:
        console.print(f"note: {note}", soft_wrap=True, highlight=False, markup=False)


def _lines(one: Prepared) -> Iterator[str]:
    report = one.report
    how = "cached" if one.build_s is None else f"made in {one.build_s:,.1f} s"
    yield f"{one.part}: {report.path} ({report.format}), {how}"
    yield (
        f"  {report.rows:,} rows, {report.examples:,} examples, {report.tokens:,} tokens, "
        f"{report.supervised_tokens / report.tokens:.0%} supervised, {one.dropped:,} dropped"
    )

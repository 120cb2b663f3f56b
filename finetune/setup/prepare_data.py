"""`prepare`, `cache list` and `cache clean`: fill the token cache before a run, and show what it holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from finetune.data.building import OpenedSources
from finetune.data.cache_entries import CachedEntry
from finetune.data.examples import prepare_examples
from finetune.data.token_cache import SourceReport
from finetune.recipe import Recipe
from finetune.utils import readable_bytes


@dataclass(frozen=True)
class PreparedSource:
    """One cached source."""

    part: str  # train | eval
    report: SourceReport
    build_s: float | None  # None: already cached

    def as_dict(self) -> dict[str, Any]:
        return {
            "part": self.part,
            "cached": self.build_s is None,
            "seconds": self.build_s or 0.0,
            **asdict(self.report),
        }

    @property
    def dropped(self) -> int:
        """Number of rows and examples not trained on."""
        return self.report.bad + self.report.dropped_overlong + self.report.no_supervised_token


def prepare(recipe: Recipe) -> tuple[list[PreparedSource], list[str]]:
    """Tokenize every source of a recipe into the cache; returns them and notes on the template. Raises UserError."""
    from finetune.data.dataset import template_notes  # imports torch, which the cache commands do not need
    from finetune.models.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(recipe.model, recipe.tokens)
    opened = OpenedSources(recipe)
    notes = template_notes(recipe, tokenizer, opened)
    prepared: list[PreparedSource] = []
    if recipe.data.streaming:
        notes.append("data.streaming: data.train is read during the run, so it is not prepared")
    train = () if recipe.data.streaming else recipe.data.train
    for part, sources in (
        ("train", train),
        ("eval", recipe.data.own_eval_sources),
    ):
        if sources:
            examples = prepare_examples(recipe, sources, tokenizer, opened=opened)
            reports = zip(examples.report.sources, examples.build_s, strict=True)
            prepared += [PreparedSource(part, report, seconds) for report, seconds in reports]
    return prepared, notes


def show_prepared(console: Console, prepared: list[PreparedSource], notes: list[str]) -> None:
    """Print two lines per source, the rows that were skipped, and the notes."""
    for one in prepared:
        for line in (*_lines(one), *(f"  skipped: {row}" for row in one.report.bad_rows)):
            console.print(line, soft_wrap=True, highlight=False, markup=False)
    for note in notes:
        console.print(f"note: {note}", soft_wrap=True, highlight=False, markup=False)


def _lines(one: PreparedSource) -> Iterator[str]:
    report = one.report
    how = "cached" if one.build_s is None else f"tokenised in {one.build_s:,.1f} s"
    yield f"{one.part}: {report.path} ({report.format}), {how}"
    yield (
        f"  {report.rows:,} rows, {report.examples:,} examples, {report.tokens:,} tokens, "
        f"{report.supervised_tokens / report.tokens:.0%} supervised, {one.dropped:,} dropped"
    )


def show_entries(console: Console, folder: Path, entries: Sequence[CachedEntry]) -> None:
    """Print a table of cache entries and their total size."""
    if not entries:
        console.print(f"{folder}: the cache is empty", soft_wrap=True, highlight=False)
        return
    table = Table("last used (UTC)", "tokens", "size")
    for column in table.columns[1:]:
        column.justify = "right"
    table.add_column("source, tokenizer, written by", overflow="fold")
    for entry in entries:
        table.add_row(*_cells(entry))
    console.print(table)
    size = readable_bytes(sum(entry.bytes for entry in entries))
    console.print(f"{folder}: {len(entries):,} entries, {size}", soft_wrap=True, highlight=False)


def _cells(entry: CachedEntry) -> Iterator[str]:
    key, written = entry.of or {}, entry.made or {}
    yield f"{datetime.fromtimestamp(entry.used, timezone.utc):%Y-%m-%d %H:%M}"
    yield f"{entry.tokens:,}" if entry.tokens is not None else "?"
    yield readable_bytes(entry.bytes)
    if not entry.is_whole:
        yield "[yellow]incomplete[/yellow]"
    elif not key:
        yield "[yellow]unknown[/yellow]"
    else:
        settings = [key.get("tokenizer"), f"max_length {key['max_length']:,}" if "max_length" in key else None]
        lines = [
            f"{key['source']} ({key['format']})",
            ", ".join(filter(None, settings)),  # a teacher's entry lacks one or both
            f"finetune {key['finetune']}" + (f", {written['host']}" if "host" in written else ""),
        ]
        yield escape("\n".join(filter(None, lines)))

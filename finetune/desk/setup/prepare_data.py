"""`prepare`, `cache list` and `cache clean`: fills the token cache before a run, and shows its entries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from finetune.data.cache_entries import CachedEntry
from finetune.data.token_cache import SourceReport
from finetune.recipe import Recipe
from finetune.recipe.objective_settings import Distill
from finetune.utils import readable_bytes


@dataclass(frozen=True)
class PreparedSource:
    """One cached source."""

    part: str  # train | eval
    report: SourceReport
    build_s: float | None  # None: already cached

    def as_dict(self) -> dict[str, Any]:
        cached = {"cached": self.build_s is None, "seconds": self.build_s or 0.0}
        return {"part": self.part, **cached, **asdict(self.report)}


def prepare(recipe: Recipe, recipe_file: str) -> tuple[list[PreparedSource], list[str]]:
    """Prepares a run on one process, which tokenizes every source into the cache; returns these and notes. Raises
    UserError."""
    from finetune.data.dataset import Dataset  # imports torch, which the cache commands do not need
    from finetune.engine.launch import read_config_file
    from finetune.features import all_features
    from finetune.training import prepare as preparation

    # A teacher's predictions are computed from the tokens later.
    if isinstance(recipe.objective, Distill):
        recipe = recipe.model_copy(update={"objective": recipe.objective.model_copy(update={"teacher": None})})
    run = preparation.prepare(recipe, recipe_file, read_config_file(None), all_features())
    notes = [*run.notes, *preparation.make_file_features(run)]
    if recipe.data.streaming:
        notes.append("data.streaming: data.train is read during the run, so it is not prepared")
    sources: list[PreparedSource] = []
    for part, data in (("train", run.training), ("eval", run.held_out if recipe.data.own_eval_sources else None)):
        if isinstance(data, Dataset):
            reports = zip(data.examples.report.sources, data.examples.build_s, strict=True)
            sources += [PreparedSource(part, report, seconds) for report, seconds in reports]
    return sources, notes


def show_prepared(console: Console, sources: list[PreparedSource], notes: list[str]) -> None:
    """Prints two lines per source, the rows that were skipped, and the notes."""
    lines: list[str] = []
    for one in sources:
        report = one.report
        how = "cached" if one.build_s is None else f"tokenized in {one.build_s:,.1f} s"
        dropped = report.bad + report.dropped_overlong + report.no_supervised_token  # rows and examples
        lines += [
            f"{one.part}: {report.path} ({report.format}), {how}",
            f"  {report.rows:,} rows, {report.examples:,} examples, {report.tokens:,} tokens, "
            f"{report.supervised_tokens / report.tokens:.0%} supervised, {dropped:,} dropped",
            *(f"  skipped: {row}" for row in report.bad_rows),
        ]
    for line in (*lines, *(f"note: {note}" for note in notes)):
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def show_entries(console: Console, folder: Path, entries: Sequence[CachedEntry]) -> None:
    """Prints a table of cache entries and their total size."""
    if not entries:
        console.print(f"{folder}: the cache is empty", soft_wrap=True, highlight=False)
        return
    table = Table("last used (UTC)", "tokens", "size")
    for column in table.columns[1:]:
        column.justify = "right"
    table.add_column("source, tokenizer, written by", overflow="fold")
    for entry in entries:
        key, host = entry.of or {}, (entry.made or {}).get("host")
        origin = "[yellow]unknown[/yellow]" if entry.is_whole else "[yellow]incomplete[/yellow]"
        if entry.is_whole and key:
            length = f"max_length {key['max_length']:,}" if "max_length" in key else None
            settings = ", ".join(filter(None, (key.get("tokenizer"), length)))  # a teacher's entry lacks one or both
            written = f"finetune {key['finetune']}" + (f", {host}" if host else "")
            origin = escape("\n".join(filter(None, (f"{key['source']} ({key['format']})", settings, written))))
        used = f"{datetime.fromtimestamp(entry.used, timezone.utc):%Y-%m-%d %H:%M}"
        tokens = f"{entry.tokens:,}" if entry.tokens is not None else "?"
        table.add_row(used, tokens, readable_bytes(entry.bytes), origin)
    console.print(table)
    size = readable_bytes(sum(entry.bytes for entry in entries))
    console.print(f"{folder}: {len(entries):,} entries, {size}", soft_wrap=True, highlight=False)

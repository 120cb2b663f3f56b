"""`cache list` and `cache clean`: what they print."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from finetune.data.token_cache import CachedEntry


def show_entries(console: Console, folder: Path, entries: Sequence[CachedEntry]) -> None:
    """A table, and what it sums to."""
    if not entries:
        console.print(f"{folder}: nothing is cached", soft_wrap=True, highlight=False)
        return
    table = Table("what", "under", "tokens", "size", "last used (UTC)", "made by")
    for entry in entries:
        table.add_row(*_cells(entry))
    console.print(table)
    size = readable_bytes(sum(entry.bytes for entry in entries))
    console.print(f"{folder}: {len(entries):,} entries, {size}", soft_wrap=True, highlight=False)


def _cells(entry: CachedEntry) -> Iterator[str]:
    of, made = entry.of or {}, entry.made or {}
    if not entry.is_whole:
        yield "[yellow]not finished[/yellow]"
    else:
        yield escape(f"{of['source']}\n{of['format']}") if of else "[yellow]unknown[/yellow]"
    yield escape(f"{of['tokenizer']}\nmax_length {of['max_length']:,}") if of else "?"
    yield f"{entry.tokens:,}" if entry.tokens is not None else "?"
    yield readable_bytes(entry.bytes)
    yield f"{datetime.fromtimestamp(entry.used, timezone.utc):%Y-%m-%d %H:%M}"
    yield escape(f"finetune {of['finetune']}\n{made['host']}") if of and made else "?"


def readable_bytes(count: int) -> str:
    """
    >>> readable_bytes(3_500_000)
    '3.3 MiB'
    """
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.1f} {unit}" if unit != "B" else f"{count} B"
